"""Storage formats: how many bytes a row of cached values takes, codes and metadata counted apart.

A row is what one token stores for one head: `width` values. Its codes are packed to whole bytes;
its metadata (scales, zero points) is counted per group of values. Nothing here encodes or decodes:
that is `kvlab.quant`, which takes every size from here. A format with `group_tokens` has no rows of single
tokens: `kvlab.specs.grouped` says what it keeps instead.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGN = 16  # bytes: rows and page segments start at multiples of this


@dataclass(frozen=True)
class StorageFormat:
    """One way to store values.

    Attributes:
        name: as in `--kv-dtype`.
        bits: bits of one code.
        scale_bytes: bytes of scale (and zero point) per group of values; 0 for plain types.
        group_values: values that share a scale; 0 means the whole row (one token, one head).
        about: one line for people.
        group_tokens: tokens that are quantized together once they are old enough; 0: each token alone, at once.
        recent: of such a format, tokens that a query must be past the end of a group before it reads its codes.
        outliers: of such a format, values per thousand that are kept apart, each with its place.
    """

    name: str
    bits: int
    scale_bytes: int = 0
    group_values: int = 0
    about: str = ""
    group_tokens: int = 0
    recent: int = 0
    outliers: int = 0

    def code_bytes(self, width: int) -> int:
        """Bytes of the codes of one row of `width` values, without padding: each plane of a power of two of bits is
        packed to whole bytes (3 bits are a plane of 2 and one of 1)."""
        planes = (self.bits & bit for bit in (1, 2, 4)) if self.bits < 8 else (self.bits,)
        return sum(-(-width * plane // 8) for plane in planes)

    def meta_bytes(self, width: int) -> int:
        """Bytes of scales and zero points of one row of `width` values."""
        if not self.scale_bytes:
            return 0
        return self.scale_bytes * (-(-width // self.group_values) if self.group_values else 1)

    def row_bytes(self, width: int) -> int:
        """Bytes of one row of `width` values, codes and metadata, without padding."""
        return self.code_bytes(width) + self.meta_bytes(width)

    def bits_per_value(self, width: int) -> float:
        """Real bits per value of a row of `width` values, metadata included."""
        return 8 * self.row_bytes(width) / width


FORMATS: dict[str, StorageFormat] = {
    f.name: f
    for f in (
        StorageFormat("fp64", 64, about="IEEE double (tests of exactness)"),
        StorageFormat("fp32", 32, about="IEEE single"),
        StorageFormat("bf16", 16, about="bfloat16"),
        StorageFormat("fp16", 16, about="IEEE half"),
        StorageFormat("fp8_e4m3", 8, about="8-bit float, 3 mantissa bits, clamped to +-448, scale 1 or calibrated"),
        StorageFormat("fp8_e5m2", 8, about="8-bit float, 2 mantissa bits, clamped to +-57,344, scale 1 or calibrated"),
        StorageFormat("fp8_e4m3_row", 8, 4, about="fp8 e4m3, one fp32 scale per token and head"),
        StorageFormat("fp8_e5m2_row", 8, 4, about="fp8 e5m2, one fp32 scale per token and head"),
        StorageFormat("int8", 8, 4, about="symmetric, one fp32 scale per token and head"),
        StorageFormat("int8_asym", 8, 8, about="asymmetric, fp32 scale and smallest value per token and head"),
        StorageFormat("int8_g32", 8, 2, 32, about="symmetric, one fp16 scale per 32 values"),
        StorageFormat("int8_asym_g32", 8, 4, 32, about="asymmetric, fp16 scale and smallest value per 32 values"),
        StorageFormat("int4", 4, 4, about="asymmetric, fp32 scale per token and head, zero point in its last 4 bits"),
        StorageFormat("int4_sym", 4, 4, about="symmetric, one fp32 scale per token and head"),
        StorageFormat("int4_g32", 4, 4, 32, about="asymmetric, fp16 scale and smallest value per 32 values"),
        StorageFormat("int4_sym_g32", 4, 2, 32, about="symmetric, one fp16 scale per 32 values"),
        StorageFormat("nvfp4", 4, 1, 16, about="e2m1 codes, one e4m3 scale per 16 values"),
        StorageFormat("mxfp4", 4, 1, 32, about="e2m1 codes, one e8m0 scale (a power of two) per 32 values"),
        StorageFormat("int4_had", 4, 4, about="int4 of the row turned by a Hadamard matrix"),
        StorageFormat("int3_had", 3, 4, about="3 bits, fp16 scale and smallest value, of the row turned likewise"),
        StorageFormat("kivi4", 4, 4, 32, "keys per channel, values per token, 32 together; the last 128 in full", 32, 128),
        StorageFormat("kivi2", 2, 4, 32, "as kivi4, with 2 bits", 32, 128),
        StorageFormat(
            "kvquant3", 3, 4, 0, "keys before rotation, uneven codes, 1% of values apart; the last 128 in full",
            32, 128, 10,
        ),
    )
}  # fmt: skip

_ALIASES = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
    "fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2",
}  # fmt: skip


def get_format(name: str) -> StorageFormat:
    """The storage format called `name` (aliases such as "bfloat16" and "fp8" are understood).

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    key = _ALIASES.get(str(name).removeprefix("torch.").lower(), str(name).lower())
    if key not in FORMATS:
        raise ValueError(f"dtype {name!r}: must be one of {', '.join(FORMATS)}")
    return FORMATS[key]


def align(n_bytes: int, to: int = ALIGN) -> int:
    """`n_bytes` rounded up to a multiple of `to`."""
    return -(-n_bytes // to) * to
