/*
 * Training data: every window once per epoch in an order that only seed and position decide, shares of sources by weight, the same
 * whoever reads it; and what fails in the system leaves nothing behind.
 */
#include "data_internal.h"
#include "lib_dataset.h"
#include "lib_tiny.h"
#include <glob.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

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
    dataset_write_windows("a.txt", 50 * T + 1, 0);
    dataset_write_windows("b.txt", 30 * T + 5, 100);
    dataset_write_windows("c.txt", 3, 200); /* too short for a window */
    assert_int_equal(dataset_try(&d, "*.txt", 0.1, 5, NULL), SPW_OK);
    assert_int_equal(dataset_try(&again, "*.txt", 0.1, 5, NULL), SPW_OK);
    assert_string_equal(spw_data_formats(d), "text");
    n = spw_data_sequences(d, SPW_SPLIT_TRAIN);
    held = spw_data_sequences(d, SPW_SPLIT_VALIDATION);
    assert_int_equal(n + held, 80);
    assert_int_equal(held, 8);
    for (int epoch = 0; epoch < 2; epoch++) {
        memset(seen, 0, sizeof seen);
        for (uint64_t i = 0; i < n; i++) {
            dataset_fill(d, SPW_SPLIT_TRAIN, (uint64_t)epoch * n + i, 1, tokens, targets);
            dataset_fill(again, SPW_SPLIT_TRAIN, (uint64_t)epoch * n + i, 1, other, targets);
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
        dataset_fill(d, SPW_SPLIT_VALIDATION, i, 1, tokens, targets);
        assert_true((tokens[0] >= 45 && tokens[0] < 50) || (tokens[0] >= 127 && tokens[0] < 130));
    }
    spw_data_close(again);
    assert_int_equal(dataset_try(&again, "*.txt", 0.1, 6, NULL), SPW_OK);
    for (uint64_t i = 0; i < n; i++) {
        dataset_fill(again, SPW_SPLIT_TRAIN, i, 1, tokens, targets);
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
    dataset_write_windows("a.txt", 90 * T + 1, 0);
    dataset_write_windows("b.txt", 40 * T + 1, 100);
    for (int mixed = 0; mixed < 2; mixed++) {
        spw_data_options o = dataset_options("*.txt");
        spw_data *d;
        sources[0] = (spw_data_source){dataset_path("a.txt"), 2};
        sources[1] = (spw_data_source){dataset_path("b.txt"), 1};
        if (mixed) {
            o.pattern_count = 0;
            o.sources = sources;
            o.source_count = 2;
        }
        o.seed = 3;
        d = dataset_open(&o);
        dataset_fill(d, SPW_SPLIT_TRAIN, 0, STEPS * BATCH, all[0], targets[0]);
        for (uint64_t world = 1; world <= BATCH; world++) {
            uint64_t each = BATCH / world;
            if (BATCH % world != 0)
                continue;
            for (uint64_t step = 0; step < STEPS; step++) {
                for (uint64_t rank = world; rank-- > 0;)
                    dataset_fill(d, SPW_SPLIT_TRAIN, step * BATCH + rank * each, each, some[step * BATCH + rank * each],
                                 targets[0]);
            }
            assert_memory_equal(all, some, sizeof all);
        }
        spw_data_close(d);
        d = dataset_open(&o);
        dataset_fill(d, SPW_SPLIT_TRAIN, 17, 20, some[0], targets[0]);
        assert_memory_equal(all[17], some[0], 20 * sizeof all[0]);
        spw_data_close(d);
    }
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
    spw_data_options o = dataset_options("none");
    spw_data_source sources[3];
    int seen[256] = {0};
    uint64_t had[3] = {0}, held[3] = {0};
    spw_data *d;
    (void)state;
    dataset_write_windows("a.txt", 50 * T + 1, 0);
    dataset_write_windows("b.txt", 20 * T + 1, 100);
    dataset_write_windows("b2.txt", 10 * T + 1, 120);
    dataset_write_windows("c.txt", 2 * T + 1, 200);
    sources[0] = (spw_data_source){dataset_path("a.txt"), 5};
    sources[1] = (spw_data_source){dataset_path("b*.txt"), 4};
    sources[2] = (spw_data_source){dataset_path("c.txt"), 1};
    o.pattern_count = 0;
    o.sources = sources;
    o.source_count = 3;
    o.validation_split = 0.1;
    d = dataset_open(&o);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 45 + 27 + 1);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_VALIDATION), 5 + 3 + 1);
    dataset_fill(d, SPW_SPLIT_TRAIN, 0, 90, tokens[0], targets[0]);
    for (int i = 0; i < 90; i++) {
        had[tokens[i][0] / 100]++;
        seen[tokens[i][0]]++;
    }
    assert_int_equal(had[0], 45); /* exactly one epoch of a */
    for (int w = 0; w < 45; w++)
        assert_int_equal(seen[w], 1);
    assert_int_equal(had[1], 36);
    assert_int_equal(had[2], 9);
    dataset_fill(d, SPW_SPLIT_VALIDATION, 0, 20, tokens[0], targets[0]);
    for (int i = 0; i < 20; i++)
        held[tokens[i][0] / 100]++;
    assert_int_equal(held[0], 10);
    assert_int_equal(held[1], 8);
    assert_int_equal(held[2], 2);
    spw_data_close(d);
    o.validation_split = 0;
    sources[2] = (spw_data_source){dataset_path("c.txt"), -1};
    dataset_refuse(&o, SPW_EINVAL, "weight of ", "c.txt", NULL);
    dataset_write_text("short.txt", "abc");
    sources[2] = (spw_data_source){dataset_path("short.txt"), 1};
    dataset_refuse(&o, SPW_EINVAL, "data.sources", "short.txt", "3 bytes", NULL);
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
    dataset_fill(f->d, SPW_SPLIT_TRAIN, f->first, 100, f->tokens[0], f->targets[0]);
    return NULL;
}

