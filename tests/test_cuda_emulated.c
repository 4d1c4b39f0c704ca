/*
 * The cuda device without a GPU: its plugin compiled for the CPU (tests/emulate), opened as the real one is, and every operation
 * beside the cpu device, in fp32, bf16 and fp16. The threads of a block run in three orders, which must not change a bit: a barrier
 * that is missing shows there (emulate.cpp). In fp32 streams work as late as they may besides, so that a missing wait shows.
 */
#include "lib_parity.h"
#include "lib_tiny.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static const char *const orders[] = {"", "ahead", "behind", NULL};
static parity device;
static const char *const groups[SPW_DTYPE_COUNT] = {"emulated fp32", "emulated bf16", "emulated fp16"};

int
main(void)
{
    int failed = 0;
    if (!tiny_emulated_device()) {
        printf("1..1\nok 1 - cuda emulated # SKIP no C++ compiler when this was built\n");
        return 77;
    }
    for (int t = 0; t < (SANITIZED ? 2 : SPW_DTYPE_COUNT); t++) { /* with them, for accesses out of bounds */
        spw_gpu_options options = {.name = "cuda", .compute_dtype = (spw_dtype)t};
        spw_error err = {0};
        if (spw_gpu_open(&device.gpu, &options, &err) != SPW_OK) {
            printf("not ok - %s\n", err.message);
            return 1;
        }
        device.orders = SANITIZED ? orders + 2 : orders;
        setenv("SPW_EMULATE_STREAMS", t == SPW_F32 ? "late" : "", 1);
        failed += parity_run_all(&device, groups[t]);
        spw_gpu_close(device.gpu);
    }
    return failed;
}
