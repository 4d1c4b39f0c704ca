/*
 * Training data: every window once per epoch in an order that only seed and position decide; each format is read and what is
 * not the format is refused by file, field and offset; weights, document and prompt masks, and nothing large in memory.
 */
#include "data_internal.h"
#include "lib_tiny.h"
#include "spw_data.h"
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

enum { T = 10 };

static char dir[256]; /* of the test that runs */

static int
make_dir(void **state)
{
    (void)state;
    tiny_dir_make(dir);
    return 0;
}

static int
remove_dir(void **state)
{
    (void)state;
    tiny_dir_remove(dir);
    return 0;
}

static const char *
path_of(const char *name)
{
    static char paths[8][600];
    static unsigned next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", dir, name);
    return path;
}

static void
write_bytes(const char *name, const void *data, size_t bytes)
{
    FILE *f = fopen(path_of(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    fclose(f);
}

static void
write_file(const char *name, int bytes, int first)
{
    FILE *f = fopen(path_of(name), "wb");
    assert_non_null(f);
    for (int i = 0; i < bytes; i++)
        fputc((first + i / T) % 256, f); /* window w starts with byte first + w */
    fclose(f);
}

static void
write_text(const char *name, const char *text)
{
    write_bytes(name, text, strlen(text));
}

/* Little-endian, as the formats are. */
static void
put(FILE *f, uint64_t x, int bytes)
{
    for (int i = 0; i < bytes; i++)
        fputc((int)(x >> 8 * i & 255), f);
}

/* llm.c's stream of `count` tokens; token i is base + i. */
static void
write_llmc(const char *name, uint64_t magic, uint64_t version, uint64_t count, uint64_t base)
{
    FILE *f = fopen(path_of(name), "wb");
    assert_non_null(f);
    put(f, magic, 4);
    put(f, version, 4);
    put(f, count, 4);
    for (int i = 3; i < 256; i++)
        put(f, 0, 4);
    for (uint64_t i = 0; i < count; i++)
        put(f, base + i, magic == 20240520 ? 2 : 4);
    fclose(f);
}

/* Megatron's dataset: sequences of the lengths given; token i is base + i. documents: first sequence of each, and the end. */
static void
write_megatron(const char *prefix, int code, int width, uint64_t base, const uint32_t *lengths, uint64_t sequences,
               const uint64_t *documents, uint64_t ends)
{
    char name[300];
    FILE *f;
    uint64_t at = 0;
    snprintf(name, sizeof name, "%s.idx", prefix);
    f = fopen(path_of(name), "wb");
    assert_non_null(f);
    fwrite("MMIDIDX\0\0", 1, 9, f);
    put(f, 1, 8);
    put(f, (uint64_t)code, 1);
    put(f, sequences, 8);
    put(f, ends, 8);
    for (uint64_t i = 0; i < sequences; i++)
        put(f, lengths[i], 4);
    for (uint64_t i = 0; i < sequences; i++) {
        put(f, at * (uint64_t)width, 8);
        at += lengths[i];
    }
    for (uint64_t i = 0; i < ends; i++)
        put(f, documents[i], 8);
    fclose(f);
    snprintf(name, sizeof name, "%s.bin", prefix);
    f = fopen(path_of(name), "wb");
    assert_non_null(f);
    for (uint64_t i = 0; i < at; i++)
        put(f, base + i, width);
    fclose(f);
}

/* Options for one file or glob of this test's folder. */
static spw_data_options
options_for(const char *pattern)
{
    static char paths[8][600], cache[300];
    static const char *patterns[8];
    static unsigned next;
    unsigned slot = next++ % 8;
    snprintf(paths[slot], sizeof paths[slot], "%s/%s", dir, pattern);
    patterns[slot] = paths[slot];
    snprintf(cache, sizeof cache, "%s/cache", dir);
    return (spw_data_options){.patterns = &patterns[slot], .pattern_count = 1, .seq_length = T, .cache_dir = cache};
}

static spw_status
open_data(spw_data **d, const char *pattern, double split, uint64_t seed, spw_error *err)
{
    spw_data_options o = options_for(pattern);
    o.validation_split = split;
    o.seed = seed;
    return spw_data_open(d, &o, err);
}

static spw_data *
open_with(const spw_data_options *o)
{
    spw_data *d = NULL;
    spw_error err = {0};
    if (spw_data_open(&d, o, &err) != SPW_OK)
        fail_msg("%s", err.message);
    return d;
}

static void
fill(const spw_data *d, spw_split split, uint64_t first, uint64_t count, int32_t *tokens, int32_t *targets)
{
    spw_error err = {0};
    if (spw_data_fill(d, split, first, count, tokens, targets, &err) != SPW_OK)
        fail_msg("%s", err.message);
}

/* Opening fails with this status, and the message holds all of the texts up to NULL. */
static void
refuse(const spw_data_options *o, spw_status st, ...)
{
    spw_data *d = NULL;
    spw_error err = {0};
    long live = spw_test_live_allocs();
    va_list texts;
    spw_status got = spw_data_open(&d, o, &err);
    const char *text;
    if (got != st)
        fail_msg("%s, wanted %s: %s", spw_status_name(got), spw_status_name(st), err.message);
    assert_null(d);
    assert_int_equal(spw_test_live_allocs(), live);
    va_start(texts, st);
    while ((text = va_arg(texts, const char *)) != NULL) {
        if (strstr(err.message, text) == NULL)
            fail_msg("no \"%s\" in: %s", text, err.message);
    }
    va_end(texts);
}

/* ---------------------------------------------------------------- order */

/* Over two files: each training window once per epoch, another order in the next, the same for the same seed; targets are
 * the tokens shifted by one; what is held out is never trained on. */
static void
test_order(void **state)
{
    spw_data *d = NULL, *again = NULL;
    int32_t tokens[T], targets[T], other[T];
    int seen[256], order[2][256];
    uint64_t n, held;
    (void)state;
    write_file("a.txt", 50 * T + 1, 0);
    write_file("b.txt", 30 * T + 5, 100);
    write_file("c.txt", 3, 200); /* too short for a window */
    assert_int_equal(open_data(&d, "*.txt", 0.1, 5, NULL), SPW_OK);
    assert_int_equal(open_data(&again, "*.txt", 0.1, 5, NULL), SPW_OK);
    assert_string_equal(spw_data_formats(d), "text");
    n = spw_data_sequences(d, SPW_SPLIT_TRAIN);
    held = spw_data_sequences(d, SPW_SPLIT_VALIDATION);
    assert_int_equal(n + held, 80);
    assert_int_equal(held, 8);
    for (int epoch = 0; epoch < 2; epoch++) {
        memset(seen, 0, sizeof seen);
        for (uint64_t i = 0; i < n; i++) {
            fill(d, SPW_SPLIT_TRAIN, (uint64_t)epoch * n + i, 1, tokens, targets);
            fill(again, SPW_SPLIT_TRAIN, (uint64_t)epoch * n + i, 1, other, targets);
            assert_memory_equal(tokens, other, sizeof tokens);
            assert_memory_equal(tokens + 1, targets, (T - 1) * sizeof *tokens);
            seen[tokens[0]]++;
            order[epoch][i] = tokens[0];
        }
        for (int w = 0; w < 256; w++)
            assert_int_equal(seen[w], (w < 45 || (w >= 100 && w < 127)) ? 1 : 0);
    }
    assert_memory_not_equal(order[0], order[1], n * sizeof(int));
    for (uint64_t i = 0; i < held; i++) {
        fill(d, SPW_SPLIT_VALIDATION, i, 1, tokens, targets);
        assert_true((tokens[0] >= 45 && tokens[0] < 50) || (tokens[0] >= 127 && tokens[0] < 130));
    }
    spw_data_close(again);
    assert_int_equal(open_data(&again, "*.txt", 0.1, 6, NULL), SPW_OK);
    for (uint64_t i = 0; i < n; i++) {
        fill(again, SPW_SPLIT_TRAIN, i, 1, tokens, targets);
        order[1][i] = tokens[0];
    }
    assert_memory_not_equal(order[0], order[1], n * sizeof(int));
    spw_data_close(again);
    spw_data_close(d);
}

/* The permutation is one, for every size around powers of two and every epoch; and it is the one of the first release. */
static void
test_permutation(void **state)
{
    static const uint64_t sizes[] = {1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 1000, 4097};
    static const uint64_t known[] = {6, 3, 5, 9, 4, 0, 2, 8, 7, 1};
    unsigned char seen[4097];
    (void)state;
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        for (uint64_t epoch = 0; epoch < 3; epoch++) {
            memset(seen, 0, sizeof seen);
            for (uint64_t i = 0; i < sizes[k]; i++) {
                uint64_t at = spw__data_permute(7, epoch, i, sizes[k]);
                assert_true(at < sizes[k] && !seen[at]);
                seen[at] = 1;
            }
        }
    }
    for (uint64_t i = 0; i < 10; i++)
        assert_int_equal(spw__data_permute(1, 0, i, 10), known[i]);
    assert_int_equal(spw__data_permute(12345, 3, 1000000, 123456789012ull), 22157765378ull); /* no table anywhere */
}

/* Whoever reads, in whatever portions: the sequence at a position is the same, also after a fresh start there. */
static void
test_ranks_and_resume(void **state)
{
    enum { STEPS = 8, BATCH = 6 };
    static int32_t all[STEPS * BATCH][T], some[STEPS * BATCH][T], targets[STEPS * BATCH][T];
    spw_data_source sources[2];
    (void)state;
    write_file("a.txt", 90 * T + 1, 0);
    write_file("b.txt", 40 * T + 1, 100);
    for (int mixed = 0; mixed < 2; mixed++) {
        spw_data_options o = options_for("*.txt");
        spw_data *d;
        sources[0] = (spw_data_source){path_of("a.txt"), 2};
        sources[1] = (spw_data_source){path_of("b.txt"), 1};
        if (mixed) {
            o.pattern_count = 0;
            o.sources = sources;
            o.source_count = 2;
        }
        o.seed = 3;
        d = open_with(&o);
        fill(d, SPW_SPLIT_TRAIN, 0, STEPS * BATCH, all[0], targets[0]);
        for (uint64_t world = 1; world <= BATCH; world++) {
            uint64_t each = BATCH / world;
            if (BATCH % world != 0)
                continue;
            for (uint64_t step = 0; step < STEPS; step++) {
                for (uint64_t rank = world; rank-- > 0;)
                    fill(d, SPW_SPLIT_TRAIN, step * BATCH + rank * each, each, some[step * BATCH + rank * each],
                         targets[0]);
            }
            assert_memory_equal(all, some, sizeof all);
        }
        spw_data_close(d);
        d = open_with(&o);
        fill(d, SPW_SPLIT_TRAIN, 17, 20, some[0], targets[0]);
        assert_memory_equal(all[17], some[0], 20 * sizeof all[0]);
        spw_data_close(d);
    }
}

/* A split holds out one window at least; none is held out at 0. */
static void
test_split(void **state)
{
    spw_data *d = NULL;
    int32_t x[T];
    (void)state;
    write_file("a.txt", 4 * T + 1, 0);
    assert_int_equal(open_data(&d, "a.txt", 0.05, 1, NULL), SPW_OK);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_VALIDATION), 1);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 3);
    spw_data_close(d);
    assert_int_equal(open_data(&d, "a.txt", 0.0, 1, NULL), SPW_OK);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_VALIDATION), 0);
    assert_int_equal(spw_data_fill(d, SPW_SPLIT_VALIDATION, 0, 1, x, x, NULL), SPW_EINVAL);
    spw_data_close(d);
}

