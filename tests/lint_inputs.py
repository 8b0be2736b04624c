"""Made-up inputs of the lint's rules, each with one mistake: what a rule says of it takes no compile."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxremat.chips.target import Target
from jaxremat.mesh.axes import MeshShape
from jaxremat.mesh.sharding import LeafOnMesh
from jaxremat.policy.grammar import parse
from jaxremat.xla import hlo
from jaxremat.xla.buffers import Allocation, Buffer, Category, MemoryMap, Operation
from jaxremat.xla.compile import Compilation, lower_and_compile
from jaxremat.xla.exchanges import Exchange
from jaxremat.xla.flops import ExecutedFlops
from jaxremat.xla.lint import find
from jaxremat.xla.lint_input import LintInput
from jaxremat.xla.memory import CompiledMemory
from jaxremat.xla.traced import BackwardLoop, Traced, Unordered

MIB = 2**20
#: A step of three matmuls, w [512, 512] and a batch of 256 rows.
PROGRAM = """HloModule step, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }, entry_computation_layout={}

ENTRY %main (w: f32[512,512], x: f32[256,512]) -> f32[512,512] {
  %w = f32[512,512]{1,0} parameter(0), metadata={op_name="params['w']"}
  %x = f32[256,512]{1,0} parameter(1), metadata={op_name="batch"}
  %made = f32[256,512]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp(Net)/mlp/dot_general"}
  %second = f32[256,512]{1,0} dot(%made, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/SECOND"}
  %grad = f32[512,512]{1,0} dot(%x, %second), lhs_contracting_dims={0}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/transpose(jvp(Net))/mlp/dot_general"}
  ROOT %new = f32[512,512]{1,0} subtract(%w, %grad), metadata={op_name="jit(step)/sub"}
}
"""  # noqa: E501
MATMUL = 2 * 256 * 512 * 512
ATTENTION = """  %NAME = bf16[8,4,64,64]{3,2,1,0} custom-call(%x, %x, %x), custom_call_target="__cudnn$fmhaTARGET", backend_config={"intermediate_tensor_shape":{"dimensions":["8","4","64","64"]},"mask_type":"CAUSAL"}
"""  # noqa: E501
#: The forward kernel twice, and its gradient once.
ATTENTION_TWICE = "".join(
    ATTENTION.replace("TARGET", target).replace("NAME", name)
    for target, name in (("Softmax", "attention"), ("Softmax", "attention.1"), ("SoftmaxBackward", "back"))
)
AGAIN = "transpose(jvp(Net))/checkpoint/rematted_computation/mlp/dot_general"


def program(*changes: tuple[str, str]) -> hlo.Module:
    text = PROGRAM
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return hlo.parse(text.replace("SECOND", "jvp(Net)/out/dot_general"))


def buffer(category: Category, label: str, num_bytes: int, scope: str, first: int = 0, **fields: Any) -> Buffer:
    """A buffer of an allocation of its own, for four layers, read last in the backward pass."""
    values = Buffer(
        "b", category, label, num_bytes, 4, 0, 0, first, 3, None, f"f32[4,{num_bytes // 16}]", scope, "net/layers.py:7"
    )
    return replace(values, **fields)


def memory(*buffers: Buffer) -> MemoryMap:
    """A map whose peak is the first position of the backward pass."""
    apart = tuple(replace(buffer, name=f"b{n}", allocation=n) for n, buffer in enumerate(buffers))
    allocations = tuple(Allocation(b.allocation, b.num_bytes, "temp") for b in apart)
    return MemoryMap((), (("forward", 0, 1), ("backward", 2, 3)), allocations, (), (), apart, (), 2, ())


def mapped(step: Callable[..., Any], args: tuple[Any, ...], target: Target) -> Compilation:
    """A compiled step whose buffers are read, its parameters donated."""
    return lower_and_compile(step, args, target, donate_argnums=0, keep_dump=True)


def net(w: jax.Array, x: jax.Array) -> jax.Array:
    with jax.named_scope("Net"), jax.named_scope("mlp"):
        h = x @ w
    with jax.named_scope("loss"):
        return jnp.mean(jax.nn.logsumexp(h @ w, axis=-1))


def attends(width: int = 64, dtype: str = "bfloat16", length: int = 512) -> Any:
    """A traced attention of two heads of `width` numbers, its gradient included."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bthd,bshd->bhts", q, k)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v).astype(jnp.float32).mean()

    return jax.make_jaxpr(jax.grad(loss))(*3 * [jax.ShapeDtypeStruct((4, length, 2, width), dtype)])


