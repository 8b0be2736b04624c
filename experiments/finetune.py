"""What fine-tuning takes: `python -m experiments.finetune` compares full training, frozen parts, LoRA, QLoRA and Adam in 8 bits.

All steps are compiled for GPUs that aren't in the machine, under full remat and with the chunked loss. Each row has the bytes of
batch 1 on a device, the largest batch that fits, and the predicted tokens per second of that batch.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.common import RESULTS, flags_of, set_up, write
from jaxremat.errors import DoesNotFitError
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
#: Model, target, mesh and ways.
ROWS = (
    (QWEN, "rtx4090", None, ("QLoRA 16",)),
    (QWEN, "h100-80gb", None, ("LoRA 16", "QLoRA 16")),
    (QWEN, "a100-80gb", "fsdp=4", ("LoRA 16",)),
    ("llama3-8b", "h100-80gb", None, tuple(WAYS)),
    ("llama3-8b", "a100-80gb", "fsdp=4", tuple(WAYS)),
)


@dataclass(frozen=True)
class Flags:
    """Compiles a fine-tuning of 8B models in several ways."""

    policy: str = "nothing"
    seq_len: int = 2048
    out: Path = RESULTS


def row_of(model: str, target: str, mesh: str | None, way: str, flags: Flags) -> dict[str, Any]:
    """The bytes of batch 1, the largest batch and its predicted speed."""
    import jaxremat

    session = jaxremat.Session(model, target=target, mesh=mesh, seq_len=flags.seq_len, loss="chunked", **WAYS[way])
    (first,) = session.compile(flags.policy, 1).trials
    row = {"model": first.model, "target": target, "mesh": mesh or "", "way": way}
    row |= {"num_trained": first.num_trained or first.num_params, "total_bytes": first.total_bytes}
    row |= {"largest_batch": 0, "tokens_per_s": None, "mfu": None}
    if first.fits:
        answer = session.largest_batch(flags.policy)
        row |= {"largest_batch": answer.largest_batch}
        row |= {"tokens_per_s": answer.trials[-1].tokens_per_s, "mfu": answer.trials[-1].mfu}
    return row


def main(argv: list[str] | None = None) -> int:
    """Compiles, files and prints."""
    flags = flags_of(Flags, argv, "experiments.finetune")
    set_up()
    rows: list[dict[str, Any]] = []
    for model, target, mesh, ways in ROWS:
        for way in ways:
            try:
                rows.append(row_of(model, target, mesh, way, flags))
            except DoesNotFitError as error:
                print(f"{model} {target} {way}: {error}", file=sys.stderr)
            write(
                flags.out / "h100-80gb" / "finetune.json", {"policy": flags.policy, "seq_len": flags.seq_len, "rows": rows}
            )
            print(rows[-1:], file=sys.stderr, flush=True)
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


if __name__ == "__main__":
    sys.exit(main())
