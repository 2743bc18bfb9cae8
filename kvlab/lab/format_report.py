"""What each storage format costs and loses: nominal and real bits per value, and its error on real and planted rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from kvlab.engine.kv_formats import key_turn
from kvlab.lab.paged_run import keys_and_values
from kvlab.models.load import LoadedModel
from kvlab.ops.attention.coverage import fallback
from kvlab.ops.grouped_views import Turn
from kvlab.ops.views import page_views
from kvlab.quant import round_trip
from kvlab.quant.calibrate import calibrate, scale_of
from kvlab.quant.closed import BEFORE_ROTATION, codec_of
from kvlab.quant.fixed import FixedScales
from kvlab.specs.cache_spec import CacheSpec
from kvlab.specs.fixed_scales import FIXED, SHARES
from kvlab.specs.formats import FORMATS, get_format
from kvlab.specs.grouped import grouped
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention

OUTLIER = 30.0  # times as large as its neighbours
TEXT = """A cache keeps what was computed so that it need not be computed again. In a transformer the keys and values of
earlier tokens do not change when a new token arrives, so they are stored once and read by every later step. The price is
memory: it grows with every token, with every layer and with every head that keeps keys of its own. Long prompts, many
users and large models all draw on the same pool. Storing each number in fewer bits is the most direct way to make room,
and the question is only which numbers can bear it. Keys have a few channels that are large for every token; values do
not. Whoever shares one scale between a large number and its small neighbours loses the neighbours. That is why one
format keeps a scale for every token, another one for every channel, and a third turns the row first, so that nothing
sticks out any more. None of this is free: scales are bytes too, and they count."""

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [tokens, Hkv, D] of each layer."""


@dataclass(frozen=True)
class FormatRow:
    """One format, of heads of `head_dim` values.

    Attributes:
        bits: of one code. row_bits: codes and metadata per value. page_bits: padding of a page included.
        key, value: error on the default model's keys and values, root mean square over that of the rows themselves;
            the mean over layers.
        outlier: error on the other values of rows in which one channel is 30 times as large, likewise.
        note: what else it keeps. cpu: how the CPU path reads its pages, as `cpu_words`. gpu: "" where
            a Triton kernel reads them, else why torch gathers and decodes them first.
    """

    name: str
    bits: int
    row_bits: float
    page_bits: float
    key: float
    value: float
    outlier: float
    note: str
    cpu: str
    gpu: str


def stored_part(name: str, heads: int, head_dim: int) -> CacheSpec:
    """What one layer of such heads keeps in format `name`; of a format of groups the closed ones."""
    fmt, plain = get_format(name), get_format("bf16")
    if fmt.group_tokens:
        return grouped(Attention(heads, head_dim, head_dim, plain), 0, fmt)[0]
    return Attention(heads, head_dim, head_dim, fmt)


