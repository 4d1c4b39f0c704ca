/*
 * Pairs of a chosen and a rejected answer: what a line's texts or conversations become, that both stay together in a window, what is
 * left out and what is refused; and the number of a window, by which what was computed of its pairs is found again.
 */
#include "lib_dataset.h"
#include "lib_tiny.h"
#include "spw_chat.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

enum { HERE = SPW_TOKEN_BEGINS, ROW_MAX = 1024 };

static spw_data_options
pair_options(const char *pattern, uint64_t seq_length)
{
    spw_data_options o = dataset_options(pattern);
    o.pairs = true;
    o.documents = SPW_DOCUMENTS_WHOLE;
    o.seq_length = seq_length;
    return o;
}

/* The only window, and how many pairs it has. */
static void
assert_window(const spw_data_options *o, const int32_t *tokens, const int32_t *targets, uint64_t pairs)
{
    int32_t got[ROW_MAX], next[ROW_MAX];
    spw_data *d = dataset_open(o);
    uint64_t with_target = 0;
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 1);
    assert_int_equal(spw_data_pairs(d), pairs);
    dataset_fill(d, SPW_SPLIT_TRAIN, 0, 1, got, next);
    for (uint64_t t = 0; t < o->seq_length; t++)
        with_target += next[t] >= 0;
    assert_true(spw_data_targeted(d) * (double)spw_data_tokens(d) == (double)with_target); /* all are in it */
    for (uint64_t t = 0; t < o->seq_length; t++) {
        if (got[t] != tokens[t] || next[t] != targets[t])
            fail_msg("token %d: %d (%d) with target %d, wanted %d with %d", (int)t, got[t] & ~HERE, got[t] & HERE,
                     next[t], tokens[t], targets[t]);
    }
    spw_data_close(d);
}

/* Texts: a prompt before both, which gives no loss; without one, or with none to speak of, what both begin with gives none. */
static void
test_texts(void **state)
{
    static const char *const lines[] = {
        "{\"prompt\":\"p\",\"chosen\":\"ab\",\"rejected\":\"c\"}\n{\"chosen\":\"xab\",\"rejected\":\"xa\",\"id\":1}\n",
        "{\"prompt\":\"p\",\"chosen\":\"ab\",\"rejected\":\"c\"}\n\n{\"prompt\":null,\"rejected\":\"xa\",\"chosen\":"
        "\"xab\"}",
        "{\"rejected\":\"c\",\"chosen\":\"ab\",\"prompt\":\"p\"}\n{\"prompt\":\"\",\"chosen\":\"xab\",\"rejected\":"
        "\"xa\"}\n"};
    spw_data_options o = pair_options("t.jsonl", 16);
    (void)state;
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        dataset_write_text("t.jsonl", lines[i]);
        for (int again = 0; again < 2; again++) /* made, then found in the cache */
            assert_window(&o,
                          (int32_t[]){'p' | HERE, 'a', 'b', '\n', 'p' | HERE, 'c', '\n', 'x' | HERE, 'a', 'b', '\n',
                                      'x' | HERE, 'a', '\n', 0 | HERE, 0},
                          (int32_t[]){'a', 'b', '\n', -1, 'c', '\n', -1, -1, 'b', '\n', -1, -1, '\n', -1, -1, -1}, 2);
    }
    /* Behind a prompt all of both answers is learned, what they begin with too. */
    dataset_write_text("t.jsonl", "{\"prompt\":\"p\",\"chosen\":\"xab\",\"rejected\":\"xc\"}\n");
    o.seq_length = 9;
    assert_window(&o, (int32_t[]){'p' | HERE, 'x', 'a', 'b', '\n', 'p' | HERE, 'x', 'c', '\n'},
                  (int32_t[]){'x', 'a', 'b', '\n', -1, 'x', 'c', '\n', -1}, 1);
    /* Other fields; the token that ends texts, and those that begin them, before the prompt or before the answer. */
    dataset_write_text("t.jsonl", "{\"q\":\"pq\",\"good\":\"a\",\"bad\":\"b\"}\n{\"good\":\"xy\",\"bad\":\"xz\"}\n");
    o.prompt_field = "q";
    o.chosen_field = "good";
    o.rejected_field = "bad";
    o.end_of_text_set = true;
    o.end_of_text = 3;
    o.begin_of_text = (spw_begin){2, {1, 2}};
    o.seq_length = 22;
    assert_window(&o, (int32_t[]){1 | HERE, 2,        'p', 'q', 'a', 3, 1 | HERE, 2, 'p', 'q', 'b',
                                  3,        1 | HERE, 2,   'x', 'y', 3, 1 | HERE, 2, 'x', 'z', 3},
                  (int32_t[]){-1, -1, -1, 'a', 3, -1, -1, -1, -1, 'b', 3, -1, -1, -1, 'y', 3, -1, -1, -1, 'z', 3, -1},
                  2);
}

