"""The store of what XLA returned: its keys, its files, and that a stored result gives the same records as a fresh one."""

import dataclasses
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning

from jaxremat.chips.target import load_target
from jaxremat.errors import CompileError, UsageError
from jaxremat.mesh.axes import parse_mesh
from jaxremat.model.decoder_workload import decoder_factory
from jaxremat.policy.grammar import parse
from jaxremat.trial.explain import explain
from jaxremat.trial.trials import Trials
from jaxremat.xla import results
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.dump import Dump
from jaxremat.xla.memory import CompiledMemory
from jaxremat.xla.refusal import is_lasting
from jaxremat.xla.results import SINCE, SIZE, XlaResult, ignore_older_results, result_key, store_result, stored_result
from tests.helpers import GPT, TRAIN

RESULT = XlaResult(
    5.3, CompiledMemory(*range(10)), "HloModule m", Dump("HloModule m", "allocation 0", "ranges", bytes(range(256)))
)
PROGRAM = """
#loc1 = loc("x")
module @jit_f {
  %0 = stablehlo.sine %arg0 : tensor<8xf32> loc(#loc5)
}
#loc2 = loc("/home/me/model.py":7:4 to :9)
#loc3 = loc("layer"(#loc2))
#loc4 = loc(callsite(#loc3 at #loc8))
#loc5 = loc("jit(f)/sin"(#loc4))
#loc6 = loc("/jaxremat/xla/compile.py":170:22 to :73)
#loc7 = loc("begin_compile"(#loc6))
#loc8 = loc(callsite(#loc7 at #loc9))
#loc9 = loc("main"(#loc10))
#loc10 = loc("/home/me/run.py":3:1 to :5)
"""
#: The same program, called from elsewhere, so that MLIR numbers its locations otherwise.
FROM_ELSEWHERE = (
    PROGRAM.replace("#loc9", "#loc12").replace("#loc2", "#loc9").replace("run.py", "sweep.py").replace("main", "work")
)


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """The folder of an empty store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(SIZE, "1MiB")
    monkeypatch.delenv(SINCE, raising=False)
    return tmp_path / "jaxremat" / "compiled"


def test_what_is_stored_is_read_back(store):
    assert stored_result("key") is None
    store_result("key", RESULT)
    assert stored_result("key") == RESULT
    assert [path.name for path in store.iterdir()] == ["key"]


def test_a_rejection_is_stored_too(store):
    store_result("key", "INVALID_ARGUMENT: no")
    with pytest.raises(RuntimeError, match="INVALID_ARGUMENT: no"):
        stored_result("key")


@pytest.mark.parametrize(
    ("text", "lasts"),
    [
        ("INVALID_ARGUMENT: No such compile option: 'xla_gpu_nonsense'", True),
        ("INTERNAL: Couldn't find tile sizes: %dot.96 = bf16[2541,64]{1,0} dot(%bitcast, %p)", True),
        ("INTERNAL: ptxas exited with code 9", False),
        ("RESOURCE_EXHAUSTED: out of memory: %dot.96 = bf16[2541,64]{1,0} dot(%bitcast, %p)", False),
        ("INVALID_ARGUMENT: libdevice not found", False),
    ],
)
def test_only_rejections_of_the_program_itself_are_stored(h100, text, lasts):
    assert is_lasting(RuntimeError(text), h100) is lasts


def test_equal_programs_have_one_key_whoever_compiles_them(store, h100):
    key = result_key(PROGRAM, h100, {})
    assert key
    assert result_key(FROM_ELSEWHERE, h100, {}) == key
    assert result_key(FROM_ELSEWHERE.replace(":7:4", ":8:4"), h100, {}) != key, "the dump has another source line"


def test_whatever_changes_a_result_changes_its_key(store, h100, monkeypatch):
    def keys() -> set[str | None]:
        return {result_key(PROGRAM, h100, {})}

    found = keys()
    found |= {
        result_key(PROGRAM.replace("sine", "cosine"), h100, {}),
        result_key(PROGRAM, h100, {"xla_gpu_autotune_level": 1}),
    }
    found |= {result_key(PROGRAM, dataclasses.replace(h100, text="another GPU"), {})}
    for name, value in {
        "XLA_FLAGS": "--xla_gpu_autotune_level=1",
        "LD_LIBRARY_PATH": "lib",
        "NVIDIA_TF32_OVERRIDE": "0",
    }.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            found |= keys()
    for name, value in {"_FORMAT": 0, "_versions": lambda: {"jaxlib": "0.1"}}.items():
        with monkeypatch.context() as changed:
            changed.setattr(results, name, value)
            found |= keys()
    jax.config.update("jax_optimization_level", "O1")
    try:
        found |= keys()
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")
    assert len(found) == 10
    for name in ("TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "1")
    assert keys() <= found


@pytest.mark.parametrize("flags", ["--xla_dump_hlo_as_text", "--xla_gpu_load_autotune_results_from=/tmp/tuned", "flags.txt"])
def test_a_compile_that_reads_or_writes_files_of_the_user_has_no_key(store, h100, monkeypatch, flags):
    assert result_key(PROGRAM, h100, {"xla_dump_to": "folder"}) is None
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert result_key(PROGRAM, h100, {}) is None


def test_a_store_that_is_off_has_no_keys_and_a_wrong_size_is_an_error(store, h100, monkeypatch):
    monkeypatch.setenv(SIZE, "0")
    assert result_key(PROGRAM, h100, {}) is None
    monkeypatch.setenv(SIZE, "much")
    with pytest.raises(UsageError) as caught:
        result_key(PROGRAM, h100, {})
    assert SIZE in caught.value.got


def attention(window: tuple[int, int] | None, divide: Any = None) -> Any:
    """Fused attention on two devices, lowered. `divide` is an operation on its result."""
    mesh = load_target("h100-80gb", parse_mesh("fsdp=2")).mesh
    assert mesh
    x = jax.ShapeDtypeStruct((4, 64, 2, 64), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P("fsdp")))

    def step(x):
        y = jax.nn.dot_product_attention(x, x, x, is_causal=True, local_window_size=window, implementation="cudnn")
        return divide(y) if divide else y

    return jax.jit(step).trace(x).lower(lowering_platforms=("cuda",))


@pytest.mark.full
def test_addresses_of_this_process_are_no_part_of_a_key():
    """Each lowering has addresses of its own. The window of attention isn't in the text, and still tells keys apart."""
    lowered = [attention(window) for window in (None, None, (16, 0))]
    first, again, windowed = (one.as_text(debug_info=True) for one in lowered)
    plain, of_window = (re.sub(r'(?<=backend_config = )"\d+"', "", text) for text in (first, windowed))
    assert first != again
    assert plain == of_window
    first, again, windowed = map(results.without_addresses, (first, again, windowed))
    assert first == again != windowed


