"""The page's code blocks run in order, as a reader would run them."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "analysis.md"


@pytest.mark.slow
def test_every_block_of_the_page_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 11
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    made = {path.name for path in tmp_path.iterdir()}
    assert "landscape.png" in made
    for stem in ("spectrum", "radius", "robustness", "tradeoff"):
        assert {f"{stem}.png", f"{stem}.svg"} <= made
    assert "Landscape eval" in capsys.readouterr().out
