"""The command line: `artifact VERB`; every verb says what it takes with --help.

A verb prints for people, or one flat JSON object with --json. Exit codes: 0 done, 1 a claim or a cell failed (the
verb returns 1), 2 bad input or environment, 130 interrupted. Verbs import what they need when they are called, so
that each starts at once.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="prr-kvpimple-artifact", prog_name="artifact")
def cli() -> None:
    """Regenerate, check and take apart the results of PRR and KV-PIMple."""


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One flat JSON object instead of a table.")
def env(as_json: bool) -> None:
    """What this machine is, what is installed against the pins, which tiers can run, which simulators are found."""
    from artifact.study import provenance

    found = provenance.environment()
    if as_json:
        click.echo(json.dumps(found))
        return
    for label, text in provenance.summary(found).items():
        click.echo(f"{label:<17} {text}")


@cli.group()
def kv() -> None:
    """The serving study: requests, allocators, and the bandwidth their placement leaves."""


# name, type, default as text, help; the names and defaults of `artifact.study.serving.Cell` (a test holds them equal)
_CELL_OPTIONS = (
    ("workload", str, "steady", "steady, spec, longctx, prefix, fixedlen or trace"),
    ("trace", str, None, "Azure CSV or Mooncake JSONL, with --workload trace"),
    ("step-ms", float, "25.0", "trace time per engine step"),
    ("allocator", str, "paged", "paged, pim-aware, contiguous, random, vllm-v1, sglang, vllm-v1-region, sglang-region"),
    ("address-map", str, "host-cacheline", "host-centric, host-cacheline, pim-friendly, or 'co1 ch5 ba2 bg2 co4 ro14'"),
    ("block-tokens", str, "16", "tokens per block, or derived: the block that is one region"),
    ("requests", int, "1000", "requests to draw, or to take from the trace"),
    ("seed", int, "0", "seed of every random stream"),
    ("model", str, "llama-gqa-8kv", "model shape: a name or a YAML file"),
    ("dram", str, "hbm3-pim", "memory: a name or a YAML file"),
    ("max-batch", int, "64", "most sequences decoded together"),
    ("headroom", float, "1.3", "pool size / what a full batch of mean requests needs"),
    ("pool-blocks", int, None, "pool size in blocks, instead of the headroom's"),
    ("rate", float, None, "arrivals per step; the workload's own unless given"),
    ("prompt-tokens", int, "2048", "prompt length of fixedlen"),
    ("output-tokens", int, "128", "output length of fixedlen"),
    ("admission", str, "oracle", "oracle or vllm"),
    ("watermark", float, "0.01", "share of the pool vllm admission keeps free"),
    ("coalesce", str, "window", "window or inorder"),
    ("window", int, "64", "bursts per coalescing window"),
    ("kv-shards", int, "1", "devices the KV heads are split over"),
    ("base-bytes", int, "0", "where the pool begins; a region that straddles two rows shows what alignment is worth"),
    ("block-layout", str, "token-major", "token-major, head-major, or head-channels: a head's own channels"),
    ("turn-tokens", int, None, "read the batch in turns of so many tokens; each sequence alone unless given"),
    ("charged", str, "reads", "reads, or moves: also what is written and copied"),
    ("spec-width", int, "4", "branches per speculation round"),
    ("spec-depth", int, "3", "draft tokens per branch"),
    ("spec-accept", float, "0.8", "acceptance p: draft token k is kept with p^k"),
    ("spec-adopt", str, "auto", "auto, splice or copyback"),
    ("pim-scratch", str, "separate", "separate or shared: where drafts live"),
    ("pim-plan", str, "bestfit", "bestfit or greedy"),
    ("pim-compact", float, "0.0", "empty regions filled below this share; 0 = never"),
    ("preempt", str, "recompute", "recompute or swap: what vllm admission does with a preempted sequence's blocks"),
    ("frees", str, "ordered", "ordered or unordered: a seeded order in which paged returns a sequence's blocks"),
    ("sample-every", int, "16", "steps between samples"),
    ("sample-sequences", int, "8", "sequences per sample"),
)


def _cell_options(command):
    for name, kind, default, text in reversed(_CELL_OPTIONS):
        note = f"{text}  [default: {default}]" if default else text
        command = click.option(f"--{name}", type=kind, help=note, show_default=False)(command)
    return click.option("--kv-split", is_flag=True, help="K and V in tensors of their own; one is measured")(command)


def _cell(given):
    from artifact.study.serving import Cell

    given = {name: value for name, value in given.items() if value is not None}
    if "trace" in given:
        given["trace_file"] = given.pop("trace")
    tokens = given.get("block_tokens")
    if tokens is not None and tokens != "derived":
        if not tokens.lstrip("-").isdigit():
            raise ValueError(f"block_tokens is {tokens!r}; allowed: a whole number of at least 1, or derived")
        given["block_tokens"] = int(tokens)
    return Cell(**given)


def _print(result, as_json):
    """A flat mapping for people, or as one JSON object; NaN is null there."""
    if as_json:
        click.echo(json.dumps({k: None if v != v else v for k, v in result.items()}))
        return
    for key, value in result.items():
        click.echo(f"{key:<44} {value:.6g}" if isinstance(value, float) else f"{key:<44} {value}")


@kv.command()
@_cell_options
@click.option("--out", type=click.Path(dir_okay=False), help="Also every sample, as CSV with a manifest.")
@click.option("--json", "as_json", is_flag=True, help="One flat JSON object instead of a table.")
def simulate(out: str | None, as_json: bool, **given: object) -> None:
    """Run one configuration: a workload through an allocator, and M1 to M4 of its placement."""
    from artifact.study import serving

    cell = _cell(given)
    with _progress("requests", as_json) as show:
        summary, samples = serving.run(cell, on_progress=show)
    if out:
        serving.write_samples(out, cell, samples)
    _print(summary, as_json)


@contextmanager
def _progress(what, quiet):
    """A bar on stderr once something takes longer than two seconds; call the yielded function with (done, all)."""
    from tqdm import tqdm

    with tqdm(unit=f" {what}", delay=2, disable=quiet or None, leave=False, file=sys.stderr) as bar:

        def show(done, total):
            bar.total = total
            bar.update(done - bar.n)

        yield show


@kv.command()
@_cell_options
@click.option("--out", type=click.Path(dir_okay=False), help="Write there instead of stdout.")
def requests(out: str | None, **given: object) -> None:
    """The requests of a workload as CSV: rid, arrival_step, prompt_len, output_len, prefix_id, prefix_len."""
    text = _cell(given).load_requests().to_csv()
    if not out:
        click.echo(text, nl=False)
        return
    from artifact.study import results

    results.write_text(Path(out), text)


@kv.command()
@click.argument("operations", type=click.Path(dir_okay=False))
@click.option("--allocator", default="paged", help="One of kv simulate's.")
def replay(operations: str, allocator: str) -> None:
    """The block ids an allocator hands out for OPERATIONS, a JSON file.

    {"pool_blocks": N, "block_tokens": T, "ops": [["alloc" | "append", seq, tokens], ["free", seq], ...]}
    -> {"new_blocks": [[ids], null, ...]}, null for a free.
    """
    from artifact.kv.replay import replay as answer

    click.echo(json.dumps({"new_blocks": answer(operations, allocator)}))


_RESULTS = click.option("--results", "results_dir", type=click.Path(), metavar="DIR",
                        help="Where results lie. Default: data/results in a checkout, ./results elsewhere.")
_SCALE = click.option("--scale", metavar="S", help="tiny, smoke or full. Default: the largest that has been run.")
_JSON = click.option("--json", "as_json", is_flag=True, help="One flat JSON object instead of tables and progress.")


@cli.command()
@click.option("--scale", metavar="S", default="smoke", help="tiny (tests), smoke (minutes) or full.")
@click.option("--only", multiple=True, metavar="03 …", help="Only notebooks that start so, and what they need.")
@click.argument("more", nargs=-1, metavar="")
@click.option("--force", is_flag=True, help="Run them even when they are up to date.")
@_RESULTS
@_JSON
def reproduce(scale: str, only: tuple, more: tuple, force: bool, results_dir: str | None, as_json: bool) -> int:
    """Run the notebook chain; what is up to date is skipped, so an interrupted run goes on where it stopped.

    Exit code 1 when a notebook failed.
    """
    from artifact.study import chain, claims, paths

    if more and not only:
        raise click.UsageError(f"Got unexpected argument {more[0]!r}; notebooks are picked with --only.")
    outcomes = chain.reproduce(scale, only=(*only, *more), force=force, results_dir=results_dir,
                               say=(lambda line: None) if as_json else lambda line: click.echo(line, err=True))
    folder = paths.results_dir(results_dir)
    judged = claims.verdicts(scale, folder)
    claims.write(judged, scale, folder)
    states = [outcome["state"] for outcome in outcomes]
    counts = {f"notebooks_{state.replace(' ', '_')}_count": states.count(state) for state in chain.STATES}
    if as_json:
        _print_json(scale=scale, results=str(folder), **counts, **claims.counts(judged), notebooks=outcomes)
    else:
        click.echo(_listed(counts))
        click.echo(_listed(claims.counts(judged)))
        click.echo(f"results in {folder / scale}; `artifact verify` shows the claims, `artifact report` makes pages")
    return int(counts["notebooks_failed_count"] + counts["notebooks_skipped_count"] > 0)


@cli.command()
@_SCALE
@_RESULTS
@_JSON
def status(scale: str | None, results_dir: str | None, as_json: bool) -> None:
    """What has been run, what is out of date and why; runs nothing."""
    from artifact.study import chain, paths, tables
    from artifact.study import scale as scales

    folder = paths.results_dir(results_dir)
    scale = scale or scales.largest(folder)
    rows = chain.status(scale, results_dir)
    if as_json:
        _print_json(scale=scale, results=str(folder), notebooks=rows)
        return
    click.echo(f"scale {scale}, results in {folder / scale}")
    click.echo(tables.text(rows, ["notebook", "state", "started", "duration_s", "reason"]))


@cli.command()
@_SCALE
@_RESULTS
@_JSON
def verify(scale: str | None, results_dir: str | None, as_json: bool) -> int:
    """Every claim against the results of a scale. Exit code 1 when one is decided otherwise than expected."""
    from artifact.study import claims, paths, tables
    from artifact.study import scale as scales

    folder = paths.results_dir(results_dir)
    scale = scale or scales.largest(folder)
    scales.load(scale)
    judged = claims.verdicts(scale, folder)
    counts = claims.counts(judged)
    if (folder / scale).is_dir():
        claims.write(judged, scale, folder)
    rows = judged.astype(object).where(judged.notna(), None).to_dict("records")
    if as_json:
        _print_json(scale=scale, **counts, claims=rows)
    else:
        for row in rows:
            row["paper"] = row["published"] or f"({row['claimed']})"
            row["ours"] = "" if row["ours"] is None else f"{row['ours']:.6g}"
            row["verdict"] += "" if row["holds"] else f", expected {row['expected']}"
        click.echo(f"scale {scale}; a number in brackets is the artifact's own claim")
        click.echo(tables.text(rows, ["id", "paper", "ours", "tolerance", "verdict", "reason"]))
        click.echo(_listed(counts))
    return int(counts["failed_count"] > 0)


@cli.command()
@click.option("--appendix", is_flag=True, help="Instead: what evaluation forms ask, as Markdown and LaTeX.")
@_SCALE
@_RESULTS
@_JSON
def report(appendix: bool, scale: str | None, results_dir: str | None, as_json: bool) -> None:
    """A folder of HTML pages of a scale's results: claims, figures, notebooks, provenance; opens without a network.

    --appendix writes the claims, an appendix (USENIX, EuroSys), two checklists (cTuning and MLSys, NeurIPS) and a check
    of one's own against the badges; of our recorded run where nothing has been run.
    """
    from artifact.study import evaluation, paths, tables
    from artifact.study import report as pages
    from artifact.study import scale as scales

    folder = paths.results_dir(results_dir)
    scale = scale or scales.largest(folder)
    if appendix:
        study = evaluation.study(scale, folder)
        files = [str(path) for path in evaluation.write(study, folder / scale / evaluation.FOLDER)]
        lines = evaluation.check(study)
        if as_json:
            _print_json(scale=study.scale, recorded=study.recorded, files=files, badges=lines,
                        met_count=sum(line["met"] for line in lines), lines_count=len(lines))
            return
        rows = [{**line, "met": "met" if line["met"] else "missing", "shown": line["missing"] or line["evidence"]}
                for line in lines]
        click.echo(tables.text(rows, ["badge", "met", "asks", "shown"]))
        click.echo(f"written: {', '.join(files)}")
        return
    index = pages.build(scale, folder)
    if as_json:
        _print_json(index=str(index))
    else:
        click.echo(index)


@cli.command()
@click.argument("key")
@click.option("--from", "source", type=click.Path(dir_okay=False), metavar="CSV",
              help="Draw this result instead of that of our recorded full run.")
@click.option("-o", "--out", type=click.Path(dir_okay=False), metavar="FILE", show_default="KEY.html",
              help="Its ending chooses: .html, .json, or .png, which needs Chromium.")
@click.option("--json", "as_json", is_flag=True, help="One flat JSON object instead of a line.")
def figure(key: str, source: str | None, out: str | None, as_json: bool) -> None:
    """One figure from a shipped or given result, in a second. An unknown KEY lists them all."""
    from artifact.study import plate

    written = plate.write(key, source, out)
    if as_json:
        _print_json(**written)
    else:
        click.echo(f"{written['file']}: {written['title']} ({', '.join(written['origins'])}; from {written['source']})")


@cli.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--rtol", default=1e-9, help="Numbers may differ by this fraction of B's.")
@click.option("--atol", default=0.0, help="And by this much, in the column's unit.")
@_JSON
def compare(a: str, b: str, rtol: float, atol: float, as_json: bool) -> int:
    """Two result CSVs, or two folders of them: what differs beyond the tolerances. Exit code 1 when something does."""
    from artifact.study import compare as comparison
    from artifact.study import tables

    found, files, values = comparison.compare(a, b, rtol, atol)
    rows = found.astype(object).where(found.notna(), None).to_dict("records")
    if as_json:
        _print_json(a=a, b=b, rtol=rtol, atol=atol, files_count=files, values_count=values,
                    differences_count=len(rows), differences=rows)
    else:
        if rows:
            click.echo(tables.text(rows, comparison.COLUMNS))
        click.echo(f"{files} files, {values} values, {len(rows)} differences beyond rtol {rtol:g}, atol {atol:g}")
    return int(bool(rows))


def _print_with(said: dict[str, object], as_json: bool, **rows: list[dict[str, object]]) -> None:
    """`_print`, then a table of each of `rows`; or all of it as one JSON object."""
    from artifact.study import tables

    if as_json:
        _print_json(**said, **rows)
        return
    _print(said, as_json)
    for some in rows.values():
        click.echo(tables.text(some, list(some[0])))


def _print_json(**content: object) -> None:
    click.echo(json.dumps(content, allow_nan=False, default=lambda value: value.item()))  # .item(): NumPy's scalars


def _listed(counts: dict[str, int]) -> str:
    """`{"claims_count": 3, "decided_count": 2}` -> `claims: 3 in all, 2 decided`."""
    what = next(iter(counts)).partition("_")[0]
    words = {name: name.removesuffix("_count").removeprefix(what).replace("_", " ").strip() for name in counts}
    return f"{what}: " + ", ".join(f"{count} {words[name] or 'in all'}" for name, count in counts.items())


@kv.command("sweep")
@click.argument("name")
@click.option("--scale", "scale_name", default="full", help="tiny, smoke or full")
@click.option("--workers", type=click.IntRange(1), default=2, help="local processes")
@click.option("--executor", default="local", metavar="local|dask:ADDRESS",
              help="there, or on the workers of that Dask scheduler; with --keep none repeats what finished")
@click.option("--out", type=click.Path(dir_okay=False), help="Write the CSV there instead of stdout.")
@click.option("--keep", type=click.Path(file_okay=False), help="Folder of finished cells, to resume from.")
def sweep_(name: str, scale_name: str, workers: int, executor: str, out: str | None, keep: str | None) -> None:
    """Run a sweep of data/sweeps, or a YAML file, as tidy CSV.

    A cell that fails is named with its settings, the others are written all the same; exit code 1.
    """
    from artifact.study import results, scale, sweep

    cells = sweep.expand(sweep.load(name), scale.load(scale_name))
    failed = None
    try:
        frame = sweep.compute(cells, keep=keep, workers=workers, executor=executor)
    except sweep.CellsFailed as error:
        failed, frame = error, error.finished
    if out and len(frame):
        results.write(frame, Path(out))
    elif not out:
        click.echo(frame.to_csv(index=False), nl=False)
    if failed:
        raise failed


@cli.group()
def pim() -> None:
    """The memory: what a stream of in-memory attention commands takes, cycle by cycle."""


@pim.command()
@click.argument("trace", required=False, type=click.Path(dir_okay=False), metavar="[TRACE]")
@click.option("--pattern", help="Instead of a file: same_row, new_row, every8, rand0.75, kv4, paged6 …")
@click.option("--block-table", type=click.Path(dir_okay=False), metavar="FILE",
              help="Instead of a file: JSON {seq_len, table, block_tokens (16)}.")
@click.option("--preset", default="HBM3_5.2Gbps", help="Timing; an unknown one lists them all.")
@click.option("--refresh", default="on", help="on or off")
@click.option("--quirks", default="on", help="on: AttAcc's behaviour; off: what its table of constraints says")
@click.option("--commands", type=int, default=1000, help="of the pattern, counted as all-bank ones")
@click.option("--seed", type=int, default=0, help="of the pattern")
@click.option("--mode", default="AB", help="of the pattern: AB, SB, PB, SBr, PBr or AB1SB")
@click.option("--barrier", type=int, default=0, help="of the pattern: one after so many commands; 0: none")
@click.option("--split", is_flag=True, help="of the pattern: its upper half of the rows in pseudo-channel 1")
@click.option("--order", default="window", help="of the block table: window, plain, inorder or double")
@click.option("--export", type=click.Path(dir_okay=False), metavar="FILE", help="Also write the stream for AttAcc.")
@click.option("--against", help="attacc: run a build of it too; exit code 1 when its cycles differ.")
@click.option("--simulator", type=click.Path(), metavar="DIR", help="That build.", show_default="ATTACC_DIR")
@_JSON
def cycles(as_json: bool, **asked: object) -> int:
    """Cycles, row hits, activations and refreshes of a stream of commands: a TRACE in AttAcc's format, or made here."""
    from artifact.study import cycles as study

    found = study.answer(**asked)
    _print(found, as_json)
    return int(found.get("equal") is False)