def bits_per_value(name: str, heads: int, head_dim: int, block_size: int = 32) -> tuple[float, float]:
    """(bits per value of an entry, bits per value of a page of `block_size` tokens with its padding)."""
    part, tokens = stored_part(name, heads, head_dim), get_format(name).group_tokens or 1
    page = page_layout(part, block_size // tokens)
    return 8 * part.entry_bytes / (2 * heads * head_dim * tokens), 8 * page.page_bytes / (
        2 * heads * head_dim * block_size
    )


def bits_held(name: str, heads: int, head_dim: int, tokens: int) -> float:
    """Bits per value that a sequence of `tokens` tokens holds: the recent window of a format of groups, here in bf16,
    included, padding of pages not."""
    fmt = get_format(name)
    plain = Attention(heads, head_dim, head_dim, get_format("bf16"))
    parts = grouped(plain, 0, fmt) if fmt.group_tokens else (stored_part(name, heads, head_dim),)
    return 8 * sum(part.bytes_at(tokens) for part in parts) / (2 * heads * head_dim * tokens)


def stored_again(
    name: str, key: torch.Tensor, value: torch.Tensor, turn: Turn | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [tokens, Hkv, D] as format `name` gives them back; of a format of groups the whole groups only."""
    fmt = get_format(name)
    if not fmt.group_tokens:
        return round_trip(name, key), round_trip(name, value)
    part, count = stored_part(name, *key.shape[1:]), len(key) // fmt.group_tokens * fmt.group_tokens
    positions, turned = torch.arange(count), turn if name in BEFORE_ROTATION else None
    key = key[:count] if turned is None else turned(key[:count], positions, True)
    rows = [x[:count].unflatten(0, (-1, fmt.group_tokens)).transpose(1, 2) for x in (key, value)]
    back = codec_of(part).decode(codec_of(part).encode(*rows, part), part)
    key, value = (x.transpose(1, 2).flatten(0, 1) for x in back)
    return (key if turned is None else turned(key, positions, False)), value


def relative_error(rows: torch.Tensor, back: torch.Tensor) -> float:
    """Root mean square of the difference over that of the rows, which may be longer than what came back."""
    rows = rows[: len(back)].double()
    return float((back.double() - rows).square().mean().sqrt() / rows.square().mean().sqrt())


def planted(tokens: int = 64, heads: int = 2, head_dim: int = 64, channel: int = 5) -> torch.Tensor:
    """Normal rows [tokens, heads, D] in which one channel is 30 times as large."""
    rows = torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(0))
    rows[..., channel] *= OUTLIER
    return rows


def report(model: LoadedModel, names: Sequence[str] = (), ids: Sequence[int] | None = None) -> list[FormatRow]:
    """A row for each format, and for fp8 one for each way to share a calibrated scale.

    On the keys and values that `ids` (None: a packaged text) leave in `model`'s cache.

    Raises:
        ValueError: an unknown format; a model whose layers do not keep keys and values.
    """
    return report_on(model, keys_and_values(model, model.tokenizer.encode(TEXT) if ids is None else ids), names)


def report_on(model: LoadedModel, layers: Layers, names: Sequence[str] = ()) -> list[FormatRow]:
    """As `report`, on `layers` that `kvlab.lab.paged_run.keys_and_values` took from `model`'s cache, all or some."""
    names = [get_format(n).name for n in names] or [n for n in FORMATS if n != "fp64"]
    head_dim = layers[0][0].shape[2]
    facts = model.config.layers[0].branches[0].module
    turn = None if facts.rope is None else key_turn(facts.rope, head_dim, model.decoder, len(layers[0][0]))
    rows = []
    for name in names:
        back = [stored_again(name, key, value, turn) for key, value in layers]
        rows.append(_row(name, layers, back, stored_again(name, *[planted(head_dim=head_dim)] * 2)[0]))
        if name in FIXED:
            rows += [_fixed_row(name, share, layers) for share in SHARES]
    return rows


def _row(name: str, layers: Layers, back: Layers, outliers: torch.Tensor) -> FormatRow:
    """The row of `layers` that came back as `back`, and of planted rows that came back as `outliers`."""
    errors = [
        [relative_error(*pair) for pair in zip(own, again, strict=True)]
        for own, again in zip(layers, back, strict=True)
    ]
    key_error, value_error = torch.tensor(errors).mean(0).tolist()
    heads, head_dim = layers[0][0].shape[1:]
    others, fmt = torch.arange(head_dim) != 5, get_format(name)
    outlier = relative_error(planted(head_dim=head_dim)[..., others], outliers[..., others])
    return FormatRow(
        name, fmt.bits, *bits_per_value(name, heads, head_dim), key_error, value_error, outlier, fmt.about, cpu_words(name, head_dim),
        fallback(name, head_dim),
    )  # fmt: skip


def _fixed_row(name: str, share: str, layers: Layers) -> FormatRow:
    """The row of format `name` with one scale per `share`, found from the rows themselves: none of them is clamped."""

    def again(rows: torch.Tensor) -> torch.Tensor:
        scale = scale_of(rows, share, name)
        return round_trip(name, rows / scale) * scale

    found = _row(name, layers, [(again(key), again(value)) for key, value in layers],
                 again(planted(head_dim=layers[0][0].shape[2])))  # fmt: skip
    num_bytes = sum(fixed.bytes for fixed in calibrate(layers, share, name).values())
    note = f"one fp32 scale per {share} of each layer, found from these rows: {num_bytes:,} bytes beside the pool"
    return replace(found, name=f"{name}/{share}", note=note, cpu=cpu_words(name, layers[0][0].shape[2], fixed=True))


def cpu_words(name: str, head_dim: int, fixed: bool = False) -> str:
    """How the CPU path reads pages of a format: "in place" as they lie, or "gathered" and decoded by torch first."""
    part = stored_part(name, 1, head_dim)
    if get_format(name).group_tokens:
        return "gathered"
    layout = page_layout(part, 1)
    views = page_views(torch.zeros(1, layout.page_bytes, dtype=torch.uint8), layout)
    one = torch.ones(1, 1)
    return "in place" if replace(views, fixed=FixedScales(one, one) if fixed else None).in_place else "gathered"


def as_dicts(rows: Sequence[FormatRow]) -> list[dict]:
    """The rows as JSON has them."""
    return [asdict(row) for row in rows]
