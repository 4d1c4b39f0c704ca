/*
 * Each format of training data is read: tokens, and the targets that document and prompt masks hide; text that is encoded
 * comes from the cache from then on.
 */
#include "lib_dataset.h"
#include "spw_config.h"
#include "spw_tokenizer.h"
#include <fcntl.h>
#include <glob.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

/* llm.c's streams in both widths, and in one folder with others; windows and positions as for text. */
static void
test_llmc(void **state)
{
    int32_t tokens[T], targets[T];
    spw_data *d;
    (void)state;
    dataset_write_llmc("a.bin", 20240520, 1, 5 * T + 1, 60000);
    dataset_write_llmc("b.bin", 20240801, 7, 5 * T + 1, 100000);
    for (int wide = 0; wide < 2; wide++) {
        spw_data_options o = dataset_options(wide ? "b.bin" : "a.bin");
        int32_t base = wide ? 100000 : 60000;
        bool seen[5] = {0};
        d = dataset_open(&o);
        assert_string_equal(spw_data_formats(d), wide ? "llm.c u32" : "llm.c u16");
        assert_int_equal(spw_data_tokens(d), 5 * T + 1);
        assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 5);
        for (uint64_t p = 0; p < 5; p++) {
            dataset_fill(d, SPW_SPLIT_TRAIN, p, 1, tokens, targets);
            assert_int_equal((tokens[0] - base) % T, 0);
            seen[(tokens[0] - base) / T] = true;
            for (int t = 0; t < T; t++) {
                assert_int_equal(tokens[t], tokens[0] + t);
                assert_int_equal(targets[t], tokens[0] + t + 1);
            }
        }
        assert_true(seen[0] && seen[1] && seen[2] && seen[3] && seen[4]);
        spw_data_close(d);
    }
    dataset_write_windows("c.txt", 7 * T, 0);
    {
        spw_data_options o = dataset_options("*.[bt]*");
        d = dataset_open(&o);
        assert_string_equal(spw_data_formats(d), "1 llm.c u16, 1 llm.c u32, 1 text");
        assert_int_equal(spw_data_file_count(d), 3);
        assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 5 + 5 + 6);
        spw_data_close(d);
        o = dataset_options("a.bin");
        o.format = SPW_DATA_TEXT; /* bytes on request */
        d = dataset_open(&o);
        assert_int_equal(spw_data_tokens(d), 1024 + 2 * (5 * T + 1));
        spw_data_close(d);
    }
}

/* llmq's streams, with a bit of loss for each token too; of a window that is longer than is read at once. */
static void
test_llmq(void **state)
{
    enum { LONG = 70000 };
    int32_t *tokens = calloc(LONG, sizeof *tokens), *targets = calloc(LONG, sizeof *targets);
    (void)state;
    assert_true(tokens != NULL && targets != NULL);
    for (int run = 0; run < 4; run++) {
        bool bits = run % 2 == 1;
        spw_data_options o = dataset_options("a.bin");
        spw_data *d;
        dataset_write_llmq("a.bin", (uint64_t)run / 2 + 1, 2 * LONG + 3, 1000, bits);
        o.seq_length = LONG;
        d = dataset_open(&o);
        assert_string_equal(spw_data_formats(d), "llmq i32");
        assert_int_equal(spw_data_tokens(d), 2 * LONG + 3);
        assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 2);
        assert_true(spw_data_targeted(d) == (bits ? (double)((2 * LONG + 3) / 3 * 2 + 1) / (2 * LONG + 3) : 1));
        for (uint64_t p = 0; p < 2; p++) {
            dataset_fill(d, SPW_SPLIT_TRAIN, p, 1, tokens, targets);
            assert_int_equal((tokens[0] - 1000) % LONG, 0);
            for (int t = 0; t < LONG; t++) {
                int32_t next = tokens[0] + t + 1;
                assert_int_equal(tokens[t], tokens[0] + t);
                assert_int_equal(targets[t], bits && (tokens[t] - 1000) % 3 == 0 ? -1 : next);
            }
        }
        spw_data_close(d);
    }
    free(tokens);
    free(targets);
}

/* Of many bits a sample says what share has a target; of none that share is not 0, which would be all. */
static void
test_llmq_share(void **state)
{
    spw_data_options o = dataset_options("a.bin");
    spw_data *d;
    FILE *f;
    (void)state;
    dataset_write_llmq("a.bin", 2, 3000000, 0, true);
    d = dataset_open(&o);
    assert_true(fabs(spw_data_targeted(d) - 2.0 / 3) < 1e-4);
    spw_data_close(d);
    f = fopen(dataset_path("a.bin"), "r+b");
    assert_non_null(f);
    fseek(f, 1024 + 3000000 * 4, SEEK_SET);
    for (int i = 0; i < 3000000 / 8; i++)
        fputc(0, f);
    fclose(f);
    d = dataset_open(&o);
    assert_true(spw_data_targeted(d) > 0 && spw_data_targeted(d) < 1e-6);
    spw_data_close(d);
}

/* A name with a glob's characters is that file where there is one, and a glob where there is none. */
static void
test_names_like_globs(void **state)
{
    static const char *const names[] = {"br[a]/c.txt", "w*.txt", "q?.txt"};
    spw_data_options o;
    spw_data *d;
    (void)state;
    assert_int_equal(mkdir(dataset_path("br[a]"), 0700), 0);
    dataset_write_windows("word.txt", 5 * T, 0);
    dataset_write_windows("qa.txt", 5 * T, 0);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        o = dataset_options(names[i]);
        dataset_write_windows(names[i], 3 * T, 0);
        d = dataset_open(&o);
        assert_int_equal(spw_data_tokens(d), 3 * T);
        spw_data_close(d);
    }
    assert_int_equal(unlink(dataset_path("w*.txt")), 0);
    o = dataset_options("w*.txt");
    d = dataset_open(&o);
    assert_int_equal(spw_data_tokens(d), 5 * T);
    spw_data_close(d);
}

/* A window of T + 1 tokens that is many blocks long. */
static void
test_long_window(void **state)
{
    enum { LONG = 20000 };
    spw_data_options o = dataset_options("a.bin");
    int32_t *tokens = malloc(2 * LONG * sizeof *tokens), *targets = tokens + LONG;
    spw_data *d;
    (void)state;
    dataset_write_llmc("a.bin", 20240801, 7, 2 * LONG + 1, 5);
    o.seq_length = LONG;
    d = dataset_open(&o);
    dataset_fill(d, SPW_SPLIT_TRAIN, 1, 1, tokens, targets);
    for (int t = 0; t < LONG; t++) {
        assert_int_equal(tokens[t], tokens[0] + t);
        assert_int_equal(targets[t], tokens[0] + t + 1);
    }
    spw_data_close(d);
    free(tokens);
}

