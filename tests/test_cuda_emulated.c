/*
 * The cuda device without a GPU: its plugin compiled for the CPU (tests/emulate), opened as the real one is, and every operation
 * beside the cpu device, in fp32 and in bf16. The threads of a block run in three orders, which must not change a bit: a barrier
 * that is missing shows there (emulate.cpp). In fp32 streams work as late as they may besides, so that a missing wait shows.
 */
#include "lib_parity.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

static const char *const orders[] = {"", "ahead", "behind", NULL};
static parity device;

/* The emulated plugin of the same build; false where there was no C++ compiler. */
static bool
find_plugin(char *path, size_t bytes)
{
    char exe[1024];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    char *slash;
    if (n <= 0)
        return false;
    exe[n] = '\0';
    slash = strrchr(exe, '/');
    if (slash != NULL)
        *slash = '\0';
    snprintf(path, bytes, "%s/../emulated/spillway-cuda.so", exe);
    return access(path, R_OK) == 0;
}

int
main(void)
{
    char path[1200];
    int failed = 0;
    if (!find_plugin(path, sizeof path)) {
        printf("1..1\nok 1 - cuda emulated # SKIP no C++ compiler when this was built\n");
        return 77;
    }
    setenv("SPW_CUDA_PLUGIN", path, 1);
    for (int f32 = 1; f32 >= 0; f32--) {
        spw_gpu_options options = {.name = "cuda", .full_precision = f32};
        spw_error err = {0};
        if (spw_gpu_open(&device.gpu, &options, &err) != SPW_OK) {
            printf("not ok - %s\n", err.message);
            return 1;
        }
        device.orders = orders;
        setenv("SPW_EMULATE_STREAMS", f32 ? "late" : "", 1);
        failed += parity_run_all(&device, f32 ? "emulated fp32" : "emulated bf16");
        spw_gpu_close(device.gpu);
    }
    return failed;
}
