"""What the package asks a chip, and a chip of another maker, which is one module and a row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxremat.chips import catalog
from jaxremat.chips.catalog import ATTACHED, CHIPS, call_kind, chip_of, is_gpu, may_have_workspace
from jaxremat.chips.chip import Chip, CompilerOptions, FusedAttention, MatmulSwitch
from jaxremat.chips.cpu import CPU
from jaxremat.chips.nvidia.gpu import load_gpu
from jaxremat.chips.nvidia.speed import speed_of
from jaxremat.chips.target import in_pool, load_target
from jaxremat.config import ModelConfig
from jaxremat.errors import CompileError, MissingDependencyError, UsageError
from jaxremat.mesh.axes import MeshShape, parse_mesh
from jaxremat.model.attention import choose_attention
from jaxremat.xla.collectives import Collective, collective_seconds
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.options import compiler_options, kernel_options, matmuls_of, other_matmuls, repeatable_options
from jaxremat.xla.refusal import explained


@dataclass(frozen=True)
class Described:
    """A device of the made-up maker."""

    description: str = "Abacus One"
    compute_capability: tuple[int, int] = (1, 0)
    device_memory_size: int = 2**30
    peak_bf16_flops: int | None = None

    def to_text(self) -> str:
        return "beads: 100"


class Abacus(Chip):
    """A made-up maker, whose programs are the CPU's."""

    platform = "cpu"
    title = "Abacus"
    is_gpu = False
    attention = FusedAttention("wooden", "wooden attention", "no_such_folder", "takes beads")
    options = CompilerOptions(
        deviceless={"xla_made_up_frame": 1},
        kernel_cache="xla_made_up_cache",
        matmuls=MatmulSwitch("xla_made_up_fingers", on="triton", off="cublas", autotune="xla_made_up_level"),
    )
    calls = ((r"abacus\$mm", "matmul"),)
    with_workspace = "abacus"

    def attention_obstacle(self, capability: tuple[int, int] | None) -> str:
        return "beads are round" if capability == (1, 0) else ""

    def missing(self, text: str, first_line: str, *, is_here: bool) -> MissingDependencyError | None:
        return MissingDependencyError(first_line, next_step="buy wood") if "no beads" in text else None

    def rejection(self, text: str) -> tuple[str, str] | None:
        return ("a bead broke", "another bead") if "broken" in text else None

    def is_here(self) -> bool:
        return False

    def attached(self) -> list[Any]:
        return []

    def names(self) -> tuple[str, ...]:
        return ("abacus-one",)

    def describe(self, name_or_path: str, known: Sequence[str] = ()) -> tuple[str, Described]:
        return name_or_path, Described()

    def topology(self, name: str, text: str, shape: MeshShape) -> Sequence[Any]:
        return jax.devices("cpu")[: shape.num_devices]

    def text_with_pool(self, text: str, pool_bytes: int) -> str:
        return f"{text} of {pool_bytes}"


ABACUS = Abacus()


