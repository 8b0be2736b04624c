"""How much slower a plan is than the fastest choice that fits, by compiling every choice: `python -m experiments.regret`.

There are two parts. `pyramid` has three stages, each with half the rows of the one before, as a ResNet, a U-Net and a Swin
Transformer have, and 64 choices: each stage may save either result of its matmul and its GELU. `blocks` draws small blocks
with at most five values of which any may be saved, in a scan or unrolled. Each is planned within budgets between the bytes
of `nothing` and those of all values. The planner doesn't see what was compiled for the comparison. All is compiled for a GPU
that isn't in the machine. Nothing is run, and step times are predicted.
"""

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from experiments.common import RESULTS, SHORT_POLICY, run_experiment, show_by
from jaxremat.trial.trials import Trials

Part = Literal["pyramid", "blocks"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Flags:
    """How much slower a plan is than the fastest choice that fits."""

    rows: int = 32768
    """Rows of the pyramid's first stage."""
    budgets: int = 10
    """Budgets of the pyramid."""
    first: int = 0
    """The number of the first block."""
    blocks: int = 10
    """How many blocks are drawn."""
    most_choices: int = 32
    """Blocks of more choices are left out. For a TPU each takes XLA many seconds."""
    times: int = 1
    """So many times the rows of a block. A small block of a TPU is wholly in its VMEM, where saving takes no memory."""
    target: str = "h100-80gb"
    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = get_args(Part)
    out: Path = RESULTS


def pyramid(rows: int) -> Any:
    """Three stages of two blocks, and the values of a stage that may be saved."""
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    def loss(params: Any, x: Any) -> Any:
        for stage, blocks in enumerate(params):
            for n, (up, down) in enumerate(blocks):
                with jax.named_scope(f"stage{stage}_block_{n}"):
                    h = jax.nn.gelu(checkpoint_name(x @ up, f"up{stage}"))
                    x = x + checkpoint_name(h, f"gelu{stage}") @ down
            x = x[::2]
        return jnp.mean(x**2)

    shape = jax.ShapeDtypeStruct
    block = shape((256, 1024), jnp.float32), shape((1024, 256), jnp.float32)
    return _workload(loss, [[block] * 2] * 3, shape((rows, 256), jnp.float32), "pyramid")


def drawn(seed: int, times: int = 1) -> Any:
    """Four layers of a drawn block, with so many times its rows."""
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    draw = random.Random(seed)
    width, rows, in_scan = draw.choice([256, 512, 1024]), draw.choice([4096, 8192, 16384]), draw.random() < 0.5
    kinds = [draw.choice(["matmul", "matmul", "gelu", "norm", "gate", "softmax"]) for _ in range(draw.randint(3, 5))]
    widths = [width * draw.choice([1, 2, 4]) for _ in kinds]
    made = {
        "gelu": jax.nn.gelu,
        "norm": lambda x: x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6),
        "gate": lambda x: x * jax.nn.sigmoid(x),
        "softmax": jax.nn.softmax,
    }

    def layer(params: Any, x: Any) -> Any:
        h = x
        for n, kind in enumerate(kinds):
            h = checkpoint_name(h @ params[f"w{n}"] if kind == "matmul" else made[kind](h), f"h{n}")
        return x + h @ params["out"]

    def loss(params: Any, x: Any) -> Any:
        if in_scan:
            return jnp.mean(jax.lax.scan(lambda x, layer_params: (layer(layer_params, x), None), x, params)[0] ** 2)
        for n, layer_params in enumerate(params):
            with jax.named_scope(f"block_{n}"):
                x = layer(layer_params, x)
        return jnp.mean(x**2)

    shapes, now = dict[str, tuple[int, int]](), width
    for n, (kind, wide) in enumerate(zip(kinds, widths, strict=True)):
        if kind == "matmul":
            shapes[f"w{n}"], now = (now, wide), wide
    shapes["out"] = (now, width)
    shape = jax.ShapeDtypeStruct
    stacked = {name: shape((4, *size), jnp.float32) for name, size in shapes.items()}
    apart = [{name: shape(size, jnp.float32) for name, size in shapes.items()}] * 4
    return _workload(loss, stacked if in_scan else apart, shape((times * rows, width), jnp.float32), f"block {seed}")


def _workload(loss: Callable[..., Any], params: Any, batch: Any, name: str) -> Any:
    """A workload of which a policy may save the values that its author named, and nothing else."""
    from jaxremat.policy.spec import NOTHING, Names
    from jaxremat.workload.workload import Workload

    own = {f"{kind}{n}" for kind in ("h", "up", "gelu") for n in range(5)}

    def as_config(policy: Any) -> tuple[str, ...] | None:
        names = {name.rpartition("/")[2] for name in policy.names()}
        return () if policy == NOTHING or (isinstance(policy, Names) and not policy.offload and names <= own) else None

    return Workload(loss=loss, params=params, batch=batch, name=name, as_config=as_config)


