"""Tiny random models of every family, odd ones included, and what transformers generates by them.

Weights are drawn wide (`initializer_range` 0.3), so that decisions are clear and rounding does not
take them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

MAX_NEW_TOKENS = 48
NUM_PROMPTS = 24
PROMPT_LENGTHS = (1, 33, 9, 70, 32, 47)
FAMILY_CONFIGS = {
    "mixtral": "MixtralConfig",
    "qwen2_moe": "Qwen2MoeConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "olmoe": "OlmoeConfig",
    "llama": "LlamaConfig",
    "qwen3": "Qwen3Config",
    "mistral": "MistralConfig",
}

LINEAR = {"rope_type": "linear", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def longrope(head_dim: int) -> dict[str, Any]:
    """Scaling whose long factors begin at 40 tokens."""
    half = head_dim // 2
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.01 * i for i in range(half)],
        "long_factor": [1.5 + 0.25 * i for i in range(half)],
        "original_max_position_embeddings": 40,
        "factor": 4.0,
    }


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One random model.

    Attributes:
        name: Family, then what is odd about it.
        fields: Of the configuration class.
    """

    name: str
    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


_BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
_QWEN2 = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
}
_QWEN3 = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "head_dim": 16,
    "norm_topk_prob": True,
}
_OLMOE = {"num_experts": 6, "num_experts_per_tok": 3}
_DENSE = {"head_dim": 16}

_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "mixtral": (
        _MIXTRAL,
        {
            "plain": {},
            "sliding window, 5 experts, top-3": {
                "sliding_window": 11,
                "num_local_experts": 5,
                "num_experts_per_tok": 3,
            },
            "wide heads, tied, vocabulary 201": {
                "head_dim": 24,
                "tie_word_embeddings": True,
                "vocab_size": 201,
            },
            "top-1, yarn": {"num_experts_per_tok": 1, "rope_parameters": YARN},
            "dynamic rope": {"rope_parameters": DYNAMIC, "max_position_embeddings": 48},
            "longrope": {"rope_parameters": longrope(16), "head_dim": 16},
            "gelu, one KV head, 3 layers": {
                "hidden_act": "gelu",
                "num_key_value_heads": 1,
                "num_hidden_layers": 3,
            },
        },
    ),
    "qwen2_moe": (
        _QWEN2,
        {
            "plain": {},
            "dense first layer, sparse step 2": {
                "num_hidden_layers": 4,
                "mlp_only_layers": [0],
                "decoder_sparse_step": 2,
            },
            "windows below layer 2, renormalised": {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 2,
                "num_hidden_layers": 3,
                "norm_topk_prob": True,
            },
            "no qkv bias, tied, top-1": {
                "qkv_bias": False,
                "tie_word_embeddings": True,
                "num_experts_per_tok": 1,
            },
            "llama3 rope, 5 experts, top-3": {
                "rope_parameters": LLAMA3,
                "num_experts": 5,
                "num_experts_per_tok": 3,
            },
            "linear rope, wide heads, vocabulary 77": {
                "rope_parameters": LINEAR,
                "head_dim": 32,
                "vocab_size": 77,
            },
            "layer types": {
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": ["full_attention", "sliding_attention"],
            },
        },
    ),
    "qwen3_moe": (
        _QWEN3,
        {
            "plain": {},
            "attention bias, 5 experts, top-1": {
                "attention_bias": True,
                "num_experts": 5,
                "num_experts_per_tok": 1,
            },
            "sliding window, not renormalised, top-3": {
                "use_sliding_window": True,
                "sliding_window": 10,
                "norm_topk_prob": False,
                "num_experts_per_tok": 3,
            },
            "dense layers, tied": {
                "mlp_only_layers": [1],
                "num_hidden_layers": 3,
                "tie_word_embeddings": True,
            },
            "yarn, heads of 8": {"rope_parameters": YARN, "head_dim": 8},
            "longrope, MHA": {
                "rope_parameters": longrope(16),
                "num_key_value_heads": 6,
            },
        },
    ),
    "olmoe": (
        _OLMOE,
        {
            "plain": {},
            "clipped qkv, top-1": {"clip_qkv": 0.7, "num_experts_per_tok": 1},
            "GQA, attention bias, renormalised": {
                "num_key_value_heads": 3,
                "attention_bias": True,
                "norm_topk_prob": True,
            },
            "dynamic rope, 5 experts": {
                "rope_parameters": DYNAMIC,
                "max_position_embeddings": 40,
                "num_experts": 5,
            },
            "linear rope, tied": {"rope_parameters": LINEAR, "tie_word_embeddings": True},
            "llama3 rope, vocabulary 123": {"rope_parameters": LLAMA3, "vocab_size": 123},
        },
    ),
    "llama": (
        _DENSE,
        {
            "plain": {},
            "attention and mlp bias": {"attention_bias": True, "mlp_bias": True},
            "llama3 rope, tied": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
            "linear rope, heads of 40": {"rope_parameters": LINEAR, "head_dim": 40},
            "dynamic rope": {"rope_parameters": DYNAMIC, "max_position_embeddings": 44},
            "yarn, mscale, not truncated": {
                "rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}
            },
            "longrope, tanh gelu": {
                "rope_parameters": longrope(16),
                "hidden_act": "gelu_pytorch_tanh",
            },
        },
    ),
    "qwen3": (
        _DENSE,
        {
            "plain": {},
            "windows from layer 1": {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
            },
            "attention bias, tied": {"attention_bias": True, "tie_word_embeddings": True},
            "yarn with attention factor": {"rope_parameters": YARN | {"attention_factor": 1.3}},
            "dynamic rope, one KV head": {
                "rope_parameters": DYNAMIC,
                "max_position_embeddings": 48,
                "num_key_value_heads": 1,
            },
            "linear rope, vocabulary 151": {"rope_parameters": LINEAR, "vocab_size": 151},
        },
    ),
    "mistral": (
        _DENSE | {"sliding_window": None},
        {
            "plain": {},
            "sliding window": {"sliding_window": 12},
            # Not a window of 1: the cache of transformers then drops nothing (keys[-1 + 1 :]), and
            # its tokens differ from those that it generates without a cache.
            "window of 2, tied": {"sliding_window": 2, "tie_word_embeddings": True},
            "llama3 rope, relu": {"rope_parameters": LLAMA3, "hidden_act": "relu"},
            "longrope, MHA": {"rope_parameters": longrope(16), "num_key_value_heads": 6},
            "heads of 8, window, yarn": {
                "head_dim": 8,
                "sliding_window": 20,
                "rope_parameters": YARN,
            },
        },
    ),
}

