"""Which rows are said to be as fast as the fastest, and how far two predicted steps of one model are off beside each other."""

import json
from dataclasses import replace
from typing import Any

import pytest
from rich.table import Table

from experiments.common import RESULTS
from jaxremat.chips.speed import PAIRED_ERROR
from jaxremat.report.meshes import mesh_sentences, meshes_table
from jaxremat.report.plan import layouts_sentences, plan_parts
from jaxremat.report.recommend import best_sentences, explanations, recommend_table
from jaxremat.report.sentences import own_sentences, tied_sentences
from jaxremat.report.steps import TIED, policy_table
from jaxremat.trial.details import PlannedLayout
from jaxremat.trial.recommendation import recommendation
from jaxremat.trial.ties import BesideOwn, beside_own, ties, trial_ties
from tests.made_up_records import GIB, measured, plan, step
from tests.made_up_tables import MESHES

PAIRED: dict[str, Any] = {"paired_error": 0.05}


def cells(table: Table, title: str) -> list[str]:
    """The texts of the column with this title."""
    (column,) = (column for column in table.columns if column.header == title)
    return [str(cell) for cell in column.cells]


def test_what_is_within_the_error_of_the_highest_rate_is_tied():
    rates = {"a": 900.0, "b": 1000.0, "c": 960.0, "d": None}
    assert ties(rates, rates.get, lambda best, row: 0.05) == ["b", "c"]
    assert ties(rates, rates.get, lambda best, row: 0.2 if (best, row) == ("b", "a") else 0.0) == ["a", "b"]
    assert ties(rates, rates.get, lambda best, row: 0.04) == [], "1000 is just 1/24 more than 960"
    assert ties({}, rates.get, lambda best, row: 0.05) == []


def test_only_steps_that_fit_and_are_of_one_kind_are_tied():
    fast, near, slow = (step(policy, 8, step_s, **PAIRED) for policy, step_s in (("a", 0.1), ("b", 0.104), ("c", 0.106)))
    assert trial_ties([slow, near, fast]) == [near, fast]
    assert trial_ties([fast, replace(near, fits=False)]) == []
    assert trial_ties([fast, replace(near, paired_error=None)]) == [], "a record of a former version"
    assert trial_ties([fast, replace(near, seq_len=2048)]) == [], "another length is another amount of work"
    by_samples = [replace(row, tokens_per_s=None, samples_per_s=8 / (row.step_s or 1)) for row in (fast, near, slow)]
    assert trial_ties(by_samples) == by_samples[:2]


@pytest.mark.parametrize(
    ("fastest", "slowest", "is_tied"), [(0.098, 0.105, True), (0.101, 0.105, False), (None, 0.105, False)]
)
def test_measured_steps_are_tied_where_single_ones_overlap(fastest, slowest, is_tied):
    """The other step takes 100 ms at most."""
    best = measured("a", 8, 0.095, step_min_s=0.094, step_max_s=0.1, **PAIRED)
    other = measured("b", 8, 0.102, step_min_s=fastest, step_max_s=slowest, **PAIRED)
    assert bool(trial_ties([best, other])) is is_tied
    assert trial_ties([best, step("b", 8, 0.0951, **PAIRED)]) == [], "one of them is predicted"
    assert len(tied_sentences([best, other])) == is_tied


def test_the_best_policy_beside_the_author_s_own():
    """By rate where both rates are known, and by bytes where they aren't or `own` doesn't fit."""
    own, fast, small = (
        step(policy, 8, step_s, total_bytes=size * GIB, **PAIRED)
        for policy, step_s, size in (("own", 0.11, 10), ("auto", 0.1, 9), ("nothing", 0.12, 4))
    )
    found = beside_own([small, own, fast])
    assert found
    assert (found.own, found.best, found.is_tied) == (own, fast, False)
    assert found.faster == pytest.approx(0.1)
    near = beside_own([own, replace(fast, tokens_per_s=own.rate * 1.04)])
    assert near
    assert near.is_tied
    also = [replace(one, tokens_per_s=own.rate * 1.03) for one in (small, replace(small, batch=4, total_bytes=GIB))]
    of_fewest_bytes = beside_own([own, replace(fast, tokens_per_s=own.rate * 1.04), *also])
    assert of_fewest_bytes, "of those as fast, the one of the fewest bytes at the same batch"
    assert (of_fewest_bytes.best, of_fewest_bytes.is_tied) == (also[0], True)
    assert of_fewest_bytes.faster == pytest.approx(0.03)
    slower = beside_own([own, small])
    assert slower
    assert slower.faster == pytest.approx(0.11 / 0.12 - 1)
    assert beside_own([replace(own, fits=False), small, fast]) == BesideOwn(replace(own, fits=False), fast)
    unknown = [replace(row, tokens_per_s=None) for row in (own, small, fast)]
    assert beside_own(unknown) == BesideOwn(unknown[0], unknown[1])
    for rows in ([own], [small, fast], [own, replace(fast, fits=False)], [own, replace(fast, error="x")]):
        assert beside_own(rows) is None
        assert own_sentences(rows) == []
    assert all(len(own_sentences([own, other])) == 1 for other in (fast, small, unknown[1]))


def test_tied_rows_are_marked_in_the_table_of_policies():
    rows = [step(policy, 8, step_s, **PAIRED) for policy, step_s in (("a", 0.1), ("b", 0.104), ("c", 0.2))]
    assert cells(policy_table(rows, "t"), "tokens/s") == [f"{TIED} 81,920", f"{TIED} 78,769", "40,960"]
    (said,) = tied_sentences(rows)
    assert said.startswith(TIED)
    assert "5%" in said
    assert tied_sentences(rows[1:]) == []


