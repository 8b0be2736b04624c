"""What the lint's rules find in the step of a trial."""

from jaxremat.chips.target import Target
from jaxremat.mesh.sharding import LeafOnMesh
from jaxremat.policy.spec import Policy
from jaxremat.xla.compile import Compilation
from jaxremat.xla.lint import find, fused_attention_of
from jaxremat.xla.lint_input import Remedies, lint_input
from jaxremat.xla.lint_mesh import GATHERED_AND_SAVED
from jaxremat.xla.step_facts import Finding


def findings(
    compilation: Compilation,
    requested: str,
    policy: Policy,
    remedies: Remedies,
    target: Target,
    *,
    arguments: tuple[LeafOnMesh, ...] = (),
    chunked_bytes: int | None = None,
    compared_meshes: tuple[str, ...] = (),
) -> tuple[Finding, ...]:
    """The findings in a compiled step, with the most bytes first.

    Args:
        compilation: the step. Without its dump, the rules on buffers find nothing.
        requested: the policy as it was requested, such as `auto`.
        policy: the policy of the step.
        remedies: what a remedy can be.
        target: what the step is compiled for.
        arguments: how the step's arguments lie on a mesh. Empty for one device.
        chunked_bytes: `total_bytes` of the same step with the chunked loss; None where that wasn't compiled.
        compared_meshes: as in `LintInput`.
    """
    known = {"arguments": arguments, "chunked_bytes": chunked_bytes, "compared_meshes": compared_meshes}
    known |= {"fused_attention": fused_attention_of(target), "speed": target.speed}
    found = find(lint_input(compilation, policy=policy, remedies=remedies, **known))
    if requested.partition(":")[0] not in ("auto", "plan"):
        return found
    # A plan has weighed whether attention's outputs and gathered parameters are saved, and the losses that are flags.
    weighed = ("attention-twice", GATHERED_AND_SAVED, "logits-largest" if remedies == "flags with loss" else "")
    return tuple(finding for finding in found if finding.rule not in weighed)
