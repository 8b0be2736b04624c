"""The claims of the field: each is checked at a toy size, and the page says what the filed results say."""

import json
import re
from typing import Any, get_args

import pytest

from experiments.claims.__main__ import PAGE, filed_claims, known_rows, main
from experiments.claims.batch_gain import TRITON_BATCH
from experiments.claims.claim import Verdict
from experiments.claims.every import CLAIMS
from experiments.claims.page import BEGIN, END, markdown, rows_of
from experiments.claims.steps import LINKS, key_of, step
from experiments.common import RESULTS

pytestmark = pytest.mark.any_jax
FILED = filed_claims(RESULTS / "claims")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which the claims share their toy steps."""
    return tmp_path_factory.mktemp("claims")


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_is_measured_judged_and_drawn(name, folder, h100, capsys):
    assert main(["--size", "tiny", "--claims", name, "--out", str(folder)]) == 0
    claim, result = CLAIMS[name], json.loads((folder / f"{name}.json").read_text())
    assert [row["asked"] for row in result["rows"]] == [asked.asked() for asked in claim.steps("tiny")]
    assert all(row["found"]["step_s"] > 0 for row in result["rows"])
    found = claim.judge(rows_of(result))
    assert found.verdict in get_args(Verdict)
    assert {len(row) for row in found.table} == {len(found.table[0])}
    assert f"{found.verdict}: {found.ours}" in capsys.readouterr().out
    assert (folder / f"claims/{name}.png").read_bytes().startswith(b"\x89PNG")
    assert f"![{claim.title}](claims/{name}.png)" in (folder / "claims.md").read_text()


def test_an_interrupted_run_goes_on_where_it_stopped(folder, h100, capsys):
    argv, path = ["--size", "tiny", "--claims", "batch_linear", "--out", str(folder)], folder / "batch_linear.json"
    assert main(argv) == 0
    filed = path.read_text()
    result = json.loads(filed)
    path.write_text(json.dumps({**result, "rows": result["rows"][:1]}))
    capsys.readouterr()
    assert main(argv) == 0
    shown = capsys.readouterr().err
    assert "2 of 2" in shown
    assert "1 of 2" not in shown
    assert json.loads(path.read_text())["rows"][0] == result["rows"][0]


def test_a_step_of_other_versions_is_measured_again(tmp_path):
    (asked, *_) = CLAIMS["sqrt_n"].steps("tiny")
    key = key_of(asked)
    filed = {"rows": [{"asked": key["asked"], "source": key["source"], "found": {"step_s": 1}}], "versions": key["versions"]}
    (tmp_path / "sqrt_n.json").write_text(json.dumps(filed))
    assert json.dumps(key, sort_keys=True) in known_rows(tmp_path)
    for name in ("source", "versions"):
        assert json.dumps({**key, name: "another"}, sort_keys=True) not in known_rows(tmp_path)


def test_only_the_page_is_written_without_a_claim(folder, h100, capsys):
    (folder / "claims.md").unlink(missing_ok=True)
    assert main(["--size", "tiny", "--claims", "--out", str(folder)]) == 0
    assert BEGIN in (folder / "claims.md").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--claims", "sqrtn"], "experiments.claims: unknown claim 'sqrtn'. Allowed: components, "),
        (
            ["--size", "tiny"],
            "experiments.claims: --size tiny would replace the filed results by those of toy models. Allowed: ",
        ),
    ],
)
def test_what_cannot_be_meant_is_one_message(argv, message, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert "Next: " in err


def test_the_page_says_what_the_filed_results_say():
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown == markdown(FILED, "claims")


def test_every_command_of_the_page_measures_again():
    commands = re.findall(r"`(python -m experiments\.claims\b[^`]*)`", PAGE.read_text())
    assert len(commands) >= 2 + len(FILED)
    assert all("--fresh" in command.split() for command in commands)


def test_every_filed_claim_has_a_plot_of_few_bytes():
    plots = {path.stem: path.stat().st_size for path in PAGE.with_suffix("").glob("*.png")}
    assert set(plots) == {claim.name for claim, _ in FILED}
    assert max(plots.values()) < 40_000


def test_results_are_of_claims_that_there_are_and_are_whole():
    assert {path.stem for path in (RESULTS / "claims").glob("*.json")} == {claim.name for claim, _ in FILED}


def test_a_step_is_plain_json_without_its_defaults():
    asked = step("largest", policy="dots", num_layers=3, batch=1)
    assert asked.asked() == {"preset": "gpt2", "policy": "dots", "what": "largest", "num_layers": 3}


def test_the_text_around_the_claims_has_no_result():
    """Every number but the error of predictions, which another test holds, is between the marks."""
    before = PAGE.read_text().partition(BEGIN)[0]
    assert [word for word in before.split() if word[0].isdigit()] == ["12"]


def row(policy="none", batch=1, **found):
    return {
        "preset": "gpt2",
        "policy": policy,
        "batch": batch,
        "what": "step",
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
        row(policy, num_layers=n, sources={"activations": size(n) * 2**20})
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
    assert found.verdict == "holds under conditions"
    offload["step_s_by_link"] = [2.0] * len(LINKS)
    assert CLAIMS["offload"].judge([recompute, offload]).verdict == "refuted"


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


@pytest.mark.parametrize(("planned_s", "verdict"), [(0.8, "holds under conditions"), (0.95, "open"), (1.2, "refuted")])
def test_a_plan_is_better_by_more_than_the_error(planned_s, verdict):
    plans = [
        row(what="plan", planned="save:context", total_bytes=80, budget_bytes=size, step_s=planned_s) for size in (100, 200)
    ]
    found = CLAIMS["cost_aware"].judge([row("nothing", total_bytes=90), *plans])
    assert (found.verdict, "none of which binds" in found.ours) == (verdict, True)
    plans[1]["planned"] = "save:context,mlpwi_0"
    assert CLAIMS["cost_aware"].judge([row("nothing", total_bytes=90), *plans]).verdict == (
        "holds" if planned_s == 0.8 else verdict
    )


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
    assert CLAIMS["accumulation"].picture(rows).kind == "bars"


def test_accumulation_shares_its_long_sequences_with_the_long_contexts():
    longs = [asked for asked in CLAIMS["accumulation"].steps("full") if asked.what == "step"]
    assert len(longs) == 2
    assert {json.dumps(asked.asked()) for asked in longs} <= {
        json.dumps(s.asked()) for s in CLAIMS["long_context"].steps("full")
    }


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
    ("largest", "rates", "verdict"),
    [
        ((16, 16), (0.8, 0.8), "holds"),
        ((16, 16), (0.8, 0.9), "holds under conditions"),
        ((16, 16), (0.8, 1.2), "holds under conditions"),
        ((16, 3), (0.8, 0.8), "holds under conditions"),
        ((15, 3), (0.8, 0.8), "refuted"),
    ],
)
def test_a_larger_batch_is_judged_by_its_size_and_its_time(largest, rates, verdict):
    rows = []
    for model, size, rate in zip(("gpt2", "tiny"), largest, rates, strict=True):
        common: dict[str, Any] = {"preset": model, "what": "largest"}
        rows.append(row(largest_batch=1, tokens_per_s=100, recompute_overhead_percent=0.0, **common))
        again: dict[str, Any] = {"recompute_overhead_percent": 16.0, "tokens_per_s": 100 * rate}
        rows.append(row("nothing", largest_batch=size, **again, **common))
    assert CLAIMS["batch_gain"].judge(rows).verdict == verdict


def test_the_batch_with_triton_is_the_one_that_levers_filed():
    filed = json.loads((RESULTS / "h100-80gb/levers.json").read_text())["loss"]
    (found,) = (one for one in filed if (one["model"], one["policy"], one["loss"]) == ("llama3.2-1b", "nothing", "chunked"))
    assert found["largest_batch"] == TRITON_BATCH


@pytest.mark.parametrize(
    ("nothing", "every", "verdict"), [(0.29, 0.31, "holds"), (0.2, 0.31, "holds under conditions"), (0.2, 0.29, "refuted")]
)
def test_what_recomputing_costs_is_judged_by_both_numbers(nothing, every, verdict):
    more = {"none": 0.0, "nothing": nothing, "every:4": every}
    rows = [row(policy, total_bytes=1, executed_flops=100 * (1 + share)) for policy, share in more.items()]
    found = CLAIMS["recompute_cost"].judge(rows)
    assert found.verdict == verdict
    assert f"{100 * (every - nothing):.1f}".removesuffix(".0") in " ".join(found.sentences)
