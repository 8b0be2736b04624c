"""Turns a rejection by XLA, JAX or cuDNN into an error that names the user's line.

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

from jaxremat.chips.target import Target
from jaxremat.errors import CompileError, JaxrematError, MissingDependencyError
from jaxremat.system.files import OTHER_TMPDIR, free_bytes
from jaxremat.xla.origin import plain_scope

#: Files that XLA may fail to find, and the wheel that contains each.
_WHEELS = (
    ("ptxas", "nvidia-cuda-nvcc"),
    ("libnvvm", "nvidia-nvvm"),
    ("nvvm", "nvidia-nvvm"),
    ("libdevice", "nvidia-nvvm"),
)
#: Matches messages about a cuDNN library that is missing or too old. Other messages about cuDNN are about shapes.
_CUDNN_LIBRARY = re.compile(r"libcudnn|DNN library|Loaded runtime CuDNN|dnn_version", re.IGNORECASE)
_INSTRUCTION = re.compile(r"%?[\w.\-]+ = \(?(?P<shape>\w+\[[\d,]*\])\S* (?P<opcode>[a-z][\w\-]*)\(")
_OP_NAME = re.compile(r'op_name="([^"]+)"')
_MAX_REASON = 300
#: Matches XLA's rejection of a product of bfloat16, as of `jax.nn.dot_product_attention`, for a GPU that lacks it.
_BF16_PRODUCT = re.compile(r"Unsupported algorithm on the current device.*BF16")
_FULL, _TOO_MANY = os.strerror(errno.ENOSPC), os.strerror(errno.EMFILE)
#: The name of a file that XLA itself writes while it compiles.
_TEMPORARY_FILE = re.compile(r"/tempfile-\S+")


def explained(error: Exception, target: Target) -> JaxrematError:
    """The rejection `error` of XLA, JAX or cuDNN as an error of this package.

    A `CompileError` has no next step, since none was tried yet.
    """
    text, extra = str(error), "aot" if target.kind == "deviceless" else "cuda13"
    if _is_about_cudnn(error):
        return _cudnn_refusal(error)
    if _FULL in text or _TEMPORARY_FILE.search(text):  # XLA's code for a full disk is RESOURCE_EXHAUSTED, as for memory
        return _no_temporary_file(error)
    for missing, wheel in _WHEELS:
        if re.search(
            rf"(find|locate|load|open|not found)[^\n]*{missing}|{missing}[^\n]*(not found|missing)", text, re.IGNORECASE
        ):
            return MissingDependencyError(
                f"XLA couldn't find {missing}",
                cause=f"the wheel {wheel} is missing",
                next_step=f'pip install "jaxremat[{extra}]"',
            )
    if _CUDNN_LIBRARY.search(text):
        return MissingDependencyError(
            f"XLA couldn't use cuDNN: {_shortened_first_line(error)}",
            cause="the wheel nvidia-cudnn-cu13 is missing or too old",
            next_step=f'pip install "jaxremat[{extra}]", or --attention xla',
        )
    got = f"XLA couldn't compile the step for {target.name}: {_what_and_why(error)}"
    if _BF16_PRODUCT.search(text):
        return CompileError(
            got,
            cause="jax.nn.dot_product_attention requests products of bfloat16 that need compute capability 8.0",
            next_step="attention in float16 or float32, as the GPU itself rejects the step too",
        )
    return CompileError(got)


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
def cudnn_refusals_explained() -> Iterator[None]:
    """A context for tracing that turns JAX's rejections of cuDNN attention into our errors.

    During tracing, JAX checks whether cuDNN supports the shapes of the attention.

    Raises:
        CompileError: cuDNN doesn't support the attention.
    """
    try:
        yield
    except NotImplementedError as error:
        if not _is_about_cudnn(error):
            raise
        raise _cudnn_refusal(error) from error


def _is_about_cudnn(error: Exception) -> bool:
    """Whether `error` comes from JAX's own check of cuDNN attention."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, NotImplementedError) and any("cudnn" in Path(frame.filename).parts for frame in frames)


def _cudnn_refusal(error: Exception) -> CompileError:
    return CompileError(
        f"the program asks for cuDNN attention, and cuDNN can't run it: {_shortened_first_line(error)}",
        cause="jax.nn.dot_product_attention(..., implementation='cudnn') takes even lengths, bfloat16 or float16, and "
        "a head_dim in multiples of 8 up to 128 (up to 256 where a GPU of compute capability 9.0 or above is attached)",
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
