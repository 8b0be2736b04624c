"""Loads the user's code that --model names: a `Workload`, or a function that makes one.

    factory = load_factory("train.py:workload", ["width=512"])
    factory.has_free_batch   # True: `def workload(batch: int = 8, width: int = 128) -> jaxremat.Workload`
    factory(batch=16)        # the Workload that workload(batch=16, width=512) returns

A file runs as `python train.py` would run it: its folder is in front on `sys.path`. Its name is the file's stem, though, and
not `__main__`. The user's code is imported only here. `workload/source.py` finds it without running it.
"""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxremat.config import parse_loss
from jaxremat.errors import UsageError, both, nearest, reject
from jaxremat.system.whose import is_installed
from jaxremat.workload.source import Source, find_source, own_modules, put_on_path
from jaxremat.workload.user_code import user_code, wrap_user_batches, wrap_user_function

if TYPE_CHECKING:
    from jaxremat.workload.workload import Workload

WRITE_A_FACTORY = "write def workload(batch: int = 8) -> jaxremat.Workload, which returns jaxremat.Workload(loss=..., ...)"
#: By the base class of a model: what it is called, and how a workload is made of it.
MODELS = {
    "flax.linen.module.Module": (
        "a Flax Linen module",
        "return jaxremat.Workload(loss=loss, params=params, batch=batch), with params = jax.eval_shape(model.init, "
        "jax.random.key(0), batch) and a loss(params, batch) that calls model.apply(params, batch)",
    ),
    "flax.nnx.module.Module": (
        "a Flax NNX module",
        "return jaxremat.Workload(loss=loss, params=model, batch=batch), with model = nnx.eval_shape(lambda: Net(nnx.Rngs(0))) "
        "and a loss(model, batch) that calls model(batch)",
    ),
    "equinox._module._module.Module": (
        "an Equinox module",
        "return jaxremat.Workload(loss=loss, params=params, batch=batch), with params, static = eqx.partition(model, "
        "eqx.is_array) and a loss(params, batch) that calls eqx.combine(params, static)(batch)",
    ),
}
#: By keyword of a function, the flag that gives it, and how the function takes it.
_TAKES = {
    "seq_len": ("--seq-len or --lengths", "seq_len: int = 1024"),
    "loss": ("--loss", "loss: str = 'full'"),
    "scan_layers": ("--scan-layers", "scan_layers: bool = True"),
}
#: The functions of a workload that aren't functions of arrays, by how they are run in `user_code`.
_OTHER_FUNCTIONS = {
    wrap_user_batches: ("batches", "eval_batches"),
    wrap_user_function: ("as_config", "data_hash", "logical_axes", "otherwise", "read_weights"),
}
_NOT_GIVEN = inspect.Parameter.empty
_NOT_THERE = object()
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, eq=False)
class Factory:
    """Makes the workload that --model names, at any batch where its batch is free.

    Attributes:
        name: what --model said, with a path shortened to its file name.
        has_free_batch: whether the workload can be made at any batch: it comes from a function with a keyword `batch`, and
            --model-arg doesn't give it.
        default_batch: the default of that keyword. None where the batch isn't free or the keyword has no number as default.
        arguments: the function's keywords that --model-arg gives.
        options: its keywords that flags of a training step give, `loss` and `scan_layers`, with their defaults.
    """

    name: str
    has_free_batch: bool
    default_batch: int | None
    arguments: Mapping[str, Any]
    _made_from: "Any | Workload" = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    _devices: Callable[[], Sequence[Any]] | None = field(default=None, repr=False)
    _made: dict[tuple[Any, ...], "Workload"] = field(default_factory=dict, repr=False)

    @property
    def takes_devices(self) -> bool:
        """Whether it gets the target's devices, to make a mesh of its own."""
        return self._devices is not None

    def __call__(self, batch: int | None = None, **options: Any) -> "Workload":
        """The workload at `batch`, with these `options`.

        The last one, and that at the default batch, are stored for the next call. Its functions run in `user_code`. If the
        user's code left its name empty, it is `name`.

        Args:
            batch: samples of one microbatch. None takes the function's default, or the workload's one batch. A workload that
                is a step has batch 1.
            **options: what `options` names. By default, its own values.

        Raises:
            UsageError: the batch isn't free and another, or it is needed; or the user's function doesn't return a Workload.
            UserCodeError: the user's function raised an exception.
        """
        from jaxremat.workload.workload import Workload

        if batch is not None and not self.has_free_batch:
            own, is_given = self(None, **options), "batch" in self.arguments
            number = own.num_samples or 1
            reject((batch != number, f"{self.name} has one batch, {number}, and batch {batch} was requested",
                    "leave one of the two out" if is_given else "a free batch: def workload(batch: int = 8)",
                    "--model-arg gives it" if is_given else "a Workload, or a function without the keyword batch"))  # fmt: skip
            return own
        batch = self.default_batch if batch is None else batch
        reject((batch is None and self.has_free_batch, f"{self.name} needs a batch", "--batch 8, or a default, as in batch=8",
                "its keyword batch has no number as default"))  # fmt: skip
        options = {**self.options, **options}
        which = (batch, *options.values())
        if which not in self._made:
            for other in [other for other in self._made if other[0] != self.default_batch]:
                del self._made[other]  # it may hold arrays
            found, devices = self._made_from, []
            if not isinstance(found, Workload):
                arguments = {**self.arguments, **options, **({} if batch is None else {"batch": batch})}
                devices = [*self._devices()] if self._devices else []
                arguments |= {"devices": devices} if devices else {}
                with user_code(f"the call of {self.name}"):
                    found = found(**arguments)
            if not isinstance(found, Workload):
                raise _wrong_return(self.name, found)
            if len(devices) > 1 and found.mesh is None:
                raise UsageError(
                    f"{self.name} took {len(devices)} devices and returned a workload without a mesh",
                    next_step="return jaxremat.Workload(..., mesh=mesh), or take no keyword devices and have --mesh make a mesh",
                )
            self._made[which] = _in_user_code(found, self.name)
        return self._made[which]


