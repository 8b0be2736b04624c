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

Each class says all there is to know of its policies: how they are typed, which policy each layer follows, and which checkpoint
names they list. `stack.py` and `with_policy.py` run layers by these answers.

References:
    jax/_src/ad_checkpoint.py (`checkpoint_policies`); Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"
    (every:sqrt).
"""

import functools
import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, get_args

from jaxremat.errors import UnknownPolicyError, nearest
from jaxremat.policy.maxtext import CONTEXT, MLPWI_0, MLPWO, QUERY_PROJ


@dataclass(frozen=True)
class Form:
    """One form of the grammar.

    Attributes:
        pattern: the form as it is typed; words in capitals stand for what the user fills in.
        keeps: what a layer saves under such a policy, in one phrase.
        example: a policy of this form.
    """

    pattern: str
    keeps: str
    example: str


class Policy(ABC):
    """What the layers of a model save for the backward pass.

    It is the base of all policies, which are frozen dataclasses. `str(policy)` is its text.

    A new policy for several layers is a class with `forms`, `read`, `__str__`, `layer_policies` and `layers`, and stands in
    `grammar.POLICIES`.

    Attributes:
        forms: its rows in the table of the grammar.
        recomputes_groups: whether only the input of each group of layers is saved. The layers of a group then follow one policy
            while the group is recomputed.
    """

    forms: ClassVar[tuple[Form, ...]] = ()
    recomputes_groups: ClassVar[bool] = False

    @classmethod
    def read(cls, text: str, layer: Callable[[str], "LayerPolicy"]) -> Self | None:
        """The policy that `text` spells, or None if it has none of the class's forms.

        `layer` reads the text of a layer's policy. Policies of one layer are read by the grammar itself.
        """
        return None

    @property
    @abstractmethod
    def layer_policies(self) -> tuple["LayerPolicy", ...]:
        """The policies that layers follow."""

    @abstractmethod
    def layers(self, num_layers: int) -> tuple["LayerPolicy", ...]:
        """The policy of each layer in a group of layers. The layers after these are the next group.

        Raises:
            UnknownPolicyError: a model of `num_layers` layers can't follow the policy.
        """

    def size(self, num_layers: int) -> int:
        """Layers in each group of a model of `num_layers` layers.

        For example, `Every("sqrt").size(12)` is 3, as the square root of 12 is 3.46.

        Raises:
            UnknownPolicyError: a model of `num_layers` layers can't follow the policy.
        """
        return len(self.layers(num_layers))

    def map_layers(self, change: Callable[["LayerPolicy"], "LayerPolicy"]) -> "Policy":
        """The policy with `change(policy)` in place of each layer policy that the user chose."""
        return self

    def with_attention(self) -> "Policy | None":
        """The policy that saves fused attention's outputs too.

        None where the form has no `+attention` of its own.
        """
        return None

    def describe(self, num_layers: int) -> str:
        """What the policy comes to in a model of `num_layers` layers, in one phrase.

        Empty where there is nothing to add.
        """
        return ""

    def names(self, typed: bool = False) -> tuple[str, ...]:
        """The checkpoint names that it saves or offloads in some layer.

        With `typed`, those of presets are left out.
        """
        chosen = [policy for policy in self.layer_policies if not (typed and policy.alias)]
        return tuple(dict.fromkeys(name for policy in chosen for name in (*policy.save, *policy.offload)))

    @property
    def offloads(self) -> bool:
        """Whether it offloads a value of some layer."""
        return any(policy.offload for policy in self.layer_policies)

    @property
    def saves_attention(self) -> bool:
        """Whether it saves fused attention's outputs, as `+attention` says."""
        return any(policy.attention for policy in self.layer_policies)

    @property
    def saves_inputs_alone(self) -> bool:
        """Whether it saves the inputs of layers, or of groups of layers, and no other value."""
        return all(policy == NOTHING for policy in self.layer_policies)


