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

from jaxremat.chips.target import Target, load_target
from jaxremat.config import ModelConfig
from jaxremat.errors import CompileError, UsageError
from jaxremat.mesh.sharding import traced_target
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
    of_shapes = target.chip.attention_obstacle(target.compute_capability) or _model_obstacle(config, seq_len)
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


def _model_obstacle(config: ModelConfig, seq_len: int) -> str:
    """What the model's attention has at this length that the fused kernel hasn't.

    It is empty if there is no such thing.
    """
    if config.attention_softcap:
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
    window = config.windows(seq_len)[0]
    return _refusal(seq_len, window, config.num_heads, config.num_kv_heads, config.head_dim, config.dtype, target)


@functools.cache
def _refusal(seq_len: int, window: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, target: Target) -> str:
    local = (window - 1, 0) if window < seq_len else None
    fused: Any = target.chip.attention.name

    def loss(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
        context_BTNH = jax.nn.dot_product_attention(
            q_BTNH, k_BTKH, v_BTKH, is_causal=True, local_window_size=local, implementation=fused
        )
        return context_BTNH.astype(jnp.float32).sum()

    q, k = (jax.ShapeDtypeStruct((1, seq_len, n, head_dim), dtype) for n in (num_heads, num_kv_heads))
    try:
        lower_and_compile(jax.grad(loss, argnums=(0, 1, 2)), (q, k, k), target, suggest=False)
    except CompileError as error:
        return str(error.__cause__ or error).strip().splitlines()[0].rstrip(".")
    return ""
