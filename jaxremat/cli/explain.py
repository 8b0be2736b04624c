"""The command `python -m jaxremat explain --policy dots --batch 32`: which live buffers hold the memory at the peak.

It compiles the training step, and reads from XLA where every buffer lies and how long it is live. Then it prints the bytes
at the peak by category. The numbers add up to XLA's total. The GPU needn't be in this machine.

Exit codes: 0, 1 something failed, 2 usage, 3 nothing that was asked for fits, 130 interrupted (finished rows are kept).
"""

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from jaxremat.cli.command import step_command
from jaxremat.cli.flags import StepFlags
from jaxremat.cli.flow import Start, note, reporting, show_heading, start, steps_of, with_options_of
from jaxremat.cli.misfit import show_misfit
from jaxremat.cli.request import Auto, Frontier, Request, check_step
from jaxremat.config import ModelConfig
from jaxremat.errors import UsageError
from jaxremat.files import check_outputs
from jaxremat.interrupt import says_at_the_end
from jaxremat.xla.results import ignore_older_results

if TYPE_CHECKING:
    from jaxremat.report.page import PageInput
    from jaxremat.trial.record import ExplainRecord
    from jaxremat.trial.trial import PolicyTrials

DEFAULT_BATCH = 32


@dataclass(frozen=True)
class ExplainFlags(StepFlags):
    """Who holds the memory.

    Compiles the training step under each policy at each batch (by default 32, or the batch of a workload of your own), and says
    who holds the bytes at its peak, in numbers that add up to XLA's total: on an attached NVIDIA GPU, or for a GPU that isn't
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
    """Draw the memory over the program as one offline page, to explore and to compare the policies in a browser."""
    redact: bool = False
    """Leave source lines and absolute paths out of the page."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return step_command(ExplainFlags, argv, "explain", check_explain, show_memory)


def check_explain(flags: ExplainFlags) -> Request[ExplainFlags]:
    """The request that the flags of `jaxremat explain` ask for, with batch 32 of a preset if no batch was given.

    Raises:
        UsageError: a value isn't valid.
    """
    if flags.top < 0:
        raise UsageError(f"--top got {flags.top}", allowed="0 or more", next_step="leave it out for the default")
    if flags.redact and not flags.page:
        raise UsageError("--redact is about --page, which wasn't given", next_step="add --page report.html")
    request = check_step(flags)
    if request.meshes:
        raise UsageError(
            "--mesh auto compares meshes in jaxremat.run, and explain takes one mesh",
            next_step="--mesh fsdp=8, or another mesh",
        )
    if any(isinstance(asked.policy, Auto) for asked in request.policies):
        raise UsageError(
            "--policy auto is planned by jaxremat.run, and explain takes policies",
            next_step="python -m jaxremat.run --policy auto --save-plan plan.json, then explain --policy plan:plan.json",
        )
    if request.batches or not isinstance(request.model, ModelConfig):
        return request  # a workload of the user's own says itself which batch it is written for
    return replace(request, batches=(DEFAULT_BATCH,))


def show_memory(request: Request[ExplainFlags]) -> int:
    """Prints the memory of each policy at each batch as soon as the step is compiled, and returns the exit code."""
    from jaxremat.report.plot import check_plot, plot_sources
    from jaxremat.report.printer import ExplainPrinter
    from jaxremat.trial.explain import explain
    from jaxremat.xla.target import load_target

    flags = request.flags
    if flags.fresh:
        ignore_older_results()
    if flags.plot:
        check_plot()
    check_outputs(flags)
    with reporting(flags) as (report, progress):
        started = start(request, load_target(flags.target, request.mesh))
        show_heading(started, report)
        printer = ExplainPrinter(report)
        pages = []

        def show_known() -> None:
            printer.all_done()
            if flags.page:
                show_page(flags.page, pages, flags.redact)

        with says_at_the_end(show_known):
            for trials, batch in trials_by_batch(started):
                progress.show(f"{trials.policy}, batch {batch}")
                row = explain(trials, batch, flags.top, lint=flags.lint)
                printer.row(row)
                if flags.page and row.total_bytes is not None:
                    pages.append(page_input(row, trials))
                if flags.xprof:
                    export(trials, batch, flags.xprof)
        if misfit := printer.misfit():
            show_misfit(started, misfit, report, progress)
    if flags.plot:
        plot_sources(printer.rows, flags.plot)
    return printer.exit_code()


def trials_by_batch(started: Start) -> "Iterator[tuple[PolicyTrials, int]]":
    """Each policy with each of its batches.

    The trials keep XLA's dump of the program, which is large. So each batch has trials of its own, freed before the next.
    """
    from jaxremat.trial.trial import PolicyTrials

    for asked in started.request.policies:
        assert not isinstance(asked.policy, Auto | Frontier)  # check_explain refuses them
        steps = steps_of(with_options_of(started, asked), asked.policy, note)
        for batch in steps.batches or (steps.run.workload_at().num_samples or 1,):
            yield PolicyTrials(steps.run, asked.text, steps.policy, keep_dump=True), batch


def page_input(row: "ExplainRecord", trials: "PolicyTrials") -> "PageInput":
    """The step of `row` as `write_page` takes it."""
    from jaxremat.answer.savings import savings
    from jaxremat.answer.workload_estimate import estimate_workload
    from jaxremat.planner.shared_budget import one_of_each
    from jaxremat.report.page import PageInput
    from jaxremat.xla.options import with_preset

    memory, run = trials.compile(row.batch).memory_map, trials.run
    speed, has_layers = run.target.speed, run.factory.num_layers() > 0
    return PageInput(
        title=row.model,
        policy=with_preset(row.policy, row.xla_preset),
        batch=row.batch,
        target=f"{row.target}: {run.target.description}" + (f", one of {row.num_devices} in {row.mesh}" if row.mesh else ""),
        memory=memory,
        budget_bytes=row.budget_bytes,
        versions={name: version for name, version in row.versions.items() if version},
        command=shlex.join(["jaxremat", "explain", *sys.argv[1:]]),
        savings=savings(one_of_each(estimate_workload(run, speed, row.batch)).problem, memory)
        if speed and has_layers
        else None,
    )


def show_page(path: Path, pages: "Sequence[PageInput]", redact: bool) -> None:
    """Writes the page and prints its path and size. If no step was compiled, it only prints that there is nothing."""
    from jaxremat.report.page import write_page

    if not pages:
        return note(f"nothing was compiled, so {path} shows nothing")
    num_bytes = write_page(path, pages, redact=redact)
    note(f"wrote {path}, {num_bytes / 1000:,.0f} kB; open it in a browser")


def export(trials: "PolicyTrials", batch: int, folder: Path) -> None:
    """Writes the compiled step for XProf and prints the path. If the step didn't compile, it does nothing."""
    from jaxremat.errors import CompileError
    from jaxremat.xla.options import with_preset
    from jaxremat.xla.xprof import write_xprof

    with contextlib.suppress(CompileError):
        dump = trials.compile(batch).dump
        assert dump is not None  # the trials have keep_dump
        policy = with_preset(str(trials.policy), trials.run.xla_preset).replace(" ", "_")
        path = write_xprof(folder, f"{policy}_batch_{batch}", dump)
        note(f"wrote {path}; open it with: xprof --logdir {folder}")
