"""`jaxremat.plan`: a plan for a stack of anybody's layers.

A layer is given as a Flax module or as a function.

A plan for 24 layers of a module `Block`, and the layers that follow it:

    plan = jaxremat.plan(Block(), x, num_layers=24, budget="12GiB", target="h100-80gb")
    layers = jaxremat.Layers(Block(), 24, plan.policy)
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxremat.answer.layer_estimate import cost_of, estimate_layer, speed_of
from jaxremat.answer.layer_problem import trace_layer
from jaxremat.chips.speed import DeviceSpeed
from jaxremat.chips.target import Target, load_target
from jaxremat.errors import DoesNotFitError, UsageError
from jaxremat.mesh.sharding import tracing_for
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.plan import NoPlan, Plan, find_plans
from jaxremat.planner.shared_budget import EqualLayers
from jaxremat.planner.steps import MOST_WHOLE, Cost, Steps
from jaxremat.policy.autoname import autoname
from jaxremat.policy.spec import NOTHING, Policy, Rule
from jaxremat.policy.stack import scan_layers
from jaxremat.policy.state import is_linen
from jaxremat.trial.budget import budget_on
from jaxremat.units import as_bytes, gib
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.refusal import attention_refusals_explained

if TYPE_CHECKING:
    import flax.linen as nn


def plan(
    layer: "nn.Module | Callable[..., Any]",
    *args: Any,
    num_layers: int,
    budget: int | str | None = None,
    target: Target | str | None = None,
    scan: bool = True,
) -> Plan:
    """What `num_layers` of a layer should save for the backward pass.

    With this plan, the gradient of the layers fits `budget` and is fastest.

    The layer needs no checkpoint names, because `autoname` gives it some. The program that is compiled is the gradient of the
    mean square of the stack's output, with respect to the layers' parameters and the stack's input. Apply the plan of a module
    with `jaxremat.Layers(layer, num_layers, plan.policy)`, and the plan of a function with
    `jaxremat.scan_layers(function, params, x, policy=plan.policy)`.

    Args:
        layer: a Flax Linen module, called as `layer(x, *broadcast)`, or a function, called as `layer(params, x, *broadcast)`.
            Each returns the next layer's x.
        *args: the arguments of one layer. A `jax.ShapeDtypeStruct` may stand for an array.
        num_layers: how often the layer is applied, one after the other.
        budget: bytes for everything that the gradient needs, as a number or as text such as `12GiB`. None takes that of the
            commands: what JAX's allocator has on the target, less the headroom that runs there have shown to be needed.
        target: the device, as for `load_target`. None takes the attached GPU, or `h100-80gb` if no GPU is attached.
        scan: whether the layers run in a scan over stacked parameters. Layers that are modules can also be unrolled.

    Raises:
        CompileError: XLA rejected the layer, or the chip's fused attention rejected what the layer itself requests of it.
        DoesNotFitError: not even the policy of the least bytes fits.
        TargetError: the target's speed isn't known.
        UsageError: arguments that make no sense, or a layer whose result can't be the next layer's input.
    """
    budget_bytes = None if budget is None else as_bytes(budget)
    _check_layer(layer, args, num_layers, scan)
    on = target if isinstance(target, Target) else load_target(target)
    if budget_bytes is None:
        budget_bytes = budget_on(on)[0].num_bytes
    shapes = jax.eval_shape(lambda *args: args, *args)
    with tracing_for(on), attention_refusals_explained(on):
        if is_linen(layer):
            stack = _module_stack(layer, shapes, num_layers, scan, speed_of(on))
        else:
            stack = _function_stack(layer, shapes, num_layers, speed_of(on))

    def compile_step(policy: Policy, loss: str, batch: int) -> Cost:
        done = lower_and_compile(stack.gradient(policy), stack.args, on, keep_dump=policy == NOTHING)
        return cost_of(done, speed_of(on), [EqualLayers(stack.estimate, num_layers)])

    most_that_fit = MOST_WHOLE if on.chip.options.speaks_early else None
    steps = Steps(lambda batch: stack.estimate, compile_step, num_layers, budget_bytes, most_that_fit=most_that_fit)
    (in_layout,) = find_plans([steps], losses=("",), batch=1)
    found = in_layout.plan
    assert found, "the only layout has a plan, or a step that doesn't fit"
    if isinstance(found, NoPlan):
        raise DoesNotFitError(
            f"no policy fits {gib(budget_bytes)}: under {found.least.policy}, the least of those compiled, it takes "
            f"{gib(found.least.cost.total_bytes)}",
            next_step="a smaller batch, or a larger budget",
        )
    return found


def _check_layer(layer: Any, args: tuple[Any, ...], num_layers: Any, scan: bool) -> None:
    """Raises UsageError for arguments of `plan` that make no sense."""
    call = "plan(Layer(), x, ...) for a module, plan(function, params, x, ...) for a function"
    if isinstance(layer, type) or not (is_linen(layer) or callable(layer)):
        got = f"the class {layer.__name__}" if isinstance(layer, type) else f"a {type(layer).__name__}"
        raise UsageError(f"plan got {got} as its layer", allowed="a Flax Linen module, or a function", next_step=call)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise UsageError(f"plan got num_layers={num_layers!r}", allowed="a whole number from 1 up")
    is_module = is_linen(layer)
    if len(args) < 1 + (not is_module):
        raise UsageError(f"plan got {len(args)} arguments of the layer", allowed="the layer's own", next_step=call)
    if not (scan or is_module):
        raise UsageError("plan got scan=False with a function", allowed="scan=False for modules", next_step="leave it out")


def _check_result(y: Any, x: Any) -> None:
    """Raises UsageError if a layer's result `y` can't be the next layer's input `x`."""
    made, given = (jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree) for tree in (y, x))
    if made != given:
        raise UsageError(
            f"the layer makes {made} of {given}",
            cause="each layer's result is the next one's input",
            next_step="give a layer whose output has its input's shape, dtype and structure",
        )


