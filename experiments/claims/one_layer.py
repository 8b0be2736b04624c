"""Articles: the activations of one large layer, and a 7B model beyond 100 GB in one pass."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, some
from experiments.claims.steps import TOY_MEMORY, Step, step

#: The dtype of the compute and the attention.
KINDS = (("bfloat16", "cudnn"), ("bfloat16", "xla"), ("float32", "xla"))
NAMES = {"cudnn": "fused", "xla": "plain"}
TOKENS, WIDTH, HEADS = 2048, 4096, 32


def steps(size: Size) -> list[Step]:
    """Two and three layers of a 7B model, unrolled; and the whole model, in a loop."""
    if size == "tiny":
        return [step("memory", num_layers=n, **TOY_MEMORY) for n in (4, 9)]
    few = [
        step("memory", preset="llama2-7b", num_layers=n, attention=attention, dtype=dtype, scan_layers=False)
        for dtype, attention in KINDS
        for n in (2, 3)
    ]
    whole = [step(preset="llama2-7b", param_dtype=dtype, dtype=dtype, attention="xla") for dtype in ("float32", "bfloat16")]
    return [*few, *whole]


def formula_bytes(attention: str, width_bytes: int) -> float:
    """The bytes that Korthikanti et al. 2022 count for a layer (equation 2), for 2-byte activations, times their width over 2.

    Without attention's core for fused attention, which keeps no scores.
    """
    scores = 0 if attention == "cudnn" else 5 * HEADS * TOKENS / WIDTH
    return TOKENS * WIDTH * (34 + scores) * width_bytes / 2


def added_bytes(less: Row, more: Row) -> int:
    """What a layer more adds to a step's bytes, without its parameters and their optimizer state.

    Bytes by source would miss plain attention's scores, which may count as workspace.
    """
    added = {name: more[name] - less[name] for name in ("total_bytes", "argument_bytes")}
    return added["total_bytes"] - added["argument_bytes"]


def judge(rows: Sequence[Row]) -> Judgement:
    """What the third layer adds, and the bytes of the whole model's step."""
    table = [("compute", "attention", "a layer more takes, beside its state", "the paper's formula")]
    layers = {}
    for dtype, attention in KINDS:
        pair = some(rows, what="memory", dtype=dtype, attention=attention)
        if len(pair) == 2:
            layers[dtype, attention] = added_bytes(*pair)
            formula = formula_bytes(attention, 2 if dtype == "bfloat16" else 4)
            table.append((dtype, NAMES[attention], f"{layers[dtype, attention] / 1e6:,.0f} MB", f"{formula / 1e6:,.0f} MB"))
    parts, totals = [], {}
    for row in some(rows, what="step"):
        totals[row["param_dtype"]] = row["total_bytes"] / 1e9
        table.append((f"all {row['param_dtype']}", "plain", "the whole 7B model:", f"{row['total_bytes'] / 1e9:,.0f} GB"))
        parts.append(
            f"A step of the whole model on one sequence takes {row['total_bytes'] / 1e9:,.0f} GB with everything in "
            f"{row['param_dtype']}, {row['argument_bytes'] / 1e9:,.0f} GB of which are parameters and Adam's state."
        )
    one_row = 2 * TOKENS * WIDTH / 1e6
    low, high = min(layers.values()) / 1e6, max(layers.values()) / 1e6
    sentences = [
        f"One value of a token's width over the sequence takes {one_row:.0f} MB in bfloat16, and a layer saves many: "
        f"{low:,.0f} to {high:,.0f} MB, by dtype and attention. That is what a third layer "
        "adds to the total beside its parameters and their state.",
        "The formula is for a GPT layer with dropout; this one is a Llama layer, with a gate in its MLP and without dropout.",
        *parts,
    ]
    ours = f"{low:,.0f} to {high:,.0f} MB a layer"
    if totals:
        ours += f"; the whole model {totals['float32']:,.0f} GB in float32, {totals['bfloat16']:,.0f} in bfloat16"
    over = [total > 100 for total in totals.values()]
    verdict = "holds" if over and all(over) else "holds under conditions" if any(over) else "refuted"
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Activations of a layer, by dtype and attention."""
    points = []
    for dtype, attention in KINDS:
        pair = some(rows, what="memory", dtype=dtype, attention=attention)
        if len(pair) == 2:
            points.append((f"{dtype}, {NAMES[attention]}", added_bytes(*pair) / 1e6))
    return Picture("", "a layer more takes, MB", {"llama2-7b": points}, kind="bars")


CLAIM = Claim(
    name="one_layer",
    title="One layer, and a whole 7B model",
    source="articles; Korthikanti et al. 2022 for the formula",
    says="a layer of width 4096 keeps hundreds of MB for a sequence of 2048 tokens, and a 7B model takes beyond 100 GB in one "
    "pass",
    on="llama2-7b, one sequence of 2048 tokens under `none`, adamw, H100; a layer unrolled, the whole model in a loop",
    steps=steps,
    judge=judge,
    picture=picture,
)
