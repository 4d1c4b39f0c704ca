/*
 * A mixture of experts on the tape, beside the same in double: what it gives, and its gradients beside central differences of that. On the
 * cpu device and the emulated GPU, in each compute type; and the same bits however it is computed: at once, kept, by turns, and in pieces
 * with turns and without.
 */
#include "lib_subject.h"
#include "lib_tiny.h"
#include "spw_nn.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { ROWS = 13, WIDTH = 16, INNER = 8, EXPERTS = 6, STRETCH = 8, PIECE = 5 };
/*
 * Where the numbers are: input, router's weights, a factor of each expert, one of all that is given (in terms), and each expert's two
 * matrices.
 */
enum {
    X_AT = 0,
    ROUTER_AT = X_AT + ROWS * WIDTH,
    FACTORS_AT = ROUTER_AT + EXPERTS * WIDTH,
    TERMS_AT = FACTORS_AT + 8, /* each array begins at a multiple of 16 bytes */
    IN_AT = TERMS_AT + 8,
    IN_EACH = 2 * INNER * WIDTH,
    OUT_AT = IN_AT + EXPERTS * IN_EACH,
    OUT_EACH = WIDTH * INNER,
    COUNT = OUT_AT + EXPERTS * OUT_EACH
};
#define EPS 0.01

typedef enum factors { NO_FACTORS, FROZEN, TRAINED } factors;

typedef struct mixture {
    spw_gate gate;
    bool packed; /* gate and up are halves of one, or pairs in it */
    bool onto;   /* combined onto the input, for sums alone; else onto nothing, for a norm */
    bool sigmoid, sum_to_one;
    uint64_t choices;
    float scale, balance;
    factors factors;
} mixture;

static const mixture mixtures[] = {
    {SPW_GATE_GELU, false, false, false, true, 2, 1, 0, NO_FACTORS},
    {SPW_GATE_GELU, true, false, false, true, 3, 1, 0.5f, NO_FACTORS},
    {SPW_GATE_GELU, true, true, false, false, 2, 1, 0, NO_FACTORS},
    {SPW_GATE_SILU, false, false, true, true, 2, 2.5f, 0.5f, NO_FACTORS},
    {SPW_GATE_SIGMOID, true, false, true, false, 2, 1, 0, NO_FACTORS},
    {SPW_GATE_CLAMPED, true, true, false, true, 2, 1, 0, NO_FACTORS},
    {SPW_GATE_GELU, false, true, false, true, EXPERTS, 1, 0, NO_FACTORS},
    {SPW_GATE_GELU, true, false, false, true, 3, 1, 0.5f, TRAINED},
    {SPW_GATE_GELU, true, true, false, false, 2, 1, 0, TRAINED},
    {SPW_GATE_SILU, false, true, true, true, 3, 2.5f, 0.5f, TRAINED},
    {SPW_GATE_GELU, false, false, false, true, 2, 1, 0, FROZEN},
};

#define FAIL(m, ...) fail_with(m, __LINE__, __VA_ARGS__)

static void
fail_with(const mixture *m, int line, const char *format, ...)
{
    char what[300];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    fail_msg("mixture %d, line %d: %s", (int)(m - mixtures), line, what);
}

/* ---------------------------------------------------------------- in double */

static double
logistic(double x)
{
    return 1 / (1 + exp(-x));
}

static double
gated(spw_gate kind, double g, double u)
{
    switch (kind) {
    case SPW_GATE_SILU: return g * logistic(g) * u;
    case SPW_GATE_GELU: return 0.5 * g * (1 + tanh(0.79788456080286536 * (g + 0.044715 * g * g * g))) * u;
    case SPW_GATE_SIGMOID: return logistic(g) * u;
    default:
        g = fmin(g, (double)SPW_GATE_LIMIT);
        u = fmax(fmin(u, (double)SPW_GATE_LIMIT), -(double)SPW_GATE_LIMIT);
        return (u + 1) * g * logistic((double)SPW_GATE_ALPHA * g);
    }
}

static void
normed(double *y, const double *x, uint64_t cols)
{
    for (uint64_t first = 0; first < WIDTH; first += cols) {
        double sum = 0;
        for (uint64_t c = first; c < first + cols; c++)
            sum += x[c] * x[c] / (double)cols;
        for (uint64_t c = first; c < first + cols; c++)
            y[c] = x[c] / sqrt(sum + EPS);
    }
}

