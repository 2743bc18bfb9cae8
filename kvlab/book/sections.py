"""The sections of the guide that this book follows, the question each answers, and which are here."""

from __future__ import annotations

from pathlib import Path

from kvlab.book.session import table

SECTIONS = (
    ("Key takeaways", "What must I remember if I read only one page?"),
    ("Mental model", "What does a cache save, and what does it not?"),
    ("A short history", "Which problem forced each step, and when?"),
    ("What is the KV cache?", "What exactly is stored, and why keys and values only?"),
    ("The math", "How many bytes does one more token cost?"),
    ("Per-model worked examples", "What does that give for real models and GPUs?"),
    ("Attention architecture", "How do MHA, MQA, GQA, MLA, windows and states differ in bytes and quality?"),
    ("Quantizing the KV cache", "How few bits can an entry have, and what does the answer lose?"),
    ("PagedAttention", "How is memory handed out so that little is wasted?"),
    ("Prefix caching", "When can two requests share what they have in common?"),
    ("Multi-GPU", "How is the cache split over devices, and what is repeated?"),
    ("Offloading", "When is it worth moving entries to CPU memory or disk?"),
    ("Eviction", "What gives way when the cache is full?"),
    ("Speculative decoding", "What do drafted tokens do to the cache?"),
    ("Long-context attention", "Which designs keep memory flat as the context grows?"),
    ("Capacity planning", "How many GPUs for this service?"),
    ("Cost economics", "What does a token cost, and why does its position matter?"),
    ("Stack comparison", "Which engine does what?"),
    ("Comparative benchmarks", "How are engines compared fairly?"),
    ("Migration guide", "How do I move a service to a better cache?"),
    ("Production observability", "Which numbers do I watch?"),
    ("Failure modes", "What breaks, how does it look, what do I do?"),
    ("Frequently asked questions", "Short answers, each with its run."),
    ("Glossary", "What does this word mean?"),
    ("References", "Where is it written?"),
)


def chapters_dir() -> Path:
    """The folder of this checkout's chapters."""
    return Path(__file__).resolve().parents[2] / "chapters"


def sections_table() -> None:
    """Shows the map of the book: number, section, question, and whether its chapter is here."""
    here = {int(path.name[:2]) for path in chapters_dir().glob("[0-9][0-9]_*.ipynb")}
    rows = [(i, name, asks, "yes" if i in here else "planned") for i, (name, asks) in enumerate(SECTIONS, 1)]
    table(
        rows,
        ("Section", "Title", "The question it answers", "Here now"),
        caption=f"Map of the book: {len(here)} of {len(SECTIONS)} sections are here.",
    )
