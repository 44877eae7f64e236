"""Prompts of a given length in tokens: stand-ins for the paper's benchmarks, or the real sets where they can be had.

A stand-in has a benchmark's form, over public-domain text of data/prompts; `families.yml` there says what each family
is and what it stands in for. A prompt is made by its seed alone: the same family, seed, length and tokenizer give the
same tokens. Its length is exact: the long text is a run of whole paragraphs, list entries or words but for the last,
which is cut where the length is reached; a text that is too short begins again.

The real sets (`SETS`) come through the package `datasets`, which needs a network, or from a local JSON-lines file.
"""

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

import numpy as np
import yaml

HAYSTACK = "kjv-genesis-exodus"
PLAIN = (("us-constitution", "us-declaration"), ("kjv-genesis-exodus",), ("us-declaration", "us-constitution"))
# family -> hub id, subset, split ({}: the part a prompt names), the part when it names none, and the columns of the
# long text, the question and the answer
SETS = {
    "longbench": ("THUDM/LongBench", "{}", "test", "hotpotqa", "context", "input", "answers"),
    "infinitebench": ("xinrongzhang2022/InfiniteBench", None, "{}", "longbook_qa_eng", "context", "input", "answer"),
    "aime-2024": ("HuggingFaceH4/aime_2024", None, "train", "", None, "problem", "answer"),
    "math-500": ("HuggingFaceH4/MATH-500", None, "test", "", None, "problem", "answer"),
}
_GAP = "\x00"  # where the long text goes; stands in no template
_COMMON, _OFTEN, _RARELY = 10, 30, 3  # common-words: how many are common, and how often each kind stands in the list
_CODED, _ZETA = 1000, 2.0  # frequent-words: how many words, and the exponent of their frequencies
_HOPS = 5  # variable-tracking: variables in the chain
_PASSAGE_CHARACTERS = 500


@dataclass(frozen=True)
class Prompt:
    """Tokens to begin with, and how the model goes on.

    `ids`: the prompt; with `chain` it is but the question, and the model's own decoding fills the length. `decoding`:
    as in `artifact.models.trace.DECODING`; a teacher's next tokens are in `continuation`. `answer`: what a right
    continuation says, empty when nothing is asked.
    """

    ids: tuple[int, ...]
    decoding: str
    stands_for: str
    answer: str = ""
    chain: bool = False
    continuation: tuple[int, ...] = ()


def families(folder: str | Path) -> dict[str, dict]:
    """Family -> what, stands_for, decoding and its words; the real sets included. `folder`: data/prompts."""
    real = {name: {"what": f"the real set, {hub}", "stands_for": "", "decoding": "greedy" if context else "sampled",
                   "prompt": "{text}\n\n{question}" if context else "{question}"}
            for name, (hub, *_, context, _, _) in SETS.items()}
    return {name: entry for name, entry in _yaml(folder, "families").items() if "decoding" in entry} | real


def check(family: str, prompt: str, folder: str | Path) -> None:
    """Raises ValueError for an unknown family, and for a prompt that it cannot have."""
    known = families(folder)
    if family not in known:
        raise ValueError(f"family is {family!r}; allowed: {', '.join(known)}")
    if family in SETS:
        _row(family, prompt)
    elif not re.fullmatch(r"\d{1,9}", prompt):
        raise ValueError(f"prompt is {prompt!r}; of {family} it is a seed: a whole number from 0")
    elif family == "text" and int(prompt) >= len(PLAIN):
        raise ValueError(f"prompt is {prompt}; text has 0 to {len(PLAIN) - 1}")


def seed(family: str, prompt: str) -> int:
    """The seed of everything that is drawn for a prompt, its continuation included."""
    return zlib.crc32(f"{family} {prompt}".encode())


