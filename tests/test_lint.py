"""Each rule of the lint finds a program that it is about, and leaves a sound one alone.

The fast tests have made-up inputs of the rules, of which each has one mistake. The others compile programs for an H100. The
project's own models raise no false alarm under the named policies.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxremat
from jaxremat.chips.target import Target
from jaxremat.config import ModelConfig
from jaxremat.errors import UnknownNameError, UnknownPolicyError, UsageError
from jaxremat.policy.grammar import parse
from jaxremat.trial.findings import findings
from jaxremat.xla.compile import Compilation, lower_and_compile
from jaxremat.xla.lint import RULES, find
from jaxremat.xla.lint_input import LintInput, Remedies, largest_logits, lint_input
from jaxremat.xla.lint_mesh import MESH_RULES
from jaxremat.xla.step_facts import Finding
from jaxremat.xla.traced import Traced, names_in_jax_policy, normalized_sizes, read_traced
from tests.helpers import BATCH, GPT, LLAMA, TRAIN, UNROLLED, decoder_args, decoder_step
from tests.lint_inputs import ATTENTION_TWICE, MIB, made_up, mapped, memory, program

Layer = Callable[[Any, jax.Array], jax.Array]
Step = Callable[..., Any]


def rules(found: tuple[Finding, ...]) -> set[str]:
    return {finding.rule for finding in found}


def one(found: tuple[Finding, ...], rule: str) -> Finding:
    (finding,) = [finding for finding in found if finding.rule == rule]
    assert finding.evidence
    assert finding.remedy
    return finding


def test_each_rule_finds_its_mistake_alone():
    assert {rule: rules(find(facts)) for rule, facts in made_up().items()} == {
        rule: {rule} for rule in [*RULES, *MESH_RULES]
    }


def test_what_findings_say(snapshot):
    """The evidence and the remedy of each rule, and the remedies of other readers than the author of a function."""
    lines = []
    for rule, facts in made_up().items():
        finding = one(find(facts), rule)
        lines += [f"{rule}: {finding.evidence}.", f"    {finding.remedy}"]
        for reader in get_args(Remedies):
            if (remedy := one(find(replace(facts, remedies=reader)), rule).remedy) != finding.remedy:
                lines.append(f"    {reader}: {remedy}")
    assert "\n".join(lines) == snapshot


@pytest.mark.parametrize(
    ("reader", "has_policy", "has_loss"),
    [("code", False, False), ("with_policy", False, False), ("flags", True, False), ("flags with loss", True, True)],
)
def test_a_remedy_has_the_flags_that_its_reader_has(reader, has_policy, has_loss):
    """A user's own workload has no `--loss`, and its author no flags."""
    remedies = {rule: one(find(replace(facts, remedies=reader)), rule).remedy for rule, facts in made_up().items()}
    assert {rule: "--policy" in remedies[rule] for rule in ("attention-twice", "dropout-masks")} == {
        "attention-twice": has_policy,
        "dropout-masks": has_policy,
    }
    assert "dots+attention" in remedies["attention-twice"]
    assert ("--loss" in remedies["logits-largest"]) == ("--loss" in remedies["gathers-logits"]) == has_loss


def test_the_remedy_of_attention_is_the_policy_that_saves_it():
    mix = "1*nothing|1*save:query_proj", "1*nothing+attention|1*save:query_proj+attention"
    for text, remedy in (("dots", "dots+attention"), ("own", "dots+attention"), mix):
        facts = replace(made_up()["attention-twice"], policy=parse(text), remedies="flags")
        assert one(find(facts), "attention-twice").remedy.split() == ["--policy", remedy]
    facts = replace(made_up()["attention-twice"], policy=parse("own"), remedies="flags")
    names = {"up": frozenset[int](), "down": frozenset[int]()}
    named = replace(facts.traced, saves_matmuls=False, policy_names=frozenset({"up", "elsewhere"}), names=names)
    facts = replace(facts, traced=named)
    found = one(find(facts), "attention-twice")
    assert (found.remedy, "softmax statistics" in found.evidence) == ("--policy save:up+attention", True)
    for text in ("every:2+dots", "one-in:2"):  # they compute whole groups again on purpose
        assert find(replace(made_up()["attention-twice"], policy=parse(text))) == ()


