"""``eval`` and ``tune`` of encoders: embeddings, rankings and masked losses, against float64 references."""

from __future__ import annotations

import codecs
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import log_softmax
from sklearn.metrics import ndcg_score

from converter import convert
from converter.errors import SourceError, UnsupportedModel, UsageError
from converter.evaluation.batches import masked_tokens
from converter.evaluation.embeddings import embed, pooling_of, rank
from converter.evaluation.evaluate import evaluate
from converter.evaluation.evaluated_model import open_evaluated_model
from converter.evaluation.losses import by_position, masked_positions, pieces, window_losses
from converter.evaluation.results import PERPLEXITY, Results
from converter.evaluation.runner import choose, losses
from converter.evaluation.tasks.beir import Beir
from converter.evaluation.tasks.scores import CUTOFF
from converter.evaluation.tasks.task import Collection
from converter.evaluation.tune import tune
from converter.scaling.scaling import UNSCALED, Scaling
from converter.source.open import open_folder
from converter.source.sentence_transformers import Pooling
from converter.texts import read_windows
from tests import tiny
from tests.conftest import RunCli, edit_json
from tests.messages import Words, raises, says
from tests.patched import config_of
from tests.reference import ENCODERS as REFERENCES
from tests.test_sentence_transformers import MODULES as ENCODER

CPU = choose("cpu", "fp32", None)
TRAINED = 24
MASK = "w5"
TEXTS = [
    " ".join(f"w{4 + (7 * index * (row + 3)) % 93}" for index in range(length))
    for row, length in enumerate((30, 3, 17, 1))
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A MosaicBERT with a head that predicts masked tokens, and a tokenizer with a mask."""
    folder = tiny.ENCODERS["mosaic_bert"](tmp_path / "source", 4)
    edit_json(folder / "tokenizer_config.json", {"mask_token": MASK})
    return folder


def text_file(path: Path, tokens: int = 400) -> Path:
    path.write_text(" ".join(f"w{6 + (index * index * 7) % 90}" for index in range(tokens)))
    return path


def beir(folder: Path, documents: int = 30) -> Path:
    """A folder in BEIR's format: query q asks for documents q (grade 2) and q + 1 (grade 1)."""
    (folder / "qrels").mkdir(parents=True)
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{word}" for word in rng.integers(6, 97, 40)) for _ in range(documents)]
    corpus = [{"_id": f"d{n}", "title": f"w{6 + n}", "text": text} for n, text in enumerate(texts)]
    queries = [{"_id": f"q{n}", "text": " ".join(text.split()[:5])} for n, text in enumerate(texts[:8])]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    grades = [f"q{n}\td{n + more}\t{2 - more}\n" for n in range(8) for more in (0, 1)]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(grades))
    return folder


# Scores


@given(st.integers(1, 12), st.integers(1, 40), st.randoms())
def test_a_ranking_is_that_of_a_full_sort(queries: int, documents: int, chance: Any) -> None:
    rng = np.random.default_rng(chance.randrange(2**32))
    left, right = (rng.integers(-2, 3, (count, 3)).astype(np.float32) for count in (queries, documents))
    relevant = [{int(each): 1 for each in rng.integers(0, documents, 2)} for _ in range(queries)]
    own = [int(rng.integers(documents)) if rng.random() < 0.5 else None for _ in range(queries)]
    found = rank(left, right, Collection([()] * queries, [()] * documents, relevant, own))
    for row, ranked in enumerate(found):
        places = [place for place in range(documents) if place != own[row]]
        places.sort(key=lambda place: (-float(left[row] @ right[place]), place in relevant[row], place))
        assert ranked == places[:CUTOFF]


def test_a_model_that_says_the_same_of_everything_finds_nothing() -> None:
    texts = Collection([(1,)] * 3, [(1,)] * 20, [{number: 1} for number in range(3)])
    for value in (1.0, np.nan):
        vectors = np.full((20, 4), value, dtype=np.float32)
        for ranked, grades in zip(rank(vectors[:3], vectors, texts), texts.relevant, strict=True):
            assert not {*ranked} & {*grades}


