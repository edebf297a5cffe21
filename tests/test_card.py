"""The code in the model cards of converted repositories, run as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import AutoModel
from transformers.pytorch_utils import Conv1D

from converter import convert
from converter.result.card.examples import literal
from converter.result.card.update import is_by_hand, with_kept_text, with_place
from tests import forks, tiny
from tests.conftest import RunCli, edit_json
from tests.onnx_graphs import exported
from tests.runners import LAYERS
from tests.test_sentence_transformers import reranker
from tests.test_sentence_transformers import source as sentence_encoder
from tests.tiny import rotary as tiny_rotary

ROOT = Path(__file__).parent.parent
RECIPES = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TARGETS = re.compile(r"`target_modules=(\[.*?\])`")


def fill_mask(folder: Path) -> Path:
    source = tiny.ENCODERS["mosaic_bert"](folder, 4)
    edit_json(source / "tokenizer_config.json", {"mask_token": "w5"})
    return source


def of_head(family: str, head: Any) -> Callable[[Path], Path]:
    factory = {**tiny.FACTORIES, **tiny.ENCODERS}[family]
    return lambda folder: factory(folder, 4, head=head)


SHOWN: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "generate": (of_head("jais", "CausalLM"), "text-generation", "^[1-9]\\d* new tokens"),
    "backbone": (of_head("bloom", "Model"), "feature-extraction", r"torch.Size\(\[1, \d, 32\]\)"),
    "encoder": (of_head("jina_bert", "Model"), "feature-extraction", r"\(2, 32\)"),
    "sentences": (sentence_encoder, "sentence-similarity", r"\(2, 32\)"),
    "fill": (fill_mask, "fill-mask", "'token_str': "),
    "classify": (of_head("jina_bert", "SequenceClassification"), "text-classification", "'label': 'LABEL_"),
    "rerank": (reranker, "text-classification", "'score': "),
    "tokens": (of_head("bloom", "TokenClassification"), "token-classification", "'entity': 'LABEL_"),
    "answer": (of_head("mosaic_bert", "QuestionAnswering"), "question-answering", ""),
    "rotary": (
        lambda folder: tiny_rotary.rotary(folder, "llama"),
        "text-generation",
        "^[1-9]\\d* new tokens",
    ),
}
"""Name -> how the source is written, its task, and a pattern of what the card's code prints."""
STOCK = {"backbone": "`BloomModel.from", "tokens": "`BloomForTokenClassification.from"}
"""Name -> the stock class that would run the model unscaled."""
RUN = """
for name, block in BLOCKS.items():
    print(f"== {name}")
    names = {}
    exec(block, names)
    if "output" in names:
        print(names["output"].shape[1] - names["inputs"]["input_ids"].shape[1], "new tokens")
"""