def test_names_of_the_policy_and_of_the_program_are_checked():
    facts = made_up()["unmatched-name"]
    found = find(replace(facts, policy=parse("save:hidden,hide")))
    assert [name for finding in found for name in ("'hide'", "'hiden'") if name in finding.evidence] == ["'hide'", "'hiden'"]
    assert all(finding.remedy.startswith("'hidden'") for finding in found), "the nearest name of the program"
    for requested in ((), parse("minimal").names()):  # MaxText's own program requests all of them
        sound = replace(facts, traced=replace(facts.traced, policy_names=frozenset(requested)))
        assert find(replace(sound, policy=parse("minimal"))) == (), "a preset has names of many models"


def test_the_bytes_that_the_chunked_loss_saves():
    facts = made_up()["logits-largest"]
    assert one(find(facts), "logits-largest").num_bytes == 4 * MIB
    less = replace(facts, chunked_bytes=facts.memory.total_bytes - 12345)
    assert one(find(less), "logits-largest").num_bytes == 12345
    assert find(replace(facts, chunked_bytes=facts.memory.total_bytes)) == ()
    assert largest_logits(None) is None


def test_rules_on_buffers_need_the_map():
    with_map = {rule for rule, facts in made_up().items() if facts.memory_map is not None}
    assert with_map == {rule for rule, facts in made_up().items() if find(replace(facts, memory_map=None)) == ()}


def test_findings_come_with_the_most_bytes_first():
    facts = [made_up()[rule] for rule in ("dropout-masks", "not-donated", "loop-without-remat")]
    together = replace(facts[0], module=facts[1].module, traced=facts[2].traced)
    assert [finding.num_bytes for finding in find(together)] == [2 * MIB, MIB, MIB]


# Programs of a few lines.

LAYERS, ROWS, WIDTH, VOCABULARY = 4, 2048, 256, 8192
STACK = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
SEPARATE = LAYERS * [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)]
HEAD = jax.ShapeDtypeStruct((WIDTH, VOCABULARY), jnp.float32)
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
TARGETS = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
ACTIVATION_BYTES = 4 * ROWS * WIDTH
POLICIES = jax.checkpoint_policies


def layer(w, x):
    return x + jnp.tanh(checkpoint_name(x @ w, "hidden"))


def read_beside_its_name(w, x):
    h = x @ w
    return x + jnp.tanh(checkpoint_name(h, "hidden")) * jnp.sin(h)


def half_named(w, x):
    h = checkpoint_name(x @ w, "hidden")
    return x + jnp.tanh(jnp.sin(h) @ w)


def saved(*names: str) -> dict[str, Any]:
    return {"policy": POLICIES.save_only_these_names(*names), "prevent_cse": False}


def sgd(loss: Step) -> Step:
    return lambda params, *rest: jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, *rest))


def scanned(*layers: Layer) -> Step:
    """One scan over the stack for each of `layers`."""

    def loss(ws, x):
        for layer in layers:
            x, _ = jax.lax.scan(lambda x, w, layer=layer: (layer(w, x), None), x, ws)
        return (x**2).mean()

    return sgd(loss)


def unrolled(layer: Layer) -> Step:
    def loss(ws, x):
        for w in ws:
            x = layer(w, x)
        return (x**2).mean()

    return sgd(loss)


def classify(head, x, targets):
    return optax.softmax_cross_entropy_with_integer_labels(x @ head, targets).mean()


def traced_of(step: Step, *args: Any) -> Traced:
    return read_traced(jax.make_jaxpr(step)(*args))


def test_names_are_read_from_any_policy():
    written = {"a"}
    both = POLICIES.save_from_both_policies(POLICIES.save_only_these_names("a", "b"), POLICIES.dots_saveable)
    offload = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"], names_which_can_be_offloaded=["c"], offload_src="device", offload_dst="pinned_host"
    )
    assert names_in_jax_policy(both, written) == {"a", "b"}
    assert names_in_jax_policy(offload, written) == {"a", "c"}
    assert names_in_jax_policy(POLICIES.nothing_saveable, written) == names_in_jax_policy(None, written) == set()


