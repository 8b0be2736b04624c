"""`--policy auto`, and `plan` for anybody's layer: the planner with JAX and XLA behind it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxremat.answer.layer_problem import layer_problem
from jaxremat.errors import DoesNotFitError, TargetError, UsageError
from jaxremat.model.transformer import Block
from jaxremat.planner.candidates import without_flops
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.plan import NoPlan, Objective, Plan, find_plan
from jaxremat.planner.problem import Problem
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.autoname import autoname
from jaxremat.policy.spec import Policy, Rule
from jaxremat.policy.stack import Layers, scan_layers
from jaxremat.trial.trial import PolicyTrials, Run
from jaxremat.units import gib, parse_bytes
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.cost import DeviceSpeed, predict_step_time
from jaxremat.xla.refusal import cudnn_refusals_explained
from jaxremat.xla.target import Target, load_target

#: Bytes below which a copy to the host is all latency.
_LEAST_OFFLOADED = 2**20
#: The compiled steps by policy and loss.
Trials = dict[tuple[Policy, str], PolicyTrials]


@dataclass(frozen=True)
class Planned:
    """A plan for a run, and the run and trials in which its steps were compiled, by loss and policy."""

    found: Plan | NoPlan
    trials: PolicyTrials


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
    """The plan for the decoder of `run` within its budget; what was compiled on the way is kept for its trial.

    Args:
        run: the run; its own loss is not looked at.
        losses: to choose among.
        batch: the batch, or None to choose it.
        max_batch: no larger batch is chosen.
        objective: what is best.
        on_compile: told policy, batch and the number of the compile before it starts.
        budget_bytes: another budget than the run's.
        trials: the compiled steps of other plans for the same run, taken up and added to.
        offload: tries plans that keep values in host memory on the hope that kernels hide as many as the link moves while
            a layer runs. The compiled schedule tells. Without it a trip is priced as if nothing hid it.

    Raises:
        TargetError: the target's speed isn't known, so that nothing can be priced.
        CompileError: XLA refused a step.
    """
    speed = speed_of(run.target)
    known: Trials = {} if trials is None else trials
    count = 0

    def trials_of(policy: Policy, loss: str) -> PolicyTrials:
        if (policy, loss) not in known:
            with_loss = replace(run, train=replace(run.train, loss=loss))
            known[policy, loss] = PolicyTrials(with_loss, "auto", policy)
        return known[policy, loss]

    def compile_step(policy: Policy, loss: str, batch: int) -> Cost:
        nonlocal count
        of_policy = trials_of(policy, loss)
        if batch not in of_policy.done:
            count += 1
            on_compile(str(policy), batch, count)
        done = of_policy.compile(batch)
        return Cost(done.memory.total_bytes, predict_step_time(done.module, speed).step_s)

    steps = Steps(
        layer_at=functools.cache(functools.partial(decoder_layer, run, speed, offload=offload)),
        compile=compile_step,
        num_layers=run.model.num_layers,
        budget_bytes=run.budget_bytes if budget_bytes is None else budget_bytes,
    )
    fixed_bytes = trials_of(Rule("none"), losses[0]).state_bytes()
    found = find_plan(steps, losses=losses, batch=batch, fixed_bytes=fixed_bytes, max_batch=max_batch, objective=objective)
    answer = found if isinstance(found, Plan) else found.least
    chosen = trials_of(answer.policy, answer.loss)
    chosen.num_other_compiles = max(0, count - len(chosen.done))
    return Planned(found, chosen)


def plan_without_flops(run: Run, batch: int) -> Policy:
    """The policy of fewest bytes under which no matmul, attention or convolution of a layer runs twice.

    Raises:
        TargetError: the target's speed isn't known.
    """
    estimate = decoder_layer(run, speed_of(run.target), batch)
    return without_flops(estimate)


def decoder_layer(run: Run, speed: DeviceSpeed, batch: int, *, offload: bool = False) -> LayerEstimate:
    """One layer of the run's decoder at `batch`, dropout included, with what all microbatches of a step take."""
    model, speed = run.model, _slower(speed, run.train.accumulate)
    layer = autoname(Block)(model, run.attention.implementation, model.dropout == 0)
    x = jax.ShapeDtypeStruct((batch, run.train.seq_len, model.embed_dim), model.dtype)
    estimate = _module_estimate(layer, (x,), speed, in_scan=model.scan_layers)
    return _with_hidden_offload(estimate, speed) if offload and model.scan_layers else estimate


