"""A transformers model whose attention is ours: its layers decode as a `Plan` says, over their cache seen as pages.

The model's attention is replaced through the interface transformers has for it: queries arrive after RoPE, and so do
the keys that the cache holds. A prompt is attended to by dense causal attention (SDPA); it goes in chunks, and so do
rows after it whose tokens are known. `capture` records through the same doors.

Any model with grouped-query heads, transformers' attention interface and full attention in every layer.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from artifact.ops import PagedKV
from artifact.prr import decode, overlap
from artifact.prr.decode import Happened, Plan
from artifact.prr.predictor import Theta

CHUNK_TOKENS = 512
ROWS = 64  # of the prompt's last positions, from which theta is chosen and the predictor starts
_NAME = "artifact"
_ROOM = 256  # the cache's room is a multiple of this, so that it is whole pages
_LOGITS = 64  # rows of logits that are widened at once


class Prompt(NamedTuple):
    """A prompt that a model has read, to go on from as often as wanted: `score` and `generate` rewind the cache."""

    ids: tuple[int, ...]
    cache: DynamicCache
    queries: dict[int, torch.Tensor]  # layer -> fp32 [R, H, D], of the last positions
    logits: torch.Tensor  # fp32 [vocabulary], after the last token


class Scored(NamedTuple):
    """What `score` returns. n tokens are scored; L layers, T = n - 1 decode rows, G KV heads."""

    nll: np.ndarray  # float64 [n], natural logarithm
    happened: Happened  # [L, T, G], and sparse [L, T]
    error: np.ndarray | None  # float64 [L, T]: |out - dense| / |dense|, over all heads, of the same inputs
    theta: tuple[Theta | None, ...]  # by layer


class Generated(NamedTuple):
    """What `generate` returns; T = steps - 1 decode rows."""

    tokens: list[int]
    happened: Happened  # [L, T, G], and sparse [L, T]
    theta: tuple[Theta | None, ...]  # by layer


def read(model, ids: Sequence[int], tokens: int, *, rows: int = ROWS) -> Prompt:
    """`model` reads the prompt `ids`; there is room for `tokens` in all. `rows`: the last positions to keep queries of.

    ValueError for an empty prompt, for fewer `tokens` than that, and when the model's context is shorter.
    """
    context = model.config.get_text_config().max_position_embeddings
    if not 1 <= len(ids) <= tokens <= context:
        raise ValueError(f"tokens is {tokens} and the prompt has {len(ids)}; allowed: 1 to the model's context of "
                         f"{context}, the prompt among them")
    with torch.inference_mode(), attended(model, Plan("dense"), len(ids), rows=rows) as own:
        cache = room(model, tokens)
        last = prefill(model, ids, cache)
    return Prompt(tuple(ids), cache, {layer: torch.cat(parts) for layer, parts in own.queries.items()}, last)


def score(model, ids: Sequence[int], prompt_tokens: int, plan: Plan | Sequence[Plan], *, prompt: Prompt | None = None,
          errors: bool = False) -> Scored:
    """The model's negative log-likelihood of ids[prompt_tokens:], each token fed as it is (teacher forcing).

    plan: of every layer, or one for each; "prr" without a theta calibrates it on the prompt's last rows. prompt: what
    `read` made of ids[:prompt_tokens], to spare reading it again. errors: also compare each layer with dense attention.
    The first token's likelihood is the prompt's, and so the same under every plan.
    """
    if not 1 <= prompt_tokens < len(ids):
        raise ValueError(f"prompt_tokens is {prompt_tokens}; allowed: 1 to {len(ids) - 1}, so that a token is scored")
    prompt = _prompt(model, ids[:prompt_tokens], len(ids), prompt)
    fed = list(ids[prompt_tokens:-1])
    with torch.inference_mode(), attended(model, plan, prompt_tokens, queries=prompt.queries, errors=errors) as own:
        nll = [_nll(prompt.logits[None], ids[prompt_tokens:prompt_tokens + 1])]
        for start in range(0, len(fed), CHUNK_TOKENS):
            chunk = fed[start:start + CHUNK_TOKENS]
            rows = logits(model, chunk, prompt.cache, len(chunk))
            nll.append(_nll(rows, ids[prompt_tokens + start + 1:prompt_tokens + start + 1 + len(chunk)]))
    return Scored(np.concatenate(nll), own.happened(), own.error(), own.theta())


def generate(model, ids: Sequence[int], plan: Plan | Sequence[Plan], steps: int, *, prompt: Prompt | None = None,
             both: overlap.Both = overlap.in_turn,
             enough: Callable[[list[int]], bool] = lambda tokens: False) -> Generated:
    """The `steps` tokens that the model finds likeliest, one after the other; end tokens are tokens like others.

    both: how each layer's selection and speculation run beside each other, as in `decode.step`. enough: asked after
    each token whether those so far will do.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; allowed: at least 1")
    prompt = _prompt(model, ids, len(ids) + steps, prompt)
    with torch.inference_mode(), attended(model, plan, len(ids), queries=prompt.queries, both=both) as own:
        tokens = [int(prompt.logits.argmax())]
        while len(tokens) < steps and not enough(tokens):
            tokens.append(int(logits(model, tokens[-1:], prompt.cache)[-1].argmax()))
    return Generated(tokens, own.happened(), own.theta())


