/* 8-bit floats: codes, transposes and scales with the bits of runtime/base/fp8.h, and products beside the cpu device. */
#include "lib_subject.h"
#include "fp8.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

/* What the codes of x (M,N), numbers of type, must be. */
static float
codes_of(uint8_t *codes, uint8_t *turned, spw_fp8 format, const void *x, spw_dtype type, uint64_t M, uint64_t N)
{
    float *f = subject_need(M * N * 4), scale;
    uint32_t greatest = 0;
    spw_convert(f, SPW_F32, x, type, M * N);
    for (uint64_t i = 0; i < M * N; i++)
        greatest = (spw_f32_bits(f[i]) & 0x7fffffffu) > greatest ? spw_f32_bits(f[i]) & 0x7fffffffu : greatest;
    scale = spw_fp8_scale(format, greatest);
    for (uint64_t i = 0; i < M * N; i++)
        codes[i] = turned[i % N * M + i / N] = isnan(scale) ? 0 : spw_f32_to_fp8(format, f[i] * spw_fp8_inverse(scale));
    free(f);
    return scale;
}

/* Numbers of many sizes, the greatest about as large as size; last takes the place of one of them, unless it is 0. */
static void
fill(void *x, spw_dtype type, uint64_t n, uint64_t key, float size, float last)
{
    float *f = subject_need(n * 4);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t r[4];
        spw_philox(key, n, i, r);
        f[i] = (2 * spw_uniform_f32(r[0]) - 1) * size * spw_bits_f32((127 - r[1] % 24) << 23);
    }
    if (last != 0)
        f[n / 3] = last;
    spw_convert(x, type, f, SPW_F32, n);
    free(f);
}

/* at: x begins so many elements behind an aligned address. */
static void
examine_codes(const parity *p, spw_fp8 format, uint64_t M, uint64_t N, unsigned which, uint64_t at)
{
    static const float sizes[] = {1, 0, 3e-38f, 40000, 1, 1};
    static const char *const twice[] = {"", "", NULL};
    const char *const *orders = p->orders != NULL ? p->orders : twice;
    spw_dtype type = spw_gpu_get_info(p->gpu)->compute_dtype;
    uint64_t n = M * N, bytes = spw_dtype_bytes(type);
    uint8_t *want = subject_need(n), *want_turned = subject_need(n), *got = subject_need(n);
    void *x = subject_need(n * 4), *dx = NULL, *codes = NULL;
    spw_gpu_queue *q = NULL;
    float scale, want_scale;
    fill(x, type, n, M * 7 + which, sizes[which], which == 4 ? -INFINITY : which == 5 ? NAN : 0.0f);
    want_scale = codes_of(want, want_turned, format, x, type, M, N);
    assert_true(isnan(want_scale) == (which >= 4));
    assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &dx, (n + at) * bytes, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &codes, 2 * n + 16, NULL), SPW_OK);
    spw_gpu_write_bytes(q, (char *)dx + at * bytes, x, n * bytes);
    for (int run = 0; orders[run] != NULL; run++) {
        for (int only = 0; only < 3; only++) { /* both, codes alone, the transpose alone */
            uint8_t *plain = codes, *turned = plain + n;
            setenv("SPW_EMULATE_ORDER", orders[run], 1);
            spw_gpu_fp8_scale(q, (float *)(void *)(turned + n), format, (char *)dx + at * bytes, n);
            spw_gpu_fp8_encode(q, only == 2 ? NULL : plain, only == 1 ? NULL : turned, format,
                               (float *)(void *)(turned + n), (char *)dx + at * bytes, M, N);
            spw_gpu_read_bytes(q, &scale, turned + n, sizeof scale);
            assert_memory_equal(&scale, &want_scale, sizeof scale);
            spw_gpu_read_bytes(q, got, plain, n);
            assert_memory_equal(got, want, n);
            spw_gpu_read_bytes(q, got, turned, n);
            assert_memory_equal(got, want_turned, n);
            spw_gpu_zero(q, only == 0 ? plain : turned, n); /* what is written next */
        }
    }
    setenv("SPW_EMULATE_ORDER", "", 1);
    assert_int_equal(spw_gpu_check(p->gpu, NULL), SPW_OK);
    spw_gpu_queue_destroy(q);
    spw_gpu_free(p->gpu, dx);
    spw_gpu_free(p->gpu, codes);
    free(want);
    free(want_turned);
    free(got);
    free(x);
}

/* d = M, N, K, formats of a + 2 of b, what is added: 1 a bias, 2 what is there, 4 in fp32 */
enum { A, B, BIAS, Y, SUMS, A_CODES, B_CODES };

static void
run_product(const subject *s, spw_gpu_queue *q, void **p)
{
    uint64_t M = s->d[0], N = s->d[1], K = s->d[2];
    spw_fp8 of_a = (spw_fp8)(s->d[3] & 1), of_b = (spw_fp8)(s->d[3] >> 1);
    float *a_scale = (float *)p[A_CODES] + M * K / 4, *b_scale = (float *)p[B_CODES] + N * K / 4;
    spw_gpu_fp8_scale(q, a_scale, of_a, p[A], M * K);
    spw_gpu_fp8_scale(q, b_scale, of_b, p[B], N * K);
    spw_gpu_fp8_encode(q, p[A_CODES], NULL, of_a, a_scale, p[A], M, K);
    spw_gpu_fp8_encode(q, p[B_CODES], NULL, of_b, b_scale, p[B], N, K);
    spw_gpu_fp8_product(q, &(spw_fp8_product){.y = p[s->d[4] & 4 ? SUMS : Y],
                                              .onto = (s->d[4] & 2) == 0 ? NULL : p[s->d[4] & 4 ? SUMS : Y],
                                              .bias = s->d[4] & 1 ? p[BIAS] : NULL,
                                              .f32_out = (s->d[4] & 4) != 0,
                                              .a = {p[A_CODES], a_scale, of_a},
                                              .b = {p[B_CODES], b_scale, of_b},
                                              .M = M,
                                              .N = N,
                                              .K = K});
}

void
parity_fp8(const parity *p)
{
    static const uint64_t sizes[][3] = {{16, 16, 16}, {48, 80, 64}, {128, 144, 320}, {1024, 768, 3072}};
    if (!spw_gpu_get_info(p->gpu)->fp8)
        skip();
    for (size_t i = 0; i < (p->large ? 4 : 3); i++) {
        uint64_t M = sizes[i][0], N = sizes[i][1], K = sizes[i][2];
        for (unsigned which = 0; which < 6; which += i < 3 ? 1 : 5)
            for (uint64_t f = 0; f < SPW_FP8_COUNT; f++)
                examine_codes(p, (spw_fp8)f, M, K, which, which == 0 && f == 1 ? 3 : 0);
        for (uint64_t f = 0; f < 3; f++)
            for (uint64_t more = 0; more < 8; more += i < 3 ? 1 : 7)
                subject_examine(p, &(subject){.name = "product of 8-bit floats",
                                              .a = {{ACT, M * K, 0, 0},
                                                    {ACT, N * K, 0, 0},
                                                    {ACT, N, 0, 0},
                                                    {more & 2 ? ACT : ACT_OUT, M * N, 0, 0},
                                                    {more & 2 ? FP32 : FP32_OUT, M * N, 0, 0},
                                                    {INT, M * K / 4 + 1, 1, 0},
                                                    {INT, N * K / 4 + 1, 1, 0}},
                                              .d = {M, N, K, f, more},
                                              .worst = SUBJECT_PRODUCT_FP8,
                                              .run = run_product});
    }
}
