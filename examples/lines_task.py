"""The `lines` retrieval task of LongEval, with words of one token each.

A prompt is a list of records `LINE key value`, followed by one question `ASK key`; the answer is the value in
that key's line::

    LINE amber-otter 17
    LINE quiet-heron 32
    ASK amber-otter            -> 17

Every word is one token, so a line takes three tokens and the question two, and no parsing is needed to decide
whether an answer is right. A key never repeats within a prompt.

    python examples/lines_task.py --lengths 256,1024 --items 300 lines.jsonl

writes prompts for `ntk-convert eval --prompts lines.jsonl`. This module defines the words, and draws training
sequences and evaluation prompts; the training script, the demo and the evidence import it. All randomness
comes from the `numpy.random.Generator` that the caller passes in.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

# The special tokens have the same ids as in the BLOOM tokenizer.
UNK, BOS, EOS, PAD = SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
LINE, ASK = "LINE", "ASK"
VALUES = tuple(str(number) for number in range(10, 42))
_ADJECTIVES = """
amber brave bright calm clever drowsy dusty eager faint frosty gentle golden hollow humble icy jolly
keen lucky mellow misty noble orange proud quiet rusty silver tidy upbeat velvet windy young zesty
"""
_ANIMALS = """
badger beetle bison cricket donkey falcon ferret gecko heron lynx magpie
marten moose otter puffin salmon squid stork toad viper walrus weasel
"""
KEYS = tuple(f"{adjective}-{animal}" for adjective in _ADJECTIVES.split() for animal in _ANIMALS.split())

VOCABULARY = (*SPECIAL_TOKENS, LINE, ASK, *VALUES, *KEYS)
TOKEN_IDS = {token: index for index, token in enumerate(VOCABULARY)}

TOKENS_PER_LINE = 3
TOKENS_PER_QUESTION = 2
IGNORE = -100  # the target of a position without loss, as in torch.nn.functional.cross_entropy

_FIRST_VALUE = TOKEN_IDS[VALUES[0]]
_FIRST_KEY = TOKEN_IDS[KEYS[0]]

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Prompt:
    """One evaluation item."""

    text: str
    """With one record per line; it ends with the question's key."""
    answer: str
    input_ids: Ids
    """The token ids of `text`, int64 array of shape [tokens]."""
    answer_id: int
    asked_line: int
    """Which line holds the answer, counted from 0."""


def lines_that_fit(tokens: int) -> int:
    """How many lines fit into `tokens` tokens together with the question and its one-token answer."""
    return (tokens - TOKENS_PER_QUESTION - 1) // TOKENS_PER_LINE


def evaluation_prompt(rng: np.random.Generator, tokens: int) -> Prompt:
    """Draw a prompt with distinct keys and one question about a line chosen uniformly.

    It has as many lines as fit into so many tokens, answer included.

    Raises:
        ValueError: the number of lines is not between 1 and the number of keys.
    """
    lines = lines_that_fit(tokens)
    if not 1 <= lines <= len(KEYS):
        raise ValueError(f"a prompt has 1 to {len(KEYS)} lines (one for each key), got {lines}")

    keys = rng.permutation(len(KEYS))[:lines]
    values = rng.integers(len(VALUES), size=lines)
    asked_line = int(rng.integers(lines))
    answer = VALUES[values[asked_line]]
    records = [f"{LINE} {KEYS[key]} {VALUES[value]}" for key, value in zip(keys, values, strict=True)]
    text = "\n".join([*records, f"{ASK} {KEYS[keys[asked_line]]}"])
    input_ids = np.array([TOKEN_IDS[word] for word in text.split()], dtype=np.int64)
    return Prompt(text, answer, input_ids, TOKEN_IDS[answer], asked_line)


