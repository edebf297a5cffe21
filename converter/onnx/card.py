"""The section about graphs in a converted repository's card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from converter.onnx.files import REPORT
from converter.onnx.options import ENTRIES
from converter.source.sentence_transformers import SENTENCES

if TYPE_CHECKING:
    from converter.onnx.describe import Description
    from converter.onnx.report import ValidationReport

TITLE = "ONNX"
"""Of the section."""
PROFILES = """
Profile `ort`: operators of onnxruntime; caches are [batch, heads, length, head size + 8, rounded up to a
multiple of 8], and past and present may share one buffer. Profile `portable`: standard ONNX operators, and
com.microsoft's MatMulNBits for quantised weights; caches are [batch, heads, length, head size]. Only language
models have caches.
"""


def section(graphs: Mapping[str, Description], report: ValidationReport | None, served: bool) -> str:
    """The section's text, Markdown without the title.

    Args:
        graphs: all graphs of the repository.
        report: what validation found of the new ones.
        served: whether there is a new genai_config.json.
    """
    lines = [f"- `{name}`: {_described(made)}" for name, made in graphs.items()]
    lines += PROFILES.splitlines()
    entries = ", ".join(f"`{name}` = `{value}`" for name, value in ENTRIES.items())
    lines += [
        "",
        f"On a CPU, give onnxruntime's sessions the entry {entries}: some processors then are faster on long "
        "texts.",
    ]
    if served:
        lines += [
            "[onnxruntime-genai](https://github.com/microsoft/onnxruntime-genai) reads `genai_config.json`: "
            "`onnxruntime_genai.Model(folder)`."
        ]
    if report:
        scope = report.graphs[0].extent
        lines += ["", f"Compared with the torch model in float32 ({scope}); see `{REPORT}`."]
    return "\n".join(lines) + "\n"


def _described(made: Description) -> str:
    parts = [made.dtype, f"profile `{made.profile}`", *[f"task `{made.task}`"] * bool(made.task)]
    parts += ["calibrated on a text (GPTQ)"] * made.calibrated
    parts += ["logits of each row's last token only"] * made.last_logits
    parts += ["with its own weights" if made.standalone else "over the weights in the safetensors"]
    parts += [f"the output `{SENTENCES}` is one vector of each text: {made.pooling}"] if made.pooling else []
    return ", ".join(parts)
