"""Train the larger model of the evidence: text of several kinds, and lookups among it.

    python examples/train_large.py --out .evidence/large

The model is an MPT (10 layers x 256, 8 heads, slopes down to 2^-6, 512 trained tokens).

With text from the start, a model of this size keeps guessing among the values it has seen. So it first learns
lookups alone, in short sequences, and then half of its sequences are text, and half are text with records and
questions (`lines_task`) spread among it.

The text is what the machine holds: Python's standard library, documentation in English, and translated
messages of programs. So another machine trains another model; `training.json` has the SHA-256 of the text.
"""

from __future__ import annotations

import argparse
import gettext
import hashlib
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lines_task
import numpy as np
import text_task
import torch
import torch.nn.functional as F
import training
from lines_task import IGNORE, SPECIAL_TOKENS, Ids
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from train import PASS_ACCURACY, TOKENIZER_CONFIG, mpt_config

from converter.scaling.scaling import UNSCALED, Scaling
from converter.verification.imported import templates

LAYERS, HEADS, WIDTH, PIECES = 10, 8, 256, 4096
BIAS_MAX = 6
TRAINED_LENGTH = 512

MUON_RATE, EMBEDDING_RATE, HEAD_RATE = 0.01, 0.02, 2e-3
WARM_UP_STEPS = 50
DECAY = 0.5  # the share of the time in which the learning rates fall to zero
ANSWER_WEIGHT = 2.0  # of the mean loss of answers, beside that of text
SHORT_STAGES = (6, 12, 16, 32)  # records in a sequence of lookups alone
SHORT_TOKENS_PER_STEP, ROWS = 1024, 4
TOKENS_PER_RECORD = 16  # in text with records, of which about every second one is a question

SHARES = {"python": 0.4, "documentation": 0.4, "messages": 0.2}
"""How many of the sequences are of each kind of text."""
SHORTEST_FILE, LONGEST_FILE = 4_000, 200_000  # characters; of a longer file, the start is read
# The words of lines_task, each one token that does not occur in text. Their ids are those of lines_task.
WORDS = tuple(f"<{word}>" for word in lines_task.VOCABULARY[len(SPECIAL_TOKENS) :])

Flags = NDArray[np.bool_]
Batch = tuple[Ids, Ids, Flags]
"""Ids and targets, int64 of shape [rows, tokens] or [tokens], and which targets are answers."""
Files = dict[str, list[str]]
"""Kind of text -> its files."""


def read_corpus() -> tuple[Files, Files]:
    """The machine's text: files for the training, and one in ten, by the hash of its name, held out."""
    training: Files = {kind: [] for kind in SHARES}
    held_out: Files = {kind: [] for kind in SHARES}
    seen = set()
    for kind, name, text in _files():
        if len(text) >= SHORTEST_FILE and text not in seen:
            seen.add(text)
            part = training if hashlib.sha256(name.encode()).digest()[0] % 10 else held_out
            part[kind].append(text[:LONGEST_FILE])
    return training, held_out


def _files() -> Iterator[tuple[str, str, str]]:
    """Kind, name and content of each file."""
    for name, path in text_task.files():
        yield "python", name, path.read_text(encoding="utf-8")
    share = Path("/usr/share")
    for folder in ("doc", "vim", "cmake-*/Help"):
        for path in sorted(share.glob(f"{folder}/**/*")):
            if path.suffix in (".md", ".rst", ".txt") and path.is_file():
                yield "documentation", path.name, path.read_text(encoding="utf-8", errors="replace")
    for language in ("de", "es", "fr", "ru"):
        for path in sorted(share.glob(f"locale/{language}/LC_MESSAGES/*.mo")):
            try:
                with path.open("rb") as file:
                    catalogue: Any = gettext.GNUTranslations(file)
            except UnicodeDecodeError:  # a few state a wrong encoding
                continue
            yield "messages", path.name, "\n".join(text for key, text in catalogue._catalog.items() if key)


