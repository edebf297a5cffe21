"""Train the small encoders of the evidence.

    python examples/train_encoders.py --task pairs --heads 8 --out pairs-8-0
    python examples/train_encoders.py --task masked --heads 12 --seed 1 --out masked-12-1

The models are MosaicBERTs, trained on rows of at most 128 tokens. There are two tasks: to embed a document so
that its query finds it (`pairs_task`), with a contrastive loss over the other documents of a step; and to
predict masked bytes of Python source (`text_task`). The same seed gives the same weights, bit for bit, on the
same machine with the same versions.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pairs_task
import text_task
import torch
import torch.nn.functional as F
import training
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm

from converter.verification.imported import templates

Task = Literal["pairs", "masked"]

TRAINED_LENGTH = 128
LAYERS = 2
HEAD_SIZE = 8
MUON_LEARNING_RATE, ADAM_LEARNING_RATE = 0.02, 3e-3
EMBEDDING_STD = 0.1
PAIRS_STAGES = ((16, 100), (32, 80), (64, 60), (TRAINED_LENGTH, 180))
"""Tokens of the documents, and steps: short documents are cheap, and make the beginning easy."""
STEPS = {"pairs": sum(steps for _, steps in PAIRS_STAGES), "masked": 300}
DECAY = 0.5
"""Share of the steps over which the learning rates fall to zero."""
PAIRS_PER_STEP, ROWS_PER_STEP = 32, 24
TEMPERATURE = 0.05
MASKED = 0.15
MASK = "<mask>"

Step = Callable[[Any, np.random.Generator, int], torch.Tensor]
"""Model, source of randomness, steps done -> loss."""


def vocabulary(task: Task) -> tuple[str, ...]:
    """The tokens, in the order of their ids."""
    return pairs_task.VOCABULARY if task == "pairs" else (*text_task.TOKENS, MASK)


def config(task: Task, heads: int) -> dict[str, Any]:
    """The config.json, with the keys of a published MosaicBERT."""
    return {
        "alibi_starting_size": TRAINED_LENGTH,
        "architectures": ["BertModel" if task == "pairs" else "BertForMaskedLM"],
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": HEAD_SIZE * heads,
        "intermediate_size": 2 * HEAD_SIZE * heads,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": TRAINED_LENGTH,
        "model_type": "bert",
        "num_attention_heads": heads,
        "num_hidden_layers": LAYERS,
        "pad_token_id": vocabulary(task).index("<pad>"),
        "type_vocab_size": 1,
        "vocab_size": len(vocabulary(task)),
    }


@contextmanager
def fresh(task: Task, heads: int, seed: int) -> Iterator[Any]:
    """A new model in float32 and training mode; the seed decides its weights."""
    torch.manual_seed(seed)
    with templates() as load:
        modeling = load("modeling_ntk_mosaic_bert")
        settings = load("configuration_ntk_mosaic_bert").NtkMosaicBertConfig(**config(task, heads))
        if task == "pairs":
            model = modeling.NtkMosaicBertModel(settings, add_pooling_layer=False)
        else:
            model = modeling.NtkMosaicBertForMaskedLM(settings)
        nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING_STD)
        yield model.train()


def pairs_loss(model: Any, rng: np.random.Generator, done: int) -> torch.Tensor:
    """InfoNCE: each query among the documents of the step, and each document among the queries."""
    lengths = [length for length, steps in PAIRS_STAGES for _ in range(steps)]
    queries, documents = pairs_task.draw(rng, pairs=PAIRS_PER_STEP, length=lengths[done])
    vectors = [
        F.normalize(model(torch.from_numpy(ids)).last_hidden_state.mean(1), dim=-1)
        for ids in (queries, documents)
    ]
    similar = vectors[0] @ vectors[1].T / TEMPERATURE
    own = torch.arange(len(similar))
    return (F.cross_entropy(similar, own) + F.cross_entropy(similar.T, own)) / 2


def masked_loss(model: Any, rng: np.random.Generator, ids: text_task.Ids) -> torch.Tensor:
    """The mean loss of masked bytes in random pieces of the text."""
    rows, _ = text_task.training_batch(rng, ids, sequences=ROWS_PER_STEP, length=TRAINED_LENGTH)
    wanted = torch.from_numpy(rows)
    chosen = torch.from_numpy(rng.random(rows.shape) < MASKED)
    states = model.base_model(wanted.masked_fill(chosen, vocabulary("masked").index(MASK))).last_hidden_state
    return F.cross_entropy(model.cls.predictions(states[chosen]), wanted[chosen])


def optimise(model: Any, loss_of: Step, seed: int, steps: int) -> None:
    """Makes so many steps, with rates that fall in the end."""
    layers = model.base_model.encoder
    optimizers = training.optimizers(model, layers, MUON_LEARNING_RATE, ADAM_LEARNING_RATE)
    rng = np.random.default_rng(seed)
    with tqdm(range(steps), unit=" steps", disable=None) as progress:
        for done in progress:
            training.set_rates(optimizers, min(1.0, (1 - done / steps) / DECAY))
            loss = loss_of(model, rng, done)
            training.step(model, optimizers, loss)
            progress.set_postfix(loss=f"{loss.item():.2f}")


def build_tokenizer(task: Task) -> Tokenizer:
    """The tokenizer for the task's vocabulary."""
    if task == "pairs":
        return pairs_task.build_tokenizer()
    tokenizer = text_task.build_tokenizer()
    tokenizer.add_special_tokens([MASK])
    return tokenizer


def train(task: Task, heads: int, seed: int, out: Path) -> None:
    """Train a model and write its checkpoint into `out`."""
    started = time.process_time()
    corpus = text_task.read_corpus().training if task == "masked" else ""
    ids = np.array(text_task.build_tokenizer().encode(corpus).ids)
    with fresh(task, heads, seed) as model:
        step: Step = pairs_loss if task == "pairs" else lambda model, rng, _: masked_loss(model, rng, ids)
        optimise(model, step, seed, STEPS[task])
        weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    weights.pop("cls.predictions.decoder.weight", None)  # the embeddings
    record = {
        "task": task,
        "heads": heads,
        "seed": seed,
        "steps": STEPS[task],
        "cpu_seconds": round(time.process_time() - started),
        "text_sha256": hashlib.sha256(corpus.encode()).hexdigest() if corpus else None,
    }
    named = {f"{name.strip('<>')}_token": name for name in ("<unk>", "<pad>", MASK)}
    training.write(
        out,
        weights,
        build_tokenizer(task),
        config=config(task, heads),
        tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", **named},
        training=record,
    )


def main() -> None:
    """Read the command line, train, save."""
    arguments = training.parser("Train a small encoder.", STEPS).parse_args()
    training.prepare()
    train(arguments.task, arguments.heads, arguments.seed, arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
