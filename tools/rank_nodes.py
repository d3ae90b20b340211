"""Rank nodes for models, and plan models in demand for nodes.

`python -m tools.rank_nodes [costs|rates] [--write]` prints the tables of a kind, or of both.
`costs` runs `raymoe plan --model NAME --prompt-len 512 --gen-len 128 --num-rows 100000
--max-context 2048 --json` for each model. `rates` plans the same rows of models in demand for five
GPUs and three sizes of host memory. `--write` puts the tables into docs/nodes.md.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymoe.specs.hardware import HARDWARE_PRESETS, USABLE_FRACTION
from raymoe.units import GIB

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "tests" / "data" / "published_models.json"
PROMPT_TOKENS, GENERATED_TOKENS, NUM_ROWS = 512, 128, 100_000
MAX_CONTEXT = 2048
API_PRICES = "OpenRouter, August 2026, by the list of pydantic/genai-prices (98e606a)"
SHOWN = 3
GPUS, HOST_GIB = ("l4", "a5000", "l40s", "4090", "h100"), (128, 256, 512)
DEMANDED = f"| model | GiB | {' | '.join(GPUS)} | published, one GPU |"
BOUNDS = {"htod": "link", "dtoh": "link", "cpu": "cores", "gpu": "GPU"}


@dataclass(frozen=True, slots=True)
class Model:
    """Dollars per million prompt and generated tokens of the API."""

    title: str
    published: str
    api_prompt: float
    api_generated: float
    options: tuple[str, ...] = ()

    @property
    def api(self) -> float:
        """Dollars per million generated tokens with their prompts."""
        return self.api_generated + self.api_prompt * PROMPT_TOKENS / GENERATED_TOKENS


MODELS = (
    Model("gpt-oss-120b, MXFP4", "openai/gpt-oss-120b", 0.039, 0.18),
    Model("Qwen3-30B-A3B, FP8", "qwen3-30b-a3b", 0.08, 0.29, ("--weights", "fp8")),
    Model(
        "Mistral-Small-4, FP8",
        "mistralai/Mistral-Small-4-119B-2603",
        0.15,
        0.60,
        ("--weights", "fp8"),
    ),
    Model("DeepSeek-V4-Flash, FP8 + FP4", "deepseek-ai/DeepSeek-V4-Flash", 0.0983, 0.1966),
    Model("Mixtral-8x7B, bfloat16", "mixtral-8x7b", 0.24, 0.24),
    Model("Kimi-K2.5, INT4", "moonshotai/Kimi-K2.5", 0.40, 1.90),
)


@dataclass(frozen=True, slots=True)
class Demanded:
    """A model in demand, and the best figure that others published for one GPU.

    Attributes:
        best: Tokens per second and where they were published; empty if none was found.
    """

    title: str
    published: str
    best: str
    options: tuple[str, ...] = ()


IN_DEMAND = (
    Demanded(
        "DeepSeek-V4-Flash, FP8 + FP4",
        "deepseek-ai/DeepSeek-V4-Flash",
        "65.6, 8 requests, 5090 (FreeToken#444)",
    ),
    Demanded("Ling-3.0-flash, MXFP4", "inclusionAI/Ling-3.0-flash", "", ("--weights", "mxfp4")),
    Demanded(
        "GLM-5.3-Flash, NVFP4",
        "zai-org/GLM-5.3-Flash",
        "16.8, 1 request, 5090 (FreeToken#292)",
        ("--weights", "nvfp4"),
    ),
    Demanded(
        "Qwen3.8-Flash-Next, NVFP4",
        "Qwen/Qwen3.8-Flash-Next",
        "65, 1 request, 5090 (FreeToken#257)",
        ("--weights", "nvfp4"),
    ),
    Demanded("Kolibri-1, FP8", "Aleph-Alpha/Kolibri-1", ""),
)


def config_of(published: str) -> str:
    """The configuration of a published model as JSON."""
    configs = {each["name"]: each["config"] for each in json.loads(PUBLISHED.read_text())}
    return json.dumps(configs[published])


def ranking(model: Model) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        name = model.published
        if "/" in name:  # else a short name
            (Path(directory) / "config.json").write_text(config_of(name))
            name = directory
        job = ("--prompt-len", str(PROMPT_TOKENS), "--gen-len", str(GENERATED_TOKENS),
               "--max-context", str(MAX_CONTEXT))  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "raymoe", "plan", "--model", name, *job, "--num-rows",
             str(NUM_ROWS), *model.options, "--json"],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rate(model: Demanded, gpu: str, host_gib: int) -> str:
    """Tokens per second on a node and what binds; a dash where the model does not fit.

    That of steps full of prompts or of decoding, whichever would take longer for all rows.
    """
    memory = int(USABLE_FRACTION * host_gib * GIB)
    node = dataclasses.replace(HARDWARE_PRESETS[gpu], host_memory_bytes=memory)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(config_of(model.published))
        node.to_file(Path(directory) / "node.json")
        done = subprocess.run(
            [sys.executable, "-m", "raymoe", "plan", "--model", directory, "--hardware",
             f"{directory}/node.json", "--prompt-len", str(PROMPT_TOKENS), "--gen-len",
             str(GENERATED_TOKENS), "--num-rows", str(NUM_ROWS), "--max-context",
             str(MAX_CONTEXT), *model.options, "--json"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode and "short)" in done.stderr:
        return "-"
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    prompts_s = PROMPT_TOKENS / found["prefill_tokens_per_s"]
    is_of_prompts = prompts_s > GENERATED_TOKENS / found["decode_tokens_per_s"]
    bound = BOUNDS[found["prompt_bound" if is_of_prompts else "bound"]]
    return f"{found['tokens_per_s']:,.0f} {'fits' if found['schedule'] == 'resident' else bound}"


def rates(models: tuple[Demanded, ...] = IN_DEMAND) -> str:
    lines = [DEMANDED, f"|{'---|' * (len(GPUS) + 3)}"]
    for model in models:
        for host_gib in HOST_GIB:
            print(f"planning {model.title} with {host_gib} GiB", file=sys.stderr)
            cells = [rate(model, gpu, host_gib) for gpu in GPUS]
            lines.append(f"| {model.title} | {host_gib} | {' | '.join(cells)} | {model.best} |")
    return "\n".join(lines)


def short_row(model: Model, found: dict[str, Any]) -> str:
    offers = [offer for offer in found["offers"] if "problem" not in offer]
    nodes = [_node(offer) for offer in offers[:SHOWN]]
    spot = [offer for offer in offers if offer["spot_cost_per_million_tokens"] is not None]
    best = min(spot, key=lambda offer: offer["spot_cost_per_million_tokens"], default=None)
    pipeline = next((note for note in found["notes"] if "in a pipeline" in note), "")
    cells = [
        ", ".join(nodes) or "none; pipeline of " + pipeline.split(" hold ")[0].split(" (")[0],
        "" if best is None else f"{best['node']} {best['spot_cost_per_million_tokens']:.2f}",
        f"{model.api:.2f} ({PROMPT_TOKENS // GENERATED_TOKENS} x {model.api_prompt} + "
        f"{model.api_generated})",
    ]
    return f"| {model.title} | {' | '.join(cells)} |"


def _node(offer: dict[str, Any]) -> str:
    fits = "*" if offer["schedule"] == "resident" else ""
    return f"{offer['node']}{fits} {offer['cost_per_million_tokens']:.2f}"


SHORT = "| model | cheapest on demand | spot | API |"


def replace_table(path: Path, header: str, table: str) -> None:
    """Put `table` in place of the one with this header, which ends before an empty line."""
    before, after = path.read_text().split(header + "\n")
    path.write_text(f"{before}{table}\n\n{after.split(chr(10) * 2, 1)[1]}")


def costs() -> str:
    """The table of costs; prints where prices come from."""
    rows, found = [], {}
    for model in MODELS:
        print(f"planning {model.title}", file=sys.stderr)
        found = ranking(model)
        rows.append(short_row(model, found))
    prices = found["prices"]
    print(f"Prices: {prices['source']} ({prices['date']}). API: {API_PRICES}.\n")
    return "\n".join([SHORT, "|---|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", nargs="?", choices=["costs", "rates"])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    kinds = [arguments.kind] if arguments.kind else ["costs", "rates"]
    tables = []
    if "costs" in kinds:
        tables.append((SHORT, costs()))
    if "rates" in kinds:
        tables.append((DEMANDED, rates()))
    print("\n\n".join(table for _, table in tables))
    if arguments.write:
        for header, table in tables:
            replace_table(ROOT / "docs" / "nodes.md", header, table)


if __name__ == "__main__":
    main()
