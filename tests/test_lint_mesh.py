"""The lint's rules for a step on several devices: each finds its mistake in a small program, and none in the decoder's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxremat
from jaxremat.mesh.axes import MeshShape
from jaxremat.mesh.sharding import leaves_on_mesh
from jaxremat.policy.grammar import parse
from jaxremat.trial.findings import findings
from jaxremat.trial.trial import PolicyTrials
from jaxremat.workload.factory import GivenFactory
from jaxremat.workload.workload import Workload
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.lint import find
from jaxremat.xla.lint_input import Finding, LintInput, lint_input
from jaxremat.xla.lint_mesh import _is_of_loss
from jaxremat.xla.target import load_target
from tests.mesh_runs import MODEL, make_run

WIDTH, DEPTH, BATCH = 512, 4, 64
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


@pytest.mark.any_jax
def test_gathered_parameters_that_are_kept(h100s):
    """Without a checkpoint, what a layer gathered waits for its backward pass: two kernels or more at the peak."""
    found = found_in(h100s, mean_square, kernels(), keep_dump=True)
    kept = found["gathered-and-kept"]
    assert kept.num_bytes >= 2 * WIDTH**2 * 4
    assert "are kept from the forward to the backward pass" in kept.evidence
    assert kept.source.partition(":")[0].endswith("test_lint_mesh.py")

    def under_checkpoints(params: Any, batch: jax.Array) -> jax.Array:
        x = batch
        for w in params:
            x = jax.checkpoint(lambda x, w: lies(jnp.tanh(x @ gathered(w)), BY_SAMPLE))(x, w)
        return jnp.mean(jnp.square(x))

    assert "gathered-and-kept" not in found_in(h100s, under_checkpoints, kernels(), keep_dump=True)


@pytest.mark.any_jax
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
    tensor = load_target("h100-80gb", MeshShape(fsdp=4, tensor=2))
    assert "axis-divides-nothing" in {finding.rule for finding in jaxremat.lint(plain(32), target=tensor)}


@pytest.mark.any_jax
def test_a_gather_of_everything(h100s):
    def whole_batch(params: Any, batch: jax.Array) -> jax.Array:
        x = jnp.tanh(batch @ gathered(params[0]))
        return jnp.mean(jnp.square(lies(lies(x, WHOLE) - x.mean(), BY_SAMPLE)))

    everything = found_in(h100s, whole_batch, kernels(1))["gathers-everything"]
    assert everything.num_bytes == BATCH * 128 * WIDTH * 4
    assert "test_lint_mesh.py" in everything.evidence


@pytest.mark.any_jax
def test_logits_that_are_gathered(h100s):
    """The same gather, of logits: the rule of the loss says it, and not the other one."""
    words = 1000

    def cross_entropy(logits: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.logsumexp(lies(logits, WHOLE), axis=-1))

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return cross_entropy(lies(batch @ gathered(params[0]), BY_SAMPLE))

    found = found_in(h100s, loss, [jax.ShapeDtypeStruct((WIDTH, words), jnp.float32)])
    assert found["gathers-logits"].num_bytes == BATCH * 128 * words * 4
    assert "gathers-everything" not in found


@pytest.mark.any_jax
def test_words_that_embed_attend_scores(h100s):
    """Flax's `Embed.attend` makes logits, and no name says so. An array of the shape of the table, as its gradient, is none."""
    words = 1000

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        table = {"params": {"embedding": gathered(params[0])}}
        scores = nn.Embed(words, WIDTH).apply(table, lies(jnp.tanh(batch), BY_SAMPLE), method="attend")
        return jnp.mean(jax.nn.logsumexp(lies(lies(scores, BY_SAMPLE), WHOLE), axis=-1))

    facts = facts_of(h100s, loss, [jax.ShapeDtypeStruct((words, WIDTH), jnp.float32)])
    found = {finding.rule: finding for finding in find(facts)}
    assert found["gathers-logits"].num_bytes == BATCH * 128 * words * 4
    assert "gathers-everything" not in found
    (exchange,) = (one for one in facts.exchanges if one.num_bytes == BATCH * 128 * words * 4)
    assert _is_of_loss(facts, exchange)
    assert not _is_of_loss(facts, replace(exchange, dims=(WIDTH, words)))


