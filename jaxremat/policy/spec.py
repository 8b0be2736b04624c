"""Policies: frozen descriptions of what the forward pass saves for the backward pass.

A *residual* is a value that the forward pass saves for the backward pass. For each value JAX knows three decisions: save it,
recompute it, or offload it to host memory. A policy is one of six frozen dataclasses. `str()` prints a policy as the text
that `grammar.parse` reads:

    Rule("dots")                                    dots                      one rule for every value of a layer
    Names(save=("a", "b"), offload=("c",))          save:a,b+offload:c        by checkpoint name
    Every(4, inner=Rule("dots"))                    every:4+dots              groups of 4 layers, only their inputs saved
    OneIn(2)                                        one-in:2                  one layer in 2 recomputed, the others not
    Mix(((2, NOTHING), (1, Names(save=("a",)))))    2*nothing|1*save:a        2 layers by one policy, 1 by another, and again

`Rule` and `Names` have a field `attention`, printed as `+attention`: fused attention's outputs are saved too, so that its
kernel isn't run twice. The rule `none` is no wrapper at all: JAX saves whatever differentiation needs. `Own()`, printed as
`own`, is the loss as its author wrote it.

References:
    jax/_src/ad_checkpoint.py (`checkpoint_policies`); Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"
    (every:sqrt).
"""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

from jaxremat.errors import UnknownPolicyError

RuleKind = Literal["none", "everything", "nothing", "dots", "dots-no-batch"]
RULES: tuple[str, ...] = get_args(RuleKind)


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
    """Save and offload by checkpoint name; everything else is recomputed.

    Without any name it is `nothing`.

    Attributes:
        save: names of the values to save.
        offload: names of the values to move to pinned host memory.
        attention: whether fused attention's outputs are saved too.
        alias: the preset that this policy came from. It is empty where the names were typed. Typed names must exist in the
            model; names from a preset needn't.
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
        """False: a policy by names always wraps the layer."""
        return False


@dataclass(frozen=True)
class Own:
    """The loss as its author wrote it, with the author's own checkpoints, which `none` takes away.

    Where there is nothing but layers, they stay unwrapped.
    """

    attention = False

    def __str__(self) -> str:
        return "own"

    @property
    def is_none(self) -> bool:
        """True: nothing is wrapped."""
        return True


LayerPolicy: TypeAlias = Rule | Names | Own
OWN = Own()


@dataclass(frozen=True)
class Every:
    """Only the input of each group of `k` layers is saved.

    While a group is recomputed, its layers follow `inner`.
    """

    k: int | Literal["sqrt"]
    inner: LayerPolicy = Rule("none")

    def __str__(self) -> str:
        return f"every:{self.k}" + (f"+{self.inner}" if self.inner != Rule("none") else "")

    def size(self, num_layers: int) -> int:
        """Layers in each group of a model of `num_layers` layers.

        `sqrt` is rounded to the nearest whole number.

        For example, `Every("sqrt").size(12)` is 3, as the square root of 12 is 3.46.

        Raises:
            UnknownPolicyError: `k` is above the number of layers.
        """
        size = max(1, round(math.sqrt(num_layers))) if self.k == "sqrt" else self.k
        return _checked_size(self, "every", size, num_layers)


@dataclass(frozen=True)
class OneIn:
    """The first of every `k` layers is recomputed whole.

    The other `k` - 1 layers save what differentiation needs.
    """

    k: int

    def __str__(self) -> str:
        return f"one-in:{self.k}"

    def size(self, num_layers: int) -> int:
        """Layers in each group, which is `k`, checked against the number of layers.

        Raises:
            UnknownPolicyError: `k` is above the number of layers.
        """
        return _checked_size(self, "one-in", self.k, num_layers)


@dataclass(frozen=True)
class Mix:
    """Groups of layers.

    In each group the first few layers follow one policy, the next few another, and so on.

    The parts differ in names alone: no rule but `nothing`, and `attention` in all parts or in none.

    Attributes:
        parts: pairs (number of layers, their policy).

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
                    next_step=f"name what {policy.kind} saves: save:NAME,...",
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
        """Layers in each group, checked to divide `num_layers`.

        Raises:
            UnknownPolicyError: the group's size doesn't divide the number of layers.
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


Policy: TypeAlias = Rule | Names | Every | OneIn | Mix | Own
NONE = Rule("none")
NOTHING = Rule("nothing")


def _checked_size(policy: Every | OneIn, verb: str, size: int, num_layers: int) -> int:
    if size > num_layers:
        raise UnknownPolicyError(
            f"policy {str(policy)!r} asks for {size} layers, and the model has {num_layers}",
            allowed=f"K from 1 to {num_layers}",
            next_step=f"{verb}:{num_layers} takes all the layers as one group",
        )
    return size


def layer_policy(policy: Policy, layer: int = 0) -> LayerPolicy:
    """The policy for the values inside layer number `layer`, counted from 0.

    That is `inner` of every:K, and `nothing` for one-in:K, whose recomputed layers save nothing inside.
    """
    match policy:
        case Every():
            return policy.inner
        case OneIn():
            return NOTHING
        case Mix():
            return policy.layers[layer % len(policy.layers)]
        case _:
            return policy


def saves_attention(policy: Policy) -> bool:
    """Whether `policy` saves fused attention's outputs, which `+attention` in its text asks for."""
    return layer_policy(policy).attention  # in a mix, all parts have it or none


def with_attention(policy: Rule | Names | Mix) -> Policy:
    """`policy` that saves fused attention's outputs too.

    For example, `dots` becomes `dots+attention`.
    """
    if isinstance(policy, Mix):
        return Mix(tuple((count, replace(part, attention=True)) for count, part in policy.parts))
    return replace(policy, attention=True)


def keeps_inputs_alone(policy: Policy) -> bool:
    """Whether `policy` saves the inputs of layers, or of groups of layers, and no other value."""
    return policy == NOTHING or (isinstance(policy, Every) and policy.inner == NOTHING)


def describe(policy: Policy, num_layers: int) -> str:
    """What `policy` comes to in a model of `num_layers` layers, in one phrase.

    It is empty where there is nothing to add.

    For example, `every:sqrt` on 12 layers is `sqrt(12) = 3.46, rounded to 3: 4 groups of 3 layers`.
    """
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
            parts = (f"{count} {_phrase(part, 's' * (count == 1))}" for count, part in policy.parts)
            return f"groups of {policy.size(num_layers)} layers: {'; '.join(parts)}"
        case _:
            return ""


def _phrase(policy: LayerPolicy, s: str) -> str:
    lists = (("save", policy.save), ("offload", policy.offload)) if isinstance(policy, Names) else ()
    said = [f"{verb}{s} {', '.join(names)}" for verb, names in lists if names]
    return " and ".join(said) or f"recompute{s} everything"
