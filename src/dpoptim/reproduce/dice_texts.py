"""Sentences for properties, by models fine-tuned with and without error feedback.

Cf. Zhang et al. 2024, Table 3 and Fig. 4: E2E, clip norm 1, (8, 8e-6)-DP, AdamW, warmed up and then
falling. The paper fine-tunes GPT-2, whose weights are in no package, on 42,000 texts. Here a GPT of
one narrow layer learns the test set's sentences, about pubs and restaurants, as public data and
without privacy; it is fine-tuned on some 3,700 of the development set's, about coffee shops, for
two epochs at about the paper's rate of sampling and, as there, one learning rate for all, and
tested on others of these. Only sentences count for the loss. Names are replaced by marks, in a
meaning and its own sentence, as is usual on E2E: a small model cannot copy. Zero-out; noise as it
is proven, not as published.
"""

import copy
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpoptim.plan import Plan
from dpoptim.reproduce import dice_cases
from dpoptim.reproduce.dice_cases import PADDING, UNKNOWN, Arrays, SmallGPT
from dpoptim.reproduce.dice_gpt import DELTA, EPSILON
from dpoptim.reproduce.dice_table import OPEN, candidates
from dpoptim.reproduce.kl_rates import write_rows
from dpoptim.reproduce.text_scores import SCORES
from dpoptim.training.attach import attach

CLIP_NORM = 1.0  # C1 and C2, as in the paper
BATCH, EPOCHS, PUBLIC_EPOCHS = 64, 2, 8
RATE = 0.01  # at the top, for all methods
LONGEST = 64  # words of a meaning and its sentence
KNOWN_WORDS, WIDTH = 256, 32
MARK = "\n"  # between meaning and sentence, and at the end
NAMES = ("name", "near")  # properties that are replaced
METHODS = ("DP-SGD", "DiceSGD", OPEN)


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
class Texts:
    """E2E by number: what is trained on, and what is tested on.

    Attributes:
        model: has learnt the public sentences.
        meanings: of the tests, each once.
        references: the sentences for each.
    """

    training: Arrays
    test: Arrays
    words: Sequence[str]
    meanings: Sequence[Sequence[int]]
    references: Sequence[Sequence[Sequence[str]]]
    model: SmallGPT


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
    by_meaning: dict[tuple[str, ...], list[list[str]]] = {}
    for meaning, sentence in private:
        by_meaning.setdefault(tuple(meaning), []).append(sentence)
    every = list(by_meaning)
    test = every[5::10]  # settings were chosen on every[::10]
    training = [meaning for i, meaning in enumerate(every) if i % 5]

    def arrays(pairs: Iterable[tuple[Sequence[str], Sequence[str]]]) -> Arrays:
        kept = list(pairs)
        whole = [[*meaning, MARK, *sentence, MARK] for meaning, sentence in kept]
        x, following = dice_cases.numbered(whole, places, LONGEST)
        following = following.clone()  # it shares its numbers with x
        for row, (meaning, _) in zip(following, kept, strict=True):
            row[: len(meaning)] = PADDING  # nothing is learnt about what is given
        return x, following

    def of(meanings: Sequence[tuple[str, ...]]) -> Arrays:
        return arrays((meaning, each) for meaning in meanings for each in by_meaning[meaning])

    return Texts(
        of(training),
        of(test),
        words,
        [[places.get(word, UNKNOWN) for word in (*each, MARK)] for each in test],
        [by_meaning[meaning] for meaning in test],
        pretrained(arrays(public), public_epochs),
    )


def pretrained(part: Arrays, epochs: int) -> SmallGPT:
    """Learn public sentences, without privacy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SmallGPT(KNOWN_WORDS, WIDTH, 1, LONGEST)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        x, y = part
        steps = [each for _ in range(epochs) for each in torch.randperm(len(x)).split(BATCH)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: factor(t, len(steps)))
    for batch in steps:
        dice_cases.word_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


@torch.no_grad()
def write(model: nn.Module, texts: Texts) -> list[list[str]]:
    """Return the sentence for each meaning, word by word the most likely one."""
    ends = torch.tensor([len(meaning) for meaning in texts.meanings])
    rows = torch.full((len(ends), LONGEST - 1), PADDING)
    for row, meaning in zip(rows, texts.meanings, strict=True):
        row[: len(meaning)] = torch.tensor(meaning)
    every = torch.arange(len(ends))
    for t in range(int(ends.min()), LONGEST - 1):
        open_ = every[ends == t]  # those whose next place this is
        if len(open_) == 0:
            continue
        scores = model(rows[open_, :t])[:, -1]
        scores[:, [PADDING, UNKNOWN]] = -math.inf
        rows[open_, t] = following = scores.argmax(1)
        ends[open_[following != texts.words.index(MARK)]] += 1
    return [
        [texts.words[int(i)] for i in row[len(meaning) : end]]
        for row, meaning, end in zip(rows, texts.meanings, ends.tolist(), strict=True)
    ]


def plan_of(method: str, n: int) -> Plan:
    """Return the plan of one of `METHODS`."""
    ((_, plan),) = candidates(n, EPSILON, [EPOCHS], [BATCH], [CLIP_NORM], [method], delta=DELTA)
    return plan


def factor(done: int, steps: int) -> float:
    """Return a step's share of the highest rate: a tenth of the steps rise, the rest fall."""
    rise = max(1, steps // 10)
    return min((done + 1) / rise, (steps - done) / (steps - rise))


def train(plan: Plan, texts: Texts, seed: int) -> tuple[list[float], nn.Module]:
    """Return the mean loss of a test word when each epoch has ended, and the model."""
    model = copy.deepcopy(texts.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: factor(t, plan.steps))
    ends = {round(plan.steps * epoch / EPOCHS) for epoch in range(1, EPOCHS + 1)}
    losses = []
    with attach(plan, model, optimizer, TensorDataset(*texts.training), noise_seed=seed) as private:
        for x, y in private.batches():
            private.backward(dice_cases.text_losses(model(x), y))
            optimizer.step()
            schedule.step()
            if private.steps_done in ends:
                losses.append(-dice_cases.log_likelihood(model, *texts.test))
    return losses, model


def dice_texts(out: Path, texts: Texts, *, seeds: int = 3) -> tuple[list[Epoch], list[Score]]:
    """Write ``dice_fig4.csv``, losses by epoch, and ``dice_table3.csv``, scores, into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    epochs: list[Epoch] = []
    scores: list[Score] = []
    for method in METHODS:
        plan = plan_of(method, len(texts.training[0]))
        runs = [train(plan, texts, seed) for seed in range(1, seeds + 1)]
        for epoch, found in enumerate(zip(*(losses for losses, _ in runs), strict=True), 1):
            epochs.append(Epoch(method, epoch, mean(found), spread(found), seeds))
        written = [write(model, texts) for _, model in runs]
        for measure, score in SCORES.items():
            values = [score(each, texts.references) for each in written]
            scores.append(Score(method, measure, mean(values), spread(values), seeds))
        write_rows(out / "dice_fig4.csv", Epoch, epochs)
        write_rows(out / "dice_table3.csv", Score, scores)
    return epochs, scores


def spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else math.nan
