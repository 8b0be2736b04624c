"""What `--list` prints: the policies, models, targets, optimizers, checkpoint names or shardings of a model.

`policies().lines()` begins with `{"record": "policy", "policy": "none", "keeps": "no wrapper: ..."}`.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from jaxremat.model.presets import PRESETS
from jaxremat.policy.grammar import ALIASES, GRAMMAR
from jaxremat.report.table import list_table, number
from jaxremat.units import gib
from jaxremat.xla.gpu import bundled_names, load_gpu

if TYPE_CHECKING:
    from jaxremat.mesh.sharding import ParamSharding
    from jaxremat.policy.names import NamedValue


@dataclass(frozen=True)
class Field:
    """One field of a listing: in a record, and as a column of the table, where a value of None is an empty cell.

    Attributes:
        key: the field's name in a JSON record.
        title: the column's title in a table. None for the same name.
        show: makes the text of a table's cell from a value.
    """

    key: str
    title: str | None = None
    show: Callable[[Any], str] = str


@dataclass(frozen=True)
class Listing:
    """A list of choices, as a table for a person or as JSON lines for a program.

    Attributes:
        record: the `record` field of each JSON object, such as `policy`.
        title: the table's title.
        fields: one for each value of a row.
        rows: the choices. Bytes and counts are numbers.
        left: the number of first columns that hold text. Text is aligned left, numbers right.
    """

    record: str
    title: str
    fields: tuple[Field, ...]
    rows: tuple[tuple[Any, ...], ...]
    left: int = 1

    def table(self) -> Table:
        """The table for a person."""
        titles = [one.title or one.key for one in self.fields]
        shows = [one.show for one in self.fields]
        rows = [["" if v is None else show(v) for show, v in zip(shows, row, strict=True)] for row in self.rows]
        return list_table(self.title, titles, rows, self.left)

    def lines(self) -> Iterator[str]:
        """The lines for a program: one JSON object per row."""
        for row in self.rows:
            values = {one.key: value for one, value in zip(self.fields, row, strict=True)}
            yield json.dumps({"record": self.record, **values})


def policies() -> Listing:
    """The forms of the policy grammar, and then the aliases from JAX and MaxText."""
    forms = [(form.pattern, form.keeps) for form in GRAMMAR]
    aliases = [(alias, f"= {text}") for alias, text in ALIASES.items()]
    fields = (Field("policy"), Field("keeps", "what a layer keeps"))
    return Listing("policy", "policies", fields, (*forms, *aliases), left=2)


def models() -> Listing:
    """The presets with their sizes."""
    fields = (
        Field("model"),
        Field("num_params", "parameters", number),
        Field("num_layers", "layers"),
        Field("embed_dim", "width"),
        Field("vocab_size", "vocabulary", number),
        Field("seq_len", "seq-len"),
    )
    rows = (
        (name, p.num_params, p.config.num_layers, p.config.embed_dim, p.config.vocab_size, p.seq_len)
        for name, p in PRESETS.items()
    )
    return Listing("model", "models", fields, tuple(rows))


def targets() -> Listing:
    """The targets: the attached GPU, the CPU, and the GPUs that steps can be compiled for without having one."""
    fields = (
        Field("target"),
        Field("device"),
        Field("memory_bytes", "memory", gib),
        Field("compute_capability", "cc"),
        Field("peak_bf16_flops", "bf16 TFLOP/s", lambda flops: number(flops, unit=1e12)),
    )
    rows: list[tuple[Any, ...]] = [
        ("gpu", "the attached NVIDIA GPU", None, None, None),
        ("cpu", "this machine's CPU (memory not a GPU's)", None, None, None),
    ]
    for name in bundled_names():
        _, gpu = load_gpu(name)
        capability = ".".join(map(str, gpu.compute_capability))
        rows.append((name, gpu.description, gpu.device_memory_size, capability, gpu.peak_bf16_flops))
    return Listing("target", "targets", fields, tuple(rows), left=2)


_OPTIMIZERS = {
    "adamw": "two moments",
    "adamw-bf16": "the first moment in bfloat16",
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
    fields = (
        Field("optimizer"),
        Field("keeps"),
        Field("bytes_per_param", "bytes a parameter", "{:.3f}".format),
        Field("state_bytes", "state", gib),
    )
    rows = ((name, _OPTIMIZERS[name], num_bytes / num_params, num_bytes) for name, num_bytes in state_bytes.items())
    title = f"optimizers: state of {model}, {num_params:,} parameters"
    return Listing("optimizer", title, fields, tuple(rows), left=2)


def shardings(title: str, params: "Sequence[ParamSharding]") -> Listing:
    """How parameters are sharded on a mesh, with the bytes of each, and why an axis of the mesh doesn't divide some.

    For example, `4096/fsdp 14336/tensor` is a kernel of which both axes divide a dimension, and `4096/fsdp,expert` is a
    dimension that two axes divide.
    """

    def lies(param: "ParamSharding") -> str:
        divided = (axes if axes is None or isinstance(axes, str) else ",".join(axes) for axes in param.divided)
        sizes = (f"{size}/{axes}" if axes else str(size) for size, axes in zip(param.shape, divided, strict=True))
        return " ".join(sizes) + (f" ({param.not_divided})" if param.not_divided else "")

    mib = functools.partial(number, digits=1, unit=2**20)
    fields = (
        Field("name", "parameter"),
        Field("lies"),
        Field("num_bytes", "MiB", mib),
        Field("device_bytes", "a device", mib),
    )
    rows = tuple((p.name, lies(p), p.num_bytes, p.device_bytes) for p in params)
    whole, of_device = sum(p.num_bytes for p in params), sum(p.device_bytes for p in params)
    return Listing("sharding", f"{title}: {gib(of_device)} a device of {gib(whole)}", fields, rows, left=2)


def names(title: str, values: "Mapping[NamedValue, int]", parts: int = 1) -> Listing:
    """The checkpoint names of the layers' values, with each value's bytes in one layer and in all layers that have it.

    Args:
        title: the table's title.
        values: the values, each with how often all layers have it.
        parts: number of equal parts of a value of which each of several devices has one. The bytes are those of one device.
    """
    fields = (
        Field("name"),
        Field("shape", show=lambda shape: "x".join(map(str, shape))),
        Field("dtype"),
        Field("layer_bytes", "MiB each", functools.partial(number, digits=2, unit=2**20)),
        Field("num_values", "values"),
        Field("total_bytes", "in all", gib),
    )
    rows = ((v.name, v.shape, str(v.dtype), v.num_bytes // parts, n, v.num_bytes // parts * n) for v, n in values.items())
    return Listing("name", title, fields, tuple(rows))
