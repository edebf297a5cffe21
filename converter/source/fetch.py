"""What of a source's files is not on this machine yet: how much it is, and its download."""

from __future__ import annotations

from collections.abc import Iterable

from converter.source.source import Source
from converter.source.weight_files import fetch_weights, is_weight_file


def fetch(source: Source, names: Iterable[str]) -> None:
    """Makes files available in ``folder`` for those that open them there by name, and checks them.

    Files of a Hub repository are downloaded. Raises ``SourceError`` for what ``Source.open`` or
    ``fetch_weights`` refuses.
    """
    for name in names:
        if is_weight_file(name):
            fetch_weights(source, name)
        else:
            source.open(name).close()


def bytes_to_download(source: Source, names: Iterable[str]) -> int:
    """Bytes of a source's files that the Hub cache lacks, without a request; an unknown size counts as 0."""
    if source.local:
        return 0
    sizes = {**source.files, **(source.nested or {})}
    lacking = [name for name in names if not (source.folder / name).is_file()]
    return sum(sizes.get(name) or 0 for name in lacking)
