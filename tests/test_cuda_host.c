/*
 * The host's side of the cuda device, on the emulated one: how much an operation gives its stream, since on a GPU every copy,
 * launch and host function costs microseconds that here cost nothing; what it does when it is refused something; and that the emulation
 * refuses what a GPU could not do. Streams work as late as they may.
 */
#include "lib_rig.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

static spw_gpu *gpu;

/* ---------------------------------------------------------------- what streams are given */

enum { PIECE = 1 << 20 }; /* bytes of a piece of a converting copy, in the emulated device */

typedef struct copying {
    spw_gpu_queue *q;
    void *device, *other, *host;
    double *sums;
} copying;

static void
copying_begin(copying *c, uint64_t n)
{
    *c = (copying){.host = malloc(n * 4), .sums = calloc(n / 4096 + 1, sizeof(double))};
    assert_true(c->host != NULL && c->sums != NULL);
    assert_int_equal(spw_gpu_queue_create(&c->q, gpu, SPW_QUEUE_D2H, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &c->device, n * 4, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &c->other, n * 4, NULL), SPW_OK);
    spw_gpu_zero(c->q, c->device, n * 4);
    spw_gpu_queue_sync(c->q);
}

static void
copying_end(copying *c)
{
    spw_error err = {0};
    if (spw_gpu_check(gpu, &err) != SPW_OK)
        fail_msg("%s", err.message);
    spw_gpu_free(gpu, c->device);
    spw_gpu_free(gpu, c->other);
    spw_gpu_queue_destroy(c->q);
    free(c->host);
    free(c->sums);
}

static void
expect_counts(const spw_emulate_counts *before, const char *what, uint64_t launches, uint64_t copies,
              uint64_t host_functions, uint64_t sets)
{
    spw_emulate_counts now = tiny_emulated_counts();
    if (now.launches - before->launches != launches || now.copies - before->copies != copies ||
        now.host_functions - before->host_functions != host_functions || now.sets - before->sets != sets)
        fail_msg("%s: %llu launches, %llu copies, %llu host functions, %llu sets", what,
                 (unsigned long long)(now.launches - before->launches),
                 (unsigned long long)(now.copies - before->copies),
                 (unsigned long long)(now.host_functions - before->host_functions),
                 (unsigned long long)(now.sets - before->sets));
}

/*
 * Sums of squares are one kernel, one copy and one host function, however long the copy is that they come with; where they go to pinned
 * memory the kernel alone.
 */
static void
test_sums_in_one(void **state)
{
    const uint64_t n = 40 * 65536;
    spw_emulate_counts before;
    double *pageable;
    spw_region pinned;
    copying c;
    (void)state;
    copying_begin(&c, n);
    pageable = c.sums;
    assert_int_equal(spw_region_map(&pinned, n / 4096 * sizeof(double), 0, NULL), SPW_OK);
    assert_int_equal(spw_gpu_pin_host(gpu, pinned.base, pinned.bytes, NULL), SPW_OK);
    for (unsigned small = 0; small <= 1; small++) { /* of each there is one */
        c.sums = small ? pageable : pinned.base;
        memset(c.sums, 0xff, n / 4096 * sizeof(double));
        before = tiny_emulated_counts();
        spw_gpu_copy_d2h(c.q, c.host, SPW_F32, c.device, SPW_F32, n, c.sums);
        expect_counts(&before, "fp32 to the host", 1, 1 + small, small, 0);
        before = tiny_emulated_counts();
        spw_gpu_copy_d2h(c.q, c.host, SPW_BF16, c.device, SPW_F32, n, c.sums);
        expect_counts(&before, "fp32 to bf16 on the host", 1 + n * 2 / PIECE, n * 2 / PIECE + small, small, 0);
        before = tiny_emulated_counts();
        spw_gpu_copy_d2d(c.q, c.other, SPW_BF16, c.device, SPW_F32, n, c.sums);
        expect_counts(&before, "fp32 to bf16 on the device", 2, small, small, 0);
        spw_gpu_queue_sync(c.q);
    }
    for (uint64_t i = 0; i < n / 4096; i++)
        assert_true(pageable[i] == 0 && ((const double *)pinned.base)[i] == 0);
    c.sums = pageable;
    spw_gpu_unpin_host(gpu, pinned.base);
    spw_region_unmap(&pinned);
    copying_end(&c);
}

