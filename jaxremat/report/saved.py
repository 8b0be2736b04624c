"""Sentences on what a compiled step saves for the backward pass, and what it recomputes.

Saved: mlpwi_0 and context (1.83 GiB), 12 layer inputs (0.562 GiB). Recomputed: 48 of 73 matmuls (9.1% more FLOPs).
"""

from collections.abc import Sequence

from jaxremat.report.policy_text import policy_text
from jaxremat.report.table import counted
from jaxremat.trial.record import TrialRecord
from jaxremat.units import gib
from jaxremat.xla.step_facts import SavedAndRecomputed

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


def saved_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """What each policy of the rows saves and recomputes, in the last row of the policy."""
    last = {row.policy: (row, row.kept) for row in rows if row.kept}
    names = [f"{policy_text(row)} at batch {row.batch}: " * (len(last) > 1) for row, _ in last.values()]
    return [name + _sentence(row, step) for name, (row, step) in zip(names, last.values(), strict=True)]


def _sentence(row: TrialRecord, step: SavedAndRecomputed) -> str:
    rules = {finding.rule for finding in row.findings or ()}
    said = [_saved(step, sized="more-than-its-share" not in rules), _recomputed(row, step)]
    if step.gathered_forward_bytes or step.gathered_backward_bytes:
        forward, backward = gib(step.gathered_forward_bytes or 0), gib(step.gathered_backward_bytes or 0)
        said.append(f"Parameters gathered: {forward} in the forward pass, {backward} in the backward pass.")
    if step.unread_names:
        said.append(f"Named, but not needed by the backward pass: {_in_words(step.unread_names)}.")
    if step.unmatched_names and "unmatched-name" not in rules:
        said.append(f"Named, but carried by no value: {_in_words(step.unmatched_names)}.")
    return " ".join(said)


def _saved(step: SavedAndRecomputed, *, sized: bool) -> str:
    """What is saved.

    It isn't `sized` where each device computes more than its share: it then saves more than its share, too.
    """
    if not step.num_checkpoints and not step.saved:
        return "Saved: all that differentiation asks for."
    groups: list[tuple[str, int, bool]] = []
    for on_host in (False, True):
        of_place = [some for some in step.saved if some.on_host == on_host]
        if named := [some for some in of_place if some.kind == "name"]:
            groups.append((_in_words([some.name for some in named]), sum(some.num_bytes for some in named), on_host))
        unnamed = [some for some in of_place if some.kind != "name"]
        groups += [(counted(some.num_values, _VALUES[some.kind]), some.num_bytes, on_host) for some in unnamed]
    parts = [text + " in the host's memory" * on_host + f" ({gib(size)})" * sized for text, size, on_host in groups]
    return f"Saved: {', '.join(parts) or 'nothing'}."


def _recomputed(row: TrialRecord, step: SavedAndRecomputed) -> str:
    words = [(some, _OPERATIONS.get(some.operation, some.operation)) for some in step.again]
    if not words:
        return "No matmul is in this step."
    parts = [
        f"{some.num_again} {'runs of' if some.num_again > some.num_forward else 'of'} {counted(some.num_forward, word)}"
        for some, word in words
        if some.num_again
    ]
    merged = [counted(some.num_asked - some.num_again, word) for some, word in words if some.num_asked > some.num_again]
    said = f" XLA merged the recompute of {_in_words(merged)} with equal ones, and saves the results." if merged else ""
    percent = _percent_more(row, step)
    share = f" ({percent:.1f}% more FLOPs)" if percent else ""
    return f"Recomputed: {_in_words(parts or [f'no {word}' for _, word in words])}{share}.{said}"


def _percent_more(row: TrialRecord, step: SavedAndRecomputed) -> float:
    """Recomputed FLOPs, in % of what the step executes without them.

    It is the table's own number, if it has one.
    """
    more = sum(some.flops_again for some in step.again)
    if row.recompute_overhead_percent is not None:
        return row.recompute_overhead_percent if more else 0
    return 100 * more / ((row.executed_flops or 0) - more)


def _in_words(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`.

    Of more than four words the first three, as in `a, b, c and 4 more`.
    """
    few = [*words[: _MAX_NAMES - 1], f"{len(words) - _MAX_NAMES + 1} more"] if len(words) > _MAX_NAMES else list(words)
    return " and ".join(filter(None, [", ".join(few[:-1]), *few[-1:]]))
