"""A model that decodes through our operators: against its own attention, and one way of decoding against another."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_capture import some_ids, tiny  # noqa: E402

from artifact.dsa.infllm import InfLLM  # noqa: E402
from artifact.dsa.quest import Quest  # noqa: E402
from artifact.models import attention, registry, weights  # noqa: E402
from artifact.prr.decode import Plan  # noqa: E402
from artifact.prr.predictor import Theta  # noqa: E402
from artifact.study import paths  # noqa: E402

QUEST = Quest(page=16, budget_blocks=5, dense_layers=1)
INFLLM = InfLLM(block=32, init=1, local=1, topk=3, dense_len=-1)
METHODS = [QUEST, INFLLM]
TOKENS, PROMPT = 250, 170


@pytest.fixture(scope="module")
def llama():
    return tiny(head_dim=16)


@pytest.fixture(scope="module")
def smollm():
    """The offline model, and a public text in its tokens."""
    try:
        source = weights.find(registry.OFFLINE, paths.data_dir() / "models")
    except ValueError as error:
        pytest.skip(str(error))
    text = (paths.data_dir() / "prompts" / "texts" / "us-constitution.txt").read_text(encoding="utf-8")
    return weights.load(source), weights.tokenizer(source)(text)["input_ids"]


def own_logits(model, ids, own="eager"):
    """fp32 [tokens, vocabulary] of one pass with an attention of the library's."""
    model.set_attn_implementation(own)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def our_logits(model, ids, prompt_tokens, plan, chunk=attention.CHUNK_TOKENS):
    """The same after the prompt, its rows fed `chunk` at a time."""
    prompt = attention.read(model, ids[:prompt_tokens], len(ids))
    with torch.inference_mode(), attention.attended(model, plan, prompt_tokens, queries=prompt.queries):
        parts = [attention.logits(model, ids[start:start + chunk], prompt.cache, min(chunk, len(ids) - start))
                 for start in range(prompt_tokens, len(ids), chunk)]
    return torch.cat(parts)


def nll_of(logits, ids):
    return -logits.double().log_softmax(-1)[torch.arange(len(ids)), ids].numpy()


# --- against the model's own attention

@pytest.mark.parametrize(("architecture", "changes"), [
    ("Llama", {}), ("Llama", {"num_key_value_heads": 6}), ("Llama", {"num_key_value_heads": 1}), ("Qwen3", {}),
    ("Glm", {}), ("Glm4", {})])
@pytest.mark.parametrize("chunk", [1, 33])
def test_dense_through_our_operators_is_the_models_own_attention(architecture, changes, chunk):
    model, ids = tiny(architecture, head_dim=16, **changes), some_ids(TOKENS if chunk > 1 else PROMPT + 20)
    ours = our_logits(model, ids, PROMPT, Plan("dense"), chunk)
    np.testing.assert_allclose(ours.numpy(), own_logits(model, ids)[PROMPT:].numpy(), atol=1e-4)


def test_in_double_precision_only_the_logits_last_rounding_remains():
    model, ids = tiny(head_dim=16).double(), some_ids(TOKENS)
    ours = our_logits(model, ids, PROMPT, Plan("dense", impl="reference"))
    np.testing.assert_allclose(ours.numpy(), own_logits(model, ids, "sdpa")[PROMPT:].numpy(), atol=2e-6)


def test_greedy_tokens_are_the_models_own(llama):
    ids = some_ids(PROMPT)
    own = llama.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False, eos_token_id=None)
    made = attention.generate(llama, ids, Plan("dense"), 30)
    assert made.tokens == own[0, PROMPT:].tolist()
    assert made.happened.selected.shape == (2, 29, 2) and not made.happened.sparse.any()


def test_scores_are_the_models_own_likelihoods(llama):
    ids = some_ids(TOKENS)
    made = attention.score(llama, ids, PROMPT, Plan("dense"), errors=True)
    assert made.nll.shape == (TOKENS - PROMPT,) and made.nll.dtype == np.float64
    np.testing.assert_allclose(made.nll, nll_of(own_logits(llama, ids)[PROMPT - 1:-1], ids[PROMPT:]), atol=1e-4)
    assert made.error.shape == (2, TOKENS - PROMPT - 1) and made.error.max() < 1e-5 and made.theta == (None, None)


