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


def conversations(tok, template, rstrip):
    special = [t.content for t in tok.added_tokens_decoder.values() if t.special]
    for messages in TALKS + ([] if rstrip else LEADING):  # where tokens swallow spaces, the mask's offsets are those of the token
        if any(t in m["content"] for t in special for m in messages):  # would be tokens there
            continue
        got = tok.apply_chat_template(messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        yield {"messages": messages, "ids": got["input_ids"], "mask": "".join(map(str, got["assistant_masks"]))}


out = []
for layout, base, added, template in LAYOUTS:
    tok = Tokenizer.from_file(f"{OUT}tok_{base}.json")
    for a in added:
        a = dict(a)
        token = AddedToken(a.pop("content"), **a)
        (tok.add_special_tokens if token.special else tok.add_tokens)([token])
    numbers = {a["content"]: tok.token_to_id(a["content"]) for a in added}
    fast = PreTrainedTokenizerFast(tokenizer_object=tok)
    out.append({"layout": layout, "tokenizer": base, "added": [dict(a, id=numbers[a["content"]]) for a in added if numbers[a["content"]] >= Tokenizer.from_file(
        f"{OUT}tok_{base}.json").get_vocab_size()], "conversations": list(conversations(fast, template, any(a["rstrip"] for a in added)))})
with open(OUT + "chat.json", "w", encoding="utf-8") as f:
    f.write("[\n" + ",\n".join(json.dumps(o, ensure_ascii=True, separators=(",", ":")) for o in out) + "\n]\n")
