"""LoRA adapters and quantized kernels of the decoder: equal to what is written by hand, and frozen but for the adapters."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxremat.config import ModelConfig, Quantized, TrainConfig
from jaxremat.config.lora import LINEAR_LAYERS, parse_lora
from jaxremat.errors import UsageError
from jaxremat.mesh.sharding import RULES
from jaxremat.model.decoder_workload import decoder_workload, make_loss
from jaxremat.model.hf import hf_config
from jaxremat.model.linear import NF4, dequantize, quantize, quantized_dot, with_adapters
from jaxremat.model.param_axes import logical_axes
from jaxremat.model.transformer import Decoder, param_shapes
from jaxremat.model.weights import load_safetensors
from jaxremat.policy.apply import remat
from jaxremat.policy.grammar import parse
from jaxremat.policy.state import split_trained
from jaxremat.policy.tree import combine, path_text
from jaxremat.session.flags import ModelFlags, RunFlags
from jaxremat.session.request import check_run
from jaxremat.step.step import init_state
from jaxremat.workload.load import load_factory
from jaxremat.xla.compile import lower_and_compile
from tests.helpers import quick_jit
from tests.trainings import OWN, error_of, losses, trained

BASE = ModelConfig(
    "lora", 61, 2, 64, 2, 1, 32, 128, positions="rope", mlp="swiglu", norm="rmsnorm", use_bias=False, qkv_bias=True,
    tie_embeddings=False, dtype="float32", max_seq_len=16,
)  # fmt: skip
LORA = replace(BASE, lora="4", lora_alpha=6.0)
TRAIN = TrainConfig(seq_len=12)


def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 13)), jnp.int32)


@functools.cache
def params(config: ModelConfig) -> Any:
    """First values, with random ones in place of the zeros of `lora_b`."""
    workload = decoder_workload(config, TRAIN, 2, "xla")
    assert workload.init
    made = quick_jit(workload.init)(jax.random.key(0))
    random = np.random.default_rng(1)

    def one(path: Any, leaf: jax.Array) -> Any:
        is_b = path[-1].key == "lora_b"
        return random.standard_normal(leaf.shape, np.float32) / 8 if is_b else leaf

    return jax.tree_util.tree_map_with_path(one, made)


def value_and_grads(config: ModelConfig, policy: str = "none") -> tuple[jax.Array, Any]:
    floats, others = split_trained(params(config), lambda path: "lora_" in path)
    loss = make_loss(config, parse(policy), "xla")
    return quick_jit(jax.value_and_grad(lambda floats: loss(combine(floats, others), tokens(), jax.random.key(0))))(floats)


def merged(tree: Any) -> Any:
    """The parameters of the plain decoder: each kernel with its adapter's product added, by hand."""
    if not isinstance(tree, dict):
        return tree
    if "lora_a" not in tree:
        return {name: merged(part) for name, part in tree.items()}
    a, b, kernel = tree["lora_a"], tree["lora_b"], tree["kernel"]
    product = jnp.einsum("lir,lro->lio", a.reshape(2, -1, 4), b.reshape(2, 4, -1)).reshape(kernel.shape)
    rest = {name: leaf for name, leaf in tree.items() if not name.startswith("lora_")}
    return rest | {"kernel": kernel + 6.0 / 4 * product}


@pytest.mark.full
def test_gradients_are_those_of_an_adapter_by_hand():
    floats, others = split_trained(params(LORA), lambda path: "lora_" in path)
    plain = make_loss(BASE, parse("none"), "xla")

    def by_hand(floats: Any) -> jax.Array:
        return plain(merged(combine(floats, others)), tokens(), jax.random.key(0))

    want_value, want = quick_jit(jax.value_and_grad(by_hand))(floats)
    value, got = value_and_grads(LORA)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want))
    assert len(jax.tree.leaves(got)) == 2 * len(LINEAR_LAYERS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), got, want)


@pytest.mark.full
@pytest.mark.parametrize(("how", "policy"), [("int8", "none"), ("nf4", "dots")])
def test_a_quantized_base_is_the_dequantized_one(how, policy):
    """Loss and gradients are those of the kernels that the codes stand for, under a policy that recomputes, too."""
    config = replace(LORA, quantize_base=how)

    def dequantized(tree: Any, name: str = "") -> Any:
        if not isinstance(tree, dict):
            return tree
        if "kernel_scale" not in tree:
            return {of: dequantized(part, of) for of, part in tree.items()}
        num_in = 2 if name == "out" else 1
        of_layer = functools.partial(dequantize, how=how, num_in=num_in, dtype=jnp.float32)
        kernel = jax.vmap(of_layer)(tree["kernel"], tree["kernel_scale"])
        return {of: leaf for of, leaf in tree.items() if of != "kernel_scale"} | {"kernel": kernel}

    floats, others = split_trained(dequantized(params(config)), lambda path: "lora_" in path)
    loss = make_loss(LORA, parse("none"), "xla")
    want = quick_jit(jax.value_and_grad(lambda floats: loss(combine(floats, others), tokens(), jax.random.key(0))))(floats)
    got = value_and_grads(config, policy)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(("how", "worst"), [("int8", 1 / 254), ("nf4", 0.16)])
