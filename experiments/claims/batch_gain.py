"""Articles: checkpointing allows a batch up to 16 times as large; and whether recomputing ever wins in tokens a second."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size
from experiments.claims.steps import TOY_LARGEST, Step, step
from experiments.claims.words import percent, signed

GPT2, LLAMA = {"preset": "gpt2"}, {"preset": "llama3.2-1b", "loss": "chunked"}
#: By model and layout, the policies.
CASES = (
    (GPT2, True, ("none", "dots+attention", "nothing", "every:4+nothing")),
    (LLAMA, True, ("none", "dots+attention", "nothing")),
)


def steps(size: Size) -> list[Step]:
    """The largest batch of each policy."""
    if size == "tiny":
        return [TOY_LARGEST]
    return [step("largest", policy=p, scan_layers=scan, **model) for model, scan, policies in CASES for p in policies]


def judge(rows: Sequence[Row]) -> Judgement:
    """The largest batch against that of `none`, and the tokens a second of each policy at its own."""
    table = [("model", "layers", "policy", "largest batch", "times `none`", "predicted tokens/s", "against `none`")]
    gains, wins, sentences = [], [], []
    for case in dict.fromkeys((row["preset"], row.get("scan_layers", True)) for row in rows):
        some = [row for row in rows if (row["preset"], row.get("scan_layers", True)) == case]
        base, others = some[0], some[1:]
        layers = "in a loop" if case[1] else "unrolled"
        for row in some:
            gain, rate = row["largest_batch"] / base["largest_batch"], row["tokens_per_s"] / base["tokens_per_s"] - 1
            cells = (str(row["largest_batch"]), f"{gain:.1f}", f"{row['tokens_per_s']:,.0f}", signed(rate))
            table.append((case[0], layers, f"`{row['policy']}`", *cells))
        recomputing = [row for row in others if row["recompute_overhead_percent"] > 1]
        best = max(some, key=lambda row: row["tokens_per_s"])
        largest = max(some, key=lambda row: row["largest_batch"])
        gains.append(largest["largest_batch"] / base["largest_batch"])
        wins += [row for row in recomputing if row["tokens_per_s"] > base["tokens_per_s"]]
        sentences.append(
            f"{case[0]} {layers}: from batch {base['largest_batch']} to {largest['largest_batch']} under "
            f"`{largest['policy']}`. The most tokens a second has `{best['policy']}` at batch {best['largest_batch']}, which "
            f"recomputes {percent(best['recompute_overhead_percent'] / 100)} of the FLOPs."
        )
    ours = f"{min(gains):.1f} to {max(gains):.1f} times the batch; of the policies that recompute, "
    faster = sorted({f"{row['preset']} {'in a loop' if row['scan_layers'] else 'unrolled'}" for row in wins})
    ours += f"some have more tokens a second than `none` for {', '.join(faster)}" if faster else "none is faster than `none`"
    verdict = "refuted" if max(gains) < 15.5 else "holds" if min(gains) >= 15.5 else "holds under conditions"
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Tokens a second over the largest batch."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        label = f"{row['preset']}, {'loop' if row.get('scan_layers', True) else 'unrolled'}"
        series.setdefault(label, []).append((row["largest_batch"], row["tokens_per_s"]))
    return Picture("largest batch", "predicted tokens/s", {label: sorted(some) for label, some in series.items()}, log="x")


CLAIM = Claim(
    name="batch_gain",
    title="A larger batch, and tokens per second at it",
    source="articles",
    says="checkpointing allows a batch up to 16 times as large, and pays for it in time",
    on="gpt2 at 1024 tokens and llama3.2-1b at 2048 with the chunked loss, 0.75 of an H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
