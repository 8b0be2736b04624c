"""Describes a GPU for XLA, from a bundled data file or from XLA's own text format.

XLA's text format is `stream_executor.GpuTargetConfigProto`, printed as text
(`xla/stream_executor/device_description.proto`). XLA writes such a text for every module that it dumps. A part of it::

    gpu_device_info {
      core_count: 132
      cuda_compute_capability { major: 9 minor: 0 }
    }
    platform_name: "CUDA"

`load_gpu("h100-80gb")` reads a bundled file, and `load_gpu("my_gpu.txt")` reads such a text. XLA divides by some of the
fields. If one of them were missing or zero, XLA would end the process. So this module checks every field first.
"""

import math
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxremat.chips.chip import MOST_MEMORY
from jaxremat.errors import TargetError, nearest

FOLDER = Path(__file__).parent / "targets"
#: The least compute capability that CUDA 13 compiles for.
LEAST_CAPABILITY = (7, 5)


@dataclass(frozen=True)
class GpuDescription:
    """The description of one GPU.

    The fields have XLA's names. Sizes are in bytes, bandwidths in bytes/s, clock rates in GHz, and peaks in FLOP/s.

    `peak_bf16_flops` is the dense tensor-core peak with float32 accumulation. Only the prediction of times needs it and
    `host_link_bandwidth`. If one of the two is unknown, it is None, and no time is predicted. `peak_f16_flops` is the peak
    of float16 where that is another one. `sustained_clock_ghz` is the clock in training where that is known to be lower.
    Below compute capability 8.0 no time is predicted without it. `node_link_bandwidth` is what one GPU sends to others of
    its node, and `network_bandwidth` what it sends to other nodes, both in one direction. Only times on several GPUs need
    them. `devices_of_node` is how many GPUs a node has at most where those aren't 8. `text` is XLA's text, if the
    description came from one.
    """

    description: str
    compute_capability: tuple[int, int]
    core_count: int
    device_memory_size: int
    memory_bandwidth: int
    l2_cache_size: int
    clock_rate_ghz: float
    shared_memory_per_block_optin: int
    shared_memory_per_core: int
    threads_per_core_limit: int
    fpus_per_core: int
    peak_bf16_flops: int | None = None
    peak_f16_flops: int | None = None
    sustained_clock_ghz: float | None = None
    host_link_bandwidth: int | None = None
    node_link_bandwidth: int | None = None
    network_bandwidth: int | None = None
    devices_of_node: int | None = None
    text: str = ""

    def to_text(self) -> str:
        """The description in XLA's text format."""
        if self.text:
            return self.text
        major, minor = self.compute_capability
        numbers = "\n".join(f"  {f.name}: {getattr(self, f.name)}" for f in fields(self) if f.type in (int, float))
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
{numbers}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.2"
  name: "{self.description}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 2 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{self.description}"
"""


def text_with_pool(text: str, pool_bytes: int) -> str:
    """The text of a GPU on which XLA acts as on one whose allocator has `pool_bytes`.

    XLA's own rematerialization acts at the pool's size on a GPU that is here, and at 0.8 of the GPU's memory on one that isn't.
    So the GPU's memory is the pool / 0.8. All else stays.

    References:
        XLA, `GetSchedulerMemoryLimit` in `xla/service/gpu/gpu_hlo_schedule.cc`.
    """
    return re.sub(r"(device_memory_size\s*:\s*)\d+", rf"\g<1>{math.ceil(pool_bytes / 0.8)}", text)


# The smallest and largest plausible values. A value outside of these bounds comes from a damaged text or has another unit.
_BOUNDS = {
    "core_count": (1, 1024),
    "device_memory_size": (2**30, MOST_MEMORY),
    "memory_bandwidth": (10**10, 10**14),
    "l2_cache_size": (2**17, 2**32),
    "clock_rate_ghz": (0.1, 10),
    "shared_memory_per_block_optin": (2**14, 2**24),
    "shared_memory_per_core": (2**14, 2**24),
    "threads_per_core_limit": (256, 2**14),
    "fpus_per_core": (16, 1024),
}
# The text that this package writes has fixed values for the first eight fields. A user's text must have them too, since XLA
# divides by them.
_TEXT_BOUNDS = {
    "threads_per_block_limit": (32, 2**14),
    "threads_per_warp": (32, 64),
    "shared_memory_per_block": (2**14, 2**24),
    "block_dim_limit_x": (1, 2**31),
    "block_dim_limit_y": (1, 2**31),
    "block_dim_limit_z": (1, 2**31),
    "registers_per_core_limit": (2**10, 2**20),
    "registers_per_block_limit": (2**10, 2**20),
    **_BOUNDS,
}


def bundled_names() -> tuple[str, ...]:
    """The names of the bundled GPUs."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def nvidia_driver() -> bool:
    """Whether this machine has an NVIDIA driver.

    The function reads only the file system, so it may run before JAX is set up.
    """
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")


