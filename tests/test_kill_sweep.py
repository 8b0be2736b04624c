"""Sweeps of real compiles, killed at random moments and resumed; the same with a light child is in `tests/test_sweep.py`."""

from experiments.kill_sweep import kill_sweeps, main


def test_sweeps_of_real_compiles(h100):
    """20 kills: nothing lost, nothing doubled, nothing left behind, and in the end the same table."""
    found = kill_sweeps(20, seed=6, real=True)
    assert found.faults == []
    assert found.kills == 20


def test_the_command(capsys):
    assert main(["--kills", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 faults"
