"""What jaxremat expects of JAX beyond what JAX promises: a test for each thing in `jaxremat/policy/jax_private.py`.

A failure here, with a newer jax, says what to change there. All other tests rest on these.
"""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxremat.chips.target import load_target
from jaxremat.mesh.axes import parse_mesh
from jaxremat.policy import jax_private
from jaxremat.policy.spec import Names

X = np.ones((4, 4), np.float32)


def equations(function: Callable[..., Any], *args: Any) -> list[Any]:
    return list(jax.make_jaxpr(function)(*args).jaxpr.eqns)


def the(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """The one equation of this primitive."""
    (eqn,) = [eqn for eqn in equations(function, *args) if eqn.primitive.name == name]
    return eqn


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("data",))


# Policies.


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_checkpoint_and_its_parameters(in_backward):
    function = jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)
    eqns = equations(jax.grad(lambda x: function(x).sum()) if in_backward else function, X)
    (eqn,) = filter(jax_private.is_checkpoint, eqns)
    assert eqn.params["policy"] is jax.checkpoint_policies.dots_saveable
    assert (eqn.params["prevent_cse"], eqn.params["differentiated"]) == (False, in_backward)
    assert [inner.primitive.name for inner in jax_private.callee(eqn).jaxpr.eqns][-1] in ("sin", "mul", "transpose", "cos")


def test_what_a_policy_answers():
    """JAX's policies say True and False, its names policies three objects."""
    name, other = (the("name", functools.partial(checkpoint_name, name=text), X) for text in ("a", "b"))
    policies = jax.checkpoint_policies
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"], names_which_can_be_offloaded=["b"], offload_src="device", offload_dst="pinned_host"
    )
    for policy, saved in ((policies.everything_saveable, (1, 1)), (policies.nothing_saveable, (0, 0)), (offload, (1, 1))):
        answers = [policy(eqn.primitive, *(var.aval for var in eqn.invars), **eqn.params) for eqn in (name, other)]
        assert [*map(jax_private.is_save_decision, answers)] == [bool(one) for one in saved]
        assert [*map(jax_private.is_recompute_decision, answers)] == [not one for one in saved]
    assert jax_private.is_recompute_decision(offload(the("sin", jnp.sin, X).primitive))


def test_the_names_inside_a_policy():
    policies = jax.checkpoint_policies
    both = policies.save_from_both_policies(policies.save_only_these_names("a", "b"), Names(("c",)).to_jax())
    found = list(jax_private.inside_policy(both))
    texts = {text for thing in found if isinstance(thing, set | frozenset | tuple | list) for text in thing}
    assert {text for text in texts if isinstance(text, str)} == {"a", "b"}
    assert [thing for thing in found if isinstance(thing, Names)] == [Names(("c",))]


# Checkpoint names.


@pytest.mark.parametrize("remat3", [False, True])
def test_a_checkpoint_name(remat3):
    if remat3 and not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this jax has no option jax_remat3")
    if remat3:
        jax.config.update("jax_remat3", True)
    try:
        eqns = equations(lambda x: jnp.sin(checkpoint_name(x, "a")), X)
    finally:
        if remat3:
            jax.config.update("jax_remat3", False)
    assert [*map(jax_private.written_name, eqns)] == ["a", ""]


# Equations.


def test_an_equation_that_changes_an_array():
    def changing(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] = jnp.sin(x)
        return ref[...]

    assert any(map(jax_private.changes_reference, equations(changing, X)))
    assert not any(map(jax_private.changes_reference, equations(jnp.sin, X)))


@pytest.mark.parametrize(
    "function",
    [jnp.sin, lambda x: jax.lax.top_k(x, 2), jax.jit(jnp.tanh), jax.nn.relu],
    ids=["one", "several", "jit", "jvp"],
)
def test_an_equation_is_bound_again(function):
    (eqn,) = equations(function, X)
    for got, want in zip(jax_private.bind(eqn, [X]), jax.tree.leaves(function(X)), strict=True):
        np.testing.assert_array_equal(got, want)


@jax.custom_vjp
def squared(x: Any) -> Any:
    return x**2


squared.defvjp(lambda x: (x**2, x), lambda x, bar: (2 * x * bar,))


@jax.custom_vjp
def cubed(x: Any, power: Any) -> Any:
    return x**power


cubed.defvjp(
    lambda x, power: (cubed(x, power), checkpoint_name(x**2, "square")), lambda square, bar: (3 * square * bar, None)
)


def test_the_forward_rule_of_a_derivative():
    """Its integers aren't differentiated, and a function that it calls has no rule there."""
    rule = jax_private.forward_rule(equations(lambda x: cubed(x, 3), X)[-1])
    assert rule is not None
    assert [name for name in map(jax_private.written_name, rule.eqns) if name] == ["square"]
    assert jax_private.forward_rule(the("sin", jnp.sin, X)) is None


