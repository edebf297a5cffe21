"""The contents of a converted repository."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

import converter
from converter import convert
from converter._version import TESTED
from converter.families.family import HEADS
from converter.result.card.facts import Facts, read_origin
from converter.result.card.older import read_older_card
from converter.result.card.sections import describe
from converter.result.converted import open_converted
from converter.source.open import open_folder
from converter.source.tokenizer import Tokenizer
from tests import tiny
from tests.conftest import MakeSource, Pristine, Refused, RunCli, edit_json, fingerprint
from tests.messages import says
from tests.patched import config_of
from tests.versions.environments import SUPPORTED

ROOT = Path(__file__).parent.parent


def quick(source: Path, out: Path, **options: Any) -> dict[str, Any]:
    """The config of ``source``, converted without verification."""
    convert(source, out, verify=False, **({"scale": 2.0} | options))
    return config_of(out)


@pytest.mark.parametrize("family", tiny.STOCK)
def test_config(make_source: MakeSource, tmp_path: Path, family: str) -> None:
    source = make_source(family, {"my_own_key": {"x": [1, None]}, "auto_map": {"AutoConfig": "old.Old"}})
    before = fingerprint(source)
    config, original = quick(source, tmp_path / "out", train_length=64), config_of(source)
    camel = tiny.FAMILY[family].camel
    assert config["model_type"] == f"ntk_{family}"
    assert config["architectures"] == [f"Ntk{camel}ForCausalLM"]
    assert config["alibi_scaling"] == {"type": "ntk", "factor": 2.0}
    assert config["ntk_convert"] == {
        "source": "source",
        "commit": None,
        "version": converter.__version__,
        "transformers": transformers.__version__,
        "tested_transformers": list(TESTED),
        "train_length": 64,
        "weights": "original",
        "limits": {},
    }
    assert config["auto_map"] == {
        "AutoConfig": f"configuration_ntk_{family}.Ntk{camel}Config",
        **{auto: f"modeling_ntk_{family}.Ntk{camel}{end}" for auto, end in HEADS["decoder"].items()},
    }
    ours = {"model_type", "architectures", "auto_map", "alibi_scaling", "ntk_convert", "max_seq_len"}
    ours |= {"tokenizer_class"}
    original.get("attn_config", {}).pop("attn_impl", None)  # it only chooses an implementation
    assert {key: value for key, value in config.items() if key not in ours} == {
        key: value for key, value in original.items() if key not in ours
    }
    assert fingerprint(source) == before


@pytest.mark.parametrize("family", tiny.STOCK)
def test_a_tokenizer_that_names_no_class_loads_as_before(
    make_source: MakeSource, tmp_path: Path, family: str
) -> None:
    """transformers then chooses a class by model_type, which is new in the result."""
    source = make_source(family)
    edit_json(source / "tokenizer_config.json", {"tokenizer_class": None})
    quick(source, tmp_path / "out")
    before = AutoTokenizer.from_pretrained(source)
    after = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(after) is type(before)
    assert after("w10 w11") == before("w10 w11")


def test_files(make_source: MakeSource, tmp_path: Path) -> None:
    source = make_source()
    kept = {"LICENSE", "USE_POLICY.md", "merges.txt", "chat_template.jinja", "special_tokens_map.json"}
    kept |= {"tokenizer.model", "MODEL_LICENSE", "MODEL_LICENSE-2.pdf", "License.pdf"}
    kept |= {"Community License for Baichuan2 Model.pdf", "Baichuan2 模型社区许可协议.pdf"}
    left = {"modeling_old.py", ".gitattributes", ".x.json", "adapter_config.json", "training_args.bin"}
    left |= {"model.onnx", "license_model.bin", "my_licensed.h5"}
    left |= {"tf_model.h5", "flax_model.msgpack", "pytorch_model.bin", "notes.pdf", "onnx/model.onnx"}
    left |= {"custom_generate/generate.py", "custom_generate/requirements.txt"}
    for folder in ("onnx", "custom_generate"):
        (source / folder).mkdir()
    for name in kept | left:
        (source / name).write_text("{}")
    quick(source, tmp_path / "out")
    shared = ("attention", "cache", "modes", "concave", "config", "decoder", "heads", "plan", "alibi")
    templates = {f"ntk_{name}.py" for name in shared}
    templates |= {"configuration_ntk_bloom.py", "modeling_ntk_bloom.py"}
    verbatim = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"}
    verbatim |= kept
    written = {"config.json", "README.md", "ntk_convert.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == written | templates | verbatim
    for name in verbatim:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    for name in templates:
        assert (tmp_path / "out" / name).read_bytes() == (ROOT / "templates" / name).read_bytes()


DYNAMIC = {"scale": None, "dynamic": "length", "train_length": 64}
ODD = "\ud800 \u0000 ünï"
FALSE = ("multi_query", "parallel_attn", "new_decoder_architecture")


@pytest.mark.parametrize(
    ("family", "changes", "options", "expected"),
    [
        ("bloom", {"note": ODD}, {}, {"note": ODD}),
        ("bloom", {}, {"scale": None, "method": "none"}, {"alibi_scaling": None}),
        # MPT's limit of the length is raised.
        ("mpt", {"max_seq_len": 64}, {"scale": 4.0}, {"max_seq_len": 256}),
        ("mpt", {"max_seq_len": 640}, {"scale": 4.0, "train_length": 32}, {"max_seq_len": 640}),
        ("mpt", {"max_seq_len": 64}, {"scale": 1e5}, {"max_seq_len": 6400000}),
        ("mpt", {"max_seq_len": 64}, DYNAMIC, {"max_seq_len": 64}),
        *(
            (family, {"architectures": named and [named]}, {}, {"architectures": [ours]})
            for family, named, ours in (
                ("bloom", None, "NtkBloomForCausalLM"),
                ("bloom", "BloomForTokenClassification", "NtkBloomForTokenClassification"),
                ("mpt", "MPTForCausalLM", "NtkMptForCausalLM"),
                ("mpt", "MptForQuestionAnswering", "NtkMptForQuestionAnswering"),
                ("falcon", "RWForCausalLM", "NtkFalconForCausalLM"),
            )
        ),
        # Old names of keys, and defaults of old code
        (
            "bloom",
            {"n_embed": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
            | dict.fromkeys(("hidden_size", "n_head", "n_layer")),
            {},
            {"hidden_size": 32, "n_head": 4, "n_layer": 2}
            | dict.fromkeys(("n_embed", "num_attention_heads", "num_hidden_layers"), ...),
        ),
        (
            "falcon",
            {"n_head": 4, "n_layer": 2, "model_type": "RefinedWebModel"}
            | dict.fromkeys((*FALSE, "num_kv_heads", "num_attention_heads", "num_hidden_layers")),
            {},
            {"num_attention_heads": 4, "num_hidden_layers": 2, "model_type": "ntk_falcon"}
            | dict.fromkeys(FALSE, False)
            | dict.fromkeys(("n_head", "n_layer"), ...),
        ),
    ],
)
def test_what_config_json_gets(
    make_source: MakeSource, tmp_path: Path, family: str, changes: Any, options: Any, expected: Any
) -> None:
    """An ellipsis is a key that is not there."""
    config = quick(make_source(family, changes), tmp_path / "out", **options)
    assert {key: config.get(key, ...) for key in expected} == expected


# The card


FRONT = """
license: other
license_name: rail
license_link: LICENSE
language:
- en
- fr
pipeline_tag: text-generation
base_model: someone/parent
base_model_relation: finetune
library_name: llm-foundry
model_type: bloom
tags: [pytorch, bloom, alibi, ONNX, custom_code, mteb]
datasets: [bigscience/xP3, c4]
widget:
- text: Hello
model-index:
- name: bloom
  results: []
