#!/usr/bin/env python3
"""Makes tests/vectors/tok_*: small tokenizers in the configurations of GPT-2, Llama 3, Qwen2, Qwen3.5, gpt-oss and two more, with DeepSeek-V3's patterns and V2's, and of Llama 2,
Mistral, Gemma 3 and Gemma 4, trained on the text below, and what the tokenizers library makes of a text that is meant to be hard; of Kimi-K2's, by
its tiktoken.model, what tiktoken does. Run from the repository's root:

    python3 tests/make_tokenizer_vectors.py

tok_text.txt   the cases, separated by 0x1e
tok_NAME.json  a tokenizer.json
tok_NAME.ids   uint16, for each case: count and ids with special tokens recognised, count and ids without
"""
import base64
import json
import os
import random
import struct
import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

OUT = "tests/vectors/"
BYTE = pre_tokenizers.ByteLevel
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
NO_HAN = O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("[\\r\\n/]", "[\\r\\n]")
KIMI = r"[\p{Han}]+|" + NO_HAN
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN3_5 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")

ENGLISH = """A spillway lets water pass a dam when the lake behind it is full. It isn't there for ordinary days: it's there
for the one night in thirty years when it rains and rains and won't stop. We'll look at how such a thing is built, what
they've learned from those that broke, and why I'd rather have two small ones than a large one. You're free to skip the
numbers. The first is 1,024 metres long; the second, finished in 1998, carries 3500 cubic metres a second. Don't ask who
paid for it. The engineers' notes, which I've read twice, say: "the gate doesn't move, the water does." Later pages say
more about the training of models whose weights do not fit: the weights, the gradients and the state of the optimizer
are written to the disk and read from the disk, and the training goes on with the same numbers as before.
"""
CODE = """static int
count_words(const char *text, size_t bytes)
{
    int words = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] == ' ' && i + 1 < bytes && text[i + 1] != ' ')
            words++; /* the first letter of a word */
    }
    return words + 1;
}

def train(model, data, steps=1000, lr=3e-4):
\tfor step, (x, y) in enumerate(data):
\t\tloss = model(x, y)
\t\tif step % 100 == 0:
\t\t\tprint(f"step {step:>5} loss {loss:.4f}")
\t\tloss.backward()
\treturn model

<div class="note"><p>5 &lt; 7</p></div>\r\n{"name": "value", "list": [1, 22, 333, 4444, 55555]}\r\n
"""
OTHERS = """Der Überlauf läßt Wasser ab, wenn der See voll ist; schöne Grüße aus Köln. L'eau s'écoule là où la digue a cédé,
à côté de l'école. El niño mañana ¿vendrá? ¡Sí! Água não é pão. Příliš žluťoučký kůň úpěl ďábelské ódy. Zażółć gęślą jaźń.
Вода уходит через водослив, когда озеро полно. Ένα φράγμα κρατάει το νερό. السد يحجز الماء خلفه. המים זורמים אל הים.
水库的水位太高时，溢洪道会把水放走。我们训练的模型比内存大得多。ダムの水がいっぱいになると、余水吐から水が流れます。물이 가득 차면 여수로로 흘러갑니다.
बाँध के पीछे पानी है। เขื่อนกักเก็บน้ำไว้ Nước chảy qua đập tràn khi hồ đầy. 🌊🏞️ 👩‍👩‍👧‍👦 👍🏽 ½ ² ① Ⅷ ٣٤٥ ４２ …—“quoted”‘s’ ’s
"""
TRAINING = [ENGLISH, ENGLISH.lower(), CODE, CODE, OTHERS, OTHERS]

