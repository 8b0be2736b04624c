"""What must hold of a drawn program whose layers have a policy: the same loss, the same auxiliary values, the same gradients.

    check_program(DrawnProgram((Stack(("dense",)),), policy="every:2"))

An assertion fails if it doesn't hold.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxremat
from jaxremat.errors import UsageError
from jaxremat.policy.names import named_values
from tests.equality import assert_same_bits, relative_difference
from tests.helpers import quick_jit
from tests.op_by_op import op_by_op
from tests.program_parts import LENGTH, PARTS
from tests.programs import SCANS, TWO, DrawnProgram, build, counts

#: How far gradients of a compiled program may differ, as a share of the largest.
TOLERANCE = 1e-6
#: Two units in the last place of bfloat16: that of a policy's rounding and that of the rounding without it.
TWO_UNITS = 2**-6
#: Layers with less than this share of the matmuls may be left as they are.
SMALL = 0.15


def check_program(drawn: DrawnProgram) -> None:
    """Asserts that the drawn layers are found, and that the drawn policy changes no result.

    Loss, auxiliary values and the state of NNX layers are equal to the bit where one operation runs at a time. Compiled for
    the CPU they and the gradients may differ by `TOLERANCE`. If the gradients of a program in bfloat16 differ by more, they
    must differ by no more than bfloat16 moved them or by `TWO_UNITS`, and the same program in float32 must hold to `TOLERANCE`.
    A policy changes the order in which gradients are added, such as those of a memory that several layers read, and the fusions
    between which XLA rounds. A policy for a program of which no layers are found is a UsageError.
    """
    loss, params, batch = build(drawn)
    found = jaxremat.find_layers(loss, params, batch, layers=drawn.layers or None)
    assert found.num_layers in possible_counts(drawn), f"{possible_counts(drawn)} layers, found: {found.lines()}"
    if not found.num_layers and drawn.policy != "none":
        with pytest.raises(UsageError):
            jaxremat.with_policy(loss, "nothing", drawn.layers or None)(params, batch)
        return
    under_policy = jaxremat.with_policy(loss, policy_of(drawn, found), drawn.layers or None)
    if drawn.state:
        under_policy, loss = (returning_state(function) for function in (under_policy, loss))
    assert_same_bits(op_by_op(under_policy, params, batch), op_by_op(loss, params, batch))
    results, want = (trained(drawn, function, params, batch) for function in (under_policy, loss))
    assert_close(results[0], want[0], "loss and auxiliary values")
    if drawn == in_float32(drawn) or relative_difference(results[1], want[1]) <= TOLERANCE:
        assert_close(results[1], want[1], "gradients")
    else:
        assert_close(results[1], want[1], "gradients", max(moved_by_bfloat16(drawn, want[1]), TWO_UNITS))
        check_program(in_float32(drawn))


def moved_by_bfloat16(drawn: DrawnProgram, gradients: Any) -> float:
    """How far the gradients of a program in bfloat16 are from those of the same program in float32."""
    loss, *args = build(in_float32(drawn))
    return relative_difference(
        gradients, trained(in_float32(drawn), returning_state(loss) if drawn.state else loss, *args)[1]
    )


def in_float32(drawn: DrawnProgram) -> DrawnProgram:
    """The same program without anything in bfloat16."""
    return replace(drawn, dtype="float32", casts=False)


def assert_close(got: Any, want: Any, what: str = "trees", tolerance: float = TOLERANCE) -> None:
    """Equal trees but for `tolerance`, as a share of the largest value."""
    difference = relative_difference(got, want)
    assert difference <= tolerance, f"compiled {what} differ by {difference:.1e} of the largest value"


def possible_counts(drawn: DrawnProgram) -> set[int]:
    """The numbers of layers that may be found in the program. A stack with a small share of the matmuls may be left as it is.

    The steps of a recurrence before the layers may be layers, and it may be one more layer where a layer is nothing else. The
    first of unrolled layers with NNX state may be left as it is: what comes before it is part of its operations there. A scan
    of one layer with its author's checkpoint is a loop over steps, and beside other layers it may be left as it is. So may two
    pairs of layers of which the first casts its input: they aren't equal.
    """
    matmuls = [sum(PARTS[part].matmuls for i in range(s.num_layers) for part in s.parts_of(i)) for s in drawn.stacks]
    has_others = len(drawn.stacks) > 1 or drawn.recurrence
    left = [has_others and s.shared and s.checkpointed and s.written in SCANS for s in drawn.stacks]
    left[0] |= (
        drawn.casts and len(drawn.stacks) > 1 and len(counts(drawn.stacks[0])) > 1 and drawn.stacks[0].num_layers == 2 * TWO
    )
    small = [{0} if left[n] or matmuls[n] < SMALL * sum(matmuls) else set() for n in range(len(matmuls))]
    few = [
        few | {n - 1 for n in counts(s) if drawn.state and s.written == "unrolled"}
        for s, few in zip(drawn.stacks, small, strict=True)
    ]
    found = {sum(some) for some in itertools.product(*(counts(s) | less for s, less in zip(drawn.stacks, few, strict=True)))}
    is_like_a_layer = drawn.recurrence and any(s.parts == ("recurrence",) and s.written == "unrolled" for s in drawn.stacks)
    steps = {number + LENGTH for number in found if drawn.recurrence}
    return found | steps | {number + 1 for number in found if is_like_a_layer}


def policy_of(drawn: DrawnProgram, found: Any) -> str:
    """The drawn policy, with a checkpoint name of the found layers in place of `NAME`."""
    if "NAME" not in drawn.policy or isinstance(drawn.name, str):
        return drawn.policy.replace("NAME", str(drawn.name))
    names = [value.name for kind in found.kinds for value in named_values(kind.function, *kind.args)]
    return drawn.policy.replace("NAME", names[drawn.name % len(names)])


def returning_state(loss: Callable[..., Any]) -> Callable[..., Any]:
    """`loss`, which returns its results and what it made of the NNX objects in `batch["state"]`, whose copies it gets."""

    def run(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        copies = jax.tree.map(lambda leaf: leaf, batch)
        results = loss(params, copies)
        value, *aux = results if isinstance(results, tuple) else (results,)
        return value, (aux, nnx.state(copies["state"], (nnx.BatchStat, nnx.RngCount)))

    return run


def trained(drawn: DrawnProgram, loss: Any, params: Any, batch: Any) -> tuple[Any, Any]:
    """Loss with auxiliary values, and gradients by the float parameters, of the compiled program."""
    results, gradients = quick_jit(jax.value_and_grad(loss, has_aux=drawn.aux or drawn.state, allow_int=True))(params, batch)
    floats = [leaf for leaf in jax.tree.leaves(gradients) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    assert all(np.isfinite(leaf).all() for leaf in (*jax.tree.leaves(results), *floats))
    return results, floats
