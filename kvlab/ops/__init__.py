"""The operations of the engine. Each is a folder: `reference` (plain torch, the truth), `torch_` where a
device path needs no host reads, `cpu` (Numba). Importing this package imports nothing; import an operation
from its folder, as in `from kvlab.ops.attention import paged_attention`.

Symbols: T tokens of the step, B sequences, Hq query heads, Hkv KV heads, D head_dim, P tokens per page.
"""
