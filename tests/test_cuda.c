/*
 * The cuda device on a GPU: every operation beside the cpu device, in fp32 and in bf16, on small odd shapes and on those of real
 * models, and again for equal bits. Without a GPU it skips and says what is missing. --small: for compute-sanitizer.
 */
#include "lib_parity.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

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

int
main(int argc, char **argv)
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
    int failed = 0;
    device.large = !(argc > 1 && strcmp(argv[1], "--small") == 0);
    for (int f32 = 1; f32 >= 0; f32--) {
        spw_gpu_options options = {.name = "cuda", .full_precision = f32};
        spw_error err = {0};
        if (spw_gpu_open(&device.gpu, &options, &err) != SPW_OK) {
            printf("1..1\nok 1 - cuda # SKIP %s\n", err.message);
            return 77;
        }
        printf("# %s\n", spw_gpu_get_info(device.gpu)->description);
        failed += cmocka_run_group_tests_name(f32 ? "cuda fp32" : "cuda bf16", tests, NULL, NULL);
        spw_gpu_close(device.gpu);
    }
    return failed;
}
