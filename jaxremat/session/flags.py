"""The flags of the commands that compile steps, as dataclasses.

Commands share a flag by inheriting its dataclass.

The arguments `--model gpt2 --batch 8,16` become `RunFlags(model="gpt2", batch=(8, 16), ...)`. `request.py` checks the
values. This module imports no JAX, so `--help` starts fast.
"""

import dataclasses
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from cyclopts import Parameter

from jaxremat.chips.catalog import PRESETS
from jaxremat.config import ModelConfig, Objective, TrainConfig
from jaxremat.mesh.axes import MAX_DEVICES
from jaxremat.policy.grammar import grammar
from jaxremat.search.batch import MAX_BATCH
from jaxremat.search.histogram import MAX_SEQ_LEN
from jaxremat.session.fields import byte_size, converted, whole_numbers

Words = tuple[str, ...]
#: The preset that is taken where neither --model nor --hf is given.
DEFAULT_MODEL = "gpt2"
#: The flags that --help shows. --help-all shows all of a command's flags.
COMMON_FLAGS = (
    *("policy", "model", "hf", "maxtext", "seq_len", "batch", "global_batch", "max_batch", "target", "mesh", "devices"),
    *("budget", "loss", "optimizer", "scan_layers", "num_layers", "code", "save_plan", "lint", "page", "price"),
    *("lengths", "num_steps", "run_dir", "data", "jobs", "fresh", "retry_failed", "csv", "frontier", "list", "out"),
    *("json", "limit", "interval", "once", "python", "version"),
)
Listable = Literal["policies", "models", "targets", "optimizers", "names", "shardings"]

#: The help text of --policy, shared by `run`, `explain` and `sweep`.
POLICY_HELP = (
    "Policies: what the layers save for the backward pass, such as none, dots, save:NAME, every:2, or auto to have one planned. "
    f"All forms: {', '.join(form.pattern for form in grammar())}, and plan:FILE for a plan that was saved before. "
    "auto chooses batch and loss, too, unless they are given. --list policies says what each one saves. Default: dots."
)

#: The help text of --xla-preset.
PRESET_HELP = (
    f"Sets of XLA's flags, one or several side by side: {', '.join(PRESETS)}. A flag in XLA_FLAGS wins over them. "
    "Default: default."
)

#: The types of flags that take more than their fields do.
_FLAG_TYPES: dict[str, Any] = {"scan_layers": bool | Literal["auto"]}


def _overrides(name: str, config: type) -> type:
    """A dataclass of the fields of `config` that have a help text.

    Each is None, or `()`, unless its flag is given.
    """
    flags, kinds = [], {int: "INT", float: "FLOAT", bool: "True|False"}
    for f in dataclasses.fields(config):
        if not f.metadata:
            continue
        metavar = f.metadata["metavar"] or kinds.get(f.type) or "|".join(map(str, get_args(f.type)))
        own = "the preset's" if f.name == "seq_len" or config is ModelConfig else f.metadata["shown"]
        argument = Parameter(metavar=metavar, help=f"{f.metadata['help']}. Default: {own}.")
        kind, default = _FLAG_TYPES.get(f.name, f.type) | None, None
        if f.name == "seq_len":
            more = Parameter(metavar="N[,N...]", converter=whole_numbers(MAX_SEQ_LEN, "2048,8192"))
            kind, default = tuple[int, ...], ()
        else:
            more = Parameter(converter=converted(str)) if f.default == "" else Parameter()
        flags.append((f.name, Annotated[kind, argument, more], default))
    return make_dataclass(name, flags, frozen=True)


ModelFlags = _overrides("ModelFlags", ModelConfig)
TrainFlags = _overrides("TrainFlags", TrainConfig)


@dataclass(frozen=True)
class OneFlags:
    """What is compiled: one model for one target."""

    policy: Annotated[Words, Parameter(metavar="POLICY [POLICY ...]", help=POLICY_HELP)] = ()
    model: Annotated[str | None, Parameter(metavar="MODEL|PKG.MOD:ATTR|FILE.py:ATTR")] = None
    """A preset of --list models, whose fields the flags below change; or a jaxremat.Workload of your own, or what makes one.
    Default: gpt2."""
    hf: Annotated[str | None, Parameter(metavar="FILE")] = None
    """A Hugging Face config.json of a known family in place of --model; the flags below change its fields."""
    maxtext: Annotated[str | None, Parameter(metavar="TEXT")] = None
    """MaxText's command line in place of --model: the model, the optimizer and the loss are MaxText's own. TEXT is such as
    'configs/base.yml model_name=qwen3-0.6b': a YAML file, and keys of it. --batch is then per_device_batch_size."""
    batch: Annotated[tuple[int, ...], Parameter(metavar="N[,N...]", converter=whole_numbers(MAX_BATCH, "8,16,32"))] = ()
    """Batch sizes in place of the search for the largest."""
    target: Annotated[str | None, Parameter(metavar="NAME|FILE")] = None
    """gpu, cpu, a name of --list targets, or a target text file. Default: the attached GPU, else h100-80gb."""