@dataclass(frozen=True)
class _Compiled(Trials):
    """Trials that share compiled programs without knowing of each other's steps."""

    anew: dict[Any, Any] = field(default_factory=dict)

    def compile_anew(self, policy: Any, batch: int, **options: Any) -> Any:
        key = policy, batch, self.with_dump
        if key not in self.anew:
            self.anew[key] = super().compile_anew(policy, batch, **options)
        return self.anew[key]


def measure_pyramid(flags: Flags) -> Iterator[Row]:
    """The pyramid at rising budgets."""
    yield from _rows(pyramid(flags.rows), flags, [n / (flags.budgets - 1) for n in range(flags.budgets)])


def measure_blocks(flags: Flags) -> Iterator[Row]:
    """Drawn blocks, each at a drawn budget."""
    for seed in range(flags.first, flags.first + flags.blocks):
        yield from _rows(drawn(seed, flags.times), flags, [random.Random(-seed - 1).random()], flags.most_choices)


def _rows(workload: Any, flags: Flags, shares: Sequence[float], most_choices: int = 64) -> Iterator[Row]:
    """The plan within each budget, beside the fastest choice that fits. None where there are too many choices."""
    from jaxremat.answer.layer_estimate import speed_of
    from jaxremat.answer.planned import plan_run
    from jaxremat.answer.workload_estimate import estimate_workload
    from jaxremat.chips.target import load_target
    from jaxremat.config import TrainConfig
    from jaxremat.planner.shared_budget import as_one
    from jaxremat.policy.spec import NOTHING, Names
    from jaxremat.workload.factory import factory_of
    from jaxremat.workload.given import OWN_LOSS
    from jaxremat.xla.clock import predict_step_time

    target = load_target(flags.target)
    trials = _Compiled(factory_of(workload), TrainConfig(), target, 2**62)
    batch, speed = trials.workload_at().num_samples or 1, speed_of(target)
    one = as_one(estimate_workload(trials, speed, batch)).layer
    names = [name for v, name in one.names.items() if one.problem.values[v].saveable]
    if 2 ** len(names) > most_choices:
        return
    found: dict[str, tuple[int, float]] = {}
    for count in range(len(names) + 1):
        for chosen in itertools.combinations(names, count):
            policy = Names(chosen) if chosen else NOTHING
            done = trials.compile(policy, batch)
            found[str(policy)] = done.memory.total_bytes, predict_step_time(done.module, speed).step_s
    least, most = found[str(NOTHING)][0], max(total_bytes for total_bytes, _ in found.values())
    for share in shares:
        budget_bytes = round(least + share * (most - least))
        options: Any = {"losses": (OWN_LOSS,), "batch": batch, "max_batch": batch, "budget_bytes": budget_bytes}
        plan: Any = plan_run(replace(trials, steps={}), **options).found
        fitting = {text: step_s for text, (total_bytes, step_s) in found.items() if total_bytes <= budget_bytes}
        best = min(fitting, key=lambda text: fitting[text])
        expected = plan.predicted_bytes
        yield {
            "layers": workload.name,
            "num_choices": len(found),
            "budget_bytes": budget_bytes,
            "policy": str(plan.policy),
            "total_bytes": plan.cost.total_bytes,
            "off_percent": None if expected is None else 100 * (expected / plan.cost.total_bytes - 1),
            "step_s": plan.cost.step_s,
            "best": best,
            "best_step_s": fitting[best],
            "slower_percent": 100 * (plan.cost.step_s / fitting[best] - 1),
            "num_compiles": len(plan.tried),
        }


#: By part, the function that measures it, how many of its first columns are words, and the columns of its table.
_COLUMNS = (
    "layers",
    "policy",
    "num_choices",
    "budget_bytes",
    "total_bytes",
    "off_percent",
    "slower_percent",
    "num_compiles",
)
MEASURES: dict[Part, tuple[Callable[[Flags], Iterator[Row]], int, tuple[str, ...]]] = {
    "pyramid": (measure_pyramid, 2, _COLUMNS),
    "blocks": (measure_blocks, 2, _COLUMNS),
}
SHOWN = {"policy": SHORT_POLICY, "num_choices": ("choices", str), "slower_percent": ("slower", "{:.2f}%".format)}


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that the flags ask for, and returns the exit code."""
    return run_experiment("regret", Flags, argv, MEASURES, show_by(SHOWN))


if __name__ == "__main__":
    sys.exit(main())
