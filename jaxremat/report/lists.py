"""What `--list` prints, such as the policies, the models or a model's checkpoint names.

`policies().lines()` begins with `{"record": "policy", "policy": "none", "keeps": "no wrapper: ..."}`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from jaxremat.chips.catalog import ATTACHED, bundled_names, describe
from jaxremat.model.presets import PRESETS
from jaxremat.policy.grammar import ALIASES, grammar
from jaxremat.report.table import list_table, number
from jaxremat.units import gib

if TYPE_CHECKING:
    from jaxremat.mesh.sharding import ParamSharding
    from jaxremat.policy.names import NamedValue


@dataclass(frozen=True)
class Listing:
    """A list of choices, as a table for a person or as JSON lines for a program.

    Attributes:
        record: the `record` field of each JSON object, such as `policy`.
        title: the table's title.
        rows: the choices, by the names of their fields. Bytes and counts are numbers, and None is an empty cell.
        titles: the titles of the table's columns, where they aren't the names.
        shows: makes a cell's text from a value, where it isn't `str`.
        left: the number of first columns with text. Text is aligned left, numbers right.
        last: the number of last columns with text.
    """

    record: str
    title: str
    rows: Sequence[Mapping[str, Any]]
    titles: Mapping[str, str] = field(default_factory=dict)
    shows: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    left: int = 1
    last: int = 0

    def table(self) -> Table:
        """The table for a person."""
        titles = [self.titles.get(name, name) for name in next(iter(self.rows), {})]
        rows = [["" if v is None else self.shows.get(k, str)(v) for k, v in row.items()] for row in self.rows]
        return list_table(self.title, titles, rows, self.left, self.last)

    def lines(self) -> Iterator[str]:
        """The lines for a program: one JSON object per row."""
        for row in self.rows:
            yield json.dumps({"record": self.record, **row})


def _mib(digits: int) -> Callable[[float], str]:
    return lambda num_bytes: number(num_bytes, digits, 2**20)


def policies() -> Listing:
    """The forms of the policy grammar, and then the aliases from JAX and MaxText."""
    rows = [{"policy": form.pattern, "keeps": form.keeps} for form in grammar()]
    rows += [{"policy": alias, "keeps": f"= {text}"} for alias, text in ALIASES.items()]
    return Listing("policy", "policies", rows, {"keeps": "what a layer keeps"}, left=2)


def models() -> Listing:
    """The presets with their sizes."""
    titles = {"num_params": "parameters", "num_layers": "layers", "embed_dim": "width", "vocab_size": "vocabulary"}
    rows = [
        {
            "model": name,
            "num_params": one.num_params,
            **{size: getattr(one.config, size) for size in ("num_layers", "embed_dim", "vocab_size")},
            "seq_len": one.seq_len,
        }
        for name, one in PRESETS.items()
    ]
    return Listing("model", "models", rows, titles | {"seq_len": "seq-len"}, {"num_params": number, "vocab_size": number})


def targets() -> Listing:
    """The targets: the attached GPU, the CPU, and the GPUs that steps can be compiled for.

    For the last ones no GPU is needed.
    """
    titles = {"memory_bytes": "memory", "compute_capability": "cc", "peak_bf16_flops": "bf16 TFLOP/s"}
    nothing = dict.fromkeys(titles)
    rows: list[dict[str, Any]] = [
        {"target": "gpu", "device": f"the attached {ATTACHED.title}", **nothing},
        {"target": "cpu", "device": "this machine's CPU (memory not a GPU's)", **nothing},
    ]
    for name in bundled_names():
        _, gpu = describe(name)
        capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else None
        numbers = (gpu.device_memory_size, capability, gpu.peak_bf16_flops)
        rows.append({"target": name, "device": gpu.description, **dict(zip(titles, numbers, strict=True))})
    shows = {"memory_bytes": gib, "peak_bf16_flops": lambda flops: number(flops, unit=1e12)}
    return Listing("target", "targets", rows, titles, shows, left=2)


_OPTIMIZERS = {
    "adamw": "two moments",
    "adamw-bf16": "the first moment in bfloat16",
    "adamw-8bit": "two moments of 8 bits, in blocks",
    "lion": "one moment, whose sign is the update",
    "sgd-momentum": "one moment",
    "adafactor": "row and column sums of each matrix's second moment",
    "muon": "one moment, orthogonalized, for the layers' kernels; AdamW for the others",
}


def optimizers(model: str, num_params: int, state_bytes: Mapping[str, int]) -> Listing:
    """The optimizers with the bytes of their state for one model.

    Args:
        model: the model's name.
        num_params: the model's number of parameters.
        state_bytes: by optimizer, the bytes of its state for the model's own parameters.
    """
    rows = [
        {"optimizer": name, "keeps": _OPTIMIZERS[name], "bytes_per_param": size / num_params, "state_bytes": size}
        for name, size in state_bytes.items()
    ]
    title = f"optimizers: state of {model}, {num_params:,} parameters"
    titles = {"bytes_per_param": "bytes a parameter", "state_bytes": "state"}
    return Listing("optimizer", title, rows, titles, {"bytes_per_param": "{:.3f}".format, "state_bytes": gib}, left=2)


def shardings(title: str, params: "Sequence[ParamSharding]") -> Listing:
    """How parameters are sharded on a mesh, with the bytes of each.

    Where an axis of the mesh doesn't divide one, it says why.

    For example, `4096/fsdp 14336/tensor` is a kernel of which both axes divide a dimension, and `4096/fsdp,expert` is a
    dimension that two axes divide.
    """

    def lies(param: "ParamSharding") -> str:
        divided = (axes if axes is None or isinstance(axes, str) else ",".join(axes) for axes in param.divided)
        sizes = (f"{size}/{axes}" if axes else str(size) for size, axes in zip(param.shape, divided, strict=True))
        return " ".join(sizes) + (f" ({param.not_divided})" if param.not_divided else "")

    rows = [{"name": p.name, "lies": lies(p), "num_bytes": p.num_bytes, "device_bytes": p.device_bytes} for p in params]
    whole, of_device = sum(p.num_bytes for p in params), sum(p.device_bytes for p in params)
    titles = {"name": "parameter", "num_bytes": "MiB", "device_bytes": "a device"}
    shows = {"num_bytes": _mib(1), "device_bytes": _mib(1)}
    return Listing("sharding", f"{title}: {gib(of_device)} a device of {gib(whole)}", rows, titles, shows, left=2)


def names(title: str, values: "Mapping[NamedValue, int]", parts: int = 1) -> Listing:
    """The checkpoint names of the layers' values, with the bytes of each.

    The bytes are those in one layer and in all layers that have the value. The last column is the line that made the value.

    Args:
        title: the table's title.
        values: the values, each with how often all layers have it.
        parts: number of equal parts of a value of which each of several devices has one. The bytes are those of one device.
    """
    rows = [
        {
            "name": value.name,
            "shape": value.shape,
            "dtype": str(value.dtype),
            "layer_bytes": value.num_bytes // parts,
            "num_values": count,
            "total_bytes": value.num_bytes // parts * count,
            "made_at": value.users_line,
        }
        for value, count in values.items()
    ]
    titles = {"layer_bytes": "MiB each", "num_values": "values", "total_bytes": "in all", "made_at": "made at"}
    shows = {"shape": lambda shape: "x".join(map(str, shape)), "layer_bytes": _mib(2), "total_bytes": gib}
    return Listing("name", title, rows, titles, shows | {"made_at": lambda source: Path(source).name}, last=1)
