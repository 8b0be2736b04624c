"""Which attention a run takes: the chip's fused kernel where that runs, else XLA's.

A trial compile finds out whether the fused kernel runs: the gradient of one attention, with the model's heads and the run's
sequence length, is compiled for the target. That takes about a second. JAX and the kernel's library each have a check of their
own, and JAX's looks at the GPU in this machine instead of the target. The trial compile goes through both checks, as the step
will.

    AttentionChoice(fused.name, "it compiles for this target and these shapes")   # fused = target.chip.attention
    AttentionChoice("xla", f"{fused.title} can't: the target is a CPU")

JAX's attention by XLA requests products of bfloat16 that some GPUs lack. `xla_attention` has XLA's default products there.
"""

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxremat.chips.chip import FusedAttention
from jaxremat.chips.target import Target, load_target
from jaxremat.config import ModelConfig
from jaxremat.errors import CompileError, UsageError
from jaxremat.mesh.sharding import traced_target
from jaxremat.policy import maxtext
from jaxremat.policy.jax_private import ResidualName
from jaxremat.policy.offload import traces_for_gpu
from jaxremat.policy.program import Equation, bind_equation, eval_program, flatten
from jaxremat.xla.compile import lower_and_compile

#: How far up and down a length that the fused kernel runs is looked for.
_FAR = 64


@dataclass(frozen=True)
class AttentionChoice:
    """Which attention a run takes, and why."""

    implementation: str
    reason: str


def choose_attention(config: ModelConfig, seq_len: int, target: Target) -> AttentionChoice:
    """`config.attention`, with `auto` settled by a trial compile.

    Args:
        config: the model.
        seq_len: tokens per sequence.
        target: what the step is compiled for.

    Raises:
        UsageError: the fused attention was requested by name where it cannot run; the message names nearby lengths that it
            runs. Or the model computes in float16 on a CPU.
        MissingDependencyError: a library of the chip's maker couldn't be loaded.
    """
    if not target.chip.is_gpu and config.dtype == "float16":
        raise UsageError(
            "--dtype float16 was given, and the target is a CPU",
            cause="JAX's attention takes products of float16 that XLA has for GPUs alone",
            next_step="--dtype bfloat16, or --dtype float32",
        )
    if config.attention == "xla":
        return AttentionChoice("xla", "requested")
    fused = target.chip.attention
    of_shapes = target.chip.attention_obstacle(target.compute_capability) or _model_obstacle(config, seq_len, fused)
    if config.attention not in ("auto", fused.name):
        of_shapes = f"the target's fused attention is {fused.name}"
    obstacle = of_shapes or _compile_obstacle(config, seq_len, target)
    if config.attention == "auto":
        if obstacle:
            return AttentionChoice("xla", f"{fused.title} can't: {obstacle}")
        return AttentionChoice(fused.name, "it compiles for this target and these shapes")
    if not obstacle:
        return AttentionChoice(fused.name, "requested")
    lengths = [] if of_shapes else list(_lengths_that_do(config, seq_len, target))
    longer = (
        " (with --max-seq-len)" if config.positions == "learned" and max(lengths, default=0) > config.max_seq_len else ""
    )
    next_step = f"--seq-len {' or '.join(map(str, lengths))}{longer}, or " if lengths else ""
    raise UsageError(
        f"--attention {config.attention} cannot run here",
        cause=obstacle,
        next_step=f"{next_step}--attention auto, which takes {fused.title} where it can run",
    )


def traced_attention(config: ModelConfig, seq_len: int) -> str:
    """The attention of a layer that is traced now: `xla`, or the chip's fused one.

    It is that of `choose_attention` for what the layer is compiled for: the target that jaxremat compiles for, or else JAX's
    default device. The trial compile is in a thread of its own, where JAX knows neither the trace that is under way nor a
    mesh that the caller has set.
    """
    if config.attention == "xla":
        return "xla"
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(choose_attention, config, seq_len, _target_now()).result().implementation


