"""What fine-tuning takes: `python -m experiments.finetune` compares full training, frozen parts, LoRA, QLoRA and Adam in 8 bits.

All steps are compiled for devices that aren't in the machine, under full remat and with the chunked loss. Each row has the bytes
of batch 1 on a device, the largest batch that fits, and the predicted tokens per second of that batch. A row that is filed isn't
compiled again without `--fresh`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.common import RESULTS, Row, flags_of, other_parts, set_up, where, write
from jaxremat.cli.command import run_command
from jaxremat.report.table import gib_number, list_table

QWEN = "examples/configs/Qwen3-8B.json"
#: By name, the flags of each way to train.
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "frozen embeddings": {"freeze": ("embedding", "output")},
    "adamw-8bit, bfloat16": {"optimizer": "adamw-8bit", "param_dtype": "bfloat16"},
    "LoRA 16": {"lora": "16"},
    "QLoRA 16": {"lora": "16", "quantize_base": "nf4"},
}
#: By model, target and mesh, the ways to train.
ROWS = {
    (QWEN, "rtx4090", ""): ("QLoRA 16",),
    (QWEN, "h100-80gb", ""): ("LoRA 16", "QLoRA 16"),
    (QWEN, "a100-80gb", "fsdp=4"): ("LoRA 16", "QLoRA 16"),
    (QWEN, "v5e", "fsdp=8"): ("LoRA 16", "QLoRA 16"),
    ("llama3-8b", "h100-80gb", ""): tuple(WAYS),
    ("llama3-8b", "a100-80gb", "fsdp=4"): tuple(WAYS),
    ("llama3-8b", "v5e", "fsdp=8"): tuple(WAYS),
}


@dataclass(frozen=True)
class Flags:
    """Compiles a fine-tuning of 8B models in several ways."""

    policy: str = "nothing"
    seq_len: int = 2048
    targets: tuple[str, ...] = tuple(dict.fromkeys(target for _, target, _ in ROWS))
    """Only the rows of these targets."""
    fresh: bool = False
    """Compile what is filed again."""
    out: Path = RESULTS


def row_of(model: str, target: str, mesh: str, way: str, flags: Flags) -> Row:
    """The bytes of batch 1, the largest batch and its predicted speed."""
    import jaxremat

    session = jaxremat.Session(model, target=target, mesh=mesh or None, seq_len=flags.seq_len, loss="chunked", **WAYS[way])
    (first,) = session.compile(flags.policy, 1).trials
    row = {"model": Path(model).stem, "target": target, "mesh": mesh, "way": way}
    row |= {"num_trained": first.num_trained or first.num_params, "total_bytes": first.total_bytes}
    row |= {"largest_batch": 0, "tokens_per_s": None, "mfu": None}
    if first.fits:
        answer = session.largest_batch(flags.policy)
        largest = next(trial for trial in answer.trials if trial.batch == answer.largest_batch)
        row |= {"largest_batch": largest.batch, "tokens_per_s": largest.tokens_per_s, "mfu": largest.mfu}
    return row


def work(flags: Flags) -> int:
    """Compiles what isn't filed, files each row, and prints all."""
    path = flags.out / "h100-80gb" / "finetune.json"
    settings = {"policy": flags.policy, "seq_len": flags.seq_len}
    filed = {} if flags.fresh else other_parts(path, (*settings, "rows"))
    same = all(filed.get(name) == value for name, value in settings.items())
    rows: list[Row] = []
    before: list[Row] = filed.get("rows", []) if same else []
    for (model, target, mesh), ways in ROWS.items():
        for way in ways:
            found = where(before, model=Path(model).stem, target=target, mesh=mesh, way=way)
            if not found and target in flags.targets:
                found = [row_of(model, target, mesh, way, flags)]
            rows += found
            print(f"{found}", file=sys.stderr, flush=True)
            after = [row for row in before if row not in rows]
            write(path, {**settings, "rows": rows + after})
    cells = [
        (
            row["model"],
            f"{row['target']} {row['mesh']}",
            row["way"],
            gib_number(row["total_bytes"]),
            str(row["largest_batch"]),
        )
        for row in rows
    ]
    Console().print(list_table("fine-tuning", ("model", "target", "way", "GiB at batch 1", "largest batch"), cells))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the experiment and returns its exit code."""
    flags = flags_of(Flags, argv, "experiments.finetune")
    set_up()
    return run_command(lambda: work(flags), name="experiments.finetune", saved="the rows so far are filed")


if __name__ == "__main__":
    sys.exit(main())
