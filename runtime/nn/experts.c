/*
 * A mixture of experts on the tape: between a dispatch and its combine the operations of some experts at a time run, all of
 * them or by turns, for all of their rows or for a piece of them. Pieces are cut from the places of all rows, whoever's turn it is, and added up by
 * place: turns change no bit. What lies between is in memory of one piece then, and backward computes it again.
 */
#include "tape_internal.h"

/* Takes the arrays of a routing; false when there is no room. */
static bool
take_routing(spw_tape *t, spw_routing *r, bool scaled)
{
    uint64_t pairs = r->M * r->k;
    if (scaled && (r->shares = spw__tape_take(t, pairs * sizeof(float))) == NULL)
        return false;
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
    return spw_nn_route_scaled(t, logits, choices, rule, balance, NULL);
}

spw_value *
spw_nn_route_scaled(spw_tape *t, spw_value *logits, uint64_t choices, const spw_routing_rule *rule, float balance,
                    spw_value *factors)
{
    spw_routed *routed = &t->routings[t->routing_count];
    spw_value *y;
    spw__op *o;
    if (logits == NULL || choices == 0 || choices > SPW_CHOICES_MAX || choices > logits->cols ||
        logits->cols > SPW_EXPERTS_MAX || t->routing_count == SPW__ROUTINGS_MAX || logits->rows * choices > INT32_MAX ||
        (factors != NULL && (!factors->is_param || factors->rows * factors->cols != logits->cols)))
        return spw__tape_fail(t);
    memset(routed, 0, sizeof *routed);
    routed->on_device = (spw_routing){.M = logits->rows, .k = choices, .E = logits->cols};
    routed->rule = *rule;
    routed->rule.factors = factors != NULL ? factors->data : NULL;
    routed->balance = balance * (float)logits->cols / ((float)logits->rows * (float)logits->rows * (float)choices);
    t->routing_count++;
    if (!take_routing(t, &routed->on_device, factors != NULL))
        return spw__tape_fail(t);
    y = spw__tape_value(t, logits->rows, choices, (act *)routed->on_device.weights);
    if (y == NULL || (o = spw__tape_op(t, T_ROUTE, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_route(t->queue, &routed->on_device, logits->data, &routed->rule);
    if (!t->dry)
        spw_gpu_read_bytes(t->queue, routed->ends, routed->on_device.ends, logits->cols * sizeof(int32_t));
    y->routed = routed;
    o->in[0] = logits;
    o->param[0] = factors;
    if (spw__tape_computes(t) && t->on_route != NULL && t->on_route(t->on_route_ctx, routed, &t->route_error) != SPW_OK)
        return spw__tape_fail(t);
    return y;
}

void
spw__experts_route_backward(spw_tape *t, const spw__op *o)
{
    const spw_routed *r = o->out->routed;
    spw_value *x = o->in[0];
    unsigned flags = o->flags;
    act *dx = spw__tape_grad(t, x, SPW_OP_ACC_DX, &flags);
    float *dfactors = spw__tape_sum(t, o->param[0]);
    if (!t->dry && dx != NULL)
        spw_gpu_route_backward(t->queue, dx, r->dweights, x->data, &r->on_device, &r->rule, r->balance, flags);
    if (!t->dry && dfactors != NULL)
        spw_gpu_factors_backward(t->queue, dfactors, r->dweights, &r->on_device);
}

/* Rows of what lies between a dispatch and its combine. */
static uint64_t
rows_between(const spw_value *routing)
{
    uint64_t all = routing->rows * routing->cols, piece = routing->routed->piece_rows;
    return piece > 0 && piece < all ? piece : all;
}

static bool
fits_routing(const spw_value *x, const spw_value *routing)
{
    return x != NULL && routing != NULL && routing->routed != NULL && x->rows == rows_between(routing);
}

/* Places of experts [expert, expert_end), [first, end); the place `base` is row 0 of the values there. */
typedef struct span {
    uint64_t expert, expert_end, first, end, base;
} span;

/*
 * Rows of x (M,C) in the order of places, and places' rows added up where they came from: one of both with weights. What weighs is its own
 * transpose, so that forward of a routing that weighs what experts read is the other kind's backward.
 */
static void
to_places(spw_tape *t, act *y, const act *x, const spw_routing *r, bool weighed, uint64_t C)
{
    if (weighed)
        spw_gpu_combine_backward(t->queue, y, NULL, x, NULL, r, C);
    else
        spw_gpu_dispatch(t->queue, y, x, r, C);
}

static void
to_places_of_piece(spw_tape *t, act *y, const act *x, const spw_routing *r, bool weighed, const span *s, uint64_t C)
{
    if (weighed)
        spw_gpu_combine_backward_piece(t->queue, y, NULL, x, NULL, r, s->first, s->end - s->first, C);
    else
        spw_gpu_dispatch_piece(t->queue, y, x, r, s->first, s->end - s->first, C);
}

static spw_value *
dispatch(spw_tape *t, spw_value *x, spw_value *routing, bool weighed)
{
    spw_value *y;
    spw__op *o;
    if (x == NULL || routing == NULL || routing->routed == NULL || x->rows != routing->rows || t->in_experts)
        return spw__tape_fail(t);
    routing->routed->weighs_input = weighed;
    if (t->rows_each > 0 && x->rows > t->rows_each && t->cache == NULL && t->places == NULL)
        routing->routed->piece_rows = t->rows_each;
    t->in_pieces = routing->routed->piece_rows > 0;
    y = spw__tape_value(t, rows_between(routing), x->cols, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_DISPATCH, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t) && !t->in_pieces)
        to_places(t, y->data, x->data, &routing->routed->on_device, weighed, x->cols);
    o->in[0] = x;
    o->in[1] = routing;
    t->in_experts = true;
    t->experts_first = t->op_count;
    t->dispatched[0] = x;
    t->dispatched[1] = y;
    return y;
}

spw_value *
spw_nn_dispatch(spw_tape *t, spw_value *x, spw_value *routing)
{
    return dispatch(t, x, routing, false);
}

spw_value *
spw_nn_dispatch_weighed(spw_tape *t, spw_value *x, spw_value *routing)
{
    return dispatch(t, x, routing, true);
}

static uint64_t
smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t
larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t
place_of(const spw_routed *r, uint64_t e)
{
    return e > 0 ? (uint64_t)r->ends[e - 1] : 0;
}

static span
span_of(const spw_routed *r, uint64_t expert, uint64_t expert_end)
{
    return (span){expert, expert_end, place_of(r, expert), place_of(r, expert_end), 0};
}

/* The part of a span that lies in piece idx, which its values hold. */
static span
piece_of(const span *s, uint64_t piece_rows, uint64_t idx)
{
    span piece = *s;
    piece.first = larger(s->first, idx * piece_rows);
    piece.end = smaller(s->end, (idx + 1) * piece_rows);
    piece.base = piece.first;
    return piece;
}

/* Rows of expert e in a span, from the row *at of its values on; how many. */
static uint64_t
rows_of(const spw_routed *r, uint64_t e, const span *s, uint64_t *at)
{
    uint64_t first = larger(place_of(r, e), s->first), end = smaller(place_of(r, e + 1), s->end);
    *at = first - s->base;
    return first < end ? end - first : 0;
}

/* What the device is told of a span's experts. */
typedef struct each_span {
    spw_each each;
    uint64_t first; /* of their rows in a span's values */
    uint64_t ends[SPW_EXPERTS_MAX];
    const act *w[SPW_EXPERTS_MAX], *b[SPW_EXPERTS_MAX];
    float *dw[SPW_EXPERTS_MAX], *db[SPW_EXPERTS_MAX];
    bool set[SPW_EXPERTS_MAX];
} each_span;

static void
tell_each(const spw_tape *t, each_span *out, const spw__op *o, const span *s)
{
    const bool biased = o->each_bias != NULL;
    const uint64_t all = o->stack != NULL ? o->stack->rows / o->in[1]->routed->on_device.E : 0;
    out->each = (spw_each){.count = s->expert_end - s->expert,
                           .N = o->out->cols,
                           .K = o->in[0]->cols,
                           .ends = out->ends,
                           .w = out->w,
                           .b = biased ? out->b : NULL,
                           .dw = out->dw,
                           .db = biased ? out->db : NULL,
                           .set = out->set};
    out->first = s->first - s->base;
    for (uint64_t i = 0, at = 0; i < out->each.count; i++) {
        uint64_t e = s->expert + i, from;
        out->ends[i] = at += rows_of(o->in[1]->routed, e, s, &from);
        out->w[i] = o->stack != NULL ? spw__tape_at_row(t, o->stack, o->stack->data, e * all + o->stack_first)
                                     : o->each[e]->data;
        out->dw[i] = o->stack == NULL           ? o->each[e]->w_grad
                     : o->stack->w_grad != NULL ? o->stack->w_grad + (e * all + o->stack_first) * o->stack->cols
                                                : NULL;
        out->b[i] = biased ? o->each_bias[e]->data : NULL;
    }
}

static void
linear_each_forward(spw_tape *t, const spw__op *o, const span *s)
{
    const spw_value *y = o->out, *x = o->in[0];
    each_span told;
    tell_each(t, &told, o, s);
    if (o->in[2] != NULL)
        told.each.onto = spw__tape_at_row(t, y, o->in[2]->data, told.first);
    spw_gpu_linear_each(t->queue, spw__tape_at_row(t, y, y->data, told.first),
                        spw__tape_at_row(t, x, x->data, told.first), &told.each,
                        o->flags | (t->by_row ? SPW_OP_BY_ROW : 0u));
}

static spw_value **
keep_each(spw_tape *t, spw_value *const *params, uint64_t E)
{
    spw_value **kept = memcpy(t->each + t->each_count, params, E * sizeof *params);
    t->each_count += (uint32_t)E;
    return kept;
}

/* One on what was dispatched, or on what others made of it. Onto what is there, but where rows have the same bits one by one, in its memory. */
static spw__op *
each_op(spw_tape *t, spw_value *onto, spw_value *x, spw_value *routing, uint64_t N, unsigned flags)
{
    spw_value *y = spw__tape_value(t, x->rows, N, onto != NULL && !t->by_row ? onto->data : NULL);
    spw__op *o = y != NULL ? spw__tape_op(t, T_LINEAR_EACH, y) : NULL;
    if (o == NULL)
        return NULL;
    o->in[0] = x;
    o->in[1] = routing;
    o->in[2] = onto;
    o->flags = flags;
    return o;
}

spw_value *
spw_nn_linear_stack(spw_tape *t, spw_value *x, spw_value *routing, spw_value *stack, uint64_t first, uint64_t rows,
                    unsigned flags)
{
    const bool in_out = (flags & SPW_OP_W_IN_OUT) != 0;
    uint64_t E, K;
    spw__op *o;
    if (!fits_routing(x, routing) || !t->in_experts || stack == NULL || !stack->is_param)
        return spw__tape_fail(t);
    E = routing->routed->on_device.E;
    K = in_out ? rows : stack->cols;
    if (K != x->cols || stack->rows % E != 0 || first + rows > stack->rows / E)
        return spw__tape_fail(t);
    if ((o = each_op(t, NULL, x, routing, in_out ? stack->cols : rows, flags)) == NULL)
        return spw__tape_fail(t);
    o->stack = stack;
    o->stack_first = first;
    o->stack_rows = rows;
    return o->out;
}

/* It is a parameter to those who take it; the memory of its gradient comes when they go back (lend_stacks). */
spw_value *
spw_nn_by_expert(spw_tape *t, spw_value *w, uint64_t experts, float scale)
{
    spw_value *y;
    spw__op *o;
    if (w == NULL || !w->is_param || t->in_experts || experts == 0 || w->cols % experts != 0)
        return spw__tape_fail(t);
    y = spw__tape_value(t, experts * w->rows, w->cols / experts, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_BY_EXPERT, y)) == NULL)
        return spw__tape_fail(t);
    y->is_param = true;
    y->needs_grad = false;
    o->param[0] = w;
    o->p = scale;
    if (spw__tape_computes(t))
        spw_gpu_transpose(t->queue, y->data, w->data, scale, w->rows * (w->cols / experts), experts);
    return y;
}