/* There and back in pieces, and again what has just come back, in pieces and in one. */
static void
pieces_there_and_back(void)
{
    const uint64_t n = 5 * PIECE / 2 - 77; /* of bf16: five pieces, the last one shorter */
    spw_gpu_queue *q = NULL;
    copying c;
    float *x = malloc(n * 4);
    float *wide = calloc(n, 4);
    uint16_t *out = malloc(n * 2), *back = malloc(n * 2), *again = malloc(n * 2);
    assert_true(x != NULL && wide != NULL && out != NULL && back != NULL && again != NULL);
    copying_begin(&c, n);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_H2D, NULL), SPW_OK);
    for (uint64_t i = 0; i < n; i++)
        x[i] = (float)(i * 31 % 253);
    memset(out, 0xff, n * 2);
    spw_gpu_copy_h2d(q, c.device, SPW_F32, x, SPW_F32, n);
    spw_gpu_copy_d2h(q, out, SPW_BF16, c.device, SPW_F32, n, NULL);
    spw_gpu_zero(q, c.device, n * 4);
    spw_gpu_copy_h2d(q, c.other, SPW_F32, out, SPW_BF16, n); /* what has just left */
    spw_gpu_copy_d2h(q, back, SPW_BF16, c.other, SPW_F32, n, NULL);
    spw_gpu_copy_d2h(q, wide, SPW_F32, c.other, SPW_F32, n, NULL);
    spw_gpu_copy_h2d(q, c.device, SPW_BF16, wide, SPW_F32, n);
    spw_gpu_copy_d2h(q, again, SPW_BF16, c.device, SPW_BF16, n, NULL);
    spw_gpu_zero(q, c.other, n * 4);
    spw_gpu_queue_sync(q);
    for (uint64_t i = 0; i < n; i++)
        if (spw_bf16_to_f32(back[i]) != x[i] || again[i] != back[i])
            fail_msg("element %llu: %g, %g", (unsigned long long)i, (double)spw_bf16_to_f32(back[i]),
                     (double)spw_bf16_to_f32(again[i]));
    spw_gpu_queue_destroy(q);
    copying_end(&c);
    free(x);
    free(wide);
    free(out);
    free(back);
    free(again);
}

/*
 * Pieces go over a stream of their own, and yet come after what was before them in the queue and before what is after, whichever of
 * the two streams is ahead. They are three each time: then the next one is odd.
 */
static void
test_pieces_in_order(void **state)
{
    (void)state;
    pieces_there_and_back();
    setenv("SPW_EMULATE_STREAMS", "odd", 1);
    for (int k = 0; k < 2; k++)
        pieces_there_and_back();
    setenv("SPW_EMULATE_STREAMS", "late", 1);
}

/* A few gradients on their way out hold nobody up who submits them. */
static void
test_sums_do_not_block(void **state)
{
    enum { COPIES = 24 };
    const uint64_t n = 16 * 65536;
    spw_emulate_counts before;
    copying c;
    (void)state;
    copying_begin(&c, n);
    spw_gpu_copy_d2h(c.q, c.host, SPW_BF16, c.device, SPW_F32, n, c.sums); /* takes the staging memory */
    spw_gpu_queue_sync(c.q);
    before = tiny_emulated_counts();
    for (int k = 0; k < COPIES; k++)
        spw_gpu_copy_d2h(c.q, c.host, SPW_BF16, c.device, SPW_F32, n, c.sums);
    assert_int_equal(tiny_emulated_counts().waits, before.waits);
    copying_end(&c);
}

