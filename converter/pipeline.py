"""The conversion, from top to bottom."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter import manifest
from converter import recipe as recipes
from converter.card import PICTURE, write_card
from converter.checkpoint import ITEM_BYTES, Checkpoint, read_checkpoint, target_names
from converter.errors import SourceError, UsageError
from converter.families import Config
from converter.hub import bytes_to_download
from converter.onnx.export import ExportResult, check_requirements, export, graph_bytes, planned_files
from converter.onnx.options import OnnxOptions
from converter.own_code import find
from converter.publish.destination import Destination
from converter.publish.push import PushResult
from converter.recipe import Recipe
from converter.repository import copied_files, set_dtype, write_repository
from converter.rotary.settings import Change
from converter.scaling import Dynamic, Method, Request, Scaling
from converter.source import CARD, CONFIG, Source, open_source
from converter.staging import check_output, check_space, clear, staged
from converter.subfolders import nested_files
from converter.tokenizers import TOKENIZER_CONFIG, Tokenizer, read_tokenizer
from converter.trained import resolve
from converter.weights.files import Link
from converter.weights.journal import JOURNAL, Journal
from converter.weights.transfer import STORED, TORCH, Dtype, Order, transfer

if TYPE_CHECKING:
    from converter.verification import Check

SMALL = 16 << 20
"""Bytes allowed for everything but the weights when the disk's free space is checked."""


@dataclass(frozen=True)
class ConversionResult:
    """What was converted, or with ``dry_run`` would be."""

    path: Path
    """The converted repository, absolute."""
    source: str
    commit: str | None
    family: str
    """An ALiBi family's name, or "rotary"."""
    model_type: str
    rotary: Change | None
    """What became of rotary positions; None of ALiBi."""
    scaling: Scaling
    train_length: int | None
    """In tokens; None if it is not known (and was not needed)."""
    train_length_origin: str
    files: Mapping[str, int | None]
    """File -> bytes. A dry run has None where it cannot tell, and a weight file's bytes as they are."""
    weights: Mapping[str, int]
    """How the weight files came here (copied, shared, hard-linked, not shared, converted, or kept of an
    unfinished run) -> how many; empty of a dry run."""
    config_changes: Mapping[str, tuple[Any, Any]]
    """Key of config.json -> (value in the source or None, value in the result or None)."""
    notes: Sequence[str]
    """What the result's users have to know of its tokenizer and of files that were not copied."""
    checks: Sequence[Check]
    """What verification found right; empty without verification."""
    onnx: ExportResult | None
    """The graph, if one was asked for."""
    pushed: PushResult | None
    """What was pushed to the Hub, if that was asked for."""
    seconds: float
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return {
            "path": str(self.path),
            "source": self.source,
            "commit": self.commit,
            "family": self.family,
            "model_type": self.model_type,
            "method": self.scaling.method,
            "alibi_scaling": None if self.rotary else self.scaling.to_json(),
            "rotary": asdict(self.rotary) if self.rotary else None,
            "train_length": self.train_length,
            "train_length_origin": self.train_length_origin,
            "files": dict(self.files),
            "weights": dict(self.weights),
            "config_changes": {
                key: {"before": before, "after": after}
                for key, (before, after) in self.config_changes.items()
            },
            "notes": list(self.notes),
            "checks": [check.to_json() for check in self.checks],
            "onnx": self.onnx.to_json() if self.onnx else None,
            "pushed": self.pushed.to_json() if self.pushed else None,
            "seconds": round(self.seconds, 3),
            "dry_run": self.dry_run,
        }


