"""The section about graphs in a converted repository's card."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from converter.onnx.options import QUANTISED, OnnxOptions

if TYPE_CHECKING:
    from converter.onnx.validation import GraphReport, ProviderReport, ValidationReport

SECTION = re.compile(r"\n## ONNX\n.*?(?=\n## |\Z)", re.DOTALL)

GENAI = """
With [onnxruntime-genai](https://github.com/microsoft/onnxruntime-genai):

```python
import onnxruntime_genai as og

model = og.Model("PATH/TO/THIS/REPOSITORY")
parameters = og.GeneratorParams(model)
parameters.set_search_options(max_length=4096)
generator = og.Generator(model, parameters)
generator.append_tokens(token_ids)  # from the tokenizer; several rows are padded on the right
while not generator.is_done():
    generator.generate_next_token()
print(generator.get_sequence(0))
```
"""


def with_section(
    text: str, options: OnnxOptions, dtype: str, files: Iterable[str], report: ValidationReport | None
) -> str:
    """A repository's card with the section about ONNX, in place of an older one.

    Args:
        text: the card.
        options: what graph was asked for.
        dtype: what ``native`` came to.
        files: names of what is written.
        report: of the graphs' validation, if there was one.
    """
    rest = SECTION.sub("", text).rstrip("\n")
    return f"{rest}\n{section(options, dtype, files, report)}"


def section(options: OnnxOptions, dtype: str, files: Iterable[str], report: ValidationReport | None) -> str:
    """The section's text."""
    names = list(files)
    kind = {
        "ort": "onnxruntime's GroupQueryAttention with ALiBi folded into extra channels: caches are "
        "[batch, heads, length, head size + 8], and past and present may share one buffer",
        "portable": "standard ONNX operators only: caches are [batch, heads, length, head size]",
    }[options.profile]
    lines = ["", "## ONNX", "", f"Profile `{options.profile}`: {kind}.", ""]
    for name in names:
        if name.endswith("/model.onnx"):
            lines.append(f"- `{name}`: {dtype}, with its own copy of the weights beside it")
        elif name == "model.onnx":
            lines.append(f"- `{name}`: {dtype}, over the weights in the safetensors")
        elif name.endswith(".onnx"):
            lines.append(f"- `{name}`: float32 over the same weights, for CPUs")
    if options.last_logits:
        lines.append("- logits are those of each row's last token only")
    lines.append("")
    for graph in report.graphs if report else ():
        for place in graph.providers:
            note = f", {place.note}" if place.note else ""
            lines.append(f"`{graph.file}` ran on {', '.join(place.ran)}{note}: {_worst(graph, place)}.")
    if report:
        scope = report.graphs[0].extent
        lines += ["", f"Compared with the torch model in float32 ({scope}); see `onnx_validation.json`."]
    text = "\n".join(lines).rstrip("\n") + "\n"
    return text + (GENAI if "genai_config.json" in names else "")


def _worst(graph: GraphReport, place: ProviderReport) -> str:
    worst = max((check.difference or 0.0 for check in place.checks), default=0.0)
    if graph.dtype in QUANTISED:
        return f"root mean square of the differences at most {worst:.1e} of the logits'"
    return f"largest difference {worst:.1e} of the largest logit"
