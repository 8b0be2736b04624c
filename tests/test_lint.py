"""Each rule of the lint finds a program that it is about, and leaves a sound one alone, both compiled for an H100.

The project's own models raise no false alarm under the named policies.
"""

import dataclasses
import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxremat
from jaxremat.errors import UnknownNameError, UnknownPolicyError, UsageError
from jaxremat.policy.grammar import parse
from jaxremat.trial.findings import findings
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.lint import RULES, find
from jaxremat.xla.lint_input import Finding, largest_logits, lint_input
from jaxremat.xla.traced import names_of, read_traced
from tests.helpers import GPT, LLAMA, TRAIN, UNROLLED, compiled, decoder_args, decoder_step

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


def saved(*names):
    return {"policy": POLICIES.save_only_these_names(*names), "prevent_cse": False}


def sgd(loss):
    return lambda params, *rest: jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, *rest))


def scanned(*layers):
    """One loop over the stack for each of `layers`."""

    def loss(ws, x):
        for layer in layers:
            x, _ = jax.lax.scan(lambda x, w, layer=layer: (layer(w, x), None), x, ws)
        return (x**2).mean()

    return sgd(loss)


def unrolled(layer):
    def loss(ws, x):
        for w in ws:
            x = layer(w, x)
        return (x**2).mean()

    return sgd(loss)


def classify(head, x, targets):
    return optax.softmax_cross_entropy_with_integer_labels(x @ head, targets).mean()


@functools.cache
def step_facts(model, policy, attention, target, **levers):
    """The facts of the project's own step under `policy`, compiled once."""
    train, parsed = replace(TRAIN, **levers), parse(policy)
    step = decoder_step(model, train, parsed, attention)
    done = lower_and_compile(step, decoder_args(model, train, 8), target, donate_argnums=0, keep_dump=True)
    return lint_input(done, policy=parsed, remedies="decoder flags")


def rules(found):
    return {finding.rule for finding in found}


def one(found, rule) -> Finding:
    (finding,) = [finding for finding in found if finding.rule == rule]
    assert finding.evidence
    assert finding.remedy
    return finding


def test_a_sound_step_has_no_findings(h100):
    step = scanned(jax.checkpoint(layer, **saved("hidden")))
    assert jaxremat.lint(step, (STACK, X), h100, donate_argnums=0) == ()


def test_a_name_that_matches_nothing(h100):
    step = scanned(jax.checkpoint(layer, **saved("hiden")))
    found = one(jaxremat.lint(step, (STACK, X), h100, donate_argnums=0), "unmatched-name")
    assert "'hiden'" in found.evidence
    assert "1 name is: hidden" in found.evidence
    assert found.remedy == "'hidden' instead of 'hiden'"


def test_names_of_a_policy_that_is_said_are_checked_but_not_a_presets(h100):
    step = scanned(jax.checkpoint(layer, **saved("hidden")))
    lint = functools.partial(jaxremat.lint, step, (STACK, X), h100, donate_argnums=0)
    assert "'hide'" in one(lint(policy="save:hidden,hide"), "unmatched-name").evidence
    assert lint(policy="minimal") == ()
    with pytest.raises(UnknownPolicyError):
        lint(policy="save")


def test_names_are_read_from_any_policy():
    written = {"a"}
    both = POLICIES.save_from_both_policies(POLICIES.save_only_these_names("a", "b"), POLICIES.dots_saveable)
    offload = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"], names_which_can_be_offloaded=["c"], offload_src="device", offload_dst="pinned_host"
    )
    assert names_of(both, written) == {"a", "b"}
    assert names_of(offload, written) == {"a", "c"}
    assert names_of(POLICIES.nothing_saveable, written) == names_of(None, written) == set()


def test_recompute_that_is_merged_away(h100):
    bad = unrolled(jax.checkpoint(layer, prevent_cse=False))
    found = one(jaxremat.lint(bad, (SEPARATE, X), h100, donate_argnums=0), "nothing-recomputed")
    assert f"{LAYERS} of {LAYERS} checkpoints" in found.evidence
    assert "of 1.07 GFLOP" in found.evidence
    assert "prevent_cse=True" in found.remedy
    dots = unrolled(jax.checkpoint(layer, prevent_cse=False, policy=POLICIES.dots_saveable))
    assert (
        "operations to compute again" in one(jaxremat.lint(dots, (SEPARATE, X), h100, donate_argnums=0), found.rule).evidence
    )
    good = unrolled(jax.checkpoint(layer))
    assert jaxremat.lint(good, (SEPARATE, X), h100, donate_argnums=0) == ()


def test_a_loop_over_microbatches_keeps_nothing_apart():
    def accumulated(ws, xs):
        step = unrolled(jax.checkpoint(layer, prevent_cse=False))
        return jax.lax.scan(lambda ws, x: (step(ws, x), None), ws, xs)[0]

    xs = jax.ShapeDtypeStruct((3, *X.shape), X.dtype)
    assert read_traced(jax.make_jaxpr(accumulated)(SEPARATE, xs)).num_mergeable == 3 * LAYERS
    step = scanned(jax.checkpoint(layer, prevent_cse=False))
    assert read_traced(jax.make_jaxpr(step)(STACK, X)).num_mergeable == 0


