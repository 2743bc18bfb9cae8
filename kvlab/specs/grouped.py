"""A layer whose older tokens are quantized in groups: closed groups, and beside them the last tokens in full.

A group is `format.group_tokens` tokens in a row. A query at position t reads its codes when it ended at least
`format.recent` tokens before t, and reads the tokens behind that from the recent window. So what a query reads depends
on t alone, and a group that is closed is never written again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvlab.specs.cache_spec import CacheSpec, Retention, Row, heads_per_rank
from kvlab.specs.formats import StorageFormat, get_format
from kvlab.specs.parts import Attention, SlidingWindow

OUTLIER_VALUES = 2  # 16-bit values that an outlier takes: its place in the group, and itself


@dataclass(frozen=True)
class ClosedGroups(CacheSpec):
    """Keys and values of whole groups of tokens; one entry is one group.

    Keys share a scale per channel over the group, values per token over `value_group` channels.
    """

    num_kv_heads: int
    key_width: int
    value_width: int
    format: StorageFormat
    kind: ClassVar[str] = "closed"

    @property
    def retention(self) -> Retention:
        return Retention("stride", self.format.group_tokens)

    @property
    def value_group(self) -> int:
        """Values of a token's value that share a scale: `group_values` where they divide the width, else all."""
        size = self.format.group_values
        return size if size and self.value_width % size == 0 else self.value_width

    @property
    def outliers(self) -> tuple[int, int]:
        """Values of a head's keys and of its values that a group keeps apart."""
        tokens, share = self.format.group_tokens, self.format.outliers
        return -(-self.key_width * tokens * share // 1000), -(-self.value_width * tokens * share // 1000)

    def rows(self) -> tuple[Row, ...]:
        tokens, heads, pair = self.format.group_tokens, self.num_kv_heads, get_format("fp16")
        key, value = (replace(self.format, group_values=size) for size in (tokens, self.value_group))
        codes = (
            Row("k_closed", heads, self.key_width * tokens, key),
            Row("v_closed", heads, self.value_width * tokens, value),
        )
        names = zip(("k_outliers", "v_outliers"), self.outliers, strict=True)
        return codes + tuple(Row(name, heads, OUTLIER_VALUES * count, pair) for name, count in names if count)

    def per_rank(self, tp: int) -> CacheSpec:
        return replace(self, num_kv_heads=heads_per_rank(self.num_kv_heads, tp))


@dataclass(frozen=True)
class RecentWindow(SlidingWindow):
    """The last tokens of part `of` of the same layer, in full: those of no closed group, and what closes next."""

    of: int = 0
    kind: ClassVar[str] = "recent"


def grouped(part: Attention, index: int, fmt: StorageFormat) -> tuple[ClosedGroups, RecentWindow]:
    """What stands for `part`, number `index` of its layer, in a format of groups; recent tokens keep its own format."""
    shape = (part.num_kv_heads, part.key_dim, part.value_dim)
    return ClosedGroups(*shape, fmt), RecentWindow(*shape, part.format, window=fmt.recent + fmt.group_tokens, of=index)
