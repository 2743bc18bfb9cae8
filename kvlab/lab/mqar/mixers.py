"""The mixers that the experiment compares, in plain torch: what a layer may read of earlier tokens, and what it keeps.

Each is written twice. `forward` takes a whole sequence, for training; `step` takes one token and the state kept so far,
as an engine decodes. `part` is the spec of what `step` keeps, and the only source of its bytes.

No mixer knows positions (as in Jamba, whose attention has none): order comes from the model's short convolution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kvlab.specs.formats import get_format
from kvlab.specs.parts import Attention, CacheSpec, MLALatent, RecurrentState, SlidingWindow, StateArray

State = tuple[torch.Tensor, ...]
FORMAT = get_format("fp32")


def rms(x: torch.Tensor) -> torch.Tensor:
    """`x` divided by the root mean square of its last dimension."""
    return F.rms_norm(x, (x.shape[-1],))


def causal(tokens: int, window: int | None = None) -> torch.Tensor:
    """bool [T, T]: which keys a query may see, its own token included; of a window, the last `window` tokens."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return seen if window is None else seen & ~seen.tril(-window)


def decay(log_alpha: torch.Tensor) -> torch.Tensor:
    """[..., T, T]: what is left at t of something written at i, exp(sum of log_alpha over i+1 .. t); 0 for i > t."""
    total = log_alpha.cumsum(-1)
    span = total[..., :, None] - total[..., None, :]
    return span.masked_fill(~causal(log_alpha.shape[-1]), -torch.inf).exp()


class Mixer(nn.Module):
    """What all mixers answer; x is fp32 [B, T, width] in `forward` and [B, width] in `step`."""

    def part(self) -> CacheSpec:
        """The spec of what this layer keeps."""
        raise NotImplementedError

    def start(self, batch: int) -> State:
        """The state before the first token."""
        raise NotImplementedError

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """(output [B, width], state after this token)."""
        raise NotImplementedError


class SoftmaxAttention(Mixer):
    """MHA, GQA, MQA by `kv_heads`; a sliding window by `window`."""

    def __init__(self, width: int, heads: int, kv_heads: int, window: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.window = heads, kv_heads, width // heads, window
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def part(self) -> CacheSpec:
        shape = (self.kv_heads, self.head_dim, self.head_dim, FORMAT)
        return Attention(*shape) if self.window is None else SlidingWindow(*shape, window=self.window)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, T, D]
        return heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._project(x)
        return self.out(attend(q, k, v, causal(x.shape[1], self.window)))

    def start(self, batch: int) -> State:
        empty = torch.zeros(batch, self.kv_heads, 0, self.head_dim)
        return empty, empty

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        q, k, v = self._project(x[:, None])
        first = -self.window if self.window else 0
        k, v = (torch.cat((old, new), dim=2)[:, :, first:] for old, new in zip(state, (k, v), strict=True))
        return self.out(attend(q, k, v))[:, 0], (k, v)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """[B, T, Hq x D]: softmax attention of q [B, Hq, T, D] over k, v [B, Hkv, S, D]."""
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2).flatten(2)


