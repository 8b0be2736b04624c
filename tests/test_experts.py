"""Experts: the router by hand, the two dispatches against each other and against transformers, the router's loss, the FLOPs."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.errors import UsageError
from jaxremat.model.decoder_workload import decoder_workload, logical_axes, make_loss, matrix_axes
from jaxremat.model.experts import Experts, route, router_loss
from jaxremat.model.flops import model_flops
from jaxremat.model.presets import preset
from jaxremat.model.transformer import Decoder, layer_names, param_shapes
from jaxremat.policy.spec import NONE
from jaxremat.step.step import abstract_args, make_step
from jaxremat.xla import hlo
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.flops import count_step_flops, executed_flops
from tests.decoder_flops import experts_that_run, flops_without_recompute
from tests.equality import relative_difference
from tests.helpers import quick_jit
from tests.small_models import DROPOUT_KEY, LLAMA_NO_DROPOUT, TOKENS, init_params

#: Four experts, of which each token goes to two.
MODEL = replace(LLAMA_NO_DROPOUT, name="experts", num_experts=4, experts_per_token=2, router_loss=0.1)


def layer_and_input(config: ModelConfig) -> tuple[Experts, Any, jax.Array]:
    """The layer, parameters of a size that makes routing uneven, and an input."""
    layer, x_BTD = Experts(config), jax.random.normal(jax.random.key(1), (2, 5, config.embed_dim))
    params = jax.tree.map(lambda leaf: 20 * np.asarray(leaf), quick_jit(layer.init)(jax.random.key(2), x_BTD))
    return layer, params, x_BTD


def test_a_token_goes_to_the_experts_of_its_largest_logits():
    """Softmax of the logits 0, log 2, log 5 and log 2 is 0.1, 0.2, 0.5 and 0.2; of equal experts the first is taken."""
    logits_BTE = np.log(np.array([[[1.0, 2.0, 5.0, 2.0], [4.0, 3.0, 2.0, 1.0]]], np.float32))
    configs = (replace(MODEL, normalize_routing=False), MODEL)
    (weights, experts, use), (normalized, _, _) = quick_jit(lambda x: [route(config, x) for config in configs])(logits_BTE)
    assert experts.tolist() == [[[2, 1], [0, 1]]]
    np.testing.assert_allclose(weights, [[[0.5, 0.2], [0.4, 0.3]]], rtol=1e-6)
    np.testing.assert_allclose(use, [[0.5, 1.0, 0.5, 0.0], [0.25, 0.25, 0.35, 0.15]], rtol=1e-6)
    np.testing.assert_allclose(normalized, [[[5 / 7, 2 / 7], [4 / 7, 3 / 7]]], rtol=1e-6)
    one_layer = replace(MODEL, num_layers=1)
    by_hand = 4 * (0.5 * 0.25 + 1.0 * 0.25 + 0.5 * 0.35)
    np.testing.assert_allclose(router_loss(one_layer, use), by_hand, rtol=1e-6)
    even = jnp.array([[0.5] * 4, [0.25] * 4])
    np.testing.assert_allclose(router_loss(one_layer, even), 2.0, rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("dispatch", ["dense", "ragged"])
def test_the_layer_is_the_weighted_sum_of_its_experts(dispatch):
    config = replace(MODEL, dispatch=dispatch)
    layer, params, x_BTD = layer_and_input(config)
    use_2E: Any
    y_BTD, use_2E = quick_jit(layer.apply)(params, x_BTD)
    p, x_BTD = params["params"], np.asarray(x_BTD)
    weights, experts, want_use = (np.asarray(part) for part in route(config, jnp.asarray(x_BTD @ p["router"]["kernel"])))
    want = np.zeros_like(x_BTD)
    for b, t, k in np.ndindex(2, 5, 2):
        e, x = experts[b, t, k], x_BTD[b, t]
        gate = x @ p["wi_0"][e]
        hidden = gate / (1 + np.exp(-gate)) * (x @ p["wi_1"][e])
        want[b, t] += weights[b, t, k] * (hidden @ p["wo"][e])
    np.testing.assert_allclose(y_BTD, want, atol=1e-5 * np.abs(want).max())
    np.testing.assert_allclose(use_2E, want_use, rtol=1e-5)
    assert len(np.unique(experts)) == 4


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, {"mlp": "gelu", "normalize_routing": False}, {"experts_per_token": 1}])
def test_both_dispatches_have_one_result_and_gradients(changes):
    dense = replace(MODEL, **changes)
    _, params, x_BTD = layer_and_input(dense)

    def value(params: Any, x_BTD: jax.Array, config: ModelConfig) -> jax.Array:
        y_BTD: Any
        use_2E: Any
        y_BTD, use_2E = Experts(config).apply(params, x_BTD)
        return jnp.mean(jnp.tanh(y_BTD)) + jnp.sum(use_2E**2)

    def both(params: Any, x_BTD: jax.Array) -> Any:
        configs = (dense, replace(dense, dispatch="ragged"))
        return [jax.value_and_grad(value, argnums=(0, 1))(params, x_BTD, config) for config in configs]

    (loss, grads), (other_loss, other_grads) = quick_jit(both)(params, x_BTD)
    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
    assert relative_difference(other_grads, grads) < 1e-5


@pytest.mark.full
def test_the_routers_loss_is_added_once_and_reaches_the_router():
    alone, with_loss = (replace(MODEL, router_loss=coefficient) for coefficient in (0.0, 0.1))
    params = init_params(MODEL, "none")
    both = [jax.value_and_grad(make_loss(model, NONE, "xla")) for model in (alone, with_loss)]
    losses = [quick_jit(loss)(params, TOKENS, DROPOUT_KEY) for loss in both]
    sown: Any
    _, sown = quick_jit(partial(Decoder(MODEL).apply, mutable=["router"]))({"params": params}, TOKENS[:, :-1])
    added = router_loss(MODEL, sown["router"]["use"][0])
    assert 1.9 < added < 4
    np.testing.assert_allclose(losses[1][0] - losses[0][0], 0.1 * added, rtol=1e-4)
    routers = [grads["layers"]["mlp"]["router"]["kernel"] for _, grads in losses]
    assert float(jnp.abs(routers[1] - routers[0]).max()) > 1e-6


def test_names_and_axes():
    names = [value.name for value in layer_names(MODEL, 2, 8)]
    assert names[-4:] == ["router_logits", "mlpwi_0", "mlpwi_1", "mlpwo"]
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): (path, leaf.shape)
        for path, leaf in jax.tree.leaves_with_path(param_shapes(MODEL))
    }
    assert logical_axes(*leaves["layers/mlp/router/kernel"]) == (None, "embed", None)
    assert logical_axes(*leaves["layers/mlp/wi_1"]) == (None, "expert", "expert_embed", "mlp")
    assert logical_axes(*leaves["layers/mlp/wo"]) == (None, "expert", "mlp", "expert_embed")
    for name in ("wi_0", "wi_1", "wo"):
        numbers = matrix_axes(*leaves[f"layers/mlp/{name}"])
        assert numbers is not None
        assert (numbers.reduction_axis, numbers.output_axis) == ((2,), (3,))


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"experts_per_token": 5}, "--experts-per-token 5"),
        ({"router_loss": -1.0}, "--router-loss -1.0"),
        ({"dispatch": "sparse"}, "--dispatch 'sparse'"),
        ({"num_experts": 0}, "--num-experts 0"),
    ],
)
def test_what_makes_no_sense_is_rejected(changes, got):
    with pytest.raises(UsageError) as caught:
        replace(MODEL, **changes)
    assert [part for part in got.split() if part not in caught.value.got] == []


# FLOPs.

#: Of sizes that XLA doesn't pad.
WIDE = replace(MODEL, vocab_size=512, embed_dim=128, num_heads=2, num_kv_heads=1, head_dim=64, mlp_dim=256, num_experts=8)
TRAIN = TrainConfig(seq_len=128)


@pytest.mark.full
@pytest.mark.parametrize(("dispatch", "run_for_a_token"), [("dense", 8), ("ragged", 16)])
def test_flops_are_those_of_the_experts_that_run(dispatch, run_for_a_token, h100):
    """By hand: three matmuls of an expert, forward and twice backward. XLA computes a ragged product for all 8 experts."""
    model = replace(WIDE, dispatch=dispatch, dtype="bfloat16")
    workload = decoder_workload(model, TRAIN, 4, "xla")
    step, args = make_step(workload, TRAIN, NONE), abstract_args(workload, TRAIN)
    compiled = lower_and_compile(step, args, h100)
    executed = executed_flops(compiled.module).total
    assert executed == count_step_flops(compiled.jaxpr).total == flops_without_recompute(model, 4, 128, "xla")
    assert experts_that_run(model) == run_for_a_token
    of_one_expert = 3 * 4 * 128 * model.num_layers * 3 * 2 * 128 * 256
    plain = replace(model, num_experts=1)
    of_router = 3 * 4 * 128 * model.num_layers * 2 * 128 * 8
    assert executed - flops_without_recompute(plain, 4, 128, "xla") == (run_for_a_token - 1) * of_one_expert + of_router
    assert model_flops(model, 4, 128) - model_flops(plain, 4, 128) == of_one_expert + of_router


def test_a_ragged_product_of_a_library_counts_each_row_once():
    """XLA's text of what it gives to cuDNN where a GPU is attached: the product, and the gradient of the kernels."""
    of_rows, of_sums = (
        "lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        "lhs_contracting_dims={0}, rhs_contracting_dims={0}",
    )
    text = f"""HloModule ragged

ENTRY %main (x: bf16[1024,256], w: bf16[8,256,512], y: bf16[1024,512], s: s32[8]) -> (bf16[1024,512], bf16[8,256,512]) {{
  %x = bf16[1024,256]{{1,0}} parameter(0)
  %w = bf16[8,256,512]{{2,1,0}} parameter(1)
  %y = bf16[1024,512]{{1,0}} parameter(2)
  %s = s32[8]{{0}} parameter(3)
  %product = bf16[1024,512]{{1,0}} ragged-dot(%x, %w, %s), {of_rows}, lhs_ragged_dims={{0}}, rhs_group_dims={{0}}
  %of_kernels = bf16[8,256,512]{{2,1,0}} ragged-dot(%x, %y, %s), {of_sums}, lhs_ragged_dims={{0}}
  ROOT %both = (bf16[1024,512]{{1,0}}, bf16[8,256,512]{{2,1,0}}) tuple(%product, %of_kernels)
}}
"""
    assert executed_flops(hlo.parse(text)).matmul_flops == 2 * 2 * 1024 * 256 * 512


