"""Nothing fits: which buffers take the bytes, and the cheapest changes under which it would fit, compiled; for every command."""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from jaxremat.flags import StepFlags
    from jaxremat.report.progress import Progress
    from jaxremat.trial.record import StepRecord
    from jaxremat.trial.store import Store
    from jaxremat.trial.trial import Run

NUM_LARGEST = 3


def show_misfit(
    job: "Run",
    row: "StepRecord",
    flags: "StepFlags",
    stdout: "Console",
    progress: "Progress",
    out: "Store | None",
) -> None:
    """For the step of `row`, which doesn't fit: its largest buffers with their lines, and flags under which it fits.

    An `ExplainRecord` has told of the buffers already.
    """
    from jaxremat.answer.suggestions import cheapest_suggestions
    from jaxremat.policy.grammar import parse
    from jaxremat.report.printer import print_misfit
    from jaxremat.trial.explain import explain
    from jaxremat.trial.record import TrialRecord
    from jaxremat.trial.trial import PolicyTrials

    policy = parse(row.policy)
    run = replace(job, train=replace(job.train, loss=row.loss, accumulate=row.accumulate), global_batch=None)
    explained = None
    if isinstance(row, TrialRecord):
        progress.show("nothing fits: what takes the bytes")
        explained = explain(PolicyTrials(run, row.requested_policy, policy, keep_dump=True), row.batch, NUM_LARGEST)
    suggestions, least = cheapest_suggestions(
        replace(run, global_batch=job.global_batch),
        policy,
        row.batch,
        on_compile=lambda flags, number: progress.show(f"nothing fits: trying {flags}"),
    )
    print_misfit(stdout, explained, suggestions, least, as_json=flags.json, out=out)