def test_a_part_of_a_collection_keeps_what_is_relevant() -> None:
    whole = Collection(
        queries=[(query,) for query in range(10)],
        documents=[(document,) for document in range(40)],
        relevant=[{query: 1, 39 - query: 2} for query in range(10)],
        left_out=[query + 1 for query in range(10)],
    )
    part = whole[2:5]
    assert list(part.queries) == [(2,), (3,), (4,)]
    for row, grades in enumerate(part.relevant):
        assert {part.documents[place][0]: grade for place, grade in grades.items()} == whole.relevant[row + 2]
    assert [None if each is None else part.documents[each][0] for each in part.left_out] == [3, 4, None]
    assert len(part.documents) == 6 + 3 * 2  # twenty documents answer nothing: two for each query
    other = {each for each in whole[5:8].documents if 10 <= each[0] < 30}
    assert not other & {*part.documents}
    assert list(whole[8:].queries) == [(8,), (9,)]


# Embeddings


@pytest.mark.parametrize("family", ["jina_bert", "mosaic_bert"])
def test_embeddings_are_the_reference_s(family: str, tmp_path: Path) -> None:
    folder = tiny.ENCODERS[family](tmp_path / "source", 12, head="Model")
    scaling = Scaling("ntk", dynamic="length", train_length=TRAINED)
    convert(folder, tmp_path / "out", method="ntk", dynamic="length", train_length=TRAINED, verify=False)
    config, (_, tensors) = config_of(tmp_path / "out"), tiny.read(tmp_path / "out")
    with open_evaluated_model(folder, CPU, train_length=TRAINED) as evaluated:
        ids = [tuple(evaluated.tokenizer(text)["input_ids"]) for text in TEXTS]
        scaled, hardware = evaluated.scaled(scaling), choose("cpu", "fp32", 2)
        states = [REFERENCES[family].trunk(config, tensors, np.array([text]), None).hidden[0] for text in ids]
        for modes in (("mean",), ("cls",), ("max",), ("lasttoken", "weightedmean")):
            advanced: list[int] = []
            found = embed(scaled, Pooling(modes, normalised=False), hardware, ids, advanced.append)
            assert sum(advanced) == sum(map(len, ids))
            for row, hidden in enumerate(states):
                vectors = {
                    "mean": hidden.mean(axis=0),
                    "cls": hidden[0],
                    "max": hidden.max(axis=0),
                    "lasttoken": hidden[-1],
                    "weightedmean": np.average(hidden, axis=0, weights=range(1, len(hidden) + 1)),
                }
                vector = np.concatenate([vectors[mode] for mode in modes])
                assert np.abs(found[row] - vector / np.linalg.norm(vector)).max() < 1e-5


MODULES = [
    *ENCODER,
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("config_sentence_transformers.json", {"prompts": {"query": "find: "}}, "prompts"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "dot"}, "scores by dot"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "lower-cases"),
        ("modules.json", [*MODULES, {"type": "sentence_transformers.models.Dense", "path": "3"}], "Dense"),
    ],
)
def test_embeddings_that_are_made_otherwise_are_refused(
    file: str, content: Any, word: str, tmp_path: Path
) -> None:
    assert pooling_of(open_folder(tmp_path)) == Pooling(("mean",), normalised=False)
    (tmp_path / "modules.json").write_text(json.dumps(MODULES))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": ""}}')
    assert pooling_of(open_folder(tmp_path)) == Pooling(("mean",), normalised=True)
    (tmp_path / file).write_text(json.dumps(content))
    with raises(UnsupportedModel, word):
        pooling_of(open_folder(tmp_path))


