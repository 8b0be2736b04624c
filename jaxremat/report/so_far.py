"""What is known of a search that a signal or an error ended before its answer, in a sentence that says so."""

from collections.abc import Sequence

from jaxremat.report.policy_text import policy_text
from jaxremat.trial.record import TrialRecord
from jaxremat.units import gib
from jaxremat.workload.given import OWN_LOSS


def plan_so_far_sentence(best: TrialRecord) -> str:
    """The best of the steps that were compiled for a plan, and that fit."""
    loss = "" if best.loss == OWN_LOSS else f", {best.loss} loss"
    return (
        f"The search for a plan was ended early. The best step so far is batch {best.batch} under {best.policy}{loss}: "
        f"{gib(best.total_bytes or 0)} of {gib(best.budget_bytes)}. It was compiled and fits. "
        "It isn't proven that it is the best."
    )


def batch_so_far_sentence(rows: Sequence[TrialRecord]) -> str:
    """The largest of the batches that were compiled, and that fit."""
    largest = max((row.batch for row in rows if row.fits), default=None)
    found = "No batch that fits was found so far" if largest is None else f"The largest one so far that fits is {largest}"
    policy = policy_text(rows[0])
    return (
        f"The search for the largest batch under {policy} was ended early. {found}. It isn't proven that no larger one fits."
    )
