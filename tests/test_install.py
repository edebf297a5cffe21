"""Installed without a clone: the sdist, the wheel, and what installers make of the repository's address.

Every environment here is new, with nothing but what pyproject.toml asks for. The packages come from an index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from tests import tiny
from tests.hub_server import TOKEN, Account, HubServer

ROOT = Path(__file__).parent.parent
ADDRESS = f"git+{ROOT.as_uri()}"
TINY_BLOOM = ROOT / "examples" / "tiny-bloom"
UV = (sys.executable, "-m", "uv", "--quiet")
BUILD = (sys.executable, "-m", "build", "--no-isolation")

pytestmark = pytest.mark.slow
in_a_clone = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone, to install from")


@pytest.fixture
def uv_environment(tmp_path: Path) -> dict[str, str]:
    """Pinned versions, and torch's build for CPUs.

    That is found on PyTorch's index, or in the folders in which pip looks for wheels, if there are such.
    """
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    if folders:
        page = tmp_path / "index" / "torch" / "index.html"
        page.parent.mkdir(parents=True)
        wheels = [wheel for folder in folders for wheel in Path(folder).glob("torch-*.whl")]
        page.write_text("".join(f'<a href="{wheel.as_uri()}">{wheel.name}</a>\n' for wheel in wheels))
        torch = {
            "UV_FIND_LINKS": ",".join(folders),
            "UV_INDEX": f"pytorch-cpu={page.parent.parent.as_uri()}",  # as examples/convert_job.py calls it
        }
    else:
        torch = {"UV_TORCH_BACKEND": "cpu"}
    pinned = {"UV_CONSTRAINT": str(ROOT / "constraints.txt"), "UV_PYTHON": sys.executable}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | pinned | torch


def succeeds(*words: object, **options: object) -> str:
    """What a process prints, which must end well."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    succeeds(*BUILD, "--outdir", folder, ROOT)
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as files:
        return {name: files.read(name) for name in files.namelist()}


def test_the_checkout_builds_the_same_wheel_as_the_sdist(built: tuple[Path, Path], tmp_path: Path) -> None:
    succeeds(*BUILD, "--wheel", "--outdir", tmp_path, ROOT)
    [wheel] = tmp_path.glob("*.whl")
    assert contents(wheel) == contents(built[1])


def test_an_index_can_show_the_description(
    built: tuple[Path, Path], uv_environment: dict[str, str], tmp_path: Path
) -> None:
    succeeds(*UV, "tool", "run", "twine@7.0.0", "check", "--strict", *built, env=uv_environment, cwd=tmp_path)
    [metadata] = [data for name, data in contents(built[1]).items() if name.endswith("/METADATA")]
    text = HeaderParser().parsestr(metadata.decode()).get_payload()
    assert "ntk-convert bigscience/" in text
    assert "](" not in text, "a picture, or a link to a file, which an index does not have"


LOADED = """
import sys
from converter.cli import main
try:
    main()
finally:
    print(sorted({"torch", "transformers"} & {*sys.modules}), file=sys.stderr)
"""


def test_a_wheel_in_an_empty_environment(
    built: tuple[Path, Path], uv_environment: dict[str, str], tmp_path: Path
) -> None:
    """Nothing is missing there, neither packages nor templates, and nothing slow is imported early."""
    succeeds(*UV, "venv", tmp_path / "env", env=uv_environment)
    there = tmp_path / "env" / "bin"
    pip = (*UV, "pip", "install", "--python", there / "python")
    succeeds(*pip, built[1], env=uv_environment, cwd=tmp_path)
    assert succeeds(there / "python", "-c", "import torch; print(torch.version.cuda)") == "None\n"
    source = tiny.FACTORIES["mpt"](tmp_path / "source", 12)
    for words in (["--help"], ["inspect", source, "--scale", "2"]):
        run = subprocess.run(
            [there / "python", "-c", LOADED, *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        assert (run.returncode, run.stderr) == (0, "[]\n"), run.stderr
    succeeds(there / "ntk-convert", source, "--scale", "2", "--out", "out", cwd=tmp_path)
    copied = (tmp_path / "out" / "ntk_alibi.py").read_bytes()
    assert copied == (ROOT / "templates" / "ntk_alibi.py").read_bytes()


@in_a_clone
@pytest.mark.parametrize(
    "words",
    [
        (*UV, "tool", "run", "--from", ADDRESS, "ntk-convert"),
        # With uv, it installs as fast; with pip, it would take minutes.
        (*UV, "tool", "run", "--with", "uv", "pipx@1.18.4", "run", "--spec", ADDRESS, "ntk-convert"),
    ],
    ids=["uvx", "pipx"],
)
def test_a_run_from_the_address(
    words: tuple[str, ...], uv_environment: dict[str, str], tmp_path: Path
) -> None:
    homes = {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    printed = succeeds(*words, "inspect", TINY_BLOOM, env=uv_environment | homes, cwd=tmp_path)
    assert "8 of size 8" in printed


@in_a_clone
def test_pip_installs_from_the_address(tmp_path: Path) -> None:
    """Without what it needs, which the environment of the tests has."""
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    succeeds(*pip, "install", "--no-deps", "--target", tmp_path / "site", ADDRESS)
    code = "import converter.cli; print(converter.__file__); converter.cli.main()"
    paths = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    printed = succeeds(sys.executable, "-c", code, "inspect", TINY_BLOOM, cwd=tmp_path, env=paths)
    assert printed.startswith(str(tmp_path / "site")), "the checkout was run, not what was installed"
    assert (tmp_path / "site" / "converter" / "templates" / "ntk_alibi.py").is_file()


def test_the_job_in_an_environment_of_uv(
    hub: HubServer, environment: dict[str, str], uv_environment: dict[str, str], work: Path
) -> None:
    """Its packages are the newest ones, as its users get them."""
    hub.accounts[TOKEN] = Account("ada")
    hub.commit("org/tiny", tiny.FACTORIES["mpt"](work / "source", 12))
    names = ("HF_HOME", "HF_ENDPOINT", "HF_HUB_DISABLE_XET")
    there = {name: environment[name] for name in names} | {"HF_TOKEN": TOKEN, "OPTIONS": "--scale 2 --onnx"}
    asked = {"MODEL": "org/tiny", "TARGET": "ada/tiny-ntk"}
    script = (*UV, "run", ROOT / "examples" / "convert_job.py")
    succeeds(*script, env=uv_environment | there | asked, cwd=work)
    assert {"config.json", "model.onnx", "ntk_alibi.py"} <= {*hub.files("ada/tiny-ntk")}
