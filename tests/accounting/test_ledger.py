"""The ledger: what it keeps, what it refuses and in which words, and what no failure can make it
forget.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import astuple
from pathlib import Path

import dp_accounting as dp
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpoptim.accounting import ledger_store
from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.budget import Budget, epsilon_from_renyi, filter_order, renyi_budget
from dpoptim.accounting.budget_words import WholeBudgetWarning
from dpoptim.accounting.guarantee import rounded_up
from dpoptim.accounting.ledger import BudgetExceeded, Ledger, Reservation
from dpoptim.accounting.ledger_schema import Entry
from dpoptim.errors import LedgerError
from forked import needs_fork

AR, R1, ZERO = "add-or-remove-one", "replace-one", "zero-out"


def gaussian(noise: float) -> dp.DpEvent:
    return dp.GaussianDpEvent(noise)


def dp_sgd(rate: float, noise: float, steps: int) -> dp.DpEvent:
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), steps)


def reserve_often(
    ledger: Ledger, event: dp.DpEvent, times: int, granted: list[Reservation] | None = None
) -> None:
    for _ in range(times):
        made = ledger.reserve(event, neighboring=ledger.neighboring, label="a long label " * 15)
        if granted is not None:
            granted.append(made)


EVENTS = [
    gaussian(20.0),
    dp_sgd(0.001, 4.0, 10),
    dp.LaplaceDpEvent(30.0),
    dp.ComposedDpEvent([gaussian(30.0), dp.SelfComposedDpEvent(dp.LaplaceDpEvent(90.0), 3)]),
    dp.NoOpDpEvent(),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data set.ledger"  # a space: the path travels through a URI


class TestKeeping:
    def test_a_large_budget_holds_several_runs_of_large_batches(self) -> None:
        """It is kept at a Renyi order below 2, where their series do not converge."""
        with Ledger(epsilon=20, delta=1e-3, neighboring=AR) as ledger:
            reserve_often(ledger, dp_sgd(0.5, 1.0, 4), 3)
            assert ledger.spent().epsilon <= 20

    @pytest.mark.parametrize("in_memory", [True, False])
    def test_reserve_commit_entries(self, path: Path, in_memory: bool) -> None:
        with Ledger(None if in_memory else path, epsilon=3, delta=1e-6) as ledger:
            made = [
                ledger.reserve(e, neighboring=AR, label=f"run {i}") for i, e in enumerate(EVENTS)
            ]
            assert ledger.entries() == made
            assert [entry.event for entry in ledger.entries()] == EVENTS
            before = ledger.remaining()
            ledger.commit(made[1])
            ledger.commit(made[1])
            assert [entry.state for entry in ledger.entries()] == [
                "open",
                "committed",
                "open",
                "open",
                "open",
            ]
            assert ledger.remaining() == before
            with pytest.raises(LedgerError, match="no reservation"):
                ledger.commit(Reservation("unknown", "", "", EVENTS[0], AR))

    def test_survives_closing_and_opening(self, path: Path) -> None:
        made = Ledger(path, dataset="cells", epsilon=2, delta=1e-5, neighboring=ZERO).reserve(
            gaussian(5.0), neighboring=dp.NeighboringRelation.REPLACE_SPECIAL, label="first"
        )
        again = Ledger(path)
        assert again.entries() == [made]
        assert (again.dataset, again.neighboring) == ("cells", ZERO)
        assert again.budget == Budget(2.0, 1e-5, ZERO)
        Ledger(path, dataset="cells", epsilon=2.0, delta=1e-5, neighboring=ZERO, filter="renyi")

    def test_one_complete_file_with_a_rollback_journal(self, path: Path) -> None:
        ledger = Ledger(path)
        ledger.reserve(gaussian(5.0), neighboring=AR, label="first")
        # nothing that could be left behind when it is copied
        assert os.listdir(path.parent) == [path.name]
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        with ledger._store._connection() as connection:
            assert connection.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
            assert connection.execute("PRAGMA busy_timeout").fetchone()[0] >= 5000

    def test_nothing_lowers_what_is_reserved(self, path: Path) -> None:
        ledger = Ledger(path, epsilon=2, delta=1e-5)
        kept = ledger.reserve(gaussian(5.0), neighboring=AR, label="first")
        ledger.commit(kept)
        with closing(sqlite3.connect(path)) as connection:
            for statement in [
                "DELETE FROM entry",
                'UPDATE entry SET body = \'{"type": "NoOp"}\'',
                "UPDATE entry SET kind = 'begun'",
                "INSERT OR REPLACE INTO entry SELECT 1, kind, run, time, label, '{}', digest "
                "FROM entry",
                "REPLACE INTO entry (number, kind, run, time, label, body, digest) VALUES (1, "
                "'', '', '', '', '', '')",
                "UPDATE OR REPLACE entry SET number = 1",
                "UPDATE settings SET epsilon = 100",
                "DELETE FROM settings",
                "INSERT OR REPLACE INTO settings SELECT 1, ledger, created, dataset, "
                "neighboring, 9, delta, filter, 9 "
                "FROM settings",
                "UPDATE head SET count = 0",
                "INSERT OR REPLACE INTO head VALUES (1, 0, '')",
                "DELETE FROM head",
            ]:
                with pytest.raises(sqlite3.IntegrityError):
                    connection.execute(statement)
        assert [entry.id for entry in ledger.entries()] == [kept.id]

    def test_resume(self, path: Path) -> None:
        ledger = Ledger(path, epsilon=2, delta=1e-5)
        first = ledger.reserve(dp_sgd(0.01, 2.0, 100), neighboring=AR, label="first")
        before = ledger.remaining()
        resumed = Ledger(path).resume(first.id, dp_sgd(0.01, 2.0, 100))
        assert (resumed.id, resumed.event, resumed.resumed) == (first.id, first.event, 1)
        assert ledger.remaining() == before
        assert "resumed 1 times" in ledger.describe()
        with pytest.raises(LedgerError, match=r"made for .*count=100.* not for .*count=101"):
            ledger.resume(first.id, dp_sgd(0.01, 2.0, 101))
        with pytest.raises(LedgerError, match="no reservation 'x'"):
            ledger.resume("x", dp_sgd(0.01, 2.0, 100))
        ledger.commit(resumed)
        with pytest.raises(LedgerError, match="was completed"):
            ledger.resume(first.id, dp_sgd(0.01, 2.0, 100))

    def test_works_after_chdir(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(path.parent)
        ledger = Ledger(path.name)
        monkeypatch.chdir("/")
        ledger.reserve(gaussian(5.0), neighboring=AR, label="first")
        assert len(Ledger(path).entries()) == 1


class TestBudget:
    @pytest.mark.parametrize(
        ("epsilon", "delta"), [(0.1, 1e-7), (1.0, 1e-5), (2.0, 1e-5), (8.0, 1e-6), (50, 0.01)]
    )
    def test_order_and_bound(self, epsilon: float, delta: float) -> None:
        order = filter_order(epsilon, delta)
        bound = renyi_budget(epsilon, delta, order)
        reference, _ = dp.rdp.compute_epsilon([order], [bound], delta)
        assert reference == pytest.approx(epsilon, rel=1e-12)
        assert epsilon_from_renyi(bound, delta, order) == pytest.approx(epsilon, rel=1e-9)
        # A Gaussian that fills the bound has hardly more noise than the best order would allow it.
        best = max(
            renyi_budget(epsilon, delta, alpha) / alpha
            for alpha in [1 + 0.01 * k for k in range(1, 30000)]
        )
        assert 0.89 * best <= bound / order <= best * (1 + 1e-4)

    def test_first_run_may_use_exactly_the_budget(self) -> None:
        event = dp_sgd(0.01, 1.0, 1000)
        epsilon = compute_epsilon(event, 1e-5, AR).epsilon
        ledger = Ledger(epsilon=epsilon, delta=1e-5)
        ledger.reserve(event, neighboring=AR, label="first")
        assert ledger.spent().epsilon == epsilon
        with pytest.raises(BudgetExceeded, match="must stay the only one"):
            ledger.reserve(gaussian(1e6), neighboring=AR, label="second")
        with pytest.raises(BudgetExceeded):
            Ledger(epsilon=epsilon * (1 - 1e-9), delta=1e-5).reserve(
                event, neighboring=AR, label="first"
            )

    def test_refusal_of_a_first_run_has_the_numbers(self) -> None:
        ledger = Ledger(epsilon=2, delta=1e-5, dataset="cells")
        with pytest.raises(BudgetExceeded) as refused:
            ledger.reserve(gaussian(1.0), neighboring=AR, label="first")
        text = str(refused.value)
        needed = compute_epsilon(gaussian(1.0), 1e-5, AR).epsilon
        for part in [
            "'cells'",
            "epsilon=2 at delta=1e-05",
            AR,
            "nothing is reserved",
            f"{needed:.6g}",
            "fewer steps",
        ]:
            assert part in text
        assert ledger.entries() == []

    def test_refusal_of_a_later_run_has_the_numbers(self) -> None:
        ledger = Ledger(epsilon=2, delta=1e-5)
        for _ in range(2):
            ledger.reserve(gaussian(4.0), neighboring=AR, label="x")
        order, unit = ledger.budget.order, ledger.budget.order / 32  # one Gaussian of noise 4
        limit = renyi_budget(2, 1e-5, order)
        with pytest.raises(BudgetExceeded, match="2 runs reserved") as refused:
            ledger.check(gaussian(2.0), AR)
        text = str(refused.value)
        for number in [2 * unit, limit, 4 * unit, limit - 2 * unit]:
            assert any(
                float(found) == pytest.approx(number, rel=1e-5)
                for found in re.findall(r"\d+(?:\.\d+)?", text)
            ), (
                number,
                text,
            )
        # What the message proposes does fit.
        factor = float(re.search(r"about (\S+) times its noise", text)[1])
        ledger.check(gaussian(2.0 * factor * 1.01), AR)
        with pytest.raises(BudgetExceeded):
            ledger.check(gaussian(2.0 * factor * 0.98), AR)
        assert refused.value.shortfall.left == pytest.approx(limit - 2 * unit, rel=1e-5)
        assert len(ledger.entries()) == 2

    def test_check_and_reserve_agree_and_check_writes_nothing(self) -> None:
        ledger = Ledger(epsilon=2, delta=1e-5)
        for noise in [3.0, 4.0, 5.0, 6.0, 7.0]:
            before = ledger.entries()
            try:
                ledger.check(gaussian(noise), AR)
            except BudgetExceeded as refused:
                assert ledger.entries() == before
                with pytest.raises(BudgetExceeded, match=re.escape(str(refused))):
                    ledger.reserve(gaussian(noise), neighboring=AR, label="x")
            else:
                assert ledger.entries() == before
                ledger.reserve(gaussian(noise), neighboring=AR, label="x")
        assert 2 <= len(ledger.entries()) < 5

    def test_other_relation_is_refused(self) -> None:
        with pytest.raises(
            LedgerError,
            match="counts under add-or-remove-one, the run under replace-one.*neighboring='",
        ):
            Ledger(epsilon=2, delta=1e-5).reserve(gaussian(5.0), neighboring=R1, label="x")

    @pytest.mark.parametrize(("first", "second"), [("person", "record"), ("record", "person")])
    def test_runs_for_records_and_for_persons_do_not_add_up(
        self, first: str, second: str, path: Path
    ) -> None:
        """Who has several records would have spent more than the sum says."""
        ledger = Ledger(path, epsilon=3, delta=1e-5).of_units(first)
        made = ledger.reserve(gaussian(10.0), neighboring=AR, label="x")
        again = Ledger(path).of_units(second)
        for refused in (
            lambda: again.check(gaussian(10.0), AR),
            lambda: again.reserve(gaussian(10.0), neighboring=AR, label="y"),
        ):
            with pytest.raises(LedgerError, match=f"protect each {first}, this one each {second}"):
                refused()
        again.of_units(first).reserve(gaussian(10.0), neighboring=AR, label="y")
        assert [run.unit for run in Ledger(path).entries()] == [first, first]
        assert Ledger(path).spent().unit == made.unit == first
        assert ("per person" in Ledger(path).describe()) == (first == "person")
        assert Ledger(path).verify() == (4 if first == "person" else 2)

    def test_what_persons_have_spent_is_known_by_the_command_lines_name(self, path: Path) -> None:
        """Which it wrote before runs said whom they protect."""
        with Ledger(path, dataset="patients, per person") as ledger:
            with pytest.raises(LedgerError, match="protect each person, this one each record"):
                ledger.reserve(gaussian(10.0), neighboring=AR, label="x")
            ledger.of_units("person").reserve(gaussian(10.0), neighboring=AR, label="x")
            assert ledger.entries()[0].unit == ledger.spent(1e-5).unit == "person"

    def test_replace_one_is_charged_for_twice_the_norm(self) -> None:
        ledger = Ledger(epsilon=2, delta=1e-5, neighboring=R1)
        ledger.reserve(gaussian(8.0), neighboring=R1, label="x")
        assert ledger.remaining().reserved == pytest.approx(
            ledger.budget.order * (2 / 8) ** 2 / 2, rel=1e-9
        )

    def test_poisson_under_replace_one_has_no_renyi_filter(self) -> None:
        event = dp_sgd(0.01, 4.0, 20)
        ledger = Ledger(epsilon=2, delta=1e-5, neighboring=R1)
        ledger.reserve(gaussian(10.0), neighboring=R1, label="x")
        with pytest.raises(BudgetExceeded, match=r'no bound for this run .*filter="basic"'):
            ledger.reserve(event, neighboring=R1, label="y")
        alone = Ledger(epsilon=2, delta=1e-5, neighboring=R1)
        with pytest.warns(WholeBudgetWarning, match='has no bound for it.*filter="basic"'):
            alone.reserve(event, neighboring=R1, label="y")
        with pytest.raises(BudgetExceeded, match="no bound under this filter"):
            alone.reserve(gaussian(10.0), neighboring=R1, label="x")

    def test_basic_filter(self, path: Path) -> None:
        event = dp_sgd(0.01, 4.0, 20)
        ledger = Ledger(path, epsilon=0.4, delta=1e-5, neighboring=R1, filter="basic")
        with pytest.raises(BudgetExceeded):
            reserve_often(ledger, event, 20)
        admitted = len(ledger.entries())
        shares = [compute_epsilon(event, 1e-5 * 0.5**i, R1).epsilon for i in range(1, admitted + 2)]
        assert sum(shares[:-1]) <= 0.4 < sum(shares)
        assert admitted >= 2
        assert Ledger(path).budget.filter == "basic"
        assert ledger.spent().epsilon == 0.4
        assert "basic" in str(ledger.spent())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"epsilon": 1.0}, "both or neither"),
            ({"delta": 1e-5}, "both or neither"),
            ({"epsilon": 0.0, "delta": 1e-5}, "epsilon: .*> 0"),
            ({"epsilon": float("inf"), "delta": 1e-5}, "epsilon: .*> 0"),
            ({"epsilon": 1.0, "delta": 1e-20}, "delta: "),
            ({"epsilon": 1.0, "delta": 1.0}, "delta: "),
            ({"epsilon": 1e-9, "delta": 1e-12}, "too small"),
            ({"neighboring": "adjacent"}, "neighboring"),
            ({"filter": "pld"}, "filter: "),
        ],
    )
    def test_arguments_out_of_range(
        self, path: Path, arguments: dict[str, object], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            Ledger(path, **arguments)
        assert not path.exists()

    @pytest.mark.parametrize(
        "event", [dp.NonPrivateDpEvent(), gaussian(-1.0), gaussian(float("nan")), "x"]
    )
    def test_an_event_without_a_price_is_refused_even_without_a_budget(self, event: object) -> None:
        ledger = Ledger()
        with pytest.raises((TypeError, ValueError)):
            ledger.reserve(event, neighboring=AR, label="x")
        with pytest.raises((TypeError, ValueError)):
            ledger.check(event, AR)
        assert ledger.entries() == []

    @pytest.mark.parametrize("label", ["", "x" * 201, 3])
    def test_labels(self, label: object) -> None:
        with pytest.raises(ValueError, match="label"):
            Ledger().reserve(gaussian(5.0), neighboring=AR, label=label)


class TestWords:
    def test_spent(self) -> None:
        ledger = Ledger(epsilon=2, delta=1e-5)
        assert ledger.spent().epsilon == 0
        ledger.reserve(gaussian(5.0), neighboring=AR, label="x")
        assert ledger.spent() == compute_epsilon(gaussian(5.0), 1e-5, AR)
        ledger.reserve(gaussian(9.0), neighboring=AR, label="x")
        several = ledger.spent()
        assert (several.epsilon, several.status, several.accountant) == (
            2.0,
            "proven",
            "RDP filter",
        )
        assert "2 runs" in str(several)
        assert ledger.spent(1e-7).epsilon > 2 > ledger.spent(1e-3).epsilon

    def test_spent_without_a_budget_says_its_condition(self) -> None:
        ledger = Ledger()
        with pytest.raises(ValueError, match="delta"):
            ledger.spent()
        for noise in (3.0, 4.0):
            ledger.reserve(gaussian(noise), neighboring=AR, label="x")
        claim = ledger.spent(1e-5)
        assert claim.epsilon == pytest.approx(compute_epsilon(gaussian(2.4), 1e-5, AR).epsilon)
        assert claim.status != "proven"
        assert "depended on earlier outputs" in str(claim)

    def test_a_run_that_takes_all_says_so_before_it_is_charged(self, path: Path) -> None:
        """Of a budget of 1.2 a run of epsilon 1 took 216047.8 %, and nothing was said."""
        small = dp_sgd(0.002, 0.4, 500)
        own = compute_epsilon(small, 1e-5, AR).epsilon
        ledger = Ledger(path, epsilon=1.2 * own, delta=1e-5)
        with pytest.raises(WholeBudgetWarning, match=rf"own epsilon is {rounded_up(own)}.*Fix:"):
            ledger.reserve(small, neighboring=AR, label="small batches")  # warnings are errors here
        assert not ledger.entries()
        with pytest.warns(WholeBudgetWarning):
            ledger.reserve(small, neighboring=AR, label="small batches")
        assert max(ledger.shares()) > 1
        assert ", all of the filter's bound" in ledger.describe()
        meant = Ledger(epsilon=own, delta=1e-5)  # for the whole budget, and that is no surprise
        meant.reserve(small, neighboring=AR, label="x")
        roomy = Ledger(epsilon=1.2 * own, delta=1e-5)
        roomy.reserve(gaussian(5.0), neighboring=AR, label="x")
        roomy.reserve(gaussian(50.0), neighboring=AR, label="x")  # no later one takes all

    def test_remaining_and_describe(self, path: Path) -> None:
        ledger = Ledger(path, epsilon=2, delta=1e-5)
        assert "may use all of it" in str(ledger.remaining())
        ledger.reserve(gaussian(5.0), neighboring=AR, label="smoke run")
        left = ledger.remaining()
        assert left.left == pytest.approx(left.limit - left.reserved)
        assert f"{left.next_epsilon:.3g}" in str(left)
        text = ledger.describe()
        for part in [
            str(path),
            "smoke run",
            "epsilon=",
            "open",
            "epsilon=2 at delta=1e-05",
            "1 run ",
        ]:
            assert part in text
        (share,) = ledger.shares()
        assert f"at delta=1e-05, {share:.1%} of the filter's bound" in text
        assert "runs of one epsilon take different ones" in text
        assert "Event" not in text
        assert "noise_multiplier=5.0" in ledger.describe(events=True)
        ledger.reserve(gaussian(9.0), neighboring=AR, label="again")
        assert "if they did, at most epsilon=2 at delta=1e-05, the budget" in ledger.describe()
        mixed = Ledger(neighboring=R1, epsilon=50, delta=1e-5, filter="basic")
        for event in (dp_sgd(0.01, 1.0, 100), RepeatAndSelectDpEvent(gaussian(5.0), 3.0, 1.0)):
            mixed.reserve(event, neighboring=R1, label="x")
        assert "together  at most epsilon=50 at delta=1e-05, the budget" in mixed.describe()
        unlimited = Ledger()
        unlimited.reserve(gaussian(5.0), neighboring=AR, label="smoke run")
        assert "no budget" in unlimited.describe()
        alone = unlimited.spent(1e-6).epsilon
        assert (
            f"smoke run: epsilon={rounded_up(alone)} at delta=1e-06 [open]" in unlimited.describe()
        )
        unlimited.reserve(gaussian(5.0), neighboring=AR, label="again")
        both = unlimited.spent(1e-6).epsilon
        assert alone < both < 2 * alone
        assert f"together  epsilon={rounded_up(both)} at delta=1e-06, if no" in unlimited.describe()


class TestBadFiles:
    @pytest.mark.parametrize(
        ("named", "message"),
        [
            ({"epsilon": 3.0, "delta": 1e-5}, "epsilon=2.0, not 3"),
            ({"epsilon": 2.0, "delta": 1e-6}, "delta=1e-05, not 1e-06"),
            ({"neighboring": R1}, "not 'replace-one'"),
            ({"dataset": "other"}, "dataset='cells', not 'other'"),
            ({"filter": "basic"}, "not 'basic'"),
        ],
    )
    def test_disagreement_with_what_is_stored(
        self, path: Path, named: dict[str, object], message: str
    ) -> None:
        Ledger(path, dataset="cells", epsilon=2, delta=1e-5)
        with pytest.raises(LedgerError, match=message) as refused:
            Ledger(path, **named)
        assert str(path) in str(refused.value)

    @pytest.mark.parametrize(
        "content", [b"", b"epsilon: 2\n" * 900, b"SQLite format 3\0" + bytes(5000)]
    )
    def test_other_content_is_refused_and_kept(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises(LedgerError, match=re.escape(str(path))):
            Ledger(path, epsilon=2, delta=1e-5)
        assert path.read_bytes() == content

    def test_another_database_is_refused_and_kept(self, path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE theirs (x)")
        before = path.read_bytes()
        with pytest.raises(LedgerError, match="belongs to something else"):
            Ledger(path)
        assert path.read_bytes() == before

    def test_damaged_pages(self, path: Path) -> None:
        ledger = Ledger(path)
        for number in range(30):
            ledger.reserve(gaussian(5.0), neighboring=AR, label=f"run {number}" * 10)
        whole = path.read_bytes()
        for damaged in [whole[: len(whole) // 2], whole[:4096] + bytes(4096) + whole[8192:]]:
            path.write_bytes(damaged)
            with pytest.raises(LedgerError, match="damaged"):
                Ledger(path)
            assert path.read_bytes() == damaged

    def test_newer_format(self, path: Path) -> None:
        Ledger(path)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA user_version = 3")
        with pytest.raises(LedgerError, match=r"format 3.*use the version"):
            Ledger(path)

    def test_event_of_a_newer_version(self, path: Path) -> None:
        ledger = Ledger(path)
        with closing(sqlite3.connect(path)) as connection, connection:
            entry = Entry("reserved", "i", "t", "l", '{"type": "New"}')
            head = entry.after(ledger._store.start())
            connection.execute(
                "INSERT INTO entry VALUES (1, ?, ?, ?, ?, ?, ?)", (*astuple(entry), head.digest)
            )
            connection.execute("UPDATE head SET count = ?, digest = ?", (head.count, head.digest))
        with pytest.raises(LedgerError, match="cannot be read"):
            ledger.reserve(gaussian(5.0), neighboring=AR, label="x")

    def test_directory_and_missing_directory(self, tmp_path: Path) -> None:
        with pytest.raises(LedgerError, match=re.escape(str(tmp_path))):
            Ledger(tmp_path)
        with pytest.raises(LedgerError, match="there is no directory"):
            Ledger(tmp_path / "missing" / "ledger")
        assert os.listdir(tmp_path) == []

    @pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
    def test_file_without_permission(self, path: Path) -> None:
        Ledger(path)
        path.chmod(0o400)
        with pytest.raises(LedgerError, match="write access"):
            Ledger(path)

    def test_read_only_database(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ledger = Ledger(path)
        connect = ledger_store._connect

        def read_only(file: Path | None) -> sqlite3.Connection:
            connection = connect(file)
            connection.execute("PRAGMA query_only = ON")
            return connection

        with monkeypatch.context() as patch:
            patch.setattr(ledger_store, "_connect", read_only)
            with pytest.raises(LedgerError, match="write access"):
                ledger.reserve(gaussian(5.0), neighboring=AR, label="x")
        assert ledger.entries() == []

    def test_removed_or_replaced_while_in_use(self, path: Path) -> None:
        ledger = Ledger(path)
        ledger.reserve(gaussian(5.0), neighboring=AR, label="x")
        aside = path.rename(path.with_name("aside"))
        with pytest.raises(LedgerError):
            ledger.reserve(gaussian(5.0), neighboring=AR, label="y")
        assert not path.exists()
        Ledger(path)
        with pytest.raises(LedgerError, match="taken this file's place"):
            ledger.reserve(gaussian(5.0), neighboring=AR, label="y")
        aside.replace(path)
        assert [entry.label for entry in ledger.entries()] == ["x"]

    def test_file_lost_but_its_journal_left(self, path: Path) -> None:
        path.with_name(path.name + "-wal").write_bytes(b"reservations")
        with pytest.raises(LedgerError, match="put the ledger file back"):
            Ledger(path)
        assert not path.exists()

    def test_disk_full(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ledger = Ledger(path)
        kept = ledger.reserve(gaussian(5.0), neighboring=AR, label="kept")
        connect = ledger_store._connect

        def full(file: Path | None) -> sqlite3.Connection:
            connection = connect(file)
            # SQLite takes the present size instead
            connection.execute("PRAGMA max_page_count = 1")
            return connection

        granted: list[Reservation] = []
        with monkeypatch.context() as patch:
            patch.setattr(ledger_store, "_connect", full)
            with pytest.raises(LedgerError, match=r"full; free some space") as refused:
                reserve_often(ledger, gaussian(5.0), 200, granted)
        assert str(path) in str(refused.value)
        # the last one granted is there, the refused one is not
        assert ledger.entries() == [kept, *granted]
        ledger.reserve(gaussian(5.0), neighboring=AR, label="space again")

    def test_failing_commit_grants_nothing(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ledger = Ledger(path)
        connect = ledger_store._connect

        class Failing(sqlite3.Connection):
            def execute(self, statement: str, *parameters: object) -> sqlite3.Cursor:
                if statement == "COMMIT":
                    raise sqlite3.OperationalError("database or disk is full")
                return super().execute(statement, *parameters)

        def failing(file: Path | None) -> sqlite3.Connection:
            connect(file).close()
            return sqlite3.connect(path, isolation_level=None, factory=Failing)

        with monkeypatch.context() as patch:
            patch.setattr(ledger_store, "_connect", failing)
            with pytest.raises(LedgerError, match="nothing was reserved"):
                ledger.reserve(gaussian(5.0), neighboring=AR, label="x")
        assert ledger.entries() == []

    def test_closed_memory(self) -> None:
        with Ledger() as ledger:
            pass
        with pytest.raises(LedgerError, match="open the ledger again"):
            ledger.entries()


class Worker:
    """`ledger_worker.py` in a process of its own."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ledger_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            bufsize=1,
        )
        assert self.read() == "ready"

    def send(self, *words: object) -> None:
        self.process.stdin.write("\t".join(map(str, words)) + "\n")

    def read(self) -> str:
        return self.process.stdout.readline().rstrip("\n")

    def close(self) -> None:
        with self.process:  # closes the pipes and waits; its loop ends with its input
            self.process.stdin.close()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@needs_fork
