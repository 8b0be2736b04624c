"""The layout holds: which module may import which, which alone may do what, how files are named and how long they are.

All of it is read from the source, not from the running code.
"""

import ast
import graphlib
import re
from pathlib import Path
from typing import Any

import pytest

import jaxremat

PACKAGE = Path(jaxremat.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
ROOT = PACKAGE.parent
TESTS = sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("experiments/*.py")])
ROOMS = [
    *(
        "errors",
        "interrupt",
        "files",
        "whose",
        "units",
        "rope",
        "config",
        "mesh",
        "policy",
        "workload",
        "search",
        "planner",
        "model",
        "step",
    ),
    *("xla", "machine", "trial", "answer", "training", "report"),
]
COMMANDS = {
    *(
        "run.py",
        "train.py",
        "explain.py",
        "misfit.py",
        "sweep.py",
        "grid.py",
        "worker.py",
        "doctor.py",
        "watch.py",
        "command.py",
    ),
    *("flow.py", "heading.py", "workloads.py", "processes.py", "distributed.py", "request.py", "asked_model.py", "flags.py"),
    *("lengths.py", "meshes.py", "recommend.py", "price_file.py", "many_trials.py", "testing.py", "__init__.py"),
}
#: What a person runs, and the process that runs one trial: each has a `main`, and none is a library of another.
MAINS = {"run.py", "train.py", "explain.py", "sweep.py", "recommend.py", "doctor.py", "watch.py", "worker.py"}
#: Files of one base name, which is allowed only where they are about one thing; why, in a line each.
ALIKE = {
    "doctor.py": ({"doctor.py", "report/doctor.py"}, "one set of checks: the command that makes them, the table of them"),
    "explain.py": (
        {"explain.py", "trial/explain.py", "report/explain.py"},
        "who holds the memory: the command that asks, the record of one answer, the table of it",
    ),
    "flops.py": ({"model/flops.py", "xla/flops.py"}, "FLOPs of a step: by a closed form, counted in its program"),
    "kept.py": ({"xla/kept.py", "report/kept.py"}, "what a step keeps: read from the compiled program, said in sentences"),
    "lengths.py": ({"lengths.py", "report/lengths.py"}, "several lengths: a request for each of them, the table of them"),
    "meshes.py": (
        {"meshes.py", "report/meshes.py"},
        "--mesh auto: choosing the mesh for a request, the table of the meshes",
    ),
    "plan.py": ({"planner/plan.py", "report/plan.py"}, "one plan: finding it, the table of it"),
    "recommend.py": ({"recommend.py", "report/recommend.py"}, "what to rent: the command that finds it, the table of it"),
    "sweep.py": ({"sweep.py", "report/sweep.py"}, "one sweep: the command that makes it, the table of it"),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


class WhenRun(ast.NodeTransformer):
    """A program without what only a type checker reads: the bodies of `if TYPE_CHECKING:`."""

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING") else node


def imports(path: Path, when_run: bool = False) -> list[str]:
    """What the file imports, as `module.name`, inside functions too; with `when_run` without what is for type checkers."""
    found, tree = [], ast.parse(path.read_text())
    for node in ast.walk(WhenRun().visit(tree) if when_run else tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def calls(path: Path) -> list[str]:
    return [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def who(predicate) -> set[str]:
    return {name_of(path) for path in FILES if predicate(path)}


@pytest.mark.parametrize("path", [f for f in FILES if name_of(f) not in COMMANDS], ids=name_of)
def test_a_room_imports_only_rooms_above_it(path):
    room = ROOMS.index(name_of(path).split("/")[0].removesuffix(".py"))
    allowed = {*ROOMS[: room + 1]}
    used = {name.split(".")[1] for name in imports(path) if name.startswith("jaxremat.")}
    assert used <= allowed, f"{name_of(path)} reaches down into {used - allowed}"


def dependencies() -> dict[str, set[str]]:
    """Each file of the package and the files of it that it imports when it is run."""
    modules = {"jaxremat." + name_of(f).removesuffix(".py").replace("/", "."): name_of(f) for f in FILES}
    graph = {}
    for file in FILES:
        used = imports(file, when_run=True)
        graph[name_of(file)] = {modules[m] for name in used for m in (name, name.rpartition(".")[0]) if m in modules}
    return graph


def test_what_counts_as_an_import(tmp_path):
    file = tmp_path / "some.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a.types\ndef f():\n    from b.c import d, e\n"
    )
    assert imports(file) == ["typing.TYPE_CHECKING", "a.types", "b.c.d", "b.c.e"]
    assert imports(file, when_run=True) == ["typing.TYPE_CHECKING", "b.c.d", "b.c.e"]
    assert "policy/spec.py" in dependencies()["policy/apply.py"]


def test_no_import_cycle():
    """Of all modules, commands included; an import inside a function counts."""
    tuple(graphlib.TopologicalSorter(dependencies()).static_order())


def test_no_command_imports_another():
    graph = dependencies()
    assert {name: graph[name] & MAINS for name in MAINS if graph[name] & MAINS} == {}


def test_one_base_name_one_thing():
    """Two files of one base name are looked for in the wrong folder, but where `ALIKE` says what they share."""
    places = {}
    for file in FILES:
        places.setdefault(file.name, set()).add(name_of(file))
    assert {name: found for name, found in places.items() if len(found) > 1 and name != "__init__.py"} == {
        name: allowed for name, (allowed, _) in ALIKE.items()
    }


def test_report_does_not_import_jax():
    assert not [
        f for f in FILES if name_of(f).startswith("report/") and any(i.split(".")[0] in ("jax", "flax") for i in imports(f))
    ]


def test_one_place_each():
    assert who(lambda f: re.search(r"\.lower\(lowering_platforms|\.compile\(compiler_options", f.read_text())) == {
        "xla/compile.py"
    }
    assert who(lambda f: any("topologies" in i for i in imports(f))) == {"xla/target.py"}
    assert who(lambda f: any(c.startswith("nn.remat") for c in calls(f))) == {"policy/apply.py"}
    assert who(lambda f: "jax.checkpoint" in calls(f)) == {"policy/apply.py", "policy/stack.py"}
    assert who(lambda f: "print" in calls(f)) == {
        "run.py",
        "flow.py",
        "sweep.py",
        "recommend.py",
        "worker.py",
        "doctor.py",
        "watch.py",
        "command.py",
        "machine/probe.py",  # a child process, whose output its parent reads
        "report/printer.py",
    }
    assert who(lambda f: any(c.startswith("os.environ.set") or c == "os.putenv" for c in calls(f))) == {"command.py"}
    assert who(lambda f: {"subprocess.Popen", "os.killpg"} & set(calls(f))) == {"machine/process.py"}
    assert who(lambda f: any(i.split(".")[0] in ("pickle", "marshal", "shelve", "dill") for i in imports(f))) == set()
    assert who(lambda f: any("config.update" in c for c in calls(f))) == set()
    assert who(lambda f: any(i.startswith("jax._src") for i in imports(f))) == set()
    assert who(lambda f: "pynvml" in f.read_text().replace("`pynvml`", "")) == {"machine/nvml.py"}
    assert who(lambda f: any(i.split(".")[0] == "matplotlib" for i in imports(f))) == {"report/plot.py"}


def test_files_can_be_read_in_a_sitting():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (*FILES, *TESTS)}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_test_module_is_imported():
    """What tests share is in conftest.py, or in a module of tests/ that holds no test."""
    is_test = re.compile(r"(^|\.)(test_\w+|conftest)(\.|$)")
    used = {str(path.relative_to(ROOT)): [name for name in imports(path) if is_test.search(name)] for path in TESTS}
    assert {path: names for path, names in used.items() if names} == {}


def test_registry_hosts_are_not_named():
    texts = [
        *FILES,
        *ROOT.glob("constraints/*"),
        *ROOT.glob("docs/*.md"),
        ROOT / "pyproject.toml",
        *ROOT.glob("*.md"),
        ROOT / ".ci/run",
    ]
    hosts = re.compile(r"https?://[^\s)\"']*(pypi|pythonhosted|npmjs|debian)", re.IGNORECASE)
    assert not [str(t) for t in texts if t.exists() and hosts.search(t.read_text())]
