"""Decides a buffer's category, with an ordered table of rules over the facts about it.

The first rule that applies gives the category. For example, a buffer that has the argument `state.opt_state[0].mu['w']` is
`optimizer state`. A buffer that the forward pass writes and the backward pass reads is `residuals`, unless an earlier rule
applies.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxremat.xla.buffers import Category, Phase

#: What a buffer is for a collective. gathered: a parameter that was gathered from other devices. to add up: a gradient that is to
#: be added up over devices. added up: such a gradient afterwards. exchanged: the result of any other collective.
CollectiveUse = Literal["gathered", "to add up", "added up", "exchanged"]

#: By the beginning of an argument's path, its category.
Roles = Mapping[str, Category]
#: Patterns in the paths of arguments, such as `state.params['w']`, `state.opt_state[0].mu['w']`, `variables['params']['w']`.
_ROLES: tuple[tuple[str, Category], ...] = (
    (r"^(batch|inputs?|data)(\W|$)", "inputs"),
    (r"(^|\W)(opt|optimizer)(_?state)?(\W|$)|(^|\W)(mu|nu|momentum|trace)(\W|$)|^state\.step$", "optimizer state"),
    (r"^(model|net|network)\.", "parameters"),
    (r"(^|\W)(params?|weights?|kernels?|variables|batch_stats)(\W|$)", "parameters"),
)
#: The categories of parameters. Those that are frozen are told by the workload, and not by their paths.
PARAMETERS: tuple[Category, ...] = ("parameters", "frozen parameters")
_LOSS = re.compile(r"logit|cross_entropy|xent|log_softmax|logsumexp|unembed|lm_head", re.IGNORECASE)

#: `rematted_computation`, or a `jvp(` in a part of the scope after one with `transpose(`. A checkpoint in unrolled code has such
#: a `jvp(` too. Inside it `rematted_computation` alone tells.
_AGAIN = re.compile(r"rematted_computation|transpose\(.*/(?:(?!transpose\()\w+\()*jvp\((?!.*/checkpoint(?:/|$))")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The known facts about a buffer.

    Attributes:
        role: category of the argument that the buffer has; None if it has no argument.
        is_output: whether the buffer is a result of the program.
        op_name: JAX scope of the operation that makes the value.
        functions: names of the Python functions on the stack of that operation.
        is_scratch: whether the buffer is untyped bytes that a library's custom call requested.
        num_layers: number of layers whose values are stacked in the buffer.
        made: phase in which the value is made, by the operation's position.
        last_read: phase of the last operation that reads the buffer, by its position. It is `update` for a buffer that sums
            gradients by a loop.
        like_parameter: whether the buffer has as many elements as one of the parameters.
        is_vocabulary_wide: whether the last dimension is that of the logits.
        exchanged: what the buffer is for a collective; None if none writes it or reads a gradient from it.
    """

    role: Category | None = None
    is_output: bool = False
    op_name: str = ""
    functions: tuple[str, ...] = ()
    is_scratch: bool = False
    num_layers: int = 1
    made: Phase = "forward"
    last_read: Phase = "forward"
    like_parameter: bool = False
    is_vocabulary_wide: bool = False
    exchanged: CollectiveUse | None = None


def role_of(path: str, roles: Roles | None = None) -> Category:
    """The category of an argument by its path; `inputs` if no pattern matches.

    For example, `state.params['w']` gives `parameters`, and `batch['tokens']` gives `inputs`. What matches first in the path
    counts: `state.params['mu']` has parameters, and `state.opt_state.mu['w']` has optimizer state.

    Args:
        path: the argument's path.
        roles: categories that were given, by the beginning of a path. They win over the patterns.
    """
    for start, category in (roles or {}).items():
        if path.startswith(start):
            return category
    found: dict[int, Category] = {}
    for pattern, category in _ROLES:
        if match := re.search(pattern, path):
            found.setdefault(match.start(), category)
    return found[min(found)] if found else "inputs"


def _is_gradient(e: Evidence) -> bool:
    """Whether a buffer is a gradient: as large as a parameter, and read by the update.

    A chunked loss makes its gradients in the forward pass already.
    """
    if not e.like_parameter or e.op_name.endswith("/convert_element_type"):
        return False
    by_loss = e.made == "forward" and e.last_read != "forward" and speaks_of_loss(e.op_name, e.functions)
    return by_loss or (e.last_read == "update" and (e.made != "update" or phase_of(e.op_name) == "backward"))


def _is_residual(e: Evidence) -> bool:
    """Whether a buffer is made in the forward pass and saved for the backward pass.

    That may be a gathered value, too.
    """
    return e.made == "forward" and e.last_read != "forward" and phase_of(e.op_name) != "backward"


def phase_of(op_name: str) -> Phase | None:
    """The phase that a JAX scope names; None if it names none.

    Differentiation writes `jvp(...)` or `transpose(jvp(...))` into the scope. For example,
    `jit(step)/transpose(jvp(Net))/mul` gives `backward`, `jit(step)/jvp(Net)/mul` gives `forward`, and `jit(step)/add` gives
    `update`.
    """
    if "transpose(" in op_name or "rematted_computation" in op_name:
        return "backward"
    if "jvp(" in op_name:
        return "forward"
    return "update" if op_name.startswith("jit(") else None


def is_recompute(op_name: str) -> bool:
    """Whether a JAX scope belongs to a recompute of the backward pass.

    `jax.checkpoint` writes `rematted_computation` into the scope. A backward pass that is written by hand
    (`jax.custom_vjp`) may differentiate the forward pass once more. Then a `jvp(...)` follows inside of the `transpose(...)`:
    `jit(step)/transpose(jvp(Net))/layers/while/body/jvp()/mul` gives True.
    """
    return bool(_AGAIN.search(op_name))


def speaks_of_loss(op_name: str, functions: tuple[str, ...]) -> bool:
    """Whether an operation belongs to the logits or the loss.

    Its scope and the names of the functions on its stack say so.
    """
    return bool(_LOSS.search(op_name)) or any(_LOSS.search(function) for function in functions)


#: The rules in order. The rules for gradients and residuals look at where a value is made and where it is last read.
RULES: tuple[tuple[Category, Callable[[Evidence], bool]], ...] = (
    *((role, lambda e, role=role: e.role == role) for role in (*PARAMETERS, "optimizer state")),
    ("inputs", lambda e: e.role is not None),
    ("gradients", lambda e: e.is_output and phase_of(e.op_name) == "backward"),
    ("outputs", lambda e: e.is_output),
    ("workspace", lambda e: e.is_scratch),
    ("gathered parameters", lambda e: e.exchanged == "gathered"),
    ("unreduced gradients", lambda e: e.exchanged == "to add up"),
    ("gradients", lambda e: e.exchanged == "added up"),
    ("gradients", _is_gradient),
    ("logits and loss", lambda e: e.is_vocabulary_wide and speaks_of_loss(e.op_name, e.functions)),
    ("collective buffers", lambda e: e.exchanged == "exchanged" and not _is_residual(e)),
    ("recompute", lambda e: is_recompute(e.op_name)),
    ("other", lambda e: not e.op_name and e.num_layers == 1),
    ("residuals", _is_residual),
    ("working set", lambda e: True),
)


def category_of(evidence: Evidence) -> Category:
    """The category that the first matching rule gives."""
    return next(category for category, holds in RULES if holds(evidence))
