"""A plan for a person: its choice and its bytes, tables of saved seconds, code to paste.

The first sentence of a plan: `Planned: batch 8, chunked loss, 29.26 GiB of 30.00 GiB, by 12 compiles. Of the layers:`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

from rich.table import Table

from jaxremat.policy.grammar import parse
from jaxremat.policy.maxtext import MAXTEXT_NAMES
from jaxremat.policy.offload import flag_line
from jaxremat.policy.spec import NONE, Names
from jaxremat.report.policy_text import shortened
from jaxremat.report.sentences import APART
from jaxremat.report.steps import LAYOUT_WORDS, batch_text, loss_text, steps_table
from jaxremat.report.table import counted, gib_number, list_table, number
from jaxremat.trial.details import TriedStep
from jaxremat.trial.record import PlanRecord, TrialRecord
from jaxremat.units import gib
from jaxremat.xla.dump import short_source

#: Before the seconds of the lower bound.
_LEAST = "the least of any choice of residuals within the budget is"

#: A step of so much of a plan's bytes, or less, is worth a sentence where it is as fast.
_LESS = 0.95

#: So many lines are printed of what the kinds of layers save.
_SHOWN_LAYERS = 8


def plan_sentences(plan: PlanRecord) -> list[str]:
    """The plan in sentences.

    The first ones give the batch, the loss, the bytes and each layer's policy. The next one compares the planner's expected
    bytes with XLA's. The last one compares the seconds that the residuals' choice takes with the lower bound: for
    recomputing, and for writing and reading what a step that recomputes nothing wouldn't write.
    """
    total = f"{gib(plan.total_bytes)} of {gib(plan.budget_bytes)}"
    layers = f", layers {LAYOUT_WORDS[plan.layout]}" if plan.layouts and plan.layout else ""
    planned = f"Planned: batch {plan.batch}{loss_text(plan)}{layers}, {total}, by {counted(plan.num_compiles, 'compile')}."
    sentences = [f"{planned} Of the layers:"]
    layers = [f"  {count} x {shortened(policy)}" for policy, count in Counter(plan.layers).items()]
    further = f"  and {len(layers) - _SHOWN_LAYERS + 1} further kinds of layers (--json has all)"
    sentences += layers if len(layers) <= _SHOWN_LAYERS else [*layers[: _SHOWN_LAYERS - 1], further]
    sentences += [*_made_at(plan), *_as_fast(plan)]
    if plan.as_config:
        sentences += ["In its own configuration:", *(f"  {line}" for line in plan.as_config)]
    if plan.max_batch is not None:
        sentences.append(f"Larger batches weren't tried (--max-batch {plan.max_batch}).")
    if plan.disabled_pass:
        sentences.append(f"It offloads in a scan, and was compiled without XLA's pass {plan.disabled_pass}.")
    if plan.predicted_total_bytes is None or plan.recompute_s is None:
        bound = [] if plan.bound_s is None else [f"By the planner's estimate, {_LEAST} {_ms(plan.bound_s)}."]
        return [*sentences, _why_named(plan), *bound]
    off = 100 * (plan.predicted_total_bytes / plan.total_bytes - 1)
    takes = f"Recomputing, writing and reading residuals takes {_ms(plan.recompute_s)} of the step's {_ms(plan.step_s)}"
    return [
        *sentences,
        f"The planner expected {gib(plan.predicted_total_bytes)} ({off:+z.1f}%).",
        f"{takes}, by the planner's estimate{_bound(plan, plan.recompute_s)}.",
    ]


def _made_at(plan: PlanRecord) -> list[str]:
    """Where a user's own model makes the values that the plan saves or offloads by name."""
    names, sources = parse(plan.policy).names() if is_of_own_model(plan) else (), plan.sources or {}
    lines = [f"  {name} is made at {short_source(sources[name])}" for name in names if name in sources]
    further = f"  and {len(lines) - _SHOWN_LAYERS + 1} further names (--json has all)"
    return lines if len(lines) <= _SHOWN_LAYERS else [*lines[: _SHOWN_LAYERS - 1], further]


