"""Turns a rejection by XLA, JAX or a library into an error that names the user's line.

XLA's message names an instruction of XLA's program, such as `%dot.96 = bf16[2541,64]{1,0} dot(...)`. Beside the instruction
is the scope that JAX gave it, such as `jit(train_step)/transpose(jvp(Decoder.hidden))/layers/...`. The scope shows the place
in the user's program. The error then says `the dot of bf16[2541,64] in Decoder.hidden/layers/...`, and the reason.
"""

import contextlib
import errno
import os
import re
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from jaxremat.chips.chip import FusedAttention
from jaxremat.chips.target import Target
from jaxremat.errors import CompileError, JaxrematError, UsageError
from jaxremat.system.files import OTHER_TMPDIR, free_bytes
from jaxremat.xla.hlo import plain_scope

_INSTRUCTION = re.compile(r"%?[\w.\-]+ = \(?(?P<shape>\w+\[[\d,]*\])\S* (?P<opcode>[a-z][\w\-]*)\(")
_OP_NAME = re.compile(r'op_name="([^"]+)"')
_MAX_REASON = 300
_FULL, _TOO_MANY = os.strerror(errno.ENOSPC), os.strerror(errno.EMFILE)
#: The name of a file that XLA itself writes while it compiles.
_TEMPORARY_FILE = re.compile(r"/tempfile-\S+")


def of_while_loop(error: ValueError) -> UsageError | None:
    """JAX's error about the gradient of a while loop, with a remedy; None of any other error."""
    if "Reverse-mode differentiation does not work for lax.while_loop" not in str(error):
        return None
    return UsageError(
        "the loss has a lax.while_loop, or a fori_loop whose bounds are arrays, between the parameters and its value",
        allowed="lax.scan, or lax.fori_loop with bounds that are Python numbers",
        cause="JAX can't differentiate backwards through a number of steps that isn't known when it traces",
        next_step="jax.lax.scan over the most steps, with jnp.where(done, x, step(x)); jaxremat.find_layers says the loop's line",
    )


def explained(error: Exception, target: Target) -> JaxrematError:
    """The rejection `error` of XLA, JAX or a library as an error of this package.

    A `CompileError` has no next step, since none was tried yet.
    """
    text, chip = str(error), target.chip
    if _is_about(chip.attention, error):
        return _attention_refusal(chip.attention, error)
    if _FULL in text or _TEMPORARY_FILE.search(text):  # XLA's code for a full disk is RESOURCE_EXHAUSTED, as for memory
        return _no_temporary_file(error)
    if missing := chip.missing(text, _shortened_first_line(error), is_here=target.kind != "deviceless"):
        return missing
    cause, next_step = chip.rejection(text) or ("", "")
    what = f"XLA couldn't compile the step for {target.name}: {_what_and_why(error)}"
    return CompileError(what, cause=cause, next_step=next_step)


def _no_temporary_file(error: Exception) -> JaxrematError:
    """The error of a machine on which XLA can't write its files.

    XLA writes them while it compiles.
    """
    text, folder = str(error), Path(tempfile.gettempdir())
    causes = {_FULL: f"their disk is full, with {free_bytes(folder):,} bytes free", _TOO_MANY: "a limit such as ulimit -n"}
    return JaxrematError(
        f"XLA couldn't write its temporary files: {_shortened_first_line(error)}",
        cause=next((cause for said, cause in causes.items() if said in text), "the folder can't be written"),
        next_step="ulimit -n 1024, or more" if _TOO_MANY in text else OTHER_TMPDIR,
    )


def is_lasting(error: Exception, target: Target) -> bool:
    """Whether XLA rejects the program each time, not for want of memory, disk or a library."""
    text = str(error)
    of_program = text.startswith(("INVALID_ARGUMENT", "UNIMPLEMENTED")) or (
        text.startswith("INTERNAL") and _INSTRUCTION.search(text)
    )
    return bool(of_program) and isinstance(explained(error, target), CompileError)


@contextlib.contextmanager
def attention_refusals_explained(target: Target) -> Iterator[None]:
    """A context for tracing that turns JAX's rejections of fused attention into our errors.

    During tracing, JAX checks whether the kernel supports the shapes of the attention.

    Raises:
        CompileError: it doesn't.
    """
    attention = target.chip.attention
    try:
        yield
    except NotImplementedError as error:
        if not _is_about(attention, error):
            raise
        raise _attention_refusal(attention, error) from error


def _is_about(attention: FusedAttention, error: Exception) -> bool:
    """Whether `error` comes from JAX's own check of a fused attention."""
    frames = traceback.extract_tb(error.__traceback__)
    is_check = any(attention.checked_in in Path(frame.filename).parts for frame in frames)
    return isinstance(error, NotImplementedError) and is_check


def _attention_refusal(attention: FusedAttention, error: Exception) -> CompileError:
    title = attention.title
    return CompileError(
        f"the program asks for {title} attention, and {title} can't run it: {_shortened_first_line(error)}",
        cause=attention.takes,
    )


def _what_and_why(error: Exception) -> str:
    """The rejected instruction with shape and scope, and the reason; or `error`'s first line."""
    text = str(error)
    instruction = _INSTRUCTION.search(text)
    if not instruction:
        return _shortened_first_line(error)
    reason = text[: instruction.start()].strip().rstrip(":,").strip() or "no reason given"
    scope = _OP_NAME.search(text, instruction.end())
    where = f" in {plain_scope(scope[1])}" if scope else ""
    return f"the {instruction['opcode']} of {instruction['shape']}{where}: {_shortened(reason)}"


def _shortened_first_line(error: Exception) -> str:
    return _shortened((str(error).strip().splitlines() or [type(error).__name__])[0].rstrip("."))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."
