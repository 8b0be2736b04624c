"""The model that the flags ask for: a preset, a Hugging Face config.json, or a workload of the user's own, as data.

asked_model(RunFlags(model="llama3-8b"))           # AskedModel(ModelConfig("llama3-8b", ...), TrainConfig(seq_len=2048), "")
asked_model(RunFlags(hf="Qwen3-8B/config.json"))   # AskedModel(ModelConfig("Qwen3-8B", ...), ...)
"""

from dataclasses import dataclass
from typing import Any

from jaxremat.cli.flags import DEFAULT_MODEL, StepFlags
from jaxremat.config import ModelConfig, TrainConfig, check, override
from jaxremat.errors import UsageError
from jaxremat.model.hf import read_hf
from jaxremat.model.presets import preset
from jaxremat.workload.given import GivenModel
from jaxremat.workload.source import find_source, is_spec

#: The flags of the training step that only the decoder has.
DECODER_FLAGS = ("loss",)


@dataclass(frozen=True)
class AskedModel:
    """A model with its training step.

    Attributes:
        model: the preset or the model of --hf with the fields that the flags change, or what --model says of a workload of the
            user's own.
        train: the training step's settings.
        line: the line of the heading that says where the model's sizes come from. Empty for what --model names.
    """

    model: ModelConfig | GivenModel
    train: TrainConfig
    line: str = ""


def asked_model(flags: StepFlags) -> AskedModel:
    """What --model or --hf asks for, with the fields that the other flags change.

    Raises:
        UsageError: there is no such model, or the flags don't go with it.
    """
    if flags.hf is not None and flags.model is not None:
        raise UsageError(
            f"--hf {flags.hf} and --model {flags.model} are two models",
            next_step="leave one of them out; flags such as --num-layers 4 change single fields of either",
        )
    named = flags.hf or flags.model or DEFAULT_MODEL
    if flags.hf is None and is_spec(named):
        return _given_model(flags, named)
    for name, words in (("--model-arg", flags.model_arg), ("--layers", flags.layers)):
        if words:
            what = f"--hf {named} is one of a known family" if flags.hf is not None else f"--model {named} is a preset"
            raise UsageError(
                f"{name} goes with a --model of your own, and {what}",
                next_step=f"leave {name} out, or give --model FILE.py:ATTR",
            )
    fields = changed_fields(flags.fields)
    if flags.hf is not None:
        found = read_hf(flags.hf, fields)
        model, seq_len, line = found.config, found.seq_len, found.line()
    else:
        chosen = preset(named)
        model, seq_len, line = override(chosen.config, **fields), chosen.seq_len, ""
    train = override(TrainConfig(seq_len=seq_len), **_given_training(flags))
    check(model, train)
    return AskedModel(model, train, line)


def _given_training(flags: StepFlags) -> dict[str, Any]:
    """The fields of the training step that flags give, with the one length of --seq-len.

    Raises:
        UsageError: several lengths were given.
    """
    given = {name: value for name, value in vars(flags.training).items() if value not in (None, ())}
    lengths = flags.training.seq_len
    if len(lengths) > 1:
        raise UsageError(
            f"--seq-len asks for {len(lengths)} lengths, and this command takes one",
            allowed="several lengths with python -m jaxremat.run and python -m jaxremat sweep",
            next_step=f"--seq-len {lengths[0]}",
        )
    return given | ({"seq_len": lengths[0]} if lengths else {})


def _given_model(flags: StepFlags, spec: str) -> AskedModel:
    """What --model says of a workload of the user's own, and its training step. No code of the user's is imported."""
    given = [name for name, value in vars(flags.fields).items() if value is not None]
    training = _given_training(flags)
    given += [name for name in DECODER_FLAGS if name in training]
    given += ["data"] if flags.data is not None else []
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(
            f"--model {spec} is a workload of your own, and about presets alone: {names}",
            next_step=f"leave {'it' if len(given) == 1 else 'them'} out; --model-arg KEY=VALUE sets what your function takes",
        )
    find_source(spec)
    return AskedModel(
        GivenModel(spec, flags.model_arg, flags.layers, training.get("seq_len")), override(TrainConfig(), **training)
    )


def changed_fields(fields: Any) -> dict[str, Any]:
    """The fields of the model that flags change. `--scan-layers auto` changes none: it compares both."""
    given = {name: value for name, value in vars(fields).items() if value is not None}
    return {name: value for name, value in given.items() if value != "auto" or name != "scan_layers"}