/* Answers that are tokens already, behind a prompt of tokens or with one in both. */
static void
test_pairs_of_tokens(void **state)
{
    spw_data_options o = pair_options("t.jsonl", 16);
    (void)state;
    dataset_write_text("t.jsonl", "{\"prompt\":[9],\"chosen\":[1,2,3],\"rejected\":[4,3],\"labels\":[1]}\n"
                                  "{\"chosen\":[8,7,1],\"rejected\":[8,7,2,5]}\n"
                                  "{\"prompt\":[9],\"chosen\":[1],\"rejected\":[1]}\n"
                                  "{\"prompt\":[9,9,9,9,9,9,9,9],\"chosen\":[1],\"rejected\":[2]}\n");
    o.end_of_text_set = true;
    o.end_of_text = 3;
    assert_window(&o, (int32_t[]){9 | HERE, 1, 2, 3, 9 | HERE, 4, 3, 8 | HERE, 7, 1, 8 | HERE, 7, 2, 5, 3 | HERE, 3},
                  (int32_t[]){1, 2, 3, -1, 4, 3, -1, -1, 1, -1, -1, 2, 5, -1, -1, -1}, 2);
    dataset_write_text("t.jsonl", "{\"chosen\":[1,2],\"rejected\":\"a\"}\n");
    dataset_refuse(&o, SPW_ECORRUPT, "field \"rejected\" is not a list of tokens", NULL);
    dataset_write_text("t.jsonl", "{\"prompt\":\"a\",\"chosen\":[1,2],\"rejected\":[3]}\n");
    dataset_refuse(&o, SPW_ECORRUPT, "field \"prompt\" is not a list of tokens", NULL);
    dataset_write_text("t.jsonl", "{\"chosen\":\"a\",\"rejected\":[3]}\n");
    dataset_refuse(&o, SPW_ECORRUPT, "field \"rejected\" is a list of tokens, and field \"chosen\" is text", NULL);
}

/* An encoder sees prompt and answer apart, as of other lines: their tokens do not merge. */
static spw_status
encode_whole(void *ctx, const char *text, uint64_t bytes, bool rest, int32_t *tokens, uint64_t token_max,
             uint64_t *token_count, spw_error *err)
{
    (void)ctx, (void)rest, (void)err;
    *token_count = bytes > 0;
    if (token_max > 0 && bytes > 0)
        tokens[0] = 1000 + (int32_t)bytes * 100 + text[0];
    return SPW_OK;
}

static void
test_encoded_texts(void **state)
{
    spw_data_options o = pair_options("t.jsonl", 4);
    (void)state;
    dataset_write_text("t.jsonl", "{\"prompt\":\"pp\",\"chosen\":\"abc\",\"rejected\":\"d\"}\n");
    o.encode = encode_whole;
    o.encode_key = 5;
    assert_window(&o, (int32_t[]){(1200 + 'p') | HERE, 1300 + 'a', (1200 + 'p') | HERE, 1100 + 'd'},
                  (int32_t[]){1300 + 'a', -1, 1100 + 'd', -1}, 1);
    o.vocab = 1300 + 'a';
    dataset_refuse(&o, SPW_ECORRUPT, "t.jsonl: line 1 (byte 0): token 1397", NULL);
}

/* ---------------------------------------------------------------- many pairs */

/* Pair i: letters of a name, the chosen ones large; some are too long, some have equal answers. */
enum { PAIRS = 400, WINDOW = 40 };

static uint64_t
answer_length(uint64_t i, int which)
{
    return i % 13 == 12 ? 17 + (uint64_t)which * 2 : 3 + (i * (5 + (uint64_t)which * 6) + i / 7) % 9;
}

static bool
is_equal(uint64_t i)
{
    return i % 17 == 16;
}

static void
write_pairs(const char *name, uint64_t first, uint64_t count)
{
    static char text[PAIRS * 150];
    size_t at = 0;
    for (uint64_t i = first; i < first + count; i++) {
        at += (size_t)snprintf(text + at, sizeof text - at, "{\"prompt\":\"%c%c\",\"chosen\":\"", (int)('0' + i % 10),
                               (int)('0' + i / 10 % 10));
        for (int which = 0; which < 2; which++) {
            for (uint64_t k = 0; k < answer_length(i, which && !is_equal(i)); k++)
                text[at++] = (char)((which && !is_equal(i) ? 'a' : 'A') + (k == 0 ? i / 100 : i % 23));
            at += (size_t)snprintf(text + at, sizeof text - at, which ? "\"}\n" : "\",\"rejected\":\"");
        }
    }
    text[at] = '\0';
    dataset_write_text(name, text);
}

/* Whether pair i lies at these tokens, first chosen, then rejected, with its targets; *t goes behind it. */
static bool
takes_pair(uint64_t i, const int32_t *tokens, const int32_t *targets, uint64_t *t)
{
    uint64_t at = *t;
    for (int which = 0; which < 2; which++) {
        uint64_t n = 3 + answer_length(i, which);
        if (at + n > WINDOW)
            return false;
        for (uint64_t k = 0; k < n; k++, at++) {
            int32_t letter = (which ? 'a' : 'A') + (int32_t)(k == 2 ? i / 100 : i % 23);
            int32_t want = k == 0       ? ('0' + (int32_t)(i % 10)) | HERE
                           : k == 1     ? '0' + (int32_t)(i / 10 % 10)
                           : k + 1 == n ? '\n'
                                        : letter;
            if (tokens[at] != want)
                return false;
            assert_int_equal(targets[at], k == 0 || k + 1 == n ? -1 : tokens[at + 1]);
        }
    }
    *t = at;
    return true;
}

