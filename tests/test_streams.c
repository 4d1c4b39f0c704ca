/*
 * What DeepSeek-V4 has between its halves and in front of its attention, of the cpu device: keys that stand for several rows, and maps of streams with the sums by
 * them, against their definitions in double, and their backward against central differences of those.
 */
#include "lib_ops.h"
#include "lib_parity.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* ------------------- keys of several rows: d = B, T, D, rate, overlaps, documents' length or 0; in: kv, gate, bias; in ops_ids: begins, ends, firsts */

static spw_compress_shape
compress_shape(const ops_subject *s)
{
    const uint64_t rows = s->d[0] * s->d[1];
    return (spw_compress_shape){.B = s->d[0],
                                .T = s->d[1],
                                .D = s->d[2],
                                .rate = s->d[3],
                                .overlaps = s->d[4] > 0,
                                .begins = s->d[5] > 0 ? ops_ids : NULL,
                                .firsts = s->d[5] > 0 ? ops_ids + 2 * rows : NULL};
}

static void
compress_ref(const ops_subject *s, double *const *in, double *out)
{
    const spw_compress_shape h = compress_shape(s);
    const uint64_t windows = h.T / h.rate, width = h.D * (h.overlaps ? 2 : 1);
    memset(out, 0, s->out_n * sizeof *out);
    for (uint64_t i = 0; i < h.B * h.T * h.D; i++) { /* by the last row of a window */
        uint64_t c = i % h.D, last = i / h.D % h.T, b = i / h.D / h.T;
        uint64_t begin = h.begins != NULL ? (uint64_t)h.begins[b * h.T + last] : 0, w = (last - begin) / h.rate;
        uint64_t from = begin + (w > 0 && h.overlaps ? w - 1 : w) * h.rate;
        double sum = 0, all = 0;
        if ((last + 1 - begin) % h.rate != 0)
            continue;
        for (uint64_t t = from; t <= last; t++) {
            uint64_t col = h.overlaps && t >= begin + w * h.rate ? h.D + c : c, at = (b * h.T + t) * width + col;
            double p = exp(in[1][at] + in[2][(t - begin) % h.rate * width + col]);
            all += p;
            sum += p * in[0][at];
        }
        out[(b * windows + begin / h.rate + w) * h.D + c] = sum / all;
    }
}

static void
compress_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    const spw_compress_shape h = compress_shape(s);
    if (h.begins != NULL)
        spw_gpu_windows(q, ops_ids + 2 * h.B * h.T, h.begins, NULL, h.B, h.T, h.rate);
    spw_gpu_compress(q, out, in[0], in[1], in[2], &h);
}

static void
compress_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
             float *const *g)
{
    const spw_compress_shape h = compress_shape(s);
    (void)out;
    for (uint64_t i = 0; i < s->n[0]; i++)
        g[0][i] = g[1][i] = NAN; /* all of it is written */
    spw_gpu_compress_backward(q, g[0], g[1], g[2], dout, in[0], in[1], in[2], &h);
}

/*
 * One window, more rows than windows have, several sequences; one row a window; columns that are cut; overlapping or not. Documents, which have windows of
 * their own: shorter than one, as long as several.
 */
static void
test_compress(void **state)
{
    static const uint64_t sizes[][5] = {{1, 4, 3, 4},      {2, 9, 5, 4},     {1, 40, 70, 8},
                                        {3, 7, 6, 1},      {2, 21, 8, 5},    {2, 9, 5, 4, 3},
                                        {1, 60, 6, 4, 11}, {3, 31, 3, 1, 4}, {2, 45, 4, 5, 30}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (uint64_t overlaps = 0; overlaps < 2; overlaps++) {
            const uint64_t *d = sizes[i], width = d[2] * (1 + overlaps), n = d[0] * d[1] * width;
            if (d[4] > 0)
                parity_documents(d[0], d[1], d[4], ops_ids, ops_ids + d[0] * d[1]);
            ops_examine(&(ops_subject){"keys of several rows",
                                       3,
                                       {n, n, d[3] * width},
                                       d[0] * (d[1] / d[3]) * d[2],
                                       {d[0], d[1], d[2], d[3], overlaps, d[4]},
                                       0,
                                       compress_ref,
                                       compress_fwd,
                                       compress_bwd});
        }
}

/* ---------------------------------------------------------------- maps: d = M, n, rounds, head; in: mixes, scale, base */

static spw_streams
streams_of(const ops_subject *s)
{
    return (spw_streams){.M = s->d[0], .n = s->d[1], .rounds = s->d[2], .head = s->d[3] > 0, .eps = 1e-3f};
}

static void
over_sums(double *comb, uint64_t n, bool columns, double eps)
{
    for (uint64_t i = 0; i < n; i++) {
        double sum = eps;
        for (uint64_t j = 0; j < n; j++)
            sum += columns ? comb[j * n + i] : comb[i * n + j];
        for (uint64_t j = 0; j < n; j++)
            *(columns ? &comb[j * n + i] : &comb[i * n + j]) /= sum;
    }
}

static void
maps_ref(const ops_subject *s, double *const *in, double *out)
{
    const spw_streams h = streams_of(s);
    const uint64_t n = h.n, width = spw_stream_maps(&h);
    const double eps = (double)h.eps;
    for (uint64_t m = 0; m < h.M; m++) {
        double *y = out + m * width, *comb = y + 2 * n;
        for (uint64_t i = 0; i < width; i++)
            y[i] = in[0][m * width + i] * in[1][i < n ? 0 : i < 2 * n ? 1 : 2] + in[2][i];
        for (uint64_t i = 0; i < n; i++)
            y[i] = 1 / (1 + exp(-y[i])) + eps;
        for (uint64_t i = n; !h.head && i < 2 * n; i++)
            y[i] = 2 / (1 + exp(-y[i]));
        if (h.head)
            continue;
        for (uint64_t i = 0; i < n * n; i++)
            comb[i] = exp(comb[i]);
        over_sums(comb, n, false, 0);
        for (uint64_t i = 0; i < n * n; i++)
            comb[i] += eps;
        over_sums(comb, n, true, eps);
        for (uint64_t round = 1; round < h.rounds; round++) {
            over_sums(comb, n, false, eps);
            over_sums(comb, n, true, eps);
        }
    }
}

static void
maps_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    const spw_streams h = streams_of(s);
    spw_gpu_stream_maps(q, out, in[0], in[1], in[2], &h);
}

