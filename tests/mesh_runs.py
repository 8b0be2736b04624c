"""What the tests of meshes share: a decoder large enough to be divided, a run of it, and the records of a command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxremat.chips.target import Target
from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.mesh.sharding import tracing_on
from jaxremat.model.decoder_workload import decoder_factory
from jaxremat.policy.spec import NONE
from jaxremat.step.step import abstract_args, make_step
from jaxremat.trial.trials import Trials
from jaxremat.xla.flops import count_step_flops
from tests.helpers import LLAMA

#: Its kernels are larger than what each device would hold whole.
MODEL = replace(LLAMA, embed_dim=256, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=1024, vocab_size=2048, dropout=0.0)
TRAIN = TrainConfig(seq_len=256, loss="chunked")
#: Flags of a decoder whose kernels are divided, and which is compiled in a second or two.
SMALL = (
    *("--embed-dim", "256", "--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "64", "--mlp-dim", "1024"),
    *("--vocab-size", "2048", "--max-seq-len", "256", "--seq-len", "256", "--loss", "chunked", "--dropout", "0"),
)


def make_run(target: Target, model: ModelConfig = MODEL, train: TrainConfig = TRAIN, budget_bytes: int = 2**40) -> Trials:
    """A run of the decoder with cuDNN's attention."""
    return Trials(decoder_factory(model, "cudnn"), train, target, budget_bytes)


def traced_flops(run: Trials, batch: int) -> int:
    """FLOPs that JAX requests in the step under `none` on all devices, counted in its jaxpr."""
    workload, train = run.workload_of(batch), run.train_at(batch)
    with tracing_on(run.target.mesh):
        return count_step_flops(jax.make_jaxpr(make_step(workload, train, NONE))(*abstract_args(workload, train))).total


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["record"] == kind]
