"""The user's code that --model names is found and imported, and what can't be used is refused with one whole message."""

import sys
from pathlib import Path

import pytest

from jaxremat.errors import UsageError, UserCodeError
from jaxremat.workload.load import load_factory
from jaxremat.workload.source import is_spec
from tests.user_files import TRAIN, Write

FORM = "Allowed: path.py:attribute or package.module:attribute."
IMPORTABLE = "Allowed: a module that Python finds from the current folder, on PYTHONPATH or among the installed packages."
NOT_ONE = "neither a jaxremat.Workload nor a function that returns one"
WRITE_A_FACTORY = (
    "Next: write def workload(batch: int = 8) -> jaxremat.Workload, which returns jaxremat.Workload(loss=..., ...)."
)


@pytest.fixture
def refused(write):
    """The whole message that refuses a --model, and its --model-arg, made of the user's `train.py`."""

    def message(text: str, *words: str, file: str = TRAIN, batch: int | None = None) -> str:
        write("train.py", file)
        with pytest.raises(UsageError) as raised:
            load_factory(text, words)(batch)
        assert raised.value.exit_code == 2
        return str(raised.value)

    return message


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
    ("text", "message"),
    [
        ("train.py:", f"--model 'train.py:' names no attribute. {FORM} Next: write it like --model train.py:workload."),
        (
            ":workload",
            f"--model ':workload' names no file and no module. {FORM} Next: write it like --model train.py:workload.",
        ),
        (
            "trian.py:workload",
            f"--model 'trian.py:workload': there is no file 'trian.py'. {FORM} Next: did you mean 'train.py'?",
        ),
        (
            "./train:workload",
            f"--model './train:workload': there is no file 'train'. {FORM} Next: did you mean 'train.py'?",
        ),
        (
            "zzzzzzzz.py:workload",
            f"--model 'zzzzzzzz.py:workload': there is no file 'zzzzzzzz.py'. {FORM} "
            "Next: give a path from the current folder, {folder}.",
        ),
        (
            "no/train.py:workload",
            f"--model 'no/train.py:workload': there is no file 'no/train.py'. {FORM} Likely cause: there is no folder 'no'. "
            "Next: give a path from the current folder, {folder}.",
        ),
        (
            "./notes.txt:workload",
            "--model './notes.txt:workload': the file 'notes.txt' isn't a Python file. Allowed: a file whose name ends in .py. "
            "Next: write it like --model train.py:workload.",
        ),
        (
            "trian:workload",
            f"--model 'trian:workload': there is no module 'trian'. {IMPORTABLE} Next: did you mean 'train'?",
        ),
        (
            "my.mdoels:workload",
            f"--model 'my.mdoels:workload': there is no module 'my.mdoels'. {IMPORTABLE} Next: did you mean 'my.models'?",
        ),
        (
            "mi.models:workload",
            f"--model 'mi.models:workload': there is no module 'mi.models'. {IMPORTABLE} Next: did you mean 'my'?",
        ),
        (
            "zzzzzz:workload",
            f"--model 'zzzzzz:workload': there is no module 'zzzzzz'. {IMPORTABLE} "
            "Next: give the path of its file, as in --model path/to/file.py:workload.",
        ),
        (
            "my.:workload",
            f"--model 'my.:workload': there is no module 'my.'. {IMPORTABLE} Next: did you mean 'my.models'?",
        ),
        (
            "train.py:worklaod",
            "--model 'train.py:worklaod': train.py has no 'worklaod'. Allowed: loss, workload, small. "
            "Next: did you mean 'workload'?",
        ),
        (
            "train:zzz",
            "--model 'train:zzz': train has no 'zzz'. Allowed: loss, workload, small. Next: write it like --model train:loss.",
        ),
        (
            "train.py:SIZE",
            f"--model 'train.py:SIZE': 'SIZE' is of type int, {NOT_ONE}. Allowed: loss, workload, small. "
            "Next: write it like --model train.py:loss.",
        ),
        (
            "train.py:loss",
            "--model 'train.py:loss': 'loss' needs params. Likely cause: it isn't the function that returns the Workload, or it "
            "lacks defaults. Next: give a value, like --model-arg params=VALUE.",
        ),
    ],
)
def test_a_model_that_is_not_there(write: Write, refused, tmp_path, text, message):
    write("my/models.py")
    write("notes.txt")
    assert refused(text) == message.replace("{folder}", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (
            "train.py:workload",
            ["widht=3"],
            "--model-arg got 'widht', which train.py:workload doesn't take. Allowed: batch, width, act, scan. "
            "Next: did you mean 'width'?",
        ),
        (
            "train.py:workload",
            ["zzz=3"],
            "--model-arg got 'zzz', which train.py:workload doesn't take. Allowed: batch, width, act, scan. Next: leave it out.",
        ),
        (
            "train.py:workload",
            ["scan=false"],
            "--model-arg got 'scan=false', and scan is True by default. Allowed: True or False, as Python writes them. "
            "Next: write it like --model-arg scan=False.",
        ),
        (
            "train.py:small",
            ["width=3"],
            "--model-arg got 'width=3', and train.py:small is a Workload, which takes no arguments. "
            "Next: leave --model-arg out, or name a function that returns a Workload.",
        ),
    ],
)
def test_arguments_that_the_user_s_code_does_not_take(refused, text, words, message):
    assert refused(text, *words) == message


