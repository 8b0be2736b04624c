"""The FLOPs that a step executes under the policy `none`.

A step's recomputation is counted from there.

Both counts are of compiled programs, so that what XLA leaves out or rewrites is in neither: gradients that nobody reads, such
as those of frozen parameters, and the padding of a convolution.

    base_flops(trials, parse("dots"), 64, compilation)    # compiles `none` once, and says what batch 64 executes under it

`none` is compiled once for all policies of a command, whose processes share the count. Other batches follow from what JAX
requests at both of them. They are compiled too where that isn't enough.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxremat.config import TrainConfig
from jaxremat.errors import CompileError
from jaxremat.mesh.sharding import AnyMesh, tracing_on
from jaxremat.policy.spec import NONE, Policy
from jaxremat.step.step import abstract_args, make_step
from jaxremat.system.files import write_whole
from jaxremat.trial.task import SHARED_FOLDER
from jaxremat.workload.workload import Workload
from jaxremat.xla.compile import Compilation
from jaxremat.xla.flops import count_step_flops, executed_flops
from jaxremat.xla.lint_mesh import MORE
from jaxremat.xla.recomputed import saved_and_recomputed

if TYPE_CHECKING:
    from jaxremat.trial.trials import Trials

#: A share of the FLOPs below which two counts are equal: a tenth of what the column `recompute` shows.
_EQUAL = 1e-4


def base_flops(trials: "Trials", policy: Policy, batch: int, compilation: Compilation) -> int | None:
    """FLOPs that a device executes in the step at `batch` under `none`.

    The step has the same loss, microbatches and mesh. Its layers are in a scan where the workload has both layouts, because
    unrolled layers execute the same FLOPs and compile several times longer.

    A step that was compiled at `batch` says it itself. Otherwise it follows from the step at the nearest compiled batch, if
    one of these is true there:

    * XLA executes what JAX traced. It then does so at `batch`, too.
    * What JAX requests is proportional to the samples. What XLA executes of it is then, too.

    If neither is true, or the result is more than the step itself executes, `none` is compiled at `batch`. So it is at batch 1:
    XLA turns matmuls of one row into reductions, which don't count.

    Where the compiler takes minutes for a step, as a TPU's does, `none` isn't compiled for the count. The recomputed operations
    that are in the compiled step are subtracted from what it executes.

    Args:
        trials: the trials that the step is one of.
        policy: the policy of the step.
        batch: samples of a microbatch.
        compilation: the compiled step under `policy`.

    Returns:
        None where XLA rejects the step under `none`, where each device of a mesh executes more than its share in it, and for a
        whole step that has checkpoints.
    """
    executed = executed_flops(compilation.module).total
    if batch in (known := trials.of(NONE).flops):  # of another process
        return known[batch]
    if trials.workload_at().step is not None:
        return None if saved_and_recomputed(compilation).num_checkpoints else executed
    if policy == NONE and not trials.xla_remat:
        if shared := _shared_file(trials, batch):
            write_whole(shared, json.dumps(_of_device(trials, batch, executed)))
        return executed
    first = min(trials.of(policy).compiled)
    trials = replace(trials, xla_remat=False, keep_dump=False, options={})
    if batch in (compiled := trials.of(NONE).compiled):
        return _of_device(trials, batch, executed_flops(compiled[batch].module).total)
    if trials.speaks_early:  # there a whole compile takes minutes
        again = sum(some.flops_again for some in saved_and_recomputed(compilation).again)
        return _of_device(trials, batch, executed - again)
    trials = trials.with_layout("loop")
    if batch == 1:
        return _flops_under_none(trials, batch)
    for known_batch, done in trials.of(NONE).compiled.items():
        trials.of(NONE).flops.setdefault(known_batch, _of_device(trials, known_batch, executed_flops(done.module).total))
    others = [known for known in trials.of(NONE).flops if known > 1] or [first if first > 1 else batch]
    near = min(others, key=lambda known: abs(known - batch))
    at_near = _flops_under_none(trials, near)
    if at_near is None or near == batch:
        return at_near
    found = _at_other_batch(trials, near, at_near, batch)
    return found if found and found <= executed * (1 + _EQUAL) else _flops_under_none(trials, batch)


def _flops_under_none(trials: "Trials", batch: int) -> int | None:
    """FLOPs of a device in the step under `none` at `batch`.

    The step is compiled, unless this command has compiled it before.
    """
    steps = trials.of(NONE)
    if batch in steps.flops:
        return steps.flops[batch]
    shared = _shared_file(trials, batch)
    if shared and shared.exists():
        return steps.flops.setdefault(batch, json.loads(shared.read_text()))
    if batch not in steps.compiled:
        trials.on_base(batch)
        with contextlib.suppress(CompileError):
            steps.done[batch] = trials.compile_anew(NONE, batch, suggest=False)
    done = steps.compiled.get(batch)
    flops = _of_device(trials, batch, executed_flops(done.module).total) if done else None
    if shared:
        write_whole(shared, json.dumps(flops))
    return steps.flops.setdefault(batch, flops)


def _shared_file(trials: "Trials", batch: int) -> Path | None:
    """The file in which the processes of a command share the FLOPs of a step.

    None for a command of one process.
    """
    if not (folder := os.environ.get(SHARED_FOLDER)):
        return None
    train, target = trials.train_at(batch), trials.target
    settings = [trials.factory.config(), asdict(trials.factory.facts(train)), asdict(train), trials.own_optimizer, batch]
    settings += [target.name, target.description, target.layout(), trials.xla_preset]
    return Path(folder, hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:32])


def _at_other_batch(trials: "Trials", near: int, executed: int, batch: int) -> int | None:
    """FLOPs of a device at `batch`, from those that it executes at `near`.

    None where they don't follow.
    """
    near_flops, flops = traced_flops(trials, near), traced_flops(trials, batch)
    if _is_equal(executed * trials.target.mesh_shape.num_devices, near_flops):
        return flops // trials.target.mesh_shape.num_devices
    samples_near, samples = (size * trials.train_at(size).accumulate for size in (near, batch))
    is_proportional = _is_equal(flops * samples_near, near_flops * samples)
    return executed * samples // samples_near if executed and is_proportional else None


def _of_device(trials: "Trials", batch: int, executed: int) -> int | None:
    """The FLOPs that a device executes. None where they are more than its share of what JAX traced."""
    num_devices = trials.target.mesh_shape.num_devices
    is_more = num_devices > 1 and executed * num_devices > MORE * traced_flops(trials, batch)
    return None if is_more else executed


def _is_equal(number: int, other: int) -> bool:
    return math.isclose(number, other, rel_tol=_EQUAL)


def traced_flops(trials: "Trials", batch: int) -> int:
    """FLOPs that JAX requests in the step under `none` on all devices, counted in its jaxpr."""
    return _traced_flops(trials.workload_of(batch), trials.train_at(batch), trials.target.mesh)


@functools.lru_cache(maxsize=8)
def _traced_flops(workload: Workload, train: TrainConfig, mesh: AnyMesh | None) -> int:
    with tracing_on(mesh, is_own=workload.mesh is not None):  # constraints of the user's own need it
        return count_step_flops(jax.make_jaxpr(make_step(workload, train, NONE))(*abstract_args(workload, train))).total
