"""Workloads that bring a mesh of their own: any axes, their own shardings, over the devices of the target."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxremat.chips.target import load_target
from jaxremat.config import TrainConfig
from jaxremat.errors import UsageError
from jaxremat.mesh.axes import MeshShape, OwnAxes, axes_of_data
from jaxremat.policy.grammar import parse
from jaxremat.session.session import Session
from jaxremat.step.step import arguments_on_mesh
from jaxremat.trial.findings import findings
from jaxremat.workload.samples import LeafSamples, Samples
from jaxremat.workload.workload import Workload
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.own_mesh import on_mesh_of

TRAIN = TrainConfig()
#: The example of a mesh of its own, and a tiny size of it.
EXAMPLE = Path(__file__).parent.parent / "examples" / "own_mesh.py"
SMALL = ("width=256", "num_layers=3", "seq_len=128")


def struct(mesh: Any, shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def divided(batch: int = 8, devices: Any = None, kind: AxisType = AxisType.Auto) -> Workload:
    """Two matrices in parts along `m`. Samples, `batch` in all, are divided over `d`."""
    mesh = Mesh(np.reshape(devices, (-1, min(2, len(devices)))), ("d", "m"), axis_types=(kind, kind))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for number, w in enumerate(params):
            with jax.named_scope(f"layer_{number}"):
                if kind is AxisType.Auto:
                    x = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P("d", None))
                else:
                    x = jnp.tanh(jnp.einsum("bd,df->bf", x, w, out_sharding=P("d", None)))
        return jnp.mean(x**2)

    params = [struct(mesh, (256, 256), None, "m") for _ in range(3)]
    return Workload(loss=loss, params=params, batch=struct(mesh, (batch, 256), "d"), mesh=mesh)


def test_axes_of_any_names():
    axes = OwnAxes((("data", 2), ("stage", 1), ("model", 4)), of_batch=("data",), of_params=("data", "model"))
    assert (axes.num_devices, axes.num_members, axes.num_param_parts, axes.gather_axes) == (8, 1, 8, ("data",))
    assert axes.places((0, 5), {"data"}) == {(0,), (1,)}
    assert axes.places((4, 5), {"model", "stage"}) == {(0, 0), (0, 1)}
    assert str(axes) == "data=2,model=4"
    assert str(axes_of_data(json.loads(json.dumps(axes.as_data())))) == str(axes)
    assert axes_of_data(MeshShape(fsdp=8).as_data()) == MeshShape(fsdp=8)


def test_arrays_lie_on_the_mesh():
    """By their own shardings, also on a mesh without devices, and replicated without one."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    of_axes = struct(AbstractMesh((1,), ("d",)), (8, 4), "d")
    workload = Workload(loss=lambda w, x: jnp.mean(x @ w), params=jnp.ones((4, 4)), batch=of_axes, mesh=mesh)
    assert workload.abstract_params.sharding == NamedSharding(mesh, P())
    assert workload.abstract_batch.sharding == NamedSharding(mesh, P("d"))
    other = Mesh(np.array(jax.devices()[:1]), ("rows",))
    for wrong in ({"batch": struct(other, (8, 4), "rows")}, {"mesh": AbstractMesh((1,), ("d",))}):
        with pytest.raises(UsageError):
            dataclasses.replace(workload, **wrong)


def test_the_target_has_the_mesh_of_the_workload(h100):
    target = load_target(h100.name, MeshShape(fsdp=8))
    workload = divided(8, target.devices[::-1])
    on = on_mesh_of(workload, target, TRAIN)
    assert on.mesh is workload.mesh
    assert on.mesh_shape == OwnAxes((("d", 4), ("m", 2)), ("d",), ("m",))
    assert on.speed
    assert on.speed.links
    assert [on.speed.links.node_of(number) for number in range(8)] == [0] * 8
    assert on.speed.links.order == tuple(range(8))[::-1]
    assert on_mesh_of(workload, on, TRAIN) is on
    here = Mesh(np.array(jax.devices()[:1]), ("d",))
    few = dataclasses.replace(divided(8, target.devices[:4]), name="few")
    twice = divided(8, [*target.devices[:7], target.devices[0]])
    for wrong in (
        twice,
        Workload(loss=lambda w, x: jnp.mean(x @ w), params=jnp.ones((4, 4)), batch=jnp.ones((8, 4)), mesh=here),
        few,
    ):
        with pytest.raises(UsageError):
            on_mesh_of(wrong, target, TRAIN)


