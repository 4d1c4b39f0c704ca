/* Linear attention in fp64: the definitions row after row, with every row's state kept, and back through these step by step. */
#include "lib_reference.h"
#include <math.h>
#include <stdlib.h>

static double
sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* ---------------------------------------------------------------- convolution */

/* x of channel c that row t of sequence b reads by tap j; kept: rows before a sequence's first, of which a cache has K - 1. NULL: none. */
static double
conv_input(const spw_conv_shape *s, const float *x, const float *kept, uint64_t b, uint64_t t, uint64_t j, uint64_t c)
{
    int64_t at = (int64_t)(t + j) - (int64_t)(s->K - 1), first = s->begins != NULL ? s->begins[b * s->T + t] : 0;
    if (at >= first)
        return (double)x[(b * s->T + (uint64_t)at) * s->C + c];
    return kept != NULL && at < 0 ? (double)kept[(uint64_t)(at + (int64_t)s->K - 1) * s->C + c] : 0;
}

static double
conv_sum(const spw_conv_shape *s, const float *x, const float *w, const float *kept, uint64_t b, uint64_t t, uint64_t c)
{
    double u = s->bias != NULL ? (double)((const float *)s->bias)[c] : 0;
    for (uint64_t j = 0; j < s->K; j++)
        u += (double)w[c * s->K + j] * conv_input(s, x, kept, b, t, j, c);
    return u;
}

void
reference_conv(const spw_conv_shape *s, float *y, float *dx, float *dw, float *dbias, const float *dy, const float *x,
               const float *w)
{
    double *sum_dx = calloc(s->B * s->T * s->C + 1, sizeof *sum_dx), *sum_dw = calloc(s->C * s->K, sizeof *sum_dw);
    double *sum_dbias = calloc(s->C, sizeof *sum_dbias);
    if (sum_dx == NULL || sum_dw == NULL || sum_dbias == NULL)
        abort();
    for (uint64_t i = 0; i < s->B * s->T * s->C; i++) {
        uint64_t row = i / s->C, b = row / s->T, t = row % s->T, c = i % s->C;
        double u = conv_sum(s, x, w, NULL, b, t, c), g = s->plain ? 1 : sigmoid(u);
        double du = (double)dy[i] * (g + u * g * (1 - g));
        y[i] = (float)(u * g);
        sum_dbias[c] += du;
        for (uint64_t j = 0; j < s->K; j++) {
            int64_t at = (int64_t)(t + j) - (int64_t)(s->K - 1);
            sum_dw[c * s->K + j] += du * conv_input(s, x, NULL, b, t, j, c);
            if (at >= (s->begins != NULL ? s->begins[row] : 0))
                sum_dx[(b * s->T + (uint64_t)at) * s->C + c] += du * (double)w[c * s->K + j];
        }
    }
    for (uint64_t i = 0; dx != NULL && i < s->B * s->T * s->C; i++)
        dx[i] = (float)((isnan(dx[i]) ? 0 : (double)dx[i]) + sum_dx[i]);
    for (uint64_t i = 0; dw != NULL && i < s->C * s->K; i++)
        dw[i] = (float)((double)dw[i] + sum_dw[i]);
    for (uint64_t c = 0; dbias != NULL && c < s->C; c++)
        dbias[c] = (float)((double)dbias[c] + sum_dbias[c]);
    free(sum_dbias);
    free(sum_dx);
    free(sum_dw);
}

void
reference_conv_cached(const spw_conv_shape *s, float *y, const float *x, const float *w, float *before,
                      const int32_t *slots, const int32_t *starts)
{
    const uint64_t n = (s->K - 1) * s->C;
    float *kept = calloc(n + 1, sizeof *kept);
    if (kept == NULL)
        abort();
    for (uint64_t b = 0; b < s->B; b++) {
        float *mine = before + (uint64_t)slots[b] * n;
        for (uint64_t i = 0; i < n; i++)
            kept[i] = starts[b] > 0 ? mine[i] : 0;
        for (uint64_t i = 0; i < s->T * s->C; i++) {
            double u = conv_sum(s, x, w, kept, b, i / s->C, i % s->C);
            y[b * s->T * s->C + i] = (float)(s->plain ? u : u * sigmoid(u));
        }
        for (uint64_t i = 0; i < n; i++) /* what tap i / C of a row behind the last would read */
            mine[i] = (float)conv_input(s, x, kept, b, s->T, i / s->C, i % s->C);
    }
    free(kept);
}

