"""What the lint's rules find in the step of a trial, and what the step keeps, as records hold them."""

import dataclasses

from jaxremat.policy.spec import Policy
from jaxremat.trial.details import LintFinding, RunsAgain, SavedForBackward, WhatWasKept
from jaxremat.xla.compile import Compilation
from jaxremat.xla.flops import count_step_flops, executed_flops
from jaxremat.xla.kept import what_was_kept
from jaxremat.xla.lint import find
from jaxremat.xla.lint_input import Remedies, lint_input

_MORE_THAN_ITS_SHARE = 1.01


def findings(
    compilation: Compilation, requested: str, policy: Policy, remedies: Remedies, *, chunked_bytes: int | None = None
) -> tuple[LintFinding, ...]:
    """The findings in a compiled step, with the most bytes first.

    Args:
        compilation: the step. Without its dump, the rules on buffers find nothing.
        requested: the policy as it was asked for, such as `auto`.
        policy: the policy of the step.
        remedies: what a remedy can be.
        chunked_bytes: `total_bytes` of the same step with the chunked loss; None where that wasn't compiled.
    """
    found = find(lint_input(compilation, policy=policy, remedies=remedies, chunked_bytes=chunked_bytes))
    planned = requested.partition(":")[0] in ("auto", "plan")  # a plan has weighed what saving attention's outputs is worth
    shown = [finding for finding in found if not (planned and finding.rule == "attention-twice")]
    return tuple(LintFinding(**dataclasses.asdict(finding)) for finding in shown)


def findings_on_mesh(compilation: Compilation, num_devices: int) -> tuple[LintFinding, ...]:
    """Whether each device executes more than its share of the FLOPs that JAX asked for. Other rules don't read such steps yet.

    Where nothing in a program says how its activations lie, XLA may divide their features and not their samples. It then
    computes the same on several devices, and says nothing of it.
    """
    asked = count_step_flops(compilation.jaxpr).total
    executed = executed_flops(compilation.module).total
    if executed * num_devices <= _MORE_THAN_ITS_SHARE * asked:
        return ()
    evidence = f"each device executes {executed * num_devices / asked:.2f} times its share of the step's FLOPs"
    remedy = 'say how activations lie: flax.linen.spmd.with_logical_constraint(x, ("batch", None, None)) in each layer'
    return (LintFinding("more-than-its-share", evidence, remedy, 0, ""),)


def kept_by(compilation: Compilation) -> WhatWasKept:
    """What a compiled step saves for the backward pass, and what it runs again."""
    kept = what_was_kept(compilation)
    return WhatWasKept(
        num_checkpoints=kept.num_checkpoints,
        again=tuple(RunsAgain(**dataclasses.asdict(some)) for some in kept.again),
        saved=tuple(SavedForBackward(**dataclasses.asdict(some)) for some in kept.saved),
        unread_names=kept.unread_names,
        unmatched_names=kept.unmatched_names,
    )