HARD = [
    "", " ", "  ", "\n", "\r\n", "\t", "a", "é", "Hello world", "  Hello   world  ", "I'm you're he's we'll they'd I've don't",
    "I'M YOU'RE HE'S WE'LL THEY'D I'VE DON'T", "'S'T'RE'VE'M'LL'D's't're've'm'll'd", "x'\u017f '\u017f \u212a 'stop 'rest 'dare",
    "don\u2019t it\u2019s", "''''ss 'll'll", "1 12 123 1234 12345 123456 1234567", "3.14159 1,000,000 1e-9 0x1F 5th x86_64",
    "a1b22c333d4444", "٣٤٥٦ ४५६७ Ⅷ Ⅸ ½¾ ²³ ①②③④", "\u3000全角　スペース\u3000", "a\u00a0b \u00a0 c\u00a0\u00a0d", "a\u2003b\u2009c\u2028d\u2029e\u0085f\u0085",
    "a\u200bb\u200b c\u2060d\ufeffe", "a\u180eb \u180e c", "\x1c\x1d\x1fa\x0b\x0cb \x0b c", "\x00a\x00\x00b \x7f", "tabs\tand\t\tmore\t\t\tof them\n\t\tindented",
    "line\nline\n\nline\n\n\nline\r\n\r\nline\r\rline \n line  \n  line\n ", " \n", "\n ", " \n ", "  \n\n  \n", "a \n b\n  c   \n\n   d",
    "trailing   ", "trailing\n", "trailing \n\n ", "...!!!???", "a... b!!! c?!?\n\nd;;;\r\ne", "(a) [b] {c} <d> /e/ \\f\\ |g| ~h~ `i` #j @k $l %m ^n &o *p _q_ -r- +s+ =t=",
    "$100 €200 £300 50% #1", "https://example.org/a/b?c=d&e=f#g user@example.org", "cafe\u0301 café cafe\u0301\u0323 cafe\u0323\u0301", "e\u0301e\u0301 n\u0303 A\u030a \u212b \u2126 \u0344",
    "\u1100\u1161\u11a8 \u1100\u1161 \uac00\u11a8 \uac01\u11a8", "\u0915\u093c \u0958 \u09c7\u09be \u0b47\u0b56", "a\u0301\u0302\u0303\u0304 \u0301a \u0301\u0301", "q\u0323\u0307 q\u0307\u0323 s\u0323\u0307 \u1e9b\u0323 d\u0323\u0307",
    "x" + "\u0323\u0307\u0301" * 12 + "y", "\u05d0\u05b7\u05bc \u0627\u064e\u0651 \u0627\u0651\u064e \u0622\u0653 \u0627\u0653", "\uf900 \u2f800"[:3] + "\U0002f800 \ufb1d \ufb2a", "が か\u3099 ガ カ\u3099 は\u309a",
    "👩‍👩‍👧‍👦👍🏽🇩🇪🇫🇷1️⃣ ❤️ ☃\ufe0f", "\U00010348\U0001d49c\U0001d7d8\U00020000\U000e0041\U0010ffff\ue000\ufffd\ufffe", "Straße STRASSE ſt ﬃ Ǆ ǅ İi ıI", "中文字符，没有空格。日本語とEnglish混ざる한국어 말",
    "ไทยไม่มีช่องว่าง", "العربية ١٢٣ والعبرية עברית", "Здравствуй, мир! Ёлка ё Й и\u0306 \u0419", "a" * 100, " " * 100, "\n" * 50, " \t" * 40, "ab" * 60 + "!" * 70, "=" * 80 + "\n" + "-" * 80, "日" * 60,
    "<|endoftext|>", "a<|endoftext|>b", "a <|endoftext|> b", "<|endoftext|><|endoftext|>", "<|endoftext| > <|endoftext", "<|end_of_text|>x<|begin_of_text|>y<|eot_id|>z", "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    "<tool_call> <tool_call>{\"a\": 1}</tool_call>", "  <mask>  b", "a\n\t <mask>\n\n c", "<mask><mask> <mask>", "a  <pad>   b <pad>", "<mask> <pad> <mask> <pad>", "caf\u00e9s cafe\u0301s", "x caf\u00e9s y cafe\u0301 s", "spam spa spamm",
    " spillway spillway\nspillway  spillway", "hello water the waters", "the  the   the    the",
    "पानी बाँध के पीछे है। हिन्दी में लिखा", "น้ำไหลผ่านเขื่อน ที่นี่", "שָׁלוֹם עֲלֵיכֶם בְּרֵאשִׁית", "x\u0332y\u0332 z\u20d7 m\u0307\u0308w\u0310", " \u0301a \u0332\u0332 b", "1\u0332\u0332 2\u0301", "!\u0301 .\u0332x", "\n\u0301\n \u0332",
    "'s\u0332 \u0332's", CODE, ENGLISH[:400], OTHERS,
]


def random_cases(count, seed):
    """Strings over characters at which patterns and normal forms change their mind."""
    draw = random.Random(seed)
    pool = list("aZéßñ中あ한яא१5٣²Ⅷ") + list("      \n\n\r\t") + ["\r\n", "  ", "\u00a0", "\u3000", "\u2028", "\u180e", "\u0301", "\u0323", "\u3099"] + \
        list(".,!'’\"-_<>|/") + ["'s", "'T", "'ll", "'RE", "the", " the", "water", "123", "e\u0301", "\u1100\u1161", "🌊", "\u200d", "\ufe0f",
                                 "<|endoftext|>", "<mask>", "<pad>", "spa", "spam", "<tool_call>", "\U0001d49c", "\x00", "ſ"]
    return ["".join(draw.choice(pool) for _ in range(draw.randint(1, 24))) for _ in range(count)]


def build(name, pre, vocab_size, added, normalizer=None, post=None, ignore_merges=False, extra=(), spaced=False):
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizer
    tok.pre_tokenizer = pre
    tok.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, min_frequency=2,
                                                          initial_alphabet=BYTE.alphabet()))
    tok.decoder = decoders.ByteLevel()
    data = json.loads(tok.to_str())
    for word in extra:  # in the vocabulary, and no merge leads there
        data["model"]["vocab"].setdefault(word, len(data["model"]["vocab"]))
    data["model"]["ignore_merges"] = ignore_merges
    if spaced:
        data["model"]["merges"] = [" ".join(m) for m in data["model"]["merges"]]
        del data["model"]["type"]
    tok = Tokenizer.from_str(json.dumps(data))
    for token in added:
        (tok.add_special_tokens if token.special else tok.add_tokens)([token])
    if post is not None:
        tok.post_processor = post(tok)
    out = json.loads(tok.to_str())
    if spaced:
        out["model"]["merges"] = data["model"]["merges"]
        del out["model"]["type"]
    with open(f"{OUT}tok_{name}.json", "w", encoding="utf-8") as f:
        json.dump(out, f, ensure_ascii=spaced, separators=(",", ":"))
        f.write("\n")
    return Tokenizer.from_file(f"{OUT}tok_{name}.json")


