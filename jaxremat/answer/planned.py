"""`--policy auto`: a plan for the layers of a run's workload, with JAX and XLA behind the planner."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxremat.answer.layer_estimate import estimate_function, speed_of
from jaxremat.config import Objective
from jaxremat.planner.candidates import without_flops
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.plan import NoPlan, Plan, find_plan
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.spec import Policy, Rule
from jaxremat.trial.trial import PolicyTrials, Run
from jaxremat.xla.cost import DeviceSpeed, predict_step_time

#: The compiled steps of a run, by policy and loss.
Trials = dict[tuple[Policy, str], PolicyTrials]


@dataclass(frozen=True)
class Planned:
    """What the planner found for a run, and the trials of the policy and loss that it chose.

    Where no step fits, they are the trials of the step of the fewest bytes. `num_layers` is the number of layers planned.
    """

    found: Plan | NoPlan
    trials: PolicyTrials
    num_layers: int


def plan_run(
    run: Run,
    *,
    losses: Sequence[str],
    batch: int | None,
    max_batch: int,
    objective: Objective = "time",
    on_compile: Callable[[str, int, int], None] = lambda policy, batch, number: None,
    budget_bytes: int | None = None,
    trials: Trials | None = None,
    offload: bool = False,
) -> Planned:
    """Plans the layers of the workload of `run` within its budget.

    Args:
        run: the run. Its own loss is ignored.
        losses: the losses to choose among.
        batch: the batch, or None to choose it.
        max_batch: no larger batch is chosen.
        objective: what to plan for, as in `find_plan`.
        on_compile: called before each compile with the policy, the batch and the number of the compile, counted from 1.
        budget_bytes: a budget in place of the run's.
        trials: the compiled steps of other plans for the same run. They are used, and new steps are added.
        offload: whether to try plans that offload more. They assume that kernels hide the host transfers of as many bytes as
            the link moves while a layer runs; the compiled schedule shows whether they do. Otherwise a host transfer is priced
            as if no kernel hid it.

    Raises:
        TargetError: the target's speed isn't known, so that nothing has a price.
        CompileError: XLA refused a step.
    """
    speed = speed_of(run.target)
    known: Trials = {} if trials is None else trials
    count = 0

    def trials_of(policy: Policy, loss: str) -> PolicyTrials:
        if (policy, loss) not in known:
            known[policy, loss] = PolicyTrials(run.with_loss(loss), "auto", policy)
        return known[policy, loss]

    def compile_step(policy: Policy, loss: str, batch: int) -> Cost:
        nonlocal count
        of_policy = trials_of(policy, loss)
        if batch not in of_policy.done:
            count += 1
            on_compile(str(policy), batch, count)
        done = of_policy.compile(batch)
        return Cost(done.memory.total_bytes, predict_step_time(done.module, speed).step_s)

    layers_at = functools.cache(functools.partial(planned_layers, run, speed, offload=offload))
    num_layers = layers_at(batch or run.workload_at().num_samples or 1).num_layers
    steps = Steps(
        layer_at=lambda batch: layers_at(batch).estimate,
        compile=compile_step,
        num_layers=num_layers,
        budget_bytes=run.budget_bytes if budget_bytes is None else budget_bytes,
    )
    fixed_bytes = trials_of(Rule("none"), losses[0]).state_bytes()
    found = find_plan(steps, losses=losses, batch=batch, fixed_bytes=fixed_bytes, max_batch=max_batch, objective=objective)
    answer = found if isinstance(found, Plan) else found.least
    chosen = trials_of(answer.policy, answer.loss)
    chosen.num_other_compiles = max(0, count - len(chosen.done))
    return Planned(found, chosen, num_layers)


def plan_without_flops(run: Run, batch: int) -> Policy:
    """The policy of the fewest bytes under which no matmul, attention or convolution of a layer runs twice.

    Raises:
        TargetError: the target's speed isn't known.
    """
    return without_flops(planned_layers(run, speed_of(run.target), batch).estimate)


@dataclass(frozen=True)
class PlannedLayers:
    """What the planner needs of a workload's layers: the estimate of one of them at a batch, and how many there are."""

    estimate: LayerEstimate
    num_layers: int


def planned_layers(run: Run, speed: DeviceSpeed, batch: int, *, offload: bool = False) -> PlannedLayers:
    """The layers of the run's workload, for the planner.

    Dropout is included. The seconds are those of all microbatches of a step, and the bytes are those of one microbatch.

    Args:
        run: the run.
        speed: the device's speed.
        batch: samples in a microbatch.
        offload: whether to add an alternative in which kernels hide host transfers.
    """
    speed = _slower(speed, run.train.accumulate)
    if layer := run.factory.own_layer(batch, run.train):
        estimate = estimate_function(layer.function, layer.args, speed, in_scan=layer.in_scan)
        num_layers = layer.num_layers
    else:
        from jaxremat.answer.workload_estimate import estimate_workload

        estimate, num_layers = estimate_workload(run, speed, batch)
    # Only layers that run as a loop may keep bytes in host memory: `estimate_function` gives the others none.
    return PlannedLayers(
        _with_hidden_offload(estimate, speed) if offload and estimate.offload_bytes else estimate, num_layers
    )


def _slower(speed: DeviceSpeed, times: int) -> DeviceSpeed:
    """The speed of a device that is `times` times slower: a layer takes as long on it as `times` such layers take."""
    return replace(
        speed,
        bf16_flops=speed.bf16_flops / times,
        f32_flops=speed.f32_flops / times,
        bandwidth_bytes_per_s=speed.bandwidth_bytes_per_s / times,
        host_link_bytes_per_s=speed.host_link_bytes_per_s / times,
        launch_s=speed.launch_s * times,
    )


def _with_hidden_offload(estimate: LayerEstimate, speed: DeviceSpeed) -> LayerEstimate:
    """`estimate` with one more alternative, in which kernels hide the host transfers of what the link moves while they run.

    Such a transfer costs one read and one write of the device's memory, where saving costs three such passes.
    """
    hidden = replace(
        estimate,
        problem=replace(estimate.problem, offload_s_per_byte=estimate.problem.save_s_per_byte * 2 / 3),
        offload_bytes=int(sum(op.recompute_s for op in estimate.problem.ops) * speed.host_link_bytes_per_s),
        alternatives=(),
    )
    return replace(estimate, alternatives=(*estimate.alternatives, hidden))
