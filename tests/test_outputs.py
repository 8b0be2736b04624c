"""Folders without permission and full disks: each flag that names an output is one error, and nothing is left behind."""

import errno
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
from rich.console import Console

from jaxremat.chips.nvidia.chip import NVIDIA
from jaxremat.cli.command import parse_flags
from jaxremat.cli.explain import ExplainFlags
from jaxremat.cli.train import TrainRunFlags
from jaxremat.errors import CompileError, JaxrematError, UsageError
from jaxremat.report.page import PageInput, write_page
from jaxremat.report.plot import save_picture
from jaxremat.report.printer import ExplainPrinter, Printer, Report
from jaxremat.report.sweep import Line, write_csv
from jaxremat.session.flags import RecommendFlags, RunFlags, SweepFlags
from jaxremat.system.files import FOLDERS, cache_folder, check_outputs, check_writable, named_files
from jaxremat.trial.headroom import learn
from jaxremat.trial.plan_file import save_plan
from jaxremat.trial.store import Store
from jaxremat.trial.task import Task
from jaxremat.trial.workers import Workers
from jaxremat.xla import compile as compiling
from jaxremat.xla.dump import Dump, read_dump
from jaxremat.xla.refusal import explained as refusal_of
from jaxremat.xla.xprof import write_xprof
from tests.made_up_records import explained, measured, plan, record, step
from tests.memory_maps import scanned

OUTPUTS = [
    *((RunFlags, flag) for flag in ("--out", "--save-plan", "--plot", "--dump-target")),
    *((SweepFlags, flag) for flag in ("--out", "--csv", "--submit")),
    *((ExplainFlags, flag) for flag in ("--out", "--plot", "--page", "--xprof")),
    *((RecommendFlags, "--out"), (TrainRunFlags, "--run-dir")),
]
each_output = pytest.mark.parametrize(("kind", "flag"), OUTPUTS, ids=lambda value: getattr(value, "__name__", value))


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A folder with a file of one's own, in which nothing else can be written. Root is another user meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        outside, folder = Path(name), Path(name, "theirs")
        outside.chmod(0o755)
        folder.mkdir()
        (folder / "mine").write_text("")
        (folder / "mine").chmod(0o666)
        folder.chmod(0o555)
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)
        yield folder
        os.seteuid(before)
        folder.chmod(0o755)


@functools.cache
def flags_with(kind: type, flag: str) -> Any:
    others = ["--out", "/dev/null"] if kind is SweepFlags and flag != "--out" else []
    return parse_flags(kind, [flag, "/dev/null", *others])


def check(kind: type, flag: str, path: Path) -> None:
    """Checks the outputs of a command whose `flag` names `path`."""
    check_outputs(replace(flags_with(kind, flag), **{flag.removeprefix("--").replace("-", "_"): path}))


@each_output
def test_a_folder_of_others_is_one_error_before_anything_is_computed(kind, flag, theirs):
    for path in (theirs / "new", theirs / "new" / "deeper", theirs / "mine" / "x", Path("/proc/no")):
        with pytest.raises(UsageError) as caught:
            check(kind, flag, path)
        assert f"{flag} {str(path)!r}" in caught.value.got
        assert caught.value.next_step
    assert os.listdir(theirs) == ["mine"]
    assert os.listdir(theirs.parent) == ["theirs"]


@each_output
def test_what_can_be_written_is_left_as_it_is(kind, flag, tmp_path):
    """A new file, a file, a new folder in a new one, a link to nothing."""
    (tmp_path / "mine").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    places = ("new", "new/deeper") if flag in FOLDERS else ("new", "mine", "link")
    for place in places:
        check(kind, flag, tmp_path / place)
    assert sorted(os.listdir(tmp_path)) == ["link", "mine"]
    assert (tmp_path / "mine").read_text() == "old"
    assert os.readlink(tmp_path / "link") == str(tmp_path / "target")


def test_to_a_file_in_a_folder_of_others_is_only_appended(theirs):
    check_writable("--out", theirs / "mine")
    with Store(theirs / "mine") as store:
        store.append([record()])
    with pytest.raises(UsageError):
        check_writable("--csv", theirs / "mine")  # another file takes its place


def test_a_pipe_is_neither_waited_for_nor_ended(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_writable("--csv", tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)
    check_writable("--csv", tmp_path / "pipe")
    os.write(writer, b"a")
    assert os.read(reader, 2) == b"a"
    os.close(writer)
    os.close(reader)


def test_a_full_disk_is_said_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=12_345 if path == tmp_path else -1))
    for flag in ("--csv", "--xprof"):
        with pytest.raises(UsageError) as caught:
            check_writable(flag, tmp_path / "new")
        assert flag in caught.value.got
        assert "12,345" in caught.value.cause
    assert os.listdir(tmp_path) == []


