/*
 * Transfers between slots and nvme: requests that are handed to aio and what their ends mean for a chunk, and the order in
 * which changed weights and records go out. Called by the mover, lock held.
 */
#include "offload_internal.h"

void
spw__store_submit(spw_store *s, chunk *c, bool is_weight, spw_aio_op op, spw_aio_priority priority)
{
    spw_aio_request *req = is_weight ? &c->weight_req : &c->record_req;
    spw_error err = {0};
    *req = (spw_aio_request){.op = op,
                             .priority = priority,
                             .file = spw_swap_file(s->swaps[c->plan.path_idx]),
                             .offset = is_weight ? c->weight_offset : c->record_offset,
                             .bytes = is_weight ? spw__chunk_weights(s, c) : spw__chunk_record(s, c),
                             .buf = is_weight ? c->weights : c->record,
                             .user = c};
    if (is_weight && spw__in_place(&c->plan))
        spw__in_place_aim(s, c, req);
    if (!is_weight && c->undoable && spw__undo_bytes(&s->cfg, &c->plan) > 0)
        req->bytes = spw_round_up(req->bytes, 4096) + spw__undo_bytes(&s->cfg, &c->plan);
    s->aio_inflight++;
    if (spw_aio_submit(s->aio, req, &err) != SPW_OK) {
        s->aio_inflight--;
        spw__store_poison(s, &err);
    }
}

void
spw__store_submit_grad(spw_store *s, chunk *c, spw_aio_op op)
{
    spw_error err = {0};
    c->g = op == SPW_AIO_READ ? G_COMING : G_LEAVING;
    c->grad_req = (spw_aio_request){.op = op,
                                    .priority = SPW_AIO_NORMAL,
                                    .file = spw_swap_file(s->swaps[c->plan.path_idx]),
                                    .offset = c->grad_offset,
                                    .bytes = c->plan.elems * spw_dtype_bytes(s->cfg.grad_dtype),
                                    .buf = spw__store_grad_of(s, c),
                                    .user = c};
    s->aio_inflight++;
    if (spw_aio_submit(s->aio, &c->grad_req, &err) != SPW_OK) {
        s->aio_inflight--;
        spw__store_poison(s, &err);
    }
}

void
spw__store_push_job(chunk **head, chunk **tail, chunk *c)
{
    c->next_job = NULL;
    if (*head == NULL)
        *head = c;
    else
        (*tail)->next_job = c;
    *tail = c;
}

void
spw__store_finish_request(spw_store *s, spw_aio_request *req)
{
    chunk *c = req->user;
    bool is_weight = req == &c->weight_req;
    const char *what = is_weight ? "weights" : req == &c->grad_req ? "gradient" : "record";
    s->aio_inflight--;
    s->ended++;
    spw_timeline_add(req->op == SPW_AIO_READ ? SPW_LANE_NVME_READ : SPW_LANE_NVME_WRITE, what, c->plan.unit_idx,
                     req->submit_ns, req->done_ns);
    if (req->status != SPW_OK) {
        spw_error err = {0};
        spw_aio_request_error(req, &err);
        spw_error_wrap(&err, "%s of chunk %u (unit %u)", what, c->idx, c->plan.unit_idx);
        spw__store_poison(s, &err);
        return;
    }
    if (req == &c->grad_req) {
        *(req->op == SPW_AIO_READ ? &s->stats.nvme_read_bytes : &s->stats.nvme_write_bytes) += req->bytes;
        if (req->op == SPW_AIO_READ) {
            c->g = G_THERE;
        } else {
            s->grads_leaving--;
            spw__store_leave_window(s, c, G_AWAY);
        }
        pthread_cond_broadcast(&s->main_cond);
        return;
    }
    if (req->op == SPW_AIO_READ) {
        s->stats.nvme_read_bytes += req->bytes;
        if (!is_weight) {
            s->update_reads -= c->released;
            c->r = R_READY;
            c->record_fresh = true;
            pthread_cond_broadcast(&s->main_cond);
        } else if (spw__in_place(&c->plan) && spw__in_place_more(c)) {
            spw__store_submit(s, c, true, SPW_AIO_READ, req->priority);
        } else if (s->cfg.integrity) {
            c->w = W_VERIFYING;
            spw__store_push_job(&s->verify_head, &s->verify_tail, c);
            pthread_cond_signal(&s->work_cond);
        } else {
            c->w = W_CLEAN;
            spw__undo_is_back(s, c);
        }
        return;
    }
    s->stats.nvme_write_bytes += req->bytes;
    if (is_weight) {
        c->w = W_CLEAN;
    } else {
        s->record_writes--;
        spw__store_free_record_slot(s, c);
    }
}

/*
 * Records on their way out, in chunks: enough to keep a disk busy, and few while updates read. What is held back can still be put
 * in order. Once all gradients are there, the next forward pass waits for those reads, and a disk that does both does
 * neither as fast: then records go out only to make room for the next reads, and the rest beside the backward pass.
 */
enum { WRITES_MAX = 8, WRITES_BESIDE_READS = 2, READS_ENOUGH = 4 };
enum { FORWARD_FOR_ROOM = 3, FORWARD_BESIDE_READS = 1, FORWARD_READS_ENOUGH = 2 };

static uint32_t
writes_now(const spw_store *s)
{
    if (s->backward)
        return s->update_reads >= READS_ENOUGH ? WRITES_BESIDE_READS : WRITES_MAX;
    if (s->update_reads < FORWARD_READS_ENOUGH)
        return s->out_of_slots ? FORWARD_FOR_ROOM : WRITES_MAX;
    return s->out_of_slots ? FORWARD_BESIDE_READS : 0;
}

/* Whose memory is needed first: what a gradient waits for, then high loans, where a backward pass begins. */
static uint32_t
write_rank(const spw_store *s, const chunk *c)
{
    uint32_t slot = (uint32_t)c->record_slot;
    return c->rush ? UINT32_MAX : slot < s->cfg.record_slot_count ? s->loan_count / 2 : slot - s->cfg.record_slot_count;
}

/* Weights go out at once: they are few bytes, and their slots are few. */
void
spw__store_schedule_writes(spw_store *s)
{
    uint32_t most = writes_now(s);
    if (s->dirty_weights == 0 && s->rushed == 0 && s->record_writes >= most)
        return; /* the list is long where gradients lend records much memory */
    for (;;) {
        chunk **best = NULL, *c;
        for (chunk **at = &s->dirty_head; (c = *at) != NULL;) {
            if (c->w == W_DIRTY) {
                c->w = W_WRITING;
                s->dirty_weights--;
                spw__store_submit(s, c, true, SPW_AIO_WRITE, SPW_AIO_BULK);
            }
            if (c->r != R_DIRTY) {
                *at = c->next_dirty;
                c->in_dirty = false;
                continue;
            }
            if (best == NULL || write_rank(s, c) > write_rank(s, *best))
                best = at;
            at = &c->next_dirty;
        }
        if (best == NULL || (s->record_writes >= most && !(*best)->rush))
            return;
        c = *best;
        *best = c->next_dirty;
        c->in_dirty = false;
        c->r = R_WRITING;
        s->record_writes++;
        spw__store_submit(s, c, false, SPW_AIO_WRITE, c->rush ? SPW_AIO_URGENT : SPW_AIO_BULK);
        spw__store_rush(s, c, false);
    }
}
