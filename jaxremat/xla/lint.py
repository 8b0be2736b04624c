"""Finds likely mistakes in a compiled step with a table of rules.

Each finding has evidence in numbers and one remedy. For example, the policy `save:mlp_ot` of a model that writes the
checkpoint name `mlp_out` gives a finding of the rule `unmatched-name`, with the remedy `'mlp_out' instead of 'mlp_ot'`.

The rules read three things: the traced program (what the user requested), the optimized HLO (what XLA made of the program),
and the memory map, if the dump was read. A rule that lacks its input finds nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxremat.chips.target import Target, in_pool, load_target
from jaxremat.config import TrainConfig
from jaxremat.errors import UsageError
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.spec import NONE, Policy
from jaxremat.step.step import abstract_args, arguments_on_mesh, donated, make_step, step_shardings
from jaxremat.workload.workload import Workload
from jaxremat.xla.buffers import Category
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.exchanges import exchanges
from jaxremat.xla.lint_input import LintInput, Remedies, Rule, lint_input
from jaxremat.xla.lint_memory import MEMORY_RULES
from jaxremat.xla.lint_mesh import MESH_RULES
from jaxremat.xla.lint_program import PROGRAM_RULES
from jaxremat.xla.step_facts import Finding

#: The rules for any step by name, in the order in which they run. For a step on several devices, `MESH_RULES` come after them.
RULES: dict[str, Rule] = PROGRAM_RULES | MEMORY_RULES


def find(facts: LintInput) -> tuple[Finding, ...]:
    """The findings of all rules, sorted by bytes from large to small."""
    rules = [*RULES.values(), *(MESH_RULES.values() if facts.mesh.num_devices > 1 else ())]
    found = [finding for rule in rules for finding in rule(facts)]
    return tuple(sorted(found, key=lambda finding: -finding.num_bytes))


def lint(
    function: Callable[..., Any] | Workload,
    args: tuple[Any, ...] | None = None,
    target: Target | str | None = None,
    *,
    donate_argnums: int | tuple[int, ...] = (),
    policy: Policy | str | None = None,
    roles: Mapping[str, Category] | None = None,
    xla_remat: bool = False,
) -> tuple[Finding, ...]:
    """Finds likely mistakes in the memory use of a train step, compiled for `target`.

    Nothing is run. The step is `function(*args)`, or that of a `jaxremat.Workload`:

        jaxremat.lint(step, (state, batch), "h100-80gb", donate_argnums=0)
        jaxremat.lint(workload, target="h100-80gb", policy="dots")

    The rules find checkpoint names that match nothing, recompute that XLA merged away, attention or matmuls that run twice,
    saved dropout masks, parameters that aren't donated, and more. `jaxremat.xla.lint.RULES` lists all rules. Each finding
    has its evidence and a remedy.

    Args:
        function: a train step, or a `Workload`. A jitted function has its own donation. The loss of a workload gets a
            train step with AdamW or the workload's own optimizer.
        args: the arguments of a function, or a `jax.ShapeDtypeStruct` for each array. A workload has its own.
        target: as for `lower_and_compile`.
        donate_argnums: indices of a function's arguments whose memory the outputs may reuse.
        policy: a policy of the grammar. The loss of a workload is compiled under it, as `jaxremat.with_policy` does. Without it
            the loss is compiled as it is written, with the checkpoints of its author. A whole step is always compiled as it
            is, and `policy` says what its layers are meant to follow. The policies of `jax.checkpoint` in the program are
            read in any case.
        roles: categories of arguments whose path doesn't show the category. A key is the beginning of a path:
            `{"w": "parameters"}`.
        xla_remat: whether XLA's own rematerialization pass may run, as it does by XLA's default.

    Raises:
        CompileError: XLA rejected the program, or wrote no files about its buffers.
        MissingDependencyError: a library of the chip's maker couldn't be loaded.
        UnknownNameError: no value of a workload's layers carries a name in `policy`.
        UnknownPolicyError: `policy` doesn't parse.
        UsageError: a function without `args`, or a workload with them; or no layers were found for `policy`.
    """
    requested = None if policy is None else as_policy(policy)
    remedies: Remedies = "code"
    on = target if isinstance(target, Target) else load_target(target)
    on = in_pool(on) if xla_remat else on
    known: dict[str, Any] = {"fused_attention": fused_attention_of(on), "speed": on.speed}
    shardings = None
    if isinstance(function, Workload):
        if args is not None or donate_argnums != ():
            raise UsageError(
                f"lint got a Workload and {'args' if args is not None else 'donate_argnums'}",
                cause="a workload has its own",
                next_step="jaxremat.lint(workload, target='h100-80gb')",
            )
        remedies = "code" if function.loss is None else "with_policy"
        workload, train = _under_policy(function, requested), TrainConfig()
        if on.mesh is not None:
            shardings, known["arguments"] = (
                step_shardings(on.mesh, workload, train),
                arguments_on_mesh(on.mesh, workload, train),
            )
        function = make_step(workload, train, NONE if workload.loss is None or requested is None else requested)
        args, donate_argnums = abstract_args(workload, train), donated(workload)
    if args is None:
        raise UsageError(
            "lint got a function and no args", allowed="a tuple of its arguments", next_step="lint(step, (state, batch))"
        )
    done = lower_and_compile(
        function, args, on, donate_argnums=donate_argnums, xla_remat=xla_remat, keep_dump=True, shardings=shardings
    )
    assert done.dump is not None  # keep_dump=True reads the dump
    memory_map = done.map_with(done.dump, roles)
    known["exchanges"] = exchanges(done.module, done.mesh, roles)
    return find(lint_input(done, policy=requested, memory_map=memory_map, remedies=remedies, **known))


def fused_attention_of(target: Target) -> str:
    """What `jax.nn.dot_product_attention` calls the fused attention of a target.

    Empty if it has none.
    """
    takes_it = target.chip.is_gpu and not target.chip.attention_obstacle(target.compute_capability)
    return target.chip.attention.name if takes_it else ""


def _under_policy(workload: Workload, policy: Policy | None) -> Workload:
    """The workload. Without a policy, its loss is as its author wrote it."""
    loss = workload.loss
    return replace(workload, loss_under=lambda _: loss) if loss is not None and policy is None else workload
