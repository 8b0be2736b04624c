"""The layout of the package, read from its source: which module may import which, and which alone may do what."""

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jaxremat
from jaxremat.policy.grammar import POLICIES

PACKAGE = Path(jaxremat.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
#: Each imports only from itself and those before it. Modules beside them, which the commands are made of, import from all.
ROOMS = """
    errors system units mesh chips config policy workload search knapsack planner step xla maxtext model trial answer training
    report session cli
""".split()  # noqa: SIM905

#: What only some files import when they are imported. Any other file imports it in the function that uses it, if at all. A name
#: that ends in `/` is a folder. The standard library, JAX and NumPy are free.
WHEN_IMPORTED = {
    "flax": "maxtext.py model/ policy/linen.py policy/linen_stack.py step/step.py",
    "optax": "maxtext.py model/ step/",
    "chex": "model/ step/",
    "orbax": "training/checkpoints.py",
    "scipy": "knapsack/solve.py",
    "msgspec": "model/hf.py config/rope.py trial/ cli/worker.py session/session.py training/run_folder.py",
    "cyclopts": "cli/ session/fields.py session/flags.py",
    "pytest": "pytest_plugin.py",
    "rich": "report/",
}
#: What works on any function with JAX alone.
CORE = (
    "__init__.py",
    *("policy/apply.py", "policy/autoname.py", "policy/layers.py", "policy/layout.py", "policy/stack.py"),
    "policy/with_policy.py",
    *("workload/workload.py", "xla/compile.py"),
)


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room_of(name: str) -> str:
    return name.partition("/")[0].removesuffix(".py")


def for_type_checkers(tree: ast.Module) -> set[ast.AST]:
    """What only a type checker reads: the bodies of `if TYPE_CHECKING:` outside functions."""
    tests = (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    return {inner for test in tests for node in test.body for inner in ast.walk(node)}


def outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """`ast.walk` that goes into no function."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from outside_functions(node)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path, when_run: bool = False, when_imported: bool = False) -> list[str]:
    """What the file imports, as `module.name`, inside functions too.

    With `when_run`, without what is for type checkers. With `when_imported`, without what functions import too: what is left is
    imported when the file is.
    """
    found, tree = [], tree_of(path)
    skipped = for_type_checkers(tree) if when_run or when_imported else set()
    for node in outside_functions(tree) if when_imported else ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


@functools.cache
def calls(path: Path) -> set[str]:
    """The functions that the file calls by name, such as `jax.checkpoint`."""
    functions = (node.func for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
    return {ast.unparse(function) for function in functions if isinstance(function, ast.Name | ast.Attribute)}


@functools.cache
def dependencies() -> dict[str, set[str]]:
    """Each file of the package and the files of it that it imports when it is run."""
    modules = {"jaxremat." + name_of(f).removesuffix(".py").replace("/", "."): name_of(f) for f in FILES}
    return {
        name_of(file): {
            modules[module]
            for name in imports(file, when_run=True)
            for module in (name, name.rpartition(".")[0])
            if module in modules
        }
        for file in FILES
    }


def test_what_counts_as_an_import(tmp_path):
    file = tmp_path / "some.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a.types\ndef f():\n    from b.c import d, e\n"
    )
    assert imports(file) == ["typing.TYPE_CHECKING", "a.types", "b.c.d", "b.c.e"]
    assert imports(file, when_run=True) == ["typing.TYPE_CHECKING", "b.c.d", "b.c.e"]
    assert imports(file, when_imported=True) == ["typing.TYPE_CHECKING"]
    assert "policy/spec.py" in dependencies()["policy/apply.py"]


def test_a_library_is_imported_where_it_is_used():
    """So that a function under a policy needs JAX alone, and a command loads what it shows and no more."""
    free = sys.stdlib_module_names | {"jaxremat", "jax", "jaxlib", "numpy"}
    found: dict[str, set[str]] = {}
    for file in FILES:
        for library in {module.partition(".")[0] for module in imports(file, when_imported=True)} - free:
            found.setdefault(library, set()).add(name_of(file))
    assert {
        library: {
            folder if (folder := name.partition("/")[0] + "/") in WHEN_IMPORTED[library].split() else name for name in names
        }
        for library, names in found.items()
        if library in WHEN_IMPORTED
    } == {library: {*names.split()} for library, names in WHEN_IMPORTED.items()}
    assert found.keys() == WHEN_IMPORTED.keys()


def loaded_with(*names: str) -> tuple[set[Path], set[str]]:
    """The files of the package that importing these loads, and the libraries."""
    modules = {"jaxremat." + name_of(file).removesuffix(".py").replace("/", "."): file for file in FILES}
    seen, waiting = set[Path](), [PACKAGE / name for name in names]
    while waiting:
        if (file := waiting.pop()) not in seen:
            seen.add(file)
            found = imports(file, when_imported=True)
            waiting += [modules[module] for name in found for module in (name, name.rpartition(".")[0]) if module in modules]
    libraries = {name.partition(".")[0] for file in seen for name in imports(file, when_imported=True)}
    return seen, libraries - sys.stdlib_module_names


def test_the_core_loads_no_other_library():
    """Of the modules behind `with_policy` and its kind, whatever they load of the package, none loads more than JAX and NumPy."""
    seen, libraries = loaded_with(*CORE)
    assert libraries == {"jaxremat", "jax", "numpy"}
    assert {PACKAGE / "policy/find.py", PACKAGE / "errors.py"} < seen


@pytest.mark.parametrize("command", ["run", "explain", "sweep", "recommend", "train", "doctor", "watch"])
def test_a_command_loads_no_jax(command):
    """JAX reads `JAX_PLATFORMS` when it is imported, and a command sets it before that."""
    seen, libraries = loaded_with(f"cli/{command}.py")
    assert "jax" not in libraries
    assert PACKAGE / "cli/command.py" in seen


def test_a_room_imports_only_rooms_before_it():
    folders = {room_of(name_of(file)) for file in FILES if file.parent != PACKAGE}
    assert folders <= set(ROOMS), "a new folder has a place among the rooms"
    wrong = {}
    for file in FILES:
        room = room_of(name_of(file))
        used = {
            name.split(".")[1] for name in imports(file) if name.startswith("jaxremat.") and name != "jaxremat.__version__"
        }
        if room in ROOMS and (after := used - set(ROOMS[: ROOMS.index(room) + 1])):
            wrong[name_of(file)] = after
    assert wrong == {}


def test_no_import_cycle():
    """Of all modules, commands included; an import inside a function counts."""
    tuple(graphlib.TopologicalSorter(dependencies()).static_order())


def test_no_command_imports_another():
    graph = dependencies()
    mains = {name_of(file) for file in PACKAGE.glob("cli/*.py") if re.search(r"^def main\(", file.read_text(), re.MULTILINE)}
    assert {"cli/run.py", "cli/worker.py"} <= mains
    assert {name: graph[name] & mains for name in mains if graph[name] & mains} == {}


def test_a_function_s_name_has_one_meaning():
    """A name that several modules define says too little of each. Every command has a `main`, and some a `show`."""
    homes: dict[str, list[str]] = {}
    for file in FILES:
        for node in tree_of(file).body:
            if isinstance(node, ast.FunctionDef) and node.name not in ("main", "show"):
                homes.setdefault(node.name, []).append(name_of(file))
    assert {name: files for name, files in homes.items() if len(files) > 2} == {}


def importing(*modules: str) -> Callable[[Path], bool]:
    return lambda path: any(re.match(rf"({'|'.join(modules)})(\.|$)", name) for name in imports(path))


def calling(*functions: str) -> Callable[[Path], bool]:
    return lambda path: any(re.fullmatch("|".join(functions), name) for name in calls(path))


def saying(pattern: str) -> Callable[[Path], bool]:
    return lambda path: bool(re.search(pattern, path.read_text()))


#: What only some files do. A name that ends in `/` is a folder.
ALONE = [
    (saying(r"\.lower\(lowering_platforms|\.compile\(compiler_options"), "xla/compile.py"),
    (lambda path: any("topologies" in name for name in imports(path)), "chips/nvidia/topology.py chips/tpu/topology.py"),
    (calling(r"nn\.remat.*"), "policy/linen.py"),
    (calling(r"jax\.checkpoint"), "policy/apply.py policy/stack.py"),
    # cli/machine/probe.py is a process of its own, whose output its parent reads.
    (
        calling("print"),
        "cli/run.py session/session.py cli/sweep.py cli/recommend.py cli/worker.py cli/doctor.py cli/watch.py "
        "cli/diff.py cli/command.py "
        "cli/main.py cli/parser.py cli/machine/probe.py report/printer.py system/interrupt.py",
    ),
    (calling(r"os\.environ\.set.*", r"os\.putenv"), "cli/command.py chips/tpu/topology.py"),
    (calling(r"subprocess\.Popen", r"os\.killpg"), "system/process.py"),
    (importing("pickle", "marshal", "shelve", "dill"), ""),
    (calling(r".*config\.update.*"), "xla/compile.py"),  # for the time of a compile, against JAX's own cache
    (importing(r"jax\._src"), ""),
    (importing(r"jax\.extend.*", "jaxlib", r"jax\.interpreters.*"), "policy/jax_private.py"),
    (
        saying(r"type\(.*\)\.__name__ (==|!=|in|not in) "),
        "policy/jax_private.py policy/state.py",
    ),  # state.py: a class of Flax
    (saying("(?<!`)pynvml"), "chips/nvidia/nvml.py"),
    (importing("matplotlib"), "report/plot.py"),
]


def test_one_place_each():
    wrong = [
        (expected, found)
        for does, expected in ALONE
        if (found := {name_of(f) for f in FILES if does(f)}) != {*expected.split()}
    ]
    assert wrong == []
    does_jax = importing("jax", "flax")
    assert not [f for f in (PACKAGE / "report").glob("*.py") if does_jax(f)]


#: Where a maker of GPUs, its libraries and its driver may be named.
MAKERS_ROOMS = ("chips/", "cli/machine/", "cli/doctor.py", "cli/watch.py", "report/doctor.py")
MAKERS_WORDS = re.compile("cuda|nvidia|cudnn|cublas|nvml|nccl|ptxas", re.IGNORECASE)


def test_no_maker_of_chips_is_named():
    """A chip is a value with functions, and nothing else asks which maker it is: not in code, and not in words."""
    named = {name_of(file) for file in FILES if MAKERS_WORDS.search(file.read_text())}
    assert {name for name in named if not name.startswith(MAKERS_ROOMS)} == set()
    assert {"chips/nvidia/chip.py", "cli/machine/checks.py"} <= named


def matches_on_classes(path: Path, names: set[str]) -> bool:
    """Whether the file tests which of the classes `names` something is: by `isinstance`, by `match` or by `type(...)`."""
    tested: list[ast.AST] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            tested.append(node.args[1])
        elif isinstance(node, ast.MatchClass):
            tested.append(node.cls)
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node.left):
            tested += node.comparators
    inner = [inner for node in tested for inner in ast.walk(node)]
    found = {one.id for one in inner if isinstance(one, ast.Name)} | {
        one.attr for one in inner if isinstance(one, ast.Attribute)
    }
    return not names.isdisjoint(found)


@pytest.mark.parametrize(
    "text",
    ["isinstance(x, Every)", "isinstance(x, int | spec.Every)", "type(x) is spec.Every", "match x:\n case a.Every(): 1"],
)
def test_what_counts_as_a_match_on_classes(text, tmp_path):
    (tmp_path / "some.py").write_text(text)
    assert matches_on_classes(tmp_path / "some.py", {"Every"})
    assert not matches_on_classes(tmp_path / "some.py", {"Names", "x"})


def test_policies_answer_for_themselves():
    """Outside of `policy/`, and where its layers run, nothing tests the class of a policy."""
    policies = {policy.__name__ for policy in POLICIES}
    assert {name_of(f) for f in FILES if matches_on_classes(f, policies)} == {"policy/grammar.py"}


def test_no_test_module_is_imported():
    """What tests share is in conftest.py, or in a module of tests/ that holds no test."""
    is_one = re.compile(r"^\s*(from|import) .*\b(test_\w+|conftest)\b", re.MULTILINE)
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("experiments/*.py")]
    assert {str(file): found[0] for file in files if (found := is_one.search(file.read_text()))} == {}


def test_registry_hosts_are_not_named():
    pages = (
        page
        for pattern in ("constraints/*", "docs/*.md", "*.md", "pyproject.toml", ".ci/run")
        for page in ROOT.glob(pattern)
    )
    hosts = re.compile(r"https?://[^\s)\"']*(pypi|pythonhosted|npmjs|debian)", re.IGNORECASE)
    assert [str(path) for path in (*FILES, *pages) if hosts.search(path.read_text())] == []
