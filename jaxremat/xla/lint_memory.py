"""The lint's rules for what is in memory at the peak.

They read the memory map, which needs XLA's dump. Without it they find nothing. For example, logits that are the largest buffer
at the peak give a finding of the rule `logits-largest`.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from jaxremat.units import gib
from jaxremat.xla import hlo
from jaxremat.xla.buffers import Buffer
from jaxremat.xla.categories import is_recompute, phase_of
from jaxremat.xla.clock import times_of
from jaxremat.xla.dump import short_source
from jaxremat.xla.flops import executed, is_matmul
from jaxremat.xla.hlo import plain_scope
from jaxremat.xla.kernels import kernels_of
from jaxremat.xla.lint_input import (
    MUCH,
    LintInput,
    Rule,
    at_peak,
    largest_logits,
    line_of,
    listed,
    num_elements,
    residuals,
)
from jaxremat.xla.step_facts import Finding
from jaxremat.xla.traced import normalized_sizes, score_shapes

_DRAWN = re.compile(r"dropout|bernoulli|random_bits|threefry|rng_bit_generator", re.IGNORECASE)
#: Scopes of fused attention. On a mesh, JAX wraps it into an operation that says how it is divided.
_FUSED = re.compile("fmha|dot_product_attention|custom_partitioning")
#: Kernels that write or read scores are much from this share of a step's time, or of the bytes that it moves, on.
_MUCH_TIME = 0.2
#: The folder of this package, whose decoder has an attention that was requested, or whose choice is said in the heading.
_PACKAGE = str(Path(__file__).parents[1])

_Kind = TypeVar("_Kind", bound=Hashable)


def _recomputed_together(facts: LintInput) -> Iterator[Finding]:
    alive: dict[tuple[str, tuple[int, ...]], list[tuple[Buffer, int]]] = defaultdict(list)
    for buffer, size in at_peak(facts.memory_map) if facts.traced.unordered else ():
        shapes = hlo.parse_shapes(buffer.shape)
        if "/checkpoint/" in buffer.op_name and phase_of(buffer.op_name) == "backward" and shapes:
            alive[f"{buffer.op_name.rpartition('/')[2]} {buffer.source}", shapes[0].dims].append((buffer, size))
    for body in facts.traced.unordered:
        of_one = {what: max(1, body.made[what]) for what in alive if what in body.made}
        num_bytes, example = _beyond(alive, of_one)
        if num_bytes > facts.small_bytes:
            yield Finding(
                "recomputed-together",
                f"{body.num_checkpoints} checkpoints at {short_source(body.source) or 'an unknown line'} are in one body with "
                f"prevent_cse=False, and nothing makes one wait for another: values of several are there at once, "
                f"{gib(num_bytes)} more than those of one, such as {example}",
                "a scan of their own for the layers of the body, or jax.checkpoint(layer) without prevent_cse=False with a "
                "jax before 0.12, whose XLA postpones the gradients of weights",
                num_bytes,
                body.source,
            )


def _microbatches_together(facts: LintInput) -> Iterator[Finding]:
    memory_map, num_rounds = facts.memory_map, facts.traced.num_rounds
    if memory_map is None or num_rounds == 1:
        return

    def kind(buffer: Buffer) -> tuple[str, str, str]:
        return buffer.label, buffer.shape, buffer.source

    def is_residual(buffer: Buffer) -> bool:
        # The category doesn't say so: it takes a program as one forward pass and one backward pass.
        phases = phase_of(buffer.op_name), phase_of(memory_map.program[buffer.last].op_name)
        return phases == ("forward", "backward")

    made = Counter(kind(buffer) for buffer in memory_map.buffers if is_residual(buffer))
    alive: dict[tuple[str, str, str], list[tuple[Buffer, int]]] = defaultdict(list)
    for buffer, size in at_peak(memory_map):
        if is_residual(buffer):
            alive[kind(buffer)].append((buffer, size))
    num_bytes, example = _beyond(alive, {what: math.ceil(made[what] / num_rounds) for what in alive})
    if num_bytes > facts.small_bytes:
        yield Finding(
            "microbatches-together",
            f"{num_rounds} forward passes, each with its backward pass, follow one another as in a Python loop, and nothing "
            f"makes one wait for another: residuals of several are there at once, at least {gib(num_bytes)} more than those of "
            f"one, such as {example}",
            "jax.lax.scan over the microbatches, with the forward and the backward pass of one in its body",
            num_bytes,
        )


def _beyond(alive: Mapping[_Kind, Sequence[tuple[Buffer, int]]], of_one: Mapping[_Kind, int]) -> tuple[int, str]:
    """The bytes of the buffers beyond those of one pass or checkpoint.

    With them comes the kind that has the most of them, in words.

    Args:
        alive: the buffers at the peak by their kind, each with its bytes.
        of_one: by kind, how many buffers one has.
    """
    more = {what: sum(size for _, size in alive[what][number:]) for what, number in of_one.items()}
    if not more:
        return 0, ""
    some = alive[max(more, key=lambda what: more[what])]
    return sum(more.values()), f"{len(some)} x {some[0][0].shape} at {line_of(some[0][0])}"


def _unnamed_residuals(facts: LintInput) -> Iterator[Finding]:
    traced = facts.traced
    if traced.saves_all or traced.policy_names.isdisjoint(traced.names):
        return  # only under a policy by names must every saved value have a name
    groups = residuals(facts)
    attention = facts.policy is not None and facts.policy.saves_attention
    # XLA has no checkpoint names. So an unrecognized value counts as named if it has the size of a saved name that wasn't
    # found.
    unseen = {size for name in traced.policy_names & traced.names.keys() - groups.keys() for size in traced.names[name]}
    unnamed = {
        label: some
        for label, some in groups.items()
        if label not in traced.names
        and label != "layer input"
        and num_elements(some[0][0]) // some[0][0].num_layers not in unseen
        and not (attention and _FUSED.search(some[0][0].op_name))
    }
    num_bytes = sum(size for some in unnamed.values() for _, size in some)
    if num_bytes <= facts.small_bytes:
        return
    named = sorted(label for label in groups if label in traced.policy_names)
    yield Finding(
        "unnamed-residuals",
        f"{gib(num_bytes)} of residuals have no checkpoint name: {listed(unnamed)}",
        (
            f"jax.checkpoint_policies.save_only_these_names({', '.join(map(repr, named))})"
            if facts.remedies == "code"
            else facts.under_policy(f"save:{','.join(named)}")
        )
        if named
        else "x = jax.ad_checkpoint.checkpoint_name(x, 'name'), or jaxremat.autoname(Layer) for all values of a layer",
        num_bytes,
        next(iter(unnamed.values()))[0][0].source,
    )


def _dropout_masks(facts: LintInput) -> Iterator[Finding]:
    drawn = {label: [one for one in some if _is_mask(one[0])] for label, some in residuals(facts).items()}
    masks = {label: some for label, some in drawn.items() if some}
    num_bytes = sum(size for some in masks.values() for _, size in some)
    if num_bytes > facts.small_bytes:
        yield Finding(
            "dropout-masks",
            f"{gib(num_bytes)} of dropout masks are saved for the backward pass, though the key gives them again: "
            f"{listed(masks)}",
            facts.under_policy("dots+attention"),
            num_bytes,
            next(iter(masks.values()))[0][0].source,
        )


def _is_mask(buffer: Buffer) -> bool:
    """Whether a buffer has random bits or a mask made of them.

    Activations that were dropped are floating-point numbers.
    """
    return bool(_DRAWN.search(buffer.op_name)) and not buffer.shape.startswith(("f", "bf"))


def _saved_and_recomputed(facts: LintInput) -> Iterator[Finding]:
    if facts.memory_map is None:
        return
    made, again = Counter[str](), Counter[str]()
    for _, i, times in executed(facts.module):
        if is_matmul(i) and (is_recompute(i.op_name) or phase_of(i.op_name) == "forward"):
            (again if is_recompute(i.op_name) else made)[plain_scope(i.op_name)] += times * i.shapes[0].num_elements
    saved: dict[str, list[tuple[Buffer, int]]] = defaultdict(list)
    for some in residuals(facts).values():
        for buffer, size in some:
            saved[plain_scope(buffer.op_name)].append((buffer, size))
    for scope in saved.keys() & made.keys() & again.keys():
        num_saved = sum(num_elements(buffer) for buffer, _ in saved[scope])
        # Elements are compared, since under a mix of policies some layers save a value that other layers compute again.
        if min(num_saved, made[scope]) + again[scope] > made[scope]:
            (buffer, _), num_bytes = saved[scope][0], sum(size for _, size in saved[scope])
            yield Finding(
                "saved-and-recomputed",
                f"the matmul {buffer.label} at {line_of(buffer)} is saved, {gib(num_bytes)}, and recomputed all the same: "
                "its value is also read without its name",
                "y = jax.ad_checkpoint.checkpoint_name(y, 'name'), and read only that y",
                num_bytes,
                buffer.source,
            )


def _logits_largest(facts: LintInput) -> Iterator[Finding]:
    sizes = normalized_sizes(facts.jaxpr) if facts.memory_map else ()
    largest = largest_logits(facts.memory_map, sizes)
    if largest is None:
        return
    buffer, size = largest
    saved = None if facts.chunked_bytes is None else facts.memory.total_bytes - facts.chunked_bytes
    if saved is not None and saved <= 0:
        return
    yield Finding(
        "logits-largest",
        f"the largest buffer at the peak is {buffer.label}, {buffer.shape}, {gib(size)} of "
        f"{gib(facts.memory.total_bytes)}, made at {line_of(buffer)}"
        + (f"; with the chunked loss the step takes {gib(saved)} less, compiled" if saved is not None else ""),
        "--loss chunked"
        if facts.remedies == "flags with loss"
        else "from jaxremat.model.loss import chunked_cross_entropy, and call it as docs/levers.md does",
        size if saved is None else saved,
        buffer.source,
    )


def _scores_stored(facts: LintInput) -> Iterator[Finding]:
    """Scores of attention that take much of the bytes at the peak, or much of the step's time."""
    shapes = score_shapes(facts.jaxpr) if facts.memory_map and facts.fused_attention else ()
    if not facts.memory_map or not shapes:
        return
    attention = f"jax.nn.dot_product_attention(q, k, v, is_causal=..., implementation={facts.fused_attention!r})"
    remedy = f"{attention}, which stores none (it has no dropout)"
    scores = [(buffer, size) for buffer, size in at_peak(facts.memory_map) if _is_of_scores(buffer, shapes)]
    num_bytes, every = sum(size for _, size in scores), "its scores, every query by every key"
    if num_bytes >= MUCH * facts.memory.total_bytes:
        peak = f"{gib(num_bytes)} of {gib(facts.memory.total_bytes)} at the peak, such as {_shape_and_line(scores[0][0])}"
        yield Finding("scores-stored", f"attention stores {every}: {peak}", remedy, num_bytes, scores[0][0].source)
        return
    made = [buffer for buffer in facts.memory_map.buffers if _is_of_scores(buffer, shapes)]
    if made and (cost := _cost_of_scores(facts, shapes)):
        largest = max(made, key=lambda buffer: buffer.num_bytes)
        spent = f"{cost}, such as of {_shape_and_line(largest)}"
        yield Finding("scores-stored", f"attention makes {every}, in {spent}", remedy, source=largest.source)