class LayerPolicy(Policy):
    """A policy for one layer, which each layer follows.

    Attributes:
        save: names of the values to save.
        offload: names of the values to move to pinned host memory.
        attention: whether fused attention's outputs are saved too.
        alias: the preset that it came from, or empty.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    attention: bool = False
    alias: str = ""

    @property
    def layer_policies(self) -> tuple["LayerPolicy", ...]:
        """The policy itself."""
        return (self,)

    def layers(self, num_layers: int) -> tuple["LayerPolicy", ...]:
        """The policy itself."""
        return (self,)

    def map_layers(self, change: Callable[["LayerPolicy"], "LayerPolicy"]) -> "LayerPolicy":
        """The changed policy."""
        return change(self)

    def with_attention(self) -> "LayerPolicy":
        """For example, `dots+attention` of `dots`."""
        return replace(self, attention=True)  # pyright: ignore[reportArgumentType]: its classes are dataclasses

    @property
    def is_none(self) -> bool:
        """Whether the layer stays unwrapped."""
        return False

    @property
    def by_names(self) -> bool:
        """Whether it saves values by their checkpoint names alone, or none.

        Fused attention's outputs don't count.
        """
        return False

    def only(self, names: Container[str]) -> "LayerPolicy":
        """The policy without the names that aren't among `names`."""
        return self

    def renamed(self, names: Mapping[str, str]) -> "LayerPolicy":
        """The policy with other names: those of `names`, and without the ones that aren't in it."""
        return self

    def to_jax(self) -> "JaxPolicy":
        """The callable for `jax.checkpoint(policy=...)` and `nn.remat(policy=...)`.

        The policy isn't `none`, which is no wrapper and needs no callable.
        """
        assert not self.is_none, "none is no wrapper: apply.py never asks for its callable"
        return JaxPolicy(self)

    @abstractmethod
    def jax_callable(self) -> Callable[..., Any]:
        """The policy of `jax.checkpoint_policies`, without `attention`."""

    def expression(self) -> str:
        """The callable as Python, such as `jax.checkpoint_policies.dots_saveable`.

        JAX has no rule for fused attention's outputs.
        """
        return f'jaxremat.parse("{self}").to_jax()' if self.attention else f"jax.checkpoint_policies.{self.jax_text()}"

    @abstractmethod
    def jax_text(self) -> str:
        """What `jax_callable` is called in `jax.checkpoint_policies`, with its arguments."""


RuleKind = Literal["none", "everything", "nothing", "dots", "dots-no-batch"]
RULES: tuple[str, ...] = get_args(RuleKind)
#: The rules by JAX's names for them, in `jax.checkpoint_policies`.
JAX_RULES = {
    "everything": "everything_saveable",
    "nothing": "nothing_saveable",
    "dots": "dots_saveable",
    "dots-no-batch": "dots_with_no_batch_dims_saveable",
}


@dataclass(frozen=True)
class Rule(LayerPolicy):
    """One rule for every value of a layer; `attention` also saves fused attention's outputs."""

    kind: RuleKind
    attention: bool = False

    forms = (
        Form("none", "no wrapper: differentiation decides what is saved", "none"),
        Form("everything", "checkpointed, and every value saved", "everything"),
        Form("nothing", "only each layer's input; the layer is recomputed", "nothing"),
        Form("dots", "the results of matmuls", "dots"),
        Form("dots-no-batch", "the results of matmuls without batch dimensions", "dots-no-batch"),
    )

    def __post_init__(self) -> None:
        if self.kind not in RULES:
            close = nearest(str(self.kind), RULES)
            raise UnknownPolicyError(f"Rule got {self.kind!r}", allowed=", ".join(RULES), next_step=close or 'Rule("dots")')

    def __str__(self) -> str:
        return self.kind + "+attention" * self.attention

    @property
    def is_none(self) -> bool:
        """Whether the rule is `none`."""
        return self.kind == "none"

    @property
    def by_names(self) -> bool:
        """Whether the rule is `nothing`."""
        return self.kind == "nothing"

    def jax_callable(self) -> Callable[..., Any]:
        """JAX's own rule."""
        from jax import checkpoint_policies

        return getattr(checkpoint_policies, self.jax_text())

    def jax_text(self) -> str:
        """JAX's own rule."""
        return JAX_RULES[self.kind]


