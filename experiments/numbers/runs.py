"""What the pages take from trainings, from kills, from drawn programs and from profiles of real GPUs."""

from collections.abc import Iterator
from typing import Any

from experiments.common import Row, only, where
from experiments.kernel_times import LARGE_SHARE
from experiments.numbers.held import Part, Table, Words
from experiments.numbers.rows import EXPERIMENTS, at_most, by, either, ms, off, percent, signed, signed_span, span
from experiments.same_curve import LAST
from jaxremat.xla.calibration import load_calibration

SEVERAL_GPUS, TRAIN, TRUTH = "docs/several_gpus.md", "docs/train.md", "docs/truth.md"
#: A collective took about as long as predicted if it took less than this many times as long.
NEAR = 1.2


def same_curve(result: Any) -> Iterator[Part]:
    """Of `experiments.same_curve`."""
    rows, plain = result["rows"], result["plain_training"]
    lines = [["policy", "losses", "last one", "MiB on the GPU", "predicted ms"]]
    for row in rows:
        step = row["first_difference"]
        losses = f"differ from step {step}" if step else "equal bit for bit"
        last, size = f"{row['last_loss']:.6f}", f"{row['gpu_bytes'] / 2**20:.1f}"
        lines.append([f"`{row['policy']}`", losses, last, size, ms(row["gpu_step_s"], 3)])
    yield Table(TRAIN, "same curve", lines)
    steps, batch = len(result["losses"]), result["step"][result["step"].index("--batch") + 1]
    equal = either(not any(row["first_difference"] for row in rows), "all losses equal", "not all losses equal")
    sizes = span((row["gpu_bytes"] / 2**20 for row in rows), ".1f")
    yield Words(TRAIN, f"{steps} steps of the tiny model at batch {batch} (jax {result['versions']['jax']})")
    yield Words(
        TRAIN, f"last {LAST} steps is {plain['last_loss']:.3f} nats a byte, and the evaluation loss {plain['eval_loss']:.3f}"
    )
    yield Words(
        EXPERIMENTS,
        f"dropout, {steps} steps on the CPU under five policies and a plan: {equal} bit for bit, in {sizes} MiB ... "
        f"{plain['last_loss']:.2f} nats a byte after {plain['num_steps']} steps, the mean of the last {LAST}",
    )


def kill_train(result: Any) -> Iterator[Part]:
    """Of `experiments.kill_train`."""
    kills, command = len(result["kills"]), result["command"]
    steps, every = (command[command.index(flag) + 1] for flag in ("--num-steps", "--checkpoint-every"))
    unfinished = sum(kill["unfinished"] for kill in result["kills"])
    equal = either(not result["faults"], "all", "not all")
    runs = f"in {result['runs']} trainings of {steps} steps"
    yield Words(
        TRAIN,
        f"--kills {kills}` killed ... a checkpoint every {every} steps and dropout. {kills} kills {runs}: after {unfinished} of "
        f"them the folder had an unfinished checkpoint, and {equal} {result['compared']:,} losses",
    )
    yield Words(
        EXPERIMENTS,
        f"{kills} SIGKILLs at random moments {runs} with dropout, on the CPU: after {unfinished} of them the folder had an "
        f"unfinished checkpoint; {result['compared']:,} losses compared, {equal} equal bit for bit",
    )


def equality(result: Any) -> Iterator[Part]:
    """Of `experiments.equality`."""
    equal, version = len(result["passed"]), result["versions"]["jax"]
    parts, ways, policies = (len(result[kind]) for kind in ("parts", "written", "policies"))
    yield Words(
        EXPERIMENTS,
        f"{equal} of {equal + len(result['failed'])} on jax {version}. They are drawn with seed {result['seed']}: {parts} kinds "
        f"of parts ... layers written in {ways} ways, under {policies} policies",
    )


def shapes(first: Any, second: Any) -> Iterator[Part]:
    """Of `experiments.shapes`, with two versions of jax."""
    for result in (first, second):
        compiled, failed = len(result["compiled"]), where(result["others"], outcome="failed")
        yield Words(
            EXPERIMENTS,
            f"{compiled} of {compiled + len(failed)} configurations drawn with seed {result['seed']}, on jax "
            f"{first['versions']['jax']} and on {second['versions']['jax']}",
        )
        refused = [row["what"] for row in where(result["others"], outcome="undrawn")]
        alike = all("--dtype float16" in what and "--seq-len 1 " in what for what in refused)
        yield Words(EXPERIMENTS, f"refuses on a CPU too: float16 at length {either(alike, '1', 'others')}")


