"""What transformers generates by a random model, without the rows in which rounding decides."""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from raymoe.specs.model import ModelSpec, MoeSpec
from tests.parity.configurations import FAMILY_CONFIGS, Configuration, model_class
from tests.parity.hybrid_families import AS_PUBLISHED
from tests.reference import SCORES


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which rows a reference has; decoding starts new blocks of 32 tokens."""

    num_prompts: int
    lengths: tuple[int, ...]
    max_new_tokens: int


ROWS = Rows(num_prompts=24, lengths=(1, 33, 9, 70, 32, 47), max_new_tokens=20)
FEW_ROWS = Rows(num_prompts=6, lengths=(1, 30, 70), max_new_tokens=8)


def make_config(configuration: Configuration) -> PreTrainedConfig:
    config_class = getattr(transformers, FAMILY_CONFIGS[configuration.family])
    return config_class(**copy.deepcopy(configuration.fields), attn_implementation="eager")


def make_model(configuration: Configuration) -> PreTrainedModel:
    """The random model in transformers: float32, eager attention, biases and norms random too.

    Where raymoe differs on purpose, it computes what raymoe does by the weights of `as_stored`.
    """
    config = make_config(configuration)
    with torch.random.fork_rng():
        torch.manual_seed(configuration.seed)
        model = model_class(config)._from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        randomise(model)
    if configuration.family == "llama4":  # 5.24 reads a result that its text model does not give
        model.forward = model.language_model.forward
    norm_latents_as_trained(model)
    # Greedy, whatever the defaults of the configuration class.
    model.generation_config = GenerationConfig(do_sample=False, use_cache=True)
    return model.eval()


def randomise(model: PreTrainedModel) -> None:
    """What a fresh model leaves at zero or one: biases, norms, sinks."""
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        module, leaf = name.split(".")[-2:]
        if leaf.endswith("bias") or leaf.startswith("index_kpool_compress"):
            torch.nn.init.normal_(parameter.data, std=0.2)
        elif name.endswith("ple.conv1d.weight"):
            torch.nn.init.normal_(parameter.data, std=0.5)
        elif leaf in {"fn", "hc_fn"}:  # of several streams
            torch.nn.init.normal_(parameter.data, std=0.1)
        elif leaf in {"base", "hc_base", "sinks"}:
            torch.nn.init.normal_(parameter.data)
        elif leaf == "tid2eid":
            num_experts = model.config.n_routed_experts
            order_VE = torch.rand(len(parameter), num_experts).argsort(1)
            parameter.data.copy_(order_VE[:, : parameter.shape[1]])
        elif (
            leaf in {"D", "scale", "hc_scale", "per_expert_scale", "layer_scalar"}
            or "norm" in module
        ):
            torch.nn.init.uniform_(parameter.data, 0.5, 1.5)


def norm_latents_as_trained(model: PreTrainedModel) -> None:
    """Give norms of latents the epsilon of the model, where its class has another by mistake."""
    if model.config.model_type != "hy_v4":
        return
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps


def as_stored(model: PreTrainedModel) -> PreTrainedModel:
    """A model with the weights as a checkpoint has them: this one, but for Hy4.

    Its class rotates the halves of rotated dimensions with each other. In a checkpoint these are
    neighbours, so that the rows of queries and keys, and of index queries and keys, are put there.
    """
    config = model.config
    if config.model_type != "hy_v4":
        return model
    rotated = config.qk_rope_head_dim  # the last of each group of rows
    index = dict.fromkeys(("wq_b", "wk", "k_norm"), config.index_head_dim)
    groups = index | {
        "q_b_proj": config.qk_nope_head_dim + rotated,
        "kv_a_proj_with_mqa": config.kv_lora_rank + rotated,
    }
    stored = copy.deepcopy(model)
    for name, parameter in stored.named_parameters():
        size = groups.get(name.split(".")[-2])
        if size is not None:
            rows = parameter.data.unflatten(0, (-1, size))[:, -rotated:]
            rows.copy_(rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))
    return stored


def make_checkpoint(configuration: Configuration, directory: Path) -> PreTrainedModel:
    """Save the random model to `directory` as transformers does; return it for comparison."""
    model = make_model(configuration)
    as_stored(model).save_pretrained(directory)
    if configuration.family == "kimi_k25":  # 5.23 writes names that it cannot read
        weights = {_published(name): tensor for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del weights["language_model.lm_head.weight"]
        save_file(weights, directory / "model.safetensors")
    if configuration.family.startswith("qwen4_exp"):  # what ends n-grams ends no row
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 999}))
    if configuration.name.endswith(AS_PUBLISHED):
        config = {"model_type": configuration.family, **configuration.fields}
        (directory / "config.json").write_text(json.dumps(config))
    return model


def _published(name: str) -> str:
    """The name of a tensor in checkpoints of Kimi-K2.5."""
    name = name.removeprefix("model.")
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    return re.sub(r"^language_model\.", "language_model.model.", name)


def make_prompts(
    configuration: Configuration, num_prompts: int, lengths: tuple[int, ...] = ROWS.lengths
) -> list[list[int]]:
    """Random prompts, shorter and longer than windows, blocks and the borders of ropes."""
    generator = torch.Generator().manual_seed(1000 + configuration.seed)
    vocabulary = configuration.vocab_size
    return [
        torch.randint(vocabulary, (lengths[index % len(lengths)],), generator=generator).tolist()
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
    rows: Rows = ROWS,
    candidates: list[list[int]] | None = None,
) -> Reference:
    """Reference rows in which no decision is a tie: the first of the candidates, or random ones.

    Where the two best tokens, or the last expert chosen and the first not chosen, are closer than
    float32 rounding, no implementation can be expected to agree with another; such rows (a few in
    a hundred) are replaced by others.
    """
    if candidates is None:
        num_candidates = rows.num_prompts + 2 * len(rows.lengths)
        candidates = make_prompts(configuration, num_candidates, rows.lengths)
    with Gaps(model) as gaps:
        tokens = _generate(model, candidates, rows.max_new_tokens, gaps)
    clear = [index for index, gap in enumerate(gaps.of_rows) if gap > 1.0][: rows.num_prompts]
    assert len(clear) == rows.num_prompts, (
        f"only {len(clear)} rows of {configuration.name} are clear"
    )
    return Reference(
        prompts=[candidates[index] for index in clear], tokens=[tokens[index] for index in clear]
    )


def reference_tokens(
    model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int = ROWS.max_new_tokens
) -> list[list[int]]:
    """Greedy tokens of transformers for each prompt alone, ties and all."""
    with Gaps(model) as gaps:
        return _generate(model, prompts, max_new_tokens, gaps)


ROUTERS = (
    "topkrouter",
    "llama4router",
    "dbrxrouter",
    "moev1gate",
    "textrouter",
    "tokenchoicerouter",
)


HIDDEN = 1e30  # scores beyond it stand for positions that are not seen, or always


class Gaps:
    """How clear the decisions of a model were, by hooks on its head and its routers.

    Attributes:
        of_rows: Smallest gap of each row, in units of what counts as clear.
    """

    TOKEN_GAP, EXPERT_GAP, INDEX_GAP = 3e-4, 1e-4, 1e-5

    def __init__(self, model: PreTrainedModel) -> None:
        self.of_rows: list[float] = []
        self._model, self._batch_gap = model, torch.empty(0)
        spec = ModelSpec.from_config(json.loads(model.config.to_json_string(use_diff=False)))
        self._moe = next(
            (layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeSpec)), None
        )
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._topk = torch.Tensor.topk  # replaced while an indexer chooses
        self._single_gaps: list[torch.Tensor] = []  # of an indexer that chooses token by token

    def __enter__(self) -> "Gaps":
        head = self._model.get_output_embeddings()
        if head is None:  # Nemotron-3 Omni holds a whole language model
            head = self._model.language_model.get_output_embeddings()
        self._handles.append(head.register_forward_hook(self._after_head))
        for module in self._model.modules():
            if type(module).__name__.lower().endswith(ROUTERS):
                self._handles.append(module.register_forward_hook(self._after_router))
            if type(module).__name__.endswith("Indexer"):
                self._handles.append(module.register_forward_pre_hook(self._before_indexer))
                self._handles.append(module.register_forward_hook(self._after_indexer))
        return self

    def __exit__(self, *_: object) -> None:
        torch.Tensor.topk = self._topk
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

    def _after_router(
        self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], outputs: Any
    ) -> None:
        scales_input = self._moe.router.scales_input  # Llama-4 returns its logits behind scores
        logits_TE = outputs[scales_input] if isinstance(outputs, tuple) else outputs
        if self._moe.router.has_input_norm:  # Gemma-4 returns the softmax of its logits
            logits_TE = logits_TE.log()
        top_k = self._moe.top_k
        if top_k < logits_TE.shape[1]:
            bias_E = next(chain(inputs[1:], _selection_biases(module)), None)
            for scores, count in _choices(logits_TE, self._moe, bias_E):
                best = scores.topk(count + 1).values
                gap_T = (best[:, count - 1] - best[:, count]) / self.EXPERT_GAP
                self._note(gap_T.view(len(self._batch_gap), -1).amin(1))

    def _before_indexer(self, _module: torch.nn.Module, _inputs: object) -> None:
        topk = self._topk

        def noting(scores: torch.Tensor, k: int, dim: int = -1) -> Any:
            if scores.ndim == 1:
                return self._choose_of_token(scores, k)
            if k < scores.shape[dim]:
                best = topk(scores, k + 1, dim=dim).values
                size = scores.masked_fill(scores.abs() > HIDDEN, 0).abs().amax(-1)
                gap = (best[..., -2] - best[..., -1]) / size.clamp_min(1e-30) / self.INDEX_GAP
                gap = gap.where(best[..., -1] > -HIDDEN, torch.inf)
                self._note(gap.view(len(self._batch_gap), -1).amin(1))
            return topk(scores, k, dim=dim)

        torch.Tensor.topk = noting

    def _choose_of_token(self, scores: torch.Tensor, k: int) -> Any:
        """Choose the lower of positions with equal scores, which `topk` leaves open."""
        found = torch.sort(scores, descending=True, stable=True)
        gap = torch.tensor(torch.inf)
        if k < len(scores) and float(found.values[k - 1]) > 0:  # zeros are equal everywhere
            gap = (found.values[k - 1] - found.values[k]) / found.values[0] / self.INDEX_GAP
        self._single_gaps.append(gap)
        return torch.return_types.topk((found.values[:k], found.indices[:k]))

    def _after_indexer(self, *_: object) -> None:
        torch.Tensor.topk = self._topk
        if self._single_gaps:  # those of a row come one after another
            self._note(torch.stack(self._single_gaps).view(len(self._batch_gap), -1).amin(1))
            self._single_gaps = []

    def _note(self, gap: torch.Tensor) -> None:
        self._batch_gap = torch.minimum(self._batch_gap, gap)


def _selection_biases(router: torch.nn.Module) -> Iterator[torch.Tensor]:
    """What a router adds to the scores for the choice alone, where it holds that itself."""
    for name, tensor in (*router.named_buffers(), *router.named_parameters()):
        if name.endswith("e_score_correction_bias"):
            yield tensor.flatten()


def _choices(
    logits_TE: torch.Tensor, moe: MoeSpec, bias_E: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, int]]:
    """What a router sorts, and how many it takes: groups, then experts."""
    router = moe.router
    if bias_E is None and router.num_groups == 1:
        yield logits_TE, moe.top_k
        return
    if bias_E is None and router.scoring == "softmax" and router.group_score == "max":
        choice_TE = logits_TE  # sorted as their softmax is, without its tiny differences
    else:
        scores_TE = SCORES[router.scoring](logits_TE)
        choice_TE = logits_TE if router.chooses_by_logits else scores_TE
        choice_TE = choice_TE if bias_E is None else choice_TE + bias_E
    if router.top_groups < router.num_groups:
        grouped_TGX = choice_TE.unflatten(1, (router.num_groups, -1))
        score_TG = grouped_TGX.topk(1 if router.group_score == "max" else 2).values.sum(-1)
        yield score_TG, router.top_groups
        border_T1 = score_TG.topk(router.top_groups).values[:, -1:]
        is_in_TG = score_TG >= border_T1
        if bias_E is None and router.scoring == "softmax":
            grouped_TGX = logits_TE.unflatten(1, (router.num_groups, -1))  # sorted alike
        choice_TE = grouped_TGX.masked_fill(~is_in_TG[..., None], -torch.inf).flatten(1)
    yield choice_TE, moe.top_k


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
    rotaries = (
        getattr(module, name)
        for module in model.modules()
        for name in ("rotary_emb", "pos_emb")
        if hasattr(module, name) and {"embed_tokens", "wte"} & module._modules.keys()
    )
    rotary = next(rotaries, None)
    if rotary is None:  # positions do not matter
        return
    for name, first in list(rotary.named_buffers()):
        if name.endswith("original_inv_freq"):  # of all layers, or of a type of them
            setattr(rotary, name.replace("original_", ""), first.clone())
    for name in [name for name in vars(rotary) if name.endswith("max_seq_len_cached")]:
        setattr(rotary, name, rotary.original_max_seq_len)
