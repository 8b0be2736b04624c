"""What one of several devices stores and computes of a layer.

It also gives the exposed seconds of a gathered kernel.

    share = Share(mesh, parts={((4096, 14336), "float32"): 8}, waits=0.25)
    program, lies = share.of(program)      # of a traced layer
    lies.num_bytes(number)                 # bytes of a value on one device

A value that is made of parameters alone, such as a converted kernel, is divided as its parameter is, until a sharding constraint
says otherwise. Everything else that a layer makes is divided evenly over the devices that share a batch: those along the axis
`tensor`, or all of a mesh that the workload has brought.

On 8 devices, the float32 kernel [4096, 14336] takes 28 MiB of each, and 14 MiB once it is converted to bfloat16. Gathered, it
takes 112 MiB.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxremat.answer.attention_kernels import AttentionKernel
from jaxremat.chips.speed import DeviceSpeed
from jaxremat.chips.tables import Product
from jaxremat.mesh.axes import ONE_DEVICE, MeshAxes, MeshShape
from jaxremat.mesh.own_experts import ROWS
from jaxremat.mesh.sharding import AnyMesh, groups_along, num_parts
from jaxremat.policy.program import Atom, Equation, Program
from jaxremat.xla.collectives import Collective, collective_seconds
from jaxremat.xla.flops import equation_flops, requested_product

#: By shape and dtype, the number of parts in which parameters lie on the devices of a mesh.
Parts = Mapping[tuple[tuple[int, ...], str], int]


@dataclass(frozen=True)
class Share:
    """How a layer is divided over the devices of a mesh.

    Attributes:
        mesh: the mesh. None for one device.
        axes: what its axes divide.
        parts: the parts of the layer's parameters. An argument that has the shape and dtype of one is taken for a parameter.
        waits: exposed seconds for each second in which a gather uses the links. Kernels hide the rest.
    """

    mesh: AnyMesh | None = None
    parts: Parts = field(default_factory=dict)
    waits: float = 1.0
    axes: MeshAxes = ONE_DEVICE

    def of(self, program: Program) -> tuple[Program, "Lies"]:
        """A traced layer and how its values lie.

        Of its sharding constraints, the layer has only those that are gathers.
        """
        of_params: dict[int, int] = {}
        gathers: set[int] = set()
        in_rows = set[int]()
        if self.num_expert_groups > 1:
            in_rows = {n for one in program.equations if ROWS in str(one.name_stack).split("/") for n in one.outputs}
        for number in program.inputs:
            aval = program.avals[number]
            if parts := self.parts.get((tuple(aval.shape), str(aval.dtype))):
                of_params[number] = parts
        for equation in program.equations:
            operands = [atom for atom in equation.inputs if isinstance(atom, int)]
            if not operands or not of_params.keys() >= set(operands):
                continue
            before = parts = max(of_params[number] for number in operands)
            if equation.kind == "sharding_constraint":
                parts = num_parts(equation.eqn.params["sharding"]) or before
                gathers.update(equation.outputs if parts < before else ())
            of_params.update(dict.fromkeys(equation.outputs, parts))
        return _with_gathers_alone(program, gathers), Lies(
            self, program.avals, of_params, frozenset(gathers), frozenset(in_rows)
        )

    @property
    def num_sharing(self) -> int:
        """Devices that share an operation's FLOPs.

        A layer is traced at the batch of a data-parallel group, or on a workload's own mesh at that of all devices.
        """
        return self.axes.num_devices // self.axes.num_members

    @property
    def num_expert_groups(self) -> int:
        """The number of devices along the axis `expert`."""
        return self.axes.expert if isinstance(self.axes, MeshShape) else 1


#: One device, which stores and computes everything.
ALONE = Share()


@dataclass(frozen=True)
class Lies:
    """How the values of a layer lie on one device.

    Attributes:
        share: how the layer is divided.
        avals: the shape and dtype of every value, by number.
        of_params: in how many parts the values lie that are made of parameters alone.
        gathers: those of them that a gather makes.
        in_rows: the values that a device has for the tokens of all devices along the axis `expert`.
    """

    share: Share
    avals: Mapping[int, Any]
    of_params: Mapping[int, int]
    gathers: frozenset[int]
    in_rows: frozenset[int]

    def num_bytes(self, number: int) -> int:
        """Bytes of a value on one device."""
        times = self.share.num_expert_groups if number in self.in_rows else 1
        return times * _num_bytes(self.avals[number]) // self.of_params.get(number, self.share.num_sharing)

    def moved_bytes(self, equation: Equation, number: int) -> int:
        """Bytes of a value that an operation reads or writes.

        What reads a parameter beside other values reads all of it.
        """
        if number not in self.of_params or equation.outputs[0] in self.of_params:
            return self.num_bytes(number)
        return max(self.num_bytes(number), _num_bytes(self.avals[number]) // self.share.num_sharing)

    def flops(self, equation: Equation) -> int:
        """FLOPs of an operation on one device."""
        times = equation.times if isinstance(equation, AttentionKernel) else 1
        flops = equation_flops(equation.eqn, str(equation.name_stack)).total
        return times * flops // self.share.num_sharing

    def product(self, equation: Equation) -> Product | None:
        """The shapes of a matmul on one device, of which devices that share it have some rows each."""
        product = requested_product(equation.eqn)
        return product and replace(product, m=max(1, product.m // self.share.num_sharing))

    def gather_seconds(self, number: int, speed: DeviceSpeed) -> float:
        """Exposed seconds of the gather that makes a value."""
        assert self.share.mesh is not None, "without a mesh there are no gathers"
        if speed.links is None or not self.share.axes.gather_axes:
            return 0.0
        groups = groups_along(self.share.mesh, self.share.axes.gather_axes)
        gather = Collective("all-gather", self.num_bytes(number), groups)
        return self.share.waits * collective_seconds(gather, speed.links, speed.tables)


def _with_gathers_alone(program: Program, gathers: set[int]) -> Program:
    """The program without the other sharding constraints.

    What such a constraint gives is the value that it takes.
    """
    same: dict[int, Atom] = {}
    equations: list[Equation] = []
    for equation in program.equations:
        inputs = tuple(same.get(atom, atom) if isinstance(atom, int) else atom for atom in equation.inputs)
        if equation.kind == "sharding_constraint" and not gathers.issuperset(equation.outputs):
            same[equation.outputs[0]] = inputs[0]
        else:
            equations.append(replace(equation, inputs=inputs))
    outputs = tuple(same.get(atom, atom) if isinstance(atom, int) else atom for atom in program.outputs)
    return replace(program, equations=tuple(equations), outputs=outputs)


def _num_bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize
