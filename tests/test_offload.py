"""Offloading in a scan: each copy of a compiled loop takes its own layer's values, and programs where it wouldn't are refused."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxremat
from jaxremat.answer.planned import plan_run
from jaxremat.answer.records import answer_plan
from jaxremat.cli.command import run_command
from jaxremat.cli.run import main
from jaxremat.config import TrainConfig
from jaxremat.errors import CompileError, UsageError
from jaxremat.planner.plan import Plan
from jaxremat.policy.grammar import parse
from jaxremat.policy.offload import PASS, check_layers, flag_line, has_fault, is_faulty
from jaxremat.policy.spec import NOTHING
from jaxremat.report.plan import code_to_paste
from jaxremat.trial.trials import Trials
from jaxremat.workload.factory import factory_of
from jaxremat.workload.workload import Workload
from jaxremat.xla import compile as xla_compile
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.host_slices import host_slices
from tests.program_checks import check_program
from tests.program_parts import AUTHORS_NAME
from tests.programs import DrawnProgram, Stack
from tests.user_files import Write

NUM, WIDTH = 6, 512
PARAMS = jax.ShapeDtypeStruct((NUM, WIDTH, WIDTH), "bfloat16")
X = jax.ShapeDtypeStruct((256, WIDTH), "bfloat16")
#: The pass that a compile of a scan that offloads disables with this version of JAX.
DISABLED = PASS if has_fault() else None


def layer(w, x):
    return x + jnp.sin(checkpoint_name(jnp.tanh(x @ w), "wide"))


def scanned(ws, x, reverse=False):
    x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws, reverse=reverse)
    return jnp.square(x.astype(jnp.float32)).sum()


def from_last_to_first(ws, x):
    return scanned(ws, x, reverse=True)


def unrolled(ws, x):
    for w in ws:
        x = layer(w, x)
    return jnp.square(x.astype(jnp.float32)).sum()


def gradient(loss, policy):
    return jax.grad(jaxremat.with_policy(loss, policy))


# What is compiled.


@pytest.mark.full
@pytest.mark.parametrize(
    ("loss", "policy"),
    [(from_last_to_first, "offload:wide"), (scanned, "every:3+offload:wide"), (scanned, "1*nothing|1*offload:wide")],
    ids=["reverse scan", "groups", "mix"],
)
def test_the_backward_loop_reads_the_layers_in_the_opposite_order(loss, policy, h100):
    done = lower_and_compile(gradient(loss, policy), (PARAMS, X), h100)
    found = host_slices(done.module)
    writes, reads = ([copy for copy in found if copy.is_write == is_write] for is_write in (True, False))
    assert done.disabled_pass == DISABLED
    assert len(writes) == len(reads) == 1
    assert all(copy.is_right and None not in copy.used for copy in found)
    steps = len(set(writes[0].used))
    assert steps == {"e": 3, "1": NUM / 2}.get(policy[0], NUM)
    assert reads[0].used[:steps] == writes[0].used[:steps][::-1]
    assert (writes[0].used[0] == 0) == (loss is scanned), "a reverse scan writes the last layer first"


@pytest.mark.full
def test_with_the_pass_a_faulty_xla_is_caught(h100):
    """On the JAX line that has the fault the program is refused, and on the other line it is right."""
    options = {"xla_disable_hlo_passes": "rematerialization"}
    step = gradient(scanned, "offload:wide")
    if has_fault():
        with pytest.raises(CompileError) as rejected:
            lower_and_compile(step, (PARAMS, X), h100, options=options)
        assert PASS in rejected.value.cause
        assert flag_line() in rejected.value.next_step
        copied, said = re.findall(r"(?:byte|says) ([\d, ]+)", rejected.value.got)
        size = X.size * 2
        assert (copied, said) == (f"0, {size}, {2 * size}", f"{5 * size}, {4 * size}, {3 * size}")
    else:
        read = next(copy for copy in host_slices(lower_and_compile(step, (PARAMS, X), h100, options=options).module))
        assert read.written is not None, "the pass wrote down where the copies begin"


@pytest.mark.full
def test_unrolled_layers_and_other_policies_are_compiled_as_before(h100):
    for loss, policy in ((unrolled, "offload:wide"), (scanned, "save:wide")):
        done = lower_and_compile(gradient(loss, policy), (PARAMS, X), h100)
        assert (done.disabled_pass, host_slices(done.module)) == (None, ())
        assert (done.memory.host_temp_bytes > 0) == parse(policy).offloads


# A user's own program.


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + checkpoint_name(jnp.tanh(nn.Dense(8, use_bias=False)(x)), "wide")


def mean_of(module):
    x = jax.ShapeDtypeStruct((4, 8), "float32")
    params = jax.eval_shape(module.init, jax.random.key(0), x)
    return lambda: jax.eval_shape(jax.grad(lambda params, x: module.apply(params, x).mean()), params, x)


def traced(loss, policy, num=NUM):
    params = jax.ShapeDtypeStruct((num, *PARAMS.shape[1:]), "bfloat16")
    return lambda: jax.eval_shape(gradient(loss, policy), params, X)


def by_scan_layers(policy):
    return lambda: jax.eval_shape(lambda ws, x: jaxremat.scan_layers(layer, ws, x, policy=policy), PARAMS, X)


def by_microbatches(ws, x):
    """Unrolled layers within a scan over microbatches."""
    parts = x.reshape(2, -1, WIDTH)
    return jax.lax.scan(lambda total, part: (total + unrolled(ws, part), None), jnp.zeros(()), parts)[0]


REJECTED = {
    "with_policy": traced(scanned, "offload:wide"),
    "with_policy, microbatches": traced(by_microbatches, "offload:wide"),
    "with_policy, groups": traced(scanned, "every:2+offload:wide"),
    "with_policy, mix": traced(scanned, "1*nothing|1*offload:wide"),
    "scan_layers": by_scan_layers("offload:wide"),
    "Layers": mean_of(jaxremat.Layers(Dense(), 2, "offload:wide")),
    "remat": mean_of(jaxremat.remat(Dense, "offload:wide", in_scan=True)()),
    "remat of a function": lambda: jax.eval_shape(
        jaxremat.remat(layer, "offload:wide"), jax.ShapeDtypeStruct((WIDTH, WIDTH), "bfloat16"), X
    ),
}
ALLOWED = {
    "unrolled": traced(unrolled, "offload:wide"),
    "unrolled Layers": mean_of(jaxremat.Layers(Dense(), 2, "offload:wide", scan=False)),
    "one layer": mean_of(jaxremat.Layers(Dense(), 1, "offload:wide")),
    "nothing offloaded": traced(scanned, "save:wide"),
}


@pytest.mark.skipif(not has_fault(), reason="this version of XLA has no fault")
@pytest.mark.parametrize("what", REJECTED)
def test_a_program_for_a_gpu_is_rejected(what):
    with jax.default_device("gpu"), pytest.raises(UsageError) as rejected:
        REJECTED[what]()
    assert flag_line() in rejected.value.next_step


def test_a_command_traces_what_it_compiles_itself():
    def work():
        for trace in REJECTED.values():
            trace()
        return 0

    with jax.default_device("gpu"):
        assert run_command(work) == 0


@pytest.mark.parametrize("what", [*REJECTED, *ALLOWED])
def test_other_programs_are_traced(what):
    """Any on a CPU. On a GPU those that have no fault: of unrolled layers, and with a version of XLA that is right."""
    (REJECTED | ALLOWED)[what]()
    if what in ALLOWED or not has_fault():
        with jax.default_device("gpu"):
            (REJECTED | ALLOWED)[what]()


def test_the_number_of_steps_is_that_of_the_scan_that_offloads():
    with jax.default_device("gpu"):
        for policy, num_layers in (("every:1+offload:a", 6), ("1*nothing|1*offload:a", 2), ("offload:a", 1), ("every:2", 6)):
            check_layers(parse(policy), num_layers)


@pytest.mark.full
@pytest.mark.skipif(not has_fault(), reason="this version of XLA has no fault")
def test_what_jaxremat_traced_is_no_excuse_for_a_user_s_own_call():
    """JAX keeps traces of a jitted function. The one of `lower_and_compile` isn't the one of the user's call."""
    step = jax.jit(gradient(scanned, "offload:wide"))
    with jax.default_device("gpu"):
        lower_and_compile(step, (PARAMS, X), "cpu")
        with pytest.raises(UsageError):
            step.trace(PARAMS, X)


IN_A_CHILD = """
import os, jax, jax.numpy as jnp
from jaxremat.errors import UsageError
from jaxremat.policy.offload import check_scan, flag_line
from jaxremat.policy.grammar import parse
jnp.ones(2) + 1
os.environ["XLA_FLAGS"] = os.environ["LATE"]
with jax.default_device("gpu"):
    try:
        check_scan(parse("offload:a"), 2)
        print("traced")
    except UsageError:
        print("rejected")
