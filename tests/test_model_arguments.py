"""What --model-arg gives is read as Python literals, or as text."""

import re

import pytest

from jaxremat.errors import UsageError
from jaxremat.workload.load import parse_arguments


def test_arguments():
    words = [
        "a=1",
        "b=1e-3",
        "c=True",
        "d=None",
        "e=(1, 2)",
        "f=gelu",
        "g='8'",
        "h=",
        "i=x=y",
        "j=1/2",
        "k=[1]",
        "l={[]: 1}",
    ]
    assert parse_arguments(words) == {
        "a": 1, "b": 1e-3, "c": True, "d": None, "e": (1, 2), "f": "gelu", "g": "8", "h": "", "i": "x=y", "j": "1/2", "k": [1],
        "l": "{[]: 1}",
    }  # fmt: skip


@pytest.mark.parametrize("word", ["depth", "=3", "2d=3", "", "a-b=3"])
def test_an_argument_of_another_form(word):
    with pytest.raises(UsageError) as caught:
        parse_arguments([word])
    assert f"--model-arg got {word!r}" in caught.value.got
    (example,) = re.findall(r"--model-arg (\S+=\S+)", caught.value.next_step)
    assert parse_arguments([example])


def test_an_argument_given_twice():
    with pytest.raises(UsageError) as caught:
        parse_arguments(["depth=12", "width=3", "depth=24"])
    assert "--model-arg" in caught.value.got
    assert "'depth'" in caught.value.got
    assert "'depth=24'" in caught.value.next_step
