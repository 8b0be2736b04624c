"""Articles: the activations of one large layer, and a 7B model beyond 100 GB in one pass."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size
from experiments.claims.steps import TOY_MEMORY, Step, step
from experiments.claims.words import ATTENTION
from experiments.common import where

#: The dtype of the compute and the attention.
KINDS = (("bfloat16", "cudnn"), ("bfloat16", "xla"), ("float32", "xla"))
WIDTHS = {"bfloat16": 2, "float32": 4}
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
    """The bytes that Korthikanti et al. 2022 count for a layer (equation 1), for values of a width of their own.

    For 2 bytes it is s b h (34 + 5 a s / h). Dropout's masks have 1 byte whatever the width is: 2 of the 34 and 1 of the 5.
    Without attention's core for fused attention, which keeps no scores.
    """
    scores = 0 if attention == "cudnn" else (2 * width_bytes + 1) * HEADS * TOKENS / WIDTH
    return TOKENS * WIDTH * (16 * width_bytes + 2 + scores)


def added_bytes(less: Row, more: Row) -> int:
    """What a layer more adds to a step's bytes, without its parameters and their optimizer state.

    Bytes by source would miss plain attention's scores, which may count as workspace.
    """
    added = {name: more[name] - less[name] for name in ("total_bytes", "argument_bytes")}
    return added["total_bytes"] - added["argument_bytes"]


def judge(rows: Sequence[Row]) -> Judgement:
    """What the third layer adds, and the bytes of the whole model's step."""
    table = [("compute", "attention", "what", "compiled", "the paper's formula")]
    layers = {}
    for dtype, attention in KINDS:
        pair = where(rows, what="memory", dtype=dtype, attention=attention)
        if len(pair) == 2:
            layers[dtype, attention] = added_bytes(*pair)
            formula = formula_bytes(attention, WIDTHS[dtype])
            sizes = (f"{layers[dtype, attention] / 1e6:,.0f} MB", f"{formula / 1e6:,.0f} MB")
            table.append((dtype, ATTENTION[attention], "a layer more, beside its state", *sizes))
    parts, totals = [], {}
    for row in where(rows, what="step"):
        totals[row["param_dtype"]] = row["total_bytes"] / 1e9
        table.append((f"all {row['param_dtype']}", "plain", "the whole model", f"{row['total_bytes'] / 1e9:,.0f} GB", "-"))
        parts.append(
            f"A step of the whole model on one sequence takes {row['total_bytes'] / 1e9:,.0f} GB with everything in "
            f"{row['param_dtype']}, {row['argument_bytes'] / 1e9:,.0f} GB of which are parameters and Adam's state."
        )
    one_row = 2 * TOKENS * WIDTH / 1e6
    low, high = min(layers.values()) / 1e6, max(layers.values()) / 1e6
    sentences = [
        f"One array of {TOKENS} x {WIDTH} takes {one_row:.0f} MB in bfloat16, and a layer keeps many. A third layer adds "
        f"{low:,.0f} to {high:,.0f} MB to the total, by dtype and attention, beside its parameters and their state. In bfloat16 "
        "copies of its weights may be among them.",
        "The formula is for a GPT layer with dropout; this one is a Llama layer, with a gate in its MLP and without dropout. The "
        "paper has it for 16 bits. Here dropout's masks keep 1 byte in float32.",
        *parts,
    ]
    if totals:
        sentences.append("The whole model is in a loop, which takes more bytes under `none` than unrolled layers.")
    ours = f"{low:,.0f} to {high:,.0f} MB a layer"
    if totals:
        ours += f"; the whole model {totals['float32']:,.0f} GB in float32, {totals['bfloat16']:,.0f} in bfloat16"
    over = [total > 100 for total in totals.values()]
    verdict = "holds" if over and all(over) else "holds under conditions" if any(over) else "refuted"
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def picture(rows: Sequence[Row]) -> tuple[Picture, ...]:
    """What a layer more takes beside the paper's formula, and the whole model."""
    layers: dict[str, list[tuple[str, float]]] = {"compiled": [], "the paper's formula": []}
    for dtype, attention in KINDS:
        pair = where(rows, what="memory", dtype=dtype, attention=attention)
        if len(pair) == 2:
            name = f"{dtype}\n{ATTENTION[attention]}"
            layers["compiled"].append((name, added_bytes(*pair) / 1e6))
            layers["the paper's formula"].append((name, formula_bytes(attention, WIDTHS[dtype]) / 1e6))
    pictures = [Picture("", "a layer more takes, MB", layers, kind="bars")]
    if whole := where(rows, what="step"):
        kinds = {
            "parameters and state": [(row["param_dtype"], row["argument_bytes"] / 1e9) for row in whole],
            "the rest": [(row["param_dtype"], (row["total_bytes"] - row["argument_bytes"]) / 1e9) for row in whole],
        }
        pictures.append(Picture("", "the whole 7B model, GB", kinds, kind="stack"))
    return tuple(pictures)


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
