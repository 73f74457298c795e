"""Every Python block of README and docs runs, page by page, in order."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import steppe
import steppe.methods

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
    pages = "".join(file.read_text() for file in tmp_path.glob("api*/index.html"))
    public = [f"{p.__name__}.{name}" for p in (steppe, steppe.lab, steppe.analysis, steppe.report)
              for name in p.__all__]  # fmt: skip
    assert not [name for name in public if f'id="{name}"' not in pages]


def test_every_argument_of_a_method_is_explained():
    """The reference's table names each one, with the methods that take it."""
    table = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", (ROOT / "docs/api.md").read_text(), re.M)
    said = {name: set(re.findall(r"`(\w+)`", methods)) for name, methods in table}
    taken = {}
    for name, function in inspect.getmembers(steppe.methods, inspect.isfunction):
        if name in steppe.__all__ and inspect.signature(function).return_annotation == "Method":
            for argument in inspect.signature(function).parameters:
                taken.setdefault(argument, set()).add(name)
    assert said == taken


METHODS = [
    function
    for name, function in inspect.getmembers(steppe.methods, inspect.isfunction)
    if name in steppe.__all__ and inspect.signature(function).parameters
]


@pytest.mark.parametrize("function", [steppe.attach, *METHODS], ids=lambda f: f.__name__)
def test_every_argument_is_in_the_docstring(function):
    """In a section that the reference renders: an entry, or named in the entry of the one it is like."""
    section = inspect.getdoc(function).partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): \S", section, re.MULTILINE)
    shared = " ".join(re.findall(r"as in `\w+`, like ([^.;]+)", section))
    taken = list(inspect.signature(function).parameters)
    assert entries == [name for name in taken if not re.search(rf"\b{name}\b", shared)]


HOME = "https://github.com/steppe-torch/steppe/blob/main/"
RAW = "https://raw.githubusercontent.com/steppe-torch/steppe/main/"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def anchors(page):
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


def test_links_lead_somewhere():
    broken = []
    for page in PAGES:
        content = BLOCK.sub("", page.read_text(encoding="utf-8"))
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", content)
        broken += [f"{page.name}: {link}" for link in links
                   if "://" not in link and not (page.parent / link).exists()]  # fmt: skip
    for link in re.findall(r"^\[[\w-]+\]: (\S+)$", README, re.MULTILINE):
        path, _, anchor = link.removeprefix(HOME).removeprefix(RAW).partition("#")
        if path == link:
            assert link.startswith("https://openreview.net/"), link
        elif not (ROOT / path).exists() or (anchor and anchor not in anchors(ROOT / path)):
            broken.append(f"README.md: {link}")
    assert not broken


def test_the_readme_is_short_and_readable_on_an_index():
    """Absolute links, at most 700 words outside code and tables, the install line among the first 150."""
    assert not re.findall(r"\]\((?!https://)", README)
    assert set(re.findall(r"\]\[([\w-]+)\]", README)) == set(
        re.findall(r"^\[([\w-]+)\]:", README, re.MULTILINE)
    )
    assert len(README[: README.index("pip install -c constraints.txt .")].split()) < 150
    prose = re.sub(
        r"^```.*?^```|^\|.*?$|^\[.*?\]: .*?$", "", README, flags=re.DOTALL | re.MULTILINE
    )
    assert len(prose.split()) <= 700


def test_the_gains_of_the_readme_are_the_evidence():
    """Each row of its table of gains stands in docs/evidence.md with the same numbers."""
    evidence = [line.split("|") for line in (ROOT / "docs/evidence.md").read_text().splitlines()]
    header = next(cells for cells in evidence if "setting" in str(cells) and " RWP " in cells)
    lines = README[README.index("| setting |") :].split("\n\n")[0].splitlines()
    names, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    places = [[c.strip().replace("baseline", "SGD") for c in header].index(n) for n in names[1:]]
    known = [[cells[i].strip() for i in places] for cells in evidence if len(cells) == len(header)]
    assert len(rows) >= 4
    assert all(row[1:] in known for row in rows), known


def test_tables_from_the_evidence_are_current():
    pictures = pytest.importorskip("docs.pictures")
    for name, blocks in pictures.evidence_blocks(pictures.digits()).items():
        content = (ROOT / name).read_text(encoding="utf-8")
        for block in blocks.values():
            assert block in content, f"{name}: run python -m docs.pictures"


def test_what_the_readme_says_of_compression_is_the_evidence():
    page, found = (ROOT / "docs/evidence.md").read_text(), []
    for name in (r"RWP \(rise 0.2\)", ": RWP"):
        words = name + r" − SGD ([^;]+) \((\d+) better, 0 worse of (\d+)\)"
        gains, better, every = re.search(words, page).groups()
        found.append((*re.findall(r"\+([\d.]+)", gains)[1::2], better, every))
    (three, pruned, better, every), usual = found
    claim = (
        f"{pruned} points more than SGD with 80 % pruned and {three} more at 3 bits "
        f"(significantly better in {better} of {every} comparisons, worse in none); the default "
        f"{usual[1]} and {usual[0]} ({usual[2]} of {usual[3]})"
    )
    assert claim in " ".join(README.split())


def test_the_architecture_names_every_module_of_the_core():
    table = (ROOT / "docs" / "architecture.md").read_text("utf-8").partition("## The modules")[2]
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\|([^|]+)\|", table, re.M))))
    modules = {p.stem for p in (ROOT / "src" / "steppe").glob("*.py") if p.stem[0] != "_"}
    assert modules <= named
