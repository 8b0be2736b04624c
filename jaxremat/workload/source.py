"""Where the user's code lies, by what --model says, and a hash of its source.

Nothing is imported or run here.

    find_source("train.py:workload")   # Source(module="train", file=/home/me/train.py, attribute="workload", ...)
    find_source("my.models:vit")       # Source(module="my.models", file=/home/me/my/models.py, attribute="vit", ...)
    source_hash("train.py:workload")   # of train.py and of the user's modules that train.py imports

The user's modules are found in the syntax tree of each file. Those of the standard library and of installed packages
(`jaxremat/system/whose.py`) are not the user's, and neither are those of this package.
"""

import ast
import contextlib
import hashlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxremat.errors import UsageError, nearest
from jaxremat.system.whose import PACKAGE, is_installed


@dataclass(frozen=True)
class Source:
    """The code that --model names.

    Attributes:
        text: what --model said.
        module: the name of its module. For a path it is the file's stem.
        file: the file of that module.
        attribute: the name in the module.
        is_path: whether --model gave a path, and not a module's name.
        roots: the folders in which the user's modules lie.
    """

    text: str
    module: str
    file: Path
    attribute: str
    is_path: bool
    roots: tuple[Path, ...]

    @property
    def name(self) -> str:
        """What --model said, with a path shortened to its file name."""
        return f"{Path(self.text.rpartition(':')[0]).name}:{self.attribute}" if self.is_path else self.text

    @property
    def place(self) -> str:
        """The file or module, as `name` says it."""
        return self.name.rpartition(":")[0]


def is_spec(text: str) -> bool:
    """Whether `text` names the user's code: `path.py:attribute` or `package.module:attribute`.

    A URL doesn't.
    """
    return ":" in text and "://" not in text


def source_hash(text: str) -> str:
    """A hash of the source that --model names, and of all user's modules behind its imports.

    Equal source has an equal hash in every folder and on every machine. Modules that are imported by a computed name, and
    files that the code reads, don't count.

    Args:
        text: `path.py:attribute` or `package.module:attribute`.

    Raises:
        UsageError: there is no such file or module, or it can't be read.
    """
    digest = hashlib.sha256()
    for name, file in sorted(own_modules(find_source(text)).items()):
        digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def find_source(text: str) -> Source:
    """The file and the attribute that --model names.

    A module is looked for in the current folder and on `sys.path`.

    Args:
        text: `path.py:attribute` or `package.module:attribute`.

    Raises:
        UsageError: `text` isn't of this form, or there is no such file or module.
    """
    place, _, attribute = text.rpartition(":")
    if not (place and attribute):
        raise UsageError(
            f"--model {text!r} names {'no attribute' if place else 'no file and no module'}",
            allowed="path.py:attribute or package.module:attribute",
            next_step=f"write it like --model {place or 'train.py'}:{attribute or 'workload'}",
        )
    if place.endswith(".py") or "/" in place:
        file = Path(place)
        if file.suffix != ".py" or not os.path.isfile(file):  # False too for a path that is too long
            raise _no_such_file(text, file)
        file = file.resolve()
        return Source(text, file.stem, file, attribute, True, _unique([file.parent, *_user_folders()]))
    with current_folder_on_path():
        file, roots = _find_module(place)
        if file is None:
            raise _no_such_module(text, place, roots)
        return Source(text, place, file, attribute, False, _unique([*roots, *_user_folders()]))


@contextlib.contextmanager
def current_folder_on_path() -> Iterator[None]:
    """A context in which the current folder is on `sys.path`, as it is for `python -m`."""
    before = list(sys.path)
    put_on_path(Path.cwd())
    try:
        yield
    finally:
        sys.path[:] = before


def put_on_path(folder: Path, first: bool = False) -> None:
    """Puts `folder` in front on `sys.path`.

    Where it is there already, it stays in its place, unless it must be `first`.
    """
    entries = [str(Path(entry).resolve()) for entry in sys.path]
    if str(folder) not in (entries[:1] if first else entries):
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # of folders as they were before the user's last change


def own_modules(source: Source) -> dict[str, Path]:
    """The user's modules by name: the one that --model names, and all behind its imports.

    A file that isn't valid Python imports nothing. Where --model names one of this package, its imports aren't the user's.
    """
    found = {source.module: source.file}
    package = "" if source.is_path else _package(source.module, source.file)
    top = source.module.partition(".")[0]
    own = top == PACKAGE.name
    missing = [] if own else _existing([*_with_parents(package), *_imported(source.file, package)], source.roots, top)
    while missing:
        name, file = missing.pop()
        if name not in found:
            found[name] = file
            missing += _existing(_imported(file, _package(name, file)), source.roots, top)
    return found


