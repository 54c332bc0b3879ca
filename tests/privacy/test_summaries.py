"""Tries to falsify what is promised of a private mean, count, histogram and quantile."""

import math
import warnings
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

import dpoptim
from dpoptim.accounting.filters import selection_epsilon
from dpoptim.accounting.gaussian import gdp_epsilon
from dpoptim.audit.statistics import choices_seen, shifts_seen
from dpoptim.gate import adaptive
from dpoptim.preprocessing import DPImputer
from dpoptim.statistics import bounded_sum
from dpoptim.summaries import counts, quantile
from dpoptim.summaries.mean import means_of_persons
from dpoptim.training.batches.privacy_units import Persons

MU, DELTA = 1.5, 1e-5
HOSTILE = (math.nan, math.inf, -math.inf, 1e300, -1.0, 0.1, 1.0)
RELATIONS = ("add-or-remove-one", "zero-out", "replace-one")


def terms(neighboring: str, n: int) -> dict[str, Any]:
    hidden = {"n": n} if neighboring == "add-or-remove-one" else {}
    epsilon = gdp_epsilon(MU, DELTA)
    return {
        "epsilon": epsilon,
        "delta": DELTA,
        "neighboring": neighboring,
        "noise_seed": 0,
    } | hidden


def worlds(neighboring: str, others: np.ndarray[Any, Any], empty: float) -> list[Any]:
    """Pairs of neighbouring columns, a record of one of them hostile."""
    held = [np.append(others, value) for value in HOSTILE]
    if neighboring == "replace-one":
        return [(one, other) for one in held for other in held]
    absent = others if neighboring == "add-or-remove-one" else np.append(others, empty)
    return [(absent, one) for one in held]


SUMS: dict[str, tuple[Callable[..., Any], float]] = {
    "mean": (lambda x, **more: dpoptim.private_mean(x, -1, 1, **more), 0.0),
    "sum": (lambda x, **more: dpoptim.private_sum(x, -1, 1, **more), 0.0),
    "positive sum": (lambda x, **more: dpoptim.private_sum(x, 0.2, 1, **more), 0.0),
    "count": (lambda x, **more: dpoptim.private_count(x == 1, **more), 0.0),
    "categories": (lambda x, **more: dpoptim.private_histogram(x, [1.0, -1.0], **more), 0.0),
    "bins": (lambda x, **more: dpoptim.private_histogram(x, edges=[-1, 0, 0.5, 1], **more), 2.0),
}


@pytest.mark.set_aside("positive sum-replace-one", "categories-replace-one")
@pytest.mark.parametrize(
    ("name", "neighboring"),
    # no value of a mean's is one that adds nothing, as a record that is zeroed out does
    [(name, each) for name in SUMS for each in RELATIONS if (name, each) != ("mean", "zero-out")],
)
def test_no_record_shows_more_than_a_sum_claims(name: str, neighboring: str) -> None:
    """For given outputs, the shifts over the noise add up in squares to at most mu^2."""
    release, empty = SUMS[name]
    worst, others = 0.0, np.full(300, 0.1)
    for one, other in worlds(neighboring, others, empty):
        with shifts_seen() as before:
            release(one, **terms(neighboring, 301))
        with shifts_seen([total for total, _ in before]) as after:
            release(other, **terms(neighboring, 301))
        squares = sum(
            float((a - b).norm()) ** 2 / deviation**2
            for (a, deviation), (b, _) in zip(before, after, strict=True)
        )
        worst = max(worst, math.sqrt(squares))
    assert worst <= MU * (1 + 1e-9)
    assert worst > 0.3 * MU  # and the noise is not more than that takes


