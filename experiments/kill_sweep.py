"""Kills sweeps at random moments and resumes them: is a trial lost or doubled, does a process stay behind, is the table the same?

`python -m experiments.kill_sweep --kills 1000`: the real command, its queue, processes and store, with a light child in place
of the compile (some of them crash, hang on to a process of their own, or fail); `--real` compiles a tiny model for an H100.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.common import flags_of
from jaxremat.cli import processes, sweep
from jaxremat.xla.results import SIZE

GRID = {
    "light": "--model tiny --policy dots nothing none --batch 1,2,3,4,5 --target h100-80gb --jobs 3",
    "real": "--model tiny --num-layers 1 --dropout 0 --policy dots nothing none --batch 2 --target h100-80gb --jobs 2",
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
#: The latest moment of a kill, as a share of the time of a whole sweep. Most of a light sweep's time is its start.
LATEST = {"light": 0.7, "real": 1.0}
MARK = "JAXREMAT_KILL_SWEEP"


@dataclass(frozen=True)
class Flags:
    """Kills sweeps at random moments and resumes them."""

    kills: int = 1000
    """How many."""
    seed: int = 0
    """Of the moments and the signals."""
    real: bool = False
    """Compile a tiny model instead of running a light child."""


@dataclass
class Found:
    """The results of the kills.

    Attributes:
        kills: the number of kills.
        sweeps: the number of sweeps that were brought to their end.
        codes: how often each signal led to each exit code.
        faults: what a kill broke. It should stay empty.
    """

    kills: int = 0
    sweeps: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def kill_sweeps(kills: int, seed: int, *, real: bool = False) -> Found:
    """Kills and resumes sweeps until there were `kills` kills. The last sweep is brought to its end.

    The moments of the kills are drawn evenly from the time of a sweep that isn't killed, or from the first 70 % of it for
    light sweeps (`LATEST`). `seed` decides the moments and the signals.
    """
    with hearing_interrupts():
        return _kill_sweeps(kills, seed, "real" if real else "light")


@contextlib.contextmanager
def hearing_interrupts() -> Iterator[None]:
    """Within it, processes start with SIGINT not ignored.

    A shell that starts this process in the background makes it ignore SIGINT, and its children would inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _kill_sweeps(kills: int, seed: int, kind: str) -> Found:
    chance, found = random.Random(seed), Found()
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder, "reference.jsonl")
        started = time.monotonic()
        whole = _start(kind, reference)
        table = whole.communicate()[0]
        whole_s = time.monotonic() - started
        num_rows = len(reference.read_text().splitlines())
        while found.kills < kills:
            store = Path(folder, f"{found.sweeps}.jsonl")
            found.sweeps += 1
            while found.kills < kills:
                process = _start(kind, store)
                try:
                    out = process.communicate(timeout=chance.uniform(0, LATEST[kind] * whole_s))[0]
                    break  # the sweep ended before the kill
                except subprocess.TimeoutExpired:
                    before = store.read_bytes() if store.exists() else b""
                    number = chance.choice(SIGNALS)
                    process.send_signal(number)
                    process.communicate()
                    found.kills += 1
                    found.codes[f"{number.name} {process.returncode}"] += 1
                    found.faults += _faults(process, number, store, before)
            else:
                out = _start(kind, store).communicate()[0]
            if out != table:
                found.faults.append(f"sweep {found.sweeps}: another table:\n{out}\nand not\n{table}")
            if (rows := len(store.read_text().splitlines())) != num_rows:
                found.faults.append(f"sweep {found.sweeps}: {rows} rows, and not {num_rows}")
    return found


def _start(kind: str, store: Path) -> subprocess.Popen[str]:
    command = ["-m", "jaxremat", "sweep"] if kind == "real" else ["-m", "experiments.kill_sweep", "light-sweep"]
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, *command, *GRID[kind].split(), "--out", str(store)],
        env={**os.environ, MARK: mark, SIZE: "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.mark = mark  # type: ignore[attr-defined]
    return process


def _faults(process: Any, number: signal.Signals, store: Path, before: bytes) -> list[str]:
    """What the kill broke: processes left behind, a wrong exit code, rows that are lost, or rows that are doubled."""
    faults = []
    deadline = time.monotonic() + 10
    while (left := _marked(process.mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        faults.append(f"{number.name}: left behind: {left}")
    # 130 is the exit code of an interrupted sweep. The signal itself means that Python hadn't installed its handlers yet.
    # SIGINT, which a shell shows as 130 too, means that an import was interrupted in an exec() (CPython remembers that).
    # 0 or 1 mean that the sweep ended before the signal.
    if process.returncode not in (130, -number, -signal.SIGINT, 0, 1):
        faults.append(f"{number.name}: exit code {process.returncode}")
    text = store.read_bytes() if store.exists() else b""
    if not text.startswith(before):
        faults.append(f"{number.name}: rows that were there aren't any more")
    places = Counter((row["key"], row["part"]) for row in map(json.loads, text.splitlines()))
    if doubled := [place for place, count in places.items() if count > 1]:
        faults.append(f"{number.name}: doubled {doubled}")
    return faults


def _marked(mark: str) -> list[str]:
    """The command lines of the processes that have the mark in their environment. Children inherit the environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200])
        except OSError:
            pass  # the process has ended, or belongs to another user
    return found


def light_sweep(argv: list[str]) -> int:
    """Runs the real sweep command, with the light child in place of a worker that compiles."""
    processes.COMMAND = (sys.executable, "-m", "experiments.light_child")  # pyright: ignore[reportConstantRedefinition]
    return sweep.main(argv)


def main(argv: list[str] | None = None) -> int:
    """Kills and resumes sweeps, and prints the results. Returns 1 if there is a fault, 0 otherwise."""
    flags = flags_of(Flags, argv, "experiments.kill_sweep")
    started = time.monotonic()
    found = kill_sweeps(flags.kills, flags.seed, real=flags.real)
    print(
        f"{found.kills} kills in {found.sweeps} sweeps, {time.monotonic() - started:.0f} s; exit codes {dict(found.codes)}"
    )
    for fault in found.faults:
        print(fault)
    print(f"{len(found.faults)} faults")
    return 1 if found.faults else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["light-sweep"]:
        sys.exit(light_sweep(sys.argv[2:]))
    sys.exit(main())
