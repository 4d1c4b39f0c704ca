/*
 * The tape: backward walks the list of operations from the end; a value's gradient is allocated when it is first written and
 * added to after that.
 */
#include "tape_internal.h"
#include <math.h>

spw_status
spw_tape_create(spw_tape **out, spw_gpu_queue *queue, const spw_gpu_info *device, spw_error *err)
{
    spw_tape *t = spw_mem_zalloc(sizeof *t);
    *out = t;
    if (t == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "tape");
    t->queue = queue;
    t->act_dtype = device->compute_dtype;
    t->act_bytes = spw_dtype_bytes(device->compute_dtype);
    t->loss_rows = device->loss_rows;
    return SPW_OK;
}

void
spw_tape_destroy(spw_tape *tape)
{
    if (tape != NULL)
        spw_mem_free(tape->tile);
    spw_mem_free(tape);
}

void
spw_tape_reset(spw_tape *t, void *arena, uint64_t arena_bytes, bool record)
{
    t->arena = arena;
    t->arena_bytes = arena_bytes;
    t->used = 0;
    t->peak = 0;
    t->dry = arena == NULL;
    t->keeping = t->kept = false;
    t->record = record;
    t->status = SPW_OK;
    t->op_count = t->value_count = t->routing_count = t->each_count = 0;
    t->cache = NULL;
    t->places = NULL;
    t->by_row = t->cache_taken = false;
    t->on_route = NULL;
    t->on_turn = NULL;
    t->in_experts = t->in_pieces = false;
    t->pending = NULL;
    t->linear_flops = 0;
    t->first_row = 0;
    t->into_next = t->rows_count = 0;
    t->into_there = false;
    t->route_error = (spw_error){0};
}

void
spw_tape_on_route(spw_tape *t, spw_route_fn fn, void *ctx)
{
    t->on_route = fn;
    t->on_route_ctx = ctx;
}

void
spw_tape_on_turn(spw_tape *t, uint64_t experts, spw_turn_fn fn, void *ctx)
{
    SPW_ASSERT(experts > 0);
    t->turn_experts = experts;
    t->on_turn = fn;
    t->on_turn_ctx = ctx;
}

void
spw_tape_reset_kept(spw_tape *t, void *kept, uint64_t kept_bytes, void *arena, uint64_t arena_bytes)
{
    spw_tape_reset(t, kept, kept_bytes, true);
    t->kept = true;
    t->after = arena;
    t->after_bytes = arena_bytes;
}

void
spw_tape_reset_keeping(spw_tape *t, void *arena, uint64_t arena_bytes)
{
    spw_tape_reset(t, arena, arena_bytes, false);
    t->keeping = true;
}

void
spw_tape_in_tiles(spw_tape *t, uint64_t rows)
{
    t->rows_each = rows;
}

void
spw_tape_use_cache(spw_tape *t, const spw_attention_cache *cache, uint64_t width, const int32_t *places, bool by_row)
{
    t->cache = cache;
    t->cache_width = width;
    t->places = places;
    t->by_row = by_row;
    t->cache_taken = false;
    if (t->record)
        t->status = SPW_EINVAL;
}

uint64_t
spw_tape_arena_used(const spw_tape *t)
{
    return t->peak;
}

static void
linear_forward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out, *x = o->in[0], *onto = o->in[1];
    unsigned how = o->flags | (t->by_row ? SPW_OP_BY_ROW : 0u);
    const act *bias = o->param[1] != NULL ? o->param[1]->data : NULL;
    if (y->there)
        return;
    t->linear_flops += 2 * y->rows * y->cols * x->cols;
    if (spw__fp8_takes(x, o->param[0])) {
        spw__fp8_forward(t, o);
        return;
    }
    if (!spw__tape_computes(t))
        return;
    if (y->gelu_in != NULL)
        spw_gpu_linear_gelu(t->queue, y->data, y->gelu_in, x->data, o->param[0]->data, bias, y->rows, y->cols, x->cols,
                            how);
    else if (onto != NULL)
        spw_gpu_linear_add(t->queue, y->data, onto->data, x->data, o->param[0]->data, bias, y->rows, y->cols, x->cols,
                           how);
    else
        spw_gpu_linear(t->queue, y->data, x->data, o->param[0]->data, bias, y->rows, y->cols, x->cols, how);
}

void
spw__tape_catch_up(spw_tape *t)
{
    const spw__op *o = t->pending;
    t->pending = NULL;
    if (o == NULL || t->status != SPW_OK)
        return;
    if (o->kind == T_ROWS)
        spw__rows_forward(t, o);
    else
        linear_forward(t, o);
}

uint64_t
spw_tape_linear_flops(const spw_tape *t)
{
    return t->linear_flops;
}

spw_status
spw_tape_check(spw_tape *t, spw_error *err)
{
    spw__tape_catch_up(t);
    if (t->route_error.status != SPW_OK && err != NULL)
        *err = t->route_error;
    if (t->route_error.status != SPW_OK)
        return t->route_error.status;
    if (t->status == SPW_ENOMEM)
        return SPW_RAISE(err, SPW_ENOMEM, "the device's short-lived arena (%llu bytes) is too small for this block",
                         (unsigned long long)t->arena_bytes);
    if (t->status != SPW_OK)
        return SPW_RAISE(err, t->status, "a block's forward used values whose shapes do not fit, or too many of them");
    return SPW_OK;
}