# --- one way against another

@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize(("mode", "fidelity"), [("dsa", "union"), ("reuse", "union"), ("reuse", "exact"),
                                                ("repair", "union"), ("prr", "union"), ("prr", "exact")])
def test_chunks_of_known_tokens_are_token_after_token(llama, monkeypatch, method, mode, fidelity):
    plan = Plan(mode, fidelity, method, 1.5)
    ids = some_ids(PROMPT)
    made = attention.generate(llama, ids, plan, 40)
    assert attention.generate(llama, ids, plan, 40, enough=lambda said: len(said) == 5).tokens == made.tokens[:5]
    prompt = attention.read(llama, ids, PROMPT + 40)
    monkeypatch.setattr(attention, "CHUNK_TOKENS", 17)
    known = attention.score(llama, ids + made.tokens, PROMPT, plan, prompt=prompt)
    monkeypatch.setattr(attention, "CHUNK_TOKENS", 1)
    single = attention.score(llama, ids + made.tokens, PROMPT, plan, prompt=prompt)
    np.testing.assert_allclose(known.nll, single.nll, atol=1e-4)
    for one, other, third in zip(known.happened, single.happened, made.happened, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)
    assert known.theta == single.theta == made.theta and (known.theta[0] is not None) == (mode == "prr")


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_exact_is_dsa_and_what_differs_from_dense_is_told(llama, method):
    ids = some_ids(TOKENS)
    prompt = attention.read(llama, ids[:PROMPT], TOKENS)

    def scored(mode, fidelity="union", **options):
        return attention.score(llama, ids, PROMPT, Plan(mode, fidelity, method, **options), prompt=prompt, errors=True)

    dense, dsa, union = scored("dense"), scored("dsa"), scored("prr", speculation=2)
    for made in (scored("prr", "exact"), scored("prr", "exact", speculation=0.25), scored("repair", "exact"),
                 scored("reuse", "exact")):
        np.testing.assert_allclose(made.nll, dsa.nll, atol=1e-4)
        np.testing.assert_allclose(made.error, dsa.error, atol=1e-4)
    assert np.abs(dsa.nll - dense.nll).max() > 1e-3 and np.abs(union.nll - dsa.nll).max() > 1e-3
    first = int(method is QUEST)  # that layer of Quest's is dense
    assert (dsa.error[first:] > 1e-3).mean() > 0.9 and (dsa.error[:first] < 1e-5).all()
    assert np.median(union.error[first:]) < np.median(dsa.error[first:])
    assert union.happened.sparse[first:].all() and union.happened.missed.any() and union.happened.wasted.any()


def test_a_prompt_may_be_gone_on_from_as_often_as_wanted(llama):
    ids = some_ids(TOKENS)
    prompt = attention.read(llama, ids[:PROMPT], TOKENS)
    plan = Plan("prr", "union", QUEST)
    fresh = attention.score(llama, ids, PROMPT, plan)
    attention.generate(llama, ids[:PROMPT], Plan("dense"), 30, prompt=prompt)
    for _ in range(2):
        again = attention.score(llama, ids, PROMPT, plan, prompt=prompt)
        assert np.array_equal(again.nll, fresh.nll) and again.theta == fresh.theta


def test_each_layer_may_have_its_plan(llama):
    ids, theta = some_ids(TOKENS), Theta(1, 1, 0)
    plans = [Plan("dsa", method=INFLLM), Plan("prr", "union", QUEST, theta=theta)]
    made = attention.score(llama, ids, PROMPT, plans)
    assert made.theta == (None, theta) and not made.happened.predicted[0].any() and made.happened.predicted[1].all()
    assert np.array_equal(made.nll, attention.score(llama, ids, PROMPT, plans).nll)


