"""JAX's devices for TPUs that aren't here, from libtpu's topologies.

libtpu is loaded once in a process. It looks for a TPU of this machine then, and for the others of a slice. The variables of
`_ENVIRONMENT` stop it from asking, from printing what it doesn't find, and from holding a lock that other processes need. It
takes the process's handlers of signals, which are given back.
"""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from jaxremat.chips.tpu.device import TpuDescription, layout_of
from jaxremat.errors import TargetError
from jaxremat.mesh.axes import MeshAxes

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # it would ask a metadata server, and wait for it
    "TPU_ACCELERATOR_TYPE": "v6e-1",  # what it would print that it can't find out. The topology's name decides
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no process here uses a TPU, and each may compile
}
#: Chips of a host, by default. A layout that they don't divide has hosts of one chip.
_HOST = (2, 2)


def described_devices(tpu: TpuDescription, shape: MeshAxes) -> Sequence[Any]:
    """JAX's devices for TPUs that aren't here, slice by slice.

    Raises:
        UsageError: the devices of a slice have no layout.
        TargetError: libtpu rejects the layout.
    """
    of_slice = shape.num_devices // shape.nodes
    layout = layout_of(tpu, of_slice, shape.topology)
    more: dict[str, Any] = {"num_slices": shape.nodes} if shape.nodes > 1 else {}
    if tpu.chip_config:
        more["chip_config_name"] = tpu.chip_config
    if any(int(size) % chips for size, chips in zip(layout.split("x"), _HOST, strict=False)):
        more["chips_per_host_bounds"] = [1, 1, 1]
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    name = f"{tpu.name}:{layout}"
    try:
        with _own_signals():
            devices = topologies.get_topology_desc(name, platform="tpu", **more).devices
    except jax.errors.JaxRuntimeError as error:
        raise TargetError(
            f"libtpu rejected the topology {name}: {str(error).splitlines()[0]}", next_step="another --topology, or none"
        ) from None
    # A chip of two devices has one too many where a slice has an odd number of them.
    num_here = len(devices) // shape.nodes
    return [device for first in range(0, len(devices), num_here) for device in devices[first : first + of_slice]]


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """A context after which signals have the handlers that Python gave them before.

    They have them after an error, too. Only the main thread can set them. A handler that Python didn't give is None, and stays.
    """
    ours = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            for number, handler in ours.items():
                if handler is not None:
                    signal.signal(number, handler)
