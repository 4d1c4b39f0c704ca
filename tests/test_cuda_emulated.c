/*
 * The cuda device without a GPU: its plugin compiled for the CPU (tests/emulate), opened as the real one is, and every operation
 * beside the cpu device, in fp32, bf16 and fp16. The threads of a block run in three orders, which must not change a bit: a barrier
 * that is missing shows there (emulate.cpp). In fp32 streams work as late as they may besides, so that a missing wait shows.
 * Products are those of an emulated cuBLASLt (cublaslt.cpp), in all the ways that it may refuse them, and our own.
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

/* Opens the device, with products as the library makes them that SPW_EMULATE_BLAS says. */
static bool
open_device(spw_dtype type, const char *blas, const char *called)
{
    spw_gpu_options options = {.name = "cuda", .compute_dtype = type};
    spw_error err = {0};
    setenv("SPW_EMULATE_BLAS", blas, 1);
    if (spw_gpu_open(&device.gpu, &options, &err) != SPW_OK)
        printf("not ok - %s\n", err.message);
    else if (strstr(spw_gpu_get_info(device.gpu)->description, called) == NULL)
        printf("not ok - products of %s, not of %s\n", spw_gpu_get_info(device.gpu)->description, called);
    else
        return true;
    return false;
}

int
main(int argc, char **argv)
{
    const bool races = getenv("SPW_EMULATE_RACES") != NULL; /* in any order of threads, and fp16 goes bf16's way */
    int failed = 0;
    if (argc == 3 && strcmp(argv[1], "--only") == 0) /* by hand: test_atten* */
        cmocka_set_test_filter(argv[2]);
    if (!tiny_emulated_device()) {
        printf("1..1\nok 1 - cuda emulated # SKIP no C++ compiler when this was built\n");
        return 77;
    }
    for (int t = SANITIZED ? SPW_BF16 : 0; t < (SANITIZED || races ? SPW_F16 : SPW_DTYPE_COUNT);
         t++) { /* with them, for accesses out of bounds */
        if (!open_device((spw_dtype)t, "", "cuBLASLt"))
            return 1;
        device.orders = SANITIZED || races || t == SPW_F16 ? orders + 2 : t == SPW_BF16 ? orders + 1 : orders;
        setenv("SPW_EMULATE_STREAMS", t == SPW_F32 ? "late" : "", 1);
        failed += parity_run_all(&device, groups[t]);
        spw_gpu_close(device.gpu);
    }
    /* Without its epilogues, and without it; fp16 goes bf16's way. */
    for (int t = 0; t < (SANITIZED ? 0 : SPW_F16); t++) {
        if (!open_device((spw_dtype)t, "plain", "cuBLASLt"))
            return 1;
        failed += parity_run_products(&device, "products without epilogues");
        spw_gpu_close(device.gpu);
        setenv("SPW_CUDA_BLAS", "0", 1);
        if (!open_device((spw_dtype)t, "", "own products"))
            return 1;
        failed += parity_run_products(&device, "own products");
        spw_gpu_close(device.gpu);
        unsetenv("SPW_CUDA_BLAS");
    }
    device.orders = orders + (races ? 2 : 1);
    setenv("SPW_EMULATE_CAPABILITY", "90", 1);
    for (int k = 0; argc == 1 && !SANITIZED && k < 2; k++) { /* a Hopper's products */
        cmocka_set_test_filter(k == 0 ? "test_attention*" : "test_linear_each");
        for (int t = SPW_F32 + 1; t < (k == 0 && !races ? SPW_DTYPE_COUNT : SPW_F16); t++) {
            if (!open_device((spw_dtype)t, "", "sm_90"))
                return 1;
            failed += parity_run_all(&device, "as on a Hopper");
            spw_gpu_close(device.gpu);
        }
    }
    return failed;
}
