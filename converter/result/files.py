"""The small files of a result: config.json, and what is taken over from the source."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from converter.config import PROVENANCE, Config, with_value
from converter.model.alibi import AlibiModel
from converter.model.model import Model
from converter.model.overrides import set_values
from converter.result.again import notes_on
from converter.result.repository import own_code_only, set_dtype, small_files
from converter.scaling.request import SLOPES_FILE, GivenSlopes
from converter.scaling.scaling import Scaling
from converter.source.fetch import fetch
from converter.source.keys import refuse_or_drop_keys
from converter.source.library_files import GENERATE
from converter.source.remote_code import check_references
from converter.source.sentence_transformers import INPUT_LIMITS, for_old_versions, old_activation, set_limits
from converter.source.source import CARD, CONFIG, QUANTISED_BY, VOCABULARIES, plain_text
from converter.source.tokenizer import TOKENIZER_CONFIG

FLOAT16 = (
    "the weights load as float16, which is several times slower than float32 on a CPU: load them there with "
    "`dtype=torch.float32` (sentence-transformers: `model_kwargs={'dtype': torch.float32}`)"
)


class SmallFiles:
    """What each small file of a result will hold, and what its user should know.

    ``decide_files`` calls the methods in the order in which they stand here. Nothing is written.
    """

    def __init__(self, model: Model) -> None:
        """Takes over the source's files; JSON files with the input limits that the source has."""
        source, tokenizer = model.source, model.tokenizer
        names = [name for name in small_files(source.files) if not tokenizer.leaves_out(name)]
        self.model = model
        self.input_limit: int | None = None
        """In tokens; None if the source's files stay as they are."""
        self.notes: list[str] = []
        """Each one sentence without its full stop."""
        self._sizes: dict[str, int | None] = {name: source.files[name] for name in names}
        self._sizes |= model.nested.files
        json_files = [name for name in self._sizes if name.endswith(".json") and name not in VOCABULARIES]
        stored = source.contents(json_files)
        self._contents = model.contents(json_files)
        """JSON file -> what it will hold."""
        self._changed = {name for name in stored if self._contents[name] != stored[name]}
        """Files that are not copied as they are."""
        if tokenizer.settings is not None:
            settings = _with_limit(tokenizer.settings, self._contents.get(TOKENIZER_CONFIG))
            self._change({TOKENIZER_CONFIG: settings})

    # What is decided, for those who write it

    @property
    def config(self) -> dict[str, Any]:
        """config.json; ``write`` adds the values that are known only from the finished weights."""
        config: dict[str, Any] = self._contents[CONFIG]
        return config

    @property
    def rewritten(self) -> dict[str, Any]:
        """JSON file other than config.json -> its new content."""
        return {name: self._contents[name] for name in self._changed if name != CONFIG}

    @property
    def copied(self) -> dict[str, int | None]:
        """File that is copied unchanged -> its size in bytes; None where that is not known."""
        return {name: size for name, size in self._sizes.items() if name not in self._changed}

    @property
    def code(self) -> tuple[str, ...]:
        """Names of the code files, which are this tool's own."""
        return (*self.model.templates, *self.model.tokenizer.templates)

    @property
    def read(self) -> list[str]:
        """The source's small files that are read when the result is written."""
        return [*({CARD} & self.model.source.files.keys()), *self.copied]

    def check_vocabularies(self) -> None:
        """Raises ``SourceError`` for a vocabulary that names code, which no library looks for there.

        Like weights, they are here only after the download.
        """
        check_references(self.model.source, self.code, self.copied.keys() & {*VOCABULARIES})

    # The steps

    def add_slopes(self, slopes: GivenSlopes) -> None:
        self._change({SLOPES_FILE: slopes.to_json()})

    def scale(self, scaling: Scaling, limit: int | None) -> None:
        """Makes config.json; ``limit`` is the input limit in tokens."""
        config = self.model.make_result_config(scaling, self.model.tokenizer, limit)
        config |= old_activation(self._contents, config)
        self._change({CONFIG: config})

    def set_input_limit(self, limit: int | None) -> None:
        """Sets the input limit in the other files, and records the source's limits in config.json."""
        model = self.model
        files, note = set_limits(self._contents, limit, decoder=model.decoder)
        if model.provenance is not None and model.provenance.limits is None:
            before = None  # an older version converted it, and did not record the source's
        else:
            before = {name: self._contents[name].get(INPUT_LIMITS[name]) for name in files}
            key = model.family.length_hint if isinstance(model, AlibiModel) else None
            if key is not None and self.config.get(key) != model.source_config.get(key):
                before[CONFIG] = model.source_config.get(key)
        self.config[PROVENANCE]["limits"] = before
        self.input_limit = limit
        self._change(files)
        if note is not None:
            self.notes.append(note)

    def leave_out_keys(self) -> None:
        """Leaves out keys that libraries would read and a conversion does not honour; refuses others."""
        files, notes = refuse_or_drop_keys(self.model.source, self._contents, self.model.row_kinds)
        self._change(files)
        self.notes += notes

    def suit_old_versions(self) -> None:
        """Gives files that new libraries saved the keys and names that old ones know."""
        files, notes = for_old_versions(self._contents, self.model.nested.modules)
        self._change(files)
        self.notes += notes

    def set_dtype(self, dtype: str) -> None:
        """Records torch's name of the dtype to which the weights are rounded."""
        set_dtype(self.config, dtype)

    def remove_foreign_code(self) -> None:
        """Removes references to code that the result does not have."""
        files, note = own_code_only(self._contents, self.code)
        self._change(files)
        if note is not None:
            self.notes.append(note)

    def check_tensors(self) -> None:
        """Adds to config.json what the tensors of a local source say; refuses what contradicts them."""
        source = self.model.source
        fetch(source, self.copied)  # which checks that each can be opened
        self.config.update(self.model.read_tensor_settings(source.folder, self.model.checkpoint, self.config))

    def note_what_is_lost(self) -> None:
        """Notes what the result has not, or has otherwise."""
        model, source = self.model, self.model.source
        if source.inside(GENERATE):
            self.notes.append(f"{GENERATE}, code of the source that replaces generate, was not copied")
        if model.stale_quantisation:
            stale = [
                name if name in QUANTISED_BY else f"{name} of {CONFIG}" for name in model.stale_quantisation
            ]
            self.notes.append(f"{' and '.join(stale)} was left out: all weights are floating point")
        if model.overrides:
            given = [word for value in set_values(model.overrides) for word in ("--set", value)]
            self.notes.append(f"the source's config.json was read with {shlex.join(given)}")
        self.notes += notes_on(model)
        if source.subfolder is not None:
            name = plain_text(source.name)
            self.notes.append(
                f"the source is the folder {name}; files outside it, such as a licence, were not copied"
            )
        self.notes += model.nested.notes

    def note_how_to_load(self) -> None:
        """Notes what to know of the model, its trained length, its tokenizer and its dtype."""
        model, tokenizer = self.model, self.model.tokenizer
        self.notes += model.notes
        if model.trained.note is not None:
            self.notes.append(model.trained.note)
        if tokenizer.note is not None:
            note = tokenizer.note
            if not tokenizer.here and self.input_limit and not model.decoder:
                note += f", with model_max_length={self.input_limit}: its own may be lower"
            self.notes.append(note)
        if not model.decoder and _loads_as_float16(model, self.config):
            self.notes.append(FLOAT16)

    def _change(self, files: Mapping[str, Any]) -> None:
        self._contents |= files
        self._changed |= files.keys()


