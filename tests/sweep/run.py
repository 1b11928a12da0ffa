"""Every language model of transformers, split over 2, 3 and 4 ranks, against one process.

python -m tests.sweep.run --only 'causal/(llama|gpt2)$' --tp 2 --shape uneven --json out.json
"""

import argparse
import collections
import json
import sys
import time
from pathlib import Path
from typing import Any

from plait.testing import jobs
from plait.testing.pool import Pool
from tests.sweep import catalogue
from tests.sweep.catalogue import SHAPES, SIZES, Case

ORDER = ("pass", "wrong", "refused", "crash", "hung", "cannot-build")


def run(cases: list[Case], timeout_s: float, path: Path | None = None) -> list[dict[str, Any]]:
    """Run cases on one pool of ranks; print what is not equal and keep a file up to date."""
    results: list[dict[str, Any]] = []
    with Pool(timeout_s) as pool:
        for case in cases:
            result = run_one(pool, case, timeout_s)
            results.append(result)
            if result["status"] != "pass":
                print(line(result), flush=True)
            if path is not None and (len(results) % 20 == 0 or len(results) == len(cases)):
                merge(path, results)
    return results


def run_one(pool: Pool, case: Case, timeout_s: float) -> dict[str, Any]:
    """Run one case; whatever its ranks do, a result comes back."""
    job = jobs.Job("tests.sweep.cases", None, "run_case", group=None, wants_value=True)
    started = time.perf_counter()
    outcomes = pool.run(job, case.size, args=(case,), timeout_s=timeout_s)
    values = [o.value for o in outcomes if o.status == "passed"]
    if len(values) == len(outcomes):
        result: dict[str, Any] = max(values, key=lambda v: ORDER.index(v["status"]))
        result["held"] = max(v["held"] for v in values)
    else:
        bad = next((o for o in outcomes if o.status in ("failed", "died")), None)
        bad = bad or next(o for o in outcomes if o.status != "passed")
        result = {
            "name": case.model.name,
            "shape": case.shape,
            "size": case.size,
            "class_name": case.model.class_name,
            "heads": "/".join(map(str, case.heads)),
            "status": "hung" if bad.status == "hung" else "crash",
            "detail": f"{bad.summary} ({place(bad.text or bad.stack)})",
            "text": bad.text or bad.stack,
            "plan": values[0]["plan"] if values else "",
            "held": 0.0,
            "notes": [],
        }
    result["seconds"] = round(time.perf_counter() - started, 3)
    return result


def place(text: str) -> str:
    """The last line of a traceback that names a file of plait or transformers."""
    files = [x.strip() for x in text.splitlines() if x.strip().startswith("File ")]
    inside = [x for x in files if "/plait/" in x or "/transformers/" in x]
    inside = [x for x in inside if "testing/parity.py" not in x and "proof/numbers.py" not in x]
    if not inside:
        return "no traceback"
    path, number = inside[-1].split('"')[1], inside[-1].split("line ")[1].split(",")[0]
    return f"{'/'.join(path.split('/')[-2:])}:{number}"


def line(result: dict[str, Any]) -> str:
    """One result in one line."""
    head = f"{result['status']:<12} {result['name']} {result['shape']} {result['heads']}"
    return f"{head} @ {result['size']}: {result['detail'][:220]}"


def summary(results: list[dict[str, Any]]) -> str:
    """Counts by shape, size and status."""
    lines = []
    by_cell = collections.defaultdict(collections.Counter)
    for one in results:
        by_cell[one["shape"], one["size"]][one["status"]] += 1
    for (shape, size), counts in sorted(by_cell.items()):
        total = sum(counts.values())
        words = ", ".join(f"{counts[s]} {s}" for s in ORDER if counts[s])
        lines.append(f"{shape} @ {size}: {total} cases: {words}")
    return "\n".join(lines)


def merge(path: Path, results: list[dict[str, Any]]) -> None:
    """Write results to a file, over those it has of the same cases."""
    old = json.loads(path.read_text()) if path.exists() else []
    table = {(r["name"], r["shape"], r["size"]): r for r in [*old, *results]}
    path.write_text(json.dumps(list(table.values()), indent=1))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="expression that names like causal/llama match")
    parser.add_argument("--tp", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--shape", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--json", type=Path, help="file to write or update")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a case may take")
    options = parser.parse_args()
    cases = list(catalogue.cases(options.only, tuple(options.tp), tuple(options.shape)))
    started = time.perf_counter()
    results = run(cases, options.timeout, options.json)
    print(summary(results))
    print(f"{len(results)} cases in {time.perf_counter() - started:.0f} s")
    return int(any(r["status"] not in ("pass", "refused", "cannot-build") for r in results))


if __name__ == "__main__":
    sys.exit(main())