"""


@pytest.mark.full
@pytest.mark.skipif(not has_fault(), reason="this version of XLA has no fault")
def test_the_flag_counts_as_xla_read_it():
    """A process that disables the pass before it starts, and then changes the variable."""
    flags = {name: f"--xla_disable_hlo_passes={value}" for name, value in (("XLA_FLAGS", PASS), ("LATE", "dce"))}
    done = subprocess.run([sys.executable, "-c", IN_A_CHILD], env=os.environ | flags, capture_output=True, text=True)
    assert done.stdout.strip() == "traced", done.stderr


def test_the_line_keeps_the_user_s_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert flag_line() == f"XLA_FLAGS=--xla_disable_hlo_passes={PASS}"
    monkeypatch.setenv("XLA_FLAGS", flag_line().removeprefix("XLA_FLAGS="))
    assert flag_line() == f"XLA_FLAGS=--xla_disable_hlo_passes={PASS}"
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=dce --xla_gpu_autotune_level=0")
    assert flag_line() == f'XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_disable_hlo_passes=dce,{PASS}"'
    assert flag_line("a", "b") == 'XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_disable_hlo_passes=dce,a,b"'


def test_which_versions_have_the_fault():
    assert [is_faulty(version) for version in ("0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0.1", "1.0.0")] == [
        *(True, True, False, False, False, False)
    ]


# What a command says, and what a plan does.


SCANNED = """
import jax, jax.numpy as jnp, jaxremat
from jax.ad_checkpoint import checkpoint_name

