"""Fits a request to its workload.

What the flags request is checked here as far as it depends on the workload. A preset always has a loss and a free batch. A
user's own workload may be a whole step, may have one batch, or may bring its optimizer.
"""

import dataclasses
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from jaxremat.config import Layout, TrainConfig
from jaxremat.errors import UsageError, flag_of, reject
from jaxremat.policy.spec import NONE, WITHOUT_LAYERS
from jaxremat.session.flags import RunFlags
from jaxremat.session.request import Auto, Frontier, Request, RequestedPolicy, uneven_groups

if TYPE_CHECKING:
    from jaxremat.workload.factory import WorkloadFactory
    from jaxremat.workload.workload import Workload

#: Fields of the training step that --optimizer's optimizers read, and a workload's own doesn't.
OPTIMIZER_FIELDS = ("learning_rate", "schedule", "warmup_steps", "decay_steps", "clip_norm", "weight_decay")


def with_own_loss(request: Request[Any], factory: "WorkloadFactory") -> Request[Any]:
    """The request with the default loss of the user's function, unless a flag says another one.

    A model that said its losses before its code ran has none of its own.
    """
    train = request.train
    if request.model.num_layers is not None or request.flags.training.loss or train.loss != TrainConfig.loss:
        return request
    return replace(request, train=replace(train, loss=factory.options.get("loss", train.loss)))


def fitted(request: Request[Any], factory: "WorkloadFactory", workload: "Workload") -> Request[Any]:
    """The request with what the workload determines.

    A workload that has only one batch determines the batch. A whole step determines the policy, which is `none` or `own`.
    The losses and layouts that a plan chooses among are those that a function of the user's own takes.

    Raises:
        UsageError: something was requested that this workload can't do.
    """
    _check_mesh(request, factory, workload)
    request = _with_choices(request, factory)
    if workload.write_text:
        of_model = {name: reason for name, reason in request.model.no_effect.items() if name != "sample_tokens"}
        request = replace(request, model=replace(request.model, no_effect=of_model))
    if workload.step is not None:
        request = _for_whole_step(request, factory, workload)
    elif workload.loss_under is None:
        _ = workload.abstract_result  # the user's loss is traced once, so that its errors come before anything else
    if workload.optimizer is not None and request.flags.training.optimizer is None:
        _check_own_optimizer(request, factory)
    if factory.has_free_batch:
        return request
    own, flags, total = workload.num_samples or 1, request.flags, request.flags.global_batch or 0
    others = [batch for batch in request.batches if batch != own]
    has, free = f"and {factory.name} has the one batch {own}", "make the batch free: def workload(batch: int = 8)"
    num_devices = request.mesh.num_devices if request.mesh else 1
    uneven = "" if workload.num_samples or workload.step else ", whose arrays begin with different sizes"
    reject(
        (request.mesh and workload.step is None and workload.mesh is None,
         f"a mesh of {num_devices} devices was requested, {has}", free,
         "each device has samples of its own, so the batch of the step depends on the mesh"),
        (isinstance(flags, RunFlags) and flags.objective == "batch", f"--objective batch looks for the batch, {has}",
         f"--objective time, or {free}"),
        (total % own, f"--global-batch {total} was requested, {has}", f"--global-batch {own * max(1, total // own)}", "",
         f"multiples of {own}"),
        (others, f"--batch {[*others, 0][0]} was requested, {has}", f"leave --batch out, or {free}",
         f"a Workload, or a function without the keyword batch{uneven}"),
    )  # fmt: skip
    return replace(request, batches=(own,))


