/* Where gathered units lie: random calls against what must always hold, and the order in which units make room. */
#include "runtime_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

enum { UNITS = 12, CALLS = 20000 };

static uint32_t
draw(uint64_t seed, uint64_t at, uint32_t below)
{
    uint32_t r[4];
    spw_philox(seed, 0, at, r);
    return r[0] % below;
}

/* Nothing overlaps or lies outside; who is pinned is there. */
static void
check_pool(const gather_pool *p, const uint64_t *bytes)
{
    for (uint32_t i = 0; i < UNITS; i++) {
        const gather_unit *a = &p->units[i];
        const bool there = spw_set_has(&p->there, i);
        assert_true(there || a->pins == 0);
        assert_true(!there || a->offset + bytes[i] <= p->bytes);
        for (uint32_t j = 0; j < i; j++) {
            const gather_unit *b = &p->units[j];
            assert_true(!there || !spw_set_has(&p->there, j) || a->offset + bytes[i] <= b->offset ||
                        b->offset + bytes[j] <= a->offset);
        }
    }
}

/* One random call to each of two pools: ranks that make the same calls get the same answers. */
static void
test_random(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        gather_pool pools[2];
        uint64_t generation[UNITS] = {0}, bytes[UNITS], asked = 0, refused = 0;
        for (uint32_t u = 0; u < UNITS; u++)
            bytes[u] = 4096u * (1 + draw(seed, 900 + u, 7));
        for (int k = 0; k < 2; k++)
            assert_int_equal(spw__gather_init(&pools[k], UNITS, 4096 * 20, NULL), SPW_OK);
        for (uint64_t at = 0; at < CALLS; at++) {
            uint32_t u = draw(seed, 4 * at, UNITS), nearer = draw(seed, 4 * at + 1, 6);
            spw_store_use future[8];
            gather_answer answer[2];
            for (uint32_t i = 0; i < 8; i++)
                future[i] = (spw_store_use){draw(seed, (1u << 20) + 8 * at + i, UNITS), 0};
            if (draw(seed, 4 * at + 2, 5) == 0 && pools[0].units[u].pins == 0)
                generation[u]++;
            for (int k = 0; k < 2; k++) {
                const bool before = spw__gather_has(&pools[k], (spw_store_use){u, generation[u]});
                gather_unit *now = &pools[k].units[u];
                spw__gather_tell(&pools[k], future, 8);
                answer[k] = spw__gather_ask(&pools[k], u, bytes[u], generation[u], nearer);
                assert_true((answer[k] == GATHER_THERE) == before);
                assert_true(answer[k] == GATHER_NO_ROOM ||
                            spw__gather_has(&pools[k], (spw_store_use){u, generation[u]}));
                check_pool(&pools[k], bytes);
                if (answer[k] != GATHER_NO_ROOM && draw(seed, 4 * at + 3, 4) == 0)
                    now->pins ^= 1; /* used by a block, or not any more */
            }
            assert_int_equal(answer[0], answer[1]);
            assert_int_equal(pools[0].units[u].offset, pools[1].units[u].offset);
            asked += answer[0] == GATHER_ASK;
            refused += answer[0] == GATHER_NO_ROOM;
            if (draw(seed, 4 * at + 3, 64) == 1) {
                for (int k = 0; k < 2; k++)
                    for (uint32_t i = 0; i < UNITS; i++)
                        pools[k].units[i].pins = 0;
            }
        }
        assert_true(asked > CALLS / 10 && refused > 10);
        for (int k = 0; k < 2; k++)
            spw__gather_deinit(&pools[k]);
    }
}

/*
 * A device that works by itself reads units after they were let go. What is gathered into memory that was read after the last mark
 * that gathers follow has to follow another, also when that unit lay elsewhere meanwhile.
 */
