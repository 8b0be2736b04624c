"""What cannot be meant is rejected: an error of the right class, whose fields say what was given and what to type next.

One table has a command line of each kind. The messages are a snapshot, `__snapshots__/test_errors.ambr`, and nowhere else:
`python -m pytest tests/test_errors.py --snapshot-update` writes it after a change of words. Most run in this process through
the command's own `main`. What depends on the process runs in a fresh one.
"""

import contextlib
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from jaxremat.chips import installed
from jaxremat.chips.catalog import PRESETS as XLA_PRESETS
from jaxremat.chips.catalog import bundled_names
from jaxremat.chips.installed import AOT_WHEELS, TOOLKIT_FILES, TOOLKIT_WHEELS, check_aot_wheels, driver_number
from jaxremat.chips.nvidia.gpu import load_gpu, nvidia_driver
from jaxremat.cli.command import parse_flags
from jaxremat.cli.grid import check_sweep
from jaxremat.cli.machine.checks import run_checks
from jaxremat.cli.run import check_flags, main
from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.errors import (
    JaxrematError,
    MissingDependencyError,
    TargetError,
    UnknownNameError,
    UnknownPolicyError,
    UsageError,
    nearest,
)
from jaxremat.model.presets import PRESETS, preset
from jaxremat.policy.grammar import forms
from jaxremat.report.doctor import Row
from jaxremat.session.flags import RunFlags, SweepFlags
from tests.made_up_machines import MACHINES, VARIABLES, with_variables
from tests.rejections import COMMANDS, flags_of, rejected, without_progress