/* Of files too short for a share of their own as many windows are held out as of one long file, of every part of the row. */
static void
test_split_of_many(void **state)
{
    spw_data_options o;
    spw_data *d;
    int32_t tokens[T], targets[T];
    uint64_t before;
    (void)state;
    for (int i = 0; i < 60; i++) {
        char name[16];
        snprintf(name, sizeof name, "f%02d", i);
        write_file(name, T + 1, i);
    }
    o = options_for("f*");
    o.validation_split = 0.05;
    d = open_with(&o);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_VALIDATION), 3);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 57);
    for (uint64_t p = 0; p < 3; p++) {
        fill(d, SPW_SPLIT_VALIDATION, p, 1, tokens, targets);
        assert_int_equal(tokens[0], 9 + 20 * p); /* 0.05 x 10 rounds to 1 */
    }
    assert_true(spw_data_split_moved(d, &before));
    assert_int_equal(before, 1);
    spw_data_close(d);
    o.validation_split = 0.99;
    d = open_with(&o);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 1);
    spw_data_close(d);
    write_file("long", 60 * T + 1, 0);
    o = options_for("long");
    o.validation_split = 0.05;
    d = open_with(&o);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_VALIDATION), 3);
    assert_false(spw_data_split_moved(d, &before)); /* of one file nothing has changed */
    spw_data_close(d);
}

