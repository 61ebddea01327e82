"""Chat templates in the shape of each family's: how it shows tools, calls and thinking, and nothing else."""

CHATML = """{%- if tools %}<|im_start|>system
SHOWN{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content is string %}THOUGHT{% endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}{% set call = call.function %}WRITTEN{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
PROMPT{% endif %}"""


def chatml(written: str = "", thought: str = "", prompt: str = "", shown: str = "Tools: ") -> str:
    parts = {"WRITTEN": written, "THOUGHT": thought, "PROMPT": prompt, "SHOWN": shown}
    source = CHATML
    for name, part in parts.items():
        source = source.replace(name, part)
    return source


THOUGHT = "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}"
OPENED = "{{- '<think>\\n' if enable_thinking is not defined or enable_thinking else '<think>\\n\\n</think>\\n\\n' }}"
CLOSED = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
HERMES = """<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>"""
EXAONE = '<tool_call>{{ {"name": call.name, "arguments": call.arguments} | tojson }}</tool_call>'
QWEN_TEXT = 'Call them as <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>: '
# A template that calls for `+` and one that calls for `~` render the same.
QWEN_CODER = """{{- '\\n<tool_call>\\n<function=' ~ call.name ~ '>\\n' }}
    {%- for name, value in call.arguments | items %}
        {{- '<parameter=' + name + '>\\n' ~ value ~ '\\n</parameter>\\n' }}
    {%- endfor %}
    {{- '</function>\\n</tool_call>' }}"""
GLM = """<tool_call>{{ call.name }}
{% for name, value in call.arguments | items %}<arg_key>{{ name }}</arg_key>
<arg_value>{{ value }}</arg_value>
{% endfor %}</tool_call>"""

LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and loop.index0 == 0 %}{{ tools | tojson }}{% endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}CALLS{{ eos_token }}
    {%- else %}{{ ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
MISTRAL = _MISTRAL.replace(
    "CALLS",
    """{{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' }}{{ '' if loop.last else ', ' }}
        {%- endfor %}{{ ']' }}""",
)
NEW_MISTRAL = _MISTRAL.replace(
    "CALLS",
    "{%- for call in message.tool_calls %}{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}"
    "{{ call.function.arguments | tojson }}{% endfor %}",
)

GRANITE = """{%- if thinking %}<|start_of_role|>system<|end_of_role|>Write your thoughts after 'Here is my thought
process:' and your response after 'Here is my response:'. Here is my thought process:<|end_of_text|>
{% endif %}
{%- if tools %}<|start_of_role|>system<|end_of_role|>Respond with <|tool_call|> and a JSON list.<|end_of_text|>
<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>
{% endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

HARMONY = """<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}{{ '<|start|>developer<|message|># Tools\\nnamespace functions {' }}
    {%- for tool in tools %}{{ '\\ntype ' + tool.function.name + ' = (_: any) => any;' }}{% endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments | tojson }}{{ '<|call|>' }}
        {%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

PHI = """{%- for message in messages %}
    {%- if message.role == 'system' and 'tools' in message %}
        {{- '<|system|>' + message.content + '<|tool|>' + message.tools + '<|/tool|><|end|>' }}
    {%- else %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

GEMMA = """{{ bos_token }}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

GEMMA_4 = """{{ bos_token }}
{%- if tools or enable_thinking %}<|turn>system
    {%- if enable_thinking %}<|think|>{% endif %}
    {%- for tool in tools or [] %}{{ '<|tool>declaration:' + tool.function.name + '<tool|>' }}{% endfor %}<turn|>
{% endif %}
{%- for message in messages %}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_call>call:' + call.function.name + '{' }}
        {%- for name, value in call.function.arguments | items %}{{ name + ':<|"|>' ~ value ~ '<|"|>' }}{% endfor %}
        {{- '}<tool_call|>' }}
    {%- endfor %}
    {%- set text = message.content or '' %}
    {{- text.split('<channel|>')[-1] | trim + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""

DEEPSEEK = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<\uff5cUser\uff5c>' + message.content }}
    {%- elif message.tool_calls %}{{ '<\uff5cAssistant\uff5c><\uff5ctool▁calls▁begin\uff5c>' }}
        {%- for call in message.tool_calls %}
            {{- '<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments | tojson }}{{ '\\n```<\uff5ctool▁call▁end\uff5c>' }}
        {%- endfor %}<\uff5ctool▁calls▁end\uff5c>
    {%- else %}{{ '<\uff5cAssistant\uff5c>' + message.content.split('</think>')[-1] + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<\uff5cAssistant\uff5c>{% endif %}"""