def test_a_session_and_its_flags(h100):
    session = Session(divided, target=h100.name, devices=8)
    trials = session.trials
    assert str(trials.target.mesh_shape) == "d=4,m=2"
    assert [*trials.batches(20)] == [4, 8, 12, 16, 20]
    for few in (trials, dataclasses.replace(trials, global_batch=6)):
        with pytest.raises(UsageError) as caught:
            few.batches(3 if few is trials else None)
        assert "4" in caught.value.allowed
    assert trials.global_batch_at(16) == 16
    assert sum(leaf.device_bytes for leaf in trials.arguments_on_mesh(8) if leaf.is_batch) == 2 * 256 * 4
    assert [leaf.axes for leaf in trials.arguments_on_mesh(8) if "/mu/" in leaf.name] == 3 * [frozenset({"m"})]
    for flags in ({"mesh": "fsdp=8"}, {"devices": 8, "mesh": "fsdp=8"}):
        with pytest.raises(UsageError) as caught:
            Session(divided, target=h100.name, **flags)
        assert "--devices" in caught.value.next_step


def test_an_author_may_count_the_samples(h100):
    def counted(batch: int = 8, devices: Any = None) -> Workload:
        return dataclasses.replace(divided(batch, devices), samples=Samples(batch, (LeafSamples(0),)))

    trials = Session(counted, target=h100.name, devices=8).trials
    assert [*trials.batches(12)] == [4, 8, 12]
    assert (trials.samples_at(12), trials.global_batch_at(12)) == (12, 12)


def test_parameters_that_are_one_array_lie_as_it_says(h100):
    """And so does what the optimizer has of them."""
    target = load_target(h100.name, MeshShape(fsdp=8))
    mesh = Mesh(np.reshape(target.devices, (4, 2)), ("d", "m"))
    bare = Workload(
        loss=lambda w, x: jnp.mean(x @ w),
        params=struct(mesh, (256, 256), None, "m"),
        batch=struct(mesh, (8, 256), "d"),
        mesh=mesh,
    )
    assert on_mesh_of(bare, target, TRAIN).mesh_shape == OwnAxes((("d", 4), ("m", 2)), ("d",), ("m",))
    leaves = arguments_on_mesh(mesh, bare, TRAIN)
    assert [leaf.axes for leaf in leaves if leaf.shape == (256, 256)] == 3 * [frozenset({"m"})]


@pytest.mark.full
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_auto_and_explicit_axes(kind, h100):
    """A device's arguments by hand: half of three matrices with two moments, and a quarter of the samples."""

    def made(batch: int = 1024, devices: Any = None) -> Workload:
        return divided(batch, devices, kind)

    trials = Session(made, target=h100.name, devices=8).trials
    rows = [trials.record(parse(policy), 4096) for policy in ("none", "nothing")]
    assert [row.mesh for row in rows] == 2 * ["d=4,m=2"]
    arguments = 3 * 3 * 256 * 256 * 4 // 2 + 1024 * 256 * 4 + 2 * 4
    assert [row.argument_bytes for row in rows] == 2 * [arguments]
    assert all(row.total_bytes and row.executed_flops for row in rows)


@pytest.mark.full
def test_the_example(h100):
    """A jitted step has the bytes of the same step that is compiled by hand, and the loss has them under `none`."""
    session = Session(f"{EXAMPLE}:whole_step", target=h100.name, devices=8, model_arg=SMALL)
    step = session.trials.record(parse("none"), 8)
    workload = session.trials.workload_of(8)
    with jax.set_mesh(workload.mesh):
        lowered = workload.step.trace(*workload.args).lower(lowering_platforms=("cuda",))  # pyright: ignore
    options = {"xla_disable_hlo_passes": "rematerialization"}
    by_hand = lowered.compile(compiler_options=options).memory_analysis()
    assert step.argument_bytes == by_hand.argument_size_in_bytes
    assert step.alias_bytes == by_hand.alias_size_in_bytes
    assert step.output_bytes == by_hand.output_size_in_bytes
    assert step.mesh == "fsdp=4,tensor=2"
    assert step.global_batch == 32
    trials = Session(f"{EXAMPLE}:workload", target=h100.name, devices=8, model_arg=SMALL).trials
    none, nothing = (trials.record(parse(policy), 64) for policy in ("none", "nothing"))
    assert none.total_bytes
    assert nothing.total_bytes
    assert none.total_bytes > nothing.total_bytes
    assert nothing.recompute_overhead_percent
    assert none.global_batch == 256


