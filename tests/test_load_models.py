"""A model where --model needs a workload is refused, with how a workload is made of it; of each framework's own classes."""

import pytest

from jaxremat.errors import UsageError
from jaxremat.workload.load import load_factory

NOT_ONE = "neither a jaxremat.Workload nor a function that returns one"
FLAX = "import flax.linen as nn\nclass Net(nn.Module): pass\n"
NNX = "from flax import nnx\nclass Net(nnx.Module): pass\n"
EQUINOX = "import equinox as eqx\nclass Net(eqx.Module): pass\n"
OF_LINEN = (
    "Next: return jaxremat.Workload(loss=loss, params=params, batch=batch), with params = jax.eval_shape(model.init, "
    "jax.random.key(0), batch) and a loss(params, batch) that calls model.apply(params, batch)."
)
OF_NNX = (
    "Next: return jaxremat.Workload(loss=loss, params=model, batch=batch), with model = nnx.eval_shape(lambda: "
    "Net(nnx.Rngs(0))) and a loss(model, batch) that calls model(batch)."
)
OF_EQUINOX = (
    "Next: return jaxremat.Workload(loss=loss, params=params, batch=batch), with params, static = eqx.partition(model, "
    "eqx.is_array) and a loss(params, batch) that calls eqx.combine(params, static)(batch)."
)


def refusal_of(attribute: str) -> str:
    with pytest.raises(UsageError) as raised:
        load_factory(f"train.py:{attribute}")()
    return str(raised.value)


@pytest.mark.parametrize(
    ("imports", "kind", "how"),
    [
        (FLAX, "a Flax Linen module", OF_LINEN),
        (NNX, "a Flax NNX module", OF_NNX),
        pytest.param(EQUINOX, "an Equinox module", OF_EQUINOX, id="equinox"),
    ],
)
def test_a_model_in_place_of_a_workload(write, imports, kind, how):
    if imports == EQUINOX:
        pytest.importorskip("equinox")
    write("train.py", f"{imports}model = Net()\ndef made(): return model")
    messages = {
        "made": f"train.py:made returned {kind}, not a jaxremat.Workload. {how}",
        "model": f"--model 'train.py:model': 'model' is {kind}, {NOT_ONE}. Allowed: made. {how}",
        "Net": f"--model 'train.py:Net': 'Net' is {kind}, {NOT_ONE}. Allowed: made. {how}",
    }
    assert {name: refusal_of(name) for name in messages} == messages
