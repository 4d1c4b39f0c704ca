/*
 * The cuda device on a GPU: every operation beside the cpu device, in fp32, bf16 and fp16, on small odd shapes and on those of real
 * models, and again for equal bits. Without a GPU it skips and says what is missing. --small: for compute-sanitizer.
 */
#include "lib_parity.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static parity device;
static const char *const groups[SPW_DTYPE_COUNT] = {"cuda fp32", "cuda bf16", "cuda fp16"};

int
main(int argc, char **argv)
{
    int failed = 0;
    device.large = !(argc > 1 && strcmp(argv[1], "--small") == 0);
    for (int t = 0; t < SPW_DTYPE_COUNT; t++) {
        spw_gpu_options options = {.name = "cuda", .compute_dtype = (spw_dtype)t};
        spw_error err = {0};
        if (spw_gpu_open(&device.gpu, &options, &err) != SPW_OK) {
            printf("1..1\nok 1 - cuda # SKIP %s\n", err.message);
            return 77;
        }
        printf("# %s\n", spw_gpu_get_info(device.gpu)->description);
        failed += parity_run_all(&device, groups[t]);
        spw_gpu_close(device.gpu);
    }
    return failed;
}
