"""Flax NNX models whose losses change their state: dropout's counters and BatchNorm's means, with a policy as without one.

`tests/programs.py` draws such losses too.
"""

import functools
import operator
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxremat
from jaxremat.errors import UsageError
from jaxremat.workload.user_code import wrap_user_function
from tests.equality import assert_same_bits
from tests.nnx_models import LAYERS, WIDTH, Block, Net, Scanned, X, called, loss, with_shared_variables
from tests.program_checks import assert_close


def sown(model: Any, x: jax.Array) -> Any:
    model.sow(nnx.Intermediate, "seen", x.mean())
    return loss(model, x), nnx.pop(model, nnx.Intermediate)


def changing_structure(model: Any, x: jax.Array) -> jax.Array:
    model.train()
    model.added, model.calls = nnx.Variable(x.mean()), getattr(model, "calls", 0) + 1
    del model.blocks[0].drop
    model.blocks[0].drop = nnx.Dropout(0.5, rngs=nnx.Rngs(7))
    return loss(model, x)


def random_input(model: Any, rngs: Any, x: jax.Array) -> jax.Array:
    return loss(model, x * jax.random.normal(rngs.noise(), x.shape))


def grad(wrap: Any, function: Any = loss, **options: Any) -> Any:
    return nnx.value_and_grad(wrap(function), **options)


#: What is called, by `wrap` as the function's policy, with a model.
CALLS = {
    "alone": (Net, lambda wrap, model: wrap(loss)(model, X)),
    "differentiated": (Net, lambda wrap, model: grad(wrap)(model, X)),
    "second argument": (Net, lambda wrap, model: grad(wrap, lambda x, model: loss(model, x), argnums=1)(X, model)),
    "keyword in a dict": (Net, lambda wrap, model: wrap(lambda x, *, of: loss(of["it"], x))(X, of={"it": model, "n": 3})),
    "some variables": (Net, lambda wrap, model: grad(wrap, argnums=nnx.DiffState(0, nnx.PathContains("kernel")))(model, X)),
    "two models": (Net, lambda wrap, model: wrap(lambda a, b, x: loss(b, a(x)))(model, Net(seed=1), X)),
    "one model twice": (Net, lambda wrap, model: wrap(lambda a, b, x: loss(b, a(x)))(model, model, X)),
    "shared variables": (with_shared_variables, lambda wrap, model: grad(wrap)(model, X)),
    "returned": (Net, lambda wrap, model: grad(wrap, lambda m, x: (loss(m, x), m), has_aux=True)(model, X)[0][1] is model),
    "random stream": (Net, lambda wrap, model: grad(wrap, random_input)(model, nnx.Rngs(noise=5), X)),
    "sow": (Net, lambda wrap, model: grad(wrap, sown, has_aux=True)(model, X)),
    "structure": (Net, lambda wrap, model: grad(wrap, changing_structure)(model, X)),
    "nnx.remat": (Net, lambda wrap, model: nnx.remat(wrap(loss))(model, X)),
    "state": (Net, lambda wrap, model: of_state(wrap, model)),
}


def of_state(wrap: Any, model: Any) -> Any:
    graph, state = nnx.split(model)
    result = wrap(lambda state, x: loss(nnx.merge(graph, state), x))(state, X)
    nnx.update(model, state)
    return result


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize(("call", "policy"), [("differentiated", "none"), *((call, "nothing") for call in CALLS)])
def test_one_operation_at_a_time(call, policy):
    """Two calls, under `jax.disable_jit`: the same results and state, also where the call changed what state there is."""
    make, run = CALLS[call]
    got, want = [], []
    with jax.disable_jit():
        for found, wrap in ((want, lambda f: f), (got, lambda f: jaxremat.with_policy(f, policy))):
            model = make()
            before = objects(model)
            found += [run(wrap, model), run(wrap, model), nnx.state(model)]
            assert call in ("sow", "structure") or all(map(operator.is_, objects(model), before))
    assert_same_bits(*(jax.tree.map(as_bits, found) for found in (got, want)))


