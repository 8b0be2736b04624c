"""Gathered kernels: a policy keeps them by name, and the planner knows what they take and what their gathers cost."""

import json
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxremat.answer import workload_estimate
from jaxremat.answer.layer_estimate import speed_of
from jaxremat.answer.layer_problem import layer_problem, trace_layer
from jaxremat.answer.layer_share import Share
from jaxremat.answer.planned import plan_run
from jaxremat.answer.workload_estimate import estimate_workload
from jaxremat.chips.nvidia.speed import NCCL
from jaxremat.chips.speed import Links
from jaxremat.chips.target import Target, load_target
from jaxremat.cli.run import main
from jaxremat.config import TrainConfig
from jaxremat.errors import UnknownNameError
from jaxremat.knapsack.solve import solve
from jaxremat.mesh.axes import MeshShape, parse_mesh
from jaxremat.mesh.sharding import abstract_mesh, groups_along, on_mesh, tracing_on
from jaxremat.model.decoder_workload import decoder_factory
from jaxremat.model.gathers import GATHERED_NAMES, gathered_names
from jaxremat.planner.plan import Plan
from jaxremat.policy.grammar import parse
from jaxremat.trial.trials import Trials
from jaxremat.workload.factory import WorkloadFactory
from jaxremat.workload.workload import Workload
from jaxremat.xla.kernels import kernels_of
from jaxremat.xla.recomputed import saved_and_recomputed
from tests.mesh_runs import MODEL as WIDE
from tests.roofline import SLOW

MODEL = replace(WIDE, num_layers=3, dtype="bfloat16")
TRAIN = TrainConfig(seq_len=256, loss="chunked")
SPEED = replace(SLOW, links=Links(8, 8, 1e9, None, NCCL))
WI_0_BYTES = 256 * 1024 * 2  # of a gathered kernel in bfloat16