static void
test_readers(void **state)
{
    enum { BLOCKS = 20 };
    gather_pool p;
    uint64_t generation[UNITS] = {0}, read_at[BLOCKS] = {0}, now = 1, followed = 0, follows = 0, free_to_go = 0;
    (void)state;
    assert_int_equal(spw__gather_init(&p, UNITS, 4096 * BLOCKS, NULL), SPW_OK);
    for (uint64_t at = 0; at < 10 * CALLS; at++) {
        uint32_t u = draw(3, 2 * at, UNITS);
        uint64_t bytes = 4096u * (1 + u % 7);
        gather_unit *unit = &p.units[u];
        gather_answer answer;
        if (unit->pins > 0) { /* its block ends: it will be read until then */
            unit->pins = 0;
            spw__gather_read(&p, u);
            for (uint64_t b = 0; b < bytes; b += 4096)
                read_at[(unit->offset + b) / 4096] = now;
            now++;
            continue;
        }
        generation[u] += draw(3, 2 * at + 1, 5) == 0;
        answer = spw__gather_ask(&p, u, bytes, generation[u], 0);
        if (answer == GATHER_ASK) {
            bool has_to = false, does = spw__gather_follows(&p, u);
            for (uint64_t b = 0; b < bytes; b += 4096)
                has_to |= read_at[(unit->offset + b) / 4096] > followed;
            assert_true(does || !has_to);
            followed = does ? now - 1 : followed;
            follows += does;
            free_to_go += !does;
        }
        unit->pins = answer != GATHER_NO_ROOM && draw(3, 2 * at + 1, 3) == 0;
    }
    assert_true(follows > 1000 && free_to_go > 1000);
    spw__gather_deinit(&p);
}

/* The unit whose next use is farthest goes first, and none that is needed before what asks. */
static void
test_order(void **state)
{
    const spw_store_use future[] = {{3, 0}, {1, 0}, {0, 0}, {2, 0}};
    gather_pool p;
    (void)state;
    assert_int_equal(spw__gather_init(&p, UNITS, 3 * 4096, NULL), SPW_OK);
    for (uint32_t u = 0; u < 3; u++)
        assert_int_equal(spw__gather_ask(&p, u, 4096, 0, 0), GATHER_ASK);
    spw__gather_tell(&p, future, 4);
    assert_int_equal(spw__gather_ask(&p, 3, 4096, 0, 1), GATHER_ASK);
    assert_false(spw_set_has(&p.there, 2)); /* the farthest */
    assert_int_equal(p.units[3].offset, 2 * 4096);
    assert_int_equal(spw__gather_ask(&p, 2, 4096, 0, 4), GATHER_NO_ROOM); /* all others come before it */
    assert_int_equal(spw__gather_ask(&p, 2, 4096, 0, 2), GATHER_ASK);     /* unit 0 comes at position 2 */
    assert_false(spw_set_has(&p.there, 0));
    p.units[3].pins = p.units[2].pins = 1;
    assert_int_equal(spw__gather_ask(&p, 4, 2 * 4096, 0, 0), GATHER_NO_ROOM); /* one gap is too small */
    spw__gather_deinit(&p);
}

/* What ranks keep is gathered from there at the generation at which it was gathered last, until all is forgotten. */
static void
test_again(void **state)
{
    gather_pool p;
    (void)state;
    assert_int_equal(spw__gather_init(&p, UNITS, 4096 * 2, NULL), SPW_OK);
    for (int keeps = 0; keeps < 2; keeps++) {
        gather_answer again = keeps ? GATHER_AGAIN : GATHER_ASK;
        p.keeps = keeps;
        assert_int_equal(spw__gather_ask(&p, 0, 2 * 4096, 5, 0), GATHER_ASK);
        assert_int_equal(spw__gather_ask(&p, 0, 2 * 4096, 5, 0), GATHER_THERE);
        assert_int_equal(spw__gather_ask(&p, 1, 2 * 4096, 5, 0), GATHER_ASK); /* in its place */
        assert_int_equal(spw__gather_ask(&p, 0, 2 * 4096, 5, 0), again);
        assert_int_equal(spw__gather_ask(&p, 1, 2 * 4096, 5, 0), again);
        assert_int_equal(spw__gather_ask(&p, 1, 2 * 4096, 6, 0), GATHER_ASK);
        assert_int_equal(spw__gather_ask(&p, 0, 2 * 4096, 6, 0), GATHER_ASK);
        assert_int_equal(spw__gather_ask(&p, 1, 2 * 4096, 6, 0), again);
        spw__gather_forget(&p); /* the same generation of other weights */
        assert_int_equal(spw__gather_ask(&p, 1, 2 * 4096, 6, 0), GATHER_ASK);
        spw__gather_forget(&p);
    }
    spw__gather_deinit(&p);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_again),
        cmocka_unit_test(test_readers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
