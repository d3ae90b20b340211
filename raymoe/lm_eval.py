"""The model `raymoe` of EleutherAI's lm-evaluation-harness (the extra `lm-eval`).

`python -m raymoe.lm_eval` takes the options of `lm_eval`. In Python, importing this module makes
the model known to `lm_eval.simple_evaluate(model="raymoe", model_args={"pretrained": DIR})`.
"""

import dataclasses
import json
import logging
from collections.abc import Iterable, Sequence
from operator import itemgetter
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
from raymoe.engine.engine import Engine
from raymoe.engine.outputs import Generation
from raymoe.engine.tasks.rows import CONTINUATION_COLUMN
from raymoe.errors import ConfigError, ExecutionError
from raymoe.memory.checkpoint import resolve_model
from raymoe.specs.model import ModelSpec

Message = dict[str, str]
Pair = tuple[
    Any, list[int], list[int]
]  # texts for the cache, tokens before, tokens that are scored
_LOG = logging.getLogger(__name__)


@register_model("raymoe")
class RaymoeLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """An engine behind the harness; all requests of a kind are one job.

    Tokens are made as the harness makes them for `--model hf`, so that metrics can be compared.

    Args:
        pretrained: As the path of `Engine.from_pretrained`.
        max_length: Tokens of a context and what is scored or generated after it; by default the
            model's limit. Longer contexts lose their first tokens.
        num_actors: Engines in a Ray cluster, or a Ray of this machine, that share the requests;
            None runs one engine in this process.
        max_gen_toks: Generated tokens, where a task does not say.
        add_bos_token: Whether texts begin with the BOS token; None leaves it to the tokenizer.
        prefix_token_id: Stands before texts without a context; by default BOS, or else EOS.
        device: As the harness gives it, such as "cuda:0".
        batch_size, max_batch_size: Ignored: the engine chooses its batches.
        options: Fields of `EngineConfig`.

    Raises:
        UnknownOptionError: A field is unknown; names one that is like it.
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
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        del batch_size, max_batch_size
        super().__init__()
        if device is not None:
            options["device"] = device.partition(":")[0]
        config = EngineConfig(max_model_len=max_length, **options)
        self.engine: Engine | ActorPool = (
            Engine.from_pretrained(pretrained, config)
            if num_actors is None
            else ActorPool(pretrained, config, num_actors)
        )
        self.tokenizer = AutoTokenizer.from_pretrained(self.engine.directory)
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
            stops.append(handle_stop_sequences(options.pop("until", None), eos=eos))
            params.append(_sampling_params(options, stops[-1]))
            prompts.append(self._context(context, params[-1].max_tokens))
        use_tqdm = False if disable_tqdm else None
        texts = []
        generations = self.engine.generate(prompts, params, use_tqdm=use_tqdm)
        for request, generation, stop in zip(requests, generations, stops, strict=True):
            texts.append(postprocess_generated_text(_checked(generation).text, stop, None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

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
    a text, values and an error only.
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
            Generation(text=one.get("generated_text", ""), error=one[ERROR_COLUMN], values=one)
            for one in answers
        ]


def _checked(generation: Generation) -> Generation:
    """Metrics of fewer rows would be wrong: a row with an error ends the evaluation."""
    if generation.error:
        raise ExecutionError(f"a row of the evaluation failed: {generation.error}")
    return generation


def _sampling_params(options: dict[str, Any], stop: Iterable[str]) -> SamplingParams:
    """Arguments of a task's generation, as the harness normalises them.

    Raises:
        ConfigError: One of them has no equal in `SamplingParams`.
    """
    samples = options.pop("do_sample", False)
    chosen = {"max_tokens": options.pop("max_gen_toks"), "stop": tuple(stop)}
    temperature = options.pop("temperature", None)
    options = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(options.keys() - SAMPLING_NAMES):
        raise ConfigError(
            f"generation_kwargs has {', '.join(unknown)}, which raymoe does not take; besides the "
            f"harness's own it takes {', '.join(sorted(SAMPLING_NAMES))}"
        )
    if not samples:
        options = {"temperature": 0.0}
    elif temperature is not None:
        options["temperature"] = temperature
    return SamplingParams(**chosen, **options)


if __name__ == "__main__":
    cli_evaluate()
