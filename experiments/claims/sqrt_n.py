"""Chen et al. 2016: activations in O(sqrt N) for N layers."""

import re
from collections.abc import Sequence

import numpy as np

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size
from experiments.claims.steps import TOY_MEMORY, Step, step
from experiments.claims.words import gib, percent
from experiments.common import only

DEPTHS = (25, 100, 225, 400)
POLICIES = ("none", "every:sqrt", "every:5", "every:10", "every:25", "nothing", "every:sqrt+nothing")
#: Narrow layers, many tokens and a small vocabulary, so that activations are most of the memory at any depth.
NARROW = {
    **{"embed_dim": 256, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "mlp_dim": 1024, "vocab_size": 1024},
    **{"batch": 32, "dropout": 0.0},
}


def steps(size: Size) -> list[Step]:
    """Each policy at each depth."""
    if size == "tiny":
        return [step("memory", policy=p, num_layers=n, **TOY_MEMORY) for p in ("none", "every:sqrt") for n in (4, 9)]
    return [step("memory", policy=policy, num_layers=depth, **NARROW) for policy in POLICIES for depth in DEPTHS]


def exponent(rows: Sequence[Row], policy: str) -> float:
    """The exponent of the activations' growth with the depth: the slope of the line through the logarithms of all depths."""
    of_policy = [row for row in rows if row["policy"] == policy]
    slope, _ = np.polyfit(
        np.log([row["num_layers"] for row in of_policy]), np.log([row["sources"]["activations"] for row in of_policy]), 1
    )
    return float(slope)


def judge(rows: Sequence[Row]) -> Judgement:
    """How the activations grow with the depth under each policy, and what is saved at 100 layers."""
    depths = sorted({row["num_layers"] for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    deep = 100 if 100 in depths else depths[-1]
    base = only(rows, policy="none", num_layers=deep)["sources"]["activations"]
    table = [("policy", *(f"{depth} layers" for depth in depths), "grows as", f"units of {deep} layers' {deep}")]
    units = {}
    for policy in policies:
        sizes = [only(rows, policy=policy, num_layers=depth)["sources"]["activations"] for depth in depths]
        units[policy] = deep * sizes[depths.index(deep)] / base
        power = f"N^{exponent(rows, policy):.2f}"
        table.append((f"`{policy}`", *map(gib, sizes), power, f"{units[policy]:.1f}"))
    root = exponent(rows, "every:sqrt")
    steps_s = {p: only(rows, policy=p, num_layers=deep)["step_s"] for p in policies}
    flops = {p: only(rows, policy=p, num_layers=deep)["executed_flops"] for p in policies}
    sentences = [
        f"Under `none` the activations grow as N^{exponent(rows, 'none'):.2f}, under `every:sqrt` as N^{root:.2f}.",
        f"Of 100 units of activations at {deep} layers, `every:sqrt` keeps {100 * units['every:sqrt'] / deep:.0f}. "
        f"Its step takes {percent(steps_s['every:sqrt'] / steps_s['none'] - 1)} more time than that of `none` in a loop, by "
        f"prediction, and {percent(flops['every:sqrt'] / flops['none'] - 1)} more FLOPs.",
    ]
    if "nothing" in policies:
        sentences.append(
            f"Keeping each layer's input alone (`nothing`) grows as N^{exponent(rows, 'nothing'):.2f}, and yet keeps "
            f"{100 * units['nothing'] / deep:.0f} units: one input is small beside what a layer saves, so that at {deep} layers "
            f"{'it takes fewer bytes than the square root' if units['nothing'] < units['every:sqrt'] else 'it takes more'}. "
            f"Both together (`every:sqrt+nothing`) keep {100 * units['every:sqrt+nothing'] / deep:.1f} and grow as "
            f"N^{exponent(rows, 'every:sqrt+nothing'):.2f}."
        )
    if fixed := [policy for policy in policies if re.fullmatch(r"every:\d+", policy)]:
        deepest = {p: only(rows, policy=p, num_layers=depths[-1])["sources"]["activations"] for p in ("every:sqrt", *fixed)}
        least = min(fixed, key=lambda policy: deepest[policy])
        sentences.append(
            f"At {depths[-1]} layers `{least}` keeps {gib(deepest[least])} and `every:sqrt` {gib(deepest['every:sqrt'])}: the "
            "root is the best spacing where a layer saves no more than its input. Here it saves many times as much, and the "
            "groups should be smaller. With groups of a fixed size the growth is linear again in the end."
            if deepest[least] < deepest["every:sqrt"]
            else f"At {depths[-1]} layers no fixed spacing among them keeps less than `every:sqrt`."
        )
    kept = 100 * units["every:sqrt"] / deep
    verdict = "holds" if root < 0.65 and kept <= 22 else "holds under conditions" if root < 0.8 else "refuted"
    return Judgement(
        f"`every:sqrt` grows as N^{root:.2f}, and keeps {kept:.0f} of 100 units", verdict, tuple(sentences), tuple(table)
    )


def picture(rows: Sequence[Row]) -> Picture:
    """Activations over depth."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        series.setdefault(row["policy"], []).append((row["num_layers"], row["sources"]["activations"] / 2**30))
    return Picture("layers", "activations at the peak, GiB", series, log="xy")


CLAIM = Claim(
    name="sqrt_n",
    title="The square root of the depth",
    source="Chen, Xu, Zhang and Guestrin, Training Deep Nets with Sublinear Memory Cost, 2016; articles",
    says="with a checkpoint every sqrt(N) layers the activations grow with the root of the depth, at the cost of one more "
    "forward pass (the paper); of the 100 units of a model of 100 layers about 20 stay, 80 % less (the articles)",
    on="layers of width 256, batch 32 of 1024 tokens, in a loop, H100; activations at the peak",
    steps=steps,
    judge=judge,
    picture=picture,
)
