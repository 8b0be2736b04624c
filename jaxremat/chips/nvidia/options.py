"""XLA's options for NVIDIA's GPUs, and the presets of `--xla-preset`.

XLA can't autotune for a GPU that isn't in the machine. It could then run each matmul as a Triton fusion with tiles of its
default size, or as a cuBLAS call. This package chooses cuBLAS, for two reasons. The first reason is that XLA's autotuner had
chosen cuBLAS for most matmuls in two profiles of real GPUs: 147 of 147 on an H100, and 175 of 223 on an A100 (test data of
NVIDIA's JAX-Toolbox, 2024). The second reason is that default tiles don't fit every shape. XLA rejects rows that no power of
two divides, such as those of 1000 tokens.

Where Triton fusions are possible, XLA doesn't pad the rows of matrices to multiples of 8 for cuBLAS. Of the programs that are
compiled here, the pass that pads would change those whose vocabulary is no multiple of 8. So the pass is skipped. On an H100
gpt2's step had then the bytes of the step compiled there to 6 kB, and 57.7 ms (56.4 predicted; 50.0 with the pass).

With jax 0.11.2 XLA lets a cuBLAS call write into a slice, and runs the call twice if something else reads its result too: in a
scan under `dots+attention` llama3.2-1b executed 74.5 TFLOP in place of the 64.6 that the step executes which is compiled on the
device. So that is off. It changes no FLOPs with jax 0.10.2 and 0.12.0.
"""

from typing import Any

from jaxremat.chips.chip import CompilerOptions, MatmulSwitch

TRITON, _AUTOTUNE = "xla_gpu_enable_triton_gemm", "xla_gpu_autotune_level"
SLICES = "xla_gpu_enable_dynamic_slice_fusion"
PADDING = "cublas-pad-for-gemms"

#: The options of each preset by the preset's name.
#:
#: * `default` sets nothing.
#: * `latency-hiding` starts a collective before its result is needed, so that kernels run meanwhile.
#: * `jax-toolbox` adds the flags that MaxText and NVIDIA's JAX-Toolbox set for training. Small collectives are combined up to
#:   these bytes, collectives of a loop are pipelined over its iterations, and two iterations share no buffers.
_PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "latency-hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "jax-toolbox": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_gather_combine_threshold_bytes": 2**30,
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**30,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**27,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_all_reduce": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_enable_while_loop_double_buffering": True,
    },
}

OPTIONS = CompilerOptions(
    # Without a device, XLA has nothing to tune on, and the attempt to autotune takes a third of the compile time. LLVM's
    # optimizations take a quarter of it in a scan. No kernel is run, and the program around the kernels is the same without them.
    deviceless={_AUTOTUNE: 0, TRITON: False, SLICES: False, "xla_backend_optimization_level": 0},
    repeatable={"xla_gpu_exclude_nondeterministic_ops": True},
    tuned_folder="xla_gpu_per_fusion_autotune_cache_dir",
    kernel_cache="xla_gpu_kernel_cache_file",
    matmuls=MatmulSwitch(TRITON, on="triton", off="cublas", autotune=_AUTOTUNE),
    presets=_PRESETS,
    # Where a schedule takes more bytes than a share of the pool, XLA makes one with less overlap.
    pool_presets=("latency-hiding", "jax-toolbox"),
)
