/*
 * A mixture of experts on the tape: between a dispatch and its combine the operations of some experts at a time run, all of
 * them or by turns.
 */
#include "tape_internal.h"

/* Takes the arrays of a routing; false when there is no room. */
static bool
take_routing(spw_tape *t, spw_routing *r)
{
    uint64_t pairs = r->M * r->k;
    r->weights = spw__tape_take(t, pairs * sizeof(float));
    r->choices = spw__tape_take(t, pairs * sizeof(int32_t));
    r->places = spw__tape_take(t, pairs * sizeof(int32_t));
    r->pairs = spw__tape_take(t, pairs * sizeof(int32_t));
    r->ends = spw__tape_take(t, r->E * sizeof(int32_t));
    return r->weights != NULL && r->choices != NULL && r->places != NULL && r->pairs != NULL && r->ends != NULL;
}

spw_value *
spw_nn_route(spw_tape *t, spw_value *logits, uint64_t choices, const spw_routing_rule *rule, float balance)
{
    spw_routed *routed = &t->routings[t->routing_count];
    spw_value *y;
    spw__op *o;
    if (logits == NULL || choices == 0 || choices > SPW_CHOICES_MAX || choices > logits->cols ||
        logits->cols > SPW_EXPERTS_MAX || t->routing_count == SPW__ROUTINGS_MAX || logits->rows * choices > INT32_MAX)
        return spw__tape_fail(t);
    memset(routed, 0, sizeof *routed);
    routed->on_device = (spw_routing){.M = logits->rows, .k = choices, .E = logits->cols};
    routed->rule = *rule;
    routed->balance = balance * (float)logits->cols / ((float)logits->rows * (float)logits->rows * (float)choices);
    t->routing_count++;
    if (!take_routing(t, &routed->on_device))
        return spw__tape_fail(t);
    y = spw__tape_value(t, logits->rows, choices, (act *)routed->on_device.weights);
    if (y == NULL || (o = spw__tape_op(t, T_ROUTE, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_route(t->queue, &routed->on_device, logits->data, rule);
    if (!t->dry)
        spw_gpu_read_bytes(t->queue, routed->ends, routed->on_device.ends, logits->cols * sizeof(int32_t));
    y->routed = routed;
    o->in[0] = logits;
    if (spw__tape_computes(t) && t->on_route != NULL && t->on_route(t->on_route_ctx, routed, &t->route_error) != SPW_OK)
        return spw__tape_fail(t);
    return y;
}

static bool
fits_routing(const spw_value *x, const spw_value *routing)
{
    return x != NULL && routing != NULL && routing->routed != NULL && x->rows == routing->rows * routing->cols;
}

spw_value *
spw_nn_dispatch(spw_tape *t, spw_value *x, spw_value *routing)
{
    spw_value *y;
    spw__op *o;
    if (x == NULL || routing == NULL || routing->routed == NULL || x->rows != routing->rows || t->in_experts)
        return spw__tape_fail(t);
    y = spw__tape_value(t, routing->rows * routing->cols, x->cols, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_DISPATCH, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_dispatch(t->queue, y->data, x->data, &routing->routed->on_device, x->cols);
    o->in[0] = x;
    o->in[1] = routing;
    t->in_experts = true;
    t->experts_first = t->op_count;
    return y;
}

/* Rows of expert e among those of all; returns how many. */
static uint64_t
rows_of(const spw_routed *r, uint64_t e, uint64_t *first)
{
    *first = e > 0 ? (uint64_t)r->ends[e - 1] : 0;
    return (uint64_t)r->ends[e] - *first;
}

static void
linear_each_forward(spw_tape *t, const spw__op *o, uint64_t first_expert, uint64_t end)
{
    const spw_value *y = o->out, *x = o->in[0];
    unsigned how = o->flags | (t->by_row ? SPW_OP_BY_ROW : 0u);
    for (uint64_t e = first_expert; e < end; e++) {
        uint64_t first, n = rows_of(o->in[1]->routed, e, &first);
        if (n > 0)
            spw_gpu_linear(t->queue, spw__tape_at_row(t, y, y->data, first), spw__tape_at_row(t, x, x->data, first),
                           o->each[e]->data, o->each_bias != NULL ? o->each_bias[e]->data : NULL, n, y->cols, x->cols,
                           how);
    }
}

static spw_value **
keep_each(spw_tape *t, spw_value *const *params, uint64_t E)
{
    spw_value **kept = memcpy(t->each + t->each_count, params, E * sizeof *params);
    t->each_count += (uint32_t)E;
    return kept;
}

spw_value *
spw_nn_linear_each(spw_tape *t, spw_value *x, spw_value *routing, spw_value *const *w, spw_value *const *b,
                   unsigned flags)
{
    uint64_t E, K, N;
    spw_value *y;
    spw__op *o;
    if (!fits_routing(x, routing) || !t->in_experts)
        return spw__tape_fail(t);
    E = routing->routed->on_device.E;
    if (t->each_count + 2 * E > SPW__VALUES_MAX || w[0] == NULL)
        return spw__tape_fail(t);
    K = (flags & SPW_OP_W_IN_OUT) ? w[0]->rows : w[0]->cols;
    N = (flags & SPW_OP_W_IN_OUT) ? w[0]->cols : w[0]->rows;
    for (uint64_t e = 0; e < E; e++) {
        if (w[e] == NULL || K != x->cols || w[e]->rows != w[0]->rows || w[e]->cols != w[0]->cols ||
            (b != NULL && (b[e] == NULL || b[e]->cols != N)))
            return spw__tape_fail(t);
    }
    y = spw__tape_value(t, x->rows, N, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_LINEAR_EACH, y)) == NULL)
        return spw__tape_fail(t);
    o->in[0] = x;
    o->in[1] = routing;
    o->flags = flags;
    o->each = keep_each(t, w, E);
    o->each_bias = b != NULL ? keep_each(t, b, E) : NULL;
    return y;
}

/* ---------------------------------------------------------------- experts in turns */

/* Tells of a turn of experts; false: it failed. */
static bool
tell_turn(spw_tape *t, const spw_routed *r, uint64_t first, uint64_t end, spw_turn what)
{
    if (t->on_turn != NULL && t->on_turn(t->on_turn_ctx, r, first, end, what, &t->route_error) != SPW_OK)
        (void)spw__tape_fail(t);
    return t->status == SPW_OK;
}

static uint64_t
turn_end(const spw_tape *t, uint64_t first, uint64_t E)
{
    return t->on_turn == NULL || E - first < t->turn_experts ? E : first + t->turn_experts;
}

static void
experts_forward(spw_tape *t, const spw_routed *r, uint32_t op_first, uint32_t op_end, uint64_t first, uint64_t end)
{
    uint64_t row, last, rows = rows_of(r, end - 1, &last);
    (void)rows_of(r, first, &row);
    rows += last - row;
    for (uint32_t i = op_first; i < op_end; i++) {
        if (t->ops[i].kind == T_LINEAR_EACH)
            linear_each_forward(t, &t->ops[i], first, end);
        else if (rows > 0)
            spw__tape_gate_mul(t, &t->ops[i], row, rows);
    }
}

/* Where combine closes what dispatch has opened: the experts are computed, unless the backward pass does it. */
static bool
close_experts(spw_tape *t, const spw_routed *r, bool later)
{
    uint32_t first = t->experts_first, end = t->op_count;
    if (!t->in_experts)
        return false;
    t->in_experts = false;
    for (uint32_t i = first; i < end; i++) {
        if (t->ops[i].kind != T_LINEAR_EACH && t->ops[i].kind != T_GATE_MUL)
            return false;
    }
    for (uint64_t e = 0, past; spw__tape_computes(t) && !later && e < r->on_device.E; e = past) {
        past = turn_end(t, e, r->on_device.E);
        if (!tell_turn(t, r, e, past, SPW_TURN_FORWARD))
            return false;
        experts_forward(t, r, first, end, e, past);
        if (!tell_turn(t, r, e, past, SPW_TURN_OVER))
            return false;
    }
    if (!t->record)
        t->op_count = first;
    return true;
}

spw_value *
spw_nn_combine(spw_tape *t, spw_value *onto, spw_value *x, spw_value *routing)
{
    spw_value *y;
    spw__op *o;
    bool later = t->record && t->on_turn != NULL && spw__tape_computes(t);
    if (!fits_routing(x, routing) || (onto != NULL && (onto->rows != routing->rows || onto->cols != x->cols)) ||
        !close_experts(t, routing->routed, later))
        return spw__tape_fail(t);
    y = spw__tape_value(t, routing->rows, x->cols, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_COMBINE, y)) == NULL)
        return spw__tape_fail(t);
    o->later = later;
    if (spw__tape_computes(t) && !later)
        spw_gpu_combine(t->queue, y->data, onto == NULL ? NULL : onto->data, x->data, &routing->routed->on_device, true,
                        x->cols);
    o->in[0] = x;
    o->in[1] = routing;
    o->in[2] = onto;
    return y;
}

