"""Flags that were given and change nothing, with the reason: one table.

A command names them before its answers.

    --steps has no effect: steps for a GPU that isn't in this machine aren't run

Where such a flag can only be a mistake, it is an error instead, in `request.py`, `grid.py` or `workloads.py`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jaxremat.chips.catalog import chip_of
from jaxremat.errors import flag_of
from jaxremat.session.flags import ProcessFlags
from jaxremat.session.request import Frontier, Request
from jaxremat.trial.plan_file import PlanFile

#: From the flags, the request and the kind of its target (`Target.kind`) to the reason. Empty: the flag has an effect.
Reason = Callable[[Any, Request[Any], str], str]


def _not_run(flags: Any, request: Request[Any], kind: str) -> str:
    if not isinstance(flags, ProcessFlags) and kind != "attached":
        return "this command compiles steps and runs none"
    return "steps for a GPU that isn't in this machine aren't run" if kind == "deviceless" else ""


def _max_batch(flags: Any, request: Request[Any], kind: str) -> str:
    policies = [one.policy for one in request.policies]
    if any(isinstance(policy, Frontier) for policy in policies):
        return "a frontier has one batch"
    if request.batches:
        return "no batch is searched for"
    return "a plan has its own batch" if all(isinstance(policy, PlanFile) for policy in policies) else ""


def _mem_fraction(flags: Any, request: Request[Any], kind: str) -> str:
    if request.budget_bytes is not None:
        return "--budget gives the bytes"
    of_gpu = "an attached GPU has the limit of JAX's allocator, which XLA_CLIENT_MEM_FRACTION sets"
    return {"cpu": _CPU, "attached": of_gpu}.get(kind, "")


def _targets(flags: Any) -> tuple[str, ...]:
    return (flags.target or "gpu",) if isinstance(flags.target, str | None) else tuple(flags.target)


def _network(flags: Any, request: Request[Any], kind: str) -> str:
    if kind == "cpu":
        return "no times are predicted for a CPU"
    shapes = [mesh for mesh in (*request.meshes, request.mesh) if mesh]
    return "" if any(mesh.nodes > 1 for mesh in shapes) else "the devices are on one node (--nodes)"


def _xla_remat(flags: Any, request: Request[Any], kind: str) -> str:
    always = all(chip_of(name).options.speaks_early for name in _targets(flags))
    return "the target's compiler has it always on" if always else ""


def _if(reason: str, holds: Callable[[Any, Request[Any]], object]) -> Reason:
    """The reason where `holds`, of the flags and the request."""
    return lambda flags, request, kind: reason if holds(flags, request) else ""


_CPU = "a CPU's budget is the available memory"
#: By field, why its flag has no effect. `Model.no_effect` has the others.
_REASONS: dict[str, Reason] = {
    "steps": _not_run,
    "data": _not_run,
    "max_batch": _max_batch,
    "mem_fraction": _mem_fraction,
    "network_gbps": _network,
    "xla_remat": _xla_remat,
    "headroom": lambda flags, request, kind: _CPU if kind == "cpu" else "",
    "initialization_timeout": _if(
        "there is one process (--distributed)", lambda flags, _: not (flags.distributed or flags.coordinator)
    ),
    "attention_block": _if(
        "the target's fused attention chooses its blocks itself",
        lambda flags, _: not any(chip_of(name).attention.block_tokens for name in _targets(flags)),
    ),
    "checkpoint_every": _if("it goes with --run-dir", lambda flags, _: flags.run_dir is None),
    "eval_batches": _if("it goes with --eval-every", lambda flags, _: flags.eval_every == 0),
    "decay_steps": _if("the schedule is constant", lambda _, request: request.train.schedule == "constant"),
}


def without_effect(request: Request[Any], kind: str) -> tuple[str, ...]:
    """A line for each flag that was given and changes nothing: `--steps has no effect: ...`.

    Args:
        request: the parsed and checked flags.
        kind: the kind of the target (`Target.kind`).
    """
    of_model = request.model.no_effect

    def reason(name: str) -> str:
        return _REASONS[name](request.flags, request, kind) if name in _REASONS else of_model.get(name, "")

    found = ((name, reason(name)) for name in _fields_given(request.flags))
    return tuple(f"{flag_of(name)} has no effect: {reason}" for name, reason in found if reason)


def _fields_given(flags: Any) -> Iterator[str]:
    """The fields of flags whose values aren't the defaults, with those of their groups."""
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields_given(value)
        elif value != field.default:
            yield field.name
