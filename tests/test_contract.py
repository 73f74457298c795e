"""The contract of `steppe.testing`, on every method."""

import pytest

from steppe.testing import CHECKS
from tests.methods import METHODS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", METHODS)
def test_contract(name, check):
    check(METHODS[name])
