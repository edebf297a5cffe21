"""How ``eval`` makes one vector of a text: as the repository's files for sentence-transformers say.

Without these files it is the mean, as in JinaBERT's own ``encode`` and in DNABERT-2's README. Anything that
is not computed here is refused, since another vector than the user's would be measured.
"""

from __future__ import annotations

from pathlib import Path

from converter.errors import UnsupportedModel
from converter.source.base import plain_text
from converter.source.jsonfile import read_object
from converter.source.pooling import Pooling, read_pooling

SETTINGS, SENTENCE = "config_sentence_transformers.json", "sentence_bert_config.json"
MEAN = Pooling(("mean",), normalised=False)


def pooling_of(folder: Path) -> Pooling:
    """The pooling of the repository in ``folder``.

    Raises:
        UnsupportedModel: its embeddings are made in a way that is not computed here.
        SourceError: a file is damaged.
    """
    found = read_pooling(folder)
    if found is None:
        return MEAN
    if (folder / SETTINGS).is_file():
        settings = read_object(folder / SETTINGS)
        prompts = settings.get("prompts")
        if settings.get("default_prompt_name") or (isinstance(prompts, dict) and any(prompts.values())):
            raise UnsupportedModel(
                f"{SETTINGS} puts prompts before texts, which eval does not; remove them, or put them into "
                "the texts yourself"
            )
        if settings.get("similarity_fn_name") not in (None, "cosine"):
            raise UnsupportedModel(
                f"{SETTINGS} scores by {plain_text(settings['similarity_fn_name'])}; only cosine is "
                "computed here"
            )
    if (folder / SENTENCE).is_file() and read_object(folder / SENTENCE).get("do_lower_case"):
        raise UnsupportedModel(f"{SENTENCE} lower-cases texts before the tokenizer, which eval does not")
    return found
