"""Prints a training run: lines of steps, the time left, and what it promised and showed.

step    80 of 400, loss 2.641, 61,100 tokens/s, 0:21 left
"""

import statistics

from jaxremat.report.policy_text import policies_in_full
from jaxremat.report.printer import Report
from jaxremat.report.progress import Progress
from jaxremat.report.sentences import attached_sentences, no_mfu_sentences, source_sentence, unpriced_sentences
from jaxremat.report.steps import batch_table
from jaxremat.training.metrics import StepMetrics
from jaxremat.trial.record import TrialRecord

#: How many lines of a run stay on the screen.
_LINES = 20
#: The steps whose median time says how long the others will take.
_RECENT = 20


class TrainingPrinter:
    """Takes what a run does, and prints it.

    Args:
        report: where the results go.
        progress: where the line of progress goes.
        num_steps: the number of the last step.
    """

    def __init__(self, report: Report, progress: Progress, num_steps: int) -> None:
        self._report, self._progress, self._num_steps = report, progress, num_steps
        self._recent_s: list[float] = []

    def began(self, step: int, sample: str) -> None:
        """Says where the run begins, and the text that the model writes before its first step.

        Empty prints none.
        """
        if step >= self._num_steps:
            self._report.say(f"Step {step} was reached before; a larger --num-steps goes on.")
        elif step:
            self._report.say(f"Goes on after step {step}.")
        self._say_sample("before", sample)
        self._progress.show("training")

    def step(self, metrics: StepMetrics, loss: float, seconds: float) -> None:
        """Shows a step on the line of progress. Some steps get a line that stays."""
        self._recent_s = [*self._recent_s[1 - _RECENT :], seconds]
        left_s = round((self._num_steps - metrics.step) * statistics.median(self._recent_s))
        counted = "tokens" if metrics.tokens_per_s else "samples"
        rate = f"{metrics.tokens_per_s or metrics.samples_per_s or 0:,.0f} {counted}/s"
        evaluated = "" if metrics.eval_loss is None else f", evaluation loss {metrics.eval_loss:.3f}"
        text = f"step {metrics.step:5d} of {self._num_steps}, loss {loss:.3f}{evaluated}, {rate}, {_clock(left_s)} left"
        every = max(1, self._num_steps // _LINES)
        is_last = metrics.step == self._num_steps
        if evaluated or is_last or metrics.step == 1 or metrics.step % every == 0 or metrics.loss is None:
            self._progress.line(text)
        self._progress.status(text)

    def ended(self, step: int, row: TrialRecord | None, sample: str) -> None:
        """Says what the model writes after `step` steps, and prints the record of the run.

        None prints none.
        """
        self._say_sample(f"after step {step}", sample)
        if row:
            self._report.show(batch_table([row]), *attached_sentences([row]), source_sentence([row], row.target))
            self._report.show(*no_mfu_sentences([row]), *unpriced_sentences([row]))
            self._report.say(*policies_in_full([row]), wrap=False)

    def _say_sample(self, when: str, sample: str) -> None:
        if sample:
            self._report.say(f"{when}: {sample!r}")


def _clock(seconds: int) -> str:
    """Seconds as `0:21`, or `1:02:03` from an hour on."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
