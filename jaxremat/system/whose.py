"""Whose code a file is: the user's, an installed package's, Python's own, or this package's.

    is_users("/home/me/train.py")                                           # True
    is_installed("/home/me/.venv/lib/python3.11/site-packages/flax/core/scope.py")   # True in that environment

The folders that Python loads installed modules from decide, and not the names of folders. A user's project may lie in a virtual
environment, or below a folder that is called site-packages. What `pip install --target` put into another folder of `sys.path` is
installed, too, by pip's own list of its files. Nothing is imported here.
"""

import functools
import importlib.metadata
import importlib.util
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
#: Packages that are nobody's own code, even where they are loaded from a checkout.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax")
#: The parts of this package that are models and steps. The rest is how it runs a user's layers.
_LIKE_USERS = ("model", "step")
#: The file in which a kernel of Jupyter compiles a cell.
_CELL = re.compile(r"[/\\]ipykernel_\d+[/\\](\d+\.py)$")


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file of a traceback counts as the user's code.

    Of this package, only the models and the steps do. What has no file, such as `<string>`, doesn't.
    """
    if is_within(file, PACKAGE):
        return Path(file).relative_to(PACKAGE).parts[0] in _LIKE_USERS
    return not (file.startswith("<") or is_installed(file))


def is_installed(file: str | Path) -> bool:
    """Whether a file or folder is Python's own, an installed package's, or this package's."""
    return is_within(file, PACKAGE, *_library_folders(), *_installed_into(tuple(sys.path)))


def is_pythons(file: str | Path) -> bool:
    """Whether a file belongs to Python's standard library."""
    return is_within(file, *_standard()) and not is_within(file, *_sites())


def is_within(file: str | Path, *folders: str | Path) -> bool:
    """Whether a file or folder is one of `folders`, or lies in one.

    `site-packages/jaxremat` doesn't lie in `site-packages/jax`.
    """
    return any(
        str(file) == str(folder) or str(file).startswith(f"{str(folder).rstrip(os.sep)}{os.sep}") for folder in folders
    )


def shown_file(file: str) -> str:
    """The file as a person knows it.

    A notebook's cell has its number, such as `In[3]`, in place of a temporary file.
    """
    cell, ipython = _CELL.search(file), sys.modules.get("IPython")
    if not cell or ipython is None or (shell := ipython.get_ipython()) is None:
        return file
    from ipykernel.compiler import get_tmp_directory

    # A result that another kernel stored has its temporary folder. The file's name is a hash of the cell's text.
    known = shell.compile.format_code_name(os.path.join(get_tmp_directory(), cell[1]))
    return known[1] if known else "a cell of another notebook"


def package_folders(name: str) -> tuple[str, ...]:
    """The folders of a package; none if it isn't there."""
    loaded = sys.modules.get(name)
    places = getattr(loaded, "__path__", None)
    if places is None:
        spec = importlib.util.find_spec(name) if loaded is None else None
        places = spec.submodule_search_locations if spec else None
    return tuple(places or ())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    return _as_written_and_real(
        *_standard(), *_sites(), *(folder for name in _LIBRARIES for folder in package_folders(name))
    )


def _standard() -> tuple[str, ...]:
    return _as_written_and_real(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


@functools.cache
def _sites() -> tuple[str, ...]:
    """The folders that packages are installed into.

    They are those of this environment, of the one that it builds on, and the user's own.
    """
    prefixes = list(dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)))
    found = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages(prefixes)]
    return _as_written_and_real(*found, site.getusersitepackages())


@functools.lru_cache(maxsize=8)
def _installed_into(entries: tuple[str, ...]) -> tuple[str, ...]:
    """The top-level modules that pip installed into other folders of `sys.path`.

    Its lists of files name them.
    """
    others = [entry for entry in entries if entry and not is_within(entry, *_library_folders())]
    return _as_written_and_real(*(os.path.join(entry, name) for entry in others for name in _installed_names(entry)))


def _installed_names(entry: str) -> Iterator[str]:
    for distribution in importlib.metadata.distributions(path=[entry]):
        record = distribution.read_text("RECORD") or ""
        yield from {line.partition(",")[0].partition("/")[0] for line in record.splitlines()} - {"", ".."}


def _as_written_and_real(*folders: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for folder in folders for path in (folder, os.path.realpath(folder))))
