"""The predicted times of kernels are held against those of real GPUs: the stored profiles of `experiments/profiles`."""

import json
import math
import os
import re
import subprocess
import sys

import jax
import pytest

from experiments import kernel_times
from experiments.common import RESULTS
from experiments.profile_data import load_profile, names
from jaxremat.chips.nvidia.calibration import FILE, load_calibration
from jaxremat.chips.nvidia.gpu import bundled_names, load_gpu
from jaxremat.chips.nvidia.speed import speed_of
from jaxremat.chips.speed import CLASSES, SEVERAL_GPUS
from jaxremat.mesh.axes import MeshShape


@pytest.fixture(scope="module")
def profiles():
    return [load_profile(name) for name in names()]


@pytest.mark.full
def test_each_profile_is_predicted(profiles):
    """The sum of all kernels within 7 %, and each class of more than 2 % of the time within 25 %.

    A generation has the mean of its profiles, and tables of single kernels, so that no profile is predicted by construction.
    """
    for profile in profiles:
        whole, *classes = kernel_times.rows_of(profile)
        assert whole["predicted_s"] == pytest.approx(whole["measured_s"], rel=0.07)
        large = [row for row in classes if row["measured_s"] > 0.02 * whole["measured_s"]]
        assert len(large) >= 4
        for row in large:
            assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=0.25), (profile.name, row["kernel_class"])
        assert sum(row["measured_s"] for row in classes) == pytest.approx(whole["measured_s"])


@pytest.mark.full
def test_one_profile_predicts_another(profiles):
    """Fitted on one and tried on the other, the sum of the classes of both is within the shipped error."""
    rows = kernel_times.crossed(profiles)
    sums = [row for row in rows if row["kernel_class"] is None]
    assert len(sums) == len(profiles) * (len(profiles) - 1) > 0
    for row in sums:
        assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=load_calibration().error)
    assert load_calibration().error <= 0.16


def test_the_interval_of_several_gpus_is_that_of_the_published_steps():
    rows = json.loads((RESULTS / "h100-80gb/published.json").read_text())["steps"]
    longer = [100 * row["longer"] for row in rows]
    assert [100 * share for share in SEVERAL_GPUS] == pytest.approx([math.floor(min(longer)), math.ceil(max(longer))])


@pytest.mark.parametrize(("num_devices", "interval"), [(None, (-0.16, 0.16)), (1, (-0.16, 0.16)), (8, SEVERAL_GPUS)])
def test_the_number_of_devices_decides_the_interval(num_devices, interval):
    mesh = MeshShape(fsdp=num_devices) if num_devices else None
    speed = speed_of(load_gpu("h100-80gb")[1], mesh)
    assert speed
    assert speed.interval == interval


@pytest.mark.full
def test_most_of_a_profile_is_compared(profiles):
    """Collectives and what they slow down are left out, each with its reason."""
    for profile in profiles:
        apart = [one for one in profile.kernels if one.left_out not in ("a collective", *profile.about["left_out"].values())]
        kept_s, all_s = (sum(one.measured_s * one.num_launches for one in some) for some in (profile.kept, apart))
        assert kept_s > 0.9 * all_s
        assert not any(one.kernel.name.startswith(("all-", "reduce-scatter")) for one in profile.kept)
        assert {one.kernel.kernel_class for one in profile.kept} <= {*CLASSES}


@pytest.mark.full
def test_the_shipped_shares_are_those_of_the_profiles(profiles):
    assert FILE.read_text() == kernel_times.calibration_text(profiles)


def test_every_gpu_has_a_calibration():
    for name in bundled_names():
        _, gpu = load_gpu(name)
        calibration = load_calibration(gpu.compute_capability)
        shares = [*calibration.flops_share, *calibration.bandwidth_share]
        assert all(0 < share <= 1 for _, share in shares)
    own, other = load_calibration((9, 0)), load_calibration((12, 0))
    assert "h100-maxtext" in own.source
    assert other == load_calibration() != own


@pytest.mark.full
def test_json_has_a_record_for_each_profile_and_each_class(capsys):
    assert kernel_times.main(["--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["profile"] for row in rows if "kernel_class" not in row} == {*names()}
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in rows)
    assert {"matmul", "thin matmul", "row reduction", "transpose", "elementwise"} <= {
        row.get("kernel_class") for row in rows
    }


@pytest.mark.full
def test_the_command_files_a_table_and_a_plot(tmp_path, capsys):
    assert kernel_times.main(["--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines()[:14])) <= 80
    assert all(name in out for name in names())
    assert (tmp_path / "kernel_times" / "kernel_times.png").stat().st_size > 10_000
    filed = json.loads((tmp_path / "kernel_times" / "kernel_times.json").read_text())
    assert filed["rows"]


PROGRAM = """
import jax, jax.numpy as jnp, jaxremat
xs = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.bfloat16)
x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
loss = lambda ws, x: jnp.sum(jax.lax.scan(lambda x, w: (jax.nn.gelu(x @ w), None), x, ws)[0].astype(jnp.float32))
jaxremat.lower_and_compile(jax.grad(loss), (xs, x), "h100-80gb")
"""


@pytest.mark.full
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="newer versions of XLA dump no PTX of what they compile ahead")
def test_a_thread_writes_four_elements_of_a_slice(h100, tmp_path):
    """In the machine code of jax 0.10.2. In 2024 it was one, which is why the profiles of that year say so."""
    flags = f"--xla_dump_to={tmp_path} --xla_backend_optimization_level=3"  # as kernels are that run
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment, capture_output=True, timeout=300)
    texts = [path.read_text() for path in tmp_path.glob("*.ptx")]
    stores = [
        re.findall(r"st\.global(?:\.v(\d))?\.b(\d+)", text) for text in texts if ".entry loop_dynamic_update_slice" in text
    ]
    assert stores, "XLA made kernels that write slices"
    for found in stores:
        assert {int(number or 1) * int(bits) // 16 for number, bits in found} == {load_calibration().elements_per_thread}
    of_profiles = {name: load_profile(name).about for name in names()}
    assert {name for name, about in of_profiles.items() if about["elements_per_thread"] == 1} == {
        name for name, about in of_profiles.items() if "2024" in str(about["recorded"])
    }


def test_a_generation_without_tables_is_like_the_one_it_follows():
    """A B300 has the matmuls of a B200, and no more: its steps aren't half as long for want of a table."""
    b200, b300 = (speed_of(load_gpu(name)[1], MeshShape(fsdp=8)) for name in ("b200", "b300"))
    assert b200 is not None
    assert b200.tables is not None
    assert b300 is not None
    assert b300.tables is not None
    assert b300.tables.peak_flops == b200.tables.peak_flops
    assert [grid.rates for grid in b300.tables.matmuls.values()] == [grid.rates for grid in b200.tables.matmuls.values()]
    assert (b300.training_share, b300.beside_collective) == (b200.training_share, b200.beside_collective) != (1.0, 1.0)
