"""Korthikanti et al. 2022, table 4: full and selective recomputation of one layer of a 22B model."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size
from experiments.claims.steps import Step, step
from experiments.claims.words import ATTENTION, gib, more_flops, ms, percent, saved, signed, slower, unless_clear
from experiments.common import only

#: The layer of table 3's 22B model: hidden size 6144, 64 heads, 2048 tokens, a microbatch of 4.
LAYER = {
    **{"embed_dim": 6144, "num_heads": 64, "num_kv_heads": 64, "head_dim": 96, "mlp_dim": 24576, "num_layers": 2},
    **{"seq_len": 2048, "max_seq_len": 2048, "batch": 4, "dropout": 0.0},
}
#: What the paper's selective recomputation keeps: everything but attention's scores and its softmax.
SELECTIVE = (
    "save:query_proj,key_proj,value_proj,context,out_proj,mlpwi_0,mlp/mul.3,add,attention_norm/convert_element_type.1,"
    "mlp_norm/convert_element_type.1"
)
#: By attention, the policies. `dots-no-batch` runs again attention's core and whatever isn't a matmul.
CASES = {"xla": ("none", "nothing", SELECTIVE, "dots-no-batch"), "cudnn": ("none", "nothing", "dots+attention")}
NAMES = {SELECTIVE: "selective"}
#: What the paper's table has: the shares of the time that full and selective recomputation add.
FULL, PART = 0.39, 0.07
#: A share of the time is the paper's if it is no farther off.
NEAR = 0.03


def steps(size: Size) -> list[Step]:
    """Two of the layers, unrolled, their gradients alone."""
    if size == "tiny":
        policies = ("none", "nothing", SELECTIVE)
        return [step("layer", preset="tiny", policy=p, num_layers=1, attention="xla", dropout=0.0) for p in policies]
    return [step("layer", policy=p, attention=kind, **LAYER) for kind, policies in CASES.items() for p in policies]


def named(row: Row) -> str:
    """The policy, or `selective` in place of its names."""
    return NAMES.get(row["policy"], f"`{row['policy']}`")


def judge(rows: Sequence[Row]) -> Judgement:
    """The time and the FLOPs that full and selective recomputation add."""
    table = [("attention", "policy", "bytes", "saved", "predicted", "slower", "more FLOPs")]
    for row in rows:
        base = only(rows, policy="none", attention=row["attention"])
        cells = (gib(row["total_bytes"]), percent(saved(row, base)), ms(row["step_s"]))
        more = (signed(slower(row, base)), signed(more_flops(row, base)))
        table.append((ATTENTION[row["attention"]], named(row), *cells, *more))
    base, nothing, selective = (only(rows, policy=p, attention="xla") for p in ("none", "nothing", SELECTIVE))
    full, part = slower(nothing, base), slower(selective, base)
    sentences = [
        f"Full recomputation, `nothing`, adds {percent(full)} of the predicted time and {percent(more_flops(nothing, base))} of "
        "the FLOPs. A layer's last matmul isn't run again, since no gradient needs its result: that is why it is less than a "
        "third.",
        f"Selective recomputation adds {percent(part)} of the predicted time{unless_clear([part], base)}, and "
        f"{percent(more_flops(selective, base))} of the FLOPs. It saves {percent(saved(selective, base))} of the bytes, against "
        f"{percent(saved(nothing, base))} under `nothing`. It is `{selective['policy'].replace(',', ', ')}`.",
        "The paper's layer is split over 8 A100 by tensor parallelism and has dropout; here it is whole on one H100, without "
        "dropout.",
    ]
    for rule in (row for row in rows if row["policy"] == "dots-no-batch"):
        sentences.append(
            f"The rule `dots-no-batch` runs norms and GELU again as well, and adds {percent(slower(rule, base))} of the time."
        )
    flash = {row["policy"]: row for row in rows if row["attention"] == "cudnn"}
    if flash:
        sentences.append(
            "With fused attention, which keeps no scores, there is nothing left for selective recomputation to save: `none` "
            f"takes {gib(flash['none']['total_bytes'])}, where plain attention takes {gib(selective['total_bytes'])} with it."
        )
    sentences.append(
        f"That selective recomputation costs less than half of full recomputation {'holds' if part < full / 2 else 'fails'} "
        f"here. The paper's {percent(FULL)} contains the all-reduces of 8 GPUs, which aren't here."
    )
    near = abs(full - FULL) <= NEAR and abs(part - PART) <= NEAR
    verdict = "holds" if near else "holds under conditions" if 0 < part < full / 2 else "refuted"
    return Judgement(
        f"full {signed(full)}, selective {signed(part)} of the predicted time", verdict, tuple(sentences), tuple(table)
    )


def picture(rows: Sequence[Row]) -> Picture:
    """Predicted time by policy."""
    series: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        series.setdefault(f"{ATTENTION[row['attention']]} attention", []).append(
            (named(row).strip("`"), 1e3 * row["step_s"])
        )
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
