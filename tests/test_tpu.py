"""TPUs as targets: layouts, what XLA's compiler says of a program that is too large, and steps that it compiles."""

import functools
import os
import re
import signal
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxremat.chips.catalog import CHIPS, chip_of, describe
from jaxremat.chips.target import load_target
from jaxremat.chips.tpu import installed
from jaxremat.chips.tpu.chip import TPU
from jaxremat.chips.tpu.device import FOLDER, layout_of, load_tpu
from jaxremat.chips.tpu.topology import _own_signals
from jaxremat.errors import CompileError, MissingDependencyError, TargetError, UsageError
from jaxremat.mesh.axes import MeshShape, axes_of_data, parse_mesh
from jaxremat.policy.grammar import parse
from jaxremat.report.sentences import why_not
from jaxremat.search.batch import search_from_above
from jaxremat.session.flags import RunFlags
from jaxremat.session.request import Auto, check_run
from jaxremat.session.session import Session
from jaxremat.trial.record import LargestBatchRecord, PlanRecord, TrialRecord
from jaxremat.workload.workload import Workload
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.memory import memory_of_rejected
from jaxremat.xla.options import preset_options
from tests import made_up_records
from tests.helpers import searched

GIB, MIB = 2**30, 2**20
EARLY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries ({}) exceeds available HBM "
    "({})."
)
EARLY_050 = EARLY.replace(": Ran", ": E1000: CompileTimeHbmOom: Ran") + (
    " HLO module: jit__lambda.\nSee https://openxla.org/xla/errors/error_1000 for more details."
)
#: libtpu 0.0.42.1, of a step with offloading on a v6e, under a limit of 530 MiB.
LATE = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 534.00M of 530.00M hbm. Exceeded hbm capacity by 4.00M.

Total hbm usage >= 762.00M:
    reserved        260.00M 
    program         406.00M 
    arguments        96.00M 

Output size 32.00M; shares 0B with arguments.

Program hbm requirement 406.00M:
    HLO temp        400.67M (100.0% utilization: Unpadded (272.00M) Padded (272.00M), 32.1% fragmentation (128.67M))
    overlays          5.33M
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (EARLY.format("33.12G", "31.25G"), round(33.12 * GIB)),
        (EARLY.format("384.06M", "1.00M"), round(384.06 * MIB)),
        (EARLY.format("1.00T", "15.75G"), 2**40),
        (LATE, 534 * MIB),
        (EARLY_050.format("64.00G", "15.75G"), 64 * GIB),
        (EARLY.format("33.12G", "31.25G") + " And more.", None),
        (EARLY.format("33.12P", "31.25G"), None),
        (LATE.replace("memory space hbm", "memory space vmem"), None),
        ("RESOURCE_EXHAUSTED: No space left on device", None),
        ("", None),
    ],
)
def test_the_bytes_of_a_rejection(text, expected):
    assert TPU.needed_bytes(text) == expected


def test_only_a_compiler_that_compares_bytes_says_them():
    assert [chip.platform for chip in CHIPS if chip.needed_bytes(LATE)] == ["tpu"]
    assert [chip.platform for chip in CHIPS if chip.options.memory_limit] == ["tpu"]
    assert memory_of_rejected(7).total_bytes == 7


@pytest.mark.parametrize(
    ("name", "num_devices", "expected"),
    [
        ("v6e", 1, "1x1"),
        ("v6e", 2, "1x2"),
        ("v6e", 8, "2x4"),
        ("v5e", 256, "16x16"),
        ("v5p", 1, "1x1x1"),
        ("v5p", 4, "2x2x1"),
        ("v5p", 32, "2x4x4"),
        ("v4", 1, "1x1x1"),
        ("v4", 4, "2x2x1"),
        ("tpu7x", 128, "4x4x4"),
    ],
)
def test_the_layout_of_a_slice(name, num_devices, expected):
    """Devices are JAX's: two of a chip of tpu7x, and one of v4, whose two cores act as one."""
    assert layout_of(load_tpu(name), num_devices) == layout_of(load_tpu(name), num_devices, expected) == expected


