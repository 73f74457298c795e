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
    "data": ["data.py", "--quick"],
    "scaling": ["scaling.py", "--quick"],
    "launches": ["launches.py", "--quick"],
    "imports": ["imports.py", "--quick"],
    "analysis": ["analysis.py", "--quick"],
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

    results = page.load()
    one = {"median": 1.0, "low": 1.0, "high": 1.0, "n": 3}
    steps = dict.fromkeys(
        ["SGD", "SAM", "SAM of pytorch-optimizer", "m-RWP", "m-ARWP", "RWP", "ARWP"], one
    )
    slow = {**one, "median": 0.6}
    added = {"ARWP, released form": one, "RWP": slow, "ARWP": {**one, "median": 0.5}}
    free = {**steps, "m-ARWP": {**one, "median": 1.1}}
    nets = {"mlp": {"steps": steps, "added": added, "free": free, "parameters": 5, "batch": 2}}
    made_up = {**results.get("memory", {}), "threads": 1, "nets": nets}
    written = page.text({"step": made_up})
    assert "RWP adds 0.60 (misses 0.55)" in written
    assert "ARWP adds 0.50 (meets 0.55)" in written
    assert "m-ARWP takes 1.100 (misses 1.02) of SAM, in one process" in written
    assert "Not measured yet: launches, scaling, memory" in written


def test_the_released_form_is_arwp_with_its_exponent():
    """The form we measure against does what the description says: std (1 + eta v)^(-1/2)."""
    sys.path.insert(0, str(FOLDER))
    import torch
    from released import ReleasedARWP
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 3), nn.Linear(3, 2))
    true = [p.detach().clone() for p in model.parameters()]
    arwp = ReleasedARWP(model, 0.1, eta=2.0)
    model(torch.randn(4, 400)).sum().backward()
    for step in range(2):
        arwp.perturb()
        eps = model[0].weight.detach() - true[0]
        norms = true[0].norm(dim=1)
        history = 0.0 if step == 0 else model[0].weight.grad.square().sum(1)
        expected = 0.1 * norms / (1 + 2.0 * torch.as_tensor(history)).sqrt()
        # 400 normal values per filter: five standard errors of their std
        assert ((eps.std(dim=1) / expected - 1).abs() < 5 / (2 * 400) ** 0.5).all()
        arwp.restore()
        assert all(torch.equal(p, t) for p, t in zip(model.parameters(), true, strict=True))
