"""Every figure by its key: the function that draws it, the result it is drawn from, and what is said of it.

The functions are in the `*_figures` modules, by theme: a data frame in, a plotly figure out. None reads a file. Rows of
origin `published` are drawn hollow and everything else filled; the line at the foot says which origins there are. How a
figure looks is `style`'s business; drawn explanations are in `schematics`.
"""

from collections.abc import Callable
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from artifact.study import (
    bandwidth_figures,
    cycle_figures,
    fidelity_figures,
    kernel_figures,
    latency_figures,
    prr_figures,
    schematics,
    sensitivity_figures,
    style,
    upkeep_figures,
    walk_figures,
)

_WORDS = ("allocator", "workload", "address_map", "trace", "method", "family", "predictor", "kind", "model",
          "prompt", "profile", "per", "stage", "stream", "way", "baseline", "table", "chosen", "benchmark", "preset",
          "pattern", "run", "charged", "kernel", "dtype", "target", "triton", "operator", "study", "against", "mode",
          "holder", "text", "sweep", "option", "over", "settled", "admission", "spec_adopt", "implementation",
          "operation")  # columns of text; all others that are drawn are numbers


class Plot(NamedTuple):
    """A figure and what is said of it.

    `columns`: what its frame must have beside `origin`. `published`: whether it draws published rows; the others leave
    them out.
    """

    function: Callable[[pd.DataFrame], go.Figure]
    notebook: str
    result: str
    caption: str
    alt: str
    columns: tuple[str, ...]
    published: bool = False


def draw(key: str, frame: pd.DataFrame) -> go.Figure:
    """Figure `key` of `frame`. ValueError for an unknown key, no rows, a missing column or one that is not numbers."""
    plot = known(key)
    for column in (*plot.columns, "origin"):
        if column not in frame:
            raise ValueError(f"figure {key}: no column {column!r}; it needs: {', '.join((*plot.columns, 'origin'))}")
    if frame.empty:
        raise ValueError(f"figure {key}: no rows")
    for column in plot.columns:
        if column not in _WORDS and not pd.api.types.is_numeric_dtype(frame[column]):
            raise ValueError(f"figure {key}: column {column!r} holds {frame[column].iloc[0]!r}; it must hold numbers")
    frame = frame if plot.published else style.ours(frame)
    return plot.function(frame.reset_index(drop=True))


def known(key: str) -> Plot:
    """The entry of `key`; ValueError that lists the keys when there is none."""
    if key not in FIGURES:
        raise ValueError(f"figure {key!r} is not one of: {', '.join(FIGURES)}")
    return FIGURES[key]


def title(figure: go.Figure) -> str:
    """A figure's title as plain text."""
    return figure.layout.title.text.removeprefix("<b>").removesuffix("</b>")