CONFIGURATIONS = [
    Configuration(
        name=f"{family}: {variant}", family=family, fields=_BASE | common | differences, seed=seed
    )
    for family, (common, variants) in _VARIANTS.items()
    for seed, (variant, differences) in enumerate(variants.items())
]


def first_of_each_family() -> list[Configuration]:
    """One plain configuration per family, for tests that need variety and not every oddity."""
    families: dict[str, Configuration] = {}
    for configuration in CONFIGURATIONS:
        families.setdefault(configuration.family, configuration)
    return list(families.values())


def make_model(configuration: Configuration) -> PreTrainedModel:
    """The random model in transformers: float32, eager attention, biases and norms random too."""
    config_class = getattr(transformers, FAMILY_CONFIGS[configuration.family])
    config = config_class(**configuration.fields, attn_implementation="eager")
    with torch.random.fork_rng():
        torch.manual_seed(configuration.seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
            elif "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    # Greedy, whatever the defaults of the configuration class.
    model.generation_config = GenerationConfig(do_sample=False, use_cache=True)
    return model.eval()


def make_checkpoint(configuration: Configuration, directory: Path) -> PreTrainedModel:
    """Save the random model to `directory` as transformers does; return it for comparison."""
    model = make_model(configuration)
    model.save_pretrained(directory)
    return model


def make_prompts(configuration: Configuration, num_prompts: int = NUM_PROMPTS) -> list[list[int]]:
    """Random prompts, shorter and longer than windows, blocks and the borders of ropes."""
    generator = torch.Generator().manual_seed(1000 + configuration.seed)
    vocabulary = configuration.fields["vocab_size"]
    return [
        torch.randint(
            vocabulary, (PROMPT_LENGTHS[index % len(PROMPT_LENGTHS)],), generator=generator
        ).tolist()
        for index in range(num_prompts)
    ]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Prompts, and the greedy tokens that transformers generates for each alone."""

    prompts: list[list[int]]
    tokens: list[list[int]]


def make_reference(
    model: PreTrainedModel,
    configuration: Configuration,
    num_prompts: int = NUM_PROMPTS,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> Reference:
    """Reference rows in which no decision is a tie.

    Where the two best tokens, or the last expert chosen and the first not chosen, are closer than
    float32 rounding, no implementation can be expected to agree with another; such rows (a few in
    a hundred) are replaced by others.
    """
    candidates = make_prompts(configuration, num_prompts + 2 * len(PROMPT_LENGTHS))
    with Gaps(model) as gaps:
        tokens = _generate(model, candidates, max_new_tokens, gaps)
    clear = [index for index, gap in enumerate(gaps.of_rows) if gap > 1.0][:num_prompts]
    assert len(clear) == num_prompts, f"only {len(clear)} rows of {configuration.name} are clear"
    return Reference(
        prompts=[candidates[index] for index in clear], tokens=[tokens[index] for index in clear]
    )


def reference_tokens(
    model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int = MAX_NEW_TOKENS
) -> list[list[int]]:
    """Greedy tokens of transformers for each prompt alone, ties and all."""
    with Gaps(model) as gaps:
        return _generate(model, prompts, max_new_tokens, gaps)


class Gaps:
    """How clear the decisions of a model were, by hooks on its head and its routers.

    Attributes:
        of_rows: Smallest gap of each row, in units of what counts as clear.
    """

    TOKEN_GAP, EXPERT_GAP = 3e-4, 1e-4

    def __init__(self, model: PreTrainedModel) -> None:
        self.of_rows: list[float] = []
        self._model, self._batch_gap = model, torch.empty(0)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "Gaps":
        head = self._model.lm_head
        self._handles.append(head.register_forward_hook(self._after_head))
        for module in self._model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                self._handles.append(module.register_forward_hook(self._after_router))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self, num_rows: int) -> None:
        """Start a batch."""
        self._batch_gap = torch.full((num_rows,), torch.inf)

    def end(self, rows: list[int]) -> None:
        """Note the gaps of a batch that held these rows."""
        self.of_rows += [0.0] * (max(rows) + 1 - len(self.of_rows))
        for row, gap in zip(rows, self._batch_gap.tolist(), strict=True):
            self.of_rows[row] = gap

    def _after_head(self, _module: torch.nn.Module, _inputs: object, logits: torch.Tensor) -> None:
        best = logits[:, -1].topk(2).values
        self._note((best[:, 0] - best[:, 1]) / self.TOKEN_GAP)

    def _after_router(self, module: torch.nn.Module, _inputs: object, outputs: Any) -> None:
        logits_TE, top_k = outputs[0], module.top_k
        if top_k < logits_TE.shape[1]:
            best = logits_TE.topk(top_k + 1).values
            gap_T = (best[:, top_k - 1] - best[:, top_k]) / self.EXPERT_GAP
            self._note(gap_T.view(len(self._batch_gap), -1).amin(1))

    def _note(self, gap: torch.Tensor) -> None:
        self._batch_gap = torch.minimum(self._batch_gap, gap)


@torch.no_grad()
def _generate(
    model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, gaps: Gaps
) -> list[list[int]]:
    """Prompts of one length share a batch: without padding, each is as if alone."""
    rows: list[list[int]] = [[] for _ in prompts]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small only wait for a second thread
    for length in sorted({len(prompt) for prompt in prompts}):
        members = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        _forget_longer_rows(model)
        gaps.begin(len(members))
        output = model.generate(
            torch.tensor([prompts[index] for index in members]),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        gaps.end(members)
        for index, row in zip(members, output[:, length:].tolist(), strict=True):
            rows[index] = row
    torch.set_num_threads(threads)
    return rows


def _forget_longer_rows(model: PreTrainedModel) -> None:
    """Dynamic rope keeps the base of the longest row so far; a row alone starts from the first."""
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.original_inv_freq.clone()
    rotary.max_seq_len_cached = rotary.original_max_seq_len
