"""The sentence under a policy's table: what the compiled step saves for the backward pass, and what it recomputes.

Saved: mlpwi_0 and context (1.83 GiB), 12 layer inputs (0.562 GiB). Recomputed: 48 of 73 matmuls (9.1% more FLOPs).
"""

from collections.abc import Sequence

from jaxremat.report.policy_text import policy_text
from jaxremat.trial.record import TrialRecord
from jaxremat.units import gib
from jaxremat.xla.step_facts import Recomputed, SavedAndRecomputed, SavedValues

#: The most names in a sentence.
_MAX_NAMES = 4
#: What the sentence calls values of a kind, and operations that are recomputed. The plural has an s.
_VALUES = {
    "matmul": "matmul result",
    "convolution": "convolution result",
    "attention": "attention result",
    "elementwise": "elementwise value",
    "input": "layer input",
    "loss": "loss input",
    "other": "other input",
}
_OPERATIONS = {"attention": "attention kernel", "kernel": "other kernel"}


def kept_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """What each policy of the rows saves and recomputes, in the last row of the policy."""
    last = {row.policy: row for row in rows if row.kept}
    names = [f"{policy_text(row)} at batch {row.batch}: " * (len(last) > 1) for row in last.values()]
    return [name + _sentence(row, row.kept) for name, row in zip(names, last.values(), strict=True) if row.kept]


def _sentence(row: TrialRecord, kept: SavedAndRecomputed) -> str:
    found = {finding.rule for finding in row.findings or ()}
    said = [_saved(kept, sized="more-than-its-share" not in found), _recomputed(row, kept)]
    if kept.gathered_forward_bytes or kept.gathered_backward_bytes:
        forward, backward = kept.gathered_forward_bytes or 0, kept.gathered_backward_bytes or 0
        said.append(f"Parameters gathered: {gib(forward)} in the forward pass, {gib(backward)} in the backward pass.")
    if kept.unread_names:
        said.append(f"Named, but not needed by the backward pass: {_listed(kept.unread_names)}.")
    if kept.unmatched_names and "unmatched-name" not in found:
        said.append(f"Named, but carried by no value: {_listed(kept.unmatched_names)}.")
    return " ".join(said)


def _saved(kept: SavedAndRecomputed, *, sized: bool) -> str:
    """What is saved. It isn't `sized` where each device computes more than its share: it then saves more than its share, too."""
    if not kept.num_checkpoints and not kept.saved:
        return "Saved: all that differentiation asks for."
    parts: list[str] = []
    for on_host in (False, True):
        of_place = [some for some in kept.saved if some.on_host == on_host]
        named = [some for some in of_place if some.kind == "name"]
        where = " in the host's memory" * on_host
        if named:
            size = f" ({gib(sum(some.num_bytes for some in named))})" * sized
            parts.append(f"{_listed([some.name for some in named])}{where}{size}")
        parts += [_values(some, sized=sized) + where for some in of_place if some.kind != "name"]
    return f"Saved: {', '.join(parts) or 'nothing'}."


def _values(some: SavedValues, *, sized: bool) -> str:
    return _counted(some.num_values, _VALUES[some.kind]) + f" ({gib(some.num_bytes)})" * sized


def _recomputed(row: TrialRecord, kept: SavedAndRecomputed) -> str:
    parts = [_how_often(some) for some in kept.again if some.num_again] or [
        f"no {_operation_word(some)}" for some in kept.again
    ]
    if not parts:
        return "No matmul is in this step."
    percent = _percent_more(row, kept)
    share = f" ({percent:.1f}% more FLOPs)" if percent else ""
    merged = [f"{_counted(n, _operation_word(some))}" for some in kept.again if (n := some.num_asked - some.num_again) > 0]
    said = f" XLA merged the recompute of {_listed(merged)} with equal ones, and saves the results." if merged else ""
    return f"Recomputed: {_listed(parts)}{share}.{said}"


def _percent_more(row: TrialRecord, kept: SavedAndRecomputed) -> float:
    """Recomputed FLOPs, in % of what the step executes without them: the table's own number, if it has one."""
    more = sum(some.flops_again for some in kept.again)
    if row.recompute_overhead_percent is not None:
        return row.recompute_overhead_percent if more else 0
    return 100 * more / ((row.executed_flops or 0) - more)


def _how_often(some: Recomputed) -> str:
    if some.num_again > some.num_forward:
        return f"{some.num_again} runs of {_counted(some.num_forward, _operation_word(some))}"
    return f"{some.num_again} of {_counted(some.num_forward, _operation_word(some))}"


def _operation_word(some: Recomputed) -> str:
    return _OPERATIONS.get(some.operation, some.operation)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def _listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; of more than four words the first three, as in `a, b, c and 4 more`."""
    few = [*words[: _MAX_NAMES - 1], f"{len(words) - _MAX_NAMES + 1} more"] if len(words) > _MAX_NAMES else list(words)
    return " and ".join([*([", ".join(few[:-1])] if few[1:] else []), *few[-1:]])
