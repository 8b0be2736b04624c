"""What `--list` prints: the policies, models, targets, optimizers, checkpoint names or shardings of a model.

`policies().lines()` begins with `{"record": "policy", "policy": "none", "keeps": "no wrapper: ..."}`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from jaxremat.model.presets import PRESETS
from jaxremat.policy.grammar import ALIASES, GRAMMAR
from jaxremat.report.table import list_table
from jaxremat.units import gib
from jaxremat.xla.calibration import load_calibration
from jaxremat.xla.gpu import bundled_names, load_gpu

if TYPE_CHECKING:
    from jaxremat.mesh.sharding import ParamSharding
    from jaxremat.policy.names import NamedValue


@dataclass(frozen=True)
class Column:
    """One column of a listing. A value of None is an empty cell in the table.

    Attributes:
        key: the field's name in a JSON record.
        title: the column's title in a table.
        show: makes the text of a table's cell from a value.
    """

    key: str
    title: str
    show: Callable[[Any], str] = str


@dataclass(frozen=True)
class Listing:
    """A list of choices, as a table for a person or as JSON lines for a program.

    Attributes:
        record: the `record` field of each JSON object, such as `policy`.
        title: the table's title.
        columns: one for each cell of a row.
        rows: the choices. Bytes and counts are numbers.
        left: the number of first columns that hold text. Text is aligned left, numbers right.
    """

    record: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    left: int = 1

    def table(self) -> Table:
        """The table for a person."""
        titles = [column.title for column in self.columns]
        rows = [
            ["" if cell is None else column.show(cell) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]
        return list_table(self.title, titles, rows, self.left)

    def lines(self) -> Iterator[str]:
        """The lines for a program: one JSON object per row."""
        for row in self.rows:
            cells = {column.key: cell for column, cell in zip(self.columns, row, strict=True)}
            yield json.dumps({"record": self.record, **cells})


def policies() -> Listing:
    """The forms of the policy grammar, and then the aliases from JAX and MaxText."""
    forms = [(form.pattern, form.keeps) for form in GRAMMAR]
    aliases = [(alias, f"= {text}") for alias, text in ALIASES.items()]
    columns = (Column("policy", "policy"), Column("keeps", "what a layer keeps"))
    return Listing("policy", "policies", columns, (*forms, *aliases), left=2)


def policy_table_markdown() -> str:
    """The grammar as a Markdown table, for the documentation. `policies` has the same rows for a terminal.

    Its first lines are:

        | policy | what a layer keeps | example |
        |---|---|---|
        | `none` | no wrapper: what differentiation asks for is kept | `none` |
    """
    head = ("| policy | what a layer keeps | example |", "|---|---|---|")
    rows = (f"| `{_cell(form.pattern)}` | {form.keeps} | `{_cell(form.example)}` |" for form in GRAMMAR)
    return "\n".join((*head, *rows)) + "\n"


def alias_table_markdown() -> str:
    """The names from JAX and MaxText as a Markdown table, each with the policy that it stands for."""
    rows = (f"| `{alias}` | `{text}` |" for alias, text in ALIASES.items())
    return "\n".join(("| name | policy |", "|---|---|", *rows)) + "\n"


def _cell(text: str) -> str:
    """`text` with its vertical bars escaped, as they separate the cells of a Markdown table."""
    return text.replace("|", "\\|")


def models() -> Listing:
    """The presets with their sizes."""
    columns = (
        Column("model", "model"),
        Column("num_params", "parameters", "{:,}".format),
        Column("num_layers", "layers"),
        Column("embed_dim", "width"),
        Column("vocab_size", "vocabulary", "{:,}".format),
        Column("seq_len", "seq-len"),
    )
    rows = (
        (name, p.num_params, p.config.num_layers, p.config.embed_dim, p.config.vocab_size, p.seq_len)
        for name, p in PRESETS.items()
    )
    return Listing("model", "models", columns, tuple(rows))


def targets() -> Listing:
    """The targets: the attached GPU, the CPU, and the GPUs that steps can be compiled for without having one."""
    columns = (
        Column("target", "target"),
        Column("device", "device"),
        Column("memory_bytes", "memory", gib),
        Column("compute_capability", "cc"),
        Column("peak_bf16_flops", "bf16 TFLOP/s", lambda flops: f"{flops / 1e12:,.0f}"),
    )
    rows: list[tuple[Any, ...]] = [
        ("gpu", "the attached NVIDIA GPU", None, None, None),
        ("cpu", "this machine's CPU (memory not a GPU's)", None, None, None),
    ]
    for name in bundled_names():
        _, gpu = load_gpu(name)
        capability = ".".join(map(str, gpu.compute_capability))
        rows.append((name, gpu.description, gpu.device_memory_size, capability, gpu.peak_bf16_flops))
    return Listing("target", "targets", columns, tuple(rows), left=2)


def target_table_markdown() -> str:
    """The bundled GPUs as a Markdown table, for the documentation. `targets` has the same rows for a terminal.

    Bandwidths are in GB/s and of one direction: of device memory, to the GPUs of the node and to those of other nodes. The last
    column says which profiles the times of kernels were fitted to: those of the GPU's own generation, or the mean of all.
    """
    titles = (
        "target",
        "device",
        "memory",
        "capability",
        "bf16 TFLOP/s",
        "GB/s",
        "node GB/s",
        "network GB/s",
        "kernels fitted to",
    )
    rows = [titles, ["---"] * len(titles)]
    for name in bundled_names():
        _, gpu = load_gpu(name)
        links = (gpu.memory_bandwidth, gpu.node_link_bandwidth, gpu.network_bandwidth)
        numbers = ["unknown" if link is None else f"{link / 1e9:,.0f}" for link in links]
        peak = "none" if gpu.peak_bf16_flops is None else f"{gpu.peak_bf16_flops / 1e12:,.0f}"
        capability = ".".join(map(str, gpu.compute_capability))
        fitted = load_calibration(gpu.compute_capability).source.partition(",")[0]
        rows.append([f"`{name}`", gpu.description, gib(gpu.device_memory_size), capability, peak, *numbers, fitted])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


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
    columns = (
        Column("optimizer", "optimizer"),
        Column("keeps", "keeps"),
        Column("bytes_per_param", "bytes a parameter", "{:.3f}".format),
        Column("state_bytes", "state", gib),
    )
    rows = ((name, _OPTIMIZERS[name], num_bytes / num_params, num_bytes) for name, num_bytes in state_bytes.items())
    title = f"optimizers: state of {model}, {num_params:,} parameters"
    return Listing("optimizer", title, columns, tuple(rows), left=2)


def shardings(title: str, params: "Sequence[ParamSharding]") -> Listing:
    """How parameters lie on a mesh, with the bytes of each, and why an axis of the mesh doesn't divide some.

    For example, `4096/fsdp 14336/tensor` is a kernel of which both axes divide a dimension, and `4096/fsdp,expert` is a
    dimension that two axes divide.
    """

    def lies(param: "ParamSharding") -> str:
        divided = (axes if axes is None or isinstance(axes, str) else ",".join(axes) for axes in param.divided)
        sizes = (f"{size}/{axes}" if axes else str(size) for size, axes in zip(param.shape, divided, strict=True))
        return " ".join(sizes) + (f" ({param.not_divided})" if param.not_divided else "")

    columns = (
        Column("name", "parameter"),
        Column("lies", "lies"),
        Column("num_bytes", "MiB", lambda num_bytes: f"{num_bytes / 2**20:,.1f}"),
        Column("device_bytes", "a device", lambda num_bytes: f"{num_bytes / 2**20:,.1f}"),
    )
    rows = tuple((p.name, lies(p), p.num_bytes, p.device_bytes) for p in params)
    whole, of_device = sum(p.num_bytes for p in params), sum(p.device_bytes for p in params)
    return Listing("sharding", f"{title}: {gib(of_device)} a device of {gib(whole)}", columns, rows, left=2)


def names(title: str, values: "Mapping[NamedValue, int]", parts: int = 1) -> Listing:
    """The checkpoint names of the layers' values, with each value's bytes in one layer and in all layers that have it.

    Args:
        title: the table's title.
        values: the values, each with how often all layers have it.
        parts: number of equal parts of a value of which each of several devices has one. The bytes are those of one device.
    """
    columns = (
        Column("name", "name"),
        Column("shape", "shape", lambda shape: "x".join(map(str, shape))),
        Column("dtype", "dtype"),
        Column("layer_bytes", "MiB each", lambda num_bytes: f"{num_bytes / 2**20:,.2f}"),
        Column("num_values", "values"),
        Column("total_bytes", "in all", gib),
    )
    rows = ((v.name, v.shape, str(v.dtype), v.num_bytes // parts, n, v.num_bytes // parts * n) for v, n in values.items())
    return Listing("name", title, columns, tuple(rows))
