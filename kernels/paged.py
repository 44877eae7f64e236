"""What every attention operator takes and gives: a paged cache, and attention over a part of it."""

from typing import NamedTuple


class PagedKV(NamedTuple):
    """One layer's KV cache in pages of `bs` tokens, for B sequences and G KV heads of D channels.

    k, v [pages, G, bs, D]; page_table int32 [B, N]: the page of each of a sequence's blocks; length int32 [B]: its
    tokens. What lies past a length, in pages not listed or in the table past ceil(length / bs) is never read.
    """

    k: object
    v: object
    page_table: object
    length: object


class Partial(NamedTuple):
    """Attention over some of a sequence's tokens, enough to be combined with that over others.

    out [B, H, D], the normalised output; lse [B, H], the natural logarithm of the sum of exponentials of the logits.
    Nothing attended: out 0 and lse -inf. Several have a leading axis [P, ...].
    """

    out: object
    lse: object
