"""examples/generate_onnx.py generates what transformers does, in one buffer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoTokenizer

from converter import OnnxOptions, convert, export
from tests import tiny
from tests.messages import raises, says
from tests.onnx_graphs import LENGTHS, NEW, Make, edit, exported, generated, prompts
from tests.patched import Convert, load

pytest.importorskip("onnxruntime")

SCRIPT = Path(__file__).parent.parent / "examples" / "generate_onnx.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_onnx", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def columns(steps: list[list[int | None]]) -> list[list[int]]:
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


@pytest.mark.parametrize(
    ("family", "last_logits", "dtype", "tolerance"),
    [
        ("bloom", True, "fp32", 1e-3),
        ("refact", False, "fp32", 1e-3),
        ("mpt", False, "fp16", 0.1),
    ],
)
def test_a_batch(
    with_graph: Make, example: ModuleType, family: str, last_logits: bool, dtype: str, tolerance: float
) -> None:
    """Tokens, and logits: these tiny models often repeat a token, so tokens alone show too little."""
    stored = {"fp32": torch.float32, "fp16": torch.float16}[dtype]
    folder = with_graph(family, "ntk-position", stored, dtype=dtype, last_logits=last_logits)
    model = example.Model(folder, graph="model.onnx")
    batch = example.Batch(model, 3, max(LENGTHS) + NEW)
    made = columns(list(example.generate(batch, prompts(), NEW)))
    assert made == [generated(folder, prompt) for prompt in prompts()]

    batch, new = example.Batch(model, 3, max(LENGTHS) + NEW), tiny.token_ids(3, NEW, seed=1)
    # Copies, because every run writes to the same memory.
    found = [np.stack([batch.prefill(row, prompt)[-1].copy() for row, prompt in enumerate(prompts())])]
    for tokens in new.T:
        found.append(batch.step(dict(enumerate(tokens))).copy())
    for row, prompt in enumerate(prompts()):
        ids = torch.tensor([[*prompt, *new[row]]])
        with torch.no_grad():
            logits = load(folder).float()(ids).logits[0, len(prompt) - 1 :]
        assert np.abs(np.stack(found)[:, row] - logits.numpy()).max() <= tolerance


def test_a_row_stops_at_its_end_token(with_graph: Make, example: ModuleType) -> None:
    folder = with_graph("mpt", "ntk-position")
    model = example.Model(folder)
    assert model.end_tokens == [tiny.END]
    free = columns(list(example.generate(example.Batch(model, 3, 100), prompts(), NEW)))
    model.end_tokens = [free[0][3]]
    steps = list(example.generate(example.Batch(model, 3, 100), prompts(), NEW))
    for row, whole in zip(columns(steps), free, strict=True):
        end = whole.index(free[0][3]) + 1 if free[0][3] in whole else NEW
        assert row == whole[:end]
    assert len(columns(steps)[0]) <= 4
    assert len(list(example.generate(example.Batch(model, 1, 100), prompts()[:1], NEW))) <= 4


def test_past_and_present_are_one_buffer(with_graph: Make, example: ModuleType) -> None:
    """It has every token of each row, and nothing behind them."""
    batch = example.Batch(example.Model(with_graph()), 3, 80)
    list(example.generate(batch, prompts(), 4))
    presents = [value for value in batch.binding.get_outputs() if len(value.shape()) == 4]
    pasts = list(batch.cache.values())
    assert [each.data_ptr() for each in presents] == [each.data_ptr() for each in pasts]
    assert len(pasts) == 4
    assert list(batch.counts) == [length + 3 for length in LENGTHS], "the last token need not be run"
    for past in pasts:
        for content, count in zip(past.numpy(), batch.counts, strict=True):
            assert content[:, :count].any(axis=(0, 2)).all()
            assert not content[:, count:].any()


def test_rows_begin_and_end_while_others_go_on(with_graph: Make, example: ModuleType) -> None:
    """A row that is left out of steps stays as it is, in the middle of its prompt too."""
    folder = with_graph("jais", "ntk-position")
    model, new = example.Model(folder), tiny.token_ids(3, 6, seed=1)
    long, middle, short = prompts()

    def alone(prompt: list[int], *tokens: int) -> np.ndarray:
        return example.Batch(model, 1, 80).prefill(0, [*prompt, *map(int, tokens)])[-1].copy()

    def same(found: np.ndarray, *right: np.ndarray) -> None:
        assert np.abs(found - np.stack(right)).max() <= 1e-4

    batch = example.Batch(model, 3, 80)
    batch.prefill(2, middle)
    same(batch.step({2: new[0][0]}), alone(middle, new[0][0]))
    batch.prefill(0, long[:30])
    same(batch.step({2: new[0][1]}), alone(middle, *new[0][:2]))
    same(batch.prefill(0, long[30:])[-1:], alone(long))
    both = batch.step({2: new[0][2], 0: new[1][0]})
    same(both, alone(middle, *new[0][:3]), alone(long, new[1][0]))
    batch.clear(0)
    same(batch.prefill(0, short)[-1:], alone(short))
    same(batch.step({0: new[2][0], 2: new[0][3]}), alone(short, new[2][0]), alone(middle, *new[0][:4]))


@pytest.mark.parametrize("mask", [[2] * 8, [1] * 7 + [10**6], [-5] + [1] * 7, [10**9] + [0] * 7, [0] * 8])
def test_a_mask_of_other_numbers_writes_into_no_other_row(
    with_graph: Make, example: ModuleType, mask: list[int]
) -> None:
    """Its own results are wrong."""
    batch = example.Batch(example.Model(with_graph()), 2, 8)
    batch.prefill(1, [5] * 8)
    before = [cache.numpy()[1].copy() for cache in batch.cache.values()]
    batch._bind_rows(0, 1)
    batch._run(np.array([[7]], np.int64), np.array([mask], np.int64))
    for cache, row in zip(batch.cache.values(), before, strict=True):
        assert np.array_equal(cache.numpy()[1], row)


def test_what_does_not_fit_is_refused(with_graph: Make, example: ModuleType) -> None:
    model = example.Model(with_graph())
    with raises(ValueError, "76 tokens", "75"):
        next(example.generate(example.Batch(model, 3, 75), prompts(), NEW))
    batch = example.Batch(model, 3, 60)
    with raises(ValueError, "61 tokens", "60"):
        batch.prefill(0, [5] * 61)
    batch.prefill(0, [5] * 60)
    with raises(ValueError, "61 tokens", "60"):
        batch.step({0: 5})


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_missing_provider_is_refused(
    with_graph: Make, example: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The libraries of CUDA are looked for; what onnxruntime says of them is not part of the text."""
    folder = with_graph()
    monkeypatch.setattr(example.ort, "cuda_version", "13.0")
    with raises(RuntimeError, "CUDAExecutionProvider"):
        example.Model(folder, "cuda")
    said = capfd.readouterr()
    assert said.out == ""
    assert "Failed to load lib" in said.err