/* After any number of draws each source has its share to within one, from any position on, over several periods. */
static void
test_shares(void **state)
{
    static const double sets[][6] = {
        {0.7, 0.3},     {1, 1, 1},    {0.9, 0.05, 0.03, 0.02}, {1, 2, 3, 4, 5, 6}, {0.123456, 0.654321, 0.222223},
        {1e6, 1, 1, 1}, {0.5, 0, 0.5}};
    static const uint64_t periods[] = {10, 3, 100, 21, 0, 0, 2};
    (void)state;
    for (size_t k = 0; k < sizeof sets / sizeof sets[0]; k++) {
        data_mix mix;
        data_draw draw, from;
        uint64_t had[6] = {0}, total = 0, index;
        uint32_t count = 6;
        while (count > 1 && sets[k][count - 1] == 0)
            count--;
        spw__data_mix_init(&mix, sets[k], count);
        if (periods[k] > 0)
            assert_int_equal(mix.period, periods[k]);
        for (uint32_t s = 0; s < count; s++) {
            assert_true((mix.share[s] > 0) == (sets[k][s] > 0));
            total += mix.share[s];
        }
        assert_int_equal(total, mix.period);
        spw__data_draw_start(&draw, &mix, 0);
        for (uint64_t n = 1; n <= 150000; n++) {
            uint32_t s = spw__data_draw_next(&draw, &index);
            assert_int_equal(index, had[s]);
            had[s]++;
            for (uint32_t t = 0; t < count; t++) { /* |had - n share / period| < 1 */
                int64_t off = (int64_t)(had[t] * mix.period) - (int64_t)(n * mix.share[t]);
                assert_true(off < (int64_t)mix.period && -off < (int64_t)mix.period);
            }
            if (n % 30011 == 0) {
                uint64_t other;
                uint32_t same;
                spw__data_draw_start(&from, &mix, n - 1);
                same = spw__data_draw_next(&from, &other);
                assert_int_equal(same, s);
                assert_int_equal(other, index);
            }
        }
    }
}

/* Sources: shares of what is drawn, each in its own epochs; what is held out of each is mixed too. */
static void
test_sources(void **state)
{
    static int32_t tokens[400][T], targets[400][T];
    spw_data_options o = options_for("none");
    spw_data_source sources[3];
    int seen[256] = {0};
    uint64_t had[3] = {0}, held[3] = {0};
    spw_data *d;
    (void)state;
    write_file("a.txt", 50 * T + 1, 0);
    write_file("b.txt", 20 * T + 1, 100);
    write_file("b2.txt", 10 * T + 1, 120);
    write_file("c.txt", 2 * T + 1, 200);
    sources[0] = (spw_data_source){path_of("a.txt"), 5};
    sources[1] = (spw_data_source){path_of("b*.txt"), 4};
    sources[2] = (spw_data_source){path_of("c.txt"), 1};
    o.pattern_count = 0;
    o.sources = sources;
    o.source_count = 3;
    o.validation_split = 0.1;
    d = open_with(&o);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 45 + 27 + 1);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_VALIDATION), 5 + 3 + 1);
    fill(d, SPW_SPLIT_TRAIN, 0, 90, tokens[0], targets[0]);
    for (int i = 0; i < 90; i++) {
        had[tokens[i][0] / 100]++;
        seen[tokens[i][0]]++;
    }
    assert_int_equal(had[0], 45); /* exactly one epoch of a */
    for (int w = 0; w < 45; w++)
        assert_int_equal(seen[w], 1);
    assert_int_equal(had[1], 36);
    assert_int_equal(had[2], 9);
    fill(d, SPW_SPLIT_VALIDATION, 0, 20, tokens[0], targets[0]);
    for (int i = 0; i < 20; i++)
        held[tokens[i][0] / 100]++;
    assert_int_equal(held[0], 10);
    assert_int_equal(held[1], 8);
    assert_int_equal(held[2], 2);
    spw_data_close(d);
    o.validation_split = 0;
    sources[2] = (spw_data_source){path_of("c.txt"), -1};
    refuse(&o, SPW_EINVAL, "weight of ", "c.txt", NULL);
    write_text("short.txt", "abc");
    sources[2] = (spw_data_source){path_of("short.txt"), 1};
    refuse(&o, SPW_EINVAL, "data.sources", "short.txt", "3 bytes", NULL);
}

/* ---------------------------------------------------------------- formats */

