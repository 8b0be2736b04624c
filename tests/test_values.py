"""Values that can't be meant are refused by name: sizes, fields of a Workload, weights, and what a user's code does."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import jaxremat
from jaxremat.chips.target import load_target
from jaxremat.cli.command import parse_flags
from jaxremat.config import MOST, ModelConfig, TrainConfig
from jaxremat.errors import UsageError, UserCodeError
from jaxremat.mesh.axes import MAX_DEVICES
from jaxremat.model.attention import choose_attention
from jaxremat.model.transformer import param_shapes
from jaxremat.model.weights import load_safetensors
from jaxremat.session.flags import RunFlags
from jaxremat.session.request import check_run
from jaxremat.workload.user_code import user_code

WHOLE = [
    (config, field.name)
    for config in (ModelConfig, TrainConfig)
    for field in dataclasses.fields(config)
    if field.type is int and field.name != "seed"
]
PARAMS = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


@pytest.mark.parametrize(("config", "name"), WHOLE, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("value", [-1, MOST + 1, 10**30])
def test_whole_numbers_have_bounds(config, name, value):
    with pytest.raises(UsageError) as caught:
        config(**{name: value})
    assert caught.value.got.startswith(f"--{name.replace('_', '-')} ")
    assert caught.value.allowed


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--devices", MAX_DEVICES + 1),
        ("--devices", 10**20),
        ("--nodes", 10**20),
        ("--network-gbps", 10**7),
        ("--network-gbps", -1),
        ("--num-layers", 10**13),
        ("--accumulate", 10**18),
        ("--steps", 10**20),
        ("--mesh", "fsdp=99999,data=99999"),
    ],
)
def test_flags_have_bounds(flag, value):
    argv = ["--model", "tiny", flag, str(value), *(["--devices", "8"] if flag == "--nodes" else [])]
    with pytest.raises(UsageError) as caught:
        check_run(parse_flags(RunFlags, argv))
    assert flag in caught.value.got
    assert caught.value.next_step


@pytest.mark.parametrize("share", [0.0, -1.0, 2.0, float("nan")])
def test_a_share_of_the_features_is_checked_where_rope_does_not_use_it(share):
    with pytest.raises(UsageError) as caught:
        ModelConfig(positions="learned", rotary_fraction=share)
    assert caught.value.got.startswith("--rotary-fraction ")


def test_float16_where_attention_has_no_product_of_it():
    with pytest.raises(UsageError) as caught:
        check_run(parse_flags(RunFlags, ["--model", "tiny", "--seq-len", "1", "--dtype", "float16"]))
    assert "--seq-len 1" in caught.value.got
    assert "--seq-len 2" in caught.value.next_step
    with pytest.raises(UsageError) as caught:
        choose_attention(ModelConfig(dtype="float16"), 64, load_target("cpu"))
    assert "--dtype float16" in caught.value.got
    assert "--dtype bfloat16" in caught.value.next_step


def repr_of(value: object) -> str:
    """The same in each process, which an address isn't."""
    return getattr(value, "__name__", None) or str(value)[:40]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_tokens", value) for value in (-1, 0, float("nan"), float("inf"), "many", True)),
        *(("model_flops", value) for value in (-1.0, float("nan"), "many")),
        *(("optimizer", value) for value in ("adam", optax.adamw, 5)),
        *(("microbatches", value) for value in (0, 2, True, "many")),
        *(("layers", value) for value in (5, ["blocks_*"], ("blocks_*", 5))),
        *(
            (name, 5)
            for name in ("logical_axes", "matrix_axes", "init", "batches", "name", "joined_microbatches", "samples")
        ),
        ("params", {"w": jax.ShapeDtypeStruct(("four", 4), jnp.float32)}),
    ],
    ids=repr_of,
)
def test_a_field_of_a_workload_is_checked(field, value):
    with pytest.raises(UsageError) as caught:
        jaxremat.Workload(**{"loss": loss, "params": PARAMS, "batch": BATCH, field: value})
    assert field in caught.value.got
    assert caught.value.next_step


def test_fields_that_can_be_meant_pass():
    fields = {"num_tokens": np.int64(8), "model_flops": 1e9, "optimizer": optax.adamw(1e-3), "layers": ("a_*", "b_*")}
    jaxremat.Workload(loss=loss, params=PARAMS, batch=BATCH, **fields)
    jaxremat.Workload(loss=loss, params=PARAMS, batch=BATCH, optimizer=optax.with_extra_args_support(optax.sgd(1.0)))


@pytest.mark.parametrize("donated", [2, -1, (0, 7), "0", 1.0])
def test_only_arguments_of_a_step_are_donated(donated):
    with pytest.raises(UsageError) as caught:
        jaxremat.Workload(step=loss, args=(PARAMS, BATCH), donate_argnums=donated)
    assert "donate_argnums" in caught.value.got


class Odd(BaseException):
    """An exception that `except Exception` doesn't catch."""


@pytest.mark.parametrize("error", [Odd("no"), SystemExit(0), RecursionError(), ZeroDivisionError()])
def test_whatever_a_users_code_raises_is_its_error(error):
    with pytest.raises(UserCodeError), user_code("the loss"):
        raise error


@pytest.mark.parametrize("code", [0, 7])
def test_a_users_code_cannot_end_the_process_without_an_answer(code):
    leave = os._exit
    with pytest.raises(UserCodeError) as caught, user_code("the import of m.py"):
        os._exit(code)
    assert str(code) in caught.value.got
    assert os._exit is leave


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()])
def test_a_machine_without_memory_and_ctrl_c_are_no_fault_of_the_users(error):
    with pytest.raises(type(error)), user_code("the loss"):
        raise error


TINY = ModelConfig(
    vocab_size=8, num_layers=1, embed_dim=4, num_heads=1, num_kv_heads=1, head_dim=4, mlp_dim=4, max_seq_len=4
)


def test_weights_of_whole_numbers_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    shape = param_shapes(TINY)["embedding"]["embedding"].shape
    save_file({"wte.weight": np.zeros(shape, np.int8), **others()}, path)
    with pytest.raises(UsageError) as caught:
        load_safetensors(path, TINY)
    assert "wte.weight" in caught.value.got
    assert "I8" in caught.value.got


def test_two_tensors_of_one_name_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    zeros = np.zeros((8, 4), np.float32)
    save_file({"wte.weight": zeros, "transformer.wte.weight": zeros, **others()}, path)
    with pytest.raises(UsageError) as caught:
        load_safetensors(path, TINY)
    assert "transformer.wte.weight" in caught.value.got


def others() -> dict[str, np.ndarray]:
    """The tensors of the one layer, beside the embedding."""
    sizes = {"attn.c_attn": (4, 12), "attn.c_proj": (4, 4), "mlp.c_fc": (4, 4), "mlp.c_proj": (4, 4)}
    found = {f"h.0.{name}.weight": np.zeros(size, np.float32) for name, size in sizes.items()}
    found |= {f"h.0.{name}.bias": np.zeros(size[1], np.float32) for name, size in sizes.items()}
    norms = ("h.0.ln_1", "h.0.ln_2", "ln_f")
    found |= {f"{norm}.{part}": np.zeros(4, np.float32) for norm in norms for part in ("weight", "bias")}
    return found | {"wpe.weight": np.zeros((4, 4), np.float32)}
