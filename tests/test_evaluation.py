"""Losses, continuations and results of ``eval``, compared with float64 references and transformers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax
from transformers import AutoModelForCausalLM

from converter import convert, tune
from converter.config import ROTARY, SOURCE_CONFIG
from converter.errors import ConverterError, SourceError, UsageError
from converter.evaluation import trainable
from converter.evaluation.batches import Batch, masked_tokens, next_tokens
from converter.evaluation.evaluate import evaluate
from converter.evaluation.evaluated_model import EvaluatedModel, open_evaluated_model
from converter.evaluation.losses import BUCKETS, by_position, pieces, window_losses
from converter.evaluation.results import PERPLEXITY, Measurement, Results
from converter.evaluation.runner import Hardware, choose, complete, losses
from converter.evaluation.scalings import grid
from converter.evaluation.statistics import compare_scores, summarise
from converter.evaluation.tasks import make_task
from converter.evaluation.tasks.task import Item, Task
from converter.families.templates import templates_folder
from converter.scaling.request import RAMP, Defaults, Request, TrainLength
from converter.scaling.scaling import UNSCALED, Scaling
from converter.source.tokenizer import TEMPLATE
from converter.texts import read_windows
from tests import tiny
from tests.conftest import MakeSource, Pristine, RunCli, edit_json, fingerprint
from tests.messages import raises, says
from tests.patched import SCALINGS, TRAIN_LENGTH, Convert, config_of, load
from tests.reference import FAMILIES as REFERENCES
from tests.tiny import rotary

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-bloom"
CPU = choose("cpu", "fp32", None)


@dataclass(frozen=True)
class Words(Task):
    """The first token of the prompt is the answer, as text."""

    name: str = "words"
    metric: Any = "accuracy"
    max_new_tokens: int = 2

    def items(self, _: Any, lengths: Any, count: int, seed: int) -> dict[int, list[Item]]:
        rng = np.random.default_rng(seed)
        vocabulary = range(tiny.PAD + 1, tiny.VOCAB_SIZE)
        return {
            length: [
                Item(tuple(rng.choice(vocabulary, length - number).tolist()), ("x",), number / count)
                for number in range(count)
            ]
            for length in lengths
        }

    def score(self, _: Item, text: str) -> float:
        return float(len(text) % 2)


def measured(
    scaling: str, metric: Any, scores: Sequence[float], stock: Sequence[float] = (), **changes: Any
) -> Measurement:
    """Of a model m, at 8 tokens; compared with ``stock`` if that is given."""
    comparison = compare_scores(metric, scores, stock) if stock else None
    values = summarise(metric, scores)
    found = Measurement("m", scaling, metric, metric, 8, tuple(scores), *values, comparison=comparison)
    return replace(found, **changes)


def reference_losses(folder: Path, family: str, ids: np.ndarray) -> np.ndarray:
    """Losses from the reference model's logits, float64 [rows, length - 1]."""
    _, tensors = tiny.read(folder)
    logits = np.asarray(REFERENCES[family].logits(config_of(folder), tensors, ids, None), dtype=np.float64)
    return -np.take_along_axis(log_softmax(logits[:, :-1], axis=-1), ids[:, 1:, None], axis=-1)[..., 0]


def decoded(model: Any, ids: np.ndarray, hardware: Hardware = CPU, advance: Any = int) -> np.ndarray:
    """A decoder's losses of each token but the first."""
    return losses(model, hardware, next_tokens(ids), advance)[:, :-1]


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        *(("bloom", "none"), ("baichuan", "ntk"), ("falcon", "linear-length"), ("mpt", "ntk-position")),
        ("refact", "concave"),
    ],
)
def test_losses_are_the_reference_s(converted: Convert, tmp_path: Path, family: str, scaling: str) -> None:
    folder = converted(family, 12, scaling)
    ids = tiny.token_ids(3, 60)
    expected = reference_losses(folder, family, ids)
    with open_evaluated_model(tmp_path / "source", CPU, train_length=TRAIN_LENGTH) as evaluated:
        evaluated.scaled(Scaling("ntk", 7.0))  # an earlier scaling must leave no trace
        wanted = evaluated.model.resolve(Request(**SCALINGS[scaling]))
        assert np.abs(decoded(evaluated.scaled(wanted), ids) - expected).max() < 1e-4
    with open_evaluated_model(folder, CPU) as evaluated:
        assert evaluated.model.scaling == wanted
        assert np.abs(decoded(evaluated.scaled(wanted), ids) - expected).max() < 1e-4


