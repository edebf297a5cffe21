"""The core of a conversion: ``decide`` reads the source and makes a ``Plan``, ``write`` carries it out."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from converter.config import DTYPE, LONGEST, PROVENANCE, STEP, Dtype, Weights, is_count
from converter.errors import SourceError, UsageError, VerificationError, option
from converter.formatting import argv
from converter.model.model import Model
from converter.model.open import read_model
from converter.model.overrides import set_values
from converter.result import manifest
from converter.result.again import weights_of
from converter.result.card.sections import PICTURE
from converter.result.files import SmallFiles, decide_files
from converter.result.repository import write_repository
from converter.result.staging import check_space
from converter.scaling.request import RECORD, SLOPES_FILE, Request, request_for
from converter.scaling.scaling import Scaling, read_scaling
from converter.source.checkpoint import ITEM_BYTES, Checkpoint, read_checkpoint, target_names
from converter.source.fetch import bytes_to_download
from converter.source.hub import is_hub_id
from converter.source.open import open_folder
from converter.source.source import CARD, CONFIG
from converter.source.weight_files import weight_files, weights_index
from converter.weights.files import Link, sha256
from converter.weights.transfer import FLOATS, STORED, TORCH, TransferOptions, transfer

DIVERGED = "if the training diverged, convert an earlier save of it"
SMALL = 16 << 20
"""Bytes reserved for what this tool itself writes, when free disk space is checked."""


@dataclass(frozen=True)
class WeightFiles:
    """How the weights get from the source into the result."""

    model: Model
    sizes: Mapping[str, int | None]
    """Weight file of the source -> its size in bytes; None where that is not known."""
    asked_dtype: Dtype | None
    """The dtype that the user gave; ``options`` has it unless the weights have it already."""
    options: TransferOptions

    @property
    def targets(self) -> dict[str, str]:
        """Weight file or index of the source -> its name in the result."""
        return target_names(self.sizes, weights_index(self.model.source))

    @property
    def stored_dtype(self) -> str | None:
        """Safetensors dtype to which they are rounded; None if they keep their own."""
        return None if self.options.dtype is None else STORED[self.options.dtype]

    @property
    def recorded_dtype(self) -> Dtype | None:
        """The ``--dtype`` to which they were rounded last; None if they have the original's."""
        return self.options.dtype or self.model.origin.dtype

    @property
    def rounded_twice(self) -> bool:
        """Whether an earlier conversion rounded them to another dtype: the original's bits are lost."""
        before = self.model.origin.dtype
        return self.options.dtype is not None and before is not None and before != self.options.dtype

    def without_digests(self) -> WeightFiles:
        """The same for files that were compared with their digests before."""
        return replace(self, options=replace(self.options, digests={}))

    @property
    def elements(self) -> dict[str, int]:
        """safetensors dtype in the result -> about how many elements, as far as they are known.

        All count as rounded, though a few tensors, such as integers, keep their dtype.
        """
        found = self.model.elements
        if self.stored_dtype is None:
            return found
        return {self.stored_dtype: sum(found.values())}

    @property
    def result_bytes(self) -> int:
        """Bytes in the result, about, as far as they are known before the download."""
        parameters = self.model.source.parameters
        if self.stored_dtype is not None and parameters:
            return sum(parameters.values()) * ITEM_BYTES[self.stored_dtype]
        return sum(size or 0 for size in self.sizes.values())


