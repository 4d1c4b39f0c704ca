/*
 * An engine that has trained and begins anew, as one that has just been made: the same losses from the same initial weights.
 */
#include "lib_rig.h"
#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>
#include <cmocka.h>

/* An engine that has trained begins anew. */
static void
test_begun_anew(void **state)
{
    (void)state;
    alarm(200); /* before it was mended the next step waited for ever */
    for (int k = 0; k < 2; k++) {
        rig r;
        double want[3];
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, k == 0 ? SPW_TIER_HOST : SPW_TIER_NVME);
        rig_need(&r, rig_begin(&r));
        for (int run = 0; run < 2; run++) {
            for (uint64_t s = 0; s < 3; s++) {
                spw_step_result result;
                assert_int_equal(rig_step(&r, s, &result), SPW_OK);
                if (run == 0)
                    want[s] = result.loss;
                assert_memory_equal(&want[s], &result.loss, sizeof want[s]);
            }
            assert_int_equal(spw_engine_init_params(r.e, r.c.run.seed, &r.err), SPW_OK);
            spw_engine_set_updates(r.e, 0);
        }
        rig_remove(&r);
    }
    alarm(0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_begun_anew),
    };
    return cmocka_run_group_tests_name("begun_anew", tests, NULL, NULL);
}