def test_published_models_compute_as_many_parameters_as_they_say():
    """Mixtral is said to use 12.9e9 parameters for a token, and Qwen3-30B-A3B 3.3e9: two FLOPs each, but for the embedding."""
    for name, billions in (("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3)):
        config = preset(name).config
        per_token = model_flops(config, 1, 1) / 6
        assert (per_token + config.vocab_size * config.embed_dim) / 1e9 == pytest.approx(billions, abs=0.06)


# Against transformers.


def of_torch(tensor: Any) -> jax.Array:
    return jnp.asarray(tensor.detach().numpy())


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "dispatch"), [("mixtral", "dense"), ("qwen3_moe", "ragged"), ("qwen3_moe_not_normalized", "dense")]
)
def test_the_layer_is_transformers_layer(family, dispatch):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

    sizes = dict(hidden_size=16, num_experts_per_tok=2)
    if family == "mixtral":
        config = transformers.MixtralConfig(**sizes, intermediate_size=24, num_local_experts=4)
        block, normalize = mixtral.MixtralSparseMoeBlock(config), True
    else:
        normalize = family == "qwen3_moe"
        config = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=24, num_experts=4, norm_topk_prob=normalize)
        block = qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(3, 5, 16)
    wi_0, wi_1 = jnp.split(of_torch(block.experts.gate_up_proj), 2, axis=1)
    params = {
        "router": {"kernel": of_torch(block.gate.weight).T},
        "wi_0": wi_0.swapaxes(1, 2),
        "wi_1": wi_1.swapaxes(1, 2),
        "wo": of_torch(block.experts.down_proj).swapaxes(1, 2),
    }
    ours = replace(MODEL, embed_dim=16, mlp_dim=24, num_layers=1, dispatch=dispatch, normalize_routing=normalize)
    y_BTD: Any
    use_2E: Any
    other_use_2E: Any
    apply = quick_jit(Experts(ours).apply)
    y_BTD, use_2E = apply({"params": params}, of_torch(x))
    want = of_torch(block(x))
    np.testing.assert_allclose(y_BTD, want, atol=1e-5 * float(jnp.abs(want).max()))
    _, other_use_2E = apply({"params": params}, of_torch(-x))  # as if by a second layer
    module: Any = mixtral if family == "mixtral" else qwen3_moe
    want_loss = of_torch(module.load_balancing_loss_func((block.gate(x)[0], block.gate(-x)[0]), 4, 2))
    np.testing.assert_allclose(router_loss(replace(ours, num_layers=2), use_2E + other_use_2E), want_loss, rtol=1e-5)