@dataclass(frozen=True)
class Names(LayerPolicy):
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

    forms = (
        Form("save:NAME,...", "the tensors with these checkpoint names", f"save:{QUERY_PROJ},{MLPWO}"),
        Form(
            "offload:NAME,...",
            "the same, saved in pinned host memory; joins save: with +",
            f"save:{QUERY_PROJ}+offload:{MLPWI_0}",
        ),
    )

    def __str__(self) -> str:
        parts = [f"{verb}:{','.join(names)}" for verb, names in (("save", self.save), ("offload", self.offload)) if names]
        return "+".join((parts or ["nothing"]) + ["attention"] * self.attention)

    @property
    def by_names(self) -> bool:
        """True."""
        return True

    def only(self, names: Container[str]) -> "Names":
        """The policy without the names that aren't among `names`."""
        return self.renamed({name: name for name in self.names() if name in names})

    def renamed(self, names: Mapping[str, str]) -> "Names":
        """The policy with other names: those of `names`, and without the ones that aren't in it."""
        listed = ([names[name] for name in some if name in names] for some in (self.save, self.offload))
        save, offload = (tuple(dict.fromkeys(some)) for some in listed)
        return replace(self, save=save, offload=offload)

    def jax_callable(self) -> Callable[..., Any]:
        """JAX's own policy by names."""
        from jax import checkpoint_policies

        return checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=self.save,
            names_which_can_be_offloaded=self.offload,
            offload_src="device",
            offload_dst="pinned_host",
        )

    def jax_text(self) -> str:
        """JAX's own policy by names, the shortest that says the same."""
        saved, offloaded = (", ".join(f'"{name}"' for name in names) for names in (self.save, self.offload))
        if not offloaded:
            return f"save_only_these_names({saved})" if saved else JAX_RULES["nothing"]
        return (
            f"save_and_offload_only_these_names(names_which_can_be_saved=[{saved}], "
            f'names_which_can_be_offloaded=[{offloaded}], offload_src="device", offload_dst="pinned_host")'
        )


NONE = Rule("none")
NOTHING = Rule("nothing")


@dataclass(frozen=True)
class Own(Policy):
    """The loss as its author wrote it, with the author's own checkpoints.

    `none` takes these away. Where there is nothing but layers, they stay unwrapped.
    """

    forms = (Form("own", "the loss as its author wrote it, with the author's own checkpoints", "own"),)

    @classmethod
    def read(cls, text: str, layer: Callable[[str], LayerPolicy]) -> Self | None:
        """`own`."""
        return cls() if text.strip() == "own" else None

    def __str__(self) -> str:
        return "own"

    @property
    def layer_policies(self) -> tuple[LayerPolicy, ...]:
        """`none`."""
        return (NONE,)

    def layers(self, num_layers: int) -> tuple[LayerPolicy, ...]:
        """`none`."""
        return (NONE,)


OWN = Own()
#: The policies that say nothing of layers. They compile a whole step, or a model without layers, as it is.
WITHOUT_LAYERS = (NONE, OWN)


@dataclass(frozen=True)
class JaxPolicy:
    """A `LayerPolicy` as the function that `jax.checkpoint` calls for each operation.

    Equal policies are equal callables with equal hashes, so that JAX's caches work across traces. Closures wouldn't be.
    """

    policy: LayerPolicy

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        """The answer as JAX's policies give it: a bool, or `Offloadable` for pinned host memory.

        Complex values are recomputed under every policy.
        """
        from jaxremat.policy.jax_private import is_fused_attention, is_recompute_decision, makes_complex

        if makes_complex(primitive, avals, params):
            return False
        decision = _of_jax(self.policy)(primitive, *avals, **params)
        attends = self.policy.attention and is_fused_attention(primitive, params)
        return True if attends and is_recompute_decision(decision) else decision


@functools.cache
def _of_jax(policy: LayerPolicy) -> Callable[..., Any]:
    return policy.jax_callable()


