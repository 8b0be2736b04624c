"""What it costs to run layers as a loop, in bytes and in predicted time: `python -m experiments.layouts`.

Steps are compiled for a GPU that isn't in the machine, and not run. There are two such parts, for each model:

* steps: the training step under some policies, with the layers as a loop over stacked parameters and unrolled.
* between: the gradient of the stack of layers alone, under one policy. Beside the two layouts there are loops that run several
  layers in one iteration (`jax.lax.scan(..., unroll=K)`). Is there something to gain between a loop and unrolled layers?

A third part runs the steps on an attached GPU: `python -m experiments.layouts --target gpu --parts run`. Each is measured twice:
the host waits for each step, and then it starts a step while the device computes the one before.
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from experiments.common import RESULTS, run_experiment, show_by
from jaxremat.config import Layout, ModelConfig, TrainConfig
from jaxremat.errors import UsageError
from jaxremat.model.presets import preset

Part = Literal["steps", "between", "run"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Flags:
    """What it costs to run layers as a loop, in bytes and in predicted time."""

    sizes: tuple[str, ...] = ("gpt2:32:1024", "llama3.2-1b:4:2048")
    """The model, its batch and its sequence length."""
    policies: tuple[str, ...] = ("nothing", "dots+attention", "none")
    unroll: tuple[int, ...] = (2, 4)
    """Of the loops between: layers in one iteration."""
    target: str = "h100-80gb"
    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = ("steps", "between")
    out: Path = RESULTS


def sizes_of(flags: Flags) -> Iterator[tuple[str, int, int]]:
    """The models with their batch and sequence length.

    Raises:
        UsageError: a size isn't `MODEL:BATCH:LENGTH`.
    """
    for size in flags.sizes:
        if not (found := re.fullmatch(r"([^:]+):([1-9]\d*):([1-9]\d*)", size)):
            raise UsageError(f"--sizes got {size!r}", allowed="MODEL:BATCH:LENGTH", next_step="write it like gpt2:32:1024")
        yield found[1], int(found[2]), int(found[3])


def trials_of(flags: Flags) -> Iterator[tuple[Row, Any]]:
    """For each model, policy and layout, the beginning of its row, and the record of the trial that it asks for."""
    from jaxremat.chips.target import load_target
    from jaxremat.model.attention import choose_attention
    from jaxremat.model.decoder_workload import decoder_factory
    from jaxremat.policy.grammar import parse
    from jaxremat.trial.trials import Trials

    target = load_target(flags.target)
    for name, batch, seq_len in sizes_of(flags):
        train, config = TrainConfig(seq_len=seq_len), preset(name).config
        chosen = choose_attention(config, seq_len, target)
        trials = Trials(decoder_factory(config, chosen.implementation, chosen.reason), train, target, 2**62)
        for policy in map(parse, flags.policies):
            for layout in get_args(Layout):
                shown = {"model": name, "policy": str(policy), "layers": layout, "batch": batch, "seq_len": seq_len}
                yield shown, partial(_record, trials.with_layout(layout), policy, batch)


def _record(trials: Any, policy: Any, batch: int, num_ahead: int = 1) -> Any:
    return replace(trials, num_ahead=num_ahead).record(policy, batch)


def measure_steps(flags: Flags) -> Iterator[Row]:
    """The training step of each model under each policy, in both layouts."""
    for shown, record in trials_of(flags):
        row = record()
        taken = {"total_bytes": row.total_bytes, "step_s": row.step_s, "tokens_per_s": row.tokens_per_s}
        yield {**shown, **taken, "compile_s": row.compile_s}


def measure_run(flags: Flags) -> Iterator[Row]:
    """The steps on an attached GPU, with a host that waits for each step, and with one that doesn't."""
    for shown, record in trials_of(flags):
        waited, ahead = record(num_ahead=0), record()
        error = waited.error or ahead.error
        predicted_s = waited.predicted.step_s if waited.predicted else None
        taken = {"total_bytes": waited.total_bytes, "measured_bytes": waited.measured_peak_bytes}
        timed = {"waited_s": waited.step_s, "step_s": ahead.step_s} if not error else {}
        yield {**shown, "device": waited.target, **taken, "predicted_s": predicted_s, **timed, "error": error}


