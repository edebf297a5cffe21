"""Find the document that holds a marked pair of words: the data for the small embedding models.

A document is a row of random words, with a mark before one pair of them. The query is the mark and the pair.
Every word stands in most documents, so an embedding has to say which ones follow the mark.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL_TOKENS = ("<unk>", "<cls>", "<sep>", "<pad>", "<mask>")
UNK, CLS, SEP, PAD, MASK = SPECIAL_TOKENS
MARK = "mark"
WORDS = tuple(f"word{number:02}" for number in range(48))
VOCABULARY = (*SPECIAL_TOKENS, MARK, *WORDS)
IDS = {token: number for number, token in enumerate(VOCABULARY)}
FIRST_WORD = IDS[WORDS[0]]
QUERY_TOKENS = 5
"""<cls>, the mark, two words, <sep>."""

Ids = NDArray[np.int64]


def build_tokenizer() -> Tokenizer:
    """A tokenizer that makes one token of each word, and puts <cls> and <sep> around a text."""
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}", special_tokens=[(CLS, IDS[CLS]), (SEP, IDS[SEP])]
    )
    return tokenizer


def draw(rng: np.random.Generator, *, pairs: int, length: int) -> tuple[Ids, Ids]:
    """Draw queries and their documents; all of their pairs of words are different.

    Args:
        length: tokens of a document, special ones included; at least 8.

    Returns:
        Queries, int64 [pairs, QUERY_TOKENS], and documents, int64 [pairs, length].
    """
    count = len(WORDS)
    chosen = rng.choice(count * count, size=pairs, replace=False)
    words = np.stack([chosen // count, chosen % count], axis=1) + FIRST_WORD
    queries = np.empty((pairs, QUERY_TOKENS), dtype=np.int64)
    queries[:] = IDS[CLS], IDS[MARK], 0, 0, IDS[SEP]
    queries[:, 2:4] = words
    documents = rng.integers(FIRST_WORD, FIRST_WORD + count, size=(pairs, length))
    documents[:, 0], documents[:, -1] = IDS[CLS], IDS[SEP]
    places = rng.integers(1, length - 3, size=pairs)
    rows = np.arange(pairs)
    documents[rows, places] = IDS[MARK]
    documents[rows, places + 1], documents[rows, places + 2] = words.T
    return queries, documents


def write_beir(folder: Path, *, pairs: int, length: int, seed: int) -> Path:
    """Write a folder in BEIR's format, and return it."""
    queries, documents = draw(np.random.default_rng([seed, length]), pairs=pairs, length=length)
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, rows in (("queries", queries), ("corpus", documents)):
        texts = (" ".join(VOCABULARY[token] for token in row[1:-1]) for row in rows)
        lines = (json.dumps({"_id": f"{name}-{number}", "text": text}) for number, text in enumerate(texts))
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    grades = "".join(f"queries-{number}\tcorpus-{number}\t1\n" for number in range(pairs))
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{grades}", encoding="utf-8")
    return folder
