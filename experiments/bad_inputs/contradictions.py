"""Flags that are right alone and can't be meant together, and two flags that name one file."""

import os
import random
from pathlib import Path

from experiments.bad_inputs.case import OK, Case, kind

#: A workload of the user's own with layers in a scan, and a free batch.
OWN = """
import jax, jax.numpy as jnp, jaxremat

def block(x, kernel):
    return jnp.tanh(x @ kernel), None

def workload(batch: int = 2, width: int = 8) -> jaxremat.Workload:
    return jaxremat.Workload(
        loss=lambda params, x: jnp.mean(jax.lax.scan(block, x, params)[0] ** 2),
        params=jax.ShapeDtypeStruct((4, width, width), jnp.float32),
        batch=jax.ShapeDtypeStruct((batch, width), jnp.float32),
    )
"""

#: Pairs of flags that contradict each other, by command: the words of both, in any order. The message must name
#: the first flag, or its value if it is --policy.
_PAIRS: dict[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = {
    "run": (
        (("--budget", "40GiB"), ("--headroom", "0.02")),
        (("--hf", "own.py"), ("--model", "gpt2")),
        (("--save-plan", "p.json"), ("--policy", "dots")),
        (("--offload",), ("--policy", "nothing", "dots")),
        (("--explain-plan",), ("--policy", "none")),
        (("--objective", "batch"), ("--policy", "auto", "--batch", "8")),
        (("--objective", "memory"), ("--policy", "auto")),
        (("--frontier",), ("--batch", "8,16")),
        (("--frontier",), ("--policy", "dots", "--batch", "8")),
        (("--plot", "f.png"), ("--batch", "8")),
        (("--save-plan", "p.json"), ("--policy", "auto", "--batch", "8,16")),
        (("--save-plan", "p.json"), ("--policy", "auto", "--xla-preset", "default", "latency-hiding")),
        (("--xla-remat",), ("--policy", "auto")),
        (("--xla-preset", "latency-hiding"), ("--target", "cpu")),
        (("--dump-target", "t.txt"), ("--target", "cpu")),
        (("--global-batch", "8"), ("--accumulate", "2")),
        (("--global-batch", "8"), ("--batch", "3")),
        (("--global-batch", "9"), ("--mesh", "fsdp=2")),
        (("--scan-layers", "auto"), ("--policy", "dots")),
        (("--mesh", "auto", "--devices", "8"), ("--target", "cpu")),
        (("--mesh", "auto", "--devices", "8"), ("--frontier", "--batch", "8")),
        (("--mesh", "auto", "--devices", "8"), ("--offload", "--policy", "auto")),
        (("--mesh", "auto", "--devices", "8"), ("--batch", "8,16")),
        (("--mesh", "fsdp=4"), ("--devices", "8")),
        (("--nodes", "2"), ("--batch", "8")),
        (("--buckets", "3"), ("--seq-len", "128")),
        (("--lengths", "lengths.txt"), ("--batch", "8")),
        (("--lengths", "lengths.txt"), ("--mesh", "auto", "--devices", "8")),
        (("--lengths", "lengths.txt"), ("--seq-len", "128,256")),
        (("--lengths", "lengths.txt"), ("--frontier",)),
        (("--seq-len", "128,256"), ("--save-plan", "p.json", "--policy", "auto")),
        (("--model-arg", "width=8"), ("--model", "gpt2")),
        (("--layers", "blocks_*"), ("--model", "tiny")),
        (("--num-layers", "4"), ("--model", "own.py:workload")),
        (("--loss", "full"), ("--model", "own.py:workload")),
        (("--data", "own.py"), ("--model", "own.py:workload")),
        (("--num-kv-heads", "4"), ("--num-heads", "6")),
        (("--seq-len", "4096"), ("--model", "gpt2")),
        (("--seq-len", "1"), ("--dtype", "float16")),
        (("--dtype", "float16"), ("--model", "tiny", "--target", "cpu")),
        (("--warmup-steps", "100"), ("--schedule", "cosine", "--decay-steps", "100")),
        (("--experts-per-token", "9"), ("--num-experts", "8")),
        (("--mesh", "expert=2"), ("--model", "gpt2")),
        (("--mesh", "tensor=5"), ("--model", "gpt2")),
        (("--process-id", "0"), ("--num-processes", "2")),
        (("--process-id", "2", "--num-processes", "2", "--coordinator", "localhost:1"), ("--mesh", "fsdp=2")),
        (("--target", "h100-80gb"), ("--distributed", "--mesh", "fsdp=2")),
        (("--policy", "auto", "--mesh", "fsdp=2"), ("--distributed", "--target", "cpu")),
    ),
    "explain": (
        (("--policy", "auto"), ("--batch", "8")),
        (("--redact",), ("--batch", "8")),
        (("--mesh", "auto"), ("--devices", "8")),
        (("--seq-len", "128,256"), ("--batch", "8")),
        (("--budget", "40GiB"), ("--headroom", "0.02")),
    ),
    "sweep": (
        (("--fresh", "--out", "r.jsonl"), ("--retry-failed",)),
        (("--shard", "3/2"), ("--out", "r.jsonl")),
        (("--policy", "every:99"), ("--out", "r.jsonl", "--model", "gpt2")),
        (("--headroom", "0.5", "--out", "r.jsonl"), ("--budget", "1GiB")),
        (("--slurm", "timeout_min=5"), ("--out", "r.jsonl")),
        (("--num-shards", "7"), ("--out", "r.jsonl")),
        (("--cluster", "local"), ("--out", "r.jsonl")),
        (("--shard", "1/2"), ("--submit", "logs", "--out", "r.jsonl")),
        (("--csv", "t.csv"), ("--submit", "logs", "--out", "r.jsonl")),
        (("--slurm", "timeout_min=abc"), ("--submit", "logs", "--out", "r.jsonl", "--cluster", "local")),
        (("--slurm", "no_such_thing=1"), ("--submit", "logs", "--out", "r.jsonl", "--cluster", "local")),
        (("--slurm", "timeout_min"), ("--submit", "logs", "--out", "r.jsonl", "--cluster", "local")),
    ),
    "recommend": (
        (("--fresh",), ("--retry-failed",)),
        (("--target", "cpu"), ("--devices", "8")),
        (("--hf", "own.py"), ("--model", "gpt2")),
        (("--policy", "every:99"), ("--model", "gpt2")),
        (("--global-batch", "8"), ("--accumulate", "2")),
    ),
    "train": (
        (("--policy", "dots", "nothing"), ("--batch", "8")),
        (("--batch", "8,16"), ("--policy", "dots")),
        (("--target", "h100-80gb"), ("--batch", "8")),
        (("--mesh", "auto"), ("--devices", "8")),
        (("--budget", "40GiB"), ("--headroom", "0.02")),
        (("--warmup-steps", "100"), ("--schedule", "linear", "--decay-steps", "7")),
        (("--global-batch", "8"), ("--batch", "3")),
    ),
}


@kind("contradictions")
def contradictory_flags(draw: random.Random, folder: Path) -> Case:
    """Two flags that contradict each other, in either order, beside others that are right."""
    (folder / "own.py").write_text(OWN)
    (folder / "lengths.txt").write_text("128,10\n256\n")
    command = draw.choice(["run", "run", "run", *_PAIRS])
    one, other = draw.choice(_PAIRS[command])
    beside = draw.choice([(), ("--qk-norm", "True"), ("--seed", "3"), ("--weight-decay", "0.5")])
    groups = draw.sample([one, other, beside], 3)
    says = one[0] if one[0] != "--policy" or command == "train" else one[1]
    return Case((command, *(word for group in groups for word in group)), says=(says,))


def _same(draw: random.Random, folder: Path, path: Path) -> str:
    """Another way to the file at `path`, which may not be there yet: itself, a link to it, or a second name."""
    way = draw.choice(["itself", "dots", "link", "link to a folder", "hard link"])
    if way == "link":
        (folder / "link").symlink_to(path)
        return "link"
    if way == "link to a folder":
        (folder / "here").symlink_to(folder)
        return f"here/{path.name}"
    if way == "hard link" and path.exists():
        os.link(path, folder / "second")
        return "second"
    return (
        str(path)
        if way == "itself"
        else f"./nowhere/../{path.name}"[2 if draw.random() < 0.5 else 0 :].replace("nowhere/../", "")
    )


@kind("contradictions")
def one_file_written_twice(draw: random.Random, folder: Path) -> Case:
    """One file behind two flags whose files the command writes."""
    path, old = folder / draw.choice(["a.jsonl", "ü [x].json"]), b'{"record":"none"}\n'
    is_there = draw.random() < 0.7
    if is_there:
        path.write_bytes(old)
    pairs = [
        ("run", "--out", "--save-plan", ("--policy", "auto", "--batch", "1")),
        ("run", "--out", "--plot", ("--frontier", "--batch", "1")),
        ("run", "--save-plan", "--dump-target", ("--policy", "auto", "--batch", "1")),
        ("explain", "--out", "--page", ()),
        ("explain", "--page", "--plot", ()),
        ("sweep", "--out", "--csv", ()),
    ]
    command, one, other, beside = draw.choice(pairs)
    words = (command, one, str(path), other, _same(draw, folder, path), *beside)
    return Case(words, says=(one, other), unchanged={path: old} if is_there else {})


@kind("contradictions")
def one_file_read_and_written(draw: random.Random, folder: Path) -> Case:
    """A file that a command reads, behind a flag whose file it writes. It stays as it is."""
    pairs = [
        ("run", "--lengths", "lengths.txt", "128,10\n", "--out", ()),
        ("run", "--data", "text.txt", "some text\n" * 200, "--out", ()),
        ("run", "--model", "own.py", OWN, "--out", ()),
        ("run", "--policy", "plan.json", '{"record": "plan"}', "--save-plan", ()),
        ("run", "--hf", "config.json", '{"model_type": "llama"}', "--out", ()),
        ("explain", "--model", "own.py", OWN, "--page", ()),
        ("explain", "--target", "gpu.txt", "gpu_device_info {}", "--page", ()),
        ("recommend", "--price", "prices.toml", "h100-80gb = 2.5\n", "--out", ()),
        ("recommend", "--hf", "config.json", '{"model_type": "llama"}', "--out", ()),
        ("sweep", "--hf", "config.json", '{"model_type": "llama"}', "--out", ()),
        ("sweep", "--policy", "plan.json", '{"record": "plan"}', "--csv", ("--out", "r.jsonl")),
    ]
    command, reads, name, text, writes, beside = draw.choice(pairs)
    path = folder / name
    path.write_text(text)
    value = name if reads not in ("--model", "--policy") else f"plan:{name}" if reads == "--policy" else f"{name}:workload"
    words = (command, reads, value, writes, _same(draw, folder, path), *beside)
    return Case(words, says=(reads, writes), unchanged={path: text.encode()})


#: Flags that change nothing beside the others of `_COMPILED`, with the flag that is named.
_WITHOUT_EFFECT = (
    ("--steps", "3"),
    ("--mem-fraction", "0.5"),
    ("--headroom", "0.1"),
    ("--decay-steps", "50"),
    ("--rope-theta", "5e5"),
    ("--rotary-fraction", "0.5"),
    ("--rope-scaling", '{"rope_type": "linear", "factor": 2.0}'),
    ("--experts-per-token", "3"),
    ("--normalize-routing", "False"),
    ("--router-loss", "0.02"),
    ("--dispatch", "ragged"),
    ("--window-pattern", "sf"),
    ("--qk-norm-over", "projection"),
    ("--qkv-bias", "True"),
    ("--out-bias", "True"),
    ("--mlp-bias", "True"),
    ("--exact-gelu", "True", "--mlp", "swiglu"),
    ("--max-seq-len", "512", "--positions", "rope"),
)
_COMPILED = (
    "--model",
    "tiny",
    "--num-layers",
    "1",
    "--seq-len",
    "16",
    "--batch",
    "1",
    "--target",
    "cpu",
    "--policy",
    "nothing",
)


@kind("contradictions")
def flags_without_effect(draw: random.Random, folder: Path) -> Case:
    """Flags that change nothing beside the others: the command does its work, and names each of them on stderr."""
    given = (
        draw.sample(_WITHOUT_EFFECT[:-2], draw.choice([1, 2, 3])) if draw.random() < 0.8 else [draw.choice(_WITHOUT_EFFECT)]
    )
    words = [word for words in given for word in words]
    return Case(("explain", *_COMPILED, *words), OK, says=tuple(f"{words[0]} has no effect" for words in given))
