"""What a command prints if nothing fits: the largest live buffers, and suggestions.

A suggestion is a change of the flags under which the compiled step fits.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from jaxremat.cli.flow import Start

if TYPE_CHECKING:
    from jaxremat.report.printer import Report
    from jaxremat.report.progress import Progress
    from jaxremat.trial.record import StepRecord

NUM_LARGEST = 3


def show_misfit(start: Start, row: "StepRecord", report: "Report", progress: "Progress") -> None:
    """Prints the largest live buffers of a step that doesn't fit, with their source lines, and the suggestions.

    Args:
        start: the run that `row` comes from.
        row: the step. If it is an `ExplainRecord`, its buffers were printed before and aren't printed again.
        report: where the results go.
        progress: shows what is being compiled.
    """
    from jaxremat.answer.suggestions import cheapest_suggestions
    from jaxremat.policy.grammar import parse
    from jaxremat.report.printer import print_misfit
    from jaxremat.trial.explain import explain
    from jaxremat.trial.record import TrialRecord
    from jaxremat.trial.trial import PolicyTrials

    policy = parse(row.policy)
    run = start.run.with_loss(row.loss)
    train = replace(run.train, accumulate=row.accumulate)
    run = replace(run, train=train, global_batch=None, xla_preset=row.xla_preset)
    explained = None
    if isinstance(row, TrialRecord):
        progress.show("nothing fits: what takes the bytes")
        explained = explain(PolicyTrials(run, row.requested_policy, policy, keep_dump=True), row.batch, NUM_LARGEST)
    suggestions, least = cheapest_suggestions(
        replace(run, global_batch=start.run.global_batch),
        policy,
        row.batch,
        on_compile=lambda flags, number: progress.show(f"nothing fits: trying {flags}"),
    )
    print_misfit(report, explained, suggestions, least)
