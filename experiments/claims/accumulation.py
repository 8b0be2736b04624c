"""Articles: accumulation and checkpointing together reach a global batch."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, one
from experiments.claims.steps import TOY_LARGEST, Step, step
from experiments.claims.words import gib, percent

GLOBAL_BATCH = 512
POLICIES = ("none", "dots+attention", "nothing")


def steps(size: Size) -> list[Step]:
    """The largest microbatch of each policy that divides the global batch."""
    if size == "tiny":
        return [TOY_LARGEST]
    return [step("largest", policy=policy, global_batch=GLOBAL_BATCH) for policy in POLICIES]


def judge(rows: Sequence[Row]) -> Judgement:
    """The microbatch and the tokens a second of each policy."""
    total = rows[0]["global_batch"]
    table = [("policy", "microbatch", "microbatches", "total", "predicted tokens/s")]
    table += [
        (
            f"`{r['policy']}`",
            str(r["largest_batch"]),
            str(r["accumulate"]),
            gib(r["total_bytes"]),
            f"{r['tokens_per_s']:,.0f}",
        )
        for r in rows
    ]
    none = one(rows, policy="none")
    best = max(rows, key=lambda row: row["tokens_per_s"])
    gain = best["tokens_per_s"] / none["tokens_per_s"] - 1
    sentences = (
        f"Accumulation alone reaches {total} sequences: `none` takes {none['accumulate']} microbatches of "
        f"{none['largest_batch']}.",
        f"The most tokens a second has `{best['policy']}`, in {best['accumulate']} microbatches of {best['largest_batch']}: "
        f"{percent(gain)} more than `none`, by prediction. Time is what checkpointing is for here, not reach, and "
        "in a loop, which slows `none` down most.",
    )
    ours = f"accumulation alone reaches {total}; `{best['policy']}` has {percent(gain)} more tokens/s than `none`"
    verdict = "refuted" if none["largest_batch"] else "holds"  # any microbatch reaches it
    return Judgement(ours, verdict, sentences, tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Tokens a second by policy."""
    points = [(f"{row['policy']}\n{row['accumulate']} x {row['largest_batch']}", row["tokens_per_s"]) for row in rows]
    return Picture("microbatches x sequences", "predicted tokens/s", {"gpt2": points}, kind="bars")


CLAIM = Claim(
    name="accumulation",
    title="Accumulation and checkpointing together",
    source="articles",
    says="gradient accumulation together with checkpointing reaches a global batch that neither reaches alone",
    on="gpt2, 512 sequences of 1024 tokens, in a loop, 0.75 of an H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
