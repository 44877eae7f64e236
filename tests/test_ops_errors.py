"""What attention refuses, in one line that names it, and that nothing is read where an index points outside."""

import numpy as np
import pytest
import torch
from artifact.kernels import attention_cpu, reference

from artifact import ops
from artifact.ops import PagedKV, Partial


def whole(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


K = torch.zeros(6, 2, 16, 64)
KV = PagedKV(K, K, whole(*range(6)).reshape(2, 3), whole(40, 5))
Q, STATE = torch.zeros(2, 8, 64), Partial(torch.zeros(2, 8, 64), torch.zeros(2, 8))
BLOCKS = whole(0, 2, -1, 1, -1, -1, 0, -1, -1, -1, -1, -1).reshape(2, 2, 3)
PARTS = Partial(torch.zeros(3, 2, 8, 64), torch.zeros(3, 2, 8))


def listing(number, sequence=0):
    """BLOCKS with `number` in a slot of `sequence`, KV head 1."""
    blocks = BLOCKS.clone()
    blocks[sequence, 1, 2] = number
    return blocks


def everywhere(q=Q, kv=KV, blocks=BLOCKS, state=STATE):
    """Each operator that takes these, and what its list is called."""
    return [(lambda impl: ops.attend(q, kv, blocks, impl=impl), "blocks"),
            (lambda impl: ops.attend_groups(q, kv, blocks, 2, impl=impl), "blocks"),
            (lambda impl: ops.repair(state, q, kv, blocks, impl=impl), "missed")]


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize(("given", "says"), [
    ({"q": Q[0]}, "q is float32 [8, 64]; allowed: [B, H, D]"),
    ({"q": Q[:, :7], "state": Partial(STATE.out[:, :7], STATE.lse[:, :7])}, "7 query heads over 2 KV heads"),
    ({"q": Q.long()}, "q is int64 [2, 8, 64]; impl "),
    ({"kv": KV._replace(k=K[0])}, "k is float32 [2, 16, 64]; allowed beside q float32 [2, 8, 64]: [pages, G, block, "),
    ({"kv": KV._replace(k=K[..., :32], v=K[..., :32])}, "k is float32 [6, 2, 16, 32]"),
    ({"kv": KV._replace(v=K.half())}, "v is float16 [6, 2, 16, 64]; allowed: shape and dtype of k, float32"),
    ({"kv": KV._replace(k=K.int(), v=K.int())}, "k is int32 [6, 2, 16, 64]; impl "),
    ({"kv": KV._replace(k=K.mT.contiguous().mT)}, "k has strides [2048, 1024, 1, 16]; allowed: 1 over the channels"),
    ({"kv": KV._replace(v=K.mT.contiguous().mT)}, "v has strides"),
    ({"kv": KV._replace(page_table=KV.page_table.long())}, "page_table is int64 [2, 3]; allowed: int32 [2, N]"),
    ({"kv": KV._replace(page_table=KV.page_table[:1])}, "page_table is int32 [1, 3]; allowed: int32 [2, N]"),
    ({"kv": KV._replace(length=KV.length.float())}, "length is float32 [2]; allowed: int32 [2]"),
    ({"kv": KV._replace(length=whole(49, 5))}, "length holds 49; allowed: 0 to 48"),
    ({"kv": KV._replace(length=whole(40, -1))}, "length holds -1; allowed: 0 to 48"),
    ({"kv": KV._replace(page_table=whole(0, 6, 2, 3, 9, 9).reshape(2, 3))},
     "page_table holds 6 for block 1 of sequence 0; allowed: 0 to 5"),
    ({"kv": KV._replace(page_table=whole(0, -1, 2, 3, 9, 9).reshape(2, 3))},
     "page_table holds -1 for block 1 of sequence 0; allowed: 0 to 5"),
    ({"blocks": BLOCKS.long()}, " is int64 [2, 2, 3]; allowed: int32 [2, 2, S]"),
    ({"blocks": BLOCKS[:, :1]}, " is int32 [2, 1, 3]; allowed: int32 [2, 2, S]"),
    ({"blocks": listing(3)}, " holds 3 for sequence 0, KV head 1; allowed: -1 and 0 to 2, the blocks of its 40 tokens"),
    ({"blocks": listing(2**31 - 1)}, " holds 2147483647 for sequence 0"),
    ({"blocks": listing(-2)}, " holds -2 for sequence 0, KV head 1"),
    ({"blocks": listing(1, 1)}, " holds 1 for sequence 1, KV head 1; allowed: -1 and 0 to 0, the blocks of its 5"),
    ({"blocks": listing(1)}, " holds 1 twice for sequence 0, KV head 1; allowed: each block once"),
    ({"blocks": BLOCKS.to("meta")}, " is on meta; allowed: the device of q, cpu"),
    ({"kv": KV._replace(length=KV.length.to("meta"))}, "length is on meta; allowed: the device of q, cpu"),
])
def test_what_does_not_fit_is_named_by_every_operator(given, says, impl):
    for call, name in everywhere(**given):
        with pytest.raises(ValueError) as caught:
            call(impl)
        message = str(caught.value)
        assert (name if says.startswith(" ") else "") + says in message and "\n" not in message


@pytest.mark.parametrize(("call", "says"), [
    (lambda: ops.attend(Q, KV, BLOCKS, impl="cuda"), "impl is 'cuda'; allowed: reference, cpu, triton"),
    (lambda: ops.attend(Q.double(), KV, BLOCKS), "q is float64 [2, 8, 64]; impl 'cpu' allows float32, bfloat16"),
    (lambda: ops.attend(Q[..., :40], KV._replace(k=K[..., :40], v=K[..., :40]), BLOCKS),
     "40 channels; impl 'cpu' allows a multiple of 16"),
    (lambda: ops.attend_groups(Q, KV, BLOCKS, 0), "group is 0; allowed: a whole number of at least 1"),
    (lambda: ops.attend_groups(Q, KV, BLOCKS, 1.5), "group is 1.5"),
    (lambda: ops.repair(Partial(STATE.out[:1], STATE.lse[:1]), Q, KV, BLOCKS),
     "out is float32 [1, 8, 64] and lse float32 [1, 8]; allowed: float32 [2, 8, 64] and [2, 8]"),
    (lambda: ops.repair(Partial(STATE.out.half(), STATE.lse), Q, KV, BLOCKS), "out is float16 [2, 8, 64]"),
    (lambda: ops.merge(STATE), "out is float32 [2, 8, 64] and lse float32 [2, 8]; allowed: float32 [P, B, H, D] and"),
    (lambda: ops.merge(PARTS, torch.ones(3, 2, 2)), "keep is float32 [3, 2, 2]; allowed: bool [3, 2, G], G a divisor"),
    (lambda: ops.merge(PARTS, torch.ones(3, 2, 3, dtype=torch.bool)), "keep is bool [3, 2, 3]"),
    (lambda: ops.dense(Q, KV._replace(length=whole(49, 5))), "length holds 49"),
    (lambda: ops.dense(Q, KV._replace(page_table=KV.page_table + 4)), "page_table holds 6 for block 2 of sequence 0"),
    (lambda: ops.validate(KV, listing(3)), "blocks holds 3 for sequence 0"),
    (lambda: ops.validate(KV._replace(page_table=KV.page_table - 1)), "page_table holds -1 for block 0 of sequence 0"),
])
def test_what_one_operator_refuses(call, says):
    with pytest.raises(ValueError) as caught:
        call()
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_right_passes():
    ops.validate(KV)
    ops.validate(KV, BLOCKS)
    for call, _ in everywhere():
        for impl in ("reference", "cpu"):
            call(impl)


@pytest.mark.parametrize("number", [-2, 3, 1000, 2**31 - 1, -2**31])
def test_an_index_outside_never_reads_memory(number):
    """Behind the doorway: "cpu" refuses the list, the reference takes it for an empty slot, as Triton does."""
    far = PagedKV(K[:1].expand(6, 2, 16, 64), K, KV.page_table, KV.length)
    with pytest.raises(IndexError):
        attention_cpu.attend(Q, far, listing(number))
    with pytest.raises(IndexError):
        attention_cpu.attend(Q, far._replace(page_table=torch.full((2, 3), number if number < 0 else number + 3).int()),
                             BLOCKS)
    empty = reference.attend(Q, KV, listing(-1))
    assert all(torch.equal(a, b) for a, b in zip(reference.attend(Q, KV, listing(number)), empty, strict=True))


def test_gradients_are_no_hindrance():
    q, k = Q.clone().requires_grad_(), K.clone().requires_grad_()
    ours = ops.attend(q, KV._replace(k=k), BLOCKS)
    assert np.isfinite(ours.out.detach().numpy()).all()