/* llm.c's streams in both widths, and in one folder with others; windows and positions as for text. */
static void
test_llmc(void **state)
{
    int32_t tokens[T], targets[T];
    spw_data *d;
    (void)state;
    write_llmc("a.bin", 20240520, 1, 5 * T + 1, 60000);
    write_llmc("b.bin", 20240801, 7, 5 * T + 1, 100000);
    for (int wide = 0; wide < 2; wide++) {
        spw_data_options o = options_for(wide ? "b.bin" : "a.bin");
        int32_t base = wide ? 100000 : 60000;
        bool seen[5] = {0};
        d = open_with(&o);
        assert_string_equal(spw_data_formats(d), wide ? "llm.c u32" : "llm.c u16");
        assert_int_equal(spw_data_tokens(d), 5 * T + 1);
        assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 5);
        for (uint64_t p = 0; p < 5; p++) {
            fill(d, SPW_SPLIT_TRAIN, p, 1, tokens, targets);
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
    write_file("c.txt", 7 * T, 0);
    {
        spw_data_options o = options_for("*.[bt]*");
        d = open_with(&o);
        assert_string_equal(spw_data_formats(d), "1 llm.c u16, 1 llm.c u32, 1 text");
        assert_int_equal(spw_data_file_count(d), 3);
        assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 5 + 5 + 6);
        spw_data_close(d);
        o = options_for("a.bin");
        o.format = SPW_DATA_TEXT; /* bytes on request */
        d = open_with(&o);
        assert_int_equal(spw_data_tokens(d), 1024 + 2 * (5 * T + 1));
        spw_data_close(d);
    }
}

/* A window of T + 1 tokens that is many blocks long. */
static void
test_long_window(void **state)
{
    enum { LONG = 20000 };
    spw_data_options o = options_for("a.bin");
    int32_t *tokens = malloc(2 * LONG * sizeof *tokens), *targets = tokens + LONG;
    spw_data *d;
    (void)state;
    write_llmc("a.bin", 20240801, 7, 2 * LONG + 1, 5);
    o.seq_length = LONG;
    d = open_with(&o);
    fill(d, SPW_SPLIT_TRAIN, 1, 1, tokens, targets);
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
        write_megatron("set", types[k].code, types[k].width, types[k].base, lengths, 4, documents, 4);
        for (int name = 0; name < 4; name++) {
            spw_data_options o = options_for(names[name]);
            spw_data *d = open_with(&o);
            uint64_t sum = 0;
            assert_string_equal(spw_data_formats(d), types[k].name);
            assert_int_equal(spw_data_file_count(d), 1);
            assert_int_equal(spw_data_tokens(d), 51);
            assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 5);
            for (uint64_t p = 0; p < 5; p++) {
                fill(d, SPW_SPLIT_TRAIN, p, 1, tokens, targets);
                sum += (uint64_t)tokens[0] - types[k].base;
                assert_int_equal(targets[T - 1], tokens[0] + T);
            }
            assert_int_equal(sum, 0 + 10 + 20 + 30 + 40);
            spw_data_close(d);
        }
    }
    write_megatron("set", 4, 4, (uint64_t)-20, lengths, 4, documents, 4);
    {
        spw_data_options o = options_for("set");
        spw_error err = {0};
        spw_data *d = open_with(&o);
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
encode_words(void *ctx, const char *text, uint64_t bytes, int32_t *tokens, uint64_t max, uint64_t *count,
             spw_error *err)
{
    unsigned *calls = ctx;
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
    d = open_with(&o);
    n = spw_data_sequences(d, SPW_SPLIT_VALIDATION);
    assert_true(n < max);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 1);
    fill(d, SPW_SPLIT_TRAIN, 0, 1, tokens, targets);
    fill(d, SPW_SPLIT_VALIDATION, 0, n, tokens + 1, targets + 1);
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
    spw_data_options o = options_for("a.jsonl");
    int32_t tokens[64], targets[64];
    spw_data *d;
    (void)state;
    write_text("a.jsonl", "{\"id\": 1, \"text\": \"a\\u00e9\\\"b\"}\n\n  {\"text\":\"second\\tline\"}\r\n "
                          "\t\r\n{\"text\": \"\", \"id\": 123456789012345678901234567890}\n"
                          "{\"text\": \"last\"}");
    for (size_t i = 0; i + 1 < sizeof text - 1; i++) {
        tokens[i] = (unsigned char)text[i];
        targets[i] = (unsigned char)text[i + 1];
    }
    for (int again = 0; again < 2; again++) /* made, then found in the cache */
        assert_stream(&o, tokens, targets, sizeof text - 2);
    d = open_with(&o);
    assert_string_equal(spw_data_formats(d), "jsonl");
    spw_data_close(d);
    o.text_field = "content";
    refuse(&o, SPW_ECORRUPT, "a.jsonl: line 1 (byte 0)", "\"content\"", "\"id\", \"text\"", NULL);
    o.text_field = "id";
    refuse(&o, SPW_ECORRUPT, "field \"id\" is not a string", NULL);
}

/* documents: mask hides the first token of each document, and nothing else; packed hides nothing. In every format. */
static void
test_document_mask(void **state)
{
    spw_data_options o = options_for("d.jsonl");
    (void)state;
    write_text("d.jsonl", "{\"text\":\"ab\"}\n{\"text\":\"c\"}\n{\"text\":\"\"}\n{\"text\":\"de\"}\n");
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
        write_llmc("d.bin", 20240520, 1, 8, 5);
        o = options_for("d.bin");
        o.documents = SPW_DOCUMENTS_MASK;
        o.end_of_text_set = true;
        o.end_of_text = 8;
        assert_stream(&o, tokens, masked, 7);
        o.end_of_text_set = false;
        write_llmc("d.bin", 20240520, 1, 4, 50255);
        assert_stream(&o, (int32_t[]){50255, 50256, 50257}, (int32_t[]){50256, -1, 50258}, 3);
        write_llmc("d.bin", 20240801, 7, 4, 127999);
        assert_stream(&o, (int32_t[]){127999, 128000, 128001}, (int32_t[]){128000, -1, 128002}, 3);
    }
    { /* Megatron: by its index, with empty documents and documents of several sequences */
        static const uint32_t lengths[] = {2, 0, 3, 1, 0, 2};
        static const uint64_t documents[] = {0, 0, 1, 2, 3, 5, 6};
        static const int32_t tokens[] = {10, 11, 12, 13, 14, 15, 16};
        static const int32_t masked[] = {11, -1, 13, 14, -1, -1, 17};
        write_megatron("m", 8, 2, 10, lengths, 6, documents, 7);
        o = options_for("m");
        o.documents = SPW_DOCUMENTS_MASK;
        assert_stream(&o, tokens, masked, 7);
        o.seq_length = 7; /* and in one window */
        {
            spw_data *d = open_with(&o);
            int32_t got[7], next[7];
            fill(d, SPW_SPLIT_TRAIN, 0, 1, got, next);
            assert_memory_equal(next, masked, sizeof masked);
            spw_data_close(d);
        }
    }
}