---
# Old card
"""
LAUGHS = "a: &a [x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
QUOTED = "mit\n---\n# injected: &x *y"
KEPT: list[tuple[str | bytes, dict[str, Any]]] = [
    (
        FRONT,
        {
            "license": "other",
            "license_name": "rail",
            "license_link": "LICENSE",
            "language": ["en", "fr"],
            "base_model": "someone/parent",
            "datasets": ["bigscience/xP3", "c4"],
            "tags": ["pytorch", "bloom", "alibi", "ntk-alibi", "custom_code"],
        },
    ),
    ("pipeline_tag: text-ranking", {"pipeline_tag": "text-ranking"}),
    ("license: mit\nlanguage: no", {"license": "mit", "language": "no"}),
    ("license: mit\r\n---\r\nText", {"license": "mit"}),
    ("license: mit\nbase_model: ./bloom", {"license": "mit"}),
    ("base_model: two words", {}),
    # What peft and TRL write of the machine that trained
    (
        "base_model: /home/ada/secret/bloom\ndatasets: [~/secret/data, c4]\nlicense_link: https://a.b/secret\n"
        "thumbnail: C:\\secret\\a.png\nmetrics: file:///secret\ntags: ['base_model:adapter:/mnt/secret/x', "
        "'base_model:finetune:ada/b', lora, /secret/run, 'a / b']",
        {"datasets": ["c4"], "license_link": "https://a.b/secret"}
        | {"tags": ["lora", "a / b", "alibi", "ntk-alibi", "custom_code"]},
    ),
    (yaml.safe_dump({"license": QUOTED}), {"license": QUOTED}),
    ("model-index:\n" + "- name: x\n" * 1_000 + "license: mit", {"license": "mit"}),
    ("license: {a: b}\nlanguage: [en, {fr: x}]\ntags: 3\ndatasets: []", {}),
    ("license: 2020-01-01\nlanguage: null", {}),
    # Nothing of these can be read.
    (f"{LAUGHS}language: *i", {}),
    *((f"license: {value}", {}) for value in ("&a [*a]", "[" * 60_000, "2020-13-45", "[")),
    ("license: !!python/object/apply:os.system ['touch it-ran']", {}),
    *((text, {}) for text in ("x: y\n" * 250_000, "- a list", "just text", "")),
    (b"\xff\xfe license: mit", {}),
    (b"license: \x00\x1b[2J", {}),
]
"""Front matter of the source, and what the result's has beside its own."""
CARDS: list[tuple[bytes | None, dict[str, Any]]] = [
    *(
        (b"---\n" + (front if isinstance(front, bytes) else front.encode()) + b"\n---\nOld card\n", kept)
        for front, kept in KEPT
    ),
    *((card, {}) for card in (None, b"", b"---", b"---\n", b"---\nlicense: mit\n", b"# No\n", b"\xff\xfe")),
]