/* Windows are pairs one behind the other and padding without targets; every pair that fits is there once, no other is. */
static void
test_many(void **state)
{
    spw_data_options o = pair_options("m.jsonl", WINDOW);
    uint64_t seen[PAIRS] = {0}, kept = 0, left_out = 0, several = 0, cut;
    spw_data *d;
    (void)state;
    write_pairs("m.jsonl", 0, PAIRS);
    for (uint64_t i = 0; i < PAIRS; i++) {
        uint64_t both = 6 + answer_length(i, 0) + answer_length(i, 1);
        bool out = is_equal(i) || both > WINDOW;
        left_out += out;
        kept += !out;
        seen[i] = out;
    }
    d = dataset_open(&o);
    assert_int_equal(spw_data_pairs(d), kept);
    assert_int_equal(spw_data_untargeted(d, &cut), 0);
    assert_int_equal(cut, left_out);
    assert_true(left_out > 40);
    for (uint64_t p = 0; p < spw_data_sequences(d, SPW_SPLIT_TRAIN); p++) {
        int32_t tokens[WINDOW], targets[WINDOW];
        uint64_t pairs = 0;
        dataset_fill(d, SPW_SPLIT_TRAIN, p, 1, tokens, targets);
        for (uint64_t t = 0, i = 0; t < WINDOW; pairs++, i = 0) {
            if ((tokens[t] & ~HERE) == 0) { /* padding */
                assert_true(pairs > 0 && tokens[t] == HERE);
                for (uint64_t k = t; k < WINDOW; k++)
                    assert_true(targets[k] == -1 && (k == t || tokens[k] == 0));
                break;
            }
            while (i < PAIRS && (seen[i] > 0 || !takes_pair(i, tokens, targets, &t)))
                i++;
            if (i == PAIRS)
                fail_msg("window %d: no pair is at token %d", (int)p, (int)t);
            seen[i]++;
        }
        several += pairs > 1;
    }
    assert_true(several > 20);
    for (uint64_t i = 0; i < PAIRS; i++)
        assert_int_equal(seen[i], 1);
    spw_data_close(d);
}

/* A pair of as many tokens as a window has is in; one token more and it is out, whole. */
static void
test_length(void **state)
{
    spw_data_options o = pair_options("l.jsonl", 9);
    uint64_t cut;
    spw_data *d;
    (void)state;
    dataset_write_text("l.jsonl", "{\"prompt\":\"p\",\"chosen\":\"abc\",\"rejected\":\"de\"}\n"
                                  "{\"prompt\":\"p\",\"chosen\":\"a\",\"rejected\":\"b\"}\n");
    d = dataset_open(&o);
    assert_int_equal(spw_data_pairs(d), 2);
    (void)spw_data_untargeted(d, &cut);
    assert_int_equal(cut, 0);
    spw_data_close(d);
    o.seq_length = 8;
    for (int again = 0; again < 2; again++) {
        assert_window(&o, (int32_t[]){'p' | HERE, 'a', '\n', 'p' | HERE, 'b', '\n', HERE, 0},
                      (int32_t[]){'a', '\n', -1, 'b', '\n', -1, -1, -1}, 1);
        d = dataset_open(&o);
        (void)spw_data_untargeted(d, &cut);
        assert_int_equal(cut, 1);
        spw_data_close(d);
    }
    o.seq_length = 5;
    dataset_refuse(&o, SPW_EINVAL, "l.jsonl: no pair of answers is left", "2 were left out", "5 tokens", NULL);
}

/* Equal answers, with a prompt and without; an answer that has nothing behind what both begin with, or nothing at all. */
static void
test_nothing_to_learn(void **state)
{
    spw_data_options o = pair_options("e.jsonl", 20);
    uint64_t cut;
    spw_data *d;
    (void)state;
    dataset_write_text("e.jsonl", "{\"prompt\":\"p\",\"chosen\":\"ab\",\"rejected\":\"ab\"}\n"
                                  "{\"chosen\":\"ab\",\"rejected\":\"ab\"}\n{\"chosen\":\"\",\"rejected\":\"ab\"}\n"
                                  "{\"prompt\":\"\",\"chosen\":\"ab\",\"rejected\":\"\"}\n");
    dataset_refuse(&o, SPW_EINVAL, "e.jsonl: no pair of answers is left", "4 were left out", NULL);
    dataset_write_text("e.jsonl", "{\"chosen\":\"ab\",\"rejected\":\"abc\"}\n{\"chosen\":\"a\",\"rejected\":\"bc\"}\n"
                                  "{\"prompt\":\"p\",\"chosen\":\"\",\"rejected\":\"b\"}\n");
    d = dataset_open(&o); /* with an end that tells the first two apart */
    assert_int_equal(spw_data_pairs(d), 3);
    spw_data_close(d);
    o.encode = encode_whole; /* of one token and no end: the first token is nobody's target, and the prompt no answer */
    o.encode_key = 5;
    dataset_refuse(&o, SPW_EINVAL, "3 were left out", NULL);
    dataset_write_text("e.jsonl", "\n");
    dataset_refuse(&o, SPW_EINVAL, "no pair of answers is left", "0 were left out", NULL);
    o.encode = NULL;
    dataset_write_text("e.jsonl", "{\"chosen\":\"a\",\"rejected\":\"a\"}\n{\"chosen\":\"a\",\"rejected\":\"b\"}\n");
    d = dataset_open(&o);
    assert_int_equal(spw_data_pairs(d), 1);
    (void)spw_data_untargeted(d, &cut);
    assert_int_equal(cut, 1);
    spw_data_close(d);
}

/* ---------------------------------------------------------------- conversations */

/* What a document is made of, by hand: texts, and whether they are learned. NULL ends it. */
typedef struct piece {
    const char *text;
    bool loss;
} piece;

