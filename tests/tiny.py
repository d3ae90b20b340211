"""A tiny random checkpoint with a byte-level tokenizer, for tests that need a real directory."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.units import MIB

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
# Of engines that page weights on a device.
PAGED_POLICY = Policy(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_prefill_chunk_tokens=64,
    num_kv_blocks=32,
    device=DevicePolicy(num_micro_batches=2, page_bytes=MIB),
)
VOCAB_SIZE = 264  # the 256 bytes, the special tokens, four ids that no text has


def make_checkpoint(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Mixtral (2 layers, 4 experts, hidden 64) and its tokenizer; return where.

    Args:
        directory: Created when missing.
        seed: Of the weights.
        overrides: Fields of `MixtralConfig`.
    """
    config = MixtralConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 512,
            "sliding_window": None,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "initializer_range": 0.2,  # 0.02 makes logits so flat that ties decide
            "tie_word_embeddings": False,
            **overrides,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MixtralForCausalLM(config)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer without merges: one token per byte, ``<s>`` in front."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
