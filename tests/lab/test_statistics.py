import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steppe.lab.statistics import (
    compare_all,
    equivalent,
    half_width,
    holm,
    mean_std,
    paired_p,
)


def test_p_values_and_intervals_are_scipys():
    draws = np.random.default_rng(0)
    a, b = draws.normal(1, 1, 12), draws.normal(0.2, 1, 12)
    expected = stats.ttest_rel(a, b)
    interval = expected.confidence_interval(0.95)
    (found,) = compare_all([list(a - b)])
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.low95, found.high95) == pytest.approx((interval.low, interval.high))
    assert (found.low, found.high) == (found.low95, found.high95)  # one row: nothing to correct
    assert found.p_holm == found.p


def test_holm_by_hand():
    # 3 x .01, then 2 x .02 = .04, then .04: kept in step
    assert holm([0.02, 0.04, 0.01]) == pytest.approx([0.04, 0.04, 0.03])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


rows = st.lists(
    st.lists(st.floats(-3, 3, allow_nan=False), min_size=5, max_size=9), min_size=1, max_size=6
)


@given(rows, st.booleans())
def test_an_interval_excludes_zero_exactly_where_the_verdict_says_so(differences, up):
    for found in compare_all(differences, higher_is_better=up):
        if math.isclose(found.p_holm, 0.05, rel_tol=1e-6) or found.std < 1e-9:
            continue
        excludes = found.low > 0 or found.high < 0
        assert excludes == (found.verdict in ("better", "worse"))
        if excludes:
            assert (found.verdict == "better") == ((found.mean > 0) == up)


def test_too_few_seeds_give_no_verdict_but_the_smallest_visible_difference():
    found, other = compare_all([[1.0, 1.1, 0.9], [0.0, 0.5, -0.5]])
    assert found.verdict == other.verdict == "too few seeds"
    assert found.smallest == pytest.approx(half_width(0.1, 3, 0.025))
    (one,) = compare_all([[3.0]])
    assert one.verdict == "too few seeds"
    assert one.smallest == math.inf


def test_false_alarms_stay_below_five_per_cent():
    """Five rows of pure chance, many times over: a verdict in at most 5 % of the comparisons."""
    draws = np.random.default_rng(1)
    trials = 300
    alarms = 0
    for _ in range(trials):
        base = draws.normal(size=10)
        found = compare_all([list(draws.normal(size=10) - base) for _ in range(5)])
        alarms += any(row.verdict != "no difference seen" for row in found)
    # 5 % with three standard errors of a proportion
    assert alarms / trials < 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)
    assert alarms > 0


def test_equivalence_needs_evidence():
    tight = [0.1, -0.1, 0.05, 0.0, -0.05]
    assert equivalent(tight, margin=0.5)
    assert not equivalent([10 * d for d in tight], margin=0.5)  # no difference, but not equal
    assert not equivalent([d + 0.6 for d in tight], margin=0.5)
    assert not equivalent(tight[:4], margin=0.5)


def test_edges():
    assert paired_p([0.0, 0.0, 0.0]) == 1.0
    assert paired_p([1.0, 1.0]) == 0.0
    assert mean_std([2.0]) == (2.0, 0.0)
    assert all(math.isnan(value) for value in (*mean_std([]), *mean_std([1.0, math.nan])))
    assert mean_std([1.0, math.inf])[0] == math.inf
    assert compare_all([]) == []
