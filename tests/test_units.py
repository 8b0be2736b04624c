"""Bytes as a person types and reads them: every unit, what is rejected, and what is printed can be typed again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxremat.errors import UsageError
from jaxremat.units import as_bytes, gib, parse_bytes, shortest_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("40GiB", 40 * 2**30), ("40 gib", 40 * 2**30), (" 40GIB ", 40 * 2**30), ("512MiB", 2**29), ("1KiB", 1024),
        ("1TiB", 2**40), ("24GB", 24 * 10**9), ("1.5GiB", 3 * 2**29), (".5KiB", 512), ("1.KiB", 1024), ("1000B", 1000),
        ("7B", 7), ("1kb", 1000), ("3MB", 3_000_000), ("1.9B", 1),
    ],
)  # fmt: skip
def test_sizes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", " ", "0", "0GiB", "-1GiB", "+1GiB", "GiB", "lots", "1e9", "inf", "nan", "0.1B", "40GXB", "4 0GiB", "40Gi",
             "1,5GiB", "²GiB", "40GiB!", "9" * 400, "9" * 5000, "8388608TiB"]
)  # fmt: skip
def test_what_is_no_size(text):
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert repr(text) in caught.value.got
    assert parse_bytes(caught.value.next_step.split()[-1])


@pytest.mark.parametrize(
    ("text", "meant"),
    [("40", "40GiB"), (" 1.5 ", "1.5GiB"), ("1000", "1000GiB"), ("42949672960", "42949672960B"), ("0", "40GiB")],
)
def test_a_number_without_a_unit_is_a_question(text, meant):
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert caught.value.next_step.strip("?").split()[-1] == meant
    assert "a unit" in caught.value.allowed


def test_a_number_in_python_is_bytes():
    assert as_bytes(40) == 40
    assert as_bytes("40GiB") == 40 * 2**30


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.000 GiB"), (2**20, "0.001 GiB"), (2**29, "0.500 GiB"), (2**30, "1.00 GiB"), (80 * 2**30, "80.00 GiB"),
     (2**50, "1,048,576.00 GiB")],
)  # fmt: skip
def test_gib(num_bytes, text):
    assert gib(num_bytes) == text


@given(st.integers(2**21, 2**43))
def test_what_is_printed_can_be_typed(num_bytes):
    assert parse_bytes(gib(num_bytes).replace(",", "")) == pytest.approx(num_bytes, abs=0.00501 * 2**30)
    assert parse_bytes(f"{num_bytes}B") == num_bytes


@pytest.mark.parametrize("text", ["11.02GiB", "40GiB", "0.5GiB", "24GB", "93.4GiB", "1000B", "79.11GiB", "3MB", "7B"])
def test_the_shortest_size_is_what_was_typed(text):
    assert shortest_size(parse_bytes(text)) == text


@given(st.integers(1, 2**53))
def test_the_shortest_size_is_of_the_same_bytes(num_bytes):
    assert parse_bytes(shortest_size(num_bytes)) == num_bytes
