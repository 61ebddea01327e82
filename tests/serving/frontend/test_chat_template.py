import pytest

from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig, InvalidRequest
from tokenmill.serving.frontend.chat_messages import check_template_kwargs
from tokenmill.serving.frontend.chat_template import ChatTemplate, load_chat_template

USER = [{"role": "user", "content": "hi"}]

# The constructs of Qwen's and Llama's templates: namespaces, slices, tojson, trim, whitespace control, string methods.
QWEN_LIKE = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == "user" and message.content is string %}{% set ns.last = index %}{% endif %}
{%- endfor %}
{% for message in messages %}
    {% set content = message.content if message.content is string else '' %}
    {% if loop.index0 > ns.last and content.startswith('h') %}
        {%- generation -%}{{ content.split('l')[0].upper() + content | trim }}{%- endgeneration -%}
    {% elif message.role == "system" %}{{ bos_token }}{{ content | trim }}
    {% else %}<{{ message['role'] }}>{{ content }}
    {% endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def render(source, messages=None, **how):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(USER if messages is None else messages, **how)


def test_what_hugging_face_templates_rely_on():
    source = """{{ bos_token }}
    {%- for message in messages %}
        {%- if loop.index0 > 2 %}{% break %}{% endif %}
        {{- message.role + ": " + message['content'] | trim }}
        {% generation %}[{{ message.content }}]{% endgeneration %}
    {% endfor %}"""
    assert render(source) == "<s>user: hi\n[hi]"


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "description": "é<"}}]])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_templates_render_as_in_transformers(tools, add_generation_prompt):
    from transformers.utils.chat_template_utils import _compile_jinja_template

    messages = [{"role": "system", "content": " be <brief> "}, *USER, {"role": "assistant", "content": "héllo"}]
    variables = {
        "messages": messages,
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": "<s>",
    }
    expected = _compile_jinja_template(QWEN_LIKE).render(**variables)
    assert render(QWEN_LIKE, messages, tools=tools, add_generation_prompt=add_generation_prompt) == expected
    assert "be <brief>" in expected


def test_blocks_leave_no_whitespace():
    assert render("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n") == "x\n"


def test_tojson_is_plain_json():
    tools = [{"type": "function", "function": {"name": "f", "description": "<é & 'x'>"}}]
    assert "\"<é & 'x'>\"" in render("{{ tools | tojson }}", tools=tools)
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_template_variables_arrive_but_never_replace_the_own_ones():
    kwargs = {"enable_thinking": False, "messages": [], "tools": 1, "add_generation_prompt": False}
    source = "{{ enable_thinking }} {{ messages | length }} {{ tools }} {{ add_generation_prompt }}"
    assert render(source, template_kwargs=kwargs) == "False 1 None True"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ undefined_function() }}",
        "{{ messages[5].content.x.y }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox_refuses_the_request(source):
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_the_templates_own_refusal_is_told():
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_the_final_message_can_be_continued():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": "hi and "}]
    kwargs = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, messages, **kwargs) == "<user>hi</user><assistant>hi and"
    with pytest.raises(InvalidRequest, match="exclude each other"):
        render(source, messages, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="does not show"):
        render("nothing", messages, **kwargs)


def test_variables_of_a_template_are_neither_large_nor_deep():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    check_template_kwargs({"x": "y" * 60_000})
    for kwargs in ({"x": "y" * 70_000}, {"x": deep}, {"x": [[]] * 50_000}):
        with pytest.raises(InvalidRequest) as refused:
            check_template_kwargs(kwargs)
        assert refused.value.param == "chat_template_kwargs"


def test_tool_call_arguments_become_objects():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    assert render("{{ messages[1].tool_calls[0].function.arguments.a }}", messages) == "1"


def test_a_broken_template_is_told_at_start():
    with pytest.raises(InvalidCheckpoint, match="does not compile"):
        ChatTemplate("{% for %}")


def test_where_a_template_is_looked_for(tmp_path):
    folder = write_folder(tmp_path / "m", byte_level_tokenizer())
    config = folder / "tokenizer_config.json"
    assert "im_start" in load_chat_template(folder, {}).source
    config.write_text(
        '{"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}'
    )
    named = load_chat_template(folder, {})
    assert named.render(USER) == "D"
    assert named.render(USER, tools=[{"a": 1}]) == "T"
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_chat_template(folder, {}).source == "from the file"
    (tmp_path / "own.jinja").write_text("the operator's")
    assert load_chat_template(folder, {}, str(tmp_path / "own.jinja")).source == "the operator's"
    with pytest.raises(InvalidConfig, match=r"--chat-template.*none\.jinja"):
        load_chat_template(folder, {}, str(tmp_path / "none.jinja"))


def test_a_model_may_have_no_template(tmp_path):
    assert load_chat_template(tmp_path, {}) is None


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("knows", ["reasoning_content", "reasoning", "thinking"])
def test_earlier_thinking_has_the_name_that_the_template_knows(name, knows):
    template = ChatTemplate("{% for m in messages %}[{{ m." + knows + " }}]{% endfor %}", {})
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call], name: "hm"}]
    assert template.render(messages) == "[][hm]"
    messages[1]["content"] = "I look it up."
    assert template.render(messages) == ("[][]" if knows == "thinking" else "[][hm]")


SYSTEM_FIRST = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "{% if m.role == 'user' and loop.previtem and loop.previtem.role == 'user' %}{{ raise_exception('alternate') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_late_texts_of_the_system_are_said_by_the_user_where_the_template_takes_none():
    roles = ["system", "user", "system", "user", "assistant", "system", "user"]
    messages = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]
    template = ChatTemplate(SYSTEM_FIRST)
    assert template.render(messages) == "<system>0<user>1\n\n2\n\n3<assistant>4<user>5\n\n6"
    anywhere = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert anywhere.render(messages) == "".join(f"<{role}>{number}" for number, role in enumerate(roles))
    with pytest.raises(InvalidRequest, match="alternate"):
        template.render([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
