/*
 * Updates that can be taken back. Adam's arithmetic runs backwards up to a rounding: the moments before follow from those after and the
 * gradient, the master before from the moments and the master after. So an update leaves in its log only what that misses, in units of
 * the last place: 8 bits for the first moment, 4 for the second and 4 for the master, which is 2 bytes where a copy would take 12. What
 * does not fit, as where a moment was next to nothing beside the gradient, is kept as it was, in a list behind a count. The list has
 * room for one element in 64; hardly one in a thousand needs it, but for the first steps, when second moments double.
 *
 * Both ways compute the same expressions, correctly rounded, so what comes back is what was there to the last bit; nothing is assumed
 * of how well they fit. Other rules and formats keep a copy.
 *
 *   log, n elements   misfits (n / 64, the first has the count) | first moments (n bytes) | second moments and masters (n bytes)
 *   log, a copy       the record's arrays, then the weights if they are to come back
 */
#include "cpu_adam_internal.h"

bool
spw__runs_backwards(spw_state_format f, const spw_optimizer *o, bool weights)
{
    return o == &spw_opt_adam && f <= SPW_STATE_SPLIT && weights;
}

uint32_t
spw_opt_log_bytes_32(spw_state_format f, const spw_optimizer *o, bool weights)
{
    if (spw__runs_backwards(f, o, weights))
        return 32 * 2 + 32 * sizeof(spw__misfit) / SPW_STATE_GROUP;
    return spw_state_record_bytes_32(f, o) + (weights ? 32 * spw_state_weight_bytes(f) : 0);
}

/* ---------------------------------------------------------------- copies */

void
spw__log_copy(const spw__opt_table *table, const spw_opt_chunk *c, const spw_optimizer *o, uint64_t first, uint64_t end,
              bool back)
{
    uint32_t parts[SPW_STATE_PARTS_MAX + 1], count = spw_state_record_parts(c->format, o, parts);
    char *state = c->record, *log = c->log;
    if (c->log_weights)
        parts[count++] = 32 * spw_state_weight_bytes(c->format);
    for (uint32_t k = 0; k < count; k++) {
        uint64_t at = first / 32 * parts[k], bytes = (end - first) / 32 * parts[k];
        if (c->log_weights && k + 1 == count)
            state = c->weights;
        if (back)
            memcpy(state + at, log + at, bytes);
        else
            table->copy_past(log + at, state + at, bytes);
        state += c->elems / 32 * parts[k];
        log += c->elems / 32 * parts[k];
    }
}

/* ---------------------------------------------------------------- forwards */

typedef struct walk {
    const spw_opt_chunk *c;
    const spw__opt_table *table;
    const spw_opt_range *ranges; /* of the next element and those after it */
    float *m, *v;
    spw__misfit *misfits;
    uint32_t *count, most;
    uint8_t *m_bits, *vw_bits;
} walk;

typedef struct block {
    _Alignas(64) float w[SPW_OPT_BLOCK], g[SPW_OPT_BLOCK];
    float w_after[SPW_OPT_BLOCK], m_after[SPW_OPT_BLOCK], v_after[SPW_OPT_BLOCK];
    uint32_t misfit[SPW_OPT_BLOCK];
} block;

static walk
walk_of(const spw__opt_table *table, const spw_opt_chunk *c, const spw_opt_range *ranges)
{
    const spw_optimizer *o = ranges->coef->optimizer;
    spw__misfit *misfits = c->log;
    uint32_t room = (uint32_t)(c->elems / SPW_STATE_GROUP);
    return (walk){.c = c,
                  .table = table,
                  .ranges = ranges,
                  .m = spw__state_moment(c->format, o, c->record, c->elems, 0),
                  .v = spw__state_moment(c->format, o, c->record, c->elems, 1),
                  .misfits = misfits + 1,
                  .count = &misfits[0].at,
                  .most = room - 1,
                  .m_bits = (uint8_t *)(misfits + room),
                  .vw_bits = (uint8_t *)(misfits + room) + c->elems};
}

