"""The plots of `--plot`, as PNG files.

They need matplotlib, which the `plot` extra installs.

`jaxremat.run` draws the frontier: bytes against step time, and tokens per second against the budget.
`jaxremat explain` draws the memory at the peak by source, as stacked bars.
"""

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxremat.errors import MissingDependencyError
from jaxremat.report.policy_text import policy_text
from jaxremat.report.steps import batch_text, frontier_rows, loss_text, rate_title
from jaxremat.report.table import gib_number
from jaxremat.system.files import named_by, write_whole
from jaxremat.trial.record import ExplainRecord, TrialRecord
from jaxremat.xla.buffers import SOURCES

#: One colour for each source, in the order of `SOURCES`. Colour-blind readers can tell them apart too (Okabe and Ito 2008).
_COLOURS = ("#0072B2", "#009E73", "#56B4E9", "#E69F00", "#999999", "#CC79A7", "#D55E00")


def check_plot() -> None:
    """Checks, before anything is computed, that matplotlib is installed.

    Raises:
        MissingDependencyError: matplotlib isn't installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            "--plot needs matplotlib", cause="the plot extra isn't installed", next_step='pip install "jaxremat[plot]"'
        ) from None


def plot_frontier(rows: Sequence[TrialRecord], path: Path) -> None:
    """Draws the rows of a frontier to `path`, a PNG file.

    The left plot has a point for each policy: bytes against step time. The right plot has, for each budget, the tokens per
    second of the fastest policy that fits.

    Raises:
        JaxrematError: the file can't be written.
    """
    from matplotlib.figure import Figure

    rows = frontier_rows(rows)
    source = rows[0].step_source if rows else "predicted"
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    points = [((row.total_bytes or 0) / 2**30, 1e3 * (row.step_s or 0), row) for row in rows]
    for kind, colour, marker in (("named", "tab:grey", "o"), ("planned", "tab:blue", "D")):
        some = [point for point in points if (point[2].requested_policy == "auto") == (kind == "planned")]
        left.scatter([x for x, _, _ in some], [y for _, y, _ in some], color=colour, marker=marker, label=kind, zorder=3)
    for i, (x, y, row) in enumerate(point for point in points if point[2].requested_policy != "auto"):
        at = (4, (4, 14, -12)[i % 3])  # neighbouring points often coincide, and their names must not
        left.annotate(policy_text(row), (x, y), xytext=at, textcoords="offset points", fontsize=8)
    left.set(xlabel="total bytes, GiB", ylabel=f"step, ms ({source})")
    left.margins(x=0.15, y=0.1)
    left.legend()
    fastest = itertools.accumulate((row.rate for row in rows), max)
    right.step([x for x, _, _ in points], [*fastest], where="post", color="tab:blue")
    right.set(xlabel="budget, GiB", ylabel=f"{rate_title(rows)} of the fastest that fits ({source})")
    for row in rows[:1]:
        sequence = "" if row.seq_len is None else f" x {row.seq_len}"
        figure.suptitle(f"{row.model} on {row.target}, batch {row.batch}{sequence}{loss_text(row)}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save_picture(figure, path)


def plot_sources(rows: Sequence[ExplainRecord], path: Path) -> None:
    """Draws the bytes at the peak to `path`, a PNG file.

    It has one bar for each policy and batch, stacked by source.

    If a step was run, a line across its bar marks the allocator's peak.

    Raises:
        JaxrematError: the file can't be written.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.sources]
    figure = Figure(figsize=(max(6.0, 2.8 + 0.9 * len(rows)), 4.8), layout="constrained")
    axes = figure.subplots()
    bottom = [0.0] * len(rows)
    for source, colour in zip(SOURCES, _COLOURS, strict=True):
        sizes = [(row.sources or {}).get(source, 0) / 2**30 for row in rows]
        axes.bar(range(len(rows)), sizes, bottom=bottom, color=colour, label=source, width=0.7)
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    for n, (row, height) in enumerate(zip(rows, bottom, strict=True)):
        axes.annotate(
            gib_number(row.total_bytes), (n, height), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8
        )
        if row.allocator and (peak := row.allocator.peak_bytes):
            axes.hlines(peak / 2**30, n - 0.45, n + 0.45, color="black", label="" if n else "measured peak")
    names = [policy_text(row).replace(" with ", "\nwith ") + f"\nbatch {batch_text(row)}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=8)
    if len(rows) > 4:
        axes.tick_params("x", rotation=30)
    axes.set_ylabel("device memory at the peak, GiB")
    axes.margins(y=0.12)
    for row in rows[:1]:
        if (budget := row.budget_bytes / 2**30) < 2 * max(bottom):
            axes.axhline(budget, color="tab:red", linestyle="--", linewidth=1, label="budget")
        sequence = "" if row.seq_len is None else f", sequence {row.seq_len}"
        figure.suptitle(f"{row.model} on {row.target}{sequence}{loss_text(row)}")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8)
    save_picture(figure, path)


def save_picture(figure: Any, path: Path) -> None:
    """Writes a figure of matplotlib as a PNG file, whole or not at all.

    Raises:
        JaxrematError: the file can't be written.
    """
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    with named_by("--plot", path, "give another file; the rows are printed above"):
        write_whole(path, picture.getvalue())
