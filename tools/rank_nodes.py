"""Rank nodes for five models: `python -m tools.rank_nodes [--write]` prints two tables.

It runs `raymoe plan --model DIR --prompt-len 512 --gen-len 128 --num-rows 10000000 --max-context
4096 --json` for each. The first table is that of docs/nodes.md, the second that of RESULTS.md, and
`--write` puts them there.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "tests" / "data" / "published_models.json"
PROMPT_TOKENS, GENERATED_TOKENS, NUM_ROWS = 512, 128, 10_000_000
MAX_CONTEXT = 4096
API_PRICES = "OpenRouter, August 2026, by the list of pydantic/genai-prices (98e606a)"
SHOWN = 3


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
    Model("Gemma-4-26B-A4B, NVFP4", "nvidia/Gemma-4-26B-A4B-NVFP4", 0.06, 0.33),
    Model(
        "Mistral-Small-4, FP8",
        "mistralai/Mistral-Small-4-119B-2603",
        0.15,
        0.60,
        ("--weights", "fp8"),
    ),
    Model("MiniMax-M2.5, NVFP4", "nvidia/MiniMax-M2.5-NVFP4", 0.15, 0.90),
    Model("Kimi-K2.5, INT4", "moonshotai/Kimi-K2.5", 0.40, 1.90),
)


def ranking(model: Model) -> dict[str, Any]:
    configs = {each["name"]: each["config"] for each in json.loads(PUBLISHED.read_text())}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(configs[model.published]))
        job = ("--prompt-len", str(PROMPT_TOKENS), "--gen-len", str(GENERATED_TOKENS),
               "--max-context", str(MAX_CONTEXT))  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "raymoe", "plan", "--model", directory, *job, "--num-rows",
             str(NUM_ROWS), *model.options, "--json"],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def short_row(model: Model, found: dict[str, Any]) -> str:
    offers = [offer for offer in found["offers"] if "problem" not in offer]
    nodes = [_node(offer) for offer in offers[:SHOWN]]
    spot = [offer for offer in offers if offer["spot_cost_per_million_tokens"] is not None]
    best = min(spot, key=lambda offer: offer["spot_cost_per_million_tokens"], default=None)
    pipeline = next((note for note in found["notes"] if "in a pipeline" in note), "")
    cells = [
        ", ".join(nodes) or "none; pipeline of " + pipeline.split(" hold ")[0].split(" (")[0],
        "" if best is None else f"{best['node']} {best['spot_cost_per_million_tokens']:.2f}",
        f"{model.api:.2f}",
    ]
    return f"| {model.title} | {' | '.join(cells)} |"


def _node(offer: dict[str, Any]) -> str:
    fits = "*" if offer["schedule"] == "resident" else ""
    return f"{offer['node']}{fits} {offer['cost_per_million_tokens']:.2f}"


def long_rows(model: Model, found: dict[str, Any]) -> Iterator[str]:
    for offer in found["offers"]:
        if "problem" in offer:
            continue
        spot = offer["spot_cost_per_million_tokens"]
        cells = (
            model.title,
            offer["node"],
            f"{offer['tokens_per_s']:,.0f}",
            f"{offer['cost_per_million_tokens']:.2f}",
            "" if spot is None else f"{spot:.2f}",
            f"{offer['seconds'] / 86_400:,.1f}",
            "fits the GPU" if offer["schedule"] == "resident" else offer["bound"],
        )
        yield f"| {' | '.join(cells)} |"
    for note in found["notes"]:
        if "in a pipeline" in note:
            yield f"| {model.title} | {note.rstrip('.')} | | | | | |"


SHORT = "| model | cheapest on demand | spot | API |"
LONG = "| model | node | tokens/s | $/M | spot $/M | days | bound by |"


def replace_table(path: Path, header: str, table: str) -> None:
    """Put `table` in place of the one with this header, which ends before an empty line."""
    before, after = path.read_text().split(header + "\n")
    path.write_text(f"{before}{table}\n\n{after.split(chr(10) * 2, 1)[1]}")


def main() -> None:
    found = {}
    for model in MODELS:
        print(f"planning {model.title}", file=sys.stderr)
        found[model] = ranking(model)
    short = [SHORT, "|---|---|---|---|", *(short_row(*each) for each in found.items())]
    long = [LONG, "|---|---|---|---|---|---|---|"]
    long += [row for each in found.items() for row in long_rows(*each)]
    prices = next(iter(found.values()))["prices"]
    print(f"Prices: {prices['source']} ({prices['date']}). API: {API_PRICES}.\n")
    print("\n".join([*short, "", *long]))
    if "--write" in sys.argv:
        replace_table(ROOT / "docs" / "nodes.md", SHORT, "\n".join(short))
        replace_table(ROOT / "raymoe" / "bench" / "RESULTS.md", LONG, "\n".join(long))


if __name__ == "__main__":
    main()
