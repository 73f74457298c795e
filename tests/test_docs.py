"""Every Python block of README and docs runs, page by page, in order."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TESTED_ELSEWHERE = {"analysis.md", "data.md"}
"""Pages whose tests also look at what their blocks print and write."""
SLOW = {"integrations", "compression"}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page):
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=pytest.mark.slow if p.stem in SLOW else (), id=p.name)
        for p in PAGES
        if blocks(p) and p.name not in TESTED_ELSEWHERE
    ],
)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), scope)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    result = subprocess.run(
        [*build, "--site-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "api" / "index.html").exists()


def test_relative_links_lead_somewhere():
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in link and not (page.parent / link).exists():
                broken.append(f"{page.name}: {link}")
    assert not broken