void *
spw__tape_take(spw_tape *t, uint64_t bytes)
{
    uint64_t need = spw_round_up(bytes, 256), at = t->used;
    t->used += need;
    if (t->used > t->peak)
        t->peak = t->used;
    if (t->dry)
        return (void *)(uintptr_t)256; /* never looked at: a dry tape computes nothing */
    if (t->used > t->arena_bytes) {
        t->status = SPW_ENOMEM;
        return NULL;
    }
    return t->arena + at;
}

spw_value *
spw__tape_fail(spw_tape *t)
{
    if (t->status == SPW_OK)
        t->status = SPW_EINVAL;
    return NULL;
}

spw_value *
spw__tape_value(spw_tape *t, uint64_t rows, uint64_t cols, act *data)
{
    bool there = false;
    spw_value *v;
    if (t->value_count == SPW__VALUES_MAX)
        return spw__tape_fail(t);
    if (data == NULL && t->into_next > 0) {
        data = t->into[t->into_next - 1];
        there = t->into_there && data != NULL;
        t->into_next = 0;
    }
    v = &t->values[t->value_count++];
    *v = (spw_value){.rows = rows, .cols = cols, .data = data, .needs_grad = t->record, .there = there};
    if (data == NULL && !t->in_pieces && (v->data = spw__tape_take(t, rows * cols * t->act_bytes)) == NULL)
        return NULL;
    return v;
}

spw__op *
spw__tape_op(spw_tape *t, spw__op_kind kind, spw_value *out)
{
    spw__op *o = &t->unrecorded;
    spw__tape_catch_up(t);
    if (t->is_tile &&
        (kind == T_EMBEDDING || kind == T_ATTENTION || kind == T_ROUTE || kind == T_DISPATCH || kind == T_HEAD)) {
        spw__tape_fail(t); /* they look at other rows, or at what belongs to rows of the batch */
        return NULL;
    }
    if (t->record || t->in_experts) {
        if (t->op_count == SPW__OPS_MAX) {
            spw__tape_fail(t);
            return NULL;
        }
        o = &t->ops[t->op_count++];
        memset(o, 0, sizeof *o);
        o->kind = kind;
        o->out = out;
    }
    return o;
}

spw_value *
spw_tape_input(spw_tape *t, act *data, uint64_t rows, uint64_t cols, bool needs_grad)
{
    spw_value *v = spw__tape_value(t, rows, cols, data != NULL ? data : (void *)(uintptr_t)256);
    if (v != NULL)
        v->needs_grad = needs_grad;
    return v;
}

spw_value *
spw_tape_param(spw_tape *t, const act *data, float *w_grad, bool *w_begun, uint64_t rows, uint64_t cols)
{
    spw_value *v = spw__tape_value(t, rows, cols, data != NULL ? (act *)(uintptr_t)data : (void *)(uintptr_t)256);
    if (v != NULL) {
        v->w_grad = w_grad;
        v->w_begun = w_begun;
        v->needs_grad = false;
        v->is_param = true;
    }
    return v;
}

/* ---------------------------------------------------------------- forward */

/* onto NULL: onto nothing. gelu: of the result. */
static spw_value *
linear(spw_tape *t, spw_value *onto, spw_value *x, spw_value *w, spw_value *b, unsigned flags, bool gelu)
{
    uint64_t M, K, N, from;
    spw_value *y;
    spw__op *o;
    if (x == NULL || w == NULL)
        return spw__tape_fail(t);
    M = x->rows;
    K = (flags & SPW_OP_W_IN_OUT) ? w->rows : w->cols;
    N = (flags & SPW_OP_W_IN_OUT) ? w->cols : w->rows;
    if (K != x->cols || (b != NULL && b->rows * b->cols != N) || (onto != NULL && (onto->rows != M || onto->cols != N)))
        return spw__tape_fail(t);
    if (spw__fp8_takes(x, w) && !spw__fp8_prepare(t, x))
        return spw__tape_fail(t);
    from = t->used; /* the input's codes stay: backward needs their scale */
    y = spw__tape_value(t, M, N, NULL);
    if (y == NULL || (gelu && (y->gelu_in = spw__tape_take(t, M * N * t->act_bytes)) == NULL) ||
        (o = spw__tape_op(t, T_LINEAR, y)) == NULL)
        return spw__tape_fail(t);
    o->out = y;
    o->in[0] = x;
    o->in[1] = onto;
    o->param[0] = w;
    o->param[1] = b;
    o->flags = flags;
    if (spw__fp8_takes(x, w)) /* a call that does not record computes it here */
        (void)spw__fp8_lend(t, w);
    if (t->record && !gelu) {
        t->pending = o;
        t->pending_from = from;
    } else {
        linear_forward(t, o);
    }
    return y;
}

spw_value *
spw_nn_linear(spw_tape *t, spw_value *x, spw_value *w, spw_value *b, unsigned flags)
{
    return linear(t, NULL, x, w, b, flags, false);
}

spw_value *
spw_nn_linear_add(spw_tape *t, spw_value *onto, spw_value *x, spw_value *w, spw_value *b, unsigned flags)
{
    return onto == NULL ? spw__tape_fail(t) : linear(t, onto, x, w, b, flags, false);
}

spw_value *
spw_nn_linear_gelu(spw_tape *t, spw_value *x, spw_value *w, spw_value *b, unsigned flags)
{
    return linear(t, NULL, x, w, b, flags, true);
}

