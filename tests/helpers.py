"""What the tests of compiled train steps share: small models, their step compiled once for an H100, and a quick jit."""

import functools
from dataclasses import replace
from typing import Any

import jax

from jaxremat.chips.target import Target
from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.model.decoder_workload import decoder_workload
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.spec import Policy
from jaxremat.search.batch import BatchSearch, Searching
from jaxremat.step.optimizer import state_bytes
from jaxremat.step.step import TrainState, abstract_args, init_state, make_step
from jaxremat.xla.compile import Compilation, lower_and_compile

BATCH, SEQ = 8, 512
#: Bytes that XLA hands a cuBLAS call on an H100, at most; at the peak of most steps here.
WORKSPACE = 2**25
TRAIN = TrainConfig(seq_len=SEQ)
#: The GPT-2 kind, small in parameters so that activations dominate. Compile time doesn't depend on depth or batch here.
GPT = ModelConfig("gpt", 512, 8, 256, 4, 4, 64, 1024, max_seq_len=SEQ)
#: The same unrolled, where compile time does depend on depth; 3 layers leave every:2 and one-in:2 a remainder.
UNROLLED = replace(GPT, num_layers=3, scan_layers=False)
#: The Llama kind: rope, RMSNorm, SwiGLU, grouped key/value heads, no biases, an output head of its own.
LLAMA = replace(
    GPT,
    name="llama",
    num_layers=4,
    num_kv_heads=2,
    mlp_dim=768,
    positions="rope",
    norm="rmsnorm",
    mlp="swiglu",
    use_bias=False,
    tie_embeddings=False,
)

#: On a CPU, a third of the compile time or less, for programs that run for a millisecond. Without excess precision bfloat16
#: is rounded where the program says so, whatever XLA fuses.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1, "xla_allow_excess_precision": False}
if jax.__version_info__ < (0, 11):
    QUICK["xla_cpu_use_fusion_emitters"] = False  # later versions of XLA don't know it
#: The same for `XLA_FLAGS` of a process that a test starts.
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)


def searched(search: Searching) -> tuple[BatchSearch, list[int | None]]:
    """What a search has found, and its estimates on the way."""
    said: list[int | None] = []
    while True:
        try:
            said.append(next(search))
        except StopIteration as end:
            return end.value, said


def decoder_step(model: ModelConfig, train: TrainConfig, policy: str | Policy, implementation: str = "xla") -> Any:
    """The train step of the decoder, which takes any batch."""
    return make_step(decoder_workload(model, train, 1, implementation), train, as_policy(policy))


def decoder_args(model: ModelConfig, train: TrainConfig, batch: int) -> tuple[Any, ...]:
    """The shapes of the arguments of the decoder's train step."""
    return abstract_args(decoder_workload(model, train, batch, "xla"), train)


def decoder_state(model: ModelConfig, train: TrainConfig) -> TrainState:
    """The state before the decoder's first step."""
    return init_state(decoder_workload(model, train, 1, "xla"), train)


def optimizer_bytes(model: ModelConfig, train: TrainConfig) -> int:
    """Bytes of the optimizer's state for the decoder's parameters."""
    return state_bytes(decoder_workload(model, train, 1, "xla"), train)


@functools.cache
def compile_step(
    model: ModelConfig, train: TrainConfig, policy: str, implementation: str, batch: int, target: Target
) -> Compilation:
    """The donated train step, compiled once per process for equal arguments: many tests look at the same programs."""
    step = decoder_step(model, train, policy, implementation)
    return lower_and_compile(step, decoder_args(model, train, batch), target, donate_argnums=0)


def compiled(
    target: Target,
    policy: str,
    model: ModelConfig = GPT,
    *,
    batch: int = BATCH,
    seq_len: int = SEQ,
    attention: str = "cudnn",
    **levers: Any,
) -> Compilation:
    """The train step of `model` under `policy`, compiled once for equal arguments; `levers` are fields of TrainConfig."""
    return compile_step(model, replace(TRAIN, seq_len=seq_len, **levers), policy, attention, batch, target)


def total(target: Target, policy: str, model: ModelConfig = GPT, **changes: Any) -> int:
    """Bytes of that train step on the device, by XLA; `changes` as for `compiled`."""
    return compiled(target, policy, model, **changes).memory.total_bytes


def mapped(target: Any, model: Any, policy: str, levers: tuple[tuple[str, Any], ...] = ()) -> Compilation:
    """The train step with its dump, compiled once for equal arguments."""
    return compiled_with_dump(target, model, policy, levers)


@functools.cache
def compiled_with_dump(target: Any, model: Any, policy: str, levers: tuple[tuple[str, Any], ...]) -> Compilation:
    train = replace(TRAIN, **dict(levers))
    step = decoder_step(model, train, policy, "cudnn")
    return lower_and_compile(step, decoder_args(model, train, BATCH), target, donate_argnums=0, keep_dump=True)