/* Appends a document: the ids of its pieces, which are those of the whole, and at each token the next one's target. */
static void
append(const spw_tokenizer *t, const piece *pieces, spw_tokens *tokens, spw_tokens *targets)
{
    spw_error err = {0};
    char whole[1000] = "";
    spw_tokens ids = {0};
    uint64_t first = tokens->count;
    for (; pieces->text != NULL; pieces++) {
        uint64_t before = tokens->count;
        strcat(whole, pieces->text);
        assert_int_equal(spw_tokenizer_encode(t, pieces->text, strlen(pieces->text), true, tokens, &err), SPW_OK);
        for (uint64_t i = before; i < tokens->count; i++) {
            if (i > first)
                targets->ids[i - 1] = pieces->loss ? tokens->ids[i] : -1;
            assert_int_equal(spw_tokens_push(targets, -1, &err), SPW_OK);
        }
    }
    assert_int_equal(spw_tokenizer_encode(t, whole, strlen(whole), true, &ids, &err), SPW_OK);
    assert_int_equal(ids.count, tokens->count - first);
    assert_memory_equal(ids.ids, tokens->ids + first, ids.count * sizeof *ids.ids);
    tokens->ids[first] |= HERE;
    spw_tokens_free(&ids);
}

#define IM(role, text) "<|im_start|>" role "\n" text "<|im_end|>\n"
#define GIVEN(text)                                                                                                    \
    {                                                                                                                  \
        text, false                                                                                                    \
    }
#define ANSWER(text)                                                                                                   \
    {"<|im_start|>assistant\n", false}, {text "<|im_end|>", true},                                                     \
    {                                                                                                                  \
        "\n", false                                                                                                    \
    }
#define END                                                                                                            \
    {                                                                                                                  \
        NULL, false                                                                                                    \
    }

#define SAYS(role, text) "{\"role\":\"" role "\",\"content\":\"" text "\"}"
#define S(text)          SAYS("system", text)
#define U(text)          SAYS("user", text)
#define A(text)          SAYS("assistant", text)
#define LIST(name, ...)  "\"" name "\":[" __VA_ARGS__ "]"
#define PROMPT(...)      LIST("prompt", __VA_ARGS__) ","
#define CHOSEN(...)      LIST("chosen", __VA_ARGS__) ","
#define REJECTED(...)    LIST("rejected", __VA_ARGS__)

#define CALL(name)                                                                                                     \
    "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"function\":{\"name\":\"" name "\",\"arguments\":{}}}" \
    "]}"
#define CALLED(name)       "<tool_call>\n{\"name\": \"" name "\", \"arguments\": {}}\n</tool_call>"
#define RESULT             SAYS("tool", "5")
#define ANSWERED           "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
#define THINKS(text, said) "{\"role\":\"assistant\",\"content\":\"" said "\",\"reasoning_content\":\"" text "\"}"
#define TOOLS(list)                                                                                                    \
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "  \
    "signatures within <tools></tools> XML tags:\n<tools>\n" list                                                      \
    "\n</tools>\n\nFor each function call, return a json "                                                             \
    "object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"                  \
    "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"

typedef struct talk_case {
    const char *line;
    piece chosen[12], rejected[12];
} talk_case;

static const talk_case talks[] = {
    /* an explicit prompt */
    {"{" PROMPT(U("Hi you")) CHOSEN(A("yes")) REJECTED(A("no")) "}",
     {GIVEN(IM("user", "Hi you")), ANSWER("yes"), END},
     {GIVEN(IM("user", "Hi you")), ANSWER("no"), END}},
    /* whose earlier answers are no part of what is learned; several turns behind it are */
    {"{" PROMPT(U("a") "," A("b") "," U("c")) CHOSEN(A("d") "," U("e") "," A("f")) REJECTED(A("g")) "}",
     {GIVEN(IM("user", "a") IM("assistant", "b") IM("user", "c")), ANSWER("d"), GIVEN(IM("user", "e")), ANSWER("f"),
      END},
     {GIVEN(IM("user", "a") IM("assistant", "b") IM("user", "c")), ANSWER("g"), END}},
    /* an implicit one, which the line has once more as text; the older names of members */
    {"{\"prompt\":\"other\"," CHOSEN(U("Hi") "," A("yes"))
         REJECTED("{\"from\":\"user\",\"value\":\"Hi\"},{\"from\":\"assistant\",\"value\":\"no\"}") "}",
     {GIVEN(IM("user", "Hi")), ANSWER("yes"), END},
     {GIVEN(IM("user", "Hi")), ANSWER("no"), END}},
    /* which goes up to where they differ, answers too, and whatever else a message has */
    {"{" CHOSEN(S("s") "," U("a") ",{\"role\":\"assistant\",\"content\":\"b\",\"id\":1}," U("c") "," A("d"))
         REJECTED(S("s") "," U("a") ",{\"id\":2,\"role\":\"assistant\",\"content\":\"b\"}," U("e") "," A("f")) "}",
     {GIVEN(IM("system", "s") IM("user", "a") IM("assistant", "b") IM("user", "c")), ANSWER("d"), END},
     {GIVEN(IM("system", "s") IM("user", "a") IM("assistant", "b") IM("user", "e")), ANSWER("f"), END}},
    /* and not into the message that is another: what answers begin with is learned */
    {"{" CHOSEN(U("a") "," A("yes d")) REJECTED(U("a") "," A("yes f")) "}",
     {GIVEN(IM("user", "a")), ANSWER("yes d"), END},
     {GIVEN(IM("user", "a")), ANSWER("yes f"), END}},
    /* answers alone, and the prompt is text */
    {"{\"prompt\":\"Hi you\"," CHOSEN(A("yes")) REJECTED(A("no")) "}",
     {GIVEN(IM("user", "Hi you")), ANSWER("yes"), END},
     {GIVEN(IM("user", "Hi you")), ANSWER("no"), END}},
    /* answers alone without any, for which the layout has a form; and the line's system */
    {"{\"system\":\"s\",\"prompt\":[]," CHOSEN(A("yes")) REJECTED(A("no")) "}",
     {GIVEN(IM("system", "s")), ANSWER("yes"), END},
     {GIVEN(IM("system", "s")), ANSWER("no"), END}},
    /* the line's system, which the prompt says too; a turn that is not to be learned */
    {"{\"system\":\"s\"," PROMPT(S("s") "," U("a"))
         CHOSEN(A("b") "," U("c") ",{\"role\":\"assistant\",\"content\":\"d\",\"weight\":0}") REJECTED(A("e")) "}",
     {GIVEN(IM("system", "s") IM("user", "a")), ANSWER("b"), GIVEN(IM("user", "c") IM("assistant", "d")), END},
     {GIVEN(IM("system", "s") IM("user", "a")), ANSWER("e"), END}},
    /* calls are part of a message: what differs in one is learned, and what both have is not; the line's tools are each answer's */
    {"{" CHOSEN(U("a") "," CALL("f") "," RESULT "," CALL("g"))
         REJECTED(U("a") "," CALL("f") "," RESULT "," A("no")) "}",
     {GIVEN(IM("user", "a") IM("assistant", CALLED("f")) ANSWERED), ANSWER(CALLED("g")), END},
     {GIVEN(IM("user", "a") IM("assistant", CALLED("f")) ANSWERED), ANSWER("no"), END}},
    {"{\"tools\":[{\"a\":1}]," PROMPT(U("a")) CHOSEN(CALL("f")) REJECTED(CALL("g")) "}",
     {GIVEN(IM("system", TOOLS("{\"a\": 1}")) IM("user", "a")), ANSWER(CALLED("f")), END},
     {GIVEN(IM("system", TOOLS("{\"a\": 1}")) IM("user", "a")), ANSWER(CALLED("g")), END}},
    /* so is reasoning, which is that of the turns behind the last question, the prompt's and the answer's */
    {"{" CHOSEN(U("a") "," THINKS("x", "b") "," U("c") "," THINKS("y", "d"))
         REJECTED(U("a") "," THINKS("x", "b") "," U("c") "," THINKS("z", "d")) "}",
     {GIVEN(IM("user", "a") IM("assistant", "b") IM("user", "c")), ANSWER("<think>\ny\n</think>\n\nd"), END},
     {GIVEN(IM("user", "a") IM("assistant", "b") IM("user", "c")), ANSWER("<think>\nz\n</think>\n\nd"), END}},
    /* texts stay texts */
    {"{\"prompt\":\"Hi\",\"chosen\":\" yes\",\"rejected\":\" no\"}",
     {GIVEN("Hi"), {" yes<|endoftext|>", true}, END},
     {GIVEN("Hi"), {" no<|endoftext|>", true}, END}},
};

