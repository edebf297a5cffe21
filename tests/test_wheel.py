"""A wheel works outside the checkout, templates included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_wheel_converts_outside_the_checkout(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True)
    [wheel] = tmp_path.glob("ntk_convert-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    source = tiny.FACTORIES["mpt"](tmp_path / "source", 12)
    code = "import converter.cli; print(converter.__file__); converter.cli.main()"
    words = [str(source), "--scale", "2", "--out", str(tmp_path / "out")]
    result = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(tmp_path / "site")), "the checkout was run, not the wheel"
    copied = (tmp_path / "out" / "ntk_alibi.py").read_bytes()
    assert copied == (tmp_path / "site" / "converter" / "templates" / "ntk_alibi.py").read_bytes()
    assert copied == (ROOT / "templates" / "ntk_alibi.py").read_bytes()
