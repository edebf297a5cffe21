"""Train the larger model of the evidence: text of several kinds, and lookups among it.

    python examples/train_large.py --minutes 58 --out .evidence/large

The model is an MPT (8 layers x 256, 8 heads, slopes down to 2^-6, 512 trained tokens).

With text from the start, a model of this size keeps guessing among the values it has seen. So it first learns
lookups alone, in short sequences, and then half of its sequences are text, and half are text with records and
questions (`lines_task`) spread among it.

The text is what the machine holds: Python's standard library, documentation in English, and translated
messages of programs. So another machine has another text, and trains another model; `training.json` has the
SHA-256 of the text.
"""

from __future__ import annotations

import argparse
import gettext
import hashlib
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lines_task
import numpy as np
import text_task
import torch
import torch.nn.functional as F
from lines_task import IGNORE, SPECIAL_TOKENS, Ids
from muon import Muon
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from train import CLIP_NORM, TOKENIZER_CONFIG, mpt_config

from converter.scaling.slopes import stock_slopes

LAYERS, HEADS, WIDTH = 8, 8, 256
BIAS_MAX = 6
TRAINED_LENGTH = 512
PIECES = 4096
"""Tokens of the vocabulary."""
TOKENS_PER_STEP = 2048
SHORT_TOKENS_PER_STEP = 1024
"""While the model learns lookups alone."""
EMBEDDING_STD, HEAD_STD = 1.0, 0.02
"""Embeddings are as large as what the layers add to them; smaller ones leave the keys hard to tell apart."""
MUON_RATE, EMBEDDING_RATE, HEAD_RATE = 0.01, 0.02, 2e-3

SHORT_STAGES = (6, 12, 16, 32)
"""Records in a sequence of lookups alone."""
PASS_ACCURACY = 0.9
ANSWER_WEIGHT = 2.0
"""Of the mean loss of answers, beside that of text."""
TOKENS_PER_RECORD = 16
"""Of the sequences that have records: every second record is a question, so a line comes every 32 tokens."""
WARM_UP_STEPS = 50
DECAY = 0.5
"""The share of the time in which the learning rates fall to zero."""

DOCUMENTATION = ("doc", "vim", "cmake-*/Help")
"""Folders below /usr/share."""
LANGUAGES = ("de", "es", "fr", "ru")
SHARES = {"python": 0.4, "documentation": 0.4, "messages": 0.2}
"""How many of the sequences are of each kind of text."""
SHORTEST_FILE, LONGEST_FILE = 4_000, 200_000
"""In characters; of a longer file, the start is read."""

Flags = NDArray[np.bool_]
Corpus = dict[str, dict[str, list[str]]]
"""Part, which is ``training`` or ``held out`` -> kind of text -> its files."""
# The words of lines_task, each one token that does not occur in text. Their ids are those of lines_task.
WORDS = tuple(f"<{word}>" for word in lines_task.VOCABULARY[len(SPECIAL_TOKENS) :])


def read_corpus() -> Corpus:
    """Reads the text of the machine; one file in ten is held out, by the hash of its name."""
    corpus: Corpus = {part: {kind: [] for kind in SHARES} for part in ("training", "held out")}
    seen = set()
    for kind, name, text in _files():
        if len(text) >= SHORTEST_FILE and text not in seen:
            seen.add(text)
            part = "training" if hashlib.sha256(name.encode()).digest()[0] % 10 else "held out"
            corpus[part][kind].append(text[:LONGEST_FILE])
    return corpus


def _files() -> Iterator[tuple[str, str, str]]:
    """Kind, name and content of each file."""
    for name, path in text_task.files():
        yield "python", name, path.read_text(encoding="utf-8")
    share = Path("/usr/share")
    for folder in DOCUMENTATION:
        for path in sorted(share.glob(f"{folder}/**/*")):
            if path.suffix in (".md", ".rst", ".txt") and path.is_file():
                yield "documentation", path.name, path.read_text(encoding="utf-8", errors="replace")
    for language in LANGUAGES:
        for path in sorted(share.glob(f"locale/{language}/LC_MESSAGES/*.mo")):
            try:
                with path.open("rb") as file:
                    catalogue: Any = gettext.GNUTranslations(file)
            except UnicodeDecodeError:  # a few state a wrong encoding
                continue
            messages = [text for key, text in catalogue._catalog.items() if key]
            yield "messages", path.name, "\n".join(messages)


