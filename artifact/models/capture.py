"""Recording a decode trace from a transformers causal model, whatever its architecture.

The model's attention is replaced, through the interface transformers has for it, by a function that computes the same
and looks: queries arrive after RoPE, and so do the keys that the cache holds. No attention matrix is ever kept: the
prefill goes in chunks, and at a decode step the probabilities of one layer are summed into pages at once.

The prompt may be extended by the model's own decoding (`extend`), for prompts that are mostly the model's own words.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from artifact.models import attention, registry
from artifact.models.trace import BITS, PAGE_TOKENS, Trace, check_length

TEMPERATURE = 0.8


def record(model, ids: Sequence[int], *, layers: Sequence[int], steps: int, rows: int, decoding: str,
           labels: dict[str, str], continuation: Sequence[int] = (), seed: int = 0,
           on_progress: Callable[[int, int], None] | None = None) -> Trace:
    """Runs `model` over the prompt `ids`, then decodes `steps` tokens, and returns what `layers` saw.

    `rows`: the last so many positions of the prompt whose queries are kept. `decoding`: "greedy", "sampled" (with
    `seed`) or "teacher" (the tokens of `continuation`); the model's end tokens are never chosen, so that every
    recording has its steps. `labels`: model, family and prompt, as the trace shall name them. `on_progress` is called
    with tokens done and tokens in all.

    Raises ValueError when the prompt does not fit the model's context or a layer is none of the model's, and when the
    model's attention cannot be watched: it must take grouped-query heads through transformers' attention interface and
    keep every key.
    """
    shape = registry.shape_of(model.config.get_text_config().to_dict(), labels["model"])
    layers = [int(layer) for layer in layers]
    registry.check_layers(layers, shape.layers)
    check_length(len(ids), steps, rows, shape.context_tokens)
    if decoding == "teacher" and len(continuation) < steps:
        raise ValueError(f"the text has {len(continuation)} tokens after the prompt; {steps} steps need as many")
    watch = _Watch(layers, range(len(ids) - rows, len(ids)), (len(ids) + steps) // PAGE_TOKENS)
    choose = _Choice(model, decoding, continuation, seed)
    total = len(ids) + steps
    done = on_progress or (lambda done, total: None)
    with torch.inference_mode(), attention.replaced(model, watch):
        cache = attention.room(model, total)
        logits = attention.prefill(model, ids, cache, lambda count: done(count, total))
        watch.decoding = True
        generated = []
        for step in range(steps):
            generated.append(choose(logits, step))
            logits = attention.logits(model, generated[-1:], cache)[-1]
            done(len(ids) + step + 1, total)
        low, high, mean = zip(*(_pages(cache, layer, total) for layer in layers), strict=True)
    return Trace(
        **labels, decoding=decoding, tokens=len(ids), layers=np.array(layers, np.int32),
        rows=np.arange(len(ids) - rows, len(ids), dtype=np.int32), generated=np.array(generated, np.int32),
        q_prefill=_half(torch.cat(watch.prefill[layer]) for layer in layers),
        q_decode=_half(torch.stack(watch.decode[layer]) for layer in layers),
        page_min=_half(low), page_max=_half(high), page_mean=_half(mean),
        mass=_half(torch.stack(watch.mass[layer]) for layer in layers),
    )


def extend(model, ids: Sequence[int], tokens: int, *, seed: int = 0,
           on_progress: Callable[[int, int], None] | None = None) -> list[int]:
    """`ids` and the model's own continuation, drawn with `seed`, `tokens` in all."""
    choose, out = _Choice(model, "sampled", (), seed), list(ids)
    with torch.inference_mode(), attention.replaced(model, attention.plain):
        cache = attention.room(model, tokens)
        logits = attention.prefill(model, out, cache)
        while len(out) < tokens:
            out.append(choose(logits, len(out)))
            if on_progress:
                on_progress(len(out), tokens)
            if len(out) < tokens:
                logits = attention.logits(model, out[-1:], cache)[-1]
    return out


class _Watch:
    """An attention function that keeps what the chosen layers see."""

    def __init__(self, layers, rows, pages):
        self.rows, self.pages, self.decoding = rows, pages, False
        self.prefill, self.decode, self.mass = ({layer: [] for layer in layers} for _ in range(3))

    def __call__(self, module, query, key, value, attention_mask, **options):
        layer = getattr(module, "layer_idx", None)
        if layer in self.prefill:
            if not self.decoding:
                first = key.shape[2] - query.shape[2]
                kept = slice(max(self.rows.start - first, 0), max(self.rows.stop - first, 0))
                self.prefill[layer].append(query[0, :, kept].transpose(0, 1).float().cpu())
            else:
                if attention_mask is not None:
                    raise ValueError(f"layer {layer} does not attend to all keys; only full attention can be recorded")
                self.decode[layer].append(query[0, :, 0].float().cpu())
                self.mass[layer].append(self._mass(query, key, options.get("scaling")))
        return attention.plain(module, query, key, value, attention_mask, **options)

    def _mass(self, query, key, scaling):
        """fp32 [G, P]: attention probability on each page, the mean over the group."""
        kv_heads, tokens, size = key.shape[1:]
        folded = query[0, :, 0].view(kv_heads, -1, size).float()
        logits = folded @ key[0].float().transpose(1, 2) * (size**-0.5 if scaling is None else scaling)
        share = logits.softmax(-1).mean(1)
        room = share.new_zeros(kv_heads, self.pages * PAGE_TOKENS)
        room[:, :tokens] = share[:, :room.shape[1]]
        return room.view(kv_heads, self.pages, PAGE_TOKENS).sum(-1).cpu()


class _Choice:
    """Which token comes next."""

    def __init__(self, model, decoding, continuation, seed):
        self.decoding, self.continuation = decoding, continuation
        self.generator = torch.Generator().manual_seed(seed)
        ends = model.generation_config.eos_token_id if model.can_generate() else None
        self.ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    def __call__(self, logits, step):
        if self.decoding == "teacher":
            return int(self.continuation[step])
        logits = logits.clone()
        logits[self.ends] = -torch.inf
        if self.decoding == "greedy":
            return int(logits.argmax())
        return int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=self.generator))


def _pages(cache, layer, total):
    """Minimum, maximum and mean over the complete pages of the keys the cache holds, fp32 [G, P, D] each."""
    keys = cache.layers[layer].keys[0].float().cpu()
    if keys.shape[1] != total:
        raise ValueError(f"layer {layer} keeps {keys.shape[1]} of {total} keys; only full attention can be recorded")
    count = total // PAGE_TOKENS
    paged = keys[:, :count * PAGE_TOKENS].unflatten(1, (count, PAGE_TOKENS))
    return paged.amin(2), paged.amax(2), paged.mean(2)


def _half(layers):
    """A list of fp32 tensors, one a layer, as one fp16 array rounded to `trace.BITS` significant bits."""
    bits = torch.stack(list(layers)).half().numpy().view(np.uint16)
    dropped = 11 - BITS
    even = (bits >> dropped) & 1  # ties to even, or shares would add up to more than 1
    return (bits + (1 << dropped - 1) - 1 + even >> dropped << dropped).astype(np.uint16).view(np.float16)
