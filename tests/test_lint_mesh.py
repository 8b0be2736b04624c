"""The lint's rules for a step on several devices: each finds its mistake in a compiled program, and none in the decoder's.

`tests/lint_inputs.py` has made-up inputs of them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import jaxremat
from jaxremat.chips.target import load_target
from jaxremat.mesh.axes import MeshShape
from jaxremat.mesh.sharding import leaves_on_mesh
from jaxremat.policy.grammar import parse
from jaxremat.trial.findings import findings
from jaxremat.trial.trials import Trials
from jaxremat.workload.workload import Workload
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.lint import find
from jaxremat.xla.lint_input import LintInput, lint_input
from jaxremat.xla.lint_mesh import MESH_RULES, _is_of_loss
from jaxremat.xla.step_facts import Finding
from tests.lint_inputs import made_up
from tests.mesh_runs import MODEL, make_run

WIDTH, DEPTH, BATCH, WORDS = 512, 4, 64, 1000
WHOLE = PartitionSpec()
BY_SAMPLE = PartitionSpec("fsdp")
Loss = Callable[[Any, jax.Array], jax.Array]


@pytest.fixture(scope="module")
def h100s():
    return load_target("h100-80gb", MeshShape(fsdp=8))


def found_in(target: Any, loss: Loss, params: Any, *, keep_dump: bool = False) -> dict[str, Finding]:
    """What the lint finds in a step of gradient descent, whose parameters and batch are divided over the axis `fsdp`."""
    return {finding.rule: finding for finding in find(facts_of(target, loss, params, keep_dump=keep_dump))}


def facts_of(target: Any, loss: Loss, params: Any, *, keep_dump: bool = False) -> LintInput:
    """What the lint reads of that step."""

    def step(params: Any, batch: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    batch = jax.ShapeDtypeStruct((BATCH, 128, WIDTH), jnp.float32)
    of_params = jax.tree.map(lambda leaf: NamedSharding(target.mesh, PartitionSpec(None, "fsdp")), params)
    of_batch = NamedSharding(target.mesh, BY_SAMPLE)
    done = lower_and_compile(
        step,
        (params, batch),
        target,
        donate_argnums=0,
        keep_dump=keep_dump,
        shardings=((of_params, of_batch), (of_params, NamedSharding(target.mesh, WHOLE))),
    )
    arguments = leaves_on_mesh((params, batch), (of_params, of_batch))
    return lint_input(done, arguments=arguments)


def kernels(depth: int = DEPTH) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * depth


def lies(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, spec)


def gathered(w: jax.Array) -> jax.Array:
    return lies(w, WHOLE)


def mean_square(params: Any, batch: jax.Array) -> jax.Array:
    """Each layer gathers its kernel."""
    x = batch
    for w in params:
        x = lies(jnp.tanh(x @ gathered(w)), BY_SAMPLE)
    return jnp.mean(jnp.square(x))


@pytest.mark.full
def test_gathered_parameters_that_are_saved(h100s):
    """Without a checkpoint, what a layer gathered waits for its backward pass: two kernels or more at the peak."""
    found = found_in(h100s, mean_square, kernels(), keep_dump=True)["gathered-and-kept"]
    assert found.num_bytes >= 2 * WIDTH**2 * 4
    assert found.source.partition(":")[0] == __file__


@pytest.mark.full
def test_public_functions_look_at_one_device_of_the_target_s_mesh(h100s):
    """The map has that device's part of arrays that say how they lie, and what it gathers, whatever `roles` says."""

    def step(w: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(mean_square)(w, x)
        return jax.tree.map(lambda p, g: p - g, w, grads), value

    def lying(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(h100s.mesh.abstract_mesh, PartitionSpec(*spec))
        )

    args = [lying((WIDTH, WIDTH), None, "fsdp")] * DEPTH, lying((BATCH, 128, WIDTH), "fsdp")
    found = jaxremat.memory_map(step, args, h100s, donate_argnums=0, roles={"w": "parameters", "x": "inputs"})
    num_bytes = {
        category: sum(b.num_bytes for b in found.buffers if b.category == category) for category in ("parameters", "inputs")
    }
    assert num_bytes == {"parameters": DEPTH * WIDTH**2 * 4 // 8, "inputs": BATCH * 128 * WIDTH * 4 // 8}
    assert any(buffer.category == "gathered parameters" for buffer in found.buffers)


@pytest.mark.full
def test_an_axis_that_divides_nothing():
    """A loss that knows nothing of a mesh."""

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(jnp.square(x))

    workload = Workload(loss=loss, params=kernels(), batch=jax.ShapeDtypeStruct((32, 128, WIDTH), jnp.float32))
    target = load_target("h100-80gb", MeshShape(fsdp=4, tensor=2))
    found = {finding.rule: finding for finding in jaxremat.lint(workload, target=target)}
    assert "tensor=2" in found["axis-divides-nothing"].evidence
    assert " 2.0" in found["more-than-its-share"].evidence


@pytest.mark.full
def test_activations_and_logits_that_are_gathered(h100s):
    """The same gather is that of logits where its value is made in the loss, and has the words' dimension."""

    def cross_entropy(logits: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.logsumexp(lies(logits, WHOLE), axis=-1))

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        x = jnp.tanh(batch @ gathered(params[0]))
        x = lies(lies(x, WHOLE) - x.mean(), BY_SAMPLE)
        return cross_entropy(lies(x @ gathered(params[1]), BY_SAMPLE))

    found = found_in(h100s, loss, [*kernels(1), jax.ShapeDtypeStruct((WIDTH, WORDS), jnp.float32)])
    assert found["gathers-everything"].num_bytes == BATCH * 128 * WIDTH * 4
    assert "test_lint_mesh.py" in found["gathers-everything"].evidence
    assert found["gathers-logits"].num_bytes == BATCH * 128 * WORDS * 4


@pytest.mark.full
def test_words_that_embed_attend_scores(h100s):
    """Flax's `Embed.attend` makes logits, and no name says so. An array of the shape of the table, as its gradient, is none."""

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        table = {"params": {"embedding": gathered(params[0])}}
        scores = nn.Embed(WORDS, WIDTH).apply(table, lies(jnp.tanh(batch), BY_SAMPLE), method="attend")
        assert isinstance(scores, jax.Array)
        return jnp.mean(jax.nn.logsumexp(lies(lies(scores, BY_SAMPLE), WHOLE), axis=-1))

    facts = facts_of(h100s, loss, [jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32)])
    found = {finding.rule: finding for finding in find(facts)}
    assert found["gathers-logits"].num_bytes == BATCH * 128 * WORDS * 4
    assert "gathers-everything" not in found
    (exchange,) = (one for one in facts.exchanges if one.num_bytes == BATCH * 128 * WORDS * 4)
    assert _is_of_loss(facts, exchange)
    assert not _is_of_loss(facts, replace(exchange, dims=(WIDTH, WORDS)))


def rules_of(run: Trials, policy: str) -> dict[str, Finding]:
    done = replace(run, with_dump=True).compile(parse(policy), 2)
    arguments = run.arguments_on_mesh(2)
    return {
        found.rule: found for found in findings(done, policy, parse(policy), run.remedies, run.target, arguments=arguments)
    }


@pytest.mark.parametrize(
    ("mesh", "model", "other_mesh"),
    [
        (MeshShape(data=8), MODEL, "fsdp=8"),  # each device has all parameters
        (MeshShape(fsdp=6), replace(MODEL, mlp_dim=1022, vocab_size=2047), "data=3,fsdp=2"),  # 6 divides no width
    ],
)
def test_state_that_lies_whole(mesh, model, other_mesh):
    """Read from the arguments alone, with no compile."""
    arguments = make_run(load_target("h100-80gb", mesh), model).arguments_on_mesh(2)
    whole = [leaf for leaf in arguments if not leaf.is_batch and not leaf.axes and leaf.num_bytes >= 64 * 2**10]
    sound = made_up()["lies-whole"]
    (found,) = MESH_RULES["lies-whole"](replace(sound, mesh=mesh, arguments=arguments, remedies="flags"))
    assert found.num_bytes == sum(leaf.num_bytes for leaf in whole)
    assert str(mesh) in found.evidence
    assert found.remedy.split() == ["--mesh", other_mesh]
    for compared, num in (((str(mesh), other_mesh), 0), ((str(mesh),), 1)):
        chosen = replace(sound, mesh=mesh, arguments=arguments, remedies="flags", compared_meshes=compared)
        assert len([*MESH_RULES["lies-whole"](chosen)]) == num


@pytest.mark.full
def test_parameters_that_are_gathered_again(monkeypatch):
    """On a mesh with both axes XLA gathers twice, unless the decoder's layers gather in the open.

    Beside it, of a vocabulary that `tensor` doesn't divide, each device computes its share, and no logits are gathered.
    """
    model = replace(MODEL, num_layers=3, vocab_size=8191, tie_embeddings=True)
    monkeypatch.setattr("jaxremat.model.transformer.gathered_names", lambda policy: ())
    found = rules_of(make_run(load_target("h100-80gb", MeshShape(fsdp=4, tensor=2)), model), "nothing")
    assert "state.params['layers']" in found["gathered-again"].evidence
    assert not {"gathers-logits", "gathers-everything", "more-than-its-share"} & found.keys()


def test_a_kernel_that_is_made_of_several_parameters_is_gathered_again():
    facts = made_up()["gathered-again"]
    joined = [replace(exchange, arguments=("params/k", "params/q")) for exchange in facts.exchanges]
    (found,) = find(replace(facts, exchanges=tuple(joined)))
    assert (found.rule, "params/k and params/q" in found.evidence) == ("gathered-again", True)


def mixed(x: jax.Array, w: jax.Array) -> jax.Array:
    """A layer that gathers the sequences of all devices, before it adds to its own."""
    everything = checkpoint_name(lies(jnp.tanh(x), WHOLE), "everything")
    return lies(x + jnp.tanh(everything - jnp.mean(everything, 0)) @ gathered(w), BY_SAMPLE)


def of_layers(layer: Callable[[jax.Array, jax.Array], jax.Array]) -> Loss:
    def loss(params: Any, batch: jax.Array) -> jax.Array:
        x = batch
        for w in params:
            x = layer(x, w)
        return jnp.mean(jnp.square(x))

    return loss


def in_a_scan(layer: Callable[[jax.Array, jax.Array], jax.Array]) -> Loss:
    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(jax.lax.scan(lambda x, w: (layer(x, w), None), batch, jnp.stack(params))[0]))

    return loss


