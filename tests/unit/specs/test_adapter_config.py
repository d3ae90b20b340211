"""Configurations of adapters: those of public fine-tunes, of PEFT itself, and damaged ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftConfig

from raymoe.config import EngineConfig, with_base
from raymoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from raymoe.specs.adapter_config import AdapterConfig
from raymoe.specs.files import check_adapter

PUBLISHED = json.loads((Path(__file__).parents[2] / "data/adapter_configs.json").read_text())
MINIMAL = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}


def of(**fields: Any) -> AdapterConfig:
    return AdapterConfig.of(MINIMAL | fields, "adapter_config.json")


def written(config: PeftConfig, directory: Path) -> AdapterConfig:
    config.save_pretrained(directory)
    return AdapterConfig.read(directory)


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case["repository"])
def test_published_adapters_are_read_or_refused_by_name(case: dict[str, Any]) -> None:
    fields = case["config"]
    if "r" not in fields:
        with pytest.raises(UnsupportedModelError, match="no peft_type, so that PEFT has"):
            AdapterConfig.of(fields, "adapter_config.json")
        return
    config = AdapterConfig.of(fields, "adapter_config.json")
    assert config.base == (fields["base_model_name_or_path"] or "")
    assert config.scale_of("model.layers.0.self_attn.q_proj") == fields["lora_alpha"] / fields["r"]


def test_what_peft_writes_is_read(tmp_path: Path) -> None:
    config = written(
        LoraConfig(
            r=4,
            lora_alpha=6,
            use_rslora=True,
            rank_pattern={"layers.1.self_attn.q_proj": 16, r".*\.o_proj": 9},
            alpha_pattern={"^model.layers.0.self_attn.q_proj": 10, "o_proj": 3},
            target_parameters=["mlp.experts.gate_up_proj"],
        ),
        tmp_path,
    )
    layers = "model.layers"
    assert config.scale_of(f"{layers}.0.mlp.up_proj") == 3
    assert config.scale_of(f"{layers}.0.self_attn.q_proj") == 5
    assert config.scale_of(f"{layers}.1.self_attn.q_proj") == 1.5
    assert config.scale_of(f"{layers}.11.self_attn.q_proj") == 3
    assert config.rank_of(f"{layers}.1.self_attn.o_proj") == 9
    assert config.scale_of(f"{layers}.1.self_attn.o_proj") == 1
    assert config.target_parameters == ("mlp.experts.gate_up_proj",)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (AdaLoraConfig(total_step=9), "the adapter is ADALORA, supported is PEFT's LORA; merge"),
        (IA3Config(), "the adapter is IA3"),
        (LoraConfig(use_dora=True), "DoRA is not supported, only LoRA and rsLoRA; merge it into"),
        (LoraConfig(use_qalora=True), "use_qalora = True"),
        (LoraConfig(fan_in_fan_out=True), "fan_in_fan_out = True"),
        (LoraConfig(layer_replication=[(0, 2), (1, 3)]), "layer_replication ="),
        (LoraConfig(trainable_token_indices=[1, 2]), "trainable_token_indices ="),
        (
            LoraConfig(alora_invocation_tokens=[5], task_type="CAUSAL_LM"),
            "alora_invocation_tokens =",
        ),
        (LoraConfig(init_lora_weights="pissa_niter_4"), "'pissa_niter_4' has changed the base's"),
        (LoraConfig(init_lora_weights="olora"), "'olora' has changed the base's weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_kinds_are_refused_by_name(config: PeftConfig, match: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        written(config, tmp_path)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"r": 0}, r"adapter_config\.json: r is 0; expected a rank of 1 to 65536"),
        ({"r": "8"}, "r is '8'"),
        ({"lora_alpha": None}, "lora_alpha is None; expected a number"),
        ({"rank_pattern": {"q_proj": -1}}, r"rank_pattern\['q_proj'\] is -1"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is .*expected an object"),
        ({"target_parameters": "experts"}, "target_parameters is 'experts', not names"),
        ({"rank_pattern": {"(a+)+b": 2}}, r"module pattern '\(a\+\)\+b' is not understood"),
        ({"rank_pattern": {f"{one}.*.*.*x": 2 for one in "abc"}}, "match a name in more than"),
        ({"rank_pattern": dict.fromkeys(map(str, range(1025)), 1)}, "rank_pattern has 1,025 ent"),
        ({"alpha_pattern": dict.fromkeys(map(str, range(1025)), 1)}, "alpha_pattern has 1,025 e"),
        ({"target_parameters": ["a"] * 1025}, "target_parameters has 1,025 entries"),
        ({"some_new_field": 3}, "some_new_field = 3 is not supported"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_fields_that_cannot_be_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=match):
        of(**fields)


def test_many_patterns_are_compiled_once_and_not_for_each_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More of them than the cache of re holds; the first that matches counts."""
    patterns = {f"layers.{number}.q_proj": number + 1 for number in range(1000)}
    config = of(rank_pattern=patterns | {r"layers\.1\.(q|k)_proj": 7}, alpha_pattern=patterns)
    monkeypatch.setattr(re, "compile", None)
    monkeypatch.setattr(re, "match", None)
    ranks = [config.rank_of(f"model.layers.{number}.q_proj") for number in range(1000)]
    assert ranks == [*range(1, 1001)]
    assert config.rank_of("model.layers.1.k_proj") == 7
    assert config.scale_of("model.layers.9.q_proj") == 1


