"""Which loops of a traced program run over layers, and which run over something else.

A loop over layers (`jax.lax.scan`, `nn.scan`) reads other parameters in each iteration: slices of stacked parameters, or what its
counter picks of them. Other loops read slices of the data and the same parameters each time: steps in time, microbatches, chunks
of the loss. In a recurrence an iteration computes with what the one before made, and doesn't merely add to it.

    scan(body, x, stacked_params)               layers: x is multiplied by the slice of a parameter
    fori_loop(0, 6, lambda i, x: x @ w[i], x)   layers, too
    scan(body, h, tokens_over_time)             a recurrence: the slices are data
    scan(body, total, microbatches)             neither: total + loss(...)
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

from jaxremat.policy.jax_private import num_operands
from jaxremat.policy.program import CALLS, Equation, Program, flatten
from jaxremat.policy.signature import num_heavy
from jaxremat.policy.tree import is_float

#: The calls that are looked into for what a loop's body reads. `remat2` and `checkpoint` are `jax.checkpoint`.
_OPENED = CALLS | {"remat2", "checkpoint"}
#: Operations that put together what iterations make, without computing with it.
_ADDING = frozenset(
    {"add", "add_any", "convert_element_type", "reshape", "broadcast_in_dim", "copy", "select_n", "dynamic_update_slice"}
)
_CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})


def made_of(program: Program, numbers: Iterable[int], others: Iterable[int]) -> set[int]:
    """The values that depend on the values `numbers`, and on none of the values `others`.

    Constants may take part.
    """
    free, bound = set(numbers), set(others)
    for equation in program.equations:
        read = _read(equation)
        if not bound.isdisjoint(read):
            bound.update({*equation.outputs} - free)
        elif not free.isdisjoint(read):
            free.update(equation.outputs)
    return free


def why_not_layers(eqn: Any, inputs: Sequence[Any], parameters: Set[int], constants: Set[int]) -> str:
    """Why a loop doesn't run over layers. Empty if it does.

    Args:
        eqn: the equation of the loop.
        inputs: the numbers of its operands in the program, or the literals.
        parameters: the numbers of the program's values that are made of parameters and constants alone.
        constants: the numbers of those that depend on no input of the program.
    """
    if eqn.primitive.name != "scan":
        return "only lax.scan loops can be differentiated backwards layer by layer"
    params = eqn.params
    num_consts, num_carry = num_operands(eqn)
    if params["length"] < 2:
        return "it runs once"
    first = num_consts + num_carry
    body = flatten(params["jaxpr"], opened=_OPENED)
    carry, sliced = (
        [n for n in some if is_float(body.avals[n])] for some in (body.inputs[num_consts:first], body.inputs[first:])
    )
    own = {n for n, atom in zip(body.inputs, inputs, strict=True) if isinstance(atom, int) and atom in parameters}
    slices = [n for n in sliced if n in own]
    slices += _picked(eqn, inputs, body, own.intersection(body.inputs[:num_consts]), constants)
    if not slices:
        return "its slices are no parameters"
    if not carry:
        return "nothing goes from one iteration to the next"
    on_carry = depending(body, carry)
    if not depending(body, slices) & on_carry:
        return "its slices of the parameters don't meet what goes from one iteration to the next"
    if {*sliced} - {*slices} and not _contracts(body, slices, on_carry):
        return "its slices of the parameters aren't multiplied with what goes from one iteration to the next"
    return ""


def is_recurrence(eqn: Any) -> bool:
    """Whether each iteration of a scan computes with what the one before made."""
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2:
        return False
    num_consts, num_carry = num_operands(eqn)
    body = flatten(eqn.params["jaxpr"], opened=_OPENED)
    carry = [number for number in body.inputs[num_consts:][:num_carry] if is_float(body.avals[number])]
    on_carry = depending(body, carry)
    computed = {
        number
        for equation in body.equations
        if equation.kind not in _ADDING and not on_carry.isdisjoint(_read(equation))
        for number in equation.outputs
        if is_float(body.avals[number])
    }
    on_computed = depending(body, computed)
    return any(atom in on_computed for atom in body.outputs[:num_carry] if isinstance(atom, int))


def _picked(eqn: Any, inputs: Sequence[Any], body: Program, stacks: Set[int], constants: Set[int]) -> Iterator[int]:
    """What the body of a scan takes of stacks of parameters at the place that its counter says."""
    counters = _counters(eqn, inputs, body, constants)
    places = made_of(body, counters, {*body.inputs}.difference(counters))
    for equation in body.equations:
        picks = equation.kind in ("dynamic_slice", "gather")
        if picks and not stacks.isdisjoint(_read(equation)) and not places.isdisjoint(_read(equation)):
            yield from equation.outputs


def _counters(eqn: Any, inputs: Sequence[Any], body: Program, constants: Set[int]) -> list[int]:
    """The integers that differ from one iteration of a scan to the next, whatever the data is."""
    num_consts, num_carry = num_operands(eqn)
    found = []
    for n, (number, atom) in enumerate(zip(body.inputs, inputs, strict=True)):
        if n >= num_consts and not is_float(body.avals[number]) and (not isinstance(atom, int) or atom in constants):
            is_carried = n < num_consts + num_carry
            others = {*body.inputs} - {number} if is_carried else set()
            if not is_carried or body.outputs[n - num_consts] not in depending(body, others):
                found.append(number)
    return found


def depending(program: Program, numbers: Iterable[int]) -> set[int]:
    """The values that depend on one of the values `numbers`."""
    found = set(numbers)
    for equation in program.equations:
        if not found.isdisjoint(_read(equation)):
            found.update(equation.outputs)
    return found


def _contracts(body: Program, slices: Iterable[int], on_carry: Set[int]) -> bool:
    """Whether a matmul multiplies something made of slices alone by something of the carry."""
    others = [number for number in body.inputs if number not in set(slices)]
    weights = made_of(body, slices, others)
    for equation in body.equations:
        read = _read(equation)
        contracts = equation.eqn.primitive.name in _CONTRACTIONS or num_heavy(equation.eqn)
        if contracts and not weights.isdisjoint(read) and not on_carry.isdisjoint(read):
            return True
    return False


def _read(equation: Equation) -> list[int]:
    return [atom for atom in equation.inputs if isinstance(atom, int)]