NAMED = jax.checkpoint_policies.save_only_these_names("everything")


@pytest.mark.full
@pytest.mark.parametrize(
    ("loss", "times"),
    [
        (of_layers(jax.checkpoint(mixed)), 1),
        (in_a_scan(jax.checkpoint(mixed)), DEPTH),
        (of_layers(jax.checkpoint(mixed, policy=jax.checkpoint_policies.dots_saveable)), 1),
        (of_layers(mixed), 0),
        (of_layers(jax.checkpoint(mixed, policy=NAMED)), 0),
        (in_a_scan(jax.checkpoint(mixed, policy=NAMED)), 0),
    ],
)
def test_values_that_the_recompute_gathers(h100s, loss, times):
    """The remedy is among the sound ones: the name of the gathered value in the policy."""
    found = found_in(h100s, loss, kernels()).get("gathered-again")
    assert bool(found) == bool(times)
    assert not found or (f" {times} times at " if times > 1 else " once at ") in found.evidence
    assert not found or found.source.startswith(__file__)


CLEAN = [
    (MeshShape(fsdp=4, tensor=2), "nothing", True),
    (MeshShape(data=2, fsdp=4), "dots+attention", False),
    (MeshShape(fsdp=8), "save:mlpwi_0,wi_0_gathered+attention", True),
]


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "policy", "scan_layers"), CLEAN)
def test_no_false_alarm_on_the_decoder(mesh, policy, scan_layers):
    model = replace(MODEL, scan_layers=scan_layers, num_layers=3)
    assert rules_of(make_run(load_target("h100-80gb", mesh), model), policy) == {}


@pytest.mark.full
def test_a_vocabulary_that_tensor_does_not_divide_under_the_full_loss():
    model = replace(MODEL, vocab_size=8191, tie_embeddings=True)
    run = make_run(load_target("h100-80gb", MeshShape(fsdp=4, tensor=2)), model).with_loss("full")
    assert not {"gathers-logits", "gathers-everything", "more-than-its-share"} & rules_of(run, "dots+attention").keys()
