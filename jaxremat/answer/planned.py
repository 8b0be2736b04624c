"""`--policy auto`: a plan for the layers of a run's workload, with JAX and XLA behind the planner."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxremat.answer.layer_estimate import speed_of
from jaxremat.answer.workload_estimate import estimate_workload
from jaxremat.config import Objective
from jaxremat.planner.candidates import without_flops
from jaxremat.planner.plan import NoPlan, Plan, find_plan
from jaxremat.planner.shared_budget import EqualLayers, as_one
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.spec import Policy, Rule
from jaxremat.trial.trial import PolicyTrials, Run
from jaxremat.xla.clock import predict_step_time

#: The compiled steps of a run, by policy and loss.
Trials = dict[tuple[Policy, str], PolicyTrials]


@dataclass(frozen=True)
class Planned:
    """What the planner found for a run, and the trials of the policy and loss that it chose.

    Where no step fits, they are the trials of the step of the fewest bytes. `kinds` are the kinds of layers that were planned, at
    the plan's batch.
    """

    found: Plan | NoPlan
    trials: PolicyTrials
    kinds: tuple[EqualLayers, ...]


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
        UsageError: no repeated layers were found in the workload.
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

    kinds_at = functools.cache(functools.partial(estimate_workload, run, speed, offload=offload))
    layers_at = functools.cache(lambda batch: as_one(kinds_at(batch)))
    layers = layers_at(batch or run.workload_at().num_samples or 1)
    steps = Steps(
        layer_at=lambda batch: layers_at(batch).layer,
        compile=compile_step,
        num_layers=layers.num_layers,
        budget_bytes=run.budget_bytes if budget_bytes is None else budget_bytes,
        has_groups=layers.has_groups,
    )
    fixed_bytes = trials_of(Rule("none"), losses[0]).state_bytes()
    found = find_plan(steps, losses=losses, batch=batch, fixed_bytes=fixed_bytes, max_batch=max_batch, objective=objective)
    answer = found if isinstance(found, Plan) else found.least
    chosen = trials_of(answer.policy, answer.loss)
    chosen.num_other_compiles = max(0, count - len(chosen.done))
    return Planned(found, chosen, kinds_at(answer.batch))


def plan_without_flops(run: Run, batch: int) -> Policy:
    """The policy of the fewest bytes under which no matmul, attention or convolution of a layer runs twice.

    Raises:
        TargetError: the target's speed isn't known.
        UsageError: no repeated layers were found in the workload.
    """
    return without_flops(as_one(estimate_workload(run, speed_of(run.target), batch)).layer)
