"""What records have in common, and the classes inside them that no other room has.

Findings, saved values and the predicted time are those of `xla/step_facts.py`, prices those of `knapsack/prices.py`. The fields
of all these classes are keys of the records' JSON.
"""

from dataclasses import dataclass

from jaxremat.config import Layout

#: The schema of the records that are written, and the only one that is read.
SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class AnyRecord:
    """What every record begins with.

    Attributes:
        record: the kind of record.
        schema: the schema of its fields.
        model: the model's name.
    """

    record: str
    schema: int = SCHEMA
    model: str


@dataclass(frozen=True)
class TriedStep:
    """A step that was compiled while a plan was looked for.

    Attributes:
        policy: its policy.
        loss: its loss.
        batch: sequences per microbatch.
        total_bytes: XLA's total for a device.
        step_s: predicted seconds of the step.
        layout: how its layers run; None where the workload decides that itself.
        accumulate: microbatches of the step; None for one.
    """

    policy: str
    loss: str
    batch: int
    total_bytes: int
    step_s: float
    layout: Layout | None = None
    accumulate: int | None = None

    @property
    def rate(self) -> float:
        """Predicted samples per second of a data-parallel group."""
        return (self.accumulate or 1) * self.batch / self.step_s


@dataclass(frozen=True)
class PlannedLayout:
    """The best plan with the layers in one layout.

    Attributes:
        layout: how the layers run.
        policy: the plan's policy.
        loss: its loss.
        batch: sequences per microbatch.
        total_bytes: XLA's total for a device.
        step_s: predicted seconds of the step.
        tokens_per_s: tokens per second; None for a workload that doesn't say how many tokens a batch has.
        compile_s: seconds that lowering and compiling the step took.
        samples_per_s: samples per second.
        most_share: if its search ended because the other layout is faster, the most samples per second that are expected of it,
            as a share of the other one's. The fields above are those of the fastest step that was compiled by then.
    """

    layout: Layout
    policy: str
    loss: str
    batch: int
    total_bytes: int
    step_s: float
    tokens_per_s: float | None
    compile_s: float
    samples_per_s: float | None = None
    most_share: float | None = None


@dataclass(frozen=True)
class LengthBucket:
    """The sequences of a data set that are padded to one length, and their step.

    The step is the fastest that fits. Where none fits, it is the compiled one of the fewest bytes.

    Attributes:
        seq_len: the length, in tokens.
        num_sequences: number of the sequences.
        num_tokens: their tokens, padding not counted.
        requested_policy: the policy as it was requested.
        policy: the policy of the step.
        xla_preset: the preset of XLA's options.
        loss: the loss of the step.
        layout: how the layers run; None where the workload decides that itself.
        batch: sequences per microbatch.
        total_bytes: XLA's total for a device.
        fits: whether the step fits the budget.
        step_s: seconds of the step.
        tokens_per_s: tokens per second of a device, padding not counted.
    """

    seq_len: int
    num_sequences: int
    num_tokens: int
    requested_policy: str
    policy: str
    xla_preset: str
    loss: str
    layout: Layout | None
    batch: int
    total_bytes: int | None
    fits: bool
    step_s: float | None
    tokens_per_s: float | None


@dataclass(frozen=True)
class ComparedMesh:
    """One of the meshes that `--mesh auto` compared, or left out.

    Its step is the best one, or that of the fewest bytes if none fits. Rates and bytes are those of one device, and predicted.
    A workload that doesn't say how many tokens a batch has has its samples in place of tokens.

    Attributes:
        mesh: the mesh, such as `data=2,fsdp=4`.
        state_bytes: bytes of the parameters and the optimizer's state.
        batch: sequences of its step per data-parallel group of the mesh; None where it has no step.
        total_bytes: XLA's total for its step.
        bound_tokens_per_s: no step was found to have more tokens per second. Where that is at most 0.5 % above what another mesh
            reached, the mesh was left out.
        tokens_per_s: tokens per second of its step.
        num_compiles: number of compiles that the mesh took.
        left_out: why there is no such step; empty where there is one.
    """

    mesh: str
    state_bytes: int | None = None
    batch: int | None = None
    total_bytes: int | None = None
    bound_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    num_compiles: int = 0
    left_out: str = ""


@dataclass(frozen=True)
class HeldBytes:
    """The bytes at the peak of one category and label.

    Attributes:
        category: what the bytes are for.
        label: a readable name. That of equal layers that aren't scanned has `*` for the layer: `layers_*/mlp/dot_general`.
        num_bytes: bytes of all the buffers.
        num_buffers: number of the buffers.
        num_layers: number of layers whose values they are.
        shape: dtype and dimensions of each buffer, such as `bf16[32,1024,768]`. It is empty where they have several, and None in
            records of former versions.
        source: `file:line` that made the largest; None in records of former versions.
    """

    category: str
    label: str
    num_bytes: int
    num_buffers: int
    num_layers: int
    shape: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class StateOnMesh:
    """How the parameters, or the optimizer's state, lie on a mesh.

    Attributes:
        category: `parameters`, `frozen parameters` or `optimizer state`.
        num_bytes: bytes of all of them.
        divided_bytes: bytes that each device has of arrays that an axis of the mesh divides.
        whole_bytes: bytes that each device has of arrays that are replicated.
    """

    category: str
    num_bytes: int
    divided_bytes: int
    whole_bytes: int


@dataclass(frozen=True)
class LargeBuffer:
    """One of the largest buffers at the peak. The buffers of equal layers are one here.

    Attributes:
        category: what the buffer is for.
        label: a readable name, as in `HeldBytes`.
        shape: dtype and dimensions of each buffer, such as `bf16[32,1024,768]`.
        num_layers: number of layers whose values are in the buffers.
        name: XLA's name of the largest.
        op_name: the scope in the program of the operation that made the largest.
        source: `file:line` that made the largest.
        num_bytes: bytes of all the buffers.
        num_buffers: number of the buffers.
    """

    category: str
    label: str
    shape: str
    num_layers: int
    name: str
    op_name: str
    source: str
    num_bytes: int
    num_buffers: int = 1


@dataclass(frozen=True)
class PeakPlace:
    """Where in the program the peak is.

    Attributes:
        position: number of the operation, from 0, in the order in which they run.
        num_positions: number of operations.
        phase: `forward`, `backward` or `update`.
        name: XLA's name of the operation.
        opcode: its kind, such as `fusion`.
        op_name: its scope in the program.
        source: the `file:line` that made it.
    """

    position: int
    num_positions: int
    phase: str
    name: str
    opcode: str
    op_name: str
    source: str


@dataclass(frozen=True)
class AllocatorBytes:
    """What JAX's allocator says of its memory on a device; None where it doesn't track that.

    Attributes:
        in_use_bytes: in use now.
        peak_bytes: the most that was in use since the process began.
        pool_bytes: what the allocator has taken from the device.
        largest_free_bytes: the largest free block of that pool.
    """

    in_use_bytes: int | None
    peak_bytes: int | None
    pool_bytes: int | None
    largest_free_bytes: int | None