@pytest.mark.set_aside("0.25-replace-one")
@pytest.mark.parametrize("neighboring", RELATIONS)
@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.9])
def test_no_record_shows_more_than_a_quantile_claims(quantile: float, neighboring: str) -> None:
    """The logarithms of the odds of every candidate are compared, exactly."""
    worst = 0.0
    for one, other in worlds(neighboring, np.linspace(-1, 1, 40), 0.0):
        found = []
        for column in (one, other):
            with choices_seen(adaptive) as seen:
                dpoptim.private_quantile(column, quantile, -1, 1, **terms(neighboring, 41))
            (odds,) = seen
            found.append(odds - np.logaddexp.reduce(odds))
        worst = max(worst, float(np.abs(found[0] - found[1]).max()))
    assert 0 < worst <= selection_epsilon(MU) * (1 + 1e-9)


def persons_worlds(neighboring: str, empty: float) -> list[Any]:
    """Pairs of neighbouring tables (values, owners), a person of one of them with hostile rows."""
    names, others = np.arange(40).repeat(3), np.tile(np.linspace(-1, 1, 40), 3)

    def with_person(*rows: float) -> Any:
        return np.append(others, rows), np.append(names, [40] * len(rows))

    held = [with_person(*rows) for rows in ([1.0], [1.0] * 7, [-1.0, 0.1], [*HOSTILE, 0.6])]
    if neighboring == "replace-one":
        return [(one, other) for one in held for other in held]
    absent = (others, names) if neighboring == "add-or-remove-one" else with_person(empty)
    return [(absent, one) for one in held]


def persons_shift(name: str, neighboring: str) -> float:
    """How far a person moves a sum at most, over the noise."""
    release, empty = SUMS[name]
    worst = 0.0
    for worlds_ in persons_worlds(neighboring, empty):
        totals = []
        for values, owners in worlds_:
            with shifts_seen() as seen:
                release(values, **terms(neighboring, 41), persons=owners)
            totals += seen
        (one, deviation), (other, _) = totals
        worst = max(worst, float((one - other).norm()) / deviation)
    return worst


def persons_odds(share: float, neighboring: str) -> float:
    """How far a person moves the logarithms of a candidate's odds at most."""
    worst = 0.0
    for worlds_ in persons_worlds(neighboring, math.nan):
        found = []
        for values, owners in worlds_:
            with choices_seen(adaptive) as seen:
                dpoptim.private_quantile(
                    values, share, -1, 1, **terms(neighboring, 41), persons=owners
                )
            (odds,) = seen
            found.append(odds - np.logaddexp.reduce(odds))
        worst = max(worst, float(np.abs(found[0] - found[1]).max()))
    return worst


@pytest.mark.parametrize("neighboring", RELATIONS)
@pytest.mark.parametrize("name", [name for name in SUMS if name != "mean"])
def test_no_person_shows_more_than_a_sum_claims(name: str, neighboring: str) -> None:
    assert 0.3 * MU < persons_shift(name, neighboring) <= MU * (1 + 1e-9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("neighboring", RELATIONS)
@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.9])
def test_no_person_shows_more_than_a_quantile_claims(quantile: float, neighboring: str) -> None:
    assert 0 < persons_odds(quantile, neighboring) <= selection_epsilon(MU) * (1 + 1e-9)


def test_rows_that_count_one_each_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in counts, quantile:
        monkeypatch.setattr(module, "shares_of_rows", lambda owners, known: known * 1.0)
    assert persons_shift("categories", "add-or-remove-one") > 2 * MU
    assert persons_odds(0.5, "add-or-remove-one") > 2 * selection_epsilon(MU)


def test_persons_count_once_each() -> None:
    """Of 200 persons one has a thousand rows: statistics are of persons, and so are charges."""
    many = np.r_[np.ones(1000), np.arange(200.0) % 2]
    names = np.r_[np.zeros(1000, dtype=int), np.arange(1, 201)]
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        given: dict[str, Any] = {"epsilon": 100.0, "delta": 1e-6, "noise_seed": 0}
        given |= {"persons": names, "ledger": ledger}
        count = dpoptim.private_count(many == 1, **given)
        shares = dpoptim.private_histogram(np.r_[many[1:], 0.0], [0.0, 1.0], **given)
        spread = np.r_[np.ones(1000), np.linspace(0, 1, 200)]
        median = dpoptim.private_quantile(spread, 0.5, 0, 1, **given)
        assert {entry.unit for entry in ledger.entries()} == {"person"}
    assert {each.guarantee.unit for each in (count, shares, median)} == {"person"}
    assert count.value == pytest.approx(101, abs=1)
    assert shares.value == pytest.approx([100, 101], abs=1.5)
    assert median.value == pytest.approx(0.5, abs=0.05)
    with pytest.raises(ValueError, match="as long as flags"):
        dpoptim.private_count(many == 1, epsilon=1.0, persons=names[1:])


