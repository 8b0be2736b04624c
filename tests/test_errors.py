"""Bad input is refused with one whole message, the right exit code, nothing on stdout and no traceback.

Every message is asserted to the letter, because a message is what a person in trouble reads. Most run in this process
through the command's own `main`; what depends on the process (the environment, missing wheels) runs in a fresh one. Refused
policies are in `tests/test_policy_errors.py`.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from jaxremat.errors import JaxrematError, nearest
from jaxremat.run import main
from jaxremat.xla.gpu import bundled_names, load_gpu, nvidia_driver
from jaxremat.xla.installed import AOT_WHEELS

MODELS = (
    "Allowed: tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama3.2-1b, llama3-8b, llama2-7b, qwen3-0.6b, qwen3-8b, "
    "mistral-7b, mixtral-8x7b, qwen3-30b-a3b, gemma-2b."
)
TARGETS = (
    f"Allowed: {', '.join(('gpu', 'cpu', *bundled_names()))}, or the path of a target text file. Likely cause: neither a "
    "bundled name nor a readable file"
)
LIST_TARGETS = "Next: see --list targets; --dump-target FILE writes one on a GPU machine."
FRESH = "write a fresh one with --dump-target FILE on a machine with that GPU."
BATCH = "Allowed: whole numbers from 1 to 2,147,483,647. Next: write it like --batch 8 or --batch 8,16,32."
LENGTHS = "Allowed: whole numbers from 1 to 10,000,000. Next: write it like --seq-len 2048 or --seq-len 2048,8192."
BUDGET = "Allowed: a positive number and a unit: B, KiB, MiB, GiB, TiB (or KB, MB, GB). Next: write it like 40GiB."
WHOLE = "Allowed: a whole number from 1 up. Next: give a positive number."
DEFAULT = "Next: leave it out for the default."
DIVIDES = (
    "Likely cause: XLA divides by it, and would end the process without a word. Next: fill it in, or write a fresh file with"
)

LOSS = "Allowed: full, chunked, or chunked:N with N positions from 1 up. Next: --loss chunked chooses N itself."
CPU = "--target cpu --batch 2"
CASES = {
    f"{CPU} --policy": "--policy has no value. Allowed: one or more after each flag. Next: write it like --policy dots nothing.",
    "--batch --json": "--batch has no value. Allowed: one or more after each flag. Next: write it like --batch 8,16,32.",
    "--model gtp2": f"unknown model 'gtp2'. {MODELS} Next: did you mean 'gpt2' or 'gpt2-xl'?",
    "--model llama": f"unknown model 'llama'. {MODELS} Next: did you mean 'llama3-8b' or 'llama2-7b' or 'llama3.2-1b'?",
    "--model 7777": f"unknown model '7777'. {MODELS} Next: see --list models.",
    "--num-kv-heads 3": "--num-kv-heads got 3. Allowed: a divisor of num_heads = 4. Next: change one of the two.",
    "--positions rope --head-dim 15": "--head-dim got 15. Allowed: an even number, as rope turns pairs. Next: try 16.",
    "--dropout 1.0": "--dropout got 1.0. Allowed: a rate from 0 up to but not including 1. Next: 0.1 is GPT-2's.",
    "--dropout -0.1": "--dropout got -0.1. Allowed: a rate from 0 up to but not including 1. Next: 0.1 is GPT-2's.",
    "--dropout nan": "--dropout got nan. Allowed: a rate from 0 up to but not including 1. Next: 0.1 is GPT-2's.",
    "--seq-len 129": "--seq-len got 129. Allowed: up to tiny's 128 learned positions. "
    "Next: --max-seq-len 129 makes the table longer (and the parameters more).",
    "--max-seq-len 10": "--seq-len got 64. Allowed: up to tiny's 10 learned positions. "
    "Next: --max-seq-len 64 makes the table longer (and the parameters more).",
    "--seq-len 0": f"--seq-len got '0'. {LENGTHS}",
    "--num-layers 0": f"--num-layers got 0. {WHOLE}",
    "--embed-dim -8": f"--embed-dim got -8. {WHOLE}",
    "--rope-theta -1": "--rope-theta got -1.0. Allowed: a number from 1 up. Next: 10000 and 500000 are usual ones.",
    "--norm-eps nan": "--norm-eps got nan. Allowed: zero or a small positive number. Next: 1e-5 is a usual one.",
    "--learning-rate 0": "--learning-rate got 0.0. Allowed: a positive number. Next: 3e-4 is a usual one.",
    "--learning-rate inf": "--learning-rate got inf. Allowed: a positive number. Next: 3e-4 is a usual one.",
    "--weight-decay -1": "--weight-decay got -1.0. Allowed: zero or a positive number. Next: 0.1 is a usual one.",
    "--seed -1": "--seed got -1. Allowed: a whole number from 0 to 4294967295. Next: 0 is the default.",
    "--batch 0": f"--batch got '0'. {BATCH}",
    "--batch -1": f"--batch got '-1'. {BATCH}",
    "--batch many": f"--batch got 'many'. {BATCH}",
    "--batch 1.5": f"--batch got '1.5'. {BATCH}",
    "--batch 8,,16": f"--batch got '8,,16'. {BATCH}",
    "--batch 2147483648": f"--batch got '2147483648'. {BATCH}",
    f"--batch {'9' * 30}": f"--batch got '{'9' * 30}'. {BATCH}",
    "--budget lots": f"cannot read 'lots' as a size in bytes. {BUDGET}",
    "--budget 0": f"cannot read '0' as a size in bytes. {BUDGET}",
    "--budget -1GiB": f"cannot read '-1GiB' as a size in bytes. {BUDGET}",
    "--budget 40GXB": f"cannot read '40GXB' as a size in bytes. {BUDGET}",
    f"--budget {'9' * 400}": f"cannot read '{'9' * 400}' as a size in bytes. {BUDGET}",
    "--mem-fraction 0": f"--mem-fraction got 0. Allowed: a number above 0 and up to 1. {DEFAULT}",
    "--mem-fraction 1.5": f"--mem-fraction got 1.5. Allowed: a number above 0 and up to 1. {DEFAULT}",
    "--mem-fraction nan": f"--mem-fraction got nan. Allowed: a number above 0 and up to 1. {DEFAULT}",
    "--max-batch 0": f"--max-batch got 0. Allowed: a number above 0 and up to 2147483647. {DEFAULT}",
    "--loss chunk": f"--loss got 'chunk'. {LOSS}",
    "--loss chunked:0": f"--loss got 'chunked:0'. {LOSS}",
    "--loss chunked:": f"--loss got 'chunked:'. {LOSS}",
    "--accumulate 0": f"--accumulate got 0. {WHOLE}",
    "--clip-norm 0": "--clip-norm got 0.0. Allowed: a positive number. Next: 1.0 is a usual one.",
    "--schedule cosine --warmup-steps 10 --decay-steps 10": "--warmup-steps got 10. Allowed: fewer than the 10 steps of "
    "--decay-steps, which include it. Next: make one shorter or the other longer.",
    "--warmup-steps -1": "--warmup-steps got -1. Allowed: zero or a whole number. Next: leave it out for none.",
    "--policy plan:/nope": "plan '/nope' cannot be read: No such file or directory. "
    "Next: write one with --policy auto --save-plan FILE.",
    "--policy plan:{dir}/toml": "plan '{dir}/toml' is no JSON: Expecting value in line 1. "
    "Likely cause: it was cut short or edited. Next: write one with --policy auto --save-plan FILE.",
    "--objective batch": "--objective goes with --policy auto, and dots was asked for. Next: add --policy auto.",
    "--explain-plan --policy nothing": "--explain-plan goes with --policy auto, and nothing was asked for. "
    "Next: add --policy auto.",
    "--frontier": "--frontier compares policies at one --batch. Next: --frontier --batch 32, or another batch.",
    "--plot x.png": "--plot draws the frontier. Next: add --frontier.",
    "--policy auto --objective memory": "--objective memory needs a --batch. "
    "Next: --objective memory --batch 8, or another batch.",
    "--policy auto --objective batch --batch 8": "--objective batch looks for the batch, and --batch was given. "
    "Next: leave one of them out; --max-batch N bounds what is looked for.",
    "--policy auto --batch 8,16 --save-plan x.json": "--save-plan writes one plan, and --batch asks for 2. "
    "Next: give one --batch, or none to have it chosen.",
    "--frontier --batch 8 --policy dots": "--frontier compares the named policies with plans of its own, and --policy was "
    "given. Next: leave --policy out, or --frontier.",
    "--frontier --batch 8 --objective memory": "--frontier compares the named policies with plans of its own, and "
    "--objective was given. Next: leave --objective out, or --frontier.",
    "--global-batch 0": f"--global-batch got 0. Allowed: a number above 0 and up to 2147483647. {DEFAULT}",
    "--global-batch 8 --accumulate 2": "--global-batch 8 and --accumulate 2 were both given. Likely cause: the number of "
    "microbatches follows from the global batch and the batch that fits. Next: leave one of them out.",
    "--global-batch 12 --batch 4,5": "--batch 5 does not divide --global-batch 12. Allowed: 1, 2, 3, 4, 6, 12. "
    "Next: leave --batch out to find the largest microbatch that fits.",
    "--steps -2": f"--steps got -2. Allowed: a number above 0. {DEFAULT}",
    "--target h100": f"unknown target 'h100'. {TARGETS} (no such file or directory). "
    "Next: did you mean 'h200' or 'h100-pcie' or 'h100-80gb'?",
    "--target /nope/x.txt": f"unknown target '/nope/x.txt'. {TARGETS} (no such file or directory). {LIST_TARGETS}",
    "--target {dir}": f"unknown target '{{dir}}'. {TARGETS} (is a directory). {LIST_TARGETS}",
    "--target {dir}/binary": f"unknown target '{{dir}}/binary'. {TARGETS} (it holds no text). {LIST_TARGETS}",
    "--target {dir}/empty": "target file '{dir}/empty' is empty. Allowed: XLA's GpuTargetConfigProto as text. Next: " + FRESH,
    "--target {dir}/comment": "target file '{dir}/comment' has no gpu_device_info block. "
    "Allowed: XLA's GpuTargetConfigProto as text. Next: " + FRESH,
    "--target {dir}/truncated": "target file '{dir}/truncated' cannot be parsed: it ends in the middle of a block. "
    "Allowed: XLA's GpuTargetConfigProto as text, as --dump-target writes it. Next: " + FRESH,
    "--target {dir}/toml": "target file '{dir}/toml' cannot be parsed: unexpected '=' in line 1. "
    "Allowed: XLA's GpuTargetConfigProto as text, as --dump-target writes it. Next: " + FRESH,
    "--target {dir}/no_field": "target '{dir}/no_field': core_count is missing. Allowed: a whole number from 1 to 1,024. "
    f"{DIVIDES} --dump-target FILE on a machine with that GPU.",
    "--target {dir}/zero": "target '{dir}/zero': core_count is 0. Allowed: a whole number from 1 to 1,024. "
    f"{DIVIDES} --dump-target FILE on a machine with that GPU.",
    "--target {dir}/rocm": "target file '{dir}/rocm' has platform_name 'ROCM'. Allowed: CUDA. Next: use an NVIDIA GPU's text.",
    "--target {dir}/old": "target file '{dir}/old' has compute capability 7.5. Allowed: 8.0 or above, written as "
    "cuda_compute_capability { major: 8 minor: 0 }. Next: " + FRESH,
    "--target {dir}/no_cc": "target file '{dir}/no_cc' has no compute capability. Allowed: 8.0 or above, written as "
    "cuda_compute_capability { major: 8 minor: 0 }. Next: " + FRESH,
    "--target {dir}/odd_cc": "target file '{dir}/odd_cc' has compute capability 9.x. Allowed: 8.0 or above, written as "
    "cuda_compute_capability { major: 8 minor: 0 }. Next: " + FRESH,
    f"{CPU} --data /nope": "--data '/nope' cannot be read: No such file or directory. Next: give the path of a text file.",
    f"{CPU} --data {{dir}}": "--data '{dir}' cannot be read: Is a directory. Next: give the path of a text file.",
    f"{CPU} --data {{dir}}/empty": "--data '{dir}/empty' is empty. Next: give a file of at least one sequence of text.",
    f"{CPU} --data {{dir}}/short": "the text has 11 bytes, and one sequence with its last target takes 65. "
    "Next: give a longer file, or --seq-len 10.",
    f"{CPU} --vocab-size 255": "--vocab-size got 255. Allowed: 256 or more, as bytes are the tokens. Next: --vocab-size 256.",
    f"{CPU} --out /nope/x": "--out '/nope/x' cannot be written: No such file or directory. "
    "Next: give a file in a folder that exists and is yours.",
    f"{CPU} --out {{dir}}": "--out '{dir}' cannot be written: Is a directory. "
    "Next: give a file in a folder that exists and is yours.",
    f"{CPU} --attention cudnn": "--attention cudnn cannot run here. Likely cause: the target is a CPU. "
    "Next: --attention auto, which takes cuDNN where it can run.",
    "--target cpu --dump-target {dir}/x": "--dump-target describes a GPU, and --target cpu was asked for. "
    "Next: leave --target out to describe the attached GPU.",
    f"{CPU} --xla-remat --policy every:2": "--xla-remat goes with policy none, and 'every:2' was asked for. Likely cause: XLA's "
    "pass rematerializes too; on top of a policy, the effects of the two could not be told apart. "
    "Next: write --policy none --xla-remat.",
    f"{CPU} --xla-remat": "--xla-remat goes with policy none, and 'dots' is the default. Likely cause: XLA's pass rematerializes "
    "too; on top of a policy, the effects of the two could not be told apart. Next: write --policy none --xla-remat.",
}  # fmt: skip


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
        "old": good.replace(capability, capability.replace("9", "7").replace("0", "5")),
        "no_cc": good.replace(capability, ""),
        "odd_cc": good.replace("minor: 0 }\n  driver", "minor: x }\n  driver"),
        "unknown_field": good + "flux_capacitor: 1\n",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize("line", CASES, ids=lambda line: line[:60])
def test_command_lines(line, folder, refusal):
    argv = [part.replace("{dir}", str(folder)) for part in line.split()]
    argv = argv if "--model" in argv else ["--model", "tiny", *argv]
    assert refusal(argv) == CASES[line].replace("{dir}", str(folder))


def test_a_read_only_file(tmp_path, refusal):
    path = tmp_path / "rows.jsonl"
    path.write_text("kept\n")
    path.chmod(0o444)
    if os.access(path, os.W_OK):  # root may write anything but the kernel's own
        path = Path("/proc/sys/kernel/version")
    assert refusal(["--model", "tiny", *CPU.split(), "--out", str(path)]) == (
        f"--out '{path}' cannot be written: Permission denied. Next: give a file in a folder that exists and is yours."
    )
    assert (tmp_path / "rows.jsonl").read_text() == "kept\n"


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ("--dtype float32", "Q must be fp16/bf16/fp8_e4m3fn/fp8_e5m2, got float32"),
        ("--head-dim 20", "The head dim must be <= 128 and a multiple of 8, but got 20"),
    ],
)
def test_cudnn_that_cannot_be(flags, cause, h100, refusal):
    argv = f"--model tiny --target h100-80gb --attention cudnn {flags}".split()
    assert refusal(argv) == (
        f"--attention cudnn cannot run here. Likely cause: {cause}. Next: --attention auto, which takes cuDNN where it can run."
    )


def test_a_length_that_cudnn_cannot_run(h100, refusal):
    argv = ["--model", "tiny", "--target", "h100-80gb", "--attention", "cudnn", "--seq-len", "77"]
    assert refusal(argv) == (
        "--attention cudnn cannot run here. Likely cause: Unsupported sequence length Q 77, KV 77. "
        "Next: --seq-len 76 or 78, or --attention auto, which takes cuDNN where it can run."
    )


def test_a_field_that_xla_does_not_know(folder, h100, refusal):
    said = refusal(["--model", "tiny", "--target", f"{folder}/unknown_field"])
    assert said.startswith("XLA refused target 'unknown_field': ")
    assert said.endswith(
        "Likely cause: the target text has a field that this version of XLA doesn't know. "
        "Next: write a fresh file with --dump-target FILE, or use a bundled target."
    )


@pytest.mark.skipif(nvidia_driver(), reason="there is a GPU here")
def test_a_gpu_that_is_not_here(refusal):
    assert refusal(["--model", "tiny", "--target", "gpu"]) == (
        "--target gpu was asked for, and JAX sees no NVIDIA GPU. Likely cause: this machine has no NVIDIA driver. "
        "Next: name a GPU to compile for without having it, such as --target h100-80gb, or --target cpu."
    )


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--polcy dots", "--polcy"), ("--batch 1 --steps x", "--steps"), ("--max-batch 1.5", "--max-batch"),
        ("--mem-fraction 75%", "--mem-fraction"), ("--attention flash", "--attention"), ("--dtype float64", "--dtype"),
        ("--list polices", "--list"), ("--list", "--list"), ("--scan-layers maybe", "--scan-layers"), ("extra", "extra"),
    ],
)  # fmt: skip
def test_what_the_flag_parser_refuses(line, named, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--model", "tiny", *line.split()])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert named in err
    assert "Traceback" not in err


def fresh(argv: list[str], *, python: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess:
    """A fresh process as a user has it: no JAX or XLA setting in the environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA", "TF_", "CUDA", "PYTHON"))}
    return subprocess.run(
        [sys.executable, *python, *argv], env=clean | environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("line", ["--policy dotts", "--target h100", "--data /nope --target cpu", "--policy save:contxt"])
def test_in_a_process_of_its_own(line):
    done = fresh(["-m", "jaxremat.run", "--model", "tiny", "--target", "cpu", "--batch", "2", *line.split()])
    assert (done.returncode, done.stdout) == (2, "")
    said = [text for text in done.stderr.splitlines() if not text.startswith("[")]
    assert len(said) == 1, done.stderr
    assert said[0].startswith("jaxremat: ")
    assert "Next: " in said[0]


@pytest.mark.parametrize("wheel", AOT_WHEELS)
def test_a_wheel_that_is_not_installed(wheel, tmp_path, h100):
    """The same environment without that one wheel: site-packages as links, what the wheel brought left out."""
    hidden = ("nvidia" if wheel.startswith("nvidia") else "jax_plugins", wheel.replace("-", "_"))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith((hidden[1], f"{hidden[0]}.")) and entry.name != hidden[0]:
            (tmp_path / entry.name).symlink_to(entry)
    path = f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"
    done = fresh(
        ["-m", "jaxremat.run", "--model", "tiny", "--batch", "1", "--target", "h100-80gb"], python=("-S",), PYTHONPATH=path
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"jaxremat: compiling for a GPU that isn't in this machine needs {wheel}. Likely cause: the aot extra isn't installed. "
        'Next: pip install "jaxremat[aot]", or --target cpu to run here (times real, memory not a GPU\'s).'
    )
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(nvidia_driver(), reason="with a GPU the plugin starts")
def test_the_api_where_jax_was_started_without_a_word_about_platforms(h100):
    """JAX's plugin fails noisily by itself for want of a GPU; ours is one clear error on top, of the documented kind."""
    program = (
        "import jax; jax.devices()\n"
        "from jaxremat import load_target\n"
        "from jaxremat.errors import TargetError\n"
        "try: load_target('h100-80gb')\n"
        "except TargetError as error: print(error)"
    )
    done = fresh(["-c", program])
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "target 'h100-80gb' cannot be compiled for in this process. Likely cause: JAX's CUDA plugin gave up for want of a GPU: "
        "JAX wasn't told beforehand to use the CPU. Next: set JAX_PLATFORMS=cpu before importing jax "
        '(tests: os.environ["JAX_PLATFORMS"] = "cpu" in conftest.py).\n'
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "Got it."),
        ({"next_step": "try x"}, "Got it. Next: try x."),
        ({"next_step": "did you mean 'x'?"}, "Got it. Next: did you mean 'x'?"),
        ({"allowed": "a", "cause": "c", "next_step": "n."}, "Got it. Allowed: a. Likely cause: c. Next: n."),
    ],
)
def test_the_shape_of_a_message(parts, message):
    assert str(JaxrematError("Got it", **parts)) == message


def test_nearest():
    assert nearest("dotts", ["dots", "nothing"]) == "did you mean 'dots'?"
    assert nearest("H100", ["h100", "h200", "a6000"], count=2) == "did you mean 'h100' or 'h200'?"
    assert nearest("zzz", ["dots"]) == ""
