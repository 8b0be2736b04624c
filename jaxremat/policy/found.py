"""The repeated layers that were found in a traced program, as a person reads them.

For a model of 12 unrolled blocks, `find_layers(loss, params, batch).lines()` gives:

    12 layers, blocks_0 to blocks_11, found by their scopes, 0.023 GiB between two layers
    left as it is: a loop of 8 iterations at train.py:31: it reads no parameters by iteration
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxremat.policy.called import Function
from jaxremat.policy.names import NamedValue, named_values
from jaxremat.units import gib

#: How layers are found: bodies of a scan over parameters, iterations of another scan, checkpoints that the author wrote, named
#: scopes, repeated operations.
FoundBy = Literal["scan", "loop", "checkpoint", "scope", "repeat"]

_HOW = {
    "scan": "found as the body of a loop over stacked parameters",
    "loop": "found as the iterations of a scan",
    "checkpoint": "found by the checkpoints around them, whose policy is replaced",
    "scope": "found by their scopes",
    "repeat": "found as repeated operations",
}


@dataclass(frozen=True, eq=False)
class Variant:
    """Layers of a kind that have the same operations exactly.

    Attributes:
        num_layers: number of these layers.
        function: one of them, as `Kind.function`.
        args: the shapes of its arguments.
    """

    num_layers: int
    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Kind:
    """Layers that are alike: the same matmuls and convolutions of the same shapes.

    Attributes:
        label: the names of the layers, `blocks_0 to blocks_11`, or their place, `at train.py:31 in encoder`.
        found_by: how they were found.
        num_layers: number of these layers.
        in_scan: whether they run in a scan, of which one iteration is a layer.
        cut_bytes: bytes of the values that come to a layer from those before it. Of what one layer makes and several read, the
            first of these counts it, and nothing made before all layers counts. The mean over the layers.
        function: one of the layers of which there are the most, as a function of arrays. Each of its floating-point values has a
            checkpoint name. With several kinds the names begin with `prefix`.
        args: the shapes of its arguments, each a `jax.ShapeDtypeStruct`.
        prefix: the beginning of this kind's own checkpoint names, such as `encoder/`. Empty where there is one kind.
        others: the layers that differ from `function` in other operations than matmuls and convolutions.
        frozen: the numbers of those leaves of `args` that are parameters and aren't trained.
        module: the named scope that each layer is all of, as a module's call is, traced as the module alone is. Empty for other
            layers.
        checkpoint: the line at which the author's checkpoint around a layer is called, as `file:line`. Empty where there is none.
        called: gives the function of which each layer is one call, by the lines where its operations were traced. Of a class it
            is `__call__`. Other kinds may be calls of it too, and nothing else is. None for other layers.
        is_stack: whether a policy of several layers counts these layers alone, and they do no more than hand on what the next one
            reads: a scan also has no other results.
        names_alone: gives, by checkpoint name of a value, the name that it has where the layer is named alone. That is empty
            where layers of the kind differ in it.
    """

    label: str
    found_by: FoundBy
    num_layers: int
    in_scan: bool
    cut_bytes: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    prefix: str = ""
    others: tuple[Variant, ...] = ()
    frozen: frozenset[int] = frozenset()
    module: str = ""
    checkpoint: str = ""
    called: Callable[[], Function | None] = lambda: None
    is_stack: bool = True
    names_alone: Callable[[], Mapping[str, str]] = dict

    def values(self) -> Counter[NamedValue]:
        """The named values of a layer in program order, with how often all layers have each."""
        most = Variant(self.num_layers - sum(other.num_layers for other in self.others), self.function, self.args)
        counts = Counter[NamedValue]()
        for some in (most, *self.others):
            for value in named_values(some.function, *some.args):
                counts[value] += some.num_layers
        return counts

    def line(self) -> str:
        """The layers in a sentence without a full stop."""
        unit = "step" if self.found_by == "loop" else "layer"
        name = self.prefix.rstrip("/")
        many = f"{self.num_layers} {unit}{'s' * (self.num_layers > 1)}{f' ({name})' * (not self.label.startswith(name))}"
        where = f" {self.label}" if self.label.startswith(("at ", "in ")) else f", {self.label}" if self.label else ""
        return f"{many}{where}, {_HOW[self.found_by]}, {gib(self.cut_bytes)} between two {unit}s"


@dataclass(frozen=True)
class LeftAlone:
    """A loop, a checkpoint or other part of the program that isn't layers.

    A policy leaves it as it is.

    Attributes:
        what: what it is, such as `a loop of 8 iterations`.
        where: `file:line`. Empty where JAX has no traceback.
        why: why it isn't taken for layers.
    """

    what: str
    where: str
    why: str

    def line(self) -> str:
        """The part in a sentence without a full stop."""
        return f"left as it is: {self.what}{' at ' if self.where else ''}{self.where}: {self.why}"


@dataclass(frozen=True, eq=False)
class FoundLayers:
    """The layers of a program.

    Attributes:
        kinds: the kinds of layers, in the program's order. Empty where no layers were found.
        kept: what was looked at and isn't layers.
        looked_at: what was searched, a phrase each, for an error where nothing was found.
        has_complex: whether a layer makes complex values.
    """

    kinds: tuple[Kind, ...]
    kept: tuple[LeftAlone, ...] = ()
    looked_at: tuple[str, ...] = ()
    has_complex: bool = False

    @property
    def num_layers(self) -> int:
        """Number of all layers."""
        return sum(kind.num_layers for kind in self.kinds)

    def values(self) -> Counter[NamedValue]:
        """The named values of a layer of each kind, with how often all layers have each."""
        counts = Counter[NamedValue]()
        for kind in self.kinds:
            counts.update(kind.values())
        return counts

    def lines(self) -> list[str]:
        """What was found, a line each."""
        found = [kind.line() for kind in self.kinds] or [f"none found: looked at {'; '.join(self.looked_at)}"]
        recomputed = ["complex values are recomputed under every policy but none: JAX can't save them in a checkpoint"]
        return [*found, *(left.line() for left in self.kept), *recomputed * self.has_complex]
