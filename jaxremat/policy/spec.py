"""Policies: frozen descriptions of what the forward pass keeps for the backward pass, and the grammar they are typed in.

A *residual* is a value the forward pass keeps for the backward pass. For each one JAX knows three decisions: save it,
recompute it, or offload it to host memory. A policy is one of five frozen dataclasses, each printed by `str()` as the text
it is parsed from:

    none | everything | nothing | dots | dots-no-batch     Rule    one rule for every value of a layer
    save:NAME,... and offload:NAME,...                     Names   by checkpoint name; both together with '+'
    every:K | every:sqrt | every:K+INNER                   Every   groups of K layers, only their inputs kept
    one-in:K                                               OneIn   one layer in K rematted, the others not
    N*POLICY|N*POLICY|...                                  Mix     N layers by one policy, the next N by another, and again

`Rule` and `Names` may end in `+attention`: fused attention's outputs are saved too, so that its kernel isn't run twice.
The policies of a `Mix` are `nothing`, `save:` and `offload:`, all of them with `+attention` or none.
`none` is no wrapper at all: JAX keeps whatever differentiation asks for.

References:
    jax/_src/ad_checkpoint.py (`checkpoint_policies`); Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"
    (every:sqrt); MaxText's `remat_policy` presets (the aliases).
"""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

from jaxremat.errors import UnknownPolicyError, nearest

RuleKind = Literal["none", "everything", "nothing", "dots", "dots-no-batch"]
RULES: tuple[str, ...] = get_args(RuleKind)

JAX_ALIASES = {
    "everything_saveable": "everything",
    "nothing_saveable": "nothing",
    "dots_saveable": "dots",
    "checkpoint_dots": "dots",
    "dots_with_no_batch_dims_saveable": "dots-no-batch",
    "checkpoint_dots_with_no_batch_dims": "dots-no-batch",
}

_QKV = "query_proj,key_proj,value_proj,qkv_proj"
_DOTS = f"{_QKV},out_proj,mlpwi_0,mlpwi_1,mlpwi,mlpwo"
#: MaxText's presets by name. Names that a model doesn't have are dropped from an alias (MaxText ignores them too).
MAXTEXT_ALIASES = {
    "full": "nothing",
    "minimal": f"save:{_DOTS}",
    "minimal_with_context": f"save:{_DOTS},context",
    "minimal_flash": f"save:{_DOTS},context",
    "save_dot_with_context_except_mlp": f"save:{_QKV},context,out_proj",
    "save_dot_except_mlpwi": f"save:{_QKV},out_proj,mlpwo",
    "save_dot_except_mlp": f"save:{_QKV},out_proj",
    "save_qkv_proj": f"save:{_QKV}",
    "save_out_proj": "save:out_proj",
    "qkv_proj_offloaded": "offload:query_proj,key_proj,value_proj",
    "minimal_offloaded": f"offload:{_DOTS}",
}
ALIASES = JAX_ALIASES | MAXTEXT_ALIASES
FORMS = (
    *RULES,
    "save:NAME,...",
    "offload:NAME,...",
    "every:K",
    "every:sqrt",
    "every:K+INNER",
    "one-in:K",
    "N*POLICY|N*POLICY",
)


@dataclass(frozen=True)
class Rule:
    """One rule for every value of a layer; `attention` also saves fused attention's outputs."""

    kind: RuleKind
    attention: bool = False

    def __str__(self) -> str:
        return self.kind + "+attention" * self.attention

    @property
    def is_none(self) -> bool:
        """Whether the layer stays unwrapped."""
        return self.kind == "none"


