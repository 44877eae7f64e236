"""Workloads: the study's draws to the bit, real trace formats, and what is refused by line."""

import csv
import hashlib
from pathlib import Path

import numpy as np
import pytest

from artifact.kv import requests
from artifact.study import paths

RECORDED = list(csv.DictReader((paths.data_dir() / "recorded/reference/workloads.csv").open()))


@pytest.mark.parametrize("row", RECORDED, ids=lambda r: f"{r['workload']}-{r['requests_count']}-{r['seed']}")
def test_equal_to_the_recorded_dump(row):
    drawn = requests.generate(row["workload"], int(row["requests_count"]), int(row["seed"]))
    assert hashlib.sha256(drawn.to_csv().encode()).hexdigest() == row["csv_sha256"]
    assert drawn.arrival_step[-1] == int(row["last_arrival_step"])
    assert drawn.total_tokens.mean() == float(row["total_mean_tokens"])


def test_all_dumps_are_there():
    assert len(RECORDED) == 30


def test_spec_draws_what_steady_draws():
    assert requests.generate("spec", 50, 3).to_csv() == requests.generate("steady", 50, 3).to_csv()


def test_fixed_lengths_and_rate():
    drawn = requests.generate("fixedlen", 2000, 0, rate=2.0, prompt_tokens=77, output_tokens=5)
    assert set(drawn.prompt_tokens) == {77} and set(drawn.output_tokens) == {5}
    assert 2000 / drawn.arrival_step[-1] == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"workload": "bursty"}, "unknown workload 'bursty'; allowed: steady"),
        ({"workload": "trace"}, "unknown workload 'trace'"),
        ({"n": 0}, "requests is 0"),
        ({"n": 1.5}, "requests is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"rate": 0.0}, "rate is 0.0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"rate": float("inf")}, "rate is inf"),
        ({"workload": "fixedlen", "prompt_tokens": 0}, "prompt_tokens is 0"),
    ],
)
def test_wrong_parameters_are_refused(given, complaint):
    given = {"workload": "steady", "n": 5, "seed": 0} | given
    with pytest.raises(ValueError, match=complaint):
        requests.generate(given.pop("workload"), given.pop("n"), given.pop("seed"), **given)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 60, "input_length": 12, "output_length": 3, "hash_ids": [0]}\n'
)


def _read(tmp_path, text, **how):
    path = tmp_path / "some.trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return requests.read_trace(path, **how)


def test_azure(tmp_path):
    read = _read(tmp_path, AZURE)
    assert read.arrival_step.tolist() == [0, 2]  # 52 ms later
    assert (read.prompt_tokens.tolist(), read.output_tokens.tolist()) == ([4808, 3180], [10, 8])
    assert _read(tmp_path, AZURE.replace("\n", "\r\n"), step_ms=10).arrival_step.tolist() == [0, 5]
    assert len(_read(tmp_path, AZURE, limit=1)) == 1


def test_mooncake(tmp_path):
    read = _read(tmp_path, MOONCAKE, step_ms=20)
    assert read.arrival_step.tolist() == [0, 3]
    assert read.total_tokens.tolist() == [7258, 15]
    assert set(read.prefix_id) == {-1}


def test_rows_out_of_order_arrive_in_order(tmp_path):
    lines = AZURE.splitlines()
    read = _read(tmp_path, "\n".join([lines[0], lines[2], lines[1]]))
    assert read.arrival_step.tolist() == [0, 2] and read.prompt_tokens.tolist() == [4808, 3180]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (AZURE.rstrip()[:-2], "line 3: 2 columns"),  # the file ends inside a row
        (AZURE + "2023-11-16 18:17:05.1,12\n", "line 4: 2 columns"),
        (AZURE.replace("3180", "many"), "line 3: .*'many'"),
        (AZURE.replace("3180", "-5"), "line 3: ContextTokens is -5"),
        (AZURE.replace("3180", "0"), "line 3: ContextTokens is 0"),
        (AZURE.replace("3180", "3.5"), "line 3: .*'3.5'"),
        (AZURE.replace("2023-11-16 18:17:04", "yesterday"), "line 3: TIMESTAMP is 'yesterday"),
        (AZURE.replace("ContextTokens", "Prompt"), "line 1: header is"),
        (AZURE.splitlines()[0], "no requests after the header"),
        ("", "empty"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (MOONCAKE[:-10], "line 2: not a JSON object"),
        (MOONCAKE.replace('"output_length": 3', '"output": 3'), "line 2: missing 'output_length'"),
        (MOONCAKE.replace("12,", '"12",'), "line 2: input_length, output_length are"),
        (MOONCAKE.replace("12,", "12.5,"), "line 2: input_length is 12.5"),
        (MOONCAKE.replace("60", "NaN"), "line 2: timestamp is nan"),
        (MOONCAKE.replace("60", "-1"), "line 2: timestamp is -1"),
        (MOONCAKE + "[1, 2]\n", "line 3: not a JSON object"),
        (MOONCAKE.replace("12,", "1" * 30 + ","), "line 2: input_length is 1"),
    ],
)
def test_a_wrong_row_is_named_by_its_line(tmp_path, text, complaint):
    with pytest.raises(ValueError, match=f"some.trace.*({complaint})") as raised:
        _read(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_hash_ids_say_what_prompts_begin_with(tmp_path):
    late, early = (f'{{"timestamp": {t}, "input_length": {n}, "output_length": 1, "hash_ids": {h}}}'
                   for t, n, h in ((50, 1100, [7, 8, 9]), (0, 600, [7])))
    content = _read(tmp_path, f"{late}\n{early}\n").content
    assert content.id_tokens == 512
    starts, known = content.starts.tolist(), content.known_tokens.tolist()
    assert known == [512, 1100] and [content.ids[s : s + n].tolist() for s, n in zip(starts, (1, 3), strict=True)] == [
        [7], [7, 8, 9]]
    assert _read(tmp_path, AZURE).content is None


@pytest.mark.parametrize("ids", ["7", "[1, -2]", "[1.5]", "[true]", '["a"]', "[1099511627776]", "null"])
def test_wrong_hash_ids_are_named_by_their_line(tmp_path, ids):
    line = f'{{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": {ids}}}'
    with pytest.raises(ValueError, match="some.trace line 1: hash_ids is"):
        _read(tmp_path, line)


@pytest.mark.parametrize("how", [{"step_ms": 0}, {"step_ms": float("nan")}, {"limit": 0}])
def test_wrong_reading_is_refused(tmp_path, how):
    with pytest.raises(ValueError, match=f"{'requests' if 'limit' in how else 'step_ms'} is"):
        _read(tmp_path, AZURE, **how)


@pytest.mark.parametrize("name", ["azure_llm_code_2023.csv", "mooncake_conversation_2000.jsonl"])
def test_real_traces(name):
    path = Path(__file__).parents[2] / "shared" / "traces" / name
    if not path.is_file():
        pytest.skip(f"../shared/traces/{name} is not here: an extra check on a published trace")
    read = requests.read_trace(path)
    assert len(read) in (8819, 2000)
    assert np.all(np.diff(read.arrival_step) >= 0) and read.prompt_tokens.min() >= 1
