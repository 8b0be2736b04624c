"""Steps are the planner's view of training steps: a layer as data, a compiler, and a budget.

The planner knows XLA only as a function: `steps.compile(policy, loss, batch)` returns the total bytes of a compiled step and its
predicted seconds. The tests put a formula in its place.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxremat.knapsack.problem import Value
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.policy.spec import NOTHING, Every, Policy, Rule

#: The policy for where the inputs of all layers don't fit, or where the least bytes are requested.
SPARSE = Every("sqrt", NOTHING)
GROUPS = Every("sqrt")
#: So many steps that fit are compiled for a plan where such a compile takes minutes, and XLA rejects others in seconds.
MOST_WHOLE = 4


@dataclass(frozen=True)
class Moment:
    """A moment of a full-remat step at which it may take the most bytes.

    Attributes:
        total_bytes: the total bytes of the step if this moment were its peak.
        layers: by the prefix of the kind, how many layers would have what they save in memory.
        unread: the same, for what the layer's gradient reads first (`Value.is_read_first`).
    """

    total_bytes: int
    layers: Mapping[str, int]
    unread: Mapping[str, int]

    def saved_bytes(self, value: Value) -> int:
        """Bytes that the value takes in all layers in which it is live."""
        layers = self.unread if value.is_read_first else self.layers
        prefix = max((prefix for prefix in layers if value.name.startswith(prefix)), key=len, default=None)
        times = max(layers.values(), default=0) if prefix is None else layers[prefix]
        return times * value.num_bytes // value.num_layers


@dataclass(frozen=True)
class Cost:
    """What a compiled step takes.

    Attributes:
        total_bytes: its total bytes.
        step_s: its seconds, as predicted from its kernels.
        moments: for a full-remat step, a function from the names of operations to its moments if those didn't run a second time.
            None where nothing is known of them.
        is_small: whether XLA compiles the step within a second or two.
        is_rejected: whether XLA rejected the step as too large. Its seconds are a guess then, and its bytes may be those of a
            program in which XLA has already made room.
    """

    total_bytes: int
    step_s: float
    moments: Callable[[frozenset[str]], tuple[Moment, ...]] | None = field(default=None, compare=False, repr=False)
    is_small: bool = field(default=False, compare=False)
    is_rejected: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Steps:
    """The steps to plan.

    Attributes:
        layer_at: returns the estimate of a layer at a batch. It may be another one once `nothing` was compiled.
        compile: compiles a policy under a loss at a batch. The planner calls it once for equal arguments.
        num_layers: number of equal layers. 1 where the estimate stands for several kinds of layers (`shared_budget.py`).
        budget_bytes: total bytes that a step may take.
        has_groups: whether policies for groups of layers, such as `every:sqrt`, make sense.
        allows: whether a plan may choose a policy.
        stack_bytes: of unrolled layers, the bytes by which their full-remat step is expected to be below that of a scan.
        most_that_fit: how many steps that fit are compiled at most, unless they are small, where such a compile takes minutes
            and XLA rejects other steps in seconds. None for no limit.
        known: the policies, losses and batches of steps that were compiled before, for other rows of the same command.
        expect: called with how many further compiles the search for a plan takes at most, as soon as that is known.
        begin: begins to compile a step in another thread, which `compile` waits for.
        may_guess: whether a core is idle, to begin a step that `compile` may not be called for.
    """

    layer_at: Callable[[int], LayerEstimate]
    compile: Callable[[Policy, str, int], Cost]
    num_layers: int
    budget_bytes: int
    has_groups: bool = True
    allows: Callable[[Policy], bool] = lambda policy: True
    stack_bytes: int = 0
    most_that_fit: int | None = None
    known: tuple[tuple[Policy, str, int], ...] = ()
    expect: Callable[[int], None] = lambda further: None
    begin: Callable[[Policy, str, int], None] = lambda policy, loss, batch: None
    may_guess: Callable[[], bool] = lambda: False

    @property
    def allows_mixes(self) -> bool:
        """Whether layers may have different policies. XLA compiles each layer of a mix's group."""
        return self.most_that_fit is None

    @property
    def least(self) -> tuple[Policy, ...]:
        """The policies of the least bytes.

        A single layer has no groups, and its gradient runs right after its forward pass.
        """
        least = (NOTHING, SPARSE) if self.has_groups else (NOTHING, Rule("none"))
        return tuple(filter(self.allows, least))

    def bytes_per_sequence(self, batch: int) -> float:
        """Bytes of a layer's input for one sequence, without the layer's parameters."""
        small, large = (self.layer_at(size).input_bytes for size in (batch, 2 * batch))
        return (large - small) / batch

    def fits(self, cost: Cost) -> bool:
        """Whether a compiled step is within the budget."""
        return cost.total_bytes <= self.budget_bytes