/* What takes several slots of the ring at once, round and round, arrives as it was. */
static void
test_small_copies(void **state)
{
    enum { N = 300000, ROUNDS = 40 };
    spw_emulate_counts before;
    copying c;
    uint32_t *back = malloc(N * 4), *sent;
    (void)state;
    copying_begin(&c, N);
    sent = c.host;
    assert_non_null(back);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        uint64_t n = 1 + round * 7919 * 37 % N;
        for (uint64_t i = 0; i < n; i++)
            sent[i] = (uint32_t)(i * 2654435761u + round);
        before = tiny_emulated_counts();
        spw_gpu_write_bytes(c.q, c.device, sent, n * 4);
        expect_counts(&before, "a small copy", 0, (n * 4 + (512 << 10) - 1) / (512 << 10), 0, 0);
        memset(sent, 0, n * 4); /* the caller's again */
        spw_gpu_read_bytes(c.q, back, c.device, n * 4);
        for (uint64_t i = 0; i < n; i++)
            assert_int_equal(back[i], (uint32_t)(i * 2654435761u + round));
    }
    copying_end(&c);
    free(back);
}

/*
 * A token of linear attention is two kernels and nothing else; of many tokens a third one keeps what the convolution read last. Backward has as
 * many kernels whatever the shape is.
 */
static void
test_linear_attention(void **state)
{
    enum { T = 40, C = 32, N = 8 * T * C };
    const spw_conv_shape conv = {.B = 1, .T = T, .C = C, .K = 4}, one_conv = {.B = 1, .T = 1, .C = C, .K = 4};
    const spw_delta_shape rule = {.B = 1, .T = T, .Hk = 1, .Hv = 2, .Dk = 8, .Dv = 8};
    const spw_delta_shape one_rule = {.B = 1, .T = 1, .Hk = 1, .Hv = 2, .Dk = 8, .Dv = 8};
    spw_emulate_counts before;
    spw_delta_cache cache;
    spw_delta_inputs in;
    void *p[8] = {NULL};
    copying c;
    (void)state;
    copying_begin(&c, N);
    for (int k = 0; k < 8; k++) {
        assert_int_equal(spw_gpu_alloc(gpu, &p[k], N * 4, NULL), SPW_OK);
        spw_gpu_zero(c.q, p[k], N * 4);
    }
    in = (spw_delta_inputs){p[0], p[1], p[1], p[1], p[1], NULL};
    cache = (spw_delta_cache){p[2], p[3], p[4], p[4]};
    spw_gpu_conv_backward(c.q, p[5], p[6], NULL, p[0], p[0], p[1], &conv, 0); /* takes the scratch memory */
    before = tiny_emulated_counts();
    spw_gpu_conv_cached(c.q, p[5], p[0], p[1], &cache, &one_conv);
    spw_gpu_delta_cached(c.q, p[5], &in, &cache, &one_rule);
    expect_counts(&before, "a token", 2, 0, 0, 0);
    before = tiny_emulated_counts();
    spw_gpu_conv_cached(c.q, p[5], p[0], p[1], &cache, &conv);
    spw_gpu_delta_cached(c.q, p[5], &in, &cache, &rule);
    expect_counts(&before, "many tokens", 3, 0, 0, 0);
    before = tiny_emulated_counts();
    spw_gpu_conv_backward(c.q, p[5], p[6], NULL, p[0], p[0], p[1], &conv, 0);
    spw_gpu_conv_backward(c.q, p[5], NULL, NULL, p[0], p[0], p[1], &conv, 0);
    expect_counts(&before, "the convolution backward, with its taps' and without", 3, 0, 0, 0);
    before = tiny_emulated_counts();
    spw_gpu_delta_backward(c.q, p[5], p[6], p[6], p[7], p[7], NULL, p[0], p[2], c.device, &in, &rule);
    expect_counts(&before, "the rule backward", 6, 0, 0, 0);
    spw_gpu_queue_sync(c.q);
    for (int k = 0; k < 8; k++)
        spw_gpu_free(gpu, p[k]);
    copying_end(&c);
}

/* ---------------------------------------------------------------- refusals */

