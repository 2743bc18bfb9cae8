"""What makes two histories equal: their tokens, and everything else that the cached values depend on.

Tokens count by their bytes, four each, cut into units: a unit is as many tokens as one page of every group, or several
pages of each, covers. What else counts is an extra key with its domain in front and its length before it, so that no
adapter can pass for a salt, and none of them for tokens (vllm#44701).

    adapter   in every unit: name and digest of the weights
    media     in every unit that an item overlaps: its digest, and where it starts, counted from the unit's first token
    salt      in the first unit alone; histories carry it on
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

TOKEN_BYTES = 4

MediaItem = tuple[str, int, int]
"""(digest of the content, position of its first placeholder token, number of placeholder tokens)."""


def tagged(domain: bytes, *parts: bytes) -> bytes:
    """The bytes of an extra key: equal only for equal domains and parts."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in (domain, *parts))


class History:
    """The tokens of one request as keys.

    Args:
        tokens: 32-bit ids; the request's own array, which may grow.
        unit: tokens of a unit.
        adapter, salt: "" is none.
        media: items as (digest, start, length); a bare digest counts for every unit, as its place is not known.

    Raises:
        ValueError: tokens that are not 32 bits wide, or a media item of another form.
    """

    __slots__ = ("_every", "_first", "_media", "digests", "namespace", "tokens", "unit")

    def __init__(
        self, tokens: array[int], unit: int, adapter: str = "", salt: str = "", media: Sequence[MediaItem | str] = ()
    ) -> None:
        if tokens.itemsize != TOKEN_BYTES:
            raise ValueError(f"tokens: an array of {tokens.itemsize} bytes a token, must be {TOKEN_BYTES}")
        self.tokens, self.unit = tokens, unit
        self._every = tagged(b"adapter", adapter.encode()) if adapter else b""
        self._first = tagged(b"salt", salt.encode()) if salt else b""
        self._media: list[MediaItem] = []
        if media:
            items = [_item(item) for item in media]
            self._every += b"".join(tagged(b"media", digest.encode()) for digest, _, length in items if length < 0)
            self._media = [item for item in items if item[2] >= 0]
        self.namespace = self._every + self._first
        # of the first units, where a design asks for them
        self.digests: list[bytes] = []

    @property
    def has_media(self) -> bool:
        """Whether any unit has an extra key of its own."""
        return bool(self._media)

    def token_bytes(self, first: int, last: int) -> bytes:
        """The bytes of units first .. last - 1."""
        with memoryview(self.tokens) as tokens:
            return tokens[first * self.unit : last * self.unit].tobytes()

    def num_equal(self, first: int, last: int, key: bytes | bytearray, at: int = 0) -> int:
        """How many of the units first .. last - 1, from the first on, are what `key` has from its unit `at` on.

        Compared where they lie: copies of a long prompt would take longer than the comparison.
        """
        unit, width = self.unit, self.unit * TOKEN_BYTES
        most = min(last - first, len(key) // width - at)
        with memoryview(self.tokens) as tokens:
            if key.startswith(tokens[first * unit : (first + most) * unit], at * width):
                return most
            low, high = 0, most
            # units below `low` are equal, those below `high` are not all
            while high - low > 1:
                middle = (low + high) // 2
                part = tokens[(first + low) * unit : (first + middle) * unit]
                low, high = (middle, high) if key.startswith(part, (at + low) * width) else (low, middle)
        return low

    @property
    def width(self) -> int:
        """Token bytes of a unit."""
        return self.unit * TOKEN_BYTES

    def pieces(self, first: int, last: int) -> list[bytes]:
        """What the digests of units first .. last - 1 are made of, besides the digest before: tokens and extra key."""
        width, data = self.width, self.token_bytes(first, last)
        pieces = [data[i : i + width] for i in range(0, len(data), width)]
        extras = self.extras(first, last)
        return [tokens + extra for tokens, extra in zip(pieces, extras, strict=True)] if any(extras) else pieces

    def cut(self, tokens: int) -> None:
        """Forgets what was worked out for units that end behind the first `tokens` tokens."""
        del self.digests[tokens // self.unit :]

    def extra(self, unit: int) -> bytes:
        """What else the values of that unit depend on, besides its tokens and what came before it."""
        return self._every + (self._first if unit == 0 else b"") + self.media_of(unit)

    def extras(self, first: int, last: int) -> list[bytes]:
        """The extra keys of units first .. last - 1."""
        if self._media:
            return [self.extra(unit) for unit in range(first, last)]
        found = [self._every] * (last - first)
        if found and first == 0:
            found[0] = self.extra(0)
        return found

    def media_of(self, unit: int) -> bytes:
        """The extra key of the media that overlap that unit; b"" for none."""
        if not self._media:
            return b""
        start = unit * self.unit
        return b"".join(
            tagged(b"media", digest.encode(), (at - start).to_bytes(8, "little", signed=True))
            for digest, at, length in self._media
            if at < start + self.unit and at + length > start
        )


def _item(item: MediaItem | str) -> MediaItem:
    if isinstance(item, str):
        return item, 0, -1
    digest, start, length = item
    if start < 0 or length < 1:
        raise ValueError(f"media {item!r}: must be (digest, start, length), start from 0 and length from 1")
    return digest, start, length