#: By the class of the error, command lines that are rejected. The flag that is wrong stands last. `{dir}` is a folder of
#: damaged files. The model is tiny unless one is given.
REJECTED: dict[type[JaxrematError], str] = {
    UsageError: """
        run --xla-remat --policy auto
        run --target cpu --batch 2 --policy
        run --batch --json
        run --model gtp2
        run --model 7777
        run --model tests/user_files.py
        run --model nope.py
        run --page x.html
        recommend --mesh fsdp=8
        train --out x
        run --num-kv-heads 3
        run --positions rope --head-dim 15
        run --positions rope --rotary-fraction 0.2
        run --rope-scaling {}
        run --window-pattern x
        run --sliding-window -1
        run --logit-softcap -1
        run --dropout 1.0
        run --seq-len 129
        run --seq-len 0
        run --num-layers 0
        run --rope-theta -1
        run --norm-eps nan
        run --learning-rate 0
        run --weight-decay -1
        run --seed -1
        run --batch 8,,16
        train --batch 0
        run --budget lots
        run --budget 40
        recommend --budget two
        run --mem-fraction 0
        run --max-batch 0
        run --steps -2
        run --loss chunked:0
        run --accumulate 0
        run --clip-norm 0
        run --schedule cosine --decay-steps 10 --warmup-steps 10
        run --warmup-steps -1
        run --headroom 1
        run --headroom 0.1 --budget 1GiB
        run --policy plan:/nope
        run --policy plan:
        run --policy plan:{dir}/toml
        run --objective batch
        run --policy nothing --explain-plan
        run --frontier
        run --plot x.png
        run --policy auto --objective memory
        run --policy auto --batch 8 --objective batch
        run --policy auto --batch 8,16 --save-plan x.json
        run --frontier --batch 8 --policy dots
        run --frontier --batch 8 --code
        run --frontier --batch 8 --objective memory
        run --scan-layers auto
        run --xla-preset fast
        run --target cpu --xla-preset jax-toolbox
        run --global-batch 0
        run --global-batch 8 --accumulate 2
        run --global-batch 12 --batch 4,5
        run --seq-len 64,32 --list names
        run --policy auto --seq-len 64,32 --save-plan x.json
        run --buckets 2
        run --lengths /nope
        run --mesh fsdp=eight
        run --mesh fspd=8
        run --mesh ici_fdsp_parallelism=8
        run --mesh fsdp=8 --global-batch 12
        run --mesh fsdp=2,tensor=8
        run --list shardings
        run --mesh auto
        run --devices 8 --nodes 3 --mesh auto
        run --devices 8 --mesh auto --target cpu
        run --devices 8 --mesh auto --batch 1,2
        run --devices 8 --policy auto --mesh auto --offload
        run --mesh fsdp=8 --target cpu --coordinator 127.0.0.1:5000
        run --mesh fsdp=8 --target cpu --process-id 0
        run --mesh fsdp=8 --target cpu --coordinator 127.0.0.1:5000 --num-processes 3 --process-id 3
        run --mesh fsdp=8 --target cpu --coordinator 127.0.0.1:5000 --process-id 0 --num-processes 0
        run --mesh fsdp=8 --target cpu --num-processes 3 --process-id 0 --coordinator somewhere
        run --mesh fsdp=8 --target cpu --distributed --initialization-timeout 0
        run --mesh fsdp=8 --distributed --target h100-80gb
        run --mesh fsdp=8 --target cpu --policy auto --distributed
        run --mesh fsdp=8 --target cpu --distributed --list names
        run --target cpu --distributed
        run --model-arg width=3
        run --hf /nope
        run --target cpu --batch 2 --data /nope
        run --target cpu --batch 2 --data {dir}
        run --target cpu --batch 2 --data {dir}/empty
        run --target cpu --batch 2 --data {dir}/short --seq-len 64
        run --target cpu --batch 2 --data pyproject.toml --vocab-size 255
        train --target cpu --batch 2 --vocab-size 255
        run --target cpu --batch 2 --out /nope/x
        run --target cpu --batch 2 --out {dir}
        run --target cpu --batch 2 --attention cudnn
        run --target cpu --dump-target {dir}/x
        explain --policy auto
        explain --top -1
        explain --redact
        explain --xprof /proc/no
        explain --devices 8 --mesh auto
        explain --seq-len 32,64
        train --eval-batches 0
        train --target h100-80gb
        train --policy dots nothing
        train --devices 8 --mesh auto
        sweep --policy
        sweep --shard 0/4
        sweep --shard 5/4
        sweep --jobs 0
        sweep --timeout 0
        sweep --fresh --retry-failed
        recommend --target cpu
        recommend --devices 0
        recommend --price /nope
        watch --interval nan
        doctor --limit 0
    """,
    TargetError: """
        run --target h100
        run --target /nope/x.txt
        run --target {dir}
        run --target {dir}/binary
        run --target {dir}/empty
        run --target {dir}/comment
        run --target {dir}/truncated
        run --target {dir}/toml
        run --target {dir}/no_field
        run --target {dir}/zero
        run --target {dir}/rocm
        run --target {dir}/old
        run --target {dir}/no_cc
        run --target {dir}/odd_cc
    """,
    UnknownPolicyError: """
        run --policy dotts
        explain --policy dots,nothing
        run --policy dots,attention
        run --policy remat_policy=full
        run --policy remat_policy:full
        run --policy Dots
        run --policy zzzzqq
        run --policy save:context+dotz
        run --policy save_only_these_names(a)
        run --policy custom
        run --policy every
        run --policy save
        run --policy dots+
        run --policy save:
        run --policy every:1.5
        run --policy one-in:x
        run --policy one-in:3
        run --policy one-in:2+dots
        run --policy attention
        run --policy dots+nothing
        run --policy save:a+offload:a
        run --policy save:a+save:b
    """,
    UnknownNameError: """
        run --target cpu --batch 2 --policy save:qery_proj
        run --target cpu --batch 2 --policy every:2+save:context+offload:xx,yy
    """,
}  # fmt: skip
LINES = [(kind, line.strip()) for kind, lines in REJECTED.items() for line in lines.strip().splitlines()]
#: What the message names, where that is neither the last flag of the line nor its value.
NAMED = {
    "run --batch --json": "--batch",
    "run --policy plan:/nope": "'/nope'",
    "run --policy plan:{dir}/toml": "/toml'",
    "run --devices 8 --nodes 3 --mesh auto": "3",
    "run --mesh fsdp=8 --target cpu --policy auto --distributed": "--policy",
    "run --target cpu --distributed": "--mesh",
    "train --policy dots nothing": "--policy",
    "run --target cpu --batch 2 --policy every:2+save:context+offload:xx,yy": "'xx'",
}
#: Next steps as they are typed: in place of the same flag, or beside the others. The command then accepts the flags.
TYPED = {
    "run --model gtp2": "--model gpt2",
    "run --batch 8,,16": "--batch 8,16,32",
    "run --positions rope --head-dim 15": "--head-dim 16",
    "run --dropout 1.0": "--dropout 0.1",
    "run --seq-len 129": "--max-seq-len 129",
    "run --norm-eps nan": "--norm-eps 1e-5",
    "run --learning-rate 0": "--learning-rate 3e-4",
    "run --budget lots": "--budget 40GiB",
    "run --budget 40": "--budget 40GiB",
    "run --loss chunked:0": "--loss chunked",
    "run --headroom 1": "--headroom 0.02",
    "run --objective batch": "--policy auto",
    "run --frontier": "--batch 32",
    "run --policy auto --objective memory": "--batch 8",
    "run --mesh fsdp=8 --global-batch 12": "--global-batch 8",
    "run --mesh fsdp=2,tensor=8": "--mesh fsdp=4,tensor=4",
    "run --mesh auto": "--devices 8",
    "run --seq-len 64,32 --list names": "--seq-len 64",
    "run --xla-remat --policy auto": "--policy none",
    "run --policy dotts": "--policy dots",
    "run --policy remat_policy=full": "--policy full",
    "run --policy one-in:3": "--policy one-in:2",
    "run --policy attention": "--policy nothing+attention",
    "run --target h100": "--target h200",
    "sweep --shard 0/4": "--shard 1/4",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Target files in all states of damage, and texts too short to train on."""
    folder = tmp_path_factory.mktemp("bad")
    good = load_gpu("h100-80gb")[1].to_text()
    capability = "  cuda_compute_capability { major: 9 minor: 0 }\n"
    files = {
        "binary": b"\x80\x81\xff\x00",
        "empty": "",
        "short": "Not a word.",
        "comment": "# nothing else\n",
        "truncated": good[: len(good) // 2],
        "toml": "core_count = 132\n",
        "no_field": good.replace("  core_count: 132\n", ""),
        "zero": good.replace("core_count: 132", "core_count: 0"),
        "rocm": good.replace('"CUDA"', '"ROCM"'),
        "old": good.replace(capability, capability.replace("9", "7")),
        "no_cc": good.replace(capability, ""),
        "odd_cc": good.replace("minor: 0 }\n  driver", "minor: x }\n  driver"),
        "unknown_field": good + "flux_capacitor: 1\n",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


#: The flags that a next step may name beside those of one command: of every command, and of sbatch.
MORE_FLAGS = {"--help", "--help-all", "--array"}
#: Lists in messages that are generated from the package, by what stands for them in the snapshot.
LISTS = {
    "{models}": ", ".join(PRESETS),
    "{targets}": ", ".join(bundled_names()),
    "{policies}": ", ".join(form.pattern for form in forms()),
    "{presets}": ", ".join(XLA_PRESETS),
}


def words(line: str, folder: Path) -> tuple[str, list[str]]:
    """The command of a line of `REJECTED`, and its arguments."""
    name, *given = [part.replace("{dir}", str(folder)) for part in line.split()]
    given = given if {"--model", "--hf"} & {*given} or name in ("watch", "doctor") else ["--model", "tiny", *given]
    return name, [*given, *(["--out", str(folder / "rows.jsonl")] if name == "sweep" else [])]


def shown(error: JaxrematError, folder: Path) -> str:
    """The message as the snapshot has it: without what differs from one machine to another, and without generated lists."""
    text = str(error).replace(str(folder), "{dir}")
    for name, listed in LISTS.items():
        text = text.replace(listed, name)
    return text


@pytest.mark.parametrize(("kind", "line"), LINES, ids=[line for _, line in LINES])
def test_command_lines(kind, line, folder, snapshot: SnapshotAssertion):
    name, argv = words(line, folder)
    error = rejected(argv, name)
    assert (type(error), error.exit_code) == (kind, 2)
    flag, value = ["", *argv][-2:] if name != "sweep" else argv[-4:-2]
    assert any(word in error.got for word in ([NAMED[line]] if line in NAMED else [flag, value])), error.got
    known = set[str]().union(*map(flags_of, COMMANDS.values()))
    assert set(re.findall(r"(?<!\w)--[a-z][a-z-]*", error.next_step)) <= known | MORE_FLAGS
    assert error.next_step
    assert shown(error, folder) == snapshot
    if line in TYPED:
        check_typed(name, argv, TYPED[line], error.next_step)


def check_typed(name: str, argv: list[str], typed: str, next_step: str) -> None:
    """Checks that a next step names the value of `typed`, and that the command accepts the line with it."""
    kind, check = {"run": (RunFlags, check_flags), "sweep": (SweepFlags, check_sweep)}[name]
    flag, value = typed.split()
    assert value in next_step
    if flag in argv:
        at = argv.index(flag)
        argv = [*argv[:at], *argv[at + 2 :]]
    check(parse_flags(kind, [*argv, flag, value]))


def test_what_the_doctor_says(snapshot: SnapshotAssertion):
    """The rows of all made-up machines that have something to report."""
    machines = MACHINES | {str(variables): with_variables(gpu, variables) for gpu, variables, _ in VARIABLES}
    found = {machine: {row for row in run_checks(facts) if row.remedy} for machine, facts in machines.items()}
    assert "\n".join(
        f"{row.name}: {row.state}: {row.found} | {row.remedy}"
        for row in sorted(set[Row]().union(*found.values()), key=str)
    ) == snapshot  # fmt: skip


#: By the flag, more values that are rejected as the one in the table is.
BAD_VALUES = [
    (TrainConfig, "learning_rate", math.inf), (TrainConfig, "clip_norm", math.nan), (TrainConfig, "seed", 2**32),
    (TrainConfig, "loss", "chunk"), (TrainConfig, "loss", "chunked:"), (TrainConfig, "accumulate", -1),
    (ModelConfig, "dropout", -0.1), (ModelConfig, "dropout", math.nan), (ModelConfig, "embed_dim", -8),
    (ModelConfig, "max_seq_len", 0),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "field", "value"), BAD_VALUES)
def test_bad_values(kind, field, value):
    good = TrainConfig() if kind is TrainConfig else preset("tiny").config
    with pytest.raises(UsageError) as caught:
        replace(good, **{field: value})
    assert f"--{field.replace('_', '-')}" in caught.value.got
    assert repr(value) in caught.value.got
    assert caught.value.next_step


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "2147483648", "9" * 30, "1,", "²"])
def test_bad_numbers(text):
    with pytest.raises(UsageError) as caught:
        parse_flags(RunFlags, ["--batch", text])
    assert "--batch" in caught.value.got
    assert repr(text) in caught.value.got


def test_a_read_only_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("saved\n")
    path.chmod(0o444)
    if os.access(path, os.W_OK):  # root may write anything but the kernel's own
        path = Path("/proc/sys/kernel/version")
    error = rejected(["--model", "tiny", "--target", "cpu", "--batch", "2", "--out", str(path)])
    assert isinstance(error, UsageError)
    assert f"--out {str(path)!r}" in error.got
    assert (tmp_path / "rows.jsonl").read_text() == "saved\n"


@pytest.mark.parametrize(
    "line", ["--attention cudnn --dtype float32", "--attention cudnn --head-dim 20", "--target {dir}/unknown_field"]
)
def test_what_only_a_target_rejects(line, h100, folder, snapshot: SnapshotAssertion):
    target = "" if "--target" in line else "--target h100-80gb "
    error = rejected(words(f"run {target}{line}", folder)[1])
    assert isinstance(error, UsageError)
    assert line.split()[0] in error.got or "'unknown_field'" in error.got
    said = shown(error, folder)
    assert said.replace(error.got, error.got.split(": ")[0]) == snapshot  # what follows is XLA's


@pytest.mark.full
def test_a_length_that_cudnn_cannot_run(h100):
    error = rejected(["--model", "tiny", "--target", "h100-80gb", "--attention", "cudnn", "--seq-len", "77"])
    assert isinstance(error, UsageError)
    assert "--attention cudnn" in error.got
    assert {"76", "78"} <= {*re.findall(r"\d+", error.next_step)}


@pytest.mark.skipif(nvidia_driver(), reason="there is a GPU here")
def test_a_gpu_that_is_not_here(folder, snapshot: SnapshotAssertion):
    error = rejected(["--model", "tiny", "--target", "gpu"])
    assert isinstance(error, TargetError)
    assert "--target gpu" in error.got
    assert {"--target h100-80gb", "--target cpu"} <= set(re.findall(r"--target [\w-]+", error.next_step))
    assert shown(error, folder) == snapshot


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--polcy dots", "--polcy"), ("--batch 1 --steps x", "--steps"), ("--attention flash", "--attention"),
        ("--list polices", "--list"), ("--list", "--list"), ("extra", "extra"),
    ],
)  # fmt: skip
def test_what_the_flag_parser_rejects(line, named, capsys):
    code = main(["--model", "tiny", *line.split()])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert named in err


def fresh(argv: list[str], *, python: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process as a user has it: no JAX or XLA setting in the environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA", "TF_", "CUDA", "PYTHON"))}
    return subprocess.run(
        [sys.executable, *python, *argv], env=clean | environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.full
def test_in_a_process_of_its_own():
    line = "--model tiny --target cpu --batch 2 --data /nope"
    done = fresh(["-m", "jaxremat.run", *line.split()])
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = without_progress(done.stderr)
    assert said == f"jaxremat: {rejected(line.split())}"


@pytest.mark.parametrize("wheel", AOT_WHEELS)
def test_a_wheel_that_is_not_installed(wheel, monkeypatch, folder, snapshot: SnapshotAssertion):
    monkeypatch.setattr(installed, "version_of", lambda package: None if package == wheel else "1")
    monkeypatch.setattr(installed, "toolkit", lambda: None)
    with pytest.raises(MissingDependencyError) as caught:
        check_aot_wheels()
    assert (caught.value.exit_code, caught.value.got.count(wheel)) == (1, 1)
    assert str(rejected(["--model", "tiny", "--batch", "1", "--target", "h100-80gb"])) == str(caught.value)
    assert shown(caught.value, folder).replace(wheel, "{wheel}") == snapshot(name="a wheel")


@pytest.mark.parametrize("wheel", AOT_WHEELS)
def test_a_toolkit_stands_in_for_wheels(wheel, monkeypatch, tmp_path):
    """If it is whole. What only the wheels have is missed as before."""
    monkeypatch.setattr(installed, "version_of", lambda package: None if package == wheel else "1")
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path))
    for file in TOOLKIT_FILES:
        with pytest.raises(MissingDependencyError):
            check_aot_wheels()
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    with contextlib.nullcontext() if wheel in TOOLKIT_WHEELS else pytest.raises(MissingDependencyError):
        check_aot_wheels()


def test_the_driver_s_version_is_its_number_alone():
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (someone@somewhere)  "
    assert driver_number(f"{line}\nGCC version: gcc 12.3.0") == "580.159.04"
    assert driver_number("NVRM version: no number\n1.2") == "NVRM version: no number"


@pytest.mark.full
@pytest.mark.skipif(nvidia_driver(), reason="with a GPU the plugin starts")
def test_the_api_where_jax_was_started_without_a_word_about_platforms(h100):
    """JAX's plugin fails noisily by itself for want of a GPU; ours is one clear error on top, of the documented kind."""
    program = (
        "import jax; jax.devices()\n"
        "from jaxremat import load_target\n"
        "from jaxremat.errors import TargetError\n"
        "try: load_target('h100-80gb')\n"
        "except TargetError as error: print(error.got, error.next_step, sep='\\n')"
    )
    done = fresh(["-c", program])
    assert done.returncode == 0, done.stderr
    got, next_step = done.stdout.splitlines()
    assert "'h100-80gb'" in got
    assert "JAX_PLATFORMS=cpu" in next_step


@pytest.mark.parametrize(
    "parts", [{}, {"next_step": "try x"}, {"next_step": "is it 'x'?"}, {"allowed": "a1", "cause": "b2", "next_step": "c3."}]
)
def test_the_shape_of_a_message(parts):
    """The fields in one order, without those that are empty, each a sentence with one mark at its end."""
    message = str(JaxrematError("got it", **parts))
    sentences = re.findall(r"[^.?]+[.?]", message)
    assert "".join(sentences) == message
    assert [text.strip(" .").rpartition(": ")[2] for text in sentences] == [
        text.removesuffix(".") for text in ("got it", *parts.values())
    ]
    again = UsageError("got it", **parts).with_next_step("else")
    assert (type(again), again.got, again.cause, again.next_step) == (UsageError, "got it", parts.get("cause", ""), "else")


def test_nearest():
    def found(word: str, known: list[str], count: int = 3) -> list[str]:
        return re.findall("'(.*?)'", nearest(word, known, count))

    assert found("dotts", ["dots", "nothing"]) == ["dots"]
    assert found("H100", ["h100", "h200", "a6000"]) == ["h100"], "the case of letters doesn't count"
    assert found("h100", ["h200", "h100-80gb"]) == ["h100-80gb", "h200"], "one that begins with the word comes first"
    assert found("h100", ["h200", "h100-80gb"], count=1) == ["h100-80gb"]
    assert nearest("zzz", ["dots"]) == ""


def test_a_message_has_no_character_that_a_terminal_obeys():
    error = UsageError("file '\x1b[2J\u202e\ud800é'", next_step="a\nb")
    assert error.got == "file '\x1b[2J\u202e\ud800é'"
    assert str(error) == r"file '\x1b[2J\u202e\ud800é'. Next: a" + "\nb."
