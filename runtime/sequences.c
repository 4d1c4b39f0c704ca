/*
 * Sequences that ranks share: sequence_parallel_size ranks in a row have a part of the positions of each sequence, and compute attention together
 * (nn/share.c says what goes to whom). Here: whether that can be, which rows are this rank's, and how what the tape trades gets to the others. On the
 * cpu device they read it where it lies; linked devices swap it, in the engine's own turns with the link (engine_ranks.c); else it goes through
 * memory that ranks share.
 *
 * The thread that computes waits for a trade, for attention has nothing to do before it, and nothing after it but what comes of it.
 */
#include "engine_internal.h"
#include <stdio.h>

struct spw_sequences {
    spw_engine *e;
    spw_channel *channel;
    spw_gpu_link *link; /* NULL: not linked */
    /* Through the host: both halves are pinned. */
    char *sent, *got;
    spw_gpu_queue *d2h, *h2d;
    spw_gpu_event *made, *came;
    bool pinned;
    spw_waiting waiting;
};

/* ---------------------------------------------------------------- whether, and which rows */

/* What looks at other rows besides attention, linear or not. */
static const char *
looks_beyond(const spw_engine *e)
{
    const spw_model_config *m = &e->model->config;
    if (m->family == SPW_FAMILY_CUSTOM)
        return "blocks of one's own";
    if (m->keys_are_values)
        return "keys that stand for several rows";
    if (e->chooses)
        return "indexers that choose what attention reads (with data.seq_length up to index_topk they do not)";
    return e->prefers ? "pairs of answers (spillway.preference)" : NULL;
}

/* Heads, and heads of keys, or 0, 0. */
typedef struct head_counts {
    uint64_t all, keys;
} head_counts;

static bool
share_out(head_counts h, uint64_t ranks)
{
    return h.all % ranks == 0 && (h.keys == 0 || h.keys % ranks == 0 || ranks % h.keys == 0);
}

/* Of a layer's attention, and of its linear attention; a convolution alone has channels. */
static head_counts
heads_of(const spw_model_config *m, uint64_t layer_idx, bool linear)
{
    if (linear ? !spw_model_has_linear(m, layer_idx)
               : !spw_model_attends(m, layer_idx) || spw_model_is_linear(m, layer_idx))
        return (head_counts){0, 0};
    if (linear)
        return m->linear_conv ? (head_counts){m->width, 0} : (head_counts){m->linear_heads, m->linear_key_heads};
    return (head_counts){m->heads, m->family == SPW_FAMILY_GPT2 ? m->heads : spw_model_kv_heads(m, layer_idx)};
}

/* SPW_ECONFIG for those that cannot be shared out. */
static spw_status
check_heads(const spw_engine *e, spw_error *err)
{
    const spw_model_config *m = &e->model->config;
    for (uint64_t l = 0; l < 2 * m->layers; l++) {
        const bool linear = l % 2 == 1;
        const head_counts h = heads_of(m, l / 2, linear);
        if (!share_out(h, e->sequence_ranks))
            return SPW_RAISE(
                err, SPW_ECONFIG,
                "sequence_parallel_size %u: ranks share out attention's heads, and layer %llu has %llu%s%s, %llu "
                "of keys: it is to divide the first, and to divide the second or be a multiple of it",
                e->sequence_ranks, (unsigned long long)(l / 2), (unsigned long long)h.all,
                linear ? " of linear attention" : "", linear && m->linear_conv ? " (channels)" : "",
                (unsigned long long)h.keys);
    }
    return SPW_OK;
}

spw_status
spw__sequences_settle(spw_engine *e, spw_error *err)
{
    const uint32_t ranks = spw_config_sharers(&e->config);
    const char *beyond;
    e->sequence_ranks = e->world > 1 ? ranks : 1;
    e->sequence_rank = e->rank % e->sequence_ranks;
    e->own_T = e->T / e->sequence_ranks;
    e->rows = e->B * e->own_T;
    e->tapes_most = UINT32_MAX;
    if (e->sequence_ranks == 1)
        return SPW_OK;
    e->share = (spw_share){.rank = e->sequence_rank, .count = e->sequence_ranks};
    if (e->world % ranks != 0)
        return SPW_RAISE(err, SPW_ECONFIG, "sequence_parallel_size %u does not divide %u ranks", ranks, e->world);
    if (e->T % ranks != 0)
        return SPW_RAISE(err, SPW_ECONFIG, "sequence_parallel_size %u does not divide data.seq_length %llu", ranks,
                         (unsigned long long)e->T);
    SPW_TRY(check_heads(e, err));
    beyond = looks_beyond(e);
    return beyond == NULL
               ? SPW_OK
               : SPW_RAISE(err, SPW_ECONFIG,
                           "sequence_parallel_size %u: ranks have a part of each sequence, and besides attention "
                           "this training looks at other rows: %s",
                           ranks, beyond);
}

