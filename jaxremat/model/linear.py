"""The linear layers of the decoder: plain, with a LoRA adapter, or with a quantized kernel.

    linear(config, 1024, "wi_0", (), bias=False)(x)    # x @ kernel, and beside it alpha / rank * x @ lora_a @ lora_b

A quantized kernel has codes of the kernel's shape, and scales. It is converted to the compute dtype where a matmul reads it, in
the forward pass and again in the backward pass, so that no policy saves the converted kernel.

* `int8`: a scale for each output, as in LLM.int8().
* `nf4`: codes of 4 bits for the quantiles of a normal distribution, and a scale for each 64 inputs of an output. The scales are
  in the compute dtype and aren't quantized themselves: 4.25 bits a weight.

References:
    Hu et al. 2021, "LoRA"; Dettmers et al. 2022, "LLM.int8()"; Dettmers et al. 2023, "QLoRA", appendix E, for the values of NF4;
    peft/tuners/lora/layer.py, for the initial values: A as `nn.Linear`'s kernels, B zero.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxremat.config import ModelConfig, Quantized
from jaxremat.config.lora import LINEAR_LAYERS, parse_lora
from jaxremat.model.gathers import gathering

INIT = nn.initializers.normal(0.02)
#: Inputs that share a scale of NF4.
NF4_BLOCK = 64
#: The 16 values of NF4.
NF4 = np.asarray(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    np.float32,
)  # fmt: skip


class Linear(nn.Module):
    """A linear layer whose kernel is quantized, or that has an adapter.

    Attributes:
        config: the sizes, the dtypes, the adapters and how kernels are quantized.
        features: the sizes of the outputs.
        axes: how many of the last axes are inputs.
        use_bias: whether a bias is added.
        gathers: the checkpoint names of the kernels whose gather a policy decides about (`gathers.py`).
    """

    config: ModelConfig
    features: tuple[int, ...]
    axes: int = 1
    use_bias: bool = False
    gathers: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The inputs times the kernel, and the adapter's part."""
        c, lora, axes = self.config, parse_lora(self.config.lora), self.axes
        ins, dtype, param_dtype = inputs.shape[-axes:], jnp.dtype(c.dtype), jnp.dtype(c.param_dtype)
        shape, name = (*ins, *self.features), self.name or ""
        promote = gathering(c, name, self.gathers)
        if c.quantize_base == "none":
            inputs, kernel, _ = promote(inputs, self.param("kernel", _flat, shape, param_dtype, axes), None, dtype=dtype)
            y = _dot(inputs, kernel, axes)
        else:
            key = self.make_rng("params") if self.is_initializing() else jax.random.key(0)

            @jax.custom_batching.sequential_vmap  # the layers' kernels one by one, which are in float32 until they are quantized
            def made(key: jax.Array) -> tuple[jax.Array, jax.Array]:
                return quantize(_flat(key, shape, param_dtype, axes), c.quantize_base, axes)

            codes, scales = self.param("kernel", lambda _: made(key)[0]), self.param("kernel_scale", lambda _: made(key)[1])
            inputs = inputs.astype(dtype)
            y = quantized_dot(inputs, codes, scales, c.quantize_base, axes)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, self.features, param_dtype).astype(dtype)
        if lora is None or name not in lora.layers:
            return y
        a = self.param("lora_a", _uniform, (*ins, lora.rank), param_dtype, math.prod(ins) ** -0.5)
        b = self.param("lora_b", nn.initializers.zeros, (lora.rank, *self.features), param_dtype)
        return y + c.lora_alpha / lora.rank * _dot(_dot(inputs, a.astype(dtype), axes), b.astype(dtype), 1)


def linear(
    config: ModelConfig, features: int | tuple[int, ...], name: str, gathers: tuple[str, ...], *, bias: bool, axes: int = 1
) -> nn.Module:
    """A linear layer over the last `axes` axes, in the dtypes of the config."""
    if config.lora or config.quantize_base != "none":
        outputs = features if isinstance(features, tuple) else (features,)
        return Linear(config, outputs, axes, bias, gathers, name=name)
    kind: Any = (
        nn.Dense if axes == 1 and isinstance(features, int) else functools.partial(nn.DenseGeneral, axis=(-2, -1)[-axes:])
    )
    return kind(
        features,
        use_bias=bias,
        name=name,
        kernel_init=INIT,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        promote_dtype=gathering(config, name, gathers),
    )


def _flat(key: jax.Array, shape: tuple[int, ...], dtype: Any, axes: int) -> jax.Array:
    """The first values of a kernel, those of `nn.DenseGeneral`."""
    return INIT(key, (math.prod(shape[:axes]), math.prod(shape[axes:])), dtype).reshape(shape)