def objects(model: Any) -> list[Any]:
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module | nnx.Variable)]


def as_bits(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else np.asarray(leaf)


def trained(function: Any, model: Any) -> list[Any]:
    """Three losses with their gradients."""
    return called(lambda model: nnx.value_and_grad(function)(model, X), model, 3)


@functools.cache
def without_policy(make: Any) -> tuple[Any, list[Any]]:
    """The model after three calls, and their results."""
    model = make()
    results = trained(loss, model)
    return model, results


def check_training(model: Any, results: list[Any], make: Any) -> None:
    """The results and the state of three calls are those without a policy."""
    plain, want = without_policy(make)
    assert_close(results, want)
    assert_close(nnx.state(model, nnx.BatchStat), nnx.state(plain, nnx.BatchStat))
    assert_same_bits(nnx.state(model, nnx.RngCount), nnx.state(plain, nnx.RngCount))


@pytest.mark.full
@pytest.mark.parametrize(("make", "policy"), [(Net, "save:dot_general"), (Net, "every:2"), (Scanned, "nothing")])
def test_compiled(make, policy):
    model = make()
    got = trained(jaxremat.with_policy(loss, policy), model)
    check_training(model, got, make)
    assert len({float(value) for value, _ in got}) == 3, "each call has masks of its own"
    assert all(np.abs(mean).min() > 0 for mean in jax.tree.leaves(nnx.state(model, nnx.BatchStat)))


@pytest.mark.full
@pytest.mark.parametrize("modes", [(False, True), (True, False)])
def test_other_modes_of_nnx(modes):
    graph, updates = modes
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(updates):
        model, plain = Net(), Net()
        got, want = (nnx.jit(f)(m, X) for f, m in ((jaxremat.with_policy(loss, "dots"), model), (loss, plain)))
    assert_close(got, want)
    assert_close(nnx.state(model, nnx.BatchStat), nnx.state(plain, nnx.BatchStat))


@pytest.mark.full
def test_what_is_not_changed_may_come_from_outside():
    """A model in evaluation mode that an outer `jax.jit` closes over. One in training mode is refused."""
    model = Net()
    model.eval()
    under_policy = jaxremat.with_policy(loss, "nothing")
    assert_close(jax.jit(lambda x: under_policy(model, x))(X), loss(model, X))
    model.train()
    with pytest.raises(UsageError):
        jax.jit(lambda x: under_policy(model, x))(X)


def test_finding_layers_changes_no_state():
    model = Net()
    before = nnx.clone(model)
    assert jaxremat.find_layers(loss, model, X).num_layers == LAYERS
    assert jaxremat.find_layers(loss, nnx.eval_shape(Net), X).num_layers == LAYERS
    assert_same_bits(*(jax.tree.map(as_bits, nnx.state(some)) for some in (model, before)))


def closing_over(model: Any) -> Any:
    return lambda x: loss(model, x)


def captured(params: Any, x: jax.Array) -> jax.Array:
    graph, _, rest = nnx.split(Net(), nnx.Param, ...)
    with_rest = jaxremat.with_policy(lambda params, x: loss(nnx.merge(graph, params, rest), x), "nothing")
    return with_rest(params, x)


def refs_in_layers(x: jax.Array) -> Any:
    total = jax.new_ref(jnp.zeros(()))

    def function(params: Any, x: jax.Array) -> jax.Array:
        for matrix in params:
            x = x + jnp.tanh(x @ matrix)
            total[...] = total[...] + x.mean()
        return jnp.mean(x**2)

    return jaxremat.with_policy(function, "nothing")(LAYERS * [jnp.eye(WIDTH)], x)


@pytest.mark.parametrize(
    "call",
    [
        lambda: jaxremat.with_policy(closing_over(Net()), "none")(X),
        lambda: captured(nnx.state(Net(), nnx.Param), X),
        lambda: wrap_user_function(jax.jit(closing_over(Net())))(X),
        lambda: refs_in_layers(X),
        pytest.param(
            lambda: jaxremat.with_policy(loss, "none")(nnx.var_defaults(ref=True)(Net)(), X), marks=pytest.mark.full
        ),
        lambda: jaxremat.with_policy(loss, "none")(nnx.var_defaults(hijax=True)(Net)(), X),
    ],
    ids=["closure", "merged with a captured state", "user code", "references in layers", "ref variables", "hijax variables"],
)
def test_state_that_is_not_carried_is_refused(call):
    with pytest.raises(UsageError) as raised:
        call()
    assert raised.value.next_step


@pytest.mark.full
def test_nnx_is_not_imported_for_other_programs():
    program = (
        "import sys, jax.numpy as jnp, jaxremat\n"
        "loss = jaxremat.with_policy(lambda p, x: (jnp.tanh(jnp.tanh(x @ p) @ p) @ p).sum(), 'none')\n"
        "loss(jnp.eye(2), jnp.eye(2))\nassert 'flax.nnx' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# Layers of a user's own under `remat`.


def matmuls(model: Any) -> int:
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    function = jax.grad(lambda params, rest: loss(nnx.merge(graph, params, nnx.clone(rest)), X))
    return str(jax.make_jaxpr(function)(params, rest)).count("dot_general[")


@pytest.mark.parametrize(("policy", "again"), [("nothing", LAYERS), ("save:dot_general", 0)])
def test_matmuls_of_a_class_under_remat(policy, again):
    wrapped = jaxremat.remat(Block, policy)
    model, plain = (nnx.eval_shape(lambda block=block: Net(block)) for block in (wrapped, Block))
    assert [path for path, _ in jax.tree.leaves_with_path(nnx.state(model))] == [
        path for path, _ in jax.tree.leaves_with_path(nnx.state(plain))
    ]
    assert wrapped.__name__ == "Block"
    assert matmuls(model) == matmuls(plain) + again


@pytest.mark.full
def test_remat_of_a_class():
    model = Net(jaxremat.remat(Block, "save:dot_general"))
    check_training(model, trained(loss, model), Net)


@pytest.mark.full
def test_remat_of_a_function_of_a_module():
    block, plain = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))
    function = jaxremat.remat(lambda block, x: block(x), "nothing")
    with jax.disable_jit():
        assert_same_bits([function(block, X), function(block, X)], [plain(X), plain(X)])
    assert_same_bits(nnx.state(block, nnx.BatchStat), nnx.state(plain, nnx.BatchStat))


