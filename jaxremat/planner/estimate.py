"""One layer as the planner knows it: its problem, families of decisions, and their policies.

For a layer with fused attention there are two families of decisions: those that don't save its result, and those that do in
every layer. Within a family, single layers may save different values.
"""

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from jaxremat.errors import JaxrematError
from jaxremat.knapsack.evaluate import evaluate
from jaxremat.knapsack.hull import Point, lower_hull
from jaxremat.knapsack.problem import Decision, Problem, union
from jaxremat.policy.spec import LayerPolicy, Names, Policy, Rule

#: The number that makes a name unique: `mlp/mul.2` is the third of the values that a layer makes as `mlp/mul`.
_NUMBER = re.compile(r"\.\d+$")


@dataclass(frozen=True)
class LayerEstimate:
    """One layer at one batch.

    Attributes:
        problem: the layer's problem. Its seconds of recomputing and offloading are estimates.
        names: the checkpoint name of each value that is saved by name. Fused attention is saved by its primitive instead.
        alternatives: the same layer by other estimates. Compiled steps choose among the estimates.
        offload_bytes: bytes that the layer may offload to host memory.
        in_scan: whether the layer is the body of a scan over stacked parameters.
        assumption: what the estimate assumes, in words. It tells the estimates of one layer apart.
        allows: whether a plan may choose a policy.
    """

    problem: Problem
    names: dict[int, str]
    alternatives: tuple["LayerEstimate", ...] = ()
    offload_bytes: int = 0
    in_scan: bool = True
    assumption: str = ""
    allows: Callable[[Policy], bool] = lambda policy: True

    @functools.cached_property
    def hull(self) -> tuple[Point, ...]:
        """The lower convex hull of saved bytes and cost over all decisions.

        Raises:
            JaxrematError: the solver ran out of time.
        """
        try:
            return lower_hull(self.problem, max_offload_bytes=self.offload_bytes)
        except TimeoutError as error:
            less = "leave --offload out" if self.offload_bytes else "plan on a machine with less load"
            raise JaxrematError(f"the choice of residuals isn't solved: {error}", next_step=less) from None

    @functools.cached_property
    def families(self) -> tuple["Family", ...]:
        """The decisions without fused attention and, where the layer has some, those that save it."""
        values = self.problem.values
        fused = [op for op in self.problem.ops if op.together and all(values[v].saveable for v in op.outputs)]
        if not fused:
            return (Family(False, self.problem, self.hull),)
        outputs = frozenset(v for op in fused for v in op.outputs)
        without_fused = tuple(replace(v, saveable=v.saveable and n not in outputs) for n, v in enumerate(values))
        without = Family(False, replace(self.problem, values=without_fused))
        always = Family(True, self.problem).keeping(Decision(outputs))
        return tuple(replace(family, hull=replace(self, problem=family.problem).hull) for family in (without, always))

    @functools.cached_property
    def everything(self) -> Decision:
        """The decision that saves all that can be saved."""
        return Decision(frozenset(v for op in self.problem.ops for v in op.outputs if self.problem.values[v].saveable))

    @functools.cached_property
    def input_bytes(self) -> int:
        """Bytes of the layer's inputs, parameters included."""
        return self.problem.num_bytes(self.problem.inputs)

    def run_once(self, decision: Decision) -> frozenset[str]:
        """The names of operations that run once under `decision`, and of the values that they make.

        An operation whose result is saved and then copied out of its stack is not among them: the copy takes the place of the
        recomputed value. A name that another operation has too is left out if that one is recomputed, and not only as a part
        of the kernel that reads it.
        """
        ops, values = self.problem.ops, self.problem.values
        again = set(evaluate(self.problem, decision).recomputed)
        again |= {n for n, op in enumerate(ops) if any(values[v].is_copied for v in decision.save.intersection(op.outputs))}
        written = {n for n in again if not self.problem.is_free(ops[n])}

        def names(numbers: Iterable[int]) -> set[str]:
            made = {values[v].name for n in numbers for v in ops[n].outputs}
            return made | {_NUMBER.sub("", name) for name in made} | {ops[n].name for n in numbers}

        return frozenset(names(set(range(len(ops))) - again) - names(written))

    @functools.cached_property
    def nothing_s(self) -> float:
        """Seconds that saving nothing costs."""
        return evaluate(self.problem, Decision()).cost_s


