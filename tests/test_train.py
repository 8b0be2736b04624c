"""`jaxremat.train`: real runs of a very small model, how they go on, and what stops them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxremat.command import parse_flags
from jaxremat.config import TrainConfig
from jaxremat.model.decoder_workload import DecoderFactory
from jaxremat.model.presets import preset
from jaxremat.train import TrainRunFlags, check_train, main
from jaxremat.training.metrics import read_metrics
from jaxremat.training.run_folder import config_of, differences
from jaxremat.trial.settings import Run
from jaxremat.xla.target import load_target
from tests.trainings import losses, own_flags, trained

#: A decoder on text. XLA takes seconds to compile its step.
DECODER = (
    *(
        "--model",
        "tiny",
        "--num-layers",
        "1",
        "--embed-dim",
        "16",
        "--mlp-dim",
        "32",
        "--num-heads",
        "2",
        "--num-kv-heads",
        "2",
    ),
    *("--head-dim", "8", "--seq-len", "16", "--batch", "4", "--target", "cpu", "--sample-tokens", "0", "--eval-every", "0"),
)
#: A workload of layers, for plans.
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
def whole(own, tmp_path_factory) -> Path:
    """A run of 12 steps that nothing interrupted, with checkpoints of the steps 8 and 12."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trained(folder, *own, "--num-steps", "12")
    return folder


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def test_a_line_for_each_step(whole):
    rows = read_metrics(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert len(set(losses(rows))) == 12
    assert all(row["tokens_per_s"] is None and row["samples_per_s"] > 0 for row in rows)
    times = [row["time_s"] for row in rows]
    assert times == sorted(times)
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["12", "8"]


def test_what_was_promised_beside_what_was_shown(whole):
    row = json.loads((whole / "trial.json").read_text())
    assert row["policy"] == "none"
    assert row["total_bytes"] > 0
    assert row["step_source"] == "measured"
    assert row["step_min_s"] <= row["step_s"] <= row["step_max_s"]


def test_a_run_goes_on_with_the_same_losses(own, whole, tmp_path, capsys):
    """Its batches are skipped, and its random keys are those of the step's number."""
    first = trained(tmp_path, *own, "--num-steps", "7")
    both = trained(tmp_path, *own, "--num-steps", "12")
    assert len(first) == 7
    assert "Goes on after step 7." in capsys.readouterr().out
    assert losses(both) == losses(read_metrics(whole / "metrics.jsonl"))


def test_a_decoder_under_another_policy_goes_on(tmp_path, capsys):
    """With evaluation and text. The losses are those of one policy alone."""
    flags = (*DECODER, "--dropout", "0", "--eval-every", "3", "--eval-batches", "2", "--sample-tokens")
    trained(tmp_path / "a", *flags, "5", "--num-steps", "4")
    out = capsys.readouterr().out
    assert "before: 'The " in out
    assert "after step 4: 'The " in out
    rows = trained(tmp_path / "a", *flags, "0", "--num-steps", "7", "--policy", "nothing")
    assert "otherwise than before: policy dots then, nothing now" in capsys.readouterr().err
    assert [row["step"] for row in rows if row["eval_loss"] is not None] == [3, 4, 6, 7]
    assert all(0 < row["loss"] < 6 and row["tokens_per_s"] > 0 for row in rows)
    assert losses(rows) == losses(trained(tmp_path / "b", *flags, "0", "--num-steps", "7"))


@pytest.mark.any_jax
def test_a_folder_whose_random_keys_followed_otherwise_from_the_seed_is_refused(own, copied, capsys):
    config = json.loads((copied / "config.json").read_text())
    assert config["decides"].pop("random_keys")
    (copied / "config.json").write_text(json.dumps(config))
    before = read_metrics(copied / "metrics.jsonl")
    assert trained(copied, *own, "--num-steps", "13", code=2) == before
    assert "random_keys none then" in capsys.readouterr().err


@pytest.mark.any_jax
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--learning-rate", "1e-3"), "learning_rate 0.0003 then, 0.001 now"),
        (("--accumulate", "2"), "accumulate 1 then, 2 now; global_batch 4 then, 8 now"),
        (("--optimizer", "lion"), "optimizer adamw then, lion now"),
        (("--seed", "1", "--clip-norm", "2"), "clip_norm 1.0 then, 2.0 now; seed 0 then, 1 now"),
    ],
)
def test_another_configuration_is_refused(own, copied, capsys, flags, said):
    before = (copied / "config.json").read_text()
    trained(copied, *own, *flags, code=2)
    error = capsys.readouterr().err
    assert f"has a run of another configuration: {said}." in error
    assert "Traceback" not in error
    assert (copied / "config.json").read_text() == before


