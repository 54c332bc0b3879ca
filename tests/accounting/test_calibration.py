"""Calibration: never above the budget, hardly below it, and a cache that can only save time."""

import json
import logging
import math

import dp_accounting as dp
import pytest

from dpoptim.accounting import (
    calibrate_event,
    calibrate_noise_multiplier,
    calibration,
    compute_epsilon,
    gdp_epsilon,
)
from dpoptim.accounting.calibration import calibrate_remembered
from dpoptim.accounting.min_separation import MinSeparationDpEvent
from support import pairs

RELATIONS = ["add-or-remove-one", "zero-out", "replace-one"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPOPTIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def dp_sgd(rate, noise, steps):
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), steps)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("epsilon", "rate", "steps"),
    pairs([0.25, 0.5, 1.0, 2.0, 8.0], [0.004, 0.03, 0.2, 1.0], [1, 100, 3_000]),
)
def test_the_budget_is_kept_and_used(rate, steps, epsilon):
    arguments = {"delta": 1e-5, "neighboring": "add-or-remove-one"}
    noise = calibrate_noise_multiplier(sample_rate=rate, steps=steps, epsilon=epsilon, **arguments)
    spent = compute_epsilon(dp_sgd(rate, noise, steps), **arguments).epsilon
    assert 0.99 * epsilon <= spent <= epsilon


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("rate", [0.05, 1.0])
def test_every_relation(relation, rate):
    noise = calibrate_noise_multiplier(
        sample_rate=rate, steps=200, epsilon=3.0, delta=1e-6, neighboring=relation
    )
    assert 2.97 <= compute_epsilon(dp_sgd(rate, noise, 200), 1e-6, relation).epsilon <= 3.0


def test_reference_noise():
    noise = calibrate_noise_multiplier(
        sample_rate=500 / 60_000,
        steps=6_000,
        epsilon=2.0,
        delta=1e-5,
        neighboring="add-or-remove-one",
    )
    assert noise == pytest.approx(1.477, rel=5e-3)


def test_full_batches_invert_the_exact_profile():
    noise = calibrate_noise_multiplier(
        sample_rate=1.0, steps=25, epsilon=1.0, delta=1e-5, neighboring="replace-one"
    )
    epsilon = gdp_epsilon(2 * 5 / noise, 1e-5)
    assert 1 - 1e-9 <= epsilon <= 1


def test_any_event_can_be_calibrated():
    def selection_then_training(noise):
        return dp.ComposedDpEvent([dp.LaplaceDpEvent(5.0), dp_sgd(0.02, noise, 300)])

    noise = calibrate_event(
        selection_then_training, epsilon=2.0, delta=1e-6, neighboring="zero-out"
    )
    spent = compute_epsilon(selection_then_training(noise), 1e-6, "zero-out").epsilon
    assert 1.98 <= spent <= 2.0
    # What the selection costs, the training lacks.
    alone = calibrate_event(
        lambda z: dp_sgd(0.02, z, 300), epsilon=2.0, delta=1e-6, neighboring="zero-out"
    )
    assert noise > 1.02 * alone


def test_events_without_pld_are_calibrated_by_rdp():
    noise = calibrate_event(
        lambda z: dp.ZCDpEvent(0.5 / z**2), epsilon=1.0, delta=1e-5, neighboring="zero-out"
    )
    found = compute_epsilon(dp.ZCDpEvent(0.5 / noise**2), 1e-5, "zero-out")
    assert found.accountant == "RDP"
    assert 0.99 <= found.epsilon <= 1.0


def test_budgets_out_of_reach_are_refused():
    with pytest.raises(ValueError, match=r"^epsilon: 1 .* cannot be met"):
        calibrate_event(
            lambda z: dp.ComposedDpEvent([dp.LaplaceDpEvent(0.5), dp_sgd(0.02, z, 10)]),
            epsilon=1.0,
            delta=1e-6,
            neighboring="zero-out",
        )
    with pytest.raises(ValueError, match=r"^epsilon: .* almost no noise"):
        calibrate_noise_multiplier(
            sample_rate=1e-6, steps=2, epsilon=1.0, delta=1e-3, neighboring="zero-out"
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sample_rate", 0.0),
        ("sample_rate", 1.01),
        ("sample_rate", math.nan),
        ("steps", 0),
        ("steps", 10.0),
        ("steps", True),
        ("epsilon", 0.0),
        ("epsilon", -1.0),
        ("epsilon", math.inf),
        ("epsilon", math.nan),
        ("delta", 0.0),
        ("delta", 1.0),
        ("delta", 1e-15),
        ("delta", math.nan),
        ("neighboring", "remove"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(name, value):
    arguments = {
        "sample_rate": 0.01,
        "steps": 10,
        "epsilon": 1.0,
        "delta": 1e-5,
        "neighboring": "zero-out",
    }
    with pytest.raises(ValueError, match=f"^{name}: "):
        calibrate_noise_multiplier(**(arguments | {name: value}))


# --- The cache -----------------------------------------------------------------------------------

CELL = {"sample_rate": 0.05, "steps": 40, "epsilon": 1.0, "delta": 1e-5, "neighboring": "zero-out"}


@pytest.fixture
def searches(monkeypatch):
    """Counts the searches that are really made."""
    made = []
    search = calibration.calibrate_event

    def counting(*args, **kwargs):
        made.append(kwargs["epsilon"])
        return search(*args, **kwargs)

    monkeypatch.setattr(calibration, "calibrate_event", counting)
    return made


def stored_file(cache):
    (file,) = cache.iterdir()
    return file


def test_a_second_call_finds_the_first_result(cache, searches):
    first = calibrate_noise_multiplier(**CELL)
    assert calibrate_noise_multiplier(**CELL) == first
    assert len(searches) == 1
    assert json.loads(stored_file(cache).read_text())["noise_multiplier"] == first


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sample_rate", 0.06),
        ("steps", 41),
        ("epsilon", 1.1),
        ("delta", 2e-5),
        ("neighboring", "replace-one"),
    ],
)
def test_every_argument_is_part_of_the_key(cache, searches, name, value):
    calibrate_noise_multiplier(**CELL)
    calibrate_noise_multiplier(**(CELL | {name: value}))
    assert len(searches) == 2
    assert len(list(cache.iterdir())) == 2


