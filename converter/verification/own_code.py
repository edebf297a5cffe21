"""Checks that the first layers, with real weights and unscaled slopes, agree with the source's own code.

That code runs in a separate process (``own_code_process``), which gets no token, has a temporary cache of
modules, and cannot write to the command's output. It is not sandboxed: it has the user's rights and can read
what the user can, such as a ``--token`` on the run's command line. Most such code was written for older
versions of transformers. If it does not run, the check is skipped and says so. If it runs and computes
something else, the check fails, since one of the two is not the model that was trained.

Rows are passed one by one, without padding or mask: such codes treat padded tokens differently, and some take
no mask. ``paths`` checks how the converted model handles padding.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import converter
from converter.config import Config
from converter.errors import VerificationError
from converter.families.base import LANGUAGE_MODEL
from converter.source.remote_code import CodeClass, OwnCode
from converter.verification.check import Check, Context
from converter.verification.patched import Patched, build
from converter.verification.slice import TOLERANCE, Slice

NAME = "own code"
PROCESS = "converter.verification.own_code_process"
SECONDS = 600
"""Code that takes longer than this is considered hung."""
LONGEST = 300
"""Most characters of the code's error message that are shown."""
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")
ROUNDED = 0.1
"""Tolerance for code that rounds the bias to bfloat16, even in a float32 model."""
PATHS = re.compile(r"""(?<![^\s('"])\(?(?:[A-Za-z]:)?(?:[/\\][^\s/\\]+){2,}""")
"""Paths on this machine, which some error messages contain."""
REQUEST, OUTPUTS, FAILURE = "request.json", "outputs.safetensors", "failure.txt"


@torch.no_grad()
def check(patched: Patched, context: Context) -> Check | None:
    """Runs a slice of the checkpoint through the source's own class and through the patched one.

    Compares the logits if the checkpoint has a language model's head, else the hidden states.

    Raises:
        VerificationError: the two differ; the message says by how much.
    """
    family, own_code = patched.family, context.own_code
    if own_code is None:  # the user does not trust it
        return None
    if own_code.missing is not None:
        return Check(NAME, own_code.missing, skipped=True)
    auto = choose(patched, own_code)
    if auto is None:
        named = ", ".join(sorted(own_code.classes))
        return Check(NAME, f"the source's own code has no class to compare with, only {named}", skipped=True)
    code = own_code.classes[auto]
    title = f"the source's own {code.reference.rpartition('.')[2]}"
    origins = {found.origin for found in run_classes(own_code, auto).values() if found.origin}
    title += f" ({', '.join(sorted(origins))})" if origins else ""
    part = Slice.of(patched)
    found = run(part, context.source_config, own_code, auto)
    if isinstance(found, str):
        import transformers

        return Check(
            NAME, f"{title} does not run on transformers {transformers.__version__}: {found}", skipped=True
        )

    config = patched.build_config(alibi_scaling=None)
    part.shrink(config)
    ours = build(getattr(patched.modeling, f"Ntk{family.camel}{family.heads[auto]}"), config, "meta")
    missing = part.fill(ours)
    if missing and family.heads[auto] != "Model":
        return Check(
            NAME, f"{title} has a head that the checkpoint does not store ({missing[0]})", skipped=True
        )
    differences = []
    for row, expected in zip(part.ids, found, strict=True):
        actual = result(ours(row[None])).float()
        if actual.shape != expected.shape:
            shapes = f"{list(expected.shape)}, not {list(actual.shape)}"
            return Check(NAME, f"{title} returns a tensor of shape {shapes}", skipped=True)
        differences.append((expected - actual).abs().max() / expected.abs().max())
    worst = float(torch.stack(differences).max())  # NaN if any is; NaN fails the comparison below
    tolerance = ROUNDED if family.rounded_bias else TOLERANCE
    if not worst < tolerance:
        raise VerificationError(
            f"with scale 1, the output of {part.which} differs from that of {title} by {worst:.2e} "
            f"(relative; at most {tolerance:g}): one of the two is not the model that was trained; please "
            "report it"
        )
    return Check(
        NAME,
        f"with the real weights and scale 1, the output of {part.which} agrees with that of {title} "
        f"in float32; largest relative difference {worst:.1e}",
    )


def choose(patched: Patched, own_code: OwnCode) -> str | None:
    """The auto class to compare: the language model's if the checkpoint has one, else the bare model's."""
    family = patched.family
    language_model = f"AutoModel{LANGUAGE_MODEL[family.kind]}"
    wanted = [language_model] if patched.config["architectures"][0] == family.language_model else []
    return next((auto for auto in (*wanted, "AutoModel") if auto in own_code.classes), None)


def run_classes(own_code: OwnCode, auto: str) -> dict[str, CodeClass]:
    """The classes whose code runs when ``auto`` is compared."""
    return {key: found for key, found in own_code.classes.items() if key in ("AutoConfig", auto)}


def run(part: Slice, source_config: Config, own_code: OwnCode, auto: str) -> list[torch.Tensor] | str:
    """What the source's own class computes for each row, in float32; or the reason why it does not run."""
    with tempfile.TemporaryDirectory(prefix="ntk-convert-own-code-") as temporary:
        folder = Path(temporary)
        request = {
            "repository": str(part.patched.folder.resolve()),
            "config": dict(source_config),
            "classes": {
                key: [str(found.folder.resolve()), found.reference]
                for key, found in run_classes(own_code, auto).items()
            },
            "auto": auto,
        }
        (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", PROCESS, temporary, str(os.getpid())]
        try:
            process = subprocess.run(
                command,
                cwd=folder,
                env=environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"it did not finish within {SECONDS} seconds"
        if (folder / FAILURE).is_file():
            return one_line((folder / FAILURE).read_text(encoding="utf-8"))
        if not (folder / OUTPUTS).is_file():
            code = process.returncode
            return (
                f"it was killed by signal {-code}" if code < 0 else f"it ended its process with status {code}"
            )
        outputs = load_file(folder / OUTPUTS)
        return [outputs[str(row)].clone() for row in range(len(outputs))]


def environment(folder: Path) -> dict[str, str]:
    """An environment without token or connection to the Hub, and with its own folder for modules."""
    package = str(Path(converter.__file__).resolve().parent.parent)
    kept = {key: value for key, value in os.environ.items() if key not in SECRETS}
    paths = [package, *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_TOKEN_PATH": str(folder / "no-token"),
        "HF_HUB_OFFLINE": "1",
    }


def one_line(text: str) -> str:
    """The code's error message in a form that is safe in a card and on a terminal."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    words = " ".join(PATHS.sub("", plain).split())
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}..."


def result(output: Any) -> torch.Tensor:
    """The logits of a model's output, or its hidden states if it has none."""
    for name in ("logits", "last_hidden_state"):
        found = getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found
    first: torch.Tensor = output[0]
    return first
