"""The choice of attention gives its reason, and never picks cuDNN's where the whole step can't compile with it."""

import re
from dataclasses import replace
from typing import Any

import jax
import pytest

import jaxremat
from jaxremat.chips.target import Target, load_target
from jaxremat.config import ModelConfig
from jaxremat.errors import CompileError, UsageError
from jaxremat.mesh.sharding import tracing_for
from jaxremat.model.attention import choose_attention, traced_attention, xla_attention
from jaxremat.model.presets import preset
from jaxremat.model.transformer import every_layer_name
from jaxremat.xla.compile import lower_and_compile
from tests.helpers import compiled, quick_jit

SMALL = replace(preset("tiny").config, num_layers=1, vocab_size=64, dropout=0.0)


@pytest.mark.parametrize(
    ("changes", "seq_len", "reason"),
    [
        ({}, 77, {77}),
        ({"dtype": "float32"}, 64, {"float32"}),
        ({"head_dim": 256}, 64, {256}),
        ({"sliding_window": 32, "window_pattern": "sf", "num_layers": 3}, 64, {2, 3, 32}),
        ({"attention_softcap": 50.0}, 64, {50}),
        ({"attention": "xla"}, 64, set()),
    ],
)
def test_where_cudnn_cannot_run_the_reason_has_the_numbers(changes, seq_len, reason, h100):
    choice = choose_attention(replace(ModelConfig(), **changes), seq_len, h100)
    assert choice.implementation == "xla"
    assert {str(value) for value in reason} <= set(re.findall(r"\w+", choice.reason))


@pytest.mark.full
@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": 32}, {"sliding_window": 64, "window_pattern": "sf"}, {"attention": "cudnn"}]
)
def test_where_cudnn_runs_it_is_chosen(changes, h100):
    assert choose_attention(replace(ModelConfig(), **changes), 64, h100).implementation == "cudnn"


def attentions(function: Any, *args: Any) -> set[str]:
    """Which attention the traced function has."""
    text = str(jax.make_jaxpr(function)(*args))
    return {name for name, sign in (("cudnn", "dot_product_attention_fwd"), ("xla", "exp")) if sign in text}


def test_a_decoder_takes_the_attention_of_what_it_is_compiled_for(h100, monkeypatch):
    """From Python as in a command, also where the same jitted function was traced for another device before."""
    targets = []
    monkeypatch.setattr("jaxremat.model.attention._refusal", lambda *args: targets.append(args[-1]) or "")  # which compiles
    decoder, tokens = jaxremat.Decoder(SMALL), jax.ShapeDtypeStruct((2, 64), "int32")
    params = jax.eval_shape(decoder.init, jax.random.key(0), tokens)
    apply = jax.jit(decoder.apply)
    assert attentions(apply, params, tokens) == {"xla"}
    with tracing_for(h100):
        assert attentions(apply, params, tokens) == {"cudnn"}
        assert attentions(jaxremat.Decoder(SMALL, "none", "xla").apply, params, tokens) == {"xla"}
        assert attentions(jaxremat.Decoder(replace(SMALL, attention="xla")).apply, params, tokens) == {"xla"}
    assert attentions(apply, params, tokens) == {"xla"}
    assert {*targets} == {h100}
    with pytest.raises(UsageError):
        traced_attention(replace(SMALL, attention="cudnn"), 64)


@pytest.mark.full
def test_a_layer_compiled_from_python_has_cudnn_s_attention(h100):
    """The trial compile happens inside the trace, also under a user's own mesh, and where cuDNN refuses the length."""
    layer, x = jaxremat.Block(SMALL), jax.ShapeDtypeStruct((2, 64, SMALL.embed_dim), SMALL.dtype)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)

    def loss(params: Any, x: Any) -> jax.Array:
        y: Any = layer.apply(params, x)
        return y.astype("float32").sum()

    assert "fmha" in lower_and_compile(jax.grad(loss), (params, x), h100).hlo_text
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("mine",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), tracing_for(h100):
        assert traced_attention(SMALL, 72) == "cudnn"
        assert traced_attention(SMALL, 77) == "xla"


@pytest.fixture
def t4(h100) -> Target:
    """A GPU before Ampere."""
    return load_target("t4")


def gradient(x: jax.Array, **how: Any) -> jax.Array:
    """That of the attention by XLA's kernels."""
    return jax.grad(lambda x: xla_attention(x, x, x, **how).astype("float32").sum())(x)


X = jax.ShapeDtypeStruct((2, 64, 4, 32), "bfloat16")


