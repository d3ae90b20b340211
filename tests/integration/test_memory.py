"""Memory stays within what the plan says, on a model of 0.9 B parameters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raymoe.bench.workloads import make_checkpoint
from raymoe.units import GIB

# A process of its own: the peak is one of the process, and the tests before left theirs.
JOB = """
import json, sys
from raymoe.bench.workloads import WORKLOADS, make_prompts
from raymoe.config import EngineConfig
from raymoe.device.host import peak_rss_bytes
from raymoe.engine.engine import Engine
from raymoe.plan.policy import Policy

prompts = make_prompts(WORKLOADS["W2"], 32000)
blocks = 64 * 21  # all rows at once, up to 672 tokens each
policy = Policy(
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_prefill_chunk_tokens=2048,
    num_kv_blocks=blocks,
)
with Engine.from_pretrained(sys.argv[1], EngineConfig(policy=policy)) as engine:
    rows = engine.generate(prompts, {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True})
    plan = engine.plan
print(json.dumps({
    "rows": sum(row.num_generated_tokens == 16 for row in rows),
    "peak_rss": peak_rss_bytes(),
    "weights": plan.footprint.bytes_of("weights"),
    "kv_cache": plan.footprint.bytes_of("KV cache"),
}))
"""


@pytest.mark.slow
def test_peak_memory_is_weights_and_kv_and_one_gib(tmp_path: Path) -> None:
    model = make_checkpoint("mixtral", tmp_path / "mixtral")
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(model)], capture_output=True, text=True, check=True
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["rows"] == 64, figures
    assert figures["weights"] < 2.1 * GIB, figures
    assert figures["peak_rss"] <= figures["weights"] + figures["kv_cache"] + GIB, figures