@dataclass(frozen=True)
class Names:
    """Save and offload by checkpoint name; everything else is recomputed. Without any name it is `nothing`.

    `alias` is the preset this came from (empty when the names were typed): only typed names must exist in the model.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    attention: bool = False
    alias: str = field(default="", compare=False)

    def __str__(self) -> str:
        parts = [f"{verb}:{','.join(names)}" for verb, names in (("save", self.save), ("offload", self.offload)) if names]
        return "+".join((parts or ["nothing"]) + ["attention"] * self.attention)

    @property
    def is_none(self) -> bool:
        """A named policy always wraps."""
        return False


LayerPolicy: TypeAlias = Rule | Names


@dataclass(frozen=True)
class Every:
    """Only the input of each group of `k` layers is kept; a group's layers follow `inner` while it is recomputed."""

    k: int | Literal["sqrt"]
    inner: LayerPolicy = Rule("none")

    def __str__(self) -> str:
        return f"every:{self.k}" + (f"+{self.inner}" if self.inner != Rule("none") else "")

    def size(self, num_layers: int) -> int:
        """Layers per group for `num_layers` layers; `sqrt` is rounded to the nearest whole number.

        Raises:
            UnknownPolicyError: `k` is above the number of layers.
        """
        size = max(1, round(math.sqrt(num_layers))) if self.k == "sqrt" else self.k
        return _checked_size(self, size, num_layers)


@dataclass(frozen=True)
class OneIn:
    """The first of every `k` layers is recomputed whole, the other k-1 are left as differentiation wants them."""

    k: int

    def __str__(self) -> str:
        return f"one-in:{self.k}"

    def size(self, num_layers: int) -> int:
        """`k`, checked against the number of layers.

        Raises:
            UnknownPolicyError: `k` is above the number of layers.
        """
        return _checked_size(self, self.k, num_layers)


@dataclass(frozen=True)
class Mix:
    """Groups of layers, in each of which the first few layers follow one policy, the next few another, and so on.

    `parts` are pairs (number of layers, their policy). They differ in names alone: no rule but `nothing`, and `attention`
    in all of them or in none.

    Raises:
        UnknownPolicyError: fewer than two parts, a part without layers, another rule, or `attention` in some parts only.
    """

    parts: tuple[tuple[int, LayerPolicy], ...]

    def __post_init__(self) -> None:
        got = f"policy {str(self)!r}"
        if len(self.parts) < 2:
            raise UnknownPolicyError(
                f"{got} has {len(self.parts)} part",
                allowed="two parts or more: N*POLICY|N*POLICY",
                next_step="one policy for all layers is written without a number",
            )
        for count, policy in self.parts:
            if count < 1:
                raise UnknownPolicyError(f"{got} has a part of {count} layers", allowed="1 and up", next_step="leave it out")
            if isinstance(policy, Rule) and policy.kind != "nothing":
                raise UnknownPolicyError(
                    f"{got} has a part with {str(policy)!r}",
                    allowed="nothing, save:NAME,... and offload:NAME,... as parts",
                    next_step=f"name what {policy.kind} keeps: save:NAME,...",
                )
        if len({policy.attention for _, policy in self.parts}) > 1:
            raise UnknownPolicyError(
                f"{got} says attention in some parts only",
                allowed="+attention in all parts or in none",
                cause="the parts of a mix differ in names, and fused attention's outputs have none",
                next_step="add +attention to each part, or leave it out",
            )

    def __str__(self) -> str:
        return "|".join(f"{count}*{policy}" for count, policy in self.parts)

    @property
    def layers(self) -> tuple[LayerPolicy, ...]:
        """The policy of each layer of a group."""
        return tuple(itertools.chain.from_iterable([policy] * count for count, policy in self.parts))

    def size(self, num_layers: int) -> int:
        """Layers per group, checked to divide `num_layers`.

        Raises:
            UnknownPolicyError: it doesn't.
        """
        size = len(self.layers)
        if num_layers % size:
            divisors = [str(n) for n in range(2, num_layers + 1) if num_layers % n == 0]
            raise UnknownPolicyError(
                f"policy {str(self)!r} makes groups of {size} layers, and the model has {num_layers}",
                allowed=f"groups of {', '.join(divisors)}" if divisors else "one policy for the one layer",
                cause="a remainder would have its parameters copied out of the stack",
                next_step="choose numbers that add up to one of those" if divisors else f"write {self.parts[0][1]}",
            )
        return size


Policy: TypeAlias = Rule | Names | Every | OneIn | Mix
_MIX_EXAMPLE = "2*nothing|1*save:NAME"
NONE = Rule("none")
NOTHING = Rule("nothing")


