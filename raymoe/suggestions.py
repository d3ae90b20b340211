"""What an unknown name probably means: its name here, a typing error, or nothing that is here."""

import difflib
from collections.abc import Iterable

# What vLLM, SGLang, llama.cpp, transformers and OpenAI call it, and what it may be here.
OTHER_NAMES = {
    "max_new_tokens": ("max_tokens",), "max_completion_tokens": ("max_tokens",),
    "max_output_tokens": ("max_tokens",), "n_predict": ("max_tokens",),
    "num_predict": ("max_tokens",), "min_new_tokens": ("min_tokens",),
    "max_length": ("max_tokens", "max_model_len"),
    "stop_strings": ("stop",), "stop_words": ("stop",), "stop_sequences": ("stop",),
    "eos_token_id": ("stop_token_ids",), "num_return_sequences": ("n",),
    "top_logprobs": ("logprobs",), "n_probs": ("logprobs",), "random_seed": ("seed",),
    "repeat_penalty": ("repetition_penalty",), "ignore_eos_token": ("ignore_eos",),
    "guided_json": ("structured_outputs",), "guided_decoding": ("structured_outputs",),
    "guided_regex": ("structured_outputs",), "guided_choice": ("structured_outputs",),
    "guided_grammar": ("structured_outputs",), "response_format": ("structured_outputs",),
    "json_schema": ("structured_outputs", "json"), "schema": ("json",), "ebnf": ("grammar",),
    "response_model": ("output_schema",), "output_type": ("output_schema",),
    "output_schema": ("structured_outputs",),
    "torch_dtype": ("dtype",), "kv_cache_dtype": ("kv_dtype",), "tp": ("tensor_parallel_size",),
    "mamba_ssm_cache_dtype": ("state_dtype",), "ssm_dtype": ("state_dtype",),
    "tp_size": ("tensor_parallel_size",), "gpu_memory_utilization": ("device_memory_bytes",),
    "max_seq_len": ("max_model_len",), "max_context_len": ("max_model_len",),
    "context_length": ("max_model_len",), "n_ctx": ("max_model_len",),
    "num_ctx": ("max_model_len",), "cpu_offload_gb": ("host_memory_bytes",),
    "swap_space": ("host_memory_bytes",), "max_num_seqs": ("policy",),
    "max_num_batched_tokens": ("policy",), "concurrency": ("num_actors",),
    "model": ("model_source",), "messages": ("messages_column",), "prompt": ("prompt_column",),
    "engine_kwargs": ("engine_config",), "continue_on_error": ("should_continue_on_error",),
    "tools": ("tools_column",),
}  # fmt: skip
_BEAMS = "there is no beam search; n gives several samples"
_NO_FILTER = "it is not implemented; top_k, top_p and min_p choose among tokens"
_NO_PENALTY = "it is not implemented; there are repetition_, presence_ and frequency_penalty"
_ONLY_BIAS = "it is not implemented; logit_bias of -100 excludes single tokens"
_NO_CODE = "no code of yours runs between logits and tokens; leave it out"
_TEXT = "it has no meaning for the tokenizers of the library tokenizers; leave it out"
WITHOUT_COUNTERPART = {
    "do_sample": "temperature=0 is greedy, any other temperature samples",
    "best_of": "it is not implemented; n gives several samples",
    "num_beams": _BEAMS, "use_beam_search": _BEAMS, "beam_width": _BEAMS,
    "early_stopping": _BEAMS, "length_penalty": _BEAMS,
    "typical_p": _NO_FILTER, "top_a": _NO_FILTER, "top_h": _NO_FILTER, "tfs_z": _NO_FILTER,
    "mirostat": _NO_FILTER, "epsilon_cutoff": _NO_FILTER, "eta_cutoff": _NO_FILTER,
    "xtc_probability": _NO_FILTER, "encoder_repetition_penalty": _NO_PENALTY,
    "dry_multiplier": _NO_PENALTY, "repetition_detection": _NO_PENALTY,
    "suppress_tokens": _ONLY_BIAS,
    "begin_suppress_tokens": _ONLY_BIAS, "sequence_bias": _ONLY_BIAS,
    "logits_processor": _NO_CODE, "logits_processors": _NO_CODE, "stopping_criteria": _NO_CODE,
    "spaces_between_special_tokens": _TEXT,
    "limit": "the first rows are ds.limit(n) of the dataset",
    "truncate_prompt_tokens": "it is an option of the engine: on_too_long and max_model_len",
    "bad_words_ids": "bad_words takes the words themselves",
    "min_length": "min_tokens counts generated tokens, without the prompt",
    "lora_request": "an adapter is an option of the engine: EngineConfig(adapter=DIR)",
    "prompt_token_ids": "lists of token ids are prompts; give them in place of texts",
    "priority": "rows are computed in the order in which they come; leave it out",
    "detokenize": "the text is always made; leave it out",
    "output_kind": "a row is returned when it is finished; leave it out",
    "use_cache": "the KV cache is always used; leave it out",
    "quantization": "it is read from the model; leave it out",
    "enable_prefix_caching": "prefixes are always shared; leave it out",
    "enable_chunked_prefill": "prompts are always computed in chunks; leave it out",
    "trust_remote_code": "no code of a model is ever run; leave it out",
    "pipeline_parallel_size": "layers stream to one GPU instead; leave it out",
    "device_map": "the planner places weights; leave it out",
}  # fmt: skip
# Methods of vLLM's LLM that an engine does not have.
METHODS_OF_OTHERS = {
    "chat": "chats are prompts: generate([messages])",
    "encode": "embed gives vectors, of an engine with EngineConfig(head='none')",
    "reward": "classify gives what a classification head says",
    "beam_search": _BEAMS,
    "get_tokenizer": "transformers' AutoTokenizer.from_pretrained(engine.directory) gives it",
    "get_default_sampling_params": "SamplingParams() has the defaults",
    "shutdown": "close ends an engine",
    "sleep": "close frees its memory, and from_pretrained loads it again",
    "wake_up": "close frees its memory, and from_pretrained loads it again",
}
MIN_PREFIX = 4  # characters that a known name may be told by
MIN_WORD = 3  # characters of a word that may have a typing error
LONG_WORD = 6  # may have two


