"""The matmul ceiling of a device: `python -m experiments.peer.matmul --size 8192` multiplies bf16 matrices of random numbers.

Random ones, since a GPU multiplies zeros faster than it may go on random data.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass

from experiments.common import flags_of


@dataclass(frozen=True)
class Flags:
    """How many FLOP/s a large matmul reaches."""

    size: int = 8192
    repeats: int = 10


def main(argv: list[str] | None = None) -> int:
    """Prints one line of JSON."""
    import jax
    import jax.numpy as jnp

    flags = flags_of(Flags, argv, "experiments.peer.matmul")
    shape = (flags.size, flags.size)
    a, b = (jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
    multiply = jax.jit(lambda a, b: a @ b)
    seconds = []
    for _ in range(3 + flags.repeats):
        started = time.perf_counter()
        jax.block_until_ready(multiply(a, b))
        seconds.append(time.perf_counter() - started)
    median_s = statistics.median(seconds[3:])
    device = jax.devices()[0].device_kind
    print(
        json.dumps({"size": flags.size, "device": device, "median_s": median_s, "flops_per_s": 2 * flags.size**3 / median_s})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
