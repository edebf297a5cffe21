"""``python -m tests.versions.models FOLDER [--oldest] NAME...``: converts tiny checkpoints.

They are as the newest libraries save them; with ``--oldest``, those that ``save`` wrote are converted. It
also stores what is right for each.
What is right is computed in NumPy float64 by ``tests/reference``, and by sentencepiece. Only what
``checks.NEWEST`` names is taken from the newest version.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import sentencepiece

from converter import convert
from tests import forks, runners, test_tokenizers, tiny
from tests.conftest import edit_json
from tests.patched import config_of
from tests.reference import ENCODERS, FAMILIES
from tests.test_sentence_transformers import source as embedding_source
from tests.tiny.jina_bert import QK
from tests.versions import checks, save

PADDED = 7
MASK = 10
"""The word of the tiny tokenizers that is an encoder's mask."""


@dataclass(frozen=True)
class Model:
    kind: str
    tiny: str
    """Name in ``tests.tiny``; of a tokenizer, in ``test_tokenizers.KINDS``."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the config."""
    edits: Mapping[str, Any] = field(default_factory=dict)
    """Of the config that was written; None takes a key away."""

    @property
    def head(self) -> Any:
        """As tests.tiny names it."""
        return {"embedding": "Model", "classifier": "SequenceClassification"}.get(self.kind)


DNABERT2 = {"_name_or_path": "zhihan1996/DNABERT-2-117M"} | dict.fromkeys(
    ("model_type", "architectures", "pad_token_id")
)
MODELS = {
    "bloom": Model("decoder", "bloom"),
    "mpt": Model("decoder", "mpt"),
    "replit": Model("decoder", "replit"),
    "falcon": Model("decoder", "falcon"),
    "mosaic_gpt": Model("decoder", "mosaic_gpt"),
    "jais": Model("decoder", "jais"),
    "btlm": Model("decoder", "jais", tiny.CHECKPOINTS["jais"].variants["btlm"]),
    "baichuan2": Model("decoder", "baichuan"),
    "baichuan": Model("decoder", "baichuan", {"norm_head": False}),
    "refact": Model("decoder", "refact"),
    "refact_first": Model("decoder", "refact", {"packed_projections": False}),
    "jina": Model("encoder", "jina_bert"),
    "jina_qk": Model("encoder", "jina_bert", QK),
    "mosaic_bert": Model("encoder", "mosaic_bert"),
    "dnabert2": Model("encoder", "mosaic_bert", edits=DNABERT2),
    "alberturin": Model("encoder", "alberturin"),
    "jina_embedding": Model("embedding", "jina_bert"),
    "jina_qk_embedding": Model("embedding", "jina_bert", QK),
    "bloom_classifier": Model("classifier", "bloom"),
    "mosaic_bert_classifier": Model("classifier", "mosaic_bert"),
    "replit_tokenizer": Model("tokenizer", "replit"),
    "baichuan_tokenizer": Model("tokenizer", "baichuan"),
}
SHORT = ["bloom", "mpt", "mosaic_bert", "replit_tokenizer"]
CONVERTED_AGAIN = ["bloom", "mosaic_bert"]
"""Whose sources are converted under each version, too."""
GUARDED = ["bloom", "replit_tokenizer"]
"""What versions that are too old are tried with."""


def write(folder: Path, model: Model) -> None:
    """The source of a model."""
    if model.kind == "embedding":
        embedding_source(folder, **model.changes)
    elif model.kind == "tokenizer":
        kind = test_tokenizers.KINDS[model.tiny]
        tiny.FACTORIES[kind.family](folder)
        edit_json(folder / "config.json", {"tokenizer_class": kind.original})
        test_tokenizers.give(folder, model.tiny, test_tokenizers.train(**kind.training))
    else:
        (tiny.FACTORIES | tiny.ENCODERS)[model.tiny](folder, head=model.head, **model.changes)
    edit_json(folder / "config.json", dict(model.edits))
    if model.kind == "encoder":
        edit_json(folder / "tokenizer_config.json", {"mask_token": f"w{MASK}", "padding_side": "right"})


