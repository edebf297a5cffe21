"""``python -m tests.versions.save FOLDER NAME...``: sources as installed libraries save them.

A source's tokenizer is loaded and saved. One of sentence-transformers has no code, so what was converted of
it is loaded and saved.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers

SPECIAL = "w30"
"""A word of the tiny vocabulary that becomes a further special token."""


def save(root: Path, name: str, library: str) -> None:
    """Writes a copy of a source that has what the installed libraries save, below ``root / library``."""
    source, plain, target = (root / place / name for place in ("sources", "plain", library))
    shutil.copytree(source, target)
    with tempfile.TemporaryDirectory() as temporary:
        saved = Path(temporary) / "saved"
        if (source / "modules.json").is_file():
            from sentence_transformers import SentenceTransformer

            encoder: Any = SentenceTransformer(str(plain), trust_remote_code=True, device="cpu")
            encoder.tokenizer.add_special_tokens(special())
            encoder.save(str(saved))
        elif list(source.glob("*.model")):  # its own class is remote code
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(plain, trust_remote_code=True)
            tokenizer.save_pretrained(saved)
        else:  # apart from config.json, which may name remote code
            alone = Path(temporary) / "alone"
            alone.mkdir()
            for path in source.glob("tokenizer*.json"):
                shutil.copy(path, alone)
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(alone)
            tokenizer.add_special_tokens(special())
            tokenizer.save_pretrained(saved)
        take(saved, target)


def special() -> dict[str, list[str]]:
    """The further special token, under its name in this version."""
    name = "additional_special_tokens" if transformers.__version__ < "5" else "extra_special_tokens"
    return {name: [SPECIAL]}


def take(saved: Path, source: Path) -> None:
    """Copies what was saved, without the model, its config and its code."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (source / name).unlink(missing_ok=True)
    for path in saved.rglob("*"):
        name = path.relative_to(saved)
        if path.is_file() and path.suffix in (".json", ".jinja") and str(name) != "config.json":
            (source / name).parent.mkdir(exist_ok=True)
            shutil.copy(path, source / name)


def main(root: Path, names: list[str]) -> None:
    for name in names:
        save(root, name, "oldest")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
