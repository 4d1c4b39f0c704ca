/*
 * A table of which the device has some rows at a time, on the cpu device. As a head: losses and gradients are those of the whole one, beside the
 * same in double, whatever the pieces are and whatever was in memory that is written, and whatever rows weigh; the head that is not in pieces
 * too. As an embedding: the bits of the whole one. With the kernels of every instruction set of this CPU, 1, 2 and 5 threads giving the same
 * bits. SPW_SEED draws other numbers.
 */
#include "lib_ops.h"
#include "lib_subject.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

/* ---------------------------------------------------------------- head */

typedef struct head {
    uint64_t M, V, C, rows_per_chunk;
    float cap, scale;
    uint64_t pieces[6]; /* rows of each, as many as are not 0 */
    unsigned flags;     /* of the first piece's gradients; the others add to its dx */
    bool turned;        /* gradients from the last piece to the first */
    bool whole;         /* by the function that does not know pieces; there is one */
} head;

typedef struct gradients {
    float *losses, *dx, *dw;
} gradients;

static float *
numbers(uint64_t n, uint64_t *state)
{
    float *x = subject_need(n * sizeof *x);
    for (uint64_t i = 0; i < n; i++)
        x[i] = ops_draw(state);
    return x;
}

static gradients
gradients_begin(const head *h, uint64_t state)
{
    gradients g = {
        .losses = numbers(h->M, &state), .dx = numbers(h->M * h->C, &state), .dw = numbers(h->V * h->C, &state)};
    memset(g.losses, 0xff, h->M * sizeof(float));
    if ((h->flags & SPW_OP_ACC_DX) == 0)
        memset(g.dx, 0xff, h->M * h->C * sizeof(float));
    if (h->flags & SPW_OP_SET_DW)
        memset(g.dw, 0xff, h->V * h->C * sizeof(float));
    return g;
}

static void
gradients_free(gradients *g)
{
    free(g->losses);
    free(g->dx);
    free(g->dw);
}

/* What a head gets. */
typedef struct given {
    float *x, *w, *weights; /* weights NULL: none */
    int32_t *targets;
    void *pages; /* of weights: nobody may read where the page after the first begins */
} given;

/* Weights end with the last row that has a target; those of others are NaN. */
static void
weigh(given *in, uint64_t M, uint64_t *state)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint64_t n = M;
    in->pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(in->pages, MAP_FAILED);
    assert_int_equal(mprotect((char *)in->pages + page, page, PROT_NONE), 0);
    while (n > 0 && in->targets[n - 1] < 0)
        n--;
    assert_true(n * sizeof(float) <= page);
    in->weights = (float *)((char *)in->pages + page) - n;
    for (uint64_t m = 0; m < n; m++)
        in->weights[m] = in->targets[m] < 0 ? NAN : m % 7 == 5 ? 0 : 3 * ops_draw(state);
}

static void
given_free(given *in)
{
    if (in->pages != NULL)
        assert_int_equal(munmap(in->pages, 2 * (size_t)sysconf(_SC_PAGESIZE)), 0);
    free(in->x);
    free(in->w);
    free(in->targets);
}

