"""How much of a model is run to validate its graphs: how many layers, tokens of the vocabulary, and lengths.

A model of any size is validated in about a minute. What is too large is cut, and the report says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from converter.model.alibi import AlibiModel
from converter.onnx.concave import times_with_far_keys

LONGEST_TRAINED = 16384
"""Tokens; a longer trained length is not run, because the time of attention grows with its square."""
UNKNOWN_LENGTH, CONTINUED = 512, 256
"""Tokens: used if the trained length is not known; length of a prompt that is continued."""
LOGITS, TABLE = 25_000_000, 100_000_000
"""Largest numbers of logits of a prompt and of elements of an embedding; the vocabulary is cut to fit."""
FEWEST_TOKENS = 64
"""Least size of a vocabulary that is cut."""
OPERATIONS, ELEMENTS = 1e12, 350_000_000
"""Largest numbers of floating-point operations (about 15 seconds on two cores) and of the layers' weights;
the number of layers is cut to fit."""
FEWEST_LAYERS = 2


@dataclass(frozen=True)
class Coverage:
    """How much of a model is run, and on how many tokens."""

    layers: int
    """The first so many."""
    vocabulary: int
    """The first so many tokens."""
    whole: bool
    """Whether these are all layers and all tokens of the vocabulary."""
    trained: int
    """Trained length in tokens, or the length that replaces it."""
    beyond: int
    """A length beyond it, in tokens."""
    continued: int
    """Length in tokens at which chunks continue a prompt: the trained length, where a dynamic scaling starts
    to act, or less."""
    note: str
    """What was cut and why; empty if nothing was cut."""


def choose_coverage(repository: AlibiModel) -> Coverage:
    """Chooses how much can be run within the bounds above."""
    geometry = repository.geometry
    hidden = geometry.num_heads * geometry.head_dim
    notes = []

    trained = repository.trained.tokens
    if not trained:
        trained = UNKNOWN_LENGTH
        notes.append(f"trained length not known, {UNKNOWN_LENGTH} taken for it")
    if trained > LONGEST_TRAINED:
        notes.append(f"trained length {trained} not reached, {LONGEST_TRAINED} run instead")
        trained = LONGEST_TRAINED
    # A quarter more; of a short trained length, four times as much or so, up to 2,048 tokens.
    power = repository.scaling.power
    times = 4 if power is None else times_with_far_keys(power)
    beyond = max(trained + trained // 4, min(int(times * trained), 2048))
    continued = trained if repository.scaling.dynamic else min(trained, CONTINUED)

    all_tokens = int(repository.result_config["vocab_size"])
    vocabulary = all_tokens
    most = LOGITS // beyond if repository.has_logits else all_tokens
    if all_tokens > most or hidden * all_tokens > TABLE:
        padding = padding_id(repository)
        fewest = FEWEST_TOKENS if padding is None else padding + 1
        vocabulary = max(min(all_tokens, most, TABLE // hidden), fewest)
    if vocabulary < all_tokens:
        notes.append(f"first {vocabulary} of {all_tokens} tokens of the vocabulary")

    elements = layer_elements(repository)
    operations = 0  # in one layer: a product and a sum for each weight and token, and attention's
    for length in (trained, beyond, continued):
        operations += 2 * elements * length + 4 * hidden * length**2
    fitting = int(min(OPERATIONS // operations, ELEMENTS // max(elements, 1)))
    layers = min(geometry.num_layers, max(FEWEST_LAYERS, fitting))
    if layers < geometry.num_layers:
        notes.append(f"first {layers} of {geometry.num_layers} layers")

    whole = layers == geometry.num_layers and vocabulary == all_tokens
    return Coverage(layers, vocabulary, whole, trained, beyond, continued, ", ".join(notes))


def padding_id(repository: AlibiModel) -> int | None:
    """The id by which a classifier finds where the padding of a row begins; None for all other models."""
    if repository.decoder and repository.head == "ForSequenceClassification":
        found: int = repository.result_config["pad_token_id"]
        return found
    return None


def layer_elements(repository: AlibiModel) -> int:
    """The number of weights in the first layer; all layers are alike."""
    prefix = f"{repository.family.layers}.0."
    count = 0
    for name, tensor in repository.checkpoint.tensors.items():
        if repository.family.below(name).startswith(prefix):
            count += math.prod(tensor.shape)
    return count