static void
load_master(const walk *k, uint64_t i, uint32_t n, float *w)
{
    const spw_opt_chunk *c = k->c;
    if (c->format == SPW_STATE_SPLIT)
        k->table->load_split(w, (uint16_t *)c->weights + i, (int16_t *)c->record + i, n);
    else
        memcpy(w, (float *)(c->format == SPW_STATE_FP32 ? c->weights : c->record) + i, n * sizeof *w);
}

static void
store_master(const walk *k, uint64_t i, uint32_t n, const float *w)
{
    const spw_opt_chunk *c = k->c;
    if (c->format == SPW_STATE_SPLIT)
        k->table->store_split((uint16_t *)c->weights + i, (int16_t *)c->record + i, w, n);
    else
        memcpy((float *)(c->format == SPW_STATE_FP32 ? c->weights : c->record) + i, w, n * sizeof *w);
    if (c->format == SPW_STATE_MIXED)
        k->table->store_bf16((uint16_t *)c->weights + i, w, n);
}

/* Of elements [at, end) those of one range, from at on: the end of it; *coef is theirs. */
static uint64_t
range_at(walk *k, uint64_t at, uint64_t end, const spw_opt_coef **coef)
{
    while (k->ranges->end <= at)
        k->ranges++;
    *coef = k->ranges->coef;
    return k->ranges->end < end ? k->ranges->end : end;
}

static uint64_t
load_gradient(const walk *k, float *g, uint64_t i, uint32_t n, const spw_opt_coef *coef)
{
    const spw_opt_chunk *c = k->c;
    return k->table->load_grad(g, (const char *)c->grad + i * spw_dtype_bytes(c->grad_dtype), c->grad_dtype, n,
                               coef->grad_scale);
}

/* False: the list has no room, and nothing was stored. */
static bool
step_block(walk *k, uint64_t i, uint32_t n, block *b, uint64_t *nonfinite)
{
    const spw_opt_coef *coef;
    uint32_t misfits = 0;
    load_master(k, i, n, b->w);
    for (uint64_t at = i, end; at < i + n; at = end) {
        const uint32_t first = (uint32_t)(at - i);
        end = range_at(k, at, i + n, &coef);
        *nonfinite += load_gradient(k, b->g + first, at, (uint32_t)(end - at), coef);
        misfits += k->table->adam_logged(coef->c, (uint32_t)(end - at), b->w + first, k->m + at, k->v + at,
                                         b->g + first, b->w_after + first, b->m_after + first, b->v_after + first,
                                         k->m_bits + at, k->vw_bits + at, b->misfit + first);
    }
    if (misfits > k->most - *k->count)
        return false;
    for (uint32_t j = 0; j < n && misfits > 0; j++) {
        if (b->misfit[j] == 0)
            continue;
        k->misfits[(*k->count)++] = (spw__misfit){(uint32_t)(i + j), b->w[j], k->m[i + j], k->v[i + j]};
        misfits--;
    }
    memcpy(k->m + i, b->m_after, n * sizeof *k->m);
    memcpy(k->v + i, b->v_after, n * sizeof *k->v);
    store_master(k, i, n, b->w_after);
    return true;
}

/* ---------------------------------------------------------------- and back */

