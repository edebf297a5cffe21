"""The section about graphs in a converted repository's card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from converter.onnx.files import REPORT
from converter.onnx.options import ENTRIES
from converter.scaling.scaling import read_scaling
from converter.source.sentence_transformers import SENTENCES

if TYPE_CHECKING:
    from converter.onnx.describe import Description
    from converter.onnx.report import ValidationReport

PROFILES = """
Profile `ort`: operators of onnxruntime; caches are [batch, heads, length, head size + {}, rounded up to a
multiple of 8], and past and present may share one buffer. Profile `portable`: standard ONNX operators, and
com.microsoft's MatMulNBits for quantised weights; caches are [batch, heads, length, head size]. Only language
models have caches.
"""
JAVASCRIPT = {
    "fp32": "fp32",
    "fp16": "fp16",
    "int8": "q8",
    "int4": "q4",
    "int4-fp16": "q4f16",
    "w8a8": "int8",
}
"""dtype of a graph with its own weights -> the ``dtype`` of transformers.js, which knows no others."""
RUN = """
import { AutoConfig, env, pipeline } from "@huggingface/transformers";

env.allowRemoteModels = false; // drop this line if you give a Hub id
const name = "./";
const stored = await AutoConfig.from_pretrained(name);
const config = { ...stored, CHANGES };
const run = await pipeline("TASK", name, { config, OPTIONS });
console.log(await run(INPUT));
"""
INPUTS = {
    "text-generation": '"A text", { max_new_tokens: 20, add_special_tokens: true }',
    "feature-extraction": '"A text."',
    "fill-mask": "`A ${run.tokenizer.mask_token} text.`",
    "text-classification": '"A text."',
    "token-classification": '"A text."',
    "question-answering": '"A question?", "A text."',
}
"""Task -> what its pipeline is given; by itself, it generates without the special tokens before a text."""
LAYERS = "n_layer: stored.n_layer ?? stored.n_layers ?? stored.num_hidden_layers"
DECODER, OTHER = f'model_type: "jais", multi_query: false, {LAYERS}', 'model_type: "bert"'
"""Types that transformers.js knows, for graphs with a cache, whose inputs' names it computes, and without."""


def section(graphs: Mapping[str, Description], report: ValidationReport | None, served: bool) -> str:
    """The section's text about all graphs, Markdown without the title.

    ``report`` is what validation found of the new ones, and ``served`` says whether there is a new
    genai_config.json.
    """
    lines = [f"- `{name}`: {_described(made)}" for name, made in graphs.items()]
    any_graph = next(iter(graphs.values()))
    channels = read_scaling(any_graph.alibi_scaling).folded_channels
    lines += PROFILES.format(channels).splitlines()
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
    lines += _in_javascript(graphs)
    if report:
        scope = report.graphs[0].extent
        lines += ["", f"Compared with the torch model in float32 ({scope}); see `{REPORT}`."]
    return "\n".join(lines) + "\n"


def _in_javascript(graphs: Mapping[str, Description]) -> list[str]:
    """What runs a graph in transformers.js; of several one with its own weights, which the Hub can serve."""
    known = {
        name: made
        for name, made in graphs.items()
        if made.task and made.dtype in (JAVASCRIPT if made.standalone else ("fp32",))
    }
    if not known:
        return []
    name, made = max(known.items(), key=lambda graph: graph[1].standalone)
    task, cached = str(made.task), made.task == "text-generation"
    options, where = f'dtype: "{JAVASCRIPT[made.dtype]}"', ""
    if not made.standalone:
        options += f', subfolder: "", model_file_name: "{name.removesuffix(".onnx")}"'
        where = " These lines are for Node and this folder: elsewhere, export with `--onnx-standalone`."
    elif cached:
        options += ", use_external_data_format: true"
    code = RUN.replace("CHANGES", DECODER if cached else OTHER).replace("OPTIONS", options)
    return [
        "",
        "transformers.js does not know the type of this model, so hand it the config with one that it knows. "
        f"Leave `config.json` as it is: other programs would run the model unscaled.{where}",
        "",
        f"```js{code.replace('TASK', task).replace('INPUT', INPUTS[task])}```",
    ]


def _described(made: Description) -> str:
    parts = [made.dtype, f"profile `{made.profile}`", *[f"task `{made.task}`"] * bool(made.task)]
    parts += ["calibrated on a text (GPTQ)"] * made.calibrated
    parts += ["logits of each row's last token only"] * made.last_logits
    parts += ["with its own weights" if made.standalone else "over the weights in the safetensors"]
    if (made.profile, made.computes_in) == ("ort", "fp16"):
        held = read_scaling(made.alibi_scaling).float16_length
        if held is not None:
            parts.append(f"for up to {held} tokens: more give NaN in float16")
    parts += [f"the output `{SENTENCES}` is one vector of each text: {made.pooling}"] if made.pooling else []
    return ", ".join(parts)
