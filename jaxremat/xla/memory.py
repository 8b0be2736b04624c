"""XLA's numbers for a compiled program's memory, and the total that decides whether it fits.

For example, 10 GiB of arguments, 10 GiB of outputs that reuse the memory of all arguments, and 30 GiB of temporaries make
a total of 40 GiB.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CompiledMemory:
    """The numbers of `compiled.memory_analysis()`, in bytes.

    The fields whose names start with `host_` are for pinned host memory. All others are for device memory.

    `total_bytes` is the memory that the allocator must supply. It decides whether a program fits. `peak_bytes` is XLA's
    `peak_memory_in_bytes`. That is a different quantity, and this package never mixes the two.

    Where XLA itself rejects a program that is too large, as for a TPU, no field is the number that it compares with the device's
    memory. `needed_bytes` is that number, by XLA's own words, and `total_bytes` is it too. None where XLA compares nothing.

    XLA's numbers don't include memory outside the allocator, such as the driver's context and the workspaces that libraries
    allocate themselves. They don't include the memory of autotuning, or the allocator's fragmentation.

    References:
        xla/pjrt/pjrt_executable.h, `CompiledMemoryStats`.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    generated_code_bytes: int
    host_argument_bytes: int
    host_output_bytes: int
    host_alias_bytes: int
    host_temp_bytes: int
    peak_bytes: int
    needed_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Arguments, outputs and temporaries, minus bytes that outputs share with donated arguments.

        Where XLA says what the program needs, it is that.
        """
        if self.needed_bytes is not None:
            return self.needed_bytes
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


def memory_of_rejected(needed_bytes: int) -> CompiledMemory:
    """The memory of a program that XLA rejected as too large: what it needs, and nothing else."""
    return CompiledMemory(*[0] * 10, needed_bytes=needed_bytes)


def read_memory(compiled: Any) -> CompiledMemory:
    """Reads the memory analysis of `compiled`, a `jax.stages.Compiled`."""
    stats = compiled.memory_analysis()
    return CompiledMemory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        generated_code_bytes=stats.generated_code_size_in_bytes,
        host_argument_bytes=stats.host_argument_size_in_bytes,
        host_output_bytes=stats.host_output_size_in_bytes,
        host_alias_bytes=stats.host_alias_size_in_bytes,
        host_temp_bytes=stats.host_temp_size_in_bytes,
        peak_bytes=stats.peak_memory_in_bytes,
    )