@dataclass(frozen=True)
class Every(Policy):
    """Only the input of each group of `k` layers is saved.

    While a group is recomputed, its layers follow `inner`.
    """

    k: int | Literal["sqrt"]
    inner: LayerPolicy = NONE

    forms = (
        Form("every:K", "only the input of each group of K layers", "every:4"),
        Form("every:sqrt", "every:K with K the rounded root of the layers", "every:sqrt"),
        Form("every:K+INNER", "the same, with a policy for the layers while a group is recomputed", "every:4+dots"),
    )
    recomputes_groups = True

    def __post_init__(self) -> None:
        if self.k != "sqrt":
            _check_size(self.k, "Every", 'Every(4), or Every("sqrt")')
        if not isinstance(self.inner, LayerPolicy):
            raise UnknownPolicyError(f"Every got {self.inner!r} as inner", allowed="a policy", next_step='Rule("dots")')

    @classmethod
    def read(cls, text: str, layer: Callable[[str], LayerPolicy]) -> Self | None:
        """`every:K` or `every:K+INNER`, where K is a number or `sqrt`."""
        if (found := read_word("every", text)) is None:
            return None
        k, inner = found
        size = "sqrt" if k == "sqrt" else read_count(k, text, "every:4 or every:sqrt")
        return cls(size, NONE if inner is None else layer(inner))

    def __str__(self) -> str:
        return f"every:{self.k}" + (f"+{self.inner}" if self.inner != NONE else "")

    @property
    def layer_policies(self) -> tuple[LayerPolicy, ...]:
        """`inner`."""
        return (self.inner,)

    def layers(self, num_layers: int) -> tuple[LayerPolicy, ...]:
        """`inner` for each layer of a group. `sqrt` is rounded to the nearest whole number."""
        size = max(1, round(math.sqrt(num_layers))) if self.k == "sqrt" else self.k
        return (self.inner,) * _checked_size(self, size, num_layers)

    def map_layers(self, change: Callable[[LayerPolicy], LayerPolicy]) -> "Every":
        """The policy with another `inner`."""
        return replace(self, inner=change(self.inner))

    def describe(self, num_layers: int) -> str:
        """For example, `sqrt(12) = 3.46, rounded to 3: 4 groups of 3 layers` of `every:sqrt`."""
        size = self.size(num_layers)
        full, rest = divmod(num_layers, size)
        rounding = f"sqrt({num_layers}) = {math.sqrt(num_layers):.2f}, rounded to {size}: " if self.k == "sqrt" else ""
        groups = "1 group" if full == 1 else f"{full} groups"
        return f"{rounding}{groups} of {size} layers" + (f" and one of {rest}" if rest else "")


@dataclass(frozen=True)
class OneIn(Policy):
    """The first of every `k` layers is recomputed whole.

    The other `k` - 1 layers save what differentiation needs.
    """

    k: int

    def __post_init__(self) -> None:
        _check_size(self.k, "OneIn", "OneIn(2)")

    forms = (Form("one-in:K", "the first of every K layers recomputed, the others left as they are", "one-in:2"),)

    @classmethod
    def read(cls, text: str, layer: Callable[[str], LayerPolicy]) -> Self | None:
        """`one-in:K`."""
        if (found := read_word("one-in", text)) is None:
            return None
        k, inner = found
        if inner is not None:
            raise UnknownPolicyError(
                f"policy {text!r} gives one-in:K an inner policy, and its rematted layer always recomputes everything",
                allowed="one-in:K alone",
                next_step=f"write one-in:{k}, or every:K+{inner} to recompute in groups",
            )
        return cls(read_count(k, text, "one-in:2"))

    def __str__(self) -> str:
        return f"one-in:{self.k}"

    @property
    def layer_policies(self) -> tuple[LayerPolicy, ...]:
        """`nothing` and `none`."""
        return (NOTHING, NONE)

    def layers(self, num_layers: int) -> tuple[LayerPolicy, ...]:
        """`nothing` for the first layer of a group, and `none` for the others."""
        return (NOTHING, *(_checked_size(self, self.k, num_layers) - 1) * (NONE,))

    def describe(self, num_layers: int) -> str:
        """For example, `6 of 12 layers rematted` of `one-in:2`."""
        return f"{-(-num_layers // self.size(num_layers))} of {num_layers} layers rematted"


