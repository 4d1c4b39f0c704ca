/*
 * Which path a chunk goes to, as numbers alone: shares by weight, limits, and what a refusal says.
 */
#include "runtime_internal.h"
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* Printed; SPW_SEED gives another. Never 0, for draw(). */
static uint64_t
seed_of_run(void)
{
    const char *text = getenv("SPW_SEED");
    uint64_t seed = text != NULL ? strtoull(text, NULL, 10) : 20240117;
    print_message("SPW_SEED=%" PRIu64 "\n", seed);
    return seed * 2 + 1;
}

static uint64_t
draw(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state >> 11;
}

enum { STRIPE_CHUNKS = 600 };

/* Chunks of one size with a short one now and then, as units have them, or of any sizes; some are not on nvme. */
static uint32_t
draw_chunks(uint64_t *seed, uint64_t bytes[STRIPE_CHUNKS], uint64_t *largest, uint64_t *total)
{
    uint32_t n = 1 + (uint32_t)(draw(seed) % STRIPE_CHUNKS), kind = (uint32_t)(draw(seed) % 3);
    *largest = *total = 0;
    for (uint32_t i = 0; i < n; i++) {
        bytes[i] = 4096 * (kind == 0 ? 64 : kind == 1 && draw(seed) % 4 ? 64 : 1 + draw(seed) % 64);
        bytes[i] = kind == 2 && draw(seed) % 8 == 0 ? 0 : bytes[i];
        *largest = bytes[i] > *largest ? bytes[i] : *largest;
        *total += bytes[i];
    }
    return n;
}

static uint32_t
draw_paths(uint64_t *seed, stripe_path paths[SPW_PATHS_MAX], double *weights)
{
    uint32_t n = 1 + (uint32_t)(draw(seed) % SPW_PATHS_MAX);
    *weights = 0;
    for (uint32_t i = 0; i < n; i++) {
        double w = draw(seed) % 3 == 0 ? 1 : (double)(1 + draw(seed) % 10000) * (draw(seed) % 4 == 0 ? 1 : 1e-3);
        paths[i] = (stripe_path){.name = "p", .weight = w};
        *weights += w;
    }
    return n;
}

/*
 * Random weights and sizes: after every chunk each path is within one (largest) chunk of its share, so every window of
 * consecutive chunks is within two; what is reported is what was assigned.
 */
static void
test_stripe_shares(void **state)
{
    uint64_t seed = seed_of_run();
    (void)state;
    for (int round = 0; round < 2000; round++) {
        static uint64_t bytes[STRIPE_CHUNKS];
        static uint32_t to[STRIPE_CHUNKS];
        stripe_path paths[SPW_PATHS_MAX];
        uint64_t largest, total, sum[SPW_PATHS_MAX] = {0}, done = 0;
        double weights;
        uint32_t n = draw_chunks(&seed, bytes, &largest, &total), path_count = draw_paths(&seed, paths, &weights);
        assert_int_equal(spw__stripe(paths, path_count, bytes, n, to, NULL), SPW_OK);
        for (uint32_t i = 0; i < n; i++) {
            assert_true(to[i] < path_count);
            assert_true(bytes[i] > 0 || to[i] == 0);
            sum[to[i]] += bytes[i];
            done += bytes[i];
            for (uint32_t p = 0; p < path_count; p++) {
                double off = (double)sum[p] - paths[p].weight / weights * (double)done;
                if (fabs(off) > (double)largest * (1 + 1e-9))
                    fail_msg("round %d, chunk %u of %u, path %u of %u: %g chunks off", round, i, n, p, path_count,
                             off / (double)largest);
            }
        }
        assert_memory_equal(&done, &total, sizeof done);
        for (uint32_t p = 0; p < path_count; p++)
            assert_true(paths[p].bytes == sum[p]);
    }
}

/* With limits: never more than a limit; refused only when there is less room than the chunks and one more per path; and
 * paths below their limits share the rest by weight, give or take the chunk that each limit may leave over. */
