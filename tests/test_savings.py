"""What recomputing one saved value frees and costs while the others stay saved: by hand, and for a compiled step's page."""

import re
from dataclasses import replace

import pytest

from jaxremat.answer.savings import Saving, savings
from jaxremat.explain import main
from jaxremat.planner.problem import Op, Problem, Value
from jaxremat.xla.buffers import held
from tests.memory_maps import scanned
from tests.page_data import data_of

#: x -> a (1 s) -> b (2 s) -> c (4 s), the backward pass reads all three.
CHAIN = Problem(
    values=(Value("x", 8), Value("a", 8, needed=True), Value("b", 8, needed=True), Value("c", 8, needed=True)),
    ops=(Op("f", (0,), (1,), 1.0), Op("g", (1,), (2,), 2.0), Op("h", (2,), (3,), 4.0)),
    inputs=(0,),
    save_s_per_byte=0.0,
    offload_s_per_byte=0.0,
)


def labelled(labels: dict[str, str]):
    """The made-up map with other labels for its stacked residuals, twelve layers each."""
    memory = scanned()
    buffers = tuple(
        replace(b, label=labels[b.label], num_layers=12) if b.label in labels and b.category == "residuals" else b
        for b in memory.buffers
    )
    return replace(memory, buffers=buffers)


def test_each_alone_beside_the_others_that_are_kept():
    memory = labelled({"query_proj": "a", "key_proj": "b", "value_proj": "not a value of the layer"})
    sizes = {b.label: (b.name, size) for b, size in held(memory, memory.peak)}
    found = {saving.buffer: saving for saving in savings(CHAIN, memory)}
    assert found == {
        sizes["a"][0]: Saving(*sizes["a"], cost_s=12 * 1.0),
        sizes["b"][0]: Saving(*sizes["b"], cost_s=12 * 2.0),  # a is kept, so that only g runs again
    }


def test_outputs_that_go_together_are_dropped_together():
    fused = replace(CHAIN, ops=(Op("f", (0,), (1, 2), 5.0, together=True), Op("h", (2,), (3,), 4.0)))
    found = savings(fused, labelled({"query_proj": "a", "key_proj": "b"}))
    assert [saving.cost_s for saving in found] == [60.0, 60.0]


def test_a_value_of_one_layer_alone_is_not_of_the_layers():
    memory = labelled({"query_proj": "a", "key_proj": "b"})
    alone = tuple(replace(b, num_layers=1) if b.label == "b" else b for b in memory.buffers)
    assert [saving.cost_s for saving in savings(CHAIN, replace(memory, buffers=alone))] == [12 * 1.0]


def test_the_command_writes_the_page_with_them(h100, tmp_path, capsys):
    page = tmp_path / "page.html"
    shape = {"num-layers": 2, "embed-dim": 256, "num-heads": 4, "num-kv-heads": 4, "mlp-dim": 512, "vocab-size": 512}
    small = [f"--{name}={value}" for name, value in {**shape, "seq-len": 256}.items()]
    assert main(["--batch", "2", "--policy", "dots", *small, "--page", str(page), "--redact"]) == 0
    assert re.search(r"wrote .*page.html, [0-9]+ kB; open it in a browser", capsys.readouterr().err)
    text = page.read_text()
    (dots,) = data_of(text)["pages"]
    assert dots["policy"] == "dots"
    assert len(dots["savings"]) >= 4  # query, key, value and out projections, and wi_0 where XLA keeps it apart
    assert all(num_bytes > 0 and cost_s >= 0 for _, num_bytes, cost_s in dots["savings"])
    assert sum(cost_s for _, _, cost_s in dots["savings"]) > 0
    assert str(tmp_path) not in text
    assert "loss.py" not in text


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--redact"], "--redact is about --page"), (["--page", "/no/such/folder/x.html"], "--page '/no/such/folder/x.html'")],
)
def test_what_cannot_be_meant_is_said_before_anything_is_compiled(argv, said, capsys):
    assert main(argv) == 2
    assert said in capsys.readouterr().err
