"""Our own: layers in a loop against unrolled layers."""

from collections.abc import Iterable, Sequence
from typing import Any

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, Verdict
from experiments.claims.steps import TOY, Step, step
from experiments.claims.words import gib, ms, percent, saved, slower, spans, within_error
from experiments.common import only

#: Unrolled layers may take this share more bytes, and still count as taking no more.
TOLERANCE = 0.01
#: By model, the batch. The rows of gpt2 under `none` are those of the claim about every K layers, too.
BATCHES = {"gpt2": 32, "llama3.2-1b": 4}
POLICIES = ("none", "dots+attention", "nothing")


def steps(size: Size) -> list[Step]:
    """Each policy in both layouts."""
    if size == "tiny":
        unrolled: dict[str, Any] = TOY | {"scan_layers": False}
        return [step(**TOY), step(**unrolled)]
    return [
        step(preset=name, policy=policy, batch=batch, scan_layers=scan)
        for name, batch in BATCHES.items()
        for policy in POLICIES
        for scan in (True, False)
    ]


def judge(rows: Sequence[Row]) -> Judgement:
    """What unrolled layers save in bytes and in predicted time."""
    table = [("model", "policy", "in a loop", "unrolled", "in a loop", "unrolled", "bytes less", "time less")]
    bytes_less, time_less = {}, {}
    for row in rows:
        if row["scan_layers"]:
            continue
        loop = only(rows, preset=row["preset"], policy=row["policy"], scan_layers=True)
        case = f"{row['preset']} under `{row['policy']}`"
        bytes_less[case], time_less[case] = saved(row, loop), -slower(row, loop)
        both = (gib(loop["total_bytes"]), gib(row["total_bytes"]), ms(loop["step_s"]), ms(row["step_s"]))
        cells = (row["preset"], f"`{row['policy']}`", *both, percent(bytes_less[case]), percent(time_less[case]))
        table.append(cells)
    most = max(bytes_less, key=lambda case: bytes_less[case])
    least = min(bytes_less, key=lambda case: bytes_less[case])
    undecided = [case for case, less in time_less.items() if within_error(less, rows[0])]
    clear = [less for case, less in time_less.items() if case not in undecided]
    sentences = [
        f"The most bytes are saved by {most}, {percent(bytes_less[most])}, and the fewest by {least}, "
        f"{percent(bytes_less[least])}.",
        "A loop's stacks are written and read again. The more a policy saves, the more time is between the two layouts.",
    ]
    if undecided:
        sentences.append(
            f"The time differs by less than the error of predictions, {percent(rows[0]['predicted_error'])}, for "
            f"{', '.join(undecided)}: a GPU decides that."
        )
    ours = f"unrolled layers take {_fewer(bytes_less.values(), 'fewer bytes')} and {_fewer(time_less.values(), 'less time')}"
    ours += f"; in {len(undecided)} of {len(time_less)} cases the time differs by less than the error" if undecided else ""
    fewer = min(bytes_less.values()) >= -TOLERANCE
    faster = [less for less in clear if less > 0]
    if fewer and not clear:
        verdict: Verdict = "open"
    elif fewer and len(faster) == len(time_less):
        verdict = "holds"
    else:
        verdict = "holds under conditions" if faster else "refuted"
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def _fewer(shares: Iterable[float], what: str) -> str:
    """From how many fewer to how many: `0.5 % more to 35 % fewer bytes`."""
    in_order = sorted(shares)
    low, high = in_order[0], in_order[-1]
    return f"{percent(-low)} more to {percent(high)} {what}" if low < 0 else f"{spans([low, high])} {what}"


def picture(rows: Sequence[Row]) -> tuple[Picture, ...]:
    """Bytes and predicted time in both layouts."""
    sizes: dict[str, list[tuple[str, float]]] = {"in a loop": [], "unrolled": []}
    times: dict[str, list[tuple[str, float]]] = {"in a loop": [], "unrolled": []}
    for row in rows:
        layout, name = "in a loop" if row["scan_layers"] else "unrolled", f"{row['preset']}\n{row['policy']}"
        sizes[layout].append((name, row["total_bytes"] / 2**30))
        times[layout].append((name, 1e3 * row["step_s"]))
    return Picture("", "GiB", sizes, kind="bars"), Picture("", "predicted ms", times, kind="bars")


CLAIM = Claim(
    name="layouts",
    title="Layers in a loop against unrolled layers",
    source="this project",
    says="unrolled layers take no more bytes than layers in a loop, within 1 %, and less time",
    on="gpt2 at batch 32 of 1024 tokens and llama3.2-1b at 4 of 2048, H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
