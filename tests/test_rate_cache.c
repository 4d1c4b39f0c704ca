/* The cache of measured rates: what was put is there for the next opener, and nothing that is wrong with its file is an error. */
#include "lib_tiny.h"
#include "runtime_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

/* What was put is there for the next opener; old, odd and damaged entries are not, and no file is an error. */
static void
test_rate_cache(void **state)
{
    char dir[256], text[512];
    double v[2] = {1.5e9, 2.5e9}, got[3], age = -1;
    rate_cache *c;
    FILE *f;
    (void)state;
    tiny_dir_make(dir);
    setenv("XDG_CACHE_HOME", dir, 1);
    c = spw__rate_cache_open();
    assert_non_null(c);
    assert_false(spw__rate_cache_get(c, "a", 1000, got, 2, &age));
    spw__rate_cache_put(c, "a", 1000, v, 2);
    spw__rate_cache_close(c);
    c = spw__rate_cache_open();
    assert_true(spw__rate_cache_get(c, "a", 1000 + 86400, got, 2, &age));
    assert_true(got[0] == 1.5e9 && got[1] == 2.5e9 && age == 1);
    assert_false(spw__rate_cache_get(c, "a", 1000 + 31 * 86400, got, 2, &age)); /* too old */
    assert_false(spw__rate_cache_get(c, "a", 999, got, 2, &age));               /* from the future */
    assert_false(spw__rate_cache_get(c, "a", 1000, got, 3, &age));
    assert_false(spw__rate_cache_get(c, "b", 1000, got, 2, &age));
    snprintf(text, sizeof text, "%s", spw__rate_cache_path(c));
    spw__rate_cache_close(c);
    for (int k = 0; k < 3; k++) {
        static const char *const damaged[3] = {"{\"spillway_", "[1, 2]",
                                               "{\"spillway_rates\": 1, \"entries\": {\"a\": {\"time\": 1000, "
                                               "\"values\": [-1, \"x\"]}}}"};
        assert_non_null(f = fopen(text, "we"));
        fputs(damaged[k], f);
        fclose(f);
        c = spw__rate_cache_open();
        assert_non_null(c);
        assert_false(spw__rate_cache_get(c, "a", 1000, got, 2, &age));
        spw__rate_cache_close(c);
    }
    setenv("XDG_CACHE_HOME", "/proc/nowhere", 1); /* cannot be written */
    c = spw__rate_cache_open();
    spw__rate_cache_put(c, "a", 1000, v, 2);
    spw__rate_cache_close(c);
    unsetenv("XDG_CACHE_HOME");
    tiny_dir_remove(dir);
}

static int
teardown(void **state)
{
    (void)state;
    return spw_test_live_allocs() == 0 ? 0 : -1;
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rate_cache)};
    return cmocka_run_group_tests(tests, NULL, teardown);
}