@pytest.mark.full
def test_operations_that_others_divide_in_python_still_have_addresses():
    @custom_partitioning
    def halved(x):
        return x / 2

    halved.def_partition(
        partition=lambda mesh, args, result: (mesh, lambda x: x / 2, result.sharding, (args[0].sharding,)),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="... -> ...",
    )
    lowered = attention(None, halved)
    text = results.without_addresses(lowered.as_text(debug_info=True))
    assert len(re.findall(r'@CustomSPMDPartitioning[^\n]*backend_config = "\d+"', text)) == 1
    assert len(re.findall(r'@CustomSPMDPartitioning[^\n]*backend_config = "jax', text)) == 1


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_damaged_file_is_removed(store, cut):
    store_result("key", RESULT)
    path = store / "key"
    whole = path.read_bytes()
    for damaged in (whole[:cut], whole[:20] + bytes([whole[20] ^ 1]) + whole[21:], b"\xff" * 50):
        path.write_bytes(damaged)
        assert stored_result("key") is None
        assert not path.exists()


def test_the_longest_unused_go_first(store, monkeypatch):
    store_result("1", RESULT)
    size = (store / "1").stat().st_size
    monkeypatch.setenv(SIZE, str(3 * size + size // 2))
    for key in ("2", "3"):
        store_result(key, RESULT)
    for age, key in enumerate(("3", "2", "1")):
        os.utime(store / key, (1000 - age, 1000 - age))
    assert stored_result("1") == RESULT
    store_result("4", RESULT)
    assert {path.name for path in store.iterdir()} == {"1", "3", "4"}


def test_fresh_ignores_what_was_stored_before(store, monkeypatch):
    monkeypatch.setenv(SINCE, "0")
    store_result("old", RESULT)
    ignore_older_results()
    assert stored_result("old") is None
    store_result("new", RESULT)
    assert stored_result("new") == RESULT
    monkeypatch.delenv(SINCE)
    assert stored_result("old") == RESULT


def test_a_store_that_cannot_be_written_is_said_once(store):
    store.parent.write_text("a file in place of the folder")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for key in ("1", "2"):
            store_result(key, RESULT)
            assert stored_result(key) is None
    assert [str(store) in str(one.message) for one in said] == [True]


def test_several_writers(store):
    """Each read finds a whole result or none."""
    found: list[XlaResult | None] = []

    def work() -> None:
        for _ in range(20):
            store_result("key", RESULT)
            found.append(stored_result("key"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [RESULT] * 80
    assert [path.name for path in store.iterdir()] == ["key"]


@pytest.fixture
def compiles(monkeypatch) -> list[dict[str, Any]]:
    """The options of the programs that XLA compiles ahead of time, while a test runs."""
    options, compile_ = [], jax.stages.Lowered.compile

    def counted(self: Any, compiler_options: Any = None) -> Any:
        options.append(compiler_options)
        return compile_(self, compiler_options=compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    return options


@pytest.mark.full
class TestCompiles:
    def test_a_stored_step_has_the_records_of_the_fresh_one(self, store, h100, compiles):
        policy = parse("dots")

        def records() -> list[Any]:
            trials = Trials(decoder_factory(GPT, "xla"), TRAIN, h100, 2**40, with_dump=True)
            found = [
                explain(trials, policy, 2, 100, lint=True),
                trials.compile(policy, 2),
                trials.record(policy, 2, "probe"),
            ]
            return [found[0], found[1].memory_map, dataclasses.replace(found[2], lower_s=None), found[1].hlo_text]

        fresh = records()
        assert len(compiles) == 1
        assert [*records()] == fresh
        assert len(compiles) == 1

    def test_results_are_shared_by_all_who_compile_a_step(self, store, h100, compiles):
        """With a dump and without, from whatever line, and also a function that is jitted."""
        x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

        def step(x: Any) -> Any:
            return jnp.sin(x @ x).sum()

        for function in (step, jax.jit(step)):
            fresh = lower_and_compile(function, (x,), h100)
            stored = lower_and_compile(function, (x,), h100, keep_dump=True)
            assert (stored.memory, stored.hlo_text, stored.compile_s) == (fresh.memory, fresh.hlo_text, fresh.compile_s)
            assert (fresh.dump is None, stored.dump is None) == (True, False)
            assert fresh.compiled is stored.compiled is None
        assert len(compiles) == 2
        lower_and_compile(step, (x,), h100, options={"xla_gpu_enable_triton_gemm": True})
        assert len(compiles) == 3
        ignore_older_results()
        for _ in range(2):
            lower_and_compile(step, (x,), h100)
        assert len(compiles) == 4

    def test_a_jitted_function_with_options_of_its_own_is_compiled_each_time(self, store, h100, compiles):
        step = jax.jit(lambda x: jnp.sin(x @ x).sum(), compiler_options={"xla_gpu_enable_triton_gemm": True})
        for _ in range(2):
            lower_and_compile(step, (jax.ShapeDtypeStruct((64, 64), jnp.float32),), h100)
        assert len(compiles) == 2
        assert not store.exists()

    def test_a_rejected_program_is_rejected_again(self, store, h100, compiles):
        said = set()
        for _ in range(2):
            with pytest.raises(CompileError) as caught:
                lower_and_compile(lambda x: x @ x, (jnp.ones((8, 8)),), h100, options={"xla_gpu_nonsense": 1}, suggest=False)
            said.add(str(caught.value))
        assert (len(said), len(compiles)) == (1, 1)

    def test_jax_s_own_cache_takes_nothing_that_it_cannot_read(self, store, tmp_path):
        code = """
import jax, jax.numpy as jnp
from jaxremat.xla.compile import lower_and_compile
def not_here(x):
    return jnp.sin(x @ x).sum()
def here(x):
    return jnp.cos(x @ x).sum()
lower_and_compile(not_here, (jnp.ones((8, 8)),), "h100-80gb")
jax.jit(here)(jnp.ones((8, 8)))
"""
        variables = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        subprocess.run([sys.executable, "-c", code], env=os.environ | variables, check=True, timeout=200)
        cached = [path.name for path in (tmp_path / "jax").iterdir()]
        assert any("jit_here" in name for name in cached)
        assert not any("jit_not_here" in name for name in cached)
        assert len([one for one in store.iterdir() if not one.name.startswith("kernels-")]) == 1
