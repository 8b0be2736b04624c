"""Records that compare: meshes, buckets of lengths, and the order of policies by two clocks."""

from dataclasses import dataclass
from typing import Literal

from jaxremat.config import Layout
from jaxremat.trial.details import AnyRecord, ComparedMesh, LengthBucket


@dataclass(frozen=True, kw_only=True)
class MeshChoiceRecord(AnyRecord):
    """The meshes that `--mesh auto` compared, and the fastest among them.

    Attributes:
        requested_policy: the policy as it was requested.
        xla_preset: the preset of XLA's options.
        target: name of the target.
        seq_len: tokens of a sequence; None where that isn't known.
        num_devices: number of devices.
        num_nodes: number of machines that they are in.
        budget_bytes: what a step may take on a device.
        loss: the loss of the steps; None where the workload decides that itself.
        layout: how their layers run; None where the workload decides that itself.
        mesh: the fastest mesh; None where no mesh has a step that fits.
        meshes: all of them.
        counted: what their rates count. It is samples where the workload doesn't say how many tokens a batch has. None in
            records of before, which count tokens.
        paired_error: the share by which predicted times on two meshes have to differ for one to be the faster.
        num_compiles: number of compiles that the comparison took.
        is_complete: False where a signal or an error ended the comparison. `mesh` is then the best one so far.
        versions: by library, its version.
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
    counted: Literal["tokens", "samples"] | None = None
    paired_error: float | None = None
    num_compiles: int
    is_complete: bool = True
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class RankRecord(AnyRecord):
    """Whether predicted and measured step times put policies into the same order.

    Attributes:
        target: name of the target.
        batch: sequences of a microbatch; None where each policy is at a batch of its own.
        policies: the policies.
        predicted_step_s: predicted seconds of a step of each.
        measured_step_s: measured seconds of a step of each.
        spearman: rank correlation of the seconds per sequence: 1 for the same order, -1 for the reverse.
        versions: by library, its version.
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
    """How fast a data set of many lengths is trained on, in buckets of similar lengths.

    Rates count real tokens and no padding, and weight each bucket by its sequences. They are None where a bucket has no step that
    fits, or where the step times aren't known. On a mesh they are those of one device.

    Attributes:
        target: name of the target.
        mesh: the mesh; None for one device.
        file: the file of the lengths.
        num_sequences: number of sequences.
        num_tokens: their tokens.
        num_cut: number of sequences that are cut because they are longer than requested.
        buckets: the buckets, each with a step and a batch of its own.
        budget_bytes: what a step may take on a device.
        step_source: whether the step times are measured or predicted.
        predicted_interval: how much longer real steps may take, as shares of the predicted time.
        tokens_per_s: tokens per second in buckets.
        padded_tokens_per_s: those if all sequences are padded to the last bucket's length, in the last bucket's step.
        packed_tokens_per_s: those if they are packed into rows of that length.
        packed_share: the share of those rows that is filled.
        num_compiles: number of compiles that all steps took.
        versions: by library, its version.
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
