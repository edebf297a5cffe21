"""A converted repository is converted like any source: what this tool wrote, and what was saved of it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BloomForCausalLM,
    Trainer,
    TrainingArguments,
)

from converter import SourceError, convert, inspect, tune, validate
from converter.evaluation.checks import trained_length_below
from converter.evaluation.evaluated_model import open_evaluated_model
from converter.evaluation.runner import choose
from converter.evaluation.statistics import compare_scores
from tests import reference, tiny
from tests.changes import Change, all_of, config, nothing, tensors, written
from tests.conftest import Run, edit_json, fingerprint
from tests.messages import Words, raises, says
from tests.patched import config_of, fitted_scaling, tempered
from tests.reference import rotary as rotary_reference
from tests.test_sentence_transformers import MODULES
from tests.test_sentence_transformers import source as embedding_source
from tests.tiny import rotary as tiny_rotary
from tests.tiny.layout import change_tensors

SOURCE = "org/tiny-bloom"
TRAINED = 24
FACTORIES = {
    **tiny.FACTORIES,
    **tiny.ENCODERS,
    "rotary": lambda place, _: tiny_rotary.rotary(place, "gpt_neox"),
}
NEW: dict[str, dict[str, Any]] = {
    "decoder": {"dynamic": "position"},
    "encoder": {"dynamic": "length"},
    "rotary": {"dynamic": "length"},
}


def again(source: Path, out: Path, **options: Any) -> Path:
    return convert(source, out, **{"verify": False, **options}).path


def load(folder: Path, auto: Any = AutoModelForCausalLM) -> Any:
    return auto.from_pretrained(folder, trust_remote_code=True).eval()


def same_files(one: Path, other: Path) -> None:
    """All files are equal; the cards but for the folders' names."""
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    for path in one.iterdir():
        ours, theirs = (each.read_bytes() for each in (path, other / path.name))
        if path.name == "README.md":
            ours, theirs = (
                each.replace(b"/" + place.name.encode(), b"")
                for each, place in ((ours, one), (theirs, other))
            )
        assert ours == theirs, path.name


