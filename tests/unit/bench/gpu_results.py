"""Results of parts that nobody measured, for tests of tables and files."""

from dataclasses import replace

from raymoe.bench.gpu.settings import (
    BusyShares,
    Figures,
    NodeSettings,
    PartResult,
    PartSettings,
    PredictedFigures,
    Status,
)

SETTINGS = PartSettings(
    node=NodeSettings(device="emulated", hardware="l4", device_memory_bytes=16 << 30),
    shape="mixtral-8x7b",
    num_layers=16,
    workload="mtbench-64",
    contender="raymoe",
    limit_s=540.0,
    max_rows=8192,
)
FIGURES = Figures(
    schedule="micro_batches",
    policy="planner",
    num_rows=10,
    prompt_tokens=770,
    generated_tokens=640,
    prefill_s=1.0,
    total_s=4.0,
    load_s=70.0,
    num_measured_steps=63,
    pinned_bytes_per_s=12.0e9,
    bound_s=3.0,
    limit="link",
    device_peak_bytes=1 << 30,
    peak_rss_bytes=1 << 30,
    model=PredictedFigures(
        predicted_s=3.2,
        steps_predicted_s=3.1,
        steps_measured_s=3.9,
        link_bytes_per_s=9.0e9,
        busy=BusyShares(gpu=0.5, cpu=0.25, htod=0.9, dtoh=0.0),
        kernel_share=0.44,
        plan="two\nlines",
    ),
)


def result(
    contender: str, figures: Figures | None = FIGURES, *, reason: str = "", **settings: object
) -> PartResult:
    chosen = replace(SETTINGS, contender=contender, **settings)
    return PartResult(
        key=chosen.key,
        settings=chosen,
        status=Status.FAILED if reason else Status.DONE,
        reason=reason,
        whole_layers=32,
        date="2026-01-02T03:04:05+00:00",
        device_name="a device",
        versions="torch 2",
        figures=figures,
    )
