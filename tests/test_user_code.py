"""The user's code prints to stderr, and its exceptions show the user's own traceback and nothing else."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxremat.cli.command import run_command
from jaxremat.errors import UnknownPolicyError, UserCodeError
from jaxremat.policy.grammar import parse
from jaxremat.workload.load import load_factory
from jaxremat.workload.user_code import output_to_stderr, user_code, wrap_user_function
from jaxremat.workload.workload import Workload
from tests.user_files import Write

ROOT = Path(__file__).parent.parent
#: Prints wherever a user's code may run.
LOUD = """
import jax, jax.numpy as jnp, optax, jaxremat
print("import")

def loss(params, batch):
    print("loss")
    return jnp.mean((batch @ params) ** 2)

def init(key):
    print("init")
    return jnp.ones((4, 4))

def batches():
    print("batches")
    for number in range(2):
        print("batch", number)
        yield jnp.full((8, 4), number)

def update(gradients, state, params=None):
    print("update")
    return gradients, state

def under(policy):
    print("under")
    return loss

optimizer = optax.GradientTransformation(lambda params: print("optimizer") or (), update)
batch = jax.ShapeDtypeStruct((8, 4), jnp.float32)
params = jax.ShapeDtypeStruct((4, 4), jnp.float32)

def workload():
    print("workload")
    return jaxremat.Workload(
        loss=loss, params=params, batch=batch, init=init, batches=batches, optimizer=optimizer, loss_under=under
    )

def step(params):
    print("step")
    jax.debug.print("run {}", params[0])
    return params

def stepped():
    return jaxremat.Workload(step=step, args=(jnp.ones(4),))
"""


def error_of(use: Callable[[Workload], object] = id, text: str = "train.py:workload") -> UserCodeError:
    """The error of `train.py`: at its import, at its call, or when its workload is used."""
    with pytest.raises(UserCodeError) as caught:
        use(load_factory(text)())
    assert str(caught.value).endswith(f"\n{caught.value.trace}")
    return caught.value


def function_of(workload: Workload, part: str) -> Callable[..., Any]:
    """A function that the workload has."""
    function = vars(workload)[part]
    assert function is not None
    return function


def trace(workload: Workload) -> None:
    """Traces the loss, as compiling it does."""
    jax.eval_shape(jax.grad(function_of(workload, "loss")), *workload.loss_args)


def test_what_is_printed_goes_to_stderr(write: Write, capsys):
    write("train.py", LOUD)
    found = load_factory("train.py:workload")()
    jax.eval_shape(function_of(found, "loss"), *found.loss_args)
    jax.eval_shape(function_of(found, "loss_under")(parse("dots")), *found.loss_args)
    params = function_of(found, "init")(jax.random.key(0))
    assert [batch[0, 0] for batch in function_of(found, "batches")()] == [0, 1]
    assert found.optimizer
    found.optimizer.update(params, found.optimizer.init(params))
    stepped = load_factory("train.py:stepped")()
    with output_to_stderr():
        function_of(stepped, "step")(*stepped.args)
        jax.effects_barrier()
    out, err = capsys.readouterr()
    assert out == ""
    order = "import workload loss under loss init batches batch-0 batch-1 optimizer update step run-1.0"
    assert err.splitlines() == [line.replace("-", " ") for line in order.split()]


@pytest.mark.full
def test_json_holds_only_records(tmp_path):
    """Whatever the user's code prints while it is imported, called, traced, and run."""
    (tmp_path / "train.py").write_text(LOUD)
    flags = "--model train.py:stepped --policy none --target cpu --steps 1 --json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "jaxremat.run", *flags.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "trial" in {json.loads(line)["record"] for line in done.stdout.splitlines()}
    printed = [line for line in done.stderr.splitlines() if line in ("import", "step", "run 1.0")]
    assert printed == ["import", "step", "run 1.0", "run 1.0"]


def test_a_compiled_program_s_prints_go_to_stderr(capsys):
    @jax.jit
    def step(x):
        jax.debug.print("x is {x}", x=x)
        return x

    with output_to_stderr():
        step(3)
        jax.effects_barrier()
    assert capsys.readouterr() == ("", "x is 3\n")


