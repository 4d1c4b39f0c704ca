#include "lib_subject.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

static spw_dtype elem_type; /* the compute type of the device that runs */

static uint64_t
count_of(const subject *s)
{
    uint64_t k = 0;
    while (k < ARRAYS_MAX && s->a[k].kind != NONE)
        k++;
    return k;
}

void *
subject_need(size_t bytes)
{
    void *p = malloc(bytes + 64);
    assert_non_null(p);
    return p;
}

static void
draw(const subject *s, float **host, int32_t **ints)
{
    for (uint64_t k = 0; k < count_of(s); k++) {
        const subject_array *a = &s->a[k];
        host[k] = subject_need(a->n * 4);
        ints[k] = subject_need(a->n * 4);
        for (uint64_t i = 0; i < a->n; i++) {
            uint32_t r[4];
            spw_philox(17 + k, s->d[0] * 1000003 + s->d[1] * 101 + s->flags, i, r);
            host[k][i] = a->kind == ACT_OUT || a->kind == FP32_OUT
                             ? NAN
                             : spw_bf16_to_f32(spw_f32_to_bf16(2.0f * spw_uniform_f32(r[0]) - 1.0f));
            ints[k][i] = a->kind == INT ? (int32_t)((int64_t)(r[1] % a->below) + a->least) : 0;
        }
    }
    if (s->prepare != NULL)
        s->prepare(s, host, ints);
}

/* Runs s on gpu; results[k] gets all of array k as fp32. */
static void
apply(const subject *s, spw_gpu *gpu, float **host, int32_t **ints, float **results)
{
    spw_dtype type = spw_gpu_get_info(gpu)->compute_dtype;
    spw_gpu_queue *q = NULL, *in = NULL, *out = NULL;
    spw_gpu_event *there = NULL, *done = NULL;
    void *p[ARRAYS_MAX] = {NULL};
    spw_error err = {0};
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&in, gpu, SPW_QUEUE_H2D, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&out, gpu, SPW_QUEUE_D2H, &err), SPW_OK);
    assert_int_equal(spw_gpu_event_create(&there, gpu, &err), SPW_OK);
    assert_int_equal(spw_gpu_event_create(&done, gpu, &err), SPW_OK);
    for (uint64_t k = 0; k < count_of(s); k++) {
        const subject_array *a = &s->a[k];
        assert_int_equal(spw_gpu_alloc(gpu, &p[k], a->n * 4 + 256, &err), SPW_OK);
        if (a->kind == INT)
            spw_gpu_write_bytes(in, p[k], ints[k], a->n * 4);
        else
            spw_gpu_copy_h2d(in, p[k], a->kind == FP32 || a->kind == FP32_OUT ? SPW_F32 : type, host[k], SPW_F32, a->n);
    }
    spw_gpu_event_record(there, in);
    spw_gpu_event_wait(there, q);
    subject_use(gpu);
    s->run(s, q, p);
    spw_gpu_event_record(done, q);
    spw_gpu_event_wait(done, out);
    for (uint64_t k = 0; k < count_of(s); k++) {
        const subject_array *a = &s->a[k];
        if (a->kind == INT)
            memset(results[k], 0, a->n * 4);
        else
            spw_gpu_copy_d2h(out, results[k], SPW_F32, p[k], a->kind == FP32 || a->kind == FP32_OUT ? SPW_F32 : type,
                             a->n, NULL);
    }
    spw_gpu_queue_sync(out);
    if (spw_gpu_check(gpu, &err) != SPW_OK)
        fail_msg("%s: %s", s->name, err.message);
    for (uint64_t k = 0; k < count_of(s); k++)
        spw_gpu_free(gpu, p[k]);
    spw_gpu_event_destroy(there);
    spw_gpu_event_destroy(done);
    spw_gpu_queue_destroy(q);
    spw_gpu_queue_destroy(in);
    spw_gpu_queue_destroy(out);
}

static void
compare(const parity *p, const subject *s, const float *got, const float *want, uint64_t k)
{
    static const double rounding[SPW_DTYPE_COUNT] = {1e-5, 1e-2, 2e-3};
    double tolerance = rounding[spw_gpu_get_info(p->gpu)->compute_dtype] * (s->slack > 0 ? s->slack : 1), square = 0,
           scale;
    for (uint64_t i = 0; i < s->a[k].n; i++)
        square += isfinite(want[i]) ? (double)want[i] * (double)want[i] : 0;
    scale = sqrt(square / (double)(s->a[k].n > 0 ? s->a[k].n : 1));
    for (uint64_t i = 0; i < s->a[k].n; i++) {
        double w = (double)want[i], g = (double)got[i];
        if ((isnan(w) && isnan(g)) || w == g)
            continue;
        if (!(fabs(g - w) <= tolerance * (fabs(w) + scale)))
            fail_msg("%s (%llu, %llu, %llu, %llu, %llu, %llu; flags %u): array %llu, element %llu of %llu is %.9g, the "
                     "cpu device has %.9g (rms %.3g)",
                     s->name, (unsigned long long)s->d[0], (unsigned long long)s->d[1], (unsigned long long)s->d[2],
                     (unsigned long long)s->d[3], (unsigned long long)s->d[4], (unsigned long long)s->d[5], s->flags,
                     (unsigned long long)k, (unsigned long long)i, (unsigned long long)s->a[k].n, g, w, scale);
    }
}

void
subject_examine(const parity *p, const subject *s)
{
    static const char *const twice[] = {"", "", NULL};
    const char *const *orders = p->orders != NULL ? p->orders : twice;
    float *host[ARRAYS_MAX], *want[ARRAYS_MAX], *got[ARRAYS_MAX], *again[ARRAYS_MAX];
    int32_t *ints[ARRAYS_MAX];
    spw_gpu *cpu = NULL;
    draw(s, host, ints);
    for (uint64_t k = 0; k < count_of(s); k++) {
        want[k] = subject_need(s->a[k].n * 4);
        got[k] = subject_need(s->a[k].n * 4);
        again[k] = subject_need(s->a[k].n * 4);
    }
    assert_int_equal(spw_gpu_open(&cpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
    apply(s, cpu, host, ints, want);
    spw_gpu_close(cpu);
    for (int run = 0; orders[run] != NULL; run++) {
        setenv("SPW_EMULATE_ORDER", orders[run], 1);
        apply(s, p->gpu, host, ints, run == 0 ? got : again);
        for (uint64_t k = 0; k < count_of(s); k++) {
            if (run == 0)
                compare(p, s, got[k], want[k], k);
            else if (memcmp(got[k], again[k], s->a[k].n * 4) != 0)
                fail_msg("%s: array %llu has other bits in the run \"%s\"", s->name, (unsigned long long)k,
                         orders[run]);
        }
    }
    setenv("SPW_EMULATE_ORDER", "", 1);
    for (uint64_t k = 0; k < count_of(s); k++) {
        free(host[k]);
        free(ints[k]);
        free(want[k]);
        free(got[k]);
        free(again[k]);
    }
}

void *
subject_elem(void *p, uint64_t i)
{
    return (char *)p + i * spw_dtype_bytes(elem_type);
}

void
subject_use(const spw_gpu *gpu)
{
    elem_type = spw_gpu_get_info(gpu)->compute_dtype;
}

spw_dtype
subject_type(void)
{
    return elem_type;
}