@pytest.fixture
def abacus(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(catalog, "CHIPS", (*CHIPS, ABACUS))
    for cached in (call_kind, may_have_workspace):
        cached.cache_clear()
    yield
    for cached in (call_kind, may_have_workspace):
        cached.cache_clear()


def test_what_a_library_s_call_computes():
    kinds = {
        "__cublas$gemm": "matmul",
        "__cublas$lt$matmul$f8": "matmul",
        "__onednn$matmul": "matmul",
        "__cudnn$fmhaSoftmax": "attention",
        "__cudnn$fmhaScaleBiasSoftmaxDropoutBackward": "attention gradient",
        "__cudnn$convForward": "convolution",
        "__cudnn$convBackwardInput": "convolution's input gradient",
        "__cudnn$convBackwardFilter": "convolution's filter gradient",
        "__cudnn$norm": None,
        "tpu_custom_call": None,
        "": None,
    }
    assert {target: call_kind(target) for target in kinds} == kinds
    assert [*map(may_have_workspace, ("__cudnn$norm", "__cublas$gemm", "__onednn$matmul", ""))] == [True, True, False, False]


def test_platforms_of_gpus():
    assert [*map(is_gpu, ("gpu", "cuda", "cpu", "tpu"))] == [True, True, False, False]
    assert [chip.is_gpu for chip in CHIPS] == [True, False, False]
    assert CPU.names() == ()
    assert chip_of("somebody_s.txt") is ATTACHED


def test_a_cpu_has_none_of_a_gpu_s_options(tmp_path):
    cpu = load_target("cpu")
    assert cpu.chip is CPU
    assert not cpu.lacks_bf16
    assert compiler_options(cpu, xla_remat=True) == kernel_options(cpu, tmp_path) == other_matmuls(cpu) == {}
    assert repeatable_options(cpu, tmp_path / "tuned") == {}
    assert not (tmp_path / "tuned").exists()


def test_another_maker_is_one_module(abacus, tmp_path):
    """Its names, descriptions, options, attention and words are read where NVIDIA's are."""
    target = load_target("abacus-one")
    assert (target.kind, target.chip, target.text, target.memory_bytes) == ("deviceless", ABACUS, "beads: 100", 2**30)
    assert "abacus-one" in catalog.bundled_names()
    assert catalog.describe("abacus-one")[1] == Described()
    assert in_pool(target, 2**20).text == f"beads: 100 of {2**20}"
    assert compiler_options(target, xla_remat=True) == {"xla_made_up_frame": 1}
    assert kernel_options(target, tmp_path) == {"xla_made_up_cache": str(tmp_path)}
    assert (matmuls_of(target), other_matmuls(target)) == ("cublas", {"xla_made_up_fingers": True})
    assert call_kind("abacus$mm") == "matmul"
    assert may_have_workspace("abacus$mm")
    chosen = choose_attention(ModelConfig(attention="auto"), 64, target)
    assert chosen.implementation == "xla"
    assert chosen.reason.endswith("beads are round")
    with pytest.raises(UsageError) as caught:
        choose_attention(ModelConfig(attention="cudnn"), 64, target)
    assert caught.value.got.startswith("--attention cudnn")
    assert caught.value.cause.endswith("wooden")


def test_another_maker_explains_what_its_compiler_says(abacus):
    target = load_target("abacus-one")
    missing = explained(RuntimeError("there are no beads"), target)
    assert isinstance(missing, MissingDependencyError)
    assert missing.next_step == "buy wood"
    broken = explained(RuntimeError("a broken frame"), target)
    assert isinstance(broken, CompileError)
    assert (broken.cause, broken.next_step) == ("a bead broke", "another bead")


@pytest.mark.full
def test_a_step_is_compiled_for_another_maker(abacus, monkeypatch):
    monkeypatch.setattr(Abacus, "options", CompilerOptions())
    matrix = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    done = lower_and_compile(lambda x: x @ x, (matrix,), "abacus-one")
    assert (done.memory.argument_bytes, done.memory.output_bytes) == (64 * 64 * 4, 64 * 64 * 4)
    assert done.compiled is None


@pytest.mark.parametrize(
    ("target", "nodes"), [("h100-80gb", 8), ("gb200", 1), ("gb300", 1), ("v6e", 1), ("gpu", 8), ("cpu", 8)]
)
def test_how_many_devices_a_node_has_is_the_target_s(target: str, nodes: int):
    """NVLink joins the GPUs of a rack of GB200, and 8 of an H100's node."""
    mesh = parse_mesh("fsdp=64", devices_of_node=chip_of(target).devices_of_node(target))
    assert mesh is not None
    assert mesh.nodes == nodes


def test_a_rack_is_quicker_than_nodes_of_eight():
    gather = Collective("all-gather", 10**9, ())
    of_rack, of_nodes = (speed_of(load_gpu("gb200")[1], MeshShape(fsdp=64, nodes=nodes)) for nodes in (1, 8))
    assert of_rack is not None
    assert of_rack.links is not None
    assert of_nodes is not None
    assert of_nodes.links is not None
    assert collective_seconds(gather, of_rack.links) < 0.7 * collective_seconds(gather, of_nodes.links)
