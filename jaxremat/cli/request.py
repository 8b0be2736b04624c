"""Parses and checks the flags of a command, and makes a request from them.

Checks that need JAX come later, in `flow.start`. An example:

    check_run(RunFlags(policy=("dots",), batch=(8, 16)))
    # Request(policies=(Asked("dots", Rule("dots")),), model=ModelConfig("gpt2", ...), batches=(8, 16), ...)
"""

import dataclasses
from dataclasses import dataclass
from typing import Generic, TypeVar

from jaxremat.cli.asked_model import AskedModel, asked_model
from jaxremat.cli.flags import RunFlags, StepFlags
from jaxremat.config import Layout, ModelConfig, TrainConfig, divisors
from jaxremat.errors import UsageError, nearest
from jaxremat.mesh.axes import MeshShape, parse_mesh
from jaxremat.mesh.sensible import sensible_meshes
from jaxremat.model.on_mesh import check_mesh
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import Every, Mix, OneIn, Policy
from jaxremat.search.batch import MAX_BATCH
from jaxremat.search.buckets import Bucketed
from jaxremat.trial.plan_file import PlanFile, load_plan
from jaxremat.units import gib
from jaxremat.workload.given import OWN_LOSS, GivenModel
from jaxremat.xla.gpu import load_gpu
from jaxremat.xla.options import PRESETS

#: The most steps that are measured.
MAX_STEPS = 10**6
#: What --mesh says to have the mesh chosen.
MESH_AUTO = "auto"


@dataclass(frozen=True)
class Auto:
    """Stands in a policy's place for `--policy auto`: the policy is to be planned, under one of `losses`.

    `layouts` are the ways to run the layers that are compared. Empty leaves them as they are.
    """

    losses: tuple[str, ...]
    layouts: tuple[Layout, ...] = ()


@dataclass(frozen=True)
class Frontier:
    """Stands in a policy's place for `--frontier`: the named policies, and plans between them, at one batch."""


@dataclass(frozen=True)
class Asked:
    """One policy of a request.

    Attributes:
        text: the policy as the user typed it.
        policy: the parsed policy.
        xla_preset: the preset of XLA's options that it is compiled with.
    """

    text: str
    policy: Policy | Auto | PlanFile | Frontier
    xla_preset: str = "default"


StepFlagsT = TypeVar("StepFlagsT", bound=StepFlags)


@dataclass(frozen=True)
class Request(Generic[StepFlagsT]):
    """What the flags ask for, parsed and checked.

    Attributes:
        policies: the policies, each with each preset of XLA's options. No two are the same.
        model: the preset or the model of --hf with the fields that the flags change, or what --model says of a workload of the
            user's own.
        train: the training step's settings.
        batches: the batches to compile. Empty if the largest batch is to be found.
        budget_bytes: the bytes that a step may use, if --budget was given.
        flags: the flags themselves.
        mesh: the devices, if several were asked for.
        model_line: the line of the heading that says where the model's sizes come from. Empty for presets.
        lengths: the lengths of --seq-len, if several were asked for, or of the buckets of --lengths. `train` then has the first
            of them.
        bucketed: the data set of --lengths in buckets.
        meshes: the meshes that `--mesh auto` compares. One device has only `ONE_DEVICE`. Empty if a mesh or none was given.
    """

    policies: tuple[Asked, ...]
    model: ModelConfig | GivenModel
    train: TrainConfig
    batches: tuple[int, ...]
    budget_bytes: int | None
    flags: StepFlagsT
    mesh: MeshShape | None = None
    model_line: str = ""
    lengths: tuple[int, ...] = ()
    bucketed: Bucketed | None = None
    meshes: tuple[MeshShape, ...] = ()

    def losses_of(self, policy: Policy | Auto | PlanFile | Frontier) -> tuple[str, ...]:
        """The losses that the steps of `policy` are compiled with."""
        if isinstance(policy, Auto):
            return policy.losses
        return (self.flags.training.loss or policy.loss if isinstance(policy, PlanFile) else self.train.loss,)

    def batches_of(self, plan: PlanFile) -> tuple[int, ...]:
        """The batches of --batch, or the plan's batch if none was given. The CPU's default batch of 1 doesn't count."""
        return self.batches if self.flags.batch else (plan.batch,)


