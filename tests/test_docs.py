"""README and the pages under docs/: short enough, with links that lead somewhere, and true to what there is."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import jaxremat

ROOT = Path(__file__).parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
PACKAGE = Path(jaxremat.__file__).parent
ROOMS = sorted(file.parent for file in PACKAGE.rglob("__init__.py"))


def prose(page: Path) -> str:
    """The text of a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    page = ROOT / "experiments/README.md" if page.name == "experiments.md" else page  # which it includes
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files_and_headings(page):
    for link in links(page):
        if "://" not in link:
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.is_file(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_readme_is_short_and_leads_to_every_page():
    assert len(README.read_text().splitlines()) <= 140
    found = {link.removeprefix("docs/") for link in links(README)}
    assert {page.name for page in PAGES} - {"README.md", "index.md"} <= found


def test_readme_shows_the_first_example_as_it_is():
    (block,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert (ROOT / "examples/first.py").read_text().endswith(block)


def test_every_page_is_in_the_table_of_contents():
    listed = re.findall(r"^(\w+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.stem for page in DOCS.glob("*.md") if page.stem != "index")


def test_api_page_has_every_public_name():
    named = re.findall(r"^\.\. [\w:]+:: jaxremat\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(set(jaxremat.__all__) - {"__version__"})


#: Rooms whose docstrings all begin with a line that is short enough for a list, and stands alone. Rooms are only ever added.
SHORT_FIRST_LINES = (
    *("__init__.py", "errors.py", "maxtext.py", "testing.py", "units.py", "answer/", "cli/", "config/", "system/"),
    *("chips/", "mesh/", "model/", "planner/", "policy/", "report/", "search/", "session/", "step/"),
    *("training/", "trial/", "workload/", "xla/"),
)


def test_docstrings_begin_with_a_short_sentence():
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        nodes = ast.walk(ast.parse(file.read_text())) if name.startswith(SHORT_FIRST_LINES) else ()
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                first, _, rest = text.partition("\n")
                if len(first) > 90 or first[-1] not in ".:?`" or rest[:1].strip():
                    wrong.append(f"{name}: {first}")
    assert wrong == []


@pytest.mark.parametrize("folder", ROOMS, ids=lambda folder: folder.name)
def test_every_module_is_named(folder):
    """On the page that says how the package is built."""
    name = f"{folder.relative_to(PACKAGE.parent if folder == PACKAGE else PACKAGE)}/"
    [row] = [line for line in (DOCS / "built.md").read_text().splitlines() if line.startswith(f"| `{name}` |")]
    named = set(re.findall(r"`(\w+)`", row.split("|")[2]))
    assert named == {path.stem for path in folder.glob("*.py")} - {"__init__"}


def test_files_that_contributors_are_sent_to_are_there():
    named = re.findall(
        r"`((?:jaxremat|tests|docs|experiments|constraints|\.ci)/[\w./-]*)`", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_extras_are_explained():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (DOCS / "install.md").read_text().partition("## All extras")[2].partition("## ")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= set(extras)


def test_the_sdist_has_what_the_tests_import():
    """And the files outside of those folders that they read."""
    sdist = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    texts = [file.read_text() for file in (ROOT / "tests").rglob("*.py")]
    imported = {name for text in texts for name in re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)}
    here = {folder.name for folder in ROOT.iterdir() if folder.is_dir()}
    assert {"tests", "experiments"} <= here & imported <= set(sdist)
    assert {".ci", "README.md"} <= set(sdist)


def test_readme_gives_the_commands_that_ci_runs():
    """That of all tests, and that of the pages."""
    run = re.findall(r"^\.venv/bin/(python -m (?:pytest|sphinx)[ \w-]*)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert len(run) == 2
    for command in run:
        assert command.replace(" -q", "").strip() in README.read_text()
