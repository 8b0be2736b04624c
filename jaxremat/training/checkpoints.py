"""The checkpoints of a training run: the whole state after some steps, written by orbax.

Orbax writes them while the training runs.

    checkpoints = Checkpoints(Path("runs/a/checkpoints"), shapes)
    checkpoints.save(100, state)          # returns when the state is in host memory
    step, state = checkpoints.newest()    # the newest one that is whole

orbax writes a checkpoint into a folder of another name, and renames it when it is whole. So a process that is killed leaves the
last finished one as it was. Two stay, so one is left if a disk spoils the newer one.

Where parameters are frozen, a checkpoint has the trained ones alone, such as those of LoRA adapters. The others are made as at
the beginning of the run, and must have the same sum of bits as then.

A checkpoint has its step, and the sum of all bits of the state, computed on the device before it was copied. A state that is read
must have the same sum, and the step that its folder is called by.

References:
    orbax.checkpoint.CheckpointManager, https://orbax.readthedocs.io.
"""

import contextlib
import functools
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxremat.errors import JaxrematError
from jaxremat.system.files import free_bytes, named_by

_NUM_STORED = 2
_OTHER_FOLDER = "give a folder that is yours, on a disk with room"


class Checkpoints:
    """The checkpoints in one folder.

    Args:
        folder: the folder, which is made if it isn't there. Several processes have it in common.
        shapes: the shapes of the state (`jax.ShapeDtypeStruct`), each with the sharding by which its array lies.
        agree: whether something is so in any of the processes that run the steps together.
        frozen: the sum of the bits of the frozen parameters, which no checkpoint has. None where all are stored.

    Raises:
        JaxrematError: the folder can't be made.
    """

    def __init__(
        self, folder: Path, shapes: Any, agree: Callable[[bool], bool] = bool, *, frozen: int | None = None
    ) -> None:
        self._folder, self._shapes, self._agree, self._frozen = folder.absolute(), shapes, agree, frozen
        self._digest = jax.jit(digest)
        silence_orbax()
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_NUM_STORED, enable_async_checkpointing=True, cleanup_tmp_directories=True
        )
        with named_by("--run-dir", self._folder, _OTHER_FOLDER):
            self._folder.mkdir(parents=True, exist_ok=True)
            return ocp.CheckpointManager(self._folder, options=options)

    def steps(self) -> list[int]:
        """The steps whose checkpoints are finished, the newest one first."""
        self._manager.reload()
        return sorted(self._manager.all_steps(), reverse=True)

    def newest(self, note: Callable[[str], None]) -> tuple[int, Any] | None:
        """The step and the state of the newest checkpoint that is whole.

        None if there is no checkpoint. Newer ones that aren't whole are then moved out of the way, and `note` is called with
        what happened.

        Raises:
            JaxrematError: there are checkpoints, and none is whole. They stay where they are.
        """
        damaged: dict[int, str] = {}
        for step in self.steps():
            state, error = self._read(step)
            if not self._agree(bool(error)):
                for other, reason in damaged.items():
                    aside = self._put_aside(other)
                    note(f"the checkpoint of step {other} isn't whole ({reason}); it is now {aside.name}")
                return step, state
            damaged[step] = error or "in another process"
        if damaged:
            newest, reason = next(iter(damaged.items()))
            raise JaxrematError(
                f"no checkpoint in {str(self._folder)!r} can be read; that of step {newest}: {reason}",
                cause="the disk, another program that changed the files, or a workload whose parameters are named otherwise now",
                next_step="undo what changed, or begin again with another --run-dir; the checkpoints stay where they are",
            )
        return None

    def _read(self, step: int) -> tuple[Any, str]:
        """The state of a checkpoint, and why it couldn't be read. Empty if it could."""
        args = ocp.args.Composite(state=ocp.args.StandardRestore(by_path(self._shapes)), sum=ocp.args.JsonRestore())
        try:
            found = self._manager.restore(step, args=args)
            leaves = [found["state"][name] for name in by_path(self._shapes)]
            state = jax.tree.unflatten(jax.tree.structure(self._shapes), leaves)
            if int(self._digest(state)) != found["sum"]["bits"]:
                return None, "the sum of its bits is another one"
            if (saved := found["sum"].get("step", step)) != step:  # earlier checkpoints don't say their step
                return None, f"it is that of step {saved}"
            if found["sum"].get("frozen") != self._frozen:
                return None, "the frozen parameters are other ones now"
            return state, ""
        except Exception as error:  # orbax, tensorstore and Python's JSON each have errors of their own
            return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"

    def _put_aside(self, step: int) -> Path:
        """Moves a checkpoint out of the folder, and returns where to."""
        self._manager.close()
        names = (f"damaged-{step}", *(f"damaged-{step}-{number}" for number in range(2, 1000)))
        aside = next(path for name in names if not (path := self._folder.parent / name).exists())
        if jax.process_index() == 0:
            with named_by("--run-dir", aside, _OTHER_FOLDER):
                (self._folder / str(step)).rename(aside)
        self._agree(False)  # no process continues before the folder has its new name
        self._manager = self._open()
        return aside

    def save(self, step: int, state: Any) -> None:
        """Begins to write the state after `step` steps.

        It waits until an earlier checkpoint is finished.

        Raises:
            JaxrematError: this checkpoint or the one before couldn't be written.
        """
        frozen = {} if self._frozen is None else {"frozen": self._frozen}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(by_path(state)),
            sum=ocp.args.JsonSave({"bits": int(self._digest(state)), "step": step} | frozen),
        )
        with self._said():
            self._manager.wait_until_finished()
            self._manager.save(step, args=args, force=True)

    def wait(self) -> None:
        """Waits until the last checkpoint is finished.

        Raises:
            JaxrematError: it couldn't be written.
        """
        with self._said():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            stored: list[int] = []
            with contextlib.suppress(Exception):  # the folder may be what is gone
                stored = self.steps()
            reason = (str(error).splitlines() or [""])[0].rpartition('": ')[2]  # tensorstore names the file first
            free = free_bytes(self._folder)
            if jax.process_index() == 0:
                for part in self._folder.glob("*.orbax-checkpoint-tmp*"):
                    shutil.rmtree(part, ignore_errors=True)  # or it would take the room that is missing
            raise JaxrematError(
                f"a checkpoint in {str(self._folder)!r} couldn't be written: {reason[-150:]}",
                cause=f"the disk is full, or the folder is gone; {free:,} bytes were free",
                next_step=(f"the checkpoint of step {stored[0]} is whole; " if stored else "")
                + "free some room and give the same command again",
            ) from error