def build(family: str, prompt: str, tokens: int, tokenizer, folder: str | Path, steps: int = 0) -> Prompt:
    """A prompt of `tokens` tokens. `folder`: data/prompts.

    `prompt`: a seed; of a real set ROW or PART#ROW on the hub, or FILE#ROW. `steps`: how many tokens of its own
    continuation a text shall have. `tokenizer`: of transformers; its chat template is used when it has one. A real
    prompt that is shorter than `tokens` stays so; of one that is longer the middle is left out, as LongBench does.

    Raises ValueError for what `check` refuses, and when the family's own words need more tokens.
    """
    check(family, prompt, folder)
    entry = families(folder)[family]
    draft = _Draft(family, tokens, tokenizer, Path(folder), np.random.default_rng(seed(family, prompt)))
    common = {"decoding": entry["decoding"], "stands_for": entry["stands_for"]}
    if family == "text":
        whole = draft.encode("".join(draft.text(name) for name in PLAIN[int(prompt)]))
        ids = draft.opening() + whole * ((tokens + steps) // len(whole) + 1)
        return Prompt(ids[:tokens], **common, continuation=ids[tokens:tokens + steps])
    if family in SETS:
        record = _row(family, prompt, fetch=True)
        ids = draft.shortened(entry["prompt"], record)
        return Prompt(ids, **common, answer=record["answer"], chain="text" not in record)
    if family == "reasoning":
        asked = entry["questions"][int(prompt) % len(entry["questions"])]
        ids = draft.whole(entry["prompt"].format(question=asked["question"]))
        return Prompt(ids, **common, answer=asked["answer"], chain=True)
    ids, answer = _MAKERS[family](draft, entry, int(prompt))
    return Prompt(ids, **common, answer=answer)


class _Draft:
    """One prompt in the making: its generator, and how words become just so many tokens."""

    def __init__(self, family, tokens, tokenizer, folder, rng):
        self.family, self.tokens, self.tokenizer, self.folder, self.rng = family, tokens, tokenizer, folder, rng

    def encode(self, text):
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def opening(self):
        """What the tokenizer puts before any text: a start token, or nothing."""
        return tuple(self.tokenizer.encode(""))

    def sides(self, template):
        """Tokens before and after the gap of a template, as a message to the model when it knows conversations."""
        opening = self.opening()
        if getattr(self.tokenizer, "chat_template", None):
            said = [{"role": "user", "content": template}]
            opening, template = (), self.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        before, _, after = template.partition(_GAP)
        return opening + self.encode(before), self.encode(after)

    def need(self, room, words):
        if room < 1:
            raise ValueError(f"tokens is {self.tokens}; the words of {self.family} alone take {words}")

    def whole(self, text):
        """`text` as a message."""
        ids = sum(self.sides(text.strip()), ())
        self.need(self.tokens - len(ids) + 1, len(ids))
        return ids

    def filled(self, template, pieces: Iterator[str], hidden=(), **words):
        """The template with {text} made of `pieces`, and `hidden` sentences (depth, text) between them."""
        head, tail = self.sides(template.strip().format(text=_GAP, **words))
        hidden = [(depth, self.encode(text)) for depth, text in hidden]
        room = self.tokens - len(head) - len(tail) - sum(len(ids) for _, ids in hidden)
        self.need(room, self.tokens - room)
        body = []
        while room > 0:
            body.append(self.encode(next(pieces))[:room])
            room -= len(body[-1])
        for depth, ids in sorted(hidden, reverse=True):  # from the end, so that earlier places stay where they are
            body.insert(round(depth * (len(body) - 1)), ids)
        return (*head, *chain.from_iterable(body), *tail)

    def shortened(self, template, record):
        """The template with a real set's row; the middle of its long text left out when it is too long."""
        if "text" not in record:
            return self.whole(template.format(**record))
        head, tail = self.sides(template.format(text=_GAP, question=record["question"]))
        body, room = self.encode(record["text"]), self.tokens - len(head) - len(tail)
        self.need(room, self.tokens - room)
        if len(body) > room:
            body = body[:room - room // 2] + body[len(body) - room // 2:]
        return head + body + tail

    def text(self, name):
        return (self.folder / "texts" / f"{name}.txt").read_text(encoding="utf-8")

    def paragraphs(self, name):
        """The text's paragraphs, each as one line."""
        return [" ".join(block.split()) + "\n" for block in re.split(r"\n\s*\n", self.text(name)) if block.strip()]

    def haystack(self):
        """Paragraphs of the haystack from a random one on."""
        lines = self.paragraphs(HAYSTACK)
        return _from(lines, int(self.rng.integers(len(lines))))

    def depths(self, number):
        """Places in the long text, 0 its start and 1 its end, in ascending order and each in its own share of it."""
        return [(place + float(self.rng.random())) / number for place in range(number)]

    def names(self, number):
        words = _yaml(self.folder, "families")["words"]
        pairs = [f"{adjective} {noun}" for adjective in words["adjectives"] for noun in words["nouns"]]
        return [str(name) for name in self.rng.choice(pairs, number, replace=False)]

    def numbers(self, number):
        return [str(value) for value in self.rng.choice(9_000_000, number, replace=False) + 1_000_000]


def _needle(draft, entry, _):
    keys = draft.names(entry["keys"])
    values = draft.numbers(entry["keys"] * entry["values"])
    facts = [(key, value) for i, key in enumerate(keys) for value in values[i * entry["values"]:][:entry["values"]]]
    draft.rng.shuffle(facts)
    hidden = [(depth, entry["needle"].format(key=key, value=value) + "\n")
              for depth, (key, value) in zip(draft.depths(len(facts)), facts, strict=True)]
    ids = draft.filled(entry["prompt"], draft.haystack(), hidden, keys=keys[0])
    return ids, ", ".join(value for key, value in facts if key == keys[0])


def _variables(draft, entry, _):
    letters = draft.rng.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), (_HOPS, 5))
    names = ["".join(word) for word in letters]
    (value,) = draft.numbers(1)
    sources = [value, *(f"VAR {name}" for name in names)]
    hidden = [(depth, f"VAR {name} = {source}\n")
              for depth, name, source in zip(draft.depths(_HOPS), names, sources, strict=False)]
    return draft.filled(entry["prompt"], draft.haystack(), hidden, value=value, count=_HOPS), ", ".join(names)


