"""How near do the predicted times of kernels come to those of real GPUs? `python -m experiments.kernel_times`.

The stored profiles (`experiments/profiles/`) have the time of every kernel of a training step, and the compiled module. Each
kernel is predicted from the module alone, as any step is. The table has a row for each class of kernels. Nothing is run.

`--fit` fits the shares of the peaks that kernels reach (`jaxremat/chips/nvidia/calibration.toml`) to the profiles again. Each
generation of GPUs has the mean shares of its own profiles, and all others have the mean of all. How far a prediction may be off
is what remains when the shares of one profile predict another one, over the sum of the classes that both have, or what whole
steps on one GPU were off (`experiments.published`), whichever is more.

The tables of single kernels are tried in two ways: each row beside what the rows around it say, and the kernels that
`experiments.kernel_tables` measured on other GPUs beside what is interpolated.
"""

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from scipy.optimize import isotonic_regression

from experiments.common import RESULTS, flags_of, results_text, set_up
from jaxremat.report.table import list_table
from jaxremat.system.files import write_whole

if TYPE_CHECKING:
    from experiments.profile_data import Profile, Timed
    from jaxremat.chips.speed import Calibration, DeviceSpeed, KernelClass, Shares

Row = dict[str, Any]
#: Classes whose FLOPs decide. The bytes decide all others.
BY_FLOPS = ("matmul", "small matmul", "library call on slices")
#: A class with less of a profile's time than this isn't fitted to that profile.
LEAST_SHARE = 0.002
#: The folder of the plot that a page shows.
PLOTS = RESULTS.parent.parent / "docs"
#: Elements that a thread of today's XLA writes where a loop updates a slice.
ELEMENTS_PER_THREAD = 4
#: Bytes from which the bandwidth decides how long a collective takes. The latency of a smaller one varies between runs.
LARGE_MESSAGE = 4 * 2**20


@dataclass(frozen=True)
class Flags:
    """Predicted against measured times of the kernels of real training steps."""

    json: bool = False
    """Print a record for each profile and for each class in it, a line each, and nothing else."""
    fit: bool = False
    """Fit the shares to the profiles, and write jaxremat/chips/nvidia/calibration.toml."""
    out: Path = RESULTS
    """The folder of results: the table goes into its folder kernel_times, and so does the plot, unless it is the default."""


def main(argv: list[str] | None = None) -> int:
    """Compares, prints and writes, and returns the exit code."""
    flags = flags_of(Flags, argv, "experiments.kernel_times")
    set_up()
    from experiments.profile_data import load_profile, names
    from jaxremat.chips.nvidia.calibration import FILE

    profiles = [load_profile(name) for name in names()]
    if flags.fit:
        write_whole(FILE, calibration_text(profiles))
        profiles = [load_profile(name) for name in names()]
    rows = [row for profile in profiles for row in rows_of(profile)]
    if flags.json:
        print(*(json.dumps(row) for row in rows), sep="\n")
        return 0
    collectives = [row for profile in profiles for row in collectives_of(profile)]
    for profile in profiles:
        _print_table(profile, [row for row in rows if row["profile"] == profile.name])
    _print_collectives(collectives)
    folder = flags.out / "kernel_times"
    folder.mkdir(parents=True, exist_ok=True)
    _plot(profiles, (folder if flags.out != RESULTS else PLOTS) / "kernel_times.png")
    tried = crossed(profiles)
    tables = [*rows_around(), *kernels_of_devices()]
    print(*(f"{row['of']}: median {row['median_off']:.1%} off, most {row['most_off']:+.1%}" for row in tables), sep="\n")
    filed = {"rows": rows, "crossed": tried, "collectives": collectives, "tables": tables}
    write_whole(folder / "kernel_times.json", results_text(filed))
    for row in tried:
        if row["kernel_class"] is None:
            print(
                f"fitted on {row['fitted_on']}, tried on {row['profile']}: {row['predicted_s'] / row['measured_s'] - 1:+.1%} "
                "over the classes of both"
            )
    print(f"written to {folder}")
    return 0


# Comparing.


