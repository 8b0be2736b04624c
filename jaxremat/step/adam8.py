"""Adam whose two moments are stored in 8 bits a value, block by block.

    optax.chain(scale_by_adam8(b1=0.9, b2=0.95), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(3e-4))

A block is 256 neighbours of a parameter. Its largest absolute value is stored in float32, and of each value a code of 8 bits: the
share of that largest value by `dynamic tree quantization`. The codes have a decimal exponent, whose length leaves more bits to
the fraction of larger shares: shares down to 1e-7 have codes of their own. Codes are computed and not looked up, so that XLA
fuses them with the update on GPUs and TPUs. A parameter of fewer than 4,096 values has its moments in float32.

The codes have the shape of their parameter, and so lie on a mesh as it does.

References:
    Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization"; bitsandbytes, `create_dynamic_map`, whose values these
    are, and `min_8bit_size`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

#: Values of a block.
BLOCK = 256
#: Parameters of fewer values have moments in float32.
LEAST_SIZE = 4096
#: The most values that are updated at a time, where there are parts as small.
PART_SIZE = 2**24


class Adam8State(NamedTuple):
    """The state of Adam in 8 bits.

    Attributes:
        count: steps done.
        mu: the codes of the first moment.
        nu: the codes of the second moment.
        mu_largest: the largest values of the blocks of the first moment.
        nu_largest: those of the second moment.
    """

    count: Any
    mu: Any
    nu: Any
    mu_largest: Any
    nu_largest: Any


def scale_by_adam8(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with moments in 8 bits.

    Args:
        b1: the decay of the first moment.
        b2: the decay of the second moment.
        eps: what is added to the root of the second moment.
    """

    def init(params: Any) -> Adam8State:
        def zeros(code: Any) -> Any:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32 if leaf.size < LEAST_SIZE else code), params)

        first, second = zeros(jnp.int8), zeros(jnp.uint8)
        largest = jax.tree.map(lambda leaf: jnp.zeros(_blocks(leaf.shape), jnp.float32), params)
        return Adam8State(jnp.zeros((), jnp.int32), first, second, largest, jax.tree.map(jnp.copy, largest))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count: Any = optax.safe_increment(state.count)
        corrections = [1 - decay ** count.astype(jnp.float32) for decay in (b1, b2)]

        def one(grad: jax.Array, *stored: jax.Array) -> tuple[jax.Array, ...]:
            mu, nu, mu_largest, nu_largest = stored
            wide = grad.astype(jnp.float32)
            mu = b1 * decoded(mu, mu_largest) + (1 - b1) * wide
            nu = b2 * decoded(nu, nu_largest) + (1 - b2) * jnp.square(wide)
            step = mu / corrections[0] / (jnp.sqrt(nu / corrections[1]) + eps)
            (mu, mu_largest), (nu, nu_largest) = encoded(mu, stored[0].dtype), encoded(nu, stored[1].dtype)
            return step.astype(grad.dtype), mu, nu, mu_largest, nu_largest

        leaves, tree = jax.tree.flatten(updates)
        stored = zip(leaves, *(jax.tree.leaves(part) for part in state[1:]), strict=True)
        steps, *moments = (
            tree.unflatten(part) for part in zip(*(_by_parts(one, of_leaf) for of_leaf in stored), strict=True)
        )
        return steps, Adam8State(count, *moments)

    return optax.GradientTransformation(init, update)


