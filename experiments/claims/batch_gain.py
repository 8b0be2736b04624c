"""Articles: checkpointing allows a batch up to 16 times as large; and whether recomputing ever wins in tokens a second."""

from collections.abc import Sequence
from typing import Any

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, Verdict
from experiments.claims.steps import LLAMA, TOY_LARGEST, Step, step
from experiments.claims.words import LAYOUTS, percent, signed, unless_clear, within_error
from experiments.common import where

GPT2: dict[str, Any] = {"preset": "gpt2"}
#: By model and layout, the policies.
CASES = (
    (GPT2, False, ("none", "dots+attention", "nothing")),
    (LLAMA, False, ("none", "dots+attention", "nothing")),
    (GPT2, True, ("none", "dots+attention", "nothing", "every:4+nothing")),
    (LLAMA, True, ("none", "dots+attention", "nothing")),
)
#: This many times the batch count as 16: a tenth less.
LEAST = 14.4


def steps(size: Size) -> list[Step]:
    """The largest batch of each policy, in both layouts."""
    if size == "tiny":
        return [TOY_LARGEST]
    return [step("largest", policy=p, scan_layers=scan, **model) for model, scan, policies in CASES for p in policies]


def cases(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows by model and layout. The first of each case is that of `none`."""
    names = dict.fromkeys((row["preset"], row["scan_layers"]) for row in rows)
    return [where(rows, preset=model, scan_layers=scan) for model, scan in names]


def judge(rows: Sequence[Row]) -> Judgement:
    """The largest batch against that of `none`, and the tokens a second of each policy at its own."""
    table = [("layers", "model", "policy", "largest batch", "times `none`", "predicted tokens/s", "against `none`")]
    sentences: list[str] = []
    gains: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    fastest: dict[str, list[Row]] = {}
    for of_case in cases(rows):
        base, layout = of_case[0], LAYOUTS[of_case[0]["scan_layers"]]
        for row in of_case:
            gain, rate = row["largest_batch"] / base["largest_batch"], row["tokens_per_s"] / base["tokens_per_s"] - 1
            cells = (str(row["largest_batch"]), f"{gain:.1f}", f"{row['tokens_per_s']:,.0f}", signed(rate))
            table.append((layout, row["preset"], f"`{row['policy']}`", *cells))
            if row["recompute_overhead_percent"] > 1:
                rates.setdefault(layout, []).append(rate)
        in_order = sorted(of_case, key=lambda row: row["tokens_per_s"], reverse=True)
        best, largest = in_order[0], max(of_case, key=lambda row: row["largest_batch"])
        gains.setdefault(layout, []).append(largest["largest_batch"] / base["largest_batch"])
        fastest.setdefault(base["preset"], []).append(best)
        sentences.append(
            f"{base['preset']} {layout}: from batch {base['largest_batch']} to {largest['largest_batch']} under "
            f"`{largest['policy']}`. `{best['policy']}` has the most tokens a second, at batch {best['largest_batch']}. It "
            f"recomputes {percent(best['recompute_overhead_percent'] / 100)} of the FLOPs. "
            + "".join(_fewer(row, best, f"`{row['policy']}`") for row in in_order[1:2])
        )
    spread = ", ".join(f"{layout} by {signed(min(of))} to {signed(max(of))}" for layout, of in rates.items())
    if rates:
        sentences.append(
            "Each policy at its own largest batch, recomputing changes the tokens a second of `none` "
            + ", and ".join(
                f"{layout} by {signed(min(of))} to {signed(max(of))}{unless_clear(of, rows[0])}"
                for layout, of in rates.items()
            )
            + "."
        )
    for model, of_layouts in fastest.items():
        if len(of_layouts) == len(LAYOUTS):
            best, other = sorted(of_layouts, key=lambda row: row["tokens_per_s"], reverse=True)
            sentences.append(
                f"Of all, {model} has the most tokens a second {LAYOUTS[best['scan_layers']]} under `{best['policy']}`, "
                f"{best['tokens_per_s']:,.0f} at batch {best['largest_batch']}. "
                + _fewer(other, best, f"The best {LAYOUTS[other['scan_layers']]}")
            )
    times = ", ".join(f"{min(of):.1f} to {max(of):.1f} {layout}" for layout, of in gains.items())
    ours = f"{times}, times the batch of `none` in that layout"
    ours += f"; recomputing changes the tokens/s at it {spread}" if rates else ""
    changes = [rate for of in rates.values() for rate in of]
    pays = [rate for rate in changes if rate < 0 and not within_error(rate, rows[0])]
    every_gain = [gain for of in gains.values() for gain in of]
    if max(every_gain) < LEAST:
        verdict: Verdict = "refuted"
    else:
        verdict = "holds" if min(every_gain) >= LEAST and len(pays) == len(changes) else "holds under conditions"
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def _fewer(row: Row, base: Row, named: str) -> str:
    """How many fewer tokens a second a row has than another, and whether that is within the error of predictions."""
    fewer = 1 - row["tokens_per_s"] / base["tokens_per_s"]
    return f"{named} has {100 * fewer:.1f} % fewer{unless_clear([fewer], row)}."


def picture(rows: Sequence[Row]) -> tuple[Picture, ...]:
    """The largest batch of each policy, and its tokens a second, against those of `none`."""
    batches: dict[str, list[tuple[str, float]]] = {}
    rates: dict[str, list[tuple[str, float]]] = {}
    for of_case in cases(rows):
        base, name = of_case[0], f"{of_case[0]['preset']}\n{LAYOUTS[of_case[0]['scan_layers']]}"
        for row in of_case:
            batches.setdefault(row["policy"], []).append((name, row["largest_batch"] / base["largest_batch"]))
            rates.setdefault(row["policy"], []).append((name, row["tokens_per_s"] / base["tokens_per_s"]))
    return (
        Picture("", "largest batch, times that of none", batches, kind="bars"),
        Picture("", "predicted tokens/s, times those of none", rates, kind="bars"),
    )


CLAIM = Claim(
    name="batch_gain",
    title="A larger batch, and tokens per second at it",
    source="articles",
    says="checkpointing allows a batch up to 16 times as large, and pays for it in time",
    on="gpt2 at 1024 tokens and llama3.2-1b at 2048 with the chunked loss, in both layouts, 0.75 of the GPU's memory",
    steps=steps,
    judge=judge,
    picture=picture,
)
