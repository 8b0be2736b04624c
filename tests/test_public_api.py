"""What a user imports is there, documented, and light until it is used; the examples of README and docs run."""

import ast
import inspect
import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxremat
import jaxremat.testing
from jaxremat import errors
from jaxremat.cli.command import COMMANDS

ROOT = Path(__file__).parent.parent
#: Each Python example, with its first page and its number there; what two pages show is run once. Fragments are fenced as `py`.
EXAMPLES = {
    example: f"{page.stem}-{number}"
    for page in [*sorted((ROOT / "docs").glob("*.md"), reverse=True), ROOT / "README.md"]
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), 1)
}
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
#: A program in which no library can be imported but JAX, and what JAX needs.
JAX_ALONE = """
import sys

ALLOWED = sys.stdlib_module_names | {"jaxremat", "jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy"}


class Allowed:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        library = name.partition(".")[0]
        known = library in ALLOWED or library.startswith("_sysconfigdata")
        return self.finder.find_spec(name, path, target) if known else None


sys.meta_path[:] = map(Allowed, sys.meta_path)

import jax, jax.numpy as jnp
import jaxremat
from jaxremat import Layers, find_layers, remat, scan_layers, with_policy


def layer(p, x):
    return x + jnp.tanh(x @ p)


def unrolled(params, x):
    for p in params:
        x = layer(p, x)
    return jnp.mean(x**2)


def matmuls(function):
    return str(jax.make_jaxpr(jax.grad(function))(params, x)).count("dot_general[")


params, x = [jnp.full((4, 4), 0.1 * i) for i in range(3)], jnp.ones((2, 4))
print(find_layers(unrolled, params, x).num_layers)
recomputed = with_policy(unrolled, "nothing")
print(matmuls(recomputed) - matmuls(unrolled))
print(bool((jax.grad(recomputed)(params, x)[0] == jax.grad(unrolled)(params, x)[0]).all()))
rematted = remat(jaxremat.autoname(layer), "save:tanh")
print(matmuls(lambda params, x: rematted(params[0], x).sum()))
print(scan_layers(layer, jnp.stack(params), x, policy="every:2").shape)
try:
    Layers(layer, 3)
except jaxremat.MissingDependencyError as error:
    print(error.__cause__.name)
missing = dict.fromkeys(jaxremat.__all__, "")
for name in missing:
    try:
        getattr(jaxremat, name)
    except jaxremat.MissingDependencyError as error:
        missing[name] = error.__cause__.name
print(sorted(name for name in missing if missing[name]))
print(sorted({library for library in missing.values() if library}))
"""


@pytest.mark.parametrize("name", [name for name in jaxremat.__all__ if name != "__version__"])
def test_public_names_resolve_and_are_documented(name):
    thing = getattr(jaxremat, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert not (inspect.getdoc(thing) or f"{name}(").startswith(f"{name}("), "it has only what dataclass made"


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'remta'"):
        getattr(jaxremat, "remta")  # noqa: B009


def test_type_checkers_see_the_public_names():
    """The imports under `TYPE_CHECKING` are those that `__getattr__` makes; and every error is public."""
    tree = ast.parse(Path(jaxremat.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (f"{alias.name} {alias.asname}", node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {(f"{name} {name}", f"jaxremat.{module}") for name, module in jaxremat._HOME.items()}
    raised = {
        name for name, thing in vars(errors).items() if inspect.isclass(thing) and issubclass(thing, errors.JaxrematError)
    }
    assert raised <= {*jaxremat.__all__}


def test_a_function_has_its_own_types_under_a_policy():
    """Under a policy a function takes and returns what it did. Pyright reads these lines, and they run."""

    def loss(params: dict[str, float], x: int, *, scale: float = 1.0) -> tuple[float, str]:
        return params["w"] * x * scale, "aux"

    class Layer(nn.Module):
        pass

    params = {"w": 0.5}
    assert assert_type(jaxremat.with_policy(loss, "none")(params, 2, scale=3.0), tuple[float, str]) == (3.0, "aux")
    assert assert_type(jaxremat.remat(loss, "none")(params, 2, scale=3.0), tuple[float, str]) == (3.0, "aux")
    assert assert_type(jaxremat.remat(Layer, "dots"), type[Layer]).__name__ == "Layer"
    assert assert_type(jaxremat.autoname(Layer), type[Layer]).__name__ == "Layer"
    stacked = jaxremat.scan_layers(lambda p, x: p * x, jnp.ones((2, 3)), jnp.ones(3))
    assert assert_type(stacked, jax.Array).shape == (3,)
    assert assert_type(jaxremat.find_layers(loss, params, 2).kinds, tuple[jaxremat.Kind, ...]) == ()
    if TYPE_CHECKING:
        jaxremat.with_policy(loss, "dots")(params, "2")  # pyright: ignore[reportArgumentType]
        jaxremat.remat(loss, "dots")(params)  # pyright: ignore[reportCallIssue]
        assert_type(jaxremat.plan(loss, params, 2, num_layers=2, budget="1GiB"), jaxremat.Plan)
        assert_type(jaxremat.load_target("h100-80gb"), jaxremat.Target)
        assert_type(jaxremat.parse_mesh("fsdp=8"), jaxremat.MeshShape | None)


@pytest.mark.full
@pytest.mark.any_jax
def test_the_core_works_with_jax_alone():
    """On a function, without Flax, optax and all that isn't JAX. What needs them says which it needs."""
    done = subprocess.run([sys.executable, "-c", JAX_ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *found, missing, libraries = done.stdout.splitlines()
    assert found == ["3", "3", "True", "2", "(2, 4)", "flax"]
    records = {"RecommendationRecord", "Session", "from_row"}
    assert {*ast.literal_eval(missing)} == {"Block", "Decoder", "hf_config", "lint", "load_safetensors"} | records
    assert {"chex", "flax"} <= {*ast.literal_eval(libraries)} <= {"chex", "flax", "msgspec", "optax"}


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
    assert {name.partition("-")[0] for name in EXAMPLES.values()} >= {"README", "code", "lint"}