/* A prompt is read and gives no loss; its first answer's token does. With an encoder, and the token that ends texts. */
static void
test_prompt_mask(void **state)
{
    unsigned calls = 0;
    spw_data_options o = options_for("p.jsonl");
    (void)state;
    write_text("p.jsonl", "{\"prompt\":\"ab\",\"completion\":\"cd\"}\n{\"completion\":\"\",\"prompt\":\"e\"}\n");
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
    write_text("p.jsonl", "{\"prompt\":\"ab cd\",\"completion\":\"cd\"}\n"); /* another file in its place */
    assert_stream(&o, (int32_t[]){1002, 1003, 1002}, (int32_t[]){-1, 1002, 7}, 3);
    assert_true(calls > 0);
    write_text("p.jsonl", "{\"prompt\":\"ab\",\"completion\":\"cd\"}\n{\"prompt\":\"a!\",\"completion\":\"\"}\n");
    refuse(&o, SPW_ECORRUPT, "p.jsonl: line 2 (byte 34)", "no word for !", NULL);
    o.vocab = 1002;
    o.prompt_field = "";
    refuse(&o, SPW_ECORRUPT, "p.jsonl: line 1 (byte 0): token 1002", "vocabulary of 1002", NULL);
}

/* Encoded text in pieces gives the tokens of the whole; a file of many megabytes takes no more room than a piece. */
static void
test_encoded_text(void **state)
{
    enum { WORDS = 900000 };
    static int32_t tokens[4096], targets[4096];
    unsigned calls = 0;
    spw_data_options o = options_for("w.txt");
    FILE *f = fopen(path_of("w.txt"), "wb");
    spw_data *d;
    uint64_t n = 0;
    (void)state;
    assert_non_null(f);
    for (int i = 0; i < WORDS; i++) /* nine words, and a line's end behind a letter or behind a full stop */
        fputs(i % 10 < 9 ? "word " + (i % 10 == 8 ? 4 : 0) : i % 20 == 9 ? "x\n" : ".\n", f), n++;
    fclose(f);
    o.encode = encode_words;
    o.encode_ctx = &calls;
    o.seq_length = 11;
    d = open_with(&o);
    assert_true(calls >= 3);
    assert_string_equal(spw_data_formats(d), "text");
    for (uint64_t p = 0; p < 2000; p++) {
        fill(d, SPW_SPLIT_TRAIN, p, 1, tokens, targets);
        for (int t = 0; t < 11; t++)
            assert_true(tokens[t] == 999 || (tokens[t] >= 1001 && tokens[t] <= 1006));
    }
    spw_data_close(d);
    write_text("w.txt", "one two\nthree");
    assert_stream(&o, (int32_t[]){1003, 1004, 999}, (int32_t[]){1004, 999, 1005}, 3);
}

/* ---------------------------------------------------------------- refusals */

