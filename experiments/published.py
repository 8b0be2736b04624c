"""Steps that others published, compiled here without their devices: `python -m experiments.published`.

* `steps`: the seconds that published training steps on several GPUs took, beside the predicted ones, in all and by class of
  kernels. The meshes, batches, saved values and flags of XLA are the published ones, and what couldn't be matched is said.
  `jaxremat.chips.speed.SEVERAL_GPUS`, which tables show, is the span of `longer` over all steps.
* `fits`: the number of `jaxremat.chips.nvidia.tables` that comes from these steps (`TRAINING_SHARE`), fitted to all of them, and
  to all but those of one source. Each step of the source that was left out is then predicted by a number that doesn't know it. A
  source is a repository.
* `steps` and `fits` with a TPU as the `--target`: the same for its steps. The numbers are those of `[fitted]` in its TOML, and a
  source is a repository and a recipe in it.
* `alone`: the seconds of whole steps on one GPU, which `experiments.gpu_check` measured, beside the predicted ones.
* `bytes`: the memory that MaxText printed on real chips, beside that of its own step, compiled here, and of our decoder's:
  `--parts bytes --target t4`. XLA's own rematerialization runs, as it did there.

Nothing is run. `published.toml` has what was published, with its sources. `--rows FILE` takes another file of that form, such
as one of your own steps. MaxText must be importable for its steps, as for `--maxtext`. A step that fails doesn't end the others.

Each compiled program is filed in `published/` beside the results. A step whose program was filed with the same settings and
versions isn't compiled again, and only predicted anew. So without MaxText its filed steps are predicted, too. `--fresh` compiles
all.
"""

import functools
import lzma
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from experiments.common import RESULTS, Row, run_experiment, show_by
from jaxremat.chips.speed import SEVERAL_GPUS
from jaxremat.chips.tpu.device import Fitted, load_tpu, tpu_names
from jaxremat.errors import JaxrematError, UsageError
from jaxremat.report.table import gib_number
from jaxremat.system.files import parse_toml, write_whole

if TYPE_CHECKING:
    from jaxremat.chips.speed import DeviceSpeed
    from jaxremat.mesh.axes import MeshShape
    from jaxremat.xla.hlo import Module
    from jaxremat.xla.kernels import Kernel, Wait

Part = Literal["steps", "fits", "alone", "bytes"]
FILE = Path(__file__).with_suffix(".toml")
DOCS = Path(__file__).parent.parent / "docs"
#: The config of our decoder beside MaxText's.
DECODER = Path(__file__).parent.parent / "examples" / "configs" / "Qwen3-0.6B.json"

#: The values that `fits` tries for `TRAINING_SHARE`.
TRAINING_SHARES = tuple(n / 100 for n in range(70, 101))
#: The values that `fits` tries for the numbers of a generation of TPUs (`jaxremat.chips.tpu.device.Fitted`).
TPU_NUMBERS: Mapping[str, Sequence[float]] = {
    "cycles_per_s": [n * 1e7 for n in range(100, 301, 5)],
    "attention_share": [n / 100 for n in range(16, 91, 2)],
    "bandwidth_share": [n / 100 for n in range(40, 101, 2)],
}
#: What a program says of its source: tables of files and frames, and each instruction's place. Filed programs are without it, but
#: for the scope of an embedding's gradient, and of a TPU's matmuls and kernels of Pallas, which have no other name.
_SOURCE, _TPU_SOURCE = (
    re.compile(
        rf'^FileNames$.*?^(?=%|ENTRY)|, metadata=\{{(?!op_name="[^"]*(?:{scopes})")(?:[^{{}}"]|"(?:[^"\\]|\\.)*")*\}}',
        re.DOTALL | re.MULTILINE,
    )
    for scopes in ("scatter-add", "scatter-add|dot_general|pallas_call")
)