def _checked_size(policy: Every | OneIn, size: int, num_layers: int) -> int:
    if size > num_layers:
        raise UnknownPolicyError(
            f"policy {str(policy)!r} asks for {size} layers, and the model has {num_layers}",
            allowed=f"K from 1 to {num_layers}",
            next_step=f"{str(policy).partition(':')[0]}:{num_layers} takes all the layers as one group",
        )
    return size


def parse(text: str) -> Policy:
    """The policy that `text` spells, in the grammar of this module or by one of `ALIASES`.

    `str(parse(text))` is the grammar's spelling, and parses to an equal policy.

    Raises:
        UnknownPolicyError: the text is no policy; the message names the nearest ones.
    """
    if "|" in text or "*" in text.partition(":")[0]:
        return _mix(text)
    head, *rest = _terms(text)
    verb, colon, argument = head.partition(":")
    if verb == "every" and colon:
        k = "sqrt" if argument == "sqrt" else _count(argument, text, "every:4 or every:sqrt")
        return Every(k, _layer_policy(rest, text) if rest else NONE)
    if verb == "one-in" and colon:
        if rest:
            raise UnknownPolicyError(
                f"policy {text!r} gives one-in:K an inner policy, and its rematted layer always recomputes everything",
                allowed="one-in:K alone",
                next_step=f"write {head}, or every:K+{'+'.join(rest)} to recompute in groups",
            )
        return OneIn(_count(argument, text, "one-in:2"))
    return _layer_policy([head, *rest], text)


def as_policy(policy: "Policy | str") -> Policy:
    """`policy` itself, or what its text spells."""
    return parse(policy) if isinstance(policy, str) else policy


def _terms(text: str) -> list[str]:
    terms = [term.strip() for term in text.split("+")]
    if not all(terms):
        raise UnknownPolicyError(
            f"policy {text!r} has an empty part" if text.strip() else "the policy is empty",
            allowed=", ".join(FORMS),
            next_step="see --list policies",
        )
    return terms


def _mix(text: str) -> Mix:
    parts: list[tuple[int, LayerPolicy]] = []
    for part in text.split("|"):
        count, _, policy = part.partition("*")
        if not policy.strip():
            raise UnknownPolicyError(
                f"policy {text!r} has the part {part.strip()!r}",
                allowed="a number of layers and their policy in each part: N*POLICY|N*POLICY",
                next_step=f"write it like {_MIX_EXAMPLE}",
            )
        parts.append((_count(count.strip(), text, _MIX_EXAMPLE), _layer_policy(_terms(policy), text)))
    return Mix(tuple(parts))


def _count(argument: str, text: str, example: str) -> int:
    if argument.isascii() and argument.isdigit() and len(argument) < 10 and int(argument) >= 1:
        return int(argument)
    raise UnknownPolicyError(
        f"policy {text!r} needs a number of layers and got {argument!r}",
        allowed="a whole number from 1 up" + ", or sqrt" * example.endswith("sqrt"),
        next_step=f"write it like {example}",
    )


def _layer_policy(terms: list[str], text: str) -> LayerPolicy:
    attention = "attention" in terms
    terms = [term for term in terms if term != "attention"]
    if not terms:
        raise UnknownPolicyError(
            f"policy {text!r} says only 'attention', which goes with another policy",
            allowed="RULE+attention with a rule of " + ", ".join(RULES),
            next_step="nothing+attention saves fused attention's outputs and recomputes the rest",
        )
    if len(terms) == 1 and terms[0] in ALIASES:
        base = _layer_policy([ALIASES[terms[0]]], text)
        base = replace(base, alias=terms[0]) if isinstance(base, Names) else base
        return replace(base, attention=attention)
    if len(terms) == 1 and terms[0] in RULES:
        return Rule(terms[0], attention)  # pyright: ignore[reportArgumentType]
    if len(rules := [term for term in terms if term in RULES or term in ALIASES]) > 0 and len(terms) > 1:
        raise UnknownPolicyError(
            f"policy {text!r} adds {', '.join(t for t in terms if t != rules[0])!r} to {rules[0]!r}, a policy on its own",
            allowed="one rule, or save:NAME,... and offload:NAME,..., each with +attention, also as INNER of every:K",
            next_step=f"choose one of them, for example {rules[0]}",
        )
    named: dict[str, tuple[str, ...]] = {}
    for term in terms:
        verb, colon, names = term.partition(":")
        if verb not in ("save", "offload") or not colon:
            raise _unknown(term, text)
        if verb in named:
            raise UnknownPolicyError(f"policy {text!r} says {verb}: twice", next_step=f"join them: {verb}:NAME,NAME")
        named[verb] = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
        if not all(named[verb]):
            raise UnknownPolicyError(
                f"policy {text!r} has an empty name after {verb}:",
                allowed="checkpoint names joined by commas",
                next_step="see the names of a model with --list names",
            )
    save, offload = named.get("save", ()), named.get("offload", ())
    if both := sorted(set(save) & set(offload)):
        raise UnknownPolicyError(
            f"policy {text!r} both saves and offloads {', '.join(both)}",
            next_step="keep each name in one of the two lists",
        )
    return Names(save, offload, attention)


