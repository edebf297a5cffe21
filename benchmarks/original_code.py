"""Where to find each model's own code, and what originals.py must know to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Config = dict[str, Any]
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint: its number of attention heads, and its changes to the config from tests/tiny."""

    num_heads: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    head: str = "CausalLM"


@dataclass(frozen=True)
class Original:
    """One version of a model's own code."""

    family: str
    """Name of the factory in tests/tiny."""
    repository: str
    """Repository on GitHub."""
    commit: str
    cases: Mapping[str, Case]
    config: str
    """Full name of the config class."""
    model: str
    """Full name of the model class; ``{head}`` is replaced by the part after the family's name."""
    note: str
    folder: str = ""
    """The folder of the first of ``packages`` in the repository."""
    packages: tuple[str, ...] = ("original",)
    """Packages imported without their ``__init__``, which would import a whole training library."""
    stubs: tuple[str, ...] = ()
    """Modules that the code imports but does not need to run a model; replaced by empty classes."""
    adapt: Callable[[Config, State], None] = lambda config, state: None
    """Makes the changes that this version needs, in place."""
    without: str = "$^"
    """Pattern of tensor names that the code creates but no checkpoint stores: tied, zero or never used."""
    bool_mask: bool = False
    """The code needs a boolean mask."""
    rows_alone: bool = False
    """The code takes no padding mask, so padded rows are compared with the same rows run alone."""


def older_mpt(config: Config, state: State) -> None:  # noqa: ARG001
    """Older versions reject nulls and keys that newer versions write."""
    options = config["attn_config"]
    options["attn_impl"] = "torch"
    if options["kv_n_heads"] is None:
        del options["kv_n_heads"]
    config["ffn_config"].pop("fc_type", None)


