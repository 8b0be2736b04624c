"""Sentences on steps and searches: what fits, how a run ended, where times come from.

The largest batch that fits under dots is 128: 58.99 GiB of 59.33 GiB; batch 129 needs 59.44 GiB.
"""

import math
from collections.abc import Sequence

from jaxremat.chips.outside import COUNTED_BY, TAKEN_BY
from jaxremat.policy.offload import REMAT, flag_line
from jaxremat.report.policy_text import policy_text
from jaxremat.report.steps import TIED, batch_text, loss_text
from jaxremat.trial.comparisons import RankRecord
from jaxremat.trial.record import FailureRecord, LargestBatchRecord, StepRecord, SuggestionRecord, TrialRecord
from jaxremat.trial.ties import beside_own, trial_ties
from jaxremat.units import gib
from jaxremat.workload.given import OWN_LOSS
from jaxremat.xla.step_facts import MORE_THAN_ITS_SHARE

#: Why two steps count as equally fast, from how far their predicted times may be off beside each other, as a share.
APART = "predicted times that differ by less than {:.0%} don't tell two steps apart"
#: Results without an argument's memory are much of a step from this share of its bytes on.
_MUCH = 0.01
#: The share of the budget up to which the state leaves room for a step.
_OF_STATE = 0.75


def largest_sentence(found: LargestBatchRecord) -> str:
    """The largest batch that a search found. If its step was run, how the run ended."""
    if found.compiled_largest_batch is not None:
        return _largest_run_sentence(found)
    both, following = "Both were run, each in a fresh process", found.next_batch
    over = gib((found.next_batch_total_bytes or 0) - found.budget_bytes)
    runs = {
        None: "It ran in a fresh process.",
        "oom": f"{both}: {found.largest_batch} ran, {following} ran out of memory.",
        "ok": f"{both}, and {following} ran too: for it the compiled bytes were pessimistic, by at least {over}.",
    }
    said = [_compiled_sentence(found)]
    if found.ran == "oom":
        said.append(f"Batch {found.largest_batch} ran out of memory when run, and a smaller one failed for another reason.")
    elif found.ran == "ok":
        ended = f"{found.largest_batch} ran in a fresh process; {following} ended otherwise there: {found.next_ran}."
        said.append(runs.get(found.next_ran, ended))
    return " ".join(said)


def _largest_run_sentence(found: LargestBatchRecord) -> str:
    """The largest batch that ran, where one that fits by its compiled bytes ran out of memory."""
    promised, budget, policy = found.compiled_largest_batch, gib(found.budget_bytes), policy_text(found)
    if not found.largest_batch:
        return f"By compiled bytes batch {promised} fits under {policy} in {budget}, but none ran: each ran out of memory."
    return (
        f"The largest batch that ran under {policy} is {found.largest_batch}: "
        f"{gib(found.largest_batch_total_bytes or 0)} of {budget}; batch {found.next_batch} ran out of memory. By compiled "
        f"bytes {promised} fits: they were optimistic."
    )


def _compiled_sentence(found: LargestBatchRecord) -> str:
    """The largest batch by compiled bytes, and what the next one needs or why none was tried."""

    def sized(batch: int) -> str:
        return str(batch) if found.global_batch is None else f"{batch} ({found.global_batch // batch} x {batch})"

    what, policy = "batch" if found.global_batch is None else "microbatch", policy_text(found)
    needs, budget = gib(found.next_batch_total_bytes or 0), gib(found.budget_bytes)
    if found.largest_batch == 0:
        return f"Not even {what} {sized(found.next_batch or 1)} fits under {policy}: it needs {needs} of {budget}."
    if found.next_batch is not None:
        end = f"{what} {sized(found.next_batch)} needs {needs}"
    elif found.largest_batch == found.global_batch:
        end = "that is the whole global batch"
    else:
        why = (
            f"(--max-batch {found.max_batch})"
            if found.max_batch
            else "as XLA's arrays or the workload's own would be too large"
        )
        end = f"larger ones weren't tried {why}"
    total = gib(found.largest_batch_total_bytes or 0)
    return f"The largest {what} that fits under {policy} is {sized(found.largest_batch)}: {total} of {budget}; {end}."


