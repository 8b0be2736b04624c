"""What the pages take from the experiments on plans, layouts of layers, and models that nobody edited."""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from experiments.common import Row, where
from experiments.examples import NAMES
from experiments.foreign_blocks import Flags as ForeignFlags
from experiments.numbers.held import Part, Table, Words
from experiments.numbers.rows import (
    EXPERIMENTS,
    at_most,
    both,
    by,
    either,
    gib,
    ms,
    percent,
    rate,
    signed,
    signed_span,
    span,
    spans,
)
from jaxremat.report.table import gib_number

PLANNING = "docs/planning.md"


def planner(result: Any) -> Iterator[Part]:
    """Of `experiments.planner`."""
    yield from _budgets(result["budgets"])
    one, other = (f"{row['model']} {row['search_s']:.0f} s for {row['num_compiles']}" for row in result["search"])
    yield Words(EXPERIMENTS, f"{result['machine']['cores']} cores: {one} compiles, {other}")
    yield _frontier(result["frontier"], result["budgets"])
    yield _no_matmul(result["no-matmul"])


def _budgets(rows: list[Row]) -> Iterator[Words]:
    """Of plans within budgets."""
    models = by(rows, "model")
    met = all(_fits(row) for row in rows)
    rising = all(one["tokens_per_s"] < other["tokens_per_s"] for some in models.values() for one, other in pairwise(some))
    faster = [row["tokens_per_s"] / row["loop_tokens_per_s"] - 1 for row in where(rows, layers="unrolled")]
    sizes = [
        f"{name} from {span((row['budget_bytes'] / 2**30 for row in some), '.1f')} GiB" for name, some in models.items()
    ]
    rates = [f"{name} {span((row['tokens_per_s'] for row in some), ',.0f')}" for name, some in models.items()]
    yield Words(EXPERIMENTS, f"{len(rows) // 2} budgets each ... {', '.join(sizes)}; {either(met, 'all', 'not all')} met")
    yield Words(
        EXPERIMENTS,
        f"Tokens/s predicted: {', '.join(rates)}. Unrolled in {len(faster)} of the {len(rows)}, up to {percent(max(faster))} "
        f"faster ... {either(rising, 'Each has', 'Not each has')} more than the next smaller budget. "
        f"{span(row['num_compiles'] for row in rows)} compiles each",
    )


def _frontier(rows: list[Row], budgets: list[Row]) -> Words:
    """Of plans beside named policies. A plan within the bytes of several policies counts once for its bytes."""
    plans = where(rows, kind="planned")
    errors = {(row["program"], row["total_bytes"]): _error(row) for row in plans if row["predicted_off_percent"] is not None}
    *others, (worst, _) = sorted(errors.items(), key=lambda plan: abs(plan[1]))
    (gpt2, small), (llama, large) = ((model, some[0]["batch"]) for model, some in by(plans, "model").items())
    slower = any(row["faster_percent"] < 0 for row in plans)
    return Words(
        EXPERIMENTS,
        f"{gpt2} at batch {small} and {llama} at {large} in a loop ... {len(plans)} plans, {either(not slower, 'none', 'some')} "
        f"slower ... from {signed_span(errors.values())}: within {at_most((error for _, error in others), 1)} but for one plan "
        f"of {worst[0].removesuffix(', xla')} under XLA's attention. Of the {len(budgets)} budgets up to "
        f"{percent(max(map(_error, budgets)))} too much was expected",
    )


def _no_matmul(rows: list[Row]) -> Words:
    """Of the policy under which no matmul and no attention runs twice."""
    (_, kept, planned), (_, large, large_planned) = by(rows, "model").values()
    nothing = either(large_planned["recompute_overhead_percent"] < 0.05, "nothing", "something")
    return Words(
        EXPERIMENTS,
        f"batch {kept['batch']}, chunked loss, in a loop: {_of_none(kept, 2)}. Within these bytes the planner takes "
        f"{gib(planned['total_bytes'])} GiB and {ms(planned['step_s'], 1)} ms, recomputing "
        f"{planned['recompute_overhead_percent']:.0f} % of FLOPs. llama3.2-1b: {_of_none(large, 1).replace(' of `none`', '')}; "
        f"within them {gib(large_planned['total_bytes'], 1)} GiB and {ms(large_planned['step_s'], 1)} ms, recomputing {nothing}",
    )


def _of_none(row: Row, digits: int) -> str:
    """The bytes of a step, their share of what `none` takes, and the time of the step."""
    return f"{gib(row['total_bytes'], digits)} GiB, {100 * row['share']:.0f} % of `none`, {ms(row['step_s'], 1)} ms"


def _error(row: Row) -> float:
    """By which share more bytes were expected than compiled."""
    return row["predicted_off_percent"] / 100


def _fits(row: Row) -> bool:
    return row["total_bytes"] <= row["budget_bytes"]


