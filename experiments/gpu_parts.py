"""The parts of `experiments.gpu_check`. Each part yields a row as soon as it is measured.

A row that couldn't be measured within the part's time has an error that says so.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.children import Child, Row, in_parallel, run_child
from experiments.common import PROFILES
from jaxremat.system.process import Deadline
from jaxremat.trial.task import SHARED_FOLDER

#: A plan whose layers are in a scan: unrolled ones take several times longer to compile. Named policies are in a scan anyway.
IN_A_SCAN = ("--scan-layers", "True")
#: The step of `mfu` with unrolled layers is left out where less time is left.
UNROLLED_S = 75
#: PyTorch's largest batch is left out where less time is left.
LARGEST_S = 60
#: The policies that are also measured at their own batch: the one with the largest, and the plan.
AT_OWN_BATCH = ("auto", "nothing")
#: Pairs of a policy here and the kind of checkpointing in PyTorch that corresponds to it by what is saved.
PAIRS = (("none", "none"), ("nothing", "full"), ("dots+attention", "selective"), ("auto", "budget"))


@dataclass(frozen=True)
class Size:
    """A model and how it is tried.

    Attributes:
        name: the preset's name.
        batches: the batches that it is tried at. Each fits under every policy.
        loss: the loss, `full` or `chunked`.
        flags: the flags of `jaxremat.run` for it. Empty stands for `--model` and the name.
    """

    name: str
    batches: tuple[int, ...]
    loss: str
    flags: tuple[str, ...] = ()

    def argv(self) -> tuple[str, ...]:
        """The flags of `jaxremat.run` for this model."""
        return self.flags or ("--model", self.name)


@dataclass(frozen=True)
class Check:
    """What is checked.

    Attributes:
        device: the name of the results' folder.
        target: the target of the device, `gpu` or `cpu`.
        deviceless: the target that stands for the same GPU when compiling without it. None if there is none.
        sizes: two models. The first is for speed and PyTorch, the second for MFU. The bytes are measured of both.
        policies: the named policies.
        limit_s: the time for a part, in seconds.
        num_workers: the number of processes at a time where no time is measured.
        shared: the folder in which the commands share compiled steps, counts and plans.
        matmul_size: the size of the square matrices of the large matmul.
        more: further flags for every `jaxremat.run`.
        pairs: pairs of a policy here and the kind of checkpointing in PyTorch that corresponds to it by what is saved.
        profiles: the folder that the profile is written to.
    """

    device: str
    target: str
    deviceless: str | None
    sizes: tuple[Size, Size]
    policies: tuple[str, ...]
    limit_s: float
    num_workers: int
    shared: Path
    matmul_size: int = 8192
    more: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = PAIRS
    profiles: Path = PROFILES

    def attached(self, deadline: Deadline, size: Size, *argv: str, share: bool = False) -> Child:
        """Runs `jaxremat.run` on the device.

        With `share` the process takes no more memory than it needs, because other processes use the device too.
        """
        environment = {"JAX_PLATFORMS": "cuda,cpu" if self.target == "gpu" else "cpu", SHARED_FOLDER: str(self.shared)}
        if share:
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        flags = ("--json", "--target", self.target, *size.argv(), *self.more, *argv)
        return run_child("jaxremat.run", flags, deadline, environment)

    def compiled(self, deadline: Deadline, size: Size, *argv: str) -> Child:
        """Runs `jaxremat.run` for the same GPU without using the GPU."""
        if self.deviceless is None:
            return Child((), "no description of this GPU comes with jaxremat")
        flags = ("--json", "--target", self.deviceless, *size.argv(), *self.more, *argv)
        return run_child("jaxremat.run", flags, deadline, {"JAX_PLATFORMS": "cpu", SHARED_FOLDER: str(self.shared)})

    def planned(self, deadline: Deadline, size: Size, name: str, *argv: str) -> tuple[Child, Path]:
        """A plan in a scan, made without the device, and its file, which isn't there if there is no plan.

        A plan of this name that another part has made is taken as it is.
        """
        file = self.shared / f"{name}.json"
        in_scan = () if IN_A_SCAN[0] in size.argv() else IN_A_SCAN
        if file.exists():
            return Child((), ""), file
        return self.compiled(deadline, size, "--policy", "auto", *in_scan, "--save-plan", str(file), *argv), file

    def budget(self, num_bytes: int | None) -> tuple[str, ...]:
        """The flags that give a compile without the device the device's own budget of `num_bytes`."""
        return () if num_bytes is None or "--budget" in self.more else ("--budget", f"{num_bytes}B")


