"""The core of a conversion: ``decide`` reads the source and makes a ``Plan``, ``write`` carries it out."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from converter.config import DTYPE, LONGEST, PROVENANCE, STEP, Config, Dtype, Weights, is_count, with_value
from converter.errors import SourceError, UnsupportedModel, UsageError, VerificationError
from converter.families.checks import said_quantised
from converter.model.alibi import AlibiModel
from converter.model.model import Model
from converter.model.open import read_model
from converter.model.overrides import set_words
from converter.result import manifest
from converter.result.again import notes_on, weights_of
from converter.result.card import PICTURE
from converter.result.repository import own_code_only, set_dtype, small_files, write_repository
from converter.result.staging import check_space
from converter.scaling.request import RECORD, SLOPES_FILE, Request, command_line, request_for
from converter.scaling.scaling import Scaling, read_scaling
from converter.source.checkpoint import ITEM_BYTES, Checkpoint, quantised, read_checkpoint, target_names
from converter.source.fetch import bytes_to_download, fetch
from converter.source.hub import is_hub_id
from converter.source.keys import refuse_or_drop_keys
from converter.source.library_files import GENERATE
from converter.source.open import open_folder
from converter.source.remote_code import check_references
from converter.source.sentence_transformers import INPUT_LIMITS, for_old_versions, old_activation, set_limits
from converter.source.source import CARD, CONFIG, QUANTISED_BY, VOCABULARIES, plain_text
from converter.source.tokenizer import TOKENIZER_CONFIG
from converter.source.weight_files import weight_files, weights_index
from converter.weights.files import Link, sha256
from converter.weights.transfer import FLOATS, STORED, TORCH, TransferOptions, transfer

DIVERGED = "if the training diverged, convert an earlier save of it"
SMALL = 16 << 20
"""Bytes reserved for everything but the weights when free disk space is checked."""
FLOAT16 = (
    "the weights load as float16, which is several times slower than float32 on a CPU: load them there with "
    "`dtype=torch.float32` (sentence-transformers: `model_kwargs={'dtype': torch.float32}`)"
)


@dataclass(frozen=True)
class Plan:
    """A conversion that is decided but not written yet."""

    model: Model
    request: Request
    scaling: Scaling
    config: dict[str, Any]
    """config.json of the result; ``write`` adds the values that are known only from the finished weights."""
    weights: Mapping[str, int | None]
    """Weight files of the source and their sizes in bytes; None where the size is not known."""
    copied: Mapping[str, int | None]
    """Small files that are copied unchanged, and their sizes in bytes."""
    rewritten: Mapping[str, Any]
    """Small JSON files that are not copied unchanged, and their new content."""
    order: TransferOptions
    asked_dtype: Dtype | None
    """The dtype that the user gave; ``order`` has it unless the weights have it already."""
    base_model: str | None
    """Hub id that the card names as the source's, as the user gave it."""
    max_length: int | None
    """The input limit that the user gave."""
    input_limit: int | None
    """The input limit in tokens; None if the source's files stay as they are."""
    notes: Sequence[str]
    """What users of the result should know, each one sentence without its full stop."""

    @property
    def dtype(self) -> str | None:
        """Safetensors dtype to which the weights are rounded; None if they keep their own."""
        return None if self.order.dtype is None else STORED[self.order.dtype]

    @property
    def recorded_dtype(self) -> Dtype | None:
        """The ``--dtype`` to which weights were rounded last; None if they have the original's."""
        return self.order.dtype or self.model.origin.dtype

    @property
    def rounded_twice(self) -> bool:
        """Whether an earlier conversion rounded them to another dtype: the original's bits are lost."""
        return self.order.dtype is not None and self.model.origin.dtype not in (None, self.order.dtype)

    @property
    def wanted(self) -> list[str]:
        """Files of the source that ``write`` reads."""
        return [*({CARD} & self.model.source.files.keys()), *self.copied, *self.weights]

    def files(self, *, picture: bool) -> dict[str, int | None]:
        """The files that ``write`` would write -> bytes, None where the size is not known."""
        model = self.model
        code = (*model.templates, *model.tokenizer.templates)
        files: dict[str, int | None] = dict.fromkeys((CONFIG, CARD, manifest.MANIFEST, *code))
        files |= {**self.copied, **dict.fromkeys(self.rewritten)}
        targets = target_names(self.weights, weights_index(model.source))
        files |= {target: self.weights.get(name) for name, target in targets.items()}
        return files | dict.fromkeys((PICTURE,) if picture else ())

    @property
    def elements(self) -> dict[str, int]:
        """safetensors dtype of the result's weights -> number of elements, as far as they are known."""
        source = self.model.source
        found = self.model.checkpoint.elements if source.local else dict(source.parameters or {})
        return found if self.dtype is None else {self.dtype: sum(found.values())}

    def result_bytes(self) -> int:
        """Bytes of the result's weights, as far as they are known before the download."""
        parameters = self.model.source.parameters
        if self.dtype is not None and parameters:
            return sum(parameters.values()) * ITEM_BYTES[self.dtype]
        return sum(size or 0 for size in self.weights.values())

    def other_bytes(self) -> int:
        return SMALL + sum(size or 0 for size in self.copied.values())

    def check_download(self, place: Path) -> None:
        """Checks that the Hub cache has room for the missing files, and for a result on the same disk."""
        source = self.model.source
        lacking = bytes_to_download(source, self.wanted)
        if lacking:
            if source.folder.stat().st_dev == place.parent.stat().st_dev:
                lacking += self.other_bytes()
                # With a link the result may need less; ``transfer`` checks it exactly.
                lacking += 0 if self.order.link else self.result_bytes()
            remedy = "choose another `cache_dir` or `out`"
            check_space(source.folder, lacking, "download and result need", remedy)

    def check_vocabularies(self) -> None:
        """Raises ``SourceError`` for a vocabulary that names code, which no library looks for there.

        Like weights, they are here only after the download.
        """
        code = (*self.model.templates, *self.model.tokenizer.templates)
        check_references(self.model.source, code, self.copied.keys() & {*VOCABULARIES})

    def command(self, out: str, weights: Weights, *, verify: bool) -> str:
        """The command line for the model card, with ``out`` as it is; a local source is cut to its name.

        Of a Hub repository it names the commit, so that it makes the same files again. For a converted
        repository with its original's ``weights``, it is that of the original. Otherwise, the command that
        made the converted repository comes first.
        """
        model, origin = self.model, self.model.origin
        root = origin.source or self.model.source.root
        name = root if is_hub_id(root) else f"./{root}"
        place = {"revision": origin.commit, "subfolder": origin.subfolder}
        first, more, request = "", set_words(model.overrides), self.request
        if model.converted and (weights != "original" or model.scaling.temperature):
            here, changed = model.source, ", with other weights" * (weights == "other")
            if not model.scaling.temperature:  # no option gives one
                before = request_for(model.scaling, model.trained.tokens)
                rounded = ["--dtype", origin.dtype] if origin.dtype else []
                first = command_line(name, before, "./converted", **place, more=[*more, *rounded])
                first += f"\n# {here.root}: saved of ./converted{changed}\n"
            name = here.repo_id or f"./{here.root}"
            place, more = {"revision": here.commit, "subfolder": here.subfolder}, []
            dtype = self.asked_dtype
        else:
            dtype = self.asked_dtype or self.recorded_dtype
            if model.converted:  # the original may not tell it
                request = replace(request, train_length=model.trained.tokens)
        more += ["--dtype", dtype] if dtype else []
        more += ["--base-model", self.base_model] if self.base_model else []
        more += ["--max-length", str(self.max_length)] if self.max_length else []
        more += [] if verify else ["--no-verify"]
        return first + command_line(name, request, out, **place, more=more)


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
    source = model.source
    scaling = model.resolve(request)
    if model.converted and not request.asked and not scaling.temperature:  # which no request has
        request = _kept(model)
    _check_options(model, dtype, link, max_length, verify=verify)
    weights = weight_files(source)
    if not weights:
        raise SourceError(f"{source.name} has no weights (safetensors or .bin) to convert")
    tokenizer = model.tokenizer
    small = [name for name in small_files(source.files) if not tokenizer.leaves_out(name)]
    copied = {name: source.files[name] for name in small} | model.nested.files
    limits = model.contents(name for name in copied if name in INPUT_LIMITS)
    rewritten = {name: each for name, each in limits.items() if each != source.contents([name])[name]}
    if tokenizer.settings is not None:
        rewritten[TOKENIZER_CONFIG] = _with_limit(tokenizer.settings, limits.get(TOKENIZER_CONFIG))
    rewritten |= {} if request.slopes is None else {SLOPES_FILE: request.slopes.to_json()}
    files = [name for name in copied if name.endswith(".json") and name not in VOCABULARIES]
    contents = {**source.contents(files), **rewritten}
    portable, needs = for_old_versions(contents, model.nested.modules)
    contents |= portable
    rewritten |= portable
    judged, left_out = refuse_or_drop_keys(source, contents, model.row_kinds)
    contents |= judged
    rewritten |= judged
    limit = max_length or model.input_limit(scaling)
    limited, note = set_limits(contents, limit, decoder=model.decoder)
    config = model.scaled_config(scaling, tokenizer, limit)
    config |= old_activation(contents, config)
    config[PROVENANCE]["limits"] = _limits(model, config, contents, limited)
    judged, notes = refuse_or_drop_keys(source, {CONFIG: config}, model.row_kinds)
    config, notes = judged.get(CONFIG, config), [*notes, *left_out]
    notes += _left_behind(model)
    load = tokenizer.note
    if load and not tokenizer.here and limit and not model.decoder:
        load += f", with model_max_length={limit}: its own may be lower"
    notes += needs
    notes += [*model.notes, *filter(None, [model.trained.note, load, note]), *model.nested.notes]
    asked_dtype = dtype
    if dtype is not None:
        set_dtype(config, TORCH[dtype])
        dtype = None if _stored_dtypes(model) == {STORED[dtype]} else dtype
    if dtype is not None:
        if link is not None:
            raise UsageError(
                "`dtype` rewrites the weights, so they cannot be linked; drop `dtype` or the link"
            )
        notes.append(rounded_note(dtype))
    code = (*model.templates, *tokenizer.templates)
    cleaned, removed = own_code_only({CONFIG: config, **contents, **limited}, code)
    config = cleaned.pop(CONFIG, config)
    rewritten |= {**limited, **cleaned}
    copied = {name: size for name, size in copied.items() if name not in rewritten}
    notes += filter(None, [removed])
    if not model.decoder and _loads_as_float16(model, config):
        notes.append(FLOAT16)
    if source.local:
        fetch(source, copied)
        config |= model.stored_in(source.folder, model.checkpoint, config)
    unread = model.unread if verify else None
    digests = {name: digest for name in weights if (digest := source.digest(name))}
    keep, tied = model.exact_tensors, model.tied_tensors
    order = TransferOptions(dtype, link, keep=keep, tied=tied, unread=unread, digests=digests)
    given = (asked_dtype, base_model, max_length, limit)
    return Plan(model, request, scaling, config, weights, copied, rewritten, order, *given, notes)


