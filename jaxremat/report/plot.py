"""The frontier as a picture: bytes against step time, and tokens per second against the budget. Needs the `plot` extra."""

from collections.abc import Sequence
from pathlib import Path

from jaxremat.errors import JaxrematError, MissingDependencyError
from jaxremat.trial.record import TrialRecord


def check_plot() -> None:
    """Raises MissingDependencyError, before anything is computed, if matplotlib isn't installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            "--plot needs matplotlib", cause="the plot extra isn't installed", next_step='pip install "jaxremat[plot]"'
        ) from None


def plot_frontier(rows: Sequence[TrialRecord], path: Path) -> None:
    """Draws the rows of a frontier to `path`, a PNG.

    Raises:
        JaxrematError: the file can't be written.
    """
    from matplotlib.figure import Figure

    rows = sorted((row for row in rows if row.total_bytes and row.step_s), key=lambda row: row.total_bytes or 0)
    source = rows[0].step_source if rows else "predicted"
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind, colour, marker in (("named", "tab:grey", "o"), ("planned", "tab:blue", "D")):
        some = [row for row in rows if (row.requested_policy == "auto") == (kind == "planned")]
        sizes, times = [(row.total_bytes or 0) / 2**30 for row in some], [1e3 * (row.step_s or 0) for row in some]
        left.scatter(sizes, times, color=colour, marker=marker, label=kind, zorder=3)
        for i, (row, x, y) in enumerate(zip(some, sizes, times, strict=True)):
            if kind == "named":
                at = (4, (4, 14, -12)[i % 3])  # neighbours often share a point: their names shouldn't
                left.annotate(row.policy, (x, y), xytext=at, textcoords="offset points", fontsize=8)
    left.set(xlabel="total bytes, GiB", ylabel=f"step, ms ({source})")
    left.margins(x=0.15, y=0.1)
    left.legend()
    best: list[tuple[float, float]] = []
    for row in rows:
        best.append(((row.total_bytes or 0) / 2**30, max(row.tokens_per_s or 0, best[-1][1] if best else 0)))
    right.step([x for x, _ in best], [y for _, y in best], where="post", color="tab:blue")
    right.set(xlabel="budget, GiB", ylabel=f"tokens/s of the fastest that fits ({source})")
    if rows:
        figure.suptitle(
            f"{rows[0].model} on {rows[0].target}, batch {rows[0].batch} x {rows[0].seq_len}, {rows[0].loss} loss"
        )
    for axes in (left, right):
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise JaxrematError(
            f"--plot {str(path)!r} cannot be written: {error.strerror}",
            next_step="give another file; the rows are printed above",
        ) from None