@dataclass(frozen=True)
class SharedFlags:
    """Devices, memory and measuring. A sweep has one value for all its trials."""

    #: Whether the steps are those of a training.
    trains: ClassVar[bool] = False
    model_arg: Annotated[Words, Parameter(metavar="KEY=VALUE [KEY=VALUE ...]")] = ()
    """Arguments by name of a --model of your own that is a function."""
    layers: Annotated[Words, Parameter(metavar="'PATTERN' ['PATTERN' ...]")] = ()
    """Scopes of the repeated layers of a --model of your own, such as 'blocks_*'. Default: they are found."""
    train_only: Annotated[Words, Parameter(metavar="'PATTERN' ['PATTERN' ...]")] = ()
    """Train only these parameters and freeze the others: globs of names in their paths, such as 'lora_*' or 'layers/mlp'."""
    freeze: Annotated[Words, Parameter(metavar="'PATTERN' ['PATTERN' ...]")] = ()
    """Freeze these parameters, such as 'embed*': they have no gradients and no optimizer state."""
    global_batch: Annotated[int | None, Parameter(metavar="G")] = None
    """Sequences per step, in as few microbatches as fit; they are equal, and --accumulate follows from it."""
    mesh: Annotated[str | None, Parameter(metavar="AXIS=N[,AXIS=N]")] = None
    """Several devices, such as data=2,fsdp=4,tensor=2. --batch is then sequences per device of data, fsdp and expert.
    auto compares the sensible meshes of --devices N."""
    devices: Annotated[int | None, Parameter(metavar="N")] = None
    """Devices in all. Alone it is --mesh fsdp=N; beside --mesh one axis may be -1."""
    nodes: Annotated[int | None, Parameter(metavar="N")] = None
    """Machines that the devices are on; slices, of TPUs. Default: as few as have at most 8 each, and one slice."""
    network_gbps: Annotated[float | None, Parameter(metavar="G")] = None
    """Gbit/s (not GB/s) that one machine sends to others, all its adapters together, as clouds state it: 3200 for 8 of 400 Gb/s.
    Default: the target's, such as 400 a GPU of h100-80gb."""
    topology: Annotated[str | None, Parameter(metavar="AxB[xC]")] = None
    """How the chips of a slice of TPUs lie, such as 2x4. Default: the nearest to a square or a cube."""
    budget: Annotated[int | None, Parameter(metavar="SIZE", converter=byte_size)] = None
    """Bytes a step may use, such as 40GiB. Default: the allocator's limit, or --mem-fraction of a GPU that isn't here."""
    mem_fraction: Annotated[float | None, Parameter(metavar="SHARE")] = None
    """Share of the memory of a device that isn't here. Default: 0.75 of a GPU's, as JAX's allocator takes it, and all that
    XLA's compiler lets a program take of a TPU's."""
    headroom: Annotated[float | None, Parameter(metavar="SHARE")] = None
    """Share of that limit to leave free, such as 0.02; 0 leaves none. Default: fitted to runs on this kind of GPU."""
    data: Annotated[str | None, Parameter(metavar="FILE")] = None
    """Text to train on when measuring, bytes as tokens. Default: random tokens, as frequent as in real text."""
    steps: int = 10
    """Measured steps, after two that warm up."""
    xla_remat: bool = False
    """Let XLA's own rematerialization pass run, as in a job that doesn't disable it, in the pool of --mem-fraction."""
    xla_preset: Annotated[Words, Parameter(metavar="PRESET [PRESET ...]", help=PRESET_HELP)] = ()
    fresh: bool = False
    """Do it all again, also what was compiled before; earlier records stay in the file, and the newest count."""
    verbose: Annotated[bool, Parameter(alias="-v")] = False
    """Show XLA's own log; in a sweep, where a process crashed."""
    training: Any = field(default_factory=TrainFlags)
    """The training step."""
    fields: Any = field(default_factory=ModelFlags)
    """Fields of the model; by default the preset's own."""

    @property
    def on_mesh(self) -> bool:
        """Whether the flags request a mesh."""
        return self.mesh is not None or self.devices is not None


@dataclass(frozen=True)
class SearchFlags:
    """The search and the plan."""

    max_batch: Annotated[int | None, Parameter(metavar="N")] = None
    """The search stops here. Default: only memory ends it."""
    objective: Objective = "time"
    """Of --policy auto: time for the most tokens per second, batch for the largest batch, memory for the least bytes."""
    offload: bool = False
    """Let --policy auto offload to host memory what the link moves while a layer runs, in hope that kernels hide it."""