static void
test_threads(void **state)
{
    static filler alone[4], together[4];
    static const uint32_t lengths[] = {300, 200, 500, 100};
    static const uint64_t documents[] = {0, 1, 2, 3, 4};
    pthread_t threads[4];
    spw_data_options o = dataset_options("m");
    spw_data *d;
    (void)state;
    dataset_write_megatron("m", 4, 4, 0, lengths, 4, documents, 5);
    o.documents = SPW_DOCUMENTS_MASK;
    d = dataset_open(&o);
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

/* Every allocation and every call into the system fails in turn: an error, no leak, no half-made cache; then it works. */
static void
test_faults(void **state)
{
    static const uint32_t lengths[] = {12, 20, 19};
    static const uint64_t documents[] = {0, 2, 3};
    static const char *const names[] = {"a.jsonl", "m", "b.bin"};
    (void)state;
    dataset_write_text("a.jsonl", "{\"text\": \"some words of text\"}\n{\"text\": \"and more of them\"}\n");
    dataset_write_megatron("m", 4, 4, 0, lengths, 3, documents, 3);
    dataset_write_llmc("b.bin", 20240520, 1, 31, 0);
    for (int k = 0; k < 6; k++) {
        bool calls = k % 2 == 1, through = false;
        spw_data_options o = dataset_options(names[k / 2]);
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
                assert_true(err.message[0] != '\0' && err.status == st && strstr(err.message, "changed while") == NULL);
            assert_int_equal(glob(dataset_path("cache/*.part*"), 0, NULL, &parts), GLOB_NOMATCH);
            spw_data_close(d);
            assert_int_equal(spw_test_live_allocs(), live);
            assert_true(i < 200);
        }
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        IN_DIR(test_order),
        cmocka_unit_test(test_permutation),
        IN_DIR(test_ranks_and_resume),
        cmocka_unit_test(test_shares),
        IN_DIR(test_sources),
        IN_DIR(test_threads),
        IN_DIR(test_faults),
    };
    return cmocka_run_group_tests_name("data", tests, NULL, NULL);
}