@dataclass(frozen=True)
class _Stack:
    """A stack of layers to plan.

    Attributes:
        estimate: of one layer.
        gradient: returns the gradient of the stack under a policy, as a function of `args`.
        args: the shapes of the gradient's arguments.
    """

    estimate: LayerEstimate
    gradient: Callable[[Policy], Callable[..., Any]]
    args: tuple[Any, ...]


def _module_stack(layer: "nn.Module", args: tuple[Any, ...], num_layers: int, scan: bool, speed: DeviceSpeed) -> _Stack:
    from jaxremat.policy.layers import Layers
    from jaxremat.policy.linen import module_layer

    named = autoname(type(layer))(**{name: getattr(layer, name) for name in _fields(layer)})
    key = jax.eval_shape(lambda: jax.random.key(0))
    y, _ = jax.eval_shape(lambda key, *args: layer.init_with_output({"params": key, "dropout": key}, *args), key, *args)
    _check_result(y, args[0])
    stack = Layers(layer, num_layers, Rule("none"), scan)
    variables = jax.eval_shape(lambda key, *args: stack.init({"params": key, "dropout": key}, *args), key, *args)
    others = {name: tree for name, tree in variables.items() if name != "params"}

    def gradient(policy: Policy) -> Callable[..., Any]:
        module = Layers(layer, num_layers, policy, scan)

        def loss(params: Any, x: Any, others: Any, key: Any, *broadcast: Any) -> Any:
            y, _ = module.apply({**others, "params": params}, x, *broadcast, rngs={"dropout": key}, mutable=list(others))
            return _mean_square(y)

        return jax.grad(loss, argnums=(0, 1))

    return _Stack(
        estimate=estimate_layer(trace_layer(*module_layer(named, *args)), speed, in_scan=scan and num_layers > 1),
        gradient=gradient,
        args=(variables.get("params", {}), args[0], others, key, *args[1:]),
    )


def _fields(layer: "nn.Module") -> list[str]:
    return [one.name for one in dataclasses.fields(layer) if one.init and one.name not in ("parent", "name")]


def _function_stack(function: Callable[..., Any], args: tuple[Any, ...], num_layers: int, speed: DeviceSpeed) -> _Stack:
    _check_result(jax.eval_shape(function, *args), args[1])
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_layers, *leaf.shape), leaf.dtype), args[0])

    def gradient(policy: Policy) -> Callable[..., Any]:
        def loss(params: Any, x: Any, *broadcast: Any) -> Any:
            return _mean_square(scan_layers(function, params, x, *broadcast, policy=policy))

        return jax.grad(loss, argnums=(0, 1))

    return _Stack(
        estimate=estimate_layer(trace_layer(autoname(function), args), speed, in_scan=num_layers > 1),
        gradient=gradient,
        args=(stacked, *args[1:]),
    )


def _mean_square(tree: Any) -> Any:
    return sum(jnp.mean(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))
