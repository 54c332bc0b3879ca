"""Sentences for properties, by models fine-tuned with and without error feedback.

Cf. Zhang et al. 2024, Table 3 and Fig. 4: E2E, clip norm 1, (8, 8e-6)-DP, AdamW, warmed up and then
falling. The paper fine-tunes GPT-2 on 42,000 texts: `dice_pretrained` does, for readers who have
its weights, which are in no package. Here a GPT of one narrow layer learns the test set's
sentences, about pubs and restaurants, as public data and without privacy; it is fine-tuned on some
3,700 of the development set's, about coffee shops, for two epochs at about the paper's rate of
sampling and, as there, one learning rate for all, and tested on others of these. Only sentences
count for the loss. Names are replaced by marks, in a meaning and its own sentence, as is usual on
E2E: a small model cannot copy. Zero-out; noise as it is proven, not as published.
"""

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TypeVar

import torch
from torch import nn

from dpoptim.plan import Plan
from dpoptim.reproduce import dice_cases
from dpoptim.reproduce.dice_cases import PADDING, UNKNOWN, SmallGPT
from dpoptim.reproduce.dice_gpt import DELTA, EPSILON
from dpoptim.reproduce.dice_table import OPEN, candidates
from dpoptim.reproduce.private_runs import Arrays, private_steps
from dpoptim.reproduce.results import deviation, write_rows
from dpoptim.reproduce.text_scores import SCORES

CLIP_NORM = 1.0  # C1 and C2, as in the paper
BATCH, EPOCHS, PUBLIC_EPOCHS = 64, 2, 8
RATE = 0.01  # at the top, for all methods
LONGEST = 64  # words of a meaning and its sentence
KNOWN_WORDS, WIDTH = 256, 32
MARK = "\n"  # between meaning and sentence, and at the end
NAMES = ("name", "near")  # properties that are replaced
METHODS = ("DP-SGD", "DiceSGD", OPEN)

Words = list[str]
Meaning = TypeVar("Meaning", bound=Hashable)


@dataclass(frozen=True)
class Epoch:
    """Mean loss of a word of the test sentences when an epoch has ended."""

    method: str
    epoch: int
    loss: float
    standard_deviation: float
    seeds: int


@dataclass(frozen=True)
class Score:
    """A score of the sentences written for the test meanings, by the most likely words."""

    method: str
    measure: str
    score: float
    standard_deviation: float
    seeds: int


@dataclass(frozen=True)
class Schedule:
    """Settings of training.

    Attributes:
        rate: of the step at the top; all methods have the same.
        rows: at a time, to train and to test; None: a whole batch, 256 to test.
    """

    batch_size: int
    epochs: int
    rate: float
    rows: int | None = None


@dataclass(frozen=True)
class Texts:
    """E2E by number: what is trained on, and what is tested on.

    Attributes:
        model: takes numbers (texts, places), gives scores (texts, places, numbers); has learnt what
            is public.
        meanings: of the tests, each once, by number.
        references: the sentences for each, by words.
        spell: the words that numbers stand for.
        end: the number that ends a sentence.
        never: numbers that no sentence is written with.
        longest: numbers of a meaning and its sentence.
    """

    training: Arrays
    test: Arrays
    meanings: Sequence[Sequence[int]]
    references: Sequence[Sequence[Sequence[str]]]
    model: nn.Module
    spell: Callable[[Sequence[int]], list[str]]
    end: int
    never: Sequence[int]
    longest: int
    schedule: Schedule


def pair(meaning: str, sentence: str) -> tuple[list[str], list[str]]:
    """Return the words of both, `NAMES` replaced: "name", "eattype", "coffee", "shop"; ..."""
    found: list[str] = []
    for key, value in re.findall(r"([^\[\],]+)\[([^\]]*)\]", meaning):
        known = key.strip().lower()
        if known in NAMES:
            sentence = re.sub(re.escape(value), f"x{known}", sentence, flags=re.IGNORECASE)
            found.append(known)
        else:
            found += dice_cases.words(f"{known} {value}")
    return found, dice_cases.words(sentence)


def arrays(pairs: Iterable[tuple[Sequence[int], Sequence[int]]], longest: int) -> Arrays:
    """Numbers, and those after them, of what is given and what is asked for as one text each.

    Both of shape (texts, longest - 1), padded with `PADDING`; longer texts are cut. Nothing is
    learnt about what is given.
    """
    kept = list(pairs)
    rows = torch.full((len(kept), longest), PADDING)
    for row, (given, asked) in zip(rows, kept, strict=True):
        whole = [*given, *asked][:longest]
        row[: len(whole)] = torch.tensor(whole)
    x, following = rows[:, :-1], rows[:, 1:].clone()
    for row, (given, _) in zip(following, kept, strict=True):
        row[: len(given) - 1] = PADDING
    return x, following


def by_meaning(records: Iterable[tuple[Meaning, Words]]) -> dict[Meaning, list[Words]]:
    """The sentences for each meaning."""
    found: dict[Meaning, list[Words]] = {}
    for meaning, sentence in records:
        found.setdefault(meaning, []).append(sentence)
    return found


