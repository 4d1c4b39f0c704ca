/* Keys of several rows, and streams, beside the cpu device. */
#include "lib_subject.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

/* d = B, T, D, rate, overlaps, whether the bias is frozen, documents' length or 0 */
static void
run_compress(const subject *s, spw_gpu_queue *q, void **p)
{
    const int32_t *begins = s->d[6] > 0 ? p[8] : NULL;
    const spw_compress_shape shape = {.B = s->d[0],
                                      .T = s->d[1],
                                      .D = s->d[2],
                                      .rate = s->d[3],
                                      .overlaps = s->d[4] > 0,
                                      .begins = begins,
                                      .firsts = begins != NULL ? p[10] : NULL};
    spw_gpu_windows(q, p[10], begins, NULL, s->d[0], s->d[1], s->d[3]);
    spw_gpu_compress(q, p[3], p[0], p[1], p[2], &shape);
    spw_gpu_compress_backward(q, p[5], p[6], s->d[5] > 0 ? NULL : p[7], p[4], p[0], p[1], p[2], &shape);
}

static void
fill_windows(const subject *s, float **host, int32_t **ints)
{
    (void)host;
    if (s->d[6] > 0)
        parity_documents(s->d[0], s->d[1], s->d[6], ints[8], ints[9]);
}

/* d = B, T, D, rate, overlaps, positions that a sequence can have */
static void
run_compress_cached(const subject *s, spw_gpu_queue *q, void **p)
{
    const spw_compress_shape shape = {
        .B = s->d[0], .T = s->d[1], .D = s->d[2], .rate = s->d[3], .overlaps = s->d[4] > 0, .firsts = p[9]};
    const spw_window_cache cache = {.kv = p[4], .gate = p[5], .slots = p[7], .starts = p[8]};
    spw_gpu_windows(q, p[9], NULL, cache.starts, shape.B, shape.T, shape.rate);
    spw_gpu_compress_cached(q, p[3], p[0], p[1], p[2], &cache, &shape);
    spw_gpu_keep_windows(q, p[6], s->d[5] / shape.rate, p[3], &cache, &shape);
}

/* Some begin, some go on; the place of a row that has not been is never read. */
static void
fill_running(const subject *s, float **host, int32_t **ints)
{
    const uint64_t B = s->d[0], parts = 1 + s->d[4], ring = parts * s->d[3], width = parts * s->d[2];
    for (uint64_t b = 0; b < B; b++) {
        const uint64_t start = b == 0 ? s->d[5] - s->d[1] : (s->d[5] - s->d[1]) * (b - 1) / B;
        ints[7][b] = (int32_t)(B - 1 - b);
        ints[8][b] = (int32_t)start;
        for (uint64_t i = start * width; i < ring * width; i++)
            host[4][(B - 1 - b) * ring * width + i] = host[5][(B - 1 - b) * ring * width + i] = NAN;
    }
}

static void
examine_running(const parity *p)
{
    static const uint64_t sizes[][5] = {{3, 1, 8, 4, 40},    {2, 3, 130, 4, 9},  {1, 50, 6, 4, 90}, {4, 1, 12, 1, 7},
                                        {2, 20, 24, 16, 60}, {1, 9, 512, 8, 30}, {3, 2, 5, 3, 31}};
    for (size_t i = 0; i < 14; i++) {
        const uint64_t *d = sizes[i / 2], parts = 1 + i % 2, width = d[2] * parts, n = d[0] * d[1] * width;
        const uint64_t windows = d[0] * ((d[1] + d[3] - 1) / d[3]), rows = d[0] * parts * d[3] * width;
        subject_examine(p, &(subject){.name = "keys of several rows, cached",
                                      .a = {{ACT, n, 0, 0},
                                            {ACT, n, 0, 0},
                                            {ACT, d[3] * width, 0, 0},
                                            {ACT_OUT, windows * d[2], 0, 0},
                                            {ACT, rows, 0, 0},
                                            {ACT, rows, 0, 0},
                                            {ACT, d[0] * (d[4] / d[3]) * d[2], 0, 0},
                                            {INT, d[0], 1, 0},
                                            {INT, d[0], 1, 0},
                                            {INT, windows, 1, 0}},
                                      .d = {d[0], d[1], d[2], d[3], i % 2, d[4]},
                                      .worst = {2e-6, 4e-3, 5e-4},
                                      .run = run_compress_cached,
                                      .prepare = fill_running});
    }
}

