"""Fine-tuned models: what transformers saves from a converted repository is adopted, pushed and exported."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BloomForCausalLM,
    Trainer,
    TrainingArguments,
)

from converter import adopt, adoption, convert
from converter.publish.contents import read_contents, verify
from tests import tiny
from tests.conftest import Run, edit_json, fingerprint
from tests.hub_server import TOKEN, UNVERIFIED, Account, Command, HubServer
from tests.patched import CHECKED
from tests.tiny import rotary as tiny_rotary
from tests.tiny.layout import change_tensors

SOURCE = "org/tiny-bloom"
LIST = "ntk_convert.json"
FILES = {LIST, "README.md", "config.json"}

Tune = Callable[..., Path]


def load(folder: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    return auto.from_pretrained(folder, trust_remote_code=True, **options)


def trained(model: Any) -> Any:
    """After one step with a large rate."""
    ids = torch.from_numpy(tiny.token_ids(2, 20))
    labels = torch.tensor([0, 1]) if hasattr(model, "score") or hasattr(model, "classifier") else ids
    model.train()(ids, labels=labels).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    return model


def of_origin(folder: Path, origin: str = SOURCE) -> None:
    """As if the source had been downloaded from the Hub."""
    config = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", {"ntk_convert": config["ntk_convert"] | {"source": origin}})


@pytest.fixture(scope="session")
def converted(pristine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted repository; do not change it."""
    place = tmp_path_factory.mktemp("adoption") / "ntk"
    convert(pristine("bloom"), place, scale=2, train_length=32, verify=False)
    return place


