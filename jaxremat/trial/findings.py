"""What the lint's rules find in the step of a trial."""

from jaxremat.chips.speed import DeviceSpeed
from jaxremat.mesh.sharding import LeafOnMesh
from jaxremat.policy.spec import Policy
from jaxremat.xla.compile import Compilation
from jaxremat.xla.lint import find
from jaxremat.xla.lint_input import Remedies, lint_input
from jaxremat.xla.step_facts import Finding


def findings(
    compilation: Compilation,
    requested: str,
    policy: Policy,
    remedies: Remedies,
    *,
    arguments: tuple[LeafOnMesh, ...] = (),
    chunked_bytes: int | None = None,
    fused_attention: str = "",
    speed: DeviceSpeed | None = None,
    compared_meshes: tuple[str, ...] = (),
) -> tuple[Finding, ...]:
    """The findings in a compiled step, with the most bytes first.

    Args:
        compilation: the step. Without its dump, the rules on buffers find nothing.
        requested: the policy as it was requested, such as `auto`.
        policy: the policy of the step.
        remedies: what a remedy can be.
        arguments: how the step's arguments lie on a mesh. Empty for one device.
        chunked_bytes: `total_bytes` of the same step with the chunked loss; None where that wasn't compiled.
        fused_attention: as in `LintInput`.
        speed: as in `LintInput`.
        compared_meshes: as in `LintInput`.
    """
    known = {"arguments": arguments, "chunked_bytes": chunked_bytes, "fused_attention": fused_attention}
    known |= {"speed": speed, "compared_meshes": compared_meshes}
    found = find(lint_input(compilation, policy=policy, remedies=remedies, **known))
    planned = requested.partition(":")[0] in ("auto", "plan")  # a plan has weighed what saving attention's outputs is worth
    return tuple(finding for finding in found if not (planned and finding.rule == "attention-twice"))
