"""Code to paste for each policy and framework: run in a model, it saves what `with_policy` saves around the same layers."""

import functools
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxremat
from jaxremat.cli.run import main
from jaxremat.errors import UsageError
from jaxremat.policy.code import Framework, as_code, code_for
from jaxremat.policy.grammar import parse
from jaxremat.report.plan import code_to_paste
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.saved import saved_values
from tests.made_up_records import step

WIDTH, NUM = 8, 4
X = jnp.ones((16, WIDTH))
POLICIES = (
    "none",
    "own",
    "everything",
    "nothing",
    "dots",
    "dots-no-batch",
    "save:hidden",
    "save:hidden+attention",
    "dots+attention",
)
SEVERAL = ("one-in:2", "every:2", "every:3", "every:2+save:hidden", "1*nothing|1*save:hidden", "3*nothing|1*save:hidden")
Loss = Callable[[Any, jax.Array], jax.Array]


def code_of(policy: str, loss: Callable[..., Any], *args: Any) -> tuple[str, ...]:
    """The code for a loss, whose layers are found."""
    return code_for(parse(policy), jaxremat.find_layers(loss, *args).kinds, loss, *args)


def pasted(code: str, **names: Any) -> dict[str, Any]:
    """The names after the code ran."""
    exec(code, names)  # the code is ours
    return names


def jax_model() -> tuple[Callable[[str], Loss], Any]:
    def layer(w: Any, x: jax.Array) -> jax.Array:
        return x + checkpoint_name(jnp.tanh(x @ w[0]), "hidden") @ w[1]

    def loss(code: str, params: Any, x: jax.Array) -> jax.Array:
        names = pasted(code, layer=layer, layers=params, x=x, jax=jax, functools=functools, jaxremat=jaxremat)
        if "for start" in code:
            return jnp.mean(names["x"] ** 2)
        wrapped = names["layers"] if "policies = " in code else NUM * [names["layer"]]
        for one, w in zip(wrapped, params, strict=True):
            x = one(w, x)
        return jnp.mean(x**2)

    return lambda code: functools.partial(loss, code), NUM * [(jnp.ones((WIDTH, 16)), jnp.ones((16, WIDTH)))]


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH)(checkpoint_name(jnp.tanh(nn.Dense(16)(x)), "hidden"))


def linen_model() -> tuple[Callable[[str], Loss], Any]:
    def loss(code: str, params: Any, x: jax.Array) -> jax.Array:
        names = pasted(code, Block=LinenBlock, nn=nn, jax=jax, jaxremat=jaxremat)
        blocks = names["Blocks"] if "policies = " in code else NUM * [names["Block"]]

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array) -> jax.Array:
                for i, block in enumerate(blocks):
                    x = block(name=f"block_{i}")(x)
                return jnp.mean(x**2)

        return jnp.asarray(Net().apply(params, x))

    def params_of(x: jax.Array) -> Any:
        one = LinenBlock().init(jax.random.key(0), x)["params"]
        return {"params": {f"block_{i}": one for i in range(NUM)}}

    return lambda code: functools.partial(loss, code), jax.eval_shape(params_of, X)


def object_loss(code: str, blocks: Any, x: jax.Array, **framework: Any) -> jax.Array:
    """The loss of modules of NNX or Equinox, which the code calls by `call`."""
    names = pasted(code, layers=blocks, x=x, jax=jax, functools=functools, jaxremat=jaxremat, **framework)
    if "for start" in code:
        return jnp.mean(names["x"] ** 2)
    plain = names.get("call", lambda block, x: block(x))
    for block, call in zip(blocks, names["calls"] if "policies = " in code else NUM * [plain], strict=True):
        x = call(block, x)
    return jnp.mean(x**2)


