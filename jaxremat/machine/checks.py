"""The doctor's checks: each is a function from the `Facts` of the machine to rows.

    Row("driver", "ok", "580.65, for CUDA up to 13.0")
    Row("CUDA plugin", "problem", "none: JAX can't use the GPU", 'pip install "jaxremat[cuda13]"')

A row in the state `problem` stops jaxremat from something that this machine could do. A `note` is worth knowing. `ok` is
neither.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from jaxremat.machine.facts import Facts
from jaxremat.machine.nvml import Gpu
from jaxremat.machine.variables import MEM_FRACTION, check_variables, gpu_order, split_advice
from jaxremat.units import gib

State = Literal["ok", "note", "problem"]
#: JAX's allocator takes this share of the card by default (xla/pjrt/plugin/xla_gpu/xla_gpu_allocator_config.h).
DEFAULT_SHARE = 0.75
SHOW_LOG = "python -m jaxremat.run --model tiny --batch 1 -v  # with JAX's own log"


@dataclass(frozen=True)
class Row:
    """What one check found; `remedy` is what to type."""

    name: str
    state: State
    found: str
    remedy: str = ""


def run_checks(facts: Facts) -> list[Row]:
    """Every row of every check, in the order in which they build on each other."""
    return [row for check in CHECKS for row in check(facts)]


def check_python(facts: Facts) -> Iterator[Row]:
    """Whether GPU wheels exist for this system."""
    found = f"{facts.python} on {facts.system}"
    if facts.system.startswith("Linux"):
        yield Row("python", "ok", found)
    else:
        yield Row("python", "problem", f"{found}: GPU wheels exist for Linux alone", "use Linux (on Windows: wsl --install)")


def check_jax(facts: Facts) -> Iterator[Row]:
    """Whether JAX can be imported, and jax and jaxlib go together (jax/_src/lib/__init__.py)."""
    jax, jaxlib = facts.versions.get("jax"), facts.versions.get("jaxlib")
    tried = facts.deviceless
    if not jax or not jaxlib:
        yield Row("jax", "problem", f"{'jax' if not jax else 'jaxlib'} isn't installed", "pip install jaxremat")
    elif _numbers(jaxlib) > _numbers(jax):
        found = f"jax {jax} with jaxlib {jaxlib}, which is newer: JAX refuses that"
        yield Row("jax", "problem", found, f"pip install jax=={jaxlib}")
    elif not tried.step("jax"):
        again = f"pip install --force-reinstall jax=={jax} jaxlib=={jaxlib}"
        yield Row("jax", "problem", f"jax {jax} can't be imported: {_why(facts)}", again)
    else:
        flax = facts.versions.get("flax")
        yield Row("jax", "ok", f"jax {jax}, jaxlib {jaxlib}, " + (f"flax {flax}" if flax else "no flax"))


def check_plugin(facts: Facts) -> Iterator[Row]:
    """Whether there is one CUDA plugin with its PJRT half, both of jaxlib's version.

    It is what jaxlib/plugin_support.py requires.
    """
    installed = [cuda for cuda in (13, 12) if facts.versions.get(f"jax-cuda{cuda}-plugin")]
    if not installed:
        if facts.has_driver:
            yield Row("CUDA plugin", "problem", "none: JAX can't use the GPU", _install_for_driver(facts))
        else:
            found = "none: no GPU can be compiled for, only --target cpu works"
            yield Row("CUDA plugin", "problem", found, 'pip install "jaxremat[aot]"')
        return
    if len(installed) == 2:
        other = 12 if not facts.reading or _numbers(facts.reading.cuda) >= (13,) else 13
        remove = f"pip uninstall jax-cuda{other}-plugin jax-cuda{other}-pjrt"
        yield Row("CUDA plugin", "problem", "for CUDA 12 and for CUDA 13: only one of them can be JAX's", remove)
        return
    cuda, jaxlib = installed[0], facts.versions.get("jaxlib") or ""
    plugin, pjrt = (facts.versions.get(f"jax-cuda{cuda}-{half}") for half in ("plugin", "pjrt"))
    together = f"pip install jax-cuda{cuda}-plugin=={jaxlib} jax-cuda{cuda}-pjrt=={jaxlib}"
    if _numbers(plugin) != _numbers(jaxlib):
        found = f"jax-cuda{cuda}-plugin {plugin} with jaxlib {jaxlib}: JAX won't use it"
        yield Row("CUDA plugin", "problem", found, together)
    elif _numbers(pjrt) != _numbers(plugin):
        found = f"jax-cuda{cuda}-plugin {plugin} with jax-cuda{cuda}-pjrt {pjrt or 'missing'}"
        yield Row("CUDA plugin", "problem", found, together)
    else:
        yield Row("CUDA plugin", "ok", f"jax-cuda{cuda}-plugin {plugin}")


def check_compiler(facts: Facts) -> Iterator[Row]:
    """Whether ptxas, libnvvm and libdevice are there from wheels.

    On a GPU machine XLA may find them elsewhere.
    """
    missing = [tool for tool in ("ptxas", "libnvvm", "libdevice") if not facts.tools.get(tool)]
    wheels = [f"{name} {facts.versions.get(name)}" for name in ("nvidia-cuda-nvcc", "nvidia-nvvm")]
    if not missing:
        yield Row("ptxas, libnvvm", "ok", ", ".join(wheels))
    else:
        found = f"{' and '.join(missing)} missing from the wheels: no compiling for a GPU that isn't here"
        yield Row("ptxas, libnvvm", "note" if _gpu_runs(facts) else "problem", found, 'pip install "jaxremat[aot]"')


def check_cudnn(facts: Facts) -> Iterator[Row]:
    """Whether cuDNN is there, is new enough for the plugin, and is the wheel's.

    The one that gets loaded counts.
    """
    package = next((name for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12") if facts.versions.get(name)), None)
    wheel, tried = facts.versions.get(package) if package else None, facts.deviceless.step("cudnn")
    loaded = _cudnn(tried["loaded"]) if tried else None
    if not package and not loaded:
        found = "none: attention falls back to XLA's own, which takes far more memory"
        yield Row("cuDNN", "note" if _gpu_runs(facts) else "problem", found, 'pip install "jaxremat[aot]"')
    elif loaded and tried["loaded"] // 100 < tried["needed"] // 100:
        found = f"{loaded}, and the plugin needs {_cudnn(tried['needed'])} or newer"
        yield Row("cuDNN", "problem", found, f'pip install -U "{package or "nvidia-cudnn-cu13"}<10"')
    elif wheel and loaded and _numbers(wheel)[:3] != _numbers(loaded):
        found = f"{loaded} is loaded instead of the wheel's {wheel}"
        yield Row("cuDNN", "problem", found, "unset LD_LIBRARY_PATH LD_PRELOAD")
    elif _compiles(facts) and (error := facts.deviceless.step("attention").get("error")):
        found, remedy = split_advice(error)
        yield Row("cuDNN", "note", f"{loaded or wheel}; its attention can't be compiled here: {found}", remedy)
    else:
        yield Row("cuDNN", "ok", f"{package} {wheel}" if wheel else f"{loaded}, not from a wheel")


def check_driver(facts: Facts) -> Iterator[Row]:
    """Whether the driver answers, and can run the plugin's CUDA."""
    if not facts.has_driver:
        yield Row("driver", "note", "none: steps are compiled for GPUs that aren't here, and their times predicted")
        return
    if facts.reading is None:
        found, remedy = split_advice(facts.nvml_error)
        yield Row("driver", "note" if _gpu_runs(facts) else "problem", found, remedy)
        return
    found = f"{facts.reading.driver}, for CUDA up to {facts.reading.cuda}"
    too_new = facts.versions.get("jax-cuda13-plugin") and _numbers(facts.reading.cuda) < (13,)
    if too_new and not facts.versions.get("jax-cuda12-plugin"):
        older = 'pip uninstall jax-cuda13-plugin jax-cuda13-pjrt && pip install "jaxremat[cuda12]"'
        yield Row("driver", "problem", f"{found}; the plugin needs CUDA 13, driver 580 or newer", older)
    else:
        yield Row("driver", "ok", found)


def check_gpus(facts: Facts) -> Iterator[Row]:
    """The free memory of each card, and the processes that use the rest.

    Only the card that JAX takes can be a problem.
    """
    gpus = facts.reading.gpus if facts.reading else ()
    first = gpu_order(facts.environment, len(gpus))[:1]
    share = _share(facts)
    for gpu in gpus:
        capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "unknown"
        found = f"{gpu.name}, compute capability {capability}: {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"
        if gpu.free_bytes >= share * gpu.total_bytes:
            yield Row(f"GPU {gpu.index}", "ok", found)
        else:
            found += f", and JAX counts on {gib(int(share * gpu.total_bytes))}"
            state = "problem" if gpu.index in first else "note"
            yield Row(f"GPU {gpu.index}", state, found, _make_room(gpu))
        if gpu.processes:
            yield Row(f"GPU {gpu.index} is used by", "note", _processes(gpu))


def check_attached(facts: Facts) -> Iterator[Row]:
    """Whether JAX runs on the attached GPU; a child process tries it."""
    if facts.attached is None:
        return
    device, tried = facts.attached.step("device"), facts.attached
    failed = next((step["error"] for step in tried.steps if step.get("error") and step["step"] != "attention"), "")
    if _gpu_runs(facts):
        limit = device.get("limit_bytes")
        found = f"a matmul ran on {device['description']}" + (f"; JAX's limit is {gib(limit)}" if limit else "")
        if error := tried.step("attention").get("error"):
            yield Row("JAX on the GPU", "note", f"{found}; cuDNN attention didn't: {error}", "--attention xla")
        else:
            yield Row("JAX on the GPU", "ok", found)
    else:
        found, remedy = split_advice(failed or tried.end or "the child ended early")
        words = tried.words or found
        yield Row("JAX on the GPU", "problem", f"nothing ran: {words}", remedy or SHOW_LOG)