def _user_folders() -> list[Path]:
    """The folders of `sys.path` whose modules are the user's."""
    folders = (Path(entry).resolve() for entry in sys.path)
    return [folder for folder in folders if folder.is_dir() and not is_installed(folder)]


def _unique(folders: list[Path]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(folders))


def _find_module(name: str) -> tuple[Path | None, list[Path]]:
    """The file of a module or None, and the folders of its top-level package or module.

    Python's own search isn't used beyond the top-level name, since it would run the packages on the way.
    """
    top = name.partition(".")[0]
    is_name = all(name.split("."))  # not `a..b` or `a.`
    spec = next(filter(None, (finder.find_spec(top, None) for finder in sys.meta_path)), None) if is_name else None
    if spec is None:
        return None, []
    places = [*(spec.submodule_search_locations or ())] or ([spec.origin] if spec.has_location and spec.origin else [])
    roots = [Path(place).resolve().parent for place in places]
    return next((file for _, file in _existing([name], tuple(roots), top)), None), roots


def _existing(names: list[str], roots: tuple[Path, ...], own: str) -> list[tuple[str, Path]]:
    """Those modules of `names` that lie in `roots`, with their files.

    An installed package isn't the user's, and neither is this one, unless it is `own`, the one that --model names.
    """
    found = []
    for name in names:
        top, *rest = name.split(".")
        if top == PACKAGE.name != own:
            continue  # a second copy of it may lie on the path
        bases = [root.joinpath(top, *rest) for root in roots]
        files = [file for base in bases for file in (base / "__init__.py", base.with_name(f"{base.name}.py"))]
        found += [(name, file) for file in files if os.path.isfile(file) and (top == own or not is_installed(file))][:1]
    return found


def _imported(file: Path, package: str) -> list[str]:
    """The names of the modules that a file may import, each after its parent packages.

    Imports inside functions are among them.

    `from a import b` gives both `a` and `a.b`, since `b` may be a module.

    Raises:
        UsageError: the file can't be read.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the import gives them, with the file's name
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    except OSError as error:
        raise UsageError(
            f"the user's file {str(file)!r} cannot be read: {error.strerror}",
            cause="--model names it, or a file that imports it",
            next_step="make it readable",
        ) from None
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = _with_parents(package)[: 1 - node.level or None][-1:] if node.level else []
            if node.level and not above:
                continue  # beyond the top-level package, where Python refuses it
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return list(dict.fromkeys(part for name in names for part in _with_parents(name)))


def _package(name: str, file: Path) -> str:
    """The package from which a module's relative imports start."""
    return name if file.name == "__init__.py" else name.rpartition(".")[0]


def _with_parents(name: str) -> list[str]:
    """For `a.b.c`: `a`, `a.b` and `a.b.c`."""
    parts = name.split(".") if name else []
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def _no_such_file(text: str, file: Path) -> UsageError:
    if os.path.isfile(file):
        return UsageError(
            f"--model {text!r}: the file {str(file)!r} isn't a Python file",
            allowed="a file whose name ends in .py",
            next_step="write it like --model train.py:workload",
        )
    beside = sorted(path.name for path in file.parent.glob("*.py")) if os.path.isdir(file.parent) else []
    return UsageError(
        f"--model {text!r}: there is no file {str(file)!r}",
        allowed="path.py:attribute or package.module:attribute",
        cause="" if os.path.isdir(file.parent) else f"there is no folder {str(file.parent)!r}",
        next_step=nearest(file.name, beside) or f"give a path from the current folder, {Path.cwd()}",
    )


def _no_such_module(text: str, name: str, roots: list[Path]) -> UsageError:
    folders, there, missing = [*roots, *_user_folders()], "", ""
    for part in filter(None, name.split(".")):
        inside = [folder / part for folder in folders if os.path.isdir(folder / part)]
        if not inside:
            missing = part
            break
        folders, there = inside, f"{there}{part}."
    found = [file for folder in folders for file in (*folder.glob("*.py"), *(path.parent for path in folder.glob("*/*.py")))]
    return UsageError(
        f"--model {text!r}: there is no module {name!r}",
        allowed="a module that Python finds from the current folder, on PYTHONPATH or among the installed packages",
        next_step=nearest(f"{there}{missing}", sorted({f"{there}{path.stem}" for path in found}))
        or "give the path of its file, as in --model path/to/file.py:workload",
    )
