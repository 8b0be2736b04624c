"""Which class or function each layer is one call of, by the lines of its operations.

Flax Linen writes the scope of each module. Modules of NNX and Equinox and plain functions leave only the traceback of each
operation, here of three operations in two layers:

    loss train.py:31 > Net.__call__ model.py:20 > Block.__call__ model.py:8
    loss train.py:31 > Net.__call__ model.py:20 > Block.__call__ model.py:9
    loss train.py:31 > Net.__call__ model.py:20 > Block.__call__ model.py:8

All are in `Block.__call__`, which is called at one line, and where no loop is around these lines. So each layer is a call of
`Block`.
"""

import ast
import functools
import itertools
import linecache
import os.path
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jaxremat.policy.program import Equation
from jaxremat.system.whose import is_users, shown_file

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_CALL = ".__call__"
#: The file whose code is around each call of a module of Linen.
_LINEN = os.path.join("flax", "linen", "module.py")


class Function(NamedTuple):
    """A function: its file, its qualified name, and the line where it begins."""

    file: str
    qualname: str
    start: int

    @property
    def name(self) -> str:
        """What code wraps: the class of a module's call, or the function. Empty for a lambda."""
        owner = self.qualname.removesuffix(_CALL)
        name = owner.rpartition("." if owner != self.qualname else "<locals>.")[2]
        return name if name.isidentifier() else ""


class _Frame(NamedTuple):
    function: Function
    line: int


def called(layers: Sequence[Sequence[Equation]]) -> Function | None:
    """The function that each layer is one call of, for a class its `__call__`.

    None where the lines don't prove that: a call may have several layers, the layers begin inside a call, its code isn't the
    user's, or a traceback is missing. Other operations may come from the function, too.

    Args:
        layers: the equations of each layer.
    """
    chains = [[_frames(equation) for equation in layer] for layer in layers]
    depth = _depth([chain for layer in chains for chain in layer])
    if not depth:
        return None
    function = chains[0][0][depth].function
    lines, *others_lines = {frozenset(chain[depth].line for chain in layer) for layer in chains}
    if not function.name or others_lines or not all(map(_comes_once, chains)) or not _runs_once(function, lines):
        return None
    if not function.qualname.endswith(_CALL) and any(is_linens(equation) for layer in layers for equation in layer):
        return None  # a function that calls modules of Linen can't have a checkpoint of JAX
    return function


def comes_from(equation: Equation, function: Function) -> bool:
    """Whether an operation was traced in a call of a function."""
    return any(frame.function == function for frame in _frames(equation))


def is_linens(equation: Equation) -> bool:
    """Whether an operation comes from a call of a module of Flax Linen."""
    return any(frame.function.file.endswith(_LINEN) for frame in _frames(equation))


def users_lines(equation: Equation) -> tuple[str, ...]:
    """The lines of the user's code that an operation was traced in.

    Each is `file:line`, the outermost first.
    """
    frames = ((frame.function.file, frame.line) for frame in _frames(equation))
    return tuple(f"{shown_file(file)}:{line}" for file, line in frames if is_users(file))


def _depth(chains: Sequence[tuple[_Frame, ...]]) -> int:
    """The place in all chains of the last function that they share.

    It is called at one line. 0 if there is none.
    """
    for depth, frames in enumerate(zip(*chains, strict=False)):
        if len({frame.function for frame in frames}) > 1:
            return max(depth - 1, 0)
        if len({frame.line for frame in frames}) > 1:
            return depth
    return 0


def _comes_once(chains: Sequence[tuple[_Frame, ...]]) -> bool:
    """Whether the place of the first operation doesn't come again after others."""
    return [chain for chain, _ in itertools.groupby(chains)].count(chains[0]) == 1


def _frames(equation: Equation) -> tuple[_Frame, ...]:
    """The frames of an equation, the outermost first, with those of the calls around it."""
    tracebacks = dict.fromkeys((*equation.called_at, equation.traceback))
    frames = (frame for traceback in tracebacks if traceback for frame in reversed(traceback.frames))
    return tuple(_Frame(Function(f.file_name, f.function_name, f.function_start_line), f.line_num) for f in frames)


def _runs_once(function: Function, lines: frozenset[int]) -> bool:
    """Whether a call of the user's function runs these lines once.

    It doesn't if one loop holds them all. A single line may also call the same function twice.
    """
    code = _code(function.file) if is_users(function.file) else None
    if code is None:
        return False
    loops, calls = code
    in_loop = any(function.start <= loop.start and all(line in loop for line in lines) for loop in loops)
    return not in_loop and (len(lines) > 1 or max(calls.get(min(lines), {}).values(), default=0) <= 1)


@functools.cache
def _code(file: str) -> tuple[tuple[range, ...], dict[int, Counter[str]]] | None:
    """The lines of each loop in a file, and how often each line calls a function.

    None where the file can't be read or parsed.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)) or "(")
    except SyntaxError:
        return None
    loops, calls = list[range](), dict[int, Counter[str]]()
    for node in ast.walk(tree):
        if isinstance(node, _LOOPS):
            loops.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Call):
            calls.setdefault(node.lineno, Counter())[ast.unparse(node.func)] += 1
    return tuple(loops), calls