def _common(draft, entry, _):
    found = re.findall(r"\b[a-z]{4,9}\b", draft.text(HAYSTACK))
    words = draft.rng.permutation(sorted(set(found)))
    often, others = words[:_COMMON], words[_COMMON:]
    entries = draft.tokens / 6  # about as many tokens an entry takes
    rarely = int(min(len(others), max(1, (entries - _COMMON * _OFTEN) / _RARELY)))
    listed = draft.rng.permutation([*np.repeat(often, _OFTEN), *np.repeat(others[:rarely], _RARELY)])
    lines = (f"{number}. {listed[(number - 1) % len(listed)]}\n" for number in count(1))
    return draft.filled(entry["prompt"], lines), ", ".join(sorted(often))


def _frequent(draft, entry, _):
    coded = ["".join(word) for word in draft.rng.choice(list("abcdefghijklmnopqrstuvwxyz"), (_CODED, 6))]
    drawn = (f"{coded[int(draft.rng.zipf(_ZETA)) % _CODED]} " for _ in count())
    return draft.filled(entry["prompt"], drawn), ", ".join(coded[1:4])


def _passages(draft, entry, number):
    asked = _question(draft, number)
    passages = []
    for name in ("us-constitution", HAYSTACK):
        for line in draft.paragraphs(name):
            if passages and len(passages[-1]) < _PASSAGE_CHARACTERS and asked["quote"] not in passages[-1] + line:
                passages[-1] += line
            else:
                passages.append("Passage: " + line)
    (gold,) = [passage for passage in passages if asked["quote"] in passage]
    others = [str(passage) for passage in draft.rng.permutation([p for p in passages if p != gold])]
    hidden = [(draft.depths(1)[0], gold)]
    ids = draft.filled(entry["prompt"], _from(others, 0), hidden, question=asked["question"])
    return ids, asked["answer"]


def _document(draft, entry, number):
    asked = _question(draft, number)
    lines = draft.paragraphs(asked["text"])
    (gold,) = [at for at, line in enumerate(lines) if asked["quote"] in line]
    before, start = draft.depths(1)[0] * draft.tokens * 0.8, gold  # its last fifth may not fit beside the question
    while before > 0:
        start -= 1
        before -= len(draft.encode(lines[start % len(lines)]))
    ids = draft.filled(entry["prompt"], _from(lines, start + 1), question=asked["question"])
    return ids, asked["answer"]


def _summary(draft, entry, number):
    lines = draft.paragraphs(("us-constitution", HAYSTACK)[number % 2])
    return draft.filled(entry["prompt"], _from(lines, int(draft.rng.integers(len(lines))))), ""


_MAKERS = {
    "needle-single": _needle, "needle-multikey": _needle, "needle-multivalue": _needle,
    "variable-tracking": _variables, "common-words": _common, "frequent-words": _frequent, "passage-qa": _passages,
    "document-qa": _document, "document-summary": _summary,
}


def _question(draft, number):
    questions = _yaml(draft.folder, "questions")
    return questions[number % len(questions)]


def _from(pieces, start):
    """`pieces` from the one at `start` on, round and round."""
    return (pieces[(start + step) % len(pieces)] for step in count())


def _yaml(folder, name):
    return yaml.safe_load((Path(folder) / f"{name}.yml").read_text(encoding="utf-8"))


def _row(family, prompt, fetch=False):
    """What `prompt` means for a real set; with `fetch` the row itself: text (of long sets), question, answer."""
    place, _, row = prompt.rpartition("#")
    if not re.fullmatch(r"\d{1,9}", row):
        raise ValueError(f"prompt is {prompt!r}; of {family} it is ROW or PART#ROW on the hub, or FILE#ROW, from 0")
    hub, subset, split, part, *columns = SETS[family]
    local = bool(place) and (Path(place).is_file() or place.endswith((".jsonl", ".json")))
    if local and not Path(place).is_file():
        raise ValueError(f"prompt is {prompt!r}: no such file")
    if not fetch:
        return None
    rows = _lines(Path(place)) if local else _hub_rows(family, hub, subset, split, place or part)
    if int(row) >= len(rows):
        raise ValueError(f"prompt is {prompt!r}; there are rows 0 to {len(rows) - 1}")
    found, where = rows[int(row)], dict(zip(("text", "question", "answer"), columns, strict=True))
    missing = [column for column in columns if column and column not in found]
    if missing:
        raise ValueError(f"prompt is {prompt!r}: its row has no {missing[0]!r}; it has: {', '.join(found)}")
    values = {name: found[column] for name, column in where.items() if column}
    return {name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in values.items()}


def _lines(path):
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not JSON lines: {error}") from None
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: not JSON lines of objects")
    return rows


def _hub_rows(family, hub, subset, split, part):
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"family {family} needs the package datasets and a network, or a local JSON-lines file: "
                         "--prompt FILE#ROW") from None
    try:
        return load_dataset(hub, subset and subset.format(part), split=split.format(part))
    except Exception as error:  # the package raises its own, requests' and fsspec's kinds
        first = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"family {family}: {hub} cannot be loaded: {first[:200]}") from None
