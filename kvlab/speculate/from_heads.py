"""Proposers that draft with trained heads: Medusa's, which see one feature, and EAGLE's, which has a cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.engine.sampler import draw, probabilities, uniform
from kvlab.ops.attention import paged_attention
from kvlab.ops.linear import linear
from kvlab.ops.write_kv import write_kv
from kvlab.schedule import Chunk, Request, Step
from kvlab.speculate.cached import CachedProposer
from kvlab.speculate.draft import NO_DRAFT, Draft, Stateless
from kvlab.speculate.heads import Eagle, Medusa, load_heads
from kvlab.speculate.options import SpeculationOptions
from kvlab.speculate.trees import GrowingTree, best_nodes, product_tree
from kvlab.speculate.verify import drawing


class MedusaProposer(Stateless):
    """Drafts what each head makes of the feature from which the last token was picked: one product, no cache.

    Raises:
        ValueError: heads of another kind, or of a model of another width.
    """

    def __init__(self, engine: Any, path: Path, options: SpeculationOptions) -> None:
        self.engine, self.options = engine, options
        heads, rows, _ = load_heads(path, engine.model.device)
        self.heads = _fitting(heads, Medusa, heads.mix.shape[1] if isinstance(heads, Medusa) else 0, engine, path)
        self.rows = rows.to(engine.model.device)
        self.matrix = engine.model.decoder.head[self.rows].float()
        # (position of the token it stands at, feature) of each request
        self._last: dict[str, tuple[int, Tensor]] = {}

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """A chain or tree for each request; empty where its last feature is not known."""
        ready = [r for r in requests if self._last.get(r.request_id, (-1,))[0] == len(r.tokens) - 2]
        if not ready:
            return [NO_DRAFT] * len(requests)
        features = torch.stack([self._last[r.request_id][1] for r in ready]).float()
        logits = self.heads(features) @ self.matrix.T  # [heads, R, V]
        made = {r.request_id: logits[:, i] for i, r in enumerate(ready)}
        return [self._draft(r, n, made.get(r.request_id)) for r, n in zip(requests, counts, strict=True)]

    def observe(
        self, step: Step, hidden: Tensor | None, certain: Sequence[Sequence[int]], picked: Sequence[Sequence[int]]
    ) -> None:
        """Keeps the feature at each request's last certain token."""
        assert hidden is not None, "features were asked for"
        features = _features(self.engine, hidden[[rows[-1] for rows in certain]])
        for chunk, rows, feature in zip(step.chunks, certain, features, strict=True):
            self._last[chunk.request.request_id] = (chunk.start + len(rows) - 1, feature)

    def retain(self, request_ids: set[str]) -> None:
        """Forgets all other requests."""
        self._last = {r: seen for r, seen in self._last.items() if r in request_ids}

    def _draft(self, request: Request, count: int, logits: Tensor | None) -> Draft:
        if logits is None:
            return NO_DRAFT
        count = min(count, len(logits)) if not self.options.branches else count
        if self.options.branches:
            scores = logits[: len(self.options.branches)].log_softmax(-1)
            levels = [_best(own[None], n, self.rows)[0] for own, n in zip(scores, self.options.branches, strict=False)]
            return product_tree(levels, count)
        if request.params.temperature == 0 or not self.options.drawn:
            return Draft(tuple(self.rows[logits[:count].argmax(-1)].tolist()))
        spread = _spread(logits[:count], self.rows, self.engine)
        params = self.engine.row_params([request] * count, [len(request.tokens) + i for i in range(count)], spread)
        q = probabilities(spread, params)
        return Draft(tuple(draw(q, uniform(params.seed, params.position, drawing(0))).tolist()), (), q)


