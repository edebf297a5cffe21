"""``--trust-remote-code``: a source's own code is run where that was asked for, compared, and never else.

The code is written here: modeling files that reuse this project's templates (or transformers' class) and
leave a trace when they are imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from converter import VerificationError
from converter.result.converted import open_converted
from converter.source import remote_code
from converter.source.open import open_source
from converter.verification import Check
from converter.verification import verify as run_checks
from tests import forks
from tests.conftest import edit_json, fingerprint
from tests.dealt import quick
from tests.patched import Convert

TEMPLATES = Path(__file__).parent.parent / "templates"
COPIED = (
    "ntk_alibi.py",
    "ntk_attention.py",
    "ntk_cache.py",
    "ntk_config.py",
    "ntk_decoder.py",
    "ntk_heads.py",
    "ntk_plan.py",
)
TRACE = """
    import os
    from pathlib import Path
    print("noise")
    os.write(2, b"more noise")
    Path({trace!r}).write_text(os.environ.get("HF_TOKEN", "none"))
"""
SUBCLASS = """
    from transformers import MptConfig, MptForCausalLM

    class OwnConfig(MptConfig):
        pass

    class OwnForCausalLM(MptForCausalLM):
        config_class = OwnConfig
"""


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of own code start within milliseconds."""
    monkeypatch.setattr("converter.verification.own_code.subprocess", forks)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Where own code writes when it is imported."""
    return tmp_path / "trace"


def add_code(source: Path, code: str, trace: Path, **auto_map: str) -> None:
    """Gives a checkpoint a modeling_own.py."""
    text = textwrap.dedent(TRACE.format(trace=str(trace))) + textwrap.dedent(code)
    (source / "modeling_own.py").write_text(text)
    named = auto_map or {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    edit_json(source / "config.json", {"auto_map": named})


def add_template(source: Path, family: str, camel: str, trace: Path) -> None:
    """Gives a checkpoint a copy of our own template as its code."""
    for file in (*COPIED, f"configuration_ntk_{family}.py", f"modeling_ntk_{family}.py"):
        shutil.copyfile(TEMPLATES / file, source / file)
    with (source / f"modeling_ntk_{family}.py").open("a") as modeling:
        modeling.write(textwrap.dedent(TRACE.format(trace=str(trace))))
    named = {
        "AutoConfig": f"configuration_ntk_{family}.Ntk{camel}Config",
        "AutoModelForCausalLM": f"modeling_ntk_{family}.Ntk{camel}ForCausalLM",
    }
    edit_json(source / "config.json", {"auto_map": named})


def verify(source: Path, out: Path, *, trust: bool = True, cache_dir: Path | None = None) -> dict[str, Check]:
    """The checks of a conversion in ``out``, by name."""
    opened = open_source(str(source))
    config = opened.config()
    found = remote_code.find(opened, config, token=None, cache_dir=cache_dir) if trust else None
    return {check.name: check for check in run_checks(open_converted(out), config, found)}


@pytest.fixture
def prepared(tmp_path: Path, converted: Convert) -> Callable[..., tuple[Path, Path]]:
    """``prepared(family, **changes)``: a source and its conversion."""

    def prepare(family: str, **changes: Any) -> tuple[Path, Path]:
        out = converted(family, 12, "ntk", **changes)
        return tmp_path / "source", out

    return prepare


Prepare = Callable[..., tuple[Path, Path]]


def test_without_the_flag_nothing_of_the_source_runs(prepared: Prepare, trace: Path) -> None:
    source, out = prepared("mpt")
    add_code(source, SUBCLASS, trace)
    assert "own code" not in verify(source, out, trust=False)
    assert not trace.exists()


def test_right_code_passes_beside_the_stock_model(
    prepared: Prepare, trace: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the process is started as it is by users
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    source, out = prepared("mpt")
    add_code(source, SUBCLASS, trace)
    before, modules, files = fingerprint(source), set(sys.modules), fingerprint(out)
    capfd.readouterr()
    checks = verify(source, out)
    assert list(checks)[-2:] == ["stock model", "own code"]
    assert not checks["own code"].skipped, checks["own code"].detail
    assert "agrees with that of the source's own OwnForCausalLM in float32" in checks["own code"].detail
    assert trace.read_text() == "none"  # it ran, and had no token
    assert capfd.readouterr() == ("", "")
    assert fingerprint(source) == before
    assert fingerprint(out) == files
    assert not any("modeling_own" in name for name in set(sys.modules) - modules)
    assert not list(Path(os.environ["HF_HOME"]).glob("modules/**/modeling_own.py"))


@pytest.mark.parametrize(
    ("family", "camel", "streamed"),
    [
        ("baichuan", "Baichuan", False),
        pytest.param("refact", "Refact", True, marks=pytest.mark.slow),
        pytest.param("baichuan", "Baichuan", True, marks=pytest.mark.slow),
        pytest.param("refact", "Refact", False, marks=pytest.mark.slow),
    ],
)
def test_code_of_families_that_transformers_does_not_know(
    prepared: Prepare,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    camel: str,
    *,
    streamed: bool,
) -> None:
    if streamed:  # on this side only
        monkeypatch.setattr("converter.verification.slice.LARGEST_LAYER", 0)
    source, out = prepared(family, **({"norm_head": True} if family == "baichuan" else {}))
    add_template(source, family, camel, trace)
    checks = verify(source, out)
    assert checks["stock model"].skipped
    assert not checks["own code"].skipped, checks["own code"].detail
    assert trace.exists()


def test_a_model_without_a_head_and_a_missing_pooler(prepared: Prepare, trace: Path) -> None:
    """What the checkpoint does not store is no matter where nothing is computed with it."""
    code = """
        from torch import nn
        from transformers import MptConfig, MptModel

        class OwnModel(MptModel):
            def __init__(self, config):
                super().__init__(config)
                self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
    """
    source, out = prepared("mpt")
    add_code(source, code, trace, AutoModel="modeling_own.OwnModel")
    check = verify(source, out)["own code"]
    assert not check.skipped, check.detail


WRONG = {
    "slopes": ("ntk_alibi.py", "2.0 ** (-bias_max * i / whole)", "1.8 ** (-bias_max * i / whole)"),
    "scale": ("modeling_ntk_baichuan.py", "** -0.5", "** -0.45"),
    "activation": ("modeling_ntk_baichuan.py", "F.silu", "F.gelu"),
    "head": ("modeling_ntk_baichuan.py", "if config.norm_head", "if False"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_code_that_computes_something_else_fails(prepared: Prepare, trace: Path, mistake: str) -> None:
    source, out = prepared("baichuan", norm_head=True)
    add_template(source, "baichuan", "Baichuan", trace)
    file, before, after = WRONG[mistake]
    text = (source / file).read_text()
    assert before in text
    (source / file).write_text(text.replace(before, after))
    with pytest.raises(VerificationError, match="that of the source's own NtkBaichuanForCausalLM by"):
        verify(source, out)


BROKEN = {
    "import": ("from transformers import no_such_name_anywhere", "ImportError: cannot import name"),
    "package": ("import a_package_that_is_not_there", "not found in your environment: a_package_that"),
    "syntax": ("def broken(:", "SyntaxError"),
    "class": ("class Other: pass", "AttributeError"),
    "exit": ("import sys; sys.exit('bye')", "SystemExit: bye"),
    "crash": ("import os; os._exit(7)", "it ended its process with status 7"),
    "kill": ("import os; os.kill(os.getpid(), 9)", "it was killed by signal 9"),
    "paths": ("raise OSError('no file (/home/somebody/model.bin) here')", "OSError: no file here"),
    "lines": ("raise ValueError('one\\ntwo\\x1b[31m' + 'x' * 1000)", "ValueError: one two [31mxx"),
    "constructor": (
        SUBCLASS + "        def __init__(self, config): raise TypeError('old')",
        "TypeError: old",
    ),
    "forward": (SUBCLASS + "        def forward(self, *args, **more): raise KeyError('cache')", "KeyError"),
    "tensors": (
        SUBCLASS
        + "        def __init__(self, config):\n"
        + "            super().__init__(config)\n"
        + "            self.lm_head = None\n"
        + "            import torch; self.transformer.extra = torch.nn.Linear(2, 2)\n"
        + "            self.transformer.norm_f = torch.nn.Sequential(self.transformer.norm_f)\n"
        + "            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)\n",
        "which the checkpoint does not store",
    ),
}


SLOW = ("package", "class", "exit", "crash", "kill", "paths", "lines", "tensors", "forward")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW else []) for kind in BROKEN]
)
def test_code_that_does_not_run_is_a_skipped_check(prepared: Prepare, trace: Path, kind: str) -> None:
    code, reason = BROKEN[kind]
    source, out = prepared("mpt")
    add_code(source, code, trace)
    check = verify(source, out)["own code"]
    assert check.skipped
    assert f"does not run on transformers {transformers.__version__}: " in check.detail
    assert reason in check.detail
    assert check.detail.isprintable()
    assert len(check.detail) < 450


@pytest.mark.parametrize(
    ("auto_map", "reason"),
    [
        ({}, "config names no code"),
        ({"AutoConfig": "modeling_own.OwnConfig"}, "config names no code"),
        ({"AutoModelForCausalLM": "no_such_file.Class"}, "the source has no no_such_file.py"),
        ({"AutoModelForCausalLM": "../../up.Class"}, "which names no class"),
        ({"AutoModelForCausalLM": ["a", "b"]}, "which names no class"),
        ({"AutoModelForSequenceClassification": "modeling_own.Own"}, "no class to compare with"),
        ({"AutoModelForCausalLM": "nobody/nothing-here--modeling_own.Own"}, "cannot be downloaded"),
    ],
    ids=str,
)
def test_code_that_is_not_there_is_a_skipped_check(
    prepared: Prepare, trace: Path, monkeypatch: pytest.MonkeyPatch, auto_map: Any, reason: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source, out = prepared("mpt")
    add_code(source, SUBCLASS, trace, AutoModel="x.Y")
    edit_json(source / "config.json", {"auto_map": auto_map})
    check = verify(source, out)["own code"]
    assert check.skipped
    assert reason in check.detail
    assert not trace.exists()


@pytest.mark.parametrize("only_config", quick([False, True], False))
def test_code_in_another_repository(
    prepared: Prepare, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, only_config: bool
) -> None:
    """From the cache here; test_hub.py's server stands for the Hub itself."""
    source, out = prepared("mpt")
    add_code(source, SUBCLASS, trace)
    cache = tmp_path / "cache" / "models--somebody--code"
    snapshot = cache / "snapshots" / ("ab" * 20)
    snapshot.mkdir(parents=True)
    shutil.copyfile(source / "modeling_own.py", snapshot / "modeling_own.py")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("ab" * 20)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    names = {"AutoConfig": "OwnConfig", "AutoModelForCausalLM": "OwnForCausalLM"}
    named = {auto: f"somebody/code--modeling_own.{name}" for auto, name in names.items()}
    if only_config:  # the check names what is run beside the class as well
        named["AutoModelForCausalLM"] = "modeling_own.OwnForCausalLM"
    else:
        (source / "modeling_own.py").unlink()
    edit_json(source / "config.json", {"auto_map": named})
    check = verify(source, out, cache_dir=tmp_path / "cache")["own code"]
    assert not check.skipped, check.detail
    assert "OwnForCausalLM (somebody/code at abababababab)" in check.detail


@pytest.mark.slow
def test_own_code_ends_with_its_run(prepared: Prepare, trace: Path, tmp_path: Path) -> None:
    """Even with one that was killed, and its folder goes too."""
    code = f"""
        import os, time
        from pathlib import Path
        Path({str(trace)!r}).write_text(str(os.getpid()))
        time.sleep(600)
    """
    source, _ = prepared("mpt")
    add_code(source, code, trace)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = [source, "--scale", "2", "--out", tmp_path / "other", "--trust-remote-code"]
    run = subprocess.Popen(
        [sys.executable, "-m", "converter", *map(str, words)],
        env={**os.environ, "TMPDIR": str(temporary)},
        cwd=TEMPLATES.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: trace.is_file() and trace.read_text().isdigit())
        assert any(temporary.iterdir())
    finally:
        run.kill()
        run.wait()
    pid = int(trace.read_text())
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())
    assert not any(temporary.glob("ntk-convert-own-code-*"))


def wait_for(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)