def right(name: str, folder: Path) -> None:
    """The model computes what the formula says, in float64."""
    ids = tiny.token_ids(2, 2 * TRAINED)
    config, tensors = tiny.read(folder)
    auto = AutoModelForMaskedLM if name in tiny.ENCODERS else AutoModelForCausalLM
    with torch.no_grad():
        found = load(folder, auto)(torch.from_numpy(ids)).logits
    if name == "rotary":
        scaling = config["ntk_convert"]["rotary"]["scaling"]
        factor = scaling.get("factor") or ids.shape[1] / scaling["train_seq_len"]
        dim = int(config["hidden_size"] / config["num_attention_heads"] * config["rotary_pct"])
        base = 10_000.0 * factor ** (dim / (dim - 2))
        frequencies = tuple(base ** (-2 * pair / dim) for pair in range(dim // 2))
        expected = np.stack([rotary_reference.logits(config, tensors, row, frequencies) for row in ids])
    else:
        network = (reference.FAMILIES | reference.ENCODERS)[name]
        expected = network.logits(config, tensors, ids, np.ones_like(ids))
    np.testing.assert_allclose(found.double().numpy(), expected, atol=2e-4)


def generates_alike(folder: Path) -> None:
    """With and without a cache."""
    model, ids = load(folder), torch.from_numpy(tiny.token_ids(2, TRAINED))
    options = {
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }
    assert torch.equal(*(model.generate(ids, use_cache=cached, **options) for cached in (True, False)))


@pytest.mark.parametrize("name", FACTORIES)
def test_a_conversion_of_a_conversion_is_one_of_the_source(name: str, tmp_path: Path) -> None:
    """Kept or replaced, its scaling is that of the source; every file is."""
    source = FACTORIES[name](tmp_path / "source", 4)
    kind = name if name == "rotary" else "decoder" if name in tiny.FACTORIES else "encoder"
    first = again(source, tmp_path / "first", scale=8, train_length=TRAINED)
    same_files(first, again(first, tmp_path / "kept"))
    for options in ({"scale": 2}, NEW[kind]):
        new = again(first, tmp_path / "new", **options, overwrite=True)
        same_files(new, again(source, tmp_path / "direct", **options, train_length=TRAINED, overwrite=True))
        right(name, new)
    if kind == "decoder":
        generates_alike(new)


# What older versions wrote


def as_older(folder: Path, *, listed: bool = False) -> Path:
    """A repository as early versions wrote it: a shorter record, a key that is gone, a list of names."""
    config = config_of(folder)
    record = {key: config["ntk_convert"][key] for key in ("source", "commit", "train_length")}
    edit_json(folder / "config.json", {"ntk_convert": {**record, "version": "0.1.0"}, "attn_impl": "torch"})
    names = sorted(path.name for path in folder.iterdir())
    (folder / "ntk_convert.json").write_text(json.dumps({"files": names}))
    if not listed:
        (folder / "ntk_convert.json").unlink()
    return folder


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", ["mpt", "jina_bert"])
def test_what_older_versions_wrote(name: str, listed: bool, tmp_path: Path) -> None:
    """Limits are not multiplied again, and whose weights they are is not known."""
    source = FACTORIES[name](tmp_path / "source", 4)
    key = {"mpt": "max_seq_len", "jina_bert": "max_position_embeddings"}[name]
    first = again(source, tmp_path / "first", scale=4)
    limit = config_of(first)[key]
    assert limit == 4 * config_of(source)[key]
    as_older(first, listed=listed)
    result = convert(first, tmp_path / "second", scale=4)
    config = config_of(tmp_path / "second")
    assert config[key] == limit
    assert "attn_impl" not in config
    says(result.notes, "input limits are kept")
    assert config["ntk_convert"]["weights"] == "unknown"
    assert config["ntk_convert"]["from"] == {"source": "first", "commit": None, "subfolder": None}
    right(name, tmp_path / "second")


def test_a_temperature_for_all_heads_is_refused(tmp_path: Path) -> None:
    """The key of an experiment, which no option made and no code honours."""
    first = again(tiny.FACTORIES["bloom"](tmp_path / "source", 4), tmp_path / "first", scale=4)
    scaling = {**config_of(first)["alibi_scaling"], "temperature": 0.5}
    edit_json(first / "config.json", {"alibi_scaling": scaling})
    with raises(SourceError, "'temperature'"):
        convert(first, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_temperatures_are_kept(tmp_path: Path) -> None:
    first = tempered(again(tiny.FACTORIES["bloom"](tmp_path / "source", 4), tmp_path / "first", scale=4))
    second = again(first, tmp_path / "second")
    assert config_of(second)["alibi_scaling"] == config_of(first)["alibi_scaling"]
    right("bloom", second)


def test_limits_of_eight_and_then_two_are_those_of_two(tmp_path: Path) -> None:
    """In config.json, the tokenizer and the files of sentence-transformers, up and down again."""
    source = tiny.ENCODERS["jina_bert"](tmp_path / "source", 4)
    (source / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    own = config_of(source)["max_position_embeddings"]
    first = again(source, tmp_path / "first", scale=8)
    second = again(first, tmp_path / "second", scale=2)
    for folder, factor in ((first, 8), (second, 2)):
        assert config_of(folder)["max_position_embeddings"] == factor * own
        limit = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        assert limit == factor * own
    kept = again(again(source, tmp_path / "long", scale=2, max_length=4000), tmp_path / "kept")
    assert config_of(kept)["max_position_embeddings"] == 4000
    unscaled = again(first, tmp_path / "none", method="none")
    assert json.loads((unscaled / "sentence_bert_config.json").read_text()) == {"max_seq_length": 64}


# Fitted slopes, code, graphs, links


def test_fitted_slopes_keep_their_record(tmp_path: Path) -> None:
    slopes = {**fitted_scaling(4, 2), "fitted": {"note": "mine"}}
    first = again(tiny.FACTORIES["bloom"](tmp_path / "source", 4), tmp_path / "first", slopes=slopes)
    same_files(first, again(first, tmp_path / "second"))
    (first / "slopes.json").unlink()
    (first / "ntk_convert.json").unlink()
    third = again(first, tmp_path / "third")
    assert json.loads((third / "slopes.json").read_text()) == fitted_scaling(4, 2)
    new = again(first, tmp_path / "new", scale=2)
    assert not (new / "slopes.json").exists()
    right("bloom", new)


def test_notes_on_what_is_not_taken_over(tmp_path: Path) -> None:
    first = again(tiny.FACTORIES["bloom"](tmp_path / "source", 4), tmp_path / "first", scale=2)
    with (first / "modeling_ntk_bloom.py").open("a") as file:
        file.write("# mine\n")
    (first / "model.onnx").write_bytes(b"")
    (first / "README.md").write_text(
        (first / "README.md").read_text() + "\n## ONNX\n\nA graph.\n\n## Mine\n\nText.\n"
    )
    result = convert(first, tmp_path / "second")
    says(result.notes, "modeling_ntk_bloom.py", "ONNX graphs")
    assert "model.onnx" not in result.files
    card = (tmp_path / "second/README.md").read_text()
    assert ("## ONNX" in card, "## Mine\n\nText." in card) == (False, True)
    assert validate(tmp_path / "second").passed


@pytest.mark.parametrize("link", ["hard", "symbolic"])
def test_linked_weights_are_read(link: Any, tmp_path: Path) -> None:
    first = again(tiny.FACTORIES["bloom"](tmp_path / "source", 4), tmp_path / "first", scale=2)
    second = again(first, tmp_path / "second", link=link)
    files = json.loads((second / "ntk_convert.json").read_text())["files"]
    assert files == json.loads((first / "ntk_convert.json").read_text())["files"]
    change_tensors(
        first, lambda tensors: tensors["transformer.h.0.mlp.dense_4h_to_h.bias"].fill_(float("nan"))
    )
    with raises(SourceError, "NaN or infinite"):
        convert(first, tmp_path / "no", link=link)


# What transformers, PEFT and a Trainer save


def trained(model: Any) -> Any:
    """After one step with a large rate."""
    ids = torch.from_numpy(tiny.token_ids(2, 20))
    labels = torch.tensor([0, 1]) if hasattr(model, "score") or hasattr(model, "classifier") else ids
    model.train()(ids, labels=labels).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    return model.eval()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted repository whose source is said to be on the Hub; do not change it."""
    place = tmp_path_factory.mktemp("again")
    source = tiny.FACTORIES["bloom"](place / "source", 4)
    folder = again(source, place / "ntk", scale=2, train_length=32)
    edit_json(folder / "config.json", {"ntk_convert": config_of(folder)["ntk_convert"] | {"source": SOURCE}})
    return folder


@pytest.fixture
def saved(converted: Path, tmp_path: Path) -> Path:
    """It, fine-tuned and saved in its own folder."""
    folder = Path(shutil.copytree(converted, tmp_path / "tuned"))
    trained(load(converted)).save_pretrained(folder)
    return folder


MODELS: dict[str, tuple[str, str, Any]] = {
    "bloom": ("bloom", "linear", AutoModelForCausalLM),
    "new head": ("jina_bert", "ntk", AutoModelForSequenceClassification),
    "stored slopes": ("jais", "ntk", AutoModelForCausalLM),
    "sentencepiece": ("baichuan", "ntk", AutoModelForCausalLM),
    "replit": ("replit", "by-parts", AutoModelForCausalLM),
    **{f"rotary {how}": ("rotary", how, AutoModelForCausalLM) for how in ("ntk", "linear", "by-parts")},
}
"""Name -> family, scaling, and the class that is fine-tuned."""


@pytest.mark.version
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_transformers_saved(tmp_path: Path, name: str) -> None:
    """Its scaling kept, it computes what the tuned one does; with another one, what the formula says."""
    family, method, auto = MODELS[name]
    source = FACTORIES[family](tmp_path / "source", 4)
    done = convert(source, tmp_path / "ntk", verify=False, method=method, scale=3, train_length=32)
    model = trained(load(tmp_path / "ntk", auto))
    model.save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(tmp_path / "ntk", trust_remote_code=True).save_pretrained(
        tmp_path / "saved"
    )
    for file in (tmp_path / "saved").glob("*.py"):  # some versions do not save the code
        file.unlink()

    result = convert(tmp_path / "saved", tmp_path / "out")
    assert str(result.scaling) == str(done.scaling)
    assert result.train_length == 32
    record = config_of(tmp_path / "out")["ntk_convert"]
    assert (record["source"], record["weights"]) == ("source", "unknown")
    ids = torch.from_numpy(tiny.token_ids(2, 20))
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "out", auto)(ids).logits, model(ids).logits)
    AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    again(tmp_path / "saved", tmp_path / "new", method="ntk", scale=2)
    if name != "new head":
        right(family, tmp_path / "new")


@pytest.mark.version
@pytest.mark.parametrize("how", ["Trainer", "half shards", "LoRA", "pickle"])
def test_ways_to_save(converted: Path, tmp_path: Path, how: str) -> None:
    model, folder = load(converted), tmp_path / "saved"
    if how == "half shards":
        trained(model).half().save_pretrained(folder, max_shard_size="20kB")
    elif how == "LoRA":
        [names] = re.findall(r"target_modules=(\[.*?\])", (converted / "README.md").read_text())
        adapted = get_peft_model(model, LoraConfig(target_modules=json.loads(names), init_lora_weights=False))
        adapted.merge_and_unload().save_pretrained(folder)
    elif how == "Trainer":
        rows = [{"input_ids": row, "labels": row} for row in torch.from_numpy(tiny.token_ids(2, 20))]
        options: dict[str, Any] = {"max_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True}
        arguments = TrainingArguments(str(tmp_path / "run"), **options)
        tokenizer = AutoTokenizer.from_pretrained(converted, trust_remote_code=True)
        Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer).train()
        [folder] = (tmp_path / "run").glob("checkpoint-*")
    else:
        trained(model).save_pretrained(folder)
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    result = convert(folder, tmp_path / "out")
    assert str(result.scaling) == "ntk, factor 2"
    assert not {"optimizer.pt", "trainer_state.json", "training_args.bin"} & result.files.keys()
    if how != "half shards":
        right("bloom", tmp_path / "out")


def test_a_tuned_model_is_compared_with_itself(saved: Path, converted: Path) -> None:
    """What scales it is judged against the scaling that it was trained with."""
    assert inspect(saved).alibi_scaling == {"type": "ntk", "factor": 2.0}
    for folder, baseline in ((saved, "ntk, factor 2"), (converted, "none")):
        with open_evaluated_model(folder, choose("cpu", None, None)) as evaluated:
            assert str(evaluated.baseline) == baseline
            assert trained_length_below(evaluated.model, 64) == 32
            assert not evaluated.other_code
    with (saved / "modeling_ntk_bloom.py").open("a") as file:
        file.write("raise SystemExit\n")
    with open_evaluated_model(saved, choose("cpu", None, None)) as evaluated:
        assert evaluated.other_code


@pytest.mark.parametrize("items", [4, 8])
def test_tuning_compares_with_the_scaling_that_a_model_was_tuned_with(
    saved: Path, tmp_path: Path, items: int
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{number}" for number in tiny.token_ids(1, 2000)[0]))
    found = tune(saved, 64, text=text, items=items)
    assert str(found.baseline) == "ntk, factor 2"
    [choice] = found.choices
    at_target = {each.scaling: each for each in found.curve.measurements if each.length == 64}
    assert [*at_target] == [str(found.baseline), str(choice.scaling)]
    stock, best = at_target.values()
    assert stock.items == items // 2
    assert choice.judgement.comparison == compare_scores("perplexity", best.scores, stock.scores)
    assert choice.judgement.comparison == best.comparison
    assert choice.at_short["perplexity"].better + choice.at_short["perplexity"].worse == items // 2


# What is refused, in one line


def stock(folder: Path) -> None:
    """``BloomForCausalLM`` only warns of the model type, and trains and saves a model that is not scaled."""
    transformers.logging.set_verbosity_error()
    BloomForCausalLM.from_pretrained(folder).save_pretrained(folder)


REFUSED: dict[str, tuple[Change, Words]] = {
    "two weights": (
        written("model.safetensors.index.json", "{}"),
        ("model.safetensors", "model.safetensors.index.json"),
    ),
    "quantised": (
        all_of(
            config(quantization_config={"load_in_4bit": True}),
            tensors(lambda tensors: tensors.update(extra=torch.zeros(4, dtype=torch.uint8))),
        ),
        "quantization_config is set",
    ),
    "the stock class": (stock, ("saved by the stock class", "without the scaling")),
    "another class": (
        config(architectures=["EvilModel"]),
        ("architectures", "'EvilModel'"),
    ),
    "a damaged record": (
        config(ntk_convert={"source": 1}),
        ("config.json", "ntk_convert has source 1"),
    ),
    "a scaling of a newer version": (
        config(alibi_scaling={"type": "ntk", "factor": 2.0, "power": 8}),
        ("alibi_scaling", "'power'"),
    ),
    "a key of another scaling": (
        config(alibi_scaling={"type": "ntk", "factor": 2.0, "rate": 2.0}),
        ("alibi_scaling", "'rate'"),
    ),
    "a record of a newer version": (
        config(ntk_convert={"source": "x/y", "parts": 3}),
        ("ntk_convert", "'parts'"),
    ),
    "slopes of others": (
        config(alibi_scaling=fitted_scaling(3, 2)),
        ("alibi_scaling", "3 heads", "has 4"),
    ),
    "a tensor is missing": (
        tensors(lambda tensors: tensors.pop("transformer.h.1.mlp.dense_h_to_4h.weight")),
        ("NtkBloomForCausalLM", "'transformer.h.1.mlp."),
    ),
    "weights that are not numbers": (
        tensors(lambda tensors: [tensor.fill_(float("nan")) for tensor in tensors.values()]),
        "NaN or infinite",
    ),
    "a list that is damaged": (written("ntk_convert.json", "["), "ntk_convert.json"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(saved: Path, tmp_path: Path, refused: Callable[..., str], kind: str) -> None:
    change, words = REFUSED[kind]
    change(saved)
    says(refused(saved, "--out", tmp_path / "out"), words)


def test_a_merge_of_qlora_leaves_a_key_behind(saved: Path, tmp_path: Path, run: Callable[..., Run]) -> None:
    config(quantization_config={"load_in_4bit": True})(saved)
    assert "convert it again" in run("validate", saved).err
    assert "needs" not in run(saved, "--out", tmp_path / "no", "--no-verify").out
    assert not (tmp_path / "no").exists()
    done = run(saved, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert "quantization_config of config.json" in done.err
    assert "quantization_config" not in config_of(tmp_path / "out")
    assert run("validate", tmp_path / "out").code == 0


def command_of(folder: Path) -> list[str]:
    """The command in a card that made the folder, as words, without the program's name."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^ntk-convert (.*(?:\\\n.*)*)", text, re.MULTILINE)[-1:]
    return shlex.split(command.replace("\\\n", " "))


def test_a_conversion_again_remembers_that_weights_were_rounded(
    tmp_path: Path, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command in the card makes the same weights of the original."""
    monkeypatch.chdir(tmp_path)
    tiny.FACTORIES["bloom"](tmp_path / "source", 4)
    half = again(tmp_path / "source", tmp_path / "half", scale=2, dtype="bf16")
    out = again(half, tmp_path / "out", scale=4)
    record = config_of(out)["ntk_convert"]
    assert (record["weights"], record["dtype"]) == ("original", "bf16")
    assert "Weights, tokenizer" not in (out / "README.md").read_text(encoding="utf-8")
    words = command_of(out)
    assert words[-4:] == ["--scale", "4", "--dtype", "bf16"] or {"--dtype", "bf16"} <= {*words}
    words[words.index("--out") + 1] = "direct"
    assert run(*words).code == 0
    same_files(out, tmp_path / "direct")

    # Rounded twice, they are not what one command makes of the original.
    full = again(half, tmp_path / "full", scale=4, dtype="fp32")
    assert config_of(full)["ntk_convert"]["weights"] == "other"
    text = (full / "README.md").read_text(encoding="utf-8")
    assert "--out ./converted --dtype bf16" in text.replace("\\\n    ", "")


def test_another_trained_length_needs_another_scaling(
    converted: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    dynamic = again(converted, tmp_path / "dynamic", dynamic="position")
    line = refused(dynamic, "--train-length", 64, "--out", tmp_path / "out", code=2)
    says(line, "from 32 tokens", "from 64", "give --dynamic position")


# The card


def card_of(folder: Path) -> ModelCard:
    return ModelCard.load(folder / "README.md")


def test_the_card_of_a_tuned_model(saved: Path, tmp_path: Path) -> None:
    """It names both commands, with the values that were set."""
    record = config_of(saved)["ntk_convert"] | {
        "set": {"n_head": 4},
        "commit": "a1" * 20,
        "subfolder": "runs/last",
    }
    edit_json(saved / "config.json", {"ntk_convert": record})
    (saved / "README.md").unlink()
    convert(saved, tmp_path / "out")
    card = card_of(tmp_path / "out")
    assert card.data.to_dict() == {
        "pipeline_tag": "text-generation",
        "base_model": SOURCE,
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "tags": ["alibi", "ntk-alibi", "custom_code"],
    }
    for words in (
        f"[{SOURCE}/runs/last](https://huggingface.co/{SOURCE})",
        f"ntk-convert {SOURCE} --revision {'a1' * 20} --subfolder runs/last --scale 2 --train-length 32 ",
        " --out ./converted --set n_head=4\n",
        "# tuned: saved from ./converted",
        "\nntk-convert ./tuned --scale 2 --train-length 32 --out ./out\n",
        '.from_pretrained("./out", trust_remote_code=True)',
        "- slopes: 4 slopes measured",
    ):
        assert words in card.text
    assert config_of(tmp_path / "out")["ntk_convert"]["weights"] == "other"


def test_a_card_of_a_conversion_keeps_what_was_added(saved: Path, converted: Path, tmp_path: Path) -> None:
    text = (converted / "README.md").read_text().replace("tags:", "license: mit\ntags:\n- mine")
    (saved / "README.md").write_text(f"{text}\n## My data\n\nLaws.\n")
    card = card_of(again(saved, tmp_path / "out"))
    assert (card.data.license, card.data.tags) == ("mit", ["mine", "alibi", "ntk-alibi", "custom_code"])
    assert card.text.rstrip().endswith("## My data\n\nLaws.")
    assert card.text.count("## Load") == card.text.count("## How it was made") == 1


THEIRS = """---
license: mit
base_model: ada/bloom-ntk
library_name: peft
tags: [generated_from_trainer, mteb]
---

# Tuned

It reads laws.
"""


def test_a_card_that_somebody_wrote_is_kept(saved: Path, tmp_path: Path) -> None:
    (saved / "README.md").write_text(THEIRS)
    first = again(saved, tmp_path / "first")
    card = card_of(first)
    data = card.data.to_dict()
    assert (data["license"], data["library_name"]) == ("mit", "transformers")
    assert (data["base_model"], data["base_model_relation"]) == ("ada/bloom-ntk", "finetune")
    assert data["tags"] == ["generated_from_trainer", "alibi", "ntk-alibi", "custom_code"]
    assert card.text.strip().startswith("# Tuned\n\nIt reads laws.\n\n## Longer contexts\n\nThis is")
    second = (again(first, tmp_path / "second") / "README.md").read_text()
    assert second.count("## Longer contexts") == 1
    assert "It reads laws." in second


@pytest.mark.parametrize("front", ["---\nlicense: [\n---\n", ""])
def test_front_matter_that_cannot_be_read_stays(saved: Path, tmp_path: Path, front: str) -> None:
    (saved / "README.md").write_bytes(f"{front}# Mine\n".encode() + b"\xff\n")
    content = (again(saved, tmp_path / "out") / "README.md").read_bytes()
    assert content.startswith(front.encode() or b"---\npipeline_tag")
    assert b"# Mine\n\xff\n\n## Longer contexts\n" in content


STATED = {"license": "mit", "language": ["en"], "datasets": ["c4"]}
PARENT = (
    "---\nlicense: mit\nlanguage: [en]\ndatasets: [c4]\nbase_model: ada/first\ntags: [x]\n---\n# Parent\n"
)
GENERATED = "tags: [generated_from_trainer]"
WITHOUT_LICENCE: dict[str, tuple[str | None, str, dict[str, Any], Words]] = {
    "in the cache": (None, "cache", STATED | {"base_model": SOURCE}, ("license, language", SOURCE)),
    "in a folder": (None, "parent", STATED | {"base_model": "ada/first"}, ("license, language", "parent")),
    "its card says whose": (
        f"{GENERATED}\nbase_model: {SOURCE}",
        "cache",
        STATED | {"base_model": SOURCE},
        ("license, language, datasets in", SOURCE),
    ),
    "says it": ("license: apache-2.0", "cache", {"license": "apache-2.0"}, ()),
    "by hand": ("tags: [mine]", "", {}, ()),
    "no checkpoint": (None, "texts", {}, ("no model card: licence", "add a README.md to tuned")),
    "nowhere": (None, "", {}, ("no model card: licence", "add a README.md to tuned")),
    "generated": (GENERATED, "", {}, ("Trainer generated", "licence", "to README.md in tuned")),
    "too large": (
        f"{GENERATED}\nx: {'x' * (1 << 20)}",
        "",
        {},
        ("not read", "licence", "README.md in tuned"),
    ),
}
"""Front matter of a fine-tuned model; where the card of what it was made of is; what is kept; the note."""


@pytest.mark.parametrize("plain", [False, True], ids=["converted", "plain"])
@pytest.mark.parametrize("case", WITHOUT_LICENCE)
def test_a_licence_that_a_trainer_left_out(saved: Path, tmp_path: Path, case: str, plain: bool) -> None:
    """It saves no card, or generates one. The plain model is a source, with an older config.json."""
    front, where, kept, words = WITHOUT_LICENCE[case]
    if plain:
        shutil.rmtree(saved)
        tiny.FACTORIES["bloom"](saved, 4)
        (saved / "training_args.bin").touch()
    if front is None:
        (saved / "README.md").unlink(missing_ok=True)
    else:
        (saved / "README.md").write_text(f"---\n{front}\n---\n")
    cached = tmp_path / "hub" / f"models--{SOURCE.replace('/', '--')}"
    parents = {"cache": cached / "snapshots/c0", "parent": tmp_path / "parent", "texts": tmp_path / "texts"}
    if where:
        parents[where].mkdir(parents=True)
        (parents[where] / "README.md").write_text(PARENT)
        place = SOURCE if where == "cache" else str(parents[where])
        if plain or where != "cache":  # a converted one has a record
            edit_json(saved / "config.json", {"_name_or_path": place})
    if where == "cache":
        (cached / "refs").mkdir()
        (cached / "refs/main").write_text("c0")
    elif where == "parent":
        shutil.copy(saved / "config.json", parents[where])

    result = convert(saved, tmp_path / "out", scale=2, verify=False, cache_dir=tmp_path / "hub")
    data = card_of(tmp_path / "out").data.to_dict()
    assert {key: data.get(key) for key in STATED} == dict.fromkeys(STATED) | {
        key: value for key, value in kept.items() if key in STATED
    }
    assert "base_model" not in kept or data["base_model"] == kept["base_model"]
    notes = [note for note in result.notes if "card" in note]
    assert len(notes) == bool(words)
    says(notes, *words)
    assert "no model card" not in card_of(tmp_path / "out").text


# validate


BROKEN: dict[str, tuple[Change, dict[str, bool | None]]] = {
    "nothing": (nothing, {}),
    "changed slopes": (
        config(alibi_scaling={"type": "ntk", "factor": 3.0}),
        {"files": False},
    ),
    "a lost tensor": (
        tensors(lambda tensors: tensors.pop("transformer.h.1.mlp.dense_h_to_4h.weight")),
        {"files": False, "tensors": False, "slopes": None, "paths": None, "loading": None},
    ),
    "no auto_map": (config(auto_map=None), {"files": False, "loading": False}),
    "other code": (
        written("ntk_alibi.py", "raise SystemExit\n"),
        {"files": False, "code": False, **dict.fromkeys(("config", "tensors", "slopes", "paths", "loading"))},
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_validate(kind: str, tmp_path: Path, run: Callable[..., Run]) -> None:
    folder = again(tiny.FACTORIES["bloom"](tmp_path / "source", 4), tmp_path / "out", scale=2)
    change, expected = BROKEN[kind]
    change(folder)
    before = fingerprint(folder)
    done = run("validate", folder, "--json")
    outcomes = {each["name"]: each["passed"] for each in done.json["checks"]}
    names = ("files", "code", "config", "tensors", "slopes", "paths", "loading")
    assert outcomes == {**dict.fromkeys(names, True), **expected}
    assert done.code == (1 if expected else 0)
    assert fingerprint(folder) == before


POOLED = "sentence_transformers.models."
ADDED: dict[str, tuple[str, str, str | None]] = {
    "other slopes": ("sentence_bert_config.json", '{"config_args": {"alibi_scaling": null}}', "config_args"),
    "other slopes, another name": (
        "sentence_roberta_config.json",
        '{"model_args": {"subfolder": "older"}}',
        "model_args",
    ),
    "other code": ("custom_generate/generate.py", "raise SystemExit", "custom_generate"),
    "other tokenizers": ("fast_tokenizer_files.json", "{}", None),
    "special tokens": ("special_tokens_map.json", '{"eos_token": "w5"}', None),
    "added tokens": ("added_tokens.json", '{"w200": 96}', None),
    "generation": ("generation_config.json", '{"max_new_tokens": 1}', None),
    "a template": ("chat_template.jinja", "{{ messages }}", None),
    "a named template": ("additional_chat_templates/tool.jinja", "{{ messages }}", None),
    "a pooling": ("modules.json", json.dumps(MODULES), None),
    "another model": ("modules.json", json.dumps([{**MODULES[0], "type": f"{POOLED}Router"}]), "Router"),
    "a prompt": ("config_sentence_transformers.json", '{"default_prompt_name": "query"}', None),
    "a vocabulary": ("other.model", "text", None),
    "a processor": ("preprocessor_config.json", "{}", None),
    "a router": ("router_config.json", "{}", None),
}
"""What somebody adds: a file, its content, and a word of the check that fails; None for a note."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted repository without a generation_config.json."""
    place = tmp_path_factory.mktemp("plain")
    source = tiny.FACTORIES["bloom"](place / "source", 4)
    (source / "generation_config.json").unlink(missing_ok=True)
    return again(source, place / "out", scale=2)


@pytest.mark.parametrize("kind", ADDED)
def test_validate_sees_what_was_added(
    kind: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("converter.validation.verify", lambda *_, **__: [])  # it looks at none of these files
    name, content, word = ADDED[kind]
    folder = Path(shutil.copytree(plain, tmp_path / "out"))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content, encoding="utf-8")
    found = validate(folder)
    judged = [each for each in found.outcomes if each.name in ("files", "code")]
    failed = [each.detail for each in judged if not each.passed]
    if word is not None:
        assert word in failed[0]
    elif kind == "other tokenizers":  # a file that no library looks for
        assert (failed, list(found.notes)) == ([], [])
    else:
        assert failed == []
        [note] = found.notes
        says(note, name)


def test_validate_with_a_damaged_list(tmp_path: Path, run: Callable[..., Run]) -> None:
    folder = again(tiny.FACTORIES["bloom"](tmp_path / "source", 4), tmp_path / "out", scale=2)
    (folder / "ntk_convert.json").write_text("[")
    done = run("validate", folder)
    assert (done.code, "FAILED  files: ntk_convert.json" in done.out) == (1, True)
    assert "note" not in done.out


def test_validate_sees_other_weights(tmp_path: Path, run: Callable[..., Run]) -> None:
    """transformers prefers a single file to shards, and right shards may stand beside it."""
    folder = again(tiny.FACTORIES["bloom"](tmp_path / "source", 4, sharded=True), tmp_path / "out", scale=2)
    shards = [load_file(path) for path in folder.glob("*.safetensors")]
    tensors = {name: tensor + 1 for shard in shards for name, tensor in shard.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = run("validate", folder)
    assert (done.code, "FAILED  files: model.safetensors" in done.out) == (1, True)


def test_files_of_modules_that_were_added(tmp_path: Path, run: Callable[..., Run]) -> None:
    folder = again(embedding_source(tmp_path / "source"), tmp_path / "out", train_length=TRAINED)
    assert "note" not in run("validate", folder).out
    (folder / "1_Pooling/model.safetensors").write_bytes(b"")
    done = run("validate", folder)
    assert done.code == 0
    says(done.out, "note", "1_Pooling/model.safetensors")