def check_run(flags: RunFlags, asked: AskedModel | None = None) -> Request[RunFlags]:
    """The request that the flags of `jaxremat.run` ask for.

    Raises:
        UsageError: a value isn't valid, or two flags contradict each other.
    """
    if flags.max_batch is not None:
        _within("--max-batch", flags.max_batch, 0, MAX_BATCH)
    if flags.dump_target and flags.target == "cpu":
        raise UsageError(
            "--dump-target describes a GPU, and --target cpu was asked for",
            next_step="leave --target out to describe the attached GPU",
        )
    request = check_step(flags, asked)
    _check_auto(flags, request.policies)
    _check_meshes(flags, request.policies, request.batches)
    if not flags.frontier:
        return request
    train = request.train if flags.training.loss else dataclasses.replace(request.train, loss="chunked")
    frontiers = tuple(dataclasses.replace(asked, text="frontier", policy=Frontier()) for asked in request.policies)
    return dataclasses.replace(request, policies=frontiers, train=train)


def without_planning(flags: RunFlags) -> RunFlags:
    """The flags for a policy that isn't planned, without those that only --policy auto uses."""
    fields = flags.fields
    if fields.scan_layers == "auto":
        fields = dataclasses.replace(fields, scan_layers=None)
    return dataclasses.replace(flags, objective="time", offload=False, fields=fields)


def check_step(flags: StepFlagsT, asked: AskedModel | None = None) -> Request[StepFlagsT]:
    """The request that the flags shared by `run` and `explain` ask for.

    Raises:
        UsageError: a value isn't valid, or two flags contradict each other.
    """
    asked = asked or asked_model(flags)
    model, train = asked.model, asked.train
    _within("--mem-fraction", flags.mem_fraction, 0, 1)
    _within("--steps", flags.steps, 0, MAX_STEPS)
    _check_headroom(flags)
    if flags.target not in (None, "gpu", "cpu"):
        load_gpu(flags.target)
    batches, policies = flags.batch, _policies(flags, model)
    if flags.fields.scan_layers == "auto" and not any(isinstance(asked.policy, Auto) for asked in policies):
        texts = ", ".join(asked.text for asked in policies)
        raise UsageError(
            f"--scan-layers auto goes with --policy auto, and {texts} was asked for",
            cause="only a plan compares layers in a loop with unrolled layers",
            next_step="give --scan-layers True or False, or plan the layers: python -m jaxremat.run --policy auto",
        )
    _check_global_batch(flags, batches)
    if not batches:
        _check_planned_batches(flags, policies)
    mesh = _mesh(flags, model, planned=any(isinstance(asked.policy, Auto) for asked in policies))
    return Request(
        policies, model, train, batches, flags.budget, flags, mesh, asked.line, meshes=_meshes(flags, model, mesh)
    )


def _mesh(flags: StepFlags, model: ModelConfig | GivenModel, *, planned: bool) -> MeshShape | None:
    """The mesh of --mesh, --devices and --nodes."""
    if flags.mesh == MESH_AUTO:
        return parse_mesh(None, flags.devices, flags.nodes)
    mesh = parse_mesh(flags.mesh, flags.devices, flags.nodes)
    if mesh is None:
        return None
    if flags.global_batch is not None and flags.global_batch % mesh.num_members:
        raise UsageError(
            f"--global-batch {flags.global_batch} over {mesh.num_members} members of the mesh {mesh}",
            allowed="a global batch that all members share evenly",
            next_step=f"--global-batch {mesh.num_members * max(1, flags.global_batch // mesh.num_members)}",
        )
    if isinstance(model, ModelConfig):
        check_mesh(model, mesh, planned=planned)
    return mesh


def _meshes(flags: StepFlags, model: ModelConfig | GivenModel, devices: MeshShape | None) -> tuple[MeshShape, ...]:
    """The meshes that `--mesh auto` compares, of as many devices as `devices` has."""
    if flags.mesh != MESH_AUTO:
        return ()
    if devices is None:
        raise UsageError(
            "--mesh auto compares meshes of so many devices, and --devices is missing", next_step="--mesh auto --devices 8"
        )
    is_decoder = isinstance(model, ModelConfig)
    experts = model.num_experts if is_decoder else 1
    return sensible_meshes(devices.num_devices, devices.nodes, num_experts=experts, has_tensor=is_decoder)


