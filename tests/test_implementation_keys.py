"""Keys of config.json that only choose an implementation: never a reason to refuse, and dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from converter import convert
from converter.config import IMPLEMENTATION, without_implementation
from converter.families import FAMILIES
from converter.families.templates import config_keys
from tests import tiny
from tests.conftest import edit_json
from tests.patched import config_of
from tests.tiny import rotary

KEYS: dict[str, Any] = {
    "attn_implementation": "nobody/kernel",
    "_attn_implementation": {"": "nobody/kernel"},
    "_attn_implementation_internal": "flash_attention_2",
    "_attn_implementation_autoset": True,
    "experts_implementation": "nobody/kernel",
    "attn_impl": "triton",
    "use_flash_attn": True,
    "use_flash_attention": "yes",
    "use_flash_attention_2": True,
    "flash_attention": True,
    "_flash_attn_2_enabled": True,
    "use_memory_efficient_attention": True,
    "use_xformers": 1,
    "fused_mlp": True,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "use_fused_rms_norm": True,
}
SOURCES = {**tiny.FACTORIES, **tiny.ENCODERS, "rotary": lambda folder: rotary.rotary(folder, "llama")}


@pytest.mark.parametrize("family", SOURCES)
def test_they_are_dropped(tmp_path: Path, family: str) -> None:
    source = tmp_path / "source"
    SOURCES[family](source)
    path = source / "config.json"
    nested = {"attn_config": {**config_of(source).get("attn_config", {}), **KEYS}} if family == "mpt" else {}
    edit_json(path, {**KEYS, **nested})
    before = path.read_bytes()
    result = convert(source, tmp_path / "out", scale=2.0, dry_run=True)
    assert {key: result.config_changes[key] for key in KEYS} == {key: (KEYS[key], None) for key in KEYS}
    if nested:
        assert not KEYS.keys() & result.config_changes["attn_config"][1].keys()
    assert path.read_bytes() == before


def test_the_result_is_the_same_without_them(tmp_path: Path) -> None:
    """It is also verified and loaded, and would run the kernel of another repository."""
    source = tiny.FACTORIES["bloom"](tmp_path / "source")
    convert(source, tmp_path / "plain", scale=2.0)
    edit_json(source / "config.json", KEYS)
    convert(source, tmp_path / "out", scale=2.0)
    assert config_of(tmp_path / "out") == config_of(tmp_path / "plain")


def test_no_key_that_matters_is_dropped() -> None:
    for family in FAMILIES:
        assert not any(IMPLEMENTATION.fullmatch(key) for key in config_keys(family))
    published = json.loads((Path(__file__).parent / "published/mpt.json").read_text(encoding="utf-8"))
    kept = without_implementation({**published[0]["config"], "attn_config": {"fused_qkv": False}})
    assert kept["attn_config"] == {"fused_qkv": False}