def test_quantized_kernels_are_near(how, worst):
    """The error is at most half of a step of int8, and half of the widest gap of NF4's values, times the largest of a block."""
    kernel = np.random.default_rng(0).standard_normal((2, 64, 24), np.float32)
    codes, scales = quantize(jnp.asarray(kernel), how, 2)
    found = dequantize(codes, scales, how, 2, jnp.float32)
    assert (codes.shape, scales.shape) == (kernel.shape, (1 if how == "int8" else 2, 24))
    blocks = (kernel - np.asarray(found)).reshape(scales.shape[0], -1, 24)
    largest = np.abs(kernel.reshape(blocks.shape)).max(1, keepdims=True)
    assert (np.abs(blocks) <= 1.001 * worst * largest).all()
    again, _ = quantize(found, how, 2)
    np.testing.assert_array_equal(again, codes)


@pytest.mark.full
@pytest.mark.parametrize("config", [replace(LORA, lora="4:query,wo"), replace(LORA, quantize_base="nf4", scan_layers=False)])
def test_a_base_gets_adapters(config):
    """The tree of the decoder with adapters: the base's own values, or their codes, and adapters that add nothing yet."""
    plain = replace(config, lora="", quantize_base="none")
    base = quick_jit(lambda: Decoder(plain).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"])()
    made, shapes = with_adapters(config, base), param_shapes(config)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), made) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype.name), shapes
    )
    loss, of_plain = (make_loss(one, parse("none"), "xla") for one in (config, plain))
    got, want = (quick_jit(f)(tree, tokens(), jax.random.key(0)) for f, tree in ((loss, made), (of_plain, base)))
    np.testing.assert_allclose(got, want, rtol=1e-6 if config.quantize_base == "none" else 0.02)


def test_the_values_of_nf4_are_sorted_and_have_zero():
    assert (np.diff(NF4) > 0).all()
    assert {-1.0, 0.0, 1.0} <= set(NF4.tolist())


def test_a_quantized_kernel_is_no_residual():
    """The backward pass reads the codes again: nothing of the kernel's size in the compute dtype is saved."""
    codes, scales = jax.eval_shape(lambda: quantize(jnp.zeros((64, 32)), "nf4", 1))
    x = jax.ShapeDtypeStruct((3, 64), jnp.bfloat16)
    _, pullback = jax.eval_shape(
        lambda *args: jax.vjp(lambda x: quantized_dot(x, args[1], args[2], "nf4", 1), args[0]), x, codes, scales
    )
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(pullback) if leaf.size == 64 * 32} == {"uint4"}


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("16", tuple(LINEAR_LAYERS)),
        ("16:query,value", ("query", "value")),
        ("16:q_proj,v_proj,q*", ("query", "value")),
        ("16:wi_*,o_proj", ("wi_0", "wi_1", "out")),
    ],
)
def test_the_layers_of_a_text(text, layers):
    found = parse_lora(text)
    assert found
    assert (found.rank, found.layers) == (16, layers)


@pytest.mark.parametrize("text", ["0", "x", "16:", "16:query,qkv", "-1", "1e3", "99999"])
def test_a_text_that_is_no_adapter(text):
    with pytest.raises(UsageError) as caught:
        replace(BASE, lora=text)
    assert "--lora" in caught.value.got


@pytest.mark.parametrize(("how", "policy", "num_matmuls"), [("nf4", "dots", 2), ("int8", "dots", 2), ("nf4", "nothing", 3)])
def test_a_policy_of_matmuls_saves_those_of_a_quantized_kernel(how: Quantized, policy: str, num_matmuls: int):
    """One of the forward and one of the backward pass, and the recomputed one."""
    x, kernel = jax.ShapeDtypeStruct((8, 64), "float32"), jnp.zeros((64, 32))
    codes, scales = jax.eval_shape(lambda: quantize(kernel, how, 1))

    def loss(x: Any, codes: Any, scales: Any) -> Any:
        layer = remat(lambda x: jnp.sin(quantized_dot(x, codes, scales, how, 1)), policy)
        return layer(x).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(x, codes, scales))
    assert text.count("dot_general[") == num_matmuls