def test_temporary_files_on_a_full_disk(tmp_path, monkeypatch):
    """Before anything is computed, and after a compile whose dump XLA cut short without a word."""
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(UsageError) as caught:
        check_outputs(parse_flags(RunFlags, []))
    assert "TMPDIR" in caught.value.next_step
    with pytest.raises(JaxrematError) as dumped:
        read_dump(tmp_path)
    assert str(tmp_path) in dumped.value.got
    assert "bytes" in dumped.value.cause
    assert "TMPDIR" in dumped.value.next_step
    target: Any = SimpleNamespace(kind="deviceless", name="h100-80gb", chip=NVIDIA)
    of_xla = {errno.ENOSPC: "TMPDIR", errno.ENOENT: "TMPDIR", errno.EACCES: "TMPDIR", errno.EMFILE: "ulimit"}
    for number, remedy in of_xla.items():
        refused = refusal_of(RuntimeError(f"RESOURCE_EXHAUSTED: /tmp/tempfile-vm-5d0a; {os.strerror(number)}"), target)
        assert not isinstance(refused, CompileError), "it says nothing of the step"
        assert "/tmp/tempfile-vm-5d0a" in refused.got
        assert refused.cause
        assert remedy in refused.next_step


def test_a_trial_whose_files_find_no_room_is_no_fault_of_stdout(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxremat.trial.workers.Processes", lambda: SimpleNamespace(folder=tmp_path))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(JaxrematError) as caught:
        Workers(["true"]).start(Task({}), timeout_s=1)
    assert str(tmp_path) in caught.value.got
    assert "TMPDIR" in caught.value.next_step


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def dumped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes a made-up description of a target."""

    def compiled(function, args, target, *, options):
        Path(options["xla_dump_to"], "x.gpu_target_config.pbtxt").write_text("gpu_device_info")

    monkeypatch.setattr(compiling, "lower_and_compile", compiled)
    compiling.dump_target(None, path)  # pyright: ignore[reportArgumentType]


class Picture:
    """A figure of matplotlib, which starts a process when it is imported."""

    def savefig(self, file: BinaryIO, **_: object) -> None:
        file.write(b"picture")


LINE = Line(SimpleNamespace(key="k"), "ok", (step(),))  # pyright: ignore[reportArgumentType]
PAGE = PageInput(title="m", policy="dots", batch=1, target="t", memory=scanned())
WRITERS: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "--save-plan": lambda path, patch: save_plan(path, plan()),
    "--csv": lambda path, patch: write_csv([LINE], path),
    "--page": lambda path, patch: write_page(path, [PAGE]),
    "--plot": lambda path, patch: save_picture(Picture(), path),
    "--xprof": lambda path, patch: write_xprof(path, "dots", Dump("HloModule m", "", "", b"proto")),
    "--dump-target": dumped,
}


@pytest.mark.parametrize("flag", WRITERS)
def test_a_full_disk_is_one_error_and_no_part_stays(flag, tmp_path, monkeypatch):
    """What was in the file stays."""
    path = tmp_path / "here"
    if flag not in FOLDERS:
        path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(JaxrematError) as caught:
            WRITERS[flag](path, monkeypatch)
    assert caught.value.got.startswith(f"{flag} '{path}")
    assert f"{os.strerror(errno.ENOSPC)}" in caught.value.got
    assert "bytes" in caught.value.cause
    assert caught.value.next_step
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == ([] if flag in FOLDERS else [path])
    if flag not in FOLDERS:
        assert path.read_text() == "old"
    WRITERS[flag](path, monkeypatch)
    assert all(found.read_bytes() not in (b"", b"old") for found in tmp_path.rglob("*") if found.is_file())


def test_what_was_computed_is_printed_where_the_disk_is_full(capsys):
    """Tables of what couldn't be appended to --out, or saved with --save-plan."""

    def fails(plan):
        raise JaxrematError("--save-plan")

    with Store(Path("/dev/full")) as store:
        report = Report(Console(width=100), out=store)
        with pytest.raises(JaxrematError):
            ExplainPrinter(report).row(explained(policy="every:2+dots", total_bytes=None, error="refused"))
        assert "every:2+dots" in capsys.readouterr().out
        printer = Printer(report)
        with pytest.raises(JaxrematError):
            printer.row(measured())
        printer.policy_done()
        assert "99.00" in capsys.readouterr().out
    printer = Printer(Report(Console(width=100)), on_plan=fails)
    printer.row(plan())
    printer.row(step("auto", 8))
    with pytest.raises(JaxrematError):
        printer.policy_done()
    assert "10.00" in capsys.readouterr().out


def test_the_cache_of_a_user_without_a_home(monkeypatch):
    """Nothing is found there, and what can't be written is a note."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert not cache_folder().exists()
    monkeypatch.setattr(Path, "mkdir", full)
    assert str(cache_folder()) in learn([measured()])


def test_each_flag_that_names_an_output_is_here():
    """A new flag of a command comes with a case above."""
    for kind in (RunFlags, SweepFlags, ExplainFlags, RecommendFlags, TrainRunFlags):
        known = {flag for of, flag in OUTPUTS if of is kind}
        paths = {flag: Path("/dev/null") for flag in known}
        flags = parse_flags(kind, [word for flag, path in paths.items() for word in (flag, str(path))])
        assert {flag for flag, _ in named_files(flags)[0]} == known
