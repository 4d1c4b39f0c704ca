#!/usr/bin/env python3
"""Makes tests/vectors/chat.json: conversations through transformers' apply_chat_template, ids and the assistant's mask. The tokenizers
are those of make_tokenizer_vectors.py with the special tokens of a layout added; the templates follow what the models named are
published with. Run from the repository's root:

    python3 tests/make_chat_vectors.py
"""
import json
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

OUT = "tests/vectors/"
FOLD = "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}{% else %}" \
       "{% set first = '' %}{% set rest = messages %}{% endif %}"


def turns(begin, user, answer, end="", system=None, trim=False):
    """user, system: (before, after); answer: (before, end of turn, after that); end: of the conversation."""
    text = lambda s: json.dumps(s, ensure_ascii=False)
    content = "m.content | trim" if trim else "m.content"
    out = ("" if system else FOLD) + "{{- " + text(begin) + " -}}{% for m in " + ("messages" if system else "rest") + " -%}{%- if m.role == 'assistant' -%}"
    out += "{{- " + text(answer[0]) + " -}}{% generation %}{{- (" + content + ") + " + text(answer[1]) + " -}}{% endgeneration %}{{- " + text(answer[2]) + " -}}"
    if system:
        out += "{%- elif m.role == 'system' -%}{{- " + text(system[0]) + " + (" + content + ") + " + text(system[1]) + " -}}"
        out += "{%- else -%}{{- " + text(user[0]) + " + (" + content + ") + " + text(user[1]) + " -}}"
    else:
        out += "{%- else -%}{{- " + text(user[0]) + " + (first if loop.first else '') + (" + content + ") + " + text(user[1]) + " -}}"
    return out + "{%- endif -%}{%- endfor -%}{{- " + text(end) + " -}}"


def im(role, end="\n"):
    return ("<|im_start|>" + role + "\n", "<|im_end|>") + (() if end is None else (end,))


def two(t):
    return (t[0], "".join(t[1:]))


def header(role):
    return ("<|start_header_id|>" + role + "<|end_header_id|>\n\n", "<|eot_id|>", "")


def pipes(role):
    return ("<|" + role + "|>\n", "<|end|>", "\n")


def sep(role):
    return ("<|im_start|>" + role + "<|im_sep|>", "<|im_end|>", "")


def turn(role, more=""):
    return ("<|turn>" + role + "\n" + more, "<turn|>", "\n")


def kimi(role):
    return ("<|im_" + role + "|>" + role + "<|im_middle|>", "<|im_end|>", "")


def zephyr(role):
    return ("<|" + role + "|>\n", "</s>", "\n")


def new(*texts, **how):
    return [dict({"content": t, "special": True, "lstrip": False, "rstrip": False, "normalized": False}, **how) for t in texts]


