/* Copies with their conversions and sums, codes, queues and events, spans of time, memory. */
#include "lib_subject.h"
#include "quant.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

/* ---------------------------------------------------------------- copies, queues, memory */

/*
 * Codes have the host's bytes, and decode to its numbers from both sides of the link. A block of zeros, one with an infinity, a
 * denormal number.
 */
static void
codes_and_numbers(const parity *p, uint64_t n, uint32_t bits, spw_dtype type)
{
    spw_quant form = bits == 8 ? SPW_QUANT_INT8 : SPW_QUANT_INT4;
    uint64_t bytes = spw__quant_bytes(form, n), width = spw_dtype_bytes(type);
    spw_region x, numbers, codes, want, got;
    void *there = NULL, *device = NULL;
    spw_gpu_queue *q = NULL;
    spw_error err = {0};
    assert_int_equal(spw_region_map(&x, n * 4, 0, &err), SPW_OK);
    assert_int_equal(spw_region_map(&numbers, n * width, 0, &err), SPW_OK);
    assert_int_equal(spw_region_map(&codes, bytes, 0, &err), SPW_OK);
    assert_int_equal(spw_region_map(&want, n * width, 0, &err), SPW_OK);
    assert_int_equal(spw_region_map(&got, n * width, 0, &err), SPW_OK);
    for (uint64_t e = 0; e < n; e++)
        ((float *)x.base)[e] = e / 128 == 2 ? 0.0f : (float)((int32_t)(e * 2654435761u) >> 8) * 0x1p-26f;
    if (n > 1000) {
        ((float *)x.base)[600] = -1.0f / 0.0f;
        ((float *)x.base)[1000] = 1e-40f;
    }
    spw_convert(numbers.base, type, x.base, SPW_F32, n);
    spw__quant_encode(codes.base, form, numbers.base, type, n);
    spw__quant_decode(want.base, type, codes.base, form, n);
    assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_H2D, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &there, bytes, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &device, n * width, &err), SPW_OK);
    spw_gpu_copy_h2d(q, device, type, numbers.base, type, n);
    spw_gpu_encode(q, there, bits, device, type, n);
    spw_gpu_copy_d2h(q, got.base, SPW_F32, there, SPW_F32, bytes / 4, NULL);
    spw_gpu_queue_sync(q);
    assert_memory_equal(got.base, codes.base, bytes);
    for (int k = 0; k < 2; k++) {
        spw_gpu_zero(q, device, n * width);
        if (k == 0)
            spw_gpu_decode(q, device, type, there, bits, n);
        else
            spw_gpu_decode_h2d(q, device, type, codes.base, bits, n);
        spw_gpu_queue_sync(q);
        spw_gpu_copy_d2h(q, got.base, type, device, type, n, NULL);
        spw_gpu_queue_sync(q);
        if (n > 1000) /* NaN has many forms */
            memcpy((char *)got.base + 512 * width, (char *)want.base + 512 * width, 128 * width);
        assert_memory_equal(got.base, want.base, n * width);
    }
    spw_gpu_queue_destroy(q);
    spw_gpu_free(p->gpu, there);
    spw_gpu_free(p->gpu, device);
    spw_region_unmap(&x);
    spw_region_unmap(&numbers);
    spw_region_unmap(&codes);
    spw_region_unmap(&want);
    spw_region_unmap(&got);
    assert_int_equal(spw_gpu_check(p->gpu, &err), SPW_OK);
}

