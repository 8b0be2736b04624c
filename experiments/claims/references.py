"""Where the claims, or the nearest thing to them, can be read: papers, documentation and well-known repositories.

What each says is told in our own words, with its number. The passage was read, of Micikevicius et al. in a quotation.
Some numbers that introductory articles repeat have no source that could be found: they are in `UNSOURCED`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """One source.

    Attributes:
        name: who and when, and the part of the text.
        url: where it is.
        says: what it says on the claim, as a clause.
    """

    name: str
    url: str
    says: str


def _of(url: str, name: str) -> tuple[str, str]:
    return (name, url)


KORTHIKANTI = _of("https://arxiv.org/abs/2205.05198", "Korthikanti et al. 2022")
ZERO = _of("https://arxiv.org/abs/1910.02054", "Rajbhandari et al. 2020 (ZeRO)")
CHEN = _of("https://arxiv.org/abs/1604.06174", "Chen et al. 2016")
MICIKEVICIUS = _of("https://arxiv.org/abs/1710.03740", "Micikevicius et al. 2018")
SCALING = _of(
    "https://jax-ml.github.io/scaling-book/transformers/", "Austin et al. 2025, How to Scale Your Model, chapter 4"
)
_HF = "https://github.com/huggingface/transformers/blob"
HF_ONE_GPU = _of(
    f"{_HF}/04b696acabab4a3ca21b1716a488d8223e57b726/docs/source/en/perf_train_gpu_one.md",
    "Hugging Face, training on one GPU",
)
HF_MEMORY = _of(
    f"{_HF}/249ef8164cfbd8e288c2f6d8395539b9e90e8300/docs/source/en/model_memory_anatomy.md",
    "Hugging Face, model memory anatomy",
)
HF_CHECKPOINTING = _of("https://huggingface.co/docs/transformers/grad_checkpointing", "Hugging Face, gradient checkpointing")
BEKMAN = _of(
    "https://github.com/stas00/ml-engineering/blob/008c4f7407edb5ff09d58f5caa2d86d6ead349b3/training/performance/README.md",
    "Bekman, Machine Learning Engineering",
)
OPENAI = _of("https://github.com/cybertronai/gradient-checkpointing", "Salimans and Bulatov 2018, gradient-checkpointing")
CHECKMATE = _of("https://arxiv.org/abs/1910.02653", "Jain et al. 2020 (Checkmate)")


def _said(source: tuple[str, str], says: str, part: str = "") -> Reference:
    name, url = source
    return Reference(f"{name}, {part}" if part else name, url, says)


#: By claim.
REFERENCES: dict[str, tuple[Reference, ...]] = {
    "components": (
        _said(
            ZERO,
            "model states are most of the memory; activations can be more, 60 GB for a model of 1.5B, until they are recomputed",
            "§3",
        ),
        _said(MICIKEVICIUS, "activations dominate the memory of training, without a number"),
        _said(HF_MEMORY, "six components, and 18 bytes a parameter beside the activations"),
    ),
    "one_layer": (
        _said(
            KORTHIKANTI,
            "s b h (34 + 5 a s / h) bytes a layer for s tokens, b sequences, width h, a heads and activations of 16 bits",
            "§4.1",
        ),
        _said(ZERO, "16 bytes a parameter with Adam and mixed precision, which are 112 GB for 7B", "§3.1"),
    ),
    "batch_linear": (
        _said(KORTHIKANTI, "the batch is a factor of a layer's bytes", "§4.1"),
        _said(HF_CHECKPOINTING, "activations scale with the batch and with the length"),
    ),
    "sqrt_n": (
        _said(
            CHEN,
            "the root of the depth at one more forward pass; a ResNet of 1000 layers from 48 GB to 7, for 30 % more time",
        ),
        _said(OPENAI, "a checkpoint every sqrt(n) nodes, at the cost of one forward pass"),
        _said(
            _of(
                "https://flax.readthedocs.io/en/v0.6.10/api_reference/_autosummary/flax.linen.remat_scan.html",
                "Flax, remat_scan",
            ),
            "nested loops with checkpoints, 100 layers as 10 times 10",
        ),
    ),
    "recompute_cost": (
        _said(ZERO, "the root of the activations for 33 % more; a GPT-2 of 1.5B from 60 GB to 8", "§3.2"),
        _said(SCALING, "keeping the layers' inputs alone takes 8 FLOPs for each parameter and token in place of 6"),
        _said(CHEN, "30 % more time"),
        _said(HF_ONE_GPU, "about 20 % slower"),
        _said(OPENAI, "20 % more time"),
        _said(BEKMAN, "20 to 25 % fewer tokens a second, and in recent papers 30 to 40 % of overhead"),
    ),
    "korthikanti": (
        _said(
            KORTHIKANTI,
            "19.6 ms without, 27.2 with full and 20.9 with selective recomputation; full takes more than a third, since without "
            "it the backward pass hides a part of its all-reduces",
            "table 4 and §6.2",
        ),
    ),
    "batch_gain": (
        _said(OPENAI, "models more than 10 times as large, for 20 % more time"),
        _said(
            _of("https://github.com/prigoyal/pytorch_memonger", "Goyal, pytorch_memonger"),
            "a ResNet of 1001 layers from batch 15 to about 52, with 10 % less time at the larger one",
        ),
        _said(CHECKMATE, "inputs up to 5.1 times as large"),
        _said(BEKMAN, "twice or four times the batch in some cases, so that the throughput may rise"),
    ),
    "every_k": (
        _said(
            _of(
                "https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md",
                "torchtitan, performance",
            ),
            "a Llama 2 13B on 64 A100 has 2162 tokens a second without and 1914 with checkpoints for some layers, 13 % more time",
        ),
        _said(HF_CHECKPOINTING, "every_n_layers is what is called one-in:K here; no number"),
        _said(KORTHIKANTI, "checkpoints for some layers alone scale badly, where a device has few layers", "§5"),
    ),
    "cost_aware": (
        _said(KORTHIKANTI, "run attention's core again, which is large and cheap, and keep what linear layers make", "§5"),
        _said(CHECKMATE, "optimal schedules by profiled costs, since heuristics assume layers of equal cost"),
        _said(
            _of("https://github.com/pytorch/pytorch/pull/126320", "PyTorch, pull request 126320"),
            "a memory budget between 0 and 1, met by a knapsack",
        ),
    ),
    "offload": (
        _said(
            _of(
                "https://nvidia.github.io/TransformerEngine/features/other_optimizations/cpu_offloading/cpu_offloading.html",
                "NVIDIA, Transformer Engine, CPU offloading",
            ),
            "offloading is better where the link is fast enough: PCIe 5.0 has 64 GB/s each way, NVLink between chips 450",
        ),
        _said(
            _of(
                "https://github.com/AI-Hypercomputer/maxtext/blob/130539a051099dff42b8e1f9d3f4be2e85ca975a/docs/concepts/"
                "remat_policy.md",
                "MaxText, remat policy",
            ),
            "which of the two is faster depends on the model, the device and the link",
        ),
    ),
    "long_context": (
        _said(
            _of("https://arxiv.org/abs/2205.14135", "Dao et al. 2022 (FlashAttention)"),
            "memory linear in the length in place of quadratic, 10 times less at 2k and 20 times at 4k",
        ),
        _said(KORTHIKANTI, "5 a s² b bytes of a layer are attention's scores, its softmax and its dropout", "§4.1"),
    ),
    "wide_deep": (
        _said(KORTHIKANTI, "a layer's activations grow with its width, and so all of them with depth times width", "§4.1"),
        _said(OPENAI, "without checkpoints the memory grows with the depth"),
    ),
    "precision": (
        _said(MICIKEVICIUS, "the memory is roughly halved, although the weights take half as much again"),
        _said(HF_ONE_GPU, "it may take more memory at small batches, since the model is there in both formats"),
    ),
    "optimizers": (
        _said(HF_ONE_GPU, "8 bytes a parameter for AdamW, little more than 4 for Adafactor, 2 for an Adam of 8 bits"),
        _said(
            _of("https://arxiv.org/abs/1804.04235", "Shazeer and Stern 2018"),
            "sums of rows and of columns in place of all squares",
        ),
        _said(_of("https://arxiv.org/abs/2302.06675", "Chen et al. 2023 (Lion)"), "the momentum alone"),
        _said(
            _of("https://arxiv.org/abs/2110.02861", "Dettmers et al. 2022"),
            "states of 8 bits with the quality of those of 32 bits",
        ),
    ),
    "accumulation": (
        _said(HF_ONE_GPU, "a large model may not fit even with one sequence and accumulation, and the two go together"),
        _said(
            _of(
                "https://github.com/pytorch/torchtune/blob/0031bfb080bd35ec533c412df883cf2bf7bf7fe4/docs/source/tutorials/"
                "memory_optimizations.rst",
                "torchtune, memory optimizations",
            ),
            "where one sequence fits, accumulation is often faster than checkpointing",
        ),
    ),
    "grouped": (
        _said(
            _of(
                "https://pytorch.org/data/0.7/generated/torchdata.datapipes.iter.MaxTokenBucketizer.html",
                "torchdata, MaxTokenBucketizer",
            ),
            "batches of similar lengths, each up to a number of tokens",
        ),
        _said(
            _of("https://huggingface.co/blog/packing-with-FA2", "Hugging Face 2024, packing"),
            "packing has up to twice the throughput of padding",
        ),
    ),
    "layouts": (
        _said(
            _of("https://github.com/jax-ml/jax/issues/26618", "JAX, issue 26618"),
            "a scan over updates takes more memory than the same iterations unrolled",
        ),
        _said(
            _of("https://github.com/jax-ml/jax/issues/14056", "JAX, issue 14056"),
            "the opposite: without nn.scan more memory is needed",
        ),
        _said(
            _of("https://github.com/jax-ml/jax/issues/13356", "JAX, issue 13356"),
            "steps take about 15 % longer with nn.scan, on NVIDIA GPUs",
        ),
        _said(
            _of("https://docs.jax.dev/en/latest/_autosummary/jax.lax.scan.html", "JAX, lax.scan"),
            "a loop compiles faster than what Python's loop unrolls",
        ),
    ),
}

#: By claim, the numbers that articles repeat without a source that could be found.
UNSOURCED: dict[str, str] = {
    "components": "over 90 %",
    "batch_linear": "a factor of 3 from batch 4 to 16",
    "sqrt_n": "80 % less with 100 layers, of which 2 sqrt(100) = 20 would stay",
    "recompute_cost": "28 %",
    "batch_gain": "16 times the batch",
    "every_k": "40 to 60 %, and K = 2 to 4",
    "wide_deep": "a comparison at equal parameters",
    "precision": "30 to 50 %",
}
