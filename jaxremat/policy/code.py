"""A policy as code to paste into a model: with JAX alone, Flax Linen, Flax NNX or Equinox.

    as_code("save:hidden", "linen")    Block = nn.remat(Block, policy=jax.checkpoint_policies.save_only_these_names("hidden"))

`with_policy` does the same without an edit. Checkpoint names in the code are those that the author of a layer wrote.
"""

from typing import Literal, get_args

from jaxremat.errors import UsageError
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.spec import NOTHING, Policy

Framework = Literal["jax", "linen", "nnx", "equinox"]
#: By framework: what is wrapped, how, and how one of the layers is called.
_WRAPPED: dict[Framework, tuple[str, str, str]] = {
    "jax": ("layer", "jax.checkpoint({0}, policy={1})", "{0}(layer, x)"),
    "linen": ("Block", "nn.remat({0}, policy={1})", ""),
    "nnx": ("call", "nnx.remat({0}, policy={1})", "{0}(layer, x)"),
    "equinox": ("call", "eqx.filter_checkpoint({0}, policy={1})", "{0}(layer, x)"),
}
_BEFORE = {"jax": "", "linen": "", **dict.fromkeys(("nnx", "equinox"), "call = lambda block, x: block(x)")}


def as_code(policy: Policy | str, framework: Framework, num_layers: int = 1) -> str:
    """A policy as Python code, of a line or a few.

    The code wraps one layer: `layer(params, x)` with JAX alone, the class `Block` of Linen, and `call(block, x)` for the
    modules of NNX and Equinox. A policy of several layers makes a list of these, one for each layer. With `every:K` the code
    runs all layers: `layers` are their parameters or modules, and `x` is what they are called with.

    Args:
        policy: a `Policy` or its text.
        framework: `jax`, `linen`, `nnx` or `equinox`.
        num_layers: the number of layers, for policies of several.

    Returns:
        The code. Empty for `none` and `own`, which wrap nothing.

    Raises:
        UnknownPolicyError: `policy` doesn't parse, or its groups don't fit the number of layers.
        UsageError: an unknown framework.
    """
    policy = as_policy(policy)
    if framework not in _WRAPPED:
        raise UsageError(f"as_code got the framework {framework!r}", allowed=", ".join(get_args(Framework)))
    group = policy.layers(num_layers)
    if all(one.is_none for one in group) and not policy.recomputes_groups:
        return ""
    if policy.recomputes_groups and framework == "linen":  # a group of Linen's modules would be a module of its own
        return f'layers = jaxremat.Layers(Block(...), num_layers={num_layers}, policy="{policy}")'
    target, wrapped, called = _WRAPPED[framework]
    lines = [_BEFORE[framework]] if _BEFORE[framework] else []
    if policy.recomputes_groups:
        one = target if group[0].is_none else wrapped.format(target, group[0].expression())
        loop = f"functools.reduce(lambda x, layer: {called.format('one')}, layers, x)"
        return "\n".join(
            [
                *lines,
                f"one = {one}",
                f"group = {wrapped.format(f'lambda layers, x: {loop}', NOTHING.expression())}",
                f"for start in range(0, {num_layers}, {len(group)}):",
                f"    x = group(layers[start : start + {len(group)}], x)",
            ]
        )
    if len(group) == 1:
        return "\n".join([*lines, f"{target} = {wrapped.format(target, group[0].expression())}"])
    listed = ", ".join("None" if one.is_none else one.expression() for one in group)
    each = f"{target} if policies[i % {len(group)}] is None else {wrapped.format(target, f'policies[i % {len(group)}]')}"
    return "\n".join([*lines, f"policies = ({listed})", f"{target}s = [{each} for i in range({num_layers})]"])
