"""What must hold of the vLLM plugin where vLLM is not installed; tests/vllm runs it."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

from converter import vllm_plugin
from converter.families import FAMILIES
from converter.families.family import Family
from converter.verification.imported import templates
from tests.messages import raises

GUIDES = (
    *("compilation.decorators", "config", "distributed", "platforms", "sequence"),
    *("model_executor.layers.linear", "model_executor.layers.logits_processor"),
    *("model_executor.layers.vocab_parallel_embedding", "model_executor.models.interfaces"),
    "model_executor.models.utils",
)
"""The modules that vLLM's guides for models and plugins name, or that all models use."""
PRIVATE = (
    "transformers_utils.model_arch_config_convertor",  # sizes and limits of a config
    "model_executor.layers.attention",  # the layer, which hands further keywords to its implementation
    "model_executor.layers.pooler",  # the poolers of a task
    "model_executor.layers.pooler.seqwise",  # poolers of texts, and their heads
    "model_executor.layers.pooler.tokwise",  # the pooler of tokens' classes
    "v1.attention.backend",  # what a backend, its metadata and its implementation are
    "v1.attention.backends.cpu_attn",  # the head sizes that it takes
    "v1.attention.selector",  # which backend vLLM chooses
)
"""The other modules, which a release may change."""


def test_importing_it_imports_no_vllm() -> None:
    importlib.reload(vllm_plugin)
    assert "vllm" not in sys.modules


def test_every_family_has_a_model() -> None:
    folder = Path(vllm_plugin.__file__).parent / "families"
    assert {path.stem for path in folder.glob("[!_]*.py")} == {family.name for family in FAMILIES}


def test_what_it_uses_of_vllm_is_known() -> None:
    used = {
        (node.module or "").removeprefix("vllm.")
        for path in Path(vllm_plugin.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
    }
    assert used == {*GUIDES, *PRIVATE}


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_a_repository_s_own_code_refuses_vllm(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks before it runs the code on attention of its own. Others, who may run it, ask the same."""
    with templates() as load:
        model = getattr(load(f"modeling_ntk_{family.name}"), family.language_model)
    monkeypatch.setitem(sys.modules, "vllm", sys)
    assert model.is_backend_compatible()
    ask_from_vllm = eval("lambda model: model.is_backend_compatible()", {"__name__": "vllm.model_executor"})
    with raises(ValueError, "vLLM", "pip install ."):
        ask_from_vllm(model)


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_configs_load_in_transformers_5_19(family: Family) -> None:
    """It adds an entry to the plan for tensor parallelism of every config with tied embeddings."""
    with templates() as load:
        config_class = getattr(load(f"configuration_ntk_{family.name}"), f"Ntk{family.camel}Config")
    config = config_class()
    config.base_model_tp_plan = {**(config.base_model_tp_plan or {}), "embed_tokens": "embedding_rowwise"}
