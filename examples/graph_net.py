"""A graph network in Flax Linen, as jraph's users write it: rounds of message passing over edges and nodes.

Flax numbers the MLPs of all rounds alike, two in a round, and has no scope for a round. jaxremat finds the rounds::

    python -m jaxremat.run --model examples/graph_net.py:workload --policy none nothing dots auto --batch 64
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxremat


class MLP(nn.Module):
    """Two matmuls, and LayerNorm on what they make."""

    width: int
    dtype: str

    @nn.compact
    def __call__(self, *inputs):
        x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(jnp.concatenate(inputs, axis=-1)))
        return nn.LayerNorm(dtype=self.dtype)(nn.Dense(self.width, dtype=self.dtype)(x))


class GraphNet(nn.Module):
    """Nodes [nodes, features] and edges [edges, features] to a vector for each node."""

    num_rounds: int
    width: int
    dtype: str

    @nn.compact
    def __call__(self, nodes, edges, senders, receivers):
        nodes, edges = (nn.Dense(self.width, dtype=self.dtype)(x) for x in (nodes, edges))
        for _ in range(self.num_rounds):
            messages = MLP(self.width, self.dtype)(edges, nodes[senders], nodes[receivers])
            received = jax.ops.segment_sum(messages, receivers, nodes.shape[0])
            nodes, edges = nodes + MLP(self.width, self.dtype)(nodes, received), edges + messages
        return nn.Dense(3)(nodes)


def workload(
    batch: int = 64,
    num_nodes: int = 1024,
    degree: int = 8,
    num_features: int = 16,
    num_layers: int = 10,
    width: int = 128,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the square error of each node's acceleration. The graphs of a batch are parts of one large graph."""
    model = GraphNet(num_layers, width, dtype)

    def struct(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def init(key):
        index = jnp.zeros((8,), jnp.int32)
        return model.init(key, jnp.zeros((8, num_features)), jnp.zeros((8, num_features)), index, index)

    def loss(params, graph):
        made = model.apply(params, *(graph[name] for name in ("nodes", "edges", "senders", "receivers")))
        return jnp.mean((made.astype(jnp.float32) - graph["targets"]) ** 2)

    nodes, edges = batch * num_nodes, batch * num_nodes * degree
    graph = {
        "nodes": struct(nodes, num_features),
        "edges": struct(edges, num_features),
        "senders": struct(edges, dtype=jnp.int32),
        "receivers": struct(edges, dtype=jnp.int32),
        "targets": struct(nodes, 3),
    }
    return jaxremat.Workload(loss=loss, params=jax.eval_shape(init, jax.random.key(0)), batch=graph, init=init)
