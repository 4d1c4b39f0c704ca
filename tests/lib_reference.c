#include "lib_reference.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static double
stored(spw_dtype type, double x)
{
    return (double)subject_rounded(type, (float)x);
}

/* ---------------------------------------------------------------- attention */

typedef struct view {
    const uint64_t *d; /* as a subject of attention has them */
    const float *q, *key, *value, *sinks;
    uint64_t q_stride, k_stride, v_stride, Dv, v_head, q_head, k_head;
    double scale, cap;
    uint64_t positions;
    const int32_t *chosen; /* bits of each row's keys; NULL: all */
} view;

static double
dot(const float *a, const float *b, uint64_t n)
{
    double sum = 0;
    for (uint64_t i = 0; i < n; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* Of query row `row`, head h and key row `col`: the score, and the slope of its cap. */
static double
score(const view *w, uint64_t row, uint64_t h, uint64_t col, double *slope)
{
    uint64_t D = w->d[4], group = w->d[2] / w->d[3];
    double s =
        w->scale * dot(w->q + row * w->q_stride + h * w->q_head, w->key + col * w->k_stride + h / group * w->k_head, D);
    double t = w->cap > 0 ? tanh(s / w->cap) : 0;
    *slope = 1 - t * t;
    return w->cap > 0 ? w->cap * t : s;
}

/* Whether row `row` reads key u of its sequence. */
static bool
is_chosen(const view *w, uint64_t row, uint64_t u, uint64_t positions)
{
    uint64_t words = positions / 32 + 1 + w->d[2] % 2;
    return w->chosen == NULL || ((uint32_t)w->chosen[row * words + u / 32] >> u % 32 & 1) != 0;
}

/*
 * Row `row` of head h, which reads key rows [from, to], of which the last is key `at` of its sequence: out (Dv), and what is returned, the
 * logarithm of the sum of exponentials. Keys come in tiles of so many; their weights are rounded beside the greatest so far.
 */
static double
attend(const view *w, spw_dtype type, uint64_t tile, uint64_t row, uint64_t h, uint64_t from, uint64_t to, uint64_t at,
       double *out)
{
    uint64_t group = w->d[2] / w->d[3];
    double most = -INFINITY, so_far = most, sum = 0, lse, slope, *s = subject_need((to - from + 1) * sizeof *s);
    for (uint64_t j = from; j <= to; j++) {
        s[j - from] = is_chosen(w, row, at - (to - j), w->positions) ? score(w, row, h, j, &slope) : -INFINITY;
        most = fmax(most, s[j - from]);
    }
    memset(out, 0, w->Dv * sizeof *out);
    for (uint64_t j = from; j <= to; j++) {
        const float *value = w->value + j * w->v_stride + h / group * w->v_head;
        double p;
        if (j == from || (at - (to - j)) % tile == 0) {
            uint64_t k = j;
            do
                so_far = fmax(so_far, s[k - from]);
            while (++k <= to && (at - (to - k)) % tile != 0);
        }
        if (s[j - from] == -INFINITY)
            continue;
        p = exp(so_far - most) * stored(type, exp(s[j - from] - so_far));
        sum += exp(s[j - from] - most);
        for (uint64_t c = 0; c < w->Dv; c++)
            out[c] += p * (double)value[c];
    }
    lse = most + log(sum);
    if (w->sinks != NULL) {
        double sink = (double)w->sinks[h], top = fmax(lse, sink), all = top + log(exp(lse - top) + exp(sink - top));
        sum *= exp(all - lse);
        lse = all;
    }
    for (uint64_t c = 0; c < w->Dv; c++)
        out[c] /= sum;
    free(s);
    return lse;
}

/* Adds to dq, dk and dv, which lie as q, k and v do, what comes from dout (Dv) of the row and head. */
static void
attend_backward(const view *w, spw_dtype type, uint64_t row, uint64_t h, uint64_t from, uint64_t to, double lse,
                double delta, const float *dout, double *dq, double *dk, double *dv)
{
    uint64_t D = w->d[4], group = w->d[2] / w->d[3];
    for (uint64_t j = from; j <= to; j++) {
        double slope, p = exp(score(w, row, h, j, &slope) - lse), ds, rounded = stored(type, p);
        const float *value = w->value + j * w->v_stride + h / group * w->v_head;
        const float *q = w->q + row * w->q_stride + h * w->q_head;
        const float *key = w->key + j * w->k_stride + h / group * w->k_head;
        double *to_key = dk + j * w->k_stride + h / group * w->k_head,
               *to_value = dv + j * w->v_stride + h / group * w->v_head;
        if (!is_chosen(w, row, j - row / w->d[1] * w->d[1], w->positions))
            continue;
        ds = w->scale * stored(type, p * (dot(dout, value, w->Dv) - delta) * slope);
        for (uint64_t c = 0; c < w->Dv; c++)
            to_value[c] += rounded * (double)dout[c];
        for (uint64_t c = 0; c < D; c++) {
            dq[row * w->q_stride + h * w->q_head + c] += ds * (double)key[c];
            to_key[c] += ds * (double)q[c];
        }
    }
}

static view
view_of(const subject *s, float *packed)
{
    const uint64_t *d = s->d;
    uint64_t stride = (d[2] + 2 * d[3]) * d[4], Dv = d[9] > 0 ? d[9] : d[4];
    uint64_t head = d[10] > 0 ? 3 * d[4] : d[4];
    return (view){.d = d,
                  .q = packed,
                  .key = packed + (d[10] > 0 ? d[4] : d[2] * d[4]),
                  .value = packed + (d[10] > 0 ? 2 * d[4] : (d[2] + d[3]) * d[4] + d[4] - Dv),
                  .q_stride = stride,
                  .k_stride = stride,
                  .v_stride = stride,
                  .Dv = Dv,
                  .q_head = head,
                  .k_head = head,
                  .v_head = head,
                  .scale = (double)(1 / sqrtf((float)d[4])),
                  .cap = (double)d[7] / 4};
}

static uint64_t
first_key(const uint64_t *d, uint64_t row, uint64_t at)
{
    return d[5] > 0 && at + 1 > d[5] ? row + 1 - d[5] : row - at;
}

/* Packed q, k and v; out; lse (B, Hq, T); dout; gradients, packed; bounds of documents; sinks and their gradients. */
void
reference_attention(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints)
{
    const uint64_t *d = s->d, T = d[1], Hq = d[2];
    view w = view_of(s, a[0]);
    double *out = subject_need(w.Dv * sizeof *out), *grads = subject_need(s->a[4].n * sizeof *grads);
    uint64_t D = d[4], tile = way > 0 ? 32 : 64;
    w.sinks = d[8] > 0 ? a[7] : NULL;
    w.chosen = d[11] > 0 ? ints[9] : NULL;
    w.positions = T;
    memset(grads, 0, s->a[4].n * sizeof *grads);
    for (uint64_t h = 0; h < Hq; h++) {
        double dsink = 0;
        for (uint64_t row = 0; row < d[0] * T; row++) {
            uint64_t t = row % T, from = first_key(d, row, t), at = (row * Hq + h) * w.Dv;
            uint64_t begins = d[6] > 0 ? row - t + (uint64_t)ints[5][row] : 0;
            double lse, delta = 0;
            from = from > begins ? from : begins;
            lse = attend(&w, type, tile, row, h, from, row, t, out);
            for (uint64_t c = 0; c < w.Dv; c++) {
                a[1][at + c] = (float)out[c];
                delta += stored(type, out[c]) * (double)a[3][at + c];
            }
            a[2][(row / T * Hq + h) * T + t] = (float)lse;
            if (w.sinks != NULL)
                dsink -= exp((double)w.sinks[h] - lse) * delta;
            attend_backward(&w, type, row, h, from, row, lse, delta, a[3] + at, grads, grads + (w.key - w.q),
                            grads + (w.value - w.q));
        }
        if (w.sinks != NULL)
            a[8][h] = (float)((double)a[8][h] + dsink);
    }
    for (uint64_t i = 0; i < s->a[4].n; i++) { /* what lies before values that are narrower than their heads stays */
        uint64_t in_row = i % w.q_stride, values = (d[2] + d[3]) * D;
        if (in_row < values || (in_row - values) % D >= D - w.Dv)
            a[4][i] = (float)grads[i];
    }
    free(out);
    free(grads);
}

/* Packed q, k and v; out; caches of keys and values (d[6] rows a slot); slots; where their new rows begin; sinks. */
void
reference_attention_cached(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints)
{
    const uint64_t *d = s->d, T = d[1], capacity = d[6], Hk = d[3], D = d[4];
    view w = view_of(s, a[0]);
    double *out = subject_need(w.Dv * sizeof *out);
    const float *key = w.key, *value = w.value;
    uint64_t tile = way > 0 ? 32 : 64;
    w.sinks = d[8] > 0 ? a[6] : NULL;
    w.chosen = d[11] > 0 ? ints[7] : NULL;
    w.positions = capacity;
    w.k_stride = Hk * D;
    w.v_stride = Hk * w.Dv;
    w.k_head = D;
    w.v_head = w.Dv;
    for (uint64_t b = 0; b < d[0]; b++) {
        float *keys = a[2] + (uint64_t)ints[4][b] * capacity * w.k_stride;
        float *values = a[3] + (uint64_t)ints[4][b] * capacity * w.v_stride;
        for (uint64_t t = 0; t < T; t++) {
            uint64_t at = (uint64_t)ints[5][b] + t;
            for (uint64_t h = 0; h < Hk; h++) {
                uint64_t from = (b * T + t) * w.q_stride + h * w.q_head;
                memcpy(keys + at * w.k_stride + h * D, key + from, D * sizeof *keys);
                memcpy(values + at * w.v_stride + h * w.Dv, value + from, w.Dv * sizeof *values);
            }
        }
        w.key = keys;
        w.value = values;
        for (uint64_t t = 0; t < T; t++)
            for (uint64_t h = 0; h < d[2]; h++) {
                uint64_t at = (uint64_t)ints[5][b] + t;
                attend(&w, type, tile, b * T + t, h, first_key(d, at, at), at, at, out);
                for (uint64_t c = 0; c < w.Dv; c++)
                    a[1][((b * T + t) * d[2] + h) * w.Dv + c] = (float)out[c];
            }
    }
    free(out);
}

/* ---------------------------------------------------------------- linear layers: d = M, N, K, has bias */

/* Element (n, k) of the weights. */
static uint64_t
weight_at(const subject *s, uint64_t n, uint64_t k)
{
    return s->flags & SPW_OP_W_IN_OUT ? k * s->d[1] + n : n * s->d[2] + k;
}

static double
linear(const subject *s, float **a, uint64_t m, uint64_t n, bool bias)
{
    double sum = bias ? (double)a[2][n] : 0;
    for (uint64_t k = 0; k < s->d[2]; k++)
        sum += (double)a[0][m * s->d[2] + k] * (double)a[1][weight_at(s, n, k)];
    return sum;
}

void
reference_linear_add(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints)
{
    (void)ints;
    for (uint64_t m = 0; m < s->d[0]; m++)
        for (uint64_t n = 0; n < s->d[1]; n++) {
            double x = linear(s, a, m, n, s->d[3] > 0), with = linear(s, a, m, n, true);
            uint64_t i = m * s->d[1] + n;
            a[3][i] = (float)((way > 0 ? stored(type, x) : x) + (double)a[4][i]);
            if ((s->flags & SPW_OP_BY_ROW) == 0)
                a[4][i] = (float)((way > 0 ? stored(type, with) : with) + (double)a[4][i]);
        }
}

/* Hendrycks and Gimpel 2016, in its form with a hyperbolic tangent. */
static double
gelu(double x, double *slope)
{
    const double c = sqrt(2 / M_PI);
    double t = tanh(c * (x + 0.044715 * x * x * x));
    *slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
    return 0.5 * x * (1 + t);
}

/* x, w, b, gelu, what went in, gradient of that, of the weights, and of the second layer's bias; a[0] is that layer's gradient. */
void
reference_linear_gelu(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints)
{
    uint64_t M = s->d[0], N = s->d[1], K = s->d[2];
    (void)ints;
    for (uint64_t m = 0; m < M; m++)
        for (uint64_t n = 0; n < N; n++) {
            uint64_t i = m * N + n;
            double in = linear(s, a, m, n, s->d[3] > 0), back = linear(s, a, m, n, false), slope;
            a[4][i] = (float)in;
            a[3][i] = (float)gelu(way > 0 ? stored(type, in) : in, &slope);
            (void)gelu(stored(type, in), &slope);
            a[5][i] = (float)((way > 0 ? stored(type, back) : back) * slope);
        }
    for (uint64_t k = 0; k < K; k++) {
        double db = (double)a[7][k];
        for (uint64_t m = 0; m < M; m++)
            db += (double)a[0][m * K + k];
        a[7][k] = (float)db;
        for (uint64_t n = 0; n < N; n++) {
            double dw = (double)a[6][weight_at(s, n, k)];
            for (uint64_t m = 0; m < M; m++)
                dw += stored(type, (double)a[3][m * N + n]) * (double)a[0][m * K + k];
            a[6][weight_at(s, n, k)] = (float)dw;
        }
    }
}

/* ---------------------------------------------------------------- loss */

/* d = M, V, C, rows per chunk, has dx, has dw, cap in quarters, which array has weights or 0 for none */

void
reference_loss(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints)
{
    const uint64_t M = s->d[0], V = s->d[1], C = s->d[2];
    double *logits = subject_need(V * sizeof *logits), *slopes = subject_need(V * sizeof *slopes);
    double *dx = subject_need(C * sizeof *dx), *dw = subject_need(V * C * sizeof *dw);
    double *part = subject_need(C * sizeof *part);
    uint64_t whole = V / 64 * 64;
    memset(dw, 0, V * C * sizeof *dw);
    for (uint64_t m = 0; m < M; m++) {
        double most = -INFINITY, sum = 0, cap = (double)s->d[6] / 4;
        double weight = s->d[7] > 0 ? (double)a[s->d[7]][m] : 1;
        int32_t target = ints[5][m];
        for (uint64_t v = 0; v < V; v++) {
            double x = stored(type, dot(a[0] + m * C, a[1] + v * C, C)), t = cap > 0 ? tanh(x / cap) : 0;
            logits[v] = cap > 0 ? cap * t : x;
            slopes[v] = 1 - t * t;
            most = fmax(most, logits[v]);
        }
        for (uint64_t v = 0; v < V; v++)
            sum += exp(logits[v] - most);
        a[2][m] = target < 0 ? 0 : (float)(log(sum) + most - logits[target]);
        for (uint64_t c = 0; c < C; c++)
            dx[c] = s->flags & SPW_OP_ACC_DX ? (double)a[3][m * C + c] : 0;
        memset(part, 0, C * sizeof *part);
        for (uint64_t v = V; v-- > 0 && target >= 0;) {
            bool part_ends = v == 0 || (way > 0 && v == whole);
            double p = exp(logits[v] - most) / sum - ((uint64_t)target == v ? 1 : 0),
                   g = stored(type, 64 * weight * p * slopes[v]);
            for (uint64_t c = 0; c < C; c++) {
                part[c] += g * (double)a[1][v * C + c];
                dw[v * C + c] += g * (double)a[0][m * C + c];
            }
            for (uint64_t c = 0; c < C && part_ends; c++) {
                dx[c] += way == 2 && dx[c] != 0 ? stored(type, part[c]) : part[c];
                dx[c] = v > 0 ? stored(type, dx[c]) : dx[c];
                part[c] = 0;
            }
        }
        for (uint64_t c = 0; c < C && s->d[4] > 0; c++)
            a[3][m * C + c] = (float)dx[c];
    }
    for (uint64_t i = 0; i < V * C && s->d[5] > 0; i++)
        a[4][i] = (float)(dw[i] + (s->flags & SPW_OP_SET_DW ? 0 : (double)a[4][i]));
    memset(a[6], 0, s->a[6].n * sizeof *a[6]);
    free(logits);
    free(slopes);
    free(dx);
    free(part);
    free(dw);
}