/* Overwrites bytes of a file. */
static void
patch(const char *name, long offset, uint64_t x, int bytes)
{
    FILE *f = fopen(path_of(name), "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, offset, SEEK_SET), 0);
    put(f, x, bytes);
    fclose(f);
}

/* No match, empty files and files that are too short, each with what a person needs to know. */
static void
test_errors(void **state)
{
    spw_data *d = NULL;
    spw_error err = {0};
    (void)state;
    write_file("empty", 0, 0);
    write_file("short", T, 0);
    assert_int_equal(open_data(&d, "*.none", 0.1, 1, &err), SPW_ENOENT);
    assert_non_null(strstr(err.message, ".none"));
    assert_int_equal(open_data(&d, "empty", 0.1, 1, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "empty"));
    assert_int_equal(open_data(&d, "*", 0.1, 1, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "10 bytes"));
    assert_non_null(strstr(err.message, "needs 11"));
}

static void
test_refused_llmc(void **state)
{
    spw_data_options o = options_for("a.bin");
    int32_t tokens[T], targets[T];
    spw_error err = {0};
    spw_data *d;
    (void)state;
    write_llmc("a.bin", 20240520, 1, 31, 0);
    patch("a.bin", 0, 1234, 4);
    refuse(&o, SPW_ECORRUPT, "a.bin", "magic at offset 0 is 1234", "no .idx", NULL);
    o.format = SPW_DATA_LLMC;
    refuse(&o, SPW_ECORRUPT, "a.bin", "magic at offset 0 is 1234", NULL);
    o.format = SPW_DATA_AUTO;
    patch("a.bin", 0, 20240326, 4);
    refuse(&o, SPW_EUNSUPPORTED, "a.bin is llm.c's weights", "20240326", NULL);
    patch("a.bin", 0, 20240520, 4);
    patch("a.bin", 4, 7, 4);
    refuse(&o, SPW_EUNSUPPORTED, "a.bin", "version at offset 4 is 7", NULL);
    patch("a.bin", 4, 1, 4);
    patch("a.bin", 8, 32, 4);
    refuse(&o, SPW_ECORRUPT, "a.bin", "token count at offset 8 is 32", "1088 bytes", "it has 1086", "truncated", NULL);
    patch("a.bin", 8, 30, 4);
    refuse(&o, SPW_ECORRUPT, "token count at offset 8 is 30", "it has 1086", NULL);
    patch("a.bin", 8, 0x80000001, 4);
    refuse(&o, SPW_ECORRUPT, "token count at offset 8 is negative", NULL);
    patch("a.bin", 8, 31, 4);
    assert_int_equal(truncate(path_of("a.bin"), 1000), 0);
    refuse(&o, SPW_ECORRUPT, "a.bin has 1000 bytes", NULL);
    assert_int_equal(truncate(path_of("a.bin"), 0), 0);
    refuse(&o, SPW_ECORRUPT, "a.bin", NULL);
    /* A token that is too large is found when its window is read; a file that was cut meanwhile too. */
    write_llmc("a.bin", 20240520, 1, T + 1, 0);
    patch("a.bin", 1024 + 2 * 4, 300, 2);
    o.vocab = 256;
    d = open_with(&o);
    assert_int_equal(spw_data_fill(d, SPW_SPLIT_TRAIN, 0, 1, tokens, targets, &err), SPW_ECORRUPT);
    assert_non_null(strstr(err.message, "a.bin: token 300 at position 4 (byte 1032)"));
    assert_non_null(strstr(err.message, "vocabulary of 256"));
    assert_int_equal(truncate(path_of("a.bin"), 1030), 0);
    assert_int_equal(spw_data_fill(d, SPW_SPLIT_TRAIN, 0, 1, tokens, targets, &err), SPW_ECORRUPT);
    assert_non_null(strstr(err.message, "a.bin ends at byte 1030"));
    spw_data_close(d);
}

static void
test_refused_megatron(void **state)
{
    static const uint32_t lengths[] = {12, 20, 19};
    static const uint64_t documents[] = {0, 2, 3};
    spw_data_options o = options_for("m");
    (void)state;
    for (int k = 0; k < 14; k++) {
        const long pointers = 34 + 12, docs = pointers + 24;
        write_megatron("m", 4, 4, 0, lengths, 3, documents, 3);
        switch (k) {
        case 0: patch("m.idx", 3, 'X', 1), refuse(&o, SPW_ECORRUPT, "m.idx", "offset 0", NULL); break;
        case 1: patch("m.idx", 9, 2, 8), refuse(&o, SPW_EUNSUPPORTED, "m.idx", "version at offset 9 is 2", NULL); break;
        case 2: patch("m.idx", 17, 7, 1), refuse(&o, SPW_EUNSUPPORTED, "dtype at offset 17 is 7", "float", NULL); break;
        case 3: patch("m.idx", 17, 9, 1), refuse(&o, SPW_ECORRUPT, "dtype at offset 17 is 9", NULL); break;
        case 4: patch("m.idx", 18, 1ull << 60, 8), refuse(&o, SPW_ECORRUPT, "m.idx", "offset 18", NULL); break;
        case 5: patch("m.idx", 26, UINT64_MAX, 8), refuse(&o, SPW_ECORRUPT, "m.idx", "offset 26", NULL); break;
        case 6: patch("m.idx", 34 + 4, 0xffffffff, 4), refuse(&o, SPW_ECORRUPT, "sequence 1 at offset 38", NULL); break;
        case 7:
            patch("m.idx", pointers + 8, 44, 8);
            refuse(&o, SPW_ECORRUPT, "pointer of sequence 1 at offset 54 is 44", "end at 48", NULL);
            break;
        case 8:
            assert_int_equal(truncate(path_of("m.bin"), 200), 0);
            refuse(&o, SPW_ECORRUPT, "m.idx: sequence 2 (pointer at offset 62, length at 42)", "ends at byte 204",
                   "m.bin", "which has 200", NULL);
            break;
        case 9: patch("m.idx", docs, 1, 8), refuse(&o, SPW_ECORRUPT, "document index 0 at offset 70", NULL); break;
        case 10: patch("m.idx", docs + 8, 4, 8), refuse(&o, SPW_ECORRUPT, "document index 1 at offset 78", NULL); break;
        case 11: patch("m.idx", docs + 16, 2, 8), refuse(&o, SPW_ECORRUPT, "document index 2", NULL); break;
        case 12:
            assert_int_equal(truncate(path_of("m.idx"), docs + 23), 0);
            refuse(&o, SPW_ECORRUPT, "m.idx", "truncated", NULL);
            break;
        default:
            assert_int_equal(truncate(path_of("m.idx"), docs + 27), 0);
            refuse(&o, SPW_EUNSUPPORTED, "m.idx", "multimodal", NULL);
        }
    }
    write_megatron("m", 4, 4, 0, lengths, 3, documents, 3);
    unlink(path_of("m.bin"));
    refuse(&o, SPW_ENOENT, "m.bin", NULL);
    o = options_for("x.idx");
    write_text("x.idx", "something else");
    refuse(&o, SPW_ECORRUPT, "x.idx", "MMIDIDX", NULL);
}

static void
test_refused_others(void **state)
{
    spw_data_options o = options_for("x");
    (void)state;
    write_bytes("x", "\x1f\x8b\x08 and so on, long enough", 24);
    refuse(&o, SPW_EUNSUPPORTED, "/x is compressed with gzip", NULL);
    write_text("x", "PAR1 and so on, long enough");
    refuse(&o, SPW_EUNSUPPORTED, "/x is a Parquet table", NULL);
    o.format = SPW_DATA_TEXT;
    spw_data_close(open_with(&o));
    o = options_for("l.jsonl");
    write_text("l.jsonl", "{\"text\": \"fine\"}\n{\"text\": \"cut\n");
    refuse(&o, SPW_ECORRUPT, "l.jsonl: line 2 (byte 17)", "not JSON", NULL);
    write_text("l.jsonl", "{\"text\": \"fine\"}\n[1]\n");
    refuse(&o, SPW_ECORRUPT, "l.jsonl: line 2 (byte 17)", "not a JSON object", NULL);
    write_text("l.jsonl", "{\"text\": \"a\", \"text\": \"b\"}\n");
    refuse(&o, SPW_ECORRUPT, "l.jsonl: line 1", NULL);
    write_text("l.jsonl", "\n\n");
    refuse(&o, SPW_EINVAL, "l.jsonl", "0 tokens", NULL);
    o.end_of_text_set = true;
    o.end_of_text = 300;
    o.vocab = 256;
    refuse(&o, SPW_EINVAL, "token 300", "256", NULL);
    o.end_of_text_set = false;
    assert_int_equal(truncate(path_of("l.jsonl"), 65 << 20), 0); /* two line ends, and a line of zeros */
    refuse(&o, SPW_EUNSUPPORTED, "l.jsonl: line 3 (byte 2) has more than 64 MiB", NULL);
    o = options_for("fifo");
    assert_int_equal(mkfifo(path_of("fifo"), 0600), 0);
    refuse(&o, SPW_EUNSUPPORTED, "fifo is not a file", NULL);
    o = options_for("folder");
    assert_int_equal(mkdir(path_of("folder"), 0700), 0);
    refuse(&o, SPW_EINVAL, "folder: only folders", NULL);
}

/* What lies in the cache and is not what was written there is made anew; what cannot be made says where. */
static void
test_cache(void **state)
{
    static const char text[] = "words\nof\ntext\n";
    spw_data_options o = options_for("c.jsonl");
    int32_t tokens[32], targets[32];
    glob_t found;
    (void)state;
    write_text("c.jsonl", "{\"text\":\"words\"}\n{\"text\":\"of\"}\n{\"text\":\"text\"}\n");
    for (size_t i = 0; i + 1 < sizeof text - 1; i++) {
        tokens[i] = (unsigned char)text[i];
        targets[i] = (unsigned char)text[i + 1];
    }
    for (int damage = 0; damage < 7; damage++) {
        static const long offsets[] = {0, 0, 8, 12, 16, 24};
        assert_stream(&o, tokens, targets, sizeof text - 2);
        assert_int_equal(glob(path_of("cache/*"), 0, NULL, &found), 0);
        assert_int_equal(found.gl_pathc, 1); /* and no parts */
        if (damage < 6)
            patch(found.gl_pathv[0] + strlen(dir) + 1, offsets[damage], 0x55, 1);
        else
            assert_int_equal(truncate(found.gl_pathv[0], 70), 0);
        globfree(&found);
    }
    assert_stream(&o, tokens, targets, sizeof text - 2);
    o.cache_dir = path_of("c.jsonl");
    refuse(&o, SPW_EINVAL, "data.cache_dir", "c.jsonl is not a folder", NULL);
}

/* Fills from several threads give what one thread gives. */
typedef struct filler {
    const spw_data *d;
    uint64_t first;
    int32_t tokens[100][T], targets[100][T];
} filler;

static void *
fill_part(void *arg)
{
    filler *f = arg;
    fill(f->d, SPW_SPLIT_TRAIN, f->first, 100, f->tokens[0], f->targets[0]);
    return NULL;
}

static void
test_threads(void **state)
{
    static filler alone[4], together[4];
    static const uint32_t lengths[] = {300, 200, 500, 100};
    static const uint64_t documents[] = {0, 1, 2, 3, 4};
    pthread_t threads[4];
    spw_data_options o = options_for("m");
    spw_data *d;
    (void)state;
    write_megatron("m", 4, 4, 0, lengths, 4, documents, 5);
    o.documents = SPW_DOCUMENTS_MASK;
    d = open_with(&o);
    for (int i = 0; i < 4; i++) {
        alone[i] = together[i] = (filler){.d = d, .first = (uint64_t)i * 100};
        fill_part(&alone[i]);
    }
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, fill_part, &together[i]), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_memory_equal(alone, together, sizeof alone);
    spw_data_close(d);
}

