"""The field's words: fails where a file has more of the other words than `.ci/words.txt` counts.

    python .ci/words.py                 each file's count against .ci/words.txt; needs no git
    python .ci/words.py --base main     only lines that are new since a revision, or not yet committed
    python .ci/words.py --update        counts again, after words were taken away or a file was moved

It reads code, messages, docs and identifiers: `runs_again` counts as `runs again`. The words that a file has today may stay
until it is edited; the counts only ever go down.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
COUNTS = ROOT / ".ci/words.txt"
FOLDERS = ("jaxremat", "tests", "docs", "examples", "experiments", ".ci", ".github")
ENDINGS = {".py", ".md", ".toml", ".js", ".html", ".yml"}
#: What to say, and a pattern of what not to say. `_` is any gap between two words.
WORDS = {
    "replicated": "(lie|lies|lay|lying)_whole",
    "recompute, rematerialize": "(run|runs|ran|running)_again",
    "save, residual": "keep|keeps|kept|keeping|held",
    "resume": "(go|goes|went|going|gone)_on",
    "fitted, calibrated": "learnt|taught",
    "requested, given as": "asked",
    "rejected": "XLA_(refuse|refuses|refused)|refused_(by|of)_XLA",
    "exposed communication, hidden": "(GPU|device)_(wait|waits|waited)|(wait|waits)_for_(collectives|communication)",
    "full remat (policy `nothing`)": "step_under_nothing",
    "scan": "(in|as)_a_loop|looped_layers|loop_of_layers",
    "out of memory, does not fit": "misfit|misfits",
    "upper bound, lower bound": "outlook|no_choice_takes_less",
    "data-parallel group": "member|members",
    "outside the allocator's pool": "(memory|bytes|GiB)_outside(?! the allocator)",
}
#: Names that aren't ours to change.
ALLOWED = re.compile("Keep a Changelog|--keep-going")
_GAP = r"[\s_`'\"]{1,3}"
PATTERNS = {
    say: re.compile(rf"(?<![a-z])(?:{words.replace('_', _GAP)})(?!(?-i:[a-z]))", re.IGNORECASE)
    for say, words in WORDS.items()
}


def found(line: str) -> list[str]:
    """What a line says that has a plainer word: `["'kept': save, residual"]`."""
    line = ALLOWED.sub("", line)
    return [f"{match[0]!r}: {say}" for say, pattern in PATTERNS.items() for match in pattern.finditer(line)]


def texts(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Each file that is read, with its lines: the project's own text, without outputs that are filed and this list."""
    for path in sorted([*root.glob("*.md"), *(path for folder in FOLDERS for path in (root / folder).rglob("*"))]):
        name = path.relative_to(root).as_posix()
        if path.suffix in ENDINGS and path.name != "words.py" and not name.startswith(("docs/_build", "tests/golden")):
            yield name, path.read_text().splitlines()


def added(base: str, root: Path) -> set[tuple[str, int]]:
    """File and number of each line that is new since `base`."""
    diff = subprocess.run(["git", "diff", "-U0", "--merge-base", base], cwd=root, capture_output=True, text=True, check=True)
    lines, name = set(), ""
    for line in diff.stdout.splitlines():
        if line.startswith("+++ "):
            name = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ \S+ \+(\d+),?(\d*) @@", line):
            lines |= {(name, int(hunk[1]) + n) for n in range(int(hunk[2] or 1))}
    return lines


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Prints file, line, word and plainer word, and returns 1 if there is something to say plainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="REV")
    parser.add_argument("--update", action="store_true")
    flags = parser.parse_args(argv)
    counts = root / COUNTS.relative_to(ROOT)
    hits = {name: [(n, text) for n, line in enumerate(lines, 1) for text in found(line)] for name, lines in texts(root)}
    if flags.update:
        counts.write_text("".join(f"{len(places)} {name}\n" for name, places in hits.items() if places))
        return 0
    if flags.base:
        new = added(flags.base, root)
        shown = {name: [place for place in places if (name, place[0]) in new] for name, places in hits.items()}
    else:
        allowed = {name: int(count) for count, name in (line.split() for line in counts.read_text().splitlines())}
        shown = {name: places for name, places in hits.items() if len(places) > allowed.get(name, 0)}
        for name in filter(shown.get, shown):
            print(f"{name}: {len(hits[name])} of these words, {allowed.get(name, 0)} are allowed (--base REV: the new ones)")
    for name, places in shown.items():
        for n, text in places:
            print(f"{name}:{n}: {text}")
    return int(any(shown.values()))


if __name__ == "__main__":
    sys.exit(main())
