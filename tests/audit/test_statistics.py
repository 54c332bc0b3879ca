"""The exact audits of statistics: as tight as the claim, and never above it."""

import pytest

from dpoptim.audit.statistics import MU, differs, fits, largest_mu, sharpest_choice

FREE = {"public range"}
# no record reaches r^2 = 1 and the ends of the target and its square at once
SHARE = {"evaluation of a regression": 0.8}


@pytest.mark.parametrize("name", fits())
def test_the_worst_record_shows_what_is_claimed(name: str) -> None:
    found = largest_mu(name)
    assert found <= MU
    assert found == 0.0 if name in FREE else found >= SHARE.get(name, 0.98) * MU
    assert not differs(name)


def test_one_record_changes_the_odds_of_a_range_as_much_as_claimed() -> None:
    found, claimed = sharpest_choice()
    assert 0.98 * claimed <= found <= claimed * (1 + 1e-9)
