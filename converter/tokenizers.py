"""What becomes of a source's tokenizer: copied as it is, run by code of ours, or left with its source.

A tokenizer whose code lies in the source's repository cannot be copied: that code is neither ours nor does
it run on today's transformers. The classes in ``KNOWN`` have counterparts in ``TEMPLATE``, which read the
same files. Of the tokenizers of supported families, others are classes of transformers.

* BaichuanTokenizer: tokenization_baichuan.py of Baichuan-13B and Baichuan2-13B, alike but for line breaks.
* ReplitLMTokenizer: replit_lm_tokenizer.py of replit-code-v1-3b (github.com/replit/ReplitLM).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from converter.families import Config
from converter.jsonfile import read_object
from converter.source import Source, plain_text

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "tokenization_ntk_sentencepiece.py"
AUTO = "AutoTokenizer"
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json")
VOCABULARY_ENDS = (".model", ".tiktoken")


@dataclass(frozen=True)
class Known:
    """A class of a source's own code that has a counterpart here."""

    ours: str
    """The counterpart in ``TEMPLATE``."""
    vocabulary: str
    """The sentencepiece model that it reads."""


KNOWN = {
    "BaichuanTokenizer": Known("NtkBaichuanTokenizer", "tokenizer.model"),
    "ReplitLMTokenizer": Known("NtkReplitTokenizer", "spiece.model"),
}
"""The original's class -> its counterpart."""


@dataclass(frozen=True)
class Tokenizer:
    """What a conversion does for one source's tokenizer."""

    here: bool = True
    """Whether the converted repository has a tokenizer that loads."""
    ours: str | None = None
    """Class in ``TEMPLATE`` that runs it; None for one of transformers'."""
    settings: dict[str, Any] | None = None
    """tokenizer_config.json where it is not copied as it is."""
    elsewhere: str | None = None
    """What to load the tokenizer from, if the source but not the result has it."""
    note: str | None = None
    """What whoever loads it should know."""

    @property
    def templates(self) -> tuple[str, ...]:
        """Code that is copied into the result for it."""
        return (TEMPLATE,) if self.ours else ()


def read_tokenizer(source: Source, config: Config, *, code: bool = True) -> Tokenizer:
    """Looks at a source's tokenizer files and its config.

    Args:
        source: of a Hub repository, tokenizer_config.json is downloaded.
        config: its config.json.
        code: whether the result may hold code at all.

    Raises:
        SourceError: a tokenizer_config.json that is no JSON object.
    """
    settings: dict[str, Any] = {}
    if TOKENIZER_CONFIG in source.files:
        source.fetch([TOKENIZER_CONFIG])
        settings = read_object(source.folder / TOKENIZER_CONFIG)
    reference = _reference(settings, config)
    if reference is None:
        files = any(name in VOCABULARIES or name.endswith(VOCABULARY_ENDS) for name in source.files)
        if files or settings.get("tokenizer_class"):
            return Tokenizer()
        return _missing("the source has no tokenizer files")
    name = reference.rpartition(".")[2]
    known = KNOWN.get(name) if code else None
    if known is None:
        name = plain_text(name)
        repository, _, _ = reference.rpartition("--")
        elsewhere = plain_text(repository or source.repo_id or source.name)
        return Tokenizer(
            here=False,
            elsewhere=elsewhere,
            note=f"the tokenizer, {name}, is the source's own code, which is not copied: load it from "
            f"{elsewhere} (AutoTokenizer.from_pretrained, trust_remote_code=True), if it runs on your "
            "transformers",
        )
    if known.vocabulary not in source.files:
        return _missing(f"the source has no {known.vocabulary}, which its tokenizer, {name}, reads")
    module = TEMPLATE.removesuffix(".py")
    mapped = {AUTO: [f"{module}.{known.ours}", None]}
    return Tokenizer(
        ours=known.ours,
        settings={**settings, "auto_map": mapped, "tokenizer_class": known.ours},
        note=f"the tokenizer is {known.ours} of {TEMPLATE}, which stands for the source's {name} and gives "
        "its ids; it needs trust_remote_code=True and the sentencepiece package",
    )


def our_class(settings: Config) -> str | None:
    """The class of ``TEMPLATE`` that a converted repository's tokenizer_config.json names; None if none."""
    for known in KNOWN.values():
        if _reference(settings, {}) == f"{TEMPLATE.removesuffix('.py')}.{known.ours}":
            return known.ours
    return None


def _missing(what: str) -> Tokenizer:
    return Tokenizer(here=False, note=f"{what}: load the tokenizer that the source's card names")


def _reference(settings: Config, config: Config) -> str | None:
    """What names the tokenizer's class in a repository's code, ``module.Class``; None if nothing does."""
    for mapped in (settings.get("auto_map"), config.get("auto_map")):
        # An old tokenizer_config.json has the classes' names there at once: the slow one, the fast one.
        names = mapped.get(AUTO) if isinstance(mapped, dict) else mapped
        for name in names if isinstance(names, list) else [names]:
            if isinstance(name, str):
                return name
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    return named if isinstance(named, str) and named in KNOWN else None