class NnxBlock(nnx.Module):
    def __init__(self) -> None:
        self.up, self.down = nnx.Linear(WIDTH, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, WIDTH, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(checkpoint_name(jnp.tanh(self.up(x)), "hidden"))


def nnx_model() -> tuple[Callable[[str], Loss], Any]:
    definition, state = nnx.split(nnx.eval_shape(lambda: nnx.List([NnxBlock() for _ in range(NUM)])))

    def loss(code: str, params: Any, x: jax.Array) -> jax.Array:
        return object_loss(code, [*nnx.merge(definition, params)], x, nnx=nnx)

    return lambda code: functools.partial(loss, code), state


def equinox_model() -> tuple[Callable[[str], Loss], Any]:
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        up: Any
        down: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + checkpoint_name(jnp.tanh(x @ self.up), "hidden") @ self.down

    def loss(code: str, params: Any, x: jax.Array) -> jax.Array:
        return object_loss(code, params, x, eqx=eqx)

    return lambda code: functools.partial(loss, code), [
        Block(jnp.ones((WIDTH, 16)), jnp.ones((16, WIDTH))) for _ in range(NUM)
    ]


MODELS = {"jax": jax_model, "linen": linen_model, "nnx": nnx_model, "equinox": equinox_model}


#: Each framework under two policies in the fast tier, and under the others in the full one.
PAIRS = [
    pytest.param(framework, policy, marks=() if policy in ("dots", "1*nothing|1*save:hidden") else pytest.mark.full)
    for framework in MODELS
    for policy in (*POLICIES, *SEVERAL)
    if not (framework == "linen" and policy.startswith("every:"))
]


@pytest.mark.parametrize(("framework", "policy"), PAIRS)
def test_the_code_saves_what_the_policy_saves(framework, policy):
    loss_with, params = MODELS[framework]()
    code = as_code(policy, framework, NUM)
    want, got = (
        saved_values(jax.make_jaxpr(jax.grad(loss))(params, X))
        for loss in (jaxremat.with_policy(loss_with(""), policy), loss_with(code))
    )
    assert got.values == want.values
    assert code.startswith("#") == (policy in ("none", "own"))


@pytest.mark.full
def test_the_code_takes_the_bytes_of_the_policy(h100):
    loss_with, params = nnx_model()
    x = jax.ShapeDtypeStruct((2**18, WIDTH), jnp.float32)
    for policy in ("nothing", "every:2+save:hidden"):
        want, got = (
            lower_and_compile(jax.grad(loss), (params, x), h100).memory.total_bytes
            for loss in (jaxremat.with_policy(loss_with(""), policy), loss_with(as_code(policy, "nnx", NUM)))
        )
        assert got == pytest.approx(want, rel=0.01)


@pytest.mark.full
def test_the_code_of_a_scan_s_body_takes_the_bytes_of_the_policy(h100):
    """It has no barriers, as `with_policy` has none there. A policy of several layers replaces the scan."""

    def loss(code: str, ws: jax.Array, x: jax.Array) -> jax.Array:
        layer = pasted(code, layer=lambda w, x: x + checkpoint_name(jnp.tanh(x @ w), "hidden") @ w.T, jax=jax)["layer"]
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0] ** 2)

    args = jax.ShapeDtypeStruct((NUM, WIDTH, 64), jnp.float32), jax.ShapeDtypeStruct((2**16, WIDTH), jnp.float32)
    code = as_code("save:hidden", "jax", in_scan=True)
    assert "prevent_cse=False" in code
    want, got = (
        lower_and_compile(jax.grad(one), args, h100).memory.total_bytes
        for one in (jaxremat.with_policy(functools.partial(loss, ""), "save:hidden"), functools.partial(loss, code))
    )
    assert got == want
    as_written = functools.partial(loss, "")
    assert code_of("save:hidden", as_written, *args) == tuple(code.splitlines())
    assert code_of("every:2", as_written, *args) == ('x = jaxremat.scan_layers(layer, params, x, policy="every:2")',)
    for framework in ("linen", "nnx", "equinox"):
        assert "prevent_cse=False" in as_code("dots", framework, in_scan=True)
    with pytest.raises(UsageError, match="one body"):
        as_code("every:2", "nnx", NUM, in_scan=True)


@pytest.mark.parametrize(
    ("policy", "policies"),
    [
        ("1*nothing|5*save:hidden", "2 * ([NOTHING] + 5 * [HIDDEN])"),
        ("2*nothing|10*save:hidden", "2 * [NOTHING] + 10 * [HIDDEN]"),
        ("1*nothing|1*save:hidden", "6 * [NOTHING, HIDDEN]"),
        ("1*nothing|1*save:hidden|2*nothing", "3 * ([NOTHING, HIDDEN] + 2 * [NOTHING])"),
        ("one-in:3", "4 * ([NOTHING] + 2 * [None])"),
    ],
)
def test_policies_that_repeat_are_written_once(policy, policies):
    line, layers = as_code(policy, "jax", 12).splitlines()
    for name, one in (("NOTHING", "nothing"), ("HIDDEN", "save:hidden")):
        line = line.replace(as_code(one, "jax").partition("policy=")[2][:-1], name)
    assert line == f"policies = {policies}"
    plain = "layer if policy is None else " if "None" in line else ""
    assert layers == f"layers = [{plain}jax.checkpoint(layer, policy=policy) for policy in policies]"


