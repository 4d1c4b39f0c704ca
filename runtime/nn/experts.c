/*
 * A mixture of experts on the tape: between a dispatch and its combine the operations of some experts at a time run, all of
 * them or by turns, for all of their rows or for a piece of them. Pieces are cut from the places of all rows, whoever's turn it is, and added up by
 * place: turns change no bit. What lies between is in memory of one piece then, and backward computes it again.
 */
#include "tape_internal.h"

/* Arrays of as many elements as there are pairs that lie in what a caller holds, and behind them ends. */
enum { HELD_ARRAYS = 6 };

uint64_t
spw_tape_routing_bytes(uint64_t rows, uint64_t choices, uint64_t experts)
{
    return HELD_ARRAYS * spw_round_up(rows * choices * 4, 256) + spw_round_up(experts * 4, 256);
}

static void *
held_array(const spw_tape *t, const spw_routing *r, uint32_t idx)
{
    return (char *)t->apart->routing + idx * spw_round_up(r->M * r->k * 4, 256);
}

static void
find_held(const spw_tape *t, spw_routed *routed)
{
    spw_routing *r = &routed->on_device;
    r->weights = held_array(t, r, 0);
    r->shares = held_array(t, r, 1);
    r->choices = held_array(t, r, 2);
    r->places = held_array(t, r, 3);
    r->pairs = held_array(t, r, 4);
    r->ends = held_array(t, r, HELD_ARRAYS);
}

static float *
held_dweights(const spw_tape *t, const spw_routed *routed)
{
    return held_array(t, &routed->on_device, 5);
}

/* Is this the part that finds out who reads what? */
static bool
is_before(const spw_tape *t)
{
    return t->part == SPW_PART_BEFORE || t->part == SPW_PART_BACK_BEFORE || t->part == SPW_PART_BACK_READ;
}

static bool
is_turn(const spw_tape *t)
{
    return t->part == SPW_PART_TURN || t->part == SPW_PART_BACK_TURN;
}

/* Takes the arrays of a routing; false when there is no room. */
static bool
take_routing(spw_tape *t, spw_routed *routed, bool scaled)
{
    spw_routing *r = &routed->on_device;
    uint64_t pairs = r->M * r->k;
    if (t->apart != NULL) {
        find_held(t, routed);
        return true;
    }
    if (scaled && (r->shares = spw__tape_take(t, pairs * sizeof(float))) == NULL)
        return false;
    r->weights = spw__tape_take(t, pairs * sizeof(float));
    r->choices = spw__tape_take(t, pairs * sizeof(int32_t));
    r->places = spw__tape_take(t, pairs * sizeof(int32_t));
    r->pairs = spw__tape_take(t, pairs * sizeof(int32_t));
    r->ends = spw__tape_take(t, r->E * sizeof(int32_t));
    return r->weights != NULL && r->choices != NULL && r->places != NULL && r->pairs != NULL && r->ends != NULL;
}

