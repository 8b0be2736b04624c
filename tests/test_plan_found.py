"""Layers that were found in a program are planned, of one kind or of several that share a budget."""

import dataclasses
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxremat
from jaxremat.answer.planned import Planned, plan_run
from jaxremat.answer.records import answer_plan
from jaxremat.answer.workload_estimate import estimate_workload
from jaxremat.config import TrainConfig
from jaxremat.errors import UsageError
from jaxremat.planner.candidates import candidates, fastest, named_policies
from jaxremat.planner.corrections import Corrections
from jaxremat.planner.estimate import Family
from jaxremat.planner.plan import Plan
from jaxremat.planner.shared_budget import as_one
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import NONE, NOTHING, Names
from jaxremat.trial.record import PlanRecord
from jaxremat.trial.trials import Trials
from jaxremat.workload.factory import factory_of
from jaxremat.workload.workload import Workload

ROWS, ENCODER, DECODER = 8192, 2048, 1024


def mlp(params, x):
    """A layer of two matmuls. Its author named the value between them."""
    h = checkpoint_name(jax.nn.gelu(x @ params["up"]), "hidden")
    return x + h @ params["down"]


def translation(encoder_layers: int = 4, decoder_layers: int = 2) -> Workload:
    """An encoder whose layers run as a loop, and a decoder of unrolled layers, which read its result."""

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, layer: (mlp(layer, x), None), batch["source"], params["encoder"])
        y = batch["target"]
        for n, layer in enumerate(params["decoder"]):
            with jax.named_scope(f"decoder_{n}"):
                y = mlp(layer, y) + jnp.tanh(x @ layer["cross"])
        return jnp.mean(y**2)

    def shape(*axes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(axes, jnp.float32)

    layer = {"up": shape(DECODER, 2 * DECODER), "down": shape(2 * DECODER, DECODER), "cross": shape(ENCODER, DECODER)}
    params = {
        "encoder": {"up": shape(encoder_layers, ENCODER, ENCODER), "down": shape(encoder_layers, ENCODER, ENCODER)},
        "decoder": [layer] * decoder_layers,
    }
    batch = {"source": shape(ROWS, ENCODER), "target": shape(ROWS, DECODER)}
    return Workload(loss=loss, params=params, batch=batch, optimizer=optax.sgd(0.1), name="translation")


def run_of(workload: Workload, target, budget_bytes: int = 2**40) -> Trials:
    return Trials(factory_of(workload), TrainConfig(), target, budget_bytes)


def plan_of(answer: Planned) -> Plan:
    assert isinstance(answer.found, Plan)
    return answer.found


def record_of(answer: Planned, max_batch: int | None = None) -> PlanRecord:
    emitted: list[Any] = []
    answer_plan(answer, "time", emitted.append, max_batch)
    return next(row for row in emitted if isinstance(row, PlanRecord))


def matmuls(workload: Workload, policy) -> int:
    """The matmuls in the program of the gradient. A loop counts as one turn."""
    return str(jax.make_jaxpr(jax.grad(workload.loss_with(policy)))(*workload.loss_args)).count("dot_general[")


def test_no_layers_is_one_error_that_says_what_was_looked_at(h100):
    workload = Workload(
        loss=lambda params, x: jnp.mean(jnp.tanh(x @ params["w"])),
        params={"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)},
        batch=jax.ShapeDtypeStruct((4, 8), jnp.float32),
        name="shallow",
    )
    step = Workload(step=lambda w: 2 * w, args=(jax.ShapeDtypeStruct((8, 8), jnp.float32),), name="doubling")
    for given in (workload, step):
        with pytest.raises(UsageError) as caught:
            plan_run(run_of(given, h100), losses=("own",), batch=None, max_batch=4)
        assert given.name in caught.value.got
        assert "--layers" in str(caught.value)


def test_a_configuration_that_cannot_say_nothing_is_one_error(h100):
    """A plan is one of the policies that it can say, and `nothing` has the least bytes."""
    workload = dataclasses.replace(translation(), as_config=lambda policy: None)
    with pytest.raises(UsageError) as caught:
        plan_run(run_of(workload, h100), losses=("own",), batch=ROWS, max_batch=ROWS)
    assert "as_config of translation" in caught.value.got
    assert caught.value.next_step


def test_a_plan_of_two_kinds_speaks_of_each_kind_s_own_values(h100):
    """Each kind has its price of saving and its number of layers. What its author called the same isn't the same."""
    workload = translation()
    encoder, decoder = estimate_workload(run_of(workload, h100), h100.speed, ROWS)
    assert [(kind.num_layers, kind.layer.in_scan) for kind in (encoder, decoder)] == [(4, True), (2, False)]
    assert encoder.layer.problem.save_s_per_byte > decoder.layer.problem.save_s_per_byte == 0
    of_pairs = [
        Corrections(0, 0).expected_beyond(kind.layer, Family(False, kind.layer.problem), 2) for kind in (encoder, decoder)
    ]
    assert of_pairs == [encoder.layer.input_bytes, 0]
    assert encoder.layer.input_bytes > 0
    for kind in (encoder, decoder):
        assert kind.prefix
        assert all(name.startswith(kind.prefix) for name in kind.layer.names.values()), "hidden is a name of both"
    one = as_one([encoder, decoder])
    best = fastest(candidates(one.layer, one.num_layers, Corrections(0, 2**40)))
    assert best
    assert parse(str(best.policy)) == best.policy
    assert matmuls(workload, best.policy) == matmuls(workload, parse("none")) < matmuls(workload, parse("nothing"))


def test_what_a_plan_saves_of_one_kind_is_recomputed_in_the_other(h100):
    """The decoder's layers keep all their matmuls, and the encoder's keep nothing."""
    workload = translation()
    kinds = estimate_workload(run_of(workload, h100), h100.speed, ROWS)
    made = {v: op for op in kinds[1].layer.problem.ops if op.flops for v in op.outputs}
    policy = Names(tuple(name for v, name in kinds[1].layer.names.items() if v in made))
    assert len(policy.save) == 3
    plain, again = matmuls(workload, parse("none")), matmuls(workload, parse("nothing"))
    assert again - plain == 1 + 2 * 2, "the up of both, the decoder's cross; what down makes is read by nothing"
    assert matmuls(workload, policy) == plain + 1


@pytest.mark.full
@pytest.mark.any_jax
def test_two_kinds_share_one_budget(h100):
    """At rising budgets: the plan fits, no named policy that fits is faster, and it is never slower with more."""
    run = run_of(translation(), h100)
    one = as_one(estimate_workload(run, h100.speed, ROWS))

    def planned(budget: int) -> Planned:
        return plan_run(run, losses=("own",), batch=ROWS, max_batch=ROWS, budget_bytes=budget)

    everything = plan_of(planned(2**40))
    totals = {str(step.policy): step.cost.total_bytes for step in everything.tried}
    least, most = totals["nothing"], max(totals.values())
    budgets = [least + (most - least) * n // 3 for n in (1, 2)]
    answers = [planned(budget) for budget in budgets]
    plans = [plan_of(answer) for answer in answers]
    for budget, found in zip(budgets, plans, strict=True):
        assert found.cost.total_bytes <= budget
        named = [step for step in everything.tried if step.policy in named_policies(one.layer)]
        fits = [step.cost.step_s for step in named if step.cost.total_bytes <= budget]
        assert found.cost.step_s <= min(fits, default=found.cost.step_s)
    steps_s = [found.cost.step_s for found in (*plans, everything)]
    assert all(after <= before * (1 + 2e-3) for before, after in itertools.pairwise(steps_s))
    saved = {name.partition("/")[0] for found in plans if isinstance(found.policy, Names) for name in found.policy.save}
    assert saved == {"layers", "decoder"}, "both kinds save something at some budget"
    by_name = next(answer for answer in answers if isinstance(plan_of(answer).policy, Names))
    assert [record_of(by_name, limit).max_batch for limit in (None, ROWS, ROWS + 1)] == [None, ROWS, None]
    layers = record_of(by_name).layers
    assert [layer.partition("/")[0] for layer in layers] == ["layers: save:layers"] * 4 + ["decoder: save:decoder"] * 2


# The same layers, found and given.

#: Layers, width, samples and length of the layers that are compared.
SIZES = (2, 256, 128, 64)


class NnxMlp(nnx.Module):
    """A layer of few values, as a plan is then among few steps."""

    def __init__(self, width: int):
        options: Any = {"dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
        self.norm = nnx.LayerNorm(width, **options)
        self.up, self.down = nnx.Linear(width, 4 * width, **options), nnx.Linear(4 * width, width, **options)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def nnx_layer(width: int) -> tuple[Any, Any]:
    """The parameters of a layer, and the layer as a function of them and of x."""
    graph, params = nnx.split(nnx.eval_shape(lambda: NnxMlp(width)), nnx.Param)
    return params, lambda params, x: nnx.merge(graph, params)(x)


@pytest.mark.full
@pytest.mark.any_jax
def test_a_plan_of_found_layers_takes_the_bytes_of_a_plan_of_the_same_layers(h100):
    """One is for a loss that calls the layers one after the other, and one for the layer as it is, by `jaxremat.plan`."""
    num_layers, width, batch, length = SIZES
    params, layer = nnx_layer(width)
    leaves, tree = jax.tree.flatten(params)

    class Around(nn.Module):
        """The layer as a module, because only modules can be planned unrolled."""

        @nn.compact
        def __call__(self, x):
            own = [
                self.param(f"p{n}", lambda _, leaf=leaf: jnp.zeros(leaf.shape, leaf.dtype)) for n, leaf in enumerate(leaves)
            ]
            return layer(jax.tree.unflatten(tree, own), x)

    def loss(params, x):
        for of_layer in params:
            x = layer(of_layer, x)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    x = jax.ShapeDtypeStruct((batch, length, width), jnp.bfloat16)
    workload = Workload(loss=loss, params=[params] * num_layers, batch=x, optimizer=optax.sgd(0.1), name="stack")
    budget = 128 * 2**20
    given = jaxremat.plan(Around(), x, num_layers=num_layers, budget=budget, target=h100, scan=False)
    answer = plan_run(run_of(workload, h100, budget), losses=("own",), batch=batch, max_batch=batch, named=False)
    found = plan_of(answer)
    for plan in (given, found):
        assert plan.policy not in (NOTHING, NONE)
        assert plan.cost.total_bytes <= budget
    assert found.cost.total_bytes == pytest.approx(given.cost.total_bytes, rel=0.1)
