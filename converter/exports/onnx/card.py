"""The section about graphs in a converted repository's card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from converter.exports.onnx.choices import ENTRIES, QUANTISED, Profile
from converter.exports.onnx.files import GRAPH
from converter.exports.onnx.options import OnnxOptions
from converter.source.sentence_transformers import SENTENCES, Pooling

if TYPE_CHECKING:
    from converter.exports.onnx.describe import Description
    from converter.exports.onnx.report import GraphReport, ProviderReport, ValidationReport

TITLE = "ONNX"
"""Of the section."""
GENAI = """
With [onnxruntime-genai](https://github.com/microsoft/onnxruntime-genai):

```python
import onnxruntime_genai as og

model = og.Model(".")  # the local folder of these files
parameters = og.GeneratorParams(model)
parameters.set_search_options(max_length={max_length})  # prompt and answer; at most {context_length}
generator = og.Generator(model, parameters)
generator.append_tokens(token_ids)  # from the tokenizer; several rows are padded on the right
while not generator.is_done():
    generator.generate_next_token()
print(generator.get_sequence(0))
```
"""
MAX_LENGTH = 4096
"""Tokens: ``max_length`` in the example, for a graph that genai gives that many."""


def section(
    options: OnnxOptions,
    dtype: str,
    pooling: Pooling | None,
    graphs: Iterable[str],
    cached: bool,
    others: Mapping[str, Description],
    report: ValidationReport | None,
    context_length: int | None,
) -> str:
    """The section's text, Markdown without the title.

    ``others`` are graphs that were there before and stay; ``context_length`` is that of genai_config.json, in
    tokens, None if there is no such file.
    """
    lines = [f"Profile `{options.profile}`: {_kind(options.profile, dtype, cached=cached)}.", ""]
    for name in graphs:
        if options.copies_weights:
            how = ", calibrated on a text (GPTQ)" if options.calibrate else ""
            lines.append(f"- `{name}`: {dtype}{how}, with its own copy of the weights")
        elif name == GRAPH:
            lines.append(f"- `{name}`: {dtype}, over the weights in the safetensors")
        else:
            lines.append(f"- `{name}`: float32 over the same weights, for CPUs")
    lines += [f"- `{name}`: {made.dtype}, from an earlier export" for name, made in others.items()]
    if pooling:
        lines.append(f"- the output `{SENTENCES}` is one vector of each text: {pooling}")
    if options.task:
        lines.append(f"- task: `{options.task}`")
    if options.last_logits:
        lines.append("- logits are those of each row's last token only")
    entries = ", ".join(f"`{name}` = `{value}`" for name, value in ENTRIES.items())
    lines += [
        f"- on a CPU, give onnxruntime's sessions the entry {entries}: some processors then are faster on "
        "long texts",
        "",
    ]
    for graph in report.graphs if report else ():
        for place in graph.providers:
            note = f", {place.note}" if place.note else ""
            lines.append(f"`{graph.file}` ran on {', '.join(place.ran)}{note}: {_worst(graph, place)}.")
    if report:
        scope = report.graphs[0].extent
        lines += ["", f"Compared with the torch model in float32 ({scope}); see `onnx_validation.json`."]
    text = "\n".join(lines).rstrip("\n") + "\n"
    if context_length is None:
        return text
    return text + GENAI.format(max_length=min(MAX_LENGTH, context_length), context_length=context_length)


def _kind(profile: Profile, dtype: str, *, cached: bool) -> str:
    """What the operators and caches of a profile are."""
    if profile == "ort":
        if not cached:
            return "operators of onnxruntime where they are faster, no cache"
        return (
            "onnxruntime's GroupQueryAttention with ALiBi folded into extra channels: caches are [batch, "
            "heads, length, head size + 8, rounded up to a multiple of 8], and past and present may share "
            "one buffer"
        )
    more = ", and com.microsoft's MatMulNBits for quantised weights" if dtype in QUANTISED else " only"
    caches = ": caches are [batch, heads, length, head size]" if cached else ", no cache"
    return f"standard ONNX operators{more}{caches}"


def _worst(graph: GraphReport, place: ProviderReport) -> str:
    worst = max((check.difference or 0.0 for check in place.checks), default=0.0)
    if graph.dtype in QUANTISED:
        # The only number in there: what the quantised weights change.
        [loss] = (check.difference for check in graph.structure if check.difference is not None)
        return (
            f"root mean square of the differences at most {worst:.1e} of the results'; the quantised weights "
            f"themselves change the results by {loss:.1e}"
        )
    return f"largest difference {worst:.1e} of the largest logit"
