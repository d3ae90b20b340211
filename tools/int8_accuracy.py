"""int8 against bfloat16 on prompts of yours: `python -m tools.int8_accuracy MODEL PROMPTS`.

PROMPTS is a text file with a prompt in each line. Printed are, over all tokens of the prompts, the
mean, 99th percentile and maximum of the KL divergence from the model in bfloat16, the share of
tokens whose most probable successor is the same, and the largest error of a logit; and the same of
bfloat16 against float32, if asked for: what rounding changes without int8.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from raymoe.device.threads import set_num_threads
from raymoe.memory.arena import HostArena
from raymoe.memory.int8_weights import Int8Weights, int8_model
from raymoe.memory.weights import Weights, WeightStore
from raymoe.model.decoder import Decoder
from raymoe.model.loading import decoder_arena_bytes
from raymoe.specs.model import ModelSpec
from tests.parity.driver import Driver
from tools.state_accuracy import divergence


def logits_of(
    directory: Path, prompts: list[list[int]], dtype: torch.dtype, *, is_int8: bool = False
) -> Tensor:
    """Logits of all tokens, one prompt after the other, [T, V] float32."""
    spec = ModelSpec.from_directory(directory)
    weights: Weights = WeightStore.open(spec, directory)
    if is_int8:
        int8 = int8_model(spec)
        spec, weights = int8, Int8Weights(weights, spec, int8)
    arena = HostArena(decoder_arena_bytes(spec, dtype, weights))
    decoder = Decoder.load(spec, weights, arena.allocate, dtype)
    rows = [Driver(decoder, [prompt], 0).run_step([(0, len(prompt))]) for prompt in prompts]
    arena.close()
    return torch.cat(rows).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=256, help="of a prompt, at most")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--float32", action="store_true", help="compare bfloat16 with float32 too")
    given = parser.parse_args()
    set_num_threads(given.num_threads)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    lines = [line for line in given.prompts.read_text().splitlines() if line.strip()]
    encoded = [tokenizer.encode(line)[: given.num_tokens] for line in lines[: given.num_prompts]]
    prompts = [tokens for tokens in encoded if tokens]
    print(f"{len(prompts)} prompts, {sum(map(len, prompts)):,} tokens", flush=True)
    bf16_TV = logits_of(given.model, prompts, torch.bfloat16)
    int8_TV = logits_of(given.model, prompts, torch.bfloat16, is_int8=True)
    print(f"int8 against bfloat16: {divergence(int8_TV, bf16_TV)}", flush=True)
    if given.float32:
        exact_TV = logits_of(given.model, prompts, torch.float32)
        print(f"bfloat16 against float32: {divergence(bf16_TV, exact_TV)}", flush=True)
        print(f"int8 against float32: {divergence(int8_TV, exact_TV)}", flush=True)


if __name__ == "__main__":
    main()
