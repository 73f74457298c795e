"""The examples run as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lightning_digits", "m-ARWP"),
        ("transformers_lm", "m-ARWP"),
        ("transformers_lora", "LoRA with Flat-LoRA   loss "),
        ("accelerate_digits", "m-ARWP"),
        ("ray_compare", "m-ARWP"),
    ],
)
def test_runs(name, says, tmp_path):
    if name == "ray_compare":
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'steppe[ray]'")
    found = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--quick"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr
    assert says in found.stdout
    assert "base changed" not in found.stdout
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"