void
spw_nn_read(spw_tape *t, spw_value *x)
{
    if (t->part != SPW_PART_BACK_READ || x == NULL)
        return;
    x->data = t->apart->read;
    spw__tape_wake(t);
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
    bool computes = spw__tape_computes(t) && t->part != SPW_PART_BACK;
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
    if ((t->apart != NULL && t->routing_count > 1) || !take_routing(t, routed, factors != NULL))
        return spw__tape_fail(t);
    y = spw__tape_value(t, logits->rows, choices, (act *)routed->on_device.weights);
    if (y == NULL || (o = spw__tape_op(t, T_ROUTE, y)) == NULL)
        return spw__tape_fail(t);
    if (computes)
        spw_gpu_route(t->queue, &routed->on_device, logits->data, &routed->rule);
    if (t->apart != NULL && !is_before(t))
        memcpy(routed->ends, t->apart->ends, logits->cols * sizeof *routed->ends);
    else if (!t->dry)
        spw_gpu_read_bytes(t->queue, routed->ends, routed->on_device.ends, logits->cols * sizeof *routed->ends);
    if (is_before(t))
        memcpy(t->apart->ends, routed->ends, logits->cols * sizeof *routed->ends);
    y->routed = routed;
    o->in[0] = logits;
    o->param[0] = factors;
    if (computes && t->on_route != NULL && t->on_route(t->on_route_ctx, routed, &t->failure) != SPW_OK)
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
to_places_of_piece(spw_tape *t, const spw_value *y, const act *x, const spw_routing *r, bool weighed, const span *s)
{
    act *rows = spw__tape_at_row(t, y, y->data, s->first - s->base);
    if (weighed)
        spw_gpu_combine_backward_piece(t->queue, rows, NULL, x, NULL, r, s->first, s->end - s->first, y->cols);
    else
        spw_gpu_dispatch_piece(t->queue, rows, x, r, s->first, s->end - s->first, y->cols);
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
    else if (t->apart != NULL)
        routing->routed->piece_rows = x->rows * routing->cols;
    if (is_before(t) && t->part != SPW_PART_BACK_READ && !t->dry)
        spw_gpu_copy_d2d(t->queue, t->apart->read, t->act_dtype, x->data, t->act_dtype, x->rows * x->cols, NULL);
    else if (t->asleep)
        x->data = t->apart->read;
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

/*
 * The part of a span that lies in piece idx, which its values hold: a place has its row there whoever's turn it is, for products may choose how
 * they add by where rows begin.
 */
static span
piece_of(const span *s, uint64_t piece_rows, uint64_t idx)
{
    span piece = *s;
    piece.base = idx * piece_rows;
    piece.first = larger(s->first, piece.base);
    piece.end = smaller(s->end, piece.base + piece_rows);
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
    if (is_turn(t))
        spw__tape_wake(t);
    y = spw__tape_value(t, experts * w->rows, w->cols / experts, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_BY_EXPERT, y)) == NULL)
        return spw__tape_fail(t);
    y->is_param = true;
    o->param[0] = w;
    o->p = scale;
    if (spw__tape_computes(t) && (t->apart == NULL || is_turn(t)))
        spw_gpu_transpose(t->queue, y->data, w->data, scale, w->rows * (w->cols / experts), experts);
    if (is_turn(t))
        spw__tape_sleep(t);
    return y;
}

void
spw__by_expert_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out;
    spw_value *w = o->param[0];
    const uint64_t E = y->rows / w->rows;
    float *dw = spw__tape_sum(t, w);
    w->passes |= y->passes;
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
            (t->ops[i].kind == T_CURVE ? spw__tape_curve : spw__tape_gate_mul)(t, &t->ops[i], s->first - s->base,
                                                                               s->end - s->first);
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

/* Experts [first, end) by the operations [op_first, op_end), whose memory is lent; what the last one gives is added to sums. */
static void
forward_turn(spw_tape *t, float *sums, const spw_routed *r, uint32_t op_first, uint32_t op_end, uint64_t first,
             uint64_t end)
{
    const spw_value *x = t->dispatched[0], *in = t->dispatched[1], *last = t->ops[op_end - 1].out;
    const uint64_t rows = r->piece_rows;
    const span all = span_of(r, first, end);
    for (uint64_t i = all.first / rows; !t->dry && i * rows < all.end; i++) {
        const span s = piece_of(&all, rows, i);
        to_places_of_piece(t, in, x->data, &r->on_device, r->weighs_input, &s);
        experts_forward(t, op_first, op_end, &s);
        spw_gpu_combine_piece(t->queue, sums, spw__tape_at_row(t, last, last->data, s.first - s.base), &r->on_device,
                              !r->weighs_input, false, s.first, s.end - s.first, last->cols);
    }
}

