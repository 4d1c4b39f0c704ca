/*
 * The cuda device on a GPU: every operation beside the cpu device, in fp32, bf16 and fp16, on small odd shapes and on those of real
 * models, and again for equal bits. Without a GPU it skips and says what is missing.
 *   --small       for compute-sanitizer
 *   --type TYPE   one type alone: a fault leaves a process no device
 *   --only NAME   one test alone
 *   --list        the tests' names; --about: the device's description
 * Prints the worst error of each operation. SPW_SEED draws other numbers.
 */
#include "lib_parity.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static parity device;
static const char *const groups[SPW_DTYPE_COUNT] = {"cuda fp32", "cuda bf16", "cuda fp16"};

static const char *
option(int argc, char **argv, const char *name, bool value)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], name) == 0)
            return !value ? name : i + 1 < argc ? argv[i + 1] : "";
    }
    return NULL;
}

int
main(int argc, char **argv)
{
    const char *type = option(argc, argv, "--type", true), *only = option(argc, argv, "--only", true);
    int failed = 0;
    device.large = option(argc, argv, "--small", false) == NULL;
    if (option(argc, argv, "--list", false) != NULL) {
        parity_list();
        return 0;
    }
    if (only != NULL)
        cmocka_set_test_filter(only);
    for (int t = 0; t < SPW_DTYPE_COUNT; t++) {
        spw_gpu_options options = {.name = "cuda", .compute_dtype = (spw_dtype)t};
        spw_error err = {0};
        if (type != NULL && strcmp(type, spw_dtype_name((spw_dtype)t)) != 0)
            continue;
        if (spw_gpu_open(&device.gpu, &options, &err) != SPW_OK) {
            printf("1..1\nok 1 - cuda # SKIP %s\n", err.message);
            return 77;
        }
        printf("# %s\n", spw_gpu_get_info(device.gpu)->description);
        if (option(argc, argv, "--about", false) != NULL)
            return 0;
        failed += parity_run_all(&device, groups[t]);
        spw_gpu_close(device.gpu);
    }
    return failed;
}