def test_losses_do_not_depend_on_how_they_are_cut(
    pristine: Pristine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tiny.token_ids(5, 40)
    with open_evaluated_model(pristine("jais"), CPU) as evaluated:
        model = evaluated.scaled(evaluated.model.scaling)
        whole = decoded(model, ids)
        monkeypatch.setattr("converter.evaluation.trainable.LOGITS_AT_ONCE", 3 * tiny.VOCAB_SIZE)
        advanced: list[int] = []
        cut = decoded(model, ids, replace(CPU, batch_size=2), advanced.append)
    assert np.abs(whole - cut).max() < 1e-5
    assert advanced == [80, 80, 40]


def test_continuations_are_those_of_transformers(converted: Convert, tmp_path: Path) -> None:
    """Each prompt alone, greedily and without padding; the generation config's penalty is not used."""
    folder = converted("mpt", 12, "ntk-position")
    (tmp_path / "source" / "generation_config.json").write_text(
        '{"repetition_penalty": 9.0, "do_sample": true}'
    )
    prompts = [tuple(row[: 50 - 9 * number].tolist()) for number, row in enumerate(tiny.token_ids(5, 50))]
    model = load(folder)
    with open_evaluated_model(tmp_path / "source", CPU, train_length=TRAIN_LENGTH) as evaluated:
        tokenizer = evaluated.tokenizer
        scaled = evaluated.scaled(evaluated.model.resolve(Request(**SCALINGS["ntk-position"])))
        found = complete(scaled, tokenizer, replace(CPU, batch_size=2), prompts, 6)
    for prompt, text in zip(prompts, found, strict=True):
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :]
        assert text == tokenizer.decode(tokens.tolist(), skip_special_tokens=True)


@pytest.mark.parametrize("family", ["bloom", "mpt", "llama", "mosaic_bert"])
def test_a_model_is_spread_over_cpu_and_disk(
    pristine: Pristine, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """With no room for most of its layers, and the same numbers; its own device would be "meta"."""
    ids = tiny.token_ids(2, 40)
    scaling, found, devices = Scaling("ntk", 2.0), [], []
    source = pristine(family)
    free = sum(file.stat().st_size for file in source.glob("*.safetensors")) * 3 // 4
    for device in ("cpu", "auto"):
        if device == "auto":
            monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free, total=free))
        with open_evaluated_model(source, choose(device, "fp32", None)) as evaluated:
            batch = next_tokens(ids) if evaluated.model.decoder else masked_tokens(ids, ids % 3 == 0, 5)
            found.append(evaluated.losses(scaling, batch))
            if evaluated.model.decoder:
                found.append(evaluated.complete(scaling, [tuple(row.tolist()) for row in ids], 4))
            devices.append(evaluated.describe(scaling)["device"])
    half = len(found) // 2
    assert np.abs(found[0] - found[half]).max() < 1e-5
    assert found[1:half] == found[half + 1 :]
    assert devices[0] == "cpu"
    assert "disk" in devices[1]


def test_a_head_on_another_device() -> None:
    """The device "meta" stands for a second GPU; a loss refuses to mix it with the CPU, as CUDA does."""
    weight, targets = torch.empty(8, 4, device="meta"), torch.full((2, 3), 5)
    model = SimpleNamespace(
        config=SimpleNamespace(vocab_size=8),
        project=lambda states: states.to("meta") @ weight.T,
        run_backbone=lambda *_, **__: SimpleNamespace(last_hidden_state=torch.zeros(2, 3, 4)),
    )
    logits = model.project(torch.zeros(6, 4))
    with pytest.raises(RuntimeError, match="device"):
        torch.nn.functional.cross_entropy(logits, targets.flatten())
    found = trainable.losses(model, Batch(targets, targets))
    assert (found.device.type, len(found)) == ("meta", 6)


# Opening


