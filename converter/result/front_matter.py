"""The YAML at the start of a model card: reading it safely, and what of it holds for a converted model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
RESULTS = re.compile(r"^model-index:.*?(?=^[^\s#-]|\Z)", re.DOTALL | re.MULTILINE)
"""A model's evaluation results. They may be long, and do not hold for the converted model."""
KEY = re.compile(r"[a-zA-Z][\w.-]{0,99}", re.ASCII)
"""Keys that are kept."""
LARGEST_MATTER, LARGEST_VALUE, LONGEST_NUMBER, DEEPEST = 64 << 10, 500, 50, 8
"""Longer front matter (characters) is ignored: at this length, parsing can take about a second. Longer texts
and lists under ``TEXT_KEYS`` are dropped, and so are longer numbers and values nested more deeply."""
TEXT_KEYS = (
    *("license", "license_name", "license_link", "language", "pipeline_tag", "library_name"),
    *("base_model", "tags", "datasets", "metrics", "thumbnail"),
)
"""Keys whose values are a text or a list of texts."""
FALSE_KEYS = ("model_type", "new_version", "base_model_relation")
"""Keys of the source that, like its results, do not hold for the converted model."""
FALSE_TAGS = {
    # Files of other libraries, which are not copied.
    *(
        "tf",
        "tensorflow",
        "jax",
        "flax",
        "keras",
        "tflite",
        "coreml",
        "onnx",
        "openvino",
        "gguf",
        "ggml",
        "mlx",
    ),
    *("rust", "transformers.js"),
    # Servers that know the source's model type, logs of its training, and its results.
    *("text-generation-inference", "text-embeddings-inference", "endpoints_compatible"),
    *("tensorboard", "mteb", "model-index"),
    # Rotary models need no code; the tags of ALiBi models have it.
    "custom_code",
}
"""Tags of the source that do not hold for the converted model."""
PREFIX = "tag:yaml.org,2002:"
STRING, BOOLEAN, LIST, OBJECT = (PREFIX + kind for kind in ("str", "bool", "seq", "map"))
SCALARS = tuple(PREFIX + kind for kind in ("bool", "int", "float", "null", "timestamp"))

Value = Any
"""Text, number, boolean, None, or a list or dict of them."""


class _Unfit(Exception):
    """A value that is not kept."""


def front_matter(card: str, *, results: bool = False) -> dict[str, Value]:
    """The keys of a card's front matter whose values are harmless; empty if the YAML is not valid.

    The YAML is parsed, but only plain values are made of it. Anchors, merged mappings and tags of Python can
    take unlimited time or memory, so a key that has one is left out.

    Args:
        card: the card, Markdown.
        results: keep the model's evaluation results.
    """
    import yaml

    found = FRONT_MATTER.match(card)
    matter = "" if found is None else found.group(1)
    matter = matter if results else RESULTS.sub("", matter)
    if not matter or len(matter) > LARGEST_MATTER:
        return {}
    try:
        root = yaml.compose(matter, Loader=yaml.SafeLoader)
    except Exception:  # on hostile input, PyYAML also raises exceptions that are not its own
        return {}
    shared = _shared(root)
    values = {}
    for key, node in root.value if isinstance(root, yaml.MappingNode) else []:
        try:
            name = _text(key)
            if KEY.fullmatch(name):
                values[name] = _texts(node) if name in TEXT_KEYS else _plain(node, shared)
        except _Unfit:
            continue
    return values


def inherited(card: str, own_tags: Sequence[str], *, results: bool = False) -> dict[str, Value]:
    """The front matter of a converted model, as far as it follows from an older card.

    Args:
        card: the source's card; empty if it has none.
        own_tags: the converted model's own tags, which follow the source's.
        results: the card's evaluation results are those of the converted model.
    """
    known = front_matter(card, results=results)
    for key in FALSE_KEYS if results else (*FALSE_KEYS, "model-index"):
        known.pop(key, None)
    tags = known.get("tags", [])
    kept = [tag for tag in ([tags] if isinstance(tags, str) else tags) if tag.lower() not in FALSE_TAGS]
    return {**known, "tags": list(dict.fromkeys([*kept, *own_tags]))}


def split(card: str) -> tuple[str, str]:
    """The front matter of a card, with the lines that enclose it, and the text after it."""
    found = FRONT_MATTER.match(card)
    end = 0 if found is None else found.end()
    return card[:end], card[end:]


def as_yaml(values: Mapping[str, Value]) -> str:
    """A card's front matter, with the lines that enclose it."""
    import yaml

    return f"---\n{yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)}---\n"


def _shared(root: yaml.Node | None) -> set[int]:
    """The ids of the nodes that YAML aliases use again."""
    import yaml

    seen, shared, waiting = set[int](), set[int](), [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            shared.add(id(node))
        elif isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
        seen.add(id(node))
    return shared


def _plain(node: yaml.Node, shared: set[int], depth: int = 0) -> Value:
    import yaml

    if id(node) in shared or depth > DEEPEST:
        raise _Unfit
    if isinstance(node, yaml.ScalarNode):
        return _text(node) if node.tag == STRING else _scalar(node)
    if isinstance(node, yaml.SequenceNode) and node.tag == LIST:
        return [_plain(entry, shared, depth + 1) for entry in node.value]
    if isinstance(node, yaml.MappingNode) and node.tag == OBJECT:
        return {_text(key): _plain(value, shared, depth + 1) for key, value in node.value}
    raise _Unfit


def _scalar(node: yaml.ScalarNode) -> Value:
    """A number, boolean or None; a date as text."""
    import yaml

    if node.tag not in SCALARS or len(node.value) > LONGEST_NUMBER:
        raise _Unfit
    try:
        value = yaml.constructor.SafeConstructor().construct_object(node)
    except Exception as error:  # a value that does not fit its tag, such as 2020-13-45
        raise _Unfit from error
    if isinstance(value, float) and not math.isfinite(value):
        raise _Unfit
    return value if value is None or isinstance(value, (bool, int, float)) else node.value


def _text(node: yaml.Node) -> str:
    import yaml

    if isinstance(node, yaml.ScalarNode) and node.tag == STRING:
        return str(node.value)
    raise _Unfit


def _texts(node: yaml.Node) -> str | list[str]:
    """A text or a list of texts. YAML reads "no", the code of Norwegian, as a boolean."""
    import yaml

    def text(node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag not in (STRING, BOOLEAN):
            raise _Unfit
        if not 0 < len(node.value) <= LARGEST_VALUE:
            raise _Unfit
        return str(node.value)

    if not isinstance(node, yaml.SequenceNode):
        return text(node)
    if node.tag != LIST or not 0 < len(node.value) <= LARGEST_VALUE:
        raise _Unfit
    return [text(entry) for entry in node.value]
