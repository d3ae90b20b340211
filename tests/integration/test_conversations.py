"""Conversations with tools: the same prompts from structs, from JSON lines and from text."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymoe.cli.sources import open_source
from raymoe.config import SamplingParams
from raymoe.data.generator import MoEGenerator
from raymoe.data.rows import RowReader
from raymoe.engine.tokenizer import Chat, ChatTemplate
from tests.tiny import make_checkpoint

# Asks for everything the way the templates of supported families do: what is defined is there.
TEMPLATE = """{% for tool in tools or [] %}[{{ tool.function.name }} {{
tool.function.parameters.properties | tojson }}]{% endfor %}
{% for m in messages %}<{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}>
{% if m.content %}{{ m.content }}{% endif %}
{% if 'tool_calls' in m %}{% for call in m.tool_calls %}{{ call.id }}:{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }};{% endfor %}
{% endfor %}{% endif %}
{% if m.tool_call_id is defined %}({{ m.tool_call_id }}){% endif %}</>{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


def call(call_id, name, **arguments):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = tool("weather", city={"type": "string", "enum": ["Bonn", "Oslo"]})
ADD = tool("add", a={"type": "integer"}, b={"type": "integer", "minimum": 0})

CONVERSATIONS = [
    ([{"role": "user", "content": "hi"}], None),
    (
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "weather in Oslo, and 2 + 3?"},
            {
                "role": "assistant",
                "tool_calls": [call("c1", "weather", city="Oslo"), call("c2", "add", a=2, b=3)],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "tool", "tool_call_id": "c2", "content": "5"},
            {"role": "assistant", "content": "rain, and 5"},
            {"role": "user", "name": "bob", "content": "thanks"},
        ],
        [WEATHER, ADD],
    ),
    (
        [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": "", "tool_calls": [call("c3", "add", a=1, b=0)]},
            {"role": "tool", "tool_call_id": "c3", "content": "1"},
        ],
        [ADD],
    ),
]
RECORDS = [
    {"id": index, "messages": messages, "tools": tools}
    for index, (messages, tools) in enumerate(CONVERSATIONS)
]


def from_parquet(path):
    """Structs: Arrow gives every message, call and tool the keys of all others, with nulls."""
    pq.write_table(pa.Table.from_pylist(RECORDS), path)
    table = pq.read_table(path)
    assert table.column("messages")[0].as_py()[0]["tool_calls"] is None
    return table


def from_json_lines(path):
    path = path.with_suffix(".jsonl")
    path.write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS))
    source = open_source(str(path), text_columns=("prompt",), id_column="id")
    return pa.concat_tables(source.tables([*source.schema.names]))


def from_openai(path):
    """As OpenAI's clients write them: nulls for what is not there, arguments as text."""
    rows = []
    for record in RECORDS:
        messages = json.loads(json.dumps(record["messages"]))
        for message in messages:
            message |= {key: message.get(key) for key in ("content", "refusal", "tool_calls")}
            for one in message["tool_calls"] or []:
                one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
        rows.append({"messages": json.dumps(messages), "tools": json.dumps(record["tools"])})
    rows[0]["tools"] = None
    return pa.Table.from_pylist(rows)


FORMS = [from_parquet, from_json_lines, from_openai]


@pytest.fixture(scope="module")
def template():
    template = ChatTemplate(TEMPLATE, {})
    yield template
    template.close()


def render(template, prompt):
    if isinstance(prompt, Chat):
        return template.render(prompt.messages, prompt.tools)
    return template.render(prompt)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_conversation_gives_the_prompt_of_its_messages(form, tmp_path, template):
    reader = RowReader(defaults=SamplingParams(), tools_column="tools")
    requests = reader.read(form(tmp_path / "table"))
    assert [request.error for request in requests] == [""] * len(RECORDS)
    for request, (messages, tools) in zip(requests, CONVERSATIONS, strict=True):
        expected = template.render(messages, tools or ())
        assert render(template, request.prompt) == expected
        assert "None" not in expected


def test_nulls_that_somebody_wrote_reach_the_template(template):
    optional = tool("find", limit={"type": ["integer", "null"], "default": None})
    messages = [
        {"role": "user", "content": "find all"},
        {"role": "assistant", "content": None, "tool_calls": [call("c", "find", limit=None)]},
        {"role": "tool", "tool_call_id": "c", "content": "none"},
    ]
    table = pa.table({"messages": [json.dumps(messages)], "tools": [json.dumps([optional])]})
    (request,) = RowReader(defaults=SamplingParams(), tools_column="tools").read(table)
    text = render(template, request.prompt)
    assert '"default": null' in text
    assert "limit=null;" in text


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("model"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.mark.slow
def test_conversations_are_generated_from_tables_as_from_lines(model, tmp_path):
    generator = MoEGenerator(
        model,
        sampling_params={"max_tokens": 3, "temperature": 0.0},
        engine_config={"host_memory_bytes": 3 * 2**30, "dtype": "float32"},
        tools_column="tools",
    )
    try:
        answers = [generator(form(tmp_path / form.__name__)) for form in FORMS]
    finally:
        generator.close()
    for answer in answers:
        assert answer.column("__inference_error__").to_pylist() == [""] * len(RECORDS)
    tokens = [answer.column("num_input_tokens").to_pylist() for answer in answers]
    assert tokens[0] == tokens[1] == tokens[2]
    texts = [answer.column("generated_tokens").to_pylist() for answer in answers]
    assert texts[0] == texts[1] == texts[2]
    assert tokens[0][1] > tokens[0][2] > tokens[0][0]
