/*
 * Attention of sequences that ranks share. Each rank has some positions of every sequence, and computes with their rows all that treats rows
 * by themselves. Attention needs all rows of a head, and nothing of other heads, linear attention and its convolution too: so each gives the others
 * the heads that they are to compute of its rows, has all rows of its own heads, and gives back what attention made of them. Heads of keys that are
 * fewer than ranks go to several, and their gradients come back as several, which are added up in the order of the ranks.
 *
 * Two movements, each the other's way back: out, from a rank's rows with all heads to all rows with a rank's heads, and home.
 *
 * Source  Jacobs et al. 2023 (2309.14509), DeepSpeed-Ulysses
 */
#include "tape_internal.h"

uint64_t
spw__share_heads(const spw_tape *t, uint64_t heads)
{
    return heads > t->share->count ? heads / t->share->count : 1;
}

static uint64_t
first_head(const spw_tape *t, uint64_t heads, uint64_t rank)
{
    return rank * heads / t->share->count;
}

uint64_t
spw__share_first(const spw_tape *t, uint64_t heads)
{
    return first_head(t, heads, t->share->rank);
}

spw_value *
spw__share_part(spw_tape *t, spw_value *w, uint64_t before, uint64_t heads, uint64_t each)
{
    const uint64_t own = spw__share_heads(t, heads) * each, cols = w != NULL && w->rows > 1 ? w->cols : 1;
    const uint64_t first = (before + spw__share_first(t, heads) * each) * cols;
    return w != NULL && w->rows > 1 ? spw__tape_part(t, w, first, own, cols) : spw__tape_part(t, w, first, 1, own);
}

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

/* Elements of a row of what a rank computes. */
static uint64_t
width(const spw_tape *t, const movement *m)
{
    uint64_t cols = 0;
    for (uint32_t k = 0; k < m->count; k++)
        cols += spw__share_heads(t, m->part[k].heads) * m->part[k].D;
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
        const uint64_t H = spw__share_heads(t, c->heads);
        spw_gpu_copy_heads(t->queue, to, W, c->D, at_elem(t, c->at, first_head(t, c->heads, rank) * c->head), c->stride,
                           c->head, m->B * m->T, H, c->D);
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
        const uint64_t H = spw__share_heads(t, c->heads), several = count > c->heads ? count / c->heads : 1;
        for (uint64_t rank = 0; rank < count && c->at != NULL; rank += several) {
            act *to = at_elem(t, c->at, first_head(t, c->heads, rank) * c->head);
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

/* to: memory of as much as whole is, where what comes may lie; NULL: in what the arena has. */
static void
move_home(spw_tape *t, const movement *m, act *whole, act *to)
{
    const uint64_t W = width(t, m), part = m->B * m->T * W;
    const uint32_t count = t->share->count, own = t->share->rank;
    to = to != NULL ? to : lend(t, count * part);
    if (whole == NULL || to == NULL)
        return;
    for (uint32_t k = 0; k < count && !t->dry; k++)
        copy_rows(t, m, at_elem(t, k == own ? to : t->share->send, k * part), whole, k, W, true);
    trade(t, to, part);
    if (!t->dry)
        unpack_heads(t, m, to, W);
}

/* ---------------------------------------------------------------- on the tape */

/* A part of an operation's inputs, in their data or their gradients. */
static columns
part_at(const spw_tape *t, const spw__heads *h, act *at)
{
    return (columns){.at = at == NULL ? NULL : spw__tape_at_col(t, at, h->col),
                     .stride = h->x->cols,
                     .head = h->head,
                     .D = h->D,
                     .heads = h->heads};
}

static movement
of_inputs(const spw_tape *t, const spw__op *o)
{
    movement m = {.count = o->part_count, .B = o->D, .T = o->T};
    for (uint32_t k = 0; k < m.count; k++)
        m.part[k] = part_at(t, &o->shared[k], o->shared[k].x->data);
    return m;
}

static movement
of_output(const spw__op *o, act *at)
{
    const spw__heads *h = &o->shared[0];
    return (movement){.part = {{.at = at, .stride = h->heads * h->D, .head = h->D, .D = h->D, .heads = h->heads}},
                      .count = 1,
                      .B = o->D,
                      .T = o->T};
}

/* Heads are shared out evenly, or several ranks have the same one. */
static bool
divides(uint64_t heads, uint64_t ranks)
{
    return heads > 0 && (heads % ranks == 0 || ranks % heads == 0);
}

spw_value *
spw__share_out(spw_tape *t, const spw__heads *parts, uint32_t count, uint64_t B, uint64_t T)
{
    spw__op found = {.part_count = count, .D = B, .T = T}, *o;
    spw_value *y;
    movement m;
    for (uint32_t k = 0; k < count; k++) {
        if (parts[k].x == NULL || parts[k].x->rows != B * T || !divides(parts[k].heads, t->share->count) ||
            t->cache != NULL)
            return spw__tape_fail(t);
        found.shared[k] = parts[k];
    }
    m = of_inputs(t, &found);
    y = spw__tape_value(t, B * T * t->share->count, width(t, &m), NULL);
    if (y == NULL || (o = spw__tape_op(t, T_SHARE_OUT, y)) == NULL)
        return spw__tape_fail(t);
    for (uint32_t k = 0; k < count; k++)
        o->in[k] = parts[k].x;
    memcpy(o->shared, found.shared, sizeof o->shared);
    o->part_count = count;
    o->D = B;
    o->T = T;
    if (!t->kept)
        move_out(t, &m, y->data, false);
    return y;
}

/* Nobody reads what was given out any more, for attention went back before: what comes home lies there until it has its place. */
void
spw__share_out_backward(spw_tape *t, const spw__op *o)
{
    movement m = {.count = o->part_count, .B = o->D, .T = o->T};
    for (uint32_t k = 0; k < m.count; k++) {
        spw_value *x = o->in[k];
        unsigned ignored = 0;
        SPW_ASSERT(!x->grad_set || x == o->in[0]);
        m.part[k] = part_at(t, &o->shared[k], spw__tape_grad(t, x, 1, &ignored));
    }
    move_home(t, &m, o->out->grad, o->out->data);
}

spw_value *
spw__share_home(spw_tape *t, spw_value *x, uint64_t heads, uint64_t D, uint64_t B, uint64_t T)
{
    spw_value *y;
    spw__op *o;
    movement m;
    if (x == NULL || x->rows != B * T * t->share->count || x->cols != spw__share_heads(t, heads) * D ||
        heads % t->share->count != 0)
        return spw__tape_fail(t);
    y = spw__tape_value(t, B * T, heads * D, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_SHARE_HOME, y)) == NULL)
        return spw__tape_fail(t);
    o->in[0] = x;
    o->shared[0] = (spw__heads){.heads = heads, .D = D};
    o->D = B;
    o->T = T;
    m = of_output(o, y->data);
    if (!t->kept)
        move_home(t, &m, x->data, NULL);
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
