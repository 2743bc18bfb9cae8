"""What one GPU holds when a model is spread over several: heads, layers and tokens split, or held by all.

tp  splits heads. Ranks beyond the KV heads hold copies; latents, shared vectors and index keys are held whole.
pp  splits layers into stages; a sequence needs room on every stage, so the fullest one decides.
cp  splits the tokens of parts that keep every token; windows and states are held whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlab.specs.model import ModelSpec


@dataclass(frozen=True)
class Sharding:
    """Degrees of tensor, pipeline and context parallelism.

    Raises:
        ValueError: a degree below 1.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be a positive whole number of GPUs")

    @property
    def num_gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp * self.cp


def stage_ranges(num_layers: int, pp: int) -> tuple[range, ...]:
    """The layer indices of each of `pp` pipeline stages: even, layers left over go to the stages before the last.

    The last stage also computes logits, so it gets none of them.

    Raises:
        ValueError: more stages than layers.
    """
    if pp > num_layers:
        raise ValueError(f"pp {pp}: must be at most the {num_layers} layers")
    base, left = divmod(num_layers, pp)
    sizes = [base] * pp
    for i in range(2, left + 2):
        sizes[-i] += 1
    starts = [sum(sizes[:i]) for i in range(pp)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def rank_model(model: ModelSpec, tp: int) -> ModelSpec:
    """The model as one of `tp` tensor-parallel ranks caches it, all layers.

    Raises:
        ValueError: `tp` does not divide the query heads, or neither divides nor is a multiple of the KV heads.
    """
    if tp > 1 and model.num_query_heads and model.num_query_heads % tp:
        raise ValueError(f"tp {tp}: must divide the {model.num_query_heads} query heads")
    return model.per_rank(tp)


def stage_models(model: ModelSpec, sharding: Sharding) -> tuple[ModelSpec, ...]:
    """What one GPU of each pipeline stage caches of the layers it has.

    Raises:
        ValueError: a degree that does not fit the model, or a layer that shares the cache of another stage's layer.
    """
    rank = rank_model(model, sharding.tp)
    stages = []
    for layers in stage_ranges(len(rank.layers), sharding.pp):
        held = tuple(rank.layers[i] for i in layers)
        own = {layer.index for layer in held}
        for layer in held:
            for part in layer.parts:
                if part.kind == "shared" and part.source not in own:  # type: ignore[attr-defined]
                    source = part.source  # type: ignore[attr-defined]
                    raise ValueError(
                        f"pp {sharding.pp}: layer {layer.index} reads the cache of layer {source}, "
                        "which would be on another stage"
                    )
        stages.append(replace(rank, layers=held))
    return tuple(stages)