def _cost_of_scores(facts: LintInput, shapes: Iterable[tuple[int, ...]]) -> str:
    """The seconds of the kernels that write or read scores, in words.

    They are the kernels' bytes where the device's speed isn't known. Empty if they aren't much of the step's.
    """
    names = {
        i.name
        for computation, i, _ in executed(facts.module)
        for one in (*i.shapes, *itertools.chain.from_iterable(computation.operand_shapes(i)))
        if any(one.num_elements and one.num_elements % math.prod(of) == 0 and _has_both(one.dims, of) for of in shapes)
    }
    moved = {kernel.name: kernel.num_bytes * kernel.count for kernel in kernels_of(facts.module)}
    costs = times_of(facts.module, facts.speed) if facts.speed else moved
    spent, total = sum(costs.get(name, 0.0) for name in names), sum(costs.values())
    if spent < _MUCH_TIME * total:
        return ""
    if facts.speed:
        return f"kernels that take {1e3 * spent:,.1f} ms of the step's {1e3 * total:,.1f} ms, predicted"
    return f"kernels that read and write {gib(int(spent))} of the step's {gib(int(total))}"


def _is_of_scores(buffer: Buffer, shapes: Iterable[tuple[int, ...]]) -> bool:
    """Whether a buffer has scores of one of these shapes, of a user's own attention."""
    dims = [dim for one in hlo.parse_shapes(buffer.shape) for dim in one.dims]
    fitting = (shape for shape in shapes if num_elements(buffer) == buffer.num_layers * math.prod(shape))
    return any(_has_both(dims, shape) for shape in fitting) and not buffer.source.startswith(_PACKAGE)


def _has_both(dims: Iterable[int], shape: tuple[int, ...]) -> bool:
    """Whether an array has the queries' and the keys' dimension of scores of this shape."""
    return Counter(shape[-2:]) <= Counter(dims)


def _shape_and_line(buffer: Buffer) -> str:
    return f"{buffer.shape} at {line_of(buffer)}"


#: The rules by name, in the order in which they run.
MEMORY_RULES: dict[str, Rule] = {
    "recomputed-together": _recomputed_together,
    "microbatches-together": _microbatches_together,
    "unnamed-residuals": _unnamed_residuals,
    "dropout-masks": _dropout_masks,
    "saved-and-recomputed": _saved_and_recomputed,
    "logits-largest": _logits_largest,
    "scores-stored": _scores_stored,
}
