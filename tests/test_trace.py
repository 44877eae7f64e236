"""Trace files: what is written comes back, what is wrong is refused in one line, and scores are the definition's."""

import dataclasses
import pickle
import zipfile

import numpy as np
import pytest

from artifact.dsa.infllm import InfLLM
from artifact.dsa.quest import Quest
from artifact.models import trace

LAYERS, ROWS, STEPS, HEADS, KV_HEADS, SIZE, TOKENS = (1, 4), 6, 9, 6, 2, 8, 200
PAGES = (TOKENS + STEPS) // 16


def half(rng, *shape):
    return rng.normal(size=shape).astype(np.float16)


def made(seed=0, **changes):
    """A trace of random keys; with them, so that tests can score from the keys themselves."""
    rng = np.random.default_rng(seed)
    keys = half(rng, len(LAYERS), KV_HEADS, TOKENS + STEPS, SIZE)
    paged = keys[:, :, :PAGES * 16].reshape(len(LAYERS), KV_HEADS, PAGES, 16, SIZE)
    share = rng.random((len(LAYERS), STEPS, KV_HEADS, PAGES))
    values = {
        "model": "mine", "family": "text", "prompt": "0", "decoding": "greedy", "tokens": TOKENS,
        "layers": np.array(LAYERS, np.int32), "rows": np.arange(TOKENS - ROWS, TOKENS, dtype=np.int32),
        "generated": np.arange(STEPS, dtype=np.int32), "q_prefill": half(rng, len(LAYERS), ROWS, HEADS, SIZE),
        "q_decode": half(rng, len(LAYERS), STEPS, HEADS, SIZE), "page_min": paged.min(3), "page_max": paged.max(3),
        "page_mean": paged.mean(3, dtype=np.float32).astype(np.float16),
        "mass": (share / share.sum(-1, keepdims=True)).astype(np.float16),
    }
    return trace.Trace(**{**values, **changes}), keys


def test_what_is_written_comes_back(tmp_path):
    written, _ = made()
    trace.write(written, tmp_path / "new" / "a.npz", "a processor")
    back = trace.read(tmp_path / "new" / "a.npz")
    for field in dataclasses.fields(trace.Trace):
        one, other = getattr(written, field.name), getattr(back, field.name)
        assert np.array_equal(one, other) and np.asarray(one).dtype == np.asarray(other).dtype, field.name


def test_the_same_trace_gives_the_same_bytes_and_the_index_says_them(tmp_path):
    for name in ("b.npz", "a.npz", "b.npz"):
        trace.write(made()[0], tmp_path / name, "a processor")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    lines = trace.index(tmp_path)
    assert [line["file"] for line in lines] == ["a.npz", "b.npz"]
    assert lines[0]["command"] == ("artifact prr record --model mine --family text --prompt 0 --tokens 200 --steps 9 "
                                   "--rows 6 --layers 1,4 --out a.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz", "index.csv"]


@pytest.mark.parametrize(("name", "value", "said"), [
    ("layers", np.array([4, 1], np.int32), "layers are 4,1"),
    ("layers", np.array([1, 1], np.int32), "layers are 1,1"),
    ("layers", np.array([1], np.int32), "layers has shape"),
    ("layers", np.array([1, 4]), "layers is int64"),
    ("rows", np.array([5, 5, 6, 7, 8, 9], np.int32), "rows must be ascending"),
    ("rows", np.arange(TOKENS - ROWS, TOKENS, dtype=np.int32) + 1, "rows must be ascending positions below the 200"),
    ("rows", np.zeros(2, np.int32), "q_prefill has shape"),
    ("tokens", 300, "13 pages for 300 tokens"),
    ("decoding", "beam", "decoding is 'beam'; allowed: greedy, sampled, teacher"),
    ("q_decode", np.zeros((2, STEPS, 5, SIZE), np.float16), "5 query heads over 2 KV heads"),
    ("q_decode", np.zeros((2, STEPS, HEADS, SIZE), np.float32), "q_decode is float32"),
    ("q_prefill", np.zeros((2, ROWS, HEADS, 4), np.float16), "q_prefill has shape"),
    ("page_max", np.zeros((2, KV_HEADS, 3, SIZE), np.float16), "page_max has shape"),
    ("mass", np.zeros((2, STEPS, KV_HEADS), np.float16), "mass is float16"),
    ("mass", np.full((2, STEPS, KV_HEADS, PAGES), np.inf, np.float16), "mass holds a number that is not finite"),
    ("generated", [1] * STEPS, "generated is list"),
])
def test_a_trace_that_does_not_fit_together_cannot_be_made(name, value, said):
    with pytest.raises(ValueError, match=said):
        made(**{name: value})


