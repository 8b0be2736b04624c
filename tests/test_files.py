"""A file is written as a whole, or stays as it was."""

import os
import threading
from pathlib import Path

import pytest

from jaxremat.errors import JaxrematError, UsageError
from jaxremat.system.files import check_writable, named_by, write_whole


def test_what_was_there_stays_when_the_disk_is_full(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    write_whole(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JaxrematError) as caught, named_by("--out", path, "make room"):
        write_whole(path, "new")
    assert f"--out {str(path)!r}" in caught.value.got
    assert "No space left on device" in caught.value.got
    assert caught.value.next_step == "make room"
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_pipe_is_only_written_to(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    found = []
    reader = threading.Thread(target=lambda: found.append(path.read_text()))
    reader.start()
    write_whole(path, "a\nb\n")
    reader.join()
    assert found == ["a\nb\n"]
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_check_leaves_alone_the_file_that_another_command_begins(tmp_path, monkeypatch):
    """It makes no file of this name, so that it removes none."""
    path = tmp_path / "rows.jsonl"

    def begin(folder: Path) -> None:
        path.write_text("a row of another command")

    monkeypatch.setattr("jaxremat.system.files.try_in", begin)
    check_writable("--out", path)
    assert path.read_text() == "a row of another command"


def test_a_file_that_cannot_be_written_is_bad_usage(tmp_path):
    with pytest.raises(UsageError) as caught:
        check_writable("--out", tmp_path)
    assert f"--out {str(tmp_path)!r}" in caught.value.got
