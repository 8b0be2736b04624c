"""The layout tells the truth: who may import whom, and who alone may do what. Read from the source, not from the running code."""

import ast
import re
from pathlib import Path

import pytest

import jaxremat

PACKAGE = Path(jaxremat.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
ROOMS = [
    *("errors", "interrupt", "files", "units", "config", "policy", "search", "planner", "model", "step", "xla"),
    *("machine", "trial", "answer", "report"),
]
COMMANDS = {
    *("run.py", "explain.py", "misfit.py", "sweep.py", "grid.py", "worker.py", "doctor.py", "watch.py", "command.py"),
    *("flags.py", "testing.py", "__init__.py"),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
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
        "explain.py",
        "sweep.py",
        "worker.py",
        "doctor.py",
        "watch.py",
        "command.py",
        "machine/probe.py",  # a child process, whose output its parent reads
        "report/printer.py",
    }
    assert who(lambda f: any(c.startswith("os.environ.set") or c == "os.putenv" for c in calls(f))) == {"run.py"}
    assert who(lambda f: {"subprocess.Popen", "os.killpg"} & set(calls(f))) == {"machine/process.py"}
    assert who(lambda f: any(i.split(".")[0] in ("pickle", "marshal", "shelve", "dill") for i in imports(f))) == set()
    assert who(lambda f: any("config.update" in c for c in calls(f))) == set()
    assert who(lambda f: any(i.startswith("jax._src") for i in imports(f))) == set()
    assert who(lambda f: "pynvml" in f.read_text().replace("`pynvml`", "")) == {"machine/nvml.py"}
    assert who(lambda f: any(i.split(".")[0] == "matplotlib" for i in imports(f))) == {"report/plot.py"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_can_be_read_in_a_sitting(path):
    assert len(path.read_text().splitlines()) <= 400


def test_registry_hosts_are_not_named():
    root = PACKAGE.parent
    texts = [*FILES, *root.glob("constraints/*"), root / "pyproject.toml", root / "README.md", root / ".ci/run"]
    hosts = re.compile(r"https?://[^\s)\"']*(pypi|pythonhosted|npmjs|debian)", re.IGNORECASE)
    assert not [str(t) for t in texts if t.exists() and hosts.search(t.read_text())]