class TestProcesses:
    @pytest.mark.parametrize("racers", [2, 8])
    def test_one_wins_the_last_of_the_budget(
        self, worker: Worker, tmp_path: Path, racers: int
    ) -> None:
        for repeat in range(6):
            path = tmp_path / f"{repeat}.ledger"
            ledger = Ledger(path, epsilon=2, delta=1e-5)
            held = 0
            if repeat % 2:  # the last of the filter's bound; else the whole budget, as a first run
                ledger.reserve(gaussian(5.0), neighboring=AR, label="held")
                held = 1
            worker.send("race", path, racers, 3.0 if repeat % 2 else 2.2)
            outcomes = sorted(worker.read() for _ in range(racers))
            assert outcomes == ["refused"] * (racers - 1) + ["won"]
            assert len(ledger.entries()) == held + 1

    def test_all_win_where_there_is_room(self, worker: Worker, tmp_path: Path) -> None:
        path = tmp_path / "room.ledger"
        Ledger(path, epsilon=2, delta=1e-5)
        worker.send("race", path, 8, 50.0)
        assert [worker.read() for _ in range(8)] == ["won"] * 8
        assert len(Ledger(path).entries()) == 8

    def test_race_to_make_the_file(self, worker: Worker, tmp_path: Path) -> None:
        path = tmp_path / "new.ledger"
        worker.send("race", path, 8, 50.0)
        assert [worker.read() for _ in range(8)] == ["won"] * 8
        assert len(Ledger(path).entries()) == 8
        assert os.listdir(tmp_path) == [path.name]

    @pytest.mark.slow
    def test_killed_at_any_point_forgets_nothing(self, worker: Worker, tmp_path: Path) -> None:
        chance = random.Random(0)
        acknowledged: dict[Path, list[str]] = {}
        for repeat in range(20):
            # some on a new file, some on one that was left behind
            path = tmp_path / f"{repeat // 4}.ledger"
            acknowledged.setdefault(path, [])
            worker.send("crash", path)
            pid = int(worker.read().removeprefix("pid "))
            for _ in range(chance.choice([0, 0, 1, 3])):
                acknowledged[path].append(worker.read().removeprefix("got "))
            # somewhere within the next few milliseconds
            for _ in range(chance.randrange(200_000)):
                pass
            os.kill(pid, signal.SIGKILL)
            while (line := worker.read()) != "dead":
                assert line.startswith("got ")
                acknowledged[path].append(line.removeprefix("got "))
            stored = [entry.id for entry in Ledger(path).entries()]
            assert [entry for entry in stored if entry in acknowledged[path]] == acknowledged[path]
            acknowledged[path] = stored  # a reservation written but not acknowledged stays, too
        assert sum(map(len, acknowledged.values())) > 10


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epsilon": "1", "delta": 1e-5}, "epsilon of a ledger must be a number, got '1'. Fix: "),
        ({"epsilon": 1, "delta": "auto"}, "delta of a ledger must be a number, got 'auto'. Fix: "),
        ({"epsilon": "1"}, "a budget needs both; give both or neither. Fix: "),
    ],
)
def test_a_budget_that_is_none_is_named_with_the_fix(
    tmp_path: Path, given: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Ledger(tmp_path / "a.sqlite", **given)  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]
