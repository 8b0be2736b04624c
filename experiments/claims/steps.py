"""The steps that claims are checked by, as data, and what is measured of each. Every step is compiled for a GPU that isn't here.

    measured(step(policy="dots", batch=8, num_layers=24))   # {"total_bytes": ..., "step_s": ..., ...}

Bytes are XLA's. Step times are predicted, as `predicted_error` of the target says how far off.
"""

import ast
import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.errors import JaxrematError
from jaxremat.model.presets import preset

if TYPE_CHECKING:
    from jaxremat.trial.record import TrialRecord
    from jaxremat.trial.settings import Run
    from jaxremat.trial.trial import PolicyTrials

#: step: one batch. memory: one batch, and who holds its bytes at the peak. largest: the largest batch within 0.75 of the
#: device's memory. plan: a plan within the bytes of another policy. links: a step by link to the host. layer: layers alone.
What = Literal["step", "memory", "largest", "plan", "links", "layer"]
#: What is measured of steps whose batch or policy isn't given, but found.
FREE = ("largest", "plan")
_OF_MODEL = {field.name for field in dataclasses.fields(ModelConfig)}
#: The GPUs that steps are compiled for. Claims name their steps for the first.
TARGETS = ("h100-80gb", "h200")
#: The share of the device's memory that the largest batch may take, which is JAX's default.
MEM_FRACTION = 0.75
#: No search goes beyond this batch.
MAX_BATCH = 8192


