"""Several devices: the axes of a mesh, where each array lies, and that each device holds and computes its share."""

import itertools
import json
import math
import os
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxremat.command import set_up_process
from jaxremat.errors import TargetError, UsageError
from jaxremat.flags import RunFlags, SweepFlags
from jaxremat.grid import trials_of
from jaxremat.mesh.axes import BATCH_AXES, MeshShape, parse_mesh
from jaxremat.mesh.sharding import batch_shardings, bytes_of_a_device, state_shardings
from jaxremat.model.decoder_workload import logical_axes
from jaxremat.policy.grammar import parse
from jaxremat.run import main
from jaxremat.step.step import abstract_args, init_state
from jaxremat.trial.base import traced_flops
from jaxremat.trial.trial import PolicyTrials
from jaxremat.xla.categories import phase_of
from jaxremat.xla.clock import SEVERAL_GPUS
from jaxremat.xla.exchanges import exchanges
from jaxremat.xla.flops import executed_flops
from jaxremat.xla.target import load_target
from tests.mesh_runs import MODEL, TRAIN, make_run, records

EIGHT = MeshShape(fsdp=8)


@pytest.mark.parametrize(
    ("text", "devices", "nodes", "found"),
    [
        (None, None, None, None),
        (None, 8, None, MeshShape(fsdp=8)),
        (None, 16, None, MeshShape(fsdp=16, nodes=2)),
        ("fsdp=8", None, None, MeshShape(fsdp=8)),
        ("data=2,fsdp=8", None, None, MeshShape(data=2, fsdp=8, nodes=2)),
        ("data=2, fsdp=-1", 16, 4, MeshShape(data=2, fsdp=8, nodes=4)),
        ("data=4", None, None, MeshShape(data=4)),
        ("ici_fsdp_parallelism=8,dcn_data_parallelism=2", None, None, MeshShape(data=2, fsdp=8, nodes=2)),
        ("ici_fsdp_parallelism=4,dcn_fsdp_parallelism=2,ici_tensor_parallelism=1", None, None, MeshShape(fsdp=8, nodes=2)),
        ("data=15", None, None, MeshShape(data=15, nodes=3)),
        ("fsdp=4,tensor=2", None, None, MeshShape(fsdp=4, tensor=2)),
        ("ici_tensor_parallelism=8,dcn_fsdp_parallelism=-1", 32, None, MeshShape(fsdp=4, tensor=8, nodes=4)),
    ],
)
def test_a_mesh_is_what_the_flags_say(text, devices, nodes, found):
    assert parse_mesh(text, devices, nodes) == found


