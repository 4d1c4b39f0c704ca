/* The list of the checks. */
#include "lib_subject.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

static parity *device; /* under test */

#define CHECK(name)                                                                                                    \
    static void test_##name(void **state)                                                                              \
    {                                                                                                                  \
        (void)state;                                                                                                   \
        parity_##name(device);                                                                                         \
    }

CHECK(linear)
CHECK(linear_and_more)
CHECK(linear_by_row)
CHECK(elements)
CHECK(norms)
CHECK(embedding_and_rope)
CHECK(loss)
CHECK(head)
CHECK(preference)
CHECK(attention)
CHECK(attention_cached)
CHECK(chunks)
CHECK(choose_keys)
CHECK(compress)
CHECK(streams)
CHECK(attention_bits)
CHECK(conv)
CHECK(delta)
CHECK(delta_cached)
CHECK(delta_bits)
CHECK(delta_bounds)
CHECK(delta_turns)
CHECK(copies)
CHECK(codes)
CHECK(queues)
CHECK(memory)
CHECK(spans)
CHECK(update)
CHECK(experts)
CHECK(linear_each)
CHECK(fp8)
CHECK(orthogonal)
CHECK(nan_spreads)

static int
say_errors(void **state)
{
    (void)state;
    subject_report(spw_gpu_get_info(device->gpu)->compute_dtype);
    return 0;
}

static const struct CMUnitTest all[] = {
    cmocka_unit_test_teardown(test_linear, say_errors),
    cmocka_unit_test_teardown(test_linear_and_more, say_errors),
    cmocka_unit_test_teardown(test_linear_by_row, say_errors),
    cmocka_unit_test_teardown(test_elements, say_errors),
    cmocka_unit_test_teardown(test_norms, say_errors),
    cmocka_unit_test_teardown(test_embedding_and_rope, say_errors),
    cmocka_unit_test_teardown(test_loss, say_errors),
    cmocka_unit_test_teardown(test_head, say_errors),
    cmocka_unit_test_teardown(test_preference, say_errors),
    cmocka_unit_test_teardown(test_attention, say_errors),
    cmocka_unit_test_teardown(test_attention_cached, say_errors),
    cmocka_unit_test_teardown(test_chunks, say_errors),
    cmocka_unit_test_teardown(test_choose_keys, say_errors),
    cmocka_unit_test_teardown(test_compress, say_errors),
    cmocka_unit_test_teardown(test_streams, say_errors),
    cmocka_unit_test_teardown(test_attention_bits, say_errors),
    cmocka_unit_test_teardown(test_conv, say_errors),
    cmocka_unit_test_teardown(test_delta, say_errors),
    cmocka_unit_test_teardown(test_delta_cached, say_errors),
    cmocka_unit_test_teardown(test_delta_bits, say_errors),
    cmocka_unit_test_teardown(test_delta_bounds, say_errors),
    cmocka_unit_test_teardown(test_delta_turns, say_errors),
    cmocka_unit_test_teardown(test_copies, say_errors),
    cmocka_unit_test_teardown(test_codes, say_errors),
    cmocka_unit_test_teardown(test_queues, say_errors),
    cmocka_unit_test_teardown(test_memory, say_errors),
    cmocka_unit_test_teardown(test_nan_spreads, say_errors),
    cmocka_unit_test_teardown(test_experts, say_errors),
    cmocka_unit_test_teardown(test_linear_each, say_errors),
    cmocka_unit_test_teardown(test_fp8, say_errors),
    cmocka_unit_test(test_orthogonal),
    cmocka_unit_test_teardown(test_update, say_errors),
    cmocka_unit_test_teardown(test_spans, say_errors),
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
        cmocka_unit_test_teardown(test_linear, say_errors), cmocka_unit_test_teardown(test_linear_and_more, say_errors),
        cmocka_unit_test_teardown(test_loss, say_errors),   cmocka_unit_test_teardown(test_head, say_errors),
        cmocka_unit_test_teardown(test_fp8, say_errors),
    };
    device = p;
    return cmocka_run_group_tests_name(group, tests, NULL, NULL);
}