class EagleDecoder:
    """The EAGLE-style head as `kvlab.engine.runner.Runner` runs a decoder: `features` must be set for each run."""

    def __init__(self, head: Eagle, rows: Tensor, model: Any) -> None:
        self.head, self.rows, self.device = head, rows, model.device
        self.embedding, self.matrix = model.decoder.embedding, model.decoder.head[rows].float()
        self.vocab, self.features = model.config.vocab_size, torch.empty(0)

    def hidden_states(self, ids: Tensor, batches: Sequence[Any], views: Sequence[Sequence[Any]]) -> Tensor:
        """The predicted features [T, H] behind tokens `ids`; their keys and values are written to the cache."""
        batch, view = batches[0], views[0][0]
        embedded = F.embedding(ids, self.embedding).float()
        stream, query, key, value = self.head.enter(self.features, embedded, batch.positions)
        write_kv(key, value, view, batch.slot_mapping)
        seen = paged_attention(query, view, batch, scale=self.head.head_dim**-0.5)
        return self.head.leave(stream, seen)

    def logits(self, features: Tensor) -> Tensor:
        """Logits [R, vocab], minus infinity for tokens that the head cannot draft."""
        made = linear(features, self.matrix)
        return made.new_full((len(made), self.vocab), float("-inf")).index_copy_(1, self.rows, made)


@dataclass
class Fed:
    """What an EAGLE head was given of one request: entry i stands for the feature at position base + i.

    `pending` holds the features of the entries from `done` on, which the head has not computed with.
    """

    base: int
    done: int = 0
    pending: list[Tensor] = field(default_factory=list)


