"""An error of the machine, of a path or of a variable is one message with a next step. A fault of jaxremat isn't among them."""

import errno
import os
import subprocess
import sys

import pytest

from jaxremat.cli.command import run_command
from jaxremat.cli.machine.blame import OUT_OF_HOST_MEMORY, TOO_MANY_FILES, blamed
from jaxremat.cli.machine.variables import check_xla_flags
from jaxremat.errors import CompileError, UsageError


def led_to(first: Exception) -> Exception:
    """Another error that this one led to."""
    error = ImportError("numpy can't be imported")
    error.__context__ = first
    return error


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (MemoryError(), OUT_OF_HOST_MEMORY),
        (led_to(MemoryError()), OUT_OF_HOST_MEMORY),
        (led_to(ImportError("libopenblas.so: failed to map segment from shared object")), OUT_OF_HOST_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), OUT_OF_HOST_MEMORY),
        (RuntimeError("can't start new thread"), OUT_OF_HOST_MEMORY),
        (led_to(OSError(errno.EMFILE, "Too many open files", "x.py")), TOO_MANY_FILES),
    ],
)
def test_the_machine(error, found):
    assert blamed(error, {}) is found


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.EROFS, errno.ENAMETOOLONG])
def test_a_path(number):
    found = blamed(OSError(number, "REASON", "/root/x"), {})
    assert found is not None
    assert "/root/x" in found.got
    assert "REASON" in found.got
    assert found.next_step


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("JAX_ENABLE_X64", "maybe", "invalid truth value 'maybe' for environment 'JAX_ENABLE_X64'"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "huge", 'Invalid value "huge" for JAX flag jax_default_matmul_precision'),
        ("JAX_PLATFORMS", "nonsense", "Unable to initialize backend 'nonsense' (set JAX_PLATFORMS='')"),
        ("JAX_PLATFORM_NAME", "nonsense", "Unknown backend nonsense. Available backends are ['cpu']."),
    ],
)
def test_a_variable(name, value, text):
    found = blamed(ValueError(text), {"HOME": "/", name: value})
    assert found is not None
    assert f"{name}={value}" in found.got
    assert name in found.next_step


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("HALF-WAY"),
        FileNotFoundError(errno.ENOENT, "No such file", "/x"),
        ValueError("JAX_PLATFORMS"),
        KeyError("jax_enable_x64"),
    ],
)
def test_a_fault_of_ours(error):
    assert blamed(error, {"JAX_PLATFORMS": "cpu"}) is None


def test_a_command_prints_no_traceback(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORM_NAME", "nonsense")

    def fails() -> int:
        raise CompileError("XLA couldn't compile the step: Unknown backend nonsense")

    assert run_command(fails) == 1
    err = capsys.readouterr().err
    assert "JAX_PLATFORM_NAME" in err
    assert "Traceback" not in err


def test_an_error_with_a_next_step_of_its_own_stays(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORM_NAME", "nonsense")

    def fails() -> int:
        raise CompileError("Unknown backend nonsense", next_step="ITS OWN")

    assert run_command(fails) == 1
    assert "ITS OWN" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("value", "next_step"),
    [
        ("--xla_nonsense=1 --xla_gpu_autotune_level=0", "export XLA_FLAGS='--xla_gpu_autotune_level=0'"),
        ("--xla_gpu_autotune_level=many", "unset XLA_FLAGS"),
        ("nonsense", "unset XLA_FLAGS"),
        ("--xla_gpu_autotune_level=0", None),
    ],
)
def test_flags_of_xla(value, next_step, monkeypatch):
    """XLA itself ends the process where it can't read them."""
    monkeypatch.setenv("XLA_FLAGS", value)
    monkeypatch.delitem(sys.modules, "jaxlib", raising=False)
    if next_step is None:
        check_xla_flags()
        return
    with pytest.raises(UsageError) as caught:
        check_xla_flags()
    assert f"XLA_FLAGS={value}" in caught.value.got
    assert caught.value.next_step == next_step


@pytest.mark.full
def test_a_command_rejects_flags_of_xla():
    argv = ["run", "--model", "tiny", "--target", "cpu", "--batch", "1"]
    environment = {**os.environ, "XLA_FLAGS": "--xla_nonsense=1"}
    done = subprocess.run([sys.executable, "-m", "jaxremat", *argv], capture_output=True, text=True, env=environment)
    (said,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert "XLA_FLAGS=--xla_nonsense=1" in said
