"""Offloading in a scan, which the XLA of jax 0.10.2 and 0.11.0 gets wrong on a GPU.

XLA's pass `dynamic-slice-annotator` says from which byte of a stack each iteration of a loop copies. Before jax 0.11.1 it takes
an index that the loop computes, such as `L-1-i` in the backward pass, for `i` itself where the copy is one between host and
device. So layer i gets the offloaded values of layer L-1-i. Bytes and times look right, and the gradients are wrong. Unrolled
layers have no such index.

    openxla/xla#46231    the fault
    openxla/xla#46308    its remedy, in jax 0.11.1 and later

Without the pass, each copy reads the index that the program computes. `xla/compile.py` disables it where a program offloads in
a loop. Other programs are compiled as before: they don't have the fault, and XLA copies their stacks faster with the pass.

A program that a user compiles needs the flag of `flag_line`, and `check_scan` raises a UsageError where it isn't set. It knows
the loops that jaxremat makes and those in a function under `with_policy`. It doesn't know a loop that a caller puts around them
and differentiates as a whole.
"""

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from importlib import metadata

from jaxremat.chips.catalog import is_gpu
from jaxremat.chips.installed import PLUGINS
from jaxremat.errors import UsageError
from jaxremat.policy.spec import Policy

#: The pass of XLA that has the fault, and the flag that disables passes.
PASS, DISABLED = "dynamic-slice-annotator", "xla_disable_hlo_passes"
#: XLA's own rematerialization pass, which jaxremat disables too.
REMAT = "rematerialization"
#: The packages that bring XLA, and the first version without the fault.
_XLA_IN, _MENDED = ("jaxlib", *PLUGINS), (0, 11, 1)
_is_ours: ContextVar[bool] = ContextVar("_is_ours", default=False)


@functools.cache
def has_fault() -> bool:
    """Whether the installed XLA reads the wrong layer where a scan offloads."""
    return any(is_faulty(version) for version in map(_version, _XLA_IN) if version)


def is_faulty(version: str) -> bool:
    """Whether the XLA of a version of jaxlib has the fault.

    For example, True for `0.11.0` and False for `0.11.1`.
    """
    return tuple(map(int, re.findall(r"\d+", version)[:3])) < _MENDED


def flag_line(*names: str) -> str:
    """The line `XLA_FLAGS=...` that disables the passes `names`, or else the one with the fault.

    It disables the passes that XLA_FLAGS already disables, too.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    others = [flag for flag in flags if not flag.startswith(f"--{DISABLED}=")]
    last = next((flag.partition("=")[2] for flag in reversed(flags) if flag not in others), "")
    passes = dict.fromkeys(filter(None, (*last.split(","), *(names or (PASS,)))))
    words = [*others, f"--{DISABLED}={','.join(passes)}"]
    return f"XLA_FLAGS={words[0]}" if len(words) == 1 else f'XLA_FLAGS="{" ".join(words)}"'


@contextlib.contextmanager
def only_our_compiles() -> Iterator[None]:
    """A context in which nothing runs but what jaxremat compiles, such as a command.

    `check_scan` refuses nothing there.
    """
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)


@contextlib.contextmanager
def compiled_without_pass() -> Iterator[None]:
    """A context for traces in a user's process whose compile disables the pass.

    `check_scan` refuses nothing there.

    JAX stores the traces of jitted functions. A default device of its own sets these apart from a trace of the caller's.
    """
    if not has_fault():
        yield
        return
    import jax

    with only_our_compiles(), jax.default_device(jax.local_devices()[0]):
        yield


def check_layers(policy: Policy, num_layers: int) -> None:
    """`check_scan` for a scan over `num_layers` layers, or over groups of them."""
    size = policy.size(num_layers)  # a recomputed group of layers is the scan that offloads
    check_scan(policy, size if policy.recomputes_groups else num_layers // size)


def check_scan(policy: Policy, num_steps: int | None) -> None:
    """Refuses a policy for layers in a scan where a GPU would compute wrong gradients.

    Args:
        policy: the policy of the layers.
        num_steps: the steps of the scan. None where it isn't known whether there is a scan.

    Raises:
        UsageError: the policy offloads in a scan of several steps, XLA has the fault, and its pass isn't disabled.
    """
    if num_steps == 1 or not policy.offloads or not has_fault() or _is_ours.get():
        return
    if traces_for_gpu() and not _pass_is_disabled():
        where = "in a layer that may be in a scan" if num_steps is None else f"in a scan of {num_steps} steps"
        versions = ", ".join(f"{package} {version}" for package in _XLA_IN if (version := _version(package)))
        raise UsageError(
            f"policy {str(policy)!r} offloads {where}, and the gradients would be wrong with {versions}",
            allowed="offload: in unrolled layers, or without XLA's pass dynamic-slice-annotator",
            cause="in the backward pass layer i gets the offloaded values of layer L-1-i (openxla/xla#46231)",
            next_step=f"set {flag_line()} before Python starts, or install jax 0.11.1 or later",
        )


def traces_for_gpu() -> bool:
    """Whether what is traced now is for a GPU.

    `jax.default_device` decides, or else JAX's default backend.
    """
    import jax

    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    platform = getattr(device, "platform", device) or jax.default_backend()
    return is_gpu(platform)


def _pass_is_disabled() -> bool:
    """Whether XLA_FLAGS disables the pass."""
    from jaxremat.policy.jax_private import xla_flags

    return PASS.encode() in xla_flags()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
