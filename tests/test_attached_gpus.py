"""A mesh of attached GPUs, with made-up ones: which are taken, what their memory is, and how a step is measured on them."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxremat.chips import target
from jaxremat.chips.nvidia.outside import Outside
from jaxremat.errors import TargetError
from jaxremat.mesh.axes import MeshShape
from jaxremat.trial import measure
from jaxremat.trial.confirm import uncompiled_trial
from jaxremat.trial.measure import measure_step
from tests.made_up_records import trial

TWO = MeshShape(fsdp=2)
SMALL = shlex.split(
    "--model tiny --num-layers 1 --embed-dim 128 --num-heads 1 --num-kv-heads 1 --head-dim 128 --mlp-dim 128 --seq-len 64 "
    "--policy none --dropout 0 --batch 2 --steps 1 --mesh fsdp=2 --target gpu"
)


@dataclass(eq=False)
class Client:
    """JAX's client of a process."""

    def process_index(self) -> int:
        return 0


@dataclass(eq=False)
class Gpu:
    """What JAX says of an attached GPU, as far as a target needs it."""

    id: int
    limit: int
    device_kind: str = "NVIDIA H100 80GB HBM3"
    compute_capability: str = "9.0"
    platform: str = "gpu"
    process_index: int = 0
    client: Any = Client()

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.limit}


@pytest.fixture
def three(monkeypatch) -> list[Gpu]:
    found = [Gpu(0, 63 * 2**30), Gpu(1, 59 * 2**30), Gpu(2, 40 * 2**30)]
    monkeypatch.setattr(target, "attached_gpus", lambda: found)
    return found


def test_the_first_gpus_are_taken(three):
    """The memory is that of the least of them, and the speed has the links that such GPUs have in the bundled description."""
    both = target.load_target("gpu", TWO)
    assert both.mesh
    assert list(both.mesh.devices.flat) == both.local_devices == three[:2]
    assert (both.kind, both.memory_bytes, both.num_processes) == ("attached", 59 * 2**30, 1)
    assert both.speed
    elsewhere = target.load_target("h100-80gb", TWO).speed
    assert elsewhere
    assert both.speed.links == elsewhere.links
    one = target.load_target("gpu")
    assert (one.mesh, one.memory_bytes) == (None, 63 * 2**30)
    assert one.speed
    assert one.speed.links is None


def test_fewer_gpus_than_the_mesh_has(three):
    with pytest.raises(TargetError) as caught:
        target.load_target("gpu", MeshShape(fsdp=4))
    assert str(len(three)) in caught.value.allowed


def test_a_mesh_without_a_target_is_still_for_gpus_elsewhere(three):
    assert target.load_target(None, TWO).kind == "deviceless"


def test_the_largest_of_the_devices_counts(monkeypatch):
    """Of the allocators' peaks, and of what NVML counts outside their pools."""
    cpu, other = jax.devices("cpu")[0], object()
    before, after = {cpu: 1, other: 1}, {cpu: 30, other: 70}
    readings = [before, after]
    monkeypatch.setattr(measure, "allocator_peak", lambda device: readings[calls["steps"]][device])
    allocators = {device: measure.AllocatorBytes(0, peak, 10, None) for device, peak in after.items()}
    monkeypatch.setattr(measure, "read_allocator", allocators.get)
    outsides = {cpu: Outside(5, "process"), other: Outside(9, "process")}
    monkeypatch.setattr(measure, "_outside", lambda before, device: outsides[device])
    calls = {"steps": 0}

    def step(state, batch):
        calls["steps"] = 1
        return state, jnp.zeros(())

    timing = measure_step(step, lambda: jnp.ones(()), iter([1.0]), cpu, others=[other], num_warmup=0, num_steps=1)
    assert (timing.peak_bytes, timing.outside, timing.allocator) == (70, Outside(9, "process"), allocators[other])


def test_a_batch_that_the_search_did_not_compile_on_a_mesh():
    alike = replace(trial(batch=8), accumulate=2, global_batch=8 * 2 * 4)
    assert uncompiled_trial(alike, 5, None).global_batch == 5 * 2 * 4


@pytest.mark.full
@pytest.mark.any_jax
def test_a_step_is_measured_on_made_up_gpus(tmp_path):
    """By a process that compiles, and one that runs the step: on a mesh of two devices, with the bytes of one."""
    out = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "tests.made_up_gpu", *SMALL, "--out", str(out)],
        env=os.environ
        | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu", "MADE_UP_LIMIT": str(2**30), "MADE_UP_OVER": "1.001"}
        | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["mesh"], row["num_devices"], row["global_batch"], row["ran"]) == ("fsdp=2", 2, 4, "ok")
    assert (row["step_source"], row["target"], row["budget_bytes"]) == ("measured", "nvidia-made-up", 2**30)
    assert row["measured_over_total_percent"] == pytest.approx(0.1, abs=0.01)
