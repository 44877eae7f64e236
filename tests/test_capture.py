"""Recording: what a model's layers see, against the model's own eager attention; and the command that does it."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from artifact.dsa.quest import Quest  # noqa: E402
from artifact.models import attention, capture, registry, trace, weights  # noqa: E402
from artifact.study import recording  # noqa: E402

SHAPE = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
         "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
TOKENS, STEPS, ROWS = 70, 12, 20


def tiny(architecture="Llama", **changes):
    """A random model of one architecture, sharp enough to have opinions."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5 * 2)
    return model


@pytest.fixture(scope="module")
def llama():
    return tiny()


def some_ids(count, seed=0):
    return np.random.default_rng(seed).integers(2, 300, count).tolist()


def recorded(model, decoding="greedy", layers=(0, 1), steps=STEPS, rows=ROWS, tokens=TOKENS, **options):
    labels = {"model": "tiny", "family": "text", "prompt": "0"}
    return capture.record(model, some_ids(tokens), layers=layers, steps=steps, rows=rows, decoding=decoding,
                          labels=labels, **options)


def own_words(model, made):
    """The whole sequence, and the attention and hidden states of one eager pass over it."""
    ids = torch.tensor([some_ids(made.tokens) + made.generated.tolist()])
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return ids, model(ids, output_attentions=True, output_hidden_states=True)


def rotated(states, theta, turned):
    """RoPE by its definition, in float64: pairs of the two halves of the first `turned` channels."""
    states = states.double()
    angle = torch.arange(states.shape[1])[:, None] * theta ** (-torch.arange(0, turned, 2) / turned).double()
    one, other, rest = states[..., :turned // 2], states[..., turned // 2:turned], states[..., turned:]
    return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin(), rest], -1)


def close(found, expected):
    """fp16 rounded to 9 bits against float64."""
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=2**-8, atol=1e-5)


def test_queries_and_pages_are_those_of_the_definition(llama):
    made = recorded(llama)
    _, seen = own_words(llama, made)
    for at, layer in enumerate(llama.model.layers):
        with torch.inference_mode():
            inside = layer.input_layernorm(seen.hidden_states[at])[0]
            q = layer.self_attn.q_proj(inside).view(-1, 6, 8).transpose(0, 1)
            k = layer.self_attn.k_proj(inside).view(-1, 2, 8).transpose(0, 1)
        theta = llama.config.rope_parameters["rope_theta"]
        q, k = (rotated(states, theta, 8).numpy() for states in (q, k))
        close(made.q_decode[at], q[:, TOKENS:].swapaxes(0, 1))
        close(made.q_prefill[at], q[:, TOKENS - ROWS:TOKENS].swapaxes(0, 1))
        paged = k[:, :80].reshape(2, 5, 16, 8)
        close(made.page_min[at], paged.min(2))
        close(made.page_max[at], paged.max(2))
        np.testing.assert_allclose(made.page_mean[at], paged.mean(2), rtol=2**-8, atol=1e-3)
    assert made.rows.tolist() == list(range(TOKENS - ROWS, TOKENS)) and made.page_min.shape == (2, 2, 5, 8)


@pytest.mark.parametrize(("architecture", "changes"), [
    ("Llama", {}), ("Llama", {"num_key_value_heads": 6}), ("Llama", {"num_key_value_heads": 1}), ("Qwen3", {}),
    ("Glm", {}), ("Glm4", {})])
def test_mass_is_the_models_own_attention(architecture, changes):
    model = tiny(architecture, **changes)
    made = recorded(model)
    _, seen = own_words(model, made)
    for at in range(2):
        own = seen.attentions[at][0, :, TOKENS:].double().numpy()
        own = own.reshape(made.kv_heads, -1, *own.shape[1:]).mean(1)[..., :80].reshape(made.kv_heads, STEPS, 5, 16)
        close(made.mass[at].swapaxes(0, 1), own.sum(-1))


def test_greedy_is_what_the_model_generates(llama):
    made = recorded(llama)
    own = llama.generate(torch.tensor([some_ids(TOKENS)]), max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)
    assert made.generated.tolist() == own[0, TOKENS:].tolist() and made.decoding == "greedy"


def test_end_tokens_are_never_chosen(llama):
    first = int(recorded(llama).generated[0])
    llama.generation_config.eos_token_id = [1, first]
    try:
        assert first not in recorded(llama).generated
    finally:
        llama.generation_config.eos_token_id = 1


def test_a_teachers_tokens_are_fed(llama):
    text = some_ids(STEPS, seed=9)
    made = recorded(llama, "teacher", continuation=text)
    assert made.generated.tolist() == text and made.decoding == "teacher"
    with pytest.raises(ValueError, match="the text has 3 tokens after the prompt; 12 steps need as many"):
        recorded(llama, "teacher", continuation=text[:3])


def test_sampled_tokens_follow_the_seed(llama):
    one, same, other = (recorded(llama, "sampled", seed=seed).generated.tolist() for seed in (1, 1, 2))
    assert one == same != other


