"""XLA's options for matmuls: every shape compiles, the user's flags win, and a rejection says what to do."""

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxremat
from jaxremat.chips.nvidia.gpu import load_gpu
from jaxremat.chips.target import in_pool, load_target
from jaxremat.cli import explain
from jaxremat.cli.grid import sweep_trials
from jaxremat.cli.run import main
from jaxremat.errors import CompileError, MissingDependencyError, UsageError
from jaxremat.mesh.axes import MeshShape
from jaxremat.model.decoder_workload import decoder_factory
from jaxremat.model.presets import preset
from jaxremat.policy.spec import NOTHING
from jaxremat.session.flags import ModelFlags, RunFlags, SweepFlags
from jaxremat.session.request import check_run
from jaxremat.session.session import Session
from jaxremat.trial.trials import Trials
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.memory import CompiledMemory
from jaxremat.xla.options import compiler_options, matmuls_of, preset_options, remat_limit
from jaxremat.xla.refusal import explained, of_while_loop
from jaxremat.xla.results import SIZE
from tests.helpers import TRAIN
from tests.page_data import data_of

TRITON = "--xla_gpu_enable_triton_gemm=true"
ROWS = 2541  # of the odd shapes that XLA's default tiles don't fit: 33 sequences of 77 tokens


@pytest.mark.parametrize(
    ("kind", "flags", "matmuls"),
    [
        ("deviceless", "", "cublas"),
        ("deviceless", TRITON, "triton"),
        ("deviceless", "--xla_gpu_enable_triton_gemm", "triton"),
        ("deviceless", "--xla_gpu_enable_triton_gemm=0", "cublas"),
        ("deviceless", f"{TRITON} --xla_gpu_autotune_level=4", "triton"),
        ("attached", "", "autotuned"),
        ("attached", "--xla_gpu_enable_triton_gemm=false", "cublas"),
        ("attached", "--xla_gpu_autotune_level=0", "triton"),
    ],
)
def test_what_runs_the_matmuls(kind, flags, matmuls, h100, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert matmuls_of(replace(h100, kind=kind)) == matmuls


def test_a_cpu_s_matmuls_are_its_own():
    assert matmuls_of(load_target("cpu")) is None


def test_the_user_s_flags_win(h100, monkeypatch):
    assert compiler_options(h100) == {
        "xla_disable_hlo_passes": "rematerialization,cublas-pad-for-gemms",
        "xla_gpu_autotune_level": 0,
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_enable_dynamic_slice_fusion": False,
        "xla_backend_optimization_level": 0,
    }
    assert compiler_options(replace(h100, compute_capability=(7, 5)))["xla_disable_hlo_passes"] == "rematerialization"
    monkeypatch.setenv("XLA_FLAGS", f"{TRITON} --xla_disable_hlo_passes=dce")
    assert compiler_options(h100) == {
        "xla_disable_hlo_passes": "dce,rematerialization,cublas-pad-for-gemms",
        "xla_gpu_autotune_level": 0,
        "xla_gpu_enable_dynamic_slice_fusion": False,
        "xla_backend_optimization_level": 0,
    }


def test_the_limit_of_xla_s_own_remat(monkeypatch):
    """XLA's warning in a public log of a T4 has the limit of 11,470,529,610 bytes, for a step with 6.1 GiB of arguments."""
    t4 = load_gpu("t4")[1]
    arguments, pool = round(6.1 * 2**30), int(0.75 * t4.device_memory_size)
    memory = CompiledMemory(arguments, arguments, arguments, 0, 0, 0, 0, 0, 0, 0)
    assert remat_limit(memory, pool) == pytest.approx(11_470_529_610, abs=0.05 * 0.05 * 2**30)
    assert remat_limit(memory, None) is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_memory_limit_slop_factor=100")
    assert remat_limit(memory, pool) == pool
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=dce,rematerialization")
    assert remat_limit(memory, pool) is None


def test_xla_is_told_of_the_job_s_pool(h100):
    """For every --mem-fraction, and on a mesh; a pool that is given stays."""
    memory = h100.memory_bytes
    assert memory
    assert in_pool(h100).pool_bytes == int(0.75 * memory)
    assert in_pool(load_target("cpu")).pool_bytes is None
    for fraction in (0.5, 0.9):
        flags = RunFlags(xla_remat=True, mem_fraction=fraction, policy=("nothing",), fields=ModelFlags(attention="xla"))
        run = Session.of(check_run(flags), h100).trials
        told = re.search(r"device_memory_size: (\d+)", run.target.text)
        assert told
        assert 0.8 * int(told[1]) == pytest.approx(int(fraction * memory), abs=1)
        assert in_pool(run.target).pool_bytes == run.target.pool_bytes == run.pool_bytes == int(fraction * memory)
        assert (run.target.memory_bytes, run.target.speed) == (memory, h100.speed)
    several = in_pool(load_target("h100-80gb", MeshShape(fsdp=8)), 2**35)
    assert several.mesh is not None
    assert (several.mesh.size, several.local_devices[0], several.pool_bytes) == (8, several.device, 2**35)


def odd_trials(h100, implementation: str = "xla") -> Trials:
    model = replace(preset("tiny").config, num_layers=1, dropout=0.0, max_seq_len=77)
    train = replace(TRAIN, seq_len=77)
    return Trials(decoder_factory(model, implementation), train, h100, 2**40)


@pytest.mark.full
def test_rows_that_no_power_of_two_divides_compile(h100):
    trials = odd_trials(h100)
    record = trials.record(NOTHING, 33)
    assert (record.error, record.matmuls) == (None, "cublas")
    assert record.executed_flops is not None
    assert record.model_flops is not None
    assert record.executed_flops > record.model_flops > 0
    text = trials.compile(NOTHING, 33).hlo_text
    assert "__cublas$" in text
    assert "__triton_gemm" not in text


@pytest.mark.full
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="newer versions of XLA compile that program")
def test_a_rejection_names_the_instruction_and_a_flag_that_was_tried(h100, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", TRITON)
    trials = odd_trials(h100)
    with pytest.raises(CompileError) as caught:
        trials.compile(NOTHING, 33)
    assert [word for word in ("h100-80gb", f"bf16[{ROWS},", "Decoder.hidden/layers/") if word not in caught.value.got] == []
    assert TRITON.replace("true", "false") in caught.value.next_step
    record = trials.record(NOTHING, 33)
    assert (record.error, record.error_kind, record.matmuls) == (str(caught.value), "CompileError", "triton")


@pytest.mark.full
def test_a_length_that_cudnn_rejects_offers_xla_s_attention_which_was_tried(h100):
    with pytest.raises(CompileError) as caught:
        odd_trials(h100, "cudnn").compile(NOTHING, 33)
    assert "77" in caught.value.got
    assert caught.value.next_step.startswith("--attention xla")


def test_options_that_xla_does_not_know_are_not_blamed_on_matmuls(h100, monkeypatch):
    def unknown(*_, **__):
        raise RuntimeError("INVALID_ARGUMENT: No such compile option: 'xla_gpu_nonsense'")

    monkeypatch.setattr(jax.stages.Lowered, "compile", unknown)
    with pytest.raises(CompileError) as caught:
        lower_and_compile(lambda x: x @ x, (jnp.ones((8, 8)),), h100, options={"xla_gpu_nonsense": 1})
    assert "'xla_gpu_nonsense'" in caught.value.got
    assert caught.value.next_step == ""


def test_a_while_loop_in_a_loss_is_rejected_in_words(h100):
    """No other ValueError is."""

    def loss(w, x, stop):
        return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: jnp.tanh(x @ w), stop(x)).sum()

    x = jnp.ones((8, 8))
    with pytest.raises(UsageError) as caught:
        lower_and_compile(jax.grad(functools.partial(loss, stop=lambda x: x)), (x, x), h100)
    assert "while_loop" in caught.value.got
    assert "lax.scan" in caught.value.allowed
    assert caught.value.next_step
    assert of_while_loop(ValueError("Reverse-mode differentiation")) is None