def load_factory(
    text: str, words: Sequence[str] = (), devices: Callable[[], Sequence[Any]] | None = None, **keywords: Any
) -> Factory:
    """Imports the user's code that --model names, and checks that it makes a workload.

    Args:
        text: `path.py:attribute` or `package.module:attribute`.
        words: what the --model-arg flags gave, each `key=value`.
        devices: gives the target's devices, for the function's keyword `devices`. None leaves that to the function.
        **keywords: what other flags give to keywords of the function: `seq_len`, `loss` and `scan_layers`.

    Raises:
        UsageError: there is no such file, module or attribute, or the attribute can't be called with these arguments.
        UserCodeError: the import raised an exception.
    """
    from jaxremat.workload.workload import Workload

    arguments = parse_arguments(words)
    source = find_source(text)
    found = _attribute(import_source(source), source)
    signature = None if isinstance(found, Workload) else _signature(found, source)
    options = _options(signature, arguments)
    for name, value in keywords.items():
        flag, like = _TAKES[name]
        takes = name in options or (name == "seq_len" and signature and name in signature.parameters)
        reject(
            (name in arguments, both(flag, f"--model-arg {name}"), "leave one of them out"),
            (not takes, f"{name} {value} was requested by {flag}, and {source.name} takes no {name}",
             f"leave {flag} out, or take the keyword: def workload(batch: int = 8, {like})",
             "it is a Workload, or a function without such a keyword"),
        )  # fmt: skip
    if signature is None:
        reject((words, f"--model-arg got {[*words, ''][0]!r}, and {source.name} is a Workload, which takes no arguments",
                "leave --model-arg out, or name a function that returns a Workload"))  # fmt: skip
        return Factory(source.name, False, None, {}, found)
    arguments |= {name: value for name, value in keywords.items() if name not in options}
    batch = _check_arguments(signature, arguments, source)
    options = {name: keywords.get(name, value) for name, value in options.items()}
    takes_devices = "devices" not in arguments and takes_devices_of(signature)
    return _of_function(source.name, found, batch, arguments, options, devices if takes_devices else None)


def called(function: Any, name: str, devices: Callable[[], Sequence[Any]]) -> Factory:
    """The factory of a function that no flag names. Its keywords have their defaults.

    Args:
        function: the function that returns a workload.
        name: its name.
        devices: gives the target's devices, for the function's keyword `devices`.

    Raises:
        UsageError: it is no function.
    """
    if (model := _model_of(function)) or not callable(function):
        kind, how = model or (
            f"of type {type(function).__name__}",
            "Session('gpt2'), or Session(jaxremat.Workload(loss=...))",
        )
        raise UsageError(
            f"the model is {kind}",
            allowed="the name of a preset, the path of a config.json, FILE.py:ATTR, a Workload, or a function that returns one",
            next_step=how,
        )
    signature = inspect.signature(function)
    batch, options = signature.parameters.get("batch"), _options(signature, {})
    return _of_function(name, function, batch, {}, options, devices if takes_devices_of(signature) else None)


