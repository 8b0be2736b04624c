"""The matmul ceiling of a device: `python -m experiments.peer.matmul --size 8192` multiplies bf16 matrices of random numbers.

Random ones, since a GPU multiplies zeros faster than it may go on random data. On an H200 the kernel alone takes 1.34 ms, and a
product that is dispatched and waited for alone 1.71 ms.
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
    at_once: int = 8
    """Products that are timed together: they are queued on the device, so that only the first waits for its dispatch."""


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
        jax.block_until_ready([multiply(a, b) for _ in range(flags.at_once)])
        seconds.append((time.perf_counter() - started) / flags.at_once)
    median_s = statistics.median(seconds[3:])
    device = jax.devices()[0].device_kind
    print(
        json.dumps({"size": flags.size, "device": device, "median_s": median_s, "flops_per_s": 2 * flags.size**3 / median_s})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