def batch_sentence(row: StepRecord) -> str:
    """Whether one batch that was requested fits."""
    if row.total_bytes is None:
        return f"Batch {batch_text(row)} under {policy_text(row)} failed: {row.error}"
    verb, failed = "fits" if row.fits else "does not fit", f" It failed when run: {row.error}" if row.error else ""
    size = f"{gib(row.total_bytes)} of {gib(row.budget_bytes)}"
    return f"Batch {batch_text(row)} {verb} under {policy_text(row)}: {size}.{_outputs(row)}{failed}"


def _outputs(row: StepRecord) -> str:
    """What a step that fits takes for results that have no argument's memory, if that is much."""
    outputs = (row.output_bytes or 0) - (row.alias_bytes or 0) if isinstance(row, TrialRecord) and row.fits else 0
    return (
        f" Results without an argument's memory take {gib(outputs)} of it."
        if outputs > _MUCH * (row.total_bytes or 0)
        else ""
    )


def failure_sentence(failure: FailureRecord, said: dict[str, str]) -> str:
    """How a trial failed for which no bytes are known.

    `said` has, by reason that was said before, the policy that it was said of. This one is added.
    """
    what = f"batch {failure.batch}" if failure.batch else "the search for the largest batch"
    before = said.get(failure.error)
    said.setdefault(failure.error, failure.requested_policy)
    why = failure.error if before is None else f"for the same reason as {before}"
    return f"{failure.requested_policy}, {what}: {failure.outcome}, {why}"


def why_not(row: TrialRecord) -> str:
    """The terms that add up to the total bytes of a step that doesn't fit, where XLA says them.

    For example `1.39 GiB parameters, optimizer state and batch + 79.00 GiB temporaries = 80.39 GiB.`
    """
    if row.argument_bytes is None:
        return "XLA says the total alone of a step that it rejects."
    state, outputs = row.argument_bytes, (row.output_bytes or 0) - (row.alias_bytes or 0)
    terms = f"{gib(state)} parameters, optimizer state and batch + {gib(row.temp_bytes or 0)} temporaries"
    terms += f" + {gib(outputs)} outputs" if outputs >= 2**20 else ""
    alone = " The state alone is over the budget, whatever the policy." if state > row.budget_bytes else ""
    return f"{terms} = {gib(row.total_bytes or 0)}.{alone}"


def plan_so_far_sentence(best: TrialRecord) -> str:
    """The best step that was compiled for a plan whose search was ended."""
    return (
        "The search for a plan was ended early. The best step so far is "
        f"batch {best.batch} under {best.policy}{loss_text(best)}: {gib(best.total_bytes or 0)} of {gib(best.budget_bytes)}. "
        "It was compiled and fits. It isn't proven that it is the best."
    )


def batch_so_far_sentence(rows: Sequence[TrialRecord]) -> str:
    """The largest of the batches that were compiled, and that fit, where the search was ended."""
    largest = max((row.batch for row in rows if row.fits), default=None)
    found = "No batch that fits was found so far" if largest is None else f"The largest one so far that fits is {largest}"
    search = f"The search for the largest batch under {policy_text(rows[0])}"
    return f"{search} was ended early. {found}. It isn't proven that no larger one fits."


def no_suggestion_sentence(least: SuggestionRecord | None) -> str:
    """The sentence for a step without a suggestion.

    Args:
        least: of all changes that were compiled, the one of the fewest bytes. None if there was none to try.
    """
    if least is None:
        return "No change that is known here would help: a larger --target or --budget."
    short = gib(least.total_bytes - least.budget_bytes)
    more = "" if least.loss == OWN_LOSS else ", a shorter --seq-len, or --param-dtype bfloat16"
    return (
        f"No change that was tried is enough: {least.flags} takes the least, {gib(least.total_bytes)}, {short} too much. "
        f"A larger --target or --budget{more}."
    )


