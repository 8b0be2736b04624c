"""How much longer a real step may take than predicted, for titles and cells of tables: `±12%`, or `-6..+36%`."""

from collections.abc import Iterable


def predicted_column(intervals: Iterable[tuple[float, float] | None]) -> str:
    """The title of a column of predicted times: `predicted ms ±12%`, or `predicted ms -6..+36%` for several GPUs.

    The widest of the rows' intervals counts. Without one the title is `predicted ms`.
    """
    known = [interval for interval in intervals if interval]
    if not known:
        return "predicted\nms"
    widest = min(low for low, _ in known), max(high for _, high in known)
    text = interval_text(widest)
    return f"predicted\nms{' ' if len(text) < len('predicted') - 2 else chr(10)}{text}"


def interval_text(interval: tuple[float, float]) -> str:
    """How much longer a real step may take than predicted: `±12%`, or `-6..+36%`."""
    low, high = (100 * share for share in interval)
    return f"±{high:.0f}%" if -low == high else f"{low:+.0f}..{high:+.0f}%"
