"""The loads of the engine benchmark, fixed by a seed, and the two engines that run them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvlab.engine import Engine, SamplingParams
from kvlab.models.load import LoadedModel, locate


@dataclass(frozen=True)
class Load:
    """Requests that arrive together.

    Attributes:
        prompts: token ids of each.
        new_tokens: how many each is to get; end tokens are ignored.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]

    @property
    def useful_tokens(self) -> int:
        """Tokens that somebody asked for."""
        return sum(self.new_tokens)


def make_load(shapes: Sequence[tuple[int, int]], vocab: int, seed: int = 0) -> Load:
    """Random prompts of the given (prompt tokens, new tokens)."""
    rng = random.Random(seed)
    prompts = tuple(tuple(rng.randrange(100, vocab) for _ in range(n)) for n, _ in shapes)
    return Load(prompts, tuple(m for _, m in shapes))


def mixed_shapes(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt 32-256, new 16-128) of `count` requests, uniform."""
    rng = random.Random(seed)
    return [(rng.randint(32, 256), rng.randint(16, 128)) for _ in range(count)]


class Ours:
    """The engine of this project."""

    def __init__(self, model: LoadedModel, max_num_seqs: int) -> None:
        self.engine = Engine(model, kv_bytes=2**30, max_num_seqs=max_num_seqs)

    def run(self, load: Load) -> float:
        """Seconds until every request has all its tokens."""
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in load.new_tokens]
        start = time.perf_counter()
        done = self.engine.generate([list(p) for p in load.prompts], params)
        seconds = time.perf_counter() - start
        got = sum(len(c.token_ids) for c in done)
        if got != load.useful_tokens:
            raise RuntimeError(f"kvlab gave {got} of {load.useful_tokens} tokens")
        return seconds

    def prefilled(self, prompt: Sequence[int], new_tokens: int) -> Callable[[int], list[float]]:
        """Computes the prompt; the result decodes so many more tokens and gives the seconds that each took.

        Args:
            new_tokens: the most that will be asked for in all.
        """
        params = SamplingParams(max_tokens=new_tokens + 1, ignore_eos=True)
        stream = iter(self.engine.stream(list(prompt), params))
        next(stream)

        def decode(count: int) -> list[float]:
            stamps = [time.perf_counter()]
            for _ in range(count):
                next(stream)
                stamps.append(time.perf_counter())
            return [b - a for a, b in itertools.pairwise(stamps)]

        return decode


class _Stamps:
    """A transformers streamer that only looks at the clock."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, then with each token."""
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last token."""


class Transformers:
    """transformers on the same weights, as a user calls it: `generate`, and `generate_batch`'s manager."""

    def __init__(self, target: str | None) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        _, directory, _ = locate(target)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        # requests have fixed lengths here: no end token
        self.model.generation_config.eos_token_id = self.model.config.eos_token_id = None

    def run_padded(self, load: Load, batch_size: int) -> float:
        """Seconds for static batches in order of arrival, each left-padded and run until its longest request ends."""
        start = time.perf_counter()
        for i in range(0, len(load.prompts), batch_size):
            prompts, new = load.prompts[i : i + batch_size], load.new_tokens[i : i + batch_size]
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=max(new), generation_config=self.config)
            if out.shape[1] != width + max(new):
                raise RuntimeError(f"generate gave {out.shape[1] - width} of {max(new)} tokens")
        return time.perf_counter() - start

    def run_continuous(self, load: Load) -> float:
        """Seconds from the first request to the last result of its continuous batching, manager already set up."""
        with torch.no_grad(), self.model.continuous_batching_context_manager(generation_config=self.config) as manager:
            start = time.perf_counter()
            for prompt, new in zip(load.prompts, load.new_tokens, strict=True):
                manager.add_request(list(prompt), max_new_tokens=new, eos_token_id=-1)
            got = 0
            for _ in load.prompts:
                while not ((result := manager.get_result(timeout=1)) and result.is_finished()):
                    if not manager.is_running():
                        raise RuntimeError("transformers' continuous batching stopped")
                got += len(result.generated_tokens)
            seconds = time.perf_counter() - start
        if got != load.useful_tokens:
            raise RuntimeError(f"generate_batch gave {got} of {load.useful_tokens} tokens")
        return seconds

    def prefilled(self, prompt: Sequence[int], new_tokens: int) -> Callable[[int], list[float]]:
        """As of `Ours`: `generate` goes on from the cache that it gave back, whole input in hand."""
        state = self.model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=1, generation_config=self.config, return_dict_in_generate=True
        )
        known = [state.sequences, state.past_key_values]

        def decode(count: int) -> list[float]:
            streamer = _Stamps()
            out = self.model.generate(
                known[0], attention_mask=torch.ones_like(known[0]), past_key_values=known[1], max_new_tokens=count + 1,
                generation_config=self.config, streamer=streamer, return_dict_in_generate=True,
            )  # fmt: skip
            known[:] = [out.sequences, out.past_key_values]
            # the first stamp is the input's, the second the first token's, whose step also sets generation up
            return [b - a for a, b in itertools.pairwise(streamer.stamps[1:])]

        return decode
