"""Which parameters a training updates, such as those of a LoRA adapter.

    trained_paths("lora_*", {"mlp/kernel": ..., "mlp/lora_a": ...})    # {"mlp/lora_a"}

A pattern is a glob of one name of a parameter's path, or of several that follow each other: `embed*`, `layers/attention` and
`layers/*/kernel` each match all parameters below. The frozen parameters have no gradients and no optimizer state.
"""

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxremat.errors import UsageError, nearest

#: Patterns of the trained parameters, or whether one is, by its path and its shape. None trains all.
Trainable = str | tuple[str, ...] | Callable[[str, Any], bool] | None


@dataclass(frozen=True)
class Narrowed:
    """The patterns of flags, among what a workload itself trains.

    Attributes:
        only: the patterns of --train-only. Empty for all.
        freeze: the patterns of --freeze.
        own: what the workload itself says.
    """

    only: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    own: Trainable = None

    def __bool__(self) -> bool:
        return bool(self.only or self.freeze)

    def config(self) -> dict[str, Any]:
        """The patterns as records have them. Empty where there are none."""
        return {name: list(patterns) for name, patterns in (("train_only", self.only), ("freeze", self.freeze)) if patterns}


def trained_paths(trainable: "Trainable | Narrowed", leaves: Mapping[str, Any]) -> frozenset[str]:
    """The paths of the trained parameters.

    Args:
        trainable: which ones are trained.
        leaves: by path, the shapes of the parameters that can be differentiated.

    Raises:
        UsageError: a pattern matches no parameter, or nothing is trained.
    """
    match trainable:
        case None:
            return frozenset(leaves)
        case Narrowed(only, freeze, own):
            trained = trained_paths(own, leaves)
            trained &= _matching("--train-only", only, leaves) if only else trained
            trained -= _matching("--freeze", freeze, leaves)
        case str() | tuple():
            trained = _matching("trainable", (trainable,) if isinstance(trainable, str) else trainable, leaves)
        case _:
            trained = frozenset(path for path, leaf in leaves.items() if trainable(path, leaf))
    if not trained:
        raise UsageError(
            "no parameter is trained",
            allowed="at least one trained parameter",
            cause="the patterns freeze all of them" if isinstance(trainable, Narrowed) else "trainable= chooses none",
            next_step=f"freeze fewer of: {_some(leaves)}",
        )
    return trained


def _matching(where: str, patterns: Iterable[str], leaves: Mapping[str, Any]) -> frozenset[str]:
    """The paths that a pattern matches.

    Raises:
        UsageError: one of the patterns matches none.
    """
    found = frozenset[str]()
    for pattern in patterns:
        matched = {path for path in leaves if _matches(path.split("/"), pattern.strip("/").split("/"))}
        if not matched:
            names = dict.fromkeys(name for path in leaves for name in path.split("/"))
            raise UsageError(
                f"{where} got {pattern!r}, which matches no parameter",
                allowed=f"globs of the names in: {_some(leaves)}",
                next_step=nearest(pattern, names)
                or "a name of a path, such as 'embed*', or several, such as 'layers/*/kernel'",
            )
        found |= matched
    return found


def _matches(names: list[str], pattern: list[str]) -> bool:
    runs = (names[first : first + len(pattern)] for first in range(len(names) - len(pattern) + 1))
    return any(all(map(fnmatch.fnmatchcase, run, pattern)) for run in runs)


def _some(leaves: Mapping[str, Any]) -> str:
    paths = list(leaves)
    return ", ".join(paths[:6]) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")
