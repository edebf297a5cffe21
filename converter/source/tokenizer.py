"""How a conversion handles a tokenizer: copies it, runs it with a class of ours, or leaves it out.

Tokenizer code in the source's repository is not copied: it is not ours, and it does not run on current
versions of transformers. The classes in ``KNOWN`` have counterparts in ``TEMPLATE`` that read the same
files. The other tokenizers of supported families are classes of transformers.

* BaichuanTokenizer: tokenization_baichuan.py of Baichuan-13B and Baichuan2-13B, which differ in line breaks
  only.
* ReplitLMTokenizer: replit_lm_tokenizer.py of replit-code-v1-3b (github.com/replit/ReplitLM).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from converter.config import Config
from converter.source.source import VOCABULARIES, Source, plain_text

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "tokenization_ntk_sentencepiece.py"
AUTO = "AutoTokenizer"
VOCABULARY_ENDS = (".model", ".tiktoken")


@dataclass(frozen=True)
class Known:
    """A tokenizer class of remote code that has a counterpart here."""

    ours: str
    """The counterpart in ``TEMPLATE``."""
    vocabulary: str
    """File name of the sentencepiece model that it reads."""


KNOWN = {
    "BaichuanTokenizer": Known("NtkBaichuanTokenizer", "tokenizer.model"),
    "ReplitLMTokenizer": Known("NtkReplitTokenizer", "spiece.model"),
}
"""Class name in the source -> its counterpart."""
OURS = {known.ours: name for name, known in KNOWN.items()}
"""Class name in a converted repository -> that of its source."""


@dataclass(frozen=True)
class Tokenizer:
    """How a conversion handles the tokenizer of one source."""

    here: bool = True
    """Whether the converted repository has a tokenizer that loads."""
    ours: str | None = None
    """The class in ``TEMPLATE`` that runs it; None for a class of transformers."""
    settings: dict[str, Any] | None = None
    """The new tokenizer_config.json; None if the source's is copied unchanged."""
    elsewhere: str | None = None
    """Where to load the tokenizer from, if the source has the code of one and the result has none."""
    note: str | None = None
    """What users of the tokenizer should know, one sentence."""

    def leaves_out(self, name: str) -> bool:
        """Whether a file of the source is not copied: without its class, another could read it wrongly."""
        return not self.here and (name in (TOKENIZER_CONFIG, *VOCABULARIES) or name.endswith(VOCABULARY_ENDS))

    @property
    def templates(self) -> tuple[str, ...]:
        return (TEMPLATE,) if self.ours else ()


GENERIC, OLD_GENERIC = "TokenizersBackend", "PreTrainedTokenizerFast"
"""The class that reads tokenizer.json alone: its name in transformers 5, and the one all versions know."""
EXTRA, OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
"""Where transformers 5 writes a list of further special tokens, and where all versions read it."""


def with_known_class(content: Config) -> dict[str, Any]:
    """A config.json or tokenizer_config.json in which the class has a name that transformers 4.57 knows."""
    result = dict(content)
    if result.get("tokenizer_class") == GENERIC:
        result["tokenizer_class"] = OLD_GENERIC
    return result


def for_all_versions(settings: Config) -> dict[str, Any]:
    """A tokenizer_config.json, as every supported transformers reads it, whichever saved it."""
    result = with_known_class(settings)
    if settings.get("tokenizer_class") == GENERIC:
        # Without it, the class of 4.57 adds token_type_ids, which decoders reject.
        result.setdefault("model_input_names", ["input_ids", "attention_mask"])
    extra = result.get(EXTRA)
    if isinstance(extra, list):
        del result[EXTRA]
        stated = result.get(OLD_EXTRA) or []
        result[OLD_EXTRA] = [*stated, *(token for token in extra if token not in stated)]
    elif extra == {} and result.get(OLD_EXTRA):
        del result[EXTRA]  # 5.1 to 5.6, at least, take this empty object and ignore the list
    return result


def read_tokenizer(source: Source, config: Config, *, code: bool = True) -> Tokenizer:
    """Decides how to handle a source's tokenizer; ``code`` says whether the result may contain code."""
    stored = source.object(TOKENIZER_CONFIG)
    settings = for_all_versions(stored)
    reference = _reference(settings, config)
    if reference is None:
        files = any(name in VOCABULARIES or name.endswith(VOCABULARY_ENDS) for name in source.files)
        if files or settings.get("tokenizer_class"):
            return Tokenizer(settings=None if settings == stored else settings)
        return _missing("the source has no tokenizer files")
    name = reference.rpartition(".")[2]
    name = OURS.get(name, name)
    known = KNOWN.get(name) if code else None
    if known is None:
        name = plain_text(name)
        repository, _, _ = reference.rpartition("--")
        if repository not in ("", source.repo_id):
            return _missing(
                f"the tokenizer class {name} is code of {plain_text(repository)}, not of the source"
            )
        if source.subfolder is not None:  # transformers finds code only in the root
            return _missing(f"the tokenizer class {name} is remote code, which is not copied")
        elsewhere = plain_text(source.repo_id or source.name)
        return Tokenizer(
            here=False,
            elsewhere=elsewhere,
            note=f"the tokenizer class {name} is remote code of the source, which is not copied: "
            f"load it from {elsewhere} (AutoTokenizer.from_pretrained, trust_remote_code=True), if it runs "
            "on your version of transformers",
        )
    if known.vocabulary not in source.files:
        return _missing(f"the source has no {known.vocabulary}, which its tokenizer, {name}, reads")
    module = TEMPLATE.removesuffix(".py")
    mapped = {AUTO: [f"{module}.{known.ours}", None]}
    return Tokenizer(
        ours=known.ours,
        settings={**settings, "auto_map": mapped, "tokenizer_class": known.ours},
        note=f"the tokenizer is {known.ours} of {TEMPLATE}, which replaces the source's {name} and gives "
        "the same ids; it needs trust_remote_code=True and the sentencepiece package",
    )


def our_class(settings: Config) -> str | None:
    """The class in ``TEMPLATE`` that a converted tokenizer_config.json names; None if it names none."""
    for known in KNOWN.values():
        # transformers puts ``user/name--`` before it if the tokenizer was loaded from the Hub.
        reference = (_reference(settings, {}) or "").rpartition("--")[2]
        if reference == f"{TEMPLATE.removesuffix('.py')}.{known.ours}":
            return known.ours
    return None


def _missing(what: str) -> Tokenizer:
    return Tokenizer(here=False, note=f"{what}: load the tokenizer that the source's card names")


def _reference(settings: Config, config: Config) -> str | None:
    """The reference to a tokenizer class in a repository's code, ``module.Class``; None without one."""
    stated = settings.get("auto_map")
    if isinstance(stated, list):  # in an old tokenizer_config.json, the slow and the fast class
        stated = {AUTO: stated}
    for mapped in (stated, config.get("auto_map")):
        names = mapped.get(AUTO) if isinstance(mapped, dict) else None
        for name in names if isinstance(names, list) else [names]:
            if isinstance(name, str):
                return name
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    return named if isinstance(named, str) and named in {*KNOWN, *OURS} else None