def test_a_rejection_without_an_instruction_is_its_first_line(h100):
    """Of jax 0.10.2: what XLA says, and what becomes of it."""
    first = "INTERNAL: Couldn't find output tile sizes that satisfy hlo"
    named = '%dot.96 = bf16[2541,64]{1,0} dot(%bitcast, %p), metadata={op_name="jit(step)/jvp(Net)/mlp/dot_general"}'
    with_instruction, without = (explained(RuntimeError(text), h100) for text in (f"{first}: {named}", f"{first}\nat 0x1"))
    for error in (with_instruction, without):
        assert isinstance(error, CompileError)
        assert "h100-80gb" in error.got
        assert error.got.endswith(first)
    assert [word for word in ("dot", "bf16[2541,64]", "Net/mlp/dot_general") if word not in with_instruction.got] == []
    assert isinstance(explained(RuntimeError("ptxas not found"), h100), MissingDependencyError)
    assert isinstance(explained(RuntimeError("Loaded runtime CuDNN library: 9.1.0"), h100), MissingDependencyError)


def odd_attention(x):
    return jax.nn.dot_product_attention(x, x, x, implementation="cudnn").astype(jnp.float32).sum()


def test_a_program_that_requests_cudnn_is_told_so(h100):
    x = jax.ShapeDtypeStruct((2, 77, 4, 64), jnp.bfloat16)
    with pytest.raises(CompileError) as step:
        lower_and_compile(jax.grad(odd_attention), (x,), h100)

    def block(params, x):
        return x + jax.nn.dot_product_attention(x * params.astype(x.dtype), x, x, implementation="cudnn")

    with pytest.raises(CompileError) as planned:
        jaxremat.plan(block, jnp.ones(()), x, num_layers=2, budget="1GiB", target=h100)
    for error in (step.value, planned.value):
        assert [word for word in ("cuDNN", "77") if word not in error.got] == []
        assert "implementation='cudnn'" in error.cause