def test_the_code_of_every_card_runs(tmp_path: Path) -> None:
    """All of them in one process, since each would import transformers anew."""
    blocks = {}
    for name, (write, task, _) in SHOWN.items():
        convert(write(tmp_path / f"{name}-source"), tmp_path / name, scale=2, verify=False)
        card = ModelCard.load(tmp_path / name / "README.md")
        assert card.data.pipeline_tag == task
        assert ("with the stock class" in card.text) == (name in STOCK)
        assert STOCK.get(name, "") in card.text
        blocks[name] = "\n".join(PYTHON.findall(card.text))
        assert f'"./{name}"' in blocks[name]
    done = forks.run(
        [sys.executable, "-c", f"BLOCKS = {blocks!r}\n{RUN}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = dict(re.findall(r"== (\w+)\n(.*?)(?=^== |\Z)", done.stdout, re.DOTALL | re.MULTILINE))
    assert printed.keys() == SHOWN.keys()
    for name, (*_, pattern) in SHOWN.items():
        assert re.search(pattern, printed[name], re.MULTILINE), (name, printed[name])


COMMAND = re.compile(r"^ *(?:`|)ntk-convert (.*?)`?\.?$", re.MULTILINE)


@pytest.mark.parametrize("modules", [True, False])
def test_the_commands_of_an_encoder_s_card_run(
    run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: bool
) -> None:
    """The export stands in the folder itself, and the conversion beside its source."""
    source = sentence_encoder(tmp_path / "source")
    if not modules:
        (source / "modules.json").unlink()
    options: dict[str, Any] = {"train_length": 64, "max_length": 600, "dtype": "fp16"}
    result = convert(source, tmp_path / "out", verify=False, base_model="me/jina", **options)
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    exported, made = COMMAND.findall(card)
    (tmp_path / "again").mkdir()
    shutil.copytree(source, tmp_path / "again/source")
    monkeypatch.chdir(tmp_path / "again")
    assert run(*shlex.split(made)).code == 0
    for name in ("config.json", "sentence_bert_config.json", "model.safetensors"):
        assert Path("out", name).read_bytes() == (result.path / name).read_bytes()
    monkeypatch.chdir(result.path)
    done = run(*shlex.split(exported), "--no-validate")
    assert done.code == 0, done.err
    assert Path("onnx/model.onnx").exists()


@pytest.mark.parametrize(
    ("modules", "card", "library", "task"),
    [
        (True, "", "sentence-transformers", "sentence-similarity"),
        (True, "library_name: transformers", "sentence-transformers", "sentence-similarity"),
        (False, "library_name: sentence-transformers", "sentence-transformers", "sentence-similarity"),
        (False, "", "transformers", "feature-extraction"),
        ("own.Module", "library_name: sentence-transformers", "transformers", "feature-extraction"),
    ],
)
def test_the_library_of_a_sentence_encoder(
    tmp_path: Path, modules: bool | str, card: str, library: str, task: str
) -> None:
    """Remote code cannot be loaded; without ``modules.json`` there is mean pooling."""
    source = sentence_encoder(tmp_path / "source")
    (source / "README.md").write_text(f"---\n{card}\n---\n")
    if not modules:
        (source / "modules.json").unlink()
    elif isinstance(modules, str):
        (source / "modules.json").write_text(json.dumps([{"path": "1_Pooling", "type": modules}]))
    convert(source, tmp_path / "out", scale=2, verify=False)
    found = ModelCard.load(tmp_path / "out/README.md")
    assert (found.data.library_name, found.data.pipeline_tag) == (library, task)
    embeds = modules != "own.Module"
    assert ("SentenceTransformer(" in found.text) == embeds
    assert ("infinity runs this model" in found.text) == embeds
    # A server with a JinaBERT of its own knows it by this type, and would run it unscaled.
    assert "Never set `model_type` in config.json\n  to `bert`" in found.text
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "ntk_jina_bert"


@pytest.mark.parametrize("layer", {**dict.fromkeys(tiny.FACTORIES), **LAYERS})
def test_the_layers_for_lora_are_those_of_the_model(tmp_path: Path, layer: str) -> None:
    """peft adapts every linear layer of the blocks; docs/recipes.md names those of BLOOM."""
    family, changes = LAYERS.get(layer, (layer, {}))
    source = {**tiny.FACTORIES, **tiny.ENCODERS}[family](tmp_path / "source", 4, **changes)
    convert(source, tmp_path / "out", scale=2, verify=False)
    [found] = TARGETS.findall(ModelCard.load(tmp_path / "out/README.md").text)
    names = json.loads(found)
    assert layer != "bloom" or f"target_modules = {found}" in RECIPES

    model = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True)
    block = re.compile(r"(^|\.)(h|layers?|blocks)\.\d+\.")
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and block.search(name)
    }
    assert {name.rpartition(".")[2] for name in linear} == set(names)
    adapted = get_peft_model(model, LoraConfig(target_modules=names, r=2))
    layers = {name.removeprefix("base_model.model.") for name in adapted.targeted_module_names}
    assert layers >= linear
    assert {name for name in layers - linear if "pooler" not in name} == set()


@pytest.mark.parametrize(
    ("family", "head", "options", "said"),
    [
        ("bloom", "CausalLM", {"scale": 4, "train_length": 2048}, "vllm serve ./out --max-model-len 8192\n"),
        ("jais", "CausalLM", {"method": "none"}, "vllm serve ./out --max-model-len 2048\n"),
        ("mpt", "CausalLM", {"dynamic": "position", "train_length": 24}, "./out --max-model-len 192\n"),
        ("mpt", "CausalLM", {"dynamic": "length", "train_length": 24}, "serve this model: its scaling is"),
        ("bloom", "SequenceClassification", {"scale": 4}, "vllm serve ./out --max-model-len 8192\n"),
        ("bloom", "QuestionAnswering", {"scale": 4}, "no `NtkBloomForQuestionAnswering`.\n"),
        ("jina_bert", "Model", {"train_length": 24, "max_length": 300}, "./out --max-model-len 300\n"),
    ],
)
def test_vllm(tmp_path: Path, family: str, head: Any, options: dict[str, Any], said: str) -> None:
    convert(of_head(family, head)(tmp_path / "source"), tmp_path / "out", verify=False, **options)
    card = (tmp_path / "out/README.md").read_text()
    assert said in card
    assert card.count("## Serve\n") == 1
    there = with_place(card, "me/long", "8k")
    assert "./out" not in there.partition("## How it was made")[0]
    assert ("vllm serve me/long --revision 8k --max-model-len" in there) == ("vllm serve ./out" in card)


@pytest.mark.parametrize("first", ["./out", './it\'s "mine"', "./a\\b", "me/first"])
@pytest.mark.parametrize("spelled", [literal, repr], ids=["now", "before"])
def test_a_card_gets_another_place_more_than_once(
    tmp_path: Path, first: str, spelled: Callable[[str], str]
) -> None:
    """As a repository does that was pushed, downloaded and pushed again; old cards quote it otherwise."""
    convert(
        of_head("jina_bert", "Model")(tmp_path / "source"), tmp_path / "out", train_length=24, verify=False
    )
    direct = with_place((tmp_path / "out/README.md").read_text(), "me/last", "v2")
    card = with_place((tmp_path / "out/README.md").read_text(), first)
    card = card.replace(f"({literal(first)},", f"({spelled(first)},")
    assert card.count(f"({spelled(first)}, trust_remote_code=True)") == 3
    for revision in ("v1", None, "v2"):
        card = with_place(card, "me/last", revision)
        assert with_place(card, "me/last", revision) == card
    assert card == direct


