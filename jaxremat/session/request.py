"""Parses and checks the flags of a command, and makes a request from them.

Checks that need JAX come later, in `Session.of`. An example:

    check_run(RunFlags(policy=("dots",), batch=(8, 16)))
    # Request(policies=(RequestedPolicy("dots", Rule("dots")),), model=Model("gpt2", ...), batches=(8, 16), ...)
"""

import functools
import shlex
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from jaxremat.chips.catalog import DEFAULT_DEVICELESS, PRESETS, chip_of, describe, target_name
from jaxremat.config import Layout, TrainConfig, divisors, override
from jaxremat.errors import (
    UnknownPolicyError,
    UsageError,
    alone,
    bad_value,
    both,
    closest,
    did_you_mean,
    flag_of,
    nearest,
    reject,
)
from jaxremat.mesh.axes import MAX_NETWORK_GBPS, MeshShape, parse_mesh
from jaxremat.mesh.sensible import sensible_meshes
from jaxremat.model.requested import named_decoder
from jaxremat.policy.grammar import forms, parse
from jaxremat.policy.maxtext import config_batch, config_words
from jaxremat.policy.spec import Policy
from jaxremat.search.batch import MAX_BATCH
from jaxremat.search.buckets import Bucketed
from jaxremat.session.flags import DEFAULT_MODEL, RunFlags, StepFlags
from jaxremat.trial.plan_file import PlanFile, load_plan
from jaxremat.units import gib
from jaxremat.workload.given import GivenModel
from jaxremat.workload.model import Model, given_model, narrowed
from jaxremat.workload.source import find_source, is_spec
from jaxremat.workload.trainable import Narrowed

#: The most steps that are measured.
MAX_STEPS = 10**6
#: What makes the workload of --maxtext, as --model has it.
MAXTEXT = "jaxremat.maxtext:workload"
#: What --mesh says to have the mesh chosen.
MESH_AUTO = "auto"


@dataclass(frozen=True)
class Auto:
    """Stands in a policy's place for `--policy auto`: a policy is planned.

    `layouts` are the ways to run the layers that are compared. Empty leaves them as they are.
    """

    losses: tuple[str, ...]
    layouts: tuple[Layout, ...] = ()

    def with_short_compiles(self) -> "Auto":
        """The plan of few and short compiles: the loss of the fewest bytes, layers in a scan."""
        return Auto(("chunked",) if "chunked" in self.losses else self.losses[:1], self.layouts[:1])


@dataclass(frozen=True)
class Frontier:
    """Stands in a policy's place for `--frontier`: policies and plans at one batch."""


@dataclass(frozen=True)
class RequestedPolicy:
    """One policy of a request.

    Attributes:
        text: the policy as the user typed it.
        policy: the parsed policy.
        xla_preset: the preset of XLA's options that it is compiled with.
    """

    text: str
    policy: Policy | Auto | PlanFile | Frontier
    xla_preset: str = "default"


@dataclass(frozen=True)
class RequestedModel:
    """A model with its training step.

    Attributes:
        model: the preset or the model of --hf with the fields that the flags change, or a workload of the user's own.
        train: the training step's settings.
    """

    model: Model
    train: TrainConfig


StepFlagsT = TypeVar("StepFlagsT", bound=StepFlags)


@dataclass(frozen=True)
class Request(Generic[StepFlagsT]):
    """What the flags request, parsed and checked.

    Attributes:
        policies: the policies, each with each preset of XLA's options. No two are the same.
        model: the preset or the model of --hf with the fields that the flags change, or a workload of the user's own.
        train: the training step's settings.
        batches: the batches to compile. Empty if the largest batch is to be found.
        budget_bytes: the bytes that a step may use, if --budget was given.
        flags: the flags themselves.
        mesh: the devices, if several were requested.
        lengths: the lengths of --seq-len, if there are several, or of the buckets of --lengths. `train` then has the first of
            them.
        bucketed: the data set of --lengths in buckets.
        meshes: the meshes that `--mesh auto` compares. One device has only `ONE_DEVICE`. Empty if a mesh or none was given.
    """

    policies: tuple[RequestedPolicy, ...]
    model: Model
    train: TrainConfig
    batches: tuple[int, ...]
    budget_bytes: int | None
    flags: StepFlagsT
    mesh: MeshShape | None = None
    lengths: tuple[int, ...] = ()
    bucketed: Bucketed | None = None
    meshes: tuple[MeshShape, ...] = ()

    def losses_of(self, policy: Policy | Auto | PlanFile | Frontier) -> tuple[str, ...]:
        """The losses that the steps of `policy` are compiled with."""
        if isinstance(policy, Auto):
            return policy.losses
        return (self.flags.training.loss or policy.loss if isinstance(policy, PlanFile) else self.train.loss,)

    def batches_of(self, plan: PlanFile) -> tuple[int, ...]:
        """The batches of --batch, or the plan's batch. The CPU's default batch of 1 doesn't count."""
        return self.batches if self.flags.batch else (plan.batch,)