SIGN = "\u2581"


def by_chars(name, vocab_size, normalizer, pre, decoder, added=(), extra=(), head=("<unk>", "<s>", "</s>"), begin="<s> "):
    """As SentencePiece makes them: bytes for characters that have no token, words that begin with their space. head: the first ids, special;
    begin: what the file puts before a text."""
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.Replace(" ", SIGN)
    tok.pre_tokenizer = pre_tokenizers.Metaspace(SIGN, prepend_scheme="always", split=True)
    tok.train_from_iterator([ENGLISH, ENGLISH.lower(), CODE.replace("\n", " "), OTHERS.replace("\n", " ")], trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False, min_frequency=3, limit_alphabet=150))
    trained = json.loads(tok.to_str())["model"]
    vocab = {t: i for i, t in enumerate(head)} | {f"<0x{b:02X}>": len(head) + b for b in range(256)}
    merges = trained["merges"] + [[SIGN * n, SIGN * n] for n in (1, 2, 4)] + list(extra)
    for word in list(trained["vocab"]) + ["".join(m) for m in merges]:
        vocab.setdefault(word, len(vocab))
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(m) for m in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer, tok.pre_tokenizer, tok.decoder = normalizer, pre, decoder
    tok.post_processor = processors.TemplateProcessing(single=begin + "$A", pair=begin + "$A " + begin + "$B:1", special_tokens=[("<s>", 1)] if begin else [])
    tok.add_special_tokens([special(t) for t in head])
    for token in added:
        (tok.add_special_tokens if token.special else tok.add_tokens)([token])
    with open(f"{OUT}tok_{name}.json", "w", encoding="utf-8") as f:
        json.dump(json.loads(tok.to_str()), f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")
    return Tokenizer.from_file(f"{OUT}tok_{name}.json")


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)


def alone(pattern):
    return pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)


