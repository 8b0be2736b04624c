"""What XLA, JAX or cuDNN refused to compile, in the words of the user's program.

XLA names an instruction of its own program, `%dot.96 = bf16[2541,64]{1,0} dot(...)`. The scope that JAX wrote beside it,
`jit(train_step)/transpose(jvp(Decoder.hidden))/layers/...`, says where in the user's program that is.
"""

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from jaxremat.errors import CompileError, JaxrematError, MissingDependencyError
from jaxremat.xla.origin import plain_scope
from jaxremat.xla.target import Target

#: What XLA can't find, by the wheel that brings it.
_WHEELS = (
    ("ptxas", "nvidia-cuda-nvcc"),
    ("libnvvm", "nvidia-nvvm"),
    ("nvvm", "nvidia-nvvm"),
    ("libdevice", "nvidia-nvvm"),
)
#: cuDNN itself, where it isn't there or too old; other words about it are about the shapes.
_CUDNN_LIBRARY = re.compile(r"libcudnn|DNN library|Loaded runtime CuDNN|dnn_version", re.IGNORECASE)
_INSTRUCTION = re.compile(r"%?[\w.\-]+ = \(?(?P<shape>\w+\[[\d,]*\])\S* (?P<opcode>[a-z][\w\-]*)\(")
_OP_NAME = re.compile(r'op_name="([^"]+)"')
_MAX_REASON = 300


def explained(error: Exception, target: Target) -> JaxrematError:
    """The refusal `error` of XLA, JAX or cuDNN as one of ours; without a next step, as none was tried."""
    text, extra = str(error), "aot" if target.kind == "deviceless" else "cuda13"
    if _is_about_cudnn(error):
        return _cudnn_refusal(error)
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
            f"XLA couldn't use cuDNN: {_first_line(error)}",
            cause="the wheel nvidia-cudnn-cu13 is missing or too old",
            next_step=f'pip install "jaxremat[{extra}]", or --attention xla',
        )
    return CompileError(f"XLA couldn't compile the step for {target.name}: {_what_and_why(error)}")


@contextlib.contextmanager
def cudnn_refusals_explained() -> Iterator[None]:
    """Around tracing: JAX checks there whether cuDNN takes the shapes of its attention. A refusal becomes a CompileError."""
    try:
        yield
    except NotImplementedError as error:
        if not _is_about_cudnn(error):
            raise
        raise _cudnn_refusal(error) from error


def _is_about_cudnn(error: Exception) -> bool:
    """Whether JAX's own check of cuDNN attention raised `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, NotImplementedError) and any("cudnn" in Path(frame.filename).parts for frame in frames)


def _cudnn_refusal(error: Exception) -> CompileError:
    return CompileError(
        f"the program asks for cuDNN attention, and cuDNN can't run it: {_first_line(error)}",
        cause="jax.nn.dot_product_attention(..., implementation='cudnn') takes even lengths, bfloat16 or float16, and "
        "a head_dim in multiples of 8 up to 128 (up to 256 where a GPU of compute capability 9.0 or above is attached)",
    )


def _what_and_why(error: Exception) -> str:
    """The instruction that was refused, with its shape and scope, and the reason; the first line where it names none."""
    text = str(error)
    instruction = _INSTRUCTION.search(text)
    if not instruction:
        return _first_line(error)
    reason = text[: instruction.start()].strip().rstrip(":,").strip() or "no reason given"
    scope = _OP_NAME.search(text, instruction.end())
    where = f" in {plain_scope(scope[1])}" if scope else ""
    return f"the {instruction['opcode']} of {instruction['shape']}{where}: {_shortened(reason)}"


def _first_line(error: Exception) -> str:
    return _shortened((str(error).strip().splitlines() or [type(error).__name__])[0].rstrip("."))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."
