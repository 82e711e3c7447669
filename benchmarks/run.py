"""`make bench`: ratios to peers and the cost of everything around the engine, on this machine, in one run.

usage: python -m benchmarks.run [--part NAME ...] [--rounds N] [--rows N] [--threads N]

Prints the machine, the seed, medians and ratios, and writes them to out/bench.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import generation as texts_side
from benchmarks import sides, whole_jobs
from benchmarks.machine import Spread, describe_machine, spread
from benchmarks.random_bert import write_random_bert
from benchmarks.texts import make_texts
from jobs.spec import load_spec
from workers.model.resolve import resolve_model

MINILM_ROWS = 1_000
BERT_ROWS = 400
MIB = 1 << 20
WIDTH = 124  # the same table in a terminal, a file and a log
Figures = dict[str, object]


class Bench:
    """One run: its settings, its scratch folder, and every figure so far."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self.rounds: int = arguments.rounds
        self.rows: int = arguments.rows
        self.threads: int = arguments.threads
        self.scratch = scratch
        self.console = Console(width=WIDTH)
        self.figures: Figures = {}

    def engine(self) -> None:
        """Our engine next to its peers: two sizes of model, one and more threads, start and memory included."""
        minilm = resolve_model(load_spec(sides.SPEC).model.source).path
        bert = write_random_bert(minilm, self.scratch / "random-bert-base")
        for name, model, rows in (("MiniLM", minilm, MINILM_ROWS), ("BERT-base-sized, random", bert, BERT_ROWS)):
            texts = make_texts(self.scratch / f"engine-{rows}.parquet", min(self.rows, rows))
            graph = sides.graft(model, self.scratch)
            for threads in sorted({1, self.threads}):
                results = sides.compare_engines(
                    model, graph, texts, threads=threads, rounds=self.rounds, scratch=self.scratch
                )
                self._engine_table(f"{name}, {threads} thread{'s' * (threads > 1)}", results)

    def _engine_table(self, title: str, results: dict[str, sides.Side]) -> None:
        tokens = next(iter(results.values())).tokens
        table = Table(title=f"engine: {title}, {tokens:,} tokens", title_justify="left")
        for column in ("", "tokens/s", "first vector s", "MiB then", "peak MiB", "least cosine"):
            table.add_column(column, justify="left" if not column else "right")
        for side in results.values():
            table.add_row(
                side.name,
                _shown(side.tokens_per_s),
                f"{side.first_vector_s.median:.2f}",
                f"{side.resident_bytes.median / MIB:,.0f}",
                f"{side.peak_memory_bytes.median / MIB:,.0f}",
                f"{side.least_cosine:.7f}",
            )
        self.console.print(table)
        speed = {name: side.tokens_per_s.median for name, side in results.items()}
        best = max(speed["ONNX Runtime float32"], speed["OpenVINO float32"])
        ratios = {
            "float32 of the faster float32 peer": speed["candelabra float32"] / best,
            "bfloat16 of OpenVINO bfloat16": speed["candelabra bfloat16"] / speed["OpenVINO bfloat16"],
            "int8 of the faster float32 peer": speed["candelabra int8"] / best,
            "int8 of OpenVINO bfloat16": speed["candelabra int8"] / speed["OpenVINO bfloat16"],
        }
        for name, ratio in ratios.items():
            self.console.print(f"  {name}: {ratio:.2f}x", highlight=False)
        self.figures[f"engine.{title}"] = {"ratios": ratios, **{name: asdict(side) for name, side in results.items()}}

    def generation(self) -> None:
        """Our generator next to llama.cpp, with 64 rows and with one; sharing; where the time goes."""
        for rows in (64, 1):
            sides_ = texts_side.compare_generation(
                rows, threads=self.threads, rounds=max(1, self.rounds // 2), scratch=self.scratch
            )
            self._generation_table(rows, sides_)
        shared, apart = texts_side.time_sharing(32, threads=self.threads, scratch=self.scratch)
        self.console.print(
            f"  32 rows that begin with the same {texts_side.SHARED_TOKENS} tokens take {shared / apart:.2f} "
            "of the time of 32 that do not",
            highlight=False,
        )
        self.figures["generation.sharing"] = {"shared_s": shared, "apart_s": apart}

    def _generation_table(self, rows: int, found: dict[str, texts_side.GenerationSide]) -> None:
        table = Table(title=f"generation: SmolLM2-135M, {rows} rows, {self.threads} threads", title_justify="left")
        columns = ("prefill tokens/s", "decode tokens/s", "of llama.cpp", "MiB then", "peak MiB", "texts of float32")
        for column in ("", *columns):
            table.add_column(column, justify="left" if not column else "right")
        peer = found.get(texts_side.PEER)
        for name, side in found.items():
            ratios = "-"
            if peer is not None:
                prefill = side.prefill.median / peer.prefill.median
                ratios = f"{prefill:.1f}x, {side.decode.median / peer.decode.median:.1f}x"
            memory = [side.last.get(key) for key in ("loaded_bytes", "peak_memory_bytes")]
            shown = [f"{value / MIB:,.0f}" if value else "-" for value in memory]
            texts, tokens = texts_side.agreement(side.last["ids"], found["candelabra float32"].last["ids"])
            agreed = f"{texts}, {tokens:.0f} tokens"
            table.add_row(name, _shown(side.prefill), _shown(side.decode), ratios, *shown, agreed)
            self.figures[f"generation.{rows}.{name}"] = {
                "prefill_tokens_per_s": side.prefill.values,
                "decode_tokens_per_s": side.decode.values,
                "texts_of_float32": texts,
                "tokens_of_float32": tokens,
            }
        self.console.print(table)
        own = next(iter(found.values())).last
        stats, whole = own["stats"], own["all_s"]
        tokenizing = texts_side.tokenizing_seconds(self.scratch / f"prompts-{rows}.json")
        shares = {
            "matrix products and norms": stats["model_s"] - stats["attention_s"],
            "attention": stats["attention_s"],
            "sampling": stats["sampling_s"],
            "tokenising": tokenizing,
        }
        told = ", ".join(f"{name} {seconds / (whole + tokenizing):.1%}" for name, seconds in shares.items())
        self.console.print(f"  where float32's time goes: {told}", highlight=False)
        self.figures[f"generation.{rows}.shares_s"] = {"all": whole, **shares}

    def job(self) -> None:
        """A whole job on Ray, one replica, next to the engine alone on the same rows."""
        texts = make_texts(self.scratch / "job.parquet", self.rows)
        alone, inside, wall = [], [], []
        for number in range(max(1, self.rounds // 2)):
            turn = sides.own_turn(texts, threads=self.threads, scratch=self.scratch)
            alone.append(turn["seconds"])
            run = whole_jobs.submit(
                sides.SPEC,
                f"input.path={texts}",
                "task.text=text",
                f"output.path={self.scratch / f'job-{number}'}",
                "workers.replicas=1",
                f"workers.cpus={self.threads}",
            )
            inside.append(run.report["seconds"])
            wall.append(run.wall_s)
        table = Table(title=f"job: {self.rows:,} rows, Ray, one replica", title_justify="left")
        for column in ("", "seconds", "of the engine alone"):
            table.add_column(column, justify="left" if not column else "right")
        base = spread(alone)
        for name, values in (("engine alone", base), ("shards", spread(inside)), ("submit, all in", spread(wall))):
            table.add_row(name, _shown(values), f"{values.median / base.median:.2f}x")
            self.figures[f"job.{name}"] = values.values
        self.console.print(table)

    def planning(self) -> None:
        """Planning many files, resuming many shards, and the driver's memory; the test engine throughout."""
        table = Table(title="driver (test engine)", title_justify="left")
        for column in ("", "seconds", "peak MiB"):
            table.add_column(column, justify="left" if not column else "right")
        seconds, peak = whole_jobs.time_planning(self.scratch / "planning", 5_000)
        self._driver_row(table, "plan 5,000 files", seconds, peak)
        first, second = whole_jobs.time_resuming(self.scratch / "resuming", 10_000)
        self._driver_row(table, "run 10,000 shards of one row, no Ray", first.wall_s, first.peak_memory_bytes)
        self._driver_row(table, "resume it, one shard missing", second.wall_s, second.peak_memory_bytes)
        for rows in (10_000, 100_000, 1_000_000):
            run = whole_jobs.driver_memory(self.scratch / f"memory-{rows}", rows)
            self._driver_row(table, f"{rows:,} rows on Ray", run.wall_s, run.peak_memory_bytes)
        self.console.print(table)

    def _driver_row(self, table: Table, name: str, seconds: float, peak_memory_bytes: int) -> None:
        table.add_row(name, f"{seconds:.2f}", f"{peak_memory_bytes / MIB:,.0f}")
        self.figures[f"driver.{name}"] = {"seconds": seconds, "peak_memory_bytes": peak_memory_bytes}


def _shown(values: Spread) -> str:
    digits = 0 if values.median >= 100 else 2
    low, high = min(values.values), max(values.values)
    return f"{values.median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def main() -> None:
    """Measure what was asked for."""
    parts: dict[str, Callable[[Bench], None]] = {
        "engine": Bench.engine,
        "generation": Bench.generation,
        "job": Bench.job,
        "planning": Bench.planning,
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=parts, action="append", help="only this; may be given again")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/bench.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="candelabra-bench-") as folder:
        bench = Bench(arguments, Path(folder))
        machine = describe_machine()
        for name, value in machine:
            bench.console.print(f"{name:<12} {value}", markup=False, highlight=False)
        for part in arguments.part or parts:
            parts[part](bench)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": dict(machine), "figures": bench.figures}, indent=2))
        bench.console.print(f"written to {arguments.out}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
