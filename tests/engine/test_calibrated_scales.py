"""fp8 pages under scales found from data, through the engine: written, read, shared and taken back like any others."""

from __future__ import annotations

import pytest
import torch
from kinds import Kind

from kvlab.cache.prefix import PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.lab.paged_run import PagedRun, keys_and_values
from kvlab.lab.small_model import small_model
from kvlab.quant.calibrate import LARGEST, SHARES, calibrate
from kvlab.specs.fixed_scales import FIXED
from kvlab.specs.fixed_scales import SHARES as COUNTED

PROMPTS = [[3 + (7 * i + k) % 61 for i in range(n)] for k, n in ((0, 21), (20, 5), (0, 13))]
PARAMS = SamplingParams(8, ignore_eos=True)


@pytest.fixture(scope="module")
def quiet():
    """A model whose keys and values are so small that fp8 at scale 1 stores most of them as 0."""
    model, (keys, values) = small_model(), (2.0**-18, 2.0**-18)
    for name, weight in model.decoder.weights.named.items():
        factor = {"q_proj": 1 / keys, "k_proj": keys, "v_proj": values, "o_proj": 1 / values}
        for part, by in factor.items():
            if part in name:
                weight.mul_(by)
    return model


@pytest.mark.parametrize("fmt", LARGEST)
@pytest.mark.parametrize("share", SHARES)
def test_calibrated_pages_are_read_with_their_scales(quiet, share: str, fmt: str, monkeypatch) -> None:
    """Near full precision where scale 1 is far from it, and the same tokens however the steps are cut."""
    monkeypatch.setenv("KVLAB_OPS", "torch")
    scales = calibrate(keys_and_values(quiet, PROMPTS[0]), share, fmt)

    def error(kv_dtype: str, found=None) -> float:
        full = PagedRun(quiet, "fp32", 21).read(PROMPTS[0])
        return float((PagedRun(quiet, kv_dtype, 21, found).read(PROMPTS[0]) - full).norm() / full.norm())

    mantissa = 2**-4 if fmt == "fp8_e4m3" else 2**-3
    assert error(fmt, scales) < 3 * mantissa < error(fmt)
    found = []
    for options in ({"num_blocks": 60, "max_batched_tokens": 64},
                    {"num_blocks": 18, "max_batched_tokens": 5, "page_seed": 1, "prefix": PrefixOptions("radix")}):  # fmt: skip
        # two KV heads and two tokens a page: axes that are mixed up would fit
        engine = Engine(quiet, kv_dtype=fmt, kv_scales=scales, block_size=2, max_model_len=40, check=True, **options)
        found.append([done.token_ids for done in engine.generate(PROMPTS, PARAMS)])
    assert found[0] == found[1] and engine.events.counts["preempt"]
    at_one = Engine(quiet, kv_dtype=fmt, block_size=2, num_blocks=60, max_model_len=40)
    assert [done.token_ids for done in at_one.generate(PROMPTS, PARAMS)] != found[0]


def test_what_is_counted_is_what_can_be_calibrated() -> None:
    assert tuple(LARGEST) == FIXED and tuple(SHARES) == COUNTED


def test_scales_of_other_formats_and_shapes_are_refused(quiet) -> None:
    scales = calibrate(keys_and_values(quiet, PROMPTS[1]), "head")
    with pytest.raises(ValueError, match="kv_scales: layer 0 is not stored in fp8_e4m3"):
        Engine(quiet, kv_dtype="int8", kv_scales=scales, num_blocks=9)
    for beyond in (-1, 3):
        with pytest.raises(ValueError, match=f"kv_scales: layer {beyond}: the model has layers 0 to 2"):
            Engine(quiet, kv_dtype="fp8_e4m3", kv_scales={0: scales[0], beyond: scales[0]}, num_blocks=9)
    wide = {0: type(scales[0])(torch.ones(3, 1), torch.ones(2, 1))}
    with pytest.raises(ValueError, match=r"k of layer 0 has shape \(3, 1\)"):
        Engine(quiet, kv_dtype="fp8_e4m3", kv_scales=wide, num_blocks=9)


@pytest.mark.parametrize(("name", "layer"), [("latent", 0), ("states", 0), ("neighbours", 1)])
def test_scales_for_what_is_no_keys_and_values_are_refused(name: str, layer: int, quiet) -> None:
    """Latents can be stored in fp8, so that the format is not what is wrong; a neighbour reads another layer's pages."""
    scales, model = calibrate(keys_and_values(quiet, PROMPTS[1]), "head"), Kind(name).model
    with pytest.raises(
        ValueError, match=f"kv_scales: layer {layer} keeps no keys and values, which fixed scales are for"
    ):
        Engine(model, kv_dtype="native" if name == "states" else "fp8_e4m3", kv_scales={layer: scales[0]}, num_blocks=9)


def test_calibration_sees_the_rows_of_its_own_layer_alone(tiny, monkeypatch) -> None:
    """Pitfall: kekzl/imp#91, where a workspace wider than a layer gave it the scale of what lay beyond.

    Rows of 6 values padded to 8, a last page that is not full, and 8.7e8 wherever nobody wrote.
    """
    monkeypatch.setenv("KVLAB_OPS", "torch")
    model, found = tiny("both").model("fp32"), []
    for fill in (0x00, 0x4E):
        run = PagedRun(model, "fp32", 13)
        run.storage.fill(fill)
        run.read(list(range(13)))
        found.append(calibrate([run.rows(layer) for layer in range(len(run.views))], "channel"))
    for layer, scales in found[0].items():
        assert torch.equal(scales.k, found[1][layer].k) and torch.equal(scales.v, found[1][layer].v)
        assert scales.k.shape == (2, 6) and float(scales.k.max()) < 1