@pytest.mark.parametrize(
    ("text", "devices", "nodes", "said"),
    [
        ("fsdp", None, None, "AXIS=N"),
        ("fsdp=0", None, None, "AXIS=N"),
        ("fsdp=8,fsdp=2", None, None, "twice"),
        ("fsdb=8", None, None, "did you mean 'fsdp'"),
        ("context=2", None, None, "aren't there yet"),
        ("fsdp=-1", None, None, "--devices 16"),
        ("data=-1,fsdp=-1", 8, None, "several axes"),
        ("data=3,fsdp=-1", 8, None, "--devices 3"),
        ("fsdp=8", 16, None, "--devices says 16"),
        ("fsdp=8", None, 3, "equally many"),
        (None, 0, None, "--devices got 0"),
        (None, None, 2, "--nodes 2 without devices"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused(text, devices, nodes, said):
    with pytest.raises(UsageError, match=said):
        parse_mesh(text, devices, nodes)


def test_a_mesh_reads_as_it_is_written():
    assert [str(mesh) for mesh in (EIGHT, MeshShape(2, 4), MeshShape(1, 4, 2), MeshShape())] == [
        *("fsdp=8", "data=2,fsdp=4", "fsdp=4,tensor=2", "data=1")
    ]


@pytest.fixture(scope="module")
def h100s():
    return load_target("h100-80gb", EIGHT)


def test_kernels_lie_along_the_width_of_the_model(h100s):
    workload = make_run(h100s).workload_at(8)
    state = jax.eval_shape(lambda params: init_state(workload, TRAIN, params), workload.abstract_params)
    found = state_shardings(h100s.mesh, state, state.params, logical_axes)
    specs = {
        jax.tree_util.keystr(path, simple=True, separator="/"): sharding.spec
        for path, sharding in jax.tree.leaves_with_path(found.params)
    }
    assert specs["embedding/embedding"] == PartitionSpec(None, "fsdp")
    assert specs["layers/attention/query/kernel"] == PartitionSpec(None, "fsdp", None, None)
    assert specs["layers/attention/out/kernel"] == PartitionSpec(None, None, None, "fsdp")
    assert specs["layers/mlp/wi_0/kernel"] == PartitionSpec(None, "fsdp", None)
    assert specs["layers/mlp/wo/kernel"] == PartitionSpec(None, None, "fsdp")
    assert specs["final_norm/scale"] == PartitionSpec()
    assert found.opt_state[0].mu == found.opt_state[0].nu == found.params


def test_parameters_of_which_nothing_is_known(h100s):
    """The largest dimension that 8 divides is divided, and of a stack not that of its layers; small arrays lie whole."""
    shape = jax.ShapeDtypeStruct
    params = {
        "stack": shape((512, 48, 256), jnp.float32),
        "odd": shape((511, 1023), jnp.float32),
        "tall": shape((4096, 16), jnp.float32),
        "vector": shape((64 * 1024,), jnp.float32),
        "small": shape((128,), jnp.float32),
    }
    found = {name: sharding.spec for name, sharding in state_shardings(h100s.mesh, params, params, None).items()}
    assert found == {
        "stack": PartitionSpec(None, None, "fsdp"),
        "odd": PartitionSpec(),
        "tall": PartitionSpec(None, "fsdp"),
        "vector": PartitionSpec("fsdp"),
        "small": PartitionSpec(),
    }
    shardings = state_shardings(h100s.mesh, params, params, None)
    whole = {name: math.prod(leaf.shape) * 4 for name, leaf in params.items()}
    by_hand = whole["odd"] + whole["small"] + (whole["stack"] + whole["tall"] + whole["vector"]) // 8
    assert bytes_of_a_device(params, shardings) == by_hand
    stacked = batch_shardings(h100s.mesh, {"tokens": shape((8, 16, 9), jnp.int32)}, [1])
    assert stacked["tokens"].spec == PartitionSpec(None, "fsdp")
    batch = {"tokens": shape((16, 9), jnp.int32), "scale": shape((), jnp.float32)}
    assert [sharding.spec for sharding in batch_shardings(h100s.mesh, batch, [None, 0]).values()] == [
        PartitionSpec(),
        PartitionSpec("fsdp"),
    ]


POLICIES = ("none", "dots", "dots+attention", "nothing", "save:mlpwi_0", "every:2+nothing", "one-in:2")
SHARED = MeshShape(fsdp=4, tensor=2)
SIXTEEN = MeshShape(data=2, fsdp=4, tensor=2, nodes=2)
#: Those that CI compiles, on the first JAX line or on both. The others are behind --slow.
FIRST_LINE = {
    *((EIGHT, "none", True), (EIGHT, "one-in:2", True), (EIGHT, "save:mlpwi_0", False)),
    *((SHARED, "none", True), (SHARED, "dots+attention", False), (SIXTEEN, "nothing", True)),
}
BOTH_LINES = {(EIGHT, "nothing", True), (EIGHT, "dots+attention", False), (SHARED, "nothing", True)}
SHARES = [
    pytest.param(
        mesh,
        policy,
        scan_layers,
        id=f"{mesh}-{policy}-{'loop' if scan_layers else 'unrolled'}",
        marks=() if case in BOTH_LINES else pytest.mark.any_jax if case in FIRST_LINE else pytest.mark.slow,
    )
    for case in itertools.product((EIGHT, SHARED, SIXTEEN), POLICIES, (True, False))
    for mesh, policy, scan_layers in [case]
]


@pytest.mark.parametrize(("mesh", "policy", "scan_layers"), SHARES)
def test_each_device_holds_and_computes_its_share(h100, mesh, policy, scan_layers):
    """Of FLOPs what one device with the same sequences executes, over the devices that share them; of the state an eighth.

    By hand: each of the three meshes divides kernels and tables in 8 parts. What is below 64 KiB lies whole.
    """
    model = replace(MODEL, scan_layers=scan_layers, num_layers=4)
    run, alone = make_run(load_target("h100-80gb", mesh), model), make_run(h100, model)
    trials, of_one = (PolicyTrials(of, policy, parse(policy)) for of in (run, alone))
    done = trials.compile(2)
    assert executed_flops(done.module).total * mesh.tensor == executed_flops(of_one.compile(2).module).total
    workload = run.workload_at(2 * mesh.num_members)
    state, batch = abstract_args(workload, TRAIN)
    leaves = [leaf for leaf in jax.tree.leaves(state)]
    whole = sum(leaf.size * 4 for leaf in leaves if leaf.size * 4 < 2**16)
    divided = sum(leaf.size * 4 for leaf in leaves if leaf.size * 4 >= 2**16)
    assert trials.run.state_bytes() == whole + divided // 8
    assert trials.run.state_bytes() < of_one.run.state_bytes() / 6
    held = done.memory.argument_bytes - batch.size * 4 // mesh.num_members
    assert held == pytest.approx(trials.run.state_bytes(), abs=256 * len(leaves))


@pytest.mark.any_jax
@pytest.mark.parametrize(("mesh", "scan_layers"), [(EIGHT, True), (EIGHT, False), (SHARED, True)])
def test_parameters_are_gathered_once_forward_and_once_backward(mesh, scan_layers):
    """Activations of other members aren't gathered, and what a policy runs again gathers nothing again."""
    run = make_run(load_target("h100-80gb", mesh), replace(MODEL, scan_layers=scan_layers, num_layers=4))
    params = run.workload_at(16).abstract_params
    in_bf16 = sum(leaf.size * 2 for leaf in jax.tree.leaves(params)) // mesh.tensor
    for policy in ("nothing", "dots+attention"):
        done = PolicyTrials(run, policy, parse(policy)).compile(2)
        gathered, others = Counter[str](), 0
        for exchange in exchanges(done.module, mesh):
            if exchange.kind == "all-gather" and exchange.what == "parameter":
                gathered[phase_of(exchange.op_name) or ""] += exchange.num_bytes * exchange.times
            elif exchange.kind == "all-gather" and len(mesh.places(exchange.groups[0], BATCH_AXES)) > 1:
                others += exchange.num_bytes
        assert gathered["backward"] <= gathered["forward"] < 1.1 * in_bf16, policy
        assert sum(gathered.values()) > 0.9 * in_bf16, policy
        assert others < 0.01 * in_bf16, policy


@pytest.mark.any_jax
def test_a_plan_on_a_mesh(tmp_path):
    """The plan fits, takes the bytes that were expected, and is at least as fast as the named policies."""
    out = tmp_path / "rows.jsonl"
    flags = [*ARGV, "--mesh", "fsdp=8", "--batch", "8", "--budget", "300MiB", "--out", str(out)]
    assert main([*flags, "--policy", "auto", "nothing", "dots"]) == 0
    (plan,) = records(out, "plan")
    rows = records(out, "trial")
    assert plan["total_bytes"] <= plan["budget_bytes"]
    named = [row["step_s"] for row in rows if row["requested_policy"] != "auto" and row["fits"]]
    assert named
    assert plan["step_s"] <= min(named)
    assert plan["config"]["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1, "expert": 1, "nodes": 1}


def test_records_say_which_devices(h100s):
    row = PolicyTrials(make_run(h100s, train=replace(TRAIN, accumulate=3)), "nothing", parse("nothing")).record(2, "trial")
    assert (row.mesh, row.num_devices, row.batch, row.global_batch) == ("fsdp=8", 8, 2, 2 * 3 * 8)
    assert (row.findings, row.error, row.predicted_interval) == ((), None, SEVERAL_GPUS)
    assert row.kept
    (of_inputs,) = row.kept.saved
    assert of_inputs.num_bytes == MODEL.num_layers * 2 * TRAIN.seq_len * MODEL.embed_dim * 2  # of one device, in bf16
    assert row.predicted
    assert row.step_s == row.predicted.step_s > row.predicted.collective_exposed_s > 0
    assert row.predicted.collective_s >= row.predicted.collective_exposed_s
    assert row.executed_flops
    assert row.recompute_overhead_percent
    assert traced_flops(make_run(h100s), 2) == 8 * traced_flops(make_run(load_target("h100-80gb")), 2)


@pytest.mark.any_jax
def test_more_than_its_share_is_said(h100s, monkeypatch):
    """Without their constraints the decoder's layers are computed several times over."""
    for module in ("layers", "loss", "transformer"):
        monkeypatch.setattr(f"jaxremat.model.{module}.on_mesh", lambda x, *axes: x)
    findings = PolicyTrials(make_run(h100s), "none", parse("none")).record(2, "trial").findings or ()
    (found,) = [finding for finding in findings if finding.rule == "more-than-its-share"]
    assert float(found.evidence.split()[3]) > 1.2
    assert "most of them in Decoder.hidden/layers" in found.evidence


ARGV = ["--model", "tiny", "--seq-len", "64", "--loss", "chunked", "--policy", "nothing"]


@pytest.mark.any_jax
def test_the_command(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert main([*ARGV, "--mesh", "data=2,fsdp=4", "--batch", "4", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "8 x NVIDIA H100" in said
    assert "mesh      data=2,fsdp=4; all numbers are those of one device" in said
    assert "predicted" in said
    (row,) = records(out, "trial")
    assert (row["mesh"], row["num_devices"], row["global_batch"]) == ("data=2,fsdp=4", 8, 32)
    assert row["config"]["mesh"] == {"data": 2, "fsdp": 4, "tensor": 1, "expert": 1, "nodes": 1}


@pytest.mark.any_jax
def test_the_largest_batch_of_a_global_batch(tmp_path):
    out = tmp_path / "rows.jsonl"
    assert main([*ARGV, "--devices", "8", "--global-batch", "64", "--budget", "1GiB", "--out", str(out)]) == 0
    (found,) = records(out, "largest_batch")
    assert found["largest_batch"] == 8


def test_the_list_of_shardings(capsys):
    """Its bytes are those of the shards by hand: kernels and tables are divided by 16, and norms lie whole."""
    assert main(["--model", "llama3-8b", "--mesh", "data=2,fsdp=16", "--list", "shardings", "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    table = rows["embedding/embedding"]
    assert (table["lies"], table["device_bytes"]) == ("128256 4096/fsdp", 128_256 * 4096 * 4 // 16)
    gate = rows["layers/mlp/wi_0/kernel"]
    assert (gate["lies"], gate["device_bytes"]) == ("32 4096/fsdp 14336", 32 * 4096 * 14_336 * 4 // 16)
    norm = rows["final_norm/scale"]
    assert (norm["lies"], norm["device_bytes"]) == ("4096 (whole, as it has < 64 KiB)", 4096 * 4)
    assert main(["--model", "gpt2", "--mesh", "fsdp=5,tensor=3", "--list", "shardings", "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["position"]["lies"] == "1024 768 (no multiple of fsdp=5)"
    assert rows["position"]["device_bytes"] == rows["position"]["num_bytes"] == 1024 * 768 * 4
    table = rows["embedding/embedding"]
    assert table["lies"] == "50257 768 (50257 no multiple of tensor=3; no multiple of fsdp=5)"
    kernel = rows["layers/mlp/wi_0/kernel"]
    assert (kernel["lies"], kernel["device_bytes"]) == (
        "12 768 3072/tensor (no multiple of fsdp=5)",
        kernel["num_bytes"] // 3,
    )
    assert main(["--model", "gpt2", "--list", "shardings"]) == 2
    assert "--mesh fsdp=8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mesh", "fsdp=8", "--global-batch", "12"], "--global-batch 8"),
        (["--mesh", "fsdp=8", "--target", "cpu"], "--target h100-80gb"),
        (["--mesh", "fsdp=eight"], "AXIS=N"),
        (["--mesh", "fsdp=2,tensor=8"], "Next: --mesh fsdp=4,tensor=4"),
    ],
)
def test_the_command_refuses(flags, said, capsys):
    assert main(["--model", "tiny", *flags]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert said in error
    assert "Traceback" not in error


def test_a_mesh_is_compiled_for_without_a_gpu_where_one_is_attached(monkeypatch, tmp_path):
    """Beside an attached GPU, `--mesh` alone is still for GPUs that aren't here: for the process, the sweep and the target."""
    monkeypatch.setattr("jaxremat.xla.gpu.nvidia_driver", lambda: True)
    monkeypatch.setattr("jaxremat.command.nvidia_driver", lambda: True)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.delenv("JAX_PLATFORMS")
    (here,) = trials_of(SweepFlags(out=tmp_path, batch=(("1",),)))
    (on_mesh,) = trials_of(SweepFlags(out=tmp_path, batch=(("1",),), devices=8))
    assert (here.target, here.alone) == ("gpu", True)
    assert (on_mesh.target, on_mesh.alone) == ("h100-80gb", False)
    set_up_process(RunFlags(mesh="fsdp=8"))
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_a_target_that_cannot_have_a_mesh():
    with pytest.raises(TargetError, match="JAX_NUM_CPU_DEVICES=8"):
        load_target("cpu", EIGHT)
    with pytest.raises(TargetError, match="JAX sees no NVIDIA GPU"):
        load_target("gpu", EIGHT)


@pytest.mark.parametrize("fields", ["loss=loss, params={'w': W}, batch=X", "step=loss, args=({'w': W}, X)"])
def test_workloads_that_cannot_have_a_mesh(fields, tmp_path, capsys):
    """One batch, or a whole step."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import jax, jax.numpy as jnp, jaxremat\n"
        "W, X = (jax.ShapeDtypeStruct((16, 16), jnp.float32) for _ in range(2))\n"
        "def loss(params, batch): return jnp.mean(jnp.square(batch @ params['w']))\n"
        f"workload = jaxremat.Workload({fields})\n"
    )
    assert main(["--model", f"{path}:workload", "--mesh", "fsdp=8", "--policy", "none"]) == 2
    error = capsys.readouterr().err
    assert "a mesh of 8 devices was asked for, and mine.py:workload" in error
    assert "Traceback" not in error
