"""`jaxremat train`: what is requested, what a run stores and prints, how it resumes, and what stops it."""

import errno
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

from jaxremat.chips.target import load_target
from jaxremat.cli.command import parse_flags
from jaxremat.cli.train import TrainRunFlags, batch_to_train, check_train, main, run_lines, trials_to_train
from jaxremat.config import Optimizer, TrainConfig
from jaxremat.errors import DoesNotFitError, JaxrematError, UsageError
from jaxremat.model.decoder_workload import decoder_factory
from jaxremat.model.presets import preset
from jaxremat.policy.spec import Policy
from jaxremat.report.printer import Report
from jaxremat.report.progress import Progress
from jaxremat.report.training import TrainingPrinter
from jaxremat.session.answers import policy_of
from jaxremat.session.session import Session
from jaxremat.step.inputs import first_state, inputs
from jaxremat.training.checkpoints import Checkpoints, silence_orbax
from jaxremat.training.metrics import MetricsFile, StepMetrics, read_metrics
from jaxremat.training.run_folder import RunConfig, RunFolder, config_of, differences, opened
from jaxremat.trial.record import TrialRecord
from jaxremat.trial.trials import Trials
from jaxremat.workload.load import load_factory
from tests.equality import assert_same_bits
from tests.made_up_records import trial
from tests.trainings import error_of, losses, own_flags, trained

