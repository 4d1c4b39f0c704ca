/*
 * The gathers of a rank on paper: training steps over the recorded uses with the pool that the engine has (gather.c), told and asked as
 * it tells and asks its own (engine_block.c), until a step leaves the pool as an earlier one left it: from there on those between them come
 * again and again. Where all units are trained that is every step; frozen ones stay from step to step, and several steps may differ.
 * All ranks decide alike and without knowing the time, so these are the gathers of every rank, whatever the machine's speed. Pure;
 * called by the planner.
 */
#include "runtime_internal.h"

enum { STEPS_MAX = 64 };

typedef struct sim {
    const rehearsal_input *in;
    gather_pool pool;
    gather_asker asker;
    uint64_t *generations; /* (unit_count) */
    spw_store_use *future; /* (future_max) */
    uint32_t *anew, *again;
    uint64_t position, step_uses; /* in the step */
    bool recorded;
} sim;

static void
count_ask(void *ctx, spw_store_use use, bool again)
{
    sim *s = ctx;
    (again ? s->again : s->anew)[use.unit_idx]++;
}

/* The use at this place of the step, or of the next one. */
static spw_store_use
use_at(const sim *s, uint64_t at)
{
    uint32_t u = s->in->uses[at % s->in->use_count].unit_idx;
    bool next = at >= s->step_uses && s->in->layout->units[u].trainable;
    return (spw_store_use){u, s->generations[u] + next};
}

static void
tell(sim *s)
{
    const rehearsal_input *in = s->in;
    uint32_t n = 0;
    if (!in->prefetch)
        return;
    for (uint64_t at = s->position; s->recorded && at < 2 * s->step_uses && n < in->future_max; at++)
        s->future[n++] = use_at(s, at);
    spw__gather_ahead(&s->pool, &s->asker, s->future, n,
                      spw_trace_ahead(s->future, n, in->layout->units, in->prefetch_elems), s->generations);
}

/* The uses of a block, or a turn of it, that come together. False: they do not fit. */
static bool
acquire(sim *s, uint32_t first, uint32_t end)
{
    spw_store_use uses[SPW_BLOCK_PARAMS_MAX];
    for (uint32_t i = first; i < end; i++)
        uses[i - first] = use_at(s, i);
    s->position += end - first;
    if (!spw__gather_pin(&s->pool, &s->asker, uses, end - first))
        return false;
    tell(s);
    return true;
}

/* What was used from `open` on and is not needed beyond `end`; returns the first that still is. */
static uint32_t
let_go(sim *s, uint32_t open, uint32_t end)
{
    uint32_t first = end;
    for (uint32_t i = end; i-- > open;) {
        if (s->in->uses[i].until > end)
            first = i;
        else
            s->pool.units[s->in->uses[i].unit_idx].pins = 0;
    }
    return first;
}

static bool
step(sim *s)
{
    const rehearsal_input *in = s->in;
    for (uint32_t p = 0; p < in->passes; p++) {
        for (uint32_t at = 0, end, open = 0; at < in->use_count; at = end) {
            end = in->uses[at].end;
            if (!acquire(s, at, end))
                return false;
            open = let_go(s, open, end);
        }
    }
    s->recorded = true;
    s->position = 0;
    for (uint32_t u = 0; u < in->layout->unit_count; u++)
        s->generations[u] += in->layout->units[u].trainable;
    tell(s);
    return true;
}

/* What the next step's gathers follow from. */
static uint64_t
sum_of_pool(const sim *s)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < s->in->layout->unit_count; i++) {
        const gather_unit *u = &s->pool.units[i];
        const bool there = spw_set_has(&s->pool.there, i);
        const uint64_t now[] = {there, there ? u->offset : 0, there ? s->generations[i] - u->generation : 0, u->kept,
                                u->kept ? s->generations[i] - u->kept_generation : 0};
        sum = spw_checksum_more(sum, now, sizeof now);
    }
    return sum;
}

/* Counts begin anew behind the 1st, 2nd, 4th, 8th step and so on, and end when the pool is as it was then (Brent 1980). Returns their steps. */
static uint32_t
take(sim *s)
{
    const uint32_t units = s->in->layout->unit_count;
    uint64_t then = 0;
    uint32_t steps = 0;
    for (uint32_t done = 0; done < STEPS_MAX && step(s);) {
        done++;
        steps++;
        if (done > 1 && sum_of_pool(s) == then)
            break;
        if ((done & (done - 1)) == 0 && done < STEPS_MAX) {
            then = sum_of_pool(s);
            steps = 0;
            memset(s->anew, 0, units * sizeof *s->anew);
            memset(s->again, 0, units * sizeof *s->again);
        }
    }
    return steps > 0 ? steps : 1;
}

spw_status
spw__rehearse_gathers(const rehearsal_input *in, uint64_t pool_bytes, uint32_t *anew, uint32_t *again, uint32_t *steps,
                      spw_error *err)
{
    const uint32_t units = in->layout->unit_count;
    sim s = {.in = in, .anew = anew, .again = again, .step_uses = (uint64_t)in->use_count * in->passes};
    spw_status st;
    SPW_TRY(spw__gather_init(&s.pool, units, pool_bytes, err));
    s.pool.keeps = in->gathers_again;
    s.asker = (gather_asker){.layout = in->layout, .elem_bytes = in->compute_bytes, .ask = count_ask, .ctx = &s};
    s.generations = spw_mem_calloc(units, sizeof *s.generations);
    s.future = spw_mem_calloc((uint64_t)in->future_max + 1, sizeof *s.future);
    memset(anew, 0, units * sizeof *anew);
    memset(again, 0, units * sizeof *again);
    st =
        s.generations != NULL && s.future != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "rehearsal of %u units", units);
    if (st == SPW_OK)
        *steps = take(&s);
    spw_mem_free(s.generations);
    spw_mem_free(s.future);
    spw__gather_deinit(&s.pool);
    return st;
}
