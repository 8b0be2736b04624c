"""The claims of the field: how their steps are measured and filed, and that the page's numbers are those of the filed rows."""

import json
import math
import re
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from experiments.claims import steps
from experiments.claims.__main__ import CLAIMS, FILED, PAGE, filed_rows, known_rows, main, measure, written
from experiments.claims.claim import Picture
from experiments.claims.draw import draw
from experiments.claims.memory import formula_bytes
from experiments.claims.recompute import SELECTIVE
from experiments.claims.steps import LINKS, TARGETS, grid, measured, step
from experiments.common import write

VERDICTS = ("holds", "holds under conditions", "refuted", "open")
TOY: dict[str, Any] = {"preset": "tiny", "num_layers": 1}


@pytest.mark.full
@pytest.mark.parametrize(
    "toy",
    [
        step("memory", attention="xla", **TOY),
        step("largest", global_batch=2, **TOY),
        step("links", policy="offload:mlpwi_0", scan_layers=True, **(TOY | {"num_layers": 2})),
        step("layer", policy=SELECTIVE, attention="xla", dropout=0.0, **TOY),
    ],
    ids=lambda toy: toy["what"],
)
def test_a_step_is_measured(toy, h100):
    """What the claims read of such a step is found."""
    found = measured(toy)
    kinds = {claim.name: {one.get("what", "step") for one in claim.steps} for claim in CLAIMS.values()}
    reads = {name for claim in CLAIMS.values() if kinds[claim.name] == {toy["what"]} for name in claim.reads}
    assert {"step_s", "took_s", *reads} <= found.keys()
    assert found["step_s"] > 0


def test_what_is_filed_is_not_measured_again(tmp_path, monkeypatch):
    """Of four steps two are filed with today's versions. A step with other versions isn't taken."""
    made: list[dict[str, Any]] = []

    def made_up(step: dict[str, Any]) -> dict[str, Any]:
        made.append(step)
        return dict.fromkeys((*claim.reads, "took_s"), 1.0)

    monkeypatch.setattr("experiments.claims.__main__.measured", made_up)
    claim = CLAIMS["batch_linear"]
    rows = json.loads((FILED / "batch_linear.json").read_text())["rows"]
    write(tmp_path / "batch_linear.json", {"rows": rows})
    longer = replace(claim, steps=[*claim.steps[:1], step(**TOY, batch=2)])
    measure(longer, known_rows(tmp_path), tmp_path)
    assert [one["preset"] for one in made] == ["tiny"] * len(TARGETS)
    filed = filed_rows(longer, tmp_path)
    assert [(row["target"], row["preset"]) for row in filed] == [(t, p) for t in TARGETS for p in ("gpt2", "tiny")]
    assert [row["total_bytes"] for row in filed[::2]] == [row["total_bytes"] for row in (rows[0], rows[4])]
    assert filed_rows(claim, tmp_path) == []
    path = tmp_path / "batch_linear.json"
    path.write_text(path.read_text().replace('"python":"3.', '"python":"2.'))
    assert known_rows(tmp_path) == {}


def test_a_search_within_another_budget_is_another_step(monkeypatch):
    monkeypatch.setattr(steps, "budget_bytes", lambda target: 1 << 30)
    stale = {name for name, claim in CLAIMS.items() if not filed_rows(claim)}
    assert stale == {"batch_gain", "accumulation", "grouped"}


def test_a_grid_has_each_combination_without_defaults():
    assert grid(policy=("none", "dots"), batch=(1, 2), num_layers=3) == [
        {"num_layers": 3},
        {"batch": 2, "num_layers": 3},
        {"policy": "dots", "num_layers": 3},
        {"policy": "dots", "batch": 2, "num_layers": 3},
    ]


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_the_page_has_the_numbers_of_the_filed_rows_and_a_verdict(claim):
    page, rows = PAGE.read_text(), filed_rows(claim)
    assert rows, "filed are the rows of other steps"
    assert written(page, claim, rows) == page
    assert f"\n## {claim.title}\n" in page
    assert f"![{claim.title}](claims/{claim.name}.png)" in page
    [verdict] = re.findall(rf"^\| \[{re.escape(claim.title)}\].* \| ([a-z ]+, [\d-]+) \|$", page, re.MULTILINE)
    word, day = verdict.split(", ")
    assert word in VERDICTS
    assert date.fromisoformat(day)
    number, pictures = claim.found([row for row in rows if row["target"] == TARGETS[0]])
    assert re.search(r"\d", number)
    assert all(math.isfinite(y) for picture in pictures for points in picture.series.values() for _, y in points)


def test_files_and_plots_are_those_of_the_claims():
    plots = {path.stem: path.stat().st_size for path in PAGE.with_suffix("").glob("*.png")}
    assert {path.stem for path in FILED.glob("*.json")} == set(plots) == set(CLAIMS)
    assert max(plots.values()) < 40_000


def test_a_number_on_the_page_is_written_and_the_words_stay():
    claim = CLAIMS["batch_linear"]
    page, rows = PAGE.read_text(), filed_rows(claim)
    rows[3] |= {"total_bytes": 2 * rows[3]["total_bytes"]}
    lines = [
        pair for pair in zip(page.splitlines(), written(page, claim, rows).splitlines(), strict=True) if pair[0] != pair[1]
    ]
    [(before, after)] = ((one.split(" | "), other.split(" | ")) for one, other in lines)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, False, False, True]


@pytest.mark.parametrize("kind", ["lines", "bars", "stack"])
def test_pictures_are_drawn_side_by_side(kind, tmp_path):
    series = {"none": [(1, 2.0), (2, 3.0)], "nothing": [(2, 1.0)]}
    draw((Picture("x", "GiB", series, kind, log="xy"), Picture("x", "ms", series, kind)), "both", tmp_path / "new/both.png")
    assert (tmp_path / "new/both.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_claim_is_one_message(capsys):
    assert main(["--claims", "sqrtn"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "'sqrtn'" in err
    assert ", ".join(CLAIMS) in err


def test_the_paper_s_formula_is_that_of_16_bits():
    s, b, h, a = 2048, 1, 4096, 32
    assert formula_bytes("bfloat16", "xla", s, h, a) == s * b * h * (34 + 5 * a * s / h)


def numbers(text: str) -> list[str]:
    return re.findall(r"[\d.]*\d", text)


def test_temporaries_off_the_line_are_said():
    rows = [{"batch": n, "temp_bytes": n << 30, "total_bytes": (2 + n) << 30} for n in (1, 4, 8, 16)]
    assert numbers(CLAIMS["batch_linear"].found(rows)[0]) == ["0.0", "4", "16", "3.00"]
    rows[2]["temp_bytes"] *= 2
    assert numbers(CLAIMS["batch_linear"].found(rows)[0])[0] == "100"


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        ([100 / link for link in LINKS], ["1", "1", "91", "128"]),
        ([0.5] * len(LINKS), ["1", "1", "8", "8"]),
        ([2.0] * len(LINKS), ["0", "1"]),
    ],
)
def test_the_crossover_is_the_first_link_that_is_as_fast(seconds, found):
    """How many ways are as fast, of how many, and the links between which they become so."""
    common = {"link_gb_per_s": 63.0, "scan_layers": True}
    rows = [
        {"policy": "nothing", "step_s_by_link": [1.0] * len(LINKS), **common},
        {"policy": "offload:mlpwi_0", "step_s_by_link": seconds, **common},
    ]
    assert numbers(CLAIMS["offload"].found(rows)[0])[: len(found)] == found