/* y += w times what an expert makes of x. */
static void
add_expert(const mixture *m, double *y, double w, const double *x, const double *in, const double *out)
{
    for (uint64_t i = 0; i < INNER; i++) {
        uint64_t gate_row = m->gate == SPW_GATE_CLAMPED ? 2 * i : i;
        uint64_t up_row = m->gate == SPW_GATE_CLAMPED ? 2 * i + 1 : INNER + i;
        double g = 0, u = 0;
        for (uint64_t c = 0; c < WIDTH; c++) {
            g += in[gate_row * WIDTH + c] * x[c];
            u += in[up_row * WIDTH + c] * x[c];
        }
        for (uint64_t c = 0; c < WIDTH; c++)
            y[c] += w * out[c * INNER + i] * gated(m->gate, g, u);
    }
}

/* A row's probabilities, which of them are chosen, and the weights of those. */
static void
choose(const mixture *m, const double *logits, double *p, bool *chosen, double *weights)
{
    double all = 0, sum = 0;
    for (uint64_t e = 0; e < EXPERTS; e++) {
        uint64_t before = 0;
        for (uint64_t other = 0; other < EXPERTS; other++)
            before += logits[other] > logits[e];
        chosen[e] = before < m->choices;
        p[e] = m->sigmoid ? logistic(logits[e]) : exp(logits[e]);
        all += p[e];
        sum += chosen[e] ? p[e] : 0;
    }
    for (uint64_t e = 0; e < EXPERTS; e++) {
        weights[e] = p[e] / (m->sum_to_one ? sum : m->sigmoid ? 1 : all) * (double)m->scale;
        p[e] /= all;
    }
}

/* The sum of y times dy, and the loss of balance. pairs (EXPERTS) in, of the mixture as it was drawn; NULL: no balance. */
static double
compute(const mixture *m, const double *v, const double *dy, double *y, double *pairs)
{
    double loss = 0, scale = v[TERMS_AT] + v[TERMS_AT + 1] + v[TERMS_AT + 2] + v[TERMS_AT + 3];
    for (uint64_t row = 0; row < ROWS; row++) {
        const double *x = v + X_AT + row * WIDTH;
        double h[WIDTH], logits[EXPERTS] = {0}, p[EXPERTS], weights[EXPERTS], sum[WIDTH] = {0};
        bool chosen[EXPERTS];
        normed(h, x, WIDTH);
        for (uint64_t i = 0; i < EXPERTS * WIDTH; i++)
            logits[i / WIDTH] += v[ROUTER_AT + i] * h[i % WIDTH];
        choose(m, logits, p, chosen, weights);
        for (uint64_t e = 0; e < EXPERTS; e++) {
            if (m->factors != NO_FACTORS)
                weights[e] *= v[FACTORS_AT + e];
            if (chosen[e])
                add_expert(m, sum, weights[e], x, v + IN_AT + e * IN_EACH, v + OUT_AT + e * OUT_EACH);
            if (dy == NULL)
                pairs[e] += chosen[e];
            else
                loss += (double)m->balance * EXPERTS / (ROWS * ROWS * (double)m->choices) * pairs[e] * p[e];
        }
        if (!m->onto)
            normed(sum, memcpy(h, sum, sizeof h), STRETCH);
        for (uint64_t c = 0; c < WIDTH; c++) {
            y[row * WIDTH + c] = (x[c] + (m->onto ? x[c] + sum[c] : sum[c])) * scale;
            loss += dy != NULL ? y[row * WIDTH + c] * dy[row * WIDTH + c] : 0;
        }
    }
    return loss;
}

/* ---------------------------------------------------------------- on a device */

typedef struct device {
    spw_gpu *gpu;
    spw_gpu_queue *queue;
    spw_tape *tape;
    spw_dtype type;
    uint32_t bytes; /* of an element */
    char *numbers, *dy, *dx;
    float *grads;
    void *arena, *kept;
} device;

/* How a call is made. */
typedef struct way {
    const char *name;
    bool kept;
    uint64_t tile, turn; /* rows of a piece, experts of a turn; 0: all */
} way;

/* A call under way: turns bring weights, and take them away. */
typedef struct call {
    const mixture *m;
    device *d;
    spw_batch batch;
    spw_value *terms;
    bool recorded, begun[COUNT];
    spw_value *params[3 * EXPERTS];
    uint64_t place[3 * EXPERTS]; /* of the numbers */
    uint32_t forward_turns, backward_turns;
    uint64_t there, next; /* experts that are there: those below next of the turn before, or from it on */
} call;

