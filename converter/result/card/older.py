"""The card of what is converted and, where it says nothing of them, its licence, languages and datasets.

A Trainer saves no card, or generates one. The licence is then that of the model that it was made of, whose
card may be on this machine. Nothing is downloaded to find it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from converter.errors import SourceError
from converter.model.model import Model
from converter.source.card import LARGEST_CARD, read_card, read_front_matter, split_front_matter
from converter.source.hub import is_hub_id
from converter.source.open import open_folder
from converter.source.source import CARD, CONFIG, Source, plain_text

INHERITED = ("license", "license_name", "license_link", "language", "datasets")
"""Keys of a card that hold for what is made of the model too."""
UNKNOWN = "licence, languages and datasets are unknown"
GENERATED = "generated_from_trainer"
"""Tag of the cards that Trainers generate."""
TRAINED = "training_args.bin"
"""A file that Trainers save beside the model."""
LONGEST_TEXT = 100_000
"""Characters; a longer text of a card is not kept."""


@dataclass(frozen=True)
class OlderCard:
    """The card of what is converted."""

    text: str = ""
    """Markdown; empty if there is no card, or one that is too large."""
    inherited: Mapping[str, Any] = field(default_factory=dict)
    """Front matter that it lacks: that of the model which this one was made of."""
    notes: Sequence[str] = ()
    """What the user should know of it, each one sentence without its full stop."""


@dataclass(frozen=True)
class _Place:
    """A folder or a Hub id of which a model may have been made."""

    name: str
    commit: str | None = None


def read_older_card(model: Model, config: Mapping[str, Any], cache_dir: Path | None = None) -> OlderCard:
    """Reads the card of a model that is converted, and what it lacks.

    ``config`` is the result's config.json, and ``cache_dir`` the Hub's cache, None for the usual one. From
    the Hub, the model's own card is downloaded. Raises ``SourceError`` if that cannot be read.
    """
    source = model.source
    # A converted repository's card goes into the new one, so bytes that are not UTF-8 must survive.
    text = read_card(source, "surrogateescape" if model.converted else "replace")
    own = read_front_matter(text)
    notes = []
    if not model.converted and len(kept_body(text)) > LONGEST_TEXT:
        notes.append(
            f"the text of the model card was not copied, since it has more than {LONGEST_TEXT} characters; "
            f"it is in {CARD} of {source.name}"
        )
    if any(own.get(key) is not None for key in INHERITED):
        return OlderCard(text, notes=notes)

    places = list(_places(model, config, own))
    for place in places:
        stated = _metadata_of(place, source, cache_dir)
        inherited = {key: value for key, value in stated.items() if key not in own}
        if inherited:
            notes.append(
                f"{', '.join(inherited)} in the model card are taken from that of {plain_text(place.name)}, "
                f"of which {source.name} was made: it has no card that says them"
            )
            return OlderCard(text, inherited, notes)
    return OlderCard(text, notes=[*notes, *_notes_on_unknown(model, own, made_of_another=bool(places))])


def _notes_on_unknown(model: Model, own: Mapping[str, Any], *, made_of_another: bool) -> list[str]:
    """At most one note: on a card that says no licence, where one is likely to have been lost.

    ``own`` is its front matter, and ``made_of_another`` whether files name what the model was made of.
    """
    source = model.source
    if CARD not in source.files:
        if not (made_of_another or model.converted or TRAINED in source.files):
            return []
        return [f"no model card: {UNKNOWN}; add a {CARD} to {source.name}, or them to that of the result"]
    if (source.files[CARD] or 0) > LARGEST_CARD:
        return [
            f"the model card is larger than {LARGEST_CARD >> 20} MiB and was not read: {UNKNOWN}; shorten "
            f"{CARD} in {source.name}, or add them to that of the result"
        ]
    tags = own.get("tags")
    if isinstance(tags, list) and GENERATED in tags:
        return [
            f"a Trainer generated the model card, which does not say them: {UNKNOWN}; add them to {CARD} in "
            f"{source.name}, or in the result"
        ]
    return []


def kept_body(card: str) -> str:
    """The text of a card without its front matter."""
    _, body = split_front_matter(card)
    return body.strip()


def _places(model: Model, config: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[_Place]:
    """What a model was made of, as its own card, its config.json or its record says: the nearest first.

    JinaBERT's ``_name_or_path`` may be that of its code, which the result's config leaves out.
    """
    named = own.get("base_model")
    if isinstance(named, list) and len(named) == 1:
        [named] = named
    # transformers before 5 records the place that a saved model was loaded from.
    for name in (named, config.get("_name_or_path")):
        if isinstance(name, str) and name:
            yield _Place(name)
    record = model.provenance
    if record is not None and record.source is not None:
        yield _Place(record.source, record.commit)


def _metadata_of(place: _Place, source: Source, cache_dir: Path | None) -> dict[str, Any]:
    """What is inherited of a model's card; empty if that is not on this machine, or says nothing."""
    try:
        found = _open(place, source, cache_dir)
        metadata = {} if found is None else read_front_matter(read_card(found))
    except (SourceError, OSError, ValueError):  # also of a text that cannot be a path
        return {}
    kept = {key: metadata[key] for key in INHERITED if metadata.get(key) is not None}
    parent = metadata.get("base_model")
    if found is not None and found.repo_id is not None:
        parent = found.repo_id
    return kept if not kept or parent is None else {**kept, "base_model": parent}


def _open(place: _Place, source: Source, cache_dir: Path | None) -> Source | None:
    """The files of a place that are on this machine; None if its card is not. It makes no request."""
    folder = Path(place.name)
    # A path in a repository of the Hub is one on another machine.
    if source.local and folder.is_dir():
        found = open_folder(folder)
        return found if CONFIG in found.files else None
    if not is_hub_id(place.name):
        return None
    from huggingface_hub import try_to_load_from_cache

    card = try_to_load_from_cache(place.name, CARD, cache_dir=cache_dir, revision=place.commit)
    if not isinstance(card, str):
        return None
    return replace(open_folder(Path(card).parent), repo_id=place.name)
