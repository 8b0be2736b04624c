"""Sphinx settings: the pages of this folder, and the API page from the package's docstrings. Nothing is fetched."""

import contextlib
import dataclasses
import importlib
import io
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

import jaxremat

project = "jaxremat"
copyright = "the jaxremat authors, Apache-2.0"
release = jaxremat.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
myst_enable_extensions = ["colon_fence"]  # `:::{tab-set}`: what is in it is plain Markdown in the repository
copybutton_selector = (
    "div.highlight-bash pre, div.highlight-python pre, div.highlight-py pre, div.highlight-toml pre, div.highlight-yaml pre"
)
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"jaxremat {release}"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_copy_source = False
default_role = "code"  # docstrings write `name`, as Markdown does
myst_heading_anchors = 3
napoleon_custom_sections = [("Attributes", "params_style")]  # a dataclass's fields are what its constructor takes
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100


def add_fields(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Documents the fields of `ModelConfig` and `TrainConfig` by the help of their flags."""
    if dataclasses.is_dataclass(thing):
        helps = {f.name: f.metadata["help"].replace("*", r"\*") for f in dataclasses.fields(thing) if "help" in f.metadata}
        lines += [f":param {field}: {text}" for field, text in helps.items()]


def leave_out_flax_fields(app: Any, what: str, name: str, thing: Any, options: Any, signature: str, returns: str) -> Any:
    """Ends a Flax module's signature before `parent` and `name`, which every module has."""
    return (signature.partition(", parent:")[0] + ")", returns) if signature and ", parent:" in signature else None


class Flags(Directive):
    """What a command's --help-all prints: `flags` with the command's name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The help as a literal block."""
        (name,) = self.arguments
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            importlib.import_module(f"jaxremat.cli.{name}").main(["--help-all"])
        return [nodes.literal_block(text=out.getvalue(), language="text")]


def setup(app: Any) -> None:
    """Connects the three above."""
    app.add_directive("flags", Flags)
    app.connect("autodoc-process-docstring", add_fields)
    app.connect("autodoc-process-signature", leave_out_flax_fields)
