"""Who holds the memory: `python -m jaxremat.explain --policy dots --batch 32`.

Compiles the training step, reads from XLA where every buffer lies and how long it lives, and says who holds the bytes at the
peak, in numbers that add up to XLA's total; for a GPU that needn't be in this machine.

Exit codes: 0; 1 something failed; 2 usage; 3 nothing that was asked for fits; 130 interrupted (finished rows are kept).
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxremat.errors import UsageError
from jaxremat.flags import Auto, Request, StepFlags, check_step
from jaxremat.run import command, planned_job, prepare, resolve_names
from jaxremat.search.planfile import PlanFile

if TYPE_CHECKING:
    from jaxremat.trial.trial import PolicyTrials

DEFAULT_BATCH = 32


@dataclass(frozen=True)
class ExplainFlags(StepFlags):
    """Who holds the memory.

    Compiles the training step under each policy at each batch (32 by default), and says who holds the bytes at its peak, in
    numbers that add up to XLA's total: on an attached NVIDIA GPU, or for a GPU that isn't in this machine.
    """

    top: int = 10
    """How many of the largest buffers to list."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """Draw the sources as stacked bars over policies and batches (pip install "jaxremat[plot]")."""
    xprof: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write what XProf's memory viewer opens: xprof --logdir DIR."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return command(ExplainFlags, argv, "jaxremat.explain", check_explain, explain)


def check_explain(flags: ExplainFlags) -> Request[ExplainFlags]:
    """The request behind `flags`.

    Raises:
        UsageError: a value that cannot be meant.
    """
    if flags.top < 0:
        raise UsageError(f"--top got {flags.top}", allowed="0 or more", next_step="leave it out for the default")
    request = check_step(flags)
    if any(isinstance(policy, Auto) for _, policy in request.policies):
        raise UsageError(
            "--policy auto is planned by jaxremat.run, and explain takes policies",
            next_step="python -m jaxremat.run --policy auto --save-plan plan.json, then explain --policy plan:plan.json",
        )
    return request


def explain(request: Request[ExplainFlags]) -> int:
    """Each policy's memory at each batch, printed as it comes; returns the exit code."""
    from rich.console import Console

    from jaxremat.report.plot import check_plot, plot_sources
    from jaxremat.report.printer import ExplainPrinter
    from jaxremat.report.progress import Progress
    from jaxremat.trial.explain import explain as explained
    from jaxremat.trial.record import check_writable
    from jaxremat.trial.trial import PolicyTrials
    from jaxremat.xla.target import load_target
    from jaxremat.xla.xprof import check_folder

    flags = request.flags
    if flags.plot:
        check_plot()
    for flag, path in {"--out": flags.out, "--plot": flags.plot}.items():
        if path:
            check_writable(flag, path)
    if flags.xprof:
        check_folder(flags.xprof)
    with Progress(Console(stderr=True)) as progress:
        progress.show("starting JAX")
        job, notes = prepare(request, load_target(flags.target))
        policies = resolve_names(request, job)
        printer = ExplainPrinter(Console(file=sys.stdout), as_json=flags.json, out=flags.out)
        printer.heading(notes)
        try:
            for requested, policy in policies:
                of_policy, default = job, DEFAULT_BATCH
                if isinstance(policy, PlanFile):
                    of_policy, default, policy = planned_job(job, policy, request), policy.batch, policy.policy
                assert not isinstance(policy, Auto)  # refused before JAX was started
                for batch in request.batches or (default,):
                    progress.show(f"{policy}, batch {batch}")
                    trials = PolicyTrials(of_policy, requested, policy, keep_dump=True)
                    printer.row(explained(trials, batch, flags.top))
                    if flags.xprof:
                        export(trials, batch, flags.xprof)
        finally:
            printer.all_done()  # also when interrupted: the finished rows are shown
    if flags.plot:
        plot_sources(printer.rows, flags.plot)
    return printer.exit_code()


def export(trials: "PolicyTrials", batch: int, folder: Path) -> None:
    """Writes the compiled step for XProf, and says so; nothing where it didn't compile."""
    from jaxremat.errors import CompileError
    from jaxremat.xla.xprof import write_xprof

    with contextlib.suppress(CompileError):
        dump = trials.compile(batch).dump
        assert dump is not None  # the trials keep it
        path = write_xprof(folder, f"{trials.policy}_batch_{batch}", dump)
        print(f"wrote {path}; open it with: xprof --logdir {folder}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
