"""What planning is worth, in bytes and in predicted time: `python -m experiments.planner`.

All steps are compiled for a GPU that isn't in the machine. Nothing is run. There are three parts, for each model:

* frontier: the named policies at one batch, with cuDNN's attention and with XLA's. For each policy it makes the plan within
  that policy's bytes. Is the plan at least as fast, and does it take the bytes that were expected?
* budgets: plans with a free batch for ten budgets, with the layers in a scan or unrolled, whichever is faster. The smallest
  budget fits one step barely, and the largest is more than a step without rematerialization needs.
* no-matmul: the bytes of the policy under which no matmul and no attention runs twice, beside the bytes of `none`. Then the
  plan within that policy's bytes.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from experiments.common import RESULTS, run_experiment, show_by
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
    attentions: tuple[Literal["cudnn", "xla"], ...] = ("cudnn", "xla")
    """Of the frontier."""
    target: str = "h100-80gb"
    num_budgets: int = 10
    loss: str = "chunked"
    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = get_args(Part)
    out: Path = RESULTS


def make_run(name: str, budget_bytes: int, flags: Flags, attention: str = "auto") -> Any:
    """The run of the model's training step on the target, within a budget."""
    from jaxremat.chips.target import load_target
    from jaxremat.model.attention import choose_attention
    from jaxremat.model.decoder_workload import decoder_factory
    from jaxremat.trial.trials import Trials

    target, chosen = load_target(flags.target), preset(name)
    config = replace(chosen.config, attention=attention)
    train = TrainConfig(seq_len=chosen.seq_len, loss=flags.loss)
    chosen = choose_attention(config, train.seq_len, target)
    return Trials(decoder_factory(config, chosen.implementation, chosen.reason), train, target, budget_bytes)


def compiled(run: Any, policy: Any, batch: int) -> Row:
    """The bytes, predicted seconds and recomputed FLOPs of one compiled step."""

    record = run.record(policy, batch, "trial")
    return {key: getattr(record, key) for key in ("batch", "total_bytes", "step_s", "recompute_overhead_percent")}


#: The policies of the grammar that don't depend on the model. Those of `NAMED_FUSED` are used only with fused attention,
#: because without it `+attention` changes nothing.
NAMED = ("nothing", "dots", "dots-no-batch", "one-in:2", "every:sqrt+nothing", "everything", "none")
NAMED_FUSED = ("nothing+attention", "dots+attention")


def measure_frontier(flags: Flags) -> Iterator[Row]:
    """The named policies at one batch, and for each of them the plan within its bytes."""
    from jaxremat.answer.planned import plan_run
    from jaxremat.planner.plan import Plan
    from jaxremat.policy.grammar import parse

    for (name, batch), attention in itertools.product(zip(flags.models, flags.batches, strict=False), flags.attentions):
        trials = make_run(name, 2**62, flags, attention)
        common = {"program": f"{name}, {attention}", "model": name, "attention": attention, "batch": batch}
        named: list[Row] = []
        for policy in map(parse, (*NAMED, *(NAMED_FUSED if attention == "cudnn" else ()))):
            record = trials.record(policy, batch)
            named.append({"policy": str(policy), "total_bytes": record.total_bytes, "step_s": record.step_s})
            yield {**common, "kind": "named", **named[-1]}
        for beside in sorted(named, key=lambda row: row["total_bytes"]):
            budget = beside["total_bytes"]
            alone = replace(trials, steps={})  # no plan knows the steps of the others
            found = plan_run(alone, losses=(flags.loss,), batch=batch, max_batch=batch, budget_bytes=budget).found
            if isinstance(found, Plan):
                faster = {"beside": beside["policy"], "faster_percent": 100 * (beside["step_s"] / found.cost.step_s - 1)}
                yield {**common, "kind": "planned", **planned(found), **faster}


def planned(found: Any) -> Row:
    """How far the expected bytes of a plan are from the compiled ones, and its seconds."""
    off = found.predicted_bytes and 100 * (found.predicted_bytes / found.cost.total_bytes - 1)
    return {
        "total_bytes": found.cost.total_bytes,
        "predicted_off_percent": off,
        "step_s": found.cost.step_s,
        "num_compiles": len(found.tried),
    }


def measure_budgets(flags: Flags) -> Iterator[Row]:
    """Plans with a free batch for rising budgets: the layout, the batch, and the tokens per second.

    No plan knows the steps of the others.
    """
    from jaxremat.policy.grammar import parse

    for name in flags.models:
        run = make_run(name, 2**62, flags)
        low = compiled(run, parse("nothing"), 1)["total_bytes"]
        high = (run.target.memory_bytes or 0) * 9 // 10
        for n in range(flags.num_budgets):
            budget = int(low * (high / low) ** (n / max(1, flags.num_budgets - 1))) + 2**20
            yield _planned_freely(make_run(name, budget, flags))


