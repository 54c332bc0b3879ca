"""The exact audits of statistics: as tight as the claim, and never above it."""

import pytest

from dpoptim.audit.statistics import MU, differs, fits, largest_mu

FREE = {"public range"}
# no record reaches r^2 = 1 and the ends of the target and its square at once
SHARE = {"evaluation of a regression": 0.8}


@pytest.mark.parametrize("name", fits())
def test_the_worst_record_shows_what_is_claimed(name: str) -> None:
    found = largest_mu(name)
    assert found <= MU
    assert found == 0.0 if name in FREE else found >= SHARE.get(name, 0.98) * MU
    assert not differs(name)
