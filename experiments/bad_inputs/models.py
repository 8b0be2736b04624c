"""Models of the user's own, in a file that `--model` names: no Python, raising, ending the process, returning what isn't one.

The command is `run --list names`, which imports the file, makes the workload and traces its loss, and compiles nothing.
"""

import random
from pathlib import Path

from experiments.bad_inputs.case import OK, USAGE, Case, Ended, kind
from experiments.bad_inputs.contradictions import OWN

#: The exit code of code that raises.
RAISED = frozenset({1})
_BEFORE = "import jax, jax.numpy as jnp, numpy as np, jaxremat, os, sys\n"
_STRUCT = "jax.ShapeDtypeStruct"
#: Names of files that Python can import by their path.
_NAMES = ("own.py", "my model.py", "ü.py", "[red].py", "-x.py", "train-2.py", "1.py", "if.py", "a.b.py", "$(id).py", "'.py")


def _of(
    draw: random.Random, folder: Path, text: str, codes: frozenset[int], says: tuple[str, ...] = (), **more: object
) -> Case:
    path = folder / (draw.choice(_NAMES) if draw.random() < 0.4 else "own.py")
    path.write_text(text)
    command = ("run", "--list", "names", f"--model={path.name}:workload")
    return Case(command, codes, says=says, **more)  # pyright: ignore[reportArgumentType]


@kind("models")
def no_python(draw: random.Random, folder: Path) -> Case:
    """A file that isn't Python. The message shows the place."""
    at = draw.randrange(20, len(OWN))
    wrong = [
        OWN[:at] + "\n)(\n" + OWN[at:],
        OWN.replace("def workload", draw.choice(["def workload(", "def 1", "class", "fn workload", "async workload"])),
        OWN.replace("    return", "\treturn\n   return"),
        "import jaxremat\nx = "
        + draw.choice(["'", '"""', "0777", "1__0", "f'{'", "é = ²", "(" * 300, "9" * 5000 + "x", "\x0c\x07"]),
        "<html></html>",
        "{" * 200,
        "\x00" + OWN,
        OWN.replace("jnp.mean", "jnp .. mean"),
    ]
    return _of(draw, folder, draw.choice(wrong), RAISED | USAGE, without=("traceback", "control", "next step"))


_ERRORS = (
    "ValueError('x')",
    "ValueError('[/red] é \\x1b[31m')",
    "KeyError()",
    "StopIteration(3)",
    "BaseException('b')",
    "GeneratorExit()",
    "ExceptionGroup('g', [ValueError(1), KeyError(2)])",
    "type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()",
    "type('Odd', (BaseException,), {'__repr__': lambda self: 1 / 0})()",
    "UnicodeDecodeError('utf-8', b'', 0, 1, 'r')",
    "OSError(28, 'No space left on device')",
    "BrokenPipeError()",
    "RecursionError()",
    "AssertionError()",
    "ImportError('x')",
    "ModuleNotFoundError(\"No module named 'no_such'\", name='no_such')",
    "Warning('w')",
    "ValueError('x' * 100000)",
)


@kind("models")
def raising(draw: random.Random, folder: Path) -> Case:
    """Code that raises: at the import, in the function, or in the loss. The user's own traceback belongs below the message."""
    error = draw.choice(_ERRORS)
    text = draw.choice(
        [
            _BEFORE + f"raise {error}\n",
            OWN.replace("    return jaxremat", f"    raise {error}\n    return jaxremat"),
            OWN.replace("    return jnp.tanh", f"    raise {error}\n    return jnp.tanh"),
            _BEFORE + f"def __getattr__(name):\n    raise {error}\n",
            _BEFORE + "def deeper(n):\n    return deeper(n + 1)\ndeeper(0)\n",
            _BEFORE + "import no_such_module\n",
            _BEFORE + "from jax import no_such_name\n",
            _BEFORE + "def workload(batch=2):\n    return no_such_name\n",
            _BEFORE + "def workload(batch=2):\n    return workload(batch)\n",
            _BEFORE + "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('k') from e\n",
        ]
    )
    return _of(draw, folder, text, RAISED | USAGE, without=("traceback", "control", "next step"))