def build_tokenizer(files: Files) -> Tokenizer:
    """Byte-pair pieces of the text, after the words of `lines_task` at their own ids."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES,
        special_tokens=[*SPECIAL_TOKENS, *WORDS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text[:20_000] for text in itertools.chain(*files.values())), trainer)
    # Once more without the trainer's mark that the words are special: decoding shall show them.
    learnt = json.loads(tokenizer.to_str())
    for entry in learnt["added_tokens"]:
        entry["special"] = entry["content"] in SPECIAL_TOKENS
    return Tokenizer.from_str(json.dumps(learnt))


def prepare(out: Path) -> tuple[dict[str, Ids], dict[str, Any]]:
    """Reads the text, learns the pieces, and writes tokenizer.json and held-out.json.

    Returns:
        The training text of each kind in tokens, int64 arrays of shape [tokens]; and what the corpus is.
    """
    learnt, held_out = read_corpus()
    tokenizer = build_tokenizer(learnt)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "held-out.json").write_text(json.dumps(held_out), encoding="utf-8")
    text = {
        kind: np.concatenate([tokenizer.encode(each).ids for each in files]).astype(np.int64)
        for kind, files in learnt.items()
    }
    joined = "".join("\0".join(files) for part in (learnt, held_out) for files in part.values())
    about = {
        "text_sha256": hashlib.sha256(joined.encode()).hexdigest(),
        "tokens_of_text": {kind: len(ids) for kind, ids in text.items()},
    }
    return text, about


def config() -> dict[str, Any]:
    """The config.json; special tokens have the ids of `lines_task`."""
    return {
        **mpt_config("lines", HEADS, BIAS_MAX),
        "d_model": WIDTH,
        "max_seq_len": TRAINED_LENGTH,
        "n_layers": LAYERS,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "vocab_size": PIECES,
    }


@contextmanager
def network(scaling: Scaling = UNSCALED, attention: str = "sdpa") -> Iterator[Any]:
    """The model with fresh weights, in the code of converted models.

    It trains in half the time of transformers' `MptForCausalLM`, which also ignores `alibi_bias_max`.
    """
    with templates() as load:
        settings = load("configuration_ntk_mpt").NtkMptConfig(
            **config(), alibi_scaling=scaling.to_json(), attn_implementation=attention
        )
        model = load("modeling_ntk_mpt").NtkMptForCausalLM(settings)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        # As large as what the layers add to it; smaller ones leave the keys hard to tell apart.
        nn.init.normal_(model.transformer.wte.weight, std=1.0)
        nn.init.normal_(model.lm_head.weight, std=0.02)
        for block in model.transformer.blocks:
            nn.init.zeros_(block.attn.out_proj.weight)
            nn.init.zeros_(block.ffn.down_proj.weight)
        yield model


def spread(rng: np.random.Generator, tokens: int, records: int) -> Flags:
    """Draws which of all tokens of text and records, in order, are records; shape [tokens + records]."""
    is_record = np.zeros(tokens + records, dtype=bool)
    is_record[rng.permutation(len(is_record))[:records]] = True
    return is_record


def lookups(rng: np.random.Generator, sequences: int, records: int) -> Batch:
    """A batch of `lines_task`, with all keys, whose only targets are answers."""
    keys = len(lines_task.KEYS)
    ids, targets = lines_task.training_batch(rng, sequences=sequences, records=records, active_keys=keys)
    answers = (targets != IGNORE) & (targets != lines_task.TOKEN_IDS[lines_task.EOS])
    return ids, np.where(answers, targets, IGNORE), answers


def with_records(rng: np.random.Generator, piece: Ids) -> Batch:
    """A sequence of text, of as many tokens, with records at random places; targets are text and answers."""
    count = len(piece) // TOKENS_PER_RECORD
    kept = len(piece) - lines_task.TOKENS_PER_LINE * count
    records, wanted, is_answer = lookups(rng, 1, count)
    is_record = spread(rng, kept, count)
    of_records = np.repeat(is_record, np.where(is_record, lines_task.TOKENS_PER_LINE, 1))
    ids, answers = np.empty_like(piece), np.zeros(len(piece), dtype=bool)
    ids[of_records], ids[~of_records] = records[0], piece[:kept]
    answers[of_records] = is_answer[0]
    targets = np.append(np.where(of_records, IGNORE, ids)[1:], IGNORE)  # text that comes next
    targets[answers] = wanted[is_answer]
    return ids, targets, answers


def text_batch(rng: np.random.Generator, text: Mapping[str, Ids]) -> Batch:
    """Text, half of the rows with records among it, given the text of each kind in tokens."""
    rows = []
    for row, kind in enumerate(rng.choice(len(SHARES), size=ROWS, p=[*SHARES.values()])):
        ids = text[[*SHARES][kind]]
        start = rng.integers(len(ids) - TRAINED_LENGTH - 1)
        piece = ids[start : start + TRAINED_LENGTH + 1]
        none = np.zeros(TRAINED_LENGTH, dtype=bool)
        rows.append((piece[:-1], piece[1:], none) if row % 2 else with_records(rng, piece[:-1]))
    ids, targets, answers = map(np.stack, zip(*rows, strict=True))
    return ids, targets, answers


def build_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, norms and head."""
    trunk = model.transformer
    matrices = [each for each in trunk.blocks.parameters() if each.ndim == 2]
    norms = [each for each in trunk.parameters() if each.ndim == 1]
    groups = [
        {"params": [trunk.wte.weight], "lr": EMBEDDING_RATE},
        {"params": [*norms, model.lm_head.weight], "lr": HEAD_RATE},
    ]
    return [
        training.Muon(matrices, lr=MUON_RATE),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def update(
    model: Any, optimizers: list[torch.optim.Optimizer], batch: Batch, *, half: bool = True
) -> tuple[float, float]:
    """One step; returns the share of right answers, and the loss of text in nats (NaN without text).

    With ``half``, matrices are multiplied in bfloat16.
    """
    ids, targets, is_answer = map(torch.from_numpy, batch)
    asked = targets != IGNORE
    wanted, of_answers = targets[asked], is_answer[asked]
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        hidden = model.transformer(ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[asked]).float()
    losses = F.cross_entropy(logits, wanted, reduction="none")
    loss, text_loss = losses[of_answers].mean(), losses[~of_answers].mean()
    if not of_answers.all():
        loss = ANSWER_WEIGHT * loss + text_loss
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), training.CLIP_NORM)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        for optimizer in optimizers:
            optimizer.step()
    right = (logits.argmax(-1) == wanted)[of_answers].float().mean()
    return right.item(), text_loss.item()


