/*
 * Who touches what: with SPW_EMULATE_RACES the kernels are compiled with the calls that ThreadSanitizer wants before each access, and
 * races.cpp answers them. It knows what of a GPU orders two accesses of a grid: the order of one thread, __syncthreads() for a block,
 * __syncwarp() for a warp, and nothing for two blocks. Two accesses of a byte, one of them a write, that nothing orders are a
 * race whatever the order of fibers was, so one run of a kernel shows all of them on the way it takes. Shuffles and votes
 * order nothing: CUDA does not promise it.
 */
#ifndef SPW_EMULATE_RACES_H
#define SPW_EMULATE_RACES_H

#include <stddef.h>
#include <stdint.h>

namespace emulate
{
namespace races
{
/* PRODUCT: a warpgroup's product reads, past what threads have written without a fence for it. */
enum access { READ, WRITE, ATOMIC, PRODUCT };
#ifdef SPW_EMULATE_RACES
/* The thread that runs, told by the scheduler. */
struct running {
    uintptr_t stack; /* of its fiber: what lies there is nobody else's */
    size_t stack_bytes;
    uintptr_t slots; /* of warps, by which shuffles go */
    size_t slots_bytes;
    uintptr_t shared; /* dynamic, of each block anew; so are static variables */
    size_t shared_bytes;
    unsigned idx; /* in its block; 32 are a warp */
};
extern running now;
/* In between accesses are the emulation's own. */
void hide();
void show();
/*
 * The thread comes to a barrier of that line, or to what its warp does together there: all that meet are to have come to the same. With
 * SPW_EMULATE_WITHOUT=FILE:LINE a barrier is waited at, and orders nothing.
 */
void at_block(const char *file, int line);
void at_warp(const char *file, int line);
void begin_grid();
void begin_block();
/* All are there; sync_warp() of a __syncwarp() alone, before met(). */
void sync_block();
void sync_warp(unsigned warp);
void met(unsigned warp);
/* What the thread has written is there for products, once others may read it at all. */
void fence();
void touch(const void *p, size_t bytes, access how);
struct hidden {
    hidden()
    {
        hide();
    }
    ~hidden()
    {
        show();
    }
};
/* So far, of all grids. */
unsigned found();
#else
static inline void
at_block(const char *, int)
{
}
static inline void
at_warp(const char *, int)
{
}
static inline void
begin_grid()
{
}
static inline void
begin_block()
{
}
static inline void
sync_block()
{
}
static inline void
sync_warp(unsigned)
{
}
static inline void
met(unsigned)
{
}
static inline void
fence()
{
}
static inline void
touch(const void *, size_t, access)
{
}
struct hidden {
    hidden()
    {
    }
};
#endif
} // namespace races
} // namespace emulate

#endif
