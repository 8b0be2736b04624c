"""Articles: checkpointing allows a batch up to 16 times as large; and whether recomputing ever wins in tokens a second."""

from collections.abc import Sequence
from typing import Any

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, Verdict, one, some
from experiments.claims.steps import TOY_LARGEST, Step, step
from experiments.claims.words import percent, signed, within_error

GPT2: dict[str, Any] = {"preset": "gpt2"}
LLAMA: dict[str, Any] = {"preset": "llama3.2-1b", "loss": "chunked"}
#: By model, the policies. All run in a loop: a search over unrolled steps takes long.
CASES = (
    (GPT2, ("none", "dots+attention", "nothing", "every:4+nothing")),
    (LLAMA, ("none", "dots+attention", "nothing")),
)
#: gpt2 unrolled, at one batch. The rows are those of the claim about layouts, too.
UNROLLED = 32
#: This many times the batch count as 16.
LEAST = 15.5
#: The batch that `experiments.levers` filed of this case, before matmuls were compiled as calls of cuBLAS.
TRITON_CASE, TRITON_BATCH = {"preset": "llama3.2-1b", "policy": "nothing"}, 143


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
    gains, rates, sentences = [], [], []
    for name in dict.fromkeys(row["preset"] for row in searched):
        of_model = some(searched, preset=name)
        base = of_model[0]
        for row in of_model:
            gain, rate = row["largest_batch"] / base["largest_batch"], row["tokens_per_s"] / base["tokens_per_s"] - 1
            cells = (str(row["largest_batch"]), f"{gain:.1f}", f"{row['tokens_per_s']:,.0f}", signed(rate))
            table.append((name, f"`{row['policy']}`", *cells))
            rates += [rate] if row["recompute_overhead_percent"] > 1 else []
        in_order = sorted(of_model, key=lambda row: row["tokens_per_s"], reverse=True)
        best, largest = in_order[0], max(of_model, key=lambda row: row["largest_batch"])
        gains.append(largest["largest_batch"] / base["largest_batch"])
        sentences.append(
            f"{name}: from batch {base['largest_batch']} to {largest['largest_batch']} under `{largest['policy']}`. The most "
            f"tokens a second has `{best['policy']}` at batch {best['largest_batch']}, which recomputes "
            f"{percent(best['recompute_overhead_percent'] / 100)} of the FLOPs"
            + ". "
            + "".join(_fewer(row, best, f"`{row['policy']}`") for row in in_order[1:2])
        )
    change = f"{signed(min(rates))} to {signed(max(rates))}" if rates else ""
    if rates:
        sentences.append(
            f"In time, in a loop, recomputing changes the tokens a second of `none`, each policy at its largest batch, by "
            f"{change}{_unless(rates, rows[0])}."
        )
    if unrolled:
        none, nothing = (one(unrolled, policy=policy) for policy in ("none", "nothing"))
        looped = max(some(searched, preset="gpt2"), key=lambda row: row["tokens_per_s"])
        sentences.append(
            f"A loop slows `none` down most, since it keeps most. Unrolled at batch {UNROLLED}, gpt2 has "
            f"{none['tokens_per_s']:,.0f} tokens a second under `none`. "
            + _fewer(nothing, none, "Unrolled `nothing` at that batch")
            + " "
            + _fewer(looped, none, "The best policy in a loop, at its largest batch,")
        )
    for row in some(searched, **TRITON_CASE):
        sentences.append(
            "These bytes depend on XLA's kernels for matmuls. Here they are calls of cuBLAS. With Triton's kernels version 0.1.0 "
            f"of this project had found, by `python -m experiments.levers`, a batch of {TRITON_BATCH} for {row['preset']} under "
            f"`{row['policy']}`, where it is {row['largest_batch']} here."
        )
    ours = f"{min(gains):.1f} to {max(gains):.1f} times the batch"
    ours += f"; in a loop recomputing changes the tokens/s at it by {change}" if rates else ""
    pays = [rate for rate in rates if rate < 0 and not within_error(rate, rows[0])]
    if max(gains) < LEAST:
        verdict: Verdict = "refuted"
    else:
        verdict = "holds" if min(gains) >= LEAST and len(pays) == len(rates) else "holds under conditions"
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def _fewer(row: Row, base: Row, named: str) -> str:
    """How many fewer tokens a second a row has than another, and whether that is within the error of predictions."""
    fewer = 1 - row["tokens_per_s"] / base["tokens_per_s"]
    return f"{named} has {percent(fewer)} fewer{_unless([fewer], row)}."


def _unless(shares: Sequence[float], row: Row) -> str:
    """Says so if all differences in time are within the error of predictions."""
    return ", within the error of predictions" if all(within_error(share, row) for share in shares) else ""


def picture(rows: Sequence[Row]) -> Picture:
    """Tokens a second of each policy at its largest batch, against those of `none`."""
    series: dict[str, list[tuple[str, float]]] = {}
    for row in some(rows, what="largest"):
        base = some(rows, what="largest", preset=row["preset"])[0]
        name = f"{row['preset']}\n{row['policy']}\nbatch {row['largest_batch']}"
        series.setdefault(row["preset"], []).append((name, row["tokens_per_s"] / base["tokens_per_s"]))
    # A bar's name has its model, so that none is on another.
    return Picture("", "predicted tokens/s, times those of none", series, kind="stack")


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
