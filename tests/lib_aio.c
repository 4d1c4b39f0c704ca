/* What the tests of aio share; see lib_aio.h. */
#include "lib_aio.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Asks the kernel itself, so that a broken backend is a failure and only a refusing kernel is a reason to skip. */
static bool
kernel_refuses_uring(void)
{
#ifdef SPW_HAVE_URING
    char params[256] = {0}; /* struct io_uring_params and room */
    long fd = syscall(SYS_io_uring_setup, 128, params);
    if (fd >= 0)
        close((int)fd);
    return fd < 0;
#else
    return true;
#endif
}

static int
setup(void **state, spw_aio_backend backend)
{
    const char *tmp = getenv("TMPDIR");
    spw_aio_options options = {.backend = backend};
    spw_error err = {0};
    spw_aio *aio = NULL;
    spw_status st;
    world *w = calloc(1, sizeof *w);
    if (w == NULL)
        return -1;
    snprintf(w->dir, sizeof w->dir, "%s/spw-aio-XXXXXX", tmp != NULL && tmp[0] != '\0' ? tmp : "/tmp");
    if (mkdtemp(w->dir) == NULL)
        return -1;
    w->backend = backend;
    st = spw_aio_create(&aio, &options, &err);
    if (st != SPW_OK)
        print_message("%s\n", err.message);
    w->available = st == SPW_OK;
    spw_aio_destroy(aio);
    *state = w;
    return st == SPW_OK || (backend == SPW_AIO_URING && st == SPW_EUNSUPPORTED && kernel_refuses_uring()) ? 0 : -1;
}

int
aio_test_setup_uring(void **state)
{
    return setup(state, SPW_AIO_URING);
}

int
aio_test_setup_threads(void **state)
{
    return setup(state, SPW_AIO_THREADS);
}

int
aio_test_teardown(void **state)
{
    world *w = *state;
    DIR *dir = opendir(w->dir);
    struct dirent *entry;
    while (dir != NULL && (entry = readdir(dir)) != NULL)
        if (entry->d_name[0] != '.')
            unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir != NULL)
        closedir(dir);
    rmdir(w->dir);
    free(w);
    spw_log_set(NULL, NULL);
    return 0;
}

world *
aio_test_world_or_skip(void **state)
{
    world *w = *state;
    if (!w->available)
        skip();
    return w;
}

const char *
aio_test_path_in(const world *w, const char *name)
{
    static char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", w->dir, name);
    return path;
}

spw_aio *
aio_test_open_with(const world *w, spw_aio_options options)
{
    spw_error err = {0};
    spw_aio *aio = NULL;
    options.backend = w->backend;
    options.probe_dir = w->dir;
    if (spw_aio_create(&aio, &options, &err) != SPW_OK)
        fail_msg("%s", err.message);
    return aio;
}

spw_aio *
aio_test_open(const world *w, uint64_t block_bytes, uint32_t queue_depth)
{
    return aio_test_open_with(w, (spw_aio_options){.block_bytes = block_bytes, .queue_depth = queue_depth});
}

spw_aio_file *
aio_test_file_open(spw_aio *aio, const world *w, const char *name, unsigned more_flags)
{
    spw_error err = {0};
    spw_aio_file *file = NULL;
    if (getenv("SPW_TEST_AIO_BUFFERED") != NULL)
        more_flags |= SPW_AIO_OPEN_BUFFERED;
    if (spw_aio_file_open(&file, aio, aio_test_path_in(w, name),
                          SPW_AIO_OPEN_READ | SPW_AIO_OPEN_WRITE | SPW_AIO_OPEN_CREATE | more_flags, &err) != SPW_OK)
        fail_msg("%s", err.message);
    return file;
}

void
aio_test_submit(spw_aio *aio, spw_aio_request *req)
{
    spw_error err = {0};
    if (spw_aio_submit(aio, req, &err) != SPW_OK)
        fail_msg("%s", err.message);
}

spw_status
aio_test_transfer(spw_aio *aio, spw_aio_file *file, spw_aio_op op, void *buf, uint64_t bytes, uint64_t offset)
{
    spw_aio_request req = {.op = op, .file = file, .buf = buf, .bytes = bytes, .offset = offset};
    aio_test_submit(aio, &req);
    assert_ptr_equal(spw_aio_wait(aio, AIO_TEST_LONG_NS), &req);
    assert_null(spw_aio_poll(aio));
    if (req.status == SPW_OK && op != SPW_AIO_FSYNC)
        assert_int_equal(req.done_bytes, bytes);
    assert_true(req.done_ns >= req.submit_ns);
    return req.status;
}

/* ---------------------------------------------------------------- bytes and numbers */

uint64_t
aio_test_seed_get(void)
{
    const char *text = getenv("SPW_SEED");
    return text != NULL ? strtoull(text, NULL, 0) : 20240117;
}

uint32_t
aio_test_roll(dice *d, uint32_t sides)
{
    uint32_t words[4];
    spw_philox(d->seed, 0, d->count++, words);
    return words[0] % sides;
}

void
aio_test_pattern_fill(unsigned char *p, uint64_t bytes, uint32_t seed)
{
    uint32_t x = seed * 2654435761u + 12345;
    for (uint64_t i = 0; i < bytes; i++) {
        x = x * 1664525u + 1013904223u;
        p[i] = (unsigned char)(x >> 24);
    }
}

unsigned char *
aio_test_buffer_new(uint64_t bytes)
{
    void *p = NULL;
    assert_int_equal(posix_memalign(&p, AIO_TEST_ALIGN, bytes), 0);
    memset(p, 0, bytes);
    return p;
}

int
aio_test_lowest_free_fd(void)
{
    int fd = dup(0);
    close(fd);
    return fd;
}