def test_groups_of_linen_s_modules_are_jaxremat_s_own_layers():
    line = 'layers = jaxremat.Layers(Block(...), num_layers=4, policy="every:2"'
    assert as_code("every:2", "linen", NUM) == f"{line}, scan=False)"
    assert as_code("every:2", "linen", NUM, in_scan=True) == f"{line})"


def test_offloading_is_jax_s_own_policy():
    code = as_code("save:hidden+offload:wide", "jax")
    policy = pasted(code, layer=lambda x: x, jax=jax)["layer"]
    assert callable(policy)
    for name in ("hidden", "wide", "pinned_host"):
        assert f'"{name}"' in code


def test_policies_as_lines_of_maxtext_s_config():
    assert as_code("nothing", "maxtext") == "remat_policy: full"
    assert as_code("minimal_flash", "maxtext") == "remat_policy: minimal_flash"
    lines = ["remat_policy: custom", "decoder_layer_input: device", "mlpwo: offload", "query_proj: device"]
    assert as_code("save:query_proj+offload:mlpwo", "maxtext").splitlines() == lines
    for policy in ("dots", "one-in:2", "save:hidden", "none"):
        with pytest.raises(UsageError, match="can't say"):
            as_code(policy, "maxtext", NUM)


def test_a_module_of_several_arguments_is_called_by_the_code():
    call = pasted(as_code("nothing", "nnx"), nnx=nnx, jax=jax)["call"]

    class Gated(nnx.Module):
        def __init__(self) -> None:
            self.up = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
            return self.up(x) * gate

    layer = Gated()
    assert (call(layer, X, 2 * X) == layer(X, 2 * X)).all()


def test_wrong_frameworks_and_groups_are_rejected():
    with pytest.raises(UsageError) as caught:
        as_code("dots", "torch")  # pyright: ignore[reportArgumentType]
    assert "linen" in caught.value.allowed
    with pytest.raises(UsageError):
        as_code("every:5", "jax", NUM)


@pytest.mark.parametrize("framework", MODELS)
def test_the_framework_of_a_model_is_found_and_names_nobody_wrote_are_not_pasted(framework):
    loss_with, params = MODELS[framework]()
    loss = loss_with("")
    for policy in ("dots", "save:hidden"):
        assert code_of(policy, loss, params, X) == tuple(as_code(policy, framework, NUM).splitlines())
    one, then = code_of("save:dot_general", loss, params, X)
    assert ("dot_general" in one, "list names" in then) == (True, True)
    assert {one[:2], then[:2]} == {"# "}


class Scanned(nn.Module):
    block: type[nn.Module] = LinenBlock

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        of_params = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        scanned = nn.scan(lambda block, x, _: (block(x), None), length=NUM, **of_params)
        return jnp.mean(scanned(self.block(name="block"), x, None)[0] ** 2)


def test_what_wraps_nothing_is_a_comment():
    """For `none` it says which checkpoints are to be taken away."""
    for policy, framework in itertools.product(("none", "own"), get_args(Framework)[:4]):
        assert as_code(policy, framework, NUM).startswith(f"# {policy}: ")
    loss_with, params = MODELS["jax"]()
    assert code_of("none", loss_with(""), params, X) == ("# No change: it has no checkpoints.",)
    model = Scanned(nn.remat(LinenBlock))
    (line,) = code_of("none", model.apply, jax.eval_shape(model.init, jax.random.key(0), X), X)
    assert re.fullmatch(rf"# Without the author's checkpoint, which is called at {re.escape(__file__)}:\d+\.", line)
    assert code_of("none", lambda params, x: jax.checkpoint(jnp.sin)(loss_with("")(params, x)), params, X) == (
        "# No checkpoint around a layer.",
    )
    (given,) = code_to_paste(step("none", config={"model": {}}), (), ())
    assert code_to_paste(step("none", config={"model": {}}), [line], ()) == [given, "# or in the model itself:", line]