static spw_value *
embedding(spw_tape *t, spw_value *onto, const int32_t *ids, uint64_t count, spw_value *table)
{
    spw_value *y;
    spw__op *o;
    if (table == NULL || (onto != NULL && (onto->rows != count || onto->cols != table->cols)))
        return spw__tape_fail(t);
    y = spw__tape_value(t, count, table->cols, onto != NULL ? onto->data : NULL);
    if (y == NULL || (o = spw__tape_op(t, T_EMBEDDING, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_embedding(t->queue, y->data, ids, table->data, count, table->rows, table->cols, onto != NULL);
    o->in[0] = onto;
    o->param[0] = table;
    o->ids = ids;
    return y;
}

spw_value *
spw_nn_embedding(spw_tape *t, const int32_t *ids, uint64_t count, spw_value *table)
{
    return embedding(t, NULL, ids, count, table);
}

spw_value *
spw_nn_embedding_add(spw_tape *t, spw_value *x, const int32_t *ids, spw_value *table)
{
    return x == NULL ? spw__tape_fail(t) : embedding(t, x, ids, x->rows, table);
}

spw_value *
spw_nn_layernorm(spw_tape *t, spw_value *x, spw_value *g, spw_value *b, float eps)
{
    spw_value *y;
    float *mean, *rstd;
    spw__op *o;
    if (x == NULL || g == NULL || b == NULL || g->cols != x->cols || b->cols != x->cols)
        return spw__tape_fail(t);
    y = spw__tape_value(t, x->rows, x->cols, NULL);
    mean = spw__tape_take(t, x->rows * sizeof(float));
    rstd = spw__tape_take(t, x->rows * sizeof(float));
    if (y == NULL || mean == NULL || rstd == NULL || (o = spw__tape_op(t, T_LAYERNORM, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_layernorm(t->queue, y->data, mean, rstd, x->data, g->data, b->data, x->rows, x->cols, eps);
    o->in[0] = x;
    o->param[0] = g;
    o->param[1] = b;
    o->saved[0] = mean;
    o->saved[1] = rstd;
    return y;
}

static spw_value *
rmsnorm(spw_tape *t, spw_value *x, spw_value *g, float offset, float eps)
{
    spw_value *y;
    float *rstd;
    uint64_t rows;
    spw__op *o;
    if (x == NULL || g == NULL || x->cols % g->cols != 0)
        return spw__tape_fail(t);
    rows = x->rows * (x->cols / g->cols);
    y = spw__tape_value(t, x->rows, x->cols, NULL);
    rstd = spw__tape_take(t, rows * sizeof(float));
    if (y == NULL || rstd == NULL || (o = spw__tape_op(t, T_RMSNORM, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_rmsnorm(t->queue, y->data, rstd, x->data, g->data, offset, rows, g->cols, eps);
    o->in[0] = x;
    o->param[0] = g;
    o->saved[0] = rstd;
    o->p = offset;
    return y;
}

spw_value *
spw_nn_rmsnorm(spw_tape *t, spw_value *x, spw_value *g, float eps)
{
    return rmsnorm(t, x, g, 0, eps);
}

spw_value *
spw_nn_rmsnorm_from_one(spw_tape *t, spw_value *x, spw_value *g, float eps)
{
    return rmsnorm(t, x, g, 1, eps);
}

spw_value *
spw_nn_rope_part(spw_tape *t, spw_value *x, uint64_t col, const float *cos_sin, uint64_t T, uint64_t heads, uint64_t D,
                 uint64_t R, bool neighbors)
{
    spw_value *y;
    spw__op *o;
    act *at;
    if (x == NULL || heads == 0 || x->cols < col + (heads - 1) * D + R || R % 2 != 0 || R > D)
        return spw__tape_fail(t);
    y = spw__tape_value(t, x->rows, x->cols, x->data);
    if (y == NULL || (o = spw__tape_op(t, T_ROPE, y)) == NULL)
        return spw__tape_fail(t);
    y->there = x->there;
    cos_sin = cos_sin == NULL ? NULL : cos_sin + t->first_row % T * R;
    at = spw__tape_at_col(t, y->data, col);
    if (spw__tape_computes(t) && !y->there && t->places != NULL)
        spw_gpu_rope_at(t->queue, at, x->cols, cos_sin, t->places, x->rows, heads, D, R, neighbors);
    else if (spw__tape_computes(t) && !y->there)
        spw_gpu_rope(t->queue, at, x->cols, cos_sin, x->rows, T, heads, D, R, neighbors, 1);
    o->in[0] = x;
    o->cos_sin = cos_sin;
    o->T = T;
    o->heads = heads;
    o->D = D;
    o->R = R;
    o->col[0] = col;
    o->neighbors = neighbors;
    return y;
}

spw_value *
spw_nn_rope(spw_tape *t, spw_value *x, const float *cos_sin, uint64_t T, uint64_t heads, uint64_t D, uint64_t R)
{
    return spw_nn_rope_part(t, x, 0, cos_sin, T, heads, D, R, false);
}

spw_value *
spw_nn_columns(spw_tape *t, spw_value *x, uint64_t first, uint64_t count)
{
    spw_value *y;
    spw__op *o;
    if (x == NULL || count == 0 || first + count > x->cols)
        return spw__tape_fail(t);
    y = spw__tape_value(t, x->rows, count, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_COLUMNS, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t) && !y->there)
        spw_gpu_copy_heads(t->queue, y->data, count, count, spw__tape_at_col(t, x->data, first), x->cols, 0, x->rows, 1,
                           count);
    o->in[0] = x;
    o->col[0] = first;
    return y;
}

spw_value *
spw_nn_keys(spw_tape *t, spw_value *own, spw_value *shared, uint64_t col, uint64_t heads, uint64_t N, uint64_t R)
{
    spw_value *y;
    spw__op *o;
    if (own == NULL || shared == NULL || heads == 0 || own->cols % heads != 0 || own->cols / heads < N ||
        col + R > shared->cols || own->rows != shared->rows)
        return spw__tape_fail(t);
    y = spw__tape_value(t, own->rows, heads * (N + R), NULL);
    if (y == NULL || (o = spw__tape_op(t, T_KEYS, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t) && !y->there) {
        spw_gpu_copy_heads(t->queue, y->data, y->cols, N + R, own->data, own->cols, own->cols / heads, own->rows, heads,
                           N);
        spw_gpu_copy_heads(t->queue, spw__tape_at_col(t, y->data, N), y->cols, N + R,
                           spw__tape_at_col(t, shared->data, col), shared->cols, 0, own->rows, heads, R);
    }
    o->in[0] = own;
    o->in[1] = shared;
    o->col[1] = col;
    o->heads = heads;
    o->D = N;
    o->R = R;
    return y;
}

spw_value *
spw_nn_attention(spw_tape *t, spw_value *q, uint64_t q_col, spw_value *k, uint64_t k_col, spw_value *v, uint64_t v_col,
                 spw_value *sinks, const spw_attention_shape *shape)
{
    uint64_t rows = shape->B * shape->T, Dv = shape->Dv > 0 ? shape->Dv : shape->D;
    uint64_t v_head = shape->v_head > 0 ? shape->v_head : Dv;
    spw_value *y;
    float *lse;
    spw__op *o;
    if (q == NULL || k == NULL || v == NULL || q->rows != rows || k->rows != rows || v->rows != rows ||
        q_col + shape->Hq * shape->D > q->cols || k_col + shape->Hk * shape->D > k->cols ||
        v_col + (shape->Hk - 1) * v_head + Dv > v->cols || Dv > shape->D || (sinks != NULL && sinks->cols != shape->Hq))
        return spw__tape_fail(t);
    if (t->cache != NULL && (t->cache_taken || t->cache_width != shape->Hk * shape->D))
        return spw__tape_fail(t);
    t->cache_taken = true;
    y = spw__tape_value(t, rows, shape->Hq * Dv, NULL);
    lse = spw__tape_take(t, rows * shape->Hq * sizeof(float));
    if (y == NULL || lse == NULL || (o = spw__tape_op(t, T_ATTENTION, y)) == NULL)
        return spw__tape_fail(t);
    o->shape = *shape;
    o->shape.q_stride = q->cols;
    o->shape.kv_stride = k->cols;
    o->shape.v_stride = v->cols;
    o->shape.sinks = sinks != NULL ? sinks->data : NULL;
    if (spw__tape_computes(t) && t->cache != NULL)
        spw_gpu_attention_cached(t->queue, y->data, spw__tape_at_col(t, q->data, q_col),
                                 spw__tape_at_col(t, k->data, k_col), spw__tape_at_col(t, v->data, v_col), t->cache,
                                 &o->shape);
    else if (spw__tape_computes(t))
        spw_gpu_attention(t->queue, y->data, lse, spw__tape_at_col(t, q->data, q_col),
                          spw__tape_at_col(t, k->data, k_col), spw__tape_at_col(t, v->data, v_col), &o->shape);
    o->in[0] = q;
    o->in[1] = k;
    o->in[2] = v;
    o->col[0] = q_col;
    o->col[1] = k_col;
    o->col[2] = v_col;
    o->param[0] = sinks;
    o->saved[0] = lse;
    return y;
}

spw_value *
spw_nn_gelu(spw_tape *t, spw_value *x)
{
    spw_value *y = x == NULL ? NULL : spw__tape_value(t, x->rows, x->cols, NULL);
    spw__op *o;
    if (y == NULL || (o = spw__tape_op(t, T_GELU, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_gelu(t->queue, y->data, x->data, x->rows * x->cols);
    o->in[0] = x;
    return y;
}

void
spw__tape_gate_mul(spw_tape *t, const spw__op *o, uint64_t first, uint64_t rows)
{
    const spw_value *y = o->out, *gate = o->in[0], *up = o->in[1];
    spw_gpu_gate_mul(
        t->queue, o->gate, spw__tape_at_row(t, y, y->data, first), spw__tape_at_row(t, gate, gate->data, first),
        spw__tape_at_col(t, spw__tape_at_row(t, up, up->data, first), o->col[1]), rows, y->cols, gate->cols);
}

/* up begins at the column; in a value of its own at 0. */
static spw_value *
gate_mul(spw_tape *t, spw_gate kind, spw_value *gate, spw_value *up, uint64_t up_col)
{
    spw_value *y = spw__tape_value(t, gate->rows, gate->cols - up_col, NULL);
    spw__op *o;
    if (y == NULL || (o = spw__tape_op(t, T_GATE_MUL, y)) == NULL)
        return spw__tape_fail(t);
    o->kind = T_GATE_MUL;
    o->out = y;
    o->in[0] = gate;
    o->in[1] = up;
    o->col[1] = up_col;
    o->gate = kind;
    if (spw__tape_computes(t) && !t->in_experts)
        spw__tape_gate_mul(t, o, 0, y->rows);
    return y;
}

spw_value *
spw_nn_gate_mul(spw_tape *t, spw_gate kind, spw_value *gate, spw_value *up)
{
    if (gate == NULL || up == NULL || gate->rows != up->rows || gate->cols != up->cols || kind == SPW_GATE_CLAMPED)
        return spw__tape_fail(t);
    return gate_mul(t, kind, gate, up, 0);
}

spw_value *
spw_nn_gate_mul_packed(spw_tape *t, spw_gate kind, spw_value *x)
{
    return x == NULL || x->cols % 2 != 0 ? spw__tape_fail(t) : gate_mul(t, kind, x, x, x->cols / 2);
}

spw_value *
spw_nn_add_gated(spw_tape *t, spw_value *onto, spw_value *x, spw_value *gate)
{
    spw_value *y;
    spw__op *o;
    if (onto == NULL || x == NULL || gate == NULL || onto->rows != x->rows || onto->cols != x->cols ||
        gate->rows != x->rows || gate->cols != 1)
        return spw__tape_fail(t);
    y = spw__tape_value(t, x->rows, x->cols, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_ADD_GATED, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_add_gated(t->queue, y->data, onto->data, x->data, gate->data, x->rows, x->cols);
    o->in[0] = onto;
    o->in[1] = x;
    o->in[2] = gate;
    return y;
}

spw_value *
spw_nn_add(spw_tape *t, spw_value *a, spw_value *b)
{
    spw_value *y;
    spw__op *o;
    if (a == NULL || b == NULL || a->rows != b->rows || a->cols != b->cols)
        return spw__tape_fail(t);
    y = spw__tape_value(t, a->rows, a->cols, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_ADD, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_add(t->queue, y->data, a->data, b->data, y->rows * y->cols);
    o->in[0] = a;
    o->in[1] = b;
    return y;
}

spw_value *
spw_nn_add_scaled(spw_tape *t, spw_value *a, spw_value *b, float scale)
{
    spw_value *y;
    spw__op *o;
    if (a == NULL || b == NULL || a->rows != b->rows || a->cols != b->cols)
        return spw__tape_fail(t);
    y = spw__tape_value(t, a->rows, a->cols, a->data);
    if (y == NULL || (o = spw__tape_op(t, T_ADD_SCALED, y)) == NULL)
        return spw__tape_fail(t);
    y->there = a->there;
    if (spw__tape_computes(t) && !y->there)
        spw_gpu_add_scaled(t->queue, y->data, a->data, b->data, scale, y->rows * y->cols);
    o->in[0] = a;
    o->in[1] = b;
    o->p = scale;
    return y;
}

spw_value *
spw_nn_scale(spw_tape *t, spw_value *x, float scale)
{
    spw_value *y = x == NULL ? NULL : spw__tape_value(t, x->rows, x->cols, NULL);
    char rounded[sizeof(float)];
    spw__op *o;
    if (y == NULL || (o = spw__tape_op(t, T_ADD_SCALED, y)) == NULL)
        return spw__tape_fail(t);
    spw_convert(rounded, t->act_dtype, &scale, SPW_F32, 1);
    spw_convert(&scale, SPW_F32, rounded, t->act_dtype, 1);
    if (spw__tape_computes(t))
        spw_gpu_add_scaled(t->queue, y->data, NULL, x->data, scale, y->rows * y->cols);
    o->in[1] = x; /* onto nothing */
    o->p = scale;
    return y;
}

spw_value *
spw_nn_soft_cap(spw_tape *t, spw_value *x, float cap)
{
    if (x == NULL || t->record)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_soft_cap(t->queue, x->data, x->data, cap, x->rows * x->cols);
    return x;
}

spw_value *
spw_nn_dropout(spw_tape *t, spw_value *x, float p, const spw_batch *batch, uint64_t site)
{
    spw_value *y;
    spw__op *o;
    if (p == 0)
        return x;
    y = x == NULL ? NULL : spw__tape_value(t, x->rows, x->cols, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_DROPOUT, y)) == NULL)
        return spw__tape_fail(t);
    o->in[0] = x;
    o->p = p;
    o->key = batch->dropout_key + site * 0x9E3779B97F4A7C15ull;
    o->counter = batch->dropout_counter;
    o->first = t->first_row * x->cols;
    if (spw__tape_computes(t))
        spw_gpu_dropout(t->queue, y->data, x->data, x->rows * x->cols, p, o->key, o->counter, o->first);
    return y;
}

/* Brings what there is of a gradient to where it is to lie. */
static void
settle(spw_tape *t, spw_value *v)
{
    if (v->so_far != NULL && !t->dry)
        spw_gpu_copy_d2d(t->queue, v->grad, t->act_dtype, v->so_far, t->act_dtype, v->rows * v->cols, NULL);
    v->so_far = NULL;
}

act *
spw__tape_grad(spw_tape *t, spw_value *v, unsigned flag, unsigned *flags)
{
    if (v == NULL || !v->needs_grad)
        return NULL;
    if (v->grad == NULL)
        v->grad = spw__tape_take(t, v->rows * v->cols * t->act_bytes);
    settle(t, v);
    if (v->grad_set)
        *flags |= flag;
    v->grad_set = true;
    return v->grad;
}

act *
spw__tape_grad_onto(spw_tape *t, spw_value *v, const act **onto)
{
    *onto = NULL;
    if (v == NULL || !v->needs_grad)
        return NULL;
    if (v->grad == NULL)
        v->grad = spw__tape_take(t, v->rows * v->cols * t->act_bytes);
    *onto = v->so_far != NULL ? v->so_far : v->grad_set ? v->grad : NULL;
    v->so_far = NULL;
    v->grad_set = true;
    return v->grad;
}

bool
spw__tape_begins(const spw_tape *t, spw_value *w)
{
    if (t->dry || w == NULL || w->w_grad == NULL || w->w_begun == NULL || *w->w_begun)
        return false;
    *w->w_begun = true;
    return true;
}

float *
spw__tape_sum(spw_tape *t, spw_value *w)
{
    if (spw__tape_begins(t, w))
        spw_gpu_zero(t->queue, w->w_grad, w->rows * w->cols * sizeof(float));
    return w == NULL ? NULL : w->w_grad;
}

/* By shape and device alone, because the sum of the weights' gradient depends on it. Chunks of about the same size. */
static uint64_t
rows_at_a_time(const spw_tape *t, uint64_t M, uint64_t V)
{
    enum { STEP = 256, LOGITS_BYTES = 256 << 20 };
    uint64_t most = LOGITS_BYTES / (spw_gpu_logits_stride(V) * t->act_bytes) / STEP * STEP, chunks, rows;
    most = most < STEP ? STEP : most < t->loss_rows ? most : t->loss_rows;
    chunks = (M + most - 1) / most;
    rows = chunks > 0 ? spw_round_up((M + chunks - 1) / chunks, STEP) : 0;
    return rows < M ? rows : M;
}

spw_value *
spw_nn_head_loss(spw_tape *t, spw_value *x, spw_value *w, const spw_batch *batch, float cap)
{
    uint64_t M = batch->sequences * batch->positions, rows;
    unsigned flags = 0;
    spw_value *y;
    act *logits, *dx;
    if (x == NULL || w == NULL || x->rows != M || x->cols != w->cols)
        return spw__tape_fail(t);
    rows = rows_at_a_time(t, M, w->rows);
    y = spw__tape_value(t, 1, 1, NULL);
    logits = spw__tape_take(t, rows * spw_gpu_logits_stride(w->rows) * t->act_bytes);
    dx = t->record ? spw__tape_grad(t, x, SPW_OP_ACC_DX, &flags) : NULL;
    if (t->record && spw__tape_begins(t, w))
        flags |= SPW_OP_SET_DW;
    if (y == NULL || logits == NULL || t->kept || t->status != SPW_OK || spw__tape_op(t, T_HEAD, y) == NULL)
        return spw__tape_fail(t);
    if (!t->dry)
        spw_gpu_linear_cross_entropy(t->queue, batch->losses, dx, t->record ? w->w_grad : NULL, x->data, w->data,
                                     batch->targets, logits, rows, M, w->rows, w->cols, batch->grad_scale, cap, flags);
    return y;
}

/* ---------------------------------------------------------------- backward */

static void
pass_through(spw_tape *t, spw_value *to, const spw_value *from)
{
    unsigned acc = 0;
    act *dx = spw__tape_grad(t, to, 1, &acc);
    if (dx == NULL || t->dry)
        return;
    if (acc)
        spw_gpu_add(t->queue, dx, dx, from->grad, from->rows * from->cols);
    else
        spw_gpu_copy_d2d(t->queue, dx, t->act_dtype, from->grad, t->act_dtype, from->rows * from->cols, NULL);
}

void
spw__tape_hand_over(spw_tape *t, spw_value *to, const spw_value *from)
{
    if (to == NULL || !to->needs_grad)
        return;
    if (to->grad_set)
        pass_through(t, to, from);
    else if (to->grad == NULL)
        to->grad = from->grad;
    else
        to->so_far = from->grad;
    to->grad_set = true;
}

/* Nothing else takes v than this operation, once: the gradient that it gives v is all there is. */
static bool
only_user(const spw_tape *t, const spw__op *user, const spw_value *v)
{
    uint32_t uses = 0;
    for (const spw__op *o = t->ops; o <= user; o++)
        for (int i = 0; i < 3; i++)
            uses += o->in[i] == v;
    return uses == 1 && !v->grad_set; /* those behind it are done */
}

/* An operation whose output lies in its input's memory: both gradients are one buffer. */
static void
share_grad(spw_value *in, const spw_value *out)
{
    if (in == NULL || !in->needs_grad)
        return;
    SPW_ASSERT(!in->grad_set);
    in->grad = out->grad;
    in->grad_set = true;
}

static void
linear_backward(spw_tape *t, spw__op *o)
{
    spw_value *y = o->out, *x = o->in[0], *w = o->param[0];
    unsigned flags = o->flags;
    uint64_t M = x->rows, N = y->cols, K = (flags & SPW_OP_W_IN_OUT) ? w->rows : w->cols;
    bool through_gelu = x->gelu_in != NULL && x->needs_grad && only_user(t, o, x);
    act *dx = spw__tape_grad(t, x, SPW_OP_ACC_DX, &flags);
    x->grad_of_gelu_in = through_gelu;
    if (spw__tape_begins(t, w))
        flags |= SPW_OP_SET_DW;
    if (!t->dry && y->gelu_in != NULL && !y->grad_of_gelu_in)
        spw_gpu_gelu_backward(t->queue, y->grad, y->grad, y->gelu_in, M * N, 0);
    if (spw__fp8_takes(x, w)) {
        float *db = t->dry ? NULL : spw__tape_sum(t, o->param[1]);
        spw__fp8_backward(t, o, dx, flags);
        if (db != NULL)
            spw_gpu_linear_backward(t->queue, NULL, NULL, db, y->grad, x->data, w->data, M, N, K, o->flags);
        if (!t->dry && through_gelu)
            spw_gpu_gelu_backward(t->queue, dx, dx, x->gelu_in, M * K, 0);
        spw__tape_hand_over(t, o->in[1], y);
        return;
    }
    if (t->dry) {
        spw__tape_hand_over(t, o->in[1], y);
        return;
    }
    if (through_gelu)
        spw_gpu_linear_gelu_backward(t->queue, dx, w->w_grad, spw__tape_sum(t, o->param[1]), y->grad, x->data,
                                     x->gelu_in, w->data, M, N, K, flags);
    else
        spw_gpu_linear_backward(t->queue, dx, w->w_grad, spw__tape_sum(t, o->param[1]), y->grad, x->data, w->data, M, N,
                                K, flags);
    spw__tape_hand_over(t, o->in[1], y);
}

void
spw__tape_gate_mul_backward(spw_tape *t, const spw__op *o, uint64_t first, uint64_t rows)
{
    const spw_value *y = o->out, *gate = o->in[0], *up = o->in[1];
    spw_gpu_gate_mul_backward(
        t->queue, o->gate, spw__tape_at_row(t, gate, o->dx[0], first), spw__tape_at_row(t, up, o->dx[1], first),
        spw__tape_at_row(t, y, y->grad, first), spw__tape_at_row(t, gate, gate->data, first),
        spw__tape_at_col(t, spw__tape_at_row(t, up, up->data, first), o->col[1]), rows, y->cols, gate->cols, o->flags);
}

static void
prepare_gate_mul(spw_tape *t, spw__op *o)
{
    o->dx[0] = spw__tape_grad(t, o->in[0], SPW_OP_ACC_DX, &o->flags);
    if (o->col[1] > 0) { /* halves of one gradient: both find what was there before */
        o->dx[1] = o->dx[0] == NULL ? NULL : spw__tape_at_col(t, o->dx[0], o->col[1]);
        o->flags |= (o->flags & SPW_OP_ACC_DX) != 0 ? SPW_OP_ACC_DX2 : 0u;
    } else {
        o->dx[1] = spw__tape_grad(t, o->in[1], SPW_OP_ACC_DX2, &o->flags);
    }
}

static void
keys_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out, *own = o->in[0], *shared = o->in[1];
    uint64_t N = o->D, R = o->R;
    unsigned written = 0; /* by those who read the other columns */
    act *d = spw__tape_grad(t, o->in[0], 1, &written), *dshared = spw__tape_grad(t, o->in[1], 1, &written);
    if (!t->dry && d != NULL)
        spw_gpu_copy_heads(t->queue, d, own->cols, own->cols / o->heads, y->grad, y->cols, N + R, y->rows, o->heads, N);
    if (!t->dry && dshared != NULL)
        spw_gpu_sum_heads(t->queue, spw__tape_at_col(t, dshared, o->col[1]), shared->cols,
                          spw__tape_at_col(t, y->grad, N), y->cols, N + R, y->rows, o->heads, R);
}

static void
add_gated_backward(spw_tape *t, spw__op *o)
{
    spw_value *y = o->out, *x = o->in[1], *gate = o->in[2];
    unsigned added = 0;
    act *dx = spw__tape_grad(t, x, 1, &added), *dgate = spw__tape_grad(t, gate, 1, &added);
    SPW_ASSERT(!added && x->needs_grad && gate->needs_grad);
    if (!t->dry && dx != NULL && dgate != NULL)
        spw_gpu_add_gated_backward(t->queue, dx, dgate, y->grad, x->data, gate->data, y->rows, y->cols);
    spw__tape_hand_over(t, o->in[0], y);
}

static void
backward_op(spw_tape *t, spw__op *o)
{
    spw_gpu_queue *q = t->queue;
    spw_value *y = o->out, *x = o->in[0];
    unsigned flags = o->flags;
    const act *onto;
    act *dx, *d2;
    switch (o->kind) {
    case T_LINEAR: linear_backward(t, o); return;
    case T_EMBEDDING: {
        spw_value *table = o->param[0];
        if (!t->dry && table->w_grad != NULL)
            spw_gpu_embedding_backward(q, spw__tape_sum(t, table), y->grad, o->ids, y->rows, table->rows, table->cols);
        share_grad(x, y);
        return;
    }
    case T_LAYERNORM:
        dx = spw__tape_grad_onto(t, x, &onto);
        if (!t->dry)
            spw_gpu_layernorm_backward(q, dx, onto, spw__tape_sum(t, o->param[0]), spw__tape_sum(t, o->param[1]),
                                       y->grad, x->data, o->param[0]->data, o->saved[0], o->saved[1], x->rows, x->cols);
        return;
    case T_RMSNORM:
        dx = spw__tape_grad_onto(t, x, &onto);
        if (!t->dry)
            spw_gpu_rmsnorm_backward(q, dx, onto, spw__tape_sum(t, o->param[0]), y->grad, x->data, o->param[0]->data,
                                     o->p, o->saved[0], x->rows * (x->cols / o->param[0]->cols), o->param[0]->cols);
        return;
    case T_ROPE:
        if (!t->dry)
            spw_gpu_rope(q, spw__tape_at_col(t, y->grad, o->col[0]), y->cols, o->cos_sin, y->rows, o->T, o->heads, o->D,
                         o->R, o->neighbors, -1);
        share_grad(x, y);
        return;
    case T_COLUMNS:
        dx = spw__tape_grad(t, x, 1, &flags);
        if (!t->dry && dx != NULL)
            spw_gpu_copy_heads(q, spw__tape_at_col(t, dx, o->col[0]), x->cols, 0, y->grad, y->cols, 0, y->rows, 1,
                               y->cols);
        return;
    case T_KEYS: keys_backward(t, o); return;
    case T_ATTENTION: {
        act *d[3];
        for (int i = 0; i < 3; i++) {
            unsigned ignored = 0;
            SPW_ASSERT(!o->in[i]->grad_set || o->in[i] == o->in[0]);
            d[i] = spw__tape_grad(t, o->in[i], 1, &ignored);
        }
        if (!t->dry)
            spw_gpu_attention_backward(q, spw__tape_at_col(t, d[0], o->col[0]), spw__tape_at_col(t, d[1], o->col[1]),
                                       spw__tape_at_col(t, d[2], o->col[2]), spw__tape_sum(t, o->param[0]), y->grad,
                                       y->data, o->saved[0], spw__tape_at_col(t, o->in[0]->data, o->col[0]),
                                       spw__tape_at_col(t, o->in[1]->data, o->col[1]),
                                       spw__tape_at_col(t, o->in[2]->data, o->col[2]), &o->shape);
        return;
    }
    case T_GELU:
        dx = spw__tape_grad(t, x, SPW_OP_ACC_DX, &flags);
        if (!t->dry && dx != NULL)
            spw_gpu_gelu_backward(q, dx, y->grad, x->data, y->rows * y->cols, flags);
        return;
    case T_GATE_MUL:
        prepare_gate_mul(t, o);
        if (!t->dry && !t->in_experts)
            spw__tape_gate_mul_backward(t, o, 0, y->rows);
        return;
    case T_ROUTE:
        dx = spw__tape_grad(t, x, SPW_OP_ACC_DX, &flags);
        if (!t->dry && dx != NULL)
            spw_gpu_route_backward(q, dx, y->routed->dweights, x->data, &y->routed->on_device, &y->routed->rule,
                                   y->routed->balance, flags);
        return;
    case T_DISPATCH:
        spw__experts_dispatch_backward(t, o);
        t->in_experts = false;
        return;
    case T_LINEAR_EACH: o->dx[0] = spw__tape_grad(t, x, SPW_OP_ACC_DX, &o->flags); return;
    case T_COMBINE:
        spw__experts_combine_backward(t, o);
        t->in_experts = true;
        return;
    case T_ADD_GATED: add_gated_backward(t, o); return;
    case T_ADD:
        pass_through(t, o->in[1], y);
        spw__tape_hand_over(t, x, y);
        return;
    case T_ADD_SCALED: {
        unsigned acc = 0;
        d2 = spw__tape_grad(t, o->in[1], 1, &acc);
        if (!t->dry && d2 != NULL)
            spw_gpu_add_scaled(q, d2, acc ? d2 : NULL, y->grad, o->p, y->rows * y->cols);
        share_grad(x, y);
        return;
    }
    case T_DROPOUT:
        dx = spw__tape_grad(t, x, SPW_OP_ACC_DX, &flags);
        if (dx != NULL && (flags & SPW_OP_ACC_DX)) {
            act *part = spw__tape_take(t, y->rows * y->cols * t->act_bytes);
            if (!t->dry && part != NULL) {
                spw_gpu_dropout(q, part, y->grad, y->rows * y->cols, o->p, o->key, o->counter, o->first);
                spw_gpu_add(q, dx, dx, part, y->rows * y->cols);
            }
        } else if (!t->dry && dx != NULL) {
            spw_gpu_dropout(q, dx, y->grad, y->rows * y->cols, o->p, o->key, o->counter, o->first);
        }
        return;
    case T_ROWS: spw__rows_backward(t, o); return;
    case T_HEAD: return; /* its gradients were made with the loss */
    }
}

/* Nobody is to read what was put off, and its memory, the last that was taken, is backward's. */
static void
drop_pending(spw_tape *t)
{
    spw__op *o = t->pending;
    t->pending = NULL;
    if (o == NULL || t->kept)
        return;
    t->used = t->pending_from;
    o->out->data = NULL;
    if (o->kind == T_ROWS) {
        o->rows->dropped = true;
        for (uint32_t k = 0; k < o->rows->out_count; k++)
            o->rows->out[k]->data = NULL;
    }
}

void
spw__tape_run_backward(spw_tape *t)
{
    drop_pending(t);
    if (t->kept) {
        t->arena = t->after;
        t->arena_bytes = t->after_bytes;
        t->used = t->peak = 0;
        t->kept = false;
    }
    for (uint32_t i = t->op_count; i-- > 0 && t->status == SPW_OK;) {
        if (t->ops[i].out->grad_set || t->ops[i].kind == T_ROWS)
            backward_op(t, &t->ops[i]);
    }
    for (uint32_t i = 0; i < t->value_count && t->status == SPW_OK; i++)
        settle(t, &t->values[i]);
}

void
spw_tape_backward(spw_tape *t, spw_value *out)
{
    if (out == NULL)
        return;
    out->grad_set = true;
    spw__tape_run_backward(t);
}
