"""What notebook 04 shows of the kernels: what each compiles to, which configuration serves which shape, the bytes each
moves, and times on GPUs, recorded or published.

Compiling needs no GPU, but the whole matrix takes an hour of a quiet machine, so its table is recorded in
data/recorded/kernels and a part of it is compiled again in every run. `python -m artifact.study.compiling FILE.csv ...`
records tables anew: of `python -m artifact.kernels.aot --full --out FILE.csv`, which may be stopped and then goes on,
and one of `python -m artifact.kernels.moved`. Times of a GPU, as `python -m artifact.kernels.timing` writes them, are
read from data/stage_times/kernels*.csv when there are some.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from artifact.study import bench, paths, printed, results
from artifact.study import run as runs
from artifact.study.scale import Scale

COMPILED, MOVED = "compiled.csv", "moved.csv"
NVIDIA = ("sm80", "sm90", "sm100")
TYPICAL = {"dim_count": 128, "block_tokens": 64, "group_count": 8}  # the shape whose instructions are shown
MIX = {"tensor core": "mma_count", "multiply-add": "fma_count", "exp2 and the like": "special_count",
       "global memory": "global_accesses_count", "shared memory": "shared_accesses_count"}
CASE = ["operator", "dtype", "dim_count", "block_tokens", "group_count"]
AGAIN_SHOWN = [*CASE, "kernel", "target", "registers_count", "spills_bytes", "shared_bytes", "buffers_count",
               "mma_count", "fma_count", "instructions_count", "same", "origin"]
GPU = ["study", "against", "kv_heads_count", "block_tokens", "budget_tokens", "speedup_ratio", "ours", "bound_ratio",
       "holds_count", "device", "order_index", "source", "origin"]
_NAMES = {"dim": "dim_count", "block": "block_tokens", "group": "group_count"}
DECODE, PLANNED, BSR, REPLANNED = "triton", ("flashinfer decode", "flashinfer decode, tensor cores"), \
    "flashinfer bsr", "flashinfer bsr and its plan"
SLOWER, COPY, LINEAR = 1.0, 0.7, 0.98  # bounds: of FlashInfer's time, of copy bandwidth, of R squared


def recorded(name: str) -> pd.DataFrame:
    """A recorded table, `COMPILED` or `MOVED`; ValueError when it is missing or changed after it was recorded."""
    folder = paths.data_dir() / "recorded" / "kernels"
    results.trusted(folder)
    return _read(folder / name)


def record(tables: Sequence[str | Path]) -> list[str]:
    """Keeps tables of `aot` (merged) and of `moved` in data/recorded/kernels; returns the names written."""
    folder, frames = paths.data_dir() / "recorded" / "kernels", [_read(Path(path)) for path in tables]
    compiled = [frame.rename(columns=_NAMES) for frame in frames if "kernel" in frame]
    moved = [frame for frame in frames if "read_bytes" in frame]
    if not compiled or len(moved) != 1 or len(compiled) + len(moved) != len(frames):
        raise ValueError(f"tables are {', '.join(map(str, tables))}; allowed: tables of aot and one of moved")
    keys = [*CASE, "kernel", "target", "triton"]
    whole = pd.concat(compiled, ignore_index=True).drop_duplicates(keys).sort_values(keys, kind="stable")
    for column in whole.columns:
        if column.endswith(("_count", "_bytes", "_tokens")):
            whole[column] = whole[column].astype("Int64")
    results.write(whole.assign(origin="recorded"), folder / COMPILED)
    results.write(moved[0].assign(origin="recorded"), folder / MOVED)
    results.write_manifest(folder, [COMPILED, MOVED], origin="recorded",
                           commands=["python -m artifact.kernels.aot --full", "python -m artifact.kernels.moved"],
                           triton=sorted(whole["triton"].unique()), **runs.facts())
    return [COMPILED, MOVED]


def compile_again(size: Scale) -> pd.DataFrame:
    """Some cases of the short list compiled now, beside their recorded rows: `same` says whether every number agrees.

    A row a launch and NVIDIA target. Where this Triton is not recorded there is nothing to agree with: `same` is False.
    """
    from artifact.kernels import aot

    fresh = pd.DataFrame(aot.rows(aot.SHORT[: size.compiled_cases], NVIDIA)).rename(columns=_NAMES)
    before = recorded(COMPILED)
    keys = [*CASE, "kernel", "target", "triton"]
    both = fresh.merge(before.drop(columns="origin"), on=keys, how="left", suffixes=("", "_recorded"))
    numbers = [name for name in fresh if name.endswith(("_count", "_bytes", "_tokens")) and name not in keys]
    return fresh.assign(same=[all(row[name] == row[f"{name}_recorded"] for name in numbers)
                              for _, row in both.iterrows()])


def configurations() -> pd.DataFrame:
    """Which configuration serves which shape, asked of the launchers themselves: a row for each kernel, type and
    configuration, with the head sizes and block sizes that get it."""
    from artifact.kernels import aot

    rows = [{"kernel": launch.kernel.fn.__name__, "dtype": case.dtype, "dim": case.dim, "block": case.block,
             "tile_tokens": launch.tile, "warps_count": launch.options["num_warps"],
             "stages_count": launch.options["num_stages"], "registers_bound_count": launch.options["maxnreg"]}
            for case in dict.fromkeys(case._replace(group=4) for case in aot.every()) for launch in aot.launches(case)]
    found = pd.DataFrame(rows).astype({"registers_bound_count": "Int64"}).drop_duplicates()
    by = ["tile_tokens", "warps_count", "stages_count", "registers_bound_count"]
    groups = found.groupby(["kernel", *by, "dim"], dropna=False)
    found = groups.agg(types=("dtype", _listed), block_sizes=("block", _listed)).reset_index()
    groups = found.groupby(["kernel", "types", "block_sizes", *by], dropna=False)
    found = groups.agg(head_sizes=("dim", _listed)).reset_index()
    return found[["kernel", "types", "head_sizes", "block_sizes", *by]].assign(origin="modelled")


def missing(table: pd.DataFrame, target: str) -> list:
    """The cases of the whole matrix that the table does not hold for a target with its newest Triton."""
    from artifact.kernels import aot

    held = table[(table["target"] == target) & (table["triton"] == _newest(table))]
    held = set(held[CASE].itertuples(index=False, name=None))
    return [case for case in aot.every() if tuple(case) not in held]


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """The compile table by kernel, type, head size and target: extremes over block sizes and groups, and how many
    launches are as they should be."""
    by = ["triton", "target", "kernel", "dtype", "dim_count"]
    groups = table.groupby(by, sort=False)
    return groups.agg(
        launches_count=("kernel", "size"), compiled_count=("error", lambda errors: int((errors == "").sum())),
        registers_count_min=("registers_count", "min"), registers_count_max=("registers_count", "max"),
        spills_bytes_max=("spills_bytes", "max"), shared_bytes_max=("shared_bytes", "max"),
        buffers_count_min=("buffers_count", "min"), narrow_copies_count_max=("narrow_copies_count", "max"),
        wide_loads_count_min=("wide_loads_count", "min"),
        faulty_count=("faults", lambda faults: int((faults != "").sum())),
    ).reset_index().assign(origin="recorded")


def misfits(table: pd.DataFrame) -> pd.DataFrame:
    """What is wrong where, by target and kernel: a row for each reason, and one with none where all is well."""
    table = table.assign(reason=table["error"].where(table["error"] != "", table["faults"]).replace("", "none"))
    groups = table.groupby(["triton", "target", "kernel", "reason"], sort=True)
    return groups.agg(launches_count=("kernel", "size"), types=("dtype", lambda values: ", ".join(sorted(set(values)))),
                      head_sizes=("dim_count", _listed), block_sizes=("block_tokens", _listed),
                      shared_bytes_max=("shared_bytes", "max")).reset_index().assign(origin="recorded")


def instructions(table: pd.DataFrame, target: str = "sm90") -> pd.DataFrame:
    """The instructions of each kernel at one shape on one target: a row for each kernel, type and kind, as counts and
    as shares of all. `other` is what addresses, masks and control take."""
    typical = table[(table["target"] == target) & (table["triton"] == _newest(table))]
    for column, value in TYPICAL.items():
        typical = typical[(typical[column] == value) | typical["operator"].isin(["ema_step", "merge", "topk"])]
    typical = typical[typical["operator"].isin(["attend", "merge", "quest_scores", "infllm_scores",
                                           "ema_step", "topk"])]
    rows = []
    for _, row in typical.drop_duplicates(["kernel", "dtype"]).iterrows():
        counts = {kind: int(row[column]) for kind, column in MIX.items()}
        counts["other"] = int(row["instructions_count"]) - sum(counts.values())
        rows += [{"kernel": row["kernel"], "dtype": row["dtype"], "target": target, "kind": kind,
                  "instructions_count": count, "instructions_frac": count / row["instructions_count"]}
                 for kind, count in counts.items()]
    return pd.DataFrame(rows).assign(origin="recorded")


def moved() -> pd.DataFrame:
    """The recorded bytes of each case beside the fewest possible."""
    found = recorded(MOVED)
    return found.assign(moved_ratio=(found["read_bytes"] + found["written_bytes"]) / found["fewest_bytes"])


def facts(table: pd.DataFrame, again: pd.DataFrame, moved: pd.DataFrame) -> pd.DataFrame:
    """What claims are about, a number a row: of the recorded tables and of what was compiled again."""
    newest = table[table["triton"] == _newest(table)]
    nvidia, amd = newest[newest["target"].isin(NVIDIA)], newest[newest["target"] == "gfx942"]
    older = table[table["triton"] != _newest(table)]
    typical = moved[(moved["operator"] == "attend") & (moved["dtype"] == "fp16") & (moved["group_count"] == 4)]
    tiled = nvidia[nvidia["kernel"] == "attend_blocks"]
    rows = [
        ("cases of the matrix, sm80, sm90 and sm100, not recorded", sum(len(missing(table, name)) for name in NVIDIA),
         "recorded"),
        ("launches compiled for NVIDIA", len(nvidia), "recorded"),
        ("... with spills or local memory", int((nvidia["faults"].str.contains("local memory")).sum()), "recorded"),
        ("... faulty in any way", int((nvidia["faults"] != "").sum()), "recorded"),
        ("most dynamic shared memory, bytes", int(nvidia["shared_bytes"].max()), "recorded"),
        ("fewest tiles under way, each for K and V", int(tiled["buffers_count"].min()), "recorded"),
        ("launches compiled with an older Triton", len(older), "recorded"),
        ("... faulty in any way, older Triton", int((older["faults"] != "").sum()), "recorded"),
        ("cases of the matrix, gfx942, not recorded", len(missing(table, "gfx942")), "recorded"),
        ("launches for gfx942", len(amd), "recorded"),
        ("... that do not compile", int((amd["error"] != "").sum()), "recorded"),
        ("... that spill", int(amd["faults"].str.contains("local memory").sum()), "recorded"),
        ("... that fit as they are", int((amd["faults"] == "").sum()), "recorded"),
        ("compiled again, other than recorded", int((~again["same"]).sum()), "measured"),
        *((f"bytes moved / fewest, blocks of {row['block_tokens']}", row["moved_ratio"], "recorded")
          for _, row in typical.drop_duplicates("block_tokens").iterrows()),
    ]
    printed_ratios = printed.kernels()["speedup_ratio"]
    rows += [("speed-up in Table 3, mean of its cells", printed_ratios.mean(), "published"),
             ("... the largest", printed_ratios.max(), "published")]
    return pd.DataFrame(rows, columns=["fact", "ours", "origin"])


def gpu_files() -> list[Path]:
    """The CSVs of GPU times there are."""
    return sorted((paths.data_dir() / "stage_times").glob("kernels*.csv"))


def gpu(files: Iterable[Path] | None = None) -> pd.DataFrame:
    """Speed-ups over FlashInfer, the share of copy bandwidth and the linearity of repair, of every recorded GPU; the
    paper's Table 3 below. Without records: the paper's rows alone. ValueError for records of a dry run.

    columns: study, against, the shape, speedup_ratio (their time / ours); of what is bounded `ours`, bound_ratio and
    holds_count (1 or 0); device, order_index (of the file), source, origin.
    """
    theirs = printed.kernels().assign(study="table3", against="BSR", kv_heads_count=8, device="H100")
    files = gpu_files() if files is None else files
    ours = [_speeds(path).assign(order_index=index) for index, path in enumerate(files)]
    return pd.concat([*ours, theirs], ignore_index=True).reindex(columns=GPU)


def _speeds(path):
    times = results.read(path)
    manifest = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if manifest["dry_run"]:
        raise ValueError(f"{path}: a dry run took no times; allowed: times of a GPU")
    if manifest["files"][path.name]["sha256"] != results.sha256(path):
        raise ValueError(f"{path}: changed after the run that wrote it")
    shape = ["kv_heads_count", "block_tokens", "listed_count"]
    times = times[times["time_us"].notna()]
    rows = []
    for (study, *values), part in times[times["study"].isin(["decode", "table3"])].groupby(["study", *shape]):
        named = dict(zip(shape, values, strict=True))
        took = {(side, method): value for side, method, value in
                zip(part["side"], part["method"], part["time_us"], strict=True)}
        planned = min((took[side, "graph"] for side in PLANNED if (side, "graph") in took), default=np.nan)
        for against, mine, other in (("decode planned once", "graph", planned),
                                     ("BSR", "graph", took.get((BSR, "graph"), np.nan)),
                                     ("BSR and its plan", "eager", took.get((REPLANNED, "eager"), np.nan))):
            ours = took.get((DECODE, mine), np.nan)
            if np.isnan(other) or np.isnan(ours):
                continue
            row = {"study": study, "against": against, **named,
                   "budget_tokens": named["block_tokens"] * named["listed_count"], "speedup_ratio": other / ours}
            if study == "decode" and against == "decode planned once":
                row |= {"ours": ours / other, "bound_ratio": SLOWER, "holds_count": int(ours / other <= SLOWER)}
            rows.append(row)
    copied = times[times["study"] == "copy"]
    batch = times[(times["study"] == "batch") & (times["side"] == DECODE) & (times["method"] == "graph")]
    if len(copied) and len(batch):
        rates = [float(part["bytes_fewest_bytes"].iloc[0] / part["time_us"].iloc[0]) for part in (batch, copied)]
        share = rates[0] / rates[1]
        rows.append({"study": "batch", "against": "copy", "ours": share, "bound_ratio": COPY,
                     "holds_count": int(share >= COPY)})
    repairs = times[times["study"] == "repair"]
    if len(repairs) > 2:
        squared = float(np.corrcoef(repairs["missed_count"], repairs["time_us"])[0, 1] ** 2)
        rows.append({"study": "repair", "against": "a line", "ours": squared, "bound_ratio": LINEAR,
                     "holds_count": int(squared >= LINEAR)})
    return pd.DataFrame(rows).assign(device=manifest["device"], source=f"data/stage_times/{path.name}",
                                     origin="recorded")


def cpu(size: Scale) -> pd.DataFrame:
    """`bench.kernels` at a scale's size: the CPU path on this machine, equal answers first; a column for each unit."""
    listed = max(8, size.kernel_tokens // 1024)
    found = bench.kernels(tokens=size.kernel_tokens, listed=listed, missed=max(1, listed // 9),
                          sets=min(10, size.kernel_rounds), rounds=size.kernel_rounds)
    columns = {"bytes": "read_bytes", "ms": "time_ms", "gflops": "rate_gflops", "ratio": "time_ratio"}
    wide = found.pivot(index=["measure", "origin"], columns="unit", values="value").reindex(columns=list(columns))
    order = found["measure"].drop_duplicates()
    return wide.rename(columns=columns).reset_index().set_index("measure").loc[order].reset_index()[
        ["measure", *columns.values(), "origin"]]


def _read(path):
    """A table with text where its text columns are empty."""
    frame = results.read(path)
    return frame.assign(**{column: frame[column].astype(object).fillna("")
                           for column in ("faults", "error") if column in frame})


def _newest(table):
    return max(table["triton"].unique(), key=lambda text: tuple(map(int, text.split("."))))


def _listed(values):
    return ", ".join(map(str, sorted(set(values))))


if __name__ == "__main__":
    print(json.dumps(record(sys.argv[1:]), indent=1))
