"""Every notebook runs from top to bottom and shows the kinds of output that are stored in it."""

from itertools import groupby
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def kinds(notebook):
    """By cell; how a busy machine cuts printed text into outputs does not matter."""
    return [
        [kind for kind, _ in groupby(kind_of(output) for output in cell.get("outputs", []))]
        for cell in notebook.cells
    ]


def kind_of(output):
    return sorted(output.get("data", {"text/plain": ""}))


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_the_notebook_runs(file, tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    assert file.stat().st_size < 250_000
    stored = nbformat.read(file, as_version=4)
    assert any(kinds(stored)), f"store its outputs: .venv/bin/jupyter-execute --inplace {file}"
    fresh = nbformat.read(file, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(fresh, timeout=300, kernel_name="python3", resources=where).execute()
    assert kinds(fresh) == kinds(stored)
