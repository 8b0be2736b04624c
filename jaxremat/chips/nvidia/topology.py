"""JAX's devices for GPUs that aren't here, from a description, and those that are.

Deviceless compilation needs the wheels of the `aot` extra. It also needs a process in which JAX was set to use the CPU before
JAX's first backend started. The commands set this themselves. A user of the Python API who hasn't set it gets an error that
says so.
"""

from typing import Any

import jax
from jax.experimental import topologies

from jaxremat.errors import TargetError
from jaxremat.mesh.axes import MeshShape


def described_devices(name: str, text: str, shape: MeshShape) -> Any:
    """JAX's devices for GPUs that aren't here, of a description.

    Raises:
        TargetError: JAX is set up in a way that excludes them, or XLA rejects the description.
    """
    layout = f"{shape.nodes}x1x{shape.num_devices // shape.nodes}"
    try:
        return topologies.get_topology_desc(name, platform="cuda", target_config=text, topology=layout).devices
    except NotImplementedError:
        raise TargetError(
            f"target {name!r} cannot be compiled for in this process",
            cause="JAX's CUDA plugin gave up for want of a GPU: JAX wasn't told beforehand to use the CPU; or for a variable",
            next_step='set JAX_PLATFORMS=cpu before importing jax (tests: os.environ["JAX_PLATFORMS"] = "cpu" in conftest.py); '
            "python -m jaxremat doctor looks at all variables",
        ) from None
    except jax.errors.JaxRuntimeError as error:
        raise TargetError(
            f"XLA refused target {name!r}: {str(error).splitlines()[0]}",
            cause="the target text has a field that this version of XLA doesn't know",
            next_step="write a fresh file with --dump-target FILE, or use a bundled target",
        ) from None


def attached_devices() -> list[Any]:
    """JAX's NVIDIA GPUs. Empty if JAX has none."""
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []
