import re
from pathlib import Path

from steppe.lab import models

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_every_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))
    scope = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(block, scope)
    assert "300 100 1397" in capsys.readouterr().out


def test_the_page_names_every_network():
    page = PAGE.read_text()
    assert [name for name in models.names() if f"`{name}`" not in page] == []