def _of_function(
    name: str,
    function: Any,
    batch: inspect.Parameter | None,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    devices: Callable[[], Sequence[Any]] | None,
) -> Factory:
    """The factory of a function, whose keyword `batch` is free unless it is None."""
    default = batch.default if batch and type(batch.default) is int else None
    return Factory(name, batch is not None, default, arguments, function, options, devices)


def takes_devices_of(signature: inspect.Signature) -> bool:
    """Whether a function takes the target's devices.

    It has a keyword `devices` then, whose default isn't a value of another kind.
    """
    parameter = signature.parameters.get("devices")
    return parameter is not None and parameter.kind in _BY_NAME and parameter.default in (_NOT_GIVEN, None)


def parse_arguments(words: Sequence[str]) -> dict[str, Any]:
    """The keywords of --model-arg: `["depth=12", "act=gelu"]` is `{"depth": 12, "act": "gelu"}`.

    A value that is a Python literal is that: a number, True, None, a tuple. Any other value is a string.

    Args:
        words: each `key=value`.

    Raises:
        UsageError: a word isn't of this form, or a key is given twice.
    """
    arguments: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        reject(
            (not (equals and key.isidentifier()), f"--model-arg got {word!r}", "write it like --model-arg depth=12", "",
             "key=value, with a keyword of the function that --model names"),
            (key in arguments, f"--model-arg gives {key!r} twice", f"leave {word!r} out", "", "each key once"),
        )  # fmt: skip
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            arguments[key] = value
    return arguments


def import_source(source: Source) -> ModuleType:
    """Imports the module that --model names, once per process.

    A module of the same name from another file, which an earlier call has imported, is replaced, with those beside it.

    Raises:
        UsageError: the module, or one that it imports, has the name of an installed module.
        UserCodeError: the import raised an exception.
    """
    put_on_path(source.file.parent if source.is_path else Path.cwd(), first=source.is_path)
    _make_room(source)
    with user_code(f"the import of {source.place}"):
        if not source.is_path:
            return importlib.import_module(source.module)
        if source.module in sys.modules:
            return sys.modules[source.module]
        return _run_file(source)


def _run_file(source: Source) -> ModuleType:
    spec = importlib.util.spec_from_file_location(source.module, source.file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[source.module] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[source.module]
        raise
    return module


def _make_room(source: Source) -> None:
    """Forgets each loaded module that has the name of a user's but comes from another file.

    Raises:
        UsageError: that module is an installed one.
    """
    for name, file in own_modules(source).items():
        if name not in sys.modules:
            continue
        loaded = _file_or_folder(sys.modules[name])
        if loaded is not None and loaded.resolve() == file.resolve():
            continue
        if loaded is None or is_installed(loaded):
            raise UsageError(
                f"--model {source.text!r}: the file {str(file)!r} has the name of the installed module {name!r}",
                cause="Python can hold only one module of a name",
                next_step="give the file another name",
            )
        top = name.partition(".")[0]
        for other in [other for other in sys.modules if other.partition(".")[0] == top]:
            del sys.modules[other]


def _file_or_folder(module: ModuleType) -> Path | None:
    """The file that a module came from, or the folder of a package without `__init__.py`.

    A built-in module has neither.
    """
    attributes = vars(module)
    place = attributes.get("__file__") or next(iter(attributes.get("__path__", ())), None)
    return None if place is None else Path(place)


def _attribute(module: ModuleType, source: Source) -> Any:
    """The attribute that --model names: a Workload, or something to call that may return one.

    Raises:
        UsageError: there is no such attribute, or it is something else.
    """
    from jaxremat.workload.workload import Workload

    with user_code(f"the import of {source.place}"):  # a module may compute its attributes
        found = getattr(module, source.attribute, _NOT_THERE)
    model = _model_of(found)
    if isinstance(found, Workload) or (callable(found) and not model):
        return found
    choices = [name for name, value in vars(module).items() if _is_choice(name, value, module)]
    choices = [name for name in choices if _says_workload(vars(module)[name])] or choices
    problem = f"{source.place} has no {source.attribute!r}"
    if found is not _NOT_THERE:
        kind = model[0] if model else f"of type {type(found).__name__}"
        problem = f"{source.attribute!r} is {kind}, neither a jaxremat.Workload nor a function that returns one"
    raise UsageError(
        f"--model {source.text!r}: {problem}",
        allowed=", ".join(choices),
        cause="" if choices else f"{source.place} defines no Workload and no public function",
        next_step=(model[1] if model else nearest(source.attribute, choices))
        or (f"write it like --model {source.place}:{choices[0]}" if choices else WRITE_A_FACTORY),
    )


def _is_choice(name: str, value: Any, module: ModuleType) -> bool:
    """Whether --model could name an attribute: a Workload, or the module's own public function."""
    from jaxremat.workload.workload import Workload

    is_function = callable(value) and not isinstance(value, type) and not _model_of(value)
    defined_here = is_function and getattr(value, "__module__", None) == module.__name__
    return not name.startswith("_") and (isinstance(value, Workload) or defined_here)


def _says_workload(value: Any) -> bool:
    """Whether an attribute is a Workload, or a function that says it returns one."""
    returned = getattr(value, "__annotations__", {}).get("return", value)
    return "Workload" in (returned if isinstance(returned, str) else getattr(returned, "__name__", type(returned).__name__))


def _model_of(value: Any) -> tuple[str, str] | None:
    """The row of `MODELS` for a model or a class of models; None for anything else."""
    kind = value if isinstance(value, type) else type(value)
    return next(filter(None, (MODELS.get(f"{base.__module__}.{base.__qualname__}") for base in kind.__mro__)), None)


def _signature(function: Any, source: Source) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"--model {source.text!r}: what {source.attribute!r} takes cannot be read: {error}", next_step=WRITE_A_FACTORY
        ) from None