def check_run(flags: RunFlags, model: RequestedModel | None = None) -> Request[RunFlags]:
    """The request of the flags of `jaxremat run`.

    Args:
        flags: the flags.
        model: the model in place of the one that the flags name.

    Raises:
        UsageError: a value isn't valid, or two flags contradict each other.
    """
    _within("--max-batch", flags.max_batch, 0, MAX_BATCH)
    request = check_step(flags, model)
    flags = request.flags
    _check_run_flags(flags, request)
    if not flags.frontier:
        return request
    train = request.train if flags.training.loss else replace(request.train, loss="chunked")
    frontiers = tuple(replace(one, text="frontier", policy=Frontier()) for one in request.policies)
    return replace(request, policies=frontiers, train=train)


def without_planning(flags: RunFlags) -> RunFlags:
    """The flags for a policy that isn't planned, without those that only --policy auto uses."""
    fields = replace(flags.fields, scan_layers=None) if flags.fields.scan_layers == "auto" else flags.fields
    return replace(flags, objective="time", offload=False, fields=fields)


def check_step(flags: StepFlagsT, requested: RequestedModel | None = None, *, one_mesh: str = "") -> Request[StepFlagsT]:
    """The request of the flags that commands which compile steps share.

    Args:
        flags: the flags.
        requested: the model in place of the one that the flags name.
        one_mesh: why the command compares no meshes. Empty if it does.

    Raises:
        UsageError: a value isn't valid, or two flags contradict each other.
    """
    flags = without_maxtext(flags)
    requested = requested or requested_model(flags)
    _within("--mem-fraction", flags.mem_fraction, 0, 1)
    _within("--network-gbps", flags.network_gbps, 0, MAX_NETWORK_GBPS)
    _within("--steps", flags.steps, 0, MAX_STEPS)
    _within("--global-batch", flags.global_batch, 0, MAX_BATCH)
    if flags.headroom is not None and not 0 <= flags.headroom < 1:
        allowed = "a share from 0 to below 1"
        raise bad_value("--headroom", f"{flags.headroom:g}", allowed, "0.02 leaves 2 % of the limit free")
    if flags.target not in (None, "gpu", "cpu"):
        describe(flags.target)
    reject((one_mesh and flags.mesh == MESH_AUTO, f"--mesh auto compares meshes in jaxremat run, and {one_mesh}",
            "--mesh fsdp=8, or another mesh"))  # fmt: skip
    policies = _policies(flags, requested.model)
    planned, texts = _is_planned(policies), ", ".join(one.text for one in policies)
    reject(
        (flags.headroom is not None and flags.budget is not None,
         both(f"--headroom {flags.headroom}", f"--budget {gib(flags.budget or 0)}"), "leave one of them out",
         "a headroom is left of the allocator's limit, and a budget is taken as it is given"),
        (flags.fields.scan_layers == "auto" and not planned,
         f"--scan-layers auto goes with --policy auto, and the policy is {texts}",
         "give --scan-layers True or False, or plan the layers: jaxremat run --policy auto",
         "only a plan compares scanned with unrolled layers"),
        (flags.global_batch is not None and flags.training.accumulate is not None,
         both(f"--global-batch {flags.global_batch}", f"--accumulate {flags.training.accumulate}"), "leave one of them out",
         "the number of microbatches follows from the global batch and the batch that fits"),
    )  # fmt: skip
    mesh, meshes = _meshes(flags, requested.model)
    _check_global_batch(flags, policies, None if meshes else mesh)
    model, train = narrowed(requested.model, Narrowed(flags.train_only, flags.freeze)), requested.train
    return Request(policies, model, train, flags.batch, flags.budget, flags, mesh, meshes=meshes)


