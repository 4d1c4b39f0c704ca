#include "lib_subject.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { PAGE = 4096 };

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

static bool
written(const subject_array *a)
{
    return a->kind == ACT_OUT || a->kind == FP32_OUT;
}

static bool
fp32(const subject_array *a)
{
    return a->kind == FP32 || a->kind == FP32_OUT;
}

static uint64_t
mix(uint64_t x) /* splitmix64: an operation's arrays have many millions of elements */
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

uint64_t
subject_key(uint64_t of)
{
    const char *seed = getenv("SPW_SEED");
    return mix((seed != NULL ? strtoull(seed, NULL, 0) : 1) + mix(of));
}

float
subject_number(uint64_t key, uint64_t i)
{
    return spw_bf16_to_f32(spw_f32_to_bf16((float)(mix(key + i) >> 40) * 0x1p-23f - 1.0f));
}

static void
draw(const subject *s, float **host, int32_t **ints)
{
    uint64_t key = subject_key(s->d[0] * 1000003 + s->d[1] * 101 + s->flags);
    for (uint64_t k = 0; k < count_of(s); k++) {
        const subject_array *a = &s->a[k];
        uint64_t of_k = mix(key + k);
        host[k] = a->kind != INT ? subject_need(a->n * 4) : NULL;
        ints[k] = a->kind == INT ? subject_need(a->n * 4) : NULL;
        for (uint64_t i = 0; i < a->n; i++) {
            if (a->kind == INT)
                ints[k][i] = (int32_t)((int64_t)((mix(of_k + i) >> 32) * a->below >> 32) + a->least);
            else
                host[k][i] = written(a) ? NAN : subject_number(of_k, i);
        }
    }
    if (s->prepare != NULL)
        s->prepare(s, host, ints);
}

void
subject_scale(float *x, uint64_t n, uint64_t K)
{
    float scale = exp2f(roundf(log2f(4.5f / sqrtf((float)K))));
    for (uint64_t i = 0; i < n; i++)
        x[i] *= scale;
}

/* An array's place in pages of its own: it ends within 16 bytes of their end, so that what is read or written behind it shows where memory does. */
static void *
place_of(void *pages, uint64_t bytes)
{
    return (char *)pages + (spw_round_up(bytes, PAGE) - bytes) / 16 * 16;
}

/* Runs s on gpu; results[k] gets all of array k as fp32. */
static void
apply(const subject *s, spw_gpu *gpu, float **host, int32_t **ints, float **results)
{
    spw_dtype type = spw_gpu_get_info(gpu)->compute_dtype;
    spw_gpu_queue *q = NULL, *in = NULL, *out = NULL;
    spw_gpu_event *there = NULL, *done = NULL;
    void *pages[ARRAYS_MAX] = {NULL}, *p[ARRAYS_MAX] = {NULL};
    spw_error err = {0};
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&in, gpu, SPW_QUEUE_H2D, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&out, gpu, SPW_QUEUE_D2H, &err), SPW_OK);
    assert_int_equal(spw_gpu_event_create(&there, gpu, &err), SPW_OK);
    assert_int_equal(spw_gpu_event_create(&done, gpu, &err), SPW_OK);
    for (uint64_t k = 0; k < count_of(s); k++) {
        const subject_array *a = &s->a[k];
        uint64_t bytes = a->n * (fp32(a) || a->kind == INT ? 4 : spw_dtype_bytes(type));
        assert_int_equal(spw_gpu_alloc(gpu, &pages[k], spw_round_up(bytes, PAGE), &err), SPW_OK);
        p[k] = place_of(pages[k], bytes);
        if (a->kind == INT)
            spw_gpu_write_bytes(in, p[k], ints[k], a->n * 4);
        else
            spw_gpu_copy_h2d(in, p[k], fp32(a) ? SPW_F32 : type, host[k], SPW_F32, a->n);
    }
    spw_gpu_event_record(there, in);
    spw_gpu_event_wait(there, q);
    subject_use(gpu);
    s->run(s, q, p);
    spw_gpu_event_record(done, q);
    spw_gpu_event_wait(done, out);
    for (uint64_t k = 0; k < count_of(s); k++) {
        const subject_array *a = &s->a[k];
        if (a->kind != INT)
            spw_gpu_copy_d2h(out, results[k], SPW_F32, p[k], fp32(a) ? SPW_F32 : type, a->n, NULL);
    }
    spw_gpu_queue_sync(out);
    if (spw_gpu_check(gpu, &err) != SPW_OK)
        fail_msg("%s: %s", s->name, err.message);
    for (uint64_t k = 0; k < count_of(s); k++)
        spw_gpu_free(gpu, pages[k]);
    spw_gpu_event_destroy(there);
    spw_gpu_event_destroy(done);
    spw_gpu_queue_destroy(q);
    spw_gpu_queue_destroy(in);
    spw_gpu_queue_destroy(out);
}

