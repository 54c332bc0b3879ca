"""Scores of texts by hand, and the parts of fine-tuning on E2E."""

import csv
import math
from pathlib import Path

import pytest
import torch

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.reproduce import dice_texts
from dpoptim.reproduce.dice_cases import log_likelihood
from dpoptim.reproduce.text_scores import SCORES, bleu, cider, common, nist, rouge_l

CAT = ["the", "cat", "sat", "on", "the", "mat"]
DOG = ["a", "dog", "stood", "by", "a", "door"]


def test_a_reference_itself_has_the_best_scores_and_other_words_have_none() -> None:
    references = [[CAT, DOG], [DOG]]
    assert bleu([CAT, DOG], references) == pytest.approx(100)
    assert rouge_l([CAT, DOG], references) == pytest.approx(100)
    assert cider([CAT, DOG], [[CAT], [DOG]]) == pytest.approx(10)
    for score in SCORES.values():
        assert score([["x", "y", "z", "u"]], [[CAT]]) == 0
        assert score([[]], [[CAT]]) == 0


def test_bleu_by_hand() -> None:
    """Of 5, 4, 3, 2 n-grams 5, 3, 2, 1 match; the text is a word shorter than its reference."""
    text = ["the", "cat", "sat", "on", "mat"]
    expected = 100 * (5 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25 * math.exp(1 - 6 / 5)
    assert bleu([text], [[CAT]]) == pytest.approx(expected)
    # a word counts as often as one reference has it
    twice = bleu([["the", "the", "the", "cat", "sat", "on", "the"]], [[CAT, CAT]])
    counted = 100 * (5 / 7 * 4 / 6 * 3 / 5 * 2 / 4) ** 0.25
    assert twice == pytest.approx(counted)


def test_nist_by_hand() -> None:
    """Five words seen once tell log2(6), the one seen twice log2(3); a pair tells what its second
    word does after its first.
    """
    words = (4 * math.log2(6) + 2 * math.log2(3)) / 6
    pairs = (2 * math.log2(2) + 3 * math.log2(1)) / 5  # "the cat", "the mat"
    assert nist([CAT], [[CAT]]) == pytest.approx(words + pairs)
    short = (3 * math.log2(6) + math.log2(3)) / 4 + math.log2(2) / 3
    assert nist([CAT[:4]], [[CAT]]) == pytest.approx(short / 2)  # two thirds as long


def test_rouge_and_cider_by_hand() -> None:
    assert common(["a", "b", "c", "d"], ["b", "x", "c", "a", "d"]) == 3
    text = ["the", "cat", "on", "a", "mat"]  # four of five, and of six, in order
    precision, recall = 4 / 5, 4 / 6
    expected = 2.44 * precision * recall / (recall + 1.44 * precision)
    assert rouge_l([text], [[CAT]]) == pytest.approx(100 * expected)
    # "cat" tells log 2, "the" nothing, as all have it; no pairs are shared
    found = cider([["the", "cat"], ["the"]], [[["cat", "the"]], [["the", "dog"]]])
    assert found == pytest.approx(10 * (1 / 4) / 2)


def write_folder(folder: Path) -> None:
    """Sentences that say the area that is asked for."""
    for name in ("devset.csv", "testset_w_refs.csv"):
        lines = ["mr,ref"]
        for area in ("city", "river", "forest", "hill", "sea", "lake"):
            meaning = f"name[Blue Spice], eatType[pub], area[{area}]"
            lines += [f'"{meaning}",Blue Spice is by the {area}.'] * 20
        (folder / name).write_text("\n".join(lines) + "\n")


def test_names_are_replaced_in_a_meaning_and_in_its_own_sentence() -> None:
    meaning, sentence = dice_texts.pair(
        "name[The Mill (old)], priceRange[less than £20], near[Café Rouge]",
        "Near café rouge, the mill (old) is cheap.",
    )
    assert meaning == ["name", "pricerange", "less", "than", "£", "20", "near"]
    assert sentence == ["near", "xnear", ",", "xname", "is", "cheap", "."]


def test_what_is_given_is_read_and_not_scored(tmp_path: Path) -> None:
    write_folder(tmp_path)
    texts = dice_texts.load_texts(tmp_path, public_epochs=0)
    x, following = texts.training
    assert len(x) == 80  # of six meanings one tests, and one is for settings
    row = texts.spell(x[0].tolist())
    assert row[:6] == ["name", "eattype", "pub", "area", "river", "\n"]
    assert texts.spell(following[0].tolist())[:6] == [""] * 5 + ["xname"]
    assert int(following[0][following[0] != 0][-1]) == texts.end
    assert texts.references == [[["xname", "is", "by", "the", "lake", "."]] * 20]


@pytest.mark.figures
def test_a_model_writes_what_it_has_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public sentences hold the answer; a private run is as long and as private as it says."""
    write_folder(tmp_path)
    monkeypatch.setattr(dice_texts, "LONGEST", 16)
    monkeypatch.setattr(dice_texts, "BATCH", 20)
    texts = dice_texts.load_texts(tmp_path, public_epochs=20)
    (sentence,) = dice_texts.written_sentence(texts.model, texts)
    assert sentence[:4] == ["xname", "is", "by", "the"]
    assert sentence[-1] == "."
    texts = dice_texts.load_texts(tmp_path, public_epochs=1)
    before = -log_likelihood(texts.model, *texts.test)
    epochs, scores = dice_texts.dice_texts(tmp_path, texts, seeds=1)
    assert [(row.method, row.epoch) for row in epochs] == [
        (method, epoch) for method in dice_texts.METHODS for epoch in (1, 2)
    ]
    for name, rows in (("dice_fig4.csv", epochs), ("dice_table3.csv", scores)):
        with (tmp_path / name).open() as file:
            assert len(list(csv.DictReader(file))) == len(rows)
    assert epochs[-1].loss < before
    for method in dice_texts.METHODS[:2]:
        plan = dice_texts.plan_of(method, 1000, texts.schedule)
        epsilon = compute_epsilon(plan.event, 8e-6, "zero-out").epsilon
        assert epsilon == pytest.approx(8, rel=0.02)
    assert dice_texts.plan_of(dice_texts.OPEN, 1000, texts.schedule).noise_multiplier == 0


def test_the_rate_rises_and_falls() -> None:
    factors = [dice_texts.rate_factor(t, 100) for t in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[9] == factors[10] == 1
    assert factors[-1] == 0
    assert torch.tensor(factors[10:]).diff().max() < 0