const int32_t *
spw__own_rows(spw_engine *e, const int32_t *whole, int k)
{
    int32_t *own = e->own_ids + (uint64_t)k * e->rows;
    if (e->sequence_ranks == 1)
        return whole;
    for (uint64_t b = 0; b < e->B; b++)
        memcpy(own + b * e->own_T, whole + b * e->T + e->sequence_rank * e->own_T, e->own_T * sizeof *own);
    return own;
}

/* ---------------------------------------------------------------- bytes */

uint64_t
spw__sequences_device_bytes(const spw_engine *e)
{
    return spw_round_up(e->send_bytes, 4096);
}

uint64_t
spw__sequences_host_bytes(const spw_engine *e)
{
    return e->host_addressable || e->linked ? 0 : 2 * spw__sequences_device_bytes(e);
}

/*
 * Each pass goes forward through all blocks but the last, which has no attention, and back to the lowest that is trained; blocks whose
 * forward pass is kept are not computed again.
 */
void
spw__sequences_count(spw_engine *e)
{
    const uint32_t first = e->rank - e->sequence_rank;
    uint32_t near = 0;
    uint64_t bytes = 0;
    e->plan.traded = (spw_received){0};
    if (e->sequence_ranks == 1)
        return;
    for (uint32_t r = 0; r < e->sequence_ranks; r++)
        near += spw__host_of(e, first + r) == spw__host_of(e, e->rank);
    for (uint32_t done = 0; done < e->config.accumulation; done += e->group_max) {
        const uint32_t left = (uint32_t)e->config.accumulation - done,
                       count = left < e->group_max ? left : e->group_max;
        for (uint32_t c = 0; c < e->chain_count; c++) {
            const block_trades *t = &e->trades[e->chain[c]];
            for (uint32_t i = 0; i < count; i++)
                bytes += t->forward + (c < e->lowest ? 0 : t->backward + (spw__tape_is_kept(e, c, i) ? 0 : t->again));
        }
    }
    e->plan.traded.all = bytes;
    e->plan.traded.far = bytes / (e->sequence_ranks - 1) * (e->sequence_ranks - near);
}

/* ---------------------------------------------------------------- trading */

/* Each other rank's part of `data`, to or from the device. */
static void
copy_parts(const spw_sequences *s, char *host, char *device, uint64_t part, bool up)
{
    const spw_engine *e = s->e;
    for (uint32_t k = 0; k < e->sequence_ranks; k++) {
        char *at = host + k * part, *there = device + k * part;
        if (k == e->sequence_rank)
            continue;
        if (up)
            spw_gpu_copy_h2d(s->h2d, there, e->compute_dtype, at, e->compute_dtype, part / e->compute_bytes);
        else
            spw_gpu_copy_d2h(s->d2h, at, e->compute_dtype, there, e->compute_dtype, part / e->compute_bytes, NULL);
    }
}

/* What of `got` an earlier trade has brought up is there when compute comes to what this one sends. */
static spw_status
trade_by_host(spw_sequences *s, act *to, uint64_t part, spw_error *err)
{
    spw_engine *e = s->e;
    const uint64_t moved = (e->sequence_ranks - 1) * part;
    spw_gpu_event_record(s->made, e->compute);
    spw_gpu_event_wait(s->made, s->d2h);
    copy_parts(s, s->sent, e->share.send, part, false);
    spw_gpu_queue_sync(s->d2h);
    SPW_TRY(spw_all_to_all(s->channel, 0, s->sent, s->got, part, err));
    copy_parts(s, s->got, to, part, true);
    spw_gpu_event_record(s->came, s->h2d);
    spw_gpu_event_wait(s->came, e->compute);
    e->d2h_bytes += moved;
    e->h2d_bytes += moved;
    return SPW_OK;
}

/* What makes it has come to its end before, however long it takes: nothing on the links' stream stands behind it, and only others are waited for. */
static spw_status
trade_by_link(spw_sequences *s, act *to, uint64_t part, spw_error *err)
{
    spw_engine *e = s->e;
    spw_status st;
    spw_gpu_queue_sync(e->compute);
    SPW_TRY(spw_gpu_check(e->gpu, err));
    SPW_TRY(spw__ranks_take_turn(e->ranks, err));
    spw_waiting_begin(&s->waiting);
    st = spw_meet(s->channel, SPW_COLL_ALL_TO_ALL, 0, part, err);
    if (st == SPW_OK)
        st = spw_gpu_link_swap(s->link, e->compute, e->share.send, part, to, part, part, err);
    spw__ranks_end_turn(e->ranks);
    return st == SPW_OK ? spw_gpu_link_wait(s->link, e->compute, err) : st;
}

