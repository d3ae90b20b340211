"""The model `raymoe` of EleutherAI's lm-evaluation-harness (the extra `lm-eval`).

`python -m raymoe.lm_eval` takes the options of `lm_eval`. In Python, importing this module makes
the model known to `lm_eval.simple_evaluate(model="raymoe", model_args={"pretrained": DIR})`.
"""

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from lm_eval import utils
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from transformers import AutoTokenizer

from raymoe.config import SAMPLING_NAMES, EngineConfig, SamplingParams
from raymoe.download.models import resolve_model
from raymoe.engine.engine import Engine
from raymoe.engine.outputs import Generation
from raymoe.engine.request import MIN_SPECIAL_CHARACTERS
from raymoe.engine.tasks.rows import CONTINUATION_COLUMN
from raymoe.engine.tokenizer import Tokenizer, check_template_kwargs, find_stop
from raymoe.errors import ConfigError, ExecutionError
from raymoe.specs.files import MAX_TOKEN_ID, read_json_object
from raymoe.specs.model import ModelSpec

Message = dict[str, str]
Pair = tuple[
    Any, list[int], list[int]
]  # texts for the cache, tokens before, tokens that are scored
GENERATION_FILE = "generation_config.json"
_LOG = logging.getLogger(__name__)
# Arguments of the harness's model `hf` that change nothing of what is computed here, and those that
# would, with the values that ask for nothing.
_HF_IGNORED = frozenset(
    ("batch_size", "max_batch_size", "truncation", "logits_cache", "use_fast_tokenizer",
     "softmax_dtype", "mixed_precision_dtype", "max_memory_per_gpu", "max_cpu_memory",
     "offload_folder", "trust_remote_code", "parallelize")
)  # fmt: skip
_HF_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "backend": (("default", "causal"), "only causal models are supported"),
    "subfolder": (("", None), "give the path of the folder as pretrained"),
    "tokenizer": (("", None), "put its files into the directory of the model"),
    "tp_plan": ((None,), "set tensor_parallel_size"),
    "delta": (("", None), "give merged weights"),
    "autogptq": ((False, None), "quantised checkpoints need no argument"),
    "gptqmodel": ((False, None), "quantised checkpoints need no argument"),
    "gguf_file": (("", None), "give the checkpoint in safetensors"),
}
# Parameters by which only sampling chooses, and values of others that ask for nothing.
_ONLY_SAMPLING = frozenset(("temperature", "top_p", "top_k", "min_p", "typical_p", "seed"))
_ASKS_FOR_NOTHING: dict[str, tuple[object, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "num_return_sequences": (1,), "typical_p": (1,),
    "length_penalty": (1,), "diversity_penalty": (0,), "early_stopping": (False, True),
    "use_cache": (True, False), "renormalize_logits": (False,), "remove_invalid_values": (False,),
    "encoder_repetition_penalty": (1,), "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],), "output_scores": (False,), "return_dict_in_generate": (False,),
}  # fmt: skip
# What a checkpoint's generation_config.json may set for all generation, as `generate` reads it.
_MODEL_DEFAULTS = (
    "repetition_penalty", "no_repeat_ngram_size", "temperature", "top_p", "top_k", "min_p"
)  # fmt: skip


@register_model("raymoe")
class RaymoeLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """An engine behind the harness; all requests of a kind are one job.

    Tokens are made as the harness makes them for `--model hf`, so that metrics can be compared.

    Args:
        pretrained: As the path of `Engine.from_pretrained`.
        revision: Branch, tag or commit of a name on the hub.
        peft: A LoRA adapter, as `EngineConfig.adapter`.
        max_length: Tokens of a context and what is scored or generated after it; by default the
            model's limit. Longer contexts lose their first tokens.
        num_actors: Engines in a Ray cluster, or a Ray of this machine, that share the requests;
            None runs one engine in this process.
        max_gen_toks: Generated tokens, where a task does not say.
        add_bos_token: Whether texts begin with the BOS token; None leaves it to the tokenizer.
        prefix_token_id: Stands before texts without a context; by default BOS, or else EOS.
        device: As the harness gives it, such as "cuda:0".
        enable_thinking, chat_template_args: Arguments of the chat template.
        think_end_token: Text or token id; what is before the last one is no part of an answer.
        options: Fields of `EngineConfig`. Other arguments of `hf` are ignored where they change no
            result, such as `batch_size`: the engine chooses its batches.

    Raises:
        UnknownOptionError: A field is unknown; names one that is like it.
        ConfigError: An argument of `hf` asks for what raymoe does not do, or `enable_thinking` has
            no `think_end_token`.
    """

    def __init__(  # noqa: PLR0913 - the arguments of `--model_args`, all keyword-only
        self,
        pretrained: str,
        *,
        max_length: int | None = None,
        num_actors: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        device: str | None = None,
        revision: str | None = "main",
        peft: str | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        chat_template_args: Mapping[str, Any] | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        options = _engine_options(options)
        self.enable_thinking = enable_thinking
        self._think_end_token = _read_think_end(think_end_token, enable_thinking=enable_thinking)
        self._template_kwargs = _read_template_args(chat_template_args)
        if enable_thinking is not None:
            self._template_kwargs["enable_thinking"] = enable_thinking
        if peft:
            options["adapter"] = peft
        if revision not in (None, "main"):
            pretrained = str(resolve_model(pretrained, revision=str(revision)))
        if device is not None:
            options["device"] = device.partition(":")[0]
        config = EngineConfig(max_model_len=max_length, **options)
        self.engine: Engine | ActorPool = (
            Engine.from_pretrained(pretrained, config)
            if num_actors is None
            else ActorPool(pretrained, config, num_actors)
        )
        self.tokenizer = _load_tokenizer(self.engine.directory, add_bos_token)
        self._special = _special_texts(self.tokenizer)
        self._defaults = _model_defaults(self.engine.directory)
        self.max_length, self.max_gen_toks = self.engine.max_model_len, max_gen_toks
        self._add_bos_token, self._prefix_token_id = add_bos_token, prefix_token_id

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        found = self._prefix_token_id if self._prefix_token_id is not None else bos
        return self.eot_token_id if found is None else int(found)

    @property
    def tokenizer_name(self) -> str:
        return str(self.engine.directory).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[Message], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of messages; without the system message where the template refuses it."""

        def apply(messages: list[Message]) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                    **self._template_kwargs,
                )
            )

        try:
            return apply(chat_history)
        except TemplateError:
            _LOG.warning("the chat template refuses these messages; the system message is left out")
            return apply([one for one in chat_history if one["role"] != "system"])

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        del kwargs
        adds = self._add_bos_token if add_special_tokens is None else add_special_tokens
        prefix = self.tokenizer.decode(self.prefix_token_id)
        if add_special_tokens is None and has_bos_prefix(string, prefix):
            adds = False
        special = {} if adds is None else {"add_special_tokens": adds}
        return list(self.tokenizer.encode(string, **special))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        """Log probabilities of continuations, as of `hf`.

        Raises:
            ConfigError: `enable_thinking` is set: there is no reasoning before a continuation.
        """
        if self.enable_thinking:
            names = sorted({request.task_name for request in requests if request.task_name})
            raise ConfigError(
                f"enable_thinking is set, but {', '.join(names) or 'a task'} scores continuations, "
                "before which nothing is thought: leave it out, or run tasks that generate"
            )
        return list(super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **kwargs: Any) -> list[Any]:
        """Log probability of the second tokens after the first, and whether all are the likeliest.

        No text is longer than `max_length` and a token: the last is scored but not read.
        """
        pairs = []
        for _, context, scored in requests:
            room = self.max_length + 1 - len(scored)
            if room < 1:
                raise ConfigError(
                    f"{len(scored)} tokens are to be scored, and the model takes "
                    f"{self.max_length}; score a shorter text"
                )
            pairs.append((context[-room:], scored))
        contexts, continuations = zip(*pairs, strict=True) if pairs else ((), ())
        use_tqdm = False if kwargs.get("disable_tqdm") else None
        generations = self.engine.score(contexts, continuations, use_tqdm=use_tqdm)
        found = []
        for (texts, *_), generation in zip(requests, generations, strict=True):
            values = _checked(generation).values or {}
            found.append((float(values["logprob"]), bool(values["is_greedy"])))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log probabilities of whole texts, by windows of `max_length` that do not overlap."""
        windows: list[Pair] = []
        owners = []
        for index, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in rolling:
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(index)
        sums = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for index, (logprob, _) in zip(owners, scored, strict=True):
            sums[index] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts, params, stops = [], [], []
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        for context, given in (request.args for request in requests):
            options = normalize_gen_kwargs(given, self.max_gen_toks)
            stops.append(handle_stop_sequences(_read_until(options.pop("until", None)), eos=eos))
            params.append(_sampling_params(options, self._plain(stops[-1]), self._defaults))
            prompts.append(self._context(context, params[-1].max_tokens))
        use_tqdm = False if disable_tqdm else None
        texts = []
        generations = self.engine.generate(prompts, params, use_tqdm=use_tqdm)
        for request, generation, stop in zip(requests, generations, stops, strict=True):
            texts.append(self._answer(_checked(generation).token_ids, stop))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _plain(self, stop: Sequence[str]) -> list[str]:
        """Stop strings that the engine looks for: those of text, and single special tokens."""
        special = self._special
        return [
            one for one in stop if one and (one in special or not any(s in one for s in special))
        ]

    def _answer(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """The text of an answer as `hf` reads it off its tokens.

        Stop strings may have special tokens in them, which end an answer and are not in its text.
        """
        tokens = [*token_ids]
        mixed = [one for one in stop if one and one not in self._plain([one])]
        if mixed:
            tokens = tokens[: self._num_tokens_before_end(tokens, mixed)]
        end = self._think_end_token
        if isinstance(end, int) and end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        text = text.lstrip() if isinstance(end, int) else text
        return str(postprocess_generated_text(text, [*stop], end if isinstance(end, str) else None))

    def _num_tokens_before_end(self, tokens: list[int], stop: Sequence[str]) -> int:
        """How many tokens there are up to that which completes the first of these stop strings."""
        if find_stop(self.tokenizer.decode(tokens, skip_special_tokens=False), stop) is None:
            return len(tokens)
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            text = self.tokenizer.decode(tokens[:middle], skip_special_tokens=False)
            low, high = (low, middle) if find_stop(text, stop) is not None else (middle + 1, high)
        return low

    def _context(self, text: str, max_tokens: int) -> list[int]:
        """The last tokens of a text that leave room for what is generated."""
        room = self.max_length - max_tokens
        if room < 1:
            raise ConfigError(
                f"{max_tokens} tokens are to be generated after a context, and the model takes "
                f"{self.max_length} of both; ask for fewer"
            )
        return self.tok_encode(text)[-room:]


class ActorPool:
    """Engines in actors of Ray, with what `RaymoeLM` calls of an `Engine`.

    Each call is a job of Ray Data, whose actors load the model and end with it. Generations have
    tokens, values and an error only.
    """

    def __init__(self, pretrained: str, config: EngineConfig, num_actors: int) -> None:
        if type(num_actors) is not int or num_actors < 1:
            raise ConfigError(f"num_actors is {num_actors!r:.60}; it takes a whole number from 1")
        # Ray is slow to import, and one engine does not need it.
        from raymoe.data.cluster import check_before_start  # noqa: PLC0415

        check_before_start()
        self._config, self._num_actors = config, num_actors
        self.directory = resolve_model(pretrained)
        limit = ModelSpec.from_directory(self.directory).max_model_len
        self.max_model_len = min(limit, config.max_model_len or limit)

    def score(
        self, prompts: Sequence[list[int]], continuations: Sequence[list[int]], **_: Any
    ) -> list[Generation]:
        """As `Engine.score`; Ray Data shows the progress."""
        pairs = zip(prompts, continuations, strict=True)
        rows = [{"prompt": prompt, CONTINUATION_COLUMN: one} for prompt, one in pairs]
        return self._run(rows, task="score")

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], **_: Any
    ) -> list[Generation]:
        """As `Engine.generate`; Ray Data shows the progress."""
        texts = [json.dumps(dataclasses.asdict(one)) for one in params]
        pairs = zip(prompts, texts, strict=True)
        return self._run([{"prompt": prompt, "sampling_params": text} for prompt, text in pairs])

    def _run(self, rows: Sequence[dict[str, Any]], **options: Any) -> list[Generation]:
        if not rows:
            return []
        from ray.data import from_items  # noqa: PLC0415 - as above

        from raymoe.data.columns import ERROR_COLUMN  # noqa: PLC0415
        from raymoe.data.processor import generate  # noqa: PLC0415
        from raymoe.data.sizing import MIN_ROWS_PER_CALL  # noqa: PLC0415

        num_actors = min(self._num_actors, len(rows))
        if len(rows) < MIN_ROWS_PER_CALL * num_actors:  # else some actors would have none
            options["batch_size"] = len(rows) // num_actors
        dataset = generate(
            from_items([{"index": index, **row} for index, row in enumerate(rows)]),
            self.directory,
            num_actors=num_actors,
            engine_config=self._config,
            **options,
        )
        answers = sorted(dataset.take_all(), key=itemgetter("index"))
        return [
            Generation(
                token_ids=tuple(one.get("generated_tokens") or ()),
                error=one[ERROR_COLUMN],
                values=one,
            )
            for one in answers
        ]


def _checked(generation: Generation) -> Generation:
    """Metrics of fewer rows would be wrong: a row with an error ends the evaluation."""
    if generation.error:
        raise ExecutionError(f"a row of the evaluation failed: {generation.error}")
    return generation


def _sampling_params(
    options: dict[str, Any], stop: Iterable[str], defaults: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Arguments of a task's generation, as the harness normalises them.

    Args:
        defaults: What the checkpoint sets, for arguments that a task does not give.

    Raises:
        ConfigError: One of them has no equal in `SamplingParams`.
    """
    samples = options.pop("do_sample", False)
    chosen = {"max_tokens": options.pop("max_gen_toks"), "stop": tuple(stop)}
    given = {name: value for name, value in options.items() if value is not None}
    if "min_new_tokens" in given:
        given["min_tokens"] = given.pop("min_new_tokens")
    for name, values in _ASKS_FOR_NOTHING.items():
        if name in given and given[name] in values:
            del given[name]
    given = {**(defaults or {}), **given}
    if not samples:
        given = {name: value for name, value in given.items() if name not in _ONLY_SAMPLING}
        given["temperature"] = 0.0
    if unknown := sorted(given.keys() - SAMPLING_NAMES):
        raise ConfigError(
            f"generation_kwargs has {', '.join(unknown)}, which raymoe does not take; besides the "
            f"harness's own it takes {', '.join(sorted(SAMPLING_NAMES))}"
        )
    return SamplingParams(**chosen, **given)


def _engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Model arguments that are for the engine; those of `hf` that ask for nothing are left out."""
    for name, (values, advice) in _HF_REFUSED.items():
        if options.get(name, values[0]) not in values:
            raise ConfigError(f"{name} is {options[name]!r:.60}; {advice}")
    if options.get("trust_remote_code"):
        _LOG.warning("trust_remote_code is ignored: no code of a model is ever run")
    dropped = _HF_IGNORED | _HF_REFUSED.keys()
    return {name: value for name, value in options.items() if name not in dropped}


def _read_until(until: list[str] | None) -> list[str] | None:
    if until and "" in until:
        raise ConfigError(
            "until has an empty text, at which `hf` ends every answer after its first token; leave "
            "it out, or ask for max_gen_toks=1"
        )
    return until


def _read_think_end(token: str | int | None, *, enable_thinking: bool | None) -> str | int | None:
    if enable_thinking and token is None:
        raise ConfigError(
            "enable_thinking needs think_end_token, the text or id after which answers begin, such "
            "as </think>"
        )
    return int(token) if isinstance(token, str) and token.isdecimal() else token


def _read_template_args(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"chat_template_args is no JSON object: {error}") from error
    return check_template_kwargs(given or {})


def _load_tokenizer(directory: Path, add_bos_token: bool | None) -> Any:
    """The tokenizer of transformers, after a process with limits has loaded it.

    Raises:
        CheckpointError: It cannot be loaded within them, or only by code of its repository.
    """
    tried = Tokenizer(directory, MAX_TOKEN_ID)
    try:
        tried.load()
    finally:
        tried.close()
    options = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    return AutoTokenizer.from_pretrained(
        directory, trust_remote_code=False, local_files_only=True, **options
    )


def _special_texts(tokenizer: Any) -> frozenset[str]:
    """Special tokens that the engine refuses within a stop string."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    every = [*added, *tokenizer.all_special_tokens]
    return frozenset(text for text in every if len(text) >= MIN_SPECIAL_CHARACTERS)


def _model_defaults(directory: Path) -> dict[str, Any]:
    if not (directory / GENERATION_FILE).exists():
        return {}
    found = read_json_object(directory, GENERATION_FILE)
    return {name: found[name] for name in _MODEL_DEFAULTS if found.get(name) is not None}


if __name__ == "__main__":
    cli_evaluate()