@kind("models")
def ending_the_process(draw: random.Random, folder: Path) -> Case:
    """Code that ends the process, or that a person ends."""
    ends = [
        "sys.exit()",
        "sys.exit(0)",
        "sys.exit(7)",
        "sys.exit('bye')",
        "os._exit(0)",
        "os._exit(3)",
        "raise SystemExit(None)",
        "quit()",
    ]
    line = draw.choice([*ends, "raise KeyboardInterrupt", "sys.exit(2**40)", "raise SystemExit([1])"])
    text = draw.choice(
        [
            _BEFORE + f"print('started')\n{line}\n",
            OWN.replace("import jax,", "import os, sys, jax,").replace(
                "    return jaxremat", f"    {line}\n    return jaxremat"
            ),
            _BEFORE + f"import atexit\natexit.register(print, 'bye')\n{line}\n",
        ]
    )
    codes = frozenset({130}) if "Keyboard" in line else RAISED
    return _of(draw, folder, text, codes, without=("traceback",))


@kind("models")
def returning_something_else(draw: random.Random, folder: Path) -> Case:
    """A function that returns no workload, or an attribute that is none."""
    values = [
        "None",
        "3",
        "(1, 2)",
        "[]",
        "{}",
        "'x'",
        "lambda: 1",
        "object()",
        "jaxremat.Workload",
        "jnp",
        "float('nan')",
        "iter(())",
    ]
    values += ["type('Odd', (), {'__repr__': lambda self: 1 / 0})()", "np.zeros(3)", "jnp.mean", "NotImplemented", "..."]
    value = draw.choice(values)
    text = draw.choice(
        [
            _BEFORE + f"def workload(batch: int = 2):\n    return {value}\n",
            _BEFORE + f"workload = {value}\n" if value not in ("lambda: 1", "jaxremat.Workload", "jnp.mean") else "",
            _BEFORE + "def workloads():\n    pass\n",
            _BEFORE + f"async def workload(batch: int = 2):\n    return {value}\n",
            _BEFORE + f"def workload(batch: int = 2):\n    yield {value}\n",
            _BEFORE + "def workload(model):\n    pass\n",
            _BEFORE + "def workload(model, /, x):\n    pass\n",
            "",
        ]
    )
    return _of(draw, folder, text, USAGE)


_FIELDS = (
    "params=None",
    "params={}",
    "params='x'",
    "params=3",
    "params=[object()]",
    f"params={_STRUCT}((2, 2), jnp.int32)",
    f"params={_STRUCT}((-1, 2), jnp.float32)",
    f"params={_STRUCT}((8, 'x'), jnp.float32)",
    f"params={_STRUCT}((8, float('nan')), jnp.float32)",
    f"params={_STRUCT}((2**40, 2**40), jnp.float32)",
    f"params={_STRUCT}((0, 8), jnp.float32)",
    f"params={_STRUCT}((8, 7), jnp.float32)",
    f"params={_STRUCT}((7, 8), jnp.float32)",
    "batch=None",
    "batch=3.0",
    "batch={'x': 'y'}",
    "batch=()",
    f"batch={_STRUCT}((), jnp.float32)",
    f"batch={_STRUCT}((batch, 8, 8, 3), jnp.float32)",
    "loss=None",
    "loss=3",
    "loss=lambda: 0.0",
    "loss=lambda params: 0.0",
    "loss=lambda params, x, key, more: 0.0",
    "loss=lambda params, x, *, scale: 0.0",
    "loss=lambda params, x: x",
    "loss=lambda params, x: 0",
    "loss=lambda params, x: None",
    "loss=lambda params, x: (1.0, 2.0, 3.0)",
    "loss=lambda params, x: jnp.mean(x).astype(jnp.int32)",
    "loss=lambda params, x: jnp.mean(x) + 0j",
    "num_tokens=-1",
    "num_tokens=float('nan')",
    "num_tokens='8'",
    "num_tokens=True",
    "model_flops=0",
    "model_flops=float('inf')",
    "model_flops=-1e300",
    "layers=3",
    "layers=['x']",
    "layers=''",
    "layers=('no_such_*',)",
    "name=3",
    "name=b'x'",
    "optimizer='adamw'",
    "optimizer=3",
    "donate_argnums=0",
    "args=(1,)",
    "step=lambda s: s",
    "init=3",
    "batches=[1, 2]",
    "eval_loss='x'",
    "logical_axes={}",
    "joined_microbatches='yes'",
    "no_such_field=1",
)


