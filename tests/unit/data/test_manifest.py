"""The manifest: one job for each journal, and every difference by name."""

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from raymoe.config import EngineConfig, SamplingParams
from raymoe.data import manifest as manifests
from raymoe.errors import ConfigError
from tests.unit.data.jobs import PARAMS, made


def test_a_manifest_comes_back_from_its_file_and_agrees_with_itself(tmp_path):
    path = tmp_path / "m.json"
    for params in (PARAMS, SamplingParams(structured_outputs={"choice": ["a", "b"]})):
        path.write_bytes(manifests.as_bytes(made(params=params)))
        assert manifests.read(path) == made(params=params)
        manifests.check(path, made(params=params))
        assert manifests.read(path).digest == made(params=params).digest
    assert [one.name for one in tmp_path.iterdir()] == ["m.json"]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (made(params=dataclasses.replace(PARAMS, temperature=0.5)),
         "sampling_params.temperature was 1.0, is 0.5"),
        (made(params=dataclasses.replace(PARAMS, max_tokens=16)),
         "sampling_params.max_tokens was 8, is 16"),
        (made(params=dataclasses.replace(PARAMS, stop=["y"])),
         "sampling_params.stop was ['x'], is ['y']"),
        (made(engine=EngineConfig(seed=3)), "seed was 0, is 3"),
        (made(engine=EngineConfig(dtype="float32")), "dtype was 'bfloat16', is 'float32'"),
        (made(engine=EngineConfig(kv_dtype="float16")), "kv_dtype was 'bfloat16', is 'float16'"),
        (made(engine=EngineConfig(state_dtype="bfloat16")),
         "state_dtype was 'float32', is 'bfloat16'"),
        (made(engine=EngineConfig(compute_dtype="int8", device="cpu")),
         "compute_dtype was 'auto', is 'int8'"),
        (made(engine=EngineConfig(on_too_long="truncate_left")), "on_too_long was 'error'"),
        (made(engine=EngineConfig(split_special_tokens=True)),
         "split_special_tokens was False, is True"),
        (made(engine=EngineConfig(max_model_len=99)), "max_model_len was None, is 99"),
        (made(revision="def"), "revision was 'abc', is 'def'"),
        (made(weights="9" * 64), "weights was 'dddddd"),
        (made(tokenizer="9" * 64), "tokenizer was 'eeee"),
        (made(config="9" * 64), "config was 'cccc"),
        (made(chat_template="9" * 64), "chat_template was 'ffff"),
        (made(reasoning_parser="none"), "reasoning_parser was 'auto', is 'none'"),
    ],
)  # fmt: skip
def test_every_other_job_is_refused_with_the_difference(tmp_path, now, expected):
    path = tmp_path / "m.json"
    manifests.claim(path, made())
    with pytest.raises(ConfigError) as refusal:
        manifests.claim(path, now)
    assert expected in str(refusal.value)
    assert "start anew with another output or journal_dir" in str(refusal.value)
    assert "\n" not in str(refusal.value)  # Ray shows only the last line of an actor's error
    assert now.digest != made().digest or now.revision != made().revision
    manifests.check(path, made())


def test_two_differences_are_both_named_and_the_model_with_them(tmp_path):
    differences = made().differences(made(weights="9" * 64, seed=4, model="c/d"))
    assert [one.split(" ")[0] for one in differences] == ["model", "weights", "seed"]


def test_what_does_not_change_tokens_may_change():
    same = [
        made(raymoe="9.9.9"),
        made(model="/another/place"),
        made(revision=None),
        made(engine=EngineConfig(dtype="bfloat16", num_threads=3, linger_s=0.0)),
        made(params=dataclasses.replace(PARAMS, logit_bias={1: -2.0, 3: 1.0})),
    ]
    for now in same:
        assert made().differences(now) == []
        assert now.digest == made().digest


def test_of_many_at_once_one_writes_and_the_others_agree_or_are_refused(tmp_path):
    path = tmp_path / "m.json"
    seeds = [0, 1] * 8
    outcomes = []
    start = threading.Barrier(len(seeds))

    def claim(seed):
        start.wait()
        try:
            manifests.claim(path, made(seed=seed))
            outcomes.append((seed, True))
        except ConfigError:
            outcomes.append((seed, False))

    threads = [threading.Thread(target=claim, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winner = manifests.read(path).seed
    assert sorted(outcomes) == sorted((seed, seed == winner) for seed in seeds)
    assert [one.name for one in tmp_path.iterdir()] == ["m.json"]


def test_a_file_system_without_links_is_fine(tmp_path, monkeypatch):
    def refuse(_self, _target):
        raise PermissionError("no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    manifests.claim(tmp_path / "m.json", made())
    assert manifests.read(tmp_path / "m.json") == made()
    assert [one.name for one in tmp_path.iterdir()] == ["m.json"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": 5, "raymoe": "7.0"}', "is of format 5, written by raymoe 7.0"),
        ('{"format": 4, "raymoe": "0.1.0"}', "is damaged"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused_with_what_to_do(tmp_path, content, reason):
    path = tmp_path / "m.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"{reason}.*--overwrite"):
        manifests.claim(path, made())
    assert path.read_text() == content


def test_a_journal_from_before_a_field_goes_on(tmp_path):
    path = tmp_path / "m.json"
    before = json.loads(manifests.as_bytes(made()))
    del before["reasoning_parser"]
    path.write_text(json.dumps(before))
    manifests.check(path, made())
    assert manifests.read(path).digest == made().digest == "0f5d1a9d3ae2b8c65e7db76319c4be55"
    with pytest.raises(ConfigError, match="reasoning_parser was 'auto', is 'think'"):
        manifests.check(path, made(reasoning_parser="think"))


def test_values_of_wrong_types_are_differences(tmp_path):
    path = tmp_path / "m.json"
    path.write_bytes(manifests.as_bytes(made()))
    plain = json.loads(path.read_text())
    path.write_text(json.dumps(plain | {"sampling_params": 3, "seed": "0"}))
    with pytest.raises(ConfigError, match=r"seed was '0', is 0"):
        manifests.check(path, made())
