"""What records hold inside: findings, prices, buffers and the like, each a dataclass of its own.

They look like dataclasses of the lint, the planner and the memory map, and are not the same: these are a file format, which
stays as it is when those change.
"""

from dataclasses import dataclass

from jaxremat.config import Layout

#: Schema 1 had other names for some fields: `trial/lines.py` still reads it.
SCHEMA = 2


@dataclass(frozen=True)
class LintFinding:
    """One finding of the lint (`xla/lint.py`): the rule, what was seen, what to do, and how many bytes it is about."""

    rule: str
    evidence: str
    remedy: str
    num_bytes: int
    source: str


@dataclass(frozen=True)
class SavedForBackward:
    """Values that the forward pass saves for its checkpoints, as in `xla/saved.py`; of a stack of layers each layer's counts.

    `kind` is `name` where they are saved by their checkpoint `name`, and `input` for the inputs of layers, which are saved
    whatever the policy says. `loss` is the input of a checkpoint with a scalar result. `other` are inputs that no gradient goes
    through, such as masks. The other kinds say what operation the values are results of.
    """

    kind: str
    name: str
    num_values: int
    num_bytes: int
    on_host: bool


@dataclass(frozen=True)
class RunsAgain:
    """How many operations of one kind are recomputed for the backward pass, as in `xla/kept.py`.

    The forward pass has `num_forward`. The traced program recomputes `num_asked`, the compiled one `num_again`, which take
    `flops_again`.
    """

    operation: str
    num_forward: int
    num_asked: int
    num_again: int
    flops_again: int


@dataclass(frozen=True)
class WhatWasKept:
    """What the compiled step saves and recomputes, as in `xla/kept.py`.

    Of the names that the policies save, no checkpoint reads the `unread_names`, and no value carries the `unmatched_names`. On
    a mesh, a device gathers parameters of so many bytes from others, in the forward pass and in the backward pass.
    """

    num_checkpoints: int
    again: tuple[RunsAgain, ...]
    saved: tuple[SavedForBackward, ...]
    unread_names: tuple[str, ...]
    unmatched_names: tuple[str, ...]
    gathered_forward_bytes: int | None = None
    gathered_backward_bytes: int | None = None


@dataclass(frozen=True)
class PredictedStep:
    """The predicted step time and its terms, as in `xla/clock.py`; seconds, bytes and FLOPs of one step."""

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


@dataclass(frozen=True)
class TensorPrice:
    """What saving one tensor in all layers is worth: `num_bytes` for `saved_s` seconds a step, and whether the plan does."""

    name: str
    num_bytes: int
    saved_s: float
    is_saved: bool
    is_offloaded: bool


@dataclass(frozen=True)
class FurtherBudget:
    """How many seconds a step could get shorter with that many bytes more."""

    further_bytes: int
    saved_s: float


@dataclass(frozen=True)
class TriedStep:
    """A step that was compiled while a plan was looked for; `step_s` is predicted."""

    policy: str
    loss: str
    batch: int
    total_bytes: int
    step_s: float
    layout: Layout | None = None


@dataclass(frozen=True)
class LengthBucket:
    """The sequences of a data set that are padded to `seq_len` tokens, and the step that trains on them.

    There are `num_sequences` of them, with `num_tokens` in all, padding not counted. The step is the fastest that fits. Where
    none fits, it is the compiled one of the fewest bytes. `tokens_per_s` doesn't count padding. On a mesh it is that of one
    device.
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
class PlannedLayout:
    """The best plan with the layers in one layout. `step_s` is predicted. `compile_s` is how long its step took to compile."""

    layout: Layout
    policy: str
    loss: str
    batch: int
    total_bytes: int
    step_s: float
    tokens_per_s: float | None
    compile_s: float


@dataclass(frozen=True)
class ComparedMesh:
    """One of the meshes that `--mesh auto` compared, or left out.

    `state_bytes` are the parameters and the optimizer's state of a device. No step was found to have more than
    `bound_tokens_per_s`; where that is at most 0.5 % above what another mesh reached, the mesh was left out. `batch`,
    `total_bytes` and `tokens_per_s` are those of its best step, or of the step of the fewest bytes if none fits. `left_out` says
    why there is no such step. Rates and bytes are those of one device, and predicted. A workload that doesn't say how many
    tokens a batch has has its samples in place of tokens.
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
    """The bytes at the peak that one category and label hold: in how many buffers, and how many layers' values they are.

    The label of equal layers that aren't scanned has `*` for the number of the layer: `layers_*/mlp/dot_general`.
    """

    category: str
    label: str
    num_bytes: int
    num_buffers: int
    num_layers: int


@dataclass(frozen=True)
class StateOnMesh:
    """How the parameters, or the optimizer's state, lie on a mesh: `num_bytes` in all, and on each device.

    A device has parts of `divided_bytes`, of arrays that an axis of the mesh divides. It has `whole_bytes` of arrays that each
    device has whole.
    """

    category: str
    num_bytes: int
    divided_bytes: int
    whole_bytes: int


@dataclass(frozen=True)
class LargeBuffer:
    """One of the largest buffers at the peak, with the scope in the program and the line of source that made it.

    Where equal layers have `num_buffers` of them, they are one here: `num_bytes` are those of all, the shape is that of each, and
    the name, the scope and the source are those of the largest. Their label is one of `layers_*/mlp/dot_general`, too.
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
    """Where the peak is: the operation number `position` of `num_positions`, from 0, in the order in which they run."""

    position: int
    num_positions: int
    phase: str
    name: str
    opcode: str
    op_name: str
    source: str


@dataclass(frozen=True)
class AllocatorBytes:
    """What JAX's allocator said after a step; a figure that it doesn't keep is None. See `trial/measure.py`."""

    in_use_bytes: int | None
    peak_bytes: int | None
    pool_bytes: int | None
    largest_free_bytes: int | None
