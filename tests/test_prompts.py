"""Prompts: exact lengths, one prompt per seed, answers that stand in the text, and what is refused."""

import json
import re

import numpy as np
import pytest

from artifact.models import prompts

STAND_INS = ("needle-single", "needle-multikey", "needle-multivalue", "variable-tracking", "common-words",
             "frequent-words", "passage-qa", "document-qa", "document-summary", "reasoning", "text")
LONG = [family for family in STAND_INS if family != "reasoning"]


class Bytes:
    """A tokenizer of one token per byte; `chat_template` as transformers' tokenizers have it."""

    def __init__(self, chat_template=None, start=()):
        self.chat_template, self.start = chat_template, list(start)

    def encode(self, text, add_special_tokens=True):
        return (self.start if add_special_tokens else []) + list(text.encode())

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}</{m['role']}>" for m in messages) + "<assistant>"


def text_of(prompt):
    return bytes(token for token in prompt.ids if token < 256).decode()


@pytest.fixture(scope="module")
def folder(root):
    return root / "data" / "prompts"


@pytest.mark.parametrize("family", LONG)
@pytest.mark.parametrize("tokens", [1000, 4096, 20000])
def test_a_prompt_has_exactly_its_length(folder, family, tokens):
    for tokenizer in (Bytes(), Bytes("yes"), Bytes(start=[256])):
        if family.startswith("needle") and tokens == 1000:
            tokens = 1200
        built = prompts.build(family, "1", tokens, tokenizer, folder, steps=5)
        assert len(built.ids) == tokens
        assert len(built.continuation) == (5 if family == "text" else 0)


@pytest.mark.parametrize("family", STAND_INS)
def test_the_seed_alone_makes_the_prompt(folder, family):
    one, same, other = (prompts.build(family, seed, 3000, Bytes("yes"), folder) for seed in ("0", "0", "1"))
    assert one == same and one.ids != other.ids
    assert prompts.seed(family, "0") != prompts.seed(family, "1")


@pytest.mark.parametrize("family", LONG)
def test_a_message_is_framed_as_the_tokenizer_frames_it(folder, family):
    if family == "text":
        assert text_of(prompts.build(family, "0", 40, Bytes("yes"), folder)).startswith("The Constitution of")
        return
    text = text_of(prompts.build(family, "0", 3000, Bytes("yes"), folder))
    assert text.startswith("<user>") and text.endswith("</user><assistant>")
    plain = prompts.build(family, "0", 3000, Bytes(start=[256]), folder)
    assert plain.ids[0] == 256 and "<user>" not in text_of(plain)


@pytest.mark.parametrize("family", STAND_INS)
def test_every_family_says_what_it_stands_in_for(folder, family):
    entry = prompts.families(folder)[family]
    assert entry["what"] and (entry["stands_for"] or family == "text")
    assert prompts.build(family, "0", 3000, Bytes(), folder).stands_for == entry["stands_for"]


@pytest.mark.parametrize("seed", ["0", "1", "2", "3"])
@pytest.mark.parametrize(("family", "values", "facts"), [
    ("needle-single", 1, 1), ("needle-multikey", 1, 8), ("needle-multivalue", 4, 4)])
def test_needles_stand_in_the_text_once(folder, family, values, facts, seed):
    built = prompts.build(family, seed, 8000, Bytes(), folder)
    text = text_of(built)
    hidden = re.findall(r"special number of the ([a-z ]+) is (\d{7})\.", text)
    asked = re.search(r"special numbers? of the ([a-z ]+) in the text above", text)[1]
    assert len(hidden) == facts and len({value for _, value in hidden}) == facts
    assert sorted(value for key, value in hidden if key == asked) == sorted(built.answer.split(", "))
    assert len(built.answer.split(", ")) == values


def test_variables_form_one_chain(folder):
    built = prompts.build("variable-tracking", "3", 8000, Bytes(), folder)
    assigned = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?([A-Z]{5}|\d{7})", text_of(built))
    assert [name for name, _ in assigned] == built.answer.split(", ") and len(assigned) == 5
    assert [source for _, source in assigned][1:] == [name for name, _ in assigned][:-1]
    assert f"the value {assigned[0][1]} " in text_of(built)


def test_common_words_are_the_commonest(folder):
    built = prompts.build("common-words", "2", 20000, Bytes(), folder)
    words, counts = np.unique(re.findall(r"^\d+\. ([a-z]+)$", text_of(built), re.MULTILINE), return_counts=True)
    assert sorted(words[np.argsort(-counts)[:10]]) == built.answer.split(", ")
    assert np.sort(counts)[-10] > 2 * np.sort(counts)[-11]


def test_frequent_words_are_the_most_frequent(folder):
    built = prompts.build("frequent-words", "2", 20000, Bytes(), folder)
    body = text_of(built).split("\n\n")[1]
    words, counts = np.unique(body.split(), return_counts=True)
    assert words[np.argsort(-counts)[:3]].tolist() == built.answer.split(", ")


