"""Records how long each kernel of a training step takes on this machine's device: `python -m experiments.record_profile`.

    python -m experiments.record_profile --name h200-gpt2 --model gpt2 --policy dots+attention --batch 16

The result is a folder of `experiments/profiles`, in the form of those that are there: the compiled program, a row for each
operation with its time in a step, and `profile.toml`. `experiments.kernel_times` then compares it with the predictions, and
`experiments.kernel_times --fit` fits the shares of this device to it.

The times come from JAX's profiler. On a GPU the step is compiled without command buffers, so that each kernel is a launch of its
own with the name of its operation.
"""

import csv
import gzip
import io
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from experiments.common import PROFILES, flags_of
from jaxremat.chips.nvidia.gpu import bundled_names, gpu_of_kind
from jaxremat.cli.command import parse_flags, run_command, set_up_process
from jaxremat.errors import JaxrematError, UsageError
from jaxremat.policy.spec import Policy
from jaxremat.session.flags import RunFlags
from jaxremat.session.request import Auto, Frontier, check_run
from jaxremat.session.session import Session
from jaxremat.system.files import write_whole
from jaxremat.trial.plan_file import PlanFile

if TYPE_CHECKING:
    from jaxremat.trial.trials import Trials

#: Without it XLA may put many kernels into one CUDA graph, whose kernels have no operation's name.
_NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}


@dataclass(frozen=True)
class Flags:
    """Records how long each kernel of a training step takes on this machine's device."""

    name: str
    """The folder's name, such as h200-gpt2."""
    model: str = "gpt2"
    """The model, as jaxremat.run takes it."""
    policy: str = "dots+attention"
    batch: int = 16
    more: Annotated[tuple[str, ...], Parameter(metavar="FLAG=VALUE")] = ()
    """Further flags of jaxremat.run for the step, without their dashes: seq-len=2048 loss=chunked."""
    steps: int = 8
    """Recorded steps, after two that warm up."""
    target: str = "gpu"
    """gpu or cpu."""
    known_as: str | None = None
    """The bundled target whose peak rates the device has. Default: that of the attached GPU."""
    out: Path = PROFILES
    """The folder of profiles."""


def main(argv: list[str] | None = None) -> int:
    """Records the profile, prints a row about it, and returns the exit code."""
    flags = flags_of(Flags, argv, "experiments.record_profile")
    return run_command(lambda: record(flags), name="record_profile")


def record(flags: Flags) -> int:
    """Runs the step, writes the folder of its profile, and prints what was recorded as a line of JSON.

    Raises:
        UsageError: the flags name no single step, or no target that comes with jaxremat.
        JaxrematError: the profiler showed no kernel of the step.
    """
    step_flags = parse_flags(RunFlags, [*_argv(flags), "--target", flags.target])
    request = check_run(step_flags)
    set_up_process(step_flags)
    from jaxremat.chips.target import load_target
    from jaxremat.session.answers import policy_of

    if isinstance(request.policies[0].policy, Auto | Frontier | PlanFile):
        raise UsageError(
            f"--policy got {flags.policy!r}", allowed="a policy that isn't planned", next_step="--policy dots+attention"
        )
    target = load_target(flags.target)
    known_as = flags.known_as or _bundled(target.description)
    session, options = Session.of(request, target), _NO_COMMAND_BUFFERS if target.chip.is_gpu else {}
    (asked,), (batch,) = session.request.policies, session.request.batches
    trials, policy = replace(session.trials, num_warmup=2, options=options), policy_of(asked)
    times, compilation = _recorded(trials, policy, batch), trials.compile(policy, batch)
    counts = _launches(compilation.module)
    rows = [_row(name, counts[name], steps_ns) for name, steps_ns in sorted(times.items()) if name in counts]
    if not rows:
        raise JaxrematError(
            f"the profiler showed no kernel of the step; it showed {len(times)} operations",
            cause="the profiler has no access to the device's counters",
            next_step="run as root, or set NVreg_RestrictProfilingToAdminUsers=0",
        )
    _write(flags, known_as, target.description, compilation.hlo_text, rows)
    measured_s = sum(row["median_ns_per_step"] for row in rows) * 1e-9
    print(json.dumps({"record": "profile", "name": flags.name, "num_operations": len(rows), "measured_s": measured_s}))
    return 0


