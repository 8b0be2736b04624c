"""The bundled GPUs are complete, consistent and sourced; a damaged text is one TargetError and never reaches XLA.

XLA divides by most of these fields, and ends the process where one is zero. So `load_gpu` must refuse such a text: the
fuzzers below damage good texts and random ones.
"""

import dataclasses
import re
import tomllib

import jax
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxremat.chips.nvidia.gpu import _BOUNDS, FOLDER, GpuDescription, bundled_names, gpu_of_kind, load_gpu
from jaxremat.chips.nvidia.speed import speed_of
from jaxremat.errors import TargetError
from jaxremat.xla.compile import lower_and_compile

GOOD = load_gpu("h100-80gb")[1].to_text()


def read(folder, text: str | bytes) -> GpuDescription:
    path = folder / "target.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_gpu(str(path))[1]


#: What times are predicted from. Each has a source of its own.
RATES = (
    "peak_bf16_flops",
    "peak_f16_flops",
    "sustained_clock_ghz",
    "host_link_bandwidth",
    "node_link_bandwidth",
    "network_bandwidth",
    "devices_of_node",
)


def written(name: str) -> dict:
    """What the data file of a bundled GPU holds."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


@pytest.mark.parametrize("name", bundled_names())
class TestBundled:
    def test_agrees_with_the_datasheet(self, name):
        shown, gpu = load_gpu(name)
        sheet = written(name)["datasheet"]
        assert shown == name
        # The driver reports a few percent less than the name says, in units of 2**30 or of 10**9.
        assert 0.92 * sheet["memory_gb"] * 1e9 < gpu.device_memory_size < sheet["memory_gb"] * 2**30
        assert gpu.memory_bandwidth == pytest.approx(sheet["bandwidth_gb_per_s"] * 1e9, rel=0.02)
        if gpu.compute_capability < (8, 0):  # without bfloat16 in tensor cores
            assert gpu.peak_bf16_flops is sheet.get("bf16_tflops") is None
        else:
            assert gpu.peak_bf16_flops == pytest.approx(sheet["bf16_tflops"] * 1e12, rel=0.01)

    def test_is_consistent(self, name):
        _, gpu = load_gpu(name)
        assert gpu.shared_memory_per_block_optin <= gpu.shared_memory_per_core
        # Peak = cores x clock x FLOPs a clock: a power of two from 512 (A6000) to 8192 (H100), give or take the boost clock.
        if gpu.peak_bf16_flops:
            assert 400 < gpu.peak_bf16_flops / (gpu.core_count * gpu.clock_rate_ghz * 1e9) < 10_000
            speed = speed_of(gpu)
            assert speed is not None
            assert speed.bf16_flops == gpu.peak_bf16_flops
            assert speed.host_link_bytes_per_s < speed.bandwidth_bytes_per_s / 8

    def test_round_trips_through_text(self, name, tmp_path):
        _, gpu = load_gpu(name)
        again = read(tmp_path, gpu.to_text())
        for field in dataclasses.fields(GpuDescription):
            if field.name not in ("text", *RATES):  # XLA's text has none of them
                assert getattr(again, field.name) == getattr(gpu, field.name), field.name
        assert again.to_text() == gpu.to_text()

    def test_names_its_sources(self, name):
        values = written(name)
        assert values["sources"]["device"].strip()
        for field in ("device_memory_size", *RATES):
            assert (field in values) == bool(values["sources"].get(field, "").strip()), field

    @pytest.mark.full
    def test_compiles_a_small_step(self, name, h100):
        """Of bfloat16: the gradient of a matmul."""
        args = (jax.ShapeDtypeStruct((256, 256), "bfloat16"), jax.ShapeDtypeStruct((64, 256), "bfloat16"))
        done = lower_and_compile(jax.grad(lambda w, x: ((x @ w) ** 2).astype("float32").sum()), args, name)
        assert done.memory.argument_bytes + done.memory.output_bytes == 2 * (256 + 64 + 256) * 256
        assert done.memory.total_bytes > 0


@pytest.mark.parametrize(
    ("name", "reported_gib"),
    [
        *(
            ("b200", 178.36),
            ("b300", 267.69),
            ("gb200", 184.31),
            ("h200", 139.80),
            ("rtx-pro-6000", 94.97),
            ("rtx4090", 23.52),
        ),
        *(
            ("a10g", 22.06),
            ("gh200", 94.50),
            ("l4", 22.03),
            ("l40s", 44.39),
            ("rtx3090", 23.56),
            ("rtx5090", 31.36),
            ("t4", 14.56),
        ),
    ],
)
def test_memory_is_what_out_of_memory_messages_of_real_cards_say(name, reported_gib):
    """Messages of PyTorch in public issues and logs: `GPU 0 has a total capacity of 139.80 GiB`."""
    assert round(load_gpu(name)[1].device_memory_size / 2**30, 2) == reported_gib


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"), ("NVIDIA L40", None), ("NVIDIA A10G", "a10g"), ("NVIDIA A10", None)),
        *(("NVIDIA GH200 480GB", "gh200"), ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000")),
        *(
            ("NVIDIA GeForce RTX 3090 Ti", None),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
            ("Tesla T4", "t4"),
            ("A CPU", None),
        ),
    ],
)
def test_the_bundled_gpu_of_a_device(kind, name):
    """An edition is the same GPU, and a longer name is another."""
    assert gpu_of_kind(kind) == name


# What XLA itself writes that the bundled ones don't have: the matrix unit, a link, comments, <>, lists, hex-ish versions.
MATRIX_UNIT = """  matrix_unit_description {
    rate_infos { key: 11 value { clock_rate_ghz: 1.98 units_per_core: 4 ops_per_clock: 256 } }
    rate_infos { key: 16 value { clock_rate_ghz: 1.83 units_per_core: 4 ops_per_clock: 512 } }
  }
  pcie_bandwidth: 64000000000
