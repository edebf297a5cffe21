"""The tasks of ``eval``: their exact prompts, their metrics, and the files they read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from converter.errors import ConverterError, SourceError, UsageError
from converter.evaluation import tasks
from converter.evaluation.tasks import files, numbers, records, scores
from converter.evaluation.tasks.task import Item
from converter.evaluation.tasks.tokens import encode
from tests.messages import Words, raises

PUBLISHED = Path(__file__).parents[2] / "shared" / "data" / "longeval"
BOS, EOS, UNK = "<s>", "</s>", "<unk>"


def byte_level(merges: int = 400) -> Any:
    """A byte-level BPE tokenizer like BLOOM's and MPT's: it can encode any text and adds no tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(alphabet) + 2 + merges
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    corpus = [numbers.INTRODUCTION, numbers.FILLER, numbers.HEADER, numbers.QUESTION, *numbers.ADJECTIVES]
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)


def word_level(vocabulary: Sequence[str] = (), *, closed: bool = True) -> Any:
    """One token per word, as in examples/tiny-bloom; if ``closed``, with BOS before and EOS after a text."""
    ids = {word: index for index, word in enumerate([UNK, BOS, EOS, *vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if closed:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A {EOS}", special_tokens=[(BOS, ids[BOS]), (EOS, ids[EOS])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token=UNK, model_max_length=16
    )


BYTES, CLOSED = byte_level(), word_level()
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTES, CLOSED], ids=["bytes", "closed words"])
GENERATED = pytest.mark.parametrize("name", tasks.GENERATED)