/* In double, of the whole vocabulary, onto what g begins as. */
static void
expect(const head *h, const gradients *g, const given *in)
{
    const float *x = in->x, *w = in->w;
    const int32_t *targets = in->targets;
    uint64_t M = h->M, V = h->V, C = h->C;
    double *logits = subject_need(V * sizeof *logits), *slopes = subject_need(V * sizeof *slopes);
    double *dw = subject_need(V * C * sizeof *dw), *dx = subject_need(C * sizeof *dx), cap = (double)h->cap;
    for (uint64_t i = 0; i < V * C; i++)
        dw[i] = h->flags & SPW_OP_SET_DW ? 0 : (double)g->dw[i];
    for (uint64_t m = 0; m < M; m++) {
        double sum = 0, most = -INFINITY;
        for (uint64_t v = 0; v < V; v++) {
            double l = 0, t;
            for (uint64_t c = 0; c < C; c++)
                l += (double)x[m * C + c] * (double)w[v * C + c];
            t = cap > 0 ? tanh(l / cap) : 0;
            logits[v] = cap > 0 ? cap * t : l;
            slopes[v] = 1 - t * t;
            most = fmax(most, logits[v]);
        }
        for (uint64_t v = 0; v < V; v++)
            sum += exp(logits[v] - most);
        g->losses[m] = targets[m] < 0 ? 0 : (float)(log(sum) + most - logits[targets[m]]);
        for (uint64_t c = 0; c < C; c++)
            dx[c] = h->flags & SPW_OP_ACC_DX ? (double)g->dx[m * C + c] : 0;
        for (uint64_t v = 0; v < V && targets[m] >= 0; v++) {
            double one = v == (uint64_t)targets[m] ? 1 : 0;
            double weight = in->weights != NULL ? (double)in->weights[m] : 1;
            double d = (double)h->scale * weight * (exp(logits[v] - most) / sum - one) * slopes[v];
            for (uint64_t c = 0; c < C; c++) {
                dx[c] += d * (double)w[v * C + c];
                dw[v * C + c] += d * (double)x[m * C + c];
            }
        }
        for (uint64_t c = 0; c < C; c++)
            g->dx[m * C + c] = (float)dx[c];
    }
    for (uint64_t i = 0; i < V * C; i++)
        g->dw[i] = (float)dw[i];
    free(logits);
    free(slopes);
    free(dw);
    free(dx);
}

static void
run_pieces(const head *h, spw_gpu_queue *q, const gradients *g, const given *in, float *logits, bool want_dx,
           bool want_dw)
{
    uint64_t first = 0, count = 0;
    float *sums = subject_need(h->M * 3 * sizeof *sums);
    memset(sums, 0xff, h->M * 3 * sizeof *sums);
    for (; count < 6 && h->pieces[count] > 0; first += h->pieces[count++])
        spw_gpu_head_see(q, sums, in->x, in->w + first * h->C, in->targets, logits, h->rows_per_chunk, h->M, first,
                         h->pieces[count], h->C, h->cap);
    assert_int_equal(first, h->V);
    spw_gpu_head_losses(q, g->losses, sums, in->targets, h->M);
    first = h->turned ? h->V : 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t V = h->pieces[h->turned ? count - 1 - i : i];
        first -= h->turned ? V : 0;
        spw_gpu_head_backward(q, want_dx ? g->dx : NULL, want_dw ? g->dw + first * h->C : NULL, in->x,
                              in->w + first * h->C, in->targets, in->weights, sums, logits, h->rows_per_chunk, h->M,
                              first, V, h->C, h->scale, h->cap, h->flags | (i > 0 ? SPW_OP_ACC_DX : 0));
        first += h->turned ? 0 : V;
    }
    free(sums);
}

/* Either of want_dx and want_dw may be false: then that array stays as it is. */
static void
head_run(const head *h, uint32_t threads, const gradients *g, const given *in, bool want_dx, bool want_dw)
{
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    uint64_t longest = 0;
    float *logits;
    for (uint64_t k = 0; k < 6; k++)
        longest = h->pieces[k] > longest ? h->pieces[k] : longest;
    logits = subject_need(h->rows_per_chunk * spw_gpu_logits_stride(longest) * sizeof *logits);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = threads}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    if (h->whole)
        spw_gpu_linear_cross_entropy(q, g->losses, want_dx ? g->dx : NULL, want_dw ? g->dw : NULL, in->x, in->w,
                                     in->targets, in->weights, logits, h->rows_per_chunk, h->M, h->V, h->C, h->scale,
                                     h->cap, h->flags);
    else
        run_pieces(h, q, g, in, logits, want_dx, want_dw);
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
    free(logits);
}

