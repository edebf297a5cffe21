"""The user's own queries and documents, for encoders.

Any retrieval data set in the format of BEIR (Thakur et al. 2021, arXiv 2104.08663), from a local folder.

``corpus.jsonl`` has a document a line with ``_id``, ``text`` and, optionally, ``title``; ``queries.jsonl`` a
query a line with ``_id`` and ``text``. ``qrels/test.tsv`` has a first line of headings and then the columns
query, document, grade (github.com/beir-cellar/beir, the wiki's page "Load your custom dataset"). As there, a
document is its title and text, and a document that has the query's own id is not ranked for it.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.errors import SourceError
from converter.evaluation.tasks.records import read_records
from converter.evaluation.tasks.scores import ndcg
from converter.evaluation.tasks.task import Collection, Metric, Retrieval, TaskType
from converter.evaluation.tasks.tokens import texts_in_tokens

CORPUS, QUERIES, GRADES = "corpus.jsonl", "queries.jsonl", "qrels/test.tsv"
ID = "_id"


@dataclass(frozen=True)
class Beir(Retrieval):
    """All judged queries against all documents, which are cut to each length."""

    documents: Mapping[str, str]
    """Id -> title and text; as for queries."""
    queries: Mapping[str, str]
    grades: Mapping[str, Mapping[str, int]]
    """Id of a query -> id of a relevant document -> its grade, at least 1."""
    name: str = "beir"
    metric: Metric = "ndcg@10"

    @classmethod
    def read(cls, folder: Path) -> Beir:
        """Reads a folder; raises ``SourceError`` that names the file and line."""
        for name in (CORPUS, QUERIES, GRADES):
            if not (folder / name).exists():
                raise SourceError(
                    f"{folder} has no {name}; a folder in BEIR's format has {CORPUS}, {QUERIES} and {GRADES}"
                )
        documents = _texts(folder / CORPUS, title=True)
        queries = _texts(folder / QUERIES)
        blank = [name for name, text in queries.items() if not text]
        if blank:
            raise SourceError(f"{QUERIES}: the query {blank[0]!r} is empty")
        grades = _grades(folder / GRADES, queries, documents)
        if not grades:
            raise SourceError(f"{GRADES} has no document with a grade above 0")
        return cls(documents, queries, grades)

    def items(
        self, tokenizer: Any, lengths: Sequence[int], count: int, seed: int
    ) -> Mapping[int, Collection]:
        """See ``Retrieval``; the first length to which no document must be cut ends the series.

        All queries are asked, whatever ``count`` is, so that the value can be compared with others.
        """
        places = {name: place for place, name in enumerate(self.documents)}
        queries = texts_in_tokens(tokenizer, [self.queries[name] for name in self.grades], max(lengths))
        found: dict[int, Collection] = {}
        for length in sorted(lengths):
            documents = texts_in_tokens(tokenizer, list(self.documents.values()), length)
            if found and documents == list(found[max(found)].documents):
                break
            found[length] = Collection(
                queries=queries,
                documents=documents,
                relevant=[
                    {places[document]: grade for document, grade in grades.items()}
                    for grades in self.grades.values()
                ],
                left_out=[places.get(name) for name in self.grades],
            )
        return found

    def score(self, ranked: Sequence[int], grades: Mapping[int, int]) -> float:
        return ndcg(ranked, grades)


def _texts(path: Path, *, title: bool = False) -> dict[str, str]:
    found: dict[str, str] = {}
    for record in read_records(path):
        name = record.text(ID)
        if name in found:
            raise record.problem(ID, "an id that no other line has")
        parts = [record.text("text")]
        if title and record.values.get("title") is not None:
            parts.insert(0, record.text("title"))
        found[name] = " ".join(parts).strip()
    return found


def _grades(
    path: Path, queries: Mapping[str, str], documents: Mapping[str, str]
) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            rows = [(lines.line_num, row) for row in lines if any(map(str.strip, row))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"cannot read {path}: {error}") from error
    if rows and rows[0][1][0] in queries:
        raise SourceError(
            f"{path.name} begins with a judgement; add a first line of headings: query-id, corpus-id, score"
        )
    for number, row in rows[1:]:
        where = f"{path.name}, line {number}"
        if len(row) != 3 or not row[2].strip().lstrip("-").isdecimal():
            raise SourceError(f"{where} is not a query, a document and a grade with tabs between them")
        query, document, grade = row[0], row[1], int(row[2])
        if query not in queries:
            raise SourceError(f"{where}: {QUERIES} has no query {query!r}")
        if document not in documents:
            raise SourceError(f"{where}: {CORPUS} has no document {document!r}")
        if grade > 0 and query != document:
            found.setdefault(query, {})[document] = grade
    return found


TYPES = (
    TaskType(
        name="beir",
        prompt="all queries of a folder in BEIR's format, `--beir DIR`; documents are cut to the length",
        right="nDCG@10 of the documents by cosine",
        origin="[BEIR](https://arxiv.org/abs/2104.08663), or you",
        read=Beir.read,
        file_help="A folder with corpus.jsonl, queries.jsonl and qrels/test.tsv.",
        folder=True,
        embeds=True,
    ),
)
