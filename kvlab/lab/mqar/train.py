"""Training and scoring one model: the same budget of optimisation steps for every kind, less when it has the answers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from kvlab.lab.mqar.data import FRESH, make_batch, tokens_of
from kvlab.lab.mqar.models import Kind, RecallModel


@dataclass(frozen=True)
class Settings:
    """The conditions of the experiment, one for all kinds.

    Attributes:
        steps: the most optimisation steps.
        solved, solved_batches: training ends early when the last `solved_batches` batches of the largest load had this
            fraction of their queries right.
        tokens_per_step: a batch has as many sequences as fit this many tokens.
        loads: pairs of a sequence; one load per step, in turn.
        easy_loads, easy_fraction: the loads of the first part of training and how long it lasts. Finding out that keys
            are to be matched takes longest, and takes less time on short sequences.
        learning_rate: its peak (AdamW without weight decay), after `warmup` steps, then a cosine down to a twentieth.
        clip: largest norm of the gradient.
    """

    steps: int = 1000
    solved: float = 0.995
    solved_batches: int = 5
    tokens_per_step: int = 512
    loads: tuple[int, ...] = (4, 8, 16, 32)
    easy_loads: tuple[int, ...] = (4, 8)
    easy_fraction: float = 0.3
    learning_rate: float = 5e-3
    warmup: int = 50
    clip: float = 1.0

    def load_at(self, step: int) -> int:
        """Pairs of a sequence in step `step`."""
        loads = self.easy_loads if step < self.easy_fraction * self.steps else self.loads
        return loads[step % len(loads)]

    def rate_at(self, step: int) -> float:
        """Learning rate of step `step`."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.learning_rate * min(1.0, (step + 1) / self.warmup) * (0.05 + 0.95 * cosine)


def train(
    kind: Kind, seed: int, settings: Settings, progress: Callable[[int, float], None] = lambda step, loss: None
) -> RecallModel:
    """A model of `kind`, trained; weights and batches are functions of `seed`. Ends with weights that fp16 can hold."""
    torch.manual_seed(seed)
    model = RecallModel(kind)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    last: deque[float] = deque(maxlen=settings.solved_batches)
    for step in range(settings.steps):
        pairs = settings.load_at(step)
        batch = make_batch(pairs, settings.tokens_per_step // tokens_of(pairs), seed=seed, index=step)
        logits = model(batch.ids, pairs)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.param_groups[0]["lr"] = settings.rate_at(step)
        optimizer.step()
        progress(step + 1, loss.item())
        if pairs == max(settings.loads):
            last.append((logits.argmax(-1) == batch.answers).double().mean().item())
            if len(last) == settings.solved_batches and sum(last) >= settings.solved * len(last):
                break
    return model.half().float().eval().requires_grad_(False)


def score(model: RecallModel, pairs: int, *, seed: int, sequences: int = 256) -> float:
    """The fraction of queries answered rightly, on sequences that no training batch shares a random number with.

    A right answer is the most likely of all tokens of the vocabulary.
    """
    batch = make_batch(pairs, sequences, seed=seed, index=0, stream=FRESH)
    with torch.inference_mode():
        chosen = model(batch.ids, pairs).argmax(-1)
    return (chosen == batch.answers).double().mean().item()
