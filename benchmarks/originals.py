"""Checks that a converted model computes the same as the model's own code.

Families that are not in transformers have their code on GitHub, written for transformers 4.2x and 4.3x. It
runs under 4.33.3, in a separate environment, on tiny random checkpoints in the original layout. The converted
repository (``--method none``) runs under this environment's transformers, and the logits are compared in
float32. This project contains none of that code: original_code.py lists its sources.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import workplace
from original_code import ORIGINALS, Config, Original, State, setup
from report import finish, load, table

PACKAGES = ("torch==2.13.0", "transformers==4.33.3", "'numpy<2'", "einops", "accelerate==0.23.0", "click")
ROWS, LENGTH, CACHED = (60, 43, 26), 60, 41
"""Real tokens in each row; tokens in the longest; tokens cached before single ones follow."""
WAYS = ("no mask", "left padding", "right padding", "cached", "cached, left padding")
TOLERANCE = 1e-4
"""Largest difference, relative to the largest logit."""
Run = Callable[[torch.Tensor, "torch.Tensor | None", Any], tuple[torch.Tensor, Any]]
"""Tokens, mask and cache -> the head's output, and the new cache."""


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules in which every name is an empty class, except for a method that loggers need."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        found = any(f"{name}.".startswith(f"{stub}.") for stub in self.names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def exec_module(self, module: types.ModuleType) -> None:
        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"warning": lambda *_: None})

        module.__getattr__ = attribute  # type: ignore[method-assign]


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def runner(model: Any, head: str, bool_mask: bool = False) -> Run:
    """A function that runs ``model``."""

    def run(ids: torch.Tensor, mask: torch.Tensor | None, past: Any) -> tuple[torch.Tensor, Any]:
        cache = {"past_key_values": past, "use_cache": True} if head == "CausalLM" else {}
        output = model(ids, attention_mask=mask.bool() if bool_mask and mask is not None else mask, **cache)
        if head == "QuestionAnswering":
            return torch.stack([output.start_logits, output.end_logits], -1), None
        return output[0] if head == "Model" else output.logits, getattr(output, "past_key_values", None)

    return run


def stored(folder: Path) -> tuple[Config, State]:
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, load_file(folder / "model.safetensors")


def original_run(original: Original, source: Path, head: str) -> Run:
    """The original code with a checkpoint's weights, as a function."""
    config, state = stored(source)
    original.adapt(config, state)
    for key in ("auto_map", "model_type", "architectures"):
        config.pop(key, None)
    name = original.model.format(head=head if head == "Model" else f"For{head}")
    model = named(name)(named(original.config)(**config)).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [tensor for tensor in missing if not re.search(original.without, tensor)]
    if missing or unexpected:
        raise SystemExit(f"missing {missing}, unexpected {unexpected}")
    run = runner(model, head, original.bool_mask)
    return by_rows(run) if original.rows_alone else run


def by_rows(run: Run) -> Run:
    """A function that runs padded rows one by one, without their padding."""

    def alone(ids: torch.Tensor, mask: torch.Tensor | None, past: Any) -> tuple[torch.Tensor, Any]:
        if mask is None:
            return run(ids, None, past)
        rows = []
        for row, real in zip(ids, mask.bool(), strict=True):
            logits = run(row[real][None], None, None)[0][0]
            rows.append(logits.new_zeros(len(row), logits.shape[-1]).index_put((real,), logits))
        return torch.stack(rows), None

    return alone


def inputs() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token ids, and the masks for padding on each side."""
    ids = np.random.default_rng(0).integers(4, 97, size=(len(ROWS), LENGTH))
    right = torch.tensor([[int(column < row) for column in range(LENGTH)] for row in ROWS])
    return torch.from_numpy(ids), {"left": right.flip(1), "right": right}


def side(way: str) -> str | None:
    return next((side for side in ("left", "right") if side in way), None)


def ways(original: Original, head: str) -> Iterator[str]:
    """The ways that the original supports; classification reads the first slot, so no left padding."""
    for way in WAYS:
        cached, padded = way.startswith("cached"), side(way)
        if cached and (head != "CausalLM" or (padded and original.rows_alone)):
            continue
        if head != "SequenceClassification" or padded != "left":
            yield way


@torch.no_grad()
def measure(run: Run, chosen: Iterable[str]) -> dict[str, np.ndarray]:
    """A model's outputs in every way; the cached ways run one token at a time after the first chunk."""
    ids, masks = inputs()
    results = {}
    for way in chosen:
        mask, past, parts = masks.get(side(way) or ""), None, []
        steps = range(CACHED, LENGTH + 1) if way.startswith("cached") else (LENGTH,)
        for start, end in zip((0, *steps), steps, strict=False):
            part, past = run(ids[:, start:end], None if mask is None else mask[:, :end], past)
            parts.append(part)
        results[way] = (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).numpy()
    return results