/* Megatron's datasets in every type, by each of their names; negative tokens and floats are no tokens. */
static void
test_megatron(void **state)
{
    static const struct {
        int code, width;
        uint64_t base;
        const char *name;
    } types[] = {{1, 1, 100, "megatron u8"},     {2, 1, 0, "megatron i8"},       {3, 2, 30000, "megatron i16"},
                 {4, 4, 100000, "megatron i32"}, {5, 8, 100000, "megatron i64"}, {8, 2, 60000, "megatron u16"}};
    static const uint32_t lengths[] = {12, 0, 20, 19};
    static const uint64_t documents[] = {0, 2, 2, 4};
    static const char *const names[] = {"set", "set.bin", "set.idx", "set.*"};
    int32_t tokens[T], targets[T];
    (void)state;
    for (size_t k = 0; k < sizeof types / sizeof types[0]; k++) {
        dataset_write_megatron("set", types[k].code, types[k].width, types[k].base, lengths, 4, documents, 4);
        for (int name = 0; name < 4; name++) {
            spw_data_options o = dataset_options(names[name]);
            spw_data *d = dataset_open(&o);
            uint64_t sum = 0;
            assert_string_equal(spw_data_formats(d), types[k].name);
            assert_int_equal(spw_data_file_count(d), 1);
            assert_int_equal(spw_data_tokens(d), 51);
            assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 5);
            for (uint64_t p = 0; p < 5; p++) {
                dataset_fill(d, SPW_SPLIT_TRAIN, p, 1, tokens, targets);
                sum += (uint64_t)tokens[0] - types[k].base;
                assert_int_equal(targets[T - 1], tokens[0] + T);
            }
            assert_int_equal(sum, 0 + 10 + 20 + 30 + 40);
            spw_data_close(d);
        }
    }
    dataset_write_megatron("set", 4, 4, (uint64_t)-20, lengths, 4, documents, 4);
    {
        spw_data_options o = dataset_options("set");
        spw_error err = {0};
        spw_data *d = dataset_open(&o);
        spw_status st = SPW_OK;
        for (uint64_t p = 0; p < 5 && st == SPW_OK; p++)
            st = spw_data_fill(d, SPW_SPLIT_TRAIN, p, 1, tokens, targets, &err);
        assert_int_equal(st, SPW_ECORRUPT);
        assert_non_null(strstr(err.message, "set.bin: token -"));
        spw_data_close(d);
    }
}

/* An encoder for tests: a word, with the space before it, is the token 1000 + its length; a newline is 999. */
static spw_status
encode_words(void *ctx, const char *text, uint64_t bytes, bool rest, int32_t *tokens, uint64_t max, uint64_t *count,
             spw_error *err)
{
    unsigned *calls = ctx;
    (void)rest;
    *count = 0;
    (*calls)++;
    for (uint64_t i = 0, begin = 0; i < bytes; i++) {
        bool ends = i + 1 == bytes || text[i + 1] == ' ' || text[i + 1] == '\n' || text[i] == '\n';
        if (text[i] == '!')
            return SPW_RAISE(err, SPW_ECORRUPT, "no word for %c", text[i]);
        if (!ends)
            continue;
        if (*count < max)
            tokens[*count] = text[i] == '\n' ? 999 : 1000 + (int32_t)(i + 1 - begin);
        ++*count;
        begin = i + 1;
    }
    return SPW_OK;
}

/* Reads all windows of one source in file order, as one stream of tokens and of targets. */
static uint64_t
stream(const spw_data_options *options, int32_t *tokens, int32_t *targets, uint64_t max)
{
    spw_data_options o = *options;
    spw_data *d;
    uint64_t n;
    o.seq_length =
        1; /* windows of one token: each token but the last is a sequence, and held out they keep their order */
    o.validation_split = 0.999999;
    d = dataset_open(&o);
    n = spw_data_sequences(d, SPW_SPLIT_VALIDATION);
    assert_true(n < max);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 1);
    dataset_fill(d, SPW_SPLIT_TRAIN, 0, 1, tokens, targets);
    dataset_fill(d, SPW_SPLIT_VALIDATION, 0, n, tokens + 1, targets + 1);
    spw_data_close(d);
    return n + 1;
}

static void
assert_stream(const spw_data_options *o, const int32_t *tokens, const int32_t *targets, uint64_t n)
{
    static int32_t got[4096], next[4096];
    assert_int_equal(stream(o, got, next, 4096), n);
    for (uint64_t i = 0; i < n; i++) {
        if (got[i] != tokens[i] || next[i] != targets[i])
            fail_msg("token %llu: %d -> %d, wanted %d -> %d", (unsigned long long)i, got[i], next[i], tokens[i],
                     targets[i]);
    }
}

/* JSON lines: bytes of the text, a newline after each; escapes, blank lines, CRLF and a last line without an end. Lines
 * are the same as the text file they hold. */
static void
test_jsonl(void **state)
{
    static const char text[] = "a\xc3\xa9\"b\nsecond\tline\nlast\n";
    spw_data_options o = dataset_options("a.jsonl");
    int32_t tokens[64], targets[64];
    spw_data *d;
    (void)state;
    dataset_write_text("a.jsonl", "{\"id\": 1, \"text\": \"a\\u00e9\\\"b\"}\n\n  {\"text\":\"second\\tline\"}\r\n "
                                  "\t\r\n{\"text\": \"\", \"id\": 123456789012345678901234567890}\n"
                                  "{\"text\": \"last\"}");
    for (size_t i = 0; i + 1 < sizeof text - 1; i++) {
        tokens[i] = (unsigned char)text[i];
        targets[i] = (unsigned char)text[i + 1];
    }
    for (int again = 0; again < 2; again++) /* made, then found in the cache */
        assert_stream(&o, tokens, targets, sizeof text - 2);
    d = dataset_open(&o);
    assert_string_equal(spw_data_formats(d), "jsonl");
    spw_data_close(d);
    o.text_field = "content";
    dataset_refuse(&o, SPW_ECORRUPT, "a.jsonl: line 1 (byte 0)", "\"content\"", "\"id\", \"text\"", NULL);
    o.text_field = "id";
    dataset_refuse(&o, SPW_ECORRUPT, "field \"id\" is not a string", NULL);
}