def adapter(directory: Path, **fields: Any) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(MINIMAL | fields))
    return directory


def test_the_base_of_an_adapter_is_found_or_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    none = EngineConfig()
    here = adapter(tmp_path / "here", base_model_name_or_path=str(tmp_path / "base"))
    source, config = with_base("here", none)
    assert (source, config.adapter) == (str(tmp_path / "base"), str(here))
    assert with_base(source, config) == (source, config)
    hub = adapter(tmp_path / "hub", base_model_name_or_path="org/model")
    assert with_base(hub, EngineConfig(adapter="hub"))[0] == "org/model"
    for base, match in (
        (
            "/train/run/model",
            "run/model., which is not on this machine; give that model",
        ),
        (None, "names no base_model_name_or_path; give that model, and adapter="),
    ):
        lost = adapter(tmp_path / f"lost{len(str(base))}", base_model_name_or_path=base)
        with pytest.raises(ConfigError, match=match):
            with_base(lost, none)
    with pytest.raises(ConfigError, match=r"adapter=.* is another one"):
        with_base(here, EngineConfig(adapter=str(hub)))
    with pytest.raises(ConfigError, match=r"adapter is 'org/lora', which is no directory"):
        with_base(tmp_path / "base", EngineConfig(adapter="org/lora"))
    with pytest.raises(CheckpointError, match=r"base: there is no adapter_config\.json"):
        with_base(tmp_path / "base", EngineConfig(adapter=tmp_path / "base"))
    with pytest.raises(ConfigError, match="adapter is 3; it takes the path of a directory"):
        EngineConfig(adapter=3)


def test_an_adapter_beside_a_model_is_applied_if_it_is_given(tmp_path: Path) -> None:
    both = adapter(tmp_path / "both", base_model_name_or_path="org/model")
    (both / "config.json").write_text("{}")
    assert with_base(both, EngineConfig(adapter=both))[0] == both
    check_adapter(both, adapter=both)
    with pytest.raises(CheckpointError, match="Give the directory as adapter too"):
        check_adapter(both, adapter=tmp_path)
    check_adapter(both, adapter=tmp_path, is_ignored=True)
    with pytest.raises(ConfigError, match="the adapter beside the model, which ignore_adapter"):
        check_adapter(both, adapter=both, is_ignored=True)