@pytest.mark.parametrize("family", ["passage-qa", "document-qa"])
@pytest.mark.parametrize("number", range(12))
def test_the_passage_that_answers_stands_in_the_text(folder, family, number):
    import yaml

    asked = yaml.safe_load((folder / "questions.yml").read_text())[number]
    built = prompts.build(family, str(number), 8000, Bytes(), folder)
    assert text_of(built).count(asked["quote"]) == 1 and asked["question"] in text_of(built)
    assert built.answer == asked["answer"]


def test_each_quote_stands_in_one_paragraph(folder):
    import yaml

    for asked in yaml.safe_load((folder / "questions.yml").read_text()):
        blocks = re.split(r"\n\s*\n", (folder / "texts" / f"{asked['text']}.txt").read_text())
        assert sum(asked["quote"] in " ".join(block.split()) for block in blocks) == 1, asked["quote"]


def test_a_text_is_the_file_and_goes_on_where_it_ends(folder):
    whole = "".join((folder / "texts" / f"{name}.txt").read_text() for name in prompts.PLAIN[0])
    built = prompts.build("text", "0", 1000, Bytes(), folder, steps=20)
    assert built.decoding == "teacher" and not built.answer
    assert text_of(built) + bytes(built.continuation).decode() == whole[:1020]
    longer = prompts.build("text", "0", len(whole) + 30, Bytes(), folder)
    assert text_of(longer)[len(whole):] == whole[:30]


def test_a_reasoning_prompt_is_the_question_and_asks_for_a_chain(folder):
    built = prompts.build("reasoning", "1", 4096, Bytes("yes"), folder)
    assert built.chain and built.decoding == "sampled" and len(built.ids) < 400 and built.answer == "3600"
    assert "round table" in text_of(built)


@pytest.mark.parametrize(("family", "prompt", "tokens", "said"), [
    ("haystack", "0", 4096, "family is 'haystack'; allowed: needle-single, .*text, longbench"),
    ("needle-single", "first", 4096, "prompt is 'first'; of needle-single it is a seed"),
    ("needle-single", "-1", 4096, "prompt is '-1'"),
    ("text", "3", 4096, "prompt is 3; text has 0 to 2"),
    ("needle-multikey", "0", 300, r"tokens is 300; the words of needle-multikey alone take \d+"),
    ("reasoning", "0", 50, "tokens is 50; the words of reasoning alone take"),
    ("longbench", "a", 4096, "prompt is 'a'; of longbench it is ROW or PART#ROW"),
    ("longbench", "missing.jsonl#0", 4096, "no such file"),
])
def test_what_cannot_be_made_is_refused(folder, family, prompt, tokens, said):
    with pytest.raises(ValueError, match=said):
        prompts.build(family, prompt, tokens, Bytes(), folder)


# --- the real sets

def rows(path, **row):
    path.write_text("".join(json.dumps(row | {"n": n}) + "\n" for n in range(3)))
    return path


def test_a_local_file_of_a_real_set_is_read(folder, tmp_path):
    text = "start " + "long " * 2000 + "end"
    path = rows(tmp_path / "hotpotqa.jsonl", context=text, input="Who?", answers=["A", "B"])
    built = prompts.build("longbench", f"{path}#2", 2000, Bytes(), folder)
    assert len(built.ids) == 2000 and built.answer == "A, B" and built.decoding == "greedy"
    assert text_of(built).startswith("start long") and text_of(built).endswith("end\n\nWho?")
    whole = prompts.build("longbench", f"{path}#2", 20000, Bytes(), folder)
    assert len(whole.ids) < 20000 and text_of(whole).count("long") == 2000


def test_a_local_file_of_problems_asks_for_a_chain(folder, tmp_path):
    path = rows(tmp_path / "test.jsonl", problem="1 + 1?", answer="2")
    built = prompts.build("math-500", f"{path}#0", 4096, Bytes("yes"), folder)
    assert built.chain and built.decoding == "sampled" and text_of(built) == "<user>1 + 1?</user><assistant>"


@pytest.mark.parametrize(("text", "prompt", "said"), [
    ('{"context": "a", "input": "b"}\n', "0", "its row has no 'answers'; it has: context, input"),
    ('{"context": "a", "input": "b", "answers": []}\n', "7", "there are rows 0 to 0"),
    ("not json\n", "0", "not JSON lines"), ("[1]\n", "0", "not JSON lines of objects"), ("", "0", "not JSON lines"),
])
def test_a_spoiled_local_file_is_one_line(folder, tmp_path, text, prompt, said):
    (tmp_path / "set.jsonl").write_text(text)
    with pytest.raises(ValueError, match=said) as failure:
        prompts.build("longbench", f"{tmp_path / 'set.jsonl'}#{prompt}", 4096, Bytes(), folder)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("family", prompts.SETS)
def test_a_real_set_that_cannot_be_had_is_one_line(folder, family):
    try:
        import datasets  # noqa: F401
        pytest.skip("the package datasets is installed")
    except ImportError:
        pass
    with pytest.raises(ValueError, match=f"family {family} needs the package datasets and a network, or a local"):
        prompts.build(family, "0", 4096, Bytes(), folder)


def test_the_texts_are_small_and_have_their_sources(folder):
    texts = list((folder / "texts").iterdir())
    assert sum(path.stat().st_size for path in texts) <= 1e6
    told = (folder / "README.md").read_text()
    assert all(f"`{path.name}`" in told for path in texts)
