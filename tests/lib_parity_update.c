/*
 * The parity of updates: what a device does to state in its own memory beside cpu_adam, byte for byte.
 */
#include "lib_parity.h"
#include "spw_cpu_adam.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

static void *
need(size_t bytes)
{
    void *p = malloc(bytes + 64);
    assert_non_null(p);
    return p;
}

/* How cpu_adam's words become the device's. */
static spw_gpu_update
update_of(spw_state_format f, const spw_optimizer *o, const spw_opt_coef *coef)
{
    return (spw_gpu_update){.rule = (spw_gpu_rule)o->builtin,
                            .weight_dtype = spw_state_weight_dtype(f),
                            .low_bytes = spw_state_low_bytes(f),
                            .moment_bytes = spw_state_moment_bytes(f),
                            .nearest = coef->nearest,
                            .key = coef->key};
}

/* Gradients of all sizes, with zeros, denormal numbers and, if asked, what is not finite. */
static void
draw_gradient(void *out, spw_dtype type, uint64_t n, uint64_t seed, bool nonfinite)
{
    float *x = need(n * 4);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t r[4];
        spw_philox(seed, 5, i, r);
        x[i] = ldexpf(2.0f * spw_uniform_f32(r[0]) - 1.0f, -(int)(r[1] % 20));
        x[i] = r[2] % 50 == 0 ? 0.0f : r[2] % 50 == 1 ? 1e-41f : x[i];
        if (nonfinite && r[3] % 97 == 0)
            x[i] = r[3] % 2 ? INFINITY : NAN;
    }
    spw_convert(out, type, x, SPW_F32, n);
    free(x);
}

/* Three steps of a chunk on the device and by cpu_adam: the same bytes. */
static void
steps_alike(const parity *p, const spw_optimizer *o, spw_state_format f, spw_dtype grad_dtype, bool nearest)
{
    enum { N = 8192, RANGES = 11, FIRST = 12288 };
    static const uint64_t ends[RANGES] = {48, 128, 700, 1152, 1153, 1280, 1400, 1408, 2000, 6144, N};
    uint64_t weight_bytes = N * spw_state_weight_bytes(f), record_bytes = spw_state_record_bytes(f, o, N);
    uint64_t grad_bytes = N * spw_dtype_bytes(grad_dtype), bad, want_bad;
    char *w = need(weight_bytes), *r = need(record_bytes), *g = need(grad_bytes),
         *back = need(record_bytes + weight_bytes);
    float *x = need(N * sizeof *x);
    void *device = NULL;
    spw_gpu_queue *q = NULL;
    spw_region page;
    spw_error err = {0};
    assert_int_equal(spw_region_map(&page, 4096, 0, &err), SPW_OK);
    assert_int_equal(spw_gpu_pin_host(p->gpu, page.base, page.bytes, &err), SPW_OK);
    memset(w, 0, weight_bytes);
    memset(r, 0, record_bytes);
    for (uint64_t i = 0; i < N; i++)
        x[i] = 0.03f * (float)((i * 7919) % 211) - 3.0f;
    spw_state_set(f, o, w, r, N, SPW_PART_MASTER, 0, N, x);
    assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_H2D, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &device, weight_bytes + record_bytes + grad_bytes, NULL), SPW_OK);
    spw_gpu_write_bytes(q, device, w, weight_bytes);
    spw_gpu_write_bytes(q, (char *)device + weight_bytes, r, record_bytes);
    for (uint64_t step = 1; step <= 4; step++) {
        spw_opt_coef coef[2];
        spw_opt_range host[RANGES];
        spw_gpu_update_range there[RANGES];
        spw_opt_chunk chunk = {
            .format = f, .elems = N, .weights = w, .record = r, .grad = g, .grad_dtype = grad_dtype, .first = FIRST};
        spw_opt_hp hp = {.lr = 1e-2,
                         .weight_decay = 0.1,
                         .beta1 = 0.9,
                         .beta2 = 0.98,
                         .eps = 1e-8,
                         .decoupled = true,
                         .bias_correction = true,
                         .momentum = 0.9,
                         .nesterov = true,
                         .lr_decay = 0.1,
                         .step = step,
                         .grad_scale = 0.37,
                         .seed = 3,
                         .nearest = nearest};
        spw_gpu_update u;
        assert_int_equal(spw_opt_prepare(&coef[0], o, &hp, &err), SPW_OK);
        hp.decoupled = false; /* L2 for the others */
        hp.lr = 3e-3;
        assert_int_equal(spw_opt_prepare(&coef[1], o, &hp, &err), SPW_OK);
        for (int k = 0; k < RANGES; k++) {
            const spw_opt_coef *c = &coef[k % 2];
            host[k] = (spw_opt_range){ends[k], c};
            there[k] = (spw_gpu_update_range){.end = ends[k], .grad_scale = o == &spw_opt_muon ? 1 : c->grad_scale};
            memcpy(there[k].c, c->c, sizeof there[k].c);
        }
        draw_gradient(g, grad_dtype, N, step + (uint64_t)f * 10, step == 4);
        spw_gpu_write_bytes(q, (char *)device + weight_bytes + record_bytes, g, grad_bytes);
        u = update_of(f, o, &coef[0]);
        u.grad_dtype = grad_dtype;
        u.elems = N;
        u.first = FIRST;
        u.weights = device;
        u.record = (char *)device + weight_bytes;
        u.grad = (char *)u.record + record_bytes;
        uint64_t *counts[] = {&bad, (uint64_t *)page.base + step};
        want_bad = spw_opt_step(&chunk, host, RANGES);
        for (int k = 0; k < (step == 4 ? 2 : 1); k++) { /* memory that the device does not know, and that it does */
            uint64_t *count = counts[(step + (uint64_t)k) % 2];
            *count = 0;
            spw_gpu_update_state(q, &u, there, RANGES, count);
            spw_gpu_queue_sync(q);
            if (k == 1 && *count != bad)
                fail_msg("%llu and %llu gradients are not finite", (unsigned long long)*count, (unsigned long long)bad);
            bad = *count;
        }
        if (bad != want_bad || (step == 4) != (bad > 0))
            fail_msg("%s in %s, step %llu: %llu gradients are not finite, not %llu", o->name, spw_state_name(f),
                     (unsigned long long)step, (unsigned long long)bad, (unsigned long long)want_bad);
        if (step == 4) /* counted; what becomes of them is nobody's business, such a step is an error */
            break;
        spw_gpu_read_bytes(q, back, device, weight_bytes + record_bytes);
        for (uint64_t i = 0; i < weight_bytes + record_bytes; i++) {
            char want = i < weight_bytes ? w[i] : r[i - weight_bytes];
            if (back[i] != want)
                fail_msg("%s in %s%s, %s gradients, step %llu: byte %llu of %llu + %llu is %02x, cpu_adam has %02x",
                         o->name, spw_state_name(f), nearest ? " (nearest)" : "", spw_dtype_name(grad_dtype),
                         (unsigned long long)step, (unsigned long long)i, (unsigned long long)weight_bytes,
                         (unsigned long long)record_bytes, back[i] & 0xff, want & 0xff);
        }
    }
    assert_int_equal(spw_gpu_check(p->gpu, &err), SPW_OK);
    spw_gpu_free(p->gpu, device);
    spw_gpu_queue_destroy(q);
    spw_gpu_unpin_host(p->gpu, page.base);
    spw_region_unmap(&page);
    free(w);
    free(r);
    free(g);
    free(back);
    free(x);
}