def silence_orbax() -> None:
    """Leaves out what orbax prints beside the error that it raises, and only that.

    It logs the error, too. Its other reads and writes fail or are dropped after it: nobody takes their results, and the loop that
    they are for is closed.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_is_no_write_of_orbax)
    if getattr(sys.unraisablehook, "func", None) is not _unless_dropped:
        sys.unraisablehook = functools.partial(_unless_dropped, sys.unraisablehook)


def _is_no_write_of_orbax(line: logging.LogRecord) -> bool:
    text = line.getMessage()
    return not (text.startswith("Task exception was never retrieved") and "orbax" in text)


def _unless_dropped(show: Callable[[Any], object], found: Any) -> None:
    """Shows an exception that couldn't be raised, unless a read or write of orbax was dropped."""
    is_late = found.exc_type is RuntimeError and str(found.exc_value) == "Event loop is closed" and found.object is None
    code = getattr(found.object, "cr_code", None)
    if not (is_late or (code and "/orbax/checkpoint/" in code.co_filename)):
        show(found)


def by_path(state: Any) -> dict[str, Any]:
    """The arrays of a state by their path, such as `params.layers.mlp.wo.kernel`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def digest(state: Any) -> jax.Array:
    """The sum of all bits of a state's arrays, read as whole numbers and taken modulo 2**31."""
    unsigned: dict[int, Any] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
    total = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(state):
        plain = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        plain = plain.astype(jnp.uint8) if plain.dtype in (jnp.bool_, jnp.uint4) else plain
        plain = jnp.stack((plain.real, plain.imag)) if jnp.iscomplexobj(plain) else plain
        bits = jax.lax.bitcast_convert_type(plain, unsigned[plain.dtype.itemsize])
        total += jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)
    return total % jnp.uint32(2**31)


def all_finite(params: Any) -> jax.Array:
    """Whether each float of the parameters is a finite number, as a boolean scalar.

    An optimizer's state isn't checked: it may hold an infinity on purpose, such as the best loss so far.
    """
    floats = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in floats])) if floats else jnp.array(True)
