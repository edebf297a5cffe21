"""The files of a model's folder that transformers, sentence-transformers and fastembed look for.

``python -m tests.keys`` prints names that the installed libraries look for and that are not here.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

GENERATE = "custom_generate"
"""The folder of code that replaces ``generate``."""
SENTENCE_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
"""Files with the settings of a sentence encoder's Transformer; the first that there is counts."""
SENTENCES_CONFIG = "config_sentence_transformers.json"
"""The file with what sentence-transformers does around the modules, such as prompts."""
READ = (
    *("config.json", "generation_config.json"),
    # Weights. transformers prefers the single file, and applies an adapter to either.
    *("model.safetensors", "model.safetensors.index.json"),
    *("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"),
    # Tokenizers and processors. Without tokenizer.json, any file that ends in .model can be the vocabulary.
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.model", "*.tiktoken"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("processor_config.json", "preprocessor_config.json"),
    *("video_preprocessor_config.json", "audio_tokenizer_config.json"),
    # Graphs, which programs choose by name
    *("*.onnx", "onnx/*.onnx"),
    # sentence-transformers. modules.json names further folders, and any file in these may be read.
    *("modules.json", SENTENCES_CONFIG, *SENTENCE_CONFIGS, "router_config.json"),
)
"""Names and patterns, as ``fnmatch`` reads them. Files of ``GENERATE`` are code and so not among them."""


def is_read(name: str) -> bool:
    """Whether a library looks for a file of this name, relative to the model's folder."""
    if "/" in name:
        return any(fnmatchcase(name, pattern) for pattern in READ if "/" in pattern)
    return any(fnmatchcase(name, pattern) for pattern in READ if "/" not in pattern)
