"""The measured tables of kernels: what is interpolated from them, against the rows themselves and against another GPU's."""

import itertools
import json
import math
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.common import RESULTS
from jaxremat.chips.nvidia.gpu import load_gpu
from jaxremat.chips.nvidia.speed import speed_of
from jaxremat.chips.nvidia.tables import PEAKS, load_tables
from jaxremat.chips.speed import CLASSES
from jaxremat.chips.tables import Attention, Product, Tables
from jaxremat.mesh.axes import MeshShape
from jaxremat.xla.clock import predict_step_time
from jaxremat.xla.collectives import Collective, collective_seconds
from jaxremat.xla.flops import count_step_flops, executed_flops
from jaxremat.xla.hlo import parse

GENERATIONS = [(9, 0), (10, 0)]


def tables(generation: tuple[int, int] = (9, 0)) -> Tables:
    found = load_tables(generation)
    assert found is not None
    return found


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_row_is_what_its_neighbours_say(generation, dtype):
    """Each row inside of the grid beside the mean of the rows of half and of twice its m, as if it weren't there."""
    rates, peak = tables(generation).matmuls[dtype].rates, PEAKS["sm_{}{}".format(*generation)][dtype]
    off = []
    for (batch, m, n, k), flops_per_s in rates.items():
        below, above = rates.get((batch, m // 2, n, k)), rates.get((batch, 2 * m, n, k))
        assert 0 < flops_per_s < peak
        if below and above:
            off.append(abs(math.sqrt(below * above) / flops_per_s - 1))
    assert len(off) == 225
    assert median(off) < (0.06 if dtype == "bf16" else 0.09)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_small_product_takes_no_longer_than_a_padded_one(generation, dtype):
    """The product of 8 rows with 10 columns over 2,048 was predicted to take 21 s, by lines extended along two axes."""
    found = tables(generation)

    def seconds(m: int, n: int, k: int) -> float:
        return m * n * k / (found.matmul_share(Product(1, m, n, k), dtype) or 0.0)

    for m, n, k in itertools.product((1, 8, 10, 100, 256, 3000), repeat=3):
        assert seconds(m, n, k) <= seconds(max(m, 256), max(n, 256), max(k, 256)) * (1 + 1e-9)


@pytest.mark.parametrize(("gpu", "devices"), [("h100-80gb", 1), ("b200", 8), ("a100-80gb", 8)])
def test_no_kernel_is_faster_than_the_fastest_one(gpu, devices):
    """`recommend` leaves out GPUs by it."""
    speed = speed_of(load_gpu(gpu)[1], MeshShape(fsdp=devices) if devices > 1 else None)
    assert speed
    sizes = (1, 8, 100, 256, 1000, 2048, 5000, 16384, 10**6)
    products = [Product(batch, m, n, k) for batch, m, n, k in itertools.product((1, 8, 300), sizes, sizes, sizes)]
    attentions = [
        Attention(way, head, length) for way in ("forward", "backward") for head in (32, 64, 256) for length in sizes
    ]
    rates = [speed.kernel_flops_per_s(dtype, "matmul", of, None) for of in products for dtype in ("bf16", "f32", "f16")]
    rates += [speed.kernel_flops_per_s("bf16", "attention", None, of) for of in attentions]
    rates += [speed.flops_per_s("bf16", one) for one in CLASSES]
    assert 0.95 * speed.most_flops_per_s <= speed.training_share * max(rates) <= speed.most_flops_per_s * (1 + 1e-9)


def test_what_lies_on_the_grid_and_around_it():
    found = tables()
    for (batch, m, n, k), flops_per_s in found.matmuls["bf16"].rates.items():
        assert found.matmul_share(Product(batch, m, n, k), "bf16") == pytest.approx(flops_per_s / found.peak_flops["bf16"])
    large = found.matmul_share(Product(1, 4096, 4096, 4096), "bf16")
    assert large == found.matmul_share(Product(1, 40960, 40960, 40960), "bf16")
    shares = [found.matmul_share(Product(1, 4096, 4096, k), "bf16") or 0.0 for k in (64, 128, 256, 300, 512)]
    assert shares == sorted(shares)
    assert found.matmul_share(Product(1, 4096, 4096, 4096), "f8e4m3fn") is None
    assert found.matmul_share(Product(1, 8192, 50257, 768, is_aligned=False), "bf16") == found.unaligned_share


def test_matmuls_of_an_h200_take_as_long_as_expected():
    """None of these is in the table, which another maker of figures measured on an H100: the median is 5 % off at most."""
    found, off = tables(), []
    for row in json.loads((RESULTS / "nvidia-h200" / "kernel_tables.json").read_text())["matmul"]:
        if row["dtype"] == "bfloat16":
            share = found.matmul_share(Product(1, row["m"], row["n"], row["k"]), "bf16")
            assert share is not None
            off.append(abs(row["flops_per_s"] / (share * found.peak_flops["bf16"]) - 1))
    assert len(off) > 50
    assert median(off) < 0.05


def test_attention_by_direction_length_and_head_size():
    found = tables()
    for direction in ("forward", "backward"):
        by_length = [found.attention_share(Attention(direction, 128, length)) or 0.0 for length in (512, 1024, 3000, 8192)]
        assert by_length == sorted(by_length)
        assert by_length[-1] > (found.attention_share(Attention(direction, 64, 8192)) or 1.0)
    assert (found.attention_share(Attention("forward", 128, 4096)) or 0) > (
        found.attention_share(Attention("backward", 128, 4096)) or 1
    )
    assert found.attention_share(Attention("forward", 128, 10**6)) == found.attention_share(Attention("forward", 128, 32768))


WINDOWED = """HloModule jit_f, is_scheduled=true

ENTRY %main (q: bf16[2,32,8192,128], k: bf16[2,8,8192,128]) -> bf16[2,32,8192,128] {
  %q = bf16[2,32,8192,128]{3,2,1,0} parameter(0)
  %k = bf16[2,8,8192,128]{3,2,1,0} parameter(1)
  %call = (bf16[2,32,8192,128]{3,2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), CONFIG
  ROOT %out = bf16[2,32,8192,128]{3,2,1,0} get-tuple-element(%call), index=0
}
""".replace(
    "CONFIG",
    'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask_type":"CAUSAL","sliding_window_length":1024,'
    '"intermediate_tensor_shape":{"dimensions":["2","32","8192","8192"]}}',
)


def test_attention_with_a_window_takes_as_long_as_on_an_h200():
    rows = json.loads((RESULTS / "nvidia-h200" / "kernel_tables.json").read_text())["attention"]
    (row,) = [row for row in rows if row["window"] and row["direction"] == "forward"]
    assert (row["batch"], row["length"], row["heads"], row["head_size"], row["window"]) == (2, 8192, 32, 128, 1024)
    module = parse(WINDOWED)
    flops = 4 * 2 * 32 * (8192 * 1024 - 1024**2 // 2) * 128
    assert executed_flops(module).attention_flops == flops
    query, key = (jax.ShapeDtypeStruct((2, 8192, heads, 128), jnp.bfloat16) for heads in (32, 8))
    attention = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn", local_window_size=(1023, 0))
    assert count_step_flops(jax.make_jaxpr(attention)(query, key, key)).attention_flops == flops
    speed = speed_of(load_gpu("h200")[1])
    assert speed is not None
    assert predict_step_time(module, speed).step_s == pytest.approx(row["kernel_s"], rel=0.07)


EMBEDDING = """HloModule jit_op, is_scheduled=true

%add (a: TYPE[], b: TYPE[]) -> TYPE[] {
  %a = TYPE[] parameter(0)
  %b = TYPE[] parameter(1)
  ROOT %sum = TYPE[] add(%a, %b)
}

ENTRY %main (tokens: s32[ROWS,1], rows: TYPE[ROWS,WIDTH]) -> TYPE[VOCABULARY,WIDTH] {
  %tokens = s32[ROWS,1]{1,0} parameter(0)
  %rows = TYPE[ROWS,WIDTH]{1,0} parameter(1)
  %zero = TYPE[] constant(0)
  %zeros = TYPE[VOCABULARY,WIDTH]{1,0} broadcast(%zero), dimensions={}
  ROOT %scatter = TYPE[VOCABULARY,WIDTH]{1,0} scatter(%zeros, %tokens, %rows), update_window_dims={1}, inserted_window_dims={0},
    scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add, metadata={op_name="jit(op)/SCOPE/scatter-add"}
}
""".replace(",\n    scatter", ", scatter")


def seconds_of_gradient(row: dict[str, Any], scope: str = "embedding", unique: bool = False) -> float:
    sizes = {"ROWS": row["num_tokens"], "WIDTH": row["width"], "VOCABULARY": row["vocabulary"], "SCOPE": scope}
    text = EMBEDDING.replace("TYPE", {"bfloat16": "bf16", "float32": "f32"}[row["dtype"]])
    for name, size in sizes.items():
        text = text.replace(name, str(size))
    speed = speed_of(load_gpu("h100-80gb")[1])
    assert speed is not None
    return predict_step_time(
        parse(text.replace(", to_apply", ", unique_indices=true, to_apply" * unique or ", to_apply")), speed
    ).step_s


def test_the_gradient_of_an_embedding_takes_as_long_as_on_an_h100():
    """One number is fitted to tokens of text in bfloat16. They wait for each other, and those of float32 don't."""
    rows = json.loads((RESULTS / "nvidia-h100-80gb-hbm3" / "kernel_tables.json").read_text())["scatter"]
    found = {(row["dtype"], row["num_tokens"], row["width"]): row for row in rows if row["tokens"] == "as in text"}
    assert len(found) == 12
    for row in found.values():
        assert seconds_of_gradient(row) == pytest.approx(row["kernel_s"], rel=0.4), row
    row = found["bfloat16", 16384, 768]
    assert seconds_of_gradient(row, "rows of experts") == seconds_of_gradient(row, unique=True) < 0.2 * row["kernel_s"]
    row = found["bfloat16", 65536, 768]
    assert seconds_of_gradient(row | {"num_tokens": 2**18}) == pytest.approx(4 * seconds_of_gradient(row), rel=0.02)


def test_collectives_inside_a_node():
    found = tables()
    pair, node = (found.collective_s("all-gather", devices, 2**30) or 0.0 for devices in (2, 8))
    assert 2**30 / node == pytest.approx(390e9, rel=0.05)
    assert pair < node
    assert (found.collective_s("all-gather", 8, 2**13) or 0) > 12e-6  # latency, not bandwidth
    assert found.collective_s("all-gather", 8, 2**40) == pytest.approx(
        2**8 * (found.collective_s("all-gather", 8, 2**32) or 0)
    )
    assert found.collective_s("all-gather", 5, 2**30) is None


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_reduce_scatter_takes_about_as_long_as_a_gather(generation):
    """Both send as many bytes. Four H100s scattered 146.8 MB in 400 to 460 us (the profile h100-maxtext)."""
    found = tables(generation)
    for num_devices in (2, 4, 8):
        scatter, gather = (found.collective_s(kind, num_devices, 2**30) or 0 for kind in ("reduce-scatter", "all-gather"))
        assert scatter == pytest.approx(gather, rel=0.4)
    if generation == (9, 0):
        assert 400e-6 < (found.collective_s("reduce-scatter", 4, 146_800_640) or 0) < 460e-6


def test_other_links_have_no_table():
    """PCIe cards are of the same generation, and pairs of them aren't as quick as NVLink."""
    gathered = Collective("all-gather", 2**30, ())
    seconds = []
    for name in ("h100-80gb", "h100-pcie"):
        speed = speed_of(load_gpu(name)[1], MeshShape(fsdp=8))
        assert speed is not None
        assert speed.links is not None
        seconds.append(collective_seconds(gathered, speed.links, speed.tables))
        assert (seconds[-1] == collective_seconds(gathered, speed.links)) == (name == "h100-pcie")
    assert seconds[1] > 2 * seconds[0]


def test_generations_without_tables():
    assert load_tables((8, 0)) is None
    speed = speed_of(load_gpu("a100-80gb")[1])
    assert speed is not None
    assert speed.kernel_flops_per_s("bf16", "matmul", Product(1, 512, 512, 512), None) == speed.flops_per_s("bf16", "matmul")


HLO = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: bf16[4096,4096], g: f32[1048576]) -> (bf16[4096,4096], f32[8388608]) {
  %a = bf16[4096,4096]{1,0} parameter(0)
  %g = f32[1048576]{0} parameter(1)
  %start = (f32[1048576]{0}, f32[8388608]{0}) all-gather-start(%g), replica_groups=[1,8]<=[8], dimensions={0}
  %dot = bf16[4096,4096]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = f32[8388608]{0} all-gather-done(%start)
  ROOT %tuple = (bf16[4096,4096]{1,0}, f32[8388608]{0}) tuple(%dot, %done)
}
"""


def test_a_kernel_takes_longer_beside_a_collective():
    speed = speed_of(load_gpu("h100-80gb")[1], MeshShape(fsdp=8))
    assert speed is not None
    assert speed.tables is not None
    module = parse(HLO)
    together = predict_step_time(module, speed)
    assert together.collective_exposed_s == 0
    quick = predict_step_time(module, replace(speed, tables=replace(speed.tables, beside_collective=1.0)))
    collective_s = together.collective_s
    assert together.step_s - quick.step_s == pytest.approx(collective_s * (1 - 1 / speed.tables.beside_collective))
    alone = predict_step_time(
        module, replace(speed, tables=replace(speed.tables, beside_collective=1.0, training_share=1.0))
    )
    assert alone.step_s == pytest.approx(quick.step_s * speed.tables.training_share, rel=0.01)
