/*
 * libFuzzer target: any bytes as a safetensors file are read or refused, never a crash or a leak; and, because chance seldom
 * writes the header's length, as the header of a file of 14 bytes of tensors.
 */
#include "spw_files.h"
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void
try_file(const void *begin, size_t begin_bytes, const uint8_t *data, size_t bytes)
{
    static const char tensors[14];
    char path[64];
    spw_st_reader *r = NULL;
    spw_error err = {0};
    size_t after = begin_bytes > 0 ? sizeof tensors : 0;
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0 || write(fd, begin, begin_bytes) != (ssize_t)begin_bytes || write(fd, data, bytes) != (ssize_t)bytes ||
        write(fd, tensors, after) != (ssize_t)after)
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (spw_st_reader_open(&r, path, &err) == SPW_OK) {
        for (uint32_t i = 0; i < spw_st_reader_count(r); i++) {
            const spw_tensor_info *t = spw_st_reader_tensor(r, i);
            char first[8];
            (void)spw_st_read(r, t, 0, first, t->bytes < sizeof first ? t->bytes : sizeof first, &err);
        }
    }
    spw_st_reader_close(r);
    close(fd);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    uint64_t length = bytes;
    try_file(NULL, 0, data, bytes);
    try_file(&length, sizeof length, data, bytes);
    return 0;
}
