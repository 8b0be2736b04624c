"""Several devices: the axes of a mesh, where each array lies, and that each device holds and computes its share."""

import json
import math
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxremat.chips.nvidia.gpu import load_gpu
from jaxremat.chips.nvidia.speed import speed_of
from jaxremat.chips.speed import SEVERAL_GPUS
from jaxremat.chips.target import Target, load_target
from jaxremat.cli.command import parse_flags, set_up_process
from jaxremat.cli.grid import sweep_trials
from jaxremat.cli.run import main, show_list
from jaxremat.errors import TargetError, UsageError
from jaxremat.mesh.axes import AXES, BATCH_AXES, MeshShape, OwnAxes, axes_of_data, parse_mesh
from jaxremat.mesh.sharding import batch_shardings, bytes_of_a_device, state_shardings
from jaxremat.model.decoder_workload import logical_axes
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import NOTHING
from jaxremat.session.flags import RunFlags, SweepFlags
from jaxremat.session.request import check_run
from jaxremat.session.session import Session
from jaxremat.step.step import abstract_args, init_state
from jaxremat.xla.categories import phase_of
from jaxremat.xla.exchanges import exchanges
from jaxremat.xla.flops import count_step_flops, executed_flops
from tests.mesh_runs import MODEL, TRAIN, make_run, records, traced_flops

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


def test_the_network_of_a_node_is_that_of_its_devices():
    """3,200 Gbit/s are 400 GB/s, which is what the target has: 50 for each of 8 GPUs. A card without a known one gets times."""
    speeds = [
        speed_of(load_gpu(name)[1], parse_mesh("fsdp=16", None, None, gbps))
        for name, gbps in (("h100-80gb", None), ("h100-80gb", 3200), ("h100-80gb", 800), ("a6000", 800), ("a6000", None))
    ]
    found = [speed.links.network_bytes_per_s if speed and speed.links else None for speed in speeds]
    assert found == [50e9, 50e9, 12.5e9, 12.5e9, None]
    for mesh in (MeshShape(fsdp=16, nodes=2, network_gbps=800.0), OwnAxes((("rows", 16),), nodes=2, network_gbps=800.0)):
        assert axes_of_data(mesh.as_data()) == mesh
        assert "network_gbps" not in replace(mesh, network_gbps=None).as_data()


