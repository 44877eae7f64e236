"""The Triton kernels without a GPU: the tests of `tests/interpreted.py`, in a process where Triton interprets.

Whether kernels are interpreted or compiled is settled when they are imported, so both cannot live in one process.
"""

import os
import subprocess
import sys

import pytest
import torch
from artifact.kernels.paged import PagedKV, Partial

from artifact import checks, ops

pytest.importorskip("triton", reason="triton is not installed")


def test_every_kernel_is_right_in_the_interpreter(root):
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted.py"],
                          cwd=root, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


Q, K = torch.zeros(1, 2, 16), torch.zeros(2, 1, 16, 16)
KV = PagedKV(K, K, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
BLOCKS, STATE = torch.zeros(1, 1, 1, dtype=torch.int32), Partial(Q, Q[..., 0])


@pytest.mark.parametrize("call", [
    lambda: ops.attend(Q, KV, BLOCKS, impl="triton"),
    lambda: ops.attend_groups(Q, KV, BLOCKS, 1, impl="triton"),
    lambda: ops.repair(STATE, Q, KV, BLOCKS, impl="triton"),
    lambda: ops.merge(Partial(*(x[None] for x in STATE)), impl="triton"),
    lambda: ops.dense(Q, KV, impl="triton"),
    lambda: ops.quest_scores(Q, K[:1], K[:1], impl="triton"),
    lambda: ops.infllm_scores(Q, K[:1], torch.tensor([64]), impl="triton"),
    lambda: ops.ema_step(Q, Q, Q, (0.5, 0.5, 0.5), impl="triton"),
    lambda: ops.topk(Q, 1, impl="triton"),
], ids=["attend", "attend_groups", "repair", "merge", "dense", "quest_scores", "infllm_scores", "ema_step", "topk"])
def test_without_a_gpu_or_the_interpreter_the_error_says_so(call, request):
    name = request.node.callspec.id
    with pytest.raises(ValueError, match=rf"impl is 'triton'; {name} was given a tensor on cpu, allowed: on a GPU with "
                                         r"a driver, or anywhere where TRITON_INTERPRET=1 was set at the start"):
        call()


def test_more_channels_than_a_tile_holds_are_refused():
    wide = torch.zeros(1, 1, 16, 512)
    with pytest.raises(ValueError, match=r"512 channels; impl 'triton' allows at most 256"):
        checks.cache(torch.zeros(1, 1, 512), KV._replace(k=wide, v=wide), "triton")