/* ---------------------------------------------------------------- the gated delta rule */

/* A head of a sequence. States (T + 1, Dk, Dv), the first one what it begins with; a row's factors and what it made of them. */
typedef struct head {
    const spw_delta_shape *s;
    const reference_delta_arrays *a;
    uint64_t b, h;
    double *states, *q, *k, *delta, *seen; /* q, k (T,Dk) of length one; delta, and k S' (T,Dv), of Mamba-2 0 */
    double *gamma, *beta;                  /* (T,decays of a head), (T) gamma 0 where a document begins */
} head;

static double *
zeros(uint64_t n)
{
    double *x = calloc(n + 1, sizeof *x);
    if (x == NULL)
        abort();
    return x;
}

static uint64_t
row_of(const head *r, uint64_t t)
{
    return r->b * r->s->T + t;
}

static uint64_t
width_of(const spw_delta_shape *s)
{
    return 2 * s->Hk * s->Dk + s->Hv * s->Dv;
}

/* Where in a row of qkv the head's queries are, keys (1) and values (2). */
static uint64_t
place_of(const head *r, int which)
{
    const spw_delta_shape *s = r->s;
    uint64_t key_head = r->h / (s->Hv / s->Hk);
    if (s->mamba)
        return which == 2 ? r->h * s->Dv : s->Hv * s->Dv + ((uint64_t)(1 - which) * s->Hk + key_head) * s->Dk;
    return which == 2 ? 2 * s->Hk * s->Dk + r->h * s->Dv : ((uint64_t)which * s->Hk + key_head) * s->Dk;
}

