import csv
import io
import json
import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import nn

from steppe.lab import Comparison, Config, LabError, Tune, compare, engines
from steppe.lab.cost import costs
from steppe.lab.data import wrap
from steppe.lab.sentences import comparison_sentence
from steppe.lab.specs import parse
from steppe.lab.survival import survival_sentence
from steppe.lab.tuning import RISES, Choice, _beyond, tune_all

TINY = Config(steps=20, batch=64, train_size=200, label_noise=0.2, data_seed=None, eval_every=0)
METHODS = ["sam:rho=.2", "sgd", "m-rwp:ratio=.9"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def result(store) -> Comparison:
    return compare(methods=METHODS, seeds=5, config=TINY, store=store, progress=False)


def test_rows_pairs_and_statistics_by_hand(result):
    assert [row.label for row in result.rows] == ["SGD", "SAM", "m-RWP"]
    assert [row.strength for row in result.rows] == ["", "rho 0.2", "ratio 0.9"]
    for row in result.rows:
        assert [r.config.seed for r in row.results] == [0, 1, 2, 3, 4]
    sgd, sam, _ = ([r.metrics["test"]["accuracy"] for r in row.results] for row in result.rows)
    expected = stats.ttest_rel(sam, sgd)
    found = result.row("sam").difference
    assert found.p == pytest.approx(expected.pvalue)
    assert found.mean == pytest.approx(sum(sam) / 5 - sum(sgd) / 5)
    assert result.paired("sam", "SGD") == pytest.approx(
        [a - b for a, b in zip(sam, sgd, strict=True)]
    )
    assert result.baseline.difference is None


def test_cost_is_measured(result):
    assert [row.cost["flops"] for row in result.rows] == pytest.approx([1, 2, 2], rel=1e-3)
    assert result.baseline.cost["time"] == 1
    assert all(row.cost["time"] > 0 for row in result.rows)


def test_times_of_different_machines_are_not_compared(result):
    base, own = result.baseline.results, result.row("sam").results
    moved = [replace(r, environment={**r.environment, "processor": "abacus"}) for r in own]
    assert costs([*own[:3], *moved[3:]], base) == costs(own[:3], base[:3])
    assert costs(moved, base) == {"flops": costs(own, base)["flops"]}
    newer = [replace(r, environment={**r.environment, "commit": "fff"}) for r in own]
    assert costs(newer, base) == costs(own, base)


def test_gap_and_other_metrics(result):
    row = result.row("sam")
    first = row.results[0].metrics
    assert row.gaps()[0] == pytest.approx(first["train"]["accuracy"] - first["test"]["accuracy"])
    assert {"nll", "ece", "accuracy", "loss"} == set(first["test"])


def test_every_form_of_the_table_says_the_same(result):
    text, markdown = result.table(), result.table("markdown")
    rows = list(csv.DictReader(io.StringIO(result.table("csv"))))
    for row, numbers in zip(result.rows, rows, strict=True):
        mean = sum(row.values("test", "accuracy")) / 5
        assert float(numbers["accuracy_mean"]) == pytest.approx(mean)
        assert f"{mean:.2f}" in text
        assert f"{mean:.2f}" in markdown
        assert row.label in result._repr_html_()
    assert "20% of the training labels replaced at random" in text
    for sentence in (comparison_sentence(result), survival_sentence(result)):
        assert sentence in text
        assert sentence in result.sentence()
    content = json.loads(json.dumps(result.to_dict()))
    assert content["rows"][1]["difference"]["n"] == 5
    assert content["rows"][1]["runs"][0]["config"]["method"] == "sam:rho=0.2"
    with pytest.raises(LabError, match="Did you mean markdown"):
        result.table("markdwn")


def test_an_extended_comparison_trains_only_what_is_new(result, store, monkeypatch):
    trained = []
    real = engines.run_config

    def spy(config, *rest):
        trained.append((config.method, config.seed))
        return real(config, *rest)

    monkeypatch.setattr(engines, "run_config", spy)
    more = compare(methods=[*METHODS, "rwp"], seeds=6, config=TINY, store=store, progress=False)
    new = {("rwp", seed) for seed in range(6)} | {
        (m, 5) for m in ("sgd", "sam:rho=0.2", "m-rwp:ratio=0.9")
    }
    assert set(trained) == new
    assert more.rows[1].results[0].metrics == result.rows[1].results[0].metrics


@pytest.mark.slow
def test_side_by_side_gives_the_same_bits(result, tmp_path):
    again = compare(methods=METHODS, seeds=2, config=TINY, store=tmp_path, jobs=2, progress=False)
    for row, twin in zip(result.rows, again.rows, strict=True):
        assert [r.metrics for r in row.results[:2]] == [r.metrics for r in twin.results]


def test_functions_that_cannot_travel_say_so():
    data = wrap((torch.randn(20, 2), torch.randn(20)), (torch.randn(9, 2), torch.randn(9)))
    with pytest.raises(LabError, match="can be pickled"):
        compare(lambda: nn.Linear(2, 1), data, ["sgd"], seeds=2, jobs=2, store=None, progress=False)


def regression(seed=0):
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(150, 5, generator=draws)
    y = x[:, 0] - 2 * x[:, 1] + 0.1 * torch.randn(150, generator=draws)
    return wrap((x[:50], y[:50]), (x[50:], y[50:]), name="planes")


def net():
    return nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))


