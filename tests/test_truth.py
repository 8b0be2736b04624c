"""XLA's predictions beside a device's measurements, both made up: tables, ranks and memory outside the pool."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jaxremat.machine.nvml import Gpu, GpuProcess, Reading
from jaxremat.machine.outside import Outside, outside, reading_or_none
from jaxremat.report.interval import predicted_column
from jaxremat.report.printer import Printer, Report
from jaxremat.report.table import attached_sentences, largest_sentence
from jaxremat.trial.details import PredictedStep
from jaxremat.trial.lines import from_row, to_json
from jaxremat.trial.ranks import rank_correlation, rank_records
from jaxremat.trial.record import LargestBatchRecord, TrialRecord

GIB = 2**30


def predicted(step_s: float) -> PredictedStep:
    return PredictedStep(step_s, *[0.0] * 5, *[0] * 5)


def row(policy="dots", batch=8, *, step_s: float | None = 0.01, predicted_s: float | None = 0.01, **more) -> TrialRecord:
    """A measured trial on an attached GPU, or a predicted one without `step_s`."""
    known = dict(record="trial", model="gpt2", num_params=1, requested_policy=policy, target="nvidia-h200", seq_len=1024)
    known |= dict(loss="full", optimizer="adamw", attention="cudnn", config={}, xla_flags=None, versions={}, num_compiles=4)
    known |= dict(
        total_bytes=99 * GIB, limit_bytes=100 * GIB, budget_bytes=100 * GIB, fits=True, global_batch=batch, mfu=0.4
    )
    shown = dict(ran="ok", measured_peak_bytes=100 * GIB, measured_over_total_percent=1.0101) if step_s else {}
    times = dict(step_s=step_s or predicted_s, step_source="measured" if step_s else "predicted")
    rate = dict(tokens_per_s=1024 * batch / (step_s or predicted_s or 1), predicted=predicted_s and predicted(predicted_s))
    return TrialRecord(**known | shown | times | rate | more, policy=policy, batch=batch)


def search(policy="dots", **more) -> LargestBatchRecord:
    known = dict(model="gpt2", requested_policy=policy, policy=policy, target="nvidia-h200", seq_len=1024, max_batch=4096)
    known |= dict(largest_batch=128, largest_batch_total_bytes=99 * GIB, next_batch=129, budget_bytes=100 * GIB)
    return LargestBatchRecord(**known | dict(next_batch_total_bytes=101 * GIB, num_compiles=4, versions={}) | more)


def shown(*policies: list, as_json: bool = False, capsys=None) -> tuple[str, int]:
    """What a run prints of the records of each policy, and its exit code."""
    printer = Printer(Report(Console(width=80, file=sys.stdout), as_json=as_json))
    for records in policies:
        for record in records:
            printer.row(record)
        printer.policy_done()
    printer.all_done("nvidia-h200")
    return capsys.readouterr().out, printer.exit_code()


@pytest.mark.parametrize("host", [None, 12 * GIB])
def test_side_by_side_within_80_columns(host, capsys):
    out, code = shown(
        [
            row(batch=4, record="probe", step_s=None, predicted_s=0.02, host_temp_bytes=host),
            row(batch=128, step_s=1.2345, predicted_s=1.3, host_temp_bytes=host, accumulate=16),
            row(batch=129, step_s=None, predicted_s=1.4, host_temp_bytes=host, fits=False, ran="oom", ran_error="x"),
            search(ran="ok", next_ran="oom"),
        ],
        capsys=capsys,
    )
    cells = [line.split() for line in out.splitlines()]
    more = ["12.00"] if host else []
    mfu = [] if host else ["40.0%"]
    titles = ["batch", "total", "peak", "differs", *(["host"] if host else []), "fits", "ms", "ms", "tokens/s"]
    assert [*titles, *(["MFU"] if mfu else [])] in cells
    assert ["measured", "predicted"] in cells
    assert ["4", "99.00", "-", "-", *more, "yes", "-", "20.0", "-", *(["-"] if mfu else [])] in cells
    assert ["16", "x", "128", "99.00", "100.00", "+1.0%", *more, "yes", "1,234.5", "1,300.0", "106,174", *mfu] in cells
    assert ["129", "99.00", "-", "-", *more, "oom", "-", "1,400.0", "-", *(["-"] if mfu else [])] in cells
    assert max(map(len, out.splitlines())) <= 80
    said = " ".join(out.split())
    assert "Both were run, each in a fresh process: 128 ran, 129 ran out of memory." in said
    assert "Step times are measured: median over real steps on this machine; predicted: from the compiled kernels," in said
    assert "Nothing was run" not in said
    assert code == 0, "that the next batch ran out of memory is the proof, and no failure"


@pytest.mark.parametrize(
    ("intervals", "shown"),
    [
        ([None], "predicted ms"),
        ([(-0.12, 0.12), None], "predicted ms ±12%"),
        ([(-0.12, 0.12), (-0.06, 0.36)], "predicted ms -12..+36%"),
    ],
)
def test_the_widest_interval_heads_the_times(intervals, shown):
    title = predicted_column(intervals)
    assert title.split() == shown.split()
    assert max(map(len, title.splitlines())) <= len("predicted"), "no column is wider for it"


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"error": "RESOURCE_EXHAUSTED: x", "error_kind": "oom", "ran": "oom"}, 1),  # a batch that was asked for
        ({"fits": False, "ran": None}, 3),
        ({"fits": True, "ran": "oom"}, 3),
    ],
)
def test_exit_codes(more, code, capsys):
    _, found = shown([row(step_s=None, **more)], capsys=capsys)
    assert found == code


def test_where_nothing_ran_no_bytes_are_blamed(capsys):
    failed = row(batch=1, step_s=None, ran="oom", ran_error="x")
    out, code = shown(
        [failed, search(largest_batch=0, compiled_largest_batch=1, next_batch=1, next_ran="oom")], capsys=capsys
    )
    assert "but none ran: each ran out of memory." in " ".join(out.split())
    assert "temporaries" not in out
    assert code == 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "batch 129 needs 101.00 GiB."),
        ({"ran": "ok", "next_ran": "oom"}, "Both were run, each in a fresh process: 128 ran, 129 ran out of memory."),
        ({"ran": "ok", "next_ran": "ok"}, "for it the compiled bytes were pessimistic, by at least 1.00 GiB."),
        ({"ran": "ok", "next_ran": "timeout"}, "128 ran in a fresh process; 129 ended otherwise there: timeout."),
        ({"ran": "ok", "next_batch": None}, "larger ones weren't tried (--max-batch 4096). It ran in a fresh process."),
        (
            {"ran": "ok", "next_ran": "oom", "compiled_largest_batch": 130},
            "The largest batch that ran under dots is 128: 99.00 GiB of 100.00 GiB; batch 129 ran out of memory. By compiled "
            "bytes 130 fits: they were optimistic.",
        ),
    ],
)
def test_what_came_of_the_runs_is_in_the_sentence(more, said):
    assert largest_sentence(search(**more)).endswith(said)


def test_outside_is_told_apart():
    process = row(outside_bytes=GIB // 2, outside_source="process")
    card = row(batch=9, outside_bytes=3 * GIB // 4, outside_source="card")
    what = "Outside the allocator's pool (CUDA context, libraries' workspaces): "
    assert attached_sentences([process])[1:] == [f"{what}0.500 GiB, by NVML's count of the process."]
    assert attached_sentences([process, card])[1:] == [
        f"{what}0.500 GiB to 0.750 GiB, by the rise of the whole card's use, as NVML doesn't tell the process's own."
    ]
    assert attached_sentences([row()])[1:] == []
    assert attached_sentences([row(step_s=None)]) == []


def test_rank_correlation():
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert rank_correlation([(1, 30), (2, 20), (3, 10)]) == pytest.approx(-1)
    assert rank_correlation([(1, 2), (2, 3)]) is None
    assert rank_correlation([(1, 2), (1, 3), (1, 4)]) is None


def test_ranks_over_policies(capsys):
    """In a sentence under the policies' table and in a record; of seconds per sequence, as batches differ."""
    policies = [
        row("none", 4, step_s=0.010, predicted_s=0.008),
        row("dots", 8, step_s=0.018, predicted_s=0.014),
        row("nothing", 16, step_s=0.048, predicted_s=0.027),
    ]
    out, _ = shown(*([one] for one in policies), capsys=capsys)
    said = "measured step times of 3 policies, each at its own batch, per sequence: Spearman's rank correlation"
    assert f"{said} -0.50." in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    out, _ = shown(*([one] for one in policies), as_json=True, capsys=capsys)
    record = json.loads(out.splitlines()[-1])
    assert record["record"] == "rank_correlation"
    assert record["policies"] == ["none", "dots", "nothing"]
    assert (record["batch"], record["spearman"]) == (None, pytest.approx(-0.5))
    assert json.loads(to_json(from_row(record))) == record