/* ---------------------------------------------------------------- errors */

/* The worst of each subject, for those who read the log. */
static struct said {
    const char *name;
    bool beside;                /* a reference in fp64, not the cpu device */
    double error;               /* norm-wise, of an array that is large enough to say something */
    double of_norm, of_element; /* parts of what is allowed */
} worst[48];

static struct said *
said_of(const char *name, bool beside)
{
    uint64_t i = 0;
    while (i < 47 && worst[i].name != NULL && (strcmp(worst[i].name, name) != 0 || worst[i].beside != beside))
        i++;
    worst[i].name = name;
    worst[i].beside = beside;
    return &worst[i];
}

void
subject_report(spw_dtype type)
{
    for (uint64_t i = 0; i < 48 && worst[i].name != NULL; i++) {
        printf("# %s %s%s: worst norm-wise error %.2g, %.0f %% of what is allowed", worst[i].name, spw_dtype_name(type),
               worst[i].beside ? " beside fp64" : "", worst[i].error, 100 * worst[i].of_norm);
        printf(worst[i].beside ? "\n" : "; elements %.0f %%\n", 100 * worst[i].of_element);
    }
    memset(worst, 0, sizeof worst);
}

static uint64_t
row_of(const subject *s, uint64_t k)
{
    return s->row[k] > 0 ? s->row[k] : s->a[k].n > 0 ? s->a[k].n : 1;
}

static uint64_t
heads_of(const subject *s, uint64_t k)
{
    return s->heads[k] > 0 ? s->heads[k] : 1;
}

static double
more_of(const subject *s, uint64_t k)
{
    return s->more[k] > 0 ? s->more[k] : 1;
}

/* What an operation put on or into element i. */
static double
change(const float *before, const float *after, uint64_t i)
{
    double c = (double)after[i] - (isnan(before[i]) ? 0 : (double)before[i]);
    return isfinite(c) ? c : 0;
}

static double
square_of(const float *before, const float *after, uint64_t n)
{
    double sum = 0;
    for (uint64_t i = 0; i < n; i++)
        sum += change(before, after, i) * change(before, after, i);
    return sum;
}

float
subject_rounded(spw_dtype type, float x)
{
    return type == SPW_F32    ? x
           : type == SPW_BF16 ? spw_bf16_to_f32(spw_f32_to_bf16(x))
                              : spw_f16_to_f32(spw_f32_to_f16(x));
}

#define FAIL(s, what, ...)                                                                                             \
    fail_msg("%s (%llu, %llu, %llu, %llu, %llu, %llu; flags %u): " what, (s)->name, (unsigned long long)(s)->d[0],     \
             (unsigned long long)(s)->d[1], (unsigned long long)(s)->d[2], (unsigned long long)(s)->d[3],              \
             (unsigned long long)(s)->d[4], (unsigned long long)(s)->d[5], (s)->flags, __VA_ARGS__)

