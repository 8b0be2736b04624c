"""The Flax Linen module that `jaxremat.Layers` makes.

It runs one layer `num_layers` times over stacked parameters, in the layout of `nn.scan(variable_axes={...: 0})`. It isn't
`nn.scan` itself for two reasons:

* Nested `nn.scan`s split the random keys by their nesting. Initial values and dropout masks would then depend on the policy.
  Here the keys of all layers are made once, whatever the policy.
* `every:K` with a remainder would copy the stack of parameters (`stack.py`).
"""

import flax.linen as nn
import jax

from jaxremat.policy.apply import with_names
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.offload import check_layers
from jaxremat.policy.spec import Policy, Rule
from jaxremat.policy.stack import Tree, run_scanned, run_unrolled


class Layers(nn.Module):
    """A stack of equal layers under a policy. `layers.Layers` has the meaning of each attribute."""

    layer: nn.Module
    num_layers: int
    policy: Policy | str = Rule("none")
    scan: bool = True
    rngs: tuple[str, ...] = ("dropout",)

    @nn.compact
    def __call__(self, x: Tree, *broadcast: Tree, own: tuple[Tree, ...] = ()) -> Tree:
        """The output of the last layer for the input `x` of the first.

        All read `broadcast`, and layer i reads `own[...][i]`.
        """
        layer = self.layer.clone(parent=None, name=None)
        streams = [name for name in self.rngs if self.has_rng(name)]
        keys = {name: jax.random.split(self.make_rng(name), self.num_layers) for name in streams}
        if self.is_initializing():
            init_keys = {"params": jax.random.split(self.make_rng("params"), self.num_layers), **keys}
            stacked = jax.vmap(lambda key, own: layer.init(key, x, *own, *broadcast))(init_keys, own)
            self._write(stacked)
        mutable = [name for name in self.variables if name != "params" and self.is_mutable_collection(name)]

        def layer_fn(of_layer: Tree, keys: Tree, x: Tree, *broadcast: Tree) -> tuple[Tree, Tree]:
            variables, own = of_layer
            return layer.apply(variables, x, *own, *broadcast, rngs=keys, mutable=mutable)

        variables = dict(self.variables)
        policy = as_policy(self.policy)
        if policy.names():
            first = self._of_layer(variables, own, 0), jax.tree.map(lambda key: key[0], keys), x, *broadcast
            layer_fn, policy = with_names(layer_fn, policy, *first)
        if self.scan:
            if not self.is_initializing():
                check_layers(policy, self.num_layers)
            x, updates = run_scanned(layer_fn, policy, self.num_layers, (variables, own), keys, x, broadcast)
        else:
            per_layer = [self._of_layer(variables, own, i) for i in range(self.num_layers)]
            x, updates = run_unrolled(layer_fn, policy, self.num_layers, per_layer, keys, x, broadcast)
        if mutable and not self.is_initializing():
            self._write(updates)
        return x

    def _of_layer(self, variables: Tree, own: Tree, i: int) -> Tree:
        if self.scan:
            return jax.tree.map(lambda leaf: leaf[i], (variables, own))
        return {name: tree[f"layer_{i}"] for name, tree in variables.items()}, jax.tree.map(lambda leaf: leaf[i], own)

    def _write(self, stacked: Tree) -> None:
        for collection, tree in stacked.items():
            if self.scan:
                for name, value in tree.items():
                    self.put_variable(collection, name, value)
            else:
                for i in range(self.num_layers):
                    self.put_variable(collection, f"layer_{i}", jax.tree.map(lambda leaf, i=i: leaf[i], tree))
