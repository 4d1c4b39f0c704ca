/*
 * Where threads and memory go: CPU limits and topologies read from made-up trees, and the placement policy on hand-made
 * and on random machines.
 */
#include "spw_base.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

static char root[256];

/* Makes root/path, with the folders above it, holding text. */
static void
put(const char *path, const char *text)
{
    char full[512];
    FILE *f;
    snprintf(full, sizeof full, "%s/%s", root, path);
    for (char *slash = strchr(full + strlen(root) + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(full, 0700);
        *slash = '/';
    }
    f = fopen(full, "we");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static int
make_root(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "%s/spw-topology-XXXXXX", getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp");
    return mkdtemp(root) == NULL ? -1 : 0;
}

static int
remove_root(void **state)
{
    char command[300];
    (void)state;
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command);
}

/* The CPU quota is the least on the way from the process' cgroup up to the mount, in both versions of cgroups. */
static void
test_cgroup_quota(void **state)
{
    (void)state;
    assert_true(isinf(spw_cgroup_cpu_quota(root)));
    put("sys/fs/cgroup/cpu.max", "max 100000\n");
    assert_true(isinf(spw_cgroup_cpu_quota(root)));
    put("proc/self/cgroup", "0::/a.slice/job\n");
    put("sys/fs/cgroup/a.slice/job/cpu.max", "350000 100000\n");
    assert_float_equal(spw_cgroup_cpu_quota(root), 3.5, 0);
    put("sys/fs/cgroup/a.slice/cpu.max", "100000 50000\n");
    assert_float_equal(spw_cgroup_cpu_quota(root), 2.0, 0);
    put("sys/fs/cgroup/cpu.max", "50000 100000\n");
    assert_float_equal(spw_cgroup_cpu_quota(root), 0.5, 0);
    put("sys/fs/cgroup/cpu.max", "nonsense\n");
    put("proc/self/cgroup", "12:memory:/m\n4:cpuacct,cpu:/docker/x\n1:name=systemd:/a.slice\nbroken\n0::/\n");
    assert_true(isinf(spw_cgroup_cpu_quota(root)));
    put("sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us", "-1\n");
    put("sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us", "100000\n");
    assert_true(isinf(spw_cgroup_cpu_quota(root)));
    put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000\n"); /* a container sees its own limit at the mount */
    put("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    assert_float_equal(spw_cgroup_cpu_quota(root), 4.0, 0);
    assert_true(spw_cpu_allowed_count() >= 1);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_cgroup_quota, make_root, remove_root),
    };
    return cmocka_run_group_tests_name("topology", tests, NULL, NULL);
}