def _slower(speed: DeviceSpeed, times: int) -> DeviceSpeed:
    """A device on which a layer takes what it takes `times` times, one after the other."""
    return replace(
        speed,
        bf16_flops=speed.bf16_flops / times,
        f32_flops=speed.f32_flops / times,
        bandwidth_bytes_per_s=speed.bandwidth_bytes_per_s / times,
        host_link_bytes_per_s=speed.host_link_bytes_per_s / times,
        launch_s=speed.launch_s * times,
    )


def _with_hidden_offload(estimate: LayerEstimate, speed: DeviceSpeed) -> LayerEstimate:
    """`estimate` with one more alternative: kernels hide what the link moves while they run, and a trip is a read and a write."""
    hidden = replace(
        estimate,
        problem=replace(estimate.problem, offload_s_per_byte=estimate.problem.save_s_per_byte * 2 / 3),
        offload_bytes=int(sum(op.recompute_s for op in estimate.problem.ops) * speed.host_link_bytes_per_s),
        alternatives=(),
    )
    return replace(estimate, alternatives=(*estimate.alternatives, hidden))


def _module_estimate(layer: nn.Module, args: tuple[Any, ...], speed: DeviceSpeed, *, in_scan: bool) -> LayerEstimate:
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(lambda key, *args: layer.init({"params": key, "dropout": key}, *args), key, *args)
    mutable = [name for name in variables if name != "params"]

    def apply(variables: Any, key: Any, *args: Any) -> Any:
        return layer.apply(variables, *args, rngs={"dropout": key}, mutable=mutable)

    return _estimate(apply, (variables, key, *args), speed, in_scan=in_scan)


def _estimate(function: Callable[..., Any], args: tuple[Any, ...], speed: DeviceSpeed, *, in_scan: bool) -> LayerEstimate:
    (problem, keep), (estimated, _) = (
        layer_problem(function, args, speed, in_scan=in_scan, fused_reductions=fused) for fused in (True, False)
    )
    problem, estimated = map(_without_small_trips, (problem, estimated))
    ways = {v: keep[value.name] for v, value in enumerate(problem.values) if value.name in keep}
    # Unrolled, XLA starts the copies to the host too late to free the device.
    offload_bytes = sum(value.num_bytes for value in problem.values) if in_scan else 0
    estimate = LayerEstimate(problem, {v: way.name for v, way in ways.items() if way.name}, offload_bytes=offload_bytes)
    return replace(estimate, alternatives=(replace(estimate, problem=estimated),))


def _without_small_trips(problem: Problem) -> Problem:
    values = (replace(v, offloadable=v.offloadable and v.num_bytes >= _LEAST_OFFLOADED) for v in problem.values)
    return replace(problem, values=tuple(values))


def speed_of(target: Target) -> DeviceSpeed:
    """The target's speed, or a TargetError."""
    if target.speed is None:
        raise TargetError(
            f"a plan weighs recomputing against memory traffic, and the speed of target {target.name!r} isn't known",
            allowed="a bundled target, or a file of one that is known",
            next_step="plan for a bundled target of the same memory: --target NAME --budget SIZE (see --list targets)",
        )
    return target.speed


def plan(
    layer: nn.Module | Callable[..., Any],
    *args: Any,
    num_layers: int,
    budget: int | str,
    target: Target | str | None = None,
    scan: bool = True,
) -> Plan:
    """What `num_layers` of a layer should keep for the backward pass, so that its gradient fits `budget` and is fastest.

    The layer needs no checkpoint names: it is named by `autoname`. The program compiled is the gradient of the mean square of
    the stack's output, with respect to the layer's parameters and its input. Apply the answer of a module with
    `jaxremat.Layers(layer, num_layers, plan.policy)`, of a function with
    `jaxremat.scan_layers(function, params, x, policy=plan.policy)`.

    Args:
        layer: a Flax Linen module, called as `layer(x, *broadcast)`, or a function `layer(params, x, *broadcast)`; each
            returns the next x.
        *args: its arguments, of one layer; leaves may be `jax.ShapeDtypeStruct`s.
        num_layers: how often it is applied, one after the other.
        budget: bytes for everything the gradient needs, as a number or as text such as `12GiB`.
        target: as for `load_target`.
        scan: layers as a loop over stacked parameters, or (modules only) unrolled.

    Raises:
        CompileError: XLA refused the layer, or cuDNN an attention for which the layer itself asks cuDNN.
        DoesNotFitError: not even the least that a policy keeps fits.
        TargetError: the target's speed isn't known.
        UsageError: arguments that can't be meant, or a layer whose result can't be the next one's input.
    """
    budget_bytes = parse_bytes(str(budget))
    _check_layer(layer, args, num_layers, scan)
    on = target if isinstance(target, Target) else load_target(target)
    shapes = jax.eval_shape(lambda *args: args, *args)
    with cudnn_refusals_explained():
        if isinstance(layer, nn.Module):
            estimate, gradient, all_args = _module_program(layer, shapes, num_layers, scan, speed_of(on))
        else:
            estimate, gradient, all_args = _function_program(layer, shapes, num_layers, speed_of(on))

    def compile_step(policy: Policy, loss: str, batch: int) -> Cost:
        done = lower_and_compile(gradient(policy), all_args, on)
        return Cost(done.memory.total_bytes, predict_step_time(done.module, speed_of(on)).step_s)

    found = find_plan(Steps(lambda batch: estimate, compile_step, num_layers, budget_bytes), losses=("",), batch=1)
    if isinstance(found, NoPlan):
        raise DoesNotFitError(
            f"no policy fits {gib(budget_bytes)}: under {found.least.policy}, the least of those compiled, it takes "
            f"{gib(found.least.cost.total_bytes)}",
            next_step="a smaller batch, or a larger budget",
        )
    return found