def convert(
    model: str | Path,
    out: str | Path,
    *,
    scale: float | None = None,
    target_length: int | None = None,
    method: Method = "ntk",
    dynamic: Dynamic | None = None,
    rate: float | None = None,
    train_length: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    dtype: Dtype | None = None,
    link: Link | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = True,
    trust_remote_code: bool = False,
    onnx: OnnxOptions | None = None,
    push_to_hub: str | None = None,
    private: bool = False,
    branch: str | None = None,
    create_pr: bool = False,
    progress: bool = False,
) -> ConversionResult:
    """Writes a copy of a checkpoint whose ALiBi slopes or rotary positions are scaled, for plain
    transformers to load.

    The result is built in a folder beside ``out``, verified and then renamed: whatever happens,
    ``out`` is complete or not there, and the source is only read.

    Args:
        model: a local folder if there is one of that name, else a Hub id.
        out: folder to write; it must not exist, or be empty.
        scale: scale factor a >= 1 of a static scaling. Of scale, target_length and dynamic one may be
            given; without any, ntk is dynamic, by position in decoders and by length in encoders.
        target_length: tokens to reach; a = target_length / trained length.
        method: ``ntk``; ``linear``; ``ntk-published``, the original code's form; or ``none``, the
            model unscaled on the new attention code.
        dynamic: a = max(1, rate * tokens / trained length), with the tokens of the row (``length``)
            or up to the query (``position``).
        rate: of a dynamic scaling, above 0 and usually 1 to 2; 1 by default.
        train_length: trained length in tokens, where the checkpoint is not a known one.
        revision: branch, tag or commit of a Hub id.
        token: Hub access token; HF_TOKEN or the saved login by default.
        cache_dir: the Hub cache's folder, instead of its usual one.
        dtype: round floating point weights to it while they are written; their bytes are kept otherwise.
        link: ``reflink``: share the weights' blocks with the source where the file system can; ``hard``:
            else make them the same files, so that to change one is to change both. Copied otherwise.
            ``symbolic``: only lead there, for a result that is not kept.
        resume: go on from the weight files that an interrupted run to the same ``out`` finished.
        overwrite: replace ``out`` if it is not empty, once the new folder is complete; and what the
            repository that it is pushed to holds.
        dry_run: write nothing and only say what would be written.
        verify: check the result by running it, before it is renamed.
        trust_remote_code: let verification run the modeling code that the source brings, in a process of
            its own, and compare the result with it. Nothing of the source is run otherwise.
        onnx: also write such a graph, validated.
        push_to_hub: then push it to this repository, ``user/name``; whether that can be done is found out
            first.
        private, branch, create_pr: of the push, see ``push``.
        progress: draw progress bars on stderr.

    Raises:
        UsageError: options that contradict each other.
        SourceError: the checkpoint is missing, unreadable or damaged.
        UnsupportedModel: its attention cannot be scaled this way; says why.
        AlreadyConverted: it is a converted repository.
        OutputError: ``out`` is occupied, cannot be written or does not fit on its disk.
        VerificationError: the result is not right, and was removed.
        MissingPackage, ValidationError, ProviderError: of the graph, see ``export``; there is no result.
        PushError: it cannot be pushed. Once the conversion is done, the result stays.
    """
    started = time.monotonic()
    if onnx is not None:
        check_requirements(onnx)
    if push_to_hub is None and (private or branch is not None or create_pr):
        raise UsageError("--private, --branch and --create-pr are about a push; give --push-to-hub too")
    if push_to_hub is not None and not verify:
        raise UsageError("only what was verified is pushed; drop --no-verify or --push-to-hub")
    if dtype is not None and link is not None:
        raise UsageError("a file in another dtype shares nothing with its source; drop --dtype or the link")
    if trust_remote_code and not verify:
        raise UsageError("--trust-remote-code is for verification; drop it or --no-verify")
    request = Request(method, scale, target_length, dynamic, rate, train_length)
    cache = Path(cache_dir) if cache_dir else None
    source = open_source(str(model), revision=revision, token=token, cache_dir=cache, progress=progress)
    config = source.config()
    recipe = recipes.of_source(config)
    trained = recipe.trained_length(source, train_length)
    scaling = resolve(request, trained, source, recipe.default_dynamic)
    recipe.check_scaling(scaling)
    if not dry_run:
        clear(Path(out), resume=resume)
    place = check_output(Path(out), source.folder, overwrite=overwrite)
    new_config = recipe.scaled_config(scaling, trained.tokens, source)
    if onnx is not None:
        recipe.check_graph(new_config)
    target = Destination(push_to_hub, private, branch, create_pr, overwrite, token) if push_to_hub else None
    if target is not None:
        target.preflight(source.name)

    tokenizer = read_tokenizer(source, config, code=bool(recipe.templates))
    notes = [*recipe.notes, *([tokenizer.note] if tokenizer.note else []), *nested_files(source).notes]
    weights = source.weights()
    if not weights:
        raise SourceError(f"{source.name} has no weights (safetensors or .bin) to convert")

    if dtype is not None:
        set_dtype(new_config, TORCH[dtype])
        notes.append(f"the weights were converted to {TORCH[dtype]} (--dtype {dtype})")
    order = Order(dtype, link, keep=recipe.exact_tensors, tied=recipe.tied_tensors)
    how: Mapping[str, int] = {}
    checks: Sequence[Check] = ()
    exported: ExportResult | None = None
    copied = copied_files(source)
    if dry_run:
        if source.local:
            source.fetch(copied)
            new_config |= recipe.stored(source.folder, read_checkpoint(source.folder), new_config)
        files = _planned_files(source, recipe, tokenizer, weights, onnx)
        files |= {PICTURE: None} if verify and scaling.method != "none" else {}
    else:
        others = SMALL + sum(size or 0 for size in copied.values())
        wanted = [*({CARD} & source.files.keys()), *copied, *weights]
        # With --resume or a link much of the result may need no room, which transfer finds out.
        result = 0 if resume or link else _result_bytes(source, weights, dtype)
        _check_cache(source, wanted, place, others + result)
        source.fetch(wanted)
        own_code = None
        if trust_remote_code:
            own_code = find(source, config, token=token, cache_dir=cache)
        checkpoint = read_checkpoint(source.folder)
        others += 0 if onnx is None else graph_bytes(onnx, checkpoint, STORED[dtype] if dtype else None)

        def check_disk(needed: int) -> None:
            check_space(place.parent, needed + others, "the result needs", "change --out")

        with staged(place, overwrite=overwrite, resume=resume) as folder:
            how = transfer(checkpoint, source.folder, folder, order, space=check_disk, progress=progress)
            stored = recipe.stored(folder, read_checkpoint(folder), new_config)
            new_config |= stored
            write_repository(folder, new_config, recipe.templates, source, tokenizer)
            if verify:
                checks = recipe.verify(folder, scaling, own_code)
                _draw(folder / PICTURE, source, recipe, stored, scaling, trained.tokens)
            write_card(
                folder,
                source=source,
                words=recipe.words(scaling, trained, new_config),
                tokenizer=tokenizer,
                notes=notes,
                scaling=scaling,
                train_length=trained.tokens,
                command=_command(source, request, revision, place, dtype=dtype, verify=verify, onnx=onnx),
                checks=checks,
                converted=dtype is not None,
            )
            if onnx is not None:
                exported = replace(export(folder, onnx, progress=progress), path=place)
            files = _list_files(folder, read_checkpoint(folder))

    pushed = target.push(place, progress=progress) if target is not None and not dry_run else None
    return ConversionResult(
        path=place,
        source=source.name,
        commit=source.commit,
        family=recipe.name,
        model_type=recipe.model_type,
        rotary=recipe.change(scaling),
        scaling=scaling,
        train_length=trained.tokens,
        train_length_origin=trained.origin,
        files=files,
        weights=how,
        config_changes=_changes(config, new_config),
        notes=notes,
        checks=checks,
        onnx=exported,
        pushed=pushed,
        seconds=time.monotonic() - started,
        dry_run=dry_run,
    )