def gpu_of_kind(device_kind: str) -> str | None:
    """The bundled GPU that is a device of this kind, such as `h200` for `NVIDIA H200`.

    None if there is none. A kind may add an edition to the description, such as `Workstation Edition`. `Ti`, `D` and the like
    are other GPUs.
    """
    for name in bundled_names():
        rest = device_kind.removeprefix(load_gpu(name)[1].description)
        if rest != device_kind and not re.match(r"\w| (Ti|SUPER|D|Laptop)\b", rest):
            return name
    return None


def attached_models() -> list[str]:
    """The models of the GPUs that this machine's driver lists: `["NVIDIA H100 80GB HBM3"]`.

    Each stands once. The function reads only the file system, so it may run before JAX is set up.
    """
    texts = [path.read_text() for path in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    return sorted({match[1] for text in texts if (match := re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE))})


def load_gpu(name_or_path: str, known: Sequence[str] = ()) -> tuple[str, GpuDescription]:
    """Loads a bundled GPU by its name, or a GPU from a text file by its path.

    Args:
        name_or_path: the name, or the path.
        known: the names that an error lists. Without any they are those of the bundled GPUs.

    Returns:
        The name that a record shows, and the description. The name of a file's GPU is the file's name without its ending.

    Raises:
        TargetError: there is no such name or file, or a field is missing, unreadable or out of bounds.
    """
    if name_or_path in bundled_names():
        values = tomllib.loads((FOLDER / f"{name_or_path}.toml").read_text())
        del values["sources"], values["datasheet"]
        major, _, minor = values.pop("compute_capability").partition(".")
        _check_bounds(name_or_path, values, _BOUNDS)
        return name_or_path, GpuDescription(compute_capability=(int(major), int(minor)), **values)
    path = Path(name_or_path)
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        known = ("gpu", "cpu", *(known or bundled_names()))
        why = (error.strerror or "").lower() if isinstance(error, OSError) else "it holds no text"
        raise TargetError(
            f"unknown target {name_or_path!r}",
            allowed=f"{', '.join(known)}, or the path of a target text file",
            cause=f"neither a bundled name nor a readable file ({why})",
            next_step=nearest(name_or_path, known) or "see --list targets; --dump-target FILE writes one on a GPU machine",
        ) from None
    return path.stem, _from_text(name_or_path, text)


def _from_text(where: str, text: str) -> GpuDescription:
    try:
        tree = _parse(text)
    except ValueError as error:
        raise TargetError(
            f"target file {where!r} cannot be parsed: {error}",
            allowed="XLA's GpuTargetConfigProto as text, as --dump-target writes it",
            next_step="write a fresh one with --dump-target FILE on a machine with that GPU",
        ) from None
    device = tree.get("gpu_device_info")
    if not isinstance(device, dict):
        raise TargetError(
            f"target file {where!r} " + ("has no gpu_device_info block" if text.strip() else "is empty"),
            allowed="XLA's GpuTargetConfigProto as text",
            next_step="write a fresh one with --dump-target FILE on a machine with that GPU",
        )
    if tree.get("platform_name") != "CUDA":
        raise TargetError(
            f"target file {where!r} has platform_name {tree.get('platform_name')!r}",
            allowed="CUDA",
            next_step="use an NVIDIA GPU's text",
        )
    _check_bounds(where, device, _TEXT_BOUNDS)
    capability = device.get("cuda_compute_capability")
    capability = capability if isinstance(capability, dict) else {}
    major, minor = capability.get("major"), capability.get("minor", 0)
    if (
        not isinstance(major, int)
        or not isinstance(minor, int)
        or not (LEAST_CAPABILITY <= (major, minor) <= (20, 9) and 0 <= minor <= 9)
    ):
        raise TargetError(
            f"target file {where!r} has "
            + ("no compute capability" if major is None else f"compute capability {major}.{minor}"),
            allowed="7.5 or above, written as cuda_compute_capability { major: 7 minor: 5 }",
            next_step="write a fresh one with --dump-target FILE on a machine with that GPU",
        )
    return GpuDescription(
        description=str(tree.get("device_description_str") or device.get("name") or where),
        compute_capability=(major, minor),
        peak_bf16_flops=_peak_bf16(device),
        host_link_bandwidth=link if isinstance(link := device.get("pcie_bandwidth"), int) and link > 0 else None,
        text=text,
        **{name: device[name] for name in _BOUNDS},
    )