def without_maxtext(flags: StepFlagsT) -> StepFlagsT:
    """The flags with --model in place of --maxtext.

    What makes MaxText's workload is a function as a user's file has it.

    Raises:
        UsageError: the text isn't valid, or other flags name a model or a batch, too.
    """
    if flags.maxtext is None:
        return flags
    words = config_words(flags.maxtext)
    batch = config_batch(words)
    reject(
        *((given, both("--maxtext", flag_of(name)), "leave one of them out")
          for name in ("model", "hf", "model_arg", "data") if (given := getattr(flags, name))),
        (batch and flags.batch, both(f"--batch {','.join(map(str, flags.batch))}", f"per_device_batch_size={batch}"),
         "leave one of them out; without both, the largest batch that fits is searched"),
    )  # fmt: skip
    text = shlex.join(word for word in words if not word.startswith("per_device_batch_size="))
    batches = flags.batch or ((batch,) if batch else ())
    return replace(flags, maxtext=None, model=MAXTEXT, model_arg=(f"text={text}",), batch=batches)


def requested_model(flags: StepFlags) -> RequestedModel:
    """The model of --model or --hf, with the fields that the other flags change.

    `requested_model(RunFlags(model="llama3-8b"))` has `Model("llama3-8b", ...)` and `TrainConfig(seq_len=2048)`.

    Raises:
        UsageError: there is no such model, or the flags don't go with it.
    """
    named, training = flags.hf or flags.model or DEFAULT_MODEL, _given(flags.training)
    lengths, is_own = training.pop("seq_len", ()), flags.hf is None and is_spec(named)
    of_presets = [name for name in _given(flags.fields) if name != "scan_layers"] + ["data"] * bool(flags.data)
    of_own = flag_of("model_arg" if flags.model_arg else "layers")
    whose = f"--hf {named} is one of a known family" if flags.hf is not None else f"--model {named} is a preset"
    reject(
        (flags.hf is not None and flags.model is not None, both(f"--hf {flags.hf}", f"--model {flags.model}"),
         "leave one of them out; flags such as --num-layers 4 change single fields of either"),
        (not is_own and (flags.model_arg or flags.layers), f"{of_own} goes with a --model of your own, and {whose}",
         f"leave {of_own} out, or give --model FILE.py:ATTR"),
        (len(lengths) > 1, f"--seq-len has {len(lengths)} lengths, and this command takes one", f"--seq-len {[*lengths, 0][0]}",
         "", "several lengths with jaxremat run and jaxremat sweep"),
        (is_own and flags.fields.lora, f"--lora {flags.fields.lora} was given, and --model {named} is a workload of your own",
         "in your function, model = qwix.apply_lora_to_model(model, qwix.LoraProvider(module_path='.*', rank=16, alpha=16.0)), "
         "and Workload(..., trainable='*_lora_*'); examples/lora_own_model.py is whole",
         "adapters are put in where a model is made, and not into a finished loss", "--lora with presets and --hf"),
        (is_own and of_presets, f"--model {named} is a workload of your own, and "
         f"{', '.join(map(flag_of, of_presets))} is for presets alone", "leave that out; --model-arg KEY=VALUE sets what "
         "your function takes"),
    )  # fmt: skip
    if lengths:
        training["seq_len"] = lengths[0]
    fields = changed_fields(flags.fields)
    if is_own:
        find_source(named)
        keywords = {name: value for name, value in (training | fields).items() if name in ("seq_len", "loss", "scan_layers")}
        model = given_model(GivenModel(named, flags.model_arg, flags.layers, keywords))
    else:
        model = named_decoder(flags.hf, named, fields)
    train = override(TrainConfig(seq_len=model.seq_len), **training)
    model.check(train)
    return RequestedModel(model, train)


def changed_fields(fields: Any) -> dict[str, Any]:
    """The fields of the model that flags change.

    `--scan-layers auto` changes none: it compares both.
    """
    return {name: value for name, value in _given(fields).items() if (name, value) != ("scan_layers", "auto")}


def _given(group: Any) -> dict[str, Any]:
    """The flags of a group that were given."""
    return {name: value for name, value in vars(group).items() if value not in (None, ())}


def _is_planned(policies: tuple[RequestedPolicy, ...]) -> bool:
    return any(isinstance(one.policy, Auto) for one in policies)