def test_the_model_is_left_as_it_was(llama):
    llama.set_attn_implementation("eager")
    attention.generate(llama, some_ids(40), Plan("dense"), 2)
    assert llama.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="plan has 3 layers; allowed: one plan, or one for each of the model's 2"):
        attention.score(llama, some_ids(40), 20, [Plan("dense")] * 3)
    assert llama.config._attn_implementation == "eager"


def test_a_cache_without_room_behind_its_tokens_is_copied(llama):
    ids = some_ids(TOKENS)
    cache = transformers.DynamicCache(config=llama.config)
    with torch.inference_mode(), attention.attended(llama, Plan("dsa", method=QUEST), PROMPT):
        attention.prefill(llama, ids[:PROMPT], cache)
        theirs = attention.logits(llama, ids[PROMPT:], cache, TOKENS - PROMPT)
    ours = our_logits(llama, ids, PROMPT, Plan("dsa", method=QUEST))
    np.testing.assert_allclose(theirs.numpy(), ours.numpy(), atol=1e-4)


@pytest.mark.parametrize(("call", "said"), [
    (lambda model: attention.score(model, some_ids(40), 40, Plan("dense")), "prompt_tokens is 40; allowed: 1 to 39"),
    (lambda model: attention.score(model, some_ids(300), 40, Plan("dense")), "tokens is 300 and the prompt has 40; "
                                                                            "allowed: 1 to the model's context of 256"),
    (lambda model: attention.generate(model, some_ids(40), Plan("dense"), 0), "steps is 0; allowed: at least 1"),
    (lambda model: attention.generate(model, [], Plan("dense"), 1), "tokens is 1 and the prompt has 0"),
    (lambda model: attention.generate(model, some_ids(40), Plan("dense"), 9,
                                      prompt=attention.read(model, some_ids(40, 1), 60)), "prompt has 40 other tokens"),
    (lambda model: attention.generate(model, some_ids(40), Plan("dense"), 220,
                                      prompt=attention.read(model, some_ids(40), 40)), "prompt has room for 256"),
])
def test_bad_input(llama, call, said):
    with pytest.raises(ValueError, match=said):
        call(llama)


def test_attention_that_is_not_plain_is_refused():
    with pytest.raises(ValueError, match="allowed: full, plain attention"):
        attention.generate(tiny("Mistral", sliding_window=32, head_dim=16), some_ids(60), Plan("dense"), 3)
    model = tiny(head_dim=16)
    with torch.inference_mode(), attention.attended(model, Plan("dense"), 20):
        cache = attention.room(model, 60)
        attention.prefill(model, some_ids(10), cache)
        with pytest.raises(ValueError, match="a chunk goes from position 10 past the prompt's 20"):
            attention.logits(model, some_ids(30), cache)


# --- the offline model

def greedy(smollm, tokens, steps, method):
    model, ids = smollm
    prompt = attention.read(model, ids[:tokens], tokens + steps)
    dsa, exact = (attention.generate(model, ids[:tokens], plan, steps, prompt=prompt) for plan in (
        Plan("dsa", method=method), Plan("prr", "exact", method)))
    assert exact.tokens == dsa.tokens and len(exact.tokens) == steps
    assert exact.happened.missed.any() and exact.happened.wasted.any()


def test_greedy_tokens_of_a_real_model_are_dsas_in_exact_mode(smollm):
    greedy(smollm, 400, 32, Quest(page=16, budget_blocks=8))


@pytest.mark.slow
@pytest.mark.parametrize("method", [Quest(page=16, budget_blocks=32), Quest(page=64, budget_blocks=8),
                                    InfLLM(topk=6, local=2, dense_len=-1)], ids=str)
def test_greedy_tokens_of_a_real_model_over_256_steps(smollm, method):
    greedy(smollm, 2048, 256, method)


def test_a_real_models_logits_through_our_operators(smollm):
    """As near to its own as its own attention functions are to each other, and the same tokens."""
    model, ids = smollm
    some = ids[:320]
    ours = our_logits(model, some, 300, Plan("dense"))
    own = own_logits(model, some)[300:]
    assert (ours - own).abs().max() <= 1e-5 * own.abs().max()
    assert torch.equal(ours.argmax(-1), own.argmax(-1))
