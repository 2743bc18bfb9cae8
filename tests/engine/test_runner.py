"""The runner's contract: fixed buffers, no read back to the host, padded rows that change nothing."""

import torch
from host_reads import NoHostReads

from kvlab.engine import Engine, SamplingParams


def decoding(tiny, monkeypatch, backend, **options):
    """An engine in the middle of three requests, and its next step, which only decodes."""
    monkeypatch.setenv("KVLAB_OPS", backend)
    engine = Engine(tiny.model("fp32"), num_blocks=30, block_size=4, **options)
    for prompt in ([5, 3, 8, 1, 40], [7], list(range(20, 39))):
        engine.add_request(prompt, SamplingParams(20))
    for _ in range(3):
        engine.step()
    step = engine.scheduler.schedule(0.0)
    assert step.num_decodes == len(step.chunks) == 3
    return engine, step


def test_a_decode_reads_nothing_back(every_tiny, monkeypatch):
    engine, step = decoding(every_tiny, monkeypatch, "torch", pad_to=4)
    inputs = engine.runner.fill(step)
    with NoHostReads():
        logits = engine.runner.forward(inputs)
    assert logits.shape == (3, 61) and logits.isfinite().all()


def test_sampling_reads_nothing_back():
    from kvlab.engine.sampler import RowParams, sample

    logits = torch.randn(3, 40)
    every = [SamplingParams(), SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=1.0, top_p=0.5)]
    rows = RowParams.of(every, [1, 2, 3], [5, 6, 7], logits)
    with NoHostReads():
        sample(logits, rows)


def test_steps_use_the_same_memory(tiny, monkeypatch):
    engine, step = decoding(tiny("both"), monkeypatch, "torch")

    def addresses(inputs):
        tensors = [inputs.ids, inputs.rows]
        for batch in inputs.batches:
            tensors += [batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping, batch.positions]
        return [t.data_ptr() for t in tensors]

    first = addresses(engine.runner.fill(step))
    engine.scheduler.update(step, [1, 2, 3], 0.0)
    assert addresses(engine.runner.fill(engine.scheduler.schedule(0.0))) == first


def test_no_step_is_written_over_while_the_device_may_still_fetch_it(tiny):
    """Three chunks of one prompt: none of the first two reads a token back, so only the fence holds the next one."""
    engine = Engine(tiny("both").model(), num_blocks=30, block_size=4, max_batched_tokens=4)
    runner = engine.runner

    class Fence:
        copied, waits = None, 0

        def arrays(self):
            fixed = [
                runner.ids,
                runner.positions,
                runner.seq_lens,
                runner.query_start_loc,
                *runner.slots,
                *runner.tables,
            ]
            return [buffer.array.copy() for buffer in fixed]

        def record(self):
            assert self.copied is None, "two steps were filled without a wait"
            self.copied = self.arrays()

        def wait(self):
            self.waits += 1
            same = [(a == b).all() for a, b in zip(self.copied or [], self.arrays(), strict=bool(self.copied))]
            assert all(same), "a buffer changed before its copy was waited for"
            self.copied = None

    runner._fence = Fence()
    engine.add_request(list(range(1, 11)), SamplingParams(2))
    assert [len(engine.step()) for _ in range(4)] == [0, 0, 1, 1]
    assert runner._fence.waits == 4 and runner._fence.copied is not None


def test_padded_rows_change_no_logits_and_write_nothing(every_tiny, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "reference")
    results = []
    for pad_to in (1, 8):
        engine = Engine(every_tiny.model(), num_blocks=30, block_size=4, pad_to=pad_to, check=True)
        engine.add_request([5, 3, 8], SamplingParams(4))
        engine.add_request([9], SamplingParams(4))
        engine.step()
        inputs = engine.runner.fill(engine.scheduler.schedule(0.0))
        logits = engine.runner.forward(inputs)
        pages = [buffer.clone().view(torch.float64) for buffer in engine.storage.buffers.values()]
        results.append((len(inputs.ids), logits, pages))
    assert (results[0][0], results[1][0]) == (2, 8)
    # equal up to the last bits of products over more rows; NaN, where nothing was written, in the same places
    torch.testing.assert_close(results[0][1:], results[1][1:], rtol=0, atol=1e-12, equal_nan=True)


def test_what_the_buffers_hold(tiny):
    engine = Engine(tiny("full").model(), num_blocks=30, block_size=4, max_batched_tokens=6, pad_to=4)
    engine.add_request([5, 3, 8, 1, 40], SamplingParams(4))
    engine.step()
    engine.add_request([9, 10, 11], SamplingParams(4))
    inputs = engine.runner.fill(engine.scheduler.schedule(0.0))
    [batch] = inputs.batches
    token = engine.requests["0"].tokens[5]
    assert inputs.ids.tolist() == [token, 9, 10, 11]
    assert batch.positions.tolist() == [5, 0, 1, 2]
    assert batch.slot_mapping.tolist() == [2 * 4 + 1, 3 * 4, 3 * 4 + 1, 3 * 4 + 2]
    assert batch.query_start_loc.tolist() == [0, 1, 4, 4, 4]
    assert batch.seq_lens.tolist() == [6, 3, 0, 0]
    assert batch.block_table[:, :3].tolist() == [[1, 2, 0], [3, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert batch.block_table.shape == (4, 32)
    assert inputs.rows.tolist() == [0, 3]
    assert (batch.num_decodes, batch.max_query_len, batch.max_seq_len) == (1, 3, 6)
