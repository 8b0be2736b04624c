"""`--mesh auto`: the best mesh for one policy of a request.

The sensible meshes of the request's devices are compared, and a session is opened on the best one.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxremat.errors import TargetError, UsageError
from jaxremat.mesh.axes import ONE_DEVICE, MeshShape
from jaxremat.session.answers import Listener, policy_in_short
from jaxremat.session.request import Auto, Frontier, Request, RequestedPolicy
from jaxremat.session.session import Session
from jaxremat.trial.plan_file import PlanFile

if TYPE_CHECKING:
    from jaxremat.answer.mesh_race import Comparison, Entrant
    from jaxremat.policy.spec import Policy
    from jaxremat.search.compiles import Compile
    from jaxremat.trial.comparisons import MeshChoiceRecord


def choose_mesh(
    request: Request[Any], requested: RequestedPolicy, listener: Listener
) -> "tuple[MeshChoiceRecord, Session | None]":
    """Compares the meshes of `request` for the policy `requested`.

    Returns:
        The meshes side by side, and the session of this policy on the best of them, with the steps that were compiled. The
        latter is None where the state fits on no mesh.

    Raises:
        UsageError: no mesh goes with the request.
        TargetError: the speed of the target, or of the links between its devices, isn't known.
    """
    from jaxremat.answer.mesh_race import compare_meshes
    from jaxremat.chips.installed import versions
    from jaxremat.report.progress import compile_text
    from jaxremat.trial.comparisons import MeshChoiceRecord
    from jaxremat.trial.record import picked

    request, flags = replace(request, policies=(requested,)), request.flags
    obstacles = {mesh: _obstacle(request, mesh) for mesh in request.meshes}
    possible = [mesh for mesh, obstacle in obstacles.items() if not obstacle]
    if not possible:
        mesh, obstacle = next(iter(obstacles.items()))
        raise UsageError(
            f"--mesh auto: none of {len(obstacles)} meshes of {flags.devices} devices goes with this request",
            cause=f"{mesh} {obstacle}",
            next_step="name a mesh, such as --mesh fsdp=8, for its own error; or take other --devices",
        )
    first = on_first_mesh(replace(request, meshes=tuple(possible)))
    if first.trials.workload_at().step is not None:
        raise UsageError(
            f"--mesh auto was requested, and {first.trials.factory.name} is a whole step",
            cause="its arguments bring shardings over one mesh",
            next_step="name that mesh: --mesh fsdp=8",
        )
    (resolved,) = first.request.policies
    entrants = [_entrant(first, resolved, mesh, obstacle) for mesh, obstacle in obstacles.items()]

    trials = next(one.trials for one in entrants if one.trials)

    def on_compile(mesh: str, policy: str, batch: int, compile: "Compile") -> None:
        listener.progress(compile_text(mesh, compile, f"batch {batch}", policy_in_short(policy)))

    def record_of(compared: "Comparison") -> MeshChoiceRecord:
        return MeshChoiceRecord(
            model=trials.factory.name,
            requested_policy=resolved.text,
            xla_preset=resolved.xla_preset,
            target=trials.target.name,
            seq_len=trials.factory.facts(trials.train).seq_len,
            num_devices=trials.target.mesh_shape.num_devices,
            num_nodes=trials.target.mesh_shape.nodes,
            budget_bytes=trials.budget_bytes,
            loss=trials.factory.facts(trials.train).loss,
            layout=trials.factory.layout(),
            mesh=str(compared.best.mesh) if compared.best else None,
            **picked(compared, "meshes num_compiles is_complete"),
            counted="samples" if trials.workload_at().num_tokens is None else "tokens",
            paired_error=trials.target.speed.paired_error if trials.target.speed else None,
            versions=versions(),
        )

    compared = compare_meshes(
        entrants,
        _named(resolved),
        batch=request.batches[0] if request.batches else None,
        max_batch=flags.max_batch,
        on_compile=on_compile,
        on_change=lambda compared: listener.so_far(lambda: record_of(compared)),
    )
    best, record = compared.best, record_of(compared)
    if best is None or best.trials is None:
        return record, None
    on_best = replace(request, mesh=_or_none(best.mesh))
    session = Session.of(on_best, best.trials.target, factory=best.trials.factory)
    session = session.with_trials(steps=best.trials.steps, compared_meshes=tuple(map(str, request.meshes)))
    session.planned_batch = best.batch
    return record, session


def on_first_mesh(request: Request[Any]) -> Session:
    """The session of a request on the first of its meshes."""
    from jaxremat.chips.target import load_target

    mesh = _or_none(request.meshes[0])
    return Session.of(replace(request, mesh=mesh), load_target(request.flags.target, mesh))


def _or_none(mesh: MeshShape) -> MeshShape | None:
    """The mesh as requests and targets have it: None for one device."""
    return None if mesh == ONE_DEVICE else mesh


def _obstacle(request: Request[Any], mesh: MeshShape) -> str:
    """Why `mesh` doesn't go with the request, before anything is traced. Empty if it does."""
    global_batch, num_groups = request.flags.global_batch, mesh.num_members
    if global_batch is not None and global_batch % num_groups:
        return f"has {num_groups} data-parallel groups, which don't divide the global batch {global_batch}"
    of_group = (global_batch or 0) // num_groups
    if uneven := [batch for batch in request.batches if of_group % batch]:
        return f"has a global batch of {of_group} in each data-parallel group, which --batch {uneven[0]} doesn't divide"
    try:
        request.model.check_mesh(mesh)
    except UsageError as error:
        return error.got.removeprefix(f"--mesh {mesh} ")
    return ""