enum { ARENA = 1 << 18 };

static void
open_device(device *d, const char *name, spw_dtype type)
{
    spw_error err = {0};
    memset(d, 0, sizeof *d);
    DONE(spw_gpu_open(&d->gpu, &(spw_gpu_options){.name = name, .thread_count = 2, .compute_dtype = type}, &err));
    DONE(spw_gpu_queue_create(&d->queue, d->gpu, SPW_QUEUE_COMPUTE, &err));
    DONE(spw_tape_create(&d->tape, d->queue, spw_gpu_get_info(d->gpu), &err));
    d->type = type;
    d->bytes = spw_dtype_bytes(type);
    DONE(spw_gpu_alloc(d->gpu, (void **)&d->numbers, COUNT * d->bytes, &err));
    DONE(spw_gpu_alloc(d->gpu, (void **)&d->dy, ROWS * WIDTH * d->bytes, &err));
    DONE(spw_gpu_alloc(d->gpu, (void **)&d->dx, ROWS * WIDTH * d->bytes, &err));
    DONE(spw_gpu_alloc(d->gpu, (void **)&d->grads, COUNT * sizeof(float), &err));
    DONE(spw_gpu_alloc(d->gpu, &d->arena, ARENA, &err));
    DONE(spw_gpu_alloc(d->gpu, &d->kept, ARENA, &err));
}

static void
close_device(device *d)
{
    void *all[] = {d->numbers, d->dy, d->dx, d->grads, d->arena, d->kept};
    spw_error err = {0};
    DONE(spw_gpu_check(d->gpu, &err));
    for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
        spw_gpu_free(d->gpu, all[k]);
    spw_tape_destroy(d->tape);
    spw_gpu_queue_destroy(d->queue);
    spw_gpu_close(d->gpu);
}

static void
write_numbers(device *d, void *dst, const double *from, uint64_t n)
{
    float wide[COUNT], narrow[COUNT];
    for (uint64_t i = 0; i < n; i++)
        wide[i] = (float)from[i];
    spw_convert(narrow, d->type, wide, SPW_F32, n);
    spw_gpu_write_bytes(d->queue, dst, narrow, n * d->bytes);
}

static void
read_numbers(device *d, float *out, const void *from, uint64_t n)
{
    float narrow[COUNT];
    spw_gpu_read_bytes(d->queue, narrow, from, n * d->bytes);
    spw_convert(out, SPW_F32, narrow, d->type, n);
}

static void
fill_with_nan(device *d, void *p, uint64_t bytes)
{
    unsigned char all[4096];
    memset(all, 0xff, sizeof all);
    for (uint64_t at = 0; at < bytes; at += sizeof all)
        spw_gpu_write_bytes(d->queue, (char *)p + at, all, bytes - at < sizeof all ? bytes - at : sizeof all);
}

/* Experts come upwards, in a backward pass downwards, and what was not asked for is nowhere. */
static spw_status
take_turn(void *ctx, const spw_routed *routed, uint64_t first, uint64_t end, spw_turn turn, spw_error *err)
{
    call *c = ctx;
    (void)err;
    assert_int_equal(routed->on_device.E, EXPERTS);
    assert_true(turn == SPW_TURN_BACKWARD ? end == c->there : turn == SPW_TURN_FORWARD ? first == c->there : true);
    c->there = turn == SPW_TURN_OVER ? c->there : turn == SPW_TURN_BACKWARD ? first : end;
    c->forward_turns += turn == SPW_TURN_FORWARD;
    c->backward_turns += turn == SPW_TURN_BACKWARD;
    for (uint64_t k = 0; k < 3 * EXPERTS; k++) {
        bool comes = turn != SPW_TURN_OVER && k % EXPERTS >= first && k % EXPERTS < end;
        if (c->params[k] == NULL)
            continue;
        c->params[k]->data = comes ? c->d->numbers + c->place[k] * c->d->bytes : NULL;
        c->params[k]->w_grad = comes && turn == SPW_TURN_BACKWARD ? c->d->grads + c->place[k] : NULL;
    }
    return SPW_OK;
}

static spw_value *
param(call *c, uint64_t at, uint64_t rows, uint64_t cols, bool trained)
{
    device *d = c->d;
    return spw_tape_param(d->tape, d->numbers + at * d->bytes, trained && c->recorded ? d->grads + at : NULL,
                          &c->begun[at], rows, cols);
}

