"""The operators as torch sees them: fake tensors, compiled code, schemas."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from artifact import attention, ops
from artifact.ops import PagedKV

IMPLS = ["reference", "cpu"]


def given():
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(6, 2, 16, 64, generator=draw) for _ in range(2))
    kv = PagedKV(k, v, torch.arange(6, dtype=torch.int32).reshape(2, 3), torch.tensor([40, 33], dtype=torch.int32))
    q = torch.randn(2, 8, 64, generator=draw)
    return q, kv, torch.tensor([[[0], [1]], [[2], [-1]]], dtype=torch.int32), torch.tensor(
        [[[1, 2], [0, 2]], [[0, -1], [-1, -1]]], dtype=torch.int32), torch.tensor([[[True, False]] * 2])


def step(q, kv, predicted, missed, keep, impl):
    """One decode step with every operator in it."""
    parts = ops.attend_groups(q, kv, predicted, 1, impl=impl)
    state = ops.repair(ops.merge(parts, keep, impl=impl), q, kv, missed, impl=impl)
    direct = ops.attend(q, kv, missed, impl=impl)
    return state.out + direct.out - ops.dense(q, kv, impl=impl).out, state.lse.exp()


@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_code_holds_them_whole(impl):
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ours, plain in zip(compiled(*given(), impl), step(*given(), impl), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("impl", [*IMPLS, "triton"])
def test_fake_tensors_have_the_shapes(impl):
    with FakeTensorMode() as mode:
        q, kv, predicted, missed, keep = given()
        q = q.to(torch.bfloat16)
        parts = ops.attend_groups(q, kv, predicted, 1, impl=impl)
        assert (parts.out.shape, parts.lse.shape) == ((1, 2, 8, 64), (1, 2, 8))
        state = ops.merge(parts, keep, impl=impl)
        for ours in (state, ops.attend(q, kv, missed, impl=impl), ops.dense(q, kv, impl=impl),
                     ops.repair(state, q, kv, missed, impl=impl)):
            assert (ours.out.shape, ours.lse.shape) == ((2, 8, 64), (2, 8))
            assert ours.out.dtype == ours.lse.dtype == torch.float32 and ours.out.fake_mode is mode
        with pytest.raises(ValueError, match=r"blocks is int32 \[2, 1, 1\]"):
            ops.attend(q, kv, predicted[:, :1], impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_schemas_are_kept(impl):
    q, kv, predicted, missed, keep = given()
    parts = ops.attend_groups(q, kv, predicted, 1, impl=impl)
    state = ops.merge(parts, keep, impl=impl)
    nothing = missed[:, :, :0]
    for operator, arguments in [
            (attention.attend, (q, *kv, missed)), (attention.attend_groups, (q, *kv, missed, 2)),
            (attention.repair, (*state, q, *kv, missed)), (attention.repair, (*state, q, *kv, nothing)),
            (attention.merge, (*parts, keep)), (attention.merge, (*parts, None)), (attention.dense, (q, *kv))]:
        torch.library.opcheck(operator, (*arguments, impl), test_utils=("test_schema", "test_faketensor"))
