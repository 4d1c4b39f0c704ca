/*
 * Operations on the tape that make each element of those in its place: curves, gated products, sums, scales, caps, dropout. Each
 * one's backward stands behind its forward.
 */
#include "tape_internal.h"

void
spw__tape_curve(spw_tape *t, const spw__op *o, uint64_t first, uint64_t rows)
{
    const spw_value *y = o->out, *x = o->in[0];
    spw_gpu_curve(t->queue, o->curve, spw__tape_at_row(t, y, y->data, first), spw__tape_at_row(t, x, x->data, first),
                  rows * y->cols);
}

spw_value *
spw_nn_curve(spw_tape *t, spw_curve kind, spw_value *x)
{
    spw_value *y = x == NULL ? NULL : spw__tape_value(t, x->rows, x->cols, NULL);
    spw__op *o;
    if (y == NULL || (o = spw__tape_op(t, T_CURVE, y)) == NULL)
        return spw__tape_fail(t);
    o->kind = T_CURVE;
    o->out = y;
    o->in[0] = x;
    o->curve = kind;
    if (spw__tape_computes(t) && !t->in_experts)
        spw__tape_curve(t, o, 0, y->rows);
    return y;
}

void
spw__tape_curve_backward(spw_tape *t, const spw__op *o, uint64_t first, uint64_t rows)
{
    const spw_value *y = o->out, *x = o->in[0];
    if (o->dx[0] != NULL)
        spw_gpu_curve_backward(t->queue, o->curve, spw__tape_at_row(t, x, o->dx[0], first),
                               spw__tape_at_row(t, y, y->grad, first), spw__tape_at_row(t, x, x->data, first),
                               rows * y->cols, o->flags);
}

void
spw__curve_backward(spw_tape *t, spw__op *o)
{
    o->dx[0] = spw__tape_grad(t, o->in[0], SPW_OP_ACC_DX, &o->flags);
    if (!t->dry && !t->in_experts)
        spw__tape_curve_backward(t, o, 0, o->out->rows);
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

void
spw__gate_mul_backward(spw_tape *t, spw__op *o)
{
    prepare_gate_mul(t, o);
    if (!t->dry && !t->in_experts)
        spw__tape_gate_mul_backward(t, o, 0, o->out->rows);
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

void
spw__add_gated_backward(spw_tape *t, const spw__op *o)
{
    spw_value *y = o->out, *x = o->in[1], *gate = o->in[2];
    unsigned added = 0;
    act *dx = spw__tape_grad(t, x, 1, &added), *dgate = spw__tape_grad(t, gate, 1, &added);
    SPW_ASSERT(!added && x->needs_grad && gate->needs_grad);
    if (!t->dry && dx != NULL && dgate != NULL)
        spw_gpu_add_gated_backward(t->queue, dx, dgate, y->grad, x->data, gate->data, y->rows, y->cols);
    spw__tape_hand_over(t, o->in[0], y);
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

void
spw__add_backward(spw_tape *t, const spw__op *o)
{
    spw__tape_pass_through(t, o->in[1], o->out);
    spw__tape_hand_over(t, o->in[0], o->out);
}

float
spw_nn_rounded(const spw_tape *t, float x)
{
    char rounded[sizeof(float)];
    spw_convert(rounded, t->act_dtype, &x, SPW_F32, 1);
    spw_convert(&x, SPW_F32, rounded, t->act_dtype, 1);
    return x;
}

spw_value *
spw_nn_scale(spw_tape *t, spw_value *x, float scale)
{
    spw_value *y = x == NULL ? NULL : spw__tape_value(t, x->rows, x->cols, NULL);
    spw__op *o;
    if (y == NULL || (o = spw__tape_op(t, T_SCALE, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_add_scaled(t->queue, y->data, NULL, x->data, scale, y->rows * y->cols);
    o->in[0] = x;
    o->p = scale;
    return y;
}

void
spw__scale_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out;
    unsigned acc = 0;
    act *dx = spw__tape_grad(t, o->in[0], 1, &acc);
    if (!t->dry && dx != NULL)
        spw_gpu_add_scaled(t->queue, dx, acc ? dx : NULL, y->grad, o->p, y->rows * y->cols);
}

spw_value *
spw_nn_add_scaled_by(spw_tape *t, spw_value *a, spw_value *b, spw_value *s)
{
    spw_value *y;
    spw__op *o;
    if (a == NULL || b == NULL || s == NULL || a->rows != b->rows || a->cols != b->cols || !s->is_param ||
        s->rows * s->cols != SPW_TERMS)
        return spw__tape_fail(t);
    y = spw__tape_value(t, a->rows, a->cols, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_ADD_SCALED_BY, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_add_scaled_by(t->queue, y->data, a->data, b->data, s->data, y->rows * y->cols);
    o->in[0] = a;
    o->in[1] = b;
    o->param[0] = s;
    return y;
}

/* Both have the same gradient, which is made where y's was. */
void
spw__add_scaled_by_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out;
    if (!t->dry)
        spw_gpu_add_scaled_by(t->queue, y->grad, y->grad, NULL, o->param[0]->data, y->rows * y->cols);
    spw__add_backward(t, o);
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

/* The mask of rows that are a rank's of shared sequences is that which these rows have where sequences are whole. */
static void
drop(const spw_tape *t, const spw__op *o, act *y, const act *x)
{
    const uint64_t rows = o->out->rows, cols = o->out->cols;
    for (uint64_t done = 0, some; done < rows; done += some) {
        uint64_t whole = o->first;
        some = rows;
        if (t->share != NULL) {
            const uint64_t row = o->first + done, at = row % o->T;
            whole = row / o->T * t->share->count * o->T + spw__tape_first_position(t, o->T) + at;
            some = rows - done < o->T - at ? rows - done : o->T - at;
        }
        spw_gpu_dropout(t->queue, spw__tape_at_col(t, y, done * cols), (const char *)x + done * cols * t->act_bytes,
                        some * cols, o->p, o->key, o->counter, whole * cols);
    }
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
    o->first = t->first_row;
    o->T = batch->positions;
    o->out = y;
    if (spw__tape_computes(t))
        drop(t, o, y->data, x->data);
    return y;
}

void
spw__dropout_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out;
    unsigned flags = o->flags;
    act *dx = spw__tape_grad(t, o->in[0], SPW_OP_ACC_DX, &flags);
    if (dx != NULL && (flags & SPW_OP_ACC_DX)) {
        act *part = spw__tape_take(t, y->rows * y->cols * t->act_bytes);
        if (!t->dry && part != NULL) {
            drop(t, o, part, y->grad);
            spw_gpu_add(t->queue, dx, dx, part, y->rows * y->cols);
        }
    } else if (!t->dry && dx != NULL) {
        drop(t, o, dx, y->grad);
    }
}
