"""What the GPU bench asks of libraries that may be installed there: calls as their public signatures take them."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux only")

from kvlab.lab import bench_gpu_rows
from kvlab.lab.kernels.shapes import SHAPES

CPU = torch.device("cpu")
SHAPE = replace(SHAPES["llama-3-8b"], heads=4, kv_heads=2, dim=8, batch=3, context=40)
PAGES = 3  # of 16 tokens in a sequence of 40


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = ModuleType(name)
    for key, value in members.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(("capability", "version"), [((9, 0), 3), ((8, 0), 2), ((10, 0), 2)])
def test_vllm_brings_the_version_it_would_take(capability, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, fa_version=2,
    ):  # fmt: skip
        assert q.shape == (3, 4, 8) and k.shape == v.shape == (3 * PAGES, 16, 2, 8) and block_table.shape == (3, PAGES)
        assert cu_seqlens_q.tolist() == [0, 1, 2, 3] and seqused_k.tolist() == [40] * 3 and max_seqlen_k == 40
        assert int(block_table.max()) < len(k) and block_table.dtype == seqused_k.dtype == torch.int32
        return fa_version

    installed(monkeypatch, "vllm")
    installed(
        monkeypatch, "vllm.vllm_flash_attn", flash_attn_varlen_func=attend, is_fa_version_supported=lambda n: n == 3
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert bench_gpu_rows.vllm(SHAPE, CPU)() == version


def test_flashinfer_plans_the_pages_it_runs_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
            assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8

        def plan(
            self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
        ):  # fmt: skip
            assert indptr.tolist() == [0, 3, 6, 9] and last_page_len.tolist() == [8] * 3
            assert sorted(indices.tolist()) == list(range(9))
            assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (4, 2, 8, 16)
            assert q_data_type == kv_data_type == torch.bfloat16

        def run(self, q, paged_kv_cache):
            assert all(x.shape == (9, 16, 2, 8) for x in paged_kv_cache)
            return q.shape

    installed(monkeypatch, "flashinfer", BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    assert bench_gpu_rows.flashinfer(SHAPE, CPU)() == (3, 4, 8)


def test_flex_is_compiled_for_each_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default torch compiles the second size for any size, and that kernel would be what is timed."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda f, **options: asked.append(options) or f)
    bench_gpu_rows.flex(SHAPE, CPU)
    assert asked == [{"dynamic": False}]
