"""Every family on the device, in each dtype and by each attention function, beside the float64 reference."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import report
import torch
from report import Document

from converter import convert
from gpu.part import Settings
from tests import tiny
from tests.runners import Array, auto_class, expected

TITLE = "what converted models compute"
FUNCTIONS = ("sdpa", "eager")
FLEX = ("replit",)
"""Families that run flex_attention too, which is compiled for each dtype and shape; grouped heads."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS, LENGTHS, ENDS = 12, (300, 217), (250, 299, 300)
"""Tokens of each row, with padding; where the pieces end that a decoder gets over its cache."""
EXACT, TIMES = 1e-4, 2.0
"""Largest error in float32; in half precision, an error may be so many times that on the CPU."""
INTRO = f"""\
Tiny random models of {HEADS} heads, converted with ntk (decoders by position, encoders by length), on padded
rows of {" and ".join(map(str, LENGTHS))} tokens. *Error*: of the logits of all real tokens from those of the
reference in NumPy in float64, as |found - right| / |right|. It includes what weights lose in half precision.
*Pieces*: the same over a cache that grows, of a prompt, a chunk and a token. *On the CPU*: of the same model
there (for flex_attention, by sdpa). An error may be {EXACT:g} in float32, and else {TIMES:g} times that on
the CPU."""
HEAD = ["model", "attention", "dtype", "error", "in pieces", "on the CPU"]


def run(settings: Settings, document: Document) -> None:
    document.intro = INTRO
    rows: list[list[str]] = []
    jobs: list[tuple[str, Sequence[str]]] = [(name, FUNCTIONS) for name in tiny.FAMILY]
    for name, functions in (*jobs, *((name, ["flex_attention"]) for name in FLEX)):
        if time.monotonic() > settings.until:
            document.skip(f"{name}, {', '.join(functions)}", "no time")
            continue
        try:
            for row in compare(settings, document, name, functions):
                rows.append(row)
                document.put("Errors", report.table(HEAD, rows, texts=3))
        except Exception as error:  # the other families can still be compared
            document.fail(f"{name}, {', '.join(functions)}", error)


def compare(
    settings: Settings, document: Document, name: str, functions: Sequence[str]
) -> Iterator[list[str]]:
    """The lines of one tiny checkpoint, which is written if it is not there."""
    folder, decoder = settings.folder / name, name in tiny.FACTORIES
    if not folder.exists():
        keys = {"use_cache": True} if decoder else {}
        source = tiny.CHECKPOINTS[name].write(settings.folder / f"{name}-source", HEADS, **keys)
        dynamic = "position" if decoder else "length"
        convert(source, folder, dynamic=dynamic, train_length=LENGTHS[0] // 4, verify=False)
    ids = tiny.token_ids(len(LENGTHS), LENGTHS[0])
    mask = tiny.padding_mask([*LENGTHS], "left" if decoder else "right")
    right = expected(folder, name, ids, mask)
    for dtype in DTYPES:
        model = auto_class(name).from_pretrained(folder, trust_remote_code=True, dtype=dtype).eval()
        for function in functions:
            errors = []
            for device, ends in (("cpu", ()), (settings.device, ()), (settings.device, ENDS)):
                flex_there = function == "flex_attention" and (device, ends) == ("cpu", ())
                model.to(device).config._attn_implementation = "sdpa" if flex_there else function
                if decoder or not ends:
                    errors.append(difference(right, logits(model, ids, mask, ends), mask))
            kind = str(dtype).removeprefix("torch.")
            limit = EXACT if dtype == torch.float32 else TIMES * errors[0]
            if not max(errors) <= limit:  # nor is NaN
                found = " and ".join(f"{error:.1e}" for error in errors[1:])
                document.fail(f"{name}, {function}, {kind}", f"errors of {found}, more than {limit:.1e}")
            shown = [f"{error:.1e}" for error in errors]
            yield [name, function, kind, shown[1], shown[2] if decoder else "-", shown[0]]


@torch.inference_mode()
def logits(model: Any, ids: Array, mask: Array, ends: Sequence[int]) -> Array:
    """float64 [rows, tokens, vocabulary], in one pass or in pieces over a cache."""
    from transformers import DynamicCache

    tokens, real = (torch.from_numpy(array).to(model.device) for array in (ids, mask))
    options: dict[str, Any] = {"past_key_values": DynamicCache(), "use_cache": True} if ends else {}
    pieces = [
        model(tokens[:, start:end], attention_mask=real[:, :end], **options).logits
        for start, end in pairwise((0, *(ends or ids.shape[1:])))
    ]
    found: Array = torch.cat(pieces, dim=1).double().cpu().numpy()
    return found


def difference(right: Array, found: Array, mask: Array) -> float:
    """|found - right| / |right| over the real tokens."""
    right, found = right[mask == 1], found[mask == 1]
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))
