"""The examples in the docstrings give what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import steppe
import studies

PACKAGES = (Path(steppe.__file__).parent, Path(studies.__file__).parent)


def _modules_with_examples():
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            if ">>> " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(package.parent).with_suffix("").parts
                yield ".".join(parts).removesuffix(".__init__")


MODULES = list(_modules_with_examples())


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def test_examples_are_found_in_every_part():
    parts = ("analysis", "lab", "lab.data", "lab.models", "report")
    assert all(any(name.startswith(f"steppe.{part}.") for name in MODULES) for part in parts)
    assert "steppe.attaching" in MODULES
    assert any(name.startswith("studies.") for name in MODULES)
