"""The model card (README.md) of a converted repository."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from converter._version import __version__
from converter.families.base import TASKS
from converter.recipes import AlibiRecipe
from converter.recipes.words import Words
from converter.result import examples, serving
from converter.result.converted import ConvertedRepository
from converter.result.front_matter import as_yaml, front_matter, inherited, split
from converter.scaling.scaling import Scaling, Static, Unscaled
from converter.source.base import CARD, Source
from converter.source.hub import is_repo_id
from converter.source.tokenizer import Tokenizer

if TYPE_CHECKING:
    from converter.verification import Check

LARGEST_CARD = 4 << 20
"""A larger card (bytes) is not read."""
SENTENCES, SIMILARITY = "sentence-transformers", "sentence-similarity"
"""Names of the library and of its task on the Hub."""

BODY = """\
# {name}, {title}

This is [{source}]({link}) with its {scaled}.
{weights}.

| | |
|---|---|
| method | `{method}` |
| scale | {strength} |
| trained length | {train_length} |
| source | {source} |
| commit | {commit} |
{picture}
## Load

{load}

{notes}

{more}## How it was made

```
{command}
```

with ntk-convert {version}. Checked before it was written:

{checks}
"""
USE = "## Use\n\n{code}\n\n"
LORA = """\
## Fine-tune

For LoRA, name the linear layers, because peft does not know this model type: `target_modules={names}`.
Save the fine-tuned model with `save_pretrained`, and run `ntk-convert adopt` on its folder: it checks the
model and makes it ready for `ntk-convert push`.

"""
PICTURE = "scaling.png"
"""The picture that the card shows if it was drawn."""
SHOWN = "\n![{title}: stock beside scaled, head by head](" + PICTURE + ")\n"

SECTIONS = ("Load", "Use", "Serve", "Fine-tune", "How it was made")
"""Titles of the sections of ``BODY``."""
ADOPTED = "Longer contexts"
"""Title of the section about the conversion in a card that somebody else wrote."""
OURS = re.compile(r"^with ntk-convert \S", re.MULTILINE)
"""Matches a line of every card that a conversion writes."""

Weights = Literal["same", "rounded", "fine-tuned"]
"""What became of the source's weights."""


@dataclass(frozen=True)
class Origin:
    """What a converted model was made from."""

    name: str
    base_model: str | None
    """Its Hub id; None if it is not known."""
    commit: str | None
    card: str = ""
    """Its model card, Markdown; empty if it has none."""


def read_origin(source: Source, base_model: str | None) -> Origin:
    """The origin of a conversion.

    Args:
        source: the checkpoint; from the Hub, its card is downloaded.
        base_model: the Hub id that the user gave.
    """
    path, card = source.folder / CARD, ""
    if path.is_file() and path.stat().st_size <= LARGEST_CARD:
        source.fetch([CARD])
        card = path.read_text(encoding="utf-8", errors="replace")
    return Origin(source.name, base_model or source.repo_id, source.commit, card)


def describe(
    repository: ConvertedRepository,
    *,
    origin: Origin,
    words: Words,
    tokenizer: Tokenizer,
    sentence_encoder: bool | None,
    weights: Weights,
    notes: Sequence[str],
    place: str,
    command: str,
    checks: Sequence[Check],
    picture: bool,
) -> str:
    """The card of a converted repository, Markdown with front matter.

    Args:
        repository: the repository.
        origin: what it was made from; the parts of its front matter that still hold are carried over.
        words: the card's wording for this kind of model.
        tokenizer: what became of the source's tokenizer.
        sentence_encoder: see ``Nested.sentence_encoder``.
        weights: what became of the source's weights.
        notes: what else users of the model have to know.
        place: where the examples load the model from: a folder, or a Hub id.
        command: the command line that gives the same result, without secrets.
        checks: what verification found; empty if it was not run.
        picture: show ``PICTURE``.
    """
    scaling = repository.scaling
    scaled, alibi = not isinstance(scaling, Unscaled), isinstance(repository.recipe, AlibiRecipe)
    embeds = sentence_encoder
    if embeds is None:  # then sentence-transformers takes the mean of an encoder's hidden states
        embeds = alibi and not repository.decoder and repository.head == "Model"
    use = examples.use(words, tokenizer, place, sentence_encoder=embeds)
    more = USE.format(code=use) if use else ""
    if alibi:
        more += serving.section(repository, place, embeds=bool(embeds))
        more += LORA.format(names=json.dumps(repository.linear_layers))
    body = BODY.format(
        name=_plain(origin.name),
        title=f"{scaling.method} {words.kind} scaling" if scaled else f"unscaled {words.kind}",
        source=_plain(origin.name),
        link=f"https://huggingface.co/{origin.base_model}" if origin.base_model else "#how-it-was-made",
        scaled=words.scaled,
        weights=_weights(weights, origin, words),
        method=scaling.method,
        strength=_strength(scaling),
        train_length=f"{repository.train_length} tokens" if repository.train_length else "not known",
        commit=f"`{origin.commit}`" if origin.commit else "(local folder)",
        picture=SHOWN.format(title=words.kind) if picture else "",
        load=examples.load(words, tokenizer, place),
        notes="\n\n".join([words.notes, *(f"{note[:1].upper()}{note[1:]}." for note in notes)]),
        more=more,
        command=command,
        version=__version__,
        checks="\n".join(f"- {check.name}: {'skipped, ' * check.skipped}{check.detail}" for check in checks)
        or "- nothing: `--no-verify` was given",
    )
    found = _metadata(origin, words, sentence_encoder, embeds=embeds, fine_tuned=weights == "fine-tuned")
    return f"{as_yaml(found)}\n{body}"


