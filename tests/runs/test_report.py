"""The report is one sound, self-contained page that says what the certificate says."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib as mpl
import pytest

from dpoptim.runs.certificate import guarantee_in_words
from dpoptim.runs.drawing import power_of_ten
from dpoptim.runs.report import report
from dpoptim.runs.result import RunResult
from finished_run import SEEDED, UNPROVEN, small_run

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Reads a page; fails where tags do not balance."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), "a script"
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href", "action", "data"):
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def run() -> RunResult:
    return small_run()


def test_the_page_is_sound_and_fetches_nothing(run: RunResult) -> None:
    text = report(run)
    page = Page(text)
    assert page.tags.count("svg") == 4
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert len(page.ids) == len(set(page.ids))
    assert page.links
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert all(name in page.ids for name in re.findall(r"url\(#([^)]+)\)", text))
    assert "http" not in text.replace("http-equiv", "")
    assert "@import" not in text


def test_it_says_what_the_certificate_says(run: RunResult) -> None:
    words = Page(report(run)).text
    assert str(run.guarantee) in words
    assert " ".join(guarantee_in_words(run).split()) in words
    for part in (
        "Proven",
        "add-or-remove-one",
        "PLD accounting",
        "r-17",
        "ledger.db",
        "2026-07-25 at 14:03",
        "dpoptim account --n 1000",
        "softmax regression trained on digits",
        "torch",
        *(item.text for item in run.basis),
    ):
        assert part in words
    assert "secret-folder" not in words


def test_accuracies_are_shown_only_with_scores_and_said_to_be_public(run: RunResult) -> None:
    shown = Page(report(run)).text
    for part in ("71.2 %", "94.6 %", "23.3 points", "on data declared public"):
        assert part in shown
    hidden = Page(report(replace(run, private_scores=None, comparison_scores=None)))
    assert "ccuracy" not in hidden.text
    assert hidden.tags.count("svg") == 3


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("private", "comparison"),
    [
        ((0.5,), (0.5,)),
        ((0.5,), None),
        (None, (0.9, 0.95)),
        ((0.0, 0.0), (1.0, 1.0)),
        ((0.1,) * 300, (0.2,) * 3),
    ],
)
def test_it_copes_with_any_scores(
    run: RunResult, private: tuple[float, ...] | None, comparison: tuple[float, ...] | None
) -> None:
    page = Page(report(replace(run, private_scores=private, comparison_scores=comparison)))
    assert page.tags.count("svg") == 4


def test_hostile_names_stay_text(run: RunResult) -> None:
    hostile = "</title><script>alert(1)</script>\"'&{x}$\\bad$" + "long" * 100
    everywhere = replace(
        run,
        data_name=hostile,
        model_name=hostile,
        settings={hostile: hostile},
        versions={hostile: hostile},
        guarantee=replace(run.guarantee, notes=(hostile,), unit=hostile),
        basis=(UNPROVEN,),
        finished=hostile,
    )
    page = Page(report(everywhere))
    assert "script" not in page.tags
    assert "this" not in page.tags
    assert hostile in page.text


def test_a_seeded_run_is_not_for_release(run: RunResult) -> None:
    page = Page(report(replace(run, guarantee=replace(run.guarantee, notes=(SEEDED,)))))
    assert "Seeded: not for release" in page.text
    assert "must not be released" in page.text
    assert "Proven" not in page.text
    assert "best guess" not in page.text
    assert "(not a guarantee)" in page.text


def test_what_is_unproven_is_said_first(run: RunResult) -> None:
    page = Page(report(replace(run, basis=(*run.basis, UNPROVEN))))
    assert "! Unproven" in page.text
    assert page.text.index(UNPROVEN.text) < page.text.index("Enforced in code")
    assert "are not a guarantee" in page.text
    status = "unproven (counterexample known)"
    known = Page(
        report(
            replace(run, guarantee=replace(run.guarantee, status=status, notes=("see the notes",)))
        )
    )
    assert "Unproven (counterexample known)" in known.text
    assert "see the notes" in known.text
    assert "What an attacker can do" not in known.text


def test_without_noise_it_says_so_and_draws_no_curves() -> None:
    page = Page(report(replace(small_run(noise_multiplier=0), ledger=None)))
    assert "No privacy" in page.text
    assert "∞" in page.text
    assert "no privacy: the noise is off" in page.text
    assert page.tags.count("svg") == 1
    assert "Enforced in code" not in page.text
    assert "dpoptim account" not in page.text


@pytest.mark.parametrize(("neighboring", "noise"), [("zero-out", 20.0), ("replace-one", 0.4)])
def test_it_copes_with_weak_and_strong_privacy(neighboring: str, noise: float) -> None:
    result = small_run(neighboring=neighboring, noise_multiplier=noise)
    assert f"epsilon, {neighboring}" in Page(report(result)).text


@pytest.mark.parametrize("delta", [1e-12, 0.0123])
def test_the_plans_delta_may_lie_outside_the_usual_range(run: RunResult, delta: float) -> None:
    plan = run.plan.method.plan(n=1000, batch_size=1000, steps=1, noise_multiplier=3.0, delta=delta)  # type: ignore[attr-defined]
    page = Page(report(replace(run, plan=plan, guarantee=plan.guarantee)))
    assert power_of_ten(delta) in page.text


def test_the_same_run_makes_the_same_bytes_and_leaves_matplotlib_alone(run: RunResult) -> None:
    before = dict(mpl.rcParams)
    first = report(run)
    mpl.rcParams["font.size"] = 31  # the user's settings do not reach the report
    try:
        again = report(run)
    finally:
        mpl.rcParams["font.size"] = before["font.size"]
    assert dict(mpl.rcParams) == before
    assert first == again
    assert len(first) < 200_000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-5, "10⁻⁵"),
        (1e-10, "10⁻¹⁰"),
        (1.0 / 60000, "1.67 × 10⁻⁵"),
        (0.0, "0"),
        (9.999e-6, "10⁻⁵"),
        (1.0, "10⁰"),
    ],
)
def test_powers_of_ten(value: float, text: str) -> None:
    assert power_of_ten(value) == text


def test_where_a_number_is_predicted_nothing_is_called_accuracy(run: RunResult) -> None:
    scores = {"private_scores": (-0.2, 0.7123), "comparison_scores": (0.8, 0.9456)}
    text = Page(report(replace(run, classes=0, **scores))).text
    assert "accura" not in text.lower()
    assert "Private R2" in text
    assert "0.712" in text
    assert "0.233" in text  # the price of privacy, in R2
    assert "accuracy" in Page(report(run)).text
