"""What --model-arg gives is read as Python literals, or as text."""

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
    with pytest.raises(UsageError) as raised:
        parse_arguments([word])
    assert str(raised.value) == (
        f"--model-arg got {word!r}. Allowed: key=value, with a keyword of the function that --model names. "
        "Next: write it like --model-arg depth=12."
    )


def test_an_argument_given_twice():
    with pytest.raises(UsageError) as raised:
        parse_arguments(["depth=12", "width=3", "depth=24"])
    assert str(raised.value) == "--model-arg gives 'depth' twice. Allowed: each key once. Next: leave 'depth=24' out."
