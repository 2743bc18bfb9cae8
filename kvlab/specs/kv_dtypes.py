"""Which part of which layer is stored in which format: a rule such as `int4,sliding=bf16,first=2:bf16`.

    FORMAT                      every part (see `kvlab.specs.formats`), or `native`: what the model computes in
    ,KIND=FORMAT                parts of a kind: full, sliding, chunked, cross, mla, compressed, index
    ,first=N:FORMAT             the first N layers; `last=N:FORMAT` the last
    ,layers=I+J+K:FORMAT        layers by number, from 0

Later terms win. A format of groups (kivi2, kvquant3) is for full layers; windows and chunks keep the model's type
under it, unless a term says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlab.specs.cache_spec import CacheSpec
from kvlab.specs.formats import StorageFormat, get_format
from kvlab.specs.grouped import grouped
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention

NATIVE = "native"
KINDS = ("full", "sliding", "chunked", "cross", "mla", "compressed", "index")


@dataclass(frozen=True)
class Term:
    """One term: which layers and parts, and their format (None: native).

    Attributes:
        kind: of parts, "" for all. layers: indices from the front, negative from the end; () for all.
    """

    format: StorageFormat | None
    kind: str = ""
    layers: tuple[int, ...] = ()

    def covers(self, part: CacheSpec, layer: int, num_layers: int) -> bool:
        """Whether the term is about that part of that layer."""
        here = not self.layers or layer in self.layers or layer - num_layers in self.layers
        return here and self.kind in ("", part.kind)


def parse_rule(rule: str) -> tuple[Term, ...]:
    """The terms of `rule`, in order.

    Raises:
        ValueError: names the term and what is wrong with it.
    """
    first, *others = str(rule).split(",")
    return (Term(_format(first, rule)), *(_term(text.strip(), rule) for text in others))


def _term(text: str, rule: str) -> Term:
    name, found, value = text.partition("=")
    if not found:
        raise ValueError(f"kv_dtype {rule!r}: {text!r} must be KIND=FORMAT, first=N:FORMAT, last=N:FORMAT or layers=")
    if name in KINDS:
        return Term(_format(value, rule), kind=name)
    if name not in ("first", "last", "layers"):
        raise ValueError(f"kv_dtype {rule!r}: {name!r} must be one of {', '.join(KINDS)}, first, last, layers")
    which, found, fmt = value.partition(":")
    numbers = which.split("+") if name == "layers" else [which]
    if not found or not all(number.isdigit() for number in numbers) or (name != "layers" and int(which) < 1):
        raise ValueError(f"kv_dtype {rule!r}: {text!r} must be {name}={'I+J' if name == 'layers' else 'N'}:FORMAT")
    count = int(numbers[0])
    layers = {"first": range(count), "last": range(-count, 0), "layers": map(int, numbers)}[name]
    return Term(_format(fmt, rule), layers=tuple(layers))


def _format(name: str, rule: str) -> StorageFormat | None:
    try:
        return None if name.strip() == NATIVE else get_format(name.strip())
    except ValueError as error:
        problem = str(error).partition(": ")[2] if name == rule else error
        raise ValueError(f"kv_dtype {rule!r}: {problem}") from None


def canonical(rule: str) -> str:
    """`rule` with its formats under their own names.

    Raises:
        ValueError: as `parse_rule`.
    """
    parse_rule(rule)
    texts = []
    for text in str(rule).split(","):
        head, sign, name = text.strip().rpartition(":" if ":" in text else "=")
        texts.append(head + sign + (name if name == NATIVE else get_format(name).name))
    return ",".join(texts)


def with_formats(spec: ModelSpec, rule: str) -> ModelSpec:
    """`spec`, whose parts have the model's own type, with each part in the format that `rule` gives it.

    Raises:
        ValueError: an unknown format or kind; a layer the model does not have; a format of groups for a part that has
            no keys and values of its own for every token.
    """
    terms, count = parse_rule(rule), len(spec.layers)
    beyond = [i for term in terms for i in term.layers if not -count <= i < count]
    if beyond:
        raise ValueError(f"kv_dtype {rule!r}: layer {beyond[0]}: the model has layers 0 to {count - 1}")
    layers = tuple(_layer(layer, place, count, terms, rule) for place, layer in enumerate(spec.layers))
    changed = replace(spec, layers=layers)
    wants = any(term.format is not None and term.format.group_tokens for term in terms)
    if wants and not any(part.kind == "closed" for _, part in changed.parts()):
        raise ValueError(f"kv_dtype {rule!r}: no layer keeps the keys and values of all tokens; groups need that")
    return changed


def _layer(layer: LayerSpec, place: int, count: int, terms: tuple[Term, ...], rule: str) -> LayerSpec:
    parts, recent = [], []
    for i, part in enumerate(layer.parts):
        if not hasattr(part, "format"):
            parts.append(part)
            continue
        term = [t for t in terms if t.covers(part, place, count)][-1]
        fmt, named = term.format, bool(term.kind)
        if fmt is None or (fmt.group_tokens and not named and part.kind in ("sliding", "chunked", "cross")):
            parts.append(part)
        elif fmt.group_tokens:
            if type(part) is not Attention:
                raise ValueError(
                    f"kv_dtype {rule!r}: layer {layer.index} keeps {part.kind} entries, {fmt.name} is for keys and "
                    f"values of every token; name another format, as in {fmt.name},{part.kind}={NATIVE}"
                )
            closed, last = grouped(part, i, fmt)
            parts.append(closed)
            recent.append(last)
        else:
            parts.append(replace(part, format=fmt))
    return replace(layer, parts=(*parts, *recent))