def _left_behind(model: Model) -> list[str]:
    """What the source has that the result has not, or has otherwise; each is a sentence."""
    source, notes = model.source, []
    if source.inside(GENERATE):
        notes.append(f"{GENERATE}, code of the source that replaces generate, was not copied")
    if model.unquantised:
        named = [name if name in QUANTISED_BY else f"{name} of {CONFIG}" for name in model.unquantised]
        notes.append(f"{' and '.join(named)} was left out: all weights are floating point")
    if model.overrides:
        notes.append(f"the source's config.json was read with {shlex.join(set_words(model.overrides))}")
    notes += notes_on(model)
    if source.subfolder is not None:
        name = plain_text(source.name)
        notes.append(f"the source is the folder {name}; files outside it, such as a licence, were not copied")
    return notes


def rounded_note(dtype: Dtype) -> str:
    return f"the weights were converted to {TORCH[dtype]}"


def _check_options(
    model: Model, dtype: Dtype | None, link: Link | None, max_length: int | None, *, verify: bool
) -> None:
    """Raises ``UsageError`` for values that no conversion of this model takes.

    Raises ``UnsupportedModel`` if only verification could show that the model is not quantised.
    """
    if model.unquantised and not verify:
        raise UnsupportedModel(
            f"{quantised(said_quantised(model.unquantised))}; if a merge left that, verification shows it: "
            "leave out `verify`"
        )
    for name, value, known in (("dtype", dtype, get_args(Dtype)), ("link", link, get_args(Link))):
        if value not in (None, *known):
            raise UsageError(f"`{name}` {value!r} is unknown; choose one of {', '.join(known)}")
    if max_length is not None and not is_count(max_length, LONGEST):
        raise UsageError(f"`max_length` {max_length} is out of range; give a number from 1 to {LONGEST}")
    if max_length is not None and model.decoder:
        raise UsageError(
            f"`max_length` is where the texts of an encoder are cut, and {model.name} is none; leave it out"
        )


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


