"""Claims about what takes the memory."""

import math
from collections.abc import Sequence
from typing import get_args

from experiments.claims.claim import Found, Picture, claim, gib_of, layout_of, series
from experiments.claims.steps import LLAMA, POLICIES, budget_bytes, grid, step
from experiments.common import Row, percent, span, where
from jaxremat.config import Optimizer
from jaxremat.xla.buffers import SOURCES


def _wide(width: int, heads: int) -> Row:
    """The fields of a model of this width, with an MLP four times as wide and as many key heads as query heads."""
    return {"embed_dim": width, "num_heads": heads, "num_kv_heads": heads, "mlp_dim": 4 * width}


#: 200M parameters in float32, with XLA's attention, since cuDNN's has no float32.
BASE: Row = {
    **{"num_layers": 12, **_wide(1024, 16), "dtype": "float32", "attention": "xla"},
    **{"seq_len": 1024, "max_seq_len": 4096, "batch": 8},
}
CHANGES: tuple[Row, ...] = (
    *({}, {"batch": 1}, {"batch": 32}, {"num_layers": 3}, {"num_layers": 24}),
    *(_wide(512, 8), _wide(2048, 32), {"seq_len": 256}, {"seq_len": 4096}),
)


@claim(
    "Who takes the memory",
    (step("memory", **{**BASE, "scan_layers": n >= 2, **change}) for n, change in enumerate((*CHANGES[:2], *CHANGES))),
    *("total_bytes", *SOURCES),
)
def components(rows: Sequence[Row]) -> Found:
    """The share of the activations; the model unrolled, and in a scan with one size changed at a time."""

    def shape(row: Row) -> str:
        names = {"batch": "batch", "num_layers": "depth", "embed_dim": "width", "seq_len": "length"}
        return ",\n".join([layout_of(row), *(f"{names[key]}\n{row[key]}" for key in names if row[key] != BASE[key])])

    shares = [row["activations"] / row["total_bytes"] for row in rows]
    over = sum(share > 0.9 for share in shares)
    bars = {name: [(shape(row), 100 * row[name] / row["total_bytes"]) for row in rows] for name in SOURCES}
    number = f"{percent(shares[0])} unrolled; {span(shares, percent)} in all, over 90 % in {over} of {len(rows)} cases"
    return number, (Picture("", "% of the total", bars, kind="stack"),)


#: By implementation, the kind of attention; and the dtype of the compute and the attention of a layer.
ATTENTION = {"xla": "plain", "cudnn": "fused"}
KINDS = (("bfloat16", "cudnn"), ("bfloat16", "xla"), ("float32", "xla"))
FEW: Row = {"preset": "llama2-7b", "scan_layers": False}


def formula_bytes(dtype: str, attention: str, tokens: int = 2048, width: int = 4096, heads: int = 32) -> float:
    """The bytes that Korthikanti et al. 2022 count for a layer (equation 1), for values of a width of their own.

    For 2 bytes it is s b h (34 + 5 a s / h). Dropout's masks have 1 byte whatever the width is: 2 of the 34 and 1 of the 5.
    Without attention's core for fused attention, which saves no scores.
    """
    size = {"bfloat16": 2, "float32": 4}[dtype]
    scores = 0 if attention == "cudnn" else (2 * size + 1) * heads * tokens / width
    return tokens * width * (16 * size + 2 + scores)


@claim(
    "One layer, and a whole 7B model",
    [
        *(one for dtype, kind in KINDS for one in grid("memory", **FEW, num_layers=(2, 3), attention=kind, dtype=dtype)),
        *(step(preset="llama2-7b", param_dtype=d, dtype=d, attention="xla") for d in ("float32", "bfloat16")),
    ],
    *("total_bytes", "argument_bytes"),
)
def one_layer(rows: Sequence[Row]) -> Found:
    """What a third layer adds beside its parameters and their optimizer state, and the whole model."""
    layers = {"compiled": [], "the paper's formula": []}
    for dtype, kind in KINDS:
        pair, name = where(rows, what="memory", dtype=dtype, attention=kind), f"{dtype}\n{ATTENTION[kind]}"
        two, three = ((row["total_bytes"] - row["argument_bytes"]) / 1e6 for row in pair)
        layers["compiled"].append((name, three - two))
        layers["the paper's formula"].append((name, formula_bytes(dtype, kind) / 1e6))
    state, total = (
        {row["param_dtype"]: row[field] / 1e9 for row in where(rows, what="step")}
        for field in ("argument_bytes", "total_bytes")
    )
    whole = {
        "parameters and state": [*state.items()],
        "the rest": [(name, total[name] - size) for name, size in state.items()],
    }
    sizes = [size for _, size in layers["compiled"]]
    models = f"the whole model {total['float32']:,.0f} GB in float32, {total['bfloat16']:,.0f} in bfloat16"
    return f"{min(sizes):,.0f} to {max(sizes):,.0f} MB a layer; {models}", (
        Picture("", "a layer more takes, MB", layers, kind="bars"),
        Picture("", "the whole 7B model, GB", whole, kind="stack"),
    )