@dataclass(frozen=True)
class Plan:
    """A conversion that is decided but not written yet."""

    model: Model
    request: Request
    scaling: Scaling
    files: SmallFiles
    weights: WeightFiles
    base_model: str | None
    """Hub id that the card names as the source's, as the user gave it."""
    max_length: int | None
    """The input limit that the user gave."""

    @property
    def notes(self) -> list[str]:
        """What users of the result should know, each one sentence without its full stop."""
        rounded = self.weights.options.dtype
        return self.files.notes if rounded is None else [*self.files.notes, rounded_note(rounded)]

    @property
    def wanted(self) -> list[str]:
        """Files of the source that ``write`` reads."""
        return [*self.files.read, *self.weights.sizes]

    def sizes(self, *, picture: bool) -> dict[str, int | None]:
        """The files that the result would have -> bytes, None where the size is not known."""
        unknown = [CONFIG, CARD, manifest.MANIFEST, *self.files.code]
        if picture:
            unknown.append(PICTURE)
        sizes: dict[str, int | None] = dict.fromkeys(unknown)
        sizes |= self.files.copied
        sizes |= dict.fromkeys(self.files.rewritten)
        for name, target in self.weights.targets.items():
            sizes[target] = self.weights.sizes.get(name)
        return sizes

    def other_bytes(self) -> int:
        """Bytes of everything but the weights, about."""
        return SMALL + sum(size or 0 for size in self.files.copied.values())

    def check_download(self, place: Path) -> None:
        """Checks that the Hub cache has room for the missing files, and for a result on the same disk."""
        source = self.model.source
        needed = bytes_to_download(source, self.wanted)
        if not needed:
            return
        if source.folder.stat().st_dev == place.parent.stat().st_dev:
            needed += self.other_bytes()
            if not self.weights.options.link:  # with one it may take less; ``transfer`` checks it exactly
                needed += self.weights.result_bytes
        remedy = f"choose another {option.cache_dir} or {option.out}"
        check_space(source.folder, needed, "download and result need", remedy)

    def command(self, out: str, weights: Weights, *, verify: bool) -> str:
        """The command line for the model card, with ``out`` as it is; a local source is cut to its name.

        Of a Hub repository it names the commit, so that it makes the same files again. For a converted
        repository with its original's ``weights``, it is that of the original. Otherwise, the command that
        made the converted repository comes first.
        """
        if self.model.converted and weights != "original":
            return f"{self._command_before(weights)}\n{self._command_of_converted(out, verify=verify)}"
        request = self.request
        if self.model.converted:  # the original may not tell its trained length
            request = replace(request, train_length=self.model.trained.tokens)
        dtype = self.weights.asked_dtype or self.weights.recorded_dtype
        return self._command_of_original(request, out, dtype, **self._last_options(verify=verify))

    def _command_before(self, weights: Weights) -> str:
        """The command that made the converted repository, and what happened to it since, as a comment."""
        model = self.model
        request = request_for(model.scaling, model.trained.tokens)
        command = self._command_of_original(request, "./converted", model.origin.dtype)
        changed = ", with other weights" if weights == "other" else ""
        return f"{command}\n# {model.source.root}: saved from ./converted{changed}"

    def _command_of_original(self, request: Request, out: str, dtype: Dtype | None, **options: object) -> str:
        origin = self.model.origin
        name = origin.source or self.model.source.root
        words = argv(
            None,
            name if is_hub_id(name) else f"./{name}",
            revision=origin.commit,
            subfolder=origin.subfolder,
            **request.options,
            out=out,
            set=set_values(self.model.overrides),
            dtype=dtype,
            **options,
        )
        return shlex.join(words)

    def _command_of_converted(self, out: str, *, verify: bool) -> str:
        source = self.model.source
        words = argv(
            None,
            source.repo_id or f"./{source.root}",
            revision=source.commit,
            subfolder=source.subfolder,
            **self.request.options,
            out=out,
            dtype=self.weights.asked_dtype,
            **self._last_options(verify=verify),
        )
        return shlex.join(words)

    def _last_options(self, *, verify: bool) -> dict[str, object]:
        return {"base_model": self.base_model, "max_length": self.max_length, "no_verify": not verify}


def decide(
    model: Model,
    request: Request,
    *,
    dtype: Dtype | None = None,
    link: Link | None = None,
    base_model: str | None = None,
    max_length: int | None = None,
    verify: bool = True,
) -> Plan:
    """Reads the source and decides what to write. Nothing is written, and no weights are downloaded.

    Raises ``UsageError``, ``SourceError`` or ``UnsupportedModel`` for what cannot be converted this way.
    """
    scaling = model.resolve(request)
    if model.converted and not request.asked:
        request = _kept(model)
    _check_options(model, dtype, link, max_length, verify=verify)
    weights = _decide_weights(model, dtype, link, verify=verify)
    files = decide_files(
        model,
        scaling,
        slopes=request.slopes,
        limit=max_length or model.input_limit(scaling),
        dtype=None if dtype is None else TORCH[dtype],
    )
    return Plan(model, request, scaling, files, weights, base_model, max_length)


def _kept(model: Model) -> Request:
    """The request for the scaling that a converted repository has, with the notes on its fitted slopes."""
    request = request_for(model.scaling, model.trained.tokens)
    if request.slopes is None:
        return request
    content = dict(model.source.object(SLOPES_FILE))
    record = content.pop(RECORD, None)
    if read_scaling(content or None, SLOPES_FILE) != model.scaling:
        return request
    return replace(request, slopes=replace(request.slopes, record=record))


def _check_options(
    model: Model, dtype: Dtype | None, link: Link | None, max_length: int | None, *, verify: bool
) -> None:
    """Raises ``UsageError`` for values that no conversion of this model takes.

    Raises ``UnsupportedModel`` if only verification could show that the model can be converted.
    """
    if not verify:
        model.check_without_verification()
    for name, value, known in (("dtype", dtype, get_args(Dtype)), ("link", link, get_args(Link))):
        if value not in (None, *known):
            raise UsageError(f"{option[name]} {value!r} is unknown; choose one of {', '.join(known)}")
    if max_length is not None and not is_count(max_length, LONGEST):
        raise UsageError(
            f"{option.max_length} {max_length} is out of range; give a number from 1 to {LONGEST}"
        )
    if max_length is not None and model.decoder:
        raise UsageError(
            f"{option.max_length} is where the texts of an encoder are cut, and {model.name} is none; leave "
            "it out"
        )