#: A decoder on text.
DECODER = ("--model", "tiny", "--seq-len", "16", "--batch", "4", "--target", "cpu")
#: A workload of layers, for plans and policies.
DEEP = """
import jax, jax.numpy as jnp, numpy as np, jaxremat

def loss(params, batch):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params)[0])

def workload(batch: int = 4):
    return jaxremat.Workload(loss=loss, params=np.ones((2, 16, 16), np.float32), batch=np.ones((batch, 16), np.float32))
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> tuple[str, ...]:
    """The flags of the workload of one's own."""
    return own_flags(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> tuple[str, ...]:
    """The flags of the workload of layers, all but the policy."""
    file = tmp_path_factory.mktemp("deep") / "deep.py"
    file.write_text(DEEP)
    return ("--model", f"{file}:workload", "--target", "cpu", "--policy")


@pytest.fixture(scope="module")
def whole(own, tmp_path_factory) -> Path:
    """A run of 12 steps that nothing interrupted, with checkpoints of the steps 8 and 12."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trained(folder, *own, "--num-steps", "12")
    return folder


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def trials_at(*argv: str) -> tuple[Trials, Policy, int]:
    """The trials that a command line trains with, its policy and its batch. Nothing is compiled."""
    session = Session.of(check_train(parse_flags(TrainRunFlags, argv)), load_target("cpu"))
    (asked,) = session.request.policies
    return trials_to_train(session, asked, quiet=True, folder=None), policy_of(asked), batch_to_train(session, asked)


def config_at(*argv: str) -> RunConfig:
    trials, policy, batch = trials_at(*argv)
    return config_of(trials, str(policy), batch)


# What is requested.


@pytest.mark.parametrize(
    ("flags", "got"),
    [
        (("--num-steps", "0"), "--num-steps 0"),
        (("--checkpoint-every", "0"), "--checkpoint-every 0"),
        (("--eval-every", "-1"), "--eval-every -1"),
        (("--policy", "dots", "nothing"), "--policy 2"),
        (("--policy", "dotz"), "'dotz'"),
        (("--batch", "2,4"), "--batch 2"),
        (("--target", "h100-80gb"), "--target h100-80gb"),
        (("--run-dir", "/proc/no"), "--run-dir '/proc/no'"),
        (("--data", "/no/file"), "--data '/no/file'"),
        (("--mesh", "fsdp=3"), "3"),
        (("--mesh", "auto", "--devices", "8"), "--mesh auto"),
        (("--clip-norm", "-1"), "--clip-norm -1"),
        (("--distributed",), "--mesh"),
    ],
)
def test_what_cannot_be_requested(flags, got):
    others = [] if "--num-steps" in flags else ["--num-steps", "1"]
    error = error_of(
        *(word for word in DECODER if "--target" not in flags or word not in ("--target", "cpu")), *others, *flags
    )
    assert isinstance(error, UsageError)
    assert [part for part in got.split() if part not in f"{error.got}. {error.next_step}"] == []
    assert error.next_step


def test_an_error_is_one_line_and_an_exit_code(capsys):
    assert main([*DECODER, "--num-steps", "0"]) == UsageError.exit_code
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((), (1.0, 20)),
        (("--clip-norm", "0"), (None, 20)),
        (("--clip-norm", "2", "--warmup-steps", "3"), (2.0, 3)),
        (("--schedule", "cosine", "--decay-steps", "20"), (1.0, 19)),
        (("--schedule", "cosine", "--decay-steps", "1"), (1.0, 0)),
    ],
)
def test_the_defaults_of_a_training(flags, found):
    train = check_train(parse_flags(TrainRunFlags, [*DECODER, *flags])).train
    assert (train.clip_norm, train.warmup_steps) == found


def test_a_text_shorter_than_a_sequence(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    error = error_of(*DECODER, "--data", str(tmp_path / "short.txt"))
    assert isinstance(error, UsageError)
    assert {"9", "17"} <= {*re.findall(r"\d+", error.got)}, "bytes of the text, and of a sequence with its last target"


# The folder.


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (("--learning-rate", "1e-3"), {"learning_rate": (0.0003, 0.001)}),
        (("--accumulate", "2"), {"accumulate": (1, 2), "global_batch": (4, 8)}),
        (("--optimizer", "lion"), {"optimizer": ("adamw", "lion")}),
        (("--seed", "1", "--clip-norm", "2"), {"clip_norm": (1.0, 2.0), "seed": (0, 1)}),
    ],
)
def test_another_configuration_is_rejected(own, tmp_path, flags, changed):
    folder, then, now = RunFolder(tmp_path), config_at(*own), config_at(*own, *flags)
    assert folder.compared(now) == []
    folder.keep_config(then)
    before = folder.config.read_text()
    assert differences(now.decides, then.decides) == changed
    with pytest.raises(UsageError) as caught:
        folder.compared(now)
    assert str(tmp_path) in caught.value.got
    assert all(name in caught.value.got for name in changed)
    assert folder.config.read_text() == before


def test_another_policy_is_no_other_configuration(deep, tmp_path):
    """A folder whose random keys followed otherwise from the seed is one of another configuration, and no folder of a run."""
    folder, then, now = RunFolder(tmp_path), config_at(*deep, "none"), config_at(*deep, "nothing")
    folder.keep_config(then)
    assert differences(now.rounding, then.rounding) == {"policy": ("none", "nothing")}
    assert len(folder.compared(now)) == 1
    folder.keep_config(RunConfig({name: v for name, v in then.decides.items() if name != "random_keys"}, then.rounding))
    edited = [
        b"[]",
        b'{"mine": 1}',
        b'{"decides": 3, "rounding": {}}',
        b'{"decides": {}, "rounding": []}',
        b"\xff",
        b"",
        None,
    ]
    for content in (folder.config.read_bytes(), *edited):
        folder.config.unlink()
        folder.config.write_bytes(content) if content is not None else folder.config.mkdir()
        with pytest.raises(UsageError) as caught:
            folder.compared(then)
        assert str(tmp_path) in caught.value.got
        assert "--run-dir" in caught.value.next_step


def test_a_user_s_code_that_changed_is_noted(own, tmp_path):
    """The hash of a run that was written before there was one is no other code."""
    folder, config = RunFolder(tmp_path), config_at(*own)
    former, then, now = (replace(config, rounding={**config.rounding, "code": code}) for code in (None, "a", "b"))
    folder.config.write_text(json.dumps(asdict(former)))
    assert folder.compared(then) == []
    folder.config.write_text(json.dumps(asdict(then)))
    assert folder.compared(then) == []
    (note,) = folder.compared(now)
    assert "code isn't as it was" in note
    assert "last bits" not in note


def test_settings_of_jax_that_decide_random_numbers_are_another_configuration(own):
    then = config_at(*own)
    with jax.threefry_partitionable(False):
        now = config_at(*own)
    assert differences(now.decides, then.decides) == {"jax_threefry_partitionable": (None, False)}


@pytest.mark.parametrize("name", ["metrics.jsonl", "trial.json", "checkpoints/12"])
def test_a_folder_without_its_config_is_not_resumed(own, tmp_path, name):
    """Nobody could say whether it is the same run. Other files may be there."""
    folder, config = RunFolder(tmp_path), config_at(*own)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "notes.txt").touch()
    assert folder.compared(config) == []
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(UsageError) as caught:
        folder.compared(config)
    assert all(text in caught.value.got for text in (str(tmp_path), name, "config.json"))
    assert "--run-dir" in caught.value.next_step
    folder.config.write_text(json.dumps(asdict(config)))
    assert folder.compared(config) == []


def test_another_text_is_another_configuration():
    """And so is a text that was changed."""
    config = [config_of(run_of(data), "dots", 4) for data in (None, __file__)]
    assert list(differences(config[1].decides, config[0].decides)) == ["data"]


def run_of(data: str | None) -> Trials:
    return Trials(
        decoder_factory(preset("tiny").config, "xla", data=data), TrainConfig(seq_len=16), load_target("cpu"), 2**30
    )


def test_a_text_s_batches_resume_after_a_step():
    workload, train = run_of(None).workload_at(2), TrainConfig(seq_len=16)
    every = inputs(workload, train, 0)
    three = [next(every) for _ in range(3)]
    np.testing.assert_array_equal(next(inputs(workload, train, 2)), three[2])
    assert (three[1] != three[2]).any()


def test_lines_of_later_steps_and_lines_that_a_crash_cut_short_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 0)
    for step in (1, 2, 3):
        first.append(StepMetrics(step, 0.5, None, step / 2))
    with path.open("a") as file:
        file.write('{"step": 2}\n{"step": 2, "time_s": "1"}\n{"step": true, "time_s": 1}\n{"step": 0, "time_s": 1}\n[]\n')
        file.write('{"step": 2, "time_s": 1e999}\n{"step": 2, "time_s": NaN}\n{"step": 4, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    resumed = MetricsFile(path, 2)
    assert (resumed.time_s, resumed.num_dropped) == (1.0, 1)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert len(path.read_text().splitlines()) == 2


def test_metrics_that_are_no_file(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(JaxrematError) as caught:
        MetricsFile(tmp_path / "metrics.jsonl", 0)
    assert f"--run-dir '{tmp_path / 'metrics.jsonl'}'" in caught.value.got


@pytest.mark.full
def test_a_folder_that_another_process_trains_in(tmp_path):
    holder = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(); sys.stdin.read()"
    command = [sys.executable, "-S", "-c", holder, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        with pytest.raises(UsageError) as caught, opened(tmp_path):
            pass
        process.stdin.close()
    assert str(tmp_path) in caught.value.got
    assert caught.value.next_step
    with opened(tmp_path) as folder:
        assert folder.path == tmp_path


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    folder = RunFolder(tmp_path / "gone")
    with pytest.raises(JaxrematError) as caught:
        folder.keep(folder.plan, "{}")
    assert f"--run-dir '{folder.plan}'" in caught.value.got


# Checkpoints.

#: What the system says of a full disk.
FULL = os.strerror(errno.ENOSPC)
#: A state with a random key, and an array that takes most of the bytes.
STATE = {"w": np.arange(4096, dtype=np.float32), "count": np.int32(3), "key": jax.random.key(0)}


def shapes_of(state: Any) -> Any:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), state)


def state_after(step: int) -> Any:
    return jax.tree.map(jnp.asarray, STATE | {"count": np.int32(step)})


def plain(state: Any) -> Any:
    """The state with random keys as the numbers in them."""
    return {**state, "key": jax.random.key_data(state["key"])}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The checkpoints of the steps 8 and 12."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(folder, shapes_of(STATE))
    for step in (4, 8, 12):
        checkpoints.save(step, state_after(step))
    checkpoints.wait()
    return folder


@pytest.fixture
def damaged(saved, tmp_path) -> Path:
    """A copy of these checkpoints, which a test damages."""
    shutil.copytree(saved, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def found_in(folder: Path) -> tuple[int, int, list[str]]:
    """The step of the newest whole checkpoint, the step in its state, and the notes."""
    notes: list[str] = []
    newest = Checkpoints(folder, shapes_of(STATE)).newest(notes.append)
    assert newest
    assert_same_bits(plain(newest[1]), plain(state_after(newest[0])))
    return newest[0], int(newest[1]["count"]), notes


@pytest.mark.parametrize("harm", ["none", "remove", "half", "flip"])
def test_a_checkpoint_that_is_not_whole(damaged, harm):
    """The newest one is damaged in its largest file: the one before is found, and the newest one is moved away."""
    largest = max((damaged / "12").glob("state/**/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    if harm == "remove":
        largest.unlink()
    elif harm == "half":
        largest.write_bytes(content[: len(content) // 2])
    elif harm == "flip":
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    step, count, notes = found_in(damaged)
    assert step == count == (12 if harm == "none" else 8)
    assert len(notes) == (harm != "none")
    assert (damaged.parent / "damaged-12").is_dir() == (harm != "none")


def test_a_step_s_checkpoint_is_damaged_twice(damaged):
    """Both are stored, each under a name of its own."""
    for name in ("damaged-12", "damaged-12-2"):
        (damaged / "12" / "sum" / "metadata").unlink()
        step, _, (note,) = found_in(damaged)
        assert (step, name in note) == (8, True)
        assert (damaged.parent / name).is_dir()
        shutil.copytree(damaged / "8", damaged / "12")


def test_a_checkpoint_under_the_name_of_another_step(damaged):
    """A copy of step 8 as step 100, and step 12 renamed."""
    shutil.copytree(damaged / "8", damaged / "100")
    (damaged / "12").rename(damaged / "20")
    step, count, notes = found_in(damaged)
    assert (step, count, len(notes)) == (8, 8, 2)
    assert (damaged.parent / "damaged-100").is_dir()
    assert (damaged.parent / "damaged-20").is_dir()


def test_files_of_others_among_checkpoints_stay(damaged):
    (damaged / "notes.txt").write_text("mine")
    (damaged / "13").write_text("mine")
    (damaged / "best").mkdir()
    assert found_in(damaged) == (12, 12, [])
    checkpoints = Checkpoints(damaged, shapes_of(STATE))
    checkpoints.save(16, state_after(16))
    checkpoints.wait()
    assert sorted(os.listdir(damaged)) == ["12", "13", "16", "best", "notes.txt"]


def test_a_checkpoint_on_a_full_disk(damaged, monkeypatch):
    """The error says how much is free and which one is whole. What was written of the new one doesn't take the room."""
    checkpoints = Checkpoints(damaged, shapes_of(STATE))

    def fails(manager, step, **_):
        (damaged / "16.orbax-checkpoint-tmp").mkdir()
        (damaged / "16.orbax-checkpoint-tmp" / "part").write_text("part")
        raise ValueError(f'RESOURCE_EXHAUSTED: Error writing "w" in "{damaged}/16": Failed to write 9 bytes: {FULL}')

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=12_345 if path == damaged else -1))
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", fails)
        with pytest.raises(JaxrematError) as caught:
            checkpoints.save(16, state_after(16))
    assert str(damaged) in caught.value.got
    assert FULL in caught.value.got
    assert "12,345" in caught.value.cause
    assert re.findall(r"\d+", caught.value.next_step) == ["12"]
    assert sorted(os.listdir(damaged)) == ["12", "8"]
    assert found_in(damaged) == (12, 12, [])


