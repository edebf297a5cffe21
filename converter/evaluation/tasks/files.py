"""Tasks that are read from a JSON Lines file: the user's own prompts, LongEval's and LongBench's.

LongEval (github.com/DachengLi1/LongChat, longeval): the prompts are the unchanged published test cases of
lines and topics. The publishers let a language model judge topics, which also accepts paraphrases, so their
accuracy may be higher.

LongBench (Bai et al. 2023, arXiv 2308.14508), TREC and MultiFieldQA-en: the prompts, answer lengths,
truncation, post-processing and metrics are those of its code (github.com/THUDM/LongBench: config/, pred.py,
eval.py, metrics.py), which adds no chat template for base models. One thing differs: LongBench limits the
prompt to a number of tokens set for each model, its context less a reserve; here prompt and answer together
take at most the requested length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from converter.config import is_count, is_integer, is_number
from converter.evaluation.tasks.records import Record, read_records
from converter.evaluation.tasks.scores import (
    classification_score,
    first_number,
    plain_topic,
    qa_f1,
    starts_with,
    topic_named,
)
from converter.evaluation.tasks.task import Item, Metric, Task, TaskType
from converter.evaluation.tasks.tokens import encode, too_short

LINES_TOKENS, TOPICS_TOKENS, LONGBENCH_TOKENS = 32, 50, 64
"""Most tokens of an answer: enough to repeat the requested line; the others as published."""
TREC = (
    "Please determine the type of the question below. Here are some examples of questions.\n\n"
    "{context}\n{input}"
)
MULTIFIELDQA_EN = (
    "Read the following text and answer briefly.\n\n{context}\n\n"
    "Now, answer the following question based on the above text, only give me the answer and do not output "
    "any other words.\n\nQuestion: {input}\nAnswer:"
)


@dataclass(frozen=True)
class Case:
    prompt: str
    answers: tuple[str, ...]
    depth: float | None = None
    """Where in the prompt the answer is, from 0 (start) to 1 (end)."""
    length: int | None = None
    """Tokens; the prompt is counted under this length."""
    instruction: str | None = None
    """The prompt without its context. With it, the middle of the prompt may be cut out to fit a length."""


@dataclass(frozen=True)
class PromptFile(Task):
    """The prompts of a file, and how their answers are graded."""

    name: str
    metric: Metric
    max_new_tokens: int
    grade: Callable[[str, str], float]
    """Continuation, answer -> how well they agree, from 0 to 1."""
    cases: tuple[Case, ...]

    @property
    def own_lengths(self) -> bool:
        """Whether prompts are asked as they are; others may be cut."""
        return self.cases[0].instruction is None

    @property
    def stated_lengths(self) -> Sequence[int]:
        lengths = [case.length for case in self.cases if case.length is not None]
        return lengths if len(lengths) == len(self.cases) else ()

    @property
    def unsized(self) -> bool:
        """Whether there is a prompt without a length of its own."""
        return self.name == "prompts" and any(case.length is None for case in self.cases)

    def items(
        self, tokenizer: Any, lengths: Sequence[int], count: int, seed: int
    ) -> Mapping[int, Sequence[Item]]:
        """The first prompts; see ``Task.items``.

        Prompts that may be cut are cut to each length, including those that fit. Others are listed under
        their own ``length``; the user's without one under the next of ``lengths``, else the next power of
        two; and the published, which are all alike, under the length of the longest.
        """
        if not self.own_lengths:
            return self._cut(tokenizer, lengths, self.cases[:count])
        groups: dict[int, list[Item]] = {}
        for case in self.cases:
            length = case.length or 0  # 0: it has none of its own
            if len(groups.get(length, ())) == count:
                continue
            item = Item(encode(tokenizer, case.prompt), case.answers, case.depth)
            if length == 0 and self.unsized:
                length = _next_length(len(item.ids), lengths)
            groups.setdefault(length, []).append(item)
        if 0 in groups:
            alike = groups.pop(0)
            groups[max(len(item.ids) for item in alike)] = alike
        return {length: items[:count] for length, items in sorted(groups.items())}

    def score(self, item: Item, text: str) -> float:
        return max(self.grade(text, answer) for answer in item.answers)

    def _cut(
        self, tokenizer: Any, lengths: Sequence[int], cases: Sequence[Case]
    ) -> Mapping[int, Sequence[Item]]:
        instructions = [encode(tokenizer, case.instruction or "") for case in cases]
        least = self.max_new_tokens + max(map(len, instructions), default=0)
        for length in lengths:
            if length < least:
                raise too_short(self, length, least)
        whole = [(encode(tokenizer, case.prompt), case.answers) for case in cases]
        return {
            length: [
                Item(cut_middle(tokenizer, ids, length - self.max_new_tokens), answers)
                for ids, answers in whole
            ]
            for length in lengths
        }


def _next_length(tokens: int, lengths: Sequence[int]) -> int:
    """The next of these lengths, else the next power of two."""
    enough = [length for length in lengths if length >= tokens]
    return min(enough, default=1 << (tokens - 1).bit_length())


def cut_middle(tokenizer: Any, ids: tuple[int, ...], room: int) -> tuple[int, ...]:
    """A prompt with its middle cut out, of at most ``room`` tokens.

    Like LongBench, takes half of the room from the prompt's start and half from its end, decodes each without
    special tokens, and tokenises both together again. That may give more than ``room`` tokens. LongBench
    accepts this; here the halves get shorter until they fit.
    """
    half, shorter = room // 2, ids
    while len(shorter) > room:
        halves = ids[:half], ids[len(ids) - half :]
        texts = [tokenizer.decode(list(each), skip_special_tokens=True) for each in halves]
        shorter = encode(tokenizer, "".join(texts))
        half = max(0, half - max(1, (len(shorter) - room) // 2))
    return shorter


def read_prompts(path: Path) -> PromptFile:
    """Reads the user's own prompts: ``prompt``, ``answer`` (a string, or a list of which any is right).

    Optional are ``length`` (tokens) and ``depth`` (0 to 1). This reader and those below raise ``SourceError``
    for a file that does not hold such cases; the message names the line.
    """
    cases = tuple(_own(record) for record in read_records(path))
    # Enough for the longest answer with any tokenizer: a token covers at least one byte.
    most = 2 + max(len(answer.encode()) for case in cases for answer in case.answers)
    return PromptFile("prompts", "accuracy", most, starts_with, cases)


def _own(record: Record) -> Case:
    answer = record.values.get("answer")
    answers = record.texts("answer") if isinstance(answer, list) else (record.text("answer"),)
    answers = tuple(each.strip() for each in answers)
    if not all(answers):
        raise record.problem("answer", "text that is not blank")
    length, depth = record.values.get("length"), record.values.get("depth")
    if length is not None and not is_count(length):
        raise record.problem("length", "a number of tokens, at least 1")
    if depth is not None:
        if not is_number(depth) or not 0 <= depth <= 1:
            raise record.problem("depth", "a number from 0 to 1")
        depth = float(depth)
    return Case(record.text("prompt"), answers, depth, length)


def read_lines(path: Path) -> PromptFile:
    """Reads LongEval's published lines, such as 200_lines.jsonl."""

    def case(record: Record) -> Case:
        prompt, line = record.text("prompt"), record.text("correct_line")
        number = record.values.get("expected_number")
        if not is_integer(number) or number < 0:
            raise record.problem("expected_number", "a whole number")
        return Case(prompt, (str(number),), _place(prompt, line))

    cases = tuple(map(case, read_records(path)))
    return PromptFile("lines", "accuracy", LINES_TOKENS, number_is, cases)


