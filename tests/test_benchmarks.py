"""Every benchmark runs for a step or two, so that none can rot. Nothing here is timed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
COMMANDS = {
    "step": ["step.py", "mlp", "--quick"],
    "memory": ["memory.py", "--quick", "--width", "256"],
    "lora": ["memory.py", "--lora", "--quick", "--width", "256"],
    "scaling": ["scaling.py", "--quick"],
    "launches": ["launches.py", "--quick"],
    "imports": ["imports.py", "--quick"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_it_runs_and_writes_its_numbers(name, tmp_path):
    out = tmp_path / "result.json"
    script, *options = COMMANDS[name]
    result = subprocess.run(
        [sys.executable, str(FOLDER / script), *options, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_text())
    assert found["torch"]


def test_the_page_is_what_the_results_say():
    done = subprocess.run(
        [sys.executable, str(FOLDER / "page.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_page_names_missing_results_and_judges_by_the_numbers(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import page

    one = {"median": 2.0, "low": 1.0, "high": 4.0, "n": 3}
    net = {"steps": {"SGD": one, "RWP": one}, "added": {"RWP": {**one, "median": 1.0}}}
    nets = {"mlp": {**net, "parameters": 5, "batch": 2}}
    known = {"machine": "abacus", "torch": "2", "date": "today"}
    copies = {"copies": {"RWP": 1.0, "MSAM": 2.2, "SAM": 9.0}, "bars": {"RWP": 1.1, "MSAM": 2.1}}
    results = {"step": {"nets": nets, "threads": 2}, "memory": {"parameters": 7, **copies}}
    written = page.text({name: {**known, **result} for name, result in results.items()})
    assert "step.py`, abacus, 2 threads, torch 2, today." in written
    assert "| SGD | 1.000 [0.500, 2.000] |  |  |" in written
    assert "| RWP | 1.000 [0.500, 2.000] | 1.00 [1.00, 4.00] | 0.500 [0.500, 2.000] |" in written
    for row in ("| RWP | 1.00 (meets 1.1) |", "| MSAM | 2.20 (misses 2.1) |", "| SAM | 9.00 |"):
        assert row in written
    assert written.count("Not measured yet.") == len(page.SECTIONS) - 2
