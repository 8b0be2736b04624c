"""What XLA says where something of NVIDIA's is missing, or where a GPU can't run a program."""

import re

from jaxremat.errors import MissingDependencyError

#: Files that XLA may fail to find, and the wheel that contains each.
_WHEELS = (("ptxas", "nvidia-cuda-nvcc"), ("libnvvm", "nvidia-nvvm"), ("nvvm", "nvidia-nvvm"), ("libdevice", "nvidia-nvvm"))
#: Matches messages about a cuDNN library that is missing or too old. Other messages about cuDNN are about shapes.
_CUDNN_LIBRARY = re.compile(r"libcudnn|DNN library|Loaded runtime CuDNN|dnn_version", re.IGNORECASE)
#: Matches XLA's rejection of a product of bfloat16, as of `jax.nn.dot_product_attention`, for a GPU that lacks it.
_BF16_PRODUCT = re.compile(r"Unsupported algorithm on the current device.*BF16")


def missing(text: str, first_line: str, *, is_here: bool) -> MissingDependencyError | None:
    """The error of a wheel that XLA needs and doesn't find. None if `text` isn't about one."""
    extra = "cuda13" if is_here else "aot"
    for file, wheel in _WHEELS:
        if re.search(rf"(find|locate|load|open|not found)[^\n]*{file}|{file}[^\n]*(not found|missing)", text, re.IGNORECASE):
            return MissingDependencyError(
                f"XLA couldn't find {file}",
                cause=f"the wheel {wheel} is missing",
                next_step=f'pip install "jaxremat[{extra}]"',
            )
    if _CUDNN_LIBRARY.search(text):
        return MissingDependencyError(
            f"XLA couldn't use cuDNN: {first_line}",
            cause="the wheel nvidia-cudnn-cu13 is missing or too old",
            next_step=f'pip install "jaxremat[{extra}]", or --attention xla',
        )
    return None


def rejection(text: str) -> tuple[str, str] | None:
    """The cause and the next step of a program that a GPU can't run, by XLA's words."""
    if not _BF16_PRODUCT.search(text):
        return None
    return (
        "jax.nn.dot_product_attention requests products of bfloat16 that need compute capability 8.0",
        "attention in float16 or float32, as the GPU itself rejects the step too",
    )