def _with_limit(settings: Config, source: Any) -> dict[str, Any]:
    """A tokenizer_config.json with the input limit of the source's; ``source`` is its content."""
    if not isinstance(source, Mapping):
        return dict(settings)
    key = INPUT_LIMITS[TOKENIZER_CONFIG]
    return with_value(settings, key, source.get(key))


def _limits(
    model: Model, config: Config, contents: Mapping[str, Any], limited: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The input limits of the source that the result has not; None if they are not known."""
    if model.provenance is not None and model.provenance.limits is None:
        return None
    before = {name: contents[name].get(INPUT_LIMITS[name]) for name in limited}
    key = model.family.length_hint if isinstance(model, AlibiModel) else None
    if key is not None and config.get(key) != model.source_config.get(key):
        before[CONFIG] = model.source_config.get(key)
    return before


def _stored_dtypes(model: Model) -> set[str]:
    """The safetensors dtypes of the weights that ``dtype`` would change, as far as they are known."""
    if not model.source.local:
        return set(model.source.parameters or {}).intersection(FLOATS)
    return _dtypes(model.checkpoint, model.exact_tensors)


def _dtypes(checkpoint: Checkpoint, keep: Collection[str]) -> set[str]:
    tensors = checkpoint.tensors.values()
    return {tensor.dtype for tensor in tensors if tensor.name not in keep}.intersection(FLOATS)


def _loads_as_float16(model: Model, config: Mapping[str, Any]) -> bool:
    """Whether transformers 5 loads the weights as float16, unless it is told otherwise."""
    declared = config.get("dtype") or config.get("torch_dtype")
    if declared is not None:
        return bool(declared == "float16")
    source = model.source
    elements = model.checkpoint.elements if source.local else source.parameters or {}
    return max(elements, key=lambda name: elements[name], default="") == "F16"


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
    model, source = plan.model, plan.model.source
    how, digests = transfer(
        model.checkpoint, source.folder, folder, plan.order, space=space, progress=progress
    )
    checkpoint, asked = read_checkpoint(folder), plan.asked_dtype
    if asked is not None and _dtypes(checkpoint, model.exact_tensors) != {STORED[asked]}:
        # Before the download, only the Hub says which dtypes there are.
        raise SourceError(
            f"the weights of {source.name} are not {TORCH[asked]}, as the Hub says; convert a local copy"
        )
    config = {**plan.config, **model.stored_in(folder, checkpoint, plan.config)}
    digests = {**known, **digests}
    weights = _weights(plan, folder, digests, rewritten="converted" in how)
    step = {"source": source.root, "commit": source.commit, "subfolder": source.subfolder}
    config[PROVENANCE] = {**config[PROVENANCE], "weights": weights}
    if plan.recorded_dtype is not None:
        config[PROVENANCE][DTYPE] = plan.recorded_dtype
    config[PROVENANCE] |= {} if weights == "original" else {STEP: step}
    templates = (*model.templates, *model.tokenizer.templates)
    write_repository(folder, config, templates, source, plan.copied, plan.rewritten)
    written = read_model(open_folder(folder))
    if written.scaling != plan.scaling:
        raise VerificationError(f"config.json has the scaling {written.scaling}, not {plan.scaling}")
    return Written(written, how, weights, digests)


def _weights(plan: Plan, folder: Path, digests: dict[str, str], *, rewritten: bool) -> Weights:
    """Whether the weights are the original's; reads those of a converted repository that nothing has read.

    They are looked at as they are when they are copied: a training may have diverged. Their SHA-256 are added
    to ``digests``.
    """
    model = plan.model
    if not model.converted:
        return "original"
    if plan.rounded_twice:
        return "other"
    for name, target in target_names(plan.weights, weights_index(model.source)).items():
        if target not in digests:
            scan = model.scan(name, DIVERGED) if plan.order.unread else bool
            digests[target] = sha256(folder / target, look=scan)
    if rewritten:
        return weights_of(model, {name: sha256(model.folder / name) for name in plan.weights})
    return weights_of(model, digests)