def test_the_names_of_a_preset_that_are_written_nowhere_do_not_count():
    """Neither before a program is traced under the preset, nor after."""
    (preset,) = parse("save_qkv_proj").layer_policies
    policy = preset.to_jax()
    assert names_in_jax_policy(policy, {"query_proj"}) == {"query_proj"}

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(x):
        return jnp.sin(checkpoint_name(jnp.sin(x), "query_proj")).sum()

    assert traced_of(jax.grad(loss), X).policy_names == {"query_proj"}


def test_a_scan_over_microbatches_leaves_its_checkpoints_mergeable():
    def accumulated(ws, xs):
        step = unrolled(jax.checkpoint(layer, prevent_cse=False))
        return jax.lax.scan(lambda ws, x: (step(ws, x), None), ws, xs)[0]

    xs = jax.ShapeDtypeStruct((3, *X.shape), X.dtype)
    assert traced_of(accumulated, SEPARATE, xs).num_mergeable == 3 * LAYERS
    assert traced_of(scanned(jax.checkpoint(layer, prevent_cse=False)), STACK, X).num_mergeable == 0


def test_elementwise_recompute_that_is_merged_away():
    """It has no FLOPs to look for: its checkpoints alone say that XLA merges it."""
    traced = traced_of(unrolled(jax.checkpoint(layer, prevent_cse=False, policy=POLICIES.dots_saveable)), SEPARATE, X)
    assert traced.recompute.total == 0
    facts = replace(made_up()["nothing-recomputed"], traced=replace(traced, names={}, policy_names=frozenset()))
    assert str(traced.num_recomputed) in one(find(facts), "nothing-recomputed").evidence


def test_a_loop_without_remat_beside_one_that_has_it():
    sound, rematted = made_up()["unmatched-name"], jax.checkpoint(layer, prevent_cse=False)

    def found_in(*layers: Layer) -> tuple[Finding, ...]:
        return find(replace(sound, traced=traced_of(scanned(*layers), STACK, X)))

    finding = one(found_in(rematted, layer), "loop-without-remat")
    assert finding.num_bytes >= 2 * LAYERS * ACTIVATION_BYTES
    assert finding.source.startswith(__file__)
    assert found_in(rematted, rematted) == found_in(layer, layer) == ()


def remat_each(ws, x):
    for w in ws:
        x = jax.checkpoint(layer)(w, x)
    return (x**2).mean()


def plain(ws, x):
    for w in ws:
        x = layer(w, x)
    return (x**2).mean()


def in_a_scan(ws, x):
    return (jax.lax.scan(lambda x, w: (layer(w, x), None), x, jnp.stack(ws))[0] ** 2).mean()


def two_halves(ws, x):
    for half in (ws[:2], ws[2:]):
        x = jax.checkpoint(lambda x, ws: functools.reduce(lambda x, w: layer(w, x), ws, x))(x, half)
    return (x**2).mean()


def with_head(ws, x):
    return jnp.mean(jax.checkpoint(plain)(ws, x)) * jnp.sum(jnp.exp(x @ x.T) @ jnp.ones((ROWS, ROWS)))


def test_one_checkpoint_around_everything():
    """Around the loss, around a scan, and around all layers; not around each, around halves, or under one that saves matmuls."""
    sound = made_up()["unmatched-name"]

    def found_in(loss: Step, policy: str | None = None) -> tuple[Finding, ...]:
        traced = replace(traced_of(sgd(loss), SEPARATE, X), policy_names=frozenset())
        return find(replace(sound, traced=traced, policy=policy and parse(policy)))

    outside = [jax.checkpoint(plain), jax.checkpoint(in_a_scan), lambda ws, x: jnp.sin(jax.checkpoint(plain)(ws, x))]
    for loss in outside:
        finding = one(found_in(loss), "one-checkpoint")
        assert finding.source.startswith(__file__)
        assert f"{LAYERS * 2 * ROWS * WIDTH * WIDTH / 1e9:.2f} GFLOP" in finding.evidence
    sound_ones = (remat_each, two_halves, with_head, jax.checkpoint(plain, policy=POLICIES.dots_saveable), plain)
    assert {rules(found_in(loss)) == set() for loss in sound_ones} == {True}
    assert found_in(outside[0], "every:4") == (), "it was requested"
    made, at_peak = made_up()["one-checkpoint"], made_up()["recomputed-together"].memory_map
    finding = one(find(replace(made, memory_map=at_peak)), "one-checkpoint")
    assert finding.num_bytes == 2 * MIB
    assert "saves a part of that, which only a compile of it tells" in finding.evidence
    assert one(find(made), "one-checkpoint").num_bytes == 0, "without a map nobody knows"
    assert find(replace(made, memory_map=memory())) == (), "the peak is elsewhere"


