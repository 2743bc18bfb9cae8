"""Which of the two ways through the same product takes fewer operations: heads expanded from latents, or absorbed."""

from __future__ import annotations


def operations(count: int, context: int, latent: int, expanded: int) -> tuple[int, int]:
    """Multiplications per head that differ between the ways: (absorbed, expanded).

    Expanding costs `context * latent * expanded` once, and then every query-key pair `expanded` (key and value of a
    head). Absorbing costs every query `latent * expanded` (into the latent space and out of it), and every pair
    2 * `latent` (the latent is key and value). The rotary key costs both the same.

    Args:
        count: queries. context: keys, the queries' own included.
        latent: values of a latent. expanded: values of a head's unrotated key and of its value together.
    """
    pairs = count * context
    return count * latent * expanded + pairs * 2 * latent, context * latent * expanded + pairs * expanded


def expands(count: int, context: int, latent: int, expanded: int) -> bool:
    """Whether a chunk of `count` queries that ends at `context` tokens takes fewer operations with heads expanded."""
    absorbed, expanding = operations(count, context, latent, expanded)
    return expanding <= absorbed


def crossover(context: int, latent: int, expanded: int) -> int | None:
    """The fewest queries at which expanding pays; None where it never does. For DeepSeek's widths 128 at 512 tokens of
    context, and at long context latent * expanded / (2 * latent - expanded) = 171."""
    return next((n for n in range(1, context + 1) if expands(n, context, latent, expanded)), None)
