"""Does Adam learn as well with moments in 8 bits? `python -m experiments.adam8` trains with both, and compares the losses.

A small decoder learns a text byte by byte, on the CPU and in float32, from equal parameters and over equal batches. The mean
training loss of the last steps with `adamw-8bit` is to be within 1 % of that with `adamw`, for each of three seeds.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.common import RESULTS, flags_of, set_up, write
from jaxremat.report.table import list_table

#: The last steps, whose mean loss is compared, and by how much it may differ.
LAST, WITHIN = 50, 0.01


@dataclass(frozen=True)
class Flags:
    """Trains with moments in float32 and in 8 bits."""

    num_steps: int = 400
    """Steps of each training."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the parameters and the batches."""
    out: Path = RESULTS


def trained(optimizer: Any, seed: int, num_steps: int) -> dict[str, Any]:
    """The losses of a training, and the bytes of its optimizer's state."""
    import itertools

    import jax

    from jaxremat.config import ModelConfig, TrainConfig
    from jaxremat.model.decoder_workload import decoder_workload
    from jaxremat.policy.spec import NONE
    from jaxremat.step.optimizer import state_bytes
    from jaxremat.step.step import init_state, make_step

    model = ModelConfig("small", embed_dim=128, num_kv_heads=4, head_dim=32, mlp_dim=512, positions="rope", dtype="float32")
    train = TrainConfig(seq_len=64, optimizer=optimizer, learning_rate=3e-3, warmup_steps=20, clip_norm=1.0, seed=seed)
    workload = decoder_workload(model, train, 8, "xla")
    step = jax.jit(make_step(workload, train, NONE), donate_argnums=0)
    state, losses = jax.jit(lambda: init_state(workload, train))(), []
    for batch in itertools.islice(workload.batches_from(0), num_steps):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return {"optimizer": optimizer, "seed": seed, "state_bytes": state_bytes(workload, train), "losses": losses}


def main(argv: list[str] | None = None) -> int:
    """Trains, files and prints. Returns 1 where the losses differ by more than `WITHIN`."""
    flags = flags_of(Flags, argv, "experiments.adam8")
    set_up()
    rows: list[dict[str, Any]] = []
    for seed in flags.seeds:
        full, half = (trained(name, seed, flags.num_steps) for name in ("adamw", "adamw-8bit"))
        first, last = (sum(one["losses"][-LAST:]) / len(one["losses"][-LAST:]) for one in (full, half))
        rows.append(
            {
                "seed": seed,
                "loss": first,
                "loss_8bit": last,
                "difference": last / first - 1,
                "state_share": half["state_bytes"] / full["state_bytes"],
                "first_loss": full["losses"][0],
            }
        )
        write(flags.out / "cpu" / "adam8.json", {"num_steps": flags.num_steps, "last": LAST, "rows": rows})
    numbers = ("loss", "loss_8bit", "difference", "state_share")
    cells = [(str(row["seed"]), *(f"{row[name]:.4f}" for name in numbers)) for row in rows]
    title = f"mean loss of the last {LAST} of {flags.num_steps} steps, nats a byte"
    names = ("seed", "adamw", "adamw-8bit", "difference", "share of the state")
    Console().print(list_table(title, names, cells))
    return int(any(abs(row["difference"]) > WITHIN for row in rows))


if __name__ == "__main__":
    sys.exit(main())
