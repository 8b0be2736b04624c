"""The policy grammar: printing and parsing are inverse, aliases land on the rule they name, and JAX gets the right answers.

`to_jax` is compared with `jax.checkpoint_policies` themselves, asked about real primitives.
"""

import math
import pickle
import re
from dataclasses import replace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend import core

from experiments.reference_tables import alias_table_markdown, policy_table_markdown
from jaxremat.cli.command import parse_flags
from jaxremat.cli.explain import ExplainFlags
from jaxremat.cli.grid import SweepFlags
from jaxremat.errors import UnknownPolicyError
from jaxremat.policy.grammar import ALIASES, ATTENTION, JAX_ALIASES, POLICIES, as_policy, grammar, parse
from jaxremat.policy.jax_private import FUSED_ATTENTION
from jaxremat.policy.maxtext import MAXTEXT_ALIASES
from jaxremat.policy.spec import NONE, NOTHING, RULES, Every, LayerPolicy, Mix, Names, OneIn, Rule
from jaxremat.session.flags import RunFlags


def for_a_layer(text: str) -> LayerPolicy:
    """The policy of this text, which is one for a single layer."""
    policy = parse(text)
    assert isinstance(policy, LayerPolicy)
    return policy


name = st.text("abcdefgh_0123456789", min_size=1, max_size=8)
rules = st.builds(Rule, st.sampled_from(RULES), st.booleans())


@st.composite
def name_policies(draw):
    names = draw(st.lists(name, min_size=1, max_size=6, unique=True))
    cut = draw(st.integers(0, len(names)))
    return Names(tuple(names[:cut]), tuple(names[cut:]), draw(st.booleans()))


layer_policies = rules | name_policies()
counts = st.integers(1, 500)


@st.composite
def mixes(draw):
    attention = draw(st.booleans())
    part = st.just(NOTHING) | name_policies()
    parts = draw(st.lists(st.tuples(counts, part), min_size=2, max_size=4))
    return Mix(tuple((count, replace(policy, attention=attention)) for count, policy in parts))


policies = layer_policies | st.builds(Every, counts | st.just("sqrt"), layer_policies) | st.builds(OneIn, counts) | mixes()


@given(policies)
def test_parse_inverts_str(policy):
    assert parse(str(policy)) == policy
    assert str(parse(str(policy))) == str(policy)
    assert as_policy(policy) is policy
    assert as_policy(str(policy)) == policy


@given(policies, policies)
def test_policies_are_values(one, other):
    assert (one == other) == (str(one) == str(other))
    assert hash(one) == hash(parse(str(one)))
    assert pickle.loads(pickle.dumps(one)) == one
    assert str(one).isprintable()
    assert " " not in str(one)


@given(layer_policies.filter(lambda policy: not policy.is_none))
def test_jax_policies_are_values_too(policy):
    """JAX caches traces by the policy's equality: equal policies must give equal callables."""
    assert policy.to_jax() == for_a_layer(str(policy)).to_jax()
    assert hash(policy.to_jax()) == hash(for_a_layer(str(policy)).to_jax())


