"""What --model says of a workload of the user's own, as data.

This module imports neither JAX nor the user's code.
"""

from dataclasses import dataclass
from typing import Any

#: What plans and records call the loss of a workload that has only one.
OWN_LOSS = "own"


@dataclass(frozen=True)
class GivenModel:
    """A workload that is requested on the command line.

    Attributes:
        spec: `pkg.mod:attr` or `path.py:attr`.
        words: the words of --model-arg, such as `width=128`.
        layers: the glob patterns of --layers.
        seq_len: the tokens per sequence of --seq-len, for a function with a keyword `seq_len`. None if the flag wasn't given.
        loss: --loss, for a function with a keyword `loss`. None if the flag wasn't given.
        scan_layers: --scan-layers, for a function with a keyword `scan_layers`. None if the flag wasn't given, or is auto.
    """

    spec: str
    words: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    seq_len: int | None = None
    loss: str | None = None
    scan_layers: bool | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords that flags give to the function."""
        given = {"seq_len": self.seq_len, "loss": self.loss, "scan_layers": self.scan_layers}
        return {name: value for name, value in given.items() if value is not None}
