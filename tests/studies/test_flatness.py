"""Rank correlations between sharpness and what compression costs."""

from dataclasses import replace

import pytest

from studies.evidence import Evidence
from studies.findings import CHANGES, Findings
from studies.flatness import correlations, flatness_figure, flatness_words
from studies.page import compose
from tests.studies.made_up import fill
from tests.studies.tiny import rich


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return fill(rich(minima=True), tmp_path_factory.mktemp("full"), minima=True)


def test_known_correlations(full):
    """Made up: the eigenvalue is the accuracy, sharpness its inverse, the damage falls with it."""
    made = correlations([Findings(rich(minima=True), full)])
    ((place, ranked),) = made.items()
    assert place.endswith(f", n = {6 * 8}")
    adaptive, plain = "adaptive sharpness, worst case", "sharpness, average case (trace)"
    assert list(ranked) == ["largest eigenvalue", adaptive, plain, "weight norm"]
    assert list(ranked["largest eigenvalue"].values()) == pytest.approx([-1] * len(CHANGES))
    assert list(ranked[adaptive].values()) == pytest.approx([1] * 4)
    words = flatness_words(made)
    assert "largest eigenvalue −1.00 (−1.00 to −1.00)" in words
    assert "weight norm −1.00" in words
    figure = flatness_figure(made)
    assert [axis.get_title() for axis in figure.axes] == list(ranked)
    figure.draw_without_rendering()


def test_damage_with_the_statistics_of_training_is_ranked_too(full):
    """Made up: with them it is the damage of the others, turned round."""
    both = Findings(rich(minima=True), Evidence(full.folder, full.study))
    for line in both.evidence.lines.values():
        if left := line.minima.get("robustness"):
            line.minima["robustness"] = {**left, "as is": {c: -v for c, v in left.items()}}
    ((_, ranked),) = correlations([both]).items()
    assert list(ranked["weight norm"]) == [*CHANGES, *(f"{change}, as is" for change in CHANGES)]
    assert list(ranked["weight norm"].values()) == pytest.approx([-1] * 4 + [1] * 4)


def test_the_page_has_it_where_there_is_something_to_show(full, tmp_path):
    pages, drawn = compose(full.folder, (rich(minima=True),))
    assert "## Is it flatness?" in pages["evidence.md"]
    assert "evidence/flatness.png" in drawn
    fill(rich(), tmp_path)
    assert "flatness" not in compose(tmp_path, (rich(),))[0]["evidence.md"]


def test_few_models_show_nothing(full):
    few = Findings(rich(minima=True), replace(full))
    kept = list(few.evidence.lines.items())
    some = {run: line for run, line in kept if line.label.endswith("seed 0")}
    few.evidence.lines.clear()
    few.evidence.lines.update(some)
    assert correlations([few]) == {}
