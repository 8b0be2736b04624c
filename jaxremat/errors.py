"""The exceptions of this package, whose messages all have the same parts.

A message says what was requested or found, what is allowed, the likely cause, and one next step:

    --shard got '0/4'. Allowed: I/N with I from 1 to N. Likely cause: an array job that starts at 0. Next: --shard 1/4, ...

The API raises these exceptions. The commands print the message without a traceback, and exit with `exit_code`.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Self


class JaxrematError(Exception):
    """Anything that jaxremat refuses to do or could not do. A command exits with `exit_code`."""

    exit_code = 1

    def __init__(self, got: str, *, allowed: str = "", cause: str = "", next_step: str = ""):
        """Builds the message from its parts. Empty parts are left out.

        Args:
            got: what was requested or found.
            allowed: what is allowed instead.
            cause: the likely cause.
            next_step: what the user can do next.
        """
        self.got, self.allowed, self.cause, self.next_step = got, allowed, cause, next_step
        labelled = (("Allowed", allowed), ("Likely cause", cause), ("Next", next_step))
        parts = [got, *(f"{label}: {part}" for label, part in labelled if part)]
        super().__init__(printable(" ".join(part if part.endswith(("?", ".")) else f"{part}." for part in parts if part)))

    def with_next_step(self, next_step: str) -> Self:
        """The same error with `next_step` in place of its own."""
        return type(self)(self.got, allowed=self.allowed, cause=self.cause, next_step=next_step)


class UsageError(JaxrematError, ValueError):
    """A flag or an argument that makes no sense as it was given."""

    exit_code = 2


class UnknownPolicyError(UsageError):
    """A policy text that the grammar does not know."""


class UnknownNameError(UsageError):
    """A checkpoint name that no tensor carries."""


class TargetError(UsageError):
    """A target that does not exist, is incomplete, or cannot be compiled for on this machine."""


class MissingDependencyError(JaxrematError, ImportError):
    """A wheel, or a library that it has, is missing; the message names the extra that brings it."""


class DriverError(JaxrematError):
    """The driver of the GPUs isn't installed, or doesn't answer."""


class CompileError(JaxrematError):
    """XLA rejected the program."""


class DoesNotFitError(JaxrematError):
    """Nothing that was requested fits the budget.

    The message names the part of the memory that is too large.
    """

    exit_code = 3


class UserCodeError(JaxrematError):
    """The user's own code, which --model names, raised an exception.

    The message ends with the user's traceback.
    """

    def __init__(self, got: str, *, allowed: str = "", cause: str = "", next_step: str = "", trace: str = ""):
        """Builds the message from its parts.

        Args:
            got: which part of the user's code raised which exception.
            allowed: what is allowed instead.
            cause: the likely cause.
            next_step: what the user can do next.
            trace: the user's traceback, which ends with the exception's own message.
        """
        super().__init__(got, allowed=allowed, cause=cause, next_step=next_step)
        self.trace = trace

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.trace}"

    def with_next_step(self, next_step: str) -> Self:
        """The same error with `next_step` in place of its own."""
        return type(self)(self.got, allowed=self.allowed, cause=self.cause, next_step=next_step, trace=self.trace)


#: A condition, what was given where it holds, the next step, and perhaps the cause and what is allowed instead.
Rejection = tuple[object, str, str] | tuple[object, str, str, str] | tuple[object, str, str, str, str]


def reject(*table: Rejection) -> None:
    """Rejects flags that contradict each other: the first row of a table that holds.

    For example, `reject((fresh and retry, both("--fresh", "--retry-failed"), "leave one of them out"))`.

    Raises:
        UsageError: a row holds.
    """
    for holds, got, next_step, *more in table:
        if holds:
            cause, allowed = (*more, "", "")[:2]
            raise UsageError(got, allowed=allowed, cause=cause, next_step=next_step)


def bad_value(flag: str, value: object, allowed: str, next_step: str = "leave it out for the default") -> UsageError:
    """The error of a flag, or of a field, whose value isn't allowed: `--jobs got 0`."""
    return UsageError(f"{flag_of(flag)} got {value}", allowed=allowed, next_step=next_step)


def both(one: str, other: str) -> str:
    """What a message says of two flags that contradict each other."""
    return f"{one} and {other} were both given"


def alone(flag: str, other: str) -> str:
    """What a message says of a flag without the other one that it goes with."""
    return f"{flag} is about {other}, which wasn't given"


def flag_of(field: str) -> str:
    """The flag of a field, such as `--seq-len` for `seq_len`. A flag stays as it is."""
    return field if field.startswith("-") else f"--{field.replace('_', '-')}"


def printable(text: str) -> str:
    """The text with an escape for each character that a terminal obeys or can't show."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
    """The question `did you mean 'x' or 'y'?`, with the known words closest to `word`.

    Words that begin with it come first. The question is empty where no word is close.
    """
    return did_you_mean(closest(word, known, count))


def closest(word: str, known: Iterable[str], count: int = 3, alike: float = 0.5) -> list[str]:
    """The known words of `nearest`.

    `alike` is the share of letters in common, from 0 to 1, that makes a word close.
    """
    lowered, low = {k.lower(): k for k in known}, word.lower()
    close = difflib.get_close_matches(low, lowered, n=count, cutoff=alike)
    begin = [k for k in lowered if len(low) > 2 and k.startswith(low)]
    found = [low] if low in lowered else [*dict.fromkeys([*begin, *close])][:count]
    return [lowered[k] for k in found]


def did_you_mean(words: Sequence[str]) -> str:
    """The question `did you mean 'x' or 'y'?`, empty for no words."""
    return f"did you mean {' or '.join(map(repr, words))}?" if words else ""