/* ---------------------------------------------------------------- memory */

/* A stream of 8 GB opens at once, and neither it nor windows all over it stay in memory. */
static void
test_large(void **state)
{
    enum { COUNT = 2000000000 };
    spw_data_options o = options_for("big.bin");
    int32_t tokens[1024], targets[1024];
    uint64_t rss, n;
    spw_data *d;
    (void)state;
    write_llmc("big.bin", 20240801, 7, 0, 0);
    patch("big.bin", 8, COUNT, 4);
    if (truncate(path_of("big.bin"), 1024 + 4ll * COUNT) != 0) {
        int refusal = errno;
        unlink(path_of("big.bin"));
        assert_int_equal(refusal, EFBIG); /* only a file system that has no files of that size */
        skip();
    }
    patch("big.bin", 1024 + 4ll * (COUNT - 1), 77, 4);
    o.seq_length = 1024;
    for (uint64_t try = 0, begin = spw_now_ns(); try == 0 || spw_now_ns() - begin > 1000000000; try++) {
        assert_true(try < 5); /* a machine that does other things meanwhile is not at it five times */
        begin = spw_now_ns();
        spw_data_close(open_with(&o));
    }
    rss = spw_process_rss_bytes();
    d = open_with(&o);
    assert_int_equal(spw_data_tokens(d), COUNT);
    n = spw_data_sequences(d, SPW_SPLIT_TRAIN);
    assert_int_equal(n, (COUNT - 1) / 1024);
    for (uint64_t p = 0; p < 2000; p++)
        fill(d, SPW_SPLIT_TRAIN, p * 977, 1, tokens, targets);
    assert_true(spw_data_memory_bytes(d) < 64 << 10);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(spw_process_rss_bytes() < rss + (1 << 20));
#else
    (void)rss;
#endif
    spw_data_close(d);
}

