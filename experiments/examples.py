"""What a policy does to models that nobody edited: `python -m experiments.examples`.

The models are those of `examples/`. Each is compiled for a GPU that isn't in the machine, at the batch and the sizes that its
file gives: under `none`, with its author's checkpoints (`own`), under `nothing` and `dots`, and as it is planned within the bytes
of `dots` (`auto`). Nothing is run.

Each example is a part, and `--parts vit` makes only that one again. `experiments.pages` makes the documentation's table.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from experiments.common import RESULTS, run_experiment
from jaxremat.report.table import gib_number

if TYPE_CHECKING:
    from jaxremat.trial.record import TrialRecord

FOLDER = Path(__file__).parent.parent / "examples"
#: The examples in the order of the documentation's table.
NAMES = (
    *("linen_unrolled", "linen_scan", "nnx_transformer", "equinox_transformer", "plain_scan"),
    *("encoder_batchnorm", "vit", "encoder_decoder", "mixture_of_experts", "convnet"),
    *("haiku_transformer", "evoformer", "diffusion_transformer", "s5", "graph_net"),
    *("unet", "wide_resnet", "rnn", "ppo", "pinn"),
)
NAMED = ("none", "own", "nothing", "dots")
Row = dict[str, Any]


@dataclass(frozen=True)
class Flags:
    """Bytes and predicted speed of the twenty examples under five policies."""

    parts: Annotated[tuple[str, ...], Parameter(metavar="EXAMPLE")] = NAMES
    """Which examples."""
    batch: int | None = None
    """Samples in the batch, instead of those that each file gives."""
    args: Annotated[tuple[str, ...], Parameter(metavar="KEY=VALUE")] = ()
    """Arguments of the examples' functions, as --model-arg takes them."""
    target: str = "h100-80gb"
    out: Path = RESULTS


def measure(name: str, flags: Flags) -> Iterator[Row]:
    """One example under the named policies, and as it is planned within the bytes of `dots`."""
    from jaxremat.answer.planned import plan_run
    from jaxremat.chips.target import load_target
    from jaxremat.config import TrainConfig
    from jaxremat.planner.plan import Plan
    from jaxremat.policy.grammar import parse
    from jaxremat.trial.trials import Trials
    from jaxremat.workload.factory import given_factory
    from jaxremat.workload.given import OWN_LOSS, GivenModel

    factory = given_factory(GivenModel(f"{FOLDER / name}.py:workload", flags.args))
    trials = Trials(factory, TrainConfig(), load_target(flags.target), 2**62)
    batch = flags.batch or trials.workload_at().num_samples
    assert batch, "an example is a loss, whose batch has samples"
    budget = 0
    for policy in map(parse, NAMED):
        record = trials.record(policy, batch)
        budget = record.total_bytes or 0  # of the last policy, dots
        yield {"asked": str(policy), **_row(record)}
    planned = plan_run(trials, losses=(OWN_LOSS,), batch=batch, max_batch=batch, budget_bytes=budget)
    assert isinstance(planned.found, Plan), "dots fits, and the plan is at least as good"
    yield {"asked": "auto", **_row(planned.trials.record(planned.found.policy, batch))}


def _row(record: "TrialRecord") -> Row:
    return {key: getattr(record, key) for key in ("policy", "batch", "total_bytes", "step_s", "samples_per_s")}


#: By column, its title and the function that makes a cell's text.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "asked": ("asked", str),
    "policy": ("policy", lambda policy: policy if len(policy) <= 40 else f"{policy[:37]}..."),
    "batch": ("batch", str),
    "total_bytes": ("GiB", gib_number),
    "step_s": ("ms", lambda seconds: f"{1e3 * seconds:.1f}"),
    "samples_per_s": ("samples/s", "{:,.0f}".format),
}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and writes the rows, and returns the exit code."""
    measures = {name: (partial(measure, name), 2, tuple(COLUMNS)) for name in NAMES}
    return run_experiment("examples", Flags, argv, measures, COLUMNS.__getitem__, unfiled=("policy",))


if __name__ == "__main__":
    sys.exit(main())