def recurrence(step: Layer) -> Step:
    def loss(w, x):
        return (jax.lax.scan(lambda h, now: (step(w, h + now), None), jnp.zeros_like(x[0]), x)[0] ** 2).mean()

    return sgd(loss)


def test_a_loop_over_time_without_remat():
    """Its residuals are much of the step: found. With a checkpoint, over layers, or of few bytes: not."""
    sound, xs = made_up()["unmatched-name"], jax.ShapeDtypeStruct((8, 256, WIDTH), jnp.float32)
    shared: dict[str, Step] = {
        "parameters": recurrence(layer),
        "cast inside": recurrence(lambda w, x: layer(w.astype(jnp.bfloat16).astype(jnp.float32), x)),
        "two matmuls": recurrence(half_named),
    }
    for name, step in shared.items():
        (loop,) = traced_of(step, SEPARATE[0], xs).loops
        facts = replace(sound, traced=Traced(loops=(loop,)))
        finding = one(find(facts), "loop-without-remat")
        assert finding.num_bytes == loop.num_bytes >= 8 * 256 * WIDTH * 4, name
        large = replace(facts, memory=replace(facts.memory, argument_bytes=2**33))
        assert find(large) == (), "residuals of few bytes"
        assert "with_policy" in one(find(replace(facts, remedies="with_policy")), "loop-without-remat").remedy
    for step, args in (
        (recurrence(jax.checkpoint(layer)), (SEPARATE[0], xs)),
        (recurrence(jax.checkpoint(half_named)), (SEPARATE[0], xs)),
        (scanned(layer), (STACK, X)),
    ):
        assert find(replace(sound, traced=Traced(loops=traced_of(step, *args).loops))) == ()


def scanned_groups(layer: Layer, loop: bool = False) -> Step:
    """Layers in groups of three in a body, in a scan or a fori_loop over groups."""

    def group(x, ws):
        for w in ws:
            x = layer(w, x)
        return x, None

    def loss(ws, x):
        if loop:
            return (jax.lax.fori_loop(0, len(ws), lambda i, x: group(x, ws[i])[0], x) ** 2).mean()
        return (jax.lax.scan(group, x, ws)[0] ** 2).mean()

    return sgd(loss)