def test_attention_runs_twice(h100):
    found = one(find(step_facts(GPT, "dots", "cudnn", h100)), "attention-twice")
    assert "16 times for 8 backward ones" in found.evidence
    assert found.remedy == "--policy dots+attention"
    assert "attention-twice" not in rules(find(step_facts(GPT, "dots+attention", "cudnn", h100)))
    mix = find(step_facts(GPT, "1*nothing|1*save:query_proj", "cudnn", h100))
    assert one(mix, "attention-twice").remedy == "--policy 1*nothing+attention|1*save:query_proj+attention"


def test_a_plan_has_weighed_attention(h100):
    policy, done = parse("dots"), compiled(h100, "dots")
    assert [found.rule for found in findings(done, "dots", policy, "flags")] == ["attention-twice"]
    assert findings(done, "plan:plan.json", policy, "flags") == findings(done, "auto", policy, "flags") == ()


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="newer versions of XLA change larger programs only")
def test_xla_changed_the_program(h100):
    step = scanned(layer)
    rows = jax.ShapeDtypeStruct((16 * 2**20, WIDTH), jnp.float32)  # XLA's pass starts near the device's memory
    found = one(jaxremat.lint(step, (STACK, rows), h100, donate_argnums=0, xla_remat=True), "xla-remat")
    assert ".remat" in found.evidence
    assert found.num_bytes > 0
    assert "xla-remat" not in rules(jaxremat.lint(step, (STACK, rows), h100, donate_argnums=0))


def test_parameters_not_donated(h100):
    step = scanned(jax.checkpoint(layer, **saved("hidden")))
    found = one(jaxremat.lint(step, (STACK, X), h100), "not-donated")
    assert found.num_bytes == STACK.size * 4
    assert found.remedy == "jax.jit(step, donate_argnames=('params',))"


def test_gradients_beside_parameters_are_meant_to_be(h100):
    gradient = jax.grad(lambda w, x: ((x @ w) ** 2).mean())
    assert jaxremat.lint(gradient, (SEPARATE[0], X), h100) == ()


def test_a_loop_without_remat_beside_one_that_has_it(h100):
    rematted = jax.checkpoint(layer, prevent_cse=False)
    found = one(jaxremat.lint(scanned(rematted, layer), (STACK, X), h100, donate_argnums=0), "loop-without-remat")
    assert found.num_bytes >= 2 * LAYERS * ACTIVATION_BYTES
    assert found.source.startswith(__file__)
    assert jaxremat.lint(scanned(rematted, rematted), (STACK, X), h100, donate_argnums=0) == ()
    assert jaxremat.lint(scanned(layer, layer), (STACK, X), h100, donate_argnums=0) == ()


def test_residuals_without_a_name(h100):
    policy = POLICIES.save_from_both_policies(POLICIES.save_only_these_names("hidden"), POLICIES.dots_saveable)
    step = scanned(jax.checkpoint(half_named, policy=policy, prevent_cse=False))
    found = one(jaxremat.lint(step, (STACK, X), h100, donate_argnums=0), "unnamed-residuals")
    assert found.num_bytes == LAYERS * ACTIVATION_BYTES
    assert f"dot_general x {LAYERS}" in found.evidence
    assert found.remedy == "jax.checkpoint_policies.save_only_these_names('hidden')"
    step = scanned(jax.checkpoint(half_named, **saved("hidden")))
    assert jaxremat.lint(step, (STACK, X), h100, donate_argnums=0) == ()


def test_dropout_masks(h100):
    dropout = replace(GPT, dropout=0.1)
    found = one(find(step_facts(dropout, "none", "cudnn", h100)), "dropout-masks")
    assert found.num_bytes == 2 * 8 * 8 * TRAIN.seq_len * GPT.embed_dim  # a byte for each activation, two masks a layer
    assert "pred[8,8,512,256]" in found.evidence
    assert found.source.rpartition(":")[0].endswith("model/layers.py")
    assert find(step_facts(dropout, "dots+attention", "cudnn", h100)) == ()


def test_a_matmul_saved_and_recomputed(h100):
    step = scanned(jax.checkpoint(read_beside_its_name, **saved("hidden")))
    found = one(jaxremat.lint(step, (STACK, X), h100, donate_argnums=0), "saved-and-recomputed")
    assert found.num_bytes == LAYERS * ACTIVATION_BYTES
    assert found.source.startswith(__file__)


def test_logits_are_the_largest_buffer(h100):
    done = lower_and_compile(sgd(classify), (HEAD, X, TARGETS), h100, donate_argnums=0, keep_dump=True)
    facts = lint_input(done)
    found = one(find(facts), "logits-largest")
    assert found.num_bytes == 4 * ROWS * VOCABULARY
    assert "f32[2048,8192]" in found.evidence
    less = replace(facts, chunked_bytes=facts.memory.total_bytes - 12345)
    assert one(find(less), "logits-largest").num_bytes == 12345
    assert rules(find(replace(facts, chunked_bytes=facts.memory.total_bytes))) == set()  # it wouldn't save a byte
    assert largest_logits(None) is None