def build_tokenizer(corpus: Corpus) -> Tokenizer:
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
    files = itertools.chain.from_iterable(corpus["training"].values())
    tokenizer.train_from_iterator((text[:20_000] for text in files), trainer)
    # Once more without the trainer's mark that the words are special: decoding shall show them.
    learnt = json.loads(tokenizer.to_str())
    for entry in learnt["added_tokens"]:
        entry["special"] = entry["content"] in SPECIAL_TOKENS
    return Tokenizer.from_str(json.dumps(learnt))


def prepare(out: Path) -> tuple[dict[str, Ids], dict[str, Any]]:
    """Reads the text and learns the pieces, if `out` does not hold them yet.

    Returns:
        The training text of each kind in tokens, int64 arrays of shape [tokens]; and what the corpus is.
    """
    kept = out / "text.npz"
    if not kept.exists():
        corpus = read_corpus()
        tokenizer = build_tokenizer(corpus)
        tokenizer.save(str(out / "tokenizer.json"))
        text = {
            kind: np.concatenate([tokenizer.encode(each).ids for each in files]).astype(np.int64)
            for kind, files in corpus["training"].items()
        }
        joined = "".join("\0".join(files) for kinds in corpus.values() for files in kinds.values())
        about = {
            "characters": {
                part: {kind: sum(map(len, files)) for kind, files in kinds.items()}
                for part, kinds in corpus.items()
            },
            "text_sha256": hashlib.sha256(joined.encode()).hexdigest(),
            "tokens_of_text": {kind: len(ids) for kind, ids in text.items()},
        }
        (out / "held-out.json").write_text(json.dumps(corpus["held out"]), encoding="utf-8")
        (out / "text.json").write_text(json.dumps(about), encoding="utf-8")
        np.savez(kept, allow_pickle=False, **text)
    with np.load(kept) as found:
        about = json.loads((out / "text.json").read_text(encoding="utf-8"))
        return {kind: found[kind] for kind in SHARES}, about


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.norm_1, self.norm_2 = (nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.attn = nn.ModuleDict({"Wqkv": linear(WIDTH, 3 * WIDTH), "out_proj": linear(WIDTH, WIDTH)})
        self.ffn = nn.ModuleDict({"up_proj": linear(WIDTH, 4 * WIDTH), "down_proj": linear(4 * WIDTH, WIDTH)})

    def heads(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values, of shape [3, rows, heads, tokens, channels]."""
        joined: torch.Tensor = self.attn["Wqkv"](self.norm_1(hidden)).unflatten(-1, (3, HEADS, -1))
        return joined.permute(2, 0, 3, 1, 4)

    def forward(self, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Hidden states of shape [rows, tokens, width]; the bias has the shape [heads, tokens, tokens]."""
        query, key, value = self.heads(hidden)
        # With a bias of four dimensions, torch takes its fast path.
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None].to(query.dtype))
        hidden = hidden + self.attn["out_proj"](found.transpose(1, 2).flatten(2))
        up = F.gelu(self.ffn["up_proj"](self.norm_2(hidden)))
        out: torch.Tensor = hidden + self.ffn["down_proj"](up)
        return out


