"""What is published under the names of ``ntk-convert families`` is read: configs, tensors, files, tokenizers.

The weights are skeletons: published names and shapes, with holes for data. The facts are in ``published/``.
``published/FAMILY.json`` is a list of checkpoints, each with

* ``config``, where each key was seen (``config_sources``), and what could not be seen (``unseen``);
* ``stands_for``: the Hub ids of other checkpoints with these sizes, whose own config was not seen;
* ``layout``: the name of its tensors' layout, or null if the family's code cannot read it;
* ``sizes``: letters of its shapes to which the layout gives another value;
* ``stored``: the first weight file, the dtype and the bytes, or null if its files were not seen;
* ``tokenizer``: keys of its tokenizer_config.json and its vocabulary files, or null if they were not seen;
* ``train_length`` and ``train_length_source``, or where it was looked for;
* ``tensors`` and ``tokenizer_class``: notes on both, in words.

``published/layouts/FAMILY.json`` has the names and shapes of the tensors as a rule. ``N`` in a name is
the number of a layer. The letters in a shape are those of ``sizes``, which gives for each a key of the config
(``|`` between its spellings), a number, or an expression; "D+2K D" has D + 2 K rows and D columns.
"""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from converter import ConverterError
from converter.families import FAMILIES
from converter.model.alibi import AlibiModel
from converter.model.open import open_model
from converter.plan import decide
from converter.scaling.request import Request
from converter.source.checkpoint import (
    BIN,
    BIN_INDEX,
    PICKLED,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    TRAINING,
    target_names,
)
from converter.source.open import open_source
from converter.source.tokenizer import KNOWN, read_tokenizer
from converter.source.weight_files import weight_files as weight_files_of
from converter.source.weight_files import weights_index
from converter.verification import tensors
from converter.verification.imported import ImportedRepository
from tests.models import model_of
from tests.true_geometry import PUBLISHED as CHECKPOINTS

FOLDER = Path(__file__).parent / "published"
Entry = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

LAYOUTS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted((FOLDER / "layouts").glob("*.json"))
}


def shapes(family: str, entry: Entry, **others: int) -> Shapes:
    """The names and shapes of a checkpoint's tensors.

    Args:
        family: the family's name.
        entry: the checkpoint.
        others: letters of sizes -> other values, such as N for fewer layers.
    """
    rule = LAYOUTS[family]
    layout = rule["layouts"][entry["layout"]]
    sizes = {**rule["sizes"], **entry.get("sizes", {}), **others}
    below = {**rule["trunk"], **layout.get("trunk", {})}
    named = {f"{layout['prefix']}{name}": shape for name, shape in below.items()} | layout.get("head", {})
    layers = range(_size("N", sizes, entry["config"]))
    return {
        name.replace(".N.", f".{layer}."): tuple(
            _size(part, sizes, entry["config"]) for part in shape.split()
        )
        for name, shape in named.items()
        for layer in (layers if ".N." in name else (0,))
    }


def _size(expression: str | int, sizes: dict[str, str | int], config: dict[str, Any]) -> int:
    """The value of a shape's part (``3D``, ``D+2K``, ``128``), or of one of ``sizes``."""
    if isinstance(expression, int):
        return expression
    for key in expression.split("|"):
        if key in config:
            return int(config[key])
    total = 0
    for term in expression.split("+"):
        [(factor, letter)] = re.findall(r"^(\d*)([A-Z]?)$", term)
        total += int(factor or 1) * (_size(sizes[letter], sizes, config) if letter else 1)
    return total


def with_layers(family: str, config: dict[str, Any], count: int) -> dict[str, Any]:
    """The config of the same model with another number of layers."""
    [key] = [key for key in LAYOUTS[family]["sizes"]["N"].split("|") if key in config]
    return {**config, key: count}


def weight_files(first: str) -> list[str]:
    """All shards, of which this is the first: ``model-00001-of-00003.safetensors``, ..."""
    found = re.fullmatch(r"(.*?)(\d+)-of-(\d+)(\..*)", first)
    if found is None:
        return [first]
    start, digits, count, end = found.groups()
    return [f"{start}{n:0{len(digits)}}-of-{count}{end}" for n in range(1, int(count) + 1)]


# What each refusal must say. Some of these models could be converted; that is not done yet.
REFUSED = {
    "quantised: ssbuild/baichuan2-13b-chat-int4": "quantised",
    "quantised: unrahul/bloom-1b7-nf4": "quantised",
    "cerebras/Cerebras-GPT-Intermediate (muP checkpoints)": "has no ALiBi",
    "jinaai/jina-embeddings-v2-base-en@first (JBert)": "first revision",
    "jinaai/jina-clip-v1": "image encoder",
    "krutrim-ai-labs/Krutrim-1-instruct": "which activation",
    "wtang06/mpt-125m-c4 (no ALiBi)": "alibi is False",
    "insilicomedicine/precious3-gpt-multi-modal": "Custom_MPTForCausalLM",
    "liuhaotian/LLaVA-Lightning-MPT-7B-preview": "projector for images",
}
LENGTHS = {name: length for family in FAMILIES for name, length in family.train_lengths.items()}
ENTRIES = [(family, entry) for family, entries in CHECKPOINTS.items() for entry in entries]
READ = [(family, entry) for family, entry in ENTRIES if entry["layout"] and entry["id"] not in REFUSED]
STORED = [(family, entry) for family, entry in ENTRIES if entry["stored"]]
TOKENIZERS = [(family, entry) for family, entry in ENTRIES if entry["tokenizer"]]
NOT_SEEN = {
    "YYLY66/mRNABERT",
    "inceptionai/jais-family-1p3b",
    "inceptionai/jais-family-1p3b-chat",
    "inceptionai/jais-family-30b-8k",
    "inceptionai/jais-family-30b-8k-chat",
    "inceptionai/jais-family-30b-16k",
    "inceptionai/jais-family-30b-16k-chat",
    "norallm/norbloom-7b-scratch",
}
"""Known checkpoints whose sizes are in no public copy that was found."""
SLOPES = "relative_pe.slopes"
"""The tensor that is read for its values, and that no model has."""