def special(text):
    return AddedToken(text, special=True, normalized=False)


END, START = "<|end_of_text|>", "<|begin_of_text|>"
plain = BYTE(add_prefix_space=False, use_regex=False)
tokenizers = {
    "gpt2": build("gpt2", BYTE(add_prefix_space=False), 1200, [AddedToken("<|endoftext|>", special=True, normalized=True)],
                  post=lambda t: processors.ByteLevel(trim_offsets=False), spaced=True),
    "llama3": build("llama3", pre_tokenizers.Sequence([split(LLAMA3), plain]), 1100, [special(START), special(END), special("<|eot_id|>")],
                    post=lambda t: processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
                        single=START + " $A", pair=START + " $A " + START + " $B:1", special_tokens=[(START, t.token_to_id(START))])]),
                    ignore_merges=True, extra=["Ġspillway", "hello", "日" * 20, "Ġwaters"]),
    "qwen2": build("qwen2", pre_tokenizers.Sequence([split(QWEN2), plain]), 1100,
                   [special("<|endoftext|>"), special("<|im_start|>"), special("<|im_end|>"), AddedToken("<tool_call>", normalized=False),
                    AddedToken("</tool_call>", normalized=False)], normalizer=normalizers.NFC(),
                   post=lambda t: processors.ByteLevel(trim_offsets=False)),
    "qwen3_5": build("qwen3_5", pre_tokenizers.Sequence([split(QWEN3_5), plain]), 1100,
                     [special("<|endoftext|>"), special("<|im_start|>"), special("<|im_end|>"), AddedToken("<think>", normalized=False),
                      AddedToken("</think>", normalized=False)], normalizer=normalizers.NFC(),
                     post=lambda t: processors.ByteLevel(trim_offsets=False)),
    "o200k": build("o200k", pre_tokenizers.Sequence([split(O200K), plain]), 1000, [special("<|endoftext|>"), special("<|start|>")]),
    # Everything else that is read: several patterns, digits, white space around added tokens, tokens found after NFC.
    "mixed": build("mixed", pre_tokenizers.Sequence([split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
        pre_tokenizers.Digits(individual_digits=True), plain]), 900,
        [special("<|endoftext|>"), AddedToken("<mask>", special=True, lstrip=True, normalized=False), AddedToken("<pad>", special=True, rstrip=True, normalized=False),
         AddedToken("caf\u00e9s"), AddedToken("spam", normalized=False), AddedToken("spa", lstrip=True, rstrip=True, normalized=True)],
        normalizer=normalizers.Sequence([normalizers.NFC()])),
    # As DeepSeek-V2 has it, with the end of a line; then matches alone, as Phi-4 and OLMo 2 have them, of a pattern that leaves white space out.
    "alone": build("alone", pre_tokenizers.Sequence([split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?[!-/:-~]+$"), split(r"\s+$"), alone(
        LLAMA3[:LLAMA3.index(r"|\s*")] + "| +"), pre_tokenizers.Digits(individual_digits=True), plain]), 900, [special("<|endoftext|>")]),
}
back = [decoders.Replace(SIGN, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
tokenizers |= {
    "llama2": by_chars("llama2", 500, normalizers.Sequence([normalizers.Prepend(SIGN), normalizers.Replace(" ", SIGN)]), None,
                       decoders.Sequence(back), [AddedToken("<mask>", normalized=False), AddedToken("spam", normalized=True)]),
    "mistral": by_chars("mistral", 500, None, pre_tokenizers.Metaspace(SIGN, prepend_scheme="first", split=False),
                        decoders.Metaspace(SIGN, prepend_scheme="first", split=False), [special("<pad>"), AddedToken("spa", normalized=True)]),
    # A merge across the start of a word, and a space before every stretch.
    "across": by_chars("across", 420, None, pre_tokenizers.Metaspace(SIGN, prepend_scheme="always", split=False), None,
                       [AddedToken("<mask>", normalized=False)], [["e", SIGN + "t"]]),
    "bare": by_chars("bare", 420, normalizers.Replace(" ", SIGN), None, decoders.Sequence(back[:3])),
    # As Gemma 3 has it: cuts at spaces, of which none are left, and runs of spaces and lines that are found before anything else.
    "gemma": by_chars("gemma", 420, normalizers.Replace(" ", SIGN), pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False),
                      decoders.Sequence(back[:3]), [AddedToken(t, normalized=False) for t in ("\n\n", SIGN * 2, SIGN * 3, "<unused0>")]),
    # As Gemma 4 has it: those runs are merged as other tokens are, and added are special tokens alone, in the vocabulary; the files of tuned
    # models put nothing before a text.
    "gemma4": by_chars("gemma4", 420, normalizers.Replace(" ", SIGN), pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False),
                       decoders.Sequence(back[:3]), extra=[["\n", "\n"], ["\n\n", "\n\n"], ["\t", "\t"]], begin="", head=(
                           "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>", "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>")),
}
cases = HARD + random_cases(600, 20240607)
draw = random.Random(1)
words = [w for w in "".join(TRAINING).split() if w.isalpha()]
for length in (10, 20, 40, 80, 160, 400):  # pieces that are longer than most
    cases += ["".join(draw.choice(words) for _ in range(length)), "".join(draw.choice("etaoinshr") for _ in range(length)),
              "".join(draw.choice("=-.!") for _ in range(length))]