/* One window, rows behind the last, a block's columns and more, sequences, no window at all; documents with none, one, several. */
void
parity_compress(const parity *p)
{
    static const uint64_t sizes[][5] = {
        {1, 4, 8, 4},      {2, 9, 130, 4},      {3, 7, 5, 1},         {1, 300, 64, 128}, {2, 83, 24, 16},
        {1, 3, 16, 4},     {2, 9, 130, 4, 5},   {3, 70, 12, 4, 13},   {2, 31, 6, 1, 4},  {2, 150, 33, 16, 40},
        {2, 4100, 512, 4}, {1, 4200, 512, 128}, {2, 4100, 512, 4, 99}};
    examine_running(p);
    for (size_t i = 0; i < (p->large ? 13 : 10); i++)
        for (uint64_t overlaps = 0; overlaps < 2; overlaps++) {
            const uint64_t *d = sizes[i], width = d[2] * (1 + overlaps), n = d[0] * d[1] * width;
            const uint64_t made = d[0] * (d[1] / d[3]) * d[2];
            subject_examine(p, &(subject){.name = "keys of several rows",
                                          .a = {{ACT, n, 0, 0},
                                                {ACT, n, 0, 0},
                                                {ACT, d[3] * width, 0, 0},
                                                {ACT_OUT, made, 0, 0},
                                                {ACT, made, 0, 0},
                                                {ACT_OUT, n, 0, 0},
                                                {ACT_OUT, n, 0, 0},
                                                {FP32, d[3] * width, 0, 0},
                                                {INT, d[0] * d[1], 1, 0},
                                                {INT, d[0] * d[1], 1, 0},
                                                {INT, d[0] * (d[1] / d[3]), 1, 0}},
                                          .d = {d[0], d[1], d[2], d[3], overlaps, i == 1, d[4]},
                                          .worst = {2e-6, 4e-3, 5e-4}, /* the bias' is a sum of rounded ones */
                                          .run = run_compress,
                                          .prepare = fill_windows});
        }
}

/* d = M, n, rounds, head, which gradient is not wanted */
static void
run_maps(const subject *s, spw_gpu_queue *q, void **p)
{
    const spw_streams h = {.M = s->d[0], .n = s->d[1], .rounds = s->d[2], .head = s->d[3] > 0, .eps = 1e-4f};
    spw_gpu_stream_maps(q, p[3], p[0], p[1], p[2], &h);
    spw_gpu_stream_maps_backward(q, s->d[4] == 1 ? NULL : p[5], s->d[4] == 2 ? NULL : p[6], s->d[4] == 3 ? NULL : p[7],
                                 p[4], p[0], p[1], p[2], &h);
}

/* d = M, C, n, kind: 0 of a head, 1 of what is read, 2 behind h; which gradient is not wanted */
static void
run_mix(const subject *s, spw_gpu_queue *q, void **p)
{
    const spw_streams h = {.M = s->d[0], .C = s->d[1], .n = s->d[2], .head = s->d[3] == 0};
    void *of = s->d[3] == 2 ? p[2] : NULL;
    spw_gpu_mix(q, p[3], of, p[0], p[1], &h);
    spw_gpu_mix_backward(q, of == NULL || s->d[4] == 1 ? NULL : p[7], s->d[4] == 2 ? NULL : p[5],
                         s->d[4] == 3 ? NULL : p[6], p[4], of, p[0], p[1], &h, s->flags);
}

static void
examine_mix(const parity *p, const uint64_t *d, uint64_t kind, uint64_t left_out, bool add)
{
    const spw_streams h = {.n = d[2], .head = kind == 0};
    const uint64_t x = d[0] * d[1] * d[2], one = d[0] * d[1], maps = d[0] * spw_stream_maps(&h);
    const uint64_t y = kind == 2 ? x : one;
    subject_examine(p, &(subject){.name = "sums of streams",
                                  .a = {{ACT, x, 0, 0},
                                        {ACT, maps, 0, 0},
                                        {ACT, one, 0, 0},
                                        {ACT_OUT, y, 0, 0},
                                        {ACT, y, 0, 0},
                                        {add ? ACT : ACT_OUT, x, 0, 0},
                                        {ACT_OUT, maps, 0, 0},
                                        {ACT_OUT, one, 0, 0}},
                                  .d = {d[0], d[1], d[2], kind, left_out},
                                  .flags = add ? SPW_OP_ACC_DX : 0,
                                  .run = run_mix});
}

/* As many streams as there can be, and fewer; columns in eights and not, more than a block has at a time; rows of several blocks. */
void
parity_streams(const parity *p)
{
    static const uint64_t maps[][3] = {{1, 4, 20}, {70, 4, 3}, {9, 3, 1}, {130, 2, SPW_ROUNDS_MAX}, {5000, 4, 20}};
    static const uint64_t mixes[][3] = {{1, 8, 4}, {3, 30, 4}, {5, 17, 1}, {2, 1100, 3}, {40, 64, 2}, {4097, 4096, 4}};
    for (size_t i = 0; i < (p->large ? 5 : 4); i++)
        for (uint64_t head = 0; head < 2; head++) {
            const spw_streams h = {.n = maps[i][1], .head = head > 0};
            const uint64_t width = spw_stream_maps(&h), n = maps[i][0] * width;
            subject_examine(p, &(subject){.name = "maps of streams",
                                          .a = {{ACT, n, 0, 0},
                                                {ACT, head > 0 ? 1 : 3, 0, 0},
                                                {ACT, width, 0, 0},
                                                {ACT_OUT, n, 0, 0},
                                                {ACT, n, 0, 0},
                                                {ACT_OUT, n, 0, 0},
                                                {FP32, head > 0 ? 1 : 3, 0, 0},
                                                {FP32, width, 0, 0}},
                                          .d = {maps[i][0], maps[i][1], maps[i][2], head, i},
                                          .worst = SUBJECT_PRODUCT,
                                          .run = run_maps});
        }
    for (size_t i = 0; i < (p->large ? 6 : 5); i++)
        for (uint64_t kind = 0; kind < 3; kind++)
            for (int add = 0; add < 2; add++)
                examine_mix(p, mixes[i], kind, (i + kind) % 4, add > 0);
}