void
spw__by_expert_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out;
    spw_value *w = o->param[0];
    const uint64_t E = y->rows / w->rows;
    float *dw = spw__tape_sum(t, w);
    if (!t->dry && dw != NULL)
        spw_gpu_transpose_sum(t->queue, dw, y->w_grad, o->p, E, w->rows * y->cols);
}

spw_value *
spw_nn_linear_each(spw_tape *t, spw_value *x, spw_value *routing, spw_value *const *w, spw_value *const *b,
                   unsigned flags)
{
    return spw_nn_linear_each_onto(t, NULL, x, routing, w, b, flags);
}

spw_value *
spw_nn_linear_each_onto(spw_tape *t, spw_value *onto, spw_value *x, spw_value *routing, spw_value *const *w,
                        spw_value *const *b, unsigned flags)
{
    uint64_t E, K, N;
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
    if ((onto != NULL && (onto->rows != x->rows || onto->cols != N)) ||
        (o = each_op(t, onto, x, routing, N, flags)) == NULL)
        return spw__tape_fail(t);
    o->each = keep_each(t, w, E);
    o->each_bias = b != NULL ? keep_each(t, b, E) : NULL;
    return o->out;
}

/* ---------------------------------------------------------------- experts in turns */

static uint64_t
turn_end(const spw_tape *t, uint64_t first, uint64_t E)
{
    return t->on_turn == NULL || E - first < t->turn_experts ? E : first + t->turn_experts;
}

