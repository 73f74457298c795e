"""The benchmark behind the default strengths of deep nets runs; nothing here is timed or trained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "deep_strength.py"


def measured(out, *options):
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--jobs", "1", "--out", str(out), *options],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.slow
def test_it_measures_on_images_that_are_not_trained_on(real_data, tmp_path):
    out = tmp_path / "result.json"
    root = real_data("cifar10")
    done = measured(out, "--seeds", "1", "--root", str(root), "--store", str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    assert "±" not in done.stdout  # one seed has no spread
    assert "nan" not in done.stdout
    runs = json.loads(out.read_text())["runs"]
    assert [run["images"] for run in runs] == [45_000] * 2
    assert [run["method"] for run in runs] == ["sgd", "m-rwp:ratio=0.15"]


def test_a_recipe_that_leaves_nothing_alone_is_refused(tmp_path):
    done = measured(
        tmp_path / "o.json", "--recipe", "digits", "--store", str(tmp_path), "--seeds", "1"
    )
    assert done.returncode
    assert "nothing to compare on" in done.stderr
    assert not (tmp_path / "o.json").exists()
