"""Several processes that run the steps of one mesh together, by JAX's own runtime.

The command is started once for each process, with the same flags but for the number of the process:

    python -m jaxremat.run --mesh fsdp=8 --target cpu --coordinator 10.0.0.1:5000 --num-processes 2 --process-id 0
    srun --ntasks 2 python -m jaxremat.run --mesh fsdp=8 --target cpu --distributed

With `--distributed` JAX itself finds the coordinator, the number of processes and the number of this one: in the variables of
SLURM, Open MPI and other launchers. Without the flag an ordinary job of several tasks never waits for others. All processes
compile the same steps. The first one prints and writes the answers, and the others are silent.

A process that fails leaves at once and not by JAX's shutdown, which would wait for the others. A collective that waits for such
a process then fails, and so do the others. JAX ends the processes of which another one isn't heard of any more for 100 seconds.

References:
    https://docs.jax.dev/en/latest/multi_process.html; jax/_src/distributed.py and jax/_src/clusters/.
"""

import atexit
import contextlib
import os
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxremat.errors import JaxrematError, TargetError, UsageError, reject
from jaxremat.session.flags import ProcessFlags, RunFlags
from jaxremat.session.request import Auto, Frontier, Request
from jaxremat.trial.record import Record, TrialRecord

#: The flags that say which process this is, where no launcher does.
_ADDRESS = ("--coordinator", "--num-processes", "--process-id")
_EXAMPLE = "--coordinator HOST:PORT --num-processes 2 --process-id 0"
#: Seconds after this module's own timeout. JAX ends the process at its timeout, with a stack trace.
_JAX_LATER_S = 60


@dataclass(frozen=True)
class Place:
    """Which process of a command this is: number `index`, from 0, of `count`."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes the answers."""
        return self.index == 0


def is_distributed(flags: ProcessFlags) -> bool:
    """Whether the flags say that this process is one of several."""
    return flags.distributed or len(_missing(flags)) < len(_ADDRESS)


def check_processes(request: Request[Any], for_one: Mapping[str, Any] | None = None) -> Request[Any]:
    """The request itself, after a check that several processes can do it, if there are several.

    Args:
        request: the parsed and checked flags.
        for_one: by its flag, what only one process does, and whether it was requested.

    Raises:
        UsageError: a flag of the processes is missing or out of range, or goes with nothing that several processes do.
    """
    flags = request.flags
    if not is_distributed(flags):
        return request
    missing, count, number = _missing(flags), flags.num_processes or 0, flags.process_id or 0
    is_addressed, port = not missing, re.fullmatch(r".+:(\d{1,5})", flags.coordinator or "")
    target = flags.target or "is left out, which compiles for GPUs elsewhere"
    one = next((flag for flag, value in (for_one or {}).items() if value), "")
    reject(
        (0 < len(missing) < len(_ADDRESS), f"{', '.join(flag for flag in _ADDRESS if flag not in missing)} without "
         f"{', '.join(missing)}", _EXAMPLE),
        (is_addressed and not (port and int(port[1]) < 2**16), f"--coordinator got {flags.coordinator!r}",
         "HOST:PORT, such as 10.0.0.1:5000"),
        (is_addressed and count < 1, f"--num-processes got {count}", "a number from 1 up"),
        (is_addressed and not 0 <= number < count, f"--process-id {number} of --num-processes {count}",
         "give each process a number of its own; the first one has 0", "", f"0 to {count - 1}"),
        (flags.initialization_timeout < 1, f"--initialization-timeout got {flags.initialization_timeout}",
         "a number of seconds from 1 up"),
        (request.mesh is None, "several processes were requested without --mesh", "add --mesh fsdp=8, of all their devices"),
        (flags.target not in ("cpu", "gpu"), f"several processes were requested, and --target {target}",
         "leave the flags of the processes out, or give --target cpu or gpu",
         "a step for devices that aren't here is compiled and not run, which one process does", "cpu, gpu"),
        (any(isinstance(one.policy, Auto | Frontier) for one in request.policies),
         "several processes don't plan, and --policy auto or --frontier was given",
         "plan in one process, --policy auto --save-plan plan.json, and run it: --policy plan:plan.json",
         "each process would plan for itself, and all must run the same step"),
        (one, f"{one} is for one process", "leave the flags of the processes out"),
    )  # fmt: skip
    return request


@contextlib.contextmanager
def joined(flags: ProcessFlags) -> Iterator[Place]:
    """A context in which the requested processes are connected. It yields which of them this is.

    The context must be entered before JAX's first backend starts. Without such flags it does nothing.

    Raises:
        TargetError: the others didn't come in time, the coordinator can't be reached, or JAX finds no launcher.
    """
    if not is_distributed(flags):
        yield Place()
        return
    import jax

    _connect(flags)
    failed: list[int] = []
    atexit.register(_leave, failed)  # later functions are called before it, and JAX's own shutdown after it
    try:
        place = Place(jax.process_index(), jax.process_count())
        yield place
    except BaseException as error:
        failed.append(getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1))
        raise


