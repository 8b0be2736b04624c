"""The command `jaxremat explain`: which live buffers take the memory at the peak.

    python -m jaxremat explain --policy dots --batch 32

It compiles the training step, and reads from XLA where every buffer lies and how long it is live. Then it prints the bytes
at the peak by category. The numbers add up to XLA's total. The GPU needn't be in this machine.

Exit codes: 0, 1 something failed, 2 usage, 3 nothing that was requested fits, 130 interrupted (finished rows are in --out).
"""

import contextlib
import functools
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from jaxremat.cli.command import step_command
from jaxremat.cli.no_fit import show_no_fit
from jaxremat.cli.output import reporting, show_heading
from jaxremat.errors import UsageError
from jaxremat.policy.spec import Policy
from jaxremat.session.flags import StepFlags
from jaxremat.session.request import Auto, Request, check_step
from jaxremat.session.session import Session, note
from jaxremat.system.ahead import with_next_begun
from jaxremat.system.files import check_outputs
from jaxremat.system.interrupt import says_at_the_end
from jaxremat.xla.results import ignore_older_results

if TYPE_CHECKING:
    from jaxremat.report.page import PageInput
    from jaxremat.trial.record import ExplainRecord, SuggestionRecord
    from jaxremat.trial.trials import Trials

DEFAULT_BATCH = 32