@pytest.fixture(scope="session")
def tuned(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, fine-tuned and saved; do not change it."""
    place = tmp_path_factory.mktemp("adoption") / "tuned"
    trained(load(converted)).save_pretrained(place)
    AutoTokenizer.from_pretrained(converted, trust_remote_code=True).save_pretrained(place)
    of_origin(place)
    return place


@pytest.fixture
def saved(tuned: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(tuned, tmp_path / "tuned"))


def listed(folder: Path) -> set[str]:
    return set(json.loads((folder / LIST).read_text())["files"])


MODELS: dict[str, tuple[Callable[..., Path], str, Any]] = {
    "bloom": (tiny.FACTORIES["bloom"], "linear", AutoModelForCausalLM),
    "new head": (tiny.ENCODERS["jina_bert"], "ntk", AutoModelForSequenceClassification),
    # GPT-NeoX has other names for the rotary settings than transformers saves.
    **{
        f"rotary{end}": (lambda folder, _: tiny_rotary.rotary(folder, "gpt_neox"), how, AutoModelForCausalLM)
        for end, how in {"": "ntk", ", linear": "linear", ", by parts": "by-parts"}.items()
    },
    "by parts": (tiny.FACTORIES["mpt"], "by-parts", AutoModelForCausalLM),
}
"""Name -> how the source is written, its scaling, and the class that is fine-tuned."""
QUICK = ("bloom", "new head", "rotary")
SLOW = sorted(MODELS.keys() - set(QUICK))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_model_that_transformers_saved(tmp_path: Path, name: str) -> None:
    write, method, auto = MODELS[name]
    source = write(tmp_path / "source", 4)
    options: dict[str, Any] = {"method": method, "scale": 3, "train_length": 32}
    done = convert(source, tmp_path / "ntk", verify=False, **options)
    model = trained(load(tmp_path / "ntk", auto)).eval()
    model.save_pretrained(tmp_path / "out")
    AutoTokenizer.from_pretrained(tmp_path / "ntk", trust_remote_code=True).save_pretrained(tmp_path / "out")
    before = fingerprint(tmp_path / "out")

    result = adopt(tmp_path / "out")
    after = fingerprint(tmp_path / "out")
    assert {file for file in before if after[file] != before[file]} == {"config.json"}
    assert set(result.written) == FILES | {"scaling.png"}
    assert result.source == "source"
    assert result.scaling == done.scaling
    assert str(result.scaling).startswith(f"{method}, factor 3")
    contents = read_contents(tmp_path / "out")
    assert contents.left == []
    assert [check.name for check in verify(contents.repository, contents.digests)] == [
        check.name for check in result.checks
    ]

    ids = torch.from_numpy(tiny.token_ids(2, 20))
    again = load(tmp_path / "out", auto).eval()
    assert type(again).__name__ == type(model).__name__
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    "how",
    ["in place", "Trainer", *(pytest.param(how, marks=pytest.mark.slow) for how in ("half shards", "LoRA"))],
)
def test_ways_to_save(converted: Path, tmp_path: Path, how: str) -> None:
    """All of them leave a folder that is adopted as it is; files of the training are not listed."""
    folder = Path(shutil.copytree(converted, tmp_path / "out"))
    model, more = load(converted), set[str]()
    if how == "in place":
        trained(model).save_pretrained(folder)
    else:
        shutil.rmtree(folder)
    if how == "half shards":
        trained(model).half().save_pretrained(folder, max_shard_size="20kB")
        more = {path.name for path in folder.glob("model*")}
        assert len(more) > 3
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
    adopt(folder)
    contents = read_contents(folder)
    training = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"}
    assert training & set(contents.left) == (training if how == "Trainer" else set())
    assert not training & listed(folder)
    assert more <= listed(folder)
    assert load(folder).config.ntk_convert["fine_tuned"] is True


# What is refused, without a change


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", changes)


def put(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def stock(folder: Path) -> None:
    """``BloomForCausalLM`` only warns of the model type, and trains and saves a model that is not scaled."""
    transformers.logging.set_verbosity_error()
    BloomForCausalLM.from_pretrained(folder).save_pretrained(folder)


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    return lambda folder: change_tensors(folder, change)


def damaged(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "an adapter": (put("adapter_config.json", "{}"), "holds an adapter (adapter_config.json); merge it into"),
    "edited code": (
        put("modeling_ntk_bloom.py", "# mine\n"),
        "modeling_ntk_bloom.py is not what this version",
    ),
    "other code": (
        config(auto_map={"AutoModel": "eve/code--mine.Own"}),
        "config.json has auto_map eve/code--mine.Own, which makes loading run code that is not",
    ),
    "pickled weights": (pickled, "are not safetensors files; save the model with safe_serialization=True"),
    "two weights": (
        put("model.safetensors.index.json", "{}"),
        "has model.safetensors and model.safetensors.i",
    ),
    "quantised": (
        config(quantization_config={"load_in_4bit": True}),
        "(quantization_config is set); save the",
    ),
    "never converted": (config(ntk_convert=None), "config.json has no ntk_convert, so this model was not"),
    "the stock class": (stock, "model_type 'bloom', not 'ntk_bloom': the model was trained with the stock"),
    "a tensor is missing": (
        weights(lambda tensors: tensors.pop("transformer.h.1.mlp.dense_h_to_4h.weight")),
        "does not fit NtkBloomForCausalLM: 'transformer.h.1.mlp.",
    ),
    "weights that are not numbers": (
        weights(lambda tensors: [tensor.fill_(float("nan")) for tensor in tensors.values()]),
        "has values that are NaN or infinite; if the training diverged",
    ),
    "damaged weights": (damaged, "model.safetensors is truncated"),
    "no model": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "a list that is damaged": (put(LIST, "["), LIST),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_adopted(saved: Path, refused: Callable[..., str], kind: str) -> None:
    change, part = REFUSED[kind]
    change(saved)
    assert part in refused("adopt", saved)


@pytest.mark.parametrize("link", [None, "hard"])
def test_a_conversion_that_nobody_trained(
    pristine: Callable[..., Path], refused: Callable[..., str], tmp_path: Path, link: Any
) -> None:
    """Whatever else was changed in it: its card would say that it was fine-tuned."""
    source = Path(shutil.copytree(pristine("bloom"), tmp_path / "source"))
    convert(source, tmp_path / "out", scale=2, link=link, verify=False)
    edit_json(tmp_path / "out/generation_config.json", {"note": "mine"})
    line = refused("adopt", tmp_path / "out")
    assert "are those of the conversion, so there is nothing to adopt" in line


def test_a_run_that_is_stopped_adopts_nothing(
    saved: Path, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, describe = fingerprint(saved), adoption.describe

    def stop(*arguments: Any, **options: Any) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return describe(*arguments, **options)

    monkeypatch.setattr(adoption, "describe", stop)
    assert run("adopt", saved).code == 1
    assert fingerprint(saved) == before


# What is there already


def test_what_is_missing_and_what_is_old(saved: Path) -> None:
    """Code is written; a tokenizer can be added later, and the model adopted again."""
    mapped = json.loads((saved / "config.json").read_text())["auto_map"]
    # As some versions of transformers save it; the code is then loaded from the folder.
    edit_json(saved / "config.json", {"auto_map": {key: f"ada/x--{value}" for key, value in mapped.items()}})
    for name in ("ntk_alibi.py", "modeling_ntk_bloom.py"):
        (saved / name).unlink()
    kept = {name: (saved / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    for name in kept:
        (saved / name).unlink()
    result = adopt(saved)
    assert {"ntk_alibi.py", "modeling_ntk_bloom.py"} < set(result.written)
    assert result.notes == [
        "the folder has no tokenizer: save it there (tokenizer.save_pretrained), and run adopt again"
    ]
    assert json.loads((saved / "config.json").read_text())["auto_map"] == mapped
    load(saved)

    for name, content in kept.items():
        (saved / name).write_bytes(content)
    shard = "model-00001-of-00002.safetensors"
    shutil.copy(saved / "model.safetensors", saved / shard)
    files = json.loads((saved / LIST).read_text())["files"]
    edit_json(saved / LIST, {"files": files | {shard: files["model.safetensors"]}})
    assert adopt(saved).notes == []
    assert kept.keys() <= listed(saved)
    assert shard not in listed(saved)
    assert "no tokenizer" not in (saved / "README.md").read_text()


def test_a_graph_of_the_same_folder_is_checked_and_pushed(
    converted: Path,
    refused: Callable[..., str],
    run: Callable[..., Run],
    hub: HubServer,
    command: Command,
    work: Path,
) -> None:
    """A graph points into the weights: it belongs to the fine-tuned ones only if they lie as before."""
    folder = Path(shutil.copytree(converted, work / "tuned"))
    assert run("export", folder).code == 0
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    # ``push`` and ``validate`` say what to do, and afterwards all works as after a conversion.
    hint = f"if the model was fine-tuned, run ntk-convert adopt {folder}, otherwise"
    line = run("push", folder, "ada/x", "--token", "hf_x").err
    assert "model.safetensors is not as the conversion or export wrote it" in line
    assert hint in line
    assert hint in run("validate", folder).err
    of_origin(folder)
    done = run("adopt", folder, "--json")
    assert done.code == 0, done.err
    assert done.json["path"] == str(folder)
    assert set(done.json["written"]) == FILES | {"scaling.png"}
    assert set(done.json["files"]) == listed(folder)
    assert [*CHECKED, "graph"] == [check["name"] for check in done.json["checks"]][: len(CHECKED) + 1]
    assert f"adopted: fine-tuned from {SOURCE}, scaling ntk, factor 2\n" in done.err
    assert "## ONNX" in (folder / "README.md").read_text()
    hub.accounts[TOKEN] = Account("ada")
    pushed = command("push", "tuned", "ada/tuned", start=UNVERIFIED, HF_TOKEN=TOKEN)
    assert pushed.code == 0, pushed.err
    files = hub.files("ada/tuned")
    assert {"model.onnx", "tokenizer.json"} < files.keys()
    assert b'AutoModelForCausalLM.from_pretrained("ada/tuned", trust_remote_code=True)' in files["README.md"]

    change_tensors(folder, lambda tensors: tensors.update({k: v.half() for k, v in tensors.items()}))
    assert " is not what ntk-convert" in refused("adopt", folder)


# The card


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second that verification takes."""
    monkeypatch.setattr(adoption, "verify", lambda *_, **__: [])


def card_of(folder: Path) -> ModelCard:
    return ModelCard.load(folder / "README.md")


def test_a_new_card(saved: Path) -> None:
    """Its command has the values that were set."""
    recorded = json.loads((saved / "config.json").read_text())["ntk_convert"]
    more = {"set": {"n_head": 4}, "commit": "a1" * 20, "subfolder": "runs/last"}
    edit_json(saved / "config.json", {"ntk_convert": recorded | more})
    adopt(saved)
    card = card_of(saved)
    assert card.data.to_dict() == {
        "pipeline_tag": "text-generation",
        "base_model": SOURCE,
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "tags": ["alibi", "ntk-alibi", "custom_code"],
    }
    for words in (
        f"[{SOURCE}/runs/last](https://huggingface.co/{SOURCE}) with its ALiBi slopes scaled",
        "It was fine-tuned after the conversion, so its weights are its own.",
        f"ntk-convert {SOURCE} --revision {'a1' * 20} --subfolder runs/last --scale 2 --train-length 32 ",
        " --out ./converted --set n_head=4\n",
        "ntk-convert adopt ./tuned\n",
        '.from_pretrained("./tuned", trust_remote_code=True)',
        "- slopes: 4 slopes measured",
    ):
        assert words in card.text


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    ("before", "after"), [("text-generation", "text-classification"), ("text-ranking",) * 2]
)
def test_a_new_head_has_another_task(saved: Path, before: str, after: str) -> None:
    """A tag that follows from the head is replaced; one that says more is kept."""
    model = load(saved, AutoModelForSequenceClassification)
    model.save_pretrained(saved)
    (saved / "README.md").write_text(f"---\npipeline_tag: {before}\n---\n")
    adopt(saved)
    assert card_of(saved).data.pipeline_tag == after
    assert 'pipeline("text-classification", model=model' in card_of(saved).text