/* ---------------------------------------------------------------- backward */

/* An expert without rows has a gradient too: zeros. */
static void
linear_each_backward(spw_tape *t, const spw__op *o, uint64_t first_expert, uint64_t end)
{
    spw_value *y = o->out, *x = o->in[0];
    for (uint64_t e = first_expert; e < end; e++) {
        uint64_t first, n = rows_of(o->in[1]->routed, e, &first);
        float *db = o->each_bias != NULL ? spw__tape_sum(t, o->each_bias[e]) : NULL;
        if (n > 0)
            spw_gpu_linear_backward(t->queue, spw__tape_at_row(t, x, o->dx[0], first), o->each[e]->w_grad, db,
                                    spw__tape_at_row(t, y, y->grad, first), spw__tape_at_row(t, x, x->data, first),
                                    o->each[e]->data, n, y->cols, x->cols,
                                    spw__tape_begins(t, o->each[e]) ? o->flags | SPW_OP_SET_DW : o->flags);
        else
            (void)spw__tape_sum(t, o->each[e]);
    }
}

static void
experts_backward(spw_tape *t, const spw_routed *r, const spw__op *dispatch, const spw__op *combine, uint64_t first,
                 uint64_t end)
{
    uint64_t row, last, rows = rows_of(r, end - 1, &last);
    (void)rows_of(r, first, &row);
    rows += last - row;
    if (combine->later)
        experts_forward(t, r, (uint32_t)(dispatch + 1 - t->ops), (uint32_t)(combine - t->ops), first, end);
    for (const spw__op *o = combine - 1; o > dispatch; o--) {
        if (o->kind == T_LINEAR_EACH)
            linear_each_backward(t, o, first, end);
        else if (rows > 0)
            spw__tape_gate_mul_backward(t, o, row, rows);
    }
}

