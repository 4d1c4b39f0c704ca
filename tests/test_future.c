/*
 * What a store is told of the uses to come (runtime/trace.c, offload/future.c), use by use, beside tables that are made anew each time: over drawn
 * traces, routes that leave them, generations, limits and marks both say the same.
 */
#include "future_internal.h"
#include "lib_random.h"
#include "spw_engine.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <cmocka.h>

enum { UNITS_MAX = 24, TRACE_MAX = 96, LIST_MAX = 4 * UNITS_MAX + 64 };

/* ---------------------------------------------------------------- all of it, each time */

typedef struct plain {
    uint32_t unit_count;
    spw_store_use list[LIST_MAX];
    uint32_t count, fetch_count;
} plain;

/* Which of the list's uses is a unit's n-th. */
static uint32_t
plain_until(const plain *p, uint32_t unit_idx, uint32_t n)
{
    for (uint32_t i = 0; i < p->count; i++) {
        if (p->list[i].unit_idx == unit_idx && n-- == 0)
            return i;
    }
    return UINT32_MAX;
}

static void
plain_take(plain *p, spw_store_use use)
{
    for (uint32_t i = 0; i < p->fetch_count; i++) {
        if (p->list[i].unit_idx != use.unit_idx || p->list[i].generation != use.generation)
            continue;
        memmove(p->list + i, p->list + i + 1, (p->count - i - 1) * sizeof *p->list);
        p->count--;
        p->fetch_count--;
        return;
    }
}

/* As a trace says from where it is. */
static void
plain_tell(plain *p, const spw_trace *t, const spw_trace_rules *r)
{
    p->count = 0;
    for (uint32_t i = t->pos; t->recorded && i < 2 * t->count && p->count < r->max; i++) {
        const uint32_t u = t->units[i % t->count];
        const bool next = i >= t->count && r->units[u].trainable;
        p->list[p->count++] = (spw_store_use){u, r->generations[u] + (next ? r->wrap_step : 0)};
    }
    p->fetch_count = spw_trace_ahead(p->list, p->count, r->units, r->max_elems);
}

/* ---------------------------------------------------------------- both */

typedef struct pair {
    uint64_t run;
    uint32_t drawn;
    plain plain;
    future future;
    bool marked[UNITS_MAX][FUTURE_MARKS];
} pair;

static uint32_t
draw(pair *p, uint32_t n)
{
    return (uint32_t)random_pick(p->run, p->drawn++, n);
}

/* Places without what was taken, counted. */
static uint32_t
untaken_before(const future *f, uint64_t place)
{
    uint32_t n = 0;
    for (uint64_t i = f->begin; i < place; i++)
        n += !spw__future_at(f, i)->taken;
    return n;
}

static void
compare_marks(const pair *p, int mark)
{
    const future *f = &p->future;
    uint64_t at = f->front, last = FUTURE_NONE;
    uint32_t useless = 0;
    for (uint32_t i = 0; i < p->plain.count; i++) {
        const uint32_t u = p->plain.list[i].unit_idx;
        if (!p->marked[u][mark] || plain_until(&p->plain, u, 0) != i)
            continue;
        at = spw__future_next(f, mark, at);
        assert_true(at != FUTURE_NONE);
        assert_int_equal(untaken_before(f, at), i);
        last = at++;
    }
    assert_true(at == f->end || spw__future_next(f, mark, at) == FUTURE_NONE);
    assert_true(spw__future_last(f, mark) == last);
    for (uint32_t u = 0; u < p->plain.unit_count; u++)
        useless += p->marked[u][mark] && plain_until(&p->plain, u, 0) == UINT32_MAX;
    assert_int_equal(f->useless[mark], useless);
}

static void
compare(const pair *p)
{
    const future *f = &p->future;
    uint32_t n = 0;
    assert_true(f->begin <= f->front && f->front <= f->fetch_end && f->fetch_end <= f->end);
    assert_true(f->front == f->fetch_end || !spw__future_at(f, f->front)->taken);
    for (uint64_t i = f->begin; i < f->end; i++) {
        const future_use *use = spw__future_at(f, i);
        if (use->taken)
            continue;
        assert_true(n < p->plain.count);
        assert_int_equal(use->unit_idx, p->plain.list[n].unit_idx);
        assert_int_equal(use->generation, p->plain.list[n].generation);
        n++;
    }
    assert_int_equal(n, p->plain.count);
    assert_int_equal(untaken_before(f, f->fetch_end), p->plain.fetch_count);
    for (uint32_t u = 0; u < p->plain.unit_count; u++) {
        const uint32_t found[2] = {spw__future_until(f, u), spw__future_until_again(f, u)};
        for (uint32_t k = 0; k < 2; k++) {
            const uint32_t want = plain_until(&p->plain, u, k);
            assert_int_equal(found[k] == UINT32_MAX, want == UINT32_MAX);
            if (want != UINT32_MAX)
                assert_int_equal(untaken_before(f, f->front + found[k]), want);
        }
    }
    for (int k = 0; k < FUTURE_MARKS; k++)
        compare_marks(p, k);
}

static void
change_marks(pair *p)
{
    for (uint32_t i = draw(p, 3); i > 0; i--) {
        const uint32_t u = draw(p, p->plain.unit_count), k = draw(p, FUTURE_MARKS);
        p->marked[u][k] = draw(p, 2) == 1;
        spw__future_mark(&p->future, u, (int)k, p->marked[u][k]);
    }
}

/* ---------------------------------------------------------------- one run */

