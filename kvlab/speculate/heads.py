"""Small networks that draft from what the model itself computed: Medusa heads and an EAGLE-style head.

Both share the model's output matrix, or the rows of it that they were trained for: a draft can only be a token of that
list, what is verified can be any. A *feature* here is what leaves the model's last layer, after its final norm.

Sources: Cai et al. 2024, Medusa: head j is one residual block and says what stands j tokens behind the next one.
Li et al. 2024, EAGLE: from a feature and the token that was picked from it, one layer predicts the next feature. It
differs by a gated block of width `wide` and by features after the norm.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.models.facts import RopeFacts
from kvlab.models.rope import inverse_frequencies, rope_tables, rotate
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention

EPS = 1e-6


class Medusa(nn.Module):
    """`count` heads; called with features [T, H] it returns what each head makes of them, [count, T, H]."""

    def __init__(self, hidden: int, count: int = 4) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(count, hidden, hidden))

    def forward(self, features: Tensor) -> Tensor:
        return features + F.silu(features @ self.mix.transpose(1, 2))


class Eagle(nn.Module):
    """One layer that predicts the next feature from a feature and the token picked from it.

    Args:
        hidden: width of a feature. heads, kv_heads, head_dim: of its attention. wide: of its feed-forward part.
    """

    def __init__(self, hidden: int, heads: int = 9, kv_heads: int = 3, head_dim: int = 64, wide: int = 768) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns) * columns**-0.5)

        self.join = matrix(hidden, 2 * hidden)
        self.qkv = matrix((heads + 2 * kv_heads) * head_dim, hidden)
        self.out = nn.Parameter(torch.zeros(hidden, heads * head_dim))
        self.gate_up = matrix(2 * wide, hidden)
        self.down = nn.Parameter(torch.zeros(hidden, wide))
        rope = RopeFacts(theta=10_000.0)
        self.register_buffer("frequencies", inverse_frequencies(rope, head_dim), persistent=False)

    def enter(self, features: Tensor, embedded: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(stream [T, H], rotated query [T, heads, D], rotated key and value [T, kv_heads, D])."""
        stream = torch.cat((_norm(features), _norm(embedded)), -1) @ self.join.T
        widths = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        rows = (_norm(stream) @ self.qkv.T).split(widths, -1)
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in rows)
        cos, sin = rope_tables(positions, self.frequencies, stream.dtype)
        return stream, rotate(query, cos, sin), rotate(key, cos, sin), value

    def leave(self, stream: Tensor, seen: Tensor) -> Tensor:
        """The predicted features [T, H] from the stream and what attention gave [T, heads, D]."""
        stream = stream + seen.flatten(-2) @ self.out.T
        gate, up = (_norm(stream) @ self.gate_up.T).chunk(2, -1)
        return stream + (F.silu(gate) * up) @ self.down.T

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Predicted features [T, H] of one whole sequence, each from what stands before it."""
        positions = torch.arange(len(features))
        stream, query, key, value = self.enter(features, embedded, positions)
        heads = (x.transpose(0, 1)[None] for x in (query, key, value))
        seen = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.leave(stream, seen[0].transpose(0, 1))

    def spec(self, vocab: int, hidden: int) -> ModelSpec:
        """What the head caches: keys and values of one layer."""
        part = Attention(self.kv_heads, self.head_dim, self.head_dim, get_format("fp32"))
        return ModelSpec("eagle head", "eagle", (LayerSpec(0, (part,)),), hidden, self.heads, vocab)


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def save_heads(path: Path, network: nn.Module, rows: Tensor, about: dict[str, str]) -> int:
    """Bytes of the file, which holds the network in fp16 and the ids int32 [V] of the tokens it can draft."""
    from safetensors.torch import save_file

    tensors = {name: p.detach().to(torch.float16).contiguous() for name, p in network.named_parameters()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors | {"rows": rows.to(torch.int32)}, str(path), metadata=about)
    return path.stat().st_size


def load_heads(path: Path, device: torch.device | str = "cpu") -> tuple[nn.Module, Tensor, dict[str, str]]:
    """(`Medusa` or `Eagle` in fp32, the ids int64 [V] of the tokens it can draft, what the file says of itself).

    Raises:
        ValueError: no such file, or none of heads.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(
            f"heads {path}: no such file; `python -m kvlab.lab.train_heads` makes those of the default model"
        )
    try:
        with safe_open(str(path), "pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"heads {path}: is no safetensors file ({error})") from None
    rows = tensors.pop("rows", torch.empty(0)).long()
    if set(tensors) == {"mix"}:
        network: nn.Module = Medusa(tensors["mix"].shape[1], len(tensors["mix"]))
    elif "join" in tensors:
        heads, kv_heads, head_dim = (int(about[name]) for name in ("heads", "kv_heads", "head_dim"))
        network = Eagle(len(tensors["join"]), heads, kv_heads, head_dim, tensors["down"].shape[1])
    else:
        raise ValueError(f"heads {path}: holds neither Medusa's nor an EAGLE head's tensors")
    network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return network.to(device).requires_grad_(False), rows, about
