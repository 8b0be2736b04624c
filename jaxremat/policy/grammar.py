"""The grammar of policies: a table of its forms, the aliases of JAX and MaxText, a parser.

    parse("every:4+dots")         Every(4, Rule("dots"))
    parse("dots_saveable")        Rule("dots"), by JAX's own name
    str(parse(" every:04+full"))  "every:4+nothing"

`GRAMMAR` is the one list of the forms. The parser's messages, the help of `--policy`, `--list policies` and the table in the
documentation are made from it.

References:
    jax/_src/ad_checkpoint.py (`checkpoint_policies`); MaxText's `remat_policy` presets.
"""

import re
from dataclasses import dataclass, replace

from jaxremat.errors import UnknownPolicyError, nearest
from jaxremat.policy.maxtext import CONTEXT, MAXTEXT_ALIASES, MLPWI_0, MLPWO, QUERY_PROJ
from jaxremat.policy.spec import NONE, OWN, RULES, Every, LayerPolicy, Mix, Names, OneIn, Policy, Rule


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


#: The forms of a whole policy.
FORMS = (
    Form("none", "no wrapper: differentiation decides what is saved", "none"),
    Form("own", "the loss as its author wrote it, with the author's own checkpoints", "own"),
    Form("everything", "checkpointed, and every value saved", "everything"),
    Form("nothing", "only each layer's input; the layer is recomputed", "nothing"),
    Form("dots", "the results of matmuls", "dots"),
    Form("dots-no-batch", "the results of matmuls without batch dimensions", "dots-no-batch"),
    Form("save:NAME,...", "the tensors with these checkpoint names", f"save:{QUERY_PROJ},{MLPWO}"),
    Form(
        "offload:NAME,...",
        "the same, saved in pinned host memory; joins save: with +",
        f"save:{QUERY_PROJ}+offload:{MLPWI_0}",
    ),
    Form("every:K", "only the input of each group of K layers", "every:4"),
    Form("every:sqrt", "every:K with K the rounded root of the layers", "every:sqrt"),
    Form("every:K+INNER", "the same, with a policy for the layers while a group is recomputed", "every:4+dots"),
    Form("one-in:K", "the first of every K layers recomputed, the others left as they are", "one-in:2"),
    Form(
        "N*POLICY|N*POLICY",
        "N layers by one policy, the next N by another, and again; of names, in quotes",
        f"2*nothing|1*save:{CONTEXT}",
    ),
)
#: The ending that every rule and every list of names may have.
ATTENTION = Form(
    "RULE+attention", "what a rule or a list of names saves, and fused attention's outputs", "nothing+attention"
)
GRAMMAR = (*FORMS, ATTENTION)

JAX_ALIASES = {
    "everything_saveable": "everything",
    "nothing_saveable": "nothing",
    "dots_saveable": "dots",
    "checkpoint_dots": "dots",
    "dots_with_no_batch_dims_saveable": "dots-no-batch",
    "checkpoint_dots_with_no_batch_dims": "dots-no-batch",
}
ALIASES = JAX_ALIASES | MAXTEXT_ALIASES

_NAME_LISTS = ("save", "offload")
_GROUPS = ("every", "one-in")
_MIX_EXAMPLE = "2*nothing|1*save:NAME"
_ALLOWED = ", ".join(form.pattern for form in FORMS)
#: The next step for words that are near a policy and none.
_HINTS = {
    **dict.fromkeys(
        ("save_only_these_names", "save_and_offload_only_these_names"),
        "write JAX's name policies as save:NAME,NAME and offload:NAME,NAME",
    ),
    "auto": "auto is planned: by the command's --policy auto, or for your own layer by jaxremat.plan",
    "custom": "MaxText's custom is its own lists: write them as save:NAME,NAME+offload:NAME,NAME",
    **{verb: f"{verb} takes a number of layers and stands first: every:4, every:4+dots, one-in:2" for verb in _GROUPS},
    **{verb: f"{verb} takes checkpoint names: {verb}:NAME,NAME" for verb in _NAME_LISTS},
}


def parse(text: str) -> Policy:
    """The policy that `text` spells, in a form of `GRAMMAR` or by a name of `ALIASES`.

    `str(parse(text))` is the grammar's own spelling, and parses to an equal policy.

    Raises:
        UnknownPolicyError: the text is no policy. The message names the nearest policies.
    """
    if "|" in text or "*" in text.partition(":")[0]:
        return _mix(text)
    if text.strip() == str(OWN):
        return OWN
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


def as_policy(policy: Policy | str) -> Policy:
    """`policy` itself, or the policy that its text spells.

    Raises:
        UnknownPolicyError: the text doesn't parse, or `policy` is neither a text nor a `Policy`.
    """
    if isinstance(policy, str):
        return parse(policy)
    if not isinstance(policy, Policy):
        raise UnknownPolicyError(
            f"a policy of type {type(policy).__name__}",
            allowed="a text such as 'dots', or a jaxremat.Policy",
            next_step="jax.checkpoint_policies.dots_saveable is 'dots' here; see --list policies",
        )
    return policy


def _terms(text: str) -> list[str]:
    terms = [term.strip() for term in text.split("+")]
    if not all(terms):
        raise UnknownPolicyError(
            f"policy {text!r} has an empty part" if text.strip() else "the policy is empty",
            allowed=_ALLOWED,
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
    if rules := [term for term in terms if term in RULES or term in ALIASES]:
        raise UnknownPolicyError(
            f"policy {text!r} adds {', '.join(t for t in terms if t != rules[0])!r} to {rules[0]!r}, a policy on its own",
            allowed="one rule, or save:NAME,... and offload:NAME,..., each with +attention, also as INNER of every:K",
            next_step=f"choose one of them, for example {rules[0]}",
        )
    return replace(_names(terms, text), attention=attention)


def _names(terms: list[str], text: str) -> Names:
    named: dict[str, tuple[str, ...]] = {}
    for term in terms:
        verb, colon, names = term.partition(":")
        if verb not in _NAME_LISTS or not colon:
            raise _unknown_policy(term, text)
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
            next_step="list each name in one of the two lists",
        )
    return Names(save, offload)


def _unknown_policy(term: str, text: str) -> UnknownPolicyError:
    where = f"policy {text!r}" if term == text else f"policy {term!r} in {text!r}"
    word = re.split("[:(]", term)[0]
    known = (*RULES, *_NAME_LISTS, *_GROUPS, "attention", *ALIASES)
    return UnknownPolicyError(
        f"unknown {where}",
        allowed=f"{_ALLOWED}, each rule and name list with +attention, and JAX's and MaxText's own names",
        next_step=_HINTS.get(word) or nearest(word, known) or "see --list policies",
    )