def _check_layer(layer: Any, args: tuple[Any, ...], num_layers: Any, scan: bool) -> None:
    """Raises UsageError for arguments of `plan` that can't be meant."""
    call = "plan(Layer(), x, ...) for a module, plan(function, params, x, ...) for a function"
    if isinstance(layer, type) or not (isinstance(layer, nn.Module) or callable(layer)):
        got = f"the class {layer.__name__}" if isinstance(layer, type) else f"a {type(layer).__name__}"
        raise UsageError(f"plan got {got} as its layer", allowed="a Flax Linen module, or a function", next_step=call)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise UsageError(f"plan got num_layers={num_layers!r}", allowed="a whole number from 1 up")
    is_module = isinstance(layer, nn.Module)
    if len(args) < 1 + (not is_module):
        raise UsageError(f"plan got {len(args)} arguments of the layer", allowed="the layer's own", next_step=call)
    if not (scan or is_module):
        raise UsageError("plan got scan=False with a function", allowed="scan=False for modules", next_step="leave it out")


def _check_result(y: Any, x: Any) -> None:
    """Raises UsageError where a layer's result can't be the input of the next one."""
    made, given = (jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree) for tree in (y, x))
    if made != given:
        raise UsageError(
            f"the layer makes {made} of {given}",
            cause="each layer's result is the next one's input",
            next_step="give a layer whose output has its input's shape, dtype and structure",
        )


def _module_program(
    layer: nn.Module, args: tuple[Any, ...], num_layers: int, scan: bool, speed: DeviceSpeed
) -> tuple[LayerEstimate, Callable[[Policy], Any], tuple[Any, ...]]:
    named = autoname(type(layer))(**{name: getattr(layer, name) for name in _fields(layer)})
    key = jax.eval_shape(lambda: jax.random.key(0))
    y, _ = jax.eval_shape(lambda key, *args: layer.init_with_output({"params": key, "dropout": key}, *args), key, *args)
    _check_result(y, args[0])
    stack = Layers(layer, num_layers, Rule("none"), scan)
    variables = jax.eval_shape(lambda key, *args: stack.init({"params": key, "dropout": key}, *args), key, *args)

    def gradient(policy: Policy) -> Callable[..., Any]:
        module = Layers(layer, num_layers, policy, scan)

        def loss(params: Any, x: Any, others: Any, key: Any, *broadcast: Any) -> Any:
            y, _ = module.apply({**others, "params": params}, x, *broadcast, rngs={"dropout": key}, mutable=list(others))
            return _mean_square(y)

        return jax.grad(loss, argnums=(0, 1))

    others = {name: tree for name, tree in variables.items() if name != "params"}
    return (
        _module_estimate(named, args, speed, in_scan=scan and num_layers > 1),
        gradient,
        (variables.get("params", {}), args[0], others, key, *args[1:]),
    )


def _fields(layer: nn.Module) -> list[str]:
    return [name for name in layer.__dataclass_fields__ if name not in ("parent", "name")]


def _function_program(
    function: Callable[..., Any], args: tuple[Any, ...], num_layers: int, speed: DeviceSpeed
) -> tuple[LayerEstimate, Callable[[Policy], Any], tuple[Any, ...]]:
    _check_result(jax.eval_shape(function, *args), args[1])
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_layers, *leaf.shape), leaf.dtype), args[0])

    def gradient(policy: Policy) -> Callable[..., Any]:
        def loss(params: Any, x: Any, *broadcast: Any) -> Any:
            return _mean_square(scan_layers(function, params, x, *broadcast, policy=policy))

        return jax.grad(loss, argnums=(0, 1))

    estimate = _estimate(autoname(function), args, speed, in_scan=num_layers > 1)
    return estimate, gradient, (stacked, *args[1:])


def _mean_square(tree: Any) -> Any:
    return sum(jnp.mean(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))
