"""transformers' common tests of one checkpoint's classes; common_tests.py runs this module with pytest.

``CHECKPOINT`` in the environment is a folder. If its config names code of its own, that code is tested, else
transformers' own classes. The folder's weights are not used: the common tests make random ones.
"""

from __future__ import annotations

import copy
import os
import unittest
from typing import Any

import torch
import transformers
from tests.generation.test_utils import GenerationTesterMixin
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto

from tests import test_modeling_common

HEADS = {
    "Model": "MODEL",
    "ForCausalLM": "MODEL_FOR_CAUSAL_LM",
    "ForMaskedLM": "MODEL_FOR_MASKED_LM",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING",
}
"""How a class ends -> transformers' table of such classes."""

CONFIG = transformers.AutoConfig.from_pretrained(os.environ["CHECKPOINT"], trust_remote_code=True)


def classes() -> list[type]:
    """The classes of the checkpoint's architecture, the trunk first. Its own code is registered."""
    own = getattr(CONFIG, "auto_map", {})
    if own:
        transformers.AutoConfig.register(CONFIG.model_type, type(CONFIG))
    found = []
    for suffix, table in HEADS.items():
        name = f"AutoModel{suffix.removeprefix('Model')}"
        known = getattr(transformers, name)._model_mapping
        if name in own:
            model_class = get_class_from_dynamic_module(own[name], os.environ["CHECKPOINT"])
            known.register(type(CONFIG), model_class)
            # From the names in this table, the tests know which labels a class takes.
            getattr(modeling_auto, f"{table}_MAPPING_NAMES")[CONFIG.model_type] = model_class.__name__
        if type(CONFIG) in known:
            found.append(known[type(CONFIG)])
    return found


class Sample:
    """What the common tests ask of a model: its config and sizes, and a batch as in the tests of BLOOM."""

    batch_size = 13
    seq_length = 7
    is_training = True

    def __init__(self) -> None:
        config = self.get_config()
        self.hidden_size = config.hidden_size
        self.num_hidden_layers = config.num_hidden_layers
        self.num_attention_heads = config.num_attention_heads
        self.vocab_size = config.vocab_size

    def get_config(self) -> Any:
        return copy.deepcopy(CONFIG)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = test_modeling_common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


MIXINS = (test_modeling_common.ModelTesterMixin, GenerationTesterMixin)
CLASSES = classes()


class CommonTest(*(MIXINS if any(c.can_generate() for c in CLASSES) else MIXINS[:1]), unittest.TestCase):
    all_model_classes = CLASSES

    def setUp(self) -> None:
        transformers.set_seed(0)  # of the weights
        test_modeling_common.global_rng.seed(0)  # of the token ids
        self.model_tester = Sample()