def of_checkpoints(pairs: list[tuple[str, Entry]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("family", "entry"), pairs, ids=[entry["id"] for _, entry in pairs])


def test_every_known_checkpoint_is_here() -> None:
    ids = [name for _, entry in ENTRIES for name in (entry["id"].partition("@")[0], *entry["stands_for"])]
    known = {name for family in FAMILIES for group in family.checkpoints for name in group.ids}
    assert known - set(ids) == NOT_SEEN
    entries = [entry["id"] for _, entry in ENTRIES]
    assert len(entries) == len(set(entries))
    assert REFUSED.keys() <= set(entries)
    assert LAYOUTS.keys() == CHECKPOINTS.keys() == {family.name for family in FAMILIES}
    assert {(family, entry["layout"]) for family, entry in ENTRIES if entry["layout"]} == {
        (family, name) for family, rule in LAYOUTS.items() for name in rule["layouts"]
    }


@of_checkpoints(ENTRIES)
def test_a_published_config(family: str, entry: Entry) -> None:
    """It is taken, or refused for the right reason."""
    if entry["id"] in REFUSED or "output_logits_scale" in entry["config"]:
        with pytest.raises(ConverterError, match=REFUSED.get(entry["id"], "output_logits_scale")):
            model_of(entry["config"])
        return
    model = model_of(entry["config"])
    assert model.kind == family
    assert model.geometry.num_heads % model.geometry.num_kv_heads == 0
    assert all(slope > 0 for slope in model.stock({}))


@of_checkpoints(READ)
def test_every_tensor_has_its_place_in_the_family_s_model(family: str, entry: Entry, tmp_path: Path) -> None:
    """None is missing, none is left over, and every shape is the model's.

    All layers are alike, so two do, and a few rows of the vocabulary.
    """
    few = with_layers(family, entry["config"], 2)
    few |= {} if family == "baichuan" else {"vocab_size": 640}  # the size says which head a Baichuan has
    named = shapes(family, {**entry, "config": few}, N=2)
    model = open_model(skeleton(tmp_path, few, named))
    config = decide(model, Request("none")).files.config
    (tmp_path / "config.json").write_text(json.dumps(config))
    repository = open_model(tmp_path)
    assert isinstance(repository, AlibiModel)
    with ImportedRepository.load(repository) as imported:
        found = tensors.check_tensors(imported)
    assert found.detail.startswith(f"all {sum(not name.endswith(SLOPES) for name in named)} tensors fit")


def skeleton(folder: Path, config: dict[str, Any], named: Shapes) -> Path:
    """Writes config.json and a weight file with these tensors; their data are holes, except for slopes."""
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end, slopes = 0, []
    for name, shape in named.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        if name.endswith(SLOPES):
            slopes.append((start, shape[0]))
    text = json.dumps(header).encode()
    with (folder / SAFETENSORS).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start, count in slopes:
            file.seek(8 + len(text) + start)
            file.write(struct.pack(f"<{count}f", *(2.0 ** (-8 * (h + 1) / count) for h in range(count))))
        file.truncate(8 + len(text) + end)
    return folder


@of_checkpoints(STORED)
def test_the_published_files_are_found(family: str, entry: Entry, tmp_path: Path) -> None:
    files = weight_files(entry["stored"]["files"])
    (tmp_path / "config.json").write_text(json.dumps(entry["config"]))
    names = list(shapes(family, entry))
    bin_files = files[0].endswith(PICKLED)
    if len(files) > 1 or files[0] not in (SAFETENSORS, BIN, TRAINING):
        weight_map = {name: files[at * len(files) // len(names)] for at, name in enumerate(names)}
        index = BIN_INDEX if bin_files else SAFETENSORS_INDEX
        (tmp_path / index).write_text(json.dumps({"weight_map": weight_map}))
    for file in files:
        (tmp_path / file).touch()
    source = open_source(str(tmp_path))
    assert list(weight_files_of(source)) == sorted(files)
    targets = [
        name for name in target_names(files, weights_index(source)).values() if name != SAFETENSORS_INDEX
    ]
    if bin_files:
        count = len(files)
        shards = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        assert targets == (shards if count > 1 or weights_index(source) else [SAFETENSORS])
    else:
        assert targets == files


@of_checkpoints(TOKENIZERS)
def test_the_tokenizer_is_one_that_loads(family: str, entry: Entry, tmp_path: Path) -> None:  # noqa: ARG001
    """A class of transformers, or one that has a counterpart here."""
    facts = entry["tokenizer"]
    (tmp_path / "config.json").write_text(json.dumps(entry["config"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts["config"]))
    for file in facts["files"]:
        (tmp_path / file).touch()
    tokenizer = read_tokenizer(open_source(str(tmp_path)), entry["config"])
    assert tokenizer.here, tokenizer.note
    name = facts["config"]["tokenizer_class"]
    if "auto_map" in facts["config"]:
        assert tokenizer.ours == KNOWN[name].ours
    else:
        assert tokenizer.settings is None
        assert tokenizer_class_from_name(name) or tokenizer_class_from_name(f"{name}Fast")