def quantize(kernel: jax.Array, how: Quantized, num_in: int) -> tuple[jax.Array, jax.Array]:
    """The codes of a kernel, of its shape, and their scales `[blocks, *outputs]` in float32.

    Args:
        kernel: `[*inputs, *outputs]`.
        how: `int8` or `nf4`.
        num_in: how many of its axes are inputs.
    """
    blocks = _in_blocks(kernel.astype(jnp.float32), how, num_in)
    largest = jnp.max(jnp.abs(blocks), axis=1)
    scales = largest / 127 if how == "int8" else largest
    shares = blocks / jnp.where(scales == 0, 1, scales)[:, None]
    if how == "int8":
        codes = jnp.round(shares).astype(jnp.int8)
    else:
        middles = (NF4[1:] + NF4[:-1]) / 2
        codes = sum((shares > middle for middle in middles), start=jnp.zeros(shares.shape, jnp.int32)).astype(jnp.uint4)
    return codes.reshape(kernel.shape), scales


def dequantize(codes: jax.Array, scales: jax.Array, how: Quantized, num_in: int, dtype: Any) -> jax.Array:
    """The kernel of codes and scales, in `dtype`."""
    blocks = _in_blocks(codes, how, num_in)
    values = blocks.astype(jnp.float32) if how == "int8" else jnp.asarray(NF4)[blocks.astype(jnp.int32)]
    return (values * scales[:, None]).astype(dtype).reshape(codes.shape)


def with_adapters(config: ModelConfig, base: Any, key: jax.Array | None = None, name: str = "") -> Any:
    """The parameters of the model of `config` whose base has the parameters `base`.

    Args:
        config: the model, with adapters.
        base: the parameters of the model without them, or a part of these.
        key: the random key of the adapters' first values.
        name: the name of the part.
    """
    key = jax.random.key(0) if key is None else key
    if not isinstance(base, dict):
        return base
    lora, kernel, axes = parse_lora(config.lora), base.get("kernel"), 2 if name == "out" else 1
    if kernel is None or lora is None or name not in LINEAR_LAYERS:
        keys = jax.random.split(key, len(base))
        return {of: with_adapters(config, part, keys[n], of) for n, (of, part) in enumerate(base.items())}
    first, made = (kernel.shape[:1] if config.scan_layers else ()), dict(base)
    ins, outs = kernel.shape[len(first) : len(first) + axes], kernel.shape[len(first) + axes :]
    if config.quantize_base != "none":
        coded = functools.partial(quantize, how=config.quantize_base, num_in=axes)
        of_layers = functools.partial(jax.lax.map, coded) if first else coded  # one after the other, for less memory
        made["kernel"], made["kernel_scale"] = jax.jit(of_layers)(kernel)
    if name in lora.layers:
        dtype = jnp.dtype(config.param_dtype)
        made["lora_a"] = _uniform(key, (*first, *ins, lora.rank), dtype, math.prod(ins) ** -0.5)
        made["lora_b"] = jnp.zeros((*first, lora.rank, *outs), dtype)
    return made


def _in_blocks(kernel: jax.Array, how: Quantized, num_in: int) -> jax.Array:
    """A kernel as `[blocks, inputs of a block, *outputs]`."""
    inputs = math.prod(kernel.shape[:num_in])
    block = inputs if how == "int8" else math.gcd(inputs, NF4_BLOCK)
    return kernel.reshape(inputs // block, block, *kernel.shape[num_in:])


def quantized_dot(inputs: jax.Array, codes: jax.Array, scales: jax.Array, how: Quantized, num_in: int) -> jax.Array:
    """`inputs` times a quantized kernel, whose conversion the backward pass repeats."""

    def dot(inputs: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
        return _dot(inputs, dequantize(codes, scales, how, num_in, inputs.dtype), num_in)

    def forward(inputs: jax.Array, codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, Any]:
        return dot(inputs, codes, scales), (codes, scales)

    def backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
        codes, scales = saved
        whole = dequantize(codes, scales, how, num_in, gradient.dtype)
        outputs = range(whole.ndim - num_in)
        last = gradient.ndim - len(outputs)
        axes = (tuple(last + n for n in outputs), tuple(num_in + n for n in outputs))
        return jax.lax.dot_general(gradient, whole, (axes, ((), ()))), None, None

    with_rule = jax.custom_vjp(dot)  # `forward` calls `dot` itself, so that policies see its matmul
    with_rule.defvjp(forward, backward)
    return with_rule(inputs, codes, scales)


def _dot(inputs: jax.Array, kernel: jax.Array, num_in: int) -> jax.Array:
    """The last `num_in` axes of the inputs with the first ones of the kernel."""
    axes = (tuple(range(inputs.ndim - num_in, inputs.ndim)), tuple(range(num_in)))
    return jax.lax.dot_general(inputs, kernel, (axes, ((), ())))


def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any, bound: float) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -bound, bound)
