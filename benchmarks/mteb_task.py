"""Measures an encoder in mteb, on a local folder in BEIR's format, and compares with ``ntk-convert eval``.

    ntk-convert eval FOLDER --beir BEIR --tasks beir --lengths 128,512 --out DIR
    PATH/TO/MTEB/python benchmarks/mteb_task.py FOLDER BEIR --results DIR/results.json

Nothing else of this project is needed where mteb runs. The model is loaded by sentence-transformers and read
at every length of the results, and the script fails unless each nDCG@10 is that of ``eval``. Without
``--results`` it only measures, at ``--lengths``. With ``--stock`` it loads the folder without its code.

Before it measures, it loads the model with two seeds. If the vectors of a text then differ, some layers
have random weights, and the script fails.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import torch
from datasets import Dataset
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from sentence_transformers import SentenceTransformer

LIMIT = 1e-4
"""Largest difference of nDCG@10; mteb rounds to five decimals."""
PACKAGES = ("mteb", "sentence-transformers", "transformers", "torch")


class LocalRetrieval(AbsTaskRetrieval):
    """A folder with corpus.jsonl, queries.jsonl and qrels/test.tsv."""

    metadata = TaskMetadata(
        name="LocalRetrieval",
        description="A folder in BEIR's format.",
        dataset={"path": "local", "revision": "local"},  # not read: load_data reads the folder
        type="Retrieval",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="ndcg_at_10",
    )

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def load_data(self, **_: Any) -> None:
        grades: dict[str, dict[str, int]] = {}
        with (self.folder / "qrels" / "test.tsv").open(encoding="utf-8", newline="") as file:
            for query, document, grade in list(csv.reader(file, delimiter="\t"))[1:]:
                grades.setdefault(query, {})[document] = int(grade)
        asked = [row for row in self._rows("queries") if row["id"] in grades]
        self.dataset = {
            "default": {
                "test": {
                    "corpus": Dataset.from_list(self._rows("corpus")),
                    "queries": Dataset.from_list([{"id": row["id"], "text": row["text"]} for row in asked]),
                    "relevant_docs": grades,
                    "top_ranked": None,
                }
            }
        }
        self.data_loaded = True

    def _rows(self, name: str) -> list[dict[str, str]]:
        lines = (self.folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = map(json.loads, lines)
        return [{"id": row["_id"], "title": row.get("title") or "", "text": row["text"]} for row in rows]


def load(folder: Path, seed: int, *, trusted: bool) -> SentenceTransformer:
    """The model as a user loads it."""
    torch.manual_seed(seed)
    return SentenceTransformer(str(folder), trust_remote_code=trusted, device="cpu")


def is_random(folder: Path, text: str, *, trusted: bool) -> bool:
    """Whether layers of the model get random weights: its vectors then depend on the seed."""
    one, two = (load(folder, seed, trusted=trusted).encode(text) for seed in (0, 1))
    return not np.allclose(one, two, atol=1e-4 * float(np.abs(one).max()))


def ndcg(model: SentenceTransformer, beir: Path, length: int) -> float:
    """What mteb finds, with texts cut to a length in tokens."""
    model.max_seq_length = length
    found = mteb.evaluate(model, LocalRetrieval(beir), cache=None, show_progress_bar=False)
    [scores] = found.task_results[0].scores["test"]
    return float(scores["ndcg_at_10"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure an encoder in mteb, and compare with eval.")
    parser.add_argument("folder", type=Path, help="converted encoder")
    parser.add_argument("beir", type=Path, help="folder in BEIR's format")
    parser.add_argument("--results", type=Path, help="results.json of eval on the same folders")
    parser.add_argument("--lengths", default="512", help="tokens, without --results [%(default)s]")
    parser.add_argument("--stock", action="store_true", help="load it without its code")
    arguments = parser.parse_args()
    wanted: dict[int, float | None] = dict.fromkeys(map(int, arguments.lengths.split(",")))
    if arguments.results:
        results = json.loads(arguments.results.read_text(encoding="utf-8"))
        wanted = {each["length"]: each["value"] for each in results["measurements"] if each["task"] == "beir"}
    folder, trusted = arguments.folder.resolve(), not arguments.stock
    print(", ".join(f"{package} {version(package)}" for package in PACKAGES))
    text = (arguments.beir / "corpus.jsonl").read_text(encoding="utf-8").partition("\n")[0]
    failed = is_random(folder, json.loads(text)["text"], trusted=trusted)
    if failed:
        print("two loads give different vectors of the same text: layers have random weights")
    model = load(folder, 0, trusted=trusted)
    print(f"{type(model[0].auto_model).__name__}; max_seq_length {model.max_seq_length}")
    for length, theirs in wanted.items():
        ours = ndcg(model, arguments.beir, length)
        line = f"{length} tokens: nDCG@10 {ours:.5f}"
        if theirs is not None:
            failed |= not abs(ours - theirs) <= LIMIT
            line += f", eval {theirs:.5f}"
        print(line)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