@pytest.mark.parametrize(
    "changes", [{"quantize_base": "nf4"}, {"lora": "4", "quantize_base": "int3"}, {"lora": "4", "lora_alpha": 0}]
)
def test_fields_that_do_not_go_together(changes):
    with pytest.raises(UsageError):
        replace(BASE, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": "4"}, "rank 4 in all linear layers; alpha 8; frozen kernels in float32"),
        ({"lora": "4:q*", "quantize_base": "nf4"}, "rank 4 in query; alpha 8; frozen kernels in nf4, and"),
    ],
)
def test_the_heading_says_which_adapters_there_are(changes: dict[str, Any], said: str):
    notes = decoder_workload(replace(BASE, **changes), TRAIN, 1, "xla").notes
    assert said in notes[1]


def test_a_flag_beside_a_file_is_the_cause_of_its_own_error():
    with pytest.raises(UsageError) as caught:
        hf_config("examples/configs/Qwen3-8B.json", lora="16:wrong")
    assert caught.value.got == "--lora got 'wrong'"


def test_a_model_of_ones_own_gets_the_lines_to_write():
    for fields in (ModelFlags(lora="16"), ModelFlags(lora="16", quantize_base="nf4")):
        with pytest.raises(UsageError) as caught:
            check_run(RunFlags(model="mine.py:workload", fields=fields))
        assert caught.value.got.startswith("--lora 16 ")
        assert all(part in caught.value.next_step for part in ("qwix.apply_lora_to_model", "trainable='*_lora_*'"))