/*
 * Lines that hold tokens in place of text are documents as they are, whatever the encoder puts around texts: with labels, of which those below 0
 * are without loss, and without; behind a prompt of tokens; as whole documents too. The share with a target is known.
 */
static void
test_lines_of_tokens(void **state)
{
    static const int32_t tokens[] = {5, 6, 7, 8, 1000, 2, 0}, targets[] = {6, -1, -1, 1000, 2, 0, 3};
    spw_data_options o = dataset_options("t.jsonl");
    spw_data *d;
    unsigned calls = 0;
    (void)state;
    dataset_write_text(
        "t.jsonl",
        "\n  \r\n{\"input_ids\": [5, 6, 7], \"labels\": [-100, 6, -1], \"text\": \"no\", \"attention_mask\": "
        "[1, 1, 1]}\n{\"labels\": null, \"input_ids\": []}\n"
        "{\"labels\":[-100,1000,2],\"input_ids\":[8,1000,2]}\n{\"input_ids\":[0,3]}");
    o.text_field = "input_ids";
    o.encode = encode_words; /* not asked, nor are its ends */
    o.encode_ctx = &calls;
    o.encode_key = 1;
    o.end_of_text_set = true;
    o.end_of_text = 9;
    o.begin_of_text = (spw_begin){1, {4}};
    for (int again = 0; again < 2; again++)
        assert_stream(&o, tokens, targets, 7);
    assert_int_equal(calls, 0);
    o.seq_length = 7;
    d = dataset_open(&o);
    assert_string_equal(spw_data_encoder(d), "none");
    assert_true(fabs(spw_data_targeted(d) - 5.0 / 8) < 1e-9);
    spw_data_close(d);
    o.labels_field = "others"; /* no line has it */
    assert_stream(&o, tokens, (int32_t[]){6, 7, 8, 1000, 2, 0, 3}, 7);
    o.labels_field = "";
    o.documents = SPW_DOCUMENTS_WHOLE;
    o.seq_length = 4;
    o.validation_split = 0;
    d = dataset_open(&o);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 3);
    for (uint64_t p = 0; p < 3; p++) { /* each by itself, with what fills it */
        int32_t got[4], next[4];
        dataset_fill(d, SPW_SPLIT_TRAIN, p, 1, got, next);
        if ((got[0] & ~SPW_TOKEN_BEGINS) == 5)
            assert_true(next[0] == 6 && next[1] == -1 && next[2] == -1 && next[3] == -1);
        else if ((got[0] & ~SPW_TOKEN_BEGINS) == 8)
            assert_true(next[0] == 1000 && next[1] == 2 && next[2] == -1 && next[3] == -1);
        else
            assert_true((got[0] & ~SPW_TOKEN_BEGINS) == 0 && next[0] == 3 && next[1] == -1 && next[2] == -1);
    }
    spw_data_close(d);
    o.documents = SPW_DOCUMENTS_PACKED;
    dataset_write_text("t.jsonl",
                       "{\"p\":[5,6],\"input_ids\":[7,8],\"labels\":[7,-100]}\n{\"p\":[],\"input_ids\":[1]}\n");
    dataset_write_text("m.jsonl",
                       "{\"input_ids\":[5,6,7],\"completion_mask\":[0,1,1],\"assistant_masks\":[1,1,0]}\n"
                       "{\"input_ids\":[1,2],\"completion_mask\":[1,1],\"labels\":[-100,2]}\n{\"input_ids\":[3]}\n");
    {
        spw_data_options m = dataset_options("m.jsonl");
        m.text_field = "input_ids";
        assert_stream(&m, (int32_t[]){5, 6, 7, 1, 2}, (int32_t[]){6, -1, -1, 2, 3}, 5);
    }
    o.prompt_field = "p";
    assert_stream(&o, (int32_t[]){5, 6, 7, 8}, (int32_t[]){-1, 7, -1, 1}, 4);
}

/* Rows that TRL has packed: lengths of their documents, or positions that begin anew, are what lines of one document each are. */
static void
test_packed_lines(void **state)
{
    static const char *const rows[] = {
        "{\"input_ids\":[5,6,7,8,9,10],\"labels\":[-100,6,7,-100,9,10],\"seq_lengths\":[3,2,1]}\n"
        "{\"input_ids\":[11,12],\"seq_lengths\":[2]}\n",
        "{\"input_ids\":[5,6,7,8,9,10],\"labels\":[-100,6,7,-100,9,10],\"position_ids\":[0,1,2,0,1,0]}\n"
        "{\"input_ids\":[11,12],\"position_ids\":[0,1],\"seq_lengths\":null}\n",
        "{\"input_ids\":[5,6,7],\"labels\":[-100,6,7]}\n{\"input_ids\":[8,9],\"labels\":[-100,9]}\n"
        "{\"input_ids\":[10]}\n{\"input_ids\":[11,12]}\n"};
    static const int32_t tokens[] = {5, 6, 7, 8, 9, 10, 11}, targets[] = {6, 7, -1, 9, -1, -1, 12};
    (void)state;
    for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
        spw_data_options o = dataset_options("t.jsonl");
        spw_data *d;
        o.text_field = "input_ids";
        o.documents = SPW_DOCUMENTS_MASK;
        dataset_write_text("t.jsonl", rows[k]);
        assert_stream(&o, tokens, targets, 7);
        o.documents = SPW_DOCUMENTS_WHOLE;
        o.seq_length = 3;
        d = dataset_open(&o);
        assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 3); /* of 3, of 2 and 1, of 2 */
        spw_data_close(d);
    }
}

