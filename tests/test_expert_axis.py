"""The axis `expert` of a mesh: what it divides, what it can't, and that each device computes its share of the experts."""

import json
from dataclasses import replace

import pytest

from jaxremat.answer.planned import plan_run
from jaxremat.answer.workload_estimate import estimate_workload
from jaxremat.chips.target import load_target
from jaxremat.cli.run import main
from jaxremat.errors import UsageError
from jaxremat.mesh.axes import MeshShape, parse_mesh
from jaxremat.model.on_mesh import check_mesh
from jaxremat.planner.plan import Plan
from jaxremat.policy.grammar import parse
from jaxremat.xla.flops import count_step_flops, executed_flops
from jaxremat.xla.kernels import kernels_of
from tests.mesh_runs import MODEL, make_run, traced_flops

EXPERTS = replace(MODEL, num_layers=2, num_experts=8, router_loss=0.01, mlp_dim=512)


def test_an_expert_axis_is_a_part_of_the_mesh():
    mesh = parse_mesh("ici_expert_parallelism=4,ici_fsdp_parallelism=2,dcn_data_parallelism=2")
    assert mesh is not None
    assert mesh == MeshShape(data=2, fsdp=2, expert=4, nodes=2)
    assert (mesh.num_devices, mesh.num_members, str(mesh)) == (16, 16, "data=2,fsdp=2,expert=4")
    assert MeshShape(fsdp=2, expert=2, tensor=2).num_members == 4


def test_experts_are_divided_and_everything_else_as_over_fsdp(capsys):
    assert main(["--model", "mixtral-8x7b", "--mesh", "fsdp=4,expert=2", "--list", "shardings", "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    kernel = rows["layers/mlp/wo"]
    assert (kernel["lies"], kernel["device_bytes"]) == ("32 8/expert 14336 4096/fsdp", 32 * 8 * 14_336 * 4096 * 4 // 8)
    assert rows["layers/attention/query/kernel"]["lies"] == "32 4096/fsdp,expert 32 128"
    assert rows["embedding/embedding"]["lies"] == "32000 4096/fsdp,expert"


FEW = replace(EXPERTS, num_experts=6)


@pytest.mark.parametrize(
    ("model", "mesh", "value", "allowed"),
    [
        (MODEL, MeshShape(fsdp=2, expert=4), "fsdp=2,expert=4", "expert=1"),
        (FEW, MeshShape(fsdp=2, expert=4), "fsdp=2,expert=4", "expert=1, 2, 3, 6"),
        (FEW, MeshShape(expert=4), "expert=4", "expert=1, 2, 3, 6"),
    ],
)
def test_what_an_expert_axis_cannot_divide_is_rejected(model, mesh, value, allowed):
    """What to do next is a mesh that divides the model."""
    with pytest.raises(UsageError) as caught:
        check_mesh(model, mesh)
    assert (value in caught.value.got, caught.value.allowed) == (True, allowed)
    flag, text = caught.value.next_step.split()
    assert flag == "--mesh"
    other = parse_mesh(text)
    assert other is not None
    assert other.num_devices == mesh.num_devices
    check_mesh(model, other)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dispatch", "mesh", "scan_layers"),
    [
        ("dense", "fsdp=2,expert=4", True),
        ("dense", "data=2,expert=2,tensor=2", False),
        ("ragged", "fsdp=8", True),
        ("ragged", "fsdp=2,expert=4", True),
    ],
)
def test_each_device_computes_its_share_of_the_experts(dispatch, mesh, scan_layers):
    """Of FLOPs what JAX traced, over all devices; of what is saved inside experts, a device has that of its own.

    By hand: the results of the gates and of the up projections, of a device's experts, for the tokens of all that share them.
    With `ragged` dispatch there is a row for each of a token's experts, on every device.
    """
    model, shape = replace(EXPERTS, dispatch=dispatch, scan_layers=scan_layers), parse_mesh(mesh)
    assert shape is not None
    run, alone = make_run(load_target("h100-80gb", shape), model), make_run(load_target("h100-80gb"), model)
    policy = "save:mlpwi_0,mlpwi_1+attention"
    done, row = run.compile(parse(policy), 2), run.record(parse(policy), 2)
    assert executed_flops(done.module).total * shape.num_devices == count_step_flops(done.jaxpr).total
    assert traced_flops(run, 2) == shape.num_devices // shape.tensor * traced_flops(alone, 2)
    assert (row.mesh, row.num_devices, row.global_batch, row.findings) == (mesh, 8, 2 * shape.num_members, ())
    assert row.kept
    again = row.kept.again[0]
    assert again.operation == "matmul"
    assert 0 < again.num_again <= again.num_forward < 100, "each matmul counts once, and not once for each device"
    assert {"all-gather", "reduce-scatter"} <= {k.collective.kind for k in kernels_of(done.module) if k.collective}
    saved_bytes = sum(some.num_bytes for some in row.kept.saved if some.kind == "name")
    assert run.target.speed
    (kind,) = estimate_workload(run, run.target.speed, 2)
    of_layer = {value.name: value.num_bytes for value in kind.layer.problem.values if value.saveable}
    assert saved_bytes == kind.num_layers * (of_layer["mlpwi_0"] + of_layer["mlpwi_1"])
    tokens = shape.expert * 2 * run.train.seq_len
    rows = tokens * (model.num_experts // shape.expert if dispatch == "dense" else model.experts_per_token)
    assert saved_bytes == 2 * model.num_layers * rows * model.mlp_dim // shape.tensor * 2  # in bf16


@pytest.mark.full
def test_a_plan_for_divided_experts_takes_the_bytes_that_were_foreseen():
    """What is inside the experts is saved by its author's names alone, as no other ones exist in the compiled step."""
    run = make_run(load_target("h100-80gb", parse_mesh("expert=4")), EXPERTS)
    found = plan_run(run, losses=("full",), batch=8, max_batch=8, named=False).found
    assert isinstance(found, Plan)
    assert found.predicted_bytes == pytest.approx(found.cost.total_bytes, rel=0.03)
    assert not any("own_experts" in name for step in found.tried for name in step.policy.names())
