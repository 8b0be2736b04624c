"""How well the bytes of a plan are foreseen for layers that aren't the decoder's: `python -m experiments.foreign_blocks`.

There are two parts. `blocks` plans stacks of the blocks of `experiments/blocks.py`, as `jaxremat.plan` does. `examples` plans the
models of `examples/`, as `jaxremat.run --policy auto` does. Each is planned within budgets between the bytes of `nothing` and
those of `none`. What the planner expected is compared with what XLA's compiled step takes. All is compiled for a GPU that isn't
in the machine. Nothing is run.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from experiments.common import RESULTS, SHORT_POLICY, run_experiment, show_by
from experiments.examples import FOLDER, NAMES
from jaxremat.report.table import gib_number

Part = Literal["blocks", "examples"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Flags:
    """How well the bytes of a plan are foreseen for layers that aren't the decoder's."""

    blocks: tuple[str, ...] = ()
    """Which blocks. Default: all."""
    examples: tuple[str, ...] = NAMES
    """Which examples."""
    num_layers: int = 8
    """Layers in the stack of a block."""
    shares: tuple[float, ...] = (0.15, 0.5)
    """The budgets, as shares of the way from the bytes of `nothing` to those of `none`."""
    args: Annotated[tuple[str, ...], Parameter(metavar="KEY=VALUE")] = ()
    """Arguments of the examples' functions, as --model-arg takes them."""
    target: str = "h100-80gb"
    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = get_args(Part)
    out: Path = RESULTS


def measure_blocks(flags: Flags) -> Iterator[Row]:
    """Stacks of each block, in a loop."""
    import jaxremat
    from experiments.blocks import BLOCKS
    from jaxremat.chips.target import load_target

    target = load_target(flags.target)
    for name in flags.blocks or BLOCKS:
        block, args = BLOCKS[name]

        def plan(budget_bytes: int, block: Any = block, args: Any = args) -> Any:
            return jaxremat.plan(block, *args, num_layers=flags.num_layers, budget=budget_bytes, target=target)

        yield from _rows(name, plan, flags)


def measure_examples(flags: Flags) -> Iterator[Row]:
    """The training step of each example, at the batch that its file gives."""
    from jaxremat.answer.planned import plan_run
    from jaxremat.chips.target import load_target
    from jaxremat.config import TrainConfig
    from jaxremat.trial.trials import Trials
    from jaxremat.workload.factory import given_factory
    from jaxremat.workload.given import OWN_LOSS, GivenModel

    for name in flags.examples:
        factory = given_factory(GivenModel(f"{FOLDER / name}.py:workload", flags.args))
        trials = Trials(factory, TrainConfig(), load_target(flags.target), 2**62)
        batch = trials.workload_at().num_samples or 1

        def plan(budget_bytes: int, batch: int = batch, trials: Any = trials) -> Any:
            options = {"losses": (OWN_LOSS,), "batch": batch, "max_batch": batch}
            return plan_run(trials, budget_bytes=budget_bytes, **options).found

        yield from _rows(f"{name}.py", plan, flags)


def _rows(name: str, plan: Callable[[int], Any], flags: Flags) -> Iterator[Row]:
    """The plans of one stack or model within each budget."""
    from jaxremat.policy.spec import NOTHING, Rule

    first = plan(2**62)
    total_bytes = {step.policy: step.cost.total_bytes for step in first.tried}
    least, most = total_bytes[NOTHING], total_bytes[Rule("none")]
    for share in flags.shares:
        budget_bytes = round(least + share * (most - least))
        found = plan(budget_bytes)
        expected = found.predicted_bytes
        yield {
            "layers": name,
            "budget_bytes": budget_bytes,
            "policy": str(found.policy),
            "total_bytes": found.cost.total_bytes,
            "expected_bytes": expected,
            "off_percent": None if expected is None else 100 * (expected / found.cost.total_bytes - 1),
            "num_compiles": len(found.tried),
        }


#: By part, the function that measures it, how many of its first columns are words, and the columns of its table.
_COLUMNS = ("layers", "policy", "budget_bytes", "expected_bytes", "total_bytes", "off_percent", "num_compiles")
MEASURES: dict[Part, tuple[Callable[[Flags], Iterator[Row]], int, tuple[str, ...]]] = {
    "blocks": (measure_blocks, 2, _COLUMNS),
    "examples": (measure_examples, 2, _COLUMNS),
}
SHOWN = {"policy": SHORT_POLICY, "expected_bytes": ("expected", gib_number)}


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that the flags ask for, and returns the exit code."""
    return run_experiment("foreign_blocks", Flags, argv, MEASURES, show_by(SHOWN), ("policy",))


if __name__ == "__main__":
    sys.exit(main())
