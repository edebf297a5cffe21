"""AlBERTurin."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.pooler.seqwise import get_seq_pooling_method
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsCrossEncoding

from converter.vllm_plugin.attention import Setup
from converter.vllm_plugin.checks import check_whole_texts
from converter.vllm_plugin.encoder import SHIFT, EncoderModel, compiled
from converter.vllm_plugin.heads import Embedding, TokenClassifier, classes
from converter.vllm_plugin.layer import MLP
from converter.vllm_plugin.model import FAMILY
from converter.vllm_plugin.symmetric import EncoderAttention
from converter.vllm_plugin.templates.modeling_ntk_alberturin import norm


class Attention(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        width, heads, quant = setup.config.hidden_size, setup.config.num_attention_heads, setup.quant_config
        self.qkv_proj = QKVParallelLinear(
            width, width // heads, heads, bias=False, quant_config=quant, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = RowParallelLinear(
            width, width, bias=False, quant_config=quant, prefix=f"{prefix}.o_proj"
        )
        self.attention = EncoderAttention(setup, layer, self.qkv_proj.num_heads, prefix)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        fused, _ = self.qkv_proj(hidden_states)
        output, _ = self.o_proj(self.attention(*fused.chunk(3, dim=-1)))
        return output


class AlberturinLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        width = int(setup.config.hidden_size * setup.config.ffn_factor)
        names = ("up_proj", "down_proj", width, F.silu)
        self.attn_norm, self.mlp_norm = norm(setup.config), norm(setup.config)
        self.attn = Attention(setup, layer, f"{prefix}.attn")
        self.mlp = MLP(setup, f"{prefix}.mlp", *names, bias=False, gate="gate_proj")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.attn(self.attn_norm(hidden_states))
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


class Blocks(nn.Module):
    """The layers and the norm after them, under the original's name."""

    def __init__(self, setup: Setup, prefix: str):
        super().__init__()
        count = setup.config.num_hidden_layers
        self.layers = nn.ModuleList([AlberturinLayer(setup, n, f"{prefix}.layers.{n}") for n in range(count)])
        self.norm = norm(setup.config)


@compiled
class AlberturinModel(nn.Module):
    family = "alberturin"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        check_whole_texts(vllm_config)
        config = vllm_config.model_config.hf_config
        setup = Setup.of(vllm_config, FAMILY[self.family], config.hidden_size // config.num_attention_heads)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.blocks = Blocks(setup, f"{prefix}.blocks")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden_states = inputs_embeds
        if hidden_states is None:
            assert input_ids is not None
            hidden_states = self.embed_input_ids(input_ids & ~(1 << SHIFT))  # it has no token types
        for layer in self.blocks.layers:
            hidden_states = layer(hidden_states)
        return self.blocks.norm(hidden_states)


class Alberturin(EncoderModel):
    backbone_class = AlberturinModel


class NtkAlberturinModel(Alberturin, Embedding):
    pass


class NtkAlberturinForMaskedLM(NtkAlberturinModel):
    """It serves embeddings: vLLM has no fill-mask."""


class NtkAlberturinForSequenceClassification(Alberturin, SupportsCrossEncoding):
    """Classes of texts, from their first token itself: there is no pooler."""

    is_pooling_model = True

    def add_head(self, vllm_config: VllmConfig, prefix: str) -> None:  # noqa: ARG002
        sizes, dtype = (self.config.hidden_size, self.config.num_labels), vllm_config.model_config.head_dtype
        self.classifier = nn.Linear(*sizes, dtype=dtype)
        self.pooler = classes(vllm_config, get_seq_pooling_method("CLS"), self.classifier)


class NtkAlberturinForTokenClassification(Alberturin, TokenClassifier):
    pass
