"""The settings of a run: everything that the trials of its policies and batches share, and the samples of its steps.

run = Run(factory, TrainConfig(), load_target("h100-80gb"), budget_bytes=60 * 2**30)
run.workload_at(8)      # the workload at batch 8
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxremat.config import Layout, TrainConfig, divisors
from jaxremat.mesh.sharding import LeafOnMesh
from jaxremat.search.batch import MAX_BATCH
from jaxremat.step.step import arguments_on_mesh, state_and_argument_bytes
from jaxremat.workload.factory import WorkloadFactory
from jaxremat.workload.given import OWN_LOSS
from jaxremat.workload.workload import MAX_CONCRETE_BYTES, Workload
from jaxremat.xla.lint_input import Remedies
from jaxremat.xla.target import Target


@dataclass(frozen=True)
class Run:
    """Everything about a run but the policy and the batch.

    Attributes:
        factory: makes the workload at a batch.
        train: the training step; with a `global_batch`, its `accumulate` follows from the batch.
        target: what the step is compiled for.
        budget_bytes: what a step may take on the device.
        global_batch: samples per step and member of the mesh, in microbatches of whatever batch is tried; None where the batch
            decides.
        xla_remat: whether XLA's own rematerialization pass runs.
        num_warmup: steps that aren't timed.
        num_steps: steps that are.
        measures: whether steps are run in this process; False where another process does that.
        budget_terms: how the budget is made up, in words.
        own_optimizer: whether a workload's own optimizer is used, if it has one, and not that of `train`.
        xla_preset: the preset of XLA's options, of `xla/options.py`.
        pool_bytes: the size of the allocator's pool in a job. None where it isn't known.
    """

    factory: WorkloadFactory
    train: TrainConfig
    target: Target
    budget_bytes: int
    global_batch: int | None = None
    xla_remat: bool = False
    num_warmup: int = 2
    num_steps: int = 10
    measures: bool = True
    budget_terms: str = ""
    own_optimizer: bool = True
    xla_preset: str = "default"
    pool_bytes: int | None = None

    @property
    def num_members(self) -> int:
        """How many members of the mesh have samples of their own. The one batch of a whole step is that of all of them."""
        one_batch = self.workload_at().step is not None and not self.factory.has_free_batch
        return 1 if one_batch else self.target.mesh_shape.num_members

    def train_at(self, batch: int) -> TrainConfig:
        """The training step whose microbatches have `batch` samples."""
        if self.global_batch is None:
            return self.train
        return dataclasses.replace(self.train, accumulate=self.global_batch // batch)

    def batches(self, max_batch: int | None) -> Sequence[int]:
        """The batches to choose among, in rising order: with a `global_batch`, its divisors.

        Without a `max_batch` they end where a workload that is given as arrays, and not as shapes, has too many bytes of them.
        """
        if max_batch is None:
            max_batch = min(MAX_BATCH, self._largest_made())
        if self.global_batch is None:
            return range(1, max_batch + 1)
        return [batch for batch in divisors(self.global_batch) if batch <= max_batch]

    def _largest_made(self) -> int:
        """The largest batch at which the arrays of the workload are within `MAX_CONCRETE_BYTES`."""
        workload = self.workload_at()
        if workload.step is not None or not workload.num_samples:
            return MAX_BATCH
        sizes = [
            sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree) if not isinstance(leaf, jax.ShapeDtypeStruct))
            for tree in (workload.params, workload.batch)
        ]
        if not sizes[1]:
            return MAX_BATCH
        return max(1, (MAX_CONCRETE_BYTES - sizes[0]) * workload.num_samples // sizes[1] // self.num_members)

    def workload_at(self, batch: int | None = None) -> Workload:
        """The workload whose microbatches have `batch` samples; for None, the one that the factory makes without a batch."""
        made = self.factory.at(batch, self.train)
        return made if self.own_optimizer or made.optimizer is None else dataclasses.replace(made, optimizer=None)

    def with_loss(self, loss: str) -> "Run":
        """The run with another loss of the decoder's. The run itself if the workload has only its own loss."""
        if self.factory.losses() == (OWN_LOSS,) or loss == OWN_LOSS:
            return self
        return dataclasses.replace(self, train=dataclasses.replace(self.train, loss=loss))

    def with_layout(self, layout: Layout | None) -> "Run":
        """The run with its layers in another layout. The run itself for None."""
        return self if layout is None else dataclasses.replace(self, factory=self.factory.with_layout(layout))

    def with_optimizer(self, name: Any) -> "Run":
        """The run with another optimizer."""
        return dataclasses.replace(self, train=dataclasses.replace(self.train, optimizer=name), own_optimizer=False)

    @property
    def reserve_bytes(self) -> int | None:
        """What the budget leaves of each GPU of a mesh, for what is outside of XLA's numbers. None where that isn't known."""
        if self.target.mesh is None or self.target.kind != "deviceless" or self.target.memory_bytes is None:
            return None
        return max(0, self.target.memory_bytes - self.budget_bytes)

    def state_bytes(self) -> int:
        """Bytes of the parameters and the optimizer state on a device, from their shapes alone."""
        if self.target.mesh is None:
            return state_and_argument_bytes(self.workload_at(), self.train)
        return sum(leaf.device_bytes for leaf in self.arguments_on_mesh(1) if not leaf.is_batch)

    def arguments_on_mesh(self, batch: int) -> tuple[LeafOnMesh, ...]:
        """How the arguments of the step at `batch` lie on the mesh. Empty for one device."""
        mesh = self.target.mesh
        if mesh is None:
            return ()
        return arguments_on_mesh(mesh, self.workload_at(batch * self.num_members), self.train_at(batch))

    @property
    def optimizer(self) -> str | None:
        """What records call the optimizer: `own` for the workload's own, None for a workload that is a step."""
        workload = self.workload_at()
        if workload.step is not None:
            return None
        return self.train.optimizer if workload.optimizer is None else "own"

    @property
    def remedies(self) -> Remedies:
        """What a remedy of the lint can be: a flag, where the workload has it, or code."""
        if self.workload_at().step is not None:
            return "code"
        return "flags" if self.factory.facts(self.train).loss == OWN_LOSS else "decoder flags"


def samples_in(run: Run, batch: int) -> int | None:
    """Samples in a microbatch. None for a step with one batch of its own, which nobody has counted."""
    workload = run.workload_at(batch)
    if workload.step is None:
        return workload.num_samples
    return batch if run.factory.has_free_batch else None
