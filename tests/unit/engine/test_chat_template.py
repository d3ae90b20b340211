"""Chat templates: as transformers renders them, and within limits."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from raymoe.engine.tokenizer import ChatTemplate, check_messages
from raymoe.errors import ConfigError

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {{- message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('roles must alternate') }}
{% endif %}
{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]
{% else %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}{% endif %}
{% endfor %}"""
FANCY = """{% set state = namespace(count=0) %}{% for m in messages %}
{% if m.role == 'system' %}{% continue %}{% endif %}{% set state.count = state.count + 1 %}
{{ state.count }}: {{ m | tojson(indent=1) }} {{ dict(a=m.content | length) }}
{% if state.count == 3 %}{% break %}{% endif %}{% endfor %}{{ tools is none }}"""
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "user", "content": " Grüße <b> & 'x' "},
    {"role": "assistant", "content": "Hallo"},
    {"role": "user", "content": "Noch etwas"},
]


@pytest.fixture
def render():
    templates = []

    def render_with(source, messages=CHAT, render_limit_s=30.0, **kwargs) -> str:
        templates.append(ChatTemplate(source, VARIABLES, render_limit_s))
        return templates[-1].render(messages, template_kwargs=kwargs)

    yield render_with
    for template in templates:
        template.close()


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (CHATML, CHAT),
        (CHATML, CHAT[:2]),
        (MISTRAL, CHAT),
        (MISTRAL, CHAT[:1]),
        (MISTRAL, CHAT[:2]),
        (FANCY, CHAT),  # writes JSON, so it cannot be continued
    ],
)
def test_text_is_that_of_transformers(render, source, messages):
    is_continued = messages[-1]["role"] == "assistant"
    (expected,), _ = render_jinja_template(
        conversations=[[dict(message) for message in messages]],
        chat_template=source,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        **VARIABLES,
    )
    assert render(source, messages) == expected


# How families ask whether to think, in the words of their templates.
QWEN = CHATML.replace(
    "assistant\\n' }}",
    "assistant\\n' }}\n    {%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
)
DEEPSEEK = """{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ bos_token }}
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor -%}
{% if add_generation_prompt %}<|assistant|>{{ '<think>' if thinking else '</think>' }}{% endif %}"""
HARMONY = """{%- if reasoning_effort is not defined %}
{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "<|start|>system<|message|>Reasoning: " + reasoning_effort + "\n<|end|>" }}
{%- for m in messages %}{{ "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}
{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"""


@pytest.mark.parametrize(
    ("source", "kwargs"),
    [
        *((QWEN, {"enable_thinking": value}) for value in (True, False, None)),
        *((DEEPSEEK, {"thinking": value}) for value in (True, False)),
        *((HARMONY, {"reasoning_effort": value}) for value in ("low", "high")),
        (QWEN, {"add_generation_prompt": False}),
        (HARMONY, {"bos_token": "<other>", "reasoning_effort": "low"}),
        (CHATML, {"continue_final_message": False}),
    ],
)
def test_arguments_reach_the_template_as_in_transformers(render, source, kwargs):
    given = {"add_generation_prompt": True, "continue_final_message": False} | kwargs
    (expected,), _ = render_jinja_template(
        conversations=[CHAT], chat_template=source, **{**VARIABLES, **given}
    )
    assert render(source, CHAT, **kwargs) == expected


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_name_that_the_template_reads(render, name):
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", name: "why"}]
    for read in ("thinking", "reasoning_content"):
        source = f"{{% for m in messages %}}{{{{ m.{read} }}}}|{{{{ m.content }}}};{{% endfor %}}"
        assert render(source, [*chat, chat[0]]) == "|1;why|2;|1;"
    both = {**chat[1], "reasoning_content": "a", "thinking": "b"}
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    assert render(source, [both, chat[0]]) == "ab"