@contextmanager
def attended(model, plan: Plan | Sequence[Plan], prompt_tokens: int, *, queries: dict[int, torch.Tensor] | None = None,
             rows: int = ROWS, errors: bool = False, both: overlap.Both = overlap.in_turn):
    """Within, the model's layers decode as `plan` says, one for all or one for each; gives a `Decoding`.

    The first `prompt_tokens` positions are the prompt. queries: those of its last rows by layer, when it is in the
    cache already; else the last `rows` are kept as they pass. both: of `decode.step`, for tokens that come one by one.
    """
    count = model.config.get_text_config().num_hidden_layers
    plans = [plan] * count if isinstance(plan, Plan) else list(plan)
    if len(plans) != count:
        raise ValueError(f"plan has {len(plans)} layers; allowed: one plan, or one for each of the model's {count}")
    own = Decoding(plans, prompt_tokens, rows, errors, queries, both)
    with replaced(model, own):
        yield own


class Decoding:
    """An attention function: a prompt's rows densely, later ones as their layer's plan says. Keeps what happened."""

    def __init__(self, plans, prompt_tokens, rows, errors, queries, both=overlap.in_turn):
        self.both = both
        self.plans, self.prompt_tokens, self.rows, self.errors = plans, prompt_tokens, rows, errors
        self.given, self.queries = queries, {}
        self._states, self._happened, self._errors = {}, {}, {}

    def __call__(self, module, query, key, value, attention_mask, **options):
        layer, tokens = module.layer_idx, key.shape[2]
        first = tokens - query.shape[2]
        self._check(module, query, first, tokens, options)
        if tokens <= self.prompt_tokens:
            kept = slice(max(self.prompt_tokens - self.rows - first, 0), query.shape[2])
            self.queries.setdefault(layer, []).append(query[0, :, kept].transpose(0, 1).float())
            return plain(module, query, key, value, attention_mask, **options)
        plan = self.plans[layer]
        scaling, size = options.get("scaling"), query.shape[3]
        q = query[0].transpose(0, 1) * (1 if scaling is None else scaling * size**0.5)
        kv = _paged(key, value, plan.method.block, first)
        if layer not in self._states:
            self._begin(layer, key[:, :, :first])
        walk = partial(decode.step, both=self.both) if len(q) == 1 else decode.steps
        out, self._states[layer], happened = walk(self.plans[layer], q, kv, self._states[layer], layer)
        self._happened.setdefault(layer, []).append(happened)
        if self.errors:
            exact = plain(module, query, key, value, attention_mask, **options)[0][0].double()
            off = (out - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
            self._errors.setdefault(layer, []).append(off.cpu().numpy())
        return out.to(query.dtype)[None], None

    def happened(self) -> Happened:
        """Of all decode rows so far: [L, T, G], and sparse [L, T]."""
        layers = [[torch.cat(parts) for parts in zip(*self._happened[layer], strict=True)]
                  for layer in sorted(self._happened)]
        return Happened(*(torch.stack(parts) for parts in zip(*layers, strict=True))) if layers else None

    def error(self) -> np.ndarray | None:
        """float64 [L, T]: how far each row is from dense attention; None when it was not asked for."""
        layers = [np.concatenate(self._errors[layer]) for layer in sorted(self._errors)]
        return np.stack(layers) if layers else None

    def theta(self) -> tuple[Theta | None, ...]:
        """By layer, calibrated ones too."""
        return tuple(plan.theta for plan in self.plans)

    def _begin(self, layer, keys):
        plan = self.plans[layer]
        state = decode.begin(plan, keys)
        if plan.mode in ("reuse", "repair", "prr"):
            q = self.given[layer] if self.given is not None else torch.cat(self.queries[layer])
            seen = decode.prefill_scores(plan, q, state, layer)
            if plan.mode == "prr" and plan.theta is None:
                self.plans[layer] = plan = decode.calibrated(plan, seen, keys.shape[2], layer)
            state = decode.warm(plan, state, seen[:, None], layer)
        self._states[layer] = state

    def _check(self, module, query, first, tokens, options):
        if query.shape[0] != 1:
            raise ValueError(f"the model was given {query.shape[0]} sequences; allowed: 1")
        if options.get("softcap") is not None or options.get("sliding_window") is not None:
            raise ValueError(f"layer {module.layer_idx} is a {type(module).__name__} with a softcap or a window; "
                             "allowed: full, plain attention")
        if first < self.prompt_tokens < tokens:
            raise ValueError(f"a chunk goes from position {first} past the prompt's {self.prompt_tokens}; allowed: "
                             "chunks that end with the prompt")


@contextmanager
def replaced(model, function):
    """Within, the model's attention is `function`."""
    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, function)
    AttentionMaskInterface.register(_NAME, sdpa_mask)  # for a name without one no causal mask would be made
    model.set_attn_implementation(_NAME)
    if model.config._attn_implementation != _NAME:
        raise ValueError(f"{type(model).__name__} does not use transformers' attention interface")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def plain(module, query, key, value, attention_mask, **options):
    """SDPA; with one query the group becomes its rows, which a CPU computes several times faster than a wide group."""
    simple = attention_mask is None and options.get("softcap") is None and options.get("position_bias") is None
    if query.shape[2] > 1 or not simple:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    batch, heads, _, size = query.shape
    folded = query.view(batch, key.shape[1], -1, size)
    out = torch.nn.functional.scaled_dot_product_attention(folded, key, value, scale=options.get("scaling"))
    return out.reshape(batch, 1, heads, value.shape[-1]), None