static void
test_lines_of_tokens_refused(void **state)
{
    static const struct {
        const char *text, *said;
        spw_status st;
    } cases[] = {
        {"{\"input_ids\":[1,2.5]}", "input_ids[1] is not a token's number", SPW_ECORRUPT},
        {"{\"input_ids\":[1,\"a\"]}", "input_ids[1] is not a token's number", SPW_ECORRUPT},
        {"{\"input_ids\":[1,-1]}", "input_ids[1] is not a token's number", SPW_ECORRUPT},
        {"{\"input_ids\":[1,3e9]}", "input_ids[1] is not a token's number", SPW_ECORRUPT},
        {"{\"input_ids\":[1]}\n{\"input_ids\":\"a\"}", "line 2 (byte 18): field \"input_ids\" is not a list of tokens",
         SPW_ECORRUPT},
        {"{\"input_ids\":[1]}\n{\"text\":\"a\"}", "field \"input_ids\" is not a list of tokens", SPW_ECORRUPT},
        {"{\"input_ids\":\"a\"}\n{\"input_ids\":[1]}", "line 2 (byte 18): field \"input_ids\" is not a string",
         SPW_ECORRUPT},
        {"{\"input_ids\":[1,2],\"labels\":[1]}", "\"labels\" is not a list of as many numbers as there are tokens, 2",
         SPW_ECORRUPT},
        {"{\"input_ids\":[1,2],\"labels\":\"a\"}", "\"labels\" is not a list of as many", SPW_ECORRUPT},
        {"{\"input_ids\":[1,2],\"labels\":[-100,3]}", "labels[1] is neither its token, 2, nor below 0", SPW_ECORRUPT},
        {"{\"input_ids\":[1,2],\"labels\":[-100,null]}", "labels[1] is neither", SPW_ECORRUPT},
        {"{\"input_ids\":[1,2],\"attention_mask\":[1,0]}", "attention_mask[1] is 0: write the tokens without padding",
         SPW_EUNSUPPORTED},
        {"{\"input_ids\":[1,2],\"completion_mask\":[0,2]}", "completion_mask[1] is neither 0 nor 1", SPW_ECORRUPT},
        {"{\"input_ids\":[1,2],\"assistant_masks\":[0]}", "\"assistant_masks\" is not a list of as many", SPW_ECORRUPT},
        {"{\"input_ids\":[1,2],\"seq_lengths\":[1]}", "not a list of lengths that add up to the 2 tokens",
         SPW_ECORRUPT},
        {"{\"input_ids\":[1,2],\"seq_lengths\":[2,0]}", "not a list of lengths that add up", SPW_ECORRUPT},
        {"{\"input_ids\":[1,2],\"seq_lengths\":2}", "not a list of lengths that add up", SPW_ECORRUPT},
        {"{\"input_ids\":[1,2],\"position_ids\":[0]}", "\"position_ids\" is not a list of as many", SPW_ECORRUPT},
        {"{\"input_ids\":[1,2],\"position_ids\":[0,2]}", "position_ids[1] is neither 0, where a text begins",
         SPW_ECORRUPT},
        {"{\"input_ids\":[1,1002]}", "token 1002 is outside the vocabulary of 1001", SPW_ECORRUPT},
    };
    spw_data_options o = dataset_options("t.jsonl");
    (void)state;
    o.text_field = "input_ids";
    o.vocab = 1001;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dataset_write_text("t.jsonl", cases[i].text);
        dataset_refuse(&o, cases[i].st, "t.jsonl: line", cases[i].said, NULL);
    }
}

/* documents: mask hides the first token of each document, and nothing else; packed hides nothing. In every format. */
static void
test_document_mask(void **state)
{
    spw_data_options o = dataset_options("d.jsonl");
    (void)state;
    dataset_write_text("d.jsonl", "{\"text\":\"ab\"}\n{\"text\":\"c\"}\n{\"text\":\"\"}\n{\"text\":\"de\"}\n");
    {
        static const int32_t tokens[] = {'a', 'b', '\n', 'c', '\n', 'd', 'e'};
        static const int32_t packed[] = {'b', '\n', 'c', '\n', 'd', 'e', '\n'};
        static const int32_t masked[] = {'b', '\n', -1, '\n', -1, 'e', '\n'};
        assert_stream(&o, tokens, packed, 7);
        o.documents = SPW_DOCUMENTS_MASK;
        assert_stream(&o, tokens, masked, 7);
    }
    { /* llm.c: behind its end-of-text token */
        static const int32_t tokens[] = {5, 6, 7, 8, 9, 10, 11};
        static const int32_t masked[] = {6, 7, 8, -1, 10, 11, 12};
        dataset_write_llmc("d.bin", 20240520, 1, 8, 5);
        o = dataset_options("d.bin");
        o.documents = SPW_DOCUMENTS_MASK;
        o.end_of_text_set = true;
        o.end_of_text = 8;
        assert_stream(&o, tokens, masked, 7);
        o.end_of_text_set = false;
        dataset_write_llmc("d.bin", 20240520, 1, 4, 50255);
        assert_stream(&o, (int32_t[]){50255, 50256, 50257}, (int32_t[]){50256, -1, 50258}, 3);
        dataset_write_llmc("d.bin", 20240801, 7, 4, 127999);
        assert_stream(&o, (int32_t[]){127999, 128000, 128001}, (int32_t[]){128000, -1, 128002}, 3);
    }
    { /* Megatron: by its index, with empty documents and documents of several sequences */
        static const uint32_t lengths[] = {2, 0, 3, 1, 0, 2};
        static const uint64_t documents[] = {0, 0, 1, 2, 3, 5, 6};
        static const int32_t tokens[] = {10, 11, 12, 13, 14, 15, 16};
        static const int32_t masked[] = {11, -1, 13, 14, -1, -1, 17};
        dataset_write_megatron("m", 8, 2, 10, lengths, 6, documents, 7);
        o = dataset_options("m");
        o.documents = SPW_DOCUMENTS_MASK;
        assert_stream(&o, tokens, masked, 7);
        o.seq_length = 7; /* and in one window */
        {
            spw_data *d = dataset_open(&o);
            int32_t got[7], next[7];
            dataset_fill(d, SPW_SPLIT_TRAIN, 0, 1, got, next);
            assert_memory_equal(next, masked, sizeof masked);
            spw_data_close(d);
        }
    }
}

