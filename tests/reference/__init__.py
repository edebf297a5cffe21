"""What a converted network must compute, stated in NumPy float64 and in nothing else.

The torch templates are tested against this package. It therefore imports neither the converter
nor the templates, and writes the slopes, their scaling and each architecture down once more, in
the most literal form: one row of the batch at a time, the whole [query, key] matrix of every
head, the bias ``-m * (p_i - p_j)`` spelled out, no cache, no fused kernel.

Each family's module has ``logits(config, tensors, input_ids, attention_mask)`` and ``trunk(...)``
with the same arguments, for the final hidden states and the attention probabilities. ``config``
is a repository's config.json as a dict, converted (``alibi_scaling``) or not.

    layers.py    LayerNorm, linear maps, GELUs, a checkpoint's tensors by name, the batch loop
    alibi.py     slopes, scaling, the factor of each query, causal attention with the bias
    bloom.py     mpt.py     falcon.py
    bert.py      jina_bert.py     mosaic_bert.py
"""

from tests.reference import baichuan, bloom, falcon, jais, jina_bert, mosaic_bert, mosaic_gpt, mpt, refact

FAMILIES = {
    "bloom": bloom,
    "mpt": mpt,
    "replit": mpt,
    "mosaic_gpt": mosaic_gpt,
    "falcon": falcon,
    "jais": jais,
    "baichuan": baichuan,
    "refact": refact,
}

ENCODERS = {"jina_bert": jina_bert, "mosaic_bert": mosaic_bert}

__all__ = [
    "ENCODERS",
    "FAMILIES",
    "baichuan",
    "bloom",
    "falcon",
    "jais",
    "jina_bert",
    "mosaic_bert",
    "mosaic_gpt",
    "mpt",
    "refact",
]
