"""The lines that a person reads before the answers of a command.

They say what is trained, for which device, and in which memory.

    model     gpt2, 124,439,808 parameters in float32, compute in bfloat16
    step      sequence 1024, full loss, adamw
    budget    59.33 GiB = ...
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxremat.chips.chip import MEM_FRACTION
from jaxremat.session.request import Auto, Frontier, Request
from jaxremat.trial.plan_file import PlanFile
from jaxremat.workload.given import OWN_LOSS

if TYPE_CHECKING:
    from jaxremat.trial.trials import Trials


def heading(request: Request[Any], trials: "Trials") -> Iterator[str]:
    """The lines of the heading, such as `budget    59.33 GiB = ...`.

    Shapes and bytes are those of the first batch that was requested. Without one, they are those of the batch that the workload
    is written for.
    """
    from jaxremat.planner.steps import MOST_WHOLE
    from jaxremat.policy.offload import PASS, flag_line, has_fault
    from jaxremat.policy.spec import OWN
    from jaxremat.units import gib

    target, num_layers = trials.target, trials.factory.num_layers()
    batch = request.batches[0] if request.batches else None
    where = {"cpu": "times are real, memory is not a GPU's", "deviceless": "not in this machine"}.get(
        target.kind, "attached"
    )
    losses = {loss for requested in request.policies for loss in request.losses_of(requested.policy)}
    yield f"model     {trials.factory.name}, {_model_sentence(trials, batch)}"
    if request.model.line:
        yield request.model.line
    yield f"step      {_step_sentence(trials, losses, batch)}"
    times = f"{target.mesh_shape.num_devices} x " if target.mesh else ""
    yield f"target    {target.name}: {times}{target.description}, {where}"
    if target.lacks_bf16 and trials.workload_at(batch).compute_dtype == "bfloat16":
        yield "          its tensor cores have no bfloat16: such matmuls run in float32"
    if target.mesh:
        nodes, processes = target.mesh_shape.nodes, target.num_processes
        network = target.mesh_shape.network_gbps
        places = f" on {nodes} nodes" + (f" of {network:g} Gbit/s each" if network else "") if nodes > 1 else ""
        places += f" in {processes} processes" if processes > 1 else ""
        typed = request.flags.mesh or ""
        mesh = f"{typed} ({target.mesh_shape})" if "_parallelism" in typed else target.mesh_shape  # in MaxText's names
        yield f"mesh      {mesh}{places}; all numbers are those of one device"
    if target.mesh_shape.is_own:
        yield _batch_sentence(trials, batch)
    yield from trials.factory.lines(batch)
    if target.kind != "deviceless":
        for number, said in enumerate(_inputs_lines(trials, measured=not request.flags.trains)):
            yield f"{'' if number else 'data':10}{said}"
    if target.mesh:
        yield f"state     {_state_sentence(trials, batch)}"
    yield f"budget    {gib(trials.budget_bytes)} = {trials.budget_terms}"
    is_default = request.budget_bytes is None and request.flags.mem_fraction in (None, target.chip.mem_fraction)
    if is_default and target.kind == "deviceless" and target.chip.is_gpu:
        yield f"          JAX takes {MEM_FRACTION:g} by default; published recipes set 0.85 to 0.98"
    if trials.reserve_bytes is not None:
        outside, needed = target.chip.outside, target.chip.outside_needed
        yield f"outside   {gib(trials.reserve_bytes)} are left for {outside}; what these take is {needed}"
    if trials.speaks_early and any(isinstance(requested.policy, Auto) for requested in request.policies):
        yield f"plan      compiles at most {MOST_WHOLE} steps that fit, each for minutes, under one loss and in one layout"
    policies = [
        requested.policy.policy if isinstance(requested.policy, PlanFile) else requested.policy
        for requested in request.policies
        if not isinstance(requested.policy, Auto | Frontier)
    ]
    as_config = trials.workload_at().as_config
    for policy in policies:
        if num_layers and (said := policy.describe(num_layers)):
            yield f"policy    {policy}: {said}"
        if as_config and policy != OWN and as_config(policy) is None:
            yield f"policy    {policy}: its configuration can't say this; jaxremat.with_policy does it"
    offloads = any(policy.offloads for policy in policies)
    if target.chip.is_gpu and trials.factory.layout() != "unrolled" and has_fault() and offloads:
        yield f"          a scan that offloads is compiled without XLA's pass {PASS}, which would take the wrong layer's"
        yield f"          values; a program of your own needs {flag_line()}"
    if trials.factory.facts(trials.train).attention == "xla" and any(policy.saves_attention for policy in policies):
        yield "          +attention changes nothing here: there is no fused kernel"


def _batch_sentence(trials: "Trials", batch: int | None) -> str:
    """What a batch is on a mesh that the workload has brought."""
    name, number = trials.factory.name, batch or trials.workload_at().num_samples
    if not trials.factory.has_free_batch:
        return f"batch     the one that {name} has, on all devices"
    rows = trials.factory.rows_at(number, trials.train) if number else None
    return f"batch     what {name} makes of its keyword batch" + (
        f": {number} is {rows} samples on all devices" if rows else ""
    )


def _state_sentence(trials: "Trials", batch: int | None) -> str:
    """How much of the state each device of a mesh has.

    Such as `89.75 GiB in all; each device has 11.22 GiB of parts, ...`.
    """
    from jaxremat.units import gib

    state = [leaf for leaf in trials.arguments_on_mesh(batch) if not leaf.is_batch]
    divided, whole = (
        sum(leaf.device_bytes for leaf in state if bool(leaf.axes) == is_divided) for is_divided in (True, False)
    )
    return (
        f"{gib(sum(leaf.num_bytes for leaf in state))} in all; each device has {gib(divided)} of parts, {gib(whole)} whole"
    )


def _model_sentence(trials: "Trials", batch: int | None) -> str:
    """The parameters in words: `124,439,808 parameters in float32, compute in bfloat16`."""
    from jaxremat.step.step import state_and_argument_bytes
    from jaxremat.units import gib

    workload = trials.workload_at(batch)
    if workload.step is not None:
        return f"a whole step, with arguments of {gib(state_and_argument_bytes(workload, trials.train))}"
    dtypes = " and ".join(workload.param_dtypes)
    parameters = f"{workload.num_params:,} parameters"
    if workload.num_trained is None:
        parameters += f" in {dtypes}"
    else:
        parameters += f", of which {workload.num_trained:,} in {dtypes} are trained"
    return f"{parameters}, compute in {workload.compute_dtype}" if workload.compute_dtype else parameters


def _step_sentence(trials: "Trials", losses: set[str], batch: int | None) -> str:
    """The settings of the training step in words.

    Such as `sequence 1024, full loss, adamw, global batch 64`.

    Args:
        trials: the trials of the workload.
        losses: the losses that the steps are compiled with.
        batch: the batch whose shapes are shown. None takes the one that the workload is written for.
    """
    from jaxremat.workload.factory import shape_text

    train, facts, workload = trials.train, trials.factory.facts(trials.train), trials.workload_at(batch)
    if workload.step is not None:
        return f"its own, with arguments {shape_text(workload.abstract_args)}"
    parts = [] if facts.seq_len is None else [f"sequence {facts.seq_len}"]
    if facts.loss == OWN_LOSS:
        parts.append(f"batch of {shape_text(workload.abstract_batch)}")
    else:
        parts.append(f"{' or '.join(sorted(losses, reverse=True))} loss")
    own = trials.optimizer == "own"
    parts.append("the workload's own optimizer" if own else train.optimizer)
    if trials.global_batch is not None:
        parts.append(f"global batch {trials.global_batch * trials.target.mesh_shape.num_members}")
    if train.accumulate > 1:
        parts.append(f"{train.accumulate} microbatches")
    if train.grad_dtype:
        parts.append(f"gradients in {train.grad_dtype}")
    if not own and (train.schedule != "constant" or train.warmup_steps):
        parts.append(f"{train.schedule} schedule, {train.warmup_steps} of warm-up")
    if not own and train.clip_norm:
        parts.append(f"clipped to norm {train.clip_norm:g}")
    return ", ".join(parts)


def _inputs_lines(trials: "Trials", *, measured: bool) -> Iterator[str]:
    """What the steps are run with, or why none is run.

    The steps are those that are `measured`, or else those of a training.

    No line for batches of the workload's own.
    """
    from jaxremat.step.inputs import said_inputs

    workload = trials.workload_at()
    if workload.obstacle_to_running:
        yield f"none: steps are compiled and not run, as {workload.obstacle_to_running}"
    else:
        yield from said_inputs(workload, measured=measured)
