"""Draws a claim's picture as a small PNG file. It needs matplotlib, which the `plot` extra installs."""

import io
from pathlib import Path

from experiments.claims.claim import Picture
from jaxremat.errors import MissingDependencyError
from jaxremat.xla.installed import version_of

#: Colours that colour-blind readers can tell apart too (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vPX*"


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


def draw(picture: Picture, title: str, path: Path) -> None:
    """Draws the picture to `path`, with at most 128 colours, so that the file stays small."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(name for points in picture.series.values() for name, _ in points))
    bottom, width = dict.fromkeys(names, 0.0), 0.8 / max(1, len(picture.series))
    for n, (label, points) in enumerate(picture.series.items()):
        colour, values = COLOURS[n % len(COLOURS)], [value for _, value in points]
        if picture.kind == "lines":
            style = {"color": colour, "marker": MARKERS[n % len(MARKERS)], "markersize": 4, "linewidth": 1.2}
            axes.plot([x for x, _ in points], values, label=label, **style)
            continue
        at = [names.index(name) for name, _ in points]
        if picture.kind == "stack":
            axes.bar(at, values, bottom=[bottom[name] for name, _ in points], color=colour, label=label, width=0.7)
            bottom |= {name: bottom[name] + value for name, value in points}
        else:
            axes.bar([x + (n + 0.5) * width - 0.4 for x in at], values, color=colour, label=label, width=width)
    axes.set(xlabel=picture.x, ylabel=picture.y)
    if picture.kind != "lines":
        width_of_all = sum(max(map(len, name.split("\n"))) for name in names)
        axes.set_xticks(
            range(len(names)), names, fontsize=8 if len(names) < 10 else 6.5, rotation=0 if width_of_all < 90 else 25
        )
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
    else:
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, axis="both" if picture.kind == "lines" else "y")
    axes.set_axisbelow(True)
    figure.legend(loc="outside right upper", fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(128).save(path, format="PNG", optimize=True)