@cli.group()
def prr() -> None:
    """PRR: decode traces, what its predictor covers, its calibration; how much to speculate on and what that saves."""


@prr.command()
@click.option("--model", default="SmolLM2-135M", help="One of the registry, a folder with a config.json, or a hub id.")
@click.option("--family", default="needle-multikey", help="Prompt family; an unknown one lists them all.")
@click.option("--prompt", default="0", help="Seed of the prompt; of a real set ROW, PART#ROW or FILE#ROW.")
@click.option("--tokens", type=int, default=4096, help="Length of the prompt.")
@click.option("--steps", type=int, default=64, help="Decode steps to record.")
@click.option("--rows", type=int, default=64, help="Last rows of the prefill to record, for calibration.")
@click.option("--layers", metavar="2,10,…", show_default="four over the depth", help="Layers to record, or all.")
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE", show_default="FAMILY-PROMPT.npz",
              help="The trace; its checksum and command go to index.csv beside it.")
@click.option("--json", "as_json", is_flag=True, help="One flat JSON object instead of a table.")
def record(layers: str | None, out: str | None, as_json: bool, **asked: object) -> None:
    """Record a decode trace: queries, the keys' pages and true attention of a few layers of a real model.

    About a minute for 4,096 tokens of the default model on one core; `make model` brings it.
    """
    from artifact.study import recording

    with _progress("tokens", as_json) as show:
        written = recording.write(out=out, layers=layers, on_progress=show, **asked)
    _print(written, as_json)


