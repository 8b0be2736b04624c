"""The verdicts on the claims of the field, on both sides of each limit. The rows are made up."""

from typing import Any

import pytest

from experiments.claims.every import CLAIMS
from experiments.claims.every_k import is_u
from experiments.claims.steps import LINKS, TARGETS
from experiments.claims.words import percent

pytestmark = pytest.mark.any_jax


def row(policy="none", batch=1, **found):
    return {
        "preset": "gpt2",
        "policy": policy,
        "batch": batch,
        "what": "step",
        "target": TARGETS[0],
        "step_s": 1.0,
        "predicted_error": 0.12,
        **found,
    }


def test_a_factor_of_three_needs_two_sequences_that_are_fixed():
    rows = [row(batch=b, temp_bytes=b << 30, argument_bytes=2 << 30, total_bytes=(2 + b) << 30) for b in (1, 4, 16)]
    found = CLAIMS["batch_linear"].judge(rows)
    assert found.verdict == "holds"
    assert "total grows 3.00 times" in found.ours
    assert "2.0 sequences" in " ".join(found.sentences)
    rows[1]["temp_bytes"] *= 2
    assert CLAIMS["batch_linear"].judge(rows).verdict == "refuted"


@pytest.mark.parametrize(("power", "verdict"), [(0.5, "holds"), (0.7, "holds under conditions"), (1.0, "refuted")])
def test_the_square_root_is_judged_by_the_growth(power, verdict):
    sizes = {"none": lambda n: n, "every:sqrt": lambda n: 2 * n**power}
    rows = [
        row(policy, num_layers=n, sources={"activations": size(n) * 2**20}, executed_flops=1)
        for policy, size in sizes.items()
        for n in (25, 100, 400)
    ]
    found = CLAIMS["sqrt_n"].judge(rows)
    assert (found.verdict, f"N^{power:.2f}" in found.ours) == (verdict, True)


def test_the_crossover_is_the_first_link_that_is_as_fast():
    common = {"link_gb_per_s": 63.0, "scan_layers": True, "total_bytes": 1, "host_temp_bytes": 1}
    recompute = row("nothing", step_s_by_link=[1.0] * len(LINKS), **common)
    offload = row("offload:mlpwi_0", step_s_by_link=[100 / link for link in LINKS], **common)
    found = CLAIMS["offload"].judge([recompute, offload])
    assert found.ours == "crossovers between 91 and 128 GB/s; PCIe 5.0 has 63"
    for seconds, verdict in (
        ([100 / link for link in LINKS], "holds under conditions"),
        ([20 / link for link in LINKS], "holds"),
        ([max(0.9, 100 / link) for link in LINKS], "open"),
        ([2.0] * len(LINKS), "refuted"),
    ):
        offload["step_s_by_link"] = seconds
        found = CLAIMS["offload"].judge([recompute, offload])
        assert found.verdict == verdict
        assert ("within the error" in " ".join(found.sentences)) == (verdict == "open")


@pytest.mark.parametrize(
    ("unrolled_bytes", "unrolled_s", "verdict"),
    [
        ((1.0, 1.009), (0.8, 0.8), "holds"),
        ((1.0, 1.0), (0.8, 0.95), "holds under conditions"),
        ((1.0, 1.02), (0.8, 0.8), "holds under conditions"),
        ((1.0, 1.0), (0.95, 1.05), "open"),
        ((1.0, 1.0), (1.2, 1.2), "refuted"),
        ((1.0, 1.02), (0.95, 1.05), "refuted"),
    ],
)
def test_layouts_are_judged_by_bytes_and_by_times_beyond_the_error(unrolled_bytes, unrolled_s, verdict):
    rows = [row(policy, total_bytes=1000, scan_layers=True) for policy in ("none", "nothing")]
    for policy, size, seconds in zip(("none", "nothing"), unrolled_bytes, unrolled_s, strict=True):
        rows.append(row(policy, total_bytes=1000 * size, step_s=seconds, scan_layers=False))
    found = CLAIMS["layouts"].judge(rows)
    assert found.verdict == verdict
    assert ("less than the error" in " ".join(found.sentences)) == any(abs(1 - s) <= 0.12 for s in unrolled_s)