def test_regression_with_objects_lower_is_better():
    config = Config(steps=60, batch=25, lr=0.05, eval_every=0)
    methods = ["sgd", "rwp", "sgd:lr=1e-6"]
    found = compare(net, regression(), methods, seeds=5, config=config, store=None, progress=False)
    stuck = found.row("sgd:lr=1e-06")
    assert stuck.difference.verdict == "worse"
    assert stuck.difference.mean > 0
    assert "SGD (lr 1e-06) (+" in found.sentence()
    assert "worse than SGD" in found.sentence()
    assert "RMSE" in found.table()
    assert found.table().startswith("planes, net, 60 steps of batch 25, 5 seeds")
    gap = stuck.results[0]
    assert stuck.gaps()[0] == pytest.approx(gap.score("test") - gap.score("train"))


def test_few_seeds_and_divergence_are_said():
    config = TINY.replace(steps=10)
    found = compare(
        methods=["sgd", "rwp", "sgd:lr=1e30"], seeds=3, config=config, store=None, progress=False
    )
    said = found.sentence()
    assert "3 seeds are too few for a verdict on RWP" in said
    assert "the minimum detectable difference" in said
    assert "Diverged: SGD (lr 1e+30) in 3 of 3 seeds." in said
    assert "diverged" in found.table()


def test_mistakes():
    with pytest.raises(LabError, match="at least one seed"):
        compare(methods=["sgd"], seeds=0, config=TINY, store=None)
    with pytest.raises(LabError, match="at least one method"):
        compare(methods=[], config=TINY, store=None)


def test_tuning_takes_the_best_of_validation_and_spares_the_seeds(store, monkeypatch):
    seen = []
    real = engines.run_config

    def spy(config, *rest):
        seen.append(config)
        return real(config, *rest)

    monkeypatch.setattr(engines, "run_config", spy)
    how = Tune(factors=(0.5, 1, 50), seeds=2, validation=0.25)
    config = TINY.replace(steps=40)
    found = compare(
        methods=["sgd", "rwp:ratio=.5"],
        seeds=1,
        config=config,
        tune=how,
        store=store,
        progress=False,
    )
    trials = [c for c in seen if c.validation == 0.25]
    reported = [c for c in seen if c.validation == 0]
    assert {c.seed for c in trials} == {10_000, 10_001}
    assert {c.seed for c in reported} == {0}
    assert {c.method for c in trials} >= {"rwp:ratio=0.25", "rwp:ratio=0.5", "rwp:ratio=25.0"}
    row = found.row("rwp")
    assert row.trials == len(trials)
    assert row.strength != "ratio 25"  # noise of fifty times the weights cannot be the best
    assert "of 5 (" in row.chosen or "of 3 (" in row.chosen
    assert "Strengths were chosen on a validation split" in found.table()
    assert found.baseline.trials == 0


