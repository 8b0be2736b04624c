"""What recomputing one saved value frees and costs while the others stay saved, by hand."""

from dataclasses import replace

from jaxremat.answer.savings import Saving, savings
from jaxremat.knapsack.problem import Op, Problem, Value
from jaxremat.xla.buffers import held
from tests.memory_maps import scanned

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