@dataclass(frozen=True)
class Family:
    """Decisions that have something in common: they all save certain values, in every layer.

    Attributes:
        attention: whether fused attention is saved. It is saved in every layer or in none, as a policy saves it by its
            primitive, which is the same in all layers.
        problem: what is left to decide: the layer's problem, with the values that are saved in any case among its inputs.
        hull: the hull of that problem. Empty where all layers must save the same.
        always: the values that all decisions of the family save.
        always_bytes: bytes on the device that these take in a layer.
        always_s: seconds that saving these costs in a layer.
        beyond_bytes: for a family learned from a compiled step, the bytes that this step took in addition to what it saves, and
            negative where it took less. None for the families that a layer starts with.
    """

    attention: bool
    problem: Problem
    hull: tuple[Point, ...] = ()
    always: Decision = Decision()
    always_bytes: int = 0
    always_s: float = 0.0
    beyond_bytes: int | None = None

    def keeping(self, decision: Decision, never: frozenset[int] = frozenset()) -> "Family":
        """The decisions of this family that save all that `decision` saves, and no value of `never`."""
        save, offload = decision.save - self.always.save, decision.offload - self.always.offload
        problem, values = self.problem, enumerate(self.problem.values)
        free = tuple(replace(v, saveable=False, offloadable=False) if n in never else v for n, v in values)
        made = (replace(op, outputs=tuple(v for v in op.outputs if v not in save | offload)) for op in problem.ops)
        ops, inputs = tuple(op for op in made if op.outputs), (*problem.inputs, *sorted(save | offload))
        offload_s = problem.num_bytes(offload) * problem.offload_s_per_byte
        return replace(
            self,
            problem=replace(problem, values=free, ops=ops, inputs=inputs),
            hull=(),
            always=union(self.always, decision),
            always_bytes=self.always_bytes + problem.num_bytes(save),
            always_s=self.always_s + problem.save_seconds(save) + offload_s,
        )

    def with_working_set_of(self, decision: Decision, beyond_bytes: int) -> "Family":
        """The decisions of this family whose working set is expected to be that of a compiled one.

        They save everything that `decision` saves. They may save further values only if these come before the layer's large
        values in the forward pass. Large values are those of at least half the bytes of the largest one. What is computed from
        a large value is not saved either. `beyond_bytes` is what the compiled step took in addition to what it saves.
        """
        made = {v: self.problem.values[v] for op in self.problem.ops for v in op.outputs}
        num_bytes = {v: value.num_bytes / value.num_layers for v, value in made.items()}
        after = {v for v, size in num_bytes.items() if size >= max(num_bytes.values()) / 2}
        while more := {v for op in self.problem.ops if after.intersection(op.inputs) for v in op.outputs} - after:
            after |= more
        return replace(self.keeping(decision, frozenset(after)), beyond_bytes=beyond_bytes)


@dataclass(frozen=True)
class Candidate:
    """A policy for all layers that the planner may compile.

    Attributes:
        policy: the policy.
        group: numbers of neighbouring layers, and what each of them saves. It is repeated over all layers. Where all have the
            same policy, it has one layer.
        family: the family from which its decisions are.
        saved_bytes: bytes that it saves on the device, in all layers.
        cost_s: seconds that it costs in all layers.
        peak_bytes: bytes by which the peak is above that of the full-remat step, by what is known of that step alone.
        expected_bytes: the same, corrected by compiled steps.
    """

    policy: Policy
    group: tuple[tuple[int, Decision], ...]
    family: Family
    saved_bytes: int
    cost_s: float
    peak_bytes: int = 0
    expected_bytes: int = 0

    @property
    def group_size(self) -> int:
        """Number of layers in the group."""
        return sum(num_layers for num_layers, _ in self.group)

    @property
    def shares(self) -> dict[int, float]:
        """For each saved value, the share of the layers that save it."""
        shares = dict[int, float]()
        for num_layers, decision in self.group:
            shares |= {v: shares.get(v, 0.0) + num_layers / self.group_size for v in decision.save}
        return shares

    def layer_s(self, layer: LayerEstimate) -> float:
        """Seconds that it costs in a layer on average."""
        costs = (num_layers * evaluate(layer.problem, decision).cost_s for num_layers, decision in self.group)
        return sum(costs) / self.group_size

    @property
    def decision(self) -> Decision:
        """What most layers of the group save."""
        return max(self.group, key=lambda part: part[0])[1]


def policy_of(layer: LayerEstimate, decision: Decision, attention: bool) -> LayerPolicy:
    """The policy that saves what `decision` saves, and fused attention if `attention`."""
    chosen = (decision.save, decision.offload)
    save, offload = (tuple(layer.names[v] for v in sorted(values) if v in layer.names) for values in chosen)
    return Names(save, offload, attention) if save or offload else Rule("nothing", attention)