def test_tuning_the_baseline_turns_weight_decay():
    how = Tune(factors=(1, 2), seeds=2, baseline=True, extend=False)
    config = TINY.replace(steps=3)
    found = compare(methods=["sgd"], seeds=1, config=config, tune=how, store=None, progress=False)
    assert found.baseline.trials == 4
    assert found.baseline.results[0].config.weight_decay in (5e-4, 1e-3)


def test_the_grid_grows_where_its_edge_is_best():
    assert _beyond({0.1: 1.0, 0.2: 2.0, 0.4: 3.0}) == (0.8, 1.6)
    assert _beyond({0.1: 3.0, 0.2: 2.0, 0.4: 3.0}) == (0.05, 0.025)  # the smaller in a tie
    assert _beyond({0.1: 1.0, 0.2: 2.0, 0.4: -math.inf}) == ()


def test_how_a_strength_was_chosen():
    assert Choice(parse("sgd")).how == ""
    assert Choice(parse("rwp")).how == "default"
    assert Choice(parse("rwp:sigma=.1")).how == "given"


class Trial:
    """What tuning asks of a result: `gain` points above 80, another luck for every seed."""

    higher_is_better = True

    def __init__(self, config, gain):
        self.status = "diverged" if gain is None else "finished"
        self._score = 80 + (gain or 0) + 3 * (config.seed % 2)

    def score(self, split):
        assert split == "validation"
        return self._score


def tuned(text, gain_of, **options):
    """The choice for a spec whose trial on a seed gains `gain_of(spec, seed)`."""
    asked = []

    def run(jobs, title):
        asked.extend(jobs)
        return [Trial(j.config, gain_of(parse(j.config.method), j.config.seed)) for j in jobs]

    (choice,) = tune_all([parse(text)], TINY, Tune(**options), run)
    return choice, [parse(job.config.method) for job in asked]


@pytest.mark.parametrize(
    "name", ["rwp", "arwp", "m-rwp", "m-arwp", "sam", "asam", "antithetic-rwp"]
)
def test_what_has_a_rise_is_tuned_over_the_same_five(name):
    choice, asked = tuned(name, lambda spec, seed: spec.options.get("rise", 0.0))
    rises = [spec.options["rise"] for spec in asked if "rise" in spec.options]
    assert tuple(dict.fromkeys(rises)) == RISES
    assert choice.spec.options == {"rise": 0.4}
    assert choice.how == f"best of 5 ({len(asked)} trials)"


def test_a_fixed_strength_is_tuned_over_its_multiples():
    for text, kind in (("rwp:ratio=.4", "ratio"), ("msam", "rho"), ("sam:rho=.1", "rho")):
        _, asked = tuned(text, lambda spec, seed: 0.0, extend=False)
        assert {tuple(spec.options) for spec in asked} == {(kind,)}
        values = sorted({spec.options[kind] for spec in asked})
        assert values[-1] == pytest.approx(16 * values[0], rel=0.01)


@pytest.mark.parametrize("text", ["rwp", "rwp:rise=.1", "rwp:rise=.07", "msam", "rwp:ratio=.4"])
def test_the_default_stays_unless_another_is_better_by_more_than_chance(text):
    """One lucky seed of three: the mean difference is 0.9, its standard error 1."""
    usual = parse(text).full_strength

    def own(spec):
        return spec.full_strength == usual

    luck = {10_000: -0.1, 10_001: 2.9, 10_002: -0.1}
    choice, _ = tuned(text, lambda spec, seed: 0 if own(spec) else luck[seed], extend=False)
    assert choice.kept
    assert own(choice.spec)
    assert choice.how.startswith("kept, none better of ")
    changed, _ = tuned(text, lambda spec, seed: 0 if own(spec) else 1.0 + 0.1 * (seed % 2))
    assert not changed.kept
    assert not own(changed.spec)


def test_a_value_that_diverged_is_not_taken_and_a_default_that_did_is_left():
    choice, _ = tuned("sam", lambda spec, seed: None if "rise" in spec.options else 0.0)
    assert choice.kept
    choice, _ = tuned("sam", lambda spec, seed: 0.0 if "rise" in spec.options else None)
    assert choice.spec.options == {"rise": 0.02}


def test_one_trial_says_nothing_about_chance():
    with pytest.raises(LabError, match="2 or more seeds per value, got 1"):
        Tune(seeds=1)
