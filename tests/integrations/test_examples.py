"""The examples run as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["lightning_digits", "transformers_lm", "accelerate_digits", "ray_compare"]
)
def test_runs(name, tmp_path):
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
    assert "m-ARWP" in found.stdout
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"
