"""What --model says of a workload of the user's own, as data.

This module imports neither JAX nor the user's code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        keywords: what --seq-len, --loss and --scan-layers give to keywords of a function: `seq_len`, `loss` and `scan_layers`.
            Flags that weren't given aren't there.
    """

    spec: str
    words: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
