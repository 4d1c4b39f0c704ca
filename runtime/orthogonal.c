/*
 * Muon in the engine. A unit of matrices is updated in two halves (spw_offload.h): workers bring the momentum up to date and leave what is
 * to be made orthogonal in the gradient's place, the device makes each matrix of it so, on the queue that computes, and workers take
 * that off the masters. What comes between is done by the thread that computes, whenever it waits for weights or has passed a block: in the
 * order of the next forward pass, which so begins when its first units are done.
 *
 * A matrix crosses the link twice, as gradients do, in their type.
 */
#include "engine_internal.h"
#include <math.h>

/* Of the parameter that takes most. */
static void
largest(const spw_engine *e, uint64_t *matrix, uint64_t *work)
{
    const spw_layout *l = &e->layout;
    *matrix = *work = 0;
    for (uint32_t id = 0; id < l->param_count; id++) {
        const spw_param *p = &e->model->params[id];
        uint64_t bytes = spw_round_up(p->rows * p->cols * e->compute_bytes, 256), needs;
        if (!l->units[l->places[id].unit_idx].whole)
            continue;
        needs = spw_gpu_orthogonal_bytes(e->compute_dtype, p->rows, p->cols);
        *matrix = bytes > *matrix ? bytes : *matrix;
        *work = needs > *work ? needs : *work;
    }
}

uint64_t
spw__orthogonal_bytes(const spw_engine *e)
{
    uint64_t matrix, work;
    largest(e, &matrix, &work);
    return spw_round_up(2 * matrix + work, 4096);
}

double
spw__orthogonal_flops(const spw_engine *e)
{
    const spw_layout *l = &e->layout;
    double sum = 0;
    for (uint32_t id = 0; id < l->param_count; id++) {
        const spw_param *p = &e->model->params[id];
        if (l->units[l->places[id].unit_idx].whole)
            sum += spw_gpu_orthogonal_flops(p->rows, p->cols, e->config.optimizer.ns_steps);
    }
    return sum;
}

spw_status
spw__orthogonal_open(spw_engine *e, spw_error *err)
{
    orthogonal *o = &e->orthogonal;
    uint64_t matrix, work;
    largest(e, &matrix, &work);
    if (matrix == 0)
        return SPW_OK;
    for (int turn = 0; turn < 2; turn++) {
        o->matrix[turn] = o->memory + (uint64_t)turn * matrix;
        SPW_TRY(spw_gpu_event_create(&o->came[turn], e->gpu, err));
        SPW_TRY(spw_gpu_event_create(&o->made[turn], e->gpu, err));
    }
    o->work = o->memory + 2 * matrix;
    return spw_gpu_queue_create(&o->link, e->gpu, SPW_QUEUE_H2D, err);
}

void
spw__orthogonal_close(spw_engine *e)
{
    spw_gpu_queue_destroy(e->orthogonal.link); /* its notifies call the store */
    for (int turn = 0; turn < 2; turn++) {
        spw_gpu_event_destroy(e->orthogonal.came[turn]);
        spw_gpu_event_destroy(e->orthogonal.made[turn]);
    }
}

void
spw__orthogonal_help(spw_engine *e)
{
    if (e->layout.whole)
        spw_store_help(e->store);
}

spw_status
spw__take_momentum(void *ctx, uint32_t chunk_idx, void *record, void *grad, uint64_t first, uint64_t count,
                   spw_error *err)
{
    const spw_engine *e = ctx;
    const spw_store_chunk *c = &e->layout.chunks[chunk_idx];
    const spw_store_state state = {.record = record};
    const spw_opt_chunk chunk = spw__opt_chunk(e, chunk_idx, &state, grad, first, count);
    const uint32_t at = e->range_first[chunk_idx];
    uint64_t bad = spw_opt_momentum(&chunk, grad, e->ranges + at, e->range_first[chunk_idx + 1] - at,
                                    e->partials + e->unit_partial[c->unit_idx] + (c->first + first) / 4096);
    return bad > 0 ? spw__raise_nonfinite(ctx, chunk_idx, bad, err) : SPW_OK;
}

/* What brings the sum of a matrix' squares to 1, so that no singular value is above that. */
static float
scale_of(const spw_engine *e, uint32_t unit_idx, const spw_place *at)
{
    const double *squares = e->partials + e->unit_partial[unit_idx] + at->first / 4096;
    double sum = 0;
    for (uint64_t i = 0; i < (at->elems + 4095) / 4096; i++)
        sum += squares[i];
    return (float)(1 / (sqrt(sum) + 1e-7));
}

static void
bring(spw_engine *e, int turn, const char *grad, uint64_t elems)
{
    orthogonal *o = &e->orthogonal;
    spw_gpu_copy_h2d(o->link, o->matrix[turn], e->compute_dtype, grad, e->config.run.grad_dtype, elems);
    spw_gpu_event_record(o->came[turn], o->link);
}

static void
tell_store(void *arg, const char *name, uint64_t unit_idx, uint64_t begin_ns, uint64_t end_ns)
{
    spw_engine *e = arg;
    spw_timeline_add(SPW_LANE_D2H, name, unit_idx, begin_ns, end_ns);
    spw_store_whole_done(e->store, (uint32_t)unit_idx);
}

/* The next matrix is on its way while one is made. */
void
spw__make_orthogonal(void *ctx, uint32_t unit_idx, void *grad)
{
    spw_engine *e = ctx;
    orthogonal *o = &e->orthogonal;
    const spw_layout *l = &e->layout;
    const uint64_t each = spw_dtype_bytes(e->config.run.grad_dtype);
    const uint32_t first = l->param_first[unit_idx], end = l->param_first[unit_idx + 1];
    block_run run = {.block_idx = unit_idx, .timed = spw__begin_compute(e, "orthogonalize")};
    spw_gpu_span_begin(o->link, "orthogonalize");
    for (uint32_t k = first; k < end; k++) {
        const spw_param *p = &e->model->params[l->param_ids[k]];
        const spw_place *at = &l->places[l->param_ids[k]];
        const double tall = (double)p->rows / (double)p->cols;
        char *own = (char *)grad + at->first * each;
        const int turn = (int)(k - first) % 2;
        if (k == first)
            bring(e, turn, own, at->elems);
        if (k + 1 < end)
            bring(e, 1 - turn, (char *)grad + l->places[l->param_ids[k + 1]].first * each,
                  l->places[l->param_ids[k + 1]].elems);
        spw_gpu_event_wait(o->came[turn], e->compute);
        spw_gpu_orthogonalize(e->compute, e->compute_dtype, o->matrix[turn], o->work, p->rows, p->cols,
                              scale_of(e, unit_idx, at), e->config.optimizer.ns_steps,
                              (float)sqrt(tall > 1 ? tall : 1));
        spw_gpu_event_record(o->made[turn], e->compute);
        spw_gpu_event_wait(o->made[turn], o->link);
        spw_gpu_copy_d2h(o->link, own, e->config.run.grad_dtype, o->matrix[turn], e->compute_dtype, at->elems, NULL);
        e->h2d_bytes += at->elems * each;
        e->d2h_bytes += at->elems * each;
    }
    spw_gpu_span_end(o->link, unit_idx, tell_store, e);
    spw__end_compute(e, &run);
}