def _entrant(first: Session, requested: RequestedPolicy, mesh: MeshShape, obstacle: str) -> "Entrant":
    """The mesh with the trials on it.

    For a plan they have one loss and layers in a scan, so compiles are few and short.

    Args:
        first: the request on another mesh of the same devices.
        requested: the policy, with its names resolved.
        mesh: the mesh.
        obstacle: why it is left out. Empty if it isn't.

    Raises:
        TargetError: the speed of the target, or of the links between its devices, isn't known.
    """
    from jaxremat.answer.mesh_race import Entrant
    from jaxremat.chips.target import in_pool, load_target

    if obstacle:
        return Entrant(mesh, left_out=obstacle)
    flags = first.request.flags
    target = load_target(flags.target, _or_none(mesh))
    if target.speed is None:
        raise TargetError(
            f"--mesh auto compares predicted times, and the speed of {mesh.num_devices} x {target.name!r} on {mesh.nodes} "
            f"{'node' if mesh.nodes == 1 else 'nodes'} isn't known",
            cause="its peak or a link between its devices isn't known",
            next_step="name a mesh, such as --mesh fsdp=8, for its bytes without times; or take another --target",
        )
    if pool_bytes := first.trials.target.pool_bytes:
        target = in_pool(target, pool_bytes)  # as XLA has it in the job
    of_group = flags.global_batch and flags.global_batch // mesh.num_members
    factory = first.trials.factory.on(target.mesh)
    changes: dict[str, Any] = {"factory": factory, "target": target, "global_batch": of_group, "steps": {}}
    trials = replace(first.trials, **changes, xla_preset=requested.xla_preset)
    if isinstance(requested.policy, Auto):
        auto = requested.policy.with_short_compiles()
        return Entrant(mesh, trials.with_loss(auto.losses[0]).with_layout(next(iter(auto.layouts), None)))
    policy = _named(requested)
    assert policy is not None, "what isn't planned is a policy"
    try:
        trials.factory.checked(policy, trials.train, target.mesh)
    except UsageError as error:
        return Entrant(mesh, left_out=error.got)
    return Entrant(mesh, trials)


def _named(requested: RequestedPolicy) -> "Policy | None":
    """The policy that was requested. None for plans."""
    assert not isinstance(requested.policy, PlanFile | Frontier), "check_run rejects them beside --mesh auto"
    return None if isinstance(requested.policy, Auto) else requested.policy