_CELL = ("workload", "allocator", "block_tokens")
FIGURES: dict[str, Plot] = {
    "banks": Plot(
        schematics.banks, "10_placement", "geometry.csv",
        "A memory channel is split into banks. Each bank keeps one of its rows open, with a multiply-and-add unit "
        "(×+) beside it; an all-bank command makes all of them work at once on the same row index, fast when that "
        "row is open and slow when it must be opened first. One row index across all banks of all channels is a "
        "region. Below: one sequence as paged allocation scatters it, and as one rule keeps it together: fill a "
        "region before claiming the next.",
        "Drawing. One channel's banks with one row index lit across all of them, the same row lit in every "
        "channel, and a sequence's blocks scattered over many regions by paged allocation but together in one "
        "region by pim-aware.",
        ("channels_count", "banks_count", "row_bytes", "token_bytes", "block_tokens", "tccd_ab_ns", "trc_ns"),
        True),
    "placement_map": Plot(
        bandwidth_figures.placement_map, "10_placement", "placement_map.csv",
        "The block table of one sequence late in a steady run, read from left to right. The height is the region a "
        "block lies in, so a flat run is read from open rows and every change of height opens another row in every "
        "bank.",
        "Two panels with a sequence's blocks in reading order on the horizontal axis and their region on the "
        "vertical one: under paged nearly every block changes region, under pim-aware they come in flat runs.",
        ("allocator", "order_index", "block", "region", "slot", "blocks_per_region")),
    "placement": Plot(
        bandwidth_figures.placement, "10_placement", "placement.csv",
        "Placement without any memory model: how often a sequence's next block is the neighbouring one, how often "
        "it lies in the same region, and how many regions a sequence touches relative to the fewest that could "
        "hold it.",
        "Dot plot with three panels, adjacency, same region and spread, and a row for each run; paged lies near "
        "random, pim-aware near contiguous.",
        (*_CELL, "requests_count", "block_adjacency_frac", "same_region_frac", "region_spread")),
    "life": Plot(
        walk_figures.life, "10_placement", "life.csv",
        "The same request of the same run under two allocators. Paged puts each block into whatever place was freed "
        "last; pim-aware fills a region before it claims the next. What is given back is soon another's.",
        "Two rows of four panels. Above, paged: single marks spread over some thirty regions. Below, pim-aware: five "
        "regions, each filled from end to end. In the last column all marks are hollow.",
        ("allocator", "first_step", "last_step", "region", "slot", "step", "until_step", "holder", "order_index",
         "blocks_per_region")),
    "fragmentation": Plot(
        walk_figures.fragmentation, "10_placement", "fragmentation.csv",
        "What happens to the pool while the engine runs. The free list of paged begins in order and loses it; within "
        "the run it places as dice do. The region rule keeps every sequence in as few regions as can hold it.",
        "Three line charts over decode steps: paged climbs from the level of contiguous to that of random in the "
        "upper two and falls to it in the lowest; pim-aware stays level in all three.",
        ("allocator", "requests_count", "step", "region_spread", "shared_frac", "m1_row_hit_frac")),
    "headline": Plot(
        bandwidth_figures.headline, "11_bandwidth", "headline.csv",
        "Row hits and effective bandwidth by block size. Small paged blocks lose both; pim-aware keeps both at "
        "every block size; once a block is a region all allocators meet.",
        "Two line charts over block size. M1 and M3 of paged rise with the block size and meet those of pim-aware "
        "and contiguous, which are flat and near the top, where a block is a region.",
        (*_CELL, "m1_row_hit_frac", "m3_bandwidth_gbps"), True),
    "bandwidth": Plot(
        bandwidth_figures.bandwidth, "11_bandwidth", "headline.csv",
        "Effective bandwidth at vLLM's block size, by workload. The gap is widest where requests are short and "
        "churn is high; long prompts, laid down in one go, hardly suffer.",
        "Grouped bars of M3 by workload for paged, pim-aware and contiguous, below a dashed line for the ideal; "
        "paged is far lower for steady and spec, a little for prefix, and level for longctx.",
        (*_CELL, "m3_bandwidth_gbps"), True),
    "heatmap": Plot(
        bandwidth_figures.heatmap, "11_bandwidth", "heatmap.csv",
        "Where paged allocation hurts: short prompts in small blocks. Every request has the prompt length of its "
        "row.",
        "Heat map of M1 of paged allocation by prompt length and block size; lightest, so lowest, for short "
        "prompts in small blocks.",
        ("allocator", "prompt_tokens", "block_tokens", "m1_row_hit_frac"), True),
    "run_length": Plot(
        bandwidth_figures.run_length, "11_bandwidth", "run_length.csv",
        "A free list remembers its first order for a while. The longer the run, the closer paged comes to random "
        "placement, so a number for paged holds for its run length only; pim-aware does not age.",
        "Line chart of M1 over the number of requests in a run: paged falls towards the dotted line of random "
        "placement, pim-aware stays level far above.",
        ("allocator", "requests_count", "m1_row_hit_frac"), True),
    "busiest_channel": Plot(
        bandwidth_figures.busiest_channel, "11_bandwidth", "maps.csv",
        "The study averages bandwidth over all channels, idle ones included. A map that puts a whole sequence into "
        "one channel looks best that way and is worst by the channel that ends the step; under the host's own map "
        "the two agree.",
        "Horizontal bars of M3 by address map, left averaged over channels, right by the busiest channel: the "
        "pim-friendly map is highest on the left and lowest on the right.",
        ("allocator", "address_map", "m3_bandwidth_gbps", "m3_busiest_gbps")),
    "gain": Plot(
        bandwidth_figures.gain, "11_bandwidth", "gains.csv",
        "The gain over paged, counted as the study does (the mean of each sample's rate), as all bytes over all time, "
        "where long sequences count for more, and as the study does but in cycles of a controller (notebook 14).",
        "Dot plot of the gain of pim-aware and contiguous over paged by workload, three marks each for the three ways "
        "of counting; the one in cycles is the lowest.",
        (*_CELL, "gain_mean_ratio", "gain_total_ratio", "gain_cycles_mean_ratio")),
    "throughput": Plot(
        bandwidth_figures.throughput, "11_bandwidth", "throughput.csv",
        "What the gain in attention is worth to a whole decode step. Attention takes its simulated time; the rest "
        "of the step is set such that attention has the given share under paged, and is the same for all (Amdahl).",
        "Two line charts over attention's share of the step, tokens per second and step time: the allocators are "
        "level where attention is a small share and far apart where it is all of the step.",
        ("allocator", "attention_share_frac", "step_time_us", "throughput_tokens_per_s")),
    "traces": Plot(
        bandwidth_figures.traces, "11_bandwidth", "traces.csv",
        "Real serving traces instead of drawn workloads, same pool rule and same engine.",
        "Grouped bars of M1 and M3 by trace and allocator.",
        ("trace", "allocator", "m1_row_hit_frac", "m3_bandwidth_gbps")),
    "m1_histogram": Plot(
        sensitivity_figures.m1_histogram, "12_sensitivity", "m1_histogram.csv",
        "M1 of every sampled sequence of a run, not only its mean. Nearly all of paged lie where random placement "
        "lies; its mean is above because of a thin tail, the requests that came while the list was still in order.",
        "Three histograms above each other: paged and random in one peak at three quarters, paged with a thin tail to "
        "the right; pim-aware in one narrow peak near the right end.",
        ("allocator", "m1_frac_min", "m1_frac_max", "samples_count", "m1_row_hit_frac_mean", "requests_count")),
    "kvheads": Plot(
        bandwidth_figures.kvheads, "12_sensitivity", "sweeps.csv",
        "The fewer KV heads a model has, the fewer bytes a block of 16 tokens holds, and the more of them share a "
        "row: paging costs more, and the rule gives back more.",
        "Grouped bars of M1 for three model shapes: with one KV head paged is far below the others, with thirty-two "
        "all three are nearly level.",
        ("sweep", "workload", "model", "allocator", "m1_row_hit_frac", "m3_bandwidth_gbps")),
    "pressure": Plot(
        sensitivity_figures.pressure, "12_sensitivity", "sweeps.csv",
        "When the pool is too small the engine preempts, empty regions run out, and the rule falls back to whatever "
        "is left: under steady traffic much of the gain is lost. Under speculation, which ends sooner, hardly "
        "anything is preempted.",
        "Two line charts over the pool's size: above, M1 of pim-aware falls towards paged as the pool shrinks, for "
        "steady traffic; below, preemptions rise.",
        ("sweep", "workload", "allocator", "admission", "spec_adopt", "headroom", "m1_row_hit_frac",
         "preemptions_count")),
    "options": Plot(
        sensitivity_figures.options, "12_sensitivity", "option_gains.csv",
        "One option that the study leaves out at a time, all else as it was. Tensors of their own for K and V raise "
        "the gain; a pool that begins inside a region lowers it; reading a batch in turns of a block takes it away, "
        "and so does a map with row bits inside the block.",
        "Dot plot with intervals, an option a row: most lie near the dotted line of the study's own choice, separate "
        "K and V far to the right, turns of a block and another bit order at one.",
        ("workload", "option", "seeds_count", "gain_total_ratio", "gain_total_ratio_min", "gain_total_ratio_max",
         "gain_busiest_ratio", "gain_busiest_ratio_min", "gain_busiest_ratio_max")),
    "traffic": Plot(
        sensitivity_figures.traffic, "12_sensitivity", "traffic.csv",
        "What fills regions over what engines do today, on drawn traffic and on two real traces, by all bytes over all "
        "time and by the busiest channel. The rule gains as much behind an engine's own eviction as without it.",
        "Dot plot with intervals in two panels, a row for each kind of traffic and engine: the marks of pim-aware, "
        "vllm-v1-region and sglang-region lie above each other, all to the right of one.",
        ("workload", "trace", "allocator", "over", "gain_total_ratio", "gain_total_ratio_min",
         "gain_total_ratio_max", "gain_busiest_ratio", "gain_busiest_ratio_min", "gain_busiest_ratio_max")),
    "settled": Plot(
        sensitivity_figures.settled, "12_sensitivity", "settled.csv",
        "A run doubles until M1 no longer drifts over its later half. By then the free list places as dice do; what a "
        "whole run reports for paged, the dashed line, still holds the order that the list began with.",
        "Line chart over run lengths: paged comes down to the level line of random placement and its dashed line stays "
        "above; pim-aware and contiguous are level far above both.",
        ("allocator", "requests_count", "m1_row_hit_frac", "m1_whole_frac", "settled")),
    "validation": Plot(
        sensitivity_figures.validation, "12_sensitivity", "validation.csv",
        "The study's two outside checks. Left, M1 beside the share of row hits that Ramulator 2 gave for the same "
        "block tables. Right, the gain of each sequence as M3 has it, as AttAcc gave it with every hit charged twice, "
        "and in cycles with one command for both halves of a channel.",
        "Left a scatter of nine hollow marks on the diagonal; right three marks for each of three sequences, M3 "
        "highest, cycles charged once a little lower, AttAcc as published lowest.",
        ("against", "allocator", "seq_id", "m1_row_hit_frac", "hit_frac", "way", "gain_ratio"), True),
    "selecting": Plot(
        schematics.selecting, "02_locality", "settings.csv",
        "Dynamic sparse attention reads only the blocks whose summaries the query scores highest, so it must select "
        "before it can attend. PRR predicts the selection, attends to the prediction while the selection still runs, "
        "and repairs the result over what was missed.",
        "Drawing. A row of bars, one per block, with the highest ones lit; below it the same blocks with only those "
        "read; then two time lines, select and attend in turn, and PRR's with both at once and a short repair.",
        ("method", "page_tokens", "blocks_count", "budget_count", "attended_frac")),
    "selections": Plot(
        prr_figures.selections, "02_locality", "selections.csv",
        "What one KV head selects over the decode steps of one prompt: vertical lines are blocks that stay selected. "
        "Most of a step's blocks were selected by the step before.",
        "Raster of decode steps downwards and blocks across; most marks continue the marks above them, a few are new.",
        ("step", "block", "kind", "layer", "head", "model", "family", "prompt")),
    "locality": Plot(
        prr_figures.locality, "02_locality", "locality.csv",
        "The share of a step's blocks that the step before had attended to as well. Ours are real traces of a small "
        "model at 4K tokens, by prompt family; the paper's are six much larger models, by benchmark. They are "
        "different models on different text, shown side by side and never averaged together.",
        "Two panels, Quest above and InfLLM-v2 below: overlap by prompt family on the left with intervals, the paper's "
        "hollow marks by benchmark on the right, a dotted line for random sets far below.",
        ("method", "page_tokens", "model", "family", "overlap_frac", "overlap_forced_frac", "random_frac"), True),
    "overlap_heads": Plot(
        prr_figures.overlap_heads, "02_locality", "overlap_heads.csv",
        "Overlap of adjacent steps in each layer and KV head. Heads differ more than prompts do.",
        "Three heat maps of overlap, layers down and KV heads across, with a number in each cell.",
        ("method", "page_tokens", "layer", "head", "overlap_frac")),
    "history": Plot(
        prr_figures.history, "03_predictor", "history.csv",
        "The score of one block that is selected and left out in turn, the level that follows it, and the prediction, "
        "level plus a part of the trend. Both are made before the step's score is known.",
        "Line chart over decode steps: scattered scores, a smooth level, a prediction that leans ahead of it, and a "
        "dashed line above which blocks are selected.",
        ("step", "block", "score", "level", "prediction", "least_selected", "layer", "head", "alpha", "beta", "gamma",
         "model", "family", "prompt")),
    "calibration": Plot(
        schematics.calibration, "03_predictor", "grid.csv",
        "How PRR finds its parameters: while the prompt is read, every candidate is tried on the scores of the "
        "prefill's last rows; the one that would have predicted most of their selections is used in the decode. The "
        "shades are the objective of one layer of one prompt.",
        "Drawing. Rows of scores, an arrow to a grid of shaded candidates, one outlined, an arrow to its alpha, beta "
        "and gamma; below, four boxes in a loop: predict, attend, repair, update.",
        ("alpha", "beta", "gamma", "objective_frac", "rows_count", "blocks_count", "budget_count")),
    "coverage": Plot(
        prr_figures.coverage, "03_predictor", "coverage.csv",
        "Coverage of each predictor by the size of what it predicts, relative to what is selected. The upper panels "
        "show it whole; the lower ones show what is missed, where the predictors can be told apart.",
        "Four line charts, Quest and InfLLM-v2: coverage rises with the predicted size, nearly alike for the last step "
        "and all EMAs, lower for static frequency and far lower for random.",
        ("method", "page_tokens", "predictor", "predicted_ratio", "coverage_frac", "coverage_frac_min",
         "coverage_frac_max", "prompts_count")),
    "predictors": Plot(
        prr_figures.predictors, "03_predictor", "coverage.csv",
        "Coverage of every predictor at equal size and at half as much more. The last step's blocks are nearly as good "
        "as any; a larger prediction is worth more than a better predictor; random overlap is the floor.",
        "Horizontal bars by predictor in four panels with their numbers, a tick for the coverage that counts forced "
        "blocks, and a dotted line at random.",
        ("method", "page_tokens", "predictor", "predicted_ratio", "coverage_frac", "coverage_frac_max",
         "coverage_forced_frac", "prompts_count")),
    "calibration_rows": Plot(
        prr_figures.calibration_rows, "03_predictor", "calibration_rows.csv",
        "Coverage of the decode steps with parameters chosen from the last so many rows of the prefill, against the "
        "best of the candidates in hindsight.",
        "Two line charts over the number of rows: coverage rises a little and comes close to a dashed line.",
        ("method", "page_tokens", "rows_count", "coverage_frac", "coverage_frac_min", "coverage_frac_max",
         "best_coverage_frac", "prompts_count")),
    "shifts": Plot(
        prr_figures.shifts, "03_predictor", "shifts.csv",
        "Two abrupt shifts made from recorded traces. Left, the steps become those of another text: every predictor "
        "falls, the last step is back first, the EMA needs a few steps. Right, an attention sink moves: which share of "
        "heads expects it at its new place.",
        "Two line charts around a shift: coverage falls at once and recovers within a few steps but for static "
        "frequency; the share of heads that expect the moved sink rises from none to all within a few steps.",
        ("kind", "predictor", "step", "coverage_frac", "moved_frac", "prompts_count")),
    "dataflow": Plot(
        schematics.dataflow, "01_bottleneck", "dataflow.csv",
        "Two steps of one layer under dynamic sparse attention (the paper's Figure 2a, drawn anew). Attention waits "
        "for the selection, in every layer of every step, although most of what is selected was selected before.",
        "Drawing. Twice a row of boxes, new token, score, top K, attend, FFN, with arrows and a gap where attention "
        "waits; under each a row of blocks with the selected ones coloured, most of them the same in both.",
        ("model", "method", "context_tokens", "selection_frac", "attention_frac", "after_frac", "overlap_frac"), True),
    "stages": Plot(
        latency_figures.stages, "01_bottleneck", "stages.csv",
        "Where the time of a decode step goes (the paper's Figure 2b above, the authors' own kernel profile below). In "
        "both, selection grows with the context and the rest does not; how large a share it is differs.",
        "Stacked bars by context, Quest and InfLLM-v2: selection grows from left to right, attention and FFN stay; in "
        "the lower row the FFN is more than half of each bar.",
        ("profile", "per", "method", "context_tokens", "stage", "time_us"), True),
    "bounds": Plot(
        latency_figures.bounds, "01_bottleneck", "bounds.csv",
        "The most that could be saved, by Amdahl's law: if attention took no time at all, if it ran wholly beside the "
        "selection, and if nothing overlapped but the kernel were twice as fast.",
        "Four panels of lines over context. Above, from Figure 2b, between a fifth and two thirds faster; below, from "
        "the kernel profile, none above a fifth.",
        ("profile", "method", "context_tokens", "overlap_ratio", "hidden_ratio", "fast_ratio")),
    "utilization": Plot(
        latency_figures.utilization, "01_bottleneck", "utilization.csv",
        "How far SMs, L2 and DRAM are used in a decode step, by context at batch 1 (Figure 4) and by batch (Table 6). "
        "The paper says that all stay below 0.4.",
        "Four panels of three hollow lines: SM lowest, L2 highest; left all below a dashed line at 0.4, right L2 above "
        "it.",
        ("table", "method", "batch_count", "context_tokens", "sm_frac", "l2_frac", "dram_frac"), True),
    "budget": Plot(
        latency_figures.budget, "05_budget", "three_budgets.csv",
        "One step with too small a prediction, too large a one, and the largest that fits into selection (the paper's "
        "Figure 5, from published stage times). Too small leaves much to repair, too large keeps everything waiting.",
        "Three time lines of two rows: a short speculation and a long repair; a speculation far longer than selection; "
        "one that ends with it, and a short repair.",
        ("way", "stage", "stream", "start_us", "end_us", "predicted_ratio", "speedup_ratio", "profile", "method",
         "context_tokens", "order_index")),
    "tradeoff": Plot(
        latency_figures.tradeoff, "05_budget", "tradeoff.csv",
        "Speed-up against the size of the prediction: up to where speculation still fits into selection, more is "
        "better; past it, every block costs. The mark is what the budget chooses.",
        "Two panels of three lines that rise, bend at a marked point and fall.",
        ("method", "context_tokens", "predicted_ratio", "speedup_ratio", "chosen")),
    "teaser": Plot(
        latency_figures.teaser, "06_runtime", "teaser.csv",
        "One step in serial and by PRR (the paper's Figure 1, from published stage times): attention to the predicted "
        "blocks runs beside the selection; what is left is a short repair.",
        "Two time lines: selection, attention, FFN in turn; and selection with speculation below it, a sliver of "
        "repair, FFN, ending earlier.",
        ("way", "stage", "stream", "start_us", "end_us", "predicted_ratio", "speedup_ratio", "profile", "method",
         "context_tokens", "order_index")),
    "speedups": Plot(
        latency_figures.speedups, "06_runtime", "cells.csv",
        "Table 1's thirty cells for each method, and what the timeline gives for GLM-4-9B, the one model whose stage "
        "times are published: from Figure 2b and from the authors' kernel profile.",
        "Two panels, hollow marks by model between 1.25 and 1.65; beside GLM-4-9B two short filled lines, one about "
        "the highest marks and one far below all of them.",
        ("method", "model", "benchmark", "profile", "context_tokens", "speedup_ratio"), True),
    "baselines": Plot(
        latency_figures.baselines, "06_runtime", "baselines.csv",
        "What PRR is to be compared with, at 128K tokens, by the timeline. A faster kernel without any overlap is one "
        "of the bars; so is the last step's set at PRR's own size.",
        "Horizontal bars in four panels with their numbers: all that repair lie close together below the oracle, "
        "serial DSA with the faster kernel about halfway, S1 below one.",
        ("profile", "method", "context_tokens", "baseline", "speedup_ratio", "order_index")),
    "running": Plot(
        latency_figures.running, "06_runtime", "running.timing.csv",
        "PRR's step as it runs on a CPU: selection on one core and attention over the prediction on the other, beside "
        "its fair rival, sparse attention with both cores on each operator.",
        "Dot plot with a row for each model's shape and context, Quest and InfLLM-v2: sparse attention on both cores, "
        "PRR's union and PRR's exact mode, with a line at sparse attention on one thread.",
        ("model", "method", "context_tokens", "layers_count", "batch_count", "way", "run", "predicted_ratio",
         "one_ratio")),
    "controller": Plot(
        cycle_figures.agreement, "14_cycle_level", "attacc.csv",
        "The controller and its run-length form give AttAcc's cycles; M1 put into the study's formula does not, "
        "because a queue regroups rows and because hits fit into the time that a row stays open anyway.",
        "Two scatter charts over AttAcc's cycles: the controller's marks lie on the diagonal and at a ratio of one, "
        "the formula's mostly above it, a few many times.",
        ("attacc_cycles", "event_cycles", "event_ratio", "runs_cycles", "runs_ratio", "formula_cycles",
         "formula_ratio")),
    "per_row": Plot(
        cycle_figures.per_row, "14_cycle_level", "per_row.csv",
        "The formula charges a miss a whole row cycle and its hits on top. In truth the first few hits fit into the "
        "time the row must stay open, so the formula is right for one command a row and for many, and worst in "
        "between.",
        "Line chart of formula over exact cycles by commands per row, two presets: near one at the left end, a peak "
        "at a few commands, falling again to the right.",
        ("preset", "commands_per_row_count", "exact_cycles", "formula_ratio")),
    "reordering": Plot(
        cycle_figures.reordering, "14_cycle_level", "reordering.csv",
        "A queue that serves row hits first saves much where few rows come in turn, and nothing where a row is left "
        "for good. Refresh costs every pattern the same share but the one whose row never closes.",
        "Left, two marks a pattern: cycles of a command in order and through the queue, far apart for interleaved "
        "rows. Right, bars of the time that refresh adds, nearly equal.",
        ("pattern", "preset", "inorder_cycles", "queue_cycles", "refresh_ratio")),
    "study_points": Plot(
        cycle_figures.study_points, "14_cycle_level", "study_points.csv",
        "The study's own counts on AttAcc come out exactly when every command is issued once for each pseudo-channel. "
        "One command drives both; then a hit costs half, a row change as much as before, and the gain is larger.",
        "Dot plot with a row for each allocator and sequence: published rings around our squares, and our circles far "
        "to the left of them.",
        ("address_map", "allocator", "seq_id", "charged", "run_cycles"), True),
    "cycle_gains": Plot(
        cycle_figures.gains, "14_cycle_level", "gains.csv",
        "The gain over paged by the analytic M3 and in cycles of the controller: lower with a power limit, higher "
        "without one, and much lower only when every hit is charged twice.",
        "Dot plot of the gain of pim-aware and contiguous by way of counting, from charged twice on the left to "
        "unlimited power on the right.",
        ("allocator", "way", "gain_mean_ratio")),
    "gain_by": Plot(
        cycle_figures.gain_by, "14_cycle_level", "gain_by.csv",
        "The gain hardly depends on how long a sequence is, but on how long the engine has run: a young pool of free "
        "blocks still hands out neighbours.",
        "Two line charts of the gain of each allocator, solid in cycles and dotted analytic: nearly flat over sequence "
        "length, rising over the steps of the run until it settles; random lies below one.",
        ("allocator", "length_tokens", "step", "way", "gain_mean_ratio")),
    "compiled": Plot(
        kernel_figures.compiled, "04_kernels", "compiled.csv",
        "Registers of a thread and dynamic shared memory of a program of the attention kernel, for every head size and "
        "type on each target. Above the dashed lines a kernel would spill, or not start.",
        "Two rows of small panels, a column for each target: registers above and shared memory below, by head size, a "
        "mark for each type, with a dashed line for the most there is.",
        ("kernel", "dtype", "target", "triton", "dim_count", "registers_count_min", "registers_count_max",
         "shared_bytes_max", "spills_bytes_max")),
    "instructions": Plot(
        kernel_figures.instructions, "04_kernels", "instructions.csv",
        "What the instructions of each kernel are. Half-precision attention multiplies on tensor cores, float32 with "
        "multiply-adds. Most of the rest is addresses and masks.",
        "Stacked horizontal bars, one for each kernel and type: tensor core, multiply-add, special, global memory, "
        "shared memory, other.",
        ("kernel", "dtype", "target", "kind", "instructions_count", "instructions_frac")),
    "moved": Plot(
        kernel_figures.moved, "04_kernels", "moved.csv",
        "The bytes that each operator asks memory for, relative to the fewest that any implementation must move. What "
        "attention moves beyond them are the partial states of a list that is split.",
        "Horizontal bars with their numbers, one for each operator and shape, most a little longer than a dashed line "
        "at one; attention with more query heads than a program takes is twice as long.",
        ("operator", "dtype", "block_tokens", "listed_count", "group_count", "missed_count", "moved_ratio",
         "fewest_bytes")),
    "table3": Plot(
        kernel_figures.table3, "04_kernels", "gpu.timing.csv",
        "How much faster than FlashInfer's block-sparse attention the paper's kernel is, by budget and block size "
        "(its Table 3), and ours on GPUs whose times are recorded.",
        "Line chart: hollow marks rise from about one at the smallest budget to nearly four at the largest, nearly "
        "alike for all block sizes.",
        ("study", "against", "block_tokens", "budget_tokens", "speedup_ratio"), True),
    "likelihood": Plot(
        fidelity_figures.likelihood, "07_fidelity", "nll.csv",
        "Negative log-likelihood of the same tokens in every mode: left over dense attention, right over DSA with the "
        "same method and budget. PRR's exact mode is DSA; the union comes closer to dense attention, the more so the "
        "more was predicted.",
        "Dot plots with intervals, a panel for each method and budget: DSA lies right of dense attention, the unions "
        "left of DSA as their size grows, exact on the line of DSA.",
        ("text", "mode", "predicted_ratio", "method", "page_tokens", "budget_frac", "over_dense_nats",
         "over_dense_nats_min", "over_dense_nats_max", "over_dsa_nats", "over_dsa_nats_min", "over_dsa_nats_max",
         "scored_tokens", "prompt_tokens")),
    "errors": Plot(
        fidelity_figures.errors, "07_fidelity", "errors.csv",
        "The error that each mode makes in a layer's attention output, against dense attention of the same inputs. "
        "Some layers need nearly all of the context and some only a little of it.",
        "Four line charts over layers on a logarithmic axis, median above and 95th percentile below: DSA and reuse "
        "lie together, unions lower the more they predict, exact on DSA.",
        ("mode", "predicted_ratio", "method", "page_tokens", "budget_frac", "layer", "error_frac_p50",
         "error_frac_p95")),
    "needles": Plot(
        fidelity_figures.needles, "07_fidelity", "found.csv",
        "How many of the facts hidden in a long text the model still finds when its attention is restricted.",
        "Dot plots with intervals, a panel for each method and budget, and a dashed line for dense attention.",
        ("mode", "predicted_ratio", "method", "page_tokens", "budget_frac", "found_frac", "found_frac_min",
         "found_frac_max", "found_count", "prompts_count", "prompt_tokens")),
    "allocator_cost": Plot(
        upkeep_figures.cost, "13_allocator_cost", "cost.timing.csv",
        "What each allocator takes of every decode step, on the same operations. Ours are compiled, as the engine "
        "calls them; below them the study's own two, ported to plain Python.",
        "Horizontal bars on a logarithmic axis in two panels: all compiled ones below a microsecond when steady and a "
        "few when speculating, the study's pim-aware far longer than its paged.",
        ("workload", "allocator", "implementation", "step_time_us")),
    "allocator_worst": Plot(
        upkeep_figures.worst, "13_allocator_cost", "worst.timing.csv",
        "When no region is empty, the study looks through all of them. Bitmaps of regions with equal room find the "
        "roomiest in steps of 64.",
        "Two line charts over the number of regions: ours flat, the study's pim-aware rising in proportion.",
        ("operation", "allocator", "implementation", "regions_count", "time_ns")),
}
