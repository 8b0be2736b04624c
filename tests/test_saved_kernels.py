"""The kernels that XLA saves: a program is the same with those of others, and a file that can't be used is begun anew."""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxremat.chips.target import load_target
from jaxremat.xla import compile as compile_module
from jaxremat.xla import saved_kernels as module
from jaxremat.xla.compile import Compilation, begin_compile, when_requested
from jaxremat.xla.results import SINCE, kernels_path
from jaxremat.xla.saved_kernels import saved_kernels

OPTION = "xla_gpu_kernel_cache_file"


@pytest.fixture
def shared(tmp_path, monkeypatch, h100) -> Path:
    """The file of the kernels for an H100 in an empty store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SINCE, raising=False)
    return kernels_path(h100)


def compile_with(h100, folder: Path, shared: Path | None, made: bytes = b"") -> bytes | None:
    """What a compile finds in its file, to which it adds `made`."""
    with saved_kernels(h100, folder, shared) as options:
        own = Path(options[OPTION])
        found = own.read_bytes() if own.exists() else None
        own.write_bytes((found or b"") + made)
    return found


def process_folder(tmp_path: Path, number: int | str) -> Path:
    folder = tmp_path / f"process-{number}"
    folder.mkdir(exist_ok=True)
    return folder


def test_another_process_finds_the_kernels(tmp_path, h100, shared):
    assert compile_with(h100, process_folder(tmp_path, 1), shared, b"one") is None
    assert compile_with(h100, process_folder(tmp_path, 2), shared, b"two") == b"one"
    assert compile_with(h100, process_folder(tmp_path, 1), shared) == b"onetwo"


def test_without_a_store_a_thread_has_its_own_kernels(tmp_path, h100):
    assert compile_with(h100, process_folder(tmp_path, 1), None, b"one") is None
    assert compile_with(h100, process_folder(tmp_path, 1), None) == b"one"
    assert compile_with(h100, process_folder(tmp_path, 2), None) is None


@pytest.mark.parametrize("content", [b"", b"abc", bytes(range(100))], ids=["empty", "short", "damaged"])
def test_a_damaged_file_is_begun_anew(tmp_path, h100, shared, content):
    shared.parent.mkdir(parents=True)
    shared.write_bytes(content)
    assert not compile_with(h100, process_folder(tmp_path, 1), shared, b"one")
    assert compile_with(h100, process_folder(tmp_path, 2), shared) == b"one"


def test_a_file_that_is_too_large_is_begun_anew(tmp_path, h100, shared, monkeypatch):
    compile_with(h100, process_folder(tmp_path, 1), shared, bytes(100))
    monkeypatch.setattr(module, "MOST_BYTES", 99)
    assert compile_with(h100, process_folder(tmp_path, 2), shared, b"one") is None
    assert compile_with(h100, process_folder(tmp_path, 1), shared) == b"one"


def test_fresh_ignores_the_kernels_of_before(tmp_path, h100, shared, monkeypatch):
    compile_with(h100, process_folder(tmp_path, 1), shared, b"one")
    monkeypatch.setenv(SINCE, repr(os.stat(shared).st_mtime + 1))
    assert compile_with(h100, process_folder(tmp_path, 2), shared) is None


def test_a_compile_that_fails_shares_nothing(tmp_path, h100, shared):
    def rejected() -> None:
        with saved_kernels(h100, process_folder(tmp_path, 1), shared) as options:
            Path(options[OPTION]).write_bytes(b"half")
            raise RuntimeError("XLA rejected it")

    with pytest.raises(RuntimeError):
        rejected()
    assert not shared.exists()


def test_a_device_that_is_here_has_no_saved_kernels(tmp_path, shared):
    with saved_kernels(load_target("cpu"), tmp_path, shared) as options:
        assert options == {}
    assert not shared.exists()


def test_kinds_of_gpus_have_files_of_their_own(shared):
    paths = {name: kernels_path(load_target(name)) for name in ("h100-80gb", "h200", "b200", "a100-80gb")}
    assert paths["h100-80gb"] == paths["h200"] == shared
    assert len({*paths.values()}) == 3


def layers(x, w):
    """Twelve layers whose loss has matmuls, a softmax and a reduction."""
    step = jax.checkpoint(lambda x, w: (x + jax.nn.softmax(jnp.tanh(x @ w)) @ w.T, None), prevent_cse=False)
    return jnp.mean(jnp.square(jax.lax.scan(step, x, w)[0]))


@pytest.mark.full
def test_a_program_is_the_same_with_the_kernels_of_others(tmp_path, h100, shared, monkeypatch):
    shapes = (jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((12, 256, 256), jnp.bfloat16))

    def compiled(program, folder: str) -> Compilation:
        """A program that a process compiles which has compiled nothing before."""
        monkeypatch.setattr(compile_module, "_own_folder", lambda: process_folder(tmp_path, folder))
        return begin_compile(when_requested, program, shapes, h100, with_dump=True)()

    for number, program in enumerate((jax.grad(layers, argnums=1), jax.grad(lambda x, w: layers(2 * x, w), argnums=(0, 1)))):
        found, sizes = [], set()
        for kernels in ("some", "all"):
            found.append(compiled(program, f"{kernels}-{number}"))
            sizes.add(shared.stat().st_size)
            for one in shared.parent.iterdir():
                if one != shared:
                    one.unlink()  # the result, which would be taken else
        some, every = found
        assert (some.memory, some.hlo_text) == (every.memory, every.hlo_text)
        # The proto differs from compile to compile, and the map is read from it.
        assert dataclasses.replace(some.dump, proto=b"") == dataclasses.replace(every.dump, proto=b"")
        assert some.memory_map.buffers == every.memory_map.buffers
        assert len(sizes) == 1, "all kernels were there"
