"""What --model says of a workload of the user's own, as data.

This module imports neither JAX nor the user's code.
"""

from dataclasses import dataclass

#: What plans and records call the loss of a workload that isn't the decoder's.
OWN_LOSS = "own"


@dataclass(frozen=True)
class GivenModel:
    """A workload that is requested on the command line.

    Attributes:
        spec: `pkg.mod:attr` or `path.py:attr`.
        words: the words of --model-arg, such as `width=128`.
        layers: the glob patterns of --layers.
        seq_len: the tokens per sequence of --seq-len, for a function with a keyword `seq_len`. None if the flag wasn't given.
    """

    spec: str
    words: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    seq_len: int | None = None
