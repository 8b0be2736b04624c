"""A policy as code to paste: of JAX, Flax Linen, Flax NNX, Equinox, or MaxText's config.

    as_code("save:hidden", "linen")    Block = nn.remat(Block, policy=jax.checkpoint_policies.save_only_these_names("hidden"))

`with_policy` does the same without an edit. Checkpoint names in the code are those that the author of a layer wrote.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax

from jaxremat.errors import UsageError
from jaxremat.policy.called import Function
from jaxremat.policy.found import Kind
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.jax_private import core, is_checkpoint
from jaxremat.policy.maxtext import MAXTEXT_ALIASES, MAXTEXT_NAMES, config_lines
from jaxremat.policy.names import all_written_names
from jaxremat.policy.spec import NONE, NOTHING, OWN, Policy
from jaxremat.policy.tree import path_text

Framework = Literal["jax", "linen", "nnx", "equinox", "maxtext"]
#: By framework: what is wrapped, how, and how one of the layers is called.
_WRAPPED: dict[str, tuple[str, str, str]] = {
    "jax": ("layer", "jax.checkpoint({0}, policy={1})", "{0}(layer, x)"),
    "linen": ("Block", "nn.remat({0}, policy={1})", ""),
    "nnx": ("call", "nnx.remat({0}, policy={1})", "{0}(layer, x)"),
    "equinox": ("call", "eqx.filter_checkpoint({0}, policy={1})", "{0}(layer, x)"),
}
#: By the module that a framework's classes and functions are in: the framework.
_MODULES: dict[str, Framework] = {"flax.linen": "linen", "flax.nnx": "nnx", "equinox": "equinox"}
#: How a module is called, before it is wrapped: it has no function of its own to wrap.
_CALL = "call = lambda block, *args: block(*args)  # call(block, x) takes the place of block(x)"
_BEFORE = {"jax": "", "linen": "", "nnx": _CALL, "equinox": _CALL}


def as_code(policy: Policy | str, framework: Framework, num_layers: int = 1, *, in_scan: bool = False) -> str:
    """A policy as Python code, of a line or a few.

    The code wraps one layer: `layer(params, x)` with JAX alone, the class `Block` of Linen, and `call(block, x)`, of any
    arguments, for the modules of NNX and Equinox. A policy of several layers makes a list of these, one for each layer. With
    `every:K` the code runs all layers: `layers` are their parameters or modules, and `x` is what they are called with. For
    MaxText it is lines of its config, such as `remat_policy: custom` and `query_proj: device`.

    Args:
        policy: a `Policy` or its text.
        framework: `jax`, `linen`, `nnx`, `equinox` or `maxtext`.
        num_layers: the number of layers, for policies of several.
        in_scan: whether the layer is the body of a scan (`jax.lax.scan`, `nn.scan`). Its checkpoint then takes
            `prevent_cse=False`: XLA can't merge the recompute of a loop with its forward pass, and barriers prevent fusions. For
            a policy of several layers, `jaxremat.scan_layers` or `jaxremat.Layers` takes the scan's place.

    Returns:
        The code. For `none` and `own`, which wrap nothing, it is a comment.

    Raises:
        UnknownPolicyError: `policy` doesn't parse, or its groups don't fit the number of layers.
        UsageError: an unknown framework, a policy that MaxText's config can't say, or a policy of several layers in a scan over
            modules of NNX or Equinox, which would have to be split.
    """
    policy = as_policy(policy)
    if framework not in get_args(Framework):
        raise UsageError(f"as_code got the framework {framework!r}", allowed=", ".join(get_args(Framework)))
    if framework == "maxtext":
        return "\n".join(_maxtext_lines(policy))
    group = policy.layers(num_layers)
    if _is_stacked(policy, framework, in_scan):
        return _stacked(policy, framework, num_layers, in_scan, _WRAPPED[framework][0], "layers")
    if policy == OWN:
        return "# own: the layers are as their author wrote them"
    if all(one.is_none for one in group) and not policy.recomputes_groups:
        return f"# {policy}: no layer has a checkpoint"
    target, wrapped, called = _WRAPPED[framework]
    wrapped = wrapped.replace("policy=", "prevent_cse=False, policy=") if in_scan else wrapped
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
    policies = ["None" if one.is_none else one.expression() for one in group]
    plain = f"{target} if policy is None else " if "None" in policies else ""
    return "\n".join([*lines, *_each_its_own(policies, f"{target}s", plain + wrapped.format(target, "policy"), num_layers)])


def _is_stacked(policy: Policy, framework: Framework, in_scan: bool) -> bool:
    """Whether the code runs all layers, under a policy of several of them.

    A group of Linen's modules would be a module of its own.
    """
    return is_of_several(policy) and (in_scan or (policy.recomputes_groups and framework == "linen"))


def _stacked(policy: Policy, framework: Framework, num_layers: int, in_scan: bool, target: str, layers: str) -> str:
    """The line that runs all layers in jaxremat's own stack."""
    if framework == "linen":
        unrolled = ", scan=False" * (not in_scan)
        return f'{layers} = jaxremat.Layers({target}(...), num_layers={num_layers}, policy="{policy}"{unrolled})'
    if framework == "jax":
        return f'x = jaxremat.scan_layers({target}, params, x, policy="{policy}")'
    raise UsageError(f"a scan has one body, and {policy} is of several layers", next_step="with_policy splits the scan")


