"""Frameworks are optional: not imported by `import steppe`, and asked for where they are needed."""

import subprocess
import sys

import pytest

FRAMEWORKS = ("lightning", "pytorch_lightning", "transformers", "accelerate", "peft", "ray")


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.parametrize("name", ["steppe", "steppe.lab", "steppe.lab.commands"])
def test_no_framework_is_imported(name):
    code = f"import sys, {name}; print([m for m in {FRAMEWORKS} if m in sys.modules])"
    assert run(code).stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["lightning", "transformers", "peft"])
def test_an_absent_framework_is_asked_for_by_its_extra(name):
    absent = "; ".join(f"sys.modules[{m!r}] = None" for m in FRAMEWORKS)
    found = run(f"import sys; {absent}; import steppe.integrations.{name}")
    assert found.returncode == 1
    assert f"pip install 'steppe[{name}]'" in found.stderr
    assert "ImportError: steppe.integrations." in found.stderr


def test_absent_ray_is_asked_for_by_its_extra(tmp_path):
    command = ["compare", "sgd", "--engine", "ray", "--store", str(tmp_path / "runs")]
    found = run(
        f"import sys; sys.modules['ray'] = None; from steppe.cli import main; main({command})"
    )
    assert found.returncode == 2
    assert (
        "steppe: engine ray: ray is not installed. Install it: pip install 'steppe[ray]'."
        in found.stderr
    )
