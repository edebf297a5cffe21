"""The conversion, step by step: open, prepare, write, verify, describe, export, push."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.config import Config
from converter.errors import UsageError
from converter.exports.onnx.files import REPORT
from converter.exports.onnx.options import OnnxOptions
from converter.exports.onnx.requirements import check_installed
from converter.model import ModelOptions, open_with_request
from converter.paths import expand, out_path
from converter.plan import Plan, Written, prepare, write
from converter.publish.push import PushOptions, PushResult, preflight, push_result
from converter.result import manifest
from converter.result.card import PICTURE, describe, read_origin
from converter.result.staging import check_output, check_space, restore, staged
from converter.rotary.settings import Change
from converter.scaling.scaling import Scaling
from converter.source.checkpoint import Checkpoint
from converter.source.hub import is_repo_id
from converter.source.source import CARD
from converter.weights import journal
from converter.weights.files import Link
from converter.weights.transfer import Dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from converter.exports.onnx.export import ExportResult
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
    """The given values for keys of the source's config."""
    files: Mapping[str, int | None]
    """File -> bytes. In a dry run, None where the size is not known, and for weights the source's size."""
    weights: Mapping[str, int]
    """How weight files were written (copied, shared, hard-linked, not shared, converted, or kept from an
    interrupted run) -> number of files; empty for a dry run."""
    config_changes: Mapping[str, tuple[Any, Any]]
    """Key of config.json -> (value in the source or None, value in the result or None)."""
    notes: Sequence[str]
    """What users of the result should know about its tokenizer and about files that were not copied."""
    checks: Sequence[Check]
    """The checks that the result passed; empty without verification."""
    onnx: ExportResult | None
    """The ONNX graph; None if none was requested."""
    pushed: PushResult | None
    """What was pushed to the Hub; None if nothing was."""
    seconds: float
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
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
            "checks": [check.to_json() for check in self.checks],
            "onnx": self.onnx.to_json() if self.onnx else None,
            "pushed": self.pushed.to_json() if self.pushed else None,
            "seconds": round(self.seconds, 3),
        }


def convert(
    model: str | Path,
    out: str | Path,
    *,
    base_model: str | None = None,
    max_length: int | None = None,
    dtype: Dtype | None = None,
    link: Link | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = True,
    onnx: OnnxOptions | None = None,
    push_to_hub: str | None = None,
    private: bool = False,
    branch: str | None = None,
    create_pr: bool = False,
    progress: bool = False,
    **options: Unpack[ModelOptions],
) -> ConversionResult:
    """Writes a copy of a checkpoint with scaled ALiBi slopes or rotary positions.

    Plain transformers loads the copy. It is built in a folder beside ``out``, verified and then renamed:
    whatever happens, ``out`` is either complete or unchanged, and the source is only read.

    Args:
        model: a local folder if one of that name exists, else a Hub id.
        out: folder to write; it must be empty or not exist.
        base_model: Hub id that the model card names as the source's, for a local copy of it.
        max_length: the input limit of an encoder in tokens: programs cut texts after as many. By default what
            a static scaling reaches, or 8 times the trained length, and never less than the source's.
        dtype: round floating point weights to this type; those that have it keep their bytes.
        link: ``reflink``: share the weights' disk blocks with the source if the file system can, else
            copy them. ``hard``: fall back to hard links; editing one file then edits both. ``symbolic``:
            symbolic links to the source, for a result that is not kept.
        resume: keep the weight files that an interrupted run to the same ``out`` has finished.
        overwrite: replace ``out`` once the new folder is complete, and also what the repository holds
            that it is pushed to.
        dry_run: write nothing, and return what would be written.
        verify: run the result and check it before it is renamed.
        onnx: also write and validate an ONNX graph with these options.
        push_to_hub: push the result to this repository, ``user/name``. Whether this is possible is
            checked before anything is written.
        private, branch, create_pr: options of the push, see ``push``.
        progress: draw progress bars on stderr.
        options: the scaling and the source, see ``ScalingOptions`` and ``SourceOptions``.

    Raises:
        UsageError: options that contradict each other.
        SourceError: the checkpoint is missing, unreadable or damaged.
        UnsupportedModel: its positions cannot be scaled this way; the message says why.
        AlreadyConverted: it is a converted repository.
        OutputError: ``out`` is not empty, cannot be written or does not fit on its disk.
        VerificationError: the result failed a check and was removed.
        MissingPackage, ValidationError, ProviderError: the export failed, see ``export``; there is no
            result.
        PushError: the result cannot be pushed; if it was already written, it is kept.
    """
    started = time.monotonic()
    # All that can be wrong is found here, before anything is downloaded or written.
    if onnx is not None:
        check_installed(onnx)
    if base_model is not None and not is_repo_id(base_model):
        raise UsageError(f"`base_model` {base_model[:100]!r} is not a Hub id; give one such as USER/NAME")
    given = {"`private`": private, "`branch`": branch is not None, "`create_pr`": create_pr}
    for name in (name for name, asked in given.items() if asked and push_to_hub is None):
        raise UsageError(f"{name} needs `push_to_hub`; add it, or drop {name}")
    if push_to_hub is not None and not verify:
        raise UsageError("only a verified result can be pushed; drop `verify=False` or `push_to_hub`")
    opened, request = open_with_request(model, progress=progress, converted=False, **options)
    if not dry_run:
        restore(out_path(out))
    place = check_output(Path(out), opened.source.folder, overwrite=overwrite)
    plan = prepare(
        opened,
        request,
        dtype=dtype,
        link=link,
        onnx=onnx,
        base_model=base_model,
        max_length=max_length,
        verify=verify,
    )
    target = None
    if push_to_hub is not None:
        target = PushOptions(push_to_hub, private, branch, create_pr, overwrite, options.get("token"))
        preflight(target, opened.source.root)
    if dry_run:
        files = plan.files(picture=verify and plan.scaling.scaled)
        return _result(plan, place, files, started)
    if not place.parent.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
    plan.check_download(place, resume=resume)

    opened.source.fetch(plan.wanted)
    plan.check_vocabularies()
    with staged(place, overwrite=overwrite, resume=resume) as folder:
        reserved = plan.other_bytes() + plan.graph_bytes()

        def check_disk(needed: int) -> None:
            check_space(place.parent, needed + reserved, "the result needs", "change `out`")

        written = write(plan, folder, space=check_disk, progress=progress)
        checks: Sequence[Check] = ()
        if verify:
            from converter.verification import verify as check

            checks = check(written.repository, opened.config, opened.source.folder, progress=progress)
        _write_card(plan, written, checks, f"./{place.name}")
        graph = None
        if onnx is not None:
            from converter.exports.onnx import export

            graph = replace(export.write(written.repository, onnx, progress=progress), path=place)
        files = _list_files(folder, written.repository.checkpoint)
    pushed = push_result(expand(out), target, progress=progress) if target is not None else None
    return _result(plan, place, files, started, written, checks, graph, pushed)


