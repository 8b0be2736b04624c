"""README and the pages under docs/: short enough, with links that lead somewhere, and true to what there is."""

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxremat
from jaxremat.cli.command import COMMANDS

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
    assert len(README.read_text().splitlines()) <= 130
    found = {link.removeprefix("docs/") for link in links(README)}
    assert {page.name for page in PAGES} - {"README.md", "index.md"} <= found


#: The pages of each kind, as the site's sidebar has them.
KINDS = {
    kind: [DOCS / f"{name}.md" for name in names.split()]
    for kind, names in re.findall(r":caption: (\S+)\n:hidden:\n\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
}


def test_pages_are_of_four_kinds_which_readme_has_too():
    assert list(KINDS) == ["Tutorial", "How-to", "Reference", "Explanation"]
    rows = dict(re.findall(r"^\| ([\w-]+) \| (\[.*) \|$", README.read_text(), re.MULTILINE))
    for kind, pages in KINDS.items():
        assert {page.name for page in pages} - {"built.md", "one_run.md"} == set(re.findall(r"docs/(\w+\.md)", rows[kind]))


@pytest.mark.parametrize("page", KINDS["Tutorial"] + KINDS["How-to"], ids=lambda page: page.stem)
def test_what_is_read_while_working_is_short(page):
    assert len(page.read_text().splitlines()) < 150


#: By command, the function that does what its checked flags say.
DOES = {"run": "show_list_or_answers", "explain": "show_memory", "doctor": "_doctor", "watch": "_watch", "diff": "compare"}
#: Files that the reader of a page has by then.
OF_THE_READER = {
    "Qwen3-8B",
    "config.json",
    "model.py:workload",
    "mine.py:workload",
    "train.py:workload",
    "train.py:whole_step",
    "plan:plan.json",
    "plan:runs/auto/plan.json",
}


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of each `jaxremat` in a page's blocks for a shell. README's are in its sentences, too."""
    text = page.read_text()
    typed = re.findall(r"^ *```bash\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    if page == README:
        typed += re.findall(r"`(\.venv/bin/[^`]+)`", text)
    for line in re.split(r" && |\n", "\n".join(typed).replace("\\\n", " ")):
        words = shlex.split(line, comments=True)
        [*_, at] = [-1, *(n for n, word in enumerate(words) if re.fullmatch(r"jaxremat(\.run)?", word))]
        if at == 0 or (at > 0 and words[at - 1] == "-m"):
            yield words[at + 1 :] if words[at] == "jaxremat" else ["run", *words[at + 1 :]]


@pytest.mark.parametrize("page", [page for page in PAGES if [*commands(page)]], ids=lambda page: page.name)
def test_commands_can_be_typed(page, monkeypatch, capsys):
    """In a clone: their flags are known, have values that are allowed, and go together."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("jaxremat.cli.command.set_up_process", lambda flags: None)
    for typed in commands(page):
        name, *argv = typed if typed and typed[0] in COMMANDS else ["run", *typed]
        command = importlib.import_module(f"jaxremat.cli.{name}")
        monkeypatch.setattr(command, DOES.get(name, name), lambda *_: 0)
        names_a_file = page != README and OF_THE_READER.intersection(argv)
        assert command.main(argv) == 0 or names_a_file, capsys.readouterr().err


def test_readme_has_no_flags_without_their_command():
    """In its lists: such flags can't be typed, and no test would read them."""
    assert re.findall(r"^\* `--.*", README.read_text(), re.MULTILINE) == []


def test_readme_shows_the_first_example_as_it_is():
    (block,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert (ROOT / "examples/first.py").read_text().endswith(block)


def test_tabs_are_the_same_in_each_set():
    """A framework that is chosen in one set of tabs is shown in the others, because their titles and sync keys are equal."""
    _, *sets = (DOCS / "frameworks.md").read_text().split("\n::::{tab-set}\n")
    tabs = [
        re.findall(r"^:::\{tab-item\} (.*)\n:sync: (\w+)$", text.partition("\n::::\n")[0], re.MULTILINE) for text in sets
    ]
    assert tabs == 2 * [[("Linen", "linen"), ("NNX", "nnx"), ("Equinox", "equinox"), ("Plain functions", "plain")]]


def test_every_page_is_in_the_table_of_contents():
    listed = re.findall(r"^(\w+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.stem for page in DOCS.glob("*.md") if page.stem != "index")


def test_api_page_has_every_public_name():
    named = re.findall(r"^\.\. [\w:]+:: jaxremat\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(set(jaxremat.__all__) - {"__version__"})


#: Rooms whose docstrings all begin with a line that is short enough for a list, and stands alone. Rooms are only ever added.
SHORT_FIRST_LINES = (
    *("__init__.py", "errors.py", "maxtext.py", "testing.py", "units.py", "answer/", "cli/", "config/", "system/"),
    *("chips/", "mesh/", "knapsack/", "model/", "planner/", "policy/", "report/", "search/", "session/", "step/"),
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


def test_what_is_installed_comes_from_a_clone():
    """As README has it: no package index has jaxremat."""
    files = [README, *DOCS.glob("*.md"), *(ROOT / "examples").glob("*.py")]
    assert [file.name for file in files if re.search(r"pip install [\"']?jaxremat\b", file.read_text())] == []


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