/* A product of M 3, N 8 and K, with a GELU where gelu is set, on a device of its own: what the device says of it. */
static spw_status
try_product(uint64_t K, bool gelu, spw_error *err)
{
    spw_gpu *other = NULL;
    spw_gpu_queue *q = NULL;
    void *x = NULL;
    spw_status st;
    assert_int_equal(spw_gpu_open(&other, &(spw_gpu_options){.name = "cuda", .compute_dtype = SPW_BF16}, err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, other, SPW_QUEUE_COMPUTE, err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(other, &x, 4096, err), SPW_OK);
    spw_gpu_zero(q, x, 4096);
    if (gelu)
        spw_gpu_linear_gelu(q, x, (char *)x + 2048, (char *)x + 512, (char *)x + 1024, NULL, 3, 8, K, 0);
    else
        spw_gpu_linear(q, x, (char *)x + 512, (char *)x + 1024, NULL, 3, 8, K, 0);
    spw_gpu_queue_sync(q);
    st = spw_gpu_check(other, err);
    spw_gpu_free(other, x);
    spw_gpu_queue_destroy(q);
    spw_gpu_close(other);
    return st;
}

static void
expect_refusal(const char *status)
{
    const char *const parts[] = {status, "M 3, N 8, K 5", "bf16 to bf16", "epilogue 1"};
    spw_error err = {0};
    assert_int_equal(try_product(5, false, &err), SPW_EPOISONED);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (strstr(err.message, parts[i]) == NULL)
            fail_msg("no %s in: %s", parts[i], err.message);
}

/*
 * A status of cuBLASLt that nobody expects ends the run; the message has what it takes to look for it. That it has no algorithm is an
 * error where it was to make all products, but for one with a GELU, which has another way there.
 */
static void
test_product_fails(void **state)
{
    spw_emulate_counts before;
    spw_error err = {0};
    (void)state;
    setenv("SPW_EMULATE_BLAS", "fails", 1);
    expect_refusal("cublasLtMatmul: status 13");
    setenv("SPW_EMULATE_BLAS", "none", 1);
    assert_int_equal(try_product(5, false, &err), SPW_OK);
    setenv("SPW_CUDA_BLAS", "only", 1);
    expect_refusal("no algorithm");
    setenv("SPW_EMULATE_BLAS", "plain", 1);
    assert_int_equal(try_product(8, true, &err), SPW_OK);
    unsetenv("SPW_EMULATE_BLAS");
    before = tiny_emulated_counts();
    assert_int_equal(try_product(8, true, &err), SPW_OK);
    expect_counts(&before, "a product with its GELU", 0, 0, 0, 1);
    before = tiny_emulated_counts();
    assert_int_equal(try_product(5, true, &err), SPW_OK);
    expect_counts(&before, "a product of rows that do not begin at 16 bytes, and a GELU", 1, 0, 0, 1);
    setenv("SPW_CUDA_BLAS", "plain,only", 1);
    before = tiny_emulated_counts();
    assert_int_equal(try_product(8, true, &err), SPW_OK);
    expect_counts(&before, "a product and a GELU", 1, 0, 0, 1);
    unsetenv("SPW_CUDA_BLAS");
}

/* A queue or an event that cannot be made is refused; the device is as well as before. */
static void
test_creation_refused(void **state)
{
    bool through[3] = {false, false, false};
    (void)state;
    for (unsigned k = 1; !through[0] || !through[1] || !through[2]; k++)
        for (int kind = 0; kind < 3; kind++) {
            spw_gpu_queue *q = NULL;
            spw_gpu_event *event = NULL;
            void *p = NULL;
            spw_error err = {0};
            spw_status st;
            if (through[kind])
                continue;
            (void)tiny_emulated_refuse(k);
            st = kind == 0   ? spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, &err)
                 : kind == 1 ? spw_gpu_event_create(&event, gpu, &err)
                             : spw_gpu_alloc(gpu, &p, 4096, &err);
            through[kind] = !tiny_emulated_refuse(0);
            assert_int_equal(st, through[kind] ? SPW_OK : SPW_ENOMEM);
            assert_int_equal(spw_gpu_check(gpu, &err), SPW_OK);
            if (q != NULL)
                spw_gpu_queue_destroy(q);
            if (event != NULL)
                spw_gpu_event_destroy(event);
            spw_gpu_free(gpu, p);
        }
}

