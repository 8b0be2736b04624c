"""`python -m jaxremat explain` says who holds the memory at the peak: its records, pictures, pages and exit codes."""

import contextlib
import io
import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from jaxremat.cli.command import parse_flags
from jaxremat.cli.explain import ExplainFlags, check_explain, main, with_what_fits
from jaxremat.errors import UsageError
from jaxremat.report.page import PageInput
from jaxremat.report.plot import plot_sources
from jaxremat.report.printer import ExplainPrinter, Report
from jaxremat.session.flags import RunFlags
from jaxremat.trial.details import AllocatorBytes
from jaxremat.trial.lines import from_row
from jaxremat.trial.record import ExplainRecord
from jaxremat.xla.buffers import MemoryMap
from jaxremat.xla.xprof import write_xprof
from tests.helpers import GPT, mapped
from tests.made_up_records import GIB, explained
from tests.page_data import data_of

LINE = "--model tiny --num-layers 2 --dropout 0 --vocab-size 500 --seq-len 2048 --max-seq-len 2048 --target h100-80gb"


@dataclass
class Ran:
    """What a call wrote: its text, its records, and a folder of files."""

    text: str
    records: list[ExplainRecord]
    folder: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory, h100) -> Ran:
    """One call with two policies and every output."""
    folder = tmp_path_factory.mktemp("explain")
    outputs = f"--out {folder}/rows.jsonl --plot {folder}/bars.png --xprof {folder}/xprof --page {folder}/page.html --redact"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(f"{LINE} --policy nothing dots --batch 4 --top 3 --lint {outputs}".split()) == 0
    rows = [from_row(json.loads(line)) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return Ran(out.getvalue(), [row for row in rows if isinstance(row, ExplainRecord)], folder)


@pytest.mark.full
class TestCommand:
    def test_it_says_who_holds_the_peak(self, ran):
        assert max(len(line.rstrip()) for line in ran.text.splitlines() if str(ran.folder) not in line) <= 80
        nothing, dots = ran.records
        assert (nothing.policy, dots.policy) == ("nothing", "dots")
        assert ("decoder_layer_input", 2) in [(part.label, part.num_layers) for part in nothing.held]
        assert Path(nothing.peak.source).name.split(":")[0] in ("layers.py", "loss.py")

    def test_it_lints_where_asked(self, ran):
        nothing, dots = ran.records
        assert (nothing.findings, [found.rule for found in dots.findings]) == ((), ["attention-twice"])

    def test_records_add_up(self, ran):
        for row in ran.records:
            assert row.total_bytes == sum(row.attribution.values()) == sum(row.sources.values())
            assert (row.host_bytes, row.allocator, len(row.largest)) == (0, None, 3)
            for category in set(row.attribution) - {"gaps"}:
                assert row.attribution[category] == sum(p.num_bytes for p in row.held if p.category == category)
            assert "gaps" in row.attribution
            assert row.peak.phase in ("forward", "backward", "update")

    def test_the_plot_is_a_picture(self, ran):
        pytest.importorskip("matplotlib")
        assert (ran.folder / "bars.png").read_bytes().startswith(b"\x89PNG")

    def test_xprofs_file_holds_the_program(self, ran):
        found = sorted((ran.folder / "xprof").rglob("*.xplane.pb"))
        assert [path.parent.name for path in found] == ["dots_batch_4", "nothing_batch_4"]
        for path in found:
            data = path.read_bytes()
            assert b"/host:metadata" in data
            assert b"Hlo Proto" in data
            assert b"jit_train_step(1)" in data

    def test_the_page_has_what_remat_saves(self, ran):
        text = (ran.folder / "page.html").read_text()
        nothing, dots = data_of(text)["pages"]
        assert (nothing["policy"], dots["policy"]) == ("nothing", "dots")
        assert len(dots["savings"]) >= 4  # query, key, value and out projections, and wi_0 where XLA has it apart
        assert all(num_bytes > 0 and cost_s >= 0 for _, num_bytes, cost_s in dots["savings"])
        assert sum(cost_s for _, _, cost_s in dots["savings"]) > 0
        assert str(ran.folder) not in text
        assert "loss.py" not in text

    def test_xprof_sees_the_same_peak(self, h100, tmp_path):
        """The memory viewer itself, where XProf is installed (pip install xprof): it is too heavy for the dev extra."""
        tools = pytest.importorskip("xprof.convert.raw_to_tool_data", reason="XProf isn't installed: pip install xprof")
        done = mapped(h100, replace(GPT, vocab_size=3000), "dots")
        assert done.dump
        path = str(write_xprof(tmp_path, "dots", done.dump))
        assert "memory_viewer" in tools.xspace_to_tool_names([path])
        (module,) = Path(path).parent.glob("*.hlo_proto.pb")
        options = {"module_name": module.name.removesuffix(".hlo_proto.pb"), "memory_space": "0"}
        viewer = json.loads(tools.xspace_to_tool_data([path], "memory_viewer", options)[0])
        assert round(viewer["peakHeapMib"] * 2**20) == done.memory.peak_bytes


@pytest.mark.full
def test_the_chunked_loss_is_no_remedy_for_itself(h100, capsys):
    """Batch 8 is one chunk, which is the largest buffer."""
    flags = "--model tiny --num-layers 2 --dropout 0 --vocab-size 50000 --target h100-80gb --policy nothing --batch 8 --lint"
    assert main([*flags.split(), "--loss", "chunked"]) == 0
    shown = capsys.readouterr().out
    assert "Lint: nothing found." in shown
    assert "--loss" not in shown


@pytest.mark.full  # matplotlib starts a process to find fonts
def test_a_plot_with_measured_peaks_and_many_bars(tmp_path):
    pytest.importorskip("matplotlib")
    figures = AllocatorBytes(in_use_bytes=2**20, peak_bytes=2**21, pool_bytes=2**30, largest_free_bytes=None)
    row = explained(sources={"parameters": GIB, "activations": 3 * GIB})
    plot_sources([replace(row, allocator=figures), *[row] * 4], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 10_000


FAILED = explained("none", total_bytes=None, fits=None, error="XLA rejected it", error_kind="CompileError")
TOO_LARGE = explained("nothing", 2, fits=False)


@pytest.mark.parametrize(
    ("rows", "code", "too_large"),
    [([FAILED, explained()], 1, None), ([TOO_LARGE], 3, TOO_LARGE), ([TOO_LARGE, explained()], 0, None), ([], 3, None)],
)
def test_exit_codes_and_records_as_json(rows, code, too_large, capsys):
    printer = ExplainPrinter(Report(Console(), as_json=True))
    for row in rows:
        printer.row(row)
    printer.all_done()
    assert (printer.exit_code(), printer.no_fit()) == (code, too_large)
    assert [from_row(json.loads(line)) for line in capsys.readouterr().out.splitlines()] == rows, "the records alone"


def test_the_page_of_a_step_that_does_not_fit_has_what_fits():
    """A page names the steps of the same command that fit, those of the same batch if there are any."""
    rows = [
        explained("dots", 8, fits=False),
        explained("every:2:nothing", 8, total_bytes=GIB),
        explained("nothing", 8, error="it failed when run"),
        explained("dots", 4, xla_preset="latency-hiding"),
        explained("dots", 16, fits=False),
    ]
    page = PageInput("gpt2", "dots", 8, "h100-80gb", MemoryMap((), (), (), (), (), (), (), 0, ()), seconds=(0.5, 0.25))
    pages = with_what_fits([(row, page) for row in rows])
    of_each = [[one.flags for one in page.fits_instead] for page in pages]
    thrifty = "--policy every:2:nothing"
    assert of_each == [[thrifty], [], [], [], [f"{thrifty} --batch 8", "--batch 4 --xla-preset latency-hiding"]]
    assert [(one.total_bytes, one.step_s) for one in pages[0].fits_instead] == [(GIB, 0.75)]
    assert all(not page.fits_instead for page in with_what_fits([(rows[0], page)])), "cheap changes are compiled then"


@pytest.mark.parametrize(
    "line", ["--policy auto", "--top -1", "--redact", "--mesh auto --devices 2 --batch 2", "--model tiny --seq-len 32,64"]
)
def test_what_cannot_be_meant(line):
    with pytest.raises(UsageError) as caught:
        check_explain(parse_flags(ExplainFlags, line.split()))
    flag = "--seq-len" if "--seq-len" in line else " ".join(line.split()[:2])
    assert flag.removesuffix(" -1") in caught.value.got
    assert caught.value.next_step


def test_the_plan_that_explain_needs_is_made_by_a_command():
    with pytest.raises(UsageError) as caught:
        check_explain(parse_flags(ExplainFlags, ["--policy", "auto"]))
    first, then = caught.value.next_step.split(", then ")
    assert parse_flags(RunFlags, shlex.split(first)[2:]).save_plan == Path("plan.json")
    assert check_explain(parse_flags(ExplainFlags, ["--policy", "dots"])).policies
    assert "plan:plan.json" in then


@pytest.mark.parametrize(("flag", "path"), [("--xprof", "/proc/no"), ("--page", "/no/such/folder/x.html")])
def test_where_nothing_can_be_written(flag, path, capsys):
    """It is said before anything is compiled."""
    assert main([flag, path]) == 2
    assert flag in capsys.readouterr().err
