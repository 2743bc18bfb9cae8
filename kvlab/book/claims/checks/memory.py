"""Checks on where a cache lies: bits of a format, tails of pages, block tables, pools of fixed bytes, links."""

from __future__ import annotations

from typing import Any

from kvlab.book.claims.checks.registry import Value, check, run
from kvlab.book.claims.checks.shapes import model_spec, token_readings
from kvlab.cache.manager import KVCacheManager
from kvlab.cache.pool import BlockPool
from kvlab.plan.capacity import tokens_that_fit
from kvlab.plan.hardware import get_gpu
from kvlab.plan.policies import PolicySettings, bytes_function, default_block_size, sequence_bytes
from kvlab.plan.timing import step_time
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.pages import table_pages
from kvlab.specs.parts import Retention
from kvlab.specs.units import parse_bytes


@check
def bits_per_value(dtype: str, width: int) -> Value:
    """Real bits of one value in a row of `width` values, scales and zero points included."""
    number = get_format(dtype).bits_per_value(width)
    return Value(number, f"{number:,.4g} bits a value in {dtype}, {width:,} to a row")


@check
def row_bytes_per_value(dtype: str, width: int) -> Value:
    """Bytes of one value in a row of `width` values, scales and zero points included."""
    number = get_format(dtype).row_bytes(width) / width
    return Value(number, f"{number:,.4g} B a value in {dtype}, {width:,} to a row")


def _tails(model: str, scale: float) -> tuple[int, list[int]]:
    """(tokens of a page, empty slots in the last page of sequences of every length that a page can end with)."""
    keep = Retention("all")
    size = int(default_block_size(model_spec(model)) * scale)
    return size, [table_pages(keep, size, n) * size - n for n in range(1, size + 1)]


@check
def tail_on_average(model: str, scale: float = 1) -> Value:
    """Empty slots in the last page, averaged over all lengths, with pages of `scale` times the planner's default."""
    size, tails = _tails(model, scale)
    number = sum(tails) / len(tails)
    return Value(number, f"{number:,.1f} empty slots a sequence on average with pages of {size}")


@check
def tail_at_most(model: str, scale: float = 1) -> Value:
    """Empty slots in the last page at the worst length, with pages of `scale` times the planner's default."""
    size, tails = _tails(model, scale)
    return Value(max(tails), f"{max(tails)} empty slots at most with pages of {size}")


@check
def page_use(model: str, tokens: str | int, block_size: int) -> Value:
    """The share of a sequence's pages that carries data, averaged over the lengths of one page from `tokens` on."""
    spec, settings = model_spec(model), PolicySettings("paged", block_size, in_flight=1)
    first, _ = token_readings(tokens)
    found = [sequence_bytes(spec, n, settings) for n in range(first, first + block_size)]
    number = sum(f.useful for f in found) / sum(f.total for f in found)
    return Value(number, f"{100 * number:,.1f} % of its pages at {first:,} tokens", brief=f"{100 * number:,.1f} %")


def _table(model: str, tokens: int, block_size: int) -> Any:
    groups = group_parts(model_spec(model), block_size)
    pages = tokens // block_size + 2
    manager = KVCacheManager(groups, [pages] * len(groups), tokens)
    assert manager.allocate("r", tokens)
    return manager.block_table("r")


@check
def table_entries(model: str, tokens: str | int, block_size: int) -> Value:
    """Entries of the block table of one sequence."""
    exact, decimal = token_readings(tokens)
    number, other = (len(_table(model, n, block_size)) for n in (exact, decimal))
    return Value(number, f"{number:,} entries for {exact:,} tokens; {other:,} for {decimal:,}", (other,))


@check
def table_bytes(model: str, tokens: str | int, block_size: int) -> Value:
    """Bytes of the block table of one sequence."""
    exact, decimal = token_readings(tokens)
    tables = [_table(model, n, block_size) for n in (exact, decimal)]
    number, other = (len(table) * table.itemsize for table in tables)
    return Value(number, f"{number:,} B of {tables[0].itemsize} B each", (other,), f"{number:,} B")


@check
def pool_tokens(size: str, model: str, kv_dtype: str = "bf16", block_size: int = 1) -> Value:
    """Tokens of one sequence that fit a pool of `size`; read in GiB too where it is stated in GB."""
    at = bytes_function(model_spec(model, kv_dtype), PolicySettings("paged", block_size, in_flight=1))
    readings = [size, size.replace("GB", "GiB")]
    number, other = (tokens_that_fit(at, parse_bytes(text)) for text in readings)
    pages = f", whole pages of {block_size}" if block_size > 1 else ""
    also = f"; {other:,} in {readings[1]}" if readings[1] != size else ""
    return Value(number, f"{number:,} tokens in {size}{pages}{also}", (other,), f"{number:,} tokens")


@check
def pages_of(story: list[list[str | int]], asked: str) -> Value:
    """How many of `asked`'s pages others held before it, after a story of ["take", who, pages] and ["free", who]."""
    pool = BlockPool(7)
    held: dict[str, list[int]] = {}
    before: set[int] = set()
    for event in story:
        who = str(event[1])
        if event[0] == "take":
            held[who] = pool.allocate(int(event[2]))
        else:
            before |= set(held[who])
            pool.free(held[who])
    number = len(set(held[asked]) & before)
    shown = ", ".join(f"{who} {pages}" for who, pages in held.items())
    return Value(number, f"pages {shown}; {number} of {asked}'s were held before")


@check
def slots_kept(model: str, context: int, drafts: int, accepted: int) -> Value:
    """Slots by which a sequence has grown after one step that verified `drafts` tokens and accepted `accepted`."""
    groups = group_parts(model_spec(model), 1)
    most = context + 1 + drafts
    manager = KVCacheManager(groups, [most + 1] * len(groups), most)
    assert manager.allocate("r", most)
    during = len(manager.block_table("r")) - context
    manager.advance("r", context + 1 + accepted)
    manager.truncate("r", context + 1 + accepted)
    number = len(manager.block_table("r")) - context
    text = f"{number} slot{'s' * (number > 1)} kept of {during} written, {drafts} drafted, {accepted} accepted"
    return Value(number, text, brief=f"{number} slot{'s' * (number > 1)} kept of {during} written")


@check
def gpu_bandwidth(gpu: str) -> Value:
    """Bytes a second that a GPU reads from its memory, by its data sheet."""
    found = get_gpu(gpu)
    return Value(found.bandwidth_bytes_per_s, f"{found.name} {found.bandwidth_bytes_per_s / 1e12:,.2f} TB/s")


@check
def transfer_time(of: dict[str, Any], rate: str) -> Value:
    """Seconds in which a link of `rate` bytes a second moves the bytes of another check."""
    moved, speed = run(of), parse_bytes(rate)
    number = step_time(0, int(moved.number), 0, speed, None).memory_s
    shown = f"{number * 1e3:,.1f} ms" if number < 1 else f"{number:,.2f} s"
    return Value(number, f"{shown} for {moved.short} at {rate}/s", brief=shown)
