"""The command of `jaxremat explain` that looks closer at a step of `jaxremat run`.

jaxremat explain --model gpt2 --policy dots --batch 128 --lint
"""

import dataclasses
import shlex
from dataclasses import replace

from jaxremat.cli.explain import ExplainFlags
from jaxremat.session.fields import words_of
from jaxremat.session.flags import RunFlags, StepFlags
from jaxremat.session.request import MESH_AUTO
from jaxremat.trial.record import TrialRecord
from jaxremat.workload.given import OWN_LOSS

#: Temporaries that are less than this share of a step's bytes leave little to gain.
_MUCH = 0.5


def lint_line(flags: RunFlags, row: TrialRecord | None) -> str:
    """The line that says which command shows all findings of the lint in a step.

    Empty where that command can't compile the step, where the step's record has all findings, or where the state takes most of
    the step's bytes.

    Args:
        flags: the flags of `jaxremat run`.
        row: the fastest step that fits. None if none does.
    """
    if row is None or flags.distributed or (row.temp_bytes or 0) < _MUCH * (row.total_bytes or 0):
        return ""
    if row.requested_policy == "auto" and row.config["target"]["kind"] == "deviceless":
        return ""
    command = shlex.join(["jaxremat", "explain", *words_of(explain_flags(flags, row))])
    return f"To look for likely mistakes in the fastest step: {command}"


def explain_flags(flags: RunFlags, row: TrialRecord) -> ExplainFlags:
    """The flags of `jaxremat explain --lint` for a step that `jaxremat run` compiled."""
    shared = {field.name: getattr(flags, field.name) for field in dataclasses.fields(StepFlags)}
    is_of_file = row.requested_policy.startswith("plan:")
    policy = row.requested_policy if is_of_file else row.policy
    shared |= {"policy": (policy,), "batch": (row.batch,), "json": False, "out": None, "fresh": False, "verbose": False}
    if flags.mesh == MESH_AUTO:
        shared |= {"mesh": row.mesh, "devices": None, "nodes": flags.nodes if row.mesh else None}
    if len(flags.xla_preset) > 1:
        shared["xla_preset"] = (row.xla_preset,)
    if len(flags.training.seq_len) > 1 or flags.lengths:
        shared["training"] = replace(flags.training, seq_len=(row.seq_len,))
    is_chosen = flags.frontier or row.requested_policy == "auto" or is_of_file
    if is_chosen and row.loss != OWN_LOSS:
        shared["training"] = replace(shared["training"], loss=row.loss)
    if is_chosen and row.layout:
        shared["fields"] = replace(flags.fields, scan_layers=row.layout == "loop")
    return ExplainFlags(**shared, lint=True)