/* documents: separate hides the same and marks where documents begin, in every format; ids stay as they are. */
static void
test_documents_marked(void **state)
{
    enum { HERE = SPW_TOKEN_BEGINS, WINDOW = 7 };
    static const struct {
        const char *name;
        int32_t tokens[WINDOW], targets[WINDOW];
    } want[] = {
        {"d.jsonl", {'a' | HERE, 'b', '\n', 'c' | HERE, '\n', 'd' | HERE, 'e'}, {'b', '\n', -1, '\n', -1, 'e', '\n'}},
        {"d.bin", {5, 6, 7, 8, 9 | HERE, 10, 11}, {6, 7, 8, -1, 10, 11, 12}},
        {"m", {10, 11, 12 | HERE, 13, 14, 15 | HERE, 16 | HERE}, {11, -1, 13, 14, -1, -1, 17}},
    };
    static const uint32_t lengths[] = {2, 0, 3, 1, 0, 2};
    static const uint64_t documents[] = {0, 0, 1, 2, 3, 5, 6};
    (void)state;
    dataset_write_text("d.jsonl", "{\"text\":\"ab\"}\n{\"text\":\"c\"}\n{\"text\":\"\"}\n{\"text\":\"de\"}\n");
    dataset_write_llmc("d.bin", 20240520, 1, 8, 5);
    dataset_write_megatron("m", 8, 2, 10, lengths, 6, documents, 7);
    for (int i = 0; i < 3; i++) {
        spw_data_options o = dataset_options(want[i].name);
        int32_t got[WINDOW], next[WINDOW];
        spw_data *d;
        o.documents = SPW_DOCUMENTS_SEPARATE;
        o.seq_length = WINDOW;
        o.end_of_text_set = i == 1;
        o.end_of_text = 8;
        d = dataset_open(&o);
        dataset_fill(d, SPW_SPLIT_TRAIN, 0, 1, got, next);
        assert_memory_equal(got, want[i].tokens, sizeof got);
        assert_memory_equal(next, want[i].targets, sizeof next);
        spw_data_close(d);
    }
}

/* How long document i of a file is, its end included: mostly shorter than a window of 32, some as long, a few longer than several. */
static uint64_t
document_length(uint64_t i)
{
    return i % 29 == 28 ? 75 : i % 7 == 6 ? 32 : 2 + i * i % 19;
}

/*
 * documents: whole, on lines of known lengths: every document is there once, in one window if it fits in one, and there each token
 * but a document's last predicts the next; padding predicts nothing, and is little.
 */
static void
test_documents_whole(void **state)
{
    enum { LINES = 500, WINDOW = 32 };
    spw_data_options o = dataset_options("w.jsonl");
    uint64_t seen[LINES] = {0}, padding = 0, cut = 0, total = 0;
    static char text[LINES * 100];
    size_t at = 0;
    spw_data *d;
    (void)state;
    for (uint64_t i = 0; i < LINES; i++) {
        at += (size_t)snprintf(text + at, sizeof text - at, "{\"text\":\"");
        for (uint64_t k = 0; k + 1 < document_length(i); k++) /* three letters name a document, in turn */
            text[at++] = (char)('a' + i / (uint64_t[]){1, 26, 676}[k % 3] % 26);
        at += (size_t)snprintf(text + at, sizeof text - at, "\"}\n");
        total += document_length(i);
    }
    dataset_write_text("w.jsonl", text);
    o.documents = SPW_DOCUMENTS_WHOLE;
    o.seq_length = WINDOW;
    o.validation_split = 0;
    d = dataset_open(&o);
    for (uint64_t w = 0; w < spw_data_sequences(d, SPW_SPLIT_TRAIN); w++) {
        int32_t tokens[WINDOW], targets[WINDOW];
        dataset_fill(d, SPW_SPLIT_TRAIN, w, 1, tokens, targets);
        for (int t = 0; t < WINDOW;) {
            int n = 1;
            int32_t id = tokens[t] & ~SPW_TOKEN_BEGINS;
            while (t + n < WINDOW && (tokens[t + n] & SPW_TOKEN_BEGINS) == 0)
                n++;
            if (id == 0) { /* padding */
                for (int k = 0; k < n; k++)
                    assert_true(tokens[t + k] % SPW_TOKEN_BEGINS == 0 && targets[t + k] == -1);
                padding += (uint64_t)n;
            } else {
                for (int k = 0; k + 1 < n; k++)
                    assert_int_equal(targets[t + k], tokens[t + k + 1]);
                if (tokens[t + n - 1] == '\n') /* the end: who comes next is nobody's business */
                    assert_int_equal(targets[t + n - 1], -1);
                else
                    cut++;
                if (n >= 4 && tokens[t + n - 1] == '\n' && n < WINDOW + 1) {
                    for (uint64_t i = 0; i < LINES; i++) { /* whose is it? */
                        bool same = document_length(i) == (uint64_t)n;
                        for (int k = 0; k < 3 && same; k++)
                            same = (tokens[t + k] & ~SPW_TOKEN_BEGINS) ==
                                   'a' + (int32_t)(i / (uint64_t[]){1, 26, 676}[k] % 26);
                        seen[i] += same;
                    }
                }
            }
            t += n;
        }
    }
    for (uint64_t i = 0; i < LINES; i++) {
        if (document_length(i) >= 4 && document_length(i) <= WINDOW)
            assert_int_equal(seen[i], 1);
    }
    assert_int_equal(cut, 2 * (LINES / 29)); /* 75 tokens are two windows and 11 */
    assert_int_equal(spw_data_tokens(d), total + padding + 1);
    assert_true(padding * 50 < total); /* 2 % */
    spw_data_close(d);
}

/* A prompt is read and gives no loss; its first answer's token does. With an encoder, and the token that ends texts. */
static void
test_prompt_mask(void **state)
{
    unsigned calls = 0;
    spw_data_options o = dataset_options("p.jsonl");
    (void)state;
    dataset_write_text("p.jsonl",
                       "{\"prompt\":\"ab\",\"completion\":\"cd\"}\n{\"completion\":\"\",\"prompt\":\"e\"}\n");
    o.prompt_field = "prompt";
    o.text_field = "completion";
    assert_stream(&o, (int32_t[]){'a', 'b', 'c', 'd', '\n', 'e'}, (int32_t[]){-1, 'c', 'd', '\n', -1, '\n'}, 6);
    o.encode = encode_words;
    o.encode_ctx = &calls;
    o.encode_key = 1;
    o.end_of_text_set = true;
    o.end_of_text = 7;
    assert_stream(&o, (int32_t[]){1002, 1002, 7, 1001}, (int32_t[]){1002, 7, -1, 7}, 4);
    assert_true(calls > 0);
    calls = 0;
    assert_stream(&o, (int32_t[]){1002, 1002, 7, 1001}, (int32_t[]){1002, 7, -1, 7}, 4);
    assert_int_equal(calls, 0); /* from the cache */
    o.encode_key = 2;           /* another encoder */
    assert_stream(&o, (int32_t[]){1002, 1002, 7, 1001}, (int32_t[]){1002, 7, -1, 7}, 4);
    assert_true(calls > 0);
    calls = 0;
    dataset_write_text("p.jsonl", "{\"prompt\":\"ab cd\",\"completion\":\"cd\"}\n"); /* another file in its place */
    assert_stream(&o, (int32_t[]){1002, 1003, 1002}, (int32_t[]){-1, 1002, 7}, 3);
    assert_true(calls > 0);
    dataset_write_text("p.jsonl",
                       "{\"prompt\":\"ab\",\"completion\":\"cd\"}\n{\"prompt\":\"a!\",\"completion\":\"\"}\n");
    dataset_refuse(&o, SPW_ECORRUPT, "p.jsonl: line 2 (byte 34)", "no word for !", NULL);
    o.vocab = 1002;
    o.prompt_field = "";
    dataset_refuse(&o, SPW_ECORRUPT, "p.jsonl: line 1 (byte 0): token 1002", "vocabulary of 1002", NULL);
}