@dataclass(frozen=True)
class Step:
    """One training step, and what to measure of it.

    Attributes:
        what: what is measured.
        preset: the model.
        policy: the policy's text. For a plan, the policy whose bytes the plan may take.
        batch: sequences in a microbatch. Unused for `largest`.
        target: the GPU.
        global_batch: sequences of a step in all, for `largest`. None where the batch decides.
        share: of the bytes of `policy` that a plan may take.
        changed: the fields of `ModelConfig` and `TrainConfig` that differ from the preset's, sorted by name.
    """

    what: What = "step"
    preset: str = "gpt2"
    policy: str = "none"
    batch: int = 1
    target: str = TARGETS[0]
    global_batch: int | None = None
    share: float = 1.0
    changed: tuple[tuple[str, Any], ...] = ()

    def asked(self) -> dict[str, Any]:
        """The step as plain JSON, without the fields that have their defaults."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "changed"}
        told = {f.name: own[f.name] for f in dataclasses.fields(self) if f.name in own and own[f.name] != f.default}
        return {"preset": self.preset, "policy": self.policy, **told, **dict(self.changed)}


def step(what: What = "step", **fields: Any) -> Step:
    """A step. Fields that aren't those of `Step` change the preset's model or its training: `step(num_layers=24)`."""
    own = {field.name for field in dataclasses.fields(Step)}
    changed = tuple(sorted((name, value) for name, value in fields.items() if name not in own))
    return Step(what, changed=changed, **{name: value for name, value in fields.items() if name in own})


#: A model with a vocabulary so large that the full loss would take most of the memory.
LLAMA: dict[str, Any] = {"preset": "llama3.2-1b", "loss": "chunked"}
#: Toy steps, which the claims share at the size `tiny`, so that a test of all of them compiles few.
TOY: dict[str, Any] = {"preset": "tiny", "num_layers": 4, "scan_layers": True}
TOY_MEMORY: dict[str, Any] = {"preset": "tiny", "attention": "xla", "dtype": "bfloat16"}
TOY_LARGEST = step("largest", global_batch=2, **TOY)


def for_all_targets(steps: Sequence[Step]) -> list[Step]:
    """The steps, and then the same for the other targets."""
    return [*steps, *(replace(one, target=target) for target in TARGETS[1:] for one in steps)]


def budget_bytes(target: str) -> int:
    """The bytes of a device that a step may take."""
    from jaxremat.search.budget import make_budget
    from jaxremat.xla.target import load_target

    memory = load_target(target).memory_bytes
    return make_budget(asked_bytes=None, mem_fraction=MEM_FRACTION, memory_bytes=memory).num_bytes


def key_of(asked: Step) -> dict[str, Any]:
    """What the row of a step depends on: the step, the function that measures it, and the versions."""
    from jaxremat.xla.installed import versions

    return {"asked": asked.asked(), "source": SOURCES[asked.what], "versions": versions()}


def measured(asked: Step) -> dict[str, Any]:
    """What was found of a step, and the seconds that it took.

    Raises:
        JaxrematError: XLA refused the step.
    """
    began = time.monotonic()
    found = MEASURES[asked.what](asked)
    return {**found, "took_s": round(time.monotonic() - began, 2)}


def _run(asked: Step) -> "Run":
    """The settings of the step: its model, its training, its target and the budget."""
    from jaxremat.model.decoder_workload import DecoderFactory
    from jaxremat.trial.settings import Run
    from jaxremat.xla.target import load_target

    chosen, target, changed = preset(asked.preset), load_target(asked.target), dict(asked.changed)
    model = replace(chosen.config, **{name: value for name, value in changed.items() if name in _OF_MODEL})
    training = {name: value for name, value in changed.items() if name not in _OF_MODEL}
    train = TrainConfig(**{"seq_len": chosen.seq_len, **training})
    factory = DecoderFactory(model, _attention(model, train.seq_len, asked.target))
    return Run(factory, train, target, budget_bytes(asked.target), global_batch=asked.global_batch, measures=False)


@functools.lru_cache(maxsize=64)
def _attention(model: ModelConfig, seq_len: int, target: str) -> str:
    from jaxremat.trial.attention import choose_attention
    from jaxremat.xla.target import load_target

    return choose_attention(model, seq_len, load_target(target)).implementation


def _trials(asked: Step, **options: Any) -> "PolicyTrials":
    from jaxremat.policy.grammar import parse
    from jaxremat.trial.trial import PolicyTrials

    run = _run(asked)
    policy = run.factory.checked(parse(asked.policy), run.train, None)
    return PolicyTrials(run, asked.policy, policy, **options)


def _found(record: "TrialRecord") -> dict[str, Any]:
    """What the claims use of a trial's record.

    Raises:
        JaxrematError: XLA refused the step.
    """
    if record.error is not None:
        raise JaxrematError(f"{record.model}, {record.policy}, batch {record.batch}: {record.error}")
    names = (
        *("num_params", "attention", "accumulate", "total_bytes", "argument_bytes", "temp_bytes", "host_temp_bytes"),
        *("executed_flops", "recompute_overhead_percent", "step_s", "tokens_per_s"),
    )
    longer = record.predicted_interval[1] if record.predicted_interval else None
    return {name: getattr(record, name) for name in names} | {"predicted_error": longer}


def _measure_step(asked: Step) -> dict[str, Any]:
    """The bytes and the predicted time of one batch."""
    return _found(_trials(asked).record(asked.batch, "trial"))


def _measure_memory(asked: Step) -> dict[str, Any]:
    """The same, and the bytes of each of the seven sources at the peak."""
    from jaxremat.trial.explain import explain

    trials = _trials(asked, keep_dump=True)
    return {**_found(trials.record(asked.batch, "trial")), "sources": explain(trials, asked.batch, 0).sources}


def _measure_largest(asked: Step) -> dict[str, Any]:
    """The largest batch that fits, and its row. 0 and no row where not even one sequence fits."""
    from jaxremat.answer.records import answer_largest
    from jaxremat.trial.record import LargestBatchRecord, TrialRecord

    records: list[Any] = []
    answer_largest(_trials(asked), MAX_BATCH, records.append)
    if not isinstance(records[-1], LargestBatchRecord):
        raise JaxrematError(f"{asked}: {records[-1].error}")
    largest = records[-1].largest_batch
    rows = [record for record in records if isinstance(record, TrialRecord) and record.batch == largest]
    return {"largest_batch": largest, "budget_bytes": records[-1].budget_bytes, **(_found(rows[-1]) if rows else {})}


def _measure_plan(asked: Step) -> dict[str, Any]:
    """The plan's policy and its row."""
    from jaxremat.answer.planned import plan_run
    from jaxremat.planner.plan import Plan

    trials = _trials(asked)
    budget = int(asked.share * trials.compile(asked.batch).memory.total_bytes)
    planned = plan_run(
        trials.run, losses=(trials.run.train.loss,), batch=asked.batch, max_batch=asked.batch, budget_bytes=budget
    )
    if not isinstance(planned.found, Plan):
        return {"planned": None, "budget_bytes": budget}
    row = _found(planned.trials.record(asked.batch, "trial"))
    return {"planned": str(planned.found.policy), "budget_bytes": budget, **row}