def state_sentences(state_bytes: int, whole_bytes: int, budget_bytes: int) -> list[str]:
    """How many devices hold a state that alone is over the budget. Empty where it isn't.

    Args:
        state_bytes: bytes of the parameters and the optimizer state on a device.
        whole_bytes: those of all devices together, each part once.
        budget_bytes: what a step may take on a device.
    """
    if state_bytes <= budget_bytes:
        return []
    devices = 2 ** max(1, math.ceil(math.log2(whole_bytes / (_OF_STATE * budget_bytes))))
    return [
        f"The parameters and the optimizer state alone take {gib(state_bytes)}, and the budget is {gib(budget_bytes)}. "
        f"--mesh auto --devices {devices} divides them."
    ]


def lint_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """The lint's findings in a policy's steps, a sentence each.

    Of a rule those of the last step that it finds fault with.
    """
    last = {finding.rule: row for row in rows for finding in row.findings or []}
    found = [one for rule, row in last.items() for one in row.findings or [] if one.rule == rule]
    return [f"Lint, {one.rule}: {one.evidence}. Remedy: {one.remedy}" for one in found]


def attached_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """What the columns of an attached GPU's table mean.

    They say how large the memory outside the allocator's pool was, too.
    """
    run = [row for row in rows if row.ran]
    peak = "Total is compiled; peak is the high-water mark of the device's allocator, each batch in a fresh process."
    said = [peak] if any(row.measured_peak_bytes for row in run) else []
    if sizes := sorted(row.outside_bytes for row in run if row.outside_bytes is not None):
        between = " to ".join(dict.fromkeys(map(gib, (sizes[0], sizes[-1]))))
        is_own = all(row.outside_source == "process" for row in run if row.outside_bytes is not None)
        of_card = f"the rise of the whole card's use, as {COUNTED_BY} doesn't tell the process's own"
        how = f"{COUNTED_BY}'s count of the process" if is_own else of_card
        said.append(f"Outside the allocator's pool ({TAKEN_BY}): {between}, by {how}.")
    return said


def rank_sentence(found: RankRecord) -> str:
    """How well the predicted step times rank the policies, compared with the measured ones."""
    at = f"at batch {found.batch}" if found.batch is not None else "each at its own batch, per sequence"
    compared = f"Predicted against measured step times of {len(found.policies)} policies"
    return f"{compared}, {at}: Spearman's rank correlation {found.spearman:+.2f}."


def job_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """What to set for a step whose bytes XLA's own rematerialization may change in a job.

    Empty without such a step.
    """
    fitting = [row for row in rows if row.fits and row.xla_remat_above_bytes]
    changed = [row for row in fitting if (row.total_bytes or 0) > (row.xla_remat_above_bytes or 0)]
    if not changed:
        return []
    least = min(changed, key=lambda row: row.batch)
    line = flag_line(*filter(None, (least.disabled_pass, REMAT)))
    return [
        f"In a job XLA's own rematerialization may change a step above {gib(least.xla_remat_above_bytes or 0)}, such as batch "
        f"{least.batch} under {policy_text(least)}. {line} gives a job the bytes shown. --xla-remat shows the bytes of a job "
        "without that flag."
    ]


def tied_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """What the mark of equally fast steps means in a table of these rows.

    Empty where no row has it.
    """
    tied = trial_ties(rows)
    if any(row.step_source == "measured" for row in tied):
        return [f"{TIED} As fast as the fastest: the times of single steps overlap."]
    return [tied_sentence(tied[0].paired_error or 0.0)] if tied else []


def tied_sentence(error: float) -> str:
    """What the mark of equally fast steps means where all times are predicted.

    `error` is how far they may be off beside each other, as a share.
    """
    return f"{TIED} As fast as the fastest: {APART.format(error)}."