@dataclass(frozen=True)
class Flags:
    """Published steps, compiled here: their bytes, and how much longer they took than predicted."""

    rows: Path = FILE
    """What was published. Another file's results go to another --out."""
    target: str = "h100-80gb"
    """The folder of the results, and the chip of bytes and of steps on TPUs. Steps on several GPUs name their own."""
    fresh: bool = False
    """Compile the steps again whose programs are filed."""
    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = ("steps",)
    out: Path = RESULTS


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A step that was published.

    Attributes:
        name: its name, and that of the file of its program.
        about: the model and the batch, for people.
        target: the chip.
        measured_s: seconds of one step.
        source: where that was published.
        trust: how sure the settings are.
        unmatched: what the compiled program has otherwise than the one that ran.
        maxtext: MaxText's command line, for a step of MaxText.
        model: the preset of our decoder, for any other step.
        mesh: the mesh, for our decoder.
        devices: how many devices, for MaxText, which makes its mesh itself.
        nodes: machines that the devices are on. None for as few as have at most 8 each.
        options: other flags of the model and the training, as `jaxremat.Session` has them.
        policy: what the layers save.
        batch: sequences of one device.
        xla_preset: the preset of XLA's options.
        xla: options of XLA beside the preset's.
        mem_fraction: the share of the GPU's memory that the job's allocator had. XLA overlaps collectives with kernels only
            as far as the bytes stay below a share of that.
    """

    name: str
    about: str
    target: str
    measured_s: float
    source: str
    trust: Literal["high", "medium"] = "high"
    unmatched: tuple[str, ...] = ()
    maxtext: str = ""
    model: str = ""
    mesh: str | None = None
    devices: int | None = None
    nodes: int | None = None
    options: dict[str, Any] = {}
    policy: str = "own"
    batch: int
    xla_preset: str = "jax-toolbox"
    xla: dict[str, bool | int | str] = {}
    mem_fraction: float = 0.75

    @property
    def compiled_from(self) -> dict[str, Any]:
        """The fields that decide the program, as JSON has them."""
        apart = ("about", "measured_s", "source", "trust", "unmatched", "total_gib", "temp_gib", "decoder")
        return {name: value for name, value in msgspec.to_builtins(self).items() if name not in apart}


class PublishedBytes(Published, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A step with the memory that was printed on its chip.

    Attributes:
        total_gib: output + temp + argument - alias, in GiB to 0.1.
        temp_gib: XLA's temp.
        decoder: the step of our decoder beside it: its policy, and its sizes where they aren't those of `DECODER`.
    """

    total_gib: float
    temp_gib: float
    decoder: dict[str, Any] = {}


class Rows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of published steps."""

    step: tuple[Published, ...] = ()
    tpu: tuple[Published, ...] = ()
    alone: tuple[Published, ...] = ()
    bytes: tuple[PublishedBytes, ...] = ()

    @property
    def all(self) -> tuple[Published, ...]:
        """The steps of all parts."""
        return (*self.step, *self.tpu, *self.alone, *self.bytes)


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled step as it is filed: the first line of its file. The program's text follows.

    Attributes:
        step: what it was compiled from.
        versions: the versions of the compiler.
        mesh: the mesh as people read it.
        num_devices: devices in all.
        nodes: machines that they are on.
        order: for each device in the order of the program's, its number. Empty where both are the same.
        total_bytes: bytes of one device.
        temp_bytes: XLA's temp.
    """

    step: dict[str, Any]
    versions: dict[str, str | None]
    mesh: str
    num_devices: int
    nodes: int
    order: tuple[int, ...]
    total_bytes: int
    temp_bytes: int


def read_rows(file: Path) -> Rows:
    """The steps of a file.

    Raises:
        UsageError: a field isn't known, is missing or of another type, or two steps have one name.
    """
    try:
        rows = msgspec.convert(parse_toml(file.read_text()), Rows)
    except (OSError, ValueError) as error:  # msgspec's and tomllib's errors are ValueErrors
        raise UsageError(f"--rows {file}: {error}", next_step=f"{FILE.name} has the form") from None
    names = [step.name for step in rows.all]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"--rows {file} has the name {min(twice)!r} twice", next_step="give each step a name of its own")
    if both := [step.name for step in rows.all if bool(step.maxtext) == bool(step.model)]:
        raise UsageError(f"--rows {file}: {both[0]!r} is of neither maxtext nor a model, or of both")
    return rows


