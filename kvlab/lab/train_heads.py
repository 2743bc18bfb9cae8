"""Trains the Medusa heads and the EAGLE-style head of the default model: `python -m kvlab.lab.train_heads`.

The model writes answers itself; what left its last layer on the way is kept, so that training never runs it again. Both
heads share its output matrix: the rows of the tokens that the answers used and of the vocabulary's first ones, which
byte-pair encoding learned first and text uses most.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.engine import Engine, SamplingParams
from kvlab.lab.record import provenance
from kvlab.speculate.heads import Eagle, Medusa, save_heads

ROOT = Path(__file__).resolve().parents[2]
HEADS = ROOT / "book" / "results" / "heads"
COMMON_IDS = 4096
LARGEST = 10_000_000
QUESTIONS = (
    "What is {}?", "Explain {} to a child.", "Why does {} matter?", "Give three facts about {}.",
    "Write a short paragraph about {}.", "How does {} work?", "List the steps to learn about {}.",
    "What is the difference between {} and {}?",
)  # fmt: skip
TOPICS = (
    "rain", "the moon", "bread", "a bicycle", "the heart", "a library", "gravity", "a river", "salt", "sleep", "music",
    "a computer", "memory", "a recipe", "trade", "a volcano", "the sun", "a map", "paper", "glass", "a bee", "a forest",
    "an election", "electricity", "a vaccine", "a novel", "a bridge", "rice", "a clock", "a camera", "an airport",
    "a desert", "the ocean", "a school", "a prime number", "a triangle", "a poem", "a language", "a garden", "iron",
    "a telescope", "a whale", "money", "a law", "a museum", "a battery", "a cloud", "a train", "tea", "an earthquake",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Written:
    """One text that the model wrote: its tokens int64 [n], and the feature [n - 1, H] at each of them but the last."""

    tokens: Tensor
    features: Tensor


def prompts(seed: int, count: int) -> list[str]:
    """`count` questions; different seeds share some."""
    rng = random.Random(seed)
    pairs = zip(TOPICS, TOPICS[1:] + TOPICS[:1], strict=True)
    every = [q.format(*pair) for q, pair in itertools.product(QUESTIONS, pairs)]
    return rng.sample(every, count)


def unseen(count: int) -> list[str]:
    """Questions that no text was written for: training takes its 300 from their end, and gets to fewer than 250.

    Raises:
        ValueError: more than 50.
    """
    if not 1 <= count <= 50:
        raise ValueError(f"count {count}: must be 1 to 50, the questions that are never reached")
    return prompts(0, 300)[:count]


def write(model, questions: list[str], seconds: float, tokens: int, temperature: float = 0.6) -> list[Written]:
    """The answers begun within `seconds` of processor time, at most `tokens` tokens each, with their features."""
    engine = Engine(model, max_num_seqs=32, max_model_len=256, kv_bytes=2**28, seed=1)
    began, waiting, kept, live = time.process_time(), list(questions), {}, {}
    written: list[Written] = []
    params = SamplingParams(tokens, temperature)
    run = engine.runner.run

    def watched(step, pick):
        picked = run(step, pick)
        features = model.decoder.final_norm(engine.runner.hidden)
        row = 0
        for chunk in step.chunks:
            kept.setdefault(chunk.request.request_id, []).append(features[row : row + chunk.count].clone())
            row += chunk.count
        return picked

    engine.runner.run = watched
    while engine.scheduler.has_work or (waiting and time.process_time() - began < seconds):
        while waiting and len(engine.requests) < 32 and time.process_time() - began < seconds:
            text = model.tokenizer.chat_text([{"role": "user", "content": waiting.pop()}])
            request_id = engine.add_request(model.tokenizer.encode(text), params)
            live[request_id] = engine.requests[request_id]
        for output in engine.step():
            if output.finish_reason:
                ids = torch.tensor(live.pop(output.request_id).tokens)
                written.append(Written(ids, torch.cat(kept.pop(output.request_id))[: len(ids) - 1]))
        if time.process_time() - began > seconds:
            waiting.clear()
    return written


def drafted_rows(texts: list[Written]) -> Tensor:
    """Ids int64 [V] of the tokens that heads can draft."""
    used = torch.cat([text.tokens for text in texts]).unique()
    return torch.cat((used, torch.arange(COMMON_IDS))).unique()


class Trainer:
    """Trains one network within a limit of processor time; `losses` holds (seconds, loss) on the way."""

    def __init__(self, network: nn.Module, head: Tensor, rows: Tensor, seconds: float) -> None:
        self.network, self.seconds, self.losses = network, seconds, []
        self.head = head[rows]
        self.index = torch.full((len(head),), -100)
        self.index[rows] = torch.arange(len(rows))

    def run(self, texts: list[Written], loss_of, lr: float) -> int:
        """Batches taken. One batch is a few texts; the rate falls to nothing as the time runs out."""
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.95))
        rng, began, batches = random.Random(0), time.process_time(), 0
        while (spent := time.process_time() - began) < self.seconds:
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (batches + 1) / 20) * (1 - spent / self.seconds)
            batch = rng.sample(texts, min(4, len(texts)))
            loss = sum(loss_of(text) for text in batch) / len(batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            optimizer.step()
            batches += 1
            self.losses.append((round(spent, 1), round(loss.item(), 3)))
        return batches

    def cross_entropy(self, predicted: Tensor, tokens: Tensor) -> Tensor:
        """Of the tokens int64 [T] under predicted features [T, H]."""
        return F.cross_entropy(predicted @ self.head.T, self.index[tokens], ignore_index=-100)


def train_medusa(model, texts: list[Written], rows: Tensor, seconds: float) -> tuple[Medusa, list]:
    """Heads whose j-th says what stands j tokens behind the next one (j from 1)."""
    heads = Medusa(model.config.hidden_size, 4)
    trainer = Trainer(heads, model.decoder.head, rows, seconds)

    def loss_of(text: Written) -> Tensor:
        made = heads(text.features)
        # the feature at t picks the token at t + 1; head j names the one at t + 1 + j
        return sum(0.8 ** (j - 1) * trainer.cross_entropy(made[j - 1, : len(text.tokens) - 1 - j], text.tokens[1 + j :])
                   for j in range(1, 5))  # fmt: skip

    trainer.run(texts, loss_of, 1e-3)
    return heads, trainer.losses


def train_eagle(model, texts: list[Written], rows: Tensor, seconds: float) -> tuple[Eagle, list]:
    """A head that predicts the next feature; it also learns from its own predictions, one step on."""
    head = Eagle(model.config.hidden_size)
    trainer = Trainer(head, model.decoder.head, rows, seconds)

    def loss_of(text: Written) -> Tensor:
        features, tokens = text.features, text.tokens
        embedded = F.embedding(tokens, model.decoder.embedding)
        first = head(features[:-1], embedded[1:-1])
        loss = F.smooth_l1_loss(first, features[1:]) + 0.3 * trainer.cross_entropy(first, tokens[2:])
        # as it will draft: from a feature that it predicted itself
        second = head(first[:-1].detach(), embedded[2:-1])
        return loss + 0.5 * (F.smooth_l1_loss(second, features[2:]) + 0.3 * trainer.cross_entropy(second, tokens[3:]))

    trainer.run(texts, loss_of, 1e-3)
    return head, trainer.losses


@torch.no_grad()
def accuracy(model, network: nn.Module, texts: list[Written], rows: Tensor) -> list[float]:
    """Share of held-out tokens whose likeliest draft was right, by place behind the next token."""
    head, found = model.decoder.head[rows], []
    for place in range(4 if isinstance(network, Medusa) else 2):
        right = total = 0
        for text in texts:
            if isinstance(network, Medusa):
                made = network(text.features)[place, : len(text.tokens) - 2 - place]
            else:
                embedded = F.embedding(text.tokens, model.decoder.embedding)
                made = network(text.features[:-1], embedded[1:-1])
                if place:
                    made = network(made[:-1], embedded[2:-1])
            wanted = text.tokens[2 + place :]
            right += int((rows[(made @ head.T).argmax(-1)] == wanted).sum())
            total += len(wanted)
        found.append(right / total)
    return found


def main() -> None:
    """Writes the heads and what is known of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-seconds", type=float, default=240, help="processor time for writing texts")
    parser.add_argument("--medusa-seconds", type=float, default=180)
    parser.add_argument("--eagle-seconds", type=float, default=300)
    parser.add_argument("--tokens", type=int, default=112, help="tokens of an answer at most")
    parser.add_argument("--out", type=Path, default=HEADS)
    args = parser.parse_args()
    from kvlab.models.load import load_model

    torch.manual_seed(0)
    model = load_model()
    began = time.process_time()
    texts = write(model, prompts(0, 300), args.write_seconds, args.tokens)
    assert len(texts) <= 250, "questions that are kept apart were used"
    held, texts = texts[: len(texts) // 10], texts[len(texts) // 10 :]
    rows = drafted_rows(texts)
    about = {"model": model.name, "source": model.source, "texts": str(len(texts)), "rows": str(len(rows)),
             "tokens": str(sum(len(t.tokens) for t in texts))}  # fmt: skip
    print(about, round(time.process_time() - began), "s", flush=True)
    report, size = {"what": "training of the Medusa heads and the EAGLE-style head on texts of the model's own"}, 0
    for name, train, seconds in (
        ("medusa", train_medusa, args.medusa_seconds),
        ("eagle", train_eagle, args.eagle_seconds),
    ):
        network, losses = train(model, texts, rows, seconds)
        shape = {} if name == "medusa" else {k: str(getattr(network, k)) for k in ("heads", "kv_heads", "head_dim")}
        size += save_heads(args.out / f"{name}.safetensors", network, rows, about | shape)
        report[name] = {"held_out_accuracy": accuracy(model, network, held, rows), "batches": len(losses),
                        "losses": losses[:: max(1, len(losses) // 20)]}  # fmt: skip
        print(name, report[name]["held_out_accuracy"], len(losses), "batches", losses[-1:], flush=True)
    assert size <= LARGEST, f"the heads take {size} bytes"
    command = f"python -m kvlab.lab.train_heads --write-seconds {args.write_seconds:g} --medusa-seconds " \
              f"{args.medusa_seconds:g} --eagle-seconds {args.eagle_seconds:g} --tokens {args.tokens}"  # fmt: skip
    report |= provenance(command) | about | {"bytes": size, "held_out_texts": len(held), "seed": 0,
               "counted_over": "all tokens of the held-out texts, those of the chat template's prompt included",
               "processor_seconds": round(time.process_time() - began), "threads": torch.get_num_threads()}  # fmt: skip
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