def number_is(text: str, answer: str) -> float:
    """Whether the first number in ``text`` is the answer."""
    return float(first_number(text) == answer)


def read_topics(path: Path) -> PromptFile:
    """Reads LongEval's published topics: what was the topic of the first of several conversations?"""

    def case(record: Record) -> Case:
        topic = record.texts("topics")[0]
        if not plain_topic(topic):
            raise record.problem("topics", "a list of topics")
        prompt = record.text("prompt")
        return Case(prompt, (topic,), _place(prompt.lower(), topic.lower()))

    return PromptFile("topics", "accuracy", TOPICS_TOKENS, topic_named, tuple(map(case, read_records(path))))


def read_trec(path: Path) -> PromptFile:
    """Reads LongBench's trec.jsonl: questions to classify, after examples of classified questions."""
    records = read_records(path)
    classes = records[0].texts("all_classes")
    for record in records:
        if record.texts("all_classes") != classes:
            raise record.problem("all_classes", "the same list as in the first line")
    grade = partial(classification_score, classes=classes)
    return PromptFile("trec", "score", LONGBENCH_TOKENS, grade, _longbench(records, TREC))


def read_multifieldqa_en(path: Path) -> PromptFile:
    """Reads LongBench's multifieldqa_en.jsonl: questions about articles from several fields."""
    cases = _longbench(read_records(path), MULTIFIELDQA_EN)
    return PromptFile("multifieldqa_en", "f1", LONGBENCH_TOKENS, qa_f1, cases)


def _longbench(records: Sequence[Record], template: str) -> tuple[Case, ...]:
    return tuple(
        Case(
            template.format(context=record.text("context"), input=record.text("input")),
            record.texts("answers"),
            instruction=template.format(context="", input=record.text("input")),
        )
        for record in records
    )


def _place(prompt: str, text: str) -> float | None:
    place = prompt.find(text)
    return place / len(prompt) if place >= 0 else None


TYPES = (
    TaskType(
        name="topics",
        prompt="several conversations, `--topics FILE`, and the question which topic came first",
        right="the topic is named, whatever its case and punctuation",
        origin="LongEval",
        read=read_topics,
        file_help="LongEval's published topics.",
    ),
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
    TaskType(
        name="prompts",
        prompt="your own, `--prompts FILE`",
        right="the output begins with the answer",
        origin="you",
        read=read_prompts,
        file_help="Your own prompts, in a JSON Lines file.",
    ),
)
