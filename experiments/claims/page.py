"""Writes the claims into the page, `docs/claims.md`: a table of all, and a section with a plot for each.

Everything between the two marks is made from the filed rows. The text around them is written by hand, without a number.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.claims.claim import Claim, Judgement
from experiments.claims.draw import draw
from experiments.claims.every import CLAIMS
from experiments.claims.references import REFERENCES, UNSOURCED
from experiments.claims.steps import FREE, TARGETS
from experiments.common import markdown_table
from jaxremat.files import write_whole

BEGIN, END = "<!-- claims: begin -->\n", "<!-- claims: end -->\n"
#: Measures claims again, before their names. Without --fresh the filed rows would be taken.
COMMAND = "python -m experiments.claims --fresh --claims"
#: Seconds of the subset of the claims that the page names.
SUBSET_S = 30 * 60
#: A claim with its file of results.
Filed = tuple[Claim, dict[str, Any]]


def write_page(page: Path, template: str, filed: Sequence[Filed]) -> None:
    """Writes the page, and the plots into the folder beside it that has the page's name.

    Args:
        page: the page's path.
        template: the text of a page with the two marks, between which the claims go.
        filed: the claims that have results.
    """
    folder = page.with_suffix("")
    for claim, result in filed:
        draw(claim.picture(rows_of(result, TARGETS[0])), claim.title, folder / f"{claim.name}.png")
    before, _, rest = template.partition(BEGIN)
    write_whole(page, before + BEGIN + markdown(filed, folder.name) + END + rest.partition(END)[2])


def rows_of(result: dict[str, Any], target: str) -> list[dict[str, Any]]:
    """The rows of a file of results for a target, each with what was asked for and what was found as fields side by side."""
    rows = ({"what": "step", "batch": 1, "target": TARGETS[0], **row["asked"], **row["found"]} for row in result["rows"])
    return [row for row in rows if row["target"] == target]


def markdown(filed: Sequence[Filed], folder: str) -> str:
    """The table of all claims, and their sections."""
    judged = [(claim, result, _judgements(claim, result)) for claim, result in filed]
    overview = [
        (
            f"[{claim.title}](#{anchor(claim.title)})",
            f"{claim.says} ({claim.source})",
            found[TARGETS[0]].ours,
            _verdicts(found),
        )
        for claim, _, found in judged
    ]
    lines = [markdown_table(("claim", "they say", "here", "verdict"), overview), "", _how_long(filed)]
    there = {claim.name for claim, _ in filed}
    if missing := [claim.title for claim in CLAIMS.values() if claim.name not in there]:
        lines += ["", f"Not measured yet: {'; '.join(missing)}."]
    for claim, result, of_target in judged:
        found, *others = of_target.values()
        titles, *rows = found.table
        lines += ["", f"## {claim.title}", "", f"**They say** ({claim.source}): {claim.says}.", ""]
        lines += [*_where_to_read(claim.name), ""]
        lines += [f"**Here**: {found.ours}. On {claim.on}. **Verdict: {found.verdict}.**", ""]
        lines += [*(f"* {sentence}" for sentence in found.sentences), "", f"![{claim.title}]({folder}/{claim.name}.png)", ""]
        lines += [markdown_table(titles, rows), ""]
        for target, other in zip(list(of_target)[1:], others, strict=True):
            lines += _on_another(other, result, target)
        lines += [f"`{COMMAND} {claim.name}`: {len(result['rows'])} steps, {took_s(result):.0f} s."]
    return "\n".join(lines) + "\n"


def _judgements(claim: Claim, result: dict[str, Any]) -> dict[str, Judgement]:
    """By target, what its rows say. The first target is that of the claim."""
    return {target: claim.judge(rows) for target in TARGETS if (rows := rows_of(result, target))}


def _verdicts(found: Mapping[str, Judgement]) -> str:
    """The verdict for the first target, and those for others that differ from it."""
    first = found[TARGETS[0]].verdict
    differ = [f"{target.upper()}: {other.verdict}" for target, other in found.items() if other.verdict != first]
    return f"{first} ({'; '.join(differ)})" if differ else first


def _where_to_read(name: str) -> list[str]:
    """The sources of a claim, and which of its numbers have none."""
    lines = [f"* [{one.name}]({one.url}): {one.says}." for one in REFERENCES[name]]
    return [*lines, *([f"* No source was found for: {UNSOURCED[name]}."] if name in UNSOURCED else [])]


def _on_another(found: Judgement, result: dict[str, Any], target: str) -> list[str]:
    """What the same steps say when they are compiled for another target, and how far their bytes are from those of the first."""
    said = f"**Compiled for an {target.upper()}**: {found.ours}. Verdict: {found.verdict}.{_same_bytes(result, target)}"
    titles, *rows = found.table
    is_free = any(row["asked"].get("what") in FREE for row in result["rows"])
    return [said, "", *([markdown_table(titles, rows), ""] if is_free else [])]


def _same_bytes(result: dict[str, Any], target: str) -> str:
    """A sentence on how far the bytes of the same steps are apart. Those whose batch or plan is searched aren't the same."""
    sizes: dict[str, dict[str, int]] = {}
    for row in result["rows"]:
        asked = {name: value for name, value in row["asked"].items() if name != "target"}
        if asked.get("what") not in FREE:
            of_step = sizes.setdefault(json.dumps(asked, sort_keys=True), {})
            of_step[row["asked"].get("target", TARGETS[0])] = row["found"]["total_bytes"]
    apart = [abs(size[target] / size[TARGETS[0]] - 1) for size in sizes.values() if target in size]
    if not apart:
        return ""
    if max(apart) < 5e-6:
        return f" The bytes of these {len(apart)} steps are those for the H100."
    far = f"{100 * max(apart):.2g}" if max(apart) > 1e-4 else "0.01"
    return f" The bytes of these {len(apart)} steps are within {far} % of those for the H100."


def took_s(result: dict[str, Any]) -> float:
    """Seconds that the steps of a claim took, those too that it shares with another claim."""
    return sum(row["found"]["took_s"] for row in result["rows"])


def _how_long(filed: Sequence[Filed]) -> str:
    """How long all claims took together, and which of them take half an hour."""
    seconds = {
        json.dumps(row["asked"], sort_keys=True): row["found"]["took_s"] for _, found in filed for row in found["rows"]
    }
    subset, total = [], 0.0
    for claim, result in sorted(filed, key=lambda pair: took_s(pair[1])):
        total += took_s(result)
        if total > SUBSET_S:
            break
        subset.append(claim.name)
    machines = sorted({f"{found['machine']['cpu']}, {found['machine']['cores']} cores" for _, found in filed})
    everything = (
        f"All {len(filed)} claims together are {len(seconds)} steps, and took {sum(seconds.values()) / 60:.0f} minutes"
    )
    where = f" ({'; '.join(machines)}, shared with other work)."
    if not subset or len(subset) == len(filed):
        return everything + where
    within = sum(took_s(result) for claim, result in filed if claim.name in subset) / 60
    return everything + where + f" These {len(subset)} took {within:.0f} minutes: `{COMMAND} {' '.join(subset)}`."


def anchor(title: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