typedef struct rig {
    spw_tokenizer *t;
    spw_chat *c;
    spw_data_options o;
} rig;

static void
open_rig(rig *r, const char *name, const char *layout)
{
    char path[100];
    spw_error err = {0};
    snprintf(path, sizeof path, "tests/vectors/tok_%s.json", name);
    if (spw_tokenizer_open(&r->t, path, &err) != SPW_OK || spw_chat_open(&r->c, layout, r->t, &err) != SPW_OK)
        fail_msg("%s", err.message);
    r->o = pair_options("c.jsonl", ROW_MAX);
    r->o.encode = spw_tokenizer_encode_data;
    r->o.encode_ctx = r->t;
    r->o.encode_key = spw_tokenizer_key(r->t);
    r->o.end_of_text = spw_tokenizer_end(r->t);
    r->o.end_of_text_set = true;
    r->o.chat = r->c;
}

static void
close_rig(rig *r)
{
    spw_chat_close(r->c);
    spw_tokenizer_close(r->t);
}

/* Every form of conversation, against what its layout makes of it by hand. */
static void
test_conversations(void **state)
{
    rig r;
    (void)state;
    open_rig(&r, "qwen2", "chatml");
    for (size_t i = 0; i < sizeof talks / sizeof talks[0]; i++) {
        spw_tokens tokens = {0}, targets = {0};
        append(r.t, talks[i].chosen, &tokens, &targets);
        append(r.t, talks[i].rejected, &tokens, &targets);
        dataset_write_text("c.jsonl", talks[i].line);
        r.o.seq_length = tokens.count;
        print_message("%s\n", talks[i].line);
        assert_window(&r.o, tokens.ids, targets.ids, 1);
        spw_tokens_free(&tokens);
        spw_tokens_free(&targets);
    }
    close_rig(&r);
}

/* Conversations that are the same, or of which one has no answer to learn, are left out; texts and conversations may be mixed. */
static void
test_conversations_left_out(void **state)
{
    static const char text[] = "{" PROMPT(U("a")) CHOSEN(A("b"))
        REJECTED(A("b")) "}\n"
                         "{" CHOSEN(U("a") "," A("b")) REJECTED(U("a") "," A("b") "," U("c") "," A(
                             "d")) "}\n"
                                   "{" CHOSEN(U("a")) REJECTED(
                                       U("a") "," A("b")) "}\n"
                                                          "{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"c\"}\n"
                                                          "{\"prompt\":\"a\"," CHOSEN(A("b")) REJECTED(A("c")) "}\n";
    rig r;
    spw_data *d;
    uint64_t cut;
    (void)state;
    open_rig(&r, "qwen2", "chatml");
    dataset_write_text("c.jsonl", text);
    d = dataset_open(&r.o);
    assert_int_equal(spw_data_pairs(d), 2);
    (void)spw_data_untargeted(d, &cut);
    assert_int_equal(cut, 3);
    spw_data_close(d);
    close_rig(&r);
}