def find_meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, or None.

    It is what others call the same, or `name` has a typing error. A name of other words, such as
    `min_` for `max_`, never is.
    """
    names = sorted(known)
    plain = _plain(name)
    for other, here in OTHER_NAMES.items():
        if _plain(other) == plain:
            return next((one for one in here if one in names), None)
    if find_absence(name):
        return None
    near = [one for one in names if is_typing_error(name, one)]
    closest = difflib.get_close_matches(name, near, n=1, cutoff=0.0)
    return closest[0] if closest else None


def find_absence(name: str) -> str | None:
    """Return why there is no option of this name of others, and what to use; None if unknown."""
    plain = _plain(name)
    return next((why for one, why in WITHOUT_COUNTERPART.items() if _plain(one) == plain), None)


def is_typing_error(name: str, known: str) -> bool:
    """Whether `name` is misspelt, or `known` only goes on."""
    plain = _plain(name)
    if len(plain) >= MIN_PREFIX and _plain(known).startswith(plain):
        return True
    begin = " ".join(_words(known)[: len(_words(name))])
    return is_misspelt(name, known) or (len(plain) >= LONG_WORD and is_misspelt(name, begin))


def is_misspelt(name: str, known: str) -> bool:
    """Whether each word of `name` is that of `known` but for a letter or two.

    Also if words are joined or divided otherwise.
    """
    plain, known_plain = _plain(name), _plain(known)
    if plain == known_plain:
        return True
    words, known_words = _words(name), _words(known)
    if len(words) == len(known_words):
        return all(_is_word(*pair) for pair in zip(words, known_words, strict=True))
    return min(len(plain), len(known_plain)) >= LONG_WORD and num_edits(plain, known_plain) == 1


def _is_word(word: str, known: str) -> bool:
    shorter = min(len(word), len(known))
    if word == known or shorter < MIN_WORD:
        return word == known
    return num_edits(word, known) <= (2 if shorter >= LONG_WORD else 1)


def num_edits(left: str, right: str) -> int:
    """Return the letters to insert, delete, replace, or swap with the next one."""
    if abs(len(left) - len(right)) > LONG_WORD:
        return max(len(left), len(right))
    rows: list[list[int]] = [[*range(len(right) + 1)]]
    for i, a in enumerate(left, 1):
        above, row = rows[-1], [i]
        for j, b in enumerate(right, 1):
            edits = min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b))
            if i > 1 and j > 1 and (a, b) == (right[j - 2], left[i - 2]):
                edits = min(edits, rows[-2][j - 2] + 1)
            row.append(edits)
        rows.append(row)
    return rows[-1][-1]


def _words(name: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in name.casefold()).split()


def _plain(name: str) -> str:
    return "".join(_words(name))
