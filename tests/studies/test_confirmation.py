"""What confirms the defaults: power first, then a verdict by equivalence."""

import math
from dataclasses import replace

import pytest
from scipy import stats

from steppe.lab.specs import parse
from steppe.lab.statistics import mean_std
from studies.confirmation import detectable, judged, power_table, verdict_table, verdict_words
from studies.definitions import TWO_BATCHES
from studies.findings import Claim, Findings
from studies.page import compose
from tests.studies.made_up import LEVELS, fill
from tests.studies.tiny import rich


def confirming(seeds=6):
    study = rich(seeds)
    (setting,) = study.settings
    setting = replace(setting, tune=None, controls=(TWO_BATCHES["sgd"],))
    return replace(study, groups=((setting,),), margin=1.0)


@pytest.fixture
def found(tmp_path, monkeypatch):
    """The baseline at 80 points: RWP far above it, SAM the same, m-RWP a point below the control."""
    levels = {"sgd": 80.0, "sam": 80.0, "rwp": 90.0, "arwp": 80.1, "m-rwp": 79.0, "m-arwp": 79.2}
    for name, level in levels.items():
        monkeypatch.setitem(LEVELS, name, level)
    return Findings(confirming(), fill(confirming(), tmp_path))


def test_a_mixed_method_is_compared_with_the_baseline_on_its_two_batches(found):
    every = {each.claim.first: each for each, _ in judged(found)}
    assert {name: each.claim.second for name, each in every.items()} == {
        "SAM": "SGD",
        "RWP": "SGD",
        "ARWP": "SGD",
        "m-RWP": "SGD, two batches",
        "m-ARWP": "SGD, two batches",
    }
    (setting,) = found.study.settings
    control = found.row(setting, "defaults", "SGD, two batches")
    (method,) = {line.result.config.method for line in control.lines.values()}
    assert parse(method).strength == ("ratio", 0.0)
    assert found.gain(setting, found.row(setting, "defaults", "m-RWP")) == every["m-RWP"].difference
    claim = Claim("mlp", "defaults", "m-RWP", "SGD, two batches")
    assert found.differences[claim] == every["m-RWP"].difference


def test_the_verdict_is_by_equivalence(found):
    every = {each.claim.first: verdict for each, verdict in judged(found)}
    assert every["RWP"] == "better"
    assert every["SAM"] == every["ARWP"] == "equivalent"
    (sentence,) = verdict_words([found])
    assert sentence.startswith("[Rich](evidence/rich.md), by equivalence within 1 point: of 5 ")
    assert "1 better" in sentence
    strict = Findings(replace(found.study, margin=0.001), found.evidence)
    strict = {each.claim.first: verdict for each, verdict in judged(strict)}
    assert strict["SAM"] == "inconclusive"
    assert strict["m-RWP"] == "worse"


def test_power_comes_first_and_from_the_baseline_alone(found, tmp_path):
    text = compose(tmp_path, (found.study,))[0]["evidence/rich.md"]
    assert text.index("**What could be seen**") < text.index("**Verdict**")
    assert text.startswith("# Rich\n\n**What could be seen**")
    (setting,) = found.study.settings
    scores = list(found.row(setting, "defaults", "SGD").scores().values())
    (cells,) = power_table(found).rows
    assert cells[-1] == f"{detectable(mean_std(scores)[1], 6):.2f}"
    assert len(verdict_table(found).rows) == 5


def test_the_detectable_difference_is_found_with_the_power_it_names():
    """Of the noncentral t-distribution, to what the sum of two quantiles approximates."""
    n = 20
    shift = detectable(1.0, n) / math.sqrt(2 / n)
    power = stats.nct.sf(stats.t.ppf(0.975, n - 1), n - 1, shift)
    assert power == pytest.approx(0.8, abs=0.02)


def test_other_studies_have_neither(tmp_path):
    findings = Findings(rich(), fill(rich(), tmp_path))
    assert power_table(findings) is None
    assert verdict_table(findings) is None
    assert verdict_words([findings]) == []