def check_targets(facts: Facts) -> Iterator[Row]:
    """Which targets are usable: the attached GPU, GPUs that aren't here, the CPU.

    A child process tries the GPUs that aren't here.
    """
    tried = [step for step in facts.deviceless.steps if step["step"] == "target"]
    good = [step["name"] for step in tried if not step["error"]]
    usable = [*(["gpu"] if _gpu_runs(facts) else []), *([] if facts.deviceless.step("cpu").get("error", "-") else ["cpu"])]
    if tried and len(good) == len(tried) and not facts.deviceless.end:
        yield Row("targets", "ok", f"usable: {', '.join([*usable, *good])}")
        return
    found = f"usable: {', '.join([*usable, *good]) or 'none'}"
    state = "note" if _gpu_runs(facts) else "problem"
    failed = next((step for step in tried if step["error"]), None)
    why, remedy = split_advice(failed["error"]) if failed else (_why(facts), "")
    remedy = remedy if "aot" in remedy else SHOW_LOG
    what = f"{failed['name']} can't be compiled for" if failed and good else "no GPU can be compiled for"
    yield Row("targets", state, f"{found}; {what}: {facts.deviceless.words or why}", remedy)


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


def _compiles(facts: Facts) -> bool:
    return any(step["step"] == "target" and not step["error"] for step in facts.deviceless.steps)


def _why(facts: Facts) -> str:
    return facts.deviceless.words or facts.deviceless.end or "the child said nothing"


def _share(facts: Facts) -> float:
    try:
        return min(1.0, float(next(filter(None, (facts.environment.get(name) for name in MEM_FRACTION)), DEFAULT_SHARE)))
    except ValueError:
        return DEFAULT_SHARE


def _install_for_driver(facts: Facts) -> str:
    old = facts.reading is not None and _numbers(facts.reading.cuda) < (13,)
    return f'pip install "jaxremat[{"cuda12" if old else "cuda13"}]"'


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
    """The whole numbers that a version begins with: (0, 10, 2) for 0.10.2.

    jaxlib compares them.
    """
    numbers = []
    for part in (version or "").split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