static void
compare(const head *h, const char *what, const float *got, const float *want, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - (double)want[i]) <= 2e-5 * (1 + fabs((double)want[i]))))
            fail_msg("%s %llu of (%llu, %llu, %llu), cap %g, flags %u: %.9g, the reference has %.9g", what,
                     (unsigned long long)i, (unsigned long long)h->M, (unsigned long long)h->V,
                     (unsigned long long)h->C, (double)h->cap, h->flags, (double)got[i], (double)want[i]);
}

static void
same(const gradients *a, const gradients *b, const head *h)
{
    assert_memory_equal(a->losses, b->losses, h->M * sizeof(float));
    assert_memory_equal(a->dx, b->dx, h->M * h->C * sizeof(float));
    assert_memory_equal(a->dw, b->dw, h->V * h->C * sizeof(float));
}

/* What is not wanted stays as it is, and the rest has the bits of `all`. */
static void
examine_parts(const head *h, const given *in, uint64_t of_gradients, const gradients *all)
{
    gradients untouched = gradients_begin(h, of_gradients);
    for (int part = 0; part < 2; part++) {
        gradients g = gradients_begin(h, of_gradients);
        head_run(h, 2, &g, in, part == 0, part == 1);
        if (part == 0) {
            assert_memory_equal(g.dw, untouched.dw, h->V * h->C * sizeof(float));
            memcpy(g.dw, all->dw, h->V * h->C * sizeof(float));
        } else {
            assert_memory_equal(g.dx, untouched.dx, h->M * h->C * sizeof(float));
            memcpy(g.dx, all->dx, h->M * h->C * sizeof(float));
        }
        same(&g, all, h);
        gradients_free(&g);
    }
    gradients_free(&untouched);
}

/* A loss's bits do not know of weights; one weight of all rows is a factor of the scale, 1 is none. */
static void
examine_equal_weights(const head *h, const given *in, uint64_t of_gradients, const gradients *weighted)
{
    const float weights[] = {1, 0.3f};
    for (int k = 0; k < 2; k++) {
        given all = *in;
        head scaled = *h;
        gradients by_weights = gradients_begin(h, of_gradients), by_scale = gradients_begin(h, of_gradients);
        all.weights = subject_need(h->M * sizeof(float));
        for (uint64_t m = 0; m < h->M; m++)
            all.weights[m] = weights[k];
        head_run(h, 1, &by_weights, &all, true, true);
        free(all.weights);
        all.weights = NULL;
        scaled.scale = h->scale * weights[k];
        head_run(&scaled, 1, &by_scale, &all, true, true);
        same(&by_weights, &by_scale, h);
        assert_memory_equal(weighted->losses, by_scale.losses, h->M * sizeof(float));
        gradients_free(&by_weights);
        gradients_free(&by_scale);
    }
}

static void
head_examine(const head *h, bool weighted)
{
    uint64_t state = subject_key(h->M * 1009 + h->V * 31 + h->flags), of_gradients;
    given in = {.x = numbers(h->M * h->C, &state),
                .w = numbers(h->V * h->C, &state),
                .targets = subject_need(h->M * sizeof(int32_t))};
    gradients want, got;
    /* greater ones come later, and so do the greatest logits of many a row */
    for (uint64_t i = 0; i < h->V * h->C; i++)
        in.w[i] *= 0.5f + 2.5f * (float)i / (float)(h->V * h->C);
    for (uint64_t m = 0; m < h->M; m++)
        in.targets[m] = m % 5 == 3 ? -1 : (int32_t)((double)(ops_draw(&state) + 1) / 2.0001 * (double)h->V);
    if (weighted)
        weigh(&in, h->M, &state);
    of_gradients = state;
    want = gradients_begin(h, of_gradients);
    expect(h, &want, &in);
    got = gradients_begin(h, of_gradients);
    head_run(h, 1, &got, &in, true, true);
    compare(h, "loss", got.losses, want.losses, h->M);
    compare(h, "dx", got.dx, want.dx, h->M * h->C);
    compare(h, "dw", got.dw, want.dw, h->V * h->C);
    for (uint32_t threads = 2; threads <= 5; threads += 3) {
        gradients other = gradients_begin(h, of_gradients);
        head_run(h, threads, &other, &in, true, true);
        same(&other, &got, h);
        gradients_free(&other);
    }
    examine_parts(h, &in, of_gradients, &got);
    if (weighted)
        examine_equal_weights(h, &in, of_gradients, &got);
    gradients_free(&got);
    gradients_free(&want);
    given_free(&in);
}