def test_a_folder_of_beir_gets_the_ndcg_of_the_reference_s_vectors(tmp_path: Path) -> None:
    """nDCG@10 from float64 vectors by scikit-learn; and pooling by the first token, as the source says."""
    folder = tiny.ENCODERS["jina_bert"](tmp_path / "source", 4, head="Model")
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text(json.dumps(ENCODER))
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    task = Beir.read(beir(tmp_path / "beir"))
    scalings: dict[str, Any] = {"methods": ["none", "ntk"], "scales": [4]}
    lengths = [20, 40, 80, 160]
    results = evaluate([folder], tasks=[task], lengths=lengths, train_length=TRAINED, **scalings)
    # A document has 42 tokens, so it is cut to 20 and to 40, and 80 is the last length.
    assert [(each.scaling, each.length) for each in results.measurements][:3] == [
        ("none", 20),
        ("none", 40),
        ("none", 80),
    ]
    assert {each.metric for each in results.measurements} == {"ndcg@10"}
    convert(folder, tmp_path / "out", method="ntk", scale=4, train_length=TRAINED, verify=False)
    config, (_, tensors) = config_of(tmp_path / "out"), tiny.read(tmp_path / "out")

    def vectors(texts: list[str], length: int) -> NDArray[np.float64]:
        ids = [[tiny.START, *(int(word[1:]) for word in text.split())][:length] for text in texts]
        trunk = REFERENCES["jina_bert"].trunk
        found = [trunk(config, tensors, np.array([row]), None).hidden[0, 0] for row in ids]
        return np.stack([vector / np.linalg.norm(vector) for vector in found])

    similar = vectors(list(task.queries.values()), 80) @ vectors(list(task.documents.values()), 40).T
    relevant = np.zeros_like(similar)
    for row in range(8):
        relevant[row, [row, row + 1]] = 2, 1
    [measured] = [each for each in results.measurements if (each.scaling[:3], each.length) == ("ntk", 40)]
    expected = [ndcg_score(relevant[[row]], similar[[row]], k=10) for row in range(8)]
    assert measured.scores == pytest.approx(expected, abs=1e-6)
    assert measured.comparison is not None


# Masked tokens


def test_masked_losses_are_the_reference_s(source: Path, tmp_path: Path) -> None:
    _, tensors = tiny.read(source)
    with open_evaluated_model(source, CPU, train_length=TRAINED) as evaluated:
        windows = read_windows(evaluated.tokenizer, [text_file(tmp_path / "text")], 96, 3)
        chosen, mask = masked_positions(windows), evaluated.mask
        assert mask == int(MASK[1:])
        model = evaluated.scaled(UNSCALED)
        for length in (96, 24):
            cut, hidden = pieces(windows, length), pieces(chosen, length)
            found = losses(model, CPU, masked_tokens(cut, hidden, mask))
            logits = REFERENCES["mosaic_bert"].logits(
                tiny.read(source)[0], tensors, np.where(hidden, mask, cut), None
            )
            shares = log_softmax(np.asarray(logits, dtype=np.float64), axis=-1)
            expected = -np.take_along_axis(shares, cut[..., None], axis=-1)[..., 0] * hidden
            assert np.abs(found - expected).max() < 1e-4
            means = [expected.reshape(3, -1)[row].sum() / chosen[row].sum() for row in range(3)]
            assert window_losses(found, hidden, 3) == pytest.approx(means, rel=1e-5)


def test_pieces_without_a_masked_token_are_refused() -> None:
    with raises(UsageError, "4 tokens", "masked token"):
        window_losses(np.ones((2, 4)), np.array([[1, 0, 0, 0], [0, 0, 0, 0]], dtype=bool), 2)


@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_same_tokens_are_masked_whatever_else_is_read(length: int, seed: int) -> None:
    windows = np.random.default_rng(seed).integers(0, 1000, (4, length))
    chosen = masked_positions(windows)
    assert chosen.any(axis=1).all()
    assert np.array_equal(masked_positions(windows[2:]), chosen[2:])
    losses = np.where(chosen, windows.astype(float), 0.0)
    buckets = by_position(losses, chosen)
    total = sum(each.loss * chosen[:, each.start : each.end].sum() for each in buckets)
    assert total == pytest.approx(losses.sum())
    # 15 % of many tokens
    assert abs(masked_positions(np.arange(20000)[None]).mean() - 0.15) < 0.01


