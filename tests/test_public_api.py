"""What a user imports is there, documented, and light until it is used; the examples of README and docs run."""

import inspect
import re
import subprocess
import sys
from importlib import metadata
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
COMMANDS = ("run", "explain", "sweep", "recommend", "doctor", "watch")
LIGHT = """
import contextlib, importlib, io, sys
import jaxremat, jaxremat.worker

def heavy():
    found = {name.partition(".")[0] for name in sys.modules}
    return sorted(found & {"jax", "jaxlib", "flax", "optax", "numpy", "scipy", "matplotlib", "rich", "pynvml", "torch"})

mains = {command: importlib.import_module(f"jaxremat.{command}").main for command in sys.argv[1:]}
print("imports:", heavy())
for command, main in mains.items():
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        main(["--help"])
    assert out.getvalue().startswith("usage: "), out.getvalue()
    print(command, "--help:", heavy())
"""


@pytest.mark.parametrize("name", [name for name in jaxremat.__all__ if name != "__version__"])
def test_public_names_resolve_and_are_documented(name):
    thing = getattr(jaxremat, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert inspect.getdoc(thing), name
        assert not inspect.getdoc(thing).startswith(f"{name}("), f"{name} has only the docstring that dataclass made"


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'remta'"):
        jaxremat.remta  # noqa: B018


def test_imports_and_help_are_light():
    """Importing jaxremat and every command, and asking each for --help, loads nothing that takes long to import."""
    done = subprocess.run([sys.executable, "-c", LIGHT, *COMMANDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["imports: []", *(f"{command} --help: []" for command in COMMANDS)]


def test_typed_versioned_and_installed_with_its_commands():
    assert (Path(jaxremat.__file__).parent / "py.typed").exists()
    assert metadata.version("jaxremat") == jaxremat.__version__
    scripts = {e.name: e.value for e in metadata.entry_points(group="console_scripts")}
    assert scripts["jaxremat"] == "jaxremat.run:main"
    assert {"aot", "cuda12", "cuda13", "plot", "slurm", "dev"} <= set(
        metadata.metadata("jaxremat").get_all("Provides-Extra") or []
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=EXAMPLES.values())
def test_examples_of_the_docs_run(example, tmp_path, h100):
    """Each in a fresh process; one that defines tests is handed to pytest, as its reader would."""
    file = tmp_path / "test_example.py"
    file.write_text(example)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if "def test_" in example else []
    done = subprocess.run([sys.executable, *command, str(file)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_and_docs_have_examples():
    assert {name.partition("-")[0] for name in EXAMPLES.values()} >= {"README", "code", "memory"}
