"""Tiny random models of every family, odd ones included.

Weights are drawn wide (`initializer_range` 0.3), so that decisions are clear and rounding does not
take them.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import transformers

from tests.parity.combined_families import COMBINED_FAMILIES
from tests.parity.compressed_families import COMPRESSED_FAMILIES
from tests.parity.dense_families import DENSE_FAMILIES
from tests.parity.hybrid_families import HYBRID_FAMILIES
from tests.parity.latent_families import LATENT_FAMILIES
from tests.parity.norm_families import NORM_FAMILIES
from tests.parity.odd_families import ODD_FAMILIES
from tests.parity.sigmoid_families import SIGMOID_FAMILIES
from tests.parity.softmax_families import SOFTMAX_FAMILIES
from tests.parity.state_families import STATE_FAMILIES
from tests.parity.wrapper_families import WRAPPER_FAMILIES

FAMILY_CONFIGS = {
    "mixtral": "MixtralConfig",
    "qwen2_moe": "Qwen2MoeConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "olmoe": "OlmoeConfig",
    "llama": "LlamaConfig",
    "qwen3": "Qwen3Config",
    "mistral": "MistralConfig",
    "glm4_moe": "Glm4MoeConfig",
    "dots1": "Dots1Config",
    "minimax_m2": "MiniMaxM2Config",
    "ernie4_5_moe": "Ernie4_5_MoeConfig",
    "hunyuan_v1_moe": "HunYuanMoEV1Config",
    "granitemoe": "GraniteMoeConfig",
    "phimoe": "PhimoeConfig",
    "dbrx": "DbrxConfig",
    "gpt_oss": "GptOssConfig",
    "deepseek_v2": "DeepseekV2Config",
    "deepseek_v3": "DeepseekV3Config",
    "glm4_moe_lite": "Glm4MoeLiteConfig",
    "deepseek_v32": "DeepseekV32Config",
    "glm_moe_dsa": "GlmMoeDsaConfig",
    "mimo_v2_flash": "MiMoV2FlashConfig",
    "llama4_text": "Llama4TextConfig",
    "llama4": "Llama4Config",
    "exaone_moe": "ExaoneMoeConfig",
    "minimax_m3_vl_text": "MiniMaxM3VLTextConfig",
    "minimax_m3_vl": "MiniMaxM3VLConfig",
    "step3p7": "Step3p7Config",
    "afmoe": "AfmoeConfig",
    "laguna": "LagunaConfig",
    "cohere2_moe": "Cohere2MoeConfig",
    "flex_olmo": "FlexOlmoConfig",
    "olmo3": "Olmo3Config",
    "gemma3_text": "Gemma3TextConfig",
    "gemma4_text": "Gemma4TextConfig",
    "gemma3": "Gemma3Config",
    "gemma4": "Gemma4Config",
    "qwen2": "Qwen2Config",
    "phi3": "Phi3Config",
    "granite": "GraniteConfig",
    "ministral3": "Ministral3Config",
    "mistral4": "Mistral4Config",
    "solar_open": "SolarOpenConfig",
    "hy_v3": "HYV3Config",
    "granitemoeshared": "GraniteMoeSharedConfig",
    "kimi_k25": "Kimi_K25Config",
    "mistral3": "Mistral3Config",
    "qwen3_vl_moe": "Qwen3VLMoeConfig",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerConfig",
    "glm4v_moe": "Glm4vMoeConfig",
    "qwen3_next": "Qwen3NextConfig",
    "qwen3_5_moe_text": "Qwen3_5MoeTextConfig",
    "qwen3_5_moe": "Qwen3_5MoeConfig",
    "qwen4_exp_text": "Qwen4ExpTextConfig",
    "qwen4_exp": "Qwen4ExpConfig",
    "granitemoehybrid": "GraniteMoeHybridConfig",
    "nemotron_h": "NemotronHConfig",
    "lfm2_moe": "Lfm2MoeConfig",
    "kimi_linear": "KimiLinearConfig",
    "qwen3_5_text": "Qwen3_5TextConfig",
    "qwen3_5": "Qwen3_5Config",
    "glm4": "Glm4Config",
    "olmo2": "Olmo2Config",
    "smollm3": "SmolLM3Config",
    "seed_oss": "SeedOssConfig",
    "ernie4_5": "Ernie4_5Config",
    "exaone4": "Exaone4Config",
    "exaone4_5": "Exaone4_5_Config",
    "hunyuan_v1_dense": "HunYuanDenseV1Config",
    "internlm3": "InternLM3Config",
    "iquestcoder": "IQuestCoderConfig",
    "cohere": "CohereConfig",
    "cohere2": "Cohere2Config",
    "cohere_compass_text": "CohereCompassTextConfig",
    "cohere_compass": "CohereCompassConfig",
    "lfm2": "Lfm2Config",
    "lfm3": "Lfm3Config",
    "kolibri1": "Kolibri1Config",
    "mellum": "MellumConfig",
    "flint": "FlintConfig",
    "granitemoe_swa": "GraniteMoeSWAConfig",
    "granite_swa": "GraniteSWAConfig",
    "sarvam_moe": "SarvamMoEConfig",
    "sarvam_mla": "SarvamMLAConfig",
    "axk1": "AXK1Config",
    "youtu": "YoutuConfig",
    "nemotron_h_omni": "NemotronH_Omni_Reasoning_V3_Config",
    "bailing_hybrid": "BailingHybridConfig",
    "glm5_next": "Glm5NextConfig",
    "deepseek_v4": "DeepseekV4Config",
    "hy_v4": "HYV4Config",
    "hy_v4_vl": "HYV4VLConfig",
}
# Text parts that no class runs alone.
TEXT_CONFIGS = {
    "qwen3_vl_moe_text": "Qwen3VLMoeTextConfig",
    "qwen3_omni_moe_text": "Qwen3OmniMoeTextConfig",
    "glm4v_moe_text": "Glm4vMoeTextConfig",
    "step3p5": "Step3p7TextConfig",
    "glm5_next_text": "Glm5NextTextConfig",
    "hy_v4_vl_text": "HYV4VLTextConfig",
}


def model_class(config: transformers.PreTrainedConfig) -> type[transformers.PreTrainedModel]:
    """The class that generates text; not every one is known to `AutoModelForCausalLM`."""
    known = transformers.AutoModelForImageTextToText._model_mapping
    if type(config) in known:
        return known[type(config)]
    if type(config) in (known := transformers.AutoModelForCausalLM._model_mapping):
        return known[type(config)]
    stem = type(config).__name__.removesuffix("Config")
    stem = stem.removesuffix("Text")
    kinds = ["ForCausalLM", "ForConditionalGeneration"][:: -1 if config.sub_configs else 1]
    names = (stem + kind for kind in kinds)
    found = (getattr(transformers, name) for name in names if hasattr(transformers, name))
    others = transformers.AutoModelForCausalLM._model_mapping
    return next(found, None) or others[type(config)]  # some types run by the class of another


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

    @property
    def vocab_size(self) -> int:
        return int(self.fields.get("text_config", self.fields)["vocab_size"])


_FAMILIES = {
    **SOFTMAX_FAMILIES,
    **SIGMOID_FAMILIES,
    **ODD_FAMILIES,
    **HYBRID_FAMILIES,
    **LATENT_FAMILIES,
    **NORM_FAMILIES,
    **DENSE_FAMILIES,
    **WRAPPER_FAMILIES,
    **STATE_FAMILIES,
    **COMBINED_FAMILIES,
    **COMPRESSED_FAMILIES,
}
CONFIGURATIONS = [
    Configuration(
        name=f"{family}: {variant}",
        family=family,
        # Configuration classes add to the objects they are given.
        fields=copy.deepcopy(common | differences),
        seed=seed,
    )
    for family, (common, variants) in _FAMILIES.items()
    for seed, (variant, differences) in enumerate(variants.items())
]


def first_of_each_family() -> list[Configuration]:
    """One plain configuration per family, for tests that need variety and not every oddity."""
    families: dict[str, Configuration] = {}
    for configuration in CONFIGURATIONS:
        families.setdefault(configuration.family, configuration)
    return list(families.values())
