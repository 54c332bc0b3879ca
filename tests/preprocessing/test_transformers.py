"""The private transformers as their users meet them: what they learn, what they refuse, and
scikit-learn's conventions.
"""

import math
import warnings
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer

import dpoptim
from dpoptim.preprocessing import (
    DPClassCounts,
    DPImputer,
    DPMinMaxScaler,
    DPOneHot,
    DPStandardScaler,
)
from dpoptim.quantiles import candidates_of

SEEDED: Any = {"epsilon": 1e3, "delta": 1e-3, "noise_seed": 0}


def test_a_word_in_a_column_moves_no_others_to_other_categories() -> None:
    """As programs hold a column: a word makes text of its numbers, a gap is NaN among numbers."""
    categories = [["1.0", "2.5", None, True, "01"]]
    columns = {
        "numbers": ([1.0, 2.5, float("nan"), 4.0], [0, 1, 2, -1]),
        "texts": (["1.0", "2.5", None, "4", "word", "01"], [0, 1, 2, -1, -1, 4]),
        "objects": ([True, np.True_, "True", 1, "1"], [3, 3, 3, 0, 0]),
        # as nobody writes a number: texts of their own
        "codes": (["01", "1.00", "+1", " 1", "2.50"], [4, -1, -1, -1, -1]),
    }
    for values, places in columns.values():
        x = np.empty((len(values), 1), dtype=object)
        x[:, 0] = values
        step = DPOneHot(categories)
        made = step.fit_transform(x)
        expected = [[float(j == place) for j in range(5)] for place in places]
        np.testing.assert_array_equal(made, expected)
    assert step.categories_ == [["1.0", "2.5", "nan", "True", "01"]]
    with pytest.raises(ValueError, match="so that '1.0' is 1"):
        DPOneHot([["1.0", 1]]).fit([[1]])


@pytest.mark.parametrize("record", ["word", None, float("nan"), "2.0", 7])
def test_one_label_moves_one_count(record: Any) -> None:
    """A word in a list of numbers, of which NumPy makes text, had emptied all classes."""
    labels = [1, 2, 2, True, "1", 2.0]
    counts = [DPClassCounts([1, 2], **SEEDED).fit(y).counts_ for y in (labels, [*labels, record])]
    moved = np.abs(np.diff(counts, axis=0))
    assert counts[0] == pytest.approx([3, 3], abs=0.2)
    assert moved.sum() < 1.2
    with pytest.raises(ValueError, match="name each class once"):
        DPClassCounts([1, 2, "1.0"], **SEEDED).fit(labels)


def test_a_category_may_end_in_nul() -> None:
    """As text of fixed width that numpy pads; "a" is another category."""
    made = DPOneHot([["a\0", "b"]]).fit_transform([["a\0"], ["a"], ["b"]])
    np.testing.assert_array_equal(made, [[1, 0], [0, 0], [0, 1]])


