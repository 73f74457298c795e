"""The static figures of training show the numbers of the runs."""

import pytest

from steppe.lab.runs import Run
from steppe.report.paper import (
    convergence_figure,
    experiments,
    generalisation_figure,
    option,
    strength,
)
from steppe.report.subjects import find_results

pytest.importorskip("matplotlib")


@pytest.fixture
def groups(in_lab):
    rows = experiments(find_results(["digits-*"], in_lab / "runs"))
    return {row.spec.partition(":")[0]: row for row in rows}


def test_seeds_of_one_experiment_are_one_group(groups):
    assert sorted(groups) == ["m-rwp", "rwp", "sam", "sgd"]
    assert all(len(group.results) == 2 for group in groups.values())
    assert strength(groups["rwp"]) == ("ratio", 0.6)
    assert (option(groups["sam"], "strength"), option(groups["sam"], "eta")) == (0.1, None)


def test_curves_are_means_over_seeds(groups):
    figure = convergence_figure({"RWP": groups["rwp"]})
    line = figure.axes[1].get_lines()[0]
    runs = [Run(result.folder).metrics for result in groups["rwp"].results]
    first = sum(records[0]["test_accuracy"] for records in runs) / 2
    assert line.get_ydata()[0] == pytest.approx(first)
    assert len(line.get_ydata()) == len(runs[0])
    assert "perturbed" in figure.axes[0].get_ylabel()


def test_strengths_of_several_kinds_do_not_share_an_axis(groups):
    with pytest.raises(ValueError, match="several kinds cannot share an axis: ratio, rho"):
        generalisation_figure({"RWP": [groups["rwp"]], "SAM": [groups["sam"]]})


def test_the_gap_keeps_its_sign(groups):
    """With noisy training labels the test accuracy can be the higher one."""
    figure = generalisation_figure({"RWP": [groups["rwp"]], "m-RWP": [groups["m-rwp"]]})
    for line, name in zip(figure.axes[0].get_lines(), ("rwp", "m-rwp"), strict=True):
        scores = [(r.score("train"), r.score("test")) for r in groups[name].results]
        expected = sum(train - test for train, test in scores) / 2
        assert line.get_ydata()[0] == pytest.approx(expected)
