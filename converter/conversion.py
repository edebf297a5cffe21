"""The conversion, step by step: open, decide, write, verify, describe."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from converter.config import Config, Dtype
from converter.errors import UsageError, option
from converter.model.open import ModelOptions, open_with_request
from converter.paths import out_path
from converter.plan import Plan, Written, decide, rounded_note, write
from converter.progress import stage
from converter.result import manifest
from converter.result.card.facts import Facts, read_origin
from converter.result.card.older import OlderCard, read_older_card
from converter.result.card.sections import PICTURE, describe
from converter.result.card.update import with_kept_text, with_original
from converter.result.staging import check_output, check_space, restore, staged
from converter.rotary.settings import Change
from converter.scaling.scaling import Scaling
from converter.source.fetch import fetch
from converter.source.hub import is_repo_id
from converter.source.source import CARD
from converter.weights.files import Link

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from converter.verification import Check


@dataclass(frozen=True)
class ConversionResult:
    """What was converted or, with ``dry_run``, would be."""

    path: Path
    """The converted repository, absolute."""
    source: str
    commit: str | None
    family: str
    """Name of an ALiBi family, or "rotary"."""
    model_type: str
    rotary: Change | None
    """How rotary positions changed; None for ALiBi."""
    scaling: Scaling
    train_length: int | None
    """In tokens; None if it is not known and was not needed."""
    train_length_origin: str
    input_limit: int | None
    """Of an encoder: the tokens after which programs cut a text; None if that is as in the source."""
    overrides: Mapping[str, Any]
    files: Mapping[str, int | None]
    """File -> bytes. In a dry run, None where the size is not known, and for weights the source's size."""
    weights: Mapping[str, int]
    """How weight files were written (copied, shared, hard-linked, linked, not shared, not linked, converted)
    -> number of files; empty for a dry run."""
    config_changes: Mapping[str, tuple[Any, Any]]
    """Key of config.json -> (value in the source or None, value in the result or None)."""
    notes: Sequence[str]
    """What users of the result should know, each one sentence without its full stop."""
    checks: Sequence[Check]
    """The checks that the result passed; empty without verification."""
    seconds: float
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name not in ("scaling", "overrides")}
        changed = self.config_changes.items()
        return {
            **plain,
            "path": str(self.path),
            "method": self.scaling.method,
            "alibi_scaling": None if self.rotary else self.scaling.to_json(),
            "rotary": asdict(self.rotary) if self.rotary else None,
            "set": dict(self.overrides),
            "config_changes": {key: {"before": before, "after": after} for key, (before, after) in changed},
            "checks": list(map(asdict, self.checks)),
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Conversion:
    """A conversion that can be carried out, as far as can be known before anything is written."""

    plan: Plan
    older_card: OlderCard
    place: Path
    """Where the result will be, absolute."""
    overwrite: bool
    verify: bool
    started: float

    def preview(self) -> ConversionResult:
        files = self.plan.sizes(picture=self.verify and self.plan.scaling.scaled)
        return self._result(files, [*self.plan.notes, *self.older_card.notes])

    def carry_out(self, *, reserve: int = 0, progress: bool = False) -> ConversionResult:
        """Writes, verifies and describes the result, and puts it in place; see ``convert``.

        ``reserve`` are bytes that must be left on its disk, for what is written afterwards.
        """
        plan, place = self.plan, self.place
        source = plan.model.source
        if not place.parent.is_dir():  # else nothing outside of it is touched
            place.parent.mkdir(parents=True, exist_ok=True)
        plan.check_download(place)
        with stage(f"fetching {source.name}"):
            fetch(source, plan.wanted)
        plan.files.check_vocabularies()

        def check_disk(needed: int) -> None:
            needed += plan.other_bytes() + reserve
            check_space(place.parent, needed, "the result needs", f"change {option.out}")

        with staged(place, overwrite=self.overwrite) as folder:
            written = write(plan, folder, space=check_disk, progress=progress)
            checks: Sequence[Check] = ()
            if self.verify:
                from converter.verification import verify

                checks = verify(written.model, plan.model.source_config, source.folder, progress=progress)
            notes = _notes(plan, written)
            _write_card(plan, written, self.older_card, notes, checks, f"./{place.name}")
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            weights = written.model.checkpoint.files
            manifest.write(folder, names, {name: written.digests.get(name) for name in weights})
            files = {name: (folder / name).stat().st_size for name in sorted({*names, manifest.MANIFEST})}
        # The card has no notes on itself: they are for who converts, and may add to it.
        return self._result(files, [*notes, *self.older_card.notes], written, checks)

    def _result(
        self,
        files: Mapping[str, int | None],
        notes: Sequence[str],
        written: Written | None = None,
        checks: Sequence[Check] = (),
    ) -> ConversionResult:
        """The result; without ``written``, that of a dry run."""
        plan, model = self.plan, self.plan.model
        config = plan.files.config if written is None else written.model.result_config
        return ConversionResult(
            path=self.place,
            source=model.name,
            commit=model.source.commit,
            family=model.kind,
            model_type=model.model_type,
            rotary=model.change(plan.scaling),
            scaling=plan.scaling,
            train_length=model.trained.tokens,
            train_length_origin=model.trained.origin,
            input_limit=None if model.decoder else plan.files.input_limit,
            overrides=model.overrides,
            files=files,
            weights={} if written is None else written.weights,
            config_changes=_changes(model.config_json, config),
            notes=notes,
            checks=checks,
            seconds=time.monotonic() - self.started,
            dry_run=written is None,
        )


class ConvertOptions(ModelOptions, total=False):
    """What ``convert`` does, beside the scaling (``ScalingOptions``) and the source (``SourceOptions``)."""

    base_model: str | None
    """Hub id that the model card names as the source's, for a local copy of it."""
    max_length: int | None
    """The input limit of an encoder in tokens: programs cut texts after as many. By default what a static
    scaling reaches, or 8 times the trained length, and never less than the source's."""
    dtype: Dtype | None
    """Round floating point weights to this type; those that have it keep their bytes."""
    link: Link | None
    """``reflink``: share the weights' disk blocks with the source if the file system can, else copy them.
    ``hard``: fall back to hard links; editing one file then edits both. ``symbolic``: symbolic links to the
    source, for a result that is not kept."""
    overwrite: bool
    """Replace ``out`` once the new folder is complete; False by default."""
    dry_run: bool
    """Write nothing, and return what would be written; False by default."""
    verify: bool
    """Run the result and check it before it is renamed; True by default."""
    progress: bool
    """Draw progress bars on stderr; False by default."""


OWN_OPTIONS = ConvertOptions.__annotations__.keys() - ModelOptions.__annotations__.keys()
"""The options that opening a model does not take."""


def prepare(model: str | Path, out: str | Path, **options: Unpack[ConvertOptions]) -> Conversion:
    """Opens a checkpoint and decides what ``convert`` would write; downloads only small files."""
    started = time.monotonic()
    base_model, verify = options.get("base_model"), options.get("verify", True)
    overwrite = options.get("overwrite", False)
    if base_model is not None and not is_repo_id(base_model):
        raise UsageError(
            f"{option.base_model} {base_model[:100]!r} is not a Hub id; give one such as USER/NAME"
        )
    others = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    opened, request = open_with_request(
        model, progress=options.get("progress", False), **cast("ModelOptions", others)
    )
    if not options.get("dry_run"):
        # A run with overwrite that was killed may have left the old folder aside.
        restore(out_path(out))
    place = check_output(Path(out), opened.source.folder, overwrite=overwrite)
    plan = decide(
        opened,
        request,
        dtype=options.get("dtype"),
        link=options.get("link"),
        base_model=base_model,
        max_length=options.get("max_length"),
        verify=verify,
    )
    cache_dir = options.get("cache_dir")
    card = read_older_card(opened, plan.files.config, Path(cache_dir) if cache_dir else None)
    return Conversion(plan, card, place, overwrite, verify, started)


def convert(model: str | Path, out: str | Path, **options: Unpack[ConvertOptions]) -> ConversionResult:
    """Writes a copy of a checkpoint with scaled ALiBi slopes or rotary positions.

    Plain transformers loads the copy. It is built in a folder beside ``out``, verified and then renamed:
    whatever happens, ``out`` is either complete or unchanged, and the source is only read. ``export`` and
    ``push`` go on from there.

    Args:
        model: a local folder if one of that name exists, else a Hub id.
        out: folder to write; it must be empty or not exist.
        options: base_model, max_length, dtype, link, overwrite, dry_run, verify and progress, see
            ``converter.ConvertOptions``; the scaling: scale, target_length, method, dynamic, rate, ramp and
            slopes, see ``converter.ScalingOptions``; and the source: train_length, overrides, subfolder,
            revision, token and cache_dir, see ``converter.SourceOptions``. A converted repository keeps its
            scaling if none is given.

    Raises:
        UsageError: options that contradict each other.
        SourceError: the checkpoint is missing, unreadable or damaged.
        UnsupportedModel: its positions cannot be scaled this way; the message says why.
        OutputError: ``out`` is not empty, cannot be written or does not fit on its disk.
        VerificationError: the result failed a check and was removed.
    """
    conversion = prepare(model, out, **options)
    if options.get("dry_run"):
        return conversion.preview()
    return conversion.carry_out(progress=options.get("progress", False))


def _notes(plan: Plan, written: Written) -> list[str]:
    """What users of the result should know, now that its weights are known."""
    rounded = plan.weights.recorded_dtype
    kept = written.weights_are == "original" and plan.weights.options.dtype is None
    if kept and rounded is not None:  # an earlier conversion rounded them
        return [*plan.notes, rounded_note(rounded)]
    return plan.notes


def _write_card(
    plan: Plan,
    written: Written,
    older: OlderCard,
    notes: Sequence[str],
    checks: Sequence[Check],
    place: str,
) -> None:
    """Writes the model card, which names ``place``, and the picture of a verified scaling."""
    model, repository = plan.model, written.model
    picture = bool(checks) and plan.scaling.scaled
    if picture:
        from converter.pictures import per_head
        from converter.pictures.positions import describe as positions

        heads = positions(model, repository.result_config, [plan.scaling])
        (repository.folder / PICTURE).write_bytes(per_head.card_picture(heads))
    origin = read_origin(model, plan.base_model, older)
    facts = Facts(
        result=repository,
        origin=origin,
        tokenizer=model.tokenizer,
        sentence_encoder=model.nested.sentence_encoder,
        weights=written.weights_are,
        rounded=plan.weights.recorded_dtype is not None,
        notes=notes,
        place=place,
        command=plan.command(place, written.weights_are, verify=bool(checks)),
        checks=checks,
        picture=picture,
    )
    text = describe(facts)
    if model.converted:
        text = with_kept_text(text, older.text)
    else:
        text = with_original(text, older.text, origin.name)
    (repository.folder / CARD).write_text(text, encoding="utf-8", errors="surrogateescape")


def _changes(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Key -> its values in both configs, None where it is missing, for the keys that differ."""
    changes = {key: (before.get(key), after.get(key)) for key in {**before, **after}}
    return {key: (old, new) for key, (old, new) in changes.items() if old != new}