def _each_its_own(policies: Sequence[str], layers: str, wrapped: str, num_layers: int) -> tuple[str, str]:
    """The lines of layers that follow `policies` again and again.

    Neighbours of one policy are written once. For 12 layers, the first of each 6 with another policy than the other 5:

        policies = 2 * (["nothing"] + 5 * ["save:hidden"])
        layers = [jaxremat.remat(layer, policy) for policy in policies]
    """
    parts, times = list[str](), -(-num_layers // len(policies))
    runs = [(text, len([*same])) for text, same in itertools.groupby(policies)]
    for is_one, some in itertools.groupby(runs, key=lambda run: run[1] == 1):
        once, repeated = zip(*((text, f"{n} * [{text}]") for text, n in some), strict=True)
        parts += [f"[{', '.join(once)}]"] if is_one else repeated
    listed = " + ".join(parts)
    listed = listed if times == 1 else f"{times} * ({listed})" if parts[1:] else f"{times} * {listed}"
    listed = f"({listed})[:{num_layers}]" if num_layers % len(policies) else listed
    return f"policies = {listed}", f"{layers} = [{wrapped} for policy in policies]"


def _parts(policy: Policy, kinds: Sequence[Kind], written: set[str]) -> dict[Kind, Policy]:
    """The policy of each kind of layers, with the names that the values of a layer have alone.

    Empty where a layer isn't one module, or where layers of a kind have no name in common for a value.
    """
    names, parts = [kind.names_alone() for kind in kinds], dict[Kind, Policy]()
    if not set().union(*names).issuperset(policy.names()):
        return {}
    for kind, alone in zip(kinds, names, strict=True):
        own = {name: alone[name] for name in policy.names() if name in alone}
        if not all(own.values()) or not (kind.module or kind.called() or written.issuperset(own)):
            return {}
        parts[kind] = policy.map_layers(lambda of_layer, own=own: of_layer.renamed(own))
    return parts


def _named_lines(framework: Framework, parts: Mapping[Kind, Policy]) -> list[str]:
    """The policies of kinds of layers as code in which jaxremat names the values."""
    lines, taken = list[str](), set[str]()
    for name, same in _wrapped(parts):
        if name in taken:
            return []
        target = _target(framework, name, same[0].module if len(parts) > 1 else "", taken)
        code = _named_code(parts[same[0]], framework, same[0], target).splitlines()
        comment = f"  # {'; '.join(kind.label for kind in same)}" if len(same) < len(parts) else ""
        lines += [f"{line}{comment}" for line in code]
    return lines


def _lines_of_several(framework: Framework, parts: Mapping[Kind, Policy]) -> list[str]:
    """Policies of several layers as code, for several kinds of layers or for scans.

    Names are those of lists, and each kind has a list of its own.
    """
    lines, taken = list[str](), set[str]()
    for kind, policy in parts.items():
        function, num_layers = kind.called(), kind.num_layers
        target = function.name if function else _target(framework, "", kind.module if len(parts) > 1 else "", set())
        is_stacked = _is_stacked(policy, framework, kind.in_scan)
        shown = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", target).lower() if is_stacked else target
        layers = f"{shown.removesuffix('s')}s"
        layers += f"_{len(taken) + 1}" * (layers in taken)
        taken.add(layers)
        if is_stacked:
            code = [_stacked(policy, framework, num_layers, kind.in_scan, target, layers)]
        elif policy.recomputes_groups:
            code = as_code(policy, framework, num_layers).splitlines()
        else:
            policies = [f'"{one}"' for one in policy.layers(num_layers)]
            code = _each_its_own(policies, layers, f"jaxremat.remat({target}, policy)", num_layers)
        lines += [f"# {kind.label}:", *code] if len(parts) > 1 else code
    return lines


def _why_no_lines(policy: Policy, framework: Framework, kinds: Sequence[Kind], unwritten: Sequence[str]) -> str:
    """Why a policy of several layers has no code for these layers. Empty where it has."""
    if not all(kind.is_stack for kind in kinds if not kind.in_scan):
        return f"layers of several kinds follow one another, and {policy} counts them together"
    if framework in ("nnx", "equinox") and any(kind.in_scan for kind in kinds):
        return f"a scan has one body for all its layers, and {policy} is of several"
    if not all(kind.is_stack for kind in kinds):
        return f"the scan does more than run layers over their parameters, and {policy} is of several"
    in_groups = policy.recomputes_groups and framework != "linen" and not all(kind.in_scan for kind in kinds)
    return f"{policy} wraps groups of layers, and nobody named {', '.join(unwritten)}" if in_groups and unwritten else ""


def _wrapped(parts: Mapping[Kind, Policy]) -> Iterator[tuple[str, list[Kind]]]:
    """The name of each class or function to wrap, with its kinds of layers.

    The name is empty where it isn't known. Kinds that are calls of one function have one line, where they have one policy. Else
    each module has a line of its own. The name comes twice where layers that aren't modules would need that.

    Args:
        parts: the policy of each kind.
    """
    by_function = dict[Function | Kind, list[Kind]]()
    for kind in parts:
        by_function.setdefault(kind.called() or kind, []).append(kind)
    for function, same in by_function.items():
        name = function.name if isinstance(function, Function) else ""
        if len({(parts[kind], kind.in_scan) for kind in same}) == 1:
            yield name, same
        else:
            yield from (("" if all(one.module for one in same) else name, [kind]) for kind in same)


def _target(framework: Framework, called: str, module: str, taken: set[str]) -> str:
    """What layers are called in code, after their class, function or module, such as `Encoder`.

    `Block` or `layer` stands for one that isn't known. The name is added to `taken`.
    """
    if called:
        taken.add(called)
        return called
    name = re.sub(r"\W", "_", module) or ("layer" if framework == "jax" else "Block")
    name = f"layer_{name}" if name[0].isdigit() else name
    name = name if framework == "jax" else name[0].upper() + name[1:]
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _named_code(policy: Policy, framework: Framework, kind: Kind, target: str) -> str:
    """A policy as code in which jaxremat names the values of a layer of one kind."""
    num_layers, more = kind.num_layers, ", in_scan=True" * kind.in_scan
    if policy.recomputes_groups:
        return as_code(policy, framework, num_layers) if framework == "linen" else ""
    texts = [f'"{one}"' for one in policy.layers(num_layers)]
    if len(texts) == 1:
        return f"{target} = jaxremat.remat({target}, {texts[0]}{more})"
    wrapped = f"jaxremat.remat({target}, policy{more})"
    return "\n".join(_each_its_own(texts, f"{target}s", wrapped, num_layers))


def is_of_several(policy: Policy) -> bool:
    """Whether a policy says something of several layers together, and not the same of each."""
    return policy.recomputes_groups or len(policy.layer_policies) > 1


def _maxtext_lines(policy: Policy) -> tuple[str, ...]:
    lines = config_lines(policy, dict.fromkeys(sorted(MAXTEXT_NAMES), "remat"))
    if lines is None:
        raise UsageError(
            f"MaxText's config can't say the policy {policy}",
            allowed=f"nothing, {', '.join(MAXTEXT_ALIASES)}, or save: and offload: with {', '.join(sorted(MAXTEXT_NAMES))}",
            next_step="save:query_proj,out_proj",
        )
    return lines


def code_for(policy: Policy, kinds: Sequence[Kind], function: Callable[..., Any], *args: Any) -> tuple[str, ...]:
    """The lines of `as_code` for a loss, in the framework that its author wrote it with.

    The framework is that of the classes in the first argument's tree, or else of the first operation that one of its modules
    traces, or else `jax`. Of a policy of several layers, each kind of layers has lines of its own. Where a framework has none, as
    for a scan over modules of NNX, which would have to be split, a comment says so.

    The framework knows no names that the author didn't write. `jaxremat.remat` gives them to the values of a whole module, or of
    a class or function of which each layer is one call (`called.py`). It is a line for each kind of layers, with the names that
    one has by itself. Nobody knows where other layers begin in the author's code, so a comment says which values the author has
    to name. For `none` a comment says which checkpoint of the author's to take away, or that there is none.

    For a loss of Flax NNX and the policy `dots`:

        call = lambda block, *args: block(*args)  # call(block, x) takes the place of block(x)
        call = nnx.remat(call, policy=jax.checkpoint_policies.dots_saveable)

    Args:
        policy: the policy.
        kinds: the layers that were found in the loss.
        function: the loss, without a policy.
        *args: its arguments, arrays or shapes.
    """
    num_layers, in_scan = kinds[0].num_layers if kinds else 1, bool(kinds) and all(kind.in_scan for kind in kinds)
    program = jax.make_jaxpr(function)(*args)
    written = {*all_written_names(program.eqns)}
    unwritten = [name for name in dict.fromkeys(policy.names()) if name not in written]
    classes = (base.__module__ for node in _nodes(jax.tree.structure(args[0])) for base in node.__mro__)
    files = (frame.file_name.replace("/", ".") for eqn in _equations(program.jaxpr) for frame in _frames(eqn))
    places = (f".{place}." for place in itertools.chain(classes, files))
    modules = (module for place in places for module in _MODULES if f".{module}." in place)
    framework = _MODULES.get(next(modules, ""), "jax")
    replaced = _replaced(kinds, program, args[0], is_none=policy == NONE)
    if policy == NONE:
        return tuple(replaced)
    is_of_many = is_of_several(policy) and (bool(kinds[1:]) or in_scan)
    if is_of_many and (why := _why_no_lines(policy, framework, kinds, unwritten)):
        return (f"# There is no such code: {why}. The line with with_policy is the code to paste.",)
    if not unwritten and not is_of_many:
        return *replaced, *as_code(policy, framework, num_layers, in_scan=in_scan).splitlines()
    by_name = f"# {_WRAPPED[framework][1].partition('(')[0]} saves by name what jax.ad_checkpoint.checkpoint_name named, and"
    parts = _parts(policy, kinds, written)
    if lines := (_lines_of_several if is_of_many else _named_lines)(framework, parts):
        return *([f"{by_name} jaxremat names each value:"] if unwritten else ()), *replaced, *lines
    return (
        f"{by_name} nobody named {', '.join(unwritten)}.",
        "# Name them where they are made (jaxremat run --list names has the lines), and ask again for the policy.",
    )


def _replaced(kinds: Sequence[Kind], program: Any, params: Any, *, is_none: bool) -> list[str]:
    """The comments before code that takes the place of the author's checkpoints.

    Flax names a module without a name after its checkpoint, and its parameters after the module.

    Args:
        kinds: the layers.
        program: the loss as a program.
        params: the parameters.
        is_none: whether the policy is `none`. The comments then say what takes the checkpoints away.
    """
    if places := dict.fromkeys(kind.checkpoint for kind in kinds if kind.checkpoint):
        paths = (path_text(path) for path, _ in jax.tree.leaves_with_path(params))
        renamed = next((name for path in paths for name in re.findall(r"\bCheckpoint(\w+_\d+)\b", path)), "")
        moved = [f"# (It names parameters: those of Checkpoint{renamed} are then those of {renamed}.)"] * bool(renamed)
        of_author = f"the author's checkpoint, which is called at {' and '.join(places)}"
        return [f"# Without {of_author}.", *moved] if is_none else [*moved, f"# In place of {of_author}:"]
    has_checkpoints = any(map(is_checkpoint, _equations(program.jaxpr)))
    if is_none:
        return ["# No checkpoint around a layer." if has_checkpoints else "# No change: it has no checkpoints."]
    return ["# In place of the model's own checkpoints:"] * has_checkpoints


def _nodes(tree: Any) -> Iterator[type]:
    """The classes of a tree's nodes."""
    if data := tree.node_data():
        yield data[0]
    for child in tree.children():
        yield from _nodes(child)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _equations(inner)


def _frames(eqn: Any) -> tuple[Any, ...]:
    return tuple(eqn.source_info.traceback.frames) if eqn.source_info.traceback else ()
