"""What the lint's rules find in the step of a trial, and what the step keeps, as records hold them."""

import dataclasses

from jaxremat.mesh.sharding import LeafOnMesh
from jaxremat.policy.spec import Policy
from jaxremat.trial.details import LintFinding, RunsAgain, SavedForBackward, WhatWasKept
from jaxremat.xla.compile import Compilation
from jaxremat.xla.kept import what_was_kept
from jaxremat.xla.lint import find
from jaxremat.xla.lint_input import Remedies, lint_input


def findings(
    compilation: Compilation,
    requested: str,
    policy: Policy,
    remedies: Remedies,
    *,
    arguments: tuple[LeafOnMesh, ...] = (),
    chunked_bytes: int | None = None,
) -> tuple[LintFinding, ...]:
    """The findings in a compiled step, with the most bytes first.

    Args:
        compilation: the step. Without its dump, the rules on buffers find nothing.
        requested: the policy as it was asked for, such as `auto`.
        policy: the policy of the step.
        remedies: what a remedy can be.
        arguments: how the step's arguments lie on a mesh. Empty for one device.
        chunked_bytes: `total_bytes` of the same step with the chunked loss; None where that wasn't compiled.
    """
    found = find(lint_input(compilation, policy=policy, remedies=remedies, arguments=arguments, chunked_bytes=chunked_bytes))
    planned = requested.partition(":")[0] in ("auto", "plan")  # a plan has weighed what saving attention's outputs is worth
    shown = [finding for finding in found if not (planned and finding.rule == "attention-twice")]
    return tuple(LintFinding(**dataclasses.asdict(finding)) for finding in shown)


def kept_by(compilation: Compilation) -> WhatWasKept:
    """What a compiled step saves for the backward pass, and what it recomputes."""
    kept = what_was_kept(compilation)
    return WhatWasKept(
        num_checkpoints=kept.num_checkpoints,
        again=tuple(RunsAgain(**dataclasses.asdict(some)) for some in kept.again),
        saved=tuple(SavedForBackward(**dataclasses.asdict(some)) for some in kept.saved),
        unread_names=kept.unread_names,
        unmatched_names=kept.unmatched_names,
        gathered_forward_bytes=kept.gathered and kept.gathered.forward_bytes,
        gathered_backward_bytes=kept.gathered and kept.gathered.backward_bytes,
    )
