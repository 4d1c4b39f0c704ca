/*
 * Cutting text into pieces before merging: stretches of UTF-8 go through the tokenizer's patterns one after the other, each
 * on the pieces of the one before; a stretch of other bytes is one piece. And where none of them would have joined what stands on both sides,
 * so that a long text may be cut there before.
 *
 * The patterns are written for Oniguruma (Ruby's syntax), PCRE2 runs them. Both agree on a subset, which is all that the
 * tokenizers we know of use; a pattern is checked against it and what lies outside is refused, not guessed. White space
 * is spelled out on the way, because PCRE2 counts U+180E as one.
 */
#include "tokenizer_internal.h"
#include <stdio.h>

const char *const spw__tok_gpt2_pattern =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
#define SHORT        "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define WHITE        "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define AFTER_NUMBER "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" WHITE
#define UP_TO_NUMBER SHORT "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
const char *const spw__tok_llama3_pattern = UP_TO_NUMBER "\\p{N}{1,3}" AFTER_NUMBER;
const char *const spw__tok_qwen2_pattern = UP_TO_NUMBER "\\p{N}" AFTER_NUMBER;
static const char seed_pattern[] = UP_TO_NUMBER "\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+";
#define BEFORE  "[^\\r\\n\\p{L}\\p{N}]?"
#define UPPER   "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER   "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define SLASHES "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" WHITE
const char *const spw__tok_qwen3_5_pattern =
    SHORT "|" BEFORE "[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*" WHITE;
static const char o200k_pattern[] =
    BEFORE UPPER "*" LOWER "+" SHORT "?|" BEFORE UPPER "+" LOWER "*" SHORT "?|\\p{N}{1,3}" SLASHES;
static const char tekken_pattern[] = BEFORE UPPER "*" LOWER "+|" BEFORE UPPER "+" LOWER "*|\\p{N}" SLASHES;
#define NO_HAN(class) "[" class "&&[^\\p{Han}]]"
#define KIMI_UPPER    NO_HAN("\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}")
#define KIMI_LOWER    NO_HAN("\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}")
const char *const spw__tok_kimi_parts[] = {"[\\p{Han}]+",
                                           BEFORE KIMI_UPPER "*" KIMI_LOWER "+" SHORT "?",
                                           BEFORE KIMI_UPPER "+" KIMI_LOWER "*" SHORT "?",
                                           "\\p{N}{1,3}",
                                           " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*",
                                           "\\s*[\\r\\n]+",
                                           "\\s+(?!\\S)",
                                           "\\s+",
                                           NULL};
static const char *const deepseek_patterns[] = {
    "\\p{N}{1,3}", "[\xe4\xb8\x80-\xe9\xbe\xa5\xe3\x81\x80-\xe3\x82\x9f\xe3\x82\xa0-\xe3\x83\xbf]+",
    ("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
     "?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+")};

#define SPACE "\\x09-\\x0d\\x20\\x85\\xa0\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"

/* ---------------------------------------------------------------- patterns */

typedef struct translation {
    const char *in;
    uint64_t at;
    char *out;
    uint64_t used, room;
    const char *why; /* it is refused; NULL so far */
} translation;

static void
put(translation *w, const char *text, uint64_t bytes)
{
    if (bytes > w->room - w->used) {
        w->why = "is too long";
        return;
    }
    memcpy(w->out + w->used, text, bytes);
    w->used += bytes;
}