def test_what_orbax_prints_beside_its_error_is_left_out(caplog, monkeypatch):
    """And only that."""
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    for _ in range(2):
        silence_orbax()
    others = [
        (RuntimeError("other"), None),
        (KeyError("Event loop is closed"), None),
        (RuntimeError("Event loop is closed"), 1),
    ]
    for error, found_in_object in ((RuntimeError("Event loop is closed"), None), *others):
        sys.unraisablehook(SimpleNamespace(exc_type=type(error), exc_value=error, object=found_in_object))  # pyright: ignore
    assert [(found.exc_value, found.object) for found in shown] == others
    for file in ("/lib/orbax/checkpoint/serialization.py", "/lib/mine.py"):  # whose coroutines were dropped
        coroutine = SimpleNamespace(cr_code=SimpleNamespace(co_filename=file))
        sys.unraisablehook(SimpleNamespace(exc_type=Exception, exc_value=None, object=coroutine))  # pyright: ignore
    assert [found.object.cr_code.co_filename for found in shown[len(others) :]] == ["/lib/mine.py"]
    asyncio = logging.getLogger("asyncio")
    for text in ("Task exception was never retrieved\nfuture: /orbax/x.py", "Task exception was never retrieved", "orbax"):
        asyncio.error(text)
    assert [line.getMessage() for line in caplog.records] == ["Task exception was never retrieved", "orbax"]