@pytest.mark.full
@pytest.mark.parametrize("base", ["", "int8", "nf4"])
def test_qwix_s_adapters_are_those_by_hand(base):
    """Loss and gradients of the example are those of the plain model whose kernels have the adapters' products added."""
    import qwix

    sizes = ["seq_len=12", "vocab_size=61", "num_layers=2", "width=32", "num_heads=2", "dtype=float32"]
    adapted = load_factory("examples/lora_own_model.py:workload", [*sizes, "rank=4", "alpha=6.0", f"base={base}"])(batch=2)
    plain = load_factory("examples/linen_unrolled.py:workload", [*sizes, "dropout=0.0"])(batch=2)
    assert adapted.init
    assert plain.loss
    loss_of_plain, made, random = plain.loss, quick_jit(adapted.init)(jax.random.key(0)), np.random.default_rng(1)

    def with_b(path: Any, leaf: jax.Array) -> Any:
        is_b = path_text(path).endswith("lora_b")
        return random.standard_normal(leaf.shape, np.float32) / 8 if is_b else leaf

    floats, others = adapted.split(jax.tree_util.tree_map_with_path(with_b, made))
    assert {path_text(path).split("/")[-1] for path, _ in jax.tree.leaves_with_path(floats)} == {
        "kernel_lora_a",
        "kernel_lora_b",
    }

    def by_hand(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        if "kernel_lora_a" not in tree:
            return {name: by_hand(part) for name, part in tree.items()}
        kernel = qwix.dequantize(tree["kernel"].array) if base else tree["kernel"]
        rest = {name: leaf for name, leaf in tree.items() if "lora_" not in name}
        return rest | {"kernel": kernel + 6.0 / 4 * tree["kernel_lora_a"] @ tree["kernel_lora_b"]}

    def want_loss(floats: Any) -> jax.Array:
        return loss_of_plain(by_hand(combine(floats, others)), tokens(), jax.random.key(0))

    want = quick_jit(jax.value_and_grad(want_loss))(floats)
    loss = adapted.loss_with(parse("nothing" if base else "dots"))
    got = quick_jit(jax.value_and_grad(lambda floats: loss(combine(floats, others), tokens())))(floats)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


EXPERTS = replace(LORA, num_experts=4, experts_per_token=2)


def test_experts_have_no_adapters():
    """Layers of attention have them. Layers of experts alone are rejected, and a line says what is left out."""
    with pytest.raises(UsageError) as caught:
        replace(EXPERTS, lora="4:wi_*,down_proj")
    assert caught.value.allowed.endswith("query, key, value, out")
    workload = decoder_workload(EXPERTS, TRAIN, 2, "xla")
    trained = {path_text(path) for path, _ in jax.tree.leaves_with_path(workload.trained_params)}
    assert {path.split("/")[-2] for path in trained} == {"query", "key", "value", "out"}
    assert any("experts" in note for note in workload.notes)
    assert not any("experts" in note for note in decoder_workload(LORA, TRAIN, 2, "xla").notes)


def test_only_the_adapters_are_trained():
    request = check_run(RunFlags(model="llama3-8b", fields=ModelFlags(lora="16:query,value"), target="h100-80gb"))
    made = request.model.factory(request, None, None).at(None, TRAIN)
    assert made.num_trained == 32 * 16 * (2 * 4096 + 4096 + 1024)
    assert made.num_params - made.num_trained == 8_030_261_248
    assert {str(leaf.dtype) for _, leaf in made.frozen} == {"bfloat16"}


def test_adapters_lie_as_their_kernels_do():
    """Each part beside a kernel has the kernel's own axes, and an axis of its own for the rank or for the blocks."""
    known = {name for name, _ in RULES} | {None, "head_dim"}
    for path, leaf in jax.tree.leaves_with_path(param_shapes(replace(LORA, quantize_base="nf4"))):
        axes = logical_axes(path, leaf.shape)
        assert len(axes) == leaf.ndim
        assert set(axes) <= known, path_text(path)
        if path[-1].key in ("lora_a", "lora_b"):
            assert "embed" in axes or "mlp" in axes or "heads" in axes or "kv_heads" in axes


#: A small Llama as transformers writes it.
LLAMA = {
    **{"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True},
}


def saved(folder: Path, seed: int) -> Path:
    """A folder with the config and with random weights."""
    random = np.random.default_rng(seed)
    layer = {
        **{"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32)},
        **{"self_attn.o_proj": (32, 32), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)},
        **{"input_layernorm": (32,), "post_attention_layernorm": (32,)},
    }
    shapes = {"embed_tokens": (256, 32), "norm": (32,)}
    shapes |= {f"layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}
    folder.mkdir()
    tensors = {f"model.{n}.weight": 0.3 * random.standard_normal(shape, np.float32) for n, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.mark.full
@pytest.mark.any_jax
def test_a_training_begins_with_weights_and_resumes(tmp_path):
    """The first loss is that of the base, checkpoints have the adapters alone, and the losses are those of one run."""
    weights = saved(tmp_path / "weights", 1)
    model = ("--hf", str(weights / "config.json"), "--lora", "2", "--dtype", "float32")
    flags = (*model, "--policy", "dots", "--seq-len", "16", "--batch", "2", "--target", "cpu", "--sample-tokens", "0")
    flags += ("--eval-every", "0", "--weights", str(weights))
    first = trained(tmp_path / "a", *flags, "--num-steps", "2")
    found = trained(tmp_path / "a", *flags, "--num-steps", "4")
    assert found[:2] == first
    assert losses(found) == losses(trained(tmp_path / "b", *flags, "--num-steps", "4"))
    stored = (tmp_path / "a" / "checkpoints" / "4" / "state" / "_METADATA").read_text()
    assert {name.rpartition(".")[2] for name in re.findall(r"params\.([\w.]+)", stored)} == {"lora_a", "lora_b"}

    config = replace(hf_config(weights), dtype="float32")
    plain = decoder_workload(config, TrainConfig(seq_len=16), 2, "xla")
    assert plain.loss
    assert plain.batches
    want = plain.loss(load_safetensors(weights, config), next(plain.batches()), jax.random.key(0))
    np.testing.assert_allclose(first[0]["loss"], want, rtol=1e-5)

    (weights / "model.safetensors").write_bytes((saved(tmp_path / "others", 2) / "model.safetensors").read_bytes())
    changed = error_of(*flags, "--num-steps", "6", "--run-dir", str(tmp_path / "a"))
    assert "frozen" in changed.got
    elsewhere = error_of(*flags[:-1], str(tmp_path / "others"), "--num-steps", "6", "--run-dir", str(tmp_path / "a"))
    assert "weights" in elsewhere.got


@pytest.mark.full
@pytest.mark.parametrize("how", ["nf4", "none"])
def test_first_values_need_no_stack_in_float32(h100, how):
    """A device that holds the frozen kernels can make them: not even one kernel of all layers is in float32."""
    config = replace(LORA, num_layers=32, embed_dim=256, mlp_dim=1024, dtype="bfloat16", quantize_base=how)
    workload = decoder_workload(config, TRAIN, 2, "xla")
    memory = lower_and_compile(lambda: init_state(workload, TRAIN), (), h100).memory
    assert memory.total_bytes - memory.output_bytes < 4 * 32 * 256 * 1024 / 4


@pytest.mark.full
def test_parameters_of_four_bits_are_trained_or_rejected_before_anything_is_compiled(tmp_path):
    """A training has them with jax 0.11 and later, and not with jax 0.10."""
    flags = (
        "--model",
        "tiny",
        "--lora",
        "2",
        "--quantize-base",
        "nf4",
        "--seq-len",
        "16",
        "--batch",
        "2",
        "--policy",
        "none",
    )
    flags += ("--target", "cpu", "--sample-tokens", "0", "--eval-every", "0", "--num-steps", "2")
    if jax.__version_info__ < (0, 11):
        assert "int8" in error_of(*flags).next_step
    else:
        assert len(trained(tmp_path / "run", *flags)) == 2


@pytest.mark.full
def test_weights_that_nobody_reads_or_that_are_not_there(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    for model, said in ((("--model", "tiny"), "no such file"), (("--model", f"{tmp_path}/mine.py:workload"), "mine.py")):
        assert said in error_of(*model, "--target", "cpu", "--policy", "none", "--weights", str(tmp_path / "absent")).got
