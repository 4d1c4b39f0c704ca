/*
 * Attention of sequences that ranks share. Each rank has some positions of every sequence, and computes with their rows all that treats rows
 * by themselves. Attention needs all rows of a head, and nothing of other heads: so each gives the others the heads that they are to
 * compute of its rows, has all rows of its own heads, and gives back what attention made of them. Heads of keys and values that are
 * fewer than ranks go to several, and their gradients come back as several, which are added up in the order of the ranks.
 *
 * Two movements, each the other's way back: out, from a rank's rows with all heads to all rows with a rank's heads, and home.
 *
 * Source  Jacobs et al. 2023 (2309.14509), DeepSpeed-Ulysses
 */
#include "tape_internal.h"

/* A part of what moves: heads of a value, of which each rank computes some. */
typedef struct columns {
    act *at;               /* of the first row's first head; NULL: nobody wants it */
    uint64_t stride, head; /* elements from a row, and from a head, to the next one */
    uint64_t D, heads;     /* a head's elements; how many there are */
} columns;

typedef struct movement {
    columns part[3]; /* queries, keys, values; or what attention gives */
    uint32_t count;
    uint64_t B, T; /* sequences, and positions of them that this rank has */
} movement;

/* Heads that a rank computes, and the first of them. */
static uint64_t
each(const spw_tape *t, const columns *c)
{
    return c->heads > t->share->count ? c->heads / t->share->count : 1;
}

static uint64_t
first_of(const spw_tape *t, const columns *c, uint32_t rank)
{
    return rank * c->heads / t->share->count;
}

/* Elements of a row of what a rank computes. */
static uint64_t
width(const spw_tape *t, const movement *m)
{
    uint64_t cols = 0;
    for (uint32_t k = 0; k < m->count; k++)
        cols += each(t, &m->part[k]) * m->part[k].D;
    return cols;
}

static act *
at_elem(const spw_tape *t, act *p, uint64_t elem)
{
    return (char *)p + elem * t->act_bytes;
}

/* Memory of the arena until something else is taken. */
static act *
lend(spw_tape *t, uint64_t elems)
{
    const uint64_t used = t->used;
    act *p = spw__tape_take(t, elems * t->act_bytes);
    t->used = used;
    return p;
}

/* What is in `send` for each rank goes there, and what they have comes to its place in `to`. */
static void
trade(spw_tape *t, act *to, uint64_t part)
{
    const uint64_t bytes = part * t->act_bytes;
    if (!t->asleep) {
        t->traded += (t->share->count - 1) * bytes;
        t->send_most = t->share->count * bytes > t->send_most ? t->share->count * bytes : t->send_most;
    }
    if (!t->dry && t->share->trade(t->share->ctx, to, bytes, &t->failure) != SPW_OK)
        (void)spw__tape_fail(t);
}

/* The rows of all sequences that are a rank's, between where they lie beside each other and among the others' of the sequences. */
static void
copy_rows(const spw_tape *t, const movement *m, act *beside, act *whole, uint32_t rank, uint64_t W, bool take)
{
    const uint64_t own = m->T * W, all = t->share->count * own;
    act *at = at_elem(t, whole, rank * own);
    if (take)
        spw_gpu_copy_heads(t->queue, beside, W, own, at, W, all, m->T, m->B, W);
    else
        spw_gpu_copy_heads(t->queue, at, W, all, beside, W, own, m->T, m->B, W);
}

/* This rank's rows of a rank's heads, side by side. */
static void
pack_heads(const spw_tape *t, const movement *m, act *to, uint32_t rank, uint64_t W)
{
    for (uint32_t k = 0; k < m->count; k++) {
        const columns *c = &m->part[k];
        const uint64_t H = each(t, c);
        spw_gpu_copy_heads(t->queue, to, W, c->D, at_elem(t, c->at, first_of(t, c, rank) * c->head), c->stride, c->head,
                           m->B * m->T, H, c->D);
        to = at_elem(t, to, H * c->D);
    }
}

/* Of all ranks' heads, which lie (rank, row, head), those of each part to where it has them. */
static void
unpack_heads(const spw_tape *t, const movement *m, const act *from, uint64_t W)
{
    const uint64_t rows = m->B * m->T, count = t->share->count;
    for (uint32_t k = 0; k < m->count; k++) {
        const columns *c = &m->part[k];
        const uint64_t H = each(t, c), several = count > c->heads ? count / c->heads : 1;
        for (uint64_t rank = 0; rank < count && c->at != NULL; rank += several) {
            act *to = at_elem(t, c->at, first_of(t, c, (uint32_t)rank) * c->head);
            const act *part = (const char *)from + rank * rows * W * t->act_bytes;
            if (several > 1)
                spw_gpu_sum_heads(t->queue, to, c->stride, part, W, rows * W, rows, several, c->D);
            else
                spw_gpu_copy_heads(t->queue, to, c->stride, c->head, part, W, c->D, rows, H, c->D);
        }
        from = (const char *)from + H * c->D * t->act_bytes;
    }
}

/*
 * whole (B, all positions, width): all rows of this rank's heads. Of one sequence ranks' rows come to where they are to lie. in_place: whole is the memory
 * of what is moved, which is one part: what is this rank's own waits elsewhere until nothing else is read there.
 */
