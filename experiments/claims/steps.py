"""The steps that claims are checked by, as data, and what is measured of each. Every step is compiled for a GPU that isn't here.

    measured(step(policy="dots", batch=8, num_layers=24))   # {"total_bytes": ..., "step_s": ..., ...}

A step is a row without results: the fields that are asked for, without those that have their defaults. Bytes are XLA's. Step
times are predicted.
"""

import dataclasses
import itertools
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import jaxremat
from experiments.common import Row
from jaxremat.answer.layer_estimate import speed_of
from jaxremat.answer.planned import plan_run
from jaxremat.answer.records import answer_largest
from jaxremat.chips.target import load_target
from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.errors import JaxrematError
from jaxremat.model.attention import choose_attention
from jaxremat.model.decoder_workload import decoder_factory
from jaxremat.model.presets import preset
from jaxremat.planner.plan import Plan
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import Policy
from jaxremat.search.compiles import Compiles
from jaxremat.trial.explain import explain
from jaxremat.trial.record import LargestBatchRecord, TrialRecord
from jaxremat.trial.trials import Trials
from jaxremat.xla.clock import predict_step_time
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.flops import executed_flops

#: The GPUs that steps are compiled for. Claims name their steps for the first.
TARGETS = ("h100-80gb", "h200")
#: By target, the bytes that a search may take: JAX's default share, 0.75, of the memory. That of the H200 is the datasheet's
#: 141 GiB, with which the rows are filed. Real cards have 139.80 GiB.
BUDGETS = {"h100-80gb": 63707234304, "h200": 113548197888}
#: The largest batch that is tried.
MAX_BATCH = 8192
#: The fields that every step has: what is measured, the model, the policy (of a plan, the policy whose bytes it may take, times
#: `share`), the sequences of a microbatch and of a step (None: one microbatch), the GPU, and the bytes that a search may take.
DEFAULTS: Row = {
    **{"what": "step", "preset": "gpt2", "policy": "none", "share": 1.0, "batch": 1, "global_batch": None},
    **{"target": TARGETS[0], "budget_bytes": None},
}
#: The policies that most claims compare.
POLICIES = ("none", "dots+attention", "nothing")
#: A model with a vocabulary so large that the full loss would take most of the memory.
LLAMA: Row = {"preset": "llama3.2-1b", "loss": "chunked"}
_OF_MODEL = {field.name for field in dataclasses.fields(ModelConfig)}


def step(what: str = "step", **fields: Any) -> Row:
    """A step. Fields that aren't in `DEFAULTS` change the preset's model or its training: `step(num_layers=24)`.

    A search for the largest batch has the budget of its target, so that it is another step where the budget is another one.
    """
    asked = {**DEFAULTS, "what": what, **fields}
    asked["budget_bytes"] = budget_bytes(asked["target"]) if what == "largest" else None
    return {name: value for name, value in asked.items() if name not in DEFAULTS or DEFAULTS[name] != value}


def grid(what: str = "step", **fields: Any) -> list[Row]:
    """A step for each combination of the values of the fields that are tuples: `grid(policy=("none", "nothing"), batch=8)`."""
    names = [name for name, values in fields.items() if isinstance(values, tuple)]
    combinations = itertools.product(*(fields[name] for name in names))
    return [step(what, **{**fields, **dict(zip(names, values, strict=True))}) for values in combinations]


def budget_bytes(target: str) -> int:
    """The bytes of a GPU that a step may take."""
    return BUDGETS[target]


def measured(step: Row) -> Row:
    """What was found of a step, and the seconds that it took. XLA may reject the step, which is a JaxrematError."""
    began, asked = time.monotonic(), {**DEFAULTS, **step}
    return {**MEASURES[asked["what"]](asked), "took_s": round(time.monotonic() - began, 1)}


def _trials(asked: Row, **options: Any) -> Trials:
    """The trials of a step: its model, its training, its target and the budget."""
    chosen, target = preset(asked["preset"]), load_target(asked["target"])
    changed = {name: value for name, value in asked.items() if name not in DEFAULTS}
    model = replace(chosen.config, **{name: value for name, value in changed.items() if name in _OF_MODEL})
    training = {name: value for name, value in changed.items() if name not in _OF_MODEL}
    train = TrainConfig(**{"seq_len": chosen.seq_len, **training})
    factory = decoder_factory(model, choose_attention(model, train.seq_len, target).implementation)
    settings = {"global_batch": asked["global_batch"], "measures": False, **options}
    return Trials(factory, train, target, budget_bytes(asked["target"]), **settings)