def _draw(
    file: Path, source: Source, recipe: Recipe, stored: Config, scaling: Scaling, trained: int | None
) -> None:
    """The card's picture of a scaling that was verified."""
    if scaling.method == "none":
        return
    from converter.pictures.card import card_picture
    from converter.pictures.model import describe

    file.write_bytes(card_picture(describe(source.name, recipe, stored, [scaling], trained)))


def _list_files(folder: Path, checkpoint: Checkpoint) -> dict[str, int | None]:
    """Writes the manifest of a finished repository; all its files and their sizes."""
    digests = {entry.file: entry.sha256 for entry in Journal(folder).entries().values()}
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    names = [name for name in names if name != JOURNAL]
    manifest.write(folder, names, {name: digests.get(name) for name in checkpoint.files})
    return {name: (folder / name).stat().st_size for name in sorted({*names, manifest.MANIFEST})}


def _result_bytes(source: Source, weights: Mapping[str, int | None], dtype: Dtype | None) -> int:
    """Of the weights, as far as can be told before they are there."""
    if dtype is not None and source.parameters:
        return sum(source.parameters.values()) * ITEM_BYTES[STORED[dtype]]
    return sum(size or 0 for size in weights.values())


def _check_cache(source: Source, names: Sequence[str], place: Path, result: int) -> None:
    """Looks for room in the Hub's cache before a download, and for the result's if it goes to that disk."""
    lacking = bytes_to_download(source, names)
    if not lacking:
        return
    if source.folder.stat().st_dev == place.parent.stat().st_dev:
        lacking += result
    check_space(source.folder, lacking, "download and result need", "give another --cache-dir or --out")


def _planned_files(
    source: Source,
    recipe: Recipe,
    tokenizer: Tokenizer,
    weights: Mapping[str, int | None],
    onnx: OnnxOptions | None,
) -> dict[str, int | None]:
    """What a conversion would write, of a local source after looking at its weights' headers."""
    dtypes = read_checkpoint(source.folder).dtypes if source.local else ()
    files: dict[str, int | None] = dict.fromkeys(
        (CONFIG, CARD, manifest.MANIFEST, *recipe.templates, *tokenizer.templates)
    )
    files |= copied_files(source) | dict.fromkeys((TOKENIZER_CONFIG,) if tokenizer.settings else ())
    targets = target_names(weights, source.index)
    files |= {target: weights.get(name) for name, target in targets.items()}
    return files | dict.fromkeys(planned_files(onnx, dtypes, decoder=recipe.decoder) if onnx else ())


def _changes(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    keys = [
        key
        for key in {**before, **after}
        if (key in before, before.get(key)) != (key in after, after.get(key))
    ]
    return {key: (before.get(key), after.get(key)) for key in keys}


def _command(
    source: Source,
    request: Request,
    revision: str | None,
    place: Path,
    *,
    dtype: Dtype | None,
    verify: bool,
    onnx: OnnxOptions | None,
) -> str:
    """The command line for the card; of local paths, which are nobody's business, only the last part."""
    options = {
        "--revision": revision,
        "--method": request.method if request.method != "ntk" else None,
        "--scale": None if request.scale is None else f"{request.scale:g}",
        "--target-length": request.target_length,
        "--dynamic": request.dynamic,
        "--rate": None if request.rate is None else f"{request.rate:g}",
        "--train-length": request.train_length,
        "--dtype": dtype,
        "--out": place.name,
    }
    words = ["ntk-convert", source.repo_id or f"./{source.name}"]
    for option, value in options.items():
        words += [option, str(value)] if value is not None else []
    words += onnx.words if onnx is not None else []
    return shlex.join([*words, *(["--no-verify"] if not verify else [])])