@dataclass(frozen=True)
class StepFlags(SharedFlags, OneFlags):
    """Records. `run` and `explain` share these flags."""

    json: bool = False
    """Print only records to stdout, one JSON object a line."""
    out: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Append each record to this file when it is finished."""
    version: bool = False
    """Print the version and stop."""


@dataclass(frozen=True)
class ProcessFlags:
    """Several processes that run the steps of a mesh together."""

    distributed: bool = False
    """This is one of several processes that run the steps of a --mesh together; srun's or mpirun's variables say which one."""
    coordinator: Annotated[str | None, Parameter(metavar="HOST:PORT")] = None
    """Where the first of several processes waits for the others, without a launcher; with the next two."""
    num_processes: Annotated[int | None, Parameter(metavar="N")] = None
    """How many processes there are."""
    process_id: Annotated[int | None, Parameter(metavar="I")] = None
    """Which of them this is, from 0. The first one prints and writes the answers."""
    initialization_timeout: Annotated[int, Parameter(metavar="SECONDS")] = 60
    """How long to wait until all processes are there."""


@dataclass(frozen=True)
class RunFlags(ProcessFlags, SearchFlags, StepFlags):
    """Which rematerialization policy, which batch, how fast.

    Compiles the training step, reads XLA's memory, finds the largest batch that fits: on an attached GPU, or for a
    GPU that isn't in this machine.
    """

    lengths: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Lengths of your sequences, one or `length,count` a line: a few buckets, each at its own batch, against padding and
    packing. --seq-len then cuts longer sequences, and the policy is auto unless given."""
    buckets: Annotated[int | None, Parameter(metavar="N")] = None
    """At most so many buckets of --lengths. Default: 4."""
    frontier: bool = False
    """At one --batch: bytes against step time for the named policies and for plans between them; chunked loss by default."""
    plot: Annotated[Path | None, Parameter(metavar="FILE.png")] = None
    """Draw the frontier (pip install "jaxremat[plot]")."""
    explain_plan: bool = False
    """A plan's lower bound and what its tensors are worth; what more budget would buy, and code to paste."""
    code: bool = False
    """Code to paste for each policy; for a model of your own, around the loss and in the model's framework."""
    save_plan: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Write the plan of --policy auto to a file that --policy plan:FILE reads."""
    list: Annotated[Listable | None, Parameter(metavar="|".join(get_args(Listable)))] = None
    """List these and stop; optimizers, checkpoint names and, on a --mesh, shardings come with their bytes for --model."""
    dump_target: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Write XLA's description of the target GPU to a file that --target reads, and stop."""


@dataclass(frozen=True)
class GridFlags:
    """Trials and processes of a sweep, and the file of its records."""

    out: Annotated[Path, Parameter(metavar="FILE")]
    """Records go to this file, and what is there already isn't done again."""
    model: Annotated[Words, Parameter(metavar="MODEL [MODEL ...]")] = ()
    """Presets of jaxremat run --list models, or workloads of your own (PKG.MOD:ATTR, FILE.py:ATTR). Default: gpt2."""
    hf: Annotated[Words, Parameter(metavar="FILE [FILE ...]")] = ()
    """Hugging Face config.json files of known families, each a model beside those of --model."""
    policy: Annotated[Words, Parameter(metavar="POLICY [POLICY ...]", help=POLICY_HELP)] = ()
    batch: Annotated[tuple[int, ...], Parameter(metavar="N[,N...]", converter=whole_numbers(MAX_BATCH, "8,16,32"))] = ()
    """These batch sizes, each a trial, instead of the search for the largest."""
    target: Annotated[Words, Parameter(metavar="NAME|FILE [NAME|FILE ...]")] = ()
    """gpu, cpu, names of --list targets, or target text files. Default: the attached GPU, else h100-80gb."""
    jobs: Annotated[int | None, Parameter(metavar="N")] = None
    """Compiles at a time. Default: as many as there are cores and memory for. What runs on a device always runs alone."""
    timeout: Annotated[float, Parameter(metavar="SECONDS")] = 3600.0
    """A process that takes longer is killed, and its trial's outcome is timeout."""
    shard: Annotated[str | None, Parameter(metavar="I/N")] = None
    """Only every Nth trial, from the Ith (1 to N): for N processes or machines with one --out on a shared file system."""
    retry_failed: bool = False
    """Do again what timed out, crashed or ran out of memory."""
    csv: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Write the sweep's rows as a table of comma-separated values too, at the end."""
    submit: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """Submit the sweep to SLURM as an array job, its logs in FOLDER, and stop (pip install "jaxremat[slurm]")."""
    num_shards: Annotated[int, Parameter(metavar="N")] = 4
    """Tasks of the array job."""
    slurm: Annotated[Words, Parameter(metavar="KEY=VALUE [KEY=VALUE ...]")] = ()
    """Of the array job: timeout_min, cpus_per_task, mem_gb, gpus_per_node, slurm_partition, and what else submitit takes."""
    cluster: Literal["slurm", "local"] = "slurm"
    """local runs the shards on this machine, to try the submission out."""


