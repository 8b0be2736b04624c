"""The examples: short files that are found, planned and explained as they are, and that a policy doesn't change.

Sizes are tiny. Each is given as a user gives it, by --model-arg.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jaxremat import find_layers, parse
from jaxremat.answer.workload_estimate import estimate_kinds, trace_kinds
from jaxremat.cli import explain, run
from jaxremat.trial.trials import Trials
from jaxremat.workload.load import load_factory
from jaxremat.workload.workload import Workload, loss_and_aux
from tests.equality import relative_difference
from tests.helpers import quick_jit

FOLDER = Path(__file__).parent.parent / "examples"
#: All but README's, which `tests/test_docs.py` reads, and the one on a mesh of its own, which `tests/test_own_mesh.py` compiles.
NAMES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in ("first", "own_mesh"))
#: The largest difference of the gradients of two programs, as a share of the largest gradient.
TOLERANCE = 1e-6
#: Where gradients go through the statistics of BatchNorm, whose sums are rounded otherwise when they run again.
LOOSER = {"encoder_batchnorm": 1e-5}


@dataclass(frozen=True)
class Example:
    """What is known of an example.

    Attributes:
        args: arguments for a tiny model.
        found: the kinds of layers of the tiny model: label, how they are found, and how many there are.
        num_params: the number of parameters at the default sizes, in millions, and `num_layers` of the layers there.
        aux: the keys of the auxiliary values.
    """

    args: dict[str, Any]
    found: tuple[tuple[str, str, int], ...]
    num_params: float
    num_layers: int
    aux: tuple[str, ...] = ()


LANGUAGE = {"seq_len": 16, "vocab_size": 64, "num_layers": 3, "width": 32, "num_heads": 2}
EXAMPLES = {
    "linen_unrolled": Example(LANGUAGE, (("Block_0 to Block_2", "scope", 3),), 124.4, 12),
    "linen_scan": Example(
        {**LANGUAGE, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 64}, (("at linen_scan.py", "scan", 3),), 134.5, 30
    ),
    "nnx_transformer": Example(LANGUAGE, (("at nnx_transformer.py", "repeat", 3),), 124.4, 12, ("accuracy",)),
    "equinox_transformer": Example(LANGUAGE, (("at equinox_transformer.py", "repeat", 3),), 76.9, 8),
    "plain_scan": Example({**LANGUAGE, "chunk": 8}, (("at plain_scan.py", "scan", 3),), 435.5, 24),
    "lora": Example({**LANGUAGE, "rank": 4}, (("at lora.py", "scan", 3),), 444.5, 24),
    "qlora": Example({**LANGUAGE, "rank": 4}, (("at qlora.py", "scan", 3),), 444.8, 24),
    "lora_own_model": Example({**LANGUAGE, "rank": 4}, (("Block_0 to Block_2", "scope", 3),), 126.8, 12),
    "encoder_batchnorm": Example(
        {
            **{"num_frames": 32, "num_features": 8, "num_labels": 16},
            **{"num_layers": 3, "width": 32, "num_heads": 2, "kernel": 3},
        },
        (("Layer_0 to Layer_2", "scope", 3),),
        8.6,
        8,
        ("Layer_0", "Layer_1", "Layer_2"),
    ),
    "vit": Example(
        {"image_size": 16, "num_classes": 10, "patch": 8, "num_layers": 3, "width": 32, "num_heads": 2},
        (("encoderblock_0 to encoderblock_2", "scope", 3),),
        22.1,
        12,
        ("accuracy",),
    ),
    "encoder_decoder": Example(
        {**LANGUAGE, "num_layers": 4},
        (("EncoderLayer_0 to EncoderLayer_3", "scope", 4), ("DecoderLayer_0 to DecoderLayer_3", "scope", 4)),
        60.8,
        12,
    ),
    "mixture_of_experts": Example(
        {**LANGUAGE, "num_layers": 4, "num_experts": 2},
        (("layer_0, layer_2", "scope", 2), ("layer_1, layer_3", "scope", 2)),
        308.3,
        12,
        ("router_loss",),
    ),
    "convnet": Example(
        {"image_size": 32, "num_classes": 10, "stages": (3, 1), "width": 8},
        (("Bottleneck_0", "scope", 1), ("Bottleneck_1, Bottleneck_2", "scope", 2), ("Bottleneck_3", "scope", 1)),
        25.6,
        16,
    ),
    "haiku_transformer": Example(LANGUAGE, (("attention to attention_2", "scope", 3),), 54.5, 12),
    "graph_net": Example(
        {"num_nodes": 8, "degree": 2, "num_features": 4, "num_layers": 3, "width": 16},
        (("at graph_net.py", "repeat", 3),),
        1.2,
        10,
    ),
    "s5": Example(
        {"seq_len": 16, "num_classes": 10, "num_layers": 3, "width": 8, "num_states": 4},
        (("layers_0 to layers_2", "scope", 3),),
        0.2,
        6,
    ),
    "unet": Example(
        {"size": 16, "channels": (8, 16)}, tuple(("at unet.py", "repeat", n) for n in (2, 1, 1, 2, 1, 1)), 23.3, 12
    ),
    "wide_resnet": Example(
        {"image_size": 8, "num_classes": 10, "num_layers": 3, "width": 8},
        3 * (("at wide_resnet.py", "repeat", 1), ("at wide_resnet.py", "repeat", 2)),
        36.5,
        12,
    ),
    "evoformer": Example(
        {"num_sequences": 4, "length": 6, "num_layers": 3, "msa": 16, "pair": 16, "num_heads": 2},
        (("at evoformer.py", "scan", 3),),
        87.3,
        48,
    ),
    "rnn": Example(
        {"seq_len": 8, "num_characters": 16, "num_layers": 2, "width": 16}, 2 * (("at rnn.py", "loop", 8),), 17.3, 2048
    ),
    "ppo": Example(
        {"num_steps": 8, "num_features": 4, "num_actions": 8, "width": 16},
        (("at ppo.py", "loop", 8),),
        0.5,
        128,
        ("entropy",),
    ),
    "pinn": Example({"num_layers": 3, "width": 16}, 9 * (("at pinn.py", "repeat", 3),), 0.5, 72),
    "diffusion_transformer": Example(
        {"channels": 4, "num_patches": 4, "num_classes": 8, "num_layers": 3, "width": 32, "num_heads": 2},
        (("at diffusion_transformer.py", "scan", 3),),
        454.9,
        24,
    ),
}
#: The loops that aren't layers, by the example that has them.
KEPT = {"plain_scan": ("a loop of 4 iterations",)}
#: A policy's gradients are compiled for these: each framework, each way of finding layers, BatchNorm, and several kinds.
COMPILED = (
    "linen_unrolled",
    "nnx_transformer",
    "equinox_transformer",
    "plain_scan",
    "encoder_batchnorm",
    "mixture_of_experts",
    *("haiku_transformer", "graph_net", "s5", "unet", "wide_resnet", "rnn", "pinn"),
)
#: Compared on both lines of JAX: a framework each.
BOTH_LINES = ("linen_unrolled", "nnx_transformer", "equinox_transformer", "plain_scan")
#: Traced in less than half a second.
QUICK_TO_TRACE = ("plain_scan",)


def cases(names: Sequence[str], any_jax: bool = False) -> list[Any]:
    """The examples as cases of a test. Those that take longer to trace are in the full tier."""
    marks = (pytest.mark.any_jax,) * any_jax
    return [pytest.param(n, marks=marks if n in QUICK_TO_TRACE else (*marks, pytest.mark.full)) for n in names]


def spec(name: str) -> str:
    return f"{FOLDER / name}.py:workload"


def loss_of(workload: Workload) -> Callable[..., Any]:
    assert workload.loss is not None
    return workload.loss


def words(name: str, **more: Any) -> list[str]:
    return [f"{key}={value}" for key, value in {**EXAMPLES[name].args, **more}.items()]


def tiny(name: str) -> Workload:
    """The example in float32, so that the only differences are those of the order of sums."""
    return load_factory(spec(name), words(name, dtype="float32"))(batch=2)


def random_values(tree: Any) -> Any:
    """Small numbers of the shapes of `tree`. Integers are from 1 to 7."""
    generator = np.random.default_rng(0)

    def values(struct: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(struct.dtype, jnp.integer):
            return jnp.asarray(generator.integers(1, 8, struct.shape), struct.dtype)
        return jnp.asarray(0.2 * generator.standard_normal(struct.shape), struct.dtype)

    return jax.tree.map(values, tree)


def checkpoints(jaxpr: Any) -> Iterator[Any]:
    """The checkpoints in a program. Those inside a checkpoint don't count."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("checkpoint", "remat", "remat2"):
            yield eqn
        else:
            for inner in core.jaxprs_in_params(eqn.params):
                yield from checkpoints(inner)