def _as_fast(plan: PlanRecord) -> list[str]:
    """The compiled steps that are as fast as the plan.

    They are that of the fewest bytes, and that of `none`. The former isn't named where it takes hardly fewer bytes than the plan.
    """
    error = plan.paired_error or 0.0
    steps = [one for one in plan.tried if one.layout == plan.layout]
    rate = max((one.rate for one in steps if one.batch == plan.batch and one.policy == plan.policy), default=0.0)
    near = [one for one in steps if one.rate * (1 + error) > rate and one.total_bytes <= plan.budget_bytes]
    if plan.objective != "time" or not error or not rate:
        return []
    least = [one for one in near if one.total_bytes < _LESS * plan.total_bytes]
    of_none = [one for one in near if one.policy == str(NONE) != plan.policy]
    shown = [min(least, key=lambda one: one.total_bytes)] if least else []
    shown += [one for one in [max(of_none, key=lambda one: one.rate)] if one not in shown] if of_none else []
    return [*map(partial(_beside, plan, rate), shown), *([f"They are as fast: {APART.format(error)}."] if shown else [])]


def _beside(plan: PlanRecord, rate: float, one: TriedStep) -> str:
    """A compiled step beside the plan, which has this rate."""
    faster = 100 * (one.rate / rate - 1)
    loss = "" if one.loss == plan.loss else f", {one.loss} loss,"
    without = ", without checkpoints," if one.policy == str(NONE) else ""
    step = f"Batch {batch_text(one)} under {shortened(one.policy)}{without or loss}"
    return (
        f"{step} takes {gib(one.total_bytes)}, and is predicted {abs(faster):.1f}% {'faster' if faster > 0 else 'slower'}."
    )


def _bound(plan: PlanRecord, recompute_s: float) -> str:
    """The lower bound of these seconds. Nothing where compiled steps contradict its bytes."""
    if plan.bound_s is None:
        return ""
    share = 100 * (recompute_s - plan.bound_s) / plan.step_s
    return f"; {_LEAST} {_ms(plan.bound_s)}" + (f" ({share:.2f}% of the step less)" if share >= 0.005 else "")


def _ms(seconds: float) -> str:
    """Seconds as milliseconds with at least three digits that aren't leading zeros.

    For example `254.3 ms`, `14.48 ms` and `0.0309 ms`.

    A microsecond is less than what starting a kernel takes, and no prediction tells shorter times apart.
    """
    if seconds < 1e-6:
        return "less than 0.001 ms"
    ms = 1e3 * seconds
    return f"{number(ms, 1 if ms >= 100 else 2 if ms >= 1 else 2 - math.floor(math.log10(ms)))} ms"


def _why_named(plan: PlanRecord) -> str:
    if plan.objective == "memory":
        return "That is the named policy of the least bytes; no values were chosen."
    if all(parse(policy).saves_inputs_alone for policy in (plan.policy, *(step.policy for step in plan.tried))):
        return "That is the named policy of the least bytes: hardly anything else fits."
    return "That is a named policy: no choice of the planner's was predicted to be faster at this batch."


def plan_parts(plan: PlanRecord, *, explain: bool) -> list[Table | str]:
    """The sentences and tables of a plan.

    With `explain` it has those of what tensors are worth.
    """
    parts: list[Table | str] = [*plan_sentences(plan)]
    if plan.unrolled_error:
        parts.append(f"Unrolled layers are left out: {plan.unrolled_error}")
    if plan.layouts:
        parts += [*([] if plan.layouts[1].most_share else [layouts_table(plan)]), *layouts_sentences(plan)]
    if explain:
        nothing = "\nNo tensor's saving would take time off, by the planner's estimate."
        parts += [price_table(plan) if plan.prices else nothing, *([] if plan.bound_s is None else [more_table(plan)])]
    return parts


def layouts_table(plan: PlanRecord) -> Table:
    """A table of the best plan in each layout, with the seconds of its compile here."""
    return steps_table("layouts", "how the layers run", plan.layouts, titles={"step": "predicted ms", "rate": "tokens/s"})


