"""A small store of real runs with their analyses, made once, and a browser where there is one."""

import os
from pathlib import Path

import pytest

from steppe.cli import run

from .browser import Browser, chromium

METHODS = ["sgd", "sam:rho=.1", "rwp:ratio=.6", "m-rwp:ratio=.6"]
QUICK = ["--steps", "12", "--train-size", "60", "--batch", "20", "--eval-every", "1"]


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A folder with `comparison.json` and `runs/`, three of the methods analysed, one not."""
    folder = tmp_path_factory.mktemp("lab")
    before = Path.cwd()
    os.chdir(folder)
    try:
        compare = ["compare", *METHODS, "--seeds", "2", "--jobs", "1", "-q", *QUICK]
        assert run([*compare, "--out", "comparison.json"]) == 0
        for method in ("sgd", "sam", "m-rwp"):
            name = f"digits-{method}-seed0-*"
            small = [name, "--samples", "48", "-q"]
            assert run(["analyze", "landscape", *small, "--n", "7"]) == 0
            assert run(["analyze", "spectrum", *small, "--steps", "6", "--probes", "1"]) == 0
            radii = ["--radii", ".1", "1", "--batch", "24", "--directions", "2", "--steps", "2"]
            assert run(["analyze", "radius", *small, *radii]) == 0
            assert run(["analyze", "sharpness", *small, "--steps", "2"]) == 0
            both = [f"digits-{method}-seed?-*", "--samples", "48", "-q"]
            assert run(["analyze", "robustness", *both, "--draws", "2"]) == 0
            assert run(["analyze", "ensemble", *small, "--draws", "2"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def in_lab(lab, monkeypatch):
    monkeypatch.chdir(lab)
    return lab


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = chromium()
    if program is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    with Browser(program, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened
