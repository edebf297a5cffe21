"""Other programs load our graphs and compute what the model in torch computes, where they are installed.

``make test-engines`` installs OpenVINO beside the newest transformers. optimum, which the ONNX backend of
sentence-transformers needs, and fastembed stand beside older packages. transformers.js runs if node finds it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from converter import convert
from converter.onnx.card import JAVASCRIPT
from tests import patched, tiny
from tests.conftest import edit_json
from tests.onnx_graphs import POOLING, build, exported, with_modules
from tests.patched import Convert, load, scaled
from tests.runners import expected

pytestmark = pytest.mark.slow
LEAST = {"fp32": 0.99999, "fp16": 0.9999, "int8": 0.99, "w8a8": 0.99, "int4": 0.9, "int4-fp16": 0.9}
"""Dtype -> smallest cosine between a graph's vector of a text and the torch model's."""
FILES = {
    "fp32": "model.onnx",
    "fp16": "model_fp16.onnx",
    "int8": "model_quantized.onnx",
    "w8a8": "model_int8.onnx",
    "int4": "model_q4.onnx",
    "int4-fp16": "model_q4f16.onnx",
}
TEXTS = [
    " ".join(f"w{4 + (7 * text + index) % 90}" for index in range(n)) for text, n in enumerate((3, 60, 1, 17))
]
ROWS, LENGTH, NEW = 2, 30, 8
SCRIPT = Path(__file__).with_name("transformers_js.mjs")


# --- decoders


def test_openvino(converted: Convert) -> None:
    """A prompt, a chunk and a decoded token of a padded batch."""
    openvino = pytest.importorskip("openvino")
    folder = converted("bloom", 12, "ntk-position")
    exported(folder, "portable")
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(folder / "model.onnx", "CPU", settings)
    ids, mask = tiny.token_ids(ROWS, 60), tiny.padding_mask([60, 41], "left", 60)
    with torch.no_grad():
        right = load(folder)(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits.numpy()
    pasts = [each.get_any_name() for each in compiled.inputs if each.get_any_name().startswith("past")]
    config = json.loads((folder / "config.json").read_text())
    empty = np.zeros((ROWS, config["n_head"], 0, config["hidden_size"] // config["n_head"]), np.float32)
    cache = dict.fromkeys(pasts, empty)
    for start, end in ((0, 40), (40, 59), (59, 60)):
        outputs = compiled({"input_ids": ids[:, start:end], "attention_mask": mask[:, :end], **cache})
        logits, *presents = (outputs[each] for each in compiled.outputs)
        real = mask[:, start:end].astype(bool)
        assert np.abs(logits - right[:, start:end])[real].max() <= 1e-4 * np.abs(right).max()
        cache = dict(zip(pasts, presents, strict=True))


@pytest.mark.parametrize("binding", [False, True])
@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_optimum_generates_the_same_tokens(converted: Convert, family: str, binding: bool) -> None:
    optimum = pytest.importorskip("optimum.onnxruntime")
    folder = converted(family, 12, "ntk-position")
    exported(folder, "portable")
    ids = torch.from_numpy(tiny.token_ids(ROWS, LENGTH))
    mask = torch.from_numpy(tiny.padding_mask([LENGTH - 10, LENGTH], "left", LENGTH))
    # Generate all tokens: an end token would hide differences after it.
    options = {"attention_mask": mask, "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    right = load(folder, dtype=torch.float32).generate(ids, **options)
    graph = optimum.ORTModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, use_io_binding=binding
    )
    assert torch.equal(graph.generate(ids, **options), right)


# --- encoders


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted JinaBERT with standalone graphs of all dtypes."""
    folder = tmp_path_factory.mktemp("programs")
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    source = tiny.ENCODERS["jina_bert"](folder / "source", 4, head="Model", **sizes)
    edit_json(source / "tokenizer_config.json", {"padding_side": "right"})
    with_modules(source, {**POOLING, "word_embedding_dimension": 64})
    convert(source, folder / "out", scale=4.0, verify=False)
    for dtype in FILES:
        exported(folder / "out", dtype=dtype, standalone=True, pooled=True)
    return folder / "out"


@torch.no_grad()
def torch_vectors(folder: Path) -> Any:
    """Means of the hidden states of each text by itself, float32 [texts, hidden]."""
    model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    rows = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in TEXTS]
    return torch.stack(rows).numpy()


def with_sentence_transformers(folder: Path, dtype: str) -> Any:
    import sentence_transformers

    options = {"backend": "onnx", "trust_remote_code": True, "model_kwargs": {"file_name": FILES[dtype]}}
    return sentence_transformers.SentenceTransformer(str(folder), **options).encode(TEXTS)


def with_fastembed(folder: Path, dtype: str) -> Any:
    import fastembed
    from fastembed.common.model_description import ModelSource, PoolingType

    fastembed.TextEmbedding.add_custom_model(
        model=dtype,
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf="not/used"),
        dim=64,
        model_file=f"onnx/{FILES[dtype]}",
    )
    model = fastembed.TextEmbedding(dtype, specific_model_path=str(folder))
    return np.stack(list(model.embed(TEXTS)))