@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_weights_are_hashed_once_at_most(
    pristine: Pristine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Those in the Hub's cache, whose files are links to their digests; a local model's are not."""
    source = shutil.copytree(pristine(family), tmp_path / "source")
    weights, blobs = source / "model.safetensors", tmp_path / "blobs"
    blobs.mkdir()
    blob = blobs / hashlib.sha256(weights.read_bytes()).hexdigest()
    weights.rename(blob)
    weights.symlink_to(blob)
    hashed: list[Path] = []

    def compared(path: Path, wanted: str | None, *_: Any, **__: Any) -> None:
        if wanted == blob.name:
            hashed.append(path)

    monkeypatch.setattr("converter.source.weight_files.check_digest", compared)
    monkeypatch.setattr("converter.weights.transfer.check_digest", compared)
    monkeypatch.setattr("converter.evaluation.evaluated_model.sha256", Mock(side_effect=AssertionError))
    with open_evaluated_model(source, CPU) as evaluated:
        assert evaluated.baseline == UNSCALED
        for factor in (1.0, 2.0, 4.0):
            evaluated.scaled(Scaling("ntk", factor))
    assert hashed == [weights]


def test_the_source_s_code_is_not_run(make_source: MakeSource) -> None:
    source = make_source("mpt", {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}})
    (source / "modeling_own.py").write_text("raise SystemExit('run')")
    with open_evaluated_model(source, CPU) as evaluated:
        assert type(evaluated.scaled(evaluated.model.scaling)).__name__ == "NtkMptForCausalLM"


EVIL = "import pathlib; pathlib.Path(__file__).with_name('was-run').touch()\nclass BaichuanTokenizer: pass\n"


def test_no_code_that_a_tokenizer_names_is_run(converted: Convert) -> None:
    """Not even in a converted repository that has the right tokenizer template."""
    folder = converted("bloom")
    names = {"AutoTokenizer": ["evil.BaichuanTokenizer", None]}
    edit_json(folder / "tokenizer_config.json", {"auto_map": names})
    (folder / "evil.py").write_text(EVIL)
    (folder / "tokenizer.model").touch()
    (folder / TEMPLATE).write_bytes((templates_folder() / TEMPLATE).read_bytes())
    with contextlib.suppress(ConverterError), open_evaluated_model(folder, CPU):
        pass
    assert not (folder / "was-run").exists()


def test_a_converted_rotary_model_must_be_what_its_record_says(tmp_path: Path) -> None:
    """And no code that it names is run."""
    folder, source = tmp_path / "out", rotary.rotary(tmp_path / "source")
    # In shards, which an index names.
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(source, max_shard_size="20kB")
    (source / "model.safetensors").unlink()
    convert(source, folder, scale=2)
    with open_evaluated_model(folder, CPU) as evaluated:
        evaluated.scaled(evaluated.model.scaling)
    config = json.loads((folder / "config.json").read_text())
    (folder / "evil.py").write_text(EVIL)
    (folder / TEMPLATE).touch()
    config["ntk_convert"][ROTARY][SOURCE_CONFIG]["auto_map"] = None
    for hostile in (
        {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}},
        {"rope_theta": 77.0, "rope_parameters": None},
    ):
        (folder / "config.json").write_text(json.dumps(config | hostile))
        with pytest.raises(ConverterError), open_evaluated_model(folder, CPU) as evaluated:
            evaluated.scaled(evaluated.model.scaling)
    for left_out in (
        {"_attn_implementation": "nobody/evil-kernel"},
        {"quantization_config": {"quant_method": "gptq"}},  # whose weights are floating point
    ):
        (folder / "config.json").write_text(json.dumps(config | left_out))
        with open_evaluated_model(folder, CPU) as evaluated:
            evaluated.scaled(evaluated.model.scaling)
    assert not (folder / "was-run").exists()


def test_what_a_rotary_model_has_read_before_changes_nothing(tmp_path: Path) -> None:
    """By itself, transformers' dynamic scaling would keep the frequencies of the longest text so far."""
    source = rotary.rotary(tmp_path / "source")
    short, long = tiny.token_ids(2, rotary.LENGTH), tiny.token_ids(2, 4 * rotary.LENGTH)
    with open_evaluated_model(source, CPU) as evaluated:
        model = evaluated.scaled(Scaling("ntk", dynamic="length", train_length=rotary.LENGTH))
        assert evaluated.hardware.rows(1) == 1
        first = decoded(model, short, evaluated.hardware)
        decoded(model, long, evaluated.hardware)
        assert np.array_equal(decoded(model, short, evaluated.hardware), first)
        prompts = [tuple(row[:40].tolist()) for row in short]
        alone = complete(model, evaluated.tokenizer, evaluated.hardware, prompts, 4)
        longer = tuple(long[0].tolist())
        assert complete(model, evaluated.tokenizer, evaluated.hardware, [longer, *prompts], 4)[1:] == alone


def test_text_ends_where_the_model_ends_it(pristine: Pristine) -> None:
    with open_evaluated_model(pristine("bloom"), CPU) as evaluated:
        model, tokenizer = evaluated.scaled(evaluated.model.scaling), evaluated.tokenizer
        prompts = [tuple(row.tolist()) for row in tiny.token_ids(4, 20)]
        whole = [text.split() for text in complete(model, tokenizer, CPU, prompts, 8)]
        end = whole[0][3]
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(end)
        cut = [text.split() for text in complete(model, tokenizer, CPU, prompts, 8)]
        with pytest.raises(SourceError, match="do not belong together"):
            decoded(model, np.array([[5, tiny.VOCAB_SIZE]]))
        tokenizer.pad_token = None
        assert len(complete(model, tokenizer, CPU, [(5,), (5, 6, 7)], 3)) == 2
    for before, after in zip(whole, cut, strict=True):
        assert after == (before[: before.index(end)] if end in before else before)


def test_a_rotary_model_is_converted_for_each_scaling(tmp_path: Path) -> None:
    source = rotary.rotary(tmp_path / "source")
    ids = tiny.token_ids(2, 100)
    with open_evaluated_model(source, CPU) as evaluated:
        for scaling in (UNSCALED, Scaling("ntk", 3.0), Scaling("linear", 2.0)):
            found = decoded(evaluated.scaled(scaling), ids)
            changes = {
                "none": {},
                "ntk": {"rope_theta": 10000.0 * 3.0 ** (16 / 14)},
                "linear": {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
            }[scaling.method]
            folder = shutil.copytree(source, tmp_path / scaling.method)
            edit_json(folder / "config.json", changes)
            plain = AutoModelForCausalLM.from_pretrained(folder).eval()
            with torch.no_grad():
                logits = plain(torch.from_numpy(ids)).logits[:, :-1].double()
            expected = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), torch.from_numpy(ids[:, 1:]), reduction="none"
            )
            assert np.abs(found - expected.numpy()).max() < 1e-4


# Windows of a text