class Trunk(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(PIECES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm_f = nn.LayerNorm(WIDTH, bias=False)
        nn.init.normal_(self.wte.weight, std=EMBEDDING_STD)
        for name, matrix in self.blocks.named_parameters():
            if "out_proj" in name or "down_proj" in name:
                nn.init.zeros_(matrix)

    def forward(self, ids: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The last hidden states, of shape [rows, tokens, width], of ids of shape [rows, tokens]."""
        hidden: torch.Tensor = self.wte(ids)
        for block in self.blocks:
            hidden = block(hidden, bias)
        last: torch.Tensor = self.norm_f(hidden)
        return last


class Network(nn.Module):
    """The model, with the names of transformers' `MptForCausalLM`, and faster on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Trunk()
        self.lm_head = nn.Linear(WIDTH, PIECES, bias=False)
        nn.init.normal_(self.lm_head.weight, std=HEAD_STD)


def causal_bias(tokens: int, slopes: torch.Tensor | None = None) -> torch.Tensor:
    """ALiBi's bias and minus infinity for keys to come; float32 of shape [heads, tokens, tokens].

    Args:
        tokens: the number of tokens.
        slopes: of each head, or of each head and query, [heads, tokens]; by default the stock slopes.
    """
    places = torch.arange(tokens)
    distances = places[:, None] - places
    if slopes is None:
        slopes = torch.tensor(stock_slopes(HEADS, BIAS_MAX))
    bias = -slopes.reshape(HEADS, -1, 1) * distances
    return bias.masked_fill_(distances < 0, -math.inf)


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


def mixed(ids: Ids, records: Ids, rng: np.random.Generator) -> tuple[Ids, Flags]:
    """Spreads records at random places among a piece of text.

    Args:
        ids: the text, int64 array of shape [tokens].
        records: int64 array of shape [records, 3].
        rng: the source of randomness.

    Returns:
        The ids of both, of shape [tokens + 3 * records], and a bool array that says which are of records.
    """
    is_record = np.zeros(len(ids) + len(records), dtype=bool)
    is_record[rng.permutation(len(is_record))[: len(records)]] = True
    of_records = np.repeat(is_record, np.where(is_record, lines_task.TOKENS_PER_LINE, 1))
    row = np.empty(len(of_records), dtype=np.int64)
    row[of_records], row[~of_records] = records.reshape(-1), ids
    return row, of_records


def lookups(rng: np.random.Generator, sequences: int, records: int) -> tuple[Ids, Ids]:
    """A batch of `lines_task`, with all keys, whose only targets are answers."""
    keys = len(lines_task.KEYS)
    ids, targets = lines_task.training_batch(rng, sequences=sequences, records=records, active_keys=keys)
    return ids, np.where(targets == lines_task.TOKEN_IDS[lines_task.EOS], IGNORE, targets)


class Batches:
    """Draws batches: ids and targets of shape [rows, tokens], and which targets are answers."""

    def __init__(self, out: Path, rng: np.random.Generator) -> None:
        self.out, self.rng = out, rng

    @cached_property
    def text(self) -> dict[str, Ids]:
        """The training text of each kind, which lookups alone do not need."""
        return prepare(self.out)[0]

    def short(self, records: int) -> tuple[Ids, Ids, Flags]:
        """Lookups alone."""
        rows = round(SHORT_TOKENS_PER_STEP / (lines_task.TOKENS_PER_LINE * records))
        ids, targets = lookups(self.rng, rows, records)
        return ids, targets, targets != IGNORE

    def long(self) -> tuple[Ids, Ids, Flags]:
        """Half text, half text with records among it."""
        rows, length = TOKENS_PER_STEP // TRAINED_LENGTH, TRAINED_LENGTH
        count = length // TOKENS_PER_RECORD
        ids = np.empty((rows, length), dtype=np.int64)
        targets = np.empty_like(ids)
        answers = np.zeros(ids.shape, dtype=bool)
        kinds = self.rng.choice(len(SHARES), size=rows, p=[*SHARES.values()])
        for row, kind in enumerate(kinds):
            text = self.text[[*SHARES][kind]]
            start = self.rng.integers(len(text) - length - 1)
            piece = text[start : start + length + 1]
            if row % 2:
                ids[row], targets[row] = piece[:-1], piece[1:]
                continue
            records, wanted = lookups(self.rng, 1, count)
            joined, of_records = mixed(piece[: length - 3 * count], records.reshape(-1, 3), self.rng)
            following = np.append(np.where(of_records, IGNORE, joined)[1:], IGNORE)  # text that comes next
            following[of_records] = np.where(wanted[0] == IGNORE, following[of_records], wanted[0])
            ids[row], targets[row] = joined, following
            answers[row, of_records] = wanted[0] != IGNORE
        return ids, targets, answers


@dataclass
class State:
    """Where the training is."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stage: int = 0
    accuracy: float = 0.0
    text_loss: float = math.nan

    def add(self, accuracy: float, text_loss: float) -> None:
        """Adds a step to the running averages."""
        self.accuracy = 0.95 * self.accuracy + 0.05 * accuracy
        self.text_loss = text_loss if math.isnan(self.text_loss) else 0.98 * self.text_loss + 0.02 * text_loss


def train(minutes: float, out: Path, seed: int) -> tuple[Network, State]:
    """Trains for so many minutes."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    batches = Batches(out, rng)
    network, state = Network(), State()
    matrices = [each for each in network.transformer.blocks.parameters() if each.ndim == 2]
    embedding = network.transformer.wte.weight
    ids_of_others = {id(each) for each in (*matrices, embedding)}
    others = [each for each in network.parameters() if id(each) not in ids_of_others]
    groups = [{"params": [embedding], "lr": EMBEDDING_RATE}, {"params": others, "lr": HEAD_RATE}]
    optimizers = [
        Muon(matrices, lr=MUON_RATE),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [group["lr"] for each in optimizers for group in each.param_groups]
    settings = [group for each in optimizers for group in each.param_groups]
    whole_bias = causal_bias(TRAINED_LENGTH)
    while (share := state.seconds / 60 / minutes) < 1:
        started = time.monotonic()
        now = min(1.0, (state.steps + 1) / WARM_UP_STEPS, (1 - share) / DECAY)
        for group, rate in zip(settings, rates, strict=True):
            group["lr"] = rate * now
        short = state.stage < len(SHORT_STAGES)
        ids, targets, answers = batches.short(SHORT_STAGES[state.stage]) if short else batches.long()
        wanted, is_answer = torch.from_numpy(targets), torch.from_numpy(answers)
        with torch.autocast("cpu", torch.bfloat16):
            tokens = ids.shape[1]
            hidden = network.transformer(torch.from_numpy(ids), whole_bias[:, :tokens, :tokens])
            asked = wanted != IGNORE
            logits = network.lm_head(hidden[asked]).float()
        losses = F.cross_entropy(logits, wanted[asked], reduction="none")
        of_answers = is_answer[asked]
        loss = losses[of_answers].mean()
        if not short:
            loss = ANSWER_WEIGHT * loss + losses[~of_answers].mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), CLIP_NORM)
        with torch.autocast("cpu", torch.bfloat16):
            for optimizer in optimizers:
                optimizer.step()
        right = (logits.argmax(-1) == wanted[asked])[of_answers].float().mean().item()
        state.add(right, math.nan if short else losses[~of_answers].mean().item())
        state.steps += 1
        state.tokens += ids.size
        if short and state.accuracy > PASS_ACCURACY:
            state.stage, state.accuracy = state.stage + 1, 0.0
        state.seconds += time.monotonic() - started
        if state.steps % 20 == 0:
            print(f"{loss.item():.3f} {state} lr {now:.2f}", flush=True)
    save(network, out, {**vars(state), "minutes": minutes, "seed": seed, **prepare(out)[1]})
    return network, state


def save(network: Network, out: Path, training: dict[str, Any]) -> None:
    """Writes the checkpoint's files, beside the tokenizer."""
    weights = {name: tensor.detach().contiguous() for name, tensor in network.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    training = {**training, "torch": torch.__version__}
    for name, content in (
        ("config.json", config()),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("training.json", training),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line, train, save."""
    parser = argparse.ArgumentParser(description="Train the larger checkpoint.")
    parser.add_argument("--minutes", type=float, default=58.0, help="time of the training [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data [%(default)s]")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    train(arguments.minutes, arguments.out, arguments.seed)
    print(arguments.out)


if __name__ == "__main__":
    main()
