"""What XLA's compiler of TPUs says of training steps, without a TPU: `python -m experiments.tpu`.

There are six parts:

* boundaries: the largest batch of small steps, compiled, and the next one, rejected. Beside the total of the former is what the
  compiler says of the same step under a limit just below it.
* early: what the compiler says early of small steps on four chips, under a limit of their state, beside the total of the whole
  compile. The steps are drawn.
* recipes: published steps at their batch, and at half as many sequences more.
* large: llama3.1-70b on 64 chips of v6e, under full remat and with the recipe's offloading.
* policies: the largest batch of llama3.1-8b on 8 chips of v6e under five policies.
* plans: what `--policy auto` chooses for two models on three generations, and what that took.

Each case is compiled in a process of its own, which ends at a limit. A case that is filed isn't compiled again without `--fresh`,
unless it failed. Results of earlier compiles that jaxremat has stored aren't used.
"""

import dataclasses
import json
import math
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from cyclopts import Parameter

from experiments.children import Child, Row, run_child
from experiments.common import RESULTS, flags_of, machine, other_parts, run_parts, set_up, show_by
from jaxremat.cli.command import run_command
from jaxremat.report.table import gib_number
from jaxremat.system.process import Deadline

_PROGRAM = "experiments.tpu"
Part = Literal["boundaries", "early", "recipes", "large", "policies", "plans"]


@dataclass(frozen=True)
class Flags:
    """What XLA's compiler of TPUs says of training steps: what fits, and what it says early."""

    target: ClassVar[str] = "tpu"  # the folder of the results
    fresh: bool = False
    """Compile what is filed again."""
    seed: int = 0
    """Of the steps that `early` draws."""
    count: int = 40
    """How many steps it draws."""
    minutes: float = 25
    """No case of a part begins later."""
    limit: float = 3600
    """Seconds after which a case's process is ended."""
    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = get_args(Part)
    out: Path = RESULTS
    case: Annotated[str, Parameter(show=False)] = ""
    """A case as JSON. It is compiled in this process, which prints a line of JSON for each answer."""


