"""Which loops of a traced program run over layers, and which run over something else.

A loop over layers (`jax.lax.scan`, `nn.scan`) reads other parameters in each iteration: slices of stacked parameters. Other loops
read slices of the data and the same parameters each time: microbatches, chunks of the loss, steps in time.

    scan(body, x, stacked_params)     layers: x is multiplied by the slice of a parameter
    scan(body, h, tokens_over_time)   a recurrence: the slices are data
"""

from collections.abc import Iterable, Set
from typing import Any

from jaxremat.policy.jax_private import num_operands
from jaxremat.policy.program import Program, flatten
from jaxremat.policy.signature import num_heavy
from jaxremat.policy.tree import is_float

_CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})


def made_of(program: Program, numbers: Iterable[int], others: Iterable[int]) -> set[int]:
    """The values that depend on the values `numbers`, and on none of the values `others`.

    Constants may take part.
    """
    free, bound = set(numbers), set(others)
    for equation in program.equations:
        read = [atom for atom in equation.inputs if isinstance(atom, int)]
        if any(atom in bound for atom in read):
            bound.update(equation.outputs)
        elif any(atom in free for atom in read):
            free.update(equation.outputs)
    return free


def why_not_layers(eqn: Any, inputs: tuple[Any, ...], parameters: Set[int]) -> str:
    """Why a loop doesn't run over layers. Empty if it does.

    Args:
        eqn: the equation of the loop.
        inputs: the numbers of its operands in the program, or the literals.
        parameters: the numbers of the program's values that are made of parameters and constants alone.
    """
    if eqn.primitive.name != "scan":
        return "only lax.scan loops can be differentiated backwards layer by layer"
    params = eqn.params
    num_consts, num_carry = num_operands(eqn)
    if params["length"] < 2:
        return "it runs once"
    first = num_consts + num_carry
    sliced = inputs[first:]
    own = [n for n, atom in enumerate(sliced) if atom in parameters and is_float(eqn.invars[first + n].aval)]
    if not own:
        return "its slices are no parameters"
    body = flatten(params["jaxpr"])
    carry = body.inputs[num_consts:first]
    slices = [body.inputs[first + n] for n in own]
    if not any(is_float(body.avals[number]) for number in carry):
        return "nothing goes from one iteration to the next"
    on_carry = _depending(body, carry)
    if not _depending(body, slices) & on_carry:
        return "its slices of the parameters don't meet what goes from one iteration to the next"
    arrays = [n for n in range(len(sliced)) if is_float(body.avals[body.inputs[first + n]])]
    if len(own) < len(arrays) and not _contracts(body, slices, on_carry):
        return "its slices of the parameters aren't multiplied with what goes from one iteration to the next"
    return ""


def _depending(program: Program, numbers: Iterable[int]) -> set[int]:
    """The values that depend on one of the values `numbers`."""
    found = set(numbers)
    for equation in program.equations:
        if any(atom in found for atom in equation.inputs if isinstance(atom, int)):
            found.update(equation.outputs)
    return found


def _contracts(body: Program, slices: Iterable[int], on_carry: Set[int]) -> bool:
    """Whether a matmul multiplies something made of slices alone by something of the carry."""
    others = [number for number in body.inputs if number not in set(slices)]
    weights = made_of(body, slices, others)
    for equation in body.equations:
        read = [atom for atom in equation.inputs if isinstance(atom, int)]
        contracts = equation.eqn.primitive.name in _CONTRACTIONS or num_heavy(equation.eqn)
        if contracts and any(atom in weights for atom in read) and any(atom in on_carry for atom in read):
            return True
    return False
