"""What a converted repository holds beside its weights and card: config, templates, small files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from converter import __version__
from converter.errors import OutputError, SourceError
from converter.families import Config, Family, check_kernels
from converter.scaling import Scaling
from converter.source import CARD, CONFIG, Source
from converter.subfolders import nested_files
from converter.tokenizers import TEMPLATE, TOKENIZER_CONFIG, Tokenizer, read_tokenizer
from converter.weights.files import copy_file

PROVENANCE = "ntk_convert"
"""Key of a converted config that says where it comes from."""
KEPT_ENDS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
KEPT_NAMES = ("license", "licence", "copying", "notice", "use_policy", "acceptable_use")
LEFT_ENDS = (".index.json", ".safetensors", ".bin", ".py")
# An adapter's config would make transformers look for the adapter, and the last two belong to graphs of
# the unscaled model; the others describe a training.
LEFT_NAMES = (
    CONFIG,
    CARD,
    "adapter_config.json",
    "trainer_state.json",
    "all_results.json",
    "train_results.json",
    "genai_config.json",
    "onnx_validation.json",
    "ntk_convert.json",
)


def small_files(names: Iterable[str]) -> list[str]:
    """Of a source's files, those that are copied as they are: tokenizer, generation config, licence."""
    return sorted(
        name
        for name in names
        if not name.startswith(".")
        and name not in LEFT_NAMES
        and not name.endswith(LEFT_ENDS)
        and (name.endswith(KEPT_ENDS) or name.lower().startswith(KEPT_NAMES))
    )


def copied_files(source: Source) -> dict[str, int | None]:
    """What is copied beside the weights, and sizes in bytes: ``small_files``, and what stands in folders."""
    return {name: source.files[name] for name in small_files(source.files)} | nested_files(source).files


def converted_config(
    config: Config, family: Family, scaling: Scaling, train_length: int | None, source: Source
) -> dict[str, Any]:
    """The source's config as a converted repository has it, unknown keys kept.

    Args:
        config: the source's parsed ``config.json``; not changed.
        family: its family.
        scaling: what to bake in.
        train_length: trained length in tokens, None if it is not known.
        source: recorded with its commit.
    """
    result = family.normalise(config)
    tokenizer = read_tokenizer(source, config)
    if tokenizer.here and (tokenizer.ours or "tokenizer_class" not in result):
        result["tokenizer_class"] = tokenizer.ours or family.tokenizer_class
    result |= {
        "architectures": family.architectures(config),
        "model_type": family.model_type,
        "auto_map": family.auto_map,
        "alibi_scaling": scaling.to_json(),
        PROVENANCE: provenance(source, train_length),
    }
    trained = train_length or config.get(family.length_hint or "")
    if family.raise_length is not None and scaling.factor is not None and isinstance(trained, int):
        result = json.loads(json.dumps(result))
        family.raise_length(result, round(min(trained * scaling.factor, 1 << 31)))
    return result


def set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Says in a config what its weights are, ``bfloat16`` for one, under the key that it has for it."""
    keys = [key for key in ("torch_dtype", "dtype") if key in config]
    config |= dict.fromkeys(keys or ["torch_dtype"], dtype)


def provenance(source: Source, train_length: int | None) -> dict[str, Any]:
    """Where a result comes from."""
    return {
        "source": source.name,
        "commit": source.commit,
        "version": __version__,
        "train_length": train_length,
    }


def write_repository(
    folder: Path, config: Config, templates: Iterable[str], source: Source, tokenizer: Tokenizer
) -> None:
    """Writes config, templates, tokenizer and small files into ``folder``."""
    written = {CONFIG: config}
    if tokenizer.settings is not None:
        written[TOKENIZER_CONFIG] = tokenizer.settings
    for name, value in written.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    for name in (*templates, *tokenizer.templates):
        copy_file(templates_folder() / name, folder / name)
    for name in copied_files(source).keys() - written.keys():
        (folder / name).parent.mkdir(exist_ok=True)
        copy_file(source.folder / name, folder / name)


def check_code(folder: Path, config: Config, templates: Sequence[str]) -> list[str]:
    """Looks whether a converted repository has the code that this version writes; none of it is run.

    Whoever checks a repository runs the templates themselves, which says something of those it holds only
    if they are the same.

    Args:
        folder: the repository.
        config: its config.json.
        templates: the code that it must hold.

    Returns:
        The names of its code, the tokenizer's too if it has that.

    Raises:
        SourceError: other code, or a config that names some.
        UnsupportedModel: a config that names code from the Hub in the place of the attention.
    """
    check_kernels(config)
    names = [*templates, *([TEMPLATE] if templates and (folder / TEMPLATE).is_file() else [])]
    mapped = config.get("auto_map") or {}
    for reference in mapped.values() if isinstance(mapped, Mapping) else [mapped]:
        if not isinstance(reference, str) or f"{reference.partition('.')[0]}.py" not in names:
            raise SourceError(f"{CONFIG}: auto_map names code that is not this repository's; convert again")
    for name in names:
        path, ours = folder / name, (templates_folder() / name).read_bytes()
        if not path.is_file():
            raise SourceError(f"{folder} lacks {name}; convert the source again")
        if path.stat().st_size != len(ours) or path.read_bytes() != ours:
            raise SourceError(
                f"{name} is not the file that this version of ntk-convert writes, and is not run; convert "
                "the source again"
            )
    return names


def templates_folder() -> Path:
    """Where the modeling templates are: inside an installed package, beside it in a checkout.

    Raises:
        OutputError: neither; the installation is incomplete.
    """
    package = Path(__file__).parent
    for folder in (package / "templates", package.parent / "templates"):
        if (folder / "ntk_alibi.py").is_file():
            return folder
    raise OutputError(
        f"the templates are missing from the installation in {package}; install ntk-convert again"
    )
