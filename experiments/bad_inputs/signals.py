"""SIGINT and SIGTERM at any moment of a command, one or several: it ends quietly within seconds, and what was written is whole.

A command may also end before the signal, as it ends otherwise. In Python's own start, before the first line of jaxremat, the
signal does what it does to any Python program: those endings are only counted, with the exit codes -2, -15 and 1.
"""

import functools
import json
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from experiments.bad_inputs.case import RULES, Case, Ended, in_process, kind
from experiments.bad_inputs.surroundings import COMPILE, LIMIT_S, MODEL, TRAIN, lines_whole
from jaxremat.system.early import DEFAULTS, EXIT_CODE

#: The seconds from the first signal to the end: three for XLA, and two for the machine.
END_S = 5.0
#: The share of the signals that come in the first half second, where a command imports what it needs.
AT_FIRST = 0.3
#: What a user types. `{}` is a folder.
TYPED: dict[str, tuple[str, ...]] = {
    "run": (*COMPILE, "--out", "{}/rows.jsonl"),
    "explain": ("explain", *MODEL, "--target", "h100-80gb", "--out", "{}/rows.jsonl"),
    "sweep": ("sweep", *MODEL, "--target", "h100-80gb", "--out", "{}/rows.jsonl"),
    "recommend": (
        *("recommend", "--model", "tiny", "--num-layers", "1", "--seq-len", "32", "--policy", "nothing", "--max-batch", "4"),
        *("--target", "h100-80gb", "--out", "{}/rows.jsonl"),
    ),
    "train": (*TRAIN, "--checkpoint-every", "1", "--run-dir", "{}/run"),
    "doctor": ("doctor",),
    "watch": ("watch",),
}


@dataclass
class Sent:
    """The signals that a process gets.

    Attributes:
        numbers: those that are left.
        after_s: seconds from the start of the process to the first one.
        apart_s: seconds from one to the next.
        started: when the process was started.
        first: when the first one was sent. None before.
        last: when the last one was sent.
        is_early: whether the first one came before the first line of jaxremat.
    """

    numbers: list[signal.Signals]
    after_s: float
    apart_s: float
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0
    is_early: bool = False

    def send(self, child: int) -> None:
        """Sends the next one if its time has come."""
        now = time.monotonic()
        due = self.started + self.after_s if self.first is None else self.last + self.apart_s
        if self.numbers and now >= due and is_command(child):
            if self.first is None:
                self.first, self.is_early = now, not hears(child)
            os.kill(child, self.numbers.pop(0))
            self.last = now


def is_command(process: int) -> bool:
    """Whether the process is a command of jaxremat, and not the fork that becomes one."""
    return b"\0jaxremat" in Path(f"/proc/{process}/cmdline").read_bytes()


def hears(process: int) -> bool:
    """Whether the process handles SIGTERM, or ignores it because it ends."""
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    masks = (int(lines.get(name, "0"), 16) for name in ("SigCgt", "SigIgn"))
    return any(mask >> (signal.SIGTERM - 1) & 1 for mask in masks)


def default_signals() -> None:
    """Gives the signals their default handlers. A shell starts a command in the background with SIGINT ignored."""
    for number in DEFAULTS:
        signal.signal(number, signal.SIG_DFL)


def typed(name: str, folder: Path) -> tuple[str, ...]:
    """The command, with its files in `folder`."""
    return tuple(word.replace("{}", str(folder)) for word in TYPED[name])


@functools.cache
def undisturbed(name: str) -> tuple[Ended, tuple[object, ...]]:
    """How the command ends without a signal, and the losses of its training."""
    with tempfile.TemporaryDirectory(prefix="bad-") as made:
        folder = Path(made)
        ended = in_process(Case(typed(name, folder), before=default_signals, limit_s=LIMIT_S), folder)
        return ended, losses(folder)


def losses(folder: Path) -> tuple[object, ...]:
    """The step and the loss of each line of the training's metrics."""
    path = folder / "run" / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return tuple((row["step"], row["loss"]) for row in rows)


def signalled(name: str, draw: random.Random, folder: Path) -> Case:
    """The command, with signals at a drawn moment."""
    whole, expected = undisturbed(name)
    numbers = [draw.choice([*DEFAULTS]) for _ in range(draw.choice([1, 1, 2, 3]))]
    share, at_first, apart_s = draw.random(), draw.random() < AT_FIRST, draw.choice([0.0, 0.01, 0.1, 1.0])
    sent = Sent(numbers, share * (0.5 if at_first else whole.seconds), apart_s)

    def run(case: Case, folder: Path) -> Ended:
        sent.started = time.monotonic()
        return in_process(case, folder, sent.send)

    def check(ended: Ended) -> str:
        if sent.first is None and ended.seconds > sent.after_s + END_S:
            return f"no signal was sent: {sent}"
        if sent.is_early:
            return ""
        if ended.exit_code not in (EXIT_CODE, whole.exit_code):
            return f"exit code {ended.exit_code} after {sent}"
        if "Traceback" in ended.stderr:
            return f"a traceback after {sent}"
        if sent.first is not None and (seconds := sent.started + ended.seconds - sent.first) > END_S:
            return f"an end {seconds:.1f} s after {sent}"
        if wrong := lines_whole(folder / "rows.jsonl") or lines_whole(folder / "run" / "metrics.jsonl"):
            return wrong
        if name == "train":
            again = in_process(Case(typed(name, folder), before=default_signals, limit_s=LIMIT_S), folder)
            if again.exit_code or losses(folder) != expected:
                return f"exit code {again.exit_code} and other losses when resumed after {sent}: {again.stderr[-300:]}"
        return ""

    without = tuple(rule for rule in RULES if rule not in ("hang", "check"))
    return Case(typed(name, folder), run=run, before=default_signals, check=check, without=without, limit_s=LIMIT_S)


for _name in TYPED:
    kind("signals", f"signals_to_{_name}")(functools.partial(signalled, _name))