@pytest.mark.parametrize(
    ("num_devices", "requested"),
    [(8, "2x2"), (8, "2x4x1"), (8, "8"), (8, "2*4"), (8, "0x8"), (12, None), (512, None)],
)
def test_a_slice_without_such_a_layout(num_devices, requested):
    with pytest.raises(UsageError) as caught:
        layout_of(load_tpu("v6e"), num_devices, requested)
    assert caught.value.allowed


def test_a_slice_is_a_node():
    mesh = parse_mesh("fsdp=16", devices_of_node=chip_of("v6e").devices_of_node("v6e"), topology="4x4")
    assert mesh == MeshShape(fsdp=16, nodes=1, topology="4x4")
    assert mesh is not None
    assert axes_of_data(mesh.as_data()) == mesh
    assert "topology" not in MeshShape(fsdp=16).as_data()
    request = check_run(RunFlags(target="v6e", mesh="data=2,fsdp=16", nodes=2, topology="4x4"))
    assert request.mesh == MeshShape(data=2, fsdp=16, nodes=2, topology="4x4")


@pytest.mark.parametrize(
    "flags",
    [
        {"target": "h100-80gb", "mesh": "fsdp=8", "topology": "2x4"},
        {"mesh": "fsdp=8", "topology": "2x4"},
        {"target": "v6e", "topology": "1x1"},
        {"target": "v6e", "xla_preset": ("latency-hiding",)},
        {"target": "h100-80gb", "xla_preset": ("default", "maxtext-tpu")},
    ],
)
def test_flags_that_do_not_go_with_the_target(flags):
    with pytest.raises(UsageError):
        check_run(RunFlags(**flags))


def test_a_preset_of_the_chip_is_taken():
    request = check_run(RunFlags(target="v6e", policy=("nothing",), xla_preset=("default", "maxtext-tpu")))
    assert [one.xla_preset for one in request.policies] == ["default", "maxtext-tpu"]
    assert preset_options("maxtext-tpu").items() <= TPU.options.presets["maxtext-tpu"].items()


def test_each_tpu_has_its_sources():
    for path in FOLDER.glob("*.toml"):
        tpu = describe(path.stem)[1]
        assert tpu.compute_capability is None
        said = re.search(r": ([\d.]+)G", path.read_text())
        assert said is not None
        assert abs(tpu.device_memory_size / GIB - float(said[1])) < 0.006


@pytest.mark.parametrize(("found", "is_right"), [("0.0.42.1", True), ("0.0.42", True), ("0.0.420", False), (None, False)])
def test_the_libtpu_that_jax_names(found, is_right, monkeypatch):
    monkeypatch.setattr(installed, "version_of", lambda name: found if name == "libtpu" else "0.10.2")
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy>=2", 'libtpu==0.0.42.*; extra == "tpu"'])
    if is_right:
        installed.check_libtpu()
        return
    with pytest.raises(MissingDependencyError) as caught:
        installed.check_libtpu()
    assert "jaxremat[tpu]" in caught.value.next_step


def test_a_rejected_step_is_told_without_terms():
    """XLA says its total alone."""
    row = replace(made_up_records.trial(8), argument_bytes=None, temp_bytes=None, output_bytes=None, alias_bytes=None)
    assert re.search(r"\d", why_not(row)) is None
    assert re.search(r"\d", why_not(replace(row, argument_bytes=2**30)))


def test_a_search_from_above_compiles_one_batch_that_fits():
    early = {"early_bytes": lambda batch: 400 + 100 * batch, "fixed_bytes": 400}
    found, said = searched(search_from_above(lambda batch: 400 + 149 * batch, 3125, **early))
    assert (found.largest, found.next) == (18, 19)
    assert said[:2] == [None, 27], "by the guess of the bytes"
    assert {*said[3:]} == {18}
    assert [batch for batch, num_bytes in found.tried if num_bytes <= 3125] == [18]


