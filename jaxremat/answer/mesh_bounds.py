"""How fast a mesh can be at most, by steps that are compiled for another one.

Nothing of the mesh itself is compiled. This is an assumption on collectives and kernels, not a proof:

* The kernels of a sequence take as long on the mesh as on the other one. All devices together compute the same.
* Collectives along `data` and `fsdp` may be wholly hidden.
* Those along `tensor` send activations between the kernels of each layer. Where that axis is twice as long, they send at least
  twice as much, and twice as many of their seconds are exposed.
* The gradient of an embedding may take no time. Where `fsdp` divides it, its rows may be added in the compute dtype, which can
  take a quarter of a small model's step.

Example: 8 devices with `fsdp=8` take 100 ms a sequence, of which 4 ms are exposed gathers. With `fsdp=4,tensor=2` they take at
least 96 ms. Compiled, that mesh takes 120 ms, of which 20 ms are exposed collectives along `tensor` and 1 ms exposed gathers.
So `fsdp=2,tensor=4` takes at least 139 ms, and `data=4,tensor=2` at least 119 ms.

References:
    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 3.2, for
    what tensor parallelism sends in each layer.
"""

import math

from jaxremat.chips.speed import DeviceSpeed
from jaxremat.mesh.axes import MeshShape
from jaxremat.xla.clock import seconds_of
from jaxremat.xla.collectives import Collective
from jaxremat.xla.hlo import Module
from jaxremat.xla.kernels import Kernel, events_of


def shorter_by(module: Module, speed: DeviceSpeed, mesh: MeshShape, tensor: int) -> float:
    """Seconds by which a step on a mesh is longer than on others at least.

    The others have an axis `tensor` of that size. Negative where a longer axis takes more seconds.

    Args:
        module: the compiled step.
        speed: the rates of the mesh's devices.
        mesh: its mesh.
        tensor: a size of the axis `tensor`, at least that of `mesh`.
    """
    events = events_of(module)
    counted = [event for event in events if not isinstance(event, Kernel) or _counts(event, mesh)]
    least = seconds_of(counted, speed)
    further_s = (tensor / mesh.tensor - 1) * least.collective_exposed_s
    return seconds_of(events, speed).step_s - least.step_s - further_s


def _counts(kernel: Kernel, mesh: MeshShape) -> bool:
    """Whether a kernel takes as long on other meshes at least."""
    return is_along_tensor(kernel.collective, mesh) if kernel.collective else kernel.rows_added == 0


def is_along_tensor(collective: Collective, mesh: MeshShape) -> bool:
    """Whether a group of the collective has devices along the axis `tensor`."""
    group = collective.groups[0] if collective.groups else range(mesh.num_devices)
    return len(mesh.places(group, {"tensor"})) > 1


def most_speed(speed: float, shorter_by_s: float) -> float:
    """The most sequences per second of a mesh, by those of another one.

    Args:
        speed: the most sequences per second of the other mesh.
        shorter_by_s: by how many seconds a sequence takes longer on the other mesh than it takes at least (`shorter_by`).
    """
    least_s = 1 / speed - shorter_by_s
    return 1 / least_s if least_s > 0 else math.inf
