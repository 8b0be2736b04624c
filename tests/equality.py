"""How tests compare two trees of arrays: equal to the bit, or but for rounding.

Gradients may differ by rounding, since a recomputed value is compiled into other fusions. ROUNDING is 4e-7 of the largest
gradient: between three and four units in the last place of a float32 (2**-23 = 1.2e-7). One dropout mask drawn anew, or one
layer's gradient forgotten, moves gradients by more than a hundredth of the largest.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

ROUNDING = 4e-7


def stacked(tree: Any, num_layers: int) -> Any:
    """Subtrees `layer_0`, `layer_1`, ... as one subtree stacked on a leading axis, wherever they lie in `tree`."""
    if not isinstance(tree, dict):
        return tree
    if "layer_0" in tree:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tree[f"layer_{i}"] for i in range(num_layers)))
    return {name: stacked(value, num_layers) for name, value in tree.items()}


def assert_same_bits(got: Any, want: Any) -> None:
    """Equal trees: paths, shapes, dtypes, and every bit."""
    chex.assert_trees_all_equal_structs(got, want)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def relative_difference(got: Any, want: Any) -> float:
    """The largest difference of two trees, as a share of the largest value of `want`."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    pairs = [(_float64(a), _float64(b)) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
    scale = max(float(np.abs(b).max()) for _, b in pairs)
    assert scale > 0
    return max(float(np.abs(a - b).max()) for a, b in pairs) / scale


def _float64(leaf: Any) -> np.ndarray:
    """Differences of bfloat16 values aren't bfloat16 values. NumPy computes them without compiling anything."""
    return np.asarray(leaf).astype(np.float64)
