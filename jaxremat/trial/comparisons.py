"""Records that compare: the meshes of `--mesh auto`, the buckets of `--lengths`, the order of policies by two clocks."""

from dataclasses import dataclass
from typing import Literal

from jaxremat.config import Layout
from jaxremat.trial.details import AnyRecord, ComparedMesh, LengthBucket


@dataclass(frozen=True, kw_only=True)
class MeshChoiceRecord(AnyRecord):
    """The meshes that `--mesh auto` compared, and the one of the most tokens per second among them.

    `mesh` is None where no mesh can hold the state. The steps were compared under `loss`, with the layers in `layout`, which are
    None where the workload decides that itself. Where a signal or an error ended the comparison, `is_complete` is False, and
    `mesh` is the best one so far, or None where none has an answer that fits yet.
    """

    record: Literal["mesh_choice"] = "mesh_choice"
    requested_policy: str
    xla_preset: str = "default"
    target: str
    seq_len: int | None
    num_devices: int
    num_nodes: int
    budget_bytes: int
    loss: str | None
    layout: Layout | None
    mesh: str | None
    meshes: tuple[ComparedMesh, ...]
    num_compiles: int
    is_complete: bool = True
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class RankRecord(AnyRecord):
    """Whether predicted and measured step times put the `policies` into the same order.

    `spearman` is the rank correlation of the seconds per sequence: 1 for the same order, -1 for the reverse. `batch` is None
    where each policy is at a batch of its own.
    """

    record: Literal["rank_correlation"] = "rank_correlation"
    target: str
    batch: int | None
    policies: tuple[str, ...]
    predicted_step_s: tuple[float, ...]
    measured_step_s: tuple[float, ...]
    spearman: float
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class LengthsRecord(AnyRecord):
    """How fast a data set of many lengths is trained on, in `buckets` of similar lengths, each at a batch of its own.

    The lengths are those of `file`, with the `num_cut` sequences that were longer than asked for cut. All rates count real
    tokens and no padding, and weight each bucket by its sequences. `padded_tokens_per_s` is the rate if all sequences are
    padded to the last bucket's length. `packed_tokens_per_s` is the rate if they are packed into rows of that length, of which
    `packed_share` is then filled. Both take the last bucket's step. The rates are None where a bucket has no step that fits, or
    where the step times aren't known. On a mesh they are those of one device.
    """

    record: Literal["lengths"] = "lengths"
    target: str
    mesh: str | None = None
    file: str
    num_sequences: int
    num_tokens: int
    num_cut: int
    buckets: tuple[LengthBucket, ...]
    budget_bytes: int
    step_source: Literal["measured", "predicted"] | None
    predicted_interval: tuple[float, float] | None
    tokens_per_s: float | None = None
    padded_tokens_per_s: float | None = None
    packed_tokens_per_s: float | None = None
    packed_share: float
    num_compiles: int
    versions: dict[str, str | None]