def test_a_wrapped_function_shows_its_own_signature():
    def loss(params, batch, key=None):
        """Mine."""

    wrapped = wrap_user_function(loss)
    assert inspect.signature(wrapped) == inspect.signature(loss)
    assert (wrapped.__name__, wrapped.__doc__) == ("loss", "Mine.")


def test_an_error_at_the_import(write: Write, tmp_path):
    write("train.py", "import helper\nhelper.divide(1, 0)\n")
    write("helper.py", "def divide(a, b):\n    return a / b\n")
    error = error_of()
    assert names_of(error) == ("train.py", "ZeroDivisionError")
    assert without_carets(error.trace) == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/train.py", line 2, in <module>',
        "    helper.divide(1, 0)",
        f'  File "{tmp_path}/helper.py", line 2, in divide',
        "    return a / b",
        "ZeroDivisionError: division by zero",
    ]


@pytest.mark.parametrize("name", ["train.py", "train"])
def test_a_missing_module_that_the_file_imports(write: Write, tmp_path, name):
    """By a file, and by a module of the current folder."""
    write("train.py", "import my.missing_one")
    write("my/__init__.py", "")
    error = error_of(text=f"{name}:workload")
    assert names_of(error) == (name, "ModuleNotFoundError")
    assert without_carets(error.trace) == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/train.py", line 1, in <module>',
        "    import my.missing_one",
        "ModuleNotFoundError: No module named 'my.missing_one'",
    ]


def test_a_syntax_error_shows_the_line_and_the_place(write: Write, tmp_path):
    write("train.py", "workload = (1,\n")
    error = error_of()
    assert names_of(error) == ("train.py", "SyntaxError")
    assert error.trace.splitlines()[:3] == [
        f'  File "{tmp_path}/train.py", line 1',
        "    workload = (1,",
        "               ^",
    ]


def test_an_error_in_the_factory(write: Write, tmp_path):
    write("train.py", "def workload():\n    raise ValueError('two\\nlines')\n")
    error = error_of()
    assert names_of(error) == ("train.py:workload", "ValueError")
    assert error.trace == (
        "Traceback (most recent call last):\n"
        f'  File "{tmp_path}/train.py", line 2, in workload\n'
        "    raise ValueError('two\\nlines')\n"
        "ValueError: two\nlines"
    )


def test_an_error_that_another_one_caused(write: Write, tmp_path):
    write(
        "train.py",
        """
        def workload():
            try:
                {}["key"]
            except KeyError as error:
                raise ValueError("no key") from error
        """,
    )
    assert without_carets(error_of().trace) == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/train.py", line 4, in workload',
        '    {}["key"]',
        "KeyError: 'key'",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/train.py", line 6, in workload',
        '    raise ValueError("no key") from error',
        "ValueError: no key",
    ]


TRACED = """
import flax.linen as nn, jax, jax.numpy as jnp, jaxremat

class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(4)(x) @ x, None

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return stack()(x, None)[0]

def loss(params, batch):
    step = jax.jit(lambda x: jax.lax.scan(lambda c, _: (Net().init(jax.random.key(0), c), None), x, None, length=3)[0])
    return jnp.mean(jax.vmap(step)(batch))

def workload():
    params = jax.ShapeDtypeStruct((4,), jnp.float32)
    return jaxremat.Workload(loss=loss, params=params, batch=jax.ShapeDtypeStruct((2, 3, 5), jnp.float32))
"""


def test_the_frames_of_jax_and_flax_are_left_out(write: Write, tmp_path):
    """Also while JAX traces, when its own filter hasn't come yet."""
    write("train.py", TRACED)
    error = error_of(trace)
    assert "loss" in error.got
    assert {line.strip() for line in error.trace.splitlines() if line.startswith("  File")} == {
        f'File "{tmp_path}/train.py", line {number}, in {name}'
        for number, name in [(17, "loss"), (16, "<lambda>"), (13, "__call__"), (7, "__call__")]
    }


