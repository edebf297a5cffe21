"""Adopting a fine-tuned model: what transformers saved from a converted repository becomes one again.

``save_pretrained`` and the Trainer write weights, config.json and the code. A converted repository also has a
card, and a manifest, which says that its files were verified. ``adopt`` runs the checks and adds both.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter import recipes
from converter.config import PROVENANCE, Provenance, read_provenance
from converter.errors import OutputError, SourceError
from converter.families.refusals import QUANTISED
from converter.families.templates import templates_folder
from converter.interrupts import Interrupted, held
from converter.model import Model, open_model
from converter.progress import byte_bar
from converter.publish.contents import verify
from converter.recipes import AlibiRecipe
from converter.recipes.overrides import words
from converter.result import manifest
from converter.result.card import PICTURE, Origin, adopted, describe
from converter.result.converted import ConvertedRepository, copied_files, differs, read_converted
from converter.result.manifest import MANIFEST, Entry
from converter.result.repository import small_files
from converter.result.staging import workspace
from converter.rotary import settings
from converter.scaling.request import command_line, request_for
from converter.scaling.scaling import Scaling
from converter.source.checkpoint import (
    BIN,
    BIN_INDEX,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    Checkpoint,
    read_checkpoint,
)
from converter.source.hub import is_repo_id
from converter.source.open import open_folder
from converter.source.remote_code import check_references
from converter.source.source import CARD, CONFIG, check_digest, plain_text
from converter.source.tokenizer import TOKENIZER_CONFIG, Tokenizer, our_class, read_tokenizer
from converter.weights.files import copy_file, sha256

if TYPE_CHECKING:
    from converter.verification import Check

DIVERGED = "if the training diverged, adopt an earlier save of it"


@dataclass(frozen=True)
class AdoptionResult:
    """What was adopted."""

    path: Path
    """The repository, absolute."""
    source: str | None
    """Hub id or name of what the converted model was made from."""
    model_type: str
    scaling: Scaling
    """As the model had it when it was fine-tuned; it is not changed."""
    written: Sequence[str]
    """Files that were added or replaced."""
    files: Mapping[str, int]
    """File in the manifest -> bytes. ``push`` sends these files and the card."""
    notes: Sequence[str]
    """What users of the model should know, each one sentence without its full stop."""
    checks: Sequence[Check]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return {
            **asdict(self),
            "path": str(self.path),
            "scaling": self.scaling.to_json(),
            "checks": [check.to_json() for check in self.checks],
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Saved:
    """What transformers saved, as a converted repository."""

    repository: ConvertedRepository
    model: Model
    provenance: Provenance
    tokenizer: Tokenizer
    missing: Sequence[str]
    """Names of code files that the folder lacks."""
    rewritten: Mapping[str, bytes]
    """New content of files that name our code in another repository."""
    listed: Mapping[str, Entry]
    """The files in the manifest, if there is one."""
    files: Mapping[str, int]
    """The files that belong to the repository -> bytes."""

    @property
    def folder_name(self) -> str:
        """The folder's own name, which its path may lack."""
        return self.repository.folder.resolve().name

    @property
    def notes(self) -> list[str]:
        """What users of the model should know."""
        return [*filter(None, [self.tokenizer.note]), *self.model.nested.notes]

    @property
    def origin(self) -> Origin:
        """What the converted model was made from, and the card that is there."""
        name, folder = self.provenance.source, self.repository.folder
        base_model = name if name and "/" in name and is_repo_id(name) else None
        name = "/".join(filter(None, (name or self.folder_name, self.provenance.subfolder)))
        path, card = folder / CARD, ""
        if path.is_file():
            card = path.read_bytes().decode(errors="surrogateescape")
        return Origin(name, base_model, self.provenance.commit, card)

    @property
    def command(self) -> str:
        """Commands that lead to the same kind of model, for the card."""
        origin = self.origin
        subfolder = plain_text(self.provenance.subfolder) if self.provenance.subfolder else None
        source = origin.base_model or f"./{self.provenance.source or self.folder_name}"
        revision = origin.commit if origin.base_model else None
        request = request_for(self.repository.scaling, self.repository.train_length)
        more = words(self.provenance.overrides)
        first = command_line(
            source, request, "./converted", revision=revision, subfolder=subfolder, more=more
        )
        place = f"./{self.folder_name}"
        return f"{first}\n# fine-tuned from ./converted, and saved in {place}\nntk-convert adopt {place}"