def train(model: Any, text: Mapping[str, Ids], minutes: float, *, half: bool = True) -> dict[str, Any]:
    """Trains for so many minutes; returns how far it came. For ``half``, see ``update``."""
    rng = np.random.default_rng(0)
    optimizers = build_optimizers(model)
    steps = tokens = stage = 0
    seconds = accuracy = 0.0
    text_loss = math.nan
    while (share := seconds / 60 / minutes) < 1:
        started = time.monotonic()
        training.set_rates(optimizers, min(1.0, (steps + 1) / WARM_UP_STEPS, (1 - share) / DECAY))
        if short := stage < len(SHORT_STAGES):
            records = SHORT_STAGES[stage]
            rows = round(SHORT_TOKENS_PER_STEP / (lines_task.TOKENS_PER_LINE * records))
        batch = lookups(rng, rows, records) if short else text_batch(rng, text)
        right, new_loss = update(model, optimizers, batch, half=half)
        steps, tokens = steps + 1, tokens + batch[0].size
        accuracy = 0.95 * accuracy + 0.05 * right
        text_loss = new_loss if math.isnan(text_loss) else 0.98 * text_loss + 0.02 * new_loss
        if short and accuracy > PASS_ACCURACY:
            stage, accuracy = stage + 1, 0.0
        seconds += time.monotonic() - started
        if steps % 20 == 0:
            print(f"{seconds:.0f} s, {steps=}, {stage=}, {accuracy=:.2f}, {text_loss=:.3f}", flush=True)
    done = {"steps": steps, "tokens": tokens, "seconds": seconds, "minutes": minutes, "half": half}
    return {**done, "stage": stage, "accuracy": accuracy, "text_loss": text_loss}


def save(model: Any, out: Path, tokenizer: Tokenizer, record: dict[str, Any]) -> None:
    """Writes the checkpoint's files."""
    training.write(
        out,
        model.state_dict(),
        tokenizer,
        config=config(),
        tokenizer_config=TOKENIZER_CONFIG,
        training=record,
    )


def main() -> None:
    """Read the command line, train, save."""
    parser = argparse.ArgumentParser(description="Train the larger checkpoint.")
    parser.add_argument("--minutes", type=float, default=75.0, help="time of the training [%(default)s]")
    parser.add_argument(
        "--float32", action="store_true", help="for processors without instructions for bfloat16"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    text, about = prepare(arguments.out)
    with network() as model:
        tokenizer = Tokenizer.from_file(str(arguments.out / "tokenizer.json"))
        done = train(model.train(), text, arguments.minutes, half=not arguments.float32)
        save(model, arguments.out, tokenizer, {**done, **about})
    print(arguments.out)


if __name__ == "__main__":
    main()
