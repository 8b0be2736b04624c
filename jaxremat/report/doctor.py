"""Tables and sentences of `jaxremat doctor` and `jaxremat watch`.

The line of one GPU in a pipe: `12:30:05 GPU 0: used 1.50 GiB, free 78.50 GiB, peak 2.00 GiB of 80.00 GiB, 35% busy`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxremat.chips.nvidia.nvml import Gpu, Reading
from jaxremat.report.table import gib_number, list_table
from jaxremat.units import gib

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Row:
    """What one check found; `remedy` is what to type."""

    name: str
    state: State
    found: str
    remedy: str = ""


def doctor_table(rows: Sequence[Row]) -> Table:
    """A table with one row per check: its name, its state and what was found."""
    shown = [(row.name, Text(row.state, style=_STYLES[row.state]), row.found) for row in rows]
    table = list_table("", ("check", "status", "found"), shown, left=3)
    table.columns[1].no_wrap = True
    return table


def remedies(rows: Sequence[Row]) -> list[str]:
    """One line per remedy: first those of the problems, then those of the notes.

    A remedy is a command to type. The lines are meant to be copied, so they must not be wrapped.
    """
    width = max((len(row.name) for row in rows if row.remedy), default=0)
    return [
        f"  {row.name:{width}}  {row.remedy}"
        for state in ("problem", "note")
        for row in rows
        if row.state == state and row.remedy
    ]


def verdict(rows: Sequence[Row]) -> str:
    """One sentence: that no check found a problem, or how many checks did and which."""
    problems = [row.name for row in rows if row.state == "problem"]
    if not problems:
        return "Nothing stands in the way."
    count = "1 problem stands" if len(problems) == 1 else f"{len(problems)} problems stand"
    return f"{count} in the way: {', '.join(dict.fromkeys(problems))}."


def gpu_table(reading: Reading, peaks: Mapping[int, int]) -> Group:
    """A table of the GPUs' memory, and below it one of the processes on the GPUs.

    Args:
        reading: the memory and the processes as the driver reports them.
        peaks: by GPU index, the largest used memory seen so far, in bytes.
    """
    rows, processes = [], []
    for gpu in reading.gpus:
        sizes = map(gib_number, (gpu.used_bytes, gpu.free_bytes, peaks[gpu.index], gpu.total_bytes))
        rows.append((f"{gpu.index} {gpu.name}", *sizes, "-" if gpu.busy_percent is None else f"{gpu.busy_percent}%"))
        for one in sorted(gpu.processes, key=lambda one: -(one.used_bytes or 0)):
            processes.append((str(gpu.index), str(one.pid), one.name, gib_number(one.used_bytes)))
    title = f"driver {reading.driver}, CUDA up to {reading.cuda}; GiB"
    tables = [
        list_table(title, ("GPU", "used", "free", "peak", "total", "busy"), rows),
        list_table("processes", ("GPU", "pid", "process", "GiB"), processes, left=3),
    ]
    return Group(*(table for table in tables if table.row_count))


def gpu_line(gpu: Gpu, peak_bytes: int, now: float) -> str:
    """One line for one GPU at the time `now`, in seconds since the epoch."""
    busy = "" if gpu.busy_percent is None else f", {gpu.busy_percent}% busy"
    return (
        f"{time.strftime('%H:%M:%S', time.localtime(now))} GPU {gpu.index}: used {gib(gpu.used_bytes)}, "
        f"free {gib(gpu.free_bytes)}, peak {gib(peak_bytes)} of {gib(gpu.total_bytes)}{busy}"
    )


def peak_sentence(peaks: Mapping[int, int], num_readings: int, seconds: float) -> str:
    """The last sentence of a watch: the peak of each GPU.

    It says how many readings were made in how many seconds.
    """
    each = ", ".join(f"GPU {index} {gib(peak)}" for index, peak in peaks.items())
    times = "1 reading" if num_readings == 1 else f"{num_readings:,} readings in {seconds:.0f} s"
    return f"peak seen: {each} ({times}; between two readings it may have been higher)"
