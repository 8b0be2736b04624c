"""Fused attention without a primitive of its own, as one operation of a traced layer.

It is a kernel of Pallas, say. Such an attention gives what it saves a checkpoint name: its output, and its softmax statistics
(`ResidualName`). A policy saves both or none. The kernel may make further values, and the statistics may be a slice of one:

    a, b, c = pallas_call q k v                    output, statistics = attention q k v
    output = name[context] a                 ->
    statistics = name[context] squeeze (slice b)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxremat.policy.jax_private import FUSED_ATTENTION, callee, is_fused_attention
from jaxremat.policy.program import CALLS, DERIVATIVE_CALLS, Atom, Equation, Program, flatten
from jaxremat.xla.flops import equation_flops


@dataclass(frozen=True, eq=False)
class AttentionKernel(Equation):
    """The kernel of an attention, with the values that it saves.

    Attributes:
        eqn: the kernel; in a `shard_map`, that of one device.
        outputs: the values that it saves, the output first.
        times: how many such kernels compute the attention of the whole layer.
    """

    times: int = 1

    @property
    def kind(self) -> str:
        return FUSED_ATTENTION


def with_attention(program: Program) -> Program:
    """The program, in which each such attention is one operation, also one in a `shard_map`."""
    made: dict[Atom, Equation] = {number: one for one in program.equations for number in one.outputs}
    kernels: dict[Equation, AttentionKernel] = {}
    apart = set[Equation]()  # what leads from a kernel to a value that it saves
    for equation in program.equations:
        if equation.kind == "name" and is_fused_attention(equation.eqn.primitive, equation.eqn.params):
            (saved,) = equation.inputs
            way, maker = list[Equation](), made.get(saved)
            while maker and not _is_attention(maker) and len(maker.inputs) == 1:
                way.append(maker)
                (number,) = maker.inputs
                maker = made.get(number) if isinstance(number, int) else None
            if maker and _is_attention(maker):
                kernel = kernels.get(maker) or AttentionKernel(maker.eqn, maker.inputs, (), equation.name_stack)
                kernels[maker] = replace(kernel, outputs=(*kernel.outputs, saved))
                apart.update(way)
    same, avals = dict[int, Atom](), dict(program.avals)
    for equation in program.equations:
        if equation.kind == "shard_map" and (found := _in_shard_map(equation, avals)):
            kernels[equation], of_same, of_avals = found
            same |= of_same
            avals |= of_avals

    def first(atoms: tuple[Atom, ...]) -> tuple[Atom, ...]:
        return tuple(same.get(atom, atom) if isinstance(atom, int) else atom for atom in atoms)

    equations = (kernels.get(equation, equation) for equation in program.equations if equation not in apart)
    equations = tuple(replace(equation, inputs=first(equation.inputs)) for equation in equations)
    return replace(program, equations=equations, outputs=first(program.outputs), avals=avals)


def _is_attention(equation: Equation) -> bool:
    return equation_flops(equation.eqn).num_attention_forward > 0


def _in_shard_map(
    equation: Equation, avals: Mapping[int, Any]
) -> tuple[AttentionKernel, dict[int, Atom], dict[int, Any]] | None:
    """The attention in a `shard_map`, as an operation of the program around it.

    None where the `shard_map` computes something else. With it come the results that are one with an earlier value, and the
    shapes of what the kernels save. A `shard_map` gives the statistics of each device, also where devices compute the same.
    """
    inner = with_attention(flatten(callee(equation.eqn), CALLS | DERIVATIVE_CALLS))
    kernel = next((one for one in inner.equations if isinstance(one, AttentionKernel)), None)
    named = {one.outputs[0]: one.inputs[0] for one in inner.equations if one.kind == "name"}
    known: dict[Atom, Atom] = dict(zip(inner.inputs, equation.inputs, strict=True))
    saved, same, parts = dict[int, int](), dict[int, Atom](), list[int]()
    for number, atom in zip(equation.outputs, inner.outputs, strict=True):
        atom = named.get(atom, atom) if isinstance(atom, int) else atom
        if atom in known:
            same[number] = known[atom]
        elif kernel and isinstance(atom, int) and atom in kernel.outputs:
            known[atom] = saved[atom] = number
        else:
            return None
        if kernel and isinstance(atom, int) and atom == kernel.outputs[0]:
            parts.append(avals[number].size // inner.avals[atom].size)
    if kernel is None or not parts:
        return None
    times, of_inner = min(parts), inner.avals
    shapes = {n: jax.ShapeDtypeStruct((times, *of_inner[atom].shape), of_inner[atom].dtype) for atom, n in saved.items()}
    outputs = tuple(saved[atom] for atom in kernel.outputs if atom in saved)
    return (
        AttentionKernel(kernel.eqn, equation.inputs, outputs, equation.name_stack + kernel.name_stack, times=times),
        same,
        shapes,
    )
