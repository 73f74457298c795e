"""The five primary questions are answered by the numbers of the lines."""

import re
from dataclasses import replace

import pytest

from studies.comparisons import best_fixed, refuted, trial_gains
from studies.evidence import Evidence
from studies.figures import OVERFIT, cost_figure, gain_figure, match_figure, survival_figure
from studies.findings import CHANGES, Claim, Findings
from studies.plan import make_plan
from studies.questions import (
    NOTHING,
    PRIMARY,
    cost_answer,
    gain_answer,
    match_answer,
    post_hoc,
    survival_answer,
    survival_table,
    transfer_answer,
)
from tests.studies.made_up import LEVELS, fill, made_up_line
from tests.studies.tiny import rich

PLACE = "Rich (MLP, few steps)"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return [Findings(rich(), filled(tmp_path_factory.mktemp("found")))]


def gain(found, first, second="SGD", after=""):
    return found[0].differences[Claim("mlp", "defaults", first, second, after)]


def asked(entry):
    """What the primary questions are about."""
    return entry.part in ("defaults", "tuning") and "," not in entry.name


def filled(folder):
    return fill(rich(), folder, take=asked)


def changed(folder, change):
    """The findings after every line was changed."""
    evidence = filled(folder)
    lines = [change(line) for line in evidence.lines.values()]
    evidence.file.write_text("".join(line.text() for line in lines))
    return [Findings(rich(), Evidence(folder, "rich"))]


def test_five_are_named():
    assert [question.name for question in PRIMARY] == [
        "cost",
        "gain",
        "match",
        "survival",
        "transfer",
    ]


def test_without_lines_nothing_is_answered(tmp_path):
    empty = [Findings(rich(), Evidence(tmp_path, "rich"))]
    assert {question.answer(empty) for question in PRIMARY} == {NOTHING}


def test_a_default_that_costs_nothing(found):
    low = gain(found, "m-RWP")
    said = cost_answer(found)
    assert said.startswith(
        "No: none of 4 comparisons with the baseline in 1 settings is significantly"
    )
    assert f"the lowest is m-RWP on {PLACE}, +{low.mean:.2f} [" in said


def test_a_default_that_costs(tmp_path, monkeypatch):
    monkeypatch.setitem(LEVELS, "rwp", 70.0)
    found = [Findings(rich(), filled(tmp_path))]
    said = cost_answer(found)
    assert said.startswith("Yes: 1 of 4 comparisons")
    assert f"the worst is RWP on {PLACE}, −{-gain(found, 'RWP').mean:.2f} [" in said


def test_gains_where_the_baseline_overfits(found):
    """The made-up training accuracy is 99, some 18 points above the baseline's on test data."""
    means = [gain(found, name).mean for name in ("RWP", "ARWP", "m-RWP", "m-ARWP")]
    assert f"4 of 4 comparisons are significantly better (+{min(means):.2f} to" in gain_answer(
        found
    )
    assert gain_answer(found).startswith("Yes: ")


def test_where_the_baseline_does_not_overfit_there_is_no_question(tmp_path):
    def fits(line):
        score = line.result.score()
        train = {**line.result.metrics["train"], "accuracy": score + OVERFIT - 0.1}
        return replace(
            line, result=replace(line.result, metrics={**line.result.metrics, "train": train})
        )

    found = changed(tmp_path, fits)
    assert gain_answer(found) == NOTHING
    assert cost_answer(found) != NOTHING


def test_a_match_is_equivalence(found, tmp_path, monkeypatch):
    """m-ARWP and SAM are made up to differ by a tenth of a point."""
    assert match_answer(found).startswith("Yes: equivalent within 0.5 points in 1 of 1 settings")
    monkeypatch.setitem(LEVELS, "m-arwp", 80.0)
    said = match_answer([Findings(rich(), filled(tmp_path))])
    assert said.startswith("No: equivalent within 0.5 points in 0 of 1 settings")
    assert re.search(r"significantly worse in 1 \(−[12]\.\d\d\)\.", said)


def test_what_survives(tmp_path):
    """Rounding and pruning are made up to cost SGD twice what they cost the others."""

    def compressed(line):
        twice = 2 if line.result.config.method == "sgd" else 1
        score = line.result.score() if line.result.status == "finished" else 0
        left = {change: score - twice * (i + 1) for i, change in enumerate(CHANGES)}
        return replace(line, minima={"robustness": {"none": score, **left}})

    found = changed(tmp_path, compressed)
    usual = gain(found, "ARWP").mean
    rows = {pair: rest for pair, *rest in survival_table(found).rows}
    assert rows["m-ARWP − SAM"][0] == f"+{gain(found, 'm-ARWP', 'SAM').mean:.2f}"
    gains = [f"+{usual + twice:.2f}" for twice in (1, 2, 3, 4)]
    assert rows["ARWP − SGD"] == [*gains, "4", "0", "4"]
    gains = [f"+{gain(found, 'RWP').mean + twice:.2f}" for twice in (1, 2, 3, 4)]
    assert rows["RWP − SGD"] == [*gains, "4", "0", "4"]
    assert f"RWP − SGD {', '.join(gains)} (4 better, 0 worse of 4)" in survival_answer(found)
    (axis,) = survival_figure(found).axes
    names = [container.get_label() for container in axis.containers]
    assert names == ["SGD", "SAM", "RWP", "m-RWP"]
    left = axis.containers[0][0].get_ydata()
    assert list(left[0] - left[1:]) == pytest.approx([2, 4, 6, 8])
    assert axis.get_title() == "Rich (MLP, few steps), n = 6"
    colours = {each.get_label(): each.lines[0].get_color() for each in axis.containers}
    fewer = changed(
        tmp_path / "fewer",
        lambda line: (
            replace(line, minima={})
            if line.result.config.method.startswith("sam")
            else compressed(line)
        ),
    )
    (axis,) = survival_figure(fewer).axes
    without = {each.get_label(): each.lines[0].get_color() for each in axis.containers}
    assert without == {name: colours[name] for name in ("SGD", "RWP", "m-RWP")}