@pytest.mark.parametrize(
    "total_bytes", [lambda b: 40 * b * b, lambda b: 100, lambda b: 10**6, lambda b: 90 * b + 900 * (b % 2)]
)
@pytest.mark.parametrize("start", [1, 8, 300])
def test_a_search_from_above_ends_anywhere(total_bytes, start):
    batches = range(1, 200)
    early = {"early_bytes": lambda batch: 10 * batch, "start": start}
    found, _ = searched(search_from_above(total_bytes, 4000, batches=batches, **early))
    tried = dict(found.tried)
    assert len(tried) <= 8 + len(batches).bit_length()
    assert found.largest == 0 or tried[found.largest] <= 4000
    assert found.next is None or tried[found.next] > 4000
    assert (found.largest or 0) + 1 == (found.next or 200)


@pytest.fixture(scope="module")
def libtpu() -> None:
    try:
        installed.check_libtpu()
    except MissingDependencyError as error:
        if os.environ.get("CI") and Path(sys.prefix).name == ".venv-3.12":
            raise  # CI installs it on this line
        pytest.skip(str(error))


def mlp_stack(batch: int = 8) -> Workload:
    """Four layers in a scan, which compile in seconds."""

    def loss(w_LDD: jax.Array, x_BTD: jax.Array) -> jax.Array:
        y_BTD, _ = jax.lax.scan(lambda x_BTD, w_DD: (jnp.tanh(x_BTD @ w_DD), None), x_BTD, w_LDD)
        return (y_BTD.astype(jnp.float32) ** 2).mean()

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    return Workload(loss=loss, params=shape((4, 512, 512)), batch=shape((batch, 1024, 512)))


@pytest.mark.full
@pytest.mark.parametrize(("target", "mesh"), [("v5e", None), ("v6e", "fsdp=4")])
def test_the_largest_batch_is_proven_at_the_real_limit(libtpu, target, mesh):
    """Each batch was compiled at the budget's limit: the answer whole, and the next one is rejected."""
    budget = 256 * MIB
    session = Session(mlp_stack, target=target, mesh=mesh, budget=budget, optimizer="sgd-momentum")
    assert (session.trials.limit_bytes, session.trials.budget_bytes) == (budget, budget)
    *rows, last = session.largest_batch("none").records
    assert isinstance(last, LargestBatchRecord)
    assert last.next_batch == last.largest_batch + 1 > 1
    assert last.next_batch is not None
    trials = {row.batch: row for row in rows if isinstance(row, TrialRecord) and row.record == "trial"}
    fits, too_large = trials[last.largest_batch], trials[last.next_batch]
    assert (fits.fits, too_large.fits) == (True, False)
    assert (fits.error, too_large.error) == (None, None)
    assert fits.total_bytes is not None
    assert too_large.total_bytes is not None
    assert fits.total_bytes <= budget < too_large.total_bytes
    assert too_large.total_bytes - fits.total_bytes < 0.1 * budget
    assert (fits.xla_remat_above_bytes, too_large.temp_bytes) == (None, None)
    assert (fits.step_source == "predicted") == (load_tpu(target).fitted is not None)
    compiled = session.trials.compile(parse("none"), last.largest_batch)
    assert compiled.memory.needed_bytes == compiled.memory.total_bytes == fits.total_bytes


@pytest.mark.full
def test_a_program_that_is_too_large_is_an_answer(libtpu):
    """XLA says its bytes, at the device's own limit too. It has no program that could be read."""
    x = jax.ShapeDtypeStruct((2**17, 2**17), jnp.float32)
    for target in ("v5e", "v6e"):
        done = lower_and_compile(lambda x: x.sum(), (x,), target)
        assert (done.is_too_large, done.memory.total_bytes) == (True, 64 * GIB)
        with pytest.raises(CompileError):
            _ = done.module
        with pytest.raises(CompileError):
            _ = done.memory_map


