"""Files of traces as they are published, one format each.

mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids (512 tokens a block)
bailian    JSON lines: timestamp (s), input_length, output_length, hash_ids (16 tokens a block), chat_id
azure      CSV: TIMESTAMP (clock), ContextTokens, GeneratedTokens
burstgpt   CSV: Timestamp (s), Request tokens, Response tokens; rows without a response are left out
sharegpt   JSON array of conversations, or one a line (`kvlab.simulate.conversations`); a tokenizer counts their lengths
lengths    CSV: num_prefill_tokens, num_decode_tokens (vidur, Sarathi on ShareGPT); arrived_at (s) where it is there
"""

from __future__ import annotations

import csv
import datetime
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlab.simulate.conversations import Conversations, Count
from kvlab.simulate.traces import LONGEST, Trace, TraceRequest


def read_trace(path: str | Path, kind: str = "", count: Count | None = None, limit: int | None = None) -> Trace:
    """The trace in the file at `path`, its kind recognised unless it is given.

    Args:
        count: tokens of a text, for files that hold texts.
        limit: requests to read of such a file: counting takes a while.

    Raises:
        ValueError: names the file, the row and the rule it breaks.
        OSError: it cannot be read.
    """
    with open(path, encoding="utf-8-sig", newline="") as lines:
        try:
            return parse_trace(lines, str(path), kind, count, limit)
        except UnicodeDecodeError:
            raise ValueError(f"{path}: is no text in UTF-8, so it is no trace") from None


def parse_trace(
    lines: Iterable[str], name: str = "trace", kind: str = "", count: Count | None = None, limit: int | None = None
) -> Trace:
    """The trace written in `lines`: see `read_trace`."""
    rows = iter(lines)
    first = next((line for line in rows if line.strip()), "")
    kind = kind or _recognised(first, name)
    if kind not in READERS:
        raise ValueError(f"{name}: kind {kind!r} must be one of {', '.join(READERS)}")
    reader = Conversations(count) if kind == "sharegpt" else READERS[kind]
    found, skipped = [], {}
    for number, row in reader.rows(first, rows, name):
        reason = reader.skip(row)
        if reason:
            skipped[reason] = skipped.get(reason, 0) + 1
            continue
        try:
            found.append(reader.request(row))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}, row {number}: {_rule(error)}") from None
        _check(found[-1], reader.block_tokens, f"{name}, row {number}")
        if kind == "sharegpt" and len(found) == limit:
            break
    if not found:
        raise ValueError(f"{name}: holds no request")
    timed = kind not in ("lengths", "sharegpt") or any(r.arrival_s for r in found)
    found.sort(key=lambda r: r.arrival_s)
    start = found[0].arrival_s
    requests = tuple(replace(r, arrival_s=round(r.arrival_s - start, 7)) for r in found)
    return Trace(name, kind, requests, reader.block_tokens, timed, tuple(sorted(skipped.items())))


def _recognised(first: str, name: str) -> str:
    start = first.lstrip()
    if start.startswith("[") or (start.startswith("{") and '"conversations"' in start):
        return "sharegpt"
    if start.startswith("{"):
        return "bailian" if '"chat_id"' in start else "mooncake"
    heads = {"ContextTokens": "azure", "Request tokens": "burstgpt", "num_prefill_tokens": "lengths"}
    for column, kind in heads.items():
        if column in start.strip().split(","):
            return kind
    raise ValueError(f"{name}, row 1: neither a JSON object nor a header with one of {', '.join(heads)}")


