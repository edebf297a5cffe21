"""The model card (README.md) of a converted repository."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter import __version__
from converter.families import Config, Family
from converter.scaling import Scaling
from converter.source import CARD, Source
from converter.tokenizers import Tokenizer

if TYPE_CHECKING:
    import yaml

    from converter.verification import Check

CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
"""Keys of the source's front matter that hold for the converted model too; its results do not."""
TAGS = ("alibi", "ntk-alibi", "custom_code")
LARGEST_CARD, LARGEST_MATTER, LARGEST_VALUE = 4 << 20, 64 << 10, 500
"""Bytes of a card that is read at all; letters of its front matter, which take about a second where they
are worst; characters of a value, or entries of a list, that is kept."""
RESULTS = re.compile(r"^model-index:.*?(?=^[^\s#-]|\Z)", re.DOTALL | re.MULTILINE)
"""A model's results, which may be long and do not hold for the converted one."""
TEXTS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:bool")
"""Scalars that are kept: to YAML, the language code of Norwegian is a boolean."""
LIST = "tag:yaml.org,2002:seq"
FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)

BODY = """\
# {name}, {title}

This is [{source}]({link}) with its {scaled}.
{same} and tensor names are those of the source{commit}; only {differs}.

| | |
|---|---|
| method | `{method}` |
| scale | {strength} |
| trained length | {train_length} |
| source | {source} |
| commit | {commit_cell} |
{picture}
## Load

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained({path!r}{trust})
tokenizer = AutoTokenizer.from_pretrained({tokenizer})
```

{notes}

## How it was made

```
{command}
```

with ntk-convert {version}. Checked before it was written:

{checks}
"""

PICTURE = "scaling.png"
"""The file that the card shows, where it was drawn."""
SHOWN = "\n![{title}: stock beside scaled, head by head](" + PICTURE + ")\n"

TRUST = "`trust_remote_code=True` is needed, and without it loading is an error. "
STOCK_NOTES = """\
**Do not load this repository
with the stock class** (`{stock_class}.from_pretrained(...)`): transformers then only warns about the
model type and gives an **unscaled** model."""
OWN_NOTES = """\
The code is this repository's own;
nothing of the code that the source came with is needed, or used."""


@dataclass(frozen=True)
class Words:
    """What a card says of one way to scale."""

    kind: str
    """What is scaled, in the title: "ALiBi"."""
    scaled: str
    """Of the source, "with its ...": what was scaled, and how."""
    differs: str
    """From the source, "only ..."."""
    notes: str
    """On loading and use."""
    auto_class: str
    """transformers' class to load it with."""
    tags: tuple[str, ...]
    code: bool
    """Whether loading it needs code of the repository."""


def alibi_words(family: Family, scaling: Scaling, config: Config) -> Words:
    """The words for ALiBi slopes; ``config`` is the result's."""
    stock_class = config["architectures"][0].removeprefix("Ntk")
    how = f"scaled for longer contexts: {scaling}" if scaling.method != "none" else "not scaled at all"
    return Words(
        kind="ALiBi",
        scaled=f"ALiBi slopes {how}",
        differs="the attention's code and `config.json` differ",
        notes=TRUST + (STOCK_NOTES.format(stock_class=stock_class) if family.stock else OWN_NOTES),
        auto_class=auto_class(config),
        tags=TAGS,
        code=True,
    )


def auto_class(config: Config) -> str:
    """transformers' class for what the config's architecture is."""
    named = config.get("architectures") or [""]
    found = re.search(r"(For[A-Z]\w+|LMHeadModel)$", str(named[0]))
    end = "" if found is None else "ForCausalLM" if found[0] == "LMHeadModel" else found[0]
    return f"AutoModel{end}"


