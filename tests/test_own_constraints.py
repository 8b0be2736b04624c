"""A user's loss that says by JAX's own `with_sharding_constraint(x, PartitionSpec(...))` how its arrays lie on a mesh."""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxremat.cli.command import parse_flags
from jaxremat.cli.run import check_flags, main, show_list_or_answers
from jaxremat.config import TrainConfig
from jaxremat.errors import UsageError
from jaxremat.mesh.axes import AXES, MeshShape
from jaxremat.mesh.sharding import abstract_mesh
from jaxremat.policy.spec import NOTHING
from jaxremat.session.flags import RunFlags
from jaxremat.workload.factory import WorkloadFactory
from jaxremat.workload.workload import Workload
from tests.mesh_runs import records
from tests.user_files import Write

#: Three layers that gather their kernels in the open. The axis is one of the mesh, or has a name of the user's own.
DIVIDED = """
import jax, jax.numpy as jnp, jaxremat
from jax.lax import with_sharding_constraint as lies
from jax.sharding import PartitionSpec as P

def init(key):
    return lies(jax.random.normal(key, (3, 256, 256)), P(None, AXIS))

def loss(params, batch):
    x = batch
    for number in range(3):
        with jax.named_scope(f"layer_{number}"):
            w = lies(params[number].astype("bfloat16"), P())
            x = lies(x + jnp.tanh(x @ w), P(AXIS))
    return jnp.mean(x.astype("float32") ** 2)

def workload(batch: int = 8, axis: str = "fsdp") -> jaxremat.Workload:
    global AXIS
    AXIS = axis
    params = jax.eval_shape(init, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((batch, 64, 256), jnp.bfloat16)
    return jaxremat.Workload(loss=loss, params=params, batch=batch, init=init)
"""
ON_TWO = ["--mesh", "fsdp=2", "--batch", "8"]


@pytest.fixture
def model(write: Write) -> list[str]:
    return ["--model", f"{write('divided.py', DIVIDED)}:workload"]


@pytest.mark.full
@pytest.mark.usefixtures("h100")
def test_each_policy_and_a_plan_on_a_mesh(model, tmp_path):
    """By hand, of 3 kernels of 256 x 256: each device has half of them and of two moments in float32, beside its samples, gathers
    them in bfloat16, and executes 8 or 11 matmuls of its 8 samples."""
    out = tmp_path / "out.jsonl"
    assert main([*model, *ON_TWO, "--policy", "none", "nothing", "auto", "--out", str(out)]) == 0
    assert len(records(out, "plan")) == 1
    none, nothing, _ = rows = records(out, "trial")
    assert [(row["mesh"], row["global_batch"], row["findings"]) for row in rows] == 3 * [("fsdp=2", 16, [])]
    assert none["argument_bytes"] == pytest.approx(3 * 3 * 256 * 256 * 4 / 2 + 8 * 64 * 256 * 2, abs=64)
    assert [row["executed_flops"] for row in (none, nothing)] == [times * 2 * 8 * 64 * 256 * 256 for times in (8, 11)]
    assert nothing["kept"]["gathered_forward_bytes"] == nothing["kept"]["gathered_backward_bytes"] == 3 * 256 * 256 * 2


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.usefixtures("h100")
def test_each_mesh_of_a_comparison_is_traced_for(model, tmp_path):
    """The mesh on which the axis of the constraints divides nothing is as fast in the comparison as it is alone."""
    auto, alone = tmp_path / "auto.jsonl", tmp_path / "alone.jsonl"
    asked = [*model, "--batch", "8", "--policy", "nothing"]
    assert main([*asked, "--mesh", "auto", "--devices", "2", "--out", str(auto)]) == 0
    assert main([*asked, "--mesh", "data=2", "--out", str(alone)]) == 0
    (choice,), (trial,) = records(auto, "mesh_choice"), records(alone, "trial")
    speeds = {one["mesh"]: one["tokens_per_s"] for one in choice["meshes"]}
    assert speeds.keys() == {"fsdp=2", "data=2"}
    assert speeds["data=2"] == pytest.approx(trial["samples_per_s"])


