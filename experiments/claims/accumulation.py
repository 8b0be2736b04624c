"""Articles: accumulation and checkpointing together reach a global batch."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, Verdict
from experiments.claims.steps import LLAMA, TOY_LARGEST, Step, step
from experiments.claims.words import gib, percent, within_error
from experiments.common import only, where

GLOBAL_BATCH = 512
POLICIES = ("none", "dots+attention", "nothing")
#: One sequence of this length doesn't fit under `none`. The rows are those of the claim about long contexts, too.
LONG = 131072


def steps(size: Size) -> list[Step]:
    """The largest microbatch of each policy that divides the global batch, and one long sequence."""
    if size == "tiny":
        return [TOY_LARGEST]
    largest = [step("largest", policy=policy, global_batch=GLOBAL_BATCH) for policy in POLICIES]
    return [*largest, *(step(policy=p, attention="cudnn", seq_len=LONG, **LLAMA) for p in ("none", "nothing"))]


def judge(rows: Sequence[Row]) -> Judgement:
    """Where accumulation alone reaches the global batch, where checkpointing alone does, and where it takes both."""
    searched, long = where(rows, what="largest"), where(rows, what="step")
    total, budget = searched[0]["global_batch"], searched[0]["budget_bytes"]
    table = [("model", "policy", "microbatch", "microbatches", "total", "predicted tokens/s")]
    for r in searched:
        of_policy = (r["preset"], f"`{r['policy']}`", str(r["largest_batch"]))
        if r["largest_batch"]:
            table.append((*of_policy, str(r["accumulate"]), gib(r["total_bytes"]), f"{r['tokens_per_s']:,.0f}"))
        else:
            table.append((*of_policy, "-", "-", "-"))
    for r in long:
        said = "1, fits" if r["total_bytes"] <= budget else "1, too large"
        cells = (gib(r["total_bytes"]), f"{r['tokens_per_s']:,.0f}")
        table.append((f"{r['preset']} at {r['seq_len']:,} tokens", f"`{r['policy']}`", said, "-", *cells))

    fitting = [row for row in searched if row["largest_batch"]]
    needs_both, sentences, ours = [], [], []
    none = only(searched, policy="none")
    if none["largest_batch"]:
        best = max(fitting, key=lambda row: row["tokens_per_s"])
        gain = best["tokens_per_s"] / none["tokens_per_s"] - 1
        ours.append(
            f"accumulation alone reaches {total}; in a loop `{best['policy']}` has {percent(gain)} more tokens/s than `none`"
        )
        sentences += [
            f"{none['preset']}: accumulation alone reaches {total} sequences. `none` takes {none['accumulate']} microbatches of "
            f"{none['largest_batch']}.",
            f"`{best['policy']}` has the most tokens a second, in {best['accumulate']} microbatches of {best['largest_batch']}: "
            f"{percent(gain)} more than `none`, by prediction{', within its error' if within_error(gain, none) else ''}. That is "
            "in a loop, which slows `none` down most: unrolled, `none` may be the fastest, as the section on layouts shows.",
        ]
        needs_both.append(False)
    elif fitting:
        # Both are needed unless a policy takes all sequences in one microbatch.
        needs_both.append(all(row["accumulate"] > 1 for row in fitting))
        ours.append(f"`none` fits no microbatch, and others reach {total}")
        sentences.append(
            f"{none['preset']}: under `none` not even one sequence fits, and accumulation alone reaches nothing."
        )
    if long:
        plain, nothing = (only(long, policy=policy) for policy in ("none", "nothing"))
        gradients = 4 * nothing["num_params"]  # what accumulation adds, in float32
        on = f"{plain['preset']} at {plain['seq_len']:,} tokens"
        both = plain["total_bytes"] > budget >= nothing["total_bytes"] + gradients
        needs_both.append(both)
        sizes = (
            f"one sequence takes {gib(plain['total_bytes'])} under `none` and {gib(nothing['total_bytes'])} under `nothing`"
        )
        sentences.append(
            f"{on}: {sizes}, of {gib(budget)}. "
            + (
                f"Without checkpointing no number of microbatches fits. With it, {gib(gradients)} for accumulated gradients fit "
                "as well, at 4 bytes a parameter. So accumulation reaches any number of sequences."
                if both
                else "So it doesn't take both."
            )
        )
        ours.append(
            f"for {on} {'it takes both, since under `none` not one sequence fits' if both else 'it does not take both'}"
        )
    if needs_both and all(needs_both):
        verdict: Verdict = "holds"
    else:
        verdict = "holds under conditions" if any(needs_both) else "refuted"
    return Judgement("; ".join(ours) or "no policy fits one sequence", verdict, tuple(sentences), tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Tokens a second by policy, of those that fit."""
    fitting = [row for row in where(rows, what="largest") if row["largest_batch"]]
    points = [(f"{row['policy']}\n{row['accumulate']} x {row['largest_batch']}", row["tokens_per_s"]) for row in fitting]
    return Picture("microbatches x sequences", "predicted tokens/s", {rows[0]["preset"]: points}, kind="bars")


CLAIM = Claim(
    name="accumulation",
    title="Accumulation and checkpointing together",
    source="articles",
    says="gradient accumulation together with checkpointing reaches a global batch that neither reaches alone",
    on="gpt2, 512 sequences of 1024 tokens, and llama3.2-1b, one of 131,072 with fused attention and the chunked loss, in a "
    "loop, 0.75 of an H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
