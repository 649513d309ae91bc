"""Chat templates render as transformers renders them."""

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from chairlift.text.chat_template import ChatTemplate
from chairlift.text.errors import ChatTemplateError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# The built-in model's own.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = """\
{%- for turn in messages %}
    {%- if turn.role not in ("system", "user", "assistant") %}
        {{- raise_exception("unknown role " ~ turn.role) }}
    {%- endif %}
    {{- "<|im_start|>" ~ turn.role ~ "\n" ~ turn.content | trim ~ "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
{%- endif %}
"""
# In the manner of Llama 3: a date, namespace, headers.
HEADERS = """\
{{- bos_token }}
{%- set state = namespace(system="You help.") %}
{%- if messages[0]["role"] == "system" %}
    {%- set state.system = messages[0]["content"] %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|head|>system<|/head|>\n\nYear: " ~ strftime_now("%Y") ~ "\n\n" ~ state.system ~ "<|eot|>" }}
{% for m in messages %}
    {% if m.role == "skip" %}{% continue %}{% endif %}
    {{- "<|head|>" + m.role + "<|/head|>\n\n" + m["content"] | trim + "<|eot|>" }}
{% endfor %}
{% if add_generation_prompt %}<|head|>assistant<|/head|>

{% endif %}
"""
# In the manner of Mistral: strict turns, eos after the assistant.
TURNS = """\
{{ bos_token }}{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('turns must alternate') }}
{% endif %}
{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{% else %}{{ ' ' + m['content'] + eos_token }}
{% endif %}{% endfor %}
"""
# In the manner of Qwen: tools, calls, answers, a switch from outside.
TOOLS = """\
{%- if tools %}
    {{- "<|im_start|>system\n# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == "tool" %}
        {{- "<|im_start|>user\n<tool_response>\n" + m.content + "\n</tool_response><|im_end|>\n" }}
    {%- else %}
        {{- "<|im_start|>" + m.role + "\n" }}
        {%- if m.content %}{{- m.content }}{%- endif %}
        {%- if m.tool_calls %}
            {%- for call in m.tool_calls %}
                {{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
                {{- call.function.arguments | tojson }}
                {{- "}</tool_call>" }}
            {%- endfor %}
        {%- endif %}
        {%- generation %}{{- "<|im_end|>\n" }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- "<think>\n\n</think>\n\n" }}{%- endif %}
{%- endif %}
"""

CHAT = [
    {"role": "user", "content": " What is <b>2 & 3</b>? "},
    {"role": "assistant", "content": "5 'é' \"你好\""},
    {"role": "user", "content": "Thanks\n"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}]
TOOL_DEFINITIONS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Météo <b>now</b> & 'then'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in 京都?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "京都", "n": 1}}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "<rain>"},
]


def by_transformers(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    backend = tokenizers.Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)  # type: ignore[no-untyped-call]
    rendered = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    assert isinstance(rendered, str)
    return rendered


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (SMOLLM2, CHAT, {}),
        (SMOLLM2, SYSTEM + CHAT, {}),
        (CHATML, SYSTEM + CHAT, {}),
        (HEADERS, CHAT, {}),
        (HEADERS, [*SYSTEM, {"role": "skip", "content": "?"}, *CHAT], {}),
        (TURNS, CHAT, {}),
        (TOOLS, TOOL_CHAT, {"tools": TOOL_DEFINITIONS}),
        (TOOLS, SYSTEM + CHAT, {"enable_thinking": False}),
        (TOOLS, CHAT, {}),
    ],
)
def test_renders_as_transformers(
    template: str, messages: list[dict[str, Any]], options: dict[str, Any], add_generation_prompt: bool
) -> None:
    ours = ChatTemplate({"default": template}, SPECIAL).render(
        messages, add_generation_prompt=add_generation_prompt, **options
    )
    theirs = by_transformers(template, messages, add_generation_prompt=add_generation_prompt, **options)
    assert ours == theirs
    assert ours


def test_arguments_of_tool_calls_come_as_json_text_from_clients() -> None:
    as_text = [dict(message) for message in TOOL_CHAT]
    function = {"name": "weather", "arguments": '{"city": "京都", "n": 1}'}
    as_text[1] = {**as_text[1], "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    template = ChatTemplate({"default": TOOLS})
    assert template.render(as_text) == template.render(TOOL_CHAT)
    function["arguments"] = "{city"
    with pytest.raises(ChatTemplateError, match="'weather' are not JSON"):
        template.render(as_text)


def test_text_parts_are_joined_and_others_refused_by_name() -> None:
    template = ChatTemplate({"default": CHATML})
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    assert template.render([{"role": "user", "content": parts}]) == template.render(
        [{"role": "user", "content": "Hello there"}]
    )
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(ChatTemplateError, match="'image_url' are not supported"):
        template.render([{"role": "user", "content": [*parts, image]}])
    with pytest.raises(ChatTemplateError, match="string 'text'"):
        template.render([{"role": "user", "content": [{"type": "text"}]}])


def test_the_callers_messages_stay_as_they_are() -> None:
    parts = [{"type": "text", "text": "a"}]
    message = {"role": "user", "content": parts, "name": None}
    ChatTemplate({"default": CHATML}).render([message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}


@pytest.mark.parametrize(
    ("template", "message", "error"),
    [
        (TURNS, {"role": "assistant", "content": "x"}, "turns must alternate"),
        (CHATML, {"role": "narrator", "content": "x"}, "unknown role narrator"),
        (SMOLLM2, {"role": "user"}, "content"),
        ("{{ messages[0].content + 1 }}", {"role": "user", "content": "x"}, "str"),
        ("{{ 1 // 0 }}", {"role": "user", "content": "x"}, "zero"),
        ("{% for %}", {"role": "user", "content": "x"}, "template is broken"),
        ("{{ messages.append(1) }}", {"role": "user", "content": "x"}, "append"),
        ("{{ ''.__class__.__mro__ }}", {"role": "user", "content": "x"}, "unsafe"),
    ],
)
def test_whatever_a_template_does_wrong_is_one_kind_of_error(
    template: str, message: dict[str, Any], error: str
) -> None:
    with pytest.raises(ChatTemplateError, match=error):
        ChatTemplate({"default": template}).render([message])


def test_no_messages_and_no_default_template() -> None:
    with pytest.raises(ChatTemplateError, match="must not be empty"):
        ChatTemplate({"default": CHATML}).render([])
    with pytest.raises(ChatTemplateError, match="only rag"):
        ChatTemplate({"rag": CHATML}).render(CHAT)


def test_variables_of_the_client_cannot_replace_the_conversation() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }} {{ extra }}"})
    assert template.render([{"role": "user", "content": "mine"}], messages=[], extra=1) == "mine 1"


def test_a_key_without_a_value_counts_as_missing() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content is defined }} {{ messages[0].name is defined }}"})
    assert template.render([{"role": "assistant", "content": None, "name": "x"}]) == "False True"
