"""Which attention a run takes: cuDNN's fused kernel where that runs, else XLA's.

A trial compile finds out whether cuDNN runs: the gradient of one attention, with the model's heads and the run's sequence
length, is compiled for the target. That takes about a second. JAX and cuDNN each have a check of their own, and JAX's looks
at the GPU in this machine instead of the target. The trial compile goes through both checks, as the step will.

    AttentionChoice("cudnn", "it compiles for this target and these shapes")
    AttentionChoice("xla", "cuDNN can't: the target is a CPU")
"""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxremat.config import ModelConfig
from jaxremat.errors import CompileError, UsageError
from jaxremat.mesh.sharding import traced_target
from jaxremat.policy.offload import traces_for_gpu
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.target import Target, load_target

#: How far up and down a length that cuDNN runs is looked for.
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
        UsageError: `cudnn` was requested by name where it cannot run; the message names nearby lengths that it runs. Or the
            model computes in float16 on a CPU.
        MissingDependencyError: ptxas or cuDNN couldn't be loaded.
    """
    if target.platform == "cpu" and config.dtype == "float16":
        raise UsageError(
            "--dtype float16 was given, and the target is a CPU",
            cause="JAX's attention takes products of float16 that XLA has for GPUs alone",
            next_step="--dtype bfloat16, or --dtype float32",
        )
    if config.attention == "xla":
        return AttentionChoice("xla", "asked for")
    obstacle = _model_obstacle(config, seq_len)
    obstacle = "the target is a CPU" if target.platform == "cpu" else obstacle or _cudnn_obstacle(config, seq_len, target)
    if config.attention == "auto":
        if obstacle:
            return AttentionChoice("xla", f"cuDNN can't: {obstacle}")
        return AttentionChoice("cudnn", "it compiles for this target and these shapes")
    if not obstacle:
        return AttentionChoice("cudnn", "asked for")
    lengths = (
        []
        if target.platform == "cpu" or _model_obstacle(config, seq_len)
        else list(_lengths_that_do(config, seq_len, target))
    )
    longer = (
        " (with --max-seq-len)" if config.positions == "learned" and max(lengths, default=0) > config.max_seq_len else ""
    )
    next_step = f"--seq-len {' or '.join(map(str, lengths))}{longer}, or " if lengths else ""
    raise UsageError(
        "--attention cudnn cannot run here",
        cause=obstacle,
        next_step=f"{next_step}--attention auto, which takes cuDNN where it can run",
    )


def traced_attention(config: ModelConfig, seq_len: int) -> str:
    """The attention, `xla` or `cudnn`, of a layer that is traced now.

    It is that of `choose_attention` for what the layer is compiled for: the target that jaxremat compiles for, or else JAX's
    default device. The trial compile is in a thread of its own, where JAX knows neither the trace that is under way nor a
    mesh that the caller has set.
    """
    if config.attention == "xla":
        return "xla"
    target = traced_target() or _default_target(traces_for_gpu())
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(choose_attention, config, seq_len, target).result().implementation


@functools.cache
def _default_target(is_gpu: bool) -> Target:
    return load_target("gpu" if is_gpu else "cpu")


def _model_obstacle(config: ModelConfig, seq_len: int) -> str:
    """What the model's attention has at this length that cuDNN's kernel hasn't.

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
    """The nearest length below and the nearest above that cuDNN runs.

    There is nothing where another length doesn't help.
    """
    for nearby in (range(seq_len - 1, max(0, seq_len - _FAR), -1), range(seq_len + 1, seq_len + _FAR)):
        worth_a_try = (n for n in nearby if n == nearby[0] or n % 8 == 0)
        found = next((n for n in worth_a_try if not _cudnn_obstacle(config, n, target)), None)
        if found:
            yield found


def _cudnn_obstacle(config: ModelConfig, seq_len: int, target: Target) -> str:
    """Why cuDNN can't run the model's attention at this length on `target`; empty where it can."""
    window = config.windows(seq_len)[0]
    return _refusal(seq_len, window, config.num_heads, config.num_kv_heads, config.head_dim, config.dtype, target)


@functools.cache
def _refusal(seq_len: int, window: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, target: Target) -> str:
    local = (window - 1, 0) if window < seq_len else None

    def loss(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
        context_BTNH = jax.nn.dot_product_attention(
            q_BTNH, k_BTKH, v_BTKH, is_causal=True, local_window_size=local, implementation="cudnn"
        )
        return context_BTNH.astype(jnp.float32).sum()

    q, k = (jax.ShapeDtypeStruct((1, seq_len, n, head_dim), dtype) for n in (num_heads, num_kv_heads))
    try:
        lower_and_compile(jax.grad(loss, argnums=(0, 1, 2)), (q, k, k), target, suggest=False)
    except CompileError as error:
        return str(error.__cause__ or error).strip().splitlines()[0].rstrip(".")
    return ""
