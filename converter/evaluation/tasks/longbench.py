"""LongBench's TREC and MultiFieldQA-en, from its published files.

Bai et al., "LongBench", 2023 (arXiv 2308.14508). The prompts, answer lengths, truncation, post-processing and
metrics are those of its code (github.com/THUDM/LongBench: config/, pred.py, eval.py, metrics.py), which adds
no chat template for base models. One thing differs: LongBench limits the prompt to a number of tokens set for
each model, its context less a reserve; here prompt and answer together take at most the requested length.
"""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.evaluation.tasks.base import Item, Metric, TaskType
from converter.evaluation.tasks.cases import Record, read_records
from converter.evaluation.tasks.fitting import encode, too_short

TREC = (
    "Please determine the type of the question below. Here are some examples of questions.\n\n"
    "{context}\n{input}"
)
MULTIFIELDQA_EN = (
    "Read the following text and answer briefly.\n\n{context}\n\n"
    "Now, answer the following question based on the above text, only give me the answer and do not output "
    "any other words.\n\nQuestion: {input}\nAnswer:"
)

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class LongBench:
    """The first cases of a file, each truncated to the length."""

    name: str
    metric: Metric
    template: str
    """The prompt, with the fields ``context`` and ``input``."""
    cases: tuple[Record, ...]
    grade: Callable[[str, str], float]
    """Continuation, answer -> how well they agree, from 0 to 1."""
    max_new_tokens: int = 64
    """LongBench's value for both tasks."""

    def items(
        self,
        tokenizer: Any,
        lengths: Sequence[int],
        count: int,
        seed: int,
    ) -> Mapping[int, Sequence[Item]]:
        """See ``Task.items``; takes the same cases at each length, including those that fit untruncated."""
        cases = self.cases[:count]
        instructions = [encode(tokenizer, self._prompt(case, context="")) for case in cases]
        least = self.max_new_tokens + max(map(len, instructions), default=0)
        for length in lengths:
            if length < least:
                raise too_short(self, length, least)
        prompts = [self._prompt(case, case.text("context")) for case in cases]
        whole = [encode(tokenizer, prompt) for prompt in prompts]
        return {
            length: [
                Item(truncate(tokenizer, ids, length - self.max_new_tokens), case.texts("answers"))
                for case, ids in zip(cases, whole, strict=True)
            ]
            for length in lengths
        }

    def score(self, item: Item, text: str) -> float:
        """See ``Task.score``; the best score over the answers."""
        return max(self.grade(text, answer) for answer in item.answers)

    def _prompt(self, case: Record, context: str) -> str:
        return self.template.format(context=context, input=case.text("input"))


def read_trec(path: Path) -> LongBench:
    """Reads trec.jsonl: questions to classify, after examples of classified questions.

    Raises:
        SourceError: it is not such a file; the message names the line.
    """
    cases = _read(path)
    classes = cases[0].texts("all_classes")
    for case in cases:
        if case.texts("all_classes") != classes:
            raise case.problem("all_classes", "the same list as in the first line")
    return LongBench(
        "trec", "score", TREC, cases, lambda text, answer: classification_score(text, answer, classes)
    )


def read_multifieldqa_en(path: Path) -> LongBench:
    """Reads multifieldqa_en.jsonl: questions about articles from several fields.

    Raises:
        SourceError: it is not such a file; the message names the line.
    """
    return LongBench("multifieldqa_en", "f1", MULTIFIELDQA_EN, _read(path), qa_f1)


def truncate(tokenizer: Any, ids: tuple[int, ...], room: int) -> tuple[int, ...]:
    """A prompt with its middle cut out, of at most ``room`` tokens.

    Like LongBench, takes half of the room from the prompt's start and half from its end, decodes each without
    special tokens, and tokenises both together again. That may give more than ``room`` tokens. LongBench
    accepts this; here the halves get shorter until they fit.

    Args:
        tokenizer: the model's tokenizer.
        ids: token ids of the whole prompt.
        room: most tokens in the result.
    """
    half, shorter = room // 2, ids
    while len(shorter) > room:
        halves = ids[:half], ids[len(ids) - half :]
        texts = [tokenizer.decode(list(each), skip_special_tokens=True) for each in halves]
        shorter = encode(tokenizer, "".join(texts))
        half = max(0, half - max(1, (len(shorter) - room) // 2))
    return shorter


def classification_score(text: str, answer: str, classes: Sequence[str]) -> float:
    """1 / (number of classes named in the first line of ``text``) if ``answer`` is among them, else 0.

    A class whose name is part of the answer's name does not count.
    """
    line = text.lstrip("\n").split("\n")[0]
    named = [each for each in classes if each in line and (each == answer or each not in answer)]
    return 1 / len(named) if answer in named else 0.0


def qa_f1(text: str, answer: str) -> float:
    """F1 score of the words in ``text`` and ``answer``; a repeated word counts each time."""
    found, expected = _words(text), _words(answer)
    shared = (collections.Counter(found) & collections.Counter(expected)).total()
    return 2 * shared / (len(found) + len(expected)) if shared else 0.0


def _words(text: str) -> list[str]:
    """The words in lower case, without articles and without ASCII punctuation, even inside words."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _read(path: Path) -> tuple[Record, ...]:
    cases = read_records(path)
    for case in cases:
        case.text("context")
        case.text("input")
        case.texts("answers")
    return cases


TYPES = (
    TaskType(
        name="trec",
        prompt="examples, then a question to classify, `--trec FILE`",
        right="the class; less if other classes are named too",
        origin="[LongBench](https://arxiv.org/abs/2308.14508)",
        read=read_trec,
        file_help="LongBench's trec.jsonl.",
    ),
    TaskType(
        name="multifieldqa_en",
        prompt="an article and a question, `--multifieldqa-en FILE`",
        right="F1 of the words",
        origin="LongBench",
        read=read_multifieldqa_en,
        file_help="LongBench's multifieldqa_en.jsonl.",
    ),
)
