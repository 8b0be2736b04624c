"""The user's code that --model names is found and imported, and what can't be used is rejected by name."""

import re
import sys
from pathlib import Path

import pytest

from jaxremat.errors import UsageError, UserCodeError
from jaxremat.units import gib
from jaxremat.workload.load import load_factory
from jaxremat.workload.source import is_spec
from jaxremat.workload.workload import MAX_CONCRETE_BYTES
from tests.user_files import TRAIN, Write

#: The workloads of `TRAIN`. Its loss is a public function, too.
CHOICES = "workload, small"


@pytest.fixture
def rejected(write):
    """The error with which a --model, and its --model-arg, made of the user's `train.py`, is rejected."""

    def error(text: str, *words: str, file: str = TRAIN, batch: int | None = None) -> UsageError:
        write("train.py", file)
        with pytest.raises(UsageError) as caught:
            load_factory(text, words)(batch)
        return caught.value

    return error


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("train.py:workload", True), ("my.models:vit", True), ("./a/b.py:w", True), ("gpt2", False), ("", False),
        ("https://example.org/gpt2", False), ("qwen3-0.6b", False), ("train.py", False),
    ],
)  # fmt: skip
def test_what_names_the_user_s_code(text, found):
    assert is_spec(text) is found


def test_a_file_s_factory(write: Write):
    write("train.py")
    factory = load_factory("train.py:workload", ["width=16"])
    assert (factory.name, factory.has_free_batch, factory.default_batch) == ("train.py:workload", True, 8)
    assert factory.arguments == {"width": 16}
    assert factory().abstract_batch.shape == (8, 16)
    assert factory(3).abstract_batch.shape == (3, 16)
    assert factory(3).name == "train.py:workload"
    assert factory() is factory(8)
    assert sys.modules["train"].__file__ == str(Path("train.py").resolve())
    assert sys.modules["train"].__name__ == "train"


def test_a_path_is_shortened_to_its_file_name(write: Write, tmp_path):
    write("deep/er/train.py")
    assert load_factory(f"{tmp_path}/deep/er/train.py:workload").name == "train.py:workload"


def test_a_workload_itself(write: Write):
    write("train.py")
    factory = load_factory("train.py:small")
    assert (factory.name, factory.has_free_batch, factory.default_batch) == ("train.py:small", False, None)
    assert factory() is factory()
    assert factory().num_samples == 2
    assert factory(2) is factory()


def test_a_step_has_batch_1(write: Write):
    write("train.py", "import jaxremat\nstep = jaxremat.Workload(step=lambda x: x, args=(1.0,))")
    factory = load_factory("train.py:step")
    assert factory(1) is factory()


def test_a_batch_that_is_given_is_not_free(write: Write):
    write("train.py")
    factory = load_factory("train.py:workload", ["batch=5"])
    assert (factory.has_free_batch, factory.default_batch) == (False, None)
    assert factory().num_samples == 5


@pytest.mark.parametrize(
    ("signature", "free", "default"),
    [
        ("batch: int = 8", True, 8), ("batch", True, None), ("batch=None", True, None), ("*, batch=4", True, 4),
        ("", False, None), ("**rest", False, None), ("batch=4, /", False, None), ("*batch", False, None),
        ("batch=True", True, None),
    ],
)  # fmt: skip
def test_which_batch_is_free(write: Write, signature, free, default):
    write("train.py", f"def workload({signature}): pass")
    factory = load_factory("train.py:workload")
    assert (factory.has_free_batch, factory.default_batch) == (free, default)


def test_a_module_in_the_current_folder(write: Write, tmp_path, monkeypatch):
    write("my/models.py")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    factory = load_factory("my.models:workload")
    assert factory.name == "my.models:workload"
    assert factory().num_samples == 8
    assert sys.path[0] == str(tmp_path)


