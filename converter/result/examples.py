"""The code in a model card: how to load the model, and how to use it for its task."""

from __future__ import annotations

import re

from converter.recipes.words import Words
from converter.source.tokenizer import Tokenizer

TRUST = ", trust_remote_code=True"
FENCED = "```python\n{}\n```"
GENERATE = """\
inputs = tokenizer("Once upon a time", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=50)
print(tokenizer.decode(output[0], skip_special_tokens=True))"""
HIDDEN_STATES = """\
inputs = tokenizer("A sentence.", return_tensors="pt")
print(model(**inputs).last_hidden_state.shape)  # [texts, tokens, channels]"""
FILL = """\
from transformers import pipeline

fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
print(fill(f"Paris is the {tokenizer.mask_token} of France."))"""
CLASSIFY = """\
from transformers import pipeline

classify = pipeline("{task}", model=model, tokenizer=tokenizer)
print(classify("A sentence."))"""
ANSWER = """\
inputs = tokenizer("Who wrote it?", "Ada wrote it in 1843.", return_tensors="pt")
scores = model(**inputs)
start, end = scores.start_logits.argmax(), scores.end_logits.argmax()
print(tokenizer.decode(inputs["input_ids"][0, start : end + 1]))"""
EMBED = """\
from sentence_transformers import SentenceTransformer

encoder = SentenceTransformer({where})
print(encoder.encode(["A sentence.", "Another one."]).shape)  # [texts, channels]"""
USES = {
    "text-generation": GENERATE,
    "feature-extraction": HIDDEN_STATES,
    "fill-mask": FILL,
    "text-classification": CLASSIFY,
    "token-classification": CLASSIFY,
    "question-answering": ANSWER,
}
"""Task -> code that follows the code that loads the model and its tokenizer."""


LOADED = re.compile(r"^model = \w+\.from_pretrained\((?P<place>(?P<quote>['\"]).*?(?P=quote))", re.MULTILINE)
"""The line of ``load`` that names the model's place."""


def load(words: Words, tokenizer: Tokenizer, place: str) -> str:
    """Code that loads the model and, if there is one, its tokenizer.

    Args:
        words: the card's wording for this kind of model.
        tokenizer: what became of the source's tokenizer.
        place: folder or Hub id of the model.
    """
    where = _where(words, place)
    has_tokenizer = tokenizer.here or tokenizer.elsewhere
    lines = [f"from transformers import {words.auto_class}{', AutoTokenizer' if has_tokenizer else ''}", ""]
    if has_tokenizer:
        elsewhere = f"{literal(tokenizer.elsewhere)}{TRUST}" if tokenizer.elsewhere else where
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({elsewhere})")
    lines.append(f"model = {words.auto_class}.from_pretrained({where})")
    return FENCED.format("\n".join(lines))


def use(words: Words, tokenizer: Tokenizer, place: str, *, sentence_encoder: bool) -> str | None:
    """Code that uses the model once, after ``load``; None for a task or a tokenizer that it cannot show.

    Args:
        words, tokenizer, place: as for ``load``.
        sentence_encoder: sentence-transformers loads the model.
    """
    if sentence_encoder and tokenizer.here:
        return FENCED.format(EMBED.format(where=_where(words, place)))
    if words.task is None or not (tokenizer.here or tokenizer.elsewhere):
        return None
    return FENCED.format(USES[words.task].replace("{task}", words.task))


def literal(text: str) -> str:
    """A text as it is written in Python, with double quotes where that needs no escapes."""
    return f'"{text}"' if text.isprintable() and not {'"', "\\"} & set(text) else repr(text)


def _where(words: Words, place: str) -> str:
    return literal(place) + (TRUST if words.code else "")
