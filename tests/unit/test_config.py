"""Sampling parameters and engine configuration: defaults, types, ranges, messages."""

import contextlib
import math
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.config import EngineConfig, SamplingParams, Settings
from raymoe.errors import ConfigError, UnknownOptionError


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert (params.n, params.seed, params.logprobs, params.stop) == (1, None, None, ())


def test_null_means_not_given():
    assert SamplingParams.from_dict({"max_tokens": None, "top_p": None}) == SamplingParams()


def test_unknown_key_is_refused_with_a_suggestion():
    with pytest.raises(UnknownOptionError, match="did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 1})


def test_an_integer_stays_an_integer_and_a_number_becomes_a_float():
    params = SamplingParams.from_dict({"max_tokens": 5, "temperature": 0})
    assert type(params.max_tokens) is int
    assert type(params.temperature) is float


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": True}, r"max_tokens is True \(bool\)"),
        ({"max_tokens": 5.0}, r"max_tokens is 5.0 \(float\)"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be 1 to"),
        ({"max_tokens": 2**20 + 1}, "it must be 1 to 1048576"),
        ({"max_tokens": 10**5000}, "it must be 1 to 1048576"),
        ({"min_tokens": 17}, "min_tokens is 17, more than max_tokens 16"),
        ({"top_p": "0.5"}, r"top_p is '0.5' \(str\)"),
        ({"top_p": 0}, "top_p is 0; it must be more than 0"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be 0 to 1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1; it must be 0 to"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; it must be -2 to 2"),
        ({"n": 65}, "n is 65; it must be 1 to 64"),
        ({"logprobs": 65}, "logprobs is 65; it must be 0 to 64"),
        ({"logprobs": True}, "logprobs is True"),
        ({"seed": -2}, "seed is -2"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
        ({"stop": [""]}, "a string of 0 characters"),
        ({"stop": ["x"] * 17}, "stop has 17 entries; at most 16"),
        ({"stop": [1]}, "stop contains 1"),
        ({"stop": 3}, "stop is 3; it takes a list"),
        ({"stop_token_ids": [-1]}, "stop_token_ids entry is -1"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'; it takes a list"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias key is 'x'"),
        ({"logit_bias": {3: 1000}}, "logit_bias of token 3 is 1000"),
        ({"logit_bias": [1]}, "logit_bias is"),
        ({"structured_outputs": {}}, "structured_outputs has none; it takes one of"),
    ],
)
def test_bad_value_is_refused_with_field_value_and_limit(options, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams.from_dict(options)


def test_something_that_is_not_a_mapping_is_refused():
    with pytest.raises(ConfigError, match="sampling_params is a list, not a mapping"):
        SamplingParams.from_dict([("n", 1)])


@given(st.dictionaries(st.text(max_size=12), st.integers() | st.floats() | st.text() | st.none()))
def test_any_mapping_gives_parameters_or_a_config_error(options):
    with contextlib.suppress(ConfigError):
        assert SamplingParams.from_dict(options).n == 1


def test_overrides_replace_key_by_key():
    defaults = SamplingParams(max_tokens=9, temperature=0.5)
    assert defaults.override({"temperature": 0.7, "max_tokens": None}) == SamplingParams(
        max_tokens=9, temperature=0.7
    )


def test_logit_bias_accepts_decimal_text_keys_and_drops_nulls():
    params = SamplingParams.from_dict({"logit_bias": {"7": 2, "8": None}})
    assert params.logit_bias == {7: 2.0}


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop_strings == ("END",)


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_almost_zero_temperature_is_greedy(temperature):
    assert SamplingParams(temperature=temperature).is_greedy


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"device": "tpu"},
        {"on_too_long": "drop"},
        {"num_threads": 0},
        {"host_memory_bytes": 1.5},
        {"linger_s": -1},
        {"max_queued_rows": 0},
        {"seed": -1},
    ],
)
def test_bad_engine_option_is_refused_by_name(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        EngineConfig(**options)


@pytest.mark.parametrize("device", ["cuda", "emulated"])
def test_a_cache_of_int8_is_for_cores(device):
    assert EngineConfig(kv_dtype="int8", device="cpu").kv_dtype == "int8"
    with pytest.raises(ConfigError, match=f"by the cores alone, and the device {device!r}"):
        EngineConfig(kv_dtype="int8", device=device)


def test_unknown_engine_option_is_refused_with_a_suggestion():
    with pytest.raises(UnknownOptionError, match="did you mean 'num_threads'"):
        EngineConfig.from_dict({"num_thread": 2})


def test_settings_come_from_the_environment_that_is_passed():
    settings = Settings.from_environment({"RAYMOE_NUM_THREADS": "3", "RAYMOE_CACHE": "/c"})
    assert (settings.num_threads, str(settings.cache_directory)) == (3, "/c")


@pytest.mark.parametrize("text", ["0", "-1", "two", "1e3", "9" * 40])
def test_malformed_setting_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="RAYMOE_NUM_THREADS"):
        Settings.from_environment({"RAYMOE_NUM_THREADS": text})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(max_new_tokens=5), "'max_new_tokens'; did you mean 'max_tokens'?"),
        (lambda: SamplingParams(num_beams=4), "there is no beam search"),
        (lambda: EngineConfig(tensor_paralel_size=2), "did you mean 'tensor_parallel_size'?"),
        (lambda: EngineConfig(torch_dtype="auto"), "did you mean 'dtype'?"),
        (lambda: EngineConfig.from_dict({"quantization": "fp8"}), "read from the model"),
        (lambda: SamplingParams.from_dict({"best_of": 3}), "it is not implemented"),
    ],
)
def test_unknown_names_are_told_what_they_are_called_here(make, message):
    with pytest.raises(UnknownOptionError, match=re.escape(message)) as caught:
        make()
    again = pickle.loads(pickle.dumps(caught.value.at(row=3, column="prompt", path="/a")))
    assert str(again) == str(caught.value)
    assert (again.row, again.column, again.path) == (3, "prompt", "/a")
    assert (again.name, again.suggestion) == (caught.value.name, caught.value.suggestion)