/* ---------------------------------------------------------------- refused */

/* Lines that hold no pair, by file, line and field. */
static void
test_wrong_lines(void **state)
{
    static const struct {
        const char *line, *want, *also;
        bool chat;
        spw_status st;
    } cases[] = {
        {"{\"chosen\":\"a\"}", "no field \"rejected\"", "it has \"chosen\"", false, SPW_ECORRUPT},
        {"{\"rejected\":\"a\",\"text\":\"b\"}", "no field \"chosen\"", "\"rejected\", \"text\"", true, SPW_ECORRUPT},
        {"{\"chosen\":5,\"rejected\":\"a\"}", "\"chosen\" is neither text nor a list of messages", "", false,
         SPW_ECORRUPT},
        {"{\"chosen\":\"a\",\"rejected\":null}", "\"rejected\" is neither text", "", true, SPW_ECORRUPT},
        {"{\"chosen\":\"a\",\"rejected\":\"b\",\"prompt\":7}", "\"prompt\" is not a string", "", false, SPW_ECORRUPT},
        {"{" PROMPT(U("x")) "\"chosen\":\"a\",\"rejected\":\"b\"}", "\"prompt\" is not a string", "", true,
         SPW_ECORRUPT},
        {"{" CHOSEN(A("x")) REJECTED(A("y")) "}", "\"chosen\" is a list of messages", "data.chat is needed", false,
         SPW_ECONFIG},
        {"{" CHOSEN(A("x")) "\"rejected\":\"y\"}", "\"chosen\" is a list of messages", "\"rejected\" is text", true,
         SPW_ECORRUPT},
        {"{\"chosen\":\"y\",\"rejected\":[]}", "\"rejected\" is a list of messages", "\"chosen\" is text", true,
         SPW_ECORRUPT},
        {"{\"chosen\":[]," REJECTED(U("y")) "}", "\"chosen\" is not a list of messages", "", true, SPW_ECORRUPT},
        {"{\"prompt\":\"x\"," CHOSEN(U("x")) REJECTED(A("y")) "}", "\"rejected\" begins with a turn of the assistant",
         "\"chosen\" does not", true, SPW_ECORRUPT},
        {"{\"prompt\":{}," CHOSEN(A("x")) REJECTED(A("y")) "}", "\"prompt\" is neither text nor a list", "", true,
         SPW_ECORRUPT},
        {"{" CHOSEN(U("x") "," SAYS("bot", "x")) REJECTED(U("y")) "}", "field \"chosen\": message 2", "role \"bot\"",
         true, SPW_ECORRUPT},
        {"{" PROMPT(U("x")) CHOSEN(A("x")) "\"rejected\":[5]}", "\"chosen\" begins with a turn", "", true,
         SPW_ECORRUPT},
        {"{" PROMPT("5") CHOSEN(A("x")) REJECTED(A("y")) "}", "field \"prompt\": message 1", "no \"role\"", true,
         SPW_ECORRUPT},
        {"{" CHOSEN(U("x") "," A("x")) REJECTED(U("x") ",{\"role\":\"assistant\",\"tool_calls\":[1]}") "}",
         "field \"rejected\": message 2", "tool_calls", true, SPW_ECORRUPT},
        {"[]", "not a JSON object", "", true, SPW_ECORRUPT},
    };
    rig r;
    (void)state;
    open_rig(&r, "qwen2", "chatml");
    dataset_write_text("c.jsonl", talks[1].line);
    spw_data_close(dataset_open(&r.o)); /* tokenizer and layout have the memory that they keep */
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[600];
        snprintf(text, sizeof text, "{\"chosen\":\"a\",\"rejected\":\"b\"}\n\n%s\n", cases[i].line);
        dataset_write_text("c.jsonl", text);
        r.o.chat = cases[i].chat ? r.c : NULL;
        print_message("%s\n", cases[i].line);
        dataset_refuse(&r.o, cases[i].st, "c.jsonl: line 3 (byte 31)", cases[i].want, cases[i].also, NULL);
    }
    close_rig(&r);
    open_rig(&r, "mistral", "mistral-v1"); /* turns alternate, over the end of a list too */
    dataset_write_text("c.jsonl", talks[1].line);
    spw_data_close(dataset_open(&r.o));
    dataset_write_text("c.jsonl", "{" PROMPT(U("x")) CHOSEN(U("x")) REJECTED(U("y")) "}\n");
    dataset_refuse(&r.o, SPW_ECORRUPT, "field \"chosen\": message 1", "two turns of the user in a row", NULL);
    dataset_write_text("c.jsonl", "{\"prompt\":\"x\"," CHOSEN(A("x")) REJECTED(A("y") "," A("y")) "}\n");
    dataset_refuse(&r.o, SPW_ECORRUPT, "field \"rejected\": message 2", "two turns of the assistant in a row", NULL);
    close_rig(&r);
}

/* Files that are no JSON lines, before any is tokenised; and documents that windows would cut. */
static void
test_other_files(void **state)
{
    spw_data_options o = pair_options("*", 20);
    (void)state;
    dataset_write_text("a.jsonl", "{\"chosen\":\"ax\",\"rejected\":\"bx\"}\n");
    dataset_write_text("b.txt", "some text that has no pairs in it");
    dataset_refuse(&o, SPW_ECONFIG, "b.txt is read as text", "pairs of answers are JSON lines", NULL);
    dataset_write_llmc("b.txt", 20240520, 1, 100, 0);
    dataset_refuse(&o, SPW_ECONFIG, "b.txt is read as llm.c", "pairs of answers are JSON lines", NULL);
    o = pair_options("a.jsonl", 20);
    spw_data_close(dataset_open(&o));
    for (int k = SPW_DOCUMENTS_PACKED; k < SPW_DOCUMENTS_WHOLE; k++) {
        o.documents = (spw_documents)k;
        dataset_refuse(&o, SPW_EINVAL, "pairs of answers", "data.documents must be whole", NULL);
    }
}