@claim("Activations and the batch", grid(batch=(1, 4, 8, 16)), "total_bytes", "temp_bytes")
def batch_linear(rows: Sequence[Row]) -> Found:
    """How far the temporaries are from a line through the first and the last batch, and how the total grows."""
    first, four, *_, last = rows
    slope = (last["temp_bytes"] - first["temp_bytes"]) / (last["batch"] - first["batch"])
    off = [row["temp_bytes"] / (first["temp_bytes"] + slope * (row["batch"] - first["batch"])) - 1 for row in rows]
    kinds = {"total": "total_bytes", "temporaries": "temp_bytes"}
    lines = {label: [(row["batch"], gib_of(row, field)) for row in rows] for label, field in kinds.items()}
    grows = f"from {four['batch']} to {last['batch']} the total grows {last['total_bytes'] / four['total_bytes']:.2f} times"
    return f"linear within {percent(max(map(abs, off)))}; {grows}", (Picture("batch", "GiB", lines),)


@claim(
    "Long contexts",
    grid(attention=tuple(ATTENTION), policy=("none", "nothing"), seq_len=(2048, 8192, 32768, 131072), **LLAMA),
    *("total_bytes", "temp_bytes"),
)
def long_context(rows: Sequence[Row]) -> Found:
    """How the temporaries grow with the length at the end, and the longest length that fits."""
    budget, powers, fits = budget_bytes(rows[0]["target"]), [], []
    for attention, kind in ATTENTION.items():
        found = where(rows, policy="nothing", attention=attention)
        *_, less, most = found
        growth = math.log(most["temp_bytes"] / less["temp_bytes"]) / math.log(most["seq_len"] / less["seq_len"])
        powers.append(f"{kind} T^{growth:.2f}")
        fits.append(f"{max([0, *(row['seq_len'] for row in found if row['total_bytes'] <= budget)]):,} {kind}")
    lines = series(rows, lambda row: f"{ATTENTION[row['attention']]}, {row['policy']}", "seq_len", gib_of)
    lines["what fits"] = [(row["seq_len"], budget / 2**30) for row in rows[:4]]
    number = f"under `nothing` {', '.join(powers)}; the longest of these lengths that fits is {', '.join(fits)}"
    return number, (Picture("tokens in the sequence", "GiB", lines, log="xy"),)


@claim(
    "Wide against deep",
    [
        one
        for layers, width in ((48, 384), (27, 512), (12, 768), (3, 1536))  # nearly equal parameters: 12 x width² a layer
        for one in grid(policy=POLICIES, batch=32, vocab_size=4096, num_layers=layers, **_wide(width, width // 64))
    ],
    *("total_bytes", "temp_bytes"),
)
def wide_deep(rows: Sequence[Row]) -> Found:
    """The temporaries of the deepest and the widest model, and what is saved of them at most."""
    deep, wide = (where(rows, num_layers=n) for n in (48, 3))
    of_deep, of_wide = (percent(1 - min(map(gib_of, some)) / gib_of(some[0])) for some in (deep, wide))
    times = deep[0]["temp_bytes"] / wide[0]["temp_bytes"]
    number = f"deep takes {times:.1f} times the temporaries; {of_deep} against {of_wide} saved"
    lines = series(rows, "policy", "num_layers", gib_of)
    return number, (Picture("layers, at equal parameters", "GiB", lines, log="x"),)


#: By the dtypes of the parameters and of the compute, their name.
DTYPES = {("float32", "float32"): "float32", ("float32", "bfloat16"): "mixed", ("bfloat16", "bfloat16"): "all bfloat16"}


@claim(
    "Mixed precision",
    (step(batch=n, param_dtype=params, dtype=dtype, attention="xla") for params, dtype in DTYPES for n in (1, 8, 32)),
    "total_bytes",
)
def precision(rows: Sequence[Row]) -> Found:
    """What is saved against float32 at each batch."""
    lines = series(rows, lambda row: DTYPES[row["param_dtype"], row["dtype"]], "batch", gib_of)
    full, mixed, half = (dict(line) for line in lines.values())
    shares = {batch: 1 - size / full[batch] for batch, size in mixed.items()}
    within = ", ".join(str(batch) for batch, share in shares.items() if 0.3 <= share <= 0.5)
    of_half = span((1 - size / full[batch] for batch, size in half.items()), percent)
    number = f"{span(shares.values(), percent)}, 30 to 50 % at batch {within or '-'}; {of_half} with all in bfloat16"
    return number, (Picture("batch", "GiB", lines),)


@claim(
    "The optimizer's state",
    grid(policy="nothing", batch=8, loss="chunked", optimizer=get_args(Optimizer)),
    *("num_params", "argument_bytes", "temp_bytes"),
)
def optimizers(rows: Sequence[Row]) -> Found:
    """The bytes of the state a parameter, beside its own 4. The batch's tokens are among them, and are negligible."""
    state = ", ".join(f"{row['optimizer']} {row['argument_bytes'] / row['num_params'] - 4:.2f}" for row in rows)
    kinds = {"parameters and state": "argument_bytes", "temporaries": "temp_bytes"}
    bars = {label: [(row["optimizer"], gib_of(row, field)) for row in rows] for label, field in kinds.items()}
    return f"bytes a parameter: {state}", (Picture("", "GiB", bars, kind="stack"),)
