"""Which rematerialization policy, which batch, how fast, and why: for a JAX model and a GPU.

The GPU may be attached or not. Importing this package imports no JAX, starts no backend and edits no setting. A public name such
as `jaxremat.remat` is loaded when it is first used (PEP 562). What works on any function, such as `with_policy`, needs JAX alone
then. `Layers` needs Flax when it is called, and the models when they are imported.
"""

from jaxremat.system import early  # noqa: F401  # isort: skip  # a signal during the imports below ends a command quietly

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
#: Modules of this folder are importable from here, too: the former names of commands, such as `jaxremat.explain`.
__path__.append(os.path.join(os.path.dirname(__file__), "cli", "former"))

if TYPE_CHECKING:
    from jaxremat.answer.any_layer import plan as plan
    from jaxremat.chips.target import Target as Target
    from jaxremat.chips.target import load_target as load_target
    from jaxremat.config import ModelConfig as ModelConfig
    from jaxremat.config import TrainConfig as TrainConfig
    from jaxremat.errors import CompileError as CompileError
    from jaxremat.errors import DoesNotFitError as DoesNotFitError
    from jaxremat.errors import DriverError as DriverError
    from jaxremat.errors import JaxrematError as JaxrematError
    from jaxremat.errors import MissingDependencyError as MissingDependencyError
    from jaxremat.errors import TargetError as TargetError
    from jaxremat.errors import UnknownNameError as UnknownNameError
    from jaxremat.errors import UnknownPolicyError as UnknownPolicyError
    from jaxremat.errors import UsageError as UsageError
    from jaxremat.errors import UserCodeError as UserCodeError
    from jaxremat.knapsack.prices import Price as Price
    from jaxremat.mesh.axes import MeshShape as MeshShape
    from jaxremat.mesh.axes import parse_mesh as parse_mesh
    from jaxremat.model.hf import hf_config as hf_config
    from jaxremat.model.presets import preset as preset
    from jaxremat.model.transformer import Block as Block
    from jaxremat.model.transformer import Decoder as Decoder
    from jaxremat.model.weights import load_safetensors as load_safetensors
    from jaxremat.planner.plan import Plan as Plan
    from jaxremat.planner.plan import Tried as Tried
    from jaxremat.planner.steps import Cost as Cost
    from jaxremat.policy.apply import remat as remat
    from jaxremat.policy.autoname import autoname as autoname
    from jaxremat.policy.code import as_code as as_code
    from jaxremat.policy.found import FoundLayers as FoundLayers
    from jaxremat.policy.found import Kind as Kind
    from jaxremat.policy.grammar import parse as parse
    from jaxremat.policy.layers import Layers as Layers
    from jaxremat.policy.layout import stack_layers as stack_layers
    from jaxremat.policy.layout import unstack_layers as unstack_layers
    from jaxremat.policy.names import NamedValue as NamedValue
    from jaxremat.policy.spec import Every as Every
    from jaxremat.policy.spec import Mix as Mix
    from jaxremat.policy.spec import Names as Names
    from jaxremat.policy.spec import OneIn as OneIn
    from jaxremat.policy.spec import Policy as Policy
    from jaxremat.policy.spec import Rule as Rule
    from jaxremat.policy.stack import scan_layers as scan_layers
    from jaxremat.policy.with_policy import find_layers as find_layers
    from jaxremat.policy.with_policy import with_policy as with_policy
    from jaxremat.search.batch import BatchSearch as BatchSearch
    from jaxremat.search.batch import largest_batch as largest_batch
    from jaxremat.session.printed import Answer as Answer
    from jaxremat.session.session import Session as Session
    from jaxremat.trial.comparisons import LengthsRecord as LengthsRecord
    from jaxremat.trial.comparisons import MeshChoiceRecord as MeshChoiceRecord
    from jaxremat.trial.comparisons import RankRecord as RankRecord
    from jaxremat.trial.lines import from_row as from_row
    from jaxremat.trial.recommendation import RecommendationRecord as RecommendationRecord
    from jaxremat.trial.record import ExplainRecord as ExplainRecord
    from jaxremat.trial.record import FailureRecord as FailureRecord
    from jaxremat.trial.record import LargestBatchRecord as LargestBatchRecord
    from jaxremat.trial.record import PlanRecord as PlanRecord
    from jaxremat.trial.record import SuggestionRecord as SuggestionRecord
    from jaxremat.trial.record import TrialRecord as TrialRecord
    from jaxremat.workload.workload import Workload as Workload
    from jaxremat.xla.buffers import Buffer as Buffer
    from jaxremat.xla.buffers import MemoryMap as MemoryMap
    from jaxremat.xla.buffers import attribution as attribution
    from jaxremat.xla.buffers import held as held
    from jaxremat.xla.compile import Compilation as Compilation
    from jaxremat.xla.compile import lower_and_compile as lower_and_compile
    from jaxremat.xla.compile import memory_map as memory_map
    from jaxremat.xla.lint import lint as lint
    from jaxremat.xla.memory import CompiledMemory as CompiledMemory
    from jaxremat.xla.step_facts import Finding as Finding

#: The module of each public name. The imports above say the same to type checkers, and a test compares them.
_NAMES = {
    "answer.any_layer": "plan",
    "config": "ModelConfig TrainConfig",
    "errors": (
        "CompileError DoesNotFitError DriverError JaxrematError MissingDependencyError TargetError "
        "UnknownNameError UnknownPolicyError UsageError UserCodeError"
    ),
    "mesh.axes": "MeshShape parse_mesh",
    "model.hf": "hf_config",
    "model.presets": "preset",
    "model.transformer": "Block Decoder",
    "model.weights": "load_safetensors",
    "planner.plan": "Plan Tried",
    "knapsack.prices": "Price",
    "planner.steps": "Cost",
    "policy.apply": "remat",
    "policy.autoname": "autoname",
    "policy.code": "as_code",
    "policy.found": "FoundLayers Kind",
    "policy.grammar": "parse",
    "policy.layers": "Layers",
    "policy.layout": "stack_layers unstack_layers",
    "policy.names": "NamedValue",
    "policy.spec": "Every Mix Names OneIn Policy Rule",
    "policy.stack": "scan_layers",
    "policy.with_policy": "find_layers with_policy",
    "search.batch": "BatchSearch largest_batch",
    "session.printed": "Answer",
    "session.session": "Session",
    "trial.comparisons": "LengthsRecord MeshChoiceRecord RankRecord",
    "trial.lines": "from_row",
    "trial.recommendation": "RecommendationRecord",
    "trial.record": "ExplainRecord FailureRecord LargestBatchRecord PlanRecord SuggestionRecord TrialRecord",
    "workload.workload": "Workload",
    "xla.buffers": "Buffer MemoryMap attribution held",
    "xla.compile": "Compilation lower_and_compile memory_map",
    "xla.lint": "lint",
    "xla.memory": "CompiledMemory",
    "xla.step_facts": "Finding",
    "chips.target": "Target load_target",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxremat' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"jaxremat.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        from jaxremat.errors import MissingDependencyError

        package = (error.name or "").partition(".")[0]
        if package in ("", "jaxremat"):
            raise
        raise MissingDependencyError(
            f"jaxremat.{name} needs the package {package}, which isn't installed",
            next_step="pip install jaxremat, with its dependencies",
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
