"""States in bfloat16 against float32: `python -m tools.state_accuracy`.

Random models of Gated DeltaNet and Mamba-2 see the same random tokens. Their decays are those that
the authors' code begins with: A of 0 to 16 and steps of time of 0.001 to 0.1, so that the slowest
heads remember thousands of tokens; logits have a standard deviation of 3. Printed are the mean,
99th percentile and maximum of the KL divergence from float32, the share of tokens whose most
probable successor is the same, and the largest error of a logit.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from raymoe.device.threads import set_num_threads
from tests.parity.driver import Driver, load_decoder

VOCABULARY, HIDDEN = 512, 256
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65_536,
    "initializer_range": HIDDEN**-0.5,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": _SHARED | {
        "layer_types": 2 * (3 * ["linear_attention"] + ["full_attention"]), "head_dim": 64,
        "num_experts": 16, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "granitemoehybrid": _SHARED | {
        "layer_types": 2 * (3 * ["mamba"] + ["attention"]), "num_local_experts": 16,
        "intermediate_size": 128, "shared_intermediate_size": 128,
        "mamba_n_heads": 8, "mamba_d_state": 128, "mamba_d_head": 64,
    },
}  # fmt: skip


def make_model(family: str, directory: Path) -> None:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **MODELS[family])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(0, 16).clamp_(min=1e-3).log_()
        elif name.endswith("dt_bias"):
            step = torch.empty_like(parameter).uniform_(-3, -1).mul(2.302585).exp()
            parameter.data = step.expm1().log()  # softplus gives the step
    model.get_input_embeddings().weight.data *= HIDDEN**0.5  # to a deviation of 1
    model.lm_head.weight.data *= 3 * getattr(config, "logits_scaling", 1.0)
    model.save_pretrained(directory)


def logits_of(
    directory: Path, tokens: list[int], chunk: int, state_dtype: str, dtype: torch.dtype
) -> Tensor:
    """Logits [T, V] of a sequence that is computed in steps of `chunk` tokens."""
    driver = Driver(load_decoder(directory, dtype, state_dtype), [tokens], 0)
    ends = range(chunk, len(tokens) + chunk, chunk)
    rows = [driver.run_step([(end - chunk, min(end, len(tokens)))]) for end in ends]
    return torch.cat(rows).float()


def divergence(logits_TV: Tensor, exact_TV: Tensor) -> str:
    log_p, log_q = exact_TV.double().log_softmax(1), logits_TV.double().log_softmax(1)
    kl_T = (log_p.exp() * (log_p - log_q)).sum(1)
    same = (logits_TV.argmax(1) == exact_TV.argmax(1)).double().mean()
    second_half = kl_T[len(kl_T) // 2 :].mean()
    return (
        f"KL {kl_T.mean():.2e} (second half {second_half:.2e}, 99 % {kl_T.quantile(0.99):.2e}, "
        f"max {kl_T.max():.2e}), same token {same:.2%}, "
        f"largest error of a logit {(logits_TV - exact_TV).abs().max():.3f}"
    )


def compare(family: str, num_tokens: int) -> None:
    tokens = torch.randint(VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as directory:
        make_model(family, Path(directory))

        def logits(chunk: int, state_dtype: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return logits_of(Path(directory), tokens.tolist(), chunk, state_dtype, dtype)

        exact_TV = logits(512, "float32")
        print(f"{family}: deviation of logits {exact_TV.std():.2f}", flush=True)
        for name, found_TV in (
            ("float32, states in bfloat16, steps of 512", logits(512, "bfloat16")),
            ("bfloat16, states in float32, steps of 512", logits(512, "float32", torch.bfloat16)),
            ("float32, states in bfloat16, steps of 1", logits(1, "bfloat16")),
        ):
            print(f"  {name}: {divergence(found_TV, exact_TV)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--num-tokens", type=int, default=8192)
    parser.add_argument("--family", choices=MODELS, action="append")
    given = parser.parse_args()
    set_num_threads(given.num_threads)
    for family in given.family or MODELS:
        compare(family, given.num_tokens)


if __name__ == "__main__":
    main()
