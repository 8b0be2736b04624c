"""The error for a policy that cannot be meant: what it quotes, and the nearest policies. Its messages are in `test_errors.py`."""

import re

import pytest

from jaxremat.errors import UnknownNameError, UnknownPolicyError
from jaxremat.policy.grammar import parse
from jaxremat.policy.names import resolve

#: By the text, what of it is quoted, and what the next step quotes.
NEAREST = {
    "Dots": ("Dots", ["dots"]),
    "nothin": ("nothin", ["nothing", "nothing_saveable", "none"]),
    "save_qkv": ("save_qkv", ["save_qkv_proj", "save"]),
    "save:context+dotz": ("dotz", ["dots"]),
    "zzzzqq": ("zzzzqq", []),
}
#: No number of layers. The next step is a policy.
NO_COUNT = ["every:", "every:0", "every:-1", "every:1.5", "one-in:x", "every:" + 5000 * "9"]


@pytest.mark.parametrize("text", NEAREST)
def test_unknown_words(text):
    word, near = NEAREST[text]
    with pytest.raises(UnknownPolicyError) as caught:
        parse(text)
    assert repr(word) in caught.value.got
    assert re.findall("'(.*?)'", caught.value.next_step) == near


@pytest.mark.parametrize("text", NO_COUNT)
def test_no_number_of_layers(text):
    with pytest.raises(UnknownPolicyError) as caught:
        parse(text)
    verb, _, count = text.partition(":")
    assert repr(text) in caught.value.got
    assert repr(count) in caught.value.got
    for policy in re.findall(rf"{verb}:\w+", caught.value.next_step):
        parse(policy)


@pytest.mark.parametrize("text", ["", "+", "dots+", "save:", "save:,a"])
def test_an_empty_part(text):
    with pytest.raises(UnknownPolicyError) as caught:
        parse(text)
    assert caught.value.allowed
    assert "--list" in caught.value.next_step


def test_an_alias_none_of_whose_names_exist():
    """A preset may name tensors that a model lacks, but not only such; the gelu MLP has no mlpwi_1."""
    with pytest.raises(UnknownNameError) as caught:
        resolve(parse("save_out_proj"), {"context", "mlpwo"})
    assert "'out_proj'" in caught.value.got
    assert caught.value.allowed == "context, mlpwo"
    assert resolve(parse("minimal"), {"context", "mlpwo"}) == parse("save:mlpwo")