static void
experts_forward(spw_tape *t, uint32_t op_first, uint32_t op_end, const span *s)
{
    for (uint32_t i = op_first; i < op_end; i++) {
        if (t->ops[i].kind == T_LINEAR_EACH)
            linear_each_forward(t, &t->ops[i], s);
        else if (s->first < s->end)
            spw__tape_gate_mul(t, &t->ops[i], s->first - s->base, s->end - s->first);
    }
}

/* Memory of a piece for what lies between. false: there is too little. */
static bool
lend_piece(spw_tape *t, spw_value *dispatched, uint32_t op_first, uint32_t op_end)
{
    for (uint32_t i = op_first; i <= op_end; i++) {
        spw_value *v = i < op_end ? t->ops[i].out : dispatched;
        if (i < op_end && t->ops[i].in[2] != NULL) /* in the memory of what it is added to */
            v->data = t->ops[i].in[2]->data;
        else if ((v->data = spw__tape_take(t, v->rows * v->cols * t->act_bytes)) == NULL)
            return false;
    }
    return true;
}

/* The operations [op_first, op_end), of which the last one gives what is to be combined in y. */
static void
forward_in_pieces(spw_tape *t, spw_value *y, const spw_value *onto, spw_routed *r, uint32_t op_first, uint32_t op_end)
{
    const spw_value *x = t->dispatched[0], *in = t->dispatched[1], *last = t->ops[op_end - 1].out;
    uint64_t from = t->used, E = r->on_device.E, rows = r->piece_rows;
    float *sums = spw__tape_begin_sums(t, y, onto != NULL ? onto->data : NULL);
    if (sums == NULL || !lend_piece(t, t->dispatched[1], op_first, op_end))
        return;
    for (uint64_t e = 0, past; !t->dry && e < E; e = past) {
        span all = span_of(r, e, past = turn_end(t, e, E));
        if (!spw__tape_turn(t, r, e, past, SPW_TURN_FORWARD))
            return;
        for (uint64_t i = all.first / rows; i * rows < all.end; i++) {
            span s = piece_of(&all, rows, i);
            to_places_of_piece(t, in->data, x->data, &r->on_device, r->weighs_input, &s, x->cols);
            experts_forward(t, op_first, op_end, &s);
            spw_gpu_combine_piece(t->queue, sums, last->data, &r->on_device, !r->weighs_input, false, s.first,
                                  s.end - s.first, y->cols);
        }
        if (!spw__tape_turn(t, r, e, past, SPW_TURN_OVER))
            return;
    }
    if (!t->dry)
        spw_gpu_copy_d2d(t->queue, y->data, t->act_dtype, sums, SPW_F32, y->rows * y->cols, NULL);
    t->used = from;
}