def _policy(asked: Row, trials: Trials) -> Policy:
    return trials.factory.checked(parse(asked["policy"]), trials.train, None)


def _found(record: TrialRecord) -> Row:
    """The fields of a trial's record, which is an error where XLA rejected the step."""
    if record.error is not None:
        raise JaxrematError(f"{record.model}, {record.policy}, batch {record.batch}: {record.error}")
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _step(asked: Row) -> Row:
    """The bytes and the predicted time of one batch."""
    trials = _trials(asked)
    return _found(trials.record(_policy(asked, trials), asked["batch"], requested=asked["policy"]))


def _memory(asked: Row) -> Row:
    """The same, and the bytes of each of the seven sources at the peak."""
    trials, batch, text = _trials(asked, with_dump=True), asked["batch"], asked["policy"]
    policy = _policy(asked, trials)
    return {**_found(trials.record(policy, batch, requested=text)), **(explain(trials, policy, batch, 0).sources or {})}


def _largest(asked: Row) -> Row:
    """The largest batch that fits into `budget_bytes`, and its row. 0 and no row where not even one sequence fits."""
    records: list[Any] = []
    trials = _trials(asked)
    list(answer_largest(trials, _policy(asked, trials), asked["policy"], MAX_BATCH, records.append, Compiles()))
    if not isinstance(records[-1], LargestBatchRecord):
        raise JaxrematError(f"{asked}: {records[-1].error}")
    largest = records[-1].largest_batch
    rows = [record for record in records if isinstance(record, TrialRecord) and record.batch == largest]
    return {**(_found(rows[-1]) if rows else {}), "largest_batch": largest}


def _plan(asked: Row) -> Row:
    """The plan within the bytes of the policy, times the share, and its row. No policy and no row if there is no plan."""
    trials, batch = _trials(asked), asked["batch"]
    within = int(asked["share"] * trials.compile(_policy(asked, trials), batch).memory.total_bytes)
    answer = plan_run(trials, losses=(trials.train.loss,), batch=batch, max_batch=batch, budget_bytes=within)
    if not isinstance(answer.found, Plan):
        return {"planned": None, "within_bytes": within}
    row = answer.trials.record(answer.found.policy, batch, requested="auto", num_compiles=answer.num_compiles)
    return {**_found(row), "planned": str(answer.found.policy), "within_bytes": within}


#: GB/s in one direction of a link to the host: from 2 lanes of PCIe 5.0 to NVLink between chips and beyond.
LINKS = tuple(8 * 2 ** (n / 2) for n in range(16))


def _links(asked: Row) -> Row:
    """One batch, and its predicted seconds with each of `LINKS` to the host. The program is the same for all links."""
    trials, batch = _trials(asked), asked["batch"]
    policy = _policy(asked, trials)
    speed, module = speed_of(trials.target), trials.compile(policy, batch).module
    seconds = [predict_step_time(module, replace(speed, host_link_bytes_per_s=1e9 * link)).step_s for link in LINKS]
    found = _found(trials.record(policy, batch, requested=asked["policy"]))
    return {**found, "link_gb_per_s": speed.host_link_bytes_per_s / 1e9, "step_s_by_link": seconds}


def _layer(asked: Row) -> Row:
    """The gradient of the model's layers alone, unrolled: no embedding, no loss over the vocabulary and no optimizer."""
    run = _trials(asked)
    model, attention = jaxremat.ModelConfig(**run.factory.config()), run.factory.facts(run.train).attention
    assert attention
    block = jaxremat.Block(model, attention, deterministic=model.dropout == 0)
    layers = jaxremat.Layers(block, model.num_layers, asked["policy"], scan=False)
    x = jax.ShapeDtypeStruct((asked["batch"], run.train.seq_len, model.embed_dim), model.dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(lambda key, x: layers.init({"params": key, "dropout": key}, x), key, x)

    def loss(variables: Any, x: Any, key: Any) -> Any:
        y: Any = layers.apply(variables, x, rngs={"dropout": key})
        return jnp.mean(y.astype(jnp.float32) ** 2)

    done = lower_and_compile(jax.grad(loss, argnums=(0, 1)), (variables, x, key), run.target)
    step_s = predict_step_time(done.module, speed_of(run.target)).step_s
    flops = executed_flops(done.module).total
    return {"total_bytes": done.memory.total_bytes, "executed_flops": flops, "step_s": step_s}


#: By the field `what` of a step, the function that measures it.
MEASURES = {"step": _step, "memory": _memory, "largest": _largest, "plan": _plan, "links": _links, "layer": _layer}
