"""Articles: checkpointing costs a third more compute, and 28 % with better segment boundaries."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, one, some
from experiments.claims.steps import TOY, Step, step
from experiments.claims.words import gib, more_flops, percent, saved, signed, slower, spans, within_error

#: By model, the batch: of those under named policies, and of those that are planned.
BATCHES = {"gpt2": 32, "llama3.2-1b": 4, "llama2-7b": 1}
PLANNED = {"gpt2": 32, "llama3.2-1b": 4}
POLICIES = ("none", "nothing", "every:4")
#: The bytes of `nothing`, times this, are what the planner may take.
SHARE = 1.1
#: A share of the FLOPs is the one that articles say if it is no farther off.
NEAR = 0.03


def steps(size: Size) -> list[Step]:
    """Each model under each policy, and its plan within little more than the fewest bytes."""
    if size == "tiny":
        return [step(policy=p, **TOY) for p in ("none", "nothing")]
    named = [step(preset=m, policy=p, batch=b, scan_layers=True) for m, b in BATCHES.items() for p in POLICIES]
    planned = [step("plan", preset=m, policy="nothing", batch=b, scan_layers=True, share=SHARE) for m, b in PLANNED.items()]
    return [*named, *planned]


def name_of(row: Row) -> str:
    """The policy, or `plan`."""
    return "plan" if row["what"] == "plan" else row["policy"]


def judge(rows: Sequence[Row]) -> Judgement:
    """The FLOPs and the predicted time that recomputing adds."""
    table = [("model", "policy", "bytes", "saved", "more FLOPs", "more time")]
    flops: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    for row in rows:
        base = one(rows, preset=row["preset"], policy="none")
        more, longer = more_flops(row, base), slower(row, base)
        flops.setdefault(name_of(row), []).append(more)
        times.setdefault(name_of(row), []).append(longer)
        policy = "the plan" if name_of(row) == "plan" else f"`{row['policy']}`"
        table.append(
            (row["preset"], policy, gib(row["total_bytes"]), percent(saved(row, base)), signed(more), signed(longer))
        )
    groups = flops.get("every:4", [])
    undecided = [more for more in times["nothing"] if within_error(more, rows[0])]
    sentences = [
        f"A checkpoint for each layer, `nothing`, adds {spans(flops['nothing'])} of the FLOPs. The loss over the vocabulary "
        "isn't run again, and a layer's last matmul neither, since no gradient needs its result.",
        f"In a loop it changes the predicted time by {spans(times['nothing'])}: the loop's copies of what `none` saves can cost "
        f"more than running the layers again. The change is within the error of predictions for {len(undecided)} of "
        f"{len(times['nothing'])} models.",
    ]
    if groups:
        fewer = [more - less for more, less in zip(groups, flops["nothing"], strict=True)]
        sentences.append(
            f"A checkpoint for four layers, `every:4`, adds {spans(groups)}: within a group each layer's last matmul is run "
            f"again, for the next layer. So a boundary after each layer saves {spans(fewer, 'points')} of the "
            "FLOPs of `none`."
        )
    if "plan" in flops:
        sentences.append(
            f"Within {SHARE} times the bytes of `nothing` a plan adds {spans(flops['plan'])}, and changes the predicted time of "
            f"`none` by {spans(times['plan'])}."
        )
    ours = f"{spans(groups)} with groups of four layers; " if groups else ""
    ours += f"{spans(flops['nothing'])} with a checkpoint for each"
    ours += f"; {spans(flops['plan'])} as planned" if "plan" in flops else ""
    said = [(more, 0.33) for more in groups] + [(more, 0.28) for more in flops["nothing"]]
    near = [more for more, theirs in said if abs(more - theirs) <= NEAR]
    of_groups, of_layers = ([more for more in found if more in near] for found in (groups, flops["nothing"]))
    if groups:
        sentences.append(
            f"Within {100 * NEAR:.0f} points of 33 % are {len(of_groups)} of {len(groups)} models with `every:4`, and of 28 % "
            f"{len(of_layers)} of {len(flops['nothing'])} with `nothing`, taken as the better boundaries."
        )
    verdict = "holds" if near and len(near) == len(said) else "holds under conditions" if near else "refuted"
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """FLOPs added, by model and policy."""
    series: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        if name_of(row) != "none":
            base = one(some(rows, preset=row["preset"]), policy="none")
            series.setdefault(name_of(row), []).append((row["preset"], 100 * more_flops(row, base)))
    return Picture("", "% more FLOPs than none", series, kind="bars")


CLAIM = Claim(
    name="recompute_cost",
    title="What recomputing costs",
    source="articles",
    says="checkpointing adds 33 % of compute, and with better segment boundaries 28 %",
    on="gpt2 at batch 32 of 1024 tokens, llama3.2-1b at 4 of 2048 and llama2-7b at 1 of 2048, in a loop, H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