def grouped_again(layer: Layer) -> Step:
    """A checkpoint around each group of a scan, and one around each layer in it."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def group(x, ws):
        for w in ws:
            x = layer(w, x)
        return x, None

    return sgd(lambda ws, x: (jax.lax.scan(group, x, ws)[0] ** 2).mean())


def scanned_again(layer: Layer) -> Step:
    def loss(ws, x):
        return (
            jax.lax.scan(lambda x, ws: (jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0], None), x, ws)[0] ** 2
        ).mean()

    return sgd(loss)


def wide_layer(w, x):
    return x + jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w.T) @ w) @ w.T


FREE = jax.checkpoint(wide_layer, prevent_cse=False)
#: Two groups of three kernels, each four times as wide as the batch's rows.
GROUPS = jax.ShapeDtypeStruct((2, 3, WIDTH, 4 * WIDTH), jnp.float32)


def test_bodies_whose_checkpoints_have_no_barriers():
    """Not with barriers, with one checkpoint in a body, or with each in a scan of its own."""
    for step in (scanned_groups(FREE), scanned_groups(FREE, loop=True), grouped_again(FREE)):
        (body,) = traced_of(step, GROUPS, X).unordered
        assert (body.num_checkpoints, body.source.partition(":")[0]) == (3, __file__)
    for step in (scanned_groups(jax.checkpoint(wide_layer)), scanned_again(FREE), scanned_groups(wide_layer)):
        assert traced_of(step, GROUPS, X).unordered == ()


def by_hand(head, x, targets):
    logits = x @ head
    logits = logits - jax.lax.stop_gradient(logits.max(-1))[:, None]
    right = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return (jnp.log(jnp.exp(logits).sum(-1)) - right).mean()


def one_hot(head, x, targets):
    return optax.softmax_cross_entropy(x @ head, jax.nn.one_hot(targets, VOCABULARY)).mean()


def summed_in_chunks(loss: Step) -> Step:
    """The loss of 256 rows at a time, whose logits are recomputed."""

    def chunked(head, x, targets):
        parts = x.reshape(-1, 256, WIDTH), targets.reshape(-1, 256)
        one = jax.checkpoint(lambda part: loss(head, *part), prevent_cse=False)
        return jax.lax.map(one, parts).mean()

    return chunked


def few_classes(head, x, targets):
    return by_hand(head[:, :16], jnp.tanh(x @ head) @ head.T, targets % 16)


def scores(head, x, targets):
    """Attention that is written by hand, with the logarithm of its sums."""
    heads = x.reshape(4, -1, WIDTH)
    made = heads @ heads.swapaxes(1, 2)
    return (jnp.log(jnp.exp(made).sum(-1)) - targets.reshape(4, -1)).mean() + (x @ head[:, :16]).mean()


def test_logits_of_a_loss_by_hand_are_known_by_their_logarithm():
    for loss in (by_hand, one_hot, classify):
        jaxpr = jax.make_jaxpr(jax.grad(loss))(HEAD, X, TARGETS)
        assert normalized_sizes(jaxpr) == {ROWS * VOCABULARY}
    for loss, size in ((summed_in_chunks(by_hand), 256 * VOCABULARY), (few_classes, ROWS * 16)):
        assert normalized_sizes(jax.make_jaxpr(jax.grad(loss))(HEAD, X, TARGETS)) == {size}
    assert normalized_sizes(jax.make_jaxpr(jax.grad(scores))(HEAD, X, TARGETS)) == frozenset()


# What is compiled.


@pytest.mark.full
def test_logits_are_found_in_any_loss_and_chunks_take_fewer_bytes(h100):
    """Of optax's losses, and of one by hand; not in chunks, of few classes, or scores of attention."""
    wide = jax.ShapeDtypeStruct((4 * ROWS, WIDTH), jnp.float32), jax.ShapeDtypeStruct((4 * ROWS,), jnp.int32)

    for loss in (classify, one_hot, by_hand):
        bad, good = (mapped(sgd(some), (HEAD, *wide), h100) for some in (loss, summed_in_chunks(loss)))
        assert one(find(lint_input(bad)), "logits-largest").source.startswith(__file__)
        assert "logits-largest" not in rules(find(lint_input(good)))
        assert good.memory.total_bytes < bad.memory.total_bytes / 2
    for loss in (few_classes, scores):
        assert "logits-largest" not in rules(find(lint_input(mapped(sgd(loss), (HEAD, *wide), h100))))


@pytest.mark.full
def test_several_checkpoints_of_a_body_recompute_at_once(h100):
    """In a scan, a fori_loop, and inside a checkpoint. A loop of their own takes fewer bytes on both lines, barriers on one.

    XLA of jax 0.12 orders the recompute by the barriers, and postpones the gradients of weights that read it.
    """
    rows = jax.ShapeDtypeStruct((8192, WIDTH), jnp.float32)

    ordered = jax.checkpoint(wide_layer)
    good = mapped(scanned_again(FREE), (GROUPS, rows), h100)
    assert "recomputed-together" not in rules(find(lint_input(good)))
    for step in (scanned_groups, functools.partial(scanned_groups, loop=True), grouped_again):
        bad, better = (mapped(step(layer), (GROUPS, rows), h100) for layer in (FREE, ordered))
        assert one(find(lint_input(bad)), "recomputed-together").num_bytes >= 8192 * 4 * WIDTH * 4
        assert "recomputed-together" not in rules(find(lint_input(better)))
        assert good.memory.total_bytes < bad.memory.total_bytes
        assert (better.memory.total_bytes < bad.memory.total_bytes) == (jax.__version_info__ < (0, 12))


def in_a_python_loop(loss: Step) -> Step:
    """A step over the microbatches `xs`, each with a gradient of its own."""

    def step(params, xs):
        gradients = [jax.grad(loss)(params, x) for x in xs]
        return jax.tree.map(lambda p, *g: p - 0.1 * sum(g), params, *gradients)

    return step