static const head heads[] = {
    {.M = 1, .V = 2, .C = 1, .rows_per_chunk = 1, .pieces = {1, 1}},
    {.M = 9, .V = 130, .C = 24, .rows_per_chunk = 9, .pieces = {130}},
    {.M = 9, .V = 130, .C = 24, .rows_per_chunk = 4, .pieces = {64, 66}},
    {.M = 23, .V = 197, .C = 17, .rows_per_chunk = 5, .pieces = {1, 63, 40, 64, 3, 26}},
    /* beyond the buffer of a capped row */
    {.M = 6, .V = 2500, .C = 8, .rows_per_chunk = 4, .pieces = {1100, 1400}},
};

static head
head_of(size_t i, unsigned f)
{
    head h = heads[i];
    h.cap = f & 1 ? 5 : 0;
    h.scale = 0.75f;
    h.flags = (f & 2 ? SPW_OP_ACC_DX : 0) | (f & 4 ? SPW_OP_SET_DW : 0);
    h.turned = f == 3 || f == 4;
    return h;
}

static void
test_head_in_pieces(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++)
        for (unsigned f = 0; f < 8; f++) {
            head h = head_of(i, f);
            head_examine(&h, false);
        }
}

/* Rows that weigh, of the head in pieces and of the whole one: with and without a cap, gradients that are added and that are not. */
static void
test_weights(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++)
        for (unsigned f = 0; f < 8; f += 3) {
            head h = head_of(i, f);
            head_examine(&h, true);
            memset(h.pieces, 0, sizeof h.pieces);
            h.pieces[0] = h.V;
            h.whole = true;
            head_examine(&h, true);
        }
}

/* A NaN in one of the pieces is a NaN in the loss, whichever that is, and in the gradient of every row of x. */
static void
test_nan_spreads(void **state)
{
    enum { C = 8, V = 20 };
    static float w[3 * V * C], sums[3], logits[64], loss, dx[C];
    static const float x[C] = {1, -1, 2, 0, 1, 3, -2, 1};
    static const int32_t target = V + 3;
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    (void)state;
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    for (uint64_t k = 0; k < 8; k++) { /* the last two without one */
        uint64_t nan = k / 2 * V * C + (k % 2 ? V * C - 1 : 0);
        float cap = k % 2 ? 30 : 0;
        for (uint64_t i = 0; i < 3 * V * C; i++)
            w[i] = i == nan ? NAN : 0.01f * (float)(i % 50);
        for (uint64_t first = 0; first < 3 * V; first += V)
            spw_gpu_head_see(q, sums, x, w + first * C, &target, logits, 1, 1, first, V, C, cap);
        spw_gpu_head_losses(q, &loss, sums, &target, 1);
        spw_gpu_head_backward(q, dx, NULL, x, w, &target, NULL, sums, logits, 1, 1, 0, V, C, 1, cap, 0);
        assert_int_equal(isnan(loss), k < 6);
        assert_int_equal(isnan(dx[C - 1]), k < 6);
    }
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
}

/* ---------------------------------------------------------------- embedding */

