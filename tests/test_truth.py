"""XLA's predictions beside a device's measurements, both made up: exit codes, ranks and memory outside the allocator's pool."""

import dataclasses
import io
import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from jaxremat.chips.nvidia.nvml import Gpu, GpuProcess, Reading
from jaxremat.chips.nvidia.outside import Outside, outside, reading_or_none
from jaxremat.report.printer import Printer, Report
from jaxremat.trial.lines import from_row, to_json
from jaxremat.trial.ranks import rank_correlation, rank_records
from jaxremat.trial.record import Record
from tests.fake_nvml import fresh_fake
from tests.made_up_records import GIB, measured, search, unmeasured


def printed(*policies: Sequence[Record], as_json: bool = False) -> Printer:
    """A printer that got the records of each policy."""
    printer = Printer(Report(Console(file=io.StringIO()), as_json=as_json))
    for records in policies:
        for one in records:
            printer.row(one)
        printer.policy_done()
    printer.all_done("nvidia-h200")
    return printer


OOM: dict[str, Any] = {"fits": False, "ran": "oom", "ran_error": "x"}


@pytest.mark.parametrize(
    ("records", "code"),
    [
        ([measured(batch=128), unmeasured(batch=129, **OOM), search(ran="ok", next_ran="oom")], 0),  # the proof, no failure
        ([unmeasured(error="RESOURCE_EXHAUSTED: x", error_kind="oom", ran="oom")], 1),  # a batch that was requested
        ([unmeasured(fits=False)], 3),
        ([unmeasured(ran="oom")], 3),
        ([unmeasured(batch=1, **OOM), search(largest_batch=0, compiled_largest_batch=1, next_batch=1, next_ran="oom")], 3),
    ],
)
def test_exit_codes(records, code):
    assert printed(records).exit_code() == code


def test_rank_correlation():
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert rank_correlation([(1, 30), (2, 20), (3, 10)]) == pytest.approx(-1)
    assert rank_correlation([(1, 10), (2, 10), (3, 20), (4, 5)]) == pytest.approx(-(0.1**0.5))  # two are equal
    assert rank_correlation([(1, 2), (2, 3)]) is None
    assert rank_correlation([(1, 2), (1, 3), (1, 4)]) is None


def test_ranks_over_policies(capsys):
    """In a record; of seconds per sequence, as batches differ."""
    trials = [measured("none", 4, 0.010, 0.008), measured("dots", 8, 0.018, 0.014), measured("nothing", 16, 0.048, 0.027)]
    printed(*([one] for one in trials), as_json=True)
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["record"] == "rank_correlation"
    assert record["policies"] == ["none", "dots", "nothing"]
    assert (record["batch"], record["spearman"]) == (None, pytest.approx(-0.5))
    assert json.loads(to_json(from_row(record))) == record


def test_ranks_at_each_batch():
    times = (("none", 1.0), ("dots", 2.0), ("nothing", 3.0))
    rows = [measured(policy, batch, s * batch, s) for batch in (4, 8) for policy, s in times]
    rows[-1] = dataclasses.replace(rows[-1], step_s=0.5)
    assert [(found.batch, found.spearman) for found in rank_records(rows)] == [
        (4, pytest.approx(1)),
        (8, pytest.approx(-0.5)),
    ]


@pytest.mark.parametrize("left_out", [{"step_source": "predicted"}, {"predicted": None}, {"error": "x"}, {"fits": False}])
def test_only_what_was_measured_and_predicted_is_ranked(left_out):
    rows = [measured("none", 8, 1.0, 1.0), measured("dots", 8, 2.0, 2.0)]
    assert rank_records([*rows, measured("nothing", 8, 3.0, 3.0, **left_out)]) == []
    assert len(rank_records([*rows, measured("nothing", 8, 3.0, 3.0)])) == 1


def reading(*cards: tuple[int, dict[int, int | None]]) -> Reading:
    gpus = (
        Gpu(n, "NVIDIA H200", 140 * GIB, used, 0, (9, 0), 0, tuple(GpuProcess(pid, "python", b) for pid, b in own.items()))
        for n, (used, own) in enumerate(cards)
    )
    return Reading("580.1", "13.0", tuple(gpus))


FREE = reading((GIB, {}), (2 * GIB, {}))


@pytest.mark.parametrize(
    ("before", "after", "device", "visible", "expected"),
    [
        (FREE, reading((90 * GIB, {7: 81 * GIB}), (2 * GIB, {})), 0, None, Outside(GIB, "process")),
        (None, reading((90 * GIB, {7: 81 * GIB}), (2 * GIB, {})), 0, None, Outside(GIB, "process")),
        (FREE, reading((82 * GIB, {7: None}), (2 * GIB, {})), 0, None, Outside(GIB, "card")),  # a driver that won't say
        (FREE, reading((82 * GIB, {4711: 81 * GIB}), (2 * GIB, {})), 0, None, Outside(GIB, "card")),  # a container's numbers
        (FREE, reading((82 * GIB, {7: GIB}), (2 * GIB, {})), 0, None, Outside(GIB, "card")),  # less than its pool: not it
        (FREE, reading((60 * GIB, {}), (2 * GIB, {})), 0, None, None),  # somebody else gave memory back meanwhile
        (None, reading((82 * GIB, {}), (2 * GIB, {})), 0, None, None),
        (FREE, reading((GIB, {}), (90 * GIB, {7: 82 * GIB})), 0, "1", Outside(2 * GIB, "process")),
        (FREE, reading((GIB, {}), (90 * GIB, {7: 82 * GIB})), 0, "1,0", Outside(2 * GIB, "process")),
        (FREE, reading((GIB, {}), (90 * GIB, {7: 82 * GIB})), 1, None, Outside(2 * GIB, "process")),
        (FREE, reading((GIB, {}), (90 * GIB, {7: 82 * GIB})), 2, None, None),
    ],
)  # fmt: skip
def test_outside_the_pool(before, after, device, visible, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert outside(before, after, 7, device, 80 * GIB, environment) == expected


def test_a_reading_through_nvml_or_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fresh_fake())
    found = reading_or_none()
    assert found
    assert found.gpus[0].processes[0] == GpuProcess(4242, "python3", 4 * GIB)
    monkeypatch.setenv("FAKE_NVML_ERROR", "12")
    assert reading_or_none() is None