def one_after_the_other(loss: Step) -> Step:
    """The same, with each microbatch waiting for the gradients of the one before."""

    def step(params, xs):
        total = jax.grad(loss)(params, xs[0])
        for x in xs[1:]:
            total, x = jax.lax.optimization_barrier((total, x))
            total = jax.tree.map(jnp.add, total, jax.grad(loss)(params, x))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)

    return step


def scanned_microbatches(loss: Step) -> Step:
    def step(params, xs):
        add = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None)  # noqa: E731
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)

    return step


@pytest.mark.full
def test_microbatches_in_a_python_loop_have_their_residuals_at_once(h100):
    """The remedy, a scan, takes fewer bytes by the finding's or more. One gradient of the sum of all has one forward pass."""
    args = SEPARATE, jax.ShapeDtypeStruct((4, ROWS, WIDTH), jnp.float32)
    of_sum = sgd(lambda params, xs: sum(plain(params, x) for x in xs))
    bad, good, other = (mapped(step, args, h100) for step in (in_a_python_loop(plain), scanned_microbatches(plain), of_sum))
    finding = one(find(lint_input(bad)), "microbatches-together")
    assert bad.memory.total_bytes - good.memory.total_bytes >= finding.num_bytes > 3 * ACTIVATION_BYTES
    apart = mapped(one_after_the_other(plain), args, h100)
    assert read_traced(bad.jaxpr).num_rounds == read_traced(apart.jaxpr).num_rounds == 4
    for sound in (good, other, apart):
        assert "microbatches-together" not in rules(find(lint_input(sound)))


@pytest.mark.full
def test_the_remedies_of_checkpoints_take_fewer_bytes(h100):
    """A checkpoint around each layer in place of one around all, and one around each step in time.

    The bytes of the finding are the most that the first remedy saves, and it saves a third of them or more.
    """
    xs = jax.ShapeDtypeStruct((64, 1024, WIDTH), jnp.float32)
    for worse, better, args in (
        (sgd(jax.checkpoint(plain)), sgd(remat_each), (SEPARATE, X)),
        (sgd(jax.checkpoint(in_a_scan)), sgd(remat_each), (SEPARATE, X)),
        (recurrence(half_named), recurrence(jax.checkpoint(half_named)), (SEPARATE[0], xs)),
    ):
        bad, good = (lower_and_compile(step, args, h100, donate_argnums=0) for step in (worse, better))
        assert good.memory.total_bytes < bad.memory.total_bytes
        assert rules(find(lint_input(bad))) & {"one-checkpoint", "loop-without-remat"}
        assert find(lint_input(good)) == ()
        for finding in find(lint_input(mapped(worse, args, h100))):
            if finding.rule == "one-checkpoint":
                assert 0.3 * finding.num_bytes <= bad.memory.total_bytes - good.memory.total_bytes <= finding.num_bytes


@pytest.mark.full
def test_updates_in_scans_that_are_not_donated(h100):
    """A scan, a fori_loop and nested scans of whole steps; not gradients that a loop adds up."""

    def update(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    def scan(params, xs):
        return jax.lax.scan(lambda w, x: (update(w, x), None), params, xs)[0]

    def loop(params, xs):
        return jax.lax.fori_loop(0, 4, lambda i, w: update(w, xs[i]), params)

    def nested(params, xs):
        return jax.lax.scan(lambda w, _: (scan(w, xs), None), params, length=3)[0]

    def gradients(params, xs):
        of_one = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
        return jax.lax.scan(lambda total, x: (total + of_one(params, x), None), jnp.zeros_like(params), xs)[0]

    args = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((4, 256, 1024), jnp.float32)
    for step in (scan, loop, nested):
        bad, good = (lower_and_compile(step, args, h100, donate_argnums=donated) for donated in ((), (0,)))
        found = one(find(lint_input(bad)), "not-donated")
        assert found.num_bytes == bad.memory.total_bytes - good.memory.total_bytes == args[0].size * 4
        assert find(lint_input(good)) == ()
    assert find(lint_input(lower_and_compile(gradients, args, h100))) == ()


@pytest.mark.full
def test_a_sound_step_has_no_findings(h100):
    step = scanned(jax.checkpoint(layer, **saved("hidden")))
    assert jaxremat.lint(jaxremat.Workload(step=step, args=(STACK, X), donate_argnums=0), target=h100) == ()


@pytest.mark.full
def test_recompute_that_is_merged_away(h100):
    bad = unrolled(jax.checkpoint(layer, prevent_cse=False))
    found = one(jaxremat.lint(bad, (SEPARATE, X), h100, donate_argnums=0), "nothing-recomputed")
    assert f"{LAYERS} of {LAYERS}" in found.evidence
    assert f"{LAYERS * 2 * ROWS * WIDTH * WIDTH / 1e9:.2f} GFLOP" in found.evidence
    assert jaxremat.lint(unrolled(jax.checkpoint(layer)), (SEPARATE, X), h100, donate_argnums=0) == ()


@pytest.mark.full
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="newer versions of XLA change larger programs only")
def test_xla_changed_the_program(h100):
    step = scanned(layer)
    rows = jax.ShapeDtypeStruct((16 * 2**20, WIDTH), jnp.float32)  # XLA's pass starts near the device's memory
    found = one(jaxremat.lint(step, (STACK, rows), h100, donate_argnums=0, xla_remat=True), "xla-remat")
    assert ".remat" in found.evidence
    assert found.num_bytes > 0
    assert "xla-remat" not in rules(jaxremat.lint(step, (STACK, rows), h100, donate_argnums=0))


