/*
 * File systems that this machine does not have, told by what they answer: blocks larger than a page, and blocks that are never written in place.
 * And what is left to the kernel: how a checkpoint's file is opened, and when a silent connection counts as gone.
 */
#include "aio_internal.h"
#include "comm/comm_tcp.h"
#include "lib_tiny.h"
#include "spw_files.h"
#include "spw_offload.h"
#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cmocka.h>

static spw_error err;
static char dir[256];

/* What the file system says; 0: what it is. And what it was told, with the bytes that the file had then. */
static int said_block;
static bool said_copies, told_in_place;
static off_t told_bytes;

int
ioctl(int fd, unsigned long request, ...)
{
    va_list args;
    void *arg;
    struct stat info;
    va_start(args, request);
    arg = va_arg(args, void *);
    va_end(args);
    if (request == FIGETBSZ && said_block != 0) {
        *(int *)arg = said_block;
        return 0;
    }
    if (request == FS_IOC_GETFLAGS && said_copies) {
        *(int *)arg = 0;
        return 0;
    }
    if (request == FS_IOC_SETFLAGS && said_copies) {
        told_in_place = (*(int *)arg & FS_NOCOW_FL) != 0;
        told_bytes = fstat(fd, &info) == 0 ? (off_t)info.st_blocks * 512 + info.st_size : -1;
        return 0;
    }
    return (int)syscall(SYS_ioctl, fd, request, arg);
}

static void
open_file(spw_aio **aio, spw_aio_file **file)
{
    char path[300];
    snprintf(path, sizeof path, "%s/f", dir);
    DONE(spw_aio_create(aio, &(spw_aio_options){.probe_dir = dir}, &err));
    DONE(spw_aio_file_open(file, *aio, path, SPW_AIO_OPEN_READ | SPW_AIO_OPEN_WRITE | SPW_AIO_OPEN_CREATE, &err));
}

/*
 * What goes around the page cache and what goes through it are in different blocks: else one is written back over the other. A block that no
 * bounce buffer has is what a network file system likes, and no unit of its pages.
 */
static void
test_blocks(void **state)
{
    const uint32_t page = (uint32_t)sysconf(_SC_PAGESIZE);
    static const int says[] = {512, 4096, 16384, 65536, 1 << 20};
    spw_aio *aio;
    spw_aio_file *file;
    (void)state;
    open_file(&aio, &file);
    if (!spw_aio_file_direct(file)) {
        spw_aio_file_close(file);
        spw_aio_destroy(aio);
        print_message("no direct I/O in %s\n", dir);
        skip();
    }
    spw_aio_file_close(file);
    spw_aio_destroy(aio);
    for (size_t i = 0; i < sizeof says / sizeof says[0]; i++) {
        uint32_t block = (uint32_t)says[i] <= SPW__AIO_BOUNCE_BYTES_MIN ? (uint32_t)says[i] : 0;
        said_block = says[i];
        open_file(&aio, &file);
        assert_true(spw_aio_file_align(file) >= page && spw_aio_file_align(file) >= block);
        assert_true(block != 0 || spw_aio_file_align(file) <= SPW__AIO_BOUNCE_BYTES_MIN);
        spw_aio_file_close(file);
        spw_aio_destroy(aio);
    }
    said_block = 0;
}

/* Space that was reserved is there for every write, not for the first one alone: told while the file is empty. */
static void
test_in_place(void **state)
{
    spw_aio *aio;
    spw_swap *swap;
    (void)state;
    said_copies = true;
    DONE(spw_aio_create(&aio, &(spw_aio_options){.probe_dir = dir}, &err));
    DONE(spw_swap_open(&swap, aio, dir, "job", 0, 1 << 20, &err));
    assert_true(told_in_place);
    assert_int_equal(told_bytes, 0);
    spw_swap_close(swap);
    spw_aio_destroy(aio);
    said_copies = false;
}

/* How this process has the file open that is written: NFS fetches and sends back whole pages of one that is read, too. */
static void
only_written(const char *path)
{
    DIR *open_files = opendir("/proc/self/fd");
    struct dirent *at;
    uint32_t count = 0;
    assert_non_null(open_files);
    while ((at = readdir(open_files)) != NULL) {
        char link[300], target[600];
        ssize_t n;
        snprintf(link, sizeof link, "/proc/self/fd/%.200s", at->d_name);
        n = readlink(link, target, sizeof target - 1);
        target[n < 0 ? 0 : n] = '\0';
        if (strncmp(target, path, strlen(path)) != 0)
            continue;
        assert_int_equal(fcntl(atoi(at->d_name), F_GETFL) & O_ACCMODE, O_WRONLY);
        count++;
    }
    closedir(open_files);
    assert_true(count >= 2); /* of two writers, and for direct I/O */
}

static void
test_written_alone(void **state)
{
    const spw_tensor_info tensor = {.name = "a", .dtype = SPW_F32, .ndim = 1, .shape = {1024}};
    char path[300];
    spw_bounce *bounce;
    spw_st_writer *first, *second;
    (void)state;
    snprintf(path, sizeof path, "%s/model", dir);
    DONE(spw_bounce_create(&bounce, 2, &err));
    DONE(spw_st_writer_create(&first, path, &tensor, 1, &err));
    DONE(spw_st_writer_join(&second, spw_st_writer_temporary(first), &tensor, 1, &err));
    spw_st_writer_past_cache(first, bounce);
    spw_st_writer_past_cache(second, bounce);
    only_written(path);
    spw_st_writer_destroy(second);
    spw_st_writer_destroy(first);
    spw_bounce_destroy(bounce);
}

/* A host without power says nothing any more: the kernel's own patience with it is two hours. */
static void
test_silence(void **state)
{
    static const struct {
        int level, name, want;
    } options[] = {{SOL_SOCKET, SO_KEEPALIVE, 1},
                   {IPPROTO_TCP, TCP_KEEPIDLE, 20},
                   {IPPROTO_TCP, TCP_KEEPINTVL, 10},
                   {IPPROTO_TCP, TCP_KEEPCNT, 3}};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    (void)state;
    assert_true(fd >= 0);
    spw__tcp_prepare(fd);
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        int is = 0;
        socklen_t bytes = sizeof is;
        assert_int_equal(getsockopt(fd, options[i].level, options[i].name, &is, &bytes), 0);
        assert_int_equal(is, options[i].want);
    }
    close(fd);
}

static int
make_dir(void **state)
{
    (void)state;
    tiny_dir_make(dir);
    return 0;
}

static int
remove_dir(void **state)
{
    (void)state;
    tiny_dir_remove(dir);
    return 0;
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_blocks, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_in_place, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_written_alone, make_dir, remove_dir),
        cmocka_unit_test(test_silence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
