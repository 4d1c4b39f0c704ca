/* lib_aio.h - what the tests of aio share: a folder and a backend for each test, random numbers, byte patterns. */
#ifndef LIB_AIO_H
#define LIB_AIO_H

#include "spw_aio.h"

#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

enum { AIO_TEST_ALIGN = 4096 };
#define AIO_TEST_LONG_NS (60ull * 1000000000u) /* a test that waits this long has failed */

typedef struct world {
    char dir[PATH_MAX - 64];
    spw_aio_backend backend;
    bool available;
} world;

typedef struct dice {
    uint64_t seed, count;
} dice;

int aio_test_setup_uring(void **state);
int aio_test_setup_threads(void **state);
int aio_test_teardown(void **state);
world *aio_test_world_or_skip(void **state);
const char *aio_test_path_in(const world *w, const char *name); /* until the next call */

/* With the world's backend; a failure fails the test. */
spw_aio *aio_test_open_with(const world *w, spw_aio_options options);
spw_aio *aio_test_open(const world *w, uint64_t block_bytes, uint32_t queue_depth);
/* For reading and writing, created; buffered when SPW_TEST_AIO_BUFFERED is set. */
spw_aio_file *aio_test_file_open(spw_aio *aio, const world *w, const char *name, unsigned more_flags);
void aio_test_submit(spw_aio *aio, spw_aio_request *req);
/* Submits, waits for exactly this one, returns its status. */
spw_status
aio_test_transfer(spw_aio *aio, spw_aio_file *file, spw_aio_op op, void *buf, uint64_t bytes, uint64_t offset);

uint64_t aio_test_seed_get(void); /* SPW_SEED, or a fixed one */
uint32_t aio_test_roll(dice *d, uint32_t sides);
void aio_test_pattern_fill(unsigned char *p, uint64_t bytes, uint32_t seed);
unsigned char *aio_test_buffer_new(uint64_t bytes); /* zeroed and aligned; free() */

int aio_test_lowest_free_fd(void); /* to see whether one was left open */

#define ON_EACH_BACKEND(test)                                                                                          \
    {#test " (io_uring)", test, aio_test_setup_uring, aio_test_teardown, NULL},                                        \
    {                                                                                                                  \
#test " (threads)", test, aio_test_setup_threads, aio_test_teardown, NULL                                      \
    }

#endif
