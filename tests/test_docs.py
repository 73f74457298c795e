"""Every Python block of README and docs runs, page by page, in order."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page):
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), scope)


def test_relative_links_lead_somewhere():
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in link and not (page.parent / link).exists():
                broken.append(f"{page.name}: {link}")
    assert not broken
