"""Does a revision give the records of an earlier one? `python -m experiments.unchanged --since REVISION`.

Requests for several models, policies, meshes and chips are run at both revisions, each with an empty cache. Their records are
compared in each field: bytes, FLOPs, predicted seconds, plans. How long compiles took and the versions don't count, nor does a
field that one of the two doesn't have and the other leaves empty. A request that fails is named, also where it fails at both
revisions. It is run where the code changes and the answers must not.
"""

import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.children import Child, run_child
from experiments.common import RESULTS, Row, flags_of, write
from jaxremat.cli.command import run_command
from jaxremat.cli.diff import folder_at, git
from jaxremat.report.table import list_table
from jaxremat.system.process import Deadline

ROOT = Path(__file__).parent.parent
#: Fields that differ from run to run.
NOT_COMPARED = {"lower_s", "compile_s", "versions"}
#: Seconds that a request may take at one revision.
LIMIT_S = 1800
REQUESTS = (
    "--model tiny --target h100-80gb --policy none dots dots+attention nothing every:2 --batch 8",
    "--model tiny --target l4 --policy dots",
    "--model gpt2 --num-layers 4 --target h200 --policy auto --batch 16",
    "--model gpt2 --num-layers 2 --attention xla --target rtx4090 --policy offload:mlpwi_0 --batch 4 --scan-layers True",
    "--model llama3.2-1b --num-layers 2 --target b200 --policy dots --batch 4 --xla-preset jax-toolbox",
    "--model llama3.2-1b --num-layers 2 --target h100-80gb --mesh fsdp=8 --policy dots+attention nothing --batch 8",
    "--model gemma-2b --num-layers 2 --target a100-80gb --policy dots --batch 2 --seq-len 512",
    "--model mixtral-8x7b --num-layers 1 --target h200 --policy dots --batch 1 --seq-len 512",
    "--model qwen3-0.6b --num-layers 2 --target a6000 --policy dots --batch 4 --seq-len 512",
    "--model qwen3-30b-a3b --num-layers 1 --target gh200 --policy nothing --batch 1 --seq-len 256",
    "--model examples/vit.py:workload --target h100-80gb --policy none dots auto --batch 16",
    "--model examples/plain_scan.py:workload --target a100-40gb --policy nothing",
    "--model examples/nnx_transformer.py:workload --target h100-80gb --policy dots --batch 4",
)


@dataclass(frozen=True)
class Flags:
    """Runs the same requests at two revisions, and compares their records."""

    since: str = "HEAD"
    """The earlier revision, such as a commit."""
    out: Path = RESULTS


def records_at(tree: Path, request: str) -> Child:
    """The records of a request by the sources in `tree`, and why it failed if it did."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": cache}
        return run_child("jaxremat.run", ["--json", *shlex.split(request)], Deadline(LIMIT_S), environment, tree)


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """The fields in which two records differ, such as `[0].total_bytes: 1 became 2`."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other} - NOT_COMPARED):
            yield from differences(one.get(key), other.get(key), f"{place}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{place}[{number}]")
    elif one != other:
        yield f"{place}: {one} became {other}"[:300]


def compared(tree: Path, request: str) -> Row:
    """The row of a request: how many records it has, why it failed at a revision, and in which fields the records differ."""
    before, now = records_at(tree, request), records_at(ROOT, request)
    failed = {name: child.error for name, child in (("before", before), ("now", now)) if child.error}
    found = [*differences([*before.rows], [*now.rows])]
    return {"request": request, "records": len(now.rows), "failed": failed, "differences": found}


def rows_of(flags: Flags) -> Iterator[Row]:
    """Yields the row of each request.

    Raises:
        UsageError: there is no such revision.
    """
    with folder_at(flags.since) as tree:
        for request in REQUESTS:
            yield compared(tree, request)


def work(flags: Flags) -> int:
    """Files each row, prints the table, and returns 1 if a request fails or a record differs."""
    revisions = {name: git("rev-parse", "--verify", name, revision=name) for name in (flags.since, "HEAD")}
    rows: list[Row] = []
    for row in rows_of(flags):
        rows.append(row)
        print(f"{row['request']}: {row['failed'] or row['differences'] or 'no difference'}", file=sys.stderr)
        write(flags.out / "unchanged" / "unchanged.json", {"revisions": revisions, "rows": rows})
    columns = ("request", "records", "failed", "differences")
    cells = [
        (row["request"], str(row["records"]), " and ".join(row["failed"]) or "-", str(len(row["differences"])))
        for row in rows
    ]
    Console().print(list_table("the same records", columns, cells, left=1))
    return int(any(row["failed"] or row["differences"] for row in rows))


def main(argv: list[str] | None = None) -> int:
    """Runs the experiment and returns its exit code."""
    flags = flags_of(Flags, argv, "experiments.unchanged")
    return run_command(lambda: work(flags), name="experiments.unchanged", saved="the rows so far are filed")


if __name__ == "__main__":
    raise SystemExit(main())