/* The operations [op_first, op_end), of which the last one gives what is to be combined in y. */
static void
forward_in_pieces(spw_tape *t, spw_value *y, const spw_value *onto, spw_routed *r, uint32_t op_first, uint32_t op_end)
{
    uint64_t from = t->used, E = r->on_device.E;
    float *sums = spw__tape_take_sums(t, y, onto != NULL ? onto->data : NULL);
    if (sums == NULL || !lend_piece(t, t->dispatched[1], op_first, op_end))
        return;
    for (uint64_t e = 0, past; !t->dry && e < E; e = past) {
        past = turn_end(t, e, E);
        if (!spw__tape_turn(t, r, e, past, SPW_TURN_FORWARD))
            return;
        forward_turn(t, sums, r, op_first, op_end, e, past);
        if (!spw__tape_turn(t, r, e, past, SPW_TURN_OVER))
            return;
    }
    if (!t->dry)
        spw_gpu_close_sums(t->queue, y->data, sums, NULL, y->rows, y->cols);
    t->used = from;
}

/* What there is to do of forward in this part; what follows combine is another one's, or this one's. */
static void
forward_part(spw_tape *t, spw_value *y, const spw_value *onto, const spw_routed *r, uint32_t op_first, uint32_t op_end)
{
    const uint64_t n = y->rows * y->cols;
    switch (t->part) {
    case SPW_PART_BEFORE:
    case SPW_PART_BACK_BEFORE:
    case SPW_PART_BACK_READ:
        spw__tape_begin_sums(t, t->apart->sums, n, t->part == SPW_PART_BEFORE ? onto->data : NULL);
        spw__tape_sleep(t);
        return;
    case SPW_PART_TURN:
        spw__tape_wake(t);
        if (lend_piece(t, t->dispatched[1], op_first, op_end))
            forward_turn(t, t->apart->sums, r, op_first, op_end, t->part_first, t->part_end);
        spw__tape_sleep(t);
        return;
    case SPW_PART_AFTER:
        spw__tape_wake(t);
        y->data = spw__tape_take(t, n * t->act_bytes);
        if (!t->dry && y->data != NULL)
            spw_gpu_close_sums(t->queue, y->data, t->apart->sums, NULL, y->rows, y->cols);
        return;
    case SPW_PART_BACK_TURN:
        y->grad = t->apart->dy;
        y->grad_set = true;
        return;
    case SPW_PART_BACK:
    case SPW_PART_ALL: return;
    }
}

/* Where combine closes what dispatch has opened: there are linear layers, gated products and curves alone. */
static bool
close_experts(spw_tape *t, uint32_t *op_first, uint32_t *op_end)
{
    if (!t->in_experts)
        return false;
    *op_first = t->experts_first;
    *op_end = t->op_count;
    t->in_experts = t->in_pieces = false;
    for (uint32_t i = *op_first; i < *op_end; i++) {
        if (t->ops[i].kind != T_LINEAR_EACH && t->ops[i].kind != T_GATE_MUL && t->ops[i].kind != T_CURVE)
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
    if (t->apart != NULL && onto == NULL)
        return spw__tape_fail(t);
    later = t->record && (pieces || (t->on_turn != NULL && spw__tape_computes(t) && onto != NULL));
    y = spw__tape_value(t, routing->rows, x->cols, NULL);
    if (y == NULL)
        return spw__tape_fail(t);
    if (t->apart != NULL)
        forward_part(t, y, onto, r, first, end);
    else if (pieces && (!later || (onto == NULL && !t->kept)))
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
                        false, x->cols);
    o->in[0] = x;
    o->in[1] = routing;
    o->in[2] = onto;
    return y;
}

/* ---------------------------------------------------------------- backward */

/* Where gradients go; they are made when all that lies between is there, in dispatch's backward. */
void
spw__linear_each_backward(spw_tape *t, spw__op *o)
{
    const uint64_t E = o->in[1]->routed->on_device.E;
    spw__tape_share_grad(o->in[2], o->out);
    o->dx[0] = spw__tape_grad(t, o->in[0], SPW_OP_ACC_DX, &o->flags);
    if (!o->in[0]->needs_grad)
        return;
    if (o->stack != NULL)
        o->stack->passes = true;
    for (uint64_t e = 0; o->stack == NULL && e < E; e++)
        o->each[e]->passes = true;
}