def run(*arguments: str) -> str:
    """The script's output, with proof that it needs neither torch nor transformers."""
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(SCRIPT), *arguments, "--max-new-tokens", str(NEW)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_command_line(converted: Convert) -> None:
    folder = exported(converted("mpt", 4, "ntk"))
    texts = ["w5 w6 w7 w8 w9 w10", "w20 w21"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = [generated(folder, tokenizer(text)["input_ids"]) for text in texts]
    lines = [tokenizer.decode(row, skip_special_tokens=True) for row in words]
    assert run(str(folder), *texts) == "\n".join(lines) + "\n"
    assert run(str(folder), texts[0]) == lines[0] + "\n"

    (folder / "tokenizer.json").unlink()
    ids = generated(folder, [5, 6, 7])
    assert run(str(folder), "5 6 7") == " ".join(map(str, ids)) + "\n"


def without_rows(model: onnx.ModelProto) -> None:
    """A graph of version 0.1 lacks this property."""
    [own] = [each for each in model.metadata_props if each.key == "rows"]
    model.metadata_props.remove(own)


def test_what_cannot_be_run(
    converted: Convert,
    example: ModuleType,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each ends in one line, with exit code 1."""

    def line(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            example.main()
        # Python prints a text to stderr and exits with 1.
        assert isinstance(stopped.value.code, str)
        assert "\n" not in stopped.value.code
        assert tuple(capfd.readouterr()) == ("", "")
        return stopped.value.code

    folder = converted("bloom", 4, "ntk")
    says(line(folder / "missing", "w5"), "missing is not a folder")
    says(line(folder, "w5"), "no ONNX graph", f"ntk-convert export {folder}")
    exported(folder, profile="portable")
    says(line(folder, "w5"), f"ntk-convert export {folder} --onnx-profile ort")
    says(
        line(folder, "w5", "--graph", "onnx/model.onnx"), "onnx/model.onnx", str(folder), "ntk-convert export"
    )
    exported(folder, task="feature-extraction")
    says(line(folder, "w5"), "no cache", "language model")
    exported(folder).joinpath("model.onnx").rename(folder / "other.onnx")
    assert example.Model(exported(folder, profile="portable"), graph="other.onnx").caches

    exported(folder)
    edit(folder / "model.onnx", without_rows)
    says(line(folder, "w5"), "older ntk-convert", f"ntk-convert export {folder}")

    exported(folder)
    says(line(folder, "w5", "--max-new-tokens", "0"), "--max-new-tokens", "at least 1")
    assert "Unable to allocate" in line(folder, "w5", "--max-new-tokens", 10**15)
    (folder / "tokenizer.json").unlink()
    says(line(folder, "5", ""), "no tokens")
    says(line(folder, "5 six"), "tokenizer.json", "5 6 7", "'5 six'")


def test_bfloat16_weights_run_on_a_cpu(tmp_path: Path, example: ModuleType) -> None:
    """By the float32 graph that stands beside the other one."""
    source, folder = (
        tiny.FACTORIES["mpt"](tmp_path / "source", dtype=torch.bfloat16, use_cache=True),
        tmp_path / "out",
    )
    convert(source, folder, scale=2, verify=False)
    export(folder, OnnxOptions(validate=False))
    assert example.graph_file(folder, "cuda") == folder / "model.onnx"
    assert example.graph_file(folder, "cpu") == folder / "model_fp32.onnx"
    batch = example.Batch(example.Model(folder), 1, LENGTHS[0] + NEW)
    found = columns(list(example.generate(batch, prompts()[:1], NEW)))
    assert found == [generated(folder, prompts()[0])]