@pytest.mark.full
def test_a_step_that_is_not_donated_and_a_policy_that_is_said(h100):
    """A whole step is linted as it is, and the policy says which names its layers have."""
    step = scanned(jax.checkpoint(layer, **saved("hidden")))
    found = jaxremat.lint(step, (STACK, X), h100, policy="save:hide")
    assert rules(found) == {"not-donated", "unmatched-name"}
    assert one(found, "not-donated").num_bytes == STACK.size * 4
    assert one(found, "not-donated").remedy == "jax.jit(step, donate_argnames=('params',))"


@pytest.mark.full
def test_gradients_beside_parameters_are_meant_to_be(h100):
    gradient = jax.grad(lambda w, x: ((x @ w) ** 2).mean())
    assert jaxremat.lint(gradient, (SEPARATE[0], X), h100) == ()


@pytest.mark.full
def test_residuals_without_a_name(h100):
    policy = POLICIES.save_from_both_policies(POLICIES.save_only_these_names("hidden"), POLICIES.dots_saveable)
    step = scanned(jax.checkpoint(half_named, policy=policy, prevent_cse=False))
    found = one(jaxremat.lint(step, (STACK, X), h100, donate_argnums=0), "unnamed-residuals")
    assert found.num_bytes == LAYERS * ACTIVATION_BYTES
    assert f"dot_general x {LAYERS}" in found.evidence
    assert found.remedy == "jax.checkpoint_policies.save_only_these_names('hidden')"
    step = scanned(jax.checkpoint(half_named, **saved("hidden")))
    assert jaxremat.lint(step, (STACK, X), h100, donate_argnums=0) == ()


@pytest.mark.full
def test_logits_are_the_largest_buffer(h100):
    found = one(jaxremat.lint(sgd(classify), (HEAD, X, TARGETS), h100, donate_argnums=0), "logits-largest")
    assert found.num_bytes == 4 * ROWS * VOCABULARY
    assert f"f32[{ROWS},{VOCABULARY}]" in found.evidence


# The decoder.


@functools.cache
def compiled(model: ModelConfig, policy: str, attention: str, target: Target) -> Compilation:
    step = decoder_step(model, TRAIN, parse(policy), attention)
    return mapped(step, decoder_args(model, TRAIN, BATCH), target)


def found_in(model: ModelConfig, policy: str, attention: str, target: Target) -> tuple[Finding, ...]:
    return find(lint_input(compiled(model, policy, attention, target), policy=parse(policy), remedies="flags with loss"))


DROPOUT = replace(GPT, dropout=0.1)


@pytest.mark.full
def test_attention_runs_twice_but_not_where_a_plan_has_weighed_it(h100):
    assert (
        f"{2 * GPT.num_layers} times for {GPT.num_layers} "
        in one(found_in(GPT, "dots", "cudnn", h100), "attention-twice").evidence
    )
    done, policy = compiled(GPT, "dots", "cudnn", h100), parse("dots")
    assert [found.rule for found in findings(done, "dots", policy, "flags", h100)] == ["attention-twice"]
    assert findings(done, "plan:plan.json", policy, "flags", h100) == findings(done, "auto", policy, "flags", h100) == ()


