"""Draws the pictures of a claim as a small PNG file. It needs matplotlib, which the `plot` extra installs."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from experiments.claims.claim import Picture

#: Colours that colour-blind readers can tell apart too (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#D55E00", "#009E73", "#000000")
#: The colours of policies that many pictures have.
OWN_COLOURS = {"none": "#000000", "nothing": "#009E73", "dots+attention": "#D55E00"}
#: One fewer than the colours, so that two labels of one colour have markers of their own.
MARKERS = "osD^vPX"


def draw(pictures: Sequence[Picture], title: str, path: Path) -> None:
    """Draws the pictures side by side to `path`, with at most 128 colours, so that the file stays small.

    All of them have one legend: a label has the same colour in each.
    """
    labels = list(dict.fromkeys(label for picture in pictures for label in picture.series))
    free = [colour for colour in COLOURS if colour not in {OWN_COLOURS.get(label) for label in labels}]
    others = [label for label in labels if label not in OWN_COLOURS]
    colours = {**OWN_COLOURS, **{label: free[n % len(free)] for n, label in enumerate(others)}}
    styles = {label: {"label": label, "color": colours[label]} for label in labels}
    figure = Figure(figsize=(7.2 + 3.6 * (len(pictures) - 1), 3.6), layout="constrained")
    for axes, picture in zip(figure.subplots(1, len(pictures), squeeze=False)[0], pictures, strict=True):
        draw_one = _lines if picture.kind == "lines" else _bars
        draw_one(picture, axes, styles)
        axes.set(xlabel=picture.x, ylabel=picture.y)
        axes.grid(alpha=0.3, axis="both" if picture.kind == "lines" else "y")
        axes.set_axisbelow(True)
    handles = {label: one for axes in figure.axes for one, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.suptitle(title, fontsize=10)
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(128).save(path, format="PNG", optimize=True)


def _lines(picture: Picture, axes: Any, styles: dict[str, Any]) -> None:
    ticks = sorted({x for points in picture.series.values() for x, _ in points})
    for n, (label, style) in enumerate(styles.items()):
        points = list(zip(*picture.series[label], strict=True))
        axes.plot(*points, marker=MARKERS[n % len(MARKERS)], markersize=4, linewidth=1.2, **style)
    if "x" in picture.log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    if picture.log and len(ticks) <= 12:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    if "y" in picture.log:
        axes.set_yscale("log")
    elif picture.from_zero:
        axes.set_ylim(bottom=0)


def _bars(picture: Picture, axes: Any, styles: dict[str, Any]) -> None:
    names = list(dict.fromkeys(name for points in picture.series.values() for name, _ in points))
    bottom, width = dict.fromkeys(names, 0.0), 0.8 / len(picture.series)
    for n, (label, points) in enumerate(picture.series.items()):
        at, values = [names.index(name) for name, _ in points], [value for _, value in points]
        if picture.kind == "stack":
            axes.bar(at, values, bottom=[bottom[name] for name, _ in points], width=0.7, **styles[label])
            bottom |= {name: bottom[name] + value for name, value in points}
        else:
            axes.bar([x + (n + 0.5) * width - 0.4 for x in at], values, width=width, **styles[label])
    axes.set_xticks(range(len(names)), names, fontsize=8 if len(names) < 6 else 6.5)
