/*
 * Documents into windows that cut none of them, for a cache of tokens: best fit among a few open windows, which is within a percent
 * or two of what can be had where documents are much shorter than windows (Johnson 1974, with a bound on the open ones). What is
 * longer than a window fills whole ones, one behind the other, and its rest goes where it fits. Windows come in an order of their
 * own, and what is left of one is padding without loss. Tokens are words as the cache has them, marks included.
 */
#include "data_internal.h"

enum { OPEN_MAX = 32 };

struct data_packer {
    data_pack_options o;
    uint64_t used[OPEN_MAX]; /* words in each open window */
    uint64_t age[OPEN_MAX];  /* which was opened first, for the end */
    uint32_t open;
    uint64_t next_age, piece, padding; /* words of the document so far, in its own window; padding so far */
    uint64_t filled, cut;              /* windows that the document has filled; documents that one did not hold */
    uint32_t *words;                   /* (OPEN_MAX + 1, window): the last is the document's */
};

spw_status
spw__data_pack_open(data_packer **out, const data_pack_options *o, spw_error *err)
{
    data_packer *p = spw_mem_zalloc(sizeof *p);
    *out = p;
    if (p != NULL) {
        p->o = *o;
        p->words = spw_mem_calloc((OPEN_MAX + 1) * o->window, sizeof *p->words);
    }
    return p != NULL && p->words != NULL
               ? SPW_OK
               : SPW_RAISE(err, SPW_ENOMEM, "%d windows of %llu tokens", OPEN_MAX, (unsigned long long)o->window);
}

static uint32_t *
window_of(const data_packer *p, uint32_t k)
{
    return p->words + k * p->o.window;
}

/* Writes an open window, what is left of it filled; the last open one takes its place. */
static spw_status
emit_open(data_packer *p, uint32_t k, spw_error *err)
{
    uint32_t *w = window_of(p, k), last = p->open - 1;
    for (uint64_t i = p->used[k]; i < p->o.window; i++, p->padding++)
        w[i] = p->o.pad | (i == p->used[k] ? p->o.first : 0);
    SPW_TRY(p->o.emit(p->o.ctx, w, p->o.window, err));
    memmove(w, window_of(p, last), p->used[last] * sizeof *w); /* which may be this one */
    p->used[k] = p->used[last];
    p->age[k] = p->age[last];
    p->open--;
    return SPW_OK;
}

spw_status
spw__data_pack_put(data_packer *p, uint32_t word, spw_error *err)
{
    uint32_t *mine = window_of(p, OPEN_MAX);
    mine[p->piece++] = word;
    if (p->piece < p->o.window)
        return SPW_OK;
    p->piece = 0;
    p->filled++;
    return p->o.emit(p->o.ctx, mine, p->o.window, err);
}

spw_status
spw__data_pack_end(data_packer *p, spw_error *err)
{
    uint32_t *mine = window_of(p, OPEN_MAX), best = OPEN_MAX, fullest = 0;
    uint64_t n = p->piece;
    bool rest = p->filled > 0;
    p->cut += p->filled > 1 || (rest && n > 0);
    p->piece = p->filled = 0;
    if (n == 0)
        return SPW_OK;
    for (uint32_t k = 0; k < p->open; k++) {
        if (p->used[k] + n <= p->o.window && (best == OPEN_MAX || p->used[k] > p->used[best]))
            best = k;
        fullest = p->used[k] > p->used[fullest] ? k : fullest;
    }
    if (best == OPEN_MAX) {
        if (p->open == OPEN_MAX)
            SPW_TRY(emit_open(p, fullest, err));
        best = p->open++;
        p->used[best] = 0;
        p->age[best] = p->next_age++;
    }
    if (rest) /* what it follows lies elsewhere */
        mine[0] |= p->o.first;
    memcpy(window_of(p, best) + p->used[best], mine, n * sizeof *mine);
    p->used[best] += n;
    return p->used[best] == p->o.window ? emit_open(p, best, err) : SPW_OK;
}

spw_status
spw__data_pack_finish(data_packer *p, uint64_t *padding, uint64_t *cut, spw_error *err)
{
    uint32_t behind = p->o.pad | p->o.first;
    while (p->open > 0) {
        uint32_t oldest = 0;
        for (uint32_t k = 1; k < p->open; k++)
            oldest = p->age[k] < p->age[oldest] ? k : oldest;
        SPW_TRY(emit_open(p, oldest, err));
    }
    *padding = p->padding;
    *cut = p->cut;
    return p->o.emit(p->o.ctx, &behind, 1, err);
}

void
spw__data_pack_close(data_packer *p)
{
    if (p != NULL)
        spw_mem_free(p->words);
    spw_mem_free(p);
}