def test_checkpoints_that_are_no_folder(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(JaxrematError) as caught:
        Checkpoints(tmp_path / "checkpoints", shapes_of(STATE))
    assert str(tmp_path / "checkpoints") in caught.value.got


def test_no_checkpoint_is_whole(damaged):
    for path in damaged.rglob("manifest.ocdbt"):
        path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(JaxrematError) as caught:
            found_in(damaged)
        assert str(damaged) in caught.value.got
        assert "12" in caught.value.got
    assert sorted(path.name for path in damaged.iterdir()) == ["12", "8"]
    assert not list(damaged.parent.glob("damaged-*"))


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_every_optimizer_s_state_is_stored(own, tmp_path, optimizer):
    workload = load_factory(own[1])()
    train = TrainConfig(optimizer=optimizer, schedule="cosine", clip_norm=1.0)
    state = first_state(workload, train, jax.devices()[0])
    checkpoints = Checkpoints(tmp_path / "checkpoints", shapes_of(state))
    checkpoints.save(1, state)
    checkpoints.wait()
    newest = checkpoints.newest(lambda note: None)
    assert newest
    assert_same_bits(newest[1], state)


# Runs.


@pytest.mark.full
def test_a_run_stores_a_line_for_each_step_and_what_was_promised_beside_what_was_shown(whole):
    rows = read_metrics(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert len(set(losses(rows))) == 12
    assert all(row["tokens_per_s"] is None and row["samples_per_s"] > 0 for row in rows)
    times = [row["time_s"] for row in rows]
    assert times == sorted(times)
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["12", "8"]
    row = json.loads((whole / "trial.json").read_text())
    assert row["policy"] == "none"
    assert row["total_bytes"] > 0
    assert row["step_source"] == "measured"
    assert row["step_min_s"] <= row["step_s"] <= row["step_max_s"]


@pytest.mark.full
def test_a_run_resumes_with_the_same_losses(own, whole, tmp_path):
    """Its batches are skipped, and its random keys are those of the step's number."""
    first = trained(tmp_path, *own, "--num-steps", "7")
    both = trained(tmp_path, *own, "--num-steps", "12")
    assert both[:7] == first, "with their times"
    assert losses(both) == losses(read_metrics(whole / "metrics.jsonl"))


@pytest.mark.full
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(own, whole, copied):
    """Lines of steps after the last one are dropped. A run that has ended does nothing."""
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "loss": 5.0, "time_s": 1.0}\n{"step": 14, "lo')
    expected = read_metrics(whole / "metrics.jsonl")
    assert trained(copied, *own, "--num-steps", "12") == expected
    (copied / "checkpoints" / "12" / "sum" / "metadata").unlink()
    rows = trained(copied, *own, "--num-steps", "12")
    assert rows[:8] == expected[:8]
    assert losses(rows) == losses(expected)
    assert (copied / "damaged-12").is_dir()


@pytest.mark.full
def test_a_run_resumes_under_another_policy(deep, tmp_path):
    """The losses are those of one policy alone."""
    first = trained(tmp_path / "a", *deep, "none", "--num-steps", "2")
    rows = trained(tmp_path / "a", *deep, "nothing", "--num-steps", "4")
    assert rows[:2] == first
    assert losses(rows) == losses(trained(tmp_path / "b", *deep, "nothing", "--num-steps", "4"))


@pytest.mark.full
def test_a_run_resumes_with_moments_a_schedule_and_microbatches(own, tmp_path):
    """Two steps, then two more: the losses of four steps at once."""
    schedule = ("--schedule", "cosine", "--decay-steps", "30", "--warmup-steps", "1", "--learning-rate", "0.01")
    flags = (*own, "--optimizer", "muon", *schedule, "--accumulate", "2", "--num-steps")
    trained(tmp_path / "a", *flags, "2")
    found = losses(trained(tmp_path / "a", *flags, "4"))
    assert found == losses(trained(tmp_path / "b", *flags, "4"))
    assert len(set(found)) == 4


@pytest.mark.full
def test_a_run_resumes_from_checkpoints_of_the_trained_parameters_alone(own, tmp_path):
    """The frozen ones are made again as at the beginning, and other ones are rejected."""
    flags = (*own, "--freeze", "in")
    first = trained(tmp_path / "a", *flags, "--num-steps", "2")
    found = trained(tmp_path / "a", *flags, "--num-steps", "4")
    assert found[:2] == first
    assert losses(found) == losses(trained(tmp_path / "b", *flags, "--num-steps", "4"))
    stored = (tmp_path / "a" / "checkpoints" / "4" / "state" / "_METADATA").read_text()
    assert set(re.findall(r"params\.(\w+)", stored)) == {"out"}
    sums = tmp_path / "a" / "checkpoints" / "4" / "sum" / "metadata"
    sums.write_text(json.dumps(json.loads(sums.read_text()) | {"frozen": 1}))
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "2")
    error = error_of(*flags, "--num-steps", "6", "--run-dir", str(tmp_path / "a"))
    assert "frozen" in error.got


@pytest.mark.full
@pytest.mark.parametrize(("accumulate", "steps"), [(1, 40), (3, 13)])
def test_batches_that_end(own, tmp_path, accumulate, steps):
    """A step of fewer microbatches isn't made."""
    flags = (*own, "--accumulate", str(accumulate), "--run-dir", str(tmp_path), "--num-steps")
    error = error_of(*flags, "60")
    assert re.findall(r"\d+", error.got) == [str(steps), "60"]
    assert error.next_step.startswith(f"--num-steps {steps}")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == steps
    assert main([*flags, str(steps)]) == 0


@pytest.mark.full
def test_a_loss_that_is_no_number(own, tmp_path):
    """After a step at so high a rate. The checkpoint of that step is stored, and the error says what it holds."""
    high = (*own, "--learning-rate", "1e30", "--warmup-steps", "0", "--checkpoint-every", "1", "--num-steps", "6")
    error = error_of(*high, "--run-dir", str(tmp_path / "stops"))
    rows = read_metrics(tmp_path / "stops/metrics.jsonl")
    assert re.findall(r"\d+|inf|nan", error.got)[::2] == [str(len(rows)), str(len(rows) - 1)]
    assert rows[-1]["loss"] is None
    assert len(trained(tmp_path / "goes", *high, "--on-nan", "continue")) == 6


@pytest.mark.full
def test_parameters_that_are_no_numbers_are_not_stored(own, tmp_path):
    """The loss of the last step is from before its update, and so is a number."""
    rate = ("--learning-rate", "1e39", "--warmup-steps", "0", "--num-steps", "1")
    error = error_of(*own, *rate, "--run-dir", str(tmp_path))
    assert re.findall(r"\d+", error.got) == ["1"]
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["loss"] is not None
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.full
def test_a_step_that_does_not_fit(own, tmp_path):
    """It decides nothing: a smaller batch, which the error advises, runs in the same folder."""
    error = error_of(*own, "--run-dir", str(tmp_path), "--num-steps", "1", "--budget", "1KiB")
    assert isinstance(error, DoesNotFitError)
    assert "--batch" in error.next_step
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert len(trained(tmp_path, *own, "--batch", "2", "--num-steps", "1")) == 1


# What a training prints.


def printed(num_steps: int, began: tuple[int, str], rows: list[StepMetrics], after: str, row: TrialRecord | None) -> str:
    """Stdout and stderr of a made-up training, its seconds apart."""
    out, err = io.StringIO(), io.StringIO()
    report, progress = Report(Console(file=out, width=100)), Progress(Console(file=err, width=100))
    printer = TrainingPrinter(report, progress, num_steps)
    printer.began(*began)
    for metrics in rows:
        printer.step(metrics, float("nan") if metrics.loss is None else metrics.loss, 1.5)
    printer.ended(num_steps, row, after)
    lines = f"{out.getvalue()}{err.getvalue()}".splitlines()
    return "\n".join(re.sub(r"^\[ *[\d.]+ s\]", "[seconds]", line).rstrip() for line in lines)


def test_an_evaluation_that_there_is_not_is_said(own, monkeypatch):
    monkeypatch.setattr("jaxremat.cli.train.driver_here", lambda: False)
    trials, policy, batch = trials_at(*own)
    workload = replace(trials.workload_at(), eval_batches=None)
    monkeypatch.setattr(type(trials), "workload_at", lambda self, batch=None: workload)

    def lines(*flags: str) -> str:
        return "\n".join(run_lines(check_train(parse_flags(TrainRunFlags, (*own, *flags))), trials, policy, batch, None))

    assert "--eval-every without effect" in lines("--eval-every", "2")
    assert "without effect" not in lines()


def test_what_a_training_prints(own, monkeypatch, snapshot):
    """Its heading, a line now and then, its text, its record; and what a run prints that has nothing left to do."""
    monkeypatch.setattr("jaxremat.cli.train.driver_here", lambda: False)
    request = check_train(parse_flags(TrainRunFlags, own))
    trials, policy, batch = trials_at(*own)
    headings = ["\n".join(run_lines(request, trials, policy, batch, folder)) for folder in (None, RunFolder(Path("runs/a")))]
    tokens = [StepMetrics(step, 3 - step / 100, 61_200.0, 1.5 * step) for step in (1, 2, 20, 39, 40, 41)]
    tokens[3] = replace(tokens[3], eval_loss=2.25)
    tokens[5] = replace(tokens[5], loss=None)
    samples = [StepMetrics(step, 0.5, None, 10.0, samples_per_s=950.0) for step in (3, 4)]
    record = replace(trial(8), step_s=1.5, step_source="measured")
    parts = (
        *headings,
        printed(5000, (0, "The[?]"), tokens, "The end", record),
        printed(4, (2, ""), samples, "", None),
        printed(4, (4, ""), [], "", None),
    )
    assert "\n\n----\n\n".join(parts) == snapshot
