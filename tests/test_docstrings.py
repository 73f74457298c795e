"""The examples in the docstrings give what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import steppe

SOURCE = Path(steppe.__file__).parent


def _modules_with_examples():
    for path in sorted(SOURCE.rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(SOURCE.parent).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__")


MODULES = list(_modules_with_examples())


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def test_examples_are_found_in_every_part():
    parts = ("analysis", "lab", "lab.data", "lab.models", "report", "study")
    assert all(any(name.startswith(f"steppe.{part}.") for name in MODULES) for part in parts)
    assert "steppe.attaching" in MODULES
