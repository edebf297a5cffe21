"""What a converted network must compute, stated in NumPy float64 and in nothing else.

The torch templates are tested against this package. Its modules therefore import neither the converter
nor the templates, and write the slopes, their scaling and each architecture down once more, in
the most literal form: one row of the batch at a time, the whole [query, key] matrix of every
head, the bias ``-m * (p_i - p_j)`` spelled out, no cache, no fused kernel.

Each family's module has ``logits(config, tensors, input_ids, attention_mask)`` and ``trunk(...)``
with the same arguments, for the final hidden states and the attention probabilities. ``config``
is a repository's config.json as a dict, converted (``alibi_scaling``) or not.

    layers.py    LayerNorm, linear maps, GELUs, a checkpoint's tensors by name, the batch loop
    alibi.py     slopes, scaling, the factor of each query, causal attention with the bias
    bert.py      what the encoders share
    NAME.py      one a family, found by its name
    rotary.py    rotary models
"""

import importlib
from types import ModuleType

from tests import tiny

_MODULES: dict[str, ModuleType] = {
    name: importlib.import_module(f"tests.reference.{family.name}") for name, family in tiny.FAMILY.items()
}
FAMILIES = {name: module for name, module in _MODULES.items() if name in tiny.FACTORIES}
ENCODERS = {name: module for name, module in _MODULES.items() if name in tiny.ENCODERS}
"""Names of tiny checkpoints -> the module of their family."""