class EagleProposer(CachedProposer):
    """Drafts feature by feature, a chain or a tree, over a cache of the head's own.

    Raises:
        ValueError: a head of another kind, or of a model of another width.
    """

    def __init__(self, engine: Any, path: Path, options: SpeculationOptions) -> None:
        head, rows, _ = load_heads(path, engine.model.device)
        head = _fitting(head, Eagle, len(head.join) if isinstance(head, Eagle) else 0, engine, path)
        decoder = EagleDecoder(head, rows.to(engine.model.device), engine.model)
        vocab, hidden = engine.model.config.vocab_size, engine.model.config.hidden_size
        most = max(options.k, options.branches[0] * len(options.branches) if options.branches else 0)
        super().__init__(engine, decoder, head.spec(vocab, hidden), most, options.drawn)
        self.options, self.decoder = options, decoder
        self.runner.tree_of = lambda chunk: tuple(self._trees.get(chunk.request.request_id, ()))
        self._fed_by: dict[str, Fed] = {}
        # predicted features of drafts by request, and the parents of those in the cache
        self._predicted: dict[str, list[Tensor]] = {}
        self._trees: dict[str, list[int]] = {}

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """A chain or a tree for each request; empty where its features are not known."""
        self._predicted, self._trees = {r.request_id: [] for r in requests}, {}
        draft = self._grow if self.options.branches else super().propose
        drafts = draft(requests, counts)
        for request in requests:
            if (fed := self._fed_by.get(request.request_id)) and request.request_id in self.cache.computed:
                known = len(request.tokens) - 1 - fed.base
                if self.cache.computed[request.request_id] >= known > fed.done:
                    fed.pending, fed.done = fed.pending[known - fed.done :], known
        return drafts

    def observe(
        self, step: Step, hidden: Tensor | None, certain: Sequence[Sequence[int]], picked: Sequence[Sequence[int]]
    ) -> None:
        """Keeps the features of all certain tokens until the head has computed with them."""
        assert hidden is not None, "features were asked for"
        for chunk, rows in zip(step.chunks, certain, strict=True):
            fed = self._fed_by.setdefault(chunk.request.request_id, Fed(chunk.start))
            at = chunk.start - fed.base
            fed.pending = fed.pending[: max(0, at - fed.done)]
            fed.done = min(fed.done, at)
            fed.pending += _features(self.engine, hidden[list(rows)]).float().unbind(0)

    def retain(self, request_ids: set[str]) -> None:
        """Forgets all other requests."""
        super().retain(request_ids)
        self._fed_by = {r: fed for r, fed in self._fed_by.items() if r in request_ids}

    def _fed(self, request: Request) -> array:
        return request.tokens[self._fed_by[request.request_id].base + 1 :]

    def _follow(self, request: Request, count: int) -> bool:
        fed = self._fed_by.get(request.request_id)
        if fed is None:
            return False
        known = len(request.tokens) - 1 - fed.base
        # without the feature at the token before the last there is nothing to go on from
        return fed.done < known == fed.done + len(fed.pending) and super()._follow(request, count)

    def _certain(self, request: Request, shadow: Any) -> int:
        return self._fed_by[request.request_id].done

    def _run(self, chunks: Sequence[Chunk]) -> Tensor | None:
        self.decoder.features = torch.stack([f for chunk in chunks for f in self._features_of(chunk)])
        logits = super()._run(chunks)
        row = 0
        for chunk in chunks:
            row += chunk.count
            if chunk.samples and not self.options.branches:
                self._predicted[chunk.request.request_id].append(self.runner.hidden[row - 1])
        return logits

    def _features_of(self, chunk: Chunk) -> list[Tensor]:
        fed, drafted = self._fed_by[chunk.request.request_id], self._predicted[chunk.request.request_id]
        known = fed.done + len(fed.pending)
        return [
            fed.pending[i - fed.done] if i < known else drafted[i - known]
            for i in range(chunk.start, chunk.start + chunk.count)
        ]

    def _grow(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """Trees level by level, those of all requests in one run: the likeliest nodes of each level are given
        children, the likeliest of all stay."""
        branches, longest = self.options.branches, self.engine.limits.max_model_len
        # the cache takes no node that has no children
        nodes = branches[0] * (len(branches) - 1)
        ready = [r for r in requests if len(r.tokens) + nodes <= longest and self._follow(r, 1 + nodes)]
        self._catch_up(ready)
        trees = {r.request_id: GrowingTree() for r in ready}
        for depth, children in enumerate(branches if ready else ()):
            features = self._level(trees)
            best = _best(self.decoder.logits(features).log_softmax(-1), children)
            at = 0
            for request_id, tree in trees.items():
                own = slice(at, at := at + len(tree.frontier))
                tree.widen(best[own])
                if depth + 1 < len(branches):
                    self._deepen(request_id, tree, features[own])
        grown = [trees.get(r.request_id) for r in requests]
        return [
            best_nodes(tree.tokens, tree.parents, tree.scores, n) if tree else NO_DRAFT
            for tree, n in zip(grown, counts, strict=True)
        ]

    def _level(self, trees: dict[str, GrowingTree]) -> Tensor:
        """The predicted features of every tree's frontier, one tree after the other."""
        chunks = sorted((self._rest(request_id, False) for request_id in trees), key=lambda chunk: chunk.count != 1)
        self._run(chunks)
        found, row = {}, 0
        for chunk in chunks:
            row += chunk.count
            frontier = trees[chunk.request.request_id].frontier
            found[chunk.request.request_id] = self.runner.hidden[row - len(frontier) : row]
        return torch.cat([found[request_id] for request_id in trees])

    def _deepen(self, request_id: str, tree: GrowingTree, features: Tensor) -> None:
        """Lets the likeliest nodes of the tree's last level be computed next, each from its parent's feature."""
        parents = dict(zip(tree.frontier, features, strict=True))
        for node, place in tree.deepen(self.options.branches[0]):
            self._trees.setdefault(request_id, []).append(place)
            self._predicted[request_id].append(parents[tree.parents[node]])
            self.shadows[request_id].tokens.append(tree.tokens[node])


def _fitting(network: Any, kind: type, hidden: int, engine: Any, path: Path) -> Any:
    wanted = engine.model.config.hidden_size
    if not isinstance(network, kind) or hidden != wanted:
        raise ValueError(f"heads {path}: must be {kind.__name__} heads for features of {wanted} values")
    return network


def _features(engine: Any, hidden: Tensor) -> Tensor:
    norm = engine.model.decoder.final_norm
    return hidden if norm is None else norm(hidden)


def _best(scores: Tensor, count: int, rows: Tensor | None = None) -> list[list[tuple[int, float]]]:
    """The `count` likeliest (token, log probability) of each row of `scores` [R, V]."""
    value, index = scores.topk(min(count, scores.shape[-1]))
    tokens = index if rows is None else rows[index]
    return [list(zip(*own, strict=True)) for own in zip(tokens.tolist(), value.tolist(), strict=True)]


def _spread(logits: Tensor, rows: Tensor, engine: Any) -> Tensor:
    vocab = engine.model.config.vocab_size
    return logits.new_full((len(logits), vocab), float("-inf")).index_copy_(1, rows, logits)