def test_other_errors_of_jax_are_left_alone(h100):
    mine = NotImplementedError()

    def wrong(params, x):
        raise mine

    with pytest.raises(NotImplementedError) as caught:
        jaxremat.plan(wrong, jnp.ones(()), jnp.ones(3), num_layers=2, budget="1GiB", target=h100)
    assert caught.value is mine


@pytest.mark.full
def test_kernels_are_saved_for_the_next_compile_and_go_with_the_process(h100, tmp_path):
    """Kernels in common are compiled once; the bytes of a step don't depend on what was saved."""
    code = """
import jax, jax.numpy as jnp, os, pathlib, tempfile
from jaxremat.xla.compile import lower_and_compile
x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
folder = pathlib.Path(tempfile.gettempdir())
totals = [lower_and_compile(lambda x: jnp.sin(x @ x).sum(), (x,), "h100-80gb").memory.total_bytes for _ in range(2)]
(kernels,) = folder.glob("jaxremat-*/MainThread")
print(totals[0] == totals[1], kernels.stat().st_size > 0)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "JAX_PLATFORMS": "cpu", SIZE: "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert list(tmp_path.glob("jaxremat-*")) == []


def test_a_preset_leaves_out_what_the_user_has_set(monkeypatch):
    assert preset_options("default") == {}
    assert preset_options("latency-hiding") == {"xla_gpu_enable_latency_hiding_scheduler": True}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=false")
    assert preset_options("latency-hiding") == {}
    assert preset_options("jax-toolbox")["xla_gpu_all_gather_combine_threshold_bytes"] == 2**30


@pytest.mark.full
@pytest.mark.any_jax
def test_presets_side_by_side(h100, tmp_path, capsys):
    """Each is compiled with its own options, and its records say which."""
    out = tmp_path / "rows.jsonl"
    argv = ["--model", "tiny", "--num-layers", "1", "--mesh", "fsdp=8", "--policy", "nothing", "--batch", "2"]
    assert main([*argv, "--seq-len", "64", "--xla-preset", "default", "jax-toolbox", "--out", str(out)]) == 0
    assert "nothing with jax-toolbox" in " ".join(capsys.readouterr().out.split())
    rows = [row for row in map(json.loads, out.read_text().splitlines()) if row["record"] == "trial"]
    assert [row["xla_preset"] for row in rows] == ["default", "jax-toolbox"]
    assert [row["config"]["xla_options"] for row in rows] == [{}, preset_options("jax-toolbox")]


def test_a_preset_that_is_not_known_is_rejected():
    with pytest.raises(UsageError) as caught:
        check_run(RunFlags(xla_preset=("jaxtoolbox",)))
    assert "jaxtoolbox" in caught.value.got
    assert "'jax-toolbox'" in caught.value.next_step


@pytest.mark.parametrize(
    ("flag", "flags"),
    [
        ("--save-plan", {"policy": ("auto",), "save_plan": Path("plan.json")}),
        ("--plot", {"frontier": True, "batch": (2,), "plot": Path("x.png")}),
    ],
)
def test_a_file_of_one_answer_takes_one_preset(flag, flags):
    with pytest.raises(UsageError) as caught:
        check_run(RunFlags(xla_preset=("default", "jax-toolbox"), **flags))
    assert [word for word in (flag, "--xla-preset", "2") if word not in caught.value.got] == []
    check_run(RunFlags(xla_preset=("jax-toolbox",), **flags))


@pytest.mark.full
@pytest.mark.any_jax
def test_presets_side_by_side_on_a_page_and_for_xprof(h100, tmp_path):
    """The policy's name has the preset, so neither overwrites the other."""
    argv = ["--model", "tiny", "--num-layers", "1", "--policy", "nothing", "--batch", "2", "--seq-len", "64"]
    argv += ["--xla-preset", "default", "jax-toolbox"]
    assert explain.main([*argv, "--page", str(tmp_path / "page.html"), "--xprof", str(tmp_path / "xprof")]) == 0
    assert "nothing with jax-toolbox" in json.dumps(data_of((tmp_path / "page.html").read_text()))
    assert len(list((tmp_path / "xprof").rglob("*.xplane.pb"))) == 2