def _check_run_flags(flags: RunFlags, request: Request[RunFlags]) -> None:
    """Raises UsageError where flags of `jaxremat run` contradict each other."""
    planned, texts = _is_planned(request.policies), ", ".join(one.text for one in request.policies)
    num_presets = len(_xla_presets(flags))
    of_auto = {"objective": flags.objective != "time", "explain_plan": flags.explain_plan, "save_plan": flags.save_plan,
               "offload": flags.offload}  # fmt: skip
    auto = next((flag_of(name) for name, is_given in of_auto.items() if is_given), "")
    beside = "--policy" if flags.policy else auto
    one_mesh = next((one.text for one in request.policies if isinstance(one.policy, PlanFile)), "")
    of_one_mesh = {
        f"--target {flags.target}": ("its times are predicted ones", flags.target in ("gpu", "cpu")),
        "--frontier": ("a frontier is that of one mesh", flags.frontier),
        "--dump-target": ("a target's description has no mesh", flags.dump_target is not None),
        f"--list {flags.list}": ("a list is about one mesh", flags.list in ("names", "shardings")),
        "--offload": ("it compares meshes by plans that offload nothing", flags.offload),
        f"--objective {flags.objective}": ("it compares meshes by their speed", flags.objective != "time"),
        f"--batch {','.join(map(str, flags.batch))}": ("it compares meshes at one batch each", len(flags.batch) > 1),
        f"--policy {one_mesh}": ("a plan was proven on one mesh", one_mesh),
    }
    reject(
        (flags.dump_target and flags.target == "cpu", "--dump-target describes a GPU, and not --target cpu",
         "leave --target out to describe the attached GPU"),
        (flags.frontier and (len(flags.batch) != 1 or flags.global_batch is not None),
         "--frontier compares policies at one --batch", "--frontier --batch 32, or another batch"),
        (flags.frontier and beside, f"--frontier compares the named policies with its own plans, and {beside} was given",
         f"leave {beside} out, or --frontier"),
        (flags.frontier and flags.code, both("--frontier", "--code"), "leave out one of them; --code goes with --policy"),
        (auto and not planned, f"{auto} goes with --policy auto, and the policy is {texts}", "add --policy auto"),
        (flags.plot and not flags.frontier, alone("--plot", "--frontier"), "add --frontier"),
        (planned and flags.objective == "memory" and not flags.batch, "--objective memory needs a --batch",
         "--objective memory --batch 8, or another batch"),
        (planned and flags.objective == "batch" and flags.batch, both("--objective batch", "--batch"),
         "leave one of them out; --max-batch N bounds the batch that is chosen"),
        (flags.save_plan and len(flags.batch) > 1, f"--save-plan writes one plan, and --batch has {len(flags.batch)} values",
         "give one --batch, or none to have it chosen"),
        (flags.save_plan and num_presets > 1, f"--save-plan writes one plan, and --xla-preset has {num_presets} values",
         "give one --xla-preset"),
        (flags.plot and num_presets > 1, f"--plot draws one frontier, and --xla-preset has {num_presets} values",
         "give one --xla-preset"),
        *((flags.mesh == MESH_AUTO and is_given, both("--mesh auto", given),
           f"leave {given} out, or name the mesh: --mesh fsdp={flags.devices or 8}", cause)
          for given, (cause, is_given) in of_one_mesh.items()),
    )  # fmt: skip


def _check_global_batch(flags: StepFlags, policies: tuple[RequestedPolicy, ...], mesh: MeshShape | None) -> None:
    """Raises UsageError where a batch doesn't divide --global-batch: of --batch, else of a plan.

    On a mesh it is that of each data-parallel group.
    """
    of_plans = {one.text: one.policy.batch for one in policies if isinstance(one.policy, PlanFile)}
    num_groups = _num_groups(mesh)
    total = flags.global_batch and flags.global_batch // num_groups
    of_each = f", which is {total} for each of {num_groups} data-parallel groups" if num_groups > 1 else ""
    for named, batch in {f"--batch {batch}": batch for batch in flags.batch}.items() or of_plans.items():
        if total is not None and total % batch:
            raise UsageError(
                f"{named} does not divide --global-batch {flags.global_batch}{of_each}"
                + (f": its batch is {batch}" if named in of_plans else ""),
                allowed=", ".join(map(str, divisors(total))),
                next_step="give one of these as --batch, or leave it out to find the largest microbatch that fits",
            )