def percent_over(value: int | None, base: int | None) -> float | None:
    """By how many percent `value` is above `base`. None if one of them is missing."""
    return 100 * (value / base - 1) if value and base else None


def measure_bytes(check: Check) -> Iterator[Row]:
    """The bytes of every policy at every batch of both models.

    They are compiled without the device, compiled on it, and shown by its allocator as the peak. A command does all policies at
    a batch, `none` first, from which the recomputation of the others is counted.
    """
    deadline = Deadline(check.limit_s)
    steps = () if "--steps" in check.more else ("--steps", "1")

    def run(job: tuple[Size, int, bool]) -> Child:
        size, batch, here = job
        flags = ("--policy", *check.policies, "--loss", size.loss, "--batch", str(batch))
        return check.attached(deadline, size, *flags, *steps, share=True) if here else check.compiled(deadline, size, *flags)

    tried = [(size, batch) for size in check.sizes for batch in size.batches]
    done: dict[tuple[Size, int, bool], Child] = {}
    jobs = [(size, batch, here) for here in (True, False) for size, batch in tried]
    for (size, batch, here), child in in_parallel(check.num_workers, deadline, run, jobs):
        done[size, batch, here] = child
        if (size, batch, not here) in done:
            for policy in check.policies:
                yield _bytes_row(size, policy, batch, done[size, batch, False], done[size, batch, True])


def _bytes_row(size: Size, policy: str, batch: int, without: Child, with_device: Child) -> Row:
    """The row of one policy at a batch, from the commands that ran without the device and with it."""
    told, shown = (child.find("trial", requested_policy=policy, batch=batch) or {} for child in (without, with_device))
    total, peak = shown.get("total_bytes"), shown.get("measured_peak_bytes")
    return {
        "model": size.name,
        "policy": policy,
        "batch": batch,
        "loss": size.loss,
        "deviceless_bytes": told.get("total_bytes"),
        "total_bytes": total,
        "total_over_deviceless_percent": percent_over(total, told.get("total_bytes")),
        "measured_bytes": peak,
        "over_percent": percent_over(peak, total),
        "deviceless_error": told.get("error") or (without.error if not told else "") or None,
        "error": shown.get("error") or (with_device.error if not shown else "") or None,
    }


def measure_speed(check: Check) -> Iterator[Row]:
    """The step times predicted without the device and measured on it, at one batch and then at the batch of `AT_OWN_BATCH`.

    A named policy's own batch is the largest that fits. The plan's own batch is the one with the most tokens per second.
    """
    deadline, size = Deadline(check.limit_s), check.sizes[0]
    batch, loss = str(size.batches[-1]), ("--loss", size.loss)

    def ahead(policies: tuple[str, ...]) -> Child:
        if policies == ("auto",):
            return check.planned(deadline, size, f"{size.name}-{batch}", *loss, "--batch", batch)[0]
        return check.compiled(deadline, size, "--policy", *policies, *loss, "--batch", batch)

    told = [child for _, child in in_parallel(2, deadline, ahead, [check.policies, ("auto",)])]
    plan = check.shared / f"{size.name}-{batch}.json"
    planned = (f"plan:{plan}",) if plan.exists() else ()
    here = check.attached(deadline, size, "--policy", *check.policies, *planned, *loss, "--batch", batch)
    rows = Child(tuple(row for child in told for row in child.rows), "")
    for policy in (*check.policies, "auto"):
        requested = f"plan:{plan}" if policy == "auto" else policy
        error = here.error or next((child.error for child in told if child.error), "")
        yield _speed_row(policy, "same batch", rows.find("trial", requested_policy=policy), here, requested, error)
    budget = check.budget(next((row["budget_bytes"] for row in here.rows if row.get("budget_bytes")), None))

    def search(policy: str) -> Child:
        if policy == "auto":
            return check.planned(deadline, size, f"{size.name}-largest", *loss, *budget)[0]
        return check.compiled(deadline, size, "--policy", policy, *loss, *budget)

    wanted = [policy for policy in AT_OWN_BATCH if policy in (*check.policies, "auto")]
    for policy, found in in_parallel(len(wanted), deadline, search, wanted):
        largest = (found.find("largest_batch") or found.find("plan") or {}).get(
            "batch" if policy == "auto" else "largest_batch"
        )
        if not largest:
            why = found.error or "not even batch 1 fits"
            yield _speed_row(policy, "own batch", None, Child((), ""), policy, why)
            continue
        requested = f"plan:{check.shared / f'{size.name}-largest.json'}" if policy == "auto" else policy
        here = check.attached(deadline, size, "--policy", requested, *loss, "--batch", str(largest), *budget)
        yield _speed_row(policy, "own batch", found.find("trial", batch=largest), here, requested, here.error)


