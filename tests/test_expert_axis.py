"""The axis `expert` of a mesh: what it divides, what is refused, and that each device computes its share of the experts."""

import json
from dataclasses import replace

import pytest

from jaxremat.mesh.axes import MeshShape, parse_mesh
from jaxremat.policy.grammar import parse
from jaxremat.run import main
from jaxremat.trial.base import traced_flops
from jaxremat.trial.trial import PolicyTrials
from jaxremat.xla.flops import count_step_flops, executed_flops
from jaxremat.xla.kernels import kernels_of
from jaxremat.xla.target import load_target
from tests.mesh_runs import MODEL, make_run, records

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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mesh", "fsdp=2,expert=4"], "it has none. Allowed: expert=1. Likely cause: --num-experts was left out"),
        (["--num-experts", "6", "--mesh", "fsdp=2,expert=4"], "and it has 6. Allowed: expert=1, 2, 3, 6."),
        (["--num-experts", "6", "--mesh", "expert=4"], "Next: --mesh fsdp=2,expert=2."),
        (
            ["--num-experts", "4", "--mesh", "expert=4", "--policy", "auto"],
            "--policy auto got experts on the mesh expert=4.",
        ),
        (["--num-experts", "4", "--dispatch", "ragged", "--mesh", "fsdp=4", "--policy", "auto"], "with --dispatch ragged."),
    ],
)
def test_what_an_expert_axis_cannot_divide_is_refused(flags, said, capsys):
    assert main(["--model", "tiny", *flags]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("dispatch", "mesh", "policy", "scan_layers"),
    [
        ("dense", "fsdp=2,expert=4", "nothing", True),
        pytest.param("dense", "fsdp=8", "dots", True, marks=pytest.mark.any_jax),
        pytest.param("dense", "data=2,expert=2,tensor=2", "save:mlpwi_0", False, marks=pytest.mark.any_jax),
        ("ragged", "fsdp=2,expert=2,tensor=2", "nothing", True),
        pytest.param("ragged", "data=2,fsdp=4", "none", False, marks=pytest.mark.slow),
    ],
)
def test_each_device_computes_its_share_of_the_experts(h100, dispatch, mesh, policy, scan_layers):
    """As many FLOPs as one device with the same sequences, over those that share them. What JAX asked for is that, too."""
    model, shape = replace(EXPERTS, dispatch=dispatch, scan_layers=scan_layers), parse_mesh(mesh)
    assert shape is not None
    run, alone = make_run(load_target("h100-80gb", shape), model), make_run(h100, model)
    done, of_one = (PolicyTrials(of, policy, parse(policy)).compile(2) for of in (run, alone))
    executed = executed_flops(done.module).total
    assert executed * shape.tensor == executed_flops(of_one.module).total
    assert executed * shape.num_devices == count_step_flops(done.jaxpr).total
    assert traced_flops(run, 2) == shape.num_members * traced_flops(alone, 2)
    kinds = {kernel.collective.kind for kernel in kernels_of(done.module) if kernel.collective}
    assert {"all-gather", "reduce-scatter"} <= kinds


@pytest.mark.any_jax
def test_a_step_with_an_expert_axis_is_recorded(tmp_path):
    out = tmp_path / "rows.jsonl"
    flags = ["--model", "tiny", "--num-experts", "4", "--seq-len", "64", "--policy", "nothing", "--batch", "4"]
    assert main([*flags, "--mesh", "fsdp=2,expert=4", "--out", str(out)]) == 0
    (row,) = records(out, "trial")
    assert (row["mesh"], row["num_devices"], row["global_batch"]) == ("fsdp=2,expert=4", 8, 32)
    assert row["config"]["mesh"] == {"data": 1, "fsdp": 2, "tensor": 1, "expert": 4, "nodes": 1}
    assert not row["findings"]
    (again, *_) = row["kept"]["again"]
    assert again["operation"] == "matmul"
    assert 0 < again["num_again"] <= again["num_forward"] < 100, "each matmul counts once, and not once for each device"


@pytest.mark.any_jax
@pytest.mark.parametrize("scan_layers", [True, False])
def test_what_is_saved_inside_experts_counts_for_one_device(scan_layers):
    """By hand: the gate's and the up projection's results of a device's own expert, for the tokens of four members."""
    model = replace(MODEL, num_experts=4, scan_layers=scan_layers)
    policy = "save:mlpwi_0,mlpwi_1"
    run = make_run(load_target("h100-80gb", MeshShape(fsdp=2, expert=4)), model)
    row = PolicyTrials(run, policy, parse(policy)).record(2, "trial")
    assert row.kept
    of_gates = 2 * model.num_layers * 4 * 2 * run.train.seq_len * model.mlp_dim * 2  # in bf16
    assert sum(some.num_bytes for some in row.kept.saved if some.kind == "name") == of_gates
