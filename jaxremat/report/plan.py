"""A plan for a person: sentences on its choice and its bytes, tables of saved seconds, and code to paste.

The first sentence of a plan: `Planned: batch 8, chunked loss, 29.26 GiB of 30.00 GiB, by 12 compiles. Of the layers:`.
"""

import math
from collections.abc import Sequence

from rich.table import Table

from jaxremat.policy.grammar import parse
from jaxremat.policy.maxtext import MAXTEXT_NAMES
from jaxremat.policy.offload import flag_line
from jaxremat.policy.spec import Names, keeps_inputs_alone
from jaxremat.report.policy_text import shortened
from jaxremat.report.table import gib_number, list_table
from jaxremat.trial.record import PlanRecord
from jaxremat.units import gib
from jaxremat.workload.given import OWN_LOSS

#: The step that added seconds are measured against.
_FREE = "a step that recomputes nothing and saves what its kernels write in any case"
_IN_WORDS = {"loop": "in a loop", "unrolled": "unrolled"}


def plan_sentences(plan: PlanRecord) -> list[str]:
    """The plan in sentences.

    The first ones give the batch, the loss, the bytes and each layer's policy. The next one compares the planner's expected
    bytes with XLA's. The last one compares the seconds that the residuals' choice adds to a step with the lower bound: for
    recomputing, and for writing and reading what a step that recomputes nothing wouldn't write.
    """
    compiles = f"{plan.num_compiles} compiles"
    total = f"{gib(plan.total_bytes)} of {gib(plan.budget_bytes)}"
    loss = "" if plan.loss == OWN_LOSS else f", {plan.loss} loss"
    layers = f", layers {_IN_WORDS[plan.layout]}" if plan.layouts and plan.layout else ""
    sentences = [f"Planned: batch {plan.batch}{loss}{layers}, {total}, by {compiles}. Of the layers:"]
    sentences += [f"  {count} x {shortened(policy)}" for policy, count in _runs(plan.layers)]
    if plan.max_batch is not None:
        sentences.append(f"Larger batches weren't tried (--max-batch {plan.max_batch}).")
    if plan.disabled_pass:
        sentences.append(f"It offloads in a scan, and was compiled without XLA's pass {plan.disabled_pass}.")
    if plan.predicted_total_bytes is None or plan.recompute_s is None:
        added = f"recomputing, writing and reading residuals adds to {_FREE}"
        return [*sentences, _why_named(plan), f"By the model, the lower bound of what {added} is {_ms(plan.bound_s)}."]
    off = 100 * (plan.predicted_total_bytes / plan.total_bytes - 1)
    sentences.append(f"The model expected {gib(plan.predicted_total_bytes)} ({off:+.1f}%).")
    gap_s = plan.recompute_s - plan.bound_s
    away = f" ({share:.2f}% of the step away)" if (share := 100 * gap_s / plan.step_s) >= 0.005 else ""
    sentences.append(
        f"Recomputing, writing and reading residuals adds {_ms(plan.recompute_s)} to {_FREE}, by the model. The step is "
        f"predicted to take {_ms(plan.step_s)}. By the same model, the lower bound of what any choice of residuals within the "
        f"budget adds is {_ms(plan.bound_s)}{away}."
    )
    return sentences


def _ms(seconds: float) -> str:
    """Seconds as milliseconds with at least three digits that aren't leading zeros: `254.3 ms`, `14.48 ms`, `0.0309 ms`.

    A microsecond is less than what starting a kernel takes, and no prediction tells shorter times apart.
    """
    if seconds < 1e-6:
        return "less than 0.001 ms"
    number = 1e3 * seconds
    digits = 1 if number >= 100 else 2 if number >= 1 else 2 - math.floor(math.log10(number))
    return f"{number:,.{digits}f} ms"


def _why_named(plan: PlanRecord) -> str:
    if plan.objective == "memory":
        return "That is the named policy of the least bytes; no values were chosen."
    if all(keeps_inputs_alone(parse(policy)) for policy in (plan.policy, *(step.policy for step in plan.tried))):
        return "That is the named policy of the least bytes: hardly anything else fits."
    return "That is a named policy: no choice of the planner's was predicted to be faster at this batch."