/* Where combine closes what dispatch has opened: there are linear layers and gated products alone. */
static bool
close_experts(spw_tape *t, uint32_t *op_first, uint32_t *op_end)
{
    if (!t->in_experts)
        return false;
    *op_first = t->experts_first;
    *op_end = t->op_count;
    t->in_experts = t->in_pieces = false;
    for (uint32_t i = *op_first; i < *op_end; i++) {
        if (t->ops[i].kind != T_LINEAR_EACH && t->ops[i].kind != T_GATE_MUL)
            return false;
    }
    return *op_first < *op_end;
}

static void
forward_whole(spw_tape *t, const spw_routed *r, uint32_t op_first, uint32_t op_end)
{
    for (uint64_t e = 0, past; e < r->on_device.E; e = past) {
        span s = span_of(r, e, past = turn_end(t, e, r->on_device.E));
        if (!spw__tape_turn(t, r, e, past, SPW_TURN_FORWARD))
            return;
        experts_forward(t, op_first, op_end, &s);
        if (!spw__tape_turn(t, r, e, past, SPW_TURN_OVER))
            return;
    }
}

spw_value *
spw_nn_combine(spw_tape *t, spw_value *onto, spw_value *x, spw_value *routing)
{
    uint32_t first, end;
    spw_routed *r;
    spw_value *y;
    spw__op *o;
    bool pieces, later;
    if (!fits_routing(x, routing) || (onto != NULL && (onto->rows != routing->rows || onto->cols != x->cols)) ||
        !close_experts(t, &first, &end))
        return spw__tape_fail(t);
    r = routing->routed;
    pieces = r->piece_rows > 0;
    later = t->record && (pieces || (t->on_turn != NULL && spw__tape_computes(t) && onto != NULL));
    y = spw__tape_value(t, routing->rows, x->cols, NULL);
    if (y == NULL)
        return spw__tape_fail(t);
    if (pieces && (!later || (onto == NULL && !t->kept)))
        forward_in_pieces(t, y, onto, r, first, end);
    else if (!later && spw__tape_computes(t))
        forward_whole(t, r, first, end);
    if (!t->record)
        t->op_count = first;
    if (t->status != SPW_OK || (o = spw__tape_op(t, T_COMBINE, y)) == NULL)
        return spw__tape_fail(t);
    o->later = later;
    if (spw__tape_computes(t) && !later && !pieces)
        spw_gpu_combine(t->queue, y->data, onto == NULL ? NULL : onto->data, x->data, &r->on_device, !r->weighs_input,
                        x->cols);
    o->in[0] = x;
    o->in[1] = routing;
    o->in[2] = onto;
    return y;
}