def test_a_file_runs_as_python_would_run_it(write: Write, tmp_path):
    """Its folder is the first on the path; its dataclasses find their module; its main part doesn't run."""
    write("deep/sizes.py", "WIDTH = 32")
    write(
        "deep/train.py",
        """
        from __future__ import annotations
        import dataclasses, sys, typing
        import sizes
        assert sys.path[0] == __file__.rpartition("/")[0]
        @dataclasses.dataclass
        class Config:
            width: int = sizes.WIDTH
        assert typing.get_type_hints(Config) == {"width": int}
        def width(**arguments): return arguments
        if __name__ == "__main__":
            raise AssertionError
        """,
    )
    load_factory("deep/train.py:width")
    assert sys.path[0] == str(tmp_path / "deep")


def test_a_file_is_imported_once(write: Write, tmp_path):
    write("train.py", f"open({str(tmp_path / 'log')!r}, 'a').write('imported. ')\ndef workload(): pass")
    for _ in range(2):
        load_factory("train.py:workload")
    assert (tmp_path / "log").read_text() == "imported. "


def test_two_files_of_one_name(write: Write):
    """Each has the module beside it, whichever came first."""
    for folder, size in ("a", 3), ("b", 5):
        write(f"{folder}/sizes.py", f"SIZE = {size}")
        write(f"{folder}/train.py", f"import sizes\n{TRAIN}\ndef sized(): return workload(sizes.SIZE)")
    first, second = load_factory("a/train.py:sized"), load_factory("b/train.py:sized")
    assert (first().num_samples, second().num_samples) == (3, 5)
    assert load_factory("a/train.py:sized")().num_samples == 3


def test_two_packages_of_one_name(write: Write):
    """The first has no `__init__.py`, and so no file."""
    write("a/my/sizes.py", "WIDTH = 3")
    write("b/my/__init__.py", "WIDTH = 5")
    for folder, module in ("a", "my.sizes"), ("b", "my"):
        write(f"{folder}/train.py", f"from {module} import WIDTH\n{TRAIN}\ndef sized(): return workload(WIDTH)")
    assert [load_factory(f"{folder}/train.py:sized")().num_samples for folder in "ab"] == [3, 5]


def test_only_the_last_batch_and_the_default_are_kept(write: Write):
    write("train.py")
    factory = load_factory("train.py:workload")
    default, third = factory(), factory(3)
    assert factory(3) is third
    factory(4)
    assert factory() is default
    assert factory(3) is not third


def test_a_workload_keeps_its_own_name(write: Write):
    write("train.py", TRAIN + "\nimport dataclasses\nnamed = dataclasses.replace(small, name='mine')")
    assert load_factory("train.py:named")().name == "mine"


@pytest.mark.parametrize(
    ("text", "named", "allowed", "next_step"),
    [
        ("train.py:", "train.py:", "", "--model train.py:workload"),
        (":workload", ":workload", "", "--model train.py:workload"),
        ("trian.py:workload", "trian.py", "", "'train.py'"),
        ("./train:workload", "train", "", "'train.py'"),
        ("zzzzzzzz.py:workload", "zzzzzzzz.py", "", "{folder}"),
        ("no/train.py:workload", "no/train.py", "", "{folder}"),
        ("./notes.txt:workload", "notes.txt", ".py", "--model train.py:workload"),
        ("trian:workload", "trian", "PYTHONPATH", "'train'"),
        ("my.mdoels:workload", "my.mdoels", "PYTHONPATH", "'my.models'"),
        ("mi.models:workload", "mi.models", "PYTHONPATH", "'my'"),
        ("zzzzzz:workload", "zzzzzz", "PYTHONPATH", "--model path/to/file.py:workload"),
        ("my.:workload", "my.", "PYTHONPATH", "'my.models'"),
        ("train.py:worklaod", "worklaod", CHOICES, "'workload'"),
        ("train:zzz", "zzz", CHOICES, "--model train:workload"),
        ("train.py:SIZE", "int", CHOICES, "--model train.py:workload"),
        ("train.py:loss", "params", "", "--model-arg params="),
    ],
)
def test_a_model_that_is_not_there(write: Write, rejected, tmp_path, text, named, allowed, next_step):
    write("my/models.py")
    write("notes.txt")
    error = rejected(text)
    assert f"--model {text!r}" in error.got
    assert named in error.got.replace(text, "", named != text)
    assert allowed in error.allowed
    assert next_step.format(folder=tmp_path) in error.next_step


