"""For a JAX/Flax model and a GPU, attached or not: which rematerialization policy, which batch, how fast, and why.

Importing this package imports no JAX, starts no backend and edits no setting. A public name such as `jaxremat.remat` is
loaded when it is first used (PEP 562).
"""

from jaxremat import early  # noqa: F401  # isort: skip  # a signal during the imports below ends a command quietly

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from jaxremat.answer.any_layer import plan as plan
    from jaxremat.config import ModelConfig as ModelConfig
    from jaxremat.config import TrainConfig as TrainConfig
    from jaxremat.model.hf import hf_config as hf_config
    from jaxremat.model.presets import preset as preset
    from jaxremat.model.transformer import Block as Block
    from jaxremat.model.transformer import Decoder as Decoder
    from jaxremat.model.weights import load_safetensors as load_safetensors
    from jaxremat.planner.plan import Plan as Plan
    from jaxremat.policy.apply import remat as remat
    from jaxremat.policy.autoname import autoname as autoname
    from jaxremat.policy.found import FoundLayers as FoundLayers
    from jaxremat.policy.grammar import parse as parse
    from jaxremat.policy.layout import stack_layers as stack_layers
    from jaxremat.policy.layout import unstack_layers as unstack_layers
    from jaxremat.policy.spec import Every as Every
    from jaxremat.policy.spec import Mix as Mix
    from jaxremat.policy.spec import Names as Names
    from jaxremat.policy.spec import OneIn as OneIn
    from jaxremat.policy.spec import Policy as Policy
    from jaxremat.policy.spec import Rule as Rule
    from jaxremat.policy.stack import Layers as Layers
    from jaxremat.policy.stack import scan_layers as scan_layers
    from jaxremat.policy.with_policy import find_layers as find_layers
    from jaxremat.policy.with_policy import with_policy as with_policy
    from jaxremat.search.batch import largest_batch as largest_batch
    from jaxremat.workload.workload import Workload as Workload
    from jaxremat.xla.buffers import MemoryMap as MemoryMap
    from jaxremat.xla.buffers import attribution as attribution
    from jaxremat.xla.buffers import held as held
    from jaxremat.xla.compile import lower_and_compile as lower_and_compile
    from jaxremat.xla.compile import memory_map as memory_map
    from jaxremat.xla.lint import lint as lint
    from jaxremat.xla.lint_input import Finding as Finding
    from jaxremat.xla.memory import CompiledMemory as CompiledMemory
    from jaxremat.xla.target import load_target as load_target

_HOME = {
    "ModelConfig": "config",
    "TrainConfig": "config",
    "preset": "model.presets",
    "hf_config": "model.hf",
    "load_safetensors": "model.weights",
    "Block": "model.transformer",
    "Decoder": "model.transformer",
    "remat": "policy.apply",
    "autoname": "policy.autoname",
    "Every": "policy.spec",
    "Mix": "policy.spec",
    "Names": "policy.spec",
    "OneIn": "policy.spec",
    "Policy": "policy.spec",
    "Rule": "policy.spec",
    "parse": "policy.grammar",
    "stack_layers": "policy.layout",
    "unstack_layers": "policy.layout",
    "Layers": "policy.stack",
    "scan_layers": "policy.stack",
    "find_layers": "policy.with_policy",
    "with_policy": "policy.with_policy",
    "FoundLayers": "policy.found",
    "plan": "answer.any_layer",
    "Plan": "planner.plan",
    "largest_batch": "search.batch",
    "Workload": "workload.workload",
    "MemoryMap": "xla.buffers",
    "attribution": "xla.buffers",
    "held": "xla.buffers",
    "lower_and_compile": "xla.compile",
    "memory_map": "xla.compile",
    "lint": "xla.lint",
    "Finding": "xla.lint_input",
    "CompiledMemory": "xla.memory",
    "load_target": "xla.target",
}
__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxremat' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxremat.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
