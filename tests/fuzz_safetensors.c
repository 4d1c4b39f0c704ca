/* libFuzzer target: any bytes as a safetensors file are read or refused, never a crash or a leak. */
#include "spw_files.h"
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char path[64];
    spw_st_reader *r = NULL;
    spw_error err = {0};
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0 || write(fd, data, bytes) != (ssize_t)bytes) {
        if (fd >= 0)
            close(fd);
        return 0;
    }
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
    return 0;
}