def _selection_options(command):
    """The traces and the selection method that `prr coverage` and `prr calibrate` look at."""
    for option in reversed((
        click.argument("traces", nargs=-1, type=click.Path(dir_okay=False), metavar="[TRACE.npz]..."),
        click.option("--method", "name", default="quest", help="quest or infllm"),
        click.option("--page", type=int, show_default="16; infllm 64", help="Tokens per block: 16 or 64, infllm 64."),
        click.option("--group", default="mean", help="Quest's score of a KV head's query heads: mean, max or sum."),
        click.option("--budget", type=int, show_default="64 pages of 16, 24 of 64",
                     help="Blocks a step attends to, forced ones included."),
        click.option("--ratio", type=float, default=1.0, help="Blocks predicted / blocks selected."),
    )):
        command = option(command)
    return command


def _selected(traces, name, page, group, budget):
    """-> the method, the traces (the shipped ones unless some are named), and what of both goes into the JSON."""
    from artifact.models import trace
    from artifact.study import prediction

    method = prediction.method(name, page=page, group=group, budget=budget)
    said = {"method": name, "page_tokens": page or (16 if name == "quest" else 64), "group": group,
            "budget_blocks": method.budget_blocks}
    return method, [trace.read(file) for file in traces or prediction.shipped()], said


