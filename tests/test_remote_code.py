"""A converted repository names its own code and no other: conversion removes references, the rest refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from converter import convert
from converter.publish.contents import read_contents
from converter.result import manifest
from converter.source.remote_code import NOT_COPIED
from tests import forks
from tests.conftest import MakeSource, Refused, edit_json
from tests.hub_server import HubServer

EVIL = "evil/repo"
POOLED = "sentence_transformers.models."
KEPT: dict[str, Any] = {"kept": [1, {"type": "linear"}]}


def modules(first: str = f"{POOLED}Transformer", path: str = "") -> list[dict[str, str]]:
    return [{"name": "0", "path": path, "type": first}]


CASES: dict[str, tuple[str, Any, Any, str]] = {
    "a pipeline": (
        "config.json",
        {"custom_pipelines": {"evil": {"impl": f"{EVIL}--code.Thing", "pt": ["AutoModel"], "type": "text"}}},
        {},
        f"custom_pipelines: {EVIL}--code.Thing",
    ),
    "a class below another key of the config": (
        "config.json",
        {"part": {**KEPT, "auto_map": {"AutoModel": f"{EVIL}--code.Thing"}}},
        {"part": KEPT},
        f"auto_map: {EVIL}--code.Thing",
    ),
    "a processor's class that the tokenizer names": (
        "tokenizer_config.json",
        {"auto_map": {"AutoProcessor": f"{EVIL}--code.Thing"}},
        {},
        f"auto_map: {EVIL}--code.Thing",
    ),
    "a processor": (
        "processor_config.json",
        {"auto_map": {"AutoProcessor": f"{EVIL}--code.Thing"}, **KEPT},
        KEPT,
        f"auto_map: {EVIL}--code.Thing",
    ),
    "an image processor in a processor": (
        "processor_config.json",
        {"image_processor": {"auto_map": {"AutoImageProcessor": [f"{EVIL}--code.Thing", None]}, **KEPT}},
        {"image_processor": KEPT},
        f"auto_map: {EVIL}--code.Thing",
    ),
    "an audio tokenizer": (
        "processor_config.json",
        {"audio_tokenizer": {"audio_tokenizer_class": "AutoModel", "audio_tokenizer_name_or_path": EVIL}},
        {"audio_tokenizer": {"audio_tokenizer_class": "AutoModel"}},
        f"audio_tokenizer_name_or_path: {EVIL}",
    ),
    "an image processor": (
        "preprocessor_config.json",
        {"auto_map": {"AutoImageProcessor": f"{EVIL}--code.Thing"}, **KEPT},
        KEPT,
        f"auto_map: {EVIL}--code.Thing",
    ),
    "code of the source": (
        "preprocessor_config.json",
        {"auto_map": {"AutoFeatureExtractor": "mine.Thing"}, **KEPT},
        KEPT,
        "auto_map: mine.Thing",
    ),
    "a module": ("modules.json", modules(f"{EVIL}--code.Thing"), modules(NOT_COPIED), f"type: {EVIL}--code"),
    "a module of a package": ("modules.json", modules("os.path"), modules(NOT_COPIED), "type: os.path"),
    "modules of a router": (
        "router_config.json",
        {"types": {"a": f"{EVIL}--code.Thing"}, **KEPT},
        {"types": NOT_COPIED, **KEPT},
        f"types: {EVIL}--code.Thing",
    ),
    "an activation": (
        "1_Dense/config.json",
        {"activation_function": "os.abort", "in_features": 32},
        {"activation_function": NOT_COPIED, "in_features": 32},
        "activation_function: os.abort",
    ),
    "arguments of sentence-transformers": (
        "sentence_bert_config.json",
        {
            "max_seq_length": 1 << 20,
            "tokenizer_name_or_path": EVIL,
            "model_args": {"trust_remote_code": True, "code_revision": "refs/pr/1", "dtype": "float16"},
            "config_args": {"attn_implementation": "evil/kernel", "use_kernels": True},
        },
        {"max_seq_length": 1 << 20, "model_args": {"dtype": "float16"}, "config_args": {}},
        f"tokenizer_name_or_path: {EVIL}, trust_remote_code: True, code_revision: refs/pr/1, "
        "attn_implementation: evil/kernel, use_kernels: True",
    ),
}
"""What it is: the file, what the source's has, what the result's has instead, and what the note says."""


def put(folder: Path, name: str, content: Any) -> Path:
    """Adds the content to a file; a list is all of it."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if path.parent != folder:
        listed = modules(f"{POOLED}Dense", path.parent.name)
        (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    if path.is_file() and isinstance(content, dict):
        edit_json(path, content)
    else:
        path.write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("family", ["bloom", "llama"])
@pytest.mark.parametrize("kind", CASES)
def test_a_result_names_no_other_code(
    make_source: MakeSource, tmp_path: Path, kind: str, family: str
) -> None:
    name, content, left, note = CASES[kind]
    source = put(make_source(family), name, content)
    result = convert(source, tmp_path / "out", scale=2, verify=False)
    text = (tmp_path / "out" / name).read_text(encoding="utf-8")
    assert "evil" not in text
    found = json.loads(text)
    if isinstance(left, dict):
        found = {key: found[key] for key in {**content, **left} if key in found and key != "auto_map"}
    assert found == left
    removed = [line for line in result.notes if line.startswith("references to code")]
    assert len(removed) == 1
    assert f"so what needs it does not load: {name} ({note}" in removed[0]
    assert removed[0][1:] in (tmp_path / "out/README.md").read_text(encoding="utf-8")
    read_contents(tmp_path / "out")  # nothing is left that push refuses


@pytest.mark.parametrize("kind", CASES)
def test_a_repository_that_names_other_code(
    make_source: MakeSource, refused: Refused, tmp_path: Path, kind: str
) -> None:
    name, content, _, note = CASES[kind]
    folder = convert(make_source(), tmp_path / "out", scale=2, verify=False).path
    put(folder, name, content)
    manifest.write(folder, [path.relative_to(folder).as_posix() for path in folder.rglob("*.*")], {})
    for words in (("push", folder, "ada/x"), ("export", folder)):
        line = refused(*words)
        key, _, named = note.partition(": ")
        assert f"error: {name} has {key} {named.partition(',')[0]}" in line
        assert "remove the key, or convert the source again" in line


SCRIPT = """
import sys, transformers
from urllib.request import urlopen
from huggingface_hub.constants import ENDPOINT
transformers.logging.set_verbosity_error()
def attempt(load, *words, **options):
    try:
        load(*words, trust_remote_code=True, **options)
    except Exception as error:
        print(load.__name__, repr(error)[:300])
def load(folder):
    if group != "transformers":
        from sentence_transformers import SentenceTransformer
        return attempt(SentenceTransformer, folder, device="cpu")
    attempt(transformers.pipeline, "evil", folder)
    for auto in ("Tokenizer", "Processor", "ImageProcessor", "FeatureExtractor", "ModelForCausalLM"):
        attempt(getattr(transformers, "Auto" + auto).from_pretrained, folder)
group = sys.argv[1]
for folder in sys.argv[2:]:
    load(folder)
    try: urlopen(ENDPOINT + "/loaded/" + folder.rpartition("/")[2])
    except OSError: pass
"""
LOADED: dict[str, list[tuple[str, Any]]] = {
    "transformers": [
        *(CASES[kind][:2] for kind in ("a pipeline", "a processor", "an image processor")),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [f"{EVIL}--code.Thing", None]}}),
    ],
    "a module": [CASES["a module"][:2]],
    "an argument": [
        ("modules.json", modules()),
        ("sentence_bert_config.json", {"tokenizer_name_or_path": EVIL}),
    ],
}


@pytest.mark.parametrize("group", LOADED)
def test_loading_a_result_asks_for_no_other_code(
    make_source: MakeSource, hub: HubServer, environment: dict[str, str], tmp_path: Path, group: str
) -> None:
    """While loading its source does, in the same process."""
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/code.py").write_text("class Thing: ...")
    hub.commit(EVIL, tmp_path / "evil")
    source = make_source()
    for name, content in LOADED[group]:
        put(source, name, content)
    out = convert(source, tmp_path / "out", scale=2, verify=False).path
    words = [sys.executable, "-c", SCRIPT, group, str(out), str(source)]
    done = forks.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    paths = [request.path for request in hub.requests]
    after = paths.index("/loaded/out")
    assert not [path for path in paths[:after] if "evil" in path], done.stdout
    assert [path for path in paths[after:] if "evil" in path], done.stdout
