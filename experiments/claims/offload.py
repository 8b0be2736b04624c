"""Articles: checkpointing against offloading, over the speed of the link to the host."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, Verdict
from experiments.claims.steps import LINKS, TOY, Step, step
from experiments.claims.words import LAYOUTS, gib, ms, spans, unless_clear, within_error
from experiments.common import where

OFFLOADS = ("offload:mlpwi_0", "offload:query_proj,key_proj,value_proj", "minimal_offloaded")


def steps(size: Size) -> list[Step]:
    """Recomputing, and three ways of offloading, in both layouts."""
    if size == "tiny":
        return [step("links", policy=policy, **TOY) for policy in ("nothing", OFFLOADS[0])]
    layouts = ((True, ("nothing", *OFFLOADS)), (False, ("nothing", OFFLOADS[0])))
    return [step("links", policy=p, batch=32, scan_layers=scan) for scan, policies in layouts for p in policies]


def crossing(row: Row, other: Row, slack: float = 0.0) -> float | None:
    """The slowest of the links, in GB/s, with which the step of `row` isn't slower than that of `other`. None for no link.

    With `slack` it may take this share of the time more.
    """
    pairs = zip(LINKS, row["step_s_by_link"], other["step_s_by_link"], strict=True)
    return next((link for link, own, others in pairs if own <= others * (1 + slack)), None)


def between(slowest: float, fastest: float) -> str:
    """The range in which crossovers are that were found at two of the links: from the link before the first to the second."""
    n = LINKS.index(slowest)
    return f"between {LINKS[n - 1]:.0f} and {fastest:.0f} GB/s" if n else f"at {fastest:.0f} GB/s or less"


def judge(rows: Sequence[Row]) -> Judgement:
    """From which link on offloading is as fast as recomputing."""
    own = rows[0]["link_gb_per_s"]
    table = [
        (
            "layers",
            "policy",
            "on the device",
            "on the host",
            f"predicted at {own:.0f} GB/s",
            "as fast as `nothing` from a link",
        )
    ]
    found: list[float | None] = []
    gains, near = [], []
    for scan in dict.fromkeys(row["scan_layers"] for row in rows):
        base, *others = where(rows, scan_layers=scan)
        crossings = [crossing(row, base) for row in others]
        said = ["-", *("no link" if link is None else between(link, link) for link in crossings)]
        for row, link in zip((base, *others), said, strict=True):
            cells = (gib(row["total_bytes"]), gib(row["host_temp_bytes"]), ms(row["step_s"]), link)
            table.append((LAYOUTS[scan], f"`{row['policy']}`", *cells))
        found += crossings
        gains += [1 - row["step_s_by_link"][-1] / base["step_s_by_link"][-1] for row in others]
        near += [link for row in others if (link := crossing(row, base, slack=rows[0]["predicted_error"])) is not None]
    links = sorted(link for link in found if link is not None)
    never = len(found) - len(links)
    sentences = [f"Over this GPU's own link, PCIe 5.0 at {own:.0f} GB/s, "]
    here = [link for link in links if link <= own]
    sentences[0] += (
        f"{len(here) or 'none'} of the {len(found)} ways of offloading {'are' if len(here) > 1 else 'is'} as fast as `nothing`."
    )
    if links:
        sentences.append(
            f"The crossovers are {between(links[0], links[-1])}. The links that were tried are a grid from {LINKS[0]:.0f} to "
            f"{LINKS[-1]:.0f} GB/s, each {LINKS[1] / LINKS[0]:.2f} times the one before, so that a crossover is known to lie "
            "between two of them."
        )
    if near:
        sentences.append(
            f"With the fastest of these links offloading takes {spans(gains)} less time than recomputing"
            f"{unless_clear(gains, rows[0])}. It is within that error of recomputing from a link on that lies "
            f"{between(min(near), max(near))}: a GPU decides where the crossover is, and whether there is one."
        )
    if never:
        sentences.append(
            f"{never} of them {'is' if never == 1 else 'are'} slower with every link up to {LINKS[-1]:.0f} GB/s: "
            "the step waits for copies to the host."
        )
    more = [row for row in rows if row["total_bytes"] > 1.05 * rows[0]["total_bytes"]]
    sentences += [
        f"`{row['policy']}` {LAYOUTS[row['scan_layers']]} takes "
        f"{gib(row['total_bytes'] - rows[0]['total_bytes'])} more on the device than `nothing`, and "
        f"{gib(row['host_temp_bytes'])} of the host: how much is away at a time is XLA's schedule. So it saves nothing "
        "on the device."
        for row in more
    ]
    sentences.append("The schedule is that for this GPU: XLA might schedule otherwise for another link.")
    ours = f"crossovers {between(links[0], links[-1])}" if links else f"no crossover up to {LINKS[-1]:.0f} GB/s"
    ours += f"; PCIe 5.0 has {own:.0f}"
    decided = [gain for gain in gains if gain > 0 and not within_error(gain, rows[0])]
    if not links:
        verdict: Verdict = "refuted"
    elif not decided:
        verdict = "open"
    else:
        verdict = "holds" if links[0] <= own else "holds under conditions"
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Predicted time over the link, times that of recomputing in the same layout."""
    series: dict[str, list[tuple[float, float]]] = {}
    for scan in dict.fromkeys(row["scan_layers"] for row in rows):
        base, *others = where(rows, scan_layers=scan)
        for row in others:
            label = f"{row['policy'].replace(',key_proj,value_proj', ',...')}, {LAYOUTS[scan]}"
            pairs = zip(LINKS, row["step_s_by_link"], base["step_s_by_link"], strict=True)
            series[label] = [(link, own / recomputed) for link, own, recomputed in pairs]
    error = rows[0]["predicted_error"]
    series["the error of predictions"] = [(link, 1 + error) for link in LINKS]
    return Picture("link to the host, GB/s in one direction", "predicted time, times that of nothing", series, log="xy")


CLAIM = Claim(
    name="offload",
    title="Recomputing against offloading",
    source="articles",
    says="recomputing pays where the link to the host is slow, and offloading where it is fast",
    on="gpt2 at batch 32 of 1024 tokens, H100, with links of 8 to 1448 GB/s in place of its own",
    steps=steps,
    judge=judge,
    picture=picture,
)