@prr.command()
@_selection_options
@click.option("--theta", metavar="ALPHA,BETA,GAMMA", help="Also the EMA with this theta.")
@_JSON
def coverage(traces: tuple, ratio: float, theta: str | None, as_json: bool, **asked: object) -> None:
    """How much of what decode steps select each predictor had predicted: means over prompts.

    Of the shipped traces unless some are named. coverage: |P and A| / |A| without blocks that are always attended, min
    and max its 95 % interval over prompts; forced: with them; weighted: each block by its score; mass: the share of
    true attention on P, and on A.
    """
    from artifact.study import prediction, tables

    given = None if theta is None else prediction.theta(theta)
    method, recordings, said = _selected(traces, **asked)
    found = prediction.curves(recordings, method, (ratio,), theta=given)
    shared = prediction.over_prompts(prediction.locality(recordings, method), ["model"]).mean(numeric_only=True)
    means = prediction.over_prompts(found, ["predictor"])
    rows = means.astype(object).where(means.notna(), None).to_dict("records")
    columns = ["coverage_frac", "coverage_frac_min", "coverage_frac_max", "coverage_forced_frac",
               "coverage_weighted_frac", "mass_predicted_frac", "mass_selected_frac"]
    said |= {"ratio": ratio, "prompts_count": int(rows[0]["prompts_count"])}
    said |= {key: float(shared[key]) for key in ("overlap_frac", "overlap_forced_frac")}
    if as_json:
        _print(said | {f"{row['predictor'].replace(' ', '_')}_{column}": row[column]
                       for row in rows for column in columns}, as_json)
        return
    _print(said, as_json)
    click.echo(tables.text(rows, ["predictor", *columns]))


