"""What the tables of the pages compare: `python -m experiments.tables`.

Each table is made of the records of some commands, `python -m jaxremat.run ...`. All of them compile for GPUs that aren't in the
machine. Nothing is run. The pages give the commands, and `experiments.numbers` writes the tables.
"""

import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from experiments.common import RESULTS, Row, run_experiment
from jaxremat.errors import JaxrematError
from jaxremat.report.table import gib_number

CONFIGS = ("Qwen3-8B", "gemma-2-9b", "Phi-3-mini-4k-instruct")
_KEPT = "query_proj,key_proj,value_proj,out_proj,mlpwi_0,mlpwi_1,mlpwo"
_GATHERED = "query_gathered,key_gathered,value_gathered,out_gathered,wi_0_gathered,wi_1_gathered,wo_gathered"
#: Everything fits, so that nothing is said and compiled about what would fit instead.
_NO_BUDGET = "--budget 1000TiB"
_SHARDED = "--seq-len 4096 --loss chunked --batch 1"
#: By table, the arguments of `jaxremat.run`, command by command.
COMMANDS: dict[str, tuple[str, ...]] = {
    "published": (
        "--hf examples/configs/Qwen3-8B.json --policy dots+attention nothing auto --mesh fsdp=8",
        "--hf examples/configs/gemma-2-9b.json --policy dots+attention nothing --mesh fsdp=8",
        "--hf examples/configs/Phi-3-mini-4k-instruct.json --policy dots+attention nothing --mesh fsdp=8",
    ),
    "one-gpu": tuple(
        f"--hf examples/configs/{name}.json --policy nothing --loss chunked --batch 1 {_NO_BUDGET}" for name in CONFIGS
    ),
    "one-gpu-bfloat16": tuple(
        f"--hf examples/configs/{name}.json --policy dots+attention nothing --param-dtype bfloat16 --optimizer adafactor"
        for name in CONFIGS
    ),
    "mixtral": (
        f"--hf examples/configs/Mixtral-8x7B-v0.1.json --mesh fsdp=8,expert=8 {_SHARDED} --policy nothing",
        f"--hf examples/configs/Mixtral-8x7B-v0.1.json --mesh fsdp=64 {_SHARDED} --policy auto",
    ),
    "dispatch": (
        f"--model mixtral-8x7b --mesh fsdp=8,expert=8 {_SHARDED} --policy nothing",
        f"--model mixtral-8x7b --mesh fsdp=64 {_SHARDED} --policy nothing",
        f"--model mixtral-8x7b --mesh fsdp=8,expert=8 --dispatch ragged {_SHARDED} --policy nothing",
    ),
    "experts-layer": tuple(
        f"--model mixtral-8x7b --num-layers 1 --param-dtype bfloat16 --dispatch {dispatch} {_SHARDED} --policy nothing"
        for dispatch in ("dense", "ragged")
    ),
    "lengths": tuple(
        f"--model llama3-8b --mesh {mesh} --loss chunked --seq-len 2048,32768,131072 --policy nothing dots+attention"
        for mesh in ("fsdp=8", "fsdp=2,tensor=4")
    ),
    "scores": (
        f"--model llama3.2-1b --attention xla --loss chunked --seq-len 131072 --batch 1 --policy nothing {_NO_BUDGET}",
    ),
    "gathers": tuple(
        f"--model llama3-8b --mesh fsdp=16 --seq-len 4096 --loss chunked --batch 2 --scan-layers {scan} "
        f"--policy save:{_KEPT}+attention save:{_KEPT},{_GATHERED}+attention"
        for scan in (False, True)
    ),
}
#: What is filed of a record.
KEPT = (
    *("model", "num_params", "attention", "mesh", "seq_len", "requested_policy", "layout"),
    *("batch", "global_batch", "fits", "budget_bytes", "total_bytes", "step_s", "tokens_per_s", "mfu"),
    *("model_flops", "executed_flops", "num_compiles"),
)


@dataclass(frozen=True)
class Flags:
    """The records of the commands that make the tables of the pages."""

    parts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TABLE")] = tuple(COMMANDS)
    """Which tables."""
    more: str = ""
    """Further arguments of each command, as in --more="--num-layers 2"."""
    target: str = "h100-80gb"
    out: Path = RESULTS


def measure(name: str, flags: Flags) -> Iterator[Row]:
    """A row for each length and policy of each command of a table: the largest batch that fits, or one that doesn't if none does.

    Raises:
        JaxrematError: a command failed. That nothing fits is no failure.
    """
    from jaxremat import run

    for command in COMMANDS[name]:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            out = Path(folder, "records.jsonl")
            argv = [*shlex.split(command), "--target", flags.target, *shlex.split(flags.more), "--out", str(out)]
            if (code := run.main(argv)) not in (0, 3):
                raise JaxrematError(f"jaxremat.run {shlex.join(argv)} ended with exit code {code}")
            records = [json.loads(line) for line in out.read_text().splitlines()]
        answers: dict[tuple[int, str], Row] = {}
        for record in records:
            if record["record"] == "trial":  # after the largest batch comes the next one, which doesn't fit
                answers.setdefault((record["seq_len"], record["requested_policy"]), record)
        for record in answers.values():
            waits = {key: record["predicted"][key] for key in ("collective_s", "collective_exposed_s")}
            yield {"command": command, **{key: record[key] for key in KEPT}, **waits}


#: By column, its title and the function that makes a cell's text.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "model": ("model", str),
    "mesh": ("mesh", str),
    "requested_policy": ("policy", lambda policy: policy if len(policy) <= 20 else f"{policy[:17]}..."),
    "seq_len": ("seq len", "{:,}".format),
    "batch": ("batch", str),
    "fits": ("fits", lambda fits: "yes" if fits else "no"),
    "total_bytes": ("GiB", gib_number),
    "step_s": ("ms", lambda seconds: f"{1e3 * seconds:,.1f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
}


def main(argv: list[str] | None = None) -> int:
    """Compiles, prints and writes the rows, and returns the exit code."""
    measures = {name: (partial(measure, name), 3, tuple(COLUMNS)) for name in COMMANDS}
    return run_experiment("tables", Flags, argv, measures, COLUMNS.__getitem__)


if __name__ == "__main__":
    sys.exit(main())
