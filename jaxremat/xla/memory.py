"""What XLA says a compiled program needs, verbatim, and the one number that decides whether it fits."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CompiledMemory:
    """`compiled.memory_analysis()` with XLA's own fields, in bytes on the device; host memory apart.

    `total_bytes` is what the allocator must supply and decides whether a program fits. `peak_bytes` is XLA's
    `peak_memory_in_bytes`, another quantity, never mixed with it. Left out by XLA: the CUDA context, workspaces that
    libraries take themselves, autotuning, fragmentation.

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

    @property
    def total_bytes(self) -> int:
        """Arguments, outputs and temporaries, less what outputs share with (donated) arguments."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


def read_memory(compiled: Any) -> CompiledMemory:
    """The memory analysis of `compiled`, a `jax.stages.Compiled`."""
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