def test_the_forward_rule_of_a_function_that_closes_over_an_array():
    """JAX refuses to differentiate by such an array. An equation that was bound again doesn't say that it has one."""
    table = jnp.arange(3.0)

    @jax.custom_vjp
    def looked_up(x: Any) -> Any:
        return x * table

    looked_up.defvjp(lambda x: (looked_up(x), checkpoint_name(x * 2, "twice")), lambda _, bar: (bar * table,))
    eqn = equations(looked_up, jnp.ones(3))[-1]
    again = equations(lambda x: jax_private.bind(eqn, [table, x]), jnp.ones(3))[-1]
    for one in (eqn, again):
        rule = jax_private.forward_rule(one)
        assert rule is not None
        assert [name for name in map(jax_private.written_name, rule.eqns) if name] == ["twice"]


def test_complex_results():
    def of_complex(x: Any) -> Any:
        z = jax.lax.complex(x, 2 * x).astype(jnp.complex64)
        z = jnp.fft.fft(z) * jnp.exp(z @ z)
        return z.real + z.imag, jnp.abs(z), jnp.fft.irfft(jnp.fft.rfft(x)), x.astype(jnp.complex64)

    for eqn in jax.make_jaxpr(of_complex)(X).eqns:
        if not [*jax_private.core.jaxprs_in_params(eqn.params)]:
            results = any(jnp.issubdtype(var.aval.dtype, jnp.complexfloating) for var in eqn.outvars)
            avals = [var.aval for var in eqn.invars]
            assert jax_private.makes_complex(eqn.primitive, avals, eqn.params) == results, eqn.primitive.name


@pytest.mark.parametrize(("function", "name"), [(jax.jit(jnp.tanh), "tanh"), (jax.nn.relu, "relu"), (squared, "squared")])
def test_what_is_called_and_its_name(function, name):
    eqn = equations(function, X)[-1]
    while len(inner := jax_private.callee(eqn).jaxpr.eqns) == 1 and inner[0].params.get("name") == name:
        (eqn,) = inner  # jnp's functions are jitted themselves
    assert jax_private.called_name(eqn) == name
    assert len(jax_private.callee(eqn).jaxpr.invars) == 1


@pytest.mark.parametrize("kind", ["core_call", "closed_call"])
def test_a_call_in_another_form(kind):
    """Old names of calls stay callable: their program is `jaxpr` or `call_jaxpr`."""
    closed = jax.make_jaxpr(jnp.sin)(X)
    eqn = the("jit", jax.jit(jnp.sin), X)
    params = {"call_jaxpr": closed if kind == "closed_call" else closed.jaxpr}
    assert jax_private.callee(eqn.replace(params=params)).jaxpr is closed.jaxpr


def test_the_operands_of_a_scan():
    shared = jnp.ones(4)
    eqn = the("scan", lambda x: jax.lax.scan(lambda c, own: ((c[0] + own * shared, 2 * c[1]), own), (x[0], x[1]), x), X)
    assert jax_private.num_operands(eqn) == (1, 2)
    assert (eqn.params["length"], eqn.params["reverse"], eqn.params["unroll"]) == (4, False, 1)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_jit_that_pins_shardings(pinned):
    where = NamedSharding(one_device(), PartitionSpec())
    function = jax.jit(jnp.negative, out_shardings=where) if pinned else jax.jit(jnp.negative)
    eqn = the("jit", function, X)
    assert jax_private.pins_shardings(eqn) == pinned
    assert [*map(jax_private.is_unspecified, eqn.params["out_shardings"])] == [not pinned]
    assert not jax_private.pins_shardings(the("neg", jnp.negative, X))


def test_a_shard_map_again():
    spec = PartitionSpec("data")
    eqn = the("shard_map", jax.shard_map(jnp.negative, mesh=one_device(), in_specs=spec, out_specs=spec), X)
    assert jax_private.shard_map_devices(eqn) == 1
    np.testing.assert_array_equal(jax_private.shard_map_as(eqn, lambda x: (2 * x,))(X)[0], 2 * X)
    again = the("shard_map", jax_private.shard_map_as(eqn, lambda x: (2 * x,)), X)
    for name in ("mesh", "in_specs", "out_specs", "newly_manual_axes", "check_vma"):
        assert again.params[name] == eqn.params[name], name


