"""The errors of rejected command lines, with their fields: what a command caught, printed once, and ended with."""

import dataclasses
import importlib
import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

from jaxremat.cli import command
from jaxremat.cli.doctor import DoctorFlags
from jaxremat.cli.explain import ExplainFlags
from jaxremat.cli.recommend import RecommendFlags
from jaxremat.cli.train import TrainRunFlags
from jaxremat.cli.watch import WatchFlags
from jaxremat.errors import JaxrematError
from jaxremat.session.flags import RunFlags, SweepFlags

#: The commands, `python -m jaxremat.NAME`, with their flags.
COMMANDS: dict[str, type] = {
    "run": RunFlags,
    "explain": ExplainFlags,
    "train": TrainRunFlags,
    "sweep": SweepFlags,
    "recommend": RecommendFlags,
    "watch": WatchFlags,
    "doctor": DoctorFlags,
}


def rejected(argv: Sequence[str], name: str = "run") -> JaxrematError:
    """The error of a command line. Apart from progress, the command printed its message alone, and returned its exit code."""
    module = importlib.import_module(f"jaxremat.cli.{name}")
    caught: list[JaxrematError] = []

    def catching(work: Any, **parts: Any) -> int:
        def watched() -> int:
            try:
                return work()
            except JaxrematError as error:
                caught.append(error)
                raise

        return run_command(watched, **parts)

    run_command = command.run_command
    place = module if hasattr(module, "run_command") else command
    with (
        mock.patch.object(place, "run_command", catching),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        code = module.main([*argv])
    (error,) = caught
    assert (code, out.getvalue()) == (error.exit_code, "")
    assert without_progress(err.getvalue()) == f"jaxremat: {error}".splitlines()
    return error


def without_progress(err: str) -> list[str]:
    """The lines of stderr but for those of progress, such as `[   0.1 s] compile 1`."""
    return [line for line in err.splitlines() if not re.match(r"\[ *[0-9.]+ s\] ", line)]


def flags_of(kind: type) -> set[str]:
    """The flags of a command by the dataclass of its flags: `{"--batch", "--seq-len", ...}`."""
    found = set[str]()
    for field in dataclasses.fields(kind):
        group = field.default_factory
        if isinstance(group, type) and dataclasses.is_dataclass(group):
            found |= flags_of(group)
        else:
            found.add(f"--{field.name.replace('_', '-')}")
    return found
