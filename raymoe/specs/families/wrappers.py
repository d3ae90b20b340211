"""Models with images or sound whose text part runs: where a configuration and weights hold it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.class_defaults import class_defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """A class that wraps a language model.

    Attributes:
        architectures: Values of `architectures`, the newest name first; those of the text part
            alone at last, where transformers makes it of the whole configuration.
        texts: Accepted `model_type`s of the text part, the default first.
        path: Nested objects that lead to its configuration.
        prefixes: Stored prefixes of the model and of its head, those of published weights first.
        layers: Names of its list of layers.
        unread: Fields of the text part that the class does not read.
        renamed: Names of fields in older configurations -> their names; the newer one counts.
        may_be_flat: Whether a configuration without an object for the text has its fields itself.
    """

    architectures: tuple[str, ...]
    texts: tuple[str, ...]
    path: tuple[str, ...] = ("text_config",)
    prefixes: tuple[tuple[str, str], ...] = (("model.language_model.", ""),)
    layers: tuple[str, ...] = ("layers.",)
    unread: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    may_be_flat: bool = False


_LLAVA = (
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
)
_NEMOTRON_OMNI = Wrapper(
    architectures=("NemotronH_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3"),
    texts=("nemotron_h",),
    prefixes=(("language_model.{root}", "language_model."),),
    renamed={
        "llm_config": "text_config",
        "img_context_token_id": "image_token_id",
        "sound_context_token_id": "audio_token_id",
        "video_context_token_id": "video_token_id",
    },
)
WRAPPERS: Mapping[str, Wrapper] = {
    "kimi_k25": Wrapper(
        architectures=("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
        texts=("deepseek_v3", "kimi_k2"),
        prefixes=_LLAVA,
        layers=("layers.", "blocks."),  # transformers 5.24 saves the second
    ),
    "gemma3": Wrapper(
        architectures=("Gemma3ForConditionalGeneration",),
        texts=("gemma3_text",),
        prefixes=_LLAVA,
        unread=("final_logit_softcapping",),
    ),
    "llama4": Wrapper(
        architectures=("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
        texts=("llama4_text",),
        prefixes=_LLAVA[:1],
    ),
    "gemma4": Wrapper(architectures=("Gemma4ForConditionalGeneration",), texts=("gemma4_text",)),
    "mistral3": Wrapper(
        architectures=("Mistral3ForConditionalGeneration",),
        texts=("mistral", "ministral3", "mistral4"),
        prefixes=_LLAVA,
    ),
    "minimax_m3_vl": Wrapper(
        architectures=("MiniMaxM3SparseForConditionalGeneration",),
        texts=("minimax_m3_vl_text",),
        prefixes=_LLAVA,
    ),
    "step3p7": Wrapper(
        architectures=("Step3p7ForConditionalGeneration",),
        texts=("step3p5",),
        prefixes=(("model.", ""), ("model.language_model.", "")),
    ),
    "qwen3_vl_moe": Wrapper(
        architectures=("Qwen3VLMoeForConditionalGeneration",), texts=("qwen3_vl_moe_text",)
    ),
    "qwen3_5_moe": Wrapper(
        architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
        texts=("qwen3_5_moe_text",),
    ),
    "qwen4_exp": Wrapper(
        architectures=("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"),
        texts=("qwen4_exp_text",),
    ),
    "glm5_next": Wrapper(
        architectures=("Glm5NextForConditionalGeneration",),
        texts=("glm5_next_text",),
        may_be_flat=True,
    ),
    "hy_v4_vl": Wrapper(
        architectures=("HYV4VLForConditionalGeneration",),
        texts=("hy_v4_vl_text",),
        prefixes=(("model.", ""), ("model.language_model.", "")),
    ),
    "glm4v_moe": Wrapper(
        architectures=("Glm4vMoeForConditionalGeneration",), texts=("glm4v_moe_text",)
    ),
    "qwen3_omni_moe": Wrapper(
        architectures=("Qwen3OmniMoeForConditionalGeneration",),
        texts=("qwen3_omni_moe_text",),
        path=("thinker_config", "text_config"),
        prefixes=(("thinker.model.", "thinker."),),
    ),
    "qwen3_omni_moe_thinker": Wrapper(
        architectures=("Qwen3OmniMoeThinkerForConditionalGeneration",),
        texts=("qwen3_omni_moe_text",),
        prefixes=(
            ("model.", ""),
            ("model.language_model.", ""),
            ("thinker.model.", "thinker."),
            ("thinker.model.language_model.", "thinker."),
        ),
    ),
    "qwen3_5": Wrapper(
        architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
        texts=("qwen3_5_text",),
    ),
    "exaone4_5": Wrapper(
        architectures=("Exaone4_5_ForConditionalGeneration",),
        texts=("exaone4", "exaone4_5_text"),
    ),
    "cohere_compass": Wrapper(
        architectures=("CohereCompassForConditionalGeneration",), texts=("cohere_compass_text",)
    ),
    "nemotron_h_omni": _NEMOTRON_OMNI,
    "NemotronH_Nano_Omni_Reasoning_V3": _NEMOTRON_OMNI,  # as it was published
}
# Parts of names of tensors that no text needs.
MEDIA_TENSORS = (
    "vision_tower.",
    "multi_modal_projector.",
    "mm_projector.",
    "patch_merge_mlp.",
    "vision_model.",
    "vit_large_projector.",
    "vit.",
    "visual.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "talker.",
    "code2wav.",
    "mlp1.",
    "sound_encoder.",
    "sound_projection.",
    "vision_projector.",
    "vision_final_layernorm.",
)
# Fields with the token that stands for a part of an image, a video or sound.
_MEDIA_TOKENS = (
    *(f"{kind}_token_{word}" for kind in ("image", "video", "audio") for word in ("id", "index")),
    "media_placeholder_token_id",
)
# Fields that the text part takes over where it lacks them.
_INHERITED = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "_name_or_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """The text part of a configuration.

    Attributes:
        wrapper: `model_type` of the whole; None if that is the text part itself.
        media_tokens: Ids of tokens that stand for other media, with the names of their fields.
    """

    config: Mapping[str, object]
    wrapper: str | None = None
    media_tokens: tuple[tuple[int, str], ...] = ()


def text_part(config: Mapping[str, object]) -> TextPart:
    """Find the part of a configuration that decides what becomes of text.

    Raises:
        ConfigError: The part is missing or no object.
        UnsupportedModelError: Its `model_type` or the wrapper's class is unknown.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in WRAPPERS:
        return TextPart(config=config)
    wrapper = WRAPPERS[model_type]
    architectures = config.get("architectures")
    if architectures and architectures not in [[name] for name in wrapper.architectures]:
        raise UnsupportedModelError(
            f"architectures = {architectures!r} is not supported for model_type {model_type!r}; "
            f"supported: {wrapper.architectures[0]}"
        )
    levels = [_with_newer_names(config, wrapper.renamed)]
    for name in wrapper.path:
        inner = levels[-1].get(name)
        if inner is None and wrapper.may_be_flat:
            inner = _fields_of_text(levels[-1], model_type)
        if not isinstance(inner, Mapping):
            raise ConfigError(f"config.json: {name} is {inner!r:.60}; expected an object")
        levels.append(inner)
    outer = {name: value for level in levels[:-1] for name, value in level.items()}
    text = {name: value for name, value in levels[-1].items() if name not in wrapper.unread}
    kind = text.setdefault("model_type", wrapper.texts[0])
    if kind not in wrapper.texts:
        raise UnsupportedModelError(
            f"{'.'.join(wrapper.path)}.model_type = {kind!r} is not supported in {model_type!r}; "
            f"supported: {', '.join(wrapper.texts)}"
        )
    for name in ("architectures", "auto_map"):  # those of the whole count
        text.pop(name, None)
    for name in _INHERITED:
        if text.get(name) is None and outer.get(name) is not None:
            text[name] = outer[name]
    # A head that is stored is used; transformers ties only where neither part says no.
    ties = [level["tie_word_embeddings"] for level in levels if "tie_word_embeddings" in level]
    ties = [value for value in ties if value is not None]
    others = [value for value in ties if not isinstance(value, bool)]
    text["tie_word_embeddings"] = others[0] if others else bool(ties) and all(ties)
    return TextPart(config=text, wrapper=model_type, media_tokens=_media_tokens(model_type, outer))


def _fields_of_text(config: Mapping[str, object], model_type: str) -> dict[str, object]:
    """The fields that are none of the wrapper's class, as that class passes them on."""
    own = {*class_defaults(model_type).values, "model_type"}
    return {name: value for name, value in config.items() if name not in own}


def _with_newer_names(
    config: Mapping[str, object], renamed: Mapping[str, str]
) -> Mapping[str, object]:
    for older, name in renamed.items():
        if config.get(name) is None:
            config = {**config, name: config.get(older)}
    return config


def _media_tokens(model_type: str, outer: Mapping[str, object]) -> tuple[tuple[int, str], ...]:
    defaults = class_defaults(model_type).values
    found = {name: outer.get(name, defaults.get(name)) for name in _MEDIA_TOKENS}
    return tuple((token, name) for name, token in found.items() if type(token) is int)
