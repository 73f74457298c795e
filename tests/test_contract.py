"""The contract of `steppe.testing`, on every method; and that it can fail."""

from dataclasses import dataclass

import pytest

import steppe
from steppe.testing import (
    CHECKS,
    check_contract,
    equal_seeds_give_equal_runs,
    true_weights_after_a_step,
    zero_strength_is_plain_training,
)
from tests.methods import METHODS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", METHODS)
def test_contract(name, check):
    check(METHODS[name])


@dataclass(frozen=True)
class Leaky(steppe.Gaussian):
    """Makes the weights forget that they were moved."""

    def move(self, weights, state, draw, gradient):
        super().move(weights, state, draw, gradient)
        weights.moved = []


@dataclass(frozen=True)
class Forgetful(steppe.Gaussian):
    """Draws other noise every time."""

    def move(self, weights, state, draw, gradient):
        for slot in weights.moved:
            slot.param.detach().add_(0.1 * slot.param.detach().clone().normal_())


@dataclass(frozen=True)
class Meddling(steppe.Gaussian):
    """Changes a weight behind everybody's back."""

    def strength(self, step):
        return 0.1 if step < 2 else 0.0

    def init(self, weights):
        weights.params[0].param.detach().add_(1.0)
        return {}


@pytest.mark.parametrize(
    ("noise", "check"),
    [
        (Leaky(0.1), true_weights_after_a_step),
        (Forgetful(0.1), equal_seeds_give_equal_runs),
        (Meddling(0.1), zero_strength_is_plain_training),
    ],
)
def test_the_contract_can_fail(noise, check):
    method = steppe.Method("broken", (steppe.Pass(noise),))
    with pytest.raises(AssertionError, match="not bit for bit the same"):
        check(method)
    with pytest.raises(AssertionError):
        check_contract(method)