/* Memory that is refused, at every place, of texts and conversations. */
static void
test_no_memory(void **state)
{
    bool through = false;
    rig r;
    (void)state;
    open_rig(&r, "qwen2", "chatml");
    dataset_write_text("c.jsonl", "{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"c\"}\n"
                                  "{\"prompt\":\"a\"," CHOSEN(A("b")) REJECTED(A("c")) "}\n");
    for (unsigned k = 0; !through;
         k++) { /* 0: no failure, and the tokenizer and the layout have the memory that they keep */
        spw_data *d = NULL;
        spw_error err = {0};
        long live = spw_test_live_allocs();
        spw_status st;
        r.o.encode_key = k; /* another cache */
        if (k > 0)
            spw_test_fail_alloc(k);
        st = spw_data_open(&d, &r.o, &err);
        through = k > 0 && !spw_test_fault_fired();
        assert_int_equal(st, k == 0 || through ? SPW_OK : SPW_ENOMEM);
        if (st == SPW_OK)
            assert_int_equal(spw_data_pairs(d), 2);
        spw_data_close(d);
        assert_true(k == 0 || spw_test_live_allocs() == live);
        spw_test_fail_alloc(0);
    }
    close_rig(&r);
}

/* ---------------------------------------------------------------- caches, and resuming */

static spw_status
count_calls(void *ctx, const char *text, uint64_t bytes, bool rest, int32_t *tokens, uint64_t token_max,
            uint64_t *token_count, spw_error *err)
{
    (*(unsigned *)ctx)++;
    (void)rest, (void)err;
    *token_count = bytes;
    for (uint64_t i = 0; i < bytes && bytes <= token_max; i++)
        tokens[i] = text[i];
    return SPW_OK;
}

/* Tokens are made once for each choice of fields, of length, and of pairs or none; the encoder's text tells the fields. */
static void
test_cache(void **state)
{
    unsigned calls = 0;
    char encoders[6][64];
    spw_data_options o = pair_options("k.jsonl", 30), variants[6];
    (void)state;
    dataset_write_text("k.jsonl",
                       "{\"prompt\":\"p\",\"q\":\"q\",\"chosen\":\"abc\",\"rejected\":\"def\",\"text\":\"none\"}\n");
    o.encode = count_calls;
    o.encode_ctx = &calls;
    o.encode_key = 1;
    for (int k = 0; k < 6; k++)
        variants[k] = o;
    variants[1].chosen_field = "text";
    variants[2].rejected_field = "text";
    variants[3].prompt_field = "q";
    variants[4].seq_length = 31;
    variants[5].pairs = false;
    variants[5].seq_length = 4;
    for (int again = 0; again < 2; again++) {
        for (int k = 0; k < 6; k++) {
            spw_data *d;
            calls = 0;
            d = dataset_open(&variants[k]);
            if ((calls > 0) != (again == 0))
                fail_msg("variant %d, opened %d times before: %u calls of the encoder", k, again, calls);
            assert_int_equal(spw_data_pairs(d), k < 5);
            snprintf(encoders[k], sizeof encoders[k], "%s", spw_data_encoder(d));
            spw_data_close(d);
        }
    }
    assert_non_null(strstr(encoders[0], "tokenizer 0000000000000001, pairs "));
    assert_string_equal(encoders[5], "tokenizer 0000000000000001");
    for (int k = 1; k < 6; k++) /* of another length they are the same tokens */
        assert_int_equal(strcmp(encoders[k], encoders[0]) == 0, k == 4);
    variants[0].chosen_field = "chosen"; /* what is meant anyway */
    variants[0].rejected_field = "";
    variants[0].prompt_field = "prompt";
    calls = 0;
    spw_data_close(dataset_open(&variants[0]));
    assert_int_equal(calls, 0);
}

/* With a layout the encoder's text tells of both, within its room; bytes are still bytes. */
static void
test_encoder(void **state)
{
    rig r;
    spw_data *d;
    char with_chat[64];
    (void)state;
    open_rig(&r, "qwen2", "chatml");
    dataset_write_text("c.jsonl", "{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"c\",\"text\":\"c\"}\n");
    d = dataset_open(&r.o);
    snprintf(with_chat, sizeof with_chat, "%s", spw_data_encoder(d));
    assert_int_equal(strlen(with_chat), strlen("tokenizer 0123456789abcdef, chat and pairs 0123456789abcdef"));
    assert_non_null(strstr(with_chat, ", chat and pairs "));
    assert_string_equal(spw_data_chat(d), "chatml");
    spw_data_close(d);
    r.o.rejected_field = "text";
    d = dataset_open(&r.o);
    assert_string_not_equal(spw_data_encoder(d), with_chat);
    spw_data_close(d);
    r.o.encode = NULL;
    r.o.chat = NULL;
    d = dataset_open(&r.o);
    assert_true(strncmp(spw_data_encoder(d), "bytes, pairs ", 13) == 0);
    spw_data_close(d);
    close_rig(&r);
}

/* ---------------------------------------------------------------- numbers of windows */