def _check_meshes(flags: RunFlags, policies: tuple[Asked, ...], batches: tuple[int, ...]) -> None:
    """Raises UsageError if `--mesh auto` was given with something that it can't compare."""
    if flags.mesh != MESH_AUTO:
        return
    one_mesh = next((asked.text for asked in policies if isinstance(asked.policy, PlanFile)), "")
    other = {
        f"--target {flags.target}": ("its times are predicted ones", flags.target in ("gpu", "cpu")),
        "--frontier": ("a frontier is that of one mesh", flags.frontier),
        "--dump-target": ("a target's description has no mesh", flags.dump_target is not None),
        f"--list {flags.list}": ("a list is about one mesh", flags.list in ("names", "shardings")),
        "--offload": ("it compares meshes by plans that offload nothing", flags.offload),
        f"--objective {flags.objective}": ("it compares meshes by their speed", flags.objective != "time"),
        f"--batch {','.join(map(str, batches))}": ("it compares meshes at one batch each", len(batches) > 1),
        f"--policy {one_mesh}": ("a plan was proven on one mesh", bool(one_mesh)),
    }
    for given, (cause, is_given) in other.items():
        if is_given:
            raise UsageError(
                f"--mesh auto and {given} were both given",
                cause=cause,
                next_step=f"leave {given} out, or name the mesh: --mesh fsdp={flags.devices or 8}",
            )


def _check_headroom(flags: StepFlags) -> None:
    if flags.headroom is None:
        return
    if not 0 <= flags.headroom < 1:
        raise UsageError(
            f"--headroom got {flags.headroom:g}",
            allowed="a share from 0 to below 1",
            next_step="0.02 leaves 2 % of the limit free",
        )
    if flags.budget is not None:
        raise UsageError(
            f"--headroom {flags.headroom:g} and --budget {gib(flags.budget)} were both given",
            cause="a headroom is left of the allocator's limit, and a budget is as it was asked for",
            next_step="leave one of them out",
        )


def _check_auto(flags: RunFlags, policies: tuple[Asked, ...]) -> None:
    if flags.frontier:
        _check_frontier(flags)
    planned = any(isinstance(asked.policy, Auto) for asked in policies)
    if (given := _given_for_auto(flags)) and not planned:
        texts = ", ".join(asked.text for asked in policies)
        raise UsageError(f"{given[0]} goes with --policy auto, and {texts} was asked for", next_step="add --policy auto")
    if flags.plot and not flags.frontier:
        raise UsageError("--plot draws the frontier", next_step="add --frontier")
    if planned and flags.objective == "memory" and not flags.batch:
        raise UsageError("--objective memory needs a --batch", next_step="--objective memory --batch 8, or another batch")
    if planned and flags.objective == "batch" and flags.batch:
        raise UsageError(
            "--objective batch looks for the batch, and --batch was given",
            next_step="leave one of them out; --max-batch N bounds what is looked for",
        )
    if flags.save_plan and len(flags.batch) > 1:
        raise UsageError(
            f"--save-plan writes one plan, and --batch asks for {len(flags.batch)}",
            next_step="give one --batch, or none to have it chosen",
        )
    if (flags.save_plan or flags.plot) and len(_xla_presets(flags)) > 1:
        flag, what = ("--save-plan", "writes one plan") if flags.save_plan else ("--plot", "draws one frontier")
        raise UsageError(
            f"{flag} {what}, and --xla-preset asks for {len(_xla_presets(flags))}", next_step="give one --xla-preset"
        )


def _check_frontier(flags: RunFlags) -> None:
    if len(flags.batch) != 1 or flags.global_batch is not None:
        raise UsageError("--frontier compares policies at one --batch", next_step="--frontier --batch 32, or another batch")
    if given := [*(["--policy"] if flags.policy else []), *_given_for_auto(flags)]:
        raise UsageError(
            f"--frontier compares the named policies with plans of its own, and {given[0]} was given",
            next_step=f"leave {given[0]} out, or --frontier",
        )


def _given_for_auto(flags: RunFlags) -> list[str]:
    """The flags that were given and that only --policy auto uses."""
    only_auto = {
        "--objective": flags.objective != "time",
        "--explain-plan": flags.explain_plan,
        "--save-plan": flags.save_plan,
        "--offload": flags.offload,
    }
    return [flag for flag, is_given in only_auto.items() if is_given]


