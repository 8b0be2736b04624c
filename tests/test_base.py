"""The column `recompute`: executed FLOPs over those of the compiled `none`, also where `none` was compiled at another batch."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxremat
from jaxremat.config import TrainConfig
from jaxremat.errors import CompileError
from jaxremat.model.decoder_workload import decoder_factory
from jaxremat.model.presets import preset
from jaxremat.policy.spec import NONE, NOTHING
from jaxremat.report.steps import policy_table
from jaxremat.trial.record import TrialRecord
from jaxremat.trial.task import SHARED_FOLDER
from jaxremat.trial.trials import Trials
from jaxremat.workload.factory import WorkloadFactory
from jaxremat.xla.flops import executed_flops
from tests.made_up_records import trial as made_up_trial

WIDTH, DEPTH, TRAIN = 64, 4, TrainConfig()
SMALL, LARGE = 16, 48


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def squares(params, x, out=lambda x: jnp.mean(x.astype(jnp.float32) ** 2)):
    for w in params["layers"]:
        x = x + jax.nn.gelu(x @ w)
    return out(x @ params["head"])


def layers(dtype="float32"):
    return {"layers": [shape(WIDTH, WIDTH, dtype=dtype)] * DEPTH, "head": shape(WIDTH, WIDTH, dtype=dtype)}


def trained(batch, of_layers="on" * DEPTH, adam_or_muon=optax.adam):
    """The head is trained, and the layers that are `on`."""
    labels = {"layers": re.findall("on|off", of_layers), "head": "on"}
    optimizer = optax.multi_transform({"on": adam_or_muon(1e-3), "off": optax.set_to_zero()}, labels)
    return jaxremat.Workload(loss=squares, params=layers(), batch=shape(batch, WIDTH), optimizer=optimizer)


def convolutions(batch):
    """Strides of two with padding, of which gradients have holes that XLA may multiply."""

    def loss(params, x):
        for w in params["layers"]:
            dims = ("NHWC", "HWIO", "NHWC")
            y = jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=dims)
            x = x + jnp.repeat(jnp.repeat(jax.nn.gelu(y), 2, 1), 2, 2)
        return jnp.mean(x**2)

    params = {"layers": [shape(3, 3, 16, 16)] * DEPTH}
    return jaxremat.Workload(loss=loss, params=params, batch=shape(batch, 16, 16, 16))


def second_derivatives(batch):
    """The gradient of a gradient by the input."""

    def loss(params, x):
        energy, slope = jax.value_and_grad(lambda x: squares(params, x, jnp.sum))(x)
        return jnp.mean(slope**2) + energy

    return jaxremat.Workload(loss=loss, params=layers(), batch=shape(batch, WIDTH))


def pairs(batch):
    """A contrastive loss: the FLOPs of its scores grow with the square of the batch."""
    loss = functools.partial(squares, out=lambda x: jax.nn.logsumexp(x @ x.T, axis=1).mean())
    return jaxremat.Workload(loss=loss, params=layers(), batch=shape(batch, WIDTH))


def of_type(batch, dtype="float16"):
    return jaxremat.Workload(loss=squares, params=layers(dtype), batch=shape(batch, WIDTH, dtype=dtype))


def given(make, *args):
    return WorkloadFactory("own", lambda batch: make(batch or SMALL, *args), has_free_batch=True)


#: By name: what makes the workload, and whether `none` at the small batch says what it executes at the large one.
KINDS = {
    "last layers are frozen": (given(trained, "on" + "off" * (DEPTH - 1)), True),
    "muon and frozen layers": (given(trained, "on" + "off" * (DEPTH - 1), optax.contrib.muon), False),
    "strided convolutions": (given(convolutions), True),
    "second derivatives": (given(second_derivatives), True),
    "pairs": (given(pairs), True),
}


def recompute_cell(row: TrialRecord) -> str:
    """What the table of policies says of a step's recompute."""
    [cell] = [column.cells for column in policy_table([row], "one").columns if column.header == "recompute"]
    return str(*cell)


