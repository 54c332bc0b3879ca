"""Scores of generated texts against references: BLEU, NIST, ROUGE-L, CIDEr.

A text is a list of words; each generated one has several references. METEOR is left out: its stems
and synonyms need word lists that are in no package.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import mean

Text = Sequence[str]
References = Sequence[Sequence[Text]]
FAVOUR = 1.2  # of recall over precision in ROUGE-L, as usual for captions


def grams(text: Text, n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1))


def most(references: Sequence[Text], n: int) -> Counter[tuple[str, ...]]:
    """Count each n-gram as often as the reference does that has it most often."""
    found: Counter[tuple[str, ...]] = Counter()
    for reference in references:
        found |= grams(reference, n)
    return found


def bleu(texts: Sequence[Text], references: References) -> float:
    """Return BLEU of a whole corpus, in percent (Papineni et al. 2002): 4-grams, closest length."""
    logs = []
    for n in range(1, 5):
        found = [grams(text, n) for text in texts]
        matches = sum(
            (mine & most(theirs, n)).total() for mine, theirs in zip(found, references, strict=True)
        )
        if not matches:
            return 0.0
        logs.append(math.log(matches / sum(mine.total() for mine in found)))
    length = sum(map(len, texts))
    closest = sum(
        min((len(each) for each in theirs), key=lambda size: (abs(size - len(text)), size))
        for text, theirs in zip(texts, references, strict=True)
    )
    return 100 * math.exp(mean(logs) + min(0.0, 1 - closest / length))


def nist(texts: Sequence[Text], references: References) -> float:
    """Return NIST of a whole corpus (Doddington 2002): 5-grams, weighed by what they tell."""
    every = [text for theirs in references for text in theirs]
    counts: list[Counter[tuple[str, ...]]] = [Counter({(): sum(map(len, every))})]
    counts += [Counter(g for text in every for g in grams(text, n).elements()) for n in range(1, 6)]
    score = 0.0
    for n in range(1, 6):
        told, total = 0.0, 0
        for text, theirs in zip(texts, references, strict=True):
            mine = grams(text, n)
            total += mine.total()
            told += sum(
                times * math.log2(counts[n - 1][gram[:-1]] / counts[n][gram])
                for gram, times in (mine & most(theirs, n)).items()
            )
        score += told / max(total, 1)
    usual = sum(mean(map(len, theirs)) for theirs in references)
    shortness = min(sum(map(len, texts)) / usual, 1.0)
    if shortness == 0:
        return 0.0
    # half the score at two thirds of the usual length
    return score * math.exp(-math.log(2) * (math.log(shortness) / math.log(1.5)) ** 2)


def common(a: Text, b: Text) -> int:
    """Return the length of the longest subsequence of both."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if word == other else max(row[j], row[j - 1])
    return row[-1]


def rouge_l(texts: Sequence[Text], references: References) -> float:
    """Return the mean ROUGE-L, in percent (Lin 2004), of best recall and best precision."""
    scores = []
    for text, theirs in zip(texts, references, strict=True):
        shared = [common(text, each) for each in theirs]
        precision = max(shared) / max(len(text), 1)
        recall = max(c / max(len(each), 1) for c, each in zip(shared, theirs, strict=True))
        below = recall + FAVOUR**2 * precision
        scores.append((1 + FAVOUR**2) * precision * recall / below if below else 0.0)
    return 100 * mean(scores)


def cider(texts: Sequence[Text], references: References) -> float:
    """Return CIDEr (Vedantam et al. 2015), times ten: 1- to 4-grams, weighed by their rarity."""
    scores = []
    for n in range(1, 5):
        rarity = Counter(gram for theirs in references for gram in most(theirs, n))

        def weighed(
            text: Text, n: int = n, rarity: Counter[tuple[str, ...]] = rarity
        ) -> dict[tuple[str, ...], float]:
            found = grams(text, n)
            return {
                gram: times * math.log(len(references) / max(rarity[gram], 1))
                for gram, times in found.items()
            }

        for text, theirs in zip(texts, references, strict=True):
            mine = weighed(text)
            scores += [mean(cosine(mine, weighed(each)) for each in theirs)]
    return 10 * mean(scores)


def cosine(a: dict[tuple[str, ...], float], b: dict[tuple[str, ...], float]) -> float:
    norms = math.hypot(*a.values()) * math.hypot(*b.values())
    return sum(value * b.get(gram, 0.0) for gram, value in a.items()) / norms if norms else 0.0


SCORES = {"BLEU": bleu, "NIST": nist, "ROUGE-L": rouge_l, "CIDEr": cider}