@dataclass(frozen=True)
class Case:
    """A step, or the search for one.

    Attributes:
        name: the name of its row.
        target: the TPU.
        model: the preset.
        policy: the policy. `auto` to plan.
        mesh: the mesh, if there is one.
        batches: the batches. Empty where the largest is searched, or planned.
        options: other flags of the model and the training, as `jaxremat.Session` has them.
    """

    name: str
    target: str
    model: str
    policy: str
    mesh: str | None = None
    batches: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def as_row(self) -> Row:
        """Its fields, as a file has them."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


_LAYERS = "experiments.tpu_step:layers"


def small(
    name: str,
    target: str,
    policy: str,
    mesh: str | None = None,
    batches: tuple[int, ...] = (),
    budget: str | None = None,
    **sizes: Any,
) -> Case:
    """A step of the layers of `experiments.tpu_step`. The smaller their sizes are, the sooner they compile."""
    arguments = [f"{size}={value}" for size, value in sizes.items()]
    options: dict[str, Any] = {"model_arg": arguments, "optimizer": "sgd-momentum"} | ({"budget": budget} if budget else {})
    return Case(name, target, _LAYERS, policy, mesh, batches, options)


#: Sizes whose programs compile in seconds, and a limit that is as low.
_SIZES: dict[str, Any] = {"num_layers": 2, "length": 256, "width": 128}
_LIMIT = "1GiB"
#: Steps with and without offloading, in a scan and unrolled, with each attention. The first two are at the device's own limit.
BOUNDARIES = (
    small("offloading, all memory", "v5e", "offload:mlpwi", width=512, attention="none"),
    small("a scan, all memory", "v5p", "none", width=512, attention="none"),
    small("offloading", "v6e", "offload:mlpwi", budget=_LIMIT, attention="splash", **_SIZES),
    small("unrolled", "v6e", "none", budget=_LIMIT, attention="xla", is_unrolled=True, **_SIZES),
    small("on a mesh, offloading", "v6e", "offload:mlpwi", "fsdp=4", budget=_LIMIT, attention="splash", **_SIZES),
    small("XLA's attention", "v5e", "dots", budget=_LIMIT, attention="xla", **_SIZES),
    small("splash attention", "v5p", "nothing+attention", budget=_LIMIT, attention="splash", **_SIZES),
    small("full remat", "v4", "nothing", budget=_LIMIT, attention="none", **_SIZES),
    small("unrolled, offloading", "v5e", "offload:mlpwi", budget=_LIMIT, attention="none", is_unrolled=True, **_SIZES),
)


def early_cases(seed: int, count: int) -> list[Case]:
    """The steps that `early` draws: of each kind of choice, all values are equally likely."""
    chance = random.Random(seed)

    def drawn(name: str) -> Case:
        return small(
            name,
            chance.choice(("v4", "v5e", "v5p", "v6e")),
            chance.choice(("nothing", "none", "dots", "save:mlpwi", "offload:mlpwi")),
            chance.choice(("fsdp=4", "data=2,fsdp=2", "data=4")),
            batches=(chance.choice((256, 1024, 4096)),),
            attention=chance.choice(("none", "splash", "xla")),
            is_unrolled=chance.choice((True, False)),
            num_layers=chance.choice((2, 4)),
            width=chance.choice((128, 256)),
            length=chance.choice((128, 256)),
        )

    return [drawn(str(number)) for number in range(count)]


_PROJECTIONS = "decoder_layer_input,query_proj,key_proj,value_proj"
#: MaxText's default model at `global_parameter_scale=32`, by its pyconfig.
_MAXTEXT_32B = {"num_layers": 32, "embed_dim": 8192, "num_heads": 64, "num_kv_heads": 64, "head_dim": 128, "mlp_dim": 28672}


def recipe(name: str, target: str, mesh: str, model: str, seq_len: int, batch: int, policy: str, **more: Any) -> Case:
    """A published step, at its batch and at half as many sequences more."""
    options = {"seq_len": seq_len, "scan_layers": True, **more}
    return Case(name, target, model, policy, mesh, (batch, math.ceil(1.5 * batch)), options)


#: Published steps: AI-Hypercomputer/tpu-recipes, training/trillium, and AI-Hypercomputer/maxtext, configs/tpu/v5p. Their batches
#: are those of one device of `data` and `fsdp`.
RECIPES = (
    recipe("v6e-8b-8", "v6e", "fsdp=8", "llama3.1-8b", 8192, 3, f"offload:{_PROJECTIONS},out_proj"),
    recipe("v6e-70b-64", "v6e", "fsdp=64", "llama3-70b", 8192, 2, f"offload:{_PROJECTIONS}"),
    recipe("v6e-gpt3-256", "v6e", "fsdp=256", "gpt3-175b", 2048, 3, "nothing"),
    recipe("v6e-8b-256", "v6e", "fsdp=256", "llama3.1-8b", 8192, 4, f"offload:{_PROJECTIONS},out_proj"),
    recipe("v6e-l2-70b-256", "v6e", "fsdp=256", "llama2-70b", 4096, 3, "offload:query_proj,key_proj,value_proj"),
    recipe("v6e-405b-512", "v6e", "fsdp=512", "llama3.1-405b", 8192, 1, "offload:decoder_layer_input", nodes=2),
    recipe("v5p-32b-64", "v5p", "fsdp=16,tensor=4", "llama2-7b", 2048, 24, "minimal", **_MAXTEXT_32B),
    recipe("v6e-8b-16", "v6e", "fsdp=16", "llama3.1-8b", 8192, 3, f"offload:{_PROJECTIONS},out_proj"),
    recipe("v6e-8b-32", "v6e", "fsdp=32", "llama3.1-8b", 8192, 3, f"offload:{_PROJECTIONS},out_proj"),
    recipe("v6e-70b-128", "v6e", "fsdp=128", "llama3-70b", 8192, 4, f"offload:{_PROJECTIONS}"),
)
_70B: dict[str, Any] = {"seq_len": 8192, "scan_layers": True}
LARGE = (
    Case("full remat", "v6e", "llama3-70b", "nothing", "fsdp=64", (2,), _70B),
    Case("offloading", "v6e", "llama3-70b", f"offload:{_PROJECTIONS}", "fsdp=64", (2,), _70B),
)
POLICIES = tuple(
    Case(policy, "v6e", "llama3.1-8b", policy, "fsdp=8", options={"seq_len": 8192})
    for policy in (
        "nothing",
        f"offload:{_PROJECTIONS},out_proj",
        "nothing+attention",
        "save:query_proj,key_proj,value_proj",
        "dots",
    )
)
PLANS = tuple(
    Case(f"{model}, {target}", target, model, "auto", mesh, options={"seq_len": seq_len})
    for model, seq_len, meshes in (
        ("llama3.1-8b", 8192, {"v6e": "fsdp=8", "v5p": "fsdp=8", "v5e": "fsdp=16"}),
        ("llama3.2-1b", 4096, {"v6e": "fsdp=4", "v5p": "fsdp=4", "v5e": "fsdp=4"}),
    )
    for target, mesh in meshes.items()
)


# In the process of a case.


def compiled(case: Case, say: Callable[[Row], None]) -> None:
    """Says what the compiler says of a case: of each batch early, then at the device's limit, the largest batch first.

    Where the largest batch is searched, each batch that is tried is said. Of the layers of `experiments.tpu_step` it is also said
    what the compiler says of the largest one under a limit below its total.
    """
    from jaxremat.answer.records import answer_largest
    from jaxremat.policy.grammar import parse
    from jaxremat.search.compiles import Compiles
    from jaxremat.session.session import Session
    from jaxremat.trial.record import LargestBatchRecord, Record, TrialRecord

    session = Session(case.model, target=case.target, mesh=case.mesh, **case.options)
    trials = session.trials
    if case.policy == "auto":
        say({"record": "step", "num_params": trials.workload_at().num_params, "budget_bytes": trials.budget_bytes})
        plan = session.plan().plan
        assert plan, "a plan fits"
        names = ("policy", "loss", "batch", "total_bytes", "step_s", "num_compiles")
        tried = [dataclasses.asdict(step) for step in plan.tried]
        say({"record": "plan", "tried": tried} | {name: getattr(plan, name) for name in names})
        return
    policy = trials.factory.checked(parse(case.policy), trials.train, trials.target.mesh)
    say({"record": "step", "num_params": trials.workload_at().num_params, "budget_bytes": trials.budget_bytes})
    for batch in case.batches:
        started = time.perf_counter()
        early_bytes = trials.early_bytes(policy, batch)
        say({"record": "early", "batch": batch, "early_bytes": early_bytes, "early_s": time.perf_counter() - started})

    def emit(row: Record) -> None:
        if isinstance(row, TrialRecord) and row.error:
            raise RuntimeError(row.error)
        if isinstance(row, TrialRecord) and row.record == "probe":
            names = ("batch", "fits", "total_bytes", "peak_bytes", "compile_s")
            say({"record": "whole", "host_bytes": row.host_temp_bytes} | {name: getattr(row, name) for name in names})
        elif isinstance(row, LargestBatchRecord):
            say({"record": "search", "batch": row.largest_batch, "num_compiles": row.num_compiles})
            if case.model == _LAYERS and row.largest_batch_total_bytes:
                limit_bytes = (row.largest_batch_total_bytes - 1) // 2**20 * 2**20
                below = trials.compile_anew(policy, row.largest_batch, limit_bytes=limit_bytes)
                said = {"bytes": below.memory.total_bytes, "fits": not below.is_too_large}
                say({"record": "below", "limit_bytes": limit_bytes, **said})

    for batch in reversed(case.batches):
        emit(trials.record(policy, batch, "probe"))
    if not case.batches:
        list(answer_largest(trials, policy, case.policy, None, emit, Compiles()))


def work(text: str) -> int:
    """Compiles a case, and prints a line for each answer."""
    set_up()
    case = json.loads(text)
    compiled(Case(**case | {"batches": tuple(case["batches"])}), lambda row: print(json.dumps(row), flush=True))
    return 0


# In the process that files.


def child_of(case: Case, flags: Flags) -> tuple[Child, Row]:
    """What the process of a case printed, and the beginning of its row, with the seconds that the process took."""
    with tempfile.TemporaryDirectory() as cache:
        started, used_s = time.perf_counter(), _processor_s()
        environment = {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": cache}
        child = run_child(_PROGRAM, ["--case", json.dumps(case.as_row())], Deadline(flags.limit), environment)
        took = {"wall_s": time.perf_counter() - started, "processor_s": _processor_s() - used_s}
        row = case.as_row() | took | {"cpu": machine()["cpu"]}
    if step := child.find("step"):
        row |= {"num_params": step["num_params"], "budget_bytes": step["budget_bytes"]}
    return child, row | ({"error": child.error} if child.error else {})


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def of_boundary(child: Child) -> Row:
    """The largest batch with its total, the next one with what the compiler says of it, and what it says below that total."""
    row: Row = {}
    if search := child.find("search"):
        row["num_compiles"] = search["num_compiles"]
    if below := child.find("below"):
        row |= {"below_limit_bytes": below["limit_bytes"], "below_bytes": below["bytes"], "below_fits": below["fits"]}
    if fits := child.find("whole", fits=True):
        row |= {name: fits[name] for name in ("batch", "total_bytes", "peak_bytes", "host_bytes", "compile_s")}
    if rejected := child.find("whole", fits=False):
        row |= {"next_bytes": rejected["total_bytes"], "rejected_s": rejected["compile_s"]}
    return row


def of_step(child: Child) -> Row:
    """What the compiler says of a step early, and whole."""
    early = child.find("early")
    if early is None:
        return {}
    row: Row = {name: early[name] for name in ("batch", "early_bytes", "early_s")}
    if whole := child.find("whole", batch=early["batch"]):
        names = ("fits", "total_bytes", "peak_bytes", "host_bytes", "compile_s")
        row |= {name: whole[name] for name in names if name in whole}
        row["early_off"] = early["early_bytes"] / whole["total_bytes"] - 1
    return row


def of_recipe(child: Child) -> Row:
    """What the compiler says of a recipe at its batch, and at half as many sequences more."""
    row: Row = {}
    said_early = [one for one in child.rows if one["record"] == "early"]
    for early, prefix in zip(said_early, ("", "more_"), strict=False):
        whole = child.find("whole", batch=early["batch"]) or {}
        found = {"batch": early["batch"], "early_bytes": early["early_bytes"], **whole}
        names = ("batch", "early_bytes", "fits", "total_bytes", "host_bytes", "compile_s")
        row |= {prefix + name: found.get(name) for name in names}
    return row


def of_plan(child: Child) -> Row:
    """The plan, the steps that were compiled for it, and the fastest of them under `nothing` that fits."""
    row: Row = dict(child.find("plan") or {})
    if row:
        budget_bytes = (child.find("step") or {})["budget_bytes"]
        fits = [step for step in row["tried"] if step["policy"] == "nothing" and step["total_bytes"] <= budget_bytes]
        row["nothing"] = min(fits, key=lambda step: step["step_s"] / step["batch"], default=None)
        row["ms_per_sequence"] = 1e3 * row["step_s"] / row["batch"]
    return row


def is_of(row: Row, case: Case) -> bool:
    """Whether a row is of this case. A plan's row has the plan as its policy."""
    wanted = case.as_row() | ({"policy": row["policy"]} if case.policy == "auto" else {})
    return row | wanted == row


