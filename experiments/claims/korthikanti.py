"""Korthikanti et al. 2022, table 4: full and selective recomputation of one layer of a 22B model."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, one
from experiments.claims.steps import Step, step
from experiments.claims.words import gib, more_flops, ms, percent, saved, signed, slower

#: The layer of table 3's 22B model: hidden size 6144, 64 heads, 2048 tokens, a microbatch of 4.
LAYER = {
    **{"embed_dim": 6144, "num_heads": 64, "num_kv_heads": 64, "head_dim": 96, "mlp_dim": 24576, "num_layers": 2},
    **{"seq_len": 2048, "max_seq_len": 2048, "batch": 4},
}
#: By attention, the policies. `dots-no-batch` runs attention's core again, and what isn't a matmul.
CASES = {"xla": ("none", "nothing", "dots-no-batch"), "cudnn": ("none", "nothing", "dots-no-batch", "dots+attention")}


def steps(size: Size) -> list[Step]:
    """Two of the layers, unrolled, their gradients alone."""
    if size == "tiny":
        policies = ("none", "nothing", "dots-no-batch")
        return [step("layer", preset="tiny", policy=p, batch=2, num_layers=1, attention="xla") for p in policies]
    return [step("layer", policy=p, attention=kind, **LAYER) for kind, policies in CASES.items() for p in policies]


def judge(rows: Sequence[Row]) -> Judgement:
    """The time and the FLOPs that full and selective recomputation add."""
    table = [("attention", "policy", "bytes", "saved", "predicted", "slower", "more FLOPs")]
    for row in rows:
        base = one(rows, policy="none", attention=row["attention"])
        cells = (gib(row["total_bytes"]), percent(saved(row, base)), ms(row["step_s"]))
        more = (signed(slower(row, base)), signed(more_flops(row, base)))
        table.append((row["attention"], f"`{row['policy']}`", *cells, *more))
    plain = {row["policy"]: row for row in rows if row["attention"] == "xla"}
    full, selective = (slower(plain[policy], plain["none"]) for policy in ("nothing", "dots-no-batch"))
    sentences = [
        "Selective recomputation is `dots-no-batch` here: attention's scores, its softmax and its weighted sum run again, and "
        "so do norms, GELU and dropout, which the paper keeps.",
        f"With attention as in the paper, full recomputation adds {percent(full)} of the predicted time and "
        f"{percent(more_flops(plain['nothing'], plain['none']))} of the FLOPs; selective adds {percent(selective)} and "
        f"{percent(more_flops(plain['dots-no-batch'], plain['none']))}. A layer's last matmul isn't run again, since no "
        "gradient needs its result: that is why full recomputation adds less than a third. The paper splits the layer over 8 "
        "GPUs, and here it is whole on one.",
    ]
    flash = {row["policy"]: row for row in rows if row["attention"] == "cudnn"}
    if flash:
        kept = saved(flash["dots+attention"], flash["none"])
        sentences.append(
            f"With fused attention, which keeps no scores, `dots+attention` runs no matmul and no attention again: it saves "
            f"{percent(kept)} of the bytes for {signed(slower(flash['dots+attention'], flash['none']))} of the time."
        )
    near = abs(full - 0.39) <= 0.12 and abs(selective - 0.07) <= 0.12
    verdict = "holds" if near else "holds under conditions" if 0 < selective < full else "refuted"
    ours = f"full {signed(full)}, selective {signed(selective)} of the predicted time"
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Predicted time by policy."""
    series: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        series.setdefault(f"{row['attention']} attention", []).append((row["policy"], 1e3 * row["step_s"]))
    return Picture("", "predicted ms", series, kind="bars")


CLAIM = Claim(
    name="korthikanti",
    title="One layer of a 22B model",
    source="Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, table 4",
    says="running a layer again whole adds 39 % of its time, and running only attention's core again 7 %",
    on="two layers of that shape, forward and backward, unrolled, a microbatch of 4 of 2048 tokens, one H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