/* The first of the list that is not before element `at`. */
static uint32_t
misfit_from(const walk *k, uint64_t at)
{
    uint32_t low = 0, high = *k->count;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (k->misfits[mid].at < at)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static void
undo_blocks(walk *k, uint64_t from, uint64_t to, block *b)
{
    uint32_t next = misfit_from(k, from), n;
    for (uint64_t i = from; i < to; i += n) {
        const spw_opt_coef *coef;
        n = to - i < SPW_OPT_BLOCK ? (uint32_t)(to - i) : SPW_OPT_BLOCK;
        load_master(k, i, n, b->w);
        for (uint64_t at = i, end; at < i + n; at = end) {
            const uint32_t first = (uint32_t)(at - i);
            end = range_at(k, at, i + n, &coef);
            (void)load_gradient(k, b->g + first, at, (uint32_t)(end - at), coef);
            k->table->adam_back(coef->c, (uint32_t)(end - at), b->w + first, k->m + at, k->v + at, b->g + first,
                                k->m_bits + at, k->vw_bits + at);
        }
        for (; next < *k->count && k->misfits[next].at < i + n; next++) {
            const spw__misfit *x = &k->misfits[next];
            b->w[x->at - i] = x->w;
            k->m[x->at] = x->m;
            k->v[x->at] = x->v;
        }
        store_master(k, i, n, b->w);
    }
}

bool
spw__log_misfits(spw__adam_log *log, const spw_adam_slice *s, uint64_t i, const float *w, uint32_t bits)
{
    if ((uint32_t)__builtin_popcount(bits) > log->most - *log->count)
        return false;
    for (; bits != 0; bits &= bits - 1) {
        uint64_t k = (uint64_t)__builtin_ctz(bits);
        log->misfits[(*log->count)++] = (spw__misfit){(uint32_t)(log->first + i + k), w[k], s->m[i + k], s->v[i + k]};
    }
    return true;
}

/* As much of elements [i, to) as the fused kernel takes: of one range, in whole vectors. Returns how many. */
static uint64_t
step_fused(walk *k, spw__adam_logged_fn kernel, uint64_t i, uint64_t to, uint64_t *nonfinite)
{
    const spw_opt_chunk *c = k->c;
    const spw_opt_coef *coef;
    const uint64_t end = range_at(k, i, to, &coef);
    const spw_adam_coef own = spw__adam_coef_of(coef);
    spw__adam_log log = {k->m_bits + i, k->vw_bits + i, k->misfits, k->count, k->most, i, 0};
    spw_adam_slice slice;
    uint64_t done;
    spw_adam_slice_init(&slice, c->format, c->weights, c->record, c->elems, c->grad, c->grad_dtype, i, end - i);
    done = kernel(&own, &slice, &log);
    *nonfinite += log.nonfinite_count;
    return done;
}

uint64_t
spw__opt_step_logged(spw_isa isa, const spw_opt_chunk *c, const spw_opt_range *ranges, uint64_t from, uint64_t to)
{
    const spw__adam_logged_fn kernel = isa == SPW_ISA_AVX512 ? spw__adam_logged_avx512
                                       : isa == SPW_ISA_AVX2 ? spw__adam_logged_avx2
                                       : isa == SPW_ISA_NEON ? spw__adam_logged_neon
                                                             : NULL;
    walk k = walk_of(spw__opt_table_of(isa), c, ranges);
    const uint32_t before = from == 0 ? 0 : *k.count;
    uint64_t nonfinite = 0, n;
    block b;
    *k.count = before;
    for (uint64_t i = from; i < to; i += n) {
        if (kernel != NULL && (n = step_fused(&k, kernel, i, to, &nonfinite)) > 0)
            continue;
        n = to - i < SPW_OPT_BLOCK ? to - i : SPW_OPT_BLOCK;
        if (step_block(&k, i, (uint32_t)n, &b, &nonfinite))
            continue;
        k.ranges = ranges;
        undo_blocks(&k, from, i, &b);
        *k.count = before;
        return SPW_OPT_NO_ROOM;
    }
    return nonfinite;
}

spw_status
spw_opt_undo_isa(spw_isa isa, const spw_opt_chunk *c, const spw_opt_range *ranges, uint32_t range_count)
{
    const uint64_t to = c->end > 0 ? c->end : c->elems;
    const spw__opt_table *table = spw__opt_table_of(isa);
    SPW_ASSERT(range_count > 0 && ranges[range_count - 1].end == c->elems && c->log != NULL);
    if (table == NULL)
        return SPW_EUNSUPPORTED;
    if (spw__runs_backwards(c->format, ranges->coef->optimizer, c->log_weights)) {
        walk k = walk_of(table, c, ranges);
        block b;
        undo_blocks(&k, c->begin, to, &b);
    } else {
        spw__log_copy(table, c, ranges->coef->optimizer, c->begin, to, true);
    }
    return SPW_OK;
}

void
spw_opt_undo(const spw_opt_chunk *chunk, const spw_opt_range *ranges, uint32_t range_count)
{
    (void)spw_opt_undo_isa(spw__opt_isa(), chunk, ranges, range_count);
}