def written(folder: Path, *records: object, name: str = "cases.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def text_of(item: Item) -> str:
    return str(BYTES.decode(list(item.ids)))


# Encoding


@pytest.mark.parametrize(
    ("tokenizer", "text", "ids"),
    [
        (CLOSED, "one two", (1, 0, 0)),
        (word_level(closed=False), f"one {EOS}", (0, 2)),  # an end that the prompt itself has stays
        (CLOSED, "word " * 100, (1, *[0] * 100)),  # beyond the trained length
    ],
    ids=["closed words", "end in the prompt", "long"],
)
def test_a_prompt_is_open_at_its_end(
    tokenizer: Any, text: str, ids: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert encode(tokenizer, text) == ids
    assert not caplog.records


# Filling a length


@GENERATED
@TOKENIZERS
@settings(max_examples=8)
@given(extra=st.integers(0, 1500), seed=st.integers(0, 9))
def test_a_prompt_never_exceeds_its_length_and_nearly_fills_it(
    name: str, tokenizer: Any, extra: int, seed: int
) -> None:
    task = tasks.make_task(name)
    length = {"passkey": 400, "lines": 600}[name] + extra
    [item] = task.items(tokenizer, [length], 1, seed)[length]
    left = length - task.max_new_tokens - len(item.ids)
    unit = {
        ("passkey", BYTES): len("yellow. "),
        ("passkey", CLOSED): 1,
        ("lines", BYTES): 60,
        ("lines", CLOSED): 5,
    }[name, tokenizer]
    assert 0 <= left < unit


@GENERATED
def test_a_length_into_which_nothing_fits_is_refused_with_the_least(name: str) -> None:
    task = tasks.make_task(name)
    with raises(UsageError, name, "20 tokens", "at least") as refusal:
        task.items(BYTES, [20], 5, 0)
    least = int(re.findall(r"\d+", str(refusal.value))[-1])
    with pytest.raises(UsageError, match="does not fit"):
        task.items(BYTES, [20, least], 5, 0)
    assert len(task.items(BYTES, [4 * least], 5, 0)[4 * least]) == 5


def test_a_tokenizer_that_drops_the_text_is_refused() -> None:
    """All unknown text becomes a single token, so no number of lines would fill a length."""
    model = models.BPE({UNK: 0}, [], unk_token=UNK, fuse_unk=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token=UNK)
    with raises(UsageError, "tokens", "passkey"):
        tasks.make_task("passkey").items(tokenizer, [64], 1, 0)


# Randomness


@GENERATED
def test_answers_stand_all_over_the_context(name: str) -> None:
    items = tasks.make_task(name).items(CLOSED, [4000], 40, 0)[4000]
    places = [item.depth for item in items if item.depth is not None]
    assert len(places) == 40
    assert {int(place * 5) for place in places} == set(range(5))


@GENERATED
def test_the_depth_is_where_the_answer_stands(name: str) -> None:
    for item in tasks.make_task(name).items(BYTES, [1500], 10, 3)[1500]:
        text = text_of(item)
        start = {"passkey": "The pass key is ", "lines": f"line {asked(text)}:"}[name]
        assert item.depth == text.index(start) / len(text)
        assert item.answers[0] in text[text.index(start) :]


def asked(text: str) -> str:
    """The line that a prompt of ``lines`` asks for."""
    return text.rpartition(" in line ")[2].partition("?")[0]


@GENERATED
def test_the_same_seed_gives_the_same_prompts_whatever_else_is_asked_for(name: str) -> None:
    task = tasks.make_task(name)
    alone = task.items(BYTES, [700], 6, 1)[700]
    assert task.items(BYTES, [500, 700, 900], 6, 1)[700] == alone
    assert task.items(BYTES, [700], 9, 1)[700][:6] == alone
    assert not {item.ids for item in task.items(BYTES, [700], 6, 2)[700]} & {item.ids for item in alone}
    assert len({item.answers for item in alone}) == 6


# passkey


def test_passkey_has_the_published_form() -> None:
    """The filler repeats the same sentences and is cut anywhere, both before and after the key."""
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 50
    for item in tasks.make_task("passkey").items(BYTES, [900], 10, 0)[900]:
        [key] = item.answers
        assert re.fullmatch("[1-9][0-9]{4}", key)
        introduction, before, information, after, question = text_of(item).split("\n")
        assert introduction == (
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
            "I will quiz you about the important information there."
        )
        assert filler.startswith(f"{before} ")
        assert filler.startswith(f"{after} ")
        assert information == f"The pass key is {key}. Remember it. {key} is the pass key."
        assert question == "What is the pass key? The pass key is"


# lines


PROMPT = re.compile(
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and "
    "contains a '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, "
    "memorize its corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the "
    "corresponding <REGISTER_CONTENT> of a certain line index. Now the record start:\n\n"
    "(?P<record>(?:line [^\n:]+-[^\n:]+: REGISTER_CONTENT is <[1-9][0-9]{0,4}>\n)+)\n"
    "Now the record is over. Tell me what is the <REGISTER_CONTENT> in line (?P<asked>[^\n?]+)[?] "
    "I need the number. "
)


def check_lines(text: str, answer: str, number: int) -> list[str]:
    """Checks a prompt's published form, answer and number of lines; returns the names of the lines."""
    prompt = PROMPT.fullmatch(text)
    assert prompt is not None
    record = prompt["record"].splitlines()
    assert len(record) == number
    assert f"line {prompt['asked']}: REGISTER_CONTENT is <{answer}>" in record
    return [line.partition(":")[0] for line in record]


def test_lines_have_the_published_form() -> None:
    for item in tasks.make_task("lines").items(BYTES, [1500], 5, 0)[1500]:
        text = text_of(item)
        names = check_lines(text, item.answers[0], text.count("\n") - 3)
        assert len(set(names)) == len(names) > 10


def test_one_prompt_of_lines_to_the_letter() -> None:
    text, value, before = numbers.lines(Random(7), 0.4)(3)
    assert (text.removeprefix(numbers.HEADER), value) == (
        "line giant-curtain: REGISTER_CONTENT is <25876>\n"
        "line red-berry: REGISTER_CONTENT is <4748>\n"
        "line teal-tower: REGISTER_CONTENT is <6169>\n"
        "\n"
        "Now the record is over. Tell me what is the <REGISTER_CONTENT> in line red-berry? "
        "I need the number. ",
        4748,
    )
    assert text[before:].startswith("line red-berry: REGISTER_CONTENT is <4748>")


def test_names_have_three_words_where_two_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "MOST_OF_TWO_WORDS", 10)
    text, value, _ = numbers.lines(Random(0), 0.5)(30)
    names = check_lines(text, str(value), 30)
    assert [name.count("-") for name in names] == [1] * 10 + [2] * 20
    assert len(set(names)) == 30


CASE = {
    "random_idx": ["b-c", 1],
    "expected_number": 17,
    "num_lines": 2,
    "correct_line": "line b-c: REGISTER_CONTENT is <17>\n",
    "prompt": "Remember:\nline a-b: REGISTER_CONTENT is <3>\nline b-c: REGISTER_CONTENT is <17>\nb-c? ",
}


def test_published_lines_are_taken_as_they_are(tmp_path: Path) -> None:
    shorter = {**CASE, "prompt": "line?", "expected_number": 3}
    task = tasks.make_task("lines", written(tmp_path, shorter, CASE, {**CASE, "prompt": "x" * 500}))
    [(length, (first, second))] = task.items(BYTES, [4096], 2, 0).items()
    assert [text_of(first), text_of(second)] == ["line?", CASE["prompt"]]
    assert length == len(second.ids)
    assert (first.answers, first.depth) == (("3",), None)
    assert (second.answers, second.depth) == (("17",), 44 / 84)
    case = {"prompt": "We discuss the role of art in society. First?", "topics": ["The role of ART"]}
    topics = tasks.make_task("topics", written(tmp_path, case))
    [[item]] = topics.items(BYTES, [], 9, 0).values()
    assert item.depth == 11 / 45


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published test cases do not lie beside this checkout")
def test_the_published_files_can_be_used() -> None:
    for row in map(json.loads, (PUBLISHED / "200_lines.jsonl").read_text().splitlines()):
        check_lines(row["prompt"], str(row["expected_number"]), 200)
    found = []
    for name in ("200_lines", "5_topics"):
        task = tasks.make_task(name.partition("_")[2], PUBLISHED / f"{name}.jsonl")
        [(length, items)] = task.items(BYTES, [], 100, 0).items()
        assert len(items) == 50
        assert length == max(len(item.ids) for item in items)
        assert all(item.depth is not None for item in items)
        found.append((task, items))
    (_, lines), (topics, conversations) = found
    assert lines[0].answers == ("2416",)
    assert max(item.depth for item in conversations) < 0.05
    assert topics.score(conversations[0], "the psychology of creativity") == 1


# LongBench


CLASSES = ("City", "Other location", "location", "Date")


TREC = {
    "context": "Question: a\nType: City",
    "input": "Question: b\nType:",
    "answers": ["Date"],
    "all_classes": CLASSES,
}


@pytest.mark.parametrize(
    ("name", "metric", "case", "prompt"),
    [
        (
            "trec",
            "score",
            TREC,
            "Please determine the type of the question below. Here are some examples of questions.\n\n"
            "Question: a\nType: City\nQuestion: b\nType:",
        ),
        (
            "multifieldqa_en",
            "f1",
            {"context": "{braces} stay.", "input": "Why?", "answers": ["x"], "all_classes": None},
            "Read the following text and answer briefly.\n\n{braces} stay.\n\n"
            "Now, answer the following question based on the above text, only give me the answer and do not "
            "output any other words.\n\nQuestion: Why?\nAnswer:",
        ),
    ],
)
def test_prompts_of_longbench(tmp_path: Path, name: str, metric: str, case: object, prompt: str) -> None:
    task = tasks.make_task(name, written(tmp_path, case))
    assert (task.name, task.metric, task.max_new_tokens) == (name, metric, 64)
    assert not task.own_lengths, "it would be asked at no length where none is known"
    [item] = task.items(BYTES, [1000], 9, 0)[1000]
    assert text_of(item) == prompt


def test_the_middle_is_cut_out_and_the_halves_are_tokenised_again() -> None:
    """As in LongBench, the words on both sides of the cut are joined."""
    listed = [f"w{index}" for index in range(100)]
    tokenizer = word_level(listed, closed=False)
    ids = encode(tokenizer, " ".join(listed))
    assert files.cut_middle(tokenizer, ids, 100) == ids
    expected = encode(tokenizer, "w0 w1 w2 w3 w4w95 w96 w97 w98 w99")
    assert files.cut_middle(tokenizer, ids, 11) == expected
    assert len(expected) == 9


@settings(max_examples=30)
@given(context=st.text(max_size=600), extra=st.integers(0, 300))
@pytest.mark.parametrize("tokenizer", [BYTES, CLOSED], ids=["bytes", "closed words"])
def test_a_truncated_prompt_never_exceeds_its_length(tokenizer: Any, context: str, extra: int) -> None:
    bare, full = (files.MULTIFIELDQA_EN.format(context=each, input="Why?") for each in ("", context))
    case = files.Case(full, ("x",), instruction=bare)
    task = files.PromptFile("multifieldqa_en", "f1", 64, scores.qa_f1, (case,))
    least = 64 + len(encode(tokenizer, bare))
    length = least + extra
    whole = encode(tokenizer, full)
    [item] = task.items(tokenizer, [length], 1, 0)[length]
    assert len(item.ids) + 64 <= length
    if len(whole) + 64 <= length:
        assert item.ids == whole
    with raises(UsageError, f"{least - 1} tokens", f"at least {least}", "give"):
        task.items(tokenizer, [length, least - 1], 1, 0)


# The user's own prompts


def test_prompts_of_the_user_s_own(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"prompt": "a b c", "answer": "24"},
        {"prompt": "a b", "answer": ["x", " yes sir "], "depth": 1},
        {"prompt": "a", "answer": "x", "length": 512, "depth": 0.25},
        {"prompt": "b", "answer": "x", "length": 512},
        {"prompt": "b", "answer": "x", "length": 8},
    )
    task = tasks.make_task("prompts", str(path))
    assert task.max_new_tokens == len("yes sir") + 2
    tokenizer = word_level(["a", "b", "c"], closed=False)
    assert set(task.items(tokenizer, [4096], 9, 0)) == {8, 512, 4096}
    found = task.items(tokenizer, [2], 9, 0)
    assert found == {
        8: [Item((4,), ("x",))],
        512: [Item((3,), ("x",), 0.25), Item((4,), ("x",))],
        4: [Item((3, 4, 5), ("24",))],  # none asked for is as long
        2: [Item((3, 4), ("x", "yes sir"), 1.0)],
    }
    assert [len(items) for items in task.items(CLOSED, [], 1, 0).values()] == [1, 1, 1]


