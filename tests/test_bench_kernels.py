"""`artifact bench kernels`: what it times, and that wrong answers get no time."""

import numpy as np
import pytest
import torch
from artifact.kernels import attention_cpu, timing

from artifact import ops
from artifact.ops import PagedKV
from artifact.study import bench

SMALL = {"tokens": 4096, "listed": 8, "missed": 2, "sets": 2, "rounds": 2}


def test_every_side_is_timed():
    frame = bench.kernels(**SMALL)
    assert (frame["origin"] == "measured").all() and (frame["value"] > 0).all()
    assert not frame.duplicated(["measure", "unit"]).any()
    assert {"bytes", "ms", "gflops", "ratio"} == set(frame["unit"])
    told = " ".join(frame["measure"])
    for side in ("sum in place", "gather and torch", "repair of 2", "every block / torch", "2 KV heads", "bfloat16"):
        assert side in told


@pytest.mark.parametrize("operator", ["attend", "repair", "dense"])
def test_a_wrong_answer_gets_no_time(operator, monkeypatch):
    right = getattr(ops, operator)

    def wrong(*given, impl="cpu"):
        part = right(*given, impl=impl)
        return part if impl == "reference" else part._replace(out=part.out * (1 + 1e-4))

    monkeypatch.setattr(ops, operator, wrong)
    with pytest.raises(ValueError, match="off the reference; no time is given"):
        bench.kernels(**SMALL)


def test_a_gpus_times_are_those_of_the_timing_script(monkeypatch):
    case = timing.Case("repair", 1, 32, 8, 64, 96, 131072, 8)
    spent = [timing.Spent("triton", "graph", 12.5), timing.Spent("flashinfer bsr", "graph", skipped="not installed")]
    monkeypatch.setattr(timing, "rows", lambda place, cases: [{**case._asdict(), **one._asdict()} for one in spent])
    frame = bench.gpu_kernels(timing.Dry())
    assert frame.to_dict("records") == [{
        "measure": "repair, batch 1, 96 blocks of 64, 8 KV heads, 8 missed: triton, graph", "value": 12.5, "unit": "us",
        "origin": "measured"}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_the_sum_in_place_reads_every_number_of_the_listed_blocks(dim, dtype):
    k, v = (torch.randn(5, 2, 16, dim, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    kv = PagedKV(k, v, torch.tensor([[4, 2, 0]], dtype=torch.int32), torch.tensor([41], dtype=torch.int32))
    sums = attention_cpu.totals(kv, torch.tensor([[[2, 0], [1, 0]]], dtype=torch.int32))
    ends = [[(0, 9), (4, 16)], [(2, 16), (4, 16)]]
    expected = [sum(float(x[page, g, :n].double().sum()) for page, n in some for x in (k, v))
                for g, some in enumerate(ends)]
    np.testing.assert_allclose(sums[0].numpy(), expected, rtol=1e-4, atol=1e-3)
