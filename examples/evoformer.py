"""The Evoformer's stack of AlphaFold in plain functions: a scan over stacked layers, with the checkpoint of `use_remat` in it.

`own` is the program with that checkpoint, which saves a layer's input alone. The other policies replace it. A layer works on a
table of sequences and one of pairs, and the arrays of attention among pairs grow with the cube of the length::

    python -m jaxremat.run --model examples/evoformer.py:workload --policy none own dots auto --batch 1
"""

import jax
import jax.numpy as jnp

import jaxremat


def norm(x):
    """LayerNorm without parameters."""
    return jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-5).astype(x.dtype)


def attention(p, x, bias=None):
    """Gated attention along the second last axis of x [..., length, channels]; `bias` is [heads, length, length]."""
    q, k, v = (jnp.einsum("...lc,chd->...lhd", norm(x), p[name]) for name in "qkv")
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(scores if bias is None else scores + bias, axis=-1).astype(x.dtype)
    made = jnp.einsum("...hqk,...khd->...qhd", weights, v)
    return jnp.einsum(
        "...qhd,hdc->...qc", jax.nn.sigmoid(jnp.einsum("...lc,chd->...lhd", norm(x), p["gate"])) * made, p["out"]
    )


def transition(p, x):
    """The MLP of a layer."""
    return jax.nn.relu(norm(x) @ p["up"]) @ p["down"]


def triangle(p, z, equation):
    """The pair (i, j) from the pairs of both with each third residue."""
    z = norm(z)
    left, right, gate = (jax.nn.sigmoid(z @ p[f"{name}_gate"]) * (z @ p[name]) for name in ("left", "right", "out"))
    return gate * norm(jnp.einsum(equation, left, right))


def layer(p, msa, pair):
    """A layer: on msa [sequences, length, channels] and pair [length, length, channels]."""
    p = jax.tree.map(lambda w: w.astype(msa.dtype), p)
    msa = msa + attention(p["row"], msa, jnp.einsum("qkc,ch->hqk", norm(pair), p["bias"]))
    msa = msa + attention(p["column"], msa.swapaxes(0, 1)).swapaxes(0, 1)
    msa = msa + transition(p["msa_transition"], msa)
    left, right = (norm(msa) @ p["outer"][name] for name in ("left", "right"))
    pair = pair + jnp.einsum("sic,sjd,cde->ije", left, right, p["outer"]["out"]) / msa.shape[0]
    pair = pair + triangle(p["outgoing"], pair, "ikc,jkc->ijc")
    pair = pair + triangle(p["incoming"], pair, "kjc,kic->ijc")
    pair = pair + attention(p["starting"], pair)
    pair = pair + attention(p["ending"], pair.swapaxes(0, 1)).swapaxes(0, 1)
    return msa, pair + transition(p["pair_transition"], pair)


def workload(
    batch: int = 1,
    num_sequences: int = 128,
    length: int = 256,
    num_layers: int = 48,
    msa: int = 256,
    pair: int = 128,
    num_heads: int = 8,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the square error of distances, by pair."""

    def attends(width):
        head = (width, num_heads, width // num_heads)
        return {**dict.fromkeys(("q", "k", "v", "gate"), head), "out": (num_heads, width // num_heads, width)}

    def widens(width):
        return {"up": (width, 4 * width), "down": (4 * width, width)}

    shapes = {"row": attends(msa), "column": attends(msa), "msa_transition": widens(msa), "bias": (pair, num_heads)}
    shapes |= {"outer": {"left": (msa, 32), "right": (msa, 32), "out": (32, 32, pair)}, "pair_transition": widens(pair)}
    names = ("left", "right", "out", "left_gate", "right_gate", "out_gate")
    shapes |= dict.fromkeys(("outgoing", "incoming"), dict.fromkeys(names, (pair, pair)))
    shapes |= dict.fromkeys(("starting", "ending"), attends(pair))

    def init(key):
        make = lambda shape: 0.05 * jax.random.normal(key, (num_layers, *shape))  # noqa: E731
        return jax.tree.map(make, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))

    def loss(params, batch):
        def body(tables, p):
            return jax.checkpoint(layer, prevent_cse=False)(p, *tables), None

        def stack(msa, pair):
            return jax.lax.scan(body, (msa.astype(dtype), pair.astype(dtype)), params)[0][1].astype(jnp.float32)

        return jnp.mean((jax.vmap(stack)(batch["msa"], batch["pair"]) - batch["target"]) ** 2)

    pairs = jax.ShapeDtypeStruct((batch, length, length, pair), jnp.float32)
    tables = {"msa": jax.ShapeDtypeStruct((batch, num_sequences, length, msa), jnp.float32), "pair": pairs, "target": pairs}
    return jaxremat.Workload(loss=loss, params=jax.eval_shape(init, jax.random.key(0)), batch=tables, init=init)