@pytest.mark.parametrize(
    ("text", "word", "allowed", "next_step"),
    [
        ("train.py:workload", "widht=3", "batch, width, act, scan", "'width'"),
        ("train.py:workload", "zzz=3", "batch, width, act, scan", ""),
        ("train.py:workload", "scan=false", "True", "--model-arg scan=False"),
        ("train.py:small", "width=3", "", "--model-arg"),
    ],
)
def test_arguments_that_the_user_s_code_does_not_take(rejected, text, word, allowed, next_step):
    error = rejected(text, word)
    assert "--model-arg" in error.got
    assert f"'{word.partition('=')[0]}" in error.got
    assert allowed in error.allowed
    assert next_step in error.next_step
    assert error.next_step


@pytest.mark.parametrize(
    ("text", "words", "file", "named"),
    [
        ("train.py:workload", ["width=3"], "def workload(): pass", "'width'"),  # a function without keywords
        ("train.py:workload", [], "from math import sqrt", "'workload'"),  # a file that defines nothing
        ("train.py:dict", [], "dict = dict", "'dict'"),  # a function of C, which has no signature
        ("train.py:workload", [], "def workload(batch): pass", "train.py:workload"),  # no batch, and no default
    ],
)
def test_files_without_a_factory(rejected, text, words, file, named):
    error = rejected(text, *words, file=file)
    assert named in error.got
    assert error.next_step


def test_a_function_that_takes_any_keyword(write: Write):
    write("train.py", TRAIN + "\ndef any(**rest): return workload(**rest)")
    assert load_factory("train.py:any", ["width=2", "batch=3"])().abstract_batch.shape == (3, 2)


@pytest.mark.parametrize(("text", "words"), [("train.py:small", ()), ("train.py:workload", ("batch=2",))])
def test_a_batch_for_what_has_one(rejected, text, words):
    """The causes differ: a Workload, and --model-arg."""
    error = rejected(text, *words, batch=4)
    assert re.findall(r"\d+", error.got) == ["2", "4"]
    assert ("--model-arg" in error.cause) == bool(words)


@pytest.mark.parametrize(
    ("body", "kind"), [("pass", "None"), ("return loss, {}, 3", "(function, dict, int)"), ("return loss", "function")]
)
def test_a_function_that_returns_something_else(rejected, body, kind):
    error = rejected("train.py:made", file=f"{TRAIN}\ndef made(): {body}")
    assert "train.py:made" in error.got
    assert kind in error.got
    assert "jaxremat.Workload(loss=" in error.next_step
    assert bool(error.cause) == (body == "pass")


def test_gigabytes_of_arrays(rejected):
    file = TRAIN + (
        "\nimport dataclasses, numpy as np\n"
        "def big(batch: int = 8): return dataclasses.replace(workload(batch), batch=np.broadcast_to(np.zeros(1), (batch, 2**27)))"
    )
    error = rejected("train.py:big", file=file)
    assert gib(8 * 2**30) in error.got
    assert gib(MAX_CONCRETE_BYTES) in error.allowed
    assert "jax.eval_shape" in error.next_step


@pytest.mark.parametrize("name", ["types", "jaxremat", "jax"])
def test_a_file_with_the_name_of_an_installed_module(write: Write, tmp_path, name):
    write(f"{name}.py")
    before = sys.modules[name]
    with pytest.raises(UsageError) as caught:
        load_factory(f"{name}.py:workload")
    assert f"{tmp_path / name}.py" in caught.value.got
    assert sys.modules[name] is before


def test_a_file_beside_it_with_the_name_of_an_installed_module(write: Write, tmp_path):
    write("train.py", "import queue")
    write("queue.py", "")
    with pytest.raises(UsageError) as caught:
        load_factory("train.py:workload")
    assert str(tmp_path / "queue.py") in caught.value.got


def test_a_file_that_failed_is_imported_again(write: Write):
    write("train.py", "raise ValueError")
    with pytest.raises(UserCodeError):
        load_factory("train.py:workload")
    write("train.py")
    assert load_factory("train.py:workload")().num_samples == 8