def build_tokenizer() -> Tokenizer:
    """A tokenizer that splits at white space and looks up the words."""
    tokenizer = Tokenizer(models.WordLevel(TOKEN_IDS, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def training_batch(
    rng: np.random.Generator, *, sequences: int, records: int, active_keys: int
) -> tuple[Ids, Ids]:
    """Draw training sequences in which about half of the records are questions.

    One question per sequence would teach far too little in a few minutes of training. So every record except
    the first is, with probability one half, a question `ASK key value` about an earlier line, chosen
    uniformly.

    Args:
        rng: the source of randomness.
        sequences: the number of rows.
        records: lines and questions in each row.
        active_keys: draw keys only from the first `active_keys` of `KEYS`; at least `records`.

    Returns:
        `input_ids` and `targets`, int64 arrays of shape [sequences, 3 * records]. The target at a position is
        the token that should follow: the value after a question's key, `</s>` after that value (so that
        `generate` stops there), and `IGNORE` everywhere else, since the next line cannot be predicted.
    """
    if not 1 <= records <= active_keys <= len(KEYS):
        raise ValueError(f"need 1 <= records <= active_keys <= {len(KEYS)}, got {records} and {active_keys}")

    is_question = rng.random((sequences, records)) < 0.5
    is_question[:, 0] = False
    lines_before: Ids = np.cumsum(~is_question, axis=1) - ~is_question
    # The line that a record is about: a new one for a line, an earlier one for a question.
    about = np.where(
        is_question, (rng.random((sequences, records)) * lines_before).astype(np.int64), lines_before
    )
    everything = np.broadcast_to(np.arange(active_keys), (sequences, active_keys))
    keys = np.take_along_axis(rng.permuted(everything, axis=1), about, axis=1)
    values = np.take_along_axis(rng.integers(len(VALUES), size=(sequences, records)), about, axis=1)

    input_ids = np.empty((sequences, records, TOKENS_PER_LINE), dtype=np.int64)
    input_ids[..., 0] = np.where(is_question, TOKEN_IDS[ASK], TOKEN_IDS[LINE])
    input_ids[..., 1] = _FIRST_KEY + keys
    input_ids[..., 2] = _FIRST_VALUE + values
    targets = np.full_like(input_ids, IGNORE)
    targets[is_question, 1] = input_ids[is_question, 2]
    targets[is_question, 2] = TOKEN_IDS[EOS]
    return input_ids.reshape(sequences, -1), targets.reshape(sequences, -1)


def document(rng: np.random.Generator, tokens: int) -> str:
    """A text of so many tokens as the models were trained on: as many records as fit, then ends of text."""
    count = tokens // TOKENS_PER_LINE
    ids, _ = training_batch(rng, sequences=1, records=count, active_keys=len(KEYS))
    words = [VOCABULARY[token] for token in ids[0]] + [EOS] * (tokens - count * TOKENS_PER_LINE)
    return " ".join(words) + "\n"


def prompts_as_json(lengths: Sequence[int], items: int, seed: int) -> str:
    """Evaluation prompts in the format of `ntk-convert eval --prompts`, with one JSON object per line.

    Args:
        lengths: tokens of a prompt with its answer; the prompts of one length do not depend on the others.
        items: the number of prompts of each length.
        seed: the same seed gives the same prompts; a larger `items` only adds prompts.
    """
    rows = []
    for length in lengths:
        rng = np.random.default_rng([seed, length])
        for _ in range(items):
            prompt = evaluation_prompt(rng, tokens=length)
            depth = prompt.asked_line / max(1, lines_that_fit(length) - 1)
            rows.append(
                {"prompt": prompt.text, "answer": prompt.answer, "length": length, "depth": round(depth, 2)}
            )
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """Read the command line, write prompts."""
    parser = argparse.ArgumentParser(description="Write prompts for ntk-convert eval --prompts.")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument(
        "--lengths",
        type=lambda text: [int(length) for length in text.split(",")],
        default=[256, 512, 1024, 2048],
        help="tokens of a prompt with its answer [256,512,1024,2048]",
    )
    parser.add_argument("--items", type=int, default=300, help="prompts of each length [%(default)s]")
    arguments = parser.parse_args()
    text = prompts_as_json(arguments.lengths, arguments.items, seed=0)
    arguments.out.write_text(text, encoding="utf-8")
    print(arguments.out)


if __name__ == "__main__":
    main()
