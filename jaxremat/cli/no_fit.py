"""What a command prints if nothing fits: the largest live buffers, and suggestions.

A suggestion is a change of the flags under which the compiled step fits.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxremat.report.printer import Report
    from jaxremat.report.progress import Progress
    from jaxremat.session.session import Session
    from jaxremat.trial.record import StepRecord, SuggestionRecord

NUM_LARGEST = 3


def show_no_fit(
    session: "Session", row: "StepRecord", report: "Report", progress: "Progress"
) -> "Sequence[SuggestionRecord]":
    """Prints the largest live buffers of a step that doesn't fit, and the suggestions.

    Each buffer is printed with its source lines. The suggestions are returned.

    Args:
        session: the session that `row` comes from.
        row: the step. If it is an `ExplainRecord`, its buffers were printed before and aren't printed again.
        report: where the results go.
        progress: shows what is being compiled.
    """
    from jaxremat.answer.suggestions import cheapest_suggestions
    from jaxremat.policy.grammar import parse
    from jaxremat.report.printer import print_no_fit
    from jaxremat.report.sentences import state_sentences
    from jaxremat.step.step import state_and_argument_bytes
    from jaxremat.trial.explain import explain
    from jaxremat.trial.record import TrialRecord

    policy = parse(row.policy)
    trials = session.trials.with_loss(row.loss).with_layout(row.layout)
    trials = replace(trials, train=trials.train_at(row.batch), global_batch=None, xla_preset=row.xla_preset)
    explained = None
    if isinstance(row, TrialRecord):
        progress.show("nothing fits: what takes the bytes")
        explained = explain(replace(trials, with_dump=True), policy, row.batch, NUM_LARGEST, requested=row.requested_policy)
    suggestions, least = cheapest_suggestions(
        replace(trials, global_batch=session.trials.global_batch),
        policy,
        row.batch,
        on_compile=lambda flags, number: progress.show(f"nothing fits: trying {flags}"),
    )
    workload, of_state = trials.workload_at(), list[str]()
    if workload.step is None and workload.mesh is None:
        whole_bytes = state_and_argument_bytes(workload, trials.train)
        of_state = state_sentences(trials.state_bytes(), whole_bytes, trials.budget_bytes)
    print_no_fit(report, explained, suggestions, least, of_state)
    return suggestions
