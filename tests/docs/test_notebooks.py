"""The notebooks run, and hold what they give; ``python tests/docs/test_notebooks.py`` runs them.

Run as a program, it writes their outputs anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
HANG_S = 600  # only what hangs takes longer
LARGEST = 100_000  # bytes: pictures are small


def executed(path: Path, folder: Path) -> Any:
    """The notebook as it comes out of a kernel that works in ``folder``."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=HANG_S, record_timing=False, resources=resources).execute()
    notebook.metadata.pop("language_info", None)  # the version of Python
    return notebook


def shown(notebook: Any) -> list[tuple[list[str], str]]:
    """Of each output, its forms and its text; a printed or raised text counts as one."""
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    data = [out.get("data", {"text/plain": out.get("text", "")}) for out in outputs]
    return [(sorted(forms), forms.get("text/plain", "")) for forms in data]


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_holds_what_it_gives(path: Path, tmp_path: Path) -> None:
    stored, again = shown(nbformat.read(path, as_version=4)), shown(executed(path, tmp_path))
    assert [forms for forms, _ in stored] == [forms for forms, _ in again]
    for (_, old), (_, new) in zip(stored, again, strict=True):
        numbers = [[float(n) for n in re.findall(r"\d+\.?\d*", text)] for text in (old, new)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.05)  # other machines round otherwise


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_names_no_machine(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text) < LARGEST
    assert not re.search(r"/(home|root|tmp|Users)/", text)
    assert '"stderr"' not in text


if __name__ == "__main__":
    for path in NOTEBOOKS:
        nbformat.write(executed(path, path.parent), path)
