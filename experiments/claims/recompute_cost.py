"""Articles: checkpointing costs a third more compute, and 28 % with better segment boundaries."""

from collections.abc import Sequence

from experiments.claims import layouts
from experiments.claims.claim import Claim, Judgement, Picture, Row, Size
from experiments.claims.steps import TOY, Step, step
from experiments.claims.words import LAYOUTS, gib, more_flops, percent, saved, signed, slower, spans, within_error
from experiments.common import only

#: By model, the batch. The rows of the models that are planned are those of the claim about layouts, too.
PLANNED = layouts.BATCHES
BATCHES = {**PLANNED, "llama2-7b": 1}
POLICIES = ("none", "nothing", "every:4")
#: The bytes of `nothing`, times this, are what the planner may take.
SHARE = 1.1
#: A share of the FLOPs is the one that articles say if it is no farther off.
NEAR = 0.03


def steps(size: Size) -> list[Step]:
    """In both layouts, each model under each policy, and its plan within little more than the fewest bytes."""
    if size == "tiny":
        return [step(policy=p, **TOY) for p in ("none", "nothing")]
    cases = [(scan, model, batch) for scan in LAYOUTS for model, batch in BATCHES.items()]
    named = [step(preset=m, policy=p, batch=b, scan_layers=scan) for scan, m, b in cases for p in POLICIES]
    planned = [
        step("plan", preset=m, policy="nothing", batch=b, scan_layers=scan, share=SHARE)
        for scan, m, b in cases
        if m in PLANNED
    ]
    return [*named, *planned]


def name_of(row: Row) -> str:
    """The policy, or `plan`."""
    return "plan" if row["what"] == "plan" else row["policy"]


def base_of(rows: Sequence[Row], row: Row) -> Row:
    """The same model in the same layout under `none`."""
    return only(rows, preset=row["preset"], scan_layers=row["scan_layers"], policy="none")


def judge(rows: Sequence[Row]) -> Judgement:
    """The FLOPs and the predicted time that recomputing adds."""
    models = list(dict.fromkeys(row["preset"] for row in rows))
    rows = [row for row in rows if row["what"] != "plan" or row["planned"]]
    rows.sort(key=lambda row: (row["scan_layers"], models.index(row["preset"])))
    table = [("layers", "model", "policy", "bytes", "saved", "more FLOPs", "more time")]
    flops: dict[str, list[float]] = {}
    times: dict[tuple[bool, str], list[float]] = {}
    for row in rows:
        base = base_of(rows, row)
        more, longer = more_flops(row, base), slower(row, base)
        flops.setdefault(name_of(row), []).append(more)
        times.setdefault((row["scan_layers"], name_of(row)), []).append(longer)
        policy = "the plan" if name_of(row) == "plan" else f"`{row['policy']}`"
        cells = (gib(row["total_bytes"]), percent(saved(row, base)), signed(more), signed(longer))
        table.append((LAYOUTS[row["scan_layers"]], row["preset"], policy, *cells))
    groups, alone = flops.get("every:4", []), flops["nothing"]
    sentences = [
        f"A checkpoint for each layer, `nothing`, adds {spans(alone)} of the FLOPs. The loss over the vocabulary "
        "isn't run again, and a layer's last matmul neither, since no gradient needs its result.",
    ]
    for scan, layout in LAYOUTS.items():
        if (scan, "nothing") not in times:
            continue
        undecided = [more for more in times[scan, "nothing"] if within_error(more, rows[0])]
        sentences.append(
            f"{layout.capitalize()}, `nothing` changes the predicted time of `none` by {spans(times[scan, 'nothing'])}"
            + (": the loop's copies of what `none` saves can cost more than running the layers again" if scan else "")
            + f". The change is within the error of predictions for {len(undecided) or 'none'} of "
            f"{len(times[scan, 'nothing'])} models."
        )
    if groups:
        fewer = [more - less for more, less in zip(groups, alone, strict=True)]
        sentences.append(
            f"A checkpoint for four layers, `every:4`, adds {spans(groups)}: within a group each layer's last matmul is run "
            f"again, for the next layer. So a boundary after each layer saves {spans(fewer, 'points')} of the "
            "FLOPs of `none`."
        )
        longer = (
            f"{spans(times[scan, 'every:4'])} {layout}" for scan, layout in LAYOUTS.items() if (scan, "every:4") in times
        )
        sentences.append(f"It changes the predicted time of `none` by {' and by '.join(longer)}.")
    if "plan" in flops:
        in_time = (f"{spans(times[scan, 'plan'])} {layout}" for scan, layout in LAYOUTS.items() if (scan, "plan") in times)
        sentences.append(
            f"Within {SHARE} times the bytes of `nothing` a plan adds {spans(flops['plan'])}, and changes the predicted time of "
            f"`none` by {' and by '.join(in_time)}."
        )
    ours = f"{spans(groups)} with groups of four layers; " if groups else ""
    ours += f"{spans(alone)} with a checkpoint for each"
    ours += f"; {spans(flops['plan'])} as planned" if "plan" in flops else ""
    said = [(more, 0.33) for more in groups] + [(more, 0.28) for more in alone]
    near = [more for more, theirs in said if abs(more - theirs) <= NEAR]
    if groups:
        of_groups, of_layers = ([more for more in found if more in near] for found in (groups, alone))
        sentences.append(
            f"Within {100 * NEAR:.0f} points of 33 % are {len(of_groups)} of {len(groups)} cases with `every:4`, and of 28 % "
            f"{len(of_layers)} of {len(alone)} with `nothing`, taken as the better boundaries. The smaller the share of the "
            "vocabulary in a model, the nearer it is."
        )
    verdict = "holds" if near and len(near) == len(said) else "holds under conditions" if near else "refuted"
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def picture(rows: Sequence[Row]) -> tuple[Picture, ...]:
    """FLOPs and predicted time that are added, by model and policy."""
    flops: dict[str, list[tuple[str, float]]] = {}
    times: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        if name_of(row) != "none" and row.get("planned", True):
            base, name = base_of(rows, row), f"{row['preset']}\n{LAYOUTS[row['scan_layers']]}"
            flops.setdefault(name_of(row), []).append((name, 100 * more_flops(row, base)))
            times.setdefault(name_of(row), []).append((name, 100 * slower(row, base)))
    return (
        Picture("", "% more FLOPs than none", flops, kind="bars"),
        Picture("", "% more predicted time than none", times, kind="bars"),
    )


CLAIM = Claim(
    name="recompute_cost",
    title="What recomputing costs",
    source="articles",
    says="checkpointing adds 33 % of compute, and with better segment boundaries 28 %",
    on="gpt2 at batch 32 of 1024 tokens, llama3.2-1b at 4 of 2048 and llama2-7b at 1 of 2048, in both layouts, H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