@prr.command()
@_selection_options
@click.option("--rows", type=int, show_default="all", help="Only the last so many of the prefill's rows.")
@_JSON
def calibrate(traces: tuple, ratio: float, rows: int | None, as_json: bool, **asked: object) -> None:
    """The best theta of every prompt and layer, from the prefill's rows; the shipped traces unless some are named.

    objective: the paper's Eq. 4 on those rows, of the winner and of the worst of the 80 candidates; coverage: |P and
    A| / |A| of the decode steps that followed, of the winner and of the best in hindsight.
    """
    from artifact.study import fitting, tables

    method, recordings, said = _selected(traces, **asked)
    found = fitting.fits(recordings, method, ratio=ratio, rows=rows)
    said |= {"ratio": ratio, "rows": rows, "fits_count": len(found)}
    said |= {key: float(found[key].mean()) for key in found if key.endswith("_frac")}
    fits = found.drop(columns=["predicted_ratio", "origin"]).to_dict("records")
    if as_json:
        _print_json(**said, fits=fits)
        return
    _print(said, as_json)
    click.echo(tables.text(fits, ["family", "prompt", "layer", "alpha", "beta", "gamma", "objective_frac",
                                  "worst_objective_frac", "coverage_frac", "best_coverage_frac"]))


def _stages_options(command):
    """The stage times that `prr budget` and `prr timeline` start from."""
    for option in reversed((
        click.option("--stages", "source", default="figure2b", metavar="NAME",
                     help="A file of data/stage_times by name, or a CSV's path."),
        click.option("--method", default="quest", help="quest or infllm"),
        click.option("--kernel", type=float, show_default="mean of the paper's Table 3",
                     help="Where speculation was not timed: how many times faster than attention it is."),
        click.option("--fixed", type=float, default=0.0,
                     help="... and the share of its time that the number of blocks does not change."),
    )):
        command = option(command)
    return command