static void
test_stripe_limits(void **state)
{
    uint64_t seed = seed_of_run();
    uint32_t refused = 0;
    (void)state;
    for (int round = 0; round < 2000; round++) {
        static uint64_t bytes[STRIPE_CHUNKS];
        static uint32_t to[STRIPE_CHUNKS];
        stripe_path paths[SPW_PATHS_MAX];
        spw_error err = {0};
        uint64_t largest, total, room = 0;
        double weights, low = 0, high;
        uint32_t n = draw_chunks(&seed, bytes, &largest, &total), path_count = draw_paths(&seed, paths, &weights);
        spw_status st;
        for (uint32_t p = 0; p < path_count; p++) {
            uint64_t fair = total / path_count + 4096;
            paths[p].limit = draw(&seed) % 3 == 0 ? 0 : 4096 + draw(&seed) % (2 * fair);
            room += paths[p].limit == 0 ? 2 * total + largest : paths[p].limit;
        }
        st = spw__stripe(paths, path_count, bytes, n, to, &err);
        if (st != SPW_OK) {
            assert_int_equal(st, SPW_ENOFIT);
            assert_true(room < total + path_count * largest);
            refused++;
            continue;
        }
        assert_true(room >= total);
        for (uint32_t p = 0; p < path_count; p++)
            assert_true(paths[p].limit == 0 || paths[p].bytes <= paths[p].limit);
        /* the level at which min(limit, level * weight) adds up to the total, by bisection */
        high = (double)total / 1e-3 + 1;
        for (int i = 0; i < 200; i++) {
            double level = (low + high) / 2, held = 0;
            for (uint32_t p = 0; p < path_count; p++) {
                double w = level * paths[p].weight, limit = (double)paths[p].limit;
                held += limit > 0 && w > limit ? limit : w;
            }
            *(held < (double)total ? &low : &high) = level;
        }
        for (uint32_t p = 0; p < path_count; p++) {
            double limit = (double)paths[p].limit, want = low * paths[p].weight, off;
            want = limit > 0 && want > limit ? limit : want;
            off = (double)paths[p].bytes - want;
            if (fabs(off) > (double)(path_count * largest)) /* what fits under no limit goes to the others */
                fail_msg("round %d, path %u of %u: %g chunks off", round, p, path_count, off / (double)largest);
        }
    }
    assert_true(refused > 20 && refused < 1900); /* both happened */
}

/* Small cases by hand: ties to the lower path, 3:1, one path, a limit that spreads, and what a refusal says. */
static void
test_stripe_cases(void **state)
{
    static const struct {
        double weights[3];
        uint64_t limits[3], chunk;
        const char *to; /* the path of each chunk */
    } cases[] = {{{1, 1, 0}, {0, 0, 0}, 4096, "01010101"},       {{3, 1, 0}, {0, 0, 0}, 4096, "00010001"},
                 {{1, 3, 0}, {0, 0, 0}, 4096, "11011101"},       {{5, 0, 0}, {0, 0, 0}, 4096, "000000"},
                 {{5, 0, 0}, {6 * 4096, 0, 0}, 4096, "000000"},  {{2, 1, 1}, {0, 0, 0}, 8192, "01020102"},
                 {{9, 1, 0}, {2 * 4096, 0, 0}, 4096, "11011101"}};
    stripe_path two[] = {{"/mnt/a", 1, 3 << 20, 0}, {"/mnt/b", 1, 2 << 20, 0}};
    static const uint64_t six[6] = {1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20};
    uint32_t to[8];
    spw_error err = {0};
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        stripe_path paths[3];
        uint64_t bytes[8];
        uint32_t n = (uint32_t)strlen(cases[k].to), path_count = 0;
        char got[9] = "";
        for (; path_count < 3 && cases[k].weights[path_count] > 0; path_count++)
            paths[path_count] = (stripe_path){"p", cases[k].weights[path_count], cases[k].limits[path_count], 0};
        for (uint32_t i = 0; i < n; i++)
            bytes[i] = cases[k].chunk;
        assert_int_equal(spw__stripe(paths, path_count, bytes, n, to, NULL), SPW_OK);
        for (uint32_t i = 0; i < n; i++)
            got[i] = (char)('0' + to[i]);
        assert_string_equal(got, cases[k].to);
    }
    assert_int_equal(spw__stripe(two, 2, six, 6, to, &err), SPW_ENOFIT);
    assert_non_null(strstr(err.message, "(6291456 bytes)"));
    assert_non_null(strstr(err.message, "/mnt/a at most 3.00 MiB, /mnt/b at most 2.00 MiB"));
    assert_int_equal(spw__stripe(two, 2, six, 5, to, &err), SPW_OK);
    two[0].limit = two[1].limit = (3 << 20) + (3 << 19); /* 4.5 each hold 9 together, but not 9 whole ones */
    {
        static const uint64_t three[3] = {3 << 20, 3 << 20, 3 << 20};
        assert_int_equal(spw__stripe(two, 2, three, 3, to, &err), SPW_ENOFIT);
        assert_non_null(strstr(err.message, "chunks of up to 3.00 MiB"));
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stripe_shares),
        cmocka_unit_test(test_stripe_limits),
        cmocka_unit_test(test_stripe_cases),
    };
    return cmocka_run_group_tests_name("stripe", tests, NULL, NULL);
}
