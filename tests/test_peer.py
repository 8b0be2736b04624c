"""The PyTorch side is the same model and step, and each of its kinds of checkpointing keeps what it says."""

import json
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxremat.model.data import batches, load_text
from jaxremat.model.loss import cross_entropy
from jaxremat.model.presets import PRESETS, preset
from jaxremat.model.transformer import Decoder

pytestmark = pytest.mark.full  # PyTorch takes seconds to import
pytest.importorskip("torch", reason='PyTorch is missing: pip install "jaxremat[peer]"')

import torch  # noqa: E402
import torch._dynamo.utils as dynamo  # noqa: E402
import torch._functorch.config as functorch_config  # noqa: E402

from experiments.peer import model as peer  # noqa: E402
from experiments.peer import step as peer_step  # noqa: E402
from tests.helpers import quick_jit  # noqa: E402

TINY = replace(preset("tiny").config, dtype="float32", dropout=0.0)
KINDS = {
    "gpt": TINY,
    "llama": replace(
        TINY,
        positions="rope",
        norm="rmsnorm",
        mlp="swiglu",
        use_bias=False,
        tie_embeddings=False,
        num_kv_heads=2,
        qk_norm=True,
    ),
    "gemma": replace(
        TINY, positions="rope", norm="rmsnorm-1p", mlp="geglu", use_bias=False, scale_embeddings=True, num_kv_heads=1
    ),
}


def copied(params, config) -> dict[str, torch.Tensor]:
    """Flax's parameters under PyTorch's names: kernels as `[out, in]`, one layer's slice of each stack."""
    state = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys, value = [key.key for key in path], np.array(leaf)
        if keys[0] != "layers":
            name = {"embedding": "embedding"}.get(keys[0], ".".join(keys))
            state[name] = torch.from_numpy(value.T.copy() if keys == ["output"] else value)
            continue
        *module, kind = keys[1:]
        for layer, of_layer in enumerate(value):
            if kind == "kernel":
                num_in = 2 if module[-1] == "out" else 1
                of_layer = of_layer.reshape(int(np.prod(of_layer.shape[:num_in])), -1).T
            elif kind == "bias":
                of_layer = of_layer.reshape(-1)
            name = f"layers.{layer}.{'.'.join(module)}.{'weight' if kind == 'kernel' else kind}"
            state[name] = torch.from_numpy(of_layer.copy())
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_model(kind):
    """The JAX model's parameters, copied, give the same loss and the same gradient of the embedding."""
    config = KINDS[kind]
    text = next(batches(load_text(), 2, 32, 0))
    decoder = Decoder(config)
    params = quick_jit(decoder.init)(jax.random.key(0), text[:, :-1])["params"]

    def loss(params):
        logits: Any = decoder.apply({"params": params}, text[:, :-1])
        return cross_entropy(logits, jnp.asarray(text[:, 1:]))

    expected, grads = quick_jit(jax.value_and_grad(loss))(params)
    model = peer.Decoder(config)
    model.load_state_dict(copied(params, config))  # strict: every parameter has its like, of the same shape
    tokens = torch.from_numpy(text).long()
    found = peer.cross_entropy(model.hidden(tokens[:, :-1]), model.head, tokens[:, 1:])
    found.backward()
    assert found.item() == pytest.approx(float(expected), rel=1e-5)
    assert model.embedding.grad is not None
    np.testing.assert_allclose(model.embedding.grad.numpy(), grads["embedding"]["embedding"], rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in PRESETS if not preset(name).config.has_experts])
def test_the_same_number_of_parameters(name):
    """Of each preset without experts, which the other model doesn't have."""
    with torch.device("meta"):
        model = peer.Decoder(preset(name).config)
    assert sum(parameter.numel() for parameter in model.parameters()) == preset(name).num_params


def saved_bytes(arm: peer_step.Arm, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytes that the layers keep for the backward pass, parameters apart; and how many graphs were compiled."""
    torch._dynamo.reset()
    dynamo.counters.clear()
    monkeypatch.setattr(functorch_config, "activation_memory_budget", 0.3 if arm == "budget" else 1.0)
    model = peer.Decoder(replace(TINY, num_layers=6), peer_step.wrap_layer(arm, "aot_eager"))
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.hidden(torch.zeros((2, 64), dtype=torch.long))
    return sum(t.numel() * t.element_size() for t in kept.values()), dynamo.counters["stats"]["unique_graphs"]


def test_arms_keep_what_they_say(monkeypatch):
    """Full checkpointing keeps each layer's input; all layers share one compilation."""
    kept = {arm: saved_bytes(arm, monkeypatch) for arm in get_args(peer_step.Arm)}
    assert {graphs for _, graphs in kept.values()} == {1}
    none, full, selective, budget = (num_bytes for num_bytes, _ in kept.values())
    layer_input = 2 * 64 * TINY.embed_dim * 4
    assert 6 * layer_input <= full <= 9 * layer_input  # and the final norm's
    assert full < budget < none / 2
    assert full < selective < none


def test_arms_train_alike(capsys):
    """The same losses to rounding, dropout included; one JSON line a batch."""
    losses = []
    for arm in ("none", "full", "selective"):
        flags = ["--device", "cpu", "--backend", "eager", "--batches", "1", "2", "--steps", "2"]
        assert peer_step.main(["--model", "tiny", "--arm", arm, *flags]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["batch"] for row in rows] == [1, 2]
        assert all(row["tokens_per_s"] == pytest.approx(row["batch"] * 64 / row["step_s"]) for row in rows)
        assert {row["num_params"] for row in rows} == {124_672}
        losses.append([row["last_loss"] for row in rows])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][1] < losses[0][0]


@pytest.mark.parametrize("knee", [0, 40])
def test_the_largest_batch(knee):
    """Found within its tries where memory is a line, and near it where there is an extra above some batch."""
    limit, tried = 1000, []

    def measure(batch):
        tried.append(batch)
        needed = 100 + 7 * batch + (30 if knee and batch > knee else 0)
        return {"batch": batch, "peak_bytes": needed} if needed <= limit else {"batch": batch, "error": "out of memory"}

    rows = list(peer_step.largest_batch(measure, (8, 16), limit))
    largest = 124 if knee else 128
    ran = [row["batch"] for row in rows if "error" not in row]
    assert len(tried) <= 2 + peer_step.NUM_TRIES
    assert len(tried) == len(set(tried))
    if not knee:
        assert (max(ran), min(row["batch"] for row in rows if "error" in row)) == (largest, largest + 1)
    else:
        assert 0.9 * largest <= max(ran) <= largest