def test_a_function_without_keywords(refused):
    assert refused("train.py:workload", "width=3", file="def workload(): pass") == (
        "--model-arg got 'width', which train.py:workload doesn't take. Allowed: none, as the function has no keywords. "
        "Next: leave it out."
    )


def test_a_function_that_takes_any_keyword(write: Write):
    write("train.py", TRAIN + "\ndef any(**rest): return workload(**rest)")
    assert load_factory("train.py:any", ["width=2", "batch=3"])().abstract_batch.shape == (3, 2)


def test_a_file_that_defines_nothing(refused):
    assert refused("train.py:workload", file="from math import sqrt") == (
        "--model 'train.py:workload': train.py has no 'workload'. Likely cause: train.py defines no Workload and no public "
        f"function. {WRITE_A_FACTORY}"
    )


def test_a_function_of_c_has_no_signature(refused):
    assert refused("train.py:dict", file="dict = dict") == (
        "--model 'train.py:dict': what 'dict' takes cannot be read: no signature found for builtin type <class 'dict'>. "
        f"{WRITE_A_FACTORY}"
    )


def test_a_batch_for_what_has_one(refused):
    assert refused("train.py:small", batch=4) == (
        "train.py:small has one batch, 2, and batch 4 was asked for. Likely cause: a Workload, or a function without the keyword "
        "batch. Next: a free batch: def workload(batch: int = 8)."
    )
    assert refused("train.py:workload", "batch=2", batch=4) == (
        "train.py:workload has one batch, 2, and batch 4 was asked for. Likely cause: --model-arg gives it. "
        "Next: leave one of the two out."
    )


def test_a_batch_without_a_default(refused):
    assert refused("train.py:workload", file="def workload(batch): pass") == (
        "train.py:workload needs a batch. Likely cause: its keyword batch has no number as default. "
        "Next: --batch 8, or a default: def workload(batch: int = 8)."
    )


@pytest.mark.parametrize(
    ("body", "what", "rest"),
    [
        ("pass", "None", "Likely cause: the function doesn't end with return. Next: return jaxremat.Workload(loss=loss, "),
        ("return loss, {}, 3", "a tuple of (function, dict, int)", "Next: return jaxremat.Workload(loss=loss, "),
        ("return loss", "a value of type function", "Next: return jaxremat.Workload(loss=loss, "),
    ],
)
def test_a_function_that_returns_something_else(refused, body, what, rest):
    assert refused("train.py:made", file=f"{TRAIN}\ndef made(): {body}") == (
        f"train.py:made returned {what}, not a jaxremat.Workload. {rest}params=params, batch=batch)."
    )


def test_gigabytes_of_arrays(refused):
    file = TRAIN + (
        "\nimport dataclasses, numpy as np\n"
        "def big(batch: int = 8): return dataclasses.replace(workload(batch), batch=np.broadcast_to(np.zeros(1), (batch, 2**27)))"
    )
    assert refused("train.py:big", file=file) == (
        "Workload got 8.00 GiB of arrays. Allowed: up to 1.00 GiB. "
        "Next: give shapes in place of arrays: jax.eval_shape(init, key), or jax.ShapeDtypeStruct(shape, dtype)."
    )


@pytest.mark.parametrize("name", ["types", "jaxremat", "jax"])
def test_a_file_with_the_name_of_an_installed_module(write: Write, tmp_path, name):
    write(f"{name}.py")
    before = sys.modules[name]
    with pytest.raises(UsageError) as raised:
        load_factory(f"{name}.py:workload")
    assert str(raised.value) == (
        f"--model '{name}.py:workload': the file '{tmp_path}/{name}.py' has the name of the installed module '{name}'. "
        "Likely cause: Python can hold only one module of a name. Next: give the file another name."
    )
    assert sys.modules[name] is before


def test_a_file_beside_it_with_the_name_of_an_installed_module(write: Write, tmp_path):
    write("train.py", "import queue")
    write("queue.py", "")
    with pytest.raises(UsageError) as raised:
        load_factory("train.py:workload")
    assert str(raised.value) == (
        f"--model 'train.py:workload': the file '{tmp_path}/queue.py' has the name of the installed module 'queue'. "
        "Likely cause: Python can hold only one module of a name. Next: give the file another name."
    )


def test_a_file_that_failed_is_imported_again(write: Write):
    write("train.py", "raise ValueError")
    with pytest.raises(UserCodeError):
        load_factory("train.py:workload")
    write("train.py")
    assert load_factory("train.py:workload")().num_samples == 8