def program_of(step: Published, flags: Flags) -> "tuple[Program, Module]":
    """The compiled program of a step, from its file if it was filed with these settings and versions.

    Raises:
        JaxrematError: it can't be compiled.
    """
    from jaxremat.chips.installed import version_of
    from jaxremat.xla.hlo import parse

    compiler = "libtpu" if step.target in tpu_names() else "jax-cuda13-plugin"
    versions = {name: version_of(name) for name in ("jaxlib", compiler)}
    path = flags.out / "published" / f"{step.name}.hlo.xz"
    if path.is_file() and not flags.fresh:
        header, _, text = lzma.decompress(path.read_bytes()).decode().partition("\n")
        filed = msgspec.json.decode(header, type=Program)
        if filed.step == step.compiled_from and filed.versions == versions:
            return filed, parse(text)
    print(f"compiling {step.name} ...", file=sys.stderr)
    program, text = _compiled(step, versions)
    text = (_TPU_SOURCE if step.target in tpu_names() else _SOURCE).sub("", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lzma.compress(msgspec.json.encode(program) + b"\n" + text.encode()))
    return program, parse(text)


def _compiled(step: Published, versions: dict[str, str | None]) -> tuple[Program, str]:
    from jaxremat.policy.grammar import parse
    from jaxremat.session.session import Session

    on: dict[str, Any] = {"target": step.target, "mesh": step.mesh, "devices": step.devices, "nodes": step.nodes}
    on |= {"xla_preset": step.xla_preset, "mem_fraction": None if step.target in tpu_names() else step.mem_fraction}
    session = Session(step.maxtext or step.model, **{name: value for name, value in on.items() if value}, **step.options)
    trials = replace(session.trials, xla_preset=step.xla_preset, options=step.xla)
    policy = trials.factory.checked(parse(step.policy), trials.train, trials.target.mesh)
    done = trials.compile(policy, step.batch)
    shape, speed = trials.target.mesh_shape, trials.target.speed
    order = speed.links.order if speed and speed.links else ()
    return Program(
        step=step.compiled_from,
        versions=versions,
        mesh=str(shape),
        num_devices=shape.num_devices,
        nodes=shape.nodes,
        order=order,
        total_bytes=done.memory.total_bytes,
        temp_bytes=done.memory.temp_bytes,
    ), done.hlo_text


def speed_on(program: Program) -> "DeviceSpeed | None":
    """The rates of a program's chip, with the links of its mesh."""
    from jaxremat.chips.catalog import chip_of, describe

    target = program.step["target"]
    speed = chip_of(target).speed(describe(target)[1], _mesh_of(program))
    return replace(speed, links=replace(speed.links, order=program.order)) if speed and speed.links else speed


def _mesh_of(program: Program) -> "MeshShape | None":
    """As many devices as a program's, on as many nodes."""
    from jaxremat.mesh.axes import MeshShape

    return MeshShape(fsdp=program.num_devices, nodes=program.nodes) if program.num_devices > 1 else None


def predicted(program: Program, module: "Module") -> dict[str, float]:
    """The predicted seconds of a program, in all and by class of kernels.

    Matmuls and attention are those of kernels alone. `other_s` is what they and what is exposed of collectives and host transfers
    leave of the step. It has by how much kernels take longer in training and beside collectives, too. On TPUs `matmul_share` is
    the share of the peak FLOP/s that matmuls reach.
    """
    from jaxremat.xla.clock import predict_kernel_time, predict_step_time
    from jaxremat.xla.kernels import kernels_of

    speed = speed_on(program)
    if speed is None:
        return {}
    time, seconds = predict_step_time(module, speed), {"matmul_s": 0.0, "attention_s": 0.0}
    kernels = kernels_of(module)
    for kernel in kernels:
        if kernel.kernel_class == "attention" or kernel.kernel_class.endswith("matmul"):
            whose = kernel.kernel_class.rpartition(" ")[2]
            seconds[f"{whose}_s"] += predict_kernel_time(kernel, speed).kernel_s * kernel.count / speed.training_share
    links = {"collective_s": time.collective_s, "collective_exposed_s": time.collective_exposed_s}
    if speed.cycles_per_s:  # of TPUs, whose recipes offload
        links |= {"host_s": time.host_s, "host_exposed_s": time.exposed_s}
        flops = sum(kernel.flops * kernel.count for kernel in kernels if kernel.cycles)
        links["matmul_share"] = flops / speed.bf16_flops / seconds["matmul_s"]
    other_s = time.step_s - sum(seconds.values()) - time.collective_exposed_s - time.exposed_s
    return {"predicted_s": time.step_s, **seconds, **links, "other_s": other_s}


