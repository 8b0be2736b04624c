"""The FLOPs that a step executes under the policy `none`. A step's recomputation is counted from there.

Both counts are of compiled programs, so that what XLA leaves out or rewrites is in neither: gradients that nobody reads, such
as those of frozen parameters, and the padding of a convolution.

    base_flops(run, 64, executed, compile_none, first=8)    # compiles `none` at batch 8, and says what batch 64 executes

`none` is compiled once for all policies of a command, whose processes share the count. Other batches follow from what JAX asks
for at both of them. They are compiled too where that isn't enough: see `base_flops`.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxremat.config import TrainConfig
from jaxremat.errors import CompileError
from jaxremat.files import write_whole
from jaxremat.mesh.sharding import AnyMesh, tracing_on
from jaxremat.policy.spec import NONE
from jaxremat.step.step import abstract_args, make_step
from jaxremat.trial.settings import Run
from jaxremat.trial.task import SHARED_FOLDER
from jaxremat.workload.workload import Workload
from jaxremat.xla.compile import Compilation
from jaxremat.xla.flops import count_step_flops, executed_flops
from jaxremat.xla.lint_mesh import MORE

#: Compiles the step of a run under `none` at a batch.
CompileNone = Callable[[Run, int], Compilation]
#: A share of the FLOPs below which two counts are equal: a tenth of what the column `recompute` shows.
_EQUAL = 1e-4
#: The number of runs whose steps under `none` a process keeps: the losses and layouts that a plan compares.
_MOST_RUNS = 4


@dataclass(frozen=True)
class StepsUnderNone:
    """The steps of a run under `none`, by batch: those compiled here, and the FLOPs of a device where those are known.

    The FLOPs are None where XLA rejects the step, and where a device of a mesh executes more than its share.
    """

    done: dict[int, Compilation] = field(default_factory=dict)
    flops: dict[int, int | None] = field(default_factory=dict)


def steps_under_none(run: Run) -> StepsUnderNone:
    """The steps of `run` under `none`. They are the same object for runs whose steps are the same."""
    return _steps_under_none(run.factory, run.train, run.target, run.global_batch, run.xla_preset, run.own_optimizer)


@functools.lru_cache(maxsize=_MOST_RUNS)
def _steps_under_none(*settings: Any) -> StepsUnderNone:
    return StepsUnderNone()


def base_flops(run: Run, batch: int, executed: int, compile_none: CompileNone, first: int) -> int | None:
    """FLOPs that a device executes in the step of `run` at `batch` under `none`.

    The step has the same loss, microbatches and mesh. Its layers are in a loop where the workload has both layouts, because
    unrolled layers execute the same FLOPs and compile several times longer.

    A step that was compiled at `batch` says it itself. Otherwise it follows from the step at the nearest compiled batch, if
    either holds there:

    * XLA executes what JAX traced. It then does so at `batch`, too.
    * What JAX asks for is proportional to the samples. What XLA executes of it is then, too.

    If neither holds, or the result is more than the step itself executes, `none` is compiled at `batch`. So it is at batch 1:
    XLA turns matmuls of one row into reductions, which don't count.

    Args:
        run: the run, in which XLA's own rematerialization doesn't run.
        batch: samples of a microbatch.
        executed: FLOPs that the step executes under its policy.
        compile_none: compiles a step of a run under `none`.
        first: the batch at which `none` is compiled if no step is.

    Returns:
        None where XLA rejects the step under `none`, or where each device of a mesh executes more than its share in it.
    """
    if batch in (own := steps_under_none(run)).done:
        return _of_device(run, batch, own.done[batch])
    run = run.with_layout("loop")
    steps = steps_under_none(run)

    for compiled, done in steps.done.items():
        steps.flops.setdefault(compiled, _of_device(run, compiled, done))

    def counted(batch: int) -> int | None:
        if batch in steps.flops:
            return steps.flops[batch]
        shared = _shared_file(run, batch)
        if shared and shared.exists():
            flops: int | None = json.loads(shared.read_text())
        else:
            with contextlib.suppress(CompileError):
                steps.done[batch] = compile_none(run, batch)
            flops = _of_device(run, batch, steps.done[batch]) if batch in steps.done else None
            if shared:
                write_whole(shared, json.dumps(flops))
        return steps.flops.setdefault(batch, flops)

    if batch == 1 or batch in steps.flops:
        return counted(batch)
    others = [known for known in steps.flops if known > 1] or [first if first > 1 else batch]
    near = min(others, key=lambda known: abs(known - batch))
    at_near = counted(near)
    if at_near is None or near == batch:
        return at_near
    found = _at_other_batch(run, near, at_near, batch)
    return found if found and found <= executed * (1 + _EQUAL) else counted(batch)


def _shared_file(run: Run, batch: int) -> Path | None:
    """The file in which the processes of a command share the FLOPs of a step. None for a command of one process."""
    if not (folder := os.environ.get(SHARED_FOLDER)):
        return None
    train, target = run.train_at(batch), run.target
    settings = [run.factory.config(), asdict(run.factory.facts(train)), asdict(train), run.own_optimizer, batch]
    settings += [target.name, target.description, target.layout(), run.xla_preset]
    return Path(folder, hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:32])


def _at_other_batch(run: Run, near: int, executed: int, batch: int) -> int | None:
    """FLOPs of a device at `batch`, from those that it executes at `near`. None where they don't follow."""
    near_flops, flops = traced_flops(run, near), traced_flops(run, batch)
    if _is_equal(executed * run.target.mesh_shape.num_devices, near_flops):
        return flops // run.target.mesh_shape.num_devices
    samples_near, samples = (size * run.train_at(size).accumulate for size in (near, batch))
    is_proportional = _is_equal(flops * samples_near, near_flops * samples)
    return executed * samples // samples_near if executed and is_proportional else None


def _of_device(run: Run, batch: int, done: Compilation) -> int | None:
    """FLOPs that a device executes. None where that is more than its share of what JAX traced."""
    executed, num_devices = executed_flops(done.module).total, run.target.mesh_shape.num_devices
    is_more = num_devices > 1 and executed * num_devices > MORE * traced_flops(run, batch)
    return None if is_more else executed


def _is_equal(number: int, other: int) -> bool:
    return math.isclose(number, other, rel_tol=_EQUAL)


def traced_flops(run: Run, batch: int) -> int:
    """FLOPs that JAX asks for in the step under `none` on all devices, counted in its jaxpr."""
    return _traced_flops(run.workload_at(batch * run.num_members), run.train_at(batch), run.target.mesh)


@functools.lru_cache(maxsize=8)
def _traced_flops(workload: Workload, train: TrainConfig, mesh: AnyMesh | None) -> int:
    with tracing_on(mesh):  # constraints of the user's own need it
        return count_step_flops(jax.make_jaxpr(make_step(workload, train, NONE))(*abstract_args(workload, train))).total