def first_jina(config: Config, state: State) -> None:
    """The first revision stores query, key and value as one, and has a table of ``model_max_length``."""
    config["model_max_length"] = 64
    for name in [name for name in state if ".self.query." in name]:
        parts = [state.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        state[name.replace("query", "Wqkv")] = torch.cat(parts)
    if "cls.predictions.bias" in state:
        state["cls.predictions.decoder.bias"] = state.pop("cls.predictions.bias")


def sizes(*counts: int, **changes: Any) -> dict[str, Case]:
    return {f"{count} heads": Case(count, changes) for count in counts}


def encoders(changes: Mapping[str, Any], *heads: str) -> dict[str, Case]:
    """The masked language model with several numbers of attention heads, and models with other heads."""
    models = {f"MaskedLM, {count} heads": Case(count, changes, "MaskedLM") for count in (12, 8, 6)}
    return models | {f"{head}, 12 heads": Case(12, changes, head) for head in ("Model", *heads)}


def attention(num_heads: int, **options: Any) -> Case:
    return Case(num_heads, {"attn_config": options})


MHA: Config = {"attn_type": "multihead_attention", "kv_n_heads": None}
MPT = {
    "StoryWriter, 32 heads": attention(32, **MHA, alibi_bias_max=16, clip_qkv=6),
    "12 heads, alibi_bias_max 16": attention(12, **MHA, alibi_bias_max=16),
    "12 heads, clip_qkv, qk_ln": attention(12, **MHA, clip_qkv=1.0, qk_ln=True),
}
GROUPED_MPT = {
    **{f"replit v1.5, {count} heads": Case(count) for count in (24, 16, 12)},
    "multi-query": attention(12, attn_type="multiquery_attention", kv_n_heads=None),
    "qk_ln": attention(12, qk_ln=True),
    "clip_qkv": attention(12, clip_qkv=1.0),
    "softmax_scale": attention(12, softmax_scale=0.2),
    "logit_scale": Case(12, {"logit_scale": "inv_sqrt_d_model"}),
    "biases, qk_ln": Case(12, {"no_bias": False, "attn_config": {"qk_ln": True}}),
    "RMSNorm": Case(12, {"norm_type": "rmsnorm"}),
    "RMSNorm, biases": Case(12, {"norm_type": "low_precision_rmsnorm", "no_bias": False}),
    "GLU": Case(12, {"ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 100}}),
    "GLU, SiLU": Case(12, {"ffn_config": {"ffn_type": "mptglu", "ffn_act_fn": {"name": "silu"}}}),
    "untied": Case(12, {"tie_word_embeddings": False}),
}
MOSAIC_GPT = {
    **sizes(16, 12),
    "32 heads, no attn_qk_ln": Case(32, {"attn_qk_ln": False}),
    "12 heads, alibi_bias_max 16": Case(12, {"alibi_bias_max": 16}),
    "attn_clip_qkv": Case(16, {"attn_clip_qkv": 1.0}),
    "softmax_scale, logit_scale": Case(16, {"softmax_scale": 0.2, "logit_scale": 0.5}),
    "biases, mlp_ratio 2": Case(16, {"no_bias": False, "mlp_ratio": 2}),
}
BAICHUAN: Config = {
    "family": "baichuan",
    "config": "original.configuration_baichuan.BaichuanConfig",
    "model": "original.modeling_baichuan.BaichuanForCausalLM",
}
TIED = r"^cls\.predictions\.decoder\.weight$"

ORIGINALS = {
    "baichuan": Original(
        **BAICHUAN,
        repository="Mrgengli/baichuan_python",
        commit="bac52bfd3a167331cd0eb283d0a3274de89b3f82",
        cases=sizes(40, 12, 8, norm_head=False),
        note="Baichuan-13B-Chat's code, from a copy of its Hub repository.",
    ),
    "baichuan2": Original(
        **BAICHUAN,
        repository="jrd77/Baichuan2-13B-Chat",
        commit="d022d7264467b2c3bc483e7a3a17105dedba50b8",
        cases=sizes(40, 12, 8),
        note="Baichuan2-13B-Chat's code, from a copy of its Hub repository.",
    ),
    "refact": Original(
        family="refact",
        repository="sycomix/refact",
        commit="35834bab4849ece2007af1d6ddbbb143213c1fec",
        folder="hf",
        packages=("hf",),
        config="hf.configuration_gpt_refact.GPTRefactConfig",
        model="hf.modeling_gpt_refact.GPTRefactForCausalLM",
        cases=sizes(40, 32, 8, packed_projections=False),
        rows_alone=True,
        note="The first revision, from a copy of its authors' repository. It takes no padding mask, so "
        "padded rows are compared with the same rows run alone. Only ports were found of the present "
        "revision, which packs two pairs of projections.",
    ),
    "replit-mpt": Original(
        family="replit",
        repository="replit/ReplitLM",
        commit="f95ecb74ae02536d7f638c86502f9d17d632f64f",
        folder="replit-code-v1-3b",
        config="original.configuration_mpt.MPTConfig",
        model="original.modeling_mpt.MPTForCausalLM",
        cases={"replit v1, 32 heads": attention(32, **MHA), **MPT},
        adapt=older_mpt,
        note="The MPT code of replit-code-v1-3b, in its form for the Hub.",
    ),
    "llm-foundry": Original(
        family="replit",
        repository="mosaicml/llm-foundry",
        commit="a667ebf58ea8eacaed6924363dc88053bc201507",
        folder="llmfoundry",
        packages=(
            *("llmfoundry", "llmfoundry.utils", "llmfoundry.models", "llmfoundry.models.layers"),
            *("llmfoundry.models.mpt", "llmfoundry.models.utils"),
        ),
        stubs=("composer", "omegaconf"),
        config="llmfoundry.models.mpt.configuration_mpt.MPTConfig",
        model="llmfoundry.models.mpt.modeling_mpt.MPTForCausalLM",
        cases=MPT | GROUPED_MPT,
        adapt=older_mpt,
        note="MPT from v0.5.0 of the library that trained it; `replit-mpt` is its form for the Hub.",
    ),
    "mosaic-gpt": Original(
        family="mosaic_gpt",
        repository="mosaicml/examples",
        commit="52cd4fef69497f225a034fcd10692f8613732d10",
        folder="examples",
        packages=(
            *("examples", "examples.llm", "examples.llm.src", "examples.llm.src.models"),
            *("examples.llm.src.models.layers", "examples.llm.src.models.mosaic_gpt"),
        ),
        stubs=("composer", "omegaconf"),
        config="examples.llm.src.models.mosaic_gpt.configuration_mosaic_gpt.MosaicGPTConfig",
        model="examples.llm.src.models.mosaic_gpt.mosaic_gpt.MosaicGPT",
        cases=MOSAIC_GPT,
        # Outside autocast, Composer's norm equals the ordinary one.
        adapt=lambda config, state: config.update(low_precision_layernorm=False),
        bool_mask=True,
        note="v0.0.4, which mpt-1b-redpajama-200b names; `replit-lm` is its form for the Hub.",
    ),
    "replit-lm": Original(
        family="mosaic_gpt",
        repository="replit/ReplitLM",
        commit="1a421995c10c880379f52e26b5ba495c87bac3e2",
        folder="replit-code-v1-3b",
        config="original.configuration_replit_lm.ReplitLMConfig",
        model="original.replit_lm.ReplitLM",
        cases=MOSAIC_GPT,
        bool_mask=True,
        note="replit-code-v1-3b as first published: a fork of MosaicGPT.",
    ),
    "jina": Original(
        family="jina_bert",
        repository="roycms/jina-embeddings-v2-base-en",
        commit="44a6b72942202ea92138683ea4bb1081477a101d",
        config="original.configuration_jbert.JBertConfig",
        model="original.modeling_jbert.JBert{head}",
        cases=encoders({}, "SequenceClassification"),
        adapt=first_jina,
        without=TIED,
        note="The first code of jina-embeddings-v2-base-en, from a copy of its Hub repository. It keeps "
        "query, key and value in one tensor, so the checkpoint's three tensors are joined for it.",
    ),
    "jina-present": Original(
        family="jina_bert",
        repository="veya2ztn/sci-bert-finetune",
        commit="e39c6b94c6c3d90f7c3ce29c3411b3b015822e58",
        folder="models/jinabert",
        config="original.configuration_bert.JinaBertConfig",
        model="original.modeling_bert.JinaBert{head}",
        cases={
            **encoders({}, "SequenceClassification", "TokenClassification", "QuestionAnswering"),
            "reglu": Case(12, {"feed_forward_type": "reglu"}, "MaskedLM"),
        },
        # With emb_pooler it would load a tokenizer, which only its encode() needs.
        adapt=lambda config, state: config.update(emb_pooler=None),
        without=rf"{TIED}|^cls\.predictions\.decoder\.bias$",
        stubs=("flash_attn",),
        note="The code of jinaai/jina-bert-implementation, from a copy with additions that are off by "
        "default.",
    ),
    "mosaic-bert": Original(
        family="mosaic_bert",
        repository="mosaicml/examples",
        commit="daddaeff7a535273ff984b0134da4839c70a45b3",
        folder="examples/benchmarks/bert/src",
        config="original.configuration_bert.BertConfig",
        model="original.bert_layers.Bert{head}",
        cases=encoders({}, "SequenceClassification"),
        without=TIED,
        note="Its authors' code; DNABERT-2's code began as a copy of it.",
    ),
}


def setup(packages: Iterable[str], names: Iterable[str]) -> str:
    """Shell commands that create the environment and fetch the originals' code."""
    folder = ".venv-originals"
    lines = [f"python3.11 -m venv {folder}", f"{folder}/bin/pip install {' '.join(packages)}"]
    for name in names:
        original, into = ORIGINALS[name], f"{folder}/code/{name}"
        lines += [
            f"git init -q {into}",
            f"git -C {into} fetch --depth 1 https://github.com/{original.repository} {original.commit}",
            f"GIT_LFS_SKIP_SMUDGE=1 git -C {into} checkout -q FETCH_HEAD",
        ]
    return "\n".join(lines)