def row_of(step: Published, flags: Flags) -> Row:
    """What was published of a step, and what was compiled and predicted. A step that fails has `error`."""
    row: Row = {
        "name": step.name,
        "about": step.about,
        "target": step.target,
        "policy": step.policy,
        "batch": step.batch,
        "whose": "MaxText" if step.maxtext else "our decoder",
        "measured_s": step.measured_s,
        "source": step.source,
        "trust": step.trust,
        "unmatched": step.unmatched,
    }
    try:
        program, module = program_of(step, flags)
    except Exception as error:  # MaxText and XLA raise what they like, and the other steps are tried
        what = error if isinstance(error, JaxrematError) else f"{type(error).__name__}: {error}"
        print(f"{step.name}: {what}", file=sys.stderr)
        return row | {"error": str(what).partition("\n")[0]}
    row |= {"mesh": program.mesh, "num_devices": program.num_devices, "nodes": program.nodes}
    row |= {"total_bytes": program.total_bytes, "temp_bytes": program.temp_bytes} | predicted(program, module)
    return row | ({"longer": step.measured_s / row["predicted_s"] - 1} if "predicted_s" in row else {})


def measure_steps(flags: Flags) -> Iterator[Row]:
    """Every published step, with the predicted time and the share by which the measured one is longer."""
    rows = list[Row]()
    for step in _steps(flags):
        rows.append(row_of(step, flags))
        yield rows[-1]
    if flags.out == RESULTS and flags.target not in tpu_names():
        draw_steps(rows, DOCS / "published_steps.png")


def measure_fits(flags: Flags) -> Iterator[Row]:
    """The number fitted to all steps on several GPUs that have tables, and to all but those of one source.

    The fit is the least mean square of log(measured / predicted).
    """
    from jaxremat.xla.clock import predict_step_time

    if flags.target in tpu_names():
        yield from measure_tpu_fits(flags)
        return
    of_source: dict[str, list[str]] = {}
    longer: dict[str, dict[float, float]] = {}
    for step in _rows(flags).step:
        program, module = program_of(step, flags)
        speed = speed_on(program)
        if speed is None or speed.tables is None:
            continue
        of_source.setdefault(re.split("[ ,]", step.source)[0], []).append(step.name)
        longer[step.name] = {}
        for share in TRAINING_SHARES:
            tables = replace(speed.tables, training_share=share)
            predicted_s = predict_step_time(module, replace(speed, tables=tables)).step_s
            longer[step.name][share] = step.measured_s / predicted_s - 1
    for source, names in {"nothing": [], **of_source}.items():
        known = [name for name in longer if name not in names]
        share = min(TRAINING_SHARES, key=lambda share: sum(math.log1p(longer[name][share]) ** 2 for name in known))
        off = [longer[name][share] for name in names or longer]
        yield {
            "without": source,
            "num_steps": len(off),
            "training_share": share,
            "median_off": statistics.median(map(abs, off)),
            "most_off": max(off, key=abs),
            "off": off,
        }


def measure_tpu_fits(flags: Flags) -> Iterator[Row]:
    """The numbers of a generation of TPUs, fitted to all of its steps and to all but those of one source.

    The fit is the least sum of |log(measured / predicted)|, which a single odd step doesn't bend.
    """
    from jaxremat.xla.kernels import events_of

    known = list[tuple[str, Callable[[tuple[float, ...]], float]]]()
    for step in _steps(flags):
        program, module = program_of(step, flags)
        longer = functools.partial(_longer, step, program, events_of(module))
        known.append((step.source.partition(";")[0], functools.cache(longer)))
    for source in ("nothing", *dict.fromkeys(source for source, _ in known)):
        if others := [longer for of, longer in known if of != source]:
            numbers = _fitted_to(others)
            off = [longer(numbers) for of, longer in known if source in ("nothing", of)]
            yield {
                "without": source,
                "num_steps": len(off),
                **dict(zip(TPU_NUMBERS, numbers, strict=True)),
                "median_off": statistics.median(map(abs, off)),
                "most_off": max(off, key=abs),
                "off": off,
            }