def test_ranks_at_each_batch():
    rows = [
        row(p, b, step_s=s * b, predicted_s=s) for b in (4, 8) for p, s in (("none", 1.0), ("dots", 2.0), ("nothing", 3.0))
    ]
    rows[-1] = dataclasses.replace(rows[-1], step_s=0.5)
    assert [(found.batch, found.spearman) for found in rank_records(rows)] == [
        (4, pytest.approx(1)),
        (8, pytest.approx(-0.5)),
    ]


@pytest.mark.parametrize("left_out", [{"step_s": None}, {"predicted_s": None}, {"error": "x"}, {"fits": False}])
def test_only_what_was_measured_and_predicted_is_ranked(left_out):
    rows = [row("none", step_s=1.0, predicted_s=1.0), row("dots", step_s=2.0, predicted_s=2.0)]
    assert rank_records([*rows, row("nothing", **{"step_s": 3.0, "predicted_s": 3.0} | left_out)]) == []
    assert len(rank_records([*rows, row("nothing", step_s=3.0, predicted_s=3.0)])) == 1


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
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_nvml"))
    found = reading_or_none()
    assert found
    assert found.gpus[0].processes[0] == GpuProcess(4242, "python3", 4 * GIB)
    monkeypatch.setenv("FAKE_NVML_ERROR", "12")
    assert reading_or_none() is None
