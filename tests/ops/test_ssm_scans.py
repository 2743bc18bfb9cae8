"""The recurrences of Mamba and Mamba-2: the fast forms against one token after the other, over pages full of NaN."""

import pytest
import torch
from stateful import lengths, poisoned, run_schedule
from test_device_path import NoHostReads

from kvlab.ops import selective_scan as one
from kvlab.ops import ssd as two
from kvlab.ops.batch import make_batch

HEADS, WIDTH, GROUPS, SIZE, CHANNELS = 6, 5, 2, 7, 9


def drawn(n, dtype=torch.float64, seed=0):
    """(rows of Mamba-2, rows of Mamba, their decays) for n tokens; steps of 0.001 to 3, decays up to 20."""
    g = torch.Generator().manual_seed(100 * seed + n)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    def steps(*shape):
        return (10 ** (torch.rand(*shape, generator=g, dtype=torch.float64) * 3.5 - 3)).to(dtype)

    ssd_rows = [normal(n, HEADS, WIDTH), steps(n, HEADS), normal(n, GROUPS, SIZE), normal(n, GROUPS, SIZE)]
    scan_rows = [normal(n, CHANNELS), steps(n, CHANNELS), normal(n, SIZE), normal(n, SIZE)]
    return ssd_rows, scan_rows


DECAYS = (-torch.tensor([0.1, 0.5, 1, 3, 8, 20], dtype=torch.float64),
          -torch.logspace(-2, 1.3, CHANNELS * SIZE, dtype=torch.float64).view(CHANNELS, SIZE))  # fmt: skip


def ssd_by_hand(rows):
    """Mamba-2 from its formula, value by value: out = sum over earlier tokens of what is left of what they stored."""
    x, dt, b, c = rows
    out = torch.zeros_like(x)
    for h in range(HEADS):
        g = h // (HEADS // GROUPS)
        for t in range(len(x)):
            for s in range(t + 1):
                fade = (dt[s + 1 : t + 1, h].sum() * DECAYS[0][h]).exp()
                out[t, h] += fade * (c[t, g] @ b[s, g]) * dt[s, h] * x[s, h]
    return out


def scan_by_hand(rows):
    """Mamba likewise; each value of the state fades by itself."""
    x, dt, b, c = rows
    out = torch.zeros_like(x)
    for d in range(CHANNELS):
        for t in range(len(x)):
            for s in range(t + 1):
                fade = (dt[s + 1 : t + 1, d].sum() * DECAYS[1][d]).exp()
                out[t, d] += (c[t] * fade * b[s]).sum() * dt[s, d] * x[s, d]
    return out


def ssd(rows, batch, pages):
    return two.ssd(two.SSDRows(*rows), DECAYS[0], pages, batch)


def selective_scan(rows, batch, pages):
    return one.selective_scan(one.ScanRows(*rows), DECAYS[1], pages, batch)


KINDS = {
    "mamba2": (ssd, ssd_by_hand, 0, HEADS * WIDTH * SIZE),
    "mamba1": (selective_scan, scan_by_hand, 1, CHANNELS * SIZE),
}


@pytest.mark.parametrize("form", ["reference", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_sequences_give_what_the_formula_gives(kind, form, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", form)
    op, by_hand, which, elements = KINDS[kind]
    inputs = [drawn(n)[which] for n in lengths()]
    pages = poisoned(elements, torch.float64)
    got = run_schedule(lambda rows, batch: op(rows, batch, pages), inputs)
    for rows, out in zip(inputs, got, strict=True):
        torch.testing.assert_close(out, by_hand(rows), rtol=0, atol=1e-12)
    assert pages[[0, 4]].isnan().all(), "the null page and a page of no sequence are not written"


@pytest.mark.parametrize("chunk", [1, 2, 5, 64, 200])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 131])
def test_any_chunk_gives_the_recurrence(tokens, chunk):
    ssd_rows, scan_rows = drawn(tokens, seed=1)
    states = [torch.randn(HEADS, WIDTH, SIZE, dtype=torch.float64), torch.randn(CHANNELS, SIZE, dtype=torch.float64)]
    for module, rows, decay, state in zip((two, one), (ssd_rows, scan_rows), DECAYS, states, strict=True):
        expected = module.reference.scan(rows, decay, state)
        for got, want in zip(module.torch_.scan(rows, decay, state, chunk), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_a_state_that_fades_at_once_underflows_and_does_not_overflow():
    """The parallel form divides by no decay: with steps of a thousand only the token's own product is left."""
    rows = [x.float() for x in drawn(70, seed=2)[0]]
    rows[1] = torch.full_like(rows[1], 1000.0)
    out, state = two.torch_.scan(rows, DECAYS[0].float(), torch.ones(HEADS, WIDTH, SIZE))
    b, c = (v.repeat_interleave(HEADS // GROUPS, dim=1) for v in rows[2:])
    own = (b * c).sum(-1, keepdim=True) * 1000.0 * rows[0]
    torch.testing.assert_close(out, own, rtol=1e-4, atol=1e-2)
    assert torch.isfinite(state).all()


def test_weak_decays_after_strong_ones_keep_their_digits():
    """Eight tokens that empty the state, then fifty-six that hardly fade: in fp32 the chunk is as exact as the steps."""
    rows = [x.float() for x in drawn(64, seed=4)[0]]
    rows[1] = torch.cat((torch.full((8, HEADS), 20.0), torch.full((56, HEADS), 0.02)))
    decay, state = torch.full((HEADS,), -16.0), torch.zeros(HEADS, WIDTH, SIZE)
    exact = two.reference.scan([x.double() for x in rows], decay.double(), state.double())
    for scan in (two.reference.scan, two.torch_.scan):
        for got, want in zip(scan(rows, decay, state), exact, strict=True):
            assert (got - want).abs().max() < 1e-5 * want.std()


@pytest.mark.parametrize("kind", KINDS)
def test_decode_reads_nothing_back_and_spares_the_null_page(kind, monkeypatch):
    """Two live sequences, one of them new, and a padded one: what a captured step looks like."""
    monkeypatch.setenv("KVLAB_OPS", "torch")
    op, _, which, elements = KINDS[kind]
    pages = poisoned(elements, torch.float32)
    pages[1] = 1.0
    rows = [x.float() for x in drawn(3, seed=3)[which]]
    batch = make_batch([1, 1, 1], [9, 1, 0], torch.tensor([[1], [3], [0]], dtype=torch.int32), 100)
    with NoHostReads():
        out = op(rows, batch, pages)
    assert torch.isfinite(out).all() and not out[2].any() and out[1].any()
    assert pages[0].isnan().all() and torch.isfinite(pages[[1, 3]]).all()


def test_heads_that_no_group_serves_are_refused():
    rows = two.SSDRows(torch.ones(1, 3, 2), torch.ones(1, 3), torch.ones(1, 2, 4), torch.ones(1, 2, 4))
    batch = make_batch([1], [1], torch.tensor([[1]], dtype=torch.int32), 100)
    with pytest.raises(ValueError, match="heads 3: must be a multiple of the 2 groups"):
        two.ssd(rows, torch.ones(3), poisoned(24, torch.float32), batch)
