"""Readers of published traces, on rows written here: what each column becomes, and what a bad row is told."""

from __future__ import annotations

import pytest

from kvlab.simulate import TraceRequest, parse_trace, read_trace

MOONCAKE = (
    '{"timestamp": 500, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 2500, "input_length": 512, "output_length": 1, "hash_ids": [0]}\n'
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5000000,374,44\n2023-11-17 00:00:01.7500000,3,1\n"
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n118,GPT-4,417,276,693,API log\n"
)
LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n290,905,1195,0.32\n"
BAILIAN = (
    '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 17, "output_length": 2, "type": "text", '
    '"turn": 1, "hash_ids": [9, 8]}\n'
)


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def test_mooncake_counts_milliseconds_from_its_first_request():
    trace = parse_trace(lines(MOONCAKE))
    assert (trace.kind, trace.block_tokens, trace.timed) == ("mooncake", 512, True)
    assert trace.requests == (TraceRequest(0.0, 1030, 7, (0, 1, 2)), TraceRequest(2.0, 512, 1, (0,)))
    assert trace.shared_blocks == (1, 4) and trace.duration_s == 2.0


def test_azure_reads_the_clock_over_midnight():
    assert parse_trace(lines(AZURE)).requests == (TraceRequest(0.0, 374, 44), TraceRequest(2.25, 3, 1))


def test_burstgpt_leaves_out_rows_without_a_response_and_counts_them():
    trace = parse_trace(lines(BURSTGPT))
    assert trace.requests == (TraceRequest(0.0, 472, 18), TraceRequest(113.0, 417, 276))
    assert trace.skipped == (("no output tokens", 1),)


def test_lengths_have_no_arrivals_of_their_own():
    trace = parse_trace(lines(LENGTHS))
    assert not trace.timed
    timed = trace.arriving([0.0, 1.5])
    assert timed.timed and timed.requests == (TraceRequest(0.0, 74, 918), TraceRequest(1.5, 290, 905))


def test_lengths_with_a_column_of_arrivals_have_theirs():
    trace = parse_trace(["arrived_at,num_prefill_tokens,num_decode_tokens\n", "0.5,3,4\n", "2,5,6\n"])
    assert trace.timed and [r.arrival_s for r in trace.requests] == [0.0, 1.5]


def test_bailian_counts_seconds_and_blocks_of_16():
    trace = parse_trace(lines(BAILIAN))
    assert trace.block_tokens == 16 and trace.requests == (TraceRequest(0.0, 17, 2, (9, 8)),)


def test_file_with_a_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_bytes(b"\xef\xbb\xbf" + AZURE.replace("\n", "\r\n").encode())
    assert read_trace(path).requests == parse_trace(lines(AZURE)).requests


def test_requests_come_in_the_order_of_their_arrival():
    swapped = "".join(reversed(lines(MOONCAKE)))
    assert [r.prompt_tokens for r in parse_trace(lines(swapped)).requests] == [1030, 512]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "t: holds no request|t, row 1: neither"),
        ("a,b,c\n1,2,3\n", "t, row 1: neither a JSON object nor a header with one of ContextTokens"),
        (MOONCAKE + "{oops\n", "t, row 3: not JSON"),
        (MOONCAKE + "[1]\n", "t, row 3: must be a JSON object"),
        (MOONCAKE + '{"timestamp": 1, "output_length": 2}\n', "t, row 3: input_length is missing"),
        (MOONCAKE.replace("1030", '"many"'), "t, row 1: input_length 'many' must be a number"),
        (MOONCAKE.replace("1030", "1030.5"), "t, row 1: input_length 1030.5 must be a whole number"),
        (MOONCAKE.replace("[0, 1, 2]", "[0, 1]"), "t, row 1: 2 hash_ids, 1030 tokens in blocks of 512 have 3"),
        (MOONCAKE.replace("[0, 1, 2]", "[0, 1, -2]"), "t, row 1: hash_ids must be at least 0"),
        (MOONCAKE.replace("[0, 1, 2]", '[0, 1, "x"]'), "t, row 1: hash_ids: 'x' must be a whole number"),
        (MOONCAKE.replace("512", "0"), "t, row 2: prompt_tokens 0 must be from 1 to"),
        (AZURE.replace("2023-11-17 00:00", "today"), "t, row 3: TIMESTAMP 'today:01.7500000' must be a date"),
        (AZURE + "2023-11-17 00:00:02\n", "t, row 4: ContextTokens None must be a number"),
        (AZURE.replace("GeneratedTokens", "Tokens"), "t, row 1: column 'GeneratedTokens' is missing"),
        (BURSTGPT.replace("Timestamp", "Time"), "t, row 1: column 'Timestamp' is missing"),
    ],
)  # fmt: skip
def test_bad_row_is_told_with_file_row_and_rule(text, error):
    with pytest.raises(ValueError, match=error):
        parse_trace(lines(text), "t")


def test_unknown_kind_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="t: kind 'csv' must be one of mooncake, bailian, azure, burstgpt, sharegpt, lengths"
    ):
        parse_trace(lines(AZURE), "t", "csv")


def test_clipped_keeps_the_beginning_of_a_prompt():
    clipped = parse_trace(lines(MOONCAKE)).clipped(520)
    assert clipped.requests == (TraceRequest(0.0, 513, 7, (0, 1)), TraceRequest(2.0, 512, 1, (0,)))
    assert parse_trace(lines(LENGTHS)).clipped(10).requests[0] == TraceRequest(0.0, 1, 9)


def test_speed_divides_the_gaps_and_head_takes_the_first():
    trace = parse_trace(lines(AZURE))
    assert [r.arrival_s for r in trace.faster(4.5).requests] == [0.0, 0.5]
    assert len(trace.head(1).requests) == 1
    for wrong in (0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="speed"):
            trace.faster(wrong)
