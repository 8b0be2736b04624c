"""The doctor's checks: each is a function from the `Facts` of the machine to rows.

    Row("driver", "ok", "580.65, for CUDA up to 13.0")
    Row("CUDA plugin", "problem", "none: JAX can't use the GPU", 'pip install "jaxremat[cuda13]"')

A row in the state `problem` stops jaxremat from something that this machine could do. A `note` is worth knowing. `ok` is
neither.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from jaxremat.chips.nvidia.nvml import Gpu, gpu_order
from jaxremat.cli.machine.facts import Facts
from jaxremat.cli.machine.variables import MEM_FRACTION, check_variables, split_advice
from jaxremat.report.doctor import Row, State
from jaxremat.units import gib

#: JAX's allocator takes this share of the card by default (xla/pjrt/plugin/xla_gpu/xla_gpu_allocator_config.h).
DEFAULT_SHARE = 0.75
_AOT = 'pip install "jaxremat[aot]"'
SHOW_LOG = "python -m jaxremat.run --model tiny --batch 1 -v  # with JAX's own log"


def run_checks(facts: Facts) -> list[Row]:
    """Every row of every check, in the order in which they build on each other."""
    return [row for check in CHECKS for row in check(facts)]


def _row(name: str, *table: tuple[object, State, str, str]) -> Row:
    """The row of the first line of a table that holds.

    A line is a condition, the state, what was found, and what to type.
    """
    return next(Row(name, state, found, remedy) for holds, state, found, remedy in table if holds)


def check_python(facts: Facts) -> Iterator[Row]:
    """Whether GPU wheels exist for this system."""
    found = f"{facts.python} on {facts.system}"
    yield _row(
        "python",
        (facts.system.startswith("Linux"), "ok", found, ""),
        (True, "problem", f"{found}: GPU wheels exist for Linux alone", "use Linux (on Windows: wsl --install)"),
    )


def check_jax(facts: Facts) -> Iterator[Row]:
    """Whether JAX can be imported, and jax and jaxlib go together (jax/_src/lib/__init__.py)."""
    jax, jaxlib, flax = (facts.versions.get(name) for name in ("jax", "jaxlib", "flax"))
    yield _row(
        "jax",
        (not jax, "problem", "jax isn't installed", "pip install jaxremat"),
        (not jaxlib, "problem", "jaxlib isn't installed", "pip install jaxremat"),
        (_numbers(jaxlib) > _numbers(jax), "problem", f"jax {jax} with jaxlib {jaxlib}, which is newer: JAX rejects that",
         f"pip install jax=={jaxlib}"),
        (not facts.deviceless.step("jax"), "problem", f"jax {jax} can't be imported: {_why(facts)}",
         f"pip install --force-reinstall jax=={jax} jaxlib=={jaxlib}"),
        (True, "ok", f"jax {jax}, jaxlib {jaxlib}, {f'flax {flax}' if flax else 'no flax'}", ""),
    )  # fmt: skip


def check_plugin(facts: Facts) -> Iterator[Row]:
    """Whether there is one CUDA plugin with its PJRT half, both of jaxlib's version.

    The source is jaxlib/plugin_support.py.
    """
    installed = [f"jax-cuda{cuda}" for cuda in (13, 12) if facts.versions.get(f"jax-cuda{cuda}-plugin")]
    new_driver = not facts.reading or _numbers(facts.reading.cuda) >= (13,)
    one, other = (installed or [""])[0], f"jax-cuda{12 if new_driver else 13}"
    plugin, pjrt, jaxlib = (facts.versions.get(name) or "" for name in (f"{one}-plugin", f"{one}-pjrt", "jaxlib"))
    together = f"pip install {one}-plugin=={jaxlib} {one}-pjrt=={jaxlib}"
    yield _row(
        "CUDA plugin",
        (not installed and facts.has_driver, "problem", "none: JAX can't use the GPU",
         f'pip install "jaxremat[{"cuda13" if new_driver else "cuda12"}]"'),
        (not installed, "problem", "none: no GPU can be compiled for, only --target cpu works", _AOT),
        (len(installed) == 2, "problem", "for CUDA 12 and for CUDA 13: only one of them can be JAX's",
         f"pip uninstall {other}-plugin {other}-pjrt"),
        (_numbers(plugin) != _numbers(jaxlib), "problem", f"{one}-plugin {plugin} with jaxlib {jaxlib}: JAX won't use it",
         together),
        (_numbers(pjrt) != _numbers(plugin), "problem", f"{one}-plugin {plugin} with {one}-pjrt {pjrt or 'missing'}", together),
        (True, "ok", f"{one}-plugin {plugin}", ""),
    )  # fmt: skip


def check_compiler(facts: Facts) -> Iterator[Row]:
    """Whether ptxas, libnvvm and libdevice are there, from wheels or from a CUDA toolkit."""
    missing = " and ".join(tool for tool in ("ptxas", "libnvvm", "libdevice") if not facts.tools.get(tool))
    wheels = ", ".join(f"{name} {facts.versions.get(name)}" for name in ("nvidia-cuda-nvcc", "nvidia-nvvm"))
    without = f"{missing} missing from the wheels: no compiling for a GPU that isn't here"
    yield _row(
        "ptxas, libnvvm",
        (not missing, "ok", wheels, ""),
        (facts.toolkit, "ok", f"of the CUDA toolkit in {facts.toolkit}: {missing} missing from the wheels", ""),
        (True, _less(facts), without, _AOT),
    )


def check_cudnn(facts: Facts) -> Iterator[Row]:
    """Whether the cuDNN that gets loaded is new enough for the plugin, and is the wheel's."""
    package = next((name for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12") if facts.versions.get(name)), "")
    wheel, tried = facts.versions.get(package), facts.deviceless.step("cudnn")
    loaded, needed = (_cudnn(tried[name]) if tried else "" for name in ("loaded", "needed"))
    error, remedy = split_advice(facts.deviceless.step("attention").get("error", ""))
    yield _row(
        "cuDNN",
        (not package and not loaded, _less(facts), "none: attention falls back to XLA's own, which takes far more memory", _AOT),
        (_numbers(loaded)[:2] < _numbers(needed)[:2], "problem", f"{loaded}, and the plugin needs {needed} or newer",
         f'pip install -U "{package or "nvidia-cudnn-cu13"}<10"'),
        (wheel and loaded and _numbers(wheel)[:3] != _numbers(loaded), "problem",
         f"{loaded} is loaded instead of the wheel's {wheel}", "unset LD_LIBRARY_PATH LD_PRELOAD"),
        (error and any(step["step"] == "target" and not step["error"] for step in facts.deviceless.steps), "note",
         f"{loaded or wheel}; its attention can't be compiled here: {error}", remedy),
        (True, "ok", f"{package} {wheel}" if wheel else f"{loaded}, not from a wheel", ""),
    )  # fmt: skip


def check_driver(facts: Facts) -> Iterator[Row]:
    """Whether the driver answers, and can run the plugin's CUDA."""
    error, remedy = split_advice(facts.nvml_error)
    found = f"{facts.reading.driver}, for CUDA up to {facts.reading.cuda}" if facts.reading else ""
    is_old = facts.reading and _numbers(facts.reading.cuda) < (13,)
    needs_new = facts.versions.get("jax-cuda13-plugin") and not facts.versions.get("jax-cuda12-plugin")
    yield _row(
        "driver",
        (not facts.has_driver, "note", "none: steps are compiled for GPUs that aren't here, and their times predicted", ""),
        (not facts.reading, _less(facts), error, remedy),
        (is_old and needs_new, "problem", f"{found}; the plugin needs CUDA 13, driver 580 or newer",
         'pip uninstall jax-cuda13-plugin jax-cuda13-pjrt && pip install "jaxremat[cuda12]"'),
        (True, "ok", found, ""),
    )  # fmt: skip


def check_gpus(facts: Facts) -> Iterator[Row]:
    """The free memory of each card, and the processes that use the rest.

    Only the card that JAX takes can be a problem.
    """
    gpus, share = facts.reading.gpus if facts.reading else (), _share(facts)
    first = gpu_order(facts.environment, len(gpus))[:1]
    for gpu in gpus:
        capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "unknown"
        found = f"{gpu.name}, compute capability {capability}: {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"
        too_few = f"{found}, and JAX counts on {gib(int(share * gpu.total_bytes))}"
        state: State = "problem" if gpu.index in first else "note"
        is_free = gpu.free_bytes >= share * gpu.total_bytes
        yield _row(f"GPU {gpu.index}", (is_free, "ok", found, ""), (True, state, too_few, _make_room(gpu)))
        if gpu.processes:
            yield Row(f"GPU {gpu.index} is used by", "note", _processes(gpu))


def check_attached(facts: Facts) -> Iterator[Row]:
    """Whether JAX runs on the attached GPU; a child process tries it."""
    if facts.attached is None:
        return
    device, tried = facts.attached.step("device"), facts.attached
    failed = next((step["error"] for step in tried.steps if step.get("error") and step["step"] != "attention"), "")
    failure, remedy = split_advice(failed or tried.end or "the child ended early")
    limit = f"; JAX's limit is {gib(device['limit_bytes'])}" if device.get("limit_bytes") else ""
    found, error = f"a matmul ran on {device.get('description')}{limit}", tried.step("attention").get("error")
    yield _row(
        "JAX on the GPU",
        (not _gpu_runs(facts), "problem", f"nothing ran: {tried.words or failure}", remedy or SHOW_LOG),
        (error, "note", f"{found}; cuDNN attention didn't: {error}", "--attention xla"),
        (True, "ok", found, ""),
    )


def check_targets(facts: Facts) -> Iterator[Row]:
    """Which targets are usable: the attached GPU, GPUs that aren't here, the CPU.

    A child process tries the GPUs that aren't here.
    """
    tried = [step for step in facts.deviceless.steps if step["step"] == "target"]
    good = [step["name"] for step in tried if not step["error"]]
    here = {"gpu": _gpu_runs(facts), "cpu": facts.deviceless.step("cpu").get("error") == ""}
    usable = f"usable: {', '.join([*(name for name, runs in here.items() if runs), *good]) or 'none'}"
    failed = next((step for step in tried if step["error"]), None)
    why, remedy = split_advice(failed["error"]) if failed else (_why(facts), "")
    what = f"{failed['name']} can't be compiled for" if failed and good else "no GPU can be compiled for"
    yield _row(
        "targets",
        (tried and not failed and not facts.deviceless.end, "ok", usable, ""),
        (True, _less(facts), f"{usable}; {what}: {facts.deviceless.words or why}", remedy if "aot" in remedy else SHOW_LOG),
    )


def check_environment(facts: Facts) -> Iterator[Row]:
    """Environment variables that are a problem or change numbers.

    JAX, XLA, CUDA or the loader read them.
    """
    rows = [Row("environment", *found) for found in check_variables(facts)]
    yield from rows or [Row("environment", "ok", "no variable is in the way or changes numbers")]


CHECKS: tuple[Callable[[Facts], Iterable[Row]], ...] = (
    check_python,
    check_jax,
    check_plugin,
    check_compiler,
    check_cudnn,
    check_driver,
    check_gpus,
    check_environment,
    check_attached,
    check_targets,
)


def _gpu_runs(facts: Facts) -> bool:
    return facts.attached is not None and facts.attached.step("run").get("error") == ""


def _less(facts: Facts) -> State:
    """The state of what matters less where the attached GPU runs."""
    return "note" if _gpu_runs(facts) else "problem"


def _why(facts: Facts) -> str:
    return facts.deviceless.words or facts.deviceless.end or "the child said nothing"


def _share(facts: Facts) -> float:
    try:
        return min(1.0, float(next(filter(None, (facts.environment.get(name) for name in MEM_FRACTION)), DEFAULT_SHARE)))
    except ValueError:
        return DEFAULT_SHARE


def _make_room(gpu: Gpu) -> str:
    share = math.floor(100 * gpu.free_bytes / gpu.total_bytes) / 100
    less = f"export XLA_CLIENT_MEM_FRACTION={share:.2f}" if share >= 0.01 else ""
    pids = " ".join(str(process.pid) for process in gpu.processes)
    end = f"kill {pids} (if they are yours)" if pids else "end what holds it (nvidia-smi; it may be outside this container)"
    return f"{end}, or {less}" if less else end


def _processes(gpu: Gpu) -> str:
    by_size = sorted(gpu.processes, key=lambda process: -(process.used_bytes or 0))
    return ", ".join(f"{p.name} ({p.pid}){f' {gib(p.used_bytes)}' if p.used_bytes is not None else ''}" for p in by_size)


def _cudnn(number: int) -> str:
    """The version behind cuDNN's number: 92800 is 9.28.0."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _numbers(version: str | None) -> tuple[int, ...]:
    """The whole numbers that a version begins with: (0, 10, 2) for 0.10.2. jaxlib compares them."""
    return tuple(map(int, itertools.takewhile(str.isdigit, (version or "").split("."))))
