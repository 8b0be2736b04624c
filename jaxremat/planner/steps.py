"""What a planner asks about steps: their layer as a problem, what compiling them gives, and whether they fit."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxremat.planner.candidates import LayerEstimate
from jaxremat.policy.spec import NOTHING, Every, Policy, Rule

#: Where the inputs of all layers don't fit, or the least bytes are asked for.
SPARSE = Every("sqrt", NOTHING)


@dataclass(frozen=True)
class Cost:
    """A compiled step: its total bytes and its seconds, predicted from its kernels."""

    total_bytes: int
    step_s: float


@dataclass(frozen=True)
class Steps:
    """What is planned: a layer by batch, the compiler (called once for equal arguments), the layers, and the budget."""

    layer_at: Callable[[int], LayerEstimate]
    compile: Callable[[Policy, str, int], Cost]
    num_layers: int
    budget_bytes: int

    @property
    def least(self) -> tuple[Policy, ...]:
        """The policies that keep the least: one layer has no groups, and is run at once when its gradient is taken."""
        return (NOTHING, SPARSE) if self.num_layers > 1 else (NOTHING, Rule("none"))

    def fits(self, cost: Cost) -> bool:
        """Whether a compiled step is within the budget."""
        return cost.total_bytes <= self.budget_bytes

    def rank(self, cost: Cost) -> tuple[bool, float]:
        """Sorts what fits first, by seconds; what doesn't, by bytes."""
        return (False, cost.step_s) if self.fits(cost) else (True, cost.total_bytes)