def _check_global_batch(flags: StepFlags, batches: tuple[int, ...]) -> None:
    if flags.global_batch is None:
        return
    _within("--global-batch", flags.global_batch, 0, MAX_BATCH)
    if flags.training.accumulate is not None:
        raise UsageError(
            f"--global-batch {flags.global_batch} and --accumulate {flags.training.accumulate} were both given",
            cause="the number of microbatches follows from the global batch and the batch that fits",
            next_step="leave one of them out",
        )
    if uneven := [batch for batch in batches if flags.global_batch % batch]:
        raise UsageError(
            f"--batch {uneven[0]} does not divide --global-batch {flags.global_batch}",
            allowed=", ".join(str(n) for n in divisors(flags.global_batch)),
            next_step="leave --batch out to find the largest microbatch that fits",
        )


def _check_planned_batches(flags: StepFlags, policies: tuple[Asked, ...]) -> None:
    for policy in (asked.policy for asked in policies):
        if isinstance(policy, PlanFile) and flags.global_batch is not None and flags.global_batch % policy.batch:
            raise UsageError(
                f"{policy} has batch {policy.batch}, which does not divide --global-batch {flags.global_batch}",
                allowed=", ".join(str(n) for n in divisors(flags.global_batch)),
                next_step="give one of these as --batch, or another --global-batch",
            )


def _within(flag: str, value: float, above: float, upto: float | None = None) -> None:
    if not (value > above and (upto is None or value <= upto)):
        allowed = f"above {above}" + (f" and up to {upto}" if upto is not None else "")
        raise UsageError(f"{flag} got {value:g}", allowed=f"a number {allowed}", next_step="leave it out for the default")


def _policy(text: str, flags: StepFlags, model: ModelConfig | GivenModel) -> Policy | Auto | PlanFile:
    if text == "auto":
        losses = (OWN_LOSS,) if isinstance(model, GivenModel) else ("full", "chunked")
        return Auto((flags.training.loss,) if flags.training.loss else losses, _layouts(flags, model))
    return load_plan(text.removeprefix("plan:")) if text.startswith("plan:") else parse(text)


def _layouts(flags: StepFlags, model: ModelConfig | GivenModel) -> tuple[Layout, ...]:
    """The layouts that --policy auto compares. A workload of the user's own runs its layers as its author wrote them."""
    if isinstance(model, GivenModel) or model.num_layers == 1 or flags.fields.scan_layers not in (None, "auto"):
        return ()
    return ("loop", "unrolled")


def _policies(flags: StepFlags, model: ModelConfig | GivenModel) -> tuple[Asked, ...]:
    parsed: dict[str, Asked] = {}
    for text in flags.policy or ("dots",):
        policy = _policy(text, flags, model)
        if isinstance(policy, Every | OneIn | Mix) and isinstance(model, ModelConfig):
            policy.size(model.num_layers)
        if flags.xla_remat and isinstance(policy, Auto):
            raise UsageError(
                "--xla-remat and --policy auto were given",
                cause="a plan predicts the bytes of steps, and XLA's pass changes them",
                next_step="name policies, such as --policy none --xla-remat",
            )
        parsed.setdefault(str(policy), Asked(text, policy))
    presets = _xla_presets(flags)
    return tuple(dataclasses.replace(asked, xla_preset=name) for asked in parsed.values() for name in presets)


def _xla_presets(flags: StepFlags) -> tuple[str, ...]:
    """The presets of --xla-preset, no two the same."""
    names = tuple(dict.fromkeys(flags.xla_preset)) or ("default",)
    if unknown := [name for name in names if name not in PRESETS]:
        raise UsageError(
            f"--xla-preset got {unknown[0]!r}",
            allowed=", ".join(PRESETS),
            next_step=nearest(unknown[0], PRESETS) or "leave it out; other flags of XLA go into XLA_FLAGS",
        )
    if flags.target == "cpu" and names != ("default",):
        raise UsageError(
            f"--xla-preset {' '.join(names)} sets flags of XLA for GPUs, and --target cpu was asked for",
            next_step="leave --xla-preset out, or give a GPU: --target h100-80gb",
        )
    return names
