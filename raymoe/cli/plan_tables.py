"""A plan for people: its policy, memory and prediction, and what a pass looks like."""

from collections.abc import Iterable, Iterator

from rich.table import Table

from raymoe.plan.device_pass import KV_BLOCK_TOKENS, DevicePass, StreamedPasses
from raymoe.plan.plan import RESOURCE_NAMES, Plan
from raymoe.plan.policy import DevicePolicy, Footprint
from raymoe.schedule.draw import draw_text
from raymoe.schedule.timeline import Timeline, middle_layers
from raymoe.units import format_bytes, format_seconds

Row = tuple[str, str]
GANTT_LAYERS = 2  # two kinds of layers may take turns
AROUND_LANE = 20  # letters: the longest name of a lane, its frame and busy share


def policy_table(plan: Plan) -> Table:
    """How a run is cut."""
    return _two_columns("policy", _policy_rows(plan))


def memory_table(plan: Plan) -> Table:
    """What needs what, in each memory, beside what there is."""
    table = Table(title="memory")
    table.add_column("where")
    table.add_column("for what")
    table.add_column("size", justify="right")
    hardware = plan.hardware
    if plan.device_footprint is not None:
        _add_memory(table, plan.device_footprint, hardware.gpu_memory_bytes)
    _add_memory(table, plan.footprint, hardware.host_memory_bytes)
    return table


def prediction_table(plan: Plan, price_per_hour: float | None) -> Table:
    """What the job will take; its cost where the price of the node is known."""
    return _two_columns("prediction", _prediction_rows(plan, price_per_hour))


def gantt(decode: Timeline, width: int) -> str:
    """The layers in the middle of a decode pass as text of at most so many letters a line."""
    few, shown, num_layers = middle_layers(decode, GANTT_LAYERS)
    title = (
        f"{shown} of the {num_layers} layers of a decode pass, which takes "
        f"{format_seconds(decode.makespan_s)}"
    )
    few = Timeline("", few.spans)
    return f"{title}\n{draw_text([few], columns=max(1, width - AROUND_LANE))}"


def _policy_rows(plan: Plan) -> Iterator[Row]:
    policy = plan.policy
    if plan.num_ranks > 1:
        yield "tensor parallel", f"{plan.num_ranks} GPUs share each pass; sizes are of one"
    yield "schedule", plan.schedule
    yield "batch", f"{policy.batch_size:,} sequences"
    yield (
        "pass",
        f"{policy.pass_tokens:,} tokens, {policy.prefill_chunk_tokens:,} of a prompt at most",
    )
    yield "KV cache", f"{policy.num_kv_blocks:,} blocks of {KV_BLOCK_TOKENS} tokens"
    if isinstance(plan.passes, DevicePass):
        yield from _device_rows(plan.passes.passes)


def _device_rows(passes: StreamedPasses) -> Iterator[Row]:
    device, share = passes.device, 100 * passes.cpu_attention_fraction
    yield "waves of a pass", str(passes.num_waves)
    if passes.schedule == "waves":  # the others fix these themselves
        yield "waves that attend ahead", str(device.look_ahead)
        yield "experts run", _group(device)
    yield "decode attention", f"{share:.0f} % on the CPU, {100 - share:.0f} % on the GPU"
    cut = passes.cut
    rest = f"the rest in pages of {format_bytes(cut.page_length)}"
    kept = f"{format_bytes(cut.resident_bytes)} resident"
    yield "weights", f"{kept}, {rest if cut.streamed_bytes else 'which is all of them'}"


def _group(device: DevicePolicy) -> str:
    if device.waves_per_group >= device.num_waves:
        return "once for the pass"
    return f"every {device.waves_per_group} waves" if device.waves_per_group > 1 else "every wave"


def _prediction_rows(plan: Plan, price_per_hour: float | None) -> Iterator[Row]:
    job = plan.job
    yield "decoding is bound by", RESOURCE_NAMES[plan.bound]
    yield "prefill", f"{plan.prefill_tokens_per_s:,.1f} prompt tokens/s"
    yield "decode", f"{plan.decode_tokens_per_s:,.1f} tokens/s"
    yield "end to end", f"{plan.tokens_per_s:,.1f} generated tokens/s"
    yield "the job", f"{format_seconds(job.seconds)} in {job.num_passes:,.0f} passes"
    if price_per_hour is not None:
        million = plan.cost_per_million_tokens(price_per_hour)
        yield "cost", f"{million:.3g} per million generated tokens"
        yield "cost of the job", f"{price_per_hour * job.seconds / 3600:.3g}"


def _two_columns(title: str, rows: Iterable[Row]) -> Table:
    table = Table(title=title, show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def _add_memory(table: Table, footprint: Footprint, available_bytes: int) -> None:
    for index, (purpose, num_bytes) in enumerate(footprint.parts):
        table.add_row("" if index else footprint.memory, purpose, format_bytes(num_bytes))
    table.add_row("", "total", format_bytes(footprint.total), style="bold")
    table.add_row("", "available", format_bytes(available_bytes), end_section=True)