/* Matrices k of all experts, of so many numbers each. */
static spw_value *const *
each(call *c, uint64_t k, uint64_t at, uint64_t step, uint64_t rows, uint64_t cols, bool in_turns)
{
    spw_value **w = c->params + k * EXPERTS;
    for (uint64_t e = 0; e < EXPERTS; e++) {
        c->place[k * EXPERTS + e] = at + e * step;
        w[e] = param(c, at + e * step, rows, cols, true);
        assert_non_null(w[e]);
        if (in_turns) {
            w[e]->data = NULL;
            w[e]->w_grad = NULL;
        }
    }
    return w;
}

/* (input + the norm of what experts give) times a number. */
static void
end_part(const spw_call *called, uint32_t *at, spw_value *const *in, spw_value **out)
{
    spw_tape *t = called->tape;
    spw_value *y = spw_nn_rmsnorm_plain(t, in[1], STRETCH, (float)EPS);
    spw_nn_into(t, 0);
    out[0] = spw_nn_add_scaled_by(t, in[0], y, called->params[(*at)++]);
}

static spw_value *
end_by_rows(call *c, spw_value *x, spw_value *y)
{
    spw_call called = {.tape = c->d->tape, .batch = &c->batch, .params = &c->terms};
    spw_value *out = NULL;
    uint32_t at = 0;
    c->batch = (spw_batch){.sequences = 1, .positions = ROWS};
    assert_true(spw_nn_rows(&called, &at, end_part, (spw_value *[2]){x, y}, 2, &out, 1));
    return out;
}

static spw_value *
forward(call *c, const way *how)
{
    const mixture *m = c->m;
    device *d = c->d;
    spw_tape *t = d->tape;
    const bool turns = how->turn > 0;
    const uint64_t step = IN_EACH;
    spw_routing_rule rule = {.sum_to_one = m->sum_to_one, .sigmoid = m->sigmoid, .scale = m->scale};
    spw_value *x = spw_tape_input(t, d->numbers + X_AT * d->bytes, ROWS, WIDTH, c->recorded), *h, *routing, *y;
    spw_value *router = param(c, ROUTER_AT, EXPERTS, WIDTH, true);
    c->terms = param(c, TERMS_AT, 1, SPW_TERMS, false);
    memset(c->params, 0, sizeof c->params);
    if (turns)
        spw_tape_on_turn(t, how->turn, take_turn, c);
    x->grad = d->dx;
    h = spw_nn_linear(t, spw_nn_rmsnorm_plain(t, x, WIDTH, (float)EPS), router, NULL, 0);
    routing = m->factors == NO_FACTORS ? spw_nn_route(t, h, m->choices, &rule, m->balance)
                                       : spw_nn_route_scaled(t, h, m->choices, &rule, m->balance,
                                                             param(c, FACTORS_AT, 1, EXPERTS, m->factors == TRAINED));
    h = spw_nn_dispatch(t, x, routing);
    if (m->packed) {
        h = spw_nn_linear_each(t, h, routing, each(c, 0, IN_AT, step, 2 * INNER, WIDTH, turns), NULL, 0);
        h = spw_nn_gate_mul_packed(t, m->gate, h);
    } else {
        spw_value *gate = spw_nn_linear_each(t, h, routing, each(c, 0, IN_AT, step, INNER, WIDTH, turns), NULL, 0);
        spw_value *up =
            spw_nn_linear_each(t, h, routing, each(c, 1, IN_AT + INNER * WIDTH, step, INNER, WIDTH, turns), NULL, 0);
        h = spw_nn_gate_mul(t, m->gate, gate, up);
    }
    h = spw_nn_linear_each(t, h, routing, each(c, 2, OUT_AT, OUT_EACH, WIDTH, INNER, turns), NULL, 0);
    c->there = 0;
    y = spw_nn_combine(t, m->onto ? x : NULL, h, routing);
    y = m->onto ? spw_nn_add_scaled_by(t, x, y, c->terms) : end_by_rows(c, x, y);
    assert_non_null(y);
    return y;
}

static void
backward(call *c, spw_value *y, const double *dy)
{
    write_numbers(c->d, c->d->dy, dy, ROWS * WIDTH);
    y->grad = c->d->dy;
    c->there = EXPERTS;
    spw_tape_backward(c->d->tape, y);
}

