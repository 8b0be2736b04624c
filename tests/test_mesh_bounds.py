"""How fast a mesh can be at most, by the steps of another one."""

import math
from dataclasses import replace
from typing import cast

import pytest

from jaxremat.answer import mesh_bounds
from jaxremat.answer.layer_estimate import speed_of
from jaxremat.answer.mesh_bounds import is_along_tensor, most_speed, shorter_by
from jaxremat.answer.mesh_race import Entrant, most_beside
from jaxremat.chips.target import load_target
from jaxremat.mesh.axes import MeshShape
from jaxremat.policy.spec import NOTHING
from jaxremat.xla.clock import predict_step_time
from jaxremat.xla.collectives import Collective
from jaxremat.xla.hlo import Module
from jaxremat.xla.kernels import Kernel
from tests.mesh_runs import MODEL, make_run

pytestmark = pytest.mark.any_jax
MESH = MeshShape(fsdp=4, tensor=2)
NUM_SEQUENCES = 1024


@pytest.mark.parametrize(
    ("groups", "along"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), True),
        (((0, 2, 4, 6), (1, 3, 5, 7)), False),
        ((), True),  # all devices are one group
    ],
)
def test_devices_of_a_collective_along_tensor_share_their_sequences(groups, along):
    assert is_along_tensor(Collective("all-gather", 1, groups), MESH) == along


def test_the_example_of_the_docstring():
    """In ms of one sequence: 100, with 4 of exposed gathers; then 120, with 1 of gathers and 20 along `tensor`."""
    assert 1 / most_speed(1 / 100, 4.0) == pytest.approx(96)
    assert 1 / most_speed(1 / 120, 1.0 - (4 / 2 - 1) * 20) == pytest.approx(139)
    assert 1 / most_speed(1 / 120, 1.0) == pytest.approx(119)
    assert most_speed(1.0, 2.0) == math.inf


@pytest.mark.full
def test_the_steps_of_a_mesh_with_a_longer_axis_take_no_fewer_seconds_than_assumed():
    """Compiled for 8 GPUs at the same sequences of all devices."""
    whole_s, least_s, size = [], [], MESH.tensor
    for shape in (MeshShape(fsdp=8), MESH):
        run = make_run(load_target("h100-80gb", shape), replace(MODEL, num_kv_heads=4))
        module = run.compile(NOTHING, NUM_SEQUENCES // run.global_batch_at(1)).module
        time = predict_step_time(module, speed_of(run.target))
        whole_s.append(time.step_s)
        least_s.append(time.step_s - shorter_by(module, speed_of(run.target), shape, size))
        speed = NUM_SEQUENCES / time.step_s
        assert most_beside(Entrant(shape, run), speed, size) == pytest.approx(NUM_SEQUENCES / least_s[-1])
        few_fit = replace(run, budget_bytes=run.state_bytes() + 2**20)
        assert most_beside(Entrant(shape, few_fit), speed, size) == math.inf
    assert 0 < least_s[0] <= 1.05 * whole_s[1]
    assert 0 < least_s[1] < whole_s[1]  # with its own axis, gathers and reductions of parameters may be hidden


def test_what_is_sent_along_tensor_stays_exposed(monkeypatch):
    """A step of one exposed gather along `fsdp` and one exchange along `tensor`, whose seconds double with the axis."""
    of_gpus, module = speed_of(load_target("h100-80gb", MESH)), cast(Module, None)
    gather = Kernel(
        "gather", "", "collective", 0, "", 0, 0, 0, 0, 1, Collective("all-gather", 2**30, ((0, 2, 4, 6), (1, 3, 5, 7)))
    )
    exchange = replace(gather, name="exchange", collective=Collective("all-reduce", 2**28, ((0, 1), (2, 3), (4, 5), (6, 7))))
    seconds = {}
    for name, events in {"gather": [gather], "exchange": [exchange], "both": [gather, exchange]}.items():
        monkeypatch.setattr(mesh_bounds, "events_of", lambda module, events=events: events)
        seconds[name] = {size: shorter_by(module, of_gpus, MESH, size) for size in (2, 4, 8)}
    assert seconds["gather"][2] == seconds["gather"][8] > 0
    assert seconds["exchange"][2] == 0 > seconds["exchange"][4]
    assert seconds["exchange"][8] == pytest.approx(3 * seconds["exchange"][4])
    assert seconds["both"][4] == pytest.approx(seconds["gather"][4] + seconds["exchange"][4])
