"""The models of the experiment: one stack, one short convolution, and in each layer a mixer that a letter names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from kvlab.lab.mqar.data import VOCAB
from kvlab.lab.mqar.mixers import FORMAT, GatedDelta, LatentAttention, Mamba2, Mixer, SoftmaxAttention, State, rms
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import RecurrentState, StateArray

WIDTH, HEADS, LAYERS, KERNEL = 64, 4, 8, 4
WINDOW = 16  # tokens that a window layer sees
LATENT = 16  # values of an MLA latent
STATE_HEADS, STATE = 2, 8  # a recurrent layer keeps STATE_HEADS matrices of (WIDTH / STATE_HEADS) x STATE

MIXERS: dict[str, Callable[[int], Mixer]] = {
    "A": lambda state: SoftmaxAttention(WIDTH, HEADS, HEADS),
    "G": lambda state: SoftmaxAttention(WIDTH, HEADS, 2),
    "Q": lambda state: SoftmaxAttention(WIDTH, HEADS, 1),
    "L": lambda state: LatentAttention(WIDTH, HEADS, LATENT),
    "W": lambda state: SoftmaxAttention(WIDTH, HEADS, HEADS, WINDOW),
    "M": lambda state: Mamba2(WIDTH, STATE_HEADS, state),
    "D": lambda state: GatedDelta(WIDTH, STATE_HEADS, state),
}


@dataclass(frozen=True)
class Kind:
    """A model of the experiment.

    Attributes:
        name: its key in the record and the stem of its checkpoint.
        label: for people.
        pattern: one letter of MIXERS per layer.
        state: width of a recurrent layer's keys.
    """

    name: str
    label: str
    pattern: str
    state: int = STATE


# the attention layer of a hybrid closes its period's first half, as in Jamba (layer 4 of 8, counted from 0)
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("mha", "MHA", "AAAAAAAA"),
        Kind("gqa", "GQA, 2 KV heads", "GGGGGGGG"),
        Kind("mqa", "MQA", "QQQQQQQQ"),
        Kind("mla", "MLA", "LLLLLLLL"),
        Kind("window", f"window of {WINDOW}", "WWWWWWWW"),
        Kind("mamba2", "Mamba-2", "MMMMMMMM"),
        Kind("gated_delta", "gated delta", "DDDDDDDD"),
        Kind("hybrid_1_1", "hybrid 1:1", "MAMAMAMA"),
        Kind("hybrid_1_3", "hybrid 1:3", "MMAMMMAM"),
        Kind("hybrid_1_7", "hybrid 1:7", "MMMMAMMM"),
        Kind("mamba2_wide", "Mamba-2, 4x state", "MMMMMMMM", 4 * STATE),
    )
}


class RecallModel(nn.Module):
    """Embedding, short causal convolution, then per layer x + mixer(norm(x)); logits over the vocabulary.

    There is no feed-forward part: recall is the mixers' work.
    """

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, KERNEL, groups=WIDTH)
        self.mixers = nn.ModuleList(MIXERS[letter](kind.state) for letter in kind.pattern)
        self.norms = nn.ParameterList(torch.ones(WIDTH) for _ in kind.pattern)
        self.last_norm = nn.Parameter(torch.ones(WIDTH))
        self.unembed = nn.Linear(WIDTH, VOCAB, bias=False)
        for mixer in self.mixers:  # a deep stack starts as a sum of small changes
            nn.init.normal_(mixer.out.weight, std=0.02)

    def forward(self, ids: torch.Tensor, scored: int) -> torch.Tensor:
        """Logits fp32 [B, scored, VOCAB] of the last `scored` tokens of ids [B, T]."""
        x = self.embed(ids)
        x = x + self._convolve(nn.functional.pad(x, (0, 0, KERNEL - 1, 0)))
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(rms(x) * norm)
        return self.unembed(rms(x[:, -scored:]) * self.last_norm)

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, width] from [B, T + KERNEL - 1, width]."""
        return self.conv(x.transpose(1, 2)).transpose(1, 2)

    def start(self, batch: int) -> list[State]:
        """What is kept before the first token: the convolution's inputs, then each layer's state."""
        return [(torch.zeros(batch, KERNEL - 1, WIDTH),), *(mixer.start(batch) for mixer in self.mixers)]

    def step(self, ids: torch.Tensor, states: list[State]) -> tuple[torch.Tensor, list[State]]:
        """(logits [B, VOCAB] after one more token ids [B], what is kept now): the model as an engine decodes."""
        x = self.embed(ids)
        inputs = torch.cat((states[0][0], x[:, None]), dim=1)
        x = x + self._convolve(inputs)[:, 0]
        kept: list[State] = [(inputs[:, 1:],)]
        for norm, mixer, state in zip(self.norms, self.mixers, states[1:], strict=True):
            y, state = mixer.step(rms(x) * norm, state)
            x = x + y
            kept.append(state)
        return self.unembed(rms(x) * self.last_norm), kept

    def spec(self) -> ModelSpec:
        """What a sequence keeps: the convolution's last inputs, then each layer's part."""
        conv = RecurrentState("short_conv", (StateArray("conv", ((WIDTH, 1),), KERNEL - 1, FORMAT),))
        parts = [(conv,), *((mixer.part(),) for mixer in self.mixers)]
        layers = tuple(LayerSpec(i, part) for i, part in enumerate(parts))
        return ModelSpec(self.kind.label, "mqar", layers, WIDTH, HEADS, VOCAB)
