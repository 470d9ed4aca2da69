"""Result files of `upconv bench`: written so that a stop cannot spoil them, and gone on with."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from . import gradients
from .bench import SCHEMA, Row, Settings, environment, problem_of
from .cases import Case
from .contenders import TITLES
from .floor import Rates
from .result_checks import Damaged, check_results

ADVICE = "measure again with `upconv bench --out FILE.json`"


class ResultsError(ValueError):
    """A file that does not hold the results needed; the text says what to do."""


def read_results(path: str | Path) -> dict[str, Any]:
    """The file as it is; those of older schemas have fewer fields in their rows."""
    try:
        results = json.loads(Path(path).read_text())
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{path} is not JSON ({error}): {ADVICE}") from error
    if not isinstance(results, dict) or results.get("schema") not in range(1, SCHEMA + 1):
        raise ResultsError(f"{path} does not hold results of schema 1 to {SCHEMA}: {ADVICE}")
    try:
        check_results(results)
    except Damaged as error:
        raise ResultsError(f"{path} is damaged: {error}. {ADVICE.capitalize()}") from error
    return results


def rows_of(results: dict[str, Any]) -> list[Row]:
    return [Row.from_dict(record) for record in results["rows"]]


def write_whole(path: str | Path, text: str) -> None:
    """The file holds the old text or the new one, whenever the process is killed."""
    target = Path(path).resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def write_results(path: str | Path, results: dict[str, Any]) -> None:
    write_whole(path, json.dumps(results, indent=1) + "\n")


class Earlier(NamedTuple):
    """What was measured before a stop."""

    rows: list[Row]
    """Those that were timed."""
    rates: dict[str, Rates]
    """The machine's, by dtype."""
    commit: str | None


def earlier(path: str | Path, settings: Settings) -> Earlier:
    """What a file holds that a run can go on with; nothing where there is no file.

    ResultsError where the machine or the contenders differ: times of both in one file would not
    compare. Rows of another dtype, layout or direction do not stand in each other's way.
    """
    if not Path(path).exists():
        return Earlier([], {}, None)
    results = read_results(path)
    if results["schema"] < SCHEMA:
        raise ResultsError(
            f"cannot resume {path}: it has schema {results['schema']} of an older upconv, "
            f"this one writes {SCHEMA}. Use another --out"
        )
    differences = [
        f"{name} {then} there, {now} now"
        for name, then, now in conditions_then_and_now(results, settings)
        if then != now
    ]
    if differences:
        raise ResultsError(
            f"cannot resume {path}: {'; '.join(differences)}. "
            "Use the same settings as then, or another --out"
        )
    rates = {dtype: Rates(**found) for dtype, found in results.get("machine_rates", {}).items()}
    rows = [row for row in rows_of(results) if row.times]
    return Earlier(rows, rates, results["environment"].get("commit"))


def conditions_then_and_now(
    results: dict[str, Any], settings: Settings
) -> list[tuple[str, object, object]]:
    """Name, value in the file and value now of all that must be equal to go on with a file."""
    # By way of JSON, which knows lists only.
    now = json.loads(json.dumps({"settings": asdict(settings)} | environment(settings)))
    then = {"settings": results["settings"]} | results["environment"]
    found: list[tuple[str, object, object]] = []
    for name in ("device", "against"):
        found.append((name, then["settings"].get(name), now["settings"][name]))
    for name in ("torch", "cuda", "upconv"):
        found.append((name, then.get(name), now[name]))
    for name in ("name", "threads", "isa"):
        found.append((f"hardware {name}", then["hardware"].get(name), now["hardware"][name]))
    return found


def holds(rows: list[Row], case: Case, settings: Settings) -> bool:
    """Whether one of the rows is this case, whatever part of its batch was measured."""
    wanted = problem_of(case, settings)
    return any(
        row.case == case.name
        and row.direction == settings.direction
        and replace(row.problem, batch=row.full_batch) == wanted
        for row in rows
    )


def csv_text(results: dict[str, Any]) -> str:
    """One line a row; the columns of a contender begin with its name."""
    rows = rows_of(results)
    there = {name for row in rows for name in (*row.errors, *row.skipped)}
    names = [name for name in TITLES if name in there]
    backward = any(row.direction == "backward" for row in rows)
    records = [flat(row, results, names, backward) for row in rows]
    text = io.StringIO()
    if records:
        writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    return text.getvalue()


def flat(
    row: Row, results: dict[str, Any], names: list[str], any_backward: bool
) -> dict[str, object]:
    """A row as single values; None, an empty cell, where there is none.

    Columns for the gradients are there where one of the rows is a backward pass.
    """
    machine = results["environment"]
    sizes = {
        name: "x".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in asdict(row.problem).items()
        if name not in ("kernel", "direction")
    }
    record: dict[str, object] = {
        "case": row.case,
        "direction": row.direction,
        "multiplied_as": row.kind.dtype,
        "device": results["settings"]["device"],
        **sizes,
        "full_batch": row.full_batch,
        "kernel_size": "x".join(map(str, row.problem.kernel)),
        "chosen_kernel": row.kernel,
        "correct": row.correct,
        "failure": row.failure,
        "limit": row.limit,
        "floor_ms": row.floor_ms,
        "speed_up": row.ratio,
    }
    for name in names:
        timing, rates = row.times.get(name), row.rates.get(name, {})
        record |= {
            f"{name}_{field}_ms": getattr(timing, field, None)
            for field in ("median", "low", "high", "fastest")
        }
        record[f"{name}_runs"] = getattr(timing, "runs", None)
        record[f"{name}_error"] = row.errors.get(name)
        record[f"{name}_tflop_per_s"] = rates.get("tflop_per_s")
        record[f"{name}_tb_per_s"] = rates.get("tb_per_s")
        record[f"{name}_share_of_floor"] = row.share_of_floor.get(name)
        for part in gradients.NAMES if any_backward else ():
            record[f"{name}_{part}_gradient_error"] = row.gradients.get(name, {}).get(part)
        record[f"{name}_scratch_bytes"] = row.scratch.get(name)
        record[f"{name}_skipped"] = row.skipped.get(name)
    return record | {
        "upconv_version": machine["upconv"],
        "commit": machine.get("commit"),
        "torch_version": machine["torch"],
        "hardware": machine["hardware"]["name"],
        "date": machine["date"],
    }