static void
move_out(spw_tape *t, const movement *m, act *whole, bool in_place)
{
    const uint64_t W = width(t, m), part = m->B * m->T * W;
    const uint32_t count = t->share->count, own = t->share->rank;
    const bool one = m->B == 1;
    act *waiting = one && !in_place ? whole : lend(t, one ? part : count * part), *to = one ? whole : waiting;
    act *mine = one && in_place ? waiting : at_elem(t, to, own * part);
    if (whole == NULL || waiting == NULL)
        return;
    for (uint32_t k = 0; k < count && !t->dry; k++)
        pack_heads(t, m, k == own ? mine : at_elem(t, t->share->send, k * part), k, W);
    trade(t, to, part);
    for (uint32_t k = 0; k < count && !t->dry; k++) {
        if (!one || (k == own && in_place))
            copy_rows(t, m, k == own ? mine : at_elem(t, to, k * part), whole, k, W, false);
    }
}

static void
move_home(spw_tape *t, const movement *m, act *whole)
{
    const uint64_t W = width(t, m), part = m->B * m->T * W;
    const uint32_t count = t->share->count, own = t->share->rank;
    act *to = lend(t, count * part);
    if (whole == NULL || to == NULL)
        return;
    for (uint32_t k = 0; k < count && !t->dry; k++)
        copy_rows(t, m, at_elem(t, k == own ? to : t->share->send, k * part), whole, k, W, true);
    trade(t, to, part);
    if (!t->dry)
        unpack_heads(t, m, to, W);
}

/* ---------------------------------------------------------------- on the tape */

static movement
of_inputs(const spw_tape *t, const spw__op *o, act *const at[3])
{
    const spw_attention_shape *s = &o->shape;
    movement m = {.count = 3, .B = s->B, .T = s->T};
    for (int k = 0; k < 3; k++)
        m.part[k] = (columns){.at = at[k] == NULL ? NULL : spw__tape_at_col(t, at[k], o->col[k]),
                              .stride = o->in[k]->cols,
                              .head = k == 2 ? s->v_head : s->qk_head,
                              .D = k == 2 ? s->Dv : s->D,
                              .heads = k == 0 ? s->Hq : s->Hk};
    return m;
}

static movement
of_output(const spw__op *o, act *at)
{
    const spw_attention_shape *s = &o->shape;
    return (movement){.part = {{.at = at, .stride = s->Hq * s->Dv, .head = s->Dv, .D = s->Dv, .heads = s->Hq}},
                      .count = 1,
                      .B = s->B,
                      .T = s->T};
}

/* Heads are shared out evenly, or several ranks have the same one. */
static bool
divides(uint64_t heads, uint64_t ranks)
{
    return heads % ranks == 0 || ranks % heads == 0;
}

spw_value *
spw__share_out(spw_tape *t, spw_value *const in[3], const uint64_t col[3], spw_attention_shape *shape)
{
    const uint64_t count = t->share->count;
    spw__op found = {.shape = *shape, .in = {in[0], in[1], in[2]}, .col = {col[0], col[1], col[2]}}, *o;
    const movement m = of_inputs(t, &found, (act *[]){in[0]->data, in[1]->data, in[2]->data});
    const uint64_t W = width(t, &m);
    spw_value *y;
    if (shape->Hq % count != 0 || !divides(shape->Hk, count) || t->cache != NULL)
        return spw__tape_fail(t);
    y = spw__tape_value(t, shape->B * shape->T * count, W, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_SHARE_OUT, y)) == NULL)
        return spw__tape_fail(t);
    o->shape = *shape;
    memcpy(o->in, in, sizeof o->in);
    memcpy(o->col, col, sizeof o->col);
    if (!t->kept)
        move_out(t, &m, y->data, false);
    shape->T *= count;
    shape->Hq = each(t, &m.part[0]);
    shape->Hk = each(t, &m.part[1]);
    shape->qk_head = shape->D;
    shape->v_head = shape->Dv;
    return y;
}

/* Nobody reads an input any more, for attention has read what was made of it: its gradient goes where it lies, if that is the call's memory. */
void
spw__share_out_backward(spw_tape *t, const spw__op *o)
{
    act *d[3];
    movement m;
    for (int i = 0; i < 3; i++) {
        spw_value *x = o->in[i];
        unsigned ignored = 0;
        SPW_ASSERT(!x->grad_set || x == o->in[0]);
        if (x->needs_grad && x->grad == NULL && !x->borrowed)
            x->grad = x->data;
        d[i] = spw__tape_grad(t, x, 1, &ignored);
    }
    m = of_inputs(t, o, d);
    move_home(t, &m, o->out->grad);
}

spw_value *
spw__share_home(spw_tape *t, spw_value *x, const spw_attention_shape *shape)
{
    spw_value *y;
    spw__op *o;
    movement m;
    if (x == NULL)
        return spw__tape_fail(t);
    y = spw__tape_value(t, shape->B * shape->T, shape->Hq * shape->Dv, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_SHARE_HOME, y)) == NULL)
        return spw__tape_fail(t);
    o->shape = *shape;
    o->in[0] = x;
    m = of_output(o, y->data);
    if (!t->kept)
        move_home(t, &m, x->data);
    return y;
}

/* In place: as many elements come as go. */
void
spw__share_home_backward(spw_tape *t, const spw__op *o)
{
    const movement m = of_output(o, o->out->grad);
    spw__tape_share_grad(o->in[0], o->out);
    if (o->in[0]->needs_grad)
        move_out(t, &m, o->out->grad, true);
}
