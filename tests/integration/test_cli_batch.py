"""`raymoe generate` on OpenAI batch files, with the bundled model: file to file."""

import json

import pytest

from raymoe.assets import demo_model_path
from raymoe.cli import run
from tests.integration.test_cli_generate import generate, read_lines, refused, write_lines


def request(custom_id, content="Mar 5th 2021", url="/v1/chat/completions", **body):
    asked = {"messages": [{"role": "user", "content": content}]}
    if url == "/v1/completions":
        asked = {"prompt": content}
    body = {"model": "demo", "max_tokens": 24, **asked, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def requests():
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    json_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    conversation = [
        {"role": "user", "content": "Mar 5th 2021"},
        {"role": "assistant", "content": "2021-03-05"},
        {"role": "user", "content": "Apr 6th 2022"},
    ]
    return [
        *(request(f"plain-{index}", f"June {index + 1}th 2020") for index in range(12)),
        request("samples", n=3, temperature=1.0, seed=5, logprobs=True, top_logprobs=2),
        request("turns", messages=conversation),
        request("text", url="/v1/completions", stop=["\n"], logprobs=1),
        request("form", response_format=json_schema, max_tokens=300, temperature=0),
        request("tools", tools=[{"type": "function", "function": {"name": "add"}}]),
        request("stream", stream=True),
        request("hot", temperature="hot"),
        request("long", "x" * 3000),
        request("embed", url="/v1/embeddings"),
        {**request("number"), "custom_id": 7},
        {"custom_id": "empty", "method": "POST", "url": "/v1/chat/completions", "body": None},
    ]


BAD = {
    "tools": "takes no tools",
    "stream": "stream True",
    "hot": "temperature is 'hot'",
    "long": "bytes; at most",
    "embed": "'/v1/embeddings'",
    "empty": "column 'body' is",
}


@pytest.mark.slow
@pytest.mark.ray
def test_each_request_of_a_batch_has_its_response_also_when_resumed(tmp_path):
    lines = [json.dumps(one) for one in requests()]
    source = write_lines(tmp_path / "batch.jsonl", *lines[:5], "{broken", *lines[5:])
    output = tmp_path / "out.jsonl"
    options = ("--model", demo_model_path(), "--input", source, "--output", output)
    done = generate(*options)
    assert done.returncode == 0, done.stderr
    responses = read_lines(output)
    assert len(responses) == len(lines) + 1
    assert all(set(r) == {"id", "custom_id", "response", "error"} for r in responses)
    by_id = {r["custom_id"]: r for r in responses if r["custom_id"] is not None}
    without_id = [r["error"]["message"] for r in responses if r["custom_id"] is None]
    assert sorted("not JSON" in message for message in without_id) == [False, True]
    check_good(by_id)
    for custom_id, reason in BAD.items():
        assert by_id[custom_id]["response"]["status_code"] == 400
        assert reason in by_id[custom_id]["error"]["message"]

    # As after a crash: some lines are written.
    kept = [r for r in responses if r["custom_id"] not in ("plain-3", "samples", "hot")]
    output.write_text("".join(f"{json.dumps(r)}\n" for r in kept))
    again = generate(*options, "--resume")
    assert again.returncode == 0, again.stderr
    assert f"{len(kept)} of {len(responses)} rows are already written" in again.stderr
    assert sorted(map(lasting, read_lines(output))) == sorted(map(lasting, responses))


def check_good(by_id):
    for custom_id in by_id.keys() - BAD.keys():
        assert by_id[custom_id]["error"] is None, custom_id
        body = by_id[custom_id]["response"]["body"]
        usage = body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert body["model"] == "demo"
    samples = by_id["samples"]["response"]["body"]["choices"]
    assert [choice["index"] for choice in samples] == [0, 1, 2]
    assert all(len(one["top_logprobs"]) == 2 for one in samples[2]["logprobs"]["content"])
    text = by_id["text"]["response"]["body"]
    assert text["object"] == "text_completion"
    assert set(text["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    (form,) = by_id["form"]["response"]["body"]["choices"]
    assert set(json.loads(form["message"]["content"])) == {"ok"}
    turns, plain = (by_id[name]["response"]["body"]["usage"] for name in ("turns", "plain-0"))
    assert turns["prompt_tokens"] > 2 * plain["prompt_tokens"]


def lasting(response):
    """A response without the time when it was written."""
    body = {key: value for key, value in response["response"]["body"].items() if key != "created"}
    return json.dumps([response["custom_id"], body, response["error"]])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--id-column", "url"), "--id-column has no meaning for an OpenAI batch"),
        (("--tools-column", "x"), "--tools-column has no meaning"),
        (("--samples-as-rows",), "--samples-as-rows has no meaning for an OpenAI batch"),
        (("--output-schema", "tests.invoices:Invoice"), "--output-schema has no meaning for an O"),
        (("--format", "csv"), "--format is 'csv'; it must be one of auto, table"),
        (("--output", "parts"), "responses of an OpenAI batch are JSON lines"),
        (("--format", "table"), "neither column 'prompt' nor 'messages' exists"),
    ],
)
def test_bad_usage_is_said_before_anything_runs(capfd, tmp_path, options, reason):
    source = write_lines(tmp_path / "in.jsonl", json.dumps(request("a")))
    basic = ("--model", demo_model_path(), "--input", source, "--output", tmp_path / "out.jsonl")
    code, line = refused(capfd, *basic, *options)
    assert code == 2
    assert reason in line


def test_ids_that_occur_twice_are_refused(capfd, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *[json.dumps(request("a"))] * 2)
    basic = ("--model", demo_model_path(), "--input", source, "--output", tmp_path / "out.jsonl")
    assert run(["generate", *map(str, basic)]) == 2
    assert "'custom_id' has 1 ids that occur more than once" in capfd.readouterr().err