#: GB/s in one direction of a link to the host: from 2 lanes of PCIe 5.0 to NVLink between chips and beyond.
LINKS = tuple(8 * 2 ** (n / 2) for n in range(16))


def _measure_links(asked: Step) -> dict[str, Any]:
    """One batch, and its predicted seconds with each of `LINKS` to the host. The program is the same for all links."""
    from jaxremat.answer.layer_estimate import speed_of
    from jaxremat.xla.clock import predict_step_time

    trials = _trials(asked)
    speed, module = speed_of(trials.run.target), trials.compile(asked.batch).module
    seconds = [predict_step_time(module, replace(speed, host_link_bytes_per_s=1e9 * link)).step_s for link in LINKS]
    own = {"link_gb_per_s": speed.host_link_bytes_per_s / 1e9, "links": list(LINKS), "step_s_by_link": seconds}
    return {**_found(trials.record(asked.batch, "trial")), **own}


def _measure_layer(asked: Step) -> dict[str, Any]:
    """The gradient of the model's layers alone, unrolled: no embedding, no loss over the vocabulary and no optimizer."""
    import jax
    import jax.numpy as jnp

    import jaxremat
    from jaxremat.answer.layer_estimate import speed_of
    from jaxremat.model.decoder_workload import DecoderFactory
    from jaxremat.xla.clock import predict_step_time
    from jaxremat.xla.compile import lower_and_compile
    from jaxremat.xla.flops import executed_flops

    run = _run(asked)
    assert isinstance(run.factory, DecoderFactory)
    model, implementation = run.factory.model, run.factory.implementation
    layers = jaxremat.Layers(
        jaxremat.Block(model, implementation, deterministic=model.dropout == 0), model.num_layers, asked.policy, scan=False
    )
    x = jax.ShapeDtypeStruct((asked.batch, run.train.seq_len, model.embed_dim), model.dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(lambda key, x: layers.init({"params": key, "dropout": key}, x), key, x)

    def loss(variables: Any, x: Any, key: Any) -> Any:
        y: Any = layers.apply(variables, x, rngs={"dropout": key})
        return jnp.mean(y.astype(jnp.float32) ** 2)

    done = lower_and_compile(jax.grad(loss, argnums=(0, 1)), (variables, x, key), run.target)
    speed = speed_of(run.target)
    return {
        "total_bytes": done.memory.total_bytes,
        "executed_flops": executed_flops(done.module).total,
        "step_s": predict_step_time(done.module, speed).step_s,
        "predicted_error": speed.calibration.error,
        "attention": implementation,
    }


MEASURES: dict[What, Callable[[Step], dict[str, Any]]] = {
    "step": _measure_step,
    "memory": _measure_memory,
    "largest": _measure_largest,
    "plan": _measure_plan,
    "links": _measure_links,
    "layer": _measure_layer,
}


def _source_of(function: Callable[[Step], dict[str, Any]]) -> str:
    """A hash of what a function does. Its comments and its layout don't count."""
    return sha256(ast.dump(ast.parse(inspect.getsource(function))).encode()).hexdigest()[:16]


#: They are read when this module is loaded, so that an edit of the file during a run changes nothing.
SOURCES: dict[What, str] = {what: _source_of(function) for what, function in MEASURES.items()}
