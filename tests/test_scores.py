"""The lint's rule on attention that makes its scores: by their bytes at the peak, or by the time of their kernels."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest

import jaxremat
from jaxremat.answer.planned import plan_run
from jaxremat.answer.records import answer_plan
from jaxremat.chips.speed import DeviceSpeed
from jaxremat.config import TrainConfig
from jaxremat.trial.trials import Trials
from jaxremat.workload.factory import factory_of
from jaxremat.xla.clock import predict_step_time
from jaxremat.xla.compile import Compilation
from jaxremat.xla.lint import find
from jaxremat.xla.lint_input import lint_input
from jaxremat.xla.step_facts import Finding
from tests.lint_inputs import MIB, attends, made_up, mapped, memory

Layer = Callable[[Any, jax.Array], jax.Array]
Step = Callable[..., Any]


def found(done: Compilation, speed: DeviceSpeed | None = None) -> list[Finding]:
    """What the rule finds in a compiled step, on a device whose fused attention is cuDNN's."""
    return [one for one in find(lint_input(done, fused_attention="cudnn", speed=speed)) if one.rule == "scores-stored"]


def test_scores_that_fused_attention_would_not_store():
    """Not where it takes no such shapes, where the device has none, where they are few bytes, or in the built-in decoder."""
    facts = made_up()["scores-stored"]
    assert [one.num_bytes for one in find(facts)] == [4 * MIB]
    for width, dtype, length in ((64, "float16", 512), (128, "bfloat16", 512), (8, "bfloat16", 512)):
        assert len(find(replace(facts, jaxpr=attends(width, dtype, length)))) == 1
    for width, dtype, length in ((64, "float32", 512), (136, "bfloat16", 512), (12, "bfloat16", 512), (64, "bfloat16", 511)):
        assert find(replace(facts, jaxpr=attends(width, dtype, length))) == ()
    assert facts.memory_map
    (scores,) = facts.memory_map.buffers
    package = str(Path(jaxremat.__file__).parent / "model" / "attention.py")
    for other in (
        replace(facts, fused_attention=""),
        replace(facts, memory=replace(facts.memory, argument_bytes=2**30)),
        replace(facts, memory_map=memory(replace(scores, source=f"{package}:7"))),
        replace(facts, memory_map=memory(replace(scores, shape="bf16[4,512,1024]"))),
    ):
        assert find(other) == ()


def einsums(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), axis=-1), v)


def masked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / 8
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)


def jaxs_own(implementation: Literal["xla", "cudnn"]) -> Callable[..., jax.Array]:
    return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)


def attending(attention: Callable[..., jax.Array], around: Callable[[Layer], Layer] = lambda layer: layer) -> Step:
    """Layers of an attention and a wide product, each run as `around` says."""

    def layer(weights: Any, x: jax.Array) -> jax.Array:
        q, k, v, out, *wide = weights
        x = x + attention(*((x @ w).reshape(*x.shape[:2], 4, 64) for w in (q, k, v))).reshape(x.shape) @ out
        return x + jax.nn.gelu(x @ wide[0]) @ wide[1] if wide else x

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        for weights in layers:
            x = around(layer)(weights, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return lambda layers, x: jax.tree.map(lambda w, g: w - g.astype(w.dtype), layers, jax.grad(loss)(layers, x))


@pytest.mark.full
def test_scores_are_found_in_any_attention_and_fused_attention_takes_fewer_bytes(h100):
    """Of two einsums, of a softmax in float32 with a mask, and of JAX's own attention without a fused kernel."""
    x = jax.ShapeDtypeStruct((8, 1024, 256), jnp.bfloat16)
    weights = [jax.ShapeDtypeStruct((4, 256, 256), jnp.bfloat16) for _ in range(3)]
    good = mapped(attending(jaxs_own("cudnn")), (weights, x), h100)
    assert found(good) == []
    for attention in (einsums, masked, jaxs_own("xla")):
        bad = mapped(attending(attention), (weights, x), h100)
        (finding,) = found(bad)
        assert "test_scores.py:" in finding.evidence
        saved = bad.memory.total_bytes - good.memory.total_bytes
        assert saved == pytest.approx(finding.num_bytes, rel=0.25)


@pytest.mark.full
def test_the_trial_of_a_plan_says_that_scores_are_stored(h100):
    """The policy of a plan may be too long to type into another command, so its record has what the map of the memory shows."""

    def layer(x: jax.Array, kernels: jax.Array) -> tuple[jax.Array, None]:
        return x + einsums(*((x @ kernel).reshape(*x.shape[:2], 4, 64) for kernel in kernels)).reshape(x.shape), None

    def loss(layers: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(layer, x, layers)[0].astype(jnp.float32) ** 2)

    params, batch = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((3, 3, 256, 256), (8, 1024, 256)))
    workload = jaxremat.Workload(loss=loss, params=params, batch=batch)
    emitted: list[Any] = []
    trials = Trials(factory_of(workload), TrainConfig(), h100, 2**40)
    answer_plan(plan_run(trials, losses=("own",), batch=8, max_batch=8), "time", emitted.append)
    assert [one.rule for one in emitted[-1].findings] == ["scores-stored"]


def spent_of(finding: Finding) -> tuple[float, float]:
    """What a finding's evidence says of a part and of the whole, in milliseconds or GiB."""
    part, whole = re.findall(r"([\d,.]+) (?:ms|GiB) of the step's ([\d,.]+)", finding.evidence)[0]
    return float(part.replace(",", "")), float(whole.replace(",", ""))


@pytest.mark.full
def test_scores_that_are_recomputed_are_found_by_their_time_and_fused_attention_takes_less(h100):
    """Under checkpoints, at whose peak there are few scores. Not where they take little, of float32, or of fused attention."""

    def compiled(
        attention: Callable[..., jax.Array], length: int = 256, dtype: str = "bfloat16", wide: int = 4096
    ) -> Compilation:
        x = jax.ShapeDtypeStruct((8 * 1024 // length, length, 256), dtype)
        shapes = (*4 * [(256, 256)], (256, wide), (wide, 256))
        weights = [tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes) for _ in range(8)]
        return mapped(attending(attention, jax.checkpoint), (weights, x), h100)

    good = compiled(jaxs_own("cudnn"))
    fused_ms = 1e3 * predict_step_time(good.module, h100.speed).step_s
    for attention in (einsums, masked, jaxs_own("xla")):
        done = compiled(attention)
        (finding,) = found(done, h100.speed)
        spent_ms, step_ms = spent_of(finding)
        assert finding.num_bytes == 0
        assert finding.source.rpartition(":")[0].endswith("test_scores.py")
        assert step_ms - spent_ms == pytest.approx(fused_ms, rel=0.2)
        assert 0.2 < (share := spent_of(found(done)[0]))[0] / share[1] < 1
    for sound in (good, compiled(einsums, length=16, wide=8192), compiled(einsums, dtype="float32")):
        assert found(sound, h100.speed) == found(sound) == []