def test_what_of_vllm_changes_no_answer_is_taken(caplog):
    same = {
        "detokenize": True, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0,
        "spaces_between_special_tokens": True, "logits_processors": [], "max_tokens": 3,
    }  # fmt: skip
    assert SamplingParams(**same) == SamplingParams.from_dict(same) == SamplingParams(max_tokens=3)
    assert SamplingParams().override(same) == SamplingParams(max_tokens=3)
    guided = {"json": {"type": "object"}, "backend": "xgrammar", "_backend": None}
    params = SamplingParams.from_dict({"guided_decoding": guided})
    assert params == SamplingParams(structured_outputs={"json": {"type": "object"}})
    with pytest.raises(ConfigError, match="guided_decoding is a list; it takes a mapping"):
        SamplingParams(guided_decoding=["a"])
    with pytest.raises(ConfigError, match="are the same; give one"):
        SamplingParams(guided_decoding={"choice": ["a"]}, structured_outputs={"choice": ["a"]})
    engine = {"trust_remote_code": True, "download_dir": "/x", "enable_prefix_caching": True}
    assert EngineConfig(**engine) == EngineConfig.from_dict(engine) == EngineConfig()
    assert not caplog.records
    placed = {"load_format": "runai_streamer", "enforce_eager": True, "pipeline_parallel_size": 4}
    assert EngineConfig.from_dict(placed | {"load_format": "fastsafetensors"}) == EngineConfig()
    assert EngineConfig(**placed) == EngineConfig()
    assert [record.message.count("=") for record in caplog.records] == [3, 3]


def test_a_user_without_a_home_keeps_nothing(monkeypatch):
    def fail(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", fail)
    directory = Settings.from_environment({}).cache_directory
    assert not directory.exists()
    with pytest.raises(NotADirectoryError):
        directory.mkdir(parents=True)
