/*
 * The parity of what Muon makes orthogonal: beside the formulas in double precision, and beside itself. Errors are those of the whole matrix
 * beside its norm, as the iteration's steps multiply what is small by up to 3.4 each, roundings among it.
 */
#include "lib_parity.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static void *
need(uint64_t count, uint64_t bytes)
{
    void *p = calloc(count, bytes);
    assert_non_null(p);
    return p;
}

/* In double precision, as the formulas say it; products over the smaller side. x (rows, cols) in place, its norm 1 at first. */
static void
orthogonal(double *x, uint64_t rows, uint64_t cols, uint32_t steps)
{
    const double a = 3.4445, b = -4.7750, c = 2.0315;
    const uint64_t n = rows < cols ? rows : cols, along = rows < cols ? cols : rows;
    double *gram = need(n * n, sizeof *gram), *poly = need(n * n, sizeof *poly), *out = need(rows * cols, sizeof *out);
    for (uint32_t step = 0; step < steps; step++) {
        for (uint64_t i = 0; i < n; i++)
            for (uint64_t j = 0; j < n; j++) {
                double dot = 0;
                for (uint64_t k = 0; k < along; k++)
                    dot += rows > cols ? x[k * cols + i] * x[k * cols + j] : x[i * cols + k] * x[j * cols + k];
                gram[i * n + j] = dot;
            }
        for (uint64_t i = 0; i < n; i++)
            for (uint64_t j = 0; j < n; j++) {
                double dot = 0;
                for (uint64_t k = 0; k < n; k++)
                    dot += gram[i * n + k] * gram[k * n + j];
                poly[i * n + j] = b * gram[i * n + j] + c * dot;
            }
        for (uint64_t i = 0; i < rows; i++)
            for (uint64_t j = 0; j < cols; j++) {
                double dot = a * x[i * cols + j];
                for (uint64_t k = 0; k < n; k++)
                    dot += rows > cols ? x[i * cols + k] * poly[k * n + j] : poly[i * n + k] * x[k * cols + j];
                out[i * cols + j] = dot;
            }
        memcpy(x, out, rows * cols * sizeof *x);
    }
    free(gram);
    free(poly);
    free(out);
}

/* Made on the device from x (n), to got; whatever lay in work. */
static void
make(const parity *p, spw_gpu_queue *q, const float *x, float *got, uint64_t rows, uint64_t cols, uint32_t steps,
     double norm)
{
    const spw_dtype type = spw_gpu_get_info(p->gpu)->compute_dtype;
    const uint64_t n = rows * cols, bytes = spw_gpu_orthogonal_bytes(type, rows, cols);
    char *given = need(n, 4);
    void *at, *work;
    assert_int_equal(spw_gpu_alloc(p->gpu, &at, n * 4, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &work, spw_round_up(bytes, 4096), NULL), SPW_OK);
    for (uint64_t i = 0; i < bytes; i += 4)
        spw_gpu_write_bytes(q, (char *)work + i, &(uint32_t){0xffffffff}, bytes - i < 4 ? bytes - i : 4);
    spw_convert(given, type, x, SPW_F32, n);
    spw_gpu_write_bytes(q, at, given, n * spw_dtype_bytes(type));
    spw_gpu_orthogonalize(q, type, at, work, rows, cols, (float)(1 / norm), steps, 1.5f);
    spw_gpu_read_bytes(q, given, at, n * spw_dtype_bytes(type));
    spw_convert(got, SPW_F32, given, type, n);
    spw_gpu_free(p->gpu, at);
    spw_gpu_free(p->gpu, work);
    free(given);
}