class Letters:
    """A tokenizer whose tokens are letters; it does not know N."""

    unk_token, unk_token_id = "N", ord("N")

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("genome", b"NNNACGTACGTACGT", ("genome", "38 %", "give text")),
        ("text.gz", b"plain text", ("text.gz", "Not a gzipped file")),
        ("text.gz", gzip.compress(b"text " * 99, mtime=0)[:-9], ("text.gz", "Compressed file ended")),
        ("text.gz", gzip.compress(b"\xff", mtime=0), ("text.gz", "UTF-8")),
    ],
)
def test_texts_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, words: Words) -> None:
    (tmp_path / name).write_bytes(content)
    with raises(UsageError, words):
        read_windows(Letters(), [tmp_path / name], 8 if b"NNN" in content else 2, 1)


# The commands


def test_what_is_given_is_measured(source: Path, tmp_path: Path, run: RunCli) -> None:
    text, out = text_file(tmp_path / "text"), tmp_path / "out"
    options = ("--lengths", "48,96", "--items", 3, "--train-length", TRAINED)
    done = run("eval", source, "--text", text, "--methods", "none,ntk", "--scales", 4, "--out", out, *options)
    assert done.code == 0, done.err
    stored = json.loads((out / "results.json").read_text())
    found = {(each["task"], each["scaling"], each["length"]) for each in stored["measurements"]}
    assert found == {(PERPLEXITY, name, length) for name in ("none", "ntk, factor 4") for length in (48, 96)}
    assert stored["models"]["source"]["predicts"] == "masked tokens"
    assert "perplexity of masked tokens" in done.out
    folder = beir(tmp_path / "beir")
    ranked = run("eval", source, "--beir", folder, *options, "--json").json["measurements"]
    assert {each["task"] for each in ranked} == {"beir"}


@pytest.mark.parametrize("measure", ["beir", PERPLEXITY])
def test_equal_vectors_and_losses_are_the_same(source: Path, tmp_path: Path, measure: str) -> None:
    """As those of a dynamic scaling up to the trained length. It leaves nothing to chance, so no interval."""
    material: dict[str, Any] = {"text": [text_file(tmp_path / "text")]}
    if measure == "beir":
        material = {"tasks": [Beir.read(beir(tmp_path / "beir"))]}
    options: dict[str, Any] = {"methods": ["none", "ntk"], "dynamic": ["length"], "train_length": TRAINED}
    found = evaluate([source], lengths=[TRAINED, 96], items=3, **options, **material)
    _, _, short, long = found.measurements
    assert (short.length, short.verdict, long.verdict != "same") == (TRAINED, "same", True)
    last = found.table(measure).splitlines()[-1]
    assert last.count("[the same] ") == last.count("[") - 1 == 1
    content = json.loads(json.dumps(found.to_json()))
    stored = content["measurements"][2]
    ends = [stored["comparison"][name] for name in ("low", "high")]
    assert (stored["verdict"], ends) == ("same", [None, None])
    assert Results.from_json(content).measurements[2] == short


def test_tune_of_an_encoder(source: Path, tmp_path: Path) -> None:
    task = Beir.read(beir(tmp_path / "beir"))
    text = text_file(tmp_path / "text")
    found = tune(source, 48, tasks=[task], text=[text], items=8, train_length=TRAINED)
    chose = found.candidates.measurements
    # Half of the eight queries choose, and half of the windows; the others judge.
    assert {(each.task, each.length, each.items) for each in chose} == {("beir", 48, 4), (PERPLEXITY, 48, 4)}
    assert {(each.task, each.length) for each in found.curve.measurements} == {
        (task, length) for task in ("beir", PERPLEXITY) for length in (24, 48)
    }
    assert [each.measure for each in found.choices] == ["retrieval", PERPLEXITY]
    assert (found.command is None) == (found.verdict != "helps")


