"""Articles: wide against deep at equal parameters."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size
from experiments.claims.steps import TOY, Step, step
from experiments.claims.words import gib, percent, saved
from experiments.common import only

#: Layers and width: the parameters of the layers are nearly equal, 12 x width^2 each.
SHAPES = ((48, 384), (27, 512), (12, 768), (3, 1536))
POLICIES = ("none", "dots+attention", "nothing")


def steps(size: Size) -> list[Step]:
    """Each shape under each policy."""
    if size == "tiny":
        return [step(policy=p, **TOY) for p in ("none", "nothing")]
    return [
        step(
            policy=policy,
            batch=32,
            vocab_size=4096,
            num_layers=layers,
            embed_dim=width,
            num_heads=width // 64,
            num_kv_heads=width // 64,
            mlp_dim=4 * width,
        )
        for policy in POLICIES
        for layers, width in SHAPES
    ]


def judge(rows: Sequence[Row]) -> Judgement:
    """The temporaries of the deepest and the widest model."""
    depths = sorted({row["num_layers"] for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    table = [("layers", "parameters", *(f"`{policy}`" for policy in policies), "saved at most")]
    best = {}
    for depth in depths:
        of_depth = [only(rows, policy=policy, num_layers=depth) for policy in policies]
        best[depth] = max(saved(row, of_depth[0]) for row in of_depth)
        sizes = (gib(row["total_bytes"]) for row in of_depth)
        table.append((str(depth), f"{of_depth[0]['num_params'] / 1e6:.0f}M", *sizes, percent(best[depth])))
    wide, deep = depths[0], depths[-1]
    ratio = (
        only(rows, policy="none", num_layers=deep)["temp_bytes"] / only(rows, policy="none", num_layers=wide)["temp_bytes"]
    )
    sentences = (
        f"{deep} narrow layers take {ratio:.1f} times the temporaries of {wide} wide ones under `none`: at equal parameters "
        "a model's activations grow with depth times width, which is larger the deeper it is.",
        f"Checkpointing saves {percent(best[deep])} of the bytes of the deepest and {percent(best[wide])} of the widest.",
    )
    ours = f"deep takes {ratio:.1f} times the temporaries; {percent(best[deep])} against {percent(best[wide])} saved"
    verdict = "holds" if ratio > 1 and best[deep] > best[wide] else "holds under conditions" if ratio > 1 else "refuted"
    return Judgement(ours, verdict, sentences, tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Bytes over the depth."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        series.setdefault(row["policy"], []).append((row["num_layers"], row["total_bytes"] / 2**30))
    return Picture(
        "layers, at equal parameters", "GiB", {label: sorted(points) for label, points in series.items()}, log="x"
    )


CLAIM = Claim(
    name="wide_deep",
    title="Wide against deep",
    source="articles",
    says="at equal parameters a deep model has more activations than a wide one, and checkpointing saves more of them",
    on="85M parameters in the layers, batch 32 of 1024 tokens, in a loop, H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