/* Where memory cannot be had in a stream's order it is had otherwise, and grows as much. */
static void
test_no_pools(void **state)
{
    enum { N = 700000 };
    spw_gpu *was = gpu;
    spw_error err = {0};
    copying c;
    (void)state;
    setenv("SPW_EMULATE_POOLS", "0", 1);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cuda"}, &err), SPW_OK);
    copying_begin(&c, N);
    for (uint64_t n = 7; n <= N; n = n == 7 ? N : N + 1) {
        float *x = c.host;
        for (uint64_t i = 0; i < n; i++)
            x[i] = (float)(i % 200);
        spw_gpu_write_bytes(c.q, c.device, x, n * 4);
        spw_gpu_copy_d2h(c.q, c.host, SPW_BF16, c.device, SPW_F32, n, c.sums);
        spw_gpu_queue_sync(c.q);
        for (uint64_t i = 0; i < n; i++)
            assert_true(spw_bf16_to_f32(((uint16_t *)c.host)[i]) == (float)(i % 200));
    }
    copying_end(&c);
    spw_gpu_close(gpu);
    gpu = was;
    unsetenv("SPW_EMULATE_POOLS");
}

/* ---------------------------------------------------------------- what a GPU would not do either */

static void
read_on_host(spw_gpu_queue *q, const volatile float *device, float *host)
{
    (void)q;
    host[0] = device[0];
}

static void
compute_on_host(spw_gpu_queue *q, const volatile float *device, float *host)
{
    (void)device;
    spw_gpu_curve(q, SPW_CURVE_GELU, host, host, 8);
    spw_gpu_queue_sync(q);
}

/* How a process ends that does it. */
static int
signal_of(void (*wrong)(spw_gpu_queue *q, const volatile float *device, float *host), spw_gpu_queue *q, void *device)
{
    int status = 0;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)signal(SIGSEGV, SIG_DFL); /* else cmocka's */
        (void)signal(SIGABRT, SIG_DFL);
        wrong(q, device, calloc(8, sizeof(float)));
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

/* The host's addresses are not the device's, and the other way: without it the emulation would be of no use to find who mixes them. */
static void
test_addresses_apart(void **state)
{
    spw_gpu_queue *q = NULL;
    void *device = NULL;
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip(); /* device memory is the host's there, or a child cannot be made beside threads */
#endif
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &device, 4096, NULL), SPW_OK);
    assert_int_equal(signal_of(read_on_host, q, device), SIGSEGV);
    assert_int_equal(signal_of(compute_on_host, q, device), SIGABRT);
    spw_gpu_free(gpu, device);
    spw_gpu_queue_destroy(q);
}