def measure_profile(check: Check) -> Iterator[Row]:
    """The times of the kernels of one step of the first model: a row for all of them, and one for each class."""
    from experiments.kernel_times import rows_of
    from experiments.profile_data import load_profile

    size = check.sizes[0]
    name = f"{check.device}-{size.name}"
    flags = dict(zip(size.argv()[::2], size.argv()[1::2], strict=True))
    argv = ["--name", name, "--model", flags.pop("--model"), "--batch", str(size.batches[-1]), "--target", check.target]
    argv += ["--known-as", check.deviceless] if check.deviceless else []
    argv += ["--more", f"loss={size.loss}", *(f"{flag.lstrip('-')}={value}" for flag, value in flags.items())]
    environment = {"JAX_PLATFORMS": "cuda,cpu" if check.target == "gpu" else "cpu"}
    deadline = Deadline(check.limit_s)
    child = run_child("experiments.record_profile", (*argv, "--out", str(check.profiles)), deadline, environment)
    if child.find("profile") is None:
        yield {"kernel_class": "all", "num_kernels": None, "measured_s": None, "predicted_s": None, "error": child.error}
        return
    for row in rows_of(load_profile(name, check.profiles)):
        yield {"kernel_class": "all", **row, "error": None}


def _speed_row(policy: str, at: str, told: Row | None, here: Child, requested: str, error: str) -> Row:
    """The row of one policy: the predicted trial beside the measured one.

    Args:
        policy: the policy that the row shows.
        at: `same batch` or `own batch`.
        told: the predicted trial, None if there is none.
        here: the child that measured on the device.
        requested: the policy as it was given to that child.
        error: why nothing was measured, if the measured trial doesn't say.
    """
    shown, told = here.find("trial", requested_policy=requested) or {}, told or {}
    measured = shown.get("step_source") == "measured"
    missing = None if measured else shown.get("error") or error or "it doesn't fit on the device"
    return {
        "policy": policy,
        "as": shown.get("policy") or told.get("policy"),
        "at": at,
        "model": shown.get("model") or told.get("model"),
        "batch": shown.get("batch") or told.get("batch"),
        "predicted_s": told.get("step_s"),
        "predicted_here_s": (shown.get("predicted") or {}).get("step_s"),
        "step_s": shown.get("step_s") if measured else None,
        "min_s": shown.get("step_min_s"),
        "max_s": shown.get("step_max_s"),
        "tokens_per_s": shown.get("tokens_per_s") if measured else None,
        "predicted_tokens_per_s": told.get("tokens_per_s"),
        "mfu": shown.get("mfu") if measured else None,
        "total_bytes": shown.get("total_bytes") or told.get("total_bytes"),
        "budget_bytes": shown.get("budget_bytes"),
        "error": missing,
    }


def measure_mfu(check: Check) -> Iterator[Row]:
    """The FLOP/s of a large matmul, and the step of the second model under its plan: in a scan, and if there is time unrolled.

    The plan is made without the device, while the matmul runs, within 0.74 of the device's memory. The allocator's limit is 0.75
    of a memory that is a little smaller than the datasheet says.
    """
    deadline, size = Deadline(check.limit_s), check.sizes[1]
    platforms = {"JAX_PLATFORMS": "cuda,cpu" if check.target == "gpu" else "cpu"}
    fraction = () if "--budget" in check.more else ("--mem-fraction", "0.74")
    file = check.shared / f"{size.name}-largest.json"

    def run(what: str) -> Child:
        if what == "plan":
            return check.planned(deadline, size, file.stem, *fraction)[0]
        return run_child("experiments.peer.matmul", ("--size", str(check.matmul_size)), deadline, platforms)

    done = dict(in_parallel(2, deadline, run, ["matmul", "plan"]))
    ceiling, plan = done["matmul"], done["plan"].find("plan") or {}
    found = ceiling.rows[-1] if ceiling.rows else {}
    what = f"bf16 matmul {check.matmul_size}^3"
    yield {"what": what, "step_s": found.get("median_s"), **found, "error": ceiling.error or None}
    here = check.attached(deadline, size, "--policy", f"plan:{file}") if file.exists() else Child((), done["plan"].error)
    row = here.find("trial") or {}
    yield _mfu_row(f"training step of {size.name}", plan, row, here.error)
    if IN_A_SCAN[0] not in size.argv() and row and deadline.left_s() > UNROLLED_S:
        flags = ("--policy", row["policy"], "--loss", row["loss"], "--batch", str(row["batch"]), IN_A_SCAN[0], "False")
        here = check.attached(deadline, size, *flags)
        yield _mfu_row(f"the same, unrolled, of {size.name}", {}, here.find("trial") or {}, here.error)