def decide_files(
    model: Model,
    scaling: Scaling,
    *,
    slopes: GivenSlopes | None = None,
    limit: int | None = None,
    dtype: str | None = None,
) -> SmallFiles:
    """Decides what the small files of a result hold.

    ``limit`` is the input limit in tokens, and ``dtype`` torch's name of that of the result's weights; None
    if they stay the source's. Raises ``UnsupportedModel`` for what a conversion cannot honour, and
    ``SourceError`` for damaged files.
    """
    files = SmallFiles(model)
    if slopes is not None:
        files.add_slopes(slopes)
    files.scale(scaling, limit)
    files.set_input_limit(limit)
    files.leave_out_keys()
    files.suit_old_versions()
    if dtype is not None:
        files.set_dtype(dtype)
    files.remove_foreign_code()
    if model.source.local:
        files.check_tensors()
    files.note_what_is_lost()
    files.note_how_to_load()
    return files


def _with_limit(settings: Config, stored: Any) -> dict[str, Any]:
    """A new tokenizer_config.json with the input limit of the one that is ``stored``."""
    if not isinstance(stored, Mapping):
        return dict(settings)
    key = INPUT_LIMITS[TOKENIZER_CONFIG]
    return with_value(settings, key, stored.get(key))


def _loads_as_float16(model: Model, config: Config) -> bool:
    """Whether transformers 5 loads the weights as float16, unless it is told otherwise."""
    declared = config.get("dtype") or config.get("torch_dtype")
    if declared is not None:
        return bool(declared == "float16")
    elements = model.elements
    return max(elements, key=lambda name: elements[name], default="") == "F16"