def xla_attention(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, **how: Any) -> jax.Array:
    """JAX's attention by XLA's kernels, in products that the traced target has.

    JAX requests products of bfloat16 with sums in float32, which XLA rejects for a GPU without them. There the products have
    XLA's default precision. The names and shapes of all values stay the same.

    Args:
        q_BTNH: the queries.
        k_BTKH: the keys.
        v_BTKH: the values.
        how: further arguments of `jax.nn.dot_product_attention`.
    """
    attention = functools.partial(jax.nn.dot_product_attention, implementation="xla", **how)
    if q_BTNH.dtype != jnp.bfloat16 or not _target_now().lacks_bf16:
        return attention(q_BTNH, k_BTKH, v_BTKH)
    arrays = (q_BTNH, k_BTKH, v_BTKH)
    return eval_program(flatten(jax.make_jaxpr(attention)(*arrays)), arrays, _bind_by_default)[0]


def _bind_by_default(equation: Equation, values: Sequence[Any]) -> Sequence[Any]:
    """The equation's results, with XLA's default precision for a product."""
    if equation.kind == "dot_general":
        equation = replace(equation, eqn=equation.eqn.replace(params={**equation.eqn.params, "precision": None}))
    return bind_equation(equation, values)


def _target_now() -> Target:
    """The target of what is traced now.

    It is the one that jaxremat compiles for, or else JAX's default device.
    """
    return traced_target() or _default_target(traces_for_gpu())


@functools.cache
def _default_target(is_gpu: bool) -> Target:
    return load_target("gpu" if is_gpu else "cpu")


def attend_fused(
    fused: FusedAttention, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, config: ModelConfig
) -> jax.Array:
    """The chip's fused attention of a model that has one window for all layers.

    What it saves has the checkpoint name `context`, if `fused` names it.
    """
    window = config.windows(q_BTNH.shape[1])[0]
    return fused.attend(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        scale=config.query_pre_attn_scalar**-0.5 if config.query_pre_attn_scalar else None,
        window=window if window < q_BTNH.shape[1] else 0,
        softcap=config.attention_softcap,
        block=config.attention_block,
        name=ResidualName(maxtext.CONTEXT),
    )


def _model_obstacle(config: ModelConfig, seq_len: int, fused: FusedAttention) -> str:
    """What the model's attention has at this length that the fused kernel hasn't.

    It is empty if there is no such thing.
    """
    if config.attention_softcap and not fused.has_softcap:
        return f"its kernel has no soft-cap, and the model caps scores at {config.attention_softcap:g}"
    windows = config.windows(seq_len)
    if len(set(windows)) > 1:
        which = f"{windows.count(min(windows))} of {len(windows)} layers have a window of {min(windows)} tokens"
        return f"its window is a constant, and {which}"
    return ""


def _lengths_that_do(config: ModelConfig, seq_len: int, target: Target) -> Iterator[int]:
    """The nearest length below and the nearest above that the fused kernel runs.

    There is nothing where another length doesn't help.
    """
    for nearby in (range(seq_len - 1, max(0, seq_len - _FAR), -1), range(seq_len + 1, seq_len + _FAR)):
        worth_a_try = (n for n in nearby if n == nearby[0] or n % 8 == 0)
        found = next((n for n in worth_a_try if not _compile_obstacle(config, n, target)), None)
        if found:
            yield found


def _compile_obstacle(config: ModelConfig, seq_len: int, target: Target) -> str:
    """Why the fused kernel can't run the model's attention at this length; empty where it can."""
    of_heads = ("num_heads", "num_kv_heads", "head_dim", "dtype", "attention_softcap", "attention_block")
    same = {name: getattr(config, name) for name in of_heads}
    return _refusal(ModelConfig(num_layers=1, sliding_window=config.windows(seq_len)[0], **same), seq_len, target)


@functools.cache
def _refusal(config: ModelConfig, seq_len: int, target: Target) -> str:
    fused = target.chip.attention

    def loss(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
        return attend_fused(fused, q_BTNH, k_BTKH, v_BTKH, config).astype(jnp.float32).sum()

    q, k = (
        jax.ShapeDtypeStruct((1, seq_len, n, config.head_dim), config.dtype) for n in (config.num_heads, config.num_kv_heads)
    )
    try:
        lower_and_compile(jax.grad(loss, argnums=(0, 1, 2)), (q, k, k), target, suggest=False)
    except CompileError as error:
        return str(error.__cause__ or error).strip().splitlines()[0].rstrip(".")
    return ""