@pytest.mark.full
def test_remat_of_an_equinox_class():
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):
        up: Any
        activation: Any = jnp.tanh

        def __call__(self, x: jax.Array, scale: float, *, twice: bool = False) -> jax.Array:
            return self.activation(self.up(x)) @ self.up.weight * (scale if twice else 1)

    up = eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0))
    wrapped, plain = jaxremat.remat(Layer, "nothing")(up), Layer(up)

    def of_layer(layer: Any) -> Any:
        arrays, rest = eqx.partition(layer, eqx.is_array)
        return lambda: jax.value_and_grad(lambda arrays: eqx.combine(arrays, rest)(X[0], 0.5, twice=True).sum())(arrays)

    leaves = [jax.tree.leaves_with_path(of_layer(layer)()) for layer in (wrapped, plain)]
    assert [path for path, _ in leaves[0]] == [path for path, _ in leaves[1]]
    got, want = ([leaf for _, leaf in some] for some in leaves)
    assert_close(got, want)
    counts = [str(jax.make_jaxpr(of_layer(layer))()).count("dot_general[") for layer in (wrapped, plain)]
    assert counts[0] == counts[1] + 1
    with pytest.raises(UsageError):
        jaxremat.remat(plain, "nothing")


@pytest.mark.parametrize("target", [Block(nnx.Rngs(0)), nnx.List, dict])
def test_what_has_no_call_of_its_own_is_refused(target):
    with pytest.raises(UsageError):
        jaxremat.remat(target, "nothing")
