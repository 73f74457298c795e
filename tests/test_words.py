"""The words for users: the field's own terms, no private vocabulary."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

WORDS = {
    r"told": "significant, not significant; or said, shown",
    r"chance": "the minimum detectable difference",
    r"doors?": "ways to use it; explicit API",
    r"m-methods?": "mixed methods (m-RWP, m-ARWP)",
    r"plain(ly)? (training|sgd|adamw?)": "baseline (SGD, AdamW)",
    r"never a wrong weight": "weights are always restored exactly",
    r"travels?": "transfers across architectures",
    r"(lays?|laid) [^.]*over (the )?ranks": "runs the passes on different ranks",
    r"(go|goes|going|went) on": "resume",
    r"brings the command": "installs",
    r"needs? it not": "do not need it",
    r"half as much again": "1.5 times",
    r"speaks? against": "contradicts",
    r"by means(?! of)": "on average",
    r"other things gain more": "other changes help more",
    r"(test data )?(chose|chooses) nothing": "hyperparameters were chosen on validation data",
    r"crews?": "workers",
    r"ledgers?": "step",
    r"slots?": "parameters",
}
"""What is not written, and what is instead."""

PATTERN = re.compile("|".join(rf"(?<![\w-]){word}(?![\w-])" for word in WORDS), re.IGNORECASE)

EXEMPT = {"docs/log.md", "docs/decisions.md"}
"""For people who work on steppe."""


def pages():
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files += [*(ROOT / "examples").glob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")]
    for suffix in ("py", "js", "html"):
        files += (ROOT / "src").rglob(f"*.{suffix}")
    names = [file.relative_to(ROOT).as_posix() for file in files]
    return sorted(set(names) - EXEMPT)


def texts(name):
    """What a file says, by line: paragraphs, or of Python the strings, docstrings included."""
    content = (ROOT / name).read_text(encoding="utf-8")
    if not name.endswith(".py"):
        for paragraph in re.finditer(r"(?:.+\n?)+", content):
            line = content.count("\n", 0, paragraph.start()) + 1
            yield line, " ".join(paragraph.group().split())
        return
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, " ".join(node.value.split())


def found(name):
    return [
        f"{name}:{line}: {match.group()!r}"
        for line, text in texts(name)
        for match in PATTERN.finditer(text)
    ]


@pytest.mark.parametrize("name", pages())
def test_no_private_vocabulary(name):
    assert not found(name)


def test_the_words_are_found_where_they_are():
    for text in (
        "The m-methods lay their two passes over the ranks.",
        "A run goes on bit for bit.",
        "Not told from zero",
        "Plain training is the baseline",
        "test data chose nothing",
    ):
        assert PATTERN.search(text), text
    for text in (
        "retold",
        "a plain state dict",
        "by means of hooks",
        "golden",
        "__slots__",
        "doormat",
    ):
        assert not PATTERN.search(text), text
