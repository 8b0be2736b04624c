"""`--list`: what there is to choose from."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from jaxremat.model.presets import PRESETS
from jaxremat.policy.spec import JAX_ALIASES, MAXTEXT_ALIASES
from jaxremat.report.table import list_table
from jaxremat.units import gib
from jaxremat.xla.gpu import bundled_names, load_gpu

if TYPE_CHECKING:
    from jaxremat.policy.names import NamedValue


@dataclass(frozen=True)
class Column:
    """A field of what is listed: its key in a record, its title and its text in a table. None is left empty there."""

    key: str
    title: str
    show: Callable[[Any], str] = str


@dataclass(frozen=True)
class Listing:
    """What there is to choose from, with bytes and counts as numbers; `left` columns are text."""

    record: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    left: int = 1

    def table(self) -> Table:
        """For people."""
        titles = [column.title for column in self.columns]
        rows = [
            ["" if cell is None else column.show(cell) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]
        return list_table(self.title, titles, rows, self.left)

    def lines(self) -> Iterator[str]:
        """For programs: a JSON object a row."""
        for row in self.rows:
            cells = {column.key: cell for column, cell in zip(self.columns, row, strict=True)}
            yield json.dumps({"record": self.record, **cells})


_POLICIES = (
    ("none", "no wrapper: what differentiation asks for is kept"),
    ("everything", "checkpointed, and every value kept"),
    ("nothing", "only each layer's input; the layer is run again"),
    ("dots", "the results of matmuls"),
    ("dots-no-batch", "the results of matmuls without batch dimensions"),
    ("save:NAME,...", "the tensors with these checkpoint names"),
    ("offload:NAME,...", "the same, kept in pinned host memory; joins save: with +"),
    ("RULE+attention", "any of the above, and fused attention's outputs"),
    ("every:K", "only the input of each group of K layers"),
    ("every:sqrt", "every:K with K the rounded root of the layers"),
    ("every:K+INNER", "the same, with a policy for the layers while a group is run again"),
    ("one-in:K", "the first of every K layers run again, the others left as they are"),
    ("N*POLICY|N*POLICY", "N layers by one policy, the next N by another, and again; of names, in quotes"),
)


def policies() -> Listing:
    """The grammar, then the aliases from JAX and MaxText."""
    aliases = [(alias, f"= {text.replace(',', ', ')}") for alias, text in (JAX_ALIASES | MAXTEXT_ALIASES).items()]
    columns = (Column("policy", "policy"), Column("keeps", "what a layer keeps"))
    return Listing("policy", "policies", columns, (*_POLICIES, *aliases), left=2)


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
    """The GPUs that can be compiled for without having them."""
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


_OPTIMIZERS = {
    "adamw": "two moments",
    "adamw-bf16": "the first moment in bfloat16",
    "lion": "one moment, whose sign is the update",
    "sgd-momentum": "one moment",
    "adafactor": "row and column sums of each matrix's second moment",
    "muon": "one moment, orthogonalized, for the layers' kernels; AdamW for the others",
}


def optimizers(model: str, num_params: int, state_bytes: Mapping[str, int]) -> Listing:
    """The optimizers with the bytes of their state, counted on the model's own parameters."""
    columns = (
        Column("optimizer", "optimizer"),
        Column("keeps", "keeps"),
        Column("bytes_per_param", "bytes a parameter", "{:.3f}".format),
        Column("state_bytes", "state", gib),
    )
    rows = ((name, _OPTIMIZERS[name], num_bytes / num_params, num_bytes) for name, num_bytes in state_bytes.items())
    title = f"optimizers: state of {model}, {num_params:,} parameters"
    return Listing("optimizer", title, columns, tuple(rows), left=2)


def names(title: str, values: "Sequence[NamedValue]", num_layers: int) -> Listing:
    """The checkpoint names of a layer's values, with their bytes in one layer and in all."""
    columns = (
        Column("name", "name"),
        Column("shape", "shape", lambda shape: "x".join(map(str, shape))),
        Column("dtype", "dtype"),
        Column("layer_bytes", "MiB a layer", lambda num_bytes: f"{num_bytes / 2**20:,.2f}"),
        Column("total_bytes", f"x {num_layers} layers", gib),
    )
    rows = ((v.name, v.shape, str(v.dtype), v.num_bytes, v.num_bytes * num_layers) for v in values)
    return Listing("name", title, columns, tuple(rows))