def test_another_version_of_dp_accounting_is_another_key(searches, monkeypatch):
    calibrate_noise_multiplier(**CELL)
    monkeypatch.setattr(calibration, "version", lambda name: "0.0.0")
    calibrate_noise_multiplier(**CELL)
    assert len(searches) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"noise_multiplier": 0.01}']
)
def test_corrupt_files_are_replaced(cache, searches, content):
    first = calibrate_noise_multiplier(**CELL)
    stored_file(cache).write_bytes(content)
    assert calibrate_noise_multiplier(**CELL) == first
    assert len(searches) == 2
    assert json.loads(stored_file(cache).read_text())["noise_multiplier"] == first


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "value", [0.1, 0.0, -1.0, "1.0", True, None, 100.0, 5e-324, 1e-5, 1e300, math.inf, math.nan]
)
def test_a_stored_value_that_does_not_meet_the_budget_is_not_believed(cache, searches, value):
    first = calibrate_noise_multiplier(**CELL)
    data = json.loads(stored_file(cache).read_text())
    stored_file(cache).write_text(json.dumps(data | {"noise_multiplier": value}))
    assert calibrate_noise_multiplier(**CELL) == first
    assert len(searches) == 2


def test_a_cache_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    expected = calibrate_noise_multiplier(**CELL)
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("DPOPTIM_CACHE_DIR", str(blocked / "below"))
    assert calibrate_noise_multiplier(**CELL) == expected


def test_an_interrupted_write_leaves_nothing_behind(cache, monkeypatch):
    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    calibrate_noise_multiplier(**CELL)
    assert list(cache.iterdir()) == []


def test_the_default_place_follows_the_desktop_standard(tmp_path, monkeypatch):
    monkeypatch.delenv("DPOPTIM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    calibrate_noise_multiplier(**CELL)
    assert len(list((tmp_path / "xdg" / "dpoptim").iterdir())) == 1


def waiting_apart(noise):
    return MinSeparationDpEvent(noise, (1.0,), (1.0,), (4,), 0.3, 1, 1 << 12)


class Heard(logging.Handler):
    """Keeps what calibrations say of themselves while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self._log = logging.getLogger("dpoptim.accounting")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        self._log.addHandler(self)
        self._before = self._log.level
        self._log.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *exception: object) -> None:
        self._log.setLevel(self._before)
        self._log.removeHandler(self)


def test_calibrations_by_monte_carlo_say_so_and_are_remembered(cache, searches):
    budget = {"epsilon": 1.0, "delta": 1e-5, "neighboring": "add-or-remove-one"}
    with Heard() as said:
        first = calibrate_remembered(waiting_apart, **budget)
        assert {line.split(":")[0] for line in said} == {"calibrating, roughly", "calibrating"}
        assert f"at noise multiplier {first:.4g};" in said[-1]
        said.clear()
        assert calibrate_remembered(waiting_apart, **budget) == first
        (line,) = said
    assert line.startswith("evaluating a noise multiplier of earlier")
    assert len(searches) == 1
    assert 0.99 <= compute_epsilon(waiting_apart(first), 1e-5, "zero-out").epsilon <= 1
    stored = json.loads(stored_file(cache).read_text())
    stored_file(cache).write_text(json.dumps(stored | {"noise_multiplier": first / 2}))
    assert calibrate_remembered(waiting_apart, **budget) == first
    assert len(searches) == 2


def test_calibrations_that_are_quick_say_nothing():
    with Heard() as said:
        calibrate_noise_multiplier(**CELL)
    assert said == []