def _write_card(plan: Plan, written: Written, checks: Sequence[Check], place: str) -> None:
    """Writes the model card, which names ``place``, and the picture of a verified scaling."""
    model, repository = plan.model, written.repository
    picture = bool(checks) and plan.scaling.scaled
    if picture:
        from converter.pictures import per_head
        from converter.pictures.positions import describe as positions

        heads = positions(model, repository.config, [plan.scaling])
        (repository.folder / PICTURE).write_bytes(per_head.card_picture(heads))
    text = describe(
        repository,
        origin=read_origin(model.source, plan.base_model),
        words=model.recipe.words(plan.scaling, model.trained, repository.config),
        tokenizer=model.tokenizer,
        sentence_encoder=model.nested.sentence_encoder,
        weights="same" if plan.order.dtype is None else "rounded",
        notes=plan.notes,
        place=place,
        command=plan.command(place, verify=bool(checks)),
        checks=checks,
        picture=picture,
    )
    (repository.folder / CARD).write_text(text, encoding="utf-8")


def _list_files(folder: Path, checkpoint: Checkpoint) -> dict[str, int | None]:
    """Writes the manifest of a finished repository; returns all files and their sizes in bytes."""
    digests = {name: entry.sha256 for name, entry in journal.entries(folder).items()}
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    names = [name for name in names if name != journal.JOURNAL]
    listed = set(names) - {REPORT}
    manifest.write(folder, listed, {name: digests.get(name) for name in checkpoint.files})
    return {name: (folder / name).stat().st_size for name in sorted({*names, manifest.MANIFEST})}


def _result(
    plan: Plan,
    place: Path,
    files: Mapping[str, int | None],
    started: float,
    written: Written | None = None,
    checks: Sequence[Check] = (),
    graph: ExportResult | None = None,
    pushed: PushResult | None = None,
) -> ConversionResult:
    """The result of ``convert``; without ``written``, that of a dry run."""
    model, config = plan.model, plan.config if written is None else written.repository.config
    return ConversionResult(
        path=place,
        source=model.name,
        commit=model.source.commit,
        family=model.recipe.name,
        model_type=model.recipe.model_type,
        rotary=model.recipe.change(plan.scaling),
        scaling=plan.scaling,
        train_length=model.trained.tokens,
        train_length_origin=model.trained.origin,
        input_limit=None if model.recipe.decoder else plan.input_limit,
        overrides=model.overrides,
        files=files,
        weights={} if written is None else written.weights,
        config_changes=_changes(model.original, config),
        notes=plan.notes,
        checks=checks,
        onnx=graph,
        pushed=pushed,
        seconds=time.monotonic() - started,
        dry_run=written is None,
    )


def _changes(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Key -> its values in both configs, None where it is missing, for the keys that differ."""
    keys = [
        key
        for key in {**before, **after}
        if (key in before, before.get(key)) != (key in after, after.get(key))
    ]
    return {key: (before.get(key), after.get(key)) for key in keys}
