"""Five workloads that share prefixes, as token lists, and what a prefix cache makes of them. Pure bookkeeping.

Nothing is computed here: a workload is a list of prompts with how many tokens follow each, and `replay` lets the real
cache manager serve them one after the other. Token ids are drawn at random, equal where the texts would be equal: a
cache cannot tell the difference. The guide's hit rates depend on what it does not say; every parameter is an argument.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvlab.cache import KVCacheManager, PrefixOptions
from kvlab.schedule import Request, SamplingParams
from kvlab.specs.layout import group_parts
from kvlab.specs.model import ModelSpec
from kvlab.specs.pages import cdiv
from kvlab.specs.pools import lay_out

VOCAB = 32_000


@dataclass(frozen=True)
class Turn:
    """One request: its prompt, how many tokens it generates, whose it is.

    `reply`: what is said to it, where a later prompt repeats that: what changes a prompt leaves the reply as it is.
    """

    prompt: tuple[int, ...]
    output: int
    user: int = 0
    salt: str = ""
    reply: tuple[int, ...] = ()


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival, and the parameters that made them."""

    name: str
    turns: tuple[Turn, ...]
    parameters: dict[str, int | float]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(turn.prompt) for turn in self.turns)


class _Text:
    """Random texts with a fixed seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        """`count` random token ids."""
        return self.rng.choices(range(VOCAB), k=count)

    def around(self, mean: int) -> int:
        """A length from half of `mean` to one and a half."""
        return self.rng.randint(max(1, mean // 2), mean * 3 // 2)


def system_prompt(*, system: int = 1024, users: int = 100, question: int = 60, output: int = 128, seed: int = 0):
    """One long system prompt before each of `users` questions."""
    text = _Text(seed)
    start = text.tokens(system)
    turns = [Turn((*start, *text.tokens(text.around(question))), output, user) for user in range(users)]
    return Workload("system prompt", tuple(turns), _parameters(locals()))


def rag(*, requests: int = 60, passages: int = 400, retrieved: int = 8, passage: int = 1024, system: int = 200,
        question: int = 60, output: int = 128, skew: float = 1.0, seed: int = 0, popular_first: bool = False):  # fmt: skip
    """Questions behind `retrieved` passages, the most popular ones more often, in the order of their scores.

    `skew`: passage number i is drawn in proportion to 1 / i ** skew. `popular_first`: in the order of their numbers.
    """
    text = _Text(seed)
    start, library = text.tokens(system), [text.tokens(passage) for _ in range(passages)]
    weights = [1 / i**skew for i in range(1, passages + 1)]
    turns = []
    for user in range(requests):
        found = dict.fromkeys(text.rng.choices(range(passages), weights, k=4 * retrieved))
        order = list(found)[:retrieved]
        chosen = [token for i in (sorted(order) if popular_first else order) for token in library[i]]
        turns.append(Turn((*start, *chosen, *text.tokens(text.around(question))), output, user))
    return Workload("RAG", tuple(turns), _parameters(locals()))


def code_completion(*, editors: int = 4, requests: int = 50, instructions: int = 300, files: int = 3000,
                    typed: int = 8, jump: float = 0.1, output: int = 24, seed: int = 0):  # fmt: skip
    """Editors that ask again after every few typed tokens; sometimes the cursor jumps back, and the text behind goes.

    `jump`: the share of requests before which it does.
    """
    text = _Text(seed)
    start = text.tokens(instructions)
    open_files = [text.tokens(files) for _ in range(editors)]
    turns = []
    for i in range(editors * requests):
        user = i % editors
        if text.rng.random() < jump:
            del open_files[user][text.rng.randrange(files // 2, len(open_files[user])) :]
        open_files[user] += text.tokens(text.around(typed))
        turns.append(Turn((*start, *open_files[user]), output, user))
    return Workload("code completion", tuple(turns), _parameters(locals()))


def chat(*, users: int = 10, turns: int = 10, system: int = 300, question: int = 60, output: int = 150, seed: int = 0):
    """Conversations that grow: every turn has all turns before it in its prompt, answers included."""
    text = _Text(seed)
    start = text.tokens(system)
    said = [list(start) for _ in range(users)]
    found = []
    for _ in range(turns):
        for user in range(users):
            said[user] += text.tokens(text.around(question))
            turn = Turn(tuple(said[user]), output, user)
            found.append(replace(turn, reply=tuple(answer(turn))))
            said[user] += found[-1].reply
    return Workload("multi-turn chat", tuple(found), _parameters(locals()))


def few_shot(*, requests: int = 100, tasks: int = 3, shots: int = 8, shot: int = 120, question: int = 80,
             output: int = 16, seed: int = 0):  # fmt: skip
    """Questions behind the examples of one of a few tasks."""
    text = _Text(seed)
    examples = [text.tokens(shots * shot) for _ in range(tasks)]
    turns = []
    for user in range(requests):
        task = text.rng.randrange(tasks)
        turns.append(Turn((*examples[task], *text.tokens(text.around(question))), output, user))
    return Workload("few-shot", tuple(turns), _parameters(locals()))


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "system prompt": system_prompt, "RAG": rag, "code completion": code_completion, "multi-turn chat": chat,
    "few-shot": few_shot,
}  # fmt: skip


def answer(turn: Turn) -> list[int]:
    """The tokens that the model says to a turn: its reply, or the same ones whenever it is asked the same."""
    if turn.reply:
        return list(turn.reply)
    rng = random.Random(zlib.crc32(array("i", turn.prompt)))
    return rng.choices(range(VOCAB), k=turn.output)


def _parameters(names: dict) -> dict[str, int | float]:
    kept = ("users", "turns", "requests", "system", "question", "output", "passages", "retrieved", "passage", "skew",
            "editors", "instructions", "files", "typed", "jump", "tasks", "shots", "shot", "seed")  # fmt: skip
    return {name: names[name] for name in kept if isinstance(names.get(name), int | float)}


# what breaks reuse: each is one change to every prompt, and nothing else

TIMESTAMP, SESSION, SCHEMA = 12, 16, 120


def _before(tokens: Callable[[random.Random, Turn], Sequence[int]]) -> Callable[[Turn, random.Random], Turn]:
    return lambda turn, rng: replace(turn, prompt=(*tokens(rng, turn), *turn.prompt))


def _reordered(turn: Turn, rng: random.Random) -> Turn:
    """A tool schema of four fields before the prompt, in an order that depends on who writes the JSON."""
    fields = [[VOCAB - 1 - i] * (SCHEMA // 4) for i in range(4)]
    rng.shuffle(fields)
    return replace(turn, prompt=(*(t for field in fields for t in field), *turn.prompt))


def _drawn(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCAB), k=count)


BREAKERS: dict[str, Callable[[Turn, random.Random], Turn]] = {
    "nothing": lambda turn, rng: turn,
    "timestamp at the start": _before(lambda rng, turn: _drawn(rng, TIMESTAMP)),
    "timestamp at the end": lambda turn, rng: replace(turn, prompt=(*turn.prompt, *_drawn(rng, TIMESTAMP))),
    "session id at the start": _before(lambda rng, turn: _drawn(random.Random(turn.user), SESSION)),
    "JSON keys in any order": _reordered,
    # half of the requests go through a template with one more newline
    "a template's whitespace": _before(lambda rng, turn: [13] * rng.randint(1, 2)),
    "a salt for each user": lambda turn, rng: replace(turn, salt=f"user {turn.user}"),
}
"""Change -> what it does to a turn. A change of tokenizer is `retokenized`, half-way through."""


def broken(workload: Workload, change: str, seed: int = 0) -> Workload:
    """`workload` with one change made to each of its requests.

    Raises:
        ValueError: unknown change.
    """
    if change == "another tokenizer half-way":
        return retokenized(workload, len(workload.turns) // 2)
    if change not in BREAKERS:
        raise ValueError(f"change {change!r}: must be one of {', '.join((*BREAKERS, 'another tokenizer half-way'))}")
    rng = random.Random(seed)
    return replace(workload, turns=tuple(BREAKERS[change](turn, rng) for turn in workload.turns))


def retokenized(workload: Workload, first: int) -> Workload:
    """`workload` with other ids for the same texts from request `first` on."""
    turns = workload.turns

    def other(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(VOCAB - 1 - token for token in tokens)

    changed = tuple(replace(turn, prompt=other(turn.prompt), reply=other(turn.reply)) for turn in turns[first:])
    return replace(workload, turns=turns[:first] + changed)


# what a cache makes of it


@dataclass(frozen=True)
class Reuse:
    """What a prefix cache saved of a workload.

    Attributes:
        queries, hits: prompt tokens, and those of them that were in the cache.
        bytes_computed, bytes_saved: of the cache entries of prompt tokens, computed anew and found.
        peak_pages, evicted: cached and held pages at the most, and pages dropped.
    """

    queries: int
    hits: int
    bytes_computed: int
    bytes_saved: int
    peak_pages: int
    evicted: int

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that need not be computed."""
        return self.hits / self.queries if self.queries else 0.0


