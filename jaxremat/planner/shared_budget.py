"""Makes one layer of several kinds of layers, which are planned within one budget.

A program may have more than one kind of layers: those of an encoder and those of a decoder, or dense ones and ones with experts.
Each kind saves values of its own. All of them share the budget, and can't be planned one by one.

The planner plans equal layers. Here all kinds become a single layer, which is planned with `num_layers=1`. It has the values and
operations of one layer of each kind. Their bytes and seconds are those of all layers of the kind together, and their names begin
with the name of the kind. The 0/1 program over this layer finds the best of all choices in which the layers of one kind save the
same. So there are no mixes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxremat.knapsack.problem import Op, Problem, Value
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.policy.spec import Policy


@dataclass(frozen=True)
class EqualLayers:
    """Equal layers, one after the other.

    Attributes:
        layer: the estimate of one of them.
        num_layers: how many there are.
        prefix: the beginning of the checkpoint names of their values, such as `encoder/`. Empty where there is one kind.
    """

    layer: LayerEstimate
    num_layers: int
    prefix: str = ""

    @property
    def has_groups(self) -> bool:
        """Whether policies for groups of layers make sense: there is more than one layer of a kind."""
        return self.num_layers > 1 or any(value.num_layers > 1 for value in self.layer.problem.values)


def as_one(kinds: Sequence[EqualLayers]) -> EqualLayers:
    """The single layer to plan in place of all layers of several kinds.

    One kind stays as it is. A kind that may not offload anything can't do so in the single layer either. The bytes that the
    others may offload are shared among them.

    Estimates are combined pairwise: the first alternative of each kind with the first ones of the others. A kind with fewer
    alternatives enters the remaining ones with its first estimate.

    Raises:
        ValueError: there is no kind, two kinds have the same prefix or checkpoint name, or offloading a byte has different
            prices.
    """
    if not kinds:
        raise ValueError(f"a plan takes at least one kind of layers, got {list(kinds)}")
    if len(kinds) == 1:
        return kinds[0]
    checkpoint_names = [name for kind in kinds for name in kind.layer.names.values()]
    for what, names in (("prefix", [kind.prefix for kind in kinds]), ("checkpoint name", checkpoint_names)):
        if twice := sorted(name for name, times in Counter(names).items() if times > 1):
            raise ValueError(f"two kinds of layers have the same {what}: {', '.join(twice)}")
    estimates = [[kind.layer, *kind.layer.alternatives] for kind in kinds]
    most = max(map(len, estimates))
    padded = [[*of_kind, *[of_kind[0]] * (most - len(of_kind))] for of_kind in estimates]
    first, *others = (
        _combined([replace(kind, layer=layer) for kind, layer in zip(kinds, layers, strict=True)])
        for layers in zip(*padded, strict=True)
    )
    return EqualLayers(replace(first, alternatives=tuple(others)), num_layers=1)


def one_of_each(kinds: Sequence[EqualLayers]) -> LayerEstimate:
    """The estimate of one layer of each kind, with the bytes and seconds of that one layer."""
    return as_one([replace(kind, num_layers=1) for kind in kinds]).layer


def for_kind(policy: Policy, kind: EqualLayers) -> Policy:
    """The part of a policy for the layers of one kind.

    A list of names is cut to the names that their values have.
    """
    own = set(kind.layer.names.values())
    return policy.map_layers(lambda of_layer: of_layer.only(own))


def _combined(kinds: list[EqualLayers]) -> LayerEstimate:
    """The estimate of the layer that stands for all kinds, by one estimate of each.

    It has no alternatives. The price of saving a byte becomes part of each value's own price, because it differs between kinds:
    saving costs more inside a scan than in unrolled layers.
    """
    offloading = [kind.layer.problem.offload_s_per_byte for kind in kinds if kind.layer.offload_bytes]
    if len(set(offloading)) > 1:
        raise ValueError(f"offloading a byte has one price in all kinds of layers, got {offloading}")
    values, ops, inputs, names = list[Value](), list[Op](), list[int](), dict[int, str]()
    for kind in kinds:
        problem, times, start = kind.layer.problem, kind.num_layers, len(values)
        may_offload = kind.layer.offload_bytes > 0
        values += [
            replace(
                value,
                name=_prefixed(value.name, kind.prefix),
                num_bytes=times * value.num_bytes,
                save_s=times * (value.save_s + value.num_bytes * problem.save_s_per_byte),
                offloadable=value.offloadable and may_offload,
                num_layers=times * value.num_layers,
            )
            for value in problem.values
        ]
        ops += [
            replace(
                op,
                name=_prefixed(op.name, kind.prefix),
                inputs=tuple(start + v for v in op.inputs),
                outputs=tuple(start + v for v in op.outputs),
                recompute_s=times * op.recompute_s,
                flops=times * op.flops,
            )
            for op in problem.ops
        ]
        inputs += [start + v for v in problem.inputs]
        names |= {start + v: name for v, name in kind.layer.names.items()}
    return LayerEstimate(
        problem=Problem(tuple(values), tuple(ops), tuple(inputs), 0.0, offloading[0] if offloading else 0.0),
        names=names,
        offload_bytes=sum(kind.num_layers * kind.layer.offload_bytes for kind in kinds),
        in_scan=all(kind.layer.in_scan for kind in kinds),
        assumption="; ".join(dict.fromkeys(kind.layer.assumption for kind in kinds)),
        allows=lambda policy: all(kind.layer.allows(policy) for kind in kinds),
    )


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith(prefix) else prefix + name