typedef struct world {
    pair pair;
    spw_store_unit units[UNITS_MAX];
    uint64_t generations[UNITS_MAX];
    spw_trace traces[2]; /* of steps, which update what is trained, and of passes that do not */
    uint32_t routes[2][TRACE_MAX], route_counts[2];
    spw_trace_rules rules;
    spw_trace_told told;
    int told_mode;
    spw_store_use out[LIST_MAX];
} world;

/* What is settled stays so, but for what was taken and is back, and what is dropped. */
static uint64_t
settle_some(pair *p, uint32_t dropped)
{
    future *f = &p->future;
    const uint64_t begin = f->begin + dropped < f->end ? f->begin + dropped : f->end;
    uint64_t lowest = f->settled = f->front + draw(p, (uint32_t)(f->end - f->front) + 1);
    for (uint64_t i = begin; i < f->settled; i++)
        lowest = spw__future_at(f, i)->taken && i < lowest ? i : lowest;
    return lowest > begin ? lowest : begin;
}

static void
tell(world *w, int mode)
{
    pair *p = &w->pair;
    uint64_t settled;
    uint32_t n;
    w->rules.wrap_step = mode == 0;
    w->told.goes_on = w->told.goes_on && w->told_mode == mode;
    w->told_mode = mode;
    n = spw_trace_tell(&w->traces[mode], &w->rules, &w->told, w->out);
    settled = settle_some(p, w->told.dropped);
    spw__future_go_on(&p->future, w->told.dropped, w->out, n, w->told.ahead);
    assert_true(p->future.settled == settled);
    plain_tell(&p->plain, &w->traces[mode], &w->rules);
    compare(p);
}

static void
use(world *w, int mode, uint32_t unit_idx)
{
    pair *p = &w->pair;
    const spw_store_use wanted = {unit_idx, w->generations[unit_idx]};
    spw__future_take(&p->future, wanted);
    plain_take(&p->plain, wanted);
    compare(p);
    change_marks(p);
    compare(p);
    spw_trace_use(&w->traces[mode], unit_idx);
    if (draw(p, 4) > 0) /* several come together now and then */
        tell(w, mode);
}

/* As recorded, mostly; or with something else in between, or without some of it. */
static void
pass(world *w, int mode)
{
    pair *p = &w->pair;
    const uint32_t strays = draw(p, 3) == 0 ? 4 : 0;
    spw_trace_begin(&w->traces[mode]);
    if (draw(p, 2) == 0)
        tell(w, mode);
    for (uint32_t i = 0; i < w->route_counts[mode]; i++) {
        if (strays > 0 && draw(p, strays) == 0)
            use(w, mode, draw(p, p->plain.unit_count));
        if (strays == 0 || draw(p, strays) > 0)
            use(w, mode, w->routes[mode][i]);
    }
    spw_trace_end(&w->traces[mode]);
    for (uint32_t u = 0; mode == 0 && u < p->plain.unit_count; u++)
        w->generations[u] += w->units[u].trainable && draw(p, 8) > 0;
    w->told.goes_on = w->told.goes_on && mode != 0;
}

static void
begin(world *w, uint64_t run)
{
    pair *p = &w->pair;
    spw_error err = {0};
    uint64_t elems = 0;
    *w = (world){.pair = {.run = run}};
    p->plain.unit_count = 1 + draw(p, UNITS_MAX);
    for (uint32_t u = 0; u < p->plain.unit_count; u++) {
        w->units[u] = (spw_store_unit){.elems = 4096 * (1 + draw(p, 5)), .trainable = draw(p, 3) > 0};
        elems += w->units[u].elems;
    }
    for (int mode = 0; mode < 2; mode++) {
        w->route_counts[mode] = draw(p, TRACE_MAX);
        for (uint32_t i = 0; i < w->route_counts[mode]; i++)
            w->routes[mode][i] = draw(p, p->plain.unit_count);
        assert_int_equal(spw_trace_init(&w->traces[mode], TRACE_MAX, &err), SPW_OK);
    }
    w->rules = (spw_trace_rules){.generations = w->generations,
                                 .units = w->units,
                                 .max_elems = draw(p, 4) == 0 ? UINT64_MAX : random_pick(run, p->drawn++, 2 * elems),
                                 .max = 1 + draw(p, 4 * p->plain.unit_count + 64)};
    assert_int_equal(spw__future_init(&p->future, p->plain.unit_count, w->rules.max, &err), SPW_OK);
}

static void
test_told_use_by_use(void **state)
{
    static world w;
    const uint64_t runs = random_runs(60);
    (void)state;
    for (uint64_t run = 0; run < runs; run++) {
        random_says(60, "run %llu", (unsigned long long)run);
        begin(&w, run);
        for (uint32_t i = 0; i < 6; i++)
            pass(&w, draw(&w.pair, 3) == 0);
        spw__future_deinit(&w.pair.future);
        for (int mode = 0; mode < 2; mode++)
            spw_trace_deinit(&w.traces[mode]);
    }
    random_done();
}

/* What may fail is memory. */
static void
test_init_fails(void **state)
{
    bool through = false;
    (void)state;
    for (unsigned k = 1; !through; k++) {
        spw_error err = {0};
        future f;
        const long live = spw_test_live_allocs();
        spw_test_fail_alloc(k);
        spw_status st = spw__future_init(&f, 5, 84, &err);
        through = !spw_test_fault_fired();
        assert_int_equal(st, through ? SPW_OK : SPW_ENOMEM);
        spw__future_deinit(&f);
        assert_int_equal(spw_test_live_allocs(), live);
    }
    spw_test_fail_alloc(0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_told_use_by_use), cmocka_unit_test(test_init_fails)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
