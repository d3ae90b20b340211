"""Files of ours that are damaged in every way: each command works, or says what is wrong."""

import copy
import dataclasses
import itertools
import json
import math
import random

import pytest

from raymoe.cli import run
from raymoe.data import manifest as manifests
from raymoe.data.journal import DamagedRecordError, decode_generation, encode_generation
from raymoe.errors import CheckpointError, ConfigError
from raymoe.openai.store import BatchRecord, FileRecord, LineError, Store
from raymoe.specs.hardware import find_hardware
from raymoe.units import parse_bytes
from tests.unit.data.jobs import made
from tests.unit.data.journals import row
from tests.unit.data.statuses import actor, job, passed, planned, with_plan, write

DEEP = "DEEP"  # stands for a list in a list, 100,000 times
REMOVED = object()
VALUES = (
    REMOVED, None, "text", "\ud800\x1b[2J", 3, -1, 0, True, [], {}, [[]], math.nan, math.inf,
    -1e300, 1e-320, 2**63, 10**400, DEEP,
)  # fmt: skip
WHOLE = (
    b"", b"[]", b"null", b"NaN", b"3", b'"x"', b"{}", b"[" * 100_000, b'{"a":' * 100_000,
    b"9" * 5000, b"\x00" * 100, b"\xef\xbb\xbf{}", b'{"a": 1, "a": 2}', b'{"surplus": 1}',
)  # fmt: skip


def dump(plain):
    return json.dumps(plain).replace('"DEEP"', "[" * 100_000 + "]" * 100_000).encode()


def places(plain, prefix=()):
    entries = enumerate(plain[:2]) if isinstance(plain, list) else ()
    for key, value in plain.items() if isinstance(plain, dict) else entries:
        yield (*prefix, key)
        yield from places(value, (*prefix, key))


def changed(plain, place, value):
    plain = copy.deepcopy(plain)
    *above, last = place
    inner = plain
    for key in above:
        inner = inner[key]
    if value is REMOVED:
        del inner[last]
    else:
        inner[last] = value
    return dump(plain)


def mutations(plain):
    """Yield a file that is damaged in one place, or as a whole."""
    text = dump(plain)
    yield from (*WHOLE, text[: len(text) // 2], text[:-3], text.replace(b"a", b"\xff", 1))
    for place, value in itertools.product([*places(plain)], VALUES):
        yield changed(plain, place, value)


def some_mutations(plain):
    """Yield the damages of a whole file, and each of a place in some place."""
    chosen = random.Random(1)
    all_places = [*places(plain)]
    yield from itertools.islice(mutations(plain), len(WHOLE) + 3)
    for value in VALUES:
        yield changed(plain, chosen.choice(all_places), value)


def job_files(folder):
    """A job with two actors; its status and its manifest."""
    folder.mkdir()
    plan = planned()
    actors = [with_plan(actor(), plan), actor("node-b-2-def")]
    actors = [dataclasses.replace(one, history=one.history[:3]) for one in actors]
    write(folder / "answers.status", job=job(), actors=actors, steps=[passed(plan)])
    manifests.claim(folder / "answers.manifest.json", made())
    output = str(folder / "answers")
    return [["status", output], ["status", output, "--json"], ["report", output, "--samples"]]


def hardware_file(folder):
    folder.mkdir()
    find_hardware("l4").to_file(folder / "node.json")
    return [[*PLAN, "--hardware", str(folder / "node.json")]]


def price_file(folder):
    folder.mkdir()
    prices = {"g6.8xlarge": 2.0, "g5.8xlarge": {"on_demand": 2.4, "spot": 1.0}}
    plain = {"source": "x", "date": "d", "instances": prices}
    (folder / "prices.json").write_text(json.dumps(plain))
    return [[*PLAN, "--hardware", "l4", "--prices", str(folder / "prices.json")]]


def length_file(folder):
    folder.mkdir()
    (folder / "lengths.jsonl").write_text('{"prompt_tokens": 3, "generated_tokens": 4}')
    return [[*PLAN[:3], "--hardware", "l4", "--lengths", str(folder / "lengths.jsonl")]]


def engine_file(folder):
    folder.mkdir()
    plain = {"max_model_len": 10, "host_memory_bytes": "1GiB", "policy": {"max_num_seqs": 3}}
    (folder / "engine.json").write_text(json.dumps(plain))
    output, config = str(folder.parent / "out"), str(folder / "engine.json")
    return [["generate", "--model", str(folder), "--input", str(folder), "--output", output,
             "--engine-config", config]]  # fmt: skip


def model_files(folder):
    folder.mkdir()
    plain = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 264,
             "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
             "num_experts_per_tok": 2, "rope_theta": 1e4, "rms_norm_eps": 1e-5}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(plain))
    return [["models", str(folder)], ["plan", "--model", str(folder), *PLAN[3:], "--hardware",
                                      "l4"]]  # fmt: skip


