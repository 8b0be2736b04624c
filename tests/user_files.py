"""Files of a user's for the tests of --model: written into a folder, which is the current one, and forgotten afterwards."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: A loss of one matrix, and a factory with a free batch, in the user's file `train.py`.
TRAIN = """
import jax, jax.numpy as jnp, jaxremat

def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)

def workload(batch: int = 8, width: int = 4, act: str = "gelu", scan: bool = True) -> jaxremat.Workload:
    params = {"w": jax.ShapeDtypeStruct((width, width), jnp.float32)}
    return jaxremat.Workload(loss=loss, params=params, batch=jax.ShapeDtypeStruct((batch, width), jnp.float32))

small = workload(batch=2)
SIZE = 12
_hidden = small
"""
Write = Callable[..., Path]


@contextmanager
def in_folder(folder: Path) -> Iterator[Write]:
    """`write("train.py", text)` writes a file into `folder`. What was imported from there, and `sys.path`, end with it."""

    def write(name: str, text: str = TRAIN) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    path, modules = list(sys.path), set(sys.modules)
    try:
        yield write
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            attributes = vars(sys.modules[name])
            if str(folder) in str([attributes.get("__file__"), *attributes.get("__path__", ())]):
                del sys.modules[name]
