"""The table of faults can be used as it is, and a fault is caught where a test fails with it and only there."""

import ast
import json

import pytest

from experiments import faults
from experiments.faults import ROOT, TABLE, main, read_faults

FAULTS = read_faults(TABLE)


def test_every_fault_has_a_name():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_made(fault):
    """Its text is in its file once, the file can still be read with it, and its tests are there."""
    assert not fault.is_stale(ROOT)
    assert fault.becomes != fault.text
    if fault.file.endswith(".py"):
        ast.parse((ROOT / fault.file).read_text().replace(fault.text, fault.becomes))
    for test in fault.tests:
        file, *names = test.split("::")
        text = (ROOT / file).read_text()
        assert all(name.partition("[")[0] in text for name in names)


def test_there_is_no_such_fault(tmp_path, capsys):
    assert main(["--faults", f"{FAULTS[0].name}s", "--out", str(tmp_path)]) == 2
    assert FAULTS[0].name in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


SIZES = """
def gib(num_bytes):
    return num_bytes / 2**30

def mib(num_bytes):
    return num_bytes / 2**20
"""
TESTS = """
import sizes

def test_of_nothing():
    assert True

def test_gib():
    assert sizes.gib(2**30) == 1
"""
MADE = {
    "caught": ("2**30", "1e9", "test_sizes.py"),
    "missed": ("2**20", "1e6", "test_sizes.py"),
    "stale": ("num_bytes", "size", "test_sizes.py"),
    "broken": ("2**30", "2**", "test_sizes.py"),
    "misnamed": ("2**30", "1e9", "test_sizes.py::test_tib"),
}
BLOCK = """
[[fault]]
name = "{}"
kind = "made up"
file = "sizes.py"
text = "{}"
becomes = "{}"
tests = ["{}"]
"""


@pytest.mark.full
def test_what_comes_of_a_fault(tmp_path, monkeypatch):
    project, table = tmp_path / "project", tmp_path / "faults.toml"
    project.mkdir()
    (project / "sizes.py").write_text(SIZES)
    (project / "test_sizes.py").write_text(TESTS)
    table.write_text("".join(BLOCK.format(name, *parts) for name, parts in MADE.items()))
    argv = ["--table", str(table), "--root", str(project), "--out", str(tmp_path)]
    assert main([*argv, "--jobs", "2"]) == 1
    rows = {row["name"]: row for row in json.loads((tmp_path / "faults/faults.json").read_text())["faults"]}
    assert {name: (row["outcome"], row.get("test")) for name, row in rows.items()} == {
        "caught": ("caught", "test_sizes::test_gib"),
        "missed": ("missed", None),
        "stale": ("stale", None),
        "broken": ("error", None),
        "misnamed": ("error", None),
    }
    assert (project / "sizes.py").read_text() == SIZES
    monkeypatch.setattr(faults, "run_tests", lambda *_: pytest.fail("its row is filed"))
    assert main([*argv, "--faults", "caught"]) == 0
