"""The factors of a model's bytes, written out: one line per kind of layer, as on paper."""

from __future__ import annotations

from kvlab.specs.model import ModelSpec
from kvlab.specs.parts import CacheSpec, Row

NAMES = {
    "full": "full attention", "sliding": "sliding window", "chunked": "chunked attention", "mla": "latent (MLA)",
    "index": "index keys", "compressed": "compressed entries", "recurrent": "recurrent state",
    "cross": "cross attention", "buffer": "open buffers", "shared": "shares another layer's cache", "none": "no cache",
    "closed": "closed groups", "recent": "recent window",
}  # fmt: skip


def part_counts(model: ModelSpec) -> list[tuple[CacheSpec, int]]:
    """Every distinct part that owns something, with the number of layers that have it."""
    found: dict[CacheSpec, int] = {}
    for _, part in model.parts():
        if part.kind != "shared":
            found[part] = found.get(part, 0) + 1
    return list(found.items())


def kind_counts(model: ModelSpec) -> list[tuple[str, int]]:
    """Layer kinds and how many layers are of each, for a title."""
    found: dict[str, int] = {}
    for layer in model.layers:
        found[layer.kind] = found.get(layer.kind, 0) + 1
    return list(found.items())


def token_lines(model: ModelSpec) -> list[str]:
    """For each kind of part that grows: its factors, and their product over all its layers."""
    lines = []
    for part, count in part_counts(model):
        if part.rows() and part.kind != "cross":
            lines += _part_lines(part, count)
    return lines or ["  no layer keeps anything per token"]


def _part_lines(part: CacheSpec, count: int) -> list[str]:
    rule = part.retention
    limit = {
        "window": f", the last {rule.size:,} tokens",
        "chunk": f", the current {rule.size:,} tokens",
        "stride": f", one entry per {rule.size} tokens",
    }.get(rule.rule, "")
    total = count * part.entry_bytes
    per = "entry" if rule.rule == "stride" else "token"
    factors = f"{factors_text(part, count)} = {total:,} bytes per {per}"
    if len(factors) + 4 > 80:
        return [f"  {NAMES[part.kind]}{limit}:", f"    {factors_text(part, count)}", f"    = {total:,} bytes per {per}"]
    return [f"  {NAMES[part.kind]}{limit}:", f"    {factors}"]


def factors_text(part: CacheSpec, count: int) -> str:
    """The factors of a part's bytes per token: "2 x 80 layers x 8 KV heads x 128 x 2 bytes"."""
    rows = part.rows()
    layers = f"{count} layer{'s' if count != 1 else ''}"
    heads = f" x {rows[0].heads} KV head{'s' if rows[0].heads != 1 else ''}" if hasattr(part, "num_kv_heads") else ""
    if len(rows) == 2 and rows[0].width == rows[1].width and hasattr(part, "num_kv_heads"):
        return f"2 (K, V) x {layers}{heads} x {_row_text(rows[0])}"
    if len({r.format for r in rows}) == 1 and not rows[0].format.scale_bytes and rows[0].format.bits % 8 == 0:
        widths = " + ".join(str(r.width) for r in rows)
        return f"{layers}{heads} x {f'({widths})' if len(rows) > 1 else widths} x {_per_value(rows[0])}"
    return f"{layers}{heads} x ({' + '.join(_row_text(r) for r in rows)})"


def _per_value(row: Row) -> str:
    n = row.format.bits // 8
    return f"{n} byte{'s' if n != 1 else ''}"


def _row_text(row: Row) -> str:
    fmt, width = row.format, row.width
    if not fmt.scale_bytes and fmt.bits % 8 == 0:
        return f"{width} x {_per_value(row)}"
    scales = f" + {fmt.meta_bytes(width)} of scales" if fmt.scale_bytes else ""
    return f"({width} x {fmt.bits} bits{scales} = {fmt.row_bytes(width)} bytes)"


def state_lines(model: ModelSpec) -> list[str]:
    """For each kind of part of fixed size: the arrays it keeps, and their bytes over all its layers."""
    lines = []
    for part, count in part_counts(model):
        if part.kind in ("recurrent", "buffer"):
            for a in part.arrays:  # type: ignore[attr-defined]
                name = "open buffer" if part.kind == "buffer" else part.mechanism  # type: ignore[attr-defined]
                lines.append(
                    f"  {name} {a.name}: {count} layers x {a.elements:,} values in {a.format.name} "
                    f"= {count * a.array_bytes:,} bytes"
                )
        elif part.kind == "cross" and part.fixed_bytes:
            tokens = part.encoder_tokens  # type: ignore[attr-defined]
            lines.append(f"  cross attention: {factors_text(part, count)}")
            lines.append(f"    x {tokens:,} image tokens = {count * part.fixed_bytes:,} bytes")
    return lines


def sharding_lines(model: ModelSpec, tp: int) -> list[str]:
    """For each kind of part, what one of `tp` tensor-parallel ranks holds of it."""
    if tp == 1:
        return []
    lines = []
    for part, _ in part_counts(model):
        rank = part.per_rank(tp)
        if hasattr(part, "num_kv_heads"):
            all_heads, heads = part.num_kv_heads, rank.num_kv_heads  # type: ignore[attr-defined]
            copies = f", each head on {tp * heads // all_heads} ranks" if tp > all_heads else ""
            lines.append(f"  {NAMES[part.kind]}: {all_heads} KV heads over {tp} ranks, {heads} on each{copies}")
        elif rank == part:
            lines.append(f"  {NAMES[part.kind]}: held whole by every rank")
        else:
            lines.append(f"  {NAMES[part.kind]}: {rank.fixed_bytes:,} of {part.fixed_bytes:,} bytes per layer")
    return list(dict.fromkeys(lines))


def sequence_lines(model: ModelSpec, tokens: int) -> list[str]:
    """For each kind of part: bytes per token x the tokens it holds of a sequence of `tokens`, and the product."""
    terms = []
    for part, count in part_counts(model):
        if part.kind == "buffer":
            continue
        value = count * part.bytes_at(tokens)
        if part.kind in ("recurrent", "cross"):
            terms.append((NAMES[part.kind], "fixed", value))
        else:
            terms.append((NAMES[part.kind], f"{count * part.entry_bytes:,} x {_held_text(part, tokens)}", value))
    label, text = (max((len(t[i]) for t in terms), default=0) for i in (0, 1))
    if label + text > 52:
        return [line for t in terms for line in (f"  {t[0]}: {t[1]}", f"    = {t[2]:,} bytes")]
    return [f"  {name:<{label}}  {factors:<{text}}  = {value:,}" for name, factors, value in terms]


def _held_text(part: CacheSpec, tokens: int) -> str:
    rule = part.retention
    if rule.rule in ("window", "chunk"):
        return f"min({tokens:,}, {rule.size + rule.sinks:,})"
    return f"floor({tokens:,} / {rule.size})" if rule.rule == "stride" else f"{tokens:,}"
