"""What planning is worth: `python -m experiments.planner`.

For each model: the frontier at one batch (total bytes against predicted step time, named policies and plans); ten budgets from
just feasible to more than no rematerialization needs, batch free, each plan beside the fastest named policy that was compiled
for it; and the bytes of the plan under which no matmul and no attention runs twice, beside what `none` takes. Compiled for a
GPU that isn't in the machine; nothing is run.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from experiments.common import RESULTS, run_parts
from jaxremat.config import TrainConfig
from jaxremat.model.presets import preset

Part = Literal["frontier", "budgets", "no-matmul"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Flags:
    """What planning is worth, in bytes and in predicted time."""

    models: tuple[str, ...] = ("gpt2", "llama3.2-1b")
    batches: tuple[int, ...] = (32, 12)
    """The batch of the frontier, model by model."""
    target: str = "h100-80gb"
    num_budgets: int = 10
    loss: str = "chunked"
    parts: Annotated[tuple[Part, ...], tyro.conf.arg(metavar="PART")] = get_args(Part)
    out: Path = RESULTS


def make_run(name: str, budget_bytes: int, flags: Flags) -> Any:
    """The model's training step on the target, within a budget."""
    from jaxremat.model.transformer import choose_attention
    from jaxremat.trial.trial import Run
    from jaxremat.xla.target import load_target

    target, chosen = load_target(flags.target), preset(name)
    attention = choose_attention(chosen.config, target.compute_capability, target.kind == "deviceless")
    return Run(chosen.config, TrainConfig(seq_len=chosen.seq_len, loss=flags.loss), target, attention, budget_bytes)


def compiled(run: Any, policy: Any, batch: int) -> Row:
    """Bytes, predicted seconds and FLOPs of one step."""
    from jaxremat.trial.trial import PolicyTrials

    record = PolicyTrials(run, str(policy), policy).record(batch, "trial")
    keys = ("policy", "batch", "total_bytes", "step_s", "executed_flops", "recompute_overhead_percent")
    return {key: getattr(record, key) for key in keys}


def measure_frontier(flags: Flags) -> list[Row]:
    """At one batch: the named policies, and a plan for each of some budgets between the least and the most of them."""
    from jaxremat.policy.spec import parse
    from jaxremat.search.auto import plan_run
    from jaxremat.search.plan import Plan

    rows: list[Row] = []
    for name, batch in zip(flags.models, flags.batches, strict=False):
        named = [
            compiled(make_run(name, 2**62, flags), parse(text), batch)
            for text in ("nothing", "dots", "dots+attention", "none")
        ]
        rows += [{"model": name, "kind": "named", **row} for row in named]
        low, high = named[0]["total_bytes"], named[2]["total_bytes"]
        for n in range(1, 5):
            budget = low + (high - low) * n // 4
            found = plan_run(make_run(name, budget, flags), losses=(flags.loss,), batch=batch, max_batch=batch).found
            assert isinstance(found, Plan), "the budget is above that of `nothing`"
            sizes = {
                "total_bytes": found.cost.total_bytes,
                "step_s": found.cost.step_s,
                "predicted_bytes": found.predicted_bytes,
            }
            model = {"recompute_s": found.recompute_s, "bound_s": found.bound_s, "budget_bytes": budget}
            rows.append({"model": name, "kind": "planned", "policy": str(found.policy), "batch": batch, **sizes, **model})
    return rows


def measure_budgets(flags: Flags) -> list[Row]:
    """Plans with a free batch for rising budgets: what fits, how fast, how long the search took."""
    from jaxremat.policy.spec import parse
    from jaxremat.search.auto import plan_run
    from jaxremat.search.plan import Plan

    rows: list[Row] = []
    for name in flags.models:
        run = make_run(name, 2**62, flags)
        low = compiled(run, parse("nothing"), 1)["total_bytes"]
        high = (run.target.memory_bytes or 0) * 9 // 10
        for n in range(flags.num_budgets):
            budget = int(low * (high / low) ** (n / max(1, flags.num_budgets - 1))) + 2**20
            started = time.perf_counter()
            planned = plan_run(make_run(name, budget, flags), losses=("full", "chunked"), batch=None, max_batch=4096)
            seconds, found = time.perf_counter() - started, planned.found
            assert isinstance(found, Plan), "the budget is that of the smallest step"
            tokens = run.train.seq_len * found.batch / found.cost.step_s
            same = [t for t in found.tried if (t.batch, t.loss) == (found.batch, found.loss)]
            fits = [
                t
                for t in same
                if t.cost.total_bytes <= budget and str(t.policy) in ("none", "dots", "dots+attention", "nothing")
            ]
            rows.append(
                {
                    "model": name,
                    "budget_bytes": budget,
                    "policy": str(found.policy),
                    "loss": found.loss,
                    "batch": found.batch,
                    "total_bytes": found.cost.total_bytes,
                    "predicted_bytes": found.predicted_bytes,
                    "tokens_per_s": tokens,
                    "best_named_tokens_per_s": max(
                        (run.train.seq_len * t.batch / t.cost.step_s for t in fits), default=None
                    ),
                    "num_compiles": len(found.tried),
                    "search_s": seconds,
                }
            )
    return rows


def measure_no_matmul(flags: Flags) -> list[Row]:
    """The plan under which no matmul and no attention runs twice, and `none`: bytes beside bytes."""
    from jaxremat.policy.spec import parse
    from jaxremat.search.auto import plan_without_flops

    rows: list[Row] = []
    for name in flags.models:
        run, batch = make_run(name, 2**62, flags), 32
        none = compiled(run, parse("none"), batch)
        planned = compiled(run, plan_without_flops(run, batch), batch)
        share = planned["total_bytes"] / none["total_bytes"]
        rows += [{"model": name, **none, "share": 1.0}, {"model": name, **planned, "share": share}]
    return rows


#: How a part is measured, and how it is shown: its columns, of which the first few are words.
MEASURES: dict[Part, tuple[Callable[[Flags], list[Row]], int, tuple[str, ...]]] = {
    "frontier": (measure_frontier, 3, ("model", "kind", "policy", "total_bytes", "step_s")),
    "budgets": (
        measure_budgets,
        1,
        (
            "model",
            "budget_bytes",
            "total_bytes",
            "batch",
            "tokens_per_s",
            "best_named_tokens_per_s",
            "num_compiles",
            "search_s",
        ),
    ),
    "no-matmul": (measure_no_matmul, 2, ("model", "policy", "total_bytes", "share", "recompute_overhead_percent")),
}
SHOWN = {
    "total_bytes": ("GiB", lambda value: f"{value / 2**30:.2f}"),
    "budget_bytes": ("budget", lambda value: f"{value / 2**30:.2f}"),
    "step_s": ("step ms", lambda value: f"{1e3 * value:.1f}"),
    "tokens_per_s": ("tokens/s", lambda value: f"{value:,.0f}"),
    "best_named_tokens_per_s": ("named", lambda value: f"{value:,.0f}"),
    "search_s": ("seconds", lambda value: f"{value:.0f}"),
    "num_compiles": ("compiles", str),
    "share": ("of none", lambda value: f"{value:.0%}"),
    "recompute_overhead_percent": ("recompute", lambda value: f"{value:.1f}%"),
    "policy": ("policy", lambda value: value if len(value) < 32 else value[:29] + "..."),
}


def main(argv: list[str] | None = None) -> int:
    """Runs the parts asked for."""
    return run_parts("planner", tyro.cli(Flags, args=argv), MEASURES, lambda column: SHOWN.get(column, (column, str)))


if __name__ == "__main__":
    sys.exit(main())
