"""Checks the libtpu that is installed: XLA's compiler of TPUs, in the version that JAX names."""

import importlib.metadata
import re

from jaxremat.chips.installed import version_of
from jaxremat.errors import MissingDependencyError

_REQUIREMENT = re.compile(r"libtpu\s*==\s*(?P<version>[\d.]+?)(?P<any>\.\*)?\s*;.*")


def check_libtpu() -> None:
    """Checks that the libtpu is installed that JAX's extra `tpu` names.

    Raises:
        MissingDependencyError: it isn't, or is another one. With another one the text of a program is damaged.
    """
    named = next(filter(None, map(_REQUIREMENT.fullmatch, importlib.metadata.requires("jax") or ())), None)
    found, wanted = version_of("libtpu"), f"{named['version']}{named['any'] or ''}" if named else ""
    if found and (not named or _is_version(found, named["version"], any_after=bool(named["any"]))):
        return
    raise MissingDependencyError(
        f"compiling for a TPU that isn't in this machine needs libtpu {wanted}".rstrip(),
        cause=f"libtpu {found} is installed, and jax {version_of('jax')} names another"
        if found
        else "libtpu isn't installed",
        next_step='pip install "jaxremat[tpu]"',
    )


def _is_version(found: str, named: str, *, any_after: bool) -> bool:
    """Whether a version is the named one.

    With `any_after`, 0.0.42.1 is 0.0.42.
    """
    return found == named or (any_after and found.startswith(f"{named}."))
