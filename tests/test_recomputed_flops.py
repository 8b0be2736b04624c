"""The column `recompute`: what a step executes again, compared with the compiled step under `none`."""

import functools
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxremat
from jaxremat.config import TrainConfig
from jaxremat.model.decoder_workload import decoder_factory
from jaxremat.model.presets import preset
from jaxremat.policy.spec import NONE, NOTHING
from jaxremat.report.steps import policy_table
from jaxremat.trial.record import TrialRecord
from jaxremat.trial.trials import Trials
from jaxremat.workload.factory import WorkloadFactory
from jaxremat.xla.flops import executed_flops, flops_counter, instruction_flops
from jaxremat.xla.recomputed import recomputed_flops, saved_and_recomputed
from tests.made_up_records import trial as made_up_trial

WIDTH, DEPTH, TRAIN = 64, 4, TrainConfig()
SMALL = 16


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


#: By name, what makes the workload.
KINDS = {
    "last layers are frozen": given(trained, "on" + "off" * (DEPTH - 1)),
    "muon and frozen layers": given(trained, "on" + "off" * (DEPTH - 1), optax.contrib.muon),
    "strided convolutions": given(convolutions),
    "second derivatives": given(second_derivatives),
    "pairs": given(pairs),
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
def test_a_step_without_what_it_recomputes_is_the_compiled_none(kind, h100):
    trials = Trials(KINDS[kind], TRAIN, h100, 2**40)
    row = trials.record(NOTHING, SMALL)
    assert not trials.of(NONE).done
    without = executed_flops(trials.compile(NONE, SMALL).module).total
    assert row.base_flops == pytest.approx(without, rel=5e-4)
    assert row.recompute_overhead_percent == pytest.approx(100 * (number(row.executed_flops) / without - 1), abs=0.05)
    assert 1 < number(row.recompute_overhead_percent) < 100


@pytest.mark.full
def test_what_xla_copies_is_executed_again(h100):
    """The copies of XLA's own rematerialization are in no checkpoint. Its pass names them."""
    trials = Trials(given(of_type, "float32"), TRAIN, h100, 2**40)
    done = trials.compile(NONE, SMALL)
    counted, text = saved_and_recomputed(done), done.module.entry
    assert recomputed_flops(done, counted) == 0
    entry = done.module.computations[text]
    with_flops = [i for i in entry.instructions if instruction_flops(entry, i, flops_counter(done.module)).total]
    copied = replace(with_flops[0], name=f"{with_flops[0].name}.remat")
    again = instruction_flops(entry, copied, flops_counter(done.module)).total
    changed = replace(entry, instructions=tuple(copied if i is with_flops[0] else i for i in entry.instructions))
    module = replace(done.module, computations={**done.module.computations, text: changed})
    assert recomputed_flops(SimpleNamespace(module=module), counted) == again > 0  # pyright: ignore[reportArgumentType]


@pytest.mark.full
def test_one_short_layer_recomputes_nothing_under_none(h100):
    """One matmul of a row is a reduction, which doesn't count, in the step under `none` as in any other."""
    factory = decoder_factory(replace(preset("tiny").config, num_layers=1), "xla")
    trials = Trials(factory, replace(TRAIN, seq_len=8, loss="chunked:1"), h100, 2**40)
    none, nothing = (trials.record(policy, 2) for policy in (NONE, NOTHING))
    assert none.base_flops == none.executed_flops == nothing.base_flops
    assert none.recompute_overhead_percent == 0 < number(nothing.recompute_overhead_percent)


@pytest.mark.full
def test_a_probe_has_the_mfu_of_a_trial(h100):
    trials = Trials(given(of_type), TRAIN, h100, 2**40)
    assert trials.record(NOTHING, SMALL, "probe").mfu == trials.record(NOTHING, SMALL).mfu is not None


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
