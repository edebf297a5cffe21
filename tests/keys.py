"""``python -m tests.keys``: keys and files that the installed libraries read, and that no row names.

They are found by their usual spellings, so this is a hint and no proof. What it prints gets a row in
``converter/source/keys.py`` if it makes the result something else than its source, else a place in ``KNOWN``.
"""

from __future__ import annotations

import ast
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from converter.families import FAMILIES
from converter.families.checks import QUANTISED_KEYS
from converter.families.family import Family
from converter.families.templates import templates_folder
from converter.source import keys
from converter.source.library_files import is_read

MODULES = {
    "transformers": (
        *("configuration_utils", "modeling_utils", "cache_utils", "masking_utils", "fusion_mapping"),
        *("tokenization_utils_base", "models/auto/tokenization_auto", "models/auto/auto_factory"),
        *("tokenization_python", "tokenization_utils_tokenizers", "tokenization_utils_sentencepiece"),
        *("generation/utils", "generation/configuration_utils", "processing_utils", "dynamic_module_utils"),
        *("integrations/peft", "integrations/mistral/constants", "utils/__init__", "utils/hub"),
    ),
    "sentence_transformers": (
        *("base/model", "sentence_transformer/model", "multi_vector_encoder/model", "util/file_io"),
        # All classes that modules.json can name
        *("base/modules/*", "*/modules/*", "*/modules/tokenizer/*"),
    ),
}
"""Package -> the modules that read a model's files; patterns, as ``Path.glob`` reads them."""
SPELLINGS = (
    r"(?:getattr|hasattr)\((?:self\.|model\.|text_)*config, \"(\w+)\"",
    r"config(?:_dict)?\.(?:get|pop)\(\s*\"(\w+)\"",
    r"config(?:_dict)?\[\"(\w+)\"\]",
    r"\"(\w+)\" in \w*config(?:_dict)?\b",
    r"init_kwargs\.(?:get|pop)\(\s*\"(\w+)\"",
    # Names of files, also in regular expressions, where the dot has a backslash
    r"[\"'|]([\w-]+\\?\.(?:json|jinja|model|txt|metadata|safetensors|bin|tiktoken))(?=[\"'|])",
)
KNOWN = """
bos_token_id eos_token_id pad_token_id tie_word_embeddings use_cache id2label label2id num_labels problem_type
_attn_implementation _commit_hash _from_model_config _name_or_path architectures device_map dtype files_loaded
gradient_checkpointing model_type name_or_path output_hidden_states sep_token_id transformers_version
initializer_factor init_std added_tokens.json generation_config.json modules.json special_tokens_map.json
tokenizer.json vocab.json tokenizer_class add_bos_token add_eos_token added_tokens_decoder auto_map
additional_special_tokens chat_control_tokens chat_template extra_special_tokens processor_class type prompts
response_template slow_tokenizer_class trust_remote_code similarity_fn_name path name unpad_inputs __version__
first_k_dense_replace mlp_layer_types mtp_layer_types mtp_mlp_layer_types mtp_per_layer_config num_mtp_layers
vision_config projection_dim hidden_dim embedding_dim base_model_name_or_path message text backend disk kwargs
my_configuration.json get_text_config model_name requirements sentence_transformers special_tokens_map_file
tokenizer_config_file added_tokens_file
activation_function normalizers modelcard.json requirements.txt pytorch_model.bin
attend_to_expansion_tokens attend_to_mask_tokens do_query_expansion skiplist_words artifact.metadata
parameters route_mappings structure types cnn_config.json idf.json lstm_config.json
phrasetokenizer_config.json whitespacetokenizer_config.json wordembedding_config.json
"""
"""What source and result have alike, what is of other kinds of models, and what is no key at all.

The last lines are of modules of sentence-transformers: they are copied whole, or refused as a first module.
"""


def config_keys(family: Family) -> set[str]:
    """The keys that a family's converted config class has defaults for.

    The file is parsed and not imported, since that would import transformers.
    """
    path = templates_folder() / f"configuration_ntk_{family.name}.py"
    classes = (node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef))
    assignments = (node for node in next(classes).body if isinstance(node, ast.Assign))
    values = {ast.unparse(node.targets[0]): node.value for node in assignments}
    return {"alibi_scaling", *ast.literal_eval(values["defaults"])}


def found() -> dict[str, list[str]]:
    """Key or file -> the modules that read it."""
    names: dict[str, list[str]] = {}
    for package, modules in MODULES.items():
        spec = find_spec(package)
        folders = (spec.submodule_search_locations if spec else None) or []
        paths = {path for folder in folders for each in modules for path in Path(folder).glob(f"{each}.py")}
        for path in sorted(paths):
            text = path.read_text(encoding="utf-8")
            read = {name.replace("\\", "") for spelling in SPELLINGS for name in re.findall(spelling, text)}
            for name in sorted(read):
                names.setdefault(name, []).append(f"{package}/{path.stem}")
    return names


def unknown() -> dict[str, list[str]]:
    rows = {
        *keys.KEYS,
        *(key for rows in keys.KEYS.values() for key in rows),
        keys.ADAPTER,
        *QUANTISED_KEYS,
    }
    known = rows.union(KNOWN.split(), *map(config_keys, FAMILIES))
    return {name: places for name, places in found().items() if name not in known and not is_read(name)}


if __name__ == "__main__":
    for key, places in sorted(unknown().items()):
        print(f"{key}: {', '.join(places)}")
    sys.exit(bool(unknown()))
