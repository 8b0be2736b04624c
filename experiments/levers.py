"""What each setting of the training step is worth in bytes and in batch: `python -m experiments.levers`.

All steps are compiled for GPUs that aren't in the machine. Nothing is measured on a GPU. There are four parts:

* loss: for each policy, the largest batch with the full and with the chunked loss, at a vocabulary of 128256.
* optimizers: the bytes of a step with each optimizer.
* microbatches: the bytes of a step with 1, 2 and 8 microbatches.
* dtypes: the bytes of a step with different dtypes of the parameters, the compute and the gradients.

The last three parts use a GPT-2 model and a Llama model.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from experiments.common import RESULTS, compile_step, run_experiment
from jaxremat.config import ModelConfig, Optimizer, TrainConfig
from jaxremat.model.presets import preset
from jaxremat.report.table import gib_number

Part = Literal["loss", "optimizers", "microbatches", "dtypes"]


@dataclass(frozen=True)
class Flags:
    """What each lever of the training step is worth, in bytes and in batch."""

    large_vocabulary: tuple[tuple[str, str, str], ...] = (
        ("llama3.2-1b", "float32", "h100-80gb"),
        ("llama3-8b", "bfloat16", "h200"),
    )
    """Model, parameter dtype and target of the loss part."""
    policies: tuple[str, ...] = ("none", "dots+attention", "nothing", "every:sqrt+nothing")
    models: tuple[str, ...] = ("gpt2", "llama3.2-1b")
    target: str = "h100-80gb"
    batch: int = 8
    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = get_args(Part)
    out: Path = RESULTS


Row = dict[str, Any]


def bytes_of(model: ModelConfig, train: TrainConfig, policy: str, flags: Flags) -> Row:
    """The compiled bytes and the predicted step time, at the batch and target of `flags`."""
    from jaxremat.chips.target import load_target
    from jaxremat.xla.clock import predict_step_time

    target = load_target(flags.target)
    done = compile_step(model, train, policy, flags.batch, target)
    predicted = predict_step_time(done.module, target.speed).step_s if target.speed else None
    memory = done.memory
    sizes = {"total_bytes": memory.total_bytes, "state_bytes": memory.argument_bytes, "temp_bytes": memory.temp_bytes}
    return {"model": model.name, "policy": policy, "batch": flags.batch, **sizes, "predicted_step_s": predicted}


def measure_loss(flags: Flags) -> list[Row]:
    """The largest batch of every policy, with the full and with the chunked loss."""
    from jaxremat.chips.target import load_target
    from jaxremat.search.batch import largest_batch
    from jaxremat.search.budget import make_budget

    rows: list[Row] = []
    for name, param_dtype, target_name in flags.large_vocabulary:
        chosen, target = preset(name), load_target(target_name)
        model = replace(chosen.config, param_dtype=param_dtype)
        budget = make_budget(requested_bytes=None, mem_fraction=0.75, memory_bytes=target.memory_bytes).num_bytes
        for policy in flags.policies:
            for loss in ("full", "chunked"):
                train = TrainConfig(seq_len=chosen.seq_len, loss=loss)

                def total_bytes(batch: int, model: Any = model, train: Any = train, policy: str = policy) -> int:
                    return compile_step(model, train, policy, batch, target).memory.total_bytes  # noqa: B023

                found = largest_batch(total_bytes, budget)
                where = {"model": name, "param_dtype": param_dtype, "target": target_name, "budget_bytes": budget}
                answer = {"largest_batch": found.largest, "total_bytes": found.largest_bytes, "next_bytes": found.next_bytes}
                rows.append({**where, "policy": policy, "loss": loss, **answer, "num_compiles": len(found.tried)})
    return rows


def measure_optimizers(flags: Flags) -> list[Row]:
    """For each optimizer, the bytes of its state per parameter, and the bytes of the whole step."""
    from jaxremat.model.decoder_workload import decoder_workload
    from jaxremat.step.optimizer import state_bytes

    rows = []
    for name in flags.models:
        model, seq_len = preset(name).config, preset(name).seq_len
        for optimizer in get_args(Optimizer):
            train = TrainConfig(seq_len=seq_len, optimizer=optimizer, loss="chunked")
            workload = decoder_workload(model, train, batch=1, implementation="xla")
            a_parameter = state_bytes(workload, train) / workload.num_params
            row = bytes_of(model, train, "nothing", flags)
            rows.append({"optimizer": optimizer, "state_bytes_per_param": a_parameter, **row})
    return rows


def measure_microbatches(flags: Flags) -> list[Row]:
    """The bytes of 1, 2 and 8 microbatches of the same size. Several microbatches add only a second buffer of gradients."""
    from jaxremat.model.transformer import count_params

    rows = []
    for name in flags.models:
        model = preset(name).config
        gradient_bytes = 4 * count_params(model)
        for accumulate in (1, 2, 8):
            train = TrainConfig(seq_len=preset(name).seq_len, accumulate=accumulate, loss="chunked")
            row = bytes_of(model, train, "nothing", flags)
            rows.append({"accumulate": accumulate, "gradient_bytes": gradient_bytes, **row})
    return rows


def measure_dtypes(flags: Flags) -> list[Row]:
    """The bytes with one dtype changed at a time. All rows use XLA's attention, because cuDNN's doesn't support float32."""
    rows = []
    for name in flags.models:
        model = replace(preset(name).config, attention="xla")
        train = TrainConfig(seq_len=preset(name).seq_len, loss="chunked")
        cases = [
            (model, train),
            (replace(model, dtype="float32"), train),
            (replace(model, param_dtype="bfloat16"), train),
            (model, replace(train, grad_dtype="bfloat16")),
            (model, replace(train, accumulate=2)),
            (model, replace(train, accumulate=2, grad_dtype="bfloat16")),
        ]
        for m, t in cases:
            grads = t.grad_dtype or m.param_dtype
            dtypes = {"params": m.param_dtype, "compute": m.dtype, "gradients": grads, "accumulate": t.accumulate}
            rows.append({**dtypes, **bytes_of(m, t, "nothing", flags)})
    return rows


#: By part, the function that measures it, how many of its first columns are words, and the columns of its table.
MEASURES: dict[Part, tuple[Callable[[Flags], list[Row]], int, tuple[str, ...]]] = {
    "loss": (measure_loss, 3, ("model", "policy", "loss", "largest_batch", "total_bytes", "next_bytes")),
    "optimizers": (
        measure_optimizers,
        2,
        ("model", "optimizer", "state_bytes_per_param", "state_bytes", "total_bytes", "predicted_step_s"),
    ),
    "microbatches": (measure_microbatches, 1, ("model", "accumulate", "gradient_bytes", "temp_bytes", "total_bytes")),
    "dtypes": (measure_dtypes, 4, ("model", "params", "compute", "gradients", "accumulate", "state_bytes", "temp_bytes")),
}


def show(column: str) -> tuple[str, Callable[[Any], str]]:
    """A column's title, and the function that makes a cell's text. Bytes are in GiB, seconds in ms."""
    title = column.removeprefix("state_bytes_").removesuffix("_bytes").removesuffix("_s").replace("_", " ")
    if column.endswith("_s"):
        return title, lambda value: f"{1e3 * value:.1f} ms"
    if column.endswith("_bytes"):
        return f"{title} GiB", gib_number
    return title, lambda value: f"{value:.3f}" if isinstance(value, float) else str(value)


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that the flags ask for, and returns the exit code."""
    return run_experiment("levers", Flags, argv, MEASURES, show)


if __name__ == "__main__":
    sys.exit(main())
