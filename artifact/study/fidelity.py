"""What notebook 07 shows: whether a model says the same when its attention is predicted, which the paper asserts and
does not measure.

A real, small model decodes through `artifact.models.attention`, a prompt read once and gone on from in every mode, so
that all comparisons are paired. Modes here:

    dense    every token
    dsa      the blocks that the method selects, A
    reuse    the last step's blocks as they are, never repaired
    union    PRR as the paper has it: attention to A and to all that was predicted, P
    exact    PRR, attention to A alone

Budgets are shares of the prompt. The paper prints none; the 96 blocks of 64 that InfLLM-v2 takes are a quarter of a
context of 24K and an eighth of one of 48K. Without the weights, or where a scale says 0, the rows of our own recorded
run stand instead, marked `recorded`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pandas as pd

from artifact.models import prompts, registry, weights
from artifact.models.trace import Trace
from artifact.prr import baselines, calibration, coverage, traffic
from artifact.study import experiments, foresight, intervals, paths, prediction
from artifact.study.scale import Scale

NAME = "07_fidelity"
TEXTS = ("0", "1")  # of the family text: the constitution and what follows it; Genesis and Exodus
BLOCK_TOKENS = 64  # of the bootstrap: what neighbouring differences share is gone within so many
MARGIN_NATS = 1e-3  # below which a difference per token means nothing to a reader
PROCESSES = 4  # at most so many at once; each holds the weights and a cache, about 1 GB
ANSWER_TOKENS = 24  # in which a needle's number has to be said
RATIOS = (0.5, 1.0, 1.5, 2.0)
BY = ["method", "page_tokens", "budget_frac", "mode", "predicted_ratio"]
NLL_SHOWN = [*BY, "text", "scored_tokens", "nll_nats", "over_dense_nats", "over_dense_nats_min", "over_dense_nats_max",
             "over_dsa_nats", "over_dsa_nats_min", "over_dsa_nats_max", "moved_frac", "missed_frac", "wasted_frac",
             "origin"]
FOUND_SHOWN = [*BY, "prompt_tokens", "found_count", "prompts_count", "found_frac_min", "found_frac_max",
               "gained_count", "lost_count", "origin"]
WASTE_SHOWN = ["method", "page_tokens", "predicted_ratio", "prompts_count", "missed_frac", "wasted_frac",
               "mass_selected_frac", "mass_wasted_frac", "mass_wasted_frac_min", "mass_wasted_frac_max",
               "mass_union_frac", "origin"]


class Setting(NamedTuple):
    """A selection method, tokens per block, and its budget as a share of the prompt."""

    method: str
    page_tokens: int
    budget_frac: float

    def chosen(self, prompt_tokens: int):
        """The method at a prompt's length."""
        return prediction.method(self.method, page=self.page_tokens, budget=self.blocks(prompt_tokens))

    def blocks(self, prompt_tokens: int) -> int:
        """Blocks of its budget; at least 4, so that InfLLM-v2 has one to select."""
        return max(4, int(prompt_tokens * self.budget_frac) // self.page_tokens)


SETTINGS = (Setting("quest", 16, 0.25), Setting("quest", 16, 0.125), Setting("quest", 64, 0.25),
            Setting("infllm", 64, 0.25))
RUNS = {
    SETTINGS[0]: (("dsa", None), ("reuse", None), *(("union", ratio) for ratio in RATIOS), ("exact", 1.0)),
    SETTINGS[1]: (("dsa", None), ("union", 1.0), ("union", 2.0)),
    SETTINGS[2]: (("dsa", None), ("union", 1.0)),
    SETTINGS[3]: (("dsa", None), ("union", 1.0), ("exact", 1.0)),
}
NEEDLES = {
    SETTINGS[0]: (("dsa", None),),
    SETTINGS[1]: (("dsa", None), ("reuse", None), ("union", 1.0), ("union", 2.0), ("exact", 1.0)),
    SETTINGS[3]: (("dsa", None), ("union", 1.0)),
}
_DENSE = {"method": "none", "page_tokens": None, "budget_frac": 1.0, "mode": "dense", "predicted_ratio": None}


class Reading(NamedTuple):
    """A passage under a plan."""

    run: dict  # the columns BY
    blocks: int | None  # of the budget
    text: str  # its first file
    prompt_tokens: int
    nll: np.ndarray  # float64 [n], of each scored token
    error: np.ndarray | None  # float64 [L, n - 1]: of the attention output, against dense, where something is selected
    missed: float  # |A \ P| / |A| over all steps, layers and heads that select; NaN where nothing is predicted
    wasted: float  # |P \ A| / |A|


def readings(size: Scale) -> list[Reading]:
    """Every passage of a scale under every plan; empty where nothing is to be measured, or the weights are missing.

    Passages lie one after another in each text, from its beginning on, and take turns between the texts.
    """
    source = _source(size.fidelity_tokens)
    return [] if source is None else _side_by_side(passage, size, source, size.fidelity_passages)


def passage(size: Scale, number: int, model, tokenizer) -> list[Reading]:
    """One passage under every plan; attention's errors are those of the first passage alone."""
    from artifact.models import attention

    which, at = TEXTS[number % len(TEXTS)], number // len(TEXTS)
    length = size.fidelity_prompt_tokens + size.fidelity_tokens
    built = prompts.build("text", which, (at + 1) * length, tokenizer, paths.data_dir() / "prompts")
    ids, read = list(built.ids[at * length:]), size.fidelity_prompt_tokens
    prompt, found = attention.read(model, ids[:read], length), []
    for run, plan in _plans(read, RUNS):
        scored = attention.score(model, ids, read, plan, prompt=prompt, errors=number == 0)
        found.append(Reading(
            run, None if run is _DENSE else plan.method.budget_blocks, prompts.PLAIN[int(which)][0], read, scored.nll,
            _sparse_error(scored), *_shares(scored, plan)))
    return found


def likelihood(found: Sequence[Reading], seed: int) -> pd.DataFrame:
    """Negative log-likelihood per token by plan, over all passages and by text; and the paired differences to dense
    attention and to DSA of the same method and budget.

    nll_nats: of a token, mean. over_dense_nats, over_dsa_nats: this plan's minus the other's, token by token: mean,
    its 95 % interval (bootstrap over runs of tokens), and for dense the 5th and 95th percentile. moved_frac: tokens
    whose likelihood differs from dense attention's by more than a tenth; farthest_nats: the largest difference to DSA.
    """
    if not found:
        return _recorded("nll.csv")
    plans: dict[tuple, list[Reading]] = {}
    for one in found:
        plans.setdefault(_key(one.run), []).append(one)
    rows, dense = [], plans[_key(_DENSE)]
    for key, own in plans.items():
        dsa = plans.get((*key[:3], "dsa", None))
        for text in ("all", *dict.fromkeys(one.text for one in own)):
            some = [at for at, one in enumerate(own) if text in ("all", one.text)]
            mine = [own[at] for at in some]
            apart = [own[at].nll - dense[at].nll for at in some]
            joined = np.concatenate(apart)
            row = own[0].run | {
                "budget_count": own[0].blocks, "text": text, "prompt_tokens": own[0].prompt_tokens,
                "passages_count": len(mine), "scored_tokens": len(joined),
                "nll_nats": np.concatenate([one.nll for one in mine]).mean(),
                **_difference("over_dense_nats", apart, seed),
                "over_dense_nats_p05": np.quantile(joined, 0.05), "over_dense_nats_p95": np.quantile(joined, 0.95),
                "moved_frac": (np.abs(joined) > np.log(1.1)).mean(),
                "missed_frac": np.mean([one.missed for one in mine]),
                "wasted_frac": np.mean([one.wasted for one in mine]),
            }
            if dsa:
                apart = [own[at].nll - dsa[at].nll for at in some]
                row |= _difference("over_dsa_nats", apart, seed)
                row["farthest_nats"] = np.abs(np.concatenate(apart)).max()
            rows.append(row)
    return _typed(pd.DataFrame(rows)).assign(origin="measured")


def against_dsa(frame: pd.DataFrame) -> pd.DataFrame:
    """By mode, over methods and budgets: how many plans are surely worse or better than DSA of the same budget, their
    interval wholly beyond `MARGIN_NATS`, and how far the means, and single tokens, lie apart."""
    rows = frame[(frame["text"] == "all") & ~frame["mode"].isin(["dense", "dsa"])]
    found = []
    for (mode, ratio), part in rows.groupby(["mode", "predicted_ratio"], dropna=False, sort=False):
        found.append({"mode": mode, "predicted_ratio": ratio, "plans_count": len(part),
                      "worse_count": int((part["over_dsa_nats_min"] > MARGIN_NATS).sum()),
                      "better_count": int((part["over_dsa_nats_max"] < -MARGIN_NATS).sum()),
                      "lowest_nats": part["over_dsa_nats"].min(), "highest_nats": part["over_dsa_nats"].max(),
                      "farthest_nats": part["farthest_nats"].max()})
    return pd.DataFrame(found).assign(origin=rows["origin"].iloc[0])


def same_size(found: Sequence[Reading], seed: int) -> pd.DataFrame:
    """The union against DSA at a budget about as large as what the union attends to, token by token, as `likelihood`.

    blocks_ratio: blocks that the union attends to over those that DSA does.
    """
    if not found:
        return _recorded("same_size.csv")
    small, large = SETTINGS[1], SETTINGS[0]
    ratio = large.budget_frac / small.budget_frac
    union = [one for one in found if _key(one.run) == (*small, "union", ratio)]
    dsa = [one for one in found if _key(one.run) == (*large, "dsa", None)]
    return _typed(pd.DataFrame([union[0].run | {
        "dsa_budget_frac": large.budget_frac,
        "blocks_ratio": np.mean([1 + one.wasted for one in union]) * union[0].blocks / dsa[0].blocks,
        "nll_nats": np.concatenate([one.nll for one in union]).mean(),
        "dsa_nll_nats": np.concatenate([one.nll for one in dsa]).mean(),
        **_difference("over_dsa_nats", [one.nll - other.nll for one, other in zip(union, dsa, strict=True)], seed),
    }])).assign(origin="measured")


def errors(found: Sequence[Reading]) -> pd.DataFrame:
    """How far each layer's attention output is from dense attention's of the same inputs, |difference| / |dense| over
    all heads, one row per plan and layer that selects: median and 95th percentile over the first passage's tokens."""
    if not found:
        return _recorded("errors.csv")
    groups = {}
    for one in found:
        if one.error is not None and one.run["mode"] != "dense":
            groups.setdefault(_key(one.run), (one.run, []))[1].append(one.error)
    rows = []
    for run, parts in groups.values():
        for layer, values in enumerate(np.concatenate(parts, axis=1)):
            if not np.isnan(values).all():
                rows.append(run | {"layer": layer, "scored_tokens": len(values),
                                   "error_frac_p50": np.quantile(values, 0.5),
                                   "error_frac_p95": np.quantile(values, 0.95)})
    return _typed(pd.DataFrame(rows)).assign(origin="measured")


def depth(frame: pd.DataFrame) -> pd.DataFrame:
    """`errors` over layers: the mean of their medians, and the worst layer's."""
    groups = frame.groupby([*BY, "origin"], dropna=False, sort=False)["error_frac_p50"]
    found = groups.agg(error_frac="mean", error_frac_max="max", layers_count="size").reset_index()
    return found[[*found.columns.drop("origin"), "origin"]]


def needles(size: Scale) -> pd.DataFrame:
    """One fact hidden in a long text and asked for: a row per prompt and plan, whether its number is in the answer.

    The same prompts under every plan, decoded greedily.
    """
    source = _source(size.fidelity_needles)
    if source is None:
        return _recorded("needles.csv").astype({"prompt": str})
    rows = _side_by_side(needle, size, source, size.fidelity_needles)
    return _typed(pd.DataFrame(rows)).assign(origin="measured")


def needle(size: Scale, number: int, model, tokenizer) -> list[dict]:
    """One prompt of `needles` under every plan: its rows."""
    from artifact.models import attention

    rows, tokens, family = [], size.fidelity_needle_tokens, "needle-single"
    built = prompts.build(family, str(number), tokens, tokenizer, paths.data_dir() / "prompts")
    prompt = attention.read(model, built.ids, tokens + ANSWER_TOKENS)

    def said(spoken):
        return built.answer in tokenizer.decode(spoken)

    for run, plan in _plans(tokens, NEEDLES):
        made = attention.generate(model, built.ids, plan, ANSWER_TOKENS, prompt=prompt, enough=said)
        rows.append(run | {"family": family, "prompt": str(number), "prompt_tokens": tokens,
                           "found": said(made.tokens)})
    return rows


def found(frame: pd.DataFrame) -> pd.DataFrame:
    """`needles` by plan: the share found with Wilson's 95 % interval; and of the prompts in which this plan and DSA of
    the same budget differ, how many only this one found, and how many only DSA."""
    plans = {key: part.sort_values("prompt") for key, part in frame.groupby(BY, dropna=False, sort=False)}
    rows = []
    for key, part in plans.items():
        hits, of = part["found"].to_numpy(bool), len(part)
        low, high = intervals.of_share(int(hits.sum()), of)
        row = dict(zip(BY, key, strict=True)) | {
            "prompt_tokens": int(part["prompt_tokens"].iloc[0]), "prompts_count": of, "found_count": int(hits.sum()),
            "found_frac": hits.mean(), "found_frac_min": low, "found_frac_max": high}
        dsa = next((other for its, other in plans.items() if its[:3] == key[:3] and its[3] == "dsa"), None)
        if dsa is not None:
            theirs = dsa["found"].to_numpy(bool)
            row |= {"gained_count": int((hits & ~theirs).sum()), "lost_count": int((theirs & ~hits).sum())}
        rows.append(row)
    whole = ["gained_count", "lost_count"]
    return _typed(pd.DataFrame(rows)).astype(dict.fromkeys(whole, "Int64")).assign(origin=frame["origin"].iloc[0])


def waste(recorded: Iterable[Trace]) -> pd.DataFrame:
    """What the union adds to the selection, from recorded decode traces: how many blocks, and how much of the true
    attention they hold. One row per method and |P| / |A|, over prompts.

    wasted_frac, missed_frac: blocks of P that are not in A, and of A not in P, over all of A. mass_..._frac: share of
    dense attention on A, on the wasted blocks, on A and P together. P: the calibrated EMA's, newborn blocks in it.
    """
    rows, recorded = [], list(recorded)
    for name, page in foresight.MAIN:
        chosen = foresight.method(name, page)
        for one, layer, part in prediction.every(recorded, chosen):
            theta = prediction.calibrated(part, calibration.weights_of(chosen)).theta
            places = coverage.ranks(baselines.ema(part, theta))
            born, picked, mass = coverage.newborn(part), coverage.selected(part), coverage.selected_mass(part).mean()
            for ratio in RATIOS:
                sizes = np.array([calibration.predicted_count(picks, ratio) for picks in part.picks])
                guess = (places < sizes[:, None, None]) | born
                wasted = guess & ~picked
                added = np.where(wasted, part.mass, 0).sum(-1, dtype=np.float64).mean()
                rows.append(prediction.label(one) | {
                    "method": name, "page_tokens": page, "layer": layer, "predicted_ratio": ratio,
                    "wasted_frac": wasted.sum(-1).mean() / chosen.budget_blocks,
                    "missed_frac": (picked & ~guess).sum(-1).mean() / chosen.budget_blocks,
                    "mass_selected_frac": mass, "mass_wasted_frac": added, "mass_union_frac": mass + added})
    return prediction.over_prompts(pd.DataFrame(rows).assign(origin="recorded"),
                                   ["method", "page_tokens", "predicted_ratio"])


def moved(coverage_frac: float = 0.98, ratio: float = 1.5, attended_tokens: int = 6144) -> pd.DataFrame:
    """Bytes that one layer's attention moves in a step as DSA, as the union and as exact, by tokens per block and query
    heads per KV head: 8 KV heads of 128 channels in 16 bits.

    `attended_tokens`: of the selection, those of InfLLM-v2's 96 blocks of 64; `ratio`: |P| / |A|; `coverage_frac`: of
    A that was predicted. over_frac: above the fewest possible, A's keys and values once and one result.
    """
    found = [traffic.modelled(attended_tokens / block, coverage_frac, ratio, traffic.Layout(block, group))
             for block in (16, 64, 128) for group in (4, 8, 16)]
    frame = pd.concat(found, ignore_index=True).rename(columns={"kind": "mode", "group_heads": "group_count"})
    first = ["block_tokens", "group_count", "mode"]
    return frame[[*first, *frame.columns.drop([*first, "origin"]), "origin"]]


def _source(wanted: int) -> str | None:
    """What the model is loaded from; None where nothing is wanted or the weights are not there."""
    try:
        return weights.find(registry.OFFLINE, paths.data_dir() / "models") if wanted else None
    except ValueError:
        return None


def _recorded(name: str) -> pd.DataFrame:
    return _typed(experiments.recorded(NAME, name)).assign(origin="recorded")


def _plans(prompt_tokens: int, runs: dict) -> Iterator[tuple[dict, object]]:
    """What each run is, and its plan: dense attention, then every mode of every setting."""
    from artifact.prr.decode import Plan

    yield _DENSE, Plan("dense")
    for setting, modes in runs.items():
        chosen = setting.chosen(prompt_tokens)
        for mode, ratio in modes:
            run = setting._asdict() | {"mode": mode, "predicted_ratio": ratio}
            if ratio is None:
                yield run, Plan(mode, method=chosen)
            else:
                yield run, Plan("prr", mode, chosen, ratio)


def _key(run: dict) -> tuple:
    return tuple(run[column] for column in BY)


def _shares(scored, plan) -> tuple[float, float]:
    """Missed and wasted blocks over selected ones."""
    happened, sparse = scored.happened, scored.happened.sparse
    if plan.mode in ("dense", "dsa") or not sparse.any():
        return np.nan, np.nan
    selected, missed, wasted = (each[sparse].double().sum() for each in (
        happened.selected, happened.missed, happened.wasted))
    return float(missed / selected), float(wasted / selected)


def _sparse_error(scored) -> np.ndarray | None:
    """The errors, NaN in rows that attend to everything."""
    return None if scored.error is None else np.where(scored.happened.sparse.numpy(), scored.error, np.nan)


def _difference(name: str, apart: Sequence[np.ndarray], seed: int) -> dict[str, float]:
    block = min(BLOCK_TOKENS, min(map(len, apart)))
    low, high = intervals.of_mean(apart, block=block, seed=seed)
    return {name: np.concatenate(apart).mean(), f"{name}_min": low, f"{name}_max": high}


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """The settings' columns alike, measured or read."""
    return frame.astype({"page_tokens": "Int64", "predicted_ratio": "float64"})


def _side_by_side(job: Callable, size: Scale, source: str, count: int) -> list:
    """`job(size, number, model, tokenizer)` for numbers 0 to count - 1, a process per core; their lists in order."""
    from joblib import Parallel, cpu_count, delayed

    workers = min(cpu_count(), PROCESSES, count)
    shares = [range(first, count, workers) for first in range(workers)]
    shares = Parallel(n_jobs=workers)(delayed(_share)(job, size, source, numbers) for numbers in shares)
    return [row for number in range(count) for row in shares[number % workers][number // workers]]


def _share(job: Callable, size: Scale, source: str, numbers: Iterable[int]) -> list[list]:
    """What one process does of `_side_by_side`."""
    with _one_thread():
        model, tokenizer = weights.load(source), weights.tokenizer(source)
        return [job(size, number, model, tokenizer) for number in numbers]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch computes with one thread, so that the same machine gives the same numbers."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