static bool
is_word(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* A script that patterns name. PCRE2 means Script_Extensions by a plain name, since 10.40, others Script. */
#if PCRE2_MAJOR > 10 || PCRE2_MINOR >= 40
#define SCRIPT_HAN "\\p{sc:Han}"
#else
#define SCRIPT_HAN "\\p{Han}"
#endif
static const char han[] = "\\p{Han}", but_han[] = "&&[^\\p{Han}]";

/* A general category: L, Lu and so on. */
static bool
is_category(const char *name, uint64_t bytes)
{
    static const char *const second[] = {"Lultmo", "Mnce", "Ndlo", "Pcdseifo", "Smcko", "Zslp", "Ccfn"};
    if (bytes < 1 || bytes > 2)
        return false;
    for (size_t i = 0; i < sizeof second / sizeof second[0]; i++) {
        if (second[i][0] == name[0])
            return bytes == 1 || (name[1] >= 'a' && strchr(second[i] + 1, name[1]) != NULL);
    }
    return false;
}

static void
escape(translation *w, bool in_class)
{
    const char *p = w->in + w->at, *end;
    char c = p[1];
    if (strncmp(p, han, strlen(han)) == 0) {
        put(w, SCRIPT_HAN, strlen(SCRIPT_HAN));
        w->at += strlen(han);
        return;
    }
    if (c == 'p' || c == 'P') {
        end = p[2] == '{' ? strchr(p, '}') : NULL;
        if (end == NULL || !is_category(p + 3, (uint64_t)(end - p - 3))) {
            w->why = "has a \\p{...} that is neither a general category nor \\p{Han}";
            return;
        }
        put(w, p, (uint64_t)(end + 1 - p));
        w->at += (uint64_t)(end + 1 - p);
        return;
    }
    if (c == 's') {
        put(w, in_class ? SPACE : "[" SPACE "]", strlen(SPACE) + (in_class ? 0 : 2));
    } else if (c == 'S' && !in_class) {
        put(w, "[^" SPACE "]", strlen(SPACE) + 3);
    } else if (c == 'd' || c == 'D') {
        put(w, c == 'd' ? "\\p{Nd}" : "\\P{Nd}", 6);
    } else if (c == 'r' || c == 'n' || c == 't' || c == 'f' || (c > ' ' && c < 0x7f && !is_word(c))) {
        put(w, p, 2);
    } else {
        w->why = "has an escape that is not built";
        return;
    }
    w->at += 2;
}

/* Whether the class that begins here leaves Han out at its end: [...&&[^\p{Han}]], the one intersection that is known. */
static bool
is_without_han(const translation *w)
{
    const char *p = w->in + w->at + 1;
    while (*p != '\0' && *p != ']' && strncmp(p, but_han, strlen(but_han)) != 0)
        p += p[0] == '\\' && p[1] != '\0' ? 2 : 1;
    return *p == '&' && p[strlen(but_han)] == ']' && w->in[w->at + 1] != '^';
}

static void
class_of_characters(translation *w)
{
    static const char not_han[] = "(?:(?!" SCRIPT_HAN ")"; /* PCRE2 has no intersections */
    bool without = is_without_han(w);
    if (without)
        put(w, not_han, strlen(not_han));
    put(w, "[", 1);
    w->at++;
    if (w->in[w->at] == '^') {
        put(w, "^", 1);
        w->at++;
    }
    if (w->in[w->at] == ']') {
        w->why = "has a class that begins with ]";
        return;
    }
    while (w->why == NULL && w->in[w->at] != ']') {
        char c = w->in[w->at];
        if (c == '\0')
            w->why = "has a class without an end";
        else if (c == '[')
            w->why = "has a class in a class";
        else if (without && strncmp(&w->in[w->at], but_han, strlen(but_han)) == 0)
            w->at += strlen(but_han);
        else if (c == '&' && w->in[w->at + 1] == '&')
            w->why = "has an intersection of classes that is not built";
        else if (c == '\\')
            escape(w, true);
        else
            put(w, &w->in[w->at++], 1);
    }
    put(w, without ? "])" : "]", without ? 2 : 1);
    w->at++;
}

/* "{2,5}" or "{2}" or "{2,}"; anything else in braces is refused. */
static void
count_of(translation *w)
{
    const char *p = w->in + w->at, *q = p + 1;
    while (*q >= '0' && *q <= '9')
        q++;
    if (q > p + 1 && *q == ',') {
        q++;
        while (*q >= '0' && *q <= '9')
            q++;
    }
    if (q == p + 1 || *q != '}' || q[1] == '+' || q[1] == '?') {
        w->why = "has braces that are no plain count";
        return;
    }
    put(w, p, (uint64_t)(q + 1 - p));
    w->at += (uint64_t)(q + 1 - p);
}

/* (?i:...): letters, apostrophes and bars only, and no pair of letters that Oniguruma folds with one character. */
static void
caseless(translation *w)
{
    static const char *const ligatures[] = {"ss", "st", "ff", "fi", "fl"};
    const char *p = w->in + w->at + 4;
    for (; *p != ')'; p++) {
        bool letter = (*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z');
        if (!letter && *p != '\'' && *p != '|') {
            w->why = "has (?i: around more than letters, apostrophes and bars";
            return;
        }
        for (size_t i = 0; i < sizeof ligatures / sizeof ligatures[0]; i++) {
            if ((p[0] | 0x20) == ligatures[i][0] && (p[1] | 0x20) == ligatures[i][1]) {
                w->why = "has (?i: around letters that fold with a ligature";
                return;
            }
        }
    }
    put(w, w->in + w->at, (uint64_t)(p - (w->in + w->at)));
    w->at = (uint64_t)(p - w->in);
}

static void
group(translation *w)
{
    static const char *const kinds[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
    const char *p = w->in + w->at;
    if (strncmp(p, "(?i:", 4) == 0) {
        caseless(w);
        return;
    }
    if (p[1] != '?') {
        put(w, "(?:", 3); /* what is captured is of no use */
        w->at++;
        return;
    }
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (strncmp(p, kinds[i], strlen(kinds[i])) == 0) {
            put(w, p, strlen(kinds[i]));
            w->at += strlen(kinds[i]);
            return;
        }
    }
    w->why = "has a kind of group that is not built";
}

/* Of a line, always: at the end of the piece, or before a newline in it. */
static void
end_of_line(translation *w)
{
    put(w, "(?m:$)", 6);
    w->at++;
}

static void
translate(translation *w)
{
    while (w->why == NULL && w->in[w->at] != '\0') {
        char c = w->in[w->at];
        if (c == '\\')
            escape(w, false);
        else if (c == '[')
            class_of_characters(w);
        else if (c == '{')
            count_of(w);
        else if (c == '(')
            group(w);
        else if (c == '^')
            w->why = "has an anchor";
        else if (c == '$')
            end_of_line(w);
        else
            put(w, &w->in[w->at++], 1);
    }
}

static void
quote(translation *w)
{
    for (; w->why == NULL && w->in[w->at] != '\0'; w->at++) {
        char c = w->in[w->at];
        if ((unsigned char)c < 0x80 && !is_word(c))
            put(w, "\\", 1);
        put(w, &c, 1);
    }
}

spw_status
spw__tok_pattern_add(spw_tokenizer *t, const char *text, int kind, const char *path, const char *field, spw_error *err)
{
    static const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C;
    char out[2 * TOK_PATTERN_BYTES], why[128];
    translation w = {.in = text, .out = out, .room = sizeof out};
    tok_pattern *p = &t->patterns[t->pattern_count];
    pcre2_compile_context *c;
    uint32_t empty = 0;
    PCRE2_SIZE at = 0;
    int code = 0;
    if (t->pattern_count == TOK_PATTERNS_MAX)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s: more than %d patterns", path, field, TOK_PATTERNS_MAX);
    if (kind == TOK_LITERAL)
        quote(&w);
    else
        translate(&w);
    if (w.why != NULL)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s: the pattern %s, at byte %llu: %.200s", path, field, w.why,
                         (unsigned long long)w.at, text);
    if ((c = pcre2_compile_context_create(t->memory)) == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%s: %s", path, field);
    pcre2_set_newline(c, PCRE2_NEWLINE_LF); /* for "." */
    p->code = pcre2_compile((PCRE2_SPTR)out, w.used, options, &code, &at, c);
    pcre2_compile_context_free(c);
    if (p->code == NULL) {
        if (code == PCRE2_ERROR_HEAP_FAILED || code == PCRE2_ERROR_NOMEMORY)
            return SPW_RAISE(err, SPW_ENOMEM, "%s: %s: compiling the pattern", path, field);
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s: %s: %.200s", path, field, why, text);
    }
    t->pattern_count++; /* from here close frees it */
    pcre2_pattern_info(p->code, PCRE2_INFO_MATCHEMPTY, &empty);
    if (empty != 0)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s: the pattern also matches nothing: %.200s", path, field, text);
    p->jit = pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE) == 0; /* without it the interpreter does the same */
    return SPW_OK;
}

/* ---------------------------------------------------------------- pieces */

/* From `at` on. A repeated group keeps its steps on the compiled matcher's stack; the interpreter has the heap for those of a long piece. */
static int
next_match(const tok_run *r, const tok_pattern *p, const char *text, uint64_t bytes, uint64_t at)
{
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    if (p->jit)
        rc = pcre2_jit_match(p->code, (PCRE2_SPTR)text, bytes, at, PCRE2_NO_UTF_CHECK, r->s->match, r->s->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(p->code, (PCRE2_SPTR)text, bytes, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, r->s->match,
                         r->s->context);
    return rc;
}

static spw_status
split_by(const tok_run *r, uint32_t level, const char *text, uint64_t bytes)
{
    const tok_pattern *p = &r->t->patterns[level];
    uint64_t at = 0;
    if (level == r->t->pattern_count)
        return bytes > 0 ? spw__tok_word(r, text, bytes) : SPW_OK;
    while (at < bytes) {
        const PCRE2_SIZE *found = pcre2_get_ovector_pointer(r->s->match);
        uint64_t begin, end;
        int rc = next_match(r, p, text, bytes, at);
        if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) {
            char why[128];
            if (rc == PCRE2_ERROR_NOMEMORY)
                return SPW_RAISE(r->err, SPW_ENOMEM, "a piece of text at byte %llu", (unsigned long long)at);
            pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
            return SPW_RAISE(r->err, SPW_EUNSUPPORTED, "%s: pattern %u gave up at byte %llu of %llu: %s", r->t->path,
                             level, (unsigned long long)at, (unsigned long long)bytes, why);
        }
        begin = rc < 0 ? bytes : found[0];
        end = rc < 0 ? bytes : found[1];
        if (!p->alone)
            SPW_TRY(split_by(r, level + 1, text + at, begin - at)); /* what the pattern left out is a piece too */
        if (begin < end)
            SPW_TRY(split_by(r, level + 1, text + begin, end - begin));
        SPW_ASSERT(end > at);
        at = end;
    }
    return SPW_OK;
}

spw_status
spw__tok_split(const tok_run *r, const char *text, uint64_t bytes)
{
    if (r->t->chars)
        return spw__tok_chars_split(r, text, bytes);
    while (bytes > 0) {
        uint64_t valid = spw__utf8_valid(text, bytes), other;
        uint32_t cp;
        SPW_TRY(split_by(r, 0, text, valid));
        for (other = valid; other < bytes && spw__utf8_next(text + other, bytes - other, &cp) == 0;)
            other++;
        if (other > valid)
            SPW_TRY(spw__tok_word(r, text + valid, other - valid));
        text += other;
        bytes -= other;
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- cutting text in two */

bool
spw__tok_patterns_known(const char *const *patterns, uint64_t count)
{
    const char *const single[] = {spw__tok_llama3_pattern,  spw__tok_qwen2_pattern, seed_pattern,
                                  spw__tok_qwen3_5_pattern, o200k_pattern,          tekken_pattern};
    bool known = count == sizeof deepseek_patterns / sizeof deepseek_patterns[0];
    for (uint64_t i = 0; known && i < count; i++)
        known = strcmp(patterns[i], deepseek_patterns[i]) == 0;
    for (size_t i = 0; count == 1 && i < sizeof single / sizeof single[0]; i++)
        known = known || strcmp(patterns[0], single[i]) == 0;
    return known;
}

/* The bytes of a character that begins with this one, where all that do are letters: ASCII's, Cyrillic, ideographs, Hangul. 0: of others. */
static uint32_t
letter_bytes(char first)
{
    unsigned char c = (unsigned char)first;
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))
        return 1;
    if (c == 0xd0 || c == 0xd1)
        return 2;
    return (c >= 0xe5 && c <= 0xe9) || c == 0xeb || c == 0xec ? 3 : 0;
}

bool
spw__tok_ends_word(const char *text, uint64_t at)
{
    uint64_t n = 1;
    while (n < 3 && n < at && ((unsigned char)text[at - n] & 0xc0) == 0x80)
        n++;
    return letter_bytes(text[at - n]) == n || (n == 1 && text[at - 1] >= '0' && text[at - 1] <= '9');
}

bool
spw__tok_may_cut(const char *text, uint64_t bytes, uint64_t at)
{
    bool line = text[at] == '\n' || text[at] == '\r';
    bool space = text[at] == ' ' && at + 1 < bytes && letter_bytes(text[at + 1]) > 0;
    return (line || space) && spw__tok_ends_word(text, at);
}
