"""Draws a claim's picture as a small PNG file. It needs matplotlib, which the `plot` extra installs."""

import io
from pathlib import Path
from typing import Any

from experiments.claims.claim import Picture
from jaxremat.errors import MissingDependencyError
from jaxremat.xla.installed import version_of

#: Colours that colour-blind readers can tell apart too (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
#: The colours of policies that many pictures have.
OWN_COLOURS = {"none": "#000000", "nothing": "#009E73", "dots+attention": "#D55E00"}
#: One fewer than the colours, so that two labels of one colour have markers of their own.
MARKERS = "osD^vPX"


def check_drawing() -> None:
    """Checks, before anything is measured, that matplotlib is installed.

    Raises:
        MissingDependencyError: matplotlib isn't installed.
    """
    if version_of("matplotlib") is None:
        raise MissingDependencyError(
            "the plots of the claims need matplotlib",
            cause="the plot extra isn't installed",
            next_step='pip install "jaxremat[plot]"',
        )


def draw(picture: Picture | tuple[Picture, ...], title: str, path: Path) -> None:
    """Draws the pictures side by side to `path`, with at most 128 colours, so that the file stays small.

    All of them have one legend: a label has the same colour in each.
    """
    from matplotlib.figure import Figure
    from PIL import Image

    pictures = picture if isinstance(picture, tuple) else (picture,)
    labels = list(dict.fromkeys(label for one in pictures for label in one.series))
    figure = Figure(figsize=(7.2 + 3.6 * (len(pictures) - 1), 3.6), layout="constrained")
    for axes, one in zip(figure.subplots(1, len(pictures), squeeze=False)[0], pictures, strict=True):
        _draw_one(one, axes, labels, len(pictures))
    handles = {label: one for axes in figure.axes for one, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.suptitle(title, fontsize=10)
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(128).save(path, format="PNG", optimize=True)


def _colour(label: str, labels: list[str]) -> str:
    """The colour of a label. Some policies have the same one in all pictures."""
    free = [colour for colour in COLOURS if colour not in {OWN_COLOURS.get(one) for one in labels}]
    others = [one for one in labels if one not in OWN_COLOURS]
    return OWN_COLOURS[label] if label in OWN_COLOURS else free[others.index(label) % len(free)]


def _draw_one(picture: Picture, axes: Any, labels: list[str], panels: int) -> None:
    names = list(dict.fromkeys(name for points in picture.series.values() for name, _ in points))
    bottom, width = dict.fromkeys(names, 0.0), 0.8 / max(1, len(picture.series))
    for n, (label, points) in enumerate(picture.series.items()):
        colour, values = _colour(label, labels), [value for _, value in points]
        if picture.kind == "lines":
            marker = MARKERS[labels.index(label) % len(MARKERS)]
            axes.plot([x for x, _ in points], values, label=label, color=colour, marker=marker, markersize=4, linewidth=1.2)
            continue
        at = [names.index(name) for name, _ in points]
        if picture.kind == "stack":
            axes.bar(at, values, bottom=[bottom[name] for name, _ in points], color=colour, label=label, width=0.7)
            bottom |= {name: bottom[name] + value for name, value in points}
        else:
            axes.bar([x + (n + 0.5) * width - 0.4 for x in at], values, color=colour, label=label, width=width)
    axes.set(xlabel=picture.x, ylabel=picture.y)
    if picture.kind != "lines":
        is_wide = sum(max(map(len, name.split("\n"))) for name in names) >= 90 // panels
        turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if is_wide else {}
        axes.set_xticks(range(len(names)), names, fontsize=8 if len(names) < 10 and not is_wide else 6.5, **turned)
    else:
        ticks = sorted(set(names))
        if "x" in picture.log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        if picture.ticks and len(ticks) <= 12:
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
    if "y" in picture.log:
        axes.set_yscale("log")
    elif picture.zero:
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.grid(alpha=0.3, axis="both" if picture.kind == "lines" else "y")
    axes.set_axisbelow(True)