@dataclass(frozen=True)
class ExplainFlags(StepFlags):
    """Who holds the memory.

    Compiles the training step under each policy at each batch (by default 32, or the batch of a workload of your own), and says
    who holds the bytes at its peak, in numbers that add up to XLA's total: on an attached GPU, or for a GPU that isn't
    in this machine.
    """

    top: int = 10
    """How many of the largest buffers to list."""
    lint: bool = False
    """Look for what is likely not meant: recompute or saves in vain, undonated memory, whole logits; with the remedy."""
    plot: Annotated[Path | None, Parameter(metavar="FILE.png")] = None
    """Draw the sources as stacked bars over policies and batches (pip install "jaxremat[plot]")."""
    xprof: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """Write what XProf's memory viewer opens: xprof --logdir DIR."""
    page: Annotated[Path | None, Parameter(metavar="FILE.html")] = None
    """Draw the memory over the program and over time as one offline page, with what --lint finds, to explore in a browser."""
    redact: bool = False
    """Leave source lines and absolute paths out of the page."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return step_command(ExplainFlags, argv, "explain", check_explain, show_memory)


def check_explain(flags: ExplainFlags) -> Request[ExplainFlags]:
    """The request that the flags of `jaxremat explain` make.

    A preset has batch 32 if no batch was given.

    Raises:
        UsageError: a value isn't valid.
    """
    if flags.top < 0:
        raise UsageError(f"--top got {flags.top}", allowed="0 or more", next_step="leave it out for the default")
    if flags.redact and not flags.page:
        raise UsageError("--redact is about --page, which wasn't given", next_step="add --page report.html")
    request = check_step(flags, one_mesh="explain takes one mesh")
    if any(isinstance(requested.policy, Auto) for requested in request.policies):
        raise UsageError(
            "--policy auto is planned by jaxremat run, and explain takes policies",
            next_step="jaxremat run --policy auto --save-plan plan.json, then jaxremat explain --policy plan:plan.json",
        )
    if request.batches or request.model.has_own_batch:
        return request
    return replace(request, batches=(DEFAULT_BATCH,))


def show_memory(request: Request[ExplainFlags]) -> int:
    """Prints the memory of each policy at each batch, and returns the exit code.

    Each is printed as soon as its step is compiled.
    """
    from jaxremat.chips.target import load_target
    from jaxremat.report.page import write_page
    from jaxremat.report.plot import check_plot, plot_sources
    from jaxremat.report.printer import ExplainPrinter
    from jaxremat.session.answers import batches_of, failure_of, policies_in_turn, policy_in_short, policy_of, trials_of
    from jaxremat.session.page import page_input
    from jaxremat.trial.explain import explain

    flags = request.flags
    if flags.fresh:
        ignore_older_results()
    if flags.plot:
        check_plot()
    check_outputs(flags)
    with reporting(flags) as (report, progress):
        session = Session.opened(request, load_target(flags.target, request.mesh))
        show_heading(session, report)
        printer = ExplainPrinter(report)
        lint = flags.lint or flags.page is not None
        shown, command = list["tuple[ExplainRecord, PageInput]"](), ("jaxremat", "explain", *sys.argv[1:])

        def show_known() -> None:
            printer.all_done()
            if flags.page:
                show_page(flags.page, with_what_fits(shown), flags.redact)

        with says_at_the_end(show_known):
            for requested in policies_in_turn(session, progress.show, with_dump=True):
                if error := session.missing_layers(requested):
                    printer.failed(failure_of(session, requested, error))
                    continue
                policy, trials = policy_of(requested), replace(trials_of(session, requested, note), with_dump=True)
                batches = batches_of(session, requested) or (trials.workload_at().num_samples or 1,)
                for batch in with_next_begun(batches, functools.partial(trials.begin, policy)):
                    progress.show(f"{policy_in_short(str(policy))}, batch {batch}")
                    row = explain(trials, policy, batch, flags.top, requested=requested.text, lint=lint)
                    printer.row(row)
                    if flags.page and row.total_bytes is not None:
                        shown.append((row, page_input(row, trials, policy, command)))
                    if flags.xprof:
                        export(trials, policy, batch, flags.xprof)
                    trials.forget()  # XLA's dump of a program is large
        if no_fit := printer.no_fit():
            suggestions = show_no_fit(session, no_fit, report, progress)
            if flags.page and suggestions:
                pages = [replace(page, fits_instead=suggestions) if row is no_fit else page for row, page in shown]
                write_page(flags.page, pages, redact=flags.redact)
    if flags.plot:
        plot_sources(printer.rows, flags.plot)
    return printer.exit_code()


def with_what_fits(shown: "Sequence[tuple[ExplainRecord, PageInput]]") -> "list[PageInput]":
    """The pages of steps.

    Those of steps that don't fit say which of the others do, of the same batch if any.
    """
    fitting = [(row, page) for row, page in shown if row.fits and not row.error]
    pages = list["PageInput"]()
    for row, page in shown:
        others = [] if row.fits else [(other, its) for other, its in fitting if other.batch == row.batch] or fitting
        pages.append(replace(page, fits_instead=[in_place_of(row, other, sum(its.seconds)) for other, its in others]))
    return pages


def in_place_of(row: "ExplainRecord", other: "ExplainRecord", step_s: float) -> "SuggestionRecord":
    """Another step of the command, which fits, as a suggestion in place of `row`.

    It has the flags that differ, to paste.
    """
    from jaxremat.trial.record import SuggestionRecord, picked

    flags = {"--policy": "requested_policy", "--batch": "batch", "--xla-preset": "xla_preset"}
    changed = [
        (flag, str(getattr(other, name))) for flag, name in flags.items() if getattr(other, name) != getattr(row, name)
    ]
    names = "model target policy loss optimizer batch accumulate total_bytes budget_bytes num_compiles versions"
    return SuggestionRecord(
        **picked(other, names),
        flags=shlex.join(word for pair in changed for word in pair),
        step_s=step_s or None,
        step_source="predicted" if step_s else None,
        tokens_per_s=None,
    )


def show_page(path: Path, pages: "Sequence[PageInput]", redact: bool) -> None:
    """Writes the page, and prints its path and size.

    If no step was compiled, it writes nothing, and prints that nothing was compiled.
    """
    from jaxremat.report.page import write_page

    if not pages:
        return note(f"nothing was compiled, so {path} shows nothing")
    num_bytes = write_page(path, pages, redact=redact)
    note(f"wrote {path}, {num_bytes / 1000:,.0f} kB; open it in a browser")


def export(trials: "Trials", policy: Policy, batch: int, folder: Path) -> None:
    """Writes the compiled step for XProf, and prints the path.

    If the step didn't compile, it does nothing.
    """
    from jaxremat.errors import CompileError
    from jaxremat.xla.options import with_preset
    from jaxremat.xla.xprof import write_xprof

    with contextlib.suppress(CompileError):
        dump = trials.compile(policy, batch).dump
        assert dump is not None  # the trials have with_dump
        name = with_preset(str(policy), trials.xla_preset).replace(" ", "_")
        path = write_xprof(folder, f"{name}_batch_{batch}", dump)
        note(f"wrote {path}; open it with: xprof --logdir {folder}")