def loss(ws, x):
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.sin(checkpoint_name(jnp.tanh(x @ w), "wide")), None), x, ws)
    return jnp.square(x).mean()

def workload(batch: int = 256) -> jaxremat.Workload:
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, "float32")
    return jaxremat.Workload(loss=loss, params=shape(4, 256, 256), batch=shape(batch, 256))
"""


@pytest.fixture
def scanned_model(write: Write) -> list[str]:
    return ["--model", f"{write('scanned.py', SCANNED)}:workload", "--policy", "offload:wide", "--batch", "256"]


@pytest.mark.full
def test_a_record_and_the_heading_name_the_pass(scanned_model, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert main([*scanned_model, "--out", str(out)]) == 0
    assert json.loads(out.read_text().splitlines()[0])["disabled_pass"] == DISABLED
    assert (flag_line() in capsys.readouterr().out) == has_fault()


@pytest.mark.full
@pytest.mark.skipif(not has_fault(), reason="this version of XLA has no fault")
def test_a_trial_of_a_wrong_program_is_a_failed_row(scanned_model, monkeypatch, tmp_path):
    """With a compile that doesn't know of the fault."""
    monkeypatch.setattr(xla_compile, "has_fault", lambda: False)
    out = tmp_path / "rows.jsonl"
    assert main([*scanned_model, "--out", str(out)]) == 1
    row = json.loads(out.read_text().splitlines()[0])
    assert (row["error_kind"], row["step_s"], row["total_bytes"]) == ("CompileError", None, None)
    assert PASS in row["error"]


@pytest.mark.full
@pytest.mark.skipif(not has_fault(), reason="this version of XLA has no fault")
def test_a_plan_offloads_in_a_scan_only_where_its_copies_are_right(h100, monkeypatch):
    """The plan that offloads names the flag. With a compile that doesn't know of the fault, the plan offloads nothing."""
    target = replace(h100, speed=replace(h100.speed, host_link_bytes_per_s=1e14))
    workload = Workload(
        loss=lambda ws, x: jnp.square(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None), x, ws)[0]).mean(),
        params=jax.ShapeDtypeStruct((NUM, 1024, 1024), "float32"),
        batch=jax.ShapeDtypeStruct((8192, 1024), "float32"),
        optimizer=optax.sgd(0.1),
    )
    run = Trials(factory_of(workload), TrainConfig(), target, 2**40)
    nothing = run.compile(NOTHING, 8192).memory.total_bytes

    def planned():
        found = plan_run(
            replace(run, steps={}), losses=("own",), batch=8192, max_batch=8192, budget_bytes=nothing + 2**22, named=False
        )
        assert isinstance(found.found, Plan)
        assert found.found.cost.total_bytes <= nothing + 2**22
        emitted = []
        answer_plan(found, "time", emitted.append)
        return emitted[0]

    right = planned()
    assert (parse(right.policy).offloads, right.disabled_pass) == (True, PASS)
    assert flag_line() in code_to_paste(right, right.as_code or (), ())[0]
    monkeypatch.setattr(xla_compile, "has_fault", lambda: False)
    other = planned()
    assert (parse(other.policy).offloads, other.disabled_pass) == (False, None)
    given = f'loss = jaxremat.with_policy(loss, "{other.policy}")'
    assert other.as_code
    assert code_to_paste(other, other.as_code, ()) == [
        given,
        "# or in the model itself, after the definition of a layer:",
        *other.as_code,
    ]


# That it changes no result.


@pytest.mark.full
@pytest.mark.parametrize(
    ("written", "policy"),
    [("unrolled", "every:2+offload:NAME"), ("scan", "offload:NAME"), ("nested scan", "1*nothing|1*offload:NAME")],
)
def test_offloading_changes_no_result(written, policy):
    drawn = DrawnProgram((Stack(("named", "dropout"), 4, written),), policy=policy, name=AUTHORS_NAME)
    check_program(drawn)