def test_statistics_are_charged_to_one_ledger() -> None:
    x = np.random.default_rng(0).lognormal(10, 0.8, 2_000)
    ledger = dpoptim.Ledger(epsilon=2.0, delta=1e-5, neighboring="zero-out")
    budget: dict[str, Any] = {"epsilon": 0.5, "delta": 1e-5, "ledger": ledger}
    dpoptim.private_mean(x, 0, 1e6, **budget)
    dpoptim.private_count(x > 20_000, **budget)
    dpoptim.private_histogram(x, edges=[0, 1e4, 1e5, 1e6], **budget)
    last = dpoptim.private_quantile(x, 0.5, 0, 1e6, **budget)
    labels = [entry.label for entry in ledger.entries()]
    assert labels == ["PrivateMean", "private count", "private histogram", "private quantile"]
    assert any("all 4 runs on its ledger together" in note for note in last.guarantee.notes)
    with pytest.raises(dpoptim.BudgetExceeded):
        dpoptim.private_mean(x, 0, 1e6, **{**budget, "epsilon": 1.9})


def test_values_are_near_the_true_ones() -> None:
    x = np.random.default_rng(0).lognormal(10, 0.8, 5_000)
    terms_: dict[str, Any] = {"epsilon": 1.0, "noise_seed": 0}
    mean = dpoptim.private_mean(x, 0, 1e8, **terms_)
    assert mean.value == pytest.approx(x.mean(), rel=0.1)
    assert mean.standard_error is not None
    middle = dpoptim.private_quantile(x, 0.5, 0, 1e8, **terms_)
    assert middle.value == pytest.approx(np.median(x), rel=0.3)
    bins = dpoptim.private_histogram(x, edges=[0, 1e4, 1e5, 1e6], **terms_)
    true = np.histogram(x, [0, 1e4, 1e5, 1e6])[0]
    assert np.abs(bins.value - true).max() < 5 * (bins.standard_error or 0)


TIED: dict[str, tuple[Any, float, tuple[float, float], float, float]] = {
    "constant": (np.full(10_000, 5.0), 0.5, (0, 10), 5.0, 0.05),
    "zeros in a wide range": (np.zeros(10_000), 0.5, (-1e6, 1e6), 0.0, 0.0),
    "zeros and gifts": (np.r_[np.zeros(6_000), np.full(4_000, 1e5)], 0.5, (0, 1e6), 0.0, 0.0),
    "gifts": (np.r_[np.zeros(6_000), np.full(4_000, 1e5)], 0.9, (0, 1e6), 1e5, 4e3),
    "children": (np.arange(10_000) % 4 * 1.0, 0.6, (0, 20), 2.0, 0.1),
    "below the range": (np.full(1_000, -np.inf), 0.5, (0, 1), 0.0, 0.0),
    "half missing": (
        np.r_[np.full(5_000, np.nan), np.linspace(0, 1, 5_000)],
        0.5,
        (0, 1),
        0.5,
        0.02,
    ),
}


