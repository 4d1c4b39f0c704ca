/*
 * The tape itself: values and operations over an arena, written down as they come; backward walks the list of operations from the
 * end, where a value's gradient is allocated when it is first written and added to after that. What an operation computes, forward and
 * backward, is its own file's.
 */
#include "tape_internal.h"

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
        spw_tape_destroy(tape->tile);
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
    t->op_count = t->value_count = t->routing_count = t->each_count = t->found = 0;
    t->passed = 0;
    t->cache = NULL;
    t->delta_cache = NULL;
    t->front_cache = NULL;
    t->places = NULL;
    t->by_row = t->cache_taken = false;
    t->on_route = NULL;
    t->on_turn = NULL;
    t->in_experts = t->in_pieces = false;
    t->part = SPW_PART_ALL;
    t->apart = NULL;
    t->asleep = false;
    t->pending = NULL;
    t->linear_flops = t->traded = 0;
    t->first_row = 0;
    t->into_next = t->rows_count = 0;
    t->into_there = false;
    t->failure = (spw_error){0};
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
spw_tape_call_part(spw_tape *t, spw_part part, spw_apart *apart, uint64_t first, uint64_t end)
{
    SPW_ASSERT(t->part == SPW_PART_ALL && !t->kept && !t->keeping);
    t->part = part;
    t->apart = apart;
    t->part_first = first;
    t->part_end = end;
    if (part == SPW_PART_TURN || part == SPW_PART_AFTER || part == SPW_PART_BACK_READ || part == SPW_PART_BACK_TURN)
        spw__tape_sleep(t);
}

void
spw__tape_sleep(spw_tape *t)
{
    SPW_ASSERT(!t->asleep);
    t->asleep = true;
    t->dry_awake = t->dry;
    t->dry = true;
}