def _argv(flags: Flags) -> list[str]:
    """The step as flags of `jaxremat.run`."""
    more = [word for text in flags.more for word in f"--{text}".split("=", 1)]
    step = ["--model", flags.model, "--policy", flags.policy, "--batch", str(flags.batch), "--steps", str(flags.steps)]
    return [*step, *more]


def _bundled(description: str) -> str:
    """The bundled target with this description.

    Raises:
        UsageError: none has it.
    """
    if name := gpu_of_kind(description):
        return name
    raise UsageError(
        f"no target that comes with jaxremat is a {description}",
        allowed=", ".join(bundled_names()),
        next_step="--known-as NAME with the one of the same peak rates",
    )


def _recorded(trials: "Trials", policy: Policy, batch: int) -> Mapping[str, list[int]]:
    """By operation, the nanoseconds of its kernels in each recorded step."""
    import jax

    with tempfile.TemporaryDirectory(prefix="jaxremat-") as folder:
        begin, first = jax.profiler.start_trace, trials.num_warmup
        recording = replace(trials, num_ahead=0, on_step=lambda _, step: begin(folder) if step == first else None)
        recording.measure(batch, trials.compile(policy, batch))
        jax.profiler.stop_trace()
        (path,) = Path(folder).rglob("*.xplane.pb")
        return by_step(jax.profiler.ProfileData.from_file(str(path)), trials.num_steps)


def by_step(trace: Any, num_steps: int) -> dict[str, list[int]]:
    """By operation of the training step, the nanoseconds of its events in each step.

    An operation has equally many events in each step. One that doesn't was cut off, and is left out.

    Args:
        trace: a `jax.profiler.ProfileData` of `num_steps` steps.
        num_steps: number of steps.
    """
    events: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and str(stats.get("hlo_module", "")).startswith("jit_train_step"):
                    events[str(stats["hlo_op"])].append((event.start_ns, event.duration_ns))
    found = {}
    for name, of_op in events.items():
        per_step, rest = divmod(len(of_op), num_steps)
        if not rest:
            durations = [duration for _, duration in sorted(of_op)]
            found[name] = [round(sum(durations[n * per_step : (n + 1) * per_step])) for n in range(num_steps)]
    return found


def _launches(module: Any) -> dict[str, int]:
    """By operation, how many times it runs in a step."""
    from jaxremat.xla.kernels import kernels_of

    return {kernel.name: kernel.count for kernel in kernels_of(module)}


def _row(name: str, launches: int, steps_ns: list[int]) -> dict[str, Any]:
    """The row of an operation in `thunks.csv`."""
    return {
        "hlo_op": name,
        "launches_per_step": launches,
        "num_samples": len(steps_ns),
        "median_ns_per_step": round(statistics.median(steps_ns)),
        "min_ns_per_step": min(steps_ns),
        "max_ns_per_step": max(steps_ns),
    }


def _write(flags: Flags, known_as: str, device: str, hlo_text: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the folder of the profile. `profile.toml` comes last, as a folder without it is no profile."""
    from jaxremat.chips.installed import versions

    folder = flags.out / flags.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "optimized.hlo.txt.gz").write_bytes(gzip.compress(hlo_text.encode(), mtime=0))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(next(iter(rows))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / "thunks.csv", text.getvalue())
    made = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    about = {
        "target": known_as,
        "source": f"python -m experiments.record_profile, {flags.steps} steps",
        "recorded": f"{datetime.now(UTC):%B %Y}, {device}, {made}",
        "step": f"jaxremat.run {' '.join(_argv(flags))}",
    }
    lines = ["# Times of the kernels of one training step, recorded by JAX's profiler."]
    lines += [f"{key} = {json.dumps(value)}" for key, value in about.items()]
    lines += ["elements_per_thread = 4", "", "[left_out]", ""]
    write_whole(folder / "profile.toml", "\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
