"""Policies in tables: as they were typed, with what they stand for in a few words, and in full below."""

import pytest

from jaxremat.policy.grammar import ALIASES, parse
from jaxremat.report.policy_text import as_typed, policies_in_full, policy_text
from tests.made_up_records import search, step

pytestmark = pytest.mark.any_jax
NAMES = ",".join("abcdefghijklm")


@pytest.mark.parametrize(
    ("typed", "policy", "text"),
    [
        ("dots", "dots", "dots"),
        ("full", "nothing", "full (nothing)"),
        ("auto", "every:4+dots", "auto (every:4+dots)"),
        ("auto", f"save:{NAMES}+attention", "auto (save 13 values +attention)"),
        ("auto", "1*save:aaaaaa,b,c|2*save:aaaaaa,bbbbbb,c,d", "auto (1*save 3 values|2*save 4 values)"),
        (f"save:{NAMES}", f"save:{NAMES}", "save:a,b,c,d,e and 8 more"),
    ],
)
def test_a_row_has_what_was_typed(typed, policy, text):
    assert as_typed(typed, policy) == text
    assert policy_text(step(policy, requested_policy=typed)) == text
    assert policy_text(search(policy, requested_policy=typed, xla_preset="latency-hiding")).startswith(f"{text} ")


@pytest.mark.parametrize("alias", ALIASES)
def test_what_a_name_stands_for_is_whole_in_its_row_or_below(alias):
    row = step(str(parse(alias)), requested_policy=alias)
    text = policy_text(row)
    assert text.startswith(alias)
    assert row.policy in text or [line.rpartition(": ")[2] for line in policies_in_full([row, row])] == [row.policy]


def test_lines_say_which_row_is_meant_where_a_text_stands_for_several_policies():
    def planned(names: str, batch: int):
        return step(f"save:{names}", batch, requested_policy="auto")

    first, second = f"{NAMES},n", f"{NAMES},o"
    rows = [planned(first, 8), planned(second, 16), planned(second, 16), step("dots")]
    lines = policies_in_full(rows)
    assert [line.rpartition(": ")[2] for line in lines] == [f"save:{first}", f"save:{second}"]
    assert "batch 8" in lines[0]
    assert lines[1].count("batch 16") == 1