class LatentAttention(Mixer):
    """MLA: one latent per token is kept; every head's keys and values are products of it."""

    def __init__(self, width: int, heads: int, latent: int) -> None:
        super().__init__()
        self.heads, self.latent = heads, latent
        self.q = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, latent, bias=False)
        self.up = nn.Linear(latent, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def part(self) -> CacheSpec:
        return MLALatent(self.latent, 0, FORMAT)

    def _attend(self, x: torch.Tensor, latent: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.up(rms(latent)).unflatten(-1, (2 * self.heads, -1)).transpose(1, 2).chunk(2, dim=1)
        return self.out(attend(q, k, v, mask))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._attend(x, self.down(x), causal(x.shape[1]))

    def start(self, batch: int) -> State:
        return (torch.zeros(batch, 0, self.latent),)

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        x = x[:, None]
        latent = torch.cat((state[0], self.down(x)), dim=1)
        return self._attend(x, latent)[:, 0], (latent,)


class Mamba2(Mixer):
    """Mamba-2: per head a matrix that decays and takes up dt * x B^T; read by C. No convolution of its own.

    Source: Dao & Gu 2024 (arXiv 2405.21060), section 6: the quadratic form of one chunk.
    """

    def __init__(self, width: int, heads: int, state: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.state = heads, width // heads, state
        self.split = (width, width, state, state, heads)
        self.project = nn.Linear(width, sum(self.split), bias=False)
        self.dt_bias = nn.Parameter(torch.full((heads,), 0.5))
        self.log_a = nn.Parameter(torch.logspace(-2, -1, heads).log())
        self.skip = nn.Parameter(torch.zeros(heads))
        self.out = nn.Linear(width, width, bias=False)

    def part(self) -> CacheSpec:
        units = ((self.heads, self.head_dim * self.state),)
        return RecurrentState("mamba2", (StateArray("state", units, 1, FORMAT),))

    def _inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(gate, x per head, B, C, dt, log of the decay) of x [..., width]."""
        gate, value, b, c, dt = self.project(x).split(self.split, dim=-1)
        dt = F.softplus(dt + self.dt_bias)
        return gate, F.silu(value).unflatten(-1, (self.heads, -1)), F.silu(b), F.silu(c), dt, -dt * self.log_a.exp()

    def _output(self, y: torch.Tensor, value: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.out(rms((y + self.skip[:, None] * value).flatten(-2) * F.silu(gate)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value, b, c, dt, log_alpha = self._inputs(x)
        weights = decay(log_alpha.transpose(1, 2)) * (c @ b.transpose(1, 2))[:, None]  # [B, H, T, T]
        y = weights @ (dt[..., None] * value).transpose(1, 2)
        return self._output(y.transpose(1, 2), value, gate)

    def start(self, batch: int) -> State:
        return (torch.zeros(batch, self.heads, self.head_dim, self.state),)

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        gate, value, b, c, dt, log_alpha = self._inputs(x)
        h = log_alpha.exp()[..., None, None] * state[0] + (dt[..., None] * value)[..., None] * b[:, None, None]
        return self._output((h @ c[:, None, :, None])[..., 0], value, gate), (h,)


class GatedDelta(Mixer):
    """The gated delta rule: per head a matrix that decays, and at a key replaces what it held by the new value.

    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, read by q. No convolution of its own.
    Source: Yang et al. 2024 (arXiv 2412.06464); `forward` solves the triangular system of one chunk.
    """

    def __init__(self, width: int, heads: int, key_dim: int) -> None:
        super().__init__()
        self.heads, self.key_dim, self.value_dim = heads, key_dim, width // heads
        self.split = (heads * key_dim, heads * key_dim, width, width, heads, heads)
        self.project = nn.Linear(width, sum(self.split), bias=False)
        self.dt_bias = nn.Parameter(torch.full((heads,), 0.5))
        self.log_a = nn.Parameter(torch.logspace(-2, -1, heads).log())
        self.out = nn.Linear(width, width, bias=False)

    def part(self) -> CacheSpec:
        units = ((self.heads, self.key_dim * self.value_dim),)
        return RecurrentState("gated_delta", (StateArray("state", units, 1, FORMAT),))

    def _inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(q, k, v per head, gate, beta, log of the decay) of x [..., width]."""
        q, k, v, gate, beta, dt = self.project(x).split(self.split, dim=-1)
        q, k, v = (F.silu(part).unflatten(-1, (self.heads, -1)) for part in (q, k, v))
        log_alpha = -F.softplus(dt + self.dt_bias) * self.log_a.exp()
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, gate, beta.sigmoid(), log_alpha

    def _output(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.out(rms(y).flatten(-2) * F.silu(gate))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, gate, beta, log_alpha = self._inputs(x)
        q, k, v, beta = (part.transpose(1, 2) for part in (q, k, v, beta))  # [B, H, T, ...]
        left = decay(log_alpha.transpose(1, 2))
        # what token t writes is beta_t (v_t - what the state already returns at k_t), a system that is lower triangular
        system = beta[..., None] * left * (k @ k.transpose(-1, -2))
        written = torch.linalg.solve_triangular(system, beta[..., None] * v, upper=False, unitriangular=True)
        y = (left * (q @ k.transpose(-1, -2))) @ written
        return self._output(y.transpose(1, 2), gate)

    def start(self, batch: int) -> State:
        return (torch.zeros(batch, self.heads, self.value_dim, self.key_dim),)

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        q, k, v, gate, beta, log_alpha = self._inputs(x)
        s = log_alpha.exp()[..., None, None] * state[0]
        held = (s @ k[..., None])[..., 0]
        s = s + (beta[..., None] * (v - held))[..., None] * k[..., None, :]
        return self._output((s @ q[..., None])[..., 0], gate), (s,)