@given(count=st.integers(1, 4), longest=st.integers(2, 60), data=st.data())
def test_every_length_sees_the_same_tokens(count: int, longest: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(2, longest))
    windows = np.arange(count * longest).reshape(count, longest)
    cut = pieces(windows, length)
    whole = longest // length * length
    assert cut.shape == (count * (longest // length), length)
    assert cut.ravel().tolist() == windows[:, :whole].ravel().tolist()


def test_losses_by_window_and_by_position() -> None:
    found = np.arange(12.0).reshape(4, 3)  # 2 windows of 2 pieces of 4 tokens, of which 3 are predicted
    everything = np.ones((4, 3), dtype=bool)
    assert window_losses(found, everything, 2) == (2.5, 8.5)
    buckets = by_position(found, everything, 1)
    assert [(each.start, each.end, each.loss) for each in buckets] == [(1, 2, 4.5), (2, 3, 5.5), (3, 4, 6.5)]
    many = by_position(np.ones((2, 1023)), np.ones((2, 1023), dtype=bool), 1)
    assert len(many) == BUCKETS
    assert [each.start for each in many][1:] == [each.end for each in many][:-1]
    assert (many[0].start, many[-1].end) == (1, 1024)


def test_windows_are_the_text_s_tokens(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(40_000)]
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    files[0].write_text(" ".join(words[:30_000]) + " ")
    files[1].write_text(" ".join(words[30_000:]))

    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word[1:]) for word in text.split()]}

    windows = read_windows(tokenizer, files, 1000, 100)
    assert windows.shape == (40, 1000)
    assert windows.ravel().tolist() == list(range(40_000))
    assert read_windows(tokenizer, files, 1000, 3).tolist() == windows[:3].tolist()


@pytest.mark.parametrize(
    ("lines", "blocks"),
    [
        ("他们在夜里读书。\n" * 40, 6),  # with line breaks
        (" " + "他们在夜里读书。" * 40, 6),
        ("ACGT" * 80, 5),
        ("ACGT " * 64, 6),
        ("a " + "ACGT" * 80, 6),
    ],
)
def test_a_text_without_spaces_is_read_in_blocks_too(
    lines: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of about the same size, and not more of them than it takes."""
    monkeypatch.setattr("converter.texts.BLOCK", 64)
    (tmp_path / "text").write_text(lines, encoding="utf-8")
    seen: list[str] = []

    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        seen.append(text)
        return {"input_ids": list(map(ord, text))}

    windows = read_windows(tokenizer, [tmp_path / "text"], len(lines), 1)
    assert "".join(map(chr, windows[0].tolist())) == "".join(seen) == lines
    assert len([text for text in seen if text]) <= blocks
    assert max(map(len, seen)) <= 2 * 64
    seen.clear()
    read_windows(tokenizer, [tmp_path / "text"], 20, 2)
    assert len(seen) <= 2  # no more than it takes


@pytest.mark.parametrize(
    ("texts", "count", "words"),
    [
        (1, 50, ("12 windows", "1 file")),
        (5, 60, ("60 windows", "5 files")),
        (6, 50, ("50 windows", "5 files")),  # the sixth is not read
        (6, 72, ()),
        (1, 1, ()),
    ],
)
def test_windows_of_few_files_are_told(
    texts: int, count: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    files = [tmp_path / str(number) for number in range(texts)]
    for file in files:
        file.write_text("w " * 120)
    lines: list[str] = []

    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1] * text.count("w")}

    assert read_windows(tokenizer, files, 10, count, lines.append).shape == (min(count, 12 * texts), 10)
    assert len(lines) == bool(words)
    says(lines, *words)


# Statistics


def wilson(successes: int, count: int) -> tuple[float, float]:
    z, p = 1.959963984540054, successes / count
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return middle - half, middle + half


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=60))
def test_accuracy_has_wilson_s_interval(scores: list[float]) -> None:
    value, low, high = summarise("accuracy", scores)
    expected = wilson(int(sum(scores)), len(scores))
    assert value == pytest.approx(sum(scores) / len(scores))
    assert (low, high) == pytest.approx(expected, abs=1e-9)


def test_perplexity_has_a_t_interval() -> None:
    """Quantile 0.975 of t with 3 degrees of freedom: 3.182446."""
    value, low, high = summarise(PERPLEXITY, [1.0, 2.0, 3.0, 4.0])
    half = 3.182446305 * math.sqrt(5 / 3) / 2
    assert (value, low, high) == pytest.approx((math.exp(2.5), math.exp(2.5 - half), math.exp(2.5 + half)))
    assert summarise(PERPLEXITY, [2.0]) == (math.exp(2.0), 0.0, math.inf)
    assert summarise("f1", [0.0, 0.1, 0.9, 1.0])[1:] == (0.0, 1.0)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40))
def test_pairs_are_compared_by_the_exact_sign_test(pairs: list[tuple[bool, bool]]) -> None:
    ours, theirs = [float(one) for one, _ in pairs], [float(other) for _, other in pairs]
    found = compare_scores("accuracy", ours, theirs)
    better = sum(one > other for one, other in pairs)
    worse = sum(one < other for one, other in pairs)
    assert (found.better, found.worse) == (better, worse)
    discordant, fewer = better + worse, min(better, worse)
    tail = sum(math.comb(discordant, number) for number in range(fewer + 1)) / 2**discordant
    assert found.p == pytest.approx(min(1.0, 2 * tail))
    assert found.difference == pytest.approx((better - worse) / len(pairs))
    assert found.low <= found.difference <= found.high
    lower = compare_scores(PERPLEXITY, [1.0, 1.1, 1.2], [1.5, 1.4, 1.1])
    assert (lower.better, lower.worse) == (2, 1)
    assert lower.difference == pytest.approx(math.exp(-0.7 / 3))


# Scalings


def test_the_scalings_are_the_cross_product() -> None:
    found = grid(["ntk", "none", "linear"], [2, 4], ["position"], [1, 2], 256)
    trained = TrainLength(256, "told")
    defaults = Defaults("position", "by-parts", RAMP)
    names = [str(request.resolve(trained, "a model", defaults)) for request in found]
    assert names[0] == "none"
    assert len(names) == len(set(names)) == 1 + 2 * (2 + 2)
    assert "linear, position-dynamic, rate 2 from 256 tokens" in names
    ramps = [(0.125, 0.5), (0.25, 1.0)]  # of by-parts alone
    found = grid(["ntk", "by-parts"], [4], ramps=ramps)
    assert [(each.method, each.ramp) for each in found] == [
        ("ntk", None),
        *(("by-parts", ramp) for ramp in ramps),
    ]
    found = grid(["concave", "none", "ntk"], [2], ["position"])  # once, whatever the others take
    assert [each.method for each in found] == ["none", "ntk", "ntk", "concave"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"methods": ["ntk"]}, ("`scales`",)),
        ({"methods": ["ntk"], "rates": [2]}, ("`rates`", "`dynamic`")),
        ({"methods": ["none"], "scales": [2]}, ("`scales`", "`methods`")),
        ({"methods": ["concave"], "dynamic": ["position"]}, ("`dynamic`", "method")),
        ({"methods": [], "dynamic": ["length"]}, ("`dynamic`", "method")),
        ({"methods": ["ntk"], "scales": [2], "ramps": [(0.1, 1)]}, ("`ramps`", "by-parts")),
        ({"methods": ["ntk"], "scales": [0.5]}, ("from 1 to",)),
    ],
)
def test_scalings_that_cannot_be_meant(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with raises(UsageError, words):
        grid(**arguments)


# Results


@pytest.fixture(scope="module")
def known_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of words that the example's tokenizer knows."""
    vocabulary = json.loads((EXAMPLE / "tokenizer.json").read_text())["model"]["vocab"]
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(np.random.default_rng(0).choice(list(vocabulary)[4:], 400)))
    return file