def adopted(card: str, fresh: str) -> str:
    """The card of a fine-tuned model.

    A card that a conversion wrote is replaced, but keeps the sections that somebody added. Any other card
    keeps its text and gets the new one as a section.

    Args:
        card: the folder's card; empty if it has none.
        fresh: what ``describe`` says; its front matter follows from that of ``card``.
    """
    header, body = split(card)
    new_header, new_body = split(fresh)
    if not body.strip():
        return fresh
    if OURS.search(body) and f"\n## {ADOPTED}\n" not in body:
        for title, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", body, re.DOTALL | re.MULTILINE):
            fresh = fresh if title in SECTIONS else with_section(fresh, title, f"{text.strip()}\n")
        return fresh
    _, _, text = new_body.strip().partition("\n")  # without the title
    section = re.sub("^##", "###", text.strip(), flags=re.MULTILINE)
    # Front matter that cannot be read stays as it is.
    kept = header if header and not front_matter(card, results=True) else new_header
    return kept + with_section(body, ADOPTED, f"{section}\n")


def with_section(card: str, title: str, text: str) -> str:
    """A card with one more section at its end, which replaces an older one of the same title.

    Args:
        card: the card, Markdown.
        title: of the section, without ``##``.
        text: the section's text, Markdown; it ends with a newline.
    """
    older = re.compile(rf"\n## {re.escape(title)}\n.*?(?=\n## |\Z)", re.DOTALL)
    rest = older.sub("", card).rstrip("\n")
    return f"{rest}\n\n## {title}\n\n{text}"


def with_place(card: str, place: str, revision: str | None = None) -> str:
    """A card whose examples load the model from another place than the one that it was written for.

    Args:
        card: the card, Markdown; any other than a converted repository's is not changed.
        place: folder or Hub id.
        revision: branch of the Hub id, if it is not the default one.
    """
    found = examples.LOADED.search(card) if OURS.search(card) else None
    if found is None:
        return card
    arguments = examples.literal(place) + (f", revision={examples.literal(revision)}" if revision else "")
    older = rf"\({re.escape(found['place'])}(?=[,)])"
    card = re.sub(older, lambda _: f"({arguments}", card)
    served = serving.command(ast.literal_eval(found["place"]))
    return card.replace(f"\n{served} ", f"\n{serving.command(place, revision)} ")


def shown_folder(given: Path, place: Path) -> str:
    """A folder as the card shows it, with ``./`` before it.

    For privacy, a folder that is not given by its path below the current one is cut to its own name.

    Args:
        given: the folder as the user gave it.
        place: its absolute path.
    """
    outside = given.is_absolute() or ".." in given.parts or str(given).startswith(("~", "."))
    return f"./{place.name if outside else given.as_posix()}"


def _metadata(
    origin: Origin, words: Words, sentence_encoder: bool | None, *, embeds: bool, fine_tuned: bool
) -> dict[str, Any]:
    # The card of a fine-tuned model is its own, and may name a closer parent than the conversion's source.
    known = inherited(origin.card, words.tags, results=fine_tuned)
    parents = [origin.base_model, _hub_ids(known.get("base_model"))]
    parent = next(filter(None, reversed(parents) if fine_tuned else parents), None)
    of_sentences = sentence_encoder or (embeds and known.get("library_name") == SENTENCES)
    tag = known.get("pipeline_tag")
    if tag is None or (fine_tuned and tag in (SIMILARITY, *TASKS.values())):  # it may have another head now
        tag = SIMILARITY if of_sentences else words.task
    found = {
        "pipeline_tag": tag,
        "base_model": parent,
        "base_model_relation": "finetune" if fine_tuned and parent else None,
        "library_name": SENTENCES if of_sentences else "transformers",
        "tags": known["tags"],
    }
    others = {key: value for key, value in known.items() if key not in found}
    return others | {key: value for key, value in found.items() if value is not None}


def _hub_ids(names: str | list[str] | None) -> str | list[str] | None:
    """Hub ids as a card gives them; None if there are none, or names of folders among them."""
    listed = [names] if isinstance(names, str) else names or []
    return names if listed and all(map(is_repo_id, listed)) else None


def _weights(weights: Weights, origin: Origin, words: Words) -> str:
    """What became of the source's weights, a sentence without its full stop."""
    if weights == "fine-tuned":
        return "It was fine-tuned after the conversion, so its weights are its own"
    commit = f" at commit `{origin.commit}`" if origin.commit else ""
    if weights == "rounded":
        return (
            f"Tokenizer and tensor names are those of the source{commit}; only {words.differs}, and the "
            "weights' dtype"
        )
    return f"Weights, tokenizer and tensor names are those of the source{commit}; only {words.differs}"


def _strength(scaling: Scaling) -> str:
    if isinstance(scaling, Unscaled):
        return "1"
    if isinstance(scaling, Static):
        return f"{scaling.factor:g} (static)"
    what = "the row's length" if scaling.dynamic == "length" else "the query's position + 1"
    return f"max(1, {scaling.rate:g} x {what} / {scaling.train_length}) ({scaling.dynamic}-dynamic)"


def _plain(text: str) -> str:
    return re.sub(r"[^\w./ -]", "_", text)