@pytest.fixture(scope="module")
def converted(pristine: Pristine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted repository; do not change it."""
    place = tmp_path_factory.mktemp("repository") / "out"
    return convert(pristine("bloom"), place, scale=2, verify=False).path


@pytest.mark.parametrize(("readme", "kept"), CARDS, ids=range(len(CARDS)))
def test_what_of_the_source_s_card_is_kept(
    converted: Path, tmp_path: Path, readme: bytes | None, kept: dict[str, Any]
) -> None:
    if readme is not None:
        (tmp_path / "README.md").write_bytes(readme)
    repository = open_converted(converted)
    source = replace(repository, source=open_folder(tmp_path), provenance=None)
    facts = Facts(
        result=repository,
        origin=read_origin(source, None, read_older_card(source, {})),
        tokenizer=Tokenizer(),
        sentence_encoder=None,
        weights="original",
        rounded=False,
        notes=[],
        place="./out",
        command="",
        checks=[],
        picture=False,
    )
    card = ModelCard(describe(facts))
    own = {"pipeline_tag": "text-generation", "library_name": "transformers"}
    assert card.data.to_dict() == own | {"tags": ["alibi", "ntk-alibi", "custom_code"]} | kept
    assert "Old card" not in card.text
    assert not (tmp_path / "it-ran").exists()


def test_the_base_model_of_a_local_source(
    make_source: MakeSource, run: RunCli, refused: Refused, tmp_path: Path
) -> None:
    source = make_source()
    (source / "README.md").write_text("---\nbase_model: someone/parent\n---\n")
    words = (source, "--scale", "2", "--out", tmp_path / "out", "--no-verify")
    line = refused(*words, "--base-model", "./bloom", code=2)
    says(line, "--base-model './bloom'", "USER/NAME")
    assert run(*words, "--base-model", "bigscience/bloom-560m").code == 0
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.base_model == "bigscience/bloom-560m"
    assert "[source](https://huggingface.co/bigscience/bloom-560m)" in card.text
    assert "--base-model bigscience/bloom-560m" in card.text


@pytest.mark.parametrize(
    ("family", "stored", "declared", "dtype", "told"),
    [
        ("jina_bert", torch.float16, True, None, True),
        ("mosaic_bert", torch.float16, False, None, True),
        ("jina_bert", torch.float32, True, "fp16", True),
        ("jina_bert", torch.float16, True, "fp32", False),
        ("jina_bert", torch.bfloat16, True, None, False),
        ("mosaic_bert", torch.float32, False, None, False),
    ],
)
def test_an_encoder_of_float16_says_how_to_load_it_on_a_cpu(
    tmp_path: Path, family: str, stored: torch.dtype, declared: bool, dtype: Any, told: bool
) -> None:
    """transformers 5 loads it as it is stored, and CPUs are slow at float16."""
    source = tiny.ENCODERS[family](tmp_path / "source", 4, dtype=stored)
    if not declared:
        edit_json(source / "config.json", {"torch_dtype": None, "dtype": None})
    result = convert(source, tmp_path / "out", train_length=64, dtype=dtype, verify=False)
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert any("dtype=torch.float32" in note for note in result.notes) == told
    assert ("dtype=torch.float32" in card) == told


def test_the_templates_change_with_the_version() -> None:
    """CHANGELOG.md has their digest beside the version: whoever changes them under an old number notices."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "templates").glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    section = (
        (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition(f"\n## {converter.__version__}")[2]
    )
    listed = re.match(r"[^\n]*\n\nTemplates: `(\w+)`", section)
    assert listed is not None
    assert listed[1] == digest.hexdigest()[:12], "give CHANGELOG.md a new version and this digest"


def test_the_versions_that_are_stated(make_source: MakeSource, tmp_path: Path) -> None:
    """On the card, in pyproject.toml, in the code's own guard, and in the test of all versions."""
    quick(make_source(), tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    first, last = TESTED
    assert (first, last) == (SUPPORTED[0], SUPPORTED[-1])
    assert f"transformers {first} to {last}" in card
    least = f"transformers>={first.removesuffix('.0')}"
    assert f"\npip install torch '{least}'\n" in card
    assert f'"{least}",\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert least in (ROOT / "templates/ntk_config.py").read_text(encoding="utf-8")