def test_the_size_of_the_chunks_changes_nothing(llama, monkeypatch):
    whole = recorded(llama)
    monkeypatch.setattr(attention, "CHUNK_TOKENS", 23)  # 70 = 3 * 23 + 1: the last chunk is a single token
    parts = recorded(llama)
    assert recording.difference(parts, whole) < 2**-7
    assert parts.generated.tolist() == whole.generated.tolist()
    np.testing.assert_allclose(parts.mass.astype(float), whole.mass.astype(float), atol=1e-3)


def test_rows_may_be_none_and_layers_one(llama):
    made = recorded(llama, rows=0, layers=[1])
    assert made.q_prefill.shape == (1, 0, 6, 8) and made.layers.tolist() == [1]
    close(made.q_decode[0], recorded(llama).q_decode[1])


def test_a_chain_is_the_models_own_words(llama):
    one, same, other = (capture.extend(llama, some_ids(20), 60, seed=seed) for seed in (1, 1, 2))
    assert one == same != other and len(one) == 60 and one[:20] == some_ids(20) and 1 not in one[20:]


def test_progress_is_told(llama):
    told = []
    recorded(llama, on_progress=lambda done, total: told.append((done, total)))
    assert told[0] == (70, 82) and told[-1] == (82, 82)


@pytest.mark.parametrize(("options", "said"), [
    ({"tokens": 250}, "tokens is 250; with 12 steps the model's context of 256 allows at most 244"),
    ({"layers": [0, 2]}, "layers are 0,2; allowed: ascending, each once, from 0 to 1"),
    ({"rows": 71}, "rows is 71"), ({"steps": 0}, "steps is 0"), ({"tokens": 15, "rows": 1}, "tokens is 15"),
])
def test_what_does_not_fit_the_model_is_refused(llama, options, said):
    before = llama.config._attn_implementation
    with pytest.raises(ValueError, match=said):
        recorded(llama, **options)
    assert llama.config._attn_implementation == before


def test_a_model_that_forgets_keys_is_refused_and_left_as_it_was():
    model = tiny("Mistral", sliding_window=32)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="only full attention can be recorded"):
        recorded(model)
    assert model.config._attn_implementation == before


def test_a_model_without_grouped_heads_in_its_config_is_refused():
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=300, n_positions=256)
    with pytest.raises(ValueError, match="model 'tiny': its config says num_key_value_heads is None"):
        recorded(transformers.GPT2LMHeadModel(config))


def test_layers_are_spread_over_the_depth():
    assert recording.spread(30) == [2, 10, 19, 28]
    assert recording.spread(40) == [2, 14, 26, 38]
    assert [recording.spread(count) for count in (1, 2, 4, 6)] == [[0], [0, 1], [2], [2, 3, 4]]
    assert all(0 <= layer < count for count in range(1, 80) for layer in recording.spread(count))


def test_a_difference_is_seen(llama):
    made = recorded(llama)
    assert recording.difference(made, made) == 0
    queries = made.q_decode.copy()
    queries[0, 3] *= 1.01
    assert 1e-3 < recording.difference(dataclasses.replace(made, q_decode=queries), made) < 0.05
    assert recording.difference(recorded(llama, layers=[0]), made) == np.inf
    assert recording.difference(recorded(llama, steps=3), made) == np.inf


def test_overlap_counts_what_stays(llama):
    made = recorded(llama)
    shares = recording.overlap(made, 2, Quest(group="max"))
    assert shares.shape == (2, STEPS - 1, 2)
    scores = made.scores(Quest(group="max"), 1)[..., :4]
    best = [{*np.argsort(-row, kind="stable")[:2].tolist()} for row in scores[:, 0]]
    assert shares[1, :, 0].tolist() == [len(a & b) / 2 for a, b in zip(best[1:], best[:-1], strict=True)]
    assert recording.overlap(made, 4, Quest(group="max")).min() == 1


def test_rebuilding_replaces_every_trace_and_counts_those_that_differ(llama, tmp_path, monkeypatch):
    made = recorded(llama)
    for name in ("a.npz", "b.npz"):
        trace.write(made, tmp_path / name, "a processor")
    (tmp_path / "b.npz").write_bytes(b"spoiled")
    asked, said = [], []
    monkeypatch.setattr(recording, "again", lambda line: asked.append(line["file"]) or made)
    assert recording.rebuild(tmp_path, said.append) == 1
    assert asked == ["a.npz", "b.npz"] and "0.0e+00 of each step's largest" in said[0] and "sha256" in said[1]
    assert recording.difference(trace.read(tmp_path / "b.npz"), made) < 2**-8
    moved = dataclasses.replace(made, q_decode=(made.q_decode * 1.01).astype(np.float16))
    monkeypatch.setattr(recording, "again", lambda line: moved)
    assert recording.rebuild(tmp_path, said.append) == 2


# --- the command