def adopt(folder: str | Path, *, progress: bool = False) -> AdoptionResult:
    """Makes a converted repository of what transformers saved from one, in its folder.

    The model is verified as a conversion is. Then the manifest, the card, code that is missing and the record
    in config.json are written. The weights, the tokenizer and all other files stay as they are. If anything
    fails, nothing is written.

    Args:
        folder: a folder that ``save_pretrained`` or a Trainer wrote.
        progress: draw progress bars on stderr.

    Raises:
        SourceError: the model was not made from a converted one, is damaged, holds other code, or was not
            changed after the conversion.
        VerificationError, ValidationError: a check failed.
        MissingPackage: a package that the checks of an export need is not installed.
        OutputError: the folder cannot be written to.
        Interrupted: the user stopped it; says whether the model is adopted.
    """
    started = time.monotonic()
    place = Path(folder)
    saved = _open(place)
    if not os.access(place, os.W_OK | os.X_OK):
        raise OutputError(f"no permission to write in {place}; adopt a copy of it")
    entries = _entries(saved, progress=progress)
    checks = verify(saved.repository, saved.files, progress=progress)
    with workspace(place / "adopt") as work:
        _write(saved, checks, work)
        written = sorted(path.name for path in work.iterdir())
        entries |= {name: Entry.of(work / name) for name in written if name != CARD}
        (work / MANIFEST).write_text(manifest.as_json(entries), encoding="utf-8")
        with held() as waiting:
            for name in (*written, MANIFEST):
                (work / name).replace(place / name)
        if waiting:
            raise Interrupted(f"{place} is adopted")
    return AdoptionResult(
        path=place.resolve(),
        source=saved.provenance.source,
        model_type=saved.repository.recipe.model_type,
        scaling=saved.repository.scaling,
        written=[*written, MANIFEST],
        files={name: entry.size for name, entry in sorted(entries.items())},
        notes=saved.notes,
        checks=checks,
        seconds=time.monotonic() - started,
    )


def _open(place: Path) -> Saved:
    """Reads what was saved. Runs no code, and reads only the headers of the weights."""
    config, recipe = read_converted(place)
    provenance = read_provenance(config)
    if provenance is None:
        raise SourceError(
            f"{place}/{CONFIG} has no {PROVENANCE}, so this model was not converted before; convert it"
        )
    kind = config.get("model_type")
    if isinstance(recipe, AlibiRecipe) and kind != recipe.model_type:
        raise SourceError(
            f"{place}/{CONFIG} has model_type {kind!r}, not {recipe.model_type!r}: the model was trained "
            "with the stock class, without its scaling, and cannot be adopted"
        )
    for key, others in QUANTISED.items():
        if config.get(key) not in others:
            raise SourceError(f"{place} is quantised ({key} is set); save the model with unquantised weights")
    model = open_model(place)
    tokenizer = _tokenizer(model)
    code = [*recipe.templates, *tokenizer.templates]
    rewritten = _check_code(place, code)
    checkpoint = _checkpoint(place)
    if isinstance(recipe, AlibiRecipe):
        fitted = {**config, "auto_map": recipe.family.auto_map}
    else:
        fitted = settings.respelled(config)
    fitted |= {PROVENANCE: replace(provenance, fine_tuned=True).to_json()}
    fitted |= recipe.stored(place, checkpoint, fitted)
    listed = manifest.read(place) if (place / MANIFEST).is_file() else {}
    small = small_files(model.source.files)
    index = [checkpoint.index] if checkpoint.index else []
    # Exports are among the listed files; weights of an older save that are listed no longer belong to it.
    older = [name for name in listed if not name.endswith((".safetensors", ".safetensors.index.json"))]
    names = {CONFIG, *code, *checkpoint.files, *index, *small, *model.nested.files, PICTURE, *older}
    present = sorted(name for name in names if (place / name).is_file())
    model.source.fetch(present)
    return Saved(
        repository=ConvertedRepository(place, fitted, recipes.of_checkpoint(fitted), checkpoint),
        model=model,
        provenance=provenance,
        tokenizer=tokenizer,
        missing=[name for name in code if name not in present],
        rewritten=rewritten,
        listed=listed,
        files={name: (place / name).stat().st_size for name in present},
    )