def test_thinking_is_turned_off():
    chat = ChatTemplate(QWEN, VARIABLES)
    try:
        on, off = (chat.render(CHAT, (), {"enable_thinking": one}) for one in (True, False))
        assert off == on + "<think>\n\n</think>\n\n"
        # A final assistant message is answered where that is asked for.
        answered = chat.render(CHAT[:2], (), {"continue_final_message": False})
        assert answered.endswith("<|im_start|>assistant\n")
    finally:
        chat.close()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tokenize": True}, "has tokenize, which"),
        ({"continue_final_message": True}, "needs a final message of the assistant"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt is 'yes'"),
        ({"x": {1, 2}}, "cannot be written as JSON"),
    ],
)
def test_arguments_that_cannot_be_are_refused(render, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        render(CHATML, **kwargs)


def test_an_error_of_the_template_is_shown(render):
    with pytest.raises(ConfigError, match="roles must alternate"):
        render(MISTRAL, CHAT[1:])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% set n = namespace(_x=1) %}", "SecurityError"),
        ("{{ 'a' * 10 ** 10 }}", "needs more memory than it may have"),
        (
            "{% for i in range(99999) %}{% for j in range(999) %}text{% endfor %}{% endfor %}",
            "wrote more than 8000000 characters",
        ),
        ("{{ undefined_function() }}", "UndefinedError"),
    ],
)
def test_a_template_that_goes_too_far_is_an_error(render, source, message):
    with pytest.raises(ConfigError, match=message):
        render(source)


def test_a_template_that_does_not_end_is_stopped_and_the_next_chat_works():
    source = (
        "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}"
        "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}done"
    )
    template = ChatTemplate(source, VARIABLES, render_limit_s=0.3)
    with pytest.raises(ConfigError, match=r"took more than 0.3 s"):
        template.render([{"role": "user", "content": "loop"}])
    template._limit_s = 30.0
    assert template.render([{"role": "user", "content": "x"}]) == "done"
    template.close()
    assert template._worker._process is None


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages has 0 entries"),
        ("text", "messages is a str"),
        (["text"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\] has role None"),
        ([{"role": "user", "content": 5}], r"messages\[0\] has content 5"),
        ([CHAT[0], {"role": "user"}], r"messages\[1\] has content None"),
        ([{"role": "user", "content": "\udc80"}], "not valid Unicode"),
        ([{"role": "user", "content": [{"type": "image"}]}], "only text is supported"),
        ([{"role": "user", "content": "x", "extra": {1, 2}}], "cannot be written as JSON"),
    ],
)
def test_broken_messages_are_refused_by_name(messages, message):
    with pytest.raises(ConfigError, match=message):
        check_messages(messages)


def test_text_parts_are_joined_and_null_keys_dropped():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts, "name": None}]) == [
        {"role": "user", "content": "ab"}
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # As in templates of MiniMax: a string in the place of parts would render as nothing.
        ("{% for i in messages[0].content %}{% if i.type == 'text' %}{{ i.text }}{% endif %}"
         "{% endfor %}", "Hello"),
        ("{{ messages[0]['content'][0]['text'] }}", "Hello"),
        ("{% set content = messages[0].content %}{% for i in content %}{{ i.text }}{% endfor %}",
         "Hello"),
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
         "{% for i in messages[0].content %}{{ i.text }}{% endfor %}{% endif %}", "Hello"),
        ("{{ messages[0].content[:4] }}{{ messages[0].content.split('l')[-1] }}", "Hello"),
    ],
)  # fmt: skip
def test_text_reaches_templates_that_read_parts(render, source, expected):
    assert render(source, [{"role": "user", "content": "Hello"}]) == expected


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_tools_reach_a_template_that_takes_them_and_are_refused_by_one_that_does_not():
    taking = ChatTemplate("{{ tools | tojson }}{{ messages[0].content }}", VARIABLES)
    ignoring = ChatTemplate("{{ messages[0].content }}", VARIABLES)
    chat = [{"role": "user", "content": "x"}]
    assert taking.render(chat, [TOOL]) == json.dumps([TOOL]) + "x"
    assert taking.render(chat) == "nullx"
    with pytest.raises(ConfigError, match="takes no tools"):
        ignoring.render(chat, [TOOL])
    taking.close()
    ignoring.close()


def test_arguments_of_tool_calls_are_values():
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    (message,) = check_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    for bad in ("text", [1], [{"function": {"name": "add", "arguments": "{"}}]):
        with pytest.raises(ConfigError, match=r"messages\[0\] has"):
            check_messages([{"role": "assistant", "content": "", "tool_calls": bad}])