@pytest.fixture
def checkpoint(llama, tmp_path, root, monkeypatch):
    """A folder with the tiny model and a tokenizer of one token per byte, and the place to write in."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at + 2 for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    folder = tmp_path / "model"
    tiny(max_position_embeddings=4096).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    return str(folder)


@pytest.mark.parametrize(("family", "tokens"), [("text", 200), ("document-summary", 300), ("reasoning", 400)])
def test_the_command_records_and_says_so(cli, checkpoint, tmp_path, family, tokens):
    ran = cli("prr", "record", "--model", checkpoint, "--family", family, "--prompt", 1, "--tokens", tokens,
              "--steps", 5, "--rows", 7, "--layers", "all", "--out", "new/a.npz", "--json")
    assert (ran.code, ran.err) == (0, "")
    told = json.loads(ran.out)
    assert told["bytes"] == (tmp_path / "new" / "a.npz").stat().st_size and told["layers"] == "0 1"
    made = trace.read(tmp_path / "new" / "a.npz")
    assert (made.family, made.prompt, made.tokens, made.steps, made.rows.size) == (family, "1", tokens, 5, 7)
    (line,) = trace.index(tmp_path / "new")
    assert recording.difference(recording.again(line), made) == 0


@pytest.mark.parametrize(("options", "said"), [
    (["--family", "haystack"], "family is 'haystack'; allowed: needle-single"),
    (["--prompt", "x"], "prompt is 'x'"),
    (["--tokens", "4080"], "tokens is 4080; with 64 steps the model's context of 4096 allows at most 4032"),
    (["--layers", "1,0"], "layers are 1,0; allowed: ascending, each once, from 0 to 1"),
    (["--layers", "2"], "layers are 2; allowed"), (["--layers", "last"], "layers are 'last'; allowed: whole numbers"),
    (["--rows", "-1"], "rows is -1"), (["--steps", "0"], "steps is 0"),
    (["--tokens", "many"], "'many' is not a valid integer"),
    (["--out", "a.csv"], "out is 'a.csv'; allowed: a file that ends in .npz"),
    (["--model", "nope"], "model is 'nope'; allowed: GLM-4-9B-1M"),
    (["--family", "longbench"], "family longbench needs the package datasets"),
    (["--family", "needle-multikey", "--tokens", "100"], "tokens is 100; the words of needle-multikey alone take"),
])
def test_bad_input_is_one_line_and_leaves_nothing(cli, checkpoint, tmp_path, monkeypatch, options, said):
    monkeypatch.setattr(weights, "load", lambda source: pytest.fail("loaded weights for bad input"))
    if "longbench" in options and "datasets" in sys.modules:
        pytest.skip("the package datasets is installed")
    before = {path.name for path in tmp_path.iterdir()}
    defaults = {"--model": checkpoint, "--tokens": "200"}
    given = [part for name, value in defaults.items() if name not in options for part in (name, value)]
    ran = cli("prr", "record", *given, *options)
    assert ran.code == 2 and ran.out == ""
    assert said in ran.err and ran.err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_config_without_the_shape_is_refused_by_the_command(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({**SHAPE, "num_key_value_heads": None}))
    ran = cli("prr", "record", "--model", "m")
    assert ran.code == 2 and "num_key_value_heads is None" in ran.err and ran.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


# --- the offline model

@pytest.fixture(scope="module")
def models(root):
    folder = root / "data" / "models"
    try:
        weights.find(registry.OFFLINE, folder)
    except ValueError as reason:
        pytest.skip(str(reason))
    return folder


def test_the_table_is_the_offline_models_config(models):
    assert weights.shape(weights.find(registry.OFFLINE, models)) == registry.shape(registry.OFFLINE)


def test_the_offline_model_records_the_same_twice(models):
    one, other = (recording.record("needle-single", "5", tokens=512, steps=6, rows=4) for _ in range(2))
    assert recording.difference(one, other) == 0
    assert one.layers.tolist() == [2, 10, 19, 28] and one.tokens == 512


@pytest.mark.slow
def test_shipped_traces_are_recorded_again(models, root):
    """One of each family but the long chains, which take ten minutes each; `make traces` does all."""
    listed = trace.index(root / "data" / "traces")
    lines = {line["family"]: line for line in listed if line["decoding"] != "sampled"}
    for line in lines.values():
        shipped = trace.read(root / "data" / "traces" / line["file"])
        assert recording.difference(recording.again(line), shipped) <= recording.tolerance(line), line["file"]


@pytest.mark.slow
def test_the_constitution_at_8k_live_and_its_memory(models):
    """Adjacent steps share 0.763 of their 64 best pages; recording all 30 layers stays below 5 GB."""
    code = """
import json, resource
from artifact.dsa.quest import Quest
from artifact.study import recording
made = recording.constitution()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
share = recording.overlap(made, 64, Quest(page=16, group="max"))
print(json.dumps({"peak_bytes": peak, "overlap": float(share.mean()), "shape": share.shape}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["shape"] == [30, 63, 3]
    assert abs(found["overlap"] - 0.763) <= 0.01
    assert found["peak_bytes"] <= 5e9