@pytest.mark.parametrize("layout", ["unrolled", "scan", "scan of checkpoints"])
def test_values_that_nobody_named_are_named_in_the_pasted_module(layout):
    """The layer is the module and nothing else. So the code saves the policy's values.

    Where the author wrote a checkpoint around it in a scan, the code takes its place, and says so.
    """
    loss_with, params = MODELS["linen"]()
    loss, several = loss_with(""), ("1*nothing|1*save:Dense_1/dot_general", "1*nothing|3*save:Dense_1/dot_general")
    if in_scan := layout != "unrolled":
        model = Scanned() if layout == "scan" else Scanned(nn.remat(LinenBlock))
        loss, params, several = model.apply, jax.eval_shape(model.init, jax.random.key(0), X), ()
    (kind,) = jaxremat.find_layers(loss, params, X).kinds
    assert (kind.module, kind.in_scan) == ("block", in_scan)
    for policy in ("save:Dense_1/dot_general", *several):
        comment, *lines = code_of(policy, loss, params, X)
        code = "\n".join(lines)
        assert (comment[0], "in_scan=True" in code) == ("#", in_scan)
        assert any("the author's checkpoint" in line for line in lines) == (layout == "scan of checkpoints")
        block = pasted(code, Block=LinenBlock, jaxremat=jaxremat)["Block"]
        losses = jaxremat.with_policy(loss, policy), Scanned(block).apply if in_scan else loss_with(code)
        want, got = (saved_values(jax.make_jaxpr(jax.grad(one))(params, X)) for one in losses)
        assert any(value.name == "Dense_1/dot_general" for value in want.values)
        assert got.values == want.values


def test_layers_that_are_no_module_have_no_code_for_such_names():
    """A module that is mapped has other operations than alone. A group of Linen's modules is jaxremat's own."""
    loss_with, params = MODELS["linen"]()
    loss = loss_with("")
    (kind,) = jaxremat.find_layers(
        lambda params, xs: jnp.mean(jax.vmap(lambda x: loss(params, x))(xs)), params, X[None]
    ).kinds
    assert (kind.found_by, kind.module) == ("scope", "")
    for function, args in ((loss, params), (MODELS["jax"]()[0](""), MODELS["jax"]()[1])):
        lines = code_of("every:2+save:Dense_1/dot_general", function, args, X)
        is_linen = function is loss
        assert any(line.startswith("layers = jaxremat.Layers(") for line in lines) == is_linen
        assert all(line.startswith("#") for line in lines) != is_linen


class Encoder(nn.Module):
    """Its value `hidden` has the name that the decoder's has, and `Dense_1/sin` in between has none."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH)(jnp.sin(nn.Dense(16)(checkpoint_name(jnp.tanh(nn.Dense(16)(x)), "hidden"))))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = checkpoint_name(jnp.tanh(nn.Dense(32)(x)), "hidden")
        return x + nn.Dense(WIDTH)(hidden * jnp.tanh(nn.Dense(32)(x)))


class Both(nn.Module):
    """Encoders one after the other, and decoders in a scan."""

    encoder: type[nn.Module] = Encoder
    decoder: type[nn.Module] = Decoder

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(NUM):
            x = self.encoder(name=f"encoder_{i}")(x)
        of_params = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        scanned = nn.scan(lambda block, x, _: (block(x), None), length=NUM, **of_params)
        return jnp.mean(scanned(self.decoder(name="decoder"), x, None)[0] ** 2)


#: What the layers of `Both` save, and the parts of the two kinds. In the encoder, `tanh` is what its author named `hidden`.
OF_BOTH = {
    "save:encoder/tanh,encoder/sin,Both/tanh.1": ("save:hidden,sin", "save:tanh"),
    "save:Both/mul": ("nothing", "save:mul"),
    "save:hidden,Both/Dense_2/dot_general": ("save:hidden", "save:hidden,Dense_2/dot_general"),
}


def pasted_into_both(lines: tuple[str, ...]) -> Loss:
    names = pasted("\n".join(lines), Encoder=Encoder, Decoder=Decoder, jaxremat=jaxremat)
    return Both(names["Encoder"], names["Decoder"]).apply  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("policy", OF_BOTH)
def test_each_kind_of_layers_has_a_line_with_its_part_of_the_policy(policy):
    loss, params = Both().apply, jax.eval_shape(Both().init, jax.random.key(0), X)
    encoders, decoders = jaxremat.find_layers(loss, params, X).kinds
    assert (encoders.prefix, decoders.prefix, decoders.module) == ("encoder/", "Both/", "decoder")
    comment, *lines = code_of(policy, loss, params, X)
    encoder, decoder = OF_BOTH[policy]
    assert comment.startswith("# nn.remat saves by name")
    assert lines == [
        f'Encoder = jaxremat.remat(Encoder, "{encoder}")  # {encoders.label}',
        f'Decoder = jaxremat.remat(Decoder, "{decoder}", in_scan=True)  # {decoders.label}',
    ]
    want, got = (
        sorted((value.kind, value.num_bytes) for value in saved_values(jax.make_jaxpr(jax.grad(one))(params, X)).values)
        for one in (jaxremat.with_policy(loss, policy), pasted_into_both((*lines,)))
    )
    assert got == want
    lines = code_of("2*nothing|2*save:encoder/tanh", loss, params, X)
    assert [line.partition(" = ")[0] for line in lines if line[0] != "#"] == ["policies", "Encoders", "decoders"]


@pytest.mark.full
def test_the_code_of_several_kinds_takes_the_bytes_of_the_policy(h100):
    loss, x = Both().apply, jax.ShapeDtypeStruct((2**18, WIDTH), jnp.float32)
    params, totals = jax.eval_shape(Both().init, jax.random.key(0), X), set[int]()
    for policy in OF_BOTH:
        want, got = (
            lower_and_compile(jax.grad(one), (params, x), h100).memory.total_bytes
            for one in (jaxremat.with_policy(loss, policy), pasted_into_both(code_of(policy, loss, params, x)))
        )
        assert got == pytest.approx(want, rel=0.01)
        totals.add(want)
    assert len(totals) == len(OF_BOTH)


def test_layers_of_a_kind_that_differ_in_a_name_have_no_code_for_it():
    """The first layer casts, so that its values of one name are others."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for i in range(NUM):
                with jax.named_scope(f"layer_{i}"):
                    x = jnp.tanh(x) if i == 0 else x
                    x = x + jnp.tanh(x @ self.param(f"w_{i}", nn.initializers.ones, (WIDTH, WIDTH)))
            return jnp.mean(x**2)

    params = jax.eval_shape(Net().init, jax.random.key(0), X)
    assert all(line.startswith("#") for line in code_of("save:tanh.1", Net().apply, params, X))
    assert not all(line.startswith("#") for line in code_of("save:dot_general", Net().apply, params, X))


