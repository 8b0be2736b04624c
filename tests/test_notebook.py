"""The notebook of the examples runs, and its outputs are those that it shows."""

import sys
from types import SimpleNamespace

import nbformat
import pytest

from experiments.notebook import NOTEBOOK, executed, texts
from jaxremat.report.page import PageInput
from jaxremat.session.page import Page
from jaxremat.system.whose import shown_file
from tests.memory_maps import scanned


@pytest.mark.full
@pytest.mark.any_jax
def test_the_notebook_shows_what_its_cells_print():
    shown, again = nbformat.read(NOTEBOOK, as_version=4), executed()
    assert texts(shown) == texts(again), "python -m experiments.notebook writes the outputs anew"
    assert len(texts(shown)) >= 5


def test_a_page_is_shown_inline_and_filed(tmp_path):
    page = Page((PageInput("gpt2", 'a<b&"c', 32, "h100-80gb", scanned()),))
    inline = page._repr_html_()
    assert inline.startswith("<iframe srcdoc=")
    assert inline.count('"') == 6, "the page's own quotes are escaped"
    assert "allow-same-origin" not in inline
    assert page.write(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert "batch 32" in repr(page)


def test_a_cell_has_its_number(monkeypatch, tmp_path):
    compiled = {f"{tmp_path}/17.py": ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=compiled.get))
    monkeypatch.setattr("ipykernel.compiler.get_tmp_directory", lambda: str(tmp_path))  # imports the real IPython
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert shown_file("/tmp/ipykernel_9/17.py") == "In[3]"
    assert shown_file("/tmp/ipykernel_9/18.py") == "a cell of another notebook"
    assert shown_file("/home/me/train.py") == "/home/me/train.py"