def measure_between(flags: Flags) -> Iterator[Row]:
    """The gradient of each model's layers alone, in both layouts and in loops of several layers an iteration."""
    import jax

    from jaxremat.answer.layer_estimate import speed_of
    from jaxremat.chips.target import load_target
    from jaxremat.xla.clock import predict_step_time
    from jaxremat.xla.compile import lower_and_compile

    target = load_target(flags.target)
    for name, batch, seq_len in sizes_of(flags):
        config = replace(preset(name).config, dropout=0.0)
        x = jax.ShapeDtypeStruct((batch, seq_len, config.embed_dim), config.dtype)
        for policy in flags.policies:
            stacks = {"loop": _layers(config, policy, scan=True)}
            stacks |= {f"loop, {unroll} an iteration": _Loop(config, policy, unroll) for unroll in flags.unroll}
            stacks["unrolled"] = _layers(config, policy, scan=False)
            for layers, stack in stacks.items():
                variables = _variables(config, layers, x)
                done = lower_and_compile(jax.grad(_mean_square(stack.apply), argnums=(0, 1)), (variables, x), target)
                step_s = predict_step_time(done.module, speed_of(target)).step_s
                shown = {"model": name, "policy": policy, "layers": layers, "batch": batch, "seq_len": seq_len}
                yield {**shown, "total_bytes": done.memory.total_bytes, "step_s": step_s, "compile_s": done.compile_s}


def _variables(config: ModelConfig, layers: str, x: Any) -> Any:
    """The shapes of the variables of the stack."""
    import jax

    import jaxremat

    stack = jaxremat.Layers(jaxremat.Block(config), config.num_layers, "none", layers != "unrolled")
    return jax.eval_shape(stack.init, jax.random.key(0), x)


def _mean_square(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss of a stack of layers: the mean square of what the last layer makes."""
    import jax.numpy as jnp

    return lambda variables, x: jnp.mean(apply(variables, x).astype(jnp.float32) ** 2)


def _layers(config: ModelConfig, policy: str, *, scan: bool) -> Any:
    """The model's layers, in a loop or unrolled."""
    import jaxremat

    return jaxremat.Layers(jaxremat.Block(config, "cudnn", deterministic=True), config.num_layers, policy, scan)


@dataclass(frozen=True)
class _Loop:
    """The model's layers in a loop that runs `unroll` of them in an iteration."""

    config: ModelConfig
    policy: str
    unroll: int

    def apply(self, variables: Any, x: Any) -> Any:
        """What the last layer makes of `x`. `variables` are those of `Layers`."""
        import jax

        import jaxremat

        block = jaxremat.Block(self.config, "cudnn", deterministic=True)

        def run(stacked: Any, x: Any) -> Any:
            def layer(x: Any, params: Any) -> tuple[Any, None]:
                return block.apply({"params": params}, x), None

            return jax.lax.scan(layer, x, stacked, unroll=self.unroll)[0]

        return jaxremat.with_policy(run, self.policy)(variables["params"], x)


#: By part, the function that measures it, how many of its first columns are words, and the columns of its table.
MEASURES: dict[Part, tuple[Callable[[Flags], Iterator[Row]], int, tuple[str, ...]]] = {
    "steps": (measure_steps, 3, ("model", "policy", "layers", "total_bytes", "step_s", "tokens_per_s", "compile_s")),
    "between": (measure_between, 3, ("model", "policy", "layers", "total_bytes", "step_s", "compile_s")),
    "run": (
        measure_run,
        3,
        ("model", "policy", "layers", "batch", "total_bytes", "predicted_s", "waited_s", "step_s", "error"),
    ),
}


def _ms(value: float) -> str:
    return f"{1e3 * value:.1f}"


SHOWN = {"step_s": ("ms", _ms), "predicted_s": ("predicted", _ms), "waited_s": ("waited for", _ms)}


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that the flags ask for, and returns the exit code."""
    return run_experiment("layouts", Flags, argv, MEASURES, show_by(SHOWN))


if __name__ == "__main__":
    sys.exit(main())