/*
 * Windows without a target are counted when a cache is made, and known when it is found, for each length of window and way of
 * laying out documents; data that has none at all in what is trained on is refused where that is asked.
 */
static void
test_windows_without_targets(void **state)
{
    spw_data_options o = dataset_options("p.jsonl");
    spw_error err = {0};
    spw_data *d;
    uint64_t cut;
    (void)state;
    o.prompt_field = "prompt";
    dataset_write_text("p.jsonl", "{\"prompt\":\"twenty-four of these..\",\"text\":\"a\"}\n"
                                  "{\"prompt\":\"four\",\"text\":\"a\"}\n");
    for (int k = 0; k < 12; k++) {
        const struct {
            uint64_t length, untargeted, cut;
            spw_documents documents;
        } wanted[] = {{6, 3, 0, SPW_DOCUMENTS_PACKED}, {4, 5, 0, SPW_DOCUMENTS_PACKED}, {12, 1, 1, SPW_DOCUMENTS_WHOLE},
                      {24, 0, 0, SPW_DOCUMENTS_WHOLE}, {23, 0, 1, SPW_DOCUMENTS_WHOLE}, {6, 3, 0, SPW_DOCUMENTS_MASK}};
        o.seq_length = wanted[k % 6].length;
        o.documents = wanted[k % 6].documents;
        d = dataset_open(&o);
        if (spw_data_untargeted(d, &cut) != wanted[k % 6].untargeted || cut != wanted[k % 6].cut)
            fail_msg("%d: %llu windows of %llu without a target, %llu documents cut", k,
                     (unsigned long long)spw_data_untargeted(d, &cut),
                     (unsigned long long)spw_data_sequences(d, SPW_SPLIT_TRAIN), (unsigned long long)cut);
        assert_int_equal(spw_data_check_targets(d, &err), SPW_OK);
        spw_data_close(d);
    }
    o = dataset_options("p.jsonl");
    o.prompt_field = "prompt";
    o.seq_length = 5;
    o.documents = SPW_DOCUMENTS_PACKED;
    dataset_write_text("p.jsonl", "{\"prompt\":\"ten tokens, and more\",\"text\":\"an answer\"}\n");
    o.validation_split = 0.5; /* which holds out the answer */
    d = dataset_open(&o);
    assert_int_equal(spw_data_check_targets(d, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "no token of the 2 training sequences has a target"));
    spw_data_close(d);
}

/* What texts begin with is the first token of every document that has others, once; the cache knows of it. */
static void
test_beginnings(void **state)
{
    unsigned calls = 0;
    spw_data_options o = dataset_options("d.jsonl");
    (void)state;
    dataset_write_text("d.jsonl", "{\"text\":\"ab\"}\n{\"text\":\"\"}\n{\"text\":\"c\"}\n");
    o.end_of_text_set = true;
    o.end_of_text = 2;
    assert_stream(&o, (int32_t[]){'a', 'b', 2, 'c'}, (int32_t[]){'b', 2, 'c', 2}, 4);
    o.begin_of_text = (spw_begin){1, {1}};
    assert_stream(&o, (int32_t[]){1, 'a', 'b', 2, 1, 'c'}, (int32_t[]){'a', 'b', 2, 1, 'c', 2}, 6);
    o.documents = SPW_DOCUMENTS_MASK;
    assert_stream(&o, (int32_t[]){1, 'a', 'b', 2, 1, 'c'}, (int32_t[]){'a', 'b', 2, -1, 'c', 2}, 6);
    o.documents = SPW_DOCUMENTS_PACKED;
    dataset_write_text("d.jsonl", "{\"prompt\":\"a\",\"text\":\"b\"}\n{\"prompt\":\"\",\"text\":\"c\"}\n");
    o.prompt_field = "prompt";
    assert_stream(&o, (int32_t[]){1, 'a', 'b', 2, 1, 'c'}, (int32_t[]){-1, 'b', 2, 1, 'c', 2}, 6);
    o.begin_of_text = (spw_begin){3, {1, 3, 4}}; /* or tokens: the first is the document's first */
    assert_stream(&o, (int32_t[]){1, 3, 4, 'a', 'b', 2, 1, 3, 4, 'c'}, (int32_t[]){-1, -1, -1, 'b', 2, 1, 3, 4, 'c', 2},
                  10);
    o.documents = SPW_DOCUMENTS_MASK;
    assert_stream(&o, (int32_t[]){1, 3, 4, 'a', 'b', 2, 1, 3, 4, 'c'},
                  (int32_t[]){-1, -1, -1, 'b', 2, -1, 3, 4, 'c', 2}, 10);
    dataset_write_text("w.txt", "one two\nthree");
    o = dataset_options("w.txt");
    o.encode = encode_words;
    o.encode_ctx = &calls;
    o.begin_of_text = (spw_begin){1, {1}};
    assert_stream(&o, (int32_t[]){1, 1003, 1004, 999}, (int32_t[]){1003, 1004, 999, 1005}, 4);
    o.begin_of_text.count = 2;
    o.begin_of_text.ids[1] = 7;
    assert_stream(&o, (int32_t[]){1, 7, 1003, 1004, 999}, (int32_t[]){7, 1003, 1004, 999, 1005}, 5);
    o.vocab = 2;
    dataset_refuse(&o, SPW_EINVAL, "texts begin with token 7, the vocabulary has 2", NULL);
    o.vocab = 1;
    dataset_refuse(&o, SPW_EINVAL, "texts begin with token 1, the vocabulary has 1", NULL);
}

