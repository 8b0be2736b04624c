"""What a user imports is there, documented, and light until it is used; the examples of README and docs run."""

import inspect
import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxremat
import jaxremat.testing

ROOT = Path(__file__).parent.parent
#: Each Python example, with its first page and its number there; what two pages show is run once. Fragments are fenced as `py`.
EXAMPLES = {
    example: f"{page.stem}-{number}"
    for page in [*sorted((ROOT / "docs").glob("*.md"), reverse=True), ROOT / "README.md"]
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), 1)
}
COMMANDS = sorted(path.stem for path in Path(jaxremat.__file__).parent.glob("*.py") if "\ndef main(argv" in path.read_text())
LIGHT = """
import contextlib, importlib, io, sys
import jaxremat, jaxremat.cli.worker

def heavy():
    found = {name.partition(".")[0] for name in sys.modules}
    return sorted(found & {"jax", "jaxlib", "flax", "optax", "numpy", "scipy", "matplotlib", "rich", "pynvml", "torch"})

mains = {command: importlib.import_module(f"jaxremat.cli.{command}").main for command in sys.argv[1:]}
print("imports:", heavy())
for command, main in mains.items():
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        main(["--help"])
    assert out.getvalue(), command
    print(command, "--help:", heavy())
"""


@pytest.mark.parametrize("name", [name for name in jaxremat.__all__ if name != "__version__"])
def test_public_names_resolve_and_are_documented(name):
    thing = getattr(jaxremat, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert not (inspect.getdoc(thing) or f"{name}(").startswith(f"{name}("), "it has only what dataclass made"


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'remta'"):
        getattr(jaxremat, "remta")  # noqa: B009


@pytest.mark.full
@pytest.mark.any_jax
def test_imports_and_help_are_light():
    """Importing jaxremat and every command, and asking each for --help, loads nothing that takes long to import."""
    done = subprocess.run([sys.executable, "-c", LIGHT, *COMMANDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["imports: []", *(f"{command} --help: []" for command in COMMANDS)]


def test_what_pyproject_names_is_there():
    """The command's function, the marker of types, and each extra that a message or a page tells to install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (ROOT / "jaxremat/py.typed").exists()
    for target in project["scripts"].values():
        assert callable(pkgutil.resolve_name(target))
    texts = (path.read_text() for folder in ("jaxremat", "docs", "examples") for path in (ROOT / folder).rglob("*.[pm][yd]"))
    named = {extra for text in texts for extras in re.findall(r"jaxremat\[([\w,]+)\]", text) for extra in extras.split(",")}
    assert {"aot", "plot"} <= named <= project["optional-dependencies"].keys()


@pytest.mark.full
@pytest.mark.parametrize("example", EXAMPLES, ids=EXAMPLES.values())
def test_examples_of_the_docs_run(example, tmp_path, h100):
    """The README's in a process of its own, as its reader runs it. Of one that defines tests, the tests run."""
    file = tmp_path / "test_example.py"
    file.write_text(example)
    if EXAMPLES[example].startswith("README"):
        subprocess.run([sys.executable, str(file)], check=True)
        return
    for name, value in runpy.run_path(str(file), run_name="__main__").items():
        if name.startswith("test_"):
            value()


def test_readme_and_docs_have_examples():
    assert {name.partition("-")[0] for name in EXAMPLES.values()} >= {"README", "code", "memory"}