def test_meshes_and_layouts_within_the_error():
    first = MESHES.meshes[0]
    others = replace(first, mesh="fsdp=64", tokens_per_s=1_190_000.0), replace(first, mesh="data=64", tokens_per_s=1.0)
    record = replace(MESHES, meshes=(first, *others), paired_error=0.05)
    assert [rate.startswith(TIED) for rate in cells(meshes_table(record), "tokens/s")] == [True, True, False]
    assert len(mesh_sentences(record)) == len(mesh_sentences(replace(record, paired_error=0.01))) + 1

    def said(error: float | None) -> str:
        unrolled = PlannedLayout("unrolled", "dots", "full", 8, GIB, 0.100, 80.0, 1.0)
        return layouts_sentences(
            plan(
                layouts=(unrolled, replace(unrolled, layout="loop", step_s=0.103, tokens_per_s=80.0 / 1.03)),
                paired_error=error,
            )
        )[0]

    assert "5%" in said(0.05)
    assert said(0.02) == said(None) != said(0.05)


def test_layouts_of_other_microbatches_are_compared_by_their_tokens():
    """With a global batch of 96, 8 x 12 in 1.05 s and 12 x 8 in 1.00 s differ by 5 %: seconds are of whole steps."""
    chosen = PlannedLayout("unrolled", "dots", "full", 12, GIB, 1.00, 96.0 / 1.00, 1.0)
    other = PlannedLayout("loop", "dots", "full", 8, GIB, 1.05, 96.0 / 1.05, 1.0)
    assert "4.8% fewer tokens" in layouts_sentences(plan(layouts=(chosen, other)))[0]
    samples = [replace(one, tokens_per_s=None, samples_per_s=one.tokens_per_s) for one in (chosen, other)]
    assert "4.8% fewer samples" in layouts_sentences(plan(layouts=tuple(samples)))[0]


@pytest.mark.parametrize(
    ("share", "said"), [(0.9, "72 tokens a second, 10.0% fewer"), (1.002, "80 tokens a second, 0.2% more")]
)
def test_a_scan_that_cannot_win_has_a_bound(share, said):
    chosen = PlannedLayout("unrolled", "dots", "full", 8, GIB, 0.100, 80.0, 21.4)
    other = PlannedLayout("loop", "nothing", "full", 8, GIB, 0.300, 26.0, 4.4, most_share=share)
    record = plan(layouts=(chosen, other))
    most, compiled, _ = layouts_sentences(record)
    assert f"at most {said}" in most
    assert "--scan-layers True" in most
    assert "21 s here, and in a scan in 4 s" in compiled
    assert all(isinstance(part, str) for part in plan_parts(record, explain=False)), "there is no table of one layout"


def test_meshes_count_what_the_workload_counts():
    samples = replace(MESHES, counted="samples")
    assert cells(meshes_table(samples), "samples/s") == cells(meshes_table(MESHES), "tokens/s")
    assert "tokens/s" not in "".join(mesh_sentences(samples))


@pytest.mark.parametrize("by_cost", [False, True])
def test_gpus_of_two_kinds_are_told_apart_by_their_interval(by_cost):
    """The best may take 14 % longer than predicted, and the other 10 % less: together 27 %.

    The same speed on 8 GPUs of a kind costs the same there, as they have one price.
    """

    def row(target: str, tokens_per_s: float):
        known: dict[str, Any] = dict(
            mesh="fsdp=8", num_devices=8, predicted_interval=(-0.1, 0.14), tokens_per_s=tokens_per_s
        )
        return recommendation("m", target, 8, {"auto": [step("dots", 8, **known, **PAIRED)]}, 1.0)

    rows = [row("a", 1000.0), row("a", 960.0), row("a", 940.0), row("b", 800.0), row("b", 780.0)]
    table = recommend_table(rows, "t", by_cost=by_cost, width=200)
    marked = [rate.startswith(TIED) for rate in cells(table, "cost" if by_cost else "tokens/s\nof all")]
    assert marked == [True, True, False, True, False]
    assert sum(one.startswith(TIED) for one in explanations(rows, by_cost=by_cost)) == 1
    assert "3" in best_sentences(rows, by_cost=by_cost)[-1].partition(":")[0]
    assert not any(digit in best_sentences(rows[2:3], by_cost=by_cost)[-1].partition(":")[0] for digit in "123")


@pytest.mark.parametrize(("speed", "said"), [(1.08, "not needed"), (1.1, "faster")])
def test_checkpointing_is_faster_by_more_than_the_error(speed, said):
    rows = {policy: [step(policy, 8, 0.1 / times, paired_error=0.09)] for policy, times in (("none", 1.0), ("dots", speed))}
    assert recommendation("m", "h100-80gb", 1, rows).checkpointing == said


def test_the_error_between_two_steps_is_the_largest_that_was_seen():
    """Measured over predicted times of one model: policies on a GPU, and meshes and numbers of GPUs of published steps."""
    published = json.loads((RESULTS / "h100-80gb" / "published.json").read_text())
    names = ("h100-gpt2-", "h200-llama-", "h100-l2-70b-", "h100-l3-70b-", "h100-5b-")
    rows = [*published["alone"], *published["steps"]]
    alike = [row for row in rows if "the host waited for each step" not in row["unmatched"]]
    groups = [[1 + row["longer"] for row in alike if row["name"].startswith(name)] for name in names]
    assert [len(ratios) for ratios in groups] == [9, 3, 4, 2, 4]
    largest = max(max(ratios) / min(ratios) - 1 for ratios in groups)
    assert round(largest, 2) == PAIRED_ERROR