def _options(signature: inspect.Signature | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """The function's keywords among which a plan chooses, with their defaults.

    They are `loss` where its default is a value of --loss, and `scan_layers` where it is True or False by default.
    """
    parameters = signature.parameters if signature else {}
    free = {name: parameter.default for name, parameter in parameters.items() if name not in arguments}
    holds = {"loss": _is_loss(free.get("loss")), "scan_layers": type(free.get("scan_layers")) is bool}
    return {name: free[name] for name in holds if holds[name]}


def _is_loss(value: Any) -> bool:
    try:
        parse_loss(str(value))
    except UsageError:
        return False
    return True


def _check_arguments(signature: inspect.Signature, arguments: dict[str, Any], source: Source) -> inspect.Parameter | None:
    """The keyword `batch` of the user's function where it is free.

    Raises:
        UsageError: the function doesn't take these arguments, or it needs more.
    """
    by_name = {name: parameter for name, parameter in signature.parameters.items() if parameter.kind in _BY_NAME}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for key, value in arguments.items():
        default = by_name[key].default if key in by_name else None
        is_bool = isinstance(default, bool)
        allowed, like = ("True or False, as Python writes them", not default) if is_bool else ("a number", default)
        reject(
            (key not in by_name and not takes_any, f"--model-arg got {key!r}, which {source.name} doesn't take",
             nearest(key, by_name) or "leave it out", "", ", ".join(by_name) or "none, as the function has no keywords"),
            (isinstance(value, str) and isinstance(default, int | float),
             f"--model-arg got '{key}={value}', and {key} is {default} by default", f"write it like --model-arg {key}={like}",
             "", allowed),
        )  # fmt: skip
    needed = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is _NOT_GIVEN and parameter.kind not in _REST and name not in (*arguments, "batch", "devices")
    ]
    reject((needed, f"--model {source.text!r}: {source.attribute!r} needs {', '.join(needed)}",
            f"give a value, like --model-arg {[*needed, ''][0]}=VALUE",
            "it isn't the function that returns the Workload, or it lacks defaults"))  # fmt: skip
    return None if "batch" in arguments else by_name.get("batch")


def _wrong_return(name: str, value: Any) -> UsageError:
    kind, how = _model_of(value) or (f"a value of type {type(value).__name__}", "")
    cause = ""
    if value is None:
        kind, cause = "None", "the function doesn't end with return"
    elif isinstance(value, tuple):
        kind = f"a tuple of ({', '.join(type(part).__name__ for part in value)})"
    return UsageError(
        f"{name} returned {kind}, not a jaxremat.Workload",
        cause=cause,
        next_step=how or "return jaxremat.Workload(loss=loss, params=params, batch=batch)",
    )


def _in_user_code(workload: "Workload", name: str) -> "Workload":
    """The same workload, whose functions run in `user_code`."""
    from jaxremat.workload.workload import with_functions

    wrapped = with_functions(workload, lambda function, part: wrap_user_function(function, f"the {part} of {name}"))
    others = {
        part: wrap(function, f"the {part} of {name}")
        for wrap, parts in _OTHER_FUNCTIONS.items()
        for part in parts
        if (function := vars(workload)[part]) is not None
    }
    return replace(wrapped, name=workload.name or name, **others)