/* What was sent is nobody's any more: whoever reads it later reads nothing that is a number. */
static void
poison(const spw_sequences *s, uint64_t part)
{
    if (s->e->config.run.chaos_seed != 0)
        memset(s->e->share.send, 0xff, s->e->sequence_ranks * part);
}

/* The tape's spw_share.trade. */
static spw_status
trade(void *ctx, act *to, uint64_t part, spw_error *err)
{
    spw_sequences *s = ctx;
    spw_engine *e = s->e;
    const uint64_t begin = spw_now_ns();
    spw_status st;
    if (s->link != NULL)
        st = trade_by_link(s, to, part, err);
    else if (!e->host_addressable)
        st = trade_by_host(s, to, part, err);
    else
        st = spw_all_to_all(s->channel, 0, e->share.send, to, part, err);
    if (st == SPW_OK && e->host_addressable)
        poison(s, part);
    e->stall_ns[SPW_STALL_COLLECTIVE] += spw_now_ns() - begin;
    spw_timeline_add(SPW_LANE_COMM, "trade", 0, begin, spw_now_ns());
    return st == SPW_OK ? st : spw__ranks_fail(e->ranks, st, err);
}

/* ---------------------------------------------------------------- lifetime */

/* The link asks while it waits. */
static spw_status
going(void *ctx, spw_error *err)
{
    spw_sequences *s = ctx;
    const spw_engine *e = s->e;
    const double timeout = e->config.run.comm_timeout > 0 ? e->config.run.comm_timeout : 60;
    spw_error late = {0};
    SPW_TRY(spw_comm_check(e->comm, err));
    if (spw_waiting_look(&s->waiting) < timeout)
        return SPW_OK;
    SPW_RAISE(&late, SPW_ETIMEDOUT, "rank %u: what ranks trade for attention did not come in %.1f s", e->rank, timeout);
    spw_comm_abort(e->comm, late.message);
    *err = late;
    return SPW_ETIMEDOUT;
}

static spw_status
open_link(spw_sequences *s, spw_error *err)
{
    spw_engine *e = s->e;
    spw_waiting_begin(&s->waiting);
    SPW_TRY(spw__link_open(&s->link, e->gpu, s->channel, going, s, err));
    return spw__link_connect(s->link, e->compute, e->sequence_ranks, e->arena, err);
}

static spw_status
open_staging(spw_sequences *s, spw_error *err)
{
    spw_engine *e = s->e;
    const uint64_t half = spw__sequences_device_bytes(e);
    SPW_TRY(spw_comm_alloc(e->comm, (void **)&s->sent, 2 * half, err));
    s->got = s->sent + half;
    SPW_TRY(spw_gpu_pin_host(e->gpu, s->sent, 2 * half, err));
    s->pinned = true;
    SPW_TRY(spw_gpu_queue_create(&s->d2h, e->gpu, SPW_QUEUE_D2H, err));
    SPW_TRY(spw_gpu_queue_create(&s->h2d, e->gpu, SPW_QUEUE_H2D, err));
    SPW_TRY(spw_gpu_event_create(&s->made, e->gpu, err));
    return spw_gpu_event_create(&s->came, e->gpu, err);
}

spw_status
spw__sequences_open(spw_sequences **out, spw_engine *e, const rank_channels *channels, spw_error *err)
{
    spw_sequences *s;
    spw_status st = SPW_OK;
    *out = NULL;
    if (e->sequence_ranks == 1)
        return SPW_OK;
    s = spw_mem_zalloc(sizeof *s);
    if (s == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "shared sequences");
    s->e = e;
    s->channel = channels->sequences;
    if (e->linked)
        st = open_link(s, err);
    else if (!e->host_addressable)
        st = open_staging(s, err);
    if (st != SPW_OK) {
        spw__sequences_close(s, false);
        return st;
    }
    e->share.trade = trade;
    e->share.ctx = s;
    *out = s;
    return SPW_OK;
}

void
spw__sequences_close(spw_sequences *s, bool together)
{
    if (s == NULL)
        return;
    spw_waiting_begin(&s->waiting);
    spw_gpu_link_destroy(s->link, together);
    spw_gpu_queue_destroy(s->d2h);
    spw_gpu_queue_destroy(s->h2d);
    if (s->made != NULL)
        spw_gpu_event_destroy(s->made);
    if (s->came != NULL)
        spw_gpu_event_destroy(s->came);
    if (s->pinned)
        spw_gpu_unpin_host(s->e->gpu, s->sent);
    if (s->sent != NULL)
        spw_comm_free(s->e->comm, s->sent);
    spw_mem_free(s);
}