def rows_of(profile: "Profile") -> list[Row]:
    """A row for the whole profile and one for each class in it, those with the most time first."""
    left_out: dict[str, float] = {}
    for timed in profile.kernels:
        if timed.left_out:
            left_out[timed.left_out] = left_out.get(timed.left_out, 0.0) + timed.measured_s * timed.num_launches
    about = {key: profile.about[key] for key in ("target", "source", "recorded")}
    whole = {"profile": profile.name, **_sums(profile.kept, profile.speed), "left_out_s": left_out, **about}
    classes = [
        {"profile": profile.name, "kernel_class": name, **_sums(some, profile.speed)}
        for name, some in _by_class(profile).items()
    ]
    counted = {"num_untimed": profile.num_untimed, "num_matmuls": profile.num_matmuls}
    return [{**whole, **counted}, *sorted(classes, key=lambda row: -row["measured_s"])]


def _sums(some: "Sequence[Timed]", speed: "DeviceSpeed") -> Row:
    """Seconds, bytes and FLOPs of some kernels in one step, and the rates that they reached."""
    measured_s = _measured_s(some)
    num_bytes = sum(timed.kernel.num_bytes * timed.num_launches for timed in some)
    flops = sum(timed.kernel.flops * timed.num_launches for timed in some)
    return {
        "num_kernels": len(some),
        "num_launches": sum(timed.num_launches for timed in some),
        "measured_s": measured_s,
        "predicted_s": predicted_s(some, speed),
        "num_bytes": num_bytes,
        "flops": flops,
        "bytes_per_s": num_bytes / measured_s,
        "flops_per_s": flops / measured_s,
    }


def collectives_of(profile: "Profile") -> list[Row]:
    """A row for each collective of a profile. Nothing is fitted to them: a measured time has what it waited for other devices."""
    from jaxremat.xla.collectives import collective_seconds

    assert profile.speed.links is not None, "a profile names a GPU whose links are known"
    rows: list[Row] = []
    for timed in profile.kernels:
        if collective := timed.kernel.collective:
            sums = {"num_launches": timed.num_launches, "measured_s": timed.measured_s}
            sent = {"kind": collective.kind, "num_bytes": collective.num_bytes}
            rows.append(
                {
                    "profile": profile.name,
                    **sent,
                    **sums,
                    "predicted_s": collective_seconds(collective, profile.speed.links, profile.speed.tables),
                }
            )
    return sorted(rows, key=lambda row: -row["num_bytes"])


def crossed(profiles: "Sequence[Profile]") -> list[Row]:
    """For each two profiles, the shares fitted to one of them tried on the other, over the classes that both have.

    A row for each class, and before them one for their sum.
    """
    return [row for one, other in itertools.permutations(profiles, 2) for row in _tried(one, other)]


def _tried(one: "Profile", other: "Profile") -> Iterator[Row]:
    """The shares fitted to one profile tried on another."""
    speed, mine, theirs = replace(other.speed, calibration=fit(one)), _by_class(one), _by_class(other)
    both: list[KernelClass] = [name for name in theirs if name in mine]
    groups: list[list[KernelClass]] = [both, *([name] for name in both)]
    for names in groups:
        some = [timed for name in names for timed in theirs[name]]
        yield {
            **{"fitted_on": one.name, "profile": other.name, "kernel_class": None if names is both else names[0]},
            **{"measured_s": _measured_s(some), "predicted_s": predicted_s(some, speed)},
        }


def largest_error(rows: Iterable[Row]) -> float:
    """The largest error of `crossed` over all classes that both profiles have, as a share."""
    return max(abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows if row["kernel_class"] is None)


def whole_steps() -> list[float]:
    """How much longer whole steps on one GPU took than predicted, as shares: those that were measured or published."""
    parts = {"h100-80gb": "alone", "t4": "bytes"}
    filed = {target: json.loads((RESULTS / target / "published.json").read_text()) for target in parts}
    return [row["longer"] for target, part in parts.items() for row in filed[target][part] if "longer" in row]


def _by_class(profile: "Profile") -> "dict[KernelClass, list[Timed]]":
    by_class: dict[KernelClass, list[Timed]] = {}
    for timed in profile.kept:
        by_class.setdefault(timed.kernel.kernel_class, []).append(timed)
    return by_class


def _measured_s(some: "Iterable[Timed]") -> float:
    return sum(timed.measured_s * timed.num_launches for timed in some)