/* As a configuration has it: with a tokenizer that puts a token before a text, unless data.begin_of_text says no. */
static void
test_beginning_of_a_tokenizer(void **state)
{
    static const char *const names[] = {"llama3", "mistral", "qwen2"};
    (void)state;
    dataset_write_text("t.jsonl", "{\"text\":\"the first text\"}\n{\"text\":\"and one more\"}\n");
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
        spw_config *c = calloc(1, sizeof *c);
        int32_t row[2][T], target[T], begin;
        char encoder[2][64];
        spw_tokenizer *t;
        spw_error err = {0};
        assert_non_null(c);
        snprintf(c->data.path.item[0], SPW_PATH_BYTES, "%s", dataset_path("t.jsonl"));
        c->data.path.count = 1;
        snprintf(c->data.cache_dir, sizeof c->data.cache_dir, "%s", dataset_path("cache"));
        snprintf(c->data.tokenizer, sizeof c->data.tokenizer, "tests/vectors/tok_%s.json", names[k]);
        snprintf(c->data.documents, sizeof c->data.documents, "packed");
        c->data.seq_length = T;
        assert_int_equal(spw_tokenizer_open(&t, c->data.tokenizer, &err), SPW_OK);
        begin = spw_tokenizer_begin(t).count == 1 ? spw_tokenizer_begin(t).ids[0] : -1;
        c->model.vocab = spw_tokenizer_vocab(t);
        for (int with = 0; with < 2; with++) {
            spw_data *d;
            c->data.begin_of_text = with;
            if (spw_config_open_data(&d, c, &err) != SPW_OK)
                fail_msg("%s", err.message);
            dataset_fill(d, SPW_SPLIT_TRAIN, 0, 1, row[with], target);
            snprintf(encoder[with], sizeof encoder[with], "%s", spw_data_encoder(d));
            spw_data_close(d);
        }
        assert_int_equal(begin >= 0, k < 2);
        assert_int_equal(strcmp(encoder[0], encoder[1]) != 0, k < 2);
        assert_int_equal(row[1][0], k < 2 ? begin : row[0][0]);
        for (int i = 0, plain = 0; i < T; i++) { /* and nothing else is other */
            if (begin < 0 || row[1][i] != begin)
                assert_int_equal(row[1][i], row[0][plain++]);
        }
        spw_tokenizer_close(t);
        free(c);
    }
}

/* Encoded text in pieces gives the tokens of the whole; a file of many megabytes takes no more room than a piece. */
static void
test_encoded_text(void **state)
{
    enum { WORDS = 900000 };
    static int32_t tokens[4096], targets[4096];
    unsigned calls = 0;
    spw_data_options o = dataset_options("w.txt");
    FILE *f = fopen(dataset_path("w.txt"), "wb");
    spw_data *d;
    (void)state;
    assert_non_null(f);
    for (int i = 0; i < WORDS; i++) /* nine words, and a line's end behind a letter or behind a full stop */
        fputs(i % 10 < 9 ? "word " + (i % 10 == 8 ? 4 : 0) : i % 20 == 9 ? "x\n" : ".\n", f);
    fclose(f);
    o.encode = encode_words;
    o.encode_ctx = &calls;
    o.seq_length = 11;
    d = dataset_open(&o);
    assert_true(calls >= 3);
    assert_string_equal(spw_data_formats(d), "text");
    for (uint64_t p = 0; p < 2000; p++) {
        dataset_fill(d, SPW_SPLIT_TRAIN, p, 1, tokens, targets);
        for (int t = 0; t < 11; t++)
            assert_true(tokens[t] == 999 || (tokens[t] >= 1001 && tokens[t] <= 1006));
    }
    spw_data_close(d);
    dataset_write_text("w.txt", "one two\nthree");
    assert_stream(&o, (int32_t[]){1003, 1004, 999}, (int32_t[]){1004, 999, 1005}, 3);
}

/* And so it is with a tokenizer, whatever its lines end in, if they do: the pieces are cut where no pattern joins, and at line ends if tokens hold
 * several words. */
static void
test_tokenized_text(void **state)
{
    static const char *const names[] = {"qwen2", "gemma", "o200k", "across"};
    static const char *const units[] = {"xe txe txe txe txe txe txe t\n",
                                        "Water flows.\n",
                                        "Water flows.\n\n",
                                        "It flows. ",
                                        "if (dam) {\r\n    flow(it);\r\n}\r\n",
                                        "\xd0\xb2\xd0\xbe\xd0\xb4\xd0\xb0 \xd0\xb8\xd0\xb4\xd1\x91\xd1\x82.\n"};
    enum { BYTES = 1200000 };
    char *text = calloc(BYTES + 64, 1), path[300];
    (void)state;
    assert_non_null(text);
    for (size_t k = 0; k < 24; k++) {
        spw_data_options o = dataset_options("t.txt");
        spw_tokens whole = {0};
        spw_tokenizer *t;
        spw_data *d;
        uint64_t bytes = 0;
        snprintf(path, sizeof path, "tests/vectors/tok_%s.json", names[k % 4]);
        assert_int_equal(spw_tokenizer_open(&t, path, NULL), SPW_OK);
        while (bytes < BYTES)
            bytes += (uint64_t)sprintf(text + bytes, "%s", units[k / 4]);
        dataset_write_bytes("t.txt", text, bytes);
        o.encode = spw_tokenizer_encode_data;
        o.encode_ctx = t;
        o.encode_key = k;
        d = dataset_open(&o);
        assert_int_equal(spw_tokenizer_encode(t, text, bytes, false, &whole, NULL), SPW_OK);
        if (spw_data_tokens(d) != whole.count)
            fail_msg("%s, \"%s\": %llu tokens, not %llu", names[k % 4], units[k / 4],
                     (unsigned long long)spw_data_tokens(d), (unsigned long long)whole.count);
        spw_data_close(d);
        spw_tokens_free(&whole);
        spw_tokenizer_close(t);
    }
    free(text);
}