def importable(name: str, code: str) -> Original:
    """An original whose code, in the folder CODE/NAME, can be imported from now on."""
    original = ORIGINALS[name]
    for package in original.packages:
        module = types.ModuleType(package)
        below = package.removeprefix(original.packages[0]).replace(".", "/").strip("/")
        module.__path__ = [str(Path(code, name, original.folder, below))]
        sys.modules[package] = module
    sys.meta_path.insert(0, Stubs(original.stubs))
    return original


def child_original(name: str, code: str, work: str) -> None:
    """In the old environment: runs every case of an original, from WORK/N/source to WORK/N/original.npz."""
    original = importable(name, code)
    for number, case in enumerate(original.cases.values()):
        folder = Path(work, str(number))
        run = original_run(original, folder / "source", case.head)
        np.savez(folder / "original.npz", **measure(run, ways(original, case.head)))


def child_versions() -> None:
    print(", ".join(f"{package} {version(package)}" for package in ("transformers", "torch")))


def start(python: str, *words: str | Path) -> str:
    """Runs this script as a child in an environment; returns its last line, or exits if the child fails."""
    done = subprocess.run([python, __file__, "--child", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{words[0]} {words[1]}:\n{done.stderr}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def convert_all(original: Original, work: Path) -> None:
    """In this environment: writes the checkpoint of case N to WORK/N/source, and our output to ours.npz."""
    import transformers

    from converter import convert
    from tests import tiny

    for number, case in enumerate(original.cases.values()):
        folder = work / str(number)
        factory = (tiny.FACTORIES | tiny.ENCODERS)[original.family]
        factory(folder / "source", case.num_heads, head=case.head, **case.changes)  # type: ignore[arg-type]
        convert(folder / "source", folder / "converted", method="none", verify=False)
        auto = getattr(transformers, "AutoModel" if case.head == "Model" else f"AutoModelFor{case.head}")
        model = auto.from_pretrained(folder / "converted", trust_remote_code=True).eval()
        results = measure(runner(model, case.head), ways(original, case.head))
        np.savez(folder / "ours.npz", **results)


def examine(name: str, code: Path, python: str, work: Path) -> float:
    """Runs both sides on every case: the largest difference, relative to the largest logit of its case."""
    original, masks = ORIGINALS[name], inputs()[1]
    convert_all(original, work)
    start(python, "original", name, code, work)
    worst = 0.0
    for number, case in enumerate(original.cases.values()):
        ours, theirs = (np.load(work / str(number) / f"{file}.npz") for file in ("ours", "original"))
        for way in theirs:
            gaps = np.abs(ours[way] - theirs[way])
            if side(way) and case.head != "SequenceClassification":
                gaps = gaps[masks[side(way) or ""].bool().numpy()]
            gap = gaps.max() / np.abs(theirs["no mask"]).max()
            worst = float(np.maximum(worst, gap))  # np.maximum keeps NaN
    return worst


def sections(worst: Mapping[str, float], old: str, new: str) -> list[str]:
    """The results in Markdown."""
    overview, code = [], []
    for name, found in worst.items():
        original = ORIGINALS[name]
        tree = f"https://github.com/{original.repository}/tree/{original.commit}/{original.folder}"
        overview.append([name, str(len(original.cases)), f"{found:.1e}"])
        code.append(f"* {name}: [{original.repository}]({tree.rstrip('/')}). {original.note}")
    return [
        f"The originals ran under {old}, the converted models under {new}: largest differences of the logits "
        f"in float32, tiny random weights, {len(ROWS)} rows of {LENGTH} tokens, without a mask, padded on "
        "either side (real tokens are compared), and one token at a time over a cache where the original can "
        "do that.",
        table(("original", "cases", "largest difference / largest logit"), overview),
        "## The original code\n\n" + "\n".join(code),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare converted models with the models' own code.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ORIGINALS)} (default: all)")
    parser.add_argument("--code", type=Path, help="folder with each original's repository under its name")
    parser.add_argument("--python", help="interpreter of the environment with transformers 4.33.3")
    parser.add_argument("--setup", action="store_true", help="print the commands that create these two")
    parser.add_argument("--write", action="store_true", help="write results/originals[-NAME].md")
    arguments = parser.parse_args()
    names = arguments.names or list(ORIGINALS)
    if unknown := set(names) - set(ORIGINALS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if arguments.setup:
        print(setup(PACKAGES, names))
        return 0
    if not (arguments.code and arguments.python):
        parser.error("--code and --python are required; --setup prints how to create them")
    busy, worst = load(), {}
    with workplace() as work:
        for name in names:
            print(f"{name} ...", file=sys.stderr)
            worst[name] = examine(name, arguments.code.resolve(), arguments.python, work / name)
        found = sections(worst, start(arguments.python, "versions"), start(sys.executable, "versions"))
    file = "-".join(["originals", *arguments.names])
    finish(file, "Converted models against the original code", found, busy, write=arguments.write)
    return int(not all(gap <= TOLERANCE for gap in worst.values()))


CHILDREN = {"original": child_original, "versions": child_versions}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        CHILDREN[sys.argv[2]](*sys.argv[3:])
    else:
        sys.exit(main())
