"""The tokenizer of a checkpoint or of a converted repository."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import logging

from converter.errors import SourceError
from converter.source.jsonfile import read_object
from converter.source.tokenizer import TEMPLATE, TOKENIZER_CONFIG, our_class
from converter.verification.patched import Patched, templates


def load_tokenizer(folder: Path, name: str, patched: Patched | None) -> Any:
    """Loads the tokenizer in ``folder`` without running its repository's code.

    ``name`` is for messages; ``patched`` is the converted repository whose tokenizer it is, or None for a
    rotary model. Raises ``SourceError`` if it does not load.
    """
    settings = folder / TOKENIZER_CONFIG
    try:
        ours = our_class(read_object(settings)) if settings.is_file() else None
        with quiet():
            if ours is not None:
                with templates() as load:
                    return getattr(load(TEMPLATE.removesuffix(".py")), ours).from_pretrained(folder)
            # Pass the config, or transformers would look for one and may not know its class.
            known = {} if patched is None else {"config": patched.build_config()}
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **known)
    except Exception as error:  # a damaged file can raise anything
        reason = str(error).partition("\n")[0]
        raise SourceError(
            f"the tokenizer of {name} does not load ({type(error).__name__}: {reason})"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides transformers' progress bars and warnings, which would name temporary folders."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
