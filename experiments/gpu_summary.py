"""Renders the summary of `experiments.gpu_check` as Markdown, from the files of results alone."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from experiments.common import Row, markdown_table
from jaxremat.report.table import gib_number
from jaxremat.trial.ranks import rank_correlation

TITLES = {
    "bytes": "Bytes: promised beside shown",
    "speed": "Step time: predicted beside measured",
    "mfu": "Model FLOPs utilization",
    "profile": "Kernels: predicted beside measured",
    "peer": "PyTorch beside it",
}
#: The words before the list of what a section lacks.
NOT_THERE = "Not there:"


def write_summary(folder: Path) -> Path:
    """Writes the summary of the results in `folder` to `folder/gpu_check.md`, and returns that path."""
    path = folder / "gpu_check.md"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(render(folder))
    return path


def render(folder: Path) -> str:
    """The summary's text. A part without a file of results has a section with the words "Not run."."""
    parts = [f"# GPU check: {folder.name}"]
    for part, title in TITLES.items():
        file = folder / f"gpu_check-{part}.json"
        parts.append(f"## {title}")
        if not file.exists():
            parts.append("Not run.")
            continue
        result = json.loads(file.read_text())
        rows, versions = result[part], result["versions"]
        parts += _PARTS[part](rows)
        parts += _errors(rows)
        made = ", ".join(f"{name} {versions[name]}" for name in ("jax", "jaxlib", "jax-cuda13-plugin") if versions.get(name))
        torch = next((row["torch_versions"] for row in rows if row.get("torch_versions")), None)
        parts.append(f"Made with {made}" + (f", torch {torch['torch']}" if torch else "") + f"; `{file.name}`.")
    return "\n\n".join(parts) + "\n"


def _bytes(rows: Sequence[Row]) -> list[str]:
    columns = ("model", "policy", "batch", "deviceless", "on the device", "differs", "allocator's peak", "differs")
    cells = [
        (
            row["model"],
            f"`{row['policy']}`",
            row["batch"],
            gib_number(row["deviceless_bytes"]),
            gib_number(row["total_bytes"]),
            _percent(row["total_over_deviceless_percent"]),
            gib_number(row["measured_bytes"]),
            _percent(row["over_percent"]),
        )
        for row in sorted(rows, key=lambda row: (row["model"], row["policy"], row["batch"]))
    ]
    said = ["GiB: compiled without the device, compiled on it, and the high-water mark of its allocator in a fresh process."]
    for column, what in (
        ("total_over_deviceless_percent", "Compiled on the device against without it"),
        ("over_percent", "The allocator's peak against the compiled total"),
    ):
        if found := [row[column] for row in rows if row[column] is not None]:
            said.append(f"{what}: from {min(found):+.1f}% to {max(found):+.1f}%, {len(found)} trials.")
    return [*said, markdown_table(columns, cells)]


def _speed(rows: Sequence[Row]) -> list[str]:
    said = []
    for at, predicted, measured, what in (
        ("same batch", "predicted_s", "step_s", "step times"),
        ("own batch", "predicted_tokens_per_s", "tokens_per_s", "tokens/s"),
    ):
        pairs = [(row[predicted], row[measured]) for row in rows if row["at"] == at and row[predicted] and row[measured]]
        if rank := rank_correlation(pairs):
            said.append(
                f"At the {at}: Spearman's rank correlation of predicted and measured {what} {rank:.2f}, {len(pairs)} policies."
            )
    columns = ("policy", "at", "batch", "predicted ms", "measured ms", "measured / predicted", "tokens/s", "MFU")
    cells = [
        (
            f"`{row['policy']}`",
            row["at"],
            row["batch"],
            _ms(row["predicted_s"]),
            _ms(row["step_s"]),
            f"{row['step_s'] / row['predicted_s']:.2f}" if row["step_s"] and row["predicted_s"] else "-",
            _count(row["tokens_per_s"]),
            _share(row["mfu"]),
        )
        for row in rows
    ]
    models = sorted({row["model"] for row in rows if row["model"]})
    return [f"{', '.join(models)}; predicted without the device.", *said, markdown_table(columns, cells)]


def _mfu(rows: Sequence[Row]) -> list[str]:
    columns = ("what", "batch", "policy", "ms", "TFLOP/s", "MFU")
    cells = [
        (
            row["what"],
            row.get("batch"),
            f"`{row['policy']}`" if row.get("policy") else None,
            _ms(row["step_s"]),
            f"{row['flops_per_s'] / 1e12:,.1f}" if row.get("flops_per_s") else "-",
            _share(row.get("mfu")),
        )
        for row in rows
    ]
    rates = [row["flops_per_s"] for row in rows if row.get("flops_per_s")]
    share = [f"The step reaches {rates[1] / rates[0]:.0%} of the matmul's rate."] if len(rates) == 2 else []
    return [*share, markdown_table(columns, cells)]


def _profile(rows: Sequence[Row]) -> list[str]:
    columns = ("class", "kernels", "measured ms", "predicted ms", "predicted / measured")
    shown = [row for row in rows if row["measured_s"]]
    cells = [
        (
            row["kernel_class"],
            row["num_kernels"],
            _ms(row["measured_s"]),
            _ms(row["predicted_s"]),
            f"{row['predicted_s'] / row['measured_s']:.2f}",
        )
        for row in shown
    ]
    recorded = [f"{row['recorded']}." for row in shown if row.get("recorded")]
    return [markdown_table(columns, cells), *recorded]


def _peer(rows: Sequence[Row]) -> list[str]:
    columns = ("framework", "saved", "at", "batch", "ms", "tokens/s", "peak GiB", "next one failed")
    cells = [
        (
            row["framework"],
            f"`{row['arm']}`",
            row["at"],
            row.get("batch"),
            _ms(row.get("step_s")),
            _count(row.get("tokens_per_s")),
            gib_number(row.get("measured_bytes")),
            row.get("next_failed"),
        )
        for row in rows
    ]
    return ["Same shapes, parameters, tokens, dtypes and optimizer; the two in turns.", markdown_table(columns, cells)]


_PARTS: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "bytes": _bytes,
    "speed": _speed,
    "mfu": _mfu,
    "profile": _profile,
    "peer": _peer,
}


def _errors(rows: Iterable[Row]) -> list[str]:
    by_error: dict[str, int] = {}
    for row in rows:
        for key in ("error", "deviceless_error"):
            if row.get(key):
                by_error[row[key]] = by_error.get(row[key], 0) + 1
    if not by_error:
        return []
    return [f"{NOT_THERE}\n\n" + "\n".join(f"* {count} x {error}" for error, count in by_error.items())]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}%"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.1f}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