def with_transformers_js(folder: Path, dtype: str) -> Any:
    words = ["node", str(SCRIPT), str(folder), JAVASCRIPT[dtype], json.dumps(TEXTS)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return np.array(json.loads(done.stdout.splitlines()[-1]))


def transformers_js() -> Path:
    """The folder of node's packages that has transformers.js; skips the test if node or this is not there."""
    found = shutil.which("node") and subprocess.run(["node", str(SCRIPT)], capture_output=True, text=True)
    if not found or found.returncode:
        pytest.skip("node does not find @huggingface/transformers")
    return Path(found.stdout.strip()).parents[3]


PROGRAMS: dict[str, Callable[[Path, str], Any]] = {
    "sentence_transformers": with_sentence_transformers,
    "fastembed": with_fastembed,
    "transformers.js": with_transformers_js,
}
NEEDS = {"sentence_transformers": "optimum.onnxruntime"}


@pytest.mark.parametrize("dtype", LEAST)
@pytest.mark.parametrize("program", PROGRAMS)
def test_vectors_are_those_of_torch(request: pytest.FixtureRequest, program: str, dtype: str) -> None:
    if program == "transformers.js":
        transformers_js()
    else:
        pytest.importorskip(NEEDS.get(program, program))
    folder = request.getfixturevalue("encoder")  # only where a program reads it
    found, right = PROGRAMS[program](folder, dtype), torch_vectors(folder)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(right, axis=1)
    assert ((found * right).sum(1) / lengths).min() >= LEAST[dtype]


# --- the lines of a card for transformers.js


def run_card(folder: Path) -> str:
    """What the card's lines print, run in the folder as they stand."""
    (folder.parent / "node_modules").symlink_to(transformers_js())
    [code] = re.findall(r"^```js\n(.*?)^```$", (folder / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    words = ["node", "--input-type=module", "--eval", code]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("standalone", [True, False])
@pytest.mark.parametrize("family", ["bloom", "mpt", "baichuan", "refact"])
def test_transformers_js_generates_the_same_text(converted: Convert, family: str, standalone: bool) -> None:
    """The number of layers has three names, and Refact has `multi_query`."""
    transformers_js()
    folder = converted(family, 4, "ntk-position")
    exported(folder, "portable", dtype="fp32", standalone=standalone)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = tokenizer("A text", return_tensors="pt")["input_ids"]
    right = load(folder, dtype=torch.float32).generate(ids, max_new_tokens=20, do_sample=False)
    assert right.shape[1] > ids.shape[1] + 2
    text = tokenizer.decode(right[0], skip_special_tokens=True)
    assert f"generated_text: '{text}'" in run_card(folder)


@pytest.mark.parametrize("standalone", [True, False])
@pytest.mark.parametrize("family", ["bloom", "jina_bert"])
def test_transformers_js_classifies_alike(converted: Convert, family: str, standalone: bool) -> None:
    transformers_js()
    folder = converted(family, 4, head="SequenceClassification")
    exported(folder, "portable", dtype="fp32", standalone=standalone)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        right = model(tokenizer("A text.", return_tensors="pt")["input_ids"]).logits[0].softmax(0)
    [(label, score)] = re.findall(r"label: '(\w+)', score: ([\d.e-]+)", run_card(folder))
    assert label == model.config.id2label[int(right.argmax())]
    assert abs(float(score) - right.max().item()) < 1e-5


# --- WebGPU, as browsers have it, on Chromium's SwiftShader, which computes it on the CPU

WEBGPU = Path(__file__).with_name("webgpu.mjs")
DRIVER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")
"""Debian's chromium has it."""


def on_webgpu(graph: Path, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The first output of a graph; skips the test if node, onnxruntime-node or the driver is not there."""
    if not shutil.which("node") or subprocess.run(["node", WEBGPU]).returncode:
        pytest.skip("node does not find onnxruntime-node")
    if not DRIVER.is_file():
        pytest.skip("chromium's SwiftShader is not there")
    given = json.dumps({"ids": ids.tolist(), "mask": mask.tolist()})
    drivers = {"VK_DRIVER_FILES": str(DRIVER), "LD_LIBRARY_PATH": str(DRIVER.parent)}
    done = subprocess.run(
        ["node", WEBGPU, graph, given], env=os.environ | drivers, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return np.array(found["values"]).reshape(found["dims"])


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        *(("bloom", scaling) for scaling in ("none", "ntk", "ntk-length", "ntk-position", "concave")),
        *(("mpt", scaling) for scaling in ("by-parts-position", "fitted-position")),
        *((family, "ntk-length") for family in ("jina_bert", "mosaic_bert", "alberturin")),
    ],
)
def test_webgpu(converted: Convert, family: str, scaling: str) -> None:
    folder = converted(family, 12, scaling)
    ids, mask = tiny.token_ids(ROWS, 60), tiny.padding_mask([60, 41], "right", 60)
    right = expected(folder, family, ids, mask)
    found = on_webgpu(build(folder, "portable"), ids, mask)
    real = mask.astype(bool)
    assert np.abs(found - right)[real].max() <= 1e-4 * np.abs(right[real]).max()


def test_webgpu_up_to_the_trained_length(tmp_path: Path) -> None:
    """Every bit is that of the graph without a scaling."""
    source = tiny.FACTORIES["bloom"](tmp_path / "source", 12)
    ids = tiny.token_ids(1, int(patched.TRAIN_LENGTH / patched.RATE))
    found = [
        on_webgpu(build(scaled(source, tmp_path / scaling, scaling, 12), "portable"), ids, np.ones_like(ids))
        for scaling in ("none", "ntk-position", "ntk-length")
    ]
    for values in found[1:]:
        assert np.array_equal(values, found[0])