def layouts_table(plan: PlanRecord) -> Table:
    """A table of the best plan in each layout, with the seconds that its step took to compile on this machine."""
    rows = [
        (
            _IN_WORDS[one.layout],
            str(one.batch),
            gib_number(one.total_bytes),
            f"{1e3 * one.step_s:,.1f}",
            "-" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}",
            f"{one.compile_s:.1f}",
        )
        for one in plan.layouts
    ]
    return list_table("how the layers run", ("layers", "batch", "GiB", "predicted ms", "tokens/s", "compile s"), rows)


def layouts_sentences(plan: PlanRecord) -> list[str]:
    """How much slower the other layout is, and why a loop costs what it costs."""
    chosen, other = plan.layouts
    slower = 100 * (1 - (other.batch / other.step_s) / (chosen.batch / chosen.step_s))
    difference = f"{abs(slower):.1f}% {'fewer' if slower > 0 else 'more'} tokens a second"
    if other.layout == "loop":
        because = "in a loop XLA copies what is saved into stacks and out of them again"
        return [
            f"A loop has {difference}: {because}. It compiles {chosen.compile_s / other.compile_s:.1f} times as fast.",
            "Unrolled layers have other parameter trees: jaxremat.unstack_layers and stack_layers convert them.",
        ]
    return [
        f"Unrolled layers have {difference}, and take {other.compile_s / chosen.compile_s:.1f} times as long to compile."
    ]


def price_table(plan: PlanRecord) -> Table:
    """A table of the tensors that take time off the step if saved, the rest of the plan unchanged.

    The tensors are sorted by saved seconds per byte, the largest first.
    """
    rows = [
        (
            price.name,
            "yes" if price.is_saved else "on host" if price.is_offloaded else "",
            gib_number(price.num_bytes),
            f"{1e3 * price.saved_s:.3f}",
            f"{price.num_bytes / 2**20 / (1e3 * price.saved_s):,.0f}",
        )
        for price in plan.prices
    ]
    has_kinds = any(": " in layer for layer in plan.layers)
    layers = "all layers of its kind" if has_kinds else f"all {len(plan.layers)} layers"
    title = f"what saving a tensor in {layers} is worth"
    return list_table(title, ("tensor", "saved", "GiB", "saves ms", "MiB per ms"), rows)


def more_table(plan: PlanRecord) -> Table:
    """A table of the seconds that a larger budget could save at this batch, by the lower bound."""
    rows = [
        (gib(more.further_bytes), f"{1e3 * more.saved_s:.2f}", f"{100 * more.saved_s / plan.step_s:.2f}%")
        for more in plan.more
    ]
    return list_table("what more budget could save", ("further", "ms a step", "of the step"), rows)


def code_to_paste(plan: PlanRecord) -> list[str]:
    """The plan as Python for a user's own layers, or for the loss of a user's own workload.

    If MaxText has all the plan's checkpoint names, the last line is MaxText's flags for the same plan. A plan that offloads in a
    scan begins with the flag of XLA that it needs, if the version of JAX needs one.
    """
    first = [f"# run it with {flag_line()}: with this jax a scan would read the wrong layer"] if plan.disabled_pass else []
    if plan.loss == OWN_LOSS:
        layers = plan.config["model"].get("layers")
        return [*first, f'loss = jaxremat.with_policy(loss, "{plan.policy}"{f", layers={tuple(layers)}" if layers else ""})']
    unrolled = "" if plan.config["model"]["scan_layers"] else ", scan=False"
    lines = [
        *first,
        f'layers = jaxremat.Layers(Block(...), num_layers={len(plan.layers)}, policy="{plan.policy}"{unrolled})',
    ]
    policy = parse(plan.policy)
    if isinstance(policy, Names) and not policy.offload and not policy.attention:
        quoted = ", ".join(f'"{name}"' for name in policy.save)
        lines += [
            f"policy = jax.checkpoint_policies.save_only_these_names({quoted})",
            "Block = nn.remat(jaxremat.autoname(Block), policy=policy)  # prevent_cse=False inside nn.scan",
        ]
        if MAXTEXT_NAMES.issuperset(policy.save):
            lines.append("remat_policy=custom " + " ".join(f"{name}=device" for name in policy.save) + "  # MaxText")
    return lines


def _runs(layers: Sequence[str]) -> list[tuple[str, int]]:
    """Each policy with its number of layers, in the order of first use.

    `["dots", "nothing", "nothing"]` gives `[("dots", 1), ("nothing", 2)]`.
    """
    return [(policy, layers.count(policy)) for policy in dict.fromkeys(layers)]
