"""Whose code a file is, by where Python loads modules from."""

import importlib
import sysconfig
from pathlib import Path

import flax
import jax
import numpy as np
import optax
import pytest

import jaxremat
from jaxremat.policy.names import written_at
from jaxremat.system import whose
from jaxremat.system.whose import is_installed, is_pythons, is_users, is_within

PACKAGE = Path(jaxremat.__file__).parent
JAX = Path(jax.__file__).parent


@pytest.fixture
def fresh(monkeypatch):
    """A function that forgets what was found of files and folders."""

    def forget() -> None:
        for found in (whose.is_users, whose._library_folders, whose._sites, whose._installed_into):
            found.cache_clear()

    yield forget
    monkeypatch.undo()
    forget()


def test_code_of_the_user_of_libraries_and_of_this_package():
    mine = ("/home/me/train.py", "/home/me/lib/python3-tools/train.py", "/tmp/ipykernel_7/3.py")
    assert all(is_users(file) and not is_installed(file) for file in mine)
    theirs = (jax.__file__, flax.__file__, optax.__file__, np.__file__, pytest.__file__, importlib.__file__)
    assert all(is_installed(file) and not is_users(file) for file in theirs)
    assert [is_pythons(file) for file in (importlib.__file__, np.__file__, "/home/me/train.py")] == [True, False, False]
    assert not is_users("<string>")
    assert all(is_users(str(PACKAGE / part)) for part in ("model/layers.py", "step/step.py"))
    assert not any(is_users(str(PACKAGE / part)) for part in ("policy/stack.py", "cli/run.py"))
    assert is_installed(PACKAGE / "model" / "layers.py")


def test_a_folder_whose_name_begins_like_another_s_is_another():
    assert is_within(JAX / "core.py", JAX)
    assert is_within(JAX, JAX)
    assert not is_within(f"{JAX}remat/model/layers.py", JAX)


def test_frames_of_a_package_beside_jax_are_not_jax_s():
    """A function that was compiled as if it lay in the folder `jaxremat` beside JAX, where pip installs it."""
    file = f"{JAX}remat/made_up.py"
    made: dict = {}
    exec(compile("import jax\n\ndef double(x):\n    return x * 2.0\n", file, "exec"), made)
    (equation,) = jax.make_jaxpr(made["double"])(1.0).jaxpr.eqns
    assert written_at(equation) == f"{file}:4"


def test_a_project_below_a_folder_called_site_packages_is_the_user_s(tmp_path):
    """And one that lies within the environment, but outside of the folder that packages are installed into."""
    assert is_users(str(tmp_path / "site-packages" / "mine" / "train.py"))
    assert is_users(str(tmp_path / "dist-packages" / "train.py"))
    assert is_users(str(Path(sysconfig.get_path("data")) / "project" / "train.py"))
    assert not is_users(str(Path(sysconfig.get_path("purelib")) / "zoo" / "vit.py"))


def test_what_pip_installed_into_another_folder_is_by_its_list_of_files(tmp_path, monkeypatch, fresh):
    """As `pip install --target` does. A file of the user's beside it isn't in the list, and nor is a project with metadata."""
    info = tmp_path / "zoo-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: zoo\nVersion: 1\n")
    (info / "RECORD").write_text("zoo/__init__.py,,\nlone.py,,\n../bin/zoo,,\nzoo-1.dist-info/RECORD,,\n")
    egg = tmp_path / "mine.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Name: mine\nVersion: 1\n")
    (egg / "SOURCES.txt").write_text("mine/train.py\n")
    files = {name: str(tmp_path / name) for name in ("zoo/vit.py", "lone.py", "train.py", "mine/train.py", "zoology.py")}
    assert all(map(is_users, files.values()))
    monkeypatch.syspath_prepend(tmp_path)
    fresh()
    assert {name for name, file in files.items() if is_users(file)} == {"train.py", "mine/train.py", "zoology.py"}


def test_a_library_that_is_loaded_from_a_checkout_is_not_the_user_s(tmp_path, monkeypatch, fresh):
    monkeypatch.setattr(optax, "__path__", [str(tmp_path / "optax")])
    fresh()
    assert not is_users(str(tmp_path / "optax" / "_src" / "base.py"))
    assert is_users(str(tmp_path / "optax_of_mine.py"))