def _connect(flags: ProcessFlags) -> None:
    """Calls `jax.distributed.initialize` in a thread.

    It can't be interrupted, and at its timeout it ends the process.
    """
    import jax

    timeout_s = flags.initialization_timeout
    failures: list[Exception] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                coordinator_address=flags.coordinator,
                num_processes=flags.num_processes,
                process_id=flags.process_id,
                cluster_detection_method="deactivate" if flags.coordinator else None,
                initialization_timeout=timeout_s + _JAX_LATER_S,
            )
        except Exception as error:  # the thread that waits says what it was
            failures.append(error)

    thread = threading.Thread(target=initialize, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        where = f" of --coordinator {flags.coordinator}" if flags.coordinator else ""
        raise TargetError(
            f"the processes{where} weren't all there within {timeout_s} s",
            cause="one of them wasn't started or ended at once, or the coordinator, which is the first one, can't be reached",
            next_step="read what the others printed; --initialization-timeout SECONDS waits longer",
        )
    if failures and not flags.coordinator and isinstance(failures[0], ValueError):
        raise TargetError(
            "--distributed was given, and JAX finds no launcher of several processes",
            allowed="processes that srun or mpirun started, or others that JAX knows",
            cause=str(failures[0]),
            next_step=f"start the processes with srun, or say who they are: {_EXAMPLE}",
        )
    if failures:
        raise TargetError(f"JAX can't connect the processes: {str(failures[0]).splitlines()[0]}", next_step=_EXAMPLE)


def _leave(failed: list[int]) -> None:
    """Ends a process that failed, without JAX's shutdown, which waits for all processes."""
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed[0])


def silent(request: Request[RunFlags]) -> Request[RunFlags]:
    """The request of a process that prints and writes nothing."""
    return replace(request, flags=replace(request.flags, json=False, out=None, plot=None, save_plan=None))


def check_alike(flags: ProcessFlags, place: Place) -> None:
    """Checks that all processes have the same flags, but for those of one process alone.

    Raises:
        UsageError: they weren't. Processes that run different steps would wait for each other.
    """
    if place.count == 1:
        return
    own = ("process_id", "coordinator", "initialization_timeout", "verbose", "json", "out", "plot", "save_plan")
    checksum = zlib.crc32(repr({name: value for name, value in vars(flags).items() if name not in own}).encode())
    if len({tuple(row) for row in _of_all(divmod(checksum, 2**16))}) > 1:
        raise UsageError(
            f"the {place.count} processes were started with different flags",
            allowed="the same flags but for --process-id, and what the first process prints and writes",
            next_step="start all of them by one line, such as srun's",
        )


def until_one_fails(take: Callable[[Record], None], place: Place) -> Callable[[Record], None]:
    """A function that does what `take` does, and ends the command if a process's step failed.

    The processes would no longer run the same steps after it.
    """

    def take_or_end(record: Record) -> None:
        take(record)
        if place.count > 1 and isinstance(record, TrialRecord) and record.ran in ("oom", "crashed"):
            raise JaxrematError(
                f"a step failed in process {place.index} of {place.count}: {record.error}",
                cause="memory ran out, or another process ended",
                next_step="read what the other processes printed",
            )

    return take_or_end


def least_of_all(num_bytes: int) -> int:
    """The least `num_bytes` of all processes, which must all call this.

    They then decide alike what fits.
    """
    return min(high * 2**30 + low for high, low in _of_all(divmod(num_bytes, 2**30)))


def any_of_all(flag: bool) -> bool:
    """Whether `flag` is true in any process.

    All processes must call this, and none returns before all have.
    """
    return any(one for one, _ in _of_all((int(flag), 0)))


def _of_all(pair: tuple[int, int]) -> list[list[int]]:
    """The pairs of all processes.

    Each number has at most 31 bits, because JAX has no longer ones by default.

    Raises:
        JaxrematError: another process ended.
    """
    import numpy as np
    from jax.errors import JaxRuntimeError
    from jax.experimental import multihost_utils

    try:
        return multihost_utils.process_allgather(np.asarray(pair, np.int32)).reshape(-1, 2).tolist()
    except JaxRuntimeError as error:
        raise JaxrematError(
            f"this process can't hear the others any more: {str(error).splitlines()[0]}",
            cause="another process ended",
            next_step="read what the other processes printed",
        ) from None


def _missing(flags: ProcessFlags) -> list[str]:
    """The flags of a process's address that weren't given."""
    return [flag for flag in _ADDRESS if getattr(flags, flag[2:].replace("-", "_")) is None]
