"""The oracle: transformers' logits of one whole sequence alone, without a cache.

Not its decode and not its padded batches: those differ from its own prefill in some families.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# published types that transformers runs with another type's class
SAME_CLASS = {"kimi_k2": "deepseek_v3"}


def implementation(config: dict[str, Any]) -> str:
    """transformers' attention that is followed: eager, which for Falcon adds ALiBi to the scores twice."""
    return "sdpa" if config["model_type"] == "falcon" and config.get("alibi") else "eager"


class Oracle:
    """transformers' model of a config, eager attention, fp32, on the CPU.

    Attributes:
        model: the transformers model; its weights are what kvlab loads.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        rest = {k: v for k, v in config.items() if k not in ("model_type", "dtype", "torch_dtype", "architectures")}
        hf_config = AutoConfig.for_model(SAME_CLASS.get(config["model_type"], config["model_type"]), **rest)
        self.model = AutoModelForCausalLM.from_config(
            hf_config, attn_implementation=implementation(config), experts_implementation="eager", dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        """fp32 [T, vocab] of the sequence `ids`."""
        return self._run(ids).logits[0]

    @torch.inference_mode()
    def attentions(self, ids: list[int]) -> list[Tensor]:
        """Attention weights of each layer that has them, [Hq, T, T]."""
        found = getattr(self._run(ids, output_attentions=True), "attentions", None) or ()
        # MiniMax gives the states of its linear layers here, RWKV the outputs of its layers; DeepSeek-V4 has
        # compressed entries behind the tokens
        return [a[0] for a in found if a is not None and a.dim() == 4 and a.shape[-2] == len(ids) <= a.shape[-1]]

    def state(self) -> dict[str, Tensor]:
        """The weights under their checkpoint names; those that several names share once, as safetensors keeps them."""
        found: dict[tuple[int, torch.Size], tuple[str, Tensor]] = {}
        for name, tensor in self.model.state_dict().items():
            found.setdefault((tensor.data_ptr(), tensor.shape), (name, tensor.detach()))
        return dict(found.values())

    def _run(self, ids: list[int], **options: bool) -> Any:
        rows = torch.tensor([ids])
        positions = torch.arange(len(ids))[None]
        return self.model(input_ids=rows, position_ids=positions, use_cache=False, **options)
