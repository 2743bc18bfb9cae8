"""What a parameter count holds, and what of it a decode step reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightCount:
    """Parameters of a model's text part, tied embeddings once. All numbers are parameters, not bytes.

    Attributes:
        total: every parameter; equals transformers' class on the meta device.
        embedding: tables of which a token reads one row each (tokens, learned positions, per-layer inputs).
        embedding_row: the parameters of those rows, per token.
        lm_head: read whole for logits; the token table itself when `tied`.
        tied: the output matrix is the token table, counted once in `total`.
        per_expert: one routed expert of one layer; 0 for a dense model.
        num_experts, experts_per_token: routed experts of one MoE layer, and how many a token visits.
        moe_layers: layers that route.
        reread: parameters of blocks that several layers share, once more for each use after the first.
        notes: what a reader of a plan must know: fields filled in, parts left out.
    """

    total: int
    embedding: int
    embedding_row: int
    lm_head: int
    tied: bool
    per_expert: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    moe_layers: int = 0
    reread: int = 0
    notes: tuple[str, ...] = ()

    @property
    def shared(self) -> int:
        """Parameters outside the routed experts, tables included."""
        return self.total - self.per_expert * self.num_experts * self.moe_layers

    @property
    def active(self) -> int:
        """Parameters one token uses: `shared` plus its experts. Some model cards leave the token tables out."""
        return self.shared + self.per_expert * self.experts_per_token * self.moe_layers

    @property
    def read_always(self) -> int:
        """Parameters a step reads whatever the batch: all but the tables' other rows and the routed experts."""
        return self.shared - self.embedding + (self.lm_head if self.tied else 0) + self.reread

    def read_per_step(self, batch: int = 1) -> float:
        """Expected parameters one decode step of `batch` sequences reads, experts chosen evenly.

        Raises:
            ValueError: batch under 1.
        """
        distinct = expected_distinct_experts(self.num_experts, self.experts_per_token, batch)
        rows = min(batch * self.embedding_row, self.embedding)
        return self.read_always + rows + self.moe_layers * self.per_expert * distinct


def expected_distinct_experts(num_experts: int, experts_per_token: int, batch: int) -> float:
    """Experts of one layer that at least one of `batch` tokens visits: E (1 - (1 - k/E)^B), choices even.

    A trained router is less even, so this is an upper estimate of what a step reads.

    Raises:
        ValueError: batch under 1, or more experts per token than there are.
    """
    if batch < 1:
        raise ValueError(f"batch {batch}: must be at least 1")
    if not 0 <= experts_per_token <= num_experts:
        raise ValueError(f"experts_per_token {experts_per_token}: must be 0..num_experts ({num_experts})")
    if num_experts == 0:
        return 0.0
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** batch)
