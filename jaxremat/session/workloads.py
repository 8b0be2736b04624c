"""Makes the workload factory of a request, and fits the request to it.

What the flags request is checked here as far as it depends on the workload. A preset always has a loss and a free batch. A
user's own workload may be a whole step, may have one batch, or may bring its optimizer.
"""

import dataclasses
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxremat.config import ModelConfig
from jaxremat.errors import UsageError
from jaxremat.policy.spec import NONE, OWN
from jaxremat.session.flags import RunFlags
from jaxremat.session.request import Frontier, Request, RequestedPolicy, uneven_groups

if TYPE_CHECKING:
    from jaxremat.chips.target import Target
    from jaxremat.model.attention import AttentionChoice
    from jaxremat.workload.factory import WorkloadFactory
    from jaxremat.workload.workload import Workload

#: Fields of the training step that --optimizer's optimizers read, and a workload's own doesn't.
OPTIMIZER_FIELDS = ("learning_rate", "schedule", "warmup_steps", "decay_steps", "clip_norm", "weight_decay")


def factory_for(request: Request[Any], target: "Target", attention: "AttentionChoice | None" = None) -> "WorkloadFactory":
    """The factory of what --model requests: the decoder, or a workload of the user's own.

    The code of a user's workload is imported here.

    Args:
        request: what the flags request.
        target: the device that the steps are compiled for.
        attention: the decoder's attention, if it was chosen before. Choosing it takes a compile.

    Raises:
        UsageError: the model doesn't go with the target or its text, or the user's code makes no workload.
        UserCodeError: the user's code raised an exception.
    """
    if not isinstance(request.model, ModelConfig):
        from jaxremat.workload.factory import given_factory

        return given_factory(request.model, target.mesh, target, lambda: target.devices)
    from jaxremat.model.attention import choose_attention
    from jaxremat.model.data import check_text, load_text
    from jaxremat.model.decoder_workload import DecoderFactory

    model, data, seq_len = request.model, request.flags.data, request.train.seq_len
    attention = attention or choose_attention(model, seq_len, target)
    if data or target.kind != "deviceless":
        check_text(load_text(data), seq_len, model.vocab_size)
    return DecoderFactory(model, attention.implementation, attention.reason, data)


def named_factory(request: Request[Any]) -> "WorkloadFactory":
    """The factory of what --model requests, for lists about the model itself.

    The decoder's has XLA's attention.
    """
    if not isinstance(request.model, ModelConfig):
        from jaxremat.chips.target import load_target
        from jaxremat.mesh.sharding import abstract_mesh
        from jaxremat.workload.factory import given_factory

        mesh = abstract_mesh(request.mesh) if request.mesh else None
        return given_factory(request.model, mesh, devices=lambda: load_target(request.flags.target, request.mesh).devices)
    from jaxremat.model.decoder_workload import DecoderFactory

    return DecoderFactory(request.model, "xla")


def fitted(request: Request[Any], factory: "WorkloadFactory", workload: "Workload") -> Request[Any]:
    """The request with what the workload determines.

    A workload that has only one batch determines the batch. A whole step determines the policy, which is `none`.

    Raises:
        UsageError: something was requested that this workload can't do.
    """
    _check_mesh(request, factory, workload)
    if workload.step is not None:
        request = _for_whole_step(request, factory, workload)
    elif workload.loss_under is None:
        _ = workload.abstract_result  # the user's loss is traced once, so that its errors come before anything else
    if workload.optimizer is not None and request.flags.training.optimizer is None:
        _check_own_optimizer(request, factory)
    if factory.has_free_batch:
        return request
    own = workload.num_samples or 1
    if request.mesh and workload.step is None and workload.mesh is None:
        raise UsageError(
            f"a mesh of {request.mesh.num_devices} devices was requested, and {factory.name} has the one batch {own}",
            cause="each device has samples of its own, so that the batch of the step depends on the mesh",
            next_step="make the batch free: def workload(batch: int = 8)",
        )
    if isinstance(request.flags, RunFlags) and request.flags.objective == "batch":
        raise UsageError(
            f"--objective batch looks for the batch, and {factory.name} has the one batch {own}",
            next_step="--objective time, or make the batch free: def workload(batch: int = 8)",
        )
    if request.flags.global_batch is not None and request.flags.global_batch % own:
        raise UsageError(
            f"--global-batch {request.flags.global_batch} was requested, and {factory.name} has the one batch {own}",
            allowed=f"multiples of {own}",
            next_step=f"--global-batch {own * max(1, request.flags.global_batch // own)}",
        )
    if others := [batch for batch in request.batches if batch != own]:
        raise UsageError(
            f"--batch {others[0]} was requested, and {factory.name} has the one batch {own}",
            cause="a Workload, or a function without the keyword batch"
            + ("" if workload.num_samples or workload.step else ", whose arrays begin with different sizes"),
            next_step="leave --batch out, or make the batch free: def workload(batch: int = 8)",
        )
    return replace(request, batches=(own,))


def _check_mesh(request: Request[Any], factory: "WorkloadFactory", workload: "Workload") -> None:
    """Raises UsageError if the requested mesh and the workload's own are two.

    And if arguments of a whole step don't say how they lie on the requested mesh.
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
    groups, total = request.mesh.num_members if request.mesh else 1, request.flags.global_batch
    if total is not None and total % groups:
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
    given = [f"--{name.replace('_', '-')}" for name in fields if name != "seq_len"]  # a length is an argument of the user's
    given += [] if request.flags.global_batch is None else ["--global-batch"]
    given += ["--layers"] if request.flags.layers else []
    if given:
        raise UsageError(
            f"{given[0]} was given, and {factory.name} is a whole step",
            cause="the training step around a loss is made here, and a whole step is compiled as it is",
            next_step=f"leave {given[0]} out, or give the loss: Workload(loss=f, params=..., batch=...)",
        )
    others = [requested for requested in request.policies if requested.policy not in (NONE, OWN)]
    default = not request.flags.policy and all(other.text == "dots" for other in others)
    if others and not default:
        raise UsageError(
            f"{'--frontier' if isinstance(others[0].policy, Frontier) else f'--policy {others[0].text}'} was requested, "
            f"and {factory.name} is a whole step",
            allowed="none or own, which compile the step as it is",
            cause="a policy goes around layers, before the gradient is taken",
            next_step="give the loss: Workload(loss=f, params=..., batch=...)",
        )
    as_it_is = tuple(requested for requested in request.policies if requested not in others)
    return replace(request, policies=as_it_is or (RequestedPolicy("none", NONE),))


def _check_own_optimizer(request: Request[Any], factory: "WorkloadFactory") -> None:
    """Raises UsageError for a flag that the workload's own optimizer doesn't read."""
    training = vars(request.flags.training)
    if given := [name for name in OPTIMIZER_FIELDS if training[name] is not None]:
        flag = f"--{given[0].replace('_', '-')}"
        raise UsageError(
            f"{flag} was given, and {factory.name} brings its own optimizer",
            next_step=f"leave {flag} out, or choose one of --list optimizers with --optimizer",
        )