"""
WITH_PEAK = GOOD.replace("  core_count", MATRIX_UNIT + "  # a comment\n  core_count")


def test_peak_and_link_are_read_from_xlas_text(tmp_path):
    gpu = read(tmp_path, WITH_PEAK)
    assert gpu.peak_bf16_flops == pytest.approx(989e12, rel=0.01)  # 132 cores x 4 units x 512 x 2 x 1.83 GHz
    assert gpu.host_link_bandwidth == 64_000_000_000
    assert speed_of(gpu) is not None
    assert speed_of(read(tmp_path, GOOD)) is None


def test_below_8_0_times_need_the_clock_in_training(tmp_path):
    """XLA's text has the nominal clock alone, at which a T4's matmuls would be half as fast again as they are."""
    text = load_gpu("t4")[1].to_text().replace("  core_count", "  pcie_bandwidth: 15750000000\n  core_count")
    gpu = read(tmp_path, text)
    assert gpu.host_link_bandwidth
    assert speed_of(gpu) is None
    bundled, with_clock = speed_of(load_gpu("t4")[1]), speed_of(dataclasses.replace(gpu, sustained_clock_ghz=1.05))
    assert bundled
    assert with_clock
    assert with_clock.bf16_flops == bundled.bf16_flops == bundled.f32_flops == pytest.approx(5.376e12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("key: 16", "key: 17"),
        ("key: 16 value {", "key: 16 other {"),
        ("ops_per_clock: 512", "ops_per_clock: fast"),
        ("ops_per_clock: 512", "ops_per_clock: 0"),
        ("rate_infos { key: 16", 'rate_infos: "x" rate_infos { key: 16'),
        ("clock_rate_ghz: 1.83", "clock_rate_ghz: 1e999"),
        ("pcie_bandwidth: 64000000000", "pcie_bandwidth: 0"),
        ("pcie_bandwidth: 64000000000", 'pcie_bandwidth: "fast"'),
    ],
)
def test_an_odd_peak_only_costs_the_prediction(tmp_path, old, new):
    assert old in WITH_PEAK
    gpu = read(tmp_path, WITH_PEAK.replace(old, new))
    assert speed_of(gpu) is None
    assert gpu.core_count == 132


@pytest.mark.parametrize("name", _BOUNDS)
@pytest.mark.parametrize("value", [None, "0", "-1", "99999999999999999999", "1e999", '"132"', "true", "1 {name}: 2"])
def test_every_field_is_needed_and_bounded(tmp_path, name, value):
    damaged, count = re.subn(rf"  {name}: .*\n", "" if value is None else f"  {name}: {value.format(name=name)}\n", GOOD)
    assert count == 1
    with pytest.raises(TargetError) as caught:
        read(tmp_path, damaged)
    assert name in caught.value.got


def check_vouched_for(folder, text: str | bytes) -> None:
    """Either one TargetError that says what to do, or a description whose every field is in bounds."""
    try:
        gpu = read(folder, text)
    except TargetError as error:
        assert error.next_step  # noqa: PT017
        assert "\n" not in str(error).replace(str(folder), "")  # noqa: PT017
        return
    for name, (low, high) in _BOUNDS.items():
        assert low <= getattr(gpu, name) <= high
    speed_of(gpu)


FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCRAPS = st.sampled_from(
    ["{", "}", '"', "\\", ":", "<", "[", "#", "-", "0", "\x00", "é", "\n", "gpu_device_info", "1e5", "nan"]
)


@FUZZ
@given(st.lists(st.tuples(st.integers(0, len(WITH_PEAK)), st.integers(0, 40), SCRAPS | st.text(max_size=5)), max_size=4))
def test_damaged_texts(tmp_path, damages):
    text = WITH_PEAK
    for start, length, scrap in damages:
        text = text[:start] + scrap + text[start + length :]
    check_vouched_for(tmp_path, text.encode("utf-8", "surrogatepass"))


@FUZZ
@given(st.integers(0, len(WITH_PEAK)))
def test_truncated_texts(tmp_path, length):
    check_vouched_for(tmp_path, WITH_PEAK[:length])


@FUZZ
@given(st.binary(max_size=200) | st.lists(SCRAPS, max_size=40).map(lambda parts: " ".join(parts).encode()))
@example(b"a" * 100_000)
@example(b"a {" * 5000)
def test_random_bytes(tmp_path, text):
    check_vouched_for(tmp_path, text)


@FUZZ
@given(st.text(max_size=40))
def test_random_names(name):
    with pytest.raises(TargetError) as caught:
        load_gpu(name + "?")
    assert caught.value.next_step