def write_card(
    folder: Path,
    *,
    source: Source,
    words: Words,
    tokenizer: Tokenizer,
    notes: Sequence[str],
    scaling: Scaling,
    train_length: int | None,
    command: str,
    checks: Sequence[Check],
    converted: bool = False,
) -> None:
    """Writes ``README.md`` into ``folder``, with the picture that is there, if any.

    Args:
        folder: the converted repository.
        source: whose front matter is carried over as far as it still holds.
        words: what to say of its kind.
        tokenizer: what became of the source's.
        notes: what else its users have to know.
        scaling: what was baked in.
        train_length: trained length in tokens, None if not known.
        command: the command line that gives the same result, without secrets.
        checks: what verification found; empty if it was not run.
        converted: the weights are not the source's bytes, but in another dtype.
    """
    import yaml

    matter = yaml.safe_dump(_metadata(source, words.tags), sort_keys=False, allow_unicode=True)
    scaled = scaling.method != "none"
    path, trust = "PATH/TO/THIS/REPOSITORY", ", trust_remote_code=True"
    if tokenizer.elsewhere:
        from_where = f"{tokenizer.elsewhere!r}{trust}"
    else:
        from_where = f"{path!r}{trust if words.code else ''}" if tokenizer.here else "..."
    body = BODY.format(
        name=_plain(source.name),
        title=f"{scaling.method} {words.kind} scaling" if scaled else f"unscaled {words.kind}",
        source=_plain(source.name),
        link=f"https://huggingface.co/{source.repo_id}" if source.repo_id else "#how-it-was-made",
        scaled=words.scaled,
        same="Tokenizer" if converted else "Weights, tokenizer",
        differs=words.differs + ", and the weights' dtype" * converted,
        commit=f" at commit `{source.commit}`" if source.commit else "",
        method=scaling.method,
        strength=_strength(scaling),
        train_length=f"{train_length} tokens" if train_length else "not known",
        commit_cell=f"`{source.commit}`" if source.commit else "(local folder)",
        picture=SHOWN.format(title=words.kind) if (folder / PICTURE).is_file() else "",
        path=path,
        auto_class=words.auto_class,
        trust=trust if words.code else "",
        tokenizer=from_where,
        notes="\n\n".join([words.notes, *(f"{note[:1].upper()}{note[1:]}." for note in notes)]),
        command=command,
        version=__version__,
        checks="\n".join(f"- {check.name}: {'skipped, ' * check.skipped}{check.detail}" for check in checks)
        or "- nothing: `--no-verify` was given",
    )
    (folder / CARD).write_text(f"---\n{matter}---\n\n{body}", encoding="utf-8")


def front_matter(text: str) -> dict[str, str | list[str]]:
    """The texts, and lists of texts, of the YAML at the start of a card; none of one that is not valid.

    It is parsed, but no object is made of it: numbers, merged mappings and the like are of no use here, and
    some of them take any time or memory to make.
    """
    import yaml

    found = FRONT_MATTER.match(text)
    matter = "" if found is None else RESULTS.sub("", found.group(1))
    if not matter or len(matter) > LARGEST_MATTER:
        return {}
    try:
        root = yaml.compose(matter, Loader=yaml.SafeLoader)
    except Exception:  # PyYAML raises more kinds than its own on hostile input
        return {}
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    values = {key.value: _texts(node) for key, node in entries if isinstance(key, yaml.ScalarNode)}
    return {key: value for key, value in values.items() if value is not None}


def _texts(node: yaml.Node) -> str | list[str] | None:
    import yaml

    if isinstance(node, yaml.ScalarNode) and node.tag in TEXTS:
        return str(node.value)
    if not isinstance(node, yaml.SequenceNode) or node.tag != LIST:
        return None
    texts = [entry.value for entry in node.value if isinstance(entry, yaml.ScalarNode) and entry.tag in TEXTS]
    return texts if len(texts) == len(node.value) else None


def _metadata(source: Source, tags: tuple[str, ...]) -> dict[str, Any]:
    path = source.folder / CARD
    known: dict[str, str | list[str]] = {}
    if path.is_file() and path.stat().st_size <= LARGEST_CARD:
        source.fetch([CARD])
        known = front_matter(path.read_text(encoding="utf-8", errors="replace"))
    result: dict[str, Any] = {key: known[key] for key in CARRIED if _simple(known.get(key))}
    base = source.repo_id or known.get("base_model")
    if _simple(base):
        result["base_model"] = base
    return result | {"library_name": "transformers", "tags": [*tags]}


def _simple(value: object) -> bool:
    if isinstance(value, list):
        texts = all(isinstance(entry, str) and _simple(entry) for entry in value)
        return texts and 0 < len(value) <= LARGEST_VALUE
    return isinstance(value, str) and 0 < len(value) <= LARGEST_VALUE


def _strength(scaling: Scaling) -> str:
    if scaling.method == "none":
        return "1"
    if scaling.factor is not None:
        return f"{scaling.factor:g} (static)"
    what = "the row's length" if scaling.dynamic == "length" else "the query's position + 1"
    return f"max(1, {scaling.rate:g} x {what} / {scaling.train_length}) ({scaling.dynamic}-dynamic)"


def _plain(text: str) -> str:
    return re.sub(r"[^\w./ -]", "_", text)
