"""Writes the numbers of the results into the pages: `python -m experiments.numbers`.

`README.md`, `docs/*.md` and `experiments/README.md` give results in tables and in sentences. Tables stand between the marks
`<!-- results: NAME -->` and `<!-- end -->`, and are written whole. Sentences are written by hand, and their numbers are written
again where the words are found. A test compares the pages with the files of results.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.common import RESULTS
from experiments.numbers import plans, runs, steps
from experiments.numbers.held import NotFoundError, Part, differing, written
from experiments.numbers.tables import tables
from jaxremat.files import write_whole

ROOT = Path(__file__).parent.parent.parent
#: By files of results, the function that makes the parts of pages from what is in them.
SOURCES: dict[tuple[str, ...], Callable[..., Iterator[Part]]] = {
    ("h100-80gb/examples",): plans.examples,
    ("h100-80gb/foreign_blocks",): plans.foreign_blocks,
    ("h100-80gb/layouts",): plans.layouts,
    ("h100-80gb/levers",): steps.levers,
    ("h100-80gb/matmuls",): steps.matmuls,
    ("h100-80gb/mesh",): steps.mesh,
    ("h100-80gb/planner",): plans.planner,
    ("h100-80gb/published",): runs.published,
    ("h100-80gb/search_cost",): steps.search_cost,
    ("h100-80gb/tables",): tables,
    ("cpu/kill_train",): runs.kill_train,
    ("cpu/same_curve",): runs.same_curve,
    ("equality/jax-0.10.2",): runs.equality,
    ("kernel_times/kernel_times",): runs.kernel_times,
    ("next_jax/jax-0.12.0.1",): runs.next_jax,
    ("shapes/jax-0.10.2", "shapes/jax-0.12.0.1"): runs.shapes,
}


@dataclass(frozen=True)
class Flags:
    """Writes the numbers of the results into the pages."""


def parts_of(*names: str) -> list[Part]:
    """The parts of pages that some files of results decide."""
    return list(SOURCES[names](*(json.loads((RESULTS / f"{name}.json").read_text()) for name in names)))


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Writes the pages below `root`, prints what was written, and returns 1 if a page lacks a part."""
    tyro.cli(Flags, args=argv, prog="experiments.numbers", description=__doc__)
    lacking: list[NotFoundError] = []
    for part in (part for names in SOURCES for part in parts_of(*names)):
        path = root / part.page
        text = path.read_text()
        try:
            if lines := differing(text, part):
                print(*(f"{part.page}: {line}" for line in lines), sep="\n")
                write_whole(path, written(text, part))
        except NotFoundError as error:
            lacking.append(error)
    print(*lacking, sep="\n", end="\n" if lacking else "", file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
