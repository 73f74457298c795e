"""The script that chooses the default rise, on made-up lines."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
rise = pytest.importorskip("rise", reason="needs scikit-learn")
rise_runs = pytest.importorskip("rise_runs")


def made_up(runs, gain, highest=0.1):
    """Lines of the runs and their baselines; `gain(run)` in points."""
    lines = {}
    for run in runs:
        unit = rise.SETTINGS[run.setting].points
        base = 90.0 + run.seed % 3
        for each, points in ((run.baseline, 0.0), (run, gain(run))):
            found = {"score": (base + points) / unit, "two_bits": 50.0 + 3 * points, "pruned": 50.0}
            lines[each] = found | {"measured": 0.6 * each.strength, "highest": highest}
    return lines


RUNS = [
    rise.Run(setting, method, strength, 4, 0.5, seed)
    for setting in rise.SETTINGS
    for method in ("rwp", "m_rwp")
    for strength in rise.RISES
    for seed in rise.seeds(setting)
]


def test_the_largest_rise_that_loses_nowhere_is_chosen():
    lines = made_up(RUNS, lambda r: -2.0 if r.strength == 0.2 and r.setting == "fashion" else 0.1)
    assert rise.largest(lines, RUNS) == {"rwp": 0.1, "m_rwp": 0.1}


@pytest.mark.parametrize(("points", "passes"), [(-0.05, True), (-0.15, False), (-0.4, False)])
def test_the_mean_over_settings_is_limited(points, passes):
    lines = made_up(RUNS, lambda r: points)
    assert bool(rise.largest(lines, RUNS)) is passes


def test_one_large_gain_does_not_pay_for_losses_elsewhere():
    lines = made_up(RUNS, lambda r: 30.0 if r.setting == "lm-little" else -0.25)
    assert not rise.largest(lines, RUNS)


def test_a_loss_within_two_standard_errors_counts_only_below_a_point():
    def noisy(mean):
        return lambda r: (mean + (3 if r.seed % 2 else -3)) if r.setting == "cifar10" else 0.1

    assert rise.largest(made_up(RUNS, noisy(0.0)), RUNS)
    verdict = rise.judge(made_up(RUNS, noisy(-0.9)), [r for r in RUNS if r.strength == 0.1])
    assert verdict.gains["cifar10"].loses == (verdict.gains["cifar10"].mean < -1)


def test_a_diverged_run_fails():
    lines = made_up(RUNS, lambda r: float("nan") if r.seed == rise.FIRST_SEED else 0.5)
    assert not rise.largest(lines, RUNS)


def test_the_combination_that_gives_most_while_it_passes_is_taken():
    runs = list(rise.stage_1())
    lines = made_up(runs, lambda r: 0.2 if r.power == 4 or r.strength < 0.1 else -1.5)
    for run in runs:
        lines[run]["measured"] = run.strength * (0.8 if run.bound == 0.3 else 0.5)
    assert rise.combination(lines) == (4, 0.3)
    for run in runs:  # what hardly arrives is not taken, however much passes
        lines[run]["measured"] = run.strength * (0.4 if run.power == 4 else 0.6)
    assert rise.combination(lines) == (2, 0.5)


def cells(lines):
    return {(r.method, r.strength) for r in rise.missing(lines, rise.stage_2(lines, 4, 0.5))}


def test_the_largest_rise_is_trained_first_and_given_up_where_it_loses():
    assert {("rwp", 0.2), ("m_rwp", 0.2)} < cells({})
    lost = [r for r in RUNS if (r.setting, r.method, r.strength) == ("mlp-clean", "rwp", 0.2)]
    assert ("rwp", 0.2) in cells(made_up(lost[:-1], lambda r: -1.5))
    assert {("rwp", 0.1), ("m_rwp", 0.2)} < cells(made_up(lost, lambda r: -1.5))


def test_smaller_rises_are_not_trained_where_a_larger_one_passes():
    whole = [r for r in RUNS if r.strength == 0.1]
    lines = made_up([r for r in RUNS if r.strength == 0.2], lambda r: -0.2)  # its mean fails
    assert cells(lines) == {("rwp", 0.1), ("m_rwp", 0.1)}
    assert not cells(lines | made_up(whole, lambda r: 0.2))


def test_a_run_that_never_reached_the_bound_stands_for_both():
    runs = [r for r in rise.stage_1() if r.bound == 0.5]
    below, above = made_up(runs, lambda r: 0.0), made_up(runs, lambda r: 0.0, highest=0.5)
    assert not rise.missing(below, rise.stage_1())
    assert {r.bound for r in rise.missing(above, rise.stage_1())} == {0.3}


def test_stages_follow_each_other_and_nothing_is_repeated():
    first = rise.to_do({})
    assert {r.method for r in first} == {"baseline", "rwp"}
    lines = made_up(rise.stage_1(), lambda r: 0.0)
    second = rise.to_do(lines)
    assert not set(second) & set(lines)
    assert {r.method for r in second} == {"baseline", "baseline, two", "rwp", "m_rwp"}
    lines |= made_up([r for r in RUNS if r.strength == 0.2], lambda r: 0.0)
    assert {r.method for r in rise.to_do(lines)} <= {"msam"}


def test_probes_are_compared_with_the_meter():
    run = rise.Run("regression", "rwp", 0.05, 4, 0.5, rise.FIRST_SEED)
    lines = {
        run: {"probes": [[9.0, 0.1, 1.0], [0.04, 0.01, 0.05]]},
        replace(run, strength=0.1): {"probes": [[9.0, 0.1, 1.0], [0.03, 0.01, 0.1]]},
        run.baseline: {},
    }
    median, within, n = rise.agreement(lines)["regression"]
    assert (median, within, n) == (pytest.approx(0.55), 0.5, 2)


def test_the_spread_of_arwps_factor_is_listed_where_it_was_recorded():
    run = rise.Run("regression", "arwp", 0.02, 2, 0.5, rise.FIRST_SEED)
    lines = {run: {"spread": 1.5}, replace(run, seed=run.seed + 1): {}}
    assert rise.spreads(lines) == {"regression, 0.02": (1.5, 1)}


def test_a_run_writes_its_line(tmp_path):
    for method in ("baseline", "rwp", "arwp", "m_rwp", "msam", "equal shares"):
        run = rise.Run("regression", method, 0.05, 4, 0.5, rise.FIRST_SEED)
        line = rise.train(run, steps=40)
        assert line["score"] <= 100
        assert ("measured" in line) == (method.endswith("rwp") or method == "equal shares")
        assert method[-3:] != "rwp" or line["ratio"] <= line["highest"] <= 0.5
        assert line.get("spread", 0) > 1 if method == "arwp" else "spread" not in line


def test_the_highest_ratio_is_that_before_the_ramp():
    """It says whether a lower bound would have made a difference."""
    line = rise.train(rise.Run("regression", "rwp", 5.0, 4, 0.5, rise.FIRST_SEED), steps=60)
    assert line["highest"] > 0.1
    assert line["highest"] >= line["ratio"]


def test_equal_shares_scale_the_noise_by_each_parameters_curvature():
    """Curvatures 1 and 100 on noise of one size: the first gets ten times the second's scale."""
    params = [torch.nn.Parameter(torch.ones(50)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.0)
    shares = rise_runs.EqualShares(optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        eps = [0.1 * g["strength"] if "strength" in g else 0.1 for g in shares.groups]
        for p, size in zip(params, eps, strict=True):
            p.data += size * torch.randn(50, generator=generator)
        loss = sum(c / 2 * (p - 1).square().sum() for c, p in zip((1, 100), params, strict=True))
        loss.backward()
        for p in params:
            p.data.fill_(1.0)
        optimizer.zero_grad()
        shares.after(0.1)
    first, second = (group["strength"] for group in optimizer.param_groups)
    assert first / second == pytest.approx(10, rel=0.15)
    assert first * second == pytest.approx(1, rel=1e-4)