/* What the device counts and sums in pinned memory of the host comes there by itself: nothing is cleared or copied for it. */
static void
test_counts_in_pinned(void **state)
{
    enum { N = 4096 };
    const spw_gpu_update_range range = {.end = N, .grad_scale = 1};
    spw_emulate_counts before;
    spw_gpu_queue *q = NULL;
    void *device = NULL;
    spw_region region;
    uint64_t *bad;
    (void)state;
    assert_int_equal(spw_region_map(&region, 4096, 0, NULL), SPW_OK);
    assert_int_equal(spw_gpu_pin_host(gpu, region.base, region.bytes, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_H2D, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &device, N * 16, NULL), SPW_OK);
    bad = region.base;
    *bad = 0;
    spw_gpu_zero(q, device, N * 12);
    spw_gpu_queue_sync(q);
    before = tiny_emulated_counts();
    spw_gpu_update_state(q,
                         &(spw_gpu_update){.rule = SPW_RULE_SGD,
                                           .weight_dtype = SPW_F32,
                                           .grad_dtype = SPW_F32,
                                           .moment_bytes = 4,
                                           .elems = N,
                                           .weights = device,
                                           .record = (char *)device + (size_t)N * 4,
                                           .grad = (char *)device + (size_t)N * 12}, /* 0xff: each is a NaN */
                         &range, 1, bad);
    expect_counts(&before, "an update", 1, 0, 0, 0);
    spw_gpu_queue_sync(q);
    assert_int_equal(*bad, N);
    *bad = 0;
    before = tiny_emulated_counts();
    spw_gpu_momentum(q,
                     &(spw_gpu_update){
                         .rule = SPW_RULE_MUON, .grad_dtype = SPW_F32, .moment_bytes = 4, .elems = N, .record = device},
                     (char *)device + (size_t)N * 12, &range, 1, (double *)(void *)(bad + 1), bad);
    expect_counts(&before, "Muon's first half", 1, 0, 0, 0);
    spw_gpu_queue_sync(q);
    assert_int_equal(*bad, N);
    assert_true(isnan(*(double *)(void *)(bad + 1)));
    spw_gpu_free(gpu, device);
    spw_gpu_queue_destroy(q);
    spw_gpu_unpin_host(gpu, region.base);
    spw_region_unmap(&region);
}

/* Of 16 GiB that are free one is left to what nobody counts. */
static void
test_reserve(void **state)
{
    (void)state;
    assert_int_equal(spw_gpu_get_info(gpu)->memory_bytes, 15ull << 30);
}

/*
 * A pass that fails leaves what it has submitted of the blocks before under way. The engine's end waits for that before it gives memory back: the
 * runtime would wait too, but only for what it frees itself.
 */
static void
test_end_under_way(void **state)
{
    unsigned under_way = 0;
    (void)state;
    if (SANITIZED) /* there device memory is the host's, and nobody knows who uses it */
        skip();
    for (uint64_t k = 1; k < 8; k++) {
        spw_test_aio_schedule faults = {.seed = k};
        const int32_t tokens[] = {1, 2, 3};
        spw_emulate_counts before;
        float logits[1024];
        rig r;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
        snprintf(r.c.run.device, sizeof r.c.run.device, "cuda");
        r.c.run.prefetch = false;
        r.c.run.weight_slots = 1;
        r.c.run.aio_faults = &faults;
        rig_need(&r, rig_begin(&r));
        rig_need(&r, spw_engine_drain(r.e, &r.err));
        assert_true(r.c.model.vocab <= 1024);
        faults.error_at = faults.transfers + k;
        if (spw_engine_logits(r.e, tokens, 3, logits, &r.err) != SPW_OK)
            assert_int_equal(r.err.status, SPW_EIO);
        before = tiny_emulated_counts();
        under_way += before.under_way > 0;
        rig_remove(&r);
        assert_int_equal(tiny_emulated_counts().freed_in_use - before.freed_in_use, 0);
    }
    assert_true(under_way > 0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums_in_one),       cmocka_unit_test(test_pieces_in_order),
        cmocka_unit_test(test_sums_do_not_block), cmocka_unit_test(test_small_copies),
        cmocka_unit_test(test_product_fails),     cmocka_unit_test(test_creation_refused),
        cmocka_unit_test(test_no_pools),          cmocka_unit_test(test_addresses_apart),
        cmocka_unit_test(test_counts_in_pinned),  cmocka_unit_test(test_reserve),
        cmocka_unit_test(test_linear_attention),  cmocka_unit_test(test_end_under_way),
    };
    spw_error err = {0};
    int failed;
    if (!tiny_emulated_device()) {
        printf("1..1\nok 1 - cuda host # SKIP no C++ compiler when this was built\n");
        return 77;
    }
    setenv("SPW_EMULATE_STREAMS", "late", 1);
    setenv("SPW_EMULATE_GUARD", "1", 1);
    if (spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cuda"}, &err) != SPW_OK) {
        printf("not ok - %s\n", err.message);
        return 1;
    }
    failed = cmocka_run_group_tests_name("cuda host", tests, NULL, NULL);
    spw_gpu_close(gpu);
    return failed;
}