def number(value: float | None) -> float:
    """A number that is there."""
    assert value is not None
    return value


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_recompute_is_counted_from_the_compiled_none(kind, h100):
    factory, follows = KINDS[kind]
    trials = Trials(factory, TRAIN, h100, 2**40)
    rows = [trials.record(NOTHING, batch) for batch in (SMALL, LARGE)]
    assert sorted(trials.of(NONE).done) == ([SMALL] if follows else [SMALL, LARGE])
    for row in rows:
        without = executed_flops(trials.compile(NONE, row.batch).module).total
        assert row.recompute_overhead_percent == pytest.approx(100 * (number(row.executed_flops) / without - 1), abs=0.05)
        assert 1 < number(row.recompute_overhead_percent) < 100
        assert row.kept is not None
        again = sum(some.flops_again for some in row.kept.again)
        assert number(row.executed_flops) - again == pytest.approx(without, rel=0.002), "so it is counted where `none` isn't compiled"


@pytest.mark.full
def test_one_short_layer_recomputes_nothing_under_none(h100):
    """One matmul of a row is a reduction, which doesn't count, in the step under `none` as in any other."""
    factory = decoder_factory(replace(preset("tiny").config, num_layers=1), "xla")
    trials = Trials(factory, replace(TRAIN, seq_len=8, loss="chunked:1"), h100, 2**40)
    none, nothing = (trials.record(policy, 2) for policy in (NONE, NOTHING))
    assert none.base_flops == none.executed_flops == nothing.base_flops
    assert none.recompute_overhead_percent == 0 < number(nothing.recompute_overhead_percent)


@pytest.mark.full
def test_one_row_alone_has_no_matmuls(h100):
    """XLA makes reductions of them, which don't count: there is no share of their FLOPs."""
    trials = Trials(given(of_type, "float32"), TRAIN, h100, 2**40)
    alone, several = (trials.record(NOTHING, batch) for batch in (1, SMALL))
    assert sorted(trials.of(NONE).done) == [1, SMALL]
    assert (alone.recompute_overhead_percent or 0) <= number(several.recompute_overhead_percent)


@pytest.mark.full
def test_a_step_that_xla_rejects_under_none_has_no_base(h100, monkeypatch):
    trials = Trials(given(of_type), TRAIN, h100, 2**40)
    trials.compile(NOTHING, SMALL)

    def reject(*args, **kwargs):
        raise CompileError("rejected")

    monkeypatch.setattr("jaxremat.trial.trials.lower_and_compile", reject)
    row = trials.record(NOTHING, SMALL)
    assert (row.base_flops, row.recompute_overhead_percent, row.mfu, row.error) == (None, None, None, None)
    assert recompute_cell(row) == "-"


@pytest.mark.full
def test_a_probe_and_a_training_compile_no_base(h100):
    trials = Trials(given(of_type), TRAIN, h100, 2**40)
    assert trials.record(NOTHING, SMALL, "probe").base_flops is None
    assert not trials.of(NONE).done


@pytest.mark.full
def test_processes_of_a_command_share_the_count(h100, tmp_path, monkeypatch):
    """Factories stand for processes: none knows the steps of another. A trial under `none` shares its count, too."""

    def row(folder, policy=NOTHING):
        monkeypatch.setenv(SHARED_FOLDER, str(tmp_path / folder))
        trials = Trials(given(of_type), TRAIN, h100, 2**40)
        return trials.record(policy, SMALL), trials.of(NONE).done

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (first, compiled), (second, none) = row("a"), row("a")
    assert (list(compiled), list(none)) == ([SMALL], [])
    (_, compiled), (third, none) = row("b", NONE), row("b")
    assert (list(compiled), list(none)) == ([SMALL], [])
    assert 0 < number(first.base_flops) == second.base_flops == third.base_flops


@pytest.mark.full
def test_mfu_is_of_the_peak_of_the_type_that_computes(h100):
    """Without `model_flops`, of the FLOPs under `none`."""
    speed = h100.speed
    assert speed
    for dtype, peak in (("float16", speed.bf16_flops), ("float32", speed.f32_flops)):
        trials = Trials(given(of_type, dtype), TRAIN, h100, 2**40)
        row = trials.record(NOTHING, SMALL)
        assert row.model_flops == number(row.base_flops) < number(row.executed_flops)
        assert row.mfu == pytest.approx(number(row.base_flops) / number(row.step_s) / peak)


@pytest.mark.parametrize(("percent", "text"), [(-0.04, "0.0%"), (-0.0, "0.0%"), (-0.06, "-0.1%"), (49.94, "49.9%")])
def test_no_recompute_is_written_without_a_sign(percent, text):
    assert recompute_cell(replace(made_up_trial(8), recompute_overhead_percent=percent)) == text