/* What a recorded call takes of the arena, or one that keeps. */
static uint64_t
measure(const mixture *m, device *d, const way *how, bool keeps)
{
    call c = {.m = m, .d = d, .recorded = !keeps};
    spw_error err = {0};
    spw_value *y;
    if (keeps)
        spw_tape_reset_keeping(d->tape, NULL, 0);
    else
        spw_tape_reset(d->tape, NULL, 0, true);
    y = forward(&c, how);
    DONE(spw_tape_check(d->tape, &err));
    if (!keeps) {
        y->grad = d->dy;
        spw_tape_backward(d->tape, y);
    }
    return spw_tape_arena_used(d->tape);
}

typedef struct result {
    float y[ROWS * WIDTH], grads[COUNT]; /* where x is: its gradient */
} result;

static uint32_t
turns_of(const way *how)
{
    return how->turn == 0 ? 0 : (uint32_t)((EXPERTS + how->turn - 1) / how->turn);
}

/* Forward alone, or kept; then forward and backward, in memory that holds nothing. */
static void
run(const mixture *m, device *d, const way *how, const double *dy, result *out)
{
    spw_error err = {0};
    call c = {.m = m, .d = d};
    uint64_t bytes;
    spw_value *y;
    float recorded[ROWS * WIDTH];
    spw_tape_in_tiles(d->tape, how->tile);
    fill_with_nan(d, d->kept, ARENA);
    fill_with_nan(d, d->arena, ARENA);
    fill_with_nan(d, d->grads, COUNT * sizeof(float));
    bytes = measure(m, d, how, true);
    assert_true(bytes <= ARENA);
    spw_tape_reset_keeping(d->tape, d->kept, bytes);
    y = forward(&c, how);
    DONE(spw_tape_check(d->tape, &err));
    read_numbers(d, out->y, y->data, ROWS * WIDTH);
    assert_int_equal(c.forward_turns, turns_of(how));
    c = (call){.m = m, .d = d, .recorded = true};
    if (how->kept) {
        spw_tape_reset_kept(d->tape, d->kept, bytes, d->arena, ARENA);
    } else {
        bytes = measure(m, d, how, false);
        assert_true(bytes <= ARENA);
        spw_tape_reset(d->tape, d->arena, bytes, true);
    }
    y = forward(&c, how);
    DONE(spw_tape_check(d->tape, &err));                       /* and what was put off is computed */
    if (!m->onto || how->kept || how->turn + how->tile == 0) { /* else sums that nobody reads were left out */
        read_numbers(d, recorded, y->data, ROWS * WIDTH);
        assert_memory_equal(recorded, out->y, sizeof recorded);
    }
    assert_int_equal(c.forward_turns, m->onto || how->kept ? 0 : turns_of(how));
    backward(&c, y, dy);
    assert_int_equal(c.backward_turns, turns_of(how));
    DONE(spw_tape_check(d->tape, &err));
    if (!how->kept)
        assert_int_equal(spw_tape_arena_used(d->tape), bytes);
    spw_gpu_read_bytes(d->queue, out->grads, d->grads, sizeof out->grads);
    read_numbers(d, out->grads + X_AT, d->dx, ROWS * WIDTH);
}

/* ---------------------------------------------------------------- side by side */

/* An array's error beside its size. */
static void
check(const mixture *m, const device *d, const way *how, const char *what, const float *got, const double *want,
      uint64_t n)
{
    static const double within[SPW_DTYPE_COUNT] = {1e-5, 5e-2, 8e-3};
    double error = 0, size = 0, cuts = m->gate == SPW_GATE_CLAMPED ? 3 : 1; /* a number near where it is cut off */
    for (uint64_t i = 0; i < n; i++) {
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += want[i] * want[i];
    }
    if (!(sqrt(error) <= cuts * within[d->type] * sqrt(size)))
        FAIL(m, "%s, type %d, %s: off by %.3g of %.3g", how->name, (int)d->type, what, sqrt(error), sqrt(size));
}

static void
draw(const mixture *m, double *v, double *dy)
{
    uint64_t key = subject_key((uint64_t)(m - mixtures));
    for (uint64_t i = 0; i < COUNT; i++)
        v[i] = (double)subject_number(key, i); /* which every type holds */
    for (uint64_t i = ROUTER_AT; i < FACTORS_AT; i++)
        v[i] *= 2;
    v[FACTORS_AT + 1] = 0;
    for (uint64_t i = IN_AT; m->gate == SPW_GATE_CLAMPED && i < OUT_AT; i++)
        v[i] *= 4; /* so that some are cut off */
    for (uint64_t i = 0; i < SPW_TERMS; i++)
        v[TERMS_AT + i] = i < 2 ? 0.75 - (double)i : 0x1p-12;
    for (uint64_t i = 0; i < ROWS * WIDTH; i++)
        dy[i] = (double)subject_number(key + 1, i);
}

