import math

import pytest

import steppe
from steppe.schedules import needs_steps, strength_at, with_steps


def test_cosine_increase_is_half_a_cosine_and_then_stays():
    schedule = steppe.cosine_increase(0.001, 0.011, steps=10)
    for t in range(11):
        assert schedule(t) == pytest.approx(0.001 + 0.01 * (1 - math.cos(math.pi * t / 10)) / 2)
    assert schedule(1000) == pytest.approx(0.011)


def test_an_open_length_is_filled_in_once_and_asked_for_otherwise():
    schedule = steppe.cosine_increase(0, 0.01)
    assert needs_steps(schedule)
    with pytest.raises(ValueError, match="does not know how long training is"):
        schedule(0)
    filled = with_steps(schedule, 100)
    assert not needs_steps(filled)
    assert with_steps(filled, 7) == filled
    assert with_steps(0.5, 7) == 0.5
    assert filled(100) == pytest.approx(0.01)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_schedule_that_returns_nonsense_is_named_with_its_step(bad):
    with pytest.raises(ValueError, match="sigma: the schedule's value at step 12 must be finite"):
        strength_at(lambda step: bad, 12, name="sigma")


@pytest.mark.parametrize("make", [steppe.linear, steppe.cosine_increase])
def test_bad_ends_and_lengths_raise(make):
    with pytest.raises(ValueError, match="end must be finite and at least 0, got -1"):
        make(0, -1, 10)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        make(0, 1, 0)
    with pytest.raises(TypeError, match="start must be a number or a schedule, got '0'"):
        make("0", 1, 10)
