"""A model where --model needs a workload is rejected, with how a workload is made of it; of each framework's own classes."""

import pytest

from jaxremat.errors import UsageError
from jaxremat.workload.load import MODELS, load_factory

IMPORTS = {
    "flax.linen.module.Module": "import flax.linen as nn\nclass Net(nn.Module): pass\n",
    "flax.nnx.module.Module": "from flax import nnx\nclass Net(nnx.Module): pass\n",
    "equinox._module._module.Module": "import equinox as eqx\nclass Net(eqx.Module): pass\n",
}


@pytest.mark.parametrize("base", MODELS)
def test_a_model_in_place_of_a_workload(write, base):
    if base.startswith("equinox"):
        pytest.importorskip("equinox")
    write("train.py", f"{IMPORTS[base]}model = Net()\ndef made(): return model")
    kind, how = MODELS[base]
    for attribute in ("made", "model", "Net"):
        with pytest.raises(UsageError) as caught:
            load_factory(f"train.py:{attribute}")()
        assert kind in caught.value.got
        assert caught.value.next_step == how
        assert caught.value.allowed == ("" if attribute == "made" else "made")