/* Published codes of any bits, in blocks or strips, with scales that are powers of two or near to one, decoded from both sides of the link. */
static void
published_numbers(const parity *p, spw_quant form, spw_dtype type)
{
    const uint64_t n = spw_round_up(140000, spw_codes_unit(form)), bytes = spw__quant_bytes(form, n),
                   width = spw_dtype_bytes(type);
    spw_region codes, want, got;
    void *there = NULL, *device = NULL;
    spw_gpu_queue *q = NULL;
    spw_error err = {0};
    assert_int_equal(spw_region_map(&codes, bytes, 0, &err), SPW_OK);
    assert_int_equal(spw_region_map(&want, n * width, 0, &err), SPW_OK);
    assert_int_equal(spw_region_map(&got, n * width, 0, &err), SPW_OK);
    for (uint64_t i = 0; i < bytes; i++) {
        const uint32_t cols = spw_codes_cols(form), begin = cols > 0 ? cols : spw_codes_begin(form);
        const uint64_t at = i % spw__quant_bytes(form, spw_codes_unit(form));
        uint8_t x = (uint8_t)(i * 2654435761u >> 13), *to = (uint8_t *)codes.base + i;
        if (at >= begin) /* floats of 8 bits have a NaN */
            *to = spw_codes_bits(form) == 8 && (x & 127) == 127 ? 1 : x;
        else if (spw_codes_scale_of(form) == SPW_SCALE_E8M0)
            *to = i % 7 == 0 ? 0 : (uint8_t)(120 + x % 16);
        else
            *to = at % spw_codes_scale_bytes(form) + 1 == spw_codes_scale_bytes(form) ? 0x3f : x;
    }
    spw__quant_decode(want.base, type, codes.base, form, n);
    assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_H2D, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &there, bytes, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &device, n * width, &err), SPW_OK);
    spw_gpu_copy_h2d(q, there, SPW_F32, codes.base, SPW_F32, bytes / 4);
    for (int k = 0; k < 2; k++) {
        spw_gpu_zero(q, device, n * width);
        if (k == 0)
            spw_gpu_decode(q, device, type, there, form, n);
        else
            spw_gpu_decode_h2d(q, device, type, codes.base, form, n);
        spw_gpu_queue_sync(q);
        spw_gpu_copy_d2h(q, got.base, type, device, type, n, NULL);
        spw_gpu_queue_sync(q);
        assert_memory_equal(got.base, want.base, n * width);
    }
    spw_gpu_queue_destroy(q);
    spw_gpu_free(p->gpu, there);
    spw_gpu_free(p->gpu, device);
    spw_region_unmap(&codes);
    spw_region_unmap(&want);
    spw_region_unmap(&got);
    assert_int_equal(spw_gpu_check(p->gpu, &err), SPW_OK);
}

void
parity_codes(const parity *p)
{
    static const uint64_t lengths[] = {128, 4096, 69632, 4194304 + 4096, 67108864 + 4096};
    static const struct {
        uint32_t bits, floats, group;
        spw_codes_scale scale;
    } forms[] = {{4, 0, 32, SPW_SCALE_BF16},
                 {4, 1, 32, SPW_SCALE_E8M0},
                 {8, 1, 128, SPW_SCALE_F32},
                 {8, 0, 128, SPW_SCALE_F32},
                 {4, 1, 16, SPW_SCALE_F32}};
    for (int k = 0; k < 30; k++) /* of fp32 numbers and bf16's, in each type */
        published_numbers(p,
                          spw_codes_published(forms[k / 6].bits, (int)forms[k / 6].floats, forms[k / 6].scale,
                                              forms[k / 6].group, k / 3 % 2),
                          (spw_dtype)(k % 3));
    for (int k = 0; k < 18; k++)
        published_numbers(p, spw_codes_strips(k < 6 ? 4 : k < 12 ? 132 : 2880, k / 3 % 2), (spw_dtype)(k % 3));
    for (int i = 0; i < (p->large ? 5 : 4); i++)
        for (int k = 0; k < 6; k += i < 4 ? 1 : 3) /* the last is longer than a piece of the device's staging */
            codes_and_numbers(p, lengths[i], k % 2 ? 4 : 8, (spw_dtype)(k / 2));
}