def table(n: int = 20_000, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = np.stack([rng.normal(40, 12, n), rng.lognormal(10, 0.5, n), rng.uniform(-1, 3, n)], axis=1)
    x[rng.random(x.shape) < 0.1] = np.nan
    return x


BOUNDS: Any = {"lower": [0, 0, -5], "upper": [120, 200_000, 5]}


@pytest.mark.filterwarnings("ignore::dpoptim.estimators.RepeatedFitWarning")
def test_the_scaler_finds_means_and_spreads() -> None:
    x = table()
    scaler = DPStandardScaler(**BOUNDS, epsilon=0.2, delta=1e-6, noise_seed=0).fit(x)
    np.testing.assert_allclose(scaler.mean_, np.nanmean(x, 0), rtol=0.05)
    np.testing.assert_allclose(scaler.scale_, np.nanstd(x, 0), rtol=0.12)
    scaled = scaler.transform(x)
    assert np.array_equal(np.isnan(scaled), np.isnan(x))
    filled = clone(scaler).set_params(missing="mean").fit_transform(x)
    assert (filled[np.isnan(x)] == 0).all()
    assert abs(filled.mean()) < 0.1
    assert filled.std(0) == pytest.approx(np.full(3, 0.95), abs=0.12)
    assert scaler.privacy_.epsilon <= 0.2
    assert scaler.privacy_.status == "proven"
    beyond = scaler.transform([[1e9, -1e9, 0.0]])
    # values are cut to the public range
    assert beyond[0, 0] == scaler.transform([[120.0, 0.0, 0.0]])[0, 0]


def test_the_imputer_fills_with_means() -> None:
    x = table()
    imputer = DPImputer(**BOUNDS, epsilon=0.2, delta=1e-6, noise_seed=0).fit(x)
    np.testing.assert_allclose(imputer.mean_, np.nanmean(x, 0), rtol=0.05)
    filled = imputer.transform(x)
    assert np.array_equal(filled[~np.isnan(x)], x[~np.isnan(x)])
    assert (filled[np.isnan(x)[:, 1], 1] == imputer.mean_[1]).all()


def test_scaling_by_public_bounds_reads_nothing() -> None:
    x = table()
    scaler = DPMinMaxScaler(**BOUNDS).fit(x)
    assert scaler.privacy_ is None
    np.testing.assert_array_equal(scaler.transform([[0, 200_000, 0]]), [[-1, 1, 0]])
    assert np.array_equal(scaler.low_, clone(scaler).fit(x[:5]).low_)


def test_quantiles() -> None:
    x = table()
    scaler = DPMinMaxScaler(**BOUNDS, quantile=0.05, epsilon=1.0, delta=1e-6, noise_seed=0).fit(x)
    for column in range(3):
        known = x[~np.isnan(x[:, column]), column]
        # Ranks are of n, a tenth of which is missing.
        assert 0.01 < (known < scaler.low_[column]).mean() < 0.12
        assert 0.01 < (known > scaler.high_[column]).mean() < 0.12
    assert 0.9 < scaler.privacy_.epsilon <= 1.0
    assert np.nanmax(np.abs(scaler.transform(x))) == 1.0
    with pytest.raises(ValueError, match=r"quantile must be between 0 and 0\.5"):
        clone(scaler).set_params(quantile=0.7).fit(x)


@pytest.mark.parametrize(("lower", "upper"), [(0.0, 1e8), (-1e8, 1e8)])
def test_quantiles_of_skewed_values_in_a_wide_range(lower: float, upper: float) -> None:
    """By even steps the upper end was 20 to 75 million, where the true one is 82,314."""
    x = np.random.default_rng(0).lognormal(10, 0.8, (5_000, 1))
    scaler = DPMinMaxScaler(lower, upper, quantile=0.05, epsilon=1.0, noise_seed=0).fit(x)
    (low, high), (true_low, true_high) = (
        (scaler.low_[0], scaler.high_[0]),
        np.quantile(x, [0.05, 0.95]),
    )
    assert true_low / 1.4 < low < 1.4 * true_low
    assert true_high / 1.4 < high < 1.4 * true_high
    assert not any("few candidates" in note for note in scaler.privacy_.notes)
    # there, a few steps are all between the ends, and that is said
    apart = upper * np.random.default_rng(0).normal(0.3, 0.005, (5_000, 1))
    coarse = DPMinMaxScaler(lower, upper, quantile=0.05, epsilon=1.0, noise_seed=1).fit(apart)
    assert any("few candidates" in note for note in coarse.privacy_.notes)


def test_a_scaler_finds_where_values_are_in_a_wide_range() -> None:
    """In [0, 1e8] it had mean 120,083 for 40,480, and scale 2.48 million for 36,500."""
    x = np.random.default_rng(0).lognormal(10, 0.8, (5_000, 1))
    scaler = DPStandardScaler(0.0, 1e8, epsilon=1.0, noise_seed=0).fit(x)
    assert scaler.mean_[0] == pytest.approx(x.mean(), rel=0.1)
    assert scaler.scale_[0] == pytest.approx(x.std(), rel=0.25)
    assert scaler.standard_error_[0] < 0.02 * scaler.scale_[0]
    assert not any("noise is large" in note for note in scaler.privacy_.notes)
    few = DPStandardScaler(0.0, 1e8, epsilon=1.0, noise_seed=0).fit(x[:30])
    assert few.standard_error_[0] > few.scale_[0] / 2
    assert any("noise is large beside what was found in 1 column " in n for n in few.privacy_.notes)


def test_noise_alone_does_not_end_the_search_for_a_range() -> None:
    """One seed in six took a round's noise for scatter, and kept a range that hid the column."""
    x = np.random.default_rng(0).normal(0, 0.5, (5_000, 1))
    for seed in range(30):
        scaler = DPStandardScaler(-100.0, 100.0, epsilon=2.0, noise_seed=seed).fit(x)
        assert scaler.scale_[0] == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize("seed", range(4))
def test_ends_of_columns_whose_values_many_share(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.c_[rng.integers(0, 2, 5_000), np.full(5_000, 3.0), rng.poisson(2, 5_000)] * 1.0
    scaler = DPMinMaxScaler(-100.0, 100.0, quantile=0.04, epsilon=3.0, noise_seed=seed).fit(x)
    assert np.abs(scaler.low_ - [0, 3, 0]).max() < 0.8
    assert np.abs(scaler.high_ - [1, 3, 5]).max() < 1.6


def test_candidates_are_public_numbers_and_rising() -> None:
    for origin in (-1.0, -0.3, 0.0, 7.0):
        found = candidates_of(origin)
        assert found[0] == -1
        assert found[-1] == 1
        assert (np.diff(found) > 0).all()
        assert (origin in found) == (abs(origin) <= 1)


def test_no_warning_tells_of_a_number_beyond_all_bounds() -> None:
    ends = DPMinMaxScaler(0.0, 0.25).fit([[0.1], [0.2]])
    assert np.array_equal(ends.transform([[1e308], [-1e308], [0.25], [0.0]]).T, [[1, -1, 1, -1]])


def test_public_categories() -> None:
    encoder = DPOneHot([["no", "yes"], ["red", "green", "blue"]])
    found = encoder.fit_transform([["yes", "blue"], ["perhaps", "red"], [None, "green"]])
    np.testing.assert_array_equal(found, [[0, 1, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]])
    assert list(encoder.get_feature_names_out(["paid", "colour"]))[2] == "colour_red"
    assert encoder.privacy_ is None
    with pytest.raises(ValueError, match="one list of public categories for each column"):
        DPOneHot([["a"]]).fit([["a", "b"]])
    with pytest.raises(ValueError, match="epsilon is missing"):
        DPOneHot().fit([["a"]])
    with pytest.raises(ValueError, match="name each category once"):
        DPOneHot([["a", "a"]]).fit([["a"]])


def test_categories_go_by_the_names_of_columns() -> None:
    """Columns in another order are refused: the categories of one would be sought in another."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"paid": ["yes", "no"], "colour": ["red", "green"]})
    encoder = DPOneHot([["no", "yes"], ["red", "green"]]).fit(frame)
    assert (encoder.n_features_in_, list(encoder.feature_names_in_)) == (2, ["paid", "colour"])
    assert list(encoder.get_feature_names_out())[1:3] == ["paid_yes", "colour_red"]
    named = clone(encoder).set_output(transform="pandas").fit_transform(frame)
    assert list(named.columns) == list(encoder.get_feature_names_out())
    for other in (frame[["colour", "paid"]], frame.rename(columns={"paid": "owes"})):
        with pytest.raises(ValueError, match="feature names should match"):
            encoder.transform(other)
    with pytest.raises(ValueError, match="expecting 2 features"):
        clone(encoder).fit(frame.to_numpy()).transform([["yes"]])
    with pytest.raises(ValueError, match="input_features must be the 2 columns of fit"):
        encoder.get_feature_names_out(["colour", "paid"])
    with pytest.raises(TypeError, match=r"Use '\.toarray"):
        encoder.fit(csr_array([[1.0, 0.0]]))


@pytest.mark.filterwarnings("ignore::dpoptim.estimators.RepeatedFitWarning")
@pytest.mark.parametrize("other", [np.nan, 2.5])
def test_codes_are_the_same_beside_a_record_that_makes_them_floats(other: float) -> None:
    """One record with a gap moved all others to other buckets, or out of every category."""
    codes = np.arange(400)[:, None] % 4
    beside = np.concatenate([codes[:-1].astype(np.float64), [[other]]])
    for categories in ([[0, 1, 2, 3]], [["0", "1", "2", "3"]], [[0.0, 1.0, 2.0, 3.0]]):
        encoder = DPOneHot(categories).fit(codes)
        np.testing.assert_array_equal(encoder.transform(beside)[:-1], np.eye(4)[codes[:-1, 0]])
        assert not encoder.transform(beside)[-1].any()
    counted = DPOneHot(epsilon=1e3, delta=1e-5, noise_seed=0)
    assert counted.fit(codes).categories_[0] == clone(counted).fit(beside[:-1]).categories_[0]


def test_fractions_are_read_as_they_are_written() -> None:
    """A mixed column's 0.1 of 32 bits is 0.1, not the number of 64 bits that is nearest to it."""
    x = np.array([[np.float32(0.1)], ["a"], [np.float64(0.1)]], dtype=object)
    found = DPOneHot([["0.1", "a"]]).fit(x).transform(x)
    np.testing.assert_array_equal(found, [[1, 0], [0, 1], [1, 0]])


@pytest.mark.filterwarnings("ignore::dpoptim.estimators.RepeatedFitWarning")
def test_categories_that_are_frequent() -> None:
    """Frequent ones become columns and rare ones do not; names are nowhere; a mixed table pays for
    what is not public alone, once for all columns.
    """
    rng = np.random.default_rng(0)
    towns = rng.choice(["jena", "kiel", "ulm"], 3000, p=[0.5, 0.3, 0.2]).astype(object)
    towns[:300] = [f"village {i}" for i in range(300)]
    paid = rng.choice(["no", "yes"], 3000)
    x = np.stack([towns, paid, rng.permutation(towns)], axis=1)
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        encoder = DPOneHot(
            [None, ["no", "yes"], None], epsilon=1.0, delta=1e-5, ledger=ledger, noise_seed=1
        )
        found = encoder.fit_transform(x)
        assert [entry.label for entry in ledger.entries()] == ["DPOneHot"]
    assert found.shape == (3000, 8)
    assert encoder.privacy_.epsilon <= 1.0
    assert len(np.unique(found[300:, :3].argmax(1))) == 3
    assert found[:300, :3].sum() < 10  # villages are in no column, but for collisions
    for town, column in zip(["jena", "kiel", "ulm"], range(3), strict=True):
        assert (found[towns == town][:, :3].sum(1) == 1).all(), column
    assert all("bucket" in name for name in encoder.get_feature_names_out()[[0, 7]])
    shown = repr({name: value for name, value in vars(encoder).items() if name.endswith("_")})
    assert "jena" not in shown
    assert "village" not in shown
    fewer = clone(encoder).set_params(least_share=0.25, ledger=None).fit(x)
    assert [len(names) for names in fewer.categories_] == [2, 2, 2]
    with pytest.raises(ValueError, match="buckets must be at most 65536"):
        clone(encoder).set_params(buckets=1 << 20).fit(x)


def test_class_counts_and_weights() -> None:
    y = np.array(["a"] * 900 + ["b"] * 100)
    counts = DPClassCounts(["a", "b", "c"], epsilon=1.0, delta=1e-5, noise_seed=0).fit(y)
    np.testing.assert_allclose(counts.counts_, [900, 100, 1], atol=20)
    weights = counts.class_weight()
    assert weights["b"] > 5 * weights["a"]
    assert weights["c"] == 10.0
    with pytest.raises(ValueError, match="classes must be all classes"):
        DPClassCounts().fit(y)


@pytest.mark.parametrize("names", [["no", "yes"], [["a"], "yes"]])
def test_a_word_is_no_list_of_categories(names: Any) -> None:
    """Its letters were, and no value of two columns was ever one."""
    with pytest.raises(ValueError, match=r"one list of public categories for each column"):
        DPOneHot(names).fit([["no", "yes"]])


def test_labels_that_are_no_classes_are_told_by_the_counts() -> None:
    """Of text where classes are numbers all are none, and every count was small without a word."""
    y = ["ill"] * 300
    with pytest.warns(UserWarning, match="fewer than half of the n records"):
        DPClassCounts([0, 1], epsilon=2.0).fit(y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DPClassCounts(["ill", "healthy"], epsilon=2.0).fit(y)
        DPClassCounts([0, 1], epsilon=0.01).fit(y[:20])  # the noise hides it


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "lower is missing"),
        ({"lower": 0}, "upper is missing"),
        ({"lower": [0, 1], "upper": 5}, "one for each of the 3 columns"),
        ({"lower": 5, "upper": [6, 5, 7]}, "column 1 has 5 and 5"),
        ({"lower": 0, "upper": math.inf}, "upper must be one finite number"),
        ({"lower": 0, "upper": 1, "epsilon": None}, "epsilon is missing"),
        ({"lower": 0, "upper": 1, "epsilon": -1}, "epsilon must be"),
        ({"lower": 0, "upper": 1, "delta": 2.0}, "delta must be between"),
        ({"lower": 0, "upper": 1, "neighboring": "add-or-remove-one"}, "n is missing"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    for kind in (DPStandardScaler, DPImputer):
        with pytest.raises(ValueError, match=said):
            kind(**{"epsilon": 1.0, **settings}).fit(table(100))


def test_what_is_learnt_is_charged() -> None:
    x = table(2000)
    with dpoptim.Ledger(neighboring="zero-out", epsilon=1.0, delta=1e-5) as ledger:
        settings: Any = {"epsilon": 0.6, "delta": 1e-5, "ledger": ledger}
        DPStandardScaler(**BOUNDS, **settings).fit(x)
        DPMinMaxScaler(**BOUNDS, **settings).fit(x)  # public bounds: free
        for second in (
            DPImputer(**BOUNDS, **settings),
            DPMinMaxScaler(**BOUNDS, quantile=0.1, **settings),
        ):
            with pytest.raises(dpoptim.BudgetExceeded):
                second.set_params(epsilon=0.95).fit(x)
        assert [entry.label for entry in ledger.entries()] == ["DPStandardScaler"]


def test_real_columns_scaled_at_a_small_epsilon() -> None:
    x, _ = load_breast_cancer(return_X_y=True)
    upper = 10.0 ** np.ceil(np.log10(x.max(0)))  # what an expert might say of each measurement
    scaler = DPStandardScaler(0.0, upper, epsilon=2.0, delta=1e-4, noise_seed=0).fit(x)
    half = upper / 2
    assert float(np.abs((scaler.mean_ - x.mean(0)) / half).max()) < 0.12


@pytest.mark.parametrize("rare", [0.1, 0.01, 0.002])
def test_a_scaler_does_not_cut_off_what_is_rare(rare: float) -> None:
    """Narrowed again and again, the range of a column with 1 % ones held its zeros alone."""
    x = (np.random.default_rng(0).random((20_000, 1)) < rare).astype(float)
    scaler = DPStandardScaler(lower=0, upper=1, epsilon=1.0, delta=1e-6, noise_seed=0).fit(x)
    assert abs(scaler.scale_[0] - x.std()) < 0.2 * x.std()


def test_ends_are_taken_back() -> None:
    table = np.array([[18.0, 0.0], [56.5, 5.0], [95.0, 10.0]])
    scaler = DPMinMaxScaler(lower=[18, 0], upper=[95, 10])
    scaled = scaler.fit_transform(table)
    assert np.allclose(scaler.inverse_transform(scaled), table)
    with pytest.raises(ValueError, match="expecting 2 features"):
        scaler.inverse_transform(scaled[:, :1])