void
spw__tape_wake(spw_tape *t)
{
    SPW_ASSERT(t->asleep);
    t->asleep = false;
    t->dry = t->dry_awake;
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
spw_tape_share(spw_tape *t, const spw_share *share)
{
    t->share = share;
}

uint64_t
spw_tape_traded(const spw_tape *t)
{
    return t->traded;
}

uint64_t
spw_tape_sent_most(const spw_tape *t)
{
    return t->send_most;
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

void
spw_tape_use_delta_cache(spw_tape *t, const spw_delta_cache *cache)
{
    t->delta_cache = cache;
    if (t->record)
        t->status = SPW_EINVAL;
}

void
spw_tape_use_front_cache(spw_tape *t, const spw_front_cache *cache)
{
    t->front_cache = cache;
    if (t->record)
        t->status = SPW_EINVAL;
}

uint64_t
spw__tape_sees(const spw_tape *t, uint64_t positions)
{
    return t->dry ? 0 : t->cache != NULL ? t->cache->capacity : positions;
}

uint64_t
spw_tape_arena_used(const spw_tape *t)
{
    return t->peak;
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
        spw__linear_forward(t, o);
}

uint64_t
spw_tape_linear_flops(const spw_tape *t)
{
    return t->linear_flops;
}

unsigned
spw_tape_passed(const spw_tape *t)
{
    return t->passed;
}

spw_status
spw_tape_check(spw_tape *t, spw_error *err)
{
    spw__tape_catch_up(t);
    if (t->failure.status != SPW_OK && err != NULL)
        *err = t->failure;
    if (t->failure.status != SPW_OK)
        return t->failure.status;
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
    if (t->asleep)
        return (void *)(uintptr_t)256;
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
    *v = (spw_value){.rows = rows, .cols = cols, .data = data, .there = there};
    if (data == NULL && !t->in_pieces && (v->data = spw__tape_take(t, rows * cols * t->act_bytes)) == NULL)
        return NULL;
    return v;
}

spw__op *
spw__tape_op(spw_tape *t, spw__op_kind kind, spw_value *out)
{
    spw__op *o = &t->unrecorded;
    spw__tape_catch_up(t);
    if (t->is_tile && (kind == T_EMBEDDING || kind == T_ATTENTION || kind == T_SHARE_OUT || kind == T_FRONT_ATTENTION ||
                       kind == T_COMPRESS || kind == T_CONV || kind == T_DELTA || kind == T_LEAVE || kind == T_BRING ||
                       kind == T_ROUTE || kind == T_DISPATCH || kind == T_HEAD)) {
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
        v->trained = w_grad != NULL;
        v->is_param = true;
    }
    return v;
}

spw_value *
spw__tape_part(spw_tape *t, spw_value *w, uint64_t first, uint64_t rows, uint64_t cols)
{
    spw_value *v = w == NULL ? NULL : spw__tape_value(t, rows, cols, spw__tape_at_col(t, w->data, first));
    if (v == NULL)
        return NULL;
    v->trained = w->trained;
    v->is_param = true;
    v->part_of = w;
    v->part_first = first;
    return v;
}

/* ---------------------------------------------------------------- whose gradients are wanted */

static bool
needs(const spw_value *v)
{
    return v != NULL && v->needs_grad;
}

static bool
any_trained(spw_value *const *params, uint64_t count)
{
    uint64_t i = 0;
    while (params != NULL && i < count && (params[i] == NULL || !params[i]->trained))
        i++;
    return params != NULL && i < count;
}

/* Routings are inputs of several; only what weighs depends on them, and experts have their weights beside the op's own. */
static bool
wants_output(const spw__op *o)
{
    const bool of_inputs = needs(o->in[0]) || needs(o->in[2]);
    switch (o->kind) {
    case T_BRING: return o->side.grad != NULL;
    case T_DISPATCH: return of_inputs || (o->in[1]->routed->weighs_input && needs(o->in[1]));
    case T_LINEAR_EACH: {
        const uint64_t E = o->in[1]->routed->on_device.E;
        return of_inputs || any_trained(o->each, E) || any_trained(o->each_bias, E) || any_trained(&o->stack, 1);
    }
    case T_CONV: return of_inputs || any_trained(o->param, 3) || any_trained(o->bias, 3);
    default: return of_inputs || needs(o->in[1]) || any_trained(o->param, sizeof o->param / sizeof o->param[0]);
    }
}

static void
find_need(const spw__op *o)
{
    if (o->kind == T_BY_EXPERT) { /* what it makes is a parameter */
        o->out->trained = o->param[0]->trained;
        return;
    }
    if (o->kind == T_ROWS) /* whose tiles know it */
        return;
    o->out->needs_grad = wants_output(o);
    if (!o->out->needs_grad || (o->kind != T_ATTENTION && o->kind != T_FRONT_ATTENTION && o->kind != T_COMPRESS &&
                                o->kind != T_DELTA && o->kind != T_ADD_GATED))
        return;
    for (int i = o->kind == T_ADD_GATED ? 1 : 0; i < 3 && o->in[i] != NULL; i++)
        o->in[i]->needs_grad = true; /* what multiplies is made together */
}

void
spw__tape_find_needs(spw_tape *t)
{
    for (; t->record && t->found < t->op_count; t->found++)
        find_need(&t->ops[t->found]);
}

/* ---------------------------------------------------------------- gradients of values and parameters */

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
    if (w != NULL && w->part_of != NULL) {
        float *whole = spw__tape_sum(t, w->part_of);
        return whole != NULL ? whole + w->part_first : NULL;
    }
    if (spw__tape_begins(t, w))
        spw_gpu_zero(t->queue, w->w_grad, w->rows * w->cols * sizeof(float));
    return w == NULL ? NULL : w->w_grad;
}

void
spw__tape_pass_through(spw_tape *t, spw_value *to, const spw_value *from)
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
        spw__tape_pass_through(t, to, from);
    else if (to->grad == NULL)
        to->grad = from->grad;
    else
        to->so_far = from->grad;
    to->grad_set = true;
}

void
spw__tape_share_grad(spw_value *in, const spw_value *out)
{
    if (in == NULL || !in->needs_grad)
        return;
    SPW_ASSERT(!in->grad_set);
    in->grad = out->grad;
    in->grad_set = true;
}

float *
spw__tape_take_sums(spw_tape *t, const spw_value *v, const act *there)
{
    const uint64_t n = v->rows * v->cols;
    float *sums = spw__tape_take(t, n * sizeof *sums);
    spw__tape_begin_sums(t, sums, n, there);
    return sums;
}

void
spw__tape_begin_sums(spw_tape *t, float *sums, uint64_t n, const act *there)
{
    if (t->dry || sums == NULL)
        return;
    if (there != NULL)
        spw_gpu_copy_d2d(t->queue, sums, SPW_F32, there, t->act_dtype, n, NULL);
    else
        spw_gpu_zero(t->queue, sums, n * sizeof *sums);
}