def test_a_preset_is_for_gpus():
    with pytest.raises(UsageError) as caught:
        check_run(RunFlags(xla_preset=("latency-hiding",), target="cpu"))
    assert "--target cpu" in caught.value.got


def test_a_sweep_has_a_trial_for_each_preset(tmp_path):
    flags = SweepFlags(out=tmp_path / "rows", target=("h100-80gb",), xla_preset=("default", "latency-hiding"))
    trials = sweep_trials(flags)
    assert [trial.xla_preset for trial in trials] == ["default", "latency-hiding"]
    tasks = [trial.task for trial in trials if trial.task]
    assert [task.flags["xla_preset"] for task in tasks] == [("default",), ("latency-hiding",)]
    assert len({trial.key for trial in trials}) == 2


@pytest.mark.full
def test_matrices_are_padded_only_where_xla_does_so_on_the_device(h100):
    """Rows of 257 values would be padded to 264 where a matmul can't be a Triton fusion, as on a T4."""
    x, y = (jax.ShapeDtypeStruct((256, 257), "float16"), jax.ShapeDtypeStruct((257, 256), "float16"))
    padded = {
        target.name: "264" in lower_and_compile(jnp.dot, (x, y), target).hlo_text for target in (h100, load_target("t4"))
    }
    assert padded == {"h100-80gb": False, "t4": True}