/* What combine is given is made here if forward left it out; what dispatch gave gets all of its gradient. */
void
spw__experts_dispatch_backward(spw_tape *t, spw__op *o)
{
    spw_value *y = o->out, *x = o->in[0];
    spw_routed *r = o->in[1]->routed;
    const spw__op *combine = o + 1;
    const act *onto;
    act *dx = spw__tape_grad_onto(t, x, &onto);
    while (combine->kind != T_COMBINE)
        combine++;
    for (uint64_t end = r->on_device.E, first; !t->dry && end > 0; end = first) {
        uint64_t each = t->on_turn == NULL ? r->on_device.E : t->turn_experts;
        first = (end - 1) / each * each;
        if (!tell_turn(t, r, first, end, SPW_TURN_BACKWARD))
            return;
        experts_backward(t, r, o, combine, first, end);
        if (!tell_turn(t, r, first, end, SPW_TURN_OVER))
            return;
    }
    if (!t->dry && combine->later)
        spw_gpu_combine_backward(t->queue, NULL, r->dweights, combine->out->grad, combine->in[0]->data, &r->on_device,
                                 combine->out->cols);
    if (!t->dry && dx != NULL)
        spw_gpu_combine(t->queue, dx, onto, y->grad, &r->on_device, false, y->cols);
}

void
spw__experts_combine_backward(spw_tape *t, spw__op *o)
{
    spw_value *y = o->out, *x = o->in[0];
    spw_routed *r = o->in[1]->routed;
    unsigned added = 0;
    act *dx = spw__tape_grad(t, x, 1, &added);
    SPW_ASSERT(!added && r->dweights == NULL);
    r->dweights = spw__tape_take(t, r->on_device.M * r->on_device.k * sizeof(float));
    if (!t->dry && dx != NULL && r->dweights != NULL)
        spw_gpu_combine_backward(t->queue, dx, o->later ? NULL : r->dweights, y->grad, x->data, &r->on_device, y->cols);
    o->in[1]->grad_set = true;
    spw__tape_hand_over(t, o->in[2], y);
}
