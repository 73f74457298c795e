"""Frameworks are optional: not imported by `import steppe`, and asked for where they are needed."""

import subprocess
import sys

import pytest

FRAMEWORKS = ("lightning", "pytorch_lightning", "transformers", "accelerate")


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


def test_the_core_imports_no_framework():
    code = f"import sys, steppe; print([m for m in {FRAMEWORKS} if m in sys.modules])"
    assert run(code).stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_an_absent_framework_is_asked_for_by_its_extra(name):
    absent = "; ".join(f"sys.modules[{m!r}] = None" for m in FRAMEWORKS)
    found = run(f"import sys; {absent}; import steppe.integrations.{name}")
    assert found.returncode == 1
    assert f"pip install 'steppe[{name}]'" in found.stderr
    assert "ImportError: steppe.integrations." in found.stderr
