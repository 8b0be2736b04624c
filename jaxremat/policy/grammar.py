"""The grammar of policies: a table of its forms, the aliases of JAX and MaxText, a parser.

    parse("every:4+dots")         Every(4, Rule("dots"))
    parse("dots_saveable")        Rule("dots"), by JAX's own name
    str(parse(" every:04+full"))  "every:4+nothing"

The forms are those of the classes of policies (`spec.py`). The parser's messages, the help of `--policy`, `--list policies` and
the table in the documentation are made from them.

References:
    jax/_src/ad_checkpoint.py (`checkpoint_policies`); MaxText's `remat_policy` presets.
"""

import re
from dataclasses import replace

from jaxremat.errors import UnknownPolicyError, nearest
from jaxremat.policy.maxtext import MAXTEXT_ALIASES
from jaxremat.policy.spec import JAX_RULES, RULES, Every, Form, LayerPolicy, Mix, Names, OneIn, Own, Policy, Rule

#: The classes of policies, in the order of the table. A class for several layers reads its own text; the first that does wins.
POLICIES: tuple[type[Policy], ...] = (Rule, Own, Names, Every, OneIn, Mix)
#: The ending that every rule and every list of names may have.
ATTENTION = Form(
    "RULE+attention", "what a rule or a list of names saves, and fused attention's outputs", "nothing+attention"
)


def forms() -> tuple[Form, ...]:
    """The forms of a whole policy."""
    return tuple(form for policy in POLICIES for form in policy.forms)


def grammar() -> tuple[Form, ...]:
    """All forms, with the ending that some may have."""
    return (*forms(), ATTENTION)


JAX_ALIASES = {name: kind for kind, name in JAX_RULES.items()}
JAX_ALIASES |= {"checkpoint_dots": "dots", "checkpoint_dots_with_no_batch_dims": "dots-no-batch"}
ALIASES = JAX_ALIASES | MAXTEXT_ALIASES

#: A line of MaxText's config, such as `remat_policy: full`.
_OF_MAXTEXT = re.compile(r"remat_policy\s*[:=]\s*['\"]?(\w+)['\"]?")
_NAME_LISTS = ("save", "offload")
#: The next step for words that are near a policy and none.
_HINTS = {
    **dict.fromkeys(
        ("save_only_these_names", "save_and_offload_only_these_names"),
        "write JAX's name policies as save:NAME,NAME and offload:NAME,NAME",
    ),
    "auto": "auto is planned: by the command's --policy auto, or for your own layer by jaxremat.plan",
    "custom": "MaxText's custom is its own lists: write them as save:NAME,NAME+offload:NAME,NAME",
    **{verb: f"{verb} takes checkpoint names: {verb}:NAME,NAME" for verb in _NAME_LISTS},
}


def parse(text: str) -> Policy:
    """The policy that `text` spells, in a form of `grammar()` or by a name of `ALIASES`.

    `str(parse(text))` is the grammar's own spelling, and parses to an equal policy.

    Raises:
        UnknownPolicyError: the text is no policy. The message names the nearest policies.
    """

    def layer(part: str) -> LayerPolicy:
        return _layer_policy(_terms(part, text), text)

    read = (policy.read(text, layer) for policy in POLICIES)
    return next((policy for policy in read if policy is not None), None) or layer(text)


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


def _terms(part: str, text: str) -> list[str]:
    terms = [term.strip() for term in part.split("+")]
    if not all(terms):
        raise UnknownPolicyError(
            f"policy {text!r} has an empty part" if text.strip() else "the policy is empty",
            allowed=_allowed(),
            next_step="see --list policies",
        )
    return terms


def _allowed() -> str:
    return ", ".join(form.pattern for form in forms())


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
        return base.with_attention() if attention else base
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
            f"policy {text!r} both saves and offloads {', '.join(both)}", next_step="list each name in one of the two lists"
        )
    return Names(save, offload)


def _unknown_policy(term: str, text: str) -> UnknownPolicyError:
    where = f"policy {text!r}" if term == text else f"policy {term!r} in {text!r}"
    of_maxtext = _OF_MAXTEXT.fullmatch(term)
    word = of_maxtext[1] if of_maxtext else re.split("[:(]", term)[0]
    if of_maxtext and word in (*RULES, *ALIASES):
        return UnknownPolicyError(f"unknown {where}", allowed=f"{word} alone", next_step=f"did you mean {word!r}?")
    if "," in term and not {*":("} & {*term}:
        parts = [part.strip() for part in term.split(",")]
        others = [part for part in parts if part != "attention"]
        several = f"several policies have blanks between them: {' '.join(parts)}"
        added = f"attention is added to a policy: {'+'.join((*others, 'attention'))}"
        next_step = added if len(others) == 1 < len(parts) else several
        return UnknownPolicyError(f"unknown {where}", allowed=f"{_allowed()}, one each", next_step=next_step)
    words = dict.fromkeys(form.pattern.partition(":")[0] for form in forms() if form.pattern[0].islower())
    first = [form.example for form in forms() if form.pattern.startswith(f"{word}:")]
    return UnknownPolicyError(
        f"unknown {where}",
        allowed=f"{_allowed()}, each rule and name list with +attention, and JAX's and MaxText's own names",
        next_step=_HINTS.get(word)
        or (f"{word} takes a number of layers and stands first: {', '.join(first)}" if first else "")
        or nearest(word, (*words, "attention", *ALIASES))
        or "see --list policies",
    )