@pytest.fixture(scope="module")
def results(known_words: Path) -> Results:
    return evaluate(
        [EXAMPLE],
        tasks=[Words()],
        text=[known_words],
        methods=["linear", "none"],
        scales=[4],
        lengths=[20, 40],
        items=6,
        train_length=256,
    )


def test_results_survive_their_json(results: Results, known_words: Path) -> None:
    alone = evaluate(EXAMPLE, tasks=[Words()], text=str(known_words), lengths=[20], items=1)
    assert alone.measurements[-1].high == math.inf
    last = alone.measurements[-1]
    overflowed = replace(last, scores=(math.inf,), value=math.inf, low=-math.inf, positions=())
    for found in (results, alone, replace(alone, measurements=[overflowed])):
        again = Results.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False)))
        assert again.measurements == list(found.measurements)


@pytest.mark.parametrize(
    ("better", "worse", "p", "shows"), [(9, 1, 0.02, "gain"), (1, 9, 0.02, "loss"), (9, 1, 0.06, "nothing")]
)
def test_older_results_tell_what_a_sign_test_showed(
    results: Results, better: int, worse: int, p: float, shows: str
) -> None:
    value = json.loads(json.dumps(results.to_json()))
    older = value["measurements"][-1]["comparison"]
    older |= {"better": better, "worse": worse, "p": p}
    del older["shows"]
    last = Results.from_json(value).measurements[-1].comparison
    assert last is not None
    assert last.shows == shows
    assert last.significant == (p < 0.05)


@pytest.mark.parametrize(
    ("place", "content"),
    [
        (("format",), 7),
        (("measurements",), 7),
        (("measurements", 0), None),
        (("measurements", 0, "length"), "long"),
        (("measurements", 0, "metric"), "luck"),
        (("measurements", 0, "scores"), ["x"]),
        (("measurements", 7, "comparison"), {}),
        (("measurements", 7, "comparison", "shows"), "luck"),
        (("models",), []),
        (("models",), {"tiny-bloom": 7}),
        (("models",), {"tiny-bloom": {"train_length": "256"}}),
        (("models",), {"tiny-bloom": {"train_length": 0}}),
        (("measurements", 0, "depths"), [0.5]),
        (("measurements", 0, "depths", 1), 1.5),
        (("measurements", 0, "depths", 1), math.nan),
        (("settings",), 7),
    ],
)
def test_a_damaged_results_file_is_refused(results: Results, place: tuple[Any, ...], content: Any) -> None:
    value = json.loads(json.dumps(results.to_json()))
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = content
    with pytest.raises(SourceError, match="results file"):
        Results.from_json(value)