def test_the_list_of_names_has_a_gathered_kernel(model, capsys):
    assert main([*model, *ON_TWO, "--list", "names", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ([256, 256], "bfloat16") in [(row["shape"], row["dtype"]) for row in rows if row["name"] == "sharding_constraint"]


@pytest.mark.any_jax
def test_every_function_of_a_workload_is_traced_for_the_mesh():
    """Those of the optimizer, and the loss that `loss_under` makes, too. On another mesh they are traced for that one."""
    seen: list[Any] = []

    def loss(params, batch):
        seen.append(jax.sharding.get_abstract_mesh())
        return jnp.mean(params * batch)

    def init(params):
        seen.append(jax.sharding.get_abstract_mesh())
        return jnp.ones(2)

    def made(batch: int | None) -> Workload:
        seen.append(jax.sharding.get_abstract_mesh())
        parts = {"init": init, "eval_loss": loss, "optimizer": optax.GradientTransformation(init, optax.identity().update)}
        return Workload(loss=loss, params=jnp.ones(2), batch=jnp.ones(2), loss_under=lambda policy: loss, **parts)

    mesh, other = abstract_mesh(MeshShape(fsdp=2)), abstract_mesh(MeshShape(data=2))
    for one, of in (
        (mesh, WorkloadFactory("mine", made, mesh=mesh)),
        (other, WorkloadFactory("mine", made, mesh=mesh).on(other)),
    ):
        workload: Any = of.at(None, TrainConfig())
        jax.eval_shape(workload.loss_with(NOTHING), *workload.loss_args)
        for function in (workload.loss, workload.eval_loss):
            jax.eval_shape(function, *workload.loss_args)
        for function in (workload.init, workload.optimizer.init):
            jax.eval_shape(function, jnp.ones(2))
        assert seen == 6 * [one]
        seen.clear()
    assert jax.sharding.get_abstract_mesh().empty


def rejected(argv: list[str]) -> UsageError:
    """The error of a command line whose model can't be made or traced."""
    with pytest.raises(UsageError) as caught:
        show_list_or_answers(check_flags(parse_flags(RunFlags, argv)))
    return caught.value


@pytest.mark.parametrize("flags", [[], [*ON_TWO, "--model-arg", "axis=rows"]], ids=["no mesh", "another axis"])
def test_axes_that_are_not_there(model, flags):
    error = rejected([*model, *flags, "--target", "h100-80gb"])
    assert "divided.py:7" in error.got
    assert all(axis in error.allowed for axis in AXES)
    assert ("--mesh fsdp=8" in error.next_step) == (not flags)
    assert ("'rows'" in str(error)) == bool(flags)


@pytest.mark.usefixtures("h100")
def test_a_mesh_for_the_whole_process_is_rejected(write):
    set_mesh = "context = jax.set_mesh(jax.make_mesh((1,), ('fsdp',)))"
    path = write("whole.py", f"{DIVIDED}\n{set_mesh}\n")
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):  # which is there again afterwards
        error = rejected(["--model", f"{path}:workload", *ON_TWO])
        sys.modules["whole"].context.__exit__(None, None, None)
    assert jax.sharding.get_abstract_mesh().empty
    assert "--mesh" in error.got
    assert "whole.py:workload" in error.got


MAPPED = """
import jax, jax.numpy as jnp, jaxremat
from jax.sharding import Mesh, PartitionSpec as P

def workload(batch: int = 8, here: bool = True) -> jaxremat.Workload:
    mesh = {"mesh": Mesh(jax.devices()[:1], ("data",))} if here else {}

    def loss(params, x):
        def mapped(params, x):
            for w in params:
                x = jnp.tanh(x @ w)
            return jax.lax.pmean(jnp.mean(x**2), "data")
        return jax.shard_map(mapped, in_specs=(P(), P("data")), out_specs=P(), **mesh)(params, x)

    shape = jax.ShapeDtypeStruct
    params = 3 * [shape((64, 64), jnp.float32)]
    return jaxremat.Workload(loss=loss, params=params, batch=shape((batch, 64), jnp.float32))
"""


@pytest.mark.usefixtures("h100")
def test_a_map_over_this_machine_s_device_is_rejected_with_a_remedy_that_works(write, monkeypatch, capsys):
    """Without mesh=, over an axis of --mesh, the step reaches XLA."""

    def compiles(*_: Any, **__: Any) -> Any:
        raise RuntimeError("XLA is reached")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiles)
    argv = ["--model", f"{write('mapped.py', MAPPED)}:workload", "--target", "h100-80gb", "--batch", "8", "--policy", "none"]
    error = rejected(argv)
    assert "mapped.py" in error.cause
    assert "--mesh data=1" in error.next_step
    capsys.readouterr()
    without = [*argv, "--model-arg", "here=False", "--mesh", "data=1", "--json"]
    show_list_or_answers(check_flags(parse_flags(RunFlags, without)))
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (row["error_kind"], "XLA is reached" in row["error"]) == ("CompileError", True)
