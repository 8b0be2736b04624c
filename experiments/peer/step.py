"""One arm of the PyTorch side in a process of its own: `python -m experiments.peer.step --arm selective --batches 8`.

Prints a JSON line for each batch: the median step, tokens a second, the allocator's peak. With `--largest` it also looks for
the largest batch: two sizes give a line, the line a guess, and the guess is run and corrected until one ran and a larger one
ran out of memory (or the tries are over).
"""

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from experiments.common import flags_of
from experiments.peer.model import Block, Decoder, cross_entropy
from jaxremat.model.data import spread_tokens
from jaxremat.model.presets import preset

Arm = Literal["none", "full", "selective", "budget"]
#: Guesses at the largest batch, after the two sizes that give the line.
NUM_TRIES = 4
_ATEN = torch.ops.aten
#: What the selective arm saves: matmuls and attention, as `dots+attention` does.
SAVED = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}


@dataclass(frozen=True)
class Flags:
    """One arm of the PyTorch training step, measured."""

    arm: Arm = "none"
    """none: no checkpointing; full: each layer run again; selective: matmuls and attention saved; budget: torch.compile's
    own choice within --memory-budget."""
    model: str = "gpt2"
    seq_len: int | None = None
    batches: tuple[int, ...] = (8,)
    largest: bool = False
    """Look for the largest batch too (on a GPU)."""
    memory_budget: float = 0.5
    """Of the budget arm: activations to keep, as a share of what `none` keeps."""
    mem_fraction: float = 0.75
    """Share of the GPU's memory, as JAX's allocator takes."""
    steps: int = 10
    device: Literal["cuda", "cpu"] = "cuda"
    backend: str | None = None
    """Of torch.compile; default: inductor on a GPU, aot_eager on a CPU."""


def wrap_layer(arm: Arm, backend: str | None) -> Callable[[Block], Callable[[Tensor], Tensor]]:
    """Checkpoints and compiles a layer: each layer as a graph of its own, as torchtitan does; all share one compilation."""

    def select(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    def wrap(block: Block) -> Callable[[Tensor], Tensor]:
        run: Callable[..., Any] = block
        if arm == "full":
            run = partial(checkpoint, block, use_reentrant=False)
        elif arm == "selective":
            contexts = partial(create_selective_checkpoint_contexts, select)
            run = partial(checkpoint, block, use_reentrant=False, context_fn=contexts)
        return torch.compile(lambda x: run(x), backend=backend, dynamic=False) if backend else run

    return wrap


class Trainer:
    """A model under one arm, and its optimizer; `step` takes tokens `int[B, T + 1]`."""

    def __init__(self, flags: Flags) -> None:
        self.flags, chosen = flags, preset(flags.model)
        backend = flags.backend or ("inductor" if flags.device == "cuda" else "aot_eager")
        backend = None if backend == "eager" else backend
        torch.manual_seed(0)
        with torch.device(flags.device):
            self.model = Decoder(chosen.config, wrap_layer(flags.arm, backend))
        self.num_params = sum(parameter.numel() for parameter in self.model.parameters())
        if self.num_params != chosen.num_params:
            raise SystemExit(f"{flags.model} has {self.num_params:,} parameters here and {chosen.num_params:,} in JAX")
        functorch_config.activation_memory_budget = flags.memory_budget if flags.arm == "budget" else 1.0
        self.loss = torch.compile(cross_entropy, backend=backend, dynamic=False) if backend else cross_entropy
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.seq_len = flags.seq_len or chosen.seq_len
        self.attention = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def step(self, tokens: Tensor) -> Tensor:
        """One update; the loss before it."""
        with sdpa_kernel(self.attention, set_priority=True):
            loss = self.loss(self.model.hidden(tokens[:, :-1]), self.model.head, tokens[:, 1:])
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def measure(self, batch: int) -> dict[str, Any]:
        """The median of real steps after two that warm up; with the allocator's peak on a GPU. Running out is a row too.

        As in `jaxremat.trial.measure`, all steps have the same tokens, and a step is started while the device computes another.
        """
        flags, on_gpu = self.flags, self.flags.device == "cuda"
        stream = spread_tokens(self.model.config.vocab_size, batch, self.seq_len, seed=0)
        row: dict[str, Any] = {"arm": flags.arm, "model": flags.model, "num_params": self.num_params, "batch": batch}
        seconds, given, ended, loss = [], deque(), 0.0, None
        try:
            tokens = torch.from_numpy(next(stream)).long().to(flags.device)
            for i in range(2 + flags.steps):
                if i == 1 and on_gpu:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                given_at = time.perf_counter()
                loss = self.step(tokens)
                given.append((given_at, self._end_of_step()))
                while len(given) > (i < 1 + flags.steps):
                    given_at, wait = given.popleft()
                    wait()
                    began, ended = max(given_at, ended), time.perf_counter()
                    seconds.append(ended - began)
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            return {**row, "error": "out of memory", "error_kind": "oom"}
        step_s = statistics.median(seconds[2:])
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        measured = {"step_s": step_s, "tokens_per_s": batch * self.seq_len / step_s, "peak_bytes": peak}
        return {**row, **measured, "last_loss": float(loss) if loss is not None else None, "first_step_s": seconds[0]}

    def _end_of_step(self) -> Callable[[], None]:
        """The function that waits until the device has computed what it was given so far."""
        if self.flags.device != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize


def largest_batch(
    measure: Callable[[int], dict[str, Any]], sizes: tuple[int, int], limit_bytes: int
) -> Iterator[dict[str, Any]]:
    """Rows of the search: two sizes, then guesses from the line through the two largest that ran, each below any that failed."""
    ran = [row for batch in sizes if "error" not in (row := measure(batch))]
    yield from ran
    failed = None
    for _ in range(NUM_TRIES):
        if len(ran) < 2:
            return
        low, high = ran[-2:]
        per_sequence = (high["peak_bytes"] - low["peak_bytes"]) / (high["batch"] - low["batch"])
        guess = int(high["batch"] + (limit_bytes - high["peak_bytes"]) / max(per_sequence, 1))
        if failed is not None:
            guess = min(guess, failed - 1, (high["batch"] + failed) // 2)
        if guess <= high["batch"]:
            guess = high["batch"] + 1
        if guess == failed:
            return
        row = measure(guess)
        yield {**row, "search": True}
        if "error" in row:
            failed = guess
        else:
            ran.append(row)


def main(argv: list[str] | None = None) -> int:
    """Measures one arm; a line of JSON a batch."""
    flags = flags_of(Flags, argv, "experiments.peer.step")
    limit_bytes = 0
    if flags.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(flags.mem_fraction)
        limit_bytes = int(flags.mem_fraction * torch.cuda.get_device_properties(0).total_memory)
    trainer, versions = Trainer(flags), {"torch": torch.__version__, "cuda": torch.version.cuda}

    def tell(row: dict[str, Any]) -> None:
        print(json.dumps({**row, "budget_bytes": limit_bytes or None, "versions": versions}), flush=True)

    for batch in flags.batches:
        tell(trainer.measure(batch))
    if flags.largest and flags.device == "cuda":
        first = max(flags.batches)
        for row in largest_batch(trainer.measure, (first, 2 * first), limit_bytes):
            tell(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