/* What is given and wanted of a mixture, made once. */
typedef struct wanted {
    bool there;
    double v[COUNT], dy[ROWS * WIDTH], y[ROWS * WIDTH], grads[COUNT];
} wanted;

static const wanted *
want(const mixture *m)
{
    static wanted all[sizeof mixtures / sizeof mixtures[0]];
    wanted *w = &all[m - mixtures];
    double *v = w->v, *dy = w->dy, y[ROWS * WIDTH], pairs[EXPERTS] = {0}, h = 1e-6;
    if (w->there)
        return w;
    w->there = true;
    draw(m, v, dy);
    (void)compute(m, v, NULL, w->y, pairs);
    for (uint64_t i = 0; i < COUNT; i++) {
        double before = v[i], up, down;
        v[i] = before + h;
        up = compute(m, v, dy, y, pairs);
        v[i] = before - h;
        down = compute(m, v, dy, y, pairs);
        v[i] = before;
        w->grads[i] = (up - down) / (2 * h);
    }
    return w;
}

static void
examine(const mixture *m, device *d)
{
    static const way ways[] = {{"at once", false, 0, 0},
                               {"kept", true, 0, 0},
                               {"in turns", false, 0, 4},
                               {"each alone", false, 0, 1},
                               {"kept in turns", true, 0, 4},
                               {"in pieces", false, PIECE, 0},
                               {"pieces, kept", true, PIECE, 0},
                               {"pieces in turns", false, PIECE, 2},
                               {"pieces in turns, kept", true, PIECE, 4},
                               {"in smaller pieces", false, 1, 0}};
    const wanted *w = want(m);
    const double *grads = w->grads;
    result first, got;
    write_numbers(d, d->numbers, w->v, COUNT);
    for (size_t k = 0; k < sizeof ways / sizeof ways[0]; k++) {
        const way *how = &ways[k];
        run(m, d, how, w->dy, &got);
        check(m, d, how, "what it gives", got.y, w->y, ROWS * WIDTH);
        check(m, d, how, "dx", got.grads + X_AT, grads + X_AT, ROWS * WIDTH);
        check(m, d, how, "the router's gradient", got.grads + ROUTER_AT, grads + ROUTER_AT, EXPERTS * WIDTH);
        if (m->factors == TRAINED)
            check(m, d, how, "the factors' gradient", got.grads + FACTORS_AT, grads + FACTORS_AT, EXPERTS);
        for (uint64_t i = 0; i < EXPERTS && m->factors != TRAINED; i++)
            assert_true(isnan(got.grads[FACTORS_AT + i])); /* as it was */
        check(m, d, how, "a gradient in front of the gate", got.grads + IN_AT, grads + IN_AT, EXPERTS * IN_EACH);
        check(m, d, how, "a gradient behind the gate", got.grads + OUT_AT, grads + OUT_AT, EXPERTS * OUT_EACH);
        if (k == 0 || (how->tile > 0 && how->tile != ways[k - 1].tile))
            first = got;
        if (memcmp(&first, &got, sizeof got) != 0)
            FAIL(m, "%s: other bits", how->name);
    }
}

static void
test_cpu(void **state)
{
    device d;
    (void)state;
    open_device(&d, "cpu", SPW_F32);
    for (size_t k = 0; k < sizeof mixtures / sizeof mixtures[0]; k++)
        examine(&mixtures[k], &d);
    close_device(&d);
}

static void
test_emulated(void **state)
{
    (void)state;
    if (!tiny_emulated_device())
        skip();
    for (int type = SPW_F32; type <= (SANITIZED ? SPW_BF16 : SPW_F16); type++) {
        device d;
        open_device(&d, "cuda", (spw_dtype)type);
        for (size_t k = 0; k < sizeof mixtures / sizeof mixtures[0]; k++) {
            if (type == SPW_F32 ? !SANITIZED || k % 3 == 0
                                : k % 2 == (size_t)type % 2) /* tensor cores take long here */
                examine(&mixtures[k], &d);
        }
        close_device(&d);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cpu), cmocka_unit_test(test_emulated)};
    return cmocka_run_group_tests_name("mixture", tests, NULL, NULL);
}