def cache_for(
    workload: Workload, model: ModelSpec, prefix: PrefixOptions, pages: int | None = None, block_size: int = 16
) -> KVCacheManager:
    """A cache with `pages` pages for each group of `model`'s layers; None: so many that nothing is ever evicted."""
    layout = lay_out(group_parts(model, block_size))
    longest = max(len(turn.prompt) + turn.output for turn in workload.turns)
    every = sum(cdiv(len(turn.prompt) + turn.output, block_size) + 3 for turn in workload.turns)
    count = (every if pages is None else pages) + 1
    return KVCacheManager(layout, [count] * len(layout.buffers), longest, prefix=prefix)


def serve(cache: KVCacheManager, workload: Workload) -> tuple[list[int], int]:
    """(prompt tokens found by each request, pages held and cached at the most), served one after the other.

    Raises:
        ValueError: a request does not fit the cache.
    """
    hits, peak = [], 0
    for i, turn in enumerate(workload.turns):
        request = Request(str(i), turn.prompt, SamplingParams(), salt=turn.salt)
        hit, tokens = cache.match(request), len(turn.prompt) + turn.output
        if not cache.has_room(tokens, hit=hit):
            raise ValueError(f"pages: request {i} of {tokens} tokens does not fit")
        cache.allocate(request.request_id, hit.tokens, hit=hit)
        hits.append(hit.tokens)
        _grow(cache, request, hit.tokens)
        request.tokens.extend(answer(turn))
        _grow(cache, request, len(turn.prompt))
        peak = max(peak, sum(pool.num_held + pool.num_idle for pool in cache.unit_pools))
        cache.free(request.request_id)
        cache.forget(request.request_id)
    return hits, peak


def replay(
    workload: Workload, model: ModelSpec, prefix: PrefixOptions, pages: int | None = None, block_size: int = 16
) -> Reuse:
    """What a cache as of `cache_for` saves when it serves the requests of `workload` one after the other.

    Raises:
        ValueError: a request does not fit the cache.
    """
    cache = cache_for(workload, model, prefix, pages, block_size)
    hits, peak = serve(cache, workload)
    queries, per_token = workload.prompt_tokens, model.bytes_per_token
    found = sum(hits)
    evicted = cache.prefix.counters.evicted
    return Reuse(queries, found, (queries - found) * per_token, found * per_token, peak, evicted)


def _grow(cache: KVCacheManager, request: Request, computed: int) -> None:
    """Computes the request's tokens from `computed` on, all but the last, in chunks that end where states are kept."""
    name, end = request.request_id, len(request.tokens) - 1
    while computed < end:
        stop = cache.next_state(name, computed, request.num_prompt) if cache.keeps_states else None
        keeps = stop is not None and stop <= end
        computed = stop if keeps else end
        if not cache.allocate(name, computed, keeps):
            raise ValueError(f"request {name}: no page is left for its {end} tokens")
        cache.advance(name, computed)