def _planned_freely(run: Any) -> Row:
    """The plan with a free batch, loss and layout.

    Beside it are the tokens per second of the best plan in a scan, or those that are expected in a scan at most.
    """
    from jaxremat.answer.planned import plan_run
    from jaxremat.planner.plan import Plan

    answer = plan_run(run, losses=("full", "chunked"), batch=None, max_batch=4096, layouts=("loop", "unrolled"))
    rows: list[Row] = []
    for one in (answer, *answer.others):
        found, layout = one.found, one.trials.factory.layout()
        assert isinstance(found, Plan), "the budget is at least that of the smallest step"
        chosen = {"model": run.factory.name, "budget_bytes": run.budget_bytes, "loss": found.loss, "batch": found.batch}
        speed = {"tokens_per_s": run.train.seq_len * found.batch / found.cost.step_s, "layers": layout}
        rows.append({**chosen, **planned(found), **speed})
    in_loop = next((row["tokens_per_s"] for row in rows if row["layers"] == "loop"), None)
    if answer.others and (most_share := answer.others[0].most_share):
        in_loop = most_share * rows[0]["tokens_per_s"]
    num_compiles = sum(row["num_compiles"] for row in rows)
    return {**rows[0], "loop_tokens_per_s": in_loop, "num_compiles": num_compiles}


def without_flops(layer: Any) -> Any:
    """The policy of the fewest bytes under which no matmul, attention or convolution runs twice."""
    from jaxremat.knapsack.solve import solve
    from jaxremat.planner.estimate import policy_of

    problem = layer.problem
    ops = tuple(replace(op, recompute_s=float(op.flops > 0)) for op in problem.ops)
    all_bytes = sum(value.num_bytes for value in problem.values)
    price = 0.5 / max(1, all_bytes)  # saving all bytes together costs less than running one operation
    values = tuple(replace(value, save_s=0.0) for value in problem.values)
    weighed = replace(problem, ops=ops, values=values, save_s_per_byte=price)
    decision = solve(weighed, all_bytes).decision
    fused = frozenset(v for op in problem.ops if op.together for v in op.outputs)
    return policy_of(layer, decision, attention=bool(fused) and fused <= decision.save)


def measure_no_matmul(flags: Flags) -> Iterator[Row]:
    """Three steps: `none`, the policy under which no matmul and no attention runs twice, and the plan within its bytes."""
    from jaxremat.answer.layer_estimate import speed_of
    from jaxremat.answer.planned import plan_run
    from jaxremat.answer.workload_estimate import estimate_workload
    from jaxremat.planner.plan import Plan
    from jaxremat.planner.shared_budget import as_one
    from jaxremat.policy.grammar import parse

    for name in flags.models:
        run, batch = make_run(name, 2**62, flags), 32
        kinds = estimate_workload(run, speed_of(run.target), batch)
        none, saved = parse("none"), without_flops(as_one(kinds).layer)
        steps = [{"policy": "none", **compiled(run, none, batch)}, {"policy": "no matmul", **compiled(run, saved, batch)}]
        budget = steps[-1]["total_bytes"]
        found = plan_run(run, losses=(flags.loss,), batch=batch, max_batch=batch, budget_bytes=budget).found
        assert isinstance(found, Plan), "one policy is known to fit"
        steps.append({"policy": "planned", **compiled(run, found.policy, batch)})
        yield from ({"model": name, **step, "share": step["total_bytes"] / steps[0]["total_bytes"]} for step in steps)


#: By part, the function that measures it, how many of its first columns are words, and the columns of its table.
MEASURES: dict[Part, tuple[Callable[[Flags], Iterator[Row]], int, tuple[str, ...]]] = {
    "frontier": (
        measure_frontier,
        3,
        ("program", "policy", "beside", "total_bytes", "predicted_off_percent", "step_s", "faster_percent"),
    ),
    "budgets": (
        measure_budgets,
        2,
        ("model", "layers", "budget_bytes", "total_bytes", "batch", "tokens_per_s", "loop_tokens_per_s", "num_compiles"),
    ),
    "no-matmul": (measure_no_matmul, 2, ("model", "policy", "total_bytes", "share", "step_s", "recompute_overhead_percent")),
}
SHOWN = {
    "step_s": ("step ms", lambda value: f"{1e3 * value:.1f}"),
    "loop_tokens_per_s": ("in a scan", lambda value: f"{value:,.0f}"),
    "share": ("of none", lambda value: f"{value:.0%}"),
    "recompute_overhead_percent": ("recompute", lambda value: f"{value:.1f}%"),
    "predicted_off_percent": ("off", lambda value: f"{value:+.1f}%"),
    "faster_percent": ("faster", lambda value: f"{value:+.2f}%"),
    "beside": ("within", str),
    "policy": ("policy", lambda value: value if len(value) < 19 else value[:16] + "..."),
}


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that the flags ask for, and returns the exit code."""
    return run_experiment("planner", Flags, argv, MEASURES, show_by(SHOWN), ("program",))


if __name__ == "__main__":
    sys.exit(main())