@pytest.mark.parametrize(
    ("planned_s", "smaller", "larger", "verdict"),
    [
        (0.8, "context", "context,mlpwi_0", "holds"),
        (0.8, "key_proj+attention", "5*save:context|7*save:mlp/wi_0/dot_general", "holds"),
        (0.8, "mlpwi_0", "context,mlpwi_0", "holds under conditions"),
        (0.8, "context", "context", "holds under conditions"),
        (0.95, "context", "context,mlpwi_0", "open"),
        (1.2, "context", "context,mlpwi_0", "refuted"),
    ],
)
def test_a_plan_is_better_by_more_than_the_error_and_keeps_attention_first(planned_s, smaller, larger, verdict):
    plans = [
        row(
            what="plan",
            planned=names if "*" in names else f"save:{names}",
            total_bytes=size,
            budget_bytes=size,
            step_s=planned_s,
        )
        for names, size in ((smaller, 100), (larger, 200))
    ]
    assert CLAIMS["cost_aware"].judge([row("nothing", total_bytes=90), *plans]).verdict == verdict


def test_a_plan_is_compared_with_the_fastest_policy_that_fits():
    plan = row(what="plan", planned="save:context", total_bytes=100, budget_bytes=100, step_s=0.8)
    uniform = [
        row("nothing", total_bytes=90),
        row("dots", total_bytes=100, step_s=0.9),
        row("none", total_bytes=101, step_s=0.5),
    ]
    assert "11 % faster" in CLAIMS["cost_aware"].judge([*uniform, plan]).ours


