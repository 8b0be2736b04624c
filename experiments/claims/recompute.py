"""Claims about what recomputing saves and what it costs."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from experiments.claims.claim import LAYOUTS, Found, Picture, case_of, claim, gib_of, layout_of, ms_of, series, times_none
from experiments.claims.steps import POLICIES, grid
from experiments.common import Row, only, percent, signed, span, where

#: Models and their batches, in both layouts.
GPT2: Row = {"preset": "gpt2", "batch": 32, "scan_layers": (False, True)}
LLAMA, LARGE = GPT2 | {"preset": "llama3.2-1b", "batch": 4}, GPT2 | {"preset": "llama2-7b", "batch": 1}
#: Narrow layers, many tokens and a small vocabulary, so that most of the memory is activations.
NARROW: Row = {
    **{"embed_dim": 256, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "mlp_dim": 1024, "vocab_size": 1024},
    **{"batch": 32, "dropout": 0.0},
}
ROOT, FIXED = ("none", "every:sqrt", "every:sqrt+nothing"), ("every:5", "every:10", "every:25")


@claim(
    "The square root of the depth",
    grid("memory", policy=(*ROOT, *FIXED, "nothing"), num_layers=(25, 100, 225, 400), **NARROW),
    *("activations", "step_s"),
)
def sqrt_n(rows: Sequence[Row]) -> Found:
    """How the activations at the peak grow with the depth, and what is left of 100 units at 100 layers."""
    lines = series(rows, "policy", "num_layers", partial(gib_of, field="activations"))
    logs = {policy: np.log(np.array(line)) for policy, line in lines.items()}
    grows = {policy: np.polyfit(log[:, 0], log[:, 1], 1)[0] for policy, log in logs.items()}
    none, root, nothing = (only(rows, policy=policy, num_layers=100) for policy in ("none", "every:sqrt", "nothing"))
    units = (
        f"`{row['policy']}` {100 * row['activations'] / none['activations']:.0f} of 100 units, N^{grows[row['policy']]:.2f}"
        for row in (root, nothing)
    )
    number = f"{'; '.join(units)}; `every:sqrt` takes {signed(root['step_s'] / none['step_s'] - 1)} predicted time"
    return number, (Picture("layers", "activations at the peak, GiB", lines, log="xy"),)


@claim(
    "What recomputing costs",
    [
        *(one for model in (GPT2, LLAMA, LARGE) for one in grid(policy=("none", "nothing", "every:4"), **model)),
        *(one for model in (GPT2, LLAMA) for one in grid("plan", policy="nothing", share=1.1, **model)),
    ],
    *("executed_flops", "step_s"),
)
def recompute_cost(rows: Sequence[Row]) -> Found:
    """The FLOPs and the predicted time that recomputing adds. A plan may take 1.1 times the bytes of `nothing`."""
    steps = [{**row, "policy": "plan" if row["what"] == "plan" else row["policy"], "what": "step"} for row in rows]
    more = [row for row in steps if row["policy"] != "none"]
    flops, times = (
        series(more, "policy", case_of, lambda row, field=field: 100 * times_none(steps, field, row) - 100)
        for field in ("executed_flops", "step_s")
    )
    of_flops = ", ".join(f"`{name}` {span((value / 100 for _, value in bars), percent)}" for name, bars in flops.items())
    by_layout = series(where(more, policy="nothing"), layout_of, case_of, partial(times_none, steps, "step_s"))
    of_times = ", ".join(f"{layout} {span((value - 1 for _, value in bars), percent)}" for layout, bars in by_layout.items())
    return f"FLOPs {of_flops}; predicted time under `nothing` {of_times}", (
        Picture("", "% more FLOPs than none", flops, kind="bars"),
        Picture("", "% more predicted time than none", times, kind="bars"),
    )


#: The layer of the 22B model of Korthikanti et al. 2022, table 3: hidden size 6144, 64 heads, 2048 tokens, a microbatch of 4.
LAYER: Row = {
    **{"embed_dim": 6144, "num_heads": 64, "num_kv_heads": 64, "head_dim": 96, "mlp_dim": 24576, "num_layers": 2},
    **{"seq_len": 2048, "max_seq_len": 2048, "batch": 4, "dropout": 0.0},
}
#: What the paper's selective recomputation saves: everything but attention's scores and its softmax.
SELECTIVE = (
    "save:query_proj,key_proj,value_proj,context,out_proj,mlpwi_0,mlp/mul.3,add,attention_norm/convert_element_type.1,"
    "mlp_norm/convert_element_type.1"
)


@claim(
    "One layer of a 22B model",
    [
        *grid("layer", policy=("none", "nothing", SELECTIVE, "dots-no-batch"), attention="xla", **LAYER),
        *grid("layer", policy=("none", "nothing", "dots+attention"), attention="cudnn", **LAYER),
    ],
    *("executed_flops", "step_s"),
)
def korthikanti(rows: Sequence[Row]) -> Found:
    """The predicted time that full and selective recomputation add to two layers."""
    none, *others = (only(rows, policy=policy, attention="xla") for policy in ("none", "nothing", SELECTIVE))
    full, part = (signed(row["step_s"] / none["step_s"] - 1) for row in others)
    flops = " and ".join(signed(row["executed_flops"] / none["executed_flops"] - 1) for row in others)
    bars = series(rows, "attention", lambda row: "selective" if row["policy"] == SELECTIVE else row["policy"], ms_of)
    number = f"full {full}, selective {part} of the predicted time; {flops} of the FLOPs"
    return number, (Picture("policy, by attention", "predicted ms", bars, kind="bars"),)


FORMS, SPACINGS = ("every:{}", "every:{}+nothing", "one-in:{}"), (1, 2, 3, 4, 6, 8, 12)


@claim(
    "A checkpoint every K layers",
    grid(policy=("none", *(form.format(k) for form in FORMS for k in SPACINGS)), **GPT2),
    *("total_bytes", "step_s"),
)
def every_k(rows: Sequence[Row]) -> Found:
    """What `every:K` saves and costs for K = 2 to 4, and which K take at most 3 points more than the fewest bytes."""
    sizes, times, number = {}, {}, []
    for scan, layout in LAYOUTS.items():
        found = {row["policy"]: row for row in where(rows, scan_layers=scan)}
        for form in FORMS:
            points, label = [(k, found[form.format(k)]) for k in SPACINGS], f"{form.format('K')}, {layout}"
            sizes[label], times[label] = ([(k, of(row)) for k, row in points] for of in (gib_of, ms_of))
        less = {k: 1 - times_none(rows, "total_bytes", found[f"every:{k}"]) for k in SPACINGS}
        more = [times_none(rows, "step_s", found[f"every:{k}"]) - 1 for k in (2, 3, 4)]
        near = ", ".join(str(k) for k, share in less.items() if share >= max(less.values()) - 0.03)
        saves = f"{layout} {span((less[k] for k in (2, 3, 4)), percent)} for {span(more, percent)} more time"
        number.append(f"{saves}, nearly the fewest bytes at K = {near}")
    pictures = Picture("K", "GiB", sizes, log="x"), Picture("K", "predicted ms", times, log="x", from_zero=False)
    return f"K = 2 to 4: {'; '.join(number)}", pictures


@claim(
    "Scanned against unrolled layers",
    [*grid(policy=POLICIES, **GPT2), *grid(policy=POLICIES, **LLAMA)],
    *("total_bytes", "step_s"),
)
def layouts(rows: Sequence[Row]) -> Found:
    """What unrolled layers save in bytes and in predicted time."""
    pairs = list(zip(where(rows, scan_layers=False), where(rows, scan_layers=True), strict=True))
    fewer, less = (span((1 - of(one) / of(other) for one, other in pairs), percent) for of in (gib_of, ms_of))
    sizes, times = (series(rows, layout_of, lambda row: f"{row['preset']}\n{row['policy']}", of) for of in (gib_of, ms_of))
    return f"unrolled layers take {fewer} fewer bytes and {less} less predicted time", (
        Picture("", "GiB", sizes, kind="bars"),
        Picture("", "predicted ms", times, kind="bars"),
    )
