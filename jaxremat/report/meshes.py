"""The meshes that `--mesh auto` compared, for a person: a table, and a sentence that says which one is the fastest and why.

fsdp=8 is the fastest of 5 meshes of 8 GPUs: 12,012 tokens/s a GPU, predicted.
"""

from rich.table import Table

from jaxremat.report.policy_text import shortened
from jaxremat.report.table import gib_number, table_of
from jaxremat.trial.comparisons import MeshChoiceRecord
from jaxremat.trial.details import ComparedMesh
from jaxremat.units import gib, percent_up
from jaxremat.workload.given import OWN_LOSS
from jaxremat.xla.options import with_preset


def meshes_table(record: MeshChoiceRecord) -> Table:
    """A table of the meshes, the fastest first, then those that could be fast, then those that were left out before."""
    nodes = f" on {record.num_nodes} nodes" if record.num_nodes > 1 else ""
    title = f"meshes of {record.num_devices} x {record.target}{nodes}: GiB and tokens/s of one device"
    rate = "samples/s" if record.loss == OWN_LOSS and record.seq_len is None else "tokens/s"
    table = table_of(title, "mesh", "state", "batch", "GiB", f"at most\n{rate}", rate, "left out")
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    for one in sorted(record.meshes, key=_rank):
        table.add_row(
            one.mesh,
            gib_number(one.state_bytes),
            "-" if one.batch is None else str(one.batch),
            gib_number(one.total_bytes),
            "-" if one.bound_tokens_per_s is None else f"{one.bound_tokens_per_s:,.0f}",
            "-" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}",
            one.left_out,
        )
    return table


def _rank(one: ComparedMesh) -> tuple[float, float, bool]:
    return (-(one.tokens_per_s or 0.0), -(one.bound_tokens_per_s or 0.0), one.state_bytes is None)


def mesh_sentence(record: MeshChoiceRecord) -> str:
    """Which mesh is the fastest of how many, how it was compared, and what is known of the others."""
    compared = [one for one in record.meshes if one.num_compiles]
    if not record.is_complete:
        ended = f"The comparison of {len(record.meshes)} meshes was ended early."
        if record.mesh is None:
            return f"{ended} No mesh has an answer that fits so far."
        return f"{ended} The fastest so far is {record.mesh}. It isn't proven that it is the fastest."
    if record.mesh is None:
        least = min((one.state_bytes for one in record.meshes if one.state_bytes), default=0)
        holds = f"No mesh of {record.num_devices} devices holds" if record.num_devices > 1 else "One device doesn't hold"
        return (
            f"{holds} the state: it takes at least {gib(least)} of the "
            f"{gib(record.budget_bytes)} of each. Nothing was compiled."
        )
    if not compared:
        return f"{record.mesh} is the only mesh here that can be compared, so that nothing was compared."
    best = next(one for one in record.meshes if one.mesh == record.mesh)
    is_plan = record.requested_policy == "auto"
    how = [f"the {record.loss} loss"] if record.loss not in (None, OWN_LOSS) else []
    how += ["layers in a loop"] if is_plan and record.layout == "loop" else []
    under = f" ({' and '.join(how)})" if how else ""
    policy = with_preset("plan" if is_plan else shortened(record.requested_policy), record.xla_preset)
    meshes = f"{len(compared)} mesh{'es' if len(compared) > 1 else ''}"
    compiles = f"{record.num_compiles} compile{'s' if record.num_compiles > 1 else ''}"
    if best.tokens_per_s is None:
        return f"Nothing fits on any of {meshes} that hold the state. {record.mesh} takes the least, by {compiles}{under}."
    others = [one.bound_tokens_per_s or 0.0 for one in compared if one is not best and one.bound_tokens_per_s]
    over = max(others, default=0.0) / best.tokens_per_s - 1
    place = "the fastest" if over <= 0 else f"within {percent_up(over)} of the fastest"
    said = f"{record.mesh} is {place} of {meshes} for {'a' if is_plan else 'policy'} {policy}, by {compiles}{under}"
    if not others:
        return f"{said}."
    return f"{said}: no step on another one has more than {max(others):,.0f} tokens/s a device, by the same model."