def predicted_s(some: "Iterable[Timed]", speed: "DeviceSpeed") -> float:
    """The predicted seconds of some kernels in one step."""
    from jaxremat.xla.clock import predict_kernel_time

    return sum(predict_kernel_time(timed.kernel, speed).kernel_s * timed.num_launches for timed in some)


# The tables of single kernels.


def rows_around() -> Iterator[Row]:
    """How far each row of a table inside its grid is from what the rows around it say, as if it weren't there.

    Those of small messages also say how far they are from the nearest curve that doesn't fall, which is fitted to all rows.
    """
    from jaxremat.chips.nvidia.tables import PEAKS, load_tables

    for generation in PEAKS:
        found = load_tables((int(generation[3:-1]), int(generation[-1])))
        assert found is not None, "a generation with a peak has tables"
        kinds = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
        tables: dict[str, list[Mapping[tuple[int, ...], float]]] = {
            **{f"matmul {dtype}": [grid.rates] for dtype, grid in found.matmuls.items()},
            "attention": [{(length,): rate for length, rate in one.items()} for one in found.attention.values()],
            **{
                kind: [{(size,): s for size, s in one.items()} for (of, _), one in found.collectives.items() if of == kind]
                for kind in sorted(kinds)
            },
        }
        for name, some in tables.items():
            off = [(point[0], _from_around(table, point) / value - 1) for table in some for point, value in table.items()]
            if name in kinds:
                near = [one for table in some for (size,), one in _from_curve(table) if size < LARGE_MESSAGE]
                small = _off(f"{generation}, {name}, under 4 MiB", (one for size, one in off if size < LARGE_MESSAGE))
                yield {**small, "curve_off": median(map(abs, near))}
                yield _off(f"{generation}, {name}, from 4 MiB", (one for size, one in off if size >= LARGE_MESSAGE))
            else:
                yield _off(f"{generation}, {name}", (one for _, one in off))


def _from_around(table: Mapping[tuple[int, ...], float], point: tuple[int, ...]) -> float:
    """What the two rows next to a row say, in the mean over the axes that have both. NaN if none has."""
    logs = []
    for axis, size in enumerate(point):
        line = [other for other in table if other[:axis] == point[:axis] and other[axis + 1 :] == point[axis + 1 :]]
        below = max((other for other in line if other[axis] < size), default=None)
        above = min((other for other in line if other[axis] > size), default=None)
        if below and above:
            part = math.log(size / below[axis]) / math.log(above[axis] / below[axis])
            logs.append((1 - part) * math.log(table[below]) + part * math.log(table[above]))
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _from_curve(table: Mapping[tuple[int, ...], float]) -> list[tuple[tuple[int, ...], float]]:
    """How far each row is from the curve that doesn't fall and is nearest to the logarithms of all."""
    points = sorted(table)
    curve = isotonic_regression([math.log(table[point]) for point in points]).x
    return [(point, math.exp(log) / table[point] - 1) for point, log in zip(points, curve, strict=True)]


def kernels_of_devices() -> Iterator[Row]:
    """How much faster than interpolated the kernels of each device with measured tables were, by kind."""
    from jaxremat.chips.nvidia.tables import load_tables
    from jaxremat.chips.tables import Attention, Product

    tables = load_tables((9, 0))
    assert tables is not None, "Hopper has tables"
    for file in sorted(RESULTS.glob("nvidia-h*/kernel_tables.json")):
        off: dict[str, list[float]] = {}
        measured = json.loads(file.read_text())
        for row in measured["matmul"]:
            dtype = {"bfloat16": "bf16", "float32": "f32"}[row["dtype"]]
            share = tables.matmul_share(Product(1, row["m"], row["n"], row["k"]), dtype)
            assert share is not None, "both types have a table"
            off.setdefault(f"matmul {dtype}, {row['kind']}", []).append(
                row["flops_per_s"] / share / tables.peak_flops[dtype] - 1
            )
        for row in measured["attention"]:
            forward, backward = (
                tables.attention_share(Attention(direction, row["head_size"], row["length"]))
                for direction in ("forward", "backward")
            )
            assert forward, "attention has a table"
            assert backward, "attention has a table"
            share = forward if row["direction"] == "forward" else 3.5 / (1 / forward + 2.5 / backward)
            if not row["window"]:
                found = row["flops_per_s"] / share / tables.peak_flops["bf16"] - 1
                off.setdefault(f"attention, {row['direction']}", []).append(found)
        for name, some in off.items():
            yield _off(f"{file.parent.name}, {name}", some)
        yield _off(
            f"{file.parent.name}, matmul bf16", [one for name in off if name.startswith("matmul bf16") for one in off[name]]
        )