@kind("models")
def fields_of_a_workload(draw: random.Random, folder: Path) -> Case:
    """A field of a wrong type, sign or shape, and losses of other arguments or results."""
    given = draw.choice(_FIELDS)
    name = given.partition("=")[0]
    lines = [line for line in OWN.splitlines() if not line.strip().startswith(f"{name}=")]
    at = next(n for n, line in enumerate(lines) if line.strip() == ")")
    lines.insert(at, f"        {given},")
    text = "\n".join(lines)
    if draw.random() < 0.3:
        text += "\nworkload = workload()\n"
    return _of(draw, folder, text, RAISED | USAGE, without=("traceback", "next step"))


@kind("models")
def names_of_models(draw: random.Random, folder: Path) -> Case:
    """Files, modules and attributes that aren't there, or whose names are odd."""
    (folder / "own.py").write_text(OWN)
    (folder / "notes.txt").write_text(OWN)
    (folder / "broken.py").symlink_to("nowhere.py")
    (folder / "folder.py").mkdir()
    (folder / "json.py").write_text(OWN)
    spec = draw.choice(
        [
            *("own.py:", ":workload", ":", "own.py", "own:workloud", "own.py:work load", "own.py:workload.x", "own.py:_x"),
            *("notes.txt:workload", "./notes.txt:workload", "broken.py:workload", "folder.py:workload", "no.py:workload"),
            *("nowhere/own.py:workload", "no_such:workload", "own..x:workload", ".own:workload", "own.:workload", "a/b:c"),
            *("/etc/passwd:x", "/:x", "//x.py:y", "own.py:workload:x", "own.py: workload", "json.py:workload", "os:path"),
            *("x" * 5000 + ".py:workload", "x" * 5000 + ":workload", "a." * 2000 + "b:c", "é.py:workload", "[/red].py:x"),
            *("own.py:[red]", "own.py:" + "x" * 5000, "\x1b[31m.py:x", "a\nb.py:x", "~/own.py:workload"),
            *("jaxremat.run:main", "builtins:print", "sys:exit", "own.py:jax", "own.py:jnp", "jax:jit"),
        ]
    )
    return Case(("run", "--list", "names", f"--model={spec}"), USAGE | (RAISED if spec in ("sys:exit",) else frozenset()))


def _only_records(ended: Ended) -> str:
    return "" if "printed" not in ended.stdout else "the user's prints are on stdout"


@kind("models")
def models_as_written(draw: random.Random, folder: Path) -> Case:
    """A model that is right, under an odd name: its names are listed."""
    return _of(draw, folder, OWN + draw.choice(["", "\n" * 99, "# \u202e\n", "\x0c\n"]), OK)


@kind("models")
def printing(draw: random.Random, folder: Path) -> Case:
    """Code that prints anything at its import and in its functions: a list is made, and stdout holds nothing else."""
    said = draw.choice(["'printed'", "'[/red] printed [bold]'", "'printed \\x1b[2J'", "'printed' * 10000"])
    how = draw.choice(
        ["print({})", "sys.stdout.write({})", "print({}, file=sys.stderr)", "print({}, end='')", "print({}, flush=True)"]
    )
    line = how.format(said)
    text = _BEFORE + f"{line}\n" + OWN.replace("    return jaxremat", f"    {line}\n    return jaxremat")
    (folder / "own.py").write_text(text)
    command = ("run", "--list", "optimizers", "--model=own.py:workload", *draw.choice([(), ("--json",)]))
    return Case(command, OK, check=_only_records, without=("control",))