/* ---------------------------------------------------------------- backward */

static void
linear_each_backward(spw_tape *t, const spw__op *o, const span *s)
{
    spw_value *y = o->out, *x = o->in[0];
    each_span told;
    tell_each(t, &told, o, s);
    for (uint64_t i = 0, before = 0; i < told.each.count; before = told.ends[i++]) {
        spw_value *w = o->stack != NULL ? NULL : o->each[s->expert + i];
        spw_value *b = o->each_bias != NULL ? o->each_bias[s->expert + i] : NULL;
        const bool rows = told.ends[i] > before;
        told.set[i] = rows && spw__tape_begins(t, w); /* a stack was begun */
        told.db[i] = rows && b != NULL ? spw__tape_sum(t, b) : NULL;
    }
    spw_gpu_linear_each_backward(t->queue, spw__tape_at_row(t, x, o->dx[0], told.first),
                                 spw__tape_at_row(t, y, y->grad, told.first),
                                 spw__tape_at_row(t, x, x->data, told.first), &told.each, o->flags);
}

/* An expert without rows has a gradient too: zeros. A stack is added to. */
static void
begin_idle(spw_tape *t, const spw__op *o, uint64_t first, uint64_t end)
{
    const spw_routed *r = o->in[1]->routed;
    if (o->stack != NULL) {
        (void)spw__tape_sum(t, o->stack);
        return;
    }
    for (uint64_t e = first; e < end; e++) {
        if (place_of(r, e) < place_of(r, e + 1))
            continue;
        (void)spw__tape_sum(t, o->each[e]);
        if (o->each_bias != NULL)
            (void)spw__tape_sum(t, o->each_bias[e]);
    }
}

