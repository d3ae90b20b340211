"""Chat templates: as transformers renders them, and within limits."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from raymoe.engine import tokenizer as tokenizer_module
from raymoe.engine.tokenizer import ChatTemplate, check_messages
from raymoe.engine.workers import chat_worker
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


PLAIN = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **VARIABLES)


def transformers_text(source, messages, tools=None, **kwargs) -> str:
    """What transformers renders with the flags that raymoe chooses."""
    # Versions before 5.24 keep keys that are null.
    messages = [{k: v for k, v in one.items() if v is not None} for one in messages]
    is_continued = kwargs.pop("continue_final_message", messages[-1]["role"] == "assistant")
    return PLAIN.apply_chat_template(
        messages,
        tools=tools,
        chat_template=None if isinstance(source, dict) else source,
        tokenize=False,
        continue_final_message=is_continued,
        add_generation_prompt=kwargs.pop("add_generation_prompt", not is_continued),
        **kwargs,
    )


class InThisProcess:
    """Answers as the helper process does, through JSON, without its start of a second."""

    def __init__(self, _role, facts, **_kwargs) -> None:
        _, self._answer = chat_worker.start(json.loads(json.dumps(facts)), b"")

    def ask(self, request, *, cpu_s):
        try:
            return self._answer(json.loads(json.dumps(request)), b"")
        except Exception as error:
            raise ConfigError(f"the chat template failed: {error!r}") from error


@pytest.fixture
def render(monkeypatch):
    def render_with(source, messages=CHAT, tools=(), **kwargs) -> str:
        monkeypatch.setattr(tokenizer_module, "WorkerProcess", InThisProcess)
        return ChatTemplate(source, VARIABLES).render(messages, tools, kwargs)

    return render_with


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (CHATML, CHAT),
        (CHATML, CHAT[:2]),
        (MISTRAL, CHAT),
        (MISTRAL, CHAT[:1]),
        (MISTRAL, CHAT[:2]),
        (FANCY, CHAT),  # writes JSON, so it cannot be continued
        ("{{ strftime_now('%Y-%m-%d %Z|%z') }}{{ messages[0].content }}", CHAT[:1]),
        ("{{ dict.fromkeys(['a'], messages[0].content) | tojson }}", CHAT[:1]),
        ("{{ messages[0].content }}{{ documents is none }}{{ tools is none }}", CHAT[:1]),
    ],
)
def test_text_is_that_of_transformers(render, source, messages):
    assert render(source, messages) == transformers_text(source, messages)


def test_a_process_renders_as_this_one(render):
    template = ChatTemplate(CHATML, VARIABLES)
    assert template.render(CHAT) == render(CHATML, CHAT)
    template.close()


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
    assert render(source, CHAT, **kwargs) == transformers_text(source, CHAT, **kwargs)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_name_that_the_template_reads(render, name):
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", name: "why"}]
    for read in ("thinking", "reasoning_content"):
        source = f"{{% for m in messages %}}{{{{ m.{read} }}}}|{{{{ m.content }}}};{{% endfor %}}"
        assert render(source, [*chat, chat[0]]) == "|1;why|2;|1;"
    both = {**chat[1], "reasoning_content": "a", "thinking": "b"}
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    assert render(source, [both, chat[0]]) == "ab"


def test_thinking_is_turned_off(render):
    on, off = (render(QWEN, enable_thinking=one) for one in (True, False))
    assert off == on + "<think>\n\n</think>\n\n"
    # A final assistant message is answered where that is asked for.
    answered = render(QWEN, CHAT[:2], continue_final_message=False)
    assert answered.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tokenize": True}, "has tokenize, which"),
        ({"sanitize_control_tokens": True}, "has sanitize_control_tokens, which"),
        ({"documents": ["text"]}, "Documents should be a list of dicts"),
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
        ("{{ 'text' * 2000001 }}", "the chat template wrote more than 8000000 characters"),
        ("{{ undefined_function() }}", "UndefinedError"),
    ],
)
def test_a_template_that_goes_too_far_is_an_error(render, source, message):
    with pytest.raises(ConfigError, match=message):
        render(source)


def test_a_template_that_needs_too_much_memory_is_an_error():
    template = ChatTemplate("{{ 'a' * 10 ** 10 }}", VARIABLES)
    with pytest.raises(ConfigError, match="needs more memory than it may have"):
        template.render(CHAT)
    template.close()


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


def test_null_keys_are_dropped_and_parts_kept():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts, "name": None}]) == [
        {"role": "user", "content": parts}
    ]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def each(body: str) -> str:
    return f"{{% for m in messages %}}{body}{{% endfor %}}"


LOOP = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}PART{% endfor %}{% endif %}{% endfor %}"
)
KEEPING = LOOP.replace("PART", "{{ p.text }}")
PART_TEMPLATES = {
    "keeps": KEEPING,
    "trims": LOOP.replace("PART", "{{ p.text | trim }}"),
    "joins lines": LOOP.replace("PART", "{{ '\n' if not loop.first }}{{ p.text }}"),
    "spaces": LOOP.replace("PART", "{{ p.text }} "),
    "writes JSON": each("{{ m.content | tojson }}"),
    "takes the first": each("{{ m['content'][0]['text'] }}"),
    "joins": each("{{ m.content | map(attribute='text') | join('+') }}"),
}


@pytest.mark.parametrize("source", PART_TEMPLATES.values(), ids=PART_TEMPLATES)
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": parts("Question: ")}],
        [{"role": "system", "content": parts(" a", "b ")}, {"role": "user", "content": parts("c")}],
        [
            {"role": "user", "content": parts("a'\n")},
            {"role": "assistant", "content": parts("It is ")},
        ],
    ],
    ids=["one", "several", "continued"],
)
def test_parts_reach_the_template_as_in_transformers(render, source, messages):
    try:
        expected = transformers_text(source, messages)
    except ValueError:  # nothing to continue in what it writes
        expected = None
    if expected is None:
        with pytest.raises(ConfigError, match="failed"):
            render(source, messages)
    else:
        assert render(source, messages) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (each("{{ m.content }}"), "takes content only as text"),
        (each("{{ m.content | trim ~ '.' }}"), "takes content only as"),
        (each("{{ m.content[0] }}"), "takes content only as text"),
        (CHATML.replace(" | trim", ""), 'only concatenate .* it may take content only as text'),
        (each("{{ m.content.strip() }}"), "may take content only as"),
        (each("{{ m.content if m.content is string }}"),
         r"shows the content of messages\[0\] only as text"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_continued", [False, True])
def test_parts_are_refused_where_the_template_cannot_show_them(
    render, source, message, is_continued
):
    chat = [{"role": "user", "content": parts("Hello")}]
    if is_continued:
        chat = [CHAT[0], {"role": "assistant", "content": parts("Hi ")}]
        message = f"{message}|does not appear in the chat"
    with pytest.raises(ConfigError, match=message):
        render(source, chat)


@pytest.mark.parametrize(
    "source",
    [
        # transformers would leave the text out.
        "{% for i in messages[0].content %}{% if i.type == 'text' %}{{ i.text }}{% endif %}"
        "{% endfor %}",
        "{{ messages[0]['content'][0]['text'] }}",
        "{% set content = messages[0].content %}{% for i in content %}{{ i.text }}{% endfor %}",
    ],
)
def test_text_is_refused_where_the_template_reads_only_parts(render, source):
    with pytest.raises(ConfigError, match=r"messages\[0\] only in parts, such as \[\{"):
        render(source, [{"role": "user", "content": "Hello"}])
    assert render(source, [{"role": "user", "content": parts("Hello")}]) == "Hello"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content[:2] }}{{ messages[0].content.split('l')[-1] }}",
        "{{ messages[1].content }}",  # leaves a message out, in both forms
        each("{{ m.content | upper }}"),
        KEEPING,
    ],
)
def test_text_that_a_template_changes_is_that_of_transformers(render, source):
    assert render(source) == transformers_text(source, CHAT)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
NEEDS_TOOLS = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"
NAMED = {"default": "[{{ messages[0].content }}]", "tool_use": NEEDS_TOOLS + "{{ tools | length }}"}


def test_tools_reach_a_template_that_takes_them_and_are_refused_by_one_that_does_not(render):
    chat = [{"role": "user", "content": "x"}]
    taking = "{{ tools | tojson }}{{ messages[0].content }}"
    assert render(taking, chat, [TOOL]) == json.dumps([TOOL]) + "x"
    assert render(taking, chat) == "nullx"
    # Nothing is rendered without tools to see whether they show.
    assert render(NEEDS_TOOLS, chat, [TOOL]) == "addx"
    with pytest.raises(ConfigError, match="'NoneType' object is not iterable"):
        render(NEEDS_TOOLS, chat)
    hidden = "{% set tools = [] %}{{ messages[0].tools }}{{ messages[0].content }}"
    for ignoring in ("{{ messages[0].content }}", hidden):
        with pytest.raises(ConfigError, match="the chat template takes no tools"):
            render(ignoring, chat, [TOOL])


def test_named_templates_are_chosen_as_in_transformers(render):
    chat = [{"role": "user", "content": "x"}]
    assert render(NAMED, chat) == "[x]"
    assert render(NAMED, chat, [TOOL]) == "addx1"
    assert render({"default": NAMED["tool_use"], "rag": ""}, chat, [TOOL]) == "addx1"
    with pytest.raises(ConfigError, match="has the names rag, tool_use, none of them 'default'"):
        render({"tool_use": "", "rag": ""}, chat)
    # The other template may be broken.
    assert render({**NAMED, "tool_use": "{% if %}"}, chat) == "[x]"


CALLS = each("{{ m.content }}{% for c in m.tool_calls %}<CALL>{% endfor %}")
TEXTS = {
    "joined": "{{ '' + c.function.arguments }}",
    "written": "{{ c.function.arguments }}",
}
VALUES = {
    "JSON": "{{ c.function.arguments | tojson }}",
    "either": "{{ c.function.arguments if c.function.arguments is string "
    "else c.function.arguments | tojson }}",
    "braced": "{ {{ c.function.arguments if c.function.arguments is string "
    "else c.function.arguments | join(':') }} }",
    "whole call": "{{ c.function | tojson }}",
    "items": "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}",
    "guarded": "{{ c.function.arguments | tojson if c.function.arguments is mapping }}",
}


def calling(arguments):
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}
    return [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call, call]}, CHAT[2]]


@pytest.mark.parametrize("text", ['{"a":1}', '{"a": "ü\\n\'", "b": [{}]}', "{}"])
@pytest.mark.parametrize("form", TEXTS)
def test_arguments_as_text_reach_a_template_that_writes_them(render, form, text):
    source = CALLS.replace("CALL", TEXTS[form])
    assert render(source, calling(text)) == transformers_text(source, calling(text))


@pytest.mark.parametrize("text", ['{"a":1}', '{"a": "ü\\n\'", "b": [{}]}', "{}", ""])
@pytest.mark.parametrize("form", VALUES)
def test_arguments_as_text_are_values_where_the_template_takes_values(render, form, text):
    source = CALLS.replace("CALL", VALUES[form])
    value = json.loads(text or "{}")
    assert render(source, calling(text)) == transformers_text(source, calling(value))
    result = [*calling(text), {"role": "tool", "content": f"called with {value}"}]
    expected = [*calling(value), result[-1]]
    assert render(source, result) == transformers_text(source, expected)


def test_arguments_that_are_values_stay_values(render):
    for form in VALUES.values():
        source = CALLS.replace("CALL", form)
        assert render(source, calling({"a": 1})) == transformers_text(source, calling({"a": 1}))
    with pytest.raises(ConfigError, match="can only concatenate str"):
        render(CALLS.replace("CALL", TEXTS["joined"]), calling({"a": 1}))


def test_arguments_of_calls_that_cannot_be_are_refused():
    for bad in ("text", [1], [{"function": {"name": "add", "arguments": "{"}}]):
        with pytest.raises(ConfigError, match=r"messages\[0\] has"):
            check_messages([{"role": "assistant", "content": "", "tool_calls": bad}])


def test_an_empty_list_of_calls_is_refused_only_where_it_shows(render):
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": []},
    ]
    chat += [chat[0]]
    showing = each("{{ '[CALLS]' if m.tool_calls is defined }}{{ m.content }}")
    with pytest.raises(ConfigError, match="reads an empty list of tool_calls as calls"):
        render(showing, chat)
    assert render(KEEPING, chat) == transformers_text(KEEPING, chat)


def test_an_assistant_may_have_reasoning_or_calls_and_no_content(render):
    source = each("{{ m.content }}|{{ m.thinking }};")
    chat = [CHAT[0], {"role": "assistant", "content": None, "thinking": "why"}, CHAT[2]]
    assert render(source, chat) == transformers_text(source, chat)
    with pytest.raises(ConfigError, match='has no "content" to continue'):
        render(source, chat[:2])
    with pytest.raises(ConfigError, match=r"messages\[0\] has content None"):
        check_messages([{"role": "assistant", "content": None, "tool_calls": []}])


ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
PIECES = st.text(st.sampled_from("ab \n'\"{}[]<>ü\\"), max_size=8)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": PIECES}), max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES, "content": PIECES | PARTS},
        optional={
            "reasoning": PIECES | st.none(),
            "name": PIECES,
            "tool_calls": st.builds(
                lambda args: calling(args)[1]["tool_calls"],
                st.dictionaries(PIECES, PIECES, max_size=2),
            ),
        },
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [CHATML, MISTRAL, FANCY, QWEN, HARMONY, *PART_TEMPLATES.values(),
     *(CALLS.replace("CALL", form) for form in (*TEXTS.values(), *VALUES.values()))],
)  # fmt: skip
def test_no_chat_is_silently_another_than_that_of_transformers(render, source):
    @settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(MESSAGES)
    def check(messages) -> None:
        try:
            text = render(source, messages)
        except ConfigError:
            return
        assert text == transformers_text(source, messages)

    check()