PLAN = ["plan", "--model", "mixtral-8x7b", "--prompt-tokens", "10", "--generated-tokens", "5"]
KINDS = {
    "job": job_files, "hardware": hardware_file, "prices": price_file, "lengths": length_file,
    "engine": engine_file, "model": model_files,
}  # fmt: skip


def check_all(capsys, folder, make, damage):
    commands = make(folder)
    for path in sorted(one for one in folder.rglob("*.json*") if one.is_file()):
        good = path.read_bytes()
        for data in damage(json.loads(good)):
            path.write_bytes(data)
            for command in commands:
                assert run(command) in {0, 1, 2}, (path.name, data[:200])
                said = capsys.readouterr().err
                assert "--debug shows where" not in said, (path.name, data[:200])
        path.write_bytes(good)


@pytest.mark.parametrize("kind", [pytest.param("job", marks=pytest.mark.slow), *[*KINDS][1:]])
def test_commands_name_what_is_wrong_with_a_file(tmp_path, capsys, kind):
    check_all(capsys, tmp_path / "files", KINDS[kind], some_mutations)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_commands_name_what_is_wrong_with_any_place_of_a_file(tmp_path, capsys, kind):
    check_all(capsys, tmp_path / "files", KINDS[kind], mutations)


def test_numbers_that_overflow_are_no_status(tmp_path, capsys):
    (command, *_) = job_files(tmp_path / "files")
    path = tmp_path / "files" / "answers.status" / "job.json"
    plain = json.loads(path.read_bytes())
    for place, value in [("elapsed_s", 10**400), ("total_rows", 2**63), ("num_rows", -1),
                         ("price_per_hour", math.nan), ("elapsed_s", 1e-320)]:  # fmt: skip
        path.write_bytes(changed(plain, (place,), value))
        assert run(command) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"could not be read: job.json: content: {place} is" in shown


def said_by(call):
    """Return what an error of ours says; "" if there is none."""
    try:
        call()
    except (ConfigError, CheckpointError, DamagedRecordError) as error:
        return str(error)
    return ""


def test_records_of_a_server_and_rows_of_a_journal_are_named_too(tmp_path):
    file = FileRecord(id=f"file-{0:032x}", num_bytes=1, created_at=2, filename="a", purpose="batch")
    batch = BatchRecord(
        id=f"batch_{0:032x}", created_at=1, endpoint="e", input_file_id=file.id,
        completion_window="1h", metadata=(("a", "b"),), errors=(LineError(code="a", message="b"),),
    )  # fmt: skip
    for folder, record in (("files", file), ("batches", batch)):
        path = tmp_path / folder / f"{record.id}.json"
        path.parent.mkdir(exist_ok=True)
        for data in mutations(json.loads(json.dumps(dataclasses.asdict(record)))):
            path.write_bytes(data)
            reason = said_by(lambda: Store(tmp_path).close())
            assert not reason or path.name in reason
        path.write_bytes(changed(dataclasses.asdict(record), ("id",), "../../.."))
        with pytest.raises(ConfigError, match="it is the file's name"):
            Store(tmp_path)
        path.unlink()
    for data in mutations(json.loads(encode_generation(row(1)))):
        reason = said_by(lambda data=data: decode_generation(data))
        assert not reason or "holds no finished row" in reason


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "/", "\udcff", "a" * 5000, "a\0b"])
@pytest.mark.parametrize("command", ["status", "report", "models", "generate", "plan", "serve"])
def test_paths_that_cannot_be_are_named(tmp_path, monkeypatch, capsys, command, path):
    monkeypatch.chdir(tmp_path)
    arguments = {
        "generate": ["--model", path, "--input", path, "--output", path],
        "plan": ["--model", path, "--hardware", path],
        "serve": ["--model", path, "--directory", path],
    }
    assert run([command, *arguments.get(command, [path])]) in {1, 2}
    assert "--debug shows where" not in capsys.readouterr().err


def test_what_the_file_system_says_is_an_error_with_its_path(tmp_path, capsys):
    job_files(tmp_path / "files")
    page = tmp_path / "gone" / "page.html"
    assert run(["report", str(tmp_path / "files" / "answers"), "--output", str(page)]) == 1
    assert f"{page} cannot be written: No such file" in capsys.readouterr().err
    assert run(["models", str(tmp_path / ("a" * 300))]) == 1
    assert "File name too long; check the path" in capsys.readouterr().err


def test_sizes_beyond_all_memory_are_no_sizes():
    with pytest.raises(ValueError, match="too large for a size"):
        parse_bytes("9" * 400)
    assert parse_bytes(f"{2**62}") == 2**62