def searched(policy, largest, **found):
    """A row of a search. Where not one sequence fits, there is no row of a batch."""
    ran: dict[str, Any] = (
        {"accumulate": 512 // largest, "total_bytes": 60, "tokens_per_s": float(largest)} if largest else {}
    )
    return row(policy, what="largest", largest_batch=largest, global_batch=512, budget_bytes=100, **ran, **found)


@pytest.mark.parametrize(
    ("largest", "long_bytes", "verdict"),
    [
        ((32, 128), None, "refuted"),
        ((0, 128), None, "holds"),
        ((0, 512), None, "refuted"),
        ((0, 0), None, "refuted"),
        ((32, 128), (101, 50), "holds under conditions"),
        ((32, 128), (100, 50), "refuted"),
        ((32, 128), (101, 61), "refuted"),
        ((0, 128), (101, 60), "holds"),
    ],
)
def test_accumulation_needs_checkpointing_where_one_sequence_does_not_fit(largest, long_bytes, verdict):
    rows = [searched(policy, n) for policy, n in zip(("none", "nothing"), largest, strict=True)]
    for policy, size in zip(("none", "nothing"), long_bytes or (), strict=False):
        rows.append(row(policy, seq_len=32768, total_bytes=size, num_params=10, tokens_per_s=1.0))
    found = CLAIMS["accumulation"].judge(rows)
    assert found.verdict == verdict
    assert {len(line) for line in found.table} == {6}
    shown = CLAIMS["accumulation"].picture(rows).series["gpt2"]
    assert len(shown) == sum(map(bool, largest))


@pytest.mark.parametrize(
    ("unrolled", "looped", "verdict"),
    [
        ((0.5, 0.15), (0.5, 0.15), "holds"),
        ((0.5, 0.15), (0.5, 0.21), "holds under conditions"),
        ((0.61, 0.15), (0.5, 0.15), "holds under conditions"),
        ((0.39, 0.15), (0.5, 0.21), "refuted"),
    ],
)
def test_a_checkpoint_every_k_layers_is_judged_in_both_layouts(unrolled, looped, verdict):
    rows = []
    for scan, (less, more) in ((True, looped), (False, unrolled)):
        rows.append(row(total_bytes=100, scan_layers=scan))
        rows.append(row("every:1", total_bytes=90, step_s=1.3, scan_layers=scan))
        rows += [row(f"every:{k}", total_bytes=100 * (1 - less), step_s=1 + more, scan_layers=scan) for k in (2, 3, 4)]
    found = CLAIMS["every_k"].judge(rows)
    assert found.verdict == verdict
    assert "unrolled" in found.ours
    assert "in a loop" in found.ours
    for alone in (one for one in rows if one["policy"] == "every:1"):
        alone |= {"total_bytes": 100 * (1 - unrolled[0]), "step_s": 1.0}
    assert CLAIMS["every_k"].judge(rows).verdict == ("refuted" if verdict == "refuted" else "holds under conditions")


@pytest.mark.parametrize(
    ("sizes", "is_one"),
    [((3, 1, 2), True), ((3, 1, 1, 2), True), ((3, 1, 2, 1), False), ((1, 2, 3), False), ((3, 2, 1), False)],
)
def test_a_u_falls_and_then_rises(sizes, is_one):
    assert is_u(sizes) == is_one


@pytest.mark.parametrize(
    ("largest", "rates", "verdict"),
    [
        ((16, 16), (0.8, 0.8), "holds"),
        ((16, 16), (0.8, 0.9), "holds under conditions"),
        ((16, 16), (0.8, 1.2), "holds under conditions"),
        ((16, 3), (0.8, 0.8), "holds under conditions"),
        ((14, 3), (0.8, 0.8), "refuted"),
    ],
)
def test_a_larger_batch_is_judged_by_its_size_and_its_time(largest, rates, verdict):
    rows = []
    for model, size, rate in zip(("gpt2", "tiny"), largest, rates, strict=True):
        common: dict[str, Any] = {"preset": model, "what": "largest", "scan_layers": True}
        rows.append(row(largest_batch=1, tokens_per_s=100, recompute_overhead_percent=0.0, **common))
        again: dict[str, Any] = {"recompute_overhead_percent": 16.0, "tokens_per_s": 100 * rate}
        rows.append(row("nothing", largest_batch=size, **again, **common))
    assert CLAIMS["batch_gain"].judge(rows).verdict == verdict


@pytest.mark.parametrize(
    ("nothing", "every", "verdict"), [(0.29, 0.31, "holds"), (0.2, 0.31, "holds under conditions"), (0.2, 0.29, "refuted")]
)
def test_what_recomputing_costs_is_judged_by_both_numbers(nothing, every, verdict):
    more = {"none": 0.0, "nothing": nothing, "every:4": every}
    rows = [row(p, total_bytes=1, executed_flops=100 * (1 + share), scan_layers=True) for p, share in more.items()]
    found = CLAIMS["recompute_cost"].judge(rows)
    assert found.verdict == verdict
    assert f"saves {percent(every - nothing).removesuffix(' %')} points" in " ".join(found.sentences)


@pytest.mark.parametrize(
    ("activations", "verdict"), [((0.95, 0.91), "holds"), ((0.95, 0.9), "holds under conditions"), ((0.9, 0.4), "refuted")]
)
def test_activations_hold_over_nine_tenths_in_all_sizes_or_in_some(activations, verdict):
    others = ("parameters", "gradients", "optimizer state", "inputs", "workspace", "fragmentation")
    rows = [
        row(batch=8, total_bytes=1000, num_params=1, sources={"activations": 1000 * share, **dict.fromkeys(others, 0)})
        for share in activations
    ]
    assert CLAIMS["components"].judge(rows).verdict == verdict


@pytest.mark.parametrize(
    ("gigabytes", "verdict"), [((173, 101), "holds"), ((173, 99), "holds under conditions"), ((99, 98), "refuted")]
)
def test_a_whole_model_is_beyond_100_gb_in_both_dtypes_or_in_one(gigabytes, verdict):
    layer: dict[str, Any] = {"what": "memory", "dtype": "float32", "attention": "xla"}
    rows = [row(**layer, total_bytes=int(n * 1.5e9), argument_bytes=int(n * 5e8)) for n in (2, 3)]
    for dtype, size in zip(("float32", "bfloat16"), gigabytes, strict=True):
        rows.append(row(param_dtype=dtype, total_bytes=size * 1e9, argument_bytes=1e9))
    found = CLAIMS["one_layer"].judge(rows)
    assert found.verdict == verdict
    assert found.ours.startswith("1,000 to 1,000 MB a layer")


@pytest.mark.parametrize(
    ("full", "selective", "verdict"),
    [
        (1.37, 1.08, "holds"),
        (1.35, 1.08, "holds under conditions"),
        (1.37, 1.11, "holds under conditions"),
        (1.26, 1.14, "refuted"),
        (1.26, 0.99, "refuted"),
    ],
)
def test_a_layer_run_again_whole_or_in_part_is_judged_by_time(full, selective, verdict):
    from experiments.claims.korthikanti import SELECTIVE

    rows = [
        row(policy, attention="xla", total_bytes=1, executed_flops=1, step_s=seconds)
        for policy, seconds in (("none", 1.0), ("nothing", full), (SELECTIVE, selective))
    ]
    found = CLAIMS["korthikanti"].judge(rows)
    assert found.verdict == verdict
    assert ("within the error" in " ".join(found.sentences)) == (abs(selective - 1) <= 0.12)


@pytest.mark.parametrize(
    ("plain", "fused", "verdict"),
    [(2.0, 1.0, "holds"), (1.6, 1.0, "refuted"), (2.0, 1.3, "refuted"), (2.0, None, "refuted")],
)
def test_long_contexts_are_judged_by_both_powers(plain, fused, verdict):
    powers = {"xla": plain, "cudnn": fused}
    rows = [
        row("nothing", attention=kind, seq_len=length, temp_bytes=length**power, total_bytes=length * 700_000)
        for kind, power in powers.items()
        if power is not None
        for length in (1024, 131072)
    ]
    found = CLAIMS["long_context"].judge(rows)
    assert found.verdict == verdict
    assert ("is 1,024 plain and 1,024 fused" in found.ours) == (fused is not None)
    larger = [{**one, "target": "h200"} for one in rows]
    assert ("is 131,072 plain and 131,072 fused" in CLAIMS["long_context"].judge(larger).ours) == (fused is not None)


@pytest.mark.parametrize(
    ("deep_temp", "deep_nothing", "verdict"),
    [(200, 10, "holds"), (200, 150, "holds under conditions"), (90, 10, "refuted")],
)
def test_deep_is_judged_by_its_temporaries_and_by_what_is_saved(deep_temp, deep_nothing, verdict):
    rows = [
        row(policy, num_layers=depth, num_params=1, temp_bytes=size, total_bytes=size)
        for depth, sizes in ((3, (100, 50)), (48, (deep_temp, deep_nothing)))
        for policy, size in zip(("none", "nothing"), sizes, strict=True)
    ]
    assert CLAIMS["wide_deep"].judge(rows).verdict == verdict


@pytest.mark.parametrize(
    ("less", "verdict"), [((0.3, 0.5), "holds"), ((0.29, 0.5), "holds under conditions"), ((0.29, 0.51), "refuted")]
)
def test_mixed_precision_is_judged_at_each_batch(less, verdict):
    rows = []
    for params, compute in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")):
        for batch, share in zip((1, 8), less, strict=True):
            size = 1000 if compute == "float32" else 1000 * (1 - share)
            sizes = {"total_bytes": size, "temp_bytes": size, "argument_bytes": 0}
            rows.append(row(batch=batch, param_dtype=params, dtype=compute, **sizes))
    assert CLAIMS["precision"].judge(rows).verdict == verdict


@pytest.mark.parametrize(
    ("state", "lion", "verdict"), [(8, 4, "holds"), (8, 8, "refuted"), (8.3, 4, "refuted"), (4, 2, "refuted")]
)
def test_adam_keeps_eight_bytes_a_parameter_and_others_keep_fewer(state, lion, verdict):
    rows = [
        row(optimizer=name, num_params=100, argument_bytes=100 * (4 + size), total_bytes=2000 + 100 * size)
        for name, size in (("adamw", state), ("lion", lion))
    ]
    assert CLAIMS["optimizers"].judge(rows).verdict == verdict


@pytest.mark.parametrize(
    ("short", "verdict"), [(1.06, "holds"), (1.04, "holds under conditions"), (0.9, "holds"), (0.1, "refuted")]
)
def test_groups_are_judged_against_padding(short, verdict):
    """Short sequences that run as slowly as long ones bring nothing."""
    rows = [row(seq_len=length, total_bytes=1, tokens_per_s=rate) for length, rate in ((512, short), (1024, 1.0))]
    assert CLAIMS["grouped"].judge(rows).verdict == verdict
