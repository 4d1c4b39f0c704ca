/* The list of the checks. */
#include "lib_parity.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

static parity *device; /* under test */

static void
test_linear(void **state)
{
    (void)state;
    parity_linear(device);
}

static void
test_linear_and_more(void **state)
{
    (void)state;
    parity_linear_and_more(device);
}

static void
test_linear_by_row(void **state)
{
    (void)state;
    parity_linear_by_row(device);
}

static void
test_elements(void **state)
{
    (void)state;
    parity_elements(device);
}

static void
test_norms(void **state)
{
    (void)state;
    parity_norms(device);
}

static void
test_embedding_and_rope(void **state)
{
    (void)state;
    parity_embedding_and_rope(device);
}

static void
test_loss(void **state)
{
    (void)state;
    parity_loss(device);
}

static void
test_attention(void **state)
{
    (void)state;
    parity_attention(device);
}

static void
test_attention_cached(void **state)
{
    (void)state;
    parity_attention_cached(device);
}

static void
test_attention_bits(void **state)
{
    (void)state;
    parity_attention_bits(device);
}

static void
test_copies(void **state)
{
    (void)state;
    parity_copies(device);
}

static void
test_codes(void **state)
{
    (void)state;
    parity_codes(device);
}

static void
test_queues(void **state)
{
    (void)state;
    parity_queues(device);
}

static void
test_memory(void **state)
{
    (void)state;
    parity_memory(device);
}

static void
test_spans(void **state)
{
    (void)state;
    parity_spans(device);
}

static void
test_update(void **state)
{
    (void)state;
    parity_update(device);
}

static void
test_experts(void **state)
{
    (void)state;
    parity_experts(device);
}

static void
test_linear_each(void **state)
{
    (void)state;
    parity_linear_each(device);
}

static void
test_fp8(void **state)
{
    (void)state;
    parity_fp8(device);
}

static void
test_nan_spreads(void **state)
{
    (void)state;
    parity_nan_spreads(device);
}

static const struct CMUnitTest all[] = {
    cmocka_unit_test(test_linear),
    cmocka_unit_test(test_linear_and_more),
    cmocka_unit_test(test_linear_by_row),
    cmocka_unit_test(test_elements),
    cmocka_unit_test(test_norms),
    cmocka_unit_test(test_embedding_and_rope),
    cmocka_unit_test(test_loss),
    cmocka_unit_test(test_attention),
    cmocka_unit_test(test_attention_cached),
    cmocka_unit_test(test_attention_bits),
    cmocka_unit_test(test_copies),
    cmocka_unit_test(test_codes),
    cmocka_unit_test(test_queues),
    cmocka_unit_test(test_memory),
    cmocka_unit_test(test_nan_spreads),
    cmocka_unit_test(test_experts),
    cmocka_unit_test(test_linear_each),
    cmocka_unit_test(test_fp8),
    cmocka_unit_test(test_update),
    cmocka_unit_test(test_spans),
};

void
parity_list(void)
{
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        printf("%s\n", all[i].name);
}

int
parity_run_all(parity *p, const char *group)
{
    device = p;
    return cmocka_run_group_tests_name(group, all, NULL, NULL);
}

int
parity_run_products(parity *p, const char *group)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_linear_and_more),
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_fp8),
    };
    device = p;
    return cmocka_run_group_tests_name(group, tests, NULL, NULL);
}