def rules_of(run: Any, policy: str, batch: int = 2, *, keep_dump: bool = False) -> dict[str, Any]:
    trials = PolicyTrials(run, policy, parse(policy), keep_dump=keep_dump)
    done = trials.compile(batch)
    arguments = run.arguments_on_mesh(batch)
    return {found.rule: found for found in findings(done, policy, parse(policy), run.remedies, arguments=arguments)}


@pytest.mark.any_jax
def test_state_that_lies_whole():
    """Over `data` alone each device has all parameters. Over `fsdp` of a size that divides no width it has, too."""
    run = make_run(load_target("h100-80gb", MeshShape(data=8)))
    whole = rules_of(run, "dots+attention")["lies-whole"]
    state = [leaf for leaf in run.arguments_on_mesh(2) if not leaf.is_batch]
    assert whole.num_bytes == sum(leaf.num_bytes for leaf in state if leaf.num_bytes >= 64 * 2**10)
    assert whole.remedy == "--mesh fsdp=8"
    odd = make_run(load_target("h100-80gb", MeshShape(fsdp=6)), replace(MODEL, mlp_dim=1022, vocab_size=2047))
    found = rules_of(odd, "dots+attention")["lies-whole"]
    assert "undivided by fsdp=6" in found.evidence
    assert found.remedy == "--mesh data=3,fsdp=2"


def plain(batch: int | None) -> Workload:
    """A loss that knows nothing of a mesh."""
    x = jax.ShapeDtypeStruct((batch or 8, 128, WIDTH), jnp.float32)
    return Workload(loss=mean_square_of_one_device, params=kernels(), batch=x, name="plain")


def mean_square_of_one_device(params: Any, batch: jax.Array) -> jax.Array:
    x = batch
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(jnp.square(x))


@pytest.mark.any_jax
def test_an_axis_that_divides_nothing():
    run = replace(
        make_run(load_target("h100-80gb", MeshShape(fsdp=4, tensor=2))), factory=GivenFactory("plain", plain, True)
    )
    found = rules_of(run, "none", 8)
    assert found["axis-divides-nothing"].evidence.startswith("the axis tensor=2 divides no parameter")
    assert found["more-than-its-share"].evidence.startswith("each device executes 2.0")


@pytest.mark.any_jax
def test_parameters_that_are_gathered_again(monkeypatch):
    """On a mesh with both axes XLA gathers twice, unless the decoder's layers gather in the open."""
    run, alone = (
        make_run(load_target("h100-80gb", MeshShape(fsdp=4, tensor=2)), replace(MODEL, num_layers=n)) for n in (4, 3)
    )
    assert "gathered-again" not in rules_of(run, "nothing")
    monkeypatch.setattr("jaxremat.model.transformer.gathered_names", lambda policy: ())
    again = rules_of(alone, "nothing")["gathered-again"]
    assert "more than the forward pass" in again.evidence
    assert "state.params['layers']" in again.evidence


CLEAN = [
    (MeshShape(fsdp=8), "dots+attention", True),
    (MeshShape(data=2, fsdp=4), "nothing", True),
    (MeshShape(fsdp=4, tensor=2), "dots+attention", False),
    (MeshShape(fsdp=8), "save:mlpwi_0,wi_0_gathered+attention", True),
]


@pytest.mark.any_jax
@pytest.mark.parametrize(("mesh", "policy", "scan_layers"), CLEAN)
def test_no_false_alarm_on_the_decoder(mesh, policy, scan_layers):
    model = replace(MODEL, scan_layers=scan_layers)
    assert rules_of(make_run(load_target("h100-80gb", mesh), model), policy, keep_dump=True) == {}


@pytest.mark.any_jax
def test_a_vocabulary_that_tensor_does_not_divide():
    """The positions of the logits are divided, each device computes its share, and no logits are gathered."""
    model = replace(MODEL, vocab_size=8191, tie_embeddings=True)
    for loss in ("full", "chunked:64"):
        run = make_run(load_target("h100-80gb", MeshShape(fsdp=4, tensor=2)), model)
        run = run.with_loss(loss)
        found = rules_of(run, "dots+attention")
        assert not {"gathers-logits", "gathers-everything", "more-than-its-share"} & found.keys(), loss