/*
 * Muon's first half, three times: the momentum, what is left in the gradient, sums of squares and counts, these two by turns in memory that the
 * device knows, and that it does not.
 */
static void
momenta_alike(const parity *p, spw_state_format f, spw_dtype grad_dtype, bool nesterov, bool nearest)
{
    enum { N = 5 * 4096, RANGES = 9, SUMS = N / 4096, FIRST = 3 * 4096 };
    static const uint64_t ends[RANGES] = {48, 128, 704, 1152, 4096, 5120, 8192, 12352, N};
    uint64_t record_bytes = spw_state_record_bytes(f, &spw_opt_muon, N), grad_bytes = N * spw_dtype_bytes(grad_dtype);
    char *r = need(record_bytes), *g = need(grad_bytes), *back = need(record_bytes + grad_bytes);
    double want[SUMS], pageable[SUMS], *squares;
    void *device = NULL;
    spw_gpu_queue *q = NULL;
    spw_region page;
    spw_error err = {0};
    assert_int_equal(spw_region_map(&page, 4096, 0, &err), SPW_OK);
    assert_int_equal(spw_gpu_pin_host(p->gpu, page.base, page.bytes, &err), SPW_OK);
    memset(r, 0, record_bytes);
    assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_H2D, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(p->gpu, &device, record_bytes + grad_bytes, NULL), SPW_OK);
    spw_gpu_write_bytes(q, device, r, record_bytes);
    for (uint64_t step = 1; step <= 4; step++) {
        spw_opt_coef coef[2];
        spw_opt_range host[RANGES];
        spw_gpu_update_range there[RANGES];
        spw_opt_chunk chunk = {
            .format = f, .elems = N, .record = r, .grad = g, .grad_dtype = grad_dtype, .first = FIRST};
        uint64_t count, *bad, want_bad;
        spw_gpu_update u;
        for (int k = 0; k < 2; k++) {
            /* Halves of what has few bits lie in the middle between two numbers of 16 bits again and again. */
            spw_opt_hp hp = {.lr = 1e-2,
                             .momentum = k == 0 ? 0.95 : 0.5,
                             .nesterov = nesterov && k == 0,
                             .step = step,
                             .grad_scale = k == 0 ? 0.37f : 1.0f,
                             .seed = 3,
                             .nearest = nearest};
            assert_int_equal(spw_opt_prepare(&coef[k], &spw_opt_muon, &hp, &err), SPW_OK);
        }
        for (int k = 0; k < RANGES; k++) {
            host[k] = (spw_opt_range){ends[k], &coef[k % 2]};
            there[k] = (spw_gpu_update_range){.end = ends[k], .grad_scale = coef[k % 2].grad_scale};
            memcpy(there[k].c, coef[k % 2].c, sizeof there[k].c);
        }
        draw_gradient(g, grad_dtype, N, step + (uint64_t)f * 10, step == 4);
        spw_gpu_write_bytes(q, (char *)device + record_bytes, g, grad_bytes);
        u = update_of(f, &spw_opt_muon, &coef[0]);
        u.grad_dtype = grad_dtype;
        u.elems = N;
        u.first = FIRST;
        u.record = device;
        squares = step % 2 == 0 ? page.base : pageable;
        bad = step % 2 == 0 ? (uint64_t *)page.base + SUMS : &count;
        memset(squares, 0xff, sizeof want);
        *bad = 0;
        spw_gpu_momentum(q, &u, (char *)device + record_bytes, there, RANGES, squares, bad);
        spw_gpu_queue_sync(q);
        want_bad = spw_opt_momentum(&chunk, g, host, RANGES, want);
        if (*bad != want_bad || (step == 4) != (*bad > 0))
            fail_msg("step %llu: %llu gradients are not finite, not %llu", (unsigned long long)step,
                     (unsigned long long)*bad, (unsigned long long)want_bad);
        if (step == 4)
            break;
        spw_gpu_read_bytes(q, back, device, record_bytes + grad_bytes);
        if (memcmp(back, r, record_bytes) != 0 || memcmp(back + record_bytes, g, grad_bytes) != 0 ||
            memcmp(squares, want, sizeof want) != 0)
            fail_msg(
                "momentum in %s, %s gradients, step %llu: other bytes than cpu_adam's in the record (%d), the gradient "
                "(%d) or the sums of squares (%d)",
                spw_state_name(f), spw_dtype_name(grad_dtype), (unsigned long long)step,
                memcmp(back, r, record_bytes) != 0, memcmp(back + record_bytes, g, grad_bytes) != 0,
                memcmp(squares, want, sizeof want) != 0);
    }
    assert_int_equal(spw_gpu_check(p->gpu, &err), SPW_OK);
    spw_gpu_free(p->gpu, device);
    spw_gpu_queue_destroy(q);
    spw_gpu_unpin_host(p->gpu, page.base);
    spw_region_unmap(&page);
    free(r);
    free(g);
    free(back);
}