def struct(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture(scope="module")
def h100s() -> Target:
    return load_target("h100-80gb", MeshShape(fsdp=8))


def make_run(target: Target, *, scan_layers: bool = True, budget_bytes: int = 2**40) -> Trials:
    return Trials(decoder_factory(replace(MODEL, scan_layers=scan_layers), "cudnn"), TRAIN, target, budget_bytes)


def compiled(run: Trials, policy: str) -> tuple[Counter[str], int]:
    """The bytes of each kind of collective, and the total bytes of the step."""
    done = run.compile(parse(policy), 2)
    sent = Counter[str]()
    for kernel in kernels_of(done.module):
        if kernel.collective:
            sent[kernel.collective.kind] += kernel.collective.num_bytes * kernel.count
    return sent, done.memory.total_bytes


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize(
    ("scan_layers", "saved", "saved_bytes"),
    [(True, ["wi_0_gathered"], WI_0_BYTES), (False, GATHERED_NAMES, 2 * (3 * 256 * 1024 + 2 * 256 * 256 + 2 * 256 * 128))],
)
def test_a_saved_kernel_is_gathered_once(h100s, scan_layers, saved, saved_bytes):
    """One gather of each layer's kernel less, and all other collectives as they were. In a scan its stack is what it takes."""
    run = make_run(h100s, scan_layers=scan_layers)
    before, bytes_before = compiled(run, "save:mlpwi_0")
    after, bytes_after = compiled(run, f"save:mlpwi_0,{','.join(saved)}")
    assert before - after == {"all-gather": MODEL.num_layers * saved_bytes}
    assert after - before == {}
    if scan_layers:
        assert bytes_after - bytes_before == MODEL.num_layers * saved_bytes


@pytest.mark.full
@pytest.mark.parametrize("scan_layers", [True, False])
def test_a_frozen_kernel_that_is_gathered_is_among_what_is_saved(h100s, scan_layers):
    """Its gather is an operation on an argument alone. It takes bytes of its own, where the argument is there in any case."""
    model = replace(MODEL, scan_layers=scan_layers, param_dtype="bfloat16", lora="4")
    done = Trials(decoder_factory(model, "cudnn"), TRAIN, h100s, 2**40).compile(parse("save:mlpwi_0,wi_0_gathered"), 2)
    saved, of_names = saved_and_recomputed(done), {"wi_0_gathered", "mlpwi_0"}
    sizes = {some.name: (some.num_values, some.num_bytes) for some in saved.saved if some.kind == "name"}
    assert sizes["wi_0_gathered"] == (MODEL.num_layers, MODEL.num_layers * WI_0_BYTES)
    assert (sizes.keys(), saved.unread_names) == (of_names, ())


@pytest.mark.parametrize(
    "policy", ["none", "everything", "dots+attention", "nothing", "minimal", "every:2+dots", "one-in:2"]
)
def test_rules_keep_no_gathered_kernel(policy):
    """Their programs have no gathers of their own, and are what they were without these names."""
    assert gathered_names(parse(policy)) == ()


def test_which_gathers_a_policy_decides_about():
    assert gathered_names(parse("save:mlpwi_0,wo_gathered+offload:key_gathered")) == ("key_gathered", "wo_gathered")
    assert gathered_names(parse("1*nothing|2*save:wi_0_gathered")) == ("wi_0_gathered",)
    assert gathered_names(parse("every:2+save:wi_1_gathered")) == ("wi_1_gathered",)


@pytest.mark.full
def test_names_of_gathered_kernels_are_those_of_a_mesh():
    factory, policy = decoder_factory(MODEL, "xla"), parse("save:mlpwi_0,wi_0_gathered")
    mesh = abstract_mesh(MeshShape(fsdp=4, tensor=2))
    names = {value.name for value in factory.layer_names(TRAIN, 1, mesh)}
    assert names >= {*GATHERED_NAMES, "mlpwi_0"}
    assert factory.checked(policy, TRAIN, mesh) == policy
    assert not {value.name for value in factory.layer_names(TRAIN, 1)} & set(GATHERED_NAMES)
    for whole in (None, abstract_mesh(MeshShape(data=8))):
        with pytest.raises(UnknownNameError) as caught:
            factory.checked(policy, TRAIN, whole)
        assert "'wi_0_gathered'" in caught.value.got
        assert parse_mesh(caught.value.next_step.partition("--mesh ")[2].split()[0].strip(";,."))
    with pytest.raises(UnknownNameError) as caught:
        factory.checked(parse("save:wi_0_gatherd"), TRAIN, mesh)
    assert "'wi_0_gathered'" in caught.value.next_step


def test_kernels_that_lie_whole_are_not_gathered():
    """By hand: two layers of [64, 128] in float32 are 64 KiB, which are divided, and one layer alone lies whole."""
    mesh = abstract_mesh(MeshShape(fsdp=8))
    for layers, gathered in ((2, True), (1, False)):
        model = replace(MODEL, embed_dim=64, mlp_dim=128, num_layers=layers)
        names = {value.name for value in decoder_factory(model, "xla").layer_names(TRAIN, 1, mesh)}
        assert ("wi_0_gathered" in names) == gathered


def test_the_list_of_names_on_a_mesh(capsys):
    assert main(["--model", "llama3-8b", "--mesh", "fsdp=4,tensor=2", "--list", "names", "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    kernel = rows["wi_0_gathered"]
    assert (kernel["shape"], kernel["dtype"], kernel["layer_bytes"]) == ([4096, 14336], "bfloat16", 4096 * 14336)


# What the planner is told.


def test_a_gather_by_hand():
    """On fsdp=4, tensor=2: w [64, 128] lies in 8 parts, and once it is gathered in 2.

    NCCL's LL protocol takes 6.6 us, 0.6 us for each of 3 hops, and 3/4 of the gathered bytes at half of 1e9 bytes/s.
    """
    axes = MeshShape(fsdp=4, tensor=2)
    mesh = abstract_mesh(axes)
    assert groups_along(mesh, ["fsdp"]) == ((0, 2, 4, 6), (1, 3, 5, 7))

    def layer(w, x):
        with tracing_on(mesh):
            divided = on_mesh(checkpoint_name(w.astype("bfloat16"), "half"), "embed", "mlp")
            gathered = checkpoint_name(on_mesh(divided, None, "mlp"), "w_gathered")
            return checkpoint_name(on_mesh(jnp.sin(x @ gathered), "batch", "mlp"), "y")

    share = Share(mesh, {((64, 128), "float32"): 8}, waits=0.5, axes=axes)
    args = struct(64, 128), struct(16, 64, dtype="bfloat16")
    problem, _, keep = layer_problem(trace_layer(layer, args), SPEED, in_scan=False, share=share)
    num_bytes = {value.name: value.num_bytes for value in problem.values}
    assert num_bytes["args[0]"] == 64 * 128 * 4 // 8
    assert num_bytes["half"] == 64 * 128 * 2 // 8
    assert num_bytes["w_gathered"] == 64 * 128 * 2 // 2
    assert num_bytes["args[1]"] == 16 * 64 * 2 // 2
    assert num_bytes["y"] == 16 * 128 * 2 // 2
    assert {"half", "w_gathered", "y"} == set(keep)
    (gather,) = (op for op in problem.ops if [problem.values[v].name for v in op.outputs] == ["w_gathered"])
    assert gather.recompute_s == pytest.approx(0.5 * (6.6e-6 + 3 * 0.6e-6 + 0.75 * 8192 / 0.5e9))
    (matmul,) = (op for op in problem.ops if op.flops)
    assert matmul.flops == 2 * 16 * 64 * 128 // 2
    assert [value.name for value in problem.values if value.needed] == ["args[1]", "w_gathered", "cos"]
    (cast,) = (op for op in problem.ops if [problem.values[v].name for v in op.outputs] == ["half"])
    assert cast.recompute_s == pytest.approx(1e-6 + 2 * 2048 / 1e9)  # it is written before it is gathered
    whole, *_ = layer_problem(trace_layer(layer, args), SPEED, in_scan=False)
    assert {value.name: value.num_bytes for value in whole.values}["w_gathered"] == 64 * 128 * 2


def test_a_divided_parameter_is_read_whole():
    """Without a gather in the program XLA makes one. What a matmul reads of a divided kernel is all of it."""
    axes = MeshShape(fsdp=8)
    share = Share(abstract_mesh(axes), {((512, 512), "float32"): 8}, axes=axes)
    layer = trace_layer(lambda w, x: x @ jnp.abs(w), (struct(512, 512), struct(2, 512)))
    problem, *_ = layer_problem(layer, SPEED, share=share)
    (matmul,) = (op for op in problem.ops if op.flops)
    assert matmul.recompute_s == pytest.approx(1e-6 + (512 * 512 + 2 * 2 * 512) * 4 / 1e9)
    assert [value.num_bytes for value in problem.values if value.name == "abs"] == [512 * 512 * 4 // 8]


def on_slow_links(target: Target, bytes_per_s: float) -> Target:
    assert target.speed
    assert target.speed.links
    return replace(target, speed=replace(target.speed, links=replace(target.speed.links, node_bytes_per_s=bytes_per_s)))


@pytest.mark.full
def test_gathered_kernels_are_saved_where_links_are_slow_and_memory_is_ample(h100s):
    slow = on_slow_links(h100s, 1e8)
    assert slow.speed
    problem = estimate_workload(make_run(slow), slow.speed, 2)[0].layer.problem

    def saved(budget_bytes: int) -> set[str]:
        return {problem.values[v].name for v in solve(problem, budget_bytes).decision.save} & set(GATHERED_NAMES)

    assert saved(2**30) == set(GATHERED_NAMES)
    assert saved(WI_0_BYTES - 1) <= {"query_gathered", "key_gathered", "value_gathered", "out_gathered"}
    assert saved(0) == set()


def test_a_layer_is_traced_once_however_exposed_its_gathers_are(h100s, monkeypatch):
    traced = []
    monkeypatch.setattr(workload_estimate, "trace_layer", lambda *layer: traced.append(layer) or trace_layer(*layer))
    run = make_run(on_slow_links(h100s, 1e9))

    def seconds(run: Trials, waits: float) -> list[float]:
        problem = estimate_workload(run, speed_of(run.target), 2, waits=waits)[0].layer.problem
        return [op.recompute_s for op in problem.ops if problem.values[op.outputs[0]].name in GATHERED_NAMES]

    exposed, hidden = seconds(run, 1.0), seconds(replace(run, budget_bytes=2**30), 0.25)
    assert len(traced) == 1
    assert exposed
    assert hidden == pytest.approx([one / 4 for one in exposed])


@pytest.mark.full
@pytest.mark.any_jax
def test_a_plan_saves_gathered_kernels(h100s):
    """Between slow links with ample memory."""
    run = make_run(on_slow_links(h100s, 1e9), budget_bytes=2**30)
    found = plan_run(run, losses=("full",), batch=2, max_batch=2, named=False).found
    assert isinstance(found, Plan)
    assert len(gathered_names(found.policy)) >= 5
    assert found.cost.total_bytes <= 2**30
    assert found.predicted_bytes == pytest.approx(found.cost.total_bytes, rel=0.03)


def test_a_converted_parameter_of_a_workload_is_divided(h100s):
    """Of layers that were found in a loss: each device converts its eighth of a stack of [4, 64, 512] kernels."""
    params = {"w": struct(4, 64, 512)}

    def loss(params, x):
        def layer(x, w):
            return jnp.tanh(x @ w.astype("bfloat16")) @ jnp.ones((512, 64), "bfloat16"), None

        return jnp.mean(jax.lax.scan(layer, x, params["w"])[0])

    def at(batch: int | None) -> Workload:
        return Workload(loss=loss, params=params, batch=struct(batch or 1, 64, dtype="bfloat16"))

    run = Trials(WorkloadFactory("mine", at, has_free_batch=True), TrainConfig(), h100s, 2**40)
    (kind,) = estimate_workload(run, h100s.speed, 16)
    num_bytes = {value.name: value.num_bytes for value in kind.layer.problem.values}
    assert num_bytes["convert_element_type"] == 64 * 512 * 2 // 8
    assert num_bytes["dot_general"] == 16 * 512 * 2