def test_attention_without_a_gradient_runs_once():
    """Scopes tell the forward kernel of a frozen model from a recompute."""
    facts = made_up()["attention-twice"]

    def at(scope: str) -> LintInput:
        names = {"%attention ": "jit(step)/jvp(Net)/attention", "%attention.1 ": scope}
        lines = [
            line
            + next((f', metadata={{op_name="{of}"}}' for name, of in names.items() if name in line.partition("=")[0]), "")
            for line in ATTENTION_TWICE.splitlines()
        ]
        return replace(facts, module=program(("  ROOT", "\n".join(lines) + "\n  ROOT")))

    assert find(at("jit(step)/Teacher/attention")) == ()
    (found,) = find(at("jit(step)/transpose(jvp(Net))/rematted_computation/attention"))
    assert "runs 2 times for 1 backward" in found.evidence


def test_an_activation_that_was_dropped_is_no_mask():
    facts = made_up()["dropout-masks"]
    assert facts.memory_map is not None
    floats = [replace(one, shape="bf16[4,65536]") for one in facts.memory_map.buffers]
    assert find(replace(facts, memory_map=memory(*floats))) == ()


@pytest.mark.full
def test_dropout_masks(h100):
    found = one(found_in(DROPOUT, "none", "cudnn", h100), "dropout-masks")
    assert found.num_bytes == 2 * 8 * BATCH * TRAIN.seq_len * GPT.embed_dim  # a byte for each activation, two masks a layer
    assert f"pred[8,{BATCH},{TRAIN.seq_len},{GPT.embed_dim}]" in found.evidence
    assert found.source.rpartition(":")[0].endswith("model/layers.py")


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize(
    ("model", "policy", "attention"),
    [
        (DROPOUT, "dots+attention", "cudnn"),
        (GPT, "every:4+nothing", "cudnn"),
        (LLAMA, "offload:mlpwi_0,mlpwi_1+attention", "cudnn"),
        (UNROLLED, "one-in:2", "xla"),
    ],
)
def test_no_false_alarm_on_the_projects_models(model, policy, attention, h100):
    assert found_in(model, policy, attention, h100) == ()


# Workloads.


def looped(layer: Layer, **fields: Any) -> jaxremat.Workload:
    """A workload whose loss scans over `layer`."""

    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["ws"])[0] ** 2)

    return jaxremat.Workload(loss=loss, params={"ws": STACK}, batch=X, **fields)


@pytest.mark.full
def test_a_workload_s_loss_is_linted_as_it_is_written(h100):
    found = jaxremat.lint(looped(jax.checkpoint(layer, **saved("hiden"))), target=h100)
    assert one(found, "unmatched-name").remedy == "'hidden' instead of 'hiden'"
    assert "not-donated" not in rules(found)  # the step that is made of the loss donates its state


@pytest.mark.full
def test_a_workload_s_loss_is_linted_under_a_policy(h100):
    workload = looped(jax.checkpoint(read_beside_its_name, **saved("hiden")))
    found = jaxremat.lint(workload, target=h100, policy="save:hidden")  # in place of its author's
    assert rules(found) == {"saved-and-recomputed"}
    assert found[0].num_bytes == LAYERS * ACTIVATION_BYTES
    assert found[0].source.startswith(__file__)


def test_wrong_arguments_are_rejected(h100):
    step = scanned(layer)
    for words, error, lint in (
        (["Workload", "args"], UsageError, lambda: jaxremat.lint(looped(layer), (STACK, X))),
        (["Workload", "donate_argnums"], UsageError, lambda: jaxremat.lint(looped(layer), donate_argnums=0)),
        (["function", "args"], UsageError, lambda: jaxremat.lint(step)),
        (["save"], UnknownPolicyError, lambda: jaxremat.lint(step, (STACK, X), policy="save")),
        (["'hiden'"], UnknownNameError, lambda: jaxremat.lint(looped(layer), target=h100, policy="save:hiden")),
    ):
        with pytest.raises(error) as caught:
            lint()
        assert all(word in caught.value.got for word in words)