THEIRS = """\
# Mine

```python
model = AutoModel.from_pretrained("C:\\Users\\me")
## no title
```

Made with
with ntk-convert and patience.

## Results

Good.

## Results

Better.
"""


def test_the_card_of_somebody_else_keeps_its_examples(tmp_path: Path) -> None:
    convert(of_head("bloom", "CausalLM")(tmp_path / "source"), tmp_path / "out", scale=4, verify=False)
    fresh = (tmp_path / "out/README.md").read_text()
    assert is_by_hand(THEIRS.encode())
    card = with_kept_text(fresh, THEIRS)
    assert THEIRS in card
    there = with_place(card, "me/long", None)
    assert THEIRS in there
    assert 'AutoModelForCausalLM.from_pretrained("me/long", trust_remote_code=True)' in there
    assert with_place(THEIRS, "me/long", None) == THEIRS


HOSTILE = "# Mine\n\n```\n## Load\r---\rlicense: x\u2028## ONNX\n<!--\n"
OWN: dict[str, tuple[str, str | None]] = {
    "plain": ("---\nlicense: mit\n---\n\n# Mine\n\nIt reads laws.\n", "> # Mine\n>\n> It reads laws."),
    "hostile": (
        HOSTILE,
        "> # Mine\n>\n> ```\n> ## Load\n> ---\n> license: x\n> ## ONNX\n> <!--",
    ),
    "not UTF-8": ("# M\udcff\n", "> # M\ufffd"),
    "front matter alone": ("---\nlicense: mit\n---\n\n", None),
    "too long": ("# Mine\n" + "x" * 100_000, None),
}
"""The card of a source, and how the result's quotes its text."""


@pytest.mark.parametrize("case", OWN)
def test_the_text_of_a_source_s_card_is_quoted(tmp_path: Path, case: str) -> None:
    """Once, also if the result, or a plain model with its card, is converted again."""
    card, quoted = OWN[case]
    source = of_head("bloom", "CausalLM")(tmp_path / "source")
    (source / "README.md").write_bytes(card.encode(errors="surrogateescape"))
    result = convert(source, tmp_path / "out", scale=4, verify=False)
    made = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    title, end = "\n## The original model card\n", f"\n\n{quoted}\n"
    assert made.count(title) == (quoted is not None)
    assert quoted is None or made.endswith(end)
    assert any("README.md of source" in note for note in result.notes) == (case == "too long")
    assert quoted is None or with_place(made, "me/long").endswith(end)

    convert(tmp_path / "out", tmp_path / "again", verify=False)
    (source / "README.md").write_text(made, encoding="utf-8")
    convert(source, tmp_path / "copied", scale=4, verify=False)
    for name in ("again", "copied"):
        text = (tmp_path / name / "README.md").read_text(encoding="utf-8")
        assert text.replace(f"./{name}", "./out") == made


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_sections_that_an_owner_added_are_kept(tmp_path: Path, end: str) -> None:
    convert(of_head("bloom", "CausalLM")(tmp_path / "source"), tmp_path / "out", scale=4, verify=False)
    fresh = (tmp_path / "out/README.md").read_text()
    older = f"{fresh}\n## Notes\n\n```\n## Load\n```\n\n## Results\n\nGood.\n\n## Results\n\nBetter.\n"
    assert with_kept_text(fresh, older.replace("\n", end)) == older


@pytest.mark.parametrize(
    ("family", "head", "graph", "said"),
    [
        (
            "bloom",
            "CausalLM",
            {"standalone": True},
            '{ config, dtype: "fp32", use_external_data_format: true }',
        ),
        (
            "bloom",
            "CausalLM",
            {"dtype": "fp16"},
            'dtype: "fp32", subfolder: "", model_file_name: "model_fp32" }',
        ),
        ("jina_bert", "Model", {"dtype": "w8a8"}, '("feature-extraction", name, { config, dtype: "int8" })'),
        ("bloom", "TokenClassification", {}, '("token-classification", name, { config, dtype: "fp32", subf'),
        ("jina_bert", "Model", {"dtype": "bf16", "standalone": True}, ""),
    ],
)
def test_the_lines_for_transformers_js(
    tmp_path: Path, family: str, head: Any, graph: dict[str, Any], said: str
) -> None:
    """test_other_programs runs them; it knows no name of a graph in bfloat16."""
    sizes = {"hidden_size": 64, "intermediate_size": 128} if graph.get("dtype") == "w8a8" else {}
    source = {**tiny.FACTORIES, **tiny.ENCODERS}[family](tmp_path / "source", 4, head=head, **sizes)
    convert(source, tmp_path / "out", scale=2, verify=False)
    card = (exported(tmp_path / "out", "portable", **graph) / "README.md").read_text()
    assert said in card
    assert ("@huggingface/transformers" in card) == bool(said)