def test_the_first_scaling_is_what_others_are_compared_with(results: Results) -> None:
    assert [each.scaling for each in results.measurements[:4]] == ["none"] * 4
    assert [each.comparison for each in results.measurements[:4]] == [None] * 4
    for first, each in zip(results.measurements[:4], results.measurements[4:], strict=True):
        assert (each.task, each.length) == (first.task, first.length)
        assert each.comparison == compare_scores(each.metric, each.scores, first.scores)


def test_models_are_compared_only_on_the_same_prompts(tmp_path: Path) -> None:
    other = tiny.FACTORIES["bloom"](tmp_path / "other", 4)

    @dataclass(frozen=True)
    class Own(Words):
        def items(self, tokenizer: Any, *arguments: Any) -> Any:
            found = super().items(tokenizer, *arguments)
            if len(tokenizer) < tiny.VOCAB_SIZE + 1:
                return found
            return {length: items[::-1] for length, items in found.items()}

    for task, compared in ((Words(), True), (Own(), False)):
        found = evaluate([other, EXAMPLE], tasks=[task], lengths=[20], items=3, train_length=256)
        assert [each.model for each in found.measurements] == ["other", "tiny-bloom"]
        assert (found.measurements[1].comparison is not None) == compared


def test_models_are_compared_only_on_windows_of_the_same_length(pristine: Pristine, tmp_path: Path) -> None:
    """A short text is the same tokens for both, but in six windows of 40 and in three of 80."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{number % 50 + 4}" for number in range(245)))
    models = []
    for trained in (10, 20):
        models.append(tmp_path / str(trained))
        convert(pristine("mpt"), models[-1], method="none", train_length=trained, verify=False)
    found = evaluate(models, text=text).measurements
    assert [(each.length, each.items) for each in found] == [
        *((length, 6) for length in (10, 20, 40)),
        *((length, 3) for length in (20, 40, 80)),
    ]
    assert all(each.comparison is None for each in found)


def test_the_table_has_every_value(results: Results) -> None:
    assert len(results.measurements) == 8
    table = results.table("words").splitlines()
    assert re.split(r"\s*\|\s*", table[0])[1:-1] == ["scaling", "20", "40"]
    none = results.measurements[0]
    assert (none.scaling, none.task, none.length) == ("none", "words", 20)
    assert f"{100 * none.value:.1f} ({100 * none.low:.1f} to {100 * none.high:.1f})" in table[2]
    # The second row has the intervals of its differences from the first on the same items.
    number = r"[+-]\d+\.\d"
    assert len(re.findall(rf"\d+\.\d \[{number} to {number}\]", table[3])) == 2
    ratio = r"x \d\.\d{3} to \d\.\d{3}"
    assert len(re.findall(rf"\d \[{ratio}\]", results.table("perplexity"))) == 2


def test_the_last_quarter_of_a_window_has_a_table_of_its_own(results: Results) -> None:
    """Its perplexity, and the ratio to the first row's."""
    found = [each for each in results.measurements if each.task == PERPLEXITY and each.length == 40]
    late = []
    for each in found:
        parts = [part for part in each.positions if part.start >= 30]
        assert (parts[0].start, parts[-1].end) == (30, 40)
        late.append(math.exp(sum(part.loss * (part.end - part.start) for part in parts) / 10))
    assert [each.late for each in found] == pytest.approx(late)
    text = results.report().split("In the last quarter of each window:")[1]
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in text.strip().splitlines()[:4]]
    assert [rows[0], rows[2][0], rows[3][0]] == [["scaling", "20", "40"], "none", "linear, factor 4"]
    assert float(rows[2][2]) == pytest.approx(late[0], rel=1e-2)
    assert re.search(r"\[x (\d+\.\d{3})\]$", rows[3][2])[1] == f"{late[1] / late[0]:.3f}"  # type: ignore[index]
    assert "last quarter" not in Results([measured("none", PERPLEXITY, [1.0])], {}).report()


DEFAULT = str(Scaling("by-parts", dynamic="position", train_length=2048, ramp=(256.0, 1024.0)))


@pytest.mark.parametrize(
    ("metric", "scores", "stock"),
    [("accuracy", [1.0] * 40, [0.0] * 40), (PERPLEXITY, [4.8, 4.9, 4.7, 4.8, 4.9, 4.8], [5.2] * 6)],
)
@pytest.mark.parametrize(
    ("rows", "labels", "legend"),
    [
        (
            [("m", "none"), ("m", DEFAULT)],
            ["none", "by-parts by position"],
            ["by-parts by position: by-parts, position-dynamic, rate 1 from 2048 tokens, ramp 256 to 1024"],
        ),
        ([("m", "none"), ("n", DEFAULT)], ["m", "n"], ["m: none", "n: by-parts, position-dynamic, rate 1"]),
        (
            [(model, scaling) for model in "mn" for scaling in ("none", "ntk, factor 4")],
            ["m: none", "m: ntk, factor 4", "n: none", "n: ntk, factor 4"],
            ["m: none: none", "m: ntk, factor 4: ntk, factor 4"],
        ),
    ],
)
def test_tables_of_any_lengths_fit_80_columns(
    metric: Any,
    scores: list[float],
    stock: list[float],
    rows: list[tuple[str, str]],
    labels: list[str],
    legend: list[str],
) -> None:
    """Two lengths side by side, as long as names are short; and the full names stand below, once."""
    results = Results(
        [
            measured(scaling, metric, scores, stock if index else (), model=model, length=length)
            for length in (2048, 4096, 8192)
            for index, (model, scaling) in enumerate(rows)
        ],
        {},
    )
    tables = results.table(metric).split("\n\n")
    heads = [table.splitlines()[0].replace("|", " ").split()[1:] for table in tables]
    assert heads == [["2048", "4096"], ["8192"]]
    text = results.report()
    assert max(map(len, text.splitlines())) <= 80
    for table in tables:
        assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == labels
    said = " ".join(text[text.index("\n- ") :].split())
    assert [said.count(line) for line in legend] == [1] * len(legend)