/* Every conversion in every direction has the bits of spw_convert(), sums those of the cpu device; pinned and pageable. */
void
parity_copies(const parity *p)
{
    static const uint64_t lengths[] = {1, 7, 4096, 4097, 70001, 2100017, 40000003};
    for (size_t i = 0; i < (p->large ? 7 : 6); i++)
        for (int pair = 0; pair < (i < 5 ? 9 : 2); pair++) { /* the long ones: fp32 to fp32 and to bf16 */
            spw_dtype a = (spw_dtype)(pair / 3), b = (spw_dtype)(pair % 3);
            uint64_t n = lengths[i], sums = (n + 4095) / 4096;
            spw_region x, y, want;
            double *got_sums = subject_need(sums * 8), *want_sums = subject_need(sums * 8),
                   *more = subject_need(sums * 8);
            void *da = NULL, *db = NULL;
            spw_gpu *cpu = NULL;
            spw_gpu_queue *in = NULL, *out = NULL, *plain = NULL;
            spw_error err = {0};
            assert_int_equal(spw_region_map(&x, n * 4, 0, &err), SPW_OK);
            assert_int_equal(spw_region_map(&y, n * 4, 0, &err), SPW_OK);
            assert_int_equal(spw_region_map(&want, n * 4, 0, &err), SPW_OK);
            if (i % 2 == 0) {
                assert_int_equal(spw_gpu_pin_host(p->gpu, x.base, x.bytes, &err), SPW_OK);
                assert_int_equal(spw_gpu_pin_host(p->gpu, y.base, y.bytes, &err), SPW_OK);
            }
            for (uint64_t e = 0; e < n; e++) { /* all sorts of exponents, infinities too, few NaN-like patterns */
                uint32_t r = (uint32_t)(e * 2654435761u) ^ (uint32_t)(e >> 7);
                float f = spw_bits_f32((r & 0x83ffffffu) + 0x3a000000u);
                if (a == SPW_F32)
                    ((float *)x.base)[e] = e % 1000 == 7 ? INFINITY : f;
                else
                    ((uint16_t *)x.base)[e] = a == SPW_BF16 ? spw_f32_to_bf16(f) : spw_f32_to_f16(f);
            }
            assert_int_equal(spw_gpu_open(&cpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
            assert_int_equal(spw_gpu_queue_create(&plain, cpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
            spw_gpu_copy_d2h(plain, want.base, b, x.base, a, n, want_sums);
            spw_gpu_queue_destroy(plain);
            spw_gpu_close(cpu);
            assert_int_equal(spw_gpu_queue_create(&in, p->gpu, SPW_QUEUE_H2D, &err), SPW_OK);
            assert_int_equal(spw_gpu_queue_create(&out, p->gpu, SPW_QUEUE_D2H, &err), SPW_OK);
            assert_int_equal(spw_gpu_alloc(p->gpu, &da, n * 4, &err), SPW_OK);
            assert_int_equal(spw_gpu_alloc(p->gpu, &db, n * 4, &err), SPW_OK);
            spw_gpu_copy_h2d(in, da, a, x.base, a, n); /* as it is, converted on the way back */
            spw_gpu_queue_sync(in);
            spw_gpu_copy_d2h(out, y.base, b, da, a, n, got_sums);
            spw_gpu_queue_sync(out);
            assert_memory_equal(want.base, y.base, n * spw_dtype_bytes(b));
            assert_memory_equal(want_sums, got_sums, sums * 8);
            memset(y.base, 0, y.bytes);
            spw_gpu_copy_h2d(in, db, b, x.base, a, n); /* converted on the way there */
            spw_gpu_queue_sync(in);
            spw_gpu_copy_d2h(out, y.base, b, db, b, n, NULL);
            spw_gpu_queue_sync(out);
            assert_memory_equal(want.base, y.base, n * spw_dtype_bytes(b));
            memset(y.base, 0, y.bytes);
            spw_gpu_copy_d2d(out, db, b, da, a, n, more); /* converted there */
            spw_gpu_copy_d2h(out, y.base, b, db, b, n, NULL);
            if (b == SPW_F32)
                spw_gpu_sumsq(out, got_sums, db, n);
            spw_gpu_queue_sync(out);
            assert_memory_equal(want.base, y.base, n * spw_dtype_bytes(b));
            assert_memory_equal(want_sums, more, sums * 8);
            assert_memory_equal(want_sums, got_sums, sums * 8);
            if (spw_gpu_check(p->gpu, &err) != SPW_OK)
                fail_msg("copies: %s", err.message);
            spw_gpu_free(p->gpu, da);
            spw_gpu_free(p->gpu, db);
            spw_gpu_queue_destroy(in);
            spw_gpu_queue_destroy(out);
            if (i % 2 == 0) {
                spw_gpu_unpin_host(p->gpu, x.base);
                spw_gpu_unpin_host(p->gpu, y.base);
            }
            spw_region_unmap(&x);
            spw_region_unmap(&y);
            spw_region_unmap(&want);
            free(got_sums);
            free(want_sums);
            free(more);
        }
}

static void
count_up(void *arg)
{
    __atomic_add_fetch((int *)arg, 1, __ATOMIC_SEQ_CST);
}

/* Rounds through three queues, ordered by events alone; every callback comes, and has come when its queue is synchronised. */
void
parity_queues(const parity *p)
{
    enum { N = 20000, ROUNDS = 150 };
    float *x = subject_need(N * 4), *back = subject_need(N * 4);
    void *a = NULL, *b = NULL;
    spw_gpu_queue *in = NULL, *q = NULL, *out = NULL;
    spw_gpu_event *there = NULL, *made = NULL, *left = NULL;
    spw_error err = {0};
    int noticed = 0;
    assert_int_equal(spw_gpu_queue_create(&in, p->gpu, SPW_QUEUE_H2D, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_COMPUTE, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&out, p->gpu, SPW_QUEUE_D2H, &err), SPW_OK);
    assert_int_equal(spw_gpu_event_create(&there, p->gpu, &err), SPW_OK);
    assert_int_equal(spw_gpu_event_create(&made, p->gpu, &err), SPW_OK);
    assert_int_equal(spw_gpu_event_create(&left, p->gpu, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &a, N * 4, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &b, N * 4, &err), SPW_OK);
    spw_gpu_event_sync(left); /* never recorded: nothing to wait for */
    for (int round = 0; round < ROUNDS; round++) {
        spw_dtype type = spw_gpu_get_info(p->gpu)->compute_dtype;
        for (int i = 0; i < N; i++)
            x[i] = (float)((i + round) % 64);
        spw_gpu_event_wait(left, in);
        spw_gpu_copy_h2d(in, a, type, x, SPW_F32, N);
        spw_gpu_event_record(there, in);
        spw_gpu_queue_notify(in, count_up, &noticed);
        spw_gpu_event_wait(there, q);
        spw_gpu_event_wait(left, q);
        spw_gpu_add(q, b, a, a, N);
        spw_gpu_event_record(made, q);
        spw_gpu_event_wait(made, out);
        spw_gpu_copy_d2h(out, back, SPW_F32, b, type, N, NULL);
        spw_gpu_queue_notify(out, count_up, &noticed);
        spw_gpu_event_record(left, out);
        spw_gpu_event_sync(left);
        for (int i = 0; i < N; i++)
            if (back[i] != 2 * x[i])
                fail_msg("round %d, element %d: %g", round, i, (double)back[i]);
    }
    spw_gpu_queue_sync(in);
    spw_gpu_queue_sync(out);
    assert_int_equal(__atomic_load_n(&noticed, __ATOMIC_SEQ_CST), 2 * ROUNDS);
    assert_int_equal(spw_gpu_check(p->gpu, &err), SPW_OK);
    spw_gpu_free(p->gpu, a);
    spw_gpu_free(p->gpu, b);
    spw_gpu_event_destroy(there);
    spw_gpu_event_destroy(made);
    spw_gpu_event_destroy(left);
    spw_gpu_queue_destroy(in);
    spw_gpu_queue_destroy(q);
    spw_gpu_queue_destroy(out);
    free(x);
    free(back);
}

typedef struct spans {
    uint64_t count, tags, begin_ns, end_ns, wrong, early;
} spans;

enum { SPAN_SLACK_NS = 2000000 }; /* of two clocks, and of who is late to look */

static void
take_span(void *arg, const char *name, uint64_t tag, uint64_t begin_ns, uint64_t end_ns)
{
    spans *s = arg;
    s->wrong += strcmp(name, "work") != 0 || tag != s->count || end_ns < begin_ns;
    s->early += begin_ns + SPAN_SLACK_NS < s->end_ns;
    s->begin_ns = s->count == 0 ? begin_ns : s->begin_ns;
    s->end_ns = end_ns;
    s->tags += tag;
    s->count++;
}

/* True if the spans of a queue lie one after another within the time in which they were submitted and waited for. */
static bool
spans_fit(const parity *p, spw_gpu_queue_kind queue_kind)
{
    enum { COUNT = 600, N = 1 << 16 };
    spans s = {0};
    void *a = NULL;
    spw_gpu_queue *q = NULL;
    spw_error err = {0};
    uint64_t begin = spw_now_ns(), end;
    assert_int_equal(spw_gpu_queue_create(&q, p->gpu, queue_kind, &err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &a, N, &err), SPW_OK);
    for (uint64_t i = 0; i < COUNT; i++) { /* more than are under way at a time */
        spw_gpu_span_begin(q, "work");
        spw_gpu_zero(q, a, N);
        spw_gpu_span_end(q, i, take_span, &s);
    }
    spw_gpu_queue_sync(q);
    end = spw_now_ns();
    assert_int_equal(spw_gpu_check(p->gpu, &err), SPW_OK);
    assert_int_equal(s.count, COUNT);
    assert_int_equal(s.wrong, 0);
    spw_gpu_free(p->gpu, a);
    spw_gpu_queue_destroy(q);
    return s.early == 0 && s.begin_ns + SPAN_SLACK_NS >= begin && s.end_ns <= end + SPAN_SLACK_NS &&
           s.end_ns > s.begin_ns;
}

/*
 * Spans come in order, each ends after it begins, and their times are the host's. Who looks at both clocks may be kept from
 * it in between by a busy machine; then another queue, which begins anew, has to do better.
 */
void
parity_spans(const parity *p)
{
    for (spw_gpu_queue_kind k = SPW_QUEUE_COMPUTE; k <= SPW_QUEUE_D2H; k++) {
        bool fit = false;
        for (int try = 0; try < 20 && !fit; try++)
            fit = spans_fit(p, k);
        assert_true(fit);
    }
}

/* The limit is exact, the message has the numbers, live and peak count. */
void
parity_memory(const parity *p)
{
    spw_gpu *gpu = NULL;
    void *a = NULL, *b = NULL;
    spw_error err = {0};
    spw_gpu_options options = {.name = spw_gpu_get_info(p->gpu)->name, .memory_bytes = 1 << 20};
    assert_int_equal(spw_gpu_open(&gpu, &options, &err), SPW_OK);
    assert_int_equal(spw_gpu_get_info(gpu)->memory_bytes, 1 << 20);
    assert_false(spw_gpu_get_info(gpu)->host_addressable);
    assert_int_equal(spw_gpu_alloc(gpu, &a, 700000, &err), SPW_OK);
    assert_int_equal((uintptr_t)a % 256, 0);
    assert_int_equal(spw_gpu_alloc(gpu, &b, 700000, &err), SPW_ENOMEM);
    assert_non_null(strstr(err.message, "700000"));
    assert_non_null(strstr(err.message, "1048576"));
    assert_int_equal(spw_gpu_bytes_live(gpu), 700416);
    spw_gpu_free(gpu, a);
    assert_int_equal(spw_gpu_alloc(gpu, &b, 1 << 20, &err), SPW_OK);
    assert_int_equal(spw_gpu_bytes_peak(gpu), 1 << 20);
    spw_gpu_free(gpu, b);
    assert_int_equal(spw_gpu_bytes_live(gpu), 0);
    spw_gpu_close(gpu);
    err = (spw_error){0};
    options.name = "cuda:1000";
    assert_int_equal(spw_gpu_open(&gpu, &options, &err), SPW_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "device cuda:1000: there "));
}
