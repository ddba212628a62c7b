"""Test of the example notebook, run as a script in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.forked import Program

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "train_plot_generate.ipynb"


@pytest.mark.big
def test_notebook_trains_plots_and_generates(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(sources) == 6
    script = tmp_path / "notebook.py"
    script.write_text("\n".join([*sources, "print('fell to', sum(losses[-9:]) / sum(losses[:9]))"]))
    with Program(script) as program:
        code, output, errors = program.end()
    assert code == 0, errors
    assert "same text from plain transformers: True" in output
    assert float(output.split("fell to ")[1]) < 0.7
