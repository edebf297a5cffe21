"""Embeds texts with a loaded encoder, and ranks documents by them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from converter.errors import UnsupportedModel
from converter.evaluation.batches import batches_by_length, padded
from converter.evaluation.runner import Hardware, check_ids
from converter.evaluation.tasks.scores import CUTOFF
from converter.evaluation.tasks.task import Collection, Ids, Retrieval
from converter.progress import Advance
from converter.source.keys import check_vectors
from converter.source.library_files import SENTENCES_CONFIG as SETTINGS
from converter.source.sentence_transformers import Pooling, read_pooling
from converter.source.source import Source, plain_text
from converter.texts import pooled

Vectors = NDArray[np.float32]
ROWS_AT_ONCE = 64
"""Texts whose similarities with all others are in memory at a time."""
MEAN = Pooling(("mean",), normalised=False)


def pooling_of(source: Source) -> Pooling:
    """How a repository makes one vector of a text, by its files for sentence-transformers.

    Without these files it is the mean, as in JinaBERT's own ``encode`` and in DNABERT-2's README. Raises
    ``UnsupportedModel`` where it is something that is not computed here: another vector would be measured.
    """
    found = read_pooling(source)
    if found is None:
        return MEAN
    settings = source.object(SETTINGS)
    prompts = settings.get("prompts")
    if settings.get("default_prompt_name") or (isinstance(prompts, dict) and any(prompts.values())):
        raise UnsupportedModel(
            f"{SETTINGS} puts prompts before texts, which eval does not; remove them, or put them into "
            "the texts yourself"
        )
    if settings.get("similarity_fn_name") not in (None, "cosine"):
        raise UnsupportedModel(
            f"{SETTINGS} scores by {plain_text(settings['similarity_fn_name'])}; only cosine is computed here"
        )
    check_vectors(source)
    return found


@torch.inference_mode()
def embed(
    model: Any, pooling: Pooling, hardware: Hardware, texts: Sequence[Ids], advance: Advance = int
) -> Vectors:
    """One vector of length 1 for each text, float32 [texts, modes * hidden]; NaN if it overflowed."""
    check_ids(model, max((max(text) for text in texts), default=0))
    width = len(pooling.modes) * model.config.hidden_size
    found = np.empty((len(texts), width), dtype=np.float32)
    for rows in batches_by_length([len(text) for text in texts], hardware.rows):
        ids, real = padded([texts[row] for row in rows], hardware.device)
        states = model.base_model(ids, attention_mask=real).last_hidden_state
        real = real.to(states.device)
        found[rows] = F.normalize(pooled(states.float(), real, pooling), dim=-1).cpu().numpy()
        advance(int(real.sum()))
    return found


def find(
    model: Any,
    pooling: Pooling,
    hardware: Hardware,
    task: Retrieval,
    texts: Collection,
    advance: Advance = int,
) -> tuple[tuple[float, ...], str]:
    """A score for each query of a collection, from 0 to 1, and a digest of all vectors."""
    documents = embed(model, pooling, hardware, texts.documents, advance)
    queries = embed(model, pooling, hardware, texts.queries, advance)
    scores = tuple(
        task.score(ranked, grades)
        for ranked, grades in zip(rank(queries, documents, texts), texts.relevant, strict=True)
    )
    digest = hashlib.sha256(documents.data)
    digest.update(queries.data)
    return scores, digest.hexdigest()


def rank(queries: Vectors, documents: Vectors, texts: Collection) -> list[list[int]]:
    """The ten most similar documents of each query by cosine, best first.

    Among equals, relevant documents come last: a model that maps everything to one point finds nothing. NaN
    counts as the least similarity.
    """
    found = []
    for start in range(0, len(queries), ROWS_AT_ONCE):
        similar = np.nan_to_num(queries[start : start + ROWS_AT_ONCE] @ documents.T, nan=-np.inf)
        for query, row in enumerate(similar, start=start):
            own = texts.left_out[query] if texts.left_out else None
            last = np.partition(row, -min(CUTOFF + 1, len(row)))[-min(CUTOFF + 1, len(row))]
            near = [int(place) for place in np.flatnonzero(row >= last) if place != own]
            grades = texts.relevant[query]
            near.sort(key=lambda place: (-row[place], grades.get(place, 0), place))
            found.append(near[:CUTOFF])
    return found
