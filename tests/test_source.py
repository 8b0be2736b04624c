"""The source that --model names is found and hashed without running any of it."""

import errno
import os
import sys
from pathlib import Path

import pytest

from jaxremat.errors import UsageError
from jaxremat.workload.source import find_source, own_modules, source_hash
from tests.user_files import Write

#: The end of files that mustn't run.
STOP = "\nraise AssertionError('the source was run')\n"
SCRIPT = """
import os, json.decoder, jax, numpy as np, jaxremat, jaxremat.testing
from flax import linen
import my.layers.dense
from my import sizes, MISSING
from . import not_for_a_script
def lazily():
    import late, train
    from my.data import *
"""


def own(text: str) -> dict[str, str]:
    """The user's modules by name, their files from the current folder."""
    return {name: str(file.relative_to(Path.cwd())) for name, file in own_modules(find_source(text)).items()}


def test_a_file_and_what_it_imports(write: Write):
    write("train.py", SCRIPT + STOP)
    write("not_for_a_script.py", STOP)
    write("late.py", "import lone" + STOP)
    write("lone.py", STOP)
    write("unused.py", STOP)
    write("json.py.txt", STOP)
    write("my/__init__.py", "from .names import N" + STOP)
    write("my/names.py", "from ..train import beyond" + STOP)
    write("my/sizes.py", "this isn't Python")
    write("my/data.py", STOP)
    write("my/layers/dense.py", "from . import norm\nfrom .. import other\nfrom ..other import x" + STOP)
    write("my/layers/norm.py", STOP)
    write("my/other/__init__.py", STOP)
    before = set(sys.modules)
    assert own("train.py:workload") == {
        "train": "train.py",
        "late": "late.py",
        "lone": "lone.py",
        "my": "my/__init__.py",
        "my.names": "my/names.py",
        "my.sizes": "my/sizes.py",
        "my.data": "my/data.py",
        "my.layers.dense": "my/layers/dense.py",
        "my.layers.norm": "my/layers/norm.py",
        "my.other": "my/other/__init__.py",
    }
    assert not {"my", "late", "train"} & (set(sys.modules) - before)


def test_a_module_and_what_it_imports(write: Write):
    write("configs/train.py", "from models import vit\nfrom . import base" + STOP)
    write("configs/base.py", STOP)
    write("models/vit.py", STOP)
    assert own("configs.train:workload") == {
        "configs.train": "configs/train.py",
        "configs.base": "configs/base.py",
        "models.vit": "models/vit.py",
    }


def test_modules_in_the_current_folder_count_for_a_file_elsewhere(write: Write, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    write("examples/vit.py", "import mine" + STOP)
    write("mine.py", STOP)
    assert own("examples/vit.py:workload") == {"vit": "examples/vit.py", "mine": "mine.py"}


def test_a_file_s_name_with_a_dot(write: Write):
    write("gpt2.small.py", STOP)
    write("gpt2.py", STOP)
    assert own("gpt2.small.py:workload") == {"gpt2.small": "gpt2.small.py"}


def test_of_an_installed_package_only_that_package_counts(write: Write, tmp_path, monkeypatch):
    write("lib/site-packages/zoo/__init__.py", "import other, zoo.vit" + STOP)
    write("lib/site-packages/zoo/vit.py", STOP)
    write("lib/site-packages/other.py", STOP)
    write("lib/site-packages/zoo-1.dist-info/METADATA", "Name: zoo\nVersion: 1\n")
    write("lib/site-packages/zoo-1.dist-info/RECORD", "other.py,,\nzoo/__init__.py,,\nzoo/vit.py,,\n../../bin/zoo,,\n")
    write("mine.py", "import zoo, other" + STOP)
    monkeypatch.syspath_prepend(tmp_path / "lib/site-packages")
    assert own("zoo:vit") == {"zoo": "lib/site-packages/zoo/__init__.py", "zoo.vit": "lib/site-packages/zoo/vit.py"}
    assert own("mine.py:workload") == {"mine": "mine.py"}


def test_the_same_source_in_another_folder_has_the_same_hash(write: Write, tmp_path):
    for folder in "a", "b":
        write(f"{folder}/train.py", "import sizes" + STOP)
        write(f"{folder}/sizes.py", "SIZE = 3")
    first = source_hash("a/train.py:workload")
    assert first == source_hash(f"{tmp_path}/b/train.py:workload")
    assert len(first) == 32


@pytest.mark.parametrize(("file", "changes"), [("train.py", True), ("my/sizes.py", True), ("unused.py", False)])
def test_a_changed_file_changes_the_hash_if_it_is_imported(write: Write, file, changes):
    write("train.py", "from my.sizes import SIZE" + STOP)
    write("my/sizes.py", "SIZE = 3")
    write("unused.py", "SIZE = 3")
    before = source_hash("train.py:workload")
    write(file, "from my.sizes import SIZE\nSIZE = 4")
    assert (source_hash("train.py:workload") != before) is changes


def test_a_workload_of_this_package_has_no_user_s_modules():
    """Its source is hashed with each trial as it is."""
    assert own_modules(find_source("jaxremat.maxtext:workload")).keys() == {"jaxremat.maxtext"}


def test_a_file_that_cannot_be_read(write: Write, tmp_path):
    """Reading the memory of a process at its address 0 fails, for whomever."""
    write("train.py", "import mine")
    (tmp_path / "mine.py").symlink_to("/proc/self/mem")
    with pytest.raises(UsageError) as caught:
        source_hash("train.py:workload")
    assert str(tmp_path / "mine.py") in caught.value.got
    assert os.strerror(errno.EIO) in caught.value.got


def test_python_s_warnings_are_left_to_the_import(write: Write, recwarn):
    write("train.py", "pattern = '\\d'" + STOP)
    assert source_hash("train.py:workload")
    assert not recwarn.list


def test_the_path_is_left_as_it_was(write: Write):
    write("my/models.py", STOP)
    before = list(sys.path)
    assert source_hash("my.models:workload") != source_hash("json:workload")
    assert sys.path == before


@pytest.mark.parametrize("place", ["no.py", "no.models"])
def test_source_that_is_not_there(write: Write, place):
    with pytest.raises(UsageError) as caught:
        source_hash(f"{place}:workload")
    assert f"--model '{place}:workload'" in caught.value.got
    assert caught.value.allowed
