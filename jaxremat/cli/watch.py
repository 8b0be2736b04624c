"""The command `jaxremat watch`: used, free and peak memory of the attached GPUs, live.

The driver reports the memory of the whole card, which counts every process. The peak is the largest used memory
that was seen since the start. Ctrl-C ends the command.

Exit codes: 0 ended (Ctrl-C is no failure), 1 no GPU or the driver doesn't answer, 2 usage.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxremat.chips.nvidia.nvml import Reading, nvml_session
from jaxremat.cli.command import flags_command
from jaxremat.errors import DriverError, bad_value

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class WatchFlags:
    """Used, free and peak memory of the attached NVIDIA GPUs, live; Ctrl-C ends it.

    The peak is the most seen since the start, as the driver has none. In a pipe: a plain line for each GPU and reading.
    """

    interval: float = 1.0
    """Seconds between two readings."""
    once: bool = False
    """Read once and stop."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return flags_command(WatchFlags, argv, "watch", _watch)


def _watch(flags: WatchFlags) -> int:
    if not 0.05 <= flags.interval <= 3600:
        raise bad_value("--interval", f"{flags.interval:g}", "seconds from 0.05 to 3600", "1 is the default")
    from jaxremat.report.doctor import gpu_table, peak_sentence
    from jaxremat.report.screen import shared_screen

    console, watched = shared_screen().results, Watched()
    with nvml_session() as read:
        reading = watched.look(read)
        if not reading.gpus:
            raise DriverError("the driver shows no GPU", next_step="nvidia-smi -L lists the cards it knows")
        if flags.once:
            console.print(gpu_table(reading, watched.peaks))
            return 0
        try:
            with contextlib.suppress(KeyboardInterrupt):
                (live if console.is_terminal else lines)(console, watched, read, reading, flags.interval)
        finally:  # the driver may stop answering
            print(peak_sentence(watched.peaks, watched.num_readings, time.monotonic() - watched.started))
    return 0


class Watched:
    """The readings so far.

    Attributes:
        peaks: by GPU index, the largest used memory seen, in bytes.
        num_readings: the number of readings.
        started: when the watch began, in seconds of `time.monotonic`.
    """

    def __init__(self) -> None:
        self.peaks: dict[int, int] = {}
        self.num_readings, self.started = 0, time.monotonic()

    def look(self, read: Callable[[], Reading]) -> Reading:
        """Makes one more reading, counts it, and returns it."""
        reading = read()
        for gpu in reading.gpus:
            self.peaks[gpu.index] = max(gpu.used_bytes, self.peaks.get(gpu.index, 0))
        self.num_readings += 1
        return reading


def live(console: "Console", watched: Watched, read: Callable[[], Reading], reading: Reading, interval_s: float) -> None:
    """Shows a table and redraws it in place at every reading, until interrupted."""
    from rich.live import Live

    from jaxremat.report.doctor import gpu_table

    with Live(gpu_table(reading, watched.peaks), console=console, auto_refresh=False) as shown:
        while True:
            time.sleep(interval_s)
            shown.update(gpu_table(watched.look(read), watched.peaks), refresh=True)


def lines(console: "Console", watched: Watched, read: Callable[[], Reading], reading: Reading, interval_s: float) -> None:
    """Prints a line for each GPU at every reading, until interrupted."""
    from jaxremat.report.doctor import gpu_line

    while True:
        for gpu in reading.gpus:
            print(gpu_line(gpu, watched.peaks[gpu.index], time.time()), flush=True)
        time.sleep(interval_s)
        reading = watched.look(read)
