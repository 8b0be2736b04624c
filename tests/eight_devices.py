"""One training step on 8 devices of the CPU, beside the same step on one: `python -m tests.eight_devices` prints what differs.

It is a process of its own, because JAX makes as many devices as are asked for when it starts.
"""

import functools
import json
import os
from dataclasses import replace
from typing import Any

os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from jaxremat.chips.target import load_target
from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.mesh.axes import parse_mesh
from jaxremat.model.decoder_workload import DecoderFactory
from jaxremat.policy.grammar import parse
from jaxremat.step.inputs import first_state, inputs
from jaxremat.step.step import step_shardings
from jaxremat.trial.trials import Trials
from tests.helpers import LLAMA, QUICK

Arrays = list[np.ndarray[Any, Any]]
#: Float32 throughout. Kernels are larger than what each device would hold whole.
MODEL = replace(
    LLAMA, num_layers=2, embed_dim=128, num_heads=4, num_kv_heads=4, head_dim=32, mlp_dim=512, vocab_size=512, dropout=0.0
)
TRAIN = TrainConfig(
    seq_len=32, loss="chunked", optimizer="sgd-momentum", learning_rate=1.0, schedule="constant", clip_norm=None
)
#: Gathered kernels of attention and of the MLP, saved for the backward pass.
GATHERED = "save:query_gathered,wi_0_gathered,mlpwi_0,wo_gathered"
EXPERTS = replace(MODEL, num_experts=4, router_loss=0.1)
#: The model, the mesh, whether the layers are scanned, the number of microbatches, and the policies.
CASES = (
    (MODEL, "data=2,fsdp=4", True, 1, ("nothing", GATHERED, "every:2+nothing", "none")),
    (MODEL, "data=2,fsdp=2,tensor=2", True, 2, ("dots",)),
    (MODEL, "fsdp=2,tensor=4", False, 1, ("nothing", GATHERED)),
    (EXPERTS, "fsdp=2,expert=4", True, 1, ("nothing",)),
    (replace(EXPERTS, dispatch="ragged"), "data=2,expert=2,tensor=2", False, 1, ("nothing",)),
)


def run_of(model: ModelConfig, mesh: str | None, accumulate: int) -> Trials:
    target = load_target("cpu", parse_mesh(mesh))
    return Trials(DecoderFactory(model, "xla"), replace(TRAIN, accumulate=accumulate), target, 2**40)


@functools.cache
def start_of(model: ModelConfig, accumulate: int) -> Any:
    """The first state and the batch, as arrays of NumPy."""
    run = run_of(model, None, accumulate)
    workload = run.workload_at(16)
    return jax.device_get((first_state(workload, run.train, run.target.device), next(inputs(workload, run.train))))


def after_a_step(model: ModelConfig, mesh: str | None, policy: str, *, scan_layers: bool, accumulate: int) -> Arrays:
    """The loss, and the parameters after a step of gradient descent with a rate of 1, from which the gradients follow."""
    model = replace(model, dtype="float32", scan_layers=scan_layers)
    run = run_of(model, mesh, accumulate)
    compiled = replace(run, options=QUICK).compile(parse(policy), 16 // run.num_members).compiled
    where = step_shardings(run.target.mesh, run.workload_at(16), run.train)[0] if run.target.mesh else run.target.device
    state, loss = compiled(*jax.device_put(start_of(model, accumulate), where))
    return [np.asarray(leaf) for leaf in (loss, *jax.tree.leaves(state.params))]


def main() -> None:
    """Prints the number of steps, and how far each differs from one device, and from the first policy on its mesh."""
    print(sum(len(policies) for *_, policies in CASES))
    for model, mesh, scan_layers, accumulate, policies in CASES:
        same: dict[str, Any] = {"scan_layers": scan_layers, "accumulate": accumulate}
        alone = after_a_step(model, None, "none", **same)
        on_mesh = [after_a_step(model, mesh, policy, **same) for policy in policies]
        for policy, found in zip(policies, on_mesh, strict=True):
            differences = {"to_one_device": difference(found, alone), "to_first_policy": difference(found, on_mesh[0])}
            print(json.dumps({"mesh": mesh, "policy": policy, **same, **differences}))


def difference(some: Arrays, others: Arrays) -> float:
    """The largest difference of an array to the other one, as a share of the other one's largest value."""
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in zip(some, others, strict=True))


if __name__ == "__main__":
    main()