/* More files than are kept open. */
static void
test_many_files(void **state)
{
    spw_data_options o;
    int32_t tokens[T], targets[T];
    bool seen[200] = {0};
    spw_data *d;
    (void)state;
    for (int i = 0; i < 200; i++) {
        char name[16];
        snprintf(name, sizeof name, "f%03d", i);
        write_file(name, T + 1, i);
    }
    o = options_for("f*");
    d = open_with(&o);
    assert_true(spw_data_memory_bytes(d) < 128 << 10);
    for (uint64_t p = 0; p < 200; p++) {
        fill(d, SPW_SPLIT_TRAIN, p, 1, tokens, targets);
        seen[tokens[0]] = true;
    }
    for (int i = 0; i < 200; i++)
        assert_true(seen[i]);
    spw_data_close(d);
}

/* Every allocation and every call into the system fails in turn: an error, no leak, no half-made cache; then it works. */
static void
test_faults(void **state)
{
    static const uint32_t lengths[] = {12, 20, 19};
    static const uint64_t documents[] = {0, 2, 3};
    static const char *const names[] = {"a.jsonl", "m", "b.bin"};
    (void)state;
    write_text("a.jsonl", "{\"text\": \"some words of text\"}\n{\"text\": \"and more of them\"}\n");
    write_megatron("m", 4, 4, 0, lengths, 3, documents, 3);
    write_llmc("b.bin", 20240520, 1, 31, 0);
    for (int k = 0; k < 6; k++) {
        bool calls = k % 2 == 1, through = false;
        spw_data_options o = options_for(names[k / 2]);
        o.documents = SPW_DOCUMENTS_MASK;
        for (unsigned i = 1; !through; i++) {
            long live = spw_test_live_allocs();
            int32_t tokens[T], targets[T];
            spw_error err = {0};
            spw_data *d = NULL;
            spw_status st;
            glob_t parts;
            tiny_dir_remove(o.cache_dir);
            calls ? spw_test_fail_call(i) : spw_test_fail_alloc(i);
            st = spw_data_open(&d, &o, &err);
            if (st == SPW_OK)
                st = spw_data_fill(d, SPW_SPLIT_TRAIN, 1, 1, tokens, targets, &err);
            through = calls ? !spw_test_call_fired() : !spw_test_fault_fired();
            spw_test_fail_call(0);
            spw_test_fail_alloc(0);
            assert_true((st == SPW_OK) == through);
            if (!through)
                assert_true(err.message[0] != '\0' && err.status == st);
            assert_int_equal(glob(path_of("cache/*.part*"), 0, NULL, &parts), GLOB_NOMATCH);
            spw_data_close(d);
            assert_int_equal(spw_test_live_allocs(), live);
            assert_true(i < 200);
        }
    }
}

/* Pages of a file that are in the page cache. */
static uint32_t
cached_pages(int fd, size_t bytes)
{
    unsigned char seen[256];
    uint32_t count = 0;
    void *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(map != MAP_FAILED && bytes <= sizeof seen * 4096);
    assert_int_equal(mincore(map, bytes, seen), 0);
    for (size_t i = 0; i < bytes / 4096; i++)
        count += seen[i] & 1;
    munmap(map, bytes);
    return count;
}

/* What is asked for comes from disk while nobody waits for it, and no more than that. */
static void
test_asked_ahead(void **state)
{
    enum { LONG = 8192, PAGES = 256, WINDOWS = 4 };
    static unsigned char bytes[PAGES * 4096];
    static int32_t tokens[2][WINDOWS * LONG], targets[WINDOWS * LONG];
    spw_data_options o = options_for("f");
    spw_data *d;
    uint32_t before, after = 0;
    int fd;
    (void)state;
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)(i * 2654435761u >> 24);
    write_bytes("f", bytes, sizeof bytes);
    o.seq_length = LONG;
    d = open_with(&o);
    fill(d, SPW_SPLIT_TRAIN, 5, WINDOWS, tokens[0], targets);
    fd = open(path_of("f"), O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fsync(fd), 0);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    before = cached_pages(fd, sizeof bytes);
    if (before < PAGES / 8) {
        spw_data_ask(d, SPW_SPLIT_TRAIN, 5, WINDOWS);
        for (int i = 0; i < 5000 && after < WINDOWS * LONG / 4096; i++) {
            spw_sleep_ns(1000000);
            after = cached_pages(fd, sizeof bytes) - before;
        }
        assert_in_range(after, WINDOWS * LONG / 4096, WINDOWS * (LONG / 4096 + 2));
    }
    fill(d, SPW_SPLIT_TRAIN, 5, WINDOWS, tokens[1], targets);
    assert_memory_equal(tokens[0], tokens[1], sizeof tokens[0]);
    close(fd);
    spw_data_close(d);
    if (before >= PAGES / 8)
        skip(); /* the file system is memory: nothing can be brought */
}

int
main(void)
{
#define IN_DIR(f) cmocka_unit_test_setup_teardown(f, make_dir, remove_dir)
    const struct CMUnitTest tests[] = {
        IN_DIR(test_order),
        cmocka_unit_test(test_permutation),
        IN_DIR(test_ranks_and_resume),
        IN_DIR(test_split),
        IN_DIR(test_split_of_many),
        cmocka_unit_test(test_shares),
        IN_DIR(test_sources),
        IN_DIR(test_llmc),
        IN_DIR(test_long_window),
        IN_DIR(test_megatron),
        IN_DIR(test_jsonl),
        IN_DIR(test_document_mask),
        IN_DIR(test_prompt_mask),
        IN_DIR(test_encoded_text),
        IN_DIR(test_errors),
        IN_DIR(test_refused_llmc),
        IN_DIR(test_refused_megatron),
        IN_DIR(test_refused_others),
        IN_DIR(test_cache),
        IN_DIR(test_threads),
        IN_DIR(test_large),
        IN_DIR(test_many_files),
        IN_DIR(test_faults),
        IN_DIR(test_asked_ahead),
    };
    return cmocka_run_group_tests_name("data", tests, NULL, NULL);
}