def _longer(step: Published, program: Program, events: "Sequence[Kernel | Wait]", numbers: tuple[float, ...]) -> float:
    """How much longer a step on TPUs took than predicted by the numbers of `TPU_NUMBERS`."""
    from jaxremat.chips.tpu.speed import tpu_speed
    from jaxremat.xla.clock import seconds_of

    numbers_of = dict(zip(TPU_NUMBERS, numbers, strict=True))  # the matmuls of a compiled program have cycles
    fitted = Fitted(**numbers_of, matmul_share=1.0, error=0.0, paired_error=0.0, source="")
    speed = tpu_speed(replace(load_tpu(step.target), fitted=fitted), _mesh_of(program))
    assert speed is not None, "the links of a TPU with published steps are known"
    return step.measured_s / seconds_of(events, speed).step_s - 1


def _fitted_to(steps: Sequence[Callable[[tuple[float, ...]], float]]) -> tuple[float, ...]:
    """The numbers of `TPU_NUMBERS` by which steps are predicted best: one after the other, until none changes."""
    best, before = tuple(map(statistics.median_low, TPU_NUMBERS.values())), None
    while best != before:
        before = best
        for place, tried in enumerate(TPU_NUMBERS.values()):
            around = [(*best[:place], number, *best[place + 1 :]) for number in tried]
            best = min(around, key=lambda numbers: sum(abs(math.log1p(longer(numbers))) for longer in steps))
    return best


def measure_alone(flags: Flags) -> Iterator[Row]:
    """Every step on one GPU, with the predicted time and the share by which the measured one is longer."""
    return (row_of(step, flags) for step in _rows(flags).alone)


def measure_bytes(flags: Flags) -> Iterator[Row]:
    """Every published step with bytes of the target, MaxText's and our decoder's."""
    rows = list[Row]()
    steps = [step for step in _rows(flags).bytes if step.target == flags.target]
    if not steps:
        have = sorted({step.target for step in _rows(flags).bytes})
        raise UsageError(f"no step with bytes is one of {flags.target}", allowed=", ".join(have), next_step="--target t4")
    for step in steps:
        row = row_of(step, flags) | {"total_gib": step.total_gib, "temp_gib": step.temp_gib}
        sizes = dict(step.decoder)
        decoder = Published(
            name=f"{step.name}-decoder",
            about=step.about,
            target=step.target,
            measured_s=step.measured_s,
            source=step.source,
            model=str(DECODER),
            policy=sizes.pop("policy"),
            options=step.options | sizes,
            batch=step.batch,
            xla_preset=step.xla_preset,
        )
        ours = row_of(decoder, flags)
        rows.append(row | {f"decoder_{name}": ours[name] for name in ("total_bytes", "temp_bytes") if name in ours})
        yield rows[-1]
    if flags.out == RESULTS:
        draw_bytes(rows, DOCS / "published_bytes.png", f"published steps on a {flags.target}")


def _steps(flags: Flags) -> Sequence[Published]:
    """The steps on several GPUs, or those on TPUs of the target.

    Raises:
        UsageError: none is one of the target.
    """
    rows = _rows(flags)
    if flags.target not in tpu_names():
        return rows.step
    if found := [step for step in rows.tpu if step.target == flags.target]:
        return found
    have = sorted({step.target for step in rows.tpu})
    raise UsageError(f"no published step is one of {flags.target}", allowed=", ".join(have))


def _rows(flags: Flags) -> Rows:
    if flags.out == RESULTS and flags.rows != FILE:
        raise UsageError(
            f"--rows got {flags.rows} without --out", next_step="--out FOLDER, as results/ has what was published"
        )
    return read_rows(flags.rows)