def _rule(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    return str(error)


def _check(request: TraceRequest, block: int, place: str) -> None:
    for name in ("prompt_tokens", "output_tokens"):
        if not 1 <= getattr(request, name) <= LONGEST:
            raise ValueError(f"{place}: {name} {getattr(request, name)} must be from 1 to {LONGEST:,}")
    if not math.isfinite(request.arrival_s):
        raise ValueError(f"{place}: arrival {request.arrival_s} must be a number of seconds")
    need = math.ceil(request.prompt_tokens / block)
    if request.hash_ids and len(request.hash_ids) != need:
        raise ValueError(
            f"{place}: {len(request.hash_ids)} hash_ids, {request.prompt_tokens} tokens in blocks of {block} have {need}"
        )
    if request.hash_ids and not 0 <= min(request.hash_ids) <= max(request.hash_ids) < 2**30:
        raise ValueError(f"{place}: hash_ids must be at least 0 and below 2**30")


class JsonLines:
    """Rows of JSON objects with hash ids."""

    def __init__(self, block_tokens: int, seconds: float) -> None:
        self.block_tokens, self._seconds = block_tokens, seconds

    def rows(self, first: str, rest: Iterable[str], name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """(row number, object) of each line that is not empty."""
        for number, line in enumerate(_chain(first, rest), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}, row {number}: not JSON ({error})") from None
            except RecursionError:
                raise ValueError(f"{name}, row {number}: not JSON of a request (nested too deep)") from None
            if not isinstance(row, dict):
                raise ValueError(f"{name}, row {number}: must be a JSON object")
            yield number, row

    def skip(self, row: dict[str, Any]) -> str:
        """Why the row is left out; "" when it is not."""
        return "no output tokens" if row.get("output_length") == 0 else ""

    def request(self, row: dict[str, Any]) -> TraceRequest:
        """The request of a row."""
        hashes = row.get("hash_ids") or ()
        return TraceRequest(
            _number(row, "timestamp") * self._seconds, _whole(row, "input_length"), _whole(row, "output_length"),
            tuple(_plain(h) for h in hashes),
        )  # fmt: skip


class Table:
    """Rows of a CSV file with a header.

    Args:
        prompt, output: columns of lengths. time: column of arrivals, may be missing when not `timed`.
    """

    block_tokens = 512

    def __init__(self, prompt: str, output: str, time: str, clock: bool = False, timed: bool = True) -> None:
        self._prompt, self._output, self._time, self._clock, self._timed = prompt, output, time, clock, timed

    def rows(self, first: str, rest: Iterable[str], name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line number, cells by column)."""
        reader = csv.DictReader(_chain(first, rest))
        columns = reader.fieldnames or ()
        needed = (self._prompt, self._output, *([self._time] if self._timed else []))
        if missing := [column for column in needed if column not in columns]:
            raise ValueError(f"{name}, row 1: column {missing[0]!r} is missing")
        try:
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise ValueError(f"{name}, row {reader.line_num + 1}: not CSV ({error})") from None

    def skip(self, row: dict[str, Any]) -> str:
        """Why the row is left out; "" when it is not."""
        return "no output tokens" if (row.get(self._output) or "").strip() in ("0", "0.0") else ""

    def request(self, row: dict[str, Any]) -> TraceRequest:
        """The request of a row."""
        arrival = 0.0
        if self._clock:
            arrival = _clock(row[self._time])
        elif row.get(self._time):
            arrival = _number(row, self._time)
        return TraceRequest(arrival, _whole(row, self._prompt), _whole(row, self._output))


def _chain(first: str, rest: Iterable[str]) -> Iterator[str]:
    yield first
    yield from rest


def _plain(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"hash_ids: {value!r} must be a whole number")
    return value


def _number(row: dict[str, Any], column: str) -> float:
    try:
        return float(row[column])
    except (TypeError, ValueError):
        raise ValueError(f"{column} {row[column]!r} must be a number") from None


def _whole(row: dict[str, Any], column: str) -> int:
    value = _number(row, column)
    if not value.is_integer():
        raise ValueError(f"{column} {row[column]!r} must be a whole number")
    return int(value)


def _clock(text: str) -> float:
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except (AttributeError, ValueError):
        raise ValueError(f"TIMESTAMP {text!r} must be a date and a time, as in 2023-11-16 18:15:46.68") from None
    # without a zone: only differences count, and none may change with the reader's
    return moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp()


READERS: dict[str, JsonLines | Table | Conversations] = {
    "mooncake": JsonLines(512, 1e-3),
    "bailian": JsonLines(16, 1.0),
    "azure": Table("ContextTokens", "GeneratedTokens", "TIMESTAMP", clock=True),
    "burstgpt": Table("Request tokens", "Response tokens", "Timestamp"),
    "sharegpt": Conversations(),
    "lengths": Table("num_prefill_tokens", "num_decode_tokens", "arrived_at", timed=False),
}