@pytest.mark.parametrize(
    ("metric", "scores", "stock", "mark", "verdict"),
    [
        ("accuracy", [1.0] * 8, [0.0] * 8, "]*", "helps"),
        ("accuracy", [0.0] * 8, [1.0] * 8, "]*", "does not help"),
        ("accuracy", [1.0] * 8, [1.0] * 8, "]?", "cannot tell"),
        ("accuracy", [1.0] * 80, [1.0] * 80, "]", "does not help"),
        (PERPLEXITY, [2.0, 2.1], [2.1, 2.2], "]?", "cannot tell"),
        (PERPLEXITY, [2.0, 2.1, 2.0] * 3, [2.1, 2.3, 2.2] * 3, "]?", "cannot tell"),
        (PERPLEXITY, [2.0, 2.1, 2.0] * 4, [2.1, 2.3, 2.2] * 4, "]*", "helps"),
        (PERPLEXITY, [2.0] * 8, [2.0] * 8, "[the same]", "cannot tell"),
    ],
)
def test_what_a_difference_shows_is_marked(
    metric: Any, scores: list[float], stock: list[float], mark: str, verdict: str
) -> None:
    results = Results([measured("none", metric, stock), measured("ntk", metric, scores, stock)], {})
    cells = [line.strip(" |") for line in results.table(metric).splitlines()]
    assert cells[3].endswith(mark)
    assert [each["verdict"] for each in results.to_json()["measurements"]] == [None, verdict]
    assert ("\n? too few items" in results.report()) == (mark == "]?")
    assert ("\n* differs" in results.report()) == (mark == "]*")


@pytest.mark.parametrize(
    ("trained", "methods", "lengths"),
    [
        (256, ["none", "linear"], {20}),
        (10, ["none", "linear"], {20, 40}),
        (256, ["linear", "ntk"], {20, 40}),  # without none: the scaling may be to blame
    ],
)
def test_a_task_without_a_right_answer_stops_where_it_should_be_possible(
    trained: int, methods: list[str], lengths: set[int]
) -> None:
    class Never(Words):
        def score(self, _: Item, __: str) -> float:
            return 0.0

    options: dict[str, Any] = {"methods": methods, "scales": [2], "train_length": trained}
    found = evaluate([EXAMPLE], tasks=[Never()], lengths=[20, 40], items=3, **options)
    assert {each.length for each in found.measurements} == lengths
    assert len(found.measurements) == 2 * len(lengths)


@pytest.mark.parametrize(
    ("value", "text"),
    [(7.254, "7.25"), (123.44, "123.4"), (99999.0, "99999.0"), (1234567.8, "1.2e+06"), (math.inf, "inf")],
)
def test_large_perplexities_are_short(value: float, text: str) -> None:
    row = Results([measured("none", PERPLEXITY, [1.0], value=value)], {}).table(PERPLEXITY).splitlines()[2]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["none", text]


def test_a_model_that_fails_without_scaling_is_named() -> None:
    found = [
        measured(scaling, "accuracy", [value] * 4, model=model, task=task, length=length)
        for model, scaling, task, length, value in [
            ("able", "none", "lines", 64, 0.9),
            ("able", "none", "lines", 128, 0.0),
            ("unable", "none", "lines", 128, 0.5),
            ("unable", "none", "lines", 64, 0.0),
            ("unable", "none", "passkey", 64, 0.04),
            ("unable", "none", "topics", 64, 0.2),
            ("unable", "ntk, factor 4", "topics", 64, 0.0),
        ]
    ]
    text = Results(found, {name: {"train_length": 64} for name in ("able", "unable")}).report()
    assert "Unscaled, unable" in text
    assert "lines (0 % at 64 tokens), passkey" in text
    assert "topics (" not in text.partition("Unscaled")[2]
    assert "Unscaled, able" not in text
    # Beyond the trained length, failing is what scaling is for.
    assert "Unscaled" not in Results(found[2:], {"unable": {"train_length": 32}}).report()


@pytest.mark.parametrize(
    ("loss", "length", "scaling", "read"),
    [
        (math.log(100) + 0.49, 64, "none", True),
        (math.log(100) + 0.51, 64, "none", False),
        (math.log(100) + 0.51, 65, "none", True),  # beyond the trained length, that is what scaling is for
        (math.log(100) + 0.51, 64, "ntk, factor 4", True),
        (math.nan, 64, "none", False),
    ],
)
def test_a_text_that_is_read_worse_than_by_guessing_is_named(
    loss: float, length: int, scaling: str, read: bool
) -> None:
    found = [measured(scaling, PERPLEXITY, [loss] * 4, length=length)]
    text = Results(found, {"m": {"train_length": 64, "vocabulary": 100}}).report()
    assert ("Unscaled, m reads the text worse than guessing" in text) != read
    assert "worse than guessing" not in Results(found, {"m": {"train_length": 64}}).report()