def draw_steps(rows: Sequence[Row], path: Path) -> None:
    """Draws by which factor each step took longer than predicted to a PNG file."""
    rows = [row for row in rows if "longer" in row][::-1]
    figure, axes = _figure(0.3 * len(rows) + 1.2)
    axes.scatter([1 + row["longer"] for row in rows], [row["about"] for row in rows], zorder=3)
    axes.axvspan(*(1 + share for share in SEVERAL_GPUS), alpha=0.12, label="the interval of tables")
    axes.axvline(1, color="0.6", linewidth=1)
    axes.legend(loc="lower right")
    axes.set(xlabel="measured seconds / predicted seconds", title="published steps on several GPUs")
    figure.savefig(path, dpi=110, format="png")


def draw_bytes(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draws the published bytes and the compiled ones to a PNG file."""
    figure, axes = _figure(5.2)
    for prefix, whose, marker in (("", "MaxText's own step", "o"), ("decoder_", "our decoder", "x")):
        for kind, color in (("total", "C0"), ("temp", "C1")):
            compiled = f"{prefix}{kind}_bytes"
            points = [(row[f"{kind}_gib"], row[compiled] / 2**30) for row in rows if compiled in row]
            if points:
                axes.scatter(*zip(*points, strict=True), marker=marker, color=color, label=f"{whose}, {kind}", zorder=3)
    axes.axline((0, 0), slope=1, color="0.6", linewidth=1)
    axes.set(xlabel="GiB printed on the chip, to 0.1", ylabel="GiB compiled here", title=title)
    axes.legend()
    figure.savefig(path, dpi=110, format="png")


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


#: By part, the function that measures it, how many of its first columns are words, and the columns of its table.
MEASURES: Mapping[Part, tuple[Callable[[Flags], Iterator[Row]], int, tuple[str, ...]]] = {
    "steps": (
        measure_steps,
        1,
        (
            *("name", "total_bytes", "measured_s", "predicted_s", "longer", "matmul_s", "attention_s", "collective_s"),
            *("collective_exposed_s", "host_exposed_s", "other_s", "matmul_share"),
        ),
    ),
    "fits": (measure_fits, 1, ("without", "num_steps", "training_share", *TPU_NUMBERS, "median_off", "most_off")),
    "alone": (measure_alone, 1, ("name", "total_bytes", "measured_s", "predicted_s", "longer", "matmul_s", "attention_s")),
    "bytes": (
        measure_bytes,
        1,
        (
            *("name", "total_gib", "total_bytes", "decoder_total_bytes", "temp_gib", "temp_bytes", "measured_s"),
            *("predicted_s", "longer"),
        ),
    ),
}


SECONDS = "{:.3f}".format
SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "temp_bytes": ("temp", gib_number),
    "decoder_total_bytes": ("our decoder", gib_number),
    "total_gib": ("published GiB", str),
    "temp_gib": ("published temp", str),
    "measured_s": ("measured s", SECONDS),
    "predicted_s": ("predicted s", SECONDS),
    "longer": ("longer", "{:+.1%}".format),
    "num_steps": ("steps", str),
    "training_share": ("in training", str),
    "cycles_per_s": ("cycles/s", "{:.3g}".format),
    "matmul_share": ("of the peak", "{:.2f}".format),
    "attention_share": ("attention", "{:.2f}".format),
    "bandwidth_share": ("bandwidth", "{:.2f}".format),
    "median_off": ("median off", "{:.1%}".format),
    "most_off": ("most off", "{:+.1%}".format),
    "matmul_s": ("matmuls", SECONDS),
    "attention_s": ("attention", SECONDS),
    "collective_s": ("links busy", SECONDS),
    "collective_exposed_s": ("exposed", SECONDS),
    "host_exposed_s": ("host exposed", SECONDS),
    "other_s": ("other", SECONDS),
}


def main(argv: list[str] | None = None) -> int:
    """Compiles, prints and writes, and returns the exit code."""
    return run_experiment("published", Flags, argv, MEASURES, show_by(SHOWN))


if __name__ == "__main__":
    sys.exit(main())