def _off(of: str, values: Iterable[float]) -> Row:
    off = [value for value in values if not math.isnan(value)]
    return {"of": of, "num_rows": len(off), "median_off": median(map(abs, off)), "most_off": max(off, key=abs)}


# Fitting.


def fit(profile: "Profile") -> "Calibration":
    """The shares with which each class of a profile is predicted as it was measured, summed over its kernels.

    They stand for kernels that no table of single kernels has. So they are fitted without tables, and to aligned matmuls only.
    """
    speed = replace(profile.speed, tables=None)
    by_class: dict[KernelClass, list[Timed]] = {
        name: [one for one in some if one.kernel.product is None or one.kernel.product.is_aligned]
        for name, some in _by_class(profile).items()
        if name != "attention"  # its share depends on the head size and the length: tables have it
    }
    found = replace(
        profile.speed.calibration,
        flops_share=(("matmul", 1.0),),
        bandwidth_share=(("elementwise", 1.0),),
        threads_per_clock=math.inf,
    )
    # The other classes fall back on the shares of these two.
    for name in sorted(by_class, key=lambda name: name not in ("matmul", "elementwise")):
        measured_s = _measured_s(by_class[name])
        if measured_s > LEAST_SHARE * _measured_s(profile.kept):
            found = _fitted(found, name, by_class[name], measured_s, speed)
    return found


def _fitted(
    before: "Calibration", name: "KernelClass", some: "Sequence[Timed]", measured_s: float, speed: "DeviceSpeed"
) -> "Calibration":
    """The calibration `before` with the share of one class, from 0.01 to 1, for which its time is nearest to the measured."""

    def with_share(share: float) -> "Calibration":
        if name == "slice update":
            return replace(before, threads_per_clock=share)
        if name in BY_FLOPS:
            return replace(before, flops_share=_with(before.flops_share, name, share))
        return replace(before, bandwidth_share=_with(before.bandwidth_share, name, share))

    low, high = 0.01, 1.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        is_fast = predicted_s(some, replace(speed, calibration=with_share(middle))) < measured_s
        low, high = (low, middle) if is_fast else (middle, high)
    return with_share(round(math.sqrt(low * high), 3))


def _with(shares: "Shares", name: "KernelClass", share: float) -> "Shares":
    return (*((other, value) for other, value in shares if other != name), (name, share))


def calibration_text(profiles: "Sequence[Profile]") -> str:
    """The text of `calibration.toml`: the mean shares of each generation's profiles, and of all for all others.

    A generation takes a class that its own profile lacks from the mean.
    """
    from jaxremat.chips.nvidia.gpu import load_gpu

    fitted = [fit(profile) for profile in profiles]
    error = math.ceil(100 * max(largest_error(crossed(profiles)), *map(abs, whole_steps()))) / 100
    tables = [_table("default", fitted, fitted, error, f"the mean of {' and '.join(p.name for p in profiles)}")]
    generations: dict[tuple[int, int], list[int]] = {}
    for n, profile in enumerate(profiles):
        generations.setdefault(load_gpu(str(profile.about["target"]))[1].compute_capability, []).append(n)
    for (major, minor), numbers in sorted(generations.items()):
        source = "; ".join(f"{profiles[n].name}, {profiles[n].about['recorded']}" for n in numbers)
        tables.append(_table(f"sm_{major}{minor}", [fitted[n] for n in numbers], fitted, error, source))
    head = "# The shares of a GPU's peak rates that kernels reach. Written by python -m experiments.kernel_times --fit.\n"
    return head + "".join(tables)