@prr.command("budget")
@_stages_options
@click.option("--context", "contexts", type=int, multiple=True, show_default="all that were timed",
              help="Tokens; may be given more than once.")
@click.option("--far", is_flag=True, help="Also more than twice past the longest context that was timed.")
@click.option("--device", help="Refuse stage times of another device ...")
@click.option("--model", help="... of another model ...")
@click.option("--page", "page_tokens", type=int, help="... of other tokens per block ...")
@click.option("--budget", "budget_count", type=int, help="... of another number of blocks attended to.")
@_JSON
def budget_(source: str, method: str, contexts: tuple, as_json: bool, **asked: object) -> None:
    """How many blocks to speculate on, |P| / |A| by context: the largest whose attention fits into selection.

    At contexts that were timed from the times themselves, elsewhere from polynomials; their degree is the one that
    predicts left-out points best. beyond: the context is longer than any that was timed.
    """
    from artifact.study import latency

    said, deltas, tried = latency.budget_of(source, method, contexts, **asked)
    _print_with(said, as_json, deltas=deltas, degrees=tried)


@prr.command("timeline")
@_stages_options
@click.option("--context", type=int, default=131072, help="Tokens; one that was timed.")
@click.option("--ratio", type=float, show_default="the budget's", help="Blocks predicted / blocks selected.")
@click.option("--coverage", type=float, show_default="Table 7's, GLM-4-9B", help="Share of the selected predicted.")
@click.option("--contention", metavar="SELECTION,SPECULATION", default="0,0",
              help="How much longer each takes while the other runs: 0.2 is a fifth.")