@pytest.mark.any_jax
def test_another_text_is_another_configuration(tmp_path):
    """And so is a text that was changed."""
    config = [config_of(run_of(data), "dots", 4) for data in (None, __file__)]
    (changed,) = differences(config[1].decides, config[0].decides)
    assert changed.startswith("data ")


def run_of(data: str | None) -> Run:
    return Run(DecoderFactory(preset("tiny").config, "xla", data=data), TrainConfig(seq_len=16), load_target("cpu"), 2**30)


@pytest.mark.any_jax
@pytest.mark.parametrize("harm", ["remove", "half", "flip"])
def test_a_checkpoint_that_is_not_whole(own, whole, copied, capsys, harm):
    """The newest one is damaged in its largest file: the run goes on from the one before, and ends with the same losses."""
    newest = copied / "checkpoints" / "12"
    largest = max(newest.glob("state/**/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    if harm == "remove":
        largest.unlink()
    elif harm == "half":
        largest.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    rows = trained(copied, *own, "--num-steps", "12")
    assert "the checkpoint of step 12 isn't whole" in capsys.readouterr().err
    assert losses(rows) == losses(read_metrics(whole / "metrics.jsonl"))
    assert (copied / "damaged-12").is_dir()


@pytest.mark.any_jax
def test_a_step_s_checkpoint_is_damaged_twice(own, copied, capsys):
    """Both are kept, each under a name of its own."""
    for name in ("damaged-12", "damaged-12-2"):
        (copied / "checkpoints" / "12" / "sum" / "metadata").unlink()
        trained(copied, *own, "--num-steps", "12")
        assert f"it is kept as {name}" in " ".join(capsys.readouterr().err.split())
        assert (copied / name).is_dir()


@pytest.mark.any_jax
def test_no_checkpoint_is_whole(own, copied, capsys):
    for path in (copied / "checkpoints").rglob("manifest.ocdbt"):
        path.write_bytes(b"")
    for _ in range(2):
        rows = trained(copied, *own, "--num-steps", "12", code=1)
        assert "no checkpoint in" in capsys.readouterr().err
        assert len(rows) == 12
    assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == ["12", "8"]
    assert not list(copied.glob("damaged-*"))


@pytest.mark.any_jax
def test_lines_that_a_crash_cut_short_are_dropped(own, whole, copied, capsys):
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "loss": 5.0, "time_s": 1.0}\n{"step": 14, "lo')
    assert trained(copied, *own, "--num-steps", "12") == read_metrics(whole / "metrics.jsonl")
    assert "Step 12 was reached before; a larger --num-steps goes on." in " ".join(capsys.readouterr().out.split())


@pytest.mark.any_jax
def test_a_folder_that_another_process_trains_in(own, copied, capsys):
    holder = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", holder, str(copied / "lock")], **pipes) as process:
        process.stdout.readline()
        trained(copied, *own, "--num-steps", "13", code=2)
        process.stdin.close()
    assert "is in use. Likely cause: another process trains in it." in capsys.readouterr().err
    assert len(trained(copied, *own, "--num-steps", "13")) == 13


@pytest.mark.any_jax
def test_a_loss_that_is_no_number(own, tmp_path, capsys):
    """After a step at so high a rate. The checkpoint of that step is kept, and the error says what it holds."""
    high = (*own, "--learning-rate", "1e30", "--warmup-steps", "0", "--checkpoint-every", "1", "--num-steps", "6")
    rows = trained(tmp_path / "stops", *high, code=1)
    error = " ".join(capsys.readouterr().err.split())
    found = re.search(
        r"loss of step (\d) is (inf|nan); the checkpoint of step (\d) has the parameters that led to it", error
    )
    assert found, error
    assert int(found[1]) == int(found[3]) + 1 == len(rows)
    assert rows[-1]["loss"] is None
    assert len(trained(tmp_path / "goes", *high, "--on-nan", "continue")) == 6


@pytest.mark.any_jax
def test_parameters_that_are_no_numbers_are_not_kept(own, tmp_path, capsys):
    """The loss of the last step is from before its update, and so is a number."""
    rows = trained(tmp_path, *own, "--learning-rate", "1e39", "--warmup-steps", "0", "--num-steps", "1", code=1)
    assert rows[0]["loss"] is not None
    assert "the update of step 1 left parameters that are no finite numbers" in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("optimizer", ["adamw-bf16", "lion", "sgd-momentum", "adafactor", "muon"])
def test_every_optimizer_s_state_is_kept(own, tmp_path, optimizer):
    """Two steps, then two more, with a schedule, clipping and microbatches: the losses of four steps at once."""
    schedule = ("--schedule", "cosine", "--decay-steps", "30", "--warmup-steps", "1", "--learning-rate", "0.01")
    flags = (*own, "--optimizer", optimizer, *schedule, "--accumulate", "2", "--num-steps")
    trained(tmp_path / "a", *flags, "2")
    found = losses(trained(tmp_path / "a", *flags, "4"))
    assert found == losses(trained(tmp_path / "b", *flags, "4"))
    assert len(set(found)) == 4


@pytest.mark.any_jax
def test_batches_that_end(own, tmp_path, capsys):
    trained(tmp_path, *own, "--num-steps", "60", code=1)
    assert "the batches of mine.py:workload ended after 40, and 60 steps were asked for" in capsys.readouterr().err
    assert len(trained(tmp_path, *own, "--num-steps", "40")) == 40
    assert "Step 40 was reached before" in " ".join(capsys.readouterr().out.split())


@pytest.mark.any_jax
def test_batches_that_end_within_a_step(own, tmp_path, capsys):
    """A step of fewer microbatches isn't made."""
    rows = trained(tmp_path, *own, "--accumulate", "3", "--num-steps", "60", code=1)
    assert "ended after 13, and 60 steps were asked for" in capsys.readouterr().err
    assert len(rows) == 13


@pytest.mark.any_jax
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--num-steps", "0"), "--num-steps got 0"),
        (("--checkpoint-every", "0"), "--checkpoint-every got 0"),
        (("--eval-every", "-1"), "--eval-every got -1"),
        (("--policy", "dots", "nothing"), "--policy got 2 values"),
        (("--policy", "dotz"), "did you mean 'dots'"),
        (("--batch", "2,4"), "--batch got"),
        (("--target", "h100-80gb"), "a training runs its steps"),
        (("--run-dir", "/proc/no"), "--run-dir '/proc/no' cannot be written"),
        (("--data", "/no/file"), "--data '/no/file' cannot be read"),
        (("--mesh", "fsdp=3"), "JAX_NUM_CPU_DEVICES=3"),
        (("--mesh", "auto", "--devices", "8"), "--mesh auto compares meshes in jaxremat.run, and a training has one mesh"),
        (("--clip-norm", "-1"), "--clip-norm got -1"),
        (("--distributed",), "no mesh"),
    ],
)
def test_what_cannot_be_asked_for(capsys, flags, said):
    assert main([*DECODER, "--num-steps", "1", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Next: " in error
    assert "Traceback" not in error


@pytest.mark.any_jax
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


@pytest.mark.any_jax
def test_a_step_that_does_not_fit(own, tmp_path, capsys):
    """It decides nothing: a smaller batch, which the error advises, goes on in the same folder."""
    same_folder = [*own, "--run-dir", str(tmp_path), "--num-steps", "1"]
    assert main([*same_folder, "--budget", "1KiB"]) == 3
    assert "under none needs 0.000 GiB. Allowed: 0.000 GiB" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert len(trained(tmp_path, *own, "--batch", "2", "--num-steps", "1")) == 1


@pytest.mark.any_jax
@pytest.mark.usefixtures("h100")
def test_a_plan_that_cannot_be_written_names_the_run_s_folder(tmp_path, capsys):
    deep, folder = tmp_path / "deep.py", tmp_path / "run"
    deep.write_text(DEEP)
    (folder / "plan.json.part").mkdir(parents=True)
    argv = ["--model", f"{deep}:workload", "--policy", "auto", "--target", "cpu", "--run-dir", str(folder)]
    assert main([*argv, "--num-steps", "1"]) == 1
    assert f"--run-dir '{folder / 'plan.json'}' cannot be written" in capsys.readouterr().err


@pytest.mark.any_jax
def test_a_text_shorter_than_a_sequence(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("too short")
    assert main([*DECODER, "--data", str(tmp_path / "short.txt")]) == 2
    assert "the text has 9 bytes, and one sequence with its last target takes 17" in capsys.readouterr().err
