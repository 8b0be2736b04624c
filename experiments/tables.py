"""The records behind tables of the pages: `python -m experiments.tables`.

Each table is made of commands, `python -m jaxremat.run ...`, that compile for GPUs that aren't in the machine. Nothing is run.
"""

import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from experiments.common import RESULTS, Row, run_experiment
from jaxremat.errors import JaxrematError

_MODELS = [f"--hf examples/configs/{name}.json" for name in ("Qwen3-8B", "gemma-2-9b", "Phi-3-mini-4k-instruct")]
_MIXTRAL = "--hf examples/configs/Mixtral-8x7B-v0.1.json --seq-len 4096 --loss chunked --batch 1"
_PRESET = "--model mixtral-8x7b --seq-len 4096 --loss chunked --batch 1 --policy nothing"
_MATMULS = "query_proj,key_proj,value_proj,out_proj,mlpwi_0,mlpwi_1,mlpwo"
_GATHERED = "query_gathered,key_gathered,value_gathered,out_gathered,wi_0_gathered,wi_1_gathered,wo_gathered"
_GATHERS = "--model llama3-8b --mesh fsdp=16 --seq-len 4096 --loss chunked --batch 2 --scan-layers"
_FITS = "--policy nothing --loss chunked --batch 1 --budget 1000TiB"  # so that nothing is compiled that would fit instead
#: By table, the arguments of its commands.
COMMANDS = {
    "published": [f"{hf} --policy dots+attention nothing{' auto' * ('Qwen3' in hf)} --mesh fsdp=8" for hf in _MODELS],
    "one-gpu": [f"{hf} {_FITS}" for hf in _MODELS],
    "one-gpu-bfloat16": [
        f"{hf} --policy dots+attention nothing --param-dtype bfloat16 --optimizer adafactor" for hf in _MODELS
    ],
    "mixtral": [f"{_MIXTRAL} --mesh fsdp=8,expert=8 --policy nothing", f"{_MIXTRAL} --mesh fsdp=64 --policy auto"],
    "dispatch": [f"{_PRESET} --mesh {mesh}" for mesh in ("fsdp=8,expert=8", "fsdp=64", "fsdp=8,expert=8 --dispatch ragged")],
    "experts-layer": [f"{_PRESET} --num-layers 1 --param-dtype bfloat16 --dispatch {way}" for way in ("dense", "ragged")],
    "lengths": [
        f"--model llama3-8b --mesh {mesh} --loss chunked --seq-len 2048,32768,131072 --policy nothing dots+attention"
        for mesh in ("fsdp=8", "fsdp=2,tensor=4")
    ],
    "scores": [f"--model llama3.2-1b --attention xla --seq-len 131072 {_FITS}"],
    "gathers": [
        f"{_GATHERS} {scan} --policy save:{_MATMULS}+attention save:{_MATMULS},{_GATHERED}+attention"
        for scan in (False, True)
    ],
}
#: What is printed and filed of a record, and what is filed too.
PRINTED = ("model", "mesh", "requested_policy", "seq_len", "batch", "total_bytes", "step_s")
FILED = ("fits", "tokens_per_s", "num_params", "attention", "layout", "global_batch", "budget_bytes", "num_compiles", "mfu")
FLOPS, SECONDS = ("model_flops", "executed_flops"), ("collective_s", "collective_exposed_s")


@dataclass(frozen=True)
class Flags:
    """The records of the commands that make the tables of the pages."""

    parts: Annotated[tuple[str, ...], Parameter(metavar="TABLE")] = tuple(COMMANDS)
    """Which tables."""
    more: str = ""
    """Further arguments of each command, as in --more="--num-layers 2"."""
    target: str = "h100-80gb"
    out: Path = RESULTS


def measure(name: str, flags: Flags) -> Iterator[Row]:
    """A row for each length and policy of a table's commands: the largest batch that fits, or one that doesn't if none does."""
    from jaxremat.cli import run

    for command in COMMANDS[name]:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            out = Path(folder, "records.jsonl")
            argv = [*shlex.split(command), "--target", flags.target, *shlex.split(flags.more), "--out", str(out)]
            if (code := run.main(argv)) not in (0, 3):  # 3 is that nothing fits
                raise JaxrematError(f"jaxremat.run {shlex.join(argv)} ended with exit code {code}")
            trials = [record for record in map(json.loads, out.open()) if record["record"] == "trial"]
        answers: dict[tuple[int, str], Row] = {}
        for record in trials:  # after the largest batch comes the next one, which doesn't fit
            answers.setdefault((record["seq_len"], record["requested_policy"]), record)
        for record in answers.values():
            filed = {key: record[key] for key in (*PRINTED, *FILED, *FLOPS)}
            dispatch = "ragged" if "--dispatch ragged" in command else "dense"
            yield {**filed, "dispatch": dispatch, **{key: record["predicted"][key] for key in SECONDS}}


def main(argv: list[str] | None = None) -> int:
    """Compiles, prints and writes the rows, and returns the exit code."""
    measures = {name: (partial(measure, name), 3, PRINTED) for name in COMMANDS}
    written = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)[:20]  # noqa: E731
    return run_experiment("tables", Flags, argv, measures, lambda column: (column, written))


if __name__ == "__main__":
    sys.exit(main())
