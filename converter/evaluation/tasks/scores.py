"""How good an answer or a ranking is."""

from __future__ import annotations

import collections
import math
import re
import string
from collections.abc import Mapping, Sequence

CUTOFF = 10
"""Documents of a ranking that count."""
_NUMBER = re.compile("[0-9]+")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def first_number(text: str) -> str | None:
    """The digits of the first number in ``text``, without leading zeros; None if there is no number."""
    found = _NUMBER.search(text)
    return None if found is None else found.group().lstrip("0") or "0"


def starts_with(text: str, answer: str) -> float:
    """1 if ``text``, after leading space, begins with ``answer`` and not with a longer word or number."""
    text = text.lstrip()
    return float(text.startswith(answer) and not text[len(answer) : len(answer) + 1].isalnum())


def topic_named(text: str, topic: str) -> float:
    """1 if ``text`` has all words of the topic but a leading "The", whatever their case and punctuation."""
    return float(f" {plain_topic(topic)} " in f" {' '.join(_letters(text))} ")


def plain_topic(topic: str) -> str:
    """A topic's words without a leading "the"."""
    found = _letters(topic)
    return " ".join(found[1:] if found[:1] == ["the"] else found)


def classification_score(text: str, answer: str, classes: Sequence[str]) -> float:
    """1 / (number of classes named in the first line of ``text``) if ``answer`` is among them, else 0.

    A class whose name is part of the answer's name does not count. As in LongBench.
    """
    line = text.lstrip("\n").split("\n")[0]
    named = [each for each in classes if each in line and (each == answer or each not in answer)]
    return 1 / len(named) if answer in named else 0.0


def qa_f1(text: str, answer: str) -> float:
    """F1 score of the words in ``text`` and ``answer``; a repeated word counts each time. As in LongBench."""
    found, expected = _words(text), _words(answer)
    shared = (collections.Counter(found) & collections.Counter(expected)).total()
    return 2 * shared / (len(found) + len(expected)) if shared else 0.0


def ndcg(ranked: Sequence[int], grades: Mapping[int, int]) -> float:
    """nDCG@10 (Järvelin and Kekäläinen 2002) with the grades as gains, as trec_eval and BEIR compute it.

    DCG is the sum over the ranks r = 1 to 10 of grade / log2(r + 1), and nDCG its share of the DCG that the
    best possible ranking has. ``grades`` has those above 0, and is not empty.
    """
    best = sorted(grades.values(), reverse=True)
    return _dcg([grades.get(document, 0) for document in ranked]) / _dcg(best)


def _dcg(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains[:CUTOFF]))


def _letters(text: str) -> list[str]:
    """The words of ``text`` in lower case; every character except letters and digits separates words."""
    return "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()


def _words(text: str) -> list[str]:
    """The words in lower case, without articles and without ASCII punctuation, even inside words."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