def test_a_trained_model_reads_random_words_worse_than_by_guessing(results: Results) -> None:
    assert "tiny-bloom reads the text worse than guessing" in results.report()
    assert results.models["tiny-bloom"]["vocabulary"] == 742


# The command


def test_the_command(run: RunCli, tmp_path: Path) -> None:
    cases = tmp_path / "cases.jsonl"
    record = "LINE amber-otter 24 LINE brave-heron 31 LINE amber-lynx 17 ASK"
    asked = {"amber-otter": "24", "brave-heron": "31", "amber-lynx": "24"}
    rows = [{"prompt": f"{record} {name}", "answer": answer} for name, answer in asked.items()]
    cases.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out"
    words = ["--methods", "none,ntk", "--scales", "2,4", "--prompts", cases, "--tasks", "prompts"]
    found = run("eval", EXAMPLE, *words, "--out", out)
    assert found.code == 0, found.err
    assert found.out.count("66.7") >= 3
    assert {path.name for path in out.iterdir()} == {"results.json", "results.md", "prompts.png"}
    stored = Results.from_json(json.loads((out / "results.json").read_text()))
    assert [(each.length, each.scores) for each in stored.measurements] == [(16, (1.0, 1.0, 0.0))] * 3
    assert stored.report() in found.out
    again = run("eval", EXAMPLE, *words, "--out", out)
    assert (again.code, "--overwrite" in again.err) == (1, True)


def test_the_bars_say_what_runs(pristine: Pristine, capfd: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"methods": ["none", "ntk"], "dynamic": ["position"], "train_length": 16}
    evaluate([pristine("bloom")], tasks=[Words()], lengths=[20], items=2, progress=True, **options)
    said = capfd.readouterr().err
    for title in ("verifying: ", "none: ", "ntk by position: "):
        assert title in said
    assert "verified loading: 100%" in said


def test_tasks_are_given_by_name_too(pristine: Pristine) -> None:
    model, options = pristine("bloom"), {"lengths": [300], "items": 2}
    named = [evaluate(model, tasks=given, **options) for given in (["passkey", Words()], "passkey")]
    assert [each.tasks() for each in named] == [["passkey", "words"], ["passkey"]]
    made = evaluate(model, tasks=[make_task("passkey")], **options)
    assert made.measurements == named[1].measurements
    for wrong, words in (("lime", ("'lime'", "passkey")), ("prompts", "make_task")):
        with raises(UsageError, words):
            evaluate(model, tasks=[wrong], **options)
        with raises(UsageError, words):
            tune(model, 300, tasks=[wrong], train_length=64)


def test_the_cpu_is_for_machines_without_cuda_and_computes_in_float32_where_memory_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "meminfo").write_text("MemAvailable: 1000000 kB")
    monkeypatch.setattr("converter.evaluation.runner.MEMORY", tmp_path / "meminfo")
    hardware = choose(None, None, 3)
    assert hardware.device.type == "cpu"
    assert hardware.dtype_of(10**8) is torch.float32
    assert hardware.dtype_of(10**9) == "auto"
    assert replace(hardware, device=torch.device("cuda")).dtype_of(1) == "auto"
    assert [hardware.rows(length) for length in (1, 2048, 9000)] == [3, 2, 1]


def test_nothing_is_left_and_the_source_is_not_touched(
    make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, temporary = make_source("bloom", num_heads=6), tmp_path / "temporary"
    temporary.mkdir()
    before = fingerprint(source)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    options: dict[str, Any] = {"tasks": [Words()], "methods": ["none", "ntk"], "scales": [2], "lengths": [16]}
    evaluate([source], items=3, **options)
    for error, raised in (
        (KeyboardInterrupt("x"), pytest.raises(KeyboardInterrupt)),
        (torch.OutOfMemoryError(), pytest.raises(UsageError, match="enough memory")),
    ):
        monkeypatch.setattr(EvaluatedModel, "scaled", Mock(side_effect=error))
        with raised:
            evaluate([source], items=3, **options)
    assert list(temporary.iterdir()) == []
    assert fingerprint(source) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_a_gpu_gives_what_the_cpu_gives(pristine: Pristine) -> None:
    ids = tiny.token_ids(3, 60)
    prompts = [tuple(row[:40].tolist()) for row in ids]
    found = []
    for hardware in (CPU, choose("cuda", "fp32", None)):
        with open_evaluated_model(pristine("mpt"), hardware) as evaluated:
            model = evaluated.scaled(Scaling("ntk", 4.0))
            texts = complete(model, evaluated.tokenizer, hardware, prompts, 4)
            found.append((decoded(model, ids, hardware), texts))
    assert np.abs(found[0][0] - found[1][0]).max() < 1e-3
    assert found[0][1] == found[1][1]