# Scores


KEYS = {"lines": "expected_number", "topics": "topics", "prompts": "answer"}
"""Where a case has its answer; else under ``answers``."""
TOPIC = ["The role of art in society", "b"]


@pytest.mark.parametrize(
    ("name", "answer", "text", "score"),
    [
        ("lines", 12345, " 12345.", 1),
        ("lines", 12345, " <12345> and 67890", 1),
        ("lines", 12345, "012345", 1),
        ("lines", 12345, " 67890, or 12345", 0),
        ("lines", 12345, "12 345", 0),
        ("lines", 12345, "none", 0),
        ("lines", 0, "is 00.", 1),
        ("topics", TOPIC, "The first topic is the role of art in society.", 1),
        ("topics", TOPIC, " THE ROLE OF ART\nIN SOCIETY", 1),
        ("topics", TOPIC, "Role of art in society", 1),
        ("topics", TOPIC, "role-of-art in society", 1),
        ("topics", TOPIC, "The role of art", 0),
        ("topics", TOPIC, "The role of articles in society", 0),
        ("topics", TOPIC, "control of art in society", 0),
        ("multifieldqa_en", ["a cat on the mat"], "The cat sat on a mat.", 2 * 3 / (4 + 3)),
        ("multifieldqa_en", ["no"], "no no yes", 0.5),
        ("multifieldqa_en", ["no no"], "no no yes", 2 * 2 / (3 + 2)),
        ("multifieldqa_en", ["us"], "The U.S.", 1),
        ("multifieldqa_en", ["other atre"], "another theatre", 0),
        ("multifieldqa_en", ["the"], "the", 0),
        ("multifieldqa_en", ["x", "the red car"], "A red car.", 1),
        ("multifieldqa_en", ["x", "the red car"], "", 0),
        ("trec", ["City"], " City\nQuestion: When?\nType: Date", 1),
        ("trec", ["City"], "\n\n City\n", 1),
        ("trec", ["City"], " \nCity", 0),
        ("trec", ["City"], "Date or City", 0.5),
        ("trec", ["City"], "city", 0),
        ("trec", ["Other location"], "Date or City", 0),
        ("trec", ["Other location"], "Other location", 1),
        ("trec", ["location"], "Other location", 0.5),
        ("trec", ["City", "Date"], " City\nDate", 1),
        ("prompts", ["7", "24"], "24", 1),
        ("prompts", ["7", "24"], " \n24 LINE", 1),
        ("prompts", ["7", "24"], "24.", 1),
        ("prompts", ["7", "24"], "240", 0),
        ("prompts", ["7", "24"], "is 24", 0),
    ],
)
def test_what_an_answer_is_worth(tmp_path: Path, name: str, answer: Any, text: str, score: float) -> None:
    common = {"prompt": "a", "correct_line": "b", "context": "c", "input": "d", "all_classes": CLASSES}
    task = tasks.make_task(name, written(tmp_path, {**common, KEYS.get(name, "answers"): answer}))
    [[item]] = task.items(BYTES, [1000], 9, 0).values()
    assert task.score(item, text) == pytest.approx(score)
    if name == "lines":
        for generated in ("lines", "passkey"):
            assert tasks.make_task(generated).score(item, text) == score


