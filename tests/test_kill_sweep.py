"""A sweep of real compiles that is killed at random moments and resumed loses nothing and does nothing twice.

The same with a light child in place of the compiles is in `tests/test_sweep.py`.
"""

import pytest

from experiments.kill_sweep import kill_sweeps, main


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, 20])
def test_sweeps_of_real_compiles(kills, h100):
    """Nothing lost, nothing doubled, nothing left behind, and in the end the same table."""
    found = kill_sweeps(kills, seed=6, real=True)
    assert found.faults == []
    assert found.kills == kills


def test_the_command(capsys):
    assert main(["--kills", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 faults"
