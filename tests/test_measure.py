"""A measured step: warm-up isn't timed, and the allocator's peak is that of this step, shown beside the compiled total."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxremat.cli.run import main
from jaxremat.trial import measure
from jaxremat.trial.measure import measure_step


def measured(**options):
    step = jax.jit(lambda state, tokens: (state + 1, tokens.sum() / state))
    batches = itertools.repeat(np.ones((2, 3), np.int32))
    return measure_step(step, lambda: jnp.ones(()), batches, jax.devices("cpu")[0], **options)


def test_warm_up_is_left_out_and_the_state_goes_on():
    told = []
    timing = measured(num_warmup=2, num_steps=3, on_step=told.append)
    assert len(timing.steps_s) == 3
    assert min(timing.steps_s) > 0
    assert timing.median_s == sorted(timing.steps_s)[1]
    assert timing.last_loss == pytest.approx(6 / 5)
    assert told == [0, 1, 2, 3, 4]


class _Clock:
    """A device that needs 50 ms a step, and a host that needs 12 ms to start one, in seconds that no machine disturbs."""

    def __init__(self):
        self.now = self.free = 0.0

    def perf_counter(self):
        return self.now

    def step(self, state, batch):
        self.now += 0.012
        self.free = max(self.now, self.free) + 0.050
        return state, _Result(self, self.free)


class _Result:
    def __init__(self, clock, ready):
        self.clock, self.ready = clock, ready

    def block_until_ready(self):
        self.clock.now = max(self.clock.now, self.ready)
        return self

    def __array__(self, dtype=None, copy=None):
        return np.zeros(())


@pytest.mark.parametrize(("num_ahead", "step_s"), [(0, 0.062), (1, 0.050)])
def test_the_host_starts_a_step_while_the_device_computes_another(num_ahead, step_s, monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(measure, "time", clock)
    device = jax.devices("cpu")[0]
    timing = measure_step(clock.step, lambda: None, itertools.repeat(1), device, num_ahead=num_ahead, num_steps=4)
    assert timing.steps_s == pytest.approx(4 * [step_s])


def test_a_step_without_a_loss_has_arguments_of_its_own():
    """It may donate them."""
    step = jax.jit(lambda args: 2 * args, donate_argnums=0)
    batches = iter(jnp.ones((6, 3)))
    timing = measure_step(lambda _, args: (step(args), None), lambda: None, batches, jax.devices("cpu")[0], num_steps=4)
    assert len(timing.steps_s) == 4
    assert next(batches, None) is None


def test_a_cpu_has_no_allocator_peak():
    assert measured(num_steps=1).peak_bytes is None


@pytest.mark.parametrize(("marks", "peak"), [((100, 300), 300), ((300, 300), None)])
def test_the_peak_is_this_step_s_or_none(marks, peak, monkeypatch):
    """The mark never falls: where it doesn't rise, something before these steps set it."""
    readings = iter(marks)
    monkeypatch.setattr(measure, "allocator_peak", lambda device: next(readings))
    assert measured(num_steps=1).peak_bytes == peak


@pytest.mark.full
@pytest.mark.gpu
def test_the_allocator_s_peak_is_near_the_compiled_total(tmp_path):
    """On an attached GPU: what XLA promised and what its allocator gave out, within 5 %."""
    from jaxremat.chips.catalog import ATTACHED

    if not ATTACHED.attached():
        pytest.skip("no NVIDIA GPU that JAX sees")
    path = tmp_path / "rows.jsonl"
    assert main(["--target", "gpu", "--model", "gpt2", "--policy", "dots", "--batch", "16", "--out", str(path)]) == 0
    row = json.loads(path.read_text())
    assert abs(row["measured_over_total_percent"]) < 5
