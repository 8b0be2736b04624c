"""Flags that were given and change nothing, with the reason: one table. A command names them before its answers.

    --steps has no effect: steps for a GPU that isn't in this machine aren't run

Where such a flag can only be a mistake, it is an error instead, in `request.py`, `grid.py` or `workloads.py`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxremat.cli.flags import ProcessFlags
from jaxremat.cli.request import Frontier, Request
from jaxremat.config import ModelConfig
from jaxremat.trial.plan_file import PlanFile
from jaxremat.workload.given import GivenModel


@dataclass(frozen=True)
class _Seen:
    """What the reasons look at: a request with its flags, and the kind of its target (`Target.kind`)."""

    request: Request[Any]
    kind: str

    @property
    def flags(self) -> Any:
        return self.request.flags

    @property
    def model(self) -> Any:
        return self.request.model


def _not_run(seen: _Seen) -> str:
    if not isinstance(seen.flags, ProcessFlags):
        return "this command compiles steps and runs none"
    return "steps for a GPU that isn't in this machine aren't run" if seen.kind == "deviceless" else ""


def _has_batch(seen: _Seen) -> str:
    if seen.request.batches:
        return "no batch is searched for"
    policies = [one.policy for one in seen.request.policies]
    return "a plan has its own batch" if all(isinstance(policy, PlanFile) for policy in policies) else ""


def _budget(seen: _Seen) -> str:
    if seen.request.budget_bytes is not None:
        return "--budget gives the bytes"
    return _no_device_memory(seen) or (
        "an attached GPU has the limit of JAX's allocator, which XLA_CLIENT_MEM_FRACTION sets"
        if seen.kind == "attached"
        else ""
    )


def _no_device_memory(seen: _Seen) -> str:
    return "a CPU's budget is the available memory" if seen.kind == "cpu" else ""


def _frontier(seen: _Seen) -> str:
    is_frontier = any(isinstance(one.policy, Frontier) for one in seen.request.policies)
    return "a frontier has one batch" if is_frontier else ""


def _without(flag: str, name: str, off: Any = None) -> Callable[[_Seen], str]:
    """The reason of a flag that goes with another one, which is the field `name`, and which wasn't given."""
    return lambda seen: f"it goes with {flag}" if getattr(seen.flags, name) == off else ""


def _of_model(reason: str, holds: Callable[[ModelConfig], bool]) -> Callable[[_Seen], str]:
    return lambda seen: reason if isinstance(seen.model, ModelConfig) and holds(seen.model) else ""


_EXPERTS = _of_model("the layers have no experts (--num-experts)", lambda model: not model.has_experts)
_LEARNED = _of_model("positions are learned (--positions)", lambda model: model.positions == "learned")
_BIASES = _of_model("all projections have biases (--use-bias)", lambda model: model.use_bias)
#: By field, why its flag has no effect. An empty reason: it has one. Flags that aren't here always have one.
_REASONS: dict[str, Callable[[_Seen], str]] = {
    "steps": _not_run,
    "data": _not_run,
    "max_batch": lambda seen: _frontier(seen) or _has_batch(seen),
    "mem_fraction": _budget,
    "headroom": _no_device_memory,
    "initialization_timeout": lambda seen: (
        "" if seen.flags.distributed or seen.flags.coordinator else "there is one process (--distributed)"
    ),
    "checkpoint_every": _without("--run-dir", "run_dir"),
    "eval_batches": _without("--eval-every", "eval_every", 0),
    "sample_tokens": lambda seen: "only the decoder writes text" if isinstance(seen.model, GivenModel) else "",
    "decay_steps": lambda seen: "the schedule is constant" if seen.request.train.schedule == "constant" else "",
    "rope_theta": _LEARNED,
    "rope_scaling": _LEARNED,
    "rotary_fraction": _LEARNED,
    "max_seq_len": _of_model(
        "positions are rope's, which isn't stretched", lambda model: model.positions == "rope" and not model.rope_scaling
    ),
    "experts_per_token": _EXPERTS,
    "normalize_routing": _EXPERTS,
    "router_loss": _EXPERTS,
    "dispatch": _EXPERTS,
    "window_pattern": _of_model("no layer has a window (--sliding-window)", lambda model: not model.sliding_window),
    "qk_norm_over": _of_model("queries and keys have no norm (--qk-norm)", lambda model: not model.qk_norm),
    "qkv_bias": _BIASES,
    "out_bias": _BIASES,
    "mlp_bias": _BIASES,
    "exact_gelu": _of_model("the MLP has no GELU (--mlp)", lambda model: model.mlp == "swiglu"),
}


def without_effect(request: Request[Any], kind: str) -> tuple[str, ...]:
    """A line for each flag that was given and changes nothing: `--steps has no effect: ...`.

    Args:
        request: what the flags ask for.
        kind: the kind of the target (`Target.kind`).
    """
    seen = _Seen(request, kind)
    found = ((name, _REASONS[name](seen)) for name in _fields_given(request.flags) if name in _REASONS)
    return tuple(f"--{name.replace('_', '-')} has no effect: {reason}" for name, reason in found if reason)


def _fields_given(flags: Any) -> Iterator[str]:
    """The fields of flags whose values aren't the defaults, those of the model and of the training step included."""
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields_given(value)
        elif value != field.default:
            yield field.name