def own_sentences(rows: Sequence[StepRecord]) -> list[str]:
    """How much better the best policy is than the author's own checkpoints, in one sentence.

    Empty where `own` wasn't requested or nothing is to be compared with it.
    """
    found = beside_own(rows)
    if found is None:
        return []
    own, best, share = found.own, found.best, found.faster
    saved = (own.total_bytes or 0) - (best.total_bytes or 0)
    more = f"{gib(abs(saved))} {'less' if saved > 0 else 'more'} than"
    size = "as many bytes as" if gib(abs(saved)) == gib(0) else more
    name = f"{policy_text(best)} at batch {batch_text(best)}" if best.batch != own.batch else policy_text(best)
    beside = f"own, the program as written, at batch {batch_text(own)}"
    if not own.fits:
        return [f"{name} fits. It takes {size} {beside}, which doesn't."]
    if share is None:
        return [f"{name} takes {size} {beside}."]
    speed = "as fast as" if found.is_tied else f"{abs(share):.1%} {'slower' if share < 0 else 'faster'} than"
    return [f"{name} is {speed} {beside}, and takes {size} it."]


def unpriced_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """What the predicted times and the FLOPs of the steps leave out or guess."""
    found = dict.fromkeys(what for row in rows if row.predicted or row.mfu for what in row.unpriced or ())
    return [f"Predicted times, FLOPs and MFU are rough: {'; '.join(found)}."] if found else []


def microbatches_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """What the samples per second of a whole step count.

    Empty where no step is whole, or where the author of each gives its number of microbatches.
    """
    if not any(row.optimizer is None and row.samples_per_s and row.accumulate == 1 for row in rows):
        return []
    return [
        "samples/s counts one batch a step. A step that accumulates the gradients of several has more: "
        "Workload(..., microbatches=4) counts them."
    ]


def no_mfu_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """Why steps whose time is known have no MFU.

    Empty where none lacks it.
    """
    timed = [row for row in rows if row.step_s and not row.error]
    said, reasons = list[str](), {id(row): _why_no_mfu(row) for row in timed if row.mfu is None}
    for why in dict.fromkeys(reasons.values()):
        of_why = [row for row in timed if reasons.get(id(row)) == why]
        under = f" under {', '.join(dict.fromkeys(map(policy_text, of_why)))}" if len(of_why) < len(timed) else ""
        said.append(f"No MFU{under}: {why}.")
    return said


def _why_no_mfu(row: TrialRecord) -> str:
    if row.predicted is None:
        return "the peak of this target isn't known"
    if any(finding.rule == MORE_THAN_ITS_SHARE for finding in row.findings or ()):
        return "the devices compute more than their share, and the FLOPs that the model needs aren't known"
    if row.executed_flops == 0:
        return "the step has no operation whose FLOPs are counted"
    return "the FLOPs that the model needs aren't known"


def source_sentence(rows: Sequence[TrialRecord], target: str) -> str:
    """Where the step times of a table come from.

    They are measured on this machine, predicted for the target, or both.
    """
    sources = {row.step_source for row in rows if row.step_source}
    if any(row.limit_bytes and row.predicted for row in rows):
        sources.add("predicted")  # an attached GPU's table has both times
    if not sources and any(row.total_bytes for row in rows):
        several, one = ", or a link between its devices, isn't known", " isn't known, and no step was run"
        return f"No time: this target's speed{several if any(row.mesh for row in rows) else one}."
    if not sources:
        return "Nothing was compiled, so there is no time."
    alone = ". Nothing was run" if sources == {"predicted"} else ""
    said = {
        "measured": "measured: median over real steps on this machine",
        "predicted": f"predicted: from the compiled kernels, by what such kernels reach of the peaks of {target}{alone}",
    }
    return f"Step times are {'; '.join(text for source, text in said.items() if source in sources)}."