def _table(name: str, own: "Sequence[Calibration]", others: "Sequence[Calibration]", error: float, source: str) -> str:
    from jaxremat.chips.speed import CLASSES

    def mean(numbers: "Callable[[Calibration], float | None]") -> str:
        """The mean of the own numbers, and of the others' where there are none, with what it was fitted on."""
        mine, theirs = ([number for one in some if (number := numbers(one))] for some in (own, others))
        cards = f"{len(mine)} profiles" if len(mine) > 1 else "one profile" if mine else "another generation"
        return f"{geometric_mean(mine or theirs):.3f}  # fitted on {cards}" if mine or theirs else ""

    clock = mean(lambda one: one.threads_per_clock if one.threads_per_clock < math.inf else None)
    lines = [
        f"\n[{name}]",
        f'source = "{source}"',
        f"error = {error}",
        f"launch_s = {own[0].launch_s}",
        f"threads_per_clock = {clock}",
        f"elements_per_thread = {ELEMENTS_PER_THREAD}",
    ]
    for kind in ("flops_share", "bandwidth_share"):
        lines.append(f"\n[{name}.{kind}]")
        for kernel_class in CLASSES:
            if found := mean(lambda one, kind=kind, name=kernel_class: dict(getattr(one, kind)).get(name)):
                lines.append(f'"{kernel_class}" = {found}')
    return "\n".join(lines) + "\n"


# Showing.


def _print_table(profile: "Profile", rows: Sequence[Row]) -> None:
    total_s = rows[0]["measured_s"]
    shown = [
        [
            row.get("kernel_class", "all compared"),
            f"{1e3 * row['measured_s']:.2f}",
            f"{1e3 * row['predicted_s']:.2f}",
            f"{row['predicted_s'] / row['measured_s']:.2f}",
            f"{row['measured_s'] / total_s:.1%}",
            f"{row['bytes_per_s'] / 1e9:,.0f}",
            f"{row['flops_per_s'] / 1e12:,.0f}" if row["flops"] else "-",
        ]
        for row in rows
    ]
    titles = ("class", "measured", "predicted", "ratio", "share", "GB/s", "TFLOP/s")
    console = Console()
    console.print(list_table(f"{profile.name}, ms a step: {profile.about['recorded']}", titles, shown))
    for why, seconds in rows[0]["left_out_s"].items():
        console.print(f"left out, {1e3 * seconds:.2f} ms: {why}", soft_wrap=True)
    console.print(f"{rows[0]['num_untimed']} kernels have no time in the profile\n")


def _print_collectives(rows: Sequence[Row]) -> None:
    """Prints the collectives of more than 1 MB: for smaller ones the wait for other devices is most of the time."""
    shown = [
        [
            row["profile"],
            row["kind"],
            f"{row['num_bytes'] / 1e6:,.1f}",
            str(row["num_launches"]),
            f"{1e6 * row['measured_s']:,.0f}",
            f"{1e6 * row['predicted_s']:,.0f}",
            f"{row['predicted_s'] / row['measured_s']:.2f}",
        ]
        for row in rows
        if row["num_bytes"] > 1e6
    ]
    titles = ("profile", "collective", "MB", "runs", "us", "predicted", "ratio")
    Console().print(list_table("collectives of more than 1 MB, each launch; not fitted", titles, shown))


def _plot(profiles: "Sequence[Profile]", path: Path) -> None:
    """Draws predicted against measured seconds, a dot for each kernel, to a PNG file."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    from jaxremat.chips.speed import CLASSES
    from jaxremat.xla.clock import predict_kernel_time

    rows = -(-(len(profiles) + 1) // 2)  # the last place has the legend
    figure = Figure(figsize=(9, 4.2 * rows), layout="constrained")
    places = list(figure.subplots(rows, 2, squeeze=False).flat)
    shown = {}
    for axes, profile in zip(places, profiles, strict=False):
        for name, some in _by_class(profile).items():
            measured = [1e6 * timed.measured_s for timed in some]
            predicted = [1e6 * predict_kernel_time(timed.kernel, profile.speed).kernel_s for timed in some]
            colour = colormaps["tab20"](CLASSES.index(name))
            shown[name] = axes.scatter(measured, predicted, s=12, color=colour, alpha=0.7, linewidths=0)
        ends = (1, 4000)
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, µs", ylabel="predicted, µs")
        axes.set_title(f"{profile.name}: {len(profile.kept)} kernels", fontsize=10)
    for axes in places[len(profiles) :]:
        axes.axis("off")
    places[-1].legend(shown.values(), shown.keys(), loc="center", fontsize=9, markerscale=2.5)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
