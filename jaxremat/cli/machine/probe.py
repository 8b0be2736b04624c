"""A child process that tries out what might crash, hang or print.

Its command is `python -m jaxremat.cli.machine.probe deviceless`, or `attached`.

It prints a line of JSON after each step, so that a crash shows how far it got:

    {"step": "jax", "version": "0.10.2"}
    {"step": "target", "name": "h100-80gb", "error": ""}

A broken plugin may end its process without a message. That is why the parent doesn't import JAX itself.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from jaxremat.xla.results import SIZE


def main(kind: str) -> None:
    """Tries one kind of target, and prints what came of each step."""
    {"deviceless": _deviceless, "attached": _attached}[kind]()


def _print_step(step: str, **found: Any) -> None:
    print(json.dumps({"step": step, **found}), flush=True)


def _try(step: str, attempt: Callable[[], Any], **found: Any) -> bool:
    """Makes the attempt and prints what came of it; returns whether it went well."""
    try:
        attempt()
    except Exception as error:
        _print_step(step, **found, error=(str(error).strip().splitlines() or [type(error).__name__])[0][:400])
        return False
    _print_step(step, **found, error="")
    return True


def _import() -> None:
    import jax

    _print_step("jax", version=jax.__version__)


def _deviceless() -> None:
    os.environ[SIZE] = "0"  # what was compiled before says nothing of today
    _import()
    import jax

    _try("cpu", lambda: jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.numpy.zeros(8))))
    for plugin in ("jax_cuda13_plugin", "jax_cuda12_plugin"):
        try:
            cudnn = importlib.import_module(f"{plugin}._versions")
            _print_step("cudnn", loaded=cudnn.cudnn_get_version(), needed=cudnn.cudnn_build_version())
        except Exception:
            continue
    from jaxremat.chips.nvidia.gpu import bundled_names
    from jaxremat.xla.compile import lower_and_compile

    matrix = jax.ShapeDtypeStruct((128, 128), "bfloat16")
    for name in bundled_names():
        _try("target", lambda name=name: lower_and_compile(lambda x: x @ x, (matrix,), name), name=name)
    _try("attention", lambda: lower_and_compile(_attend, (_heads(),), "h100-80gb"))


def _attached() -> None:
    _import()
    import jax

    from jaxremat.chips.target import load_target

    def see() -> None:
        target = load_target("gpu")
        _print_step("device", description=target.description, limit_bytes=target.memory_bytes)

    if not _try("gpu", see):
        return
    _try("run", lambda: jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((128, 128), "bfloat16"))))
    heads = jax.numpy.ones(_heads().shape, "bfloat16")
    _try("attention", lambda: jax.block_until_ready(jax.jit(_attend)(heads)))


def _heads() -> Any:
    import jax

    return jax.ShapeDtypeStruct((1, 128, 2, 64), "bfloat16")


def _attend(x_BTNH: Any) -> Any:
    import jax

    return jax.nn.dot_product_attention(x_BTNH, x_BTNH, x_BTNH, is_causal=True, implementation="cudnn")


if __name__ == "__main__":
    main(sys.argv[1])