/* What lies in the cache and is not what was written there is made anew; what cannot be made says where. */
static void
test_cache(void **state)
{
    static const char text[] = "words\nof\ntext\n";
    spw_data_options o = dataset_options("c.jsonl");
    int32_t tokens[32], targets[32];
    glob_t found;
    (void)state;
    dataset_write_text("c.jsonl", "{\"text\":\"words\"}\n{\"text\":\"of\"}\n{\"text\":\"text\"}\n");
    for (size_t i = 0; i + 1 < sizeof text - 1; i++) {
        tokens[i] = (unsigned char)text[i];
        targets[i] = (unsigned char)text[i + 1];
    }
    for (int damage = 0; damage < 7; damage++) {
        static const long offsets[] = {0, 0, 8, 12, 16, 24};
        assert_stream(&o, tokens, targets, sizeof text - 2);
        assert_int_equal(glob(dataset_path("cache/*"), 0, NULL, &found), 0);
        assert_int_equal(found.gl_pathc, 1); /* and no parts */
        if (damage < 6)
            dataset_patch(found.gl_pathv[0] + strlen(dataset_dir) + 1, offsets[damage], 0x55, 1);
        else
            assert_int_equal(truncate(found.gl_pathv[0], 70), 0);
        globfree(&found);
    }
    assert_stream(&o, tokens, targets, sizeof text - 2);
    o.cache_dir = dataset_path("c.jsonl");
    dataset_refuse(&o, SPW_EINVAL, "data.cache_dir", "c.jsonl is not a folder", NULL);
}

static spw_status
encode_and_die(void *ctx, const char *text, uint64_t bytes, bool rest, int32_t *tokens, uint64_t token_max,
               uint64_t *token_count, spw_error *err)
{
    (void)ctx, (void)text, (void)bytes, (void)rest, (void)tokens, (void)token_max, (void)token_count;
    (void)raise(SIGKILL);
    return SPW_RAISE(err, SPW_ECANCELED, "not killed");
}

/* Two runs that make the same cache: the second begins, and is done, while the first makes tokens. */
typedef struct at_once {
    spw_data_options o;
    spw_data *second;
    bool begun;
    struct stat made; /* the file that the second has put in its place */
} at_once;

static void
stat_cache(struct stat *out)
{
    glob_t found;
    assert_int_equal(glob(dataset_path("cache/*"), 0, NULL, &found), 0);
    assert_int_equal(found.gl_pathc, 1); /* and no parts */
    assert_int_equal(stat(found.gl_pathv[0], out), 0);
    globfree(&found);
}

static spw_status
encode_at_once(void *ctx, const char *text, uint64_t bytes, bool rest, int32_t *tokens, uint64_t token_max,
               uint64_t *token_count, spw_error *err)
{
    at_once *runs = ctx;
    (void)rest;
    if (!runs->begun) {
        runs->begun = true;
        SPW_TRY(spw_data_open(&runs->second, &runs->o, err));
        stat_cache(&runs->made);
    }
    *token_count = bytes;
    for (uint64_t i = 0; i < bytes && bytes <= token_max; i++)
        tokens[i] = (unsigned char)text[i];
    return SPW_OK;
}

/* Others read the tokens of a text that they may read, so that a folder of caches can be everybody's, and of no other. */
static void
test_cache_readers(void **state)
{
    static const mode_t modes[] = {0600, 0640, 0644, 0666};
    spw_data_options o = dataset_options("readers.jsonl");
    (void)state;
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        struct stat made;
        glob_t found;
        dataset_write_text("readers.jsonl", "{\"text\":\"what a sequence needs\"}\n");
        assert_int_equal(chmod(dataset_path("readers.jsonl"), modes[i]), 0);
        spw_data_close(dataset_open(&o));
        stat_cache(&made);
        assert_int_equal(made.st_mode & 07777, i < 2 ? 0600 : 0644);
        assert_int_equal(glob(dataset_path("cache/*"), 0, NULL, &found), 0);
        assert_int_equal(unlink(found.gl_pathv[0]), 0);
        globfree(&found);
    }
}

/* What the run that was done first has made stays: it reads it, and others of it look for it, on hosts that share the folder too. */
static void
test_cache_at_once(void **state)
{
    at_once runs = {.o = dataset_options("once.txt")};
    struct stat now;
    spw_data *first;
    int probe = open(dataset_dir, O_TMPFILE | O_RDWR, 0600);
    (void)state;
    if (probe < 0)
        skip(); /* a part with a name is seen beside the cache */
    close(probe);
    dataset_write_text("once.txt", "some words of text");
    runs.o.encode = encode_at_once;
    runs.o.encode_ctx = &runs;
    first = dataset_open(&runs.o);
    assert_true(runs.begun);
    stat_cache(&now);
    assert_int_equal(now.st_ino, runs.made.st_ino);
    spw_data_close(runs.second);
    spw_data_close(first);
}

/* A kill in the middle of making a cache leaves no part of it: such parts were as large as the data, and nobody's. */
static void
test_cache_killed(void **state)
{
    spw_data_options o = dataset_options("k.txt");
    int status, probe;
    glob_t found;
    pid_t pid;
    (void)state;
    probe = open(dataset_dir, O_TMPFILE | O_RDWR, 0600);
    if (probe < 0)
        skip(); /* the file system has no files without a name */
    close(probe);
    dataset_write_text("k.txt", "some words of text");
    o.encode = encode_and_die;
    pid = fork();
    if (pid == 0) {
        spw_data *d = NULL;
        (void)spw_data_open(&d, &o, NULL);
        _exit(0);
    }
    assert_true(pid > 0 && waitpid(pid, &status, 0) == pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_int_equal(glob(dataset_path("cache/*"), 0, NULL, &found), GLOB_NOMATCH);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        IN_DIR(test_llmc),
        IN_DIR(test_llmq),
        IN_DIR(test_llmq_share),
        IN_DIR(test_lines_of_tokens),
        IN_DIR(test_packed_lines),
        IN_DIR(test_lines_of_tokens_refused),
        IN_DIR(test_names_like_globs),
        IN_DIR(test_long_window),
        IN_DIR(test_megatron),
        IN_DIR(test_jsonl),
        IN_DIR(test_document_mask),
        IN_DIR(test_documents_marked),
        IN_DIR(test_documents_whole),
        IN_DIR(test_prompt_mask),
        IN_DIR(test_windows_without_targets),
        IN_DIR(test_beginnings),
        IN_DIR(test_beginning_of_a_tokenizer),
        IN_DIR(test_encoded_text),
        IN_DIR(test_tokenized_text),
        IN_DIR(test_cache),
        IN_DIR(test_cache_readers),
        IN_DIR(test_cache_at_once),
        IN_DIR(test_cache_killed),
    };
    return cmocka_run_group_tests_name("data_files", tests, NULL, NULL);
}
