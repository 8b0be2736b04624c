"""Several lengths in one command: a request for each of them, and what doesn't go with several.

`--seq-len 2048,8192` is one request with `lengths=(2048, 8192)`, and `at_each_length` makes the request of each length of it.
"""

from dataclasses import replace
from typing import Any

from jaxremat.asked_model import lengths_of
from jaxremat.errors import UsageError
from jaxremat.flags import RunFlags
from jaxremat.request import Request, check_run


def check_lengths(flags: RunFlags) -> Request[RunFlags]:
    """The request that the flags of `jaxremat.run` ask for, checked at each of its lengths.

    Raises:
        UsageError: a value isn't valid, or two flags contradict each other.
    """
    lengths = lengths_of(flags)
    if len(lengths) < 2:
        return check_run(flags)
    if given := _about_one_length(flags):
        raise UsageError(
            f"{given} is about one length, and --seq-len asks for {len(lengths)}", next_step=f"--seq-len {lengths[0]}"
        )
    first, *_ = [check_run(at_length(flags, length)) for length in lengths]
    return replace(first, flags=flags, lengths=lengths)


def at_each_length(request: Request[RunFlags]) -> tuple[Request[RunFlags], ...]:
    """The request of each length that is asked for. It is the request itself if it has one length."""
    return tuple(check_run(at_length(request.flags, length)) for length in request.lengths) or (request,)


def at_length(flags: Any, length: int) -> Any:
    """The flags with --seq-len `length`."""
    return replace(flags, training=replace(flags.training, seq_len=((str(length),),)))


def _about_one_length(flags: RunFlags) -> str:
    """A flag that was given and is about a single length. Empty if there is none."""
    given = {
        f"--list {flags.list}": flags.list in ("names", "shardings", "optimizers"),
        "--frontier": flags.frontier,
        "--save-plan": flags.save_plan,
    }
    return next((flag for flag, is_given in given.items() if is_given), "")