def foreign_blocks(result: Any) -> Iterator[Part]:
    """Of `experiments.foreign_blocks`."""
    blocks, models = result["blocks"], result["examples"]
    errors = [row["off_percent"] / 100 for row in blocks if row["off_percent"] is not None]
    *others, worst = sorted(row["off_percent"] / 100 for row in models)
    [name] = {row["layers"].removesuffix(".py").replace("_", "-") for row in models if row["off_percent"] == 100 * worst}
    met = all(_fits(row) for row in (*blocks, *models))
    yield Words(
        EXPERIMENTS,
        f"stacks of {ForeignFlags().num_layers} of nine blocks ... {len(errors)} of the {len(blocks)} answers are the planner's "
        f"own, from {signed_span(errors)} ... The {len(by(models, 'layers'))} models of `examples/`, two budgets each: from "
        f"{signed_span(others)}, but for one at {signed(worst)}: the {name} ... {either(met, 'All', 'Not all')} budgets met",
    )


def layouts(result: Any) -> Iterator[Part]:
    """Of `experiments.layouts`."""
    steps, lines = by(result["steps"], "model", "policy"), [["model", "policy", "loop", "unrolled"]]
    for (model, policy), some in steps.items():
        lines.append([model, f"`{policy}`", *(f"{gib_number(row['total_bytes'])} GiB, {rate(row)}/s" for row in some)])
    yield Table(PLANNING, "layouts", lines)
    models = by(result["steps"], "model")
    (gpt2, first), (llama, other) = (
        (model, f"{some[0]['batch']} of {some[0]['seq_len']}") for model, some in models.items()
    )
    for page in (PLANNING, EXPERIMENTS):
        yield Words(page, f"{gpt2} at batch {first} tokens and {llama} at {other}")
    rates = {where: both([rate(row) for row in some]) for where, some in steps.items()}
    sizes = [both([gib(row["total_bytes"], 1) for row in steps[model, "none"]]) for model in models]
    none, saved = ([rates[model, policy] for model in models] for policy in ("none", "dots+attention"))
    yield Words(
        EXPERIMENTS,
        f"under `none` {', and '.join(none)}, in {', and '.join(sizes)} GiB; under `dots+attention` {', and '.join(saved)}",
    )
    scan, unrolled = steps[gpt2, "none"]
    is_fastest = unrolled["tokens_per_s"] == max(row["tokens_per_s"] for row in models[gpt2])
    is_slowest = scan["tokens_per_s"] == min(row["tokens_per_s"] for row in models[gpt2])
    yield Words(
        "README.md",
        f"unrolled `none` is {either(is_fastest, 'the fastest', 'not the fastest')}: at batch {unrolled['batch']}, too, with "
        f"{rate(unrolled)} tokens/s in {gib(unrolled['total_bytes'], 1)} GiB ... there `none` is "
        f"{either(is_slowest, 'the slowest', 'not the slowest')}: {rate(scan)} tokens/s in {gib(scan['total_bytes'], 1)} GiB",
    )
    longer = span(unrolled["compile_s"] / loop["compile_s"] for loop, unrolled in steps.values())
    yield Words(EXPERIMENTS, f"Unrolled steps compile {longer} times longer")
    yield _between(by(result["between"], "model", "policy"))


def _between(rows: dict[tuple[str, str], list[Row]]) -> Words:
    """Of loops that run several layers in an iteration, beside those of one layer."""
    numbers, slower, more = set(), {}, []
    for (_, policy), (one, *several, _) in rows.items():
        numbers |= {re.sub(r"\D", "", row["layers"]) for row in several}
        slower.setdefault(policy, []).extend(row["step_s"] / one["step_s"] - 1 for row in several)
        more += [row["total_bytes"] > one["total_bytes"] for row in several]
    return Words(
        EXPERIMENTS,
        f"with {both(sorted(numbers))} layers an iteration: {either(all(more), 'more', 'not always more')} bytes ... "
        f"{spans([*slower['dots+attention'], *slower['none']])} longer steps, under `nothing` within "
        f"{at_most(slower['nothing'], 1)}",
    )


def examples(result: Any) -> Iterator[Part]:
    """Of `experiments.examples`."""
    lines, shares, faster, met = [["example", "batch", "none", "nothing", "dots", "auto"]], [], [], []
    for name in NAMES:
        rows = none, nothing, dots, auto = result[name]
        cells = [f"{gib_number(row['total_bytes'])} GiB, {row['samples_per_s']:,.0f}/s" for row in rows]
        lines.append([f"`{name}.py`", none["batch"], *cells])
        shares.append(nothing["total_bytes"] / none["total_bytes"])
        faster.append(auto["samples_per_s"] / dots["samples_per_s"] - 1)
        met.append(auto["total_bytes"] <= dots["total_bytes"])
    yield Table("docs/your_model.md", "examples", lines)
    yield Words(
        EXPERIMENTS,
        f"the {len(shares)} models of `examples/`: `nothing` takes {spans(shares)} of the bytes of `none` ... "
        f"{either(all(met), 'fits', 'does not fit')} them and is predicted {spans(faster)} faster than `dots`",
    )