#: A stack of blocks, with code to paste after the class of a block.
BLOCKS = """
import flax.linen as nn, jax, jax.numpy as jnp, jaxremat
from jax.ad_checkpoint import checkpoint_name

class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = checkpoint_name(jnp.tanh(nn.Dense(512, name="up")(nn.LayerNorm(name="norm")(x))), "hidden")
        return x + nn.Dense(128, name="down")(hidden)

{pasted}

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Block(name=f"block_{{i}}")(x)
        return jnp.mean(x**2)

def loss(params, x):
    return Net().apply({{"params": params}}, x)

def workload(batch: int = 2**16):
    x = jax.ShapeDtypeStruct((batch, 128), jnp.float32)
    params = jax.eval_shape(Net().init, jax.random.key(0), x)["params"]
    return jaxremat.Workload(loss=loss, params=params, batch=x)
"""


def run_of(path: Path, pasted: str, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    """The trials of the stack of blocks with code in it."""
    path.write_text(BLOCKS.format(pasted=pasted))
    assert main(["--model", f"{path}:workload", "--target", "h100-80gb", "--batch", "65536", "--json", *flags]) == 0
    return [row for row in map(json.loads, capsys.readouterr().out.splitlines()) if row["record"] == "trial"]


@pytest.mark.full
def test_the_code_of_a_run_takes_the_bytes_of_its_row(tmp_path, capsys):
    policies = ("none", "nothing", "1*nothing|1*save:hidden", "save:norm/mul.1,up/dot_general", "own")
    *rows, own = run_of(tmp_path / "as_written.py", "", capsys, "--code", "--policy", *policies)
    assert own["code"] is None
    assert len({row["total_bytes"] for row in rows}) == len(rows)
    for n, row in enumerate(rows):
        around_loss, comment, *lines = row["code"]
        assert (around_loss, comment[0]) == (f'loss = jaxremat.with_policy(loss, "{row["policy"]}")', "#")
        if "Blocks" in lines[-1]:  # a list of classes, one for each layer
            lines.append("Block = lambda name: Blocks[int(name[-1])](name=name)")
        (again,) = run_of(tmp_path / f"pasted_{n}.py", "\n".join(lines), capsys, "--policy", "own")
        assert again["total_bytes"] == pytest.approx(row["total_bytes"], rel=1e-3)