static double
root_of(const float *x, uint64_t n)
{
    double sum = 1e-6;
    for (uint64_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}

static double
rate_of(const head *r)
{
    return -exp((double)r->a->log_a[r->h]);
}

/* Decays of a head, and which one a row of the state has. */
static uint64_t
decays_of(const spw_delta_shape *s)
{
    return s->channels ? s->Dk : 1;
}

static uint64_t
decay_of(const head *r, uint64_t t, uint64_t i)
{
    return t * decays_of(r->s) + (r->s->channels ? i : 0);
}

static double
gate_input(const head *r, uint64_t t, uint64_t c)
{
    const uint64_t n = decays_of(r->s);
    return (double)r->a->a[(row_of(r, t) * r->s->Hv + r->h) * n + c] + (double)r->a->dt_bias[r->h * n + c];
}

static double
step_of(const head *r, uint64_t t, uint64_t c)
{
    return fmax(log1p(exp(gate_input(r, t, c))), (double)r->s->step_least);
}

static double
beta_most(const spw_delta_shape *s)
{
    return s->beta_most > 0 ? (double)s->beta_most : 1;
}

static void
open_head(head *r, const spw_delta_shape *s, const reference_delta_arrays *a, uint64_t b, uint64_t h)
{
    *r = (head){.s = s, .a = a, .b = b, .h = h};
    r->states = zeros((s->T + 1) * s->Dk * s->Dv);
    r->q = zeros(s->T * s->Dk);
    r->k = zeros(s->T * s->Dk);
    r->delta = zeros(s->T * s->Dv);
    r->seen = zeros(s->T * s->Dv);
    r->gamma = zeros(s->T * decays_of(s));
    r->beta = zeros(s->T);
    for (uint64_t t = 0; t < s->T; t++) {
        uint64_t row = row_of(r, t);
        const float *q = a->qkv + row * width_of(s) + place_of(r, 0), *k = a->qkv + row * width_of(s) + place_of(r, 1);
        bool anew = s->begins != NULL && (uint64_t)s->begins[row] == t;
        for (uint64_t i = 0; i < s->Dk; i++) {
            r->q[t * s->Dk + i] = s->mamba ? (double)q[i] : (double)q[i] / root_of(q, s->Dk) / sqrt((double)s->Dk);
            r->k[t * s->Dk + i] = s->mamba ? (double)k[i] : (double)k[i] / root_of(k, s->Dk);
        }
        for (uint64_t c = 0; c < decays_of(s); c++)
            r->gamma[t * decays_of(s) + c] = anew ? 0 : exp(rate_of(r) * step_of(r, t, c));
        r->beta[t] = s->mamba ? step_of(r, t, 0) : beta_most(s) * sigmoid((double)a->b[row * s->Hv + h]);
    }
}

static void
close_head(head *r)
{
    free(r->states);
    free(r->q);
    free(r->k);
    free(r->delta);
    free(r->seen);
    free(r->gamma);
    free(r->beta);
}

/* Outputs, and all states from the first one on. */
static void
go_forward(head *r)
{
    const spw_delta_shape *s = r->s;
    for (uint64_t t = 0; t < s->T; t++) {
        const double *old = r->states + t * s->Dk * s->Dv, *q = r->q + t * s->Dk, *k = r->k + t * s->Dk;
        double *now = r->states + (t + 1) * s->Dk * s->Dv;
        const float *v = r->a->qkv + row_of(r, t) * width_of(s) + place_of(r, 2);
        for (uint64_t j = 0; j < s->Dv; j++) {
            uint64_t at = (row_of(r, t) * s->Hv + r->h) * s->Dv + j;
            double seen = 0, out = s->mamba ? (double)r->a->skip[r->h] * (double)v[j] : 0, delta;
            for (uint64_t i = 0; i < s->Dk && !s->mamba; i++)
                seen += r->gamma[decay_of(r, t, i)] * old[i * s->Dv + j] * k[i];
            delta = r->beta[t] * ((double)v[j] - seen);
            for (uint64_t i = 0; i < s->Dk; i++) {
                now[i * s->Dv + j] = r->gamma[decay_of(r, t, i)] * old[i * s->Dv + j] + k[i] * delta;
                out += now[i * s->Dv + j] * q[i];
            }
            r->seen[t * s->Dv + j] = seen;
            r->delta[t * s->Dv + j] = delta;
            r->a->out[at] = (float)out;
            if (r->a->delta != NULL)
                r->a->delta[at] = (float)delta;
        }
    }
}

/* Gradients of all heads, before they are rounded. */
typedef struct gradients {
    double *qkv, *a, *b, *log_a, *dt_bias, *skip;
} gradients;

/* x / root(x x) times factor, back; factor 0: of x as it is. */
static void
back_through_length(double *dx, const double *dy, const float *x, double factor, uint64_t n)
{
    double root = root_of(x, n), along = 0;
    for (uint64_t i = 0; i < n; i++)
        along += (double)x[i] * dy[i];
    for (uint64_t i = 0; i < n; i++)
        dx[i] += factor == 0 ? dy[i] : factor * (dy[i] / root - (double)x[i] * along / (root * root * root));
}

/* Row t, where `state` is the gradient of what it leaves; that of what it found afterwards. */
static void
step_back(const head *r, uint64_t t, double *state, double *dq, double *dk, const gradients *g)
{
    const spw_delta_shape *s = r->s;
    const double *old = r->states + t * s->Dk * s->Dv, *now = old + s->Dk * s->Dv;
    const double *q = r->q + t * s->Dk, *k = r->k + t * s->Dk;
    uint64_t at = row_of(r, t) * s->Hv + r->h, values = row_of(r, t) * width_of(s) + place_of(r, 2);
    double dgamma[SPW_DELTA_DIM_MAX] = {0}, dbeta = 0;
    for (uint64_t j = 0; j < s->Dv; j++) {
        double dout = (double)r->a->dout[at * s->Dv + j], ddelta = 0;
        for (uint64_t i = 0; i < s->Dk; i++) {
            double *ds = &state[i * s->Dv + j];
            *ds += q[i] * dout;
            dq[i] += now[i * s->Dv + j] * dout;
            dk[i] += *ds * r->delta[t * s->Dv + j];
            ddelta += *ds * k[i];
        }
        g->qkv[values + j] = r->beta[t] * ddelta;
        if (s->mamba) {
            g->qkv[values + j] += (double)r->a->skip[r->h] * dout;
            g->skip[r->h] += dout * (double)r->a->qkv[values + j];
        }
        dbeta += ddelta * ((double)r->a->qkv[values + j] - r->seen[t * s->Dv + j]);
        for (uint64_t i = 0; i < s->Dk; i++) {
            double *ds = &state[i * s->Dv + j];
            if (!s->mamba) {
                dk[i] -= r->gamma[decay_of(r, t, i)] * old[i * s->Dv + j] * r->beta[t] * ddelta;
                *ds -= k[i] * r->beta[t] * ddelta;
            }
            dgamma[decay_of(r, 0, i)] += *ds * old[i * s->Dv + j];
            *ds *= r->gamma[decay_of(r, t, i)];
        }
    }
    g->b[at] = dbeta * r->beta[t] * (1 - r->beta[t] / beta_most(s));
    for (uint64_t c = 0; c < decays_of(s); c++) {
        uint64_t of = r->h * decays_of(s) + c, all = s->Hv * decays_of(s);
        double x = gate_input(r, t, c), by = dgamma[c] * r->gamma[t * decays_of(s) + c] * rate_of(r);
        bool cut = log1p(exp(x)) < (double)s->step_least;
        g->a[row_of(r, t) * all + of] = (by + (s->mamba ? dbeta : 0)) * (cut ? 0 : sigmoid(x));
        g->dt_bias[of] += g->a[row_of(r, t) * all + of];
        g->log_a[r->h] += by * step_of(r, t, c);
    }
}

static void
go_back(const head *r, const gradients *g)
{
    const spw_delta_shape *s = r->s;
    double *state = zeros(s->Dk * s->Dv);
    for (uint64_t t = s->T; t-- > 0;) {
        double *dq = zeros(s->Dk), *dk = zeros(s->Dk);
        uint64_t row = row_of(r, t) * width_of(s);
        step_back(r, t, state, dq, dk, g);
        back_through_length(g->qkv + row + place_of(r, 0), dq, r->a->qkv + row + place_of(r, 0),
                            s->mamba ? 0 : 1 / sqrt((double)s->Dk), s->Dk);
        back_through_length(g->qkv + row + place_of(r, 1), dk, r->a->qkv + row + place_of(r, 1), s->mamba ? 0 : 1,
                            s->Dk);
        free(dq);
        free(dk);
    }
    free(state);
}

/* to[i] = x[i], or added to what is there. */
static void
hand_out(float *to, const double *x, uint64_t n, bool add)
{
    for (uint64_t i = 0; to != NULL && i < n; i++)
        to[i] = (float)((add ? (double)to[i] : 0) + x[i]);
}

void
reference_delta(const spw_delta_shape *s, const reference_delta_arrays *a)
{
    const uint64_t rows = s->B * s->T, heads = rows * s->Hv;
    const uint64_t decays = s->Hv * decays_of(s);
    gradients g = {
        zeros(rows * width_of(s)), zeros(rows * decays), zeros(heads), zeros(s->Hv), zeros(decays), zeros(s->Hv)};
    for (uint64_t i = 0; i < s->B * s->Hv; i++) {
        head r;
        open_head(&r, s, a, i / s->Hv, i % s->Hv);
        go_forward(&r);
        go_back(&r, &g);
        close_head(&r);
    }
    hand_out(a->dqkv, g.qkv, rows * width_of(s), false);
    hand_out(a->da, g.a, rows * decays, false);
    hand_out(a->db, g.b, heads, false);
    hand_out(a->dlog_a, g.log_a, s->Hv, true);
    hand_out(a->ddt_bias, g.dt_bias, decays, true);
    hand_out(a->dskip, g.skip, s->Hv, true);
    free(g.qkv);
    free(g.a);
    free(g.b);
    free(g.log_a);
    free(g.dt_bias);
    free(g.skip);
}

void
reference_delta_cached(const spw_delta_shape *s, const reference_delta_arrays *a, float *state, const int32_t *slots,
                       const int32_t *starts)
{
    const uint64_t n = s->Dk * s->Dv;
    for (uint64_t i = 0; i < s->B * s->Hv; i++) {
        uint64_t b = i / s->Hv, h = i % s->Hv;
        float *mine = state + ((uint64_t)slots[b] * s->Hv + h) * n;
        head r;
        open_head(&r, s, a, b, h);
        for (uint64_t e = 0; starts[b] > 0 && e < n; e++)
            r.states[e] = (double)mine[e];
        go_forward(&r);
        hand_out(mine, r.states + s->T * n, n, false);
        close_head(&r);
    }
}