def test_layers_of_a_known_model_are_checked_against_it():
    with pytest.raises(ValueError, match="from 0 to 29"):
        made(model="SmolLM2-135M", layers=np.array([2, 30], np.int32))


def corrupt(path, kind):
    """Spoils the file in one way."""
    whole = path.read_bytes()
    match kind:
        case "missing":
            path.unlink()
        case "folder":
            path.unlink()
            path.mkdir()
        case "empty":
            path.write_bytes(b"")
        case "truncated":
            path.write_bytes(whole[:len(whole) // 2])
        case "flipped":
            path.write_bytes(whole[:300] + bytes([whole[300] ^ 255]) + whole[301:])
        case "pickle":
            path.write_bytes(pickle.dumps({"a": 1}))
        case "npy":
            with open(path, "wb") as file:
                np.save(file, np.zeros(3))
        case "pickled member":
            np.savez(path, **{name: np.array([{}], dtype=object) for name in member_names(path)})
        case "zip of text":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("readme.txt", "no arrays")
        case "missing member" | "wrong dtype" | "wrong format" | "number as name":
            with np.load(path) as archive:
                arrays = dict(archive)
            if kind == "missing member":
                del arrays["mass"]
            elif kind == "wrong dtype":
                arrays["mass"] = arrays["mass"].astype(np.float32)
            elif kind == "wrong format":
                arrays["format"] = np.int64(99)
            else:
                arrays["model"] = np.int64(1)
            np.savez(path, **arrays)


def member_names(path):
    with np.load(path) as archive:
        return archive.files


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "truncated", "flipped", "pickle", "npy",
                                  "pickled member", "zip of text", "missing member", "wrong dtype", "wrong format",
                                  "number as name"])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_spoiled_file_is_one_line_that_names_it(tmp_path, kind, indexed):
    path = tmp_path / "a.npz"
    trace.write(made()[0], path, "a processor")
    if not indexed:
        (tmp_path / "index.csv").unlink()
    corrupt(path, kind)
    with pytest.raises(ValueError) as failure:
        trace.read(path)
    assert str(path) in str(failure.value) and "\n" not in str(failure.value)


def test_a_file_that_is_whole_but_another_one_is_refused_by_its_checksum(tmp_path):
    trace.write(made(0)[0], tmp_path / "a.npz", "a processor")
    trace.write(made(1)[0], tmp_path / "b.npz", "a processor")
    (tmp_path / "b.npz").replace(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="its sha256 is not the one in index.csv"):
        trace.read(tmp_path / "a.npz")


@pytest.mark.parametrize("text", ["", "file\na.npz\n", "nonsense", "a,b\n1,2\n", "\x00"])
def test_a_spoiled_index_is_one_line(tmp_path, text):
    trace.write(made()[0], tmp_path / "a.npz", "a processor")
    (tmp_path / "index.csv").write_text(text)
    with pytest.raises(ValueError, match="not an index of traces"):
        trace.read(tmp_path / "a.npz")