/* What lies between dispatch and combine, of a span's rows; their gradient is where combine gives it. */
static void
experts_backward(spw_tape *t, const spw__op *dispatch, const spw__op *combine, const span *s)
{
    for (const spw__op *o = combine - 1; o > dispatch; o--) {
        if (o->kind == T_LINEAR_EACH)
            linear_each_backward(t, o, s);
        else if (s->first < s->end)
            spw__tape_gate_mul_backward(t, o, s->first - s->base, s->end - s->first);
    }
}

/* A turn's rows, all of them or piece by piece; sums: of what goes back to dispatch's input, NULL: nobody wants it. */
static void
turn_backward(spw_tape *t, const spw__op *dispatch, const spw__op *combine, const span *all, float *sums)
{
    const spw_value *x = dispatch->in[0], *in = dispatch->out, *given = combine->in[0];
    spw_routed *r = dispatch->in[1]->routed;
    uint32_t op_first = (uint32_t)(dispatch + 1 - t->ops), op_end = (uint32_t)(combine - t->ops);
    uint64_t rows = r->piece_rows;
    if (rows == 0) {
        if (combine->later)
            experts_forward(t, op_first, op_end, all);
        experts_backward(t, dispatch, combine, all);
        return;
    }
    for (uint64_t i = (all->end + rows - 1) / rows; i-- > all->first / rows;) {
        span s = piece_of(all, rows, i);
        uint64_t n = s.end - s.first;
        to_places_of_piece(t, in->data, x->data, &r->on_device, r->weighs_input, &s, x->cols);
        experts_forward(t, op_first, op_end, &s);
        if (r->weighs_input)
            spw_gpu_dispatch_piece(t->queue, given->grad, combine->out->grad, &r->on_device, s.first, n, given->cols);
        else
            spw_gpu_combine_backward_piece(t->queue, given->grad, r->dweights, combine->out->grad, given->data,
                                           &r->on_device, s.first, n, given->cols);
        experts_backward(t, dispatch, combine, &s);
        if (r->weighs_input)
            spw_gpu_combine_backward_piece(t->queue, NULL, r->dweights, x->data, in->grad, &r->on_device, s.first, n,
                                           x->cols);
        if (sums != NULL)
            spw_gpu_combine_piece(t->queue, sums, in->grad, &r->on_device, r->weighs_input, true, s.first, n, x->cols);
    }
}