def test_all_frames_are_there_on_demand(write: Write, monkeypatch):
    monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "off")
    write("train.py", TRACED)
    assert "/flax/linen/module.py" in error_of(trace).trace


def test_a_wrong_number_of_arguments_needs_no_traceback(write: Write):
    write("train.py", LOUD.replace("def init(key):", "def init(key, scale):"))
    error = error_of(lambda workload: function_of(workload, "init")(jax.random.key(0)))
    assert names_of(error) == ("train.py:workload", "TypeError")
    assert "init" in error.got
    assert error.trace == "TypeError: init() missing 1 required positional argument: 'scale'"


def next_batch(workload: Workload) -> Any:
    return next(function_of(workload, "batches")())


def trace_under_dots(workload: Workload) -> Any:
    loss = function_of(workload, "loss_under")(parse("dots"))
    return jax.eval_shape(loss, workload.abstract_params, workload.abstract_batch)


@pytest.mark.parametrize(
    ("line", "use", "part"),
    [
        ('print("batches")', next_batch, "batches"),
        ('print("batch", number)', next_batch, "batches"),
        ('print("loss")', trace_under_dots, "loss"),
    ],
)
def test_an_error_in_real_data_and_in_the_loss_under_a_policy(write: Write, tmp_path, line, use, part):
    write("train.py", LOUD.replace(line, "print(1 / 0)"))
    error = error_of(use)
    assert names_of(error) == ("train.py:workload", "ZeroDivisionError")
    assert part in error.got
    assert f'File "{tmp_path}/train.py", line' in error.trace


@pytest.mark.parametrize("part", ["as_config", "data_hash", "logical_axes", "otherwise"])
def test_an_error_in_what_a_workload_says(write: Write, part):
    write("train.py", LOUD.replace("init=init,", f"{part}=lambda *args: 1 / 0,"))
    error = error_of(lambda workload: function_of(workload, part)())
    assert names_of(error) == ("train.py:workload", "ZeroDivisionError")
    assert part in error.got


def test_a_script_that_ends_the_process(write: Write, tmp_path):
    write("train.py", "import sys\nsys.exit(3)\n")
    error = error_of()
    assert "3" in error.got
    assert "sys.exit" in error.cause
    assert '__name__ == "__main__"' in error.next_step
    assert error.trace.splitlines()[1:] == [
        f'  File "{tmp_path}/train.py", line 2, in <module>',
        "    sys.exit(3)",
        "SystemExit: 3",
    ]


def test_our_own_errors_pass_as_they_are(write: Write):
    write("train.py", "import jaxremat\njaxremat.parse('dotz')")
    with pytest.raises(UnknownPolicyError):
        load_factory("train.py:workload")


def test_ctrl_c_passes(write: Write):
    write("train.py", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_factory("train.py:workload")


def test_an_error_after_a_swallowed_ctrl_c_is_the_interrupt(capsys):
    def work() -> int:
        with user_code("the call of it"):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise AssertionError("JAX was interrupted half-way") from None
        return 0

    assert run_command(work) == 130
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_full_device_is_not_the_user_s_error():
    """It is a trial's result, whichever code ran out of memory."""
    with pytest.raises(jax.errors.JaxRuntimeError), user_code("the init of it"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.")


def test_a_command_prints_the_message_and_no_other_traceback(write: Write, capsys):
    write("train.py", "def workload():\n    raise ValueError('mine')\n")
    assert run_command(lambda: bool(load_factory("train.py:workload")())) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxremat: ")
    assert err.splitlines()[1] == "Traceback (most recent call last):"
    assert err.endswith("\nValueError: mine\n")
    assert "jaxremat/workload" not in err


def names_of(error: UserCodeError) -> tuple[str, str]:
    """Which code raised, and which exception."""
    (place,), (exception,) = (re.findall(pattern, error.got) for pattern in (r"train[\w.:]*\w|train\b", r"\w+Error"))
    return place, exception


def without_carets(trace: str) -> list[str]:
    """The lines of a traceback without those that underline a place, which depend on Python's version."""
    return [line for line in trace.splitlines() if not line or line.strip(" ~^")]