bool
spw__tape_turn(spw_tape *t, const spw_routed *routed, uint64_t first, uint64_t end, spw_turn what)
{
    if (t->on_turn != NULL && t->on_turn(t->on_turn_ctx, routed, first, end, what, &t->failure) != SPW_OK)
        (void)spw__tape_fail(t);
    return t->status == SPW_OK;
}

/* ---------------------------------------------------------------- backward */

static void
backward_op(spw_tape *t, spw__op *o)
{
    switch (o->kind) {
    case T_LINEAR: spw__linear_backward(t, o); return;
    case T_EMBEDDING: spw__embedding_backward(t, o); return;
    case T_LAYERNORM: spw__layernorm_backward(t, o); return;
    case T_RMSNORM: spw__rmsnorm_backward(t, o); return;
    case T_ROPE: spw__rope_backward(t, o); return;
    case T_PARTS: spw__parts_backward(t, o); return;
    case T_BESIDE: spw__beside_backward(t, o); return;
    case T_LEAVE: spw__leave_backward(t, o); return;
    case T_BRING: spw__bring_backward(t, o); return;
    case T_KEYS: spw__keys_backward(t, o); return;
    case T_ATTENTION: spw__attention_backward(t, o); return;
    case T_SHARE_OUT: spw__share_out_backward(t, o); return;
    case T_SHARE_HOME: spw__share_home_backward(t, o); return;
    case T_FRONT_ATTENTION: spw__front_attention_backward(t, o); return;
    case T_COMPRESS: spw__compress_backward(t, o); return;
    case T_REPEAT: spw__repeat_backward(t, o); return;
    case T_STREAM_MAPS: spw__stream_maps_backward(t, o); return;
    case T_MIX: spw__mix_backward(t, o); return;
    case T_LINEAR_GROUPS: spw__linear_groups_backward(t, o); return;
    case T_CONV: spw__conv_backward(t, o); return;
    case T_DELTA: spw__delta_backward(t, o); return;
    case T_CURVE: spw__curve_backward(t, o); return;
    case T_GATE_MUL: spw__gate_mul_backward(t, o); return;
    case T_ROUTE: spw__experts_route_backward(t, o); return;
    case T_BY_EXPERT: spw__by_expert_backward(t, o); return;
    case T_DISPATCH:
        spw__experts_dispatch_backward(t, o);
        t->in_experts = false;
        return;
    case T_LINEAR_EACH: spw__linear_each_backward(t, o); return;
    case T_COMBINE: spw__experts_combine_backward(t, o); return;
    case T_ADD_GATED: spw__add_gated_backward(t, o); return;
    case T_ADD: spw__add_backward(t, o); return;
    case T_SCALE: spw__scale_backward(t, o); return;
    case T_ADD_SCALED_BY: spw__add_scaled_by_backward(t, o); return;
    case T_DROPOUT: spw__dropout_backward(t, o); return;
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
    spw__tape_find_needs(t);
    drop_pending(t);
    if (t->kept) {
        t->arena = t->after;
        t->arena_bytes = t->after_bytes;
        t->used = t->peak = 0;
        t->kept = false;
    }
    for (uint32_t i = t->op_count; i-- > 0 && t->status == SPW_OK;) {
        const spw__op *o = &t->ops[i];
        if (o->out->grad_set || o->kind == T_ROWS || (o->kind == T_DISPATCH && t->in_experts))
            backward_op(t, &t->ops[i]);
    }
    for (uint32_t i = 0; i < t->value_count && t->status == SPW_OK; i++)
        settle(t, &t->values[i]);
}

/* From a turn's combine to its dispatch, and what stacks were made of. */
static void
run_turn_backward(spw_tape *t)
{
    uint32_t i = t->op_count;
    spw__tape_find_needs(t);
    t->pending = NULL;
    while (i > 0 && t->ops[i - 1].kind != T_COMBINE)
        i--;
    if (i == 0) {
        (void)spw__tape_fail(t);
        return;
    }
    spw__tape_wake(t);
    do
        backward_op(t, &t->ops[--i]);
    while (t->status == SPW_OK && t->ops[i].kind != T_DISPATCH);
    while (t->status == SPW_OK && i-- > 0) {
        if (t->ops[i].kind == T_BY_EXPERT && t->ops[i].out->grad_set)
            backward_op(t, &t->ops[i]);
    }
}

void
spw_tape_backward(spw_tape *t, spw_value *out)
{
    if (out == NULL)
        return;
    if (t->part == SPW_PART_BACK_TURN) {
        run_turn_backward(t);
        return;
    }
    out->grad_set = true;
    spw__tape_run_backward(t);
}
