"""The code and the commands that a card shows."""

from __future__ import annotations

import re
import shlex

from converter._version import TESTED
from converter.result.card.facts import Facts

PYTHON = "```python\n{}\n```"
TRUST = ", trust_remote_code=True"
CLASSIFY = """\
from transformers import pipeline

classify = pipeline("{task}", model=model, tokenizer=tokenizer)
print(classify("A sentence."))"""
SENTENCE, PAIR = '"A sentence."', '{"text": "A question?", "text_pair": "A text that answers it."}'
USES = {
    "text-generation": """\
inputs = tokenizer("Once upon a time", return_tensors="pt")
# On a GPU, cache_implementation="static" compiles decoding into one graph: less work for the processor.
output = model.generate(**inputs, max_new_tokens=50)
print(tokenizer.decode(output[0], skip_special_tokens=True))""",
    "feature-extraction": """\
inputs = tokenizer("A sentence.", return_tensors="pt")
print(model(**inputs).last_hidden_state.shape)  # [texts, tokens, channels]""",
    "fill-mask": """\
from transformers import pipeline

fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
print(fill(f"Paris is the {tokenizer.mask_token} of France."))""",
    "text-classification": CLASSIFY.replace("{task}", "text-classification"),
    "token-classification": CLASSIFY.replace("{task}", "token-classification"),
}
"""Task -> code that follows the code that loads the model and its tokenizer."""
EMBED = """\
from sentence_transformers import SentenceTransformer

encoder = SentenceTransformer({arguments})
print(encoder.encode(["A sentence.", "Another one."]).shape)  # [texts, channels]"""

LITERAL = r"""(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
"""Matches a text as Python writes it."""
LOADING = re.compile(
    r"^model = \w+\.from_pretrained\("
    rf"(?P<arguments>(?P<place>{LITERAL})(?:, revision=(?P<revision>{LITERAL}))?)",
    re.MULTILINE,
)
"""Finds the line of ``load_code`` that loads the model, and what names its place there."""


def install_command(facts: Facts) -> str:
    """Installs what the other examples need, beside torch."""
    oldest = ".".join(TESTED[0].split(".")[:2])
    packages = ["torch", f"'transformers>={oldest}'"]
    if facts.tokenizer.ours:
        packages.append("sentencepiece")
    if _shows_embeddings(facts):
        packages.append("sentence-transformers")
    return f"```\npip install {' '.join(packages)}\n```"


def load_code(facts: Facts) -> str:
    """Loads the model and, if there is one, its tokenizer."""
    auto_class, arguments = facts.card_text.auto_class, _loading_arguments(facts)
    model_line = f"model = {auto_class}.from_pretrained({arguments})"
    if not facts.has_tokenizer:
        return PYTHON.format(f"from transformers import {auto_class}\n\n{model_line}")
    if facts.tokenizer.elsewhere:
        arguments = literal(facts.tokenizer.elsewhere) + TRUST
    return PYTHON.format(
        f"from transformers import {auto_class}, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({arguments})\n{model_line}"
    )


def use_code(facts: Facts) -> str | None:
    """Uses the model once, after ``load_code``; None for a task without such code, or without a tokenizer."""
    if _shows_embeddings(facts):
        return PYTHON.format(EMBED.format(arguments=_loading_arguments(facts)))
    code = USES.get(facts.card_text.task or "")
    if code is None or not facts.has_tokenizer:
        return None
    labels = facts.result.result_config.get("id2label") or ()
    if facts.card_text.task == "text-classification" and len(labels) == 1:
        # A classifier with one label is a reranker, which scores a pair of texts.
        code = code.replace(SENTENCE, PAIR)
    return PYTHON.format(code)


def serve_command(place: str, revision: str | None = None) -> str:
    """Serves the model with vLLM; the longest length in tokens has to follow."""
    words = ["vllm", "serve", place]
    if revision:
        words += ["--revision", revision]
    return f"{shlex.join(words)} --max-model-len"


def literal(text: str) -> str:
    """A text as it is written in Python, with double quotes where that needs no escapes."""
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return repr(text)


def _shows_embeddings(facts: Facts) -> bool:
    return facts.makes_embeddings and facts.tokenizer.here


def _loading_arguments(facts: Facts) -> str:
    return literal(facts.place) + (TRUST if facts.card_text.has_code else "")