@_JSON
def timeline_(source: str, method: str, context: int, contention: str, as_json: bool, **asked: object) -> None:
    """What overlaps what in a decode step, how long it takes in every way to run it, and what is the least.

    serial: select, then attend. fast: the same with the faster kernel. reuse: attend to the prediction alone.
    recompute: all again when anything was missed. repair: PRR.
    """
    from artifact.study import latency

    try:
        first, second = (float(number) for number in contention.split(","))
    except ValueError:
        raise ValueError(f"contention is {contention!r}; allowed: two numbers, as 0.2,0.1") from None
    said, ways, events = latency.timeline_of(source, method, context, slower=(first, second), **asked)
    _print_with(said, as_json, ways=ways, events=events)


@cli.group()
def gpu() -> None:
    """What only a GPU can tell; without one, how it would be asked."""


@gpu.command("profile")
@click.option("--out", type=click.Path(), metavar="PLACE", show_default="data/stage_times",
              help="Another folder; or, of one model, the CSV.")
@click.option("--model", "models", multiple=True, show_default="GLM-4-9B-1M and Llama3-8B-1M",
              help="Whose layers' shape; may be given more than once.")
@click.option("--context", "contexts", type=int, multiple=True, show_default="16K to 512K",
              help="Tokens; may be given more than once.")
