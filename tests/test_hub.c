/* Models of the hub by name: what is found in a cache as huggingface_hub makes it, and what is not. */
#include "lib_tiny.h"
#include "spw_files.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

static char dir[256], cache[300];

static void
put(const char *below, const char *text)
{
    char path[700], *slash;
    spw_error err = {0};
    snprintf(path, sizeof path, "%s/%s", cache, below);
    slash = strrchr(path, '/');
    *slash = '\0';
    assert_int_equal(spw_dir_make(path, &err), SPW_OK);
    *slash = '/';
    assert_int_equal(spw_file_write_text(path, text, &err), SPW_OK);
}

static void
finds(const char *name, const char *below)
{
    char out[SPW_HUB_PATH_BYTES], want[700];
    snprintf(want, sizeof want, "%s/%s", cache, below);
    assert_true(spw_hub_find(out, name));
    assert_string_equal(out, want);
}

static void
misses(const char *name)
{
    char out[SPW_HUB_PATH_BYTES];
    assert_false(spw_hub_find(out, name));
}

/* Of main, of a branch that was asked for, by its commit; one that was fetched by its commit alone; one from before names had owners. */
static void
test_found(void **state)
{
    (void)state;
    put("models--owner--some-Model_1.5/refs/main", "aaaa\n");
    put("models--owner--some-Model_1.5/refs/v2", "bbbb");
    put("models--owner--some-Model_1.5/snapshots/aaaa/config.json", "{}");
    put("models--owner--some-Model_1.5/snapshots/bbbb/config.json", "{}");
    put("models--owner--one/snapshots/cccc/config.json", "{}");
    put("models--gpt2/refs/main", "dddd");
    put("models--gpt2/snapshots/dddd/config.json", "{}");
    finds("owner/some-Model_1.5", "models--owner--some-Model_1.5/snapshots/aaaa");
    finds("owner/some-Model_1.5@main", "models--owner--some-Model_1.5/snapshots/aaaa");
    finds("owner/some-Model_1.5@v2", "models--owner--some-Model_1.5/snapshots/bbbb");
    finds("owner/some-Model_1.5@bbbb", "models--owner--some-Model_1.5/snapshots/bbbb");
    finds("owner/one", "models--owner--one/snapshots/cccc");
    finds("gpt2", "models--gpt2/snapshots/dddd");
    assert_int_equal(spw_hub_count("owner/some-Model_1.5"), 2);
    assert_int_equal(spw_hub_count("owner/nothing"), 0);
}

/* What no model of the hub can be called, and what is not there whole; what lies at the path itself is meant by it. */
static void
test_missed(void **state)
{
    static const char *const never[] = {"",
                                        "/",
                                        "owner/",
                                        "/name",
                                        "owner/name/more",
                                        "owner/../x",
                                        "./one",
                                        "../one",
                                        "owner/one@cccd",
                                        "owner/one@",
                                        "owner--one",
                                        "owner/a--b",
                                        "owner/one@../../one/snapshots/cccc",
                                        "owner/one@/.."};
    (void)state;
    for (size_t i = 0; i < sizeof never / sizeof never[0]; i++)
        misses(never[i]);
    put("models--owner--torn/refs/main", "eeee");
    misses("owner/torn");
    put("models--owner--two/snapshots/aaaa/config.json", "{}");
    put("models--owner--two/snapshots/bbbb/config.json", "{}");
    misses("owner/two");
    put("models--owner--bad/refs/main", "../../models--owner--one/snapshots/cccc");
    put("models--owner--bad/snapshots/a/x", "");
    put("models--owner--bad/snapshots/b/x", "");
    misses("owner/bad");
    assert_int_equal(chdir(dir), 0);
    assert_int_equal(mkdir("owner", 0700), 0);
    assert_int_equal(mkdir("owner/one", 0700), 0);
    misses("owner/one");
    assert_int_equal(rmdir("owner/one"), 0);
    finds("owner/one", "models--owner--one/snapshots/cccc");
}

/* As its documentation says: the most particular variable first. */
static void
test_where(void **state)
{
    char out[SPW_HUB_PATH_BYTES], before[300], home[300] = "";
    (void)state;
    memcpy(before, cache, sizeof before);
    snprintf(home, sizeof home, "%s", getenv("HOME") != NULL ? getenv("HOME") : "");
    setenv("HF_HOME", "/home-of-hf", 1);
    setenv("XDG_CACHE_HOME", "/xdg", 1);
    setenv("HOME", "/somebody", 1);
    assert_true(spw_hub_cache(out));
    assert_string_equal(out, before);
    unsetenv("HF_HUB_CACHE");
    assert_true(spw_hub_cache(out));
    assert_string_equal(out, "/home-of-hf/hub");
    unsetenv("HF_HOME");
    assert_true(spw_hub_cache(out));
    assert_string_equal(out, "/xdg/huggingface/hub");
    unsetenv("XDG_CACHE_HOME");
    assert_true(spw_hub_cache(out));
    assert_string_equal(out, "/somebody/.cache/huggingface/hub");
    unsetenv("HOME");
    assert_false(spw_hub_cache(out));
    misses("owner/one");
    setenv("HOME", home, 1);
    setenv("HF_HUB_CACHE", before, 1);
}

/* The name of a folder in it, which goes where folders of this machine say nothing. */
static void
test_named(void **state)
{
    static const char *const none[] = {"/a/models--owner--name", "/a/models--owner--name/snapshots/",
                                       "/a/owner/snapshots/ab", "/a/models--owner--name/snapshots/ab/original", ""};
    char name[SPW_HUB_NAME_BYTES], commit[SPW_HUB_NAME_BYTES];
    (void)state;
    assert_true(spw_hub_name("/a/models--owner--some-Model_1.5/snapshots/ab12", name, commit));
    assert_string_equal(name, "owner/some-Model_1.5");
    assert_string_equal(commit, "ab12");
    assert_true(spw_hub_name("models--gpt2/snapshots/ab12/", name, commit));
    assert_string_equal(name, "gpt2");
    assert_string_equal(commit, "ab12");
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++)
        assert_false(spw_hub_name(none[i], name, commit));
}

static int
setup(void **state)
{
    (void)state;
    tiny_dir_make(dir);
    snprintf(cache, sizeof cache, "%s/cache", dir);
    return setenv("HF_HUB_CACHE", cache, 1);
}

static int
teardown(void **state)
{
    (void)state;
    tiny_dir_remove(dir);
    return 0;
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_found), cmocka_unit_test(test_missed),
                                       cmocka_unit_test(test_where), cmocka_unit_test(test_named)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
