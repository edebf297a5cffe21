"""A JinaBERT with ColBERT's projection (jina-colbert-v1-en): one vector for each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import AutoModel

from converter import OnnxOptions, SourceError, convert
from tests import tiny
from tests.patched import assert_logits, batch, config_of
from tests.reference import ENCODERS as REFERENCES
from tests.tiny.jina_bert import PROJECTION_DIM

MASK_TOKEN = 50
"""A token that fills up queries, in place of padding."""


def converted(folder: Path, onnx: OnnxOptions | None = None, verify: bool = True, **options: Any) -> Path:
    """A converted ColBERT, with the options of its checkpoint."""
    source = tiny.ENCODERS["jina_bert"](folder / "source", 12, head="ColBERT", **options)
    convert(source, folder / "out", scale=2.0, train_length=32, onnx=onnx, verify=verify)
    return folder / "out"


def texts(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and a mask; the first row is padded, the second filled up with masked mask tokens."""
    ids, mask = batch(rows=3, length=40, side=side)
    padded = mask == 0
    ids[1][padded[1]], ids[2][padded[2]] = tiny.PAD, MASK_TOKEN
    assert padded[1].any()
    assert padded[2].any()
    return ids, mask


def expected(folder: Path, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    _, tensors = tiny.read(folder)
    numbers = ids.numpy(), mask.numpy()
    return REFERENCES["jina_bert"].logits(config_of(folder), tensors, *numbers, "ColBERT")


@torch.no_grad()
def test_its_vectors_are_colbert_s(tmp_path: Path) -> None:
    """Those of the model as the card loads it, and of its graph."""
    folder = converted(tmp_path, onnx=OnnxOptions())
    assert "AutoModel.from_pretrained(" in (folder / "README.md").read_text(encoding="utf-8")
    model, info = AutoModel.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    for side in ("right", "left"):
        ids, mask = texts(side)
        right = expected(folder, ids, mask)
        vectors = model.eval()(ids, attention_mask=mask).last_hidden_state
        assert_logits(vectors, right)
        assert np.allclose(vectors.norm(dim=-1), ids != tiny.PAD)
        inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "token_type_ids": 0 * ids.numpy()}
        assert_logits(torch.from_numpy(session.run(["last_hidden_state"], inputs)[0]), right)


def test_another_jina_bert_in_the_same_process(tmp_path: Path) -> None:
    """In a folder of the same name, whose code is therefore the same module."""
    (tmp_path / "other").mkdir()
    plain = tiny.ENCODERS["jina_bert"](tmp_path / "source", head="Model")
    convert(plain, tmp_path / "other/out", scale=2.0, verify=False)
    colbert = converted(tmp_path, verify=False)
    names = ["NtkJinaBertForColBERT", "NtkJinaBertModel"] * 2
    for name, folder in zip(names, (colbert, tmp_path / "other/out") * 2, strict=True):
        assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__ == name
    model = AutoModel.from_pretrained(colbert, trust_remote_code=True)
    model.save_pretrained(tmp_path / "saved")
    assert config_of(tmp_path / "saved")["auto_map"]["AutoModel"].endswith(".NtkJinaBertForColBERT")
    again = AutoModel.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert torch.equal(again.linear.weight, model.linear.weight)


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_its_config(tmp_path: Path, fmt: str) -> None:
    """The size of the vectors is that of the stored projection."""
    config = config_of(converted(tmp_path, fmt=fmt, verify=False))
    assert (config["architectures"], config["projection_dim"]) == (["NtkJinaBertForColBERT"], PROJECTION_DIM)
    assert config["auto_map"] == {
        "AutoConfig": "configuration_ntk_jina_bert.NtkJinaBertForColBERTConfig",
        "AutoModel": "modeling_ntk_jina_bert.NtkJinaBertForColBERT",
    }


def test_a_projection_that_is_not_stored(tmp_path: Path) -> None:
    source = tiny.ENCODERS["jina_bert"](tmp_path / "source", architectures=["HF_ColBERT"])
    with pytest.raises(SourceError, match=r"the weights have no linear\.weight, which projects the tokens"):
        convert(source, tmp_path / "out", scale=2.0)
    assert not (tmp_path / "out").exists()
