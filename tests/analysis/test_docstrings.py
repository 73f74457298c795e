"""The examples in the docstrings give what they say."""

import doctest
import importlib
import pkgutil

import pytest

import steppe.analysis

MODULES = [f"steppe.analysis.{m.name}" for m in pkgutil.iter_modules(steppe.analysis.__path__)]


@pytest.mark.parametrize("name", [*MODULES, "steppe.theory"])
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    modules = map(importlib.import_module, MODULES)
    found = [t for m in modules for t in doctest.DocTestFinder().find(m) if t.examples]
    assert len(found) >= 8
