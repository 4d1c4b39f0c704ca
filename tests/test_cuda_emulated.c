/*
 * The cuda device without a GPU: its plugin compiled for the CPU (tests/emulate), opened as the real one is, and every operation
 * beside the cpu device, in fp32 and in bf16. The threads of a block run in three orders, which must not change a bit: a barrier
 * that is missing shows there (emulate.cpp). In fp32 streams work as late as they may besides, so that a missing wait shows.
 */
#include "lib_parity.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

static const char *const orders[] = {"", "ahead", "behind", NULL};
static parity device;

static void
test_linear(void **state)
{
    (void)state;
    parity_linear(&device);
}

static void
test_linear_by_row(void **state)
{
    (void)state;
    parity_linear_by_row(&device);
}

static void
test_elements(void **state)
{
    (void)state;
    parity_elements(&device);
}

static void
test_norms(void **state)
{
    (void)state;
    parity_norms(&device);
}

static void
test_embedding_and_rope(void **state)
{
    (void)state;
    parity_embedding_and_rope(&device);
}

static void
test_loss(void **state)
{
    (void)state;
    parity_loss(&device);
}

static void
test_attention(void **state)
{
    (void)state;
    parity_attention(&device);
}

static void
test_attention_cached(void **state)
{
    (void)state;
    parity_attention_cached(&device);
}

static void
test_attention_bits(void **state)
{
    (void)state;
    parity_attention_bits(&device);
}

static void
test_copies(void **state)
{
    (void)state;
    parity_copies(&device);
}

static void
test_queues(void **state)
{
    (void)state;
    parity_queues(&device);
}

static void
test_memory(void **state)
{
    (void)state;
    parity_memory(&device);
}

static void
test_nan_spreads(void **state)
{
    (void)state;
    parity_nan_spreads(&device);
}

/* The emulated plugin of the same build; false where there was no C++ compiler. */
static bool
find_plugin(char *path, size_t bytes)
{
    char exe[1024];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    char *slash;
    if (n <= 0)
        return false;
    exe[n] = '\0';
    slash = strrchr(exe, '/');
    if (slash != NULL)
        *slash = '\0';
    snprintf(path, bytes, "%s/../emulated/spillway-cuda.so", exe);
    return access(path, R_OK) == 0;
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_linear_by_row),
        cmocka_unit_test(test_elements),
        cmocka_unit_test(test_norms),
        cmocka_unit_test(test_embedding_and_rope),
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_cached),
        cmocka_unit_test(test_attention_bits),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_queues),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_nan_spreads),
    };
    char path[1200];
    int failed = 0;
    if (!find_plugin(path, sizeof path)) {
        printf("1..1\nok 1 - cuda emulated # SKIP no C++ compiler when this was built\n");
        return 77;
    }
    setenv("SPW_CUDA_PLUGIN", path, 1);
    for (int f32 = 1; f32 >= 0; f32--) {
        spw_gpu_options options = {.name = "cuda", .full_precision = f32};
        spw_error err = {0};
        if (spw_gpu_open(&device.gpu, &options, &err) != SPW_OK) {
            printf("not ok - %s\n", err.message);
            return 1;
        }
        device.orders = orders;
        setenv("SPW_EMULATE_STREAMS", f32 ? "late" : "", 1);
        failed += cmocka_run_group_tests_name(f32 ? "emulated fp32" : "emulated bf16", tests, NULL, NULL);
        spw_gpu_close(device.gpu);
    }
    return failed;
}
