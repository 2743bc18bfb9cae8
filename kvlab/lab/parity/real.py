"""A real model's greedy tokens, engine against transformers.

Each token the engine chose is compared with transformers' choice after the same tokens: one whole prefill of prompt
and output without a cache. By induction, no difference means that transformers' own greedy text is the same. Where the
two differ although transformers' best two logits are within 1e-3 of each other, rounding decides; such ties are
counted and shown, never silent.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvlab.engine import Engine, SamplingParams
from kvlab.models.load import LoadedModel

TIE_GAP = 1e-3
CI_LENGTHS = (1, 2, 17, 64, 233, 600)
ALL_LENGTHS = (1, 2, 3, 5, 15, 16, 17, 31, 64, 100, 150, 233, 350, 512, 600, 1000, 1500, 2048, 3000, 4000)


@dataclass(frozen=True)
class Difference:
    """Where engine and transformers chose differently.

    Attributes:
        prompt_tokens: length of the prompt.
        index: of the output token, from 0.
        engine, transformers: the two choices.
        gap: transformers' best logit minus its second best.
    """

    prompt_tokens: int
    index: int
    engine: int
    transformers: int
    gap: float

    @property
    def tie(self) -> bool:
        """Whether rounding decides between transformers' own best two."""
        return self.gap < TIE_GAP


def real_prompts(model: LoadedModel, lengths: Sequence[int]) -> list[list[int]]:
    """One prompt of each length: English text that comes with Python (its help topics), each from another place."""
    assert model.tokenizer is not None
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    prompts = []
    for i, n in enumerate(lengths):
        # six characters a token is more than enough
        start = i * 7919
        prompts.append(model.tokenizer.encode(text[start : start + 6 * n + 50], special=False)[:n])
    return prompts


def greedy(model: LoadedModel, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """The engine's greedy tokens after each prompt, all prompts in one engine, end tokens ignored."""
    longest = max(map(len, prompts)) + max_tokens
    pages = sum(-(-(len(p) + max_tokens) // 16) for p in prompts)
    engine = Engine(model, max_model_len=longest, num_blocks=pages + 1, max_batched_tokens=512)
    done = engine.generate(prompts, SamplingParams(max_tokens, ignore_eos=True))
    assert [c.error for c in done] == [""] * len(prompts)
    return [c.token_ids for c in done]


@torch.inference_mode()
def differences(directory: Path, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> list[Difference]:
    """Where `outputs`, token by token, are not transformers' choice with the weights in `directory` (fp32, eager)."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output[:-1]])
        positions = torch.arange(ids.shape[1])[None]
        logits = oracle(ids, position_ids=positions, use_cache=False, logits_to_keep=len(output)).logits[0]
        best, choice = logits.topk(2)
        for i, token in enumerate(output):
            if token != int(choice[i, 0]):
                gap = float(best[i, 0] - best[i, 1])
                found.append(Difference(len(prompt), i, token, int(choice[i, 0]), gap))
    return found