/* What combine is given is made here if forward left it out; what dispatch gave gets all of its gradient. */
void
spw__experts_dispatch_backward(spw_tape *t, spw__op *o)
{
    spw_value *y = o->out, *x = o->in[0];
    spw_routed *r = o->in[1]->routed;
    const spw__op *combine = o + 1;
    bool pieces = r->piece_rows > 0;
    const act *onto = o->onto;
    act *dx = pieces ? o->dx[0] : spw__tape_grad_onto(t, x, &onto);
    float *sums = NULL;
    while (combine->kind != T_COMBINE)
        combine++;
    if (pieces && !lend_piece(t, y, (uint32_t)(o + 1 - t->ops), (uint32_t)(combine - t->ops)))
        return;
    if (pieces && dx != NULL && (sums = spw__tape_begin_sums(t, x, onto)) == NULL)
        return;
    for (uint64_t end = r->on_device.E, first; !t->dry && end > 0; end = first) {
        uint64_t each = t->on_turn == NULL ? r->on_device.E : t->turn_experts;
        span s = span_of(r, first = (end - 1) / each * each, end);
        if (!spw__tape_turn(t, r, first, end, SPW_TURN_BACKWARD))
            return;
        for (const spw__op *between = o + 1; between < combine; between++) {
            if (between->kind == T_LINEAR_EACH)
                begin_idle(t, between, first, end);
        }
        turn_backward(t, o, combine, &s, sums);
        if (!spw__tape_turn(t, r, first, end, SPW_TURN_OVER))
            return;
    }
    if (pieces)
        t->used = t->pieces_from;
    if (!t->dry && sums != NULL)
        spw_gpu_copy_d2d(t->queue, dx, t->act_dtype, sums, SPW_F32, x->rows * x->cols, NULL);
    if (t->dry || pieces)
        return;
    if (r->weighs_input)
        spw_gpu_combine_backward(t->queue, NULL, r->dweights, x->data, y->grad, &r->on_device, y->cols);
    else if (combine->later)
        spw_gpu_combine_backward(t->queue, NULL, r->dweights, combine->out->grad, combine->in[0]->data, &r->on_device,
                                 combine->out->cols);
    if (dx != NULL)
        spw_gpu_combine(t->queue, dx, onto, y->grad, &r->on_device, r->weighs_input, y->cols);
}

/* Sums for the gradients of stacks that were made on the tape for this mixture. */
static void
lend_stacks(spw_tape *t, const spw__op *dispatch)
{
    for (const spw__op *o = t->ops; o < dispatch; o++) {
        spw_value *stack = o->out;
        if (o->kind != T_BY_EXPERT || stack->grad_set)
            continue;
        stack->grad_set = true; /* it goes back, too */
        stack->w_grad = spw__tape_take(t, stack->rows * stack->cols * sizeof(float));
        if (!t->dry && stack->w_grad != NULL)
            spw_gpu_zero(t->queue, stack->w_grad, stack->rows * stack->cols * sizeof(float));
    }
}

void
spw__experts_combine_backward(spw_tape *t, spw__op *o)
{
    spw_value *y = o->out, *x = o->in[0];
    spw_routed *r = o->in[1]->routed;
    bool pieces = r->piece_rows > 0;
    spw__op *dispatch = o;
    unsigned added = 0;
    act *dx;
    while (dispatch->kind != T_DISPATCH)
        dispatch--;
    SPW_ASSERT(r->dweights == NULL);
    lend_stacks(t, dispatch);
    r->dweights = spw__tape_take(t, r->on_device.M * r->on_device.k * sizeof(float));
    spw__tape_hand_over(t, o->in[2], y); /* first: it may be dispatch's input too */
    if (pieces) {                        /* what stays, in front of what does not */
        dispatch->dx[0] = spw__tape_grad_onto(t, dispatch->in[0], &dispatch->onto);
        t->pieces_from = t->used;
    }
    dx = spw__tape_grad(t, x, 1, &added);
    SPW_ASSERT(!added);
    if (!t->dry && !pieces && dx != NULL && r->weighs_input)
        spw_gpu_dispatch(t->queue, dx, y->grad, &r->on_device, y->cols);
    else if (!t->dry && !pieces && dx != NULL && r->dweights != NULL)
        spw_gpu_combine_backward(t->queue, dx, o->later ? NULL : r->dweights, y->grad, x->data, &r->on_device, y->cols);
    o->in[1]->grad_set = true;
}
