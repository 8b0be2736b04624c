"""Does the notebook of the examples run, and does it show what it says?

    python -m experiments.notebook     # runs examples/notebook.ipynb anew, and writes its outputs into it

Progress lines are left out of the written outputs, and so is the memory page: a forge shows neither.
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
_TIMEOUT_S = 300


def executed(path: Path = NOTEBOOK) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new run.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=_TIMEOUT_S, record_timing=False, kernel_name="python3").execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.output_type == "execute_result"]
            for output in cell.outputs:
                if output.data.get("text/html", "").startswith("<iframe"):
                    del output.data["text/html"]
    return notebook


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """What each output says as text, in order."""
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    return [output.data["text/plain"] for cell in cells for output in cell.outputs]


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