@dataclass(frozen=True)
class SweepFlags(SearchFlags, SharedFlags, GridFlags):
    """Every model under every policy, batch and target, each in a process of its own.

    What is finished is in --out. The same command again resumes it, however it ended.
    """


@dataclass(frozen=True)
class RecommendFlags:
    """Which GPUs or TPUs to rent, how many, and how to train on them.

    For every target and number of devices: the mesh, the policy, the batch, tokens per second, and with --price the cost. The
    devices aren't needed. What is finished is in --out, and the same command again resumes it.
    """

    model: Annotated[str | None, Parameter(metavar="MODEL|PKG.MOD:ATTR|FILE.py:ATTR")] = None
    """A preset of jaxremat run --list models, whose fields the flags below change, or a workload of your own.
    Default: gpt2."""
    hf: Annotated[str | None, Parameter(metavar="FILE")] = None
    """A Hugging Face config.json of a known family in place of --model."""
    maxtext: Annotated[str | None, Parameter(metavar="TEXT")] = None
    """MaxText's command line in place of --model. Its config makes the mesh of each number of devices."""
    model_arg: Annotated[Words, Parameter(metavar="KEY=VALUE [KEY=VALUE ...]")] = ()
    """Arguments by name of a --model of your own that is a function."""
    layers: Annotated[Words, Parameter(metavar="'PATTERN' ['PATTERN' ...]")] = ()
    """Scopes of the repeated layers of a --model of your own."""
    train_only: Annotated[Words, Parameter(metavar="'PATTERN' ['PATTERN' ...]")] = ()
    """Train only these parameters, as in jaxremat run."""
    freeze: Annotated[Words, Parameter(metavar="'PATTERN' ['PATTERN' ...]")] = ()
    """Freeze these parameters, as in jaxremat run."""
    global_batch: Annotated[int | None, Parameter(metavar="G")] = None
    """Sequences per step on all devices. Default: as many as are fastest."""
    target: Annotated[Words, Parameter(metavar="NAME|FILE [NAME|FILE ...]")] = ()
    """GPUs and TPUs to compare. Default: all GPUs of jaxremat run --list targets. TPUs, whose compiles take minutes, are
    compared where they are named, on one axis: --mesh fsdp=N."""
    devices: Annotated[
        tuple[int, ...], Parameter(metavar="N[,N...]", converter=whole_numbers(MAX_DEVICES, "1,8,16,64"))
    ] = ()
    """Numbers of devices to compare. Default: 1,8,16,64."""
    network_gbps: Annotated[float | None, Parameter(metavar="G")] = None
    """Gbit/s (not GB/s) that one machine sends to others, all its adapters together. Default: each target's."""
    policy: Annotated[Words, Parameter(metavar="POLICY [POLICY ...]")] = ()
    """Policies of which the fastest counts. Default: auto, which plans."""
    price: Annotated[Path | None, Parameter(metavar="FILE.toml")] = None
    """What one device costs an hour, by the name of its target, such as h100-80gb = 2.50. No price is shipped."""
    budget: Annotated[int | None, Parameter(metavar="SIZE", converter=byte_size)] = None
    """Bytes a step may use on each device, such as 40GiB. Default: --mem-fraction of its memory."""
    mem_fraction: Annotated[float | None, Parameter(metavar="SHARE")] = None
    """Share of a device's memory that a step may use. Default: as in jaxremat run."""
    max_batch: Annotated[int | None, Parameter(metavar="N")] = None
    """No larger batch is looked at. Default: what fits the memory."""
    xla_preset: Annotated[str, Parameter(metavar="PRESET")] = "default"
    """A set of XLA's flags, as in jaxremat run."""
    out: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Records of the trials go to this file, and what is there already isn't done again. Default: a file in the user's cache."""
    json: bool = False
    """Print a record for each row to stdout, one JSON object a line, in place of the table."""
    jobs: Annotated[int | None, Parameter(metavar="N")] = None
    """Compiles at a time. Default: as many as there are cores and memory for."""
    timeout: Annotated[float, Parameter(metavar="SECONDS")] = 3600.0
    """A process that takes longer is killed."""
    fresh: bool = False
    """Do it all again, also what was compiled before; earlier records stay in the file, and the newest count."""
    retry_failed: bool = False
    """Do again what timed out or crashed."""
    training: Any = field(default_factory=TrainFlags)
    """The training step. Default of --loss: chunked."""
    fields: Any = field(default_factory=ModelFlags)
    """Fields of the model. Default of --scan-layers: True, since unrolled layers compile several times longer."""
