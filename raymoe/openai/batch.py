"""Lines of an OpenAI batch file: requests to rows for `MoEGenerator`, its rows to responses.

The format is that of OpenAI's batch API: ``{"custom_id", "method", "url", "body"}`` in, ``{"id",
"custom_id", "response", "error"}`` out. Each field of a body is applied, or named in the error of
its line.
"""

import dataclasses
import hashlib
import itertools
import json
import string
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from raymoe.config import SamplingParams
from raymoe.data.columns import BYTES_COLUMN, CHOICES_COLUMN, ERROR_COLUMN
from raymoe.data.rows import TEMPLATE_COLUMN, RowError, content_digest, parse_json, shown
from raymoe.suggestions import find_absence, find_meant

ID_COLUMN, TOOLS_COLUMN = "custom_id", "tools"
TEXT_COLUMNS = (ID_COLUMN, "method", "url")
BATCH_COLUMNS = (*TEXT_COLUMNS, "body")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CONTENT_COLUMNS = ("url", "prompt", "messages", TOOLS_COLUMN, "sampling_params", TEMPLATE_COLUMN)
ROW_COLUMNS = (ID_COLUMN, "model", *CONTENT_COLUMNS)
TokenBytes = Mapping[int, bytes]
ID_CHARACTERS, ID_ALPHABET = 9, string.ascii_letters + string.digits

_SAME_NAME = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {
    "logprobs",
    "prompt_logprobs",
}
# They concern the account that is billed, caches and the order of requests, not the answer.
_WITHOUT_EFFECT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
     "prompt_cache_retention", "prompt_cache_options", "prediction", "stream_options", "priority",
     "request_id", "cache_salt")
)  # fmt: skip
# Values that ask for what is done anyway; the first is the default. Names are OpenAI's and vLLM's.
_ONLY: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True, False),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "include_reasoning": (True,),
}


def read_requests(table: pa.Table, *, error_column: str) -> pa.Table:
    """Return one row for each line.

    `table` has `BATCH_COLUMNS`, bodies as JSON text, and `error_column`: why a line cannot be used.
    """
    rows = [_read_line(line, error_column) for line in table.to_pylist()]
    columns = {
        name: pa.array([row.get(name) for row in rows], pa.string())
        for name in (*ROW_COLUMNS, error_column)
    }
    return pa.table(columns)


def _read_line(line: dict[str, Any], error_column: str) -> dict[str, str | None]:
    row = {name: line[name] for name in (ID_COLUMN, "url", error_column)}
    try:
        return row if row[error_column] else row | _read_body(line)
    except RowError as error:
        return row | {error_column: str(error).removeprefix("ValueError: ")}


def _read_body(line: dict[str, Any]) -> dict[str, str | None]:
    if line["method"] != "POST":
        raise _refused("method", f"is {shown(line['method'])}; it takes 'POST'")
    if line["url"] not in (CHAT, COMPLETION):
        raise _refused("url", f"is {shown(line['url'])}; it takes {CHAT!r} or {COMPLETION!r}")
    body = parse_json(line["body"] or "null", "body")
    if not isinstance(body, dict):
        raise _refused("body", f"is {shown(body)}; it takes an object")
    body = {name: value for name, value in body.items() if value is not None}
    model = body.pop("model", None)
    if not isinstance(model, str):
        raise _refused("body", f"has model {shown(model)}; it takes a name")
    prompt = _pop_prompt(body, is_chat=line["url"] == CHAT)
    kwargs = _pop_template_kwargs(body) if line["url"] == CHAT else None
    params = _read_params(body, is_chat=line["url"] == CHAT)
    return {
        "model": model,
        **prompt,
        "sampling_params": json.dumps(params),
        TEMPLATE_COLUMN: json.dumps(kwargs, sort_keys=True) if kwargs else None,
    }


def _pop_template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    kwargs = body.pop(TEMPLATE_COLUMN, {})
    if not isinstance(kwargs, dict):
        raise _refused("body", f"has {TEMPLATE_COLUMN} {shown(kwargs)}; it takes an object")
    names = ("reasoning_effort", "add_generation_prompt", "continue_final_message")
    return {name: body.pop(name) for name in names if name in body} | kwargs