/* Rows [first, first + V) of a table, with something around them that nobody is to look at or write to. */
static void
embed(spw_gpu_queue *q, float *y, float *y_added, float *dtable, const float *table, const float *dy,
      const int32_t *ids, uint64_t M, uint64_t first, uint64_t V, uint64_t C, uint64_t around)
{
    uint64_t n = V * C, all = n + 2 * around * C;
    float *piece = subject_need(all * sizeof *piece), *of_piece = subject_need(all * sizeof *piece);
    memset(piece, 0xff, all * sizeof *piece);
    memset(of_piece, 0x3c, all * sizeof *piece); /* a number: what is added to a NaN does not show */
    memcpy(piece + around * C, table + first * C, n * sizeof *piece);
    memcpy(of_piece + around * C, dtable + first * C, n * sizeof *piece);
    spw_gpu_embedding(q, y, ids, piece + around * C, first, M, V, C, false);
    spw_gpu_embedding(q, y_added, ids, piece + around * C, first, M, V, C, true);
    spw_gpu_embedding_backward(q, of_piece + around * C, dy, ids, first, M, V, C);
    memcpy(dtable + first * C, of_piece + around * C, n * sizeof *piece);
    memset(piece, 0x3c, all * sizeof *piece);
    assert_memory_equal(of_piece, piece, around * C * sizeof *piece);
    assert_memory_equal(of_piece + around * C + n, piece, around * C * sizeof *piece);
    free(piece);
    free(of_piece);
}

/* In pieces of one row and of more, in any order; rows whose piece did not come are as they were. */
static void
test_embedding_in_pieces(void **state)
{
    enum { M = 200, V = 37, C = 70 };
    static const uint64_t pieces[][2] = {{30, 7}, {0, 1}, {1, 20}, {21, 9}};
    uint64_t key = subject_key(3);
    float *table = numbers(V * C, &key), *dy = numbers(M * C, &key), *began = numbers(V * C, &key);
    float *onto = numbers(M * C, &key), *y[2], *added[2], *dtable[2];
    int32_t ids[M];
    (void)state;
    for (int i = 0; i < M; i++)
        ids[i] = (int32_t)((double)(ops_draw(&key) + 1) / 2.0001 * V);
    for (uint32_t threads = 1; threads <= 5; threads += threads == 1 ? 1 : 3) {
        spw_gpu *gpu = NULL;
        spw_gpu_queue *q = NULL;
        assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = threads}, NULL), SPW_OK);
        assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
        for (int k = 0; k < 2; k++) {
            y[k] = subject_need(M * C * sizeof(float));
            added[k] = subject_need(M * C * sizeof(float));
            dtable[k] = subject_need(V * C * sizeof(float));
            memset(y[k], 0xff, M * C * sizeof(float));
            memcpy(added[k], onto, M * C * sizeof(float));
            memcpy(dtable[k], began, V * C * sizeof(float));
        }
        embed(q, y[0], added[0], dtable[0], table, dy, ids, M, 0, V, C, 0);
        for (uint64_t i = 0; i < M * C; i++) {
            float of_table = table[(uint64_t)ids[i / C] * C + i % C], sum = of_table + onto[i];
            assert_memory_equal(&y[0][i], &of_table, sizeof of_table);
            assert_memory_equal(&added[0][i], &sum, sizeof sum);
        }
        for (size_t k = 0; k < 4; k++) {
            embed(q, y[1], added[1], dtable[1], table, dy, ids, M, pieces[k][0], pieces[k][1], C, V);
            for (uint64_t m = 0; m < M && k == 0; m++)
                if (ids[m] < 30) {
                    assert_true(isnan(y[1][m * C]) && isnan(y[1][m * C + C - 1]));
                    assert_memory_equal(added[1] + m * C, onto + m * C, C * sizeof(float));
                }
        }
        assert_memory_equal(y[1], y[0], M * C * sizeof(float));
        assert_memory_equal(added[1], added[0], M * C * sizeof(float));
        assert_memory_equal(dtable[1], dtable[0], V * C * sizeof(float));
        for (int k = 0; k < 2; k++) {
            free(y[k]);
            free(added[k]);
            free(dtable[k]);
        }
        spw_gpu_queue_destroy(q);
        spw_gpu_close(gpu);
    }
    free(table);
    free(dy);
    free(began);
    free(onto);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_head_in_pieces),
        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_nan_spreads),
        cmocka_unit_test(test_embedding_in_pieces),
    };
    return ops_run_tests(tests, sizeof tests / sizeof tests[0]);
}