@click.option("--limit", type=float, default=510.0, help="Seconds after which no further context is begun.")
@click.option("--dry-run", "dry", is_flag=True, help="One model at toy size, interpreted on a CPU; takes no times.")
@_JSON
def profile_(as_json: bool, **asked: object) -> None:
    """How long the stages and whole steps of a layer take on this GPU, for data/stage_times: at most nine minutes.

    A layer has the model's shape and random weights; what is selected follows our recorded traces. Stages: those that
    `prr budget` and `prr timeline` start from. Steps: dense, serial DSA, with the faster kernel, S1, S2, PRR's union
    and exact. Exit code 2 without a GPU.
    """
    from artifact.study import gpu_profile

    written = gpu_profile.run(**asked)
    if as_json:
        _print_json(files_count=len(written), dry_run=asked["dry"], files=[str(path) for path in written])
    else:
        for path in written:
            click.echo(path)


@cli.group()
def bench() -> None:
    """Ratios of speed, each after a check that both sides agree."""


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="One flat JSON object instead of a table.")
def allocators(as_json: bool) -> None:
    """Each allocator's time of a decode step beside paged, and the study's own in plain Python; the worst cases."""
    from artifact.study import bench as benches

    _print_bench(benches.allocators(), as_json)


@bench.command()
@click.option("--million", is_flag=True, help="Instead, a million requests: time, memory, and time of a request.")
@click.option("--json", "as_json", is_flag=True, help="One flat JSON object instead of a table.")
def simulator(million: bool, as_json: bool) -> None:
    """Counting commands against an oracle, one cell as a command, all published cells; the cycle-level controller."""
    import pandas as pd

    from artifact.study import bench as benches

    if million:
        _print_bench(benches.million(), as_json)
        return
    _print_bench(pd.concat([benches.simulator(), benches.cycle_level()]), as_json)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="One flat JSON object instead of a table.")
def selection(as_json: bool) -> None:
    """One step's scores and top-k over 64K tokens against reading the same metadata once, and against torch."""
    from artifact.study import bench as benches

    _print_bench(benches.selection(), as_json)


@bench.command("predictor")
@click.option("--json", "as_json", is_flag=True, help="One flat JSON object instead of a table.")
def predictor_(as_json: bool) -> None:
    """One layer's calibration against the plain loop, on easy and hard scores, and one prediction with its top 96."""
    from artifact.study import bench as benches

    _print_bench(benches.predictor(), as_json)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="One flat JSON object instead of a table.")
def kernels(as_json: bool) -> None:
    """Attention over listed blocks and its repair: one core, against a sum of the same numbers and against torch; on a
    machine with a GPU there, against FlashInfer."""
    import torch

    from artifact.study import bench as benches

    _print_bench(benches.gpu_kernels() if torch.cuda.is_available() else benches.kernels(), as_json)


def _print_bench(frame, as_json):
    rows = zip(frame["measure"], frame["unit"], frame["value"], strict=True)
    _print({f"{measure} ({unit})": value for measure, unit, value in rows}, as_json)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code; the only place where an error becomes a line on stderr.

    `argv`: the arguments after the program's name; None = the process's own.
    """
    try:
        code = cli.main(args=None if argv is None else list(argv), prog_name="artifact", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help())
        return 0
    except click.ClickException as error:
        return _fail(_usage(error))
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted; finished results are kept", code=130)
    except (ValueError, OSError) as error:
        return _fail(str(error) or type(error).__name__)
    except RuntimeError as error:
        return _fail(str(error), code=1)
    return code if isinstance(code, int) else 0


def _usage(error: click.ClickException) -> str:
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    if isinstance(context.command, click.Group):
        message += f" Allowed: {', '.join(context.command.list_commands(context))}."
    return f"{message} See `{context.command_path} --help`."


def _fail(message: str, code: int = 2) -> int:
    click.echo(f"artifact: {' '.join(message.split())}", err=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
