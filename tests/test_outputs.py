"""A folder of small files: all are written, or none, and only in that folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from converter.errors import OutputError
from converter.result.outputs import check_folder, write_files

FILES = {"a.json": b"{}", "b.csv": b"1,2"}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_nothing_is_written_beside_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a mount point, which files cannot be moved into; its parent belongs to somebody else."""
    place = tmp_path / "out"
    place.mkdir()
    (place / "a.json").write_bytes(b"old")
    (place / "mine.txt").write_bytes(b"mine")
    moved = []
    replace = Path.replace

    def same_file_system(self: Path, target: Path) -> Path:
        moved.append(self)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", same_file_system)
    checked = check_folder(place, overwrite=True)
    assert write_files(checked, FILES) == [place / name for name in FILES]
    assert all(path.is_relative_to(place) for path in moved)
    assert len(moved) == len(FILES)
    assert contents(place) == {**FILES, "mine.txt": b"mine"}
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("made", [True, False])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool) -> None:
    place = tmp_path / "out"
    if not made:
        place.mkdir()
        (place / "a.json").write_bytes(b"old")
    write_bytes = Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        if self.name == "b.csv":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_bytes(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_files(check_folder(place, overwrite=True), FILES)
    if made:
        assert list(tmp_path.iterdir()) == []
    else:
        assert contents(place) == {"a.json": b"old"}


def test_parents_are_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    place = check_folder(tmp_path / "a/b", overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    write_files(place, {"a.json": b"new"})
    assert contents(place) == {"a.json": b"new"}
    with pytest.raises(OutputError, match="not a folder"):
        check_folder(tmp_path / "file/b", overwrite=False)