def _meshes(flags: StepFlags, model: Model) -> tuple[MeshShape | None, tuple[MeshShape, ...]]:
    """The mesh of --mesh, --devices and --nodes, and the meshes that `--mesh auto` compares."""
    name = target_name(flags.target, on_mesh=flags.on_mesh)
    chip = chip_of(name)
    parsed = functools.partial(
        parse_mesh,
        devices=flags.devices,
        nodes=flags.nodes,
        network_gbps=flags.network_gbps,
        devices_of_node=chip.devices_of_node(name),
        topology=flags.topology,
    )
    reject(
        (flags.topology and not chip.has_topologies, f"--topology {flags.topology} is for TPUs, and not for this target",
         "leave --topology out, or give a TPU: --target v6e"),
        (flags.topology and not flags.on_mesh, alone(f"--topology {flags.topology}", "--mesh or --devices"), "add --devices 8"),
    )  # fmt: skip
    if flags.mesh == MESH_AUTO:
        mesh = parsed(None)
        if mesh is None:
            raise UsageError(
                "--mesh auto compares meshes of --devices, which wasn't given", next_step="--mesh auto --devices 8"
            )
        shape = mesh.num_devices, mesh.nodes
        meshes = sensible_meshes(*shape, num_experts=model.num_experts, has_tensor=model.has_tensor)
        return mesh, tuple(replace(one, network_gbps=mesh.network_gbps, topology=mesh.topology) for one in meshes)
    mesh, total = parsed(flags.mesh), flags.global_batch
    if mesh and total is not None and total % _num_groups(mesh) and (model.num_layers is not None or flags.mesh):
        raise uneven_groups(total, mesh)
    if mesh:
        model.check_mesh(mesh)
    return mesh, ()


def _num_groups(mesh: MeshShape | None) -> int:
    """The number of data-parallel groups. It is 1 without a mesh."""
    return mesh.num_members if mesh else 1


def uneven_groups(total: int, mesh: MeshShape) -> UsageError:
    """The error of a --global-batch that the data-parallel groups of a mesh don't share evenly."""
    groups = _num_groups(mesh)
    return UsageError(
        f"--global-batch {total} over {groups} data-parallel groups of the mesh {mesh}",
        allowed="a global batch that all of them share evenly",
        next_step=f"--global-batch {groups * max(1, total // groups)}",
    )


def _within(flag: str, value: float | None, above: float, upto: float) -> None:
    if value is not None and not above < value <= upto:
        raise bad_value(flag, f"{value:g}", f"a number above {above} and up to {upto}")


def _policies(flags: StepFlags, model: Model) -> tuple[RequestedPolicy, ...]:
    """The policies of --policy, no two the same, each with each preset of --xla-preset."""
    parsed: dict[str, RequestedPolicy] = {}
    for text in flags.policy or ("dots",):
        policy = _policy(text, flags, model)
        if isinstance(policy, Policy) and model.num_layers is not None:
            policy.size(model.num_layers)
        if flags.xla_remat and isinstance(policy, Auto):
            raise UsageError(
                both("--xla-remat", "--policy auto"),
                cause="a plan predicts the bytes of steps, and XLA's pass changes them",
                next_step="name policies, such as --policy none --xla-remat",
            )
        parsed.setdefault(str(policy), RequestedPolicy(text, policy))
    return tuple(replace(one, xla_preset=name) for one in parsed.values() for name in _xla_presets(flags))


def _policy(text: str, flags: StepFlags, model: Model) -> Policy | Auto | PlanFile:
    """The policy of a text.

    A plan chooses among the losses and layouts of the model, unless flags say them.
    """
    if text == "plan:":
        raise UsageError("--policy plan: names no file", allowed="plan:FILE", next_step="the file that --save-plan wrote")
    if text.startswith("plan:"):
        return load_plan(text.removeprefix("plan:"))
    if text != "auto":
        return _parsed(text) if isinstance(flags, RunFlags) else parse(text)
    losses = (flags.training.loss,) if flags.training.loss else model.losses
    return Auto(losses, model.layouts if flags.fields.scan_layers in (None, "auto") else ())


def _parsed(text: str) -> Policy:
    """The policy of a text.

    The error of another text names a plan, too.
    """
    try:
        return parse(text)
    except UnknownPolicyError as error:
        if forms()[0].pattern not in error.allowed.split(", "):
            raise
        near = did_you_mean(closest(text, ("auto",), alike=0.75))
        allowed = f"auto, plan:FILE, {error.allowed}"
        raise UnknownPolicyError(error.got, allowed=allowed, cause=error.cause, next_step=near or error.next_step) from None


def _xla_presets(flags: StepFlags) -> tuple[str, ...]:
    """The presets of --xla-preset, no two the same."""
    names = tuple(dict.fromkeys(flags.xla_preset)) or ("default",)
    for name in names:
        if name not in PRESETS:
            close = nearest(name, PRESETS) or "leave it out; other flags of XLA go into XLA_FLAGS"
            raise bad_value("--xla-preset", repr(name), ", ".join(PRESETS), close)
    target = flags.target or DEFAULT_DEVICELESS
    presets = ("default", *chip_of(target).options.presets)
    reject((not {*names} <= {*presets}, f"--xla-preset {' '.join(names)} is for other chips than --target {target}",
            f"leave --xla-preset out; this target has {', '.join(presets)}"))  # fmt: skip
    return names
