/*
 * Muon in the engine. A unit of matrices is updated in two halves (spw_offload.h): workers bring the momentum up to date and leave what is
 * to be made orthogonal in the gradient's place, the device makes each matrix of it so, on the queue that computes, and workers take
 * that off the masters. What comes between is done by the thread that computes, whenever it waits for weights or has passed a block: in the
 * order of the next forward pass, which so begins when its first units are done.
 *
 * A matrix crosses the link twice, as gradients do, in their type; where the unit's state is on the device nothing crosses, and what has
 * the type that the device computes in is made orthogonal where it is. Between ranks that have a part of a unit each, each makes those
 * matrices orthogonal of which it has something, and gets through host memory what it lacks of them (orthogonal_pieces.c), all before the next
 * forward pass, for they must take units in one order.
 */
#include "engine_internal.h"
#include <math.h>

/* All that is made orthogonal is on the device, whole and of its type: none of it comes or goes. */
static bool
all_in_place(const spw_engine *e)
{
    return e->device_updates && e->config.zero.offload_param == SPW_TIER_DEVICE &&
           e->config.zero.offload_optimizer == SPW_TIER_DEVICE && e->layout.parts == 1 &&
           e->config.run.grad_dtype == e->compute_dtype;
}

/* Of the parameter that takes most, whoever has something of it: all ranks plan as much. matrix 0: it needs no place. */
static void
largest(const spw_engine *e, uint64_t *matrix, uint64_t *work)
{
    const bool in_place = all_in_place(e);
    *matrix = *work = 0;
    for (uint32_t id = 0; id < e->layout.param_count; id++) {
        const spw_param *p = &e->model->params[id];
        uint64_t bytes = spw_round_up(p->rows * p->cols * e->compute_bytes, 256), needs;
        if (!e->layout.units[e->layout.places[id].unit_idx].whole)
            continue;
        needs = spw_gpu_orthogonal_bytes(e->compute_dtype, p->rows, p->cols);
        *matrix = bytes > *matrix && !in_place ? bytes : *matrix;
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
    uint64_t first, end;
    double sum = 0;
    for (uint32_t id = 0; id < e->layout.param_count; id++) {
        const spw_param *p = &e->model->params[id];
        if (spw__layout_own_whole(&e->layout, id, &first, &end))
            sum += spw_gpu_orthogonal_flops(p->rows, p->cols, e->config.optimizer.ns_steps);
    }
    return sum;
}

/* ---------------------------------------------------------------- parts of several ranks */

static uint64_t
grad_bytes(const spw_engine *e, uint64_t elems)
{
    return elems * spw_dtype_bytes(e->config.run.grad_dtype);
}

/* Of one of the two halves of shared. */
static uint64_t
half_bytes(const spw_engine *e)
{
    uint64_t most = 0;
    for (uint32_t u = 0; u < e->layout.unit_count && e->layout.parts > 1; u++) {
        uint64_t bytes = spw__whole_most(&e->layout, u, (uint32_t)grad_bytes(e, 1));
        most = bytes > most ? bytes : most;
    }
    return spw_round_up(most, 4096);
}

uint64_t
spw__orthogonal_host_bytes(const spw_engine *e)
{
    return 2 * half_bytes(e);
}

/* A unit as it is here: this rank's part, and pieces of the others'. */
typedef struct unit_parts {
    char *own;
    uint64_t first, end; /* elements of the unit that are there */
    const double *squares;
    bool on_device; /* own is its memory */
    char *base;
    const whole_piece *in; /* by part, in base; NULL: there are no others */
} unit_parts;

static bool
is_own(const unit_parts *x, uint64_t element)
{
    return element >= x->first && element < x->end;
}

static const whole_piece *
piece_at(const unit_parts *x, uint64_t element)
{
    const whole_piece *p = &x->in[element / (x->end - x->first)];
    SPW_ASSERT(element >= p->first && element < p->end);
    return p;
}

/* The gradient from an element on, and how much of it lies in a row. */
static const char *
gradient_at(const spw_engine *e, const unit_parts *x, uint64_t element, uint64_t *count)
{
    const whole_piece *p;
    if (is_own(x, element)) {
        *count = x->end - element;
        return x->own + grad_bytes(e, element - x->first);
    }
    p = piece_at(x, element);
    *count = p->end - element;
    return x->base + p->at + grad_bytes(e, element - p->first);
}

static double *
squares_behind(const spw_engine *e, char *base, const whole_piece *p)
{
    return (double *)(void *)(base + p->at + spw__whole_squares_at(p, (uint32_t)grad_bytes(e, 1)));
}

/* The sum of squares of 4096 elements from that one on. */
static double
square_at(const spw_engine *e, const unit_parts *x, uint64_t element)
{
    const whole_piece *p;
    if (is_own(x, element))
        return x->squares[(element - x->first) / 4096];
    p = piece_at(x, element);
    return squares_behind(e, x->base, p)[(element - p->first) / 4096];
}

/* What brings the sum of a matrix' squares to 1, so that no singular value is above that. */
static float
scale_of(const spw_engine *e, const unit_parts *x, const spw_place *at)
{
    double sum = 0;
    for (uint64_t i = 0; i < at->elems; i += 4096)
        sum += square_at(e, x, at->first + i);
    return (float)(1 / (sqrt(sum) + 1e-7));
}

/* ---------------------------------------------------------------- lifetime */

spw_status
spw__orthogonal_open(spw_engine *e, spw_error *err)
{
    orthogonal *o = &e->orthogonal;
    const uint64_t shared = spw__orthogonal_host_bytes(e);
    uint64_t matrix, work;
    largest(e, &matrix, &work);
    if (!e->layout.whole)
        return SPW_OK;
    for (int turn = 0; turn < 2; turn++) {
        o->matrix[turn] = o->memory + (uint64_t)turn * matrix;
        SPW_TRY(spw_gpu_event_create(&o->came[turn], e->gpu, err));
        SPW_TRY(spw_gpu_event_create(&o->made[turn], e->gpu, err));
        SPW_TRY(spw_gpu_event_create(&o->read[turn], e->gpu, err));
    }
    o->work = o->memory + 2 * matrix;
    if (shared > 0) {
        const uint32_t parts = e->layout.parts;
        o->in[0] = spw_mem_calloc(2 * (uint64_t)parts, sizeof *o->in[0]);
        o->take = spw_mem_calloc(2 * (uint64_t)parts, sizeof *o->take);
        o->most = spw_mem_calloc(e->layout.unit_count, sizeof *o->most);
        if (o->in[0] == NULL || o->take == NULL || o->most == NULL)
            return SPW_RAISE(err, SPW_ENOMEM, "pieces of %u parts", parts);
        o->half_bytes = shared / 2;
        for (uint32_t u = 0; u < e->layout.unit_count; u++)
            o->most[u] = spw__whole_most(&e->layout, u, (uint32_t)grad_bytes(e, 1));
        o->in[1] = o->in[0] + parts;
        o->give = o->take + parts;
        SPW_TRY(spw_comm_alloc(e->comm, (void **)&o->shared, shared, err));
        SPW_TRY(spw_gpu_pin_host(e->gpu, o->shared, shared, err));
        o->pinned = true;
    }
    return spw_gpu_queue_create(&o->link, e->gpu, SPW_QUEUE_H2D, err);
}

void
spw__orthogonal_close(spw_engine *e)
{
    orthogonal *o = &e->orthogonal;
    spw_gpu_queue_destroy(o->link); /* its notifies call the store */
    for (int turn = 0; turn < 2; turn++) {
        spw_gpu_event_destroy(o->came[turn]);
        spw_gpu_event_destroy(o->made[turn]);
        spw_gpu_event_destroy(o->read[turn]);
    }
    if (o->pinned)
        spw_gpu_unpin_host(e->gpu, o->shared);
    if (o->shared != NULL)
        spw_comm_free(e->comm, o->shared);
    spw_mem_free(o->in[0]);
    spw_mem_free(o->take);
    spw_mem_free(o->most);
}

/* ---------------------------------------------------------------- the first half */

static double *
own_squares(const spw_engine *e, uint32_t unit_idx)
{
    return e->partials + e->unit_partial[unit_idx];
}

double *
spw__chunk_squares(const spw_engine *e, uint32_t chunk_idx, uint64_t first)
{
    const spw_store_chunk *c = &e->layout.chunks[chunk_idx];
    return own_squares(e, c->unit_idx) + (c->first - e->layout.units[c->unit_idx].first + first) / 4096;
}

spw_status
spw__take_momentum(void *ctx, uint32_t chunk_idx, void *record, void *grad, uint64_t first, uint64_t count,
                   spw_error *err)
{
    const spw_engine *e = ctx;
    const spw_store_state state = {.record = record};
    const spw_opt_chunk chunk = spw__opt_chunk(e, chunk_idx, &state, grad, first, count);
    const uint32_t at = e->range_first[chunk_idx];
    uint64_t bad = spw_opt_momentum(&chunk, grad, e->ranges + at, e->range_first[chunk_idx + 1] - at,
                                    spw__chunk_squares(e, chunk_idx, first));
    return bad > 0 ? spw__raise_nonfinite(ctx, chunk_idx, bad, err) : SPW_OK;
}

/* ---------------------------------------------------------------- and what comes behind it */

/* Where the device makes it: where the gradient is, if all of it is there and of its type, and then nothing comes or goes. */
static char *
matrix_of(const spw_engine *e, int turn, const unit_parts *x, const spw_place *at)
{
    bool in_place = x->on_device && e->config.run.grad_dtype == e->compute_dtype && is_own(x, at->first) &&
                    is_own(x, at->first + at->elems - 1);
    return in_place ? x->own + grad_bytes(e, at->first - x->first) : e->orthogonal.matrix[turn];
}

/* A parameter from all parts that have some of it. */
static void
bring(spw_engine *e, int turn, const unit_parts *x, const spw_place *at)
{
    orthogonal *o = &e->orthogonal;
    char *matrix = matrix_of(e, turn, x, at);
    for (uint64_t done = 0, n; done < at->elems && matrix == o->matrix[turn]; done += n) {
        const char *grad = gradient_at(e, x, at->first + done, &n);
        char *to = matrix + done * e->compute_bytes;
        n = n < at->elems - done ? n : at->elems - done;
        if (x->on_device && is_own(x, at->first + done)) {
            spw_gpu_copy_d2d(o->link, to, e->compute_dtype, grad, e->config.run.grad_dtype, n, NULL);
        } else {
            spw_gpu_copy_h2d(o->link, to, e->compute_dtype, grad, e->config.run.grad_dtype, n);
            e->h2d_bytes += grad_bytes(e, n);
        }
    }
    spw_gpu_event_record(o->came[turn], o->link);
}

/* This rank's stretch of it, to where the gradient was. */
static void
take_back(spw_engine *e, int turn, const unit_parts *x, uint32_t id)
{
    orthogonal *o = &e->orthogonal;
    const spw_place *at = &e->layout.places[id];
    const bool stays = x->on_device;
    uint64_t first, end;
    char *grad;
    (void)spw__layout_own_whole(&e->layout, id, &first, &end);
    grad = x->own + grad_bytes(e, first - x->first);
    spw_gpu_event_wait(o->made[turn], o->link);
    if (matrix_of(e, turn, x, at) == grad)
        return;
    (stays ? spw_gpu_copy_d2d : spw_gpu_copy_d2h)(o->link, grad, e->config.run.grad_dtype,
                                                  o->matrix[turn] + (first - at->first) * e->compute_bytes,
                                                  e->compute_dtype, end - first, NULL);
    e->d2h_bytes += stays ? 0 : grad_bytes(e, end - first);
}

static void
tell_store(void *arg, const char *name, uint64_t unit_idx, uint64_t begin_ns, uint64_t end_ns)
{
    spw_engine *e = arg;
    spw_timeline_add(SPW_LANE_D2H, name, unit_idx, begin_ns, end_ns);
    spw_store_whole_done(e->store, (uint32_t)unit_idx);
}

/* Of those from `k` on in the unit the first of which this rank has something; count: none. */
static uint32_t
next_own(const spw_layout *l, uint32_t k, uint32_t count)
{
    uint64_t first, end;
    while (k < count && !spw__layout_own_whole(l, l->param_ids[k], &first, &end))
        k++;
    return k;
}

/* The next matrix is on its way while one is made. */
static void
make(spw_engine *e, uint32_t unit_idx, const unit_parts *x)
{
    orthogonal *o = &e->orthogonal;
    const spw_layout *l = &e->layout;
    const uint32_t end = l->param_first[unit_idx + 1];
    block_run run = {.block_idx = unit_idx, .timed = spw__begin_compute(e, "orthogonalize")};
    int turn = 0;
    spw_gpu_span_begin(o->link, "orthogonalize");
    for (uint32_t k = next_own(l, l->param_first[unit_idx], end), next = 0; k < end; k = next, turn = 1 - turn) {
        const uint32_t id = l->param_ids[k];
        const spw_param *p = &e->model->params[id];
        const double tall = (double)p->rows / (double)p->cols;
        if (next == 0)
            bring(e, turn, x, &l->places[id]);
        next = next_own(l, k + 1, end);
        if (next < end)
            bring(e, 1 - turn, x, &l->places[l->param_ids[next]]);
        spw_gpu_event_wait(o->came[turn], e->compute);
        spw_gpu_orthogonalize(e->compute, e->compute_dtype, matrix_of(e, turn, x, &l->places[id]), o->work, p->rows,
                              p->cols, scale_of(e, x, &l->places[id]), e->config.optimizer.ns_steps,
                              (float)sqrt(tall > 1 ? tall : 1));
        spw_gpu_event_record(o->made[turn], e->compute);
        take_back(e, turn, x, id);
    }
    spw_gpu_span_end(o->link, unit_idx, tell_store, e);
    spw__end_compute(e, &run);
}

static unit_parts
own_part(const spw_engine *e, uint32_t unit_idx, void *grad)
{
    const spw_store_unit *u = &e->layout.units[unit_idx];
    return (unit_parts){.own = grad,
                        .first = u->first,
                        .end = u->first + u->elems,
                        .squares = own_squares(e, unit_idx),
                        .on_device = spw_store_grad_on_device(e->store, unit_idx)};
}

void
spw__make_orthogonal(void *ctx, uint32_t unit_idx, void *grad)
{
    spw_engine *e = ctx;
    const unit_parts x = own_part(e, unit_idx, grad);
    make(e, unit_idx, &x);
}

void
spw__orthogonal_help(spw_engine *e)
{
    if (e->layout.whole)
        spw_store_help(e->store);
}

/* A stretch of this rank's part, to where others take it from. */
static void
give(spw_engine *e, const unit_parts *x, const whole_piece *p)
{
    char *base = x->base;
    const uint64_t elems = p->end - p->first;
    const char *grad = x->own + grad_bytes(e, p->first - x->first);
    if (elems == 0)
        return;
    if (x->on_device) {
        spw_gpu_copy_d2h(e->d2h, base + p->at, e->config.run.grad_dtype, grad, e->config.run.grad_dtype, elems, NULL);
        e->d2h_bytes += grad_bytes(e, elems);
    } else {
        memcpy(base + p->at, grad, grad_bytes(e, elems));
    }
    memcpy(squares_behind(e, base, p), x->squares + (p->first - x->first) / 4096,
           (elems + 4095) / 4096 * sizeof(double));
}

/* What this rank's part of the unit lacks comes to it, in a half of shared that nothing is read from any more. */
static spw_status
meet(spw_engine *e, uint32_t unit_idx, int half, unit_parts *x, spw_error *err)
{
    orthogonal *o = &e->orthogonal;
    const spw_layout *l = &e->layout;
    const uint32_t each = (uint32_t)grad_bytes(e, 1);
    whole_piece head, tail;
    if (o->shared == NULL || o->most[unit_idx] == 0) /* no matrix is in two parts */
        return SPW_OK;
    x->base = o->shared + (uint64_t)half * o->half_bytes;
    x->in = o->in[half];
    (void)spw__whole_given(l, unit_idx, each, l->part, &head, &tail);
    (void)spw__whole_got(l, unit_idx, each, l->part, o->in[half], o->take, o->give);
    spw_gpu_event_sync(o->read[half]);
    give(e, x, &head);
    give(e, x, &tail);
    if (x->on_device) /* not for what the device does with the unit before it */
        spw_gpu_queue_sync(e->d2h);
    return spw_all_to_all_v(spw__ranks_get_channels(e->ranks)->reduces, unit_idx, x->base, o->most[unit_idx], o->take,
                            o->give, err);
}

/* All gradients have been summed by now, so nobody else is on that channel. early: first halves began as gradients came, with the highest. */
spw_status
spw__orthogonal_all(spw_engine *e, bool early, spw_error *err)
{
    const uint32_t count = e->layout.whole && e->layout.parts > 1 ? e->layout.unit_count : 0;
    spw_status st = SPW_OK;
    int half = 0;
    for (uint32_t k = 0; k < count && st == SPW_OK; k++) {
        const uint32_t u = early ? count - 1 - k : k;
        uint64_t begin = spw_now_ns();
        unit_parts x;
        void *grad;
        if (!e->layout.units[u].whole || !e->takes_part[u])
            continue;
        SPW_TRY(spw_store_whole_take(e->store, u, &grad, err));
        e->stall_ns[SPW_STALL_OPTIMIZER] += spw_now_ns() - begin;
        begin = spw_now_ns();
        x = own_part(e, u, grad);
        st = meet(e, u, half, &x, err);
        e->stall_ns[SPW_STALL_COLLECTIVE] += spw_now_ns() - begin;
        if (st == SPW_OK) {
            make(e, u, &x);
            spw_gpu_event_record(e->orthogonal.read[half], e->orthogonal.link);
            half = 1 - half;
        } else {
            spw_store_whole_done(e->store, u); /* the others know by now: the step fails */
        }
    }
    return st;
}
