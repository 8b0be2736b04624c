"""What takes the memory of a step at its peak, as an `ExplainRecord`.

The bytes are listed by category, by label, and for the largest buffers.
"""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jaxremat.errors import CompileError
from jaxremat.mesh.sharding import LeafOnMesh
from jaxremat.policy.spec import Policy
from jaxremat.policy.tree import path_text
from jaxremat.trial.details import HeldBytes, LargeBuffer, PeakPlace, StateOnMesh
from jaxremat.trial.findings import findings
from jaxremat.trial.record import ExplainRecord
from jaxremat.trial.row import About, error_kind, first_line
from jaxremat.trial.trials import Trials
from jaxremat.xla.buffers import Holder, MemoryMap, attribution, by_source, held, holders, one_shape
from jaxremat.xla.categories import role_of
from jaxremat.xla.lint_input import largest_logits
from jaxremat.xla.step_facts import Finding


def explain(
    trials: Trials, policy: Policy, batch: int, num_largest: int, *, requested: str | None = None, lint: bool = False
) -> ExplainRecord:
    """The record of a step.

    On an attached GPU a step that fits is run too, for the allocator's figures.

    Args:
        trials: the trials that the step is one of, with `with_dump`.
        policy: the policy.
        batch: sequences of a microbatch.
        num_largest: how many buffers to list, the largest first. Those of equal layers count as one.
        requested: the policy as it was requested. None takes the policy's own text.
        lint: whether the lint looks at the step too.
    """
    about = About(trials, policy, requested or str(policy), batch, "explain")
    try:
        compilation = trials.compile(policy, batch)
        memory_map = compilation.memory_map
    except CompileError as error:
        return ExplainRecord(**about.fields(), error=str(error), error_kind=error_kind(error))
    fits, timing = memory_map.total_bytes <= trials.budget_bytes, None
    failure: dict[str, Any] = {}
    if fits and trials.target.kind == "attached" and trials.can_run:
        try:
            timing = trials.measure(batch, compilation)
        except Exception as error:  # JAX's own error, where the device runs out of memory: the record says so
            failure = {"error": first_line(error), "error_kind": error_kind(error)}
    groups = holders(held(memory_map, memory_map.peak))
    parts = attribution(memory_map)
    return ExplainRecord(
        **about.fields(),
        total_bytes=memory_map.total_bytes,
        host_bytes=memory_map.host_bytes,
        peak_bytes=compilation.memory.peak_bytes,
        fits=fits,
        attribution=parts,
        sources=by_source(parts),
        held=by_label(groups),
        state=state_on_mesh(trials),
        largest=tuple(map(_described, groups[:num_largest])),
        peak=_where(memory_map),
        allocator=timing.allocator if timing else None,
        findings=linted(about) if lint else None,
        **failure,
    )


def linted(about: About) -> tuple[Finding, ...]:
    """What all rules find in a step.

    Where the logits are the largest buffer, the step is compiled with the chunked loss too, so that a rule can say what that
    would take. A step with the chunked loss takes what it takes.
    """
    trials, policy, batch = about.trials, about.policy, about.batch
    compilation = trials.compile(policy, batch)
    chunked_bytes = compilation.memory.total_bytes if trials.train.loss == "chunked" else None
    chunked = dataclasses.replace(trials.with_loss("chunked"), with_dump=False)
    if trials.train.loss == "full" and chunked.train != trials.train and largest_logits(compilation.memory_map):
        with contextlib.suppress(CompileError):
            chunked_bytes = chunked.compile(policy, batch).memory.total_bytes
    return findings(
        compilation,
        about.requested,
        policy,
        trials.remedies,
        trials.target,
        arguments=trials.arguments_on_mesh(batch),
        chunked_bytes=chunked_bytes,
    )


def by_label(groups: Sequence[Holder]) -> tuple[HeldBytes, ...]:
    """The bytes of each category and label, the most bytes first.

    The buffers of equal layers are one entry.
    """
    labelled: dict[tuple[str, str], list[Holder]] = defaultdict(list)
    for group in groups:
        labelled[group.buffers[0].category, group.label].append(group)
    rows = [
        HeldBytes(
            category=category,
            label=label,
            num_bytes=sum(group.num_bytes for group in some),
            num_buffers=sum(len(group.buffers) for group in some),
            num_layers=sum(buffer.num_layers for group in some for buffer in group.buffers),
            shape=one_shape(some),
            source=some[0].buffers[0].source,
        )
        for (category, label), some in labelled.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.num_bytes))


def state_on_mesh(trials: Trials) -> tuple[StateOnMesh, ...]:
    """How the parameters and the optimizer's state are divided over a mesh.

    Empty for one device.
    """
    parts: dict[str, list[LeafOnMesh]] = defaultdict(list)
    frozen = {f"params/{path_text(path)}" for path, _ in trials.workload_at().frozen}
    for leaf in trials.arguments_on_mesh():
        if not leaf.is_batch:
            parts["frozen parameters" if leaf.name in frozen else role_of(leaf.name)].append(leaf)
    return tuple(
        StateOnMesh(
            category=category,
            num_bytes=sum(leaf.num_bytes for leaf in leaves),
            divided_bytes=sum(leaf.device_bytes for leaf in leaves if leaf.axes),
            whole_bytes=sum(leaf.device_bytes for leaf in leaves if not leaf.axes),
        )
        for category, leaves in parts.items()
    )


def _described(group: Holder) -> LargeBuffer:
    first = group.buffers[0]
    return LargeBuffer(
        category=first.category,
        label=group.label,
        shape=first.shape,
        num_layers=sum(buffer.num_layers for buffer in group.buffers),
        name=first.name,
        op_name=first.op_name,
        source=first.source,
        num_bytes=group.num_bytes,
        num_buffers=len(group.buffers),
    )


def _where(memory_map: MemoryMap) -> PeakPlace:
    return PeakPlace(
        position=memory_map.peak,
        num_positions=len(memory_map.program),
        phase=memory_map.phase_at(memory_map.peak),
        **dataclasses.asdict(memory_map.program[memory_map.peak]),
    )