@given(st.text("every:on-idtsavflNAME,+ 0123sqrt_*|", max_size=25))
def test_any_text_parses_or_is_rejected(text):
    try:
        policy = parse(text)
    except UnknownPolicyError as error:
        assert error.next_step  # noqa: PT017
    else:
        assert parse(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("none", Rule("none")),
        ("dots-no-batch", Rule("dots-no-batch")),
        ("nothing+attention", Rule("nothing", attention=True)),
        (" nothing + attention ", Rule("nothing", attention=True)),
        ("save:a,b", Names(save=("a", "b"))),
        ("save:a, b,a", Names(save=("a", "b"))),
        ("offload:b+save:a", Names(("a",), ("b",))),
        ("offload:b+attention+save:a", Names(("a",), ("b",), True)),
        ("every:4", Every(4)),
        ("every:sqrt", Every("sqrt")),
        ("every:4+none", Every(4)),
        ("every:4+dots", Every(4, Rule("dots"))),
        ("every:4+save:a+offload:b+attention", Every(4, Names(("a",), ("b",), True))),
        ("every:04", Every(4)),
        ("one-in:2", OneIn(2)),
        ("2*save:a,b|1*save:c", Mix(((2, Names(("a", "b"))), (1, Names(("c",)))))),
        (" 2 * nothing | 01*offload:c ", Mix(((2, NOTHING), (1, Names(offload=("c",)))))),
        (
            "1*full+attention|3*save_out_proj+attention",
            Mix(((1, Rule("nothing", True)), (3, Names(("out_proj",), (), True)))),
        ),
        ("full", NOTHING),
        ("full+attention", Rule("nothing", attention=True)),
        ("every:2+dots_saveable", Every(2, Rule("dots"))),
        ("save_out_proj", Names(save=("out_proj",))),
        ("qkv_proj_offloaded", Names(offload=("query_proj", "key_proj", "value_proj"))),
    ],
)
def test_texts(text, policy):
    assert parse(text) == policy


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases(alias):
    """An alias is its text; a name list remembers which preset it came from, which decides about missing names."""
    assert parse(alias) == parse(ALIASES[alias])
    assert parse(f"every:2+{alias}") == Every(2, for_a_layer(ALIASES[alias]))
    assert for_a_layer(alias).alias == (alias if parse(alias).names() else "")
    assert for_a_layer(ALIASES[alias]).alias == ""


@pytest.mark.parametrize("alias", JAX_ALIASES)
def test_jax_aliases_are_jaxs_own_policies(alias):
    assert alias in dir(jax.checkpoint_policies)
    assert decisions(for_a_layer(alias).to_jax()) == decisions(getattr(jax.checkpoint_policies, alias))


def test_maxtext_presets_never_save_and_offload_the_same():
    for alias in MAXTEXT_ALIASES:
        policy = parse(alias)
        if isinstance(policy, Names):
            assert not set(policy.save) & set(policy.offload)


P = core.primitives
BATCHED = {"dimension_numbers": (((2,), (1,)), ((0,), (0,)))}
UNBATCHED = {"dimension_numbers": (((1,), (0,)), ((), ()))}


class Fused:
    """Stands for the primitive of cuDNN attention, which is known by its name alone."""

    name = FUSED_ATTENTION


def decisions(callable_) -> list[str]:
    """What a policy answers for a matmul, a batched one, an addition, two names and fused attention."""
    asked = [(P.dot_general_p, UNBATCHED), (P.dot_general_p, BATCHED), (P.add_p, {})]
    asked += [(P.name_p, {"name": "a"}), (P.name_p, {"name": "b"}), (Fused, {})]
    said = [callable_(primitive, **params) for primitive, params in asked]
    kinds = {"bool": lambda d: "save" if d else "-", "RecomputeType": lambda _: "-", "SaveableType": lambda _: "save"}
    return [kinds.get(type(d).__name__, lambda d: f"{d.src}->{d.dst}")(d) for d in said]


HOST = "device->pinned_host"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        #                      matmul  batched   add    name a  name b  attention
        ("everything",        ["save", "save", "save", "save", "save", "save"]),
        ("nothing",           ["-",    "-",    "-",    "-",    "-",    "-"]),
        ("nothing+attention", ["-",    "-",    "-",    "-",    "-",    "save"]),
        ("dots",              ["save", "save", "-",    "-",    "-",    "-"]),
        ("dots+attention",    ["save", "save", "-",    "-",    "-",    "save"]),
        ("dots-no-batch",     ["save", "-",    "-",    "-",    "-",    "-"]),
        ("save:a",            ["-",    "-",    "-",    "save", "-",    "-"]),
        ("save:a+attention",  ["-",    "-",    "-",    "save", "-",    "save"]),
        ("offload:a",         ["-",    "-",    "-",    HOST,   "-",    "-"]),
        ("save:b+offload:a",  ["-",    "-",    "-",    HOST,   "save", "-"]),
    ],
)  # fmt: skip
def test_what_jax_is_told(text, expected):
    assert decisions(for_a_layer(text).to_jax()) == expected