@functools.cache
def made_up() -> dict[str, LintInput]:
    """For each rule an input with its mistake alone."""
    shapes = (jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((256, 512), jnp.float32))
    sound = LintInput(
        module=program(),
        memory=CompiledMemory(2 * MIB, MIB, MIB, 6 * MIB, 0, 0, 0, 0, 0, 7 * MIB),
        traced=Traced(names={"hidden": frozenset({256 * 512})}, total=ExecutedFlops(matmul_flops=3 * MATMUL)),
        jaxpr=jax.make_jaxpr(jax.value_and_grad(net))(*shapes),
    )
    leaf = LeafOnMesh("params/w", (512, 512), frozenset({"fsdp"}), MIB, MIB // 8)
    mesh = replace(sound, mesh=MeshShape(fsdp=8), arguments=(leaf,))
    mesh = replace(mesh, traced=replace(mesh.traced, total=ExecutedFlops(matmul_flops=8 * 3 * MATMUL)))
    gather = Exchange(
        *("all-gather", "parameter", "gather", 0, ("w", ()), (512, 512), MIB, 4),
        *((tuple(range(8)),), ("params/w",), "jit(step)/jvp(Net)/mlp/dot_general", 0),
    )
    of_batch = replace(gather, what="value", arguments=("batch", "params/w"), dims=(2048, 300))
    assert find(sound) == find(mesh) == find(replace(mesh, exchanges=(gather,))) == ()

    def traced(**fields: Any) -> LintInput:
        return replace(sound, traced=replace(sound.traced, **fields))

    attention = program(("  ROOT", f"{ATTENTION_TWICE}  ROOT"))
    saved = buffer("residuals", "mlp/dot_general", MIB, "jit(step)/jvp(Net)/mlp/dot_general")
    dropped = buffer("residuals", "Dropout_0/mask", MIB, "jit(step)/jvp(Net)/Dropout_0/bernoulli", shape="pred[4,65536]")
    logits = buffer(
        "logits and loss", "logits", 4 * MIB, "jit(step)/jvp(loss)/dot_general", source="net/loss.py:9", num_layers=1
    )
    loops = BackwardLoop("net/train.py:3", 4, True, MIB), BackwardLoop("net/train.py:5", 4, False, 2 * MIB)
    scores = buffer("residuals", "exp", 4 * MIB, "jit(step)/jvp()/exp", shape="bf16[8,512,512]", num_layers=1)
    together = buffer("recompute", "tanh", MIB, f"jit(step)/{AGAIN.replace('mlp/dot_general', 'tanh')}", num_layers=1)
    of_microbatch = replace(saved, num_layers=1, label="tanh")
    last = Operation("dot.9", "dot", "jit(step)/transpose(jvp(Net))/mlp/dot_general", "net/layers.py:7")
    gathered = buffer("gathered parameters", "gathered params/w", MIB, "jit(step)/jvp(Net)/mlp/dot_general")
    return {
        "unmatched-name": traced(policy_names=frozenset({"hiden"})),
        "nothing-recomputed": traced(
            num_checkpoints=4,
            num_mergeable=4,
            num_recomputed=8,
            recompute=ExecutedFlops(matmul_flops=MATMUL),
            total=ExecutedFlops(matmul_flops=4 * MATMUL),
        ),
        "attention-twice": replace(traced(saves_matmuls=True), module=attention, policy=parse("dots")),
        "xla-remat": replace(sound, module=program(("%second =", "%second.remat ="), ("%second)", "%second.remat)"))),
        "not-donated": replace(sound, module=program((" {}: (0, {}, may-alias) ", ""))),
        "one-checkpoint": traced(whole_checkpoint="net/train.py:8", recompute=ExecutedFlops(MATMUL, num_matmuls=4)),
        "loop-without-remat": traced(loops=loops),
        "recomputed-together": replace(
            traced(unordered=(Unordered("net/train.py:3", 3, {("tanh net/layers.py:7", (4, 65536)): 1}),)),
            memory_map=memory(together, together),
        ),
        "microbatches-together": replace(
            traced(num_rounds=2), memory_map=replace(memory(*3 * [of_microbatch]), program=4 * (last,))
        ),
        "unnamed-residuals": replace(
            traced(policy_names=frozenset({"hidden"})), memory_map=memory(saved, replace(saved, label="hidden"))
        ),
        "dropout-masks": replace(sound, memory_map=memory(dropped)),
        "saved-and-recomputed": replace(sound, module=program(("SECOND", AGAIN)), memory_map=memory(saved)),
        "logits-largest": replace(sound, memory_map=memory(logits)),
        "scores-stored": replace(sound, jaxpr=attends(), memory_map=memory(scores), fused_attention="cudnn"),
        "constraints-elsewhere": replace(sound, num_elsewhere=2),
        "more-than-its-share": replace(mesh, traced=sound.traced),
        "lies-whole": replace(mesh, arguments=(leaf, replace(leaf, axes=frozenset(), device_bytes=MIB))),
        "axis-divides-nothing": replace(mesh, mesh=MeshShape(fsdp=4, tensor=2)),
        "gathered-and-kept": replace(mesh, memory_map=memory(gathered)),
        "gathered-again": replace(mesh, exchanges=(gather, *2 * [replace(gather, op_name=f"jit(step)/{AGAIN}")])),
        "gathers-everything": replace(mesh, exchanges=(of_batch,)),
        "gathers-logits": replace(
            mesh, exchanges=(replace(of_batch, dims=(2048, 512), op_name="jit(step)/jvp(loss)/log_softmax"),)
        ),
    }