def layouts_sentences(plan: PlanRecord) -> list[str]:
    """How much slower the other layout is, and why a scan costs what it costs."""
    chosen, other = plan.layouts
    unit = "tokens" if chosen.tokens_per_s else "samples"
    rate, other_rate = (one.tokens_per_s or one.samples_per_s or one.batch / one.step_s for one in (chosen, other))
    slower = 100 * (1 - (other.most_share or other_rate / rate))
    difference = f"{abs(slower):.1f}% {'fewer' if slower > 0 else 'more'}"
    error = ""
    if plan.paired_error and abs(slower) < 100 * plan.paired_error:
        error = f" (predicted times don't tell apart what differs by less than {plan.paired_error:.0%})"
    if other.layout != "loop":
        return [f"Unrolled layers have {difference} {unit} a second{error}."]
    because = "XLA copies what a scan saves into stacks and out of them again"
    converted = "Unrolled layers have other parameter trees: jaxremat.unstack_layers and stack_layers convert them."
    if not other.most_share:
        return [f"A scan has {difference} {unit} a second{error}: {because}.", converted]
    most = f"at most {other.most_share * rate:,.0f} {unit} a second, {difference}{error}"
    return [
        f"A scan is expected to have {most}: {because}. --scan-layers True plans one.",
        f"Unrolled, the step was compiled in {chosen.compile_s:.0f} s here, and in a scan in {other.compile_s:.0f} s.",
        converted,
    ]


def price_table(plan: PlanRecord) -> Table:
    """A table of the tensors that take time off the step if saved.

    The rest of the plan is unchanged.

    The tensors are sorted by saved seconds per byte, the largest first.
    """
    rows, sources = [], plan.sources or {}
    for one in plan.prices:
        where = "yes" if one.is_saved else "on host" if one.is_offloaded else ""
        ratio = number(one.num_bytes / 2**20 / (1e3 * one.saved_s))
        source = short_source(sources.get(one.name.partition(" ")[0], ""))
        rows.append((one.name, where, gib_number(one.num_bytes), f"{1e3 * one.saved_s:.3f}", ratio, source))
    has_kinds = any(": " in layer for layer in plan.layers)
    layers = "all layers of its kind" if has_kinds else f"all {len(plan.layers)} layers"
    title = f"what saving a tensor in {layers} is worth"
    titles = ("tensor", "saved", "GiB", "saves ms", "MiB per ms", "made at")
    if not any(source for *_, source in rows):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    return list_table(title, titles, rows, last=len(titles) - 5)


def more_table(plan: PlanRecord) -> Table:
    """A table of the seconds that a larger budget could save at this batch, by the lower bound."""
    rows = [(gib(one.further_bytes), f"{1e3 * one.saved_s:.2f}", f"{one.saved_s / plan.step_s:.2%}") for one in plan.more]
    return list_table("what more budget could save", ("further", "ms a step", "of the step"), rows)


def is_of_own_model(step: PlanRecord | TrialRecord) -> bool:
    """Whether the model is a user's own, and no preset and no config.json."""
    return "num_layers" not in step.config["model"]


def code_to_paste(step: PlanRecord | TrialRecord, as_code: Sequence[str], as_config: Sequence[str]) -> list[str]:
    """A step's policy as Python for a user's own layers, or for the loss of an own workload.

    If MaxText has all the policy's checkpoint names, the last line is MaxText's flags for the same policy. A step that offloads
    in a scan begins with the flag of XLA that it needs, if the version of JAX needs one.

    Args:
        step: the step.
        as_code: its policy in the framework of a user's own model.
        as_config: its policy in the author's own configuration.
    """
    lines = [f"# run it with {flag_line()}: with this jax a scan would read the wrong layer"] if step.disabled_pass else []
    if as_config:
        return [*lines, *as_config]
    model = step.config["model"]
    if is_of_own_model(step):
        layers = model.get("layers")
        given = f'loss = jaxremat.with_policy(loss, "{step.policy}"{f", layers={tuple(layers)}" if layers else ""})'
        where = "" if step.policy == str(NONE) else ", after the definition of a layer"
        return [*lines, given, *([f"# or in the model itself{where}:", *as_code] if as_code else [])]
    unrolled = "" if model["scan_layers"] else ", scan=False"
    lines.append(f'layers = jaxremat.Layers(Block(...), num_layers={model["num_layers"]}, policy="{step.policy}"{unrolled})')
    policy = parse(step.policy)
    if policy == Names(names := policy.names()):
        quoted = ", ".join(f'"{name}"' for name in names)
        lines += [
            f"policy = jax.checkpoint_policies.save_only_these_names({quoted})",
            "Block = nn.remat(jaxremat.autoname(Block), policy=policy)  # prevent_cse=False inside nn.scan",
        ]
        if MAXTEXT_NAMES.issuperset(names):
            lines.append("remat_policy=custom " + " ".join(f"{name}=device" for name in names) + "  # MaxText")
    return lines