def _pop_prompt(body: dict[str, Any], *, is_chat: bool) -> dict[str, str | None]:
    if is_chat:
        messages, tools = body.pop("messages", None), body.pop("tools", None)
        if not isinstance(messages, list):
            raise _refused("body", f"has messages {shown(messages)}; it takes a list")
        tools = _usable_tools(body, tools)
        return {"messages": json.dumps(messages), "tools": json.dumps(tools) if tools else None}
    prompt = body.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise _refused("body", f"has prompt {shown(prompt)}; it takes one text")
    return {"prompt": prompt}


def _usable_tools(body: dict[str, Any], tools: Any) -> Any:
    """Return the tools that the model may call, and take the fields about them."""
    choice = body.pop("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise _refused("body", f"has tool_choice {shown(choice)}; it takes 'auto' or 'none'")
    tools = None if choice == "none" else tools
    is_parallel = body.pop("parallel_tool_calls", True)
    if is_parallel is not True and (tools or is_parallel is not False):
        raise _refused("body", f"has parallel_tool_calls {shown(is_parallel)}; it takes True")
    return tools


def _read_params(body: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
    # Sorted, so that the text and its digest are the same in every process.
    params = {name: body.pop(name) for name in sorted(_SAME_NAME & body.keys())}
    for name in _WITHOUT_EFFECT & body.keys():
        del body[name]
    for name, values in _ONLY.items():
        value = body.pop(name, values[0])
        if value not in values:
            raise _refused("body", f"has {name} {shown(value)}; it takes {values[0]!r}")
    maximum = body.pop("max_completion_tokens", None)
    if maximum is not None:
        params["max_tokens"] = maximum
    params |= (_chat_logprobs if is_chat else _completion_logprobs)(body)
    params |= _form(body.pop("response_format", {"type": "text"}))
    if body:
        names = ", ".join(map(shown, sorted(body)))
        raise _refused("body", f"has {names}, not supported here{_explanation(body)}")
    return params


def _explanation(names: Mapping[str, Any]) -> str:
    """Say what the only unknown field is called here, or why it is absent."""
    if len(names) != 1:
        return ""
    (name,) = names
    meant = find_meant(name, _SAME_NAME | _ONLY.keys() | {"max_completion_tokens"})
    why = f"did you mean {meant!r}?" if meant else find_absence(name)
    return f"; {why}" if why else ""


def _chat_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    is_wanted, count = body.pop("logprobs", False), body.pop("top_logprobs", None)
    if is_wanted is not True:
        if is_wanted is not False or count:
            raise _refused("body", "has top_logprobs without 'logprobs': true")
        return {}
    return {"logprobs": count or 0}


def _completion_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    count = body.pop("logprobs", None)
    return {} if count is None else {"logprobs": count}


def _form(response_format: Any) -> dict[str, Any]:
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    named = response_format.get("json_schema") if kind == "json_schema" else None
    if not isinstance(named, dict) or "schema" not in named:
        raise _refused("body", f"has response_format {shown(response_format)}; it takes type text, "
                       "json_object or json_schema with a schema")  # fmt: skip
    return {"structured_outputs": {"json": named["schema"]}}


def _refused(column: str, reason: str) -> RowError:
    return RowError("ValueError", column, reason)


def write_responses(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the output line of each row of a table that the operator returned."""
    created = int(time.time())
    for row in table.to_pylist():
        error, digest = row[ERROR_COLUMN], request_digest(row)
        if error:
            kind, _, reason = error.partition(": ")
            problem = {"code": kind, "message": reason}
            content, status = {"error": {**problem, "type": "invalid_request_error"}}, 400
        else:
            problem, content, status = None, _completion(row, digest, created), 200
        yield {
            "id": f"batch_req_{digest}",
            ID_COLUMN: row[ID_COLUMN],
            "response": {"status_code": status, "request_id": f"req_{digest}", "body": content},
            "error": problem,
        }


def read_response(record: Mapping[str, Any]) -> tuple[Any, str, str, int, int]:
    """Return what an output line says.

    Id and error, as the operator wrote them, its digest, and the tokens of its prompt and samples.
    """
    problem = record["error"]
    error = f"{problem['code']}: {problem['message']}" if problem else ""
    digest = str(record["id"]).removeprefix("batch_req_")
    usage = {} if problem else record["response"]["body"].get("usage") or {}
    counts = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return record[ID_COLUMN], error, digest, *counts


def request_digest(row: Mapping[str, Any]) -> str:
    """Return the digest of a request, or for a line without id, of its error."""
    if row[ID_COLUMN] is None:
        return content_digest([f"error {row.get(ERROR_COLUMN)}"])
    return content_digest(row.get(name) for name in (ID_COLUMN, *CONTENT_COLUMNS))


def _completion(row: Mapping[str, Any], digest: str, created: int) -> dict[str, Any]:
    is_chat = row["url"] == CHAT
    choices = row[CHOICES_COLUMN]
    make: Callable[[Mapping[str, Any], str, TokenBytes], dict[str, Any]] = (
        _chat_choice if is_chat else _text_choice
    )
    texts = {one["token_id"]: one["bytes"] for one in row.get(BYTES_COLUMN) or ()}
    completion_tokens = sum(choice["num_generated_tokens"] for choice in choices)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{digest}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": row["model"],
        "choices": [
            {
                "index": index,
                "finish_reason": choice["finish_reason"],
                **make(choice, f"{digest}-{index}", texts),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": {
            "prompt_tokens": row["num_input_tokens"],
            "completion_tokens": completion_tokens,
            "total_tokens": row["num_input_tokens"] + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": row["num_cached_tokens"]},
        },
    }


def _chat_choice(choice: Mapping[str, Any], key: str, texts: TokenBytes) -> dict[str, Any]:
    logprobs, calls = choice["logprobs"], choice.get("tool_calls")
    message = {"role": "assistant", "content": choice["text"], "refusal": None}
    if choice.get("reasoning_text") is not None:  # vLLM's name, and its former one
        message |= dict.fromkeys(("reasoning", "reasoning_content"), choice["reasoning_text"])
    if calls:
        message["content"] = choice["text"] or None
        message["tool_calls"] = [
            {
                "id": call["id"] or _call_id(f"{key}-{index}"),
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for index, call in enumerate(calls)
        ]
    return {
        "message": message,
        "logprobs": None
        if logprobs is None
        else {"content": [_chat_logprob(one, texts) for one in logprobs]},
        **({"finish_reason": "tool_calls"} if calls else {}),
    }


def _call_id(key: str) -> str:
    """Return nine letters and digits: templates of Mistral take no other ids."""
    digest = hashlib.blake2b(key.encode(), digest_size=ID_CHARACTERS).digest()
    return "".join(ID_ALPHABET[byte % len(ID_ALPHABET)] for byte in digest)


def _chat_logprob(one: Mapping[str, Any], texts: TokenBytes) -> dict[str, Any]:
    top = [_named(entry, texts) for entry in one["top"]]
    return {**_named(one, texts), "top_logprobs": top}


def _named(one: Mapping[str, Any], texts: TokenBytes) -> dict[str, Any]:
    data = texts.get(one["token_id"])
    return {
        "token": _token(one, texts),
        "logprob": one["logprob"],
        "bytes": None if data is None else [*data],
    }


def _token(one: Mapping[str, Any], texts: TokenBytes) -> str:
    """Return the text of a token; bytes of an incomplete character as OpenAI writes them."""
    data = texts.get(one["token_id"])
    return f"token_id:{one['token_id']}" if data is None else data.decode(errors="backslashreplace")


def _text_choice(choice: Mapping[str, Any], _: str, texts: TokenBytes) -> dict[str, Any]:
    logprobs = choice["logprobs"]
    if logprobs is None:
        return {"text": choice["text"], "logprobs": None}
    tokens = [_token(one, texts) for one in logprobs]
    # Of tokens with the same text the best one stays, which is the first.
    tops = [{_token(o, texts): o["logprob"] for o in reversed(one["top"])} for one in logprobs]
    return {
        "text": choice["text"],
        "logprobs": {
            "tokens": tokens,
            "token_logprobs": [one["logprob"] for one in logprobs],
            "top_logprobs": [dict(reversed(top.items())) for top in tops],
            "text_offset": [*itertools.accumulate(map(len, tokens), initial=0)][:-1],
        },
    }
