"""Small tokenizers that split texts as those of well-known models do."""

import functools
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "\u2581"


@functools.cache
def sample_text() -> str:
    package = Path(__file__).parents[3] / "raymoe" / "engine"
    return "".join(path.read_text() for path in sorted(package.glob("*.py")))[:150_000]


def byte_level(pattern: str | None, normalizer=None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|im_start|>"]
    tokenizer.train_from_iterator(
        [sample_text()],
        trainers.BpeTrainer(
            vocab_size=1500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        ),
    )
    return tokenizer


def sentencepiece(*, is_legacy: bool) -> Tokenizer:
    """As Llama 2 and Mixtral: a space is a character, bytes stand for what is not known."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.pre_tokenizer = metaspace
    special = ["<unk>", "<s>", "</s>", *BYTES]
    tokenizer.train_from_iterator(
        [sample_text()],
        trainers.BpeTrainer(vocab_size=1500, special_tokens=special, show_progress=False),
    )
    if is_legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
        tokenizer.pre_tokenizer = None
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


LIKE = {
    "gpt2": lambda: byte_level(None),
    "llama3": lambda: byte_level(GPT4),
    "qwen": lambda: byte_level(QWEN, normalizers.NFC()),
    "o200k": lambda: byte_level(O200K),
    "mixtral": lambda: sentencepiece(is_legacy=False),
    "llama2": lambda: sentencepiece(is_legacy=True),
}


def write_like(name: str, directory: Path) -> Path:
    """Write a tokenizer and its configuration, with a BOS in front of texts."""
    tokenizer = LIKE[name]()
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token=None
    )
    fast.save_pretrained(directory)
    return directory