def test_before_ampere_there_is_no_fused_attention(t4):
    choice = choose_attention(ModelConfig(), 64, t4)
    assert choice.implementation == "xla"
    assert {"7.5", "8.0"} <= set(choice.reason.replace(",", " ").split())
    with pytest.raises(UsageError) as caught:
        choose_attention(ModelConfig(attention="cudnn"), 64, t4)
    assert "--seq-len" not in caught.value.next_step


@pytest.mark.full
@pytest.mark.parametrize("config", [SMALL, replace(SMALL, num_layers=2, sliding_window=16, window_pattern="sf")])
def test_before_ampere_products_of_bfloat16_have_no_algorithm_of_their_own(config, t4, h100):
    """And the values have the same names as elsewhere, so that a policy by names has the same meaning."""
    with tracing_for(t4):
        named = every_layer_name(config, 1, 64, "xla")
    assert named == every_layer_name(config, 1, 64, "xla") != []
    for target, dtype, times in ((h100, "bfloat16", True), (t4, "bfloat16", False), (t4, "float16", True)):
        with tracing_for(target):
            text = str(jax.make_jaxpr(gradient)(jax.ShapeDtypeStruct(X.shape, dtype)))
        assert ("F16_F32" in text) == times


@pytest.mark.full
@pytest.mark.parametrize("how", [{"is_causal": True}, {"is_causal": True, "local_window_size": (15, 0)}, {"mask": True}])
def test_before_ampere_attention_compiles(how, t4):
    """Its values are those of JAX's. JAX's own is rejected, as on the GPU itself, and the error says why."""
    how = {key: jax.numpy.ones((1, 1, 64, 64), bool) if key == "mask" else value for key, value in how.items()}
    assert lower_and_compile(lambda x: gradient(x, **how), (X,), t4).memory.total_bytes > 0
    x = jax.random.normal(jax.random.key(0), X.shape, "bfloat16")
    with tracing_for(t4):
        ours = quick_jit(lambda x: gradient(x, **how))(x)
    theirs = quick_jit(lambda x: gradient(x, **how))(x)
    assert jax.numpy.allclose(ours.astype("float32"), theirs.astype("float32"), atol=0.05)
    with pytest.raises(CompileError) as caught:
        lower_and_compile(lambda x: jax.nn.dot_product_attention(x, x, x, implementation="xla"), (X,), t4)
    assert "8.0" in caught.value.cause
    assert "float16" in caught.value.next_step


def test_a_cpu_has_no_cudnn():
    cpu = load_target("cpu")
    choice = choose_attention(ModelConfig(), 64, cpu)
    assert choice.implementation == "xla"
    assert "CPU" in choice.reason
    with pytest.raises(UsageError) as caught:
        choose_attention(ModelConfig(attention="cudnn"), 64, cpu)
    assert "--attention cudnn" in caught.value.got
    assert "--attention auto" in caught.value.next_step


@pytest.mark.full
@pytest.mark.parametrize(("positions", "longer"), [("learned", True), ("rope", False)])
def test_lengths_beyond_the_position_table_are_named_with_the_flag_that_makes_it_longer(positions, longer, h100):
    with pytest.raises(UsageError) as caught:
        choose_attention(replace(SMALL, attention="cudnn", positions=positions), 129, h100)
    assert "--seq-len 128 or 130" in caught.value.next_step
    assert ("--max-seq-len" in caught.value.next_step) == longer


@pytest.mark.full
@pytest.mark.parametrize(
    ("implementation", "seq_len", "changes"),
    [
        ("cudnn", 200, {"num_kv_heads": 2, "head_dim": 40, "dtype": "bfloat16"}),
        ("cudnn", 6, {"num_kv_heads": 4, "head_dim": 16, "dtype": "float16"}),
        ("xla", 77, {"dtype": "bfloat16"}),
        ("xla", 128, {"dtype": "float32"}),
        ("xla", 128, {"head_dim": 20}),
        ("xla", 128, {"head_dim": 136}),
    ],
)
def test_the_decision_is_that_of_the_whole_step(implementation, seq_len, changes, h100):
    """Where the trial says that cuDNN runs, the step with cuDNN compiles; where it says not, that step doesn't."""
    model = replace(SMALL, num_heads=4, max_seq_len=300, **changes)
    assert choose_attention(model, seq_len, h100).implementation == implementation
    if implementation == "cudnn":
        compiled(h100, "nothing", model, batch=3, seq_len=seq_len)
    else:
        with pytest.raises(CompileError) as caught:
            compiled(h100, "nothing", model, batch=3, seq_len=seq_len)
        assert "cuDNN" in str(caught.value)