def test_nothing_is_left_of_a_write_that_failed(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        trace.write(made()[0], tmp_path / "a.npz", "a processor")
    assert list(tmp_path.iterdir()) == []


# --- scores

def lengths(part):
    first, count = (TOKENS + 1, STEPS) if part == "decode" else (TOKENS - ROWS + 1, ROWS)
    return range(first, first + count)


@pytest.mark.parametrize("part", ["decode", "prefill"])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("group", ["mean", "max", "sum"])
def test_quest_scores_are_those_of_the_keys(part, page, group):
    made_trace, keys = made()
    for at, layer in enumerate(LAYERS):
        scores = made_trace.scores(Quest(page=page, group=group), layer, part)
        queries = made_trace.queries(layer, part).astype(np.float64)
        assert scores.shape == (len(queries), KV_HEADS, (TOKENS + STEPS) // page) and scores.dtype == np.float32
        for row, length in enumerate(lengths(part)):
            for kv_head in range(KV_HEADS):
                heads = queries[row, kv_head * 3:kv_head * 3 + 3]
                heads = heads.mean(0, keepdims=True) if group == "mean" else heads
                for block in range(scores.shape[2]):
                    if (block + 1) * page > length:
                        assert scores[row, kv_head, block] == -np.inf
                        continue
                    inside = keys[at, kv_head, block * page:(block + 1) * page].astype(np.float64)
                    bounds = np.maximum(heads * inside.min(0), heads * inside.max(0)).sum(-1)
                    expected = bounds.sum() if group == "sum" else bounds.max()
                    assert scores[row, kv_head, block] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_infllm_scores_are_those_of_the_keys(part):
    made_trace, keys = made()
    method = InfLLM()
    for at, layer in enumerate(LAYERS):
        scores = made_trace.scores(method, layer, part)
        queries = made_trace.queries(layer, part).astype(np.float64)
        assert scores.shape == (len(queries), KV_HEADS, (TOKENS + STEPS) // 64)
        for row, length in enumerate(lengths(part)):
            for kv_head in range(KV_HEADS):
                starts = range(0, length - 31, 16)
                means = np.stack([keys[at, kv_head, s:s + 32].astype(np.float64).mean(0) for s in starts])
                logits = queries[row, kv_head * 3:kv_head * 3 + 3] @ means.T / np.sqrt(SIZE)
                share = np.exp(logits - logits.max(-1, keepdims=True))
                share = (share / share.sum(-1, keepdims=True)).sum(0)
                for block in range(scores.shape[2]):
                    if (block + 1) * 64 > length:
                        assert scores[row, kv_head, block] == -np.inf
                        continue
                    touching = [share[i] for i, s in enumerate(starts) if s < (block + 1) * 64 and s + 32 > block * 64]
                    assert scores[row, kv_head, block] == pytest.approx(max(touching), rel=2e-3)


def test_a_page_counts_from_the_step_that_completes_it():
    made_trace, _ = made()  # 200 tokens: page 12 is complete with token 207, at step 7
    known = np.isfinite(made_trace.scores(Quest(page=16), 1))
    assert known[:, 0].sum(-1).tolist() == [12] * 7 + [13] * 2
    assert np.isfinite(made_trace.scores(Quest(page=16), 1, "prefill"))[:, 0].sum(-1).tolist() == [12] * ROWS


@pytest.mark.parametrize(("call", "said"), [
    (lambda t: t.scores(Quest(), 2), "layer is 2; this trace has: 1, 4"),
    (lambda t: t.scores(Quest(page=24), 1), "page_tokens is 24"),
    (lambda t: t.scores(InfLLM(stride=8), 1), "stride is 8"),
    (lambda t: t.scores(Quest(), 1, "middle"), "part is 'middle'; allowed: decode, prefill"),
])
def test_what_a_trace_cannot_give_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call(made()[0])


# --- the shipped traces

def shipped(root):
    return trace.index(root / "data" / "traces")


def test_the_shipped_traces_are_what_was_promised(root):
    lines = shipped(root)
    prompts = {}
    for line in lines:
        prompts.setdefault(line["family"], set()).add(line["prompt"])
        assert int(line["tokens"]) >= 4096 and int(line["steps"]) == 64 and int(line["rows"]) == 64
        assert len(line["layers"].split()) == 4
    assert len(prompts) >= 5 and min(map(len, prompts.values())) >= 3
    assert sum(int(line["bytes"]) for line in lines) <= 25e6
    assert {path.name for path in (root / "data" / "traces").glob("*.npz")} == {line["file"] for line in lines}


def test_every_shipped_trace_reads_and_holds_probabilities(root):
    for line in shipped(root):
        read = trace.read(root / "data" / "traces" / line["file"])
        assert read.command(line["file"]) == line["command"]
        total = read.mass.astype(np.float32).sum(-1)
        assert np.abs(total - 1).max() < 0.01 and read.mass.min() >= 0
        assert (read.page_min <= read.page_mean).all() and (read.page_mean <= read.page_max).all()
