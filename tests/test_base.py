"""The column `recompute`: executed FLOPs over those of the compiled `none`, also where `none` was compiled at another batch."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxremat
from jaxremat.config import TrainConfig
from jaxremat.model.decoder_workload import DecoderFactory
from jaxremat.model.presets import preset
from jaxremat.policy.grammar import parse
from jaxremat.report.table import answer_cells
from jaxremat.trial import base
from jaxremat.trial.base import steps_under_none
from jaxremat.trial.settings import Run
from jaxremat.trial.trial import PolicyTrials
from jaxremat.workload.factory import GivenFactory
from jaxremat.xla.flops import executed_flops

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


def muon(params):
    return optax.contrib.muon(1e-3)


def frozen(batch, head_alone=True, optimizer=lambda: optax.adam(1e-3)):
    """All that is trained is the head, or all but the first layers."""
    labels = {"layers": ["off"] * (DEPTH if head_alone else 2) + ["on"] * (0 if head_alone else DEPTH - 2), "head": "on"}
    optimizer = optax.multi_transform({"on": optimizer(), "off": optax.set_to_zero()}, labels)
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


def given(make):
    return GivenFactory("own", lambda batch: make(batch or SMALL), has_free_batch=True)


def decoder(**changes):
    return DecoderFactory(replace(preset("tiny").config, dropout=0.0, **changes), "xla")


#: By name: what makes the workload, the training, and whether `none` at the small batch says what it executes at the large one.
KINDS = {
    "frozen": (given(frozen), TRAIN, True),
    "frozen, first layers": (given(functools.partial(frozen, head_alone=False)), TRAIN, True),
    "frozen, muon": (given(functools.partial(frozen, optimizer=optax.contrib.muon)), TRAIN, False),
    "muon": (decoder(), replace(TRAIN, seq_len=16, optimizer="muon"), True),
    "strided convolutions": (given(convolutions), TRAIN, True),
    "second derivatives": (given(second_derivatives), TRAIN, True),
    "pairs": (given(pairs), TRAIN, True),
    "float16": (given(of_type), TRAIN, True),
    "one layer": (decoder(num_layers=1), replace(TRAIN, seq_len=8, loss="chunked:1"), True),
    "unrolled": (decoder(scan_layers=False), replace(TRAIN, seq_len=16, accumulate=2), True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_recompute_is_counted_from_the_compiled_none(kind, h100):
    factory, train, follows = KINDS[kind]
    run = Run(factory, train, h100, 2**40)
    trials = PolicyTrials(run, "nothing", parse("nothing"))
    rows = [trials.record(batch, "trial") for batch in (SMALL, LARGE)]
    assert sorted(steps_under_none(run.with_layout("loop")).done) == ([SMALL] if follows else [SMALL, LARGE])
    for row in rows:
        none = PolicyTrials(run, "none", parse("none"))
        without = executed_flops(none.compile(row.batch).module).total
        assert row.recompute_overhead_percent == pytest.approx(100 * (row.executed_flops / without - 1), abs=0.05)
        assert 1 < row.recompute_overhead_percent < 100
        assert none.record(row.batch, "trial").recompute_overhead_percent == 0