@pytest.mark.usefixtures("unverified")
def test_a_card_of_a_conversion_keeps_what_was_added(saved: Path, converted: Path) -> None:
    text = (converted / "README.md").read_text().replace("tags:", "license: mit\ntags:\n- mine")
    (saved / "README.md").write_text(f"{text}\n## My data\n\nLaws.\n\n## ONNX\n\nA graph.\n")
    adopt(saved)
    card = card_of(saved)
    assert (card.data.license, card.data.tags) == ("mit", ["mine", "alibi", "ntk-alibi", "custom_code"])
    assert "Weights, tokenizer and tensor names are those" not in card.text
    assert "\n## My data\n\nLaws.\n" in card.text
    assert card.text.rstrip().endswith("## ONNX\n\nA graph.")
    assert card.text.count("## Load") == card.text.count("## How it was made") == 1


THEIRS = """---
license: mit
base_model: ada/bloom-ntk
library_name: peft
tags: [generated_from_trainer, mteb]
model-index:
- name: tuned
  results:
  - task: {type: text-generation}
    dataset: {type: ada/laws, name: Laws}
    metrics: [{type: loss, value: 1.25}]
---

# Tuned

It reads laws.
"""


@pytest.mark.usefixtures("unverified")
def test_a_card_that_somebody_wrote_is_kept(saved: Path) -> None:
    (saved / "README.md").write_text(THEIRS)
    adopt(saved)
    first = (saved / "README.md").read_text()
    card = card_of(saved)
    data = card.data.to_dict()
    assert (data["license"], data["library_name"]) == ("mit", "transformers")
    assert (data["base_model"], data["base_model_relation"]) == ("ada/bloom-ntk", "finetune")
    assert data["tags"] == ["generated_from_trainer", "alibi", "ntk-alibi", "custom_code"]
    assert data["model-index"][0]["results"][0]["metrics"] == [{"type": "loss", "value": 1.25}]
    assert card.text.strip().startswith("# Tuned\n\nIt reads laws.\n\n## Longer contexts\n\nThis is")
    assert "\n### Load\n" in card.text
    adopt(saved)
    assert (saved / "README.md").read_text() == first


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("front", ["---\nlicense: [\n---\n", ""])
def test_front_matter_that_cannot_be_read_stays(saved: Path, front: str) -> None:
    (saved / "README.md").write_bytes(f"{front}# Mine\n".encode() + b"\xff\n")
    adopt(saved)
    content = (saved / "README.md").read_bytes()
    assert content.startswith(front.encode() or b"---\npipeline_tag")
    assert b"# Mine\n\xff\n\n## Longer contexts\n" in content
