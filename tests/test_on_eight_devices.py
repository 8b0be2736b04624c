"""A step on 8 devices of the CPU computes what it computes on one, under every policy."""

import json
import os
import subprocess
import sys

import pytest

from jaxremat.search.budget import make_budget


@pytest.mark.full
@pytest.mark.any_jax
def test_a_mesh_changes_neither_the_loss_nor_the_gradients():
    """Within 1e-5 of one device, in float32. All policies that recompute something agree bit for bit.

    Without a checkpoint in a scan, XLA adds up in another order, so that `none` differs in the last bits there.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.eight_devices"],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    number, *rows = map(json.loads, done.stdout.splitlines())
    assert len(rows) == number > 1
    for row in rows:
        assert row["to_one_device"] < 1e-5, row
        assert row["to_first_policy"] <= (1e-6 if row["policy"] == "none" and row["scan_layers"] else 0), row


def test_devices_of_the_cpu_share_its_memory():
    one, eight = (make_budget(requested_bytes=None, mem_fraction=0.75, memory_bytes=None, num_devices=n) for n in (1, 8))
    assert "8 devices" in eight.terms
    assert "devices" not in one.terms
    assert eight.num_bytes < one.num_bytes / 4
