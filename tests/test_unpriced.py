"""What predicted times leave out or guess is said, and matmuls take the rate of their precision."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxremat.chips.target import load_target
from jaxremat.xla import clock, hlo
from jaxremat.xla.collectives import collective_of
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.kernels import kernels_of, unpriced
from jaxremat.xla.recomputed import recomputed_flops, saved_and_recomputed
from tests.roofline import LOOP, SPEED

X = "f32[1024,1024]{1,0}"


def entry(*lines: str) -> hlo.Module:
    """A module whose result is made of `%x` by the lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(
        f"HloModule m, is_scheduled=true\n\nENTRY %main (x: {X}) -> {X} {{\n  %x = {X} parameter(0)\n{body}\n}}\n"
    )


def test_a_loop_of_unknown_length_counts_once_and_one_of_no_iteration_not_at_all():
    unknown, none = (
        hlo.parse(LOOP.format(trips=trips)) for trips in ("", ', backend_config={"known_trip_count":{"n":"0"}}')
    )
    assert unpriced(unknown) == ("1 loop of unknown length counts once",)
    assert unpriced(none) == ()
    assert clock.predict_step_time(none, SPEED).step_s == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            f'ROOT %c = {X} custom-call(%x), custom_call_target="te_gemm_ffi"',
            "1 call of te_gemm_ffi counts by its bytes alone",
        ),
        (f'ROOT %c = {X} custom-call(%x), custom_call_target="__cub$DeviceRadixSortKeys"', ""),
        (f'ROOT %c = {X} custom-call(%x, %x), custom_call_target="__cublas$gemm"', ""),
        ("ROOT %c = f64[8,8]{1,0} dot(%d, %d), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "1 matmul of f64"),
    ],
)
def test_what_no_table_knows_is_named(line: str, said: str):
    before = ("%d = f64[8,8]{1,0} broadcast(%x)",) if "f64" in line else ()
    found = unpriced(entry(*before, line))
    assert [text.startswith(said) for text in found] == [True] * bool(said)


@pytest.mark.full
def test_what_the_host_computes_uses_the_link(h100):
    from jax.experimental import compute_on

    run_on: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)  # jax 0.12 gives it the plain name
    on_host = run_on(lambda y: jnp.sin(y @ y), compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
    x = jax.ShapeDtypeStruct((1024, 1024), "float32")
    module = lower_and_compile(lambda x: on_host(x * 2) @ x, (x,), h100).module
    assert unpriced(module) == ("1 computation on the host counts by its bytes alone",)
    (host,) = [kernel for kernel in kernels_of(module) if kernel.host_bytes]
    assert (host.host_bytes, host.num_bytes, host.flops) == (2 * 4 * 1024**2, 0, 0)
    assert clock.predict_step_time(module, h100.speed).flops == 2 * 1024**3


@pytest.mark.full
def test_float32_of_the_highest_precision_has_the_rate_without_tf32(h100):
    x = jax.ShapeDtypeStruct((4096, 4096), "float32")
    default, highest = (
        lower_and_compile(lambda a, p=p: jnp.dot(a, a, precision=p), (x,), h100).module for p in (None, "highest")
    )
    assert [kernel.dtype for kernel in kernels_of(default)] == ["f32"]
    assert [kernel.dtype for kernel in kernels_of(highest)] == ["f32 highest"]
    assert clock.peak_flops_of(highest, h100.speed) == pytest.approx(66.9e12, rel=1e-3)  # NVIDIA's datasheet says 67
    slower = clock.predict_step_time(highest, h100.speed).step_s / clock.predict_step_time(default, h100.speed).step_s
    assert slower > 5
    plain = dataclasses.replace(h100.speed, plain_f32_flops=None)
    assert clock.peak_flops_of(highest, plain) == h100.speed.f32_flops


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize("num_branches", [2, 8])
def test_the_recompute_of_a_conditional_is_that_of_one_branch(num_branches: int):
    def loss(w: jax.Array, x: jax.Array, kinds: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            (w, kind) = layer
            branches = [lambda x, n=n: jnp.tanh((x @ w[0] + n) @ w[1]) for n in range(num_branches)]
            return x + jax.lax.switch(kind, branches, x), None

        y, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), x, (w, kinds))
        return (y.astype(jnp.float32) ** 2).mean()

    shapes = ((4, 2, 256, 256), "bfloat16"), ((512, 256), "bfloat16"), ((4,), "int32")
    args = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    done = lower_and_compile(jax.grad(loss), args, load_target("h100-80gb"))
    counted = saved_and_recomputed(done)
    (matmuls,) = [one for one in counted.again if one.operation == "matmul"]
    assert (matmuls.num_forward, matmuls.num_again) == (8, 8)
    assert recomputed_flops(done, counted) == 8 * 2 * 512 * 256 * 256


def test_bytes_of_collectives_in_other_forms():
    module = entry(
        "%i = s64[8]{0} constant({0,0,0,0,0,0,0,0})",
        f"%r = {X} ragged-all-to-all(%x, %x, %i, %i, %i, %i), replica_groups={{{{0,1,2,3}}}}",
        "ROOT %g = f32[4096,1024]{1,0} all-gather(%x), replica_groups={}, dimensions={0}",
    )
    computation = module.entry_computation
    sizes = [collective_of(computation, computation.by_name[name]).num_bytes for name in "rg"]
    assert sizes == [4 * 1024**2, 4 * 4 * 1024**2]
