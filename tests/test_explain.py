"""`python -m jaxremat.explain` says who holds the memory at the peak: its table, records, pictures and exit codes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from jaxremat.explain import main
from jaxremat.report.explain import allocator_sentence, rows_table
from jaxremat.report.plot import plot_sources
from jaxremat.report.printer import ExplainPrinter, Report
from jaxremat.report.table import batch_sentence
from jaxremat.trial.details import AllocatorBytes
from jaxremat.trial.lines import from_row
from tests.helpers import GPT, mapped

LINE = "--model tiny --num-layers 2 --vocab-size 500 --seq-len 2048 --max-seq-len 2048 --target h100-80gb"


@pytest.fixture(scope="module")
def ran(tmp_path_factory, h100):
    """One call with two policies and every output."""
    folder = tmp_path_factory.mktemp("explain")
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        outputs = f"--out {folder}/rows.jsonl --plot {folder}/bars.png --xprof {folder}/xprof"
        code = main(f"{LINE} --policy nothing dots --batch 4 --top 3 --lint {outputs}".split())
    records = [from_row(json.loads(line)) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return code, out.getvalue(), records, folder


def test_it_says_who_holds_the_peak(ran):
    code, out, records, _ = ran
    assert code == 0
    for words in (
        "who holds the peak: nothing, batch 4",
        "decoder_layer_input x 2",
        "gaps",
        "total, XLA's own",
        "side by side",
    ):
        assert words in out
    assert "The peak is in the" in out
    assert "layers.py:" in out or "loss.py:" in out
    assert max(len(line.rstrip()) for line in out.splitlines() if "wrote" not in line) <= 80
    assert [row.policy for row in records] == ["nothing", "dots"]


def test_it_lints_where_asked(ran):
    _, out, (nothing, dots), _ = ran
    assert nothing.findings == ()
    assert "Lint: nothing found." in out
    (found,) = dots.findings
    assert found.rule == "attention-twice"
    assert "lint: dots, batch 4" in out
    assert f"-> {found.remedy}" in out


def test_records_add_up(ran):
    for row in ran[2]:
        assert row.total_bytes == sum(row.attribution.values()) == sum(row.sources.values())
        assert row.host_bytes == 0
        assert row.allocator is None
        assert len(row.largest) == 3
        assert "gaps" in row.attribution
        for category in set(row.attribution) - {"gaps"}:
            assert row.attribution[category] == sum(p.num_bytes for p in row.held if p.category == category)
        assert row.peak.phase in ("forward", "backward", "update")


def test_the_plot_is_a_picture(ran):
    pytest.importorskip("matplotlib")
    assert (ran[3] / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_with_measured_peaks_and_many_bars(ran, tmp_path):
    pytest.importorskip("matplotlib")
    figures = AllocatorBytes(in_use_bytes=2**20, peak_bytes=2**21, pool_bytes=2**30, largest_free_bytes=None)
    rows = [replace(ran[2][0], allocator=figures), *ran[2], *ran[2]]
    plot_sources(rows, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 10_000
    console = Console(width=100, record=True, file=(tmp_path / "text").open("w"))
    console.print(rows_table(rows))
    assert "measured" in console.export_text()
    assert allocator_sentence(rows[0]) == (
        "Measured by the allocator after the step: 0.001 GiB in use, 0.002 GiB peak, 1.00 GiB pool."
    )
    assert allocator_sentence(rows[1]) == ""


def test_xprofs_file_holds_the_program(ran):
    found = sorted((ran[3] / "xprof").rglob("*.xplane.pb"))
    assert [path.parent.name for path in found] == ["dots_batch_4", "nothing_batch_4"]
    for path in found:
        data = path.read_bytes()
        assert b"/host:metadata" in data
        assert b"Hlo Proto" in data
        assert b"jit_train_step(1)" in data


def test_xprof_sees_the_same_peak(h100, tmp_path):
    """The memory viewer itself, where XProf is installed (pip install xprof): it is too heavy for the dev extra."""
    tools = pytest.importorskip("xprof.convert.raw_to_tool_data", reason="XProf isn't installed: pip install xprof")
    from jaxremat.xla.xprof import write_xprof

    done = mapped(h100, replace(GPT, vocab_size=3000), "dots")
    assert done.dump
    path = str(write_xprof(tmp_path, "dots", done.dump))
    assert "memory_viewer" in tools.xspace_to_tool_names([path])
    (module,) = Path(path).parent.glob("*.hlo_proto.pb")
    options = {"module_name": module.name.removesuffix(".hlo_proto.pb"), "memory_space": "0"}
    viewer = json.loads(tools.xspace_to_tool_data([path], "memory_viewer", options)[0])
    assert round(viewer["peakHeapMib"] * 2**20) == done.memory.peak_bytes


def test_json_is_records_alone(h100, capsys):
    assert main(f"{LINE} --policy nothing --batch 2 --json --budget 1KiB".split()) == 3
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (row["record"], row["batch"], row["fits"]) == ("explain", 2, False)
    assert sum(row["attribution"].values()) == row["total_bytes"]


def test_a_failure_is_a_row(ran, capsys):
    failed = replace(
        ran[2][0], total_bytes=None, attribution=None, sources=None, error="XLA refused", error_kind="CompileError"
    )
    printer = ExplainPrinter(Report(Console(width=80)))
    printer.row(failed)
    printer.row(ran[2][1])
    printer.all_done()
    assert batch_sentence(failed) == "Batch 4 under nothing failed: XLA refused"
    assert "Batch 4 under nothing failed: XLA refused" in capsys.readouterr().out
    assert printer.exit_code() == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--policy auto",
            "jaxremat: --policy auto is planned by jaxremat.run, and explain takes policies. Next: python -m jaxremat.run "
            "--policy auto --save-plan plan.json, then explain --policy plan:plan.json.\n",
        ),
        ("--top -1", "jaxremat: --top got -1. Allowed: 0 or more. Next: leave it out for the default.\n"),
        (
            "--xprof /proc/no",
            "jaxremat: --xprof '/proc/no' cannot be written: No such file or directory. Next: give a folder that is yours.\n",
        ),
    ],
)
def test_bad_input_is_one_message(line, message, capsys):
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", message)
