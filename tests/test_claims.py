"""The claims of the field: each is checked at a toy size, and the page says what the filed results say."""

import json
import re
from dataclasses import replace
from typing import Any, get_args

import pytest

from experiments.claims.__main__ import PAGE, filed_claims, known_rows, main
from experiments.claims.claim import Verdict, steps_of
from experiments.claims.every import CLAIMS
from experiments.claims.page import BEGIN, END, markdown, rows_of
from experiments.claims.references import REFERENCES, UNSOURCED
from experiments.claims.steps import TARGETS, key_of, step
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
    found = claim.judge(rows_of(result, TARGETS[0]))
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
    rows = [{"asked": key["asked"], "source": key["source"], "found": {"step_s": 1}}]
    filed: dict[str, Any] = {"rows": rows, "versions": key["versions"]}
    name = json.dumps(key, sort_keys=True)
    for part in ({}, {"versions": {}}):
        (tmp_path / "sqrt_n.json").write_text(json.dumps(filed | part))
        assert (name in known_rows(tmp_path)) == (not part)
    filed["rows"][0]["source"] = "another"
    (tmp_path / "sqrt_n.json").write_text(json.dumps(filed))
    assert name not in known_rows(tmp_path)


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


def test_each_claim_says_where_it_can_be_read():
    assert set(REFERENCES) == set(CLAIMS) >= set(UNSOURCED)
    read = [one for references in REFERENCES.values() for one in references]
    assert all(one.url.startswith("https://") and not one.says.endswith(".") for one in read)


@pytest.mark.parametrize("name", CLAIMS)
def test_every_step_is_for_both_targets(name):
    steps = steps_of(CLAIMS[name], "full")
    first, second = ([asked for asked in steps if asked.target == target] for target in TARGETS)
    assert [replace(asked, target=TARGETS[1]) for asked in first] == second
    assert len(steps) == 2 * len(first) == 2 * len(set(first))


def test_the_page_says_how_far_the_bytes_of_another_target_are():
    claim = CLAIMS["batch_linear"]
    rows = []
    for asked in steps_of(claim, "full"):
        total = 1000 + (asked.target == "h200" and asked.batch == 16)
        found = {"temp_bytes": asked.batch, "argument_bytes": 1, "total_bytes": total, "took_s": 1}
        rows.append({"asked": asked.asked(), "found": found})
    shown = markdown([(claim, {"rows": rows, "machine": {"cpu": "a CPU", "cores": 2}})], "claims")
    assert "**Compiled for an H200**: linear within" in shown
    assert "The bytes of these 4 steps are within 0.1 % of those for the H100." in shown


def test_the_text_around_the_claims_has_no_result():
    """Every number but the error of predictions, which another test holds, and the size of a state is between the marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    around = before + rest.partition(END)[2]
    assert re.findall(r"(?<![\w.])\d[\d.,]*", around) == ["12", "8"]


def test_accumulation_shares_its_long_sequences_with_the_long_contexts():
    longs = [asked for asked in CLAIMS["accumulation"].steps("full") if asked.what == "step"]
    assert len(longs) == 2
    assert {json.dumps(asked.asked()) for asked in longs} <= {
        json.dumps(s.asked()) for s in CLAIMS["long_context"].steps("full")
    }
