import re
from pathlib import Path

import pytest

from steppe.lab import models

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_every_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))
    scope = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, scope)
    assert "300 100 1397" in capsys.readouterr().out


def test_the_page_names_every_network():
    page = PAGE.read_text()
    assert [name for name in models.names() if f"`{name}`" not in page] == []


@pytest.mark.parametrize("module", ["naming", "data.augment", "data.cifar", "data.fashion", "data.named",
                                    "data.order", "data.streams", "data.subset", "data.user",
                                    "models", "models.vit", "models.widths"])  # fmt: skip
def test_the_examples_in_docstrings_are_true(module):
    import doctest
    import importlib

    result = doctest.testmod(importlib.import_module(f"steppe.lab.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