@pytest.mark.parametrize(
    ("text", "devices", "nodes", "value"),
    [
        ("fsdp", None, None, "'fsdp'"),
        ("fsdp=0", None, None, "'fsdp=0'"),
        ("fsdp=8,fsdp=2", None, None, "fsdp=8,fsdp=2"),
        ("fsdp=-1", None, None, "fsdp=-1"),
        ("data=-1,fsdp=-1", 8, None, "data=-1,fsdp=-1"),
        ("data=3,fsdp=-1", 8, None, "data=3,fsdp=-1"),
        ("context=2", None, None, "context"),
        ("fsdp=8", None, 3, "8 devices on 3"),
        (None, 0, None, "--devices got 0"),
        (None, 8, 0, "--nodes got 0"),
        (None, None, 2, "--nodes 2"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_rejected(text, devices, nodes, value):
    """The next step, beside the other flags, is a mesh."""
    with pytest.raises(UsageError) as caught:
        parse_mesh(text, devices, nodes)
    assert value in caught.value.got
    words = caught.value.next_step.split()
    flags = {"--mesh": text, "--devices": devices, "--nodes": nodes} | dict(zip(words[::2], words[1::2], strict=True))
    numbers = (value if value is None else int(value) for value in (flags.pop("--devices"), flags.pop("--nodes")))
    assert parse_mesh(flags.pop("--mesh"), *numbers)
    assert flags == {}


def test_flags_of_a_mesh_that_contradict_each_other():
    with pytest.raises(UsageError) as caught:
        parse_mesh("fsdp=8", 16)
    assert "--mesh fsdp=8" in caught.value.got
    assert "--devices says 16" in caught.value.got


def test_an_axis_that_is_not_known():
    with pytest.raises(UsageError) as caught:
        parse_mesh("fsdb=8")
    assert "'fsdb'" in caught.value.got
    assert all(axis in caught.value.allowed for axis in AXES)
    assert "'fsdp'" in caught.value.next_step


def test_a_mesh_reads_as_it_is_written():
    assert [str(mesh) for mesh in (EIGHT, MeshShape(2, 4), MeshShape(1, 4, 2), MeshShape())] == [
        *("fsdp=8", "data=2,fsdp=4", "fsdp=4,tensor=2", "data=1")
    ]


@pytest.fixture(scope="module")
def h100s() -> Target:
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


SHARED = MeshShape(fsdp=4, tensor=2)
SIXTEEN = MeshShape(data=2, fsdp=4, tensor=2, nodes=2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "policy", "scan_layers"),
    [
        (EIGHT, "nothing", True),
        (SHARED, "nothing", True),
        pytest.param(EIGHT, "dots+attention", False, marks=pytest.mark.any_jax),
        pytest.param(SHARED, "save:mlpwi_0", False, marks=pytest.mark.any_jax),
        pytest.param(SIXTEEN, "none", True, marks=pytest.mark.any_jax),
    ],
)
def test_each_device_holds_and_computes_its_share(h100, mesh, policy, scan_layers):
    """Of FLOPs what JAX traced, over all devices; of the state an eighth; and each parameter is gathered once a pass.

    By hand: each of the three meshes divides kernels and tables in 8 parts. What is below 64 KiB is on each device.
    """
    model = replace(MODEL, scan_layers=scan_layers, num_layers=3)
    run, alone = make_run(load_target("h100-80gb", mesh), model), make_run(h100, model)
    done = run.compile(parse(policy), 2)
    assert executed_flops(done.module).total * mesh.num_devices == count_step_flops(done.jaxpr).total
    assert traced_flops(run, 2) == traced_flops(alone, 2) * mesh.num_members

    state, batch = abstract_args(run.workload_at(2 * mesh.num_members), TRAIN)
    leaves = jax.tree.leaves(state)
    whole = sum(leaf.size * 4 for leaf in leaves if leaf.size * 4 < 2**16)
    divided = sum(leaf.size * 4 for leaf in leaves if leaf.size * 4 >= 2**16)
    assert run.state_bytes() == whole + divided // 8
    assert run.state_bytes() < alone.state_bytes() / 6
    num_moments, num_numbers = 2, sum(leaf.ndim == 0 for leaf in leaves)  # adamw, and its counts
    assert (1 + num_moments) * run.gradient_bytes() == run.state_bytes() - 4 * num_numbers
    assert alone.gradient_bytes() == 0
    of_state = done.memory.argument_bytes - batch.size * 4 // mesh.num_members
    assert of_state == pytest.approx(run.state_bytes(), abs=256 * len(leaves))

    # Activations of other sequences aren't gathered, and what a policy recomputes gathers nothing a second time.
    in_bf16 = sum(leaf.size * 2 for leaf in jax.tree.leaves(state.params)) // mesh.tensor
    gathered, others = Counter[str](), 0
    for exchange in exchanges(done.module, mesh):
        if exchange.kind == "all-gather" and exchange.what == "parameter":
            gathered[phase_of(exchange.op_name) or ""] += exchange.num_bytes * exchange.times
        elif exchange.kind == "all-gather" and len(mesh.places(exchange.groups[0], BATCH_AXES)) > 1:
            others += exchange.num_bytes
    assert gathered["backward"] <= gathered["forward"] < 1.1 * in_bf16
    assert sum(gathered.values()) > 0.9 * in_bf16
    assert others < 0.01 * in_bf16


@pytest.mark.full
def test_records_say_which_devices(h100s):
    trials = make_run(h100s, train=replace(TRAIN, accumulate=3))
    row = trials.record(NOTHING, 2)
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
    assert row.tokens_per_s == pytest.approx(3 * 2 * TRAIN.seq_len / row.predicted.step_s)

    done = trials.compile(NOTHING, 2)
    trials.of(NOTHING).done[2] = replace(done, memory=replace(done.memory, peak_bytes=0))
    assert not replace(trials, budget_bytes=done.memory.total_bytes - 1).record(NOTHING, 2).fits


@pytest.mark.full
@pytest.mark.any_jax
def test_the_largest_batch_of_a_global_batch(tmp_path):
    out = tmp_path / "rows.jsonl"
    flags = ["--model", "tiny", "--seq-len", "64", "--loss", "chunked", "--policy", "none", "--mesh", "data=2,fsdp=4"]
    assert main([*flags, "--global-batch", "64", "--budget", "1GiB", "--out", str(out)]) == 0
    (found,) = records(out, "largest_batch")
    assert found["largest_batch"] == 8
    (row,) = records(out, "trial")
    assert (row["mesh"], row["num_devices"], row["batch"], row["global_batch"]) == ("data=2,fsdp=4", 8, 8, 64)
    assert row["config"]["mesh"] == MeshShape(data=2, fsdp=4).as_data()


def test_the_list_of_shardings(capsys):
    """Its bytes are those of the shards by hand: kernels and tables are divided by 16, and norms are on each device."""

    def listed(*flags: str) -> dict[str, Any]:
        assert main([*flags, "--list", "shardings", "--json"]) == 0
        return {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}

    rows = listed("--model", "llama3-8b", "--mesh", "data=2,fsdp=16")
    table = rows["embedding/embedding"]
    assert (table["lies"], table["device_bytes"]) == ("128256 4096/fsdp", 128_256 * 4096 * 4 // 16)
    gate = rows["layers/mlp/wi_0/kernel"]
    assert (gate["lies"], gate["device_bytes"]) == ("32 4096/fsdp 14336", 32 * 4096 * 14_336 * 4 // 16)
    norm = rows["final_norm/scale"]
    assert norm["lies"].startswith("4096 (")
    assert norm["device_bytes"] == 4096 * 4

    rows = listed("--model", "gpt2", "--mesh", "fsdp=5,tensor=3")
    assert rows["position"]["lies"].startswith("1024 768 (")
    assert rows["position"]["device_bytes"] == rows["position"]["num_bytes"] == 1024 * 768 * 4
    table = rows["embedding/embedding"]["lies"]
    assert "tensor=3" in table
    assert "fsdp=5" in table
    kernel = rows["layers/mlp/wi_0/kernel"]
    assert kernel["lies"].startswith("12 768 3072/tensor (")
    assert kernel["device_bytes"] == kernel["num_bytes"] // 3


@pytest.mark.parametrize(
    ("flags", "got", "next_step"),
    [
        (["--mesh", "fsdp=8", "--global-batch", "12"], "--global-batch 12", "--global-batch 8"),
        (["--mesh", "fsdp=eight"], "'fsdp=eight'", None),
        (["--mesh", "fsdp=2,tensor=8"], "--mesh fsdp=2,tensor=8", "--mesh fsdp=4,tensor=4"),
    ],
)
def test_the_command_rejects(flags, got, next_step):
    with pytest.raises(UsageError) as caught:
        check_run(parse_flags(RunFlags, ["--model", "tiny", *flags]))
    assert got in caught.value.got
    assert next_step in (None, caught.value.next_step)
    flag, value = caught.value.next_step.split()
    kept = [word for pair in zip(flags[::2], flags[1::2], strict=True) if pair[0] != flag for word in pair]
    check_run(parse_flags(RunFlags, ["--model", "tiny", *kept, flag, value]))


def test_shardings_are_those_of_a_mesh():
    with pytest.raises(UsageError) as caught:
        show_list(check_run(parse_flags(RunFlags, ["--model", "gpt2"])), "shardings")
    assert caught.value.next_step.startswith("--mesh ")


def test_a_mesh_is_compiled_for_without_a_gpu_where_one_is_attached(monkeypatch, tmp_path):
    """Beside an attached GPU, `--mesh` alone is still for GPUs that aren't here: for the process, the sweep and the target."""
    monkeypatch.setattr("jaxremat.chips.catalog.driver_here", lambda: True)
    monkeypatch.setattr("jaxremat.cli.command.driver_here", lambda: True)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.delenv("JAX_PLATFORMS")
    (here,) = sweep_trials(SweepFlags(out=tmp_path, batch=(1,)))
    (on_mesh,) = sweep_trials(SweepFlags(out=tmp_path, batch=(1,), devices=8))
    assert (here.target, here.alone) == ("gpu", True)
    assert (on_mesh.target, on_mesh.alone) == ("h100-80gb", False)
    set_up_process(RunFlags(mesh="fsdp=8"))
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_a_target_that_cannot_have_a_mesh():
    with pytest.raises(TargetError) as caught:
        load_target("cpu", EIGHT)
    assert "JAX_NUM_CPU_DEVICES=8" in caught.value.next_step
    assert "--target h100-80gb" in caught.value.next_step
    with pytest.raises(TargetError) as caught:
        load_target("gpu", EIGHT)
    assert "GPU" in caught.value.got


@pytest.mark.parametrize("fields", ["loss=loss, params={'w': W}, batch=X", "step=loss, args=({'w': W}, X)"])
def test_workloads_that_cannot_have_a_mesh(fields, write):
    """One batch, or a whole step."""
    write(
        "mine.py",
        "import jax, jax.numpy as jnp, jaxremat\n"
        "W, X = (jax.ShapeDtypeStruct((16, 16), jnp.float32) for _ in range(2))\n"
        "def loss(params, batch): return jnp.mean(jnp.square(batch @ params['w']))\n"
        f"workload = jaxremat.Workload({fields})\n",
    )
    request = check_run(parse_flags(RunFlags, ["--model", "mine.py:workload", "--mesh", "fsdp=8", "--policy", "none"]))
    with pytest.raises(UsageError) as caught:
        Session.of(request, load_target("h100-80gb", EIGHT))
    assert "mesh of 8 devices" in caught.value.got
    assert "mine.py:workload" in caught.value.got