static void
maps_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    const spw_streams h = streams_of(s);
    (void)out;
    spw_gpu_stream_maps_backward(q, g[0], g[1], g[2], dout, in[0], in[1], in[2], &h);
}

/* One stream to as many as there can be, one round to as many, parts of rows; a head's, which are fewer. */
static void
test_maps(void **state)
{
    static const uint64_t sizes[][3] = {{1, 4, 20}, {3, 2, 1}, {5, 1, 3}, {300, 4, 2}, {7, 3, SPW_ROUNDS_MAX}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (uint64_t head = 0; head < 2; head++) {
            const spw_streams h = {.n = sizes[i][1], .head = head > 0};
            const uint64_t width = spw_stream_maps(&h), n = sizes[i][0] * width;
            ops_examine(&(ops_subject){"maps of streams",
                                       3,
                                       {n, head > 0 ? 1 : 3, width},
                                       n,
                                       {sizes[i][0], sizes[i][1], sizes[i][2], head},
                                       0,
                                       maps_ref,
                                       maps_fwd,
                                       maps_bwd});
        }
}

/* ---------------------------------------------------------------- sums of streams: d = M, C, n, kind: 0 of a head, 1 of what is read, 2 behind h; in: x, maps, h */

static spw_streams
mix_of(const ops_subject *s)
{
    return (spw_streams){.M = s->d[0], .C = s->d[1], .n = s->d[2], .head = s->d[3] == 0};
}

static void
mix_ref(const ops_subject *s, double *const *in, double *out)
{
    const spw_streams h = mix_of(s);
    const uint64_t n = h.n, C = h.C, width = spw_stream_maps(&h), outs = s->d[3] == 2 ? n : 1;
    for (uint64_t i = 0; i < s->out_n; i++) {
        uint64_t c = i % C, k = i / C % outs, m = i / C / outs;
        const double *maps = in[1] + m * width;
        out[i] = s->d[3] == 2 ? maps[n + k] * in[2][m * C + c] : 0;
        for (uint64_t j = 0; j < n; j++)
            out[i] += (s->d[3] == 2 ? maps[2 * n + j * n + k] : maps[j]) * in[0][(m * n + j) * C + c];
    }
}

static void
mix_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    const spw_streams h = mix_of(s);
    spw_gpu_mix(q, out, s->d[3] == 2 ? in[2] : NULL, in[0], in[1], &h);
}

static void
mix_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout, float *const *g)
{
    const spw_streams h = mix_of(s);
    const bool behind = s->d[3] == 2;
    (void)out;
    spw_gpu_mix_backward(q, behind ? g[2] : NULL, g[0], g[1], dout, behind ? in[2] : NULL, in[0], in[1], &h, s->flags);
}

/* What is read and what comes behind it; rows of several parts. */
static void
test_mix(void **state)
{
    static const uint64_t sizes[][3] = {{1, 1, 4}, {3, 40, 2}, {5, 17, 1}, {70, 65, 4}, {9, 33, 3}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (uint64_t way = 0; way < 6; way++) {
            const uint64_t *d = sizes[i], kind = way / 2;
            const spw_streams h = {.n = d[2], .head = kind == 0};
            ops_examine(&(ops_subject){"sums of streams",
                                       kind == 2 ? 3 : 2,
                                       {d[0] * d[1] * d[2], d[0] * spw_stream_maps(&h), d[0] * d[1]},
                                       d[0] * d[1] * (kind == 2 ? d[2] : 1),
                                       {d[0], d[1], d[2], kind},
                                       way % 2 ? SPW_OP_ACC_DX : 0,
                                       mix_ref,
                                       mix_fwd,
                                       mix_bwd});
        }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_compress), cmocka_unit_test(test_maps),
                                       cmocka_unit_test(test_mix)};
    return ops_run_tests(tests, sizeof tests / sizeof tests[0]);
}