@pytest.mark.parametrize("in_backward", [False, True])
def test_fused_attention(in_backward):
    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn").astype(jnp.float32).sum()

    q, kv = (jax.ShapeDtypeStruct((2, length, 4, 64), jnp.bfloat16) for length in (128, 256))
    jaxpr = jax.make_jaxpr(jax.grad(attention) if in_backward else attention)(q, kv, kv)

    def kernels(eqns: Any) -> dict[str, Any]:
        found = {}
        for eqn in eqns:
            if sizes := jax_private.attention_sizes(eqn):
                found[eqn.primitive.name] = sizes
            for inner in jax_private.core.jaxprs_in_params(eqn.params):
                found |= kernels(inner.eqns)
        return found

    found = kernels(jaxpr.jaxpr.eqns)
    assert jax_private.FUSED_ATTENTION in found
    assert any("_bwd" in name for name in found) == in_backward
    assert {(scores, q, v) for scores, q, v, *_ in found.values()} == {((2, 4, 128, 256), 64, 64)}
    assert all("CAUSAL" in mask and window == 0 for *_, mask, window in found.values())


# Where an equation was traced.


def test_scopes():
    def scoped(x: Any) -> Any:
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.sin(x)

    plain, mapped = equations(scoped, X)[0], equations(jax.vmap(scoped), X)[0]
    for eqn in (plain, mapped):
        assert jax_private.named_scopes(eqn.source_info.name_stack) == ("outer", "inner")
    assert jax_private.named_scopes(jax_private.stack_of(("a", "b"))) == ("a", "b")
    assert jax_private.named_scopes(jax_private.stack_of()) == ()
    backward = [
        jax_private.is_transposed(eqn.source_info.name_stack) for eqn in equations(jax.grad(lambda x: scoped(x[0, 0])), X)
    ]
    assert backward[0] is False
    assert any(backward)


def test_the_context_of_an_equation():
    """Its scopes are within those around it, and its line is its own."""
    (eqn,) = equations(jnp.sin, X)

    def again(x: Any) -> Any:
        with (
            jax.named_scope("around"),
            jax_private.context_of(eqn, jax_private.stack_of(("own",)), eqn.source_info.traceback),
        ):
            return jnp.cos(x)

    (traced,) = equations(again, X)
    assert jax_private.named_scopes(traced.source_info.name_stack) == ("around", "own")
    assert traced.source_info.traceback is eqn.source_info.traceback


@pytest.mark.parametrize("partitionable", [False, True])
def test_the_configuration_of_an_equation(partitionable):
    with jax.threefry_partitionable(partitionable):
        (eqn,) = equations(jnp.sin, X)
    with jax.threefry_partitionable(not partitionable), jax_private.context_of(eqn, jax_private.stack_of(), None):
        assert jax.config.jax_threefry_partitionable == partitionable  # pyright: ignore[reportAttributeAccessIssue]


# XLA.


def test_what_fused_attention_on_a_mesh_is_called_with():
    """The lowered program has an address. Beside it are the function that divides the operation, and its static arguments."""
    mesh = load_target("h100-80gb", parse_mesh("fsdp=2")).mesh
    assert mesh
    x = jax.ShapeDtypeStruct((4, 64, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    attention = functools.partial(jax.nn.dot_product_attention, local_window_size=(16, 0), implementation="cudnn")
    lowered = jax.jit(lambda x: attention(x, x, x, is_causal=True)).trace(x).lower(lowering_platforms=("cuda",))
    (address,) = re.findall(r'backend_config = "(\d+)"', lowered.as_text())
    called = jax_private.divided_in_python(address)
    assert called
    assert "dot_product_attention_fwd_partition" in called
    assert ", 17, " in called, "the window counts the token itself"
    assert jax_private.divided_in_python("1") is None


def test_the_names_of_arguments_and_results():
    """XLA has them from the traced program, also where they were changed."""
    traced = jax.jit(lambda w, x: {"y": w["a"] @ x}).trace({"a": jnp.ones((2, 2))}, jnp.ones(2))
    assert jax_private.argument_names(traced.jaxpr) == ("w['a']", "x")
    assert jax_private.result_names(traced.jaxpr) == ("result['y']",)
    jax_private.name_arguments(traced.jaxpr, ["w.a", "x"])
    assert jax_private.argument_names(traced.jaxpr) == ("w.a", "x")
    assert 'loc("w.a")' in traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)


@pytest.mark.full
def test_the_flags_that_xla_read():
    """Those of the process, as it was started."""
    code = "from jaxremat.policy.jax_private import xla_flags; print(b'a-pass' in xla_flags())"
    environment = os.environ | {"XLA_FLAGS": "--xla_disable_hlo_passes=a-pass"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
    assert b"a-pass" not in jax_private.xla_flags()
    assert jax_private.xla_flags() == jax_private.xla_flags()