@pytest.mark.full
def test_shardings_that_contradict_each_other(h100):
    """A jitted step's, and its arguments': an error with a remedy. JAX's error of a `shard_map` is about something else."""
    node = load_target(h100.name, MeshShape(fsdp=8))
    mesh = Mesh(np.array(node.devices), ("d",), axis_types=(AxisType.Explicit,))
    target = dataclasses.replace(node, mesh=mesh, mesh_shape=OwnAxes((("d", 8),)))
    args = (struct(mesh, (64, 64)),)
    with pytest.raises(UsageError) as caught:
        lower_and_compile(jax.jit(jnp.sin, in_shardings=NamedSharding(mesh, P("d"))), args, target)
    assert "in_shardings" in caught.value.got
    assert all(way in caught.value.next_step for way in ("sharding=", "mesh=mesh", "devices=None"))
    with pytest.raises(ValueError, match="shard_map") as others:
        lower_and_compile(jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("d"), out_specs=P("d")), args, target)
    assert not isinstance(others.value, UsageError)


@pytest.mark.full
def test_constraints_on_this_machine(h100):
    """For one device they are dropped, and the bytes are those without them. For several, an error names the remedy."""
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("d",))

    def loss(w: jax.Array, x: jax.Array, *, lies: bool) -> jax.Array:
        def body(x: jax.Array, _: Any) -> tuple[jax.Array, None]:
            y = jnp.tanh(x @ w)
            return (jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("d"))) if lies else y), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(body), x, None, length=3)[0])

    args = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    with_them, without = (
        lower_and_compile(jax.value_and_grad(lambda w, x, lies=lies: loss(w, x, lies=lies)), args, h100, donate_argnums=0)
        for lies in (True, False)
    )
    assert with_them.num_elsewhere > 0
    assert without.num_elsewhere == 0
    assert with_them.memory == without.memory
    (found,) = (f for f in findings(with_them, "none", parse("none"), "code", h100) if f.rule == "constraints-elsewhere")
    assert found.num_bytes == 0
    with pytest.raises(UsageError) as caught:
        lower_and_compile(lambda w, x: loss(w, x, lies=True), args, load_target(h100.name, MeshShape(fsdp=2)))
    assert "devices" in caught.value.next_step


ON_CPUS = """
import json, sys
from tests.eight_devices import QUICK, difference
import jax
import numpy as np
from jaxremat.policy.grammar import parse
from jaxremat.session.session import Session
from jaxremat.step.inputs import first_state, inputs
from jaxremat.step.step import step_shardings

session = Session(
    sys.argv[1], target="cpu", devices=8, model_arg=("width=64", "num_layers=3", "seq_len=32"), optimizer="sgd-momentum",
    learning_rate=1.0,
).with_trials(options=QUICK)
trials = session.trials
workload = trials.workload_of(2)
shardings = step_shardings(workload.mesh, workload, trials.train)[0]
batch = jax.device_put(next(inputs(workload, trials.train)), shardings[1])

def after(policy):
    state, loss = trials.compile(parse(policy), 2).compiled(first_state(workload, trials.train, None, shardings[0]), batch)
    return {"loss": loss} | {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}

none = after("none")
for policy in ("nothing", "every:2"):
    found = after(policy)
    print(json.dumps({name: difference([found[name]], [leaf]) for name, leaf in none.items()}))
"""


@pytest.mark.full
def test_a_policy_changes_no_loss_and_no_gradient_on_8_devices():
    """Of each leaf alone, after a step of gradient descent with a rate of 1. The optimizer's state is the gradient."""
    command = [sys.executable, "-c", ON_CPUS, f"{EXAMPLE}:workload"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert sum("trace" in name for name in row) == 10
        assert {name: off for name, off in row.items() if not off <= 1e-6} == {}
