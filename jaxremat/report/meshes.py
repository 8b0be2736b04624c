"""The meshes that `--mesh auto` compared: a table, and a sentence on the fastest one.

fsdp=8 is the fastest of 5 meshes of 8 GPUs: 12,012 tokens/s a GPU, predicted.
"""

from rich.table import Table

from jaxremat.report.policy_text import shortened
from jaxremat.report.sentences import APART, tied_sentence
from jaxremat.report.steps import LAYOUT_WORDS, steps_table
from jaxremat.report.table import counted
from jaxremat.trial.comparisons import MeshChoiceRecord
from jaxremat.trial.details import ComparedMesh
from jaxremat.trial.ties import ties
from jaxremat.units import gib
from jaxremat.workload.given import OWN_LOSS
from jaxremat.xla.options import with_preset


def meshes_table(record: MeshChoiceRecord) -> Table:
    """A table of the meshes, the fastest first.

    Those that could be fast come next, and then those that were left out before.
    """
    nodes = f" on {record.num_nodes} nodes" if record.num_nodes > 1 else ""
    rate = _rate(record)
    title = f"meshes of {record.num_devices} x {record.target}{nodes}: GiB and {rate} of one device"
    titles = {"rate": rate, "at most": f"at most\n{rate}"}
    return steps_table("meshes", title, sorted(record.meshes, key=_rank), titles=titles, tied=_tied(record))


def _rate(record: MeshChoiceRecord) -> str:
    return f"{record.counted or 'tokens'}/s"


def _tied(record: MeshChoiceRecord) -> list[ComparedMesh]:
    """The meshes that are as fast as the fastest one, that one included."""
    return ties(record.meshes, lambda one: one.tokens_per_s, lambda *_: record.paired_error or 0.0)


def mesh_sentences(record: MeshChoiceRecord) -> list[str]:
    """What the mark of equally fast meshes means, if one has it, and then `mesh_sentence`."""
    return [*([tied_sentence(record.paired_error or 0.0)] if _tied(record) else []), mesh_sentence(record)]


def _rank(one: ComparedMesh) -> tuple[float, float, bool]:
    return (-(one.tokens_per_s or 0.0), -(one.bound_tokens_per_s or 0.0), one.state_bytes is None)


def _may_be_as_fast(record: MeshChoiceRecord, fastest: float) -> list[str]:
    """The meshes without an answer whose upper bound isn't told apart from the fastest one."""
    error = record.paired_error or 0.0
    without = [one for one in record.meshes if one.num_compiles and not one.tokens_per_s and one.batch is None]
    return [one.mesh for one in without if (one.bound_tokens_per_s or 0.0) * (1 + error) > fastest]


def mesh_sentence(record: MeshChoiceRecord) -> str:
    """Which mesh is the fastest of how many, how they were compared, and what is not known."""
    compared = [one for one in record.meshes if one.num_compiles]
    if not record.is_complete:
        best = f"The fastest so far is {record.mesh}. It isn't proven that it is the fastest."
        said = "No mesh has an answer that fits so far." if record.mesh is None else best
        return f"The comparison of {len(record.meshes)} meshes was ended early. {said}"
    if record.mesh is None:
        least = min((one.state_bytes for one in record.meshes if one.state_bytes), default=0)
        holds = f"No mesh of {record.num_devices} devices holds" if record.num_devices > 1 else "One device doesn't hold"
        size = f"at least {gib(least)} of the {gib(record.budget_bytes)} of each"
        return f"{holds} the state: it takes {size}. Nothing was compiled."
    if not compared:
        return f"{record.mesh} is the only mesh here that can be compared, so that nothing was compared."
    reached = next(one.tokens_per_s for one in record.meshes if one.mesh == record.mesh)
    is_plan = record.requested_policy == "auto"
    how = [f"the {record.loss} loss"] if record.loss not in (None, OWN_LOSS) else []
    how += [f"layers {LAYOUT_WORDS['loop']}"] if is_plan and record.layout == "loop" else []
    by = f"by {counted(record.num_compiles, 'compile')}" + (f" ({' and '.join(how)})" if how else "")
    meshes = counted(len(compared), "mesh", "meshes")
    if reached is None:
        return f"Nothing fits on any of {meshes} that hold the state. {record.mesh} takes the least, {by}."
    bound = max((one.bound_tokens_per_s or 0.0 for one in compared if one.mesh != record.mesh), default=0.0)
    near = _may_be_as_fast(record, reached)
    num_fastest = max(1, len(_tied(record))) + len(near)
    place = f"one of the {num_fastest} fastest" if num_fastest > 1 else "the fastest"
    under = with_preset("a plan" if is_plan else f"policy {shortened(record.requested_policy)}", record.xla_preset)
    most = f"{bound:,.0f} {_rate(record)} a device"
    others = f": no {'such ' * bool(how)}step on another one is expected to have more than {most}" if bound else ""
    apart = f": {APART.format(record.paired_error)}" if record.paired_error else ""
    also = f" By its upper bound {' or '.join(near)} may be as fast{apart}." if near else ""
    return f"{record.mesh} is {place} of {meshes} compiled for {under}, {by}{others}.{also}"
