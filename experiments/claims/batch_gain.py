"""Articles: checkpointing allows a batch up to 16 times as large; and whether recomputing ever wins in tokens a second."""

from collections.abc import Sequence
from typing import Any

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, one, some
from experiments.claims.steps import TOY_LARGEST, Step, step
from experiments.claims.words import percent, signed

GPT2: dict[str, Any] = {"preset": "gpt2"}
LLAMA: dict[str, Any] = {"preset": "llama3.2-1b", "loss": "chunked"}
#: By model, the policies. All run in a loop: a search over unrolled steps takes long.
CASES = (
    (GPT2, ("none", "dots+attention", "nothing", "every:4+nothing")),
    (LLAMA, ("none", "dots+attention", "nothing")),
)
#: gpt2 unrolled, at one batch. The rows are those of the claim about layouts, too.
UNROLLED = 32


def steps(size: Size) -> list[Step]:
    """The largest batch of each policy."""
    if size == "tiny":
        return [TOY_LARGEST]
    largest = [step("largest", policy=p, scan_layers=True, **model) for model, policies in CASES for p in policies]
    return [*largest, *(step(policy=p, batch=UNROLLED, scan_layers=False, **GPT2) for p in ("none", "nothing"))]


def judge(rows: Sequence[Row]) -> Judgement:
    """The largest batch against that of `none`, and the tokens a second of each policy at its own."""
    searched, unrolled = some(rows, what="largest"), some(rows, what="step")
    table = [("model", "policy", "largest batch", "times `none`", "predicted tokens/s", "against `none`")]
    gains, wins, sentences = [], [], []
    for name in dict.fromkeys(row["preset"] for row in searched):
        of_model = some(searched, preset=name)
        base = of_model[0]
        for row in of_model:
            gain, rate = row["largest_batch"] / base["largest_batch"], row["tokens_per_s"] / base["tokens_per_s"] - 1
            cells = (str(row["largest_batch"]), f"{gain:.1f}", f"{row['tokens_per_s']:,.0f}", signed(rate))
            table.append((name, f"`{row['policy']}`", *cells))
        best = max(of_model, key=lambda row: row["tokens_per_s"])
        largest = max(of_model, key=lambda row: row["largest_batch"])
        gains.append(largest["largest_batch"] / base["largest_batch"])
        again = best["recompute_overhead_percent"] / 100
        wins += [name] if again > 0.01 else []
        sentences.append(
            f"{name}: from batch {base['largest_batch']} to {largest['largest_batch']} under `{largest['policy']}`. The most "
            f"tokens a second has `{best['policy']}` at batch {best['largest_batch']}, which recomputes {percent(again)} of the "
            "FLOPs."
        )
    if unrolled:
        none, nothing = (one(unrolled, policy=policy)["tokens_per_s"] for policy in ("none", "nothing"))
        looped = max(row["tokens_per_s"] for row in some(searched, preset="gpt2"))
        sentences.append(
            f"A loop slows `none` down most, since it keeps most. Unrolled, gpt2 has {none:,.0f} tokens a second under `none` at "
            f"batch {UNROLLED}, and {nothing:,.0f} under `nothing`. The best policy in a loop has {looped:,.0f}, at its largest "
            f"batch: with unrolled layers recomputing {'loses' if none > max(looped, nothing) else 'may win'} here."
        )
    ours = f"{min(gains):.1f} to {max(gains):.1f} times the batch; in a loop recomputing has the most tokens/s for "
    ours += ", ".join(wins) if wins else "no model"
    verdict = "refuted" if max(gains) < 15.5 else "holds" if min(gains) >= 15.5 else "holds under conditions"
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Tokens a second over the largest batch."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in some(rows, what="largest"):
        series.setdefault(row["preset"], []).append((row["largest_batch"], row["tokens_per_s"]))
    in_order = {label: sorted(points) for label, points in series.items()}
    return Picture("largest batch", "predicted tokens/s", in_order, ticks=False)


CLAIM = Claim(
    name="batch_gain",
    title="A larger batch, and tokens per second at it",
    source="articles",
    says="checkpointing allows a batch up to 16 times as large, and pays for it in time",
    on="gpt2 at 1024 tokens and llama3.2-1b at 2048 with the chunked loss, in a loop, 0.75 of an H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
