"""One sequence in a cache of its own, read in chunks: what experiments on storage formats run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvlab.engine.kv_formats import finished_views, kv_formats
from kvlab.engine.storage import PagedStorage
from kvlab.models.load import LoadedModel
from kvlab.ops.batch import make_batch
from kvlab.ops.coded import decode_rows
from kvlab.plan.policies import default_block_size
from kvlab.quant.fixed import FixedScales
from kvlab.specs.layout import group_parts


class PagedRun:
    """A sequence of at most `max_tokens` tokens of `model`, its cache stored by the rule `kv_dtype`.

    Windows are kept whole and masked by attention. Every format is causal, so what comes out does not depend on how
    the sequence is cut into chunks.

    Attributes:
        spec: what the layers cache. views: of the cache, [layer][part]. tokens: how many it holds.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv_dtype: str,
        max_tokens: int,
        scales: Mapping[int, FixedScales] | None = None,
    ) -> None:
        self.model = model
        self.kv_dtype, self.spec = kv_formats(model, kv_dtype)
        self.block_size = default_block_size(self.spec)
        groups = group_parts(self.spec, self.block_size)
        pages = -(-max_tokens // self.block_size)
        self.storage = PagedStorage(groups, [1 + pages] * len(groups), model.device)
        self.views = finished_views(self.storage.views(self.spec), model, max_tokens, scales)
        self.table = torch.arange(1, 1 + pages, dtype=torch.int32, device=model.device)[None]
        self.tokens = 0

    @torch.inference_mode()
    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """What leaves the last layer for each of the next tokens `ids`, [n, hidden]."""
        self.tokens += len(ids)
        batch = make_batch([len(ids)], [self.tokens], self.table, self.block_size)
        batches = [batch] * len(self.storage.layout.groups)
        tokens = torch.as_tensor(ids, dtype=torch.int64, device=self.model.device)
        return self.model.decoder.hidden_states(tokens, batches, self.views)

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) [tokens, Hkv, D] of that layer as they come back from the pages, in fp32."""
        position = torch.arange(self.tokens, device=self.model.device)
        index = (self.table[0, position // self.block_size].long(), slice(None), position % self.block_size)
        view = self.views[layer][0]
        return decode_rows(view, "k", index), decode_rows(view, "v", index)


def keys_and_values(model: LoadedModel, ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer the keys and values [tokens, Hkv, D] that a text leaves in a cache of full precision."""
    run = PagedRun(model, model.dtype, len(ids))
    run.read(ids)
    return [run.rows(layer) for layer in range(len(run.views))]