@pytest.mark.parametrize("text", ["none", "none+attention"])
def test_none_has_no_callable(text):
    policy = for_a_layer(text)
    assert policy.is_none
    with pytest.raises(AssertionError):
        policy.to_jax()


@given(st.integers(1, 200))
def test_sqrt_is_rounded(num_layers):
    size = Every("sqrt").size(num_layers)
    assert 1 <= size <= num_layers
    assert abs(size - math.sqrt(num_layers)) <= 0.5


@given(st.integers(1, 60), st.integers(1, 60))
def test_groups_are_described_as_they_are(k, num_layers):
    if k > num_layers:
        for policy in (Every(k), OneIn(k)):
            with pytest.raises(UnknownPolicyError) as caught:
                policy.describe(num_layers)
            assert {k, num_layers} <= set(numbers(caught.value.got))
        return
    full, size, *rest = numbers(Every(k).describe(num_layers))
    assert (full * size + sum(rest), size) == (num_layers, k)
    assert numbers(OneIn(k).describe(num_layers)) == [len(range(0, num_layers, k)), num_layers]


def numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def test_the_layers_of_a_group():
    assert parse("every:2+dots").layers(5) == (Rule("dots"), Rule("dots"))
    assert parse("every:2").layers(5) == (NONE, NONE)
    assert parse("one-in:3").layers(5) == (NOTHING, NONE, NONE)
    assert parse("save:a").layers(5) == (Names(save=("a",)),)
    assert list(map(str, parse("2*nothing|1*save:a").layers(6))) == ["nothing", "nothing", "save:a"]


@pytest.mark.parametrize("form", grammar(), ids=lambda form: form.pattern)
def test_each_form_has_an_example(form):
    assert str(parse(form.example)) == form.example


def test_the_grammar_is_whole():
    examples = [parse(form.example) for form in grammar()]
    assert {type(policy) for policy in examples} == set(POLICIES)
    assert {policy.kind for policy in examples if isinstance(policy, Rule)} == set(RULES)
    assert [form for form, policy in zip(grammar(), examples, strict=True) if policy.saves_attention] == [ATTENTION]


@pytest.mark.parametrize("flags", [RunFlags, ExplainFlags, SweepFlags])
def test_the_help_shows_each_form(flags, capsys):
    with pytest.raises(SystemExit):
        parse_flags(flags, ["--help-all"])
    words = set(capsys.readouterr().out.replace(";", ",").replace(", ", " ").split())
    assert {form.pattern for form in grammar()} <= {word.rstrip(",") for word in words}


def test_the_grammar_as_a_table():
    head, rule, *rows = policy_table_markdown().splitlines()
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in (head, rule, *rows)] == [4] * (2 + len(grammar()))
    assert [row.split("` | ")[0].removeprefix("| `").replace("\\|", "|") for row in rows] == [f.pattern for f in grammar()]
    assert len(alias_table_markdown().splitlines()) == 2 + len(ALIASES)


@given(policies)
def test_attention_by_value_is_attention_in_text(policy):
    assert policy.saves_attention == ("+attention" in str(policy))
    with_it = policy.with_attention()
    assert (with_it is None) == isinstance(policy, Every | OneIn)
    if with_it is not None:
        assert with_it.saves_attention
        assert with_it.layer_policies == tuple(replace(part, attention=True) for part in policy.layer_policies)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nothing", True),
        ("every:sqrt+nothing", True),
        ("every:2", False),
        ("one-in:2", False),
        ("1*save:a|1*nothing", False),
    ],
)
def test_saves_inputs_alone(text, expected):
    assert parse(text).saves_inputs_alone == expected


def test_no_names_are_nothing():
    assert [str(Names()), str(Names(attention=True))] == ["nothing", "nothing+attention"]
    assert decisions(Names().to_jax()) == decisions(NOTHING.to_jax())