/* Sums over the rows of a head; excess: squares of errors, less those of the best numbers that the type has. */
typedef struct sums {
    double change, want, excess;
    uint64_t n;
} sums;

/* The rows of a head as one array. Of few elements one that falls to the other side of two numbers counts for much. */
static double
norm_limit(const sums *h, double allowed, spw_dtype type)
{
    static const double fall[SPW_DTYPE_COUNT] = {0, 2e-4, 7e-5}; /* by a rounding of the sum, of one three times rms */
    double n = (double)h->n;
    return allowed * (1 + 8 / sqrt(n)) * sqrt(h->change) + (4e-7 + fall[type] / sqrt(n)) * sqrt(h->want);
}

static void
compare_norm(const subject *s, uint64_t k, uint64_t head, const sums *h, double allowed, spw_dtype type)
{
    double error = sqrt(h->excess), limit = norm_limit(h, allowed, type);
    struct said *said = said_of(s->name, false);
    if (!(error > 0))
        return;
    if (h->n >= 1000 && h->change > 0 && error / limit > said->of_norm) {
        said->of_norm = error / limit;
        said->error = error / sqrt(h->change);
    }
    if (!(error <= limit))
        FAIL(s, "array %llu, head %llu of %llu elements has a norm-wise error of %.3g, %.3g is allowed",
             (unsigned long long)k, (unsigned long long)head, (unsigned long long)h->n, error / sqrt(h->change),
             limit / sqrt(h->change));
}

/* What element e adds to the sums of its head; how far it is off beyond the best number of the type. */
static double
add_error(sums *h, spw_dtype type, double got, double want)
{
    double off = fabs(got - want), best = fabs((double)subject_rounded(type, (float)want) - want);
    h->want += isfinite(want) ? want * want : 0;
    if (got == want || (isnan(got) && isnan(want)))
        return 0;
    h->excess += off * off - best * best;
    return off - best;
}

/* before: what the array began as. */
static void
compare(const parity *p, const subject *s, const float *before, const float *got, const float *want, uint64_t k)
{
    const subject_array *a = &s->a[k];
    spw_dtype compute = spw_gpu_get_info(p->gpu)->compute_dtype, type = fp32(a) ? SPW_F32 : compute;
    double allowed = (s->worst[compute] > 0 ? s->worst[compute] : 2e-6) * more_of(s, k), of_element = 0;
    uint64_t row = row_of(s, k), heads = heads_of(s, k);
    sums of[HEADS_MAX] = {{0}};
    assert_true(heads <= HEADS_MAX);
    /* Bounds are the emulation's. A GPU adds otherwise, and an H200 stays below four fifths of this. */
    if (p->orders == NULL)
        allowed *= 1.2;
    for (uint64_t i = 0, r = 0; i < a->n; i += row, r++) {
        uint64_t n = a->n - i < row ? a->n - i : row;
        of[r % heads].change += square_of(before + i, want + i, n);
        of[r % heads].n += n;
    }
    for (uint64_t i = 0, r = 0; i < a->n; i += row, r++) {
        uint64_t n = a->n - i < row ? a->n - i : row;
        sums *h = &of[r % heads];
        double scale = sqrt(square_of(before + i, want + i, n) / (double)n);
        double least = s->row_least * sqrt(h->change / (double)h->n);
        scale = scale > least ? scale : least;
        for (uint64_t e = i; e < i + n; e++) {
            double w = (double)want[e], off = add_error(h, type, (double)got[e], w);
            double limit = 12 * allowed * (fabs(change(before, want, e)) + scale) + 6e-7 * fabs(w);
            if (off != 0 && !(off <= limit))
                FAIL(s, "array %llu, element %llu of %llu is %.9g, the cpu device has %.9g (%.3g in its row)",
                     (unsigned long long)k, (unsigned long long)e, (unsigned long long)a->n, (double)got[e], w, scale);
            of_element = off > of_element * limit ? off / limit : of_element;
        }
    }
    if (of_element > said_of(s->name, false)->of_element)
        said_of(s->name, false)->of_element = of_element;
    for (uint64_t j = 0; j < heads; j++)
        compare_norm(s, k, j, &of[j], allowed, type);
}