def _mfu_row(what: str, plan: Row, row: Row, error: str) -> Row:
    """The row of a planned step: the trial `row` that was measured, and what `plan` says where nothing was."""
    measured = row.get("step_source") == "measured"
    step_s, flops = row.get("step_s") if measured else None, row.get("model_flops")
    return {
        "what": what,
        "policy": row.get("policy") or plan.get("policy"),
        "loss": row.get("loss") or plan.get("loss"),
        "batch": row.get("batch") or plan.get("batch"),
        "seq_len": row.get("seq_len"),
        "step_s": step_s,
        "predicted_s": plan.get("step_s"),
        "tokens_per_s": row.get("tokens_per_s") if measured else None,
        "flops_per_s": flops / step_s if flops and step_s else None,
        "mfu": row.get("mfu") if measured else None,
        "total_bytes": row.get("total_bytes"),
        "measured_bytes": row.get("measured_peak_bytes"),
        "error": None if measured else row.get("error") or error or "nothing was measured",
    }


def measure_peer(check: Check) -> Iterator[Row]:
    """The same step in JAX and in PyTorch, which take turns: both at one batch, and then PyTorch at its largest batch.

    The largest batch of JAX is in the speed part.
    """
    deadline, size = Deadline(check.limit_s), check.sizes[0]
    batch = size.batches[-1]
    flags = ("--loss", "full", "--batch", str(batch))
    for policy, arm in check.pairs:
        requested, planned = policy, Child((), "")
        if policy == "auto":
            planned, file = check.planned(deadline, size, f"{size.name}-{batch}", *flags)
            requested = f"plan:{file}" if file.exists() else ""
        ours = check.attached(deadline, size, "--policy", requested, *flags) if requested else planned
        row = ours.find("trial") or {}
        error = None if row.get("step_source") == "measured" else row.get("error") or ours.error or "it doesn't fit"
        timed = {key: row.get(key) if error is None else None for key in ("step_s", "tokens_per_s")}
        peak = {"measured_bytes": row.get("measured_peak_bytes"), "total_bytes": row.get("total_bytes")}
        yield {"framework": "jax", "arm": policy, "at": "same batch", "batch": batch, **timed, **peak, "error": error}
        yield from _torch_rows(check, size, arm, batch, deadline)
    for _, arm in check.pairs:
        if check.target == "gpu" and importlib.util.find_spec("torch") and deadline.left_s() > LARGEST_S:
            yield from _torch_rows(check, size, arm, batch, deadline, largest=True)


def _torch_rows(
    check: Check, size: Size, arm: str, batch: int, deadline: Deadline, *, largest: bool = False
) -> Iterator[Row]:
    """The row of one kind of checkpointing (`arm`) in PyTorch at `batch`, or at its `largest` batch if one larger ran."""
    common = {"framework": "torch", "arm": arm}
    if importlib.util.find_spec("torch") is None:
        yield {**common, "at": "same batch", "error": 'PyTorch is missing: pip install "jaxremat[peer]"'}
        return
    argv = ["--arm", arm, "--model", size.name, "--batches", str(batch)]
    argv += ["--largest"] * largest + ([] if check.target == "gpu" else ["--device", "cpu", "--steps", "2"])
    memory = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    child = run_child("experiments.peer.step", argv, deadline, memory)
    if not largest:
        first = child.rows[0] if child.rows else {}
        found = {"batch": batch, **_torch_row(first), "error": first.get("error") or child.error or None}
        yield {**common, "at": "same batch", **found}
    elif ran := [row for row in child.rows[1:] if "error" not in row]:
        best = max(ran, key=lambda row: row["batch"])
        failed = min((row["batch"] for row in child.rows if "error" in row), default=None)
        found = {"batch": best["batch"], "next_failed": failed, **_torch_row(best), "error": child.error or None}
        yield {**common, "at": "largest batch", **found}


def _torch_row(row: Row) -> dict[str, Any]:
    names = {
        "step_s": "step_s",
        "tokens_per_s": "tokens_per_s",
        "peak_bytes": "measured_bytes",
        "budget_bytes": "budget_bytes",
    }
    names |= {"num_params": "num_params", "versions": "torch_versions", "last_loss": "last_loss"}
    return {ours: row.get(theirs) for theirs, ours in names.items()}
