"""Write a model repository of Triton Inference Server for the graph of a converted repository.

    python examples/triton_repository.py ./jina-ntk models/jina
    python examples/triton_repository.py ./bloom-ntk models/bloom --slots 2 --length 2048 --at /bloom-ntk

A graph without a cache, such as an encoder's, is served by Triton's ONNX backend. Export it standalone. With
--pooled, its answer is one vector for each text.
The graph of a language model is served by Triton's Python backend, with triton_decoder.py. Triton then needs
DIR itself, and onnxruntime and tokenizers in its image.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import onnxruntime as ort
from generate_onnx import graph_file

TYPES = {"tensor(int64)": "TYPE_INT64", "tensor(float)": "TYPE_FP32"}
EXAMPLES = Path(__file__).parent

ENCODER = """\
name: "{name}"
backend: "onnxruntime"
default_model_filename: "{graph}"
max_batch_size: {batch}
{inputs}
{outputs}
# Requests of the same length that come within a millisecond run together.
dynamic_batching {{ max_queue_delay_microseconds: 1000 }}
instance_group [ {{ count: 1 }} ]
"""

DECODER = """\
name: "{name}"
backend: "python"
# Rows are slots of the model itself, see onnx_slots.py.
max_batch_size: 0
# One response for each token.
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }},
  {{ name: "max_new_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }}
]
output [
  {{ name: "token" data_type: TYPE_INT64 dims: [ 1 ] }}
]
# One process: its slots share the weights.
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters {{ key: "folder" value {{ string_value: "{folder}" }} }}
parameters {{ key: "slots" value {{ string_value: "{slots}" }} }}
parameters {{ key: "length" value {{ string_value: "{length}" }} }}
parameters {{ key: "queue" value {{ string_value: "{queue}" }} }}
"""


def write(folder: Path, out: Path, *, at: Path | None = None, graph: str | None = None, **sizes: int) -> None:
    """Writes ``out``, whose last part is the model's name in Triton.

    Args:
        at: where Triton finds ``folder``; for language models only.
        graph: the graph's file in ``folder``, if there are several.
        sizes: batch, slots, length and queue.

    Raises:
        RuntimeError: there is no graph, or one whose weights are in another file than its own.
        FileExistsError: ``out`` exists.
    """
    path = graph_file(folder, "cpu") if graph is None else folder / graph
    if not path.is_file():
        raise RuntimeError(f"no ONNX graph in {folder}; write one: ntk-convert export {folder}")
    options = ort.SessionOptions()
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs, outputs = session.get_inputs(), session.get_outputs()
    cached = any(item.name.startswith("past_key_values") for item in inputs)
    record = json.loads(session.get_modelmeta().custom_metadata_map.get("ntk_convert", "{}"))
    if not cached and not record.get("standalone"):
        raise RuntimeError(f"the weights of {path} are elsewhere; export with --onnx-standalone")
    (out / "1").mkdir(parents=True)
    if cached:
        for name in ("generate_onnx.py", "onnx_slots.py"):
            shutil.copyfile(EXAMPLES / name, out / "1" / name)
        shutil.copyfile(EXAMPLES / "triton_decoder.py", out / "1" / "model.py")
        config = DECODER.format(name=out.name, folder=(at or folder.resolve()).as_posix(), **sizes)
    else:
        for file in (path, path.with_name(f"{path.name}_data")):
            if file.is_file():
                shutil.copyfile(file, out / "1" / file.name)
        # Hidden states of all tokens are large. Where there is a vector of the text, it is all that is sent.
        vectors = [item for item in outputs if item.name == "sentence_embedding"]
        config = ENCODER.format(
            name=out.name,
            graph=path.name,
            inputs=tensors("input", inputs),
            outputs=tensors("output", vectors or outputs),
            **sizes,
        )
    (out / "config.pbtxt").write_text(config, encoding="utf-8")


def tensors(kind: str, items: list[Any]) -> str:
    """Inputs or outputs in the syntax of config.pbtxt, without the dimension of the batch."""
    lines = []
    for item in items:
        dims = ", ".join(str(size if isinstance(size, int) else -1) for size in item.shape[1:])
        lines.append(f'  {{ name: "{item.name}" data_type: {TYPES[item.type]} dims: [ {dims} ] }}')
    return f"{kind} [\n" + ",\n".join(lines) + "\n]"


def main() -> None:
    """Runs the script; what cannot be done ends in one line and exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("out", type=Path, metavar="MODELS/NAME")
    parser.add_argument("--graph", help="the graph's file in DIR, if there are several")
    parser.add_argument("--batch", type=int, default=16, help="most texts that run together")
    parser.add_argument("--at", type=Path, help="where Triton finds DIR, for a language model")
    parser.add_argument("--slots", type=int, default=2, help="a language model's requests at the same time")
    parser.add_argument("--length", type=int, default=2048, help="most tokens of a prompt and its answer")
    parser.add_argument("--queue", type=int, default=4, help="requests that may wait for a slot")
    options = vars(parser.parse_args())
    try:
        write(**options)
    except (RuntimeError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    print(options["out"])


if __name__ == "__main__":
    main()