/* Every optimizer in every format and type of gradient has the bytes of cpu_adam, across ranges that share a group of 64. */
void
parity_update(const parity *p)
{
    static const spw_optimizer *const all[] = {&spw_opt_adam, &spw_opt_adagrad, &spw_opt_lion, &spw_opt_sgd,
                                               &spw_opt_muon};
    static const spw_dtype grads[] = {SPW_F32, SPW_BF16, SPW_F16};
    for (int o = 0; o < 5; o++)
        for (int f = 0; f < SPW_STATE_COUNT; f++)
            for (int nearest = 0; nearest < (spw_state_exact((spw_state_format)f) ? 1 : 2); nearest++)
                steps_alike(p, all[o], (spw_state_format)f, grads[(o + f) % 3], nearest);
    for (int g = 0; g < 3; g++) {
        steps_alike(p, &spw_opt_adam, SPW_STATE_SPLIT, grads[g], false);
        momenta_alike(p, SPW_STATE_SPLIT, grads[g], g % 2, false);
        momenta_alike(p, SPW_STATE_FP32, grads[g], true, false);
        for (int nearest = 0; nearest < 2; nearest++) {
            momenta_alike(p, SPW_STATE_SPLIT_BF16, grads[g], true, nearest);
            momenta_alike(p, SPW_STATE_SPLIT24_INT8, grads[g], g % 2, nearest);
        }
    }
}