def commands(main: Any, name: str, argv: list[str], capsys: Any) -> list[dict[str, Any]]:
    """The records of a command for the tiny example of two layers at batch 2, on a GPU that isn't here."""
    args = [
        "--model",
        spec(name),
        "--model-arg",
        *words(name, num_layers=2),
        "--target",
        "h100-80gb",
        "--batch",
        "2",
        "--json",
    ]
    assert main([*args, *argv]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_all_examples_are_here():
    assert sorted(EXAMPLES) == NAMES
    assert len(NAMES) == 23


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_its_command(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 100
    [command] = re.findall(r"^    python -m (.*)$", text.split('"""')[1], re.MULTILINE)
    assert command.startswith(f"jaxremat.run --model examples/{name}.py:workload ")
    before, _, factory = text.partition("\ndef workload(")
    assert "jaxremat" not in re.sub(r"^import jaxremat$", "", before.split('"""', 2)[2], flags=re.MULTILINE)
    assert factory.count("jaxremat.") == 2, "the return type, and the Workload"


@pytest.mark.parametrize("name", cases(NAMES, any_jax=True))
def test_an_example_allocates_nothing_at_its_published_sizes(name):
    workload, want = load_factory(spec(name))(), EXAMPLES[name]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((workload.params, workload.batch)))
    assert workload.init is not None
    made = jax.eval_shape(workload.init, jax.random.key(0))
    assert jax.tree.structure(made) == jax.tree.structure(workload.params)
    assert workload.num_params / 1e6 == pytest.approx(want.num_params, abs=0.05)
    assert find_layers(loss_of(workload), *workload.loss_args).num_layers == want.num_layers


@pytest.mark.parametrize("name", cases(NAMES))
def test_the_layers_of_an_example_are_found(name, h100):
    """All of them are estimated for a plan. Under a policy each kind in a scan, and each layer of the others, is a checkpoint."""
    workload = tiny(name)
    found = find_layers(loss_of(workload), *workload.loss_args)
    kinds = [(re.sub(r"\S*/(\w+\.py):\d+.*", r"\1", kind.label), kind.found_by, kind.num_layers) for kind in found.kinds]
    assert tuple(kinds) == EXAMPLES[name].found
    assert tuple(kept.what for kept in found.kept) == KEPT.get(name, ())
    for kind, estimate in zip(found.kinds, estimate_kinds(trace_kinds(found.kinds), h100.speed), strict=True):
        assert kind.in_scan == (kind.found_by in ("scan", "loop"))
        assert estimate.num_layers == kind.num_layers
        assert len(estimate.layer.problem.ops) > 2
    program = jax.make_jaxpr(workload.loss_with(parse("nothing")))(*workload.loss_args)
    in_program = sum(1 if kind.in_scan else kind.num_layers for kind in found.kinds)
    assert len(list(checkpoints(program.jaxpr))) == in_program + len(found.kept)


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in BOTH_LINES else pytest.mark.any_jax) for n in COMPILED])
def test_a_policy_changes_neither_loss_nor_gradients(name):
    workload = tiny(name)
    args = (random_values(workload.params), random_values(workload.batch), *([jax.random.key(1)] * workload.takes_key))

    def step(loss: Any) -> Any:
        return quick_jit(jax.value_and_grad(lambda *args: loss_and_aux(loss(*args)), has_aux=True))(*args)

    (want, want_aux), want_grads = step(workload.loss)
    (got, got_aux), grads = step(workload.loss_with(parse("nothing")))
    assert np.isfinite(want)
    assert relative_difference(got, want) <= TOLERANCE
    assert relative_difference(grads, want_grads) <= LOOSER.get(name, TOLERANCE)
    assert tuple(sorted(got_aux[0]) if got_aux else ()) == EXAMPLES[name].aux
    chex.assert_trees_all_close(got_aux, want_aux, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize("name", ["nnx_transformer", "encoder_decoder"])
def test_an_example_is_explained(name, capsys, h100):
    """Layers that are repeated as they are, and layers of two kinds in scopes."""
    [row] = commands(explain.main, name, ["--policy", "nothing"], capsys)
    assert row["error"] is None
    assert sum(row["attribution"].values()) == row["total_bytes"]


@pytest.mark.full
@pytest.mark.any_jax
def test_an_example_is_run_and_planned(capsys, h100, monkeypatch):
    """No step is compiled twice: the row of `nothing` has the map of the memory with which the plan begins."""
    compiled, begin = [], Trials._begin

    def counting(self, begins, policy, batch, **options):
        compiled.append((policy, batch))
        return begin(self, begins, policy, batch, **options)

    monkeypatch.setattr(Trials, "_begin", counting)
    rows = commands(run.main, "plain_scan", ["--policy", "nothing", "auto"], capsys)
    assert len(compiled) == len({*compiled})
    trials = {row["requested_policy"]: row for row in rows if row["record"] == "trial"}
    [plan] = [row for row in rows if row["record"] == "plan"]
    assert set(trials) == {"nothing", "auto"}
    assert all(row["fits"] and row["error"] is None for row in trials.values())
    assert plan["total_bytes"] == trials["auto"]["total_bytes"] <= plan["budget_bytes"]
    assert plan["step_s"] <= trials["nothing"]["step_s"]