@pytest.mark.full
@pytest.mark.parametrize(("target", "preset"), [("v6e", "default"), ("v5e", "maxtext-tpu")])
def test_a_plan_is_the_fastest_of_its_compiles_that_fit(libtpu, target, preset):
    """Under a preset that compiles slowly, only the plan's own step is compiled. A newer libtpu rejects that one on v6e.

    The stack is small, so that more than a few steps may be compiled.
    """
    budget = 128 * MIB
    session = Session(mlp_stack, target=target, budget=budget, optimizer="sgd-momentum", xla_preset=preset)
    plan, trial = session.plan(batch=8).records
    assert isinstance(plan, PlanRecord)
    assert isinstance(trial, TrialRecord)
    searched = [step for step in plan.tried[: None if preset == "default" else -1] if step.total_bytes <= budget]
    assert len(searched) > 1
    assert plan.policy == min(searched, key=lambda step: (step.step_s, step.total_bytes)).policy
    own = replace(session.trials, xla_preset=preset).compile(parse(plan.policy), 8)
    assert (plan.total_bytes, trial.xla_preset, trial.step_s) == (own.memory.total_bytes, preset, plan.step_s)


@pytest.mark.full
def test_a_plan_for_a_tpu_has_one_loss_and_one_layout(libtpu):
    for target, losses, layouts in (
        ("v6e", ("chunked",), ("loop",)),
        ("h100-80gb", ("full", "chunked"), ("loop", "unrolled")),
    ):
        session = Session.of(check_run(RunFlags(model="tiny", target=target, policy=("auto", "dots"))), load_target(target))
        auto = session.request.policies[0].policy
        assert isinstance(auto, Auto)
        assert (auto.losses, auto.layouts) == (losses, layouts)


@pytest.mark.full
def test_devices_as_jax_counts_them(libtpu):
    """Two of a chip of tpu7x, one of the others; slice by slice, and as many as the mesh has."""
    for target, mesh, num_slices in (
        ("v4", MeshShape(fsdp=8), 1),
        ("v5p", MeshShape(fsdp=4), 1),
        ("tpu7x", MeshShape(data=2, fsdp=2, nodes=2), 2),
        ("v6e", MeshShape(fsdp=8, topology="8x1"), 1),
    ):
        devices = load_target(target, mesh).devices
        assert len({device.id for device in devices}) == mesh.num_devices
        slices = [getattr(device, "slice_index", 0) or 0 for device in devices]
        assert slices == sorted(slices)
        assert len({*slices}) == num_slices
    assert len({device.coords[0] for device in devices}) == 8


@pytest.mark.full
def test_a_chip_of_v4_is_one_device_with_all_of_its_memory(libtpu):
    """An array of 20 GiB fits, as on the TPUs that people have. One of its two cores has 15.25 GiB."""
    target = load_target("v4")
    assert len(load_target("v4", MeshShape(fsdp=4)).devices) == 4
    assert target.memory_bytes == int(30.75 * 2**30)
    done = lower_and_compile(jnp.sum, (jax.ShapeDtypeStruct((2**20, 5 * 2**10), "float32"),), target)
    assert not done.is_too_large
    assert done.memory.argument_bytes >= 20 * 2**30


def test_an_unknown_target_is_told_of_those_of_every_chip():
    with pytest.raises(TargetError) as unknown:
        describe("v6")
    assert {"v6e", "h100-80gb", "cpu"} <= {*unknown.value.allowed.split(", ")}
    assert "v6e" in unknown.value.next_step


def rejected_by_libtpu() -> None:
    with _own_signals():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise TargetError("libtpu rejected the topology")


def test_handlers_of_signals_are_given_back_after_an_error():
    """A loaded libtpu has taken them, even if it then rejects a topology."""
    ours = signal.getsignal(signal.SIGHUP)
    with pytest.raises(TargetError):
        rejected_by_libtpu()
    assert signal.getsignal(signal.SIGHUP) == ours