def tokenizer(folder: Path, model: Model) -> dict[str, Any]:
    """Every text's ids."""
    file = folder / test_tokenizers.KINDS[model.tiny].model
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    texts = test_tokenizers.TEXTS
    return {"texts": np.array(texts), **{f"ids{n}": processor.encode(text) for n, text in enumerate(texts)}}


def network(folder: Path, model: Model) -> dict[str, Any]:
    """Inputs, and what a network gives for them."""

    def right(ids: Any, mask: Any = None, head: str | None = model.head) -> Any:
        return runners.expected(folder, model.tiny, ids, mask, head=head)

    left = model.tiny in FAMILIES
    mask = tiny.padding_mask([checks.LENGTH, checks.LENGTH - PADDED], "left" if left else "right")
    plain = tiny.token_ids(2, checks.LENGTH)
    ids = np.where(mask == 1, plain, tiny.PAD)
    stored = {"plain": plain, "ids": ids, "mask": mask, "padded": right(ids, mask)}
    if model.kind == "classifier":
        return stored | {"padded": stored["padded"][:, 0]}
    _, tensors = tiny.read(folder)
    trunk = (FAMILIES | ENCODERS)[model.tiny].trunk(config_of(folder), tensors, ids, mask, attentions=True)
    stored |= {"logits": right(plain), "attentions": trunk.attentions[0], "hidden": trunk.hidden}
    words = np.array([[tiny.START, 20, 21, MASK, 23]])
    if model.kind == "decoder":
        stored["greedy"], stored["scores"] = generate(right, ids, mask)
        stored["continued"] = generate(right, words, np.ones_like(words))[0]
    elif model.kind == "encoder":
        stored["filled"] = np.argsort(-right(words)[0, 3])[:3]
    else:
        texts = [[20, 21, 22], [*range(11, 61)], [30]]
        stored["texts"] = np.array([" ".join(f"w{word}" for word in text) for text in texts])
        stored["embeddings"] = [right(np.array([[tiny.START, *text]]))[0].mean(axis=0) for text in texts]
    return stored


def generate(right: Any, ids: Any, mask: Any) -> tuple[Any, Any]:
    """The likeliest tokens after ``ids``, one after the other, and their log-probabilities."""
    scores = []
    for _ in range(checks.NEW):
        last = right(ids, mask)[:, -1]
        logs = last - np.log(np.exp(last).sum(-1, keepdims=True))
        scores.append(logs.max(-1))
        ids = np.concatenate([ids, last.argmax(-1)[:, None]], axis=1)
        mask = np.concatenate([mask, np.ones_like(mask[:, :1])], axis=1)
    return ids, np.stack(scores, axis=1)


def quick(source: Path, folder: Path) -> None:
    convert(source, folder, train_length=16, dynamic="position", verify=False)


def convert_oldest(root: Path, names: list[str]) -> None:
    """Converts the sources that the oldest libraries saved."""
    for name in names:
        quick(root / "oldest" / name, root / "saved" / name)


def main(root: Path, names: list[str]) -> None:
    for name in names:
        model, folder = MODELS[name], root / "converted" / name
        write(root / "sources" / name, model)
        quick(root / "sources" / name, root / "plain" / name)
        save.save(root, name, "newest")
        quick(root / "newest" / name, folder)
        stored = (tokenizer if model.kind == "tokenizer" else network)(folder, model)
        file = folder.with_suffix(".npz")
        np.savez(file, kind=np.array(model.kind), **stored)
        case = checks.Case(folder)
        stored |= {key: each.run(case) for key, each in checks.NEWEST.items() if each.has(case)}
        np.savez(file, kind=np.array(model.kind), **stored)


if __name__ == "__main__":
    with mock.patch("converter.weights.worker.subprocess", forks):
        if sys.argv[2] == "--oldest":
            convert_oldest(Path(sys.argv[1]), sys.argv[3:])
        else:
            main(Path(sys.argv[1]), sys.argv[2:])