@dataclass(frozen=True)
class Mix(Policy):
    """Groups of layers.

    In each group the first few layers follow one policy, the next few another, and so on.

    The parts differ in names alone: no rule but `nothing`, and `attention` in all parts or in none.

    Attributes:
        parts: pairs (number of layers, their policy).

    Raises:
        UnknownPolicyError: fewer than two parts, a part without layers, another rule, or `attention` in some parts only.
    """

    parts: tuple[tuple[int, LayerPolicy], ...]

    forms = (
        Form(
            "N*POLICY|N*POLICY",
            "N layers by one policy, the next N by another, and again; of names, in quotes",
            f"2*nothing|1*save:{CONTEXT}",
        ),
    )

    @classmethod
    def read(cls, text: str, layer: Callable[[str], LayerPolicy]) -> Self | None:
        """`N*POLICY|N*POLICY`."""
        if "|" not in text and "*" not in text.partition(":")[0]:
            return None
        parts: list[tuple[int, LayerPolicy]] = []
        for part in text.split("|"):
            count, _, policy = part.partition("*")
            if not policy.strip():
                raise UnknownPolicyError(
                    f"policy {text!r} has the part {part.strip()!r}",
                    allowed="a number of layers and their policy in each part: N*POLICY|N*POLICY",
                    next_step=f"write it like {_MIX_EXAMPLE}",
                )
            parts.append((read_count(count.strip(), text, _MIX_EXAMPLE), layer(policy)))
        return cls(tuple(parts))

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
            if not policy.by_names:
                raise UnknownPolicyError(
                    f"{got} has a part with {str(policy)!r}",
                    allowed="nothing, save:NAME,... and offload:NAME,... as parts",
                    next_step=f"name what {policy} saves: save:NAME,...",
                )
        if len({policy.attention for policy in self.layer_policies}) > 1:
            raise UnknownPolicyError(
                f"{got} says attention in some parts only",
                allowed="+attention in all parts or in none",
                cause="the parts of a mix differ in names, and fused attention's outputs have none",
                next_step="add +attention to each part, or leave it out",
            )

    def __str__(self) -> str:
        return "|".join(f"{count}*{policy}" for count, policy in self.parts)

    @property
    def layer_policies(self) -> tuple[LayerPolicy, ...]:
        """The policy of each part."""
        return tuple(policy for _, policy in self.parts)

    def layers(self, num_layers: int) -> tuple[LayerPolicy, ...]:
        """The policy of each part as often as the part has layers.

        The group's size divides the number of layers.
        """
        group = tuple(itertools.chain.from_iterable([policy] * count for count, policy in self.parts))
        if num_layers % len(group):
            divisors = [str(n) for n in range(2, num_layers + 1) if num_layers % n == 0]
            raise UnknownPolicyError(
                f"policy {str(self)!r} makes groups of {len(group)} layers, and the model has {num_layers}",
                allowed=f"groups of {', '.join(divisors)}" if divisors else "one policy for the one layer",
                cause="a remainder would have its parameters copied out of the stack",
                next_step="choose numbers that add up to one of those" if divisors else f"write {self.parts[0][1]}",
            )
        return group

    def map_layers(self, change: Callable[[LayerPolicy], LayerPolicy]) -> "Mix":
        """The policy with other parts of the same numbers of layers."""
        return Mix(tuple((count, change(policy)) for count, policy in self.parts))

    def with_attention(self) -> "Mix":
        """The policy with `+attention` in each part."""
        return self.map_layers(LayerPolicy.with_attention)

    def describe(self, num_layers: int) -> str:
        """For example, `groups of 3 layers: 2 recompute everything; 1 saves a`."""
        parts = (f"{count} {_phrase(policy, 's' * (count == 1))}" for count, policy in self.parts)
        return f"groups of {self.size(num_layers)} layers: {'; '.join(parts)}"


_MIX_EXAMPLE = "2*nothing|1*save:NAME"


def _phrase(policy: LayerPolicy, s: str) -> str:
    said = [f"{verb}{s} {', '.join(names)}" for verb, names in (("save", policy.save), ("offload", policy.offload)) if names]
    return " and ".join(said) or f"recompute{s} everything"


def _check_size(k: Any, name: str, example: str) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise UnknownPolicyError(f"{name} got {k!r}", allowed="a number of layers, from 1", next_step=example)


def _checked_size(policy: Policy, size: int, num_layers: int) -> int:
    if size > num_layers:
        raise UnknownPolicyError(
            f"policy {str(policy)!r} asks for {size} layers, and the model has {num_layers}",
            allowed=f"K from 1 to {num_layers}",
            next_step=f"{str(policy).partition(':')[0]}:{num_layers} takes all the layers as one group",
        )
    return size


def read_word(word: str, text: str) -> tuple[str, str | None] | None:
    """What `text` says after `word:`, and the text of its inner policy.

    None where `text` begins with something else. For the word `every`, it is `("4", "dots")` of `every:4+dots`, and `("4", None)`
    of `every:4`.
    """
    found = re.fullmatch(rf"\s*{word}:([^+|]*)(?:\+([^|]*))?", text)
    return (found[1].strip(), found[2]) if found else None


def read_count(argument: str, text: str, example: str) -> int:
    """The number of layers that `argument`, a part of the policy `text`, spells.

    Raises:
        UnknownPolicyError: it is no number from 1 up. The error shows `example`.
    """
    if argument.isascii() and argument.isdigit() and len(argument) < 10 and int(argument) >= 1:
        return int(argument)
    raise UnknownPolicyError(
        f"policy {text!r} needs a number of layers and got {argument!r}",
        allowed="a whole number from 1 up" + ", or sqrt" * example.endswith("sqrt"),
        next_step=f"write it like {example}",
    )