def _tokenizer(model: Model) -> Tokenizer:
    """What the card says of the folder's tokenizer."""
    source = model.source
    ours = our_class(source.object(TOKENIZER_CONFIG))
    if ours is not None:
        return Tokenizer(ours=ours)
    found = read_tokenizer(source, model.config, code=False)
    note = "the folder has no tokenizer: save it there (tokenizer.save_pretrained), and run adopt again"
    return found if found.here or found.elsewhere else replace(found, note=note)


def _check_code(place: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Refuses other code than this version's, so far as the folder holds or names some.

    Returns the new content of files that name our code in another repository.
    """
    source = open_folder(place)
    rewritten = check_references(source, names, copied_files(source), saved=True)
    for name in names:
        if (place / name).is_file() and differs(place, name):
            raise SourceError(
                f"{name} is not what this version of ntk-convert writes: somebody edited it, or another "
                "version wrote it; if nobody edited it, remove it, and adopt writes this version's"
            )
    return rewritten


def _checkpoint(place: Path) -> Checkpoint:
    """The headers of the weights; refuses two of them, since an older save may have left one."""
    found = [name for name in (SAFETENSORS, SAFETENSORS_INDEX, BIN, BIN_INDEX) if (place / name).is_file()]
    if len(found) > 1:
        raise SourceError(
            f"{place} has {' and '.join(found)}; remove the weights that are not the fine-tuned ones"
        )
    if found and found[0] in (BIN, BIN_INDEX):
        raise SourceError(
            f"the weights of {place} are not safetensors files; save the model with safe_serialization=True"
        )
    return read_checkpoint(place)


def _entries(saved: Saved, *, progress: bool) -> dict[str, Entry]:
    """The manifest's entries of the files; refuses weights that are not finite, or the conversion's own."""
    repository = saved.repository
    entries = {}
    with byte_bar("hashing", sum(saved.files.values()), show=progress) as advance:
        for name, size in saved.files.items():
            digest = sha256(repository.folder / name, advance, look=repository.scan(name, DIVERGED))
            check_digest(repository.folder / name, saved.model.source.digest(name), digest)
            entries[name] = Entry(size, digest)
    files = repository.checkpoint.files
    if not saved.provenance.fine_tuned and all(_as_written(saved, name, entries[name]) for name in files):
        raise SourceError(
            f"the weights in {repository.folder} are those of the conversion, so there is nothing to adopt; "
            "if you changed another file, put it back, or convert again"
        )
    return entries


def _as_written(saved: Saved, name: str, found: Entry) -> bool:
    """Whether the conversion wrote this file; linked weights are known by the link."""
    entry, path = saved.listed.get(name), saved.repository.folder / name
    if entry is None:
        return False
    if entry.sha256 is None:
        return path.is_symlink() or path.stat().st_nlink > 1
    return entry == found


def _write(saved: Saved, checks: Sequence[Check], work: Path) -> None:
    """Writes the new files into ``work``: missing code, config.json, the picture and the card."""
    from converter.pictures.per_head import card_picture
    from converter.pictures.positions import describe as positions

    repository, model = saved.repository, saved.model
    for name in saved.missing:
        copy_file(templates_folder() / name, work / name)
    for name, content in saved.rewritten.items():
        (work / name).write_bytes(content)
    (work / CONFIG).write_text(json.dumps(repository.config, indent=2) + "\n", encoding="utf-8")
    scaling = repository.scaling
    scaled = scaling.scaled
    if scaled:
        drawn = card_picture(positions(model, repository.config, [scaling]))
        (work / PICTURE).write_bytes(drawn)
    fresh = describe(
        repository,
        origin=saved.origin,
        words=repository.recipe.words(scaling, model.trained, repository.config),
        tokenizer=saved.tokenizer,
        sentence_encoder=model.nested.sentence_encoder,
        weights="fine-tuned",
        notes=saved.notes,
        place=f"./{saved.folder_name}",
        command=saved.command,
        checks=checks,
        picture=scaled,
    )
    card = adopted(saved.origin.card, fresh)
    (work / CARD).write_text(card, encoding="utf-8", errors="surrogateescape")
