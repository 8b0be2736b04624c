"""The model of a request: what is known before its code runs, and what makes its workload.

    model = given_model(GivenModel("train.py:workload"))
    model.losses                            # ("own",)
    model.factory(request, target, None)    # the WorkloadFactory

A preset, a `config.json` and a file of the user's own are values of this class. What a request does with them is the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxremat.config import Layout, TrainConfig
from jaxremat.mesh.axes import MeshShape
from jaxremat.workload.given import OWN_LOSS, GivenModel
from jaxremat.workload.source import source_hash
from jaxremat.workload.trainable import Narrowed

if TYPE_CHECKING:
    from jaxremat.workload.factory import WorkloadFactory


@dataclass(frozen=True)
class Model:
    """A model that the flags request.

    Attributes:
        name: what --model or --hf calls it.
        config: what was requested, as the trials of a sweep have it.
        factory: `factory(request, target, attention)` makes its workloads. For a list about the model itself the target is
            None. The attention is that of an earlier compile, such as `xla`; None chooses it, where there is a choice.
        line: the line of the heading that says where its sizes come from. Empty for what --model names.
        has_own_batch: whether its code says which batch it is written for.
        num_layers: the number of its layers. None where only its code says it.
        losses: the losses that a plan chooses among.
        layouts: the ways to run its layers that a plan chooses among.
        num_experts: the most devices that the mesh's axis `expert` can have.
        has_tensor: whether the mesh's axis `tensor` divides its layers.
        max_seq_len: the longest sequence that it takes. None where there is no limit, or only its code says it.
        seq_len: tokens per sequence where no flag says it.
        check: `check(train)` raises UsageError where the model can't be trained so.
        flops_at: what a sequence of a length costs beside one of another length, such as its FLOPs.
        check_mesh: `check_mesh(mesh)` raises UsageError where the mesh can't divide the model.
        no_effect: by field, why its flag changes nothing of this model.
        source_hash: the hash of code that isn't this package's. None where there is none.
    """

    name: str
    config: Mapping[str, Any]
    factory: "Callable[[Any, Any, str | None], WorkloadFactory]" = field(compare=False)
    line: str = ""
    has_own_batch: bool = True
    num_layers: int | None = None
    losses: tuple[str, ...] = (OWN_LOSS,)
    layouts: tuple[Layout, ...] = ()
    num_experts: int = 1
    has_tensor: bool = False
    max_seq_len: int | None = None
    seq_len: int = TrainConfig.seq_len
    check: Callable[[TrainConfig], None] = field(default=lambda train: None, compare=False)
    flops_at: Callable[[int], float] = field(default=float, compare=False)
    check_mesh: Callable[[MeshShape], None] = field(default=lambda mesh: None, compare=False)
    no_effect: Mapping[str, str] = field(default_factory=dict)
    source_hash: Callable[[], str] | None = field(default=None, compare=False)


def given_model(given: GivenModel) -> Model:
    """The model of a workload of the user's own. Making its factory imports its code."""

    def factory(request: Any, target: Any, attention: str | None) -> "WorkloadFactory":
        from jaxremat.mesh.sharding import abstract_mesh
        from jaxremat.workload.factory import given_factory

        mesh = target.mesh if target is not None else abstract_mesh(request.mesh) if request.mesh else None

        def devices() -> Sequence[Any]:
            from jaxremat.chips.target import load_target

            return (target or load_target(request.flags.target, request.mesh)).devices

        return given_factory(given, mesh, target, devices, *request.batches[:1])

    no_effect = {"sample_tokens": "the workload writes no text"}  # unless its code says how
    return Model(given.spec, asdict(given), factory, no_effect=no_effect, source_hash=lambda: source_hash(given.spec))


def narrowed(model: Model, to: Narrowed) -> Model:
    """The model of which only some parameters are trained."""
    if not to:
        return model

    def factory(*args: Any) -> "WorkloadFactory":
        return replace(model.factory(*args), narrowed=to)

    return replace(model, factory=factory, config={**model.config, **to.config()})