def test_the_one_ratio_with_the_smallest_worst_loss():
    gains = {
        "a": {0.1: -1.0, 0.2: 3.0, 0.4: 9.0},
        "b": {0.05: 2.0, 0.1: -0.5, 0.2: -2.0, 0.4: -9.0},
    }
    fixed = best_fixed(gains)
    assert (fixed.value, fixed.gain, fixed.place) == (0.1, -1.0, "a")
    assert best_fixed({}) is None
    assert best_fixed({"a": {0.1: 1.0}, "b": {0.2: 1.0}}) is None


def test_transfer_is_read_off_the_trials(found):
    """The made-up validation accuracy is best near 0.3, three points above the baseline's level."""
    gains = trial_gains(found, "rise")
    assert list(gains) == [PLACE]
    assert max(gains[PLACE], key=gains[PLACE].get) == 0.4
    said = transfer_answer(found)
    assert said.startswith("Open: ratio not measured yet; ")
    assert "the one rise of RWP with the smallest worst loss in 1 settings is 0.4, " in said


def test_archived_trials_count_too(tmp_path):
    evidence = filled(tmp_path)
    before = trial_gains([Findings(rich(), evidence)], "rise")
    trials = {run for run, line in evidence.lines.items() if " tuning rwp " in line.label}
    assert evidence.archive("old", evidence.lines.keys() - trials) == len(trials) == 10
    assert trial_gains([Findings(rich(), Evidence(tmp_path, "rich"))], "rise") == before


def test_an_archived_default_that_cost_accuracy_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setitem(LEVELS, "rwp", 70.0)
    evidence = filled(tmp_path)
    lost = gain([Findings(rich(), evidence)], "RWP").mean
    assert refuted(tmp_path) == []
    rwp = {run for run, line in evidence.lines.items() if "defaults RWP" in line.label}
    assert evidence.archive("first", evidence.lines.keys() - rwp) == 6
    assert refuted(tmp_path) == [
        f"An earlier default was refuted: RWP with rise 0.02 on digits (`mlp`) cost {-lost:.1f} points of "
        "accuracy (n = 6, lines in `evidence/archive/first`)."
    ]


def test_questions_named_after_the_runs_are_post_hoc(tmp_path):
    def early(line):
        commit = {"commit": "4a078a3605ec"}
        environment = {**line.result.environment, **(commit if "SGD" in line.label else {})}
        return replace(line, result=replace(line.result, environment=environment))

    found = changed(tmp_path, early)
    count = sum("SGD" in line.label for line in found[0].evidence.lines.values())
    assert (
        f"{count:,} of {len(found[0].evidence.lines):,} runs were made before" in post_hoc(found)[0]
    )
    assert post_hoc([Findings(rich(), filled(tmp_path / "new"))]) == []


def test_the_figures_show_the_differences(found):
    cost, match, overfit = cost_figure(found), match_figure(found), gain_figure(found)
    drawn, _, (bars,) = cost.axes[0].containers[0].lines
    rwp = gain(found, "RWP")
    assert drawn.get_xdata()[0] == pytest.approx(rwp.mean)
    assert bars.get_segments()[0][:, 0] == pytest.approx([rwp.low, rwp.high])
    drawn = match.axes[0].containers[0].lines[0]
    assert drawn.get_xdata()[0] == pytest.approx(gain(found, "m-ARWP", "SAM").mean)
    drawn = overfit.axes[0].containers[0].lines[0]
    (setting,) = rich().settings
    assert drawn.get_xdata()[0] == pytest.approx(found[0].gap(setting))


def test_archiving_moves_lines_as_they_are(tmp_path):
    study = rich()
    plan = make_plan(study, Evidence(tmp_path, "rich"))
    evidence = Evidence(tmp_path, "rich")
    for entry in plan.entries[:4]:
        evidence.append(made_up_line(entry))
    text = evidence.file.read_text().splitlines(keepends=True)
    keep = {entry.run for entry in plan.entries[1:4]}
    old = tmp_path / "archive" / "old" / "rich.jsonl"
    old.parent.mkdir(parents=True)
    old.write_text(text[0])  # as after a kill before the line was gone from the study's own file
    assert evidence.archive("old", keep) == 1
    assert old.read_text() == text[0]
    assert evidence.file.read_text() == "".join(text[1:])
    assert set(evidence.lines) == keep
    assert evidence.archive("old", keep) == 0
