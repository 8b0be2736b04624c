"""Tables of the documentation from the package's own data: the policies, their other names and the bundled GPUs.

`jaxremat run --list policies` has the same rows for a terminal. `experiments/pages.py` writes these into the pages.
"""

from experiments.common import markdown_table
from jaxremat.chips.nvidia.calibration import load_calibration
from jaxremat.chips.nvidia.gpu import bundled_names, load_gpu
from jaxremat.policy.grammar import ALIASES, GRAMMAR
from jaxremat.units import gib


def policy_table_markdown() -> str:
    """The grammar as a Markdown table.

    Its first lines are:

        | policy | what a layer keeps | example |
        | --- | --- | --- |
        | `none` | no wrapper: what differentiation asks for is kept | `none` |
    """
    rows = [(f"`{form.pattern}`", form.keeps, f"`{form.example}`") for form in GRAMMAR]
    return markdown_table(("policy", "what a layer keeps", "example"), rows) + "\n"


def alias_table_markdown() -> str:
    """The names from JAX and MaxText as a Markdown table, each with the policy that it stands for."""
    return markdown_table(("name", "policy"), [(f"`{alias}`", f"`{text}`") for alias, text in ALIASES.items()]) + "\n"


def target_table_markdown() -> str:
    """The bundled GPUs as a Markdown table.

    Bandwidths are in GB/s and of one direction: of device memory, to the GPUs of the node and to those of other nodes. The last
    column says which profiles the times of kernels were fitted to: those of the GPU's own generation, or the mean of all.
    """
    titles = ("target", "device", "memory", "capability", "bf16 TFLOP/s", "GB/s", "node GB/s", "network GB/s")
    rows = []
    for name in bundled_names():
        _, gpu = load_gpu(name)
        links = (gpu.memory_bandwidth, gpu.node_link_bandwidth, gpu.network_bandwidth)
        peak = "none" if gpu.peak_bf16_flops is None else f"{gpu.peak_bf16_flops / 1e12:,.0f}"
        numbers = [peak, *("unknown" if link is None else f"{link / 1e9:,.0f}" for link in links)]
        capability = ".".join(map(str, gpu.compute_capability))
        fitted = load_calibration(gpu.compute_capability).source.partition(",")[0]
        rows.append([f"`{name}`", gpu.description, gib(gpu.device_memory_size), capability, *numbers, fitted])
    return markdown_table((*titles, "kernels fitted to"), rows) + "\n"