def load_texts(directory: Path, public_epochs: int = PUBLIC_EPOCHS) -> Texts:
    """Read the folder of the E2E challenge, and learn what is public."""
    private, public = (
        [pair(*each) for each in dice_cases.records(directory / name)]
        for name in ("devset.csv", "testset_w_refs.csv")
    )
    counts = Counter(word for each in public for words in each for word in words)
    known = [word for word, _ in counts.most_common(KNOWN_WORDS - 3)]
    words = ("", "?", MARK, *known)
    places = {word: i for i, word in enumerate(words)}
    sentences = by_meaning((tuple(meaning), sentence) for meaning, sentence in private)
    every = list(sentences)
    test = every[5::10]  # settings were chosen on every[::10]
    training = [meaning for i, meaning in enumerate(every) if i % 5]

    def numbers(words: Sequence[str]) -> list[int]:
        return [places.get(word, UNKNOWN) for word in (*words, MARK)]

    def of(pairs: Iterable[tuple[Sequence[str], Sequence[str]]]) -> Arrays:
        return arrays([(numbers(meaning), numbers(each)) for meaning, each in pairs], LONGEST)

    def every_pair(meanings: Sequence[tuple[str, ...]]) -> Arrays:
        return of((meaning, each) for meaning in meanings for each in sentences[meaning])

    return Texts(
        every_pair(training),
        every_pair(test),
        [numbers(each) for each in test],
        [sentences[meaning] for meaning in test],
        pretrained(of(public), public_epochs),
        lambda written: [words[i] for i in written],
        places[MARK],
        (PADDING, UNKNOWN),
        LONGEST,
        Schedule(BATCH, EPOCHS, RATE),
    )


def pretrained(part: Arrays, epochs: int) -> SmallGPT:
    """Learn public sentences, without privacy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SmallGPT(KNOWN_WORDS, WIDTH, 1, LONGEST)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        x, y = part
        steps = [each for _ in range(epochs) for each in torch.randperm(len(x)).split(BATCH)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: rate_factor(t, len(steps)))
    for batch in steps:
        dice_cases.word_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


@torch.no_grad()
def written_sentence(model: nn.Module, texts: Texts) -> list[list[str]]:
    """Return the sentence for each meaning, word by word the most likely one."""
    ends = torch.tensor([len(meaning) for meaning in texts.meanings])
    rows = torch.full((len(ends), texts.longest - 1), PADDING)
    for row, meaning in zip(rows, texts.meanings, strict=True):
        row[: len(meaning)] = torch.tensor(meaning)
    device = texts.training[0].device
    for t in range(int(ends.min()), texts.longest - 1):
        open_ = torch.nonzero(ends == t)[:, 0]  # those whose next place this is
        for part in open_.split(texts.schedule.rows or max(1, len(open_))):
            scores = model(rows[part, :t].to(device))[:, -1]
            scores[:, list(texts.never)] = -math.inf
            rows[part, t] = following = scores.argmax(1).cpu()
            ends[part[following != texts.end]] += 1
    return [
        texts.spell(row[len(meaning) : end].tolist())
        for row, meaning, end in zip(rows, texts.meanings, ends.tolist(), strict=True)
    ]


def plan_of(method: str, n: int, schedule: Schedule) -> Plan:
    """Return the plan of one of `METHODS`."""
    batches, epochs = [schedule.batch_size], [schedule.epochs]
    ((_, plan),) = candidates(n, EPSILON, epochs, batches, [CLIP_NORM], [method], delta=DELTA)
    return plan


def rate_factor(done: int, steps: int) -> float:
    """Return a step's share of the highest rate: a tenth of the steps rise, the rest fall."""
    rise = max(1, steps // 10)
    return min((done + 1) / rise, (steps - done) / (steps - rise))


def train(plan: Plan, texts: Texts, seed: int) -> tuple[list[float], nn.Module]:
    """Return the mean loss of a test word when each epoch has ended, and the model."""
    model, schedule = copy.deepcopy(texts.model), texts.schedule
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.rate)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: rate_factor(t, plan.steps))
    ends = {round(plan.steps * e / schedule.epochs) for e in range(1, schedule.epochs + 1)}
    losses = []
    for private in private_steps(
        plan, model, optimizer, texts.training, dice_cases.text_losses, seed, schedule.rows
    ):
        rates.step()
        if private.steps_done in ends:
            losses.append(-dice_cases.log_likelihood(model, *texts.test, schedule.rows or 256))
    return losses, model


def dice_texts(
    out: Path,
    texts: Texts,
    *,
    seeds: int = 3,
    suffix: str = "",
    paper: Callable[[Score], float] | None = None,
) -> tuple[list[Epoch], list[Score]]:
    """Measure all methods; write two CSV into the folder ``out``.

    ``dice_fig4<suffix>.csv`` has losses by epoch; ``dice_table3<suffix>.csv`` has scores, and
    beside them what ``paper`` returns for each.
    """
    epochs: list[Epoch] = []
    scores: list[Score] = []
    for method in METHODS:
        plan = plan_of(method, len(texts.training[0]), texts.schedule)
        runs = [train(plan, texts, seed) for seed in range(1, seeds + 1)]
        for epoch, found in enumerate(zip(*(losses for losses, _ in runs), strict=True), 1):
            epochs.append(Epoch(method, epoch, mean(found), deviation(found), seeds))
        written = [written_sentence(model, texts) for _, model in runs]
        for measure, score in SCORES.items():
            values = [score(each, texts.references) for each in written]
            scores.append(Score(method, measure, mean(values), deviation(values), seeds))
        write_rows(out / f"dice_fig4{suffix}.csv", Epoch, epochs)
        write_rows(out / f"dice_table3{suffix}.csv", Score, scores, paper)
    return epochs, scores