INST = [("[INST] ", "[/INST]"), (" ", "</s>", "")]
LAYOUTS = [
    ("chatml", "qwen2", [], turns("", two(im("user")), im("assistant"), system=two(im("system")))),
    ("chatml", "gpt2", new("<|im_start|>", "<|im_end|>"), turns("", two(im("user")), im("assistant"), system=two(im("system")))),
    ("chatml", "llama2", new("<|im_start|>", special=False) + new("<|im_end|>"), turns("", two(im("user")), im("assistant"), system=two(im("system")))),
    ("chatml", "qwen3_5", [], turns("", two(im("user")), im("assistant"), system=two(im("system")))),
    ("examples/chat_no_thinking.json", "qwen3_5", [], turns(
        "", two(im("user")), (im("assistant")[0] + "<think>\n\n</think>\n\n",) + im("assistant")[1:], system=two(im("system")), trim=True)),
    ("llama3", "llama3", new("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"), turns(
        "<|begin_of_text|>", two(header("user")), header("assistant"), system=two(header("system")), trim=True)),
    ("mistral", "mistral", new("[INST]", "[/INST]"), turns("<s>", *INST)),
    ("mistral-tekken", "mixed", new("<s>", "</s>", "[INST]", "[/INST]"), turns("<s>", ("[INST]", "[/INST]"), ("", "</s>", ""))),
    ("mistral-v7", "mixed", new("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), turns(
        "<s>", ("[INST]", "[/INST]"), ("", "</s>", ""), system=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"))),
    ("mistral-v1", "llama2", [], turns("<s>", (" [INST] ", " [/INST]"), (" ", "</s>", ""))),
    ("mistral-v1", "across", [], turns("<s>", (" [INST] ", " [/INST]"), (" ", "</s>", ""))),
    ("gemma", "bare", new("<bos>", "<start_of_turn>", "<end_of_turn>"), turns("<bos>", ("<start_of_turn>user\n", "<end_of_turn>\n"), (
        "<start_of_turn>model\n", "<end_of_turn>", "\n"), trim=True)),
    ("gemma", "gemma", new("<bos>", "<start_of_turn>", "<end_of_turn>"), turns("<bos>", ("<start_of_turn>user\n", "<end_of_turn>\n"), (
        "<start_of_turn>model\n", "<end_of_turn>", "\n"), trim=True)),
    ("gemma4", "gemma4", [], turns("<bos>", two(turn("user")), turn("model"), system=two(turn("system")), trim=True)),
    ("gemma4", "bare", new("<bos>", "<|turn>", "<turn|>"), turns("<bos>", two(turn("user")), turn("model"), system=two(turn("system")), trim=True)),
    ("examples/chat_gemma4_no_thinking.json", "gemma4", [], turns(
        "<bos>", two(turn("user")), turn("model", "<|channel>thought\n<channel|>"), system=two(turn("system")), trim=True)),
    ("phi3", "llama2", new("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", rstrip=True) + new("<|endoftext|>"), turns(
        "", two(pipes("user")), pipes("assistant"), end="<|endoftext|>", system=two(pipes("system")))),
    ("phi4", "llama3", new("<|im_start|>", "<|im_sep|>", "<|im_end|>", lstrip=True, rstrip=True), turns(
        "", two(sep("user")), sep("assistant"), system=two(sep("system")))),
    ("deepseek", "qwen2", new("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>") + new("<｜User｜>", "<｜Assistant｜>", special=False), turns(
        "<｜begin▁of▁sentence｜>", ("<｜User｜>", ""), ("<｜Assistant｜>", "<｜end▁of▁sentence｜>", ""), system=("", ""))),
    ("kimi", "o200k", new("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"), turns(
        "", two(kimi("user")), kimi("assistant"), system=two(kimi("system")))),
    ("examples/chat_kimi_no_thinking.json", "o200k", new("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>") + new(
        "<think>", "</think>", special=False), turns("", two(kimi("user")), (kimi("assistant")[0] + "<think></think>",) + kimi("assistant")[1:],
                                                     system=two(kimi("system")))),
    ("zephyr", "mistral", [], turns("", two(zephyr("user")), zephyr("assistant"), system=two(zephyr("system")))),
]


def talk(*contents, system=None):
    out = [{"role": "system", "content": system}] if system is not None else []
    return out + [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


TALKS = [
    talk("Hello", "Hello! The water is high."), talk("How high is the lake?", "3500 metres.", "And the second?", "1,024 metres; I'd say."),
    talk("What is a spillway?", "A dam's way out.", system="You're an engineer who doesn't guess."), talk("Only a question"),
    talk("", ""), talk("a", "b", "c", system=""), talk("Größe é e\u0301 \u212b", "caf\u00e9s, cafe\u0301s und n\u0303 水库 👍🏽\u0301", "日本 か\u3099", "は\u309a"),
    talk("x\n", "def f():\n\treturn 1\n"), talk("x \n\n", "two\n\nlines  \n and more\n\n"), talk("x", "if  a:\n  b   c"), talk("<mask> and spam <tool_call>{}</tool_call> spa caf\u00e9s", "<tool_call>{\"a\": 1}</tool_call> spam <mask>x"),
    talk("▁sign ▁ x", "▁s▁ ▁"), talk("'s", "'ll do", "123", "45"),
]
LEADING = [talk("\nx", "\n\nfoo"), talk(" x", "  bar "), talk("\n \n x", " \n y\n")]


# Tools and reasoning. The templates here do what the published ones do, less what those add that no message says (a default system prompt, dates, an
# empty thought), in words of their own:
#   chatml   Qwen2.5's and Qwen3's: tools in the system's turn, results of tools in a user's; reasoning, which Qwen3 keeps behind the last question.
#            Arguments that are text are Qwen3's, which writes them as they are (Qwen2.5 would quote them): here they are in json.dumps's form.
#   llama3   3.1's to 3.3's: tools in the first user's turn, one call in a turn, without content, and the result as a JSON string.
#   mistral, mistral-tekken   7B v0.3's, and Nemo's: tools before the last user's turn. The published ones do not escape the strings of a function,
#            which the model's own library does: tools have nothing to escape here. The system's text is before the first user's, as above.
DECLARE = "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>"
HOW = "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n" \
      "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"
GIVEN = "Given the following functions, please respond with a JSON for a function call with its proper arguments that best answers the given prompt.\n\n" \
        "Respond in the format {\"name\": function name, \"parameters\": dictionary of argument name and its value}.Do not use variables.\n\n"
CHATML_TOOLS = """
{%- set at = namespace(question=messages|length) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) -%}{%- set at.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set first = messages[0].content if messages[0].role == 'system' else none -%}
{%- if tools or first is not none -%}
  {{- '<|im_start|>system\n' + (first or '') -}}
  {%- if tools -%}
    {{- ('\n\n' if first is not none else '') + DECLARE -}}{%- for t in tools -%}{{- '\n' + t | tojson -}}{%- endfor -%}{{- HOW -}}
  {%- endif -%}
  {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
  {%- set content = m.content or '' -%}
  {%- if m.role == 'user' -%}{{- '<|im_start|>user\n' + content + '<|im_end|>\n' -}}
  {%- elif m.role == 'tool' -%}
    {{- ('' if loop.previtem.role == 'tool' else '<|im_start|>user') + '\n<tool_response>\n' + content + '\n</tool_response>' -}}
    {{- '' if not loop.last and loop.nextitem.role == 'tool' else '<|im_end|>\n' -}}
  {%- elif m.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {% generation %}
    {%- set thought = m.reasoning_content or '' -%}
    {%- if thought and loop.index0 > at.question -%}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') -}}{%- else -%}{{- content -}}{%- endif -%}
    {%- for c in m.tool_calls or [] -%}
      {{- ('\n' if content or not loop.first else '') + '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' -}}
      {{- (c.function.arguments if c.function.arguments is string else c.function.arguments | tojson) + '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}{% endgeneration %}{{- '\n' -}}
  {%- endif -%}
{%- endfor -%}""".replace("DECLARE", json.dumps(DECLARE)).replace("HOW", json.dumps(HOW))
LLAMA_TOOLS = """
{%- macro turn(role, text) -%}{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + text + '<|eot_id|>' -}}{%- endmacro -%}
{{- '<|begin_of_text|>' -}}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else none -%}
{%- set rest = messages[1:] if system is not none else messages -%}
{%- if tools or system is not none -%}{{- turn('system', ('Environment: ipython\n\n' if tools else '') + (system or '')) -}}{%- endif -%}
{%- for m in rest -%}
  {%- if m.role == 'user' -%}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}
    {%- if tools and loop.first -%}{{- GIVEN -}}{%- for t in tools -%}{{- t | tojson(indent=4) + '\n\n' -}}{%- endfor -%}{%- endif -%}
    {{- m.content | trim + '<|eot_id|>' -}}
  {%- elif m.role == 'tool' -%}{{- turn('ipython', m.content | tojson) -}}
  {%- else -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
    {%- if m.tool_calls -%}{%- set f = m.tool_calls[0].function -%}
      {% generation %}{{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}<|eot_id|>' -}}{% endgeneration %}
    {%- else -%}{% generation %}{{- m.content | trim + '<|eot_id|>' -}}{% endgeneration %}{%- endif -%}
  {%- endif -%}
{%- endfor -%}""".replace("GIVEN", json.dumps(GIVEN))
MISTRAL_TOOLS = FOLD + """
{{- '<s>' -}}
{%- set asked = rest | selectattr('role', 'equalto', 'user') | list -%}
{%- for m in rest -%}
  {%- if m.role == 'user' -%}
    {%- if tools and m == asked[-1] -%}
      {{- '[AVAILABLE_TOOLS]SPACE[' -}}
      {%- for t in tools -%}
        {{- '{"type": "function", "function": {' -}}
        {%- for k, v in t.function.items() if k != 'return' -%}{{- '"' + k + '": ' + v | tojson + ('' if loop.last else ', ') -}}{%- endfor -%}
        {{- '}}' + ('' if loop.last else ', ') -}}
      {%- endfor -%}
      {{- '][/AVAILABLE_TOOLS]' -}}
    {%- endif -%}
    {{- '[INST]SPACE' + (first if loop.first else '') + m.content + '[/INST]' -}}
  {%- elif m.role == 'tool' -%}{{- '[TOOL_RESULTS]SPACE{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' -}}
  {%- elif m.tool_calls -%}
    {% generation %}{{- '[TOOL_CALLS]SPACE[' -}}
    {%- for c in m.tool_calls -%}
      {{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' + ('' if loop.last else ', ') -}}
    {%- endfor -%}
    {{- ']</s>' -}}{% endgeneration %}
  {%- else -%}{{- 'SPACE' -}}{% generation %}{{- m.content + '</s>' -}}{% endgeneration %}{%- endif -%}
{%- endfor -%}"""
BRACKETS = ["[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]


def function(name, properties, **more):
    return {"type": "function", "function": dict({"name": name, "description": "Gets the " + name, "parameters": {"type": "object", "properties": properties}}, **more)}


def call(name, arguments, id="abcDEF123"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text):
    return {"role": "user", "content": text}


def says(content=None, *calls, thought=None):
    out = {"role": "assistant", "content": content}
    out.update({"tool_calls": list(calls)} if calls else {})
    return dict(out, reasoning_content=thought) if thought is not None else out


def result(content, id="abcDEF123"):
    return {"role": "tool", "name": "level", "content": content, "tool_call_id": id}


LAKE = function("level", {"lake": {"type": "string", "enum": ["Größe", "日本 👍🏽"]}, "days": {"type": "integer", "default": 5}, "raw": {}})
GATE = {"function": {"name": "gate", "parameters": {"z": None, "a": [1, -2, 0.5, 1e-05, 2.0 ** -24, 5.0, 1e16, 123456789012345680.5e-3, 2 ** 53, -0.0, True, False, [], {}, [[]]], "m": {"k": {"x": "y"}}},
                     "return": {"type": "number"}}, "type": "function"}
ODD = {"lake": "a \"quoted\" \\ back\tslash\r\n\u0001\u001f\u007f/ \u2028 cafe\u0301 <tool_call>", "n": 5, "x": 0.1, "big": 9007199254740993, "none": None, "of": {"b": [], "a": {}}}
ASKED = [user("How high is it?"), says(None, call("level", {"lake": "Größe", "days": 3})), result("{\"level\": 1024.5}"), says("It is 1,024.5 metres.")]
ONE_CALL = [
    ([LAKE], ASKED), ([LAKE, GATE], [{"role": "system", "content": "You're an engineer."}] + ASKED), (None, [{"role": "system", "content": "No tools."}] + ASKED),
    ([LAKE], [user("Hello"), says("Hello!")]), ([GATE], [user(" x "), says("", call("gate", ODD)), result("\"it's \\u00e9 e\u0301\n\""), says("two\n\nlines")]),
    ([LAKE], ASKED + [user("And now?"), says(None, call("level", {}, "xyzXYZ789")), result("null", "xyzXYZ789"), says("None.")]),
    ([LAKE], [user("A question only")]), ([LAKE], ASKED[:2]), ([LAKE], ASKED[:3]),
]
CALLS = [([LAKE, GATE], [user("Both?"), says(None, call("level", {"lake": "a"}), call("gate", {}, "123456789")), result("1"), result("\"two\"", "123456789"), says("1 and two.")])]
BESIDE = [
    ([LAKE], [user("Look"), says("I look.", call("level", {"lake": "a"}), call("level", ODD)), result("not JSON: {"), result(""), says("x"), user("Thanks"), says("Well")]),
    ([LAKE], [user("Look"), says("", call("level", json.dumps({"lake": "x", "days": 2.5}))), result("1"), says("x")]),
]
THOUGHTS = [
    (None, [user("2 + 2?"), says("4", thought="\n\nIt is\n\n4.\n")]), (None, [user("a"), says("b", thought="gone"), user("c"), says("\nd", thought="kept")]),
    ([LAKE], [user("a"), says("x", thought="gone"), user("b"), says(None, call("level", {}), thought="look"), result("5"), says("five", thought="so")]),
    ([LAKE], [user("a"), says("I look", call("level", {}), thought="t"), user("<tool_response>\n5\n</tool_response>"), says("<think>x", thought="kept <think> too")]),
]
SAID = [
    ("chatml", "qwen2", [], CHATML_TOOLS, ONE_CALL[:6] + CALLS + BESIDE + THOUGHTS[2:]),
    ("chatml", "qwen3_5", [], CHATML_TOOLS, ONE_CALL[6:] + THOUGHTS),
    ("chatml", "llama2", new("<|im_start|>", special=False) + new("<|im_end|>"), CHATML_TOOLS, ONE_CALL[4:5] + THOUGHTS[:2]),
    ("llama3", "llama3", new("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"), LLAMA_TOOLS, ONE_CALL[1:5] + ONE_CALL[7:]),
    ("mistral", "mistral", new(*BRACKETS), MISTRAL_TOOLS.replace("SPACE", " "), ONE_CALL[1:6] + CALLS),
    ("mistral-tekken", "mixed", new("<s>", "</s>", *BRACKETS), MISTRAL_TOOLS.replace("SPACE", ""), ONE_CALL[3:6] + CALLS),
]


def spoken(tok, template, cases):
    for tools, messages in cases:
        got = tok.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        yield dict({"messages": messages, "ids": got["input_ids"], "mask": "".join(map(str, got["assistant_masks"]))}, **({"tools": tools} if tools else {}))


def conversations(tok, template, rstrip):
    special = [t.content for t in tok.added_tokens_decoder.values() if t.special]
    for messages in TALKS + ([] if rstrip else LEADING):  # where tokens swallow spaces, the mask's offsets are those of the token
        if any(t in m["content"] for t in special for m in messages):  # would be tokens there
            continue
        got = tok.apply_chat_template(messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        yield {"messages": messages, "ids": got["input_ids"], "mask": "".join(map(str, got["assistant_masks"]))}


out = []
for layout, base, added, template, *cases in LAYOUTS + SAID:
    tok = Tokenizer.from_file(f"{OUT}tok_{base}.json")
    for a in added:
        a = dict(a)
        token = AddedToken(a.pop("content"), **a)
        (tok.add_special_tokens if token.special else tok.add_tokens)([token])
    numbers = {a["content"]: tok.token_to_id(a["content"]) for a in added}
    fast = PreTrainedTokenizerFast(tokenizer_object=tok)
    talks = spoken(fast, template, cases[0]) if cases else conversations(fast, template, any(a["rstrip"] for a in added))
    out.append({"layout": layout, "tokenizer": base, "added": [dict(a, id=numbers[a["content"]]) for a in added if numbers[a["content"]] >= Tokenizer.from_file(
        f"{OUT}tok_{base}.json").get_vocab_size()], "conversations": list(talks)})
with open(OUT + "chat.json", "w", encoding="utf-8") as f:
    f.write("[\n" + ",\n".join(json.dumps(o, ensure_ascii=True, separators=(",", ":")) for o in out) + "\n]\n")