def kernel_times(result: Any) -> Iterator[Part]:
    """Of `experiments.kernel_times`."""
    whole = {row["profile"]: row for row in result["rows"] if "kernel_class" not in row}
    a100, h100 = whole["a100-pax"], whole["h100-maxtext"]
    kernels = f"{h100['num_kernels'] + a100['num_kernels']} kernels"
    sums = {row["profile"]: _error(row) for row in where(result["crossed"], kernel_class=None)}
    short, long = off(sums["h100-maxtext"]), off(sums["a100-pax"])
    large = [row for row in result["crossed"] if row["least_share"] > LARGE_SHARE]
    worst = max(large, key=lambda row: abs(_error(row)))
    within, of_the_time = at_most(map(_error, large)), f"{100 * LARGE_SHARE:.0f} % of the time"
    yield Words(
        "README.md",
        f"fitted to {kernels} of two real training steps. Fitted to one of them, the other's sum comes out within "
        f"{at_most(sums.values())}, and each class of kernels with more than {of_the_time} of both within {within}",
    )
    yield Words(
        EXPERIMENTS,
        f"training steps of 2024, {ms(h100['measured_s'], 1)} ms on an H100 and {ms(a100['measured_s'], 1)} ms on an A100 ... is "
        f"{short} too short and {long} too long, and no class with more than {of_the_time} in both is off by more than {within}",
    )
    yield Words(TRUTH, f"recorded in 2024 on H100 and A100 GPUs: {kernels}")
    yield Words(
        TRUTH,
        f"both have is {short} too short; the other way round it is {long} too long. Of the classes with more than {of_the_time} "
        f"of both, the {either(worst['kernel_class'] == 'matmul', 'large matmul', 'another')} is furthest off, by "
        f"{off(_error(worst))}; rounded up, tables show that as `±{within.replace(' ', '')}`",
    )
    small = [off(_error(row)) for row in where(result["crossed"], kernel_class="small matmul")]
    taken = only(result["rows"], profile="h100-maxtext", kernel_class="small matmul")["measured_s"] / h100["measured_s"]
    yield Words(TRUTH, f"are off by {small[0]} and {small[1]}: they take {percent(taken)} of the H100's time")
    collectives, slowed, scatter = (ms(seconds, 1) for seconds in h100["left_out_s"].values())
    yield Words(
        TRUTH, f"collectives ({collectives} ms of the H100's step) ... ({slowed} ms), and one scatter ... ({scatter} ms)"
    )
    yield _autotuned(h100["num_matmuls"], a100["num_matmuls"])
    shares = load_calibration((9, 0))
    matmul, transpose = dict(shares.flops_share)["matmul"], dict(shares.bandwidth_share)["transpose"]
    yield Words(
        TRUTH, f"{matmul:.2f} of the FLOP/s for a large matmul on an H100, {transpose:.2f} of the bandwidth for a transpose"
    )
    yield _gathers([row for row in where(result["collectives"], kind="all-gather") if row["num_bytes"] > 1e6])


def published(result: Any) -> Iterator[Part]:
    """Of `experiments.published`."""
    rows = result["steps"]
    lines = [["step", "GPUs", "mesh", "measured s", "predicted s", "longer", "source"]]
    for row in rows:
        times = (f"{row[key]:.3f}" for key in ("measured_s", "predicted_s"))
        lines.append([row["name"], row["target"], f"`{row['mesh']}`", *times, signed(row["longer"]), row["source"]])
    yield Table(TRUTH, "published steps", lines)
    h100s, a100s = ([row["longer"] for row in rows if row["target"].startswith(chip)] for chip in ("h100", "a100"))
    found = f"{_longer(h100s)} longer on several H100s than predicted, and {_longer(a100s)} on A100s"
    yield Words("README.md", found)
    yield Words(TRUTH, found)
    sizes = [row["num_devices"] for row in rows]
    yield Words(EXPERIMENTS, f"{len(rows)} steps: {found}. On {min(sizes)} to {max(sizes)} GPUs")


def _longer(shares: list[float]) -> str:
    """By how much steps took longer: `+2.0 to +37 %`, or `+1.5 %` where there is one."""
    return signed_span(shares) if len(shares) > 1 else signed(shares[0])


def _autotuned(h100: Row, a100: Row) -> Words:
    """By what real autotuners computed matmuls."""
    every = either(not h100["triton"], "all", "not all")
    return Words(
        TRUTH,
        f"cuBLAS for {every} {h100['cublas']} matmuls on an H100, and for {a100['cublas']} of {sum(a100.values())} on an A100",
    )


def _gathers(large: list[Row]) -> Words:
    """Of large gathers: of those of the most frequent size between the H100s, and of all between the A100s."""
    sizes = by(where(large, profile="h100-maxtext"), "num_bytes")
    size, gathers = max(sizes.items(), key=lambda pair: len(pair[1]))
    near, others = [], []
    for row in gathers:
        some = near if row["measured_s"] < NEAR * row["predicted_s"] else others
        some += [1e6 * row["measured_s"]] * row["num_launches"]
    least = min(row["measured_s"] / row["predicted_s"] for row in where(large, profile="a100-pax"))
    return Words(
        SEVERAL_GPUS,
        f"{either(len(near) > len(others), 'Most', 'Few')} gathers of {size / 1e6:.0f} MB between the H100s took {span(near)} "
        f"microseconds, where {1e6 * gathers[0]['predicted_s']:.0f} are predicted, and the others {span(others)}. Those between "
        f"the A100s took at least {least:.1f} times",
    )


def _error(row: Row) -> float:
    """How far a prediction is from what was measured, as a share."""
    return row["predicted_s"] / row["measured_s"] - 1


def next_jax(result: Any) -> Iterator[Part]:
    """Of `experiments.next_jax`."""
    (before, now, remat3), newest = result["rows"].values(), result["newest"]["jax"]
    old_bytes = {row["what"]: row["total_bytes"] for row in before if "total_bytes" in row}
    shares = [row["total_bytes"] / old_bytes[row["what"]] - 1 for row in now if "total_bytes" in row]
    yield Words(
        EXPERIMENTS,
        f"jax {newest} beside {result['versions']['jax']}: {len(shares)} of {len(old_bytes)} small steps compile, from "
        f"{signed_span(shares)} in bytes, and {_passed(now)} tests pass ... Under `jax_remat3` "
        f"{sum('total_bytes' in row for row in remat3)} of {len(old_bytes)} steps and {_passed(remat3)} tests do",
    )


def _passed(rows: list[Row]) -> str:
    """How many tests passed, of those that ran: `82 of 83`."""
    tests = [row for row in rows if "passed" in row]
    passed = sum(row["passed"] for row in tests)
    return f"{passed} of {passed + sum(len(row['failed']) for row in tests)}"
