"""The heading of a command has the shapes and the bytes of the batch that was requested."""

import pytest

from jaxremat.chips.target import load_target
from jaxremat.cli.command import parse_flags
from jaxremat.cli.train import TrainRunFlags
from jaxremat.session.flags import RunFlags, StepFlags
from jaxremat.session.request import check_run, check_step
from jaxremat.session.session import Session
from jaxremat.units import gib
from tests.user_files import in_folder

WIDTH, WRITTEN = 256, 64
OWN = f"""
import jax, jax.numpy as jnp, jaxremat

def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)

def layers(batch: int = {WRITTEN}):
    def loss(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x ** 2)

    return jaxremat.Workload(loss=loss, params=[shape({WIDTH}, {WIDTH})] * 3, batch=shape(batch, {WIDTH}))

def whole(batch: int = {WRITTEN}):
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    return jaxremat.Workload(step=step, args=(shape({WIDTH}, {WIDTH}), shape(batch, {WIDTH})))
"""


def test_a_heading_says_what_measured_steps_are_fed():
    """A training is fed text, and so is a run with --data."""
    cpu = load_target("cpu")

    def data(kind: type[StepFlags], *argv: str) -> list[str]:
        request = check_step(parse_flags(kind, ["--model", "tiny", "--policy", "dots", "--batch", "2", *argv]))
        return [line for line in Session.of(request, cpu).heading if line.startswith("data ")]

    (said,) = data(RunFlags)
    assert "256" in said, "the size of its vocabulary"
    assert data(RunFlags, "--data", "pyproject.toml") == data(TrainRunFlags) == []


@pytest.mark.parametrize(("batches", "shown"), [((), WRITTEN), (("8192",), 8192), (("16384", "8192"), 16384)])
def test_a_heading_is_about_the_batch_that_was_requested(batches, shown, tmp_path, h100):
    with in_folder(tmp_path) as write:
        path = write("own.py", OWN)

        def heading(name: str) -> str:
            argv = ["--model", f"{path}:{name}", *(["--batch", *batches] if batches else [])]
            return "\n".join(Session.of(check_run(parse_flags(RunFlags, argv)), h100).heading)

        of_layers, of_step = heading("layers"), heading("whole")
    assert gib(shown * WIDTH * 4) in of_layers, "between two layers"
    assert gib((WIDTH + shown) * WIDTH * 4) in of_step, "of the arguments"
    assert f"float32[{shown},{WIDTH}]" in of_layers
    assert f"float32[{shown},{WIDTH}]" in of_step


@pytest.mark.parametrize(
    ("argv", "said"),
    [([], True), (["--mem-fraction", "0.9"], False), (["--budget", "20GiB"], False), (["--xla-remat"], True)],
)
def test_a_heading_says_what_others_give_jax_beside_the_default(argv, said, h100):
    request = check_run(parse_flags(RunFlags, ["--model", "tiny", "--policy", "dots", "--attention", "xla", *argv]))
    lines = Session.of(request, h100).heading
    (number,) = (n for n, line in enumerate(lines) if line.startswith("budget "))
    assert any("0.85" in line for line in lines[number + 1 : number + 2]) == said


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (
            "ici_fsdp_parallelism=2,dcn_data_parallelism=2",
            "ici_fsdp_parallelism=2,dcn_data_parallelism=2 (data=2,fsdp=2) on 2",
        ),
        ("fsdp=2,data=2", "data=2,fsdp=2;"),
    ],
)
def test_a_mesh_in_the_names_of_maxtext_is_shown_as_typed(typed, shown):
    request = check_run(
        parse_flags(RunFlags, ["--model", "tiny", "--policy", "dots", "--attention", "xla", "--mesh", typed])
    )
    (line,) = [line for line in Session.of(request, load_target(None, request.mesh)).heading if line.startswith("mesh ")]
    assert line.startswith(f"mesh      {shown}")