def measured(
    part: Part, cases: Callable[[Flags], Sequence[Case]], read: Callable[[Child], Row]
) -> Callable[[Flags], Iterator[Row]]:
    """The function that measures a part: the rows that are filed without an error, then one for each other case.

    A case that isn't reached has the row of an earlier try.
    """

    def rows(flags: Flags) -> Iterator[Row]:
        wanted, started = cases(flags), time.perf_counter()
        filed = [] if flags.fresh else other_parts(flags.out / flags.target / "tpu.json", [part]).get(part, [])
        known = {case.name: row for case in wanted for row in filed if is_of(row, case)}
        yield from (row for row in known.values() if "error" not in row)
        for case in wanted:
            if case.name in known and "error" not in known[case.name]:
                continue
            if time.perf_counter() - started < 60 * flags.minutes:
                child, row = child_of(case, flags)
                print(f"{part}: {case.name}: {row.get('error') or 'done'}, {row['wall_s']:.0f} s", file=sys.stderr)
                yield row | read(child)
            elif case.name in known:
                yield known[case.name]

    return rows


_STEP = ("batch", "total_bytes", "host_bytes")
MEASURES: dict[Part, tuple[Callable[[Flags], Iterator[Row]], int, tuple[str, ...]]] = {
    "boundaries": (
        measured("boundaries", lambda flags: BOUNDARIES, of_boundary),
        1,
        ("name", *_STEP, "next_bytes", "below_limit_bytes", "below_bytes", "compile_s", "error"),
    ),
    "early": (
        measured("early", lambda flags: early_cases(flags.seed, flags.count), of_step),
        5,
        ("model", "target", "mesh", "policy", *_STEP, "early_bytes", "early_off", "early_s", "compile_s", "error"),
    ),
    "recipes": (
        measured("recipes", lambda flags: RECIPES, of_recipe),
        1,
        ("name", *_STEP, "early_bytes", "more_batch", "more_total_bytes", "more_early_bytes", "compile_s", "error"),
    ),
    "large": (
        measured("large", lambda flags: LARGE, of_step),
        1,
        ("name", *_STEP, "early_bytes", "early_s", "compile_s", "error"),
    ),
    "policies": (
        measured("policies", lambda flags: POLICIES, of_boundary),
        1,
        ("name", *_STEP, "next_bytes", "num_compiles", "compile_s", "wall_s", "processor_s", "error"),
    ),
    "plans": (
        measured("plans", lambda flags: PLANS, of_plan),
        1,
        ("name", "policy", "batch", "total_bytes", "ms_per_sequence", "num_compiles", "wall_s", "processor_s", "error"),
    ),
}
SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "host_bytes": ("host", gib_number),
    "next_bytes": ("next", gib_number),
    "below_limit_bytes": ("limit", gib_number),
    "below_bytes": ("said under it", gib_number),
    "early_bytes": ("early", gib_number),
    "early_off": ("early off", "{:+.1%}".format),
    "more_batch": ("more", str),
    "more_total_bytes": ("GiB", gib_number),
    "more_early_bytes": ("early", gib_number),
    "early_s": ("early s", "{:.1f}".format),
    "ms_per_sequence": ("ms a sequence", "{:.1f}".format),
    "compile_s": ("compile s", "{:.0f}".format),
    "wall_s": ("s", "{:.0f}".format),
    "processor_s": ("of processors", "{:.0f}".format),
}


def main(argv: list[str] | None = None) -> int:
    """Compiles, prints and writes, and returns the exit code."""
    flags = flags_of(Flags, argv, _PROGRAM)
    if flags.case:
        return work(flags.case)

    def parts() -> int:
        return run_parts("tpu", flags, MEASURES, show_by(SHOWN))

    return run_command(parts, name=_PROGRAM, saved=f"the rows so far are in {flags.out}")


if __name__ == "__main__":
    sys.exit(main())
