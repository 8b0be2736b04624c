"""A table of every kind that the commands print, made from records that no step was run for."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rich.table import Table

from jaxremat.chips.nvidia.nvml import Gpu, GpuProcess, Reading
from jaxremat.knapsack.prices import FurtherBudget, Price
from jaxremat.mesh.sharding import ParamSharding
from jaxremat.policy.names import NamedValue
from jaxremat.report import doctor, explain, lengths, lists, meshes, plan, recommend, steps, sweep
from jaxremat.report.doctor import Row
from jaxremat.search.buckets import Bucket, Bucketed
from jaxremat.search.histogram import Histogram
from jaxremat.trial.bucketed import lengths_record
from jaxremat.trial.comparisons import MeshChoiceRecord
from jaxremat.trial.details import ComparedMesh, LargeBuffer, PlannedLayout, StateOnMesh
from jaxremat.trial.queue import SweepTrial
from jaxremat.trial.recommendation import recommendation
from jaxremat.trial.record import SuggestionRecord
from jaxremat.xla.buffers import SOURCES
from jaxremat.xla.step_facts import Finding
from tests.made_up_records import GIB, NO_BYTES, explained, measured, step
from tests.made_up_records import plan as planned

NAMES = "attention_norm/convert_element_type.1,attention/query/convert_element_type,query_proj,mlpwi_0,mlpwi_1,mlpwo"
POLICY = f"save:{NAMES}+attention"
MANY: dict[str, Any] = dict(
    total_bytes=1234 * GIB + 567 * 2**20, host_temp_bytes=123 * GIB, predicted_interval=(-0.06, 0.36)
)
ROWS = [
    step(POLICY, 188_943, 1274.3217, requested_policy="auto", mfu=0.0331, **MANY),
    step("nothing", 8, 0.0005, requested_policy="nothing_saveable", mesh="data=2,fsdp=4,tensor=8", accumulate=131_072),
    step("save_qkv_proj", 8, None, fits=False, error="RESOURCE_EXHAUSTED: x", **NO_BYTES),
]
LENGTHS = [replace(row, seq_len=seq_len) for row, seq_len in zip(ROWS, (131_072, 1024, 1024), strict=True)]
DATA = Bucketed(Histogram(((60, 3_000_000), (500, 1))), 1, (Bucket(64, 3_000_000, 180_000_000), Bucket(512, 1, 500)))
BUCKETS = [replace(row, seq_len=n, fits=True) for row, n in zip(ROWS, (64, 512), strict=False)]
PLAN = planned(
    layouts=tuple(
        PlannedLayout(one, "dots", "full", 8, GIB, 1.2743217, 44_078_237.0, 119.7) for one in ("unrolled", "loop")
    ),
    prices=tuple(Price(name, 12 * GIB, 2e-3, True, False) for name in NAMES.split(",")),
    more=(FurtherBudget(128 * GIB, 0.0123), FurtherBudget(GIB, 1e-5)),
    layers=("dots",) * 128,
)
SIZES = dict.fromkeys(SOURCES, 123 * GIB + 45 * 2**20)
EXPLAINED = explained(
    POLICY,
    188_943,
    requested_policy="auto",
    total_bytes=861 * GIB,
    attribution={"residuals": 600 * GIB, "optimizer state": 261 * GIB, "gaps": 0},
    sources=SIZES,
    state=(StateOnMesh("parameters", 8031 * GIB, GIB, 123 * GIB),),
    mesh="data=2,fsdp=4,tensor=8",
    num_devices=64,
    largest=(
        LargeBuffer(
            "residuals", "Block_*/up/dot_general", "bf16[128,32,8192,12288]", 128, "", "", "a/linen_unrolled.py:133", GIB
        ),
        LargeBuffer(
            "optimizer state", "state.opt_state[0].nu['Block_11']['kernel']", "f32[50257,768]", 1, "", "", "", GIB, 12
        ),
    ),
    findings=(
        Finding("attention-twice", "12 kernels of 24 run twice: 1,234.56 GFLOP", f"--policy {POLICY}", GIB, "layers.py:7"),
    ),
)
MESHES = MeshChoiceRecord(
    **dict[str, Any](model="m", requested_policy="minimal", target="h100-80gb", seq_len=1024, num_devices=64, num_nodes=8),
    **dict[str, Any](
        budget_bytes=60 * GIB, loss="chunked", layout="loop", mesh="data=2,fsdp=32", num_compiles=5, versions={}
    ),
    meshes=(
        ComparedMesh("data=2,fsdp=32", 11 * GIB, 188_943, 50 * GIB, 1_213_000.0, 1_212_000.0, 3),
        ComparedMesh("fsdp=16,tensor=4,expert=8", 11 * GIB, bound_tokens_per_s=1_214_000.0, left_out="at most 0.2% faster"),
        ComparedMesh("data=64", 8031 * GIB, left_out="state 7971.00 GiB over"),
    ),
)
SUGGESTED = SuggestionRecord(
    **dict[str, Any](model="gpt2", target="h100-80gb", policy="dots", loss="full", optimizer="adamw", batch=8, accumulate=1),
    **dict[str, Any](budget_bytes=16 * GIB, step_s=1.2743217, step_source="predicted", tokens_per_s=44_078_237.0),
    **dict[str, Any](flags=f"--policy {POLICY} --batch 188943", total_bytes=1234 * GIB, num_compiles=1, versions={}),
)
RENT = [
    recommendation(
        *("m", "rtx-pro-6000-blackwell", 64),
        {"auto": [replace(ROWS[0], mesh="data=8,fsdp=8", xla_preset="default")]},
        123.45,
        none=[replace(ROWS[1], mesh="data=8,fsdp=8", fits=False, total_bytes=1234 * GIB)],
    ),
    recommendation("m", "h100-80gb", 8, {"nothing": [replace(ROWS[1], fits=False)]}, 1.0),
]
TRIAL = SweepTrial("key", "gpt2", "auto", "h100-80gb", 188_943, None, {}, seq_len=131_072)
GPU = Gpu(0, "NVIDIA H200", 140 * GIB, 12 * GIB, 128 * GIB, (9, 0), 35, (GpuProcess(1_234_567, "/usr/bin/python3.11", GIB),))
CHECKS = [
    Row("GPU 0", "problem", "1,234.56 GiB of 139.81 GiB are used by /usr/lib/python3.11/site-packages/a.py", "kill 42")
]
NAMED = {NamedValue("attention/query/convert_element_type", (128, 32, 8192, 12_288), "bfloat16", GIB, False): 128}
SHARDED = ParamSharding("layers/attention/query/kernel", (4096, 14_336), ("fsdp", ("data", "tensor")), GIB, 3 * 2**20, "")

BY_LENGTH = lengths_record(DATA, Path("some.txt"), BUCKETS, 5)
assert BY_LENGTH
GPUS = cast(list[Table], doctor.gpu_table(Reading("580.1", "13.0", (GPU,)), {0: 13 * GIB}).renderables)

TABLES: dict[str, Table] = {
    "batches": steps.batch_table(ROWS[:1] + ROWS[2:]),
    "attached": steps.batch_table([measured("dots", 188_943, 1274.3217, 1300.0, host_temp_bytes=123 * GIB, accumulate=16)]),
    "policies": steps.policy_table(ROWS, "policies side by side"),
    "ties": steps.policy_table([replace(ROWS[0], policy=policy, paired_error=0.09) for policy in ("none", POLICY)], "ties"),
    "frontier": steps.frontier_table(ROWS),
    "suggestions": steps.suggestions_table([SUGGESTED]),
    "lengths": lengths.lengths_table(LENGTHS),
    "buckets": lengths.buckets_table(BY_LENGTH),
    "rates": lengths.rates_table(BY_LENGTH),
    "meshes": meshes.meshes_table(MESHES),
    "layouts": plan.layouts_table(PLAN),
    "prices": plan.price_table(PLAN),
    "more budget": plan.more_table(PLAN),
    "holders": explain.holders_table(EXPLAINED),
    "sources": explain.sources_table(EXPLAINED),
    "state": explain.state_table(EXPLAINED),
    "largest": explain.largest_table(EXPLAINED),
    "lint": explain.findings_table(EXPLAINED),
    "explained": explain.rows_table([EXPLAINED]),
    "recommend": recommend.recommend_table(RENT, "what to rent for m", by_cost=True, width=80),
    "sweep": sweep.sweep_table([sweep.Line(TRIAL, "ok", (LENGTHS[0],))]),
    "doctor": doctor.doctor_table(CHECKS),
    "watch": GPUS[0],
    "processes": GPUS[1],
    "list policies": lists.policies().table(),
    "list models": lists.models().table(),
    "list targets": lists.targets().table(),
    "list optimizers": lists.optimizers("llama3-8b", 8_030_261_248, {"adamw": 64_242_089_984}).table(),
    "list names": lists.names("names of m", NAMED, 2).table(),
    "list shardings": lists.shardings("parameters of m", [SHARDED]).table(),
}