/* y = scale x w^T + by onto in its four layouts, with and without onto; y is written, whatever was there. */
static void
products(const parity *p, spw_gpu_queue *q, uint64_t M, uint64_t N, uint64_t K)
{
    static const double most[SPW_DTYPE_COUNT] = {1e-6, 4e-3, 5e-4}; /* half a unit in the last place of 16 bits */
    const spw_dtype type = spw_gpu_get_info(p->gpu)->compute_dtype;
    const uint64_t each = spw_dtype_bytes(type), count[4] = {M * K, N * K, M * N, M * N}, bytes = 4 * (M + N) * (K + M);
    float *host[4], by = -1.75f, scale = 0.37f;
    char *device, *at[4], *given = need(bytes, 1);
    assert_int_equal(spw_gpu_alloc(p->gpu, (void **)&device, spw_round_up(bytes * 4, 4096), NULL), SPW_OK);
    for (int k = 0; k < 4; k++) {
        host[k] = need(count[k], sizeof(float));
        at[k] = device + (uint64_t)k * spw_round_up(bytes, 256);
        for (uint64_t i = 0; i < count[k]; i++) {
            uint32_t r[4];
            spw_philox(12, (uint64_t)k, i, r);
            host[k][i] = k < 3 ? spw_uniform_f32(r[0]) - 0.5f : NAN;
        }
        spw_convert(given, type, host[k], SPW_F32, count[k]);
        spw_convert(host[k], SPW_F32, given, type, count[k]);
        spw_gpu_write_bytes(q, at[k], given, count[k] * each);
    }
    for (unsigned way = 0; way < 8; way++) {
        const bool x_rows = way & 1, w_rows = way & 2, onto = way & 4;
        spw_gpu_product(q, at[3], onto ? at[2] : NULL, by, at[0], at[1], scale, M, N, K,
                        (x_rows ? SPW_OP_X_IN_OUT : 0) | (w_rows ? SPW_OP_W_IN_OUT : 0));
        spw_gpu_read_bytes(q, given, at[3], M * N * each);
        spw_convert(host[3], SPW_F32, given, type, M * N);
        for (uint64_t i = 0; i < M * N; i++) {
            const uint64_t m = i / N, n = i % N;
            double sum = 0;
            for (uint64_t k = 0; k < K; k++)
                sum += (double)host[0][x_rows ? k * M + m : m * K + k] * host[1][w_rows ? k * N + n : n * K + k];
            sum = scale * sum + (onto ? by * (double)host[2][i] : 0);
            if (!(fabs(host[3][i] - sum) <= most[type] * (fabs(sum) + 0.25)))
                fail_msg("product %d x %d x %d, way %u, element %d: %g, not %g", (int)M, (int)N, (int)K, way, (int)i,
                         (double)host[3][i], sum);
        }
    }
    for (int k = 0; k < 4; k++)
        free(host[k]);
    free(given);
    spw_gpu_free(p->gpu, device);
}

void
parity_orthogonal(const parity *p)
{
    static const struct {
        uint64_t rows, cols;
        uint32_t steps;
    } shapes[] = {{16, 16, 5}, {24, 80, 5}, {80, 24, 5}, {1, 33, 5},    {33, 1, 5},   {37, 53, 4},
                  {53, 37, 3}, {64, 64, 1}, {72, 48, 5}, {256, 384, 5}, {384, 256, 5}};
    static const double most[SPW_DTYPE_COUNT] = {4e-6, 4e-2, 7e-3};
    const spw_dtype type = spw_gpu_get_info(p->gpu)->compute_dtype;
    spw_gpu_queue *q;
    assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    products(p, q, 5, 7, 3);
    products(p, q, 24, 40, 96);
    products(p, q, 72, 16, 33);
    for (size_t k = 0; k < (p->large ? 11 : 9); k++) {
        const uint64_t rows = shapes[k].rows, cols = shapes[k].cols, n = rows * cols;
        double *want = need(n, sizeof *want), sum = 0, off = 0, all = 0;
        float *x = need(n, 4), *got = need(n, 4), *again = need(n, 4);
        for (uint64_t i = 0; i < n; i++) {
            uint32_t r[4];
            spw_philox(11, k, i, r);
            x[i] = ldexpf(spw_uniform_f32(r[0]) - 0.5f, -(int)(r[1] % 4)); /* rounded as the device has it */
            spw_convert(got, type, &x[i], SPW_F32, 1);
            spw_convert(&x[i], SPW_F32, got, type, 1);
            sum += (double)x[i] * x[i];
        }
        for (uint64_t i = 0; i < n; i++)
            want[i] = x[i] / sqrt(sum);
        orthogonal(want, rows, cols, shapes[k].steps);
        make(p, q, x, got, rows, cols, shapes[k].steps, sqrt(sum));
        make(p, q, x, again, rows, cols, shapes[k].steps, sqrt(sum));
        assert_memory_equal(got, again, n * 4);
        for (uint64_t i = 0; i < n; i++) {
            off += (1.5 * want[i] - got[i]) * (1.5 * want[i] - got[i]);
            all += 2.25 * want[i] * want[i];
        }
        print_message("# orthogonal, %s, %d x %d, %u steps: %.1e\n", spw_dtype_name(type), (int)rows, (int)cols,
                      shapes[k].steps, sqrt(off / all));
        assert_true(sqrt(off / all) < most[type]);
        free(want);
        free(x);
        free(got);
        free(again);
    }
    assert_int_equal(spw_gpu_check(p->gpu, NULL), SPW_OK);
    spw_gpu_queue_destroy(q);
}
