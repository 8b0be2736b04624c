"""Claims about what to choose: a batch, what to save, offloading, microbatches, and groups of samples."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.claims.claim import LAYOUTS, Found, Picture, case_of, claim, gib_of, layout_of, ms_of, series, times_none
from experiments.claims.steps import LINKS, LLAMA, POLICIES, grid, step
from experiments.common import Row, only, percent, span, where
from jaxremat.chips.nvidia.calibration import load_calibration
from jaxremat.model.flops import model_flops
from jaxremat.model.presets import preset
from jaxremat.search.buckets import Bucketed, granularity, make_buckets
from jaxremat.search.histogram import read_histogram


@claim(
    "A larger batch, and tokens per second at it",
    [
        *grid("largest", policy=POLICIES, scan_layers=(False, True)),
        *grid("largest", policy=POLICIES, scan_layers=(False, True), **LLAMA),
        step("largest", policy="every:4+nothing", scan_layers=True),
    ],
    *("largest_batch", "tokens_per_s"),
)
def batch_gain(rows: Sequence[Row]) -> Found:
    """The largest batch of each policy that recomputes, and the tokens a second at it, against those of `none`."""
    recomputing, number = [row for row in rows if "nothing" in row["policy"]], []
    batches, rates = (partial(times_none, rows, field) for field in ("largest_batch", "tokens_per_s"))
    for scan, layout in LAYOUTS.items():
        found = where(recomputing, scan_layers=scan)
        times = sorted(map(batches, found))
        changes = span((rates(row) - 1 for row in found), percent)
        number.append(f"{layout} {times[0]:.1f} to {times[-1]:.1f} times the batch of `none`, tokens/s by {changes}")
    return "; ".join(number), (
        Picture("", "largest batch, times that of none", series(rows, "policy", case_of, batches), kind="bars"),
        Picture("", "predicted tokens/s, times those of none", series(rows, "policy", case_of, rates), kind="bars"),
    )


#: Policies that follow one rule, whatever a value costs.
UNIFORM = ("none", "dots", "dots+attention", "nothing", "every:2", "one-in:2", "one-in:3")
#: Values of a layer, and how they stand in a plan that saves them.
VALUES = {"attention's output": "+attention", "the MLP's first matmul": "mlp/wi_0/dot_general"}


@claim(
    "Saving what is cheap to save",
    [
        *grid(policy=UNIFORM, batch=32, scan_layers=False),
        *grid("plan", batch=32, scan_layers=False, share=(0.5, 0.6, 0.7, 0.8, 0.9)),  # of the bytes of `none`
    ],
    *("total_bytes", "step_s", "planned", "within_bytes"),
)
def cost_aware(rows: Sequence[Row]) -> Found:
    """For each budget, the plan against the fastest uniform policy that fits, and the first plan that saves a value."""
    plans, uniform = where(rows, what="plan"), where(rows, what="step")
    best = [min(row["step_s"] for row in uniform if row["total_bytes"] <= plan["within_bytes"]) for plan in plans]
    gains = span((1 - plan["step_s"] / seconds for plan, seconds in zip(plans, best, strict=True)), percent)
    least = {value: min(plan["share"] for plan in plans if name in plan["planned"]) for value, name in VALUES.items()}
    saves = ", ".join(f"{value} from {percent(share)}" for value, share in least.items())
    lines = series(reversed(rows), lambda row: "planned" if row["what"] == "plan" else row["policy"], gib_of, ms_of)
    number = f"{len(plans)} plans, {gains} faster than the best uniform policy that fits; shares of `none` that save {saves}"
    return number, (Picture("GiB", "predicted ms", lines, from_zero=False),)


OFFLOADS = ("offload:mlpwi_0", "offload:query_proj,key_proj,value_proj", "minimal_offloaded")


@claim(
    "Recomputing against offloading",
    [
        *grid("links", policy=("nothing", *OFFLOADS), batch=32, scan_layers=True),
        *grid("links", policy=("nothing", OFFLOADS[0]), batch=32, scan_layers=False),
    ],
    *("link_gb_per_s", "step_s_by_link"),
)
def offload(rows: Sequence[Row]) -> Found:
    """The predicted time over the link to the host, times that of recomputing, and the links from which it is 1 or less."""
    lines, crossings = {}, []
    for row in (row for row in rows if row["policy"] != "nothing"):
        base = only(rows, policy="nothing", scan_layers=row["scan_layers"])
        times = [own / other for own, other in zip(row["step_s_by_link"], base["step_s_by_link"], strict=True)]
        label = f"{row['policy'].replace(',key_proj,value_proj', ',...')}, {layout_of(row)}"
        lines[label] = list(zip(LINKS, times, strict=True))
        crossings += [n for n, share in enumerate(times) if share <= 1][:1]
    gains = span((1 - line[-1][1] for line in lines.values()), percent)
    number = f"{len(crossings)} of {len(lines)} ways are as fast"
    if crossings:
        slowest, fastest = LINKS[max(0, min(crossings) - 1)], LINKS[max(crossings)]
        number += f" from a link between {slowest:.0f} and {fastest:.0f} GB/s on, with the fastest by {gains}"
    lines["the error of predictions"] = [(link, 1 + load_calibration().error) for link in LINKS]
    picture = Picture("link to the host, GB/s in one direction", "predicted time, times that of nothing", lines, log="xy")
    return f"{number}; PCIe 5.0 has {rows[0]['link_gb_per_s']:.0f}", (picture,)


GLOBAL_BATCH = 512


@claim(
    "Accumulation and checkpointing together",
    [
        *grid("largest", policy=POLICIES, global_batch=GLOBAL_BATCH),
        *grid(policy=("none", "nothing"), attention="cudnn", seq_len=131072, **LLAMA),
    ],
    *("total_bytes", "tokens_per_s", "largest_batch"),
)
def accumulation(rows: Sequence[Row]) -> Found:
    """The largest microbatches that divide the global batch, and the bytes of one long sequence."""

    def named(row: Row) -> str:
        return f"{row['policy']}\n{GLOBAL_BATCH // row['largest_batch']} x {row['largest_batch']}"

    searched = where(rows, what="largest")
    best = max(searched, key=lambda row: row["tokens_per_s"])
    gain = percent(best["tokens_per_s"] / searched[0]["tokens_per_s"] - 1)
    short = f"{named(searched[0])}, {named(best)} with {gain} more tokens/s".replace("\n", " in ")
    long = " and ".join(f"{gib_of(row):.1f} GiB under `{row['policy']}`" for row in where(rows, what="step"))
    bars = series(searched, "preset", named, "tokens_per_s")
    number = f"{GLOBAL_BATCH} sequences: {short}; a long one takes {long}, of {gib_of(searched[0], 'budget_bytes'):.1f}"
    return number, (Picture("microbatches x sequences", "predicted tokens/s", bars, kind="bars"),)


def _grouped(longest: int = 1024) -> Bucketed:
    """The data set in 4 groups of similar lengths, cut at the longest, by the fewest FLOPs of gpt2."""
    whole = read_histogram(Path(__file__).parent.parent.parent / "examples/lengths/python_manual.txt")
    data, config = whole.cut_at(longest), preset("gpt2").config
    groups = make_buckets(data, 4, lambda length: model_flops(config, 1, length), granularity(data.longest), longest)
    return Bucketed(data, whole.longer_than(longest), groups)


GROUPED = _grouped()


@claim(
    "Samples grouped by length",
    grid("largest", policy="dots+attention", loss="chunked", seq_len=tuple(group.seq_len for group in GROUPED.buckets)),
    "tokens_per_s",
)
def grouped(rows: Sequence[Row]) -> Found:
    """Real tokens a second: padded to the longest, in groups, and packed. A group has time in proportion to its sequences."""
    speed = {row["seq_len"]: row["tokens_per_s"] for row in rows}
    data, longest = GROUPED.histogram, max(speed)
    in_groups_s = sum(group.num_sequences * group.seq_len / speed[group.seq_len] for group in GROUPED.buckets)
    padded = data.num_tokens / (data.num_sequences * longest / speed[longest])
    rates = {"padded": padded, "in groups": data.num_tokens / in_groups_s, "packed": GROUPED.packed_share * speed[longest]}
    gain, packing = (rates[name] / padded for name in ("in groups", "packed"))
    apart = percent(max(speed.values()) / min(speed.values()) - 1)
    number = f"{gain:.1f} times the real tokens/s of padding, packing {packing:.1f} times; the groups differ by {apart}"
    return number, (Picture("", "predicted real tokens/s", {"gpt2": list(rates.items())}, kind="bars"),)