static void
linear_each_backward(spw_tape *t, const spw__op *o, const span *s)
{
    spw_value *y = o->out, *x = o->in[0];
    bool wanted = o->dx[0] != NULL; /* else onto alone may have brought it here */
    each_span told;
    tell_each(t, &told, o, s);
    for (uint64_t i = 0, before = 0; i < told.each.count; before = told.ends[i++]) {
        spw_value *w = o->stack != NULL ? NULL : o->each[s->expert + i];
        spw_value *b = o->each_bias != NULL ? o->each_bias[s->expert + i] : NULL;
        const bool rows = told.ends[i] > before;
        told.set[i] = rows && spw__tape_begins(t, w); /* a stack was begun */
        told.db[i] = rows && b != NULL ? spw__tape_sum(t, b) : NULL;
        wanted |= told.dw[i] != NULL || told.db[i] != NULL;
    }
    if (wanted)
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

/* What lies between dispatch and combine, of a span's rows; their gradient is where combine gives it. Some have none. */
static void
experts_backward(spw_tape *t, const spw__op *dispatch, const spw__op *combine, const span *s)
{
    for (const spw__op *o = combine - 1; o > dispatch; o--) {
        if (!o->out->grad_set)
            continue;
        if (o->kind == T_LINEAR_EACH)
            linear_each_backward(t, o, s);
        else if (s->first < s->end)
            (o->kind == T_CURVE ? spw__tape_curve_backward : spw__tape_gate_mul_backward)(t, o, s->first - s->base,
                                                                                          s->end - s->first);
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
        uint64_t n = s.end - s.first, at = s.first - s.base;
        act *dgiven = spw__tape_at_row(t, given, given->grad, at), *din = spw__tape_at_row(t, in, in->grad, at);
        to_places_of_piece(t, in, x->data, &r->on_device, r->weighs_input, &s);
        experts_forward(t, op_first, op_end, &s);
        if (r->weighs_input && dgiven != NULL)
            spw_gpu_dispatch_piece(t->queue, dgiven, combine->out->grad, &r->on_device, s.first, n, given->cols);
        else if (!r->weighs_input)
            spw_gpu_combine_backward_piece(t->queue, dgiven, r->dweights, combine->out->grad,
                                           spw__tape_at_row(t, given, given->data, at), &r->on_device, s.first, n,
                                           given->cols);
        experts_backward(t, dispatch, combine, &s);
        if (r->weighs_input && din != NULL)
            spw_gpu_combine_backward_piece(t->queue, NULL, r->dweights, x->data, din, &r->on_device, s.first, n,
                                           x->cols);
        if (sums != NULL && din != NULL)
            spw_gpu_combine_piece(t->queue, sums, din, &r->on_device, r->weighs_input, true, s.first, n, x->cols);
    }
}

/* Experts [first, end), whose weights and gradients are there. */
static void
backward_turn(spw_tape *t, const spw__op *dispatch, const spw__op *combine, uint64_t first, uint64_t end, float *sums)
{
    const span all = span_of(dispatch->in[1]->routed, first, end);
    if (t->dry)
        return;
    for (const spw__op *between = dispatch + 1; between < combine; between++) {
        if (between->kind == T_LINEAR_EACH)
            begin_idle(t, between, first, end);
    }
    turn_backward(t, dispatch, combine, &all, sums);
}

static bool
backward_turns(spw_tape *t, const spw__op *dispatch, const spw__op *combine, float *sums)
{
    const spw_routed *r = dispatch->in[1]->routed;
    const uint64_t each = t->on_turn == NULL ? r->on_device.E : t->turn_experts;
    for (uint64_t end = r->on_device.E, first; !t->dry && end > 0; end = first) {
        first = (end - 1) / each * each;
        if (!spw__tape_turn(t, r, first, end, SPW_TURN_BACKWARD))
            return false;
        backward_turn(t, dispatch, combine, first, end, sums);
        if (!spw__tape_turn(t, r, first, end, SPW_TURN_OVER))
            return false;
    }
    return true;
}

/* What forward has left in memory, or leaves to be made here, of all rows at once. */
static void
dispatch_backward_whole(spw_tape *t, spw__op *o, const spw__op *combine)
{
    spw_value *y = o->out, *x = o->in[0];
    spw_routed *r = o->in[1]->routed;
    const act *onto;
    act *dx = spw__tape_grad_onto(t, x, &onto);
    if (!backward_turns(t, o, combine, NULL) || t->dry)
        return;
    if (r->weighs_input && y->grad != NULL)
        spw_gpu_combine_backward(t->queue, NULL, r->dweights, x->data, y->grad, &r->on_device, y->cols);
    else if (!r->weighs_input && combine->later)
        spw_gpu_combine_backward(t->queue, NULL, r->dweights, combine->out->grad, combine->in[0]->data, &r->on_device,
                                 combine->out->cols);
    if (dx != NULL)
        spw_gpu_combine(t->queue, dx, onto, y->grad, &r->on_device, r->weighs_input, true, y->cols);
}

static void
dispatch_backward_in_pieces(spw_tape *t, spw__op *o, const spw__op *combine)
{
    const spw_value *x = o->in[0];
    float *sums = NULL;
    if (!lend_piece(t, o->out, (uint32_t)(o + 1 - t->ops), (uint32_t)(combine - t->ops)))
        return;
    if (o->dx[0] != NULL && (sums = spw__tape_take_sums(t, x, NULL)) == NULL)
        return;
    if (!backward_turns(t, o, combine, sums))
        return;
    t->used = t->pieces_from;
    if (!t->dry && sums != NULL)
        spw_gpu_close_sums(t->queue, o->dx[0], sums, o->onto, x->rows, x->cols);
}

/* What combine is given is made here if forward left it out; what dispatch gave gets all of its gradient. */
void
spw__experts_dispatch_backward(spw_tape *t, spw__op *o)
{
    spw_value *x = o->in[0];
    const spw__op *combine = o + 1;
    const act *onto;
    act *dx;
    while (combine->kind != T_COMBINE)
        combine++;
    if (t->part == SPW_PART_BACK_TURN) {
        if (lend_piece(t, o->out, (uint32_t)(o + 1 - t->ops), (uint32_t)(combine - t->ops)))
            backward_turn(t, o, combine, t->part_first, t->part_end, t->apart->sums);
    } else if (t->part == SPW_PART_BACK) {
        dx = spw__tape_grad_onto(t, x, &onto);
        if (!t->dry && dx != NULL)
            spw_gpu_close_sums(t->queue, dx, t->apart->sums, onto, x->rows, x->cols);
    } else if (o->in[1]->routed->piece_rows > 0) {
        dispatch_backward_in_pieces(t, o, combine);
    } else {
        dispatch_backward_whole(t, o, combine);
    }
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
    if (t->part == SPW_PART_ALL && !x->needs_grad && !o->in[1]->needs_grad) {
        spw__tape_hand_over(t, o->in[2], y);
        return;
    }
    t->in_experts = true;
    t->passed |= SPW_PASSED_EXPERTS;
    o->in[1]->grad_set = true;
    r->dweights =
        t->apart != NULL ? held_dweights(t, r) : spw__tape_take(t, r->on_device.M * r->on_device.k * sizeof(float));
    if (t->part == SPW_PART_BACK) { /* its experts went back before */
        spw__tape_hand_over(t, o->in[2], y);
        return;
    }
    lend_stacks(t, dispatch);
    if (t->part != SPW_PART_BACK_TURN)
        spw__tape_hand_over(t, o->in[2], y); /* first: it may be dispatch's input too */
    if (pieces && t->apart == NULL) {        /* what stays, in front of what does not */
        dispatch->dx[0] = spw__tape_grad_onto(t, dispatch->in[0], &dispatch->onto);
        t->pieces_from = t->used;
    }
    dx = spw__tape_grad(t, x, 1, &added);
    SPW_ASSERT(!added);
    if (!t->dry && !pieces && dx != NULL && r->weighs_input)
        spw_gpu_dispatch(t->queue, dx, y->grad, &r->on_device, y->cols);
    else if (!t->dry && !pieces && !r->weighs_input && (dx != NULL || !o->later) && r->dweights != NULL)
        spw_gpu_combine_backward(t->queue, dx, o->later ? NULL : r->dweights, y->grad, x->data, &r->on_device, y->cols);
}