# Files


LINES = {"prompt": "a", "correct_line": "b", "expected_number": 3}
TOPICS = {"prompt": "a", "topics": ["b"]}
QA = {"context": "a", "input": "b", "answers": ["c"]}
OWN = {"prompt": "a", "answer": "b"}
MISSING = object()


@pytest.mark.parametrize(
    ("name", "good", "key", "value"),
    [
        *((name, {}, "[a-z_]+", MISSING) for name in tasks.READ if not tasks.TYPES[name].folder),
        ("lines", LINES, "prompt", 3),
        ("lines", LINES, "expected_number", "3"),
        ("lines", LINES, "expected_number", True),
        ("lines", LINES, "expected_number", -3),
        ("topics", TOPICS, "topics", []),
        ("topics", TOPICS, "topics", ["The"]),
        ("trec", TREC, "all_classes", None),
        ("trec", TREC, "all_classes", ["City"]),
        ("multifieldqa_en", QA, "input", {}),
        ("multifieldqa_en", QA, "answers", ["c", 1]),
        ("multifieldqa_en", QA, "context", "half a character: \ud800"),
        ("prompts", OWN, "answer", " "),
        ("prompts", OWN, "answer", ["b", ""]),
        ("prompts", OWN, "answer", 24),
        ("prompts", OWN, "length", 0),
        ("prompts", OWN, "length", True),
        ("prompts", OWN, "depth", 1.01),
        ("prompts", OWN, "depth", float("nan")),
        ("prompts", OWN, "depth", "0.5"),
    ],
)
def test_a_wrong_field_is_named_with_file_and_line(
    tmp_path: Path, name: str, good: dict[str, object], key: str, value: object
) -> None:
    rows: list[object] = [{}]
    if value is not MISSING:
        rows = [good, {**good, key: value}]
        tasks.make_task(name, written(tmp_path, good, good))
    with pytest.raises(SourceError, match=rf"cases\.jsonl, line {len(rows)}: '{key}' is "):
        tasks.make_task(name, written(tmp_path, *rows))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ("cases.jsonl", "empty")),
        ("\n \n", ("cases.jsonl", "empty")),
        ('{"prompt": "a", "answer": "b"}\n\n{"prompt":', ("cases.jsonl, line 3", "JSON")),
        ('["a"]\n', ("cases.jsonl, line 1", "list", "object")),
        (None, ("cases.jsonl", "No such file")),
    ],
)
def test_files_that_hold_no_cases(tmp_path: Path, content: str | None, words: Words) -> None:
    path = tmp_path / "cases.jsonl"
    if content is not None:
        path.write_text(content)
    with raises(SourceError, words):
        tasks.make_task("prompts", path)


def test_files_that_are_too_large_and_prompts_without_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, {**OWN, "prompt": " "})
    with raises(SourceError, "no token", "' '"):
        tasks.make_task("prompts", path).items(word_level(closed=False), [], 1, 0)
    monkeypatch.setattr(records, "LARGEST_FILE", path.stat().st_size - 1)
    with raises(SourceError, "30 bytes"):
        tasks.make_task("prompts", path)


@pytest.mark.parametrize(
    ("name", "file", "words"),
    [
        ("haystack", None, ("'haystack'", "passkey, lines, topics, trec, multifieldqa_en")),
        ("prompts", None, (".jsonl", "--prompts")),
        ("passkey", "here/keys.jsonl", ("passkey", "drop keys.jsonl")),
    ],
)
def test_what_cannot_be_made(name: str, file: str | Path | None, words: Words) -> None:
    with raises(ConverterError, words) as refusal:
        tasks.make_task(name, file)
    assert isinstance(refusal.value, ConverterError)
    assert refusal.value.exit_code == 2