def _with_choices(request: Request[Any], factory: "WorkloadFactory") -> Request[Any]:
    """The request with the losses and layouts of the workload.

    Those of a model that said them before its code ran stay.
    """
    if request.model.num_layers is not None:
        return request
    loss, scans = request.flags.training.loss, request.flags.fields.scan_layers

    def with_choices(one: RequestedPolicy) -> RequestedPolicy:
        if not isinstance(one.policy, Auto):
            return one
        has_layouts = factory.layout() and scans in (None, "auto") and factory.num_layers() > 1
        layouts = get_args(Layout) if has_layouts else ()
        return replace(one, policy=Auto((loss,) if loss else factory.losses(), layouts))

    return replace(request, policies=tuple(map(with_choices, request.policies)))


def _check_mesh(request: Request[Any], factory: "WorkloadFactory", workload: "Workload") -> None:
    """Raises UsageError for a requested mesh that the workload can't have.

    The workload brings its own mesh, the data-parallel groups don't share the global batch evenly, or arguments of a whole step
    don't say how they lie.
    """
    import jax

    if workload.mesh is not None:
        if request.flags.mesh is not None:
            raise UsageError(
                f"--mesh {request.flags.mesh} was given, and {factory.name} brings its own mesh",
                cause="its function takes the keyword devices, or makes a mesh",
                next_step="--devices N in place of --mesh",
            )
        return
    total = request.flags.global_batch
    if request.mesh and total is not None and total % request.mesh.num_members:
        raise uneven_groups(total, request.mesh)
    if workload.step is None:
        return
    leaves = jax.tree.leaves(workload.abstract_args)
    if request.mesh and not all(isinstance(leaf.sharding, jax.sharding.NamedSharding) for leaf in leaves):
        raise UsageError(
            f"a mesh of {request.mesh.num_devices} devices was requested, and {factory.name} is a whole step",
            allowed="arguments that say how they lie: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)), "
            "with mesh = jax.sharding.AbstractMesh((8,), ('fsdp',))",
            cause="only the arguments of a step that is made here are divided by rules",
            next_step="add shardings, or give the workload's loss: Workload(loss=f, params=..., batch=...)",
        )


def _for_whole_step(request: Request[Any], factory: "WorkloadFactory", workload: "Workload") -> Request[Any]:
    """The request for a workload that is a step: `none` in place of the default policy."""
    training = request.flags.training
    fields = [f.name for f in dataclasses.fields(training) if vars(training)[f.name] not in (None, ())]
    given = [flag_of(name) for name in fields if name != "seq_len"]  # a length is an argument of the user's
    given += ["--global-batch"] * (request.flags.global_batch is not None) + [
        flag_of(name) for name in ("layers", "train_only", "freeze") if getattr(request.flags, name)
    ]
    others = [
        one for one in request.policies if one.policy not in WITHOUT_LAYERS and (request.flags.policy or one.text != "dots")
    ]
    flag, other = [*given, ""][0], others[0] if others else RequestedPolicy("none", NONE)
    requested = "--frontier" if isinstance(other.policy, Frontier) else f"--policy {other.text}"
    is_step, loss = f"and {factory.name} is a whole step", "give the loss: Workload(loss=f, params=..., batch=...)"
    reject(
        (flag, f"{flag} was given, {is_step}", f"leave {flag} out, or {loss}",
         "the training step around a loss is made here, and a whole step is compiled as it is"),
        (others, f"{requested} was requested, {is_step}", loss,
         "a policy goes around layers, before the gradient is taken", "none or own, which compile the step as it is"),
    )  # fmt: skip
    as_it_is = (one if one.policy in WITHOUT_LAYERS else replace(one, text="none", policy=NONE) for one in request.policies)
    return replace(request, policies=tuple(as_it_is))


def _check_own_optimizer(request: Request[Any], factory: "WorkloadFactory") -> None:
    """Raises UsageError for a flag that the workload's own optimizer doesn't read."""
    training = vars(request.flags.training)
    given = next((flag_of(name) for name in OPTIMIZER_FIELDS if training[name] is not None), "")
    reject((given, f"{given} was given, and {factory.name} brings its own optimizer",
            f"leave {given} out, or choose one of --list optimizers with --optimizer"))  # fmt: skip
