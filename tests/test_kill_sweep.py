"""Sweeps that are killed at random moments and resumed lose nothing, and do nothing twice.

A light child is in place of the compiles. `python -m experiments.kill_sweep --real` does the same with compiles.
"""

import pytest

from experiments.kill_sweep import Found, kill_sweeps, main


@pytest.mark.full
def test_sweeps_are_killed_and_resumed():
    """Nothing lost, nothing doubled, nothing left behind, and in the end the same table."""
    found = kill_sweeps(8, seed=6)
    assert found.faults == []
    assert found.kills == 8
    assert len({code.split()[0] for code in found.codes}) > 1, "several signals"
    assert found.sweeps < 8, "some were resumed"


@pytest.mark.parametrize(("faults", "code"), [([], 0), (["SIGKILL: exit code 3"], 1)])
def test_the_command(faults, code, monkeypatch, capsys):
    monkeypatch.setattr("experiments.kill_sweep.kill_sweeps", lambda kills, seed, real: Found(kills, 1, faults=faults))
    assert main(["--kills", "5"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split()[0] == str(len(faults))
    assert lines[1:-1] == faults