/*
 * The greatest part of what is allowed beside a reference that a head's norm-wise error takes. What is rounded on the way may fall to the other
 * side of two numbers, in 16 bits.
 */
static double
part_of_allowed(const subject *s, const float *before, const float *got, const float *want, uint64_t k,
                spw_dtype compute, double *error)
{
    static const double allowed[SPW_DTYPE_COUNT] = {3e-6, 1e-3, 2.5e-4};
    spw_dtype type = fp32(&s->a[k]) ? SPW_F32 : compute;
    uint64_t row = row_of(s, k), heads = heads_of(s, k);
    double part = 0;
    sums of[HEADS_MAX] = {{0}};
    for (uint64_t i = 0; i < s->a[k].n; i++) {
        sums *h = &of[i / row % heads];
        h->change += change(before, want, i) * change(before, want, i);
        h->n++;
        (void)add_error(h, type, (double)got[i], (double)want[i]);
    }
    *error = 0;
    for (uint64_t j = 0; j < heads; j++) {
        double off = of[j].excess < 0 ? 0 : sqrt(of[j].excess);
        double now = off / norm_limit(&of[j], allowed[compute] * more_of(s, k), type);
        if (of[j].excess != 0 && !(now <= part)) {
            part = now;
            *error = of[j].n >= 1000 && of[j].change > 0 ? off / sqrt(of[j].change) : 0;
        }
    }
    return part;
}

/* Beside the reference in whichever way it comes closest to an array. */
static void
compare_beside(const parity *p, const subject *s, float **host, int32_t **ints, float **got)
{
    spw_dtype compute = spw_gpu_get_info(p->gpu)->compute_dtype;
    double least[ARRAYS_MAX], error[ARRAYS_MAX], now = 0;
    assert_true(s->ways > 0);
    for (unsigned way = 0; way < s->ways; way++) {
        float *want[ARRAYS_MAX] = {NULL};
        for (uint64_t k = 0; k < count_of(s); k++) {
            want[k] = subject_need(s->a[k].n * 4);
            memcpy(want[k], s->a[k].kind == INT ? (void *)ints[k] : (void *)host[k], s->a[k].n * 4);
        }
        s->reference(s, compute, way, want, ints);
        for (uint64_t k = 0; k < count_of(s); k++) {
            double part = 0;
            if (s->a[k].kind != INT)
                part = part_of_allowed(s, host[k], got[k], want[k], k, compute, &now);
            if (way == 0 || part < least[k]) {
                least[k] = part;
                error[k] = now;
            }
            free(want[k]);
        }
    }
    for (uint64_t k = 0; k < count_of(s); k++) {
        struct said *said = said_of(s->name, true);
        if (s->a[k].kind == INT)
            continue;
        if (!(least[k] <= 1))
            FAIL(s, "array %llu has %.3g times the norm-wise error that is allowed beside fp64", (unsigned long long)k,
                 least[k]);
        if (error[k] > said->error)
            said->error = error[k];
        if (least[k] > said->of_norm)
            said->of_norm = least[k];
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
            if (s->a[k].kind == INT)
                continue;
            if (run == 0)
                compare(p, s, host[k], got[k], want[k], k);
            else if (memcmp(got[k], again[k], s->a[k].n * 4) != 0)
                fail_msg("%s: array %llu has other bits in the run \"%s\"", s->name, (unsigned long long)k,
                         orders[run]);
        }
    }
    setenv("SPW_EMULATE_ORDER", "", 1);
    if (s->reference != NULL)
        compare_beside(p, s, host, ints, got);
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
