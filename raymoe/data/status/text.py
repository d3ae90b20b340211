"""The status of an actor in one line, for logs."""

from raymoe.data.status.history import recent_rate
from raymoe.data.status.record import ActorStatus


def actor_line(status: ActorStatus) -> str:
    """Rows, speed, what is full, and how right the plan is."""
    rows, engine = status.rows, status.engine
    parts = [f"{rows.num_rows:,} rows"]
    if rows.num_error_rows:
        parts.append(f"{rows.num_error_rows:,} error rows")
    rate = recent_rate(status.history, "num_generated_tokens")
    if rate is not None:
        parts.append(f"{rate:,.0f} tokens/s")
    if engine is not None:
        parts += [
            f"pool {100 * engine.pool_fill:.0f} %",
            f"KV {100 * engine.kv_use:.0f} %",
            f"{engine.num_queued_rows:,} rows wait",
        ]
        if engine.num_preemptions:
            parts.append(f"{engine.num_preemptions:,} preemptions")
        if engine.predicted_s:
            parts.append(f"passes {engine.busy_s / engine.predicted_s:.2f} x as predicted")
    return " | ".join(parts)