def _peak_bf16(device: dict[str, Any]) -> int | None:
    """The dense bf16 peak in FLOP/s, by XLA's matrix unit description; None without one.

    Key 16 of the description is BF16 in xla_data.proto.
    """
    unit = device.get("matrix_unit_description")
    rates = unit.get("rate_infos", []) if isinstance(unit, dict) else []
    try:
        for rate in rates if isinstance(rates, list) else [rates]:
            if rate["key"] == 16:
                value = rate["value"]
                per_clock = 2 * value["units_per_core"] * value["ops_per_clock"] * device["core_count"]
                return int(per_clock * value["clock_rate_ghz"] * 1e9) or None
    except (KeyError, TypeError, ValueError, OverflowError):
        pass  # an unexpected form: XLA may still be able to read it, and no time is predicted
    return None


def _check_bounds(where: str, values: dict[str, Any], bounds: dict[str, tuple[float, float]]) -> None:
    for name, (low, high) in bounds.items():
        value, number = values.get(name), (int | float if name == "clock_rate_ghz" else int)
        if not isinstance(value, number) or isinstance(value, bool) or not low <= value <= high:
            got = "is missing" if value is None else f"is {value!r}"
            raise TargetError(
                f"target {where!r}: {name} {got}",
                allowed=f"a {'whole ' * (number is int)}number from {low:,} to {high:,}",
                cause="XLA divides by it, and would end the process without a word",
                next_step="fill it in, or write a fresh file with --dump-target FILE on a machine with that GPU",
            )


_TOKEN = re.compile(
    r"""\s*(?:\#[^\n]*|(?P<name>[A-Za-z_][\w.]*)|(?P<number>-?[0-9][\w.+-]*)|"(?P<text>(?:[^"\\]|\\.)*)"|(?P<mark>[{}:<>;,\[\]]))"""
)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position, text = 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if not match:
            raise ValueError(
                f"unexpected {text[position:].split()[0][:20]!r} in line {text.count(chr(10), 0, position) + 1}"
            )
        position = match.end()
        if match.lastgroup:
            yield match.lastgroup, match[match.lastgroup]


def _parse(text: str) -> dict[str, Any]:
    """Parses the parts of the protobuf text format that a device description uses.

    These are nested messages, numbers, strings and enums. For example, `a { b: 2 }` gives `{"a": {"b": 2}}`. A field that
    occurs several times gives a list.

    Raises:
        ValueError: the text isn't in this format. The message says what is wrong.
    """
    root: dict[str, Any] = {}
    stack, name = [root], ""
    for kind, value in _tokens(text):
        if kind == "mark":
            if value == "{" and name:
                child: dict[str, Any] = {}
                _add(stack[-1], name, child)
                stack.append(child)
                name = ""
            elif value == "}" and len(stack) > 1:
                stack.pop()
            elif value not in ":;,":
                raise ValueError(f"unexpected {value!r}")
        elif not name and kind == "name":
            name = value
        elif name:
            _add(
                stack[-1],
                name,
                _parsed_number(value) if kind == "number" else {"true": True, "false": False}.get(value, value),
            )
            name = ""
        else:
            raise ValueError(f"{value!r} stands where a field name is expected")
    if len(stack) > 1 or name:
        raise ValueError("it ends in the middle of a block")
    return root


def _parsed_number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text.rstrip("f"))


def _add(message: dict[str, Any], name: str, value: Any) -> None:
    if name not in message:
        message[name] = value
    elif isinstance(message[name], list):
        message[name].append(value)
    else:
        message[name] = [message[name], value]