class InPlace(DynamicLayer):
    """Keys and values written in place, for up to `tokens`.

    transformers' own layer joins old and new at every step: each time all is copied, into memory a little larger than
    what was freed, and after 8K tokens the process holds three times what it needs.
    """

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.room = -(-tokens // _ROOM) * _ROOM, None

    def update(self, key_states, value_states, *_, **__):
        new = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(*new)
            self.room = [states.new_empty(*states.shape[:2], self.tokens, states.shape[3]) for states in new]
        start, end = self.get_seq_length(), self.get_seq_length() + key_states.shape[2]
        for room, states in zip(self.room, new, strict=True):
            room[:, :, start:end] = states
        self.rewind(end)
        return self.keys, self.values

    def rewind(self, tokens):
        """Only the first `tokens` are there."""
        self.keys, self.values = (room[:, :, :tokens] for room in self.room)


def room(model, tokens: int) -> DynamicCache:
    """An empty cache of the model with room for `tokens`."""
    made = DynamicCache(config=model.config)
    made.layers = [InPlace(tokens) if type(layer) is DynamicLayer else layer for layer in made.layers]
    return made


def prefill(model, ids: Sequence[int], cache: DynamicCache, done=lambda tokens: None) -> torch.Tensor:
    """fp32 logits [vocabulary] after `ids`, fed in chunks; `done` is called with the tokens fed so far."""
    for start in range(0, len(ids), CHUNK_TOKENS):
        chunk = ids[start:start + CHUNK_TOKENS]
        last = logits(model, chunk, cache)[-1]
        done(start + len(chunk))
    return last


def logits(model, ids: Sequence[int], cache: DynamicCache, rows: int = 1) -> torch.Tensor:
    """fp32 logits [rows, vocabulary] after the last `rows` of `ids`, on the CPU."""
    tokens = torch.tensor([list(ids)], dtype=torch.long, device=model.device)
    return model(tokens, cache=cache, use_cache=True, logits_to_keep=rows).logits[0].float().cpu()


def _prompt(model, ids, tokens, given):
    """The prompt `ids` with room for `tokens` in all: read now, or `given`, rewound."""
    if given is None:
        return read(model, ids, tokens)
    if given.ids != tuple(ids):
        raise ValueError(f"prompt has {len(given.ids)} other tokens; allowed: those that come first, {len(ids)}")
    for layer in given.cache.layers:
        if layer.tokens < tokens:
            raise ValueError(f"prompt has room for {layer.tokens} tokens; allowed: at least {tokens}")
        layer.rewind(len(ids))
    return given


def _paged(key, value, size, first):
    """The cache [1, G, tokens, D] as pages of `size` where they lie, one row of it for each position from `first`."""
    tokens = key.shape[2]
    pages = -(-tokens // size)
    count = tokens - first
    table = torch.arange(pages, dtype=torch.int32, device=key.device).expand(count, -1)
    length = torch.arange(first + 1, tokens + 1, dtype=torch.int32, device=key.device)
    return PagedKV(*(_pages(states, pages, size) for states in (key, value)), table, length)


def _pages(states, pages, size):
    """[1, G, tokens, D] as [pages, G, size, D]: a view with room behind the last token, or a padded copy."""
    _, heads, tokens, dim = states.shape
    _, head, token, channel = states.stride()
    if head < pages * size * token:
        states = torch.nn.functional.pad(states, (0, 0, 0, pages * size - tokens))
        _, head, token, channel = states.stride()
    return states.as_strided((pages, heads, size, dim), (size * token, head, token, channel))


def _nll(rows, ids):
    """float64 [n]: what fp32 logits [n, vocabulary] say against the tokens `ids`."""
    out = []
    for some, chosen in zip(rows.split(_LOGITS), torch.tensor(list(ids)).split(_LOGITS), strict=True):
        below = some - some.amax(-1, keepdim=True)  # what rounds here is what counts least
        out.append(below.exp().sum(-1, dtype=torch.float64).log() - below.gather(1, chosen[:, None])[:, 0])
    return torch.cat(out).numpy()
