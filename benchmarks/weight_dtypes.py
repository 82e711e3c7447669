"""What bfloat16 and int8 do to a job, next to float32: greedy texts and next-token distributions, or embeddings.

usage: python -m benchmarks.weight_dtypes [SPEC.yaml]         by default configs/generate-smollm2.yaml: 100 docstrings

JSON on stdout. Logits are compared along the float32 text of each row, at every place that chose a token. Of a spec of
kind `embed`, a sample's vectors are compared, and which of the others is nearest to each.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import candle_py
import numpy as np
from numpy.typing import NDArray

from benchmarks.sides import ROOT
from jobs.prepare import PreparedJob, prepare_job
from jobs.sample import sample_rows
from jobs.spec import load_spec
from workers.batch import batch_tokens, row_lengths
from workers.engine.load import load_engine

ROUNDED = ("bfloat16", "int8")
MOST_ROWS = 1000
Ids = NDArray[np.uint32]


def greedy(engine: candle_py.Engine, prompts: list[Ids], new: int, stop_ids: tuple[int, ...]) -> list[list[int]]:
    """The greedy text of each prompt, as ids."""
    generator = engine.generator()
    ids: list[list[int]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        generator.add(number, prompt, max_new_tokens=new, stop_ids=stop_ids)
    while generator.pending:
        for event in generator.step():
            ids[event.request_id] += event.ids
    return ids


def choosing_logits(engine: candle_py.Engine, prompt: Ids, text: list[int]) -> NDArray[np.float64]:
    """Logits at each place whose next token was chosen, `(len(text) + 1, vocabulary)`."""
    ids = np.concatenate([prompt, np.array(text, np.uint32)])
    logits = np.asarray(engine.logits(ids, np.array([0, len(ids)], np.uint32)))
    return logits[len(prompt) - 1 :].astype(np.float64)


class Comparison:
    """One format against float32, text after text."""

    def __init__(self) -> None:
        self.rows = self.equal_texts = self.places = self.agreeing = 0
        self.margin = 0.0
        self.divergences: list[float] = []

    def add(self, texts: list[list[int]], logits: list[NDArray[np.float64]]) -> None:
        """A row: its text in float32 and in the format, and the logits of both along the first."""
        logs = [values - np.logaddexp.reduce(values, axis=1, keepdims=True) for values in logits]
        self.divergences += (np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=1).tolist()
        agree = logits[0].argmax(axis=1) == logits[1].argmax(axis=1)
        best = np.sort(logits[0][~agree], axis=1)[:, -2:]
        self.margin = max(self.margin, float((best[:, 1] - best[:, 0]).max(initial=0.0)))
        self.rows, self.equal_texts = self.rows + 1, self.equal_texts + (texts[0] == texts[1])
        self.places, self.agreeing = self.places + len(agree), self.agreeing + int(agree.sum())

    def figures(self) -> dict[str, float]:
        """What came out."""
        return {
            "rows": self.rows,
            "equal_texts": self.equal_texts,
            "places": self.places,
            "places_with_the_same_likeliest_token": self.agreeing,
            "largest_margin_where_it_differs": self.margin,
            "mean_divergence_nats": float(np.mean(self.divergences)),
            "largest_divergence_nats": float(np.max(self.divergences)),
        }


def compare(spec: Path) -> dict[str, dict[str, float]]:
    """Each format on the rows of a job."""
    prepared = prepare_job(load_spec(spec))
    return compare_vectors(prepared) if prepared.spec.task.kind == "embed" else compare_texts(prepared)


def compare_vectors(prepared: PreparedJob) -> dict[str, dict[str, float]]:
    """Each format on vectors of a sample."""
    config, sample = prepared.worker_config, sample_rows(prepared, MOST_ROWS)
    rows = np.flatnonzero(row_lengths(sample.offsets))
    found = []
    for dtype in ("float32", *ROUNDED):
        model = prepared.model
        engine = load_engine(model.source, model.path, config.task, device="cpu", dtype=dtype, threads=None)
        vectors = np.zeros((sample.rows, config.task.width))
        for batch in batch_tokens(
            sample.ids, sample.offsets, rows, budget_tokens=config.budget_tokens, type_ids=sample.type_ids
        ):
            vectors[batch.rows] = engine.forward(batch).values
        found.append(vectors[rows] / np.linalg.norm(vectors[rows], axis=1, keepdims=True))
    exact, nearest = found[0], [nearest_rows(vectors) for vectors in found]
    told = {}
    for dtype, vectors, others in zip(ROUNDED, found[1:], nearest[1:], strict=True):
        cosines = (vectors * exact).sum(axis=1)
        told[dtype] = {
            "rows": len(rows),
            "least_cosine": float(cosines.min()),
            "mean_cosine": float(cosines.mean()),
            "rows_with_the_same_nearest_row": int((others == nearest[0]).sum()),
        }
    return told


def nearest_rows(vectors: NDArray[np.float64]) -> NDArray[np.int64]:
    """The nearest other row of each, by cosine."""
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -1)
    nearest: NDArray[np.int64] = likeness.argmax(axis=1)
    return nearest


def compare_texts(prepared: PreparedJob) -> dict[str, dict[str, float]]:
    """Each format on texts of the job's first rows."""
    decoder = prepared.worker_config.task.decoder
    assert decoder is not None, "a decoder task"
    assert decoder.sampling is not None, "a task of kind generate"
    sample = sample_rows(prepared)
    prompts = [ids for ids in np.split(sample.ids, sample.offsets[1:-1]) if len(ids)]
    engines = [candle_py.Engine.load(prepared.model.path, dtype=dtype) for dtype in ("float32", *ROUNDED)]
    new, stop_ids = decoder.sampling.max_new_tokens, decoder.sampling.stop_ids
    texts = [greedy(engine, prompts, new, stop_ids) for engine in engines]
    found = [Comparison() for _ in ROUNDED]
    for prompt, exact, *others in zip(prompts, *texts, strict=True):
        logits = choosing_logits(engines[0], prompt, exact)
        for comparison, engine, text in zip(found, engines[1:], others, strict=True):
            comparison.add([exact, text], [logits, choosing_logits(engine, prompt, exact)])
    return {dtype: comparison.figures() for dtype, comparison in zip(ROUNDED, found, strict=True)}


def main() -> None:
    """Compare, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path, nargs="?", default=ROOT / "configs/generate-smollm2.yaml")
    print(json.dumps(compare(parser.parse_args().spec), indent=1))


if __name__ == "__main__":
    main()