def _by_parts(function: Callable[..., Sequence[jax.Array]], arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """`function` of arrays in place, one part of their first axis after the other.

    Otherwise the moments of a whole stack of layers would be in memory in float32. The first axis of a matrix isn't cut on a
    mesh, which may divide it.
    """
    count = _num_parts(arrays[0].shape)
    if count == 1:
        return function(*arrays)

    def part(number: jax.Array, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        sizes = [array.shape[0] // count for array in arrays]
        parts = [jax.lax.dynamic_slice_in_dim(a, number * size, size) for a, size in zip(arrays, sizes, strict=True)]
        new = zip(arrays, function(*parts), sizes, strict=True)
        return [jax.lax.dynamic_update_slice_in_dim(a, made, number * size, 0) for a, made, size in new]

    return jax.lax.fori_loop(0, count, part, list(arrays))


def _num_parts(shape: Sequence[int]) -> int:
    """The fewest parts of the first axis of at most `PART_SIZE` values each."""
    is_cut = len(_merged(shape)) > 1 and (len(shape) > 2 or jax.sharding.get_abstract_mesh().empty)
    enough = (n for n in range(1, shape[0] + 1) if shape[0] % n == 0 and math.prod(shape) <= n * PART_SIZE)
    return next(enough, shape[0]) if is_cut else 1


def encoded(values: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The codes of float32 `values`, and the value of the largest code in each block.

    Only a zero has the code of zero. With the dtype float32 the values are their own codes.

    Args:
        values: the values, not negative where the dtype has no sign.
        dtype: int8, uint8 or float32.
    """
    if dtype == jnp.float32:
        return values, jnp.zeros(1, jnp.float32)
    blocks = _in_blocks(values)
    top = _top(dtype)
    largest = jnp.max(jnp.abs(blocks), -1) / _share(jnp.asarray(2 ** (top + 1) - 1, jnp.int32), top)
    shares = jnp.abs(blocks) / jnp.where(largest == 0, 1, largest)[..., None]
    power = jnp.clip(top + jnp.ceil(jnp.log10(shares)), 0, top).astype(jnp.int32)
    fraction = (shares * 10.0 ** (top - power) - 0.1) / 0.9 * (1 << power)
    codes = (1 << power) + jnp.clip(jnp.floor(fraction).astype(jnp.int32), 0, (1 << power) - 1)
    codes = jnp.where(blocks < 0, -codes, jnp.where(blocks == 0, 0, codes))
    return _out_of_blocks(codes.astype(dtype), values.shape), largest


def decoded(codes: jax.Array, largest: jax.Array) -> jax.Array:
    """The values of codes in float32: the inverse of `encoded`, up to its rounding."""
    if codes.dtype == jnp.float32:
        return codes
    blocks = _in_blocks(codes).astype(jnp.int32)
    values = jnp.sign(blocks) * _share(jnp.abs(blocks), _top(codes.dtype)) * largest[..., None]
    return _out_of_blocks(values, codes.shape)


def _share(code: jax.Array, top: int) -> jax.Array:
    """The share of a code above 0.

    It is 1 bit, and behind it as many bits of the fraction as the exponent leaves.
    """
    power = 31 - jax.lax.clz(jnp.maximum(code, 1))
    fraction = (code - (1 << power) + 0.5) / (1 << power)
    return (0.1 + 0.9 * fraction) * 10.0 ** (power - top)


def _top(dtype: Any) -> int:
    """The exponent of the largest share: a code of int8 has 7 bits beside its sign."""
    return jnp.iinfo(dtype).bits - (2 if jnp.issubdtype(dtype, jnp.signedinteger) else 1)


def _merged(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape whose last axes are merged until a block fits in."""
    first = next((n for n in range(len(shape) - 1, 0, -1) if math.prod(shape[n:]) >= BLOCK), 0)
    return (*shape[:first], math.prod(shape[first:]))


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the blocks of a parameter.

    One that is unused where its moments are in float32, because a checkpoint can't have empty arrays.
    """
    if math.prod(shape) < LEAST_SIZE:
        return (1,)
    *first, last = _merged(shape)
    return (*first, -(-last // BLOCK))


def _in_blocks(values: jax.Array) -> jax.Array:
    *first, last = _merged(values.shape)
    count = -(-last // BLOCK)
    padded = jnp.pad(values.reshape(*first, last), [*[(0, 0)] * len(first), (0, count * BLOCK - last)])
    return padded.reshape(*first, count, BLOCK)


def _out_of_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    *first, last = _merged(shape)
    return blocks.reshape(*first, -1)[..., :last].reshape(shape)
