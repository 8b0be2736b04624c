"""The repeated layers of a workload, where its author says which they are.

Without that they are found in the traced loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxremat.mesh.sharding import AnyMesh
from jaxremat.policy.found import FoundLayers
from jaxremat.policy.names import NamedValue
from jaxremat.policy.spec import Policy


@dataclass(frozen=True, eq=False)
class OwnLayers:
    """The repeated layers of a workload.

    Each function gets the mesh that the layers are traced on, or None for one device.

    Attributes:
        number: how many there are.
        found: `found(mesh)`: the layers, for the planner.
        names: `names(mesh)`: the named values of one layer in program order, with their bytes.
        checked: `checked(policy, mesh)`: the policy with its checkpoint names checked, and each alias replaced by its names. It
            raises UnknownNameError where no value of a layer has such a name.
    """

    number: int
    found: Callable[[AnyMesh | None], FoundLayers]
    names: Callable[[AnyMesh | None], Sequence[NamedValue]]
    checked: Callable[[Policy, AnyMesh | None], Policy]