def _decide_weights(model: Model, dtype: Dtype | None, link: Link | None, *, verify: bool) -> WeightFiles:
    source = model.source
    sizes = weight_files(source)
    if not sizes:
        raise SourceError(f"{source.name} has no weights (safetensors or .bin) to convert")
    round_to = dtype
    if dtype is not None and _stored_dtypes(model) == {STORED[dtype]}:
        round_to = None  # they have it already
    if round_to is not None and link is not None:
        raise UsageError(
            f"{option.dtype} rewrites the weights, so they cannot be linked; drop {option.dtype} or the link"
        )
    found = {name: source.digest(name) for name in sizes}
    options = TransferOptions(
        round_to,
        link,
        keep=model.exact_tensors,
        tied=model.tied_tensors,
        ignored=model.ignored_tensors if verify else None,
        digests={name: digest for name, digest in found.items() if digest is not None},
    )
    return WeightFiles(model, sizes, dtype, options)


def rounded_note(dtype: Dtype) -> str:
    return f"the weights were converted to {TORCH[dtype]}"


def _stored_dtypes(model: Model) -> set[str]:
    """The safetensors dtypes of the weights that ``dtype`` would change, as far as they are known."""
    if not model.source.local:
        return set(model.source.parameters or {}).intersection(FLOATS)
    return _dtypes(model.checkpoint, model.exact_tensors)


def _dtypes(checkpoint: Checkpoint, keep: Collection[str]) -> set[str]:
    tensors = checkpoint.tensors.values()
    return {tensor.dtype for tensor in tensors if tensor.name not in keep}.intersection(FLOATS)


@dataclass(frozen=True)
class Written:
    model: Model
    weights: Mapping[str, int]
    """How weight files were written -> number of files; see ``ConversionResult.weights``."""
    weights_are: Weights
    digests: Mapping[str, str]
    """Weight file -> its SHA-256, as far as it is known from writing."""


def write(
    plan: Plan,
    folder: Path,
    *,
    known: Mapping[str, str] = {},
    space: Callable[[int], object] = bool,
    progress: bool = False,
) -> Written:
    """Writes a converted repository without its card, its manifest and its graph.

    ``folder`` is empty. ``known`` are SHA-256 of linked weights that were read before. ``space`` is called
    with the number of bytes that the weights will take, before they are written.
    """
    model, source, files = plan.model, plan.model.source, plan.files
    how, digests = transfer(
        model.checkpoint, source.folder, folder, plan.weights.options, space=space, progress=progress
    )
    checkpoint, asked = read_checkpoint(folder), plan.weights.asked_dtype
    if asked is not None and _dtypes(checkpoint, model.exact_tensors) != {STORED[asked]}:
        # Before the download, only the Hub says which dtypes there are.
        raise SourceError(
            f"the Hub says that the weights of {source.name} are {TORCH[asked]}, and they are not; convert a "
            "local copy"
        )
    digests = {**known, **digests}
    weights_are = _whose_weights(plan.weights, folder, digests, rewritten="converted" in how)
    record = {**files.config[PROVENANCE], "weights": weights_are}
    if plan.weights.recorded_dtype is not None:
        record[DTYPE] = plan.weights.recorded_dtype
    if weights_are != "original":
        record[STEP] = {"source": source.root, "commit": source.commit, "subfolder": source.subfolder}
    config = {
        **files.config,
        **model.read_tensor_settings(folder, checkpoint, files.config),
        PROVENANCE: record,
    }
    write_repository(folder, config, files.code, source, files.copied, files.rewritten)
    written = read_model(open_folder(folder))
    if written.scaling != plan.scaling:
        raise VerificationError(f"config.json has the scaling {written.scaling}, not {plan.scaling}")
    return Written(written, how, weights_are, digests)


def _whose_weights(
    weights: WeightFiles, folder: Path, digests: dict[str, str], *, rewritten: bool
) -> Weights:
    """Whether the weights are the original's; reads those of a converted repository that nothing has read.

    Meanwhile it looks for NaN and infinity in them, as copying does: a training may have diverged. Their
    SHA-256 are added to ``digests``.
    """
    model = weights.model
    if not model.converted:
        return "original"
    if weights.rounded_twice:
        return "other"
    for name, target in weights.targets.items():
        if target not in digests:
            scan = model.scan(name, DIVERGED) if weights.options.ignored else bool
            digests[target] = sha256(folder / target, look=scan)
    if rewritten:
        return weights_of(model, {name: sha256(model.folder / name) for name in weights.sizes})
    return weights_of(model, digests)
