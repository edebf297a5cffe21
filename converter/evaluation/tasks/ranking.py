"""How good a ranking of documents is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

CUTOFF = 10
"""Documents of a ranking that count."""


def ndcg(ranked: Sequence[int], grades: Mapping[int, int]) -> float:
    """nDCG@10 (Järvelin and Kekäläinen 2002) with the grades as gains, as trec_eval and BEIR compute it.

    DCG is the sum over the ranks r = 1 to 10 of grade / log2(r + 1), and nDCG its share of the DCG that the
    best possible ranking has.

    Args:
        ranked: documents, best first; only the first ten count.
        grades: document -> its grade, at least 1; other documents have grade 0. Not empty.

    Returns:
        From 0 to 1.
    """
    best = sorted(grades.values(), reverse=True)
    return _dcg([grades.get(document, 0) for document in ranked]) / _dcg(best)


def first_is_relevant(ranked: Sequence[int], grades: Mapping[int, int]) -> float:
    """Accuracy@1: 1 if the best document is relevant, else 0."""
    return float(ranked[0] in grades)


def _dcg(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains[:CUTOFF]))