def _unknown(term: str, text: str) -> UnknownPolicyError:
    where = f"policy {text!r}" if term == text else f"policy {term!r} in {text!r}"
    if term.partition("(")[0] in ("save_only_these_names", "save_and_offload_only_these_names"):
        hint = "write JAX's name policies as save:NAME,NAME and offload:NAME,NAME"
    elif term == "auto":
        hint = "auto is planned: by the command's --policy auto, or for your own layer by jaxremat.plan"
    elif term == "custom":
        hint = "MaxText's custom is its own lists: write them as save:NAME,NAME+offload:NAME,NAME"
    elif term.partition(":")[0] in ("every", "one-in"):
        hint = f"{term.partition(':')[0]} takes a number of layers and stands first: every:4, every:4+dots, one-in:2"
    elif term in ("save", "offload"):
        hint = f"{term} takes checkpoint names: {term}:NAME,NAME"
    else:
        hint = nearest(term.partition(":")[0], (*RULES, "save", "offload", "every", "one-in", "attention", *ALIASES))
    return UnknownPolicyError(
        f"unknown {where}",
        allowed=", ".join((*FORMS, "each rule and name list with +attention")) + ", and JAX's and MaxText's own names",
        next_step=hint or "see --list policies",
    )


def layer_policy(policy: Policy, layer: int = 0) -> LayerPolicy:
    """The policy that speaks of the values inside layer number `layer`: `inner` of every:K, `nothing` for one-in:K's."""
    match policy:
        case Every():
            return policy.inner
        case OneIn():
            return NOTHING
        case Mix():
            return policy.layers[layer % len(policy.layers)]
        case _:
            return policy


def describe(policy: Policy, num_layers: int) -> str:
    """What a person should know about `policy` at this depth, in one sentence; empty when there is nothing to say."""
    match policy:
        case Every():
            size = policy.size(num_layers)
            full, rest = divmod(num_layers, size)
            rounding = f"sqrt({num_layers}) = {math.sqrt(num_layers):.2f}, rounded to {size}: " if policy.k == "sqrt" else ""
            groups = "1 group" if full == 1 else f"{full} groups"
            return f"{rounding}{groups} of {size} layers" + (f" and one of {rest}" if rest else "")
        case OneIn():
            size = policy.size(num_layers)
            return f"{-(-num_layers // size)} of {num_layers} layers rematted"
        case Mix():
            parts = (f"{count} {_kept(part, 's' * (count == 1))}" for count, part in policy.parts)
            return f"groups of {policy.size(num_layers)} layers: {'; '.join(parts)}"
        case _:
            return ""


def _kept(policy: LayerPolicy, s: str) -> str:
    lists = (("save", policy.save), ("offload", policy.offload)) if isinstance(policy, Names) else ()
    said = [f"{verb}{s} {', '.join(names)}" for verb, names in lists if names]
    return " and ".join(said) or f"recompute{s} everything"


def saves_attention(policy: Policy) -> bool:
    """Whether `policy` saves fused attention's outputs, which `+attention` in its text asks for."""
    match policy:
        case Every():
            return policy.inner.attention
        case OneIn():
            return False
        case Mix():
            return any(part.attention for _, part in policy.parts)
        case _:
            return policy.attention