cases = [c for c in cases if "\x1e" not in c]
with open(OUT + "tok_text.txt", "wb") as f:
    f.write(b"\x1e".join(c.encode() for c in cases))
for name, tok in tokenizers.items():
    with open(f"{OUT}tok_{name}.ids", "wb") as f:
        for case in cases:
            for as_text in (False, True):
                tok.encode_special_tokens = as_text
                ids = tok.encode(case, add_special_tokens=False).ids
                f.write(struct.pack(f"<{1 + len(ids)}H", len(ids), *ids))


def kimi(folder):
    """A vocabulary of 256 bytes and what merging makes of the text above, by rank; some of its 256 added tokens have names."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([split(KIMI), plain])
    tok.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=900, show_progress=False, min_frequency=2, initial_alphabet=BYTE.alphabet()))
    trained = json.loads(tok.to_str())["model"]
    to_byte = {c: b for b, c in bytes_to_unicode().items()}
    ranks = {bytes([b]): i for i, b in enumerate(random.Random(5).sample(range(256), 256))}
    # what no merge of the training leads to: a piece that is a token, two ways to the same token
    for token in ["".join(m) for m in trained["merges"]] + ["Ġspillway", "hello", "Ġwaters", "ther", "erthe"]:
        ranks.setdefault(bytes(to_byte[c] for c in token), len(ranks))
    names = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 10: "<|im_system|>", 17: "<|im_middle|>",
             22: "<think>", 23: "</think>", 200: "<tool_call>", 254: "[UNK]", 255: "[PAD]"}
    plain_text = ("<think>", "</think>", "<tool_call>")
    config = {"added_tokens_decoder": {str(len(ranks) + i): {"content": n, "lstrip": False, "normalized": False, "rstrip": False,
                                                            "single_word": False, "special": n not in plain_text} for i, n in names.items()},
              "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}, "bos_token": "[BOS]", "eos_token": "[EOS]",
              "model_max_length": 1000000000000000019884624838656, "pad_token": "[PAD]", "tokenizer_class": "TikTokenTokenizer", "unk_token": "[UNK]"}
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/tiktoken.model", "w", encoding="ascii") as f:
        f.writelines(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    with open(folder + "/tokenizer_config.json", "w", encoding="ascii") as f:
        json.dump(config, f, separators=(",", ":"))
        f.write("\n")
    special = {names.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(256)}
    encoding = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=special)
    with open(f"{folder}.ids", "wb") as f:
        for case in cases:
            for allowed in ("all", set(plain_text)):
                ids = encoding.encode(case, allowed_special=allowed, disallowed_special=())
                f.write(struct.pack(f"<{1 + len(ids)}H", len(ids), *ids))


def bytes_to_unicode():
    """The byte alphabet, by counting from U+0100 those that cannot be seen."""
    seen = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    hidden = [b for b in range(256) if b not in seen]
    return {b: chr(b) for b in seen} | {b: chr(0x100 + i) for i, b in enumerate(hidden)}


kimi(OUT + "tok_kimi")