def test_lengths_that_no_document_has_are_told(source: Path, tmp_path: Path) -> None:
    """The documents have more than 48 tokens, and fit into 96."""
    task = Beir.read(beir(tmp_path / "beir"))
    said: list[str] = []
    options: dict[str, Any] = {"tasks": [task], "say": said.append}
    found = evaluate([source], lengths=[24, 48, 96, 192, 384], train_length=TRAINED, **options)
    assert [each.length for each in found.measurements] == [24, 48, 96]
    says("\n".join(said), "beir has no document of more than 96 tokens", "192, 384")
    said.clear()
    evaluate([source], lengths=[24, 96], train_length=TRAINED, **options)
    assert said == []
    with raises(UsageError, "beir has no document of more than 96 tokens", "longer documents"):
        tune(source, 192, train_length=96, **options)


def test_embeddings_need_no_head(source: Path, tmp_path: Path) -> None:
    bare = tiny.ENCODERS["jina_bert"](tmp_path / "bare", 4, head="Model")
    # As Jina's own repositories: the config names a head that is not stored.
    edit_json(bare / "config.json", {"architectures": ["JinaBertForMaskedLM"]})
    task = Beir.read(beir(tmp_path / "beir"))
    for folder in (bare, source):
        results = evaluate([folder], tasks=[task], lengths=[48], train_length=TRAINED)
        assert [each.items for each in results.measurements] == [8]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("queries.jsonl", '{"_id": "q0", "text": " "}\n', ("'q0'", "empty")),
        ("queries.jsonl", '{"_id": "q0"}\n', "'text' is missing"),
        ("queries.jsonl", '{"_id": "q0", "text": "a"}\n' * 2, ("line 2", "'_id' is 'q0'")),
        ("corpus.jsonl", "", ("corpus.jsonl", "empty")),
        ("qrels/test.tsv", "a\tb\tc\nq0 d0 1\n", ("line 2", "a query, a document and a grade")),
        ("qrels/test.tsv", "a\tb\tc\nq0\td0\tgood\n", ("line 2", "a query, a document and a grade")),
        ("qrels/test.tsv", "a\tb\tc\nq99\td0\t1\n", ("queries.jsonl", "'q99'")),
        ("qrels/test.tsv", "a\tb\tc\nq0\td99\t1\n", ("corpus.jsonl", "'d99'")),
        ("qrels/test.tsv", "a\tb\tc\nq0\td0\t0\n", "a grade above 0"),
        ("qrels/test.tsv", None, "no qrels/test.tsv"),
        ("qrels/test.tsv", "q0\td0\t1\nq1\td1\t1\n", ("test.tsv", "judgement")),
    ],
)
def test_damaged_folders_are_refused(file: str, content: str | None, words: Words, tmp_path: Path) -> None:
    folder = beir(tmp_path / "beir")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with raises(SourceError, words):
        Beir.read(folder)


def test_files_as_other_programs_write_them(tmp_path: Path) -> None:
    """With byte order marks, blank lines and ends of lines from Windows."""
    folder = beir(tmp_path / "beir")
    expected = Beir.read(folder)
    for file in folder.rglob("*.*"):
        lines = file.read_text().splitlines()
        file.write_text(
            "\r\n".join(["", *lines[:2], "\t \t" if file.suffix == ".tsv" else " ", *lines[2:], "", ""])
        )
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert Beir.read(folder) == expected


def test_a_query_is_not_its_own_answer(tmp_path: Path) -> None:
    folder = beir(tmp_path / "beir")
    for name, new in (("queries.jsonl", '"q0"'), ("qrels/test.tsv", "q0\t")):
        (folder / name).write_text((folder / name).read_text().replace(new, new.replace("q0", "d0")))
    task = Beir.read(folder)
    assert task.grades["d0"] == {"d1": 1}
    found = task.items(lambda texts, **_: {"input_ids": [[1] for _ in texts]}, [9], 1, 0)[9]
    assert list(found.left_out) == [0] + [None] * 7
    assert len(found.queries) == 8