/* What a window holds, as a checksum. */
static uint64_t
content_of(const spw_data *d, spw_split split, uint64_t position)
{
    int32_t tokens[WINDOW], targets[WINDOW];
    dataset_fill(d, split, position, 1, tokens, targets);
    return spw_checksum_more(spw_checksum_more(1, tokens, sizeof tokens), targets, sizeof targets);
}

/* Draws windows: each has a number in [first, first + count), the same one has the same content, and all are drawn. */
static void
draw(const spw_data *d, spw_split split, uint64_t draws, uint64_t first, uint64_t count, uint64_t *contents)
{
    uint64_t drawn = 0;
    for (uint64_t p = 0; p < draws; p++) {
        uint64_t w = spw_data_window(d, split, p), content = content_of(d, split, p);
        assert_true(w >= first && w < first + count);
        drawn += contents[w] == 0;
        contents[w] = contents[w] == 0 ? content : contents[w];
        assert_true(contents[w] == content);
    }
    assert_int_equal(drawn, count);
}

/* No two windows of the test's data are alike, so that numbers that were mixed up would be found. */
static void
assert_all_differ(const uint64_t *contents, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        for (uint64_t k = 0; k < i; k++)
            assert_true(contents[i] != contents[k]);
    }
}

/* In every epoch each training window's number comes once, in another order; held-out windows have those above. */
static void
test_window_numbers(void **state)
{
    spw_data_options o = pair_options("m*.jsonl", WINDOW);
    uint64_t contents[2 * PAIRS] = {0}, train, held, moved = 0;
    spw_data *d;
    (void)state;
    write_pairs("m1.jsonl", 0, PAIRS / 2);
    write_pairs("m2.jsonl", PAIRS / 2, PAIRS / 2);
    o.validation_split = 0.1;
    o.seed = 3;
    d = dataset_open(&o);
    train = spw_data_sequences(d, SPW_SPLIT_TRAIN);
    held = spw_data_sequences(d, SPW_SPLIT_VALIDATION);
    assert_true(train > 100 && held > 10);
    for (uint64_t epoch = 0; epoch < 3; epoch++) {
        bool seen[2 * PAIRS] = {0};
        for (uint64_t p = 0; p < train; p++) {
            uint64_t w = spw_data_window(d, SPW_SPLIT_TRAIN, epoch * train + p);
            assert_true(w < train && !seen[w]);
            seen[w] = true;
            moved += w != spw_data_window(d, SPW_SPLIT_TRAIN, p);
        }
    }
    assert_true(moved > train);
    draw(d, SPW_SPLIT_TRAIN, 3 * train, 0, train, contents);
    draw(d, SPW_SPLIT_VALIDATION, 2 * held, train, held, contents);
    assert_all_differ(contents, train + held);
    spw_data_close(d);
    o.seed = 4; /* the windows keep their numbers */
    d = dataset_open(&o);
    for (uint64_t p = 0; p < train; p++)
        assert_true(contents[spw_data_window(d, SPW_SPLIT_TRAIN, p)] == content_of(d, SPW_SPLIT_TRAIN, p));
    spw_data_close(d);
    o.validation_split = 0;
    d = dataset_open(&o);
    assert_true(spw_data_window(d, SPW_SPLIT_VALIDATION, 0) == UINT64_MAX);
    spw_data_close(d);
}

/* Two sources by weight: one numbering over both. */
static void
test_window_numbers_of_sources(void **state)
{
    spw_data_source sources[2];
    spw_data_options o = pair_options("", WINDOW);
    uint64_t contents[2 * PAIRS] = {0}, train, held, of_first = 0, before = 0;
    spw_data *d;
    (void)state;
    write_pairs("s1.jsonl", 0, PAIRS / 2);
    write_pairs("s2.jsonl", PAIRS / 2, PAIRS / 2);
    sources[0] = (spw_data_source){dataset_path("s1.jsonl"), 0.75};
    sources[1] = (spw_data_source){dataset_path("s2.jsonl"), 0.25};
    o.pattern_count = 0;
    o.sources = sources;
    for (o.source_count = 1; o.source_count <= 2; o.source_count++) {
        o.validation_split = 0.1;
        d = dataset_open(&o);
        train = spw_data_sequences(d, SPW_SPLIT_TRAIN);
        held = spw_data_sequences(d, SPW_SPLIT_VALIDATION);
        memset(contents, 0, sizeof contents);
        draw(d, SPW_SPLIT_TRAIN, 5 * train, 0, train, contents);
        draw(d, SPW_SPLIT_VALIDATION, 5 * held, train, held, contents);
        assert_all_differ(contents, train + held);
        for (uint64_t p = 0; p < 400 && o.source_count == 2; p++)
            of_first += spw_data_window(d, SPW_SPLIT_TRAIN, p) < before;
        before = train;
        spw_data_close(d);
    }
    assert_int_equal(of_first, 300); /* its windows come first, and have three of four draws */
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        IN_DIR(test_texts),
        IN_DIR(test_pairs_of_tokens),
        IN_DIR(test_encoded_texts),
        IN_DIR(test_many),
        IN_DIR(test_length),
        IN_DIR(test_nothing_to_learn),
        IN_DIR(test_conversations),
        IN_DIR(test_conversations_left_out),
        IN_DIR(test_wrong_lines),
        IN_DIR(test_other_files),
        IN_DIR(test_no_memory),
        IN_DIR(test_cache),
        IN_DIR(test_encoder),
        IN_DIR(test_window_numbers),
        IN_DIR(test_window_numbers_of_sources),
    };
    return cmocka_run_group_tests_name("data_pairs", tests, NULL, NULL);
}
