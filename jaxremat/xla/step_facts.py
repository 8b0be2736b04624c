"""What is known of a compiled step, as data: findings, saved values, the predicted time.

Records have these classes, and their fields are keys of the records' JSON. So nothing here imports JAX.
"""

from dataclasses import dataclass
from typing import Literal

#: The operations that are counted. attention: fused kernels. kernel: other kernels of the program, such as Pallas's.
Operation = Literal["matmul", "convolution", "attention", "kernel"]
#: What a saved value is. name: saved by its checkpoint name. input: the activation that a layer reads, which is saved whatever
#: the policy says. loss: the activation that a checkpoint with a scalar result reads, such as a chunk of the loss. other: any
#: other input of a checkpoint. No gradient goes through it, such as a mask or a table of positions. The others are saved by a
#: rule such as `dots`, and are results of that kind of operation.
SavedKind = Literal["name", "input", "loss", "other", "matmul", "convolution", "attention", "elementwise"]

#: The rule after which neither the bytes of what is saved nor the FLOPs of the step are those of a device's share.
MORE_THAN_ITS_SHARE = "more-than-its-share"


@dataclass(frozen=True)
class Finding:
    """One likely mistake in a compiled step.

    Attributes:
        rule: name of the rule, a key of `xla.lint.RULES` or `xla.lint_mesh.MESH_RULES`.
        evidence: the observed facts, in numbers.
        remedy: a flag or code to paste.
        num_bytes: device bytes that the finding concerns; 0 for a finding about time.
        source: `file:line` of the code that the finding concerns, with the whole path; empty if there is none.
    """

    rule: str
    evidence: str
    remedy: str
    num_bytes: int = 0
    source: str = ""


@dataclass(frozen=True)
class SavedValues:
    """Values of one kind that the forward pass saves for the backward pass.

    Attributes:
        kind: what the values are.
        name: their checkpoint name where they are saved by name, else empty.
        num_values: number of values. A stack of 12 layers is 12 values.
        num_bytes: bytes of all of them.
        on_host: whether they are in the host's memory.
    """

    kind: SavedKind
    name: str
    num_values: int
    num_bytes: int
    on_host: bool = False


@dataclass(frozen=True)
class Recomputed:
    """How much of one kind of operation of the forward pass is recomputed for the backward pass.

    Attributes:
        operation: the kind.
        num_forward: number of these operations in the forward pass, without those whose results nothing reads.
        num_asked: number of times that the traced program recomputes one of them. Under `every:K+nothing` that can be more than
            `num_forward`.
        num_again: number of times that the compiled program does. XLA merged the others with the forward pass, and saves
            their results.
        flops_again: FLOPs of the recomputed matmuls, convolutions and attention kernels in the compiled program, padding
            included; 0 for `kernel`, whose FLOPs aren't known.
    """

    operation: Operation
    num_forward: int
    num_asked: int
    num_again: int
    flops_again: int


@dataclass(frozen=True)
class SavedAndRecomputed:
    """What a compiled step saves for the backward pass, and what it recomputes.

    Attributes:
        num_checkpoints: number of checkpoints in the backward pass; 0 if the program has none.
        again: the operations of the forward pass that the compiled program recomputes, one entry for each kind that the
            program has. XLA may join sibling matmuls into one. The numbers are those of the traced program, which
            has them apart. The FLOPs are those of the compiled program.
        saved: the values that the traced forward pass saves for its checkpoints, the most bytes first.
        unread_names: names that the policies save, and that some value carries, but that no checkpoint reads. Nothing is
            saved for them.
        unmatched_names: names that the policies save, and that no value of the program carries.
        gathered_forward_bytes: bytes of the parameters that a device of a mesh gathers from others in the forward pass; None
            for one device.
        gathered_backward_bytes: those of the backward pass.
    """

    num_checkpoints: int
    again: tuple[Recomputed, ...]
    saved: tuple[SavedValues, ...]
    unread_names: tuple[str, ...]
    unmatched_names: tuple[str, ...]
    gathered_forward_bytes: int | None = None
    gathered_backward_bytes: int | None = None


@dataclass(frozen=True)
class StepTime:
    """A predicted step time and its parts.

    Seconds, bytes and FLOPs are those of one step on one device.

    Attributes:
        step_s: predicted seconds of the step.
        compute_s: seconds that the FLOPs alone would take.
        memory_s: seconds that the traffic of device memory alone would take.
        host_s: seconds of the host transfers.
        exposed_s: seconds of host transfers that no kernel hides.
        launch_s: seconds of the launches.
        flops: executed FLOPs.
        bytes_read: bytes read from device memory.
        bytes_written: bytes written to device memory.
        host_bytes: bytes of the host transfers, both directions.
        num_kernels: number of kernels launched, without collectives.
        collective_s: seconds in which collectives use the links.
        collective_exposed_s: seconds of collectives that no kernel hides.
        collective_bytes: bytes that collectives send to other devices.
        num_collectives: number of collectives.
    """

    step_s: float
    compute_s: float
    memory_s: float
    host_s: float
    exposed_s: float
    launch_s: float
    flops: int
    bytes_read: int
    bytes_written: int
    host_bytes: int
    num_kernels: int
    collective_s: float = 0.0
    collective_exposed_s: float = 0.0
    collective_bytes: int = 0
    num_collectives: int = 0