@pytest.mark.parametrize("name", TIED)
def test_quantiles_of_values_that_many_share(name: str) -> None:
    values, share, ends, true, within = TIED[name]
    for seed in range(5):
        found = dpoptim.private_quantile(values, share, *ends, epsilon=2.0, noise_seed=seed)
        assert abs(found.value - true) <= within


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x: dpoptim.private_histogram(x, epsilon=1.0), "one of categories and edges"),
        (lambda x: dpoptim.private_histogram(x, edges=[1, 0], epsilon=1.0), "rising"),
        (lambda x: dpoptim.private_quantile(x, 1.0, 0, 1, epsilon=1.0), "between 0 and 1"),
        (lambda x: dpoptim.private_quantile(x, 0.5, 1, 0, epsilon=1.0), "low"),
        (lambda x: dpoptim.private_mean(x, 0, 0, epsilon=1.0), "lower must be below upper"),
        (lambda x: dpoptim.private_mean(x, 0, 1, epsilon=0.0), "epsilon"),
    ],
)
def test_what_is_wrong_is_said(wrong: Callable[..., Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrong(np.zeros(20))


def test_a_mean_of_persons_moves_by_one_of_them_alone() -> None:
    """A person with a thousand rows counts once, by a number that no other person has a part in."""
    rng = np.random.default_rng(0)
    owners = np.sort(rng.integers(0, 60, 500))
    values = rng.uniform(0, 1, 500)
    values[owners == 7] = np.nan
    means = means_of_persons(values, Persons.of(owners, 500, 1))
    kept = owners != 3
    others = means_of_persons(values[kept], Persons.of(owners[kept], int(kept.sum()), 1))
    assert np.isnan(means).sum() == 1
    assert np.array_equal(np.delete(means, 3), others, equal_nan=True)
    assert means[5] == pytest.approx(values[owners == 5].mean())
    many = np.r_[np.zeros(1000), np.arange(200.0) % 2]
    names = np.r_[np.zeros(1000, dtype=int), np.arange(1, 201)]
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        given: dict[str, Any] = {"epsilon": 500.0, "delta": 1e-6, "noise_seed": 0, "ledger": ledger}
        found = dpoptim.private_mean(many, 0, 1, **given, persons=names)
        assert found.guarantee.unit == "person"
        assert found.value == pytest.approx(100 / 201, abs=0.01)
        assert found.value - dpoptim.private_mean(
            many, 0, 1, epsilon=500.0, delta=1e-6, noise_seed=0
        ).value == pytest.approx(100 / 201 - 100 / 1200, abs=0.02)
        assert ledger.entries()[0].unit == "person"
        with pytest.raises(ValueError, match="as long as values"):
            dpoptim.private_mean(many, 0, 1, **given, persons=names[1:])


def test_missing_flags_and_words_count_nowhere() -> None:
    """Of NaN and None any were counted as true, and of text all."""
    given: dict[str, Any] = {"epsilon": 200.0, "delta": 1e-6, "noise_seed": 0}
    words = [True, False, None, math.nan, "no", 1, 0]
    columns = [words, np.array([1.0, math.nan, 0.0, 2.0]), np.array(words, dtype=object)]
    for flags in columns:
        for persons in (None, list(range(len(flags)))):
            found = dpoptim.private_count(flags, **given, persons=persons)
            assert found.value == pytest.approx(2, abs=0.5)


def test_text_is_no_flag_and_no_category_no_question() -> None:
    """Before anything is spent."""
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        with pytest.raises(ValueError, match="flags == 'yes'"):
            dpoptim.private_count(np.array(["yes", "no"]), epsilon=1.0, ledger=ledger)
        with pytest.raises(ValueError, match="categories is empty"):
            dpoptim.private_histogram([1, 2], [], epsilon=1.0, ledger=ledger)
        assert not ledger.entries()


@pytest.mark.parametrize("neighboring", RELATIONS)
def test_no_missing_flag_shows_more_than_a_count_claims(neighboring: str) -> None:
    """A record moves the count by 1 at most, whatever its flag is."""
    others = [True] * 20 + [None] * 3
    held = [*([*others, flag] for flag in (True, False, None, "word", math.nan, 7)), [*others, 0.0]]
    sums = []
    for flags in held:
        with shifts_seen() as seen:
            dpoptim.private_count(flags, **terms(neighboring, len(flags)))
        sums += seen
    totals = [float(total[0]) for total, _ in sums]
    assert 0.3 * MU < (max(totals) - min(totals)) / sums[0][1] <= MU * (1 + 1e-9)


def test_sums_are_of_what_is_in_the_range_and_of_persons() -> None:
    given: dict[str, Any] = {"epsilon": 500.0, "delta": 1e-6, "noise_seed": 0}
    values = np.array([1.0, 2.0, 50.0, -3.0, math.nan, math.inf])
    found = dpoptim.private_sum(values, -1, 10, **given)
    assert found.value == pytest.approx(1 + 2 + 10 - 1 + 10, abs=5 * found.standard_error)
    assert found.standard_error < 0.5
    found = dpoptim.private_sum(values, -1, 10, **given, persons=[1, 1, 2, 2, 3, 4])
    assert found.value == pytest.approx(3 + 10 + 0 + 10, abs=5 * found.standard_error)
    assert found.guarantee.unit == "person"
    for ends in ((0, 0), (1, 0), (0, math.inf), (math.nan, 1)):
        with pytest.raises(
            ValueError, match="lower and upper must be at most|lower must be|upper must be"
        ):
            dpoptim.private_sum(values, *ends, **given)


ODD = [b"x", 1j, None, "x", Decimal("sNaN"), np.datetime64("2020-01-01"), np.complex64(1j)]


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("owners", [None, range(201)])
def test_a_value_of_another_kind_moves_no_other(odd: Any, owners: Any) -> None:
    """NumPy makes bytes, or complex numbers, of a whole list for the sake of one of them."""
    given: dict[str, Any] = {"epsilon": 50.0, "delta": 1e-6, "noise_seed": 0, "persons": owners}
    for first, second in ((True, False), (1, 2), (0.5, 1.5)):
        values = [first] * 100 + [second] * 100 + [odd]
        counts = dpoptim.private_histogram(values, [first, second], **given).value
        assert counts == pytest.approx([100, 100], abs=2)
    flags = [True] * 100 + [False] * 100 + [odd]
    assert dpoptim.private_count(flags, **given).value == pytest.approx(100, abs=2)


@pytest.mark.parametrize("persons", [None, []])
@pytest.mark.parametrize(
    "release",
    [
        lambda **more: dpoptim.private_mean([], 0, 1, **more),
        lambda **more: dpoptim.private_sum([], 0, 1, **more),
        lambda **more: dpoptim.private_count([], **more),
        lambda **more: dpoptim.private_histogram([], [1], **more),
        lambda **more: dpoptim.private_quantile([], 0.5, 0, 1, **more),
    ],
)
def test_nothing_is_charged_for_no_records(release: Callable[..., Any], persons: Any) -> None:
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        with pytest.raises(ValueError, match=r"0 sample\(s\)"):
            release(epsilon=1.0, ledger=ledger, persons=persons)
        assert not ledger.entries()


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_statistics_of_dates_show_the_line_to_write(zone: str | None) -> None:
    """And that line works."""
    pd = pytest.importorskip("pandas")
    start, end = pd.Timestamp("2020-01-01", tz=zone), pd.Timestamp("2024-12-31", tz=zone)
    dates = pd.Series(pd.date_range(start, end, 2_000))
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        given: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6, "ledger": ledger}
        for release, line in (
            (lambda: dpoptim.private_mean(dates, start, end, **given), "private_mean(days, 0, "),
            (lambda: dpoptim.private_sum(dates, start, end, **given), "private_sum(days, 0, "),
            (
                lambda: dpoptim.private_quantile(dates, 0.5, start, end, **given),
                "private_quantile(days, 0.5, 0, ",
            ),
            (
                lambda: dpoptim.private_histogram(dates, edges=[start, end], **given),
                "private_histogram(days, edges=[0, ",
            ),
        ):
            with pytest.raises(TypeError) as raised:
                release()
            assert line in str(raised.value)
            assert "pd.to_datetime(dates, utc=True)) - start).dt.days" in str(raised.value)
        assert not ledger.entries()
    found = dpoptim.private_mean((dates - start).dt.days, 0, 1_826, epsilon=1.0)
    middle = start + pd.Timedelta(days=found.value)
    assert abs(middle - (start + (end - start) / 2)) < pd.Timedelta(days=60)


@pytest.mark.parametrize("ends", [(-1e308, 1e308), (0.0, 1e300)])
def test_a_range_that_overflows_is_refused_before_it_is_paid_for(
    ends: tuple[float, float],
) -> None:
    """It released NaN."""
    ledger = dpoptim.Ledger(epsilon=1.0, delta=1e-5, neighboring="zero-out")
    with pytest.raises(ValueError, match="er must be at most 1e\\+290 in size"):
        dpoptim.private_mean([1.0, 2.0], *ends, epsilon=0.5, ledger=ledger)
    assert not ledger.entries()


def test_a_quantile_may_be_a_number_of_any_kind() -> None:
    x = np.linspace(0, 1, 500)
    for share in (0.5, np.float32(0.5)):
        found = dpoptim.private_quantile(x, share, 0, 1, epsilon=5.0, noise_seed=1)
        assert isinstance(found.value, float)


@pytest.mark.parametrize("wrong", ["0.5", np.array(0.5), None])
def test_what_is_no_quantile_is_named(wrong: Any) -> None:
    x = np.linspace(0, 1, 500)
    with pytest.raises(ValueError, match="quantile must be a number, got"):
        dpoptim.private_quantile(x, wrong, 0, 1, epsilon=5.0)


def test_sums_of_huge_rows_warn_of_nothing() -> None:
    rows = np.array([[1.7e308, 1.7e308], [1.0, 1.0], [-1e308, 1e-308]])
    with warnings.catch_warnings(action="error"), np.errstate(all="raise"):
        assert np.linalg.norm(bounded_sum(rows, 1.0)) <= 3.0
        assert np.linalg.norm(bounded_sum(rows, 0.25)) <= 0.75


@pytest.mark.parametrize(
    "kind", ["zone", "array", "objects", "index", "list", "gaps", "durations", "periods", "text"]
)
def test_the_fix_for_dates_works_to_the_letter(kind: str) -> None:
    """Whatever holds the dates, what the message says makes days of them."""
    pd = pytest.importorskip("pandas")
    naive = pd.Series(pd.date_range("2020-01-05", periods=50, freq="D"))
    plain = [day.date() for day in naive]
    dates = {
        "zone": naive.dt.tz_localize("UTC"),
        "array": naive.to_numpy(),
        "objects": pd.Series(plain),
        "index": pd.DatetimeIndex(naive),
        "list": plain,
        "gaps": naive.where(naive.index != 5),
        "durations": naive - pd.Timestamp("2020-01-01"),
        "periods": naive.dt.to_period("D"),
        "text": naive.astype(str),
    }[kind]
    with pytest.raises((TypeError, ValueError), match="start = pd.Timestamp") as raised:
        dpoptim.private_mean(dates, 0, 100, epsilon=1.0)
    said = str(raised.value)
    known: dict[str, Any] = {"pd": pd, "dates": dates, "durations": dates}
    for name in ("start", "days"):
        code = said.split(f"{name} = ", 1)[1].split(";", maxsplit=1)[0].rstrip(".")
        known[name] = eval(code, known)  # as a reader would
    days = np.asarray(known["days"], dtype=float)
    expected = np.where(np.arange(50) == 5, np.nan, np.arange(4, 54))
    np.testing.assert_array_equal(days, expected if kind == "gaps" else np.arange(4, 54))


def test_gaps_of_pandas_are_gaps() -> None:
    pd = pytest.importorskip("pandas")
    plain = dpoptim.private_mean([1.0, None] * 50, 0, 2, epsilon=1.0, noise_seed=0)
    for gap in (pd.NA, pd.NaT, float("nan")):
        values = pd.Series([1.0, gap] * 50, dtype=object)
        found = dpoptim.private_mean(values, 0, 2, epsilon=1.0, noise_seed=0)
        assert found.value == plain.value
        table = pd.DataFrame({"a": values, "b": 1.0})
        DPImputer(0, 2, epsilon=1.0, delta=1e-5).fit(table)
        assert table["a"].iloc[1] is gap or gap != gap  # the caller's stays as it is