def test_rules_on_buffers_need_the_map(h100):
    facts = step_facts(replace(GPT, dropout=0.1), "none", "cudnn", h100)
    assert rules(find(facts)) == {"dropout-masks"}
    assert find(replace(facts, memory_map=None)) == ()


@pytest.mark.parametrize(
    ("model", "policy", "attention", "true"),
    [
        (GPT, "none", "cudnn", set()),
        pytest.param(GPT, "nothing", "cudnn", set(), marks=pytest.mark.slow),
        (GPT, "dots+attention", "cudnn", set()),
        (GPT, "save:add", "cudnn", {"attention-twice"}),
        (GPT, "every:4+nothing", "cudnn", set()),
        pytest.param(GPT, "one-in:2", "cudnn", set(), marks=pytest.mark.slow),
        (LLAMA, "minimal", "xla", set()),
        (LLAMA, "offload:mlpwi_0,mlpwi_1+attention", "cudnn", set()),
        (UNROLLED, "nothing", "cudnn", set()),
        pytest.param(UNROLLED, "save:context,mlpwi_0+attention", "cudnn", set(), marks=pytest.mark.slow),
        (UNROLLED, "one-in:2", "cudnn", set()),
    ],
)
@pytest.mark.any_jax
def test_no_false_alarm_on_the_projects_models(model, policy, attention, true, h100):
    assert rules(find(step_facts(model, policy, attention, h100))) == true


# Workloads.


def looped(layer, **fields):
    """A workload whose loss loops over `layer`."""

    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["ws"])[0] ** 2)

    return jaxremat.Workload(loss=loss, params={"ws": STACK}, batch=X, **fields)


def test_a_workload_s_loss_is_linted_as_it_is_written(h100):
    found = jaxremat.lint(looped(jax.checkpoint(layer, **saved("hiden"))), target=h100)
    assert one(found, "unmatched-name").remedy == "'hidden' instead of 'hiden'"
    assert "not-donated" not in rules(found)  # the step that is made of the loss donates its state


def test_a_workload_s_loss_is_linted_under_a_policy(h100):
    workload = looped(jax.checkpoint(read_beside_its_name, **saved("hiden")))
    found = jaxremat.lint(workload, target=h100, policy="save:hidden")  # in place of its author's
    assert rules(found) == {"saved-and-recomputed"}
    with pytest.raises(UnknownNameError, match="'hiden'"):
        jaxremat.lint(workload, target=h100, policy="save:hiden")


def test_a_workload_that_is_a_step_is_linted_as_it_is(h100):
    step = scanned(jax.checkpoint(layer, **saved("hidden")))
    found = jaxremat.lint(jaxremat.Workload(step=step, args=(STACK, X)), target=h100, policy="save:hide")
    assert rules(found) == {"not-donated", "unmatched-name"}
    assert jaxremat.lint(jaxremat.Workload(step=step, args=(STACK, X), donate_argnums=0), target=h100) == ()


def test_wrong_arguments_are_refused():
    with pytest.raises(UsageError, match="lint got a Workload and args"):
        jaxremat.lint(looped(layer), (STACK, X))
    with pytest.raises(UsageError, match="lint got a Workload and donate_argnums"):
        jaxremat.lint(looped(layer), donate_argnums=0)
    with pytest.raises(UsageError, match="lint got a function and no args"):
        jaxremat.lint(scanned(layer))


@pytest.mark.parametrize(
    ("remedies", "logits", "masks", "attention"),
    [
        (
            "code",
            "chunked_cross_entropy",
            "jaxremat.remat(layer, 'dots+attention')",
            "jaxremat.remat(layer, 'dots+attention'): ",
        ),
        (
            "with_policy",
            "chunked_cross_entropy",
            "jaxremat.with_policy(loss, 'dots+attention')",
            "jaxremat.with_policy(loss, ",
        ),
        ("flags", "chunked_cross_entropy", "--policy dots+attention", "--policy dots+attention"),
        ("decoder flags", "--loss chunked", "--policy dots+attention", "--policy dots+attention"),
    ],
)
def test_a_remedy_can_be_done_by_who_reads_it(remedies, logits, masks, attention, h100):
    """A user's own workload has no `--loss`, and no layer class to wrap."""
    facts = replace(step_facts(GPT, "dots", "cudnn", h100), remedies=remedies)
    assert one(find(facts), "attention-twice").remedy.startswith(attention)
    facts = replace(step_facts(replace(GPT, dropout=0.1), "none", "cudnn", h100), remedies=remedies)
    assert one(find(facts), "dropout-masks").remedy == masks
    done = lower_and_compile(sgd(classify), (HEAD, X, TARGETS), h100, donate_argnums=0, keep_dump=True)
    assert logits in one(find(lint_input(done, remedies=remedies)), "logits-largest").remedy


def test_every_rule_has_its_name():
    assert len(RULES) == 10
    assert {field.name for field in dataclasses.fields(Finding)} >= {"rule", "evidence", "remedy", "num_bytes"}
