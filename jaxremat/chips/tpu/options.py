"""XLA's options for TPUs, and the preset of `--xla-preset`.

`maxtext-tpu` has the flags with which published recipes train dense models on v6e. A kernel may use more of the memory on the
chip, collectives run beside matmuls in one fusion, and matmuls aren't divided into the steps of collectives. Such programs take
less memory, and many minutes to compile. The libtpu of jax 0.12 takes these fusions on v5e alone, and rejects them on v6e.

References:
    AI-Hypercomputer/tpu-recipes, training/trillium; AI-Hypercomputer/maxtext, `xla_flags_library.py`.
"""

from jaxremat.chips.chip import CompilerOptions

OPTIONS = CompilerOptions(
    presets={
        "maxtext-tpu": {
            "xla_tpu_scoped_vmem_limit_kib": 98304,
            "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
            "xla_tpu_enable_data_parallel_all_reduce_opt": True,
            "xla_tpu_data_parallel_opt_different_sized_ops": True,
            "xla_tpu_enable_async_collective_fusion": True,
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
            "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
            "xla_tpu_overlap_compute_collective_tc": True,
            "xla_enable_async_all_gather": True,
        }
    },
    slow_presets=("maxtext-tpu",),
    memory_limit="xla_tpu_max_hbm_size_mib",
)
