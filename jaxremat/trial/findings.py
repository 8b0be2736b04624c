"""What the lint's rules find in a trial's step, as records hold it."""

import dataclasses

from jaxremat.policy.spec import Policy
from jaxremat.trial.details import LintFinding
from jaxremat.xla.compile import Compilation
from jaxremat.xla.lint import find
from jaxremat.xla.lint_input import lint_input


def findings(
    compilation: Compilation, requested: str, policy: Policy, *, chunked_bytes: int | None = None
) -> tuple[LintFinding, ...]:
    """The findings in a compiled step, those about the most bytes first.

    Args:
        compilation: the step; without its dump, the rules on buffers find nothing.
        requested: the policy as it was asked for.
        policy: that policy.
        chunked_bytes: `total_bytes` of the same step with the chunked loss, where that was compiled.
    """
    found = find(lint_input(compilation, policy=policy, flags=True, chunked_bytes=chunked_bytes))
    planned = requested.partition(":")[0] in ("auto", "plan")  # a plan has weighed what attention's outputs are worth
    shown = [finding for finding in found if not (planned and finding.rule == "attention-twice")]
    return tuple(LintFinding(**dataclasses.asdict(finding)) for finding in shown)
